"""Windows of tokens through the network: planned as batches, started, collected.

Batches are sorted by length and each stays within a budget of tokens. On a device that compiles for every new shape, lengths
and numbers of rows come from a small fixed set. A batch that does not fit in memory runs again in smaller ones of any shape.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from .._utils.text import describe_error
from ..devices.backend import TENSOR_LOCK
from ..devices.linear import cudnn_attention_disabled, fast_linear, wrap_mask
from ..devices.memory import empty_cache, is_out_of_memory, out_of_memory_error
from ..devices.moving import arrays_to_device, copy_to_host_async, to_numpy
from ..devices.registry import parse_device_argument
from ..errors import DeviceUnavailableError, InvalidModelError, OpenMedError
from .decoding import Predictions
from .tokens import SpecialTokens, Tokens, Windows, expand_ranges

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


# If shapes are few, a batch has one of LENGTHS lengths from SHORTEST up, or as many as make each at most twice the one before,
# and as many rows as fit, one in STEP of them, one in STEP of these, or one: of the choices with at most 24 shapes for 8,192
# tokens at once and rows of up to 512 that leave no budget unused, the one with the fewest tokens and passes for a few texts.
MIN_LENGTH, NUM_LENGTH_BUCKETS, ROW_DIVISOR = 16, 7, 8

# So few probabilities reach the host sooner than what a GPU would make of them.
MAX_PROBABILITIES_TO_COPY = 1024

Inputs = dict[str, np.ndarray]
DeviceInputs = dict[str, Any]  # The same as tensors on the device.
Outputs = Sequence[tuple["Batch", Sequence[np.ndarray]]]  # Of each batch labels and scores, or all probabilities.


@dataclass(frozen=True)
class Batch:
    """Windows that run together: their numbers, and the length and number of rows that they are filled up to."""

    window_ids: np.ndarray
    length: int
    num_rows: int

    def split(self, lengths: np.ndarray) -> list[Batch]:
        """Return smaller batches for a device on which this one does not fit: halves, or one without filling, or none.

        Each is as long as the longest of its windows, so that none fails for the length of another.
        """
        if self.num_rows == 1 and self.length == lengths[self.window_ids[0]]:
            return []
        middle, height = (len(self.window_ids) + 1) // 2, (self.num_rows + 1) // 2
        halves = self.window_ids[:middle], self.window_ids[middle:]
        return [Batch(rows, int(lengths[rows].max()), height) for rows in halves if len(rows)]


@dataclass(frozen=True)
class TokenBudget:
    max_tokens: int  # in a batch, filling included
    max_padding: int = (
        256  # how many of them may be filling: as many as run in the time that starting another batch takes
    )
    max_rows: int | None = None  # in a batch; None for no limit but the tokens
    limit_shapes: bool = False
    allow_padding: bool = True  # whether rows may be filled up; not for a model that would read the filling

    def capped_at(self, tokens: int) -> TokenBudget:
        """Return the budget with at most this many tokens, for a device that runs out of memory with more."""
        return replace(self, max_tokens=max(1, min(self.max_tokens, tokens)))

    def rows_for_length(self, length: int) -> int:
        """Return how many rows of a length fit; at least one."""
        fitting = max(1, self.max_tokens // length)
        return fitting if self.max_rows is None else min(fitting, self.max_rows)


def plan_batches(lengths: np.ndarray, budget: TokenBudget, max_length: int) -> list[Batch]:
    """Return batches that have every window once, from the longest to the shortest: what does not fit in memory comes first."""
    order = np.argsort(-lengths, kind="stable")
    if budget.allow_padding and budget.limit_shapes:
        return list(plan_few_shapes(order, lengths, budget, max_length))
    if budget.allow_padding or len(lengths) == 1:
        return list(plan_by_length(order, lengths, budget))
    same = np.flatnonzero(np.diff(lengths[order])) + 1
    return [batch for rows in np.split(order, same) for batch in plan_by_length(rows, lengths, budget)]


def plan_by_length(order: np.ndarray, lengths: np.ndarray, budget: TokenBudget) -> Iterator[Batch]:
    """Yield batches that end where another row would make more filling than starting a new one costs, or more than text."""
    place = 0
    while place < len(order):
        length = int(lengths[order[place]])
        rows = order[place : place + budget.rows_for_length(length)]
        text = np.cumsum(lengths[rows])
        filling = length * np.arange(1, len(rows) + 1) - text
        rows = rows[: np.argmax(np.append(filling > np.minimum(text, budget.max_padding), True))]
        yield Batch(rows, length, len(rows))
        place += len(rows)


def plan_few_shapes(order: np.ndarray, lengths: np.ndarray, budget: TokenBudget, longest: int) -> Iterator[Batch]:
    """Yield batches of few shapes, each with the most text for its cost, and of several rows with no more filling than text."""
    allowed, text = np.array(length_buckets(longest)), np.append(0, np.cumsum(lengths[order]))
    place = 0
    while place < len(order):
        length = int(allowed[np.searchsorted(allowed, lengths[order[place]])])
        # Seven divisions leave one row of any budget.
        heights = np.unique(np.maximum(1, budget.rows_for_length(length) // ROW_DIVISOR ** np.arange(8)))
        read = text[np.minimum(place + heights, len(order))] - text[place]
        worth = np.where(
            (heights == 1) | (heights * length <= 2 * read), read / (heights * length + budget.max_padding), 0
        )
        height = int(heights[worth.argmax()])
        yield Batch(order[place : place + height], length, height)
        place += height


def length_buckets(longest: int) -> list[int]:
    """Return the lengths that rows are filled up to, in steps of one factor up to the most tokens that a model takes."""
    shortest = min(MIN_LENGTH, longest)
    steps = np.geomspace(shortest, longest, max(NUM_LENGTH_BUCKETS, 1 + math.ceil(math.log2(longest / shortest))))
    return [int(length) for length in np.unique(np.minimum(np.ceil(steps.round(6) / 8).astype(int) * 8, longest))]


@dataclass(frozen=True)
class TokenClassifier:
    model: PreTrainedModel  # or what torch.compile made of it
    special_tokens: SpecialTokens
    input_names: frozenset[str]  # the names of the arrays that it takes
    return_all_probabilities: bool = (
        False  # whether the probabilities of all labels are wanted, not only the best of each token
    )
    compiled: bool = False  # torch.compile chooses its own matrix products
    shapes: set[tuple[int, int]] = field(default_factory=set, compare=False)  # rows and length of the batches that ran

    @property
    def device(self) -> torch.device:
        """The device of the model, also after another thread has moved it."""
        return self.first_parameter.device

    @property
    def first_parameter(self) -> torch.Tensor:
        parameters, name = self._place_of_first
        return parameters[name]

    @functools.cached_property
    def _place_of_first(self) -> tuple[dict[str, Any], str]:  # To look for it takes long beside a short text.
        every = ((module._parameters, name) for module in self.model.modules() for name in module._parameters)  # noqa: SLF001
        return next((parameters, name) for parameters, name in every if parameters[name] is not None)

    def __call__(self, inputs: Inputs) -> tuple[torch.Tensor, ...]:
        """Start a forward pass; return labels and scores, or all probabilities, as tensors of ``(rows, length, …)``."""
        with evaluation_mode(self.model):
            return self.forward_on_device(*self.copy_to_device([inputs]))

    def forward_on_device(self, moved: DeviceInputs) -> tuple[torch.Tensor, ...]:
        """Start a forward pass over a batch that is on the device, of a model that is in evaluation mode."""
        import torch

        with torch.no_grad():
            return self.postprocess_logits(self.logits_of(moved))

    def build_inputs(self, ids: np.ndarray, mask: np.ndarray, types: np.ndarray | None = None) -> Inputs:
        """Return the arrays that the model takes of those that describe rows, each int64 of ``(rows, length)``."""
        types = np.zeros_like(ids) if types is None else types
        arrays = {"input_ids": ids, "token_type_ids": types, "attention_mask": mask.astype(np.int64)}
        return {name: array for name, array in arrays.items() if name in self.input_names}

    def dummy_inputs(self, rows: int, length: int) -> Inputs:
        """Return a batch without filling, to measure with; which token stands there makes no difference."""
        ids = np.full((rows, length), self.special_tokens.pad_token_id, np.int64)
        return self.build_inputs(ids, np.ones_like(ids))

    def logits(self, inputs: Inputs) -> torch.Tensor:
        """Start a forward pass; return the logits of all labels, ``(rows, length, labels)``, on the model's device."""
        with evaluation_mode(self.model):
            return self.logits_of(*self.copy_to_device([inputs]))

    def copy_to_device(self, batches: Sequence[Inputs]) -> list[DeviceInputs]:
        """Start to copy batches to the model's device, all at once."""
        arrays = [array for inputs in batches for array in inputs.values()]
        tensors = iter(arrays_to_device(arrays, self.device))
        moved = [dict(zip(inputs, tensors, strict=False)) for inputs in batches]
        if "attention_mask" in self.input_names and not self.compiled:
            for inputs, on_device in zip(batches, moved, strict=True):
                on_device["attention_mask"] = wrap_mask(
                    on_device["attention_mask"], full=bool(inputs["attention_mask"].all())
                )
        return moved

    def logits_of(self, moved: DeviceInputs) -> torch.Tensor:
        device, dtype, size = self.device, self.first_parameter.dtype, moved["input_ids"].numel()
        products = contextlib.nullcontext() if self.compiled else fast_linear(device, size)
        with products, cudnn_attention_disabled(device, dtype):
            output = self.model(**moved)
        logits: torch.Tensor = output["logits"] if isinstance(output, dict) else output[0]
        return logits

    def postprocess_logits(self, logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return labels and scores, or all probabilities if these are wanted or few."""
        import torch

        given, named = logits.shape[-1], self.model.config.num_labels
        if given > named:
            what = f"The model gives {given} labels, and its id2label names {named}."
            raise InvalidModelError(what, "Correct model.config.id2label.")
        probabilities = logits.float().softmax(-1)
        if self.return_all_probabilities or probabilities.numel() <= MAX_PROBABILITIES_TO_COPY:
            return (probabilities,)
        scores, labels = probabilities.max(-1)
        return labels.to(torch.int32), scores


@dataclass
class ForwardRun:
    """Batches that were started on the device, until they are collected."""

    tokens: Tokens
    windows: Windows
    # Of each device what waits for its work; another thread may move the model in between.
    synchronizers: dict[torch.device, Callable[[], None]] = field(default_factory=dict)
    # Batches that are on the device but not started, or that did not fit there together.
    pending: deque[tuple[Batch, DeviceInputs | None]] = field(default_factory=deque)
    outputs: list[tuple[Batch, list[torch.Tensor]]] = field(default_factory=list)  # may not be on the host yet
    window_errors: dict[int, OpenMedError] = field(default_factory=dict)  # windows that do not fit in memory alone
    error: Exception | None = None  # what ended the run early
    max_fitting_tokens: int = sys.maxsize  # how many tokens at once fit in memory, as far as is known
    tell: Callable[[float], None] | None = None  # gets the share of the run that is computed, on the CPU


def copy_batches(network: TokenClassifier, run: ForwardRun, batches: Sequence[Batch]) -> None:
    """Copy the batches of a run to the model's device, all at once if they fit there."""
    with TENSOR_LOCK:
        try:
            moved = network.copy_to_device([pad_batch(run.tokens, run.windows, batch, network) for batch in batches])
            run.pending.extend(zip(batches, moved, strict=True))
        except Exception as error:  # noqa: BLE001 - of a device, and raised in collect
            if is_out_of_memory(error):
                empty_cache(str(network.device))
                run.pending.extend((batch, None) for batch in batches)
            else:
                run.error = error


def start_pending(network: TokenClassifier, run: ForwardRun) -> None:
    """Start all batches that wait on the model's device, if any do; an error is kept for when its turn comes."""
    if not run.pending:
        return
    device = parse_device_argument(network.device)
    with evaluation_mode(network.model):  # Once for all batches, because it looks at every module.
        try:
            sizes = [batch.num_rows * batch.length for batch, _ in run.pending]
            done, whole = 0, sum(sizes)
            for size in sizes:
                start_batch(network, run, *run.pending.popleft())
                done += size
                if run.tell and done < whole and not device.is_accelerator:  # Elsewhere it is only started.
                    run.tell(done / whole)
            run.synchronizers[network.device] = device.work_done()
        except Exception as error:  # noqa: BLE001 - of the model's own code too, and raised in collect
            run.error = error
            run.pending.clear()


def start_batch(network: TokenClassifier, run: ForwardRun, batch: Batch, moved: DeviceInputs | None = None) -> None:
    """Start one batch; if memory is short, its halves; a single window that does not fit becomes a failure."""
    try:
        if moved is None or moved["input_ids"].device != network.device:  # The model was moved meanwhile.
            (moved,) = network.copy_to_device([pad_batch(run.tokens, run.windows, batch, network)])
        run.outputs.append((batch, [copy_to_host_async(tensor) for tensor in network.forward_on_device(moved)]))
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        device = str(network.device)
        what = f"A window of {batch.length} tokens"
        # The error's own frames hold tensors.
        failure = out_of_memory_error(what, device, error, parse_device_argument(device).unload_remedy)
    else:
        network.shapes.add((batch.num_rows, batch.length))
        return
    empty_cache(device)
    size = batch.num_rows * batch.length
    if batch.num_rows > 1 and size <= run.max_fitting_tokens:  # A larger one was planned before that was known.
        run.max_fitting_tokens = size // 2
    halves = batch.split(run.windows.lengths + network.special_tokens.num_special_tokens)
    for half in halves:
        start_batch(network, run, half)
    if not halves:
        run.window_errors[int(batch.window_ids[0])] = failure


def pad_batch(tokens: Tokens, windows: Windows, batch: Batch, network: TokenClassifier) -> Inputs:
    """Return the arrays that a model takes for a batch, each int64 of ``(height, length)``.

    Rows are filled up on the right, also for a tokenizer that does so on the left: a model that counts positions from
    the left edge would count the filling, and its answers would depend on the batch.
    """
    frame, rows, size = network.special_tokens, batch.window_ids, batch.num_rows * batch.length
    counts = np.zeros(batch.num_rows, np.int64)
    counts[: len(rows)] = windows.lengths[rows]
    begins = np.arange(0, size, batch.length) + len(frame.prefix_ids)  # where the text of each row begins
    texts = expand_ranges(begins, begins + counts)
    ids, types = np.full(size, frame.pad_token_id), np.full(size, frame.pad_token_type_id)
    ids[texts] = tokens.ids[expand_ranges(windows.starts[rows], windows.ends[rows])]
    types[texts] = frame.token_type_id
    for place in range(len(frame.prefix_ids)):
        added = begins - len(frame.prefix_ids) + place
        ids[added], types[added] = frame.prefix_ids[place], frame.prefix_type_ids[place]
    for place in range(len(frame.suffix_ids)):
        added = begins + counts + place
        ids[added], types[added] = frame.suffix_ids[place], frame.suffix_type_ids[place]
    mask = np.arange(batch.length) < (counts + frame.num_special_tokens)[:, None]
    return network.build_inputs(ids.reshape(mask.shape), mask, types.reshape(mask.shape))


def collect(run: ForwardRun, network: TokenClassifier) -> Outputs:
    """Wait for a run and return the outputs of its batches, for :func:`settled`."""
    outputs: Outputs = []
    try:
        with TENSOR_LOCK:
            for wait in run.synchronizers.values():
                wait()
            outputs = [(batch, [to_numpy(tensor) for tensor in tensors]) for batch, tensors in run.outputs]
    except Exception as error:  # noqa: BLE001 - some errors of a device come only now
        run.error = run.error or error
    run.outputs.clear()
    if isinstance(run.error, InvalidModelError):
        raise run.error
    if run.error is not None:
        what = f"The model could not run on {network.device}: {describe_error(run.error)}."
        remedy = f"Restart the kernel, or use {parse_device_argument(network.device).alternative}."
        raise DeviceUnavailableError(what, remedy) from run.error
    return outputs


def assemble_predictions(
    run: ForwardRun, network: TokenClassifier, outputs: Outputs
) -> tuple[Predictions, dict[int, OpenMedError]]:
    """Return the outputs of all batches in the order of the tokens, and why some sequences have no answer.

    Each token has its prediction from the window that owns it.
    """
    count = len(run.tokens)
    labels, scores = np.zeros(count, np.int64), np.zeros(count, np.float32)
    probabilities = (
        np.zeros((count, network.model.config.num_labels), np.float32) if network.return_all_probabilities else None
    )
    targets: tuple[np.ndarray, ...] = (labels, scores) if probabilities is None else (probabilities,)
    for batch, arrays in outputs:
        owned, inside = owned_token_positions(run.windows, batch, network.special_tokens)
        given = arrays if len(arrays) == len(targets) else (arrays[0].argmax(-1), arrays[0].max(-1))
        for target, array in zip(targets, given, strict=True):
            target[owned] = array.reshape(batch.num_rows * batch.length, *array.shape[2:])[inside]
    if probabilities is not None and count:
        labels, scores = probabilities.argmax(1), probabilities.max(1)
    failures = {
        int(run.tokens.sequence_ids(run.windows.starts[row])): error for row, error in run.window_errors.items()
    }
    unknown = np.flatnonzero(np.isnan(scores))
    if not len(unknown):
        return Predictions(labels, scores, probabilities), failures
    device = next(iter(run.synchronizers), network.device)  # The model may have been moved meanwhile.
    for sequence in {*run.tokens.sequence_ids(unknown).tolist()}:
        what = f"The model computes no numbers (NaN) on {device} in {network.model.dtype}."
        check = "Load it in float32" if network.model.dtype.itemsize < 4 else "Check its weights for NaN"  # noqa: PLR2004
        remedy = f"{check}, or use {parse_device_argument(device).alternative}."
        failures.setdefault(sequence, InvalidModelError(what, remedy))
    scores[unknown] = 0  # NaN is unlike itself, and decoding compares
    return Predictions(labels, scores, probabilities), failures


def owned_token_positions(windows: Windows, batch: Batch, frame: SpecialTokens) -> tuple[np.ndarray, np.ndarray]:
    """Return which tokens the windows of a batch own, and the place of each among all places of the batch."""
    firsts, lasts = windows.owned_starts[batch.window_ids], windows.owned_ends[batch.window_ids]
    begins = (
        np.arange(len(batch.window_ids)) * batch.length
        + len(frame.prefix_ids)
        + firsts
        - windows.starts[batch.window_ids]
    )
    return expand_ranges(firsts, lasts), expand_ranges(begins, begins + lasts - firsts)


@contextlib.contextmanager
def evaluation_mode(model: Any) -> Iterator[None]:
    """Hold the lock of tensor work with every part of a model in evaluation mode, and give each its own mode back.

    A model is left in training mode by a trainer, and dropout would make its answers random. The attribute is set instead of
    calling ``eval()``: some layers merge or move weights in it.
    """
    with TENSOR_LOCK:
        parts = [model]
        for part in parts:  # ``modules()`` takes five times as long, beside a short text too long.
            if part is not None and part._modules:  # noqa: SLF001 - as above
                parts.extend(part._modules.values())  # noqa: SLF001
        training = [part for part in parts if part is not None and part.training]
        try:
            for part in training:
                part.training = False
            yield
        finally:
            for part in training:
                part.training = True


def input_names(model: PreTrainedModel, wanted: Sequence[str]) -> frozenset[str]:
    """Return which arrays a model takes: those its tokenizer names, and a mask wherever it can read one."""
    names = frozenset({*wanted, "attention_mask"})
    known = accepted_arguments(type(model).forward)
    return names if known is None else names & known


@functools.cache
def accepted_arguments(function: Callable[..., Any]) -> frozenset[str] | None:
    """Return the names of a function's arguments, ``None`` if it does not name its ids and so passes all on."""
    names = frozenset(inspect.signature(function).parameters)
    return names if "input_ids" in names else None
