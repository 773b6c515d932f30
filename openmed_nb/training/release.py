"""Let go of models, variables and caches; limit the memory."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Container, MutableMapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from ..devices.backend import torch_is_loaded
from ..devices.memory import AllocatorMemory, OutOfMemory, allocator
from ..devices.request import kind_of
from ..devices.simulated import active
from ..display import NOTE, Report, Shown, Table, in_bytes
from ..errors import ConfigurationError, number, shorten
from .curve import living_bytes, resident_bytes

LARGEST = {"mps": 2.0, "cuda": 1.0}
"""The largest fraction that torch takes (``torch/mps/__init__.py:105``, ``torch/cuda/memory.py``)."""


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

    @property
    def size(self) -> int | None:
        """The limit in bytes, ``None`` where there is none."""
        return int(self.fraction * self.recommended) if self.fraction else None

    def to_dict(self) -> dict[str, Any]:
        """Return the limit as plain numbers and strings."""
        return {**vars(self), "size": self.size}

    def report(self) -> Report:
        """Return the limit in bytes and what it does to the watermarks."""
        most = "no limit: macOS may swap and then stop the process" if self.size is None else in_bytes(self.size)
        sentences = [f"{self.fraction:g} of {in_bytes(self.recommended)}."]
        if self.low_watermark is not None:
            sentences.append(self._watermarks(self.low_watermark))
        sentences += [NOTE] if self.simulated else []
        return Report(f"Memory limit on {self.device}: {most}", tuple(sentences))

    def _watermarks(self, low: float) -> str:
        """Say what torch does below and at the limit (``MPSAllocator.mm``; the low ratio cannot be set live)."""
        high = f"The high watermark is {self.fraction:g} now"
        if not low:
            return f"{high}; the low one is 0, so unused blocks are collected only when memory is short."
        if self.fraction and low > self.fraction:
            return (
                f"{high}, below the low one ({low:g}), so unused blocks are collected only when the limit is reached."
            )
        return f"{high}; from the low one ({low:g}) on, unused blocks are collected."


def check_fraction(device: str, fraction: Any) -> float:
    """Return a fraction that torch takes for a device.

    Raises:
        ConfigurationError: For a device without a limit, or a fraction that is out of its range.

    Example:
        >>> check_fraction("mps", 1), check_fraction("cuda:0", 0.9)
        (1.0, 0.9)
    """
    kind = kind_of(device)
    if kind not in LARGEST:
        raise ConfigurationError(f"torch has no memory limit for {device}.", "Choose batches that fit instead.")
    return number(f"The fraction of {device}", fraction, LARGEST[kind], above=None if kind == "mps" else 0)


@dataclass(frozen=True)
class Held:
    """What is held at a moment, in bytes: by tensors, by the device for the process, and by the process."""

    tensors: int
    reserved: int
    resident: int


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

    def to_dict(self) -> dict[str, Any]:
        """Return what was freed as plain mappings, lists, numbers and strings."""
        return {**vars(self), "freed": [dict(vars(one)) for one in self.freed], "notes": list(self.notes)}

    def report(self) -> Report:
        """Return the table of causes."""
        rows = tuple((one.cause, *map(in_bytes, (one.tensors, one.reserved, one.resident))) for one in self.freed)
        simulated = (NOTE,) if self.simulated else ()
        table = Table("", ("let go", "tensors", "device", "process"), rows)
        reserved = f", {in_bytes(self.reserved)} of the device" if self.reserved else ""
        return Report(
            f"Released {in_bytes(self.tensors)} of tensors{reserved}", (*self.notes, *simulated), tables=(table,)
        )


def release(device: str, causes: dict[str, Callable[[], Any]], notes: tuple[str, ...] = ()) -> Release:
    """Let go of what each cause holds, one after the other, and measure what came back.

    The cache is emptied before them and after each, so that what a cause gave back to the device counts for it.

    Args:
        device: The device whose cache is emptied.
        causes: What lets go, by the name that is shown.
        notes: What to know afterwards.

    Example:
        >>> import torch
        >>> losses = [torch.zeros(1024) for _ in range(3)]
        >>> release("cpu", {"losses": losses.clear}).freed[1].tensors
        12288
    """
    empty_cache = allocator(device).empty_cache
    held, freed = measure(device), []
    for cause, let_go in {"unused blocks of the device": lambda: None, **causes}.items():
        let_go()
        gc.collect()
        empty_cache()
        before, held = held, measure(device)
        freed.append(_difference(cause, before, held))
    return Release(device, tuple(freed), notes, active())


def measure(device: str) -> Held:
    """Return what is held now."""
    memory = allocator(device).memory() if torch_is_loaded() else AllocatorMemory(0, 0)
    tensors = living_bytes() if memory.allocated is None else memory.allocated
    return Held(tensors, memory.reserved or 0, resident_bytes())


def said_of_memory(error: BaseException) -> tuple[str, ...]:
    """Return a sentence with the figures of an error for lack of memory, none for another error.

    Example:
        >>> said_of_memory(RuntimeError("MPS backend out of memory (MPS allocated: 5.00 GiB). Tried to allocate 1.00 GiB"))
        ('The last error was a lack of memory on mps: 1.0 GiB wanted, 5.0 GiB allocated.',)
    """
    memory = OutOfMemory.parse(error)
    if memory is None:
        return ()
    sizes = {
        "wanted": memory.tried,
        "allocated": memory.allocated,
        "held beside": memory.other,
        "allowed": memory.allowed,
    }
    said = ", ".join(f"{in_bytes(size)} {name}" for name, size in sizes.items() if size is not None)
    return (f"The last error was a lack of memory on {memory.device}{f': {said}' if said else ''}.",)


def check_names(names: tuple[Any, ...], namespace: MutableMapping[str, Any], needed: Container[str] = ()) -> None:
    """Check that every name is a variable that may be deleted.

    Args:
        names: The names.
        namespace: The variables.
        needed: Names that the notebook itself needs.

    Raises:
        ConfigurationError: For names that are none, or needed; nothing was let go then.

    Example:
        >>> check_names(("losses",), {"losses": []})
    """
    unknown = [name for name in names if not isinstance(name, str) or name not in namespace]
    if unknown:
        said = ", ".join(shorten(str(name) if isinstance(name, str) else type(name).__name__) for name in unknown)
        raise ConfigurationError(f"No variable is called {said}.", "Pass the names of variables as strings.")
    own = [name for name in names if name in needed or (name.startswith("__") and name.endswith("__"))]
    if own:
        raise ConfigurationError(f"The notebook itself needs {', '.join(own)}.", "Pass names of your own variables.")


def drop_variables(names: tuple[str, ...], namespace: MutableMapping[str, Any]) -> None:
    """Delete variables."""
    for name in dict.fromkeys(names):
        del namespace[name]


def drop_frames(shown: TracebackType | None = None) -> None:
    """Let go of the frames that the last error holds, with all their variables.

    Cutting the chain of frames frees them at once. Deleting ``sys.last_value`` would not: IPython's last result and its
    traceback machinery refer to the error too (ipython#11572, pytorch#27600).

    Args:
        shown: The traceback that IPython showed last. It is that of an earlier error where the last one, such as those
            of this package, was shown as one line.
    """
    errors = [getattr(sys, "last_value", None), getattr(sys, "last_exc", None)]
    held = (getattr(error, "__traceback__", None) for error in errors)
    for traceback in (getattr(sys, "last_traceback", None), shown, *held):
        if traceback is not None:
            traceback.tb_next = None
    for error in errors:
        _drop_chained(error)


def _drop_chained(error: BaseException | None) -> None:
    """Let go of the frames of the errors that led to an error."""
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


def _difference(cause: str, before: Held, after: Held) -> Freed:
    return Freed(
        cause,
        before.tensors - after.tensors,
        before.reserved - after.reserved,
        before.resident - after.resident,
    )
