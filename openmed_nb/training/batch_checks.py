"""What is wrong with a batch, before it is moved to the device.

Looking at a batch before it is moved to the device, where a wrong number would give wrong results without an error.

On MPS a label outside of the model's labels gives a loss near zero, and a token outside of its vocabulary a row of
zeros (keras#23664, pytorch#144824, #154235; labels are checked by torch after 2.13, pytorch#187559).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from numbers import Integral
from typing import TYPE_CHECKING, Any

from ..devices.machine import Machine, apple_generation
from ..devices.moving import unwrapped
from ..devices.request import kind_of
from ..errors import BatchRefused, ConfigurationError, offered, shorten

if TYPE_CHECKING:
    import torch


IGNORE_INDEX = -100
"""What the loss functions of torch leave out (``torch.nn.CrossEntropyLoss``)."""

LEAST = {"labels": 1, "tokens": 1, "token_types": 1, "positions": 1, "first_position": 0, "padding": 0}
"""The smallest number that can be told for each limit; the ignored label can be any."""


@dataclass(frozen=True)
class ModelLimits:
    """How many there are of each; ``None`` where it is not known, which then is not checked.

    Attributes:
        labels: Labels; a label is a number from 0 to one less.
        tokens: Tokens of the vocabulary.
        token_types: Token types.
        positions: Positions.
        first_position: The position of the first token: not 0 in models such as RoBERTa.
        padding: The token that fills rows up, where positions are counted without it.
        ignore_index: The label that is left out of the loss.
    """

    labels: int | None = None
    tokens: int | None = None
    token_types: int | None = None
    positions: int | None = None
    first_position: int = 0
    padding: int | None = None
    ignore_index: int = IGNORE_INDEX

    @property
    def length(self) -> int | None:
        """How many tokens a row can have."""
        return None if self.positions is None else self.positions - self.first_position


def limits_of(model: torch.nn.Module, **told: int | None) -> ModelLimits:
    """Return what a model takes; what the caller tells counts more than what is learnt.

    Args:
        model: A model of transformers, or any other, of which only the embeddings with known names are understood.
        told: Attributes of :class:`ModelLimits`; ``None`` to learn it.

    Raises:
        ConfigurationError: For what was told and cannot be a limit.

    Example:
        >>> import torch
        >>> limits_of(torch.nn.Linear(2, 3), labels=3)
        ModelLimits(labels=3, tokens=None, token_types=None, positions=None, first_position=0, padding=None, ignore_index=-100)
    """
    model = unwrapped(model)
    for name in inner_model(model):
        model = unwrapped(model.get_submodule(name))
    rows = {name.rpartition(".")[2]: layer for name, layer in embeddings(model)}
    positions = rows.get("position_embeddings")
    padding = None if positions is None else positions.padding_idx  # RoBERTa counts from here, without what fills up.
    learnt = ModelLimits(
        labels=label_count(model),
        tokens=token_count(model),
        token_types=_count(rows.get("token_type_embeddings")),
        positions=_count(positions),
        first_position=0 if padding is None else padding + 1,
        padding=padding,
    )
    return replace(learnt, **checked_limits(told))


def checked_limits(told: Mapping[str, Any]) -> dict[str, int]:
    """Return those limits that were told.

    Raises:
        ConfigurationError: For a name that no limit has, and for a value that cannot be one.

    Example:
        >>> checked_limits({"labels": 10, "tokens": None})
        {'labels': 10}
        >>> checked_limits({"labels": "3"})
        Traceback (most recent call last):
        ...
        openmed_nb.errors.ConfigurationError: The limit labels='3' is no whole number from 1 up. Pass such a number.
    """
    known = tuple(field.name for field in fields(ModelLimits))
    for name, value in told.items():
        if name not in known:
            raise ConfigurationError(f"Guards take no limit {shorten(name)!r}.", offered(name, known))
        least = LEAST.get(name)
        whole = isinstance(value, Integral) and not isinstance(value, bool)
        if value is not None and not (whole and (least is None or value >= least)):
            numbers = "whole number" if least is None else f"whole number from {least} up"
            raise ConfigurationError(f"The limit {name}={shorten(repr(value))} is no {numbers}.", "Pass such a number.")
    return {name: int(value) for name, value in told.items() if value is not None}


def inner_model(model: torch.nn.Module) -> tuple[str, ...]:
    """Return the name of the model of transformers inside of another module, such as one of Lightning.

    Nothing where the module is such a model itself, and where there are none or several.

    Example:
        >>> import torch
        >>> inner_model(torch.nn.Sequential(torch.nn.Linear(2, 2)))
        ()
    """
    found: list[str] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if not inside and hasattr(module, "config") and hasattr(module, "get_input_embeddings"):
            if not name or module is unwrapped(model):
                return ()
            found.append(name)
    return tuple(found) if len(found) == 1 else ()


def embeddings(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Embedding]]:
    """Yield the embeddings of a model with their names."""
    import torch

    yield from ((name, layer) for name, layer in model.named_modules() if isinstance(layer, torch.nn.Embedding))


def label_count(model: Any) -> int | None:
    """Return how many labels a model tells apart, ``None`` where its labels are something else or nothing says.

    A language model's labels are tokens. A model is taken for a classifier by the name of its class, because every
    configuration has ``num_labels``, also where the labels are places in a text, choices or numbers. Where the last
    layer has another number, as after somebody put another one there, neither is believed.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if head is not None and hasattr(head, "weight"):
        return int(head.weight.shape[0])
    if not any(kind.__name__.endswith("Classification") for kind in type(model).__mro__):
        return None
    count = getattr(getattr(model, "config", None), "num_labels", None)
    return count if count and count > 1 and count == head_width(model) else None  # One label is a regression.


