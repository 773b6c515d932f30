"""Measure the best size of a batch for annotating, and compile where it pays."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..devices.backend import TENSOR_LOCK, synchronize, to_array
from ..devices.linear import best_seconds
from ..devices.memory import empty_cache, is_out_of_memory
from ..devices.simulated import shown_device
from ..display import Report, Shown, Table
from ..errors import cause
from .forward import Network
from .results import Entity, span_of

# The numbers of tokens that are tried, from the smallest up, and how long the rows are.
LADDER = tuple(256 * 2**power for power in range(9))
LENGTH = 128

# A larger batch must be this many times faster to be worth its memory.
GAIN = 1.03

# Compiling is kept if it makes a pass at least this many times faster. The fastest of PASSES passes each way counts.
WORTH = 1.05
PASSES = 3

# What both ways read: of several lengths, so that the compiled model meets several shapes.
TEXTS = (
    "No known drug allergies.",
    "Patient with type 2 diabetes mellitus and hypertension, admitted for chest pain.",
    "History of asthma and atrial fibrillation. She denies fever, cough or weight loss. Family history of breast cancer.",
    "The patient was diagnosed with rheumatoid arthritis, chronic kidney disease and iron deficiency anaemia. " * 8,
)


@dataclass(frozen=True, repr=False)
class Calibration(Shown):
    """How fast a model is with batches of several sizes.

    Attributes:
        device: The device that was measured.
        speeds: Pairs of tokens at once and tokens per second.
    """

    device: str
    speeds: tuple[tuple[int, float], ...]

    @property
    def batch_tokens(self) -> int:
        """The smallest batch that no larger one beats by much."""
        best = self.speeds[0]
        for tokens, speed in self.speeds[1:]:
            best = (tokens, speed) if speed > GAIN * best[1] else best
        return best[0]

    def to_dict(self) -> dict[str, Any]:
        """Return device, choice and speeds as plain mappings and numbers."""
        return {"device": self.device, "batch_tokens": self.batch_tokens, "tokens_per_second": dict(self.speeds)}

    def report(self) -> Report:
        """Return the choice, and a table of the speeds."""
        rows = tuple((f"{tokens:,}", f"{speed:,.0f}") for tokens, speed in self.speeds)
        table = Table("Measured", ("tokens at once", "tokens per second"), rows)
        return Report(f"{self.batch_tokens:,} tokens at once on {self.device}", tables=(table,))


def calibrate(network: Network, longest: int) -> Calibration:
    """Measure a model on its device with batches of several sizes, until larger ones gain nothing or do not fit.

    Args:
        network: The model.
        longest: The most tokens that it takes.
    """
    length = min(LENGTH, longest)
    speeds: list[tuple[int, float]] = []
    with TENSOR_LOCK:
        for tokens in LADDER:
            speed = tokens_per_second(network, max(1, tokens // length), length)
            if speed == 0 and speeds:
                break
            speeds.append((tokens, speed))
            if len(speeds) > 2 and all(one[1] <= GAIN * speeds[-3][1] for one in speeds[-2:]):  # noqa: PLR2004
                break
    return Calibration(shown_device(str(network.model.device)), tuple(speeds))


def tokens_per_second(network: Network, rows: int, length: int) -> float:
    """Return how many tokens per second run in batches of a shape, 0 if these do not fit in memory."""
    inputs, device = network.full_rows(rows, length), network.model.device

    def run() -> None:
        outputs = network(inputs)
        synchronize(device)
        for tensor in outputs:
            to_array(tensor)

    try:
        return rows * length / best_seconds(run, times=3)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        empty_cache(str(device))
        return 0.0


@dataclass(frozen=True, repr=False)
class Compilation(Shown):
    """What came of compiling a model.

    Attributes:
        kept: Whether the compiled model is used.
        gain: How many times faster it was; ``None`` if it did not run.
        reason: Why it is kept or not.
        device: The device that it was tried on.
    """

    kept: bool
    gain: float | None
    reason: str
    device: str

    def report(self) -> Report:
        """Return what came of it in two lines."""
        kept = "is used" if self.kept else "is not used"
        return Report(f"torch.compile {kept} on {self.device}", (self.reason,))


Way = Callable[[Sequence[str]], Sequence[Sequence[Entity]]]


def compare(plain: Way, compiled: Way, device: str, clock: Callable[[], float] = time.perf_counter) -> Compilation:
    """Read texts both ways, in turn, and return what came of it.

    Compiling can fail in any way, for want of a C++ compiler above all; then the model runs as it did before.
    """
    device = shown_device(device)

    def spans(way: Way) -> list[tuple[int, int, int, str]]:
        return [(number, *span_of(entity)) for number, entities in enumerate(way(TEXTS)) for entity in entities]

    def seconds(way: Way) -> float:
        begin = clock()
        way(TEXTS)
        return clock() - begin

    try:
        computed, expected = spans(compiled), spans(plain)  # The first call compiles.
        passes = [(seconds(plain), seconds(compiled)) for _ in range(PASSES)]
    except Exception as error:  # noqa: BLE001 - whatever a compiler fails with becomes the reason
        return Compilation(False, None, f"It does not compile: {cause(error)}.", device)
    gain = min(first for first, _ in passes) / min(second for _, second in passes)
    if expected != computed:
        what = f"It finds other entities: {len(computed)} instead of {len(expected)}, or at other places."
        return Compilation(False, gain, what, device)
    if gain < WORTH:
        return Compilation(False, gain, f"It finds the same entities, but only {gain:.2f} times as fast.", device)
    return Compilation(True, gain, f"It finds the same {len(expected)} entities {gain:.2f} times faster.", device)
