"""What was measured, as plain figures: what a verdict is made of, whoever measured them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

from ...devices.request import canonical, kind_of
from ...devices.simulated import shows_simulated
from ...display import FAILED, MARK, NOT_APPLICABLE, WARNING, Finding, Report, Shown, Table
from ...errors import ConfigurationError, UnknownModel, shorten
from ...models.registry import BUNDLED, find_model
from ...training.curve import (
    GATE_EPOCHS,
    GROWING,
    MOST_SIZES,
    SMALLEST_BASELINE,
    TOLERANCE,
    MemoryCurve,
    late_rise,
    lower_envelope,
    slope,
)
from ..comparison import Comparison
from ..doctor.checks import NECESSARY
from ..doctor.report import DoctorReport, sentence_of
from ..doctor.silent_errors import BUGS
from ..measure.workloads import ANNOTATION, DATA, FORWARD_PASS, OWN_STEP, TRAINING_STEP, TRANSFER
from ..operators.fallbacks import FELL_BACK, REFUSED, Fallback, FallbackLedger
from ..operators.forecast import Forecast
from ..precision.gate import PrecisionVerdict
from ..precision.parity import ParityReport
from ..profile import SYNCHRONISATION, TINY_BATCH, Profile
from ..signals.values import CONDITIONS, Signals
from ..sweep import SweepReport
from ..sweep_search import LARGEST, TIME, Point, best_of, fitting
from .gates import COUNT, DIFFERENCE, HOURS, NAMES, PHASES, RATE, SHARE, TIMES, WORDS, YES_NO, Thresholds, in_unit

INFERENCE, TRAINING, GENERATION = "inference", "training", "generation"
TASKS = (ANNOTATION, INFERENCE, TRAINING, GENERATION)
"""What a model is used for: finding entities, forward passes of a module of one's own, training, or writing text."""

FIGURES: dict[str, tuple[str, str]] = {
    "models": ("names of the model", NAMES),
    "device": ("device", WORDS),
    "task": ("task", WORDS),
    "speed_up_low": ("speed-up over the CPU, at least", TIMES),
    "speed_up": ("speed-up over the CPU", TIMES),
    "speed_up_high": ("speed-up over the CPU, at most", TIMES),
    "utilisation": ("utilisation", SHARE),
    "shares": ("phases of a step", PHASES),
    "data_share": ("step spent on waiting for data", SHARE),
    "transfer_share": ("step spent on copies to the device", SHARE),
    "synchronisations": ("places where a step waits for the device", NAMES),
    "tiny_batch": ("batch so small that starting operators takes most of the time", YES_NO),
    "batch_tokens": ("tokens that a batch may have", COUNT),
    "batch": ("rows in use", COUNT),
    "knee": ("rows at the knee", COUNT),
    "best_batch": ("rows at the highest throughput", COUNT),
    "knee_gain": ("more throughput at the knee", SHARE),
    "out_of_memory_at": ("out of memory at rows", COUNT),
    "headroom": ("memory limit that stays free", SHARE),
    "memory_growth": ("growth over ten epochs", SHARE),
    "memory_verdict": ("memory curve", WORDS),
    "entity_agreement": ("entities that are the same", SHARE),
    "logits": ("largest difference of a logit", DIFFERENCE),
    "not_numbers": ("tokens with NaN or infinity", COUNT),
    "recall_loss": ("recall lost", SHARE),
    "gradients": ("largest relative difference of a gradient", DIFFERENCE),
    "refused_dtype": ("type in which the entities are not kept", WORDS),
    "refused_operators": ("operators that MPS refuses", NAMES),
    "fallback_operators": ("operators that fell back", NAMES),
    "fallback_time": ("time spent in what fell back", SHARE),
    "fallback_calls": ("calls that fell back", SHARE),
    "device_faults": ("computed wrongly", NAMES),
    "silent_errors": ("known silent errors that were seen", NAMES),
    "doctor_failures": ("failed in nb.doctor()", NAMES),
    "states": ("states that spoil times", NAMES),
    "texts_per_second": ("texts, or rows", RATE),
    "texts_to_do": ("texts to do", COUNT),
    "hours": ("time for all texts", HOURS),
    "simulated": ("simulated", YES_NO),
}
"""What each figure is called, and what it counts."""

