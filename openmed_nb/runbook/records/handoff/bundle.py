"""``nb.handoff``: run a model as it shall run elsewhere, and write a folder that repeats that on another computer.

In it are the pinned packages and the wheel of this one; ``smoke.py`` is what runs and judges.
"""

from __future__ import annotations

import base64
import os
import platform
import shlex
import shutil
import string
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ...._events.activity import ProgressEvent
from ...._render.display import OK, WARNING, Displayable, Report, Table, format_bytes, pluralize
from ...._utils.plain import to_json
from ...._utils.text import describe_error, describe_file, describe_value, short_type_name
from ...._utils.validation import check_bool, check_path
from ....devices.machine import distribution_of
from ....devices.request import MASK
from ....errors import ConfigurationError
from ....models.files import (
    ADAPTER,
    CONFIG_PATTERNS,
    TOKENIZER_PATTERNS,
    file_digest,
    hash_model_files,
    match_files,
    weight_files,
)
from ....models.loading import LoadSpec, model_folder
from ....models.registry import is_model_name
from ....session import SESSION
from ....training.curve import FLAT
from ...bench.workloads import TEXTS as SHORT_TEXTS
from ...bench.workloads import validate_texts
from ..logbook.gathering import TOOLKIT
from ..logbook.logbook import SCHEMA_FILE, Logbook, escape_markdown
from ..logbook.privacy import fingerprint_dataset, portable_variables, sanitize_path
from .smoke import CHECKSUMS, GOLDEN, LOGBOOK, MODEL, REQUIREMENTS, TEXTS, GoldenRun, SmokeBenchmark, record_golden_run

# Synthetic texts, which every bundle can hold; no real person is described.
SYNTHETIC_TEXTS = (
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

RUN = "run.sh"
README = "README.md"
WHEELS = "wheels"
EVIDENCE = "evidence.json"
SCHEMA_NAME = "logbook.schema.json"
TRACES = ("trace.json.gz", "trace.json")

MAX_OWNER_LENGTH = 100

# What keeps everything from asking the network.
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}

# What says what a model is and who may use it.
MODEL_CARD_PATTERNS = ("README*", "LICENSE*", "NOTICE*")

# What each file is for.
FILE_DESCRIPTIONS = {
    README: "how it is run",
    RUN: "the golden command: it sets the environment variables and runs the smoke test",
    "smoke.py": "the smoke test",
    "openmed_nb.service": "the golden command as a unit of systemd",
    "openmed_nb.plist": "the same for launchd on macOS",
    GOLDEN: "the golden run: model, device, type, batch, environment variables, and the entities to be found",
    LOGBOOK: "what the golden run was measured with, and its figures",
    EVIDENCE: "the logbook of the work that is handed over",
    SCHEMA_NAME: "the form of logbooks, as a JSON Schema",
    **dict.fromkeys(TRACES, "the trace of torch's profiler; it has the name of the computer that it is of"),
    TEXTS: "the texts of the golden run",
    f"{MODEL}/": "the model",
    REQUIREMENTS: "every package, in the version that was used",
    f"{WHEELS}/": "this version of openmed_nb",
    CHECKSUMS: "the checksum of every file here, for sha256sum -c or shasum -a 256 -c",
}

TEMPLATES = Path(__file__).parent / "templates"


class _BundleTemplate(string.Template):
    """A file of a bundle with names such as ``@@python`` in it: ``$`` is the shell's own."""

    delimiter = "@@"


def write_checksums(bundle: Path) -> None:
    """Write the checksums of all files that are in a bundle now."""
    files = sorted(file for file in bundle.rglob("*") if file.is_file() and file.name != CHECKSUMS)
    lines = (f"{file_digest(file, 'sha256')}  {file.relative_to(bundle).as_posix()}\n" for file in files)
    (bundle / CHECKSUMS).write_text("".join(lines), "utf-8")


