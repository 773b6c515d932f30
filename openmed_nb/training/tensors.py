"""The tensors that are alive: those that Python objects hold, and those that autograd keeps for a backward pass."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from itertools import compress
from typing import TYPE_CHECKING, Any

from ..devices.backend import import_torch

if TYPE_CHECKING:
    import torch


def living_tensors() -> list[torch.Tensor]:
    """Return every tensor that Python knows of; proxies are told by their type, so that none is woken up."""
    tensor = import_torch().Tensor
    things = gc.get_objects()
    kinds = {kind for kind in set(map(type, things)) if issubclass(kind, tensor)}
    return list(compress(things, map(kinds.__contains__, map(type, things))))


def storage_sizes(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Return the bytes of each storage that the tensors and their graphs use, by the storage's address.

    Views share a storage, which counts once. Lazy parameters and tensor classes of others are not woken.

    Example:
        >>> import torch
        >>> whole = torch.zeros(2, 3)
        >>> list(storage_sizes([whole, whole[1:]]).values())
        [24]
    """
    with import_torch()._C.DisableTorchFunction():  # noqa: SLF001 - torch has no other name for it
        tensors = list(tensors)
        reached = (*tensors, *saved_tensors(map(graph_of, tensors)))
        return dict(_storage(tensor) for tensor in reached if has_storage(tensor))


def saved_tensors(nodes: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors that graphs keep for their backward pass.

    What hooks have packed is not unpacked, which could compute a checkpoint again; what a backward pass has freed is
    ``None``, and so is a leaf, which is no part of the graph's memory.
    """
    tensor = import_torch().Tensor
    names: dict[type, list[str]] = {}  # A graph has thousands of nodes of a few types.
    for node in graph_nodes(nodes):
        kind = type(node)
        if kind not in names:
            names[kind] = [name for name in dir(kind) if name.startswith("_raw_saved_")]
        for name in names[kind]:
            kept = (getattr(saved, "data", None) for saved in _saved(node, name))
            yield from (data for data in kept if isinstance(data, tensor))


def _saved(node: Any, name: str) -> tuple[Any, ...]:
    try:
        saved = getattr(node, name)
    except RuntimeError:  # A Function written in Python says so of what a backward pass has freed.
        return ()
    return tuple(saved) if isinstance(saved, (list, tuple)) else (saved,)


def graph_nodes(nodes: Iterable[Any]) -> Iterator[Any]:
    """Yield the nodes of graphs, each once."""
    waiting, seen = list(nodes), set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting.extend(following for following, _ in node.next_functions)
            yield node


def graph_of(tensor: torch.Tensor) -> Any:
    """Return the node of the graph that made a tensor; ``None`` for a leaf, and where a graph was made invalid."""
    try:
        return tensor.grad_fn
    except RuntimeError:  # One of several views, whose base was changed in place.
        return None


def gradient_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient of a leaf; other tensors have none, and torch warns where they are asked."""
    try:
        return tensor.grad if tensor.is_leaf else None
    except RuntimeError:  # As in graph_of.
        return None


def has_storage(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor has memory of its own kind: sparse, meta and fake tensors and wrappers have none."""
    torch = import_torch()
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)  # noqa: SLF001 - torch has no other name for it
    return tensor.layout == torch.strided and not wrapped and tensor.untyped_storage().device.type != "meta"


def _storage(tensor: torch.Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage._cdata, storage.nbytes()  # noqa: SLF001 - two wrappers of one storage have this in common
