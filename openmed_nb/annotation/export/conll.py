"""CoNLL: one token and IOB2 tag per line, and an empty line after each line of a note.

Comments contain the key and the text of each note as JSON, because tokens alone do not determine the offsets. An entity always
starts and ends at the boundary of a token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from ..gold import GoldSpan
from ..inputs import NOTE_COLUMN
from .notes import (
    TRIMMED,
    Export,
    ExportedNote,
    InvalidNoteError,
    RawEntity,
    RawNote,
    Version,
    open_utf8,
    read_key,
    read_utf8,
)

OVERLAPPING = "entities that were omitted because they overlap another entity"

TOKEN_PATTERN = re.compile(r"\w+|[^\w\s]")
KEY_PATTERN = re.compile(rf"# (id|{NOTE_COLUMN}) = (.*)")
TEXT_COMMENT = "# text = "
START_PATTERN = re.compile("-DOCSTART-")
BLANK_PATTERN = re.compile(r"\s*$")

# Columns that Label Studio writes between a token and its tag.
LABEL_STUDIO_COLUMNS = ["-X-", "_"]

# Tags of IOB1, IOB2, BIOES and BILOU. The first group is the position in the entity, the second is the label.
TAG_PATTERN = re.compile(r"O|([BIESLU])-(.+)")
PREFIXES = {*"BIESLUO"}


def write_conll(path: Path, export: Export) -> None:
    """Write notes to a file."""
    with open_utf8(path) as file:
        for note in export:
            ((name, value),) = note.key("id").items()
            file.write(f"# {name} = {json.dumps(value)}\n{TEXT_COMMENT}{json.dumps(note.text)}\n")
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


class Line(NamedTuple):
    """A line of a file.

    Attributes:
        text: The line.
        columns: Columns of a token, or an empty list.
    """

    text: str
    columns: list[str]


def read_conll(path: Path) -> Iterator[RawNote]:
    """Yield the notes of a file.

    Without comments, ``-DOCSTART-`` starts a note. Without these lines, each sentence is a note. The words of a note without a
    text are joined with spaces.
    """
    lines = [_split_line(line) for line in re.split(r"\r\n?|\n", read_utf8(path))]
    rows = [line.columns for line in lines if line.columns]
    word_column, tag_column = _find_columns(rows)
    # Label Studio writes one start for all notes.
    is_label_studio = all(row[1:3] == LABEL_STUDIO_COLUMNS for row in rows)
    if any(KEY_PATTERN.match(line.text) for line in lines):
        start_pattern = KEY_PATTERN
    elif not is_label_studio and any(START_PATTERN.match(line.text) for line in lines):
        start_pattern = START_PATTERN
    else:
        start_pattern = BLANK_PATTERN
    starts = {index for index, line in enumerate(lines) if start_pattern.match(line.text)}
    for start, end in pairwise(sorted({0, *starts, len(lines)})):
        block = lines[start:end]
        if KEY_PATTERN.match(block[0].text) or any(line.columns for line in block):
            yield _parse_note(block, word_column, tag_column)


def _split_line(line: str) -> Line:
    """Return a line with its columns, unless it is a comment or starts a note. The word of a token may be "#"."""
    columns = line.split("\t") if "\t" in line else line.split()
    is_comment = line.startswith("#") and (
        line.startswith(TEXT_COMMENT) or KEY_PATTERN.match(line) or not any(map(TAG_PATTERN.fullmatch, columns))
    )
    return Line(line, [] if is_comment or START_PATTERN.match(line) or not line.strip() else columns)


def _find_columns(rows: Sequence[Sequence[str]]) -> tuple[int, int]:
    """Return the columns of the words and the tags, which are counted from the end. Numbers of tokens are not words."""
    num_columns = min(map(len, rows), default=2)
    tags = [column for column in range(-1, -num_columns, -1) if all(TAG_PATTERN.fullmatch(row[column]) for row in rows)]
    if not tags and all(row[-1] in PREFIXES for row in rows):
        raise InvalidNoteError("has tags without a label", "Add the label to each tag, such as B-DISEASE.")
    if not tags:
        raise InvalidNoteError("has a line without a tag", "Write a column of tags, such as B-DISEASE and O.")
    numbers = [int(row[0]) for row in rows if row[0].isdecimal()]
    has_words = 1 - num_columns not in tags and len(numbers) == len(rows) > 0
    if not has_words or any(number not in {previous + 1, numbers[0]} for previous, number in pairwise(numbers)):
        return 0, tags[0]
    if len(tags) > 1:
        raise InvalidNoteError("has several columns of tags", "Keep one column of tags.")
    return 1, tags[0]


def _parse_note(lines: list[Line], word_column: int, tag_column: int) -> RawNote:
    stated: dict[str, Any] = {}
    texts = []
    for line, _columns in lines:
        if match := KEY_PATTERN.match(line):
            stated[match[1]] = json.loads(match[2])
        elif line.startswith(TEXT_COMMENT):
            texts.append(line.removeprefix(TEXT_COMMENT))
    words = [line.columns[word_column] for line in lines if line.columns]
    tags = [line.columns[tag_column] for line in lines if line.columns]
    if stated:
        texts = [json.loads(text) for text in texts]
    text = texts[0] if texts else " ".join(words)
    return RawNote(text, [Version(_find_entities(text, words, tags))], **read_key(stated, "id"))


def _find_entities(text: str, words: list[str], tags: list[str]) -> list[RawEntity]:
    """Return the entities of a text from the tags of its words."""
    entities: list[RawEntity] = []
    position = 0
    is_open = False
    for word, tag in zip(words, tags, strict=True):
        start = text.find(word, position)
        if start < 0 or text[position:start].strip():
            raise InvalidNoteError("has tokens that do not match its text")
        position = start + len(word)
        match = TAG_PATTERN.fullmatch(tag)
        prefix, label = match.groups() if match else (None, None)
        if is_open and prefix in {"I", "E", "L"} and label == entities[-1].label:
            ((first, _end),) = entities[-1].fragments
            entities[-1] = RawEntity([(first, position)], label)
        elif label:
            entities.append(RawEntity([(start, position)], label))
        is_open = label is not None
    if text[position:].strip():
        raise InvalidNoteError("has text without tokens")
    return entities
