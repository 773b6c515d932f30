"""What the doctor looks at: sections in the order of the report, each from the facts to its findings.

Most of what can be wrong with a device is a cause that its class in ``devices`` knows. A row here names the causes that fail
it, those that make it meaningless, and what it shows if all is well.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from ...._render.display import FAILED, NOT_APPLICABLE, OK, WARNING, Finding, pluralize
from ....devices import causes, cuda, mps
from ....devices.backend import TENSOR_LOCK, TorchInfo
from ....devices.causes import DeviceContext, RejectionRule
from ....devices.choice import DeviceChoice
from ....devices.environment import CONFLICT, NOT_FOR_DEVICE, SET_BY, EnvPlan
from ....devices.machine import MachineInfo, distribution_of, format_device
from ....devices.moving import get_module, unwrap_model
from ....devices.registry import parse_device_argument
from ....devices.request import normalize_device
from ....errors import OpenMedError
from ....models.config import normalize_dtype
from ....models.loading import INT8, is_quantized
from ....models.records import REDUCED_DTYPES, DtypeValidation
from ....training.batch_checks import head_width, token_count
from ...records.signals import SystemStatus

# The names of two findings, by which a verdict knows them too.
COMPUTATION = "computation"
SILENT_ERRORS = "known silent errors"

if TYPE_CHECKING:
    import torch

    from .silent_errors import ProbeOutcome


@dataclass(frozen=True)
class ComputationCheck:
    """What came of computing on a device."""

    device: str  # Where it was to be done.
    result_device: str = ""  # Where torch says that the result is; empty if there is none.
    failure: str = ""  # Why it failed; empty if it gave what the CPU gives.
    # For each type of numbers that was tried, why it failed; empty if it did not.
    dtypes: Mapping[str, str] = field(default_factory=dict)
    probes: tuple[ProbeOutcome, ...] = ()  # What came of the probes of known silent errors.


@dataclass(frozen=True)
class SystemFacts:
    """All that the doctor judges."""

    python: str  # The version of this Python.
    machine: MachineInfo  # The facts of this computer.
    torch: TorchInfo  # What is known of torch.
    choice: DeviceChoice | OpenMedError  # The device in force, or the error of the wishes.
    environment: EnvPlan  # What became of the MPS variables.
    torch_error: OpenMedError | None = None  # Why torch cannot be imported; None if it can.
    environ: Mapping[str, str] = field(default_factory=dict)  # The environment variables that the rules read.
    computed: ComputationCheck | None = None  # What came of computing on the device in force; None if there is none.
    ruled_out: ComputationCheck | None = None  # The same on a GPU that is not in force because it gave wrong numbers.
    packages: tuple[Finding, ...] = ()  # What was found about packages.
    launching: tuple[Finding, ...] = ()  # What was found about the settings of accelerate launch.
    signals: SystemStatus = field(default_factory=SystemStatus)  # The state of the computer.
    models: tuple[Finding, ...] = ()  # What was found about each model.


# The names of causes, with two that count for the doctor alone.
NOT_LOADED = "torch is not loaded"
UNKNOWN_MACOS = "unknown macOS"
IN_TORCH = (causes.NO_TORCH, causes.OLD_TORCH)
NO_APPLE_GPU = (mps.LINUX_ON_APPLE, mps.NO_MAC, mps.ROSETTA, mps.INTEL)
OF_MACOS = (mps.OLD_MACOS, mps.NEW_TORCH)


@dataclass(frozen=True)
class RuleCheck:
    """One thing about the computer that causes can fail."""

    name: str  # What it is.
    device: str  # The device whose causes are asked.
    fail_if: tuple[str, ...]  # The names of causes that fail it.
    skip_if: tuple[str, ...] = ()  # Those that make it meaningless; the first that applies says why.
    warn_if: tuple[str, ...] = ()  # Those of what the person may have wanted, asked before those that fail.


SYSTEM_CHECKS = (
    RuleCheck("Python", "mps", (mps.ROSETTA,)),
    RuleCheck("macOS", "mps", OF_MACOS, skip_if=(mps.LINUX_ON_APPLE, mps.NO_MAC, mps.INTEL, UNKNOWN_MACOS)),
    RuleCheck("torch", "cpu", IN_TORCH),
    RuleCheck("MPS in torch", "mps", (mps.NOT_BUILT,), skip_if=(*NO_APPLE_GPU, NOT_LOADED, *IN_TORCH)),
    RuleCheck(
        "MPS",
        "mps",
        (mps.NO_METAL, mps.BAD_WATERMARKS, causes.FAILED_PROBE),
        skip_if=(*NO_APPLE_GPU, *OF_MACOS, NOT_LOADED, *IN_TORCH, mps.NOT_BUILT),
    ),
    RuleCheck(
        "CUDA",
        "cuda",
        (cuda.NO_GPU, causes.FAILED_PROBE),
        skip_if=(cuda.MACOS, cuda.NO_DRIVER, NOT_LOADED, *IN_TORCH),
        warn_if=(cuda.CPU_BUILD, cuda.HIDDEN_GPUS),
    ),
)


def _computer(facts: SystemFacts) -> Iterator[Finding]:
    """Judge each thing about the computer by its causes; what it shows if nothing is wrong stands here."""
    torch = facts.torch
    here = DeviceContext(facts.machine, torch, facts.environ)
    build = torch.gpu_build or ("" if facts.machine.system == "Darwin" else "for the CPU only")
    evidence = {
        "Python": f"{facts.python}, built for {facts.machine.architecture}",
        "macOS": ".".join(map(str, facts.machine.macos or ())),
        "torch": ", ".join(filter(None, (torch.display_version, build))),
        "MPS in torch": "torch was built with MPS",
        "MPS": f"torch finds the Metal device{torch.metal_device and f': {torch.metal_device}'}",
        "CUDA": ", ".join(torch.cuda_names or ()),
    }
    for check in SYSTEM_CHECKS:
        finding = Finding(check.name, OK, evidence[check.name])
        applying = {cause.name: cause for cause in parse_device_argument(check.device).causes(here)}
        if not torch.is_imported:
            applying[NOT_LOADED] = RejectionRule(NOT_LOADED, "torch cannot be used")
        if facts.machine.macos is None:
            applying[UNKNOWN_MACOS] = RejectionRule(UNKNOWN_MACOS, "its version could not be read")
        for status, names in ((NOT_APPLICABLE, check.skip_if), (WARNING, check.warn_if), (FAILED, check.fail_if)):
            cause = next((applying[name] for name in names if name in applying), None)
            if cause is not None:
                remedy = "" if status == NOT_APPLICABLE else cause.remedy
                finding = Finding(check.name, status, cause.reason, remedy)
                break
        if check.name == "torch" and facts.torch_error:
            finding = Finding("torch", FAILED, facts.torch_error.message, facts.torch_error.remedy)
        yield finding


def run_checks(facts: SystemFacts) -> Iterator[Finding]:
    """Yield every finding, in the order in which a person would look."""
    yield from _computer(facts)
    yield _device_in_force(facts)
    yield _computation(facts)
    yield from _variables(facts.environment)
    yield from _check_dtypes(facts)
    suspected = facts.ruled_out or facts.computed
    if suspected is None:
        yield _not_applicable(SILENT_ERRORS, facts)
    else:
        from .silent_errors import bug_findings

        yield from bug_findings(SILENT_ERRORS, suspected.probes, suspected.device)
    yield from facts.packages
    yield from facts.launching
    yield from facts.signals.findings()
    yield from facts.models or (Finding("models", NOT_APPLICABLE, "no model is loaded"),)


def _not_applicable(name: str, facts: SystemFacts) -> Finding:
    """Return that nothing was looked at, because nothing can be computed."""
    why = "torch cannot be used" if facts.torch_error or facts.torch.version is None else "no device is in force"
    return Finding(name, NOT_APPLICABLE, why)


def _device_in_force(facts: SystemFacts) -> Finding:
    name = "device in force"
    choice = facts.choice
    if facts.torch_error is not None:
        return _not_applicable(name, facts)
    if isinstance(choice, OpenMedError):
        return Finding(name, FAILED, choice.message, choice.remedy)
    return Finding(name, OK, f"{format_device(choice.device)}: {choice.reason}")


def _computation(facts: SystemFacts) -> Finding:
    computed = facts.computed
    if computed is None:
        return _not_applicable(COMPUTATION, facts)
    device = format_device(computed.device)
    place = format_device(computed.result_device)
    restart = "Restart the kernel; if it fails again, use 'cpu'."
    if computed.failure:
        return Finding(COMPUTATION, FAILED, f"{device} fails: {computed.failure}", restart)
    if normalize_device(computed.result_device) != normalize_device(computed.device):
        return Finding(COMPUTATION, FAILED, f"asked of {device}, the result is on {place}", restart)
    return Finding(COMPUTATION, OK, f"right, and its result is on {place}")


def _variables(plan: EnvPlan) -> Iterator[Finding]:
    """Judge each MPS variable: in force, too late, in conflict with another, not for this device, or none that torch reads."""
    for setting in plan.settings:
        status = WARNING if setting.remedy else OK
        status = {CONFLICT: FAILED, NOT_FOR_DEVICE: NOT_APPLICABLE}.get(setting.effect, status)
        value = "not set" if setting.value is None else f"{setting.display_value}, set by {SET_BY[setting.source]}"
        evidence = "; ".join(filter(None, (f"{value}: {setting.effect}", setting.note)))
        yield Finding(setting.name, status, evidence, setting.remedy)


REQUIRED_DTYPES = ("float32", "int64")  # Without these nothing runs; without one of the others a device is only slower.


def _check_dtypes(facts: SystemFacts) -> Iterator[Finding]:
    if facts.computed is None or not facts.computed.dtypes:
        yield _not_applicable("types of numbers", facts)
        return
    device = facts.computed.device
    refused = ""
    computed = []
    for name, failure in facts.computed.dtypes.items():
        if not failure:
            computed.append(name)
        elif name in parse_device_argument(device).narrower:
            refused = "; float64 is refused, as MPS has none"
        else:
            needed = name in REQUIRED_DTYPES
            remedy = "Use 'cpu', and update torch and the system." if needed else "Use float32."
            yield Finding(name, FAILED if needed else WARNING, f"{format_device(device)} fails: {failure}", remedy)
    if computed:
        evidence = f"{format_device(device)} computes with {', '.join(computed)}{refused}"
        yield Finding("types of numbers", OK, evidence)


@dataclass(frozen=True)
class ModelUnderTest:
    """A model that is looked at."""

    model: torch.nn.Module  # The model itself.
    tokenizer: Any  # Its tokenizer, or None.
    device: str  # The device in force.
    # What is known of it in a reduced type; None if it was not loaded by its name.
    validation: DtypeValidation | None = None

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Return parameters and buffers with their names."""
        return [*self.model.named_parameters(), *self.model.named_buffers()]

    def dtypes(self) -> list[str]:
        """Return the types of a model's numbers; a quantized model is int8 whatever else is in it."""
        if is_quantized(self.model):
            return [INT8]
        numbers = (tensor for _, tensor in self.tensors() if tensor.is_floating_point() or tensor.is_complex())
        return sorted({normalize_dtype(tensor.dtype) for tensor in numbers})


