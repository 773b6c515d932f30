"""Move whatever a person passes to a device, and say what had to be converted.

Moving tensors, batches, state dicts and modules to a device, with float64 made float32 where MPS has none.

Towards MPS every copy waits: one that does not can read memory that was freed meanwhile (pytorch#189690, #139550).
"""

from __future__ import annotations

import copy
import dataclasses
import re
import sys
import warnings
from collections import UserList, deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import ConfigurationError, NumberTooLarge, OpenMedWarning

if TYPE_CHECKING:
    import torch


NUMBERS = {"b": 1, "i": 8, "u": 8, "f": 8, "c": 16}
"""The kinds of numbers that torch has too, and their largest sizes in bytes; not text, objects, dates or float128."""


def is_array_of_numbers(thing: Any) -> bool:
    """Tell whether something is an array whose numbers a tensor can hold; one with a mask is not.

    Example:
        >>> import numpy
        >>> is_array_of_numbers(numpy.zeros(2)), is_array_of_numbers(numpy.array(["text"])), is_array_of_numbers([1.0])
        (True, False, False)
    """
    numpy = sys.modules.get("numpy")  # Where nobody has imported it there are no arrays.
    if numpy is None or not isinstance(thing, numpy.ndarray) or hasattr(thing, "mask"):
        return False
    return int(thing.dtype.itemsize) <= NUMBERS.get(thing.dtype.kind, 0)


def to_tensor(array: Any) -> torch.Tensor:
    """Return a tensor of the same numbers in the same type, in memory of its own.

    Turned arrays and those of another byte order can be made into one, too.

    Example:
        >>> import numpy
        >>> to_tensor(numpy.arange(3.0)[::-1])
        tensor([2., 1., 0.], dtype=torch.float64)
    """
    import torch

    return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), order="C"))


REPORTED: set[tuple[str, str]] = set()
"""Names with types whose conversion was reported in this process: a training loop moves thousands of batches."""

PACKAGE = __name__.partition(".")[0]

SHOWN = 3
"""So many names stand in a report."""

WORD = r"([a-z]+([0-9]{1,2}[a-z]*)?|[0-9]{1,3})"

FIELD_NAME = re.compile(rf"(?=.{{1,60}}\Z){WORD}([._]{WORD})*")
"""What is shown of a key: small letters and short numbers, such as ``"input_ids"`` or ``"layer.11.weight"``.

Anything else could be a text, a person or the number of a record.
"""


def report(converted: Mapping[str, tuple[str, str]], device: str) -> None:
    """Warn of conversions that were not reported before in this process.

    Args:
        converted: Names, empty for a value without one, with the types before and after.
        device: The kind of device, such as ``"mps"``.
    """
    new = {name: types for name, types in converted.items() if (name, types[0]) not in REPORTED}
    if new:
        REPORTED.update((name, types[0]) for name, types in new.items())
        warnings.warn(said_of(new, device), OpenMedWarning, stacklevel=level_of_caller())


def said_of(converted: Mapping[str, tuple[str, str]], device: str) -> str:
    """Return a sentence about conversions.

    Example:
        >>> said_of({"weights": ("float64", "float32")}, "mps")
        'Converted float64 to float32, because MPS has no float64: weights.'
    """
    kinds = sorted(set(converted.values()))
    changes = " and ".join(f"{before} to {after}" for before, after in kinds)
    missing = " and no ".join(before for before, _ in kinds)
    names = [name for name in converted if name]
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    where = f": {', '.join(names[:SHOWN])}{more}" if names else ""
    return f"Converted {changes}, because {device.upper()} has no {missing}{where}."


def shown_key(key: Any, place: int) -> str:
    """Return what is shown of a key: a plain name of a field, otherwise its place.

    Example:
        >>> shown_key("token_type_ids", 2), shown_key("MRN-00123_Jane-Doe", 0), shown_key(7, 1)
        ('token_type_ids', '[0]', '[1]')
    """
    return key if isinstance(key, str) and FIELD_NAME.fullmatch(key) else f"[{place}]"


