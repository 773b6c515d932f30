"""The golden run of a bundle, and the smoke test that repeats it on another machine."""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from ...._render.display import (
    FAILED,
    NOT_APPLICABLE,
    OK,
    WARNING,
    Displayable,
    Finding,
    JsonMixin,
    Report,
    Table,
    findings_table,
    format_percent,
    pluralize,
    worst_status,
)
from ...._utils.clock import current_time
from ...._utils.plain import read_json_file, save_text
from ...._utils.text import describe_file, describe_value, short_type_name
from ...._utils.validation import check_integer, check_path
from ....annotation.results import entity_span
from ....devices import backend
from ....devices.computer import DeviceManager
from ....devices.machine import format_device, is_marked_simulated, read_machine
from ....devices.memory import empty_cache
from ....devices.request import DeviceRequest
from ....errors import ConfigurationError, DeviceUnavailableError, OpenMedError, UnknownModelError
from ....models.config import OpenMedConfig
from ....models.files import ModelHashes, file_digest, hash_model_files
from ....models.loading import LoadSpec, model_folder
from ....session import SESSION
from ....training.curve import FLAT, GROWING, METRIC_LABELS, MemoryCurve, take_sample
from ...bench.workloads import target_from_files
from ..logbook.gathering import collect_logbook, package_version
from ..logbook.logbook import Logbook, LogbookDiff
from ..logbook.privacy import fingerprint_dataset, model_from_files
from ..logbook.sections import Dataset, ReportMetrics, finite_numbers

# Files of a bundle that the smoke test reads, and its result file.
CHECKSUMS = "SHA256SUMS"
MODEL = "model"
TEXTS = "texts.json"
GOLDEN = "golden.json"
LOGBOOK = "logbook.json"
REQUIREMENTS = "requirements.txt"
RESULT = "smoke.json"

# Number of untimed steps. The first step of each shape is slower, especially on MPS.
NUM_WARM_UP_STEPS = 2

# Maximum slowdown of the fastest round against the golden run. The value is a choice that tolerates the noise of an idle
# machine and detects significant regressions.
MAX_SLOWDOWN = 0.25
# Maximum fraction of the processors that other processes may use during a speed check. The value is a choice: a step with a
# fifth less of the machine is slower by about MAX_SLOWDOWN.
MAX_BACKGROUND_LOAD = 0.2

MAX_LISTED = 5

BENCHMARK = "golden run"  # Name of the report in a logbook.

RECOPY_REMEDY = "Copy the bundle again from its source."
INSTALL_REMEDY = "Install the packages as described in the README.md of the bundle."

# Names of the checks, in display order.
CHECKS = ("files", "packages", "Python", "device", "model", "entities", "memory", "throughput")


@dataclass(frozen=True)
class EntitySpan:
    """Entity of the golden run.

    Attributes:
        start: Offset of the first character.
        end: Offset after the last character.
        label: Label of the entity.
    """

    start: int
    end: int
    label: str


Entities = tuple[tuple[EntitySpan, ...], ...]


@dataclass(frozen=True)
class GoldenRun(JsonMixin):
    """Configuration and expected entities of the run that a bundle repeats.

    Attributes:
        model: Directory of the model in the bundle. If the model was not copied, its hub id, or the name of its
            directory without the path.
        copied: Whether the model was copied.
        model_hashes: Fingerprints of the model files.
        dtype: Data type of the weights in memory.
        device: Device of the golden run.
        batch_size: Number of texts per step.
        rounds: Number of rounds for the memory check, after one warm-up round.
        steps: Number of steps per round.
        environment: Environment variables that are set before packages are imported.
        dataset: Fingerprint of the dataset of the original work, or null if there is none.
        dataset_copied: Whether the texts of the bundle are that dataset. Otherwise they are synthetic.
        entities: Expected entities of each text.
        owner: Person or team that is responsible for the golden command, or null.

    Raises:
        ConfigurationError: If a size is out of range. A bundle from an unknown source could otherwise run endlessly.
    """

    SCHEMA = "openmed_nb/golden/1"

    model: str
    copied: bool
    model_hashes: ModelHashes
    dtype: str
    device: str
    batch_size: int
    rounds: int
    steps: int
    environment: dict[str, str]
    dataset: Dataset | None
    dataset_copied: bool
    entities: tuple[tuple[EntitySpan, ...], ...] = ()
    owner: str | None = None

    def __post_init__(self) -> None:
        for name, minimum, maximum in (("batch_size", 1, 4096), ("rounds", 4, 1000), ("steps", 1, 1000)):
            object.__setattr__(self, name, check_integer(name, getattr(self, name), minimum, maximum))

    def spec(self, bundle: Path, model: str | os.PathLike[str] | None = None) -> LoadSpec:
        """Return the specification to load the model without a network.

        Args:
            bundle: Directory of the bundle.
            model: Name or directory of a model that was not copied. If ``None``, use the name in the bundle.

        Raises:
            ConfigurationError: If the model is not found.
        """
        name = str(bundle / self.model if self.copied else model or self.model)
        try:
            return LoadSpec.from_name(name, OpenMedConfig(dtype=self.dtype, local_only=True))
        except UnknownModelError as error:
            message = f"The model {describe_value(name)} was not found in the bundle or on this machine."
            raise ConfigurationError(message, "Pass its folder: --model FOLDER.") from error


