"""Formats of annotation tools: brat, CoNLL, doccano and Label Studio."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any
from xml.sax.saxutils import quoteattr

from ...errors import ConfigurationError
from ..gold import GoldSpan
from ..inputs import NOTE_COLUMN
from .notes import (
    TRIMMED,
    Export,
    ExportedNote,
    InvalidNoteError,
    RawEntity,
    RawNote,
    Unit,
    Version,
    create_entities,
    open_utf8,
    read_key,
    read_records,
    read_utf8,
)

IDS_FILE = "ids.json"

# Part of an entity in one line. brat reads files with all line breaks of ``str.splitlines``.
LINE_PATTERN = re.compile(r"[^\n\r\v\f\x1c-\x1e\x85\u2028\u2029]+")

# Text-bound annotation of brat: id, label, fragments and text. Offsets of more than 12 digits are not valid.
ENTITY_PATTERN = re.compile(r"T\S*\t(\S+) (\d{1,12} \d{1,12}(?:;\d{1,12} \d{1,12})*)(?:\t(.*))?", re.ASCII)

OVERLAPPING = "entities that were omitted because they overlap another entity"

TOKEN_PATTERN = re.compile(r"\w+|[^\w\s]")
KEY_PATTERN = re.compile(rf"# (id|{NOTE_COLUMN}) = (.*)")
TEXT_COMMENT = "# text = "
START_PATTERN = re.compile("-DOCSTART-")
BLANK_PATTERN = re.compile(r"\s*$")

# Tags of IOB1, IOB2, BIOES and BILOU. The first group is the position in the entity, the second is the label.
TAG_PATTERN = re.compile(r"O|([BIESLU])-(.+)")


def write_brat(folder: Path, export: Export) -> None:
    """Write a text file and a standoff file per note (https://brat.nlplab.org/standoff.html).

    Files are numbered, because a key may not be a valid file name; ``ids.json`` contains the key of each file. ``annotation.conf``
    declares the labels. brat splits an entity that contains a line break into one fragment per line.
    """
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
    """Read a folder with a text file and a standoff file per note (https://brat.nlplab.org/standoff.html).

    Notes have the order of their file names. Other annotations than entities are ignored.
    """
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
        text = read_utf8(path, "utf-8")  # A byte order mark is part of the text.
        # brat creates the .ann file when an annotator opens the note.
        versions = [Version(_parse_entities(read_utf8(annotations[name])))] if name in annotations else []
        yield RawNote(text, versions, **read_key(keys.get(name, {"note_id": name})))


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


def write_conll(path: Path, export: Export) -> None:
    """Write one token and IOB2 tag per line, and an empty line after each line of a note.

    Comments contain the key and the text of each note as JSON, because tokens alone do not determine the offsets. An entity always
    starts and ends at the boundary of a token.
    """
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


def read_conll(path: Path) -> Iterator[RawNote]:
    """Read one token and tag per line: the first and the last column, with IOB, BIOES or BILOU tags.

    A comment with a key or ``-DOCSTART-`` starts a note. Without such lines, each sentence is a note. The words of a note without
    a text are joined with spaces.
    """
    lines = re.split(r"\r\n?|\n", read_utf8(path))
    patterns = (KEY_PATTERN, START_PATTERN, BLANK_PATTERN)
    start_pattern = next(pattern for pattern in patterns if pattern is BLANK_PATTERN or any(map(pattern.match, lines)))
    starts = [index for index, line in enumerate(lines) if start_pattern.match(line)]
    for start, end in pairwise(sorted({0, *starts, len(lines)})):
        note = _parse_block(lines[start:end])
        if note is not None:
            yield note


def _parse_block(lines: list[str]) -> RawNote | None:
    """Return the note in some lines, or ``None`` if they have neither a key nor a token."""
    stated: dict[str, Any] = {}
    texts = []
    words = []
    tags = []
    for line in lines:
        columns = line.split("\t") if "\t" in line else line.split()
        if match := KEY_PATTERN.match(line):
            stated[match[1]] = json.loads(match[2])
        elif line.startswith(TEXT_COMMENT):
            texts.append(line.removeprefix(TEXT_COMMENT))
        elif not line.strip() or START_PATTERN.match(line):
            continue
        elif TAG_PATTERN.fullmatch(columns[-1]):
            words.append(columns[0])
            tags.append(columns[-1])
        elif not line.startswith("#"):
            raise InvalidNoteError("has a line without a tag", "Write a column of tags, such as B-DISEASE and O.")
    if not (stated or words):
        return None
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


def write_doccano(path: Path, export: Export) -> None:
    """Write one JSON object with ``text`` and ``label`` per line, with offsets in UTF-16 code units.

    doccano counts these units (https://github.com/doccano/doccano/issues/2290), unless a project counts grapheme clusters, which is
    not supported. The key of a note is in ``note_id``, because doccano exports its own ``id``.
    """
    with open_utf8(path) as file:
        for note in export:
            units = [0, *accumulate(2 if character > "\uffff" else 1 for character in note.text)]
            labels = [[units[span.start], units[span.end], span.label] for span in note.spans]
            record = {"text": note.text, "label": labels, **note.key()}
            file.write(f"{json.dumps(record, ensure_ascii=False)}\n")


def read_doccano(path: Path) -> Iterator[RawNote]:
    """Read one JSON object with ``text`` and ``label`` per line, with offsets in UTF-16 code units."""
    return map(parse_doccano, read_records(path))


def parse_doccano(record: Mapping[str, Any]) -> RawNote:
    """Return a note of doccano, also of a project with relations."""
    labels = record.get("label")
    if labels is None:
        labels = [(entity["start_offset"], entity["end_offset"], entity["label"]) for entity in record["entities"]]
    return RawNote(record["text"], [Version(create_entities(labels))], **read_key(record), units=("UTF-16 code units",))


def write_label_studio(path: Path, export: Export) -> str:
    """Write a JSON list of tasks (https://labelstud.io/guide/task_format), with the entities as predictions.

    Offsets are in code points (https://github.com/HumanSignal/label-studio-frontend/pull/308). The key of a note is in ``note_id``.

    Returns:
        The labeling configuration of the project.
    """
    tasks: list[dict[str, object]] = []
    for note in export:
        result: list[dict[str, object]] = []
        for span, score in zip(note.spans, note.scores, strict=True):
            surface = note.text[span.start : span.end]
            value = {"start": span.start, "end": span.end, "text": surface, "labels": [span.label]}
            names = {"id": str(len(result)), "from_name": "label", "to_name": "text", "type": "labels"}
            result.append({**names, "value": value, "score": score})
        prediction = {"model_version": export.model, "score": min(note.scores, default=0.0), "result": result}
        tasks.append({"data": {"text": note.text, **note.key()}, "predictions": [prediction]})
    with open_utf8(path) as file:
        json.dump(tasks, file, ensure_ascii=False)
    labels = "".join(f"<Label value={quoteattr(label)}/>" for label in sorted(export.labels))
    return f'<View><Labels name="label" toName="text">{labels}</Labels><Text name="text" value="$text"/></View>'


def read_label_studio(path: Path) -> Iterator[RawNote]:
    """Read a JSON list of tasks (https://labelstud.io/guide/task_format)."""
    return map(parse_task, read_records(path))


def parse_task(task: Mapping[str, Any]) -> RawNote:
    """Return a note of Label Studio. Predictions are versions of a task that has no annotations."""
    if "data" not in task:
        raise InvalidNoteError("does not have the key 'data'", "Export the tasks in the format JSON.")
    annotations = task.get("annotations") or []
    versions = []
    for item in annotations or task.get("predictions") or []:
        if not item.get("was_cancelled"):
            entities = _parse_values(region["value"] for region in item["result"] if "value" in region)
            annotator = item.get("completed_by", item.get("model_version"))
            names = [annotator.get("id"), annotator.get("email")] if isinstance(annotator, Mapping) else [annotator]
            annotators = tuple(name for name in names if name is not None)
            versions.append(
                Version(entities, annotators, bool(item.get("ground_truth")), is_prediction=not annotations)
            )
    # The text of a web page has no carriage returns.
    units: tuple[Unit, ...] = ("characters", "characters with joined line ends")
    return RawNote(_find_text(task["data"]), versions, **read_key(task["data"]), units=units)


def _find_text(data: Mapping[str, Any]) -> str:
    """Return the value of ``text``, or the only string."""
    strings = {key: value for key, value in data.items() if isinstance(value, str) and key != "note_id"}
    if "text" in strings or len(strings) == 1:
        return strings.get("text") or next(iter(strings.values()))
    raise InvalidNoteError("does not have a text", "Rename the key of the text to 'text'.")


def _parse_values(values: Iterable[Mapping[str, Any]]) -> list[RawEntity]:
    """Return the entities of the values of regions. Other regions than spans of text are ignored."""
    entities = []
    surfaces = []
    for value in values:
        key = next((key for key in value if key.endswith("labels")), None)
        labels = [] if key is None else value[key]
        if not isinstance(labels, list):
            raise InvalidNoteError("has an entity without a list of labels")
        if key == "paragraphlabels" or "startOffset" in value:
            problem = "is a dialogue or HTML, whose offsets are not those of a text"
            raise InvalidNoteError(problem, "Label a plain text.")
        entities += [(value["start"], value["end"], label) for label in labels]
        surfaces += [value.get("text")] * len(labels)
    return create_entities(entities, surfaces)
