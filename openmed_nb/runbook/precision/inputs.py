"""What a comparison is given: texts and their gold entities, checked before anything runs."""

from __future__ import annotations

from collections.abc import Sized
from typing import TYPE_CHECKING, Any

from ...annotation.corpus import stream_of
from ...errors import ConfigurationError
from ...quantities import counted
from .gold import gold_spans
from .spans import Span

if TYPE_CHECKING:
    from ...annotation.stream import Annotator
    from .pairs import Pair


def checked_texts(texts: Any) -> Any:
    """Return texts as they are, where they are a series of texts.

    Raises:
        ConfigurationError: For anything else, and for none at all.

    Example:
        >>> checked_texts(None)
        Traceback (most recent call last):
        ...
        openmed_nb.errors.ConfigurationError: There is no text to compare on. Pass a model and texts; None is the bundled model.
    """
    if texts is None:
        raise no_text()
    stream = stream_of(texts)
    if not isinstance(texts, Sized):
        return stream
    if not len(texts):
        raise no_text()
    return texts


def no_text() -> ConfigurationError:
    """Return the error for no text at all."""
    return ConfigurationError("There is no text to compare on.", "Pass a model and texts; None is the bundled model.")


def checked_gold(gold: Any, texts: Any, pair: Pair) -> tuple[tuple[Span, ...], ...]:
    """Return gold entities, checked before anything runs.

    Raises:
        ConfigurationError: For what is no gold, gold of another number of texts, and labels that the model does not have.
    """
    spans = gold_spans(gold)
    if isinstance(texts, Sized) and len(texts) != len(spans):
        raise other_number(len(spans), len(texts))
    known = labels_given(pair.candidate)
    labels = {label for entities in spans for _, _, label in entities}
    if labels and not labels & known:
        remedy = f"Use those of the model: {', '.join(sorted(known))}."
        raise ConfigurationError("The labels of the gold are none of the model's.", remedy)  # They could be words.
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
