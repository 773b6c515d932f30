"""Collection of a logbook from the machine, torch, git and the dataset."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from ...._events.activity import ProgressEvent
from ...._utils.clock import current_time
from ...._utils.plain import MAX_INTEGER, utc_timestamp
from ...._utils.validation import check_bool, check_optional_integer
from ....devices.computer import DeviceManager
from ....devices.machine import (
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
from ....models.registry import is_model_name
from ....session import SESSION
from ....training.curve import total_memory_bytes
from ...verdict.metrics import Run, extract_metrics
from . import privacy
from .logbook import (
    SCHEMA,
    STRATEGIES,
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
            network=network,
            hypotheses=rejected_hypotheses,
        )
        return book.with_reports(*reports)


def _resolve_model(model: ModelArgument) -> tuple[Model | None, Path | None]:
    """Return the identity of a model and the folder of its files. ``None`` is the model that was loaded last."""
    if not is_model_name(model):
        return privacy.model_from_module(get_module(model), getattr(model, "tokenizer", None)), None
    loaded = SESSION.models.find(None if model is None else str(model))
    if loaded:
        folder = loaded[-1].folder
        return privacy.model_from_files(loaded[-1].name, folder, dtype_of(loaded[-1].model)), folder
    if model is None:
        return None, None
    folder = model_folder(SESSION.load_spec(str(model), {})[0])
    return privacy.model_from_files(str(model), folder, None), folder


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
        environment=privacy.sanitize_environ(device_manager.environ),
        conditions=read_system_status(machine, device, device_manager.run),
        background=BackgroundLoad() if machine.simulated else sample_background_load(applications),
        storage=locate_storage(folders, mounts),
    )


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
            remedy = "Pass an integer, or integers by short names, such as {'torch': 1, 'numpy': 2}."
            raise ConfigurationError("A seed is not an integer with a short name, or is too large.", remedy)
    return named


def read_randomness(uses_cudnn: bool) -> Randomness:
    """Return the determinism settings of torch and its last seed, without the user's seeds."""
    import torch

    try:
        precision = torch.get_float32_matmul_precision()
    except RuntimeError:  # torch raises after the newer setting was used (``aten/src/ATen/Context.cpp``).
        precision = torch.backends.cuda.matmul.fp32_precision
    return Randomness(
        torch_seed=int(torch.initial_seed()),
        deterministic_algorithms=bool(torch.are_deterministic_algorithms_enabled()),
        cudnn_benchmark=bool(torch.backends.cudnn.benchmark) if uses_cudnn else None,
        matmul_precision=str(precision),
    )


SAMPLING_SECONDS = 0.4
BUSY_PERCENT = 10  # Load in percent of one processor from which a process counts as busy.
MAX_NAMES = 5
MAX_NAME_CHARACTERS = 40


def sample_background_load(names: bool) -> BackgroundLoad:
    """Sample the load of other processes, with the names of the busiest processes if ``names`` is true.

    Inaccessible processes count only towards the total load.
    """
    psutil = import_psutil()
    list(psutil.process_iter(["cpu_percent"]))  # The first reading of a process starts its measurement.
    try:
        total_percent = psutil.cpu_percent(SAMPLING_SECONDS)
    except (OSError, RuntimeError, psutil.Error):  # A container can hide the file.
        return BackgroundLoad()
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
    return BackgroundLoad(len(busy), round(min(1.0, max(0.0, cpu_fraction)), 3), busiest if names else None)


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
        remedy = "Pass a host and a port, such as 'store.example:443'."
        raise ConfigurationError("The artifact store is not a host with a port.", remedy)
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
