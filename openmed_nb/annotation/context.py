"""Context of entities: negation, uncertainty, temporality and experiencer, by the rules of OpenMed."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from .._utils.text import describe_value
from .._utils.validation import check_choice
from ..errors import ConfigurationError
from .boundaries import LINE_END

# Selects all columns.
ALL = "all"

# Values that are labeled in the displayed text, and their labels: the words of the columns, by which ``filter`` selects. Other
# values are the usual case and have no label.
_LABELS: Mapping[str, Mapping[Any, str]] = {
    "negated": {True: "negated"},
    "uncertain": {True: "uncertain"},
    "temporality": {"historical": "historical", "hypothetical": "hypothetical"},
    "experiencer": {"family": "family", "other": "other person"},
}

# Values of columns of strings.
CONTEXT_VALUES: Mapping[str, tuple[str, ...]] = {
    "temporality": ("recent", "historical", "hypothetical"),
    "experiencer": ("patient", "family", "other"),
}

# End of a sentence.
_SENTENCE_END = re.compile(rf"(?<=[.!?;])\s+|{LINE_END.pattern}")


class _Axis(NamedTuple):
    """Axis of OpenMed's ``assert_context``.

    Attributes:
        name: Key of the axis in the result of ``assert_context``.
        true_value: Value that is ``True`` in a column of booleans, or ``None`` for a column of strings.
    """

    name: str
    true_value: str | None = None


_AXES: Mapping[str, _Axis] = {
    "negated": _Axis("negation", "negated"),
    "uncertain": _Axis("uncertainty", "uncertain"),
    "temporality": _Axis("temporality"),
    "experiencer": _Axis("experiencer"),
}

# Names of all columns.
CONTEXT_COLUMNS = tuple(_AXES)

# Function that returns the value of each column for each entity of a text.
ContextFinder = Callable[[str, Sequence[Mapping[str, Any]]], dict[str, list[Any]]]


def context_mark(entity: Mapping[str, Any]) -> str:
    """Return the context labels of an entity, such as ``"negated, family"``, or an empty string.

    Example:
        >>> context_mark({"negated": True, "experiencer": "family"}), context_mark({"negated": False})
        ('negated, family', '')
    """
    labels = (column_labels.get(entity.get(column), "") for column, column_labels in _LABELS.items())
    return ", ".join(filter(None, labels))


def create_context_finder(columns: Sequence[str], language: str) -> ContextFinder:
    """Return a function that determines columns of context.

    Args:
        columns: Names of columns, or ``"all"``; empty for ``"negated"`` only.
        language: Code of a language for which OpenMed has cues, such as ``"en"``.

    Raises:
        ConfigurationError: If a column or the language is unknown, or if openmed is not installed.
    """
    names = columns or ("negated",)
    for name in names:
        check_choice("the context", name, (*_AXES, ALL))
    selected = [name for name in _AXES if name in names or ALL in names]
    try:
        from openmed.clinical.context import assert_context
        from openmed.clinical.lexicons import available_clinical_cue_languages
        from openmed.clinical.negation_scope import negated_spans
    except ImportError as error:
        remedy = "Install it: python -m pip install 'openmed_nb[context]'."
        raise ConfigurationError("with_context() needs openmed.", remedy) from error
    languages = available_clinical_cue_languages()
    if language not in languages:
        message = f"No context rules for the language {describe_value(language)}."
        raise ConfigurationError(message, f"Pass one of {', '.join(languages)}.")
    # Scopes of negation cues are exact and fast, but English only.
    uses_scopes = language == "en" and "negated" in selected
    asserted = [name for name in selected if not (name == "negated" and uses_scopes)]

    def find_context(text: str, entities: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
        context: dict[str, list[Any]] = {name: [] for name in selected}
        for sentence, spans in _iter_sentences(text, entities):
            if uses_scopes:
                negated = set(negated_spans(sentence, spans))
                context["negated"] += [(span["start"], span["end"]) in negated for span in spans]
            if asserted:
                for values in assert_context(sentence, spans, language=language):
                    for name in asserted:
                        axis = _AXES[name]
                        value = values[axis.name]
                        context[name].append(value if axis.true_value is None else value == axis.true_value)
        return context

    return find_context


def _iter_sentences(text: str, entities: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield each sentence that contains entities, and the offsets of the entities in it, in the order of the entities."""
    ends = [match.start() for match in _SENTENCE_END.finditer(text)] if entities else []
    ends.append(len(text))

    def find_sentence(entity: Mapping[str, Any]) -> tuple[int, int]:
        """Return the bounds of the sentence of an entity. If the entity crosses the end of a sentence, both are one sentence."""
        first = bisect_right(ends, entity["start"], hi=len(ends) - 1)
        last = bisect_left(ends, entity["end"], lo=first, hi=len(ends) - 1)
        return ends[first - 1] if first else 0, ends[last]

    for (start, stop), group in groupby(entities, find_sentence):
        yield (
            text[start:stop],
            [{"start": entity["start"] - start, "end": entity["end"] - start} for entity in group],
        )
