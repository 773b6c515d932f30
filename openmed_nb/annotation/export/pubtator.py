"""PubTator: title, abstract and one line per entity (https://www.ncbi.nlm.nih.gov/research/pubtator3/tutorial).

The text of a note is its title and its abstract, with a line feed between them, which counts as one character.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from .notes import CHARACTERS, UTF16_UNITS, InvalidNoteError, RawEntity, RawNote, Version, read_utf8

PASSAGE_PATTERN = re.compile(r"([^|\s]+)\|[ta]\|(.*)")

# Number, start, end, text and label.
ENTITY_PATTERN = re.compile(r"[^\t]+\t(\d{1,12})\t(\d{1,12})\t([^\t]*)\t([^\t]+)(?:\t.*)?", re.ASCII)

RELATION_PATTERN = re.compile(r"[^\t]+\t[A-Za-z][^\t]*\t.+")


def read_pubtator(path: Path) -> Iterator[RawNote]:
    """Yield the notes of a file. Relations are ignored."""
    for block in re.split(r"\n\s*\n", read_utf8(path).replace("\r\n", "\n").strip()):
        passages: list[re.Match[str]] = []
        entities = []
        for line in block.split("\n"):
            # All lines of a note start with its id.
            is_same = not passages or re.split(r"[|\t]", line)[0] == passages[0][1]
            if is_same and (match := PASSAGE_PATTERN.fullmatch(line)):
                passages.append(match)
            elif is_same and (match := ENTITY_PATTERN.fullmatch(line)):
                entities.append(RawEntity([(int(match[1]), int(match[2]))], match[4], match[3]))
            elif not RELATION_PATTERN.fullmatch(line):
                raise InvalidNoteError("has an invalid line")
        if not passages:
            raise InvalidNoteError("does not have a title", "Write the line of the title before those of the entities.")
        text = "\n".join(passage[2] for passage in passages)
        yield RawNote(text, [Version(entities)], passages[0][1], units=(CHARACTERS, UTF16_UNITS))
