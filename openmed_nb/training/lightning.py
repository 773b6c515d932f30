"""The epoch boundary and the guards as a callback of Lightning, under either of its two names.

Importing this file imports Lightning, whose base class it needs; so it is imported only when a callback is made.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

from ..devices.request import kind_of
from ..errors import ConfigurationError
from .libraries import GuardedTraining

NAMES = ("lightning.pytorch", "pytorch_lightning")


def lightning() -> Any:
    """Return Lightning, under the name that is in use already or else under the one that is installed.

    Raises:
        ConfigurationError: Where it is not installed.
    """
    installed = [name for name in NAMES if importlib.util.find_spec(name.partition(".")[0])]
    loaded = [name for name in NAMES if name in sys.modules]
    if not installed:
        raise ConfigurationError("Lightning is not installed.", "Install it: python -m pip install lightning.")
    return importlib.import_module((loaded or installed)[0])


class LightningCallback(GuardedTraining, lightning().Callback):  # type: ignore[misc]
    """Ends each epoch with a boundary, and guards each step; made by :func:`openmed_nb.lightning_callback`."""

    library = "Lightning"

    @property
    def remedy(self) -> str:
        """What to do where Lightning uses another device than was chosen."""
        return f"Pass accelerator={kind_of(self._chosen)!r} to its Trainer."

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin a curve on the device that Lightning uses, and watch the model."""
        device = self.begin(pl_module.device, trainer.current_epoch, trainer.global_step)
        self.guards.watch(pl_module, device, self.machine, scaled=trainer.precision == "16-mixed")
        self._check_before_moving(trainer, pl_module)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, _optimizer: Any) -> None:
        """Look at the gradients before they change the weights."""
        self.guards.after_backward(pl_module, trainer.global_step + 1)

    def on_train_batch_end(self, *_arguments: Any) -> None:
        """Count the step."""
        self.hooks.step()

    def on_train_epoch_end(self, _trainer: Any, _pl_module: Any) -> None:
        """Hand memory back and look at it."""
        self.hooks.boundary()

    def on_train_end(self, _trainer: Any, _pl_module: Any) -> None:
        """Leave the model as it was."""
        self._leave(_pl_module)

    def on_exception(self, _trainer: Any, pl_module: Any, _exception: BaseException) -> None:
        """Leave the model as it was where the training fails too."""
        self._leave(pl_module)

    def _check_before_moving(self, trainer: Any, pl_module: Any) -> None:
        """Look at each batch in the one hook that has it before it is moved; callbacks have none for that."""
        prepare = pl_module.on_before_batch_transfer

        def checked(batch: Any, dataloader_idx: int) -> Any:
            if trainer.training:
                self.guards.check(batch, trainer.global_step + 1)
            return prepare(batch, dataloader_idx)

        pl_module.on_before_batch_transfer = checked

    def _leave(self, pl_module: Any) -> None:
        vars(pl_module).pop("on_before_batch_transfer", None)
        self.guards.unwatch()
