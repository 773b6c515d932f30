"""The golden run of a bundle, and the smoke test that repeats it on another machine."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..._render.display import (
    FAILED,
    NOT_APPLICABLE,
    OK,
    WARNING,
    Finding,
    JsonMixin,
    Report,
    findings_table,
    format_percent,
    pluralize,
    to_text,
)
from ..._utils.clock import current_time
from ..._utils.plain import read_json_file
from ..._utils.text import describe_value, short_type_name
from ...annotation.references import raise_if_error
from ...annotation.storage import entity_span
from ...devices.machine import format_device, is_marked_simulated
from ...devices.registry import empty_cache
from ...devices.request import DeviceRequest
from ...devices.system_status import BackgroundLoadReader
from ...errors import ConfigurationError, DeviceUnavailableError, OpenMedError, UnknownModelError
from ...models.config import OpenMedConfig
from ...models.files import ModelHashes, hash_model_files
from ...models.loading import LoadSpec, model_folder
from ...session import SESSION
from ...training.curve import METRIC_LABELS, STATUS, MemoryCurve, take_sample
from ..bench.timing import Disturbance, find_disturbance
from ..bench.workloads import target_from_files
from ..verdict.metrics import ReportMetrics, extract_metrics, finite_numbers
from .gathering import collect_logbook, fingerprint_dataset, model_from_files
from .logbook import Dataset, Logbook, LogbookDiff

# Files of a bundle that the smoke test reads.
MODEL = "model"
TEXTS = "texts.json"
GOLDEN = "golden.json"
LOGBOOK = "logbook.json"

# Texts per step, steps per round, and rounds. The memory check needs several rounds after the first one, which is a warm-up.
BATCH_SIZE = 32
NUM_STEPS = 3
NUM_ROUNDS = 10
# Number of untimed steps. The first step of each shape is slower, especially on MPS.
NUM_WARM_UP_STEPS = 2

# Maximum slowdown of the fastest round against the golden run. The value is a choice that tolerates the noise of an idle
# machine and detects significant regressions.
MAX_SLOWDOWN = 0.25

MAX_LISTED = 5

RECOPY_REMEDY = "Copy the bundle again from its source."


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
        environment: Environment variables that are set before packages are imported.
        dataset: Fingerprint of the dataset of the original work, or null if there is none.
        dataset_copied: Whether the texts of the bundle are that dataset. Otherwise they are synthetic.
        entities: Expected entities of each text.
        owner: Person or team that is responsible for the golden command, or null.
    """

    SCHEMA = "openmed_nb/golden/1"

    model: str
    copied: bool
    model_hashes: ModelHashes
    dtype: str
    device: str
    environment: dict[str, str]
    dataset: Dataset | None
    dataset_copied: bool
    entities: Entities = ()
    owner: str | None = None

    def spec(self, bundle: Path) -> LoadSpec:
        """Return the specification to load the model without a network, from the bundle if it has the model.

        Raises:
            ConfigurationError: If the model is not found.
        """
        folder = bundle / MODEL
        name = str(folder) if folder.is_dir() else self.model
        try:
            return LoadSpec.from_name(name, OpenMedConfig(dtype=self.dtype, local_only=True))
        except UnknownModelError as error:
            raise ConfigurationError(
                f"The model {describe_value(self.model)} was not found in the bundle or on this machine.",
                f"Copy its folder into the bundle as {MODEL}.",
            ) from error


@dataclass(frozen=True)
class SmokeBenchmark(JsonMixin):
    """Throughput and memory of a golden run.

    Attributes:
        device: Device of the run, labeled if it is simulated.
        texts_per_second: Throughput of each round.
        memory: Memory after each round. The first round is a warm-up.
        disturbance: Why the throughput is not reliable, and counts as not measured. ``None`` if it is reliable.
    """

    JSON_PROPERTIES = ("fastest",)

    device: str
    texts_per_second: tuple[float, ...]
    memory: MemoryCurve
    disturbance: Disturbance | None = None

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
        memory = extract_metrics(self.memory)
        values = {"texts_per_second": None if self.disturbance else self.fastest, **memory.values}
        run = replace(memory.run, task="annotation", batch_size=BATCH_SIZE, workers=0)
        return ReportMetrics("golden run", "golden texts", self.device, self.simulated, finite_numbers(values), run)


def record_golden_run(device: str, spec: LoadSpec, texts: Sequence[str]) -> tuple[Logbook, SmokeBenchmark, Entities]:
    """Annotate texts once to record their entities, then repeatedly to measure throughput and memory."""
    benchmark_target = target_from_files(spec, texts, None).build(device)
    SESSION.device_manager.load_torch()
    folder = model_folder(spec)
    model = model_from_files(spec.reference.name, folder, spec.dtype)
    book = collect_logbook(SESSION.device_manager, device, model, folder, fingerprint_dataset(texts))
    entity_workload = benchmark_target.data_workload(len(texts))
    results = entity_workload.run(next(entity_workload.batches()))
    entities = tuple(
        tuple(EntitySpan(*entity_span(entity)) for entity in raise_if_error(result)) for result in results.outcomes()
    )

    workload = benchmark_target.data_workload(BATCH_SIZE)
    batches = workload.batches()
    read_load = BackgroundLoadReader()
    run_start = current_time()
    for _ in range(NUM_WARM_UP_STEPS):
        workload.run(next(batches))
    curve = MemoryCurve(device)
    rates = []
    for number in SESSION.track("Measuring", workload.name, range(1, NUM_ROUNDS + 2), "round"):
        round_start = current_time()
        for _ in range(NUM_STEPS):
            workload.run(next(batches))
        rates.append(BATCH_SIZE * NUM_STEPS / (current_time() - round_start))
        gc.collect()
        empty_cache(device)
        curve = curve.append(take_sample(device, number, number * NUM_STEPS, current_time() - run_start))
    benchmark = SmokeBenchmark(format_device(device), tuple(rates), curve, find_disturbance(read_load()))
    return book.with_reports(benchmark), benchmark, entities


