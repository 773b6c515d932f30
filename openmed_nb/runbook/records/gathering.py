"""Collection of a logbook from the machine, torch, git and the dataset, without private data.

A value of an environment variable that does not have the expected format, or that looks like a secret, is replaced with ``***``.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import shutil
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from ..._events.activity import ProgressEvent
from ..._utils.clock import current_time
from ..._utils.plain import MAX_INTEGER, utc_timestamp
from ..._utils.text import collapse_whitespace, describe_file, describe_value, short_type_name
from ..._utils.validation import check_bool, check_optional_integer, check_path
from ...annotation.references import fingerprint_key, is_missing, iter_texts
from ...devices.computer import DeviceManager
from ...devices.machine import (
    RunCommand,
    distribution_of,
    import_psutil,
    processor_name,
    read_footprint,
    run_command,
)
from ...devices.registry import get_device
from ...devices.request import MASK, DeviceRequest, home_folder, normalize_device, redact_secrets, sanitize_path
from ...devices.system_status import read_system_status, sample_background_load
from ...errors import ConfigurationError
from ...models.files import file_digest, hash_model_files
from ...models.loading import dtype_of, model_folder
from ...models.registry import BUNDLED, check_model_name
from ...session import SESSION
from ...training.curve import total_memory_bytes
from ..verdict.metrics import Run, extract_metrics
from .logbook import (
    SCHEMA,
    SHARED_VARIABLES,
    STRATEGIES,
    VARIABLES,
    BackgroundLoad,
    Code,
    Dataset,
    Hardware,
    Logbook,
    Model,
    NetworkLatency,
    Randomness,
    Software,
    StorageKind,
    StorageLocation,
    report_device,
)

DISTRIBUTION_NAME = "openmed-nb"  # Distribution name of this package.
# Packages that affect speed, results or their display.
PACKAGES = (
    "numpy",
    "tokenizers",
    "safetensors",
    "huggingface-hub",
    "accelerate",
    "datasets",
    "lightning",
    "pytorch-lightning",
    "peft",
    "ipython",
    "ipywidgets",
    "psutil",
)


def logbook(  # noqa: PLR0913 - each parameter is an independent setting of the user
    *reports: object,
    model: str | os.PathLike[str] | None = None,
    dataset: str | os.PathLike[str] | Iterable[object] | None = None,
    batch_size: int | None = None,
    seeds: int | Mapping[str, int] | None = None,
    hypotheses: Mapping[str, str] | Iterable[tuple[str, str]] = (),
    applications: bool = False,
    artifact_store: str | None = None,
) -> Logbook:
    """Record the conditions of a measurement: versions, code, device, model, dataset, settings, power and background load.

    If you call it right before a run, the logbook contains the power and the thermal state at the start of the run. Add
    the metrics afterwards with ``book.with_reports(report)``.

    A logbook does not contain texts, file names or secrets. Environment variables are stored only if they are on an allow
    list, and a value only if it has the expected format (``runbook.records.gathering``). The JSON Schema is
    ``runbook/records/logbook.schema.json``.

    Args:
        reports: Reports of :func:`sweep`, :func:`compare`, :func:`parity`, :func:`openmed_nb.training.last_curve` and
            other measurements. Their metrics are stored, and their batch size, length, workers and peak memory if known.
            Also memory and speed strategies of a training: results of
            :func:`~openmed_nb.training.checkpoint_activations` and :func:`~openmed_nb.training.precision`, and the
            :class:`~openmed_nb.training.GradientAccumulation`.
        model: Name of a model, or path of its folder. The fingerprint covers its files. If ``None``, use the model that was
            loaded last.
        dataset: Ordered texts, such as a list, or the path of a file or a folder with shards. Its SHA-256 is stored.
        batch_size: Number of rows per batch. Reports take precedence.
        seeds: Seed, or seeds by name: ``{"torch": 1, "numpy": 2}``.
        hypotheses: Pairs of a rejected hypothesis and the reason for the rejection. They are stored verbatim, so they
            must not contain text from notes.
        applications: Whether to store the names of the busiest other processes. Their number is always stored.
        artifact_store: Host and port, such as ``"store.example:443"``, to which connections are timed. No data is sent.

    Returns:
        The logbook. ``save("run.json")`` and ``to_dict()`` export it, and ``Logbook.read("run.json")`` reads it.
        ``diff(other)`` compares it with another logbook. Metrics are comparable only if both logbooks are known to have
        the same model, dataset and batch size.

    Raises:
        ConfigurationError: If an argument is not valid, if hypotheses are too long or contain text of the dataset, or if
            the reports are of several devices.
        DeviceError: If the device of a report is not available.
        ModelError: If the model is not available.
        TorchImportError: If torch cannot be imported.

    Example:
        >>> book = logbook(model="bundled", dataset=["She has asthma."], batch_size=8)
        >>> book.dataset.items, book.run.batch_size, book.diff(book).comparable
        (1, 8, True)
    """
    check_bool("applications", applications)
    with SESSION.operation():
        SESSION.notify(ProgressEvent("Collecting", "logbook"))
        device_manager = SESSION.device_manager
        device_manager.load_torch()
        device = SESSION.device().device
        model_identity, model_files = _resolve_model(model)
        # The arguments are validated before the machine is inspected.
        batch_size = check_optional_integer("batch_size", batch_size, maximum=MAX_INTEGER - 1)
        named_seeds = _normalize_seeds(seeds)
        dataset_identity = None if dataset is None else fingerprint_dataset(dataset)
        rejected_hypotheses = validate_hypotheses(hypotheses, dataset)
        measured = [report for report in reports if not isinstance(report, STRATEGIES)]
        reported_device = report_device(map(extract_metrics, measured))
        if reported_device is not None and reported_device != normalize_device(device):
            device = device_manager.confirm(DeviceRequest.parse(reported_device, "report")).device
        network = None if artifact_store is None else measure_latency(artifact_store)
        book = collect_logbook(device_manager, device, model_identity, model_files, dataset_identity, applications)
        book = replace(
            book,
            run=Run(batch_size=batch_size),
            randomness=replace(book.randomness, seeds=named_seeds),
            network=network,
            hypotheses=rejected_hypotheses,
        )
        return book.with_reports(*reports)


def _resolve_model(model: str | os.PathLike[str] | None) -> tuple[Model | None, Path | None]:
    """Return the identity of a model and the folder of its files. ``None`` is the model that was loaded last."""
    check_model_name(model)
    loaded = SESSION.models.find(None if model is None else str(model))
    if loaded:
        folder = loaded[-1].folder
        return model_from_files(loaded[-1].name, folder, dtype_of(loaded[-1].model)), folder
    if model is None:
        return None, None
    spec = SESSION.load_spec(str(model), {})[0]
    folder = model_folder(spec)
    return model_from_files(str(model), folder, spec.dtype), folder


def collect_logbook(  # noqa: PLR0913, PLR0917 - each parameter is a separate part of the logbook
    device_manager: DeviceManager,
    device: str,
    model: Model | None,
    folder: Path | None,
    dataset: Dataset | None,
    applications: bool = False,
) -> Logbook:
    """Return a logbook of the current state. torch must be loaded.

    Args:
        device_manager: Devices of this machine.
        device: Name of the device.
        model: Identity of the model.
        folder: Directory of the model files.
        dataset: Fingerprints of the dataset.
        applications: Whether to store the names of the busiest other processes.
    """
    import torch
    from huggingface_hub.constants import HF_HUB_CACHE

    machine = device_manager.machine
    target = get_device(device)
    folders = {"Hugging Face cache": Path(HF_HUB_CACHE), "torch cache": Path(torch.hub.get_dir()).parent}
    if folder:
        folders["model"] = folder
    mounts: list[Any] = []
    with contextlib.suppress(OSError):  # Some containers hide the list.
        mounts = import_psutil().disk_partitions(all=True)
    return Logbook(
        schema=SCHEMA,
        created_at=utc_timestamp(),
        simulated=machine.simulated and target.can_be_simulated,
        software=read_software(device_manager),
        code=read_code(),
        hardware=Hardware(
            device=device,
            name=target.hardware_name(machine, device_manager.torch),
            chip=machine.chip or processor_name(),
            memory_bytes=machine.memory_bytes or total_memory_bytes(),
            threads=torch.get_num_threads(),
            memory_limit=device_manager.memory_fraction(device),
            device_peak_bytes=target.memory_stats().peak,
            resident_peak_bytes=resident_peak(),
        ),
        model=model,
        dataset=dataset,
        run=Run(),
        randomness=read_randomness(target.uses_cudnn),
        environment=sanitize_environ(device_manager.environ),
        conditions=read_system_status(machine, device, device_manager.run),
        background=BackgroundLoad() if machine.simulated else read_background(applications),
        storage=locate_storage(folders, mounts),
    )


def check_output_folder(folder: str | os.PathLike[str]) -> Path:
    """Return the path of a directory to write to. It may not exist.

    Raises:
        ConfigurationError: If it is a file, or is the name of a bundled model, so that the arguments are probably swapped.
    """
    path = check_path(folder, "folder")
    if str(folder) in BUNDLED:
        message = f"The folder {describe_value(str(folder))} has the name of a model."
        raise ConfigurationError(
            message, "Pass a new folder as folder, and the model as model (in a shell, as --model)."
        )
    if path.is_file():
        raise ConfigurationError(f"{describe_file(path)} is a file.", "Pass a folder.")
    return path


def read_software(device_manager: DeviceManager) -> Software:
    """Return the versions of the software without importing packages."""
    machine = device_manager.machine
    macos = ".".join(map(str, machine.macos_version)) if machine.macos_version else None
    return Software(
        # The version of the running package, which may differ from the installed version.
        str(sys.modules[__name__.partition(".")[0]].__version__),
        platform.python_version(),
        device_manager.torch.version,
        package_version("transformers"),
        {name: version for name in PACKAGES if (version := package_version(name)) is not None},
        f"macOS {macos}" if macos else f"{platform.system()} {platform.release()}",
        machine.architecture,
    )


def package_version(name: str) -> str | None:
    """Return the version of an installed package, or ``None`` if the package is not installed."""
    distribution = distribution_of(name)
    return None if distribution is None else distribution.version


def resident_peak() -> int:
    """Return the peak memory of this process in bytes.

    On macOS, this is the peak footprint, on other systems the peak resident memory.
    """
    footprint = read_footprint()
    if footprint is not None:
        return footprint.peak
    if sys.platform == "win32":
        return int(import_psutil().Process().memory_info().peak_wset)
    import resource

    # getrusage returns bytes on macOS and kibibytes on Linux.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


SEED_NAME_PATTERN = re.compile(r"[A-Za-z_][\w.]{0,39}", re.ASCII)


def _normalize_seeds(seeds: int | Mapping[str, int] | None) -> dict[str, int]:
    """Return the seeds by name.

    Raises:
        ConfigurationError: If a seed is not an integer or is too large, or if a name is not a short identifier.

    Example:
        >>> _normalize_seeds(7), _normalize_seeds({"numpy": 1}), _normalize_seeds(None)
        ({'seed': 7}, {'numpy': 1}, {})
    """
    if seeds is None:
        return {}
    named = dict(seeds) if isinstance(seeds, Mapping) else {"seed": seeds}
    for name, seed in named.items():
        is_name = isinstance(name, str) and SEED_NAME_PATTERN.fullmatch(name)
        if not is_name or type(seed) is not int or abs(seed) >= MAX_INTEGER:
            raise ConfigurationError(
                "A seed is not an integer with a short name, or is too large.",
                "Pass an integer, or integers by short names, such as {'torch': 1, 'numpy': 2}.",
            )
    return named


def read_randomness(uses_cudnn: bool) -> Randomness:
    """Return the determinism settings of torch and its last seed, without the user's seeds."""
    import torch

    try:
        precision = torch.get_float32_matmul_precision()
    except RuntimeError:  # torch raises after the newer setting was used (``aten/src/ATen/Context.cpp``).
        precision = torch.backends.cuda.matmul.fp32_precision
    return Randomness(
        torch_seed=torch.initial_seed(),
        deterministic_algorithms=torch.are_deterministic_algorithms_enabled(),
        cudnn_benchmark=torch.backends.cudnn.benchmark if uses_cudnn else None,
        matmul_precision=precision,
    )


