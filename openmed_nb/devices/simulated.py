"""Whether MPS is simulated now, and the words that say so; light, so that anyone may ask where a figure comes from."""

from __future__ import annotations

from ..display import MARK
from .request import canonical

DEFAULT_MEMORY = "8 GiB"  # The RAM of a simulated Mac unless a person asks for another.

# The simulation that is on, if any; there is one for the process, and its tensors belong to the thread that began it.
_ACTIVE: list[object] = []


def active() -> bool:
    """Tell whether a simulated MPS device is on in this process; torch is not imported for it."""
    return bool(_ACTIVE)


def shown_device(device: str) -> str:
    """Return the name of a device as it is shown with a result: one that is simulated says so."""
    name = canonical(device)
    return f"{name}{MARK}" if name == "mps" and active() else name


def shows_simulated(shown: str) -> bool:
    """Tell whether the name of a device, as it is shown with a result, says that it is simulated."""
    return shown.endswith(MARK)
