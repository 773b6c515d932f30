"""The two modes of torch that make CPU tensors pass for tensors of MPS; imported where a simulation begins.

One sees every function that Python calls: it answers for the device, moves tensors, and raises what torch's Python side
raises. The other sees every operator below that, also in a backward pass: it counts what they make, and raises what MPS
raises. A mode counts in the thread that entered it.

A tensor is on the device if its storage is. Views, ``detach``, ``.data`` and ``.grad`` then need no rule of their own,
and memory that only an autograd graph holds counts as long as it lives. torch keeps the Python object of a storage as
long as its memory (since 2.1), so a weak reference tells when the memory is freed.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS
from torch.overrides import TorchFunctionMode
from torch.utils import _device as default_device
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from ..devices.moving import iter_operator_tensors
from .memory import SimulatedAllocator
from .operators import (
    ALWAYS_ON_CPU,
    LENGTHS_ON_MPS,
    LINEAR_ON_CPU,
    NO_COMPLEX128,
    NO_DROPOUT,
    NO_FLOAT64,
    NO_NUMPY,
    NO_PLACEHOLDER,
    OTHER_GENERATOR,
    OTHER_GRADIENT,
    OTHER_RNN_DEVICE,
    OTHER_ROOT_GRADIENT,
    SECTIONS_ON_MPS,
    FallbackPolicy,
    OperatorCall,
    check_operator,
    made_where_first_is,
    names_above_autograd,
)

functorch = torch._C._functorch  # noqa: SLF001 - torch has no public name for it

# What a storage says before a simulation replaces it. That of a FakeTensor is meta, whatever the tensor says.
DEVICE_OF_STORAGE = torch.UntypedStorage.device.__get__


COMPRESSED_ROWS = frozenset({torch.sparse_csr, torch.sparse_bsr})
COMPRESSED_COLUMNS = frozenset({torch.sparse_csc, torch.sparse_bsc})


class DeviceStorages:
    """The storages that are on the device."""

    def __init__(self, allocator: SimulatedAllocator) -> None:
        self._allocator = allocator
        # Of each storage: what tells when its memory is freed, its bytes, and those of its block.
        self._blocks: dict[int, tuple[weakref.ref[torch.UntypedStorage], int, int]] = {}

    def __contains__(self, name: int) -> bool:
        return name in self._blocks

    def has_any(self, names: Iterable[int]) -> bool:
        """Tell whether one of some storages is on the device."""
        return not self._blocks.keys().isdisjoint(names)

    def not_on_device(self, names: Iterable[int]) -> set[int]:
        """Return those of some storages that are not on the device."""
        return {name for name in names if name not in self._blocks}

    def contains(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor is on the device."""
        storage = storage_of(tensor)
        return storage is not None and storage_key(storage) in self._blocks

    def add(self, tensor: torch.Tensor) -> None:
        """Put a tensor on the device, or count it again where it grew."""
        with torch._C.DisableTorchFunction():  # noqa: SLF001
            _values, *indices = tensors_in(tensor)
        for part in indices:
            self.add(part)
        storage = storage_of(tensor)
        if storage is None:
            return
        check_type(tensor.dtype)
        name, size = storage_key(storage), storage.nbytes()
        known = self._blocks.get(name)
        if known is None or known[1] != size:
            taken = self._allocator.allocate(size)
            self._free(name)
            self._blocks[name] = (weakref.ref(storage, lambda _gone: self._free(name)), size, taken)

    def remove(self, tensor: torch.Tensor) -> None:
        """Take a tensor off the device."""
        storage = storage_of(tensor)
        if storage is not None:
            self._free(storage_key(storage))

    def _free(self, name: int) -> None:
        block = self._blocks.pop(name, None)
        if block is not None:
            self._allocator.free(block[2])


