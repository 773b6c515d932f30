"""Guards that stop training at silent numerical errors.

To add a guard, add its name, description and issues to ``GUARD_DESCRIPTIONS``. If it checks the values of a batch, add
its fields to ``RANGES`` in ``batch_checks.py``. If it checks a model, call it in ``Guards.watch``.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from .._render.display import Displayable, Report, Table
from .._utils.text import describe_value, short_type_name
from .._utils.validation import check_path, invalid_type, suggest
from .._utils.warning import warn
from ..devices.backend import TENSOR_LOCK, parse_release
from ..devices.machine import MachineInfo, apple_chip_generation, read_machine
from ..devices.moving import unwrap_model
from ..devices.registry import get_device
from ..errors import ConfigurationError, NonFiniteError
from .batch_checks import (
    BEFORE_2_14,
    SINCE_2_14,
    BatchChecks,
    ModelLimits,
    check_collation,
    find_inner_model,
    infer_limits,
    validate_limits,
)
from .nonfinite import ForwardRecorder, all_finite, get_gradients, is_finite, locate_non_finite, save_batch

if TYPE_CHECKING:
    import torch

Batch = TypeVar("Batch")

# First release of torch in which MPS computes correct gradients for an LSTM with dropout (pytorch#190056). On M1 and
# M2, it also fixes the gradients of steps with many tokens (pytorch#177116, #193487), except for a single size.
LSTM_FIXED_IN = (2, 14)
LSTM_REMEDY = "Set its dropout to 0, put nn.Dropout between LSTMs of one layer, or use torch 2.14."
# Names of the dropout of attention in the configurations of transformers.
ATTENTION_DROPOUT = ("attention_probs_dropout_prob", "attention_dropout", "attn_pdrop")


class DropoutWatch:
    """Forward pre-hook that warns once about a pass in train mode with dropout but without gradients.

    In a copy of the model the hook is inactive.
    """

    def __init__(self, device: str | None) -> None:
        self.device = device

    def __reduce__(self) -> tuple[type[DropoutWatch], tuple[None]]:
        return DropoutWatch, (None,)

    def __call__(self, module: torch.nn.Module, _args: object) -> None:
        import torch
        from torch.nn.modules.dropout import _DropoutNd

        if self.device is None or not module.training or torch.is_grad_enabled():
            return
        config = getattr(unwrap_model(module), "config", None)
        in_attention = any(getattr(config, name, None) for name in ATTENTION_DROPOUT)
        in_layers = (layer.p > 0 for layer in module.modules() if isinstance(layer, _DropoutNd) and layer.training)
        if not in_attention and not any(in_layers):
            return
        message = "A forward pass ran in train mode with dropout but without gradients; its results are random."
        opt_out = "use Guards(disable=('dropout_without_gradients',))"
        sdpa = getattr(config, "_attn_implementation", None) == "sdpa"
        if in_attention and sdpa and not get_device(self.device).sdpa_supports_dropout:
            message += (  # Attention.mm
                " On MPS attention raises an error here: scaled_dot_product_attention for MPS does not support dropout."
            )
            opt_out = "load the model with attn_implementation='eager'"
        self.device = None
        advice = f"{message} Call model.eval() first; if this is intended, {opt_out}."
        warn(advice)


# Description of each guard, with the issues that it is based on.
GUARD_DESCRIPTIONS = {
    "labels": ("raises on labels outside the model's label range", "keras#23664, pytorch#187559"),
    "token_ids": ("raises on tokens, types, positions and rows that have no embedding", "pytorch#154235, #123119"),
    "large_batch_gradients": ("raises on steps of 32,767 tokens or more on an M1 or M2", "pytorch#177116, #195163"),
    "nonfinite": ("raises if a loss or a gradient is NaN or infinite", ""),
    "dropout_without_gradients": ("warns about a pass in train mode without gradients", "pytorch#184126"),
    "lstm_dropout": ("warns about an LSTM with dropout on MPS before torch 2.14", "pytorch#190056"),
}
GUARD_NAMES = tuple(GUARD_DESCRIPTIONS)

# Directory for batches that produced NaN or infinity, in the current directory.
FOLDER = "openmed_nonfinite"
# Maximum number of consecutive steps that a GradScaler may skip. Its initial scale of 65,536 reaches 1 after 16
# halvings, so 20 skipped steps indicate a real problem.
MAX_SKIPPED_STEPS = 20

# Guards by watched model. Both are referenced weakly, or the model would never be released. A failed training leaves
# its guards here until the next training watches the model.
WATCHED_MODELS: weakref.WeakKeyDictionary[torch.nn.Module, Guards] = weakref.WeakKeyDictionary()


class Guards(Displayable):
    """Guards of one training, for Trainer callbacks, Accelerate and plain loops.

    ``print(Guards())`` lists them with descriptions and issues:

    - ``labels`` and ``token_ids``: On MPS, invalid values give a loss near zero and rows of zeros, without an error.
    - ``large_batch_gradients``: The number of tokens is rows times length of ``input_ids`` or ``inputs_embeds``. Other
      batches are not counted.
    - ``nonfinite``: The error names the layer, and the batch is saved. Trainer omits such losses from its log, see
      ``logging_nan_inf_filter``.
    - ``dropout_without_gradients`` and ``lstm_dropout``.

    Args:
        disable: Names of guards to disable.
        folder: Directory for batches that produced NaN or infinity. They contain the inputs of the model.
        limits: Limits of the model, if they cannot be inferred: attributes of
            :class:`~openmed_nb.training.batch_checks.ModelLimits`, such as ``num_labels=10``.

    Raises:
        ConfigurationError: If a guard or limit does not exist, or if the directory or a limit is not valid.

    Example:
        >>> import torch
        >>> tagger = torch.nn.Linear(2, 3)
        >>> with Guards(num_labels=3).watch(tagger, device="cpu") as guards:
        ...     guards.check({"labels": torch.tensor([0, 3])}, step=7)
        Traceback (most recent call last):
        ...
        openmed_nb.errors.InvalidBatchError: Step 7: 1 of 2 labels is not between 0 and 2 (3; -100 is ignored). \