def level_of_caller() -> int:
    """Return how many frames up from the caller the first one is that is not of this package: the person's line."""
    level, frame = 1, sys._getframe(1)  # noqa: SLF001
    while frame.f_back is not None and frame.f_globals["__name__"].partition(".")[0] == PACKAGE:
        level, frame = level + 1, frame.f_back
    return level


Thing = TypeVar("Thing")


def to_device(thing: Thing, device: str | torch.device) -> Thing:
    """Return tensors on a device; where that is MPS, float64 becomes float32 and complex128 complex64 before.

    Each conversion is reported once, as an :class:`~openmed_nb.errors.OpenMedWarning`.

    Args:
        thing: A tensor, a module, or mappings, lists, tuples, named tuples, deques, sets and dataclasses of tensors, in
            any depth, such as a batch or a state dict. NumPy arrays of numbers become tensors too: otherwise float64
            would go on unseen. What is no tensor stays as it is, such as texts and arrays of texts, and so do the types
            of whole numbers.
        device: The device, as torch spells it.

    Returns:
        For a module the module itself, moved in place as torch does; for anything else a new value of the same type.
        A mapping that cannot be changed, unless it is a ``MappingProxyType``, becomes a ``dict``. Tensors that are one
        tensor before, such as tied weights, are one afterwards.

    Raises:
        NumberTooLarge: For a float64 number that would become infinite in float32; nothing was moved then.
        ConfigurationError: For an optimizer, a module inside of something else, and a value that holds itself.

    Example:
        >>> import torch
        >>> batch = {"input_ids": torch.tensor([[2, 5, 3]]), "weights": torch.ones(1, dtype=torch.float64)}
        >>> moved = to_device(batch, "cpu")
        >>> moved["weights"].dtype, moved is batch
        (torch.float64, False)
    """
    import torch

    move = Move(torch.device(device))
    moved: Thing = move.module(thing) if isinstance(thing, torch.nn.Module) else move(thing, "")
    report(move.converted, move.device.type)
    return moved


