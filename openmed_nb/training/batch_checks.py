"""What a model takes, and what is wrong with a batch before it is moved to the device.

On MPS a label outside of the model's labels gives a loss near zero, and a token outside of its vocabulary a row of
zeros, without an error (keras#23664, pytorch#144824, #154235; labels are checked by torch after 2.13, pytorch#187559).
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from .._render.display import pluralize
from .._utils.text import describe_value
from .._utils.validation import as_integer, check_integer, invalid_value, suggest
from ..devices.moving import unwrap_model
from ..errors import ConfigurationError, InvalidBatchError
from ..models.files import max_positions, position_table

if TYPE_CHECKING:
    import torch

# What the loss functions of torch leave out (torch.nn.CrossEntropyLoss).
IGNORE_INDEX = -100
# The smallest number that each limit can have; the ignored label can be any.
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
    """How many there are of each; ``None`` where it is not known, which then is not checked.

    Attributes:
        labels: Labels; a label is a number from 0 to one less.
        tokens: Tokens of the vocabulary.
        type_vocab_size: Token types.
        positions: Positions.
        position_offset: The position of the first token: not 0 in models such as RoBERTa.
        padding: The token that fills rows up, where positions are counted without it.
        ignore_index: The label that is left out of the loss.
    """

    num_labels: int | None = None
    vocab_size: int | None = None
    type_vocab_size: int | None = None
    max_position_embeddings: int | None = None
    position_offset: int = 0
    pad_token_id: int | None = None
    ignore_index: int = IGNORE_INDEX


def infer_limits(model: torch.nn.Module, **given: int | None) -> ModelLimits:
    """Return what a model takes, learnt from it where the caller does not say; outside transformers, by known names."""
    import torch

    model = unwrap_model(model)
    for name in inner_model(model):
        model = unwrap_model(model.get_submodule(name))
    embeddings = ((name, one) for name, one in model.named_modules() if isinstance(one, torch.nn.Embedding))
    rows = {name.rpartition(".")[2]: one for name, one in embeddings}
    types = rows.get("token_type_embeddings")
    table = position_table(model)  # Where there is none, rows that are longer than the model was made for are no error.
    padding = positions = None
    first_position = 0
    if table is not None:
        padding = table.padding_idx  # RoBERTa counts from here, without what fills up.
        positions = table.weight.shape[0] - getattr(table, "offset", 0)  # Rows that OPT and BART skip by themselves.
        first_position = positions - (max_positions(model) or positions)
    learnt = ModelLimits(
        num_labels=label_count(model),
        vocab_size=token_count(model),
        type_vocab_size=None if types is None else types.num_embeddings,
        max_position_embeddings=positions,
        position_offset=first_position,
        pad_token_id=padding,
    )
    return replace(learnt, **validate_limits(given))


def validate_limits(given: Mapping[str, Any]) -> dict[str, int]:
    """Return the limits that a person gives, each with a known name and a value that can be one."""
    known = tuple(field.name for field in fields(ModelLimits))
    checked = {}
    for name, value in given.items():
        if name not in known:
            raise ConfigurationError(f"Guards take no limit {describe_value(name)}.", suggest(name, known))
        if value is None:
            continue
        limit = as_integer(value)
        if name in MIN_LIMITS:
            limit = check_integer(f"The limit {name}", value, MIN_LIMITS[name])
        if limit is None:
            raise invalid_value(f"The limit {name}", value, f"Pass a whole number, such as {IGNORE_INDEX}.")
        checked[name] = limit
    return checked


def inner_model(model: torch.nn.Module) -> tuple[str, ...]:
    """Return the name of the one model of transformers inside of another module, such as one of Lightning."""
    found: list[str] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if not inside and hasattr(module, "config") and hasattr(module, "get_input_embeddings"):
            if not name or module is unwrap_model(model):
                return ()
            found.append(name)
    return tuple(found) if len(found) == 1 else ()


def label_count(model: Any) -> int | None:
    """Return how many labels a model tells apart, ``None`` where its labels are something else or nothing says."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if head is not None and hasattr(head, "weight"):  # A language model's labels are tokens.
        return int(head.weight.shape[0])
    # Every configuration has num_labels, also where labels are places in a text, choices or numbers: the class decides.
    # Where somebody put a last layer of another size there, neither number is believed.
    if not any(kind.__name__.endswith("Classification") for kind in type(model).__mro__):
        return None
    count = getattr(getattr(model, "config", None), "num_labels", None)
    return count if count and count > 1 and count == head_width(model) else None  # One label is a regression.


def head_width(model: torch.nn.Module) -> int | None:
    """Return how many numbers the last linear layer gives."""
    import torch

    widths = [layer.out_features for layer in model.modules() if isinstance(layer, torch.nn.Linear)]
    return widths[-1] if widths else None


def token_count(model: Any) -> int | None:
    """Return how many tokens a model's input embeddings have."""
    import torch

    try:
        layer = getattr(model, "get_input_embeddings", lambda: None)()
    except NotImplementedError:  # transformers raises it for a model that it cannot answer for.
        return None
    return layer.num_embeddings if isinstance(layer, torch.nn.Embedding) else None


