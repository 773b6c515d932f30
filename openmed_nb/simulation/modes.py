"""Simulated MPS device and two modes of torch that make CPU tensors behave like its tensors.

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
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch._library.custom_ops import OPDEFS
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils import _device as default_device
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from ..devices.moving import iter_operator_tensors
from ..devices.profilers import Arguments, Keywords, Result, TorchFunction
from .memory import SimulatedAllocator
from .operators import (
    ALWAYS_ON_CPU,
    SCATTER_OPERATORS,
    UNSUPPORTED_DTYPES,
    Defect,
    FallbackPolicy,
    OperatorCall,
    base_name,
    check_operator,
    names_above_autograd,
)

MPS = torch.device("mps", 0)
CPU = torch.device("cpu")

functorch = torch._C._functorch  # noqa: SLF001 - torch has no public name for it

# Original device of a storage. That of a FakeTensor is meta, whatever the tensor reports.
get_original_device = torch.UntypedStorage.device.__get__
# Whether a tensor is on the CPU for torch, whatever ``Tensor.is_cpu`` reports during a simulation.
is_on_cpu: Callable[[torch.Tensor], bool] = vars(torch._C.TensorBase)["is_cpu"].__get__  # noqa: SLF001


# Functions that place a tensor on its device before any operator is called.
CONSTRUCTORS = frozenset({"to", "tensor", "as_tensor", "asarray", "new_tensor", "from_file"})

Storages: TypeAlias = dict[int, torch.Tensor]  # A tensor for each storage, by the key of the storage.

# Functions whose second tensor must be on the CPU.
SECOND_ARGUMENT_ON_CPU = frozenset({"_pack_padded_sequence", "tensor_split"})


def storage_key(storage: torch.UntypedStorage) -> int:
    """Return the address of a storage, which all its Python objects share."""
    return int(storage._cdata)  # noqa: SLF001 - torch has no public name for it


def get_storage(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Return the storage of a tensor whose memory is on the CPU, or ``None`` for other devices.

    A tensor inside ``torch.vmap`` has the storage of the wrapped tensor. A sparse or jagged tensor has none.
    """
    with torch._C.DisableTorchFunction():  # noqa: SLF001 - no mode may intercept this
        while functorch.is_functorch_wrapped_tensor(tensor):
            tensor = functorch.get_unwrapped(tensor)
        if tensor.layout is not torch.strided or not is_on_cpu(tensor):
            return None
        storage = tensor.untyped_storage()
        return None if get_original_device(storage).type == "meta" else storage


def get_key(tensor: torch.Tensor) -> int | None:
    """Return the key of the storage of a tensor, or ``None`` if its memory is not on the CPU."""
    storage = get_storage(tensor)
    return None if storage is None else storage_key(storage)


def find_storages(*values: object) -> Storages:
    """Return the storages of the tensors in the arguments or results of a function."""
    tensors = ((get_key(tensor), tensor) for tensor in iter_operator_tensors(values))
    return {key: tensor for key, tensor in tensors if key is not None}


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


class DeviceCopy(NamedTuple):
    """Copy of a tensor from one device to another, and whether it was non-blocking."""

    source: str
    target: str
    non_blocking: bool


