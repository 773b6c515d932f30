"""A person's model, checked and copied to a device."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from ...devices.request import kind_of
from ...errors import ConfigurationError, cause
from ..operators.copies import cpu_copy
from .batches import rows_in

if TYPE_CHECKING:
    import torch

    from ..operators.examples import Example

DOUBLE = ("float64", "complex128")
"""The types that MPS does not have."""


def copy_on(model: torch.nn.Module, name: str, device: str) -> torch.nn.Module:
    """Return a copy of a model on a device; the hooks of the model run in the copy too.

    Raises:
        ConfigurationError: Where the model cannot be copied, and on MPS for one with numbers of 64 bits.
    """
    import torch

    tensors = [*model.parameters(), *model.buffers()] if kind_of(device) == "mps" else []
    types = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors}
    for wide in sorted(types.intersection(DOUBLE)):
        raise ConfigurationError(f"{name} has numbers in {wide}, which MPS does not have.", "Pass model.float().")
    return cpu_copy(model).to(torch.device(device))


def check_call(model: torch.nn.Module, name: str, example: Example) -> None:
    """Check that a model takes what it will be called with.

    Raises:
        ConfigurationError: For an example without rows, and for arguments that ``forward`` does not take; a model with hooks
            that see them first may change them.
    """
    if not (rows_in(example.tensors) and any(tensor.numel() for tensor in tensors_of(example))):
        raise ConfigurationError(f"The batch for {name} has no rows.", "Pass one with at least one row.")
    try:
        taken = inspect.signature(model.forward)
    except ValueError:  # A forward that is compiled tells nothing.
        return
    if not model._forward_pre_hooks:  # noqa: SLF001 - torch has no public name for them
        try:
            taken.bind(*example.args, **example.kwargs)
        except TypeError as error:
            what = f"{name} does not take what the data give: {cause(error)}."
            raise ConfigurationError(what, "Pass batches as it is called with them, without anything else.") from error


def tensors_of(example: Example) -> list[Any]:
    """Return the tensors of an example."""
    from ...training.nested import named_tensors

    return [tensor for _, tensor in named_tensors(example.tensors)]
