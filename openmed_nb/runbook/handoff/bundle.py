"""``nb.handoff``: measure a golden run, and write a folder that repeats it on another computer.

What a bundle is held against stands here too: checksums as ``sha256sum -c`` reads them, entities, and the trial of speed and memory.
"""

from __future__ import annotations

import contextlib
import gc
import os
import platform
import re
import shlex
import shutil
import string
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from ...activity import Activity
from ...devices.machine import mps_is_simulated, now, shows_simulated
from ...devices.memory import empty_cache
from ...devices.request import MASK
from ...display import MARK, Report, Shown, Table, counted, in_bytes, plain
from ...errors import ConfigurationError, UnknownModel, cause, check_flag, given_path, shorten, whole
from ...models.config import OpenMedConfig
from ...models.files import ADAPTER, SETTINGS, TOKENIZER, Content, content_of, digest_of, matching, weight_files
from ...models.loading import LoadSpec, model_folder
from ...session import SESSION
from ...training.curve import MemoryCurve, take_sample
from ..benches import TEXTS as SHORT_TEXTS
from ..benches import checked_texts, subject_of_files
from ..logbook.gathering import gather
from ..logbook.logbook import SCHEMA_FILE, Logbook, to_json
from ..logbook.privacy import dataset_of, golden_variables, model_of_files, short_path
from ..logbook.sections import Dataset, ReportFigures, Run, numbers
from .environment import lock, requirements_text, write_wheel

if TYPE_CHECKING:
    from ..workloads import Bench

SCHEMA: Literal["openmed_nb/golden/1"] = "openmed_nb/golden/1"
SUMS, MODEL, TEXTS, GOLDEN, LOGBOOK = "SHA256SUMS", "model", "texts.json", "golden.json", "logbook.json"
EVIDENCE = "evidence.json"

# Synthetic texts, which every bundle can hold; no real person is described.
SYNTHETIC = (
    *SHORT_TEXTS,
    "Acute myocardial infarction of the inferior wall, treated with a stent on the same day.",
    "Chronic kidney disease stage 3, secondary hyperparathyroidism and anemia of chronic disease.",
    "He was seen for migraine; a brain tumor was ruled out, and there is no epilepsy.",
    "Family history: breast cancer in the mother, Parkinson disease in the father.",
    "Assessment: community-acquired pneumonia, sepsis, acute renal failure.",
    "The rash is consistent with psoriasis; systemic lupus erythematosus is unlikely.",
    "Follow-up of hepatitis C with cirrhosis; no hepatocellular carcinoma on ultrasound.",
    "Normal examination. Appointment in six months.",
)

WARM_UP = 2  # Steps that are not timed: the first one of each shape is slower, most of all on MPS.

RUN, SMOKE, REQUIREMENTS, README, WHEELS = "run.sh", "smoke.py", "requirements.txt", "README.md", "wheels"
SCHEMA_NAME, RESULT = "logbook.schema.json", "smoke.json"

# What keeps everything from asking the network.
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}

# What says what a model is and who may use it.
CARD = ("README*", "LICENSE*", "NOTICE*")

# What each file is for.
WHAT = {
    README: "this text",
    RUN: "the golden command: it sets the environment variables and runs the smoke test",
    SMOKE: "the smoke test",
    GOLDEN: "the golden run: model, device, type, batch, environment variables, and the entities to be found",
    LOGBOOK: "what the golden run was measured with, and its figures",
    EVIDENCE: "the logbook of the work that is handed over",
    SCHEMA_NAME: "the form of logbooks, as a JSON Schema",
    TEXTS: "the texts of the golden run",
    f"{MODEL}/": "the model",
    REQUIREMENTS: "every package, in the version that was used",
    f"{WHEELS}/": "this version of openmed_nb",
    SUMS: "the checksum of every file here, for sha256sum -c or shasum -a 256 -c",
}

TEMPLATES = Path(__file__).parent / "templates"


class BundleTemplate(string.Template):
    """A file of a bundle with names such as ``@@python`` in it: ``$`` is the shell's own."""

    delimiter = "@@"


def filled(template: str, **values: object) -> str:
    return BundleTemplate((TEMPLATES / template).read_text("utf-8")).substitute(values)