def model_findings(
    name: str, model: Any, tokenizer: Any = None, device: str = "mps", validation: DtypeValidation | None = None
) -> tuple[Finding, ...]:
    """Return what is wrong with a module, a pipeline or a loaded model of ours, or one finding that nothing is."""
    tokenizer = getattr(model, "tokenizer", None) if tokenizer is None else tokenizer
    examined = ModelUnderTest(unwrap_model(get_module(model)), tokenizer, device, validation)
    with TENSOR_LOCK:
        wrong = tuple(finding for check in MODEL_CHECKS for finding in check(examined))
    if wrong:
        return tuple(replace(finding, name=f"{name}: {finding.name}") for finding in wrong)
    places = sorted({format_device(str(tensor.device)) for _, tensor in examined.tensors()})
    summary = " and ".join(examined.dtypes()) or "no weights"
    summary += f" on {' and '.join(places)}" if places else ""
    return (Finding(name, OK, f"{summary}; nothing was found by {len(MODEL_CHECKS)} checks"),)


def check_float64(examined: ModelUnderTest) -> Iterator[Finding]:
    """Find numbers of 64 bits, which MPS does not have."""
    tensors = examined.tensors()
    names = [name for name, tensor in tensors if normalize_dtype(tensor.dtype) in mps.Mps.narrower]
    if names:
        share = f"{len(names):,} of {pluralize(len(tensors), 'tensor')} {'is' if len(names) == 1 else 'are'}"
        evidence = f"{share} float64 or complex128, which MPS does not have: {_first(names)}"
        status = FAILED if parse_device_argument(examined.device).narrower else WARNING
        remedy = "Call model.float(), or move it with nb.training.to_device, which converts."
        yield Finding("float64", status, evidence, remedy)


