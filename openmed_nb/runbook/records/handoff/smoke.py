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
    Finding,
    Plain,
    Report,
    Shown,
    Table,
    counted,
    findings_table,
    worst,
)
from ...._utils.clock import now
from ...._utils.plain import read_as, save
from ...._utils.text import describe_file, describe_value, short_type_name
from ...._utils.validation import given_path, whole
from ....annotation.results import span_of
from ....devices import backend
from ....devices.computer import Computer
from ....devices.machine import read_machine, shown_device, shows_simulated
from ....devices.memory import empty_cache
from ....devices.request import DeviceRequest
from ....errors import ConfigurationError, DeviceUnavailable, OpenMedError, UnknownModel
from ....models.config import OpenMedConfig
from ....models.files import Content, content_of, digest_of
from ....models.loading import LoadSpec, model_folder
from ....session import SESSION
from ....training.curve import FLAT, GROWING, MEASURES, MemoryCurve, take_sample
from ...bench.workloads import subject_of_files
from ..logbook.gathering import gather, version_of
from ..logbook.logbook import Logbook, LogbookDiff
from ..logbook.privacy import dataset_of, model_of_files
from ..logbook.sections import Dataset, ReportFigures, numbers

# The files of a bundle that a smoke test reads, and the one that it writes.
SUMS = "SHA256SUMS"
MODEL = "model"
TEXTS = "texts.json"
GOLDEN = "golden.json"
LOGBOOK = "logbook.json"
REQUIREMENTS = "requirements.txt"
RESULT = "smoke.json"

WARM_UP = 2  # Steps that are not timed: the first one of each shape is slower, most of all on MPS.

# How much slower the fastest round may be than that of the golden run: a choice, so that noise of a quiet computer passes
# and a regression that matters does not.
SLOWER = 0.25
# What share of the processors other programs may take before speed is not judged: a choice, because a step that has a
# fifth less of the computer is slower by about what is allowed.
BUSY = 0.2

MOST_NAMED = 5

AGAIN = "Take the bundle from where it came from again."
INSTALL = "Install them as the README.md of the bundle says."

# What a smoke test looks at, in this order.
CHECKS = ("files", "packages", "Python", "device", "model", "entities", "memory", "throughput")


@dataclass(frozen=True)
class FoundEntity:
    """An entity that was found: its first character, the character behind it, and its label."""

    start: int
    end: int
    label: str


Entities = tuple[tuple[FoundEntity, ...], ...]


@dataclass(frozen=True)
class Golden(Plain):
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
    content: Content
    dtype: str
    device: str
    batch_size: int
    rounds: int
    steps: int
    variables: dict[str, str]
    dataset: Dataset | None
    dataset_copied: bool
    entities: tuple[tuple[FoundEntity, ...], ...] = ()
    owner: str | None = None

    def __post_init__(self) -> None:
        for name, least, most in (("batch_size", 1, 4096), ("rounds", 4, 1000), ("steps", 1, 1000)):
            object.__setattr__(self, name, whole(name, getattr(self, name), least, most))

    def spec(self, bundle: Path, model: str | os.PathLike[str] | None = None) -> LoadSpec:
        """Return what is loaded without a network: from the bundle, else ``model``, else by its name."""
        name = str(bundle / self.model if self.copied else model or self.model)
        try:
            return LoadSpec.of(name, OpenMedConfig(dtype=self.dtype, local_only=True))
        except UnknownModel as error:
            what = f"The model {describe_value(name)} is not in the bundle, and not here."
            raise ConfigurationError(what, "Say where it is: --model FOLDER.") from error


@dataclass(frozen=True, repr=False)
class Trial(Shown):
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

    ALSO = ("fastest",)

    @property
    def simulated(self) -> bool:
        """Whether the device was a simulated one."""
        return shows_simulated(self.device)

    @property
    def fastest(self) -> float:
        """Texts a second in the fastest round: what other programs disturb least."""
        return max(self.texts_per_second)

    def logbook_figures(self) -> ReportFigures:
        """Return what a logbook keeps of it."""
        from ...verdict.figures import figures_of

        memory = figures_of(self.memory)
        rates = self.texts_per_second
        values = {"texts_per_second": self.fastest, "texts_per_second_median": median(rates), **memory.values}
        run = replace(memory.run, task="annotation", batch_size=self.batch_size, workers=0)
        verdict = self.memory.verdict
        return ReportFigures("trial", "golden texts", self.device, verdict, self.simulated, numbers(values), run)

    def report(self) -> Report:
        """Return what became of the memory; times stand in the HTML alone."""
        rows = (("fastest round", f"{self.fastest:.1f}"), ("middle round", f"{median(self.texts_per_second):.1f}"))
        figures = [Table("Texts a second", ("round", "texts a second"), rows)]
        for table in self.memory.report().tables[:1]:
            columns = ("round", *table.columns[1:])
            caption = table.caption.replace("epoch", "round")
            figures.append(Table(caption, columns, table.rows, folded=True))
        title = f"Trial of {self.name} on {self.device}: memory is {self.memory.verdict}"
        return Report(title, figures=tuple(figures))


