"""The epoch boundary and the guards as a callback of ``transformers.Trainer``.

Importing this file imports transformers, whose base class it needs; so it is imported only when a callback is made.
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from .libraries import GuardedTraining


class OpenMedCallback(GuardedTraining, TrainerCallback):
    """Ends each epoch with a boundary, and guards each step; made by :func:`openmed_nb.trainer_callback`."""

    library = "Trainer"

    @property
    def remedy(self) -> str:
        """What to do where Trainer uses another device than was chosen."""
        return "Pass **nb.trainer_arguments() to TrainingArguments."

    def on_train_begin(self, args: Any, state: Any, _control: Any, **kwargs: Any) -> None:
        """Begin a curve on the device that Trainer uses, and watch the model and its batches."""
        device = self.begin(args.device, int(state.epoch or 0), state.global_step)
        self.guards.watch(kwargs["model"], device, self.machine, scaled=args.fp16)
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