@dataclass(frozen=True, repr=False)
class Handoff(Displayable):
    """A folder that another computer can run.

    Attributes:
        folder: Where it is.
        golden: Its golden run.
        logbook: What the golden run was measured with, and its figures.
        trial: What was measured.
        files: Every file with its size in bytes.
    """

    JSON_EXCLUDE = ("logbook",)
    JSON_PROPERTIES = ("simulated",)

    folder: Path
    golden: GoldenRun
    logbook: Logbook
    benchmark: SmokeBenchmark
    files: tuple[tuple[str, int], ...]

    @property
    def simulated(self) -> bool:
        """Whether the golden run was on a simulated device."""
        return self.logbook.simulated

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain mappings, lists, strings and numbers, ready for JSON."""
        return {**super().to_dict(), "folder": str(self.folder), "files": dict(self.files)}

    def to_report(self) -> Report:
        """Return what is in it and how it is run; sizes and times stand in the HTML alone."""
        golden = self.golden
        memory = self.benchmark.memory.verdict
        entities = pluralize(sum(map(len, golden.entities)), "entity", "entities")
        sentences = (
            f"The golden run found {entities} in {pluralize(len(golden.entities), 'text')} on {self.logbook.device}.",
            f"Memory over {golden.rounds} rounds: {memory}.",
            _describe_model(golden),
            _describe_texts(golden),
            "Its README.md says how it is run.",
        )
        said = tuple(one.replace("**", "").replace("`", "") for one in sentences)
        names = {"".join(name.partition("/")[:2]) for name, _ in self.files}  # Files, and folders with a slash.
        rows = tuple((name, what) for name, what in FILE_DESCRIPTIONS.items() if name in names)
        sizes = tuple((name, format_bytes(size)) for name, size in self.files)
        return Report(
            f"Handoff bundle {self.folder.name!r}",
            said,
            (Table("", ("file", "what it is"), rows),),
            metrics=(Table("Sizes", ("file", "size"), sizes, collapsed=True), *self.benchmark.to_report().metrics),
            html_sentences=(f"{self.folder.name!r} can be handed over: copy the folder, and run sh {RUN} in it", *said),
            status=OK if memory == FLAT else WARNING,
        )


def _describe_model(golden: GoldenRun) -> str:
    if golden.copied:
        return f"The model is in `{MODEL}/`."
    return (
        f"The model `{golden.model}` is **not** here; the smoke test checks that its files are the same. Fetch it first, or say "
        f"where it is: `sh {RUN} --model FOLDER`."
    )


def _describe_texts(golden: GoldenRun) -> str:
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
    owner: str | None = None,
    trace: str | os.PathLike[str] | None = None,
    batch_size: int = 32,
    rounds: int = 10,
    steps: int = 3,
    device: str | None = None,
    progress: bool = True,
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
        owner: Who answers for the golden command, such as a team; it stands in its README and in ``golden.json``.
        trace: A file that :func:`openmed_nb.runbook.profile` wrote with ``trace=``, to be handed over too.
        batch_size: How many texts a step of the smoke test reads.
        rounds: After how many rounds its memory is judged; one more goes before them.
        steps: How many steps a round has.
        device: The device of the golden run; ``None`` is the session's.
        progress: Whether to show what is under way, where it takes longer than half a second.
        arguments: Those of :func:`openmed_nb.load_model`, such as ``dtype``.

    Returns:
        What was written: ``folder``, ``files`` with sizes, ``golden``, ``logbook`` and ``trial``.

    Raises:
        ConfigurationError: For a folder that is not empty, a model that is not a name or is a pickle, numbers that are out of
            their limits, and if openmed_nb is not installed.
        ModelError: If the model cannot be loaded.
        DeviceError: If the device cannot be used.

    Packages are pinned without the name of a build, such as ``+cpu``; the pins are constraints, so that each computer installs
    those of them that it needs. The model is loaded for it and let go after it; the session stays as it is.
    """
    given = {name: value for name, value in {"device": device, **arguments}.items() if value is not None}
    check_bool("copy_model", copy_model)
    check_bool("copy_dataset", copy_dataset)
    with SESSION.operation(progress):
        _check_arguments(model, dataset, logbook, copy_dataset, owner)
        files = {} if trace is None else _trace_file(trace)
        target = _check_new_folder(folder)
        spec, on = SESSION.load_spec(model, given)
        SESSION.notify(ProgressEvent("Handing over", spec.reference.name))
        golden = GoldenRun(
            model=MODEL if copy_model else _portable_model_name(spec),
            copied=copy_model,
            model_hashes=hash_model_files(model_folder(spec)),
            dtype=spec.dtype,
            device=on,
            batch_size=batch_size,
            rounds=rounds,
            steps=steps,
            environment={**portable_variables(SESSION.device_manager.environ), **OFFLINE},
            dataset=None if dataset is None else fingerprint_dataset(dataset),
            dataset_copied=copy_dataset,
            owner=owner,
        )
        if copy_model:
            files.update({f"{MODEL}/{name}": file for name, file in _model_files(spec)})
        texts = list(validate_texts(dataset) or ()) if copy_dataset else list(SYNTHETIC_TEXTS)
        if not all(isinstance(text, str) for text in texts):
            raise ConfigurationError("The dataset has items that are not texts.", "Pass a list of texts.")
        book, trial, entities = record_golden_run(golden, SESSION.device_manager, spec, spec.reference.name, texts)
        golden = replace(golden, entities=entities)
        contents = {
            GOLDEN: to_json(golden),
            TEXTS: to_json(texts),
            LOGBOOK: to_json(book),
            REQUIREMENTS: _requirements(),
        }
        if logbook is not None:
            contents[EVIDENCE] = to_json(logbook)
        SESSION.notify(ProgressEvent("Writing", target.name))
        try:
            there = target.is_dir()
            target.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=target if there else target.parent, prefix=".handoff.") as aside:
                _write_bundle(Path(aside), golden, files, contents, book.simulated)
                target.mkdir(exist_ok=True)  # An empty folder stays the same one, because a process may be in it.
                for item in list(Path(aside).iterdir()):
                    item.rename(target / item.name)
        except OSError as error:
            what = f"The bundle {describe_file(target)} cannot be written: {describe_error(error)}."
            raise ConfigurationError(what, "Name a folder on a disk with room that can be written.") from None
        written = sorted(file for file in target.rglob("*") if file.is_file())
        sizes = tuple((file.relative_to(target).as_posix(), file.stat().st_size) for file in written)
        return Handoff(target, golden, book, trial, sizes)