def check_reduced_precision(examined: ModelUnderTest) -> Iterator[Finding]:
    """Find weights in a reduced type that is not validated: answers can differ."""
    types = [dtype for dtype in examined.dtypes() if dtype in REDUCED_DTYPES]
    known = examined.validation
    evidence = f"weights are {' and '.join(types)}, with which entities can move or be lost"
    if known and [known.dtype] == types:
        if known.reason:
            yield Finding("precision", WARNING, f"{evidence}; {known.reason}", f"Validate it: {known.command}.")
    elif types:
        remedy = f"Load it by its name, then nb.runbook.validate_precision('name', texts, dtype={types[0]!r})."
        yield Finding("precision", WARNING, evidence, remedy)


def check_label_map(examined: ModelUnderTest) -> Iterator[Finding]:
    """Find a map of labels that has another length than the last layer."""
    labels = getattr(getattr(examined.model, "config", None), "id2label", None)
    classifies = any(kind.__name__.endswith("Classification") for kind in type(examined.model).__mro__)
    width = head_width(examined.model) if labels and classifies else None
    if width is not None and labels is not None and len(labels) != width:
        evidence = (
            f"the configuration has {pluralize(len(labels), 'label')}, and the last layer gives {width:,} numbers"
        )
        remedy = "Load it with num_labels as many as the data has, or correct id2label in its configuration."
        yield Finding("labels", FAILED, evidence, remedy)


