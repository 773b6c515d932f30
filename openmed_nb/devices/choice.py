"""Which device, and why: the rules of availability, the choice, its explanation.

Why a device cannot be used here: one table of rules for each kind of device, read from the top.

A rule is a condition on plain facts, the reason in words and one thing to do. A new cause is a new row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..display import Report, Shown, Table
from ..errors import DeviceUnavailable, OpenMedError
from .backend import MINIMUM_TORCH, TorchFacts
from .environment import UNSET_BOTH, EnvPlan
from .machine import Machine
from .request import NOBODY, DeviceRequest, Wish, canonical, kind_of, masked, winner

MINIMUM_MACOS = (14,)
"""The oldest macOS whose MPS torch supports (``EmptyTensor.cpp`` of torch 2.9 and later)."""

FIRST_TORCH_WITH_MPS = (1, 13)
"""The first torch whose MPS backend left its prototype state."""


@dataclass(frozen=True)
class Surroundings:
    """All facts that decide about one device.

    Attributes:
        device: The device in question, such as ``"cuda:1"``.
        machine: The facts of this computer.
        torch: What is known of torch.
        environ: The environment variables.
    """

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
    """A device that cannot be used, why, and one thing to do about it."""

    device: str
    reason: str
    remedy: str

    def to_dict(self) -> dict[str, str]:
        """Return the rejection as a mapping of strings."""
        return {"device": self.device, "reason": self.reason, "remedy": self.remedy}


@dataclass(frozen=True)
class Rule:
    """One cause: when it applies, and what to say then; words in braces are filled in from the facts."""

    applies: Callable[[Surroundings], bool]
    reason: str
    remedy: str


TORCH_RULES = (
    Rule(lambda h: h.torch.version is None, "torch is not installed", "Install it: python -m pip install torch."),
    Rule(
        lambda h: h.device == "mps" and h.torch.release < FIRST_TORCH_WITH_MPS,
        "torch {torch} is older than 1.13, the first release with a usable MPS backend",
        "Upgrade it: python -m pip install --upgrade torch.",
    ),
    Rule(
        lambda h: (
            h.torch.release < MINIMUM_TORCH and h.machine.system == "Darwin" and h.machine.architecture == "x86_64"
        ),
        "torch {torch} is older than 2.6, and no newer one is made for x86_64 Pythons on macOS",
        "Use an arm64 Python on a Mac with Apple Silicon.",
    ),
    Rule(
        lambda h: h.torch.release < MINIMUM_TORCH,
        "torch {torch} is older than 2.6, the first release that this package supports",
        "Upgrade it: python -m pip install --upgrade torch.",
    ),
)

NO_MAC = Rule(
    lambda h: h.machine.system != "Darwin",
    "this computer runs {system}, and MPS is the GPU backend of macOS",
    "Use a Mac with Apple Silicon for MPS.",
)
ROSETTA = Rule(
    lambda h: h.machine.apple_silicon and not h.machine.native_apple_silicon,
    "this Python is built for {architecture} and runs under Rosetta, which has no MPS",
    "Install an arm64 Python and make the environment with it.",
)
INTEL = Rule(
    lambda h: not h.machine.apple_silicon,
    "this Mac has an Intel processor",
    "Use a Mac with Apple Silicon for MPS.",
)
OLD_MACOS = Rule(
    lambda h: h.machine.macos is not None and h.machine.macos < MINIMUM_MACOS,
    "macOS {macos} is older than 14, the oldest that the MPS backend of current torch supports",
    "Update macOS to 14 or later.",
)
NOT_BUILT = Rule(
    lambda h: h.torch.mps_built is False,
    "torch {torch} was built without MPS",
    "Install the official build for arm64: python -m pip install --force-reinstall torch.",
)
NO_METAL = Rule(
    lambda h: h.torch.mps_available is False,
    "torch finds no Metal device, as in a virtual machine or a sandbox",
    "Run on the Mac itself, outside of virtual machines and sandboxes.",
)
BAD_WATERMARKS = Rule(
    lambda h: "watermark ratio" in (h.torch.failure("mps") or ""),
    "torch refuses the watermark ratios that it read: {failure}",
    UNSET_BOTH,
)

MPS_RULES = (NO_MAC, ROSETTA, INTEL, OLD_MACOS, *TORCH_RULES, NOT_BUILT, NO_METAL, BAD_WATERMARKS)

MACOS = Rule(
    lambda h: h.machine.system == "Darwin",
    "this computer runs macOS, which has no CUDA",
    "Use a computer with an NVIDIA GPU for CUDA.",
)
NO_DRIVER = Rule(
    lambda h: h.machine.gpu_driver is False and not h.gpus,
    "no {maker} driver is loaded",
    "Use a computer with an {maker} GPU, and install its driver.",
)
CPU_BUILD = Rule(
    lambda h: h.torch.gpu_build == "",
    "torch {torch} is a build for the CPU only",
    "Install a CUDA build of torch: https://pytorch.org/get-started/locally shows the command.",
)
HIDDEN_GPUS = Rule(
    lambda h: h.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1") and not h.gpus,
    "CUDA_VISIBLE_DEVICES={visible!r} hides every GPU",
    "Unset CUDA_VISIBLE_DEVICES and restart the kernel.",
)
NO_GPU = Rule(
    lambda h: h.torch.cuda_names == (),
    "torch {torch} ({build}) finds no GPU",
    "Check with {tool} that the driver is new enough for {build}.",
)
NO_SUCH_GPU = Rule(
    lambda h: h.torch.cuda_names is not None and h.index >= len(h.gpus),
    "this computer has {count}",
    "Use {choices}.",
)

CUDA_RULES = (MACOS, *TORCH_RULES, NO_DRIVER, CPU_BUILD, HIDDEN_GPUS, NO_GPU, NO_SUCH_GPU)

RULES = {"mps": MPS_RULES, "cuda": CUDA_RULES, "cpu": TORCH_RULES}

PROBE_RULE = Rule(
    lambda h: bool(h.torch.failure(h.device)),
    "a tiny computation on it failed: {failure}",
    "Restart the kernel; if it fails again, use 'cpu' and report it to the maker of the driver.",
)


def rejection(here: Surroundings) -> Rejection | None:
    """Return why a device cannot be used, ``None`` where nothing known so far speaks against it.

    Example:
        >>> linux = Machine("Linux", "x86_64", gpu_driver=False)
        >>> rejection(Surroundings("mps", linux, TorchFacts("2.13.0"), {})).reason
        'this computer runs Linux, and MPS is the GPU backend of macOS'
        >>> rejection(Surroundings("cpu", linux, TorchFacts("2.13.0"), {})) is None
        True
    """
    return first_applying((*RULES[kind_of(here.device)], PROBE_RULE), here)


def first_applying(rules: Iterable[Rule], here: Surroundings) -> Rejection | None:
    """Return what the first rule that applies has to say, ``None`` where none applies.

    Example:
        >>> mac = Machine("Darwin", "x86_64", apple_silicon=True, translated=True)
        >>> first_applying((ROSETTA, OLD_MACOS), Surroundings("mps", mac, TorchFacts("2.13.0"), {})).remedy
        'Install an arm64 Python and make the environment with it.'
    """
    for rule in rules:
        if rule.applies(here):
            words = _words(here)
            return Rejection(here.device, rule.reason.format(**words), rule.remedy.format(**words))
    return None


def _words(here: Surroundings) -> dict[str, str]:
    count = len(here.gpus)
    maker, tool = ("AMD", "rocm-smi") if (here.torch.gpu_build or "").startswith("ROCm") else ("NVIDIA", "nvidia-smi")
    return {
        "torch": here.torch.version or "",
        "build": here.torch.gpu_build or "",
        "maker": maker,
        "tool": tool,
        "system": here.machine.system,
        "architecture": here.machine.architecture,
        "macos": ".".join(str(part) for part in here.machine.macos or ()),
        "visible": here.environ.get("CUDA_VISIBLE_DEVICES", ""),
        "count": f"{count} GPU" + ("s" if count != 1 else ""),
        "choices": " or ".join(repr(f"cuda:{index}") for index in range(count)),
        "failure": here.torch.failure(here.device) or "",
    }


AUTO_ORDER = ("mps", "cuda", "cpu")

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

    def to_dict(self) -> dict[str, Any]:
        """Return the choice as plain mappings, lists and strings, ready for JSON."""
        plain = {**vars(self), "moved": list(self.moved)}
        return {**plain, "rejected": [rejection.to_dict() for rejection in self.rejected]}

    def report(self) -> Report:
        """Return what there is to show: the device, why, the type, what moved, what was ruled out and the remedies."""
        sentences = [self.reason, f"{self.dtype}: {self.dtype_reason}."]
        if self.moved:
            sentences.append(f"Moved to {self.device}: {', '.join(self.moved)}.")
        tables = (rejection_table(self.rejected),) if self.rejected else ()
        return Report(f"Device: {self.device} ({self.grade})", tuple(sentences), tables=tables)

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
    """Choose the device for a request.

    Args:
        request: The wish, and whose it is.
        machine: The facts of this computer.
        torch: What is known of torch: planned from its files, or confirmed by torch itself.
        environ: The environment variables.

    Returns:
        The choice. ``auto`` takes the first usable of mps, cuda and cpu, ``gpu`` the kind of this system.

    Raises:
        DeviceUnavailable: Where no candidate can be used; its remedy is that of the last, which needs the least.

    Example:
        >>> linux = Machine("Linux", "x86_64", gpu_driver=False)
        >>> choice = resolve(DeviceRequest("auto", "nobody"), linux, TorchFacts("2.13.0+cpu", gpu_build=""))
        >>> choice.device, [rejected.device for rejected in choice.rejected], choice.certain
        ('cpu', ['mps', 'cuda'], False)
    """
    environ = environ or {}
    switch = _cpu_switch(request, environ)
    rejected: list[Rejection] = []
    for device in candidates(request, machine):
        found = _switched_off(device, switch) or rejection(Surroundings(device, machine, torch, environ))
        if found is None:
            reason = _reason(request, tuple(rejected), switch) + _hardware(device, machine, torch)
            choice = _choice(request, device, f"{reason}.", tuple(rejected), torch)
            return replace(choice, simulated=machine.simulated)
        rejected.append(found)
    raise unavailable(request, rejected)


def candidates(request: DeviceRequest, machine: Machine) -> tuple[str, ...]:
    """Return the devices that would satisfy a request, the best first; macOS has no CUDA, and only macOS has MPS.

    Example:
        >>> candidates(DeviceRequest("gpu", "argument"), Machine("Darwin", "arm64"))
        ('mps',)
    """
    gpu = "mps" if machine.system == "Darwin" else "cuda"
    return {"auto": AUTO_ORDER, "gpu": (gpu,)}.get(request.value, (request.value,))


def needs_probe(choice: DeviceChoice, torch: TorchFacts) -> bool:
    """Tell whether the chosen device still has to prove itself by computing; the CPU has not."""
    return choice.device != "cpu" and torch.failure(choice.device) is None


def unavailable(request: DeviceRequest, rejected: Iterable[Rejection]) -> DeviceUnavailable:
    """Return the error for a request that no device satisfies."""
    found = list(rejected)
    reasons = "; ".join(f"{one.device}: {one.reason}" if len(found) > 1 else one.reason for one in found)
    return DeviceUnavailable(
        f"{request.value!r} (asked for by {request.source}) cannot be used: {reasons}.", found[-1].remedy
    )


def rejection_table(rejected: tuple[Rejection, ...]) -> Table:
    """Return the table of the devices that were ruled out."""
    rows = tuple((one.device, one.reason, one.remedy) for one in rejected)
    return Table("Ruled out", ("device", "why", "what to do"), rows)


def accelerate_wants_cpu(environ: Mapping[str, str]) -> bool:
    """Tell whether Accelerate's switch for the CPU is on: in the words of its ``str_to_bool``, perhaps between spaces.

    Example:
        >>> accelerate_wants_cpu({"ACCELERATE_USE_CPU": "True"}), accelerate_wants_cpu({"ACCELERATE_USE_CPU": "no"})
        (True, False)
    """
    return environ.get("ACCELERATE_USE_CPU", "").strip().lower() in ("y", "yes", "t", "true", "on", "1")


def _cpu_switch(request: DeviceRequest, environ: Mapping[str, str]) -> str:
    """Return what switches the GPUs off for a request, empty where nothing does."""
    off = request.value == "auto" and accelerate_wants_cpu(environ)
    return f"ACCELERATE_USE_CPU={environ['ACCELERATE_USE_CPU']} asks for the CPU" if off else ""


def _switched_off(device: str, switch: str) -> Rejection | None:
    return Rejection(device, switch, "Unset ACCELERATE_USE_CPU.") if switch and device != "cpu" else None


def _choice(
    request: DeviceRequest, device: str, reason: str, rejected: tuple[Rejection, ...], torch: TorchFacts
) -> DeviceChoice:
    kind = kind_of(device)
    return DeviceChoice(
        device=device,
        requested=request.value,
        requested_by=request.source,
        reason=reason,
        certain=torch.loaded and (kind == "cpu" or torch.failure(device) == ""),
        rejected=rejected,
        dtype_reason=FLOAT32_REASONS[kind],
    )


def _reason(request: DeviceRequest, rejected: tuple[Rejection, ...], switch: str) -> str:
    if request.asks:
        return f"{request.value!r} was asked for by {request.source}"
    asked = "No device was asked for" if request.source == NOBODY else f"'auto' was asked for by {request.source}"
    others = " and ".join(one.device for one in rejected)
    why = switch or (f"{others} cannot be used here" if others else f"{AUTO_ORDER[0]} comes first")
    return f"{asked}, and {why}"


def _hardware(device: str, machine: Machine, torch: TorchFacts) -> str:
    if device == "mps":
        return f"; the chip is {machine.chip or 'Apple Silicon'}"
    index = int(device.partition(":")[2] or 0)
    names = torch.cuda_names or ()
    return f"; the GPU is {names[index]}" if device != "cpu" and index < len(names) else ""


@dataclass(frozen=True)
class Candidate:
    """A device of this computer.

    Attributes:
        device: Its name.
        rejection: Why it cannot be used, ``None`` where nothing known so far speaks against it.
        tried: Whether it has computed; the CPU need not.
    """

    device: str
    rejection: Rejection | None = None
    tried: bool = True

    @property
    def usable(self) -> bool | None:
        """Whether it can be used; ``None`` where nobody tried."""
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
        names = ("device", "usable", "reason", "remedy")
        devices = [{name: getattr(one, name) for name in names} for one in self.candidates]
        return {"devices": devices, "in_force": self.choice.device if self.choice else None}

    def report(self) -> Report:
        """Return what there is to show: one row for each device."""
        rows = tuple((one.device, self._state(one), one.reason, one.remedy) for one in self.candidates)
        computer = self.choice.computer if self.choice is not None else "this computer"
        return Report(f"Devices of {computer}", tables=(Table("", ("device", "state", "why", "what to do"), rows),))

    def _state(self, one: Candidate) -> str:
        if self.choice is not None and canonical(self.choice.device) == canonical(one.device):
            return "in force"
        return {True: "usable", False: "cannot be used", None: "not tried"}[one.usable]


@dataclass(frozen=True, repr=False)
class Explanation(Shown):
    """The way to the choice: who wished what, what was ruled out, and what became of the environment.

    Attributes:
        chain: The wishes, the strongest first.
        choice: The choice that came out, or the error that did.
        environment: The MPS variables.
        variables: Other variables that matter, from an allow list, with secrets masked.
    """

    chain: tuple[Wish, ...]
    choice: DeviceChoice | OpenMedError
    environment: EnvPlan
    variables: Mapping[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain mappings, lists and strings, ready for JSON."""
        return {
            "chain": [{"source": wish.source, "says": _says(wish)} for wish in self.chain],
            "choice": self.choice.to_dict(),
            "environment": self.environment.to_dict(),
            "variables": dict(self.variables),
        }

    def report(self) -> Report:
        """Return what there is to show: the choice or the error, and up to four tables."""
        decides = winner(self.chain)
        chain = tuple((wish.source, _says(wish), "decides" if wish is decides else "") for wish in self.chain)
        automatic = ("automatic", "mps, then cuda, then cpu", "" if decides else "decides")
        tables = [Table("Who asks, the strongest first", ("source", "says", "result"), (*chain, automatic))]
        if isinstance(self.choice, OpenMedError):
            answer = Report("Device: none", (self.choice.what, self.choice.remedy))
        else:
            answer = self.choice.report()
        others = Table("Other variables", ("variable", "value"), tuple(self.variables.items()))
        return replace(answer, tables=(*tables, *answer.tables, self.environment.table(), others))


def _says(wish: Wish) -> str:
    return "(nothing)" if wish.spelling is None else masked(wish.source, wish.spelling)