SECONDS_OF_AN_HOUR = 3600
MOST = 1 << 63


@dataclass(frozen=True, repr=False)
class Evidence(Shown):
    """Figures of a device at work; ``None`` where something was not measured, never a guess. Shares are fractions.

    Attributes:
        models: By which names the reports call the model.
        device: Where the work was done, as torch spells it.
        task: ``"annotation"``, ``"inference"``, ``"training"`` or ``"generation"``.
        speed_up_low: How many times as fast as the CPU it is, the lower end of the interval.
        speed_up: The middle.
        speed_up_high: The upper end.
        utilisation: How busy the device was, its utilisation when idle taken off.
        shares: How much of a step each phase takes, such as ``{"data": 0.2, "forward": 0.8}``.
        synchronisations: Where a step waits for the device, as places of code.
        tiny_batch: Whether starting operators takes most of the device's time.
        batch_tokens: How many tokens a batch in use may have, where texts are annotated.
        batch: How many rows a batch has that is in use; of annotation, rows like those of the sweep.
        knee: How many it should have.
        best_batch: How many it has where the throughput is largest.
        knee_gain: How much more throughput there is at the knee than at the batch in use; 0.1 is a tenth.
        out_of_memory_at: The smallest number of rows that did not fit; 0 where all fitted that were tried.
        headroom: How much of the memory limit stays free at the batch in use.
        memory_growth: The growth over ten epochs.
        memory_verdict: What the memory curve says: ``"flat"``, ``"growing"``, ``"sawtooth"`` or ``"too short to tell"``.
        entity_agreement: How many of the entities are the same as on the CPU in float32.
        logits: The largest difference of a logit from the CPU, in float32.
        not_numbers: How many tokens became NaN or infinity.
        recall_loss: How much of the recall of gold entities is lost.
        gradients: The largest relative difference of a gradient from the CPU, in float32.
        refused_dtype: A reduced type in which the model does not keep its entities.
        refused_operators: What does not run on MPS at all.
        fallback_operators: The operators that fall back to the CPU.
        fallback_time: How much of the time they take.
        fallback_calls: How many of the operators called with tensors of MPS they are.
        device_faults: What the doctor saw the device compute wrongly, or not at all.
        silent_errors: The known silent errors that the doctor saw on this device.
        doctor_failures: What else the doctor found that failed.
        states: States of the computer that spoil times, such as ``"power, warning: battery"``.
        texts_per_second: How many texts, or rows, are done in a second.
        texts_to_do: How many there are to do.
        simulated: Whether any of it is from a simulated device.

    Raises:
        ConfigurationError: For a figure that is none.

    Example:
        >>> Evidence(device="mps", task="annotation", texts_per_second=50.0, texts_to_do=360_000).hours
        2.0
    """

    models: tuple[str, ...] | None = None
    device: str | None = None
    task: str | None = None
    speed_up_low: float | None = None
    speed_up: float | None = None
    speed_up_high: float | None = None
    utilisation: float | None = None
    shares: Mapping[str, float] | None = None
    synchronisations: tuple[str, ...] | None = None
    tiny_batch: bool | None = None
    batch_tokens: int | None = None
    batch: int | None = None
    knee: int | None = None
    best_batch: int | None = None
    knee_gain: float | None = None
    out_of_memory_at: int | None = None
    headroom: float | None = None
    memory_growth: float | None = None
    memory_verdict: str | None = None
    entity_agreement: float | None = None
    logits: float | None = None
    not_numbers: int | None = None
    recall_loss: float | None = None
    gradients: float | None = None
    refused_dtype: str | None = None
    refused_operators: tuple[str, ...] | None = None
    fallback_operators: tuple[str, ...] | None = None
    fallback_time: float | None = None
    fallback_calls: float | None = None
    device_faults: tuple[str, ...] | None = None
    silent_errors: tuple[str, ...] | None = None
    doctor_failures: tuple[str, ...] | None = None
    states: tuple[str, ...] | None = None
    texts_per_second: float | None = None
    texts_to_do: int | None = None
    simulated: bool = False

    def __post_init__(self) -> None:
        for one in fields(self):
            value, (fits, words) = getattr(self, one.name), KINDS[FIGURES[one.name][1]]
            if value is not None and not fits(value):
                what = f"{one.name}={shorten(repr(value))} is no figure of a verdict."
                raise ConfigurationError(what, f"Pass {words}, or None where it was not measured.")
        if self.task not in {None, *TASKS}:
            what = f"task={shorten(repr(self.task))} is nothing that a verdict knows."
            raise ConfigurationError(what, f"Use one of {', '.join(TASKS)}.")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Evidence:
        """Return the evidence that :meth:`to_dict` gave, or part of it.

        Raises:
            ConfigurationError: For a name that is no figure, and for a value that is none.

        Example:
            >>> Evidence.from_dict({"device": "mps", "fallback_operators": ["aten::mode"]}).fallback_operators
            ('aten::mode',)
        """
        unknown = sorted(set(values) - {one.name for one in fields(cls)})
        if unknown:
            raise ConfigurationError(f"{shorten(unknown[0])!r} is no figure of a verdict.", "Leave it out.")
        given: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
        }
        return cls(**given)

    def but(self, **changes: Any) -> Evidence:
        """Return the evidence with other figures."""
        return replace(self, **changes)

    @property
    def kind(self) -> str | None:
        """What kind of device it is: ``"mps"``, ``"cuda"`` or ``"cpu"``."""
        return kind_of(self.device) if self.device else None

    @property
    def data_share(self) -> float | None:
        """How much of a step is spent on waiting for data."""
        return None if self.shares is None else self.shares.get(DATA)

    @property
    def transfer_share(self) -> float | None:
        """How much of a step is spent on copies to the device."""
        return None if self.shares is None else self.shares.get(TRANSFER)

    @property
    def hours(self) -> float | None:
        """How many hours the texts that are to do take."""
        if not self.texts_per_second or self.texts_to_do is None:
            return None
        return self.texts_to_do / self.texts_per_second / SECONDS_OF_AN_HOUR

    @property
    def measured(self) -> dict[str, Any]:
        """The figures that there are, by their names."""
        return {name: value for name, value in vars(self).items() if value is not None and name != "simulated"}

    def to_dict(self) -> dict[str, Any]:
        """Return all figures as plain mappings, lists, numbers and strings, ready for JSON."""
        return {name: plain(value) for name, value in vars(self).items()}

    def report(self) -> Report:
        """Return which figures there are; they themselves are among the figures."""
        names = ", ".join(self.measured) or "nothing"
        title = f"Evidence{MARK if self.simulated else ''}"
        return Report(title, (f"Measured: {names}.",), figures=(Table("", ("figure", "value"), self.rows()),))

    def rows(self) -> tuple[tuple[str, str], ...]:
        """Return the figures that there are as people read them, one in a row; phases are rows of their own."""
        told = {name: getattr(self, name) for name in FIGURES if name not in {"shares", "simulated"}}
        phases = {name: share for name, share in (self.shares or {}).items() if name not in {DATA, TRANSFER}}
        return (
            *((words_of(name), in_unit(FIGURES[name][1], value)) for name, value in told.items() if value is not None),
            *((f"step spent on {name}", in_unit(SHARE, share)) for name, share in phases.items()),
        )


