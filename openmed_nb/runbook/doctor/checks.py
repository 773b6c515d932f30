"""The sections of the doctor.

What the doctor looks at: a table of sections, each from the facts to its findings.

Most of what can be wrong with a device is a rule of ``devices.choice``; a row here names the rules that would fail
it, says when it does not apply, and what to say where all is well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...devices import choice as rules
from ...devices.backend import TENSOR_LOCK, TorchFacts
from ...devices.choice import Cause, DeviceChoice, Rejection, Surroundings, first_applying
from ...devices.environment import CONFLICT, IDLE, SET_BY, EnvPlan, EnvSetting
from ...devices.machine import Machine
from ...devices.moving import NARROWER, module_in, unwrapped
from ...devices.request import canonical, kind_of
from ...devices.simulated import shown_device
from ...display import FAILED, NOT_APPLICABLE, OK, WARNING, Finding, counted
from ...errors import OpenMedError
from ...models.dtypes import REDUCED, Validation
from ...models.quantization import INT8, is_quantized
from ...training.batch_checks import head_width, token_count
from ..signals.values import Signals
from .silent_errors import ProbeOutcome, bug_findings

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Computation:
    """A real computation.

    Attributes:
        device: Where it was to be done.
        place: Where torch says that its result is, empty where there is none.
        failure: Why it failed, empty where it gave what the CPU gives.
    """

    device: str
    place: str = ""
    failure: str = ""


@dataclass(frozen=True)
class DoctorFacts:
    """All that the doctor judges.

    Attributes:
        python: The version of this Python.
        machine: The facts of this computer.
        torch: What is known of torch.
        torch_error: Why torch cannot be imported, ``None`` where it can.
        choice: The device in force, or the error of the wishes.
        environ: The environment variables that the rules read.
        environment: What became of the MPS variables.
        computation: A real computation on the device in force; ``None`` where there is none.
        dtypes: For each type that was tried, why it failed, empty where it did not.
        probes: What came of the probes of known silent errors.
        packages: What was found about packages.
        signals: The state of the computer.
        models: What was found about each model.
    """

    python: str
    machine: Machine
    torch: TorchFacts
    choice: DeviceChoice | OpenMedError
    environment: EnvPlan
    torch_error: OpenMedError | None = None
    environ: Mapping[str, str] = field(default_factory=dict)
    computation: Computation | None = None
    dtypes: Mapping[str, str] = field(default_factory=dict)
    probes: tuple[ProbeOutcome, ...] = ()
    packages: tuple[Finding, ...] = ()
    signals: Signals = field(default_factory=Signals)
    models: tuple[Finding, ...] = ()

    def rejection(self, device: str, causes: Iterable[Cause]) -> Rejection | None:
        """Return what the first of some rules has to say about a device."""
        return first_applying(causes, Surroundings(device, self.machine, self.torch, self.environ))


NECESSARY = ("float32", "int64")
"""Types without which nothing runs; a device without one of the others is only slower."""

ABSENT = {("mps", "float64"): "float64 is refused, as MPS has none"}
"""What a device refuses rightly."""


@dataclass(frozen=True)
class Row:
    """One thing about the computer that rules can fail.

    Attributes:
        name: What it is.
        device: The device that the rules are asked about.
        before: Causes that make it meaningless; the first that applies says why.
        fails: Causes that fail it.
        says: The evidence where nothing is wrong.
        warns: Causes of what a person may have wanted so, which are asked first.
    """

    name: str
    device: str
    before: tuple[Cause, ...]
    fails: tuple[Cause, ...]
    says: Callable[[DoctorFacts], str]
    warns: tuple[Cause, ...] = ()

    def finding(self, facts: DoctorFacts) -> Finding:
        """Return the finding."""
        for status, causes in ((NOT_APPLICABLE, self.before), (WARNING, self.warns), (FAILED, self.fails)):
            rejection = facts.rejection(self.device, causes)
            if rejection is not None:
                remedy = "" if status == NOT_APPLICABLE else rejection.remedy
                return Finding(self.name, status, rejection.reason, remedy)
        return Finding(self.name, OK, self.says(facts))


def _version(facts: DoctorFacts) -> str:
    return ".".join(str(part) for part in facts.machine.macos or ())


def _build(facts: DoctorFacts) -> str:
    build = facts.torch.gpu_build or ("" if facts.machine.system == "Darwin" else "for the CPU only")
    return ", ".join(part for part in (facts.torch.version, build) if part)


UNKNOWN_MACOS = Cause(lambda here: here.machine.macos is None, "its version could not be read", "")
NOT_LOADED = Cause(lambda here: not here.torch.loaded, "torch cannot be used", "")

NO_APPLE_GPU = (rules.NO_MAC, rules.ROSETTA, rules.INTEL)
NO_TORCH = (NOT_LOADED, *rules.TORCH_CAUSES)

COMPUTER_ROWS = (
    Row(
        "Python",
        "mps",
        (),
        (rules.ROSETTA,),
        lambda facts: f"{facts.python}, built for {facts.machine.architecture}",
    ),
    Row("macOS", "mps", (rules.NO_MAC, rules.INTEL, UNKNOWN_MACOS), (rules.OLD_MACOS,), _version),
)

TORCH_ROW = Row("torch", "cpu", (), rules.TORCH_CAUSES, _build)

DEVICE_ROWS = (
    Row(
        "MPS in torch",
        "mps",
        (*NO_APPLE_GPU, *NO_TORCH),
        (rules.NOT_BUILT,),
        lambda _facts: "torch was built with MPS",
    ),
    Row(
        "MPS",
        "mps",
        (*NO_APPLE_GPU, rules.OLD_MACOS, *NO_TORCH, rules.NOT_BUILT),
        (rules.NO_METAL, rules.BAD_WATERMARKS, rules.FAILED_PROBE),
        lambda _facts: "torch finds the Metal device",
    ),
    Row(
        "CUDA",
        "cuda",
        (rules.MACOS, rules.NO_DRIVER, *NO_TORCH),
        (rules.NO_GPU, rules.FAILED_PROBE),
        lambda facts: ", ".join(facts.torch.cuda_names or ()),
        warns=(rules.CPU_BUILD, rules.HIDDEN_GPUS),
    ),
)


def computer_findings(facts: DoctorFacts) -> Iterator[Finding]:
    """Judge Python and the system."""
    for row in COMPUTER_ROWS:
        yield row.finding(facts)


def torch_findings(facts: DoctorFacts) -> Iterator[Finding]:
    """Judge torch: whether it is there, imports, and is new enough."""
    if facts.torch_error is not None:
        yield Finding("torch", FAILED, facts.torch_error.what, facts.torch_error.remedy)
    else:
        yield TORCH_ROW.finding(facts)


def device_findings(facts: DoctorFacts) -> Iterator[Finding]:
    """Judge whether torch can use the GPUs of this computer."""
    for row in DEVICE_ROWS:
        yield row.finding(facts)


def choice_findings(facts: DoctorFacts) -> Iterator[Finding]:
    """Judge the device in force, and a real computation on it."""
    choice, done = facts.choice, facts.computation
    if facts.torch_error is not None:
        yield idle("device in force", facts)
    elif isinstance(choice, OpenMedError):
        yield Finding("device in force", FAILED, choice.what, choice.remedy)
    else:
        yield Finding("device in force", OK, f"{shown_device(choice.device)}: {choice.reason}")
    yield idle("computation", facts) if done is None else _computation(done)


def environment_findings(facts: DoctorFacts) -> Iterator[Finding]:
    """Judge each MPS variable: in force, too late, in conflict with another, or not for this device."""
    for setting in facts.environment.settings:
        yield Finding(setting.name, _environment_status(setting), _environment_evidence(setting), setting.remedy)


def dtype_findings(facts: DoctorFacts) -> Iterator[Finding]:
    """Judge which types of numbers the device computes with."""
    if facts.computation is None or not facts.dtypes:
        yield idle("types of numbers", facts)
        return
    device = facts.computation.device
    failures = {name: failure for name, failure in facts.dtypes.items() if failure}
    refused = [ABSENT[kind_of(device), name] for name in failures if (kind_of(device), name) in ABSENT]
    for name, failure in failures.items():
        if (kind_of(device), name) not in ABSENT:
            status = FAILED if name in NECESSARY else WARNING
            yield Finding(name, status, f"{shown_device(device)} fails: {failure}", _other_type(name))
    computed = ", ".join(name for name in facts.dtypes if name not in failures)
    if computed:
        yield Finding("types of numbers", OK, "; ".join((f"{shown_device(device)} computes with {computed}", *refused)))


def silent_findings(facts: DoctorFacts) -> Iterator[Finding]:
    """Judge the probes of known silent errors."""
    if facts.computation is None:
        yield idle("known silent errors", facts)
    else:
        yield from bug_findings(facts.probes, facts.computation.device)


def state_findings(facts: DoctorFacts) -> Iterator[Finding]:
    """Judge power and heat."""
    yield from facts.signals.findings()


def model_section(facts: DoctorFacts) -> Iterator[Finding]:
    """Return what was found about the models."""
    yield from facts.models or (Finding("models", NOT_APPLICABLE, "no model is loaded"),)


def idle(name: str, facts: DoctorFacts) -> Finding:
    """Return that something was not looked at, because nothing can be computed."""
    why = "torch cannot be used" if facts.torch_error or facts.torch.version is None else "no device is in force"
    return Finding(name, NOT_APPLICABLE, why)


def _computation(done: Computation) -> Finding:
    device = shown_device(done.device)
    restart = "Restart the kernel; if it fails again, use 'cpu'."
    if done.failure:
        return Finding("computation", FAILED, f"{device} fails: {done.failure}", restart)
    if canonical(done.place) != canonical(done.device):
        return Finding(
            "computation", FAILED, f"asked of {device}, the result is on {shown_device(done.place)}", restart
        )
    return Finding("computation", OK, f"right, and its result is on {shown_device(done.place)}")


def _environment_status(setting: EnvSetting) -> str:
    if setting.effect == IDLE:
        return NOT_APPLICABLE
    return FAILED if setting.effect == CONFLICT else WARNING if setting.remedy else OK


def _environment_evidence(setting: EnvSetting) -> str:
    whose = f"{setting.shown}, set by {SET_BY[setting.origin]}" if setting.value is not None else "not set"
    return "; ".join(part for part in (f"{whose}: {setting.effect}", setting.note) if part)


def _other_type(name: str) -> str:
    return "Use 'cpu', and update torch and the system." if name in NECESSARY else "Use float32."


SECTIONS: tuple[Callable[[DoctorFacts], Iterator[Finding]], ...] = (
    computer_findings,
    torch_findings,
    device_findings,
    choice_findings,
    environment_findings,
    dtype_findings,
    silent_findings,
    lambda facts: iter(facts.packages),
    state_findings,
    model_section,
)
"""What is looked at, in this order."""


CHECKED_FOR_NAN = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")

SHOWN = 3
"""How many names of tensors are shown."""


@dataclass(frozen=True)
class Subject:
    """A model that is looked at.

    Attributes:
        model: The model itself.
        tokenizer: Its tokenizer, ``None`` where it has none.
        device: The device in force.
        validation: What is known of it in a reduced type; ``None`` where it was not loaded by its name.
    """

    model: torch.nn.Module
    tokenizer: Any
    device: str
    validation: Validation | None = None

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield parameters and buffers with their names."""
        yield from self.model.named_parameters()
        yield from self.model.named_buffers()


