"""Which device, and why: the causes that rule a device out, the choice, and its explanation.

A cause is a condition on plain facts, the reason in words and one thing to do; a new cause is a new row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from .._render.display import MARK, Plain, Report, Shown, Table, counted, plain
from ..errors import DeviceUnavailable, OpenMedError
from .backend import MINIMUM_TORCH, TorchFacts
from .environment import UNSET_BOTH, EnvPlan
from .machine import Machine
from .request import NOBODY, DeviceRequest, Wish, canonical, winner

# From which release on torch supports MPS on which macOS, as it says itself (EmptyTensor.cpp in its binaries for macOS).
# pip does not know: it installs 2.9 to 2.11 on macOS 11, and 2.15.0 on macOS 14.
MACOS_OF_TORCH = (((2, 6), (13,)), ((2, 9), (14,)), ((2, 15), (15,)))

# What a Mac installs: from macOS 14 on the pin of binder/constraints.txt (2.13 and older have silent errors on M1 and M2 that
# it has not: pytorch#177116, #183535), and before that the last release with MPS on macOS 13, which also runs on 11.
MAC_TORCH, MACOS_13_TORCH = "torch==2.14.1", "torch==2.8.0"


def oldest_macos(release: tuple[int, ...]) -> tuple[int, ...]:
    """Return the oldest macOS on which a release of torch supports MPS; for those before 2.6, that of 2.6."""
    return max((macos for first, macos in MACOS_OF_TORCH if first <= release), default=MACOS_OF_TORCH[0][1])


def torch_for(machine: Machine) -> str:
    """Return what pip is asked for where torch is to be installed: on a Mac, a release that supports MPS on its macOS.

    Example:
        >>> torch_for(Machine("Darwin", "arm64", macos=(14, 5)))
        'torch==2.14.1'
    """
    if machine.system != "Darwin":
        return "torch"
    return MACOS_13_TORCH if machine.macos is not None and machine.macos < oldest_macos((2, 14)) else MAC_TORCH


@dataclass(frozen=True)
class Surroundings:
    """All facts that decide about one device, such as ``"cuda:1"``."""

    device: str
    machine: Machine
    torch: TorchFacts
    environ: Mapping[str, str]

    @property
    def gpus(self) -> tuple[str, ...]:
        """The names of the GPUs that torch found so far."""
        return self.torch.cuda_names or ()

    @property
    def index(self) -> int:
        """The number in ``cuda:N``; 0 where there is none."""
        return int(self.device.partition(":")[2] or 0)


@dataclass(frozen=True)
class Rejection:
    """A device that cannot be used, why, and one thing to do about it, empty where nothing can be done here."""

    device: str
    reason: str
    remedy: str


@dataclass(frozen=True)
class Cause:
    """Why a device cannot be used: when it applies, and the texts; words in braces are filled in from the facts.

    The remedy is empty where nothing can be done on this computer: nobody is sent to buy another one.
    """

    applies: Callable[[Surroundings], bool]
    reason: str
    remedy: str


ARM_PYTHON = "Install an arm64 Python and make the environment with it."
NO_X86_TORCH = "this package needs torch 2.6 or later, and PyPI has none for x86_64 Pythons on macOS"


def _needs_x86_torch(here: Surroundings) -> bool:
    """Tell whether torch is missing, or too old, for a Python for which pip finds 2.2.2 at most (pytorch#114602)."""
    machine = here.machine
    return here.torch.release < MINIMUM_TORCH and (machine.system, machine.architecture) == ("Darwin", "x86_64")


TORCH_CAUSES = (
    Cause(lambda h: _needs_x86_torch(h) and h.machine.apple_silicon, NO_X86_TORCH, ARM_PYTHON),
    Cause(_needs_x86_torch, NO_X86_TORCH, "Take it from conda-forge: conda install -c conda-forge pytorch."),
    Cause(lambda h: h.torch.version is None, "torch is not installed", "Install it: python -m pip install {install}."),
    Cause(
        lambda h: h.torch.release < MINIMUM_TORCH,
        "torch {torch} is older than 2.6, the first release that this package supports",
        "Upgrade it: python -m pip install --upgrade {install}.",
    ),
)

ON_THE_MAC = "Run on the Mac itself, outside of containers, virtual machines and sandboxes."

LINUX_ON_APPLE = Cause(
    lambda h: h.machine.system == "Linux" and h.machine.apple_silicon,
    "this is Linux on an Apple chip, as in a container on a Mac, and only macOS has MPS",
    ON_THE_MAC,
)
NO_MAC = Cause(
    lambda h: h.machine.system != "Darwin", "this computer runs {system}, and MPS is the GPU backend of macOS", ""
)
ROSETTA = Cause(
    lambda h: h.machine.apple_silicon and not h.machine.native_apple_silicon,
    "this Python is built for {architecture} and runs under Rosetta, which has no MPS",
    ARM_PYTHON,
)
INTEL = Cause(lambda h: not h.machine.apple_silicon, "this Mac has an Intel processor", "")
OLD_MACOS = Cause(
    lambda h: h.machine.macos is not None and h.machine.macos < oldest_macos(MINIMUM_TORCH),
    "macOS {macos} is older than 13, the oldest on which torch 2.6 has MPS",
    "Update macOS to 14 or later.",
)
NEW_TORCH = Cause(
    lambda h: h.machine.macos is not None and h.machine.macos < oldest_macos(h.torch.release),
    "torch {torch} supports MPS from macOS {needed} on, and this is macOS {macos}",
    "Update macOS, or install a torch for this one: python -m pip install {install}.",
)
MACOS_CAUSES = (OLD_MACOS, NEW_TORCH)
NOT_BUILT = Cause(
    lambda h: h.torch.mps_built is False,
    "torch {torch} was built without MPS",
    "Install the official build for arm64: python -m pip install --force-reinstall {install}.",
)
NO_METAL = Cause(
    lambda h: h.torch.mps_available is False,
    "torch finds no Metal device, as in a virtual machine or a sandbox",
    ON_THE_MAC,
)
BAD_WATERMARKS = Cause(
    lambda h: "watermark ratio" in (h.torch.failure("mps") or ""),
    "torch refuses the watermark ratios that it read: {failure}",
    UNSET_BOTH,
)

FAILED_PROBE = Cause(
    lambda h: bool(h.torch.failure(h.device)),
    "a tiny computation on it failed: {failure}",
    "Restart the kernel; if it fails again, use 'cpu' and report it to the maker of the driver.",
)

NO_APPLE_GPU = (LINUX_ON_APPLE, NO_MAC, ROSETTA, INTEL)
MPS_CAUSES = (*NO_APPLE_GPU, *MACOS_CAUSES, *TORCH_CAUSES, NOT_BUILT, NO_METAL, BAD_WATERMARKS, FAILED_PROBE)

MACOS = Cause(lambda h: h.machine.system == "Darwin", "this computer runs macOS, which has no CUDA", "")
NO_DRIVER = Cause(
    lambda h: h.machine.gpu_driver is False and not h.gpus,
    "no {maker} driver is loaded",
    "Install the driver if there is an {maker} GPU.",
)
CPU_BUILD = Cause(
    lambda h: h.torch.gpu_build == "",
    "torch {torch} is a build for the CPU only",
    "Install a CUDA build of torch: https://pytorch.org/get-started/locally shows the command.",
)
HIDDEN_GPUS = Cause(
    lambda h: h.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1") and not h.gpus,
    "CUDA_VISIBLE_DEVICES={visible!r} hides every GPU",
    "Unset CUDA_VISIBLE_DEVICES and restart the kernel.",
)
NO_GPU = Cause(
    lambda h: h.torch.cuda_names == (),
    "torch {torch} ({build}) finds no GPU",
    "Check with {tool} that the driver is new enough for {build}.",
)
NO_SUCH_GPU = Cause(
    lambda h: h.torch.cuda_names is not None and h.index >= len(h.gpus),
    "this computer has {count}",
    "Use {choices}.",
)

CUDA_CAUSES = (MACOS, *TORCH_CAUSES, NO_DRIVER, CPU_BUILD, HIDDEN_GPUS, NO_GPU, NO_SUCH_GPU, FAILED_PROBE)

CAUSES = {"mps": MPS_CAUSES, "cuda": CUDA_CAUSES, "cpu": TORCH_CAUSES}


def first_applying(causes: Iterable[Cause], here: Surroundings) -> Rejection | None:
    """Return what the first cause that applies has to say, ``None`` where nothing known so far speaks against the device."""
    cause = next((one for one in causes if one.applies(here)), None)
    if cause is None:
        return None
    count, build = len(here.gpus), here.torch.gpu_build or ""
    maker, tool = ("AMD", "rocm-smi") if build.startswith("ROCm") else ("NVIDIA", "nvidia-smi")
    words = {
        "torch": here.torch.version or "",
        "build": build,
        "maker": maker,
        "tool": tool,
        "system": here.machine.system,
        "architecture": here.machine.architecture,
        "macos": ".".join(str(part) for part in here.machine.macos or ()),
        "needed": ".".join(str(part) for part in oldest_macos(here.torch.release)),
        "install": torch_for(here.machine),
        "visible": here.environ.get("CUDA_VISIBLE_DEVICES", ""),
        "count": counted(count, "GPU"),
        "choices": " or ".join(repr(f"cuda:{index}") for index in range(count)),
        "failure": here.torch.failure(here.device) or "",
    }
    return Rejection(here.device, cause.reason.format(**words), cause.remedy.format(**words))


AUTO_ORDER = ("mps", "cuda", "cpu")
TAKE_BEST = "Use 'auto', which takes the best device of this computer."
# What Accelerate's str_to_bool reads as on; its switch for the CPU counts only if nobody asks for a device.
SWITCHED_ON = ("y", "yes", "t", "true", "on", "1")

FLOAT32_REASONS = {
    "mps": "float64 does not exist on MPS, and reduced precision has not been validated for this model",
    "cuda": "reduced precision has not been validated for this model",
    "cpu": "16-bit types are slower than float32 on most CPUs",
}


@dataclass(frozen=True, repr=False)
class DeviceChoice(Shown):
    """The device in force, and why.

    Attributes:
        device: ``"mps"``, ``"cuda"``, ``"cuda:N"`` or ``"cpu"``: what ``Tensor.to`` takes.
        requested: What was asked for: a device, ``"gpu"`` or ``"auto"``.
        requested_by: Who asked; ``"nobody"`` where nothing was asked for.
        reason: Why this device, in one sentence.
        certain: Whether torch, loaded, confirmed it; otherwise it is planned from the facts of the machine.
        rejected: The candidates that were ruled out, each with its reason and its remedy.
        dtype: The recommended floating-point type.
        dtype_reason: Why that type.
        moved: The models that this choice moved to the device.
        simulated: Whether the computer is a simulated one; no figure of it is one of the device.
        learned: The loaded models whose batches were measured on the device, with how many tokens run at once.
    """

    device: str
    requested: str
    requested_by: str
    reason: str
    certain: bool
    rejected: tuple[Rejection, ...] = ()
    dtype: str = "float32"
    dtype_reason: str = ""
    moved: tuple[str, ...] = ()
    simulated: bool = False
    learned: tuple[tuple[str, int], ...] = ()

    WHEN_SIMULATED = ("", "")  # Its reason names the simulated chip.

    def report(self) -> Report:
        """Return what there is to show: the device, why, the type, what moved, what was ruled out and the remedies."""
        sentences = [self.reason, f"{self.dtype}: {self.dtype_reason}."]
        if self.moved:
            sentences.append(f"Moved to {self.device}: {', '.join(self.moved)}.")
        if self.learned:
            sentences.append(f"Batches as they were measured here: {', '.join(name for name, _ in self.learned)}.")
        learned = tuple((name, f"{tokens:,}") for name, tokens in self.learned)
        figures = (Table("Measured here", ("model", "tokens at once"), learned, folded=True),) if learned else ()
        rows = tuple((one.device, one.reason, one.remedy) for one in self.rejected)
        tables = (Table("Ruled out", ("device", "why", "what to do"), rows, folded=True),) if rows else ()
        title, sure = f"Device: {self.device} ({self.grade})", () if self.certain else (f"It is {self.grade}.",)
        spoken = (self.headline, *sure, *sentences[1:])
        return Report(title, tuple(sentences), tables, figures=figures, spoken=spoken)

    @property
    def headline(self) -> str:
        """The device and why, as a person would say it."""
        device, hardware = f"{self.device}{MARK if self.simulated else ''}", self.reason.rstrip(".").partition("; ")[2]
        if self.requested != "auto":
            wish = "" if self.requested == self.device else f" as {self.requested!r}"
            return ": ".join(filter(None, (f"Device: {device}, asked for by {self.requested_by}{wish}", hardware)))
        reasons = {one.reason for one in self.rejected}  # A single one, such as a variable, speaks against every GPU.
        no_gpu = reasons.pop() if len(reasons) == 1 else f"{self.computer} has no GPU that torch can use"
        return f"Device: {device}, chosen automatically: {hardware or no_gpu}"

    @property
    def grade(self) -> str:
        """How sure this is, in a word or two."""
        sure = "confirmed" if self.certain else "planned; torch is not loaded yet"
        return f"SIMULATED, {sure}" if self.simulated else sure

    @property
    def computer(self) -> str:
        """Which computer this is about."""
        return "a SIMULATED Mac" if self.simulated else "this computer"


def resolve(
    request: DeviceRequest, machine: Machine, torch: TorchFacts, environ: Mapping[str, str] | None = None
) -> DeviceChoice:
    """Choose the device for a request: ``auto`` takes the first usable of mps, cuda and cpu, ``gpu`` the kind of the system.

    Where no candidate can be used, the remedy of the DeviceUnavailable is that of the last, which needs the least.
    """
    environ, value, rejected = environ or {}, request.value, list[Rejection]()
    switch = ""
    if value == "auto" and environ.get("ACCELERATE_USE_CPU", "").strip().lower() in SWITCHED_ON:
        switch = f"ACCELERATE_USE_CPU={environ['ACCELERATE_USE_CPU']} asks for the CPU"
    for device in AUTO_ORDER if value == "auto" else (machine.gpu if value == "gpu" else value,):
        here, kind = Surroundings(device, machine, torch, environ), device.partition(":")[0]
        if switch and device != "cpu":
            found: Rejection | None = Rejection(device, switch, "Unset ACCELERATE_USE_CPU.")
        else:
            found = first_applying(CAUSES[kind], here)
        if found is not None:
            rejected.append(found)
            continue
        return DeviceChoice(
            device=device,
            requested=value,
            requested_by=request.source,
            reason=_reason(request, here, rejected, switch),
            certain=torch.loaded and (kind == "cpu" or torch.failure(device) == ""),
            rejected=tuple(rejected),
            dtype_reason=FLOAT32_REASONS[kind],
            simulated=machine.simulated,
        )
    reasons = "; ".join(f"{one.device}: {one.reason}" if len(rejected) > 1 else one.reason for one in rejected)
    what = f"{value!r} (asked for by {request.source}) cannot be used: {reasons}."
    raise DeviceUnavailable(what, rejected[-1].remedy or TAKE_BEST)


def _reason(request: DeviceRequest, here: Surroundings, rejected: list[Rejection], switch: str) -> str:
    """Return why a device is chosen, with the name of its hardware, as one sentence."""
    if request.value != "auto":
        reason = f"{request.value!r} was asked for by {request.source}"
    else:
        others = " and ".join(one.device for one in rejected)
        asked = "No device was asked for" if request.source == NOBODY else f"'auto' was asked for by {request.source}"
        why = switch or (f"{others} cannot be used here" if others else f"{AUTO_ORDER[0]} comes first")
        reason = f"{asked}, and {why}"
    if here.device == "mps":
        return f"{reason}; the chip is {here.machine.chip or 'Apple Silicon'}."
    if here.device != "cpu" and here.index < len(here.gpus):
        return f"{reason}; the GPU is {here.gpus[here.index]}."
    return f"{reason}."


@dataclass(frozen=True)
class Candidate(Plain):
    """A device of this computer."""

    device: str  # Its name.
    rejection: Rejection | None = None  # Why it cannot be used, ``None`` where nothing known so far speaks against it.
    tried: bool = True  # Whether it has computed; the CPU need not.

    HIDDEN, ALSO = ("rejection", "tried"), ("usable", "reason", "remedy")

    @property
    def usable(self) -> bool | None:
        """Whether it can be used; ``None`` if it was not tried."""
        return False if self.rejection else True if self.tried else None

    @property
    def reason(self) -> str:
        """Why it cannot be used, or that nobody tried."""
        return self.rejection.reason if self.rejection else "" if self.tried else "no computation on it was tried yet"

    @property
    def remedy(self) -> str:
        """One thing to do, empty where there is nothing to do."""
        return self.rejection.remedy if self.rejection else "" if self.tried else f"%openmed_device {self.device}"


@dataclass(frozen=True, repr=False)
class DeviceList(Shown):
    """Every device of this computer, with why it cannot be used where it cannot.

    Attributes:
        candidates: The devices.
        choice: The choice in force, ``None`` where the wishes are in error.
    """

    candidates: tuple[Candidate, ...]
    choice: DeviceChoice | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the devices as plain mappings, ready for JSON."""
        return {"devices": plain(self.candidates), "in_force": self.choice.device if self.choice else None}

    def report(self) -> Report:
        """Return what there is to show: one row for each device."""
        in_force = None if self.choice is None else canonical(self.choice.device)
        words = {True: "usable", False: "cannot be used", None: "not tried"}
        rows = tuple(
            (one.device, "in force" if canonical(one.device) == in_force else words[one.usable], one.reason, one.remedy)
            for one in self.candidates
        )
        computer = self.choice.computer if self.choice is not None else "this computer"
        return Report(f"Devices of {computer}", tables=(Table("", ("device", "state", "why", "what to do"), rows),))


@dataclass(frozen=True, repr=False)
class Explanation(Shown):
    """The way to the choice: who wished what, what was ruled out, and what became of the environment.

    Attributes:
        chain: The wishes, the strongest first.
        choice: The choice that came out, or the error that did.
        environment: The MPS variables.
        variables: Other variables that matter, from an allow list, with secrets masked.
        unreleased: The version of a torch that is no release, and what it is, such as a nightly build; empty for a release.
    """

    chain: tuple[Wish, ...]
    choice: DeviceChoice | OpenMedError
    environment: EnvPlan
    variables: Mapping[str, str]
    unreleased: str = ""

    def report(self) -> Report:
        """Return what there is to show: the choice or the error, and up to four tables."""
        decides = winner(self.chain)
        chain = tuple((wish.source, wish.says, "decides" if wish is decides else "") for wish in self.chain)
        automatic = ("automatic", "mps, then cuda, then cpu", "" if decides else "decides")
        asked = Table("Who asks, the strongest first", ("source", "says", "result"), (*chain, automatic))
        if isinstance(self.choice, OpenMedError):
            answer = Report("Device: none", (self.choice.what, self.choice.remedy))
        else:
            answer = self.choice.report()
        others = Table("Other variables", ("variable", "value"), tuple(self.variables.items()))
        torch = (f"torch is {self.unreleased}.",) if self.unreleased else ()
        tables = (asked, *answer.tables, self.environment.table(), others)
        return replace(answer, sentences=(*answer.sentences, *torch), tables=tables)
