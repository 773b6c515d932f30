"""From labels and scores of tokens to entities, as arithmetic over all tokens of many texts at once.

The answers are those of ``TokenClassificationPipeline.aggregate`` and ``group_entities`` in transformers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .results import Entity
from .tokens import Tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class LabelTables:
    """What each label number means; ``C`` labels."""

    names: tuple[str, ...]  # such as B-DISEASE
    groups: tuple[str, ...]  # the names of the entities that they make, such as DISEASE
    begins: np.ndarray  # (C,) bool, whether a label begins an entity even after one of its own kind
    kinds: np.ndarray  # (C,) int64, equal for labels that one entity may have
    label_kept: np.ndarray  # (C,) bool, whether a token of the label is an answer if tokens are not joined
    group_kept: np.ndarray  # (C,) bool, whether an entity of the label is an answer

    @classmethod
    def of(cls, id2label: Mapping[int, str], ignored: Collection[str]) -> LabelTables:
        """Return the tables of a model's labels; ``ignored`` are labels and names of entities that are left out."""
        names = tuple(id2label[number] for number in range(len(id2label)))
        kinds = [name[2:] if name.startswith(("B-", "I-")) else name for name in names]
        # Transformers cuts the name of an entity at the first hyphen, whatever stands before it.
        groups = tuple(name.split("-", 1)[-1] for name in names)
        return cls(
            names,
            groups,
            begins=np.array([name.startswith("B-") for name in names]),
            kinds=np.unique(kinds, return_inverse=True)[1],
            label_kept=np.array([name not in ignored for name in names]),
            group_kept=np.array([group not in ignored for group in groups]),
        )


@dataclass(frozen=True)
class Predictions:
    """What a model predicts for each token; ``T`` tokens, ``C`` labels."""

    labels: np.ndarray  # (T,) int64, the number of the most probable label
    scores: np.ndarray  # (T,) float32, its probability
    probabilities: np.ndarray | None = None  # (T, C) float32, if a word's label is that of its mean


@dataclass(frozen=True)
class Units:
    """What is joined to entities: tokens or words, with label numbers and scores; each array is ``(U,)``."""

    firsts: np.ndarray  # the first token
    lasts: np.ndarray  # one past the last
    labels: np.ndarray
    scores: np.ndarray


@dataclass(frozen=True)
class Decoder:
    tokenizer: PreTrainedTokenizerBase  # spells the words
    tables: LabelTables
    strategy: str  # none, simple, first, average or max
    tokens_before: int  # special tokens before a text's own

    def entities(self, texts: Sequence[str], tokens: Tokens, predictions: Predictions) -> list[list[Entity]]:
        found: list[list[Entity]] = [[] for _ in tokens.owners]
        if len(tokens):
            speller = Speller(self.tokenizer, texts, tokens)
            several = self.single_tokens if self.strategy == "none" else self.groups
            for sequence, entity in several(speller, tokens, predictions):
                found[sequence].append(entity)
        return found

    def single_tokens(self, speller: Speller, tokens: Tokens, predictions: Predictions) -> Iterator[tuple[int, Entity]]:
        """Yield every token whose label is an answer, with the number of its sequence."""
        positions = np.flatnonzero(self.tables.label_kept[predictions.labels])
        for position, sequence in zip(positions.tolist(), tokens.sequences(positions).tolist(), strict=True):
            entity: Entity = {
                "entity": self.tables.names[predictions.labels[position]],
                "score": float(predictions.scores[position]),
                "index": position - int(tokens.bounds[sequence]) + self.tokens_before,
                "word": speller.token(position),
                "start": int(tokens.starts[position]),
                "end": int(tokens.ends[position]),
            }
            yield sequence, entity

    def groups(self, speller: Speller, tokens: Tokens, predictions: Predictions) -> Iterator[tuple[int, Entity]]:
        """Yield every entity that is an answer, with the number of its sequence."""
        units = units_of(tokens, predictions, self.strategy)
        edges = group_edges(tokens, units, self.tables)
        totals = np.add.reduceat(units.scores.astype(np.float64), edges[:-1])
        kept = np.flatnonzero(self.tables.group_kept[units.labels[edges[:-1]]])
        sequences = tokens.sequences(units.firsts[edges[kept]])
        for group, sequence in zip(kept.tolist(), sequences.tolist(), strict=True):
            begin, end = int(edges[group]), int(edges[group + 1])
            entity: Entity = {
                "entity_group": self.tables.groups[units.labels[begin]],
                "score": float(totals[group] / (end - begin)),
                "word": speller.units(units, begin, end, joined=self.strategy != "simple"),
                "start": int(tokens.starts[units.firsts[begin]]),
                "end": int(tokens.ends[units.lasts[end - 1] - 1]),
            }
            yield sequence, entity


