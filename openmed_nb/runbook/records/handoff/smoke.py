"""The golden run of a bundle, and the smoke test: does the model do on this computer what it did where the bundle was written?"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal

from packaging.requirements import InvalidRequirement, Requirement

from ...._render.display import (
    FAILED,
    NOT_APPLICABLE,
    OK,
    WARNING,
    Finding,
    Report,
    Shown,
    Table,
    counted,
    findings_table,
    worst,
)
from ...._utils.clock import now
from ...._utils.plain import from_plain, write_whole
from ...._utils.text import cause, describe_file, describe_value, short_type_name
from ...._utils.validation import given_path, whole
from ....annotation.results import span_of
from ....devices import backend
from ....devices.computer import Computer
from ....devices.machine import read_machine, shown_device, shows_simulated
from ....devices.memory import empty_cache
from ....devices.request import DeviceRequest
from ....errors import ConfigurationError, DeviceUnavailable, OpenMedError, UnknownDevice, UnknownModel
from ....models.config import OpenMedConfig
from ....models.files import Content, content_of, digest_of
from ....models.loading import LoadSpec, model_folder
from ....session import SESSION
from ....training.curve import FLAT, GROWING, MEASURES, MemoryCurve, take_sample
from ...bench.benches import subject_of_files
from ...bench.workloads import Bench
from ..logbook.gathering import TOOLKIT, gather, own_version, version_of
from ..logbook.logbook import Logbook, LogbookDiff
from ..logbook.privacy import dataset_of, model_of_files
from ..logbook.sections import Dataset, ReportFigures, numbers

SCHEMA: Literal["openmed_nb/golden/1"] = "openmed_nb/golden/1"
# The files of a bundle that a smoke test reads, and the one that it writes.
SUMS, MODEL, TEXTS, GOLDEN, LOGBOOK = "SHA256SUMS", "model", "texts.json", "golden.json", "logbook.json"
REQUIREMENTS, RESULT = "requirements.txt", "smoke.json"

WARM_UP = 2  # Steps that are not timed: the first one of each shape is slower, most of all on MPS.

# How much slower the fastest round may be than that of the golden run: a choice, so that noise of a quiet computer passes
# and a regression that matters does not.
SLOWER = 0.25
# What share of the processors other programs may take before speed is not judged: a choice, because a step that has a
# fifth less of the computer is slower by about what is allowed.
BUSY = 0.2

MOST_NAMED = 5

AGAIN = "Take the bundle from where it came from again."
NOT_RUN = "not run"


@dataclass(frozen=True)
class FoundEntity:
    """An entity that was found: its first character, the character behind it, and its label."""

    start: int
    end: int
    label: str


@dataclass(frozen=True)
class Golden:
    """What a bundle does, and what it must find.

    Attributes:
        schema: The name and the number of this form.
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
    """

    schema: Literal["openmed_nb/golden/1"]
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

    def spec(self, bundle: Path, model: str | None = None) -> LoadSpec:
        """Return what is loaded without a network: from the bundle, else ``model``, else by its name."""
        name = str(bundle / self.model) if self.copied else model or self.model
        try:
            return LoadSpec.of(name, OpenMedConfig(dtype=self.dtype, local_only=True))
        except UnknownModel as error:
            what = f"The model {describe_value(name)} is not in the bundle, and not here."
            raise ConfigurationError(what, "Say where it is: --model FOLDER.") from error


def checked_sizes(batch_size: Any, rounds: Any, steps: Any) -> tuple[int, int, int]:
    """Return the numbers of a trial; a bundle comes from somebody else, and its trial has to end."""
    return whole("batch_size", batch_size, 1, 4096), whole("rounds", rounds, 4, 1000), whole("steps", steps, 1, 1000)


@dataclass(frozen=True, repr=False)
class Trial(Shown):
    """What was measured.

    Attributes:
        name: What a person calls the model.
        device: Where it ran, marked if it is simulated.
        batch_size: How many texts a step reads.
        texts_per_second: Of each round.
        curve: The memory after each round, the first one a warm-up.
    """

    name: str
    device: str
    batch_size: int
    texts_per_second: tuple[float, ...]
    curve: MemoryCurve

    HIDDEN, ALSO = ("curve",), ("fastest", "memory")

    @property
    def simulated(self) -> bool:
        """Whether the device was a simulated one."""
        return shows_simulated(self.device)

    @property
    def fastest(self) -> float:
        """Texts a second in the fastest round: what other programs disturb least."""
        return max(self.texts_per_second)

    @property
    def memory(self) -> dict[str, Any]:
        """The curve, ready for JSON."""
        return self.curve.to_dict()

    def logbook_figures(self) -> ReportFigures:
        """Return what a logbook keeps of it."""
        from ...verdict.figures import figures_of

        memory, rates = figures_of(self.curve), self.texts_per_second
        values = {"texts_per_second": self.fastest, "texts_per_second_median": median(rates), **memory.values}
        run = replace(memory.run, task="annotation", batch_size=self.batch_size, workers=0)
        where = (self.device, self.curve.verdict, self.simulated)
        return ReportFigures("trial", "golden texts", *where, numbers(values), run)

    def report(self) -> Report:
        """Return what became of the memory; times stand in the HTML alone."""
        rows = (("fastest round", f"{self.fastest:.1f}"), ("middle round", f"{median(self.texts_per_second):.1f}"))
        memory = [
            replace(
                one, caption=one.caption.replace("epoch", "round"), columns=("round", *one.columns[1:]), folded=True
            )
            for one in self.curve.report().tables[:1]
        ]
        return Report(
            f"Trial of {self.name} on {self.device}: memory is {self.curve.verdict}",
            figures=(Table("Texts a second", ("round", "texts a second"), rows), *memory),
        )


def measure(bench: Bench, batch_size: int, rounds: int, steps: int) -> Trial:
    """Annotate the texts of a bench again and again, and look at times and memory; the first round is a warm-up."""
    stream = bench.stream(batch_size)
    batches, begin = stream.batches(), now()
    for _ in range(WARM_UP):
        stream.run(next(batches))
    curve, rates = MemoryCurve(stream.device), []
    for number in SESSION.steps("Measuring", stream.name, range(1, rounds + 2), "round"):
        started = now()
        for _ in range(steps):
            stream.run(next(batches))
        rates.append(batch_size * steps / (now() - started))
        gc.collect()
        empty_cache(stream.device)
        curve = curve.with_sample(take_sample(stream.device, number, number * steps, now() - begin))
    return Trial(stream.name, shown_device(stream.device), batch_size, tuple(rates), curve)


def golden_run(  # noqa: PLR0913, PLR0917 - each is another thing
    computer: Computer, spec: LoadSpec, name: str, device: str, texts: list[str], sizes: tuple[int, int, int]
) -> tuple[Logbook, Trial, tuple[tuple[FoundEntity, ...], ...]]:
    """Return what texts are annotated with, its figures, and the entities; ``sizes`` are batch size, rounds and steps."""
    from ....annotation.stream import entities_of  # It imports numpy.

    bench = subject_of_files(spec, texts, None).on(device)
    computer.load_torch()
    folder = model_folder(spec)
    book = gather(computer, device, model_of_files(name, folder, spec.dtype), folder, dataset_of(texts))
    stream = bench.stream(len(texts))
    answers = stream.run(next(stream.batches()))
    entities = tuple(
        tuple(FoundEntity(*span_of(entity)) for entity in entities_of(answer)) for answer in answers.outcomes()
    )
    trial = measure(bench, *sizes)
    return book.with_reports(trial), trial, entities


def changed_files(bundle: Path, needed: Iterable[str] = ()) -> dict[str, str]:
    """Return which files of a bundle are ``"changed"``, ``"missing"``, or needed and ``"without a checksum"``, by name."""

    def state(file: Path, checksum: str) -> str:
        try:
            return "" if digest_of(file, "sha256") == checksum else "changed"
        except OSError:
            return "missing"

    try:
        text = (bundle / SUMS).read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        what = f"{describe_file(bundle)} is not a bundle: its {SUMS} cannot be read."
        raise ConfigurationError(what, "Name the folder that nb.handoff() has written.") from None
    wanted = {name: checksum for checksum, name in re.findall(r"([0-9a-f]{64})  (.+)", text)}
    found = {name: state(bundle / name, checksum) for name, checksum in wanted.items()}
    bare = dict.fromkeys((name for name in needed if name not in wanted), "without a checksum")
    return {name: one for name, one in (found | bare).items() if one}


def unmet(text: str, versions: Callable[[str], str | None]) -> Mapping[str, tuple[str, str | None]]:
    """Return what of a requirements file is not met: by package, the version that is wanted and the one that is there."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    try:
        wanted = [Requirement(line) for line in lines if line]
    except InvalidRequirement as error:
        what = "A line of requirements.txt names no package."
        raise ConfigurationError(what, AGAIN) from error
    here = [one for one in wanted if not one.marker or one.marker.evaluate()]
    pins = {one.name: str(one.specifier).removeprefix("==") for one in here}
    there = {name: versions(name) for name in pins}
    return {name: (pin, there[name]) for name, pin in pins.items() if (there[name] or "").partition("+")[0] != pin}