class SimulatedDevice:
    """State of the simulated device.

    Attributes:
        allocator: Its memory in bytes, such as ``allocated``, ``driver_allocated``, ``peak`` and
            ``memory.recommended``.
        defects: Its simulated silent errors.
        copies: Copies between the devices, with both devices and whether they were non-blocking.
        call_counts: Number of calls of each torch function with a tensor of the device.
        fallback_policy: Policy for unsupported operators.
        blocks: Blocks of the storages on the device, by the keys of the storages.
        paused: Whether operators run as on the CPU.
        cpu_tensors: CPU tensors that the program passed to the running function together with tensors of the device, by
            the keys of their storages. On a Mac, tensors that torch creates inside the function would be on the device.
    """

    def __init__(
        self, allocator: SimulatedAllocator, fallback_policy: FallbackPolicy, defects: tuple[Defect, ...]
    ) -> None:
        self.allocator = allocator
        self.fallback_policy = fallback_policy
        self.defects = defects
        self.copies: list[DeviceCopy] = []
        self.call_counts: Counter[str] = Counter()
        self.blocks: dict[int, StorageBlock] = {}
        self.paused = False
        self.cpu_tensors: Storages = {}

    def contains(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is on the device."""
        return get_key(tensor) in self.blocks

    def has_any(self, keys: Collection[int]) -> bool:
        """Return whether any of the storages is on the device."""
        return not self.blocks.keys().isdisjoint(keys)

    def add(self, tensor: torch.Tensor) -> None:
        """Add a tensor to the device, or count it again if it grew."""
        storage = get_storage(tensor)
        if storage is None:
            return
        check_dtype(tensor.dtype)
        key = storage_key(storage)
        size = storage.nbytes()
        block = self.blocks.get(key)
        if block is None or block.size != size:
            allocated_size = self.allocator.allocate(size)
            self._free(key)
            self.blocks[key] = StorageBlock(weakref.ref(storage, lambda _: self._free(key)), size, allocated_size)

    def add_outputs(self, result: object, excluded_keys: Collection[int]) -> None:
        """Add results to the device, except those whose storages are excluded."""
        for key, tensor in find_storages(result).items():
            if key not in excluded_keys:
                self.add(tensor)

    def remove(self, tensor: torch.Tensor) -> None:
        """Remove a tensor from the device."""
        key = get_key(tensor)
        if key is not None:
            self._free(key)

    def _free(self, key: int) -> None:
        block = self.blocks.pop(key, None)
        if block is not None:
            self.allocator.free(block.allocated_size)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Run operators as on the CPU in a ``with`` block."""
        previous = self.paused
        self.paused = True
        try:
            yield
        finally:
            self.paused = previous

    def with_defects(self, name: str, operator: TorchFunction) -> TorchFunction:
        """Return the implementation of an operator or function on this device, with its simulated silent errors."""
        for defect in self.defects:
            if name in defect.operators:
                operator = self._with_defect(defect, name, operator)
        return operator

    def _with_defect(self, defect: Defect, name: str, operator: TorchFunction) -> TorchFunction:
        @functools.wraps(operator)
        def compute(*args: Any, **kwargs: Any) -> Result:
            dirty = self.allocator.driver_allocated > self.allocator.allocated
            return defect.compute(OperatorCall(name, operator, args, kwargs, dirty, self.contains))

        return compute

    def copy_differentiable(self, tensor: torch.Tensor, to_device: bool) -> torch.Tensor:
        """Return a copy of a tensor on the other device, through which gradients flow back."""
        if tensor.requires_grad and torch.is_grad_enabled():
            apply: Callable[..., torch.Tensor] = DifferentiableCopy.apply
            return apply(tensor, self, to_device)
        return self.copy_detached(tensor.detach(), to_device)

    def copy_detached(self, tensor: torch.Tensor, to_device: bool) -> torch.Tensor:
        """Return a copy of a tensor without gradients."""
        if to_device:
            check_dtype(tensor.dtype)
            self.allocator.check(tensor.numel() * tensor.element_size())
        with torch._C.DisableTorchFunction(), self.pause():  # noqa: SLF001
            copy = tensor.clone()
            if to_device:
                self.add(copy)
        return copy

    def record_copy(self, from_device: bool, non_blocking: bool = False) -> None:
        """Record a copy between the devices."""
        source, target = ("mps", "cpu") if from_device else ("cpu", "mps")
        self.copies.append(DeviceCopy(source, target, non_blocking))


def check_dtype(dtype: torch.dtype) -> None:
    """Raise an error if MPS does not support a dtype."""
    if dtype in UNSUPPORTED_DTYPES:
        raise TypeError(UNSUPPORTED_DTYPES[dtype])


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


class OperatorMode(TorchDispatchMode):
    """Mode that intercepts every operator: it counts results on the device, and rejects unsupported operators."""

    def __init__(self, device: SimulatedDevice) -> None:
        TorchDispatchMode.__init__(self)  # mypy does not find out that super().__init__ is one of torch.
        self._device = device

    def __torch_dispatch__(
        self, operator: OpOverload, _types: object, args: Arguments = (), kwargs: Keywords | None = None
    ) -> Result:
        """Call an operator on the device if one of its arguments is on the device."""
        device = self._device
        kwargs = dict(kwargs or {})
        with torch._C.DisableTorchFunction():  # noqa: SLF001
            storages = find_storages(args, kwargs)
            on_device = device.has_any(storages)
            creates_on_device = getattr(kwargs.get("device"), "type", "") == "mps"
            if creates_on_device:
                kwargs["device"] = CPU
            if device.paused:
                return operator(*args, **kwargs)
            if on_device or creates_on_device:
                return self._call(operator, args, kwargs, storages)
            result = operator(*args, **kwargs)
            # The result of an operator whose tensors are all CPU tensors of the program is one too.
            if storages and device.cpu_tensors.keys() >= storages.keys():
                device.cpu_tensors.update(find_storages(result))
            return result

    def _call(self, operator: OpOverload, args: Arguments, kwargs: Keywords, storages: Storages) -> Result:
        """Call an operator on the device: raise the errors of MPS, and add the results to the device."""
        device = self._device
        name = operator.name()
        if torch.is_inference_mode_enabled() and name not in ALWAYS_ON_CPU:
            with self:  # In inference mode, torch has not decomposed it yet.
                result = operator.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if device.has_any(storages) and device.cpu_tensors:
            tensors = iter_operator_tensors([args, kwargs])
            cpu_tensors = [tensor for tensor in tensors if get_key(tensor) in device.cpu_tensors]
            if len(cpu_tensors) < len(tensors):
                check_operator(operator, args, kwargs, cpu_tensors)
        device.fallback_policy.handle(name, torch.is_warn_always_enabled())
        excluded_keys = storages.keys() - device.blocks.keys()
        if size := _allocation_size(operator, args, kwargs):
            device.allocator.check(size)
        # A custom operator in Python calls other operators, which are intercepted again.
        custom = OPDEFS.get(name)
        function = None if custom is None else custom._backend_fns.get("cpu", custom._backend_fns.get(None))  # noqa: SLF001
        if function is None:
            result = device.with_defects(name, operator)(*args, **kwargs)
        else:
            with self:
                result = function(*args, **kwargs)
        if base_name(operator) in SCATTER_OPERATORS and not device.contains(args[0]):
            device.cpu_tensors.update(find_storages(result))  # It is always on the device of the first argument.
        else:
            device.add_outputs(result, excluded_keys)
        return result


class FunctionMode(TorchFunctionMode):
    """Mode that intercepts every torch function that Python calls: it reports the device, and moves tensors."""

    def __init__(self, device: SimulatedDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self, function: TorchFunction, _types: object, args: Arguments = (), kwargs: Keywords | None = None
    ) -> Result:
        """Handle a function for the device, or call it with arguments that are valid on the CPU."""
        device = self._device
        name = getattr(function, "__name__", "")
        if name == "__get__":
            return function(*args)
        kwargs = dict(kwargs or {})
        if name in {"to", "cpu", "type_as"}:
            return self._move(torch.Tensor.to if name == "type_as" else function, list(args), kwargs)
        if kwargs.get("generator") is not None:
            self._check_generator(function, args, kwargs)
        storages = find_storages(args, kwargs)
        if not device.has_any(storages):
            if kwargs.get("device") is None and default_device.CURRENT_DEVICE is None:
                return function(*args, **kwargs)
            return self._call(function, args, kwargs, storages)
        cpu_tensors = {key: tensor for key, tensor in storages.items() if key not in device.blocks}
        device.call_counts[name] += 1
        function = device.with_defects(name, function)
        if cpu_tensors:
            self._check_devices(function, args, kwargs)
        # MPS overrides a function if its first tensor is on the device, or for some functions, any tensor.
        is_overridden = name in SECOND_ARGUMENT_ON_CPU or device.contains(iter_operator_tensors([args, kwargs])[0])
        previous = device.cpu_tensors
        device.cpu_tensors = cpu_tensors
        try:
            if is_overridden:
                return self._call_overridden(name, function, args, kwargs, storages)
            return self._call(function, args, kwargs, storages)
        finally:
            device.cpu_tensors = previous

    def _call_overridden(  # noqa: C901 - the functions that MPS implements differently, one after the other
        self,
        name: str,
        function: TorchFunction,
        args: Arguments,
        kwargs: Keywords,
        storages: Storages,
    ) -> Result:
        """Call a function that MPS implements differently, or any other function."""
        device = self._device
        if name == "get_device":
            return 0
        if name in {"numpy", "__array__", "__dlpack__"}:
            if name != "numpy" or not (kwargs.get("force") or args[1:] == (True,)):
                raise TypeError(
                    "can't convert mps:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first."
                )
            device.record_copy(from_device=True)
            return function(device.copy_detached(args[0].detach(), to_device=False), force=True)
        if name == "type":
            result = function(*args, **kwargs)
            return result.replace("torch.", "torch.mps.", 1) if isinstance(result, str) else result
        if name in {"linalg_svd", "svd"}:  # It has another name below autograd.
            policy = device.fallback_policy
            previous_names = policy.names
            policy.names = names_above_autograd(name, args, kwargs)
            try:
                return function(*args, **kwargs)
            finally:
                policy.names = previous_names
        if name == "scaled_dot_product_attention":
            # Without gradients, MPS uses another kernel, which does not support dropout.
            dropout = args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)  # noqa: PLR2004 - torch's signature
            tensors = iter_operator_tensors([args[:3], kwargs])
            needs_gradients = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
            if dropout and not needs_gradients:
                # Attention.mm
                raise NotImplementedError("scaled_dot_product_attention for MPS does not support dropout.")
            return function(*args, **kwargs)
        if name == "tensor_split":
            sections = iter_operator_tensors([args[1:], kwargs.get("tensor_indices_or_sections")])
            if any(map(device.contains, sections)):
                # TensorShape.cpp
                raise RuntimeError("tensor_split expected tensor_indices_or_sections to be on cpu, but it's on mps:0")
        elif name == "_pack_padded_sequence" and device.contains(args[1]):
            lengths = args[1]
            kind = str(lengths.dtype).removeprefix("torch.int").replace("64", "Long").replace("32", "Int")
            raise RuntimeError(  # PackedSequence.cpp
                f"'lengths' argument should be a 1D CPU int64 tensor, but got {lengths.dim()}D mps:0 {kind} tensor"
            )
        result = self._call(function, args, kwargs, storages)
        if name in {"_pack_padded_sequence", "_pad_packed_sequence"}:
            device.remove(result[1])  # The batch sizes and the lengths stay on the CPU.
        return result

    def _check_devices(self, function: TorchFunction, args: Arguments, kwargs: Keywords) -> None:
        """Raise the errors of torch for tensors of two devices that are checked above its operators."""
        device = self._device
        name = function.__name__
        if getattr(function, "__self__", None) is torch.Tensor.grad:
            raise RuntimeError("assigned grad has data located on a different device")
        if name == "copy_":
            device.record_copy(device.contains(args[1]), _requests_non_blocking(args[2:], kwargs))
        elif name == "linear":  # It is one operator on MPS.
            names = ("input", "weight", "bias")
            for argument, tensor in {**dict(zip(names, args, strict=False)), **kwargs}.items():
                if tensor is not None and not device.contains(tensor):
                    # _mps_linear, Linear.mm
                    raise RuntimeError(f"Tensor for argument {argument} is on cpu but expected on mps")

    def _check_generator(self, function: TorchFunction, args: Arguments, kwargs: Keywords) -> None:
        """Raise an error for a generator of another device; both devices share the default generator."""
        generator = kwargs["generator"]
        device = _requested_device(function, dict(kwargs))
        if device is None:
            tensors = iter_operator_tensors([args, kwargs])
            device = MPS if tensors and self._device.contains(tensors[0]) else CPU
        if generator is not torch.default_generator and {device.type, generator.device.type} == {"cpu", "mps"}:
            raise RuntimeError(  # Generator.h
                f"Expected a '{device.type}' device type for generator but found '{generator.device.type}'"
            )

    def _call(self, function: TorchFunction, args: Arguments, kwargs: Keywords, storages: Storages) -> Result:
        """Call a function; its results are on the device of its arguments, or on the requested one."""
        device = self._device
        target = _requested_device(function, kwargs)
        on_device = device.has_any(storages)
        if target is None:
            result = function(*args, **kwargs)
            if on_device:
                device.add_outputs(result, {*storages, *device.cpu_tensors})
            return result
        to_device = target.type == "mps"

        def place(tensor: torch.Tensor) -> torch.Tensor:
            """Return a tensor on the requested device: itself, or a copy if it is one of the arguments."""
            key = get_key(tensor)
            if key is None or (key in device.blocks) == to_device:
                return tensor
            if key in storages:
                device.record_copy(not to_device)
                return device.copy_differentiable(tensor, to_device)
            if to_device:
                device.add(tensor)
            else:
                device.remove(tensor)
            return tensor

        with contextlib.nullcontext() if to_device else device.pause():
            result = function(*args, **kwargs)
        return tree_map_only(torch.Tensor, place, result)

    def _move(self, function: TorchFunction, args: list[Any], kwargs: Keywords) -> Result:
        """Call ``Tensor.to`` or ``Tensor.cpu``, and copy the tensor if the device changes.

        The dtype changes on the CPU, so that a float64 tensor can be moved as float32.
        """
        device = self._device
        tensor = args[0]
        on_device = device.contains(tensor)
        # The target is an argument, or the device of another tensor.
        target = CPU if function.__name__ == "cpu" else None
        for index, argument in enumerate(args):
            if target is None and isinstance(argument, (str, torch.device)):
                target = torch.device(argument)
                args[index] = CPU if target.type == "mps" else target
        if target is None:
            target = _requested_device(function, kwargs)
        if target is None:
            reference = next(iter(iter_operator_tensors([args[1:], kwargs])), tensor)
            target = MPS if device.contains(reference) else reference.device
        if target.type not in {"cpu", "mps"}:
            with device.pause():
                return function(*args, **kwargs)
        to_device = target.type == "mps"
        if to_device == on_device:
            return function(*args, **kwargs)
        device.record_copy(on_device, _requests_non_blocking(args[1:], kwargs))
        if to_device:
            return device.copy_differentiable(function(*args, **kwargs), to_device)

        @functools.wraps(function)
        def copy_to_cpu(source: torch.Tensor, *options: Any, **named: Any) -> Result:
            return function(device.copy_differentiable(source, to_device), *options, **named)

        return device.with_defects(function.__name__, copy_to_cpu)(*args, **kwargs)

    def wrap_backward(self, run_backward: TorchFunction) -> TorchFunction:
        """Return the entry point of a backward pass with this mode enabled, which hooks and checkpoints need.

        torch disables the mode while the mode handles a function, and a backward pass is one long function.
        """
        thread = threading.get_ident()

        def run(*args: Any, **kwargs: Any) -> Result:
            if threading.get_ident() != thread:
                return run_backward(*args, **kwargs)
            roots, gradients, *others = args
            gradients = self._move_gradients(roots, gradients)
            with self:
                return run_backward(roots, gradients, *others, **kwargs)

        return run

    def _move_gradients(
        self, roots: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
    ) -> Sequence[torch.Tensor | None]:
        """Return the initial gradients of a backward pass on the devices of their tensors.

        A scalar is moved; any other gradient on another device is an error.
        """
        device = self._device
        moved = list(gradients)
        for index, (root, gradient) in enumerate(zip(roots, gradients, strict=False)):
            if not isinstance(root, torch.Tensor) or gradient is None:
                continue
            to_device = device.contains(root)
            if to_device == device.contains(gradient) or {root.device.type, gradient.device.type} != {"cpu", "mps"}:
                continue
            if gradient.dim():
                raise RuntimeError(  # validate_outputs, engine.cpp
                    f"invalid gradient at index {index} - expected device {root.device} but got {gradient.device}"
                )
            moved[index] = device.copy_differentiable(gradient, to_device)
        return tuple(moved) if isinstance(gradients, tuple) else moved


