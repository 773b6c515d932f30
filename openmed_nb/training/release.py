"""Let go of models, variables and caches; limit the memory."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, MutableMapping
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

from .._events.activity import RELEASING, ProgressEvent
from .._render.display import Displayable, Report, Table, format_bytes
from .._utils.text import describe_names, short_type_name
from .._utils.validation import check_bool, check_number
from ..devices.backend import is_torch_imported
from ..devices.device import MemoryStats
from ..devices.machine import is_mps_simulated
from ..devices.memory import OutOfMemoryDetails
from ..devices.registry import parse_device_argument
from ..errors import ConfigurationError, DeviceError
from ..session import SESSION
from .curve import held_memory, resident_bytes
from .guards import WATCHED_MODELS

COLUMNS = ("let go", "tensors", "device", "process")


@dataclass(frozen=True, repr=False)
class MemoryLimit(Displayable):
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

    JSON_PROPERTIES = ("size",)

    @property
    def size(self) -> int | None:
        """The limit in bytes, ``None`` where there is none."""
        return int(self.fraction * self.recommended) if self.fraction else None

    def to_report(self) -> Report:
        """Return the limit in bytes and what it does to the watermarks."""
        low = self.low_watermark
        sentences = [f"{self.fraction:g} of {format_bytes(self.recommended)}."]
        if low is not None:
            # What torch does below and at the limit (MPSAllocator.mm; the low ratio cannot be set live).
            does = f"; from the low one ({low:g}) on, unused blocks are collected."
            if not low:
                does = "; the low one is 0, so unused blocks are collected only when memory is short."
            elif self.fraction and low > self.fraction:
                does = f", below the low one ({low:g}), so unused blocks are collected only when the limit is reached."
            sentences.append(f"The high watermark is {self.fraction:g} now{does}")
        if self.size is not None:
            return Report(f"Memory limit on {self.device}: {format_bytes(self.size)}", tuple(sentences))
        none = "macOS may swap and then stop the process"
        recommended = f"{self.device} recommends {format_bytes(self.recommended)}."
        return Report(
            f"Memory limit on {self.device}: no limit: {none}",
            tuple(sentences),
            html_sentences=(f"No memory limit on {self.device}: {none}", recommended, *sentences[1:]),
        )


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
    with SESSION.operation():
        name = SESSION.device(device).device
        fraction = check_fraction(name, fraction)
        SESSION.device_manager.limit_memory(name, fraction)
    recommended = parse_device_argument(name).memory().recommended or 0
    return MemoryLimit(name, fraction, recommended, SESSION.device_manager.low_watermark(name), is_mps_simulated())


def check_fraction(device: str, fraction: Any) -> float:
    known = parse_device_argument(device)
    if not known.has_allocator:
        raise ConfigurationError(f"torch has no memory limit for {device}.", "Choose batches that fit instead.")
    return check_number(
        f"The fraction of {device}", fraction, known.max_fraction, above=None if known.takes_no_limit else 0
    )


@dataclass(frozen=True)
class FreedMemory:
    """What one cause has given back.

    Attributes:
        cause: What was let go.
        tensors: Bytes of tensors that are gone; negative where others came in between.
        reserved: Bytes that the device no longer holds for the process.
        resident: Bytes that the process no longer uses; the C library may keep them for a while.
    """

    source: str
    tensors: int
    reserved: int
    resident: int


@dataclass(frozen=True, repr=False)
class ReleaseReport(Displayable):
    """What was let go, cause by cause, and how much came back.

    Attributes:
        device: The device whose cache was emptied.
        freed: One entry for each cause, in the order in which they were let go.
        notes: What to know, such as that ``%debug`` has no frames now.
        simulated: Whether the device is the simulated MPS.
    """

    device: str
    freed: tuple[FreedMemory, ...]
    notes: tuple[str, ...] = ()
    simulated: bool = False

    @property
    def tensors(self) -> int:
        """Bytes of tensors that are gone."""
        return sum(freed.tensors for freed in self.freed)

    @property
    def reserved(self) -> int:
        """Bytes that the device no longer holds for the process."""
        return sum(freed.reserved for freed in self.freed)

    def to_report(self) -> Report:
        """Return the causes that gave tensors back, and folded below them everything that was let go."""
        rows = tuple(
            (freed.source, format_bytes(freed.tensors), format_bytes(freed.reserved), format_bytes(freed.resident))
            for freed in self.freed
        )
        back = tuple(row[:3] for row, freed in zip(rows, self.freed, strict=True) if freed.tensors or freed.reserved)
        reserved = f", {format_bytes(self.reserved)} of the device" if self.reserved else ""
        return Report(
            f"Released {format_bytes(self.tensors)} of tensors{reserved}",
            self.notes,
            tables=(Table("", COLUMNS[:3], back),),
            metrics=(Table("Everything that was let go", COLUMNS, rows, collapsed=True),),
        )


def release(
    *names: str,
    namespace: MutableMapping[str, Any] | None = None,
    models: bool = True,
    history: bool = True,
    traceback: bool = True,
    progress: bool = True,
) -> ReleaseReport:
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
        >>> variables, report.freed[1].source
        ({}, 'variables')
    """
    for flag, value in {"models": models, "history": history, "traceback": traceback}.items():
        check_bool(flag, value)
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    variables = _checked_variables(names, namespace, shell)
    last = getattr(sys, "last_value", None)
    # What lets go of each cause; it returns whether there was something that has not been collected yet.
    causes: dict[str, Callable[[], bool]] = {"unused blocks of the device": _collect_first}
    if names:
        causes["variables"] = partial(_delete_variables, names, variables)
    if history and shell is not None and shell.displayhook.do_full_cache:
        causes["history of outputs"] = partial(_clear_history, shell)
    if traceback:
        causes["frames of the last error"] = partial(
            clear_tracebacks, getattr(getattr(shell, "InteractiveTB", None), "tb", None)
        )
    causes["batches of guards"] = _forget_batches
    if models:
        causes["loaded models"] = _unload_models
    with SESSION.operation(progress):
        SESSION.notify(ProgressEvent(RELEASING, "memory"))
        notes = []
        try:
            device = SESSION.device().device
        except DeviceError as error:  # Memory is released all the same.
            device = "cpu"
            notes.append(f"No device's cache was emptied: {error}")
        if traceback and last is not None:
            notes.append("%debug and %tb have no frames of the last error now.")
            if short := OutOfMemoryDetails.parse(last):
                notes.append(f"The last error was {short}.")
        return ReleaseReport(device, tuple(_release_and_measure(device, causes)), tuple(notes), is_mps_simulated())


