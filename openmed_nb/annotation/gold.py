"""Gold entities: the true entities of texts, as values of the caller or read from a file."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from .._render.values import Displayable, Report, Table, pluralize
from .._utils.text import describe_names, describe_value, short_type_name
from .._utils.validation import as_integer, invalid_type, is_hashable, suggest
from .._utils.warning import warn
from ..errors import ConfigurationError, UnmatchedIdsError
from .inputs import ID_COLUMN, NOTE_COLUMN
from .matching import MAX_NAMED_IDS, are_positions, find_positions, id_value, match_ids
from .references import get_row_index

GOLD_REMEDY = "For each text pass a list of (start, end, label), or of mappings with start, end, and label or entity_group. Convert a Series with to_dict(), and read a file with nb.read_annotations()."
IDS_REMEDY = "Pass the gold of these notes by their ids, or for notes without ids, in the same order."
TABLE_REMEDY = "A table of entities has the columns start, end, label, and note_id, id or note_index."

# Names of the label in mappings and tables, in the order of precedence.
LABEL_KEYS = ("entity_group", "label", "entity")


class GoldSpan(NamedTuple):
    """A true entity.

    Attributes:
        start: First character.
        end: End in characters, exclusive.
        label: Label.
    """

    start: int
    end: int
    label: str

    def overlaps(self, span: GoldSpan) -> bool:
        """Return whether an entity has characters in common with another one."""
        return self.start < span.end and span.start < self.end


class SpanText(NamedTuple):
    """The characters of a span of a text.

    Attributes:
        start: First character.
        end: End in characters, exclusive.
        text: The characters.
    """

    start: int
    end: int
    text: str


class GoldText(NamedTuple):
    """The true entities of a text.

    Attributes:
        id: Id of the text as a file or table states it, or ``None``.
        text: The text, or ``None`` if it is not known.
        spans: The entities.
        position: Position of the text in the results that were exported, or ``None``.
        span_texts: Characters of the entities as a table states them, which must be those of the text.
    """

    id: Any
    text: str | None
    spans: tuple[GoldSpan, ...]
    position: int | None = None
    span_texts: tuple[SpanText, ...] = ()


@dataclass(frozen=True, repr=False)
class GoldTexts(Displayable, Sequence[GoldText]):
    """The true entities of many texts, as :func:`read_annotations` returns them.

    Attributes:
        texts: The texts.
        is_table: Whether they were in a table with a row per entity. Texts that are not in it have no entities.
        num_skipped: Number of notes without an annotation, which were left out.
        num_predicted: Number of notes with predictions only, which were left out.
    """

    texts: tuple[GoldText, ...]
    is_table: bool = False
    num_skipped: int = 0
    num_predicted: int = 0

    JSON_EXCLUDE = ("texts", "is_table")
    JSON_PROPERTIES = ("labels",)

    @property
    def labels(self) -> dict[str, int]:
        """Number of entities by label. A label that may be a text is replaced."""
        return dict(Counter(describe_names([span.label]) for text in self.texts for span in text.spans))

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: Any) -> Any:
        return self.texts[index]

    def to_report(self) -> Report:
        """Return the counts as sentences and a table."""
        skipped = pluralize(self.num_skipped, "note without an annotation was", "notes without an annotation were")
        predicted = pluralize(self.num_predicted, "note has only predictions", "notes have only predictions")
        sentences = [f"{skipped} left out."] if self.num_skipped else []
        if self.num_predicted:
            sentences.append(f"{predicted}, which predictions=True reads.")
        labels = self.labels
        entities = pluralize(sum(labels.values()), "entity", "entities")
        rows = tuple((label, f"{count:,}") for label, count in sorted(labels.items()))
        title = f"{pluralize(len(self), 'annotated note')} with {entities}"
        return Report(title, tuple(sentences), (Table("Entities by label", ("label", "entities"), rows),))


def align_gold(
    gold: GoldTexts, ids: Sequence[Any] | None, texts: Iterable[str | None], count: int
) -> dict[int, GoldText]:
    """Return the gold of the notes by their positions: by id, or by position if neither side has ids.

    Notes that are not in the gold are excluded, unless the gold was a table.

    Args:
        gold: Gold entities.
        ids: Ids of the notes, or ``None``.
        texts: Texts of the notes, or ``None`` for a note without a text.
        count: Number of notes.

    Raises:
        UnmatchedIdsError: If the texts of the gold are not those of the notes.
    """
    wanted_ids = [text.id for text in gold]
    wanted_positions = [text.position for text in gold if text.position is not None]
    has_ids = any(note_id is not None for note_id in wanted_ids)
    in_order = len(gold) == count and not gold.is_table
    partners: Sequence[int] | None = None
    if not gold and gold.is_table:
        partners = ()
    elif has_ids and ids is not None:
        partners = _match_gold_ids(gold, ids, texts)
    elif has_ids:
        if in_order and all(
            text.text is not None and text.text == note for text, note in zip(gold, texts, strict=False)
        ):
            partners = range(count)
    elif ids is None or are_positions(ids):
        if len(wanted_positions) == len(gold) > 0:
            partners = match_ids(wanted_positions, range(count), "positions of the gold", IDS_REMEDY)
        elif in_order and not wanted_positions:
            partners = range(count)
    if partners is None:
        message = f"The gold of {pluralize(len(gold), 'text')} cannot be matched with {pluralize(count, 'note')}."
        remedy = "Pass predictions=True to read_annotations." if gold.num_predicted and not gold else IDS_REMEDY
        raise UnmatchedIdsError(message, remedy, wanted_ids[:MAX_NAMED_IDS] if has_ids else ())
    aligned = dict(zip(partners, gold, strict=True))
    if gold.is_table:
        return {**dict.fromkeys(range(count), GoldText(None, None, ())), **aligned}
    return aligned


def _match_gold_ids(gold: GoldTexts, ids: Sequence[Any], texts: Iterable[str | None]) -> Sequence[int]:
    """Return the positions of notes by their ids, and of notes with a repeated id by their ids and texts."""
    keys = [(id_value(text.id), text.text) for text in gold]
    if all(text.text is not None for text in gold):
        positions = find_positions(zip(map(id_value, ids), texts, strict=True))
        if Counter(keys) <= Counter({key: len(notes) for key, notes in positions.items()}):
            remaining = {key: iter(notes) for key, notes in positions.items()}
            return [next(remaining[key]) for key in keys]
    return match_ids([text.id for text in gold], ids, "ids of the gold", IDS_REMEDY)


def read_gold(gold: Any, labels: Mapping[str, str] | None = None, id_name: str = ID_COLUMN) -> GoldTexts:
    """Return gold entities of any accepted form. An entity that is marked twice counts once, with a warning.

    Args:
        gold: The result of :func:`read_annotations`, a mapping of ids to the entities of each text, a DataFrame with one row per
            entity, or an iterable of the entities of each text. An entity is ``(start, end, label)``, or a mapping with ``start``,
            ``end`` and ``label``, ``entity_group`` or ``entity``.
        labels: New names of labels.
        id_name: Name of the column of a DataFrame with the ids.

    Raises:
        ConfigurationError: If ``gold`` or ``labels`` is not valid.
    """
    names = {} if labels is None else labels
    if not isinstance(names, Mapping) or not all(isinstance(name, str) for pair in names.items() for name in pair):
        raise invalid_type("labels", labels, 'Pass a mapping of names, such as labels={"Disease": "DISEASE"}.')
    if isinstance(gold, GoldTexts):
        parsed = gold
    elif hasattr(gold, "columns") and hasattr(gold, "itertuples"):
        parsed = _gold_from_frame(gold, id_name)
    else:
        parsed = GoldTexts(tuple(_parse_texts(gold)))
    present = sorted({span.label for text in parsed for span in text.spans})
    for name in names:
        if present and name not in present:
            warn(f"No gold entity has the label {describe_value(name)}. {suggest(name, present)}")
    num_repeated = 0
    texts = []
    for text in parsed:
        spans = dict.fromkeys(span._replace(label=names.get(span.label, span.label)) for span in text.spans)
        num_repeated += len(text.spans) - len(spans)
        texts.append(text._replace(spans=tuple(spans)))
    if num_repeated:
        warn(f"{pluralize(num_repeated, 'gold entity is', 'gold entities are')} marked twice, and counted once.")
    return replace(parsed, texts=tuple(texts))


def _gold_from_frame(frame: Any, id_name: str) -> GoldTexts:
    """Return the entities of a DataFrame with one row per entity, such as that of ``found.to_frame()``."""
    names = [str(name) for name in frame.columns]
    id_key = next((name for name in (id_name, ID_COLUMN, "id") if name in names), None)
    has_positions = NOTE_COLUMN in names
    has_columns = (id_key or has_positions) and {"start", "end"} <= {*names} and not {*LABEL_KEYS}.isdisjoint(names)
    if not has_columns or len({*names}) < len(names):
        raise ConfigurationError(
            "The table of gold entities does not have the required columns, or has two of the same name.", TABLE_REMEDY
        )
    if "mark" in names and {*map(str, frame["mark"])} <= {"right", "wrong", "missed"}:
        # It does not tell which notes were reviewed, because those without entities have no row.
        message = "The table is that of a review, and does not name the reviewed notes without entities."
        raise ConfigurationError(message, "Pass the review, as in found.score(review).")
    spans: dict[tuple[Any, int | None], list[GoldSpan]] = {}
    span_texts: dict[tuple[Any, int | None], list[SpanText]] = {}
    for row, values in enumerate(frame.itertuples(index=False, name=None)):
        # pandas stores integers as floats if a value of the column was missing.
        entity = {
            name: int(value) if isinstance(value, float) and value.is_integer() else value
            for name, value in zip(names, values, strict=True)
        }
        span = parse_span(entity)
        note_id = entity.get(id_key or "")
        position = as_integer(entity.get(NOTE_COLUMN))
        if span is None or not is_hashable(note_id) or (has_positions and position is None):
            raise ConfigurationError(f"Row {row} of the table is not an entity of a text.", TABLE_REMEDY)
        key = (note_id, position)
        spans.setdefault(key, []).append(span)
        words = entity.get("span_text")
        if isinstance(words, str) and words:
            span_texts.setdefault(key, []).append(SpanText(span.start, span.end, words))
    texts = tuple(
        GoldText(key[0], None, tuple(of_text), key[1], tuple(span_texts.get(key, ()))) for key, of_text in spans.items()
    )
    return GoldTexts(texts, is_table=True)


def _parse_texts(gold: Any) -> Iterator[GoldText]:
    """Yield the gold of each text, with the keys of a mapping as ids."""
    ids: Iterable[Any] = itertools.repeat(None)
    if isinstance(gold, Mapping):
        ids = list(gold)
        gold = list(gold.values())
    # The order of a Series may differ from that of the notes.
    if not _is_iterable(gold) or get_row_index(gold) is not None:
        raise ConfigurationError(f"{short_type_name(gold)} is not a valid type for gold.", GOLD_REMEDY)
    for number, (note_id, entities) in enumerate(zip(ids, gold, strict=False)):
        if isinstance(entities, GoldText):
            yield entities
            continue
        if not _is_iterable(entities):
            raise ConfigurationError(
                f"{short_type_name(entities)} is not a valid type for the gold of text {number}.", GOLD_REMEDY
            )
        spans = [parse_span(entity) for entity in entities]
        if None in spans:
            raise ConfigurationError(
                f"The gold of text {number} has an invalid entity at index {spans.index(None)}.", GOLD_REMEDY
            )
        yield GoldText(note_id, None, tuple(span for span in spans if span))


def parse_span(entity: Any) -> GoldSpan | None:
    """Return the span of an entity, or ``None`` if the entity is not valid."""
    if isinstance(entity, Mapping):
        label = next((entity[key] for key in LABEL_KEYS if key in entity), None)
        entity = (entity.get("start"), entity.get("end"), label)
    if not (isinstance(entity, (tuple, list)) and len(entity) == 3):  # noqa: PLR2004 - start, end, label
        return None
    start = as_integer(entity[0])
    end = as_integer(entity[1])
    if start is None or end is None or not isinstance(entity[2], str) or not 0 <= start < end:
        return None
    return GoldSpan(start, end, entity[2])


def _is_iterable(value: Any) -> bool:
    return hasattr(value, "__iter__") and not isinstance(value, (str, bytes, Mapping))
