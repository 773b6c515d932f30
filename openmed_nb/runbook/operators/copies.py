"""A copy of a model, with which anything may be done, and random numbers that go on as if nothing had been computed."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ...devices.backend import TENSOR_LOCK, random_numbers_from, random_states
from ...devices.moving import NARROWER
from ...devices.request import kind_of
from ...display import counted
from ...errors import ConfigurationError, cause

if TYPE_CHECKING:
    import torch


def copy_of(model: torch.nn.Module, device: str = "cpu", dtype: torch.dtype | None = None) -> torch.nn.Module:
    """Return a copy of a model without its gradients; the model may be on any device, and stays as it is.

    Its tensors are copied one by one to the CPU, so that no second copy is made on the device of the model. Of a model that
    ``torch.compile`` made, the model inside is copied; hooks come along.

    Args:
        model: The model.
        device: Where the copy goes, as torch spells it.
        dtype: The type of its floating-point numbers; ``None`` keeps them.
    """
    import torch

    inner = getattr(model, "_orig_mod", model)
    name, tensors = type(inner).__name__, [*inner.parameters(), *inner.buffers()]
    check_memory(name, tensors)
    types = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors} if kind_of(device) == "mps" else set()
    for wide in sorted(types.intersection(NARROWER)):
        raise ConfigurationError(f"{name} has numbers in {wide}, which MPS does not have.", "Pass model.float().")

    def on_cpu(tensor: torch.Tensor) -> torch.Tensor:
        kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        copied = tensor.detach().to("cpu", kind, copy=True)
        return torch.nn.Parameter(copied, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else copied

    try:
        # Tensors of other classes than torch's own two know themselves how they are copied.
        plain = (tensor for tensor in tensors if type(tensor) in {torch.Tensor, torch.nn.Parameter})
        with TENSOR_LOCK, torch.no_grad():  # A model of TorchScript copies its weights with a graph otherwise.
            copied: torch.nn.Module = copy.deepcopy(inner, {id(tensor): on_cpu(tensor) for tensor in plain}).to("cpu")
    except Exception as error:
        # A model can hold anything, and each thing fails in its own way: a lock, an open file, a tensor with a graph.
        what = f"{name} cannot be copied: {cause(error)}."
        raise ConfigurationError(what, "Take out of the model what cannot be copied.") from error
    for mine, theirs in zip(copied.parameters(), inner.parameters(), strict=True):
        if mine.requires_grad != theirs.requires_grad:
            mine.requires_grad_(theirs.requires_grad)
    return copied.to(torch.device(device))


def check_memory(what: str, tensors: Iterable[torch.Tensor]) -> None:
    """Refuse tensors with a shape only; ``what`` names what they are the tensors of."""
    empty = sum(tensor.is_meta for tensor in tensors)
    if empty:
        said = f"{what} has {counted(empty, 'tensor')} with a shape and no memory (device meta)."
        raise ConfigurationError(said, "Load the weights, or make real inputs, and try again.")


@contextmanager
def random_numbers_kept() -> Iterator[None]:
    """Let the random numbers of the CPU, of Python and of numpy go on afterwards from where they were."""
    numpy = sys.modules.get("numpy")
    pythons, numpys = random.getstate(), numpy.random.get_state() if numpy else None
    try:
        with random_numbers_from(random_states("cpu")):
            yield
    finally:
        random.setstate(pythons)
        if numpy:
            numpy.random.set_state(numpys)
