"""What psutil knows on every system: memory, swap and the battery."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...devices.machine import import_psutil

Numbers = dict[str, Any]
"""Fields of ``Signals`` and their values."""

PLUGGED = {True: "adapter", False: "battery", None: None}
"""The power source, by whether the adapter is plugged in; psutil says ``None`` where it does not know."""


def read_system() -> Numbers:
    """Return available memory and swap in bytes, the power source and the battery; what cannot be read is ``None``.

    Example:
        >>> read_system()["memory_available"] > 0
        True
    """
    psutil = import_psutil()
    battery = _asked(getattr(psutil, "sensors_battery", lambda: None))
    charge = getattr(battery, "percent", None)
    return {
        "memory_available": getattr(_asked(psutil.virtual_memory), "available", None),
        "swap_used": getattr(_asked(psutil.swap_memory), "used", None),
        "power_source": PLUGGED[getattr(battery, "power_plugged", None)],
        "battery": round(charge) if charge is not None and 0 <= charge <= 100 else None,  # noqa: PLR2004 - percent
    }


def _asked(question: Callable[[], Any]) -> Any:
    """Return an answer of psutil, ``None`` where the system does not give it: containers hide files, some have no battery."""
    psutil = import_psutil()
    try:
        return question()
    except (OSError, RuntimeError, NotImplementedError, psutil.Error):
        return None
