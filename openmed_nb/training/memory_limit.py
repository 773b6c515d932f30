"""What a limit on the memory of a device means, in bytes and for the watermarks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..devices.request import kind_of
from ..devices.simulation import NOTE
from ..errors import ConfigurationError, shorten
from ..interface.display import Report, Shown
from ..quantities import in_bytes

LARGEST = {"mps": 2.0, "cuda": 1.0}
"""The largest fraction that torch takes (``torch/mps/__init__.py:105``, ``torch/cuda/memory.py``)."""


@dataclass(frozen=True, repr=False)
class MemoryLimit(Shown):
    """A limit that is in force: torch raises an out-of-memory error before the process holds more.

    Attributes:
        device: The device.
        fraction: The share of what the device recommends (MPS) or has (CUDA); 0 is no limit, on MPS only.
        recommended: That memory in bytes.
        low_watermark: On MPS, the share from which torch collects unused blocks.
        simulated: Whether this is the simulated MPS.
    """

    device: str
    fraction: float
    recommended: int
    low_watermark: float | None = None
    simulated: bool = False

    @property
    def size(self) -> int | None:
        """The limit in bytes, ``None`` where there is none."""
        return int(self.fraction * self.recommended) if self.fraction else None

    def to_dict(self) -> dict[str, Any]:
        """Return the limit as plain numbers and strings."""
        return {**vars(self), "size": self.size}

    def report(self) -> Report:
        """Return the limit in bytes and what it does to the watermarks."""
        most = "no limit: macOS may swap and then stop the process" if self.size is None else in_bytes(self.size)
        sentences = [f"{self.fraction:g} of {in_bytes(self.recommended)}."]
        if self.low_watermark is not None:
            sentences.append(self._watermarks(self.low_watermark))
        sentences += [NOTE] if self.simulated else []
        return Report(f"Memory limit on {self.device}: {most}", tuple(sentences))

    def _watermarks(self, low: float) -> str:
        """Say what torch does below and at the limit (``MPSAllocator.mm``; the low ratio cannot be set live)."""
        high = f"The high watermark is {self.fraction:g} now"
        if not low:
            return f"{high}; the low one is 0, so unused blocks are collected only when memory is short."
        if self.fraction and low > self.fraction:
            return (
                f"{high}, below the low one ({low:g}), so unused blocks are collected only when the limit is reached."
            )
        return f"{high}; from the low one ({low:g}) on, unused blocks are collected."


def check_fraction(device: str, fraction: Any) -> float:
    """Return a fraction that torch takes for a device.

    Raises:
        ConfigurationError: For a device without a limit, or a fraction that is out of its range.

    Example:
        >>> check_fraction("mps", 1), check_fraction("cuda:0", 0.9)
        (1.0, 0.9)
    """
    kind = kind_of(device)
    if kind not in LARGEST:
        raise ConfigurationError(f"torch has no memory limit for {device}.", "Choose batches that fit instead.")
    largest, number = LARGEST[kind], isinstance(fraction, (int, float)) and not isinstance(fraction, bool)
    if not number or not (0 < fraction <= largest or (fraction == 0 and kind == "mps")):
        raise ConfigurationError(
            f"{shorten(repr(fraction))} is no fraction of the memory of {device}.", f"Pass a number up to {largest:g}."
        )
    return float(fraction)
