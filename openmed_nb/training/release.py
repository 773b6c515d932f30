"""Release of models, variables and caches, and memory limits."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, MutableMapping
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

from .._events.activity import RELEASING, ProgressEvent
from .._render.display import Displayable, Report, Table, format_bytes
from .._utils.text import describe_value
from .._utils.validation import check_choice, check_number
from ..devices.backend import is_torch_imported
from ..devices.device import MemoryStats
from ..devices.machine import format_device
from ..devices.registry import get_device
from ..errors import ConfigurationError, DeviceError
from ..session import SESSION
from .curve import read_device_memory

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from .loader import DeviceArgument

# Sources of memory that a release can keep.
KEEPABLE = ("models", "history", "traceback")


@dataclass(frozen=True, repr=False)
class MemoryLimit(Displayable):
    """Active memory limit: torch raises an out-of-memory error before the process exceeds it.

    Attributes:
        device: Device.
        fraction: Fraction of the recommended memory (MPS) or total memory (CUDA). On MPS, 0 means no limit.
        recommended: Recommended or total memory in bytes.
    """

    device: str
    fraction: float
    recommended: int

    JSON_PROPERTIES = ("size",)

    @property
    def size(self) -> int | None:
        """Limit in bytes, or ``None`` if there is no limit."""
        return int(self.fraction * self.recommended) if self.fraction else None

    def to_report(self) -> Report:
        """Return the limit in bytes."""
        limit = "none: macOS may swap and then stop the process" if self.size is None else format_bytes(self.size)
        sentence = f"It is {self.fraction:g} of {format_bytes(self.recommended)}."
        if self.size is None:
            sentence = f"{self.device} recommends {format_bytes(self.recommended)}."
        return Report(f"Memory limit on {self.device}: {limit}", (sentence,))


def limit_memory(fraction: float, device: DeviceArgument = None) -> MemoryLimit:
    """Limit the memory that torch may allocate, to a fraction of the recommended (MPS) or total memory (CUDA).

    Args:
        fraction: Fraction in [0, 2] on MPS, where it becomes the high watermark and 0 means no limit; fraction in (0,
            1] on CUDA.
        device: Device, as in :class:`~openmed_nb.training.EpochHooks`.

    Returns:
        The limit in bytes.

    Raises:
        DeviceError: If the device cannot be used.
        ConfigurationError: If the device is the CPU or the fraction is out of range. The previous limit stays active.

    Example:
        >>> limit_memory(0.9, "cpu")
        Traceback (most recent call last):
        ...
        openmed_nb.errors.ConfigurationError: torch has no memory limit for cpu. Choose batches that fit instead.
    """
    with SESSION.operation():
        name = SESSION.device(device).device
        fraction = validate_fraction(name, fraction)
        SESSION.device_manager.limit_memory(name, fraction)
    return MemoryLimit(format_device(name), fraction, get_device(name).memory_stats().recommended or 0)


def validate_fraction(device: str, fraction: object) -> float:
    backend = get_device(device)
    if not backend.has_allocator:
        raise ConfigurationError(f"torch has no memory limit for {device}.", "Choose batches that fit instead.")
    return check_number(
        f"The fraction of {device}", fraction, backend.max_fraction, above=None if backend.accepts_zero_limit else 0
    )


@dataclass(frozen=True)
class FreedMemory:
    """Memory released from one source.

    Attributes:
        source: Released source.
        tensors: Bytes of released tensors; negative if new tensors were created in the meantime.
        reserved: Bytes that the device no longer reserves for the process.
    """

    source: str
    tensors: int
    reserved: int


@dataclass(frozen=True, repr=False)
class ReleaseReport(Displayable):
    """Released memory by source.

    Attributes:
        device: Device whose cache was emptied.
        freed: Memory of each source, in order of release.
        notes: Side effects, such as that ``%debug`` has no frames anymore.
    """

    device: str
    freed: tuple[FreedMemory, ...]
    notes: tuple[str, ...] = ()

    @property
    def tensors(self) -> int:
        """Bytes of released tensors."""
        return sum(freed.tensors for freed in self.freed)

    def to_report(self) -> Report:
        """Return a table of the sources that released memory."""
        rows = tuple(
            (freed.source, format_bytes(freed.tensors), format_bytes(freed.reserved))
            for freed in self.freed
            if freed.tensors or freed.reserved
        )
        title = f"Released {format_bytes(self.tensors)} of tensors"
        return Report(title, self.notes, metrics=(Table("Released memory", ("released", "tensors", "device"), rows),))


def release(*names: str, keep: Iterable[str] = ()) -> ReleaseReport:
    """Release the memory of variables, the notebook's output history, the last error and the loaded models.

    Args:
        names: Variables to delete, of the notebook or of ``__main__``.
        keep: Sources to keep: ``"models"``, ``"history"`` (``Out`` and ``_``, which store the outputs of cells) and
            ``"traceback"`` (the frames of the last error, which ``%debug`` and ``%tb`` need). Pipelines that are
            referenced by a variable always stay in memory.

    Returns:
        The released memory by source.

    Raises:
        ConfigurationError: If a name is not a variable, or if another argument is not valid. Nothing is released.

    Example:
        >>> report = release(keep=["models", "traceback"])
        >>> report.freed[0].source
        'unused blocks of the device'
    """
    kept = (keep,) if isinstance(keep, str) or not isinstance(keep, Iterable) else tuple(keep)
    for source in kept:
        check_choice("keep", source, KEEPABLE)
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    variables = _validate_variables(names, shell)
    last_error = getattr(sys, "last_value", None)
    # Function that releases each source. It includes a garbage collection if one is needed.
    sources: dict[str, Callable[[], object]] = {"unused blocks of the device": gc.collect}
    if names:
        sources["variables"] = partial(_delete_variables, names, variables)
    if "history" not in kept and shell is not None and shell.displayhook.do_full_cache:
        sources["history of outputs"] = partial(_clear_history, shell)
    if "traceback" not in kept:
        displayed = getattr(getattr(shell, "InteractiveTB", None), "tb", None)
        sources["frames of the last error"] = partial(_clear_tracebacks, displayed)
    sources["interrupted run"] = _forget_interrupted_run
    if "models" not in kept:
        sources["loaded models"] = SESSION.unload
    with SESSION.operation():
        SESSION.notify(ProgressEvent(RELEASING, "memory"))
        notes = []
        try:
            device = SESSION.device().device
        except DeviceError as error:  # Memory is released anyway.
            device = "cpu"
            notes.append(f"No device cache was emptied: {error}")
        if "traceback" not in kept and last_error is not None:
            notes.append("%debug and %tb can no longer show the last error.")
        if SESSION.interrupted_run is not None:
            notes.append("resume=True can no longer continue the interrupted run.")
        # Each source is released and measured alone. A garbage collection stops all threads for some tenths of a second if
        # torch is imported. So there is one at the start, and one after each source that needs it.
        freed = []
        before = _memory_in_use(device)
        for source, release_source in SESSION.track(RELEASING, "memory", sources.items(), "source"):
            release_source()
            get_device(device).empty_cache()
            after = _memory_in_use(device)
            freed.append(FreedMemory(source, before[0] - after[0], before[1] - after[1]))
            before = after
        return ReleaseReport(format_device(device), tuple(freed), tuple(notes))


def _memory_in_use(device: str) -> tuple[int, int]:
    """Return the bytes used by tensors, and those reserved by the device for the process."""
    memory = read_device_memory(device) if is_torch_imported() else MemoryStats()
    return memory.allocated or 0, memory.reserved or 0


def _delete_variables(names: Iterable[str], variables: MutableMapping[str, Any]) -> None:
    for name in set(names):
        del variables[name]
    gc.collect()


def _forget_interrupted_run() -> None:
    if SESSION.interrupted_run is not None:
        SESSION.interrupted_run = None
        gc.collect()


def _validate_variables(names: tuple[str, ...], shell: InteractiveShell | None) -> MutableMapping[str, Any]:
    """Return the variables of the user; raise an error for unknown names, and for names that the notebook needs."""
    namespace: MutableMapping[str, Any] = vars(sys.modules["__main__"]) if shell is None else shell.user_ns
    needed = () if shell is None else shell.user_ns_hidden
    for name in names:
        if not isinstance(name, str) or name not in namespace or name in needed or name.startswith("__"):
            # No similar name is suggested, because the suggested line would delete that variable.
            raise ConfigurationError(
                f"{describe_value(name)} is not a variable that can be deleted. Nothing was released.",
                "Pass names of existing variables; %whos lists them in a notebook.",
            )
    return namespace


def _clear_history(shell: InteractiveShell) -> None:
    """Clear the output history, including hidden _, __ and ___ and the last result, which IPython keeps."""
    if getattr(shell, "last_execution_result", None) is not None:
        shell.last_execution_result.result = None
    hidden = shell.user_ns_hidden
    # The flush sets the visible variables to the same value.
    hidden.update({name: "" for name in ("_", "__", "___") if name in hidden})
    shell.displayhook.flush()  # The flush includes a garbage collection, so it comes last.


def _clear_tracebacks(displayed: TracebackType | None) -> None:
    """Release the frames of the last error with all their variables, and those that IPython displayed last."""
    # Deleting sys.last_value would not free them. The last result of IPython and its traceback machinery refer to the
    # error too (ipython#11572, pytorch#27600). For errors of this package, IPython displays no frames, but keeps those
    # of the previous error.
    last_errors = (getattr(sys, "last_value", None), getattr(sys, "last_exc", None))
    errors = [error for error in last_errors if error is not None]
    tracebacks = [getattr(sys, "last_traceback", None), displayed, *(error.__traceback__ for error in errors)]
    for traceback in filter(None, tracebacks):
        traceback.tb_next = None
    seen = set(map(id, errors))
    pending = list(errors)
    while pending:  # The causes of an error reference frames too.
        error = pending.pop()
        for cause in (error.__cause__, error.__context__):
            if cause is not None and id(cause) not in seen:
                seen.add(id(cause))
                pending.append(cause)
                cause.__traceback__ = None
    if errors or any(tracebacks):
        gc.collect()
