"""The golden run of a bundle, and its repetition elsewhere: the same files, packages and entities, level memory, the same speed."""

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
from typing import Any

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
from ..logbook.gathering import collect_logbook, version_of
from ..logbook.logbook import Logbook, LogbookDiff
from ..logbook.privacy import fingerprint_dataset, model_from_files
from ..logbook.sections import Dataset, ReportMetrics, finite_numbers

# The files of a bundle that a smoke test reads, and the one that it writes.
CHECKSUMS = "SHA256SUMS"
MODEL = "model"
TEXTS = "texts.json"
GOLDEN = "golden.json"
LOGBOOK = "logbook.json"
REQUIREMENTS = "requirements.txt"
RESULT = "smoke.json"

WARM_UP = 2  # Steps that are not timed: the first one of each shape is slower, most of all on MPS.

# How much slower the fastest round may be than that of the golden run: a choice, so that noise of a quiet computer passes
# and a regression that matters does not.
MAX_SLOWDOWN = 0.25
# What share of the processors other programs may take before speed is not judged: a choice, because a step that has a
# fifth less of the computer is slower by about what is allowed.
MAX_BACKGROUND_LOAD = 0.2

MAX_LISTED = 5

RECOPY_REMEDY = "Take the bundle from where it came from again."
INSTALL = "Install them as the README.md of the bundle says."

# What a smoke test looks at, in this order.
CHECKS = ("files", "packages", "Python", "device", "model", "entities", "memory", "throughput")


@dataclass(frozen=True)
class EntitySpan:
    """An entity that was found: its first character, the character behind it, and its label."""

    start: int
    end: int
    label: str


Entities = tuple[tuple[EntitySpan, ...], ...]


