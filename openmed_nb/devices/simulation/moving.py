"""What the two modes share: what is on the device, how tensors get there and back, and what was seen on the way.

This file imports torch, because a subclass needs its base; it is itself imported where a simulation begins.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from .allocator import SimulatedAllocator
from .defects import Call
from .operators import Fallbacks
from .storages import Storages, check_type, name_of, storage_of, tensors


@dataclass(frozen=True)
class Copy:
    """A copy of a tensor from a device to another, and whether the program was to go on while it is made."""

    source: str
    target: str
    non_blocking: bool


@dataclass
class Device:
    """The simulated device.

    Attributes:
        allocator: Counts the memory.
        fallbacks: Judges the operators.
        storages: What is on the device.
        copies: The copies between devices.
        called: How often each function was called with a tensor of the device.
        wrong: What computes instead of each operator that goes wrong on this device.
        paused: Whether operators are those of the CPU.
    """

    allocator: SimulatedAllocator
    fallbacks: Fallbacks
    storages: Storages
    copies: list[Copy] = field(default_factory=list)
    called: Counter[str] = field(default_factory=Counter)
    wrong: Mapping[str, Callable[[Call], Any]] = field(default_factory=dict)
    paused: bool = False

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Let operators be those of the CPU for a while."""
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before

    def compute(self, operator: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Return what an operator makes on this device."""
        wrong = self.wrong.get(operator.name()) if self.wrong else None
        if wrong is None:
            return operator(*args, **kwargs)
        dirty = self.allocator.driver > self.allocator.allocated
        return wrong(Call(operator, args, kwargs, dirty, self.storages.holds))

    def take(self, made: Any, elsewhere: Collection[int]) -> None:
        """Put the tensors that were made on the device, but for those whose storages stand elsewhere."""
        for tensor in tensors(made):
            storage = storage_of(tensor)
            if storage is not None and name_of(storage) not in elsewhere:
                self.storages.take(tensor)

    def carry(self, tensor: torch.Tensor, towards: bool) -> torch.Tensor:
        """Return a copy of a tensor on the device, or off it; gradients find their way back."""
        if tensor.requires_grad and torch.is_grad_enabled():
            return Carry.apply(tensor, self, towards)
        return self.copied(tensor.detach(), towards)

    def copied(self, tensor: torch.Tensor, towards: bool) -> torch.Tensor:
        """Return a copy of a tensor that no gradient passes.

        Raises:
            TypeError: For a type that MPS does not have.
            RuntimeError: Where the memory does not suffice.
        """
        if towards:
            check_type(tensor.dtype)
            self.allocator.check(tensor.numel() * tensor.element_size())
        with torch._C.DisableTorchFunction(), self.pause():  # noqa: SLF001
            copy = tensor.clone()
            if towards:
                self.storages.take(copy)
        return copy

    def note_copy(self, from_here: bool, non_blocking: bool = False) -> None:
        """Note a copy between the devices."""
        source, target = ("mps", "cpu") if from_here else ("cpu", "mps")
        self.copies.append(Copy(source, target, non_blocking))


class Carry(torch.autograd.Function):
    """A copy between the devices whose gradient is copied the other way."""

    @staticmethod
    def forward(context: Any, tensor: torch.Tensor, device: Device, towards: bool) -> torch.Tensor:
        """Return the copy."""
        context.device, context.towards = device, towards
        return device.copied(tensor, towards)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Return the gradient, where the tensor was."""
        return context.device.carry(gradient, not context.towards), None, None
