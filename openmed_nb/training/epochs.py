"""The epoch boundary: hand memory back, look at it, and judge the curve.

It stands in a loop, a ``with`` block, a decorator, or in a callback of Trainer or of Lightning.
"""

from __future__ import annotations

import functools
import gc
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, ParamSpec, TypeVar

from .._utils.clock import current_time
from .._utils.text import describe_value, shorten
from .._utils.validation import (
    as_integer,
    check_bool,
    check_choice,
    check_number,
    check_optional_integer,
    invalid_value,
)
from .._utils.warning import warn
from ..devices.registry import parse_device_argument
from ..devices.request import normalize_device
from ..errors import ConfigurationError, DeviceUnavailableError
from ..session import SESSION
from .curve import (
    GROWING,
    GROWTH_THRESHOLD,
    MemoryCurve,
    MemorySample,
    ProcessInfo,
    known_epochs,
    require_plotting,
    take_sample,
)
from .guards import Guards, validate_guards
from .holders import HISTORY, TensorReferrer, TensorReferrers, find_tensor_referrers, grown_referrers, named_referrers

# What runs at a boundary: it gets the curve so far.
Hook = Callable[[MemoryCurve], Any]

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


@dataclass(frozen=True)
class HookFailure:
    """A hook that raised: its name, the epoch, and the kind of the error; its text may be clinical."""

    hook: str
    epoch: int
    error: str

    def __str__(self) -> str:
        return f"The hook {self.hook} raised {self.error} after epoch {self.epoch}."