BUSY_PERCENT = 10  # Load in percent of one processor from which a process counts as busy.
MAX_NAMES = 5
MAX_NAME_CHARACTERS = 40


def read_background(names: bool) -> BackgroundLoad:
    """Sample the load of other processes, with the names of the busiest processes if ``names`` is true.

    Inaccessible processes count only towards the total load.
    """
    psutil = import_psutil()
    list(psutil.process_iter(["cpu_percent"]))  # The first reading of a process starts its measurement.
    cpu_fraction = sample_background_load()
    if cpu_fraction is None:
        return BackgroundLoad()
    family = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
    busy = []
    for process in psutil.process_iter(["name", "cpu_percent"]):
        percent = process.info["cpu_percent"] or 0.0
        if process.pid not in family and percent >= BUSY_PERCENT:
            busy.append((percent, process.info["name"] or ""))
    busiest = tuple(redact_secrets(name)[:MAX_NAME_CHARACTERS] for _, name in sorted(busy, reverse=True)[:MAX_NAMES])
    return BackgroundLoad(len(busy), round(cpu_fraction, 3), busiest if names else None)


NETWORK_PATTERN = re.compile(
    r"nfs\d?|smbfs|smb3|cifs|afpfs|webdav|ncpfs|9p|virtiofs|ceph|glusterfs|lustre|gpfs|beegfs|afs|davfs|ftp"
    r"|fuse\.(sshfs|rclone|s3fs|gcsfuse|goofys|glusterfs|ceph\S*)|macfuse|osxfuse|fuse"
)

