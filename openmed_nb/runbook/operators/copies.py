"""A copy of a model on the CPU, with which anything may be done, and random numbers that go on as if nothing had been drawn."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ...devices.backend import random_numbers_from, random_states
from ...display import counted
from ...errors import ConfigurationError, cause

if TYPE_CHECKING:
    import torch


def cpu_copy(model: torch.nn.Module, dtype: torch.dtype | None = None) -> torch.nn.Module:
    """Return a copy of a model on the CPU, without its gradients; the model may be on any device, and stays as it is.

    Its tensors are copied one by one, so that no second copy is made on the device. If ``torch.compile`` made the model, the
    one inside is copied.

    Args:
        model: The model.
        dtype: The type of its floating point numbers in the copy; ``None`` keeps theirs.

    Raises:
        ConfigurationError: If the model cannot be copied.
    """
    import torch

    def on_cpu(tensor: torch.Tensor) -> torch.Tensor:
        kind = dtype if dtype and tensor.is_floating_point() else tensor.dtype
        copied = tensor.detach().to("cpu", kind, copy=True)
        return torch.nn.Parameter(copied, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else copied

    inner = getattr(model, "_orig_mod", model)
    tensors = [*inner.parameters(), *inner.buffers()]
    check_memory(type(inner).__name__, tensors)
    try:
        # Tensors of other classes than torch's own two know themselves how they are copied.
        memo = {id(one): on_cpu(one) for one in tensors if type(one) in {torch.Tensor, torch.nn.Parameter}}
        with torch.no_grad():  # A model of TorchScript copies its weights with a graph otherwise.
            copied: torch.nn.Module = copy.deepcopy(inner, memo).to("cpu")
    except Exception as error:
        # A model can hold anything, and each thing fails in its own way: a lock, an open file, a tensor with a graph.
        what = f"{type(inner).__name__} cannot be copied: {cause(error)}."
        raise ConfigurationError(what, "Take out of the model what cannot be copied.") from error
    for mine, theirs in zip(copied.parameters(), inner.parameters(), strict=True):
        if mine.requires_grad != theirs.requires_grad:
            mine.requires_grad_(theirs.requires_grad)
    return copied


def check_memory(what: str, tensors: Iterable[torch.Tensor]) -> None:
    """Refuse tensors that have a shape only.

    Raises:
        ConfigurationError: If there are some.
    """
    empty = sum(tensor.is_meta for tensor in tensors)
    if empty:
        problem = f"{what} has {counted(empty, 'tensor')} with a shape and no memory (device meta)."
        raise ConfigurationError(problem, "Load the weights, or make real inputs, and try again.")


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
