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
from dataclasses import fields, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from ...._events.activity import ProgressEvent
from ...._utils.clock import current_time
from ...._utils.plain import MAX_INTEGER, from_json_data, utc_timestamp
from ...._utils.text import describe_value, short_type_name
from ...._utils.validation import check_bool, check_optional_integer, check_path
from ....devices.computer import DeviceManager
from ....devices.environment import NOT_FOR_DEVICE, SET_BY
from ....devices.machine import (
    COMMAND_SECONDS,
    Footprint,
    RunCommand,
    distribution_of,
    import_psutil,
    processor_name,
    read_footprint,
    run_command,
)
from ....devices.moving import get_module
from ....devices.registry import get_device
from ....devices.request import DeviceRequest, normalize_device
from ....errors import ConfigurationError
from ....models.loading import dtype_of, model_folder
from ....models.records import get_dtype_validation
from ....models.registry import is_model_name
from ....session import SESSION
from ....training.activations import ActivationCheckpointing
from ....training.curve import total_memory_bytes
from ....training.steps import GradientAccumulation, Precision
from ..signals import read_system_status
from . import privacy, sections
from .logbook import Logbook, report_device

if TYPE_CHECKING:
    import torch
    from torch.utils.data import DataLoader

    from ....annotation.pipeline import AnnotationPipeline

    # Name or directory of a model, or a model in memory.
    ModelArgument = str | os.PathLike[str] | AnnotationPipeline | torch.nn.Module | None

