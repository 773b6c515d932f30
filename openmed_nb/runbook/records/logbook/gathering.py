"""Collection of a logbook from the machine, torch, git and the dataset."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import socket
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

from ...._events.activity import ProgressEvent
from ...._utils.clock import current_time
from ...._utils.plain import MAX_INTEGER, utc_timestamp
from ...._utils.text import describe_value, short_type_name
from ...._utils.validation import check_bool, check_optional_integer
from ....devices.computer import DeviceManager
from ....devices.machine import (
    Footprint,
    RunCommand,
    distribution_of,
    import_psutil,
    processor_name,
    read_footprint,
    run_command,
)
from ....devices.moving import get_module
from ....devices.redaction import home_folder, redact_secrets
from ....devices.registry import get_device
from ....devices.request import DeviceRequest, normalize_device
from ....devices.system_status import read_system_status
from ....errors import ConfigurationError
from ....models.loading import dtype_of, model_folder
from ....models.records import get_dtype_validation
from ....models.registry import is_model_name
from ....session import SESSION
from ....training.curve import total_memory_bytes
from ...verdict.metrics import Run, extract_metrics
from . import privacy, sections
from .logbook import STRATEGIES, Logbook, report_device

if TYPE_CHECKING:
    import torch

    from ....annotation.pipeline import AnnotationPipeline

    # Name or directory of a model, or a model in memory.
    ModelArgument = str | os.PathLike[str] | AnnotationPipeline | torch.nn.Module | None

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
    model: ModelArgument = None,
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
    list, and a value only if it has the expected format (``runbook.records.logbook.privacy``). The JSON Schema is
    ``runbook/records/logbook/logbook.schema.json``.

    Args:
        reports: Reports of :func:`sweep`, :func:`compare`, :func:`parity`, :func:`openmed_nb.training.last_curve` and
            other measurements. Their metrics are stored, and their batch size, length, workers and peak memory if known.
            Also memory and speed strategies of a training: results of
            :func:`~openmed_nb.training.checkpoint_activations` and :func:`~openmed_nb.training.precision`, and the
            :class:`~openmed_nb.training.GradientAccumulation`.
        model: Name of a model, pipeline or torch module. The fingerprint covers the files of a named model, or all
            weights of a pipeline or module. If ``None``, use the model that was loaded last.
        dataset: Ordered texts, such as a list, or the path of a file or a folder with shards. Its SHA-256 is stored.
        batch_size: Number of rows per batch. Reports take precedence.
        seeds: Seed, or seeds by name: ``{"torch": 1, "numpy": 2}``.
        hypotheses: Pairs of a rejected hypothesis and the reason for the rejection. They are stored verbatim, so they
            must not contain text from notes.
        applications: Whether to store the names of the busiest other processes. Their number is always stored.
        artifact_store: Host and port, or URL, to which connections are timed. No data is sent.

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
        model_identity, model_files = _resolve_model(model, device)
        # The arguments are validated before the machine is inspected.
        batch_size = check_optional_integer("batch_size", batch_size, maximum=MAX_INTEGER - 1)
        named_seeds = _normalize_seeds(seeds)
        dataset_identity = None if dataset is None else privacy.fingerprint_dataset(dataset)
        rejected_hypotheses = privacy.validate_hypotheses(hypotheses, dataset)
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
            phase="after" if measured else "before",
            network=network,
            hypotheses=rejected_hypotheses,
        )
        return book.with_reports(*reports)


def _resolve_model(model: ModelArgument, device: str) -> tuple[sections.Model | None, Path | None]:
    """Return the identity of a model and the folder of its files. ``None`` is the model that was loaded last."""
    if not is_model_name(model):
        module = get_module(model)
        folder = None
        identity = privacy.model_from_module(module, getattr(model, "tokenizer", None))
    elif loaded := SESSION.models.find(None if model is None else str(model)):
        module = loaded[-1].model
        folder = loaded[-1].folder
        identity = privacy.model_from_files(loaded[-1].name, folder, dtype_of(module))
    elif model is None:
        return None, None
    else:
        folder = model_folder(SESSION.load_spec(str(model), {})[0])
        return privacy.model_from_files(str(model), folder, None), folder
    # Only a model in a reduced dtype has a validation.
    key = SESSION.models.key_of(module)
    validation = key and get_dtype_validation(key, key.device or device, SESSION.device_manager, SESSION.environ)
    if validation:
        identity = replace(identity, validation=redact_secrets(validation.reason or "valid"))
    return identity, folder


def collect_logbook(  # noqa: PLR0913, PLR0917 - each parameter is a separate part of the logbook
    device_manager: DeviceManager,
    device: str,
    model: sections.Model | None,
    folder: Path | None,
    dataset: sections.Dataset | None,
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
    mounts: list[Mount] = []
    with contextlib.suppress(OSError):  # Some containers hide the list.
        mounts = import_psutil().disk_partitions(all=True)
    return Logbook(
        schema=sections.SCHEMA,
        created_at=utc_timestamp(),
        simulated=machine.simulated and target.can_be_simulated,
        software=read_software(device_manager),
        code=read_code(),
        hardware=sections.Hardware(
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
        environment=privacy.sanitize_environ(device_manager.environ),
        phase="before",
        conditions=read_system_status(machine, device, device_manager.run),
        background=sections.BackgroundLoad() if machine.simulated else sample_background_load(applications),
        storage=locate_storage(folders, mounts),
    )


def read_software(device_manager: DeviceManager) -> sections.Software:
    """Return the versions of the software without importing packages."""
    machine = device_manager.machine
    macos = ".".join(map(str, machine.macos_version)) if machine.macos_version else None
    return sections.Software(
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


def resident_peak(read: Callable[[], Footprint | None] = read_footprint) -> int:
    """Return the peak memory of this process in bytes.

    On macOS, this is the peak footprint, on other systems the peak resident memory.
    """
    footprint = read()
    if footprint is not None:
        return footprint.peak
    if sys.platform == "win32":
        return int(import_psutil().Process().memory_info().peak_wset)
    import resource

    # getrusage returns bytes on macOS and kibibytes on Linux.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


SEED_NAME_PATTERN = re.compile(r"[A-Za-z_][\w.]{0,39}", re.ASCII)
SEEDS_REMEDY = "Pass an integer, or integers by name, such as {'torch': 1, 'numpy': 2}."


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
    named = seeds if isinstance(seeds, Mapping) else {"seed": seeds}
    for name, seed in named.items():
        if not isinstance(name, str) or not SEED_NAME_PATTERN.fullmatch(name):
            raise ConfigurationError("The name of a seed is not a short identifier.", SEEDS_REMEDY)
        if type(seed) is not int or abs(seed) >= MAX_INTEGER:
            message = f"The seed {describe_value(name)} is {short_type_name(seed)}, or too large."
            raise ConfigurationError(message, SEEDS_REMEDY)
    return dict(named)


def read_randomness(uses_cudnn: bool) -> sections.Randomness:
    """Return the determinism settings of torch and its last seed, without the user's seeds."""
    import torch

    try:
        precision = torch.get_float32_matmul_precision()
    except RuntimeError:  # torch raises after the newer setting was used (``aten/src/ATen/Context.cpp``).
        precision = torch.backends.cuda.matmul.fp32_precision
    return sections.Randomness(
        torch_seed=int(torch.initial_seed()),
        deterministic_algorithms=bool(torch.are_deterministic_algorithms_enabled()),
        cudnn_benchmark=bool(torch.backends.cudnn.benchmark) if uses_cudnn else None,
        matmul_precision=str(precision),
    )


