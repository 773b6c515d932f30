"""Whether MPS is simulated now, and the words that say so.

A simulated MPS device for computers without one: it computes on the CPU, and says, counts and refuses what MPS does.

This file is light, so that anyone may ask whether a figure was measured under the simulation.
"""

from __future__ import annotations

from ..display import MARK
from .request import canonical

DEFAULT_MEMORY = "8 GiB"
"""The RAM of a simulated Mac where nobody says."""

_ACTIVE: list[object] = []
"""The simulation that is on, if any; there is one for the process, and its tensors belong to the thread that began it."""


def active() -> bool:
    """Tell whether a simulated MPS device is on in this process; torch is not imported for it.

    Returns:
        Whether what ``torch.mps`` answers now is simulated, and must be shown as such.

    Example:
        >>> active()
        False
    """
    return bool(_ACTIVE)


def shown_device(device: str) -> str:
    """Return the name of a device as it is shown with a result: one that is simulated says so.

    Example:
        >>> shown_device("cuda"), shown_device("mps:0")
        ('cuda:0', 'mps')
    """
    name = canonical(device)
    return f"{name}{MARK}" if name == "mps" and active() else name


def shows_simulated(shown: str) -> bool:
    """Tell whether the name of a device, as it is shown with a result, says that it is simulated.

    Example:
        >>> shows_simulated("mps (SIMULATED)"), shows_simulated("mps")
        (True, False)
    """
    return shown.endswith(MARK)
