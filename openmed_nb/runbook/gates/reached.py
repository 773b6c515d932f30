"""Whether figures reach their gates: pure functions of evidence and gates that return the figures which do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...training.verdict import GROWING
from ..precision.judgement import ROUNDING, TOLERANCES
from .evidence import ANNOTATION, GENERATION, TRAINING, Evidence
from .units import COUNT, DIFFERENCE, HOURS, SHARE, TIMES, WORDS, in_unit

if TYPE_CHECKING:
    from .thresholds import Gates


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
    def row(self) -> tuple[str, str, str, str]:
        """The figure as people read it: its name, its value, its gate, and the threshold."""
        limit = self.limit if self.limit is None or self.unit != TIMES else 1 + self.limit
        return self.name, in_unit(self.unit, self.value), self.gate, "" if limit is None else in_unit(self.unit, limit)

    @property
    def words(self) -> str:
        """The figure without what differs from run to run: its name, its gate, and names that it stands for."""
        if self.unit == WORDS:
            return f"{self.name}: {self.value}"
        return f"{self.name} (gate {self.gate}: {self.row[-1]})" if self.gate else self.name

    def to_dict(self) -> dict[str, Any]:
        """Return the figure as a mapping, ready for JSON."""
        return dict(vars(self))


Figures = tuple[Figure, ...]
Look = Callable[[Evidence, "Gates"], Figures]
"""Returns the figures that reach their gates, none where a rule does not hold."""


def above(value: float | None, name: str, gate: str, gates: Gates, unit: str = SHARE) -> Figures:
    """Return a figure that is above its threshold."""
    limit: float = getattr(gates, gate)
    return (Figure(name, value, unit, gate, limit),) if value is not None and value > limit else ()


def below(value: float | None, name: str, gate: str, gates: Gates, unit: str = SHARE) -> Figures:
    """Return a figure that is below its threshold."""
    limit: float = getattr(gates, gate)
    return (Figure(name, value, unit, gate, limit),) if value is not None and value < limit else ()


def named(values: tuple[str, ...] | None, name: str) -> Figures:
    """Return names that there are, as one figure."""
    return (Figure(name, ", ".join(values), WORDS),) if values else ()


def counted_above_zero(value: int | None, name: str) -> Figures:
    """Return a count that should be 0."""
    return (Figure(name, value, COUNT),) if value else ()


def is_accelerator(evidence: Evidence) -> bool:
    """Tell whether the work was not done on the CPU, which is what devices are compared with."""
    return evidence.kind != "cpu"


def writes_on_mps(evidence: Evidence) -> bool:
    """Tell whether a language model writes on MPS, for which there is MLX."""
    return evidence.task == GENERATION and evidence.kind == "mps"


def wrong_numbers(evidence: Evidence, gates: Gates) -> Figures:
    """Return what is not as on the CPU in float32."""
    return (
        *named(evidence.device_faults, "computed wrongly"),
        *counted_above_zero(evidence.not_numbers, "tokens with NaN or infinity"),
        *below(evidence.entity_agreement, "entities that are the same", "entity_agreement", gates),
        *above(beyond_rounding(evidence), "largest difference of a logit", "logits", gates, DIFFERENCE),
        *above(less_rounding(evidence.recall_loss), "recall lost", "recall_loss", gates),
        *above(evidence.gradients, "largest relative difference of a gradient", "gradients", gates, DIFFERENCE),
    )


def beyond_rounding(evidence: Evidence) -> float | None:
    """Return how far logits are apart, but for what rounding explains.

    As in ``judgement.of_logits``: a larger model adds up more roundings, so up to what 16 bits round the entities decide.
    """
    rounded = evidence.logits is not None and evidence.logits <= (TOLERANCES["float16"].logits or 0.0)
    return None if rounded and evidence.entity_agreement in {None, 1} else evidence.logits


def less_rounding(loss: float | None) -> float | None:
    """Return a loss of recall without the rounding of its own subtraction."""
    return None if loss is None else loss - ROUNDING


def memory_grows(evidence: Evidence, gates: Gates) -> Figures:
    """Return the growth over ten epochs, where the memory curve says that it is one."""
    grows = evidence.memory_verdict == GROWING
    return above(evidence.memory_growth, "growth over ten epochs", "memory_growth", gates) if grows else ()


def no_row_fits(evidence: Evidence, _gates: Gates) -> Figures:
    """Return that not even one row fits into the memory."""
    return (Figure("out of memory at rows", 1, COUNT),) if evidence.out_of_memory_at == 1 else ()


def short_of_memory(evidence: Evidence, gates: Gates) -> Figures:
    """Return that the batch in use does not fit, or hardly does."""
    full, batch = evidence.out_of_memory_at, evidence.batch
    out = (Figure("out of memory at rows", full, COUNT),) if full and batch and batch >= full else ()
    return (*out, *below(evidence.headroom, "memory limit that stays free", "headroom", gates))


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


def little_gain(evidence: Evidence, gates: Gates) -> Figures:
    """Return a speed-up that is too small to be worth a device.

    The threshold is added to 1 because 1.22 - 1 is less than 0.22 in binary.
    """
    speed_up = evidence.speed_up
    if speed_up is None or not is_accelerator(evidence) or speed_up >= 1 + gates.speed_up:
        return ()
    return (Figure("speed-up over the CPU", speed_up, TIMES, "speed_up", gates.speed_up),)


def waits(evidence: Evidence, gates: Gates) -> Figures:
    """Return speed-up and utilisation where both are too small: the device waits."""
    gain, busy = little_gain(evidence, gates), below(evidence.utilisation, "utilisation", "utilisation", gates)
    return (*gain, *busy) if gain and busy else ()


def data_is_fine(evidence: Evidence, gates: Gates) -> bool:
    """Tell whether it was measured that neither data nor copies take much of a step."""
    known = evidence.data_share is not None
    return known and not (slow_data(evidence, gates) or slow_transfer(evidence, gates))


def batch_is_fine(evidence: Evidence, gates: Gates) -> bool:
    """Tell whether it was measured that another batch would gain little."""
    return evidence.knee_gain is not None and evidence.knee_gain <= gates.knee_gain


def waits_for_data(evidence: Evidence, gates: Gates) -> Figures:
    """Return speed-up and utilisation where the device waits, unless data are known to be fine."""
    return () if data_is_fine(evidence, gates) else waits(evidence, gates)


def waits_for_rows(evidence: Evidence, gates: Gates) -> Figures:
    """Return speed-up and utilisation where the device waits and data are fine, unless the batch is known to be fine."""
    fine = batch_is_fine(evidence, gates) or not data_is_fine(evidence, gates)
    return () if fine else waits(evidence, gates)


def slow_data(evidence: Evidence, gates: Gates) -> Figures:
    """Return a share of data that is too large."""
    return above(evidence.data_share, "step spent on waiting for data", "data_share", gates)


def slow_transfer(evidence: Evidence, gates: Gates) -> Figures:
    """Return a share of copies that is too large."""
    return above(evidence.transfer_share, "step spent on copies to the device", "transfer_share", gates)


def synchronises(evidence: Evidence, _gates: Gates) -> Figures:
    """Return where a step waits for the device."""
    return named(evidence.synchronisations, "places where a step waits for the device")


def wrong_batch(evidence: Evidence, gates: Gates) -> Figures:
    """Return how much more throughput there is at the knee, and where that is."""
    gain = above(evidence.knee_gain, "more throughput at the knee", "knee_gain", gates)
    rows = (("rows in use", evidence.batch), ("rows at the knee", evidence.knee))
    return (*gain, *(Figure(name, count, COUNT) for name, count in rows if count is not None)) if gain else ()


def tiny_batch(evidence: Evidence, _gates: Gates) -> Figures:
    """Return that starting operators takes most of the time."""
    return (
        (Figure("batch", "so small that starting operators takes most of the time", WORDS),)
        if evidence.tiny_batch
        else ()
    )


def falls_back(evidence: Evidence, gates: Gates) -> Figures:
    """Return the operators that MPS does not have, where they take too much."""
    if evidence.kind not in {None, "mps"}:
        return ()
    refused = named(evidence.refused_operators, "operators that MPS refuses")
    often = above(evidence.fallback_calls, "calls that fell back", "fallback_calls", gates)
    by_time = above(evidence.fallback_time, "time spent in what fell back", "fallback_time", gates)
    much = often if evidence.fallback_time is None else by_time
    return (*refused, *much, *(named(evidence.fallback_operators, "operators that fell back") if much else ()))


def is_at_work(evidence: Evidence, gates: Gates) -> bool:
    """Tell whether it is the device's own speed that is seen: it is busy, or nothing is left that it could wait for."""
    busy = evidence.utilisation is not None and evidence.utilisation >= gates.utilisation
    return busy or (data_is_fine(evidence, gates) and batch_is_fine(evidence, gates))