class EpochHooks:
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

    Attributes:
        curve: The samples so far, and the verdict.
        failures: Hooks that raised; the epoch, its sample and the hooks after it went on.

    Raises:
        DeviceError: Where the device cannot be used, and for one of several processes on MPS.
        ConfigurationError: For an argument that cannot be used.

    Example:
        >>> with EpochHooks("cpu") as hooks:
        ...     for epoch in range(2):
        ...         sample = hooks.end_epoch()
        >>> sample.epoch, hooks.verdict
        (2, 'too short to tell')
    """

    def __init__(  # noqa: PLR0913 - each is one thing that a person may want to set
        self,
        device: Any = None,
        *,
        every_n_steps: int | None = None,
        before: Iterable[Hook] = (),
        after: Iterable[Hook] = (),
        guards: Guards | None = None,
        live: bool = False,
        growth_threshold: float = GROWTH_THRESHOLD,
    ) -> None:
        check_bool("live", live)
        self.guards = None if guards is None else validate_guards(guards)
        process = current_process()
        name = SESSION.device(device).device
        if device is None:
            name = process_device(name, process)
        self.every = check_optional_integer("every_n_steps", every_n_steps)
        self.before = _validate_hooks(before)
        self.after = _validate_hooks(after)
        self.gate = check_number("growth_threshold", growth_threshold, example="0.26, which is 26 %")
        self.limit = SESSION.device_manager.memory_fraction(name)
        self.begin(name)
        if live and process.is_main_process:
            from IPython.display import display

            curve = require_plotting(".live").LiveMemoryCurve()
            display(curve)
            self.after.append(curve)

    def begin(self, device: str, epoch: int = 0, step: int = 0, total_epochs: int | None = None) -> None:
        """Begin a new training, and a new curve with it.

        Args:
            device: Where it runs.
            epoch: How many epochs were done before, where a training goes on from a checkpoint.
            step: How many steps were done before.
            planned: How many epochs the training has in all, for the axis of the curve; ``None`` if nobody knows, and so
                are numbers that stand for a training without an end.

        Raises:
            DeviceUnavailableError: For one of several processes on MPS.
        """
        process = current_process()
        if process.world_size > 1 and not parse_device_argument(device).joins_processes:
            what = f"MPS cannot train in {process.world_size} processes: gloo and nccl, over which they would talk, do not work with it"
            raise DeviceUnavailableError(f"{what} (pytorch#160732).", "Start one process, or train on the CPU.")
        self.curve = MemoryCurve(
            device,
            growth_threshold=self.gate,
            limit=self.limit,
            process=process,
            total_epochs=known_epochs(total_epochs),
        )
        self.failures: tuple[HookFailure, ...] = ()
        self._start = current_time()
        self._epochs = epoch
        self._steps = step
        self._steady: TensorReferrers | None = None
        parse_device_argument(device).reset_peak()

    @property
    def device(self) -> str:
        """Where the training runs."""
        return self.curve.device

    @property
    def verdict(self) -> str:
        """The verdict on the curve so far."""
        return self.curve.verdict

    def step(self) -> None:
        """Count a step; every so many steps, where ``every`` says so, memory is handed back too."""
        self._steps += 1
        if self.every and self._steps % self.every == 0:
            self._take_sample(boundary=False)

    def end_epoch(self) -> MemorySample:
        """End an epoch: hand memory back and return the new sample."""
        self._epochs += 1
        known = len(self.failures)
        grew = self.verdict == GROWING
        self._run(self.before)
        sample = self._take_sample(boundary=True)
        self._compare_referrers()
        self._run((*self.after, SESSION.set_last_curve))
        messages = [f"{failure} The training went on; correct the hook." for failure in self.failures[known:]]
        process = self.curve.process
        if not process.is_main_process and self.verdict == GROWING and not grew:  # No curve of this process is shown.
            who = f"Process {process.rank} of {process.world_size} on {self.device}"
            messages.append(f"{who}: {self.curve.reason} {self.curve.advice}")
        for message in messages:  # Last: a filter may turn one into an error.
            warn(message)
        return sample

    def epochs(self, epochs: int | Iterable[Any]) -> Epochs:
        """Return a loop over epochs, numbered from 0, that ends each with a boundary.

        Raises:
            ConfigurationError: For a value that is neither a number of epochs nor an iterable.
        """
        count = as_integer(epochs)
        if count is not None and 0 <= count <= sys.maxsize:
            epochs = range(count)
        if not isinstance(epochs, Iterable) or isinstance(epochs, (str, bytes)):
            raise invalid_value("epochs", epochs, "Pass how many there are, such as 10.")
        if isinstance(epochs, Sized):
            planned = None
            with suppress(TypeError, OverflowError):  # Data of a loader without a length, or a range without an end.
                planned = known_epochs(self._epochs + len(epochs))
            self.curve = replace(self.curve, total_epochs=planned)
        return Epochs(self, epochs)

    def __call__(self, train_epoch: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        """Return a function that trains an epoch, with the boundary after it; one that raises has not ended an epoch.

        Raises:
            ConfigurationError: For a coroutine or a generator function, which returns before it has trained.
        """
        if inspect.iscoroutinefunction(train_epoch) or inspect.isgeneratorfunction(train_epoch):
            what = f"{function_name(train_epoch)} returns before it has trained."
            raise ConfigurationError(what, "Call end_epoch() where an epoch ends.")

        @functools.wraps(train_epoch)
        def trained(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
            result = train_epoch(*args, **kwargs)
            self.end_epoch()
            return result

        return trained

    def __enter__(self) -> EpochHooks:  # noqa: PYI034 - Self came with Python 3.11
        return self

    def __exit__(self, *_error: object) -> None:
        self._free_memory()

    def _take_sample(self, boundary: bool) -> MemorySample:
        """Hand memory back, and take a sample."""
        self._free_memory()
        seconds = current_time() - self._start
        sample = take_sample(self.device, self._epochs, self._steps, seconds, boundary)
        self.curve = self.curve.append(sample)
        return sample

    def _free_memory(self) -> None:
        """Collect cycles before the cache is emptied, so that what they held can leave it."""
        if self.guards is not None:
            self.guards.clear()
        gc.collect()
        parse_device_argument(self.device).empty_cache()

    def _compare_referrers(self) -> None:
        """Remember what holds tensors after the warm-up, and where tensors use more memory now, find what holds more."""
        first = self.curve.epoch_samples[0]
        last = self.curve.epoch_samples[-1]
        if self._steady is None:
            self._steady = find_tensor_referrers()
        growing = replace(self.curve, filling=0).verdict == GROWING
        grown: dict[TensorReferrer, int] = {}
        if growing or (last.allocated or 0) > (first.allocated or 0):
            grown = grown_referrers(self._steady, find_tensor_referrers() if growing else named_referrers())
        filling = sum(size for holder, size in grown.items() if holder.kind == HISTORY)
        # Graphs whose tensors a backward pass has freed are small, and still a mistake.
        holders = (holder for holder in grown if holder.kind != HISTORY and (growing or holder.num_graphs > 1))
        self.curve = replace(self.curve, referrers=tuple(holders), filling=filling)

    def _run(self, hooks: Iterable[Hook]) -> None:
        for hook in hooks:
            try:
                hook(self.curve)
            except Exception as error:  # noqa: BLE001, PERF203 - whatever a person's hook does, training is worth more
                self.failures += (HookFailure(function_name(hook), self._epochs, type(error).__name__),)


@dataclass(frozen=True)
class Epochs:
    """A loop over epochs with a boundary after each, also after the last of a loop that is left early or by an error.

    Attributes:
        hooks: The boundary, with the curve.
    """

    hooks: EpochHooks
    _epochs: Iterable[Any]

    @property
    def curve(self) -> MemoryCurve:
        """The samples so far, and the verdict."""
        return self.hooks.curve

    def step(self) -> None:
        """Count a step."""
        self.hooks.step()

    def __len__(self) -> int:
        return len(self._epochs)  # type: ignore[arg-type]  # a TypeError of Python's where there is no length

    def __iter__(self) -> Iterator[Any]:
        program_ends = sys.is_finalizing  # This module's own names may be gone by then.
        for epoch in self._epochs:
            try:
                yield epoch
            finally:
                if not program_ends():  # torch and the rest are half gone, and nobody looks any more.
                    self.hooks.end_epoch()


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
        >>> [epoch for epoch in loop], len(loop.curve.epoch_samples)
        ([0, 1], 2)
    """
    return EpochHooks(device, **options).epochs(epochs)