def check_entities(golden: Entities, current: Entities) -> Finding:
    """Compare the entities of each text with the golden run."""
    expected, predicted = (
        Counter((index, entity) for index, entities in enumerate(run) for entity in entities)
        for run in (golden, current)
    )
    missing = expected - predicted
    extra = predicted - expected
    if not missing and not extra:
        evidence = f"the same {pluralize(predicted.total(), 'entity', 'entities')} in {pluralize(len(current), 'text')}"
        return Finding("entities", OK, evidence)
    different_texts = sorted({index for index, _ in missing + extra})
    evidence = (
        f"different in {pluralize(len(different_texts), 'text')} ({', '.join(map(str, different_texts[:MAX_LISTED]))}): "
        f"{missing.total()} missing, {extra.total()} additional"
    )
    remedy = "Do not use the model on this machine until you know the reason; see nb.runbook.parity()."
    return Finding("entities", FAILED, evidence, remedy)


def check_memory(curve: MemoryCurve) -> Finding:
    """Check that memory is stable, with the growth threshold of trainings."""
    evidence = f"{curve.verdict} over {pluralize(NUM_ROUNDS, 'round')}"
    if STATUS.get(curve.verdict) == OK:
        return Finding("memory", OK, evidence)
    status = FAILED if curve.verdict == "growing" else WARNING
    remedy = "Find the references to the memory with nb.training.find_tensor_referrers()."
    return Finding("memory", status, f"{METRIC_LABELS[curve.deciding_metric]}: {evidence}", remedy)


def check_throughput(reference: Logbook, current: Logbook) -> Finding:
    """Compare the throughput with the golden run, if the two runs are comparable."""
    name = "throughput"
    reasons = LogbookDiff(reference, current).reasons
    if reasons:
        evidence = f"not checked: this run is not comparable with the golden run ({', '.join(reason.name for reason in reasons)})"
        return Finding(name, NOT_APPLICABLE, evidence)
    expected, rate = (book.metrics[-1].values.get("texts_per_second") for book in (reference, current))
    if expected is None or rate is None:  # The run was disturbed.
        evidence = "not checked: one of the two machines was busy or hot"
        return Finding(name, WARNING, evidence, "Repeat both runs on idle machines.")
    slowdown = 1 - rate / expected
    if slowdown <= MAX_SLOWDOWN:
        return Finding(name, OK, "as fast as the golden run")
    evidence = f"{format_percent(slowdown)} slower than the golden run; the limit is {format_percent(MAX_SLOWDOWN)}"
    return Finding(name, FAILED, evidence, "Repeat the smoke test. If it fails again, find the cause of the slowdown.")


def run_smoke_test(bundle: Path) -> tuple[Finding, ...]:
    """Repeat the golden run of a bundle, and compare. Nothing is downloaded.

    Args:
        bundle: Directory of the bundle, created by ``nb.handoff()``.

    Returns:
        The results of the checks of device, entities, memory and throughput.

    Raises:
        ConfigurationError: If a file of the bundle is not valid, or the model is not that of the golden run.
        ModelError: If the model cannot be loaded.
    """
    golden = read_json_file(GoldenRun, bundle / GOLDEN, "the golden run of a bundle", RECOPY_REMEDY)
    texts = read_json_file(tuple[str, ...], bundle / TEXTS, "the texts of a bundle", RECOPY_REMEDY)
    reference = Logbook.read(bundle / LOGBOOK)
    spec = golden.spec(bundle)
    if hash_model_files(model_folder(spec)) != golden.model_hashes:
        raise ConfigurationError(
            "The model files differ from the golden run.",
            "Copy the bundle again, or download the model in the revision of the golden run.",
        )
    device, device_finding = _select_device(golden.device)
    book, benchmark, entities = record_golden_run(device, spec, texts)
    return (
        device_finding,
        check_entities(golden.entities, entities),
        check_memory(benchmark.memory),
        check_throughput(reference, book),
    )


def _select_device(golden: str) -> tuple[str, Finding]:
    """Return the device of the golden run, or the best available device and a warning if it is not available."""
    device_manager = SESSION.device_manager
    try:
        device = device_manager.confirm(DeviceRequest.parse(golden, "bundle")).device
    except DeviceUnavailableError:
        device = device_manager.confirm(DeviceRequest.parse("auto", "bundle")).device
        evidence = f"{golden} is not available, so the run used {device}"
        return device, Finding("device", WARNING, evidence, "Run it on a machine with that device.")
    return device, Finding("device", OK, f"the run used {device}")


def main(bundle: Path) -> int:
    """Run the smoke test, print its result, and return the exit status."""
    try:
        findings = run_smoke_test(bundle)
    except OpenMedError as error:
        sys.stderr.write(f"{short_type_name(error)}: {error}\n")
        return 1
    failed = [finding.name for finding in findings if finding.status == FAILED]
    title = f"Smoke test failed: {', '.join(failed)}" if failed else "Smoke test passed"
    sys.stdout.write(to_text(Report(title, tables=(findings_table("", findings),))) + "\n")
    return 1 if failed else 0
