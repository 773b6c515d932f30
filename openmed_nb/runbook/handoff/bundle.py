"""A bundle as a value: what was handed over."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...devices.computer import Computer
from ...devices.request import MASK
from ...display import NOTE, Report, Shown, Table, counted, in_bytes
from ...errors import ConfigurationError, cause, given_path
from ...models.files import ADAPTER, SETTINGS, TOKENIZER, content_of, matching, weight_files
from ...models.loading import LoadSpec, model_folder
from ...plain import to_plain
from ..logbook.fingerprints import dataset_of, model_of_files
from ..logbook.gathering import gather
from ..logbook.logbook import SCHEMA_FILE, Logbook, to_json
from ..logbook.sections import Dataset
from ..logbook.variables import golden_variables, short_path
from ..measure.benches import ROWS, checked_texts, subject_of_files
from .environment import Pin, lock, requirements_text, write_wheel
from .golden import (
    EVIDENCE,
    GOLDEN,
    LOGBOOK,
    MODEL,
    ROUNDS,
    SCHEMA,
    STEPS,
    SYNTHETIC,
    TEXTS,
    Golden,
    Trial,
    check_numbers,
    entities_found,
    measure,
    write_checksums,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..measure.workloads import Bench


RUN, SMOKE, REQUIREMENTS, README, WHEELS = "run.sh", "smoke.py", "requirements.txt", "README.md", "wheels"
SCHEMA_NAME, RESULT = "logbook.schema.json", "smoke.json"

OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
"""What keeps everything from asking the network."""

SMOKE_SCRIPT = f'''"""Repeat the smoke test of this bundle: python {SMOKE} [--device DEVICE] [--model FOLDER]; status 0 where it passes."""

import contextlib
import json
import os
import sys
from pathlib import Path

BUNDLE = Path(__file__).resolve().parent
with contextlib.suppress(OSError):
    (BUNDLE / "{RESULT}").unlink()  # What an earlier run found is not what this one finds.
try:
    os.environ.update(json.loads((BUNDLE / "{GOLDEN}").read_text("utf-8"))["variables"])  # torch reads them while it loads.
except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
    sys.exit(f"The {GOLDEN} of the bundle cannot be read: {{type(error).__name__}}. Take the bundle from where it came from again.")
try:
    from openmed_nb.runbook.handoff.smoke import from_command_line
except ImportError as error:
    sys.exit(f"openmed_nb cannot be imported here: {{error}}. Install it as the {README} says.")

if __name__ == "__main__":
    sys.exit(from_command_line(BUNDLE, sys.argv[1:]))
'''

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
    "SHA256SUMS": "the checksum of every file here, for sha256sum -c or shasum -a 256 -c",
}
"""What each file is for."""


def run_script(golden: Golden) -> str:
    """Return the golden command line with its environment variables, for a POSIX shell."""
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in golden.variables.items())
    return f"""#!/bin/sh
