"""Batches of tokens through the network.

Windows -> batches: sorted by length, each within a budget of tokens.

On a device that compiles for every new shape, lengths and numbers of rows come from a small fixed set.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..devices.backend import TENSOR_LOCK, array_to_device, synchronize, to_array, towards_host
from ..devices.linear import fast_linear
from ..devices.memory import empty_cache, is_out_of_memory
from ..errors import DeviceUnavailable, ModelUnusable, OpenMedError, cause
from .decoding import Predictions
from .tokens import Frame, Tokens, Windows

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


SHORTEST, LENGTHS = 32, 8
"""Where shapes are few, rows are filled up to one of so many lengths, the shortest of which is this."""

FEW = 8
"""Up to one in so many of the rows of a full batch, left-over windows run one by one instead of filling one up."""


@dataclass(frozen=True)
class Batch:
    """Windows that run together.

    Attributes:
        rows: The numbers of the windows.
        length: How many tokens each row is filled up to, special tokens included.
        height: How many rows the batch is filled up to.
    """

    rows: np.ndarray
    length: int
    height: int

    def halves(self, lengths: np.ndarray) -> list[Batch]:
        """Return the batch in two, for a device on which the whole does not fit; nothing for a window that is alone.

        Each half is as long as the longest of its windows, so that none fails for the length of another.
        """
        if self.height == 1 and self.length == lengths[self.rows[0]]:
            return []
        middle, height = (len(self.rows) + 1) // 2, (self.height + 1) // 2
        halves = self.rows[:middle], self.rows[middle:]
        return [Batch(rows, int(lengths[rows].max()), height) for rows in halves if len(rows)]


@dataclass(frozen=True)
class Budget:
    """How much runs at once.

    Attributes:
        tokens: How many tokens a batch may have, filling included.
        waste: How many of them may be filling: about as many as run in the time that starting another batch takes.
        rows: How many rows it may have; ``None`` for no limit but the tokens.
        few_shapes: Whether shapes come from a small fixed set.
        padding: Whether a row may be filled up at all; a model that does not hide the filling would read it.
    """

    tokens: int
    waste: int = 256
    rows: int | None = None
    few_shapes: bool = False
    padding: bool = True

    def within(self, tokens: int) -> Budget:
        """Return the budget with at most so many tokens, for a device that runs out of memory with more."""
        return replace(self, tokens=max(1, min(self.tokens, tokens)))

    def height(self, length: int) -> int:
        """Return how many rows of a length fit; at least one."""
        fitting = max(1, self.tokens // length)
        return fitting if self.rows is None else min(fitting, self.rows)


def plan_batches(lengths: np.ndarray, budget: Budget, longest: int) -> list[Batch]:
    """Return batches in which every window is once.

    Args:
        lengths: ``(W,)`` how many tokens each window has, special tokens included.
        budget: How much runs at once.
        longest: The most tokens that the model takes.

    Example:
        >>> [(batch.rows.tolist(), batch.length) for batch in plan_batches(np.array([3, 9, 4]), Budget(10), 64)]
        [([1], 9), ([2, 0], 4)]
    """
    order = np.argsort(-lengths, kind="stable")
    if not budget.padding:
        same = np.flatnonzero(np.diff(lengths[order])) + 1
        return [batch for rows in np.split(order, same) for batch in descending(rows, lengths, budget)]
    if budget.few_shapes:
        return list(few_shapes(order[::-1], lengths, budget, longest))
    return list(descending(order, lengths, budget))


def descending(order: np.ndarray, lengths: np.ndarray, budget: Budget) -> Iterator[Batch]:
    """Yield batches from the longest window to the shortest: if one does not fit in memory, it is the first.

    A batch ends where another row would make more filling than starting a new one costs.
    """
    place = 0
    while place < len(order):
        length = int(lengths[order[place]])
        rows = order[place : place + budget.height(length)]
        filling = np.cumsum(length - lengths[rows])
        rows = rows[: np.searchsorted(filling, budget.waste, side="right")]
        yield Batch(rows, length, len(rows))
        place += len(rows)


def few_shapes(order: np.ndarray, lengths: np.ndarray, budget: Budget, longest: int) -> Iterator[Batch]:
    """Yield batches of few shapes, from the shortest window up; left-overs join those of the next length."""
    buckets = allowed_lengths(longest)
    places = np.searchsorted(buckets, lengths[order])
    left, height = order[:0], 0
    for place in np.unique(places):
        length = buckets[place]
        left = np.concatenate([left, order[places == place]])
        height = budget.height(length)
        while len(left) >= height:
            yield Batch(left[:height], length, height)
            left = left[height:]
    if len(left) > height // FEW:
        yield Batch(left, length, height)
    else:
        own = np.searchsorted(buckets, lengths[left])
        yield from (Batch(left[[row]], buckets[place], 1) for row, place in enumerate(own))


def allowed_lengths(longest: int) -> list[int]:
    """Return the lengths that rows are filled up to for a model that takes so many tokens, in steps of one factor.

    Example:
        >>> allowed_lengths(512)
        [32, 48, 72, 112, 160, 232, 352, 512]
    """
    steps = np.geomspace(min(SHORTEST, longest), longest, LENGTHS)
    rounded = np.minimum(np.ceil(steps.round(6) / 8).astype(int) * 8, longest)
    return [int(length) for length in np.unique(rounded)]


PROBED_LENGTH = 32
"""How many tokens a row has that is looked at for filling: a length that rows on MPS are filled up to anyway."""

Inputs = dict[str, np.ndarray]


@dataclass(frozen=True)
class Network:
    """A model as something that takes rows of tokens and gives labels.

    Attributes:
        model: The model, or what ``torch.compile`` made of it.
        frame: What stands around a text's tokens.
        inputs: The names of the arrays that it takes.
        whole: Whether the probabilities of all labels are wanted, not only the best of each token.
        compiled: Whether ``torch.compile`` made it, which chooses its own matrix products.
    """

    model: PreTrainedModel
    frame: Frame
    inputs: frozenset[str]
    whole: bool = False
    compiled: bool = False

    def __call__(self, inputs: Inputs) -> tuple[torch.Tensor, ...]:
        """Start a forward pass; return labels and scores, or all probabilities, as tensors of ``(rows, length, …)``."""
        import torch

        with torch.no_grad():
            return self.answers(self.logits(inputs))

    def logits(self, inputs: Inputs) -> torch.Tensor:
        """Start a forward pass; return what it says of every label, ``(rows, length, labels)``, on the model's device."""
        return self.logits_of(self.moved(inputs))

    def moved(self, inputs: Inputs) -> dict[str, torch.Tensor]:
        """Start to copy a batch to the model's device; it may still be under way, in order with what follows."""
        device = self.model.device
        return {name: array_to_device(array, device) for name, array in inputs.items()}

    def logits_of(self, moved: dict[str, torch.Tensor]) -> torch.Tensor:
        """Start a forward pass over a batch that is on the model's device."""
        device, size = self.model.device, moved["input_ids"].numel()
        with contextlib.nullcontext() if self.compiled else fast_linear(device, size):
            output = self.model(**moved)
        logits: torch.Tensor = output["logits"] if isinstance(output, dict) else output[0]
        return logits

    def answers(self, logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return labels and scores, or all probabilities, on their way to the host."""
        import torch

        given, named = logits.shape[-1], self.model.config.num_labels
        if given > named:
            what = f"The model gives {given} labels, and its id2label names {named}."
            raise ModelUnusable(what, "Correct model.config.id2label.")
        probabilities = logits.float().softmax(-1)
        if self.whole:
            return (towards_host(probabilities),)
        scores, labels = probabilities.max(-1)
        return towards_host(labels.to(torch.int32)), towards_host(scores)


@dataclass
class ForwardRun:
    """Batches that were started on the device, until they are collected.

    Attributes:
        tokens: The tokens that the windows are over.
        windows: The windows.
        devices: Where they were started; another thread may move the model in between.
        outputs: Each batch with its outputs, which may not have been computed yet.
        failures: Windows that do not fit in memory alone, with the reason.
        error: What ended the run early.
        fitting: How many tokens at once fit in its memory, as far as is known.
    """

    tokens: Tokens
    windows: Windows
    devices: set[torch.device] = field(default_factory=set)
    outputs: list[tuple[Batch, tuple[torch.Tensor, ...]]] = field(default_factory=list)
    failures: dict[int, OpenMedError] = field(default_factory=dict)
    error: Exception | None = None
    fitting: int = sys.maxsize


def start(network: Network, run: ForwardRun, batches: Sequence[Batch]) -> None:
    """Start batches on the model's device; an error is kept in the run, for when its turn comes."""
    with TENSOR_LOCK:
        run.devices.add(network.model.device)
        try:
            for batch in batches if run.error is None else ():
                start_batch(network, run, batch)
        except Exception as error:  # noqa: BLE001 - of the model's own code too, and raised in collect
            run.error = error


def start_batch(network: Network, run: ForwardRun, batch: Batch) -> None:
    """Start one batch; where memory is short, its halves; a single window that does not fit becomes a failure."""
    try:
        run.outputs.append((batch, network(fill(run.tokens, run.windows, batch, network))))
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        reason = cause(error)
    else:
        return
    empty_cache(str(network.model.device))
    size = batch.height * batch.length
    if batch.height > 1 and size <= run.fitting:  # A larger one was planned before that was known.
        run.fitting = size // 2
    halves = batch.halves(run.windows.lengths + network.frame.size)
    for half in halves:
        start_batch(network, run, half)
    if not halves:
        what = f"A window of {batch.length} tokens does not fit in the memory of {network.model.device}: {reason}."
        run.failures[int(batch.rows[0])] = DeviceUnavailable(what, f"Unload other models, or {way_out(network)}.")


def fill(tokens: Tokens, windows: Windows, batch: Batch, network: Network) -> Inputs:
    """Return the arrays that a model takes for a batch, each int64 of ``(height, length)``.

    Rows are filled up on the right, also for a tokenizer that does so on the left: a model that counts positions from
    the left edge would count the filling, and its answers would depend on the batch.
    """
    frame, size = network.frame, (batch.height, batch.length)
    rows = batch.rows
    counts = np.zeros(batch.height, np.int64)
    counts[: len(rows)] = windows.lengths[rows]
    columns = np.broadcast_to(np.arange(batch.length) - len(frame.before), size)
    inside = (columns >= 0) & (columns < counts[:, None])
    ids, types = np.full(size, frame.padding), np.full(size, frame.padding_type)
    stretches = zip(windows.firsts[rows].tolist(), windows.lasts[rows].tolist(), strict=True)
    ids[inside] = np.concatenate([tokens.ids[first:last] for first, last in stretches])
    types[inside] = frame.token_type
    for place, (number, kind) in special_columns(columns, counts, frame):
        ids[place], types[place] = number, kind
    mask = (columns >= -len(frame.before)) & (columns < counts[:, None] + len(frame.after))
    arrays = {"input_ids": ids, "token_type_ids": types, "attention_mask": mask.astype(np.int64)}
    return {name: array for name, array in arrays.items() if name in network.inputs}


def special_columns(
    columns: np.ndarray, counts: np.ndarray, frame: Frame
) -> Iterator[tuple[np.ndarray, tuple[int, int]]]:
    """Yield where each special token stands, with its number and its type."""
    for place, token in enumerate(zip(frame.before, frame.before_types, strict=True), -len(frame.before)):
        yield columns == place, token
    for place, token in enumerate(zip(frame.after, frame.after_types, strict=True)):
        yield columns == counts[:, None] + place, token


def collect(run: ForwardRun, network: Network) -> tuple[Predictions, dict[int, OpenMedError]]:
    """Wait for a run and return what the model says of every token, and the failures by sequence.

    Raises:
        DeviceUnavailable: Where the device failed for another reason than a lack of memory.
        ModelUnusable: Where the model names fewer labels than it gives.
    """
    outputs = fetch(run)
    if isinstance(run.error, ModelUnusable):
        raise run.error
    if run.error is not None:
        what = f"The model could not run on {network.model.device}: {cause(run.error)}."
        raise DeviceUnavailable(what, f"Restart the kernel, or {way_out(network)}.") from run.error
    return settled(run, network, outputs)


def settled(
    run: ForwardRun, network: Network, outputs: Sequence[tuple[Batch, Sequence[np.ndarray]]]
) -> tuple[Predictions, dict[int, OpenMedError]]:
    """Return what the outputs of all batches say of every token, and why some sequences have no answer."""
    predictions = gather(run, network, outputs)
    failures = {int(run.tokens.sequences(run.windows.firsts[row])): error for row, error in run.failures.items()}
    unknown = np.flatnonzero(np.isnan(predictions.scores))
    for sequence in np.unique(run.tokens.sequences(unknown)).tolist():
        what = f"The model computes no numbers (NaN) on {network.model.device} in {network.model.dtype}."
        failures.setdefault(sequence, ModelUnusable(what, f"Load it in float32, or {way_out(network)}."))
    predictions.scores[unknown] = 0  # NaN is unlike itself, and decoding compares
    return predictions, failures


def way_out(network: Network) -> str:
    """Return what else can be done where a model fails on its device."""
    return "use another model" if network.model.device.type == "cpu" else "use the CPU"


def fetch(run: ForwardRun) -> list[tuple[Batch, list[np.ndarray]]]:
    """Wait for the outputs of a run and return them; an error that the device tells only now is kept in the run too."""
    try:
        with TENSOR_LOCK:
            for device in run.devices:
                synchronize(device)
            return [(batch, [to_array(tensor) for tensor in tensors]) for batch, tensors in run.outputs]
    except Exception as error:  # noqa: BLE001 - raised in collect
        run.error = run.error or error
        return []


def gather(run: ForwardRun, network: Network, outputs: Sequence[tuple[Batch, Sequence[np.ndarray]]]) -> Predictions:
    """Return the outputs of all batches in the order of the tokens, each token from the window that owns it."""
    count = len(run.tokens)
    labels, scores = np.zeros(count, np.int64), np.zeros(count, np.float32)
    probabilities = np.zeros((count, network.model.config.num_labels), np.float32) if network.whole else None
    targets: tuple[np.ndarray, ...] = (labels, scores) if probabilities is None else (probabilities,)
    for batch, arrays in outputs:
        positions, owned = owned_positions(run.windows, batch, network.frame)
        for target, array in zip(targets, arrays, strict=True):
            target[positions[owned]] = array[: len(batch.rows)][owned]
    if probabilities is not None and count:
        labels, scores = probabilities.argmax(1), probabilities.max(1)
    return Predictions(labels, scores, probabilities)


def owned_positions(windows: Windows, batch: Batch, frame: Frame) -> tuple[np.ndarray, np.ndarray]:
    """Return of each place in the windows of a batch which token it is, and whether its window owns that token."""
    rows = batch.rows
    positions = np.arange(batch.length) + (windows.firsts[rows] - len(frame.before))[:, None]
    owned = (positions >= windows.owned_firsts[rows][:, None]) & (positions < windows.owned_lasts[rows][:, None])
    return positions, owned


def hides_padding(network: Network, longest: int) -> bool:
    """Tell whether what fills a row up leaves the answers to the row's own tokens as they are, but for rounding.

    A model may take a mask and still read the filling: the convolutions of ConvBERT, the pooling of Funnel and the hashes
    of YOSO do. So a row of tokens runs alone and filled up. What is looked at are not the tokens of a text, and hooks that
    a person has on the model do not see them.

    Args:
        network: The model, in evaluation mode.
        longest: The most tokens that it takes.
    """
    import torch

    if "attention_mask" not in network.inputs:
        return False
    padded = min(PROBED_LENGTH, longest)
    length = padded * 2 // 3
    ids = np.full((1, padded), network.frame.padding, np.int64)
    ids[0, :length] = np.resize([*network.frame.before, *network.frame.after] or [0], length)
    mask = (np.arange(padded) < length).astype(np.int64)[None]
    arrays = {"input_ids": ids, "token_type_ids": np.zeros_like(ids), "attention_mask": mask}
    inputs = {name: array for name, array in arrays.items() if name in network.inputs}
    bare = replace(network, model=Bare(network.model))
    try:
        with TENSOR_LOCK, torch.no_grad():
            filled = bare.logits(inputs)[0, :length].float()
            alone = bare.logits({name: array[:, :length] for name, array in inputs.items()})[0].float()
            difference, size = float((filled - alone).abs().max()), float(alone.abs().max())
    except Exception:  # noqa: BLE001 - a model that cannot run is reported when it runs over texts
        return True
    rounding = torch.finfo(network.model.dtype).eps ** 0.5
    return not difference > rounding * max(1.0, size)  # NaN is reported with the answers.


@dataclass(frozen=True)
class Bare:
    """A model without the hooks that a person has put on it."""

    model: PreTrainedModel

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.model.device

    def __call__(self, **inputs: torch.Tensor) -> Any:
        """Run the forward pass alone."""
        return self.model.forward(**inputs)


def input_names(model: PreTrainedModel, wanted: Sequence[str]) -> frozenset[str]:
    """Return which arrays a model takes: those its tokenizer names, and a mask wherever it can read one."""
    names = frozenset({*wanted, "attention_mask"})
    known = taken(type(model).forward)
    return names if known is None else names & known


@functools.cache
def taken(function: Callable[..., Any]) -> frozenset[str] | None:
    """Return the names of what a function takes, ``None`` where it does not name its ids and so passes all on.

    Example:
        >>> sorted(taken(lambda input_ids, **others: None)), taken(lambda *ids, **arrays: None)
        (['input_ids', 'others'], None)
    """
    names = frozenset(inspect.signature(function).parameters)
    return names if "input_ids" in names else None
