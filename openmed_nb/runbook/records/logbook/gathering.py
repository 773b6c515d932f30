"""Gathering a logbook: the one place that asks the computer, torch and git, and reads the dataset."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

from ...._events.activity import ProgressEvent
from ...._utils.clock import current_time
from ...._utils.plain import MAX_INTEGER, from_json_data, utc_timestamp
from ...._utils.text import describe_value, short_type_name
from ...._utils.validation import check_bool, check_optional_integer, check_path
from ....devices.computer import DeviceManager
from ....devices.environment import IGNORED, NOT_FOR_DEVICE, SET_BY
from ....devices.machine import (
    Footprint,
    distribution_of,
    import_psutil,
    processor_name,
    read_footprint,
    run_command,
)
from ....devices.moving import get_module
from ....devices.registry import parse_device_argument
from ....devices.request import DeviceRequest, normalize_device
from ....errors import ConfigurationError
from ....models.loading import dtype_of, model_folder
from ....models.records import get_dtype_validation
from ....models.registry import is_model_name
from ....session import SESSION
from ....training.activations import ActivationCheckpointing
from ....training.curve import installed_bytes
from ....training.steps import GradientAccumulation, Precision
from ..signals import read_signals
from . import privacy, sections
from .logbook import Logbook, report_device

TOOLKIT = "openmed-nb"  # What this package is called where it is installed.
# Packages that change speed, answers, or how they are shown.
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


def logbook(  # noqa: PLR0913 - each is one thing that a person may want to say
    *reports: Any,
    model: Any = None,
    dataset: Any = None,
    batch_size: int | None = None,
    length: int | None = None,
    seeds: Any = None,
    loader: Any = None,
    strategies: Any = (),
    hypotheses: Any = (),
    applications: bool = False,
    artifact_store: str | None = None,
    folder: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> Logbook:
    """Write down what figures are measured with: versions, code, device, model, dataset, settings, power, heat and other programs.

    Called right before a run, it has power and heat of that moment; ``book.with_reports(report)`` adds the figures afterwards.

    Args:
        reports: What :func:`sweep`, :func:`compare`, :func:`parity`, :func:`openmed_nb.training.last_curve` and the others returned; their
            numbers are kept, and batch, length, workers and peak memory where they have them.
        model: The name of a model, whose files are fingerprinted; a pipeline or a torch module, of which every weight is;
            ``None`` for the one that was loaded last.
        dataset: Texts in an order, such as a list, or the path of a file or of a folder with shards; SHA-256 of it is kept.
        batch_size: How many rows a batch has, where no report says it.
        length: How many tokens a row has, where no report says it.
        seeds: A seed, or seeds by name: ``{"torch": 1, "numpy": 2}``.
        loader: The ``DataLoader`` of a training; nothing is read from it.
        strategies: What a training saved memory or time with: what :func:`~openmed_nb.training.checkpoint_activations` and
            :func:`~openmed_nb.training.precision` returned, and the :class:`~openmed_nb.training.GradientAccumulation`.
        hypotheses: Pairs of what was suspected and what rules it out. These words are kept, so no note may be in them.
        applications: Whether the busiest other programs are named; they are counted anyway.
        artifact_store: A host and a port, or an address, to which connections are timed; nothing is sent.
        folder: A folder of your code, whose commit git names; ``None`` for the one in which Python runs.
        progress: Whether to show what is under way, where it takes longer than half a second.

    Returns:
        The logbook: ``save("run.json")``, ``save("run.md")``, ``Logbook.read("run.json")``, ``markdown()``, ``to_dict()``, and
        ``diff(other)``, which says first whether the figures of both may be compared at all: only where both are known to be of
        one model, one dataset and one batch. Its text names what it is of; all that it holds stands in its HTML.

    Raises:
        ConfigurationError: For what is not a report, dataset, loader, strategy, seed or store, and for hypotheses that are long or have
            words of the dataset; for reports of several devices.
        DeviceError: For reports of a device that is not here.
        ModelError: For a model that cannot be had.
        TorchImportError: Where torch does not import.

    No text, no name of a file and no secret is kept: of environment variables those of an allow list, each if its value looks
    as such a value does (``runbook.records.logbook.privacy``). The form of the JSON is published in
    ``runbook/records/logbook/logbook.schema.json``.

    Example:
        >>> book = logbook(model="bundled", dataset=["She has asthma."], batch_size=8)
        >>> book.dataset.items, book.run.batch_size, book.diff(book).comparable
        (1, 8, True)
    """
    from ...verdict.figures import extract_metrics

    check_bool("applications", applications)
    with SESSION.operation(progress):
        SESSION.notify(ProgressEvent("Writing", "logbook"))
        computer = SESSION.device_manager
        computer.load_torch()
        device = SESSION.device().device
        known_model, model_files = _model_and_folder(model, device)
        # What a person says is checked before anything is asked of the computer.
        batch_size = check_optional_integer("batch_size", batch_size, most=MAX_INTEGER - 1)
        length = check_optional_integer("length", length, most=MAX_INTEGER - 1)
        reported = report_device(map(extract_metrics, reports))
        texts = None if dataset is None else privacy.fingerprint_dataset(dataset)
        run = sections.Run(batch_size=batch_size, length=length, **_strategy_fields(strategies))
        run_loader = describe_loader(loader)
        named_seeds = _normalize_seeds(seeds)
        ruled_out = privacy.validate_hypotheses(hypotheses, dataset)
        code = check_path(folder or ".", "folder")
        if reported is not None and reported != normalize_device(device):
            device = computer.confirm(DeviceRequest.parse(reported, "report")).device
        network = None if artifact_store is None else measure_round_trip(artifact_store)
        book = collect_logbook(computer, device, known_model, model_files, texts, code, applications)
        book = replace(
            book,
            run=run,
            loader=run_loader,
            randomness=replace(book.randomness, seeds=named_seeds),
            conditions=replace(book.conditions, moment="after" if reports else "before"),
            network=network,
            hypotheses=ruled_out,
        )
        return book.with_reports(*reports)


def _model_and_folder(model: Any, device: str) -> tuple[sections.Model | None, Path | None]:
    """Return the model of a name, a pipeline or a module, and where its files are; ``None`` is the one that was loaded last."""
    if not is_model_name(model):
        module = get_module(model)
        described = privacy.model_from_module(module, getattr(model, "tokenizer", None))
        return replace(described, certificate=_certificate_state(module, device)), None
    if loaded := SESSION.models.find(None if model is None else str(model)):
        last = loaded[-1]
        described = privacy.model_from_files(last.name, last.folder, dtype_of(last.model))
        return replace(described, certificate=_certificate_state(last.model, device)), last.folder
    if model is None:
        return None, None
    folder = model_folder(SESSION.load_spec(str(model), {})[0])
    return privacy.model_from_files(str(model), folder, None), folder


def _certificate_state(module: Any, device: str) -> str | None:
    """Return what is known of the certificate of a model that was loaded in a reduced type; ``None`` for others."""
    key = SESSION.models.key_of(module)
    known = key and get_dtype_validation(key, key.device or device, SESSION.device_manager, SESSION.environ)
    return privacy.redact_secrets(known.reason or "counts") if known else None


def collect_logbook(  # noqa: PLR0913, PLR0917 - each is another thing
    computer: DeviceManager,
    device: str,
    model: sections.Model | None,
    folder: Path | None,
    dataset: sections.Dataset | None,
    code: Path = Path(),
    applications: bool = False,
) -> Logbook:
    """Return the logbook of this moment: of a computer on which torch is loaded, and a model whose files are in a folder."""
    machine = computer.machine
    signals = read_signals(machine, device, uuid=parse_device_argument(device).uuid())
    states = {
        field.name: getattr(signals, field.name)
        for field in fields(sections.SystemConditions)
        if field.name != "moment"
    }
    # Of other variables not even the names are kept.
    variables = tuple(
        sections.MpsVariable(
            setting.name,
            None if setting.value is None else privacy.sanitize_value(setting.name, setting.value),
            SET_BY[setting.source],
            setting.effect,
        )
        for setting in computer.mps_environment(device).settings
        if setting.effect not in {NOT_FOR_DEVICE, IGNORED}
    )
    folders = _cache_folders()
    if folder:
        folders["model"] = folder
    return Logbook(
        schema=sections.SCHEMA,
        written=utc_timestamp(),
        simulated=machine.simulated and parse_device_argument(device).can_be_simulated,
        software=software(computer),
        code=read_code(code),
        hardware=_hardware(computer, device),
        model=model,
        dataset=dataset,
        run=sections.Run(),
        loader=None,
        randomness=read_randomness(),
        environment=privacy.sanitize_environ(computer.environ),
        mps_variables=variables,
        conditions=sections.SystemConditions("before", **states),
        background=sections.BackgroundLoad() if machine.simulated else _sample_background_load(applications),
        storage=storage_places(folders, _read_mounts()),
    )


def software(computer: DeviceManager) -> sections.Software:
    """Return the versions of what runs; no package is imported for that."""
    machine = computer.machine
    macos = ".".join(map(str, machine.macos)) if machine.macos else None
    return sections.Software(
        own_version(),
        platform.python_version(),
        computer.torch.version,
        version_of("transformers"),
        {name: version for name in PACKAGES if (version := version_of(name)) is not None},
        f"macOS {macos}" if macos else f"{platform.system()} {platform.release()}",
        machine.architecture,
    )


def own_version() -> str:
    """Return the version of the toolkit that runs, which need not be the installed one."""
    return str(sys.modules[__name__.partition(".")[0]].__version__)


def version_of(name: str) -> str | None:
    """Return the version of an installed package, ``None`` if it is not installed."""
    distribution = distribution_of(name)
    return None if distribution is None else distribution.version


def _hardware(computer: DeviceManager, device: str) -> sections.Hardware:
    """Return what the device is, and the most memory that was used until now."""
    import torch

    machine = computer.machine
    return sections.Hardware(
        device=device,
        name=parse_device_argument(device).own_name(machine, computer.torch),
        chip=machine.chip or processor_name(),
        memory_bytes=machine.memory_bytes or installed_bytes(),
        threads=torch.get_num_threads(),
        memory_limit=computer.memory_fraction(device),
        device_peak_bytes=parse_device_argument(device).memory().peak,
        resident_peak_bytes=resident_peak(),
    )


def resident_peak(read: Callable[[], Footprint | None] = read_footprint) -> int:
    """Return the most memory that this process had, in bytes.

    On macOS that is its footprint. Linux counts in kibibytes (``getrusage``), Windows has a count of its own.
    """
    footprint = read()
    if footprint is not None:
        return footprint.peak
    if sys.platform == "win32":
        return int(import_psutil().Process().memory_info().peak_wset)
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def describe_loader(loader: Any) -> sections.Loader | None:
    """Return how a ``DataLoader`` loads; nothing is read from it.

    Raises:
        ConfigurationError: For what is not a ``DataLoader``.
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
        described: sections.Loader = from_json_data(sections.Loader, facts)
    except (AttributeError, ValueError):
        what = f"{short_type_name(loader)} is not a DataLoader."
        raise ConfigurationError(what, "Pass the loader of the training.") from None
    return described


