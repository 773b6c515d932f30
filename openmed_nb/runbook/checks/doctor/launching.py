"""What the file of ``accelerate config`` asks for, and what of it does not fit this computer.

``accelerate launch`` reads that file whenever it is there. Here it is read as data; accelerate need not be installed. What
accelerate 1.15 makes of each setting stands in its commands/launch.py, utils/launch.py, state.py and accelerator.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...._render.display import FAILED, NOT_APPLICABLE, OK, WARNING, Finding, counted
from ...._utils.text import shorten
from ...._utils.validation import whole_number
from ....devices.backend import TorchFacts
from ....devices.machine import Machine
from ....errors import ConfigurationError
from ....training.steps import autocast_policy

NAME = "accelerate config"
AGAIN = "Run accelerate config again."

HERE = "LOCAL_MACHINE"
ONE = "NO"  # The type of a training in one process.
SINGLE = (ONE, "MULTI_CPU")  # For these one process is started; the second is for mpirun to start several times.
SHARDED = ("FSDP", "DEEPSPEED", "MEGATRON_LM")
SIXTEEN_BITS = {"fp16": "float16", "bf16": "bfloat16"}
PRECISIONS = (None, "no", "fp8", *SIXTEEN_BITS)


@dataclass(frozen=True)
class Launch:
    """What ``accelerate launch`` would do on a computer, as the file of settings has it."""

    settings: Mapping[str, Any]
    machine: Machine
    torch: TorchFacts

    @property
    def best(self) -> str:
        """The device that accelerate takes by itself: it looks for MPS first."""
        mps = self.torch.mps_built and self.torch.mps_available
        return "mps" if mps else "cuda" if self.torch.cuda_names else "cpu"

    @property
    def device(self) -> str:
        """The device that it takes with these settings."""
        return "cpu" if self.settings.get("use_cpu") is True else self.best

    @property
    def kind(self) -> str:
        """How processes work together; a ``NO`` without quotes is false to YAML, and does what NO does."""
        kind = self.settings.get("distributed_type")
        return ONE if kind is False else shorten(str(kind or ""))

    @property
    def computers(self) -> int:
        return whole_number(self.settings.get("num_machines")) or 1

    @property
    def processes(self) -> int:
        """How many processes there are to be, on all computers."""
        return whole_number(self.settings.get("num_processes")) or 1

    @property
    def here(self) -> int:
        """How many processes there are to be on this computer."""
        return self.processes // self.computers

    @property
    def macos(self) -> tuple[int, ...]:
        return self.machine.macos or (99,)  # One that is not known is not at fault.

    @property
    def gpus(self) -> int:
        return len(self.torch.cuda_names or ())

    @property
    def precision(self) -> Any:
        precision = self.settings.get("mixed_precision", "no")
        return precision.lower() if isinstance(precision, str) else precision


@dataclass(frozen=True)
class Unfit:
    """Why a setting does not fit: when it applies, and the texts; words in braces are filled in, ``{0.kind}`` from the launch."""

    setting: str
    status: str
    applies: Callable[[Launch], bool]
    evidence: str
    remedy: str = AGAIN


NO_16_BITS = "Set mixed_precision: 'no'."
UNFIT = (
    Unfit("distributed_type", FAILED, lambda h: not h.kind, "there is none, and accelerate launch needs one"),
    Unfit(
        "distributed_type", FAILED, lambda h: h.kind == "MPS",
        "MPS is of an old accelerate; today's refuses it, and takes MPS by itself", "Set distributed_type: 'NO'."
    ),
    Unfit(
        "distributed_type", FAILED, lambda h: h.kind in SHARDED and h.device == "mps",
        "{0.kind} needs torch.distributed, which has no backend for MPS", "Set distributed_type: 'NO'."
    ),
    Unfit(
        "use_cpu", WARNING, lambda h: h.device != h.best,
        "keeps scripts on the CPU, and this computer has {0.best}", "Set use_cpu: false, unless you want that."
    ),
    Unfit(
        "num_processes", FAILED, lambda h: h.kind not in SINGLE and h.processes > 1 and h.device != "cuda",
        "asks for {0.processes:,}; without GPUs of CUDA, {0.kind} lets each train a model of its own on {0.device}",
        "Set distributed_type: 'NO' and num_processes: 1."
    ),
    Unfit(
        "num_processes", FAILED, lambda h: h.device == "cuda" and h.kind not in SINGLE and h.here > h.gpus,
        "asks for {0.here:,} on this computer, and torch finds {gpus}", "Set num_processes to the number of GPUs."
    ),
    Unfit(
        "num_processes", WARNING, lambda h: h.kind in SINGLE and h.processes > 1 and not h.settings.get("mpirun_config"),
        "asks for {0.processes:,}, and {0.kind} starts only one",
        "Set num_processes: 1, or run accelerate config again."
    ),
    Unfit(
        "num_machines", FAILED, lambda h: h.computers > 1 and h.device == "mps",
        "asks for {0.computers:,}, and torch.distributed has no backend for MPS that could join them", "Set num_machines: 1."
    ),
    Unfit(
        "num_machines", FAILED, lambda h: h.computers > 1 and not h.settings.get("main_process_ip"),
        "asks for {0.computers:,}, and main_process_ip does not say where the first one is",
        "Set main_process_ip and main_process_port, or num_machines: 1."
    ),
    Unfit(
        "mixed_precision", FAILED, lambda h: h.precision is False,
        "no without quotes is false to YAML, with which accelerate launch ends in an AttributeError", NO_16_BITS
    ),
    Unfit(
        "mixed_precision", FAILED, lambda h: h.precision not in PRECISIONS,
        "accelerate does not know {precision}", "Set it to 'no', 'fp16' or 'bf16'."
    ),
    Unfit(
        "mixed_precision", WARNING, lambda h: (h.precision, h.device) == ("fp16", "cpu"),
        "fp16 has no effect on the CPU, where accelerate goes on in float32", NO_16_BITS
    ),
    Unfit(
        "mixed_precision", FAILED, lambda h: h.precision == "fp8" and h.device != "cuda",
        "fp8 is for GPUs of NVIDIA, and scripts train on {0.device}", NO_16_BITS
    ),
    Unfit(
        "mixed_precision", FAILED, lambda h: (h.precision, h.device) == ("bf16", "mps") and h.macos < (14,),
        "accelerate refuses bf16 on MPS before macOS 14", "Set mixed_precision: 'no', or update macOS."
    ),
)  # fmt: skip


def accelerate_findings(environ: Mapping[str, str], machine: Machine, torch: TorchFacts) -> tuple[Finding, ...]:
    """Return what is wrong with the file of ``accelerate config`` on a computer; nothing where there is no file."""
    settings = read_settings(settings_file(environ))
    if settings is None or isinstance(settings, Finding):
        return (settings,) if settings else ()
    return launch_findings(Launch(settings, machine, torch))


def launch_findings(launch: Launch) -> tuple[Finding, ...]:
    """Return what of the settings does not fit the computer, or one finding that all of it does."""
    place = launch.settings.get("compute_environment", HERE)
    if place != HERE:
        return (Finding(NAME, NOT_APPLICABLE, f"it sends scripts to {shorten(str(place))}, not to this computer"),)
    words = {"gpus": counted(launch.gpus, "GPU"), "precision": shorten(repr(launch.precision))}
    found: dict[str, Finding] = {}  # The first for each setting.
    for one in UNFIT:
        if one.setting not in found and one.applies(launch):
            text = one.evidence.format(launch, **words)
            found[one.setting] = Finding(f"{NAME}: {one.setting}", one.status, text, one.remedy)
    if str(launch.precision) in SIXTEEN_BITS and launch.device != "cuda":
        found.setdefault("mixed_precision", _sixteen_bits(launch))
    processes = counted(launch.processes, "process", "processes")
    fits = f"{processes} on {launch.device}, mixed precision {launch.precision or 'no'}"
    return tuple(found.values()) or (Finding(NAME, OK, fits),)


def _sixteen_bits(launch: Launch) -> Finding:
    """Judge a type of 16 bits as ``nb.training.precision`` does for a loop of the person's own; CUDA is left to accelerate."""
    name, dtype = f"{NAME}: mixed_precision", SIXTEEN_BITS[launch.precision]
    try:
        policy = autocast_policy(launch.device, launch.torch.release, launch.machine, dtype)
    except ConfigurationError as error:
        return Finding(name, FAILED, error.what, error.remedy)
    notes = " ".join(policy.notes) or "Its losses can differ from those of float32."
    remedy = "Set mixed_precision: 'no', unless a short training in both shows that it pays."
    return Finding(name, WARNING, f"{launch.precision} on {launch.device}: {notes}", remedy)


def settings_file(environ: Mapping[str, str]) -> Path:
    """Return where ``accelerate config`` writes, and ``accelerate launch`` looks, where nobody names another file."""
    home = environ.get("HOME") or environ.get("USERPROFILE") or os.sep
    folder = Path(environ.get("HF_HOME", Path(environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface")))
    at_home = Path(home, *folder.parts[1:]) if folder.parts[:1] == ("~",) else folder
    return at_home / "accelerate" / "default_config.yaml"


def read_settings(file: Path) -> Mapping[str, Any] | Finding | None:
    """Return the settings in a file of ``accelerate config``, why it cannot be read, or ``None`` where there is none."""
    import yaml

    try:
        settings = yaml.safe_load(file.read_text("utf-8"))  # JSON is YAML too.
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        return Finding(NAME, FAILED, f"{file.name} cannot be opened: {error.strerror}", AGAIN)
    except (yaml.YAMLError, ValueError):  # Their texts show lines of the file.
        settings = None
    if not isinstance(settings, dict):
        return Finding(NAME, FAILED, f"{file.name} does not hold settings in YAML", AGAIN)
    return settings
