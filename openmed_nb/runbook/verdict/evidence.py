"""Evidence: the plain figures that a verdict is made of, and how those of several reports are joined."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from ...devices.request import canonical, kind_of
from ...display import Report, Shown, Table
from ...errors import ConfigurationError, UnknownModel, shorten
from ...models.registry import BUNDLED, find_model
from ..logbook.sections import ReportFigures
from ..measure.workloads import ANNOTATION, DATA, FORWARD_PASS, OWN_STEP, TRAINING_STEP, TRANSFER
from .gates import COUNT, DIFFERENCE, HOURS, NAMES, PHASES, RATE, SHARE, TIMES, WORDS, YES_NO, Thresholds, in_unit

if TYPE_CHECKING:
    from ..comparison import Comparison

INFERENCE, TRAINING, GENERATION = "inference", "training", "generation"
# What a model is used for: finding entities, forward passes of a module of one's own, training, or writing text.
TASKS = (ANNOTATION, INFERENCE, TRAINING, GENERATION)
# What a measured step is a part of; a person's own step may be a part of any.
TASK_OF = {ANNOTATION: ANNOTATION, FORWARD_PASS: INFERENCE, TRAINING_STEP: TRAINING}

# What torch wraps models into: the class says nothing of the model.
WRAPPERS = frozenset({"OptimizedModule", "DataParallel", "DistributedDataParallel"})

SECONDS_OF_AN_HOUR = 3600
MOST = 1 << 63


def is_finite(value: object) -> bool:
    """Tell whether a value is a finite number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def are_names(value: object) -> bool:
    """Tell whether a value is a tuple of strings."""
    return isinstance(value, tuple) and all(isinstance(one, str) for one in value)


# What a figure may be, and that in words, by what it counts.
KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys((SHARE, DIFFERENCE, HOURS, TIMES, RATE), (is_finite, "a finite number")),
    WORDS: (lambda value: isinstance(value, str), "a string"),
    COUNT: (lambda value: type(value) is int and 0 <= value < MOST, "a whole number from 0"),
    NAMES: (are_names, "a tuple of strings"),
    PHASES: (
        lambda value: isinstance(value, Mapping) and are_names(tuple(value)) and all(map(is_finite, value.values())),
        "a mapping of names to finite numbers",
    ),
    YES_NO: (lambda value: isinstance(value, bool), "True or False"),
}


def figure(words: str, unit: str, default: Any = None) -> Any:
    """Return a field of a figure: what it is called, and what it counts."""
    return field(default=default, metadata={"figure": (words, unit)})