def check_vocabulary(examined: ModelUnderTest) -> Iterator[Finding]:
    """Find a tokenizer with tokens for which the model has no embedding."""
    rows = token_count(examined.model)
    tokens: dict[str, int] = getattr(examined.tokenizer, "get_vocab", dict)()
    largest = max(tokens.values(), default=-1)
    if rows is not None and largest >= rows:
        evidence = f"the tokenizer has token {largest:,}, and the model has embeddings for {pluralize(rows, 'token')}"
        remedy = "Use the tokenizer of this model, or call model.resize_token_embeddings(len(tokenizer))."
        yield Finding("vocabulary", FAILED, evidence, remedy)


def check_tensor_devices(examined: ModelUnderTest) -> Iterator[Finding]:
    """Find parts on several devices, and parts without memory."""
    counts = Counter(normalize_device(str(tensor.device)) for _, tensor in examined.tensors())
    if "meta" in counts:
        evidence = f"{pluralize(counts['meta'], 'tensor')} of {counts.total():,} have no memory (device meta)"
        yield Finding("weights", FAILED, evidence, "Load the weights: from_pretrained, or load_state_dict.")
    elif len(counts) > 1 and getattr(examined.model, "hf_device_map", None) is None:
        parts = ", ".join(f"{count:,} on {format_device(place)}" for place, count in sorted(counts.items()))
        evidence = f"its tensors are on several devices: {parts}"
        yield Finding("places", FAILED, evidence, "Move it whole: model.to(device).")


def check_finite_weights(examined: ModelUnderTest) -> Iterator[Finding]:
    """Find weights that are NaN or infinite."""
    names = [name for name, weight in examined.model.named_parameters() if not _finite(weight)]
    if names:
        evidence = f"{pluralize(len(names), 'weight')} with NaN or infinity: {_first(names)}"
        yield Finding("NaN", FAILED, evidence, "Load it again, or go back to an earlier checkpoint.")


MODEL_CHECKS = (
    check_float64,
    check_reduced_precision,
    check_label_map,
    check_vocabulary,
    check_tensor_devices,
    check_finite_weights,
)


def _finite(weight: torch.Tensor) -> bool:
    import torch

    # Types below 16 bits have no isfinite, and neither a meta, a lazy nor a sparse tensor can be asked.
    types = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)
    if weight.is_meta or torch.nn.parameter.is_lazy(weight) or weight.layout != torch.strided:
        return True
    return weight.dtype not in types or bool(torch.isfinite(weight.detach()).all())


def _first(names: list[str], shown: int = 3) -> str:
    return ", ".join(names[:shown]) + (", …" if len(names) > shown else "")


# The packages whose requirements are looked at.
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

