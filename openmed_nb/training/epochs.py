"""End-of-epoch hooks: release memory, sample it, and classify the memory curve.

They can be used as a loop, as a ``with`` block, and in a callback of Trainer or Lightning.
"""

from __future__ import annotations

import functools
import gc
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from .._utils.clock import current_time, time_call
from .._utils.text import shorten
from .._utils.validation import (
    check_bool,
    check_choice,
    check_integer,
    check_names,
    check_number,
    check_optional_integer,
)
from .._utils.warning import warn
from ..devices.device import Device
from ..devices.registry import get_device
from ..devices.request import normalize_device
from ..errors import ConfigurationError
from ..session import SESSION
from .curve import CacheReleases, MemoryCurve, MemorySample, ProcessInfo, TrendKind, take_sample
from .guards import Guards
from .holders import TensorReferrer, TensorReferrers, find_tensor_referrers, grown_referrers

if TYPE_CHECKING:
    import torch
    from lightning.pytorch import LightningModule, Trainer
    from transformers import PreTrainedModel, TrainerControl, TrainerState, TrainingArguments

    from .live import LiveMemoryCurve
    from .loader import DeviceArgument

# The allocator of a device keeps the blocks of freed tensors for later tensors. That of MPS keeps blocks for each new shape
# of a batch: users report 72 GB of device memory for 6.7 GB of tensors after five steps, and a twelfth of the speed
# (https://github.com/kyutai-labs/pocket-tts/pull/255), and a process that macOS stopped at 43 GB
# (https://github.com/aedocw/epub2tts-chatterbox/pull/20).
# The cache is emptied if the device memory exceeds the memory that a step needs by this factor, and by this number of
# bytes. A step needs the peak memory of live tensors. If torch counts no peaks, it is the device memory after the first
# step that follows an empty cache.
DEFAULT_RELEASE_FACTOR = 2.0
MIN_EXCESS_BYTES = 1 << 30
# Maximum fraction of the training time for all releases. The first is always allowed, because its duration is unknown.
MAX_TIME_FRACTION = 0.02
# Minimum time between two readings of the memory. A reading takes 0.13 ms on an H100 (measured 2026-11-26 with
# benchmarks/training.py), which would be 2% of a step of 7 ms.
SECONDS_BETWEEN_READINGS = 0.1


class CacheReleaser:
    """Empties the cache of a device after a step of a training, if the cache has grown.

    Attributes:
        releases: Releases so far.
    """

    def __init__(self, device: Device, factor: float | None) -> None:
        self.releases = CacheReleases()
        self._device = device
        self._factor = factor
        self._start = current_time()
        self._last_seconds = 0.0
        self._next_reading = self._start
        self.note_empty_cache()

    def note_empty_cache(self) -> None:
        """Forget the memory of earlier steps, because the cache was emptied at the end of an epoch."""
        self._remaining = 0  # Device memory after the previous release.
        self._step_memory = 0  # Highest device memory after the first step that follows an empty cache.
        self._is_first_step = True

    def after_step(self) -> None:
        """Empty the cache if it has grown and the time limit allows it. The memory is read once for several short steps."""
        if self._factor is None or not self._device.has_allocator:
            return
        now = current_time()
        if now < self._next_reading and not self._is_first_step:
            return
        self._next_reading = now + SECONDS_BETWEEN_READINGS
        count = self.releases.count
        seconds = self.releases.seconds
        training_seconds = now - self._start
        memory = self._device.memory_stats()
        reserved = memory.reserved or 0
        if self._is_first_step:
            self._step_memory = max(self._step_memory, reserved)
            self._is_first_step = False
        needed = self._step_memory if memory.peak is None else memory.peak
        excess = reserved - max(needed, self._remaining)
        is_allowed = count == 0 or seconds + self._last_seconds <= MAX_TIME_FRACTION * training_seconds
        if reserved > self._factor * needed and excess > MIN_EXCESS_BYTES and is_allowed:
            # Waiting for the device is not counted, because this work is part of the training.
            self._device.synchronize()
            self._last_seconds = time_call(self._device.empty_cache)
            self._remaining = self._device.memory_stats().reserved or 0
            self._is_first_step = True
            count += 1
            seconds += self._last_seconds
        self.releases = CacheReleases(count, seconds, training_seconds)