def _strategy_fields(strategies: Any) -> dict[str, Any]:
    """Return the strategies of a training by the fields of a run.

    Raises:
        ConfigurationError: For what is no strategy.
    """
    by_field: dict[str, Any] = {}
    for strategy in strategies if isinstance(strategies, (list, tuple)) else (strategies,):
        if isinstance(strategy, ActivationCheckpointing):
            by_field["checkpointed"] = ", ".join(strategy.modules)
        elif isinstance(strategy, GradientAccumulation):
            by_field["accumulation"] = int(strategy.steps)
        elif isinstance(strategy, Precision):
            by_field["autocast"] = strategy.dtype
        else:
            raise ConfigurationError(
                f"{short_type_name(strategy)} is no strategy of a training.",
                "Pass what checkpoint_activations(), GradientAccumulation() or precision() of nb.training returned.",
            )
    return by_field


SEED_NAME = re.compile(r"[A-Za-z_][\w.]{0,39}", re.ASCII)
SEEDS = "Pass a whole number, or names and whole numbers, such as {'torch': 1, 'numpy': 2}."


def _normalize_seeds(seeds: Any) -> dict[str, int]:
    """Return seeds by what they are of.

    Raises:
        ConfigurationError: For a seed that is not a whole number, and a name that is not a short word.

    Example:
        >>> _normalize_seeds(7), _normalize_seeds({"numpy": 1}), _normalize_seeds(None)
        ({'seed': 7}, {'numpy': 1}, {})
    """
    if seeds is None:
        return {}
    named = seeds if isinstance(seeds, Mapping) else {"seed": seeds}
    for name, seed in named.items():
        if not isinstance(name, str) or not SEED_NAME.fullmatch(name):
            raise ConfigurationError("The name of a seed is not a short word.", SEEDS)
        if type(seed) is not int or abs(seed) >= MAX_INTEGER:
            what = f"The seed {describe_value(name)} is {short_type_name(seed)}, or too large."
            raise ConfigurationError(what, SEEDS)
    return dict(named)


