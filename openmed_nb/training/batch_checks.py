"""Limits of a model, and checks of a batch before it is moved to the device.

On MPS, a label outside the model's label range gives a loss near zero, without an error. A token outside the vocabulary
gives a row of zeros (keras#23664, pytorch#144824, #154235; torch checks labels after 2.13, pytorch#187559).
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from .._render.display import pluralize
from .._utils.text import describe_value
from .._utils.validation import as_integer, check_integer, invalid_value, suggest
from ..devices.moving import unwrap_model
from ..errors import ConfigurationError, InvalidBatchError
from ..models.files import find_position_embeddings, max_positions

if TYPE_CHECKING:
    import torch

# Label that the loss functions of torch ignore (torch.nn.CrossEntropyLoss).
IGNORE_INDEX = -100
# Minimum value of each limit; the ignored label can be any integer.
MIN_LIMITS = {
    "num_labels": 1,
    "vocab_size": 1,
    "type_vocab_size": 1,
    "max_position_embeddings": 1,
    "position_offset": 0,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class ModelLimits:
    """Limits of a model; a limit of ``None`` is unknown and not checked.

    Attributes:
        num_labels: Number of labels; valid labels are from 0 to ``num_labels - 1``.
        vocab_size: Number of tokens in the vocabulary.
        type_vocab_size: Number of token types.
        max_position_embeddings: Number of positions.
        position_offset: Position of the first token; not 0 in models such as RoBERTa.
        pad_token_id: Token that pads rows, if the model does not count it as a position.
        ignore_index: Label that the loss ignores.
    """

    num_labels: int | None = None
    vocab_size: int | None = None
    type_vocab_size: int | None = None
    max_position_embeddings: int | None = None
    position_offset: int = 0
    pad_token_id: int | None = None
    ignore_index: int = IGNORE_INDEX


def infer_limits(model: torch.nn.Module, **limits: int | None) -> ModelLimits:
    """Return the limits of a model, with the values of the caller in place of inferred ones.

    Outside transformers, the limits are inferred from the usual names of layers.
    """
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
    padding = positions = None
    first_position = 0
    if table is not None:
        padding = table.padding_idx  # RoBERTa counts positions from here and skips padding.
        positions = table.weight.shape[0] - getattr(table, "offset", 0)  # OPT and BART skip the first rows.
        first_position = positions - (max_positions(model) or positions)
    inferred = ModelLimits(
        num_labels=_count_labels(model),
        vocab_size=count_tokens(model),
        type_vocab_size=None if token_types is None else token_types.num_embeddings,
        max_position_embeddings=positions,
        position_offset=first_position,
        pad_token_id=padding,
    )
    return replace(inferred, **validate_limits(limits))


def validate_limits(limits: Mapping[str, object]) -> dict[str, int]:
    """Validate and normalize the limits that the user passes."""
    names = tuple(field.name for field in fields(ModelLimits))
    validated = {}
    for name, value in limits.items():
        if name not in names:
            raise ConfigurationError(f"{describe_value(name)} is not a limit of Guards.", suggest(name, names))
        if value is None:
            continue
        limit = as_integer(value)
        if name in MIN_LIMITS:
            limit = check_integer(f"the limit {name}", value, MIN_LIMITS[name])
        if limit is None:
            raise invalid_value(f"the limit {name}", value, f"Pass an integer, such as {IGNORE_INDEX}.")
        validated[name] = limit
    return validated


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
    head = getattr(model, "get_output_embeddings", lambda: None)()
    # The labels of a language model are tokens.
    if head is not None and hasattr(head, "weight"):
        return int(head.weight.shape[0])
    # Every configuration has num_labels, even if labels are positions in a text, choices or numbers. So the class
    # decides. If the last layer was replaced by one of another size, neither number is used.
    if not any(base.__name__.endswith("Classification") for base in type(model).__mro__):
        return None
    count = getattr(getattr(model, "config", None), "num_labels", None)
    return count if count and count > 1 and count == get_head_width(model) else None  # A single label means regression.


def get_head_width(model: torch.nn.Module) -> int | None:
    """Return the output size of the last linear layer."""
    import torch

    widths = [layer.out_features for layer in model.modules() if isinstance(layer, torch.nn.Linear)]
    return widths[-1] if widths else None


def count_tokens(model: torch.nn.Module) -> int | None:
    """Return the number of tokens in the input embeddings of a model."""
    import torch

    try:
        layer = getattr(model, "get_input_embeddings", lambda: None)()
    except NotImplementedError:  # transformers raises this error for models without input embeddings.
        return None
    return layer.num_embeddings if isinstance(layer, torch.nn.Embedding) else None


# From this number of tokens, the gradient of a weight can be wrong on M1 and M2 (pytorch#177116, #193487).
REDUCTION_LIMIT = 32_767


@dataclass(frozen=True)
class UnsafeStepSizes:
    """Sizes of a step for which a device can compute wrong gradients.

    Attributes:
        tokens: Range of the number of tokens in a step.
        description: Description of the problem.
    """

    tokens: range
    description: str


# On M1 and M2. torch 2.14 uses another kernel above 32,768 tokens, so that a single size remains wrong (pytorch#183535,
# #195163).
BEFORE_2_14 = UnsafeStepSizes(
    range(REDUCTION_LIMIT, sys.maxsize),
    f"from {REDUCTION_LIMIT:,} tokens, an M1 or M2 with torch before 2.14 can compute gradients that are 1,000 to 100,000 "
    "times too large, while the loss looks correct (pytorch#177116, #193487)",
)
SINCE_2_14 = UnsafeStepSizes(
    range(REDUCTION_LIMIT, REDUCTION_LIMIT + 1),
    "with exactly this number of tokens, an M1 or M2 can compute gradients that are far too large, while the loss looks "
    "correct, even with torch 2.14 (pytorch#195163)",
)

# Field names of labels, and of embeddings that replace tokens, of shape ``(rows, length, width)``.
LABELS = ("labels", "label")
EMBEDDED = "inputs_embeds"
LABELS_REMEDY = "Give the model as many labels as the data has (num_labels), or renumber the labels."
TOKENIZER_REMEDY = "Use the tokenizer of this model"
RESIZE_REMEDY = f"{TOKENIZER_REMEDY}, or resize its embeddings with model.resize_token_embeddings."


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
    "position_ids": FieldRange(
        "token_ids", "max_position_embeddings", "positions", "Omit position_ids, or shorten the rows."
    ),
}
# Fields that are checked.
FIELDS = (*RANGES, EMBEDDED)


@dataclass(frozen=True)
class BatchChecks:
    """Checks of a batch; picklable, so that the worker processes of a loader can run them.

    Attributes:
        limits: Limits of the model.
        guards: Names of the enabled guards.
        unsafe_sizes: Step sizes for which this device can compute wrong gradients, if any.
    """

    limits: ModelLimits
    guards: tuple[str, ...]
    unsafe_sizes: UnsafeStepSizes | None = None

    def __call__(self, batch: object, prefix: str = "") -> None:
        """Check a mapping of names to tensors or arrays, a pair of inputs and labels, or a list of mappings."""
        items: Sequence[object] = [batch]
        if isinstance(batch, (list, tuple)) and all(isinstance(item, Mapping) for item in batch):
            items = batch
        for item in items:
            fields = _get_checked_fields(item, prefix)
            for name, values in fields.items():
                if name in RANGES and RANGES[name].guard in self.guards:
                    _check_range(name, values, self.limits, prefix)
            if "token_ids" in self.guards:
                _check_positions(fields, self.limits, prefix)
            if "large_batch_gradients" in self.guards and self.unsafe_sizes is not None:
                _check_size(fields, self.unsafe_sizes, prefix)


def _get_checked_fields(batch: object, prefix: str) -> dict[str, torch.Tensor]:
    """Return the fields of a batch that are checked: integers of any shape, and embeddings."""
    import torch

    inputs = batch[0] if isinstance(batch, (list, tuple)) and batch else batch
    raw_fields = dict(inputs) if isinstance(inputs, Mapping) else {}
    if inputs is not batch:
        raw_fields["labels"] = get_labels(batch)
    fields = {}
    for name in FIELDS:
        if name not in raw_fields or not hasattr(raw_fields[name], "dtype"):
            continue
        try:
            values = _to_dense_tensor(torch.as_tensor(raw_fields[name]))
        except (TypeError, ValueError):  # torch raises these for text and for objects.
            message = f"{prefix}{name} is an array of {raw_fields[name].dtype}, not of numbers."
            raise InvalidBatchError(message, "Pass numbers, such as the index of each label.") from None
        is_integer = not (values.is_floating_point() or values.is_complex() or values.dtype == torch.bool)
        if (is_integer or name == EMBEDDED) and values.numel() and not values.is_meta:
            fields[name] = values
    return fields


def _to_dense_tensor(values: torch.Tensor) -> torch.Tensor:
    """Return values as a dense tensor of signed numbers with at least one dimension, padded if it is nested."""
    import torch

    if values.is_nested:
        values = torch.nested.to_padded_tensor(values, 0)
    elif values.layout != torch.strided:
        values = values.to_dense()
    if values.dtype in {torch.uint16, torch.uint32, torch.uint64}:  # Values that are too large become negative.
        values = values.to(torch.int64)
    return values.reshape(1) if values.ndim == 0 else values


def get_labels(batch: object) -> object:
    """Return the labels of a mapping or the second item of a pair, or ``None`` if the batch has no labels."""
    if isinstance(batch, Mapping):
        return next((batch[name] for name in LABELS if name in batch), None)
    return batch[1] if isinstance(batch, (list, tuple)) and len(batch) == 2 else None  # noqa: PLR2004 - a pair


def _check_positions(fields: Mapping[str, torch.Tensor], limits: ModelLimits, prefix: str) -> None:
    """Raise an error if a row has more tokens than the model has positions."""
    if "input_ids" not in fields or "position_ids" in fields or limits.max_position_embeddings is None:
        return
    tokens = fields["input_ids"]
    allowed = limits.max_position_embeddings - limits.position_offset
    longest = tokens.shape[-1]
    if longest > allowed and limits.pad_token_id is not None:
        longest = int((tokens != limits.pad_token_id).sum(-1).max())
    if longest > allowed:
        message = f"{prefix}The longest row has {longest:,} tokens, and the model has {allowed:,} positions."
        raise InvalidBatchError(message, f"Shorten the rows: truncation=True, max_length={allowed}.")


def _check_size(fields: Mapping[str, torch.Tensor], unsafe_sizes: UnsafeStepSizes, prefix: str) -> None:
    """Raise an error if the number of tokens, or of embeddings, can give wrong gradients on this device."""
    shape: tuple[int, ...] = ()
    if "input_ids" in fields:
        shape = fields["input_ids"].shape
    elif EMBEDDED in fields:
        shape = fields[EMBEDDED].shape[:-1]
    tokens = math.prod(shape) if shape else 0
    if tokens not in unsafe_sizes.tokens:
        return
    length = shape[-1]
    message = f"{prefix}{tokens // length:,} x {length:,} = {tokens:,} tokens in one step: {unsafe_sizes.description}."
    max_rows = (REDUCTION_LIMIT - 1) // length
    if not max_rows:
        raise InvalidBatchError(message, f"Shorten the rows to less than {REDUCTION_LIMIT:,} tokens.")
    rows = f"{pluralize(max_rows, 'row')} at this length ({max_rows:,} x {length:,} = {max_rows * length:,})"
    raise InvalidBatchError(message, f"Use batches of at most {rows} and accumulate gradients.")


def _check_range(name: str, values: torch.Tensor, limits: ModelLimits, prefix: str) -> None:
    """Raise an error if a value of a field is not from 0 to its limit minus 1; valid values cost one minmax."""
    import torch

    valid = RANGES[name]
    count = getattr(limits, valid.limit)
    if count is None:
        return
    exception = ""
    if name in LABELS:
        values = torch.where(values == limits.ignore_index, 0, values)
        exception = f"; {limits.ignore_index} is ignored"
    low, high = values.aminmax()
    if low >= 0 and high < count:
        return
    invalid = values[(values < 0) | (values >= count)]
    low, high = invalid.aminmax()
    verb = "is" if invalid.numel() == 1 else "are"
    extremes = f"{int(low):,}" if low == high else f"from {int(low):,} to {int(high):,}"
    numbers = f"{invalid.numel():,} of {values.numel():,} {valid.noun}"
    message = f"{prefix}{numbers} {verb} not between 0 and {count - 1:,} ({extremes}{exception})."
    raise InvalidBatchError(message, valid.remedy)


@dataclass(frozen=True)
class CheckedCollate:
    """Collate function of a loader, followed by the checks; picklable if the collate function is."""

    collate: Callable[[Any], object]
    checks: BatchChecks

    def __call__(self, samples: object) -> object:
        from torch.utils.data import get_worker_info

        batch = self.collate(samples)
        try:
            self.checks(batch)
        except InvalidBatchError as error:
            if get_worker_info() is None:
                raise
            raise WorkerInvalidBatchError(error.message, error.remedy) from None
        return batch


class WorkerInvalidBatchError(InvalidBatchError):
    """Invalid batch in a worker process, with its text as JSON.

    In the main process, torch recreates the error from the text of its traceback alone (``ExceptionWrapper`` in
    torch/_utils.py). Given such a text, this class returns the original error.
    """

    def __new__(cls, message: str, remedy: str | None = None) -> InvalidBatchError:  # type: ignore[misc]
        if remedy is not None:
            return super().__new__(cls, message, remedy)
        fields = json.loads(message.rpartition(f"{cls.__name__}: ")[2])
        return InvalidBatchError(fields["message"], fields["remedy"])

    def __str__(self) -> str:
        return json.dumps({"message": self.message, "remedy": self.remedy})


def check_collation(loader: object, checks: BatchChecks) -> Callable[[], None] | None:
    """Let a ``DataLoader`` check its batches, and return a function that restores its collate function.

    Loaders that Accelerate prepared are supported. Existing iterators are not checked. Any other value is left
    unchanged.
    """
    from torch.utils.data import DataLoader

    while "base_dataloader" in getattr(loader, "__dict__", ()):  # Accelerate wraps the loader of torch.
        loader = vars(loader)["base_dataloader"]
    if not isinstance(loader, DataLoader):
        return None
    original = loader.collate_fn
    checked = CheckedCollate(original, checks)
    loader.collate_fn = checked

    def restore() -> None:
        if loader.collate_fn is checked:  # Otherwise the user has replaced it since.
            loader.collate_fn = original

    return restore
