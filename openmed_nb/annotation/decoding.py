"""Aggregation of token labels and scores into entities, vectorized over all tokens of many texts.

The results equal those of ``TokenClassificationPipeline.aggregate`` and ``group_entities`` in transformers, but an entity ends where
its line ends.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, compress, islice
from typing import TYPE_CHECKING

import numpy as np

from .boundaries import find_line_ends
from .masking import strip_bio_prefix
from .storage import DroppedSpan, ResultStore
from .tokens import Tokens, expand_ranges, get_token_names, mark_changes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# Approximate number of decoded spans after which the cache is cleared.
SPELLING_CACHE_SIZE = 1 << 16


@dataclass(frozen=True)
class LabelTables:
    """Lookup tables of a model's labels, indexed by label id.

    Attributes:
        names: Names of the ``C`` token labels, such as ``B-DISEASE``.
        entity_names: Names of the entities of these labels, such as ``DISEASE``.
        is_begin: Whether a label starts a new entity even after a token of the same type, bool array of shape ``(C,)``.
        entity_type_ids: Entity type of each label, int64 array of shape ``(C,)``. One entity contains one type only.
        keep_label: Whether to return a token with the label if tokens are not aggregated, bool array of shape ``(C,)``.
        keep_entity: Whether to return an entity with the label, bool array of shape ``(C,)``.
    """

    names: tuple[str, ...]
    entity_names: tuple[str, ...]
    is_begin: np.ndarray
    entity_type_ids: np.ndarray
    keep_label: np.ndarray
    keep_entity: np.ndarray


@functools.lru_cache(maxsize=32)
def build_label_tables(names: tuple[str, ...], ignored: tuple[str, ...]) -> LabelTables:
    """Return the lookup tables of labels.

    They are cached, because building them takes about as long as annotating a short text.

    Args:
        names: Names of the token labels, in the order of their ids.
        ignored: Token labels and entity names that are excluded from the results.
    """
    entity_types = [name[2:] if name.startswith(("B-", "I-")) else name for name in names]
    # transformers removes everything up to the first hyphen from an entity name, even if it is not a B or I prefix.
    entity_names = tuple(name.split("-", 1)[-1] for name in names)
    return LabelTables(
        names,
        entity_names,
        is_begin=np.array([name.startswith("B-") for name in names]),
        entity_type_ids=np.unique(entity_types, return_inverse=True)[1],
        keep_label=np.array([name not in ignored for name in names]),
        keep_entity=np.array([name not in ignored for name in entity_names]),
    )


@dataclass(frozen=True)
class Predictions:
    """Predictions of a model for ``T`` tokens and ``C`` labels.

    Attributes:
        labels: Id of the most probable label, int64 array of shape ``(T,)``.
        scores: Probability of that label, float32 array of shape ``(T,)``.
        probabilities: Probabilities of all labels, float32 array of shape ``(T, C)``. Only set for the ``average`` strategy.
    """

    labels: np.ndarray
    scores: np.ndarray
    probabilities: np.ndarray | None = None


@dataclass(frozen=True)
class Decoder:
    """Conversion of token predictions to entities.

    Attributes:
        detokenizer: Converts tokens to the text of entities.
        tables: Lookup tables of the model's labels.
        strategy: Aggregation strategy: ``none``, ``simple``, ``first``, ``average`` or ``max``.
        num_prefix_tokens: Number of special tokens before the tokens of a text.
        ends_at_lines: Whether an entity ends at :data:`LINE_END`. It does not in transformers.
    """

    detokenizer: Detokenizer
    tables: LabelTables
    strategy: str
    num_prefix_tokens: int
    ends_at_lines: bool

    @property
    def entity_labels(self) -> tuple[str, ...]:
        """The distinct labels of the entities that can be returned, without the prefixes of token labels."""
        tables = self.tables
        if self.strategy == "none":
            names = [strip_bio_prefix(name) for name in compress(tables.names, tables.keep_label)]
        else:
            names = [*compress(tables.entity_names, tables.keep_entity)]
        return tuple(dict.fromkeys(names))

    def entities(self, texts: Sequence[str], tokens: Tokens, predictions: Predictions) -> ResultStore:
        """Return the entities of each text."""
        if self.strategy == "none":
            return self._decode_tokens(texts, tokens, predictions)
        if not len(tokens):
            return ResultStore.from_results([[] for _ in texts])
        return self._decode_entities(texts, tokens, predictions)

    def _decode_tokens(self, texts: Sequence[str], tokens: Tokens, predictions: Predictions) -> ResultStore:
        """Return every token whose label is not ignored."""
        positions = np.flatnonzero(self.tables.keep_label[predictions.labels])
        columns = {
            "score": predictions.scores[positions].astype(np.float64),
            "start": tokens.starts[positions],
            "end": tokens.ends[positions],
            "index": positions - tokens.text_offsets[tokens.text_ids(positions)] + self.num_prefix_tokens,
        }
        return ResultStore.of_columns(
            "entity",
            self.tables.names,
            text_offsets=np.searchsorted(positions, tokens.text_offsets),
            labels=predictions.labels[positions],
            words=self.detokenizer.token_texts(texts, tokens, positions),
            columns=columns,
            dropped={},
        )

    def _decode_entities(self, texts: Sequence[str], tokens: Tokens, predictions: Predictions) -> ResultStore:
        """Return every entity whose label is not ignored."""
        # Label words, or single tokens for ``simple``.
        unit_starts = np.arange(len(tokens)) if self.strategy == "simple" else tokens.word_starts
        unit_ends = np.append(unit_starts[1:], len(tokens))
        if predictions.probabilities is not None:
            sums = np.add.reduceat(predictions.probabilities, unit_starts)
            means = sums / (unit_ends - unit_starts)[:, None]
            unit_labels = means.argmax(1)
            unit_scores = means.max(1)
        else:
            deciding = unit_starts
            if self.strategy == "max":
                # The token with the highest score determines the label of a word; ties go to the first token.
                highest = np.maximum.reduceat(predictions.scores, unit_starts)
                candidates = np.flatnonzero(predictions.scores == np.repeat(highest, unit_ends - unit_starts))
                deciding = candidates[np.searchsorted(candidates, unit_starts)]
            unit_labels = predictions.labels[deciding]
            unit_scores = predictions.scores[deciding]
        # An entity starts at a new entity type, at a ``B-`` label and at a new text.
        starts_entity = self.tables.is_begin[unit_labels] | mark_changes(self.tables.entity_type_ids[unit_labels])
        starts_entity[np.searchsorted(unit_starts, tokens.text_starts)] = True
        first_units = np.flatnonzero(starts_entity)
        end_units = np.append(first_units[1:], len(unit_starts))
        is_kept = self.tables.keep_entity[unit_labels]
        if self.ends_at_lines:
            several = np.flatnonzero(is_kept[first_units] & (end_units - first_units > 1))
            columns = (
                first_units[several],
                end_units[several],
                tokens.text_ids(unit_starts[first_units[several]]),
                tokens.starts[unit_starts[first_units[several]]],
                tokens.ends[unit_ends[end_units[several] - 1] - 1],
            )
            for first, end, text_id, start, stop in zip(*(column.tolist() for column in columns), strict=True):
                span_text = texts[text_id][start:stop]
                # Nearly all entities are in one line, and this is faster than the pattern.
                if span_text.isprintable() and "   " not in span_text and "<" not in span_text:
                    continue
                starts = tokens.starts[unit_starts[first:end]]
                ends = tokens.ends[unit_ends[first:end] - 1]
                for match in find_line_ends(texts[text_id], start, stop):
                    line_end = first + np.searchsorted(starts, match.start())
                    line_start = first + np.searchsorted(ends, match.end(), side="right")
                    # Units between the lines, such as tokens of line breaks, are not in an entity.
                    is_kept[line_end:line_start] = False
                    starts_entity[line_end : line_start + 1] = True
            first_units = np.flatnonzero(starts_entity)
            end_units = np.append(first_units[1:], len(unit_starts))
        scores = np.add.reduceat(unit_scores, first_units, dtype=np.float64) / (end_units - first_units)
        kept = np.flatnonzero(is_kept[first_units])
        starts = unit_starts[first_units[kept]]
        ends = unit_ends[end_units[kept] - 1]
        labels = unit_labels[first_units[kept]]
        word_starts = None if self.strategy == "simple" else unit_starts
        return ResultStore.of_columns(
            "entity_group",
            self.tables.entity_names,
            text_offsets=np.searchsorted(starts, tokens.text_offsets),
            labels=labels,
            words=self.detokenizer.decode_spans(texts, tokens, starts, ends, word_starts),
            columns={"score": scores[kept], "start": tokens.starts[starts], "end": tokens.ends[ends - 1]},
            dropped=self._find_dropped_spans(tokens, predictions, starts, ends, self.tables.entity_type_ids[labels]),
        )

    def _find_dropped_spans(
        self,
        tokens: Tokens,
        predictions: Predictions,
        entity_starts: np.ndarray,
        entity_ends: np.ndarray,
        entity_types: np.ndarray,
    ) -> dict[int, tuple[DroppedSpan, ...]]:
        """Return the labeled tokens of each text that are not in an entity of their type.

        Adjacent tokens of one type are merged into one span.
        """
        positions = np.flatnonzero(self.tables.keep_entity[predictions.labels])
        types = self.tables.entity_type_ids[predictions.labels[positions]]
        if len(entity_starts):
            # Only the last entity that starts at or before a token can contain the token.
            entities = np.maximum(np.searchsorted(entity_starts, positions, side="right") - 1, 0)
            covered = (entity_starts[entities] <= positions) & (positions < entity_ends[entities])
            # A token of another type is masked with its own label. Offsets may decrease (byte-level BPE after an added
            # token), so a token can extend beyond the characters of its entity.
            covered &= types == entity_types[entities]
            covered &= tokens.starts[positions] >= tokens.starts[entity_starts[entities]]
            covered &= tokens.ends[positions] <= tokens.ends[entity_ends[entities] - 1]
            positions = positions[~covered]
            types = types[~covered]
        if not len(positions):
            return {}
        text_ids = tokens.text_ids(positions)
        # The difference from the index is the same for adjacent positions.
        is_after_gap = mark_changes(positions - np.arange(len(positions)))
        first = np.flatnonzero(is_after_gap | mark_changes(text_ids) | mark_changes(types))
        columns = (
            text_ids[first],
            predictions.labels[positions[first]],
            np.maximum.reduceat(predictions.scores[positions], first),
            np.minimum.reduceat(tokens.starts[positions], first),
            np.maximum.reduceat(tokens.ends[positions], first),
        )
        spans: dict[int, list[DroppedSpan]] = {}
        for text_id, label, score, start, end in zip(*(column.tolist() for column in columns), strict=True):
            spans.setdefault(text_id, []).append(DroppedSpan(self.tables.entity_names[label], score, start, end))
        return {text_id: tuple(text_spans) for text_id, text_spans in spans.items()}


class Detokenizer:
    """Conversion of tokens to text, as in transformers. Decoded spans are cached, because entities repeat often."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._span_cache: dict[bytes | int, str] = {}
        # Text of each token when it is not the first of its word.
        self._continuation_cache: dict[str, str] = {}

    def token_texts(self, texts: Sequence[str], tokens: Tokens, positions: np.ndarray) -> list[str]:
        """Return the vocabulary entry of each token, or its text if the token is unknown."""
        ids = tokens.ids[positions]
        names: list[str] = get_token_names(self.tokenizer, ids).names[ids].tolist()
        for index in np.flatnonzero(ids == self.tokenizer.unk_token_id).tolist():
            position = positions[index]
            text = texts[int(tokens.text_ids(position))]
            names[index] = text[tokens.starts[position] : tokens.ends[position]]
        return names

    def decode_spans(
        self,
        texts: Sequence[str],
        tokens: Tokens,
        starts: np.ndarray,
        ends: np.ndarray,
        word_starts: np.ndarray | None = None,
    ) -> list[str]:
        """Return the text of spans of tokens.

        The tokens of each word are joined first, and then the words. Without ``word_starts``, the tokens are joined.
        """
        starts_word = np.zeros(len(tokens), np.int64)
        if word_starts is not None:
            starts_word[word_starts] = 1
        # The ids and the word boundaries determine the text, unless a token is unknown: then the input text matters too.
        encoded = (tokens.ids * 2 + starts_word).tobytes()
        width = starts_word.itemsize
        byte_spans = zip((starts * width).tolist(), (ends * width).tolist(), strict=True)
        keys: list[bytes | int] = [encoded[start:end] for start, end in byte_spans]
        num_unknown = np.append(0, np.cumsum(tokens.ids == self.tokenizer.unk_token_id))
        for index in np.flatnonzero(num_unknown[ends] > num_unknown[starts]).tolist():
            keys[index] = index
        if len(self._span_cache) > SPELLING_CACHE_SIZE:
            self._span_cache = {}
            self._continuation_cache = {}
        cache = self._span_cache  # Keep this reference, because other threads of a worker may replace the cache.
        new = {key: index for index, key in enumerate(keys) if key not in cache}
        chosen = np.array([*new.values()], np.int64)
        starts = starts[chosen]
        ends = ends[chosen]
        if word_starts is None:
            pieces = self.token_texts(texts, tokens, expand_ranges(starts, ends))
        else:
            word_ends = np.append(word_starts[1:], len(tokens))
            starts = np.searchsorted(word_starts, starts)
            ends = np.searchsorted(word_starts, ends)
            inside = expand_ranges(starts, ends)
            pieces = self.decode_spans(texts, tokens, word_starts[inside], word_ends[inside])
        remaining = iter(pieces)
        lists = [list(islice(remaining, count)) for count in (ends - starts).tolist()]
        decoded = dict(zip(new, self.decode_pieces(lists), strict=True))
        cache.update((key, text) for key, text in decoded.items() if isinstance(key, bytes))
        return [decoded[key] if key in decoded else cache[key] for key in keys]

    def decode_pieces(self, lists: list[list[str]]) -> list[str]:
        """Return the text of each list of pieces, joined by the tokenizer's decoder."""
        join = self.tokenizer.convert_tokens_to_string
        # Keep this reference, because other threads of a worker may replace the cache.
        continuations = self._continuation_cache
        new = list({piece for pieces in lists for piece in pieces[1:]} - continuations.keys())
        if type(self.tokenizer.backend_tokenizer.decoder).__name__ != "WordPiece" or any(
            "\0" in piece for piece in new
        ):
            return [join(pieces) for pieces in lists]
        # This decoder converts each piece independently; only the first piece of a list is converted differently (unchanged).
        continuations.update(
            zip(new, join(["", *chain.from_iterable((piece, "\0") for piece in new)]).split(" \0"), strict=False)
        )
        return [
            (join([first]) if " " in first else first) + "".join(map(continuations.__getitem__, rest))
            for first, *rest in lists
        ]
