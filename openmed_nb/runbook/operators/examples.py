"""Example inputs of a model, read from what a person passes: a tensor, several, or a mapping of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...annotation.forward import input_names, taken
from ...errors import ConfigurationError, cause
from ...training.nested import named_tensors, with_tensors
from .copies import check_memory

if TYPE_CHECKING:
    import torch

SENTENCES = ("Patient with type 2 diabetes mellitus.", "No asthma.")
"""Synthetic texts of two lengths, so that the batch has padding."""

REMEDY = "Pass a tensor, a tuple of tensors, or a mapping such as what a tokenizer returns with return_tensors='pt'."


@dataclass(frozen=True)
class Example:
    """What a model is called with, on the CPU.

    Attributes:
        args: The arguments.
        kwargs: The arguments by name.
    """

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __call__(self, model: torch.nn.Module) -> Any:
        """Return what the model returns."""
        return model(*self.args, **self.kwargs)

    def copied(self) -> Example:
        """Return copies of the tensors, which a model may change."""
        return Example(with_tensors(self.args, _copied), with_tensors(self.kwargs, _copied))

    @property
    def tensors(self) -> dict[str, Any]:
        """The arguments by name, those without one by their number."""
        return {**{f"argument {number}": value for number, value in enumerate(self.args)}, **self.kwargs}


def read_example(inputs: Any) -> Example:
    """Return example inputs as a model is called with them.

    Args:
        inputs: A tensor, a tuple or list of tensors, or a mapping of names to tensors, lists of numbers, and what else
            the model takes. Lists of numbers become tensors, with a batch of one where they are those of one text.

    Raises:
        ConfigurationError: For anything else.

    Example:
        >>> read_example({"input_ids": [101, 102]}).kwargs["input_ids"].shape
        torch.Size([1, 2])
    """
    import torch

    check_memory(f"The {type(inputs).__name__} of example inputs", (tensor for _, tensor in named_tensors(inputs)))
    if isinstance(inputs, Mapping):
        flat = _are_flat(inputs.values())
        example = Example(kwargs={str(name): _tensor(value, flat) for name, value in inputs.items()})
    else:
        listed = isinstance(inputs, list) and any(isinstance(value, torch.Tensor) for value in inputs)
        values = tuple(inputs) if listed or isinstance(inputs, tuple) else (inputs,)
        example = Example(tuple(_tensor(value, _are_flat(values)) for value in values))
    if not any(True for _ in named_tensors(example.tensors)):
        raise ConfigurationError(f"{type(inputs).__name__} without a tensor is no example input of a model.", REMEDY)
    return example


def synthetic_example(model: Any, tokenizer: Any) -> Example:
    """Return a batch of two synthetic sentences as a model for token classification takes them, with labels.

    Args:
        model: The model of transformers.
        tokenizer: Its tokenizer.

    Example:
        >>> from openmed_nb import load_pipeline
        >>> pipe = load_pipeline(device="cpu")
        >>> sorted(synthetic_example(pipe.model, pipe.tokenizer).kwargs)
        ['attention_mask', 'input_ids', 'labels', 'token_type_ids']
    """
    import torch

    batch = dict(tokenizer(list(SENTENCES), padding=True, return_tensors="pt"))
    names = input_names(model, tuple(batch))
    kwargs = {name: tensor for name, tensor in batch.items() if name in names}
    if "labels" in (taken(type(model).forward) or ()):
        kwargs["labels"] = torch.zeros_like(batch["input_ids"])
    return Example(kwargs=kwargs)


def _tensor(value: Any, flat: bool) -> Any:
    """Return lists of numbers and arrays as tensors, tensors as copies on the CPU, and anything else, such as words, as it is."""
    import torch

    if isinstance(value, list) and not any(isinstance(one, (torch.Tensor, str)) for one in value):
        tensor = _made(value)
        return tensor.unsqueeze(0) if flat else tensor
    if type(value).__module__ == "numpy" and hasattr(value, "__array__"):
        return _made(value)
    return with_tensors(value, _copied)


def _made(value: Any) -> torch.Tensor:
    import torch

    try:
        return torch.tensor(value)
    except (ValueError, TypeError, RuntimeError) as error:
        what = f"The example inputs hold a {type(value).__name__} that is no tensor: {cause(error)}."
        raise ConfigurationError(what, "Pad the rows to one length, or pass tensors.") from error


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def _are_flat(values: Iterable[Any]) -> bool:
    """Tell whether all lists are plain rows of numbers, as a tokenizer returns them for one text."""
    listed = [one for value in values if isinstance(value, list) for one in value]
    return all(isinstance(one, (int, float)) for one in listed if not isinstance(one, str))
