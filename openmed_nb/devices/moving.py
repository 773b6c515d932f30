"""Tensors inside of other values: find them, change them, move whatever a person passes to a device, and copy a model.

Towards MPS every copy waits, and for all that was started there before; one that does not wait can read memory that was freed
meanwhile (pytorch#189690, #139550).
MPS has no float64; such tensors become float32 on the way, and each conversion is reported once.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import re
import sys
from collections import UserList, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from .._render.display import pluralize
from .._utils.text import describe_error, short_type_name
from .._utils.warning import warn
from ..errors import ConfigurationError, DtypeOverflowError
from .backend import TENSOR_LOCK
from .registry import parse_device_argument

if TYPE_CHECKING:
    import numpy as np
    import torch

T = TypeVar("T")

# Bytes; to pin memory for so few takes longer than the copy, and CUDA reads them before it goes on.
MAX_UNPINNED_BYTES = 1 << 16


def mps_dtype_fallbacks(device: str | torch.device) -> dict[torch.dtype, torch.dtype]:
    """Return the types of torch that a device does not have, each with the one that takes its place."""
    import torch

    narrower = parse_device_argument(device).narrower
    return {getattr(torch, wide): getattr(torch, narrow) for wide, narrow in narrower.items()}


def arrays_to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Return arrays of one type as tensors on a device, in one copy; it may be under way, in order with the work that follows.

    One copy, because each towards MPS waits for all work before it. Only towards CUDA, from pinned memory, may a copy go on
    while the program does. Towards MPS such a copy can read memory that was freed meanwhile, and back from it one can be
    read before it is there (pytorch#189690, #139550).
    """
    import numpy as np
    import torch

    target = parse_device_argument(device)
    if not target.is_accelerator or not arrays:
        return [torch.from_numpy(array) for array in arrays]
    flat = [array.reshape(-1) for array in arrays]
    if target.queues_copies and sum(array.nbytes for array in flat) > MAX_UNPINNED_BYTES:
        kind = torch.from_numpy(flat[0]).dtype
        packed = torch.empty(sum(map(len, flat)), dtype=kind, device="cpu", pin_memory=True)
        np.concatenate(flat, out=packed.numpy())
    else:
        packed = torch.from_numpy(np.concatenate(flat))
    moved = packed.to(device, non_blocking=target.queues_copies)
    ends = itertools.accumulate(array.size for array in flat)
    return [moved[end - array.size : end].view(array.shape) for array, end in zip(arrays, ends, strict=True)]


def copy_to_host_async(tensor: torch.Tensor) -> torch.Tensor:
    """Begin to copy a tensor to the host, without waiting on CUDA: wait as ``Device.work_done`` says before it is read."""
    return tensor.to("cpu", non_blocking=True) if parse_device_argument(tensor.device).queues_copies else tensor


def to_numpy(tensor: torch.Tensor) -> Any:
    return tensor.cpu().numpy()