class EpochHooks:
    """Operations at the end of each epoch: release memory, empty the device cache, sample memory and classify it.

    After a step, the device cache is emptied too if it has grown.

    Args:
        device: Device of the training: a name, a ``torch.device`` or an ``Accelerator``. If ``None``, use the session
            device.
        every_n_steps: Also release memory and take a sample after this number of steps, counted by ``step()``. Each
            sample traverses all Python objects and waits for the device, which then allocates its blocks again. This
            takes 0.2 to 0.6 seconds if transformers is loaded (``benchmarks/training.py`` prints it).
        live: Whether to display the growing curve in the notebook. With several processes, the first displays its
            curve.
        release_when: Multiple of the memory that a step needs, above 1. If the device memory exceeds it after a step that
            ``step()`` counted, the cache of the device is emptied. If ``None``, the cache is emptied only at the end of an
            epoch.

    Attributes:
        curve: Samples so far, with the verdict.
        live_curve: Widget that displays the curve, or ``None``.
        last_curve: Curve with the most recent sample of this process, or ``None``.

    Raises:
        DeviceError: If the device cannot be used.
        ConfigurationError: If an argument is not valid.

    Example:
        >>> with EpochHooks("cpu") as hooks:
        ...     for epoch in range(2):
        ...         sample = hooks.end_epoch()
        >>> sample.epoch, hooks.verdict
        (2, 'insufficient data')
    """

    last_curve: ClassVar[MemoryCurve | None] = None

    def __init__(
        self,
        device: DeviceArgument = None,
        *,
        every_n_steps: int | None = None,
        live: bool = False,
        release_when: float | None = DEFAULT_RELEASE_FACTOR,
    ) -> None:
        check_bool("live", live)
        if release_when is not None:
            check_number("release_when", release_when, above=1, example="2.0, or None")
        self.release_when = release_when
        name = SESSION.device(device).device
        self.every_n_steps = check_optional_integer("every_n_steps", every_n_steps)
        self.limit = SESSION.device_manager.memory_fraction(name)
        self.begin(name)
        self.live_curve: LiveMemoryCurve | None = None
        if live and self.curve.process.is_main_process:
            from IPython.display import display

            from .live import LiveMemoryCurve

            self.live_curve = LiveMemoryCurve()
            display(self.live_curve)

    def begin(self, device: str, epoch: int = 0, step: int = 0) -> None:
        """Start a new training with a new curve.

        Args:
            device: Device of the training.
            epoch: Number of epochs that were finished before, if the training continues from a checkpoint.
            step: Number of steps that were finished before.
        """
        self.curve = MemoryCurve(device, limit=self.limit, process=_current_process())
        self._start = current_time()
        self._epochs = epoch
        self._steps = step
        self._warm_up_referrers: TensorReferrers | None = None
        self._releaser = CacheReleaser(get_device(device), self.release_when)
        get_device(device).reset_peak_memory_stats()

    @property
    def device(self) -> str:
        """Device of the training."""
        return self.curve.device

    @property
    def verdict(self) -> TrendKind:
        """Verdict on the curve so far."""
        return self.curve.verdict

    @property
    def releases(self) -> CacheReleases:
        """Number and duration of the releases between steps."""
        return self._releaser.releases

    def step(self) -> None:
        """Count a step, and empty the cache of the device if ``release_when`` is exceeded.

        After every ``every_n_steps`` steps, release memory and take a sample.
        """
        self._steps += 1
        self._releaser.after_step()
        if self.every_n_steps and self._steps % self.every_n_steps == 0:
            self._take_sample(boundary=False)

    def end_epoch(self) -> MemorySample:
        """End an epoch: release memory and return the new sample."""
        self._epochs += 1
        was_growing = self.verdict == "growing"
        sample = self._take_sample(boundary=True)
        self._compare_referrers()
        if self.live_curve is not None:
            self.live_curve(self.curve)
        with SESSION.operation():
            EpochHooks.last_curve = self.curve
        process = self.curve.process
        # The curve of another process is not displayed.
        if not process.is_main_process and self.verdict == "growing" and not was_growing:
            name = f"Process {process.rank} of {process.world_size} on {self.device}"
            warn(f"{name}: {self.curve.reason} {self.curve.advice}")
        return sample

    def __enter__(self) -> EpochHooks:  # noqa: PYI034 - Self came with Python 3.11
        return self

    def __exit__(self, *_error: object) -> None:
        self._free_memory()

    def _take_sample(self, boundary: bool) -> MemorySample:
        """Release memory, and take a sample."""
        self._free_memory()
        sample = take_sample(self.device, self._epochs, self._steps, current_time() - self._start, boundary)
        self.curve = replace(self.curve.append(sample), releases=self.releases)
        return sample

    def _free_memory(self) -> None:
        """Collect cycles before the cache is emptied, so that their memory can be released."""
        gc.collect()
        get_device(self.device).empty_cache()
        self._releaser.note_empty_cache()

    def _compare_referrers(self) -> None:
        """Store the referrers after warm-up, and find those that hold more memory once it grows."""
        samples = self.curve.epoch_samples
        if self._warm_up_referrers is None:
            self._warm_up_referrers = find_tensor_referrers()
        growing = self.verdict == "growing" or self.curve.has_growing_tensors
        referrers: list[TensorReferrer] = []
        if growing or (samples[-1].allocated or 0) > (samples[0].allocated or 0):
            grown = grown_referrers(self._warm_up_referrers, find_tensor_referrers())
            # Graphs whose tensors were freed by a backward pass are small, but still a bug.
            referrers = [referrer for referrer in grown if growing or referrer.num_graphs > 1]
        self.curve = replace(self.curve, referrers=tuple(referrers))