def read_randomness() -> sections.Randomness:
    """Return what torch was asked for; seeds are what a person says."""
    import torch

    cudnn = torch.backends.cudnn
    try:
        precision = torch.get_float32_matmul_precision()
    except RuntimeError:  # torch hides it once the newer setting was used (``aten/src/ATen/Context.cpp``).
        precision = torch.backends.cuda.matmul.fp32_precision
    return sections.Randomness(
        torch_seed=int(torch.initial_seed()),
        deterministic_algorithms=bool(torch.are_deterministic_algorithms_enabled()),
        warn_only=bool(torch.is_deterministic_algorithms_warn_only_enabled()),
        cudnn_deterministic=bool(cudnn.deterministic),
        cudnn_benchmark=bool(cudnn.benchmark),
        matmul_precision=str(precision),
    )


WATCH_SECONDS = 0.4  # How long other programs are watched.
BUSY_PERCENT = 10  # Of one processor: who takes more disturbs others.
MAX_NAMES = 5
MAX_NAME_CHARACTERS = 40


class Program(NamedTuple):
    """Another program, and how much of one processor it took, in percent."""

    name: str
    percent: float


def _sample_background_load(names: bool) -> sections.BackgroundLoad:
    """Watch the programs of this computer for a moment; those that may not be asked count in the whole alone."""
    psutil = import_psutil()
    this = psutil.Process()
    family = {this, *this.children(recursive=True)}
    processes = [*family, *(process for process in psutil.process_iter() if process not in family)]
    own = 0.0
    programs = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.cpu_percent()  # The first call starts the watch.
    try:
        share = psutil.cpu_percent(WATCH_SECONDS) / 100
    except (OSError, RuntimeError, psutil.Error):  # A container can hide the file.
        return sections.BackgroundLoad()
    for process in processes:
        with contextlib.suppress(psutil.Error):
            percent = process.cpu_percent()
            if process in family:
                own += percent
            else:
                programs.append(Program(process.name(), percent))
    return background_load(programs, share - own / 100 / (psutil.cpu_count() or 1), names)


