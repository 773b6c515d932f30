"""How full the memory is: a bar for the device, one for the process. Nothing is asked that could start an allocator."""

from __future__ import annotations

from dataclasses import dataclass

from ...devices.allocators import allocator
from ...devices.choice import DeviceChoice
from ...devices.request import kind_of
from ...devices.simulation import shown_device
from ...quantities import in_bytes
from ...training.samples import installed_bytes, resident_bytes


@dataclass(frozen=True)
class MemoryPart:
    """A part of what is used, in bytes."""

    name: str
    size: int

    def __str__(self) -> str:
        return f"{self.name} {in_bytes(self.size)}"


@dataclass(frozen=True)
class MemoryBar:
    """How much is used of something.

    Attributes:
        name: Of what, such as ``"mps"`` or ``"process"``.
        parts: What is used, in the order in which a bar shows it; together they are all that is used.
        limit: What they should not go beyond, in bytes.
        limit_name: What the limit is.
    """

    name: str
    parts: tuple[MemoryPart, ...]
    limit: int
    limit_name: str

    @property
    def used(self) -> int:
        """All that is used, in bytes."""
        return sum(part.size for part in self.parts)

    def percentage(self, size: int) -> float:
        """Return a size as a percentage of the limit, at most 100.

        Example:
            >>> MemoryBar("mps", (), 8, "limit").percentage(2)
            25.0
        """
        return min(100.0, 100 * size / self.limit) if self.limit else 0.0

    @property
    def row(self) -> tuple[str, str, str]:
        """The bar in words: its name, what is used, and of how much.

        Example:
            >>> MemoryBar("mps", (MemoryPart("allocated", 2 << 30),), 8 << 30, "what Metal recommends").row
            ('mps', 'allocated 2.0 GiB', '8.0 GiB, what Metal recommends')
        """
        used = ", ".join(str(part) for part in self.parts)
        return self.name, used, f"{in_bytes(self.limit)}, {self.limit_name}"


LIMIT_NAMES = {"mps": "what Metal recommends", "cuda": "the memory of the GPU"}


def memory_bars(choice: DeviceChoice | None, fraction: float | None = None) -> tuple[MemoryBar, ...]:
    """Return the bars for a device and for this process.

    Args:
        choice: The choice in force. A GPU is asked only after it has computed: the question starts the allocator of MPS,
            which then reads its watermarks for good (torch's ``MPSAllocator.mm``).
        fraction: The share of its memory at which torch refuses more, where there is one.

    Example:
        >>> [bar.name for bar in memory_bars(None)]
        ['process']
    """
    process = MemoryBar("process", (MemoryPart("used", resident_bytes()),), installed_bytes(), "of this computer")
    asked = choice is not None and choice.certain and kind_of(choice.device) != "cpu"
    return (_device_bar(choice.device, fraction), process) if choice is not None and asked else (process,)


def _device_bar(device: str, fraction: float | None) -> MemoryBar:
    memory = allocator(device).memory()
    allocated = memory.allocated or 0
    parts = (
        MemoryPart("allocated", allocated),
        MemoryPart("cached", max(0, (memory.reserved or 0) - allocated)),
    )
    name = LIMIT_NAMES[kind_of(device)]
    limited = f"the limit: {fraction:g} of {name}" if fraction not in (None, 1.0) else name
    return MemoryBar(shown_device(device), parts, int((fraction or 1.0) * (memory.recommended or 0)), limited)
