"""Tensors in nested values: find, convert and move them to a device, and copy models.

Every copy to MPS waits for all work that was submitted before. A copy that does not wait can read memory that was freed in the
meantime (pytorch#189690, #139550).
MPS does not support float64. Such tensors are converted to float32, and each conversion is reported once.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from .._render.values import pluralize
from .._utils.text import describe_error, short_type_name
from .._utils.warning import warn
from ..errors import ConfigurationError, DtypeOverflowError
from .backend import TENSOR_LOCK
from .registry import get_device

if TYPE_CHECKING:
    import numpy as np
    import torch

T = TypeVar("T")

# To pin memory for fewer bytes takes longer than the copy, and CUDA reads them before the call returns.
MAX_UNPINNED_BYTES = 1 << 16


def mps_dtype_fallbacks(device: str | torch.device) -> dict[torch.dtype, torch.dtype]:
    """Return the dtypes that a device does not support, each with its replacement."""
    import torch

    narrower = get_device(device).dtype_fallbacks
    return {getattr(torch, wide): getattr(torch, narrow) for wide, narrow in narrower.items()}


def arrays_to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Return arrays of one dtype as tensors on a device, with a single copy.

    A single copy is used, because each copy to MPS waits for all previous work. Only copies from pinned memory to CUDA are
    asynchronous; they are ordered with the work that follows. An asynchronous copy to MPS can read memory that was freed in
    the meantime, and one from MPS can be read before it is complete (pytorch#189690, #139550).
    """
    import numpy as np
    import torch

    target = get_device(device)
    if not target.is_accelerator or not arrays:
        return [torch.from_numpy(array) for array in arrays]
    flat = [array.reshape(-1) for array in arrays]
    if target.supports_async_copies and sum(array.nbytes for array in flat) > MAX_UNPINNED_BYTES:
        dtype = torch.from_numpy(flat[0]).dtype
        packed = torch.empty(sum(map(len, flat)), dtype=dtype, device="cpu", pin_memory=True)
        np.concatenate(flat, out=packed.numpy())
    else:
        packed = torch.from_numpy(np.concatenate(flat))
    moved = packed.to(device, non_blocking=target.supports_async_copies)
    ends = itertools.accumulate(array.size for array in flat)  # Tensor.split does not support every device type.
    return [moved[end - array.size : end].view(array.shape) for array, end in zip(arrays, ends, strict=True)]


def copy_to_host_async(tensor: torch.Tensor) -> torch.Tensor:
    """Start to copy a tensor to the host. On CUDA, wait with ``Device.record_event`` before the copy is read."""
    return tensor.to("cpu", non_blocking=True) if get_device(tensor.device).supports_async_copies else tensor


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """Return a tensor as an array in host memory."""
    return tensor.cpu().numpy()


