"""CoNLL: one token and IOB2 tag per line, and an empty line after each line of a note.

Comments contain the id and the text of each note as JSON, because tokens alone do not determine the offsets. An entity always
starts and ends at the boundary of a token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from ..gold import GoldSpan, GoldText
from .notes import TRIMMED, Export, ExportedNote, InvalidNoteError, create_gold_text, open_utf8, read_utf8

OVERLAPPING = "entities that were omitted because they overlap another entity"

TOKEN_PATTERN = re.compile(r"\w+|[^\w\s]")
ID_COMMENT = "# id = "
TEXT_COMMENT = "# text = "
DOCUMENT_START = "-DOCSTART-"

# Tags of IOB1, IOB2, BIOES and BILOU. The first group is the position in the entity, the second is the label.
TAG_PATTERN = re.compile(r"O|([BIESLU])-(.+)")


def write_conll(path: Path, export: Export) -> None:
    """Write notes to a file."""
    with open_utf8(path) as file:
        for note in export:
            file.write(f"{ID_COMMENT}{json.dumps(note.id)}\n{TEXT_COMMENT}{json.dumps(note.text)}\n")
            position = 0
            for start, end, tag in _tag_tokens(note, export):
                if "\n" in note.text[position:start] and not tag.startswith("I-"):
                    file.write("\n")
                file.write(f"{note.text[start:end]}\t{tag}\n")
                position = end
            file.write("\n")


def _tag_tokens(note: ExportedNote, export: Export) -> Iterator[tuple[int, int, str]]:
    """Yield the start, end and tag of each token."""
    position = 0
    end_of_text = GoldSpan(len(note.text), len(note.text), "")
    for span in (*sorted(note.spans, key=lambda span: (span.start, -span.end)), end_of_text):
        if span.start < position:
            export.losses[OVERLAPPING] += 1
            continue
        for match in TOKEN_PATTERN.finditer(note.text, position, span.start):
            yield *match.span(), "O"
        tokens = [match.span() for match in TOKEN_PATTERN.finditer(note.text, span.start, span.end)]
        if span is not end_of_text:
            if not tokens or span[:2] != (tokens[0][0], tokens[-1][1]):
                export.losses[TRIMMED] += 1
            label = export.sanitize_label(span.label)
        for index, (start, end) in enumerate(tokens):
            yield start, end, f"{'I' if index else 'B'}-{label}"
        position = span.end


def read_conll(path: Path) -> Iterator[GoldText]:
    """Yield the notes of a file.

    Without comments, ``-DOCSTART-`` starts a note. Without these lines, each sentence is a note. The words of a note without a
    text are joined with spaces.
    """
    lines = [line.rstrip("\r") for line in read_utf8(path).split("\n")]
    note_markers = tuple(
        marker for marker in (ID_COMMENT, DOCUMENT_START) if any(line.startswith(marker) for line in lines)
    )
    block: list[str] = []
    for line in (*lines, *note_markers[:1], ""):
        if (line.startswith(note_markers[0]) if note_markers else not line.strip()) and any(map(str.strip, block)):
            yield _parse_note(block)
            block = []
        block.append(line)


def _parse_note(lines: list[str]) -> GoldText:
    note_id = None
    text = None
    words = []
    tags = []
    for line in lines:
        columns = line.split("\t") if "\t" in line else line.split()
        if line.startswith(ID_COMMENT):
            note_id = json.loads(line.removeprefix(ID_COMMENT))
        elif line.startswith(TEXT_COMMENT):
            text = json.loads(line.removeprefix(TEXT_COMMENT))
        elif columns and TAG_PATTERN.fullmatch(columns[-1]) and not line.startswith(DOCUMENT_START):
            words.append(columns[0])
            tags.append(columns[-1])
        elif columns and not line.startswith(("#", DOCUMENT_START)):
            raise InvalidNoteError("has a line without a tag")
    text = " ".join(words) if text is None else text
    return create_gold_text(note_id, text, _find_entities(text, words, tags))


def _find_entities(text: str, words: list[str], tags: list[str]) -> list[tuple[int, int, str]]:
    """Return the entities of a text from the tags of its words."""
    entities: list[tuple[int, int, str]] = []
    position = 0
    is_open = False
    for word, tag in zip(words, tags, strict=True):
        start = text.find(word, position)
        if start < 0 or text[position:start].strip():
            raise InvalidNoteError("has tokens that do not match its text")
        position = start + len(word)
        match = TAG_PATTERN.fullmatch(tag)
        prefix, label = match.groups() if match else (None, None)
        if is_open and prefix in {"I", "E", "L"} and label == entities[-1][2]:
            entities[-1] = (entities[-1][0], position, label)
        elif label:
            entities.append((start, position, label))
        is_open = label is not None
    if text[position:].strip():
        raise InvalidNoteError("has text without tokens")
    return entities
