"""Streaming annotation: texts are read, tokenized, passed through the model and decoded in chunks.

While the device processes one chunk, the host decodes the previous chunk and tokenizes the next chunk.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from .._utils.text import short_type_name
from ..devices.registry import get_device
from ..errors import InvalidTextError, OpenMedError
from .decoding import Decoder
from .forward import (
    Batch,
    ForwardRun,
    TokenBudget,
    TokenClassifier,
    plan_batches,
)
from .references import effective_length, package_of, raise_if_error, read_text
from .storage import Entity, ResultStore
from .tokens import Tokens, Windows, plan_windows, tokenize

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


# The first chunk has 1 / FIRST_CHUNK_DIVISOR of the characters of a full chunk, and each chunk doubles the size of the previous
# chunk, so that the first results are available early.
FIRST_CHUNK_DIVISOR = 8

# Line breaks that the normalizer of BERT removes, so that the words around them would be one word. They are tokenized as spaces.
REMOVED_LINE_BREAKS = "\v\f\x1c\x1d\x1e\x1f\x85"

# Number of batches per chunk, and minimum number of tokens per chunk. The texts of a chunk are sorted by length.
BATCHES_PER_CHUNK = 8
MIN_CHUNK_TOKENS = 16384

# Number of chunks that are tokenized in advance if the texts are in memory.
PREFETCH_CHUNKS = 3

# Approximate number of characters per token of English text.
CHARACTERS_PER_TOKEN = 4


# Called with the number of texts in the current chunk, and the completed fraction of its tokens.
ProgressCallback = Callable[[int, float], None]


def text_error(text: object, index: int) -> InvalidTextError | None:
    """Return the error of an invalid text, or ``None`` if the text is valid.

    Args:
        text: The text, or the error of a text that could not be read.
        index: Index of the text for the message.
    """
    if isinstance(text, InvalidTextError):
        return text
    name = f"Text {index}"
    if not isinstance(text, str):
        remedy = "Pass a string; use '' for a missing text."
        if isinstance(text, os.PathLike):
            remedy = "Pass paths in a list, such as sorted(folder.glob('*.txt'))."
        elif hasattr(text, "text"):
            remedy = "Pass the texts of the items, such as [item.text for item in gold]."
        elif isinstance(text, (list, tuple)):
            remedy = "Pass the words of a text as one string, such as ' '.join(words)."
        elif package_of(text) == "pyarrow":
            remedy = "Pass the strings of an Arrow column, as in column.to_pylist()."
        return InvalidTextError(f"{name} must be a string, not {short_type_name(text)}.", remedy)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        position = error.start
    else:
        return None
    # Created outside of the handler, so that the original error, which contains the text, is not the context.
    message = f"{name} contains an unpaired surrogate at character {position}."
    return InvalidTextError(message, "Remove it, or read the source file with the correct encoding.")


@dataclass(frozen=True, repr=False)  # No repr, because the log of a worker would contain the texts.
class Chunk:
    """Consecutive texts of a stream.

    Attributes:
        first_index: Index of the first text in the stream.
        texts: Strings, references, or invalid values of the stream.
        error: Error of the stream after all its texts. Such a chunk has no texts.
    """

    first_index: int
    texts: list[Any]
    error: Exception | None = None


END_OF_STREAM = Chunk(0, [])


def iter_chunks(
    texts: Iterable[object],
    max_size: int,
    min_text_length: int = 1,
    max_texts: Callable[[], float] | None = None,
) -> Iterator[Chunk]:
    """Yield the texts of a stream in chunks.

    An error of the stream is yielded as a value in a last chunk without texts, so that the texts before it are not lost.

    Args:
        texts: The texts.
        max_size: Approximate number of characters of a full chunk.
        min_text_length: Minimum number of characters that each text counts for.
        max_texts: Returns the maximum number of texts of the next chunk. It only applies to chunks with at least an eighth of the
            characters of a full chunk.
    """
    stream = iter(texts)
    first_index = 0
    error = None
    min_size = max(1, max_size // FIRST_CHUNK_DIVISOR)
    size = min_size
    while error is None:
        chunk: list[Any] = []
        remaining = size
        limit = math.inf if max_texts is None else max_texts()
        try:
            while remaining > 0 and (len(chunk) < limit or size - remaining < min_size):
                chunk.append(next(stream))
                remaining -= max(effective_length(chunk[-1]), min_text_length)
        except StopIteration:
            if not chunk:
                return
        except Exception as stream_error:  # noqa: BLE001 - the stream may raise anything; it is raised after the texts
            error = stream_error
        if chunk:
            yield Chunk(first_index, chunk)
        first_index += len(chunk)
        size = min(2 * size, max_size)
    yield Chunk(first_index, [], error)


def chunk_characters(budget: TokenBudget) -> int:
    """Return the approximate number of characters per chunk."""
    return max(MIN_CHUNK_TOKENS, BATCHES_PER_CHUNK * budget.max_tokens) * CHARACTERS_PER_TOKEN


AggregationStrategy = Literal["none", "simple", "first", "average", "max"]


@dataclass(frozen=True)
class AnnotationSettings:
    """Settings that affect the results.

    Attributes:
        aggregation_strategy: Aggregation strategy of tokens.
        ignore_labels: Labels that are excluded from the results.
        max_tokens: Maximum number of text tokens per window.
        transformers_boundaries: Whether to use the word boundaries of transformers.
    """

    aggregation_strategy: AggregationStrategy
    ignore_labels: tuple[str, ...]
    max_tokens: int
    transformers_boundaries: bool = False


@dataclass(frozen=True)
class TokenizedChunk:
    """A chunk of texts, ready for the device.

    Attributes:
        first_index: Index of the first text in the stream.
        texts: The texts. Invalid texts are replaced by empty strings.
        errors: Errors of invalid texts, by position in the chunk.
        tokens: Tokens of the texts.
        windows: Windows over the tokens.
    """

    first_index: int
    texts: list[str]
    errors: dict[int, OpenMedError]
    tokens: Tokens
    windows: Windows


@dataclass(frozen=True)
class Annotator:
    """A model, its tokenizer and the settings of a call.

    Attributes:
        network: The model.
        tokenizer: The tokenizer of the model.
        decoder: Converts predictions to entities.
        settings: Settings that affect the results.
        budget: Limits of one batch.
        may_pad: Returns whether rows may be padded. This is measured at the first call.
    """

    network: TokenClassifier
    tokenizer: PreTrainedTokenizerBase
    decoder: Decoder
    settings: AnnotationSettings
    budget: TokenBudget
    may_pad: Callable[[], bool]

    def with_model(self, model: PreTrainedModel) -> Annotator:
        """Return an annotator with the same settings for a different model."""
        return replace(self, network=replace(self.network, model=model))

    def annotate(
        self,
        texts: Iterable[object],
        on_progress: ProgressCallback | None = None,
        in_memory: bool = False,
    ) -> Iterator[ResultStore]:
        """Yield the results of texts chunk by chunk.

        Args:
            texts: The texts.
            on_progress: Called after each batch, if the model runs on the CPU.
            in_memory: Whether the texts are in memory, so that several chunks can be prefetched.
        """
        chunks = iter_chunks(texts, chunk_characters(self.budget))
        with contextlib.closing(self._tokenize(chunks, in_memory)) as tokenized_chunks:
            for tokenized, run in self._forward(tokenized_chunks, on_progress):
                yield self.decode(tokenized, run)

    def _tokenize(self, chunks: Iterator[Chunk], in_memory: bool) -> Generator[TokenizedChunk | Exception]:
        """Yield tokenized chunks, followed by the error of the stream, if any.

        While a GPU processes a chunk, another thread tokenizes the next chunks. On the CPU, a chunk is tokenized when it is
        needed, because the model uses all cores. Several chunks are prefetched if the texts are in
        memory. Otherwise only one chunk is prefetched, because a slow stream must not delay the results of earlier texts.
        """
        prefetched: deque[Callable[[], TokenizedChunk]] = deque()
        error: Exception | None = None
        pool: ThreadPoolExecutor | None = None

        def prefetch(count: int) -> None:
            nonlocal error
            while len(prefetched) < count and (chunk := next(chunks, None)):
                error = chunk.error
                if chunk.texts and pool:
                    prefetched.append(pool.submit(self.tokenize, chunk).result)
                elif chunk.texts:
                    prefetched.append(functools.partial(self.tokenize, chunk))

        try:
            # The device waits for the first chunk, so it is tokenized in this thread: another thread takes longer to start.
            prefetch(1)
            if get_device(self.network.device).is_accelerator:
                pool = ThreadPoolExecutor(1)  # More threads would compete for the GIL.
            while prefetched:
                get_result = prefetched.popleft()
                tokenized = get_result()
                if in_memory:
                    prefetch(PREFETCH_CHUNKS)
                yield tokenized
                prefetch(1)
        finally:
            if pool:
                pool.shutdown(cancel_futures=True)
        if error:
            yield error

    def _forward(
        self, chunks: Iterator[TokenizedChunk | Exception], on_progress: ProgressCallback | None
    ) -> Iterator[tuple[TokenizedChunk, ForwardRun]]:
        """Yield chunks with the predictions of the model. An asynchronous device already processes the next chunk by then."""
        device = self.network.device
        budget = self.budget
        current: tuple[TokenizedChunk, ForwardRun] | None = None
        for next_chunk in itertools.chain(chunks, [None]):
            following = None
            if current:
                tokenized, run = current
                if on_progress:
                    run.on_progress = functools.partial(on_progress, len(tokenized.texts))
                run.start_pending()  # On the CPU, all batches are pending.
                budget = budget.capped_at(run.max_fitting_tokens)
            if isinstance(next_chunk, TokenizedChunk) and (current is None or get_device(device).supports_async_copies):
                following = next_chunk, self._start_chunk(next_chunk, budget)
            if current:
                run.collect()
                # A copy to MPS waits for all queued work, so the next chunk is started only after the outputs are collected.
                if isinstance(next_chunk, TokenizedChunk) and following is None:
                    following = next_chunk, self._start_chunk(next_chunk, budget)
                yield tokenized, run
            if isinstance(next_chunk, Exception):
                raise next_chunk
            current = following

    def annotate_chunk(self, chunk: Chunk, budget: TokenBudget) -> tuple[ResultStore, TokenBudget]:
        """Return the results of one chunk, and the budget of the next chunk, which is smaller if memory was insufficient."""
        tokenized = self.tokenize(chunk)
        run = self.predict(tokenized, self.plan_batches(tokenized, budget))
        return self.decode(tokenized, run), budget.capped_at(run.max_fitting_tokens)

    def predict(
        self,
        tokenized: TokenizedChunk,
        batches: Sequence[Batch],
        on_logits: Callable[[Batch, torch.Tensor], None] | None = None,
    ) -> ForwardRun:
        """Return the finished run of the batches of a chunk; :meth:`decode` returns its results.

        Args:
            tokenized: The chunk.
            batches: Batches of its windows.
            on_logits: Called after each batch with its logits ``(rows, length, labels)`` on the device.
        """
        run = self.copy_to_device(tokenized, batches)
        run.on_logits = on_logits
        run.start_pending()
        run.collect()
        return run

    def copy_to_device(self, tokenized: TokenizedChunk, batches: Sequence[Batch]) -> ForwardRun:
        """Return a run whose batches are on the device, but not started."""
        run = ForwardRun(self.network, tokenized.tokens, tokenized.windows)
        run.copy_batches(batches)
        return run

    def _start_chunk(self, tokenized: TokenizedChunk, budget: TokenBudget) -> ForwardRun:
        """Return the run of a chunk, which is started on an accelerator and only planned on the CPU."""
        run = self.copy_to_device(tokenized, self.plan_batches(tokenized, budget))
        if get_device(self.network.device).is_accelerator:
            run.start_pending()
        return run

    def entities(self, texts: Iterable[object]) -> list[list[Entity]]:
        """Return the entities of texts, or raise the error of the first failed text."""
        return [raise_if_error(result) for chunk in self.annotate(texts) for result in chunk.outcomes()]

    def plan_batches(self, tokenized: TokenizedChunk, budget: TokenBudget) -> list[Batch]:
        """Return the batches of a chunk."""
        num_special_tokens = self.network.special_tokens.num_special_tokens
        lengths = tokenized.windows.lengths + num_special_tokens
        budget = replace(budget, allow_padding=(len(lengths) > 1 or budget.limit_shapes) and self.may_pad())
        return plan_batches(lengths, budget, self.settings.max_tokens + num_special_tokens)

    def tokenize(self, chunk: Chunk) -> TokenizedChunk:
        """Read and tokenize a chunk of texts. Only the host is used."""
        settings = self.settings
        texts = chunk.texts
        errors: dict[int, OpenMedError] = {}
        try:  # If the texts are valid, this is faster than a check of each text.
            "".join(texts).encode()
            is_valid = True
        except (TypeError, UnicodeEncodeError):
            is_valid = False
        # Checked outside of the handler, so that the original error, which contains the texts, is not the context.
        if not is_valid:
            texts = [read_text(text, number) for number, text in enumerate(texts, chunk.first_index)]
            for index, text in enumerate(texts):
                error = text_error(text, chunk.first_index + index)
                if error:
                    errors[index] = error
                    texts[index] = ""
        boundaries = settings.transformers_boundaries
        read_texts = texts
        if not boundaries and any(map("".join(texts).__contains__, REMOVED_LINE_BREAKS)):
            read_texts = [text.translate(dict.fromkeys(map(ord, REMOVED_LINE_BREAKS), " ")) for text in texts]
        tokens = tokenize(self.tokenizer, read_texts, boundaries)
        windows = plan_windows(tokens.text_offsets, tokens.word_starts, settings.max_tokens)
        return TokenizedChunk(chunk.first_index, texts, errors, tokens, windows)

    def decode(self, tokenized: TokenizedChunk, run: ForwardRun) -> ResultStore:
        """Return the results of all texts of a chunk from its finished run. Only the host is used."""
        predictions, text_errors = run.predictions()
        store = self.decoder.entities(tokenized.texts, tokenized.tokens, predictions)
        errors = dict(tokenized.errors)
        for text_id, error in text_errors.items():
            errors[text_id] = type(error)(f"Text {tokenized.first_index + text_id}: {error.message}", error.remedy)
        if not errors:
            return store
        dropped = {text_id: spans for text_id, spans in store.dropped.items() if text_id not in errors}
        results = [errors.get(text_id, entities) for text_id, entities in enumerate(store)]
        store = ResultStore.from_results(results, store.key)
        store.dropped = dropped
        return store


@dataclass(frozen=True)
class AnnotationSource:
    """Source of the results of a run: a pipeline of this process, or the workers of a cluster.

    Attributes:
        annotate: Yields results; takes the texts and a progress callback as
            :meth:`Annotator.annotate` does.
        settings: Model and settings that affect the results; they identify the run.
        device: Device of the model for display.
        known_labels: Labels of the entities that the model can predict, or ``None`` if unknown.
    """

    annotate: Callable[..., Iterator[ResultStore]]
    settings: Mapping[str, Any]
    device: str
    known_labels: tuple[str, ...] | None = None
