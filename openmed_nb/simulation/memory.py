"""The memory of a simulated Mac: a pure account of blocks, with the rules of torch's MPS allocator.

- A tensor takes a block as large as its bytes, rounded up to a *size class*: 256 bytes, and eight classes between one
  power of two and the next. A freed block stays in a cache, from which the next tensor of the same class is served.
- What the driver has given is the living blocks and the cached ones. ``empty_cache`` gives the cached ones back.
- The two watermark ratios are read from the environment at the first touch, and then never again: where they are bad,
  every later touch fails like the first (``MPSAllocator.mm:86`` and ``:100``).
- A block that would pass the high watermark first costs the cache, and then it is an error. Above the low watermark a
  new block empties the cache first.

Not simulated: what MPS caches for every new shape of a graph, and blocks that are handed out for smaller tensors.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass

from ..devices.environment import HIGH_WATERMARK_VARIABLE, LOW_WATERMARK_VARIABLE, watermark_conflict, watermarks

NO_LIMIT = (
    " Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to disable upper limit for memory allocations"
    " (may cause system failure)."
)

SMALLEST_BLOCK = 256
SMALL_MAC_BYTES = 32 << 30  # Up to this RAM, macOS keeps a third of it from the GPU, and a quarter of a larger one.
OTHER_ALLOCATIONS = 384 * 1024  # "other allocations" of the process, as in error texts of real Macs.


@dataclass(frozen=True)
class MacMemory:
    """The memory of a Mac, which the processor and the GPU share; in bytes."""

    installed: int

    @property
    def recommended(self) -> int:
        """``recommendedMaxWorkingSetSize``: 2/3 of the RAM up to 32 GiB and 3/4 above, as error texts and logs of Macs show.

        It is 5.33 GiB at 8 and 73,728 MiB at 96. The newest macOS recommends more of a small RAM, 11.84 GiB of 16
        (https://github.com/AlexsJones/llmfit/pull/754), and a person can set it (``iogpu.wired_limit_mb``).
        """
        return self.installed * 2 // 3 if self.installed <= SMALL_MAC_BYTES else self.installed * 3 // 4

    @property
    def largest_buffer(self) -> int:
        """``maxBufferLength``: 3/4 of what is recommended, 36 GiB on a Mac with 64 GiB and 27 GiB on one with 48.

        Users reported these two (https://github.com/gfx-rs/wgpu/pull/2502, https://github.com/exo-explore/exo/issues/1048).
        """
        return self.recommended * 3 // 4


class SimulatedAllocator:
    """Counts the blocks of living tensors, and refuses what a Mac would refuse."""

    def __init__(self, memory: MacMemory, environ: Mapping[str, str]) -> None:
        self.memory = memory
        self.emptied = 0
        self._environ = environ
        self._lock = threading.RLock()
        self._freed: deque[int] = deque()
        self._allocated = self._cached = 0
        # The most that was allocated, and that the driver had given, since the beginning or since reset_peak().
        self.peak = self.driver_peak = 0
        self._cache: Counter[int] = Counter()
        self._conflict: str | None = None
        self._high = self._low = 0.0

    @property
    def initialized(self) -> bool:
        """Whether the watermarks have been read."""
        return self._conflict is not None

    @property
    def allocated(self) -> int:
        """The bytes of the blocks of living tensors."""
        with self._lock:
            self._apply_pending_frees()
            return self._allocated

    @property
    def driver_allocated(self) -> int:
        """The bytes that the driver has given: living blocks and cached ones."""
        with self._lock:
            return self.allocated + self._cached

    @property
    def limit(self) -> int | None:
        """The bytes that the high watermark allows, or would as it stands; ``None`` where it is 0, which means no limit."""
        high = self._high if self.initialized else watermarks(self._environ)[0]
        return int(high * self.memory.recommended) if high > 0 else None

    def initialize(self) -> None:
        """Read the watermarks, if this is the first touch."""
        if self._conflict is None:
            self._conflict = watermark_conflict(
                self._environ.get(HIGH_WATERMARK_VARIABLE), self._environ.get(LOW_WATERMARK_VARIABLE)
            )
            self._high, self._low = watermarks(self._environ)
        if self._conflict:
            raise RuntimeError(self._conflict)

    def allocate(self, size: int) -> int:
        """Take a block for a tensor."""
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
        """Return the bytes of the block that a tensor would take, once the cache is emptied if that makes room for it."""
        with self._lock:
            self.initialize()
            if size > self.memory.largest_buffer:
                raise RuntimeError(f"Invalid buffer size: {format_size(size)}")  # MPSAllocator.mm:236
            block = block_size(size)
            self._apply_pending_frees()
            if not self._cache[block]:
                self._make_room(block)
            return block

    def free(self, block: int) -> None:
        """Give a block back to the cache; a finalizer may call this at any moment, so it is only noted."""
        self._freed.append(block)

    def empty_cache(self) -> None:
        """Give the cached blocks back to the driver."""
        with self._lock:
            self.initialize()
            self._apply_pending_frees()
            self._drop_cache()
            self.emptied += 1

    def set_fraction(self, fraction: float) -> None:
        """Change the high watermark, which is not compared with the low one."""
        self.initialize()
        self._high = fraction

    def reset_peak(self) -> None:
        """Let the peaks begin again at what is there now."""
        with self._lock:
            self.peak, self.driver_peak = self.allocated, self.driver_allocated

    def _make_room(self, block: int) -> None:
        low = int(self._low * self.memory.recommended)
        allowed = self.memory.installed if self.limit is None else self.limit
        wanted = self._allocated + OTHER_ALLOCATIONS + block
        if wanted + self._cached > min(allowed, low or allowed):
            self._drop_cache()
        if wanted > allowed:
            # MPSAllocator.mm:286, and :297 without a limit.
            limit = "" if self.limit is None else f", max allowed: {format_size(self.limit)}"
            raise RuntimeError(
                f"MPS backend out of memory (MPS allocated: {format_size(self._allocated)}, "
                f"other allocations: {format_size(OTHER_ALLOCATIONS)}{limit}). "
                f"Tried to allocate {format_size(block)} on private pool.{NO_LIMIT if limit else ''}"
            )

    def _apply_pending_frees(self) -> None:
        while self._freed:
            block = self._freed.popleft()
            self._allocated -= block
            self._cache[block] += 1
            self._cached += block

    def _drop_cache(self) -> None:
        self._cache.clear()
        self._cached = 0


def block_size(size: int) -> int:
    """Return the bytes of the block for a tensor: its size class."""
    step = max(SMALLEST_BLOCK, 1 << max(0, size.bit_length() - 4))
    return -(-size // step) * step


def format_size(count: int) -> str:
    """Return a number of bytes as torch 2.13 writes it; before 2.13 it wrote ``GB`` for ``GiB``."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if count >= 2**power:
            return f"{count / 2**power:.2f} {unit}"
    return f"{count} bytes"
