"""Let go of models, variables and caches; limit the memory."""

from __future__ import annotations

import gc
import operator
import sys
from collections.abc import Callable, Container, MutableMapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from .._events.activity import RELEASING, Activity
from .._render.display import Report, Shown, Table, in_bytes
from .._utils.text import describe_names, short_type_name
from .._utils.validation import check_flag, number
from ..devices.backend import torch_is_loaded
from ..devices.device import AllocatorMemory
from ..devices.machine import mps_is_simulated
from ..devices.memory import OutOfMemory
from ..devices.registry import device_of
from ..errors import ConfigurationError, DeviceError
from ..session import SESSION
from .curve import resident_bytes
from .guards import WATCHED, Guards
from .holders import living_bytes

COLUMNS = "let go", "tensors", "device", "process"


@dataclass(frozen=True, repr=False)
class MemoryLimit(Shown):
    """A limit that is in force: torch raises an out-of-memory error before the process holds more.

    Attributes:
        device: The device.
        fraction: The share of what the device recommends (MPS) or has (CUDA); 0 is no limit, on MPS only.
        recommended: That memory in bytes.
        low_watermark: On MPS, the share from which torch collects unused blocks.
        simulated: Whether this is the simulated MPS.
    """

    device: str
    fraction: float
    recommended: int
    low_watermark: float | None = None
    simulated: bool = False

    ALSO = ("size",)

    @property
    def size(self) -> int | None:
        """The limit in bytes, ``None`` where there is none."""
        return int(self.fraction * self.recommended) if self.fraction else None

    def report(self) -> Report:
        """Return the limit in bytes and what it does to the watermarks."""
        most = "no limit: macOS may swap and then stop the process" if self.size is None else in_bytes(self.size)
        sentences, low = [f"{self.fraction:g} of {in_bytes(self.recommended)}."], self.low_watermark
        if low is not None:
            # What torch does below and at the limit (MPSAllocator.mm; the low ratio cannot be set live).
            does = f"; from the low one ({low:g}) on, unused blocks are collected."
            if not low:
                does = "; the low one is 0, so unused blocks are collected only when memory is short."
            elif self.fraction and low > self.fraction:
                does = f", below the low one ({low:g}), so unused blocks are collected only when the limit is reached."
            sentences.append(f"The high watermark is {self.fraction:g} now{does}")
        spoken: tuple[str, ...] = ()
        if self.size is None:
            recommended = f"{self.device} recommends {in_bytes(self.recommended)}."
            spoken = (
                f"No memory limit on {self.device}: macOS may swap and then stop the process",
                recommended,
                *sentences[1:],
            )
        return Report(f"Memory limit on {self.device}: {most}", tuple(sentences), spoken=spoken)


def limit_memory(fraction: float, device: Any = None) -> MemoryLimit:
    """Let torch refuse to hold more memory than a share of what the device recommends (MPS) or has (CUDA).

    Args:
        fraction: Up to 2 on MPS, where it becomes the high watermark and 0 is no limit; up to 1 on CUDA.
        device: As for :class:`~openmed_nb.training.EpochHooks`.

    Returns:
        The limit in bytes, and what it does to the watermarks.

    Raises:
        DeviceError: Where the device cannot be used.
        ConfigurationError: On the CPU, and for a fraction out of range; the former limit stays.

    Example:
        >>> limit_memory(0.9, "cpu")
        Traceback (most recent call last):
        ...
        openmed_nb.errors.ConfigurationError: torch has no memory limit for cpu. Choose batches that fit instead.
    """
    with SESSION.told_after():
        name = SESSION.device(device).device
        fraction = check_fraction(name, fraction)
        SESSION.computer.limit_memory(name, fraction)
    recommended = device_of(name).memory().recommended or 0
    return MemoryLimit(name, fraction, recommended, SESSION.computer.low_watermark(name), mps_is_simulated())


def check_fraction(device: str, fraction: Any) -> float:
    known = device_of(device)
    if not known.has_allocator:
        raise ConfigurationError(f"torch has no memory limit for {device}.", "Choose batches that fit instead.")
    return number(f"The fraction of {device}", fraction, known.max_fraction, above=None if known.takes_no_limit else 0)


