"""What must be measured before a device can be called right: each with how to measure it, in order of precedence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...training.verdict import TOO_SHORT
from .evidence import ANNOTATION, TRAINING, Evidence
from .reached import batch_is_fine, data_is_fine, is_accelerator

if TYPE_CHECKING:
    from .thresholds import Gates

NUMBERS, MEMORY, DATA_PLANE, BATCH, FALLBACKS, SPEED = range(6)
"""The order of precedence: wrong numbers beat everything."""

RANKS = ("numbers", "memory", "data", "batch", "fallbacks", "speed")


AT_KNEE = "nb.sweep(model), and nb.compare(model, texts, batch_size=...) with its knee"


@dataclass(frozen=True)
class Area:
    """Something that a verdict rests on.

    Attributes:
        name: What it is.
        rank: Where it stands in the order of precedence.
        command: How to measure it.
        known: Tells whether it was measured.
        matters: Tells whether it can change this verdict.
        needed: Whether a verdict is unsure without it, where it matters.
    """

    name: str
    rank: int
    command: str
    known: Callable[[Evidence, Gates], bool]
    matters: Callable[[Evidence, Gates], bool] = lambda _evidence, _gates: True
    needed: bool = True

    def to_dict(self) -> dict[str, str]:
        """Return what was not measured, and how to, ready for JSON."""
        return {"name": self.name, "command": self.command}


def numbers_are_known(evidence: Evidence, gates: Gates) -> bool:
    """Tell whether it is known that the numbers are right, or that they are not.

    For entities only parity tells. A model of the person's own has none, so its logits, or the doctor's probes, stand for it.
    """
    if evidence.entity_agreement is not None:
        return True
    small = evidence.logits is not None and evidence.logits <= gates.logits
    return evidence.task != ANNOTATION and (small or evidence.silent_errors == ())


def memory_is_known(evidence: Evidence, _gates: Gates) -> bool:
    """Tell whether it is known how much memory the batch in use takes."""
    return evidence.headroom is not None or bool(evidence.out_of_memory_at and evidence.batch)


def growth_is_known(evidence: Evidence, _gates: Gates) -> bool:
    """Tell whether there were enough epochs to tell whether memory grows."""
    return evidence.memory_growth is not None and evidence.memory_verdict not in {None, TOO_SHORT}


def fallbacks_are_known(evidence: Evidence, gates: Gates) -> bool:
    """Tell whether it is known that nothing falls back, or how much that costs."""
    few = evidence.fallback_calls is not None and evidence.fallback_calls <= gates.fallback_calls
    return evidence.fallback_operators == () or evidence.fallback_time is not None or few


def utilisation_matters(evidence: Evidence, gates: Gates) -> bool:
    """Tell whether it must be known if a device waits: it gains little, and data or batch may be why."""
    gains = evidence.speed_up is not None and evidence.speed_up >= 1 + gates.speed_up
    fine = data_is_fine(evidence, gates) and batch_is_fine(evidence, gates)
    return is_accelerator(evidence) and not (gains or fine)


def on_accelerator(evidence: Evidence, _gates: Gates) -> bool:
    """Tell whether there is a CPU to compare with."""
    return is_accelerator(evidence)


AREAS = (
    Area("device", NUMBERS, "nb.compare(model, texts)", lambda here, _: here.device is not None),
    Area("task", NUMBERS, "nb.verdict(..., task='annotation')", lambda here, _: here.task is not None),
    Area("parity", NUMBERS, "nb.parity(model, texts)", numbers_are_known, on_accelerator),
    Area("memory", MEMORY, AT_KNEE, memory_is_known),
    Area(
        "growth of memory",
        MEMORY,
        "nb.epochs(...) and then nb.memory_curve()",
        growth_is_known,
        lambda here, _: here.task == TRAINING,
    ),
    Area("waiting for data", DATA_PLANE, "nb.compare(model, texts)", lambda here, _: here.data_share is not None),
    Area("best batch", BATCH, AT_KNEE, lambda here, _: here.knee_gain is not None),
    Area(
        "cost of fallbacks",
        FALLBACKS,
        "nb.fallbacks() or nb.profile(model)",
        fallbacks_are_known,
        lambda here, _: here.kind == "mps",
    ),
    Area("speed-up", SPEED, "nb.compare(model, texts)", lambda here, _: here.speed_up is not None, on_accelerator),
    Area(
        "utilisation",
        SPEED,
        "nb.compare(model, texts)",
        lambda here, _: here.utilisation is not None,
        utilisation_matters,
    ),
    Area("doctor", SPEED, "nb.doctor()", lambda here, _: here.doctor_failures is not None, needed=False),
    Area(
        "waiting for the device",
        SPEED,
        "nb.profile(model)",
        lambda here, _: here.synchronisations is not None,
        needed=False,
    ),
    Area("power and heat", SPEED, "nb.signals()", lambda here, _: here.states is not None, needed=False),
)
"""Everything that a verdict rests on."""


def unmeasured(evidence: Evidence, gates: Gates) -> tuple[Area, ...]:
    """Return what matters and was not measured."""
    return tuple(one for one in AREAS if one.matters(evidence, gates) and not one.known(evidence, gates))


def is_enough(evidence: Evidence, gates: Gates) -> bool:
    """Tell whether everything was measured that a device must pass."""
    return not any(one.needed for one in unmeasured(evidence, gates))