@dataclass(frozen=True, repr=False)
class SmokeBenchmark(Displayable):
    """Throughput and memory of a golden run.

    Attributes:
        name: Display name of the model.
        device: Device of the run, labeled if it is simulated.
        batch_size: Number of texts per step.
        texts_per_second: Throughput of each round.
        memory: Memory after each round. The first round is a warm-up.
    """

    name: str
    device: str
    batch_size: int
    texts_per_second: tuple[float, ...]
    memory: MemoryCurve

    JSON_PROPERTIES = ("fastest",)

    @property
    def simulated(self) -> bool:
        """Whether the device was simulated."""
        return is_marked_simulated(self.device)

    @property
    def fastest(self) -> float:
        """Texts per second in the fastest round, which is the least affected by other processes."""
        return max(self.texts_per_second)

    def logbook_metrics(self) -> ReportMetrics:
        """Return the metrics for a logbook."""
        from ...verdict.figures import extract_metrics

        memory = extract_metrics(self.memory)
        rates = self.texts_per_second
        values = {"texts_per_second": self.fastest, "texts_per_second_median": median(rates), **memory.values}
        run = replace(memory.run, task="annotation", batch_size=self.batch_size, workers=0)
        verdict = self.memory.verdict
        return ReportMetrics(
            BENCHMARK, "golden texts", self.device, verdict, self.simulated, finite_numbers(values), run
        )

    def to_report(self) -> Report:
        """Return the memory verdict. Only the HTML form contains the throughput."""
        rows = (("fastest round", f"{self.fastest:.1f}"), ("median round", f"{median(self.texts_per_second):.1f}"))
        metrics = [Table("Throughput", ("round", "texts per second"), rows)]
        for table in self.memory.to_report().tables[:1]:
            columns = ("round", *table.columns[1:])
            caption = table.caption.replace("epoch", "round")
            metrics.append(Table(caption, columns, table.rows, collapsed=True))
        title = f"Golden run of {self.name} on {self.device}: memory is {self.memory.verdict}"
        return Report(title, metrics=tuple(metrics))


def record_golden_run(
    golden: GoldenRun, device_manager: DeviceManager, spec: LoadSpec, name: str, texts: list[str]
) -> tuple[Logbook, SmokeBenchmark, Entities]:
    """Annotate texts once to record their entities, then repeatedly to measure throughput and memory."""
    from ....annotation.stream import unwrap_result  # This module imports numpy.

    device = golden.device
    benchmark_target = target_from_files(spec, texts, None).build(device)
    device_manager.load_torch()
    folder = model_folder(spec)
    book = collect_logbook(
        device_manager, device, model_from_files(name, folder, spec.dtype), folder, fingerprint_dataset(texts)
    )
    entity_workload = benchmark_target.data_workload(len(texts))
    results = entity_workload.run(next(entity_workload.batches()))
    entities = tuple(
        tuple(EntitySpan(*entity_span(entity)) for entity in unwrap_result(result)) for result in results.outcomes()
    )

    workload = benchmark_target.data_workload(golden.batch_size)
    batches = workload.batches()
    run_start = current_time()
    for _ in range(NUM_WARM_UP_STEPS):
        workload.run(next(batches))
    curve = MemoryCurve(device)
    rates = []
    for number in SESSION.track("Measuring", workload.name, range(1, golden.rounds + 2), "round"):
        round_start = current_time()
        for _ in range(golden.steps):
            workload.run(next(batches))
        rates.append(golden.batch_size * golden.steps / (current_time() - round_start))
        gc.collect()
        empty_cache(device)
        curve = curve.append(take_sample(device, number, number * golden.steps, current_time() - run_start))
    benchmark = SmokeBenchmark(workload.name, format_device(device), golden.batch_size, tuple(rates), curve)
    return book.with_reports(benchmark), benchmark, entities