@dataclass(frozen=True)
class Freed:
    """What one cause has given back.

    Attributes:
        cause: What was let go.
        tensors: Bytes of tensors that are gone; negative where others came in between.
        reserved: Bytes that the device no longer holds for the process.
        resident: Bytes that the process no longer uses; the C library may keep them for a while.
    """

    cause: str
    tensors: int
    reserved: int
    resident: int


@dataclass(frozen=True, repr=False)
class Release(Shown):
    """What was let go, cause by cause, and how much came back.

    Attributes:
        device: The device whose cache was emptied.
        freed: One entry for each cause, in the order in which they were let go.
        notes: What to know, such as that ``%debug`` has no frames now.
        simulated: Whether the device is the simulated MPS.
    """

    device: str
    freed: tuple[Freed, ...]
    notes: tuple[str, ...] = ()
    simulated: bool = False

    @property
    def tensors(self) -> int:
        """Bytes of tensors that are gone."""
        return sum(one.tensors for one in self.freed)

    @property
    def reserved(self) -> int:
        """Bytes that the device no longer holds for the process."""
        return sum(one.reserved for one in self.freed)

    def report(self) -> Report:
        """Return the causes that gave tensors back, and folded below them everything that was let go."""
        rows = [(one.cause, *map(in_bytes, (one.tensors, one.reserved, one.resident))) for one in self.freed]
        back = [row[:3] for row, one in zip(rows, self.freed, strict=True) if one.tensors or one.reserved]
        reserved = f", {in_bytes(self.reserved)} of the device" if self.reserved else ""
        return Report(
            f"Released {in_bytes(self.tensors)} of tensors{reserved}",
            self.notes,
            tables=(Table("", COLUMNS[:3], tuple(back)),),
            figures=(Table("Everything that was let go", COLUMNS, tuple(rows), folded=True),),
        )


def release(
    *names: str,
    namespace: MutableMapping[str, Any] | None = None,
    models: bool = True,
    history: bool = True,
    traceback: bool = True,
    progress: bool = True,
) -> Release:
    """Hand back the memory that variables, the notebook's history, the last error and the loaded models keep.

    Args:
        names: Variables to delete.
        namespace: Where they are; ``None`` is the notebook's, or that of ``__main__``.
        models: Whether to forget the models that were loaded; a pipeline that a variable still holds stays.
        history: Whether to clear ``Out`` and ``_``, which hold what cells have shown.
        traceback: Whether to let go of the frames of the last error; ``%debug`` and ``%tb`` have none then.
        progress: Whether to show what is under way, where it takes longer than half a second.

    Returns:
        What came back, cause by cause.

    Raises:
        ConfigurationError: For a name that is not a variable, and for other arguments that cannot be used; nothing was
            released then.

    Example:
        >>> variables = {"losses": [1.5, 1.2]}
        >>> report = release("losses", namespace=variables, models=False)
        >>> variables, report.freed[1].cause
        ({}, 'variables')
    """
    for flag, value in {"models": models, "history": history, "traceback": traceback}.items():
        check_flag(flag, value)
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    variables = namespace
    if variables is None:
        variables = vars(sys.modules["__main__"]) if shell is None else shell.user_ns
    if not isinstance(variables, MutableMapping):
        raise ConfigurationError(
            f"The namespace must be a mapping, got {short_type_name(variables)}.", "Pass globals(), or nothing."
        )
    _check_names(names, variables, () if shell is None else shell.user_ns_hidden)
    causes: dict[str, Callable[[], Any]] = {"unused blocks of the device": lambda: True}
    if names:
        causes["variables"] = lambda: [operator.delitem(variables, name) for name in dict.fromkeys(names)]
    if history and shell is not None and shell.displayhook.do_full_cache:
        causes["history of outputs"] = lambda: _flush(shell)
    last = getattr(sys, "last_value", None)
    if traceback:
        shown = getattr(getattr(shell, "InteractiveTB", None), "tb", None)
        causes["frames of the last error"] = lambda: drop_frames(shown)
    causes["batches of guards"] = lambda: list(map(Guards.forget, tuple(WATCHED.values())))
    if models:
        causes["loaded models"] = _unload
    with SESSION.told_after(progress):
        SESSION.tell(Activity(RELEASING, "memory"))
        try:
            device, notes = SESSION.device().device, []
        except DeviceError as error:  # Memory is released all the same.
            device, notes = "cpu", [f"No device's cache was emptied: {error}"]
        if traceback and last is not None:
            short = OutOfMemory.parse(last)
            notes += ["%debug and %tb have no frames of the last error now."]
            notes += [f"The last error was {short}."] if short else []
        return Release(device, tuple(_freed(device, causes)), tuple(notes), mps_is_simulated())


