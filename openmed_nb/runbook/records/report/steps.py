"""The steps of a report: one table, and the functions that run in the processes of its rows."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ...._render.display import (
    FAILED,
    NOT_APPLICABLE,
    OK,
    UNKNOWN,
    WARNING,
    Displayable,
    Finding,
    Report,
    Table,
    findings_table,
    format_milliseconds,
)
from ...._render.drawing import Chart, bar_chart
from ....devices.machine import format_device, is_mps_simulated
from ....session import SESSION
from ..logbook.sections import ReportMetrics
from .record import MASK

if TYPE_CHECKING:
    from ...bench.workloads import AnnotationBenchmark

MODEL = "bundled"


@dataclass(frozen=True)
class StepOptions:
    """What a step is asked for."""

    quick: bool
    training: bool
    device: str  # Where it measures.
    figures: tuple[ReportMetrics, ...] = ()  # What the steps before it found, for the logbook.


@dataclass(frozen=True)
class StepResult:
    """What a step found."""

    shown: Displayable
    judged: tuple[Any, ...] = ()  # The reports in it that a logbook and a verdict read.
    figures: tuple[ReportMetrics, ...] = ()  # Figures of what no logbook reads otherwise.
    summary: str = ""  # What it found in a sentence with figures; empty where the report says it itself.
    status: str = OK  # How good that is, where the report has no findings.


@dataclass(frozen=True)
class Step:
    """A row of the table."""

    name: str
    about: str  # What it tells, as the heading of its part of the page.
    run: Callable[
        [StepOptions], StepResult
    ]  # Runs in a process of its own; it is found there by its module and its name.
    seconds: float  # About how long it takes, for the time that is left.
    limit: float = 150.0  # After so many seconds it hangs, and is ended.


def _device(_asked: StepOptions) -> StepResult:
    SESSION.device_manager.load_torch()  # What is only planned is no answer.
    return StepResult(SESSION.device())


def _doctor(_asked: StepOptions) -> StepResult:
    from ...checks.doctor.report import doctor

    found = doctor()
    return StepResult(found, judged=(found,))


def _signals(_asked: StepOptions) -> StepResult:
    from ..signals import system_status

    found = system_status()
    findings = found.findings()
    parts = [f"{finding.name} {finding.evidence}" for finding in findings if finding.evidence != UNKNOWN]
    unknown = ", ".join(finding.name for finding in findings if finding.evidence == UNKNOWN)
    if unknown:
        parts.append(f"not known: {unknown}")
    sentence = "; ".join(parts)
    return StepResult(found, summary=f"{sentence[:1].upper()}{sentence[1:]}.")


def _parity(asked: StepOptions) -> StepResult:
    from ...bench.workloads import TEXTS
    from ...checks.precision.parity import parity

    longer = () if asked.quick else (" ".join(TEXTS), " ".join(TEXTS * 12))  # The last is read in several windows.
    found = parity(MODEL, [*TEXTS, *longer], device=asked.device, gradients=True)
    apart = f"Logits differ by at most {found.logits.maximum:.2g}"
    gradients = f", gradients by {found.gradients.largest:.2g} of their length" if found.gradients else ""
    same = f"{found.spans.exact} of {found.spans.all} entities are the same"
    return StepResult(found, judged=(found,), summary=f"{apart}{gradients}; {same}.")


@dataclass(frozen=True, repr=False)
class Measurement(Displayable):
    """What a step measured for which there is no other report.

    Attributes:
        title: What it is.
        device: Where it was measured, marked if that is simulated.
        sentences: What it says without figures.
        findings: What to think of it.
        values: Its figures, by names that name their units.
        simulated: Whether the device is simulated.
        pictures: Its figures as pictures.
    """

    title: str
    device: str
    sentences: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    values: Mapping[str, float] = field(default_factory=dict)
    simulated: bool = field(default_factory=is_mps_simulated)
    pictures: tuple[Chart, ...] = ()

    JSON_EXCLUDE = ("pictures",)

    def to_report(self) -> Report:
        """Return what was found; the figures stand in the HTML."""
        rows = tuple((name.replace("_", " "), f"{value:.4g}") for name, value in self.values.items())
        return Report(
            f"{self.title} on {self.device}",
            self.sentences,
            (findings_table("", self.findings),),
            metrics=(Table("Figures", ("figure", "value"), rows),),
            charts=self.pictures,
        )

    def figures(self, report: str) -> ReportMetrics:
        """Return what a logbook keeps of it."""
        return ReportMetrics(report, MODEL, self.device, None, self.simulated, dict(self.values))


def _benched(asked: StepOptions, training: bool = False) -> AbstractContextManager[Any]:
    """Put the model on the device for a block, to annotate with or to train."""
    from ...bench.workloads import open_benchmark

    return open_benchmark(MODEL, training=training, device=asked.device, arguments={})


SHAPES = ((1, 16), (1, 64), (1, 128), (1, 256), (8, 32), (8, 128), (32, 64), (32, 128), (16, 256))
QUICK_SHAPES = ((1, 32), (8, 32), (1, 128), (8, 128))
BATCH_ROWS = 32
LENGTH = 128


def _seconds_of_shape(bench: AnnotationBenchmark, rows: int, length: int) -> tuple[float, float]:
    """Return how long the first pass of a shape takes, in which MPS compiles, and the median of some after it."""
    workload = replace(bench, length=length).fixed_shape_workload(rows)
    with workload.open_batches() as batches:
        batch = next(batches)
        return workload.seconds(batch), statistics.median(workload.seconds(batch) for _ in range(3))


def _shapes(asked: StepOptions) -> StepResult:
    tried = QUICK_SHAPES if asked.quick else SHAPES
    with _benched(asked) as bench:
        times = {f"{rows} x {length}": _seconds_of_shape(bench, rows, length) for rows, length in tried}
    pairs = []
    for shape, (first, later) in times.items():
        pairs += [(f"{shape}, first", first), (f"{shape}, later", later)]
    values = {f"{name.replace(', ', '_').replace(' ', '_')}_seconds": seconds for name, seconds in pairs}
    picture = bar_chart("How long a pass takes, by rows x tokens", pairs, format_milliseconds)
    sentence = f"Rows x tokens: {', '.join(times)}."
    found = Measurement(
        "Passes of new shapes", format_device(asked.device), (sentence,), (), values, pictures=(picture,)
    )
    first = sum(first for first, _ in times.values())
    later = sum(later for _, later in times.values())
    says = f"The first passes of {len(times)} shapes took {first:.2f} s together, later ones {later:.2f} s."
    return StepResult(found, figures=(found.figures("shapes"),), summary=says)


def _rows(asked: StepOptions) -> StepResult:
    with _benched(asked) as bench:
        _, alone = _seconds_of_shape(bench, 1, LENGTH)
        _, together = _seconds_of_shape(bench, BATCH_ROWS, LENGTH)
        difference = _difference_alone(bench, BATCH_ROWS, LENGTH)
    together /= BATCH_ROWS
    pairs = [(f"1 x {LENGTH}", alone), (f"{BATCH_ROWS} x {LENGTH}", together)]
    found = Measurement(
        "Rows alone and together",
        format_device(asked.device),
        findings=(_check_difference(difference),),
        values={"seconds_a_row_alone": alone, "seconds_a_row_together": together, "largest_difference": difference},
        pictures=(bar_chart("How long each row takes, by rows x tokens", pairs, format_milliseconds),),
    )
    row = f"A row takes {format_milliseconds(alone)} alone and {format_milliseconds(together)} among {BATCH_ROWS}"
    return StepResult(
        found, figures=(found.figures("rows"),), summary=f"{row}; logits differ by at most {difference:.2g}."
    )


def _difference_alone(bench: AnnotationBenchmark, rows: int, length: int, alone: int = 4) -> float:
    """Return the largest difference of a logit of some rows, each alone, from the same rows among others."""
    import numpy as np
    import torch

    network = bench.annotator.network
    ids = np.random.default_rng(0).integers(0, int(network.model.config.vocab_size), (rows, length))
    with torch.no_grad():
        together = network.logits(network.build_inputs(ids, np.ones_like(ids)))[:alone].cpu()
        each = [network.logits(network.build_inputs(row[None], np.ones_like(row[None]))).cpu() for row in ids[:alone]]
    return float((torch.cat(each) - together).abs().max())


def _check_difference(difference: float) -> Finding:
    """Judge whether a row has the answer alone that it has among others; NaN is as bad as any difference.

    Example:
        >>> _check_difference(1e-6).status, _check_difference(0.5).status, _check_difference(float("nan")).status
        ('ok', 'failed', 'failed')
    """
    from ...checks.precision.policy import TOLERANCES

    tolerance = TOLERANCES["float32"].logits or 0.0
    name = "rows alone and together"
    if difference <= tolerance:
        return Finding(name, OK, f"every logit is the same within {tolerance:g}")
    what = f"a logit differs by more than {tolerance:g} (pytorch#170837)"
    return Finding(name, FAILED, what, "Annotate on the CPU, or with batch_size=1 after parity with it.")


def _calibration(asked: StepOptions) -> StepResult:
    from ....annotation.loading import load_pipeline

    found = load_pipeline(MODEL, device=asked.device).calibrate()
    fastest = max(speed for _tokens, speed in found.speeds)
    values = {"batch_tokens": found.batch_tokens, "measure_throughput": fastest}
    figures = ReportMetrics("calibration", MODEL, found.device, None, is_mps_simulated(), values)
    says = f"{found.batch_tokens:,} tokens at once are enough; the fastest batch reads {fastest:,.0f} tokens a second."
    return StepResult(found, figures=(figures,), summary=says)


def _compare(asked: StepOptions) -> StepResult:
    from ...bench.comparison import compare
    from ...bench.timing import format_rate

    found = compare(
        MODEL,
        devices=[asked.device],
        training=asked.training,
        rounds=6 if asked.quick else 12,
        utilization_seconds=0 if asked.quick else 6,
        seconds=60,
    )
    says = [
        f"{found.shown(device.device)}: {format_rate(device.rows_per_second)} rows a second" for device in found.devices
    ]
    faster = [device for device in found.devices if device.speedup]
    says += [f"{found.shown(device.device)} is {device.speedup} times as fast" for device in faster]
    return StepResult(found, (found,), summary=f"{'; '.join(says)}.")


def _sweep(asked: StepOptions) -> StepResult:
    from ...bench.sweep import sweep

    limits: dict[str, Any] = {"max_batch_size": 32, "seconds": 5.0} if asked.quick else {"seconds": 30.0}
    found = sweep(MODEL, training=asked.training, device=asked.device, **limits)
    if found.knee is None:
        says = f"No best batch was found. {found.knee_reason} Run nb.sweep() with more seconds."
        return StepResult(found, (found,), summary=says, status=WARNING)
    return StepResult(found, (found,), summary=f"The knee: {found.knee_reason} {found.stop_reason}")


def _profile(asked: StepOptions) -> StepResult:
    from ...bench.profile import profile

    steps = 5 if asked.quick else 20
    warm_up = 2 if asked.quick else 5
    found = profile(MODEL, steps=steps, warm_up=warm_up, training=asked.training, device=asked.device)
    longest = max(found.shares, key=found.shares.__getitem__)
    says = f"A step takes {format_milliseconds(found.seconds)}; {longest} takes most of it."
    return StepResult(found, (found,), summary=says)


def _memory(asked: StepOptions) -> StepResult:
    from ...bench.workloads import measure_epoch_memory

    with _benched(asked, training=True) as bench:
        found = measure_epoch_memory(bench.fixed_shape_workload(4), 1 if asked.quick else 4, bench.device)
    return StepResult(found, (found,))


def _fallbacks(asked: StepOptions) -> StepResult:
    from ....annotation.loading import load_pipeline
    from ...bench.workloads import TEXTS
    from ...checks.operators.fallbacks import fallbacks
    from ...checks.operators.forecast import forecast

    pipe = load_pipeline(MODEL, device=asked.device)
    predicted = forecast(pipe, training=True)
    with _benched(asked, training=True) as bench, fallbacks() as ledger:
        pipe(list(TEXTS))
        workload = bench.fixed_shape_workload(2)
        with workload.open_batches() as batches:
            workload.run(next(batches))
    finding = _check_fallbacks(predicted.cpu_operators, ledger.operators, ledger.operators_on_mps)
    said = (predicted.verdict, ledger.verdict)
    found = Measurement("Fallbacks against the forecast", format_device(asked.device), said, (finding,))
    says = f"The forecast: {predicted.verdict} What happened: {ledger.verdict}"
    return StepResult(found, (predicted, ledger), summary=says)


def _check_fallbacks(predicted: Iterable[str], left: Iterable[str], on_mps: int) -> Finding:
    """Judge whether the operators that left MPS, of so many that were called on it, are those that were predicted.

    Example:
        >>> _check_fallbacks(["aten::_linalg_eigh"], ["aten::_linalg_eigh.eigenvalues"], 9).status
        'ok'
        >>> _check_fallbacks([], ["aten::mode"], 9).evidence
        'aten::mode left MPS, and the forecast does not say so'
    """
    name = "forecast"
    bases = {operator.split(".")[0] for operator in predicted}
    if not on_mps:
        return Finding(name, NOT_APPLICABLE, "nothing was computed on MPS, so nothing could fall back")
    if unexpected := [operator for operator in left if operator.split(".")[0] not in bases]:
        what = f"{', '.join(unexpected)} left MPS, and the forecast does not say so"
        return Finding(name, WARNING, what, "Send this report: the forecast's table lacks it.")
    return Finding(name, OK, "everything that left MPS was predicted")


def _logbook(asked: StepOptions) -> StepResult:
    from ..logbook.gathering import logbook
    from ..logbook.logbook import merge_run
    from ..logbook.privacy import SHARED_VARIABLES

    book = logbook(model=MODEL)
    # Where folders are is of this computer alone.
    shared = {name: value for name, value in book.environment.items() if name in SHARED_VARIABLES}
    storage = tuple(replace(place, path=MASK) for place in book.storage)
    book = replace(
        book, environment=shared, storage=storage, run=merge_run(asked.figures, book.run), metrics=asked.figures
    )
    return StepResult(
        book, summary="It can be read with Logbook.read() once it is saved, and compared with another one."
    )


STEPS: tuple[Step, ...] = (
    Step("device", "Which device, and why", _device, 5),
    Step("doctor", "What is right and wrong with it", _doctor, 20),
    Step("signals", "Power, heat and memory before it", _signals, 2),
    Step("parity", "The same answers and gradients as the CPU?", _parity, 15),
    Step("shapes", "Seconds for each new shape", _shapes, 20),
    Step("calibration", "How many tokens at once", _calibration, 30),
    Step("rows", "One row against 32", _rows, 8),
    Step("compare", "How much faster than the CPU", _compare, 50, limit=240.0),
    Step("sweep", "How many rows in a batch", _sweep, 40, limit=240.0),
    Step("profile", "Where the time goes", _profile, 30, limit=240.0),
    Step("memory", "Memory over ten epochs", _memory, 25),
    Step("fallbacks", "What leaves MPS, and what was predicted", _fallbacks, 15),
    Step("logbook", "With what all of it was measured", _logbook, 6),
)
