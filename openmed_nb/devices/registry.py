"""The device types in order of priority, the device object for a name, and out-of-memory errors of all devices."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from .._utils.text import describe_error
from ..errors import DeviceUnavailableError
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
    return "mps" if machine.system == "Darwin" else "cuda"


def empty_cache(device: str) -> None:
    """Release cached blocks of a device to the system; no effect on the CPU."""
    get_device(device).empty_cache()


# Texts of torch for a failed allocation that do not contain "out of memory". An empty pattern would match every error.
ALLOCATION_FAILURES = "|".join(
    device_class.allocation_failure_pattern
    for device_class in DEVICE_TYPES.values()
    if device_class.allocation_failure_pattern
)
# "out of memory" is the text of CUDA's allocator, and "MPS backend out of memory" that of MPS (MPSAllocator.mm:286, 297).
OUT_OF_MEMORY_PATTERN = re.compile(f"out of memory|{ALLOCATION_FAILURES}", re.IGNORECASE)
# Start of the messages of torch itself.
TORCH_OOM_PATTERN = re.compile(
    r"(CUDA|HIP|XPU|MPS backend)( error:)? out of memory"
    rf"|((CUDA|cuDNN) error: |\[enforce fail[^\]]*\][^.]*\. )?({ALLOCATION_FAILURES})",
    re.IGNORECASE,
)

SMALLER_BATCH_REMEDY = "Pass a smaller batch_size; nb.sweep() finds one that fits."
SMALLER_MODEL_REMEDY = "Pass a smaller model, or other devices."


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error indicates that a smaller batch could fit.

    MPS raises ``RuntimeError`` instead of ``torch.OutOfMemoryError``, so the text of the error is checked.
    """
    is_torch_failure = isinstance(error, RuntimeError) and OUT_OF_MEMORY_PATTERN.search(str(error)) is not None
    return is_torch_failure or isinstance(error, MemoryError)


def out_of_memory_error(subject: str, device: str, error: BaseException, remedy: str) -> DeviceUnavailableError:
    """Return the error for a subject that does not fit in the memory of a device."""
    is_torch_error = isinstance(error, RuntimeError) and TORCH_OOM_PATTERN.match(str(error))
    # The text of another error may be part of a note.
    reason = describe_error(error) if is_torch_error else type(error).__name__
    return DeviceUnavailableError(f"{subject} does not fit in the memory of {device}: {reason}.", remedy)


@contextmanager
def explain_out_of_memory(subject: str, device: str, remedy: str) -> Iterator[None]:
    """Replace out-of-memory errors in a block by an error that names the subject and a remedy.

    Example:
        >>> with explain_out_of_memory("A batch of 9 rows", "mps", "Pass a smaller batch_size."):
        ...     raise RuntimeError("MPS backend out of memory")
        Traceback (most recent call last):
        ...
        openmed_nb.errors.DeviceUnavailableError: A batch of 9 rows does not fit in the memory of mps: \
MPS backend out of memory. Pass a smaller batch_size.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        # With two devices, the inner block has already replaced the error.
        if isinstance(error, DeviceUnavailableError) or not is_out_of_memory(error):
            raise
        raise out_of_memory_error(subject, device, error, remedy) from error
