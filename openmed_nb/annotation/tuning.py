"""Measure the best size of a batch for annotating, and compile where it pays."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ..devices.backend import TENSOR_LOCK, synchronize, to_array
from ..devices.memory import empty_cache, is_out_of_memory
from ..devices.simulated import shown_device
from ..display import Report, Shown, Table
from ..errors import cause
from .decoding import Entity
from .forward import Network

LADDER = tuple(256 * 2**power for power in range(9))
"""The numbers of tokens that are tried, from the smallest up."""

LENGTH = 128
"""How long the rows are that are tried."""

GAIN = 1.03
"""A larger batch must be so many times faster to be worth its memory."""


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
        """The smallest batch that no larger one beats by much.

        Example:
            >>> Calibration("cpu", ((256, 900.0), (512, 1000.0), (1024, 1010.0))).batch_tokens
            512
        """
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
            speed = measured_speed(network, max(1, tokens // length), length)
            if speed == 0 and speeds:
                break
            speeds.append((tokens, speed))
            if len(speeds) > 2 and all(one[1] <= GAIN * speeds[-3][1] for one in speeds[-2:]):  # noqa: PLR2004
                break
    return Calibration(shown_device(str(network.model.device)), tuple(speeds))


def measured_speed(network: Network, rows: int, length: int) -> float:
    """Return how many tokens per second run in batches of a shape, 0 where these do not fit in memory."""
    ids = np.full((rows, length), network.frame.padding, np.int64)
    values = {"input_ids": ids, "token_type_ids": np.zeros_like(ids), "attention_mask": np.ones_like(ids)}
    inputs = {name: array for name, array in values.items() if name in network.inputs}
    try:
        seconds = min(timed(lambda: finish(network, inputs)) for _ in range(3))
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        empty_cache(str(network.model.device))
        return 0.0
    return rows * length / seconds


def finish(network: Network, inputs: dict[str, np.ndarray]) -> None:
    """Run a batch to its end."""
    outputs = network(inputs)
    synchronize(network.model.device)
    for tensor in outputs:
        to_array(tensor)


def timed(function: Callable[[], None]) -> float:
    """Return how long a function takes, in seconds."""
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


WORTH = 1.05
"""Compiling is kept where it makes a pass at least so many times faster."""

PASSES = 3
"""How often the texts are read each way, to be seconds_of_pass; the fastest counts."""

TEXTS = (
    "No known drug allergies.",
    "Patient with type 2 diabetes mellitus and hypertension, admitted for chest pain.",
    "History of asthma and atrial fibrillation. She denies fever, cough or weight loss. Family history of breast cancer.",
    "The patient was diagnosed with rheumatoid arthritis, chronic kidney disease and iron deficiency anaemia. " * 8,
)
"""What both ways read: of several lengths, so that the compiled model meets several shapes."""


@dataclass(frozen=True, repr=False)
class Compilation(Shown):
    """What came of compiling a model.

    Attributes:
        kept: Whether the compiled model is used.
        gain: How many times faster it was; ``None`` where it did not run.
        reason: Why it is kept or not.
        device: The device that it was tried on.
    """

    kept: bool
    gain: float | None
    reason: str
    device: str

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes as a mapping."""
        return asdict(self)

    def report(self) -> Report:
        """Return what came of it in two lines."""
        kept = "is used" if self.kept else "is not used"
        return Report(f"torch.compile {kept} on {self.device}", (self.reason,))


def judged(expected: Sequence[Any], computed: Sequence[Any], gain: float, device: str) -> Compilation:
    """Return whether a compiled model is kept, from what both ways found and how much faster it was.

    Example:
        >>> judged([("asthma", 0, 6)], [("asthma", 0, 6)], 1.4, "cpu").reason
        'It finds the same 1 entities 1.40 times faster.'
        >>> judged([("asthma", 0, 6)], [], 1.4, "cpu").reason
        'It finds other entities: 0 instead of 1, or at other places.'
    """
    if list(expected) != list(computed):
        what = f"It finds other entities: {len(computed)} instead of {len(expected)}, or at other places."
        return Compilation(False, gain, what, device)
    if gain < WORTH:
        return Compilation(False, gain, f"It finds the same entities, but only {gain:.2f} times as fast.", device)
    return Compilation(True, gain, f"It finds the same {len(expected)} entities {gain:.2f} times faster.", device)


def compare(
    plain: Callable[[Sequence[str]], Any],
    compiled: Callable[[Sequence[str]], Any],
    device: str,
    clock: Callable[[], float] = time.perf_counter,
) -> Compilation:
    """Run texts both ways, in turn, and return what came of it.

    Compiling can fail in any way, for want of a C++ compiler above all; then the model runs as it did before.
    """
    try:
        computed = places(compiled(TEXTS))  # This is where it is compiled.
        expected = places(plain(TEXTS))
        seconds = [(seconds_of_pass(plain, clock), seconds_of_pass(compiled, clock)) for _ in range(PASSES)]
    except Exception as error:  # noqa: BLE001 - whatever a compiler fails with; the reason is told
        return Compilation(False, None, f"It does not compile: {cause(error)}.", shown_device(device))
    gain = min(first for first, _ in seconds) / min(second for _, second in seconds)
    return judged(expected, computed, gain, shown_device(device))


def seconds_of_pass(way: Callable[[Sequence[str]], Any], clock: Callable[[], float]) -> float:
    """Return how long one way takes for the texts, in seconds."""
    begin = clock()
    way(TEXTS)
    return clock() - begin


def places(answers: Sequence[Sequence[Entity]]) -> list[tuple[int, int, int, str]]:
    """Return text, start, end and label of each entity."""
    return [
        (number, entity["start"], entity["end"], str(entity.get("entity_group", entity.get("entity"))))
        for number, entities in enumerate(answers)
        for entity in entities
    ]
