"""Checks of the file of ``accelerate config`` against this machine.

``accelerate launch`` reads the file whenever it exists. Here the file is read as data, so accelerate need not be installed. The
effect of each setting is defined in commands/launch.py, utils/launch.py, state.py and accelerator.py of accelerate 1.15.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

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

SHARDED_TYPES = ("FSDP", "DEEPSPEED", "MEGATRON_LM")
REDUCED_DTYPES = {"fp16": "float16", "bf16": "bfloat16"}


def accelerate_findings(environ: Mapping[str, str], machine: MachineInfo, torch: TorchInfo) -> tuple[Finding, ...]:
    """Return the findings about the file of ``accelerate config``, or nothing if there is no such file."""
    import yaml

    file = settings_file(environ)
    problem = "does not contain settings in YAML"
    try:
        settings = yaml.safe_load(file.read_text("utf-8"))  # JSON is YAML too.
        if isinstance(settings, dict):
            return launch_findings(settings, machine, torch)
    except (FileNotFoundError, NotADirectoryError):
        return ()
    except OSError as error:
        problem = f"cannot be opened: {error.strerror}"
    except (yaml.YAMLError, ValueError):  # Their messages quote lines of the file.
        pass
    return (Finding(NAME, FAILED, f"{file.name} {problem}", RECONFIGURE_REMEDY),)


def settings_file(environ: Mapping[str, str]) -> Path:
    """Return the default path that ``accelerate config`` writes and ``accelerate launch`` reads."""
    cache = environ.get("XDG_CACHE_HOME", "~/.cache")
    folder = environ.get("HF_HOME", f"{cache}/huggingface")
    if folder.startswith("~"):
        home = environ.get("HOME") or environ.get("USERPROFILE", "")
        folder = home + folder[1:]
    return Path(folder, "accelerate", "default_config.yaml")


def launch_findings(settings: Mapping[str, object], machine: MachineInfo, torch: TorchInfo) -> tuple[Finding, ...]:
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
    distributed_type = settings.get("distributed_type")
    # YAML reads NO without quotes as false, which has the same effect as 'NO'.
    distributed_type = "NO" if distributed_type is False else shorten(str(distributed_type or ""))
    num_processes = as_integer(settings.get("num_processes")) or 1
    num_machines = as_integer(settings.get("num_machines")) or 1
    local_processes = num_processes // num_machines
    gpus = len(torch.cuda_names or ())
    joins_processes = get_device(device).supports_process_groups
    supports_index = get_device(device).supports_index
    no_backend = f"torch.distributed has no backend for {device.upper()}"
    several = num_processes > 1
    # accelerate starts one process for these types. For MULTI_CPU, mpirun starts the others.
    single = distributed_type in {"NO", "MULTI_CPU"}
    # Setting, whether it has the problem, status, evidence and remedy. Only the first problem of a setting is reported.
    rules: list[tuple[str, bool, str, str, str]] = [
        (
            "use_cpu",
            device != default_device,
            WARNING,
            f"keeps scripts on the CPU, but this computer has {default_device}",
            "Set use_cpu: false, unless this is intended.",
        ),
        (
            "distributed_type",
            not distributed_type,
            FAILED,
            "missing, but accelerate launch requires it",
            RECONFIGURE_REMEDY,
        ),
        (
            "distributed_type",
            distributed_type == "MPS",
            FAILED,
            # See DistributedType of accelerate (accelerate/utils/dataclasses.py).
            "MPS is a value of old accelerate versions; current ones reject it and select MPS automatically",
            SINGLE_PROCESS_REMEDY,
        ),
        (
            "distributed_type",
            distributed_type in SHARDED_TYPES and not joins_processes,
            FAILED,
            f"{distributed_type} needs torch.distributed, which has no backend for {device.upper()}",
            SINGLE_PROCESS_REMEDY,
        ),
        (
            "num_processes",
            not single and several and not supports_index,
            FAILED,
            f"requests {num_processes:,}; without CUDA GPUs, {distributed_type} trains an independent model in each process on {device}",
            "Set distributed_type: 'NO' and num_processes: 1.",
        ),
        (
            "num_processes",
            not single and supports_index and local_processes > gpus,
            FAILED,
            f"requests {local_processes:,} on this computer, but torch finds {pluralize(gpus, 'GPU')}",
            "Set num_processes to the number of GPUs.",
        ),
        (
            "num_processes",
            single and several and not settings.get("mpirun_config"),
            WARNING,
            f"requests {num_processes:,}, but {distributed_type} starts only one",
            "Set num_processes: 1, or run accelerate config again.",
        ),
        (
            "num_machines",
            num_machines > 1 and not joins_processes,
            FAILED,
            f"requests {num_machines:,}, but {no_backend} to connect them",
            "Set num_machines: 1.",
        ),
        (
            "num_machines",
            num_machines > 1 and not settings.get("main_process_ip"),
            FAILED,
            f"requests {num_machines:,}, but main_process_ip does not name the first machine",
            "Set main_process_ip and main_process_port, or num_machines: 1.",
        ),
        (
            "mixed_precision",
            precision is False,
            FAILED,
            "YAML reads no without quotes as false, and accelerate launch raises an AttributeError",
            DISABLE_MIXED_PRECISION_REMEDY,
        ),
        (
            "mixed_precision",
            precision not in (None, "no", "fp8", *REDUCED_DTYPES),  # A list, perhaps.
            FAILED,
            f"{shorten(repr(precision))} is not a valid value",
            "Set it to 'no', 'fp16' or 'bf16'.",
        ),
        (
            "mixed_precision",
            precision == "fp8" and not supports_index,
            FAILED,
            f"fp8 requires an NVIDIA GPU, but scripts train on {device}",
            DISABLE_MIXED_PRECISION_REMEDY,
        ),
        (
            "mixed_precision",
            precision == "fp16" and device == "cpu",
            WARNING,
            "fp16 has no effect on the CPU, where accelerate computes in float32",
            DISABLE_MIXED_PRECISION_REMEDY,
        ),
        (
            "mixed_precision",
            precision == "bf16" and device == "mps" and (machine.macos_version or (14,)) < (14,),
            FAILED,
            # See is_bf16_available of accelerate (accelerate/utils/imports.py).
            "accelerate does not support bf16 on MPS before macOS 14",
            "Set mixed_precision: 'no', or update macOS.",
        ),
    ]
    problems: dict[str, Finding] = {}
    for name, applies, status, evidence, remedy in rules:
        if applies:
            problems.setdefault(name, Finding(f"{NAME}: {name}", status, evidence, remedy))
    if isinstance(precision, str) and precision in REDUCED_DTYPES and not supports_index:
        problems.setdefault("mixed_precision", _reduced_dtype_finding(precision, device, machine, torch))
    if problems:
        return tuple(problems.values())
    processes = pluralize(num_processes, "process", "processes")
    return (Finding(NAME, OK, f"{processes} on {device}, mixed precision {precision or 'no'}"),)


def _reduced_dtype_finding(precision: str, device: str, machine: MachineInfo, torch: TorchInfo) -> Finding:
    """Return the problem of a 16-bit dtype by the rules of ``nb.training.precision``. On CUDA, accelerate decides."""
    name = f"{NAME}: mixed_precision"
    try:
        policy = select_precision(device, torch.release, machine, REDUCED_DTYPES[precision])
    except ConfigurationError as error:
        return Finding(name, FAILED, error.message, error.remedy)
    notes = " ".join(policy.notes) or "Its losses may differ from those of float32."
    remedy = "Set mixed_precision: 'no', unless a short training run in both is faster with it."
    return Finding(name, WARNING, f"{precision} on {device}: {notes}", remedy)
