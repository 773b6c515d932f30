"""Two modes of torch that make CPU tensors behave like MPS tensors; imported when a simulation starts.

The function mode intercepts every function that Python calls: it reports the device, moves tensors, and raises the
errors of the Python part of torch. The operator mode intercepts every operator below, including those of a backward
pass: it counts their results, and raises the errors of MPS. A mode applies to the thread that entered it.

A tensor is on the device if its storage is. So views, ``detach``, ``.data`` and ``.grad`` need no special rules, and
memory that only an autograd graph references is counted as long as it exists. torch keeps the Python object of a
storage as long as its memory (since 2.1), so a weak reference reports when the memory is freed.
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
from typing import Any, NamedTuple

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
    follows_first_argument,
    names_above_autograd,
)

# Keyword arguments of an operator or function of torch.
Keywords = dict[str, Any]

functorch = torch._C._functorch  # noqa: SLF001 - torch has no public name for it

# Original device of a storage. That of a FakeTensor is meta, whatever the tensor reports.
get_original_device = torch.UntypedStorage.device.__get__

COMPRESSED_ROWS = frozenset({torch.sparse_csr, torch.sparse_bsr})
COMPRESSED_COLUMNS = frozenset({torch.sparse_csc, torch.sparse_bsc})


class StorageBlock(NamedTuple):
    """Block of a storage on the device.

    Attributes:
        reference: Weak reference to the storage, which reports its release.
        size: Size of the storage in bytes.
        allocated_size: Size of the block in bytes.
    """

    reference: weakref.ref[torch.UntypedStorage]
    size: int
    allocated_size: int


class DeviceStorages:
    """Storages that are on the device."""

    def __init__(self, allocator: SimulatedAllocator) -> None:
        self._allocator = allocator
        self._blocks: dict[int, StorageBlock] = {}

    def __contains__(self, key: int) -> bool:
        return key in self._blocks

    def has_any(self, keys: Iterable[int]) -> bool:
        """Return whether any of the storages is on the device."""
        return not self._blocks.keys().isdisjoint(keys)

    def not_on_device(self, keys: Iterable[int]) -> set[int]:
        """Return the storages that are not on the device."""
        return {key for key in keys if key not in self._blocks}

    def contains(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is on the device."""
        storage = get_storage(tensor)
        return storage is not None and storage_key(storage) in self._blocks

    def add(self, tensor: torch.Tensor) -> None:
        """Add a tensor to the device, or count it again if it grew."""
        with torch._C.DisableTorchFunction():  # noqa: SLF001
            _values, *indices = _get_components(tensor)
        for component in indices:
            self.add(component)
        storage = get_storage(tensor)
        if storage is None:
            return
        _check_dtype(tensor.dtype)
        key = storage_key(storage)
        size = storage.nbytes()
        block = self._blocks.get(key)
        if block is None or block.size != size:
            allocated_size = self._allocator.allocate(size)
            self._free(key)
            reference = weakref.ref(storage, lambda _reference: self._free(key))
            self._blocks[key] = StorageBlock(reference, size, allocated_size)

    def remove(self, tensor: torch.Tensor) -> None:
        """Remove a tensor from the device."""
        storage = get_storage(tensor)
        if storage is not None:
            self._free(storage_key(storage))

    def _free(self, key: int) -> None:
        block = self._blocks.pop(key, None)
        if block is not None:
            self._allocator.free(block.allocated_size)


def storage_key(storage: torch.UntypedStorage) -> int:
    """Return the address of a storage, which all its Python objects share."""
    return int(storage._cdata)  # noqa: SLF001 - torch has no public name for it


