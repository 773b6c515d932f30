"""Whether figures reach their gates: pure functions of evidence and gates that return the figures which do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ...training.verdict import GROWING
from ..precision.judgement import ROUNDING, TOLERANCES
from .evidence import FIGURES, GENERATION, TRAINING, Evidence, plain, words_of
from .thresholds import NAMES, TIMES, Gates, in_unit

AT_LEAST = frozenset({"speed_up", "utilisation", "entity_agreement", "headroom"})
"""The gates that a figure must reach; beyond the others it must not go."""


@dataclass(frozen=True)
class Figure:
    """A figure that speaks for a recommendation.

    Attributes:
        name: What was measured, in words.
        value: The figure.
        unit: What it counts.
        gate: The name of its threshold; empty where it has none.
        limit: The threshold.
    """

    name: str
    value: Any
    unit: str
    gate: str = ""
    limit: float | None = None

    @property
    def threshold(self) -> float:
        """The threshold as the figure counts: of a speed-up, 1 more, because 1.22 - 1 is less than 0.22 in binary."""
        return (self.limit or 0.0) + (1 if self.unit == TIMES else 0)

    @property
    def row(self) -> tuple[str, str, str, str]:
        """The figure as people read it: its name, its value, its gate, and the threshold."""
        limit = in_unit(self.unit, self.threshold) if self.gate else ""
        return self.name, in_unit(self.unit, self.value), self.gate, limit

    @property
    def words(self) -> str:
        """The figure without what differs from run to run: its name, its gate, and names that it stands for."""
        if self.unit == NAMES:
            return f"{self.name}: {in_unit(NAMES, self.value)}"
        return f"{self.name} (gate {self.gate}: {self.row[-1]})" if self.gate else self.name

    def to_dict(self) -> dict[str, Any]:
        """Return the figure as a mapping, ready for JSON."""
        return {**vars(self), "value": plain(self.value)}


Figures = tuple[Figure, ...]
Look = Callable[[Evidence, Gates], Figures]
"""Returns the figures that reach their gates, none where a rule does not hold."""


def figure_of(evidence: Evidence, name: str) -> Figure:
    """Return a figure without a gate."""
    return Figure(words_of(name), getattr(evidence, name), FIGURES[name][1])


def gated(evidence: Evidence, gates: Gates, gate: str) -> Figure:
    """Return the figure of a gate, which has its name."""
    return Figure(words_of(gate), getattr(evidence, gate), FIGURES[gate][1], gate, getattr(gates, gate))


def beyond(evidence: Evidence, gates: Gates, gate: str) -> Figures:
    """Return the figure of a gate where it is on the wrong side of it; what rounding may have done does not count."""
    figure = gated(evidence, gates, gate)
    if figure.value is None:
        return ()
    apart = figure.threshold - figure.value if gate in AT_LEAST else figure.value - figure.threshold
    return (figure,) if apart > ROUNDING else ()


def told(evidence: Evidence, *names: str) -> Figures:
    """Return those of some figures that say anything: names that there are, counts above 0, and what is so."""
    return tuple(figure_of(evidence, name) for name in names if getattr(evidence, name))


def is_accelerator(evidence: Evidence) -> bool:
    """Tell whether the work was not done on the CPU, which is what devices are compared with."""
    return evidence.kind != "cpu"


def writes_on_mps(evidence: Evidence) -> bool:
    """Tell whether a language model writes on MPS, for which there is MLX."""
    return evidence.task == GENERATION and evidence.kind == "mps"


def wrong_numbers(evidence: Evidence, gates: Gates) -> Figures:
    """Return what is not as on the CPU in float32."""
    return (
        *told(evidence, "device_faults", "not_numbers"),
        *beyond(evidence, gates, "entity_agreement"),
        *(() if is_rounding(evidence) else beyond(evidence, gates, "logits")),
        *beyond(evidence, gates, "recall_loss"),
        *beyond(evidence, gates, "gradients"),
    )


def is_rounding(evidence: Evidence) -> bool:
    """Tell whether rounding explains how far logits are apart.

    As in ``judgement.of_logits``: a larger model adds up more roundings, so up to what 16 bits round the entities decide.
    """
    small = evidence.logits is not None and evidence.logits <= (TOLERANCES["float16"].logits or 0.0)
    return small and evidence.entity_agreement in {None, 1}


def memory_grows(evidence: Evidence, gates: Gates) -> Figures:
    """Return the growth over ten epochs, where the memory curve says that it is one."""
    return beyond(evidence, gates, "memory_growth") if evidence.memory_verdict == GROWING else ()


def no_row_fits(evidence: Evidence, _gates: Gates) -> Figures:
    """Return that not even one row fits into the memory."""
    return told(evidence, "out_of_memory_at") if evidence.out_of_memory_at == 1 else ()


def short_of_memory(evidence: Evidence, gates: Gates) -> Figures:
    """Return that the batch in use does not fit, or hardly does."""
    full, batch = evidence.out_of_memory_at, evidence.batch
    out = told(evidence, "out_of_memory_at") if full and batch and batch >= full else ()
    return (*out, *beyond(evidence, gates, "headroom"))


def short_in_training(evidence: Evidence, gates: Gates) -> Figures:
    """Return that a training step does not fit, or hardly does."""
    if evidence.task != TRAINING:
        return ()
    return no_row_fits(evidence, gates) or short_of_memory(evidence, gates)


def short_without_training(evidence: Evidence, gates: Gates) -> Figures:
    """Return that a batch hardly fits, where a smaller one is all that helps."""
    if evidence.task == TRAINING or no_row_fits(evidence, gates):
        return ()
    return short_of_memory(evidence, gates)


def waits(evidence: Evidence, gates: Gates) -> Figures:
    """Return speed-up and utilisation where both are too small: the device waits."""
    gain, busy = beyond(evidence, gates, "speed_up"), beyond(evidence, gates, "utilisation")
    return (*gain, *busy) if gain and busy and is_accelerator(evidence) else ()


def data_is_fine(evidence: Evidence, gates: Gates) -> bool:
    """Tell whether it was measured that neither data nor copies take much of a step."""
    known = evidence.data_share is not None
    return known and not (slow_data(evidence, gates) or slow_transfer(evidence, gates))


def batch_is_fine(evidence: Evidence, gates: Gates) -> bool:
    """Tell whether it was measured that another batch would gain little."""
    return evidence.knee_gain is not None and not beyond(evidence, gates, "knee_gain")


def waits_for_data(evidence: Evidence, gates: Gates) -> Figures:
    """Return speed-up and utilisation where the device waits, unless data are known to be fine."""
    return () if data_is_fine(evidence, gates) else waits(evidence, gates)


def waits_for_rows(evidence: Evidence, gates: Gates) -> Figures:
    """Return speed-up and utilisation where the device waits and data are fine, unless the batch is known to be fine."""
    fine = batch_is_fine(evidence, gates) or not data_is_fine(evidence, gates)
    return () if fine else waits(evidence, gates)


def slow_data(evidence: Evidence, gates: Gates) -> Figures:
    """Return a share of data that is too large."""
    return beyond(evidence, gates, "data_share")


def slow_transfer(evidence: Evidence, gates: Gates) -> Figures:
    """Return a share of copies that is too large; to the CPU nothing is copied."""
    return beyond(evidence, gates, "transfer_share") if is_accelerator(evidence) else ()


def is_busy(evidence: Evidence, gates: Gates) -> bool:
    """Tell whether it was measured that the device is busy."""
    return evidence.utilisation is not None and not beyond(evidence, gates, "utilisation")


def synchronises(evidence: Evidence, gates: Gates) -> Figures:
    """Return where a step waits for a device that is hardly busy; while it is busy, a loss that is read costs little."""
    idle = beyond(evidence, gates, "utilisation")
    return (*told(evidence, "synchronisations"), *idle) if idle and evidence.synchronisations else ()


def synchronises_beside(evidence: Evidence, gates: Gates) -> Figures:
    """Return where a step waits for the device, where that does not decide."""
    return () if synchronises(evidence, gates) else told(evidence, "synchronisations")


def wrong_batch(evidence: Evidence, gates: Gates) -> Figures:
    """Return how much more throughput there is at the knee, and where that is."""
    gain = beyond(evidence, gates, "knee_gain")
    return (*gain, *told(evidence, "batch", "knee")) if gain else ()


def tiny_batch(evidence: Evidence, gates: Gates) -> Figures:
    """Return that starting operators takes most of the time, unless it is known that no larger batch is faster."""
    return () if batch_is_fine(evidence, gates) else told(evidence, "tiny_batch")


def falls_back(evidence: Evidence, gates: Gates) -> Figures:
    """Return the operators that MPS does not have, where they take too much."""
    if evidence.kind not in {None, "mps"}:
        return ()
    much = beyond(evidence, gates, "fallback_calls" if evidence.fallback_time is None else "fallback_time")
    named = told(evidence, "fallback_operators") if much else ()
    return (*told(evidence, "refused_operators"), *much, *named)


def is_at_work(evidence: Evidence, gates: Gates) -> bool:
    """Tell whether it is the device's own speed that is seen: it is busy, or nothing is left that it could wait for."""
    return is_busy(evidence, gates) or (data_is_fine(evidence, gates) and batch_is_fine(evidence, gates))


