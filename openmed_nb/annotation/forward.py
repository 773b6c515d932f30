"""Forward passes over windows of tokens: plan batches, start them on the device and collect the outputs.

Windows are sorted by length, and each batch stays within a token budget. On a device that compiles for every new shape,
sequence lengths and row counts come from a small fixed set. A batch that does not fit in memory is retried as smaller batches
of any shape.
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
from ..devices.linear import cudnn_attention_disabled, wrap_mask
from ..devices.moving import arrays_to_device, copy_to_host_async, to_numpy
from ..devices.registry import empty_cache, get_device, is_out_of_memory, out_of_memory_error
from ..errors import DeviceUnavailableError, InvalidModelError, OpenMedError
from .decoding import Predictions
from .tokens import SpecialTokens, Tokens, Windows, expand_ranges

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


# Shapes of batches if the number of shapes is limited. A batch has one of NUM_LENGTH_BUCKETS lengths from MIN_LENGTH, or more
# if a length would otherwise be more than twice the previous length. It has the maximum number of rows, or that number divided
# by a power of ROW_DIVISOR. Of the settings with at most 24 shapes for 8,192 tokens per batch and rows of up to 512 tokens that
# use the whole budget, these values need the fewest tokens and passes for a small number of texts.
MIN_LENGTH = 16
NUM_LENGTH_BUCKETS = 7
ROW_DIVISOR = 8

# Up to this number of probabilities, copying all of them to the host is faster than reducing them on a GPU.
MAX_PROBABILITIES_TO_COPY = 1024

# Length of the row that is used to check whether a model masks padding. Rows on MPS are padded to this length anyway.
PROBE_LENGTH = 32

# Arrays that the model takes, by argument name.
Inputs = dict[str, np.ndarray]

# The same inputs as tensors on the device.
DeviceInputs = dict[str, "torch.Tensor"]


@dataclass(frozen=True)
class Batch:
    """Windows that run together.

    Attributes:
        window_ids: Ids of the windows, one per row.
        length: Number of tokens per row, including padding.
        num_rows: Number of rows, including empty rows.
    """

    window_ids: np.ndarray
    length: int
    num_rows: int

    def split(self, lengths: np.ndarray) -> list[Batch]:
        """Return smaller batches for a device on which this batch does not fit.

        These are two halves, or one batch without padding, or an empty list if the batch cannot be split. Each has the length
        of its longest window, so that a window does not fail because of the length of another window.
        """
        if self.num_rows == 1 and self.length == lengths[self.window_ids[0]]:
            return []
        middle = (len(self.window_ids) + 1) // 2
        num_rows = (self.num_rows + 1) // 2
        halves = self.window_ids[:middle], self.window_ids[middle:]
        return [Batch(rows, int(lengths[rows].max()), num_rows) for rows in halves if len(rows)]


@dataclass(frozen=True)
class TokenBudget:
    """Limits of one batch.

    Attributes:
        max_tokens: Maximum number of tokens, including padding.
        max_padding: Maximum number of padding tokens. The default takes about as long as launching another batch.
        limit_shapes: Whether to use few different shapes.
        allow_padding: Whether rows may be padded. It is ``False`` for a model that does not mask padding.
    """

    max_tokens: int
    max_padding: int = 256
    limit_shapes: bool = False
    allow_padding: bool = True

    def capped_at(self, tokens: int) -> TokenBudget:
        """Return the budget limited to a number of tokens that fits in the memory of the device."""
        return replace(self, max_tokens=max(1, min(self.max_tokens, tokens)))

    def rows_for_length(self, length: int) -> int:
        """Return the maximum number of rows of a length, at least 1."""
        return max(1, self.max_tokens // length)


def plan_batches(lengths: np.ndarray, budget: TokenBudget, max_length: int) -> list[Batch]:
    """Return batches that contain every window once, longest first, so that a lack of memory shows at the start."""
    order = np.argsort(-lengths, kind="stable")
    if budget.allow_padding and budget.limit_shapes:
        return list(_plan_few_shapes(order, lengths, budget, max_length))
    if not budget.allow_padding:
        budget = replace(budget, max_padding=0)
    # A batch ends before its padding exceeds the cost of launching another batch, or its number of text tokens.
    batches: list[Batch] = []
    position = 0
    while position < len(order):
        length = int(lengths[order[position]])
        rows = order[position : position + budget.rows_for_length(length)]
        text_tokens = np.cumsum(lengths[rows])
        padding = length * np.arange(1, len(rows) + 1) - text_tokens
        (too_padded,) = np.nonzero(padding > np.minimum(text_tokens, budget.max_padding))
        if len(too_padded):
            rows = rows[: too_padded[0]]
        batches.append(Batch(rows, length, len(rows)))
        position += len(rows)
    return batches


def _plan_few_shapes(order: np.ndarray, lengths: np.ndarray, budget: TokenBudget, max_length: int) -> Iterator[Batch]:
    """Yield batches of few shapes. A batch of several rows contains at most as much padding as text."""
    buckets = np.array(length_buckets(max_length))
    text_tokens = np.append(0, np.cumsum(lengths[order]))
    position = 0
    while position < len(order):
        length = int(buckets[np.searchsorted(buckets, lengths[order[position]])])
        num_rows = budget.rows_for_length(length)
        while num_rows > 1:
            tokens = text_tokens[min(position + num_rows, len(order))] - text_tokens[position]
            if num_rows * length <= 2 * tokens:
                break
            num_rows = max(1, num_rows // ROW_DIVISOR)
        yield Batch(order[position : position + num_rows], length, num_rows)
        position += num_rows


def length_buckets(max_length: int) -> list[int]:
    """Return the lengths that rows are padded to, geometrically spaced up to the maximum length of the model."""
    min_length = min(MIN_LENGTH, max_length)
    num_buckets = max(NUM_LENGTH_BUCKETS, 1 + math.ceil(math.log2(max_length / min_length)))
    steps = np.geomspace(min_length, max_length, num_buckets)
    return [int(length) for length in np.unique(np.minimum(np.ceil(steps.round(6) / 8).astype(int) * 8, max_length))]


@dataclass(frozen=True)
class TokenClassifier:
    """A token-classification model and the layout of its inputs.

    Attributes:
        model: The model.
        special_tokens: The special tokens around each window.
        input_names: Names of the arrays that the model takes.
        linear_mode: Returns a context manager for linear layers on a device over a number of tokens.
        return_all_probabilities: Whether to return the probabilities of all labels instead of the best label of each token.
    """

    model: PreTrainedModel
    special_tokens: SpecialTokens
    input_names: frozenset[str]
    linear_mode: Callable[[torch.device, int], contextlib.AbstractContextManager[None]]
    return_all_probabilities: bool = False

    @property
    def device(self) -> torch.device:
        """The current device of the model, even if another thread has moved it."""
        return self.first_parameter.device

    @property
    def first_parameter(self) -> torch.Tensor:
        """The first parameter of the model, which determines its device and dtype."""
        parameters, name = self._first_parameter_location
        parameter = parameters[name]
        assert parameter is not None  # noqa: S101 - checked when it was found
        return parameter

    @functools.cached_property
    def _first_parameter_location(self) -> tuple[dict[str, torch.nn.Parameter | None], str]:
        # Cached, because the search takes long compared with annotating a short text.
        locations = ((module._parameters, name) for module in self.model.modules() for name in module._parameters)  # noqa: SLF001
        return next((parameters, name) for parameters, name in locations if parameters[name] is not None)

    def forward_on_device(
        self, inputs: DeviceInputs, on_logits: Callable[[torch.Tensor], None] | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Start a forward pass over inputs on the device. The model must be in evaluation mode.

        Returns:
            Labels and scores, or all probabilities if they are requested or few, as tensors ``(rows, length, …)``.
        """
        import torch

        with torch.no_grad():
            logits = self._forward_logits(inputs)
            if on_logits:
                on_logits(logits)
        num_outputs = logits.shape[-1]
        num_labels = self.model.config.num_labels
        if num_outputs > num_labels:
            raise InvalidModelError(
                f"The model outputs {num_outputs} labels, but id2label defines {num_labels}.",
                "Correct model.config.id2label.",
            )
        probabilities = logits.float().softmax(-1)
        if self.return_all_probabilities or probabilities.numel() <= MAX_PROBABILITIES_TO_COPY:
            return (probabilities,)
        scores, labels = probabilities.max(-1)
        return labels.to(torch.int32), scores

    def build_inputs(self, ids: np.ndarray, mask: np.ndarray, types: np.ndarray | None = None) -> Inputs:
        """Return the arrays that the model takes, each an int64 array of shape ``(rows, length)``."""
        types = np.zeros_like(ids) if types is None else types
        arrays = {"input_ids": ids, "token_type_ids": types, "attention_mask": mask.astype(np.int64)}
        return {name: array for name, array in arrays.items() if name in self.input_names}

    def dummy_inputs(self, rows: int, length: int) -> Inputs:
        """Return a batch without padding for measurements. The token ids do not affect the runtime."""
        ids = np.full((rows, length), self.special_tokens.pad_token_id, np.int64)
        return self.build_inputs(ids, np.ones_like(ids))

    def logits(self, inputs: Inputs) -> torch.Tensor:
        """Start a forward pass and return the logits ``(rows, length, labels)`` on the model's device."""
        with evaluation_mode(self.model):
            return self._forward_logits(*self.copy_to_device([inputs]))

    def copy_to_device(self, batches: Sequence[Inputs]) -> list[DeviceInputs]:
        """Start copying all batches to the model's device in one transfer."""
        arrays = [array for inputs in batches for array in inputs.values()]
        tensors = iter(arrays_to_device(arrays, self.device))
        device_batches = [dict(zip(inputs, tensors, strict=False)) for inputs in batches]
        if "attention_mask" in self.input_names:
            for inputs, device_inputs in zip(batches, device_batches, strict=True):
                device_inputs["attention_mask"] = wrap_mask(
                    device_inputs["attention_mask"], full=bool(inputs["attention_mask"].all())
                )
        return device_batches

    def _forward_logits(self, inputs: DeviceInputs) -> torch.Tensor:
        device = self.device
        num_tokens = inputs["input_ids"].numel()
        with self.linear_mode(device, num_tokens), cudnn_attention_disabled(device, self.first_parameter.dtype):
            return read_logits(self.model(**inputs))