def head_width(model: torch.nn.Module) -> int | None:
    """Return how many numbers the last linear layer gives, ``None`` where there is none.

    Example:
        >>> import torch
        >>> head_width(torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU()))
        3
    """
    import torch

    widths = [layer.out_features for layer in model.modules() if isinstance(layer, torch.nn.Linear)]
    return widths[-1] if widths else None


def token_count(model: Any) -> int | None:
    """Return how many tokens a model's input embeddings have, ``None`` where it has none."""
    import torch

    try:
        layer = getattr(model, "get_input_embeddings", lambda: None)()
    except NotImplementedError:  # transformers raises it for a model that it cannot answer for.
        return None
    return layer.num_embeddings if isinstance(layer, torch.nn.Embedding) else None


def _count(layer: Any) -> int | None:
    return None if layer is None else int(layer.num_embeddings)


REDUCTION = 32_767
"""From so many tokens on, a weight's gradient can be wrong on M1 and M2 (pytorch#177116, #193487)."""

REPAIRED = (2, 14)
"""The first release of torch without that error in linear layers."""

LABELS = ("labels", "label")
"""The names under which labels come."""

EMBEDDED = "inputs_embeds"
"""The name under which embeddings come in the place of tokens: numbers of rows, length and width."""

FIELDS = (*LABELS, "input_ids", "token_type_ids", "position_ids", EMBEDDED)
"""The fields that are checked."""


@dataclass(frozen=True)
class BatchChecks:
    """The checks of a batch; a plain value, so that it can go to the worker processes of a loader.

    Attributes:
        limits: What the model takes.
        names: The names of those of ``CHECKS`` that are made.
    """

    limits: ModelLimits = field(default_factory=ModelLimits)
    names: tuple[str, ...] = ("labels", "token_ids")

    def __call__(self, batch: Any, where: str = "") -> None:
        """Check a batch.

        Args:
            batch: A mapping of names to tensors or arrays, a pair of inputs and labels, or a list of mappings.
            where: The first words of the error, such as ``"Step 7: "``.

        Raises:
            BatchRefused: For a batch of which a device would make wrong numbers.
        """
        for part in parts_of(batch):
            named = named_fields(part, where)
            for name in self.names:
                CHECKS[name](named, self.limits, where)


def parts_of(batch: Any) -> list[Any]:
    """Return the mappings that a batch is a list of, or the batch itself.

    Example:
        >>> parts_of([{"labels": [0]}, {"labels": [1]}]), parts_of({"labels": [0]})
        ([{'labels': [0]}, {'labels': [1]}], [{'labels': [0]}])
    """
    several = isinstance(batch, (list, tuple)) and all(isinstance(part, Mapping) for part in batch)
    return list(batch) if several else [batch]


