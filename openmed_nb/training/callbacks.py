"""The epoch boundary and the guards as callbacks of Trainer and of Lightning, and the arguments that set their device.

The base classes of callbacks are those of transformers and of Lightning, which are imported only when a callback is made.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import warnings
from typing import Any

from ..devices.request import canonical, kind_of
from ..errors import ConfigurationError, OpenMedWarning, choice
from ..session import SESSION
from .curve import MemoryCurve
from .epochs import EpochHooks
from .guards import Guards, checked_guards

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
    choice("library", library, ("trainer", "accelerate"))
    name = SESSION.device(device).device
    if library == "accelerate":
        return {"cpu": name == "cpu"}
    return {"use_cpu": name == "cpu", "dataloader_pin_memory": kind_of(name) == "cuda"}


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
    choice("library", library, ("trainer", "lightning"))
    make = _trainer_class if library == "trainer" else _lightning_class
    return make()(checked_guards(guards), device, options)


class GuardedTraining:
    """The boundary and the guards of one training, behind the callback of a library."""

    def __init__(self, guards: Guards, device: Any, options: dict[str, Any]) -> None:
        self.guards, self.hooks = guards, EpochHooks(device, guards=guards, **options)
        self.machine, self._chosen = SESSION.computer.machine, self.hooks.device

    @property
    def curve(self) -> MemoryCurve:
        """The samples so far, and the verdict."""
        return self.hooks.curve

    def begin(self, library: str, device: object, epoch: int, step: int, remedy: str) -> str:
        """Begin a curve on the device that the library uses, and return its name."""
        name = canonical(str(device))
        warn_of_another_device(library, name, self._chosen, remedy)
        self.hooks.begin(name, epoch, step)
        return name


def warn_of_another_device(library: str, device: str, chosen: str, remedy: str) -> None:
    """Warn where a library computes on another device than chosen; the first GPU stands for all of them."""
    kind, _, index = canonical(chosen).partition(":")
    same_kind = kind == kind_of(device)
    if same_kind and (index in {"", "0"} or canonical(device) == chosen):
        return
    if same_kind:
        remedy = f"Set CUDA_VISIBLE_DEVICES={index} before torch is loaded, and choose 'cuda'."
    warnings.warn(f"{library} computes on {device}, but {chosen} was chosen. {remedy}", OpenMedWarning, stacklevel=3)


@functools.cache
def _trainer_class() -> Any:
    from transformers import TrainerCallback

    class OpenMedCallback(GuardedTraining, TrainerCallback):
        """Ends each epoch with a boundary, and guards each step."""

        def on_train_begin(self, args: Any, state: Any, _control: Any, **kwargs: Any) -> None:
            remedy = 'Pass **nb.training.arguments("trainer") to TrainingArguments.'
            device = self.begin("Trainer", args.device, int(state.epoch or 0), state.global_step, remedy)
            self.guards.watch(kwargs["model"], device, self.machine, scaled=args.fp16)
            self.guards.watch_loader(kwargs["train_dataloader"])

        def on_pre_optimizer_step(self, _args: Any, state: Any, _control: Any, **kwargs: Any) -> None:
            self.guards.after_backward(kwargs["model"], state.global_step + 1)

        def on_step_end(self, *_state: Any, **_kwargs: Any) -> None:
            self.hooks.step()

        def on_epoch_end(self, *_state: Any, **_kwargs: Any) -> None:
            self.hooks.boundary()

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
            remedy = f"Pass accelerator={kind_of(self._chosen)!r} to its Trainer."
            device = self.begin("Lightning", pl_module.device, trainer.current_epoch, trainer.global_step, remedy)
            self.guards.watch(pl_module, device, self.machine, scaled=trainer.precision == "16-mixed")
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
            self.hooks.boundary()

        def on_train_end(self, _trainer: Any, pl_module: Any) -> None:
            vars(pl_module).pop("on_before_batch_transfer", None)
            self.guards.unwatch()

        def on_exception(self, trainer: Any, pl_module: Any, _exception: BaseException) -> None:
            self.on_train_end(trainer, pl_module)

    return LightningCallback