Give the model as many labels as the data has (num_labels), or renumber the labels.
    """

    JSON_PROPERTIES = ("on",)

    def __init__(self, disable: Iterable[str] = (), folder: str | Path = FOLDER, **limits: int | None) -> None:
        names = disable if isinstance(disable, Iterable) and not isinstance(disable, str) else (disable,)
        disable = tuple(map(str, names))
        for name in disable:
            if name not in GUARD_NAMES:
                raise ConfigurationError(
                    f"{describe_value(name)} is not the name of a guard.", suggest(name, GUARD_NAMES)
                )
        self.on = tuple(name for name in GUARD_NAMES if name not in disable)
        self.folder = check_path(folder, "folder")
        self._limits = validate_limits(limits)
        self._checks = BatchChecks(ModelLimits(**self._limits), self.on)
        self._recorder: ForwardRecorder | None = None
        self._watched: weakref.ref[torch.nn.Module] | None = None
        self._undo: list[Callable[[], None]] = []
        self._scaled = False
        self._skipped = 0
        self._batches = 0
        self._steps = 0

    def to_report(self) -> Report:
        """Return the enabled guards with their descriptions and issues."""
        rows = tuple((name, *GUARD_DESCRIPTIONS[name]) for name in self.on)
        off = ", ".join(name for name in GUARD_NAMES if name not in self.on)
        sentences = (f"Off: {off}.",) if off else ()
        table = Table("", ("guard", "description", "issue"), rows)
        html_sentences = (f"{len(rows)} of {len(GUARD_NAMES)} guards are on", *sentences)
        return Report(f"Guards: {len(rows)} on", sentences, (table,), html_sentences=html_sentences)

    def watch(
        self,
        model: torch.nn.Module,
        device: str | None = None,
        machine: MachineInfo | None = None,
        torch_release: tuple[int, ...] | None = None,
        scaled: bool = False,
    ) -> Guards:
        """Infer the limits of a model and watch its forward passes until :meth:`unwatch`.

        A model that was watched before is unwatched first.

        Args:
            model: Model in training.
            device: Name of the device of the training, as torch spells it. If ``None``, use the device of the model.
            machine: Description of this machine. If ``None``, it is read on MPS.
            torch_release: Release of torch, such as ``(2, 13, 0)``. If ``None``, use the installed release.
            scaled: Whether a ``GradScaler`` is in use, which skips steps with non-finite gradients.

        Returns:
            The guards, for a ``with`` statement.

        Raises:
            ConfigurationError: If ``model`` is not a ``torch.nn.Module``.
        """
        import torch

        if not isinstance(model, torch.nn.Module):
            raise ConfigurationError(
                f"Guards cannot watch a value of type {short_type_name(model)}.",
                "Pass the model itself, a torch.nn.Module.",
            )
        self.unwatch()
        if model in WATCHED_MODELS:
            WATCHED_MODELS[model].unwatch()
        WATCHED_MODELS[model] = self
        device = device or next((str(parameter.device) for parameter in model.parameters()), "cpu")
        unsafe_sizes = None
        if get_device(device).has_lstm_defects:
            is_fixed = (torch_release or parse_release(torch.__version__))[:2] >= LSTM_FIXED_IN
            # An unknown chip is assumed to be safe.
            if apple_chip_generation(machine or read_machine()) in (1, 2):
                unsafe_sizes = SINCE_2_14 if is_fixed else BEFORE_2_14
            if not is_fixed and "lstm_dropout" in self.on:
                layers = (
                    name or "the model"
                    for name, layer in model.named_modules()
                    if isinstance(layer, torch.nn.LSTM) and layer.num_layers > 1 and layer.dropout > 0
                )
                if layer_name := next(layers, None):
                    message = f"The gradients of an LSTM with dropout ({layer_name}) will be wrong: MPS ignores the dropout in the backward pass"
                    warn(f"{message} (pytorch#190056). {LSTM_REMEDY}")
        self._checks = BatchChecks(infer_limits(model, **self._limits), self.on, unsafe_sizes)
        self._watched = weakref.ref(model)
        self._scaled = scaled
        self._skipped = 0
        # A model inside another module may be called directly.
        called = ("", *find_inner_model(model))
        if "dropout_without_gradients" in self.on:
            watch = DropoutWatch(device)
            self._undo += [model.get_submodule(name).register_forward_pre_hook(watch).remove for name in called]
        if "nonfinite" in self.on:
            self._recorder = ForwardRecorder(device)
            self._undo += self._recorder.watch(model, called)
        return self

    def watch_loader(self, loader: object) -> bool:
        """Let a loader check its batches when it collates them, even in worker processes, until :meth:`unwatch`.

        Returns:
            Whether the loader is checked; ``False`` for a value that is not a ``DataLoader``, which is left unchanged.
        """
        if undo := check_collation(loader, self._checks):
            self._undo.append(undo)
        return undo is not None

    def check(self, batch: object, step: int | None = None) -> None:
        """Check a batch before it is moved to the device.

        Args:
            batch: Mapping of names to tensors or arrays, or pair of inputs and labels.
            step: Step number for errors. If ``None``, batches are counted.

        Raises:
            InvalidBatchError: If labels or token ids are outside the limits of the model, or if the batch has too many
                tokens for an M1 or M2.
        """
        self._batches = self._batches + 1 if step is None else step
        self._checks(batch, f"Step {self._batches:,}: ")

    def checked(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches of a loader after checking each of them; their numbers continue from one loop to the next.

        A loader that Accelerate prepared moves its batches to the device before they are checked here. Use
        :meth:`watch_loader` for it instead.
        """
        for batch in loader:
            self.check(batch)
            yield batch

    def check_loss(self, loss: torch.Tensor | float, step: int | None = None, batch: object = None) -> None:
        """Raise an error if a loss is NaN or infinite; this waits for the device.

        Args:
            loss: Loss.
            step: Step number for the error. If ``None``, use the number of the last checked batch.
            batch: Batch that the loss was computed from, to be saved if the model was not watched.

        Raises:
            NonFiniteError: If the loss is not finite.
        """
        number = None
        with suppress(TypeError, ValueError, RuntimeError, OverflowError):
            number = float(loss.detach() if hasattr(loss, "detach") else loss)
        # Raised outside the handler, because the Python error quotes the value.
        if number is None:
            raise invalid_type("loss", loss, "Pass a number, or a tensor with one.")
        if "nonfinite" in self.on and not math.isfinite(number):
            raise self._make_error(f"the loss is {number}", step, self._steps + 1, batch)

    def after_backward(self, model: torch.nn.Module | None = None, step: int | None = None) -> None:
        """Raise an error if a loss or gradient of this step is NaN or infinite; call it before the optimizer step.

        It reads every gradient and waits for the device once.

        Args:
            model: Model. If ``None``, use the watched model.
            step: Step number for the error. If ``None``, use the number of the last checked batch, or of this call if
                no batch was checked.

        Raises:
            NonFiniteError: If a value is not finite. The error names the step, the layer and the file of the batch.
        """
        model = self._model if model is None else model
        if "nonfinite" not in self.on or model is None:
            return
        self._steps += 1
        losses = list(self._recorder.losses) if self._recorder else []
        gradients = get_gradients(model.parameters())
        with TENSOR_LOCK:
            if all_finite(gradients, losses) or (is_finite(losses) and is_finite(gradients)):
                self._skipped = 0
            elif not is_finite(losses):
                raise self._make_error("the loss is NaN or infinite", step, self._steps)
            elif not self._scaled or self._skipped == MAX_SKIPPED_STEPS:
                raise self._make_error("a gradient is NaN or infinite", step, self._steps)
            else:
                self._skipped += 1
        self.clear()

    def clear(self) -> None:
        """Release the recorded batches of this step."""
        if self._recorder is not None:
            self._recorder.clear()

    def unwatch(self) -> None:
        """Remove all hooks and release the model; checks of batches remain active."""
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
        """Watched model, as long as it is referenced elsewhere."""
        return None if self._watched is None else self._watched()

    def _make_error(self, problem: str, step: int | None, call_number: int, batch: object = None) -> NonFiniteError:
        """Return the error for a failed step, after saving its batch and releasing the recorded ones."""
        if step is None:
            step = self._batches or call_number
        origin, failing_pass = locate_non_finite(self._model, self._recorder.passes if self._recorder else ())
        saved = save_batch(failing_pass.named_arguments if batch is None and failing_pass else batch, self.folder, step)
        self.clear()
        return NonFiniteError(f"Step {step:,}: {problem}; {origin}. {saved}", origin.remedy)


def validate_guards(guards: Guards | None) -> Guards:
    if guards is not None and not isinstance(guards, Guards):
        raise ConfigurationError(
            f"guards must be nb.Guards(...), got {describe_value(guards)}.",
            "Pass nb.Guards(disable=[...]) with the names of the guards to disable.",
        )
    return guards or Guards()