def changed_files(bundle: Path) -> dict[str, str]:
    """Return the problems of files in a bundle by name: ``"changed"``, ``"missing"`` or ``"without a checksum"``.

    Raises:
        ConfigurationError: If the directory is not a bundle.
    """
    try:
        text = (bundle / CHECKSUMS).read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        message = f"{describe_file(bundle)} is not a bundle: its {CHECKSUMS} cannot be read."
        raise ConfigurationError(message, "Pass a folder that nb.handoff() created.") from None
    changed = dict.fromkeys((GOLDEN, TEXTS, LOGBOOK, REQUIREMENTS), "without a checksum")
    for checksum, name in re.findall(r"([0-9a-f]{64})  (.+)", text):
        changed.pop(name, None)
        try:
            if file_digest(bundle / name, "sha256") != checksum:
                changed[name] = "changed"
        except OSError:
            changed[name] = "missing"
    return changed


def _unmet_requirements(requirements: str) -> dict[str, str]:
    """Return the installed packages whose version differs from a requirements file. Build suffixes are ignored."""
    unmet = {}
    for name, pinned in re.findall(r"^(\S+)==(\S+)", requirements, re.MULTILINE):
        installed = package_version(name)
        if installed is not None and installed.partition("+")[0] != pinned:
            unmet[name] = f"{installed} instead of {pinned}"
    return unmet


def _check_unchanged(name: str, differences: Mapping[str, str], evidence: str, remedy: str) -> Finding:
    """Return a finding that fails if there are differences. It lists at most ``MAX_LISTED`` of them."""
    if not differences:
        return Finding(name, OK, evidence)
    listed = [f"{key} {difference}" for key, difference in list(differences.items())[:MAX_LISTED]]
    if len(differences) > MAX_LISTED:
        listed.append(f"{len(differences) - MAX_LISTED} more")
    return Finding(name, FAILED, ", ".join(listed), remedy)


def _check_python(reference: Logbook | None) -> Finding:
    """Compare the major and minor version of Python with the golden run."""
    if reference is None:
        return Finding("Python", NOT_APPLICABLE, "unknown: the bundle does not have a logbook")
    expected = ".".join(reference.software.python.split(".")[:2])
    current = f"{sys.version_info.major}.{sys.version_info.minor}"
    if current == expected:
        return Finding("Python", OK, f"Python {current}, as in the golden run")
    return Finding("Python", WARNING, f"{current} instead of {expected}", f"Use Python {expected}.")


def check_entities(golden: Entities, current: Entities) -> Finding:
    """Compare the entities of each text with the golden run."""
    num_missing = 0
    num_extra = 0
    different_texts = []
    for index, (expected, predicted) in enumerate(zip(golden, current, strict=True)):
        missing = (Counter(expected) - Counter(predicted)).total()
        extra = (Counter(predicted) - Counter(expected)).total()
        num_missing += missing
        num_extra += extra
        if missing or extra:
            different_texts.append(str(index))
    if not different_texts:
        total = pluralize(sum(map(len, current)), "entity", "entities")
        return Finding("entities", OK, f"the same {total} in {pluralize(len(current), 'text')}")
    indices = ", ".join(different_texts[:MAX_LISTED])
    evidence = f"different in {pluralize(len(different_texts), 'text')} ({indices}): {num_missing} missing, {num_extra} additional"
    remedy = "Do not use the model on this machine until you know the reason; see nb.runbook.parity()."
    return Finding("entities", FAILED, evidence, remedy)


def check_memory(curve: MemoryCurve, rounds: int) -> Finding:
    """Check that memory is stable, with the growth threshold of trainings."""
    evidence = f"{curve.verdict} over {pluralize(rounds, 'round')}"
    if curve.verdict == FLAT:
        return Finding("memory", OK, evidence)
    status = FAILED if curve.verdict == GROWING else WARNING
    remedy = "Find the references to the memory with nb.training.find_tensor_referrers()."
    return Finding("memory", status, f"{METRIC_LABELS[curve.deciding_metric]}: {evidence}", remedy)