def slower(evidence: Evidence, gates: Gates) -> Figures:
    """Return speed-up and utilisation where the device is slower than the CPU although it works."""
    high = evidence.speed_up if evidence.speed_up_high is None else evidence.speed_up_high
    if high is None or high >= 1 or not is_accelerator(evidence) or not is_at_work(evidence, gates):
        return ()
    return speed_figures(evidence, gates, high)


def speed_figures(evidence: Evidence, gates: Gates, speed_up: float) -> Figures:
    """Return speed-up and utilisation of a device that works."""
    busy = evidence.utilisation
    used = () if busy is None else (Figure("utilisation", busy, SHARE, "utilisation", gates.utilisation),)
    return (Figure("speed-up over the CPU", speed_up, TIMES, "speed_up", gates.speed_up), *used)


def too_long(evidence: Evidence, gates: Gates) -> Figures:
    """Return how long the work takes, where that is too long for one computer."""
    return above(evidence.hours_to_do, "time for all texts", "hours", gates, HOURS)


def on_mps_writing(look: Look) -> Look:
    """Return a look that holds only where a language model writes on MPS."""
    return lambda evidence, gates: look(evidence, gates) if writes_on_mps(evidence) else ()


def elsewhere(look: Look) -> Look:
    """Return a look that holds on any other device but the CPU, and for any other task."""

    def looks(evidence: Evidence, gates: Gates) -> Figures:
        return look(evidence, gates) if is_accelerator(evidence) and not writes_on_mps(evidence) else ()

    return looks


