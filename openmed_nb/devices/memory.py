"""The memory of each device: what its allocator holds, its limit, its cache, and what to say where it is full.

With ``backend`` this is the seam to torch. The memory functions of ``torch.mps`` raise on a computer without MPS, those
of ``torch.cuda`` without a GPU, so each device has a class of its own and the chosen device decides which is asked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from .._render.display import Plain, in_bytes
from .._utils.text import cause
from ..errors import DeviceUnavailable
from .backend import TENSOR_LOCK, import_torch, release_of
from .request import kind_of


@dataclass(frozen=True)
class AllocatorMemory:
    """What an allocator says of its memory, in bytes; ``None`` where torch has no such figure for the device."""

    allocated: int | None = None  # What living tensors use.
    # What the process holds of the device: tensors and cached blocks; on MPS all of its Metal memory.
    reserved: int | None = None
    # What the device should not go beyond; on MPS ``recommendedMaxWorkingSetSize``, on CUDA all it has.
    recommended: int | None = None
    peak: int | None = None  # The most that living tensors used since the figure was last reset.


class Allocator:
    """What can be asked of the memory of a device; this one is the CPU's, of which torch keeps no count and no cache."""

    def empty_cache(self) -> None:
        """Hand blocks that no tensor uses back to the system; this waits until the device is done."""

    def memory(self) -> AllocatorMemory:
        """Return what the allocator holds; on MPS the question starts the allocator, which then reads its watermarks."""
        return AllocatorMemory()

    def reset_peak(self) -> None:
        """Let the peak begin again at what is allocated now."""

    def limit(self, fraction: float) -> None:
        """Refuse to hold more than this fraction of what the device has, or on MPS (0 to 2) of what it recommends."""


class MpsAllocator(Allocator):
    """MPS; peaks are counted from torch 2.13 on (pytorch#186748), and only ``torch.accelerator`` tells them."""

    def empty_cache(self) -> None:
        mps = import_torch().mps
        with TENSOR_LOCK:
            mps.empty_cache()

    def memory(self) -> AllocatorMemory:
        torch = import_torch()
        with TENSOR_LOCK:
            return AllocatorMemory(
                torch.mps.current_allocated_memory(),
                torch.mps.driver_allocated_memory(),
                torch.mps.recommended_max_memory(),
                torch.accelerator.max_memory_allocated() if self._counts_peaks() else None,
            )

    def reset_peak(self) -> None:
        if self._counts_peaks():
            import_torch().accelerator.reset_peak_memory_stats()

    def limit(self, fraction: float) -> None:
        import_torch().mps.set_per_process_memory_fraction(float(fraction))

    @staticmethod
    def _counts_peaks() -> bool:
        return release_of(import_torch().__version__) >= (2, 13)


@dataclass(frozen=True)
class CudaAllocator(Allocator):
    """One CUDA GPU, by the name that torch takes, such as ``"cuda:1"``."""

    device: str

    def empty_cache(self) -> None:
        torch = import_torch()
        with TENSOR_LOCK, torch.cuda.device(self.device):
            torch.cuda.empty_cache()

    def memory(self) -> AllocatorMemory:
        cuda = import_torch().cuda
        return AllocatorMemory(
            cuda.memory_allocated(self.device),
            cuda.memory_reserved(self.device),
            cuda.get_device_properties(self.device).total_memory,
            cuda.max_memory_allocated(self.device),
        )

    def reset_peak(self) -> None:
        import_torch().cuda.reset_peak_memory_stats(self.device)

    def limit(self, fraction: float) -> None:
        torch = import_torch()
        torch.cuda.set_per_process_memory_fraction(float(fraction), torch.device(self.device).index)


def allocator(device: str) -> Allocator:
    """Return the allocator of a device, as torch spells it."""
    kind = kind_of(device)
    return MpsAllocator() if kind == "mps" else CudaAllocator(device) if kind == "cuda" else Allocator()


def empty_cache(device: str) -> None:
    """Hand cached blocks of a device back to the system; nothing to do on the CPU."""
    allocator(device).empty_cache()


