"""The memory of each device: what its allocator holds, how it is limited, and how unused blocks are handed back.

With ``backend`` this is the seam to torch. The memory functions of ``torch.mps`` raise on a computer without MPS, those
of ``torch.cuda`` without a GPU, so each device has a class of its own and the chosen device decides which is asked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from .backend import TENSOR_LOCK, import_torch, release_of
from .request import kind_of


@dataclass(frozen=True)
class AllocatorMemory:
    """What an allocator says of its memory, in bytes; ``None`` where torch has no such figure for the device.

    Attributes:
        allocated: What living tensors use.
        reserved: What the process holds of the device: tensors and cached blocks; on MPS all of its Metal memory.
        recommended: What the device should not go beyond; on MPS ``recommendedMaxWorkingSetSize``, on CUDA all it has.
        peak: The most that living tensors used since the figure was last reset.
    """

    allocated: int | None = None
    reserved: int | None = None
    recommended: int | None = None
    peak: int | None = None


class Allocator(Protocol):
    """What can be asked of the memory of a device."""

    def empty_cache(self) -> None:
        """Hand blocks that no tensor uses back to the system; this waits until the device is done."""

    def memory(self) -> AllocatorMemory:
        """Return what the allocator holds; on MPS the question starts the allocator, which then reads its watermarks."""

    def reset_peak(self) -> None:
        """Let the peak begin again at what is allocated now."""

    def limit(self, fraction: float) -> None:
        """Refuse to hold more than this fraction of what the device has, or on MPS of what it recommends."""


class CpuAllocator:
    """The CPU: torch keeps no count of its memory, and no cache."""

    def empty_cache(self) -> None:
        """Do nothing: freed memory went back to the C library already."""

    def memory(self) -> AllocatorMemory:
        """Return no figures."""
        return AllocatorMemory()

    def reset_peak(self) -> None:
        """Do nothing: there is no peak."""

    def limit(self, fraction: float) -> None:
        """Do nothing: torch has no limit here."""


class MpsAllocator:
    """MPS; peaks are counted from torch 2.13 on (pytorch#186748), and only ``torch.accelerator`` tells them."""

    def empty_cache(self) -> None:
        """Drop compiled graphs where torch can, then the blocks, so that those of the graphs go too."""
        mps = import_torch().mps
        with TENSOR_LOCK:
            getattr(mps, "clear_graph_cache", lambda: None)()
            mps.empty_cache()

    def memory(self) -> AllocatorMemory:
        """Return living tensors, all Metal memory of the process, and the recommended most."""
        torch = import_torch()
        with TENSOR_LOCK:
            return AllocatorMemory(
                torch.mps.current_allocated_memory(),
                torch.mps.driver_allocated_memory(),
                torch.mps.recommended_max_memory(),
                torch.accelerator.max_memory_allocated() if self._counts_peaks() else None,
            )

    def reset_peak(self) -> None:
        """Let the peak begin again, where torch counts it."""
        if self._counts_peaks():
            import_torch().accelerator.reset_peak_memory_stats()

    def limit(self, fraction: float) -> None:
        """Set the high watermark, 0 to 2, also after the allocator has started."""
        import_torch().mps.set_per_process_memory_fraction(float(fraction))

    @staticmethod
    def _counts_peaks() -> bool:
        return release_of(import_torch().__version__) >= (2, 13)


@dataclass(frozen=True)
class CudaAllocator:
    """One CUDA GPU, by the name that torch takes, such as ``"cuda:1"``."""

    device: str

    def empty_cache(self) -> None:
        """Hand cached blocks back."""
        torch = import_torch()
        with TENSOR_LOCK, torch.cuda.device(self.device):
            torch.cuda.empty_cache()

    def memory(self) -> AllocatorMemory:
        """Return living tensors, what is reserved, all memory of the GPU, and the peak."""
        cuda = import_torch().cuda
        return AllocatorMemory(
            cuda.memory_allocated(self.device),
            cuda.memory_reserved(self.device),
            cuda.get_device_properties(self.device).total_memory,
            cuda.max_memory_allocated(self.device),
        )

    def reset_peak(self) -> None:
        """Let the peak begin again."""
        import_torch().cuda.reset_peak_memory_stats(self.device)

    def limit(self, fraction: float) -> None:
        """Set the share of the GPU's memory that this process may hold, 0 to 1."""
        torch = import_torch()
        torch.cuda.set_per_process_memory_fraction(float(fraction), torch.device(self.device).index)


def allocator(device: str) -> Allocator:
    """Return the allocator of a device.

    Args:
        device: ``"cpu"``, ``"mps"``, ``"cuda"`` or ``"cuda:N"``, as torch spells it.

    Example:
        >>> allocator("cpu").memory().allocated is None
        True
    """
    kind = kind_of(device)
    return MpsAllocator() if kind == "mps" else CudaAllocator(device) if kind == "cuda" else CpuAllocator()


def empty_cache(device: str) -> None:
    """Hand cached blocks of a device back to the system; nothing to do on the CPU."""
    allocator(device).empty_cache()