# Folders in the home directory that are synchronized with iCloud Drive or other providers. Their files may exist only remotely
# until they are read.
CLOUD_FOLDERS = ("Library/Mobile Documents", "Library/CloudStorage")


def locate_storage(
    folders: Mapping[str, Path], mounts: Sequence[Any], home: Path | None = None
) -> dict[str, StorageLocation]:
    """Return the storage of each directory, by the mounts that psutil lists. Links are resolved, and a directory need not exist."""
    home = Path(os.path.realpath(home or home_folder()))
    locations = {}
    for contents, path in folders.items():
        # os.path accepts any path. Path raises for a loop of links and for an unknown user.
        real = Path(os.path.realpath(os.path.expanduser(path)))  # noqa: PTH111
        above = [str(folder) for folder in (real, *real.parents)]
        # If several file systems have the same mount point, the last mount hides the others.
        mount = max(
            (mount for mount in reversed(mounts) if mount.mountpoint in above),
            key=lambda mount: len(mount.mountpoint),
            default=None,
        )
        kind: StorageKind = "local"
        if mount is None:
            kind = "unknown"
        elif NETWORK_PATTERN.fullmatch(mount.fstype.lower()):
            kind = "network"
        elif any(real.is_relative_to(home / cloud) for cloud in CLOUD_FOLDERS):
            kind = "cloud"
        locations[contents] = StorageLocation(mount.fstype if mount else None, kind)
    return locations