def write_checksums(bundle: Path) -> None:
    """Write the checksums of all files that are in a bundle now."""
    files = sorted(file for file in bundle.rglob("*") if file.is_file() and file.name != SUMS)
    lines = (f"{digest_of(file, 'sha256')}  {file.relative_to(bundle).as_posix()}\n" for file in files)
    (bundle / SUMS).write_text("".join(lines), "utf-8")


def changed_files(bundle: Path, needed: Iterable[str] = ()) -> dict[str, str]:
    """Return which files of a bundle are not as they were: ``"changed"``, ``"missing"`` or ``"without a checksum"``, by name.

    Args:
        bundle: The folder.
        needed: Files that must have a checksum.
    """

    def state(file: Path, checksum: str) -> str:
        try:
            return "" if digest_of(file, "sha256") == checksum else "changed"
        except OSError:
            return "missing"

    try:
        text = (bundle / SUMS).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        what = f"{bundle.name!r} is not a bundle: its {SUMS} cannot be read."
        raise ConfigurationError(what, "Name the folder that nb.handoff() has written.") from error
    wanted = {name: checksum for checksum, name in re.findall(r"([0-9a-f]{64})  (.+)", text)}
    found = {name: state(bundle / name, checksum) for name, checksum in wanted.items()}
    bare = dict.fromkeys((name for name in needed if name not in wanted), "without a checksum")
    return {name: one for name, one in (found | bare).items() if one}


@dataclass(frozen=True)
class Found:
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
    entities: tuple[tuple[Found, ...], ...] = ()

    def spec(self, bundle: Path, model: str | None = None) -> LoadSpec:
        """Return what is loaded without a network: from the bundle, else ``model``, else by its name."""
        name = str(bundle / self.model) if self.copied else model or self.model
        try:
            return LoadSpec.of(name, OpenMedConfig(dtype=self.dtype, local_only=True))
        except UnknownModel as error:
            what = f"The model {shorten(name)!r} is not in the bundle, and not here."
            raise ConfigurationError(what, "Say where it is: --model FOLDER.") from error


def entities_found(bench: Bench, texts: list[Any]) -> tuple[tuple[Found, ...], ...]:
    """Return the entities that a model finds in its texts; a text that cannot be read raises."""
    from ...annotation.results import span_of
    from ...annotation.stream import entities_of

    stream = bench.stream(len(texts))
    answers = stream.run(next(stream.batches()))
    return tuple(tuple(Found(*span_of(entity)) for entity in entities_of(answer)) for answer in answers)


def check_numbers(batch_size: Any, rounds: Any, steps: Any) -> None:
    """Check the numbers of a trial; a bundle comes from somebody else, and its trial has to end."""
    whole("batch_size", batch_size, 1, 4096)
    whole("rounds", rounds, 4, 1000)
    whole("steps", steps, 1, 1000)


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
        from ..figures import figures_of

        memory, rates = figures_of(self.curve), self.texts_per_second
        values = {"texts_per_second": self.fastest, "texts_per_second_median": median(rates), **memory.values}
        run = Run("annotation", self.batch_size, workers=0, peak_memory_bytes=memory.run.peak_memory_bytes)
        return ReportFigures(
            "trial", "golden texts", self.device, self.curve.verdict, self.simulated, numbers(values), run
        )

    def report(self) -> Report:
        """Return what became of the memory; times stand in the HTML alone."""
        rows = (("fastest round", f"{self.fastest:.1f}"), ("middle round", f"{median(self.texts_per_second):.1f}"))
        return Report(
            f"Trial of {self.name} on {self.device}: memory is {self.curve.verdict}",
            figures=(Table("Texts a second", ("round", "texts a second"), rows), *self.curve.report().tables),
        )


def measure(bench: Bench, batch_size: int, rounds: int, steps: int) -> Trial:
    """Annotate the texts of a bench again and again, and look at times and memory.

    Args:
        bench: The model with its texts.
        batch_size: How many texts a step reads.
        rounds: After how many rounds memory is judged; one more goes before them.
        steps: How many steps a round has.
    """
    stream = bench.stream(batch_size)
    batches, begin = stream.batches(), now()
    for _ in range(WARM_UP):
        stream.run(next(batches))
    curve, rates = MemoryCurve(stream.device), []
    for number in range(1, rounds + 2):
        started = now()
        for _ in range(steps):
            stream.run(next(batches))
        rates.append(batch_size * steps / (now() - started))
        gc.collect()
        empty_cache(stream.device)
        curve = curve.with_sample(take_sample(stream.device, number, number * steps, now() - begin))
    mark = MARK if mps_is_simulated() and stream.device.startswith("mps") else ""
    return Trial(stream.name, f"{stream.device}{mark}", batch_size, tuple(rates), curve)


