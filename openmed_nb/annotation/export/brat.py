"""brat: a folder with a text file and a standoff file per note (https://brat.nlplab.org/standoff.html).

Files are numbered, because a key may not be a valid file name; ``ids.json`` contains the key of each file. ``annotation.conf`` declares the labels. brat splits an entity
that contains a line break into one fragment per line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...errors import ConfigurationError
from .notes import (
    CHARACTERS,
    TRIMMED,
    Export,
    InvalidNoteError,
    RawEntity,
    RawNote,
    Unit,
    Version,
    open_utf8,
    read_key,
    read_regular_file,
    read_utf8,
)

IDS_FILE = "ids.json"

UNITS = (CHARACTERS, Unit(omits_mark=True), Unit(joins_line_ends=True))

# Part of an entity in one line. brat reads files with all line breaks of ``str.splitlines``.
LINE_PATTERN = re.compile(r"[^\n\r\v\f\x1c-\x1e\x85\u2028\u2029]+")

# Text-bound annotation: id, label, fragments and text. Offsets of more than 12 digits are not valid.
ENTITY_PATTERN = re.compile(r"T\S*\t(\S+) (\d{1,12} \d{1,12}(?:;\d{1,12} \d{1,12})*)(?:\t(.*))?", re.ASCII)


def write_brat(folder: Path, export: Export) -> None:
    """Write notes to a folder."""
    folder.mkdir()
    ids: dict[str, dict[str, Any]] = {}
    labels: set[str] = set()
    for note in export:
        name = f"{len(ids):06}"
        ids[name] = note.key()
        with open_utf8(folder / f"{name}.txt") as file:
            file.write(note.text)
        with open_utf8(folder / f"{name}.ann") as file:
            for number, span in enumerate(note.spans, 1):
                label = export.sanitize_label(span.label)
                labels.add(label)
                fragments = [match.span() for match in LINE_PATTERN.finditer(note.text, span.start, span.end)]
                if not fragments or span[:2] != (fragments[0][0], fragments[-1][1]):
                    export.losses[TRIMMED] += 1
                if fragments:
                    offsets = ";".join(f"{start} {end}" for start, end in fragments)
                    surface = " ".join(note.text[start:end] for start, end in fragments)
                    file.write(f"T{number}\t{label} {offsets}\t{surface}\n")
    with open_utf8(folder / IDS_FILE) as file:
        json.dump(ids, file)
    with open_utf8(folder / "annotation.conf") as file:
        file.write("\n".join(["[entities]", *sorted(labels), "[relations]", "[events]", "[attributes]", ""]))


def read_brat(folder: Path) -> Iterator[RawNote]:
    """Yield the notes of a folder in the order of their file names. Other annotations than entities are ignored."""
    if any(folder.glob("[!.]*/**/*.ann")):
        raise ConfigurationError("The folder has annotations of brat in folders.", "Pass one of these folders.")
    # Hidden files, such as those of macOS, are not notes.
    texts = {path.stem: path for path in sorted(folder.glob("[!.]*.txt"))}
    annotations = {path.stem: path for path in folder.glob("[!.]*.ann")}
    if num_unpaired := len(annotations.keys() - texts.keys()):
        message = f"The folder of brat has {num_unpaired:,} .ann files without a .txt file."
        raise ConfigurationError(message, "Add the text file of each .ann file.")
    if not texts and not (folder / IDS_FILE).exists():
        raise ConfigurationError("The folder does not have .txt files of brat.", "Pass the folder with these files.")
    keys = json.loads(read_utf8(folder / IDS_FILE)) if (folder / IDS_FILE).exists() else {}
    for name, path in texts.items():
        text = read_regular_file(path).decode()  # A byte order mark is part of the text.
        # brat creates the .ann file when an annotator opens the note.
        versions = [Version(_parse_entities(read_utf8(annotations[name])))] if name in annotations else []
        yield RawNote(text, versions, **read_key(keys.get(name, {"note_id": name})), units=UNITS)


def _parse_entities(contents: str) -> list[RawEntity]:
    entities = []
    for line in contents.split("\n"):
        if not line.startswith("T"):
            continue
        match = ENTITY_PATTERN.fullmatch(line.rstrip("\r"))
        if match is None:
            raise InvalidNoteError("has an invalid line")
        fragments = [(int(start), int(end)) for start, end in map(str.split, match[2].split(";"))]
        entities.append(RawEntity(fragments, match[1], match[3]))
    return entities
