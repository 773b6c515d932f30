"""The rules of the verdict, in order of precedence: wrong numbers, memory, data, batch, fallbacks, speed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import reached
from .areas import BATCH, DATA_PLANE, FALLBACKS, MEMORY, NUMBERS, SPEED, is_enough
from .evidence import Evidence
from .reached import Figures, Look, elsewhere, on_mps_writing

if TYPE_CHECKING:
    from .thresholds import Gates

STAY = "stay on this device"
FIX_DATA = "fix the data plane"
FIX_BATCH = "fix the batch"
CHECKPOINT = "checkpoint / accumulate"
FALL_BACK = "fall back to the CPU for these operators"
MLX = "move to MLX"
REMOTE = "move to a remote pool"
CPU = "compute on the CPU"
MEASURE = "measure first"

RECOMMENDATIONS = (STAY, FIX_DATA, FIX_BATCH, CHECKPOINT, FALL_BACK, MLX, REMOTE, CPU, MEASURE)
"""All that a verdict can recommend."""


@dataclass(frozen=True)
class Rule:
    """One line of the decision matrix.

    Attributes:
        recommendation: What it recommends.
        rank: Where it stands in the order of precedence.
        when: When it holds, in words; names of gates in braces stand for their values.
        look: Returns the figures that speak for it, none where it does not hold.
        do: One thing to do.
        change: What would change it, in words like ``when``.
    """

    recommendation: str
    rank: int
    when: str
    look: Look
    do: str
    change: str

    def said(self, gates: Mapping[str, str]) -> tuple[str, str, str, str]:
        """Return the rule as a row of a table, with the values of gates as people read them."""
        return self.when.format(**gates), self.recommendation, self.do, self.change.format(**gates)


@dataclass(frozen=True)
class Reason:
    """A recommendation with all that speaks for it.

    Attributes:
        recommendation: What is recommended.
        rank: Where it stands in the order of precedence.
        when: What holds, as sentences.
        figures: The figures, each with its gate.
        do: What to do.
        change: What would change it.
    """

    recommendation: str
    rank: int
    when: tuple[str, ...]
    figures: Figures
    do: tuple[str, ...]
    change: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the reason as plain mappings, lists, numbers and strings, ready for JSON."""
        figures = [figure.to_dict() for figure in self.figures]
        lists = {name: list(getattr(self, name)) for name in ("when", "do", "change")}
        return {"recommendation": self.recommendation, "figures": figures, **lists}


WRONG = (
    "fewer than {entity_agreement} of the entities are the same as on the CPU, more than {recall_loss} of the recall is lost, "
    "logits differ by more than {logits} or gradients by more than {gradients}, or NaN appears"
)
RIGHT_AGAIN = (
    "Parity within {entity_agreement} of the entities in float32, such as with another torch or macOS: nb.parity(...)."
)
WAITS = "the device is less than {speed_up} faster than the CPU while it is busy for less than {utilisation}"
BUSY_AGAIN = "A speed-up of {speed_up}, or a utilisation of {utilisation}: nb.compare(...)."