def writes_slowly(evidence: Evidence, gates: Gates) -> Figures:
    """Return speed-up and utilisation where little is gained by writing text on MPS, although it works."""
    gain = little_gain(evidence, gates)
    works = writes_on_mps(evidence) and is_at_work(evidence, gates)
    return speed_figures(evidence, gates, evidence.speed_up) if gain and works and evidence.speed_up is not None else ()


def all_is_well(evidence: Evidence, gates: Gates) -> Figures:
    """Return the figures of a device that is worth it, each with its gate."""
    growth = evidence.memory_growth if evidence.task != ANNOTATION else None
    figures = (
        ("speed-up over the CPU", evidence.speed_up, TIMES, "speed_up"),
        ("entities that are the same", evidence.entity_agreement, SHARE, "entity_agreement"),
        ("largest difference of a logit", evidence.logits, DIFFERENCE, "logits"),
        ("memory limit that stays free", evidence.headroom, SHARE, "headroom"),
        ("growth over ten epochs", growth, SHARE, "memory_growth"),
        ("step spent on waiting for data", evidence.data_share, SHARE, "data_share"),
        ("more throughput at the knee", evidence.knee_gain, SHARE, "knee_gain"),
        ("time spent in what fell back", evidence.fallback_time, SHARE, "fallback_time"),
        ("calls that fell back", evidence.fallback_calls, SHARE, "fallback_calls"),
    )
    return tuple(
        Figure(name, value, unit, gate, getattr(gates, gate))
        for name, value, unit, gate in figures
        if value is not None
    )
