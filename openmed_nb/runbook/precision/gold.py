"""Gold entities as a person gives them: tuples, or mappings as the pipelines give them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...errors import ConfigurationError
from ...quantities import whole_number
from .spans import Span

GOLD_REMEDY = (
    "For each text give a list of (start, end, label), or of mappings with start, end, and label or entity_group."
)


def gold_spans(gold: Any) -> tuple[tuple[Span, ...], ...]:
    """Return the gold entities of each text.

    Args:
        gold: For each text a list of ``(start, end, label)``, or of mappings with ``start``, ``end``, and ``label``,
            ``entity_group`` or ``entity``.

    Raises:
        ConfigurationError: For anything else, with the number of the text.

    Example:
        >>> gold_spans([[(0, 6, "DISEASE")], [{"start": 4, "end": 9, "entity_group": "DISEASE"}]])
        (((0, 6, 'DISEASE'),), ((4, 9, 'DISEASE'),))
        >>> gold_spans([[], [(0, "6", "DISEASE")]])
        Traceback (most recent call last):
        ...
        openmed_nb.errors.ConfigurationError: The gold of text 1 has no entity at its place 0. For each text give a list \
of (start, end, label), or of mappings with start, end, and label or entity_group.
    """
    if not is_list(gold):
        raise ConfigurationError(f"The gold cannot be {type(gold).__name__}.", GOLD_REMEDY)
    return tuple(spans_of(entities, number) for number, entities in enumerate(gold))


def spans_of(entities: Any, number: int) -> tuple[Span, ...]:
    """Return the gold entities of one text."""
    if not is_list(entities):
        raise ConfigurationError(f"The gold of text {number} cannot be {type(entities).__name__}.", GOLD_REMEDY)
    spans = [span_of(entity) for entity in entities]
    if None in spans:
        what = f"The gold of text {number} has no entity at its place {spans.index(None)}."
        raise ConfigurationError(what, GOLD_REMEDY)
    return tuple(span for span in spans if span)


def span_of(entity: Any) -> Span | None:
    """Return an entity as a span, ``None`` where it is none."""
    if isinstance(entity, Mapping):
        label = next((entity[key] for key in ("entity_group", "label", "entity") if key in entity), None)
        entity = (entity.get("start"), entity.get("end"), label)
    if not (isinstance(entity, (tuple, list)) and len(entity) == 3):  # noqa: PLR2004 - start, end, label
        return None
    start, end, label = entity
    first, last = whole_number(start), whole_number(end)
    if first is None or last is None or not isinstance(label, str):
        return None
    return (first, last, label) if 0 <= first < last else None


def is_list(thing: Any) -> bool:
    """Tell whether something is a series of things, and no text and no mapping."""
    return hasattr(thing, "__iter__") and not isinstance(thing, (str, bytes, Mapping))
