"""A model in two ways: on the CPU in float32, and on a device in a type."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ...annotation.building import build_pipeline
from ...devices.backend import TENSOR_LOCK
from ...errors import ConfigurationError, cause
from ...models.config import DEFAULT_STRATEGY, STRATEGIES
from ...models.loading import LoadSpec, load
from ...models.quantization import INT8, dtype_of, is_quantized
from .judgement import TOLERANCES

if TYPE_CHECKING:
    import torch

    from ...annotation.pipeline import AnnotationPipeline
    from ...annotation.stream import Annotator

ROUNDED = "The reference has this pipeline's weights, rounded to {dtype} already; pass the model's name to compare with its files."


@dataclass(frozen=True)
class Pair:
    """A model in two ways.

    Attributes:
        name: What the person calls the model.
        reference: The way that is right: on the CPU in float32.
        candidate: The way in question.
        dtype: The candidate's type.
        notes: What to know about the comparison.
        strategies: How tokens become the entities that are compared; empty where as the reference does it.
    """

    name: str
    reference: Annotator
    candidate: Annotator
    dtype: str
    notes: tuple[str, ...] = ()
    strategies: tuple[str, ...] = ()


def pair_of_files(spec: LoadSpec, device: str) -> Pair:
    """Return a model from its files twice: on the CPU in float32, and on a device in the type of the specification."""
    from ...annotation.pipeline import device_budget

    model = load(spec, device).model
    # A pipeline proves itself on a word: a candidate that fails at it shall be judged, and is no error.
    pipe = build_pipeline(load(spec.in_dtype("float32"), "cpu"), DEFAULT_STRATEGY, {})
    reference = whole_texts(pipe.own_annotator())
    budget = replace(device_budget(model.device), padding=reference.budget.padding)
    candidate = replace(with_model(reference, model), budget=budget)
    return Pair(spec.reference.name, reference, candidate, spec.dtype)


def pair_of_pipeline(pipe: AnnotationPipeline) -> Pair:
    """Return a pipeline as it is, and with a float32 copy of its model on the CPU.

    Raises:
        ConfigurationError: For a pipeline in int8, whose weights were rounded away, and in a type without a tolerance.
    """
    dtype, name = dtype_of(pipe.model), type(pipe.model).__name__
    if is_quantized(pipe.model):
        what = f"The float32 weights of this {name} in int8 are gone."
        raise ConfigurationError(what, f"Pass the model's name and dtype={INT8!r}.")
    if dtype not in TOLERANCES:
        what = f"{name} in {dtype} cannot be compared: there is no tolerance for that type."
        raise ConfigurationError(what, "Call .float() on its model.")
    candidate = whole_texts(pipe.own_annotator())
    notes = () if dtype == "float32" else (ROUNDED.format(dtype=dtype),)
    return Pair(name, with_model(candidate, float32_copy(pipe.model)), candidate, dtype, notes)


def in_every_strategy(pair: Pair) -> Pair:
    """Return a pair whose entities are compared as each strategy makes them of the same probabilities."""
    reference, candidate = (
        replace(side, network=replace(side.network, whole=True)) for side in (pair.reference, pair.candidate)
    )
    return replace(pair, reference=reference, candidate=candidate, strategies=STRATEGIES)


def whole_texts(annotator: Annotator) -> Annotator:
    """Return an annotator that drops nothing of a long text."""
    return replace(annotator, settings=replace(annotator.settings, truncation=False))


def with_model(annotator: Annotator, model: Any) -> Annotator:
    """Return an annotator that does the same with another model."""
    return replace(annotator, network=replace(annotator.network, model=model, compiled=False))


def float32_copy(model: Any) -> Any:
    """Return a copy of a model on the CPU in float32; the device holds nothing more for it.

    Raises:
        ConfigurationError: Where the model cannot be copied.
    """
    import torch

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        kind = torch.float32 if tensor.is_floating_point() else tensor.dtype
        return tensor.detach().to("cpu", kind, copy=True)

    with TENSOR_LOCK:
        parameters: dict[int, Any] = {
            id(one): torch.nn.Parameter(copied(one), requires_grad=one.requires_grad) for one in model.parameters()
        }
        buffers = {id(one): copied(one) for one in model.buffers()}
        try:
            return copy.deepcopy(model, {**parameters, **buffers}).eval()
        except Exception as error:
            # A model can hold anything, such as a hook with a lock, and each thing fails in its own way.
            what = f"{type(model).__name__} cannot be copied: {cause(error)}."
            raise ConfigurationError(what, "Take out of the model what cannot be copied, or pass its name.") from error


@contextlib.contextmanager
def undisturbed(pair: Pair) -> Iterator[None]:
    """Compute as if the caller had set nothing: an autocast around would round the reference as it rounds the candidate."""
    import torch

    kinds = dict.fromkeys(("cpu", pair.candidate.network.model.device.type))
    with contextlib.ExitStack() as stack:
        for kind in filter(torch.amp.is_autocast_available, kinds):
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


@contextlib.contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Switch dropout off, and give every part of the model its former mode back."""
    training = [part for part in model.modules() if part.training]
    model.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True
