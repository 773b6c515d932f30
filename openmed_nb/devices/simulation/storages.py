"""Which tensors are on the simulated device: those whose storage is.

Views, ``detach``, ``.data`` and ``.grad`` then need no rule of their own, and memory that only an autograd graph holds
counts as long as it lives. torch keeps the Python object of a storage as long as its memory (since 2.1), so a weak
reference tells when the memory is freed.

This file imports torch, because it is asked at every call; it is itself imported where a simulation begins.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from .allocator import SimulatedAllocator
from .messages import NO_COMPLEX128, NO_FLOAT64

functorch = torch._C._functorch  # noqa: SLF001 - torch has no public name for it

NESTED = (tuple, list, dict)


@dataclass(frozen=True)
class Block:
    """The memory of a storage: what tells when it is freed, its bytes, and those of its block."""

    reference: weakref.ref[torch.UntypedStorage]
    size: int
    taken: int


class Storages:
    """The storages that are on the device.

    Args:
        allocator: Counts their memory.
    """

    def __init__(self, allocator: SimulatedAllocator) -> None:
        self._allocator = allocator
        self._blocks: dict[int, Block] = {}

    def __contains__(self, name: int) -> bool:
        return name in self._blocks

    def has_any(self, names: Iterable[int]) -> bool:
        """Tell whether one of some storages is on the device."""
        return not self._blocks.keys().isdisjoint(names)

    def elsewhere(self, names: Iterable[int]) -> set[int]:
        """Return those of some storages that are not on the device."""
        return {name for name in names if name not in self._blocks}

    def holds(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor is on the device."""
        storage = storage_of(tensor)
        return storage is not None and name_of(storage) in self._blocks

    def take(self, tensor: torch.Tensor) -> None:
        """Put a tensor on the device, or count it again where it grew.

        Raises:
            TypeError: For a type that MPS does not have.
            RuntimeError: Where the memory does not suffice.
        """
        storage = storage_of(tensor)
        if storage is None:
            return
        check_type(tensor.dtype)
        name, size = name_of(storage), storage.nbytes()
        known = self._blocks.get(name)
        if known is None or known.size != size:
            taken = self._allocator.allocate(size)
            self._free(name)
            self._blocks[name] = Block(weakref.ref(storage, lambda _gone: self._free(name)), size, taken)

    def leave(self, tensor: torch.Tensor) -> None:
        """Take a tensor off the device."""
        storage = storage_of(tensor)
        if storage is not None:
            self._free(name_of(storage))

    def _free(self, name: int) -> None:
        block = self._blocks.pop(name, None)
        if block is not None:
            self._allocator.free(block.taken)


def name_of(storage: torch.UntypedStorage) -> int:
    """Return what all Python objects of one storage have in common: its address."""
    return int(storage._cdata)  # noqa: SLF001 - torch has no public name for it


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Return the storage of a tensor that is really on the CPU; ``None`` for sparse tensors and other devices."""
    with torch._C.DisableTorchFunction():  # noqa: SLF001 - no mode is to answer for the tensor
        return unmoded_storage(tensor)


def unmoded_storage(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Return what :func:`storage_of` returns, where functions of torch see no mode.

    A tensor that ``torch.vmap`` passes around has the storage of the tensor inside of it.
    """
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    on_cpu = tensor.layout is torch.strided and torch._C.TensorBase.is_cpu.__get__(tensor)  # noqa: SLF001
    return tensor.untyped_storage() if on_cpu else None


def names_of(args: Any, kwargs: Any) -> list[int]:
    """Return the names of the storages of all tensors among the arguments of a function."""
    given = tensors(args) + tensors(kwargs) if kwargs else tensors(args)
    if not given:
        return []
    with torch._C.DisableTorchFunction():  # noqa: SLF001
        found = [unmoded_storage(tensor) for tensor in given]
    return [name_of(storage) for storage in found if storage is not None]


def check_type(dtype: torch.dtype) -> None:
    """Check that MPS has a type.

    Raises:
        TypeError: Where it has not.
    """
    refusal = {torch.float64: NO_FLOAT64, torch.complex128: NO_COMPLEX128}.get(dtype)
    if refusal:
        raise TypeError(refusal)


def tensors(thing: Any) -> list[torch.Tensor]:
    """Return the tensors in nested tuples, lists and dicts."""
    if isinstance(thing, torch.Tensor):
        return [thing]
    if not isinstance(thing, NESTED):
        return []
    found: list[torch.Tensor] = []
    for part in thing.values() if isinstance(thing, dict) else thing:
        if isinstance(part, torch.Tensor):
            found.append(part)
        elif isinstance(part, NESTED):
            found += tensors(part)
    return found
