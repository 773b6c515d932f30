"""``nb.handoff``: run a model as it shall run elsewhere, and write a folder that repeats that on another computer.

In it are the pinned packages and the wheel of this one; ``smoke.py`` is what runs and judges.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import os
import platform
import shlex
import shutil
import string
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ...._events.activity import Activity
from ...._render.display import OK, WARNING, Report, Shown, Table, counted, in_bytes, plain
from ...._utils.plain import to_json
from ...._utils.text import cause, describe_file, describe_value, short_type_name
from ...._utils.validation import check_flag, given_path
from ....devices.machine import distribution_of
from ....devices.request import MASK
from ....errors import ConfigurationError
from ....models.files import ADAPTER, SETTINGS, TOKENIZER, content_of, digest_of, matching, weight_files
from ....models.loading import LoadSpec, model_folder
from ....models.registry import is_named
from ....session import SESSION
from ....training.curve import FLAT
from ...bench.benches import TEXTS as SHORT_TEXTS
from ...bench.benches import checked_texts
from ..logbook.gathering import TOOLKIT
from ..logbook.logbook import SCHEMA_FILE, Logbook, escaped
from ..logbook.privacy import dataset_of, golden_variables, short_path
from .smoke import GOLDEN, LOGBOOK, MODEL, REQUIREMENTS, SCHEMA, SUMS, TEXTS, Golden, Trial, checked_sizes, golden_run

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

RUN, SMOKE, README, WHEELS, EVIDENCE = "run.sh", "smoke.py", "README.md", "wheels", "evidence.json"
SERVICE, PLIST = "openmed_nb.service", "openmed_nb.plist"
TRACES = (".json.gz", ".json")
SCHEMA_NAME = "logbook.schema.json"

LONGEST_OWNER = 100

# What keeps everything from asking the network.
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}

# What says what a model is and who may use it.
CARD = ("README*", "LICENSE*", "NOTICE*")

# What each file is for.
WHAT = {
    README: "how it is run",
    RUN: "the golden command: it sets the environment variables and runs the smoke test",
    SMOKE: "the smoke test",
    SERVICE: "the golden command as a unit of systemd",
    PLIST: "the same for launchd on macOS",
    GOLDEN: "the golden run: model, device, type, batch, environment variables, and the entities to be found",
    LOGBOOK: "what the golden run was measured with, and its figures",
    EVIDENCE: "the logbook of the work that is handed over",
    SCHEMA_NAME: "the form of logbooks, as a JSON Schema",
    **{f"trace{one}": "the trace of torch's profiler; it has the name of the computer that it is of" for one in TRACES},
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
        said = tuple(one.replace("**", "").replace("`", "") for one in sentences)
        return Report(
            f"Handoff bundle {self.folder.name!r}",
            said,
            (Table("", ("file", "what it is"), rows),),
            figures=(Table("Sizes", ("file", "size"), sizes, folded=True), *self.trial.report().figures),
            spoken=(f"{self.folder.name!r} can be handed over: copy the folder, and run sh {RUN} in it", *said),
            status=OK if self.trial.curve.verdict == FLAT else WARNING,
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
            their limits, and if a package that is needed is not installed.
        ModelError: If the model cannot be loaded.
        DeviceError: If the device cannot be used.

    Packages are pinned without the name of a build, such as ``+cpu``; those that only some computers need keep the marker that
    says which. The model is loaded for it and let go after it; the session stays as it is.
    """
    given = {name: value for name, value in {"device": device, **arguments}.items() if value is not None}
    check_flag("copy_model", copy_model)
    check_flag("copy_dataset", copy_dataset)
    with SESSION.told_after(progress):
        check_handed_over(model, dataset, logbook, copy_dataset, owner)
        traced = trace_file(trace)
        target = free_folder(folder)
        sizes = batch_size, rounds, steps = checked_sizes(batch_size, rounds, steps)
        spec, on = SESSION.files(model, given)
        SESSION.tell(Activity("Handing over", spec.reference.name))
        about = None if dataset is None else dataset_of(dataset)
        pins = lock()
        files = {f"{MODEL}/{name}": file for name, file in model_files(spec)} if copy_model else {}
        texts = list(checked_texts(dataset) or ()) if copy_dataset else list(SYNTHETIC)
        if not all(isinstance(text, str) for text in texts):
            raise ConfigurationError("The dataset has items that are not texts.", "Pass a list of texts.")
        book, trial, entities = golden_run(SESSION.computer, spec, spec.reference.name, on, texts, sizes)
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
            owner=owner,
        )
        locked_on = f"Python {platform.python_version()}, {book.software.system}, {len(pins)} packages"
        contents = {
            GOLDEN: to_json(golden),
            TEXTS: to_json(texts),
            LOGBOOK: to_json(book),
            REQUIREMENTS: requirements_text(pins, locked_on),
            **({} if logbook is None else {EVIDENCE: to_json(logbook)}),
        }
        SESSION.tell(Activity("Writing", target.name))
        try:
            with new_folder(target) as place:
                write_bundle(place, golden, {**files, **traced}, contents, book.simulated)
        except OSError as error:
            what = f"The bundle {describe_file(target)} cannot be written: {cause(error)}."
            raise ConfigurationError(what, "Name a folder on a disk with room that can be written.") from None
        written = sorted(file for file in target.rglob("*") if file.is_file())
        files_written = tuple((file.relative_to(target).as_posix(), file.stat().st_size) for file in written)
        return Handoff(target, golden, book, trial, files_written)


