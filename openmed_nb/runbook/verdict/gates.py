"""``nb.runbook.gates``: the thresholds of a verdict, each with its reason, and the decision matrix that asks for them."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from ..._render.display import Report, Shown, Table, counted, to_text
from ..._utils.text import describe_value
from ..._utils.validation import number, offered
from ...errors import ConfigurationError
from ...models.certificates import RECALL_LOSS, SPAN_AGREEMENT
from ...training.curve import GATE_EPOCHS, GROWING, GROWTH_GATE
from ..bench.sweep_knee import KNEE_GAIN
from ..bench.sweep_measurement import HEADROOM_SHARE
from ..bench.workloads import ANNOTATION, DATA_SHARE, TOKENISE_MORE
from ..checks.precision.report import TOLERANCES
from .evidence import DIFFERENCE, FIGURES, HOURS, SHARE, TRAINING, Area, Case, Figures, in_unit

# How many characters a line of the text form has at most, but for the spaces between columns.
WIDTH = 108

# What a person sees, the likely cause, what to look at, with which tool, and who reported it.
SYMPTOMS = json.loads(Path(__file__).with_name("symptoms.json").read_text("utf-8"))

# Who says so.
OWN, RUNBOOK, PARITY = "a choice of this toolkit", "the runbook", "as nb.runbook.parity judges it"
SEEN = "several times the largest difference that was seen where nothing was wrong"


def threshold(  # noqa: PLR0913, PLR0917 - a row of a table
    value: float | None, says: str, reason: str, source: str = OWN, unit: str = SHARE, largest: float = 1.0
) -> Any:
    """Return a field of a threshold: what reaching it means, why it stands there, who says so, its unit and largest value."""
    about = {"says": says, "reason": reason, "source": source, "unit": unit, "largest": largest}
    return field(default=value, metadata=about)


@dataclass(frozen=True, repr=False)
class Gates(Shown):
    """The thresholds of a verdict, shown with the decision matrix and a table of symptoms; shares are fractions: 0.22 is 22 %.

    Raises:
        ConfigurationError: For a value that makes no sense.

    Example:
        >>> Gates(speed_up=0.3).changed
        (('speed_up', 0.22, 0.3),)
    """

    SCHEMA = "openmed_nb/gates/1"

    speed_up: float = threshold(
        0.22,
        "how much faster than the CPU a device must be",
        "a smaller gain is not worth a second device; if that also waits, look at data and batch first",
        RUNBOOK,
        largest=10.0,
    )
    utilisation: float = threshold(
        0.18,
        "a device that is busy for less than this waits; what it shows when idle is subtracted",
        "a device that waits is not slow: its data or its batch are",
        RUNBOOK,
    )
    entity_agreement: float = threshold(
        SPAN_AGREEMENT,
        "how many of the entities must be the same as on the CPU",
        "near ties do not explain that fewer are the same",
        PARITY,
    )
    recall_loss: float = threshold(
        RECALL_LOSS,
        "how much recall of the gold entities may be lost",
        "a model that finds less is another model",
        PARITY,
    )
    logits: float = threshold(
        TOLERANCES["float32"].logits,
        "how far logits in float32 may be from those on the CPU; further if all entities are the same",
        SEEN,
        PARITY,
        DIFFERENCE,
        largest=1e6,
    )
    gradients: float = threshold(
        TOLERANCES["float32"].gradients,
        "how far gradients in float32 may be from those on the CPU, relatively",
        SEEN,
        PARITY,
        DIFFERENCE,
        largest=1e6,
    )
    memory_growth: float = threshold(
        GROWTH_GATE,
        f"memory that grows by more than this over {GATE_EPOCHS} epochs is retained",
        "caches are emptied after each epoch, so something holds what still grows",
        RUNBOOK,
        largest=10.0,
    )
    headroom: float = threshold(
        HEADROOM_SHARE,
        "how much of the memory limit must stay free at the batch in use",
        "a longer text or a new shape then still fits",
    )
    data_share: float = threshold(
        DATA_SHARE,
        "how much of a step may be spent on waiting for data",
        "without the wait, a third more steps are done",
    )
    transfer_share: float = threshold(
        0.25,
        "how much of a step may be spent on copies to the device",
        "without them, a third more steps are done",
    )
    knee_gain: float = threshold(
        0.1,
        "how much faster the best batch of a sweep may be than the batch in use",
        f"a sweep itself leaves {100 * KNEE_GAIN:.0f} %, and a gain near that is hardly worth another batch",
        largest=10.0,
    )
    fallback_time: float = threshold(
        0.05,
        "how much of the time operators that fall back to the CPU may take",
        "if they take less, computing them elsewhere gains little",
    )
    fallback_calls: float = threshold(
        0.01,
        "how many of the calls on MPS may fall back, if their times are not known",
        "each waits for the GPU and copies there and back, and starting an operator alone takes 25 to 110 microseconds",
        "pytorch#82707, and a choice of this toolkit",
    )
    hours: float = threshold(
        24.0,
        "how long a run on one computer may take",
        "one computer can be spared for a day",
        unit=HOURS,
        largest=1e5,
    )

    def __post_init__(self) -> None:
        for one in fields(self):
            number(one.name, getattr(self, one.name), one.metadata["largest"], such_as=f"{one.default:g}")

    @property
    def changed(self) -> tuple[tuple[str, float, float], ...]:
        """The thresholds that are not as they were given, with what they were and what they are."""
        now = vars(self)
        return tuple((name, was, now[name]) for name, was in vars(Gates()).items() if was != now[name])

    @property
    def changes(self) -> tuple[str, ...]:
        """The same as sentences; empty if nothing was changed."""
        was, now = Gates().shown(), self.shown()
        return tuple(f"Gate changed: {name} from {was[name]} to {now[name]}." for name, *_ in self.changed)

    def shown(self) -> dict[str, str]:
        """Return each threshold as people read it, by its name."""
        return {one.name: in_unit(one.metadata["unit"], getattr(self, one.name)) for one in fields(self)}

    def to_dict(self) -> dict[str, Any]:
        """Return values, changes and reasons as plain mappings, numbers and strings, ready for JSON."""
        about = {one.name: {**one.metadata, "default": one.default} for one in fields(self)}
        changed = {name: {"from": was, "to": now} for name, was, now in self.changed}
        return {"schema": self.SCHEMA, "values": dict(vars(self)), "changed": changed, "about": about}

    def report(self) -> Report:
        """Return the thresholds with their reasons, and as reference the decision matrix and the symptoms."""
        given, shown, about = Gates().shown(), self.shown(), {one.name: one.metadata for one in fields(self)}
        was = {name: f"was {given[name]}" for name, *_ in self.changed}
        changed_first = sorted(about.items(), key=lambda one: one[0] not in was)
        thresholds = tuple((name, shown[name], was.get(name, ""), one["says"]) for name, one in changed_first)
        reasons = tuple((name, one["reason"], one["source"]) for name, one in changed_first)
        words = {**shown, "command": "the first command that the verdict names"}
        rules = tuple((str(number), *rule.row(words)) for number, rule in enumerate(MATRIX, 1))
        symptoms = tuple((symptom, cause, f"{look}: {tool}", source) for symptom, cause, look, tool, source in SYMPTOMS)
        matrix = "Decision matrix: of the rules that hold, the first decides"
        tables = (
            Table("Thresholds", ("gate", "value", "changed", "what it says"), thresholds),
            Table("Why they are what they are", ("gate", "why", "who says so"), reasons, folded=True),
            Table(matrix, ("", "when", "recommendation", "what to do", "what would change it"), rules, folded=True),
            Table(
                "Symptoms",
                ("symptom", "likely cause", "what to look at, and with what", "reported in"),
                symptoms,
                folded=True,
            ),
        )
        sentences = self.changes or ("No threshold was changed; nb.runbook.gates(speed_up=0.3) changes one.",)
        many = f"{counted(len(thresholds), 'threshold')} and {counted(len(rules), 'rule')}"
        headline = f"Gates: the {many} behind a verdict"
        return Report("Gates", sentences, tables, spoken=(headline, *sentences))

    def __str__(self) -> str:
        report = self.report()
        return to_text(replace(report, tables=tuple(map(narrow, report.tables))))


def gates(**changed: float) -> Gates:
    """Return the thresholds of :func:`verdict`, each with its reason, and some of them changed.

    Args:
        changed: New values by name, as fractions: ``speed_up=0.3`` asks for 30 % more speed than the CPU has. The names are
            the attributes of the result; printing it shows all with their reasons, the decision matrix, and a table of
            symptoms with their likely causes.

    Returns:
        The thresholds, for ``nb.verdict(..., gates=...)``; ``changed`` says which are not as they were given.

    Raises:
        ConfigurationError: For an unknown name, and for a value that makes no sense.

    Example:
        >>> gates(speed_up=0.3).changed, gates().memory_growth
        ((('speed_up', 0.22, 0.3),), 0.26)
        >>> gates(speedup=0.3)
        Traceback (most recent call last):
        ...
        openmed_nb.errors.ConfigurationError: There is no gate 'speedup'. Did you mean 'speed_up'?
    """
    known = [one.name for one in fields(Gates)]
    for name in changed:
        if name not in known:
            raise ConfigurationError(f"There is no gate {describe_value(name)}.", offered(name, known))
    return Gates(**changed)


def narrow(table: Table) -> Table:
    """Return a table without long lines: long cells go on in the rows below, and an empty row ends each."""
    columns = list(zip(table.columns, *table.rows, strict=True))
    words = [max(len(word) for cell in column for word in (cell.split() or [""])) for column in columns]
    wide = [max(map(len, column)) > longest for column, longest in zip(columns, words, strict=True)]
    more = (WIDTH - sum(words)) // max(1, sum(wide))
    widths = [longest + more if breaks else longest for longest, breaks in zip(words, wide, strict=True)]
    rows: list[tuple[str, ...]] = []
    for cells in table.rows:
        lines = (
            textwrap.wrap(cell, max(1, width), break_long_words=False, break_on_hyphens=False)
            for cell, width in zip(cells, widths, strict=True)
        )
        rows += [*zip_longest(*lines, fillvalue=""), ("",) * len(cells)]
    return replace(table, rows=tuple(rows))


def wrong_numbers(case: Case) -> Figures:
    """Return what is not as on the CPU in float32."""
    return (
        *case.known("device_faults", "not_numbers", "training_parts"),
        *case.beyond("entity_agreement"),
        *(() if case.is_rounding else case.beyond("logits")),
        *case.beyond("recall_loss"),
        *case.beyond("gradients"),
    )


def wrong_batch(case: Case) -> Figures:
    """Return how much more throughput there is at the knee, and where that is."""
    gain = case.beyond("knee_gain")
    return (*gain, *case.known("batch", "knee")) if gain else ()


def falls_back(case: Case) -> Figures:
    """Return the operators that MPS does not have, if they take too much."""
    if case.evidence.kind not in {None, "mps"}:
        return ()
    much = case.beyond("fallback_calls" if case.evidence.fallback_time is None else "fallback_time")
    named = case.known("fallback_operators") if much else ()
    return (*case.known("refused_operators"), *much, *named)


def gains_little(case: Case) -> Figures:
    """Return speed-up and utilisation if the whole interval is below its gate although the device works.

    It is the device's own speed that is seen: it is busy, or nothing is left that it could wait for.
    """
    known, busy = case.speed_ups, case.gated("utilisation")
    measured_busy = busy.value is not None and not case.beyond("utilisation")
    if not known or not (measured_busy or (case.data_is_fine and case.batch_is_fine)):
        return ()
    at_most = replace(case.gated("speed_up"), name=FIGURES["speed_up_high"][0], value=known[-1])
    return (at_most, *([busy] if busy.value is not None else [])) if known[-1] < at_most.threshold else ()


# The gates of a device that is worth it; the first three compare it with the CPU.
STAYS = (
    *("speed_up", "entity_agreement", "logits"),
    *("headroom", "memory_growth", "data_share", "knee_gain", "fallback_time", "fallback_calls"),
)


def all_is_well(case: Case) -> Figures:
    """Return the figures of a device that is worth it, each with its gate.

    What is beyond its gate and does not decide is left out, such as a count of fallbacks whose time is known; a speed-up that
    may be on either side stands there.
    """
    compared = STAYS if case.on_accelerator else STAYS[3:]
    known = (gate for gate in compared if getattr(case.evidence, gate) is not None)
    return tuple(case.gated(gate) for gate in known if gate == "speed_up" or not case.beyond(gate))


STAY = "stay on this device"
FIX_DATA = "feed the device faster"
FIX_BATCH = "fix the batch"
CHECKPOINT = "checkpoint / accumulate"
FALL_BACK = "fall back to the CPU for these operators"
MLX = "move to MLX"
REMOTE = "move to a remote pool"
CPU = "compute on the CPU"
MEASURE = "measure first"


@dataclass(frozen=True)
class VerdictRule:
    """One line of the decision matrix.

    Attributes:
        recommendation: What it recommends.
        rank: Where it stands in the order of precedence.
        when: When it holds, in words; names of gates in braces stand for their values.
        figures: Returns the figures that speak for it, none if it does not hold.
        do: One thing to do; ``{command}`` stands for what measures the first thing that is not known.
        change: What would change it, in words like ``when``.
    """

    recommendation: str
    rank: Area
    when: str
    figures: Callable[[Case], Figures]
    do: str
    change: str

    def row(self, gates: Mapping[str, str]) -> tuple[str, str, str, str]:
        """Return the rule as a row of a table, with the values of gates as people read them, and what to run next."""
        return self.when.format(**gates), self.recommendation, self.do.format(**gates), self.change.format(**gates)


WRONG = (
    "fewer than {entity_agreement} of the entities are the same as on the CPU, more than {recall_loss} of the recall is lost, "
    "logits differ by more than {logits} or gradients by more than {gradients}, NaN appears, "
    "or the losses of a training part"
)
RIGHT_AGAIN = "Parity within {entity_agreement} of the entities in float32, such as with another torch or macOS: nb.runbook.parity(...)."
WAITS = "the device is less than {speed_up} faster than the CPU while it is busy for less than {utilisation}"
LITTLE = "even at the upper end of the interval the device is less than {speed_up} faster than the CPU"
TO_ANNOTATE = "In annotation that is nb.annotate(..., batch_tokens=sweep.batch_tokens)."
BUSY_AGAIN = "A speed-up of {speed_up}, or a utilisation of {utilisation}: nb.compare(...)."

# The rules; of those that hold, the first decides.
RULES = (
    VerdictRule(
        MEASURE,
        Area.NUMBERS,
        "the doctor found something that failed",
        lambda case: case.known("doctor_failures"),
        "Do what nb.doctor() says; what is measured before that is of another computer.",
        "A doctor's report without failures.",
    ),
    VerdictRule(
        CPU,
        Area.NUMBERS,
        WRONG,
        lambda case: wrong_numbers(case) if case.moves_to_cpu else (),
        "Compute on the CPU, or on CUDA where there is one: nb.use('cpu').",
        RIGHT_AGAIN,
    ),
    VerdictRule(
        MLX,
        Area.NUMBERS,
        "a language model writes on MPS, and its numbers are wrong, as above",
        lambda case: wrong_numbers(case) if case.writes_on_mps else (),
        "Run the model with MLX, or on the CPU or CUDA.",
        RIGHT_AGAIN,
    ),
    VerdictRule(
        REMOTE,
        Area.MEMORY,
        "memory grows by more than {memory_growth} over ten epochs",
        lambda case: case.beyond("memory_growth") if case.evidence.memory_verdict == GROWING else (),
        "Find what is retained with nb.training.who_holds(): a larger host only takes longer to fill. Plan another one until then.",
        "A growth of at most {memory_growth} over ten epochs: nb.epochs(...) and nb.training.last_curve().",
    ),
    VerdictRule(
        CHECKPOINT,
        Area.MEMORY,
        "a training step runs out of memory, or leaves less than {headroom} of the limit free",
        lambda case: (case.no_row_fits() or case.short_of_memory()) if case.evidence.task == TRAINING else (),
        "Use nb.training.checkpoint_activations(model), and smaller batches with nb.training.GradientAccumulation.",
        "At least {headroom} of the memory limit free at the batch in use: nb.sweep(..., training=True).",
    ),
    VerdictRule(
        REMOTE,
        Area.MEMORY,
        "not even one row fits into the memory",
        Case.no_row_fits,
        "Use a device with more memory, a smaller model, or shorter rows.",
        "One row that fits: nb.sweep(...).",
    ),
    VerdictRule(
        FIX_BATCH,
        Area.MEMORY,
        "the batch in use runs out of memory, or leaves less than {headroom} of the limit free",
        lambda case: () if case.evidence.task == TRAINING or case.no_row_fits() else case.short_of_memory(),
        f"Use a smaller batch, such as the one at the knee of the sweep. {TO_ANNOTATE}",
        "At least {headroom} of the memory limit free at the batch in use: nb.sweep(...).",
    ),
    VerdictRule(
        FIX_DATA,
        Area.DATA,
        "more than {data_share} of a step is spent on waiting for texts to be tokenised",
        lambda case: case.beyond("data_share") if case.evidence.task == ANNOTATION else (),
        TOKENISE_MORE,
        "At most {data_share} of a step for data: nb.compare(...).",
    ),
    VerdictRule(
        FIX_DATA,
        Area.DATA,
        "more than {data_share} of a step is spent on waiting for data",
        lambda case: () if case.evidence.task == ANNOTATION else case.beyond("data_share"),
        "Read ahead and tokenise once: nb.training.loader.check(loader) and nb.training.loader.ladder(...) say how.",
        "At most {data_share} of a step for data: nb.compare(...).",
    ),
    VerdictRule(
        FIX_DATA,
        Area.DATA,
        "more than {transfer_share} of a step is spent on copies to a device that is not the CPU",
        Case.slow_transfer,
        "Copy fewer and larger batches, and no more than the model reads.",
        "At most {transfer_share} of a step for copies: nb.compare(...).",
    ),
    VerdictRule(
        FIX_DATA,
        Area.DATA,
        "a step waits for the device, such as for .item() or .cpu(), and that is busy for less than {utilisation}",
        Case.synchronises,
        "Take results off the device after the step, or every some steps.",
        "No place where a step waits for the device: nb.runbook.profile(...).",
    ),
    VerdictRule(
        FIX_DATA,
        Area.DATA,
        f"{WAITS}, unless data are known to be fine",
        lambda case: () if case.data_is_fine else case.waits(),
        "Look at the data and the batch before the device: nb.compare(...) splits a step.",
        BUSY_AGAIN,
    ),
    VerdictRule(
        FIX_BATCH,
        Area.BATCH,
        "the knee of the sweep has more than {knee_gain} more throughput than the batch in use",
        wrong_batch,
        f"Use the batch at the knee. {TO_ANNOTATE}",
        "At most {knee_gain} more throughput at the knee: nb.sweep(...).",
    ),
    VerdictRule(
        FIX_BATCH,
        Area.BATCH,
        "the batch is so small that starting operators takes most of the time, unless it is known to be the best",
        lambda case: () if case.batch_is_fine else case.known("tiny_batch"),
        "Use a larger batch: nb.sweep(...) finds one.",
        "A batch that keeps the device busy: nb.runbook.profile(...).",
    ),
    VerdictRule(
        FIX_BATCH,
        Area.BATCH,
        f"{WAITS}, and data are fine, unless the batch is known to be",
        lambda case: case.waits() if case.data_is_fine and not case.batch_is_fine else (),
        "Use a larger batch: nb.sweep(...) finds one.",
        BUSY_AGAIN,
    ),
    VerdictRule(
        FALL_BACK,
        Area.FALLBACKS,
        "MPS refuses operators, or what fell back takes more than {fallback_time} of the time, or of the calls more than "
        "{fallback_calls} where no times are known",
        falls_back,
        "Compute them on the CPU on purpose, all in one place, or another way; PYTORCH_ENABLE_MPS_FALLBACK=1 before torch "
        "is imported lets them run until then.",
        "At most {fallback_time} of the time in what falls back, such as in a newer torch: nb.runbook.fallbacks() and nb.runbook.forecast(model).",
    ),
    VerdictRule(
        CPU,
        Area.SPEED,
        f"{LITTLE}, although it is busy, or data and batch are fine: less is not worth a second device",
        lambda case: gains_little(case) if case.moves_to_cpu else (),
        "Compute on the CPU: nb.use('cpu').",
        "A speed-up of {speed_up}, such as with a larger model or longer texts: nb.compare(...).",
    ),
    VerdictRule(
        MLX,
        Area.SPEED,
        f"a language model writes on MPS, and {LITTLE}, although nothing waits",
        lambda case: gains_little(case) if case.writes_on_mps else (),
        "Run the model with MLX, which is made for that.",
        "A speed-up of {speed_up} over the CPU: nb.compare(...).",
    ),
    VerdictRule(
        REMOTE,
        Area.SPEED,
        "the work takes more than {hours}",
        lambda case: case.beyond("hours"),
        "Spread the texts over several computers with nb.cluster(...); nb.handoff(...) takes the work to one of them.",
        "Fewer texts, or so many more in a second that they are done in {hours}.",
    ),
)

# What is recommended if no rule holds: all is known, enough is, or too little.
STAYING = VerdictRule(
    STAY,
    Area.SPEED,
    "everything that matters was measured, and no other rule holds",
    lambda case: () if case.needed() else all_is_well(case),
    "Nothing to do.",
    "Any figure beyond its gate. Another model, torch, macOS or computer is to be measured anew.",
)
LEANING = VerdictRule(
    STAY,
    Area.SPEED,
    "no other rule holds, though something that may change that is in doubt",
    lambda case: () if any(one.blocks(case) for one in case.needed()) else all_is_well(case),
    "Nothing to do; to be sure, run {command}.",
    "The figures that it measures, or any other beyond its gate.",
)
MEASURING = VerdictRule(
    MEASURE,
    Area.SPEED,
    "no rule holds, and something that matters was not measured",
    lambda _case: (),
    "Run {command}.",
    "The figures that it measures.",
)

# The decision matrix, with what is recommended if none of the rules holds.
MATRIX = (*RULES, STAYING, LEANING, MEASURING)