# {WHAT[RUN].capitalize()}.
set -eu
script=$0
while [ -L "$script" ]; do
  link=$(readlink -- "$script")
  case $link in /*) script=$link ;; *) script=$(dirname -- "$script")/$link ;; esac
done
CDPATH= cd -- "$(dirname -- "$script")"
{exports}exec "${{PYTHON:-$(command -v python || command -v python3 || echo python)}}" {SMOKE} "$@"
"""


def readme(golden: Golden, files: Sequence[str], wheel: str, python: str, simulated: bool) -> str:
    """Return what a bundle says of itself.

    Args:
        golden: Its golden run.
        files: What is in it, folders with a slash.
        wheel: The name of the wheel.
        python: The version of Python, such as ``3.11``.
        simulated: Whether the golden run was on a simulated device.
    """
    table = "\n".join(f"| `{name}` | {WHAT[name]} |" for name in WHAT if name in files)
    simulation = (
        "\nThe golden run was on a **simulated** MPS device: its times are none of a Mac.\n" if simulated else ""
    )
    return f"""# A bundle of openmed_nb

This folder runs a model for token classification on another computer, and proves there that it does what it did here: the
same entities, memory that stays level, and, on a computer like this one, the same speed.
{simulation}
## Run it

With Python {python}, in this folder:

```sh
python -m venv .venv
. .venv/bin/activate
python -m pip install -r {REQUIREMENTS}
python -m pip install --no-deps {WHEELS}/{wheel}
sh {RUN}
```

After the installation no network is needed. The smoke test prints what it found, writes `{RESULT}`, and ends with status 0
where everything passed and 1 where something failed. On Windows, run `python {SMOKE}` instead of the last line.

To annotate a note: `python -m openmed_nb --model {golden.model if golden.copied else shlex.quote(golden.model)} note.txt`.

## What it checks

1. Every file is the one that was written (`SHA256SUMS`).
2. Every package is the one in `{REQUIREMENTS}`.
3. The entities in the golden texts are exactly those in `{GOLDEN}`.
4. Memory does not grow over {golden.rounds} rounds.
5. It is as fast as `{LOGBOOK}` says; but only where the two may be compared: the same device, torch, transformers, model,
   texts, batch, power source and so on, and no busy programs in either run. Elsewhere it says why not.

## What is in it

| file | what it is |
| --- | --- |
{table}

{model_words(golden)}

{texts_words(golden)}
"""


def model_words(golden: Golden) -> str:
    """Return what there is to say of the model."""
    if golden.copied:
        return f"The model is in `{MODEL}/`."
    return (
        f"The model `{golden.model}` is **not** here; the smoke test checks that its files are the same. Fetch it first, or say "
        f"where it is: `sh {RUN} --model FOLDER`."
    )


def texts_words(golden: Golden) -> str:
    """Return what there is to say of the texts and of the dataset."""
    if golden.dataset_copied:
        return f"**`{TEXTS}` holds the texts of the dataset. Handle this folder as you must handle them.**"
    checksum = f" The dataset of the work has SHA-256 `{golden.dataset.checksum}`." if golden.dataset else ""
    return f"The texts in `{TEXTS}` are synthetic; no text of a dataset is in this folder.{checksum}"


def locked_on(python: str, system: str, pins: Sequence[Pin]) -> str:
    """Return what an environment was locked on.

    Example:
        >>> locked_on("3.11.7", "macOS 14.5", ())
        'Python 3.11.7, macOS 14.5, 0 packages'
    """
    return f"Python {python}, {system}, {len(pins)} packages"


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
        golden, there = self.golden, {top(name) for name, _ in self.files}
        entities = counted(sum(map(len, golden.entities)), "entity", "entities")
        found = f"The golden run found {entities} in {counted(len(golden.entities), 'text')} on {self.logbook.device}."
        sentences = [found, f"Memory over {golden.rounds} rounds: {self.trial.curve.verdict}.", model_words(golden)]
        sentences += [texts_words(golden), "Its README.md says how it is run."]
        sizes = tuple((name, in_bytes(size)) for name, size in self.files)
        return Report(
            f"Handoff bundle {self.folder.name!r}",
            (*([NOTE] if self.simulated else []), *(one.replace("**", "").replace("`", "") for one in sentences)),
            (Table("", ("file", "what it is"), tuple((name, what) for name, what in WHAT.items() if name in there)),),
            figures=(Table("Sizes", ("file", "size"), sizes), *self.trial.report().figures),
        )


def top(name: str) -> str:
    """Return the file or the folder of a bundle in which a file is.

    Example:
        >>> top("model/config.json"), top("run.sh")
        ('model/', 'run.sh')
    """
    first, slash, _ = name.partition("/")
    return first + slash


CARD = ("README*", "LICENSE*", "NOTICE*")
"""What says what a model is and who may use it."""


@dataclass(frozen=True)
class Order:
    """What a person wants handed over.

    Attributes:
        folder: Where the bundle is written; it must not be there, or be empty.
        dataset: The dataset of the work, as for a logbook.
        logbook: The logbook of the work.
        copy_model: Whether the model's files are copied.
        copy_dataset: Whether the texts are.
        batch_size: How many texts a step of the smoke test reads.
        rounds: After how many rounds memory is judged.
        steps: How many steps a round has.
    """

    folder: str | os.PathLike[str]
    dataset: Any = None
    logbook: Any = None
    copy_model: bool = True
    copy_dataset: bool = False
    batch_size: int = ROWS
    rounds: int = ROUNDS
    steps: int = STEPS

    @property
    def target(self) -> Path:
        """The folder of the bundle, as a full path, to where links lead."""
        return Path(os.path.realpath(given_path(self.folder, "folder")))

    def check(self, model: Any) -> None:
        """Refuse what cannot be written or measured, before anything is loaded.

        Args:
            model: What the person names as the model.

        Raises:
            ConfigurationError: For a model that is no name, a folder that is not empty, numbers that are none, and a logbook that is none.
        """
        if model is not None and not isinstance(model, (str, os.PathLike)):
            what = f"{type(model).__name__} is no name of a model, and has no files that can be handed over."
            raise ConfigurationError(what, "Save it with save_pretrained(), its tokenizer too, and pass the folder.")
        target = self.target
        above = next(folder for folder in (target, *target.parents) if folder.exists())
        if above == target and target.is_dir() and os.access(target, os.R_OK | os.X_OK):
            filled = any(target.iterdir())
        else:
            filled = above == target and not target.is_dir()
        if filled:
            raise ConfigurationError(f"{target.name!r} is there already and not empty.", "Name a new folder.")
        if not above.is_dir() or not os.access(above, os.R_OK | os.W_OK | os.X_OK):
            raise ConfigurationError(f"Nothing can be written into {above.name!r}.", "Name another folder.")
        check_numbers(self)
        if self.logbook is not None and not isinstance(self.logbook, Logbook):
            what = f"{type(self.logbook).__name__} is no logbook."
            raise ConfigurationError(what, "Pass what nb.logbook() or Logbook.read() returned.")
        if self.copy_dataset and isinstance(self.dataset, (str, os.PathLike)):
            raise ConfigurationError("A dataset in files is not copied.", "Pass its texts, or copy the files yourself.")
        if self.copy_dataset and self.dataset is None:
            raise ConfigurationError("There is no dataset to copy.", "Pass dataset=, or leave copy_dataset out.")


@dataclass(frozen=True)
class Measured:
    """What a bundle is made of, before it is written.

    Attributes:
        golden: The golden run.
        texts: Its texts.
        logbook: What it was measured with, and its figures.
        trial: What was measured.
    """

    golden: Golden
    texts: list[Any]
    logbook: Logbook
    trial: Trial


def handed_over(order: Order, spec: LoadSpec, device: str, computer: Computer) -> Handoff:
    """Measure the golden run and write the bundle; return what was written.

    Args:
        order: What a person wants, checked.
        spec: The model, its files here.
        device: The device, as torch spells it.
        computer: The computer.

    Raises:
        ConfigurationError: Where a package that is needed is not installed, and where the folder cannot be written.
        ModelError: Where the model cannot be loaded, or has only pickles as weights.
    """
    dataset = None if order.dataset is None else dataset_of(order.dataset)
    pins = lock()
    files = dict(model_files(spec)) if order.copy_model else {}
    measured = measure_golden(order, dataset, spec, device, computer)
    target = order.target
    try:
        about = locked_on(platform.python_version(), measured.logbook.software.system, pins)
        with new_folder(target) as folder:
            fill(folder, order, measured, files, requirements_text(pins, about))
    except OSError as error:
        what = f"The bundle {target.name!r} cannot be written: {cause(error)}."
        raise ConfigurationError(what, "Name a folder on a disk with room that can be written.") from error
    return Handoff(target, measured.golden, measured.logbook, measured.trial, sizes_in(target))


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Give a folder to be filled, and put what is in it into its place, unless filling it fails.

    Args:
        target: Its place: an empty folder, which stays the same one, because a process may be in it; or nothing yet.

    Raises:
        OSError: Where nothing can be written there.
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


def measure_golden(order: Order, dataset: Dataset | None, spec: LoadSpec, device: str, computer: Computer) -> Measured:
    """Return the golden run of a bundle."""
    texts = list(checked_texts(order.dataset) or ()) if order.copy_dataset else list(SYNTHETIC)
    if not all(isinstance(text, str) for text in texts):
        raise ConfigurationError("The dataset has items that are no texts.", "Pass a list of texts.")
    bench: Bench = subject_of_files(spec, texts, None).on(device)
    computer.load_torch()
    folder, name = model_folder(spec), spec.reference.name
    book = gather(computer, device, model_of_files(name, folder, spec.dtype), folder, dataset=texts)
    entities = entities_found(bench, texts)
    trial = measure(bench, order.batch_size, order.rounds, order.steps)
    golden = Golden(
        schema=SCHEMA,
        model=MODEL if order.copy_model else name_elsewhere(spec),
        copied=order.copy_model,
        content=content_of(folder),
        dtype=spec.dtype,
        device=device,
        batch_size=order.batch_size,
        rounds=order.rounds,
        steps=order.steps,
        variables={**golden_variables(computer.environ), **OFFLINE},
        dataset=dataset,
        dataset_copied=order.copy_dataset,
        entities=entities,
    )
    return Measured(golden, texts, book.with_reports(trial), trial)


def name_elsewhere(spec: LoadSpec) -> str:
    """Return what a model that is not copied is called on another computer: its id on the hub, its name, or that of its folder."""
    reference = spec.reference
    name = short_path(Path(reference.name).name)
    return reference.location if reference.on_hub else MODEL if MASK in name else name


def model_files(spec: LoadSpec) -> Iterator[tuple[str, Path]]:
    """Yield the files of a model that are handed over, with their names in its folder.

    Raises:
        ConfigurationError: For weights in pickle files, which can run any code.
    """
    folder = model_folder(spec)
    weights = weight_files(folder)
    if any(not file.name.endswith((".safetensors", ".safetensors.index.json")) for file in weights):
        what = f"The weights of {spec.reference.name!r} are in a pickle file, which is not handed over."
        raise ConfigurationError(what, "Save the model in safetensors, and pass that folder.")
    for file in (*weights, *matching(folder, (*SETTINGS, *TOKENIZER, *ADAPTER, *CARD))):
        yield os.path.relpath(file, folder), file


def fill(folder: Path, order: Order, measured: Measured, files: dict[str, Path], requirements: str) -> None:
    """Write all files of a bundle.

    Raises:
        OSError: Where one cannot be written.
    """
    golden = measured.golden
    (folder / WHEELS).mkdir()
    wheel = write_wheel(folder / WHEELS)
    for name, file in files.items():
        (folder / MODEL / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, folder / MODEL / name)
    shutil.copyfile(SCHEMA_FILE, folder / SCHEMA_NAME)
    texts = {
        GOLDEN: as_json(to_plain(golden)),
        TEXTS: as_json(measured.texts),
        LOGBOOK: to_json(measured.logbook),
        REQUIREMENTS: requirements,
        RUN: run_script(golden),
        SMOKE: SMOKE_SCRIPT,
        **({} if order.logbook is None else {EVIDENCE: to_json(order.logbook)}),
    }
    names = [*texts, SCHEMA_NAME, f"{WHEELS}/", *([f"{MODEL}/"] if files else []), README, "SHA256SUMS"]
    python = ".".join(platform.python_version_tuple()[:2])
    texts[README] = readme(
        golden, [name for name in WHAT if name in names], wheel.name, python, measured.logbook.simulated
    )
    for name, text in texts.items():
        (folder / name).write_text(text, "utf-8", newline="\n")
    (folder / RUN).chmod(0o755)
    write_checksums(folder)


def as_json(value: Any) -> str:
    """Return a value as indented JSON."""
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def sizes_in(folder: Path) -> tuple[tuple[str, int], ...]:
    """Return the files of a folder with their sizes in bytes."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return tuple((file.relative_to(folder).as_posix(), file.stat().st_size) for file in files)
