"""Reading the signals of this computer: psutil on every system, and one function for each kind of computer."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from ...devices.machine import Machine, import_psutil, parse_sysctl, run_command
from ...devices.request import kind_of
from ...training.curve import parse_pressure
from . import macos, nvidia
from .values import Gpu, Signals

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


Run = Callable[[list[str]], str | None]
"""Runs a command and returns what it prints, ``None`` where it cannot be run."""


def read_signals(
    machine: Machine,
    device: str,
    run: Run = run_command,
    environ: Mapping[str, str] = os.environ,
    uuid: str | None = None,
) -> Signals:
    """Read the signals of a computer; nothing is changed, and no command needs administrator rights.

    Args:
        machine: The facts of the computer; of a simulated one nothing is read.
        device: The device whose GPU is asked: ``"mps"``, ``"cuda"``, ``"cuda:N"`` or ``"cpu"``.
        run: Runs a command, in the plain C locale and for at most two seconds.
        environ: The environment variables.
        uuid: What torch says of the CUDA GPU, where it was asked.

    Returns:
        The signals; what cannot be read is ``None``.

    Example:
        >>> read_signals(Machine("Linux", "x86_64"), "cpu", run=lambda command: None).gpu.utilisation is None
        True
    """
    if machine.simulated:
        return Signals(simulated=True)
    read = read_system()
    if machine.system == "Darwin":
        read = {**read, **known(read_mac(run))}
    if kind_of(device) == "cuda":
        read["gpu"] = read_nvidia(device, run, environ, uuid)
    return Signals(chip=machine.chip, **read)


def read_mac(run: Run) -> Numbers:
    """Return what macOS says, by the names of the fields of ``Signals``."""
    facts = parse_sysctl(run(macos.SYSCTL))
    battery, heat = run(macos.BATTERY), run(macos.HEAT)
    return {
        "gpu": macos.parse_ioreg(run(macos.IOREG)),
        "memory_pressure": parse_pressure(facts.get(macos.PRESSURE_LEVEL)),
        "memory_free": macos.parse_free_memory(run(macos.MEMORY_PRESSURE)),
        "swap_used": macos.parse_swap(facts.get(macos.SWAP)),
        "power_source": macos.parse_power_source(battery),
        "battery": macos.parse_battery(battery),
        "power_mode": macos.parse_power_mode(run(macos.POWER_SETTINGS)),
        "heat": macos.parse_heat(heat),
        "speed_limit": macos.parse_speed_limit(heat),
        "performance_cores": macos.parse_cores(facts, macos.PERFORMANCE_CORES),
        "efficiency_cores": macos.parse_cores(facts, macos.EFFICIENCY_CORES),
    }


def read_nvidia(device: str, run: Run, environ: Mapping[str, str], uuid: str | None = None) -> Gpu:
    """Return what the GPU says that torch calls by this name."""
    answers = (nvidia.parse_nvidia_smi(run([path, *nvidia.QUERY])) for path in nvidia.PATHS)
    gpus = next((gpus for gpus in answers if gpus), ())
    return nvidia.chosen_gpu(gpus, device, environ, uuid) or Gpu()


def known(read: Mapping[str, Any]) -> Numbers:
    """Return what could be read.

    Example:
        >>> known({"swap_used": None, "battery": 78})
        {'battery': 78}
    """
    return {name: value for name, value in read.items() if value is not None}
