"""The Python face of the runbook: is this device right? Each function calls one verb of the session."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..session import SESSION
from . import verbs

if TYPE_CHECKING:
    from ..runbook.signals.values import Signals


def signals() -> Signals:
    """Read load, memory pressure, swap, power source, Low Power Mode and heat of this computer, without administrator rights.

    Returns:
        The signals of this moment; what cannot be read is ``None`` and shown as "not known", never a guess. ``gpu`` is
        the GPU of the device in force. Its text form has the states in words only; the figures stand in the HTML.

    On macOS the system's own commands are asked (``ioreg``, ``sysctl``, ``memory_pressure``, ``pmset``), on CUDA
    ``nvidia-smi``, elsewhere psutil; each may take up to two seconds, and torch is not loaded. Figures of a GPU are those
    of all processes together. Under a simulated MPS device nothing is read.

    Example:
        >>> signals().memory_available > 0
        True
    """
    return verbs.signals(SESSION)