# Folders of the developer tools of macOS.
GIT_FOLDERS = ("/Library/Developer/CommandLineTools", "/Applications/Xcode.app")
# git must not write to the repository or run the file system monitor of the repository.
GIT_STATUS = [
    "git",
    "--no-optional-locks",
    "-c",
    "core.fsmonitor=false",
    "status",
    "--porcelain=v2",
    "--branch",
    "--no-ahead-behind",
    "--ignore-submodules=dirty",
]


def read_code(run: RunCommand = run_command) -> Code:
    """Return the commit and the state of the repository of the working directory. Unknown values are ``None``."""
    # Without developer tools, git on a Mac is a program that offers to install them.
    if sys.platform == "darwin" and shutil.which("git") == "/usr/bin/git" and not any(map(os.path.exists, GIT_FOLDERS)):
        return Code()
    output = run(GIT_STATUS) or ""
    commit = re.search("^# branch[.]oid ([0-9a-f]{40,64})$", output, re.MULTILINE)
    if commit is None:
        return Code()
    return Code(commit[1], sum(not line.startswith("#") for line in output.splitlines()))


LATENCY_SAMPLES = 5
CONNECT_TIMEOUT_SECONDS = 2.0
# Host and port. No other text, which can contain a password, is stored.
ADDRESS_PATTERN = re.compile(r"([\w.-]+):([0-9]{1,5})", re.ASCII)


