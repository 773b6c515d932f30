"""Guards that stop training at silent numerical errors.

On MPS, a label outside the model's label range gives a loss near zero, without an error. A token outside the vocabulary
gives a row of zeros (keras#23664, pytorch#144824, #154235; torch checks labels after 2.13, pytorch#187559).

To add a guard, add its name to ``GUARD_NAMES``. If it checks the values of a batch, add its fields to ``RANGES``. If it
checks a model, call it in ``Guards.watch``.
"""

from __future__ import annotations

import cmath
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from .._utils.text import short_type_name
from .._utils.validation import check_choice
from ..devices.moving import named_tensors, unwrap_model
from ..errors import ConfigurationError, InvalidBatchError, NonFiniteError
from ..models.files import find_position_embeddings, max_positions

if TYPE_CHECKING:
    import torch

Batch = TypeVar("Batch")

# Label that the loss functions of torch ignore (torch.nn.CrossEntropyLoss).
IGNORE_INDEX = -100
# Field names of labels.
LABELS = ("labels", "label")
LABELS_REMEDY = "Give the model as many labels as the data has (num_labels), or renumber the labels."
TOKENIZER_REMEDY = "Use the tokenizer of this model"
RESIZE_REMEDY = f"{TOKENIZER_REMEDY}, or resize its embeddings with model.resize_token_embeddings."
WEIGHT_REMEDY = (
    "Return to an earlier checkpoint, and train under torch.autograd.detect_anomaly(). It names the operation whose "
    "gradient is NaN."
)
OUTPUT_REMEDY = "Lower the learning rate, or compute in float32."
LOSS_REMEDY = "Check the inputs of the loss for an empty batch, labels that are all ignored, or a logarithm of zero."


@dataclass(frozen=True)
class ModelLimits:
    """Limits of a model; a limit of ``None`` is unknown and not checked.

    Attributes:
        num_labels: Number of labels; valid labels are from 0 to ``num_labels - 1``.
        vocab_size: Number of tokens in the vocabulary.
        type_vocab_size: Number of token types.
        max_tokens: Maximum number of tokens in a row; less than the number of positions in models such as RoBERTa.
        pad_token_id: Token that pads rows, if the model does not count it as a position.
    """

    num_labels: int | None = None
    vocab_size: int | None = None
    type_vocab_size: int | None = None
    max_tokens: int | None = None
    pad_token_id: int | None = None


def infer_limits(model: torch.nn.Module) -> ModelLimits:
    """Return the limits of a model; outside transformers, they are inferred from the usual names of layers."""
    import torch

    model = unwrap_model(model)
    for name in find_inner_model(model):
        model = unwrap_model(model.get_submodule(name))
    embeddings = {
        name.rpartition(".")[2]: layer for name, layer in model.named_modules() if isinstance(layer, torch.nn.Embedding)
    }
    token_types = embeddings.get("token_type_embeddings")
    # Without a table of positions, rows that are longer than in pretraining are not an error.
    table = find_position_embeddings(model)
    return ModelLimits(
        num_labels=_count_labels(model),
        vocab_size=_count_tokens(model),
        type_vocab_size=None if token_types is None else token_types.num_embeddings,
        max_tokens=None if table is None else max_positions(model),
        # RoBERTa counts positions from here and skips padding.
        pad_token_id=None if table is None else table.padding_idx,
    )


def find_inner_model(model: torch.nn.Module) -> tuple[str, ...]:
    """Return the name of the only model of transformers inside another module, such as a LightningModule."""
    names: list[str] = []
    for name, module in model.named_modules():
        is_nested = any(name.startswith(f"{outer}.") for outer in names)
        if not is_nested and hasattr(module, "config") and hasattr(module, "get_input_embeddings"):
            if not name or module is unwrap_model(model):
                return ()
            names.append(name)
    return tuple(names) if len(names) == 1 else ()


