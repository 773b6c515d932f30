"""Guards that stop training at silent numerical errors.

To add a guard, add its name, description and issues to ``GUARD_DESCRIPTIONS``. If it checks the values of a batch, add
its fields to ``RANGES`` in ``batch_checks.py``. If it checks a model, call it in ``Guards.watch``.
"""

from __future__ import annotations

import cmath
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from .._render.display import Displayable, Report, Table
from .._utils.text import describe_value, short_type_name
from .._utils.validation import suggest
from .._utils.warning import warn
from ..devices.backend import parse_release
from ..devices.machine import MachineInfo, apple_chip_generation, read_machine
from ..devices.moving import named_tensors, underlying_values, unwrap_model
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


# Maximum number of recorded sums. A pass of BERT large calls about 400 modules.
MAX_RECORDED_SUMS = 10_000
WEIGHT_REMEDY = (
    "Return to an earlier checkpoint, and train under torch.autograd.detect_anomaly(). It names the operation whose "
    "gradient is NaN."
)
OUTPUT_REMEDY = "Lower the learning rate, or compute in float32."
LOSS_REMEDY = "Check the inputs of the loss for an empty batch, labels that are all ignored, or a logarithm of zero."


class LossWatch:
    """Forward hooks that raise an error at the first loss that is NaN or infinite, in training with gradients.

    In a copy of the model the hooks are inactive.
    """

    def __init__(self, make_error: Callable[[str, str | None], NonFiniteError] | None) -> None:
        self._make_error = make_error
        # Sums of the outputs of modules, by the name of the module.
        self._sums: deque[tuple[str, torch.Tensor]] = deque(maxlen=MAX_RECORDED_SUMS)

    def __reduce__(self) -> tuple[type[LossWatch], tuple[None]]:
        return LossWatch, (None,)

    def watch(self, model: torch.nn.Module, called: Iterable[str]) -> list[Callable[[], None]]:
        """Check the losses that the named modules return; return the functions that remove the hooks."""
        removers = []
        for name, module in model.named_modules():
            hook = self.check_output if name in called else partial(self.record_output, name)
            removers.append(module.register_forward_hook(hook).remove)
        return removers

    def record_output(self, name: str, module: torch.nn.Module, _args: object, output: object) -> None:
        """Record the sums of the tensors that a module returns, without waiting for the device."""
        import torch

        if self._make_error is not None and module.training:
            for tensor in _iter_float_tensors(output):
                self._sums.append((name, tensor.sum(dtype=torch.float32)))

    def check_output(self, module: torch.nn.Module, _args: object, output: object) -> None:
        """Check the loss that a model returns. If it returns no loss, check its other tensors for NaN."""
        import torch

        if module.training and torch.is_grad_enabled():
            loss = get_loss(output)
            if loss is not None:
                self.check_loss(loss)
            elif any(bool(tensor.isnan().any()) for tensor in _iter_float_tensors(output)):
                self._fail("the output of the model is nan")
        self._sums.clear()

    def check_loss(self, loss: torch.Tensor) -> None:
        """Raise an error if a loss is NaN or infinite; this waits for the device."""
        number = loss.item()
        if not cmath.isfinite(number):
            self._fail(f"the loss is {number}")

    def _fail(self, problem: str) -> None:
        """Raise an error that names the first module whose output is NaN or infinite."""
        name = next((name for name, total in self._sums if not total.isfinite()), None)
        self._sums.clear()
        if self._make_error is not None:
            raise self._make_error(problem, name)


def get_loss(output: object) -> torch.Tensor | None:
    """Return the loss in the output of a model: its ``loss``, or its first value if that is a scalar."""
    import torch

    if isinstance(output, Mapping):  # A ModelOutput of transformers is a mapping.
        loss = output.get("loss")
    else:
        loss = output[0] if isinstance(output, (tuple, list)) and output else getattr(output, "loss", output)
    return loss if isinstance(loss, torch.Tensor) and loss.numel() == 1 else None


def _iter_float_tensors(value: object) -> Iterator[torch.Tensor]:
    """Yield the detached float tensors in a value; of sparse and nested tensors, yield the values."""
    for _, tensor in named_tensors(value):
        if tensor.is_floating_point() and not tensor.is_meta:
            yield underlying_values(tensor.detach())


# Description of each guard, with the issues that it is based on.
GUARD_DESCRIPTIONS = {
    "labels": ("raises on labels outside the model's label range", "keras#23664, pytorch#187559"),
    "token_ids": ("raises on tokens, types, positions and rows that have no embedding", "pytorch#154235, #123119"),
    "large_batch_gradients": ("raises on steps of 32,767 tokens or more on an M1 or M2", "pytorch#177116, #195163"),
    "nonfinite": ("raises at the first loss that is NaN or infinite", ""),
    "dropout_without_gradients": ("warns about a pass in train mode without gradients", "pytorch#184126"),
    "lstm_dropout": ("warns about an LSTM with dropout on MPS before torch 2.14", "pytorch#190056"),
}
GUARD_NAMES = tuple(GUARD_DESCRIPTIONS)