def measure_latency(store: str) -> NetworkLatency:
    """Measure the time to connect to an artifact store: a host and a port.

    Raises:
        ConfigurationError: If ``store`` is not a host with a port. The error does not contain ``store``, which may contain a
            password.
    """
    address = ADDRESS_PATTERN.fullmatch(str(store))
    port = int(address[2]) if address else 0
    if not address or not 0 < port < 1 << 16:
        raise ConfigurationError(
            "The artifact store is not a host with a port.", "Pass a host and a port, such as 'store.example:443'."
        )
    host = address[1]
    seconds = []
    for _ in range(LATENCY_SAMPLES):
        start = current_time()
        # A host name that cannot be encoded raises UnicodeError.
        with (
            contextlib.suppress(OSError, UnicodeError),
            socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_SECONDS),
        ):
            seconds.append(current_time() - start)
    return NetworkLatency(
        redact_secrets(host),
        port,
        LATENCY_SAMPLES - len(seconds),
        round(median(seconds), 6) if seconds else None,
    )


MAX_VARIABLE_CHARACTERS = 200

# A value is stored if it is a comma-separated list of numbers, known words and settings of an allocator.
_NUMBER = r"[+-]?[0-9]{1,9}(\.[0-9]{1,9})?(us|ms)?"
_WORD = (
    "on|off|true|false|yes|no|default|random|infinite|active|passive|master|primary|close|spread"
    "|detail|debug|info|warning|error|critical|[+-]?(all|torch|dynamo|aot|inductor|dynamic|distributed|autograd)"
    "|auto|gpu|cpu|(mps|cuda)(:[0-9]{1,4})?|fastest_first|pci_bus_id"
    "|fp16|bf16|fp8|avx2|avx512|amx|sve(128|256)?"
)
_ALLOCATOR_SETTING = rf"[a-z_0-9]{{1,40}}:({_NUMBER}|true|false|native|cudamallocasync)|(:{_NUMBER}){{2,8}}"
_ENTRY = f"({_NUMBER}|{_WORD}|{_ALLOCATOR_SETTING})"
VALUE_PATTERN = re.compile(f"{_ENTRY}(,{_ENTRY})*|", re.IGNORECASE | re.ASCII)


def sanitize_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the values of the allowed variables that are set, sorted by name. Unexpected values become ``***``.

    Example:
        >>> sanitize_environ({"OMP_NUM_THREADS": "2", "HF_TOKEN": "hf_abc", "PYTHONHASHSEED": "the patient"})
        {'OMP_NUM_THREADS': '2', 'PYTHONHASHSEED': '***'}
    """
    values = {name: environ[name].strip() for name in sorted(VARIABLES) if name in environ}
    return {
        name: value if len(value) <= MAX_VARIABLE_CHARACTERS and VALUE_PATTERN.fullmatch(value) else MASK
        for name, value in values.items()
    }


def portable_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that also apply to other machines, without masked values."""
    sanitized = sanitize_environ(environ)
    return {name: value for name, value in sanitized.items() if name in SHARED_VARIABLES and MASK not in value}


DATASET_REMEDY = "Pass a list of texts, or the path of a file or a folder."
MAX_HYPOTHESIS_CHARACTERS = 200
MIN_MATCH_CHARACTERS = 12  # Shorter texts can occur in a hypothesis by coincidence.
HYPOTHESES_REMEDY = "Pass pairs of a hypothesis and the reason against it, such as [('slow loader', 'data takes 3%')]."


def fingerprint_dataset(data: object) -> Dataset:
    """Return the fingerprint of a dataset.

    Args:
        data: Reusable sequence of texts, without their missing values, or path of a file or of a directory with shards.

    Raises:
        ConfigurationError: If ``data`` is empty, unreadable or of another type. The error does not contain any text.

    Example:
        >>> fingerprint_dataset(["asthma", "fever"]).items, fingerprint_dataset(["asthma"]).checksum == fingerprint_dataset(["fever"]).checksum
        (2, False)
    """
    if not isinstance(data, (str, os.PathLike)):
        return _fingerprint_texts(data)
    path = check_path(data, "dataset")
    # Devices and pipes may be endless. The error does not contain the argument, because it may be a note.
    if not (path.is_dir() or path.is_file()):
        raise ConfigurationError("The file or folder of the dataset was not found.", DATASET_REMEDY)
    try:
        if path.is_dir():
            return _fingerprint_folder(path)
        return Dataset("file", file_digest(path, "sha256"), 1, path.stat().st_size)
    except OSError as error:
        raise ConfigurationError(f"The dataset cannot be read: {short_type_name(error)}.", DATASET_REMEDY) from None