def named_fields(batch: Any, where: str = "") -> dict[str, torch.Tensor]:
    """Return those fields of a batch that are checked: whole numbers, in any number of dimensions, and embeddings.

    Raises:
        BatchRefused: For a field that holds something else than numbers, such as the names of labels.

    Example:
        >>> import torch
        >>> list(named_fields((torch.zeros(2, 3), torch.tensor([1, 0]))))
        ['labels']
    """
    inputs = batch[0] if isinstance(batch, (list, tuple)) and batch else batch
    given = dict(inputs) if isinstance(inputs, Mapping) else {}
    if inputs is not batch:
        given["labels"] = labels_of(batch)
    arrays = ((name, given[name]) for name in FIELDS if name in given and hasattr(given[name], "dtype"))
    tensors = ((name, plain(_tensor(name, value, where))) for name, value in arrays)
    counted = ((name, value) for name, value in tensors if _counts(value) or name == EMBEDDED)
    return {name: value for name, value in counted if value.numel() and not value.is_meta}


def plain(values: torch.Tensor) -> torch.Tensor:
    """Return values as a tensor that torch can compare: dense, with rows of one length, at least one, of signed numbers.

    Example:
        >>> import torch
        >>> plain(torch.tensor(7, dtype=torch.uint32)), plain(torch.eye(2, dtype=torch.long).to_sparse()).layout
        (tensor([7]), torch.strided)
    """
    import torch

    if values.is_nested:
        values = torch.nested.to_padded_tensor(values, 0)
    elif values.layout != torch.strided:
        values = values.to_dense()
    if values.dtype in {torch.uint16, torch.uint32, torch.uint64}:  # Too large a number becomes a negative one.
        values = values.to(torch.int64)
    return torch.atleast_1d(values)


def labels_of(batch: Any) -> Any:
    """Return the labels of a batch: those of a mapping, or the second of a pair; ``None`` where there are none.

    Example:
        >>> labels_of({"labels": [0, 1]}), labels_of(("inputs", [2])), labels_of("text")
        ([0, 1], [2], None)
    """
    if isinstance(batch, Mapping):
        return next((batch[name] for name in LABELS if name in batch), None)
    return batch[1] if isinstance(batch, (list, tuple)) and len(batch) == 2 else None  # noqa: PLR2004 - a pair


def check_labels(fields: Mapping[str, torch.Tensor], limits: ModelLimits, where: str = "") -> None:
    """Refuse labels that the model does not have.

    Example:
        >>> import torch
        >>> check_labels({"labels": torch.tensor([0, 7, -100])}, ModelLimits(labels=3))
        Traceback (most recent call last):
        ...
        openmed_nb.errors.BatchRefused: 1 of 3 labels is not between 0 and 2 (7; -100 is left out). Give the \
model as many labels as the data has (num_labels), or number the labels anew.
    """
    remedy = "Give the model as many labels as the data has (num_labels), or number the labels anew."
    for name in LABELS:
        if name in fields and limits.labels is not None:
            what = outside(fields[name], limits.labels, "labels", limits.ignore_index)
            if what:
                raise BatchRefused(where + what, remedy)


def check_token_ids(fields: Mapping[str, torch.Tensor], limits: ModelLimits, where: str = "") -> None:
    """Refuse tokens, token types, positions and rows for which the model has no embedding.

    Example:
        >>> import torch
        >>> check_token_ids({"input_ids": torch.tensor([[2, 99, 50]])}, ModelLimits(tokens=40))
        Traceback (most recent call last):
        ...
        openmed_nb.errors.BatchRefused: 2 of 3 token ids are not between 0 and 39 (from 50 to 99). Use the tokenizer of \
this model, or resize its embeddings with model.resize_token_embeddings.
    """
    tokenizer = "Use the tokenizer of this model"
    resize = f"{tokenizer}, or resize its embeddings with model.resize_token_embeddings."
    for name, count, called, remedy in (
        ("input_ids", limits.tokens, "token ids", resize),
        ("token_type_ids", limits.token_types, "token types", f"{tokenizer}."),
        ("position_ids", limits.positions, "positions", "Leave position_ids out, or shorten the rows."),
    ):
        if name in fields and count is not None and (what := outside(fields[name], count, called)):
            raise BatchRefused(where + what, remedy)
    if "input_ids" in fields and limits.length is not None and "position_ids" not in fields:
        check_length(fields["input_ids"], limits, where)


