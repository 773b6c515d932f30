"""Tensors inside of other values, such as a batch, the arguments of a pass or what a model returns.

A ``BatchEncoding`` of transformers is a mapping and no ``dict``, and a ``ModelOutput`` is a ``dict`` of its own kind.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def named_tensors(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in mappings, lists and tuples with their names, those inside of others joined by dots.

    Example:
        >>> import torch
        >>> [name for name, _ in named_tensors({"labels": torch.ones(1), "inputs": [torch.ones(1), 5]})]
        ['labels', 'inputs.0']
    """
    import torch

    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, (Mapping, list, tuple)):
        pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, one in pairs:
            yield from named_tensors(one, f"{name}.{key}" if name else str(key))


def with_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a value of the same type with its tensors changed; what has none in it stays itself.

    Example:
        >>> import torch
        >>> with_tensors({"inputs": (torch.ones(1), "text")}, torch.neg)
        {'inputs': (tensor([-1.]), 'text')}
    """
    import torch

    if isinstance(value, torch.Tensor):
        return change(value)
    if not any(True for _ in named_tensors(value)):
        return value
    if isinstance(value, Mapping):
        return _changed_mapping(value, {key: with_tensors(one, change) for key, one in value.items()})
    changed = [with_tensors(one, change) for one in value]
    return type(value)._make(changed) if hasattr(value, "_make") else type(value)(changed)


def _changed_mapping(value: Mapping[Any, Any], changed: dict[Any, Any]) -> Mapping[Any, Any]:
    if type(value) is dict or not isinstance(value, MutableMapping):
        return changed
    copied = copy.copy(value)
    for key, one in changed.items():  # A ModelOutput has no update().
        copied[key] = one
    return copied
