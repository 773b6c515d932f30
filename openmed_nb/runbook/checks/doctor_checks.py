"""Checks of the doctor, in the order of the report: each turns facts into findings.

Most problems of a device are rejection rules of its class in ``devices``. A row of ``SYSTEM_CHECKS`` names the rules that fail
the check and those that make it meaningless.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from ..._render.display import FAILED, NOT_APPLICABLE, OK, UNKNOWN, WARNING, Finding, pluralize
from ..._utils.text import shorten
from ..._utils.validation import as_integer
from ...devices import cuda, mps
from ...devices.backend import TENSOR_LOCK, TorchInfo
from ...devices.choice import DeviceChoice
from ...devices.device import FAILED_PROBE, NO_TORCH, OLD_TORCH, DeviceFacts, RejectionRule
from ...devices.environment import CONFLICT, NOT_FOR_DEVICE, SET_BY, EnvPlan, EnvSetting
from ...devices.machine import MachineInfo, distribution_of, format_device
from ...devices.moving import get_module, unwrap_model
from ...devices.registry import get_device
from ...devices.request import normalize_device
from ...devices.system_status import SystemStatus
from ...errors import OpenMedError
from ...models.config import normalize_dtype
from ...models.loading import INT8, is_quantized

# Names of findings that the verdict reads as well.
COMPUTATION = "computation"
SILENT_ERRORS = "known silent errors"

if TYPE_CHECKING:
    from importlib.metadata import Distribution
    from types import ModuleType

    import torch

    from ...annotation.pipeline import AnnotationPipeline
    from ...models.loading import LoadedModel
    from .silent_errors import ProbeOutcome


@dataclass(frozen=True)
class ComputationCheck:
    """Result of test computations on a device.

    Attributes:
        device: Device that was tested.
        result_device: Device of the result as reported by torch, or an empty string if there is no result.
        failure: Reason of the failure, or an empty string if the result matches the CPU.
        dtypes: Reason of the failure for each tested dtype, or an empty string if it works.
        probes: Outcomes of the probes of known silent errors.
    """

    device: str
    result_device: str = ""
    failure: str = ""
    dtypes: Mapping[str, str] = field(default_factory=dict)
    probes: tuple[ProbeOutcome, ...] = ()


@dataclass(frozen=True)
class SystemFacts:
    """Facts that the doctor evaluates.

    Attributes:
        python: Python version.
        machine: Hardware and operating system.
        torch: Build and devices of torch.
        choice: Active device, or the error of the device request.
        environment: Effect of the MPS environment variables.
        torch_error: Error of the torch import, or ``None`` if torch can be imported.
        environ: Environment variables that the checks read, see ``CHECKED_VARIABLES``.
        computation: Test computations on the active device, or ``None`` if there is none.
        rejected_computation: Test computations on a GPU that was rejected because of incorrect results, or ``None``.
        packages: Findings about packages.
        launch_settings: Findings about the settings of ``accelerate launch``.
        system_status: System status.
        models: Findings about each model.
    """

    python: str
    machine: MachineInfo
    torch: TorchInfo
    choice: DeviceChoice | OpenMedError
    environment: EnvPlan
    torch_error: OpenMedError | None = None
    environ: Mapping[str, str] = field(default_factory=dict)
    computation: ComputationCheck | None = None
    rejected_computation: ComputationCheck | None = None
    packages: tuple[Finding, ...] = ()
    launch_settings: tuple[Finding, ...] = ()
    system_status: SystemStatus = field(default_factory=SystemStatus)
    models: tuple[Finding, ...] = ()


# Environment variables that the rejection rules of ``SYSTEM_CHECKS`` read.
CHECKED_VARIABLES = ("CUDA_VISIBLE_DEVICES",)

# Rule that only the doctor adds to those of the devices.
NOT_LOADED = "torch is not loaded"

# Groups of rejection rules.
TORCH_RULES = (NO_TORCH, OLD_TORCH)
APPLE_GPU_RULES = (mps.LINUX_ON_APPLE, mps.NO_MAC, mps.ROSETTA, mps.INTEL)
MACOS_RULES = (mps.OLD_MACOS, mps.NEW_TORCH)


@dataclass(frozen=True)
class RuleCheck:
    """A check of the machine that evaluates the rejection rules of a device.

    Attributes:
        name: Name of the finding.
        device: Device whose rejection rules are evaluated.
        fail_if: Names of the rules that fail the check.
        skip_if: Names of the rules that make the check meaningless. The first match gives the reason.
        warn_if: Names of the rules that the user may have intended. They take precedence over ``fail_if``.
    """

    name: str
    device: str
    fail_if: tuple[str, ...]
    skip_if: tuple[str, ...] = ()
    warn_if: tuple[str, ...] = ()


SYSTEM_CHECKS = (
    RuleCheck("Python", "mps", (mps.ROSETTA,)),
    RuleCheck("macOS", "mps", MACOS_RULES, skip_if=(mps.LINUX_ON_APPLE, mps.NO_MAC, mps.INTEL)),
    RuleCheck("torch", "cpu", TORCH_RULES),
    RuleCheck("MPS in torch", "mps", (mps.NOT_BUILT,), skip_if=(*APPLE_GPU_RULES, NOT_LOADED, *TORCH_RULES)),
    RuleCheck(
        "MPS",
        "mps",
        (mps.NO_METAL, mps.BAD_WATERMARKS, FAILED_PROBE),
        skip_if=(*APPLE_GPU_RULES, *MACOS_RULES, NOT_LOADED, *TORCH_RULES, mps.NOT_BUILT),
    ),
    RuleCheck(
        "CUDA",
        "cuda",
        (cuda.NO_GPU, FAILED_PROBE),
        skip_if=(cuda.MACOS, cuda.NO_DRIVER, NOT_LOADED, *TORCH_RULES),
        warn_if=(cuda.CPU_BUILD, cuda.HIDDEN_GPUS),
    ),
)

# Checks of a GPU. If none of them applies, only the CPU is available.
GPU_CHECKS = ("MPS", "CUDA")


def _check_system(facts: SystemFacts) -> Iterator[Finding]:
    """Yield the finding of each row of ``SYSTEM_CHECKS``."""
    torch = facts.torch
    device_facts = DeviceFacts(facts.machine, torch, facts.environ)
    build = torch.gpu_build or ("" if facts.machine.system == "Darwin" else "for the CPU only")
    evidence = {
        "Python": f"{facts.python}, built for {facts.machine.architecture}",
        "macOS": ".".join(map(str, facts.machine.macos_version or ())) or UNKNOWN,
        "torch": ", ".join(filter(None, (torch.display_version, build))),
        "MPS in torch": "torch was built with MPS",
        "MPS": f"torch finds the Metal device{torch.metal_device and f': {torch.metal_device}'}",
        "CUDA": ", ".join(torch.cuda_names or ()),
    }
    for check in SYSTEM_CHECKS:
        finding = Finding(check.name, OK, evidence[check.name])
        matches = {rule.name: rule for rule in get_device(check.device).rejection_rules(device_facts)}
        if not torch.is_imported:
            matches[NOT_LOADED] = RejectionRule(NOT_LOADED, "torch is unavailable")
        for status, names in ((NOT_APPLICABLE, check.skip_if), (WARNING, check.warn_if), (FAILED, check.fail_if)):
            rule = next((matches[name] for name in names if name in matches), None)
            if rule is not None:
                remedy = "" if status == NOT_APPLICABLE else rule.remedy
                finding = Finding(check.name, status, rule.reason, remedy)
                break
        if check.name == "torch" and facts.torch_error:
            finding = Finding("torch", FAILED, facts.torch_error.message, facts.torch_error.remedy)
        yield finding


def run_checks(facts: SystemFacts) -> Iterator[Finding]:
    """Yield all findings, in the order of the report."""
    yield from _check_system(facts)
    yield _check_active_device(facts)
    yield _check_computation(facts)
    yield from map(_variable_finding, facts.environment.settings)
    yield from _check_dtypes(facts)
    tested = facts.rejected_computation or facts.computation
    if tested is None:
        yield _not_applicable(SILENT_ERRORS, facts)
    else:
        from .silent_errors import bug_findings

        yield from bug_findings(SILENT_ERRORS, tested.probes, tested.device)
    yield from facts.packages
    yield from facts.launch_settings
    yield from facts.system_status.findings
    yield from facts.models or (Finding("models", NOT_APPLICABLE, "no model is loaded"),)


def _not_applicable(name: str, facts: SystemFacts) -> Finding:
    """Return a finding for a check that was skipped because no computation is possible."""
    torch_missing = facts.torch_error or facts.torch.version is None
    reason = "torch is unavailable" if torch_missing else "there is no active device"
    return Finding(name, NOT_APPLICABLE, reason)


def _check_active_device(facts: SystemFacts) -> Finding:
    name = "active device"
    choice = facts.choice
    if facts.torch_error is not None:
        return _not_applicable(name, facts)
    if isinstance(choice, OpenMedError):
        return Finding(name, FAILED, choice.message, choice.remedy)
    return Finding(name, OK, f"{format_device(choice.device)}: {choice.reason}")


def _check_computation(facts: SystemFacts) -> Finding:
    check = facts.computation
    if check is None:
        return _not_applicable(COMPUTATION, facts)
    device = format_device(check.device)
    result_device = format_device(check.result_device)
    if check.failure:
        problem = f"{device} fails: {check.failure}"
    elif normalize_device(check.result_device) != normalize_device(check.device):
        problem = f"requested on {device}, but the result is on {result_device}"
    else:
        return Finding(COMPUTATION, OK, f"correct; the result is on {result_device}")
    return Finding(COMPUTATION, FAILED, problem, "Restart the kernel; if it fails again, use 'cpu'.")


def _variable_finding(setting: EnvSetting) -> Finding:
    """Return the effect of an MPS environment variable."""
    status = WARNING if setting.remedy else OK
    status = {CONFLICT: FAILED, NOT_FOR_DEVICE: NOT_APPLICABLE}.get(setting.effect, status)
    value = "not set" if setting.value is None else f"{setting.display_value}, set by {SET_BY[setting.source]}"
    evidence = "; ".join(filter(None, (f"{value}: {setting.effect}", setting.note)))
    return Finding(setting.name, status, evidence, setting.remedy)


# Models need these dtypes. Without one of the others a device is only slower.
REQUIRED_DTYPES = ("float32", "int64")


def _check_dtypes(facts: SystemFacts) -> Iterator[Finding]:
    if facts.computation is None or not facts.computation.dtypes:
        yield _not_applicable("data types", facts)
        return
    device = facts.computation.device
    unsupported = ""
    supported = []
    for name, failure in facts.computation.dtypes.items():
        if rule := get_device(device).dtype_rejection(name, facts.torch.release, facts.machine):
            yield Finding(name, WARNING, rule.reason, rule.remedy)
        elif not failure:
            supported.append(name)
        elif name in get_device(device).dtype_fallbacks:
            unsupported = "; MPS does not support float64"  # pytorch#122602
        else:
            required = name in REQUIRED_DTYPES
            remedy = "Use 'cpu', and update torch and the system." if required else "Use float32."
            yield Finding(name, FAILED if required else WARNING, f"{format_device(device)} fails: {failure}", remedy)
    if supported:
        evidence = f"{format_device(device)} computes with {', '.join(supported)}{unsupported}"
        yield Finding("data types", OK, evidence)


def model_findings(
    name: str, model: torch.nn.Module | AnnotationPipeline | LoadedModel, device: str = "mps"
) -> tuple[Finding, ...]:
    """Return the problems of a module, a pipeline or a loaded model, or one finding that all checks passed."""
    module = unwrap_model(get_module(model))
    tensors = dict([*module.named_parameters(), *module.named_buffers()])
    dtypes = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point() or tensor.is_complex()}
    dtype_names = [INT8] if is_quantized(module) else sorted(map(normalize_dtype, dtypes))
    problems = []
    wide = [key for key, tensor in tensors.items() if normalize_dtype(tensor.dtype) in mps.Mps.dtype_fallbacks]
    if wide:  # pytorch#122602
        fraction = f"{len(wide):,} of {pluralize(len(tensors), 'tensor')} {'is' if len(wide) == 1 else 'are'}"
        evidence = f"{fraction} float64 or complex128, which MPS does not support: {_join_first(wide)}"
        status = FAILED if get_device(device).dtype_fallbacks else WARNING
        remedy = "Call model.float(), or move the model with nb.training.to_device, which converts it."
        problems.append(Finding(f"{name}: float64", status, evidence, remedy))
    with TENSOR_LOCK:
        not_finite = [weight_name for weight_name, weight in module.named_parameters() if not _is_finite(weight)]
    if not_finite:
        evidence = f"{pluralize(len(not_finite), 'weight')} with NaN or infinity: {_join_first(not_finite)}"
        remedy = "Reload the model, or use an earlier checkpoint."
        problems.append(Finding(f"{name}: NaN", FAILED, evidence, remedy))
    if problems:
        return tuple(problems)
    devices = sorted({format_device(str(tensor.device)) for tensor in tensors.values()})
    summary = " and ".join(dtype_names) or "no weights"
    summary += f" on {' and '.join(devices)}" if devices else ""
    return (Finding(name, OK, f"{summary}, without NaN and infinity"),)


def _is_finite(weight: torch.Tensor) -> bool:
    import torch

    # torch.isfinite does not support dtypes below 16 bits, nor meta, lazy and sparse tensors.
    if weight.is_meta or torch.nn.parameter.is_lazy(weight) or weight.layout != torch.strided:
        return True
    return weight.dtype.itemsize == 1 or bool(torch.isfinite(weight.detach()).all())


def _join_first(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", …" if names[3:] else "")


# Packages whose requirements are checked.
CHECKED_PACKAGES = (
    "openmed-nb",
    "torch",
    "torchvision",
    "torchaudio",
    "transformers",
    "accelerate",
    "tokenizers",
    "safetensors",
    "huggingface-hub",
    "ipywidgets",
    "jupyterlab-widgets",
)

# Extras that count as installed. With torch, the "torch" extra of transformers applies however it was installed.
EXTRAS = ("", "torch")

# Errors that importlib.metadata raises for damaged or missing files. They differ between Python versions.
METADATA_ERRORS = (OSError, ValueError, KeyError, TypeError)


def package_findings(
    torch: str = "torch",
    find: Callable[[str], Distribution | None] = distribution_of,
    modules: Mapping[str, ModuleType] = sys.modules,
) -> tuple[Finding, ...]:
    """Return the problems of ``CHECKED_PACKAGES``, or one finding that all packages are compatible.

    Args:
        torch: Requirement of torch for pip, see ``devices.device.torch_requirement``. The newest torch may not support MPS
            on this Mac.
        find: Function that returns the metadata of a package, or ``None`` if it is not installed.
        modules: Imported modules.

    Returns:
        At least one finding.
    """
    problems: list[Finding | None] = []
    num_checked = 0
    for package in CHECKED_PACKAGES:
        distribution = find(package)
        if distribution is None:
            continue
        num_checked += 1
        try:
            version = _read_version(distribution)
            requirements = map(Requirement, distribution.requires or ())
            problems += (_check_requirement(f"{package} {version}", required, find, torch) for required in requirements)
        except METADATA_ERRORS:
            remedy = f"Reinstall the package: python -m pip install --force-reinstall {torch if package == 'torch' else package}."
            problems.append(Finding(package, WARNING, f"the metadata of {package} cannot be read", remedy))
            continue
        loaded = str(getattr(modules.get(package.replace("-", "_")), "__version__", version))
        if loaded.partition("+")[0] != version.partition("+")[0]:
            evidence = f"{package} {loaded} is imported, but {version} is installed"
            problems.append(Finding(package, WARNING, evidence, "Restart the kernel."))
    findings = tuple(dict.fromkeys(filter(None, problems)))
    return findings or (Finding("packages", OK, f"{num_checked} packages are compatible"),)


def _check_requirement(
    dependent: str, required: Requirement, find: Callable[[str], Distribution | None], torch: str
) -> Finding | None:
    """Return the problem of a requirement of a package with its version, or ``None`` if it is met or does not apply."""
    marker = required.marker
    # A marker limits a requirement to a system, a Python version or an extra.
    if marker and not any(marker.evaluate({"extra": extra}) for extra in EXTRAS):
        return None
    name = canonicalize_name(required.name)
    wanted = f"{required.name}{required.specifier}"
    distribution = find(name)
    if distribution is None:
        if "extra" in str(marker):
            return None
        problem = "which is not installed"
    else:
        version = _read_version(distribution)
        if required.specifier.contains(Version(version), prereleases=True):
            return None
        problem = f"but {name} {version} is installed"
    package = dependent.partition(" ")[0]
    pinned = torch.partition("==")[2]
    needed = torch if name == "torch" and pinned and required.specifier.contains(pinned) else wanted
    names = f'{torch if package == "torch" else package} "{needed}"'
    remedy = f"Install compatible versions, then restart the kernel: python -m pip install --upgrade {names}."
    return Finding(f"{package} and {name}", FAILED, f"{dependent} requires {wanted}, {problem}", remedy)


def _read_version(distribution: Distribution) -> str:
    versions = distribution.metadata.get_all("Version")
    if not versions:
        raise ValueError
    return str(versions[0])


# Checks of the file of ``accelerate config``. ``accelerate launch`` reads the file whenever it exists. Here the file is read as
# data, so accelerate need not be installed. What accelerate itself rejects with an error is left to it. The effect of each setting
# is defined in commands/launch.py, utils/launch.py, state.py and accelerator.py of accelerate 1.15.
ACCELERATE_CONFIG = "accelerate config"
SINGLE_PROCESS_REMEDY = "Set distributed_type: 'NO'."

SHARDED_TYPES = ("FSDP", "DEEPSPEED", "MEGATRON_LM")
ACCELERATE_DTYPES = {"fp16": "float16", "bf16": "bfloat16"}


def accelerate_findings(environ: Mapping[str, str], torch: TorchInfo) -> tuple[Finding, ...]:
    """Return the findings about the file of ``accelerate config``, or nothing if there is no readable file."""
    import yaml

    file = settings_file(environ)
    try:
        settings = yaml.safe_load(file.read_text("utf-8"))  # JSON is YAML too.
        if isinstance(settings, dict):
            return launch_findings(settings, torch)
    except OSError:
        return ()
    except (yaml.YAMLError, ValueError):  # Their messages quote lines of the file.
        pass
    evidence = f"{file.name} does not contain settings in YAML"
    return (Finding(ACCELERATE_CONFIG, FAILED, evidence, "Run accelerate config again."),)


def settings_file(environ: Mapping[str, str]) -> Path:
    """Return the default path that ``accelerate config`` writes and ``accelerate launch`` reads."""
    folder = Path(environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    return folder / "accelerate" / "default_config.yaml"


def launch_findings(settings: Mapping[str, object], torch: TorchInfo) -> tuple[Finding, ...]:
    """Return the settings that do not suit the machine, or one finding that all of them do."""
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
        Finding(f"{ACCELERATE_CONFIG}: {name}", status, evidence, remedy)
        for name, applies, status, evidence, remedy in rules
        if applies
    ]
    precision = str(settings.get("mixed_precision") or "no").lower()
    if precision in ACCELERATE_DTYPES and not backend.supports_index:
        evidence = f"{precision} is not validated on {device}; losses may differ from those of float32"
        remedy = f"Set mixed_precision: 'no', or see nb.training.precision({ACCELERATE_DTYPES[precision]!r})."
        problems.append(Finding(f"{ACCELERATE_CONFIG}: mixed_precision", WARNING, evidence, remedy))
    if problems:
        return tuple(problems)
    processes = pluralize(num_processes, "process", "processes")
    return (Finding(ACCELERATE_CONFIG, OK, f"{processes} on {device}, mixed precision {shorten(precision)}"),)
