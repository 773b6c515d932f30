"""Batches of windows -> what the model says of every token. All work on the device is started here, under one lock."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ..devices.backend import TENSOR_LOCK, empty_cache
from ..devices.linear import fast_linear
from ..devices.memory import is_out_of_memory
from ..devices.transfer import to_array, to_device, towards_host, wait
from ..errors import DeviceUnavailable, ModelUnusable, OpenMedError, cause
from .batches import Batch
from .decoding import Predictions
from .tokens import Frame, Tokens
from .windows import Windows

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

Inputs = dict[str, np.ndarray]


@dataclass(frozen=True)
class Network:
    """A model as something that takes rows of tokens and gives labels.

    Attributes:
        model: The model, or what ``torch.compile`` made of it.
        frame: What stands around a text's tokens.
        inputs: The names of the arrays that it takes.
        whole: Whether the probabilities of all labels are wanted, not only the best of each token.
    """

    model: PreTrainedModel
    frame: Frame
    inputs: frozenset[str]
    whole: bool = False

    def __call__(self, inputs: Inputs) -> tuple[torch.Tensor, ...]:
        """Start a forward pass; return labels and scores, or all probabilities, as tensors of ``(rows, length, …)``."""
        import torch

        device = self.model.device
        with torch.no_grad(), fast_linear(device):
            output = self.model(**{name: to_device(array, device) for name, array in inputs.items()})
            logits = output["logits"] if isinstance(output, dict) else output[0]
            probabilities = logits.float().softmax(-1)
            if self.whole:
                return (towards_host(probabilities),)
            scores, labels = probabilities.max(-1)
            return towards_host(labels.to(torch.int16)), towards_host(scores)


@dataclass
class Run:
    """Batches that were started on the device, until they are collected.

    Attributes:
        tokens: The tokens that the windows are over.
        windows: The windows.
        outputs: Each batch with its outputs, which may not have been computed yet.
        failures: Windows that do not fit in memory alone, with the reason.
        error: What ended the run early.
        halved: Whether memory was short, so that the next batches should be smaller.
    """

    tokens: Tokens
    windows: Windows
    outputs: list[tuple[Batch, tuple[torch.Tensor, ...]]] = field(default_factory=list)
    failures: dict[int, OpenMedError] = field(default_factory=dict)
    error: Exception | None = None
    halved: bool = False


def start(network: Network, tokens: Tokens, windows: Windows, batches: Sequence[Batch]) -> Run:
    """Start all batches on the model's device; an error is kept in the run, for when its turn comes."""
    run = Run(tokens, windows)
    with TENSOR_LOCK:
        try:
            for batch in batches:
                start_batch(network, run, batch)
        except (RuntimeError, IndexError) as error:
            run.error = error
    return run


def start_batch(network: Network, run: Run, batch: Batch) -> None:
    """Start one batch; where memory is short, its halves; a single window that does not fit becomes a failure."""
    try:
        run.outputs.append((batch, network(fill(run.tokens, run.windows, batch, network))))
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        reason = cause(error)
    else:
        return
    run.halved = True
    empty_cache(str(network.model.device))
    if len(batch.rows) > 1:
        for half in batch.halves():
            start_batch(network, run, half)
    else:
        what = f"A window of {batch.length} tokens does not fit in the memory of {network.model.device}: {reason}."
        run.failures[int(batch.rows[0])] = DeviceUnavailable(what, "Unload other models, or use the CPU.")


def fill(tokens: Tokens, windows: Windows, batch: Batch, network: Network) -> Inputs:
    """Return the arrays that a model takes for a batch, each int64 of ``(height, length)``."""
    frame, size = network.frame, (batch.height, batch.length)
    rows = batch.rows
    counts = np.zeros(batch.height, np.int64)
    counts[: len(rows)] = windows.lengths[rows]
    columns = np.arange(batch.length) - left_edges(counts, batch.length, frame)[:, None]
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


def left_edges(counts: np.ndarray, length: int, frame: Frame) -> np.ndarray:
    """Return the column of the first token of each row that is the text's own."""
    if frame.padding_left:
        return length - len(frame.after) - counts
    return np.full(len(counts), len(frame.before))


def collect(run: Run, network: Network) -> tuple[Predictions, dict[int, OpenMedError]]:
    """Wait for a run and return what the model says of every token, and the failures by sequence.

    Raises:
        DeviceUnavailable: Where the device failed for another reason than a lack of memory.
    """
    device = network.model.device
    if run.error is not None:
        what = f"The model could not run on {device}: {cause(run.error)}."
        raise DeviceUnavailable(what, "Use the CPU, or restart the kernel.") from run.error
    with TENSOR_LOCK:
        wait(device)
        outputs = [(batch, [to_array(tensor) for tensor in tensors]) for batch, tensors in run.outputs]
    predictions = gather(run, network, outputs)
    failures = {int(run.tokens.sequences(run.windows.firsts[row])): error for row, error in run.failures.items()}
    for sequence in np.unique(run.tokens.sequences(np.flatnonzero(np.isnan(predictions.scores)))).tolist():
        what = f"The model computes no numbers (NaN) on {device} in {network.model.dtype}."
        failures.setdefault(sequence, ModelUnusable(what, "Load it in float32, or use the CPU."))
    return predictions, failures


def gather(run: Run, network: Network, outputs: list[tuple[Batch, list[np.ndarray]]]) -> Predictions:
    """Return the outputs of all batches in the order of the tokens, each token from the window that owns it."""
    count, windows = len(run.tokens), run.windows
    labels, scores = np.zeros(count, np.int64), np.zeros(count, np.float32)
    probabilities = np.zeros((count, network.model.config.num_labels), np.float32) if network.whole else None
    targets: tuple[np.ndarray, ...] = (labels, scores) if probabilities is None else (probabilities,)
    for batch, arrays in outputs:
        rows = batch.rows
        edges = left_edges(windows.lengths[rows], batch.length, network.frame)
        positions = np.arange(batch.length) + (windows.firsts[rows] - edges)[:, None]
        owned = (positions >= windows.owned_firsts[rows][:, None]) & (positions < windows.owned_lasts[rows][:, None])
        for target, array in zip(targets, arrays, strict=True):
            target[positions[owned]] = array[: len(rows)][owned]
    if probabilities is not None and count:
        labels, scores = probabilities.argmax(1), probabilities.max(1)
    return Predictions(labels, scores, probabilities)


def input_names(model: PreTrainedModel, wanted: Sequence[str]) -> frozenset[str]:
    """Return which arrays a model takes: those its tokenizer names, and a mask wherever it can read one."""
    taken = inspect.signature(model.forward).parameters
    return frozenset({*wanted, "attention_mask"} & {*taken})