def check_handed_over(model: Any, dataset: Any, logbook: Any, copy_dataset: bool, owner: Any) -> None:
    """Refuse what cannot be handed over, before anything is loaded."""
    if not is_named(model):
        what = f"{short_type_name(model)} is not the name of a model, and has no files that can be handed over."
        raise ConfigurationError(what, "Save it with save_pretrained(), its tokenizer too, and pass the folder.")
    if logbook is not None and not isinstance(logbook, Logbook):
        what = f"{short_type_name(logbook)} is not a logbook."
        raise ConfigurationError(what, "Pass what nb.logbook() or Logbook.read() returned.")
    if owner is not None and not (
        isinstance(owner, str) and 0 < len(owner.strip()) <= LONGEST_OWNER and owner.isprintable()
    ):
        raise ConfigurationError("The owner is not a name.", f"Pass one line of at most {LONGEST_OWNER} characters.")
    if copy_dataset and isinstance(dataset, (str, os.PathLike)):
        raise ConfigurationError("A dataset in files is not copied.", "Pass its texts, or copy the files yourself.")
    if copy_dataset and dataset is None:
        raise ConfigurationError("There is no dataset to copy.", "Pass dataset=, or leave copy_dataset out.")


def trace_file(trace: Any) -> dict[str, Path]:
    """Return the file of a trace by its name in a bundle; nothing where none was passed."""
    if trace is None:
        return {}
    file = given_path(trace, "the file of a trace")
    ending = next((one for one in TRACES if file.name.endswith(one)), None)
    if ending is None or not file.is_file():
        what = f"{describe_file(file)} is not the file of a trace."
        raise ConfigurationError(what, "Pass the one that nb.runbook.profile(..., trace='trace.json') wrote.")
    return {f"trace{ending}": file}


def free_folder(folder: Any) -> Path:
    """Return the full path of a folder that can be written, to where links lead: nothing is there yet, or it is empty."""
    target = Path(os.path.realpath(given_path(folder, "folder")))
    above = next(one for one in (target, *target.parents) if one.exists())
    readable = above.is_dir() and os.access(above, os.R_OK | os.X_OK)
    if above == target and (not above.is_dir() or (readable and any(above.iterdir()))):
        raise ConfigurationError(f"{describe_file(target)} is there already and not empty.", "Name a new folder.")
    if not above.is_dir() or not os.access(above, os.R_OK | os.W_OK | os.X_OK):
        raise ConfigurationError(f"Nothing can be written into {describe_file(above)}.", "Name another folder.")
    return target


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Give a folder to be filled, and put what is in it into its place, unless filling it fails.

    An empty folder that is there stays the same one, because a process may be in it.
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
        what = f"The weights of {describe_value(spec.reference.name)} are in a pickle file, which is not handed over."
        raise ConfigurationError(what, "Save the model in safetensors, and pass that folder.")
    for file in (*weights, *matching(folder, (*SETTINGS, *TOKENIZER, *ADAPTER, *CARD))):
        yield os.path.relpath(file, folder), file


def write_bundle(
    folder: Path, golden: Golden, files: Mapping[str, Path], contents: Mapping[str, str], simulated: bool
) -> None:
    """Write all files of a bundle: those of the model, if it is copied, and those with contents, each by its name."""
    (folder / WHEELS).mkdir()
    wheel = write_wheel(folder / WHEELS)
    for name, file in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, folder / name)
    shutil.copyfile(SCHEMA_FILE, folder / SCHEMA_NAME)
    there = {"".join(name.partition("/")[:2]) for name in files}
    names = {*contents, *there, *scripts(golden), SCHEMA_NAME, f"{WHEELS}/", README, SUMS}
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
        owner=f"\nIts owner, who answers for the golden command: {escaped(golden.owner)}.\n" if golden.owner else "",
    )
    for name, text in {**contents, **scripts(golden), README: readme}.items():
        (folder / name).write_text(text, "utf-8", newline="\n")
    (folder / RUN).chmod(0o755)
    write_checksums(folder)


def scripts(golden: Golden) -> dict[str, str]:
    """Return the golden command line with its environment variables, for a POSIX shell, what starts it, and the smoke test."""
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in golden.variables.items())
    run = filled(RUN, what=f"{WHAT[RUN].capitalize()}.", exports=exports)
    return {RUN: run, **{name: filled(f"{name}.txt") for name in (SMOKE, SERVICE, PLIST)}}


# What a marker names that makes a package one of some computers only.
PLATFORM = ("sys_platform", "platform_system", "platform_machine", "os_name")