def background_load(programs: list[Program], share: float, names: bool) -> sections.BackgroundLoad:
    """Return what other programs did; ``names`` tells whether the busiest are named."""
    busy = sorted(
        (program for program in programs if program.percent >= BUSY_PERCENT), key=lambda program: -program.percent
    )
    named = tuple(privacy.redact_secrets(program.name)[:MAX_NAME_CHARACTERS] for program in busy[:MAX_NAMES])
    return sections.BackgroundLoad(len(busy), round(min(1.0, max(0.0, share)), 3), named if names else None)


NETWORK = re.compile(
    r"nfs\d?|smbfs|smb3|cifs|afpfs|webdav|ncpfs|9p|virtiofs|ceph|glusterfs|lustre|gpfs|beegfs|afs|davfs|ftp"
    r"|fuse\.(sshfs|rclone|s3fs|gcsfuse|goofys|glusterfs|ceph\S*)|macfuse|osxfuse|fuse"
)
MEMORY = {"tmpfs", "ramfs", "devtmpfs"}
EXTERNAL = ("/Volumes/", "/media/", "/run/media/")  # Where systems mount what was plugged in.

# Folders of a person's home that macOS keeps in iCloud Drive, or other providers elsewhere, and what marks more of them, such as
# a Desktop that is kept in iCloud: their files can be moved away, and come back only when they are read.
CLOUD_FOLDERS = ("Library/Mobile Documents", "Library/CloudStorage")
CLOUD_MARKS = re.compile(r"\bcom\.apple\.(icloud\.desktop|file-provider-domain-id)\b")