def golden_run(
    golden: Golden, computer: Computer, spec: LoadSpec, name: str, texts: list[str]
) -> tuple[Logbook, Trial, Entities]:
    """Annotate texts once for their entities, then again and again for times and memory; the first round is a warm-up."""
    from ....annotation.stream import entities_of  # It imports numpy.

    device = golden.device
    bench = subject_of_files(spec, texts, None).on(device)
    computer.load_torch()
    folder = model_folder(spec)
    book = gather(computer, device, model_of_files(name, folder, spec.dtype), folder, dataset_of(texts))
    whole_set = bench.stream(len(texts))
    answers = whole_set.run(next(whole_set.batches()))
    entities = tuple(
        tuple(FoundEntity(*span_of(entity)) for entity in entities_of(answer)) for answer in answers.outcomes()
    )

    stream = bench.stream(golden.batch_size)
    batches = stream.batches()
    begin = now()
    for _ in range(WARM_UP):
        stream.run(next(batches))
    curve = MemoryCurve(device)
    rates = []
    for number in SESSION.steps("Measuring", stream.name, range(1, golden.rounds + 2), "round"):
        started = now()
        for _ in range(golden.steps):
            stream.run(next(batches))
        rates.append(golden.batch_size * golden.steps / (now() - started))
        gc.collect()
        empty_cache(device)
        curve = curve.with_sample(take_sample(device, number, number * golden.steps, now() - begin))
    trial = Trial(stream.name, shown_device(device), golden.batch_size, tuple(rates), curve)
    return book.with_reports(trial), trial, entities


def changed_files(bundle: Path) -> dict[str, str]:
    """Return which files of a bundle are ``"changed"``, ``"missing"``, or needed and ``"without a checksum"``, by name."""
    try:
        text = (bundle / SUMS).read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        what = f"{describe_file(bundle)} is not a bundle: its {SUMS} cannot be read."
        raise ConfigurationError(what, "Name the folder that nb.handoff() has written.") from None
    changed = dict.fromkeys((GOLDEN, TEXTS, LOGBOOK, REQUIREMENTS), "without a checksum")
    for checksum, name in re.findall(r"([0-9a-f]{64})  (.+)", text):
        changed.pop(name, None)
        try:
            if digest_of(bundle / name, "sha256") != checksum:
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
    """Judge what must have no differences; at most ``MOST_NAMED`` of them are named."""
    if not differences:
        return Finding(name, OK, evidence)
    shown = [f"{key} {difference}" for key, difference in list(differences.items())[:MOST_NAMED]]
    if len(differences) > MOST_NAMED:
        shown.append(f"{len(differences) - MOST_NAMED} more")
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
        total = counted(sum(map(len, here)), "entity", "entities")
        return Finding("entities", OK, f"the same {total} in {counted(len(here), 'text')}")
    which = ", ".join(others[:MOST_NAMED])
    evidence = f"others in {counted(len(others), 'text')} ({which}): {missing} missing, {extra} that were not there"
    remedy = "Do not use this computer for the model until it is known why; see nb.runbook.parity()."
    return Finding("entities", FAILED, evidence, remedy)


def judge_memory(curve: MemoryCurve, rounds: int) -> Finding:
    """Judge whether memory stays level, by the gate that judges trainings."""
    evidence = f"{curve.verdict} over {counted(rounds, 'round')}"
    if curve.verdict == FLAT:
        return Finding("memory", OK, evidence)
    status = FAILED if curve.verdict == GROWING else WARNING
    remedy = "See what keeps it: nb.training.who_holds()."
    return Finding("memory", status, f"{MEASURES[curve.measure]}: {evidence}", remedy)


def judge_speed(former: Logbook | None, here: Logbook, trial: Trial) -> Finding:
    """Judge whether it is as fast as the golden run, if the two may be compared."""
    name = "throughput"
    rates = [one.values.get("texts_per_second") for one in former.figures if one.report == "trial"] if former else []
    wanted = rates[-1] if rates else None
    if former is None or wanted is None:
        return Finding(name, NOT_APPLICABLE, "not judged: the logbook of the bundle has no figures that can be trusted")
    reasons = LogbookDiff(former, here).reasons
    if reasons:
        differ = ", ".join(one.name for one in reasons)
        return Finding(name, NOT_APPLICABLE, f"not judged: it cannot be compared with the logbook ({differ})")
    runs = {"in the golden run": former, "here": here}
    busy = " and ".join(when for when, book in runs.items() if (book.background.share or 0.0) > BUSY)
    if busy:
        evidence = f"not judged: other programs took more than {100 * BUSY:.0f} % of the processors {busy}"
        return Finding(name, WARNING, evidence, "Repeat it on a quiet computer.")
    if trial.fastest >= wanted * (1 - SLOWER):
        return Finding(name, OK, "as fast as the logbook says")
    evidence = (
        f"{100 * (1 - trial.fastest / wanted):.0f} % slower than the logbook says, and {100 * SLOWER:.0f} % are allowed"
    )
    return Finding(name, FAILED, evidence, "Repeat it, and then look for what is slower.")