# From so many tokens on, a weight's gradient can be wrong on M1 and M2 (pytorch#177116, #193487).
REDUCTION_LIMIT = 32_767


@dataclass(frozen=True)
class UnsafeStepSizes:
    """The steps whose gradients a device can get wrong."""

    tokens: range  # So many tokens they have.
    what: str  # What goes wrong.


# On M1 and M2; torch 2.14 goes another way above 32,768 tokens, so that one size stays wrong (pytorch#183535, #195163).
BEFORE_2_14 = UnsafeStepSizes(
    range(REDUCTION_LIMIT, sys.maxsize),
    f"from {REDUCTION_LIMIT:,} on, an M1 or M2 under torch before 2.14 can make gradients 1,000 to 100,000 times too large "
    "while the loss looks right (pytorch#177116, #193487)",
)
SINCE_2_14 = UnsafeStepSizes(
    range(REDUCTION_LIMIT, REDUCTION_LIMIT + 1),
    "with exactly so many, an M1 or M2 can make gradients far too large while the loss looks right, also under torch 2.14 "
    "(pytorch#195163)",
)

# The names under which labels come, and embeddings in the place of tokens: numbers of rows, length and width.
LABELS = ("labels", "label")
EMBEDDED = "inputs_embeds"
LABELS_REMEDY = "Give the model as many labels as the data has (num_labels), or number the labels anew."
TOKENIZER_REMEDY = "Use the tokenizer of this model"
RESIZE_REMEDY = f"{TOKENIZER_REMEDY}, or resize its embeddings with model.resize_token_embeddings."
# Of each field with numbers from 0: the limit that they stay below, what they are, and what to do where they do not.
RANGES = {
    **dict.fromkeys(LABELS, ("num_labels", "labels", LABELS_REMEDY)),
    "input_ids": ("vocab_size", "token ids", RESIZE_REMEDY),
    "token_type_ids": ("type_vocab_size", "token types", f"{TOKENIZER_REMEDY}."),
    "position_ids": ("max_position_embeddings", "positions", "Leave position_ids out, or shorten the rows."),
}
# The fields that are checked.
FIELDS = (*RANGES, EMBEDDED)


@dataclass(frozen=True)
class BatchChecks:
    """The checks of a batch; a plain value, so that it can go to the worker processes of a loader."""

    limits: ModelLimits
    names: tuple[str, ...]  # Of those of CHECKS that are made.
    wrong: UnsafeStepSizes | None = None  # The steps that this device can get wrong, if any.

    def __call__(self, batch: Any, where: str = "") -> None:
        """Check a batch: a mapping of names to tensors or arrays, a pair of inputs and labels, or a list of mappings."""
        several = isinstance(batch, (list, tuple)) and all(isinstance(part, Mapping) for part in batch)
        for part in batch if several else [batch]:
            named = named_fields(part, where)
            for name in self.names:
                for field in CHECKS[name]:
                    check_range(field, named, self.limits, where)
            if "token_ids" in self.names:
                check_positions(named, self.limits, where)
            if self.wrong is not None:
                check_size(named, self.wrong, where)


def named_fields(batch: Any, where: str = "") -> dict[str, torch.Tensor]:
    """Return those fields of a batch that are checked: whole numbers, in any number of dimensions, and embeddings."""
    import torch

    inputs = batch[0] if isinstance(batch, (list, tuple)) and batch else batch
    given = dict(inputs) if isinstance(inputs, Mapping) else {}
    if inputs is not batch:
        given["labels"] = get_labels(batch)
    found = {}
    for name in FIELDS:
        if name not in given or not hasattr(given[name], "dtype"):
            continue
        try:
            values = to_dense_tensor(torch.as_tensor(given[name]))
        except (TypeError, ValueError):  # What torch raises for text and for objects.
            what = f"{where}{name} is an array of {given[name].dtype}, not of numbers."
            raise InvalidBatchError(what, "Give numbers, such as a label's place in the list of labels.") from None
        counts = not (values.is_floating_point() or values.is_complex() or values.dtype == torch.bool)
        if (counts or name == EMBEDDED) and values.numel() and not values.is_meta:
            found[name] = values
    return found


def to_dense_tensor(values: torch.Tensor) -> torch.Tensor:
    """Return values as a tensor that torch can compare: dense, with rows of one length, at least one, of signed numbers."""
    import torch

    if values.is_nested:
        values = torch.nested.to_padded_tensor(values, 0)
    elif values.layout != torch.strided:
        values = values.to_dense()
    if values.dtype in {torch.uint16, torch.uint32, torch.uint64}:  # Too large a number becomes a negative one.
        values = values.to(torch.int64)
    return torch.atleast_1d(values)


def get_labels(batch: Any) -> Any:
    """Return the labels of a batch: those of a mapping, or the second of a pair; ``None`` where there are none."""
    if isinstance(batch, Mapping):
        return next((batch[name] for name in LABELS if name in batch), None)
    return batch[1] if isinstance(batch, (list, tuple)) and len(batch) == 2 else None  # noqa: PLR2004 - a pair