RunCommand = Callable[[list[str]], "str | None"]


def _read_mounts() -> list[Any]:
    """Return the mounted file systems of this computer, as psutil lists them."""
    try:
        return list(import_psutil().disk_partitions(all=True))
    except OSError:  # Some containers hide the list.
        return []


def _cache_folders() -> dict[str, Path]:
    """Return where models are cached, as huggingface_hub and torch have read it from their variables."""
    import torch
    from huggingface_hub.constants import HF_HUB_CACHE

    return {"Hugging Face cache": Path(HF_HUB_CACHE), "torch cache": Path(torch.hub.get_dir()).parent}


def storage_places(
    folders: Mapping[str, Path], mounts: list[Any], home: Path | None = None, run: RunCommand = run_command
) -> tuple[sections.StorageLocation, ...]:
    """Return where each of some paths lies; links are followed, and a path that is not there yet counts as if it were."""
    home = Path(os.path.realpath(home or privacy.home_folder()))
    places = []
    for what, path in folders.items():
        # os.path answers for any path; Path raises for a circle of links and an unknown person.
        real = Path(os.path.realpath(os.path.expanduser(path)))  # noqa: PTH111
        above = {str(folder) for folder in (real, *real.parents)}
        # Of several file systems mounted at one place, the last hides the others.
        mount = max(
            (mount for mount in reversed(mounts) if mount.mountpoint in above),
            key=lambda mount: len(mount.mountpoint),
            default=None,
        )
        kind = "not known" if mount is None else _storage_kind(mount, real, home, run)
        places.append(sections.StorageLocation(what, privacy.sanitize_path(path), mount and mount.fstype, kind))
    return tuple(places)


def _storage_kind(
    mount: Any, path: Path, home: Path, run: RunCommand
) -> Literal["local", "network", "cloud", "external", "memory"]:
    """Return what sort of storage a path on a mounted file system is."""
    filesystem = mount.fstype.lower()
    options = mount.opts.split(",")
    if NETWORK.fullmatch(filesystem) or "remote" in options:
        return "network"
    if filesystem in MEMORY:
        return "memory"
    if mount.mountpoint.startswith(EXTERNAL) or "removable" in options:
        return "external"
    return "cloud" if filesystem == "apfs" and _is_in_cloud(path, home, run) else "local"


def _is_in_cloud(path: Path, home: Path, run: RunCommand) -> bool:
    """Return whether macOS or a provider keeps a path of a person's home elsewhere, too."""
    if any(path.is_relative_to(home / cloud) for cloud in CLOUD_FOLDERS):
        return True
    above = [str(folder) for folder in (path, *path.parents) if home in folder.parents]
    existing = [folder for folder in above if os.path.exists(folder)]  # noqa: PTH110 - for any path, as above
    return bool(existing) and CLOUD_MARKS.search(run(["/usr/bin/xattr", *existing]) or "") is not None


