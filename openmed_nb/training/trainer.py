"""The epoch boundary and the guards as a callback of ``transformers.Trainer``.

Importing this file imports transformers, whose base class it needs; so it is imported only when a callback is made.
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from ..devices.machine import Machine
from ..devices.request import canonical
from .epochs import EpochBoundary
from .guards import Guards
from .library_arguments import warn_of_another_device


class OpenMedCallback(TrainerCallback):
    """Ends each epoch with a boundary, and guards each step; made by :func:`openmed_nb.trainer_callback`.

    Attributes:
        hooks: The boundary, with the curve.
        guards: What looks for silently wrong numbers.
    """

    def __init__(self, hooks: EpochBoundary, guards: Guards, machine: Machine) -> None:
        self.hooks, self.guards, self._machine = hooks, guards, machine
        self._chosen = hooks.device

    @property
    def curve(self) -> Any:
        """The samples so far, and the verdict."""
        return self.hooks.curve

    def on_train_begin(self, args: Any, state: Any, _control: Any, **kwargs: Any) -> None:
        """Begin a curve on the device that Trainer uses, and watch the model and its batches."""
        device = canonical(str(args.device))
        warn_of_another_device("Trainer", device, self._chosen, "Pass **nb.trainer_arguments() to TrainingArguments.")
        self.hooks.begin(device, int(state.epoch or 0), state.global_step)
        self.guards.watch(kwargs["model"], device, self._machine, scaled=args.fp16)
        self.guards.watch_loader(kwargs["train_dataloader"])

    def on_pre_optimizer_step(self, _args: Any, state: Any, _control: Any, **kwargs: Any) -> None:
        """Look at the gradients before they change the weights."""
        self.guards.after_backward(kwargs["model"], state.global_step + 1)

    def on_step_end(self, _args: Any, _state: Any, _control: Any, **_kwargs: Any) -> None:
        """Count the step."""
        self.hooks.step()

    def on_epoch_end(self, _args: Any, _state: Any, _control: Any, **_kwargs: Any) -> None:
        """Hand memory back and look at it."""
        self.hooks.boundary()

    def on_train_end(self, _args: Any, _state: Any, _control: Any, **_kwargs: Any) -> None:
        """Leave the model and its batches as they were."""
        self.guards.unwatch()