def model_findings(
    name: str, model: Any, tokenizer: Any = None, device: str = "mps", validation: Validation | None = None
) -> tuple[Finding, ...]:
    """Return what is wrong with a model, or one finding that nothing is.

    Args:
        name: What the person calls it.
        model: A torch module, a pipeline, or a loaded model of ours.
        tokenizer: Its tokenizer; that of the pipeline where nobody says.
        device: The device in force, for which float64 is an error or only a warning.
        validation: What is known of it in a reduced type, where it was loaded by its name.

    Raises:
        ConfigurationError: For anything else than a model.

    Example:
        >>> import torch
        >>> for finding in model_findings("tagger", torch.nn.Linear(2, 2).double()):
        ...     print(finding.status, finding.evidence)
        failed 2 of 2 tensors are float64 or complex128, which MPS does not have: weight, bias
    """
    inner = module_in(model)
    tokenizer = getattr(model, "tokenizer", None) if tokenizer is None else tokenizer
    subject = Subject(unwrapped(inner), tokenizer, device, validation)
    with TENSOR_LOCK:
        wrong = tuple(finding for check in CHECKS.values() for finding in check(subject))
    if wrong:
        return tuple(Finding(f"{name}: {one.name}", one.status, one.evidence, one.remedy) for one in wrong)
    return (Finding(name, OK, f"{_summary(subject)}; nothing was found by {len(CHECKS)} checks"),)