def last_curve() -> MemoryCurve | None:
    """Return the curve to which the last sample went, ``None`` before the first."""
    curve: MemoryCurve | None = SESSION.curve
    return curve


def current_process() -> ProcessInfo:
    """Return which process of a training this is, from torch where it knows, else from what the launcher has set."""
    distributed = sys.modules.get("torch.distributed")  # torch is not loaded for that.
    given = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    rank, count, local_rank = (int(value) if value.isdecimal() else 0 for value in given)
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        rank = distributed.get_rank()
        count = distributed.get_world_size()
    return ProcessInfo(rank, count or 1, local_rank)


def process_device(device: str, process: ProcessInfo) -> str:
    """Return the device of a process: each has a GPU of CUDA of its own."""
    several = process.world_size > 1 and parse_device_argument(device).is_numbered and ":" not in device
    return f"{device}:{process.local_rank}" if several else device


def function_name(function: Callable[..., Any]) -> str:
    """Return the name of a function, without the function that it was defined in."""
    return shorten(str(getattr(function, "__qualname__", type(function).__qualname__)).rpartition("<locals>.")[2])


def _validate_hooks(hooks: Any) -> list[Hook]:
    checked: list[Any] = list(hooks) if isinstance(hooks, Iterable) else [None]
    if not all(callable(hook) and not inspect.iscoroutinefunction(hook) for hook in checked):
        what = f"Hooks must be functions in a list, got {describe_value(hooks)}."
        raise ConfigurationError(what, "Pass functions that take the curve, in a list.")
    return checked


# The boundary and the guards as callbacks of Trainer and of Lightning. Their base classes are those of transformers and of
# Lightning, which are imported only when a callback is made.

LIGHTNING = ("lightning.pytorch", "pytorch_lightning")  # The names under which it may be installed.


def arguments(library: str, device: Any = None) -> dict[str, Any]:
    """Return the arguments that make a library use the device of the session, or the one named.

    Args:
        library: ``"trainer"`` for those of ``transformers.TrainingArguments``, ``"accelerate"`` for those of
            ``accelerate.Accelerator``.
        device: As for :class:`EpochHooks`.

    Raises:
        ConfigurationError: For another library.
        DeviceError: Where the device cannot be used.

    Trainer takes the best GPU by itself; only the CPU has to be asked for. Pinned memory is for CUDA: on MPS torch refuses
    it with a warning, and with the CPU chosen on a Mac it warns too (torchgeo-bench#253).

    Example:
        >>> arguments("trainer", "cpu"), arguments("accelerate", "cpu")
        ({'use_cpu': True, 'dataloader_pin_memory': False}, {'cpu': True})
    """
    check_choice("library", library, ("trainer", "accelerate"))
    known = parse_device_argument(SESSION.device(device).device)
    if library == "accelerate":
        return {"cpu": not known.is_accelerator}
    return {"use_cpu": not known.is_accelerator, "dataloader_pin_memory": known.pins_memory}


def callback(library: str, device: Any = None, *, guards: Guards | None = None, **options: Any) -> Any:
    """Return a callback with the epoch boundary and the guards for the trainer of a library.

    Args:
        library: ``"trainer"`` for ``transformers.Trainer``, ``"lightning"`` for Lightning's.
        device: As for :class:`EpochHooks`; a warning tells if the trainer uses another one.
        guards: ``None`` is ``Guards()``: all guards.
        options: Those of :class:`EpochHooks`.

    Returns:
        A ``TrainerCallback``, or a Lightning ``Callback``, with ``curve``, ``hooks`` and ``guards``.

    Raises:
        ConfigurationError: For another library, and where Lightning is not installed.
    """
    check_choice("library", library, ("trainer", "lightning"))
    make = _trainer_class if library == "trainer" else _lightning_class
    return make()(validate_guards(guards), device, options)