def _release_and_measure(device: str, causes: dict[str, Callable[[], bool]]) -> list[FreedMemory]:
    """Let go of what each cause holds, and empty the cache before and after each, so that what came back is its own.

    A collection stops everything else for some tenths of a second where torch is loaded. So there is one at the beginning, for
    the garbage that is no cause's own, and then one after each cause that has let go of something, and says so, because it has
    not collected by itself.
    """
    freed = []
    before = _memory_in_use(device)
    for cause, let_go in SESSION.track(RELEASING, "memory", causes.items(), "cause"):
        if let_go():
            gc.collect()
        parse_device_argument(device).empty_cache()
        after = _memory_in_use(device)
        freed.append(FreedMemory(cause, *(former - left for former, left in zip(before, after, strict=True))))
        before = after
    return freed


def _memory_in_use(device: str) -> tuple[int, int, int]:
    """Return the bytes that are held now by tensors, by the device for the process, and by the process."""
    memory = held_memory(device) if is_torch_imported() else MemoryStats()
    return memory.allocated or 0, memory.reserved or 0, resident_bytes()


def _collect_first() -> bool:
    return True


def _delete_variables(names: Iterable[str], variables: MutableMapping[str, Any]) -> bool:
    for name in set(names):
        del variables[name]
    return True


def _forget_batches() -> bool:
    guards = tuple(WATCHED_MODELS.values())
    for watching in guards:
        watching.clear()
    return bool(guards)


def _unload_models() -> bool:
    """Forget the loaded models, which collects by itself."""
    SESSION.unload()
    return False


def _checked_variables(names: tuple[Any, ...], namespace: Any, shell: Any) -> MutableMapping[str, Any]:
    """Return the variables; refuse names that are none of them, and those that the notebook itself needs."""
    variables = namespace
    if namespace is None:
        variables = vars(sys.modules["__main__"]) if shell is None else shell.user_ns
    if not isinstance(variables, MutableMapping):
        raise ConfigurationError(
            f"The namespace must be a mapping, got {short_type_name(variables)}.", "Pass globals(), or nothing."
        )
    unknown = [name for name in names if not isinstance(name, str) or name not in variables]
    if unknown:
        shown = describe_names(name if isinstance(name, str) else short_type_name(name) for name in unknown)
        # No other name is offered: the line that is repeated with it deletes what it names.
        remedy = "Name variables that are there; %whos lists them in a notebook."
        raise ConfigurationError(f"No variable is called {shown}, and nothing was released.", remedy)
    needed = () if shell is None else shell.user_ns_hidden
    own = [name for name in names if name in needed or (name.startswith("__") and name.endswith("__"))]
    if own:
        raise ConfigurationError(f"The notebook itself needs {', '.join(own)}.", "Pass names of your own variables.")
    return variables


def _clear_history(shell: Any) -> bool:
    """Clear Out, _ and the rest, also what IPython's own flush leaves: hidden _, __ and ___, and the last result."""
    if getattr(shell, "last_execution_result", None) is not None:
        shell.last_execution_result.result = None
    hidden = shell.user_ns_hidden
    # What the flush makes of the visible ones.
    hidden.update({name: "" for name in ("_", "__", "___") if name in hidden})
    shell.displayhook.flush()  # It collects by itself, so this comes last.
    return False


def clear_tracebacks(shown: TracebackType | None = None) -> bool:
    """Let go of the frames that the last error holds, with all their variables, and those that IPython showed last.

    Return whether there was an error.
    """
    # Deleting sys.last_value would not free them: IPython's last result and its traceback machinery refer to the error
    # too (ipython#11572, pytorch#27600). IPython shows no frames of errors of this package, but keeps those before.
    errors = [
        error for error in (getattr(sys, "last_value", None), getattr(sys, "last_exc", None)) if error is not None
    ]
    tracebacks = [
        getattr(sys, "last_traceback", None),
        shown,
        *(getattr(error, "__traceback__", None) for error in errors),
    ]
    for traceback in filter(None, tracebacks):
        traceback.tb_next = None
    seen = set(map(id, errors))
    waiting = list(errors)
    while waiting:  # The errors that led to an error hold frames too.
        error = waiting.pop()
        grouped = getattr(error, "exceptions", ())  # of a group of errors, which Python 3.10 has not
        for cause in (error.__cause__, error.__context__, *(grouped if isinstance(grouped, tuple) else ())):
            if cause is not None and id(cause) not in seen:
                seen.add(id(cause))
                waiting.append(cause)
                cause.__traceback__ = None
    return bool(errors) or any(tracebacks)
