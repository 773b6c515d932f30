"""Reports of the runbook joined into the evidence of one verdict: of one device, one task, each kind once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ...devices.request import canonical
from ...devices.simulation import MARK, shows_simulated
from ...errors import ConfigurationError, UnknownModel, shorten
from ...models.registry import BUNDLED, find_model
from ...training.curve import MemoryCurve
from ..comparison.comparison import Comparison
from ..operators.fallbacks import FallbackLedger
from ..operators.forecast import Forecast
from ..precision.gate import PrecisionVerdict
from ..precision.parity import ParityReport
from ..slices.profile import Profile
from ..sweep.report import SweepReport
from ..workloads.workload import ANNOTATION as ANNOTATING
from ..workloads.workload import FORWARD_PASS, OWN_STEP, TRAINING_STEP
from .evidence import ANNOTATION, INFERENCE, TRAINING, Evidence
from .reading import READERS, Context
from .thresholds import Gates

TASK_OF: Mapping[str, str] = {ANNOTATING: ANNOTATION, FORWARD_PASS: INFERENCE, TRAINING_STEP: TRAINING}
"""What a measured step is a part of; of a person's own step nobody knows."""

WRAPPERS = frozenset({"OptimizedModule", "DataParallel", "DistributedDataParallel"})
"""What torch wraps models into: the class says nothing of the model."""


def evidence_of(
    *reports: Any, gates: Gates | None = None, task: str | None = None, texts: int | None = None
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
    context = Context(own.device or device_of(found), gates or Gates(), own.measured)
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
