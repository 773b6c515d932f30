"""What a model takes: how many labels, tokens and positions it has, learnt from its own layers and configuration."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from numbers import Integral
from typing import TYPE_CHECKING, Any

from ..errors import ConfigurationError, shorten

if TYPE_CHECKING:
    import torch

IGNORE_INDEX = -100
"""What the loss functions of torch leave out (``torch.nn.CrossEntropyLoss``)."""

LEAST = {"labels": 1, "tokens": 1, "token_types": 1, "positions": 1, "first_position": 0, "padding": 0}
"""The smallest number that can be told for each limit; the ignored label can be any."""


@dataclass(frozen=True)
class ModelLimits:
    """How many there are of each; ``None`` where it is not known, which then is not checked.

    Attributes:
        labels: Labels; a label is a number from 0 to one less.
        tokens: Tokens of the vocabulary.
        token_types: Token types.
        positions: Positions.
        first_position: The position of the first token: not 0 in models such as RoBERTa.
        padding: The token that fills rows up, where positions are counted without it.
        ignore_index: The label that is left out of the loss.
    """

    labels: int | None = None
    tokens: int | None = None
    token_types: int | None = None
    positions: int | None = None
    first_position: int = 0
    padding: int | None = None
    ignore_index: int = IGNORE_INDEX

    @property
    def length(self) -> int | None:
        """How many tokens a row can have."""
        return None if self.positions is None else self.positions - self.first_position


def limits_of(model: torch.nn.Module, **told: int | None) -> ModelLimits:
    """Return what a model takes; what the caller tells counts more than what is learnt.

    Args:
        model: A model of transformers, or any other, of which only the embeddings with known names are understood.
        told: Attributes of :class:`ModelLimits`; ``None`` to learn it.

    Raises:
        ConfigurationError: For what was told and cannot be a limit.

    Example:
        >>> import torch
        >>> limits_of(torch.nn.Linear(2, 3), labels=3)
        ModelLimits(labels=3, tokens=None, token_types=None, positions=None, first_position=0, padding=None, ignore_index=-100)
    """
    model = unwrapped(model)
    for name in inner_model(model):
        model = unwrapped(model.get_submodule(name))
    rows = {name.rpartition(".")[2]: layer for name, layer in embeddings(model)}
    positions = rows.get("position_embeddings")
    padding = None if positions is None else positions.padding_idx  # RoBERTa counts from here, without what fills up.
    learnt = ModelLimits(
        labels=label_count(model),
        tokens=token_count(model),
        token_types=_count(rows.get("token_type_embeddings")),
        positions=_count(positions),
        first_position=0 if padding is None else padding + 1,
        padding=padding,
    )
    return replace(learnt, **checked_limits(told))


def checked_limits(told: Mapping[str, Any]) -> dict[str, int]:
    """Return those limits that were told.

    Raises:
        ConfigurationError: For a name that no limit has, and for a value that cannot be one.

    Example:
        >>> checked_limits({"labels": 10, "tokens": None})
        {'labels': 10}
        >>> checked_limits({"labels": "3"})
        Traceback (most recent call last):
        ...
        openmed_nb.errors.ConfigurationError: The limit labels='3' is no whole number from 1 up. Pass such a number.
    """
    known = tuple(field.name for field in fields(ModelLimits))
    for name, value in told.items():
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1)
            hint = f"Did you mean {nearest[0]!r}? " if nearest else ""
            raise ConfigurationError(f"Guards take no limit {shorten(name)!r}.", f"{hint}There are {', '.join(known)}.")
        least = LEAST.get(name)
        whole = isinstance(value, Integral) and not isinstance(value, bool)
        if value is not None and not (whole and (least is None or value >= least)):
            numbers = "whole number" if least is None else f"whole number from {least} up"
            raise ConfigurationError(f"The limit {name}={shorten(repr(value))} is no {numbers}.", "Pass such a number.")
    return {name: int(value) for name, value in told.items() if value is not None}


def unwrapped(model: Any) -> Any:
    """Return the model inside of what was put around it for compiling, for several devices or for adapters."""
    for name in ("_orig_mod", "module"):
        model = getattr(model, name, model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def inner_model(model: torch.nn.Module) -> tuple[str, ...]:
    """Return the name of the model of transformers inside of another module, such as one of Lightning.

    Nothing where the module is such a model itself, and where there are none or several.

    Example:
        >>> import torch
        >>> inner_model(torch.nn.Sequential(torch.nn.Linear(2, 2)))
        ()
    """
    found: list[str] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if not inside and hasattr(module, "config") and hasattr(module, "get_input_embeddings"):
            if not name or module is unwrapped(model):
                return ()
            found.append(name)
    return tuple(found) if len(found) == 1 else ()


def embeddings(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Embedding]]:
    """Yield the embeddings of a model with their names."""
    import torch

    yield from ((name, layer) for name, layer in model.named_modules() if isinstance(layer, torch.nn.Embedding))


def label_count(model: Any) -> int | None:
    """Return how many labels a model tells apart, ``None`` where its labels are something else or nothing says.

    A language model's labels are tokens. A model is taken for a classifier by the name of its class, because every
    configuration has ``num_labels``, also where the labels are places in a text, choices or numbers. Where the last
    layer has another number, as after somebody put another one there, neither is believed.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if head is not None and hasattr(head, "weight"):
        return int(head.weight.shape[0])
    if not any(kind.__name__.endswith("Classification") for kind in type(model).__mro__):
        return None
    count = getattr(getattr(model, "config", None), "num_labels", None)
    return count if count and count > 1 and count == head_width(model) else None  # One label is a regression.


def head_width(model: torch.nn.Module) -> int | None:
    """Return how many numbers the last linear layer gives, ``None`` where there is none.

    Example:
        >>> import torch
        >>> head_width(torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU()))
        3
    """
    import torch

    widths = [layer.out_features for layer in model.modules() if isinstance(layer, torch.nn.Linear)]
    return widths[-1] if widths else None


def token_count(model: Any) -> int | None:
    """Return how many tokens a model's input embeddings have, ``None`` where it has none."""
    import torch

    try:
        layer = getattr(model, "get_input_embeddings", lambda: None)()
    except NotImplementedError:  # transformers raises it for a model that it cannot answer for.
        return None
    return layer.num_embeddings if isinstance(layer, torch.nn.Embedding) else None


def _count(layer: Any) -> int | None:
    return None if layer is None else int(layer.num_embeddings)