def get_storage(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Return the storage of a tensor whose memory is on the CPU, or ``None`` for other devices."""
    with torch._C.DisableTorchFunction():  # noqa: SLF001 - no mode may intercept this
        return _storage_without_modes(tensor)


def _storage_without_modes(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Return the same as :func:`get_storage`, for callers that have disabled all modes.

    A tensor inside ``torch.vmap`` has the storage of the wrapped tensor, and a sparse or jagged tensor that of its
    values.
    """
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    # A jagged tensor delegates to its values.
    if tensor.layout is torch.jagged or (
        tensor.layout is not torch.strided and torch._C.TensorBase.is_cpu.__get__(tensor)  # noqa: SLF001
    ):
        tensor = _get_components(tensor)[0]
    on_cpu = tensor.layout is torch.strided and torch._C.TensorBase.is_cpu.__get__(tensor)  # noqa: SLF001
    storage = tensor.untyped_storage() if on_cpu else None
    return None if storage is not None and get_original_device(storage).type == "meta" else storage


def _get_components(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the components of a sparse or jagged tensor, its values first, without dispatch modes."""
    with torch._C._DisableTorchDispatch():  # noqa: SLF001
        if tensor.layout is torch.sparse_coo:
            return [tensor._values(), tensor._indices()]  # noqa: SLF001 - values() requires a coalesced tensor
        if tensor.layout in COMPRESSED_ROWS:
            return [tensor.values(), tensor.crow_indices(), tensor.col_indices()]
        if tensor.layout in COMPRESSED_COLUMNS:
            return [tensor.values(), tensor.ccol_indices(), tensor.row_indices()]
        if tensor.layout is torch.jagged:
            return [tensor._values, tensor._offsets]  # noqa: SLF001
    return [tensor]


def storage_keys(args: Any, kwargs: Any) -> list[int]:
    """Return the keys of the storages of all tensors among the arguments of a function."""
    tensors = iter_operator_tensors(args) + iter_operator_tensors(kwargs) if kwargs else iter_operator_tensors(args)
    if not tensors:
        return []
    with torch._C.DisableTorchFunction():  # noqa: SLF001
        storages = [_storage_without_modes(tensor) for tensor in tensors]
    return [storage_key(storage) for storage in storages if storage is not None]


# Dtypes that MPS does not support, with the error texts of torch.
UNSUPPORTED_DTYPES = {torch.float64: NO_FLOAT64, torch.complex128: NO_COMPLEX128}


def _check_dtype(dtype: torch.dtype) -> None:
    """Raise an error if MPS does not support a dtype."""
    if dtype in UNSUPPORTED_DTYPES:
        raise TypeError(UNSUPPORTED_DTYPES[dtype])


@dataclass(frozen=True)
class DeviceCopy:
    """Copy of a tensor from one device to another, and whether it was non-blocking."""

    source: str
    target: str
    non_blocking: bool


@dataclass
class SimulatedDevice:
    """State of the simulated device.

    Attributes:
        allocator: Memory.
        fallbacks: Policy for unsupported operators.
        storages: Storages on the device.
        copies: Copies between the devices.
        call_counts: Number of calls of each function of torch.
        active_defects: Replacements of the operators and functions of torch that are defective on this device.
        paused: Whether operators run as on the CPU.
        cpu_tensors: CPU tensors that the program passed to the running function together with tensors of the device, by
            the keys of their storages. On a Mac, tensors that torch creates inside the function would be on the device.
    """

    allocator: SimulatedAllocator
    fallbacks: FallbackPolicy
    storages: DeviceStorages
    copies: list[DeviceCopy] = field(default_factory=list)
    call_counts: Counter[str] = field(default_factory=Counter)
    active_defects: Mapping[str, Sequence[Callable[[OperatorCall], Any]]] = field(default_factory=dict)
    paused: bool = False
    cpu_tensors: dict[int, torch.Tensor] = field(default_factory=dict)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Run operators as on the CPU in a ``with`` block."""
        previous = self.paused
        self.paused = True
        try:
            yield
        finally:
            self.paused = previous

    @contextlib.contextmanager
    def use_cpu_tensors(self, cpu_tensors: dict[int, torch.Tensor]) -> Iterator[None]:
        """Let operators reject some CPU tensors in a ``with`` block."""
        previous = self.cpu_tensors
        self.cpu_tensors = cpu_tensors
        try:
            yield
        finally:
            self.cpu_tensors = previous

    def check(self, operator: Any, args: Any, kwargs: Any) -> None:
        """Raise an error for tensors of two devices, if the operator does."""
        tensors = iter_operator_tensors(args) + iter_operator_tensors(kwargs)
        cpu_tensors = [tensor for tensor in tensors if self._is_cpu_tensor(tensor)]
        if len(cpu_tensors) < len(tensors) and any(map(self.storages.contains, tensors)):
            check_operator(operator, args, kwargs, cpu_tensors)

    def _is_cpu_tensor(self, tensor: torch.Tensor) -> bool:
        storage = get_storage(tensor)
        return storage is not None and storage_key(storage) in self.cpu_tensors

    def track_cpu_results(self, keys: list[int], result: Any) -> None:
        """Track the results of operators whose tensors are all CPU tensors of the program."""
        if self.cpu_tensors and keys and all(key in self.cpu_tensors for key in keys):
            self.cpu_tensors.update(
                {key: tensor for tensor in iter_operator_tensors(result) for key in storage_keys([tensor], None)}
            )

    def with_defects(self, name: str, operator: Callable[..., Any]) -> Callable[..., Any]:
        """Return the implementation of an operator or function on this device, with its active defects."""
        for compute_defect in self.active_defects.get(name, ()):
            operator = self._with_defect(compute_defect, name, operator)
        return operator

    def _with_defect(
        self, compute_defect: Callable[[OperatorCall], Any], name: str, operator: Callable[..., Any]
    ) -> Callable[..., Any]:
        @functools.wraps(operator)
        def compute(*args: Any, **kwargs: Any) -> Any:
            dirty = self.allocator.driver_allocated > self.allocator.allocated
            return compute_defect(OperatorCall(name, operator, args, kwargs, dirty, self.storages.contains))

        return compute

    def add_outputs(self, result: Any, excluded_keys: Collection[int]) -> None:
        """Add results to the device, except those whose storages are excluded."""
        for tensor in iter_operator_tensors(result):
            storage = get_storage(tensor)
            if storage is not None and storage_key(storage) not in excluded_keys:
                self.storages.add(tensor)

    def copy_differentiable(self, tensor: torch.Tensor, to_device: bool) -> torch.Tensor:
        """Return a copy of a tensor on the other device, through which gradients flow back."""
        if tensor.requires_grad and torch.is_grad_enabled():
            return DifferentiableCopy.apply(tensor, self, to_device)
        return self.copy_detached(tensor.detach(), to_device)

    def copy_detached(self, tensor: torch.Tensor, to_device: bool) -> torch.Tensor:
        """Return a copy of a tensor without gradients."""
        if to_device:
            _check_dtype(tensor.dtype)
            self.allocator.check(tensor.numel() * tensor.element_size())
        if tensor.layout is torch.jagged:
            return self._copy_jagged(tensor, to_device)
        with torch._C.DisableTorchFunction(), self.pause():  # noqa: SLF001
            copy = tensor.clone()
            if to_device:
                self.storages.add(copy)
        return copy

    def _copy_jagged(self, tensor: torch.Tensor, to_device: bool) -> torch.Tensor:
        """Return a copy of a jagged tensor with separate offsets, which a clone would share."""
        values, offsets = (self.copy_detached(component, to_device) for component in _get_components(tensor))
        lengths = tensor._lengths  # noqa: SLF001
        lengths = None if lengths is None else self.copy_detached(lengths, to_device)
        return torch.nested.nested_tensor_from_jagged(values, offsets, lengths, tensor._ragged_idx)  # noqa: SLF001

    def record_copy(self, from_device: bool, non_blocking: bool = False) -> None:
        """Record a copy between the devices."""
        source, target = ("mps", "cpu") if from_device else ("cpu", "mps")
        self.copies.append(DeviceCopy(source, target, non_blocking))


class DifferentiableCopy(torch.autograd.Function):
    """Copy between the devices, whose gradient is copied in the opposite direction."""

    @staticmethod
    def forward(context: Any, tensor: torch.Tensor, device: SimulatedDevice, to_device: bool) -> torch.Tensor:
        """Return the copy."""
        context.device = device
        context.to_device = to_device
        return device.copy_detached(tensor, to_device)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Return the gradient on the original device."""
        return context.device.copy_differentiable(gradient, not context.to_device), None, None


MPS = torch.device("mps", 0)
CPU = torch.device("cpu")

# Functions that place a tensor on its device before any operator is called.
CONSTRUCTORS = frozenset({"to", "tensor", "as_tensor", "asarray", "new_tensor", "from_file"})

HOST_OUT_OF_MEMORY_PATTERN = re.compile(r"DefaultCPUAllocator: .*?you tried to allocate (\d+)")


class OperatorMode(TorchDispatchMode):
    """Mode that intercepts every operator: it counts results on the device, and rejects unsupported operators."""

    def __init__(self, device: SimulatedDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operator on the device if one of its arguments is on the device."""
        kwargs = kwargs or {}
        if types and any(tensor.layout is torch.jagged for tensor in iter_operator_tensors(args)):
            return NotImplemented  # A jagged tensor calls operators with its values, which are intercepted again.
        with torch._C.DisableTorchFunction():  # noqa: SLF001
            keys = storage_keys(args, kwargs)
            on_device = self._device.storages.has_any(keys)
            creates_on_device = getattr(kwargs.get("device"), "type", "") == "mps"
            if creates_on_device:
                kwargs = {**kwargs, "device": CPU}
            if self._device.paused:
                return operator(*args, **kwargs)
            if on_device or creates_on_device:
                return self._call(operator, args, kwargs, keys, on_device)
            result = operator(*args, **kwargs)
            self._device.track_cpu_results(keys, result)
            return result

    def _call(self, operator: Any, args: Any, kwargs: Any, keys: list[int], on_device: bool) -> Any:
        """Call an operator on the device: raise the errors of MPS, and add the results to the device."""
        if torch.is_inference_mode_enabled() and operator.name() not in ALWAYS_ON_CPU:
            with self:  # In inference mode, torch has not decomposed it yet.
                result = operator.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if on_device and self._device.cpu_tensors:
            self._device.check(operator, args, kwargs)
        self._device.fallbacks.handle(operator.name(), torch.is_warn_always_enabled())
        excluded_keys = self._device.storages.not_on_device(keys)
        if size := _allocation_size(operator, args, kwargs):
            self._device.allocator.check(size)
        try:
            result = self._compute(operator, args, kwargs)
        except RuntimeError as error:  # The memory of the host is exhausted too; MPS would raise its error.
            if match := HOST_OUT_OF_MEMORY_PATTERN.search(str(error)):
                self._device.allocator.check(int(match[1]))
            raise
        if follows_first_argument(operator, args) and not self._device.storages.contains(args[0]):
            self._device.cpu_tensors.update(dict.fromkeys(storage_keys([result], None), result))
        else:
            self._device.add_outputs(result, excluded_keys)
        return result

    def _compute(self, operator: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of an operator; a custom operator in Python calls others, which are intercepted again."""
        custom = OPDEFS.get(operator.name())
        function = None if custom is None else custom._backend_fns.get("cpu", custom._backend_fns.get(None))  # noqa: SLF001
        if function is None:
            return self._device.with_defects(operator.name(), operator)(*args, **kwargs)
        with self:
            return function(*args, **kwargs)


class FunctionMode(TorchFunctionMode):
    """Mode that intercepts every torch function that Python calls: it reports the device, and moves tensors."""

    def __init__(self, device: SimulatedDevice) -> None:
        super().__init__()
        self._device = device
        self._contains = device.storages.contains

    def __torch_function__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Handle a function for the device, or call it with arguments that are valid on the CPU."""
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
        keys = storage_keys(args, kwargs)
        on_device = self._device.storages.has_any(keys)
        if not on_device and kwargs.get("device") is None and default_device.CURRENT_DEVICE is None:
            return function(*args, **kwargs)
        cpu_tensors = self._find_cpu_tensors(args, kwargs) if on_device else {}
        if on_device:
            self._device.call_counts[name] += 1
            function = self._device.with_defects(name, function)
            if cpu_tensors:
                self._check_devices(function, args, kwargs)
        with self._device.use_cpu_tensors(cpu_tensors):
            if on_device and name in METHODS and self._is_overridden(name, args, kwargs):
                return METHODS[name](self, function, *args, **kwargs)
            return self._call(function, args, dict(kwargs), keys, on_device)

    def _find_cpu_tensors(self, args: Any, kwargs: Keywords) -> dict[int, torch.Tensor]:
        """Return the CPU tensors among the arguments, by the keys of their storages."""
        tensors = {}
        for tensor in iter_operator_tensors([args, kwargs]):
            storage = get_storage(tensor)
            if storage is not None and storage_key(storage) not in self._device.storages:
                tensors[storage_key(storage)] = tensor
        return tensors

    def _is_overridden(self, name: str, args: Any, kwargs: Keywords) -> bool:
        """Return whether the device overrides a function: if its first tensor is on the device, or for some, any."""
        return name in SECOND_ARGUMENT_ON_CPU or self._contains(iter_operator_tensors([args, kwargs])[0])

    def _check_devices(self, function: Any, args: Any, kwargs: Keywords) -> None:
        """Raise the errors of torch for tensors of two devices that are checked above its operators."""
        name = function.__name__
        if getattr(function, "__self__", None) is torch.Tensor.grad:
            raise RuntimeError(OTHER_GRADIENT)
        if name in RECURRENT:
            self._check_recurrent(name, args)
        elif name == "linear":
            self._check_linear(args, kwargs)
        elif name == "copy_":
            self._device.record_copy(self._contains(args[1]), _requests_non_blocking(args[2:], kwargs))

    def _check_linear(self, args: Any, kwargs: Keywords) -> None:
        """Raise an error for a linear layer with tensors of two devices, which is one operator on MPS."""
        names = ("input", "weight", "bias")
        for name, tensor in {**dict(zip(names, args, strict=False)), **kwargs}.items():
            if tensor is not None and not self._contains(tensor):
                raise RuntimeError(LINEAR_ON_CPU.format(name))

    def _check_recurrent(self, name: str, args: Any) -> None:
        """Raise an error for a recurrent network with tensors of two devices; only the batch sizes are on the CPU.

        ``_lstm_mps`` is one graph for input on MPS; other networks check their arguments first.
        """
        packed = isinstance(args[3], (list, tuple))  # The batch sizes are the second argument.
        inputs = args[0]
        hidden, parameters = (iter_operator_tensors([argument]) for argument in (args[2:4] if packed else args[1:3]))
        on_device = self._contains(inputs)
        for kind, tensors in (("hidden", hidden), ("parameter", parameters)):
            if all(self._contains(tensor) == on_device for tensor in tensors):
                continue
            if name == "lstm" and on_device:
                raise RuntimeError(NO_PLACEHOLDER)
            devices = (MPS, CPU) if on_device else (CPU, MPS)
            raise RuntimeError(OTHER_RNN_DEVICE.format(kind, *devices))

    def _check_generator(self, function: Any, args: Any, kwargs: Keywords) -> None:
        """Raise an error for a generator of another device; both devices share the default generator."""
        generator = kwargs["generator"]
        device = _requested_device(function, dict(kwargs))
        if device is None:
            tensors = iter_operator_tensors([args, kwargs])
            device = MPS if tensors and self._contains(tensors[0]) else CPU
        if generator is not torch.default_generator and {device.type, generator.device.type} == {"cpu", "mps"}:
            raise RuntimeError(OTHER_GENERATOR.format(device.type, generator.device.type))

    def _call(self, function: Any, args: Any, kwargs: Keywords, keys: list[int], on_device: bool) -> Any:
        """Call a function; its results are on the device of its arguments, or on the requested one."""
        device = _requested_device(function, kwargs)
        if device is None:
            result = function(*args, **kwargs)
            if on_device:
                self._device.add_outputs(result, {*keys, *self._device.cpu_tensors})
            return result
        to_device = device.type == "mps"
        with contextlib.nullcontext() if to_device else self._device.pause():
            result = function(*args, **kwargs)
        return tree_map_only(torch.Tensor, lambda tensor: self._place(tensor, to_device, keys), result)

    def _place(self, tensor: torch.Tensor, to_device: bool, keys: list[int]) -> torch.Tensor:
        """Return a tensor on the requested device: itself, or a copy if it is one of the arguments."""
        storage = get_storage(tensor)
        if storage is None or (storage_key(storage) in self._device.storages) == to_device:
            return tensor
        if storage_key(storage) in keys:
            self._device.record_copy(not to_device)
            return self._device.copy_differentiable(tensor, to_device)
        if to_device:
            self._device.storages.add(tensor)
        else:
            self._device.storages.remove(tensor)
        return tensor

    def _move(self, function: Any, args: list[Any], kwargs: Keywords) -> Any:
        """Call ``Tensor.to`` or ``Tensor.cpu``, and copy the tensor if the device changes.

        The dtype changes on the CPU, so that a float64 tensor can be moved as float32.
        """
        tensor = args[0]
        on_device = self._contains(tensor)
        target = self._target(function, args, kwargs)
        if target.type not in {"cpu", "mps"}:
            with self._device.pause():
                return function(*args, **kwargs)
        to_device = target.type == "mps"
        if to_device == on_device:
            return function(*args, **kwargs)
        self._device.record_copy(on_device, _requests_non_blocking(args[1:], kwargs))
        if to_device:
            return self._device.copy_differentiable(function(*args, **kwargs), to_device)
        return function(self._device.copy_differentiable(tensor, to_device), *args[1:], **kwargs)

    def _target(self, function: Any, args: list[Any], kwargs: Keywords) -> torch.device:
        """Return the target device of a move, and replace ``mps`` by ``cpu`` in the arguments."""
        if function.__name__ == "cpu":
            return CPU
        for index, argument in enumerate(args):
            if isinstance(argument, (str, torch.device)):
                device = torch.device(argument)
                args[index] = CPU if device.type == "mps" else device
                return device
        reference = next(iter(iter_operator_tensors([args[1:], kwargs])), args[0])
        return _requested_device(function, kwargs) or (MPS if self._contains(reference) else reference.device)

    def refuse_array(self, function: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Raise an error for an array of a tensor on the device, unless ``force=True`` copies it to the CPU."""
        if function.__name__ != "numpy" or not (kwargs.get("force") or args == (True,)):
            raise TypeError(NO_NUMPY)
        self._device.record_copy(from_device=True)
        return function(self._device.copy_detached(tensor.detach(), to_device=False), force=True)

    def wrap_backward(self, run_backward: Callable[..., Any]) -> Callable[..., Any]:
        """Return the entry point of a backward pass with this mode enabled, which hooks and checkpoints need.

        torch disables the mode while the mode handles a function, and a backward pass is one long function.
        """
        thread = threading.get_ident()

        def run(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == thread:
                args = (args[0], self._gradients(*args[:2]), *args[2:])
            with self if threading.get_ident() == thread else contextlib.nullcontext():
                return run_backward(*args, **kwargs)

        return run

    def _gradients(
        self, roots: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
    ) -> Sequence[torch.Tensor | None]:
        """Return the initial gradients of a backward pass on the devices of their tensors.

        A scalar is moved; any other gradient on another device is an error.
        """
        moved = list(gradients)
        for index, (root, gradient) in enumerate(zip(roots, gradients, strict=False)):
            if not isinstance(root, torch.Tensor) or gradient is None:
                continue
            to_device = self._contains(root)
            on_device = self._contains(gradient)
            if to_device == on_device or {root.device.type, gradient.device.type} != {"cpu", "mps"}:
                continue
            if gradient.dim():
                raise RuntimeError(OTHER_ROOT_GRADIENT.format(index, root.device, gradient.device))
            moved[index] = self._device.copy_differentiable(gradient, to_device)
        return type(gradients)(moved) if isinstance(gradients, tuple) else moved

    def pack(self, function: Any, inputs: torch.Tensor, lengths: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Pack sequences; their lengths must be on the CPU, and the batch sizes stay there."""
        if self._contains(lengths):
            kind = str(lengths.dtype).removeprefix("torch.int").replace("64", "Long").replace("32", "Int")
            raise RuntimeError(LENGTHS_ON_MPS.format(lengths.dim(), kind))
        data, sizes = self._call(
            function, (inputs, lengths, *args), kwargs, storage_keys((inputs, lengths), None), on_device=True
        )
        self._device.storages.remove(sizes)
        return data, sizes

    def split(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Split a tensor; a tensor of indices must be on the CPU."""
        if any(map(self._contains, iter_operator_tensors([args[1:], kwargs.get("tensor_indices_or_sections")]))):
            raise RuntimeError(SECTIONS_ON_MPS)
        return self._call(function, args, kwargs, storage_keys(args, kwargs), on_device=True)

    def unpack(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Unpack sequences; their lengths stay on the CPU."""
        data, lengths = self._call(function, args, kwargs, storage_keys(args, kwargs), on_device=True)
        self._device.storages.remove(lengths)
        return data, lengths

    def attend(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Call attention; without gradients, MPS uses another kernel, which does not support dropout."""
        dropout = args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)  # noqa: PLR2004 - torch's signature
        tensors = iter_operator_tensors([args[:3], kwargs])
        needs_gradients = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        if dropout and not needs_gradients:
            raise NotImplementedError(NO_DROPOUT)
        return function(*args, **kwargs)

    def type_name(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the type name of a tensor for MPS, or a tensor of another type."""
        result = function(*args, **kwargs)
        return result.replace("torch.", "torch.mps.", 1) if isinstance(result, str) else result

    @staticmethod
    def get_device(_mode: FunctionMode, _function: Any, _tensor: torch.Tensor) -> int:
        """Return the index of the device."""
        return 0

    def decompose(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a singular value decomposition, which has another name below autograd."""
        with self._device.fallbacks.use_names(names_above_autograd(function.__name__, args, kwargs)):
            return function(*args, **kwargs)


# Functions of recurrent networks, and functions whose second tensor must be on the CPU.
RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})
SECOND_ARGUMENT_ON_CPU = frozenset({"_pack_padded_sequence", "tensor_split"})

# Functions that the device overrides.
METHODS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("numpy", "__array__", "__dlpack__"), FunctionMode.refuse_array),
    **dict.fromkeys(("linalg_svd", "svd"), FunctionMode.decompose),
    "_pack_padded_sequence": FunctionMode.pack,
    "_pad_packed_sequence": FunctionMode.unpack,
    "tensor_split": FunctionMode.split,
    "scaled_dot_product_attention": FunctionMode.attend,
    "get_device": FunctionMode.get_device,
    "type": FunctionMode.type_name,
}


def _requests_non_blocking(args: Any, kwargs: Keywords) -> bool:
    """Return whether a copy is non-blocking: in its arguments, only that flag is ``True``."""
    return any(argument is True for argument in (*args, kwargs.get("non_blocking")))


def _requested_device(function: Any, kwargs: Keywords) -> torch.device | None:
    """Return the requested device of a function, and write a device into its arguments that it supports.

    It has an index if operators below read it. For a constructor of tensors it is ``cpu``.
    """
    requested = kwargs.get("device")
    if (
        requested is None and default_device.CURRENT_DEVICE is not None
    ):  # torch would apply the default device after this mode.
        requested = default_device.CURRENT_DEVICE if function in default_device._device_constructors() else None  # noqa: SLF001
    name = getattr(function, "__name__", "")
    if requested is None or isinstance(requested, int) or name == "_parse_to":  # Module.to only parses its arguments.
        return None
    device = torch.device(requested)
    if device.type == "mps":
        kwargs["device"] = CPU if name in CONSTRUCTORS else MPS
    return device


def _allocation_size(operator: Any, args: Any, kwargs: Any) -> int:
    """Return the size in bytes of the result of an operator if its arguments determine it, else 0."""
    index = 1 if operator.name().startswith("aten::new_") else 0
    size = args[index] if len(args) > index else None
    if not isinstance(size, (list, tuple)) or not all(isinstance(length, int) for length in size):
        return 0
    return math.prod(size) * int((kwargs.get("dtype") or torch.get_default_dtype()).itemsize)