REFUSED = (
    r"invalid buffer size"  # one MPS buffer larger than Metal allows (MPSAllocator.mm:236)
    r"|DefaultCPUAllocator: (can't allocate|not enough) memory"  # c10/core/impl/alloc_cpu.cpp
    r"|could not (create|execute) a (primitive|memory)"  # oneDNN on the CPU
    r"|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED"
)
# "out of memory": CUDA's allocator, and "MPS backend out of memory" (MPSAllocator.mm:286, 297).
OUT_OF_MEMORY = re.compile(f"out of memory|{REFUSED}", re.IGNORECASE)
# How such messages of torch itself begin.
TORCH_SAYS = re.compile(
    r"(CUDA|HIP|XPU|MPS backend)( error:)? out of memory"
    rf"|((CUDA|cuDNN) error: |\[enforce fail[^\]]*\][^.]*\. )?({REFUSED})",
    re.IGNORECASE,
)

# What to do about it.
SMALLER_BATCH = "Pass a smaller batch_size; nb.sweep() finds one that fits."
SMALLER_MODEL = "Pass a smaller model, or other devices."
SMALLER_IN_GROUP = "Where memory ran out, use smaller batches and more of them in a group."


def elsewhere(device: str) -> str:
    """Return what else can be used where a model fails on a device."""
    return "another model" if kind_of(device) == "cpu" else "the CPU"


def unload_remedy(device: str) -> str:
    return f"Unload other models first, or use {elsewhere(device)}."


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error means that a smaller batch could work.

    On MPS it is a plain ``RuntimeError``, not ``torch.OutOfMemoryError``, hence the texts.
    """
    said = isinstance(error, RuntimeError) and OUT_OF_MEMORY.search(str(error)) is not None
    return said or isinstance(error, MemoryError)


def does_not_fit(what: str, device: str, error: BaseException, remedy: str) -> DeviceUnavailable:
    """Return the error for what does not fit in the memory of a device; of other errors than torch's the text may be a note."""
    of_torch = isinstance(error, RuntimeError) and TORCH_SAYS.match(str(error))
    why = cause(error) if of_torch else type(error).__name__
    return DeviceUnavailable(f"{what} does not fit in the memory of {device}: {why}.", remedy)


@contextmanager
def out_of_memory_explained(what: str, device: str, remedy: str) -> Iterator[None]:
    """Say what does not fit in the memory of a device, and what can be done.

    Example:
        >>> with out_of_memory_explained("A batch of 9 rows", "mps", "Pass a smaller batch_size."):
        ...     raise RuntimeError("MPS backend out of memory")
        Traceback (most recent call last):
        ...
        openmed_nb.errors.DeviceUnavailable: A batch of 9 rows does not fit in the memory of mps: \
MPS backend out of memory. Pass a smaller batch_size.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, DeviceUnavailable) or not is_out_of_memory(error):  # Of two devices, one has said it.
            raise
        raise does_not_fit(what, device, error, remedy) from error


# Every allocator divides by 1024, also those that wrote "GB" (MPS, before 2.13).
UNITS = {"b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}

SIZE = r"(\d+(?:\.\d+)?) ?(bytes|[KMGT]?i?B)\b"

# Where the figures stand: on MPS, and on CUDA (c10/cuda/CUDACachingAllocator.cpp).
FIGURES = {
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
class OutOfMemory(Plain):
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
    other: int | None = None
    allowed: int | None = None
    tried: int | None = None

    @classmethod
    def parse(cls, error: BaseException) -> OutOfMemory | None:
        """Return what an out-of-memory error says; ``None`` for any other error."""
        if not is_out_of_memory(error):
            return None
        text = str(error)
        found = {name: _size(text, patterns) for name, patterns in FIGURES.items()}
        device = next((name for name, words in DEVICES if re.search(words, text, re.IGNORECASE)), "cpu")
        allocated, total = found["allocated"], found["process"]
        other = found["cached"] if found["outside"] is None else found["outside"]
        if total is not None and allocated is not None:
            other = max(0, total - allocated)
        return cls(device, allocated, other, found["limit"] or found["capacity"], found["tried"])

    def __str__(self) -> str:
        sizes = {
            "wanted": self.tried,
            "allocated": self.allocated,
            "held by others": self.other,
            "allowed": self.allowed,
        }
        figures = ", ".join(f"{in_bytes(size)} {name}" for name, size in sizes.items() if size is not None)
        return f"a lack of memory on {self.device}{f': {figures}' if figures else ''}"


def _size(text: str, patterns: tuple[str, ...]) -> int | None:
    """Return the size that stands at the first of the places that the text has, in bytes."""
    for pattern in patterns:
        if match := re.search(pattern, text, re.IGNORECASE):
            number, unit = match.groups()
            return round(float(number) * UNITS[unit[0].lower()])
    return None