# The extras that are in use: every torch user has the "torch" extra of transformers, however it was installed.
EXTRAS = ("", "torch")

# What importlib.metadata raises for files that are damaged or gone; it differs between releases of Python.
METADATA_ERRORS = (OSError, ValueError, KeyError, TypeError)

Versions = Mapping[str, str]  # By the normalized names of packages; empty if the files do not say.


def package_findings(
    installed: Versions, requirements: Mapping[str, Sequence[str]], loaded: Versions, torch: str = "torch"
) -> tuple[Finding, ...]:
    """Return what is wrong with packages, or one finding that nothing is, given what each requires and who is loaded.

    ``torch`` is what pip is asked for where torch is to be installed, as ``devices.causes.torch_requirement`` says: the newest one
    can be without MPS on this Mac.
    """
    found = [_unreadable(name, torch) for name, version in installed.items() if not version]
    for package, texts in requirements.items():
        found += filter(None, (_unmet_requirements(package, text, installed, torch) for text in texts))
    for name, here in loaded.items():
        there = installed.get(name)
        if there and here.partition("+")[0] != there.partition("+")[0]:
            evidence = f"{name} {here} is loaded, and {there} is installed"
            found.append(Finding(name, WARNING, evidence, "Restart the kernel."))
    return tuple(dict.fromkeys(found)) or (Finding("packages", OK, f"{len(requirements)} packages fit together"),)


def _unmet_requirements(package: str, text: str, installed: Versions, torch: str) -> Finding | None:
    """Return what is wrong with one requirement of a package; ``None`` if it is met or does not count."""
    try:
        required = Requirement(text)
    except InvalidRequirement:
        return _unreadable(package, torch)
    marker = required.marker
    # A requirement counts on this system, in this Python, with the extras in use.
    if marker and not any(marker.evaluate({"extra": extra}) for extra in EXTRAS):
        return None
    name = canonicalize_name(required.name)
    version = installed.get(name)
    wanted = f"{required.name}{required.specifier}"
    if version is None:
        if "extra" in str(marker):
            return None
        problem = "which is not installed"
    else:
        try:
            met = required.specifier.contains(Version(version), prereleases=True)
        except InvalidVersion:  # Whoever built it under such a version knows better than its number.
            met = True
        if met:
            return None
        problem = f"and {name} {version} is installed"
    pinned = torch.partition("==")[2]
    needed = torch if name == "torch" and pinned and required.specifier.contains(pinned) else wanted
    names = f'{torch if package == "torch" else package} "{needed}"'
    remedy = f"Install versions that fit, then restart the kernel: python -m pip install --upgrade {names}."
    evidence = f"{package} {installed.get(package, '')} needs {wanted}, {problem}"
    return Finding(f"{package} and {name}", FAILED, evidence, remedy)


def _unreadable(package: str, torch: str) -> Finding:
    remedy = f"Reinstall it: python -m pip install --force-reinstall {torch if package == 'torch' else package}."
    return Finding(package, WARNING, f"the metadata of {package} cannot be read", remedy)


def read_packages(
    find: Callable[[str], Any] = distribution_of,
) -> tuple[Versions, Mapping[str, Sequence[str]], Versions]:
    """Return the installed versions, what the installed packages of ``CHECKED`` require, and the loaded versions."""
    installed: dict[str, str] = {}
    requirements: dict[str, Sequence[str]] = {}
    loaded: dict[str, str] = {}
    for name in CHECKED_PACKAGES:
        distribution = find(name)
        if distribution is None:
            continue
        installed[name] = _version(distribution)
        requirements[name] = ()
        with contextlib.suppress(*METADATA_ERRORS):
            requirements[name] = tuple(distribution.requires or ())
        version = getattr(sys.modules.get(name.replace("-", "_")), "__version__", None)
        if version:
            loaded[name] = str(version)
    for text in itertools.chain.from_iterable(requirements.values()):
        with contextlib.suppress(InvalidRequirement):
            name = canonicalize_name(Requirement(text).name)
            if name not in installed and (distribution := find(name)) is not None:
                installed[name] = _version(distribution)
    return installed, requirements, loaded


def _version(distribution: Any) -> str:
    try:
        return str(distribution.metadata.get("Version") or "")  # Not by index, which may warn or raise, by the Python.
    except METADATA_ERRORS:
        return ""