class Move:
    """One call of :func:`to_device`: where it goes, what was moved already, and what was converted.

    Attributes:
        device: Where to.
        converted: The names of converted tensors, each with the type that it had and the one that it has.
    """

    def __init__(self, device: torch.device) -> None:
        import torch

        self.device = device
        self.converted: dict[str, tuple[str, str]] = {}
        self.narrower: Mapping[torch.dtype, torch.dtype] = {}
        if device.type == "mps":
            self.narrower = {torch.float64: torch.float32, torch.complex128: torch.complex64}
        self._moved: dict[tuple[Any, ...], tuple[torch.Tensor, torch.Tensor]] = {}
        self._inside: set[int] = set()

    def __call__(self, thing: Any, name: str) -> Any:
        """Return a value with its tensors moved."""
        import torch

        if isinstance(thing, torch.Tensor):
            return self._once(thing, name, self._tensor)
        if is_array_of_numbers(thing):
            return self._tensor(to_tensor(thing), name)
        _check_movable(thing)
        with self._entered(thing):
            return self._parts(thing, name)

    def _parts(self, thing: Any, name: str) -> Any:
        """Return a value that may hold others, with those moved."""
        import torch

        if isinstance(thing, torch.nn.utils.rnn.PackedSequence):
            return self._packed(thing, name)
        if isinstance(thing, Mapping):
            return self._mapping(thing, name)
        if isinstance(thing, (list, tuple, deque, UserList, set, frozenset)):
            return self._series(thing, name)
        if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
            return self._dataclass(thing, name)
        return thing

    @contextmanager
    def _entered(self, thing: Any) -> Iterator[None]:
        """Refuse a value that is inside of itself."""
        if id(thing) in self._inside:
            what = f"A {type(thing).__name__} that holds itself cannot be moved."
            raise ConfigurationError(what, "Leave that reference out of what is moved.")
        self._inside.add(id(thing))
        try:
            yield
        finally:
            self._inside.discard(id(thing))

    def module(self, module: Any) -> Any:
        """Move a module in place; buffers that several modules share stay shared."""
        import torch

        shared = _shared_buffers(module)
        with torch.no_grad():
            narrowed = {
                id(tensor): self._once(tensor, name, self._narrowed)
                for name, tensor in _held(module)
                if self._wide(tensor)
            }
            if narrowed:  # Module.to cannot: it would convert 16-bit tensors too.
                module._apply(lambda tensor: narrowed.get(id(tensor), tensor))  # noqa: SLF001
        module.to(self.device)
        for (first, name), *others in shared:
            for owner, other in others:
                setattr(owner, other, getattr(first, name))
        return module

    def _once(
        self, tensor: torch.Tensor, name: str, change: Callable[[torch.Tensor, str], torch.Tensor]
    ) -> torch.Tensor:
        """Change a tensor, or return what another look at the same numbers became."""
        key = _identity(tensor)
        if key not in self._moved:
            self._moved[key] = (
                tensor,
                change(tensor, name),
            )  # The tensor is held, so that its identity is not used again.
        return self._moved[key][1]

    def _tensor(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        # Only towards CUDA, from pinned memory, may a copy go on while the program does.
        apart = self.device.type == "cuda" and tensor.device.type == "cpu" and tensor.is_pinned()
        return self._narrowed(tensor, name).to(self.device, non_blocking=apart)

    def _narrowed(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Return a tensor in a type that the device has."""
        if not self._wide(tensor):
            return tensor
        dtype = self.narrower[tensor.dtype]
        narrow = tensor.to(dtype)
        _check_finite(tensor, narrow, name, self.device)
        self.converted[name] = _short(tensor.dtype), _short(dtype)
        return narrow

    def _wide(self, tensor: torch.Tensor) -> bool:
        return tensor.dtype in self.narrower

    def _packed(self, thing: Any, name: str) -> Any:
        """Move a packed sequence; its batch sizes stay on the CPU, where torch reads them."""
        fields = ("data", "sorted_indices", "unsorted_indices")
        return thing._replace(**{field: self(getattr(thing, field), f"{name}.{field}".lstrip(".")) for field in fields})

    def _tuple(self, thing: Any, name: str) -> Any:
        """Move a tuple or a named tuple; one in which nothing moves stays, such as a ``torch.Size``."""
        fields = getattr(thing, "_fields", None)
        names = (
            [f"{name}.{field}".lstrip(".") for field in fields]
            if fields
            else [f"{name}[{n}]" for n in range(len(thing))]
        )
        values = [self(one, own) for one, own in zip(thing, names, strict=True)]
        if all(one is value for one, value in zip(thing, values, strict=True)):
            return thing
        if hasattr(thing, "n_sequence_fields"):  # What functions such as torch.max return.
            return type(thing)(values)
        moved = tuple.__new__(type(thing), values)  # Its own constructor may take other things.
        getattr(moved, "__dict__", {}).update(getattr(thing, "__dict__", {}))
        return moved

    def _series(self, thing: Any, name: str) -> Any:
        if isinstance(thing, tuple):
            return self._tuple(thing, name)
        values = [self(one, f"{name}[{place}]") for place, one in enumerate(thing)]
        if isinstance(thing, (set, frozenset)):
            return type(thing)(values)
        moved = copy.copy(thing)
        for place, value in enumerate(values):
            moved[place] = value
        return moved

    def _mapping(self, thing: Mapping[Any, Any], name: str) -> Any:
        versions = getattr(thing, "_metadata", None)  # Those of a state dict, whose keys are names of layers.
        keys = [str(key) if versions else shown_key(key, place) for place, key in enumerate(thing)]
        parts = zip(keys, thing.items(), strict=True)
        values = {key: self(value, f"{name}.{own}".lstrip(".")) for own, (key, value) in parts}
        if type(thing) is dict:
            return values
        if isinstance(thing, MappingProxyType):
            return MappingProxyType(values)
        return _with_values(thing, values, versions) if isinstance(thing, MutableMapping) else values

    def _dataclass(self, thing: Any, name: str) -> Any:
        moved = copy.copy(thing)
        for field in dataclasses.fields(thing):
            if hasattr(thing, field.name):
                value = self(getattr(thing, field.name), f"{name}.{field.name}".lstrip("."))
                object.__setattr__(moved, field.name, value)  # A frozen one too: it is a new value.
        return moved


def _check_movable(thing: Any) -> None:
    """Refuse what has tensors that cannot be moved from here.

    Raises:
        ConfigurationError: For a module, which is moved in place and by itself, and for an optimizer.
    """
    import torch

    kind = type(thing).__name__
    if isinstance(thing, torch.nn.Module):
        raise ConfigurationError(f"The module {kind} is inside of something else.", "Pass the module by itself.")
    if isinstance(thing, torch.optim.Optimizer):
        remedy = "Move the model first, and then make the optimizer of its parameters."
        raise ConfigurationError(f"The optimizer {kind} cannot be moved.", remedy)


def _with_values(thing: MutableMapping[Any, Any], values: Mapping[Any, Any], versions: Any) -> MutableMapping[Any, Any]:
    """Return a copy of a mapping with other values, and with a state dict's versions, which a copy loses."""
    moved = copy.copy(thing)
    if versions is not None:
        moved._metadata = versions  # type: ignore[attr-defined]  # noqa: SLF001
    for key, value in values.items():  # A ModelOutput has no update().
        moved[key] = value
    return moved


def _held(module: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters of a module, their gradients and the buffers, saved or not, by name."""
    for name, parameter in module.named_parameters():
        yield name, parameter
        if parameter.grad is not None:
            yield f"{name}.grad", parameter.grad
    yield from module.named_buffers()


def _shared_buffers(module: Any) -> list[list[tuple[Any, str]]]:
    """Return the buffers that have several places, each as its places: a module and a name."""
    places: dict[int, list[tuple[Any, str]]] = {}
    for owner in module.modules():
        for name, buffer in owner.named_buffers(recurse=False, remove_duplicate=False):
            places.setdefault(id(buffer), []).append((owner, name))
    return [found for found in places.values() if len(found) > 1]


def _identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return what two tensors have in common that are the same numbers in the same memory."""
    import torch

    if tensor.layout != torch.strided or type(tensor) not in {torch.Tensor, torch.nn.Parameter}:
        return (id(tensor),)
    start = tensor.untyped_storage().data_ptr()
    looks = (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)
    return (start, *looks) if start and tensor.is_leaf else (id(tensor),)


def _check_finite(wide: torch.Tensor, narrow: torch.Tensor, name: str, device: torch.device) -> None:
    """Refuse numbers that became infinite.

    Raises:
        NumberTooLarge: Where there are some; their names and how many, not the numbers.
    """
    lost = int((numbers_in(narrow).isinf() & ~numbers_in(wide).isinf()).sum())
    if lost:
        numbers = f"{lost:,} number{'s' if lost > 1 else ''} in {_short(wide.dtype)}"
        what = f"{name or 'The tensor'} has {numbers} that would be infinite in {_short(narrow.dtype)}"
        raise NumberTooLarge(
            f"{what}, the widest type of {device.type}.", "Scale or clamp them below 3.4e38, or stay on the CPU."
        )


def numbers_in(tensor: torch.Tensor) -> torch.Tensor:
    """Return the numbers that a sparse or nested tensor holds, or the tensor itself."""
    import torch

    if tensor.layout == torch.sparse_coo:
        return tensor._values()  # noqa: SLF001 - values() wants a coalesced one
    return tensor.values() if tensor.is_nested or tensor.layout != torch.strided else tensor


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