def _get_children(value: object) -> list[tuple[object, object]] | None:
    """Return the keys and children of a mapping, list, tuple or dataclass, or ``None`` for any other value.

    A ``BatchEncoding`` of transformers is a mapping but not a ``dict``. A ``ModelOutput`` is both a ``dict`` and a dataclass.
    """
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, (list, tuple)):
        return list(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    return None


def _replace_children(value: Any, children: Sequence[object]) -> object:
    """Return a value of the same type with other children, in the order of :func:`_get_children`."""
    if isinstance(value, tuple):
        tuple_class: Any = type(value)
        return tuple_class(*children) if hasattr(value, "_fields") else tuple_class(children)
    changed = copy.copy(value)
    if isinstance(value, list):
        changed[:] = children
        return changed
    if hasattr(value, "_metadata"):  # Versions of a state dict, which copy.copy does not preserve.
        changed._metadata = value._metadata  # noqa: SLF001
    for (key, _), child in zip(_get_children(value) or (), children, strict=True):
        if isinstance(value, Mapping):  # A ModelOutput does not support update().
            changed[key] = child
        else:  # The dataclass may be frozen; this instance is new.
            object.__setattr__(changed, str(key), child)
    return changed


def named_tensors(value: object, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in nested mappings, lists, tuples and dataclasses with their names, joined by dots."""
    import torch

    if isinstance(value, torch.Tensor):
        yield name, value
    for key, child in _get_children(value) or ():
        yield from named_tensors(child, f"{name}.{key}" if name else str(key))


def iter_operator_tensors(value: object) -> list[torch.Tensor]:
    """Return the tensors in the tuples, lists and dicts that operators take and return.

    Modes call it for each operator, so it is faster than :func:`named_tensors`.
    """
    import torch

    if isinstance(value, torch.Tensor):
        return [value]
    if not isinstance(value, (tuple, list, dict)):
        return []
    children = value.values() if isinstance(value, dict) else value
    return [tensor for child in children for tensor in iter_operator_tensors(child)]


def map_tensors(value: object, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a value of the same type with changed tensors."""
    import torch

    if isinstance(value, torch.Tensor):
        return change(value)
    children = _get_children(value)
    if not children:
        return value
    return _replace_children(value, [map_tensors(child, change) for _, child in children])


def get_module(
    value: object, remedy: str = "Pass the name of a model, a torch module or a pipeline."
) -> torch.nn.Module:
    """Return the torch module of a module, a pipeline or a loaded model.

    Raises:
        ConfigurationError: If the value is not a model.
    """
    import torch

    module = value if isinstance(value, torch.nn.Module) else getattr(value, "model", None)
    if not isinstance(module, torch.nn.Module):
        raise ConfigurationError(f"{short_type_name(value)} is not a model.", remedy)
    return module


def unwrap_model(model: object) -> Any:
    """Return the model inside the wrappers for compilation, parallel training and adapters."""
    for name in ("_orig_mod", "module"):
        model = getattr(model, name, model)
    get_base_model = getattr(model, "get_base_model", None)
    return model if get_base_model is None else get_base_model()


WORD = r"([a-z]+([0-9]{1,2}[a-z]*)?|[0-9]{1,3})"

# Keys that errors may display: lower-case letters and short numbers, such as "input_ids" or "layer.11.weight". Any other key
# could be a text, the name of a patient or the number of a record.
FIELD_NAME_PATTERN = re.compile(rf"(?=.{{1,60}}\Z){WORD}([._]{WORD})*")


def _child_suffix(parent: object, key: object, index: int) -> str:
    """Return the suffix of the name of a child, with its key only if that cannot be part of a note."""
    if isinstance(parent, Mapping):
        is_name = isinstance(key, str) and FIELD_NAME_PATTERN.fullmatch(key)
        is_state_dict = getattr(parent, "_metadata", None)  # The keys of a state dict are names of layers.
        return f".{key}" if is_name or is_state_dict else f".[{index}]"
    if isinstance(key, int):
        fields = getattr(parent, "_fields", None)  # Names of a named tuple.
        return f".{fields[index]}" if fields else f"[{index}]"
    return f".{key}"


def _is_numeric_array(value: object) -> bool:
    """Return whether a value is an array that can become a tensor; a masked array cannot."""
    numpy = sys.modules.get("numpy")  # If numpy is not imported, there are no arrays.
    if numpy is None or not isinstance(value, numpy.ndarray) or hasattr(value, "mask"):
        return False
    return value.dtype.kind in "biufc"


def to_device(value: T, device: str | torch.device) -> T:
    """Return a value with its tensors on a device. For MPS, float64 becomes float32 and complex128 becomes complex64.

    A module is moved in place, as in torch. Any other value is replaced by a new value of the same type. NumPy arrays of
    numbers become tensors, because their float64 would otherwise not be converted. Tensors that are shared, such as tied
    weights, remain shared.
    """
    import torch

    mover = TensorMover(torch.device(device))
    moved: T
    if isinstance(value, torch.nn.Module):
        mover.move_module(value)
        moved = value
    else:
        moved = mover.move(value, "")
    _warn_of_conversions(mover.converted, mover.device.type)
    return moved


class TensorMover:
    """State of one call of :func:`to_device`.

    Attributes:
        device: Target device.
        converted: Names of converted tensors, each with its dtype before and after the conversion.
        narrower: Replacements of the dtypes that the device does not support.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.converted: dict[str, tuple[str, str]] = {}
        self.narrower = mps_dtype_fallbacks(device)
        # By identity: the original tensor, which is kept alive so that its identity is not reused, and the moved tensor.
        self._moved: dict[tuple[object, ...], tuple[torch.Tensor, torch.Tensor]] = {}

    def move(self, value: Any, name: str) -> Any:
        """Return a value with moved tensors; its name describes where it is in the value that the caller passed."""
        import torch

        if isinstance(value, torch.Tensor):
            return self._move_tensor(value, name)
        if _is_numeric_array(value):  # torch.from_numpy rejects negative strides and other byte orders.
            return self._move_tensor(torch.from_numpy(value.astype(value.dtype.newbyteorder("="), order="C")), name)
        type_name = type(value).__name__
        if isinstance(value, torch.nn.Module):
            raise ConfigurationError(f"The module {type_name} is inside another value.", "Pass the module separately.")
        if isinstance(value, torch.optim.Optimizer):
            raise ConfigurationError(
                f"The optimizer {type_name} cannot be moved.",
                "Move the model first, then create the optimizer from its parameters.",
            )
        children = _get_children(value)
        if not children:
            return value
        moved = []
        for index, (key, child) in enumerate(children):
            child_name = f"{name}{_child_suffix(value, key, index)}".lstrip(".")
            moved.append(self.move(child, child_name))
        return _replace_children(value, moved)

    def move_module(self, module: torch.nn.Module) -> None:
        """Move a module in place. Buffers that several modules share remain shared."""
        import torch

        buffers = [
            (owner, name, buffer)
            for owner in module.modules()
            for name, buffer in owner.named_buffers(recurse=False, remove_duplicate=False)
        ]
        tensors: list[tuple[str, torch.Tensor]] = [*module.named_parameters(), *module.named_buffers()]
        for name, weight in module.named_parameters():
            if weight.grad is not None:
                tensors.append((f"{name}.grad", weight.grad))
        with torch.no_grad():
            wide = ((name, tensor) for name, tensor in tensors if tensor.dtype in self.narrower)
            narrowed = {id(tensor): self._move_tensor(tensor, name) for name, tensor in wide}
            if narrowed:  # Module.to would also convert 16-bit tensors.
                module._apply(lambda tensor: narrowed.get(id(tensor), tensor))  # noqa: SLF001
        module.to(self.device)
        moved: dict[int, torch.Tensor] = {}
        for owner, name, buffer in buffers:
            setattr(owner, name, moved.setdefault(id(buffer), getattr(owner, name)))

    def _move_tensor(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Return a moved tensor, or the result for another view of the same memory."""
        key = _identity(tensor)
        if key not in self._moved:
            # Only copies from pinned memory to CUDA are safe without waiting.
            queues_copies = get_device(self.device).supports_async_copies
            non_blocking = queues_copies and tensor.device.type == "cpu" and tensor.is_pinned()
            self._moved[key] = (tensor, self._downcast(tensor, name).to(self.device, non_blocking=non_blocking))
        return self._moved[key][1]

    def _downcast(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Return a tensor in a dtype that the device supports, or raise an error if a value would overflow."""
        dtype = self.narrower.get(tensor.dtype)
        if dtype is None:
            return tensor
        narrow = tensor.to(dtype)
        before = str(tensor.dtype).removeprefix("torch.")
        after = str(dtype).removeprefix("torch.")
        num_overflows = int(narrow.isinf().sum()) - int(tensor.isinf().sum())
        if num_overflows:
            values = f"{name or 'The tensor'} has {pluralize(num_overflows, 'value')} in {before}"
            overflow = "overflows" if num_overflows == 1 else "overflow"
            raise DtypeOverflowError(
                f"{values} that {overflow} {after}, the widest dtype supported on {self.device.type}.",
                "Scale or clamp the values below 3.4e38, or use the CPU.",
            )
        self.converted[name] = (before, after)
        return narrow


def _identity(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return a key that is equal for tensors that are the same view of the same memory."""
    import torch

    if tensor.layout != torch.strided or type(tensor) not in {torch.Tensor, torch.nn.Parameter}:
        return (id(tensor),)
    start = tensor.untyped_storage().data_ptr()
    view = (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)
    return (start, *view) if start and tensor.is_leaf else (id(tensor),)


def copy_model(model: torch.nn.Module, device: str = "cpu", dtype: torch.dtype | None = None) -> torch.nn.Module:
    """Return a copy of a model without its gradients. The model is not changed.

    The tensors are copied individually to the CPU, so that the device of the model does not need memory for a second copy.
    For a compiled model, the inner model is copied. Hooks are copied too.

    Args:
        model: Model on any device.
        device: Device of the copy.
        dtype: Dtype of the floating-point tensors. If ``None``, it is not changed.

    Raises:
        ConfigurationError: If the model cannot be copied or has tensors that the device does not support.
    """
    import torch

    inner = getattr(model, "_orig_mod", model)
    name = type(inner).__name__
    tensors = [*inner.parameters(), *inner.buffers()]
    num_meta = sum(tensor.is_meta for tensor in tensors)
    if num_meta:
        raise ConfigurationError(
            f"{name} has {pluralize(num_meta, 'tensor')} with a shape but no memory (device meta).",
            "Load the weights or create real inputs, then try again.",
        )
    dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors}
    for unsupported in sorted(dtypes.intersection(get_device(device).dtype_fallbacks)):
        raise ConfigurationError(
            f"{name} has tensors in {unsupported}, which MPS does not support (pytorch#122602).", "Pass model.float()."
        )

    def copy_to_cpu(tensor: torch.Tensor) -> torch.Tensor:
        new_dtype = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        copied = tensor.detach().to("cpu", new_dtype, copy=True)
        return torch.nn.Parameter(copied, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else copied

    try:
        # Subclasses of tensors define their own copy.
        plain_tensors = (tensor for tensor in tensors if type(tensor) in {torch.Tensor, torch.nn.Parameter})
        with TENSOR_LOCK, torch.no_grad():  # A TorchScript model would copy its weights with a graph otherwise.
            copies = {id(tensor): copy_to_cpu(tensor) for tensor in plain_tensors}
            copied: torch.nn.Module = copy.deepcopy(inner, copies).to("cpu")
    except Exception as error:
        # A model can have any attribute, and each type raises a different error: a lock, a file, a tensor with a graph.
        raise ConfigurationError(
            f"{name} cannot be copied: {describe_error(error)}.", "Remove the attribute that cannot be copied."
        ) from error
    for copied_weight, weight in zip(copied.parameters(), inner.parameters(), strict=True):
        if copied_weight.requires_grad != weight.requires_grad:  # An uninitialized weight rejects the call.
            copied_weight.requires_grad_(weight.requires_grad)
    return copied.to(torch.device(device))


# Names and dtypes of the conversions reported in this process, because a training loop moves thousands of batches.
REPORTED_CONVERSIONS: set[tuple[str, str]] = set()
MAX_LISTED_NAMES = 3  # Maximum number of names in a warning.


def _warn_of_conversions(converted: Mapping[str, tuple[str, str]], device: str) -> None:
    """Issue one warning for all conversions that were not reported before in this process."""
    new = {name: types for name, types in converted.items() if (name, types[0]) not in REPORTED_CONVERSIONS}
    if not new:
        return
    REPORTED_CONVERSIONS.update((name, types[0]) for name, types in new.items())
    dtypes = sorted(set(new.values()))
    changes = " and ".join(f"{before} to {after}" for before, after in dtypes)
    unsupported = " or ".join(before for before, _ in dtypes)
    names = [name for name in new if name]
    more = f" and {len(names) - MAX_LISTED_NAMES} more" if len(names) > MAX_LISTED_NAMES else ""
    listed = f": {', '.join(names[:MAX_LISTED_NAMES])}{more}" if names else ""
    warn(f"Converted {changes}, because {device.upper()} does not support {unsupported}{listed}.")