def words_of(name: str) -> str:
    """Return what a figure is called.

    Example:
        >>> words_of("data_share")
        'step spent on waiting for data'
    """
    return FIGURES[name][0]


def plain(value: Any) -> Any:
    """Return a value as JSON has it."""
    if isinstance(value, tuple):
        return list(value)
    return dict(value) if isinstance(value, Mapping) else value


def is_number(value: object) -> bool:
    """Tell whether a value is a finite number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def is_count(value: object) -> bool:
    """Tell whether a value is a whole number from 0, and no larger than any that is counted."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MOST


def is_names(value: object) -> bool:
    """Tell whether a value is a tuple of strings."""
    return isinstance(value, tuple) and all(isinstance(one, str) for one in value)


def is_shares(value: object) -> bool:
    """Tell whether a value gives numbers to names."""
    return isinstance(value, Mapping) and is_names(tuple(value)) and all(is_number(one) for one in value.values())


Kind = tuple[Callable[[Any], bool], str]
TEXT: Kind = (lambda value: isinstance(value, str), "a string")
NUMBER: Kind = (is_number, "a finite number")

KINDS: dict[str, Kind] = {
    **dict.fromkeys((SHARE, DIFFERENCE, HOURS, TIMES, RATE), NUMBER),
    WORDS: TEXT,
    COUNT: (is_count, "a whole number from 0"),
    NAMES: (is_names, "a tuple of strings"),
    PHASES: (is_shares, "a mapping of names to finite numbers"),
    YES_NO: (lambda value: isinstance(value, bool), "True or False"),
}
"""What a figure may be, and how that is said, by what it counts."""