@dataclass(frozen=True, repr=False)
class Evidence(Shown):
    """Figures of a device at work; ``None`` if something was not measured, never a guess. Shares are fractions.

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
        batch_tokens: How many tokens a batch in use may have, if texts are annotated.
        batch: How many rows a batch has that is in use; of annotation, rows like those of the sweep.
        knee: How many it should have.
        best_batch: How many it has where the throughput is largest.
        knee_gain: How much more throughput there is at the knee than at the batch in use; 0.1 is a tenth.
        out_of_memory_at: The smallest number of rows that did not fit; 0 if all fitted that were tried.
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
        ConfigurationError: For a value that its figure cannot have.

    Example:
        >>> Evidence(device="mps", task="annotation", texts_per_second=50.0, texts_to_do=360_000).hours
        2.0
    """

    models: tuple[str, ...] | None = figure("names of the model", NAMES)
    device: str | None = figure("device", WORDS)
    task: str | None = figure("task", WORDS)
    speed_up_low: float | None = figure("speed-up over the CPU, at least", TIMES)
    speed_up: float | None = figure("speed-up over the CPU", TIMES)
    speed_up_high: float | None = figure("speed-up over the CPU, at most", TIMES)
    utilisation: float | None = figure("utilisation", SHARE)
    shares: Mapping[str, float] | None = figure("phases of a step", PHASES)
    synchronisations: tuple[str, ...] | None = figure("places where a step waits for the device", NAMES)
    tiny_batch: bool | None = figure("batch so small that starting operators takes most of the time", YES_NO)
    batch_tokens: int | None = figure("tokens that a batch may have", COUNT)
    batch: int | None = figure("rows in use", COUNT)
    knee: int | None = figure("rows at the knee", COUNT)
    best_batch: int | None = figure("rows at the highest throughput", COUNT)
    knee_gain: float | None = figure("more throughput at the knee", SHARE)
    out_of_memory_at: int | None = figure("out of memory at rows", COUNT)
    headroom: float | None = figure("memory limit that stays free", SHARE)
    memory_growth: float | None = figure("growth over ten epochs", SHARE)
    memory_verdict: str | None = figure("memory curve", WORDS)
    entity_agreement: float | None = figure("entities that are the same", SHARE)
    logits: float | None = figure("largest difference of a logit", DIFFERENCE)
    not_numbers: int | None = figure("tokens with NaN or infinity", COUNT)
    recall_loss: float | None = figure("recall lost", SHARE)
    gradients: float | None = figure("largest relative difference of a gradient", DIFFERENCE)
    refused_dtype: str | None = figure("type in which the entities are not kept", WORDS)
    refused_operators: tuple[str, ...] | None = figure("operators that MPS refuses", NAMES)
    fallback_operators: tuple[str, ...] | None = figure("operators that fell back", NAMES)
    fallback_time: float | None = figure("time spent in what fell back", SHARE)
    fallback_calls: float | None = figure("calls that fell back", SHARE)
    device_faults: tuple[str, ...] | None = figure("computed wrongly", NAMES)
    silent_errors: tuple[str, ...] | None = figure("known silent errors that were seen", NAMES)
    doctor_failures: tuple[str, ...] | None = figure("failed in nb.doctor()", NAMES)
    states: tuple[str, ...] | None = figure("states that spoil times", NAMES)
    texts_per_second: float | None = figure("texts, or rows", RATE)
    texts_to_do: int | None = figure("texts to do", COUNT)
    simulated: bool = figure("simulated", YES_NO, default=False)

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            fits, words = KINDS[FIGURES[name][1]]
            if value is not None and not fits(value):
                remedy = f"Pass {words}, or None if it was not measured."
                raise ConfigurationError(f"{name} cannot be {shorten(repr(value))}.", remedy)
        if self.task not in {None, *TASKS}:
            what = f"task cannot be {shorten(repr(self.task))}."
            raise ConfigurationError(what, f"Use one of {', '.join(TASKS)}.")

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
        """The figures that are known, by their names."""
        return {name: value for name, value in vars(self).items() if value is not None and name != "simulated"}

    def report(self) -> Report:
        """Return which figures are known; they themselves are among the figures."""
        names = ", ".join(self.measured) or "nothing"
        return Report("Evidence", (f"Measured: {names}.",), figures=(Table("", ("figure", "value"), self.rows()),))

    def rows(self) -> tuple[tuple[str, str], ...]:
        """Return the figures that are known as people read them, one in a row; phases are rows of their own."""
        values = {name: getattr(self, name) for name in FIGURES if name not in {"shares", "simulated"}}
        phases = {name: share for name, share in (self.shares or {}).items() if name not in {DATA, TRANSFER}}
        return (
            *((FIGURES[name][0], in_unit(FIGURES[name][1], one)) for name, one in values.items() if one is not None),
            *((f"step spent on {name}", in_unit(SHARE, share)) for name, share in phases.items()),
        )


COMPUTED = {
    "shares": {
        "data_share": ("step spent on waiting for data", SHARE),
        "transfer_share": ("step spent on copies to the device", SHARE),
    },
    "texts_to_do": {"hours": ("time for all texts", HOURS)},
}
# What each figure is called, and what it counts; those that are computed from others stand behind them.
FIGURES: dict[str, tuple[str, str]] = {
    name: said
    for one in fields(Evidence)
    for name, said in {one.name: one.metadata["figure"], **COMPUTED.get(one.name, {})}.items()
}


