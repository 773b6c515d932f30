"""Out-of-memory errors: the texts of torch for each device, the sizes in them, and the errors shown to the user."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from .._render.values import JsonMixin, format_bytes
from .._utils.text import describe_error
from ..errors import DeviceUnavailableError
from .registry import DEVICE_TYPES, get_device


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
ACCUMULATE_REMEDY = "Reduce the batch size and increase the number of accumulation steps."


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error indicates that a smaller batch could fit.

    MPS raises ``RuntimeError`` instead of ``torch.OutOfMemoryError``, so the text of the error is checked.
    """
    is_torch_failure = isinstance(error, RuntimeError) and OUT_OF_MEMORY_PATTERN.search(str(error)) is not None
    return is_torch_failure or isinstance(error, MemoryError)


def out_of_memory_error(subject: str, device: str, error: BaseException, remedy: str) -> DeviceUnavailableError:
    """Return the error for a subject that does not fit in the memory of a device.

    Only the text of errors of torch is quoted, because the text of other errors may be part of a note.
    """
    is_torch_error = isinstance(error, RuntimeError) and TORCH_OOM_PATTERN.match(str(error))
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


# Every allocator divides by 1024, including those that print "GB" (MPS before 2.13).
BYTES_BY_UNIT = {"b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}

SIZE = r"(\d+(?:\.\d+)?) ?(bytes|[KMGT]?i?B)\b"

# Sizes in the messages of MPS and of CUDA (c10/cuda/CUDACachingAllocator.cpp).
OOM_FIELD_PATTERNS = {
    "tried": (f"(?:Tried|you tried) to allocate {SIZE}", f"Invalid buffer size: {SIZE}", f"Unable to allocate {SIZE}"),
    "allocated": (f"MPS allocated: {SIZE}", f"{SIZE} is allocated by PyTorch"),
    "outside": (f"other allocations: {SIZE}",),
    "cached": (f"{SIZE} is reserved by PyTorch but unallocated",),
    "process": (f"this process has {SIZE} memory in use",),
    "limit": (f"max allowed: {SIZE}", f"{SIZE} allowed;"),
    "capacity": (f"total capacity of {SIZE}",),
}

# Patterns that identify the device type, in this order; "xpu" is a device type of torch without a class in this package.
DEVICE_PATTERNS = {
    "xpu": r"XPU out of memory",
    **{
        name: device_class.out_of_memory_pattern
        for name, device_class in DEVICE_TYPES.items()
        if device_class.out_of_memory_pattern
    },
}


@dataclass(frozen=True)
class OutOfMemoryDetails(JsonMixin):
    """Sizes in an out-of-memory error in bytes; ``None`` if the error does not contain a size.

    Attributes:
        device: Device type: ``"mps"``, ``"cuda"``, ``"xpu"`` or ``"cpu"``.
        allocated: Memory allocated by torch.
        other_allocated: Other device memory of the process: the cache of torch, and memory outside torch.
        limit: Maximum memory of the process: the limit if one is set, otherwise the capacity of the device.
        requested: Size of the failed allocation.
    """

    device: str
    allocated: int | None = None
    other_allocated: int | None = None
    limit: int | None = None
    requested: int | None = None

    @classmethod
    def parse(cls, error: BaseException) -> OutOfMemoryDetails | None:
        """Return the sizes in an out-of-memory error, or ``None`` for any other error."""
        if not is_out_of_memory(error):
            return None
        text = str(error)
        sizes: dict[str, int] = {}
        for name, patterns in OOM_FIELD_PATTERNS.items():
            for pattern in patterns:
                match = re.search(pattern, text, re.IGNORECASE)
                if match and name not in sizes:
                    sizes[name] = round(float(match[1]) * BYTES_BY_UNIT[match[2][0].lower()])
        matching = (name for name, pattern in DEVICE_PATTERNS.items() if re.search(pattern, text, re.IGNORECASE))
        device = next(matching, "cpu")
        allocated = sizes.get("allocated")
        other = sizes.get("outside", sizes.get("cached"))
        if "process" in sizes and allocated is not None:
            other = max(0, sizes["process"] - allocated)
        return cls(device, allocated, other, sizes.get("limit") or sizes.get("capacity"), sizes.get("tried"))

    def __str__(self) -> str:
        sizes = {
            "requested": self.requested,
            "allocated": self.allocated,
            "in use by other allocations": self.other_allocated,
            "allowed": self.limit,
        }
        details = ", ".join(f"{format_bytes(size)} {name}" for name, size in sizes.items() if size is not None)
        return f"an out-of-memory error on {self.device}{f': {details}' if details else ''}"
