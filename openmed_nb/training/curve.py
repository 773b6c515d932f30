"""The memory over a training, and the verdict on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ..devices.request import kind_of
from ..devices.simulation import NOTE
from ..interface.display import Report, Shown, Table
from ..quantities import counted, in_bytes
from .holders import Holder
from .pictures import plotting
from .processes import ALONE, TrainingProcess
from .samples import MemorySample
from .verdict import FLAT, GATE_EPOCHS, GROWING, GROWTH_GATE, MINIMUM_STEADY, SAWTOOTH, TOO_SHORT, Trend, judge

MEASURES = {
    "allocated": "memory of tensors",
    "reserved": "memory that the device keeps for the process",
    "resident": "memory of the process",
}
"""What is judged, the surest sign of retained tensors first."""

CAUSES = {
    "allocated": "Tensors are retained",
    "reserved": "No tensor is retained; most likely the device keeps blocks for every new shape of a batch",
    "resident": "No tensor is retained; something else in this process grows",
    "resident on mps": "No tensor is retained; most likely graphs, which MPS compiles for every new shape of a batch",
    "graphs": "Autograd graphs are retained, which take memory of the process also after their backward pass",
}
DETACH = "Keep loss.item() or loss.detach() instead of the loss; nb.who_holds() lists what holds tensors."

PAD = "Pad batches to a few fixed lengths (pytorch#132596, #181213)."

KEEP_FEWER = "Keep fewer of them, or keep them outside of the device; nb.who_holds() lists what holds tensors."

REMEDIES = {
    "allocated": DETACH,
    "graphs": DETACH,
    "reserved": PAD,
    "resident": "Look at lists that collect texts or results.",
    "resident on mps": f"{PAD} Then look at lists that collect texts or results.",
}

ADVICE = {
    SAWTOOTH: "Something takes memory in some epochs and gives it back: look at evaluation, logging and checkpoints.",
    TOO_SHORT: "Train on: the first epoch is warm-up, and a trend needs three more.",
    FLAT: "Nothing to do.",
}


@dataclass(frozen=True, repr=False)
class MemoryCurve(Shown):
    """The samples of a training, and what they mean.

    Attributes:
        device: Where the training ran.
        samples: All samples in order; those with ``boundary`` are judged.
        gate: The growth over ten epochs that is suspect, as a share: 0.26 is 26 %.
        holders: What held more tensors at the last boundary than after the warm-up, the most first.
        limit: The share of ``recommended`` at which torch refuses more: on MPS the high watermark, on CUDA what
            ``limit_memory`` has set; ``None`` where there is none.
        process: Which process of the training this is, where there are several.

    Example:
        >>> sizes = [50, 60, 90, 120, 150, 180]
        >>> samples = [MemorySample(n, 10 * n, 1.0 * n, allocated=size << 20) for n, size in enumerate(sizes, 1)]
        >>> MemoryCurve("mps", tuple(samples)).verdict
        'growing'
    """

    device: str
    samples: tuple[MemorySample, ...] = ()
    gate: float = GROWTH_GATE
    holders: tuple[Holder, ...] = ()
    limit: float | None = None
    process: TrainingProcess = ALONE

    @property
    def boundaries(self) -> tuple[MemorySample, ...]:
        """The samples at the ends of epochs, the warm-up included."""
        return tuple(sample for sample in self.samples if sample.boundary)

    @property
    def steady(self) -> tuple[MemorySample, ...]:
        """The samples at the ends of epochs after the first, in which optimizer states and caches are made."""
        return self.boundaries[1:]

    @property
    def simulated(self) -> bool:
        """Whether any figure comes from the simulated MPS."""
        return any(sample.simulated for sample in self.samples)

    @property
    def measure(self) -> str:
        """The figure that decides the verdict: the first that grows, else the first that is not flat."""
        trends = self.trends
        worst = {name: (GROWING, SAWTOOTH, TOO_SHORT, FLAT).index(trend.kind) for name, trend in trends.items()}
        return min(worst, key=lambda name: worst[name], default="resident")

    @cached_property
    def trends(self) -> dict[str, Trend]:
        """What became of each figure that all steady samples have."""
        series = {name: [getattr(sample, name) for sample in self.steady] for name in MEASURES}
        return {name: judge(sizes, self.gate) for name, sizes in series.items() if None not in sizes}

    @property
    def trend(self) -> Trend:
        """What became of the figure that decides."""
        return self.trends.get(self.measure, judge([]))

    @property
    def verdict(self) -> str:
        """``"flat"``, ``"growing"``, ``"sawtooth"`` or ``"too short to tell"``."""
        return self.trend.kind

    @property
    def reason(self) -> str:
        """Why this verdict, with the figures."""
        steady, trend = self.steady, self.trend
        if len(steady) < MINIMUM_STEADY:
            return f"{counted(len(steady), 'epoch')} after the warm-up."
        first, last = (
            f"{in_bytes(size)} after epoch {sample.epoch}"
            for size, sample in zip((trend.baseline, trend.last), (steady[0], steady[-1]), strict=True)
        )
        pace = {
            GROWING: f"that is {trend.growth:+.0%} in {GATE_EPOCHS} epochs at this pace, and more than {self.gate:.0%} is suspect",
            FLAT: f"it does not keep growing by more than {self.gate:.0%} in {GATE_EPOCHS} epochs",
            SAWTOOTH: f"in between it rose and fell by {trend.spread:.0%}",
            TOO_SHORT: "it rose in the last epochs only",
        }
        return f"{MEASURES[self.measure].capitalize()} went from {first} to {last}; {pace[trend.kind]}."

    @property
    def advice(self) -> str:
        """What to do next."""
        suspect = self.suspect
        if self.verdict != GROWING:
            slow = self.verdict == FLAT and self.trend.total > self.gate
            advice = (
                f"It is {self.trend.total:+.0%} all the same: watch it where you train for longer."
                if slow
                else ADVICE[self.verdict]
            )
            return f"{advice} But {suspect}. {DETACH}" if suspect else advice
        if suspect and not suspect.graphs:
            return f"{CAUSES['allocated']}: {suspect}. {KEEP_FEWER}"
        cause = "graphs" if suspect and self.measure != "allocated" else self.measure
        by_device = f"{cause} on {kind_of(self.device)}"
        cause = by_device if by_device in CAUSES else cause
        return f"{CAUSES[cause]}{f': {suspect}' if suspect else ''}. {REMEDIES[cause]}"

    @property
    def suspect(self) -> Holder | None:
        """What most likely makes the memory grow: what holds most more; if that is no tensor's memory, a list of graphs."""
        grows = self.verdict == GROWING and self.measure == "allocated"
        suspects = [holder for holder in self.holders if holder.graphs or grows]
        return suspects[0] if suspects else None

    def with_sample(self, sample: MemorySample) -> MemoryCurve:
        """Return the curve with one more sample."""
        return replace(self, samples=(*self.samples, sample))

    def with_holders(self, holders: Sequence[Holder]) -> MemoryCurve:
        """Return the curve with what holds more tensors than after the warm-up."""
        return replace(self, holders=tuple(holders))

    def to_dict(self) -> dict[str, Any]:
        """Return samples, trends and verdict as plain mappings, lists, numbers and strings."""
        return {
            "device": self.device,
            "simulated": self.simulated,
            "verdict": self.verdict,
            "reason": self.reason,
            "advice": self.advice,
            "gate": self.gate,
            "limit": self.limit,
            "process": self.process.rank,
            "processes": self.process.count,
            "trends": {name: trend.to_dict() for name, trend in self.trends.items()},
            "holders": [holder.to_dict() for holder in self.holders],
            "samples": [sample.to_dict() for sample in self.samples],
        }

    def plot(self) -> Any:
        """Return a matplotlib figure of the curve with its limits; a notebook shows it.

        Raises:
            ConfigurationError: Where matplotlib is not installed.
        """
        return plotting().draw(self)

    def report(self) -> Report:
        """Return the verdict, why, what to do, and the figures of each epoch."""
        sentences = [self.reason, self.advice]
        sentences += [self.process.sentence] if self.process.sentence else []
        sentences += [NOTE] if self.simulated else []
        columns = ("epoch", "step", "allocated", "reserved", "peak", "resident", "swap", "pressure", "")
        rows = tuple(self._row(sample) for sample in self.boundaries)
        held = tuple(holder.row for holder in self.holders)
        tables = (
            Table("Memory after each epoch", columns, rows),
            Table("What holds more tensors than after the warm-up", ("name", "kind", "tensors", "memory"), held),
        )
        device = f"{self.device} (SIMULATED)" if self.simulated else self.device
        return Report(f"Memory on {device}: {self.verdict}", tuple(sentences), tables=tables)

    def _row(self, sample: MemorySample) -> tuple[str, ...]:
        sizes = (sample.allocated, sample.reserved, sample.peak, sample.resident, sample.swap)
        note = "warm-up" if sample is self.boundaries[0] else ""
        return (str(sample.epoch), str(sample.step), *map(in_bytes, sizes), sample.pressure or "", note)