def double_precision(subject: Subject) -> Iterator[Finding]:
    """Find numbers of 64 bits, which MPS does not have."""
    names = _of_types(subject, tuple(NARROWER))
    if names:
        evidence = f"{_share(subject, names)} float64 or complex128, which MPS does not have: {_some(names)}"
        status = FAILED if kind_of(subject.device) == "mps" else WARNING
        yield Finding("float64", status, evidence, "Call model.float(), or move it with nb.to_device, which converts.")


def reduced_precision(subject: Subject) -> Iterator[Finding]:
    """Find weights in a reduced type that is not validated, with which answers can be other ones."""
    types = [one for one in _types(subject) if one in REDUCED]
    known = subject.validation if subject.validation and [subject.validation.dtype] == types else None
    if not types or (known and not known.reason):
        return
    evidence = f"weights are {' and '.join(types)}, with which entities can move or be lost"
    if known:
        yield Finding("precision", WARNING, f"{evidence}; {known.reason}", f"Validate it: {known.command}.")
        return
    remedy = f"Load it by its name, then nb.validate_precision('name', texts, dtype={types[0]!r})."
    yield Finding("precision", WARNING, evidence, remedy)


def label_map(subject: Subject) -> Iterator[Finding]:
    """Find a map of labels that has another length than the last layer."""
    labels = getattr(getattr(subject.model, "config", None), "id2label", None)
    classifies = any(kind.__name__.endswith("Classification") for kind in type(subject.model).__mro__)
    width = head_width(subject.model) if labels and classifies else None
    if width is not None and labels is not None and len(labels) != width:
        evidence = f"the configuration has {counted(len(labels), 'label')}, and the last layer gives {width:,} numbers"
        remedy = "Load it with num_labels as many as the data has, or correct id2label in its configuration."
        yield Finding("labels", FAILED, evidence, remedy)