def _count_labels(model: torch.nn.Module) -> int | None:
    """Return the number of labels of a model, or ``None`` if it is unknown or the labels are not classes."""
    import torch

    head = getattr(model, "get_output_embeddings", lambda: None)()
    # The labels of a language model are tokens.
    if head is not None and hasattr(head, "weight"):
        return int(head.weight.shape[0])
    # Every configuration has num_labels, even if labels are positions in a text, choices or numbers. So the class
    # decides. If the last layer was replaced by one of another size, neither number is used.
    if not any(base.__name__.endswith("Classification") for base in type(model).__mro__):
        return None
    count = getattr(getattr(model, "config", None), "num_labels", None)
    widths = [layer.out_features for layer in model.modules() if isinstance(layer, torch.nn.Linear)]
    # A single label means regression.
    return count if count and count > 1 and widths[-1:] == [count] else None


def _count_tokens(model: torch.nn.Module) -> int | None:
    """Return the number of tokens in the input embeddings of a model."""
    import torch

    try:
        layer = getattr(model, "get_input_embeddings", lambda: None)()
    except NotImplementedError:  # transformers raises this error for models without input embeddings.
        return None
    return layer.num_embeddings if isinstance(layer, torch.nn.Embedding) else None


class FieldRange(NamedTuple):
    """Valid range of a field with integers from 0.

    Attributes:
        guard: Name of the guard that checks it.
        limit: Name of its limit in :class:`ModelLimits`.
        noun: Noun for its values in errors.
        remedy: Remedy for values out of range.
    """

    guard: str
    limit: str
    noun: str
    remedy: str


RANGES = {
    **dict.fromkeys(LABELS, FieldRange("labels", "num_labels", "labels", LABELS_REMEDY)),
    "input_ids": FieldRange("token_ids", "vocab_size", "token ids", RESIZE_REMEDY),
    "token_type_ids": FieldRange("token_ids", "type_vocab_size", "token types", f"{TOKENIZER_REMEDY}."),
}


def _get_integer_fields(batch: object) -> dict[str, torch.Tensor]:
    """Return the fields of a batch with integers that are checked, on the CPU."""
    import torch

    inputs = batch[0] if isinstance(batch, (list, tuple)) and batch else batch
    values = dict(inputs) if isinstance(inputs, Mapping) else {}
    if inputs is not batch:
        values["labels"] = get_labels(batch)
    fields = {}
    for name in RANGES:
        tensor = values.get(name)
        if not isinstance(tensor, torch.Tensor) or tensor.is_floating_point() or tensor.dtype == torch.bool:
            continue
        if tensor.numel():
            fields[name] = torch.atleast_1d(tensor.cpu().to(torch.int64))
    return fields


def get_labels(batch: object) -> object:
    """Return the labels of a mapping or the second item of a pair, or ``None`` if the batch has no labels."""
    if isinstance(batch, Mapping):
        return next((batch[name] for name in LABELS if name in batch), None)
    return batch[1] if isinstance(batch, (list, tuple)) and len(batch) == 2 else None  # noqa: PLR2004 - a pair


def _check_length(fields: Mapping[str, torch.Tensor], limits: ModelLimits, prefix: str) -> None:
    """Raise an error if a row has more tokens than the model has positions."""
    if "input_ids" not in fields or limits.max_tokens is None:
        return
    tokens = fields["input_ids"]
    longest = tokens.shape[-1]
    if longest > limits.max_tokens and limits.pad_token_id is not None:
        longest = int((tokens != limits.pad_token_id).sum(-1).max())
    if longest > limits.max_tokens:
        raise InvalidBatchError(
            f"{prefix}The longest row has {longest:,} tokens, and the model has {limits.max_tokens:,} positions.",
            f"Shorten the rows: truncation=True, max_length={limits.max_tokens}.",
        )


