"""Gathering a logbook: the one place that asks the computer, torch and git, and reads the dataset."""

from __future__ import annotations

import os
import platform
import re
import shutil
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal
from urllib.parse import urlsplit

from ...._events.activity import Activity
from ...._utils.clock import now
from ...._utils.plain import LARGEST, from_plain, utc
from ...._utils.text import describe_value, short_type_name
from ...._utils.validation import check_flag, given_path
from ....devices.backend import gpu_uuid
from ....devices.computer import Computer
from ....devices.environment import NOT_READ, SET_BY
from ....devices.machine import (
    Footprint,
    distribution_of,
    import_psutil,
    own_name,
    processor_name,
    read_footprint,
    run_command,
)
from ....devices.memory import allocator
from ....devices.moving import module_in
from ....devices.request import DeviceRequest, canonical, kind_of
from ....errors import ConfigurationError
from ....models.certificates import validation_of
from ....models.loading import dtype_of, model_folder
from ....models.registry import is_named
from ....session import SESSION
from ....training.activations import ActivationCheckpointing
from ....training.curve import installed_bytes
from ....training.steps import GradientAccumulation, Precision
from ..signals import read_signals
from . import privacy, sections
from .logbook import Logbook, reported_device

TOOLKIT = "openmed-nb"  # What this package is called where it is installed.
# Packages that change speed, answers, or how they are shown.
PACKAGES = (
    *("numpy", "tokenizers", "safetensors", "huggingface-hub", "accelerate", "datasets", "lightning"),
    *("pytorch-lightning", "peft", "ipython", "ipywidgets", "psutil"),
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
        TorchUnusable: Where torch does not import.

    No text, no name of a file and no secret is kept: of environment variables those of an allow list, each if its value looks
    as such a value does (``runbook.logbook.privacy``). The form of the JSON is published in
    ``runbook/logbook/logbook.schema.json``.

    Example:
        >>> book = logbook(model="bundled", dataset=["She has asthma."], batch_size=8)
        >>> book.dataset.items, book.run.batch_size, book.diff(book).comparable
        (1, 8, True)
    """
    from ...verdict.figures import figures_of

    check_flag("applications", applications)
    with SESSION.told_after(progress):
        SESSION.tell(Activity("Writing", "logbook"))
        computer = SESSION.computer
        computer.load_torch()
        device = SESSION.device().device
        found = which_model(model, device)
        # What a person says is checked before anything is asked of the computer.
        for name, number in (("batch_size", batch_size), ("length", length)):
            if number is not None and (type(number) is not int or not 1 <= number < LARGEST):
                raise ConfigurationError(f"{name} is not a number of rows or tokens.", "Pass a whole number from 1.")
        reported = reported_device(map(figures_of, reports))
        texts = None if dataset is None else privacy.dataset_of(dataset)
        ruled_out = privacy.hypotheses_of(hypotheses, dataset)
        loading, named, active = loader_of(loader), seeds_of(seeds), strategies_of(strategies)
        code = given_path(folder or ".", "folder")
        if reported is not None and reported != canonical(device):
            device = computer.confirm(DeviceRequest.parse(reported, "report")).device
        network = None if artifact_store is None else measure_round_trip(artifact_store)
        book = gather(computer, device, *found, texts, code, applications)
        book = replace(
            book,
            run=sections.Run(batch_size=batch_size, length=length, **active),
            loader=loading,
            randomness=replace(book.randomness, seeds=named),
            conditions=replace(book.conditions, moment="after" if reports else "before"),
            network=network,
            hypotheses=ruled_out,
        )
        return book.with_reports(*reports)


def which_model(model: Any, device: str) -> tuple[sections.Model | None, Path | None]:
    """Return the model of a name, a pipeline or a module, and where its files are; ``None`` is the one that was loaded last."""
    if not is_named(model):
        found = privacy.model_in_memory(module_in(model), getattr(model, "tokenizer", None))
        return replace(found, certificate=certificate_of(module_in(model), device)), None
    if loaded := SESSION.models.named(None if model is None else str(model)):
        last = loaded[-1]
        found = privacy.model_of_files(last.name, last.folder, dtype_of(last.model))
        return replace(found, certificate=certificate_of(last.model, device)), last.folder
    if model is None:
        return None, None
    folder = model_folder(SESSION.files(str(model), {})[0])
    return privacy.model_of_files(str(model), folder, None), folder


def certificate_of(module: Any, device: str) -> str | None:
    """Return what is known of the certificate of a model that was loaded in a reduced type; ``None`` for others."""
    key = SESSION.models.key_of(module)
    known = key and validation_of(key, key.device or device, SESSION.computer, SESSION.environ)
    return privacy.without_secrets(known.reason or "counts") if known else None


def gather(  # noqa: PLR0913, PLR0917 - each is another thing
    computer: Computer,
    device: str,
    model: sections.Model | None,
    folder: Path | None,
    dataset: sections.Dataset | None,
    code: Path = Path(),
    applications: bool = False,
) -> Logbook:
    """Return the logbook of this moment: of a computer on which torch is loaded, and a model whose files are in a folder."""
    machine, environ = computer.machine, computer.environ
    signals = read_signals(machine, device, uuid=gpu_uuid(device))
    states = {one.name: getattr(signals, one.name) for one in fields(sections.Conditions) if one.name != "moment"}
    # Of other variables not even the names are kept.
    variables = [one for one in computer.environment(device).settings if device == "mps" and one.effect != NOT_READ]
    folders = cache_folders(environ, privacy.home_folder()) | ({"model": folder} if folder else {})
    return Logbook(
        schema=sections.SCHEMA,
        written=utc(),
        simulated=machine.simulated and kind_of(device) == "mps",
        software=software(computer),
        code=read_code(code),
        hardware=hardware(computer, device),
        model=model,
        dataset=dataset,
        run=sections.Run(),
        loader=None,
        randomness=read_randomness(),
        environment=privacy.kept_variables(environ),
        mps_variables=tuple(
            sections.MpsVariable(one.name, value, SET_BY[one.origin], one.effect)
            for one in variables
            for value in [None if one.value is None else privacy.kept_value(one.name, one.value)]
        ),
        conditions=sections.Conditions("before", **states),
        background=sections.Background() if machine.simulated else read_background(applications),
        storage=places(folders, read_mounts()),
    )


def software(computer: Computer) -> sections.Software:
    """Return the versions of what runs; no package is imported for that."""
    machine = computer.machine
    macos = ".".join(map(str, machine.macos)) if machine.macos else None
    return sections.Software(
        own_version(),
        platform.python_version(),
        computer.torch.version,
        version_of("transformers"),
        {name: found for name in PACKAGES if (found := version_of(name)) is not None},
        f"macOS {macos}" if macos else f"{platform.system()} {platform.release()}",
        machine.architecture,
    )


def own_version() -> str:
    """Return the version of the toolkit that runs, which need not be the installed one."""
    return str(sys.modules[__name__.partition(".")[0]].__version__)


def version_of(name: str) -> str | None:
    """Return the version of an installed package, ``None`` if it is not installed."""
    found = distribution_of(name)
    return None if found is None else found.version


def hardware(computer: Computer, device: str) -> sections.Hardware:
    """Return what the device is, and the most memory that was used until now."""
    import torch

    machine = computer.machine
    return sections.Hardware(
        device=device,
        name=own_name(device, machine, computer.torch),
        chip=machine.chip or processor_name(),
        memory_bytes=machine.memory_bytes or installed_bytes(),
        threads=torch.get_num_threads(),
        memory_limit=computer.limit(device),
        device_peak_bytes=allocator(device).memory().peak,
        resident_peak_bytes=resident_peak(),
    )


def resident_peak(read: Callable[[], Footprint | None] = read_footprint) -> int:
    """Return the most memory that this process had, in bytes.

    On macOS that is its footprint. Linux counts in kibibytes (``getrusage``), Windows has a count of its own.
    """
    if (footprint := read()) is not None:
        return footprint.peak
    if sys.platform == "win32":
        psutil = import_psutil()
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


SEED_NAME = re.compile(r"[A-Za-z_][\w.]{0,39}", re.ASCII)
SEEDS = "Pass a whole number, or names and whole numbers, such as {'torch': 1, 'numpy': 2}."


def loader_of(loader: Any) -> sections.Loader | None:
    """Return how a ``DataLoader`` loads; nothing is read from it.

    Raises:
        ConfigurationError: For what is not a ``DataLoader``.
    """
    if loader is None:
        return None
    try:
        context, seeding = loader.multiprocessing_context, "worker_init_fn" if loader.worker_init_fn else "torch"
        facts = {
            "workers": loader.num_workers,
            "batch_size": loader.batch_size,
            "pin_memory": bool(loader.pin_memory),
            "persistent_workers": bool(loader.persistent_workers),
            "prefetch_factor": loader.prefetch_factor,
            "start_method": None if context is None else context.get_start_method(),
            "seeded": loader.generator is not None,
            "worker_seeding": seeding if loader.num_workers else "no workers",
        }
        found: sections.Loader = from_plain(sections.Loader, facts)
    except (AttributeError, ValueError):
        what = f"{short_type_name(loader)} is not a DataLoader."
        raise ConfigurationError(what, "Pass the loader of the training.") from None
    return found


# The field of a run for each kind of strategy, and how it is had.
STRATEGIES: tuple[tuple[type, str, Callable[[Any], Any]], ...] = (
    (ActivationCheckpointing, "checkpointed", lambda one: ", ".join(one.modules)),
    (GradientAccumulation, "accumulation", lambda one: int(one.steps)),
    (Precision, "autocast", lambda one: one.dtype),
)


def strategies_of(strategies: Any) -> dict[str, Any]:
    """Return the strategies of a training by the fields of a run.

    Raises:
        ConfigurationError: For what is no strategy.
    """
    found = {}
    for one in strategies if isinstance(strategies, (list, tuple)) else (strategies,):
        name, value = next(((name, value) for kind, name, value in STRATEGIES if isinstance(one, kind)), ("", str))
        if not name:
            what = f"{short_type_name(one)} is no strategy of a training."
            remedy = (
                "Pass what checkpoint_activations(), GradientAccumulation() or precision() of nb.training returned."
            )
            raise ConfigurationError(what, remedy)
        found[name] = value(one)
    return found


def seeds_of(seeds: Any) -> dict[str, int]:
    """Return seeds by what they are of.

    Raises:
        ConfigurationError: For a seed that is not a whole number, and a name that is not a short word.

    Example:
        >>> seeds_of(7), seeds_of({"numpy": 1}), seeds_of(None)
        ({'seed': 7}, {'numpy': 1}, {})
    """
    if seeds is None:
        return {}
    named = seeds if isinstance(seeds, Mapping) else {"seed": seeds}
    for name, seed in named.items():
        if not isinstance(name, str) or not SEED_NAME.fullmatch(name):
            raise ConfigurationError("The name of a seed is not a short word.", SEEDS)
        if type(seed) is not int or abs(seed) >= LARGEST:
            raise ConfigurationError(
                f"The seed {describe_value(name)} is {short_type_name(seed)}, or too large.", SEEDS
            )
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


# How long other programs are watched, in seconds; what share of a processor disturbs others; how many are named.
SECONDS, BUSY = 0.4, 0.1
MOST_NAMES, LONGEST_NAME = 5, 40


@dataclass(frozen=True)
class ProcessorTimes:
    """Seconds that the processors have computed until now.

    Attributes:
        programs: For each program but this one and those that it started, by number and start: its name and its seconds.
        own: The seconds of this one and those that it started.
        busy: The seconds of all processors together that were not idle.
        whole: All their seconds.
    """

    programs: Mapping[Any, tuple[str, float]]
    own: float
    busy: float
    whole: float


def read_background(names: bool) -> sections.Background:
    """Watch the programs of this computer for a moment."""
    first = processor_times()
    time.sleep(SECONDS)
    return background(first, processor_times(), names)


def processor_times() -> ProcessorTimes:
    """Return what the processors have done until now; programs that may not be asked count in the whole alone."""
    from ..signals import GUESTS, NOT_BUSY, cpu_times

    psutil = import_psutil()
    this = psutil.Process()
    family = {this.pid, *(child.pid for child in this.children(recursive=True))}
    times = {name: spent for name, spent in cpu_times().items() if name not in GUESTS}
    whole, idle = sum(times.values()), sum(times.get(name, 0.0) for name in NOT_BUSY)
    programs = psutil.process_iter(["pid", "name", "create_time", "cpu_times"], ad_value=None)
    infos = [one.info for one in programs if one.info["cpu_times"] is not None]
    spent = {(one["pid"], one["create_time"]): (one["name"] or "", sum(one["cpu_times"][:2])) for one in infos}
    own = sum(seconds for (number, _), (_, seconds) in spent.items() if number in family)
    seconds = {key: one for key, one in spent.items() if key[0] not in family}
    return ProcessorTimes(seconds, own, whole - idle, whole)


def background(first: ProcessorTimes, second: ProcessorTimes, names: bool = False) -> sections.Background:
    """Return what other programs did between two looks; ``names`` tells whether the busiest are named."""
    whole = second.whole - first.whole
    if whole <= 0:
        return sections.Background()
    processor = BUSY * whole / max(1, import_psutil().cpu_count() or 1)
    there = [key for key in second.programs if key in first.programs]
    taken = {key: second.programs[key][1] - first.programs[key][1] for key in there}
    busiest = sorted((key for key, seconds in taken.items() if seconds >= processor), key=lambda key: -taken[key])
    others = (second.busy - first.busy) - (second.own - first.own)
    named = tuple(privacy.without_secrets(second.programs[key][0])[:LONGEST_NAME] for key in busiest[:MOST_NAMES])
    return sections.Background(len(busiest), round(min(1.0, max(0.0, others / whole)), 3), named if names else None)


NETWORK = re.compile(
    r"nfs\d?|smbfs|smb3|cifs|afpfs|webdav|ncpfs|9p|virtiofs|ceph|glusterfs|lustre|gpfs|beegfs|afs|davfs|ftp"
    r"|fuse\.(sshfs|rclone|s3fs|gcsfuse|goofys|glusterfs|ceph\S*)|macfuse|osxfuse|fuse"
)
MEMORY = re.compile(r"tmpfs|ramfs|devtmpfs")
EXTERNAL = ("/Volumes/", "/media/", "/run/media/")  # Where systems mount what was plugged in.


@dataclass(frozen=True)
class Mounted:
    """A mounted file system: where, its type, and what it is mounted with."""

    point: str
    filesystem: str
    options: tuple[str, ...] = ()

    @property
    def kind(self) -> Literal["local", "network", "external", "memory"]:
        """What sort of storage it is."""
        if NETWORK.fullmatch(self.filesystem.lower()) or "remote" in self.options:
            return "network"
        if MEMORY.fullmatch(self.filesystem.lower()):
            return "memory"
        return "external" if self.point.startswith(EXTERNAL) or "removable" in self.options else "local"


def read_mounts() -> tuple[Mounted, ...]:
    """Return the mounted file systems of this computer; users and servers are not read."""
    psutil = import_psutil()
    try:
        partitions = psutil.disk_partitions(all=True)
    except OSError:  # Some containers hide the list.
        return ()
    return tuple(Mounted(one.mountpoint, one.fstype, tuple(one.opts.split(","))) for one in partitions)


def cache_folders(environ: Mapping[str, str], home: Path) -> dict[str, Path]:
    """Return where models are cached, by the variables that huggingface_hub and torch.hub read."""
    cache = Path(environ.get("XDG_CACHE_HOME") or home / ".cache")
    hub = Path(environ.get("HF_HOME") or cache / "huggingface")
    return {
        "Hugging Face cache": Path(environ.get("HF_HUB_CACHE") or hub / "hub"),
        "torch cache": Path(environ.get("TORCH_HOME") or cache / "torch"),
    }


# Folders of a person's home that macOS keeps in iCloud Drive, or other providers elsewhere, and what marks more of them, such as
# a Desktop that is kept in iCloud: their files can be moved away, and come back only when they are read.
CLOUDS = (Path("Library", "Mobile Documents"), Path("Library", "CloudStorage"))
CLOUD_MARKS = re.compile(r"\bcom\.apple\.(icloud\.desktop|file-provider-domain-id)\b")


def places(
    wanted: Mapping[str, Path],
    mounts: Sequence[Mounted],
    home: Path | None = None,
    run: Callable[[list[str]], str | None] = run_command,
) -> tuple[sections.StoragePlace, ...]:
    """Return where each of some paths lies; links are followed, and a path that is not there yet counts as if it were."""
    found, home = [], Path(os.path.realpath(home or privacy.home_folder()))
    for what, path in wanted.items():
        # os.path answers for any path; Path raises for a circle of links and an unknown person.
        real = Path(os.path.realpath(os.path.expanduser(path)))  # noqa: PTH111
        mounted = mounted_at(real, mounts)
        on_mac = mounted is not None and (mounted.filesystem, mounted.kind) == ("apfs", "local")
        kind = "cloud" if on_mac and in_cloud(real, home, run) else mounted.kind if mounted else "not known"
        filesystem = mounted.filesystem if mounted else None
        found.append(sections.StoragePlace(what, privacy.short_path(path), filesystem, kind))
    return tuple(found)


def in_cloud(path: Path, home: Path, run: Callable[[list[str]], str | None]) -> bool:
    """Tell whether macOS or a provider keeps a path of a person's home elsewhere, too."""
    above = [one for one in (path, *path.parents) if home in one.parents]
    if any(one.relative_to(home) in CLOUDS for one in above):
        return True
    there = [str(one) for one in above if os.path.exists(one)]  # noqa: PTH110 - for any path, as above
    return bool(there) and CLOUD_MARKS.search(run(["/usr/bin/xattr", *there]) or "") is not None


def mounted_at(path: Path, mounts: Sequence[Mounted]) -> Mounted | None:
    """Return the file system that a path is on: the deepest, and of several at one place the last, which hides the others."""
    above = {str(one) for one in (path, *path.parents)}
    return max((one for one in reversed(mounts) if one.point in above), key=lambda one: len(one.point), default=None)


# On a Mac without developer tools, this one opens a window that offers to install them.
APPLE_STUB = "/usr/bin/git"
MAC_PATHS = (
    *("/opt/homebrew/bin/git", "/usr/local/bin/git", "/Library/Developer/CommandLineTools/usr/bin/git"),
    "/Applications/Xcode.app/Contents/Developer/usr/bin/git",
)
# Nothing is written into the repository, and the program that it names for watching files is not run.
OPTIONS = ("--no-optional-locks", "-c", "core.fsmonitor=false")
# The line that names the branch comes first: without it git has failed, such as for a damaged index, and says nothing of files.
STATUS = ("status", "--porcelain", "--branch", "--no-ahead-behind", "--untracked-files=normal", "--no-renames")
SUBMODULES = "--ignore-submodules=dirty"
# The programs that it names for reading files; ``git status`` would run them (git's ``convert.c``), so each gets no value.
FILTERS = ("config", "--null", "--name-only", "--get-regexp", r"^filter\..*\.(clean|smudge|process|required)$")
COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


def git_program(system: str = sys.platform, found: str | None = None) -> str | None:
    """Return the full path of git, ``None`` if there is none that can be run without a question."""
    found = found or shutil.which("git")
    if system != "darwin" or (found and found != APPLE_STUB):
        return found
    return next((path for path in MAC_PATHS if os.access(path, os.X_OK)), None)


def run_git(command: list[str]) -> str | None:
    """Return what git prints within two seconds, ``None`` if it cannot be run.

    Its own variables, such as ``GIT_DIR``, are taken away: they would let it answer for another repository.
    """
    others = {name: value for name, value in os.environ.items() if not name.upper().startswith("GIT_")}
    return run_command(command, {**others, "GIT_NO_LAZY_FETCH": "1", "GIT_TERMINAL_PROMPT": "0"})


def read_code(
    folder: Path, run: Callable[[list[str]], str | None] = run_git, program: str | None = None
) -> sections.Code:
    """Return the commit and the state of the repository around a folder; what git does not say is ``None``."""
    git = program or git_program()
    if git is None:
        return sections.Code()
    asked = [git, "-C", str(folder), *OPTIONS]
    commit = (run([*asked, "rev-parse", "--verify", "HEAD"]) or "").strip()
    if not COMMIT.fullmatch(commit):
        return sections.Code()
    filters = run([*asked, *FILTERS])
    if filters is None or "=" in filters:  # Such a name cannot be written as an option, so git must not be asked.
        return sections.Code(commit)
    off = [option for name in filters.split("\0") if name for option in ("-c", f"{name}=")]
    branch, *files = (run([*asked, *off, *STATUS, SUBMODULES]) or "").strip("\n").split("\n")
    if not branch:
        return sections.Code(commit)
    untracked = sum(line.startswith("??") for line in files)
    return sections.Code(commit, len(files) - untracked, untracked)


SAMPLES, CONNECT_TIMEOUT = 5, 2.0
# Where a scheme is answered if an address names no port.
PORTS = {"https": 443, "http": 80, "ssh": 22, "sftp": 22, "ftp": 21}
HOST_AND_PORT = "Pass a host and a port, such as 'store.example:443', or an https address."


def measure_round_trip(store: str, samples: int = SAMPLES, timeout: float = CONNECT_TIMEOUT) -> sections.RoundTrip:
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
        host, port = parts.hostname, parts.port or PORTS.get(parts.scheme)
    except ValueError:
        host, port = None, None
    if not host or not port or any(one.isspace() for one in host):
        raise ConfigurationError("The artifact store has no host with a port.", HOST_AND_PORT)
    took = [one for one in (connect(host, port, timeout) for _ in range(samples)) if one is not None]
    middle, longest = (round(median(took), 6), round(max(took), 6)) if took else (None, None)
    return sections.RoundTrip(privacy.without_secrets(host), port, samples, samples - len(took), middle, longest)


def connect(host: str, port: int, timeout: float) -> float | None:
    """Return how long one connection takes in seconds, ``None`` if it fails."""
    begin = now()
    try:
        with socket.create_connection((host, port), timeout=timeout):
            return now() - begin
    except (OSError, UnicodeError):  # UnicodeError for a name that no network can have.
        return None
