"""A copy of a model on the CPU, with which anything may be done, and random numbers that go on as if nothing had been."""

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


def cpu_copy(model: torch.nn.Module) -> torch.nn.Module:
    """Return a copy of a model on the CPU, without its gradients; the model may be on any device, and stays as it is.

    Its tensors are copied one by one, so that no second copy is made on the device. Of a model that ``torch.compile``
    made, the model inside is copied.

    Raises:
        ConfigurationError: Where the model cannot be copied.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(2, 2)
        >>> copied = cpu_copy(model)
        >>> torch.equal(copied.weight, model.weight), copied.weight is model.weight
        (True, False)
    """
    import torch

    inner = getattr(model, "_orig_mod", model)
    tensors = [*inner.parameters(), *inner.buffers()]
    check_memory(type(inner).__name__, tensors)
    try:
        memo = {id(tensor): _on_cpu(tensor) for tensor in tensors if _is_plain(tensor)}
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
    """Check that tensors have numbers.

    Args:
        what: What they are the tensors of.
        tensors: The tensors.

    Raises:
        ConfigurationError: Where some have a shape only.
    """
    empty = sum(tensor.is_meta for tensor in tensors)
    if empty:
        said = f"{what} has {counted(empty, 'tensor')} with a shape and no memory (device meta)."
        raise ConfigurationError(said, "Load the weights, or make real inputs, and try again.")


def _is_plain(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is of torch's own two classes; the others know themselves how they are copied."""
    import torch

    return type(tensor) in {torch.Tensor, torch.nn.Parameter}


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    copied = tensor.detach().to("cpu", copy=True)
    return torch.nn.Parameter(copied, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else copied


@contextmanager
def random_numbers_kept() -> Iterator[None]:
    """Let the random numbers of the CPU, of Python and of numpy go on afterwards from where they were.

    Example:
        >>> import torch
        >>> before = torch.get_rng_state()
        >>> with random_numbers_kept():
        ...     numbers = torch.rand(3)
        >>> torch.equal(torch.get_rng_state(), before)
        True
    """
    numpy = sys.modules.get("numpy")
    pythons, numpys = random.getstate(), numpy.random.get_state() if numpy else None
    try:
        with random_numbers_from(random_states("cpu")):
            yield
    finally:
        random.setstate(pythons)
        if numpy:
            numpy.random.set_state(numpys)