@dataclass(frozen=True)
class Pin:
    """A package in the version that is installed."""

    name: str  # Its normalized name.
    version: str  # Its version, without what names a build, such as +cpu, which other computers do not have.
    build: str  # The version with its build.
    marker: str = ""  # On which computers it is needed; empty for all.

    def __str__(self) -> str:
        line = f"{self.name}=={self.version}"
        return f"{line} ; {self.marker}" if self.marker else line


def lock(package: str = TOOLKIT, find: Callable[[str], Any] = distribution_of) -> tuple[Pin, ...]:
    """Return every package that a package needs, without itself, in alphabetical order."""
    markers: dict[str, set[str]] = {}  # On which computers each package is needed; an empty marker is all of them.
    seen: set[tuple[str, str, str]] = set()  # The packages that were followed, with the extra and the marker.

    @functools.cache
    def installed(name: str) -> Any:
        found = find(name)
        if found is None:
            what = f"{name} is needed and not installed, so the environment cannot be locked."
            raise ConfigurationError(what, f"Install it: python -m pip install {name}.")
        return found

    def follow(name: str, extras: Iterable[str] = (), marker: str = "") -> None:
        """Add what a package needs with these extras, on the computers of a marker."""
        found = installed(name)
        for extra in ("", *extras):
            if (name, extra, marker) in seen:
                continue
            seen.add((name, extra, marker))
            for required in needed(found.requires or (), extra):
                own = str(required.marker or "")
                if "extra" in own or not any(one in own for one in PLATFORM):
                    own = ""
                below = str(canonicalize_name(required.name))
                markers.setdefault(below, set()).add(marker or own)
                follow(below, sorted(required.extras), marker or own)

    def pin(name: str) -> Pin:
        build, needing = installed(name).version, sorted(markers[name])
        several = [f"({one})" for one in needing] if len(needing) > 1 else needing
        return Pin(name, build.partition("+")[0], build, "" if "" in needing else " or ".join(several))

    follow(package)
    return tuple(pin(name) for name in sorted(markers) if name != package)


def needed(requires: Iterable[str], extra: str) -> Iterator[Requirement]:
    """Yield what is required here, with an extra or, if that is empty, without any."""
    for text in requires:
        required = Requirement(text)
        if required.marker is None:
            if not extra:
                yield required
        elif required.marker.evaluate({"extra": extra}) and bool(extra) == ("extra" in str(required.marker)):
            yield required


def requirements_text(pins: Iterable[Pin], about: str) -> str:
    """Return a requirements file; ``about`` is what it was locked on."""
    lines = (f"{pin}  # {pin.build} here" if pin.build != pin.version else str(pin) for pin in pins)
    return "\n".join([f"# The environment of this bundle, locked on {about}.", *lines, ""])


PACKAGE = Path(__file__).parents[3]

# What the package is made of; anything else in its folder is not part of it.
SUFFIXES = (".py", ".pyi", ".json", ".txt", ".md", ".sh", ".css", ".safetensors", ".typed")

WHEEL = "Wheel-Version: 1.0\nGenerator: openmed_nb\nRoot-Is-Purelib: true\nTag: py3-none-any\n"

LONG_AGO = (1980, 1, 1, 0, 0, 0)  # The time of every file, so that the same files give the same wheel.


def write_wheel(folder: Path) -> Path:
    """Write the wheel of the toolkit into a folder, and return it."""
    installed = distribution_of(TOOLKIT)
    if installed is None:
        what = "openmed_nb is not installed, so what it needs is not known."
        raise ConfigurationError(what, "Install it: python -m pip install openmed-nb.")
    name = f"{TOOLKIT.replace('-', '_')}-{installed.version}"
    file, about = folder / f"{name}-py3-none-any.whl", f"{name}.dist-info"
    contents = {f"{PACKAGE.name}/{one.relative_to(PACKAGE).as_posix()}": one.read_bytes() for one in package_files()}
    contents[f"{about}/METADATA"] = (installed.read_text("METADATA") or "").encode()
    contents[f"{about}/WHEEL"] = WHEEL.encode()
    for one in installed.files or ():
        if "licenses" in one.parts and one.parts[0].endswith(".dist-info"):
            contents["/".join((about, *one.parts[1:]))] = Path(str(one.locate())).read_bytes()
    # The list of files with their checksums that a wheel must have (PyPA, "Recording installed projects").
    lines = []
    for inside, content in contents.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
        lines.append(f"{inside},sha256={digest},{len(content)}\n")
    contents[f"{about}/RECORD"] = f"{''.join(lines)}{about}/RECORD,,\n".encode()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for inside, content in contents.items():
            # Weights hardly shrink, and compressing them takes longer than all the rest.
            kind = zipfile.ZIP_STORED if inside.endswith(".safetensors") else zipfile.ZIP_DEFLATED
            archive.writestr(zipfile.ZipInfo(inside, LONG_AGO), content, kind, compresslevel=1)
    return file


def package_files() -> list[Path]:
    """Return the files of the toolkit, in alphabetical order."""
    files = (one for one in PACKAGE.rglob("*") if one.suffix in SUFFIXES or one.name == "py.typed")
    return sorted(
        one
        for one in files
        if one.is_file() and not any(part.startswith((".", "__pycache__")) for part in one.relative_to(PACKAGE).parts)
    )