@dataclass(frozen=True, repr=False)
class Handoff(Shown):
    """A folder that another computer can run.

    Attributes:
        folder: Where it is.
        golden: Its golden run.
        logbook: What the golden run was measured with, and its figures.
        trial: What was measured.
        files: Every file with its size in bytes.
    """

    folder: Path
    golden: Golden
    logbook: Logbook
    trial: Trial
    files: tuple[tuple[str, int], ...]

    @property
    def simulated(self) -> bool:
        """Whether the golden run was on a simulated device."""
        return self.logbook.simulated

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain mappings, lists, strings and numbers, ready for JSON."""
        return {
            "folder": str(self.folder),
            "simulated": self.simulated,
            "golden": plain(self.golden),
            "trial": self.trial.to_dict(),
            "files": dict(self.files),
        }

    def report(self) -> Report:
        """Return what is in it and how it is run; sizes and times stand in the HTML alone."""
        golden = self.golden
        entities = counted(sum(map(len, golden.entities)), "entity", "entities")
        found = f"The golden run found {entities} in {counted(len(golden.entities), 'text')} on {self.logbook.device}."
        sentences = [found, f"Memory over {golden.rounds} rounds: {self.trial.curve.verdict}."]
        sentences += [about_the_model(golden), about_the_texts(golden), "Its README.md says how it is run."]
        tops = {"".join(name.partition("/")[:2]) for name, _ in self.files}  # Files, and folders with a slash.
        rows = tuple((name, what) for name, what in WHAT.items() if name in tops)
        sizes = tuple((name, in_bytes(size)) for name, size in self.files)
        return Report(
            f"Handoff bundle {self.folder.name!r}",
            tuple(one.replace("**", "").replace("`", "") for one in sentences),
            (Table("", ("file", "what it is"), rows),),
            figures=(Table("Sizes", ("file", "size"), sizes), *self.trial.report().figures),
        )


def about_the_model(golden: Golden) -> str:
    if golden.copied:
        return f"The model is in `{MODEL}/`."
    return (
        f"The model `{golden.model}` is **not** here; the smoke test checks that its files are the same. Fetch it first, or say "
        f"where it is: `sh {RUN} --model FOLDER`."
    )


def about_the_texts(golden: Golden) -> str:
    if golden.dataset_copied:
        return f"**`{TEXTS}` holds the texts of the dataset. Handle this folder as you must handle them.**"
    checksum = f" The dataset of the work has SHA-256 `{golden.dataset.checksum}`." if golden.dataset else ""
    return f"The texts in `{TEXTS}` are synthetic; no text of a dataset is in this folder.{checksum}"


def handoff(  # noqa: PLR0913 - each is one thing that a person may want to set
    folder: str | os.PathLike[str],
    model: Any = None,
    dataset: Any = None,
    *,
    logbook: Any = None,
    copy_model: bool = True,
    copy_dataset: bool = False,
    batch_size: int = 32,
    rounds: int = 10,
    steps: int = 3,
    device: str | None = None,
    **arguments: Any,
) -> Handoff:
    """Write a folder that another computer can run, and that proves there that it does what it does here.

    In it are the locked environment with this version of the toolkit, the model, the golden command line with its environment
    variables, a logbook with its schema, and a smoke test: ``sh run.sh`` checks files, packages, entities, memory and, where
    the logbooks may be compared, speed. Its README.md says how it is run, without a network.

    Args:
        folder: The folder to write; it must not be there, or be empty. It is written whole or not at all.
        model: The name of a model, or a folder; ``None`` for the bundled one.
        dataset: The dataset of the work: texts, or the path of a file or a folder. Only its checksum is handed over.
        logbook: The logbook of the work; it is put next to that of the smoke test.
        copy_model: Whether the model's files are copied; if not, its name, without a path, and its checksum alone.
        copy_dataset: Whether the texts are copied and are what the smoke test reads, in the place of synthetic ones.
        batch_size: How many texts a step of the smoke test reads.
        rounds: After how many rounds its memory is judged; one more goes before them.
        steps: How many steps a round has.
        device: The device of the golden run; ``None`` is the session's.
        arguments: Those of :func:`openmed_nb.load_model`, such as ``dtype``.

    Returns:
        What was written: ``folder``, ``files`` with sizes, ``golden``, ``logbook`` and ``trial``.

    Raises:
        ConfigurationError: For a folder that is not empty, a model that is not a name or is a pickle, numbers that are out of
            their limits, and if a package that is needed is not installed.
        ModelError: If the model cannot be loaded.
        DeviceError: If the device cannot be used.

    Packages are pinned without the name of a build, such as ``+cpu``; those that only some computers need keep the marker that
    says which. The model is loaded for it and let go after it; the session stays as it is.
    """
    named = {"device": device, **arguments}
    given = {name: value for name, value in named.items() if value is not None}
    check_flag("copy_model", copy_model)
    check_flag("copy_dataset", copy_dataset)
    with SESSION.told_after():
        check_handed_over(model, dataset, logbook, copy_dataset)
        target = free_folder(folder)
        check_numbers(batch_size, rounds, steps)
        spec, on = SESSION.files(model, given)
        SESSION.tell(Activity("Handing over", spec.reference.name))
        about = None if dataset is None else dataset_of(dataset)
        pins = lock()
        files = dict(model_files(spec)) if copy_model else {}
        texts = list(checked_texts(dataset) or ()) if copy_dataset else list(SYNTHETIC)
        if not all(isinstance(text, str) for text in texts):
            raise ConfigurationError("The dataset has items that are not texts.", "Pass a list of texts.")
        book, trial, entities = golden_run(spec, on, texts, (batch_size, rounds, steps))
        golden = Golden(
            schema=SCHEMA,
            model=MODEL if copy_model else name_elsewhere(spec),
            copied=copy_model,
            content=content_of(model_folder(spec)),
            dtype=spec.dtype,
            device=on,
            batch_size=batch_size,
            rounds=rounds,
            steps=steps,
            variables={**golden_variables(SESSION.computer.environ), **OFFLINE},
            dataset=about,
            dataset_copied=copy_dataset,
            entities=entities,
        )
        locked_on = f"Python {platform.python_version()}, {book.software.system}, {len(pins)} packages"
        contents = {
            GOLDEN: to_json(golden),
            TEXTS: to_json(texts),
            LOGBOOK: to_json(book),
            REQUIREMENTS: requirements_text(pins, locked_on),
            **({} if logbook is None else {EVIDENCE: to_json(logbook)}),
        }
        try:
            with new_folder(target) as place:
                write_bundle(place, golden, files, contents, book.simulated)
        except OSError as error:
            what = f"The bundle {target.name!r} cannot be written: {cause(error)}."
            raise ConfigurationError(what, "Name a folder on a disk with room that can be written.") from error
        written = sorted(file for file in target.rglob("*") if file.is_file())
        sizes = tuple((file.relative_to(target).as_posix(), file.stat().st_size) for file in written)
        return Handoff(target, golden, book, trial, sizes)


def check_handed_over(model: Any, dataset: Any, logbook: Any, copy_dataset: bool) -> None:
    """Refuse what cannot be handed over, before anything is loaded."""
    if model is not None and not isinstance(model, (str, os.PathLike)):
        what = f"{type(model).__name__} is not the name of a model, and has no files that can be handed over."
        raise ConfigurationError(what, "Save it with save_pretrained(), its tokenizer too, and pass the folder.")
    if logbook is not None and not isinstance(logbook, Logbook):
        what = f"{type(logbook).__name__} is not a logbook."
        raise ConfigurationError(what, "Pass what nb.logbook() or Logbook.read() returned.")
    if copy_dataset and isinstance(dataset, (str, os.PathLike)):
        raise ConfigurationError("A dataset in files is not copied.", "Pass its texts, or copy the files yourself.")
    if copy_dataset and dataset is None:
        raise ConfigurationError("There is no dataset to copy.", "Pass dataset=, or leave copy_dataset out.")


def golden_run(
    spec: LoadSpec, device: str, texts: list[Any], sizes: tuple[int, int, int]
) -> tuple[Logbook, Trial, tuple[tuple[Found, ...], ...]]:
    """Return what the golden run was measured with, its figures, and the entities that it found.

    Args:
        spec: The model, its files here.
        device: The device, as torch spells it.
        texts: What it reads.
        sizes: ``batch_size``, ``rounds`` and ``steps``.
    """
    bench: Any = subject_of_files(spec, texts, None).on(device)
    SESSION.computer.load_torch()
    folder = model_folder(spec)
    model = model_of_files(spec.reference.name, folder, spec.dtype)
    book = gather(SESSION.computer, device, model, folder, dataset_of(texts))
    entities = entities_found(bench, texts)
    trial = measure(bench, *sizes)
    return book.with_reports(trial), trial, entities


def free_folder(folder: Any) -> Path:
    """Return the full path of a folder that can be written, to where links lead: nothing is there yet, or it is empty."""
    target = Path(os.path.realpath(given_path(folder, "folder")))
    above = next(one for one in (target, *target.parents) if one.exists())
    if above == target and target.is_dir() and os.access(target, os.R_OK | os.X_OK):
        full = any(target.iterdir())
    else:
        full = above == target and not target.is_dir()
    if full:
        raise ConfigurationError(f"{target.name!r} is there already and not empty.", "Name a new folder.")
    if not above.is_dir() or not os.access(above, os.R_OK | os.W_OK | os.X_OK):
        raise ConfigurationError(f"Nothing can be written into {above.name!r}.", "Name another folder.")
    return target


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Give a folder to be filled, and put what is in it into its place, unless filling it fails.

    Args:
        target: Its place: nothing yet, or an empty folder, which stays the same one, because a process may be in it.
    """
    there = target.is_dir()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target if there else target.parent, prefix=".handoff.") as aside:
        folder = Path(aside) / "bundle"
        folder.mkdir()
        yield folder
        if not there:
            folder.rename(target)
        for one in list(folder.iterdir()) if there else ():
            one.rename(target / one.name)