def _requests_non_blocking(args: Sequence[object], kwargs: Keywords) -> bool:
    """Return whether a copy is non-blocking: in its arguments, only that flag is ``True``."""
    return any(argument is True for argument in (*args, kwargs.get("non_blocking")))


def _requested_device(function: TorchFunction, kwargs: Keywords) -> torch.device | None:
    """Return the requested device of a function, and write a device into its arguments that it supports.

    It has an index if operators below read it. For a constructor of tensors it is ``cpu``.
    """
    requested = kwargs.get("device")
    # torch would apply the default device after this mode.
    if requested is None and default_device.CURRENT_DEVICE is not None:
        requested = default_device.CURRENT_DEVICE if function in default_device._device_constructors() else None  # noqa: SLF001
    name = getattr(function, "__name__", "")
    if requested is None or isinstance(requested, int) or name == "_parse_to":  # Module.to only parses its arguments.
        return None
    device = torch.device(requested)
    if device.type == "mps":
        kwargs["device"] = CPU if name in CONSTRUCTORS else MPS
    return device


def _allocation_size(operator: OpOverload, args: Arguments, kwargs: Keywords) -> int:
    """Return the size in bytes of the result of an operator if its arguments determine it, else 0."""
    index = 1 if operator.name().startswith("aten::new_") else 0
    size = args[index] if len(args) > index else None
    if not isinstance(size, (list, tuple)) or not all(isinstance(length, int) for length in size):
        return 0
    dtype: torch.dtype = kwargs.get("dtype") or torch.get_default_dtype()
    return math.prod(size) * dtype.itemsize