def check_throughput(reference: Logbook | None, current: Logbook, benchmark: SmokeBenchmark) -> Finding:
    """Compare the throughput with the golden run, if the two runs are comparable."""
    name = "throughput"
    reports = reference.metrics if reference else ()
    rates = [metrics.values.get("texts_per_second") for metrics in reports if metrics.report == BENCHMARK]
    expected = rates[-1] if rates else None
    if reference is None or expected is None:
        return Finding(name, NOT_APPLICABLE, "not checked: the logbook of the bundle does not have reliable metrics")
    reasons = LogbookDiff(reference, current).reasons
    if reasons:
        names = ", ".join(reason.name for reason in reasons)
        return Finding(name, NOT_APPLICABLE, f"not checked: this run is not comparable with the golden run ({names})")
    books = {"the golden run": reference, "this run": current}
    busy_runs = " and ".join(
        run for run, book in books.items() if (book.background.cpu_fraction or 0.0) > MAX_BACKGROUND_LOAD
    )
    if busy_runs:
        evidence = (
            f"not checked: other processes used more than {format_percent(MAX_BACKGROUND_LOAD)} of the processors "
            f"during {busy_runs}"
        )
        return Finding(name, WARNING, evidence, "Repeat the smoke test on an idle machine.")
    if benchmark.fastest >= expected * (1 - MAX_SLOWDOWN):
        return Finding(name, OK, "as fast as the golden run")
    slowdown = 1 - benchmark.fastest / expected
    evidence = f"{format_percent(slowdown)} slower than the golden run; the limit is {format_percent(MAX_SLOWDOWN)}"
    return Finding(name, FAILED, evidence, "Repeat the smoke test. If it fails again, find the cause of the slowdown.")


@dataclass(frozen=True, repr=False)
class SmokeReport(Displayable):
    """Result of the smoke test of a bundle.

    Attributes:
        findings: Results of the checks.
        reference: Logbook of the golden run, or ``None`` if it is unreadable.
        benchmark: Throughput and memory of this run, or ``None`` if the model was not run.
        logbook: Logbook of this run with its metrics, or ``None`` if the model was not run.
    """

    JSON_EXCLUDE = ("reference",)
    JSON_PROPERTIES = ("passed", "simulated", "comparison")

    findings: tuple[Finding, ...]
    reference: Logbook | None = None
    benchmark: SmokeBenchmark | None = None
    logbook: Logbook | None = None

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return all(finding.status != FAILED for finding in self.findings)

    @property
    def simulated(self) -> bool:
        """Whether the run used a simulated device."""
        return self.logbook is not None and self.logbook.simulated

    @property
    def comparison(self) -> LogbookDiff | None:
        """Comparison with the logbook of the golden run, or ``None`` if one of the two is missing."""
        return LogbookDiff(self.reference, self.logbook) if self.reference and self.logbook else None

    def to_report(self) -> Report:
        """Return the findings. Only the HTML form contains the throughput."""
        failed = [finding.name for finding in self.findings if finding.status == FAILED]
        title = f"Smoke test failed: {', '.join(failed)}" if failed else "Smoke test passed"
        metrics = self.benchmark.to_report().metrics if self.benchmark else ()
        headline = title if failed else f"{title}: this machine reproduces the golden run"
        table = findings_table("", self.findings)
        return Report(
            title, (), (table,), metrics=metrics, html_sentences=(headline,), status=worst_status(self.findings)
        )