def get_children(value: Any) -> list[tuple[Any, Any]] | None:
    """Return the parts of a mapping, a series or a dataclass with their keys, places or fields; ``None`` for anything else.

    A ``BatchEncoding`` of transformers is a mapping and not a ``dict``; a ``ModelOutput`` is both ``dict`` and dataclass.
    """
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, (list, tuple, deque, UserList, set, frozenset)):
        return list(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = (field.name for field in dataclasses.fields(value))
        return [(name, getattr(value, name)) for name in names if hasattr(value, name)]
    return None


def replace_children(value: Any, parts: list[Any]) -> Any:
    """Return a value of the same type with other parts, in the order of :func:`get_children`.

    A mapping that cannot be written becomes a ``dict``, unless it is a ``MappingProxyType``. A tuple whose parts are the
    same stays itself, such as a ``torch.Size``.
    """
    if isinstance(value, tuple):
        if all(new is old for new, old in zip(parts, value, strict=True)):
            return value
        if hasattr(value, "n_sequence_fields"):  # What functions such as torch.max return.
            return type(value)(parts)
        made = tuple.__new__(type(value), parts)  # Its own constructor may take other things.
        getattr(made, "__dict__", {}).update(getattr(value, "__dict__", {}))
        return made
    if isinstance(value, (set, frozenset)):
        return type(value)(parts)
    pairs = {key: part for (key, _), part in zip(get_children(value) or (), parts, strict=True)}
    is_mapping = isinstance(value, Mapping)
    if is_mapping and not isinstance(value, MutableMapping):
        return MappingProxyType(pairs) if isinstance(value, MappingProxyType) else pairs
    changed = copy.copy(value)
    if hasattr(value, "_metadata"):  # The versions of a state dict, which a copy loses.
        changed._metadata = value._metadata  # noqa: SLF001
    for key, part in pairs.items():
        if dataclasses.is_dataclass(value) and not is_mapping:
            object.__setattr__(changed, key, part)  # A frozen one too: it is a new value.
        else:  # A ModelOutput has no update().
            changed[key] = part
    return changed


def named_tensors(value: Any, name: str = "", inside: tuple[int, ...] = ()) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in nested mappings, series and dataclasses with their names, those inside of others joined by dots."""
    import torch

    if isinstance(value, torch.Tensor):
        yield name, value
    elif id(value) not in inside:  # A value may hold itself.
        for key, part in get_children(value) or ():
            yield from named_tensors(part, f"{name}.{key}" if name else str(key), (*inside, id(value)))


def iter_operator_tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors in tuples, lists and dicts, as operators take and return them; modes ask this for each operator."""
    import torch

    if isinstance(value, torch.Tensor):
        return [value]
    if not isinstance(value, (tuple, list, dict)):
        return []
    tensors: list[torch.Tensor] = []
    for part in value.values() if isinstance(value, dict) else value:
        if isinstance(part, torch.Tensor):
            tensors.append(part)
        elif isinstance(part, (tuple, list, dict)):
            tensors += iter_operator_tensors(part)
    return tensors


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a value of the same type with its tensors changed; what has none in it stays itself."""
    import torch

    if isinstance(value, torch.Tensor):
        return change(value)
    if next(named_tensors(value), None) is None:
        return value
    return replace_children(value, [map_tensors(part, change) for _, part in get_children(value) or ()])


def get_module(thing: Any, remedy: str = "Pass the name of a model, a torch module or a pipeline.") -> torch.nn.Module:
    """Return the torch module that a thing is, or that a pipeline or a loaded model holds."""
    import torch

    module = thing if isinstance(thing, torch.nn.Module) else getattr(thing, "model", None)
    if not isinstance(module, torch.nn.Module):
        raise ConfigurationError(f"{short_type_name(thing)} is not a model.", remedy)
    return module


def unwrap_model(model: Any) -> Any:
    """Return the model inside of what was put around it for compiling, for several devices or for adapters."""
    for name in ("_orig_mod", "module"):
        model = getattr(model, name, model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def underlying_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return the numbers that a sparse or nested tensor holds, or the tensor itself."""
    import torch

    if tensor.layout == torch.sparse_coo:
        return tensor._values()  # noqa: SLF001 - values() wants a coalesced one
    return tensor.values() if tensor.is_nested or tensor.layout != torch.strided else tensor


WORD = r"([a-z]+([0-9]{1,2}[a-z]*)?|[0-9]{1,3})"

# What is shown of a key: small letters and short numbers, such as "input_ids" or "layer.11.weight". Anything else could
# be a text, a person or the number of a record.
FIELD_NAME = re.compile(rf"(?=.{{1,60}}\Z){WORD}([._]{WORD})*")


def safe_key_name(key: Any, place: int) -> str:
    """Return what is shown of a key: a plain name of a field, otherwise its place."""
    return key if isinstance(key, str) and FIELD_NAME.fullmatch(key) else f"[{place}]"


# The kinds of numbers that torch has too, and their largest sizes in bytes; not text, objects, dates or float128.
NUMBERS = {"b": 1, "i": 8, "u": 8, "f": 8, "c": 16}


def is_numeric_array(thing: Any) -> bool:
    """Tell whether something is an array whose numbers a tensor can hold; one with a mask is not."""
    numpy = sys.modules.get("numpy")  # Without numpy imported there are no arrays.
    if numpy is None or not isinstance(thing, numpy.ndarray) or hasattr(thing, "mask"):
        return False
    return int(thing.dtype.itemsize) <= NUMBERS.get(thing.dtype.kind, 0)


def to_device(thing: T, device: str | torch.device) -> T:
    """Return tensors on a device; where that is MPS, float64 becomes float32 and complex128 complex64 before.

    A module is moved in place, as torch does; anything else becomes a new value of the same type, and NumPy arrays of
    numbers become tensors, because their float64 would otherwise go on unseen. Tensors that are one tensor before, such
    as tied weights, are one afterwards.
    """
    import torch

    move = TensorMover(torch.device(device))
    moved: T = move.move_module(thing) if isinstance(thing, torch.nn.Module) else move(thing, "")
    warn_of_conversions(move.converted, move.device.type)
    return moved


class TensorMover:
    """One call of :func:`to_device`: where it goes, what was moved already, and which tensors were converted."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # The names of converted tensors, each with the type that it had and the one that it has.
        self.converted: dict[str, tuple[str, str]] = {}
        self.narrower = mps_dtype_fallbacks(device)
        # By identity: a tensor, held so that its identity is not used again, and what it became.
        self._moved: dict[tuple[Any, ...], tuple[torch.Tensor, torch.Tensor]] = {}
        self._inside: set[int] = set()

    def __call__(self, thing: Any, name: str) -> Any:
        """Return a value with its tensors moved."""
        import torch

        if isinstance(thing, torch.Tensor):
            return self._move_once(thing, name, self._tensor)
        if is_numeric_array(thing):  # Turned arrays and those of another byte order can be made into a tensor, too.
            native = thing.astype(thing.dtype.newbyteorder("="), order="C")
            return self._tensor(torch.from_numpy(native), name)
        kind = type(thing).__name__
        if isinstance(thing, torch.nn.Module):
            raise ConfigurationError(f"The module {kind} is inside of something else.", "Pass the module by itself.")
        if isinstance(thing, torch.optim.Optimizer):
            remedy = "Move the model first, and then make the optimizer of its parameters."
            raise ConfigurationError(f"The optimizer {kind} cannot be moved.", remedy)
        if id(thing) in self._inside:
            what = f"A {kind} that holds itself cannot be moved."
            raise ConfigurationError(what, "Leave that reference out of what is moved.")
        parts = get_children(thing)
        if parts is None:
            return thing
        self._inside.add(id(thing))
        try:
            return replace_children(thing, [self._part(thing, name, place, *pair) for place, pair in enumerate(parts)])
        finally:
            self._inside.discard(id(thing))

    def _part(self, thing: Any, name: str, place: int, key: Any, part: Any) -> Any:
        """Return a part of a value, moved; its name shows the key only where that cannot be a text or a person."""
        import torch

        if isinstance(thing, Mapping):
            of_layers = getattr(thing, "_metadata", None)  # A state dict has it; its keys are names of layers.
            own = str(key) if of_layers else safe_key_name(key, place)
        elif isinstance(key, int) and not hasattr(thing, "_fields"):
            return self(part, f"{name}[{place}]")
        else:
            own = key if isinstance(key, str) else thing._fields[place]
            if own == "batch_sizes" and isinstance(thing, torch.nn.utils.rnn.PackedSequence):
                return part  # torch reads it on the CPU.
        return self(part, f"{name}.{own}".lstrip("."))

    def move_module(self, module: Any) -> Any:
        """Move a module in place; buffers that several modules share stay shared."""
        import torch

        shared = _shared_buffers(module)
        with torch.no_grad():
            wide = ((name, tensor) for name, tensor in _iter_module_tensors(module) if tensor.dtype in self.narrower)
            narrowed = {id(tensor): self._move_once(tensor, name, self._downcast) for name, tensor in wide}
            if narrowed:  # Module.to cannot: it would convert 16-bit tensors too.
                module._apply(lambda tensor: narrowed.get(id(tensor), tensor))  # noqa: SLF001
        module.to(self.device)
        for (first, name), *others in shared:
            for owner, other in others:
                setattr(owner, other, getattr(first, name))
        return module

    def _move_once(
        self, tensor: torch.Tensor, name: str, change: Callable[[torch.Tensor, str], torch.Tensor]
    ) -> torch.Tensor:
        """Change a tensor, or return what another view of the same numbers became."""
        key = _identity(tensor)
        if key not in self._moved:
            self._moved[key] = (tensor, change(tensor, name))
        return self._moved[key][1]

    def _tensor(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        # Only towards CUDA, from pinned memory, may a copy go on while the program does.
        apart = parse_device_argument(self.device).queues_copies and tensor.device.type == "cpu" and tensor.is_pinned()
        return self._downcast(tensor, name).to(self.device, non_blocking=apart)

    def _downcast(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Return a tensor in a type that the device has, and refuse numbers that would become infinite."""
        dtype = self.narrower.get(tensor.dtype)
        if dtype is None:
            return tensor
        narrow = tensor.to(dtype)
        before, after = (str(one.dtype).removeprefix("torch.") for one in (tensor, narrow))
        lost = int((underlying_values(narrow).isinf() & ~underlying_values(tensor).isinf()).sum())
        if lost:
            numbers = f"{name or 'The tensor'} has {pluralize(lost, 'number')} in {before}"
            what = f"{numbers} that would be infinite in {after}, the widest type of {self.device.type}."
            raise DtypeOverflowError(what, "Scale or clamp them below 3.4e38, or stay on the CPU.")
        self.converted[name] = (before, after)
        return narrow


def _iter_module_tensors(module: Any) -> Iterator[tuple[str, torch.Tensor]]:
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
    view = (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)
    return (start, *view) if start and tensor.is_leaf else (id(tensor),)


def copy_model(model: torch.nn.Module, device: str = "cpu", dtype: torch.dtype | None = None) -> torch.nn.Module:
    """Return a copy of a model without its gradients; the model may be on any device, and stays as it is.

    Its tensors are copied one by one to the CPU, so that no second copy is made on the device of the model. Of a model that
    ``torch.compile`` made, the model inside is copied; hooks come along. ``dtype`` is that of its floating-point numbers.
    """
    import torch

    inner = getattr(model, "_orig_mod", model)
    name = type(inner).__name__
    tensors = [*inner.parameters(), *inner.buffers()]
    check_materialized(name, tensors)
    types = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors}
    for wide in sorted(types.intersection(parse_device_argument(device).narrower)):
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
        what = f"{name} cannot be copied: {describe_error(error)}."
        raise ConfigurationError(what, "Take out of the model what cannot be copied.") from error
    for mine, theirs in zip(copied.parameters(), inner.parameters(), strict=True):
        if mine.requires_grad != theirs.requires_grad:
            mine.requires_grad_(theirs.requires_grad)
    return copied.to(torch.device(device))


