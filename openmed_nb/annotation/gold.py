"""Gold entities: the true entities of texts, as values of the caller or read from a file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .._render.values import Displayable, Report, Table, pluralize
from .._utils.text import describe_names, short_type_name
from .._utils.validation import as_integer
from ..errors import ConfigurationError

GOLD_REMEDY = (
    "For each text pass a list of (start, end, label), or of mappings with start, end, and label or entity_group."
)
TABLE_REMEDY = "A table of entities has the columns start, end, label, and id or note."

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


class GoldText(NamedTuple):
    """The true entities of a text.

    Attributes:
        id: Id of the text as a file or table states it, or ``None``.
        text: The text, or ``None`` if it is not known.
        spans: The entities.
        position: Position of the text in the results that were exported, or ``None``.
    """

    id: Any
    text: str | None
    spans: tuple[GoldSpan, ...]
    position: int | None = None


@dataclass(frozen=True, repr=False)
class GoldTexts(Displayable, Sequence[GoldText]):
    """The true entities of many texts, as :func:`read_annotations` returns them.

    Attributes:
        texts: The texts.
        is_table: Whether they were in a table with a row per entity. Texts that are not in it have no entities.
        num_skipped: Number of notes without an annotation, which were left out.
        num_predicted: Number of notes with predictions only, which were left out.
        is_numbered: Whether each ``id`` is the position of the text, from 0.
    """

    texts: tuple[GoldText, ...]
    is_table: bool = False
    num_skipped: int = 0
    num_predicted: int = 0
    is_numbered: bool = False

    JSON_EXCLUDE = ("texts", "is_table", "is_numbered")
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


def gold_from_columns(columns: Mapping[str, Iterable[Any]]) -> GoldTexts:
    """Return the entities of a table, such as that of ``found.to_frame()``.

    Raises:
        ConfigurationError: If a column is missing, or if a row is not an entity.
    """
    key = next((name for name in ("id", "note") if name in columns), None)
    if {"id", "note"} <= {*columns}:
        pairs = {*zip(map(str, columns["id"]), map(str, columns["note"]), strict=True)}
        if len({note_id for note_id, _note in pairs}) < len(pairs):  # Several notes have the same id.
            key = "note"
    label_key = next((name for name in LABEL_KEYS if name in columns), None)
    if key is None or label_key is None or not {"start", "end"} <= {*columns}:
        raise ConfigurationError("The table of gold entities does not have the required columns.", TABLE_REMEDY)
    spans: dict[str, list[GoldSpan]] = {}
    rows = zip(columns[key], columns["start"], columns["end"], columns[label_key], strict=True)
    for row, (name, *entity) in enumerate(rows):
        span = parse_span(entity)
        if span is None or (key == "note" and as_integer(name) is None):
            raise ConfigurationError(f"Row {row} of the table is not an entity of a text.", TABLE_REMEDY)
        spans.setdefault(str(name), []).append(span)
    texts = tuple(GoldText(name, None, tuple(of_text)) for name, of_text in spans.items())
    return GoldTexts(texts, is_table=True, is_numbered=key == "note")


def align_gold(gold: GoldTexts, keys: Sequence[Any]) -> dict[int, GoldText]:
    """Return the gold of the texts of the results by their positions: by id if both have ids, else in the same order.

    Texts that are not in the gold are excluded, unless the gold was a table.

    Args:
        gold: Gold entities.
        keys: Keys of the texts of the results, or the range of their positions.

    Raises:
        ConfigurationError: If the texts of the gold are not those of the results.
    """
    has_positions = len(gold) > 0 and all(text.position is not None for text in gold)
    stated = [text.position if has_positions else text.id for text in gold]
    names = [None if name is None else str(name) for name in stated]
    indices = range(len(keys))
    positions = None if gold.is_numbered or has_positions else _find_positions(names, keys)
    if positions is None:  # Results without ids are exported with the positions of their texts as ids.
        positions = _find_positions(names, indices)
    in_order = isinstance(keys, range) or None in names or names == [str(key) for key in keys]
    if positions is None and in_order and not gold.is_table and len(gold) == len(keys):
        positions = [*indices]
    if positions is None:
        message = (
            f"The gold has {len(gold):,} texts that are not the {len(keys):,} texts of the results, or not unique."
        )
        raise ConfigurationError(message, "Pass the gold of the same texts, in the same order or with the same ids.")
    aligned = dict(zip(positions, gold, strict=True))
    if gold.is_table:
        return {position: aligned.get(position, GoldText(None, None, ())) for position in indices}
    return aligned


def _find_positions(names: Sequence[str | None], ids: Iterable[Any]) -> list[int] | None:
    """Return the position of each name among ids, or ``None`` if they are not unique or a name is not an id."""
    keys = [str(key) for key in ids]
    positions = {key: position for position, key in enumerate(keys)}
    if len(positions) < len(keys) or len({*names}) < len(names) or not all(name in positions for name in names):
        return None
    return [positions[name] for name in names if name is not None]


def read_gold(gold: Any) -> GoldTexts:
    """Return gold entities of any accepted form.

    Args:
        gold: The result of :func:`read_annotations`, a DataFrame with the columns ``start``, ``end``, ``label``, and ``id`` or
            ``note``, or an iterable as for :func:`parse_gold`.

    Raises:
        ConfigurationError: If ``gold`` is not valid.
    """
    if isinstance(gold, GoldTexts):
        return gold
    if hasattr(gold, "columns") and hasattr(gold, "itertuples"):
        columns = {str(name): gold.iloc[:, index].tolist() for index, name in enumerate(gold.columns)}
        if len(columns) < len(gold.columns):
            raise ConfigurationError("The table of gold entities has several columns of the same name.", TABLE_REMEDY)
        for name in {"note", "start", "end"} & columns.keys():
            # pandas stores integers as floats if a value of the column was missing.
            columns[name] = [
                int(value) if isinstance(value, float) and value.is_integer() else value for value in columns[name]
            ]
        return gold_from_columns(columns)
    return GoldTexts(tuple(GoldText(None, None, spans) for spans in parse_gold(gold)))


def parse_gold(gold: Any) -> tuple[tuple[GoldSpan, ...], ...]:
    """Return the gold entities of each text.

    Args:
        gold: An iterable with the entities of each text: a :class:`GoldText`, or an iterable of entities. An entity is
            ``(start, end, label)``, or a mapping with ``start``, ``end`` and ``label``, ``entity_group`` or ``entity``.

    Raises:
        ConfigurationError: If ``gold`` is not valid.
    """
    if not _is_series(gold):
        raise ConfigurationError(f"{short_type_name(gold)} is not a valid type for gold.", GOLD_REMEDY)
    texts = []
    for number, entities in enumerate(gold):
        if isinstance(entities, GoldText):
            texts.append(entities.spans)
            continue
        if not _is_series(entities):
            message = f"{short_type_name(entities)} is not a valid type for the gold of text {number}."
            raise ConfigurationError(message, GOLD_REMEDY)
        spans = [parse_span(entity) for entity in entities]
        if None in spans:
            message = f"The gold of text {number} has an invalid entity at index {spans.index(None)}."
            raise ConfigurationError(message, GOLD_REMEDY)
        texts.append(tuple(span for span in spans if span))
    return tuple(texts)


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


def _is_series(value: Any) -> bool:
    return hasattr(value, "__iter__") and not isinstance(value, (str, bytes, Mapping))
