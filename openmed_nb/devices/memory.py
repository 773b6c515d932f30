"""Running out of memory: how torch says it on each device, what its figures mean, and what to say to the person."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from .._render.display import JsonMixin, format_bytes
from .._utils.text import describe_error
from ..errors import DeviceUnavailableError
from .registry import DEVICE_TYPES, parse_device_argument


def empty_cache(device: str) -> None:
    """Hand cached blocks of a device back to the system; nothing to do on the CPU."""
    parse_device_argument(device).empty_cache()


# What torch says instead of "out of memory", on one device or another.
ALLOCATION_FAILURE = "|".join(device.lack_of_memory for device in DEVICE_TYPES.values())
# "out of memory": CUDA's allocator, and "MPS backend out of memory" (MPSAllocator.mm:286, 297).
OUT_OF_MEMORY = re.compile(f"out of memory|{ALLOCATION_FAILURE}", re.IGNORECASE)
# How such messages of torch itself begin.
TORCH_OOM_PATTERN = re.compile(
    r"(CUDA|HIP|XPU|MPS backend)( error:)? out of memory"
    rf"|((CUDA|cuDNN) error: |\[enforce fail[^\]]*\][^.]*\. )?({ALLOCATION_FAILURE})",
    re.IGNORECASE,
)

# What to do about it.
SMALLER_BATCH_REMEDY = "Pass a smaller batch_size; nb.sweep() finds one that fits."
SMALLER_MODEL_REMEDY = "Pass a smaller model, or other devices."
ACCUMULATE_REMEDY = "Where memory ran out, use smaller batches and more of them in a group."


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error means that a smaller batch could work.

    On MPS it is a plain ``RuntimeError``, not ``torch.OutOfMemoryError``, hence the texts.
    """
    said = isinstance(error, RuntimeError) and OUT_OF_MEMORY.search(str(error)) is not None
    return said or isinstance(error, MemoryError)


def out_of_memory_error(what: str, device: str, error: BaseException, remedy: str) -> DeviceUnavailableError:
    """Return the error for what does not fit in the memory of a device; of other errors than torch's the text may be a note."""
    of_torch = isinstance(error, RuntimeError) and TORCH_OOM_PATTERN.match(str(error))
    why = describe_error(error) if of_torch else type(error).__name__
    return DeviceUnavailableError(f"{what} does not fit in the memory of {device}: {why}.", remedy)


@contextmanager
def explain_out_of_memory(what: str, device: str, remedy: str) -> Iterator[None]:
    """Say what does not fit in the memory of a device, and what can be done.

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
        if isinstance(error, DeviceUnavailableError) or not is_out_of_memory(error):  # Of two devices, one has said it.
            raise
        raise out_of_memory_error(what, device, error, remedy) from error


# Every allocator divides by 1024, also those that wrote "GB" (MPS, before 2.13).
UNITS = {"b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}

SIZE = r"(\d+(?:\.\d+)?) ?(bytes|[KMGT]?i?B)\b"

# Where the figures stand: on MPS, and on CUDA (c10/cuda/CUDACachingAllocator.cpp).
OOM_FIELD_PATTERNS = {
    "tried": (f"(?:Tried|you tried) to allocate {SIZE}", f"Invalid buffer size: {SIZE}", f"Unable to allocate {SIZE}"),
    "allocated": (f"MPS allocated: {SIZE}", f"{SIZE} is allocated by PyTorch"),
    "outside": (f"other allocations: {SIZE}",),
    "cached": (f"{SIZE} is reserved by PyTorch but unallocated",),
    "process": (f"this process has {SIZE} memory in use",),
    "limit": (f"max allowed: {SIZE}", f"{SIZE} allowed;"),
    "capacity": (f"total capacity of {SIZE}",),
}

DEVICES = (
    ("mps", r"MPS backend|invalid buffer size"),
    ("xpu", r"XPU out of memory"),
    ("cuda", r"out of memory|CUBLAS|CUDNN"),  # HIP too: torch calls its devices "cuda".
)


@dataclass(frozen=True)
class OutOfMemoryDetails(JsonMixin):
    """What an out-of-memory error says, in bytes; ``None`` where it gives no figure.

    Attributes:
        device: ``"mps"``, ``"cuda"``, ``"xpu"`` or ``"cpu"``.
        allocated: What torch's allocator had given out.
        other: What else the process held of the device: torch's cache, and memory outside of torch.
        allowed: How much the process may hold: the limit where one is set, else what the device has.
        tried: How much was asked for.
    """

    device: str
    allocated: int | None = None
    other_allocated: int | None = None
    limit: int | None = None
    requested: int | None = None

    @classmethod
    def parse(cls, error: BaseException) -> OutOfMemoryDetails | None:
        """Return what an out-of-memory error says; ``None`` for any other error."""
        if not is_out_of_memory(error):
            return None
        text = str(error)
        sizes = {name: _size(text, patterns) for name, patterns in OOM_FIELD_PATTERNS.items()}
        device = next((name for name, words in DEVICES if re.search(words, text, re.IGNORECASE)), "cpu")
        allocated = sizes["allocated"]
        other = sizes["cached"] if sizes["outside"] is None else sizes["outside"]
        if sizes["process"] is not None and allocated is not None:
            other = max(0, sizes["process"] - allocated)
        return cls(device, allocated, other, sizes["limit"] or sizes["capacity"], sizes["tried"])

    def __str__(self) -> str:
        sizes = {
            "wanted": self.requested,
            "allocated": self.allocated,
            "held by others": self.other_allocated,
            "allowed": self.limit,
        }
        figures = ", ".join(f"{format_bytes(size)} {name}" for name, size in sizes.items() if size is not None)
        return f"a lack of memory on {self.device}{f': {figures}' if figures else ''}"


def _size(text: str, patterns: tuple[str, ...]) -> int | None:
    """Return the size that stands at the first of the places that the text has, in bytes."""
    for pattern in patterns:
        if match := re.search(pattern, text, re.IGNORECASE):
            number, unit = match.groups()
            return round(float(number) * UNITS[unit[0].lower()])
    return None