# Guards by watched model. Both are referenced weakly, or the model would never be released. A failed training leaves
# its guards here until the next training watches the model.
WATCHED_MODELS: weakref.WeakKeyDictionary[torch.nn.Module, Guards] = weakref.WeakKeyDictionary()


class Guards(Displayable):
    """Guards of one training, for Trainer callbacks, Accelerate and plain loops.

    ``print(Guards())`` lists them with descriptions and issues:

    - ``labels`` and ``token_ids``: On MPS, invalid values give a loss near zero and rows of zeros, without an error.
    - ``large_batch_gradients``: The number of tokens is rows times length of ``input_ids`` or ``inputs_embeds``. Other
      batches are not counted.
    - ``nonfinite``: The forward pass raises an error, which names the first module whose output is NaN or infinite. If a
      model returns no loss, its output is checked for NaN. Trainer omits such losses from its log, see
      ``logging_nan_inf_filter``.
    - ``dropout_without_gradients`` and ``lstm_dropout``.

    Args:
        disable: Names of guards to disable.
        limits: Limits of the model, if they cannot be inferred: attributes of
            :class:`~openmed_nb.training.batch_checks.ModelLimits`, such as ``num_labels=10``.

    Raises:
        ConfigurationError: If a guard or limit does not exist, or if a limit is not valid.

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

    def __init__(self, disable: Iterable[str] = (), **limits: int | None) -> None:
        names = disable if isinstance(disable, Iterable) and not isinstance(disable, str) else (disable,)
        disable = tuple(map(str, names))
        for name in disable:
            if name not in GUARD_NAMES:
                raise ConfigurationError(
                    f"{describe_value(name)} is not the name of a guard.", suggest(name, GUARD_NAMES)
                )
        self.on = tuple(name for name in GUARD_NAMES if name not in disable)
        self._limits = validate_limits(limits)
        self._checks = BatchChecks(ModelLimits(**self._limits), self.on)
        self._loss_watch: LossWatch | None = None
        self._watched: weakref.ref[torch.nn.Module] | None = None
        self._undo: list[Callable[[], None]] = []
        self._batches = 0

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
    ) -> Guards:
        """Infer the limits of a model and watch its forward passes until :meth:`unwatch`.

        A model that was watched before is unwatched first.

        Args:
            model: Model in training.
            device: Name of the device of the training, as torch spells it. If ``None``, use the device of the model.
            machine: Description of this machine. If ``None``, it is read on MPS.
            torch_release: Release of torch, such as ``(2, 13, 0)``. If ``None``, use the installed release.

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
        # A model inside another module may be called directly.
        called = ("", *find_inner_model(model))
        if "dropout_without_gradients" in self.on:
            watch = DropoutWatch(device)
            self._undo += [model.get_submodule(name).register_forward_pre_hook(watch).remove for name in called]
        if "nonfinite" in self.on:
            self._loss_watch = LossWatch(self._make_error)
            self._undo += self._loss_watch.watch(model, called)
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

    def unwatch(self) -> None:
        """Remove all hooks and release the model; checks of batches remain active."""
        while self._undo:
            self._undo.pop()()
        if self._model is not None:
            WATCHED_MODELS.pop(self._model, None)
        self._loss_watch = self._watched = None

    def __enter__(self) -> Guards:  # noqa: PYI034 - Self came with Python 3.11
        return self

    def __exit__(self, *_error: object) -> None:
        self.unwatch()

    @property
    def _model(self) -> torch.nn.Module | None:
        """Watched model, as long as it is referenced elsewhere."""
        return None if self._watched is None else self._watched()

    def _make_error(self, problem: str, name: str | None) -> NonFiniteError:
        """Return the error for a loss; ``name`` is the first module whose output is NaN or infinite."""
        step = f"Step {self._batches:,}: " if self._batches else ""
        if name is None or self._model is None:
            return NonFiniteError(f"{step}{problem}; the outputs of all modules are finite.", LOSS_REMEDY)
        weights = self._model.get_submodule(name).parameters(recurse=False)
        if not all(bool(weight.isfinite().all()) for weight in weights):
            return NonFiniteError(f"{step}{problem}; a weight of {name} is already NaN or infinite.", WEIGHT_REMEDY)
        return NonFiniteError(f"{step}{problem}; it first appears in the output of {name}.", OUTPUT_REMEDY)


def check_loss(guards: Guards, loss: torch.Tensor) -> None:
    """Raise an error if a loss that was computed outside the watched model is NaN or infinite."""
    if guards._loss_watch is not None:  # noqa: SLF001 - only the callback of Lightning receives such a loss
        guards._loss_watch.check_loss(loss)  # noqa: SLF001


def validate_guards(guards: Guards | None) -> Guards:
    if guards is not None and not isinstance(guards, Guards):
        raise ConfigurationError(
            f"guards must be nb.Guards(...), got {describe_value(guards)}.",
            "Pass nb.Guards(disable=[...]) with the names of the guards to disable.",
        )
    return guards or Guards()