def _check_range(name: str, values: torch.Tensor, limits: ModelLimits, prefix: str) -> None:
    """Raise an error if a value of a field is not from 0 to its limit minus 1; valid values cost one minmax."""
    valid = RANGES[name]
    count = getattr(limits, valid.limit)
    if count is None:
        return
    exception = ""
    if name in LABELS:
        values = values.masked_fill(values == IGNORE_INDEX, 0)
        exception = f"; {IGNORE_INDEX} is ignored"
    low, high = values.aminmax()
    if low >= 0 and high < count:
        return
    invalid = values[(values < 0) | (values >= count)]
    low, high = invalid.aminmax()
    verb = "is" if invalid.numel() == 1 else "are"
    extremes = f"{int(low):,}" if low == high else f"from {int(low):,} to {int(high):,}"
    numbers = f"{invalid.numel():,} of {values.numel():,} {valid.noun}"
    raise InvalidBatchError(
        f"{prefix}{numbers} {verb} not between 0 and {count - 1:,} ({extremes}{exception}).", valid.remedy
    )


class ModelHook:
    """Hook of a model in training, which is called with its inputs or its output; in a copy of the model it is inactive."""

    def __init__(self, function: Callable[[Any], None] | None) -> None:
        self._function = function

    def __reduce__(self) -> tuple[type[ModelHook], tuple[None]]:
        return ModelHook, (None,)

    def __call__(self, model: torch.nn.Module, _args: object, value: object) -> None:
        if self._function is not None and model.training:
            self._function(value)


# Maximum number of recorded sums. A pass of BERT large calls about 400 modules.
MAX_RECORDED_SUMS = 10_000


def get_loss(output: object) -> torch.Tensor | None:
    """Return the loss in the output of a model: its ``loss``, or its first value if that is a scalar."""
    import torch

    if isinstance(output, Mapping):  # A ModelOutput of transformers is a mapping.
        loss = output.get("loss")
    else:
        loss = output[0] if isinstance(output, (tuple, list)) and output else getattr(output, "loss", output)
    return loss if isinstance(loss, torch.Tensor) and loss.numel() == 1 else None


def _iter_float_tensors(value: object) -> Iterator[torch.Tensor]:
    """Yield the detached float tensors in a value."""
    for _, tensor in named_tensors(value):
        if tensor.is_floating_point():
            yield tensor.detach()


GUARD_NAMES = ("labels", "token_ids", "nonfinite")

# Guards by watched model. Both are referenced weakly, or the model would never be released. A failed training leaves
# its guards here until the next training watches the model.
WATCHED_MODELS: weakref.WeakKeyDictionary[torch.nn.Module, Guards] = weakref.WeakKeyDictionary()