def check_positions(fields: Mapping[str, torch.Tensor], limits: ModelLimits, where: str) -> None:
    """Refuse rows with more tokens than the model has positions."""
    if "input_ids" not in fields or "position_ids" in fields or limits.max_position_embeddings is None:
        return
    tokens = fields["input_ids"]
    allowed = limits.max_position_embeddings - limits.position_offset
    longest = tokens.shape[-1]
    if longest > allowed and limits.pad_token_id is not None:
        longest = int((tokens != limits.pad_token_id).sum(-1).max())
    if longest > allowed:
        what = f"{where}The longest row has {longest:,} tokens, and the model has {allowed:,} positions."
        raise InvalidBatchError(what, f"Shorten the rows: truncation=True, max_length={allowed}.")


def check_size(fields: Mapping[str, torch.Tensor], wrong: UnsafeStepSizes, where: str) -> None:
    """Refuse a batch with so many tokens, or embeddings of tokens, that gradients can be wrong on this device."""
    shape: tuple[int, ...] = ()
    if "input_ids" in fields:
        shape = fields["input_ids"].shape
    elif EMBEDDED in fields:
        shape = fields[EMBEDDED].shape[:-1]
    tokens = math.prod(shape) if shape else 0
    if tokens not in wrong.tokens:
        return
    length = shape[-1]
    what = f"{where}{tokens // length:,} x {length:,} = {tokens:,} tokens in one step: {wrong.what}."
    fitting = (REDUCTION_LIMIT - 1) // length
    if not fitting:
        raise InvalidBatchError(what, f"Cut the rows to less than {REDUCTION_LIMIT:,} tokens.")
    rows = f"{pluralize(fitting, 'row')} at this length ({fitting:,} x {length:,} = {fitting * length:,})"
    raise InvalidBatchError(what, f"Use batches of at most {rows} and accumulate gradients.")


# The guards that look at the numbers of a batch, each with its fields; ``large_batch_gradients`` is :func:`check_size`.
CHECKS = {"labels": LABELS, "token_ids": ("input_ids", "token_type_ids", "position_ids")}


def check_range(name: str, fields: Mapping[str, torch.Tensor], limits: ModelLimits, where: str) -> None:
    """Refuse values of a field that are not from 0 to one below its limit; good values cost one look at the extremes."""
    import torch

    limit, called, remedy = RANGES[name]
    count = getattr(limits, limit)
    if name not in fields or count is None:
        return
    seen = fields[name]
    left_out = ""
    if name in LABELS:
        seen = torch.where(seen == limits.ignore_index, 0, seen)
        left_out = f"; {limits.ignore_index} is left out"
    low, high = seen.aminmax()
    if low >= 0 and high < count:
        return
    bad = seen[(seen < 0) | (seen >= count)]
    low, high = map(int, bad.aminmax())
    verb = "is" if bad.numel() == 1 else "are"
    extremes = f"{low:,}" if low == high else f"from {low:,} to {high:,}"
    numbers = f"{bad.numel():,} of {seen.numel():,} {called}"
    raise InvalidBatchError(f"{where}{numbers} {verb} not between 0 and {count - 1:,} ({extremes}{left_out}).", remedy)


@dataclass(frozen=True)
class CheckedCollate:
    """Puts a batch together with the loader's own function, and then checks it; it is pickled where that can be."""

    collate: Callable[[Any], Any]
    checks: BatchChecks

    def __call__(self, samples: Any) -> Any:
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
    """A refused batch on its way out of a worker process, as JSON.

    In the main process a loader makes the error again from the text of its traceback alone (``ExceptionWrapper`` in
    torch/_utils.py); the class, given such a text, makes the error that it began as.
    """

    def __new__(cls, what: str, remedy: str | None = None) -> InvalidBatchError:  # type: ignore[misc]
        if remedy is not None:
            return super().__new__(cls, what, remedy)
        value = json.loads(what.rpartition(f"{cls.__name__}: ")[2])
        return InvalidBatchError(value["what"], value["remedy"])

    def __str__(self) -> str:
        return json.dumps({"what": self.message, "remedy": self.remedy})


def check_collation(loader: Any, checks: BatchChecks) -> Callable[[], None] | None:
    """Let a ``DataLoader``, also one that Accelerate made, check its batches, and return what puts its own function back.

    Iterators that it has made already go on without checks. Anything else is left as it is.
    """
    from torch.utils.data import DataLoader

    while "base_dataloader" in getattr(loader, "__dict__", ()):  # What Accelerate puts around the loader of torch.
        loader = loader.base_dataloader
    if not isinstance(loader, DataLoader):
        return None
    own = loader.collate_fn
    checked = loader.collate_fn = CheckedCollate(own, checks)

    def put_back() -> None:
        if loader.collate_fn is checked:  # Else someone changed it since, and it is theirs.
            loader.collate_fn = own

    return put_back