def name_elsewhere(spec: LoadSpec) -> str:
    """Return what a model that is not copied is called on another computer: its id on the hub, its name, or that of its folder."""
    reference = spec.reference
    name = short_path(Path(reference.name).name)
    return reference.location if reference.on_hub else MODEL if MASK in name else name


def model_files(spec: LoadSpec) -> Iterator[tuple[str, Path]]:
    """Yield the files of a model that are handed over, with their names in its folder."""
    folder = model_folder(spec)
    weights = weight_files(folder)
    if any(not file.name.endswith((".safetensors", ".safetensors.index.json")) for file in weights):
        what = f"The weights of {spec.reference.name!r} are in a pickle file, which is not handed over."
        raise ConfigurationError(what, "Save the model in safetensors, and pass that folder.")
    for file in (*weights, *matching(folder, (*SETTINGS, *TOKENIZER, *ADAPTER, *CARD))):
        yield os.path.relpath(file, folder), file


def write_bundle(
    folder: Path, golden: Golden, files: Mapping[str, Path], contents: Mapping[str, str], simulated: bool
) -> None:
    """Write all files of a bundle.

    Args:
        folder: Where.
        golden: The golden run.
        files: The files of the model by their names in its folder; none if it is not copied.
        contents: What is in the other files, by their names.
        simulated: Whether the golden run was on a simulated device.
    """
    (folder / WHEELS).mkdir()
    wheel = write_wheel(folder / WHEELS)
    for name, file in files.items():
        (folder / MODEL / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, folder / MODEL / name)
    shutil.copyfile(SCHEMA_FILE, folder / SCHEMA_NAME)
    names = {*contents, RUN, SMOKE, SCHEMA_NAME, f"{WHEELS}/", *([f"{MODEL}/"] if files else []), README, SUMS}
    readme = filled(
        README,
        simulation="\nThe golden run was on a **simulated** MPS device: its times are none of a Mac.\n"
        if simulated
        else "",
        python=".".join(platform.python_version_tuple()[:2]),
        wheel=wheel.name,
        model=golden.model if golden.copied else shlex.quote(golden.model),
        rounds=golden.rounds,
        files="\n".join(f"| `{name}` | {what} |" for name, what in WHAT.items() if name in names),
        about_the_model=about_the_model(golden),
        about_the_texts=about_the_texts(golden),
    )
    for name, text in {**contents, **scripts(golden), README: readme}.items():
        (folder / name).write_text(text, "utf-8", newline="\n")
    (folder / RUN).chmod(0o755)
    write_checksums(folder)


def scripts(golden: Golden) -> dict[str, str]:
    """Return the golden command line with its environment variables, for a POSIX shell, and the smoke test."""
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in golden.variables.items())
    run = filled(RUN, what=f"{WHAT[RUN].capitalize()}.", exports=exports)
    return {RUN: run, SMOKE: filled("smoke.py.txt")}
