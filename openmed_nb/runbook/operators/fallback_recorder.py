"""Sees every fallback of MPS to the CPU while it is on: which operator, in which module, how long.

Three things are put together, because none of them knows all:

- torch's warnings name every operator that falls back, also inside of another (``MPSFallback.mm``), once
  ``torch.set_warn_always`` is on; but they come late: those of a backward pass when it has ended;
- a mode sees the outermost operators as they are called, and how long each takes;
- hooks of all modules know which module is running.

This file imports torch, because a subclass needs its base; it is itself imported where a ledger is opened.
"""

from __future__ import annotations

import re
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ...devices.backend import finish
from ...devices.torch_modes import modes_on
from .places import Place, Places
from .table import ALWAYS_ON_CPU, FALLS_BACK, OperatorTable

FALLS = re.compile(r"The operator '([^']+)' is not currently supported on the MPS backend and will fall back to run on")
REFUSES = re.compile(r"The operator '([^']+)' is not currently implemented for the MPS device")

FORWARD, BACKWARD, ELSEWHERE = "forward", "backward", "elsewhere"


@dataclass(eq=False)
class Sighting:
    """An outermost operator that was called with a tensor of MPS.

    Attributes:
        name: How MPS names it where it falls back by itself; empty where it does not.
        place: The module that was running.
        phase: ``"forward"``, ``"backward"``, or ``"elsewhere"``: outside of both.
        seconds: How long it took; ``None`` while it runs.
    """

    name: str
    place: Place
    phase: str
    seconds: float | None = None


@dataclass(frozen=True)
class Fall:
    """One fallback, or one operator that was refused because falling back is off.

    Attributes:
        operator: How MPS names it.
        sighting: The outermost operator that it was part of.
        refused: Whether it ended in an error.
    """

    operator: str
    sighting: Sighting
    refused: bool = False


@dataclass
class Record:
    """What was seen so far.

    Attributes:
        table: What MPS has.
        places: Where in a model we are.
        falls: The fallbacks, in the order in which they became known.
        waiting: Operators that fall back by themselves, of which torch has not warned yet.
        last: The outermost operator that runs, or that ran last.
        operators: How many outermost operators were called with a tensor of MPS.
        thread: The thread that is watched.
    """

    table: OperatorTable
    places: Places = field(default_factory=Places)
    falls: list[Fall] = field(default_factory=list)
    waiting: list[Sighting] = field(default_factory=list)
    last: Sighting | None = None
    operators: int = 0
    thread: int = field(default_factory=threading.get_ident)

    def begin(self, operator: str) -> Sighting:
        """Note that an outermost operator is called."""
        falls = self.table.verdict(operator) in {FALLS_BACK, ALWAYS_ON_CPU}
        name = self.table.named_by_mps(operator) if falls else ""
        self.operators += 1
        self.last = Sighting(name, self.places.here, phase_of(self.places.here))
        if name:
            self.waiting.append(self.last)
        return self.last

    def warned(self, operator: str) -> None:
        """Note a warning of torch: it is of the first such operator that waits for one, or of a part of the last."""
        waiting = next((sighting for sighting in self.waiting if sighting.name == operator), None)
        if waiting is not None:
            self.waiting.remove(waiting)
        elif self.last is not None and self.last in self.waiting:  # MPS has another name for it.
            self.waiting.remove(self.last)
        here = self.places.here
        self.falls.append(Fall(operator, waiting or self.last or Sighting("", here, phase_of(here))))

    def refused(self, sighting: Sighting, error: NotImplementedError) -> None:
        """Note an operator that MPS does not have, and for which falling back is off."""
        named = REFUSES.search(str(error))
        if named:
            self.waiting = [other for other in self.waiting if other is not sighting]
            self.falls.append(Fall(named[1], sighting, refused=True))

    def all_falls(self) -> list[Fall]:
        """Return every fallback, also those whose warning somebody else's filter kept from us."""
        silent = [Fall(sighting.name, sighting) for sighting in self.waiting if sighting.seconds is not None]
        return [*self.falls, *silent]


class Watch(TorchDispatchMode):
    """Sees the outermost operators, and how long those take that have a tensor of MPS."""

    supports_higher_order_operators = True

    def __init__(self, record: Record) -> None:
        super().__init__()
        self._record = record

    def __torch_dispatch__(self, operator: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operator, and note it where it has a tensor of MPS."""
        kwargs = kwargs or {}
        if not any(tensor.is_mps and tensor.layout == torch.strided for tensor in _tensors([args, kwargs])):
            return operator(*args, **kwargs)
        sighting = self._record.begin(operator.name())
        if sighting.name and sighting.phase != BACKWARD:  # There, another thread may wait for us, with the lock.
            finish(torch.device("mps"))  # What was started before is not the time of this one, which waits for it.
        start = time.perf_counter()
        try:
            made = operator(*args, **kwargs)
        except NotImplementedError as error:
            self._record.refused(sighting, error)
            raise
        sighting.seconds = time.perf_counter() - start
        return made


@contextmanager
def recording(record: Record, model: torch.nn.Module | None) -> Iterator[None]:
    """Note every fallback of this thread, and give everything back as it was, whatever ends it."""
    with ExitStack() as stack:
        stack.callback(torch.set_warn_always, torch.is_warn_always_enabled())
        stack.enter_context(_warnings_to(record))
        torch.set_warn_always(True)
        stack.enter_context(record.places.watched(model))
        stack.enter_context(modes_on(Watch(record)))
        yield


@dataclass(frozen=True)
class Listener:
    """Takes the warnings of fallbacks, and hands every other on.

    Attributes:
        record: Where they are noted.
        shown: What showed warnings before.
    """

    record: Record
    shown: Callable[..., None]

    def __call__(self, message: Any, *args: Any, **kwargs: Any) -> None:
        """Note a fallback, or show any other warning; a ledger outside of this one is told of both."""
        named = FALLS.search(str(message))
        ours = named is not None and threading.get_ident() == self.record.thread
        if named is not None and ours:
            self.record.warned(named[1])
        if not ours or isinstance(self.shown, Listener):
            self.shown(message, *args, **kwargs)


@contextmanager
def _warnings_to(record: Record) -> Iterator[None]:
    """Let torch's warnings of fallbacks come here, each time; the others go where they went before."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "always", message="The operator '.*' is not currently supported on the MPS", category=UserWarning
        )
        warnings.showwarning = Listener(record, warnings.showwarning)
        yield


def phase_of(place: Place) -> str:
    """Return what is going on: a backward pass, the forward pass of a module, or neither."""
    if torch._C._current_graph_task_id() != -1:  # noqa: SLF001 - as torch.utils.module_tracker asks it
        return BACKWARD
    return FORWARD if place.kind else ELSEWHERE


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))  # noqa: SLF001
