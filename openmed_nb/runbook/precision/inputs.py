"""What a comparison is given: texts and their gold entities, checked before anything runs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence, Sized
from typing import TYPE_CHECKING, Any

from ...annotation.corpus import stream_of
from ...annotation.fingerprints import fingerprint_of
from ...errors import ConfigurationError
from ...quantities import counted
from .gold import gold_spans
from .spans import Span

if TYPE_CHECKING:
    from ...annotation.stream import Annotator
    from .pairs import Pair

WORD = re.compile(r"[^\W\d_]+")
"""Letters that stand together."""


def checked_texts(texts: Any) -> Any:
    """Return texts as they are, where they are a series of texts.

    Raises:
        ConfigurationError: For anything else, and for none at all.

    Example:
        >>> checked_texts(None)
        Traceback (most recent call last):
        ...
        openmed_nb.errors.ConfigurationError: There is no text to compare on. Pass the model first and then the texts; None is \
the bundled model.
    """
    if texts is None:
        raise no_text()
    if isinstance(texts, str):
        raise ConfigurationError("str is no series of texts.", "Pass the model first and then a list of texts.")
    stream = stream_of(texts)
    if not isinstance(texts, Sized):
        return stream
    if not len(texts):
        raise no_text()
    return texts


def no_text() -> ConfigurationError:
    """Return the error for no text at all."""
    what = "Pass the model first and then the texts; None is the bundled model."
    return ConfigurationError("There is no text to compare on.", what)


def distinct(texts: list[Any], gold: Any) -> tuple[list[Any], Any]:
    """Return texts without those whose words were there before, each with its gold: the same note twice tells nothing new.

    Gold of another number of texts is left as it is, for :func:`checked_gold` to refuse.

    Example:
        >>> distinct(["1. Asthma.", "Fever.", "2. asthma "], [[1], [], [1]])
        (['1. Asthma.', 'Fever.'], [[1], []])
    """
    gold = list(gold) if isinstance(gold, Iterator) else gold
    if gold is not None and not (isinstance(gold, Sequence) and len(gold) == len(texts)):
        return texts, gold
    first: dict[int, int] = {}
    for place, text in enumerate(texts):
        first.setdefault(fingerprint_of(words_of(text)), place)
    return [texts[place] for place in first.values()], gold and [gold[place] for place in first.values()]


def words_of(text: Any) -> Any:
    """Return the words of a text in one form: numbers, white space, punctuation and capitals make no other text.

    Example:
        >>> words_of("12. She has  Asthma!")
        'she has asthma'
    """
    return " ".join(WORD.findall(text)).casefold() if isinstance(text, str) else text


def checked_gold(gold: Any, texts: Any, pair: Pair) -> tuple[tuple[Span, ...], ...]:
    """Return gold entities, checked before anything runs.

    Raises:
        ConfigurationError: For what is no gold, gold of another number of texts, and labels that the model does not have.
    """
    spans = gold_spans(gold)
    if isinstance(texts, Sized) and len(texts) != len(spans):
        raise other_number(len(spans), len(texts))
    known = labels_given(pair.candidate)
    labels = [label for entities in spans for _, _, label in entities]
    unknown = sum(label not in known for label in labels)
    if unknown:  # They are not named: they could be words of a text.
        what = f"{unknown:,} of {counted(len(labels), 'gold entity', 'gold entities')} have a label that the model does not have."
        raise ConfigurationError(what, f"Use those of the model, and leave others out: {', '.join(sorted(known))}.")
    return spans


def labels_given(annotator: Annotator) -> set[str]:
    """Return the labels that entities can have, without those that are no answer, such as ``O``."""
    tables = annotator.decoder.tables
    if annotator.settings.aggregation_strategy == "none":
        return {name for name, kept in zip(tables.names, tables.label_kept, strict=True) if kept}
    return {group for group, kept in zip(tables.groups, tables.group_kept, strict=True) if kept}


def other_number(gold: int, texts: int) -> ConfigurationError:
    """Return the error for gold of another number of texts."""
    return ConfigurationError(
        f"The gold is of {counted(gold, 'text')}, and there are {texts:,}.", "Pass the gold of the same texts."
    )
