"""Checks of the file of ``accelerate config`` against this machine.

``accelerate launch`` reads the file whenever it exists. Here the file is read as data, so accelerate need not be installed. The
effect of each setting is defined in commands/launch.py, utils/launch.py, state.py and accelerator.py of accelerate 1.15.
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
from ....devices.registry import get_device
from ....errors import ConfigurationError
from ....training.steps import select_precision

NAME = "accelerate config"
RECONFIGURE_REMEDY = "Run accelerate config again."
DISABLE_MIXED_PRECISION_REMEDY = "Set mixed_precision: 'no'."
SINGLE_PROCESS_REMEDY = "Set distributed_type: 'NO'."

# accelerate starts one process for these types. For MULTI_CPU, mpirun starts the others.
SINGLE_PROCESS_TYPES = ("NO", "MULTI_CPU")
SHARDED_TYPES = ("FSDP", "DEEPSPEED", "MEGATRON_LM")
REDUCED_DTYPES = {"fp16": "float16", "bf16": "bfloat16"}


def accelerate_findings(environ: Mapping[str, str], machine: MachineInfo, torch: TorchInfo) -> tuple[Finding, ...]:
    """Return the findings about the file of ``accelerate config``, or nothing if there is no such file."""
    import yaml

    file = settings_file(environ)
    settings = None
    try:
        settings = yaml.safe_load(file.read_text("utf-8"))  # JSON is YAML too.
    except (FileNotFoundError, NotADirectoryError):
        return ()
    except OSError as error:
        return (Finding(NAME, FAILED, f"{file.name} cannot be opened: {error.strerror}", RECONFIGURE_REMEDY),)
    except (yaml.YAMLError, ValueError):  # Their messages quote lines of the file.
        pass
    if not isinstance(settings, dict):
        return (Finding(NAME, FAILED, f"{file.name} does not contain settings in YAML", RECONFIGURE_REMEDY),)
    return launch_findings(settings, machine, torch)


def settings_file(environ: Mapping[str, str]) -> Path:
    """Return the default path that ``accelerate config`` writes and ``accelerate launch`` reads."""
    home = environ.get("HOME") or environ.get("USERPROFILE") or os.sep
    folder = Path(environ.get("HF_HOME", Path(environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface")))
    if folder.parts[:1] == ("~",):
        folder = Path(home, *folder.parts[1:])
    return folder / "accelerate" / "default_config.yaml"


def launch_findings(settings: Mapping[str, Any], machine: MachineInfo, torch: TorchInfo) -> tuple[Finding, ...]:
    """Return the settings that do not suit the machine, or one finding that all of them do."""
    environment = settings.get("compute_environment", "LOCAL_MACHINE")
    if environment != "LOCAL_MACHINE":
        evidence = f"it runs scripts on {shorten(str(environment))}, not on this computer"
        return (Finding(NAME, NOT_APPLICABLE, evidence),)
    # accelerate checks for MPS first.
    default_device = "cpu"
    if torch.mps_built and torch.mps_available:
        default_device = "mps"
    elif torch.cuda_names:
        default_device = "cuda"
    device = "cpu" if settings.get("use_cpu") is True else default_device
    precision = settings.get("mixed_precision", "no")
    precision = precision.lower() if isinstance(precision, str) else precision
    problems: dict[str, Finding] = {}  # The first problem of each setting.
    if device != default_device:
        evidence = f"keeps scripts on the CPU, but this computer has {default_device}"
        problems["use_cpu"] = Finding("use_cpu", WARNING, evidence, "Set use_cpu: false, unless this is intended.")
    for finding in (
        *_check_processes(settings, device, len(torch.cuda_names or ())),
        *_check_precision(precision, device, machine, torch),
    ):
        problems.setdefault(finding.name, finding)
    if problems:
        return tuple(replace(finding, name=f"{NAME}: {name}") for name, finding in problems.items())
    processes = pluralize(as_integer(settings.get("num_processes")) or 1, "process", "processes")
    return (Finding(NAME, OK, f"{processes} on {device}, mixed precision {precision or 'no'}"),)


def _check_processes(settings: Mapping[str, Any], device: str, gpus: int) -> Iterator[Finding]:
    """Yield problems of the number of processes and machines."""
    distributed_type = settings.get("distributed_type")
    # YAML reads NO without quotes as false, which has the same effect as 'NO'.
    distributed_type = "NO" if distributed_type is False else shorten(str(distributed_type or ""))
    num_processes = as_integer(settings.get("num_processes")) or 1
    num_machines = as_integer(settings.get("num_machines")) or 1
    local_processes = num_processes // num_machines
    joins_processes = get_device(device).supports_process_groups
    if not distributed_type:
        yield Finding("distributed_type", FAILED, "missing, but accelerate launch requires it", RECONFIGURE_REMEDY)
    elif distributed_type == "MPS":
        evidence = "MPS is a value of old accelerate versions; current ones reject it and select MPS automatically"
        yield Finding("distributed_type", FAILED, evidence, SINGLE_PROCESS_REMEDY)
    elif distributed_type in SHARDED_TYPES and not joins_processes:
        evidence = f"{distributed_type} needs torch.distributed, which has no backend for {device.upper()}"
        yield Finding("distributed_type", FAILED, evidence, SINGLE_PROCESS_REMEDY)
    is_numbered = get_device(device).is_numbered
    if distributed_type not in SINGLE_PROCESS_TYPES and num_processes > 1 and not is_numbered:
        evidence = (
            f"requests {num_processes:,}; without CUDA GPUs, {distributed_type} trains an independent model in each process "
            f"on {device}"
        )
        yield Finding("num_processes", FAILED, evidence, "Set distributed_type: 'NO' and num_processes: 1.")
    elif distributed_type not in SINGLE_PROCESS_TYPES and is_numbered and local_processes > gpus:
        evidence = f"requests {local_processes:,} on this computer, but torch finds {pluralize(gpus, 'GPU')}"
        yield Finding("num_processes", FAILED, evidence, "Set num_processes to the number of GPUs.")
    elif distributed_type in SINGLE_PROCESS_TYPES and num_processes > 1 and not settings.get("mpirun_config"):
        evidence = f"requests {num_processes:,}, but {distributed_type} starts only one"
        yield Finding("num_processes", WARNING, evidence, "Set num_processes: 1, or run accelerate config again.")
    if num_machines > 1 and not joins_processes:
        evidence = (
            f"requests {num_machines:,}, but torch.distributed has no backend for {device.upper()} to connect them"
        )
        yield Finding("num_machines", FAILED, evidence, "Set num_machines: 1.")
    elif num_machines > 1 and not settings.get("main_process_ip"):
        evidence = f"requests {num_machines:,}, but main_process_ip does not name the first machine"
        remedy = "Set main_process_ip and main_process_port, or num_machines: 1."
        yield Finding("num_machines", FAILED, evidence, remedy)


def _check_precision(precision: Any, device: str, machine: MachineInfo, torch: TorchInfo) -> Iterator[Finding]:
    """Yield problems of the mixed precision setting.

    A 16-bit dtype follows the rules of ``nb.training.precision``. On CUDA, accelerate decides.
    """
    name = "mixed_precision"
    if precision is False:
        evidence = "YAML reads no without quotes as false, and accelerate launch raises an AttributeError"
        yield Finding(name, FAILED, evidence, DISABLE_MIXED_PRECISION_REMEDY)
    elif precision not in (None, "no", "fp8", *REDUCED_DTYPES):  # A list, perhaps.
        evidence = f"{shorten(repr(precision))} is not a valid value"
        yield Finding(name, FAILED, evidence, "Set it to 'no', 'fp16' or 'bf16'.")
    elif precision == "fp8" and device != "cuda":
        yield Finding(
            name, FAILED, f"fp8 requires an NVIDIA GPU, but scripts train on {device}", DISABLE_MIXED_PRECISION_REMEDY
        )
    elif precision == "fp16" and device == "cpu":
        evidence = "fp16 has no effect on the CPU, where accelerate computes in float32"
        yield Finding(name, WARNING, evidence, DISABLE_MIXED_PRECISION_REMEDY)
    elif precision == "bf16" and device == "mps" and machine.macos and machine.macos < (14,):
        evidence = "accelerate does not support bf16 on MPS before macOS 14"
        yield Finding(name, FAILED, evidence, "Set mixed_precision: 'no', or update macOS.")
    elif precision in REDUCED_DTYPES and device != "cuda":
        try:
            policy = select_precision(device, torch.release, machine, REDUCED_DTYPES[precision])
        except ConfigurationError as error:
            yield Finding(name, FAILED, error.message, error.remedy)
        else:
            notes = " ".join(policy.notes) or "Its losses may differ from those of float32."
            remedy = "Set mixed_precision: 'no', unless a short training run in both is faster with it."
            yield Finding(name, WARNING, f"{precision} on {device}: {notes}", remedy)
