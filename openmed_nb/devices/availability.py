"""Why a device cannot be used here: one table of rules for each kind of device, read from the top.

A rule is a condition on plain facts, the reason in words and one thing to do. A new cause is a new row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from .backend import MINIMUM_TORCH, TorchFacts
from .environment import UNSET_BOTH
from .machine import Machine
from .request import kind_of

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