@dataclass(frozen=True)
class Observed:
    """What a smoke test saw."""

    golden: Golden  # The golden run.
    # Which files are not as they were, and what became of them.
    changed: Mapping[str, str] = field(default_factory=dict)
    # Which packages are not those of the bundle: for each the version that is wanted and the one that is there.
    unmet: Mapping[str, tuple[str, str | None]] = field(default_factory=dict)
    former: Logbook | None = None  # The logbook of the bundle; None if it cannot be read.
    other_device: str = ""  # Why it did not run on the device of the golden run; empty if it did.
    other_model: bool = False  # Whether the files of a model that was not copied are others.
    stopped: str = ""  # Why nothing was run; empty if it was.
    logbook: Logbook | None = None  # What it was measured with, and its figures.
    trial: Trial | None = None  # What was measured.
    entities: tuple[tuple[FoundEntity, ...], ...] = ()  # The entities that were found.

    def not_run(self, name: str) -> Finding | None:
        """Return the finding that nothing was run; ``None`` if it was."""
        if self.trial is not None:
            return None
        return Finding(name, NOT_APPLICABLE, f"{NOT_RUN}: {self.stopped}" if self.stopped else NOT_RUN)


def shortened(problems: Mapping[str, str]) -> str:
    """Return names with the problem of each, at most ``MOST_NAMED``."""
    shown = [f"{name} {problem}" for name, problem in list(problems.items())[:MOST_NAMED]]
    more = len(problems) - len(shown)
    return ", ".join([*shown, *([f"{more} more"] if more > 0 else [])])