def _check_arguments(model: Any, dataset: Any, logbook: Any, copy_dataset: bool, owner: Any) -> None:
    """Refuse what cannot be handed over, before anything is loaded."""
    if not is_model_name(model):
        what = f"{short_type_name(model)} is not the name of a model, and has no files that can be handed over."
        raise ConfigurationError(what, "Save it with save_pretrained(), its tokenizer too, and pass the folder.")
    if logbook is not None and not isinstance(logbook, Logbook):
        what = f"{short_type_name(logbook)} is not a logbook."
        raise ConfigurationError(what, "Pass what nb.logbook() or Logbook.read() returned.")
    if owner is not None and not (
        isinstance(owner, str) and 0 < len(owner.strip()) <= MAX_OWNER_LENGTH and owner.isprintable()
    ):
        raise ConfigurationError("The owner is not a name.", f"Pass one line of at most {MAX_OWNER_LENGTH} characters.")
    if copy_dataset and isinstance(dataset, (str, os.PathLike)):
        raise ConfigurationError("A dataset in files is not copied.", "Pass its texts, or copy the files yourself.")
    if copy_dataset and dataset is None:
        raise ConfigurationError("There is no dataset to copy.", "Pass dataset=, or leave copy_dataset out.")


def _trace_file(trace: Any) -> dict[str, Path]:
    """Return the file of a trace by its name in a bundle."""
    file = check_path(trace, "the file of a trace")
    for name in TRACES:
        if file.name.endswith(name.removeprefix("trace")) and file.is_file():
            return {name: file}
    what = f"{describe_file(file)} is not the file of a trace."
    raise ConfigurationError(what, "Pass the one that nb.runbook.profile(..., trace='trace.json') wrote.")


def _check_new_folder(folder: Any) -> Path:
    """Return the full path of a folder that can be written, to where links lead: nothing is there yet, or it is empty."""
    target = Path(os.path.realpath(check_path(folder, "folder")))
    try:
        occupied = any(target.iterdir())
    except FileNotFoundError:
        occupied = False
    except OSError:  # It is a file, or below one, or cannot be read.
        occupied = True
    if occupied:
        raise ConfigurationError(f"{describe_file(target)} is there already and not empty.", "Name a new folder.")
    above = next(parent for parent in (target, *target.parents) if parent.exists())
    if not os.access(above, os.R_OK | os.W_OK | os.X_OK):
        raise ConfigurationError(f"Nothing can be written into {describe_file(above)}.", "Name another folder.")
    return target


def _portable_model_name(spec: LoadSpec) -> str:
    """Return what a model that is not copied is called on another computer: its id on the hub, its name, or that of its folder."""
    if spec.reference.on_hub:
        return spec.reference.location
    name = sanitize_path(Path(spec.reference.name).name)
    return MODEL if MASK in name else name


def _model_files(spec: LoadSpec) -> Iterator[tuple[str, Path]]:
    """Yield the files of a model that are handed over, with their names in its folder."""
    folder = model_folder(spec)
    weights = weight_files(folder)
    if any(not file.name.endswith((".safetensors", ".safetensors.index.json")) for file in weights):
        what = f"The weights of {describe_value(spec.reference.name)} are in a pickle file, which is not handed over."
        raise ConfigurationError(what, "Save the model in safetensors, and pass that folder.")
    for file in (
        *weights,
        *match_files(folder, (*CONFIG_PATTERNS, *TOKENIZER_PATTERNS, *ADAPTER, *MODEL_CARD_PATTERNS)),
    ):
        yield os.path.relpath(file, folder), file


