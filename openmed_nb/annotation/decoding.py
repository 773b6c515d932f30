"""From labels and scores of tokens to entities, as arithmetic over all tokens of many texts at once.

The answers are those of ``TokenClassificationPipeline.aggregate`` and ``group_entities`` in transformers.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING

import numpy as np

from .masking import strip_bio_prefix
from .results import DroppedSpan, ResultStore
from .tokens import Tokens, expand_ranges, get_token_names

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# After about so many spellings, all are forgotten.
SPELLING_CACHE_SIZE = 1 << 16


@dataclass(frozen=True)
class LabelTables:
    """What each label number means; ``C`` labels."""

    names: tuple[str, ...]  # such as B-DISEASE
    entity_names: tuple[str, ...]  # the names of the entities that they make, such as DISEASE
    is_begin: np.ndarray  # (C,) bool, whether a label begins an entity even after one of its own kind
    entity_type_ids: np.ndarray  # (C,) int64, equal for labels that one entity may have
    keep_label: np.ndarray  # (C,) bool, whether a token of the label is an answer if tokens are not joined
    keep_entity: np.ndarray  # (C,) bool, whether an entity of the label is an answer

    @classmethod
    def from_id2label(cls, id2label: Mapping[int, str], ignored: Collection[str]) -> LabelTables:
        """Return the tables of a model's labels; ``ignored`` are labels and names of entities that are left out."""
        return build_label_tables(tuple(id2label[number] for number in range(len(id2label))), tuple(ignored))


@functools.lru_cache(maxsize=32)
def build_label_tables(names: tuple[str, ...], ignored: tuple[str, ...]) -> LabelTables:
    """Return the tables of labels, made once: a short text takes little longer than they do."""
    kinds = [name[2:] if name.startswith(("B-", "I-")) else name for name in names]
    # Transformers cuts the name of an entity at the first hyphen, whatever stands before it.
    groups = tuple(name.split("-", 1)[-1] for name in names)
    return LabelTables(
        names,
        groups,
        is_begin=np.array([name.startswith("B-") for name in names]),
        entity_type_ids=np.unique(kinds, return_inverse=True)[1],
        keep_label=np.array([name not in ignored for name in names]),
        keep_entity=np.array([group not in ignored for group in groups]),
    )


@dataclass(frozen=True)
class Predictions:
    """What a model predicts for each token; ``T`` tokens, ``C`` labels."""

    labels: np.ndarray  # (T,) int64, the number of the most probable label
    scores: np.ndarray  # (T,) float32, its probability
    probabilities: np.ndarray | None = None  # (T, C) float32, if a word's label is that of its mean


@dataclass(frozen=True)
class TaggedUnits:
    """What is joined to entities: tokens or words, with label numbers and scores; each array is ``(U,)``."""

    starts: np.ndarray  # the first token
    ends: np.ndarray  # one past the last
    labels: np.ndarray
    scores: np.ndarray


