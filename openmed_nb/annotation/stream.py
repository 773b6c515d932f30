"""A stream of texts in, a stream of answers out: chunks of texts that are read, run and decoded while others wait.

While the device computes one chunk, the host decodes the one before and tokenises the next.
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
from ..devices.registry import device_of
from ..errors import OpenMedError, UnreadableText
from .decoding import Decoder, Predictions
from .forward import Batch, Budget, ForwardRun, Network, collect, copy, plan_batches, settled, start
from .lexicon import FEWEST_CHARACTERS, Lexicon, serves
from .references import read, weight
from .results import Answer, Answers, Entity, dropped_span, uncovered
from .tokens import Tokens, Truncation, Windows, assemble, encoded, plan_windows, tokenise_words

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase


# The first chunk has one in FIRST_PART of the characters of a full one, the next twice as many: answers come soon.
FIRST_PART = 8

# How many batches of texts, and at least how many tokens, are read, sorted by length and held at a time.
CHUNK_BATCHES, CHUNK_TOKENS = 8, 16384

# Of texts at hand, so many chunks are tokenised before their turn.
READ_AHEAD = 3

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
        raise UnreadableText(f"{name} must be a string, not {short_type_name(text)}.", remedy)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        position = error.start
    else:
        return
    # Outside of the handler: the other error has the text, and would be the context of this one.
    what = f"{name} has half of a surrogate pair at character {position}."
    raise UnreadableText(what, "Remove it, or read the file it comes from with its right encoding.")


def unreadable(text: Any, number: int, split: bool) -> UnreadableText | None:
    """Return why a text, or a list of words if texts are split, cannot be read; ``None`` if it can.

    An error in the place of a text is the reason itself.
    """
    if isinstance(text, UnreadableText):
        return text
    try:
        if not split:
            check_text(text, f"Text {number}")
        elif isinstance(text, list):
            for word in text:
                check_text(word, f"A word of text {number}")
        else:
            what = f"Text {number} must be a list of words, not {short_type_name(text)}."
            return UnreadableText(what, "Pass a list of strings.")
    except UnreadableText as error:
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


END = Chunk(0, [])


def in_chunks(
    texts: Iterable[Any],
    characters: int,
    first: int = 0,
    least: int = 1,
    most: Callable[[], float] = lambda: math.inf,
) -> Iterator[Chunk]:
    """Yield the texts of a stream in order, in chunks of about ``characters``; each text counts for ``least`` of them.

    ``most`` says how many texts the next chunk has at most, if they are an eighth of a full chunk. A failure of the stream comes
    as a value, in a last chunk without texts, so that the texts before it are not lost.
    """
    stream, smallest, error = iter(texts), max(1, characters // FIRST_PART), None
    size = smallest
    while error is None:
        chunk: list[Any] = []
        left, enough = size, most()
        try:
            while left > 0 and (len(chunk) < enough or size - left < smallest):
                chunk.append(next(stream))
                left -= max(weight(chunk[-1]), least)
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


def chunk_characters(budget: Budget) -> int:
    """Return about how many characters are read at a time."""
    return max(CHUNK_TOKENS, CHUNK_BATCHES * budget.tokens) * CHARACTERS_PER_TOKEN


@dataclass(frozen=True)
class Settings:
    """How texts are read and answered; all of it changes answers."""

    aggregation_strategy: str
    ignore_labels: tuple[str, ...]
    limit: int  # tokens of a text that the model takes at once
    delimiter: str | None = None  # joins words, if texts come as lists of words
    stride: int | None = None  # the overlap of transformers' windows; None for our own
    truncation: bool = False  # whether what is longer than the model takes is dropped
    transformers_boundaries: bool = False  # whether words start where transformers has them start

    @property
    def has_transformers_boundaries(self) -> bool:
        """Whether words start where transformers has them start; with a stride, everything is as there."""
        return self.transformers_boundaries or self.stride is not None


@dataclass(frozen=True)
class Prepared:
    """A chunk of texts, ready for the device."""

    first: int  # the number of the first text in the stream
    texts: list[str]  # an empty one in the place of one that cannot be read
    failures: dict[int, OpenMedError]  # why some cannot be read, by their place
    tokens: Tokens
    windows: Windows


@dataclass(frozen=True)
class Annotator:
    """A model, its tokenizer and the settings of a call."""

    network: Network
    tokenizer: PreTrainedTokenizerBase
    decoder: Decoder
    settings: Settings
    budget: Budget
    join: Callable[[list[Entity]], list[Entity]]  # joins the entities of overlapping windows of one text
    may_pad: Callable[[], bool]  # Whether rows may be padded, which is measured when it is first asked.

    @functools.cached_property
    def lexicon(self) -> Lexicon | None:
        """The lexicon of this call, ``None`` for a tokenizer that it does not serve."""
        theirs = self.settings.has_transformers_boundaries
        return Lexicon(self.tokenizer, theirs) if serves(self.tokenizer, theirs) else None

    def whole_texts(self) -> Annotator:
        """Return an annotator that drops nothing of a long text."""
        return replace(self, settings=replace(self.settings, truncation=False))

    def with_model(self, model: Any) -> Annotator:
        """Return an annotator that does the same with another model."""
        return replace(self, network=replace(self.network, model=model, compiled=False))

    def answers(
        self,
        texts: Iterable[Any],
        first: int = 0,
        at_hand: bool = False,
        tell: Callable[[int, float], None] | None = None,
    ) -> Iterator[Answers]:
        """Yield the answers to a stream of texts, chunk by chunk; errors count texts from ``first``.

        ``tell`` gets how many texts the chunk under way has, and the share of it that is computed, on the CPU.
        """
        chunks = in_chunks(texts, chunk_characters(self.budget), first)
        with contextlib.closing(self._tokenize(chunks, at_hand)) as prepared:
            for collected in self._forward(prepared, tell):
                yield self.decode(*collected)

    def _tokenize(self, chunks: Iterator[Chunk], at_hand: bool) -> Generator[Prepared | Exception]:
        """Yield chunks of texts ready for the device, and at the end what the stream failed with.

        While a GPU computes a chunk, another thread tokenizes the next ones. Of texts that are ``at_hand`` several chunks are
        read ahead, of a stream one: if it is slow, it must not hold up the answers before it.
        """
        upcoming: deque[Callable[[], Callable[[], Prepared]]] = deque()
        error: Exception | None = None

        def read(count: int, begin: Callable[..., Callable[[], Any]]) -> None:
            nonlocal error
            while len(upcoming) < count and (chunk := next(chunks, None)):
                error = chunk.error
                if chunk.texts:
                    upcoming.append(begin(self.tokenised, chunk))

        with beside(self.network.device) as begin:
            # In this thread: the device waits for it, and another thread takes longer to start.
            read(1, functools.partial)
            while upcoming:
                prepared = upcoming.popleft()()()
                if at_hand:
                    read(READ_AHEAD, begin)
                yield prepared
                read(1, begin)
        if error:
            yield error

    def _forward(
        self, chunks: Iterator[Prepared | Exception], tell: Callable[[int, float], None] | None
    ) -> Iterator[tuple[Prepared, tuple[Predictions, dict[int, OpenMedError]]]]:
        """Yield chunks with what the model predicts; a device that computes while the program goes on has the next one by then."""
        network = self.network
        device = network.device
        budget = self.budget
        started: tuple[Prepared, ForwardRun] | None = None
        for upcoming in itertools.chain(chunks, [None]):
            following = None
            if started:
                prepared, run = started
                if tell:
                    run.tell = functools.partial(tell, len(prepared.texts))
                start(network, run)  # What was not started yet, on the CPU all of it.
                budget = budget.within(run.fitting)
            if isinstance(upcoming, Prepared) and (started is None or device_of(device).queues_copies):
                following = self._begin(upcoming, budget)
            if started:
                outputs = collect(run, network)
                if isinstance(upcoming, Prepared) and following is None:  # A copy to MPS waits for all work before it.
                    following = self._begin(upcoming, budget)
                yield prepared, settled(run, network, outputs)
            if isinstance(upcoming, Exception):
                raise upcoming
            started = following

    def answers_to(self, chunk: Chunk, budget: Budget) -> tuple[Answers, Budget]:
        """Return the answers to the texts of one chunk, and the budget of the next: smaller, if memory was short."""
        prepared = self.prepare(chunk)
        if prepared is None:
            return Answers.of([]), budget
        run = self._begin(prepared, budget)[1]
        start(self.network, run)
        collected = settled(run, self.network, collect(run, self.network))
        return self.decode(prepared, collected), budget.within(run.fitting)

    def _begin(self, prepared: Prepared, budget: Budget) -> tuple[Prepared, ForwardRun]:
        """Return a chunk with a run over it: started on a device that computes while the program goes on, else only planned."""
        run = ForwardRun(prepared.tokens, prepared.windows)
        copy(self.network, run, self.batches(prepared, budget))
        if device_of(self.network.device).is_accelerator:
            start(self.network, run)
        return prepared, run

    def entities(self, texts: Iterable[Any]) -> list[list[Entity]]:
        """Return the entities of texts; raise the error of the first that has no answer."""
        return [entities_of(answer) for answers in self.answers(texts) for answer in answers.outcomes()]

    def batches(self, prepared: Prepared, budget: Budget) -> list[Batch]:
        """Return the batches that a chunk runs in."""
        added = self.network.frame.size
        lengths = prepared.windows.lengths + added
        needs_padding = len(lengths) > 1 or budget.few_shapes
        budget = replace(budget, padding=needs_padding and self.may_pad())
        if self.settings.stride is not None and not budget.padding:
            # Transformers fills the last piece of a text up to the others, and a model that reads the filling gives its
            # answers only with the same filling.
            tokens = prepared.tokens
            texts = tokens.owners[tokens.sequences(prepared.windows.firsts)]
            longest = np.zeros(len(prepared.texts), np.int64)
            np.maximum.at(longest, texts, lengths)
            lengths = longest[texts]
        return plan_batches(lengths, budget, self.settings.limit + added)

    def prepare(self, chunk: Chunk) -> Prepared | None:
        """Return a chunk of texts ready for the device, ``None`` without texts; this is work of the host alone."""
        return self.tokenised(chunk)() if chunk.texts else None

    def tokenised(self, chunk: Chunk) -> Callable[[], Prepared]:
        """Read and tokenise a chunk of texts, and return what makes it ready for the device."""
        settings, delimiter = self.settings, self.settings.delimiter
        readable = chunk.texts
        failures: dict[int, OpenMedError] = {}
        if delimiter is not None or not all_readable(readable):
            texts = [read(text, number) for number, text in enumerate(chunk.texts, chunk.first)]
            checked = (
                (place, unreadable(text, chunk.first + place, delimiter is not None))
                for place, text in enumerate(texts)
            )
            failures = {place: failure for place, failure in checked if failure}
            empty: Any = "" if delimiter is None else []
            readable = [empty if place in failures else text for place, text in enumerate(texts)]
        truncation = None
        if settings.stride is not None or settings.truncation:
            side = self.tokenizer.truncation_side
            truncation = Truncation(self.network.frame, settings.limit, settings.stride, side)
        if delimiter is not None:
            assembled = functools.partial(
                tokenise_words, self.tokenizer, readable, delimiter, truncation, settings.has_transformers_boundaries
            )
        elif truncation is None and sum(map(len, readable)) >= FEWEST_CHARACTERS and self.lexicon:
            tokens = self.lexicon.tokens(readable)  # Here, not in ready(): most of it is numpy's work.
            assembled = functools.partial(lambda: tokens)
        else:
            encodings, owners = encoded(self.tokenizer, readable, truncation)
            assembled = functools.partial(
                assemble,
                self.tokenizer,
                encodings,
                owners,
                readable,
                transformers_boundaries=settings.has_transformers_boundaries,
            )

        def ready() -> Prepared:
            tokens = assembled()
            strings = readable if delimiter is None else [delimiter.join(words) for words in readable]
            windows = plan_windows(tokens.bounds, tokens.word_starts, settings.limit)
            return Prepared(chunk.first, strings, failures, tokens, windows)

        return ready

    def decode(self, prepared: Prepared, collected: tuple[Predictions, dict[int, OpenMedError]]) -> Answers:
        """Return the answer to every text of a chunk; this is work of the host alone."""
        predictions, unanswered = collected
        tokens = prepared.tokens
        found = self.decoder.entities(prepared.texts, tokens, predictions)
        failures = dict(prepared.failures)
        for sequence, error in unanswered.items():
            text = int(tokens.owners[sequence])
            failures[text] = type(error)(f"Text {prepared.first + text}: {error.what}", error.remedy)
        is_one_each = np.array_equal(tokens.owners, np.arange(len(prepared.texts)))
        if is_one_each and not failures:
            return found
        # The sequences of a text stand together.
        firsts = np.searchsorted(tokens.owners, np.arange(len(prepared.texts) + 1))
        several = firsts[1:] - firsts[:-1] > 1
        if not is_one_each:
            found = found.of_texts(firsts.tolist(), tokens.owners)
        if not failures and not several.any():
            return found
        answers: list[Answer] = []
        dropped = {place: spans for place, spans in found.dropped.items() if place not in failures}
        for place, entities in enumerate(found):
            if place in failures:
                answers.append(failures[place])
            elif several[place]:
                merged = self.join(entities)
                answers.append(merged)
                # Of two overlapping entities one is removed; its characters are labeled all the same.
                labeled = [*found.dropped.get(place, ()), *map(dropped_span, entities)]
                dropped.pop(place, None)
                if left := uncovered(labeled, merged):
                    dropped[place] = left
            else:
                answers.append(entities)
        answered = Answers.of(answers, found.key)
        answered.dropped = dropped
        return answered


@contextlib.contextmanager
def beside(device: torch.device) -> Iterator[Callable[..., Callable[[], Any]]]:
    """Give a function that begins work of the host beside that of a device, and returns what waits for its result.

    On the CPU the work is done when its result is asked for: all cores are busy with the model.
    """
    if not device_of(device).is_accelerator:
        yield functools.partial
        return
    pool = ThreadPoolExecutor(1)  # More threads hold each other up: they share Python's lock.
    try:
        yield lambda *work: pool.submit(*work).result
    finally:
        pool.shutdown(cancel_futures=True)


def entities_of(answer: Answer) -> list[Entity]:
    """Return the entities of an answer; raise the error if there are none because the text has no answer."""
    if isinstance(answer, OpenMedError):
        raise answer
    return answer


@dataclass(frozen=True)
class Source:
    """What answers a run over many texts: a pipeline of this process, or the workers of a cluster."""

    # From texts, the number of the first, and what hears how far a chunk is; see Annotator.answers().
    answers: Callable[..., Iterator[Answers]]
    settings: Mapping[str, Any]  # what tells a run from another: the model and all that changes its answers
    device: str
    shapes: Collection[Any] | None = None  # of the batches so far, if the device compiles for each
    known_labels: tuple[str, ...] | None = None  # of the entities that the model can find
