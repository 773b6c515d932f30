"""A stream of texts -> a stream of answers: read, tokenise, run, decode; the host works while the device does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import OpenMedError
from .batches import Batch, Budget, plan_batches
from .chunks import Chunk, in_chunks
from .decoding import Decoder, Entity, Predictions, word_starts
from .forward import ForwardRun, Network, collect, start
from .references import read
from .texts import unreadable
from .tokens import Tokens, Truncation, tokenise, tokenise_words
from .windows import Windows, plan_windows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHUNK_BATCHES, CHUNK_TOKENS = 8, 16384
"""How many batches of texts, and at least how many tokens, are read, sorted by length and held at a time."""

CHARACTERS_PER_TOKEN = 4
"""About how long a token of English text is."""

END = Chunk(0, [])
"""The end of a stream: no texts."""

Answer = list[Entity] | OpenMedError
"""The entities of a text, or why it has no answer."""


@dataclass(frozen=True)
class Settings:
    """How texts are read and answered.

    Attributes:
        aggregation_strategy: How tokens become entities.
        ignore_labels: Labels, and names of entities, that are no answer.
        limit: How many tokens of a text the model takes at once.
        delimiter: What joins words, where texts come as lists of words.
        stride: The overlap of transformers' windows; ``None`` for those of :mod:`.windows`.
        truncation: Whether what is longer than the model takes is dropped.
    """

    aggregation_strategy: str
    ignore_labels: tuple[str, ...]
    limit: int
    delimiter: str | None = None
    stride: int | None = None
    truncation: bool = False


@dataclass(frozen=True)
class Prepared:
    """A chunk of texts, ready for the device.

    Attributes:
        first: The number of the first text in the stream.
        texts: The texts, an empty one in the place of one that cannot be read.
        failures: Why some cannot be read, by their place.
        tokens: The tokens of the texts.
        windows: The windows over them.
    """

    first: int
    texts: list[str]
    failures: dict[int, OpenMedError]
    tokens: Tokens
    windows: Windows


@dataclass(frozen=True)
class Annotator:
    """A model, its tokenizer and the settings of a call.

    Attributes:
        network: The model.
        tokenizer: A fast tokenizer.
        decoder: What makes entities of the model's answers.
        settings: How texts are read and answered.
        budget: How much runs at once.
        join: Joins what overlapping windows of ``settings.stride`` say of one text.
    """

    network: Network
    tokenizer: PreTrainedTokenizerBase
    decoder: Decoder
    settings: Settings
    budget: Budget
    join: Callable[[list[Entity]], list[Entity]]

    def answers(self, texts: Iterable[Any], first: int = 0) -> Iterator[list[Answer]]:
        """Yield the answers to a stream of texts, chunk by chunk; errors count texts from ``first``.

        While the device computes the first batch of a chunk, the chunk before is decoded and the next one tokenised; it
        is only the first batch, because many models wait for the device when they look at their mask.

        Raises:
            DeviceUnavailable: Where the device fails; the answers to all texts before were given then.
            Exception: What the stream itself raises, after the answers to all texts before it.
        """
        chunks = in_chunks(texts, chunk_characters(self.budget), first)
        budget, finished = self.budget, None
        chunk = next(chunks, END)
        prepared = self.prepare(chunk)
        while prepared:
            run, batches = ForwardRun(prepared.tokens, prepared.windows), self.batches(prepared, budget)
            start(self.network, run, batches[:1])
            if finished:
                yield self.decode(*finished)
            chunk = next(chunks, END)
            following = self.prepare(chunk)
            start(self.network, run, batches[1:])
            finished = prepared, collect(run, self.network)
            budget = budget.within(run.fitting)
            prepared = following
        if finished:
            yield self.decode(*finished)
        if chunk.error:
            raise chunk.error

    def answers_to(self, chunk: Chunk, budget: Budget) -> tuple[list[Answer], Budget]:
        """Return the answers to the texts of one chunk, and the budget of the next: smaller, where memory was short.

        Raises:
            DeviceUnavailable: Where the device fails.
        """
        prepared = self.prepare(chunk)
        if prepared is None:
            return [], budget
        run = ForwardRun(prepared.tokens, prepared.windows)
        start(self.network, run, self.batches(prepared, budget))
        return self.decode(prepared, collect(run, self.network)), budget.within(run.fitting)

    def entities(self, texts: Iterable[Any]) -> list[list[Entity]]:
        """Return the entities of texts.

        Raises:
            OpenMedError: Where one has no answer.
        """
        return [entities_of(answer) for answers in self.answers(texts) for answer in answers]

    def batches(self, prepared: Prepared, budget: Budget) -> list[Batch]:
        """Return the batches that a chunk runs in.

        With ``stride``, transformers fills the last piece of a text up to the others. A model that reads the filling gives
        its answers only with the same filling.
        """
        added = self.network.frame.size
        lengths = prepared.windows.lengths + added
        if self.settings.stride is not None and not budget.padding:
            tokens = prepared.tokens
            texts = tokens.owners[tokens.sequences(prepared.windows.firsts)]
            longest = np.zeros(len(prepared.texts), np.int64)
            np.maximum.at(longest, texts, lengths)
            lengths = longest[texts]
        return plan_batches(lengths, budget, self.settings.limit + added)

    def prepare(self, chunk: Chunk) -> Prepared | None:
        """Return a chunk of texts ready for the device, ``None`` without texts; this is work of the host alone."""
        if not chunk.texts:
            return None
        delimiter = self.settings.delimiter
        texts = [read(text, number) for number, text in enumerate(chunk.texts, chunk.first)]
        checked = (
            (place, unreadable(text, chunk.first + place, delimiter is not None)) for place, text in enumerate(texts)
        )
        failures: dict[int, OpenMedError] = {place: failure for place, failure in checked if failure}
        empty: Any = "" if delimiter is None else []
        readable = [empty if place in failures else text for place, text in enumerate(texts)]
        if delimiter is None:
            tokens = tokenise(self.tokenizer, readable, self.truncation())
        else:
            tokens = tokenise_words(self.tokenizer, readable, delimiter, self.truncation())
            readable = [delimiter.join(words) for words in readable]
        windows = plan_windows(tokens.bounds, word_starts(tokens), self.settings.limit)
        return Prepared(chunk.first, readable, failures, tokens, windows)

    def truncation(self) -> Truncation | None:
        """Return how transformers cuts texts, where that is asked for."""
        settings = self.settings
        if settings.stride is None and not settings.truncation:
            return None
        return Truncation(self.network.frame, settings.limit, settings.stride, self.tokenizer.truncation_side)

    def decode(self, prepared: Prepared, collected: tuple[Predictions, dict[int, OpenMedError]]) -> list[Answer]:
        """Return the answer to every text of a chunk; this is work of the host alone."""
        predictions, unanswered = collected
        tokens = prepared.tokens
        found = self.decoder.entities(prepared.texts, tokens, predictions)
        entities: list[list[Entity]] = [[] for _ in prepared.texts]
        failures = dict(prepared.failures)
        for sequence, text in enumerate(tokens.owners.tolist()):
            entities[text] += found[sequence]
            if sequence in unanswered:
                error = unanswered[sequence]
                failures[text] = type(error)(f"Text {prepared.first + text}: {error.what}", error.remedy)
        for text in np.flatnonzero(np.bincount(tokens.owners) > 1).tolist():
            entities[text] = self.join(entities[text])
        return [failures.get(place, answer) for place, answer in enumerate(entities)]


def entities_of(answer: Answer) -> list[Entity]:
    """Return the entities of an answer.

    Raises:
        OpenMedError: Why there are none, where the text has no answer.
    """
    if isinstance(answer, OpenMedError):
        raise answer
    return answer


def chunk_characters(budget: Budget) -> int:
    """Return about how many characters are read at a time.

    Example:
        >>> chunk_characters(Budget(512)), chunk_characters(Budget(16384))
        (65536, 524288)
    """
    return max(CHUNK_TOKENS, CHUNK_BATCHES * budget.tokens) * CHARACTERS_PER_TOKEN