@dataclass(frozen=True, repr=False)
class SmokeReport(Shown):
    """Whether a bundle does here what it did where it was written.

    Attributes:
        findings: What was looked at.
        former: The logbook of the bundle; ``None`` if it cannot be read.
        trial: What was measured; ``None`` if nothing was run.
        logbook: What it was measured with, and its figures.
    """

    HIDDEN = ("former",)
    ALSO = ("passed", "simulated", "comparison")

    findings: tuple[Finding, ...]
    former: Logbook | None = None
    trial: Trial | None = None
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

    def report(self) -> Report:
        """Return the findings; times stand in the HTML alone."""
        failed = [one.name for one in self.findings if one.status == FAILED]
        title = f"Smoke test failed: {', '.join(failed)}" if failed else "Smoke test passed"
        figures = self.trial.report().figures if self.trial else ()
        said = title if failed else f"{title}: this computer does what the one did where the bundle was written"
        table = findings_table("", self.findings)
        return Report(title, (), (table,), figures=figures, spoken=(said,), status=worst(self.findings))


def smoke(
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
        DeviceUnavailable, UnknownDevice: For a device that was asked for and cannot be used.
    """
    folder = given_path(bundle, "bundle").absolute()
    changed = changed_files(folder)
    golden: Golden = read_as(Golden, folder / GOLDEN, "the golden run of a bundle", AGAIN)
    former = None if LOGBOOK in changed else Logbook.read(folder / LOGBOOK)
    requirements = "" if REQUIREMENTS in changed else (folder / REQUIREMENTS).read_text("utf-8")

    findings = {name: Finding(name, NOT_APPLICABLE, "not run") for name in CHECKS}
    findings["files"] = _same("files", changed, "every file is the one that was written", AGAIN)
    others = other_packages(requirements)
    findings["packages"] = _same("packages", others, "every package is the one of the bundle", INSTALL)
    findings["Python"] = judge_python(former)
    if any(name in {GOLDEN, TEXTS} or name.startswith(f"{MODEL}/") for name in changed):
        return SmokeReport(tuple(findings.values()), former)

    texts: tuple[str, ...] = read_as(tuple[str, ...], folder / TEXTS, "the texts of a bundle", AGAIN)
    if len(texts) != len(golden.entities):
        raise ConfigurationError(f"The {TEXTS} of the bundle has other texts than its {GOLDEN}.", AGAIN)
    computer = Computer(os.environ, read_machine, backend)
    where, other_device = _device_for(golden.device, device, computer)
    if other_device:
        findings["device"] = Finding("device", WARNING, other_device, "Run it on a computer with such a device.")
    spec = golden.spec(folder, model)
    try:
        if content_of(model_folder(spec)) != golden.content:
            evidence = "its files are not those of the golden run"
            findings["model"] = Finding("model", FAILED, evidence, "Fetch the model in that revision.")
            return SmokeReport(tuple(findings.values()), former)
        book, trial, entities = golden_run(replace(golden, device=where), computer, spec, MODEL, list(texts))
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


def _device_for(golden: str, wanted: str | None, computer: Computer) -> tuple[str, str]:
    """Return the device to run on, and why it is not the one of the golden run; empty if it is."""
    request = golden if wanted is None else wanted
    try:
        device = computer.confirm(DeviceRequest.parse(request, "bundle")).device
    except DeviceUnavailable:
        if wanted is not None:
            raise
        device = computer.confirm(DeviceRequest.parse("auto", "bundle")).device
        return device, f"{golden} cannot be used here, so it ran on {device}"
    return device, "" if device == golden else f"{device} was asked for instead of {golden}"


def from_command_line(bundle: Path, arguments: list[str]) -> int:
    """Run the smoke test, print what was found, write it into the bundle, and return the exit status."""
    command = argparse.ArgumentParser("smoke.py", description="Repeat the smoke test of this bundle.")
    command.add_argument("--device", help="auto, cpu, cuda, cuda:N, mps or gpu; that of the golden run if left out")
    command.add_argument("--model", help="the folder of the model, where it is not in the bundle")
    given = command.parse_args(arguments)
    result: dict[str, Any] = {"passed": False}
    try:
        report = smoke(bundle, given.device, given.model)
        result = report.to_dict()
        sys.stdout.write(f"{report}\n")
    except OpenMedError as error:
        result.update(error.to_dict())
        sys.stderr.write(f"{short_type_name(error)}: {error}\n")
    try:
        save(bundle / RESULT, json.dumps(result, indent=2) + "\n")
    except ConfigurationError as error:  # What was found counts all the same.
        sys.stderr.write(f"{error}\n")
    return 0 if result["passed"] else 1