HOOK_OPTIONS = tuple(inspect.signature(EpochHooks).parameters)


class Epochs(EpochHooks):
    """Loop over epochs that ends each epoch, even if the loop is left early or by an error.

    Args:
        epochs: Number of epochs.
        device: Device of the training, as in :class:`EpochHooks`.
        options: Other arguments of :class:`EpochHooks`.

    Raises:
        ConfigurationError: If ``epochs`` is not an integer from 0, or if another argument is not valid.
    """

    def __init__(self, epochs: int, device: DeviceArgument = None, **options: Any) -> None:
        check_names("an option of epochs()", options, HOOK_OPTIONS, "Options")
        self._numbers = range(check_integer("epochs", epochs, 0, 1_000_000_000))
        super().__init__(device, **options)

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[int]:
        # Stored in a local variable, because the globals of this module may be gone at interpreter shutdown.
        is_finalizing = sys.is_finalizing
        for epoch in self._numbers:
            try:
                yield epoch
            finally:
                if not is_finalizing():
                    self.end_epoch()


def epochs(epochs: int, device: DeviceArgument = None, **options: Any) -> Epochs:
    """Loop over epochs; after each, release memory, sample it, and classify the curve.

    Args:
        epochs: Number of epochs.
        device: Device of the training, as in :class:`EpochHooks`.
        options: Other arguments of :class:`EpochHooks`.

    Returns:
        A loop over 0, 1, 2 ..., with the attributes of :class:`EpochHooks`. ``every_n_steps`` and ``release_when`` apply if the
        loop body calls its method ``step`` after each step.

    Example:
        >>> loop = epochs(2, "cpu")
        >>> [epoch for epoch in loop], len(loop.curve.epoch_samples)
        ([0, 1], 2)
    """
    return Epochs(epochs, device, **options)