COMPUTED = frozenset({"computation", *NECESSARY})
"""The doctor's findings that tell whether a device computes rightly at all."""

BUG_NAMES = frozenset(bug.name for bug in BUGS)
NO_BUG = "known silent errors"
STATES = frozenset(condition.name for condition in CONDITIONS)


@dataclass(frozen=True)
class Context:
    """What a report is read for.

    Attributes:
        device: The device of the verdict.
        gates: The thresholds.
        known: What other reports told already.
    """

    device: str | None
    gates: Thresholds
    known: Mapping[str, Any]


def of_comparison(report: Comparison, context: Context) -> dict[str, Any]:
    """Return what a comparison tells of a device."""
    here = report.of(context.device or "cpu")
    ends = {"speed_up_low": "low", "speed_up": "middle", "speed_up_high": "high"}
    return {
        **{name: here.speed_up and finite(getattr(here.speed_up, end)) for name, end in ends.items()},
        "utilisation": here.utilisation,
        "shares": here.shares,
        **batch_of(report, here.rows),
        "texts_per_second": here.rows_per_second,
    }


def of_profile(report: Profile, context: Context) -> dict[str, Any]:
    """Return what a profile tells of the steps, and of what holds them up."""
    status = {one.name: one.status for one in report.findings}
    waits = tuple(str(one) for one in report.synchronisations if one.place.is_own)
    tiny = status[TINY_BATCH]
    return {
        "shares": report.shares,
        **batch_of(report, report.rows),
        "texts_per_second": report.rows / report.seconds if report.seconds else None,
        "synchronisations": waits if status[SYNCHRONISATION] == WARNING else (),
        "tiny_batch": None if tiny == NOT_APPLICABLE else tiny == WARNING,
        **(of_fallbacks(report, context) if kind_of(report.device) == "mps" else {}),
    }


def batch_of(report: Comparison | Profile, rows: int) -> dict[str, Any]:
    """Return the batch in use: annotation cuts its texts by tokens, so that its rows are no rows of the device."""
    return {"batch": None if report.task == ANNOTATION else rows, "batch_tokens": report.batch_tokens}


def of_fallbacks(report: Profile, context: Context) -> dict[str, Any]:
    """Return what fell back in the steps that were watched; times only where they are beyond their gate.

    They are those of torch's profiler, which counts the copies elsewhere: a small share would prove nothing.
    """
    fell = by_outcome(report.fallbacks)[FELL_BACK]
    names = {name.split(".")[0] for name in fell}
    total = sum(one.seconds for one in report.operators)
    share = sum(one.seconds for one in report.operators if one.operator in names) / total if total else 0.0
    much = share > context.gates.fallback_time and not report.simulated
    return {
        "fallback_operators": fell,
        "refused_operators": by_outcome(report.fallbacks)[REFUSED],
        "fallback_calls": report.fallback_share,
        "fallback_time": share if much else None,
    }