class Guards:
    """Guards of one training, for Trainer callbacks, Accelerate and plain loops.

    - ``labels`` and ``token_ids``: On MPS, invalid values give a loss near zero and rows of zeros, without an error. The
      limits are those of the watched model.
    - ``nonfinite``: The forward pass raises an error, which names the first module whose output is NaN or infinite. If a
      model returns no loss, its output is checked for NaN. Trainer omits such losses from its log, see
      ``logging_nan_inf_filter``.

    Args:
        disable: Names of guards to disable.

    Raises:
        ConfigurationError: If a guard does not exist.

    Example:
        >>> import openmed_nb as nb
        >>> import torch
        >>> tagger = nb.load_model("bundled_small", device="cpu")["model"]
        >>> with Guards().watch(tagger) as guards:
        ...     guards.check({"labels": torch.tensor([0, 3])}, step=7)
        Traceback (most recent call last):
        ...
        openmed_nb.errors.InvalidBatchError: Step 7: 1 of 2 labels is not between 0 and 2 (3; -100 is ignored). \
Give the model as many labels as the data has (num_labels), or renumber the labels.
    """

    def __init__(self, disable: Iterable[str] = ()) -> None:
        disabled = (disable,) if isinstance(disable, str) or not isinstance(disable, Iterable) else tuple(disable)
        for name in disabled:
            check_choice("disable", name, GUARD_NAMES)
        self.on = tuple(name for name in GUARD_NAMES if name not in disabled)
        self._limits = ModelLimits()
        self._watched: weakref.ref[torch.nn.Module] | None = None
        self._undo: list[Callable[[], None]] = []
        self._batches = 0
        # Sums of the outputs of modules in the current forward pass, by the name of the module.
        self._sums: deque[tuple[str, torch.Tensor]] = deque(maxlen=MAX_RECORDED_SUMS)

    def watch(self, model: torch.nn.Module, get_step: Callable[[], int] | None = None) -> Guards:
        """Infer the limits of a model and check the losses of its forward passes until :meth:`unwatch`.

        A model that was watched before is unwatched first.

        Args:
            model: Model in training.
            get_step: Function that returns the step number, for a loop that cannot call :meth:`check`. With it, each
                forward pass in training checks its inputs, which waits for the device.

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
        self._limits = infer_limits(model)
        self._watched = weakref.ref(model)
        # A model inside another module may be called directly.
        called = ("", *find_inner_model(model))
        for name, module in model.named_modules():
            if get_step is not None and name in called:
                check_inputs = ModelHook(lambda inputs: self.check(inputs, get_step()))
                self._undo.append(module.register_forward_pre_hook(check_inputs, with_kwargs=True).remove)
            if "nonfinite" in self.on:
                hook = ModelHook(self._check_output if name in called else partial(self._record_output, name))
                self._undo.append(module.register_forward_hook(hook).remove)
        return self

    def check(self, batch: object, step: int | None = None) -> None:
        """Check a batch before it is moved to the device.

        Args:
            batch: Mapping of names to tensors, or pair of inputs and labels.
            step: Step number for errors. If ``None``, batches are counted.

        Raises:
            InvalidBatchError: If labels or token ids are outside the limits of the model.
        """
        self._batches = self._batches + 1 if step is None else step
        prefix = f"Step {self._batches:,}: "
        fields = _get_integer_fields(batch)
        for name, values in fields.items():
            if RANGES[name].guard in self.on:
                _check_range(name, values, self._limits, prefix)
        if "token_ids" in self.on:
            _check_length(fields, self._limits, prefix)

    def checked(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches of a loader after checking each of them; their numbers continue from one loop to the next.

        A loader that Accelerate prepared moves its batches to the device before they are checked, so that each check
        waits for the device.
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
        self._watched = None

    def __enter__(self) -> Guards:  # noqa: PYI034 - Self came with Python 3.11
        return self

    def __exit__(self, *_error: object) -> None:
        self.unwatch()

    @property
    def _model(self) -> torch.nn.Module | None:
        """Watched model, as long as it is referenced elsewhere."""
        return None if self._watched is None else self._watched()

    def _record_output(self, name: str, output: object) -> None:
        """Record the sums of the tensors that a module returns, without waiting for the device."""
        import torch

        self._sums.extend((name, tensor.sum(dtype=torch.float32)) for tensor in _iter_float_tensors(output))

    def _check_output(self, output: object) -> None:
        """Check the loss that a model returns. If it returns no loss, check its other tensors for NaN."""
        import torch

        if torch.is_grad_enabled():
            loss = get_loss(output)
            if loss is not None:
                self._check_loss(loss)
            elif any(bool(tensor.isnan().any()) for tensor in _iter_float_tensors(output)):
                self._fail("the output of the model is nan")
        self._sums.clear()

    def _check_loss(self, loss: torch.Tensor) -> None:
        """Raise an error if a loss is NaN or infinite; this waits for the device."""
        number = loss.item()
        if "nonfinite" in self.on and not cmath.isfinite(number):
            self._fail(f"the loss is {number}")

    def _fail(self, problem: str) -> None:
        """Raise an error that names the first module whose output is NaN or infinite."""
        name = next((name for name, total in self._sums if not total.isfinite()), None)
        self._sums.clear()
        step = f"Step {self._batches:,}: " if self._batches else ""
        if name is None or self._model is None:
            raise NonFiniteError(f"{step}{problem}; the outputs of all modules are finite.", LOSS_REMEDY)
        weights = self._model.get_submodule(name).parameters(recurse=False)
        if not all(bool(weight.isfinite().all()) for weight in weights):
            raise NonFiniteError(f"{step}{problem}; a weight of {name} is already NaN or infinite.", WEIGHT_REMEDY)
        raise NonFiniteError(f"{step}{problem}; it first appears in the output of {name}.", OUTPUT_REMEDY)
