"""Notes as they are written to and read from files. Offsets are in characters (code points)."""

from __future__ import annotations

import importlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TextIO

from ..._render.display import Displayable, TextSegment
from ...errors import ConfigurationError
from ..gold import GoldSpan, GoldText, parse_span

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa
    from ipywidgets import DOMWidget

# Descriptions of the information that several formats lose, as the end of a sentence.
WITHOUT_TEXT = "notes without a text (missing, failed, changed, or from a generator), which were omitted"
CHANGED_LABELS = "labels with spaces, which were replaced by underscores"
TRIMMED = "entities with white space at their ends, which was removed"


class ExportedNote(NamedTuple):
    """A note with its entities.

    Attributes:
        id: Key of the note, or its position if there are no keys.
        text: Text of the note.
        spans: Entities.
        scores: Score of each entity.
    """

    id: str | int
    text: str
    spans: tuple[GoldSpan, ...]
    scores: tuple[float, ...]


@dataclass
class Export:
    """Notes to write. Iteration yields those with a text, and counts them.

    Attributes:
        notes: The notes, or ``None`` for a note without a text.
        model: Name of the model.
        losses: Number of items that the format cannot contain, by description.
        num_notes: Number of notes that were written.
        num_entities: Number of entities of these notes.
        labels: Labels of these entities.
    """

    notes: Iterable[ExportedNote | None]
    model: str
    losses: Counter[str] = field(default_factory=Counter)
    num_notes: int = 0
    num_entities: int = 0
    labels: set[str] = field(default_factory=set)

    def __iter__(self) -> Iterator[ExportedNote]:
        for note in self.notes:
            if note is None:
                self.losses[WITHOUT_TEXT] += 1
                continue
            self.num_notes += 1
            self.num_entities += len(note.spans)
            self.labels.update(span.label for span in note.spans)
            yield note

    def sanitize_label(self, label: str) -> str:
        """Return a label without white space, for formats in which white space separates columns."""
        tag = re.sub(r"\s+", "_", label) or "_"
        if tag != label:
            self.losses[CHANGED_LABELS] += 1
        return tag


class Saveable(Protocol):
    """Results that can be saved, and displayed in pages."""

    def to_dict(self) -> dict[str, Any]:
        """Return model, device and texts as JSON-compatible data."""
        ...

    def to_frame_with_ids(self) -> pd.DataFrame:
        """Return one row per entity, with the ids of the notes as a column."""
        ...

    def to_arrow(self) -> pa.Table:
        """Return one row per entity."""
        ...

    def iter_records(self) -> Iterator[dict[str, Any]]:
        """Yield a JSON-compatible object per note."""
        ...

    def summary(self) -> Displayable:
        """Return a summary of the results."""
        ...

    def iter_named_segments(
        self, start: int, stop: int, max_characters: int | None = ...
    ) -> Iterator[tuple[str, list[TextSegment]]]:
        """Yield index and id of each note, and its segments."""
        ...

    def create_view(self) -> DOMWidget:
        """Return a browser of the notes."""
        ...

    def __len__(self) -> int: ...


class InvalidNoteError(Exception):
    """A note in a file is not valid. The argument is the problem, without any contents of the file."""


def open_utf8(path: Path) -> TextIO:
    """Open a file to write. Line endings are not converted."""
    return path.open("w", encoding="utf-8", newline="")


def read_utf8(path: Path) -> str:
    """Return the contents of a file. Line endings are not converted."""
    return read_regular_file(path).decode("utf-8-sig")


def read_regular_file(path: Path) -> bytes:
    """Return the contents of a file. Reading from a pipe could block forever."""
    if not path.is_file():
        raise InvalidNoteError("has a file that is missing or not a regular file")
    return path.read_bytes()


def create_gold_text(note_id: object, text: object, entities: Iterable[Any], surfaces: Sequence[Any] = ()) -> GoldText:
    """Return a note from a file.

    Args:
        note_id: Id of the note, or ``None``.
        text: Text of the note, or ``None``.
        entities: Entities as for :func:`parse_gold`.
        surfaces: Recorded texts of the entities, or ``None`` for an entity without one.

    Raises:
        InvalidNoteError: If the text or an entity is not valid, or if an entity does not match the text.
    """
    if not isinstance(text, (str, type(None))):
        raise InvalidNoteError("does not have a text")
    spans = []
    for index, entity in enumerate(entities):
        span = parse_span(entity)
        if span is None or (text is not None and span.end > len(text)):
            raise InvalidNoteError(f"has an invalid entity at index {index}")
        surface = surfaces[index] if index < len(surfaces) else None
        if text is not None and surface is not None:
            # Label Studio records a line break as a backslash and "n", brat as a space.
            words = text[span.start : span.end].replace("\\n", " ").split()
            if surface.replace("\\n", " ").split() != words:
                raise InvalidNoteError(f"has a different text at the offsets of entity {index}")
        spans.append(span)
    return GoldText(None if note_id is None else str(note_id), text, tuple(spans))


def import_library(name: str) -> Any:
    """Import an optional library, or raise an error with the command that installs it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        message = f"This format needs {package}."
        raise ConfigurationError(message, f"Install it: python -m pip install {package}.") from error
