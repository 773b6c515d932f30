"""The types of devices, the best first, and the object for the name of a device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .cpu import Cpu
from .cuda import Cuda
from .device import Device
from .mps import Mps

if TYPE_CHECKING:
    import torch

# In the order in which ``auto`` tries them.
DEVICE_TYPES: dict[str, type[Device]] = {"mps": Mps, "cuda": Cuda, "cpu": Cpu}


def parse_device_argument(device: str | torch.device) -> Device:
    """Return what is known of a device; of one that torch has and this package does not know, little."""
    name = str(device)
    return DEVICE_TYPES.get(name.partition(":")[0], Device)(name)