def last_curve() -> MemoryCurve | None:
    """Return the curve with the most recent sample, or ``None`` before the first sample."""
    return EpochHooks.last_curve


def _current_process() -> ProcessInfo:
    """Return the rank of this process from torch if it is initialized, else from the variables of the launcher."""
    distributed = sys.modules.get("torch.distributed")  # torch is not imported for this.
    values = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE"))
    rank, world_size = (int(value) if value.isdecimal() else 0 for value in values)
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        rank = distributed.get_rank()
        world_size = distributed.get_world_size()
    return ProcessInfo(rank, world_size or 1)


def function_name(function: Callable[..., object]) -> str:
    """Return the qualified name of a function, without the enclosing function."""
    return shorten(str(getattr(function, "__qualname__", type(function).__qualname__)).rpartition("<locals>.")[2])


# End-of-epoch hooks and guards as callbacks of Trainer and Lightning. The base classes belong to transformers and
# Lightning, which are imported only when a callback is created.

# Lightning can be installed under either name.
LIGHTNING_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def arguments(library: str, device: DeviceArgument = None) -> dict[str, bool]:
    """Return the arguments that make a library use the session device or the named device.

    Trainer selects the best GPU by default, so only the CPU must be requested. Pinned memory is for CUDA. On MPS, torch
    ignores it with a warning. It also warns on a Mac if the CPU is selected (torchgeo-bench#253).

    Args:
        library: ``"trainer"`` for arguments of ``transformers.TrainingArguments``, ``"accelerate"`` for those of
            ``accelerate.Accelerator``.
        device: Device, as in :class:`EpochHooks`.

    Returns:
        The arguments by name.

    Raises:
        ConfigurationError: If the library is not supported.
        DeviceError: If the device cannot be used.

    Example:
        >>> arguments("trainer", "cpu"), arguments("accelerate", "cpu")
        ({'use_cpu': True, 'dataloader_pin_memory': False}, {'cpu': True})
    """
    check_choice("library", library, ("trainer", "accelerate"))
    backend = get_device(SESSION.device(device).device)
    if library == "accelerate":
        return {"cpu": not backend.is_accelerator}
    return {"use_cpu": not backend.is_accelerator, "dataloader_pin_memory": backend.pins_memory}


def callback(library: str, device: DeviceArgument = None, **options: Any) -> GuardedTraining:
    """Return a callback for the trainer of a library, with end-of-epoch hooks and guards.

    Args:
        library: ``"trainer"`` for ``transformers.Trainer``, ``"lightning"`` for the Trainer of Lightning.
        device: Device, as in :class:`EpochHooks`. A warning is issued if the trainer uses another type of device.
        options: Other arguments of :class:`EpochHooks`.

    Returns:
        A ``TrainerCallback``, or a Lightning ``Callback``, with ``curve``, ``hooks`` and ``guards``.

    Raises:
        ConfigurationError: If the library is not supported, or if Lightning is not installed.
    """
    check_choice("library", library, ("trainer", "lightning"))
    check_names("an option of callback()", options, HOOK_OPTIONS, "Options")
    callback_class = _trainer_class() if library == "trainer" else _lightning_class()
    return callback_class(device, options)


class GuardedTraining:
    """End-of-epoch hooks and guards of one training; base class of the callbacks.

    Attributes:
        LIBRARY: Name of the trainer for warnings.
        DEVICE_REMEDY: Remedy if the trainer uses a device of another type than the selected one, ``{}``.
    """

    LIBRARY: ClassVar[str]
    DEVICE_REMEDY: ClassVar[str]

    def __init__(self, device: DeviceArgument, options: dict[str, Any]) -> None:
        self.guards = Guards()
        self.hooks = EpochHooks(device, **options)
        self._selected_device = self.hooks.device

    @property
    def curve(self) -> MemoryCurve:
        """Samples so far, with the verdict."""
        return self.hooks.curve

    def begin(self, device: object, epoch: int, step: int) -> None:
        """Start a curve on the device that the trainer uses, and warn if that is not the selected one."""
        name = normalize_device(str(device))
        selected_type = get_device(self._selected_device).type
        if get_device(name).type != selected_type:
            remedy = self.DEVICE_REMEDY.format(selected_type)
            warn(f"{self.LIBRARY} uses {name}, but {self._selected_device} was selected. {remedy}")
        self.hooks.begin(name, epoch, step)


