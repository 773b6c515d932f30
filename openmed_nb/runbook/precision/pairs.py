"""A model in two ways: on the CPU in float32, and on a device in a type."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ...annotation.building import build_pipeline
from ...devices.backend import TENSOR_LOCK
from ...errors import ConfigurationError
from ...models.config import DEFAULT_STRATEGY
from ...models.loading import LoadSpec, load
from ...models.quantization import INT8, dtype_of, is_quantized

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
    """

    name: str
    reference: Annotator
    candidate: Annotator
    dtype: str
    notes: tuple[str, ...] = ()


def pair_of_files(spec: LoadSpec, device: str) -> Pair:
    """Return a model from its files twice: on the CPU in float32, and on a device in the type of the specification."""
    pipe = build_pipeline(load(spec, device), DEFAULT_STRATEGY, {})
    candidate = whole_texts(pipe.own_annotator())
    plain = load(spec.in_dtype("float32"), "cpu").model
    return Pair(spec.reference.name, with_model(candidate, plain), candidate, spec.dtype)


def pair_of_pipeline(pipe: AnnotationPipeline) -> Pair:
    """Return a pipeline as it is, and with a float32 copy of its model on the CPU.

    Raises:
        ConfigurationError: For a pipeline in int8, whose weights were rounded away.
    """
    dtype, name = dtype_of(pipe.model), type(pipe.model).__name__
    if is_quantized(pipe.model):
        what = f"The float32 weights of this {name} in int8 are gone."
        raise ConfigurationError(what, f"Pass the model's name and dtype={INT8!r}.")
    candidate = whole_texts(pipe.own_annotator())
    notes = () if dtype == "float32" else (ROUNDED.format(dtype=dtype),)
    return Pair(name, with_model(candidate, float32_copy(pipe.model)), candidate, dtype, notes)


def whole_texts(annotator: Annotator) -> Annotator:
    """Return an annotator that drops nothing of a long text."""
    return replace(annotator, settings=replace(annotator.settings, truncation=False))


def with_model(annotator: Annotator, model: Any) -> Annotator:
    """Return an annotator that does the same with another model."""
    return replace(annotator, network=replace(annotator.network, model=model, compiled=False))


def float32_copy(model: Any) -> Any:
    """Return a copy of a model on the CPU in float32; the device holds nothing more for it."""
    import torch

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        kind = torch.float32 if tensor.is_floating_point() else tensor.dtype
        return tensor.detach().to("cpu", kind, copy=True)

    with TENSOR_LOCK:
        parameters: dict[int, Any] = {
            id(one): torch.nn.Parameter(copied(one), requires_grad=one.requires_grad) for one in model.parameters()
        }
        buffers = {id(one): copied(one) for one in model.buffers()}
        return copy.deepcopy(model, {**parameters, **buffers}).eval()


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
