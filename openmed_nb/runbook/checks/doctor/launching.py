"""Checks of the file of ``accelerate config`` against this machine.

``accelerate launch`` reads the file whenever it exists. Here the file is read as data, so accelerate need not be installed. What
accelerate itself rejects with an error is left to it. The effect of each setting is defined in commands/launch.py,
utils/launch.py, state.py and accelerator.py of accelerate 1.15.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ...._render.display import FAILED, NOT_APPLICABLE, OK, WARNING, Finding, pluralize
from ...._utils.text import shorten
from ...._utils.validation import as_integer
from ....devices.backend import TorchInfo
from ....devices.registry import get_device

NAME = "accelerate config"
RECONFIGURE_REMEDY = "Run accelerate config again."
SINGLE_PROCESS_REMEDY = "Set distributed_type: 'NO'."

SHARDED_TYPES = ("FSDP", "DEEPSPEED", "MEGATRON_LM")
REDUCED_DTYPES = {"fp16": "float16", "bf16": "bfloat16"}


def accelerate_findings(environ: Mapping[str, str], torch: TorchInfo) -> tuple[Finding, ...]:
    """Return the findings about the file of ``accelerate config``, or nothing if there is no such file."""
    import yaml

    file = settings_file(environ)
    problem = "does not contain settings in YAML"
    try:
        settings = yaml.safe_load(file.read_text("utf-8"))  # JSON is YAML too.
        if isinstance(settings, dict):
            return launch_findings(settings, torch)
    except (FileNotFoundError, NotADirectoryError):
        return ()
    except OSError as error:
        problem = f"cannot be opened: {error.strerror}"
    except (yaml.YAMLError, ValueError):  # Their messages quote lines of the file.
        pass
    return (Finding(NAME, FAILED, f"{file.name} {problem}", RECONFIGURE_REMEDY),)


def settings_file(environ: Mapping[str, str]) -> Path:
    """Return the default path that ``accelerate config`` writes and ``accelerate launch`` reads."""
    folder = environ.get("HF_HOME", "~/.cache/huggingface")
    home = environ.get("HOME") or environ.get("USERPROFILE", "")
    return Path(folder.replace("~", home, 1), "accelerate", "default_config.yaml")


def launch_findings(settings: Mapping[str, object], torch: TorchInfo) -> tuple[Finding, ...]:
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
    backend = get_device(device)
    distributed_type = shorten(str(settings.get("distributed_type") or "NO"))  # YAML reads NO without quotes as false.
    num_processes = as_integer(settings.get("num_processes")) or 1
    num_machines = as_integer(settings.get("num_machines")) or 1
    # accelerate starts one process for these types. For MULTI_CPU, mpirun starts the others.
    is_single = distributed_type in {"NO", "MULTI_CPU"}
    no_backend = f"torch.distributed has no backend for {device.upper()}"
    # Setting, whether it has the problem, status, evidence and remedy.
    rules = [
        (
            "use_cpu",
            device != default_device,
            WARNING,
            f"keeps scripts on the CPU, but this computer has {default_device}",
            "Set use_cpu: false, unless this is intended.",
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
            distributed_type in SHARDED_TYPES and not backend.supports_process_groups,
            FAILED,
            f"{distributed_type} needs process groups, but {no_backend}",
            SINGLE_PROCESS_REMEDY,
        ),
        (
            "num_processes",
            num_processes > 1 and not is_single and not backend.supports_index,
            FAILED,
            f"requests {num_processes:,}; without CUDA GPUs, {distributed_type} trains an independent model in each process on {device}",
            "Set distributed_type: 'NO' and num_processes: 1.",
        ),
        (
            "num_machines",
            num_machines > 1 and not backend.supports_process_groups,
            FAILED,
            f"requests {num_machines:,}, but {no_backend} to connect them",
            "Set num_machines: 1.",
        ),
    ]
    problems = [
        Finding(f"{NAME}: {name}", status, evidence, remedy)
        for name, applies, status, evidence, remedy in rules
        if applies
    ]
    precision = str(settings.get("mixed_precision") or "no").lower()
    if precision in REDUCED_DTYPES and not backend.supports_index:
        evidence = f"{precision} is not validated on {device}; losses may differ from those of float32"
        remedy = f"Set mixed_precision: 'no', or see nb.training.precision({REDUCED_DTYPES[precision]!r})."
        problems.append(Finding(f"{NAME}: mixed_precision", WARNING, evidence, remedy))
    if problems:
        return tuple(problems)
    processes = pluralize(num_processes, "process", "processes")
    return (Finding(NAME, OK, f"{processes} on {device}, mixed precision {shorten(precision)}"),)