def same_files(seen: Observed) -> Finding:
    if seen.changed:
        return Finding("files", FAILED, shortened(seen.changed), AGAIN)
    return Finding("files", OK, "every file is the one that was written")


def same_packages(seen: Observed) -> Finding:
    others = {name: f"{there or 'missing'} instead of {wanted}" for name, (wanted, there) in seen.unmet.items()}
    if others:
        remedy = "Install them: python -m pip install -r requirements.txt."
        return Finding("packages", FAILED, shortened(others), remedy)
    return Finding("packages", OK, "every package is the one of the bundle")


def same_python(seen: Observed) -> Finding:
    books = (seen.former, seen.logbook)
    former, here = (".".join(one.software.python.split(".")[:2]) if one else "" for one in books)
    if not former or not here:
        return Finding("Python", NOT_APPLICABLE, NOT_RUN)
    if former == here:
        return Finding("Python", OK, f"it is Python {here}")
    return Finding("Python", WARNING, f"{here} instead of {former}", f"Use Python {former}.")


def same_device(seen: Observed) -> Finding:
    if seen.other_device:
        return Finding("device", WARNING, seen.other_device, "Run it on a computer with such a device.")
    return seen.not_run("device") or Finding("device", OK, f"it ran on {seen.golden.device}")


def same_model(seen: Observed) -> Finding:
    if seen.other_model:
        evidence = "its files are not those of the golden run"
        return Finding("model", FAILED, evidence, "Fetch the model in that revision.")
    return seen.not_run("model") or Finding("model", OK, "its files are those of the golden run")


def same_entities(seen: Observed) -> Finding:
    """Judge whether the entities in every text are exactly those of the golden run."""
    if not_run := seen.not_run("entities"):
        return not_run
    pairs = [tuple(map(Counter, both)) for both in zip(seen.golden.entities, seen.entities, strict=True)]
    others = [number for number, (wanted, found) in enumerate(pairs) if wanted != found]
    if not others:
        total = counted(sum(map(len, seen.entities)), "entity", "entities")
        return Finding("entities", OK, f"the same {total} in {counted(len(pairs), 'text')}")
    missing = sum((wanted - found).total() for wanted, found in pairs)
    extra = sum((found - wanted).total() for wanted, found in pairs)
    which = ", ".join(map(str, others[:MOST_NAMED]))
    evidence = f"others in {counted(len(others), 'text')} ({which}): {missing} missing, {extra} that were not there"
    remedy = "Do not use this computer for the model until it is known why; see nb.runbook.parity()."
    return Finding("entities", FAILED, evidence, remedy)