SAMPLING_SECONDS = 0.4
BUSY_PERCENT = 10  # Load in percent of one processor from which a process counts as busy.
MAX_NAMES = 5
MAX_NAME_CHARACTERS = 40


def sample_background_load(names: bool) -> sections.BackgroundLoad:
    """Sample the load of other processes, with the names of the busiest processes if ``names`` is true.

    Inaccessible processes count only towards the total load.
    """
    psutil = import_psutil()
    list(psutil.process_iter(["cpu_percent"]))  # The first reading of a process starts its measurement.
    try:
        total_percent = psutil.cpu_percent(SAMPLING_SECONDS)
    except (OSError, RuntimeError, psutil.Error):  # A container can hide the file.
        return sections.BackgroundLoad()
    family = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
    family_percent = 0.0
    busy = []
    for process in psutil.process_iter(["name", "cpu_percent"]):
        percent = process.info["cpu_percent"] or 0.0
        if process.pid in family:
            family_percent += percent
        elif percent >= BUSY_PERCENT:
            busy.append((percent, process.info["name"] or ""))
    # The load of a process is in percent of one processor, the total load in percent of all processors.
    cpu_fraction = (total_percent - family_percent / (psutil.cpu_count() or 1)) / 100
    busiest = tuple(redact_secrets(name)[:MAX_NAME_CHARACTERS] for _, name in sorted(busy, reverse=True)[:MAX_NAMES])
    return sections.BackgroundLoad(len(busy), round(min(1.0, max(0.0, cpu_fraction)), 3), busiest if names else None)