def check_materialized(what: str, tensors: Iterable[torch.Tensor]) -> None:
    """Refuse tensors with a shape only; ``what`` names what they are the tensors of."""
    empty = sum(tensor.is_meta for tensor in tensors)
    if empty:
        said = f"{what} has {pluralize(empty, 'tensor')} with a shape and no memory (device meta)."
        raise ConfigurationError(said, "Load the weights, or make real inputs, and try again.")


# Names with types whose conversion was reported in this process: a training loop moves thousands of batches.
REPORTED_CONVERSIONS: set[tuple[str, str]] = set()
MAX_LISTED_NAMES = 3  # How many names stand in a report.


def warn_of_conversions(converted: Mapping[str, tuple[str, str]], device: str) -> None:
    """Warn, in one sentence, of conversions that were not reported before in this process."""
    new = {name: types for name, types in converted.items() if (name, types[0]) not in REPORTED_CONVERSIONS}
    if not new:
        return
    REPORTED_CONVERSIONS.update((name, types[0]) for name, types in new.items())
    kinds = sorted(set(new.values()))
    changes = " and ".join(f"{before} to {after}" for before, after in kinds)
    missing = " and no ".join(before for before, _ in kinds)
    names = [name for name in new if name]
    more = f" and {len(names) - MAX_LISTED_NAMES} more" if len(names) > MAX_LISTED_NAMES else ""
    where = f": {', '.join(names[:MAX_LISTED_NAMES])}{more}" if names else ""
    warn(f"Converted {changes}, because {device.upper()} has no {missing}{where}.")