def _write_bundle(
    folder: Path, golden: GoldenRun, files: Mapping[str, Path], contents: Mapping[str, str], simulated: bool
) -> None:
    """Write all files of a bundle: those that are copied and those with contents, each by its name."""
    (folder / WHEELS).mkdir()
    wheel = write_wheel(folder / WHEELS)
    for name, file in {**files, SCHEMA_NAME: SCHEMA_FILE}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, folder / name)
    for name, text in {**contents, **render_scripts(golden)}.items():
        (folder / name).write_text(text, "utf-8", newline="\n")
    (folder / RUN).chmod(0o755)
    names = {f"{item.name}/" if item.is_dir() else item.name for item in folder.iterdir()} | {README, CHECKSUMS}
    note = "\nThe golden run was on a **simulated** MPS device: its times are none of a Mac.\n"
    readme = _fill(
        README,
        simulation=note if simulated else "",
        python=".".join(platform.python_version_tuple()[:2]),
        wheel=wheel.name,
        model=golden.model if golden.copied else shlex.quote(golden.model),
        rounds=golden.rounds,
        files="\n".join(f"| `{name}` | {what} |" for name, what in FILE_DESCRIPTIONS.items() if name in names),
        about_the_model=_describe_model(golden),
        about_the_texts=_describe_texts(golden),
        owner=f"\nIts owner, who answers for the golden command: {escape_markdown(golden.owner)}.\n"
        if golden.owner
        else "",
    )
    (folder / README).write_text(readme, "utf-8", newline="\n")
    write_checksums(folder)


def render_scripts(golden: GoldenRun) -> dict[str, str]:
    """Return the golden command line with its environment variables, for a POSIX shell, what starts it, and the smoke test."""
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in golden.environment.items())
    run = _fill(RUN, what=f"{FILE_DESCRIPTIONS[RUN].capitalize()}.", exports=exports)
    names = ("smoke.py", "openmed_nb.service", "openmed_nb.plist")
    return {RUN: run, **{name: _fill(f"{name}.txt") for name in names}}


def _fill(template: str, **values: object) -> str:
    return _BundleTemplate((TEMPLATES / template).read_text("utf-8")).substitute(values)


def pinned_packages() -> dict[str, str]:
    """Return the installed version, without its build, of the toolkit and of every package that it, or one of these, may need."""
    versions: dict[str, str] = {}
    pending = [TOOLKIT]
    while pending:
        name = canonicalize_name(pending.pop())
        package = distribution_of(name)
        if package is not None and name not in versions:
            versions[name] = package.version.partition("+")[0]
            pending += [Requirement(line).name for line in package.requires or ()]
    return versions


def _requirements() -> str:
    pins = pinned_packages()
    about = f"Python {platform.python_version()}, {platform.system()}, {len(pins)} packages"
    lines = [f"{name}=={version}" for name, version in sorted(pins.items())]
    return "\n".join([f"# The environment of this bundle, locked on {about}.", *lines, ""])


PACKAGE = Path(__file__).parents[3]


def write_wheel(folder: Path) -> Path:
    """Pack the running toolkit with the metadata of the installed one, and return the wheel.

    ``pip wheel`` would need the source tree, which an installed toolkit has not.
    """
    installed = distribution_of(TOOLKIT)
    if installed is None:
        what = "openmed_nb is not installed, so what it needs is not known."
        raise ConfigurationError(what, "Install it: python -m pip install openmed-nb.")
    name = f"{PACKAGE.name}-{installed.version}"
    about = f"{name}.dist-info"
    files = {}
    for path in sorted(PACKAGE.rglob("*")):
        relative = path.relative_to(PACKAGE.parent)
        if path.is_file() and not any(part.startswith((".", "__pycache__")) for part in relative.parts):
            files[relative.as_posix()] = path
    for part in installed.files or ():
        if part.parts[0] == about and (part.name in {"METADATA", "WHEEL"} or "licenses" in part.parts):
            files[part.as_posix()] = Path(str(part.locate()))
    target = folder / f"{name}-py3-none-any.whl"
    record = ""
    # Stored and not compressed: weights hardly shrink, and that takes longer than all the rest.
    with zipfile.ZipFile(target, "w", strict_timestamps=False) as wheel:
        for inside, path in files.items():
            wheel.write(path, inside)
            digest = base64.urlsafe_b64encode(bytes.fromhex(file_digest(path, "sha256"))).decode().rstrip("=")
            record += f"{inside},sha256={digest},{path.stat().st_size}\n"
        wheel.writestr(f"{about}/RECORD", f"{record}{about}/RECORD,,\n")
    return target