def of_parity(report: ParityReport, context: Context) -> dict[str, Any]:
    """Return what a comparison with the CPU in float32 tells; a reduced type that fails speaks against the type alone."""
    agreement = report.spans.agreement if report.spans.all else None
    if report.dtype != "float32":
        agrees = agreement is not None and agreement >= context.gates.entity_agreement and not report.not_numbers
        return (
            {"entity_agreement": agreement}
            if agrees
            else {"refused_dtype": report.dtype if agreement is not None else None}
        )
    gold = report.gold
    return {
        "entity_agreement": agreement,
        "logits": finite(report.logits.maximum),
        "not_numbers": report.not_numbers,
        "recall_loss": gold and max(0.0, gold[0].recall - gold[1].recall),
        "gradients": report.gradients and finite(report.gradients.largest),
    }


def of_precision(report: PrecisionVerdict, context: Context) -> dict[str, Any]:
    """Return what the precision gate tells: a type that was accepted is right on the device too."""
    if any(one.against for one in report.refusals):
        return {"refused_dtype": report.parity.dtype}
    return of_parity(report.parity, context)


def of_curve(report: MemoryCurve, context: Context) -> dict[str, Any]:
    """Return what a memory curve tells, judged by the growth that is suspect here."""
    curve = replace(report, gate=context.gates.memory_growth)
    return {
        "memory_verdict": curve.verdict,
        "memory_growth": finite(growth_of(curve)),
        "headroom": free_of_curve(curve),
    }