@dataclass(frozen=True)
class GoldenRun(JsonMixin):
    """What a bundle does, and what it must find.

    Attributes:
        model: The folder of the model in the bundle; if it was not copied, its id, or the name of its folder without the path.
        copied: Whether the model was copied.
        content: Fingerprints of the model's files.
        dtype: The type of its weights in memory.
        device: Where it ran.
        batch_size: How many texts a step reads.
        rounds: After how many rounds memory is judged; one more goes before them.
        steps: How many steps a round has.
        variables: The environment variables that are set before anything is imported.
        dataset: The dataset that the work is about, by its checksum; null if none was named.
        dataset_copied: Whether the texts of the bundle are that dataset; if not, they are synthetic.
        entities: The entities of each text.
        owner: Who answers for the golden command; null if nobody was named.

    Raises:
        ConfigurationError: For a trial that would not end, or prove nothing; a bundle comes from somebody else.
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
        for name, least, most in (("batch_size", 1, 4096), ("rounds", 4, 1000), ("steps", 1, 1000)):
            object.__setattr__(self, name, check_integer(name, getattr(self, name), least, most))

    def spec(self, bundle: Path, model: str | os.PathLike[str] | None = None) -> LoadSpec:
        """Return what is loaded without a network: from the bundle, else ``model``, else by its name."""
        name = str(bundle / self.model if self.copied else model or self.model)
        try:
            return LoadSpec.from_name(name, OpenMedConfig(dtype=self.dtype, local_only=True))
        except UnknownModelError as error:
            what = f"The model {describe_value(name)} is not in the bundle, and not here."
            raise ConfigurationError(what, "Say where it is: --model FOLDER.") from error


@dataclass(frozen=True, repr=False)
class SmokeBenchmark(Displayable):
    """What was measured.

    Attributes:
        name: What a person calls the model.
        device: Where it ran, marked if it is simulated.
        batch_size: How many texts a step reads.
        texts_per_second: Of each round.
        memory: The memory after each round, the first one a warm-up.
    """

    name: str
    device: str
    batch_size: int
    texts_per_second: tuple[float, ...]
    memory: MemoryCurve

    JSON_PROPERTIES = ("fastest",)

    @property
    def simulated(self) -> bool:
        """Whether the device was a simulated one."""
        return is_marked_simulated(self.device)

    @property
    def fastest(self) -> float:
        """Texts a second in the fastest round: what other programs disturb least."""
        return max(self.texts_per_second)

    def logbook_figures(self) -> ReportMetrics:
        """Return what a logbook keeps of it."""
        from ...verdict.figures import extract_metrics

        memory = extract_metrics(self.memory)
        rates = self.texts_per_second
        values = {"texts_per_second": self.fastest, "texts_per_second_median": median(rates), **memory.values}
        run = replace(memory.run, task="annotation", batch_size=self.batch_size, workers=0)
        verdict = self.memory.verdict
        return ReportMetrics("trial", "golden texts", self.device, verdict, self.simulated, finite_numbers(values), run)

    def to_report(self) -> Report:
        """Return what became of the memory; times stand in the HTML alone."""
        rows = (("fastest round", f"{self.fastest:.1f}"), ("middle round", f"{median(self.texts_per_second):.1f}"))
        figures = [Table("Texts a second", ("round", "texts a second"), rows)]
        for table in self.memory.to_report().tables[:1]:
            columns = ("round", *table.columns[1:])
            caption = table.caption.replace("epoch", "round")
            figures.append(Table(caption, columns, table.rows, collapsed=True))
        title = f"Trial of {self.name} on {self.device}: memory is {self.memory.verdict}"
        return Report(title, metrics=tuple(figures))


def record_golden_run(
    golden: GoldenRun, computer: DeviceManager, spec: LoadSpec, name: str, texts: list[str]
) -> tuple[Logbook, SmokeBenchmark, Entities]:
    """Annotate texts once for their entities, then again and again for times and memory; the first round is a warm-up."""
    from ....annotation.stream import unwrap_result  # It imports numpy.

    device = golden.device
    bench = target_from_files(spec, texts, None).build(device)
    computer.load_torch()
    folder = model_folder(spec)
    book = collect_logbook(
        computer, device, model_from_files(name, folder, spec.dtype), folder, fingerprint_dataset(texts)
    )
    whole_set = bench.data_workload(len(texts))
    answers = whole_set.run(next(whole_set.batches()))
    entities = tuple(
        tuple(EntitySpan(*entity_span(entity)) for entity in unwrap_result(answer)) for answer in answers.outcomes()
    )

    stream = bench.data_workload(golden.batch_size)
    batches = stream.batches()
    begin = current_time()
    for _ in range(WARM_UP):
        stream.run(next(batches))
    curve = MemoryCurve(device)
    rates = []
    for number in SESSION.track("Measuring", stream.name, range(1, golden.rounds + 2), "round"):
        started = current_time()
        for _ in range(golden.steps):
            stream.run(next(batches))
        rates.append(golden.batch_size * golden.steps / (current_time() - started))
        gc.collect()
        empty_cache(device)
        curve = curve.append(take_sample(device, number, number * golden.steps, current_time() - begin))
    trial = SmokeBenchmark(stream.name, format_device(device), golden.batch_size, tuple(rates), curve)
    return book.with_reports(trial), trial, entities


def changed_files(bundle: Path) -> dict[str, str]:
    """Return which files of a bundle are ``"changed"``, ``"missing"``, or needed and ``"without a checksum"``, by name."""
    try:
        text = (bundle / CHECKSUMS).read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        what = f"{describe_file(bundle)} is not a bundle: its {CHECKSUMS} cannot be read."
        raise ConfigurationError(what, "Name the folder that nb.handoff() has written.") from None
    changed = dict.fromkeys((GOLDEN, TEXTS, LOGBOOK, REQUIREMENTS), "without a checksum")
    for checksum, name in re.findall(r"([0-9a-f]{64})  (.+)", text):
        changed.pop(name, None)
        try:
            if file_digest(bundle / name, "sha256") != checksum:
                changed[name] = "changed"
        except OSError:
            changed[name] = "missing"
    return changed


def other_packages(requirements: str) -> dict[str, str]:
    """Return which installed packages have another version than a requirements file pins; builds such as +cpu may differ."""
    others = {}
    for name, wanted in re.findall(r"^(\S+)==(\S+)", requirements, re.MULTILINE):
        installed = version_of(name)
        if installed is not None and installed.partition("+")[0] != wanted:
            others[name] = f"{installed} instead of {wanted}"
    return others


def _same(name: str, differences: Mapping[str, str], evidence: str, remedy: str) -> Finding:
    """Judge what must have no differences; at most ``MAX_LISTED`` of them are named."""
    if not differences:
        return Finding(name, OK, evidence)
    shown = [f"{key} {difference}" for key, difference in list(differences.items())[:MAX_LISTED]]
    if len(differences) > MAX_LISTED:
        shown.append(f"{len(differences) - MAX_LISTED} more")
    return Finding(name, FAILED, ", ".join(shown), remedy)


def judge_python(former: Logbook | None) -> Finding:
    """Judge whether this is the Python of the golden run, but for its last number."""
    if former is None:
        return Finding("Python", NOT_APPLICABLE, "not known: the bundle has no logbook")
    wanted = ".".join(former.software.python.split(".")[:2])
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    if here == wanted:
        return Finding("Python", OK, f"it is Python {here}")
    return Finding("Python", WARNING, f"{here} instead of {wanted}", f"Use Python {wanted}.")


def judge_entities(golden: Entities, here: Entities) -> Finding:
    """Judge whether the entities in every text are exactly those of the golden run."""
    missing = 0
    extra = 0
    others = []
    for number, (wanted, found) in enumerate(zip(golden, here, strict=True)):
        missing_here = (Counter(wanted) - Counter(found)).total()
        extra_here = (Counter(found) - Counter(wanted)).total()
        missing += missing_here
        extra += extra_here
        if missing_here or extra_here:
            others.append(str(number))
    if not others:
        total = pluralize(sum(map(len, here)), "entity", "entities")
        return Finding("entities", OK, f"the same {total} in {pluralize(len(here), 'text')}")
    which = ", ".join(others[:MAX_LISTED])
    evidence = f"others in {pluralize(len(others), 'text')} ({which}): {missing} missing, {extra} that were not there"
    remedy = "Do not use this computer for the model until it is known why; see nb.runbook.parity()."
    return Finding("entities", FAILED, evidence, remedy)


def judge_memory(curve: MemoryCurve, rounds: int) -> Finding:
    """Judge whether memory stays level, by the gate that judges trainings."""
    evidence = f"{curve.verdict} over {pluralize(rounds, 'round')}"
    if curve.verdict == FLAT:
        return Finding("memory", OK, evidence)
    status = FAILED if curve.verdict == GROWING else WARNING
    remedy = "See what keeps it: nb.training.find_tensor_referrers()."
    return Finding("memory", status, f"{METRIC_LABELS[curve.deciding_metric]}: {evidence}", remedy)


def judge_speed(former: Logbook | None, here: Logbook, trial: SmokeBenchmark) -> Finding:
    """Judge whether it is as fast as the golden run, if the two may be compared."""
    name = "throughput"
    rates = [one.values.get("texts_per_second") for one in former.metrics if one.report == "trial"] if former else []
    wanted = rates[-1] if rates else None
    if former is None or wanted is None:
        return Finding(name, NOT_APPLICABLE, "not judged: the logbook of the bundle has no figures that can be trusted")
    reasons = LogbookDiff(former, here).reasons
    if reasons:
        differ = ", ".join(one.name for one in reasons)
        return Finding(name, NOT_APPLICABLE, f"not judged: it cannot be compared with the logbook ({differ})")
    runs = {"in the golden run": former, "here": here}
    busy = " and ".join(
        when for when, book in runs.items() if (book.background.cpu_fraction or 0.0) > MAX_BACKGROUND_LOAD
    )
    if busy:
        evidence = (
            f"not judged: other programs took more than {100 * MAX_BACKGROUND_LOAD:.0f} % of the processors {busy}"
        )
        return Finding(name, WARNING, evidence, "Repeat it on a quiet computer.")
    if trial.fastest >= wanted * (1 - MAX_SLOWDOWN):
        return Finding(name, OK, "as fast as the logbook says")
    evidence = f"{100 * (1 - trial.fastest / wanted):.0f} % slower than the logbook says, and {100 * MAX_SLOWDOWN:.0f} % are allowed"
    return Finding(name, FAILED, evidence, "Repeat it, and then look for what is slower.")


@dataclass(frozen=True, repr=False)
class SmokeReport(Displayable):
    """Whether a bundle does here what it did where it was written.

    Attributes:
        findings: What was looked at.
        former: The logbook of the bundle; ``None`` if it cannot be read.
        trial: What was measured; ``None`` if nothing was run.
        logbook: What it was measured with, and its figures.
    """

    JSON_EXCLUDE = ("former",)
    JSON_PROPERTIES = ("passed", "simulated", "comparison")

    findings: tuple[Finding, ...]
    former: Logbook | None = None
    trial: SmokeBenchmark | None = None
    logbook: Logbook | None = None

    @property
    def passed(self) -> bool:
        """Whether nothing failed."""
        return all(one.status != FAILED for one in self.findings)

    @property
    def simulated(self) -> bool:
        """Whether it ran on a simulated device."""
        return self.logbook is not None and self.logbook.simulated

    @property
    def comparison(self) -> LogbookDiff | None:
        """What the two logbooks differ in."""
        return LogbookDiff(self.former, self.logbook) if self.former and self.logbook else None

    def to_report(self) -> Report:
        """Return the findings; times stand in the HTML alone."""
        failed = [one.name for one in self.findings if one.status == FAILED]
        title = f"Smoke test failed: {', '.join(failed)}" if failed else "Smoke test passed"
        figures = self.trial.to_report().metrics if self.trial else ()
        said = title if failed else f"{title}: this computer does what the one did where the bundle was written"
        table = findings_table("", self.findings)
        return Report(title, (), (table,), metrics=figures, html_sentences=(said,), status=worst_status(self.findings))


def run_smoke_test(
    bundle: str | os.PathLike[str], device: str | None = None, model: str | os.PathLike[str] | None = None
) -> SmokeReport:
    """Run the smoke test of a bundle; nothing is fetched, and the bundle stays as it is.

    Args:
        bundle: The folder that ``nb.handoff()`` has written.
        device: Where it runs; ``None`` is the device of the golden run, or the best one if that is not here.
        model: Where the model is that was not copied into the bundle.

    Returns:
        What was found.

    Raises:
        ConfigurationError: For a folder that is not a bundle.
        DeviceUnavailableError, UnknownDeviceError: For a device that was asked for and cannot be used.
    """
    folder = check_path(bundle, "bundle").absolute()
    changed = changed_files(folder)
    golden: GoldenRun = read_json_file(GoldenRun, folder / GOLDEN, "the golden run of a bundle", RECOPY_REMEDY)
    former = None if LOGBOOK in changed else Logbook.read(folder / LOGBOOK)
    requirements = "" if REQUIREMENTS in changed else (folder / REQUIREMENTS).read_text("utf-8")

    findings = {name: Finding(name, NOT_APPLICABLE, "not run") for name in CHECKS}
    findings["files"] = _same("files", changed, "every file is the one that was written", RECOPY_REMEDY)
    others = other_packages(requirements)
    findings["packages"] = _same("packages", others, "every package is the one of the bundle", INSTALL)
    findings["Python"] = judge_python(former)
    if any(name in {GOLDEN, TEXTS} or name.startswith(f"{MODEL}/") for name in changed):
        return SmokeReport(tuple(findings.values()), former)

    texts: tuple[str, ...] = read_json_file(tuple[str, ...], folder / TEXTS, "the texts of a bundle", RECOPY_REMEDY)
    if len(texts) != len(golden.entities):
        raise ConfigurationError(f"The {TEXTS} of the bundle has other texts than its {GOLDEN}.", RECOPY_REMEDY)
    computer = DeviceManager(os.environ, read_machine, backend)
    where, other_device = _select_device(golden.device, device, computer)
    if other_device:
        findings["device"] = Finding("device", WARNING, other_device, "Run it on a computer with such a device.")
    spec = golden.spec(folder, model)
    try:
        if hash_model_files(model_folder(spec)) != golden.model_hashes:
            evidence = "its files are not those of the golden run"
            findings["model"] = Finding("model", FAILED, evidence, "Fetch the model in that revision.")
            return SmokeReport(tuple(findings.values()), former)
        book, trial, entities = record_golden_run(replace(golden, device=where), computer, spec, MODEL, list(texts))
    except OpenMedError as error:
        findings["run"] = Finding("run", FAILED, str(error), "Mend that, and run it again.")
        return SmokeReport(tuple(findings.values()), former)

    if not other_device:
        findings["device"] = Finding("device", OK, f"it ran on {where}")
    findings["model"] = Finding("model", OK, "its files are those of the golden run")
    findings["entities"] = judge_entities(golden.entities, entities)
    findings["memory"] = judge_memory(trial.memory, golden.rounds)
    findings["throughput"] = judge_speed(former, book, trial)
    return SmokeReport(tuple(findings.values()), former, trial, book)


def _select_device(golden: str, wanted: str | None, computer: DeviceManager) -> tuple[str, str]:
    """Return the device to run on, and why it is not the one of the golden run; empty if it is."""
    request = golden if wanted is None else wanted
    try:
        device = computer.confirm(DeviceRequest.parse(request, "bundle")).device
    except DeviceUnavailableError:
        if wanted is not None:
            raise
        device = computer.confirm(DeviceRequest.parse("auto", "bundle")).device
        return device, f"{golden} cannot be used here, so it ran on {device}"
    return device, "" if device == golden else f"{device} was asked for instead of {golden}"


def main(bundle: Path, arguments: list[str]) -> int:
    """Run the smoke test, print what was found, write it into the bundle, and return the exit status."""
    command = argparse.ArgumentParser("smoke.py", description="Repeat the smoke test of this bundle.")
    command.add_argument("--device", help="auto, cpu, cuda, cuda:N, mps or gpu; that of the golden run if left out")
    command.add_argument("--model", help="the folder of the model, where it is not in the bundle")
    given = command.parse_args(arguments)
    result: dict[str, Any] = {"passed": False}
    try:
        report = run_smoke_test(bundle, given.device, given.model)
        result = report.to_dict()
        sys.stdout.write(f"{report}\n")
    except OpenMedError as error:
        result.update(error.to_dict())
        sys.stderr.write(f"{short_type_name(error)}: {error}\n")
    try:
        save_text(bundle / RESULT, json.dumps(result, indent=2) + "\n")
    except ConfigurationError as error:  # What was found counts all the same.
        sys.stderr.write(f"{error}\n")
    return 0 if result["passed"] else 1
