"""Stop a training at what gives wrong numbers without an error.

Where a new guard goes: its name, what it does and its source into ``ABOUT``. Then, if it looks at the numbers of a batch, its
fields into ``CHECKS`` and ``RANGES`` (``batch_checks.py``); if it looks at a model, a line into ``Guards.watch``.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._render.display import Displayable, Report, Table
from .._utils.text import describe_value, short_type_name
from .._utils.validation import check_path, invalid_type, suggest
from .._utils.warning import warn
from ..devices.backend import TENSOR_LOCK, import_torch, parse_release
from ..devices.machine import MachineInfo, apple_chip_generation, read_machine
from ..devices.moving import unwrap_model
from ..devices.registry import parse_device_argument
from ..errors import ConfigurationError, NonFiniteError
from .batch_checks import (
    BEFORE_2_14,
    CHECKS,
    SINCE_2_14,
    BatchChecks,
    ModelLimits,
    UnsafeStepSizes,
    check_collation,
    infer_limits,
    inner_model,
    validate_limits,
)
from .nonfinite import ForwardRecorder, all_finite, gradients_of, is_finite, locate_non_finite, save_batch

if TYPE_CHECKING:
    import torch

# The first torch in which MPS computes rightly the gradients of an LSTM with dropout (pytorch#190056), and on M1 and M2
# those of a step with many tokens (pytorch#177116, #193487), except for one number of them.
LSTM_FIXED_IN = (2, 14)
LSTM_REMEDY = "Set its dropout to 0, put nn.Dropout between LSTMs of one layer, or use torch 2.14."
# The names that configurations of transformers have for dropout in attention.
ATTENTION_DROPOUT = ("attention_probs_dropout_prob", "attention_dropout", "attn_pdrop")


class DropoutWatch:
    """Warns once of a pass in train mode with dropout and without gradients; in a copy of a model it never warns."""

    def __init__(self, device: str | None) -> None:
        self.device = device

    def __reduce__(self) -> tuple[Any, ...]:
        return DropoutWatch, (None,)

    def __call__(self, module: torch.nn.Module, _args: Any) -> None:
        import torch
        from torch.nn.modules.dropout import _DropoutNd

        if self.device is None or not module.training or torch.is_grad_enabled():
            return
        config = getattr(unwrap_model(module), "config", None)
        in_attention = any(getattr(config, name, None) for name in ATTENTION_DROPOUT)
        in_layers = (layer.p > 0 for layer in module.modules() if isinstance(layer, _DropoutNd) and layer.training)
        if not in_attention and not any(in_layers):
            return
        what = "A forward pass ran in train mode with dropout and without gradients: its results are random."
        meant = "use Guards(disable=('dropout_without_gradients',))"
        sdpa = getattr(config, "_attn_implementation", None) == "sdpa"
        if in_attention and sdpa and parse_device_argument(self.device).attention_lacks_dropout:
            what += " On MPS attention raises here: scaled_dot_product_attention for MPS does not support dropout."
            meant = "load the model with attn_implementation='eager'"
        self.device = None
        advice = f"{what} Call model.eval() first; where it is meant, {meant}."
        warn(advice)


# What each guard does, and where that is from.
GUARD_DESCRIPTIONS = {
    "labels": ("stops at labels that the model does not have", "keras#23664, pytorch#187559"),
    "token_ids": ("stops at tokens, types, positions and rows without an embedding", "pytorch#154235, #123119"),
    "large_batch_gradients": ("stops at 32,767 tokens a step on an M1 or M2", "pytorch#177116, #195163"),
    "nonfinite": ("stops where a loss or a gradient is NaN or infinite", ""),
    "dropout_without_gradients": ("warns of a pass in train mode without gradients", "pytorch#184126"),
    "lstm_dropout": ("warns of an LSTM with dropout on MPS before torch 2.14", "pytorch#190056"),
}
GUARD_NAMES = tuple(GUARD_DESCRIPTIONS)

# Where batches that made NaN or infinity are kept, in the current directory.
FOLDER = "openmed_nonfinite"
# So many steps in a row a scaler may skip for gradients that are not finite: halved 16 times, 65,536 is 1.
MAX_SKIPPED_STEPS = 20

# Who watches a model; guards hold it weakly, or it would never be let go. A training that failed leaves its guards
# there, and the next one lets them go.
WATCHED_MODELS: weakref.WeakKeyDictionary[Any, Guards] = weakref.WeakKeyDictionary()


class Guards(Displayable):
    """The guards of one training; Trainer callbacks, Accelerate and plain loops use the same.

    ``print(Guards())`` lists them, with what each does and where that is from: ``labels`` and ``token_ids`` (on MPS wrong
    ones give a loss near zero and rows of zeros, without an error), ``large_batch_gradients`` (rows times length of
    ``input_ids`` count, or of ``inputs_embeds``; other batches are not counted), ``nonfinite`` (it names the layer and keeps
    the batch; Trainer's log leaves such losses out, see ``logging_nan_inf_filter``), ``dropout_without_gradients`` and
    ``lstm_dropout``.

    Args:
        off: Names of guards that are switched off.
        folder: Where batches that made NaN or infinity are kept; they hold what the model was given.
        limits: What the model takes, where it cannot be learnt from it: attributes of
            :class:`~openmed_nb.training.batch_checks.ModelLimits`, such as ``labels=10``.

    Raises:
        ConfigurationError: For a name that no guard has, a folder that cannot be one, and a limit that cannot be one.

    Example:
        >>> import torch
        >>> tagger = torch.nn.Linear(2, 3)
        >>> with Guards(num_labels=3).watch(tagger, device="cpu") as guards:
        ...     guards.check({"labels": torch.tensor([0, 3])}, step=7)
        Traceback (most recent call last):
        ...
        openmed_nb.errors.InvalidBatchError: Step 7: 1 of 2 labels is not between 0 and 2 (3; -100 is left out). \
Give the model as many labels as the data has (num_labels), or number the labels anew.
    """

    JSON_PROPERTIES = ("on",)

    def __init__(self, disable: Iterable[str] = (), folder: str | Path = FOLDER, **limits: int | None) -> None:
        names = disable if isinstance(disable, Iterable) and not isinstance(disable, str) else (disable,)
        disable = tuple(map(str, names))
        for name in disable:
            if name not in GUARD_NAMES:
                raise ConfigurationError(f"There is no guard {describe_value(name)}.", suggest(name, GUARD_NAMES))
        self.on = tuple(name for name in GUARD_NAMES if name not in disable)
        self.folder = check_path(folder, "folder")
        self._given = validate_limits(limits)
        self._checks = self._batch_checks(ModelLimits(**self._given))
        self._recorder: ForwardRecorder | None = None
        self._watched: weakref.ref[torch.nn.Module] | None = None
        self._undo: list[Callable[[], None]] = []
        self._scaled = False
        self._skipped = 0
        self._batches = 0
        self._steps = 0

    def to_report(self) -> Report:
        """Return the names of the guards that are on, each with what it does and where that is from."""
        rows = tuple((name, *GUARD_DESCRIPTIONS[name]) for name in self.on)
        off = ", ".join(name for name in GUARD_NAMES if name not in self.on)
        sentences = (f"Off: {off}.",) if off else ()
        table = Table("", ("guard", "what it does", "issue"), rows)
        spoken = (f"{len(rows)} of {len(GUARD_NAMES)} guards are on", *sentences)
        return Report(f"Guards: {len(rows)} on", sentences, (table,), html_sentences=spoken)

    def watch(
        self,
        model: torch.nn.Module,
        device: str | None = None,
        machine: MachineInfo | None = None,
        torch_release: tuple[int, ...] | None = None,
        scaled: bool = False,
    ) -> Guards:
        """Learn what a model takes, and watch its passes until :meth:`unwatch`; a model that was watched is let go.

        Args:
            model: The model in training.
            device: The device that it is trained on, as torch spells it; the one that it is on where it is not given.
            machine: This computer, as the session knows it; on MPS it is read where it is not given.
            torch_release: The release of torch, such as ``(2, 13, 0)``; the installed one where it is not given.
            scaled: Whether a ``GradScaler`` is in use, which skips steps whose gradients are not finite.

        Returns:
            The guards, to be used in a ``with`` statement.

        Raises:
            ConfigurationError: For a value that is not a module of torch.
        """
        torch = import_torch()
        if not isinstance(model, torch.nn.Module):
            what = f"Guards cannot watch a value of type {short_type_name(model)}."
            raise ConfigurationError(what, "Pass the model itself, a torch.nn.Module.")
        self.unwatch()
        if model in WATCHED_MODELS:
            WATCHED_MODELS[model].unwatch()
        WATCHED_MODELS[model] = self
        device = device or next((str(parameter.device) for parameter in model.parameters()), "cpu")
        steps = None
        if parse_device_argument(device).type == "mps":
            repaired = (torch_release or parse_release(torch.__version__))[:2] >= LSTM_FIXED_IN
            # A chip that is not known is not suspected.
            if apple_chip_generation(machine or read_machine()) in (1, 2):
                steps = SINCE_2_14 if repaired else BEFORE_2_14
            if not repaired and "lstm_dropout" in self.on:
                warn_of_lstm(model)
        self._checks = self._batch_checks(infer_limits(model, **self._given), steps)
        self._watched = weakref.ref(model)
        self._scaled = scaled
        self._skipped = 0
        called = ("", *inner_model(model))  # A model inside of another may be called by itself.
        if "dropout_without_gradients" in self.on:
            watch = DropoutWatch(device)
            self._undo += [model.get_submodule(name).register_forward_pre_hook(watch).remove for name in called]
        if "nonfinite" in self.on:
            self._recorder = ForwardRecorder(device)
            self._undo += self._recorder.watch(model, called)
        return self

    def watch_loader(self, loader: Any) -> bool:
        """Let a loader check the batches that it puts together, in its worker processes too, until :meth:`unwatch`.

        Returns:
            Whether it does; ``False`` for a value that is not a ``DataLoader``, which is left as it is.
        """
        if undo := check_collation(loader, self._checks):
            self._undo.append(undo)
        return undo is not None

    def check(self, batch: Any, step: int | None = None) -> None:
        """Check a batch before it is moved to the device.

        Args:
            batch: A mapping of names to tensors or arrays, or a pair of inputs and labels.
            step: The number that errors name; ``None`` counts the batches.

        Raises:
            InvalidBatchError: For labels or token ids that the model does not have, and for too many tokens on an M1 or M2.
        """
        self._batches = self._batches + 1 if step is None else step
        self._checks(batch, f"Step {self._batches:,}: ")

    def checked(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches of a loader, each checked before; batches are numbered on from one loop to the next.

        A loader that Accelerate prepared moves its batches to the device itself, before they come here: let it check
        them with :meth:`watch_loader` instead.
        """
        for batch in loader:
            self.check(batch)
            yield batch

    def check_loss(self, loss: torch.Tensor | float, step: int | None = None, batch: Any = None) -> None:
        """Stop where a loss is NaN or infinite; the device is waited for.

        Args:
            loss: The loss.
            step: The number that the error names; ``None`` is that of the last batch that was checked.
            batch: What the loss was computed from, to be kept where the model was not watched.

        Raises:
            NonFiniteError: For a loss that is not finite.
        """
        number = None
        with suppress(TypeError, ValueError, RuntimeError):
            number = float(loss.detach() if hasattr(loss, "detach") else loss)
        if number is None:  # Outside of the handler: Python's error quotes the value.
            raise invalid_type("loss", loss, "Pass a number, or a tensor with one.")
        if "nonfinite" in self.on and not math.isfinite(number):
            raise self._stopped(f"the loss is {number}", step, self._steps + 1, batch)

    def after_backward(self, model: torch.nn.Module | None = None, step: int | None = None) -> None:
        """Stop where a loss or a gradient of this step is NaN or infinite; call it before the optimizer's step.

        What it costs is a look at every gradient, and waiting for the device once.

        Args:
            model: The model; the watched one where it is not given.
            step: The number that the error names; ``None`` is that of the last batch that was checked, or of this call
                where no batch was.

        Raises:
            NonFiniteError: It names the step, the layer, and the file in which the batch is kept.
        """
        model = self._model if model is None else model
        if "nonfinite" not in self.on or model is None:
            return
        self._steps += 1
        losses = list(self._recorder.losses) if self._recorder else []
        gradients = gradients_of(model.parameters())
        with TENSOR_LOCK:
            if all_finite(gradients, losses) or (is_finite(losses) and is_finite(gradients)):
                self._skipped = 0
            elif not is_finite(losses):
                raise self._stopped("the loss is NaN or infinite", step, self._steps)
            elif not self._scaled or self._skipped == MAX_SKIPPED_STEPS:
                raise self._stopped("a gradient is NaN or infinite", step, self._steps)
            else:
                self._skipped += 1
        self.clear()

    def clear(self) -> None:
        """Let go of the batches of this step."""
        if self._recorder is not None:
            self._recorder.clear()

    def unwatch(self) -> None:
        """Take every hook away, and let go of the model; the checks of batches stay as they are."""
        while self._undo:
            self._undo.pop()()
        if self._model is not None:
            WATCHED_MODELS.pop(self._model, None)
        self._recorder = self._watched = None

    def __enter__(self) -> Guards:  # noqa: PYI034 - Self came with Python 3.11
        return self

    def __exit__(self, *_error: object) -> None:
        self.unwatch()

    @property
    def _model(self) -> torch.nn.Module | None:
        """The watched model, while somebody else holds it."""
        return None if self._watched is None else self._watched()

    def _batch_checks(self, limits: ModelLimits, wrong: UnsafeStepSizes | None = None) -> BatchChecks:
        names = tuple(name for name in CHECKS if name in self.on)
        return BatchChecks(limits, names, wrong if "large_batch_gradients" in self.on else None)

    def _stopped(self, what: str, step: int | None, counted: int, batch: Any = None) -> NonFiniteError:
        """Return the error for a step that went wrong, and let go of its batches."""
        if step is None:
            step = self._batches or counted
        where, guilty = locate_non_finite(self._model, self._recorder.passes if self._recorder else ())
        kept = save_batch(guilty.named_arguments if batch is None and guilty else batch, self.folder, step)
        self.clear()
        return NonFiniteError(f"Step {step:,}: {what}; {where}. {kept}", where.remedy)


def warn_of_lstm(model: torch.nn.Module) -> None:
    """Warn of the first LSTM with dropout between its layers."""
    import torch

    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.LSTM) and layer.num_layers > 1 and layer.dropout > 0:
            where = name or "the model"
            what = f"The gradients of an LSTM with dropout ({where}) will be wrong: MPS forgets it on the way back"
            warn(f"{what} (pytorch#190056). {LSTM_REMEDY}")
            return


def validate_guards(guards: Guards | None) -> Guards:
    if guards is not None and not isinstance(guards, Guards):
        raise ConfigurationError(
            f"guards must be nb.Guards(...), got {describe_value(guards)}.",
            "Pass nb.Guards(disable=[...]) with the names of those to switch off.",
        )
    return guards or Guards()