def growth_of(curve: MemoryCurve) -> float:
    """Return the growth over ten epochs as a share: of a curve that grows, the pace that shows it.

    It may show in all sizes, in the smaller of each two, or in those at the end alone (``training.curve.judge``).
    """
    if curve.verdict != GROWING:
        return curve.trend.growth
    sizes = [getattr(sample, curve.measure) for sample in curve.steady]
    every = -(-len(sizes) // MOST_SIZES)
    shares = [size / max(sizes[0], SMALLEST_BASELINE) for size in sizes]
    late = late_rise(shares, TOLERANCE)
    lately = (shares[-1] - shares[-1 - late]) / late if late else 0.0
    below = slope(lower_envelope(shares[::-every][::-1])) / every
    return max(curve.trend.growth, GATE_EPOCHS * below, GATE_EPOCHS * lately)


def free_of_curve(curve: MemoryCurve) -> float | None:
    """Return how much of the limit stayed free at the peak of a training, ``None`` where nobody counted."""
    limits = [(one.peak, one.recommended) for one in curve.samples if one.peak and one.recommended]
    return min((free_share(peak, most * (curve.limit or 1.0)) for peak, most in limits), default=None)


def of_ledger(report: FallbackLedger, _context: Context) -> dict[str, Any]:
    """Return what really fell back, where anything was computed on MPS."""
    called = report.to_dict()["operators_on_mps"]
    if not called:
        return {}
    names = by_outcome(report.entries)
    return {
        "fallback_operators": names[FELL_BACK],
        "refused_operators": names[REFUSED],
        "fallback_calls": min(1.0, report.count / called),
    }


def by_outcome(entries: Iterable[Fallback]) -> dict[str, tuple[str, ...]]:
    """Return the different operators that fell back, and those that were refused, in alphabetical order."""
    there = list(entries)
    return {
        outcome: tuple(sorted({one.operator for one in there if one.outcome == outcome}))
        for outcome in (FELL_BACK, REFUSED)
    }


def of_forecast(report: Forecast, _context: Context) -> dict[str, Any]:
    """Return what is expected to leave MPS, and what MPS refuses."""
    return {"fallback_operators": report.leaving, "refused_operators": report.refused}


def of_doctor(report: DoctorReport, _context: Context) -> dict[str, Any]:
    """Return what the doctor found of the device, of known errors, of states, and of anything else that failed."""
    wrong = [one for one in report.findings if one.status in {FAILED, WARNING}]
    failed = [one.name for one in wrong if one.status == FAILED]
    bugs = tuple(one.name for one in wrong if one.name in BUG_NAMES)
    looked = bugs or any(one.name == NO_BUG and one.status != NOT_APPLICABLE for one in report.findings)
    return {
        "device_faults": tuple(name for name in failed if name in COMPUTED),
        "silent_errors": bugs if looked else None,
        "doctor_failures": tuple(name for name in failed if name not in COMPUTED | BUG_NAMES),
        "states": states_of(one for one in report.findings if one.name in STATES),
    }


def of_signals(report: Signals, _context: Context) -> dict[str, Any]:
    """Return the states that spoil times."""
    return {"states": states_of(report.findings())}


def states_of(findings: Iterable[Finding]) -> tuple[str, ...]:
    """Return the states that make a computer slow, as lines that can be read alone."""
    return tuple(sentence_of(one) for one in findings if one.status == WARNING)


def of_sweep(report: SweepReport, context: Context) -> dict[str, Any]:
    """Return what a sweep tells of the batch in use; its memory is that of the knee where nobody says which that is."""
    batch, best = batch_in_use(report, context.known), best_of(report.points)
    gain = gain_at(report.points, report.knee, batch)
    return {
        "batch": batch,
        "knee": report.knee,
        "best_batch": best.rows if best else None,
        "out_of_memory_at": min((point.rows for point in report.points if not point.fits), default=0),
        "knee_gain": None if was_cut_off(report) and (gain or 0) <= context.gates.knee_gain else gain,
        "headroom": headroom_at(report.points, report.limit, batch or report.knee),
    }


def was_cut_off(report: SweepReport) -> bool:
    """Tell whether a sweep ended while throughput still rose, for another reason than memory: larger batches may be faster."""
    return report.still_rising and report.stopped in {LARGEST, TIME}


def batch_in_use(report: SweepReport, known: Mapping[str, Any]) -> int | None:
    """Return the batch in use in rows like those of a sweep; ``None`` where nobody says."""
    tokens: int | None = known.get("batch_tokens")
    rows: int | None = known.get("batch")
    return max(1, tokens // report.length) if rows is None and tokens and report.length else rows


def gain_at(points: Sequence[Point], knee: int | None, batch: int | None) -> float | None:
    """Return how much more throughput there is at the knee than at a batch; ``None`` where that cannot be told.

    Example:
        >>> points = [Point(8, 50.0), Point(16, 100.0), Point(32, 110.0)]
        >>> gain_at(points, 16, 8), gain_at(points, 16, 12), gain_at(points, 16, 64)
        (1.0, 0.33333333333333326, None)
    """
    there = None if batch is None else throughput_at(points, batch)
    best = None if knee is None else throughput_at(points, knee)
    return best / there - 1 if best and there else None


def throughput_at(points: Sequence[Point], rows: int) -> float | None:
    """Return the throughput at a number of rows, on a line between those measured; ``None`` beyond them."""
    there = [(point.rows, point.speed) for point in fitting(points) if point.throughput]
    exact = dict(there).get(rows)
    between = (
        slow + (fast - slow) * (rows - few) / (many - few)
        for (few, slow), (many, fast) in pairwise(there)
        if few < rows < many
    )
    return next(between, None) if exact is None else exact


def headroom_at(points: Sequence[Point], limit: int | None, rows: int | None) -> float | None:
    """Return how much of the limit the smallest measured batch leaves free that is no smaller than this one.

    Example:
        >>> headroom_at([Point(8, 50.0, memory=40), Point(16, 90.0, memory=80)], 100, 12)
        0.2
    """
    sizes = [
        point.memory
        for point in fitting(points)
        if rows is not None and point.rows >= rows and point.memory is not None
    ]
    return free_share(sizes[0], limit) if sizes and limit else None


def free_share(taken: int, limit: float) -> float:
    """Return how much of a limit stays free, in whole percent: no memory is known better, and no batch misses a gate by less.

    Example:
        >>> free_share(90, 100), free_share(903, 1000)
        (0.1, 0.1)
    """
    return round(1 - taken / limit, 2)


READERS: tuple[tuple[type, Callable[[Any, Context], dict[str, Any]]], ...] = (
    (Comparison, of_comparison),
    (Profile, of_profile),
    (ParityReport, of_parity),
    (PrecisionVerdict, of_precision),
    (SweepReport, of_sweep),
    (MemoryCurve, of_curve),
    (FallbackLedger, of_ledger),
    (Forecast, of_forecast),
    (Signals, of_signals),
    (DoctorReport, of_doctor),
)
"""The reports in the order in which they count: where two tell the same figure, the first does."""


def finite(value: float) -> float | None:
    """Return a number, ``None`` for NaN and infinity."""
    return value if math.isfinite(value) else None


TASK_OF: Mapping[str, str] = {ANNOTATION: ANNOTATION, FORWARD_PASS: INFERENCE, TRAINING_STEP: TRAINING}
"""What a measured step is a part of; of a person's own step nobody knows."""

WRAPPERS = frozenset({"OptimizedModule", "DataParallel", "DistributedDataParallel"})
"""What torch wraps models into: the class says nothing of the model."""


def evidence_of(
    *reports: Any, gates: Thresholds | None = None, task: str | None = None, texts: int | None = None
) -> Evidence:
    """Return the figures of reports, in whatever order they are passed.

    Args:
        reports: At most one of each kind; perhaps an :class:`Evidence` with figures of the person's own, which count most.
        gates: The thresholds: they decide from which growth on a memory curve grows.
        task: What the model is used for; as the reports say where nobody does.
        texts: How many texts are to be done.

    Raises:
        ConfigurationError: For what is no report, two of one kind, and reports of several devices, models or tasks.
    """
    found = by_type(reports)
    own: Evidence = found.pop(Evidence, Evidence())
    context = Context(own.device or device_of(found), gates or Thresholds(), own.measured)
    for kind, read in READERS:
        if kind in found:
            told = {name: value for name, value in read(found[kind], context).items() if value is not None}
            context = replace(context, known={**told, **context.known})
    to_do = own.texts_to_do if texts is None else texts
    return own.but(**{**context.known, **about(context, found, own, task), "texts_to_do": to_do})


def about(context: Context, found: Mapping[type, Any], own: Evidence, task: str | None) -> dict[str, Any]:
    """Return the models, the device, the task, and whether anything is simulated."""
    simulated = own.simulated or any(is_simulated(report) for report in found.values())
    models = own.models or models_of(found.values()) or None
    check_types(found.values())
    return {
        "models": models,
        "device": context.device,
        "task": (own.task or task_of(found)) if task is None else task,
        "simulated": simulated,
    }


def by_type(reports: Iterable[Any]) -> dict[Any, Any]:
    """Return reports by their types.

    Raises:
        ConfigurationError: For what is no report, and for two of one type.
    """
    kinds, found = (Evidence, *(kind for kind, _ in READERS)), {}
    for report in reports:
        kind = next((kind for kind in kinds if isinstance(report, kind)), None)
        if kind is None:
            what = f"{type(report).__name__} is no report that a verdict is made of."
            raise ConfigurationError(what, "Pass what nb.compare, nb.sweep, nb.parity and the others return.")
        if kind in found:
            what = f"There are two reports of one kind: {kind.__name__}."
            raise ConfigurationError(what, "Pass one of each, of the same model on the same device.")
        found[kind] = report
    return found


def device_of(found: Mapping[type, Any]) -> str | None:
    """Return the device that reports are of; of a comparison alone, the fastest that is not the CPU.

    Raises:
        ConfigurationError: Where they are of several, and for one that was not compared.
    """
    told = {kind: place_of(report) for kind, report in found.items()}
    devices = sorted({device for device in told.values() if device})
    if len(devices) > 1:
        what = f"The reports are of several devices: {', '.join(devices)}."
        raise ConfigurationError(what, "Pass reports of one device.")
    comparison: Comparison | None = found.get(Comparison)
    if comparison is None or devices:
        return devices[0] if devices else None
    others = [one for one in comparison.devices if one.speed_up is not None]
    return canonical(
        max(others, key=lambda one: one.speed_up.middle if one.speed_up else 0.0, default=comparison.devices[0]).device
    )


def models_of(reports: Iterable[Any]) -> tuple[str, ...]:
    """Return by which names reports call the model, in alphabetical order.

    Raises:
        ConfigurationError: Where two of them certainly are not of one model.
    """
    told = sorted({told for report in reports if (told := name_of(report))})
    for kind in (is_class, is_name):
        named = [name for name, task in told if task != OWN_STEP and kind(name)]
        other = next((name for name in named if not is_same(named[0], name)), None)
        if other is not None:
            what = f"The reports are of different models: {shorten(named[0])!r} and {shorten(other)!r}."
            raise ConfigurationError(what, "Pass reports of one model, by one name.")
    return tuple(dict.fromkeys(name for name, _ in told))


def check_types(reports: Iterable[Any]) -> None:
    """Refuse times of a model in several types of numbers.

    Raises:
        ConfigurationError: Where reports of times are of several types.
    """
    timed = (report for report in reports if isinstance(report, (Comparison, Profile, SweepReport)))
    dtypes = sorted({report.dtype for report in timed if report.dtype})
    if len(dtypes) > 1:
        what = f"The reports are of a model in several types: {', '.join(dtypes)}."
        raise ConfigurationError(what, "Pass reports of one type.")


def name_of(report: Any) -> tuple[str, str] | None:
    """Return by which name a report calls its model, and its task; ``None`` where it has none."""
    if isinstance(report, PrecisionVerdict):
        return name_of(report.parity)
    if isinstance(report, (ParityReport, Forecast)):
        return report.model, ""
    return (report.name, report.task) if isinstance(report, (Comparison, Profile, SweepReport)) else None


def is_class(name: str) -> bool:
    """Tell whether a name is that of the class of a model that was passed, not one that a model is loaded by.

    Example:
        >>> is_class("BertForTokenClassification"), is_class("bundled"), is_class("OpenMed/Some-Model")
        (True, False, False)
    """
    return name.isidentifier() and name != name.lower() and name not in WRAPPERS


def is_name(name: str) -> bool:
    """Tell whether a model is loaded by a name.

    Example:
        >>> is_name("bundled"), is_name("OpenMed/Some-Model"), is_name("train_step")
        (True, True, False)
    """
    return name in BUNDLED or not name.isidentifier()


def is_same(one: str, other: str) -> bool:
    """Tell whether two names are of one model: classes by their names, others by where they are."""
    if one == other or is_class(one):
        return one == other
    try:
        return find_model(one) == find_model(other)
    except UnknownModel:
        return False


def place_of(report: Any) -> str | None:
    """Return the device that a report is of, without its mark; ``None`` for one that is of none, or of several."""
    if isinstance(report, PrecisionVerdict):
        return place_of(report.parity)
    if isinstance(report, FallbackLedger):
        return "mps" if report.to_dict()["operators_on_mps"] else None
    device = getattr(report, "device", None)
    return canonical(device.removesuffix(MARK)) if isinstance(device, str) else None


def is_simulated(report: Any) -> bool:
    """Tell whether a report was made under the simulation; a forecast and a curve on the CPU do not depend on it."""
    if isinstance(report, PrecisionVerdict):
        return is_simulated(report.parity)
    if isinstance(report, ParityReport):
        return shows_simulated(report.device)
    return not isinstance(report, Forecast) and bool(report.simulated) if hasattr(report, "simulated") else False


def task_of(found: Mapping[type, Any]) -> str | None:
    """Return what the model is used for, as reports say it; a memory curve is of a training where no other says more.

    Raises:
        ConfigurationError: Where they say different things.
    """
    tasks = (getattr(report, "task", "") for report in found.values())
    said = {TASK_OF[task] for task in tasks if task in TASK_OF}
    if len(said) > 1:
        what = f"The reports are of several tasks: {', '.join(sorted(said))}."
        raise ConfigurationError(what, "Pass reports of one task, or say which with task=.")
    return next(iter(said), TRAINING if MemoryCurve in found else None)