class GuardedTraining:
    """The boundary and the guards of one training, behind the callback of a library."""

    def __init__(self, guards: Guards, device: Any, options: dict[str, Any]) -> None:
        self.guards = guards
        self.hooks = EpochHooks(device, guards=guards, **options)
        self._chosen = self.hooks.device

    @property
    def curve(self) -> MemoryCurve:
        """The samples so far, and the verdict."""
        return self.hooks.curve

    def begin(  # noqa: PLR0913, PLR0917 - what a trainer says of a training
        self, library: str, device: object, epoch: int, step: int, planned: int | None, remedy: str
    ) -> str:
        """Begin a curve on the device that the library uses, and return its name."""
        name = normalize_device(str(device))
        warn_device_mismatch(library, name, self._chosen, remedy)
        self.hooks.begin(name, epoch, step, planned)
        return name


def warn_device_mismatch(library: str, device: str, chosen: str, remedy: str) -> None:
    """Warn where a library computes on another device than chosen; the first GPU stands for all of them."""
    kind, _, index = normalize_device(chosen).partition(":")
    if kind == parse_device_argument(device).type:
        if index in {"", "0"} or normalize_device(device) == chosen:
            return
        remedy = f"Set CUDA_VISIBLE_DEVICES={index} before torch is loaded, and choose 'cuda'."
    warn(f"{library} computes on {device}, but {chosen} was chosen. {remedy}")


@functools.cache
def _trainer_class() -> Any:
    from transformers import TrainerCallback

    class OpenMedCallback(GuardedTraining, TrainerCallback):
        """Ends each epoch with a boundary, and guards each step."""

        def on_train_begin(self, args: Any, state: Any, _control: Any, **kwargs: Any) -> None:
            remedy = 'Pass **nb.training.arguments("trainer") to TrainingArguments.'
            done = int(state.epoch or 0)
            device = self.begin("Trainer", args.device, done, state.global_step, state.num_train_epochs, remedy)
            self.guards.watch(kwargs["model"], device, SESSION.device_manager.machine, scaled=args.fp16)
            self.guards.watch_loader(kwargs["train_dataloader"])

        def on_pre_optimizer_step(self, _args: Any, state: Any, _control: Any, **kwargs: Any) -> None:
            self.guards.after_backward(kwargs["model"], state.global_step + 1)

        def on_step_end(self, *_state: Any, **_kwargs: Any) -> None:
            self.hooks.step()

        def on_epoch_end(self, *_state: Any, **_kwargs: Any) -> None:
            self.hooks.end_epoch()

        def on_train_end(self, *_state: Any, **_kwargs: Any) -> None:
            self.guards.unwatch()

    return OpenMedCallback


@functools.cache
def _lightning_class() -> Any:
    installed = [name for name in LIGHTNING if importlib.util.find_spec(name.partition(".")[0])]
    if not installed:
        raise ConfigurationError("Lightning is not installed.", "Install it: python -m pip install lightning.")
    loaded = [name for name in LIGHTNING if name in sys.modules]  # The name that is in use already comes first.
    base = importlib.import_module((loaded or installed)[0]).Callback

    class LightningCallback(GuardedTraining, base):  # type: ignore[misc, valid-type]
        """Ends each epoch with a boundary, and guards each step."""

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            remedy = f"Pass accelerator={parse_device_argument(self._chosen).type!r} to its Trainer."
            done = trainer.current_epoch
            device = self.begin("Lightning", pl_module.device, done, trainer.global_step, trainer.max_epochs, remedy)
            self.guards.watch(pl_module, device, SESSION.device_manager.machine, scaled=trainer.precision == "16-mixed")
            prepare = pl_module.on_before_batch_transfer

            def checked(batch: Any, dataloader_idx: int) -> Any:
                if trainer.training:
                    self.guards.check(batch, trainer.global_step + 1)
                return prepare(batch, dataloader_idx)

            # The one hook that has a batch before it is moved is the module's; callbacks have none for that.
            pl_module.on_before_batch_transfer = checked

        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, _optimizer: Any) -> None:
            self.guards.after_backward(pl_module, trainer.global_step + 1)

        def on_train_batch_end(self, *_arguments: Any) -> None:
            self.hooks.step()

        def on_train_epoch_end(self, *_arguments: Any) -> None:
            self.hooks.end_epoch()

        def on_train_end(self, _trainer: Any, pl_module: Any) -> None:
            vars(pl_module).pop("on_before_batch_transfer", None)
            self.guards.unwatch()

        def on_exception(self, trainer: Any, pl_module: Any, _exception: BaseException) -> None:
            self.on_train_end(trainer, pl_module)

    return LightningCallback