NETWORK_PATTERN = re.compile(
    r"nfs\d?|smbfs|smb3|cifs|afpfs|webdav|ncpfs|9p|virtiofs|ceph|glusterfs|lustre|gpfs|beegfs|afs|davfs|ftp"
    r"|fuse\.(sshfs|rclone|s3fs|gcsfuse|goofys|glusterfs|ceph\S*)|macfuse|osxfuse|fuse"
)
MEMORY_FILESYSTEMS = {"tmpfs", "ramfs", "devtmpfs"}
EXTERNAL_PREFIXES = ("/Volumes/", "/media/", "/run/media/")  # Mount points of external drives.

# Folders in the home directory that are synchronized with iCloud Drive or other providers. Their files may exist only remotely
# until they are read.
CLOUD_FOLDERS = ("Library/Mobile Documents", "Library/CloudStorage")


class Mount(Protocol):
    """Mounted file system, as listed by psutil."""

    mountpoint: str
    fstype: str
    opts: str


def locate_storage(
    folders: Mapping[str, Path], mounts: Sequence[Mount], home: Path | None = None
) -> dict[str, sections.StorageLocation]:
    """Return the storage of each directory. Links are resolved, and a directory need not exist."""
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
        filesystem = mount.fstype.lower() if mount else ""
        options = mount.opts.split(",") if mount else []
        kind: sections.StorageKind = "local"
        if mount is None:
            kind = "unknown"
        elif NETWORK_PATTERN.fullmatch(filesystem) or "remote" in options:
            kind = "network"
        elif filesystem in MEMORY_FILESYSTEMS:
            kind = "memory"
        elif mount.mountpoint.startswith(EXTERNAL_PREFIXES) or "removable" in options:
            kind = "external"
        elif any(real.is_relative_to(home / cloud) for cloud in CLOUD_FOLDERS):
            kind = "cloud"
        locations[contents] = sections.StorageLocation(mount.fstype if mount else None, kind)
    return locations


# On a Mac without developer tools, this program opens a dialog that offers to install them.
APPLE_STUB = "/usr/bin/git"
DEVELOPER_TOOLS = ("/Library/Developer/CommandLineTools", "/Applications/Xcode.app")
# git must not write to the repository or run the file system monitor of the repository.
GIT_STATUS = [
    "--no-optional-locks",
    "-c",
    "core.fsmonitor=false",
    "status",
    "--porcelain=v2",
    "--branch",
    "--no-ahead-behind",
    "--ignore-submodules=dirty",
]


def read_code(run: RunCommand = run_command) -> sections.Code:
    """Return the commit and the state of the repository of the working directory. Unknown values are ``None``."""
    git = shutil.which("git")
    if git is None or (
        git == APPLE_STUB and sys.platform == "darwin" and not any(map(os.path.exists, DEVELOPER_TOOLS))
    ):
        return sections.Code()
    output = run([git, *GIT_STATUS]) or ""
    commit = re.search("^# branch[.]oid ([0-9a-f]{40,64})$", output, re.MULTILINE)
    if commit is None:
        return sections.Code()
    return sections.Code(commit[1], sum(not line.startswith("#") for line in output.splitlines()))


LATENCY_SAMPLES = 5
CONNECT_TIMEOUT_SECONDS = 2.0
# Default ports of URL schemes.
DEFAULT_PORTS = {"https": 443, "http": 80}
HOST_AND_PORT_REMEDY = "Pass a host and a port, such as 'store.example:443', or an https URL."


def measure_latency(store: str) -> sections.NetworkLatency:
    """Measure the time to connect to an artifact store: a host and a port, or a URL.

    Raises:
        ConfigurationError: If ``store`` has no host or port. The error does not contain ``store``, which may contain a
            password.
    """
    text = str(store)
    try:
        parts = urlsplit(text if "://" in text else f"//{text}")
        host = parts.hostname or ""
        port = parts.port or DEFAULT_PORTS.get(parts.scheme)
    except ValueError:
        host = ""
        port = None
    if not host or not port or any(character.isspace() for character in host):
        raise ConfigurationError("The artifact store has no host with a port.", HOST_AND_PORT_REMEDY)
    seconds = []
    for _ in range(LATENCY_SAMPLES):
        start = current_time()
        # A host name that cannot be encoded raises UnicodeError.
        with (
            contextlib.suppress(OSError, UnicodeError),
            socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_SECONDS),
        ):
            seconds.append(current_time() - start)
    return sections.NetworkLatency(
        redact_secrets(host),
        port,
        LATENCY_SAMPLES - len(seconds),
        round(median(seconds), 6) if seconds else None,
    )