def read_logits(output: Any) -> torch.Tensor:
    """Return the logits in an output of a model."""
    logits: torch.Tensor = output["logits"] if isinstance(output, dict) else output[0]
    return logits


@dataclass
class ForwardRun:
    """Forward passes over the windows of one chunk.

    Attributes:
        network: The model.
        tokens: Tokens of the chunk.
        windows: Windows over these tokens.
        synchronizers: Function that waits for the work on each device. Another thread may move the model during a run.
        pending: Batches that have not been started. The inputs are ``None`` if the batches did not fit on the device together.
        outputs: Outputs of the started batches, on the host after :meth:`collect`.
        window_errors: Errors of windows that do not fit in memory even alone, by window id.
        error: Error that ended the run early.
        max_fitting_tokens: Largest number of tokens per batch that may fit in memory.
        on_progress: Called after each batch with the completed fraction of the tokens. Only used on the CPU.
        on_logits: Called after each batch with its logits ``(rows, length, labels)`` on the device.
    """

    network: TokenClassifier
    tokens: Tokens
    windows: Windows
    synchronizers: dict[torch.device, Callable[[], None]] = field(default_factory=dict)
    pending: deque[tuple[Batch, DeviceInputs | None]] = field(default_factory=deque)
    outputs: list[tuple[Batch, list[Any]]] = field(default_factory=list)
    window_errors: dict[int, OpenMedError] = field(default_factory=dict)
    error: Exception | None = None
    max_fitting_tokens: int = sys.maxsize
    on_progress: Callable[[float], None] | None = None
    on_logits: Callable[[Batch, torch.Tensor], None] | None = None

    def copy_batches(self, batches: Sequence[Batch]) -> None:
        """Copy batches to the model's device in one transfer, if they fit."""
        network = self.network
        with TENSOR_LOCK:
            try:
                inputs = network.copy_to_device([self._pad(batch) for batch in batches])
                self.pending.extend(zip(batches, inputs, strict=True))
            except Exception as error:  # noqa: BLE001 - collect raises the errors of the device
                if is_out_of_memory(error):
                    empty_cache(str(network.device))
                    self.pending.extend((batch, None) for batch in batches)
                else:
                    self.error = error

    def start_pending(self) -> None:
        """Start all pending batches on the model's device. An error is stored, and :meth:`collect` raises it."""
        if not self.pending:
            return
        device = get_device(self.network.device)
        with evaluation_mode(self.network.model):  # Once for all batches, because it visits every module.
            try:
                sizes = [batch.num_rows * batch.length for batch, _ in self.pending]
                done = 0
                total = sum(sizes)
                for size in sizes:
                    batch, inputs = self.pending.popleft()
                    self._start_batch(batch, inputs)
                    done += size
                    # An accelerator has only started the work at this point.
                    if self.on_progress and done < total and not device.is_accelerator:
                        self.on_progress(done / total)
                self.synchronizers[self.network.device] = device.record_event()
            except Exception as error:  # noqa: BLE001 - the model's code may raise anything; collect raises it
                self.error = error
                self.pending.clear()

    def _start_batch(self, batch: Batch, inputs: DeviceInputs | None = None) -> None:
        """Start one batch, or its halves if memory is insufficient.

        If a single window does not fit, the error is stored in ``window_errors``.
        """
        network = self.network
        try:
            # Another thread may have moved the model after the inputs were copied.
            if inputs is None or inputs["input_ids"].device != network.device:
                (inputs,) = network.copy_to_device([self._pad(batch)])
            outputs = network.forward_on_device(inputs, self.on_logits and functools.partial(self.on_logits, batch))
            self.outputs.append((batch, [copy_to_host_async(tensor) for tensor in outputs]))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            device = str(network.device)
            description = f"A window of {batch.length} tokens"
            # Continue outside of the handler, because the frames of the error keep references to tensors.
            window_error = out_of_memory_error(description, device, error, get_device(device).unload_remedy)
        else:
            return
        empty_cache(device)
        size = batch.num_rows * batch.length
        # Larger batches may have been planned before this limit was known.
        if batch.num_rows > 1 and size <= self.max_fitting_tokens:
            self.max_fitting_tokens = size // 2
        halves = batch.split(self.windows.lengths + network.special_tokens.num_special_tokens)
        for half in halves:
            self._start_batch(half)
        if not halves:
            self.window_errors[int(batch.window_ids[0])] = window_error

    def _pad(self, batch: Batch) -> Inputs:
        return pad_batch(self.tokens, self.windows, batch, self.network)

    def collect(self) -> None:
        """Wait for the started batches, and copy their outputs to the host."""
        outputs = self.outputs
        self.outputs = []
        try:
            with TENSOR_LOCK:
                for wait in self.synchronizers.values():
                    wait()
                self.outputs = [(batch, [to_numpy(tensor) for tensor in tensors]) for batch, tensors in outputs]
        except Exception as error:  # noqa: BLE001 - some device errors are raised only when the host waits
            self.error = self.error or error
        if isinstance(self.error, InvalidModelError):
            raise self.error
        if self.error is not None:
            device = self.network.device
            raise DeviceUnavailableError(
                f"The model could not run on {device}: {describe_error(self.error)}.",
                f"Restart the kernel, or use {get_device(device).alternative_devices}.",
            ) from self.error

    def predictions(self) -> tuple[Predictions, dict[int, OpenMedError]]:
        """Return the predictions in token order, and the errors of failed texts by text index.

        The prediction of each token comes from the window that owns it.
        """
        model = self.network.model
        count = len(self.tokens)
        labels = np.zeros(count, np.int64)
        scores = np.zeros(count, np.float32)
        probabilities = None
        if self.network.return_all_probabilities:
            probabilities = np.zeros((count, model.config.num_labels), np.float32)
        targets: tuple[np.ndarray, ...] = (labels, scores) if probabilities is None else (probabilities,)
        for batch, arrays in self.outputs:
            owned, inside = self.owned_positions(batch)
            values = arrays if len(arrays) == len(targets) else (arrays[0].argmax(-1), arrays[0].max(-1))
            for target, array in zip(targets, values, strict=True):
                target[owned] = array.reshape(batch.num_rows * batch.length, *array.shape[2:])[inside]
        if probabilities is not None and count:
            labels = probabilities.argmax(1)
            scores = probabilities.max(1)
        errors = {
            int(self.tokens.text_ids(self.windows.starts[window])): error
            for window, error in self.window_errors.items()
        }
        nan_positions = np.flatnonzero(np.isnan(scores))
        device = next(iter(self.synchronizers), self.network.device)  # The model may have been moved after the run.
        for text_id in {*self.tokens.text_ids(nan_positions).tolist()}:
            message = f"The model produces NaN on {device} in {model.dtype}."
            check = "Load it in float32" if model.dtype.itemsize < 4 else "Check its weights for NaN"  # noqa: PLR2004
            remedy = f"{check}, or use {get_device(device).alternative_devices}."
            errors.setdefault(text_id, InvalidModelError(message, remedy))
        scores[nan_positions] = 0  # Decoding compares scores, and NaN does not equal itself.
        return Predictions(labels, scores, probabilities), errors

    def owned_positions(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """Return the positions of the tokens that the windows of a batch own, and their positions in the flattened batch."""
        windows = self.windows
        starts = windows.owned_starts[batch.window_ids]
        ends = windows.owned_ends[batch.window_ids]
        num_prefix_tokens = len(self.network.special_tokens.prefix_ids)
        row_starts = np.arange(len(batch.window_ids)) * batch.length + num_prefix_tokens
        batch_starts = row_starts + starts - windows.starts[batch.window_ids]
        return expand_ranges(starts, ends), expand_ranges(batch_starts, batch_starts + ends - starts)


def pad_batch(tokens: Tokens, windows: Windows, batch: Batch, network: TokenClassifier) -> Inputs:
    """Return the padded model inputs of a batch, each an int64 array of shape ``(num_rows, length)``.

    Rows are padded on the right, even if the tokenizer pads on the left. A model that counts positions from the left edge would
    otherwise count the padding, and its results would depend on the batch.
    """
    special = network.special_tokens
    rows = batch.window_ids
    size = batch.num_rows * batch.length
    counts = np.zeros(batch.num_rows, np.int64)
    counts[: len(rows)] = windows.lengths[rows]
    text_starts = np.arange(0, size, batch.length) + len(special.prefix_ids)
    text_positions = expand_ranges(text_starts, text_starts + counts)
    ids = np.full(size, special.pad_token_id)
    types = np.full(size, special.pad_token_type_id)
    ids[text_positions] = tokens.ids[expand_ranges(windows.starts[rows], windows.ends[rows])]
    types[text_positions] = special.token_type_id
    prefix_positions = text_starts[:, None] - np.arange(len(special.prefix_ids), 0, -1)
    ids[prefix_positions] = special.prefix_ids
    types[prefix_positions] = special.prefix_type_ids
    suffix_positions = (text_starts + counts)[:, None] + np.arange(len(special.suffix_ids))
    ids[suffix_positions] = special.suffix_ids
    types[suffix_positions] = special.suffix_type_ids
    mask = np.arange(batch.length) < (counts + special.num_special_tokens)[:, None]
    return network.build_inputs(ids.reshape(mask.shape), mask, types.reshape(mask.shape))


@contextlib.contextmanager
def evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    """Hold the tensor lock with all modules of a model in evaluation mode, and restore the mode of each module.

    A trainer leaves a model in training mode, where dropout makes the results random. The attribute is set directly, because
    some layers merge or move weights in ``eval()``.
    """
    with TENSOR_LOCK:
        modules: list[torch.nn.Module | None] = [model]
        for module in modules:  # ``modules()`` takes five times as long, which is too slow for a short text.
            if module is not None and module._modules:  # noqa: SLF001 - for speed, see above
                modules.extend(module._modules.values())  # noqa: SLF001
        training = [module for module in modules if module is not None and module.training]
        try:
            for module in training:
                module.training = False
            yield
        finally:
            for module in training:
                module.training = True


def is_padding_masked(network: TokenClassifier, max_length: int) -> bool:
    """Return whether padding a row leaves the predictions for its tokens unchanged, except for rounding.

    A model may accept an attention mask and still read the padding, such as the convolutions of ConvBERT, the pooling of Funnel
    and the hashes of YOSO. A row of synthetic tokens therefore runs with and without padding. Hooks of the user are not called.
    An error of the model is raised, so that no answer is cached.
    """
    import torch

    if "attention_mask" not in network.input_names:
        return False
    padded_length = min(PROBE_LENGTH, max_length)
    length = padded_length * 2 // 3
    ids = np.full((1, padded_length), network.special_tokens.pad_token_id, np.int64)
    ids[0, :length] = np.resize([*network.special_tokens.prefix_ids, *network.special_tokens.suffix_ids] or [0], length)
    inputs = network.build_inputs(ids, (np.arange(padded_length) < length)[None])

    def forward(row: Inputs) -> torch.Tensor:
        """Return the logits of the tokens, without calling the hooks of users."""
        output = network.model.forward(**network.copy_to_device([row])[0])
        return read_logits(output)[0, :length].float()

    with evaluation_mode(network.model), torch.no_grad():
        padded = forward(inputs)
        unpadded = forward({name: array[:, :length] for name, array in inputs.items()})
        difference = float((padded - unpadded).abs().max())
        magnitude = float(unpadded.abs().max())
    rounding = torch.finfo(network.model.dtype).eps ** 0.5
    return not difference > rounding * max(1.0, magnitude)  # NaN is reported with the results.


def input_names(model: PreTrainedModel, tokenizer_names: Sequence[str]) -> frozenset[str]:
    """Return the input names of a model: those of its tokenizer, and an attention mask if the model accepts one."""
    names = frozenset({*tokenizer_names, "attention_mask"})
    accepted = accepted_arguments(type(model).forward)
    return names if accepted is None else names & accepted


@functools.cache
def accepted_arguments(function: Callable[..., object]) -> frozenset[str] | None:
    """Return the parameter names of a function, or ``None`` if it forwards all arguments (it has no ``input_ids``)."""
    names = frozenset(inspect.signature(function).parameters)
    return names if "input_ids" in names else None