def units_of(tokens: Tokens, predictions: Predictions, strategy: str) -> Units:
    """Return the words, each with the label that a strategy gives it, or for ``simple`` the tokens."""
    if strategy == "simple":
        firsts = np.arange(len(tokens))
        return Units(firsts, firsts + 1, predictions.labels, predictions.scores)
    firsts = word_starts(tokens)
    lasts = np.append(firsts[1:], len(tokens))
    if strategy == "average":
        assert predictions.probabilities is not None  # noqa: S101 - tells mypy what the caller sees to
        means = np.add.reduceat(predictions.probabilities, firsts) / (lasts - firsts)[:, None]
        return Units(firsts, lasts, means.argmax(1), means.max(1))
    deciding = firsts
    if strategy == "max":  # The token with the highest score of a word decides, the first of them if several are equal.
        highest = np.repeat(np.maximum.reduceat(predictions.scores, firsts), lasts - firsts)
        candidates = np.flatnonzero(predictions.scores == highest)
        deciding = candidates[np.searchsorted(candidates, firsts)]
    return Units(firsts, lasts, predictions.labels[deciding], predictions.scores[deciding])


def word_starts(tokens: Tokens) -> np.ndarray:
    """Return the positions of the tokens that begin a word; every sequence begins with one."""
    begins = ~tokens.subwords
    begins[tokens.bounds[:-1][np.diff(tokens.bounds) > 0]] = True
    return np.flatnonzero(begins)


def group_edges(tokens: Tokens, units: Units, tables: LabelTables) -> np.ndarray:
    """Return where each entity begins among the units, and one past the last: a new kind, a B- label, a new text."""
    kinds, sequences = tables.kinds[units.labels], tokens.sequences(units.firsts)
    begins = tables.begins[units.labels]
    begins[1:] |= (kinds[1:] != kinds[:-1]) | (sequences[1:] != sequences[:-1])
    begins[0] = True
    return np.append(np.flatnonzero(begins), len(begins))


class Speller:
    """Writes tokens as words, as transformers does; the same words come again and again, so they are remembered."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], tokens: Tokens) -> None:
        self.tokenizer, self.texts, self.tokens = tokenizer, texts, tokens
        self._joined: dict[tuple[str, ...], str] = {}
        self._names: dict[int, str] = {}
        self._unknown = tokenizer.unk_token_id

    def token(self, position: int) -> str:
        """Return a token as it stands in the vocabulary, or in the text if the vocabulary does not have it."""
        tokens = self.tokens
        number = int(tokens.ids[position])
        if number == self._unknown:
            return tokens.piece(self.texts, position)
        if number not in self._names:
            self._names[number] = self.tokenizer.convert_ids_to_tokens(number)
        return self._names[number]

    def units(self, units: Units, begin: int, end: int, joined: bool) -> str:
        """Return the text of some units; words are joined first from their tokens, and then among themselves."""
        stretches = [range(units.firsts[unit], units.lasts[unit]) for unit in range(begin, end)]
        if joined:
            return self.join(self.join(self.token(position) for position in stretch) for stretch in stretches)
        return self.join(self.token(stretch.start) for stretch in stretches)

    def join(self, pieces: Iterable[str]) -> str:
        """Return pieces as the tokenizer's decoder puts them together."""
        key = tuple(pieces)
        if key not in self._joined:
            self._joined[key] = self.tokenizer.convert_tokens_to_string(list(key))
        return self._joined[key]
