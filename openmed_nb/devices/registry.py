"""The device types in order of priority, and the device object for a name."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from .cpu import Cpu
from .cuda import Cuda
from .device import Device
from .machine import MachineInfo
from .mps import Mps
from .request import device_type

if TYPE_CHECKING:
    import torch

# The order in which ``auto`` tries the device types.
DEVICE_TYPES: dict[str, type[Device]] = {"mps": Mps, "cuda": Cuda, "cpu": Cpu}


@functools.lru_cache(maxsize=64)  # Annotating one short text asks for its device a dozen times.
def get_device(device: str | torch.device) -> Device:
    """Return the device object for a name; a torch device without a class in this package has the defaults."""
    name = str(device)
    return DEVICE_TYPES.get(device_type(name), Device)(name)


def gpu_type(machine: MachineInfo) -> str:
    """Return the GPU type of the machine's operating system: ``"mps"`` on macOS, otherwise ``"cuda"``."""
    return next(name for name, device_class in DEVICE_TYPES.items() if device_class.is_gpu_type_for(machine))