def storage_key(storage: torch.UntypedStorage) -> int:
    """Return what all Python objects of one storage have in common: its address."""
    return int(storage._cdata)  # noqa: SLF001 - torch has no public name for it


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Return the storage of a tensor that is really on the CPU; ``None`` for one of another device."""
    with torch._C.DisableTorchFunction():  # noqa: SLF001 - no mode is to answer for the tensor
        return storage_without_modes(tensor)


def storage_without_modes(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Return what :func:`storage_of` returns, where functions of torch see no mode.

    A tensor that ``torch.vmap`` passes around has the storage of the tensor inside of it, and a sparse or jagged one
    that of its values.
    """
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    # A jagged tensor asks its values for the device.
    if tensor.layout is torch.jagged or (
        tensor.layout is not torch.strided and torch._C.TensorBase.is_cpu.__get__(tensor)  # noqa: SLF001
    ):
        tensor = tensors_in(tensor)[0]
    on_cpu = tensor.layout is torch.strided and torch._C.TensorBase.is_cpu.__get__(tensor)  # noqa: SLF001
    storage = tensor.untyped_storage() if on_cpu else None
    return None if storage is not None and DEVICE_OF_STORAGE(storage).type == "meta" else storage


def tensors_in(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that a sparse or jagged tensor consists of, its values first, without a mode that sees them."""
    with torch._C._DisableTorchDispatch():  # noqa: SLF001
        if tensor.layout is torch.sparse_coo:
            return [tensor._values(), tensor._indices()]  # noqa: SLF001 - values() wants a coalesced one
        if tensor.layout in COMPRESSED_ROWS:
            return [tensor.values(), tensor.crow_indices(), tensor.col_indices()]
        if tensor.layout in COMPRESSED_COLUMNS:
            return [tensor.values(), tensor.ccol_indices(), tensor.row_indices()]
        if tensor.layout is torch.jagged:
            return [tensor._values, tensor._offsets]  # noqa: SLF001
    return [tensor]


def storage_keys(args: Any, kwargs: Any) -> list[int]:
    """Return the names of the storages of all tensors among the arguments of a function."""
    given = iter_operator_tensors(args) + iter_operator_tensors(kwargs) if kwargs else iter_operator_tensors(args)
    if not given:
        return []
    with torch._C.DisableTorchFunction():  # noqa: SLF001
        found = [storage_without_modes(tensor) for tensor in given]
    return [storage_key(storage) for storage in found if storage is not None]


# The types that MPS does not have, with its words.
REFUSED_TYPES = {torch.float64: NO_FLOAT64, torch.complex128: NO_COMPLEX128}


def check_type(dtype: torch.dtype) -> None:
    """Refuse a type that MPS does not have."""
    if dtype in REFUSED_TYPES:
        raise TypeError(REFUSED_TYPES[dtype])


@dataclass(frozen=True)
class DeviceCopy:
    """A copy of a tensor from a device to another, and whether the program was to go on while it is made."""

    source: str
    target: str
    non_blocking: bool


@dataclass
class SimulatedDevice:
    """The simulated device."""

    allocator: SimulatedAllocator
    fallbacks: FallbackPolicy
    storages: DeviceStorages
    copies: list[DeviceCopy] = field(default_factory=list)
    call_counts: Counter[str] = field(default_factory=Counter)
    # What computes instead of each operator, or function of torch, that goes wrong on this device.
    active_defects: Mapping[str, Sequence[Callable[[OperatorCall], Any]]] = field(default_factory=dict)
    paused: bool = False  # Whether operators are those of the CPU.
    # Tensors of the CPU that the program gave to the function that runs, beside tensors of the device, by the names of
    # their storages. Those that torch makes inside of the function would be on the device on a Mac.
    strangers: dict[int, torch.Tensor] = field(default_factory=dict)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Let operators be those of the CPU for a while."""
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before

    @contextlib.contextmanager
    def beside(self, strangers: dict[int, torch.Tensor]) -> Iterator[None]:
        """Let operators refuse some tensors of the CPU for a while."""
        before, self.strangers = self.strangers, strangers
        try:
            yield
        finally:
            self.strangers = before

    def check(self, operator: Any, args: Any, kwargs: Any) -> None:
        """Refuse tensors of two devices where an operator does."""
        tensors = iter_operator_tensors(args) + iter_operator_tensors(kwargs)
        strangers = [tensor for tensor in tensors if self._is_stranger(tensor)]
        if len(strangers) < len(tensors) and any(map(self.storages.contains, tensors)):
            check_operator(operator, args, kwargs, strangers)

    def _is_stranger(self, tensor: torch.Tensor) -> bool:
        storage = storage_of(tensor)
        return storage is not None and storage_key(storage) in self.strangers

    def follow_strangers(self, given: list[int], made: Any) -> None:
        """Note what an operator made of tensors of the CPU alone, which the program gave."""
        if self.strangers and given and all(name in self.strangers for name in given):
            self.strangers.update(
                {name: tensor for tensor in iter_operator_tensors(made) for name in storage_keys([tensor], None)}
            )

    def with_defects(self, name: str, operator: Callable[..., Any]) -> Callable[..., Any]:
        """Return what computes instead of an operator or a function of torch on this device: itself, unless it goes wrong."""
        for wrong in self.active_defects.get(name, ()):
            operator = self._with_defect(wrong, name, operator)
        return operator

    def _with_defect(
        self, wrong: Callable[[OperatorCall], Any], name: str, operator: Callable[..., Any]
    ) -> Callable[..., Any]:
        @functools.wraps(operator)
        def compute(*args: Any, **kwargs: Any) -> Any:
            dirty = self.allocator.driver_allocated > self.allocator.allocated
            return wrong(OperatorCall(name, operator, args, kwargs, dirty, self.storages.contains))

        return compute

    def add_outputs(self, made: Any, elsewhere: Collection[int]) -> None:
        """Put the tensors that were made on the device, but for those whose storages stand elsewhere."""
        for tensor in iter_operator_tensors(made):
            storage = storage_of(tensor)
            if storage is not None and storage_key(storage) not in elsewhere:
                self.storages.add(tensor)

    def copy_differentiable(self, tensor: torch.Tensor, towards: bool) -> torch.Tensor:
        """Return a copy of a tensor on the device, or off it; gradients find their way back."""
        if tensor.requires_grad and torch.is_grad_enabled():
            return DifferentiableCopy.apply(tensor, self, towards)
        return self.copied(tensor.detach(), towards)

    def copied(self, tensor: torch.Tensor, towards: bool) -> torch.Tensor:
        """Return a copy of a tensor that no gradient passes."""
        if towards:
            check_type(tensor.dtype)
            self.allocator.check(tensor.numel() * tensor.element_size())
        if tensor.layout is torch.jagged:
            return self._copied_jagged(tensor, towards)
        with torch._C.DisableTorchFunction(), self.pause():  # noqa: SLF001
            copy = tensor.clone()
            if towards:
                self.storages.add(copy)
        return copy

    def _copied_jagged(self, tensor: torch.Tensor, towards: bool) -> torch.Tensor:
        """Return a copy of a jagged tensor with offsets of its own, which a clone would share with it."""
        values, offsets = (self.copied(part, towards) for part in tensors_in(tensor))
        lengths = tensor._lengths  # noqa: SLF001
        lengths = None if lengths is None else self.copied(lengths, towards)
        return torch.nested.nested_tensor_from_jagged(values, offsets, lengths, tensor._ragged_idx)  # noqa: SLF001

    def record_copy(self, from_here: bool, non_blocking: bool = False) -> None:
        """Note a copy between the devices."""
        source, target = ("mps", "cpu") if from_here else ("cpu", "mps")
        self.copies.append(DeviceCopy(source, target, non_blocking))


class DifferentiableCopy(torch.autograd.Function):
    """A copy between the devices whose gradient is copied the other way."""

    @staticmethod
    def forward(context: Any, tensor: torch.Tensor, device: SimulatedDevice, towards: bool) -> torch.Tensor:
        """Return the copy."""
        context.device, context.towards = device, towards
        return device.copied(tensor, towards)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Return the gradient, where the tensor was."""
        return context.device.copy_differentiable(gradient, not context.towards), None, None


MPS, CPU = torch.device("mps", 0), torch.device("cpu")

# Functions that put a tensor on its device before any operator is called.
BY_THEMSELVES = frozenset({"to", "tensor", "as_tensor", "asarray", "new_tensor", "from_file"})

NO_HOST_MEMORY = re.compile(r"DefaultCPUAllocator: .*?you tried to allocate (\d+)")


class OperatorMode(TorchDispatchMode):
    """Sees every operator: counts what is made of tensors of the device, and refuses what MPS does not have."""

    def __init__(self, device: SimulatedDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operator, as one of the device where a tensor of the device is among its arguments."""
        kwargs = kwargs or {}
        if types and any(tensor.layout is torch.jagged for tensor in iter_operator_tensors(args)):
            return NotImplemented  # A jagged tensor calls operators with its values, which come here again.
        with torch._C.DisableTorchFunction():  # noqa: SLF001
            given = storage_keys(args, kwargs)
            here = self._device.storages.has_any(given)
            made_here = getattr(kwargs.get("device"), "type", "") == "mps"
            if made_here:
                kwargs = {**kwargs, "device": CPU}
            if self._device.paused:
                return operator(*args, **kwargs)
            if here or made_here:
                return self._call(operator, args, kwargs, given, here)
            made = operator(*args, **kwargs)
            self._device.follow_strangers(given, made)
            return made

    def _call(self, operator: Any, args: Any, kwargs: Any, given: list[int], here: bool) -> Any:
        """Call an operator of the device: refuse what MPS refuses, and put what it makes on the device."""
        if torch.is_inference_mode_enabled() and operator.name() not in ALWAYS_ON_CPU:
            with self:  # torch has not taken it apart yet, as it does elsewhere.
                made = operator.decompose(*args, **kwargs)
            if made is not NotImplemented:
                return made
        if here and self._device.strangers:
            self._device.check(operator, args, kwargs)
        self._device.fallbacks.handle(operator.name(), torch.is_warn_always_enabled())
        elsewhere = self._device.storages.not_on_device(given)
        if size := allocation_size(operator, args, kwargs):
            self._device.allocator.check(size)
        try:
            made = self._computed(operator, args, kwargs)
        except RuntimeError as error:  # Even this computer has not the memory: MPS would say so in its words.
            if refused := NO_HOST_MEMORY.search(str(error)):
                self._device.allocator.check(int(refused[1]))
            raise
        if made_where_first_is(operator, args) and not self._device.storages.contains(args[0]):
            self._device.strangers.update(dict.fromkeys(storage_keys([made], None), made))
        else:
            self._device.add_outputs(made, elsewhere)
        return made

    def _computed(self, operator: Any, args: Any, kwargs: Any) -> Any:
        """Return what an operator makes; one that is written in Python calls others, which come here again."""
        written = OPDEFS.get(operator.name())
        function = None if written is None else written._backend_fns.get("cpu", written._backend_fns.get(None))  # noqa: SLF001
        if function is None:
            return self._device.with_defects(operator.name(), operator)(*args, **kwargs)
        with self:
            return function(*args, **kwargs)


class FunctionMode(TorchFunctionMode):
    """Sees every function of torch that Python calls: answers for the device, and moves tensors to it and back."""

    def __init__(self, device: SimulatedDevice) -> None:
        super().__init__()
        self._device = device
        self._holds = device.storages.contains

    def __torch_function__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer for the device, or call the function with arguments that are right on the CPU."""
        name = getattr(function, "__name__", "")
        if name == "__get__":
            return function(*args)
        kwargs = kwargs or {}
        if name in {"to", "cpu"}:
            return self._move(function, list(args), dict(kwargs))
        if name == "type_as":
            return self._move(torch.Tensor.to, list(args), dict(kwargs))
        if kwargs.get("generator") is not None:
            self._check_generator(function, args, kwargs)
        given = storage_keys(args, kwargs)
        here = self._device.storages.has_any(given)
        if not here and kwargs.get("device") is None and default_device.CURRENT_DEVICE is None:
            return function(*args, **kwargs)
        strangers = self._strangers(args, kwargs) if here else {}
        if here:
            self._device.call_counts[name] += 1
            function = self._device.with_defects(name, function)
            if strangers:
                self._check_devices(function, args, kwargs)
        with self._device.beside(strangers):
            if here and name in METHODS and self._answers(name, args, kwargs):
                return METHODS[name](self, function, *args, **kwargs)
            return self._call(function, args, dict(kwargs), given, here)

    def _strangers(self, args: Any, kwargs: dict[str, Any]) -> dict[int, torch.Tensor]:
        """Return the tensors of the CPU among the arguments, by the names of their storages."""
        found = {}
        for tensor in iter_operator_tensors([args, kwargs]):
            storage = storage_of(tensor)
            if storage is not None and storage_key(storage) not in self._device.storages:
                found[storage_key(storage)] = tensor
        return found

    def _answers(self, name: str, args: Any, kwargs: dict[str, Any]) -> bool:
        """Return whether the device answers a function in its own way: where its first tensor is there, or any."""
        return name in SECOND_ON_CPU or self._holds(iter_operator_tensors([args, kwargs])[0])

    def _check_devices(self, function: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Raise what torch raises for tensors of two devices above its operators."""
        name = function.__name__
        if getattr(function, "__self__", None) is torch.Tensor.grad:
            raise RuntimeError(OTHER_GRADIENT)
        if name in RECURRENT:
            self._check_recurrent(name, args)
        elif name == "linear":
            self._check_linear(args, kwargs)
        elif name == "copy_":
            self._device.record_copy(self._holds(args[1]), is_non_blocking(args[2:], kwargs))

    def _check_linear(self, args: Any, kwargs: dict[str, Any]) -> None:
        """Refuse a linear layer of two devices, which is one operator on MPS."""
        names = ("input", "weight", "bias")
        for name, tensor in {**dict(zip(names, args, strict=False)), **kwargs}.items():
            if tensor is not None and not self._holds(tensor):
                raise RuntimeError(LINEAR_ON_CPU.format(name))

    def _check_recurrent(self, name: str, args: Any) -> None:
        """Refuse a recurrent network of two devices; only the sizes of the batches are on the CPU.

        ``_lstm_mps`` is one graph for input on MPS; anything else checks its arguments before it computes.
        """
        packed = isinstance(args[3], (list, tuple))  # Then the sizes come second.
        given = args[0]
        hidden, parameters = (iter_operator_tensors([argument]) for argument in (args[2:4] if packed else args[1:3]))
        here = self._holds(given)
        for kind, tensors in (("hidden", hidden), ("parameter", parameters)):
            if all(self._holds(tensor) == here for tensor in tensors):
                continue
            if name == "lstm" and here:
                raise RuntimeError(NO_PLACEHOLDER)
            places = (MPS, CPU) if here else (CPU, MPS)
            raise RuntimeError(OTHER_RNN_DEVICE.format(kind, *places))

    def _check_generator(self, function: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Refuse a generator of another device; the default one of the CPU is also that of the simulated device."""
        generator = kwargs["generator"]
        device = requested_device(function, dict(kwargs))
        if device is None:
            tensors = iter_operator_tensors([args, kwargs])
            device = MPS if tensors and self._holds(tensors[0]) else CPU
        if generator is not torch.default_generator and {device.type, generator.device.type} == {"cpu", "mps"}:
            raise RuntimeError(OTHER_GENERATOR.format(device.type, generator.device.type))

    def _call(self, function: Any, args: Any, kwargs: dict[str, Any], given: list[int], here: bool) -> Any:
        """Call a function; what it makes is where its arguments are, or where one of them says."""
        device = requested_device(function, kwargs)
        if device is None:
            made = function(*args, **kwargs)
            if here:
                self._device.add_outputs(made, {*given, *self._device.strangers})
            return made
        towards = device.type == "mps"
        with contextlib.nullcontext() if towards else self._device.pause():
            made = function(*args, **kwargs)
        return tree_map_only(torch.Tensor, lambda tensor: self._placed(tensor, towards, given), made)

    def _placed(self, tensor: torch.Tensor, towards: bool, given: list[int]) -> torch.Tensor:
        """Return a tensor where it was to be made: itself, or a copy where it is one of the arguments."""
        storage = storage_of(tensor)
        if storage is None or (storage_key(storage) in self._device.storages) == towards:
            return tensor
        if storage_key(storage) in given:
            self._device.record_copy(not towards)
            return self._device.copy_differentiable(tensor, towards)
        (self._device.storages.add if towards else self._device.storages.remove)(tensor)
        return tensor

    def _move(self, function: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Call ``Tensor.to`` or ``Tensor.cpu``, and copy where it goes to another device.

        The type changes on the CPU's side, so that a float64 tensor can be moved as float32.
        """
        tensor, here = args[0], self._holds(args[0])
        target = self._target(function, args, kwargs)
        if target.type not in {"cpu", "mps"}:
            with self._device.pause():
                return function(*args, **kwargs)
        towards = target.type == "mps"
        if towards == here:
            return function(*args, **kwargs)
        self._device.record_copy(here, is_non_blocking(args[1:], kwargs))
        if towards:
            return self._device.copy_differentiable(function(*args, **kwargs), towards)
        return function(self._device.copy_differentiable(tensor, towards), *args[1:], **kwargs)

    def _target(self, function: Any, args: list[Any], kwargs: dict[str, Any]) -> torch.device:
        """Return the device that a tensor is moved to, and say ``cpu`` instead of ``mps`` in the arguments."""
        if function.__name__ == "cpu":
            return CPU
        for place, argument in enumerate(args):
            if isinstance(argument, (str, torch.device)):
                device = torch.device(argument)
                args[place] = CPU if device.type == "mps" else device
                return device
        other = next(iter(iter_operator_tensors([args[1:], kwargs])), args[0])
        return requested_device(function, kwargs) or (MPS if self._holds(other) else other.device)

    def refuse_array(self, function: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Refuse an array of a tensor of the device, unless ``force=True`` copies it to the CPU before."""
        if function.__name__ != "numpy" or not (kwargs.get("force") or args == (True,)):
            raise TypeError(NO_NUMPY)
        self._device.record_copy(from_here=True)
        return function(self._device.copied(tensor.detach(), towards=False), force=True)

    def seeing(self, run_backward: Callable[..., Any]) -> Callable[..., Any]:
        """Return torch's way into a backward pass with this mode on, which hooks and checkpoints need to see the device.

        torch takes the mode away while it calls a function for us, and a backward pass is one long function.
        """
        home = threading.get_ident()

        def run(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == home:
                args = (args[0], self._gradients(*args[:2]), *args[2:])
            with self if threading.get_ident() == home else contextlib.nullcontext():
                return run_backward(*args, **kwargs)

        return run

    def _gradients(
        self, roots: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
    ) -> Sequence[torch.Tensor | None]:
        """Return the gradients that a backward pass begins with, where their tensors are.

        One without dimensions is moved, and any other one of another device is refused.
        """
        checked = list(gradients)
        for place, (root, gradient) in enumerate(zip(roots, gradients, strict=False)):
            if not isinstance(root, torch.Tensor) or gradient is None:
                continue
            towards, here = self._holds(root), self._holds(gradient)
            if towards == here or {root.device.type, gradient.device.type} != {"cpu", "mps"}:
                continue
            if gradient.dim():
                raise RuntimeError(OTHER_ROOT_GRADIENT.format(place, root.device, gradient.device))
            checked[place] = self._device.copy_differentiable(gradient, towards)
        return type(gradients)(checked) if isinstance(gradients, tuple) else checked

    def pack(self, function: Any, given: torch.Tensor, lengths: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Pack sequences of several lengths; the lengths must be on the CPU, and the sizes of the batches stay there."""
        if self._holds(lengths):
            kind = str(lengths.dtype).removeprefix("torch.int").replace("64", "Long").replace("32", "Int")
            raise RuntimeError(LENGTHS_ON_MPS.format(lengths.dim(), kind))
        data, sizes = self._call(
            function, (given, lengths, *args), kwargs, storage_keys((given, lengths), None), here=True
        )
        self._device.storages.remove(sizes)
        return data, sizes

    def split(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Split a tensor; indices in a tensor must be on the CPU."""
        if any(map(self._holds, iter_operator_tensors([args[1:], kwargs.get("tensor_indices_or_sections")]))):
            raise RuntimeError(SECTIONS_ON_MPS)
        return self._call(function, args, kwargs, storage_keys(args, kwargs), here=True)

    def unpack(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Unpack sequences; their lengths stay on the CPU."""
        data, lengths = self._call(function, args, kwargs, storage_keys(args, kwargs), here=True)
        self._device.storages.remove(lengths)
        return data, lengths

    def attend(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Call attention; without gradients MPS has a kernel of its own, and that has no dropout."""
        dropout = args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)  # noqa: PLR2004 - torch's signature
        given = iter_operator_tensors([args[:3], kwargs])
        learning = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given)
        if dropout and not learning:
            raise NotImplementedError(NO_DROPOUT)
        return function(*args, **kwargs)

    def type_name(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the name of a tensor's type as one of MPS, or a tensor of another type."""
        answer = function(*args, **kwargs)
        return answer.replace("torch.", "torch.mps.", 1) if isinstance(answer, str) else answer

    def decompose(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a singular value decomposition, which has another name below autograd."""
        with self._device.fallbacks.called(names_above_autograd(function.__name__, args, kwargs)):
            return function(*args, **kwargs)


# Functions of recurrent networks, and those whose second tensor must be on the CPU, wherever the first one is.
RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})
SECOND_ON_CPU = frozenset({"_pack_padded_sequence", "tensor_split"})

# Functions that the device answers in its own way.
METHODS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("numpy", "__array__", "__dlpack__"), FunctionMode.refuse_array),
    **dict.fromkeys(("linalg_svd", "svd"), FunctionMode.decompose),
    "_pack_padded_sequence": FunctionMode.pack,
    "_pad_packed_sequence": FunctionMode.unpack,
    "tensor_split": FunctionMode.split,
    "scaled_dot_product_attention": FunctionMode.attend,
    "get_device": lambda _mode, _function, _tensor: 0,
    "type": FunctionMode.type_name,
}


def is_non_blocking(args: Any, kwargs: dict[str, Any]) -> bool:
    """Tell whether a copy is to be made while the program goes on; among the arguments that is the one which is true."""
    return any(argument is True for argument in (*args, kwargs.get("non_blocking")))


def requested_device(function: Any, kwargs: dict[str, Any]) -> torch.device | None:
    """Return the device that a function shall use, and write it into the arguments as the function can take it.

    That is with its number where the operators below read it, and ``cpu`` where a function makes a tensor by itself.
    """
    asked = kwargs.get("device")
    if asked is None and default_device.CURRENT_DEVICE is not None:  # torch would ask for set_default_device after us
        asked = default_device.CURRENT_DEVICE if function in default_device._device_constructors() else None  # noqa: SLF001
    name = getattr(function, "__name__", "")
    if asked is None or isinstance(asked, int) or name == "_parse_to":  # Module.to only reads its arguments there
        return None
    device = torch.device(asked)
    if device.type == "mps":
        kwargs["device"] = CPU if name in BY_THEMSELVES else MPS
    return device


def allocation_size(operator: Any, args: Any, kwargs: Any) -> int:
    """Return the bytes of what an operator makes if its arguments give the size; 0 if that shows only later."""
    place = 1 if operator.name().startswith("aten::new_") else 0
    size = args[place] if len(args) > place else None
    if not isinstance(size, (list, tuple)) or not all(isinstance(length, int) for length in size):
        return 0
    return math.prod(size) * int((kwargs.get("dtype") or torch.get_default_dtype()).itemsize)
