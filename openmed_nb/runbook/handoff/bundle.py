"""``nb.handoff``: measure a golden run, and write a folder that repeats it on another computer."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shlex
import shutil
import string
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...activity import Activity
from ...devices.request import MASK
from ...display import Report, Shown, Table, counted, in_bytes
from ...errors import ConfigurationError, cause, given_path
from ...models.files import ADAPTER, SETTINGS, TOKENIZER, content_of, matching, weight_files
from ...models.loading import LoadSpec, model_folder
from ...plain import to_plain
from ...session import SESSION
from ..logbook.fingerprints import dataset_of, model_of_files
from ..logbook.gathering import gather
from ..logbook.logbook import SCHEMA_FILE, Logbook, to_json
from ..logbook.variables import golden_variables, short_path
from ..measure.benches import checked_texts, subject_of_files
from .environment import lock, requirements_text, write_wheel
from .golden import (
    EVIDENCE,
    GOLDEN,
    LOGBOOK,
    MODEL,
    SCHEMA,
    SUMS,
    SYNTHETIC,
    TEXTS,
    Found,
    Golden,
    Trial,
    check_numbers,
    entities_found,
    measure,
    write_checksums,
)

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
            "golden": to_plain(self.golden),
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
        arguments: Those of :meth:`ModelLoader.load_model`, such as ``dtype``.

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
            GOLDEN: as_json(to_plain(golden)),
            TEXTS: as_json(texts),
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
    book = gather(SESSION.computer, device, model, folder, dataset=texts)
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


def as_json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