Strategy = ActivationCheckpointing | GradientAccumulation | Precision

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
    length: int | None = None,
    seeds: int | Mapping[str, int] | None = None,
    loader: DataLoader[Any] | None = None,
    strategies: Strategy | Sequence[Strategy] = (),
    hypotheses: Mapping[str, str] | Iterable[tuple[str, str]] = (),
    applications: bool = False,
    artifact_store: str | None = None,
    folder: str | os.PathLike[str] | None = None,
    progress: bool = True,
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
        model: Name of a model, pipeline or torch module. The fingerprint covers the files of a named model, or all
            weights of a pipeline or module. If ``None``, use the model that was loaded last.
        dataset: Ordered texts, such as a list, or the path of a file or a folder with shards. Its SHA-256 is stored.
        batch_size: Number of rows per batch. Reports take precedence.
        length: Number of tokens per row. Reports take precedence.
        seeds: Seed, or seeds by name: ``{"torch": 1, "numpy": 2}``.
        loader: ``DataLoader`` of a training. No item is read from it.
        strategies: Memory and speed strategies of a training: results of
            :func:`~openmed_nb.training.checkpoint_activations` and :func:`~openmed_nb.training.precision`, and the
            :class:`~openmed_nb.training.GradientAccumulation`.
        hypotheses: Pairs of a rejected hypothesis and the reason for the rejection. They are stored verbatim, so they
            must not contain text from notes.
        applications: Whether to store the names of the busiest other processes. Their number is always stored.
        artifact_store: Host and port, or URL, to which connections are timed. No data is sent.
        folder: Directory of your code, whose git commit is stored. If ``None``, use the working directory.
        progress: Whether to display the progress of operations that take longer than half a second.

    Returns:
        The logbook. Its text form contains the settings, its HTML form all values. ``save("run.json")``,
        ``save("run.md")``, ``to_markdown()`` and ``to_dict()`` export it, and ``Logbook.read("run.json")`` reads it.
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
    from ...verdict.metrics import extract_metrics

    check_bool("applications", applications)
    with SESSION.operation(progress):
        SESSION.notify(ProgressEvent("Collecting", "logbook"))
        device_manager = SESSION.device_manager
        device_manager.load_torch()
        device = SESSION.device().device
        model_identity, model_files = _resolve_model(model, device)
        # The arguments are validated before the machine is inspected.
        batch_size = check_optional_integer("batch_size", batch_size, maximum=MAX_INTEGER - 1)
        length = check_optional_integer("length", length, maximum=MAX_INTEGER - 1)
        reported_device = report_device(map(extract_metrics, reports))
        dataset_identity = None if dataset is None else privacy.fingerprint_dataset(dataset)
        run = sections.Run(batch_size=batch_size, length=length)
        for strategy in strategies if isinstance(strategies, (list, tuple)) else (strategies,):
            if isinstance(strategy, ActivationCheckpointing):
                run = replace(run, checkpointed=", ".join(strategy.modules))
            elif isinstance(strategy, GradientAccumulation):
                run = replace(run, accumulation=int(strategy.steps))
            elif isinstance(strategy, Precision):
                run = replace(run, autocast=strategy.dtype)
            else:
                raise ConfigurationError(
                    f"{short_type_name(strategy)} is not a training strategy.",
                    "Pass a result of checkpoint_activations(), GradientAccumulation() or precision() of nb.training.",
                )
        run_loader = describe_loader(loader)
        named_seeds = _normalize_seeds(seeds)
        rejected_hypotheses = privacy.validate_hypotheses(hypotheses, dataset)
        code = check_path(folder or ".", "folder")
        if reported_device is not None and reported_device != normalize_device(device):
            device = device_manager.confirm(DeviceRequest.parse(reported_device, "report")).device
        network = None if artifact_store is None else measure_latency(artifact_store)
        book = collect_logbook(
            device_manager, device, model_identity, model_files, dataset_identity, code, applications
        )
        book = replace(
            book,
            run=run,
            loader=run_loader,
            randomness=replace(book.randomness, seeds=named_seeds),
            conditions=replace(book.conditions, phase="after" if reports else "before"),
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
        identity = replace(identity, validation=privacy.redact_secrets(validation.reason or "valid"))
    return identity, folder


def collect_logbook(  # noqa: PLR0913, PLR0917 - each parameter is a separate part of the logbook
    device_manager: DeviceManager,
    device: str,
    model: sections.Model | None,
    folder: Path | None,
    dataset: sections.Dataset | None,
    code: Path = Path(),
    applications: bool = False,
) -> Logbook:
    """Return a logbook of the current state. torch must be loaded.

    Args:
        device_manager: Devices of this machine.
        device: Name of the device.
        model: Identity of the model.
        folder: Directory of the model files.
        dataset: Fingerprints of the dataset.
        code: Directory of the user's code.
        applications: Whether to store the names of the busiest other processes.
    """
    import torch
    from huggingface_hub.constants import HF_HUB_CACHE

    machine = device_manager.machine
    target = get_device(device)
    status = read_system_status(machine, device, device_manager.run, uuid=target.uuid())
    conditions = {
        field.name: getattr(status, field.name) for field in fields(sections.SystemConditions) if field.name != "phase"
    }
    # The names of other variables are not stored, because they may be private.
    variables = tuple(
        sections.MpsVariable(
            setting.name,
            None if setting.value is None else privacy.sanitize_value(setting.name, setting.value),
            SET_BY[setting.source],
            setting.effect,
        )
        for setting in device_manager.mps_environment(device).settings
        if setting.effect != NOT_FOR_DEVICE
    )
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
        code=read_code(code),
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
        run=sections.Run(),
        loader=None,
        randomness=read_randomness(),
        environment=privacy.sanitize_environ(device_manager.environ),
        mps_variables=variables,
        conditions=sections.SystemConditions("before", **conditions),
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


def describe_loader(loader: DataLoader[Any] | None) -> sections.Loader | None:
    """Return the configuration of a ``DataLoader`` without reading items from it.

    Raises:
        ConfigurationError: If ``loader`` is not a ``DataLoader``.
    """
    if loader is None:
        return None
    try:
        context = loader.multiprocessing_context
        facts = {
            "workers": loader.num_workers,
            "batch_size": loader.batch_size,
            "pin_memory": bool(loader.pin_memory),
            "persistent_workers": bool(loader.persistent_workers),
            "prefetch_factor": loader.prefetch_factor,
            "start_method": None if context is None else context.get_start_method(),
            "seeded": loader.generator is not None,
            "worker_seeding": "worker_init_fn" if loader.worker_init_fn else "torch",
        }
        if not loader.num_workers:
            facts["worker_seeding"] = "no workers"
        description: sections.Loader = from_json_data(sections.Loader, facts)
    except (AttributeError, ValueError):
        message = f"{short_type_name(loader)} is not a DataLoader."
        raise ConfigurationError(message, "Pass the data loader of the training.") from None
    return description


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


def read_randomness() -> sections.Randomness:
    """Return the determinism settings of torch and its last seed, without the user's seeds."""
    import torch

    cudnn = torch.backends.cudnn
    try:
        precision = torch.get_float32_matmul_precision()
    except RuntimeError:  # torch raises after the newer setting was used (``aten/src/ATen/Context.cpp``).
        precision = torch.backends.cuda.matmul.fp32_precision
    return sections.Randomness(
        torch_seed=int(torch.initial_seed()),
        deterministic_algorithms=bool(torch.are_deterministic_algorithms_enabled()),
        warn_only=bool(torch.is_deterministic_algorithms_warn_only_enabled()),
        cudnn_deterministic=bool(cudnn.deterministic),
        cudnn_benchmark=bool(cudnn.benchmark),
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
    busiest = tuple(
        privacy.redact_secrets(name)[:MAX_NAME_CHARACTERS] for _, name in sorted(busy, reverse=True)[:MAX_NAMES]
    )
    return sections.BackgroundLoad(len(busy), round(min(1.0, max(0.0, cpu_fraction)), 3), busiest if names else None)


NETWORK_PATTERN = re.compile(
    r"nfs\d?|smbfs|smb3|cifs|afpfs|webdav|ncpfs|9p|virtiofs|ceph|glusterfs|lustre|gpfs|beegfs|afs|davfs|ftp"
    r"|fuse\.(sshfs|rclone|s3fs|gcsfuse|goofys|glusterfs|ceph\S*)|macfuse|osxfuse|fuse"
)
MEMORY_FILESYSTEMS = {"tmpfs", "ramfs", "devtmpfs"}
EXTERNAL_PREFIXES = ("/Volumes/", "/media/", "/run/media/")  # Mount points of external drives.

# Folders in the home directory that are synchronized with iCloud Drive or other providers. Other such folders, for example a
# Desktop in iCloud, have an extended attribute. Their files may exist only remotely until they are read.
CLOUD_FOLDERS = ("Library/Mobile Documents", "Library/CloudStorage")
CLOUD_ATTRIBUTE_PATTERN = re.compile(r"\bcom\.apple\.(icloud\.desktop|file-provider-domain-id)\b")


class Mount(Protocol):
    """Mounted file system, as listed by psutil."""

    mountpoint: str
    fstype: str
    opts: str


def locate_storage(
    folders: Mapping[str, Path], mounts: Sequence[Mount], home: Path | None = None, run: RunCommand = run_command
) -> tuple[sections.StorageLocation, ...]:
    """Return the storage of each directory. Links are resolved, and a directory need not exist."""
    home = Path(os.path.realpath(home or privacy.home_folder()))
    locations = []
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
        elif filesystem == "apfs" and _is_cloud_synced(real, home, run):
            kind = "cloud"
        locations.append(
            sections.StorageLocation(contents, privacy.sanitize_path(path), mount.fstype if mount else None, kind)
        )
    return tuple(locations)


def _is_cloud_synced(path: Path, home: Path, run: RunCommand) -> bool:
    """Return whether a path in the home directory is synchronized with iCloud Drive or another provider."""
    if any(path.is_relative_to(home / cloud) for cloud in CLOUD_FOLDERS):
        return True
    # os.path.exists accepts any path. Path raises for some paths.
    folders = [str(folder) for folder in (path, *path.parents) if home in folder.parents and os.path.exists(folder)]  # noqa: PTH110
    return bool(folders) and CLOUD_ATTRIBUTE_PATTERN.search(run(["/usr/bin/xattr", *folders]) or "") is not None


# On a Mac without developer tools, this program opens a dialog that offers to install them.
APPLE_STUB = "/usr/bin/git"
MAC_GIT_PATHS = (
    "/opt/homebrew/bin/git",
    "/usr/local/bin/git",
    "/Library/Developer/CommandLineTools/usr/bin/git",
    "/Applications/Xcode.app/Contents/Developer/usr/bin/git",
)
# git must not write to the repository or run the file system monitor of the repository.
GIT_OPTIONS = ["--no-optional-locks", "-c", "core.fsmonitor=false"]
# The output starts with the line of the branch. If that line is missing, git failed, for example because of a corrupt index.
GIT_STATUS = [
    "status",
    "--porcelain",
    "--branch",
    "--no-ahead-behind",
    "--untracked-files=normal",
    "--no-renames",
    "--ignore-submodules=dirty",
]
# ``git status`` runs the filter programs of the repository (git's ``convert.c``), so each of these settings is overridden.
GIT_FILTERS = ["config", "--null", "--name-only", "--get-regexp", r"^filter\..*\.(clean|smudge|process|required)$"]
COMMIT_PATTERN = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


def git_program(system: str = sys.platform, path: str | None = None) -> str | None:
    """Return the full path of git, or ``None`` if no git can run without a dialog."""
    path = path or shutil.which("git")
    if system != "darwin" or (path and path != APPLE_STUB):
        return path
    return next((path for path in MAC_GIT_PATHS if os.access(path, os.X_OK)), None)


def _run_git(command: list[str], *, seconds: float = COMMAND_SECONDS) -> str | None:
    """Return the output of git, or ``None`` if git cannot run or exceeds its time limit.

    Variables of git, such as ``GIT_DIR``, are removed, because they can select another repository.
    """
    environ = {name: value for name, value in os.environ.items() if not name.upper().startswith("GIT_")}
    return run_command(command, {**environ, "GIT_NO_LAZY_FETCH": "1", "GIT_TERMINAL_PROMPT": "0"}, seconds=seconds)


def read_code(folder: Path, run: RunCommand = _run_git, program: str | None = None) -> sections.Code:
    """Return the commit and the state of the repository that contains a folder. Unknown values are ``None``."""
    program = program or git_program()
    if program is None:
        return sections.Code()
    git = [program, "-C", str(folder), *GIT_OPTIONS]
    commit = (run([*git, "rev-parse", "--verify", "HEAD"]) or "").strip()
    if not COMMIT_PATTERN.fullmatch(commit):
        return sections.Code()
    filters = run([*git, *GIT_FILTERS])
    if filters is None or "=" in filters:  # An option of git cannot override a name that contains "=".
        return sections.Code(commit)
    for name in filters.split("\0"):
        if name:
            git += ["-c", f"{name}="]
    branch, *files = (run([*git, *GIT_STATUS]) or "").strip("\n").split("\n")
    if not branch:
        return sections.Code(commit)
    untracked = sum(line.startswith("??") for line in files)
    return sections.Code(commit, len(files) - untracked, untracked)


LATENCY_SAMPLES = 5
CONNECT_TIMEOUT_SECONDS = 2.0
# Default ports of URL schemes.
DEFAULT_PORTS = {"https": 443, "http": 80, "ssh": 22, "sftp": 22, "ftp": 21}
HOST_AND_PORT_REMEDY = "Pass a host and a port, such as 'store.example:443', or an https URL."


def measure_latency(
    store: str, samples: int = LATENCY_SAMPLES, timeout: float = CONNECT_TIMEOUT_SECONDS
) -> sections.NetworkLatency:
    """Measure the time to connect to an artifact store.

    Args:
        store: Host and port, or URL. User, password, path and query are ignored.
        samples: Number of connection attempts.
        timeout: Timeout of each attempt in seconds.

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
    for _ in range(samples):
        start = current_time()
        # A host name that cannot be encoded raises UnicodeError.
        with contextlib.suppress(OSError, UnicodeError), socket.create_connection((host, port), timeout=timeout):
            seconds.append(current_time() - start)
    return sections.NetworkLatency(
        privacy.redact_secrets(host),
        port,
        samples,
        samples - len(seconds),
        round(median(seconds), 6) if seconds else None,
        round(max(seconds), 6) if seconds else None,
    )