def level_memory(seen: Observed) -> Finding:
    """Judge whether memory stays level, by the gate that judges trainings."""
    if seen.trial is None:
        return Finding("memory", NOT_APPLICABLE, seen.stopped or NOT_RUN)
    curve = seen.trial.curve
    evidence = f"{curve.verdict} over {counted(seen.golden.rounds, 'round')}"
    if curve.verdict == FLAT:
        return Finding("memory", OK, evidence)
    status = FAILED if curve.verdict == GROWING else WARNING
    remedy = "See what keeps it: nb.training.who_holds()."
    return Finding("memory", status, f"{MEASURES[curve.measure]}: {evidence}", remedy)


def same_speed(seen: Observed) -> Finding:
    """Judge whether it is as fast as the golden run, if the two may be compared."""
    if not_run := seen.not_run("throughput"):
        return not_run
    name, former, here = "throughput", seen.former, seen.logbook
    trials = [one.values for one in former.figures if one.report == "trial"] if former else []
    wanted = trials[-1].get("texts_per_second") if trials else None
    if former is None or here is None or seen.trial is None or wanted is None:
        return Finding(name, NOT_APPLICABLE, "not judged: the logbook of the bundle has no figures that can be trusted")
    reasons = LogbookDiff(former, here).reasons
    if reasons:
        differ = ", ".join(one.name for one in reasons)
        return Finding(name, NOT_APPLICABLE, f"not judged: it cannot be compared with the logbook ({differ})")
    runs = {"in the golden run": former, "here": here}
    busy = [when for when, book in runs.items() if (book.background.share or 0.0) > BUSY]
    if busy:
        evidence = (
            f"not judged: other programs took more than {100 * BUSY:.0f} % of the processors {' and '.join(busy)}"
        )
        return Finding(name, WARNING, evidence, "Repeat it on a quiet computer.")
    if seen.trial.fastest >= wanted * (1 - SLOWER):
        return Finding(name, OK, "as fast as the logbook says")
    evidence = f"{100 * (1 - seen.trial.fastest / wanted):.0f} % slower than the logbook says, and {100 * SLOWER:.0f} % are allowed"
    return Finding(name, FAILED, evidence, "Repeat it, and then look for what is slower.")


CHECKS = (same_files, same_packages, same_python, same_device, same_model, same_entities, level_memory, same_speed)