def check_length(tokens: torch.Tensor, limits: ModelLimits, where: str = "") -> None:
    """Refuse rows that are longer than the model has positions."""
    longest, allowed = tokens.shape[-1], limits.length or 0
    if longest > allowed and limits.padding is not None:
        longest = int((tokens != limits.padding).sum(-1).max())
    if longest > allowed:
        what = f"{where}The longest row has {longest:,} tokens, and the model has {allowed:,} positions."
        raise BatchRefused(what, f"Shorten the rows: truncation=True, max_length={allowed}.")


def check_size(fields: Mapping[str, torch.Tensor], _limits: ModelLimits, where: str = "") -> None:
    """Refuse a batch with so many tokens, or embeddings of tokens, that gradients can be wrong on M1 and M2.

    Example:
        >>> import torch
        >>> check_size({"input_ids": torch.zeros(64, 512, dtype=torch.long)}, ModelLimits())
        Traceback (most recent call last):
        ...
        openmed_nb.errors.BatchRefused: 64 x 512 = 32,768 tokens in one step: from 32,767 on, an M1 or M2 under torch \
before 2.14 can make gradients 1,000 to 100,000 times too large while the loss looks right (pytorch#177116, #193487). \
Use batches of at most 63 rows at this length (63 x 512 = 32,256) and accumulate gradients.
    """
    rows, length = token_shape(fields)
    if rows * length >= REDUCTION:
        raise BatchRefused(*too_many(rows, length, where))


def token_shape(fields: Mapping[str, torch.Tensor]) -> tuple[int, int]:
    """Return how many rows of tokens a batch has, and their length; 0 where it has no tokens.

    Example:
        >>> import torch
        >>> token_shape({"inputs_embeds": torch.zeros(8, 128, 64)}), token_shape({})
        ((8, 128), (1, 0))
    """
    shape: tuple[int, ...] = ()
    if "input_ids" in fields:
        shape = tuple(fields["input_ids"].shape)
    elif EMBEDDED in fields:
        shape = tuple(fields[EMBEDDED].shape[:-1])
    return math.prod(shape[:-1]), shape[-1] if shape else 0


CHECKS: dict[str, Callable[[Mapping[str, torch.Tensor], ModelLimits, str], None]] = {
    "labels": check_labels,
    "token_ids": check_token_ids,
    "large_batch_gradients": check_size,
}
"""The guards that look at a batch."""


def too_many(rows: int, length: int, where: str = "") -> tuple[str, str]:
    """Return what is wrong with a batch of that shape, and what to do about it.

    Example:
        >>> too_many(1, 40_000)[1]
        'Cut the rows to less than 32,767 tokens.'
    """
    what = (
        f"{where}{rows:,} x {length:,} = {rows * length:,} tokens in one step: from {REDUCTION:,} on, an M1 or M2 under "
        "torch before 2.14 can make gradients 1,000 to 100,000 times too large while the loss looks right "
        "(pytorch#177116, #193487)."
    )
    fitting = (REDUCTION - 1) // length
    if not fitting:
        return what, f"Cut the rows to less than {REDUCTION:,} tokens."
    some = f"{fitting:,} {'row' if fitting == 1 else 'rows'}"
    arithmetic = f"{fitting:,} x {length:,} = {fitting * length:,}"
    return what, f"Use batches of at most {some} at this length ({arithmetic}) and accumulate gradients."


def gradients_can_be_wrong(device: str, machine: Machine, torch_release: tuple[int, ...]) -> bool:
    """Tell whether a step with many tokens can give wrong gradients: MPS of an M1 or M2, under torch before 2.14.

    A chip that is not known is not suspected.

    Example:
        >>> m2 = Machine("Darwin", "arm64", apple_silicon=True, chip="Apple M2 Pro")
        >>> gradients_can_be_wrong("mps", m2, (2, 13, 0)), gradients_can_be_wrong("mps", m2, (2, 14, 0))
        (True, False)
    """
    affected = apple_generation(machine) in (1, 2)
    return affected and kind_of(device) == "mps" and tuple(torch_release[:2]) < REPAIRED