@functools.cache
def _trainer_class() -> type[GuardedTraining]:
    from transformers import TrainerCallback

    class OpenMedCallback(GuardedTraining, TrainerCallback):
        """Callback that ends each epoch and guards each step."""

        LIBRARY = "Trainer"
        DEVICE_REMEDY = 'Pass **nb.training.arguments("trainer") to TrainingArguments.'

        def on_train_begin(
            self,
            args: TrainingArguments,
            state: TrainerState,
            _control: TrainerControl,
            *,
            model: PreTrainedModel,
            **_objects: object,
        ) -> None:
            def next_step() -> int:
                return int(state.global_step) + 1

            self.begin(args.device, int(state.epoch or 0), state.global_step)
            # Trainer calls no callback with a batch.
            self.guards.watch(model, next_step)

        def on_substep_end(self, *_state: object, **_objects: object) -> None:
            self.hooks._releaser.after_step()  # noqa: SLF001 - a part of a step is not counted

        def on_step_end(self, *_state: object, **_objects: object) -> None:
            self.hooks.step()

        def on_epoch_end(self, *_state: object, **_objects: object) -> None:
            self.hooks.end_epoch()

        def on_train_end(self, *_state: object, **_objects: object) -> None:
            self.guards.unwatch()

    return OpenMedCallback


@functools.cache
def _lightning_class() -> type[GuardedTraining]:
    installed = [name for name in LIGHTNING_PACKAGES if importlib.util.find_spec(name.partition(".")[0])]
    if not installed:
        raise ConfigurationError("Lightning is not installed.", "Install it: python -m pip install lightning.")
    # A package that is already imported comes first.
    package = next((name for name in installed if name in sys.modules), installed[0])
    base = importlib.import_module(package).Callback

    class LightningCallback(GuardedTraining, base):  # type: ignore[misc, valid-type]
        """Callback that ends each epoch and guards each step."""

        LIBRARY = "Lightning"
        DEVICE_REMEDY = "Pass accelerator={!r} to its Trainer."

        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            self.begin(pl_module.device, trainer.current_epoch, trainer.global_step)
            self.guards.watch(pl_module)
            prepare = pl_module.on_before_batch_transfer

            def check_and_prepare(batch: object, dataloader_idx: int) -> object:
                if trainer.training:
                    self.guards.check(batch, trainer.global_step + 1)
                return prepare(batch, dataloader_idx)

            # Only this hook of the module receives a batch before it is moved; callbacks have no such hook.
            pl_module.on_before_batch_transfer = check_and_prepare

        def on_before_backward(self, _trainer: Trainer, _pl_module: LightningModule, loss: torch.Tensor) -> None:
            self.guards._check_loss(loss)  # noqa: SLF001 - only this callback receives a loss outside the model

        def on_train_batch_end(self, *_state: object) -> None:
            self.hooks.step()

        def on_train_epoch_end(self, *_state: object) -> None:
            self.hooks.end_epoch()

        def on_train_end(self, _trainer: Trainer, pl_module: LightningModule) -> None:
            vars(pl_module).pop("on_before_batch_transfer", None)
            self.guards.unwatch()

        def on_exception(self, trainer: Trainer, pl_module: LightningModule, _exception: BaseException) -> None:
            self.on_train_end(trainer, pl_module)

    return LightningCallback