def _fingerprint_texts(data: object) -> Dataset:
    texts = iter_texts(data)
    if not isinstance(data, Sized) or isinstance(data, (set, frozenset)):
        raise ConfigurationError(
            f"{short_type_name(data)} has no length or no order: it may be endless or readable only once.",
            DATASET_REMEDY,
        )
    digest = hashlib.sha256()
    items = 0
    size = 0
    for index, text in enumerate(texts):
        if is_missing(text):
            continue
        if not isinstance(text, (str, list)):
            raise ConfigurationError(
                f"Item {index} of the dataset is {short_type_name(text)}, not a text.", DATASET_REMEDY
            )
        content = fingerprint_key(text).encode("utf-8", "surrogatepass")
        digest.update(len(content).to_bytes(8, "big") + content)
        items += 1
        size += len(content)
    if not items:
        raise ConfigurationError("The dataset is empty.", DATASET_REMEDY)
    return Dataset("texts", digest.hexdigest(), items, size)


def _fingerprint_folder(folder: Path) -> Dataset:
    """Return the fingerprint of the files in a directory and its subdirectories. Links to directories are followed."""

    def fail(error: OSError) -> None:  # os.walk ignores folders that cannot be listed otherwise.
        raise error

    files: list[Path] = []
    visited: set[str] = set()
    for directory, _, names in os.walk(folder, onerror=fail, followlinks=True):
        real_directory = os.path.realpath(directory)
        if real_directory in visited:
            raise ConfigurationError(
                "The folder of the dataset contains a folder twice, through links.", "Pass a folder without such links."
            )
        visited.add(real_directory)
        paths = (Path(directory, name) for name in names if not name.startswith("."))
        files += [path for path in paths if path.is_file()]
    if not files:
        raise ConfigurationError("The folder of the dataset does not contain files.", DATASET_REMEDY)
    files.sort()
    shards = tuple(file_digest(path, "sha256") for path in files)
    entries = (f"{path.relative_to(folder).as_posix()}\0{shard}\0" for path, shard in zip(files, shards, strict=True))
    checksum = hashlib.sha256("".join(entries).encode("utf-8", "surrogateescape")).hexdigest()
    return Dataset("folder", checksum, len(files), sum(path.stat().st_size for path in files), shards)


def model_from_files(name: str, folder: Path, dtype: str | None) -> Model:
    """Return the identity of the model in a directory.

    Args:
        name: Name of the model.
        folder: Directory of the model files.
        dtype: Data type of the weights in memory, or ``None`` if it is unknown.
    """
    hashes = hash_model_files(folder)
    return Model(sanitize_path(name), hashes.weights, hashes.config, hashes.tokenizer, dtype)


def validate_hypotheses(hypotheses: object, data: object = None) -> dict[str, str]:
    """Validate rejected hypotheses, and return the reason for the rejection of each, as lines without secrets.

    Args:
        hypotheses: Pairs or mapping of a hypothesis and the reason for its rejection.
        data: Dataset. Its text must not occur in a hypothesis.

    Raises:
        ConfigurationError: If an item is not a pair of short texts, or contains text of the dataset. The error does not
            contain the hypotheses.

    Example:
        >>> validate_hypotheses([("slow loader", "data takes  3% of a step")])
        {'slow loader': 'data takes 3% of a step'}
    """
    try:
        lines = [[collapse_whitespace(text) for text in pair] for pair in dict(hypotheses).items()]  # type: ignore[call-overload]
    except (TypeError, ValueError, AttributeError):
        raise ConfigurationError("A hypothesis is not a pair of texts.", HYPOTHESES_REMEDY) from None
    longest = max((len(text) for line in lines for text in line), default=0)
    if longest > MAX_HYPOTHESIS_CHARACTERS:
        raise ConfigurationError(
            f"A hypothesis has {longest:,} characters.",
            f"Use at most {MAX_HYPOTHESIS_CHARACTERS} characters, and no text from notes.",
        )
    folded = [text.casefold() for line in lines for text in line]
    for item in () if data is None or isinstance(data, (str, os.PathLike)) else iter_texts(data):
        note = collapse_whitespace(fingerprint_key(item)).casefold()
        for text in folded:
            if min(len(text), len(note)) >= MIN_MATCH_CHARACTERS and (text in note or note in text):
                raise ConfigurationError("A hypothesis contains text of the dataset.", "Rewrite it without that text.")
    return {redact_secrets(text): redact_secrets(reason) for text, reason in lines}