# On a Mac without developer tools, this one opens a window that offers to install them.
APPLE_STUB = "/usr/bin/git"
MAC_PATHS = (
    "/opt/homebrew/bin/git",
    "/usr/local/bin/git",
    "/Library/Developer/CommandLineTools/usr/bin/git",
    "/Applications/Xcode.app/Contents/Developer/usr/bin/git",
)
# Nothing is written into the repository, and the program that it names for watching files is not run.
OPTIONS = ["--no-optional-locks", "-c", "core.fsmonitor=false"]
# The line that names the branch comes first: without it git has failed, such as for a damaged index, and says nothing of files.
STATUS = [
    "status",
    "--porcelain",
    "--branch",
    "--no-ahead-behind",
    "--untracked-files=normal",
    "--no-renames",
    "--ignore-submodules=dirty",
]
# The programs that it names for reading files; ``git status`` would run them (git's ``convert.c``), so each gets no value.
FILTERS = ["config", "--null", "--name-only", "--get-regexp", r"^filter\..*\.(clean|smudge|process|required)$"]
COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


def git_program(system: str = sys.platform, path: str | None = None) -> str | None:
    """Return the full path of git, ``None`` if there is none that can be run without a question."""
    path = path or shutil.which("git")
    if system != "darwin" or (path and path != APPLE_STUB):
        return path
    return next((path for path in MAC_PATHS if os.access(path, os.X_OK)), None)


def _run_git(command: list[str]) -> str | None:
    """Return what git prints within two seconds, ``None`` if it cannot be run.

    Its own variables, such as ``GIT_DIR``, are taken away: they would let it answer for another repository.
    """
    others = {name: value for name, value in os.environ.items() if not name.upper().startswith("GIT_")}
    return run_command(command, {**others, "GIT_NO_LAZY_FETCH": "1", "GIT_TERMINAL_PROMPT": "0"})


def read_code(folder: Path, run: RunCommand = _run_git, program: str | None = None) -> sections.Code:
    """Return the commit and the state of the repository around a folder; what git does not say is ``None``."""
    program = program or git_program()
    if program is None:
        return sections.Code()
    git = [program, "-C", str(folder), *OPTIONS]
    commit = (run([*git, "rev-parse", "--verify", "HEAD"]) or "").strip()
    if not COMMIT.fullmatch(commit):
        return sections.Code()
    filters = run([*git, *FILTERS])
    if filters is None or "=" in filters:  # Such a name cannot be written as an option, so git must not be asked.
        return sections.Code(commit)
    for name in filters.split("\0"):
        if name:
            git += ["-c", f"{name}="]
    branch, *files = (run([*git, *STATUS]) or "").strip("\n").split("\n")
    if not branch:
        return sections.Code(commit)
    untracked = sum(line.startswith("??") for line in files)
    return sections.Code(commit, len(files) - untracked, untracked)


CONNECTIONS = 5
CONNECT_SECONDS = 2.0
# Where a scheme is answered if an address names no port.
PORTS = {"https": 443, "http": 80, "ssh": 22, "sftp": 22, "ftp": 21}
HOST_AND_PORT = "Pass a host and a port, such as 'store.example:443', or an https address."


def measure_round_trip(
    store: str, samples: int = CONNECTIONS, timeout: float = CONNECT_SECONDS
) -> sections.NetworkLatency:
    """Connect to an artifact store some times, and return how long that took.

    Args:
        store: A host and a port, or an address; user, password, path and query are not read.
        samples: How often.
        timeout: How long each may take, in seconds.

    Raises:
        ConfigurationError: If there is no host and port; what was passed is not shown, because it may hold a password.
    """
    text = str(store)
    try:
        parts = urlsplit(text if "://" in text else f"//{text}")
        host = parts.hostname or ""
        port = parts.port or PORTS.get(parts.scheme)
    except ValueError:
        host = ""
        port = None
    if not host or not port or any(character.isspace() for character in host):
        raise ConfigurationError("The artifact store has no host with a port.", HOST_AND_PORT)
    seconds = []
    for _ in range(samples):
        start = current_time()
        # UnicodeError for a name that no network can have.
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
