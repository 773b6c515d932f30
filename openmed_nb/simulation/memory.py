"""Memory of a simulated Mac: bookkeeping of blocks with the rules of the MPS allocator of torch.

- A tensor takes a block of its size, rounded up to a *size class*: 256 bytes, and eight classes between consecutive
  powers of two. A freed block stays in a cache, and is used for the next tensor of the same class.
- The driver memory consists of live and cached blocks. ``empty_cache`` releases the cached blocks.
- The two watermark ratios are read from the environment once, on first use. If they are invalid, every use raises the
  same error (``MPSAllocator.mm:86`` and ``:100``).
- Before torch kept blocks in larger heaps (pytorch#188045), a freed block was used for few other sizes, so that the driver
  memory grew with every new shape. ``has_size_classes = False`` simulates this: a block is used again only for the same
  size.
- A block that would exceed the high watermark first empties the cache, and then raises an error. Above the low
  watermark, a new block empties the cache first.

Not simulated: caches of MPS for graph shapes, and blocks that are reused for smaller tensors.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass

from ..devices.environment import watermark_conflict, watermarks

NO_LIMIT = (
    " Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to disable upper limit for memory allocations"
    " (may cause system failure)."
)

MIN_BLOCK_BYTES = 256
# Up to this RAM size, macOS reserves a third of it, and a quarter of larger sizes.
SMALL_MAC_BYTES = 32 << 30
# "other allocations" of the process, as in error texts of real Macs.
OTHER_ALLOCATIONS = 384 * 1024


@dataclass(frozen=True)
class MacMemory:
    """Memory of a Mac in bytes, which the processor and the GPU share."""

    installed: int

    @property
    def recommended(self) -> int:
        """``recommendedMaxWorkingSetSize``: 2/3 of the RAM up to 32 GiB, and 3/4 above.

        The sources are error texts and logs of Macs. It is 5.33 GiB of 8 GiB and 73,728 MiB of 96 GiB. The newest macOS
        recommends more of a small RAM, 11.84 GiB of 16 GiB (https://github.com/AlexsJones/llmfit/pull/754), and the
        user can set it (``iogpu.wired_limit_mb``).
        """
        return self.installed * 2 // 3 if self.installed <= SMALL_MAC_BYTES else self.installed * 3 // 4

    @property
    def largest_buffer(self) -> int:
        """``maxBufferLength``: 3/4 of the recommended memory, 36 GiB on a Mac with 64 GiB and 27 GiB with 48 GiB.

        Users reported these values (https://github.com/gfx-rs/wgpu/pull/2502,
        https://github.com/exo-explore/exo/issues/1048).
        """
        return self.recommended * 3 // 4


class SimulatedAllocator:
    """Allocator that counts the blocks of live tensors, and raises the errors of a Mac.

    Attributes:
        memory: Memory of the Mac.
        emptied: Number of times that the cache was emptied by request.
        has_size_classes: Whether sizes are rounded up to size classes, and not only to 256 bytes.
        peak: Highest memory of live tensors since the start or ``reset_peak``.
        driver_peak: Highest driver memory since the start or ``reset_peak``.
    """

    def __init__(self, memory: MacMemory, environ: Mapping[str, str]) -> None:
        self.memory = memory
        self.emptied = 0
        self.has_size_classes = True
        self._environ = environ
        self._lock = threading.RLock()
        self._freed: deque[int] = deque()
        self._allocated = 0
        self._cached = 0
        self.peak = 0
        self.driver_peak = 0
        self._cache: Counter[int] = Counter()
        self._conflict: str | None = None
        self._high = 0.0
        self._low = 0.0

    @property
    def initialized(self) -> bool:
        """Whether the watermarks have been read."""
        return self._conflict is not None

    @property
    def allocated(self) -> int:
        """Size in bytes of the blocks of live tensors."""
        with self._lock:
            self._apply_pending_frees()
            return self._allocated

    @property
    def driver_allocated(self) -> int:
        """Size in bytes of the driver memory: live and cached blocks."""
        with self._lock:
            return self.allocated + self._cached

    @property
    def stats(self) -> dict[str, dict[str, dict[str, int]]]:
        """Values of ``torch.accelerator.memory_stats`` by name, pool and kind; MPS supports them since torch 2.13."""
        allocated = {"current": self.allocated, "peak": self.peak}
        reserved = {"current": self.driver_allocated, "peak": self.driver_peak}
        return {"allocated_bytes": {"all": allocated}, "reserved_bytes": {"all": reserved}}

    @property
    def free_and_total(self) -> tuple[int, int]:
        """Values of ``torch.accelerator.get_memory_info`` in bytes."""
        return max(0, self.memory.recommended - self.driver_allocated), self.memory.recommended

    @property
    def limit(self) -> int | None:
        """Limit of the high watermark in bytes, even before it is read; ``None`` if the watermark is 0."""
        high = self._high if self.initialized else watermarks(self._environ)[0]
        return int(high * self.memory.recommended) if high > 0 else None

    def initialize(self) -> None:
        """Read the watermarks on first use."""
        if self._conflict is None:
            self._conflict = watermark_conflict(self._environ)
            self._high, self._low = watermarks(self._environ)
        if self._conflict:
            raise RuntimeError(self._conflict)

    def allocate(self, size: int) -> int:
        """Allocate a block for a tensor, and return its size."""
        with self._lock:
            block = self.check(size)
            if self._cache[block]:
                self._cache[block] -= 1
                self._cached -= block
            self._allocated += block
            self.peak = max(self.peak, self._allocated)
            self.driver_peak = max(self.driver_peak, self._allocated + self._cached)
            return block

    def check(self, size: int) -> int:
        """Return the block size for a tensor, after emptying the cache if the block is new and would exceed a watermark."""
        with self._lock:
            self.initialize()
            if size > self.memory.largest_buffer:
                raise RuntimeError(f"Invalid buffer size: {format_size(size)}")  # MPSAllocator.mm:236
            block = block_size(size) if self.has_size_classes else _round_up(size, MIN_BLOCK_BYTES)
            self._apply_pending_frees()
            if self._cache[block]:
                return block
            low = int(self._low * self.memory.recommended)
            limit = self.memory.installed if self.limit is None else self.limit
            required = self._allocated + OTHER_ALLOCATIONS + block
            if required + self._cached > min(limit, low or limit):
                self._clear_cache()
            if required > limit:
                # MPSAllocator.mm:286, and MPSAllocator.mm:297 without a limit.
                limit_text = "" if self.limit is None else f", max allowed: {format_size(self.limit)}"
                raise RuntimeError(
                    f"MPS backend out of memory (MPS allocated: {format_size(self._allocated)}, "
                    f"other allocations: {format_size(OTHER_ALLOCATIONS)}{limit_text}). "
                    f"Tried to allocate {format_size(block)} on private pool.{NO_LIMIT if limit_text else ''}"
                )
            return block

    def free(self, block: int) -> None:
        """Return a block to the cache later, because a finalizer may call this at any time."""
        self._freed.append(block)

    def empty_cache(self) -> None:
        """Release the cached blocks to the driver."""
        with self._lock:
            self.initialize()
            self._apply_pending_frees()
            self._clear_cache()
            self.emptied += 1

    def set_fraction(self, fraction: float) -> None:
        """Change the high watermark, which is not compared with the low watermark."""
        self.initialize()
        self._high = fraction

    def reset_peak(self) -> None:
        """Reset the peaks to the current values."""
        with self._lock:
            self.peak = self.allocated
            self.driver_peak = self.driver_allocated

    def _apply_pending_frees(self) -> None:
        while self._freed:
            block = self._freed.popleft()
            self._allocated -= block
            self._cache[block] += 1
            self._cached += block

    def _clear_cache(self) -> None:
        self._cache.clear()
        self._cached = 0


def block_size(size: int) -> int:
    """Return the block size in bytes for a tensor: its size class."""
    return _round_up(size, max(MIN_BLOCK_BYTES, 1 << max(0, size.bit_length() - 4)))


def _round_up(size: int, step: int) -> int:
    return -(-size // step) * step


def format_size(count: int) -> str:
    """Format a number of bytes as torch 2.13; earlier releases wrote ``GB`` for ``GiB``."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if count >= 2**power:
            return f"{count / 2**power:.2f} {unit}"
    return f"{count} bytes"
