"""The Python face of training: epochs, callbacks, memory, release; each asks the session for the device."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any

from ..devices.memory import allocator
from ..devices.simulated import active
from ..errors import ConfigurationError, DeviceError, check_flag, shorten
from ..session import SESSION
from ..training.curve import GROWTH_GATE, MemoryCurve, own_device, this_process
from ..training.epochs import EpochBoundary, Epochs, Hook
from ..training.guards import Guards, forget_batches
from ..training.libraries import accelerator_arguments as arguments_for_accelerator
from ..training.libraries import trainer_arguments as arguments_for_trainer
from ..training.release import (
    MemoryLimit,
    Release,
    check_fraction,
    check_names,
    drop_frames,
    drop_variables,
    said_of_memory,
)
from ..training.release import release as let_go
from .preparation import device_name


class EpochHooks(EpochBoundary):
    """What happens between two epochs, so that memory stays flat: forget, collect, empty the device's cache, look, judge.

    Args:
        device: Where the training runs: a name, a ``torch.device``, an ``Accelerator``; ``None`` is the session's device, in
            one of several processes the GPU of that process.
        every: Also hand memory back and take a sample every so many steps, counted by ``step()``. Each time all of Python's
            objects are looked through, the device is waited for, and its blocks have to be asked for again: two to
            six tenths of a second where transformers is loaded (``benchmarks/training.py`` prints it).
        before: Functions that run at the end of an epoch, before memory is handed back; each gets the
            :class:`MemoryCurve` so far.
        after: Functions that run at the end of an epoch, with the new sample in the curve.
        guards: :class:`Guards` of the same training; the batch that they keep is dropped at each boundary.
        live: Whether to show the curve in the notebook while it grows; of several processes, the first shows its own.
        gate: The growth over ten epochs that is suspect, as a share.

    Raises:
        DeviceError: Where the device cannot be used, and for one of several processes on MPS.
        ConfigurationError: For an argument that cannot be used.

    Example:
        >>> with EpochHooks("cpu") as hooks:
        ...     for epoch in range(2):
        ...         sample = hooks.boundary()
        >>> sample.epoch, hooks.verdict
        (2, 'too short to tell')
    """

    def __init__(  # noqa: PLR0913 - each is one thing that a person may want to say
        self,
        device: Any = None,
        *,
        every: int | None = None,
        before: Iterable[Hook] = (),
        after: Iterable[Hook] = (),
        guards: Guards | None = None,
        live: bool = False,
        gate: float = GROWTH_GATE,
    ) -> None:
        guards = None if guards is None else _all_or(guards)
        process = this_process()
        name = own_device(device_name(device), process) if device is None else device_name(device)
        super().__init__(
            name,
            every=every,
            before=before,
            after=after,
            forget=[guards.forget] if guards else (),
            gate=gate,
            limit=SESSION.computer.limit(name),
        )
        self.after += [*([_live_curve()] if live and process.leads else []), SESSION.keep_curve]


def epochs(epochs: int | Iterable[Any], device: Any = None, **options: Any) -> Epochs:
    """Loop over epochs, and hand memory back, look at it and judge it after each.

    Args:
        epochs: How many, or an iterable.
        device: As for :class:`EpochHooks`.
        options: Those of :class:`EpochHooks`.

    Returns:
        A loop over 0, 1, 2 ..., or over the iterable, with ``curve`` and ``hooks``.

    Example:
        >>> loop = epochs(2, "cpu")
        >>> [epoch for epoch in loop], len(loop.curve.boundaries)
        ([0, 1], 2)
    """
    return EpochHooks(device, **options).epochs(epochs)


def memory_curve() -> MemoryCurve | None:
    """Return the curve to which the last sample went, ``None`` before the first."""
    curve: MemoryCurve | None = SESSION.curve
    return curve


def trainer_callback(device: Any = None, *, guards: Guards | None = None, **options: Any) -> Any:
    """Return a callback for ``transformers.Trainer`` with the epoch boundary and the guards.

    Args:
        device: As for :class:`EpochHooks`; a warning tells where Trainer uses another one.
        guards: ``None`` is ``Guards()``: all guards.
        options: Those of :class:`EpochHooks`.

    Returns:
        A ``TrainerCallback`` with ``curve``, ``hooks`` and ``guards``.
    """
    from ..training.trainer import OpenMedCallback

    guards = _all_or(guards)
    return OpenMedCallback(EpochHooks(device, guards=guards, **options), guards, SESSION.computer.machine)


def lightning_callback(device: Any = None, *, guards: Guards | None = None, **options: Any) -> Any:
    """Return a callback for Lightning's ``Trainer`` with the epoch boundary and the guards.

    Args:
        device: As for :class:`EpochHooks`; a warning tells where Lightning uses another one.
        guards: ``None`` is ``Guards()``: all guards.
        options: Those of :class:`EpochHooks`.

    Returns:
        A Lightning ``Callback`` with ``curve``, ``hooks`` and ``guards``.

    Raises:
        ConfigurationError: Where Lightning is not installed.
    """
    from ..training.lightning import LightningCallback

    guards = _all_or(guards)
    return LightningCallback(EpochHooks(device, guards=guards, **options), guards, SESSION.computer.machine)


def trainer_arguments(device: Any = None) -> dict[str, Any]:
    """Return what makes ``transformers.TrainingArguments`` use the device of the session, or the one named.

    Example:
        >>> trainer_arguments("cpu")
        {'use_cpu': True, 'dataloader_pin_memory': False}
    """
    return arguments_for_trainer(device_name(device))


def accelerator_arguments(device: Any = None) -> dict[str, Any]:
    """Return what makes ``accelerate.Accelerator`` use the device of the session, or the one named.

    Example:
        >>> accelerator_arguments("cpu")
        {'cpu': True}
    """
    return arguments_for_accelerator(device_name(device))


def limit_memory(fraction: float, device: Any = None) -> MemoryLimit:
    """Let torch refuse to hold more memory than a share of what the device recommends (MPS) or has (CUDA).

    Args:
        fraction: Up to 2 on MPS, where it becomes the high watermark and 0 is no limit; up to 1 on CUDA.
        device: As for :class:`EpochHooks`.

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
        name = device_name(device)
        fraction = check_fraction(name, fraction)
        SESSION.computer.limit_memory(name, fraction)
    recommended = allocator(name).memory().recommended or 0
    return MemoryLimit(name, fraction, recommended, SESSION.computer.low_watermark(name), active())