@dataclass(frozen=True)
class Decoder:
    detokenizer: Detokenizer
    tables: LabelTables
    strategy: str  # none, simple, first, average or max
    num_prefix_tokens: int  # special tokens before a text's own

    @property
    def entity_labels(self) -> tuple[str, ...]:
        """The labels of the entities that can be an answer, without the prefixes of tokens, each once."""
        tables = self.tables
        if self.strategy == "none":
            labels = [
                strip_bio_prefix(name) for name, kept in zip(tables.names, tables.keep_label, strict=True) if kept
            ]
        else:
            labels = [name for name, kept in zip(tables.entity_names, tables.keep_entity, strict=True) if kept]
        return tuple(dict.fromkeys(labels))

    def entities(self, texts: Sequence[str], tokens: Tokens, predictions: Predictions) -> ResultStore:
        """Return the entities of each sequence."""
        if not len(tokens):
            return ResultStore.of([[] for _ in tokens.text_ids])
        find = self.decode_tokens if self.strategy == "none" else self.decode_entities
        return find(texts, tokens, predictions)

    def decode_tokens(self, texts: Sequence[str], tokens: Tokens, predictions: Predictions) -> ResultStore:
        """Return every token whose label is an answer."""
        places = np.flatnonzero(self.tables.keep_label[predictions.labels])
        numbers = {
            "score": predictions.scores[places].astype(np.float64),
            "start": tokens.starts[places],
            "end": tokens.ends[places],
            "index": places - tokens.sequence_offsets[tokens.sequence_ids(places)] + self.num_prefix_tokens,
        }
        return ResultStore.of_columns(
            "entity",
            self.tables.names,
            bounds=np.searchsorted(places, tokens.sequence_offsets),
            labels=predictions.labels[places],
            words=self.detokenizer.token_texts(texts, tokens, places),
            numbers=numbers,
            dropped={},
        )

    def decode_entities(self, texts: Sequence[str], tokens: Tokens, predictions: Predictions) -> ResultStore:
        """Return every entity that is an answer."""
        units = build_units(tokens, predictions, self.strategy)
        edges = group_boundaries(tokens, units, self.tables)
        scores = np.add.reduceat(units.scores, edges[:-1], dtype=np.float64) / (edges[1:] - edges[:-1])
        kept = np.flatnonzero(self.tables.keep_entity[units.labels[edges[:-1]]])
        firsts = units.starts[edges[kept]]
        lasts = units.ends[edges[kept + 1] - 1]
        labels = units.labels[edges[kept]]
        words = None if self.strategy == "simple" else units.starts
        return ResultStore.of_columns(
            "entity_group",
            self.tables.entity_names,
            bounds=np.searchsorted(firsts, tokens.sequence_offsets),
            labels=labels,
            words=self.detokenizer.decode_spans(texts, tokens, firsts, lasts, words),
            numbers={"score": scores[kept], "start": tokens.starts[firsts], "end": tokens.ends[lasts - 1]},
            dropped=self.dropped(tokens, predictions, firsts, lasts, self.tables.entity_type_ids[labels]),
        )

    def dropped(
        self,
        tokens: Tokens,
        predictions: Predictions,
        firsts: np.ndarray,
        lasts: np.ndarray,
        entity_kinds: np.ndarray,
    ) -> dict[int, tuple[DroppedSpan, ...]]:
        """Return for each sequence the labeled tokens that are in no entity of their kind, neighbors of one kind as one span."""
        places = np.flatnonzero(self.tables.keep_entity[predictions.labels])
        kinds = self.tables.entity_type_ids[predictions.labels[places]]
        if len(firsts):
            # The entity that a token can be in is the last one that starts at it or before it.
            entities = np.maximum(np.searchsorted(firsts, places, side="right") - 1, 0)
            covered = (firsts[entities] <= places) & (places < lasts[entities])
            # A token of another label is masked by its own. Offsets may go back (byte-level BPE behind an added token), so a
            # token can reach out of its own entity.
            covered &= kinds == entity_kinds[entities]
            covered &= tokens.starts[places] >= tokens.starts[firsts[entities]]
            covered &= tokens.ends[places] <= tokens.ends[lasts[entities] - 1]
            places = places[~covered]
            kinds = kinds[~covered]
        if not len(places):
            return {}
        sequences = tokens.sequence_ids(places)
        apart = np.ones(len(places), bool)
        apart[1:] = (np.diff(places) > 1) | (np.diff(sequences) > 0) | (np.diff(kinds) != 0)
        first = np.flatnonzero(apart)
        labels = predictions.labels[places[first]].tolist()
        scores = np.maximum.reduceat(predictions.scores[places], first).tolist()
        starts = np.minimum.reduceat(tokens.starts[places], first).tolist()
        ends = np.maximum.reduceat(tokens.ends[places], first).tolist()
        spans: dict[int, list[DroppedSpan]] = {}
        for number, sequence in enumerate(sequences[first].tolist()):
            label = self.tables.entity_names[labels[number]]
            span = DroppedSpan(label, scores[number], starts[number], ends[number])
            spans.setdefault(sequence, []).append(span)
        return {sequence: tuple(found) for sequence, found in spans.items()}


def build_units(tokens: Tokens, predictions: Predictions, strategy: str) -> TaggedUnits:
    """Return the words, each with the label that a strategy gives it, or for ``simple`` the tokens."""
    if strategy == "simple":
        firsts = np.arange(len(tokens))
        return TaggedUnits(firsts, firsts + 1, predictions.labels, predictions.scores)
    firsts = tokens.word_starts
    lasts = np.append(firsts[1:], len(tokens))
    if strategy == "average":
        assert predictions.probabilities is not None  # noqa: S101 - tells mypy what the caller sees to
        means = np.add.reduceat(predictions.probabilities, firsts) / (lasts - firsts)[:, None]
        return TaggedUnits(firsts, lasts, means.argmax(1), means.max(1))
    deciding = firsts
    if strategy == "max":  # The token with the highest score of a word decides, the first of them if several are equal.
        highest = np.repeat(np.maximum.reduceat(predictions.scores, firsts), lasts - firsts)
        candidates = np.flatnonzero(predictions.scores == highest)
        deciding = candidates[np.searchsorted(candidates, firsts)]
    return TaggedUnits(firsts, lasts, predictions.labels[deciding], predictions.scores[deciding])


