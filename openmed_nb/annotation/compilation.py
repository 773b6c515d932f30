"""Trying ``torch.compile`` on a model, and keeping it only where it pays and changes nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..devices.simulation import shown_device
from ..errors import cause
from ..interface.display import Report, Shown
from .decoding import Entity

WORTH = 1.05
"""Compiling is kept where it makes a pass at least so many times faster."""

PASSES = 3
"""How often the texts are read each way, to be timed; the fastest counts."""

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
        seconds = [(timed(plain, clock), timed(compiled, clock)) for _ in range(PASSES)]
    except Exception as error:  # noqa: BLE001 - whatever a compiler fails with; the reason is told
        return Compilation(False, None, f"It does not compile: {cause(error)}.", shown_device(device))
    gain = min(first for first, _ in seconds) / min(second for _, second in seconds)
    return judged(expected, computed, gain, shown_device(device))


def timed(way: Callable[[Sequence[str]], Any], clock: Callable[[], float]) -> float:
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
