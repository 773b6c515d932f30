"""A stand-in for the MPS device of torch, for computers without one: it computes on the CPU and says ``mps``.

Tensors stay plain CPU tensors. A function mode of torch notes which of them are "on mps", answers for their ``device``,
and raises what MPS raises for float64, for numpy and for tensors of two devices. It also notes every copy that was
made, so that a test can see how. A mode counts in the thread that entered it. It does not reproduce numbers or memory.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

MPS, CPU = torch.device("mps", 0), torch.device("cpu")

NO_FLOAT64 = (
    "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64. "
    "Please use float32 instead."
)
NO_NUMPY = "can't convert mps:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first."
TWO_DEVICES = "Expected all tensors to be on the same device, but found at least two devices, mps:0 and cpu!"

MIXING = ("__get__", "__set__", "_has_compatible_shallow_copy_type", "copy_", "__getitem__", "__setitem__")
"""Functions that take tensors of two devices."""


@dataclass(frozen=True)
class Copy:
    """A copy of a tensor from a device to another, and whether the program was to go on while it is made."""

    source: str
    target: str
    non_blocking: bool


class SimulatedMps(TorchFunctionMode):
    """The function mode; enter it through :func:`simulated_mps`.

    Attributes:
        copies: The copies between devices.
        called: How often each function was called with a tensor of the device.
        emptied: How often the cache was emptied.
    """

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[Copy] = []
        self.called: Counter[str] = Counter()
        self.emptied = 0
        self._tensors: dict[int, weakref.ref[torch.Tensor]] = {}

    def holds(self, tensor: Any) -> bool:
        """Tell whether a tensor is on the device."""
        known = self._tensors.get(id(tensor))
        return known is not None and known() is tensor

    def take(self, thing: Any) -> Any:
        """Put a tensor on the device.

        Raises:
            TypeError: For float64.
        """
        if isinstance(thing, torch.Tensor):
            if thing.dtype in {torch.float64, torch.complex128}:
                raise TypeError(NO_FLOAT64)
            key = id(thing)
            self._tensors[key] = weakref.ref(thing, lambda _gone: self._tensors.pop(key, None))
        return thing

    def leave(self, tensor: torch.Tensor) -> None:
        """Take a tensor off the device."""
        self._tensors.pop(id(tensor), None)

    def __torch_function__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer for the device, or call the function on the CPU and put what it returns where it belongs."""
        kwargs = dict(kwargs or {})
        attribute = getattr(function, "__self__", None)
        if attribute is torch.Tensor.device:
            return MPS if self.holds(args[0]) else function(*args)
        if attribute is torch.Tensor.is_mps:
            return self.holds(args[0])
        if attribute is torch.Tensor.is_cpu:
            return not self.holds(args[0])
        return self._call(function, list(args), kwargs)

    def _call(self, function: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        name = getattr(function, "__name__", str(function))
        held = [self.holds(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if name in {"to", "cpu"}:
            return self._copy(function, name, args, kwargs)
        if any(held):
            self.called[name] += 1
            self._check(name, args, kwargs)
        made = self._made_on(kwargs)
        result = function(*args, **kwargs)
        if name == "__set__" and isinstance(args[1], torch.Tensor):  # the tensor's numbers, or its gradient
            (self.take if self.holds(args[1]) else self.leave)(args[0])
        return tree_map(self.take, result) if (any(held) if made is None else made.type == "mps") else result

    def _check(self, name: str, args: list[Any], kwargs: dict[str, Any]) -> None:
        """Raise what MPS raises for numpy and for tensors of two devices; one number may be anywhere."""
        if name == "numpy":
            raise TypeError(NO_NUMPY)
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if name not in MIXING and any(leaf.dim() and not self.holds(leaf) for leaf in leaves):
            raise RuntimeError(TWO_DEVICES)

    @staticmethod
    def _made_on(kwargs: dict[str, Any]) -> torch.device | None:
        """Return the device that is named as an argument, which becomes the CPU there."""
        if kwargs.get("device") is None:
            return None
        device = torch.device(kwargs["device"])
        if device.type == "mps":
            kwargs["device"] = CPU
        return device

    def _copy(self, function: Any, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Call ``Tensor.to`` or ``Tensor.cpu``, and note the copy where it goes to another device."""
        tensor, was_here = args[0], self.holds(args[0])
        source = MPS if was_here else CPU
        target = CPU if name == "cpu" else self._made_on(kwargs) or source
        for place, argument in enumerate(args[1:], 1):
            if isinstance(argument, (str, torch.device)):
                target, args[place] = torch.device(argument), CPU
        at_once = any(argument is True for argument in (*args[1:], kwargs.get("non_blocking")))
        if source.type != target.type:
            self.copies.append(Copy(source.type, target.type, at_once))
        result = function(*args, **kwargs)
        if result is tensor and source.type != target.type:
            result = tensor.clone() if tensor.requires_grad else tensor.detach().clone()
        return self.take(result) if target.type == "mps" else result

    def _empty_cache(self) -> None:
        self.emptied += 1


@contextlib.contextmanager
def simulated_mps() -> Iterator[SimulatedMps]:
    """Let this thread have an MPS device; ``torch.mps.empty_cache`` counts, because torch's own needs a Mac."""
    device, empty_cache = SimulatedMps(), torch.mps.empty_cache
    torch.mps.empty_cache = device._empty_cache
    try:
        with device:
            yield device
    finally:
        torch.mps.empty_cache = empty_cache
