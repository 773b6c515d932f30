"""What is wrong with a model before it runs: types, labels, vocabulary, places and numbers that a device makes silent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...devices.backend import TENSOR_LOCK
from ...devices.request import canonical, kind_of
from ...devices.simulation import shown_device
from ...errors import ConfigurationError
from ...models.quantization import INT8, is_quantized
from ...quantities import counted
from ...training.model_limits import head_width, token_count, unwrapped
from ..findings import FAILED, OK, WARNING, Finding
from ..precision.dtype_choice import REDUCED, Validation

if TYPE_CHECKING:
    import torch

DOUBLE = ("float64", "complex128")
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
    inner = model_in(model)
    tokenizer = getattr(model, "tokenizer", None) if tokenizer is None else tokenizer
    subject = Subject(unwrapped(inner), tokenizer, device, validation)
    with TENSOR_LOCK:
        wrong = tuple(finding for check in CHECKS.values() for finding in check(subject))
    if wrong:
        return tuple(Finding(f"{name}: {one.name}", one.status, one.evidence, one.remedy) for one in wrong)
    return (Finding(name, OK, f"{_summary(subject)}; nothing was found by {len(CHECKS)} checks"),)


def model_in(thing: Any) -> torch.nn.Module:
    """Return the model that something is, or that a pipeline or a loaded model has.

    Raises:
        ConfigurationError: Where there is none.
    """
    models: tuple[Any, ...] = (thing, getattr(thing, "model", None))
    for model in models:
        is_class = isinstance(model, type)
        if not is_class and hasattr(model, "named_parameters") and hasattr(model, "named_buffers"):
            return model
    what = f"{type(thing).__name__} is no model that can be looked at."
    raise ConfigurationError(what, "Pass the name of a model, a torch module or a pipeline.")


def double_precision(subject: Subject) -> Iterator[Finding]:
    """Find numbers of 64 bits, which MPS does not have."""
    names = _of_types(subject, DOUBLE)
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
