"""``nb.handoff``: perform a golden run of a model, and write a bundle that repeats it on another machine.

The bundle contains this package and the versions of all packages. ``smoke.py`` runs and evaluates the golden run.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import string
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ..._events.activity import ProgressEvent
from ..._render.display import OK, WARNING, Displayable, Report, Table, escape, format_bytes, pluralize
from ..._utils.plain import remove_abandoned, temporary_folder, to_json
from ..._utils.text import (
    describe_error,
    describe_file,
    describe_value,
    model_label,
)
from ..._utils.validation import check_bool, check_path
from ...devices.machine import distribution_of
from ...devices.request import MASK, sanitize_path
from ...errors import ConfigurationError
from ...models.files import (
    ADAPTER_PATTERNS,
    CONFIG_PATTERNS,
    TOKENIZER_PATTERNS,
    file_digest,
    hash_model_files,
    match_files,
    weight_files,
)
from ...models.loading import LoadSpec, model_folder
from ...models.registry import is_model_name
from ...session import SESSION, check_options
from ...training.curve import STATUS
from ..bench.timing import format_rate
from ..bench.workloads import BUILT_IN, validate_texts
from ..bench.workloads import SYNTHETIC_TEXTS as SHORT_TEXTS
from .gathering import DISTRIBUTION_NAME, check_output_folder, fingerprint_dataset, portable_variables
from .smoke import GOLDEN, LOGBOOK, MODEL, NUM_ROUNDS, TEXTS, GoldenRun, SmokeBenchmark, record_golden_run

# Synthetic texts without data of real patients, which every bundle may contain.
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
CHECKSUMS = "SHA256SUMS"

# Environment variables that disable network access.
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}

# Model card and license files.
MODEL_CARD_PATTERNS = ("README*", "LICENSE*", "NOTICE*")

ORDER_REMEDY = "Pass nb.handoff(folder, model, dataset): first a new folder, then the model, then the texts."

PACKAGE = Path(__file__).parents[2]
TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True, repr=False)
class Handoff(Displayable):
    """Bundle that repeats a golden run on another machine.

    Attributes:
        folder: Directory of the bundle.
        golden: Golden run.
        benchmark: Throughput and memory of the golden run.
        files: Name and size in bytes of each file.
    """

    JSON_PROPERTIES = ("simulated",)
    JSON_EXCLUDE = ("folder",)

    folder: Path
    golden: GoldenRun
    benchmark: SmokeBenchmark
    files: Mapping[str, int]

    @property
    def simulated(self) -> bool:
        """Whether the golden run was on a simulated device."""
        return self.benchmark.simulated

    def to_report(self) -> Report:
        """Return the contents, the instructions, the throughput and the size."""
        golden = self.golden
        memory = self.benchmark.memory.verdict
        entities = pluralize(sum(map(len, golden.entities)), "entity", "entities")
        sentences = (
            f"Copy the directory to another machine and run sh {RUN} in it. Its {README} explains how, and names its files.",
            f"The golden run found {entities} in {pluralize(len(golden.entities), 'text')} on {self.benchmark.device}.",
            f"Memory over {NUM_ROUNDS} rounds: {memory}.",
            _describe_model(golden),
            _describe_texts(golden),
        )
        disturbance = self.benchmark.disturbance
        rate = f"not measured: {disturbance}" if disturbance else format_rate(self.benchmark.fastest)
        source = "the dataset" if golden.dataset_copied else BUILT_IN
        rows = (
            (f"texts per second in the fastest round, with {source}", rate),
            ("size of all files", format_bytes(sum(self.files.values()))),
        )
        return Report(
            f"Handoff bundle {self.folder.name!r}",
            sentences,
            metrics=(Table("Golden run", ("metric", "value"), rows),),
            status=OK if STATUS.get(memory) == OK and not disturbance else WARNING,
        )


def _describe_model(golden: GoldenRun) -> str:
    if golden.copied:
        return f"The model is in {MODEL}/."
    return (
        f"The model {golden.model} is not included. The smoke test checks that its files are the same. Download it first, "
        f"or copy its folder into this folder as {MODEL}."
    )


def _describe_texts(golden: GoldenRun) -> str:
    if golden.dataset_copied:
        return f"{TEXTS} contains the texts of the dataset. The same data protection rules apply to this folder."
    checksum = f" The dataset of the original work has SHA-256 {golden.dataset.checksum}." if golden.dataset else ""
    return f"The texts in {TEXTS} are synthetic. This folder does not contain text of a dataset.{checksum}"


def handoff(  # noqa: PLR0913 - each parameter is an independent setting of the user
    folder: str | os.PathLike[str],
    model: str | os.PathLike[str] | None = None,
    dataset: str | os.PathLike[str] | Iterable[object] | None = None,
    *,
    copy_model: bool = True,
    copy_dataset: bool = False,
    owner: str | None = None,
    trace: str | os.PathLike[str] | None = None,
    **arguments: Any,
) -> Handoff:
    """Write a bundle that runs a model on another machine and checks that the results are the same.

    The bundle contains this version of openmed_nb, the versions of all packages, the model and a logbook. It
    also contains the golden command with its environment variables, and a smoke test. ``sh run.sh`` checks device, entities
    and memory. It also checks the speed if the logbooks are comparable. The README.md describes how to run the bundle without
    a network.

    Packages are pinned without a build suffix, such as ``+cpu``. The pins are constraints, so each machine installs only
    the packages that it needs. The model is loaded for the golden run and released afterwards. The session does not
    change.

    Args:
        folder: Directory of the bundle. It must be empty or not exist. The bundle is written completely or not at all.
        model: Name or directory of a model. If ``None``, use the bundled model.
        dataset: Dataset of the original work: texts, or the path of a file or a directory. The bundle contains only its
            checksum.
        copy_model: Whether to copy the model files. If false, the bundle contains only the name of the model, without a
            path, and its checksum.
        copy_dataset: Whether to copy the texts of ``dataset`` and use them in the smoke test instead of synthetic texts.
        owner: Person or team that is responsible for the golden command, named in README.md and ``golden.json``.
        trace: Trace file of :func:`openmed_nb.runbook.profile`, which is added to the bundle.
        arguments: Arguments of :func:`openmed_nb.load_model`, such as ``dtype``.

    Returns:
        The bundle: ``folder``, ``files`` with sizes, ``golden`` and ``benchmark``.

    Raises:
        ConfigurationError: If the folder is not empty, an argument is not valid, the weights are in pickle files, or
            openmed_nb is not installed.
        ModelError: If the model cannot be loaded.
        DeviceError: If the device is not available.
    """
    check_options(handoff, arguments)
    check_bool("copy_model", copy_model)
    check_bool("copy_dataset", copy_dataset)
    with SESSION.operation():
        if owner is not None and not (isinstance(owner, str) and owner.strip() and owner.isprintable()):
            raise ConfigurationError("The owner is not a valid name.", "Pass a name in one line.")
        if copy_dataset and dataset is None:
            raise ConfigurationError("There is no dataset to copy.", "Pass dataset=, or remove copy_dataset.")
        installed = distribution_of(DISTRIBUTION_NAME)
        if installed is None:
            raise ConfigurationError(
                "openmed_nb is not installed, so its dependencies are unknown.",
                "Install it: python -m pip install openmed-nb.",
            )
        files = dict(_package_files(installed))  # Copied files by their name in the bundle.
        if trace is not None:
            trace_file = check_path(trace, "the file of a trace")
            if not trace_file.is_file():
                raise ConfigurationError(
                    f"{describe_file(trace_file)} is not a file.",
                    "Pass the file of nb.runbook.profile(..., trace='trace.json').",
                )
            files["trace.json.gz" if trace_file.suffix == ".gz" else "trace.json"] = trace_file
        target = _check_new_folder(folder, model)
        spec, device = SESSION.load_spec(model, arguments)
        SESSION.notify(ProgressEvent("Preparing handoff", model_label(spec.reference.name)))
        # An uncopied model has its Hub id on another machine, or the name of its directory.
        name = sanitize_path(Path(spec.reference.name).name)
        portable_name = MODEL if copy_model or MASK in name else name
        if spec.reference.on_hub and not copy_model:
            portable_name = spec.reference.location
        if copy_model:
            files.update(_model_files(spec))
        fingerprint = None if dataset is None else fingerprint_dataset(dataset)
        texts = (validate_texts(dataset) if copy_dataset else None) or list(SYNTHETIC_TEXTS)
        book, benchmark, entities = record_golden_run(device, spec, texts)
        golden = GoldenRun(
            model=portable_name,
            copied=copy_model,
            model_hashes=hash_model_files(model_folder(spec)),
            dtype=spec.dtype,
            device=device,
            environment={**portable_variables(SESSION.device_manager.environ), **OFFLINE},
            dataset=fingerprint,
            dataset_copied=copy_dataset,
            entities=entities,
            owner=owner,
        )
        contents = {
            GOLDEN: to_json(golden),
            TEXTS: to_json(texts),
            LOGBOOK: to_json(book),
            "requirements.txt": _locked_versions(),
            RUN: render_run_script(golden.environment),
            README: _render_readme(golden, installed, book.simulated),
        }
        SESSION.notify(ProgressEvent("Writing", "the bundle"))
        try:
            parent = target if target.is_dir() else target.parent
            target.parent.mkdir(parents=True, exist_ok=True)
            with temporary_folder(parent) as temporary:
                _write_bundle(temporary, files, contents)
                # An existing directory is not replaced, because it may be the working directory of a process.
                target.mkdir(exist_ok=True)
                for item in list(temporary.iterdir()):
                    item.rename(target / item.name)
        except OSError as error:
            raise ConfigurationError(
                f"The bundle {describe_file(target)} cannot be written: {describe_error(error)}.",
                "Pass a folder on a writable disk with free space.",
            ) from None
        written = sorted(file for file in target.rglob("*") if file.is_file())
        sizes = {file.relative_to(target).as_posix(): file.stat().st_size for file in written}
        return Handoff(target, golden, benchmark, sizes)


def _check_new_folder(folder: str | os.PathLike[str], model: object) -> Path:
    """Return the resolved path of a directory that is empty or does not exist.

    Raises:
        ConfigurationError: If the directory is not empty or is a file, or if the arguments are probably swapped.
    """
    if not (is_model_name(folder) and is_model_name(model)):
        raise ConfigurationError(f"Invalid types: {describe_value(folder)}, {describe_value(model)}.", ORDER_REMEDY)
    target = Path(os.path.realpath(check_output_folder(folder)))
    remove_abandoned(target)
    try:
        occupied = any(target.iterdir())
    except FileNotFoundError:
        occupied = False
    except OSError:  # The path is below a file, or is unreadable.
        occupied = True
    if occupied:
        raise ConfigurationError(f"{describe_file(target)} already exists and is not empty.", ORDER_REMEDY)
    return target


def _package_files(installed: Distribution) -> Iterator[tuple[str, Path]]:
    """Yield the name and the path of each file of the running package, and of the metadata of the installed package.

    A bundle contains the files instead of a wheel, so that ``smoke.py`` imports them from its folder without an installation.
    """
    for file in PACKAGE.rglob("*"):
        relative = file.relative_to(PACKAGE.parent)
        if file.is_file() and not any(part.startswith((".", "__pycache__")) for part in relative.parts):
            yield relative.as_posix(), file
    for metadata in installed.files or ():
        if metadata.name == "METADATA" or "licenses" in metadata.parts:
            yield metadata.as_posix(), Path(str(metadata.locate()))
    for name in ("smoke.py", "openmed_nb.service", "openmed_nb.plist"):
        yield name, TEMPLATES / f"{name}.txt"


def _model_files(spec: LoadSpec) -> Iterator[tuple[str, Path]]:
    """Yield the name and the path of each model file to copy.

    Raises:
        ConfigurationError: If the weights are in a pickle file.
    """
    folder = model_folder(spec)
    weights = weight_files(folder)
    if any(not file.name.endswith((".safetensors", ".safetensors.index.json")) for file in weights):
        raise ConfigurationError(
            f"The weights of {describe_value(spec.reference.name)} are in a pickle file, which cannot be copied.",
            "Save the model as safetensors, and pass that folder.",
        )
    for file in (
        *weights,
        *match_files(folder, (*CONFIG_PATTERNS, *TOKENIZER_PATTERNS, *ADAPTER_PATTERNS, *MODEL_CARD_PATTERNS)),
    ):
        yield f"{MODEL}/{Path(os.path.relpath(file, folder)).as_posix()}", file


def _write_bundle(folder: Path, files: Mapping[str, Path], contents: Mapping[str, str]) -> None:
    """Write the copied files, the generated files and the checksums of a bundle."""
    for name, file in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, folder / name)
    for name, text in contents.items():
        (folder / name).write_text(text, "utf-8", newline="\n")
    (folder / RUN).chmod(0o755)
    checksums = (f"{file_digest(folder / name, 'sha256')}  {name}\n" for name in sorted([*files, *contents]))
    (folder / CHECKSUMS).write_text("".join(checksums), "utf-8", newline="\n")


def render_run_script(environment: Mapping[str, str]) -> str:
    """Return the golden command for a POSIX shell, which sets environment variables and runs the smoke test."""
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in environment.items())
    return (TEMPLATES / RUN).read_text("utf-8").replace("# exports\n", exports)


def _render_readme(golden: GoldenRun, installed: Distribution, simulated: bool) -> str:
    """Return the instructions of a bundle."""
    direct = [requirement.name for requirement in map(Requirement, installed.requires or ()) if not requirement.marker]
    notice = "\nThe golden run used a **simulated** MPS device. Its times do not represent real MPS hardware.\n"
    return string.Template((TEMPLATES / README).read_text("utf-8")).substitute(
        simulation=notice if simulated else "",
        python=".".join(platform.python_version_tuple()[:2]),
        packages=" ".join(direct),
        model=golden.model if golden.copied else shlex.quote(golden.model),
        rounds=NUM_ROUNDS,
        model_description=_describe_model(golden),
        texts_description=_describe_texts(golden),
        owner=f"\nThe owner of the golden command: {escape(golden.owner)}.\n" if golden.owner else "",
    )


def _locked_versions() -> str:
    """Return the versions of this package and of its direct and indirect dependencies, without build suffixes."""
    versions: dict[str, str] = {}
    pending = [DISTRIBUTION_NAME]
    while pending:
        name = canonicalize_name(pending.pop())
        package = distribution_of(name)
        if package is not None and name not in versions:
            versions[name] = package.version.partition("+")[0]
            pending += [Requirement(line).name for line in package.requires or ()]
    header = f"# The environment of this bundle, locked on Python {platform.python_version()}, {platform.system()}.\n"
    return header + "".join(f"{name}=={version}\n" for name, version in sorted(versions.items()))