def evidence_of(
    *reports: Any, gates: Thresholds | None = None, task: str | None = None, texts: int | None = None
) -> Evidence:
    """Return the figures of reports, in whatever order they are passed.

    Args:
        reports: At most one of each kind; perhaps an :class:`Evidence` with figures of the person's own, which count most.
        gates: The thresholds: they decide from which growth on a memory curve grows.
        task: What the model is used for; ``None`` for what the reports say.
        texts: How many texts are to be done.

    Raises:
        ConfigurationError: For what is not a report, two of one kind, and reports of several devices, models or tasks.
    """
    from ..comparison import Comparison  # These import numpy.
    from ..figures import READERS, Context
    from ..signals import Signals

    found = by_kind(reports, [Evidence, *(kind for kind, _, read in READERS if read is not None)])
    own: Evidence = found.pop(Evidence, Evidence())
    about = [read(found[kind]) for kind, read, _ in READERS if kind in found and read is not None]
    context = Context(own.device or device_of(about, found.get(Comparison)), gates or Thresholds(), own.measured)
    for kind, _, read in READERS:
        if kind in found and read is not None:
            shown = {name: value for name, value in read(found[kind], context).items() if value is not None}
            context = replace(context, known={**shown, **context.known})
    models = own.models or models_of(found.values()) or None
    only("a model in several types", (one.run.dtype for one in about if one.run.dtype), "Pass reports of one type.")
    # A forecast runs on the CPU, so a simulation changes nothing of it; signals are of the computer alone.
    simulated = any(one.simulated for one in about if one.report != "forecast")
    return replace(
        own,
        **{
            **context.known,
            "models": models,
            "device": context.device,
            "task": (own.task or task_of(about)) if task is None else task,
            "texts_to_do": own.texts_to_do if texts is None else texts,
            "simulated": own.simulated or simulated or getattr(found.get(Signals), "simulated", False),
        },
    )


def by_kind(reports: Iterable[Any], kinds: Iterable[type]) -> dict[type, Any]:
    """Return reports by their classes; refuse what is not a report, and two of one class."""
    found: dict[type, Any] = {}
    for report in reports:
        kind = next((kind for kind in kinds if isinstance(report, kind)), None)
        if kind is None:
            what = f"{type(report).__name__} is not a report for a verdict."
            raise ConfigurationError(what, "Pass what nb.compare, nb.sweep, nb.runbook.parity and the others return.")
        if kind in found:
            what = f"There are two reports of one kind: {kind.__name__}."
            raise ConfigurationError(what, "Pass one of each, of the same model on the same device.")
        found[kind] = report
    return found


def only(what: str, values: Iterable[str], remedy: str) -> str | None:
    """Return the one value that reports agree on, ``None`` if they name none, or raise."""
    named = sorted(set(values))
    if len(named) > 1:
        raise ConfigurationError(f"The reports are of {what}: {', '.join(named)}.", remedy)
    return named[0] if named else None


def device_of(about: Iterable[ReportFigures], comparison: Comparison | None) -> str | None:
    """Return the device that reports are of; of a comparison alone, the fastest that is not the CPU."""
    named = (one.place for one in about if one.place and one.report != "comparison")
    device = only("several devices", named, "Pass reports of one device.")
    if device is not None or comparison is None:
        return device
    others = [(one.speed_up.middle, one.device) for one in comparison.devices if one.speed_up is not None]
    fastest = max(others, key=lambda one: one[0], default=(0.0, comparison.devices[0].device))
    return canonical(fastest[1])


def task_of(about: Sequence[ReportFigures]) -> str | None:
    """Return what the model is used for; a memory curve is of a training if no other report says more."""
    tasks = {TASK_OF[one.run.task] for one in about if one.run.task in TASK_OF}
    said = only("several tasks", tasks, "Pass reports of one task, or say which with task=.")
    return TRAINING if said is None and any(one.report == "memory" for one in about) else said


def models_of(reports: Iterable[Any]) -> tuple[str, ...]:
    """Return by which names reports call the model, in alphabetical order; refuse two that certainly are of two models."""
    of_model = [getattr(one, "parity", one) for one in reports]  # That of a verdict on a precision.
    called = sorted(
        {(getattr(one, "model", "") or getattr(one, "name", ""), getattr(one, "task", "")) for one in of_model}
    )
    for kind in (is_class, is_loadable):
        named = [name for name, task in called if name and task != OWN_STEP and kind(name)]
        other = next((name for name in named if not is_same(named[0], name)), None)
        if other is not None:
            what = f"The reports are of different models: {shorten(named[0])!r} and {shorten(other)!r}."
            raise ConfigurationError(what, "Pass reports of one model, by one name.")
    return tuple(dict.fromkeys(name for name, _ in called if name))


def is_class(name: str) -> bool:
    """Tell whether a name is that of the class of a model that was passed, not one that a model is loaded by."""
    return name.isidentifier() and name != name.lower() and name not in WRAPPERS


def is_loadable(name: str) -> bool:
    """Tell whether a model is loaded by a name: a bundled one, an id of a hub, or a path."""
    return name in BUNDLED or not name.isidentifier()


def is_same(one: str, other: str) -> bool:
    """Tell whether two names are of one model: classes by their names, others by where they are."""
    if one == other or is_class(one):
        return one == other
    try:
        return find_model(one) == find_model(other)
    except UnknownModel:
        return False