RULES = (
    Rule(
        MEASURE,
        NUMBERS,
        "the doctor found something that failed",
        lambda here, _: reached.named(here.doctor_failures, "failed in nb.doctor()"),
        "Do what nb.doctor() says; what is measured before that is of another computer.",
        "A doctor's report without failures.",
    ),
    Rule(
        CPU,
        NUMBERS,
        WRONG,
        elsewhere(reached.wrong_numbers),
        "Compute on the CPU, or on CUDA where there is one: nb.use('cpu').",
        RIGHT_AGAIN,
    ),
    Rule(
        MLX,
        NUMBERS,
        f"a language model writes on MPS, and {WRONG}",
        on_mps_writing(reached.wrong_numbers),
        "Run the model with MLX, or on the CPU or CUDA.",
        RIGHT_AGAIN,
    ),
    Rule(
        REMOTE,
        MEMORY,
        "memory grows by more than {memory_growth} over ten epochs",
        reached.memory_grows,
        "Find what is retained with nb.who_holds(): a larger host only takes longer to fill. Plan another one until then.",
        "A growth of at most {memory_growth} over ten epochs: nb.epochs(...) and nb.memory_curve().",
    ),
    Rule(
        CHECKPOINT,
        MEMORY,
        "a training step runs out of memory, or leaves less than {headroom} of the limit free",
        reached.short_in_training,
        "Use nb.checkpoint_activations(model), and smaller batches with nb.GradientAccumulation.",
        "At least {headroom} of the memory limit free at the batch in use: nb.sweep(..., training=True).",
    ),
    Rule(
        REMOTE,
        MEMORY,
        "not even one row fits into the memory",
        reached.no_row_fits,
        "Use a device with more memory, a smaller model, or shorter rows.",
        "One row that fits: nb.sweep(...).",
    ),
    Rule(
        FIX_BATCH,
        MEMORY,
        "the batch in use runs out of memory, or leaves less than {headroom} of the limit free",
        reached.short_without_training,
        "Use a smaller batch, such as the one at the knee of the sweep.",
        "At least {headroom} of the memory limit free at the batch in use: nb.sweep(...).",
    ),
    Rule(
        FIX_DATA,
        DATA_PLANE,
        "more than {data_share} of a step is spent on waiting for data",
        reached.slow_data,
        "Read ahead and tokenise once: nb.check_loader(loader) and nb.worker_ladder(...) say how.",
        "At most {data_share} of a step for data: nb.compare(...).",
    ),
    Rule(
        FIX_DATA,
        DATA_PLANE,
        "more than {transfer_share} of a step is spent on copies to the device",
        reached.slow_transfer,
        "Copy fewer and larger batches, and no more than the model reads.",
        "At most {transfer_share} of a step for copies: nb.compare(...).",
    ),
    Rule(
        FIX_DATA,
        DATA_PLANE,
        "a step waits for the device, such as for .item() or .cpu()",
        reached.synchronises,
        "Take results off the device after the step, or every some steps.",
        "No place where a step waits for the device: nb.profile(...).",
    ),
    Rule(
        FIX_DATA,
        DATA_PLANE,
        f"{WAITS}, unless data are known to be fine",
        reached.waits_for_data,
        "Look at the data and the batch before the device: nb.compare(...) splits a step.",
        BUSY_AGAIN,
    ),
    Rule(
        FIX_BATCH,
        BATCH,
        "the knee of the sweep has more than {knee_gain} more throughput than the batch in use",
        reached.wrong_batch,
        "Use the batch at the knee.",
        "At most {knee_gain} more throughput at the knee: nb.sweep(...).",
    ),
    Rule(
        FIX_BATCH,
        BATCH,
        "the batch is so small that starting operators takes most of the time",
        reached.tiny_batch,
        "Use a larger batch: nb.sweep(...) finds one.",
        "A batch that keeps the device busy: nb.profile(...).",
    ),
    Rule(
        FIX_BATCH,
        BATCH,
        f"{WAITS}, and data are fine, unless the batch is known to be",
        reached.waits_for_rows,
        "Use a larger batch: nb.sweep(...) finds one.",
        BUSY_AGAIN,
    ),
    Rule(
        FALL_BACK,
        FALLBACKS,
        "MPS refuses operators, or what fell back takes more than {fallback_time} of the time, or of the calls more than "
        "{fallback_calls} where no times are known",
        reached.falls_back,
        "Compute them on the CPU on purpose, all in one place, or another way; PYTORCH_ENABLE_MPS_FALLBACK=1 before torch "
        "is imported lets them run until then.",
        "At most {fallback_time} of the time in what falls back, such as in a newer torch: nb.fallbacks() and nb.forecast(model).",
    ),
    Rule(
        CPU,
        SPEED,
        "the device is slower than the CPU although it is busy, or although data and batch are fine",
        elsewhere(reached.slower),
        "Compute on the CPU: nb.use('cpu').",
        "A speed-up above 1, such as with a larger model or longer texts: nb.compare(...).",
    ),
    Rule(
        MLX,
        SPEED,
        "a language model writes on MPS, and that is less than {speed_up} faster than the CPU although nothing waits",
        reached.writes_slowly,
        "Run the model with MLX, which is made for that.",
        "A speed-up of {speed_up} over the CPU: nb.compare(...).",
    ),
    Rule(
        REMOTE,
        SPEED,
        "the work takes more than {hours}",
        reached.too_long,
        "Spread the texts over several computers.",
        "Fewer texts, or so many more in a second that they are done in {hours}.",
    ),
)
"""The rules; of those that hold, the first decides."""

STAYING = Rule(
    STAY,
    SPEED,
    "everything that matters was measured, and no other rule holds",
    lambda here, gates: reached.all_is_well(here, gates) if is_enough(here, gates) else (),
    "Nothing to do.",
    "Any figure beyond its gate. Another model, torch, macOS or computer is to be measured anew.",
)
"""What is recommended where no rule holds, and enough is known."""

MEASURING = Rule(
    MEASURE,
    SPEED,
    "no rule holds, and something that matters was not measured",
    lambda _here, _gates: (),
    "Measure what is not known.",
    "What is not known, once it is measured.",
)
"""What is recommended where no rule holds, and too little is known."""

MATRIX = (*RULES, STAYING, MEASURING)
"""The decision matrix, with what is recommended where none of the rules holds."""


def reasons_of(evidence: Evidence, gates: Gates) -> tuple[Reason, ...]:
    """Return the recommendations that have reasons, in order of precedence.

    Rules of one rank that recommend the same are one reason.
    """
    groups: dict[tuple[int, str], list[tuple[Rule, Figures]]] = {}
    for rule in RULES:
        if figures := rule.look(evidence, gates):
            groups.setdefault((rule.rank, rule.recommendation), []).append((rule, figures))
    return tuple(joined(holding, gates) for holding in groups.values()) or (otherwise(evidence, gates),)


def otherwise(evidence: Evidence, gates: Gates) -> Reason:
    """Return what is recommended where no rule holds."""
    figures = STAYING.look(evidence, gates)
    return joined([(STAYING, figures) if figures else (MEASURING, ())], gates)


def joined(holding: list[tuple[Rule, Figures]], gates: Gates) -> Reason:
    """Return rules that hold and recommend the same as one reason."""
    first, shown = holding[0][0], gates.shown()
    whens, _, dos, changes = zip(*(rule.said(shown) for rule, _ in holding), strict=True)
    figures = dict.fromkeys(figure for _, found in holding for figure in found)
    return Reason(first.recommendation, first.rank, unique(whens), tuple(figures), unique(dos), unique(changes))


def unique(sentences: tuple[str, ...]) -> tuple[str, ...]:
    """Return sentences, each once, in order."""
    return tuple(dict.fromkeys(sentences))
