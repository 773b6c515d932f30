"""Texts in, answers out: readable texts, chunks of them, the annotator."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import OpenMedError, UnreadableText
from .decoding import Decoder, Entity, Predictions, word_starts
from .forward import Batch, Budget, ForwardRun, Network, collect, plan_batches, start
from .references import Reference, read
from .tokens import Tokens, Truncation, Windows, plan_windows, tokenise, tokenise_words

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def check_text(text: object, name: str = "The text") -> None:
    r"""Check that a text can be read.

    Args:
        text: What should be a string.
        name: What it is called in the error.

    Raises:
        UnreadableText: For anything but a text, and for half of a surrogate pair, which no encoding can write.

    Example:
        >>> check_text("\ud800")
        Traceback (most recent call last):
        ...
        openmed_nb.errors.UnreadableText: The text has half of a surrogate pair at character 0. Remove it, or read the file it comes from with its right encoding.
    """
    if not isinstance(text, str):
        path = "Pass paths in a list, such as sorted(folder.glob('*.txt'))."
        remedy = path if isinstance(text, PurePath) else "Pass a string, '' where there is no text."
        raise UnreadableText(f"{name} must be a string, not {type(text).__name__}.", remedy)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UnreadableText(
            f"{name} has half of a surrogate pair at character {error.start}.",
            "Remove it, or read the file it comes from with its right encoding.",
        ) from None


def check_words(words: object, name: str) -> None:
    """Check that a text that is split into words is a list of strings that can be read.

    Raises:
        UnreadableText: Where it is not.

    Example:
        >>> check_words("asthma", "Text 3")
        Traceback (most recent call last):
        ...
        openmed_nb.errors.UnreadableText: Text 3 must be a list of words, not str. Pass a list of strings.
    """
    if not isinstance(words, list):
        raise UnreadableText(f"{name} must be a list of words, not {type(words).__name__}.", "Pass a list of strings.")
    for word in words:
        check_text(word, f"A word of {name[0].lower()}{name[1:]}")


def unreadable(text: Any, number: int, split: bool) -> UnreadableText | None:
    """Return why the text of a number cannot be read, ``None`` where it can; what it failed with stands in its place."""
    if isinstance(text, UnreadableText):
        return text
    try:
        (check_words if split else check_text)(text, f"Text {number}")
    except UnreadableText as error:
        return error
    return None


FIRST_PART = 8
"""The first chunk has one in so many of the characters of a full one, the next twice as many: answers come soon."""


@dataclass(frozen=True, repr=False)
class Chunk:
    """Consecutive texts of a stream; it is not shown, because a worker's log would show what failed.

    Attributes:
        first: The number of the first text in the stream.
        texts: The texts, each a string or a list of words, or whatever else the stream gave.
        error: What the stream itself failed with after all texts; such a chunk has none.
    """

    first: int
    texts: list[Any]
    error: Exception | None = None


def in_chunks(texts: Iterable[Any], characters: int, first: int = 0, least: int = 1) -> Iterator[Chunk]:
    """Yield the texts of a stream in order, in chunks of about so many characters; the first text has the number ``first``.

    A text counts ``least`` characters at least, because a short one takes memory too. A failure of the stream comes as a
    value, in a last chunk without texts, so that the texts before it are not lost.

    Example:
        >>> [chunk.texts for chunk in in_chunks(["aaaa", "b", "c", "d"], characters=8)]
        [['aaaa'], ['b'], ['c', 'd']]
    """
    stream, size, error = iter(texts), max(1, characters // FIRST_PART), None
    while error is None:
        chunk, error = next_chunk(stream, size, least)
        if chunk:
            yield Chunk(first, chunk)
        elif error is None:
            return
        first += len(chunk)
        size = min(2 * size, characters)
    yield Chunk(first, [], error)


def next_chunk(stream: Iterator[Any], characters: int, least: int = 1) -> tuple[list[Any], Exception | None]:
    """Return the next texts of a stream, none where it is at its end, and what it failed with after them."""
    texts: list[Any] = []
    left = characters
    try:
        while left > 0:
            texts.append(next(stream))
            left -= max(weight(texts[-1]), least)
    except StopIteration:
        pass
    except Exception as error:  # noqa: BLE001 - of the stream's own code, and raised after the texts before it
        return texts, error
    return texts, None


def weight(text: Any) -> int:
    """Return about how many characters a text has; every text counts, also an empty one."""
    if isinstance(text, str):
        return len(text) + 1
    if isinstance(text, Reference):
        return text.characters + 1
    return 1 + sum(map(weight, text)) if isinstance(text, list) else 1


Answered = tuple[int, list[Entity] | str]
"""The fingerprint of a text, and its entities or why it has none."""


def is_entity(value: Any) -> bool:
    """Tell whether something that was read from a file is an entity: a label and a word, a score, and whole places.

    Example:
        >>> is_entity({"entity": "B-X", "score": 0.5, "word": "flu", "start": 0, "end": 3}), is_entity({"word": None})
        (True, False)
    """
    if not isinstance(value, dict):
        return False
    texts = value.get("word"), value.get("entity", value.get("entity_group"))
    places = value.get("start"), value.get("end"), value.get("index", 0)
    score = value.get("score")
    return (
        all(isinstance(one, str) for one in texts)
        and all(type(one) is int for one in places)
        and isinstance(score, float)
        and math.isfinite(score)
    )


class Answers(Sequence[list[Entity]]):
    """The entities of texts in the order of the texts; each list is made when it is asked for.

    Texts that have no answer have an empty list, and their reason in ``errors``. Of a text itself only a fingerprint is
    kept, to tell on resuming whether it is the same one.

    Args:
        key: What the label of an entity is called where there is no entity yet to tell it.
    """

    def __init__(self, key: str = "entity_group") -> None:
        self.errors: dict[int, str] = {}
        self.fingerprints = array("Q")
        self._bounds = array("q", [0])
        self._starts, self._ends, self._indices = array("q"), array("q"), array("q")
        self._scores = array("d")
        self._labels: list[str] = []
        self._words: list[str] = []
        self._key = key
        self._known: dict[str, str] = {}

    def add(self, fingerprint: int, answer: Sequence[Entity] | str) -> None:
        """Add the answer to the next text: its entities, or why it has none."""
        if isinstance(answer, str):
            self.errors[len(self)] = answer
            answer = ()
        for entity in answer:
            self._add_entity(entity)
        self._bounds.append(len(self._scores))
        self.fingerprints.append(fingerprint)

    def _add_entity(self, entity: Entity) -> None:
        self._key = "entity" if "entity" in entity else "entity_group"
        self._labels.append(self._same(entity[self._key]))
        self._words.append(self._same(entity["word"]))
        self._scores.append(entity["score"])
        self._starts.append(entity["start"])
        self._ends.append(entity["end"])
        if "index" in entity:
            self._indices.append(entity["index"])

    def _same(self, word: str) -> str:
        """Return a string equal to this one that is already held, where there is one."""
        return self._known.setdefault(word, word)

    def items(self) -> Iterator[Answered]:
        """Yield the fingerprint and the answer of each text, in the form that :meth:`add` takes."""
        for number, fingerprint in enumerate(self.fingerprints):
            yield fingerprint, self.errors.get(number, self[number])

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [self[one] for one in range(len(self))[number]]
        place = range(len(self))[number]
        return [self._entity(row) for row in range(self._bounds[place], self._bounds[place + 1])]

    def _entity(self, row: int) -> Entity:
        entity: Entity = {self._key: self._labels[row], "score": self._scores[row]}
        if self._indices:
            entity["index"] = self._indices[row]
        return {**entity, "word": self._words[row], "start": self._starts[row], "end": self._ends[row]}

    def counts(self) -> Iterator[int]:
        """Yield how many entities each text has."""
        return (last - first for first, last in pairwise(self._bounds))

    @property
    def labels(self) -> Sequence[str]:
        """The label of every entity, text after text."""
        return self._labels[: self._bounds[-1]]

    @property
    def words(self) -> Sequence[str]:
        """The word of every entity, text after text."""
        return self._words[: self._bounds[-1]]

    def columns(self) -> dict[str, Any]:
        """Return a table of all entities: the number of the text, then what an entity has, as a column each."""
        numbers = np.repeat(np.arange(len(self)), np.diff(np.array(self._bounds)))
        columns: dict[str, Any] = {
            "text": numbers,
            self._key: np.array(self.labels, dtype=object),
            "score": np.array(self._scores),
            "index": np.array(self._indices),
            "word": np.array(self.words, dtype=object),
            "start": np.array(self._starts),
            "end": np.array(self._ends),
        }
        return {name: column[: len(numbers)] for name, column in columns.items() if name != "index" or self._indices}


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