def vocabulary(subject: Subject) -> Iterator[Finding]:
    """Find a tokenizer with tokens for which the model has no embedding."""
    rows = token_count(subject.model)
    tokens: dict[str, int] = getattr(subject.tokenizer, "get_vocab", dict)()
    largest = max(tokens.values(), default=-1)
    if rows is not None and largest >= rows:
        evidence = f"the tokenizer has token {largest:,}, and the model has embeddings for {counted(rows, 'token')}"
        remedy = "Use the tokenizer of this model, or call model.resize_token_embeddings(len(tokenizer))."
        yield Finding("vocabulary", FAILED, evidence, remedy)


def places(subject: Subject) -> Iterator[Finding]:
    """Find parts on several devices, and parts without memory."""
    counts = Counter(canonical(str(tensor.device)) for _, tensor in subject.tensors())
    if "meta" in counts:
        evidence = f"{counted(counts['meta'], 'tensor')} of {counts.total():,} have no memory (device meta)"
        yield Finding("weights", FAILED, evidence, "Load the weights: from_pretrained, or load_state_dict.")
    elif len(counts) > 1 and getattr(subject.model, "hf_device_map", None) is None:
        parts = ", ".join(f"{count:,} on {shown_device(place)}" for place, count in sorted(counts.items()))
        yield Finding(
            "places", FAILED, f"its tensors are on several devices: {parts}", "Move it whole: model.to(device)."
        )


def not_a_number(subject: Subject) -> Iterator[Finding]:
    """Find weights that are NaN or infinite."""
    names = [name for name, weight in subject.model.named_parameters() if not _finite(weight)]
    if names:
        evidence = f"{counted(len(names), 'weight')} with NaN or infinity: {_some(names)}"
        yield Finding("NaN", FAILED, evidence, "Load it again, or go back to an earlier checkpoint.")


CHECKS: dict[str, Callable[[Subject], Iterator[Finding]]] = {
    "float64": double_precision,
    "precision": reduced_precision,
    "labels": label_map,
    "vocabulary": vocabulary,
    "places": places,
    "NaN": not_a_number,
}
"""What is looked for."""


def _finite(weight: torch.Tensor) -> bool:
    import torch

    there = not (weight.is_meta or torch.nn.parameter.is_lazy(weight)) and weight.layout == torch.strided
    return not (there and _type(weight) in CHECKED_FOR_NAN) or bool(torch.isfinite(weight.detach()).all())


def _of_types(subject: Subject, types: tuple[str, ...]) -> list[str]:
    return [name for name, tensor in subject.tensors() if _type(tensor) in types]


def _types(subject: Subject) -> list[str]:
    """Return the types of a model's numbers; a quantized model is int8 whatever else is in it."""
    if is_quantized(subject.model):
        return [INT8]
    tensors = (tensor for _, tensor in subject.tensors() if tensor.is_floating_point() or tensor.is_complex())
    return sorted({_type(tensor) for tensor in tensors})


def _type(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _share(subject: Subject, names: list[str]) -> str:
    total = sum(1 for _ in subject.tensors())
    return f"{len(names):,} of {counted(total, 'tensor')} {'is' if len(names) == 1 else 'are'}"


def _some(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (", …" if len(names) > SHOWN else "")


def _summary(subject: Subject) -> str:
    tensors = dict(subject.tensors())
    types = _types(subject)
    where = sorted({shown_device(str(tensor.device)) for tensor in tensors.values()})
    return f"{' and '.join(types) or 'no weights'}{' on ' if where else ''}{' and '.join(where)}"