@dataclass(frozen=True, repr=False)
class SmokeReport(Shown):
    """Whether a bundle does here what it did where it was written.

    Attributes:
        seen: What was seen.
    """

    seen: Observed

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What was looked at, one by one."""
        seen = self.seen
        stopped = seen.stopped and not seen.changed and not seen.other_model
        first = [Finding("run", FAILED, seen.stopped, "Mend that, and run it again.")] if stopped else []
        return (*first, *(check(seen) for check in CHECKS))

    @property
    def passed(self) -> bool:
        """Whether nothing failed."""
        return all(one.status != FAILED for one in self.findings)

    @property
    def exit_code(self) -> int:
        """0 if it passed, 1 if something failed."""
        return 0 if self.passed else 1

    @property
    def simulated(self) -> bool:
        """Whether it ran on a simulated device."""
        return self.seen.logbook is not None and self.seen.logbook.simulated

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain mappings, lists, strings and numbers, ready for JSON."""
        seen = self.seen
        return {
            "passed": self.passed,
            "simulated": self.simulated,
            "findings": [one.to_dict() for one in self.findings],
            "trial": seen.trial and seen.trial.to_dict(),
            "logbook": seen.logbook and seen.logbook.to_dict(),
            "comparison": LogbookDiff(seen.former, seen.logbook).to_dict() if seen.former and seen.logbook else None,
        }

    def report(self) -> Report:
        """Return the findings; times stand in the HTML alone."""
        failed = [one.name for one in self.findings if one.status == FAILED]
        title = f"Smoke test failed: {', '.join(failed)}" if failed else "Smoke test passed"
        figures = self.seen.trial.report().figures if self.seen.trial else ()
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
        What was found; ``exit_code`` is 1 if something failed.

    Raises:
        ConfigurationError: For a folder that is not a bundle.
        DeviceUnavailable, UnknownDevice: For a device that was asked for and cannot be used.
    """
    folder = given_path(bundle, "bundle").absolute()
    changed = changed_files(folder, (GOLDEN, TEXTS, LOGBOOK, REQUIREMENTS))
    golden = read_golden(folder)
    texts = [] if TEXTS in changed else read_texts(folder, golden)
    former = None if LOGBOOK in changed else Logbook.read(folder / LOGBOOK)
    missing = dict(unmet(read_text(folder / REQUIREMENTS), version_of))
    toolkit = former.software.openmed_nb if former else ""
    if toolkit and toolkit != own_version():
        missing[TOOLKIT] = (toolkit, own_version())
    seen = Observed(golden, changed, missing, former)
    if any(name in {GOLDEN, TEXTS} or name.startswith(f"{MODEL}/") for name in changed):
        return SmokeReport(replace(seen, stopped="its files are not those of the bundle"))
    try:
        return SmokeReport(repeated(seen, folder, texts, device, model))
    except (DeviceUnavailable, UnknownDevice, ConfigurationError):
        raise
    except OpenMedError as error:
        return SmokeReport(replace(seen, stopped=str(error)))


def repeated(
    seen: Observed, bundle: Path, texts: list[str], device: str | None, model: str | os.PathLike[str] | None
) -> Observed:
    """Return what was seen, with the golden run repeated."""
    golden = seen.golden
    computer = Computer(os.environ, read_machine, backend)
    on, other = device_for(golden.device, device, computer)
    spec = golden.spec(bundle, None if model is None else str(model))
    if content_of(model_folder(spec)) != golden.content:
        return replace(seen, other_model=True, other_device=other, stopped="the model is another one")
    sizes = golden.batch_size, golden.rounds, golden.steps
    book, trial, entities = golden_run(computer, spec, MODEL, on, texts, sizes)
    return replace(seen, other_device=other, logbook=book, trial=trial, entities=entities)


def device_for(golden: str, asked: str | None, computer: Computer) -> tuple[str, str]:
    """Return the device to run on, and why it is not the one of the golden run; empty if it is."""

    def confirmed(device: str) -> str:
        return computer.confirm(DeviceRequest.parse(device, "bundle")).device

    if asked is not None:
        device = confirmed(asked)
        return device, "" if device == golden else f"{device} was asked for instead of {golden}"
    try:
        return confirmed(golden), ""
    except DeviceUnavailable:
        device = confirmed("auto")
        return device, f"{golden} cannot be used here, so it ran on {device}"


def read_text(file: Path) -> str:
    """Return the text of a file of a bundle."""
    try:
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        what = f"The {file.name} of the bundle cannot be read: {cause(error)}."
        raise ConfigurationError(what, AGAIN) from error


def read_texts(bundle: Path, golden: Golden) -> list[str]:
    """Return the texts of the golden run."""
    try:
        texts: tuple[str, ...] = from_plain(tuple[str, ...], json.loads(read_text(bundle / TEXTS)))
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"The {TEXTS} of the bundle is damaged.", AGAIN) from error
    if len(texts) != len(golden.entities):
        raise ConfigurationError(f"The {TEXTS} of the bundle has other texts than its {GOLDEN}.", AGAIN)
    return list(texts)


def read_golden(bundle: Path) -> Golden:
    """Return the golden run of a bundle."""
    text = read_text(bundle / GOLDEN)
    try:
        golden: Golden = from_plain(Golden, json.loads(text))
        checked_sizes(golden.batch_size, golden.rounds, golden.steps)
    except (ValueError, RecursionError) as error:  # A ConfigurationError is a ValueError.
        reason = error.what if isinstance(error, ConfigurationError) else f"{cause(error)}."
        raise ConfigurationError(f"The {GOLDEN} of {describe_file(bundle)} is damaged: {reason}", AGAIN) from error
    return golden


def from_command_line(bundle: Path, arguments: list[str]) -> int:
    """Run the smoke test, print what was found, write it into the bundle, and return the exit status."""
    command = argparse.ArgumentParser("smoke.py", description="Repeat the smoke test of this bundle.")
    command.add_argument("--device", help="auto, cpu, cuda, cuda:N, mps or gpu; that of the golden run if left out")
    command.add_argument("--model", help="the folder of the model, where it is not in the bundle")
    asked = command.parse_args(arguments)
    try:
        report = smoke(bundle, asked.device, asked.model)
    except OpenMedError as error:
        sys.stderr.write(f"{short_type_name(error)}: {error}\n")
        keep({"passed": False, **error.to_dict()}, bundle / RESULT)
        return 1
    sys.stdout.write(f"{report}\n")
    keep(report.to_dict(), bundle / RESULT)
    return report.exit_code


def keep(result: dict[str, Any], file: Path) -> None:
    """Write a result; if that fails it says so, and what was found counts all the same."""
    try:
        write_whole(file, json.dumps(result, indent=2) + "\n")
    except OSError as error:
        sys.stderr.write(f"{file.name} could not be written: {cause(error)}.\n")