def group_boundaries(tokens: Tokens, units: TaggedUnits, tables: LabelTables) -> np.ndarray:
    """Return where each group begins among the units, and one past the last: a new kind, a B- label, a new sequence."""
    kinds, begins = tables.entity_type_ids[units.labels], tables.is_begin[units.labels]
    begins[1:] |= kinds[1:] != kinds[:-1]
    begins[np.searchsorted(units.starts, tokens.sequence_starts)] = True
    return np.append(np.flatnonzero(begins), len(begins))


class Detokenizer:
    """Writes tokens as text, as transformers does; the same entities come again and again, so their text is remembered."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._known: dict[bytes | int, str] = {}
        self._further: dict[str, str] = {}  # pieces, and how each is written after others

    def token_texts(self, texts: Sequence[str], tokens: Tokens, places: np.ndarray) -> list[str]:
        """Return tokens as they stand in the vocabulary, or in the text if the vocabulary does not have them."""
        ids = tokens.ids[places]
        names: list[str] = get_token_names(self.tokenizer, ids).names[ids].tolist()
        for number in np.flatnonzero(ids == self.tokenizer.unk_token_id).tolist():
            names[number] = tokens.token_text(texts, int(places[number]))
        return names

    def decode_spans(
        self,
        texts: Sequence[str],
        tokens: Tokens,
        firsts: np.ndarray,
        lasts: np.ndarray,
        words: np.ndarray | None = None,
    ) -> list[str]:
        """Return the text of stretches of tokens: the tokens of each word are joined, then the words; without words, the tokens."""
        begins = np.zeros(len(tokens), np.int64)
        if words is not None:
            begins[words] = 1
        # The text depends on the ids and on where words begin; on what the person wrote only if a token is unknown.
        spelling, width = (tokens.ids * 2 + begins).tobytes(), begins.itemsize
        edges = zip((firsts * width).tolist(), (lasts * width).tolist(), strict=True)
        keys: list[bytes | int] = [spelling[first:last] for first, last in edges]
        unknown = np.append(0, np.cumsum(tokens.ids == self.tokenizer.unk_token_id))
        for number in np.flatnonzero(unknown[lasts] > unknown[firsts]).tolist():
            keys[number] = number
        if len(self._known) > SPELLING_CACHE_SIZE:
            self._known, self._further = {}, {}
        known = self._known  # The same to the end: other threads of a worker spell too.
        new = {key: number for number, key in enumerate(keys) if key not in known}
        chosen = np.array([*new.values()], np.int64)
        firsts, lasts = firsts[chosen], lasts[chosen]
        if words is None:
            pieces = self.token_texts(texts, tokens, expand_ranges(firsts, lasts))
        else:
            ends = np.append(words[1:], len(tokens))
            firsts, lasts = np.searchsorted(words, firsts), np.searchsorted(words, lasts)
            inside = expand_ranges(firsts, lasts)
            pieces = self.decode_spans(texts, tokens, words[inside], ends[inside])
        left = iter(pieces)
        lists = [list(islice(left, count)) for count in (lasts - firsts).tolist()]
        spelled = dict(zip(new, self.decode_pieces(lists), strict=True))
        known.update((key, text) for key, text in spelled.items() if isinstance(key, bytes))
        return [spelled[key] if key in spelled else known[key] for key in keys]

    def decode_pieces(self, lists: list[list[str]]) -> list[str]:
        """Return lists of pieces, each as the tokenizer's decoder puts its pieces together."""
        join = self.tokenizer.convert_tokens_to_string
        further = self._further  # The same to the end: other threads of a worker spell too.
        new = list({piece for pieces in lists for piece in pieces[1:]} - further.keys())
        if type(self.tokenizer.backend_tokenizer.decoder).__name__ != "WordPiece" or any(
            "\0" in piece for piece in new
        ):
            return [join(pieces) for pieces in lists]
        # This decoder writes each piece by itself, but the first of a list in another way than those after it: as it stands.
        further.update(
            zip(new, join(["", *chain.from_iterable((piece, "\0") for piece in new)]).split(" \0"), strict=False)
        )
        return [
            (join([first]) if " " in first else first) + "".join(map(further.__getitem__, rest))
            for first, *rest in lists
        ]
