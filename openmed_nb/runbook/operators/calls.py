"""The calls of operators that a trace has, and where in the model they come from."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from ...display import Plain
from .table import MpsRefusal

if TYPE_CHECKING:
    import torch

INFERENCE, FORWARD, BACKWARD, OPTIMIZER = "inference", "forward", "backward", "optimizer"

# What a model does, in the order of the report: a pass without gradients, and the three parts of a training step.
PHASES = (INFERENCE, FORWARD, BACKWARD, OPTIMIZER)


@dataclass(frozen=True, order=True)
class ModulePlace:
    """A module of a model.

    Attributes:
        module: Its name in the model, such as ``"encoder.layer.0"``; empty for the model itself, and outside of it.
        kind: The name of its class; empty outside of every module.
    """

    module: str = ""
    kind: str = ""

    def __str__(self) -> str:
        return f"{self.module} ({self.kind})".strip() if self.kind else ""


class AtModule(Plain):
    """A row of a report about one module: its JSON has ``module`` and ``class`` in the place of ``place``."""

    place: ModulePlace
    HIDDEN = ("place",)

    def to_dict(self) -> dict[str, Any]:
        """Return the row as a mapping, ready for JSON."""
        return {**super().to_dict(), "module": self.place.module, "class": self.place.kind}


class RunningModules:
    """Knows which module is running, in each thread."""

    def __init__(self) -> None:
        self._names: WeakKeyDictionary[torch.nn.Module, str] = WeakKeyDictionary()
        self._follows = False
        self._running = threading.local()

    @property
    def here(self) -> ModulePlace:
        """The innermost module that is running in this thread."""
        stack = self._stack()
        return ModulePlace(self._names.get(stack[-1], ""), type(stack[-1]).__name__) if stack else ModulePlace()

    @contextmanager
    def watched(self, model: torch.nn.Module | None = None) -> Iterator[None]:
        """See the modules that run, of any model, through torch's hooks for all modules.

        Args:
            model: The model whose names are used; ``None`` takes the outermost module that is running for the model.
        """
        from torch.nn.modules import module

        self._follows = model is None
        if model is not None:
            self._name(model)
        before = module.register_module_forward_pre_hook(self._enter)
        after = module.register_module_forward_hook(self._leave, always_call=True)  # After an error, too.
        try:
            yield
        finally:
            before.remove()
            after.remove()

    def _enter(self, module: torch.nn.Module, _args: Any) -> None:
        if self._follows and not self._stack():
            self._name(module)
        self._stack().append(module)

    def _leave(self, module: torch.nn.Module, _args: Any, _output: Any) -> None:
        stack = self._stack()
        while stack and stack.pop() is not module:  # If a hook before ours failed, an end was not seen.
            pass

    def _name(self, model: torch.nn.Module) -> None:
        self._names.update({module: name for name, module in model.named_modules()})

    def _stack(self) -> list[torch.nn.Module]:
        stack: list[torch.nn.Module] = self._running.__dict__.setdefault("stack", [])
        return stack


@dataclass(frozen=True)
class OperatorCall:
    """An operator that is called."""

    operator: str  # Its name with its overload, such as "aten::addmm".
    phase: str  # "inference", "forward", "backward" or "optimizer".
    place: ModulePlace  # The module that was running.


@dataclass(frozen=True)
class Trace:
    """What a model called."""

    calls: Mapping[OperatorCall, int]  # How often each operator was called.
    refusals: Mapping[tuple[MpsRefusal, OperatorCall], int]  # How often each call was one that MPS refuses, and why.
    notes: tuple[str, ...] = ()  # What could not be traced, as sentences.
