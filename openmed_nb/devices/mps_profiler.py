"""What ``torch.mps.profiler`` offers on a Mac: signposts for Instruments, and captures of Metal; and why not elsewhere."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from ..errors import ConfigurationError
from .backend import import_torch
from .request import kind_of
from .simulation import active

CAPTURE_SINCE = "2.7"
"""The first torch with ``torch.mps.profiler.metal_capture``."""


def check_signposts(device: str) -> None:
    """Check that torch can write signposts of what runs on a device.

    Raises:
        ConfigurationError: Where it cannot, with the reason.

    Example:
        >>> check_signposts("cpu")
        Traceback (most recent call last):
        ...
        openmed_nb.errors.ConfigurationError: There are no signposts of cpu: torch writes them for MPS alone. \
Leave signposts=True out.
    """
    why = reason_against("signposts", device)
    if why:
        raise ConfigurationError(why, "Leave signposts=True out.")


def check_metal_capture(device: str) -> None:
    """Check that torch can capture the Metal calls of a device.

    Raises:
        ConfigurationError: Where it cannot, with the reason.
    """
    why = reason_against("Metal captures", device)
    if why:
        raise ConfigurationError(why, "Leave metal_capture out.")
    torch = import_torch()
    if not hasattr(torch.mps.profiler, "metal_capture"):
        what = f"torch {torch.__version__} has no torch.mps.profiler.metal_capture."
        raise ConfigurationError(what, f"Install torch {CAPTURE_SINCE} or newer.")
    if not torch.mps.profiler.is_metal_capture_enabled():
        what = "Metal captures are off in this process."
        raise ConfigurationError(what, "Set MTL_CAPTURE_ENABLED=1 in the environment before Python starts.")


def reason_against(what: str, device: str) -> str:
    """Return why torch's profiler of MPS is of no use for a device, empty where it is.

    Example:
        >>> reason_against("signposts", "mps")
        ''
    """
    if kind_of(device) != "mps":
        return f"There are no {what} of {device}: torch writes them for MPS alone."
    return f"There are no {what} of a simulated MPS device." if active() else ""


def signposts() -> AbstractContextManager[Any]:
    """Return a block whose operators on MPS leave signposts, which Instruments records (``torch.mps.profiler.profile``)."""
    block: AbstractContextManager[Any] = import_torch().mps.profiler.profile(mode="interval")
    return block


def metal_capture(name: str) -> AbstractContextManager[Any]:
    """Return a block whose Metal calls are captured under a name (``torch.mps.profiler.metal_capture``), for Xcode."""
    block: AbstractContextManager[Any] = import_torch().mps.profiler.metal_capture(name)
    return block
