"""Moving arrays to a device and back without waiting, where that is safe.

Only towards CUDA, from pinned memory, may a copy go on while the program does. Towards MPS such a copy can read memory
that was freed meanwhile, and back from it one can be read before it is there (pytorch#189690, #139550).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch


def array_to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Return an array as a tensor on a device; the copy may still be under way, in order with the work that follows."""
    import torch

    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def towards_host(tensor: torch.Tensor) -> torch.Tensor:
    """Begin to copy a tensor to the host where that can be done without waiting; ``backend.synchronize`` before it is read."""
    return tensor.to("cpu", non_blocking=True) if tensor.is_cuda else tensor


def to_array(tensor: torch.Tensor) -> Any:
    """Return a tensor as an array on the host."""
    return tensor.cpu().numpy()
