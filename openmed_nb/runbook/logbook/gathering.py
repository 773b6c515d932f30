"""Gathering a logbook: the one place that asks the computer, torch and git, and reads the dataset."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path, PurePosixPath, PureWindowsPath
from statistics import median
from typing import Any, Literal
from urllib.parse import urlsplit

from ...devices.backend import gpu_uuid
from ...devices.computer import Computer
from ...devices.environment import SET_BY, EnvPlan
from ...devices.machine import Machine, import_psutil, own_name, processor_name, run_command
from ...devices.memory import allocator
from ...devices.request import DeviceRequest, canonical, kind_of
from ...errors import ConfigurationError, given_path, shorten
from ...plain import LARGEST, from_plain
from ...training.curve import installed_bytes
from ..comparison import GUESTS, NOT_BUSY, cpu_times
from ..signals.reading import read_signals
from ..signals.values import Signals
from .figures import joined, reported_device, told_by
from .fingerprints import dataset_of, hypotheses_of
from .logbook import Logbook
from .sections import (
    SCHEMA,
    Background,
    Code,
    Conditions,
    Hardware,
    Loader,
    Model,
    Place,
    Randomness,
    RoundTrip,
    Run,
    Setting,
    Software,
)
from .variables import home_folder, kept_value, kept_variables, short_path, without_secrets

SECONDS = 0.4
"""How long is looked."""

BUSY = 0.1
"""Of one processor; a program that takes less disturbs nobody."""

MOST_NAMES = 5
LONGEST_NAME = 40


@dataclass(frozen=True)
class Look:
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


def background(first: Look, second: Look, names: bool = False) -> Background:
    """Return what other programs did between two looks.

    Args:
        first: The first look.
        second: The second one.
        names: Whether the busiest are named.

    Example:
        >>> before = Look({1: ("game", 5.0), 2: ("mail", 1.0)}, 0.0, 10.0, 100.0)
        >>> after = Look({1: ("game", 6.0), 2: ("mail", 1.0)}, 0.5, 11.5, 104.0)
        >>> background(before, after, names=True)
        Background(busy=1, share=0.25, names=('game',))
    """
    whole = second.whole - first.whole
    if whole <= 0:
        return Background()
    processor = BUSY * whole / max(1, _processors())
    taken = {
        key: seconds - first.programs[key][1] for key, (_, seconds) in second.programs.items() if key in first.programs
    }
    busiest = sorted((key for key, seconds in taken.items() if seconds >= processor), key=lambda key: -taken[key])
    others = (second.busy - first.busy) - (second.own - first.own)
    told = tuple(without_secrets(second.programs[key][0])[:LONGEST_NAME] for key in busiest[:MOST_NAMES])
    return Background(len(busiest), round(min(1.0, max(0.0, others / whole)), 3), told if names else None)


def read_background(names: bool = False) -> Background:
    """Look at the programs of this computer for a moment.

    Example:
        >>> read_background().names is None
        True
    """
    first = look()
    time.sleep(SECONDS)
    return background(first, look(), names)


def look() -> Look:
    """Return what the processors have done until now; programs that may not be asked count in the whole alone."""
    psutil = import_psutil()
    ours = psutil.Process()
    family = {ours.pid, *(child.pid for child in ours.children(recursive=True))}
    times = {name: spent for name, spent in cpu_times().items() if name not in GUESTS}
    whole, idle = sum(times.values()), sum(times.get(name, 0.0) for name in NOT_BUSY)
    seconds = {}
    own = 0.0
    for program in psutil.process_iter(["pid", "name", "create_time", "cpu_times"], ad_value=None):
        spent = program.info["cpu_times"]
        if spent is None:
            continue
        if program.pid in family:
            own += spent.user + spent.system
        else:
            key = (program.pid, program.info["create_time"])
            seconds[key] = (program.info["name"] or "", spent.user + spent.system)
    return Look(seconds, own, whole - idle, whole)


def _processors() -> int:
    psutil = import_psutil()
    return int(psutil.cpu_count() or 1)


MOUNT = ["/sbin/mount"]

NETWORK = re.compile(
    r"nfs\d?|smbfs|smb3|cifs|afpfs|webdav|ncpfs|9p|virtiofs|ceph|glusterfs|lustre|gpfs|beegfs|afs|davfs|ftp"
    r"|fuse\.(sshfs|rclone|s3fs|gcsfuse|goofys|glusterfs|ceph\S*)|macfuse|osxfuse|fuse"
)
MEMORY = re.compile(r"tmpfs|ramfs|devtmpfs")
EXTERNAL = ("/Volumes/", "/media/", "/run/media/")
"""Where systems mount what was plugged in."""

Kind = Literal["local", "network", "external", "memory", "not known"]


@dataclass(frozen=True)
class Mounted:
    """A mounted file system.

    Attributes:
        point: Where it is mounted.
        filesystem: Its type.
        options: What it is mounted with.
    """

    point: str
    filesystem: str
    options: tuple[str, ...] = ()

    @property
    def kind(self) -> Kind:
        """What sort of storage it is.

        Example:
            >>> Mounted("/Volumes/Notes", "smbfs").kind, Mounted("/Volumes/Stick", "exfat").kind, Mounted("/", "apfs").kind
            ('network', 'external', 'local')
        """
        if NETWORK.fullmatch(self.filesystem.lower()) or "remote" in self.options:
            return "network"
        if MEMORY.fullmatch(self.filesystem.lower()):
            return "memory"
        return "external" if self.point.startswith(EXTERNAL) or "removable" in self.options else "local"


def parse_mount(output: str | None) -> tuple[Mounted, ...]:
    """Return the file systems that macOS' ``mount`` lists; users and servers are not read.

    Example:
        >>> parse_mount("//me@nas/share on /Volumes/My share (smbfs, nodev, nosuid, mounted by me)")[0].point
        '/Volumes/My share'
    """
    found = re.findall(r"^.+? on (/.*) \(([^()]+)\)$", output or "", re.MULTILINE)
    return tuple(Mounted(point, *_told(told)) for point, told in found)


def read_mounts(system: str, run: Callable[[list[str]], str | None] = run_command) -> tuple[Mounted, ...]:
    """Return the mounted file systems of this computer.

    Args:
        system: What ``platform.system()`` says.
        run: Runs a command.

    Example:
        >>> import platform
        >>> len(read_mounts(platform.system())) > 0
        True
    """
    if system == "Darwin":
        return parse_mount(run(MOUNT))
    psutil = import_psutil()
    try:
        partitions = psutil.disk_partitions(all=True)
    except OSError:  # Some containers hide the list.
        return ()
    return tuple(Mounted(one.mountpoint, one.fstype, tuple(one.opts.split(","))) for one in partitions)


def mounted_at(path: Path, mounts: Sequence[Mounted]) -> Mounted | None:
    """Return the file system that a path is on: the deepest, and of several at one place the last, which hides the others.

    Example:
        >>> mounts = (Mounted("/", "ext4"), Mounted("/data", "nfs"), Mounted("/data", "nfs4"))
        >>> mounted_at(Path("/data/models"), mounts).filesystem, mounted_at(Path("/database"), mounts).filesystem
        ('nfs4', 'ext4')
    """
    above = {str(one) for one in (path, *path.parents)}
    found = [one for one in mounts if one.point in above]
    return max(found, key=lambda one: (_depth(one.point), mounts.index(one)), default=None)


def places(wanted: Mapping[str, Path], mounts: Sequence[Mounted]) -> tuple[Place, ...]:
    """Return where each of some paths lies; links are followed, and a path that is not there yet counts as if it were."""
    return tuple(_place(what, path, mounted_at(_real(path), mounts)) for what, path in wanted.items())


def _real(path: Path) -> Path:
    """Return where a path leads; os.path answers for any, Path raises for a circle of links and an unknown person."""
    return Path(os.path.realpath(os.path.expanduser(path)))  # noqa: PTH111


def _place(what: str, path: Path, mounted: Mounted | None) -> Place:
    if mounted is None:
        return Place(what, short_path(path), None, "not known")
    return Place(what, short_path(path), mounted.filesystem, mounted.kind)


def cache_folders(environ: Mapping[str, str], home: Path) -> dict[str, Path]:
    """Return where models are cached, by the variables that huggingface_hub and torch.hub read.

    Example:
        >>> cache_folders({"TORCH_HOME": "/data/torch"}, Path("/home/me"))["torch cache"].as_posix()
        '/data/torch'
    """
    cache = Path(environ.get("XDG_CACHE_HOME") or home / ".cache")
    hub = Path(environ.get("HF_HOME") or cache / "huggingface")
    return {
        "Hugging Face cache": Path(environ.get("HF_HUB_CACHE") or hub / "hub"),
        "torch cache": Path(environ.get("TORCH_HOME") or cache / "torch"),
    }


def _told(told: str) -> tuple[str, tuple[str, ...]]:
    filesystem, *options = told.split(", ")
    return filesystem, tuple(options)


def _depth(point: str) -> int:
    return len((PureWindowsPath(point) if "\\" in point else PurePosixPath(point)).parts)


APPLE_STUB = "/usr/bin/git"
"""On a Mac without developer tools, this one opens a window that offers to install them."""

MAC_PATHS = (
    *("/opt/homebrew/bin/git", "/usr/local/bin/git", "/Library/Developer/CommandLineTools/usr/bin/git"),
    "/Applications/Xcode.app/Contents/Developer/usr/bin/git",
)

OPTIONS = ("--no-optional-locks", "-c", "core.fsmonitor=false")
"""Nothing is written into the repository, and the program that it names for watching files is not run."""

STATUS = ("status", "--porcelain", "--untracked-files=normal", "--no-renames", "--ignore-submodules=dirty")

FILTERS = ("config", "--null", "--name-only", "--get-regexp", r"^filter\..*\.(clean|smudge|process|required)$")
"""The programs that it names for reading files; ``git status`` would run them (git's ``convert.c``), so each gets no value."""

QUIET = {"GIT_NO_LAZY_FETCH": "1", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
TIMEOUT = 2

UNTRACKED = "??"

RunProgram = Callable[[list[str]], str | None]


def git_program(system: str = sys.platform, found: str | None = None) -> str | None:
    """Return the full path of git, ``None`` where there is none that can be run without a question.

    Args:
        system: What ``sys.platform`` says.
        found: What stands in the ``PATH``; it is looked for where nobody says.

    Example:
        >>> git_program("linux", "/usr/bin/git")
        '/usr/bin/git'
    """
    found = found or shutil.which("git")
    if system != "darwin" or (found and found != APPLE_STUB):
        return found
    return next((path for path in MAC_PATHS if os.access(path, os.X_OK)), None)


def run_git(command: list[str]) -> str | None:
    """Return what git prints within two seconds, ``None`` where it cannot be run or fails.

    Its own variables, such as ``GIT_DIR``, are taken away: they would let it answer for another repository.
    """
    ours = {name: value for name, value in os.environ.items() if not name.upper().startswith("GIT_")}
    try:
        done = subprocess.run(  # noqa: S603 - the commands are ours
            command,
            capture_output=True,
            timeout=TIMEOUT,
            env=ours | QUIET,
            check=False,
            encoding="utf-8",
            errors="replace",
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout


def read_code(folder: Path, run: RunProgram = run_git, program: str | None = None) -> Code:
    """Return the commit and the state of the repository around a folder.

    Args:
        folder: A folder in it.
        run: Runs a command for at most two seconds; ``None`` where it took longer or cannot be run.
        program: The path of git.

    Returns:
        The state; what git does not say is ``None``.
    """
    git = program or git_program()
    if git is None:
        return Code()
    asked = [git, "-C", str(folder), *OPTIONS]
    commit = parse_commit(run([*asked, "rev-parse", "--verify", "HEAD"]))
    off = without_filters(run([*asked, *FILTERS])) if commit else None
    status = None if off is None else run([*asked, *off, *STATUS])
    return Code(commit) if status is None else Code(commit, *parse_status(status))


def parse_commit(output: str | None) -> str | None:
    r"""Return a commit, ``None`` where git named none.

    Example:
        >>> parse_commit("5c2d9f9a1e64d7d1f2f3c2e1d4a5b6c7d8e9f0a1\n"), parse_commit("HEAD\n")
        ('5c2d9f9a1e64d7d1f2f3c2e1d4a5b6c7d8e9f0a1', None)
    """
    text = (output or "").strip()
    return text if re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", text) else None


def without_filters(names: str | None) -> list[str] | None:
    r"""Return options of git that take the programs away that a repository names for reading files.

    Args:
        names: The names of those settings, as ``git config --null`` prints them; ``None`` where git did not answer.

    Returns:
        The options; ``None`` where a name cannot be written as one, so that git must not be asked.

    Example:
        >>> without_filters("filter.lfs.clean\0filter.lfs.required\0")
        ['-c', 'filter.lfs.clean=', '-c', 'filter.lfs.required=']
    """
    if names is None or "=" in names:
        return None
    return [option for name in names.split("\0") if name for option in ("-c", f"{name}=")]


def parse_status(output: str) -> tuple[int, int]:
    r"""Return how many files are changed, and how many are unknown to git, from what ``git status --porcelain`` said.

    Example:
        >>> parse_status(" M training.py\nA  new.py\n?? notes.txt\n")
        (2, 1)
    """
    lines = [line for line in output.splitlines() if line]
    untracked = sum(line.startswith(UNTRACKED) for line in lines)
    return len(lines) - untracked, untracked


NAME = re.compile(r"[A-Za-z_][\w.]{0,39}", re.ASCII)

SEEDS = "Pass a whole number, or names and whole numbers, such as {'torch': 1, 'numpy': 2}."


def loader_of(loader: Any) -> Loader | None:
    """Return how a ``DataLoader`` loads; nothing is read from it.

    Raises:
        ConfigurationError: For what is no ``DataLoader``.

    Example:
        >>> import torch
        >>> loader_of(torch.utils.data.DataLoader([1, 2], batch_size=2)).worker_seeding
        'no workers'
    """
    if loader is None:
        return None
    try:
        facts: Loader = from_plain(Loader, _facts(loader))
    except (AttributeError, ValueError) as error:
        what = f"{type(loader).__name__} is no DataLoader."
        raise ConfigurationError(what, "Pass the loader of the training.") from error
    return facts


def _facts(loader: Any) -> dict[str, Any]:
    context, seeding = loader.multiprocessing_context, "worker_init_fn" if loader.worker_init_fn else "torch"
    return {
        "workers": loader.num_workers,
        "batch_size": loader.batch_size,
        "pin_memory": bool(loader.pin_memory),
        "persistent_workers": bool(loader.persistent_workers),
        "prefetch_factor": loader.prefetch_factor,
        "start_method": None if context is None else context.get_start_method(),
        "seeded": loader.generator is not None,
        "worker_seeding": seeding if loader.num_workers else "no workers",
    }


def seeds_of(seeds: Any) -> dict[str, int]:
    """Return seeds by what they are of.

    Raises:
        ConfigurationError: For what is no seed, or no name of one.

    Example:
        >>> seeds_of(7), seeds_of({"numpy": 1}), seeds_of(None)
        ({'seed': 7}, {'numpy': 1}, {})
    """
    if seeds is None:
        return {}
    named = seeds if isinstance(seeds, Mapping) else {"seed": seeds}
    for name, seed in named.items():
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise ConfigurationError("A name of a seed is no short word.", SEEDS)
        if isinstance(seed, bool) or not isinstance(seed, int) or abs(seed) >= LARGEST:
            raise ConfigurationError(f"The seed {shorten(name)!r} is {type(seed).__name__}, or too large.", SEEDS)
    return dict(named)


def randomness_of(seeds: Any) -> Randomness:
    """Return the seeds, and what torch was asked for; torch is not imported for that.

    Example:
        >>> import torch
        >>> randomness_of(7).deterministic_algorithms
        False
    """
    torch, named = sys.modules.get("torch"), seeds_of(seeds)
    if torch is None:
        return Randomness(named)
    cudnn = torch.backends.cudnn
    return Randomness(
        seeds=named,
        torch_seed=int(torch.initial_seed()),
        deterministic_algorithms=bool(torch.are_deterministic_algorithms_enabled()),
        warn_only=bool(torch.is_deterministic_algorithms_warn_only_enabled()),
        cudnn_deterministic=bool(cudnn.deterministic),
        cudnn_benchmark=bool(cudnn.benchmark),
        matmul_precision=precision_of_products(torch),
    )


def precision_of_products(torch: Any) -> str:
    """Return how precise products of float32 matrices shall be, in the words of whichever of torch's two settings was used.

    torch refuses to tell the older one once the newer one was set (``aten/src/ATen/Context.cpp``).

    Example:
        >>> import torch
        >>> precision_of_products(torch)
        'highest'
    """
    try:
        return str(torch.get_float32_matmul_precision())
    except RuntimeError:
        return str(torch.backends.cuda.matmul.fp32_precision)


SAMPLES = 5
CONNECT_TIMEOUT = 2.0

PORTS = {"https": 443, "http": 80, "ssh": 22, "sftp": 22, "ftp": 21}
"""Where a scheme is answered when nobody names a port."""

HOST_AND_PORT = "Pass a host and a port, such as 'store.example:443', or an https address."


def target(store: str) -> tuple[str, int]:
    """Return the host and the port of an artifact store; user, password, path and query are not read.

    Raises:
        ConfigurationError: Where there is none; what was passed is not shown, because it may hold a password.

    Example:
        >>> target("https://me:word@store.example/models"), target("store.example:9000")
        (('store.example', 443), ('store.example', 9000))
    """
    text = str(store)
    try:
        parts = urlsplit(text if "://" in text else f"//{text}")
        port = parts.port or PORTS.get(parts.scheme)
    except ValueError:
        port = None
        parts = urlsplit("")
    if not parts.hostname or not port or any(one.isspace() for one in parts.hostname):
        raise ConfigurationError("The artifact store has no host with a port.", HOST_AND_PORT)
    return parts.hostname, port


def measure_round_trip(store: str, samples: int = SAMPLES, timeout: float = CONNECT_TIMEOUT) -> RoundTrip:
    """Connect to an artifact store some times.

    Args:
        store: As for :func:`target`.
        samples: How often.
        timeout: How long each may take, in seconds.

    Raises:
        ConfigurationError: As :func:`target`.
    """
    host, port = target(store)
    return round_trip(host, port, [connect(host, port, timeout) for _ in range(samples)])


def round_trip(host: str, port: int, seconds: list[float | None]) -> RoundTrip:
    """Return what some connections took; ``None`` is one that failed.

    Example:
        >>> round_trip("store.example", 443, [0.02, None, 0.01]).failures
        1
    """
    took = [one for one in seconds if one is not None]
    middle, longest = (round(median(took), 6), round(max(took), 6)) if took else (None, None)
    return RoundTrip(without_secrets(host), port, len(seconds), len(seconds) - len(took), middle, longest)


def connect(host: str, port: int, timeout: float, clock: Callable[[], float] = time.perf_counter) -> float | None:
    """Return how long one connection takes in seconds, ``None`` where it fails."""
    begin = clock()
    try:
        with socket.create_connection((host, port), timeout=timeout):
            return clock() - begin
    except (OSError, UnicodeError):  # UnicodeError for a name that no network can have.
        return None


PACKAGES = (
    *("numpy", "tokenizers", "safetensors", "huggingface-hub", "accelerate", "datasets", "lightning"),
    *("pytorch-lightning", "peft", "ipython", "ipywidgets", "psutil"),
)
"""Packages that change speed, answers, or how they are shown."""

CONDITIONS = (
    "power_source",
    "power_mode",
    "heat",
    "memory_pressure",
    "speed_limit",
    "battery",
    "memory_available",
    "swap_used",
)


@dataclass(frozen=True)
class Said:
    """What a person says of a run.

    Attributes:
        reports: What ``nb.sweep()`` and the others returned.
        dataset: Texts, or the path of a file or a folder.
        batch_size: How many rows a batch had.
        length: How many tokens a row had.
        seeds: A seed, or seeds by name.
        loader: The ``DataLoader`` of a training.
        hypotheses: Pairs of what was suspected and what rules it out.
        applications: Whether busy programs are named.
        artifact_store: What to connect to; ``None`` to leave that.
        folder: A folder of the person's code; the one in which Python runs where nobody says.
    """

    reports: tuple[Any, ...] = ()
    dataset: Any = None
    batch_size: int | None = None
    length: int | None = None
    seeds: Any = None
    loader: Any = None
    hypotheses: Any = ()
    applications: bool = False
    artifact_store: str | None = None
    folder: str | os.PathLike[str] | None = None

    def check(self) -> None:
        """Refuse numbers that are none.

        Raises:
            ConfigurationError: For them.
        """
        for name in ("batch_size", "length"):
            number = getattr(self, name)
            if number is not None and (type(number) is not int or not 1 <= number < LARGEST):
                raise ConfigurationError(f"{name} is no number of rows or tokens.", "Pass a whole number from 1.")


def gather(
    said: Said, computer: Computer, device: str, model: Model | None = None, folder: Path | None = None
) -> Logbook:
    """Return the logbook of this moment.

    Args:
        said: What the person says.
        computer: The computer; torch is loaded already.
        device: The device in force, as torch spells it; that of the reports counts where all name one.
        model: Which model.
        folder: Where its files are; ``None`` where it has none.

    Raises:
        ConfigurationError: For reports, texts, seeds, a loader, hypotheses, a folder or a store that are none; then nothing was
            asked of the computer.
        DeviceError: For reports of a device that is not here.
    """
    said.check()
    told = told_by(said.reports)
    dataset = None if said.dataset is None else dataset_of(said.dataset)
    hypotheses = hypotheses_of(said.hypotheses, said.dataset)
    loader, randomness = loader_of(said.loader), randomness_of(said.seeds)
    code = given_path(said.folder or ".", "folder")
    device = confirmed(reported_device(told) or device, device, computer)
    machine, environ = computer.machine, computer.environ
    network = None if said.artifact_store is None else measure_round_trip(said.artifact_store)
    signals = read_signals(machine, device, uuid=gpu_uuid(device))
    plan = computer.environment(device)
    return Logbook(
        schema=SCHEMA,
        written=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        simulated=(machine.simulated and kind_of(device) == "mps") or any(one.simulated for one in told),
        software=software(machine, computer.torch.version),
        code=read_code(code),
        hardware=hardware(computer, device),
        model=model,
        dataset=dataset,
        run=joined(told, Run(batch_size=said.batch_size, length=said.length)),
        loader=loader,
        randomness=randomness,
        environment=kept_variables(environ),
        mps_variables=settings(plan) if device == "mps" else (),
        conditions=conditions(signals, after=bool(told)),
        background=Background() if machine.simulated else read_background(said.applications),
        storage=storage(environ, folder),
        network=network,
        hypotheses=hypotheses,
        figures=told,
    )


def settings(plan: EnvPlan) -> tuple[Setting, ...]:
    """Return what became of torch's variables for MPS; a value that looks as none of them does is not kept.

    Example:
        >>> from openmed_nb.devices.environment import plan
        >>> settings(plan({"PYTORCH_ENABLE_MPS_FALLBACK": "two words"}))[0].value
        '***'
    """
    cleaned = ((one, None if one.value is None else kept_value(one.name, one.value)) for one in plan.settings)
    return tuple(Setting(one.name, value, SET_BY[one.origin], one.effect) for one, value in cleaned)


def confirmed(reported: str, device: str, computer: Computer) -> str:
    """Return the device that reports are of, as torch spells it.

    Args:
        reported: What they say.
        device: The device in force, which is known to be here.
        computer: The computer.

    Raises:
        DeviceError: Where it is none of this computer, which then can tell nothing of it.
    """
    if canonical(reported) == canonical(device):
        return device
    return computer.confirm(DeviceRequest.parse(reported, "report")).device


def software(machine: Machine, torch: str | None) -> Software:
    """Return the versions of what runs; no package is imported for that.

    Args:
        machine: The facts of this computer.
        torch: The version that torch says it has.
    """
    versions = {name: found for name in PACKAGES if (found := version_of(name)) is not None}
    macos = ".".join(map(str, machine.macos)) if machine.macos else None
    system = f"macOS {macos}" if macos else f"{platform.system()} {platform.release()}"
    return Software(
        own_version(),
        platform.python_version(),
        torch,
        version_of("transformers"),
        versions,
        system,
        machine.architecture,
    )


def own_version() -> str:
    """Return the version of the toolkit that runs, which need not be the installed one."""
    return str(sys.modules[__name__.partition(".")[0]].__version__)


def version_of(name: str) -> str | None:
    """Return the version of an installed package, ``None`` where it is not installed.

    Example:
        >>> version_of("no-such-package")
    """
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def hardware(computer: Computer, device: str) -> Hardware:
    """Return what the device is, and the most memory that was used until now."""
    machine, torch = computer.machine, sys.modules.get("torch")
    return Hardware(
        device=device,
        name=own_name(device, machine, computer.torch),
        chip=machine.chip or processor_name(),
        memory_bytes=machine.memory_bytes or installed_bytes(),
        threads=None if torch is None else int(torch.get_num_threads()),
        memory_limit=computer.limit(device),
        device_peak_bytes=None if torch is None else allocator(device).memory().peak,
        resident_peak_bytes=resident_peak(),
    )


def resident_peak() -> int | None:
    """Return the most memory that this process had, in bytes; ``None`` where the system does not say.

    macOS counts in bytes and Linux in kibibytes (``getrusage``), Windows has a count of its own.

    Example:
        >>> resident_peak() > 0
        True
    """
    if sys.platform == "win32":
        psutil = import_psutil()
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def conditions(signals: Signals, after: bool) -> Conditions:
    """Return power, heat and memory.

    Args:
        signals: What the computer says.
        after: Whether the run is over, because its reports are there.

    Example:
        >>> conditions(Signals(power_source="battery"), after=False).power_source
        'battery'
    """
    return Conditions("after" if after else "before", **{name: getattr(signals, name) for name in CONDITIONS})


def storage(environ: Mapping[str, str], model: Path | None) -> tuple[Place, ...]:
    """Return where caches and the model lie."""
    folders = cache_folders(environ, home_folder())
    return places(folders | ({"model": model} if model else {}), read_mounts(platform.system()))