def outside(values: torch.Tensor, count: int, called: str, ignored: int | None = None) -> str:
    """Return what is wrong with values that are not from 0 to ``count - 1``, empty where all are.

    One look at the extremes is all that good values cost.

    Example:
        >>> import torch
        >>> outside(torch.tensor([1, -5, 9]), 3, "positions")
        '2 of 3 positions are not between 0 and 2 (from -5 to 9).'
    """
    import torch

    seen = values if ignored is None else torch.where(values == ignored, 0, values)
    low, high = (int(extreme) for extreme in seen.aminmax())
    if low >= 0 and high < count:
        return ""
    bad = seen[(seen < 0) | (seen >= count)]
    return _told(bad, values.numel(), count, called, ignored)


def _told(bad: torch.Tensor, total: int, count: int, called: str, ignored: int | None) -> str:
    low, high = (int(extreme) for extreme in bad.aminmax())
    left_out = "" if ignored is None else f"; {ignored} is left out"
    verb = "is" if bad.numel() == 1 else "are"
    what = f"{bad.numel():,} of {total:,} {called} {verb} not between 0 and {count - 1:,}"
    extremes = f"{low:,}" if low == high else f"from {low:,} to {high:,}"
    return f"{what} ({extremes}{left_out})."


def _tensor(name: str, value: Any, where: str) -> torch.Tensor:
    import torch

    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError):  # What torch raises for text and for objects.
        what = f"{where}{name} is an array of {value.dtype}, not of numbers."
        raise BatchRefused(what, "Give numbers, such as a label's place in the list of labels.") from None


def _counts(values: torch.Tensor) -> bool:
    return not (values.is_floating_point() or values.is_complex() or str(values.dtype) == "torch.bool")


@dataclass(frozen=True)
class CheckedCollation:
    """Puts a batch together as the loader does, and then checks it; it can be pickled where the loader's own can.

    Attributes:
        collate: The loader's own function.
        checks: The checks.
    """

    collate: Callable[[Any], Any]
    checks: BatchChecks

    def __call__(self, samples: Any) -> Any:
        """Return the batch of some samples.

        Raises:
            BatchRefused: For a batch that does not pass; out of a worker process too.
        """
        from torch.utils.data import get_worker_info

        batch = self.collate(samples)
        try:
            self.checks(batch)
        except BatchRefused as error:
            if get_worker_info() is None:
                raise
            raise BatchRefusedInWorker(error.what, error.remedy) from None
        return batch


class BatchRefusedInWorker(BatchRefused):
    """A refused batch on its way out of a worker process.

    A loader raises the error of a worker again in the main process, made from the text of its traceback alone
    (``ExceptionWrapper`` in torch/_utils.py). So here the error's text is JSON, and the class, given such a text, makes
    the error that it began as.
    """

    def __new__(cls, what: str, remedy: str | None = None) -> BatchRefused:  # type: ignore[misc]
        """Return the error itself in the worker, and what it was made from in the main process."""
        if remedy is not None:
            return super().__new__(cls, what, remedy)
        value = json.loads(what.rpartition(f"{cls.__name__}: ")[2])
        return BatchRefused(value["what"], value["remedy"])

    def __str__(self) -> str:
        return json.dumps({"what": self.what, "remedy": self.remedy})


def innermost(loader: Any) -> Any:
    """Return the loader of torch inside of those that Accelerate puts around it."""
    while "base_dataloader" in vars(loader):
        loader = loader.base_dataloader
    return loader


def check_collation(loader: Any, checks: BatchChecks) -> Callable[[], None] | None:
    """Let a loader check its batches.

    Args:
        loader: A ``DataLoader`` of torch, or one that Accelerate made of it; iterators that it has made already go on
            without checks.
        checks: The checks.

    Returns:
        What puts the loader's own function back; ``None`` where this is no such loader, and nothing was changed.
    """
    from torch.utils.data import DataLoader

    inner = innermost(loader) if hasattr(loader, "__dict__") else loader
    if not isinstance(inner, DataLoader):
        return None
    own = inner.collate_fn
    checked = inner.collate_fn = CheckedCollation(own, checks)

    def put_back() -> None:
        if inner.collate_fn is checked:  # Else someone changed it since, and it is theirs.
            inner.collate_fn = own

    return put_back
