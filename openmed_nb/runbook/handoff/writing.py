"""Writing a bundle: measured first, then written whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...devices.computer import Computer
from ...devices.variables import MASK
from ...errors import ConfigurationError, cause, given_path
from ...models.content import ADAPTER, SETTINGS, TOKENIZER, content_of, matching, weight_files
from ...models.loading import LoadSpec, model_folder
from ..logbook.datasets import dataset_of
from ..logbook.files import to_json
from ..logbook.gathering import Said, gather
from ..logbook.logbook import Logbook
from ..logbook.models import model_of_files
from ..logbook.plain_values import to_plain
from ..logbook.publishing import SCHEMA_FILE
from ..logbook.sections import Dataset
from ..logbook.variables import golden_variables, short_path
from ..workloads.annotating import ROWS, subject_of_files
from ..workloads.choosing import checked_texts
from .bundle import Handoff
from .checksums import write_checksums
from .documents import (
    OFFLINE,
    README,
    REQUIREMENTS,
    RUN,
    SCHEMA_NAME,
    SMOKE,
    SMOKE_SCRIPT,
    WHAT,
    WHEELS,
    locked_on,
    readme,
    run_script,
)
from .golden import EVIDENCE, GOLDEN, LOGBOOK, MODEL, SCHEMA, SYNTHETIC, TEXTS, Golden, entities_found
from .requirements import lock, requirements_text
from .trial import ROUNDS, STEPS, Trial, check_numbers, measure
from .wheel import write_wheel

if TYPE_CHECKING:
    from ..workloads.workload import Bench

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
    book = gather(Said(dataset=texts), computer, device, model_of_files(name, folder, spec.dtype), folder)
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
        variables={**golden_variables(computer.changes.environ), **OFFLINE},
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