def ends_of_speed_up(evidence: Evidence) -> tuple[float, float] | None:
    """Return the ends of the interval of the speed-up as far as they are known; ``None`` where nothing was measured."""
    known = [one for one in (evidence.speed_up_low, evidence.speed_up, evidence.speed_up_high) if one is not None]
    return (min(known), max(known)) if known else None


def gains_little(evidence: Evidence, gates: Gates) -> Figures:
    """Return speed-up and utilisation where the whole interval is below its gate although the device works."""
    ends = ends_of_speed_up(evidence)
    at_most = gated(evidence.but(speed_up=ends and ends[1]), gates, "speed_up")
    if ends is None or ends[1] >= at_most.threshold or not is_at_work(evidence, gates):
        return ()
    busy = () if evidence.utilisation is None else (gated(evidence, gates, "utilisation"),)
    return (replace(at_most, name=words_of("speed_up_high")), *busy)


def too_long(evidence: Evidence, gates: Gates) -> Figures:
    """Return how long the work takes, where that is too long for one computer."""
    return beyond(evidence, gates, "hours")


def on_mps_writing(look: Look) -> Look:
    """Return a look that holds only where a language model writes on MPS."""
    return lambda evidence, gates: look(evidence, gates) if writes_on_mps(evidence) else ()


def elsewhere(look: Look) -> Look:
    """Return a look that holds on any other device but the CPU, and for any other task."""

    def looks(evidence: Evidence, gates: Gates) -> Figures:
        return look(evidence, gates) if is_accelerator(evidence) and not writes_on_mps(evidence) else ()

    return looks


STAYS = (
    "speed_up",
    "entity_agreement",
    "logits",
    "headroom",
    "memory_growth",
    "data_share",
    "knee_gain",
    "fallback_time",
    "fallback_calls",
)
"""The gates of a device that is worth it."""


def all_is_well(evidence: Evidence, gates: Gates) -> Figures:
    """Return the figures of a device that is worth it, each with its gate.

    What is beyond its gate and does not decide is left out, such as a count of fallbacks whose time is known; a speed-up that
    may be on either side stands there.
    """
    compared = STAYS if is_accelerator(evidence) else STAYS[3:]
    known = (gate for gate in compared if getattr(evidence, gate) is not None)
    return tuple(
        gated(evidence, gates, gate) for gate in known if gate == "speed_up" or not beyond(evidence, gates, gate)
    )