def run_smoke_test(
    bundle: str | os.PathLike[str], device: str | None = None, model: str | os.PathLike[str] | None = None
) -> SmokeReport:
    """Run the smoke test of a bundle. Nothing is downloaded, and the bundle is not changed.

    Args:
        bundle: Directory of the bundle, created by ``nb.handoff()``.
        device: Device of the run. If ``None``, use the device of the golden run, or the best available device if that is
            not available.
        model: Directory of a model that is not in the bundle.

    Returns:
        The results of the checks.

    Raises:
        ConfigurationError: If ``bundle`` is not a bundle.
        UnknownDeviceError: If ``device`` is not a valid device name.
        DeviceUnavailableError: If ``device`` is not available.
    """
    folder = check_path(bundle, "bundle").absolute()
    changed = changed_files(folder)
    golden: GoldenRun = read_json_file(GoldenRun, folder / GOLDEN, "the golden run of a bundle", RECOPY_REMEDY)
    reference = None if LOGBOOK in changed else Logbook.read(folder / LOGBOOK)
    requirements = "" if REQUIREMENTS in changed else (folder / REQUIREMENTS).read_text("utf-8")

    findings = {name: Finding(name, NOT_APPLICABLE, "not run") for name in CHECKS}
    findings["files"] = _check_unchanged("files", changed, "all files are unchanged", RECOPY_REMEDY)
    unmet = _unmet_requirements(requirements)
    findings["packages"] = _check_unchanged(
        "packages", unmet, "all packages have the versions of the bundle", INSTALL_REMEDY
    )
    findings["Python"] = _check_python(reference)
    if any(name in {GOLDEN, TEXTS} or name.startswith(f"{MODEL}/") for name in changed):
        return SmokeReport(tuple(findings.values()), reference)

    texts: tuple[str, ...] = read_json_file(tuple[str, ...], folder / TEXTS, "the texts of a bundle", RECOPY_REMEDY)
    if len(texts) != len(golden.entities):
        raise ConfigurationError(
            f"The {TEXTS} and the {GOLDEN} of the bundle do not have the same number of texts.", RECOPY_REMEDY
        )
    device_manager = DeviceManager(os.environ, read_machine, backend)
    selected_device, deviation = _select_device(golden.device, device, device_manager)
    if deviation:
        findings["device"] = Finding("device", WARNING, deviation, "Run it on a machine with that device.")
    spec = golden.spec(folder, model)
    try:
        if hash_model_files(model_folder(spec)) != golden.model_hashes:
            evidence = "the files differ from the golden run"
            findings["model"] = Finding(
                "model", FAILED, evidence, "Download the model in the revision of the golden run."
            )
            return SmokeReport(tuple(findings.values()), reference)
        local_run = replace(golden, device=selected_device)
        book, benchmark, entities = record_golden_run(local_run, device_manager, spec, MODEL, list(texts))
    except OpenMedError as error:
        findings["run"] = Finding("run", FAILED, str(error), "Fix the error, then repeat the smoke test.")
        return SmokeReport(tuple(findings.values()), reference)

    if not deviation:
        findings["device"] = Finding("device", OK, f"the run used {selected_device}")
    findings["model"] = Finding("model", OK, "the files are the same as in the golden run")
    findings["entities"] = check_entities(golden.entities, entities)
    findings["memory"] = check_memory(benchmark.memory, golden.rounds)
    findings["throughput"] = check_throughput(reference, book, benchmark)
    return SmokeReport(tuple(findings.values()), reference, benchmark, book)


def _select_device(golden: str, requested: str | None, device_manager: DeviceManager) -> tuple[str, str]:
    """Return the device to use, and the reason if it is not the device of the golden run."""
    request = golden if requested is None else requested
    try:
        device = device_manager.confirm(DeviceRequest.parse(request, "bundle")).device
    except DeviceUnavailableError:
        if requested is not None:
            raise
        device = device_manager.confirm(DeviceRequest.parse("auto", "bundle")).device
        return device, f"{golden} is not available, so the run used {device}"
    return device, "" if device == golden else f"{device} was requested instead of {golden}"


def main(bundle: Path, arguments: list[str]) -> int:
    """Run the smoke test, print its result, write it to the bundle, and return the exit status."""
    parser = argparse.ArgumentParser("smoke.py", description="Run the smoke test of this bundle.")
    parser.add_argument("--device", help="auto, cpu, cuda, cuda:N, mps or gpu (default: the device of the golden run)")
    parser.add_argument("--model", help="directory of the model, if it is not in the bundle")
    options = parser.parse_args(arguments)
    result: dict[str, object] = {"passed": False}
    try:
        report = run_smoke_test(bundle, options.device, options.model)
        result = report.to_dict()
        sys.stdout.write(f"{report}\n")
    except OpenMedError as error:
        result.update(error.to_dict())
        sys.stderr.write(f"{short_type_name(error)}: {error}\n")
    try:
        save_text(bundle / RESULT, json.dumps(result, indent=2) + "\n")
    except ConfigurationError as error:  # An unwritable result file does not change the exit status.
        sys.stderr.write(f"{error}\n")
    return 0 if result["passed"] else 1
