"""What the file of ``accelerate config`` asks for, and what of it does not fit this computer.

``accelerate launch`` reads that file whenever it is there. Here it is read as data; accelerate need not be installed. What
accelerate 1.15 makes of each setting stands in its commands/launch.py, utils/launch.py, state.py and accelerator.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...._render.display import FAILED, NOT_APPLICABLE, OK, WARNING, Finding, pluralize
from ...._utils.text import shorten
from ...._utils.validation import as_integer
from ....devices.backend import TorchInfo
from ....devices.machine import MachineInfo
from ....errors import ConfigurationError
from ....training.steps import select_precision

NAME = "accelerate config"
RECONFIGURE_REMEDY = "Run accelerate config again."
NO_16_BITS = "Set mixed_precision: 'no'."
ONE_PROCESS = "Set distributed_type: 'NO'."

SINGLE_PROCESS_TYPES = (
    "NO",
    "MULTI_CPU",
)  # For these one process is started; the second is for mpirun to start several times.
SHARDED = ("FSDP", "DEEPSPEED", "MEGATRON_LM")
SIXTEEN_BITS = {"fp16": "float16", "bf16": "bfloat16"}


def accelerate_findings(environ: Mapping[str, str], machine: MachineInfo, torch: TorchInfo) -> tuple[Finding, ...]:
    """Return what is wrong with the file of ``accelerate config`` on a computer; nothing where there is no file."""
    import yaml

    file = settings_file(environ)
    settings = None
    try:
        settings = yaml.safe_load(file.read_text("utf-8"))  # JSON is YAML too.
    except (FileNotFoundError, NotADirectoryError):
        return ()
    except OSError as error:
        return (Finding(NAME, FAILED, f"{file.name} cannot be opened: {error.strerror}", RECONFIGURE_REMEDY),)
    except (yaml.YAMLError, ValueError):  # Their texts show lines of the file.
        pass
    if not isinstance(settings, dict):
        return (Finding(NAME, FAILED, f"{file.name} does not hold settings in YAML", RECONFIGURE_REMEDY),)
    return launch_findings(settings, machine, torch)


def settings_file(environ: Mapping[str, str]) -> Path:
    """Return where ``accelerate config`` writes, and ``accelerate launch`` looks, where nobody names another file."""
    home = environ.get("HOME") or environ.get("USERPROFILE") or os.sep
    folder = Path(environ.get("HF_HOME", Path(environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface")))
    at_home = Path(home, *folder.parts[1:]) if folder.parts[:1] == ("~",) else folder
    return at_home / "accelerate" / "default_config.yaml"


def launch_findings(settings: Mapping[str, Any], machine: MachineInfo, torch: TorchInfo) -> tuple[Finding, ...]:
    """Return what of the settings does not fit the computer, or one finding that all of it does."""
    place = settings.get("compute_environment", "LOCAL_MACHINE")
    if place != "LOCAL_MACHINE":
        return (Finding(NAME, NOT_APPLICABLE, f"it sends scripts to {shorten(str(place))}, not to this computer"),)
    # The device that accelerate takes by itself: it looks for MPS first.
    best = "cpu"
    if torch.mps_built and torch.mps_available:
        best = "mps"
    elif torch.cuda_names:
        best = "cuda"
    device = "cpu" if settings.get("use_cpu") is True else best
    precision = settings.get("mixed_precision", "no")
    precision = precision.lower() if isinstance(precision, str) else precision
    misfits: dict[str, Finding] = {}  # The first for each setting.
    if device != best:
        what = f"keeps scripts on the CPU, and this computer has {best}"
        misfits["use_cpu"] = Finding("use_cpu", WARNING, what, "Set use_cpu: false, unless you want that.")
    for finding in (
        *_judged_processes(settings, device, len(torch.cuda_names or ())),
        *_judged_precision(precision, device, machine, torch),
    ):
        misfits.setdefault(finding.name, finding)
    if misfits:
        return tuple(replace(finding, name=f"{NAME}: {name}") for name, finding in misfits.items())
    processes = pluralize(as_integer(settings.get("num_processes")) or 1, "process", "processes")
    return (Finding(NAME, OK, f"{processes} on {device}, mixed precision {precision or 'no'}"),)


def _judged_processes(settings: Mapping[str, Any], device: str, gpus: int) -> Iterator[Finding]:
    """Yield what does not fit of how many processes work together, and how."""
    kind = settings.get("distributed_type")
    # A ``NO`` without quotes is false to YAML, and does what NO does.
    kind = "NO" if kind is False else shorten(str(kind or ""))
    processes = as_integer(settings.get("num_processes")) or 1
    computers = as_integer(settings.get("num_machines")) or 1
    here = processes // computers
    if not kind:
        yield Finding("distributed_type", FAILED, "there is none, and accelerate launch needs one", RECONFIGURE_REMEDY)
    elif kind == "MPS":
        what = "MPS is of an old accelerate; today's refuses it, and takes MPS by itself"
        yield Finding("distributed_type", FAILED, what, ONE_PROCESS)
    elif kind in SHARDED and device == "mps":
        what = f"{kind} needs torch.distributed, which has no backend for MPS"
        yield Finding("distributed_type", FAILED, what, ONE_PROCESS)
    if kind not in SINGLE_PROCESS_TYPES and processes > 1 and device != "cuda":
        what = f"asks for {processes:,}; without GPUs of CUDA, {kind} lets each train a model of its own on {device}"
        yield Finding("num_processes", FAILED, what, "Set distributed_type: 'NO' and num_processes: 1.")
    elif kind not in SINGLE_PROCESS_TYPES and device == "cuda" and here > gpus:
        what = f"asks for {here:,} on this computer, and torch finds {pluralize(gpus, 'GPU')}"
        yield Finding("num_processes", FAILED, what, "Set num_processes to the number of GPUs.")
    elif kind in SINGLE_PROCESS_TYPES and processes > 1 and not settings.get("mpirun_config"):
        what = f"asks for {processes:,}, and {kind} starts only one"
        yield Finding("num_processes", WARNING, what, "Set num_processes: 1, or run accelerate config again.")
    if computers > 1 and device == "mps":
        what = f"asks for {computers:,}, and torch.distributed has no backend for MPS that could join them"
        yield Finding("num_machines", FAILED, what, "Set num_machines: 1.")
    elif computers > 1 and not settings.get("main_process_ip"):
        what = f"asks for {computers:,}, and main_process_ip does not say where the first one is"
        remedy = "Set main_process_ip and main_process_port, or num_machines: 1."
        yield Finding("num_machines", FAILED, what, remedy)


def _judged_precision(precision: Any, device: str, machine: MachineInfo, torch: TorchInfo) -> Iterator[Finding]:
    """Yield what does not fit of a type.

    One of 16 bits is judged as ``nb.training.precision`` does for a loop of the person's own; CUDA is left to accelerate.
    """
    name = "mixed_precision"
    if precision is False:
        what = "no without quotes is false to YAML, with which accelerate launch ends in an AttributeError"
        yield Finding(name, FAILED, what, NO_16_BITS)
    elif precision not in (None, "no", "fp8", *SIXTEEN_BITS):  # A list, perhaps.
        what = f"accelerate does not know {shorten(repr(precision))}"
        yield Finding(name, FAILED, what, "Set it to 'no', 'fp16' or 'bf16'.")
    elif precision == "fp8" and device != "cuda":
        yield Finding(name, FAILED, f"fp8 is for GPUs of NVIDIA, and scripts train on {device}", NO_16_BITS)
    elif precision == "fp16" and device == "cpu":
        what = "fp16 has no effect on the CPU, where accelerate goes on in float32"
        yield Finding(name, WARNING, what, NO_16_BITS)
    elif precision == "bf16" and device == "mps" and machine.macos and machine.macos < (14,):
        what = "accelerate refuses bf16 on MPS before macOS 14"
        yield Finding(name, FAILED, what, "Set mixed_precision: 'no', or update macOS.")
    elif precision in SIXTEEN_BITS and device != "cuda":
        try:
            policy = select_precision(device, torch.release, machine, SIXTEEN_BITS[precision])
        except ConfigurationError as error:
            yield Finding(name, FAILED, error.message, error.remedy)
        else:
            notes = " ".join(policy.notes) or "Its losses can differ from those of float32."
            remedy = "Set mixed_precision: 'no', unless a short training in both shows that it pays."
            yield Finding(name, WARNING, f"{precision} on {device}: {notes}", remedy)
