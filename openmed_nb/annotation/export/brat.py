"""brat: a folder with a text file and a standoff file per note (https://brat.nlplab.org/standoff.html).

Files are numbered, because a key may not be a valid file name; ``ids.json`` contains the key of each file. ``annotation.conf`` declares the labels. brat splits an entity
that contains a line break into one fragment per line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from ..._utils.warning import warn
from ..gold import GoldText
from .notes import TRIMMED, Export, InvalidNoteError, create_gold_text, open_utf8, read_regular_file, read_utf8

IDS_FILE = "ids.json"

# Part of an entity in one line. brat reads files with all line breaks of ``str.splitlines``.
LINE_PATTERN = re.compile(r"[^\n\r\v\f\x1c-\x1e\x85\u2028\u2029]+")

# Text-bound annotation: id, label, fragments and text. Offsets of more than 12 digits are not valid.
ENTITY_PATTERN = re.compile(r"T\S*\t(\S+) (\d{1,12} \d{1,12}(?:;\d{1,12} \d{1,12})*)(?:\t(.*))?", re.ASCII)


def write_brat(folder: Path, export: Export) -> None:
    """Write notes to a folder."""
    folder.mkdir()
    ids: dict[str, str | int] = {}
    labels: set[str] = set()
    for note in export:
        name = f"{len(ids):06}"
        ids[name] = note.id
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


def read_brat(folder: Path) -> Iterator[GoldText]:
    """Yield the notes of a folder in the order of their file names. Other annotations than entities are ignored."""
    ids = json.loads(read_utf8(folder / IDS_FILE)) if (folder / IDS_FILE).exists() else {}
    num_discontinuous = 0
    for path in sorted(folder.glob("*.txt")):
        text = read_regular_file(path).decode()  # A byte order mark is part of the text.
        annotations = path.with_suffix(".ann")
        entities = []
        surfaces = []
        for line in read_utf8(annotations).split("\n") if annotations.exists() else ():
            if not line.startswith("T"):
                continue
            match = ENTITY_PATTERN.fullmatch(line.rstrip("\r"))
            if match is None:
                raise InvalidNoteError("has an invalid line")
            fragments = [tuple(map(int, fragment.split())) for fragment in match[2].split(";")]
            joined = [fragments[0]]
            for start, end in fragments[1:]:
                if text[joined[-1][1] : start].isspace():
                    joined[-1] = (joined[-1][0], end)
                else:
                    joined.append((start, end))
            if len(joined) > 1:
                num_discontinuous += 1
            entities += [(start, end, match[1]) for start, end in joined]
            surfaces += [match[3] if len(joined) == 1 else None] * len(joined)
        yield create_gold_text(ids.get(path.stem, path.stem), text, entities, surfaces)
    if num_discontinuous:
        warn(f"{num_discontinuous:,} discontinuous entities were read as one entity per part.")
