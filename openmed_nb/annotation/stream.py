"""A stream of texts in, a stream of answers out: chunks of texts that are read, run and decoded while others wait.

While the device computes one chunk, the host decodes the one before and tokenizes the next.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from .._utils.text import short_type_name
from ..devices.registry import parse_device_argument
from ..errors import InvalidTextError, OpenMedError
from .decoding import Decoder, Predictions
from .forward import (
    Batch,
    ForwardRun,
    TokenBudget,
    TokenClassifier,
    assemble_predictions,
    collect,
    copy_batches,
    plan_batches,
    start_pending,
)
from .lexicon import MIN_CHARACTERS, WordTokenCache, supports_tokenizer
from .references import effective_length, read_text
from .results import Entity, ResultStore, TextResult, dropped_span, uncovered
from .tokens import Tokens, Truncation, Windows, build_tokens, encode_batch, plan_windows, tokenize_words

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase


# The first chunk has one in FIRST_CHUNK_DIVISOR of the characters of a full one, the next twice as many: answers come soon.
FIRST_CHUNK_DIVISOR = 8

# How many batches of texts, and at least how many tokens, are read, sorted by length and held at a time.
BATCHES_PER_CHUNK, MIN_CHUNK_TOKENS = 8, 16384

# Of texts at hand, so many chunks are tokenized before their turn.
PREFETCH_CHUNKS = 3

# About how long a token of English text is.
CHARACTERS_PER_TOKEN = 4


def check_text(text: object, name: str = "The text") -> None:
    """Refuse anything but a text, and half of a surrogate pair, which no encoding can write."""
    if not isinstance(text, str):
        remedy = "Pass a string, '' where there is no text."
        if isinstance(text, os.PathLike):
            remedy = "Pass paths in a list, such as sorted(folder.glob('*.txt'))."
        elif isinstance(text, (list, tuple)):
            remedy = "Pass the words of a text as one string, such as ' '.join(words)."
        elif type(text).__module__.partition(".")[0] == "pyarrow":
            remedy = "Pass the strings of a column of Arrow, as in column.to_pylist()."
        raise InvalidTextError(f"{name} must be a string, not {short_type_name(text)}.", remedy)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        position = error.start
    else:
        return
    # Outside of the handler: the other error has the text, and would be the context of this one.
    what = f"{name} has half of a surrogate pair at character {position}."
    raise InvalidTextError(what, "Remove it, or read the file it comes from with its right encoding.")


def text_error(text: Any, number: int, split: bool) -> InvalidTextError | None:
    """Return why a text, or a list of words if texts are split, cannot be read; ``None`` if it can.

    An error in the place of a text is the reason itself.
    """
    if isinstance(text, InvalidTextError):
        return text
    try:
        if not split:
            check_text(text, f"Text {number}")
        elif isinstance(text, list):
            for word in text:
                check_text(word, f"A word of text {number}")
        else:
            what = f"Text {number} must be a list of words, not {short_type_name(text)}."
            return InvalidTextError(what, "Pass a list of strings.")
    except InvalidTextError as error:
        return error
    return None


def all_readable(texts: list[Any]) -> bool:
    """Tell whether all texts can be read, at once and so sooner than :func:`unreadable` for each."""
    try:
        "".join(texts).encode()
    except (TypeError, UnicodeEncodeError):
        return False
    return True


@dataclass(frozen=True, repr=False)  # A worker's log would show what failed.
class Chunk:
    """Consecutive texts of a stream."""

    first: int  # the number of the first text in the stream
    texts: list[Any]  # strings or lists of words, or whatever else the stream gave
    error: Exception | None = None  # what the stream failed with after all texts; such a chunk has none


END_OF_STREAM = Chunk(0, [])


def iter_chunks(
    texts: Iterable[Any],
    characters: int,
    first: int = 0,
    min_text_length: int = 1,
    max_texts: Callable[[], float] = lambda: math.inf,
) -> Iterator[Chunk]:
    """Yield the texts of a stream in order, in chunks of about ``characters``; each text counts for ``least`` of them.

    ``most`` says how many texts the next chunk has at most, if they are an eighth of a full chunk. A failure of the stream comes
    as a value, in a last chunk without texts, so that the texts before it are not lost.
    """
    stream, smallest, error = iter(texts), max(1, characters // FIRST_CHUNK_DIVISOR), None
    size = smallest
    while error is None:
        chunk: list[Any] = []
        left, enough = size, max_texts()
        try:
            while left > 0 and (len(chunk) < enough or size - left < smallest):
                chunk.append(next(stream))
                left -= max(effective_length(chunk[-1]), min_text_length)
        except StopIteration:
            if not chunk:
                return
        except Exception as failure:  # noqa: BLE001 - of the stream's own code, and raised after the texts before it
            error = failure
        if chunk:
            yield Chunk(first, chunk)
        first += len(chunk)
        size = min(2 * size, characters)
    yield Chunk(first, [], error)


def chunk_characters(budget: TokenBudget) -> int:
    """Return about how many characters are read at a time."""
    return max(MIN_CHUNK_TOKENS, BATCHES_PER_CHUNK * budget.max_tokens) * CHARACTERS_PER_TOKEN


@dataclass(frozen=True)
class AnnotationSettings:
    """How texts are read and answered; all of it changes answers."""

    aggregation_strategy: str
    ignore_labels: tuple[str, ...]
    max_tokens: int  # tokens of a text that the model takes at once
    delimiter: str | None = None  # joins words, if texts come as lists of words
    stride: int | None = None  # the overlap of transformers' windows; None for our own
    truncation: bool = False  # whether what is longer than the model takes is dropped
    transformers_boundaries: bool = False  # whether words start where transformers has them start

    @property
    def has_transformers_boundaries(self) -> bool:
        """Whether words start where transformers has them start; with a stride, everything is as there."""
        return self.transformers_boundaries or self.stride is not None


@dataclass(frozen=True)
class TokenizedChunk:
    """A chunk of texts, ready for the device."""

    first: int  # the number of the first text in the stream
    texts: list[str]  # an empty one in the place of one that cannot be read
    errors: dict[int, OpenMedError]  # why some cannot be read, by their place
    tokens: Tokens
    windows: Windows


@dataclass(frozen=True)
class Annotator:
    """A model, its tokenizer and the settings of a call."""

    network: TokenClassifier
    tokenizer: PreTrainedTokenizerBase
    decoder: Decoder
    settings: AnnotationSettings
    budget: TokenBudget
    merge_windows: Callable[[list[Entity]], list[Entity]]  # joins the entities of overlapping windows of one text
    may_pad: Callable[[], bool]  # Whether rows may be padded, which is measured when it is first asked.

    @functools.cached_property
    def word_cache(self) -> WordTokenCache | None:
        """The lexicon of this call, ``None`` for a tokenizer that it does not serve."""
        theirs = self.settings.has_transformers_boundaries
        return WordTokenCache(self.tokenizer, theirs) if supports_tokenizer(self.tokenizer, theirs) else None

    def whole_texts(self) -> Annotator:
        """Return an annotator that drops nothing of a long text."""
        return replace(self, settings=replace(self.settings, truncation=False))

    def with_model(self, model: Any) -> Annotator:
        """Return an annotator that does the same with another model."""
        return replace(self, network=replace(self.network, model=model, compiled=False))

    def annotate(
        self,
        texts: Iterable[Any],
        first: int = 0,
        in_memory: bool = False,
        tell: Callable[[int, float], None] | None = None,
    ) -> Iterator[ResultStore]:
        """Yield the answers to a stream of texts, chunk by chunk; errors count texts from ``first``.

        ``tell`` gets how many texts the chunk under way has, and the share of it that is computed, on the CPU.
        """
        chunks = iter_chunks(texts, chunk_characters(self.budget), first)
        with contextlib.closing(self._tokenize(chunks, in_memory)) as prepared:
            for collected in self._forward(prepared, tell):
                yield self.decode(*collected)

    def _tokenize(self, chunks: Iterator[Chunk], at_hand: bool) -> Generator[TokenizedChunk | Exception]:
        """Yield chunks of texts ready for the device, and at the end what the stream failed with.

        While a GPU computes a chunk, another thread tokenizes the next ones. Of texts that are ``at_hand`` several chunks are
        read ahead, of a stream one: if it is slow, it must not hold up the answers before it.
        """
        upcoming: deque[Callable[[], Callable[[], TokenizedChunk]]] = deque()
        error: Exception | None = None

        def read(count: int, begin: Callable[..., Callable[[], Any]]) -> None:
            nonlocal error
            while len(upcoming) < count and (chunk := next(chunks, None)):
                error = chunk.error
                if chunk.texts:
                    upcoming.append(begin(self.start_tokenizing, chunk))

        with background_tasks(self.network.device) as begin:
            # In this thread: the device waits for it, and another thread takes longer to start.
            read(1, functools.partial)
            while upcoming:
                prepared = upcoming.popleft()()()
                if at_hand:
                    read(PREFETCH_CHUNKS, begin)
                yield prepared
                read(1, begin)
        if error:
            yield error

    def _forward(
        self, chunks: Iterator[TokenizedChunk | Exception], tell: Callable[[int, float], None] | None
    ) -> Iterator[tuple[TokenizedChunk, tuple[Predictions, dict[int, OpenMedError]]]]:
        """Yield chunks with what the model predicts; a device that computes while the program goes on has the next one by then."""
        network = self.network
        device = network.device
        budget = self.budget
        started: tuple[TokenizedChunk, ForwardRun] | None = None
        for upcoming in itertools.chain(chunks, [None]):
            following = None
            if started:
                prepared, run = started
                if tell:
                    run.tell = functools.partial(tell, len(prepared.texts))
                start_pending(network, run)  # What was not started yet, on the CPU all of it.
                budget = budget.capped_at(run.max_fitting_tokens)
            if isinstance(upcoming, TokenizedChunk) and (
                started is None or parse_device_argument(device).queues_copies
            ):
                following = self._begin(upcoming, budget)
            if started:
                outputs = collect(run, network)
                if (
                    isinstance(upcoming, TokenizedChunk) and following is None
                ):  # A copy to MPS waits for all work before it.
                    following = self._begin(upcoming, budget)
                yield prepared, assemble_predictions(run, network, outputs)
            if isinstance(upcoming, Exception):
                raise upcoming
            started = following

    def annotate_chunk(self, chunk: Chunk, budget: TokenBudget) -> tuple[ResultStore, TokenBudget]:
        """Return the answers to the texts of one chunk, and the budget of the next: smaller, if memory was short."""
        prepared = self.tokenize(chunk)
        if prepared is None:
            return ResultStore.of([]), budget
        run = self._begin(prepared, budget)[1]
        start_pending(self.network, run)
        collected = assemble_predictions(run, self.network, collect(run, self.network))
        return self.decode(prepared, collected), budget.capped_at(run.max_fitting_tokens)

    def _begin(self, prepared: TokenizedChunk, budget: TokenBudget) -> tuple[TokenizedChunk, ForwardRun]:
        """Return a chunk with a run over it: started on a device that computes while the program goes on, else only planned."""
        run = ForwardRun(prepared.tokens, prepared.windows)
        copy_batches(self.network, run, self.plan_batches(prepared, budget))
        if parse_device_argument(self.network.device).is_accelerator:
            start_pending(self.network, run)
        return prepared, run

    def entities(self, texts: Iterable[Any]) -> list[list[Entity]]:
        """Return the entities of texts; raise the error of the first that has no answer."""
        return [unwrap_result(answer) for answers in self.annotate(texts) for answer in answers.outcomes()]

    def plan_batches(self, prepared: TokenizedChunk, budget: TokenBudget) -> list[Batch]:
        """Return the batches that a chunk runs in."""
        added = self.network.special_tokens.num_special_tokens
        lengths = prepared.windows.lengths + added
        needs_padding = len(lengths) > 1 or budget.limit_shapes
        budget = replace(budget, allow_padding=needs_padding and self.may_pad())
        if self.settings.stride is not None and not budget.allow_padding:
            # Transformers fills the last piece of a text up to the others, and a model that reads the filling gives its
            # answers only with the same filling.
            tokens = prepared.tokens
            texts = tokens.text_ids[tokens.sequence_ids(prepared.windows.starts)]
            longest = np.zeros(len(prepared.texts), np.int64)
            np.maximum.at(longest, texts, lengths)
            lengths = longest[texts]
        return plan_batches(lengths, budget, self.settings.max_tokens + added)

    def tokenize(self, chunk: Chunk) -> TokenizedChunk | None:
        """Return a chunk of texts ready for the device, ``None`` without texts; this is work of the host alone."""
        return self.start_tokenizing(chunk)() if chunk.texts else None

    def start_tokenizing(self, chunk: Chunk) -> Callable[[], TokenizedChunk]:
        """Read and tokenize a chunk of texts, and return what makes it ready for the device."""
        settings, delimiter = self.settings, self.settings.delimiter
        readable = chunk.texts
        failures: dict[int, OpenMedError] = {}
        if delimiter is not None or not all_readable(readable):
            texts = [read_text(text, number) for number, text in enumerate(chunk.texts, chunk.first)]
            checked = (
                (place, text_error(text, chunk.first + place, delimiter is not None))
                for place, text in enumerate(texts)
            )
            failures = {place: failure for place, failure in checked if failure}
            empty: Any = "" if delimiter is None else []
            readable = [empty if place in failures else text for place, text in enumerate(texts)]
        truncation = None
        if settings.stride is not None or settings.truncation:
            side = self.tokenizer.truncation_side
            truncation = Truncation(self.network.special_tokens, settings.max_tokens, settings.stride, side)
        if delimiter is not None:
            assembled = functools.partial(
                tokenize_words, self.tokenizer, readable, delimiter, truncation, settings.has_transformers_boundaries
            )
        elif truncation is None and sum(map(len, readable)) >= MIN_CHARACTERS and self.word_cache:
            tokens = self.word_cache.tokens(readable)  # Here, not in ready(): most of it is numpy's work.
            assembled = functools.partial(lambda: tokens)
        else:
            encodings, owners = encode_batch(self.tokenizer, readable, truncation)
            assembled = functools.partial(
                build_tokens,
                self.tokenizer,
                encodings,
                owners,
                readable,
                transformers_boundaries=settings.has_transformers_boundaries,
            )

        def ready() -> TokenizedChunk:
            tokens = assembled()
            strings = readable if delimiter is None else [delimiter.join(words) for words in readable]
            windows = plan_windows(tokens.sequence_offsets, tokens.word_starts, settings.max_tokens)
            return TokenizedChunk(chunk.first, strings, failures, tokens, windows)

        return ready

    def decode(self, prepared: TokenizedChunk, collected: tuple[Predictions, dict[int, OpenMedError]]) -> ResultStore:
        """Return the answer to every text of a chunk; this is work of the host alone."""
        predictions, unanswered = collected
        tokens = prepared.tokens
        found = self.decoder.entities(prepared.texts, tokens, predictions)
        failures = dict(prepared.errors)
        for sequence, error in unanswered.items():
            text = int(tokens.text_ids[sequence])
            failures[text] = type(error)(f"Text {prepared.first + text}: {error.message}", error.remedy)
        is_one_each = np.array_equal(tokens.text_ids, np.arange(len(prepared.texts)))
        if is_one_each and not failures:
            return found
        # The sequences of a text stand together.
        firsts = np.searchsorted(tokens.text_ids, np.arange(len(prepared.texts) + 1))
        several = firsts[1:] - firsts[:-1] > 1
        if not is_one_each:
            found = found.of_texts(firsts.tolist(), tokens.text_ids)
        if not failures and not several.any():
            return found
        answers: list[TextResult] = []
        dropped = {place: spans for place, spans in found.dropped.items() if place not in failures}
        for place, entities in enumerate(found):
            if place in failures:
                answers.append(failures[place])
            elif several[place]:
                merged = self.merge_windows(entities)
                answers.append(merged)
                # Of two overlapping entities one is removed; its characters are labeled all the same.
                labeled = [*found.dropped.get(place, ()), *map(dropped_span, entities)]
                dropped.pop(place, None)
                if left := uncovered(labeled, merged):
                    dropped[place] = left
            else:
                answers.append(entities)
        answered = ResultStore.of(answers, found.key)
        answered.dropped = dropped
        return answered


@contextlib.contextmanager
def background_tasks(device: torch.device) -> Iterator[Callable[..., Callable[[], Any]]]:
    """Give a function that begins work of the host beside that of a device, and returns what waits for its result.

    On the CPU the work is done when its result is asked for: all cores are busy with the model.
    """
    if not parse_device_argument(device).is_accelerator:
        yield functools.partial
        return
    pool = ThreadPoolExecutor(1)  # More threads hold each other up: they share Python's lock.
    try:
        yield lambda *work: pool.submit(*work).result
    finally:
        pool.shutdown(cancel_futures=True)


def unwrap_result(answer: TextResult) -> list[Entity]:
    """Return the entities of an answer; raise the error if there are none because the text has no answer."""
    if isinstance(answer, OpenMedError):
        raise answer
    return answer


@dataclass(frozen=True)
class AnnotationSource:
    """What answers a run over many texts: a pipeline of this process, or the workers of a cluster."""

    # From texts, the number of the first, and what hears how far a chunk is; see Annotator.annotate().
    annotate: Callable[..., Iterator[ResultStore]]
    settings: Mapping[str, Any]  # what tells a run from another: the model and all that changes its answers
    device: str
    shapes: Collection[Any] | None = None  # of the batches so far, if the device compiles for each
    known_labels: tuple[str, ...] | None = None  # of the entities that the model can find
