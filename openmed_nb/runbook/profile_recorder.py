"""Sees what a step calls: functions that wait for the device, and operators that are started.

This file imports torch, because a subclass needs its base; it is itself imported only when a step is watched.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ..devices.profilers import modes_on
from .profile_watch import PACKAGE, SYNCHRONIZE, CodePlace, Synchronisation, place_of, waiting_call


@dataclass
class StepRecord:
    """What was seen so far."""

    kind: str  # The kind of device: ``"cpu"``, ``"mps"`` or ``"cuda"``.
    # How often each call waited for the device, and where.
    waits: Counter[tuple[str, CodePlace]] = field(default_factory=Counter)
    started: int = 0  # How many operators were started that compute something.

    def is_here(self, thing: Any) -> bool:
        """Tell whether something is a tensor of the device."""
        return isinstance(thing, torch.Tensor) and thing.device.type == self.kind

    def note(self, call: str, frame: FrameType) -> None:
        """Count a call that waits, unless the measurement itself makes it."""
        place = place_of(frame)
        if place is not None:
            self.waits[call, place] += 1

    def synchronisations(self, steps: int) -> tuple[Synchronisation, ...]:
        """Return the calls that waited, the most frequent first."""
        found = sorted(self.waits.items(), key=lambda item: (-item[1], item[0]))
        return tuple(Synchronisation(call, place, count / steps) for (call, place), count in found)


class WaitingFunctions(TorchFunctionMode):
    """Sees the functions of torch that Python calls, and notes where one is called from that waits."""

    def __init__(self, record: StepRecord) -> None:
        super().__init__()
        self._record = record

    def __torch_function__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        call = waiting_call(getattr(function, "__name__", ""), args, kwargs, self._record.is_here)
        if call:
            self._record.note(call, sys._getframe(1))  # noqa: SLF001 - Python has no other name for it
        return function(*args, **kwargs)


class StartedOperators(TorchDispatchMode):
    """Counts the operators that compute; a view starts nothing on a device."""

    supports_higher_order_operators = True

    def __init__(self, record: StepRecord) -> None:
        super().__init__()
        self._record = record

    def __torch_dispatch__(self, operator: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._record.started += not is_view(operator)
        return operator(*args, **(kwargs or {}))


@contextmanager
def watching(record: StepRecord) -> Iterator[None]:
    """Note what is called in this thread; what ``torch.compile`` made runs uncompiled, since it calls nothing that is seen."""
    with ExitStack() as stack:
        if record.kind != "cpu":
            for module in (getattr(torch, record.kind), torch.accelerator):
                stack.enter_context(synchronize_noted(module, record))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(modes_on(StartedOperators(record), WaitingFunctions(record)))
        yield


@contextmanager
def synchronize_noted(module: Any, record: StepRecord) -> Iterator[None]:
    """Note calls of ``synchronize`` of a module of torch for a block: it takes no tensor, so that no mode sees it."""
    original = getattr(module, SYNCHRONIZE)

    def synchronize(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1)  # noqa: SLF001 - Python has no other name for it
        if PACKAGE not in Path(caller.f_code.co_filename).parents:  # What looks for fallbacks waits, too.
            record.note(f"{module.__name__}.{SYNCHRONIZE}()", caller)
        return original(*args, **kwargs)

    setattr(module, SYNCHRONIZE, synchronize)
    try:
        yield
    finally:
        setattr(module, SYNCHRONIZE, original)


def is_view(operator: Any) -> bool:
    """Tell whether an operator only looks at its tensor in another way.

    Example:
        >>> is_view(torch.ops.aten.t.default), is_view(torch.ops.aten.add_.Tensor), is_view(torch.ops.aten.add.Tensor)
        (True, False, False)
    """
    schema = getattr(operator, "_schema", None)  # Operators of a higher order have none.
    aliases = [one.alias_info for one in schema.returns] if schema is not None else []
    return any(alias is not None and not alias.is_write for alias in aliases)