def release(
    *names: str,
    namespace: MutableMapping[str, Any] | None = None,
    models: bool = True,
    history: bool = True,
    traceback: bool = True,
) -> Release:
    """Hand back the memory that variables, the notebook's history, the last error and the loaded models keep.

    Args:
        names: Variables to delete.
        namespace: Where they are; ``None`` is the notebook's, or that of ``__main__``.
        models: Whether to forget the models that were loaded; a pipeline that a variable still holds stays.
        history: Whether to clear ``Out`` and ``_``, which hold what cells have shown.
        traceback: Whether to let go of the frames of the last error; ``%debug`` and ``%tb`` have none then.

    Returns:
        What came back, cause by cause.

    Raises:
        ConfigurationError: For a name that is no variable, and for other arguments that cannot be used; nothing was released
            then.

    Example:
        >>> variables = {"losses": [1.5, 1.2]}
        >>> report = release("losses", namespace=variables, models=False)
        >>> variables, report.freed[1].cause
        ({}, 'variables')
    """
    for flag, value in {"models": models, "history": history, "traceback": traceback}.items():
        check_flag(flag, value)
    shell = _shell()
    variables = _variables(shell) if namespace is None else namespace
    if not isinstance(variables, MutableMapping):
        raise ConfigurationError(f"{type(variables).__name__} is no namespace.", "Pass globals(), or nothing.")
    check_names(names, variables, () if shell is None else shell.user_ns_hidden)
    causes: dict[str, Callable[[], Any]] = {}
    if names:
        causes["variables"] = lambda: drop_variables(names, variables)
    if history and shell is not None and shell.displayhook.do_full_cache:
        causes["history of outputs"] = lambda: _flush(shell)
    if traceback:
        causes["frames of the last error"] = lambda: drop_frames(
            getattr(getattr(shell, "InteractiveTB", None), "tb", None)
        )
    causes["batches of guards"] = forget_batches
    if models:
        causes["loaded models"] = SESSION.unload
    last = getattr(sys, "last_value", None)
    with SESSION.told_after():
        device, notes = _device_to_release()
        if traceback and last is not None:
            notes = (*notes, "%debug and %tb have no frames of the last error now.", *said_of_memory(last))
        return let_go(device, causes, notes)


def _device_to_release() -> tuple[str, tuple[str, ...]]:
    """Return the device whose cache is emptied; where none can be used, memory is released all the same."""
    try:
        return SESSION.device().device, ()
    except DeviceError as error:
        return "cpu", (f"No device's cache was emptied: {error}",)


def _all_or(guards: Guards | None) -> Guards:
    """Return the guards, all of them where none are given."""
    if guards is not None and not isinstance(guards, Guards):
        raise ConfigurationError(
            f"{shorten(repr(guards))} are no guards.",
            "Pass nb.Guards(off=[...]) with the names of those to switch off.",
        )
    return guards or Guards()


def _live_curve() -> Hook:
    from IPython.display import display

    from .widgets import LiveCurve

    live = LiveCurve()
    display(live)
    return live


def _shell() -> Any:
    """Return the running IPython, ``None`` where there is none."""
    return sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None


def _flush(shell: Any) -> None:
    """Clear Out, _ and the rest; IPython's own flush leaves _, __ and ___ among its hidden variables, and the last result."""
    shell.displayhook.flush()
    if getattr(shell, "last_execution_result", None) is not None:
        shell.last_execution_result.result = None
    hidden = shell.user_ns_hidden
    hidden.update(
        {name: shell.user_ns[name] for name in ("_", "__", "___") if name in hidden and name in shell.user_ns}
    )


def _variables(shell: Any) -> MutableMapping[str, Any]:
    return vars(sys.modules["__main__"]) if shell is None else shell.user_ns