def _freed(device: str, causes: dict[str, Callable[[], Any]]) -> list[Freed]:
    """Let go of what each cause holds, and empty the cache before and after each, so that what came back is its own.

    A collection stops everything else for some tenths of a second where torch is loaded. So there is one at the beginning, for
    the garbage that is no cause's own, and then one after each cause that has let go of something, and says so, because it has
    not collected by itself.
    """
    freed, held = [], _held(device)
    for cause, let_go in SESSION.steps(RELEASING, "memory", causes.items(), "cause"):
        if let_go():
            gc.collect()
        device_of(device).empty_cache()
        before, held = held, _held(device)
        freed.append(Freed(cause, *(one - other for one, other in zip(before, held, strict=True))))
    return freed


def _held(device: str) -> tuple[int, int, int]:
    """Return the bytes that are held now by tensors, by the device for the process, and by the process."""
    memory = device_of(device).memory() if torch_is_loaded() else AllocatorMemory(0, 0)
    tensors = living_bytes() if memory.allocated is None else memory.allocated
    return tensors, memory.reserved or 0, resident_bytes()


def _check_names(names: tuple[Any, ...], namespace: MutableMapping[str, Any], needed: Container[str]) -> None:
    """Refuse names that are not variables, and those that the notebook itself needs."""
    unknown = [name for name in names if not isinstance(name, str) or name not in namespace]
    if unknown:
        shown = describe_names(name if isinstance(name, str) else short_type_name(name) for name in unknown)
        # No other name is offered: the line that is repeated with it deletes what it names.
        remedy = "Name variables that are there; %whos lists them in a notebook."
        raise ConfigurationError(f"No variable is called {shown}, and nothing was released.", remedy)
    own = [name for name in names if name in needed or (name.startswith("__") and name.endswith("__"))]
    if own:
        raise ConfigurationError(f"The notebook itself needs {', '.join(own)}.", "Pass names of your own variables.")


def _flush(shell: Any) -> None:
    """Clear Out, _ and the rest, also what IPython's own flush leaves: hidden _, __ and ___, and the last result."""
    if getattr(shell, "last_execution_result", None) is not None:
        shell.last_execution_result.result = None
    hidden = shell.user_ns_hidden
    # What the flush makes of the visible ones.
    hidden.update({name: "" for name in ("_", "__", "___") if name in hidden})
    shell.displayhook.flush()  # It collects by itself, so this comes last.


def _unload() -> None:
    SESSION.unload()  # It collects by itself where there was a model.


def drop_frames(shown: TracebackType | None = None) -> bool:
    """Let go of the frames that the last error holds, with all their variables, and those that IPython showed last.

    Return whether there was an error.
    """
    # Deleting sys.last_value would not free them: IPython's last result and its traceback machinery refer to the error
    # too (ipython#11572, pytorch#27600). IPython shows no frames of errors of this package, but keeps those before.
    errors = [getattr(sys, "last_value", None), getattr(sys, "last_exc", None)]
    held = (getattr(error, "__traceback__", None) for error in errors)
    tracebacks = [one for one in (getattr(sys, "last_traceback", None), shown, *held) if one is not None]
    for traceback in tracebacks:
        traceback.tb_next = None
    for error in errors:  # The errors that led to it hold frames too.
        seen: set[int] = set()
        waiting = [error]
        while waiting:
            one = waiting.pop()
            if one is None or id(one) in seen:
                continue
            seen.add(id(one))
            grouped = getattr(one, "exceptions", ())  # of a group of errors, which Python 3.10 has not
            waiting += [one.__cause__, one.__context__, *(grouped if isinstance(grouped, tuple) else ())]
            if one is not error:
                one.__traceback__ = None
    return any(one is not None for one in (*tracebacks, *errors))
