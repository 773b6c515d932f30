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
from .forward import Network, Run, collect, start
from .texts import unreadable
from .tokens import Tokens, tokenise, tokenise_words
from .windows import Windows, plan_windows, strided

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHUNK_BATCHES = 8
"""How many batches of texts are read, sorted by length and held at a time."""

CHARACTERS_PER_TOKEN = 4
"""About how long a token of English text is."""

Answer = list[Entity] | OpenMedError
"""The entities of a text, or why it has no answer."""


@dataclass(frozen=True)
class Settings:
    """How texts are read and answered.

    Attributes:
        strategy: How tokens become entities.
        ignored: Labels, and names of entities, that are no answer.
        limit: How many tokens of a text the model takes at once.
        delimiter: What joins words, where texts come as lists of words.
        stride: The overlap of transformers' windows; ``None`` for those of :mod:`.windows`.
        truncation: Whether what is longer than the model takes is dropped.
    """

    strategy: str
    ignored: tuple[str, ...]
    limit: int
    delimiter: str | None = None
    stride: int | None = None
    truncation: bool = False


@dataclass(frozen=True)
class Prepared:
    """A chunk of texts, ready for the device.

    Attributes:
        texts: The texts, an empty one in the place of one that cannot be read.
        failures: Why some cannot be read, by their place.
        tokens: The tokens of the texts.
        windows: The windows over them.
        batches: The batches of windows.
    """

    texts: list[str]
    failures: dict[int, OpenMedError]
    tokens: Tokens
    windows: Windows
    batches: list[Batch]


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

        While the device computes one chunk, the next is tokenised and the one before is decoded.

        Raises:
            DeviceUnavailable: Where the device fails; the answers to all texts before were given then.
            Exception: What the stream itself raises, after the answers to all texts before it.
        """
        budget, error = self.budget, None
        started: tuple[Prepared, Run] | None = None
        for chunk in in_chunks(texts, budget.tokens * CHUNK_BATCHES * CHARACTERS_PER_TOKEN, first):
            prepared, error = self.prepare(chunk, budget), chunk.error
            finished = started and (started[0], collect(started[1], self.network))
            if started and started[1].halved:
                budget = budget.halved()
            started = prepared, start(self.network, prepared.tokens, prepared.windows, prepared.batches)
            if finished:
                yield self.decode(*finished)
        if started:
            yield self.decode(started[0], collect(started[1], self.network))
        if error:
            raise error

    def prepare(self, chunk: Chunk, budget: Budget) -> Prepared:
        """Return a chunk of texts ready for the device; this is work of the host alone."""
        delimiter = self.settings.delimiter
        checked = (
            (place, unreadable(text, chunk.first + place, delimiter is not None))
            for place, text in enumerate(chunk.texts)
        )
        failures: dict[int, OpenMedError] = {place: failure for place, failure in checked if failure}
        empty: Any = "" if delimiter is None else []
        readable = [empty if place in failures else text for place, text in enumerate(chunk.texts)]
        if delimiter is None:
            tokens = tokenise(self.tokenizer, readable)
        else:
            tokens = tokenise_words(self.tokenizer, readable, delimiter)
            readable = [delimiter.join(words) for words in readable]
        tokens = self.shortened(tokens)
        limit, frame = self.settings.limit, self.network.frame
        windows = plan_windows(tokens.bounds, word_starts(tokens), limit)
        batches = plan_batches(windows.lengths + frame.size, budget, limit + frame.size)
        return Prepared(readable, failures, tokens, windows, batches)

    def shortened(self, tokens: Tokens) -> Tokens:
        """Return tokens as transformers would have them: cut into its windows, or cut off, where that is asked for."""
        settings, side = self.settings, self.tokenizer.truncation_side
        if settings.stride is None and not settings.truncation:
            return tokens
        pieces = [
            (first + window_first, first + window_last)
            for first, last in zip(tokens.bounds[:-1].tolist(), tokens.bounds[1:].tolist(), strict=True)
            for window_first, window_last in strided(last - first, settings.limit, settings.stride or 0, side)[
                : 1 if settings.stride is None else None
            ]
        ]
        firsts, lasts = np.array(pieces, np.int64).reshape(-1, 2).T
        return tokens.cut(firsts, lasts)

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
                failures[text] = unanswered[sequence]
        for text in np.flatnonzero(np.bincount(tokens.owners) > 1).tolist():
            entities[text] = self.join(entities[text])
        return [failures.get(place, answer) for place, answer in enumerate(entities)]
