"""Formats of annotations: files of all results, those of annotation tools (brat, CoNLL, doccano and Label Studio), and documents of spaCy."""

from __future__ import annotations

import contextlib
import importlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import quoteattr

from ..._render.display import Report, escape, to_html
from ..._utils.validation import invalid_type
from ..._utils.warning import warn
from ...errors import ConfigurationError
from ..gold import GoldSpan
from ..inputs import NOTE_COLUMN
from ..presentation import note_name
from .notes import (
    OVERLAPPING,
    TRIMMED,
    Export,
    ExportedNote,
    InvalidNoteError,
    OffsetUnit,
    RawEntity,
    RawNote,
    Version,
    create_entities,
    is_surface,
    open_utf8,
    read_key,
    read_records,
    read_utf8,
)

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa
    from spacy import Language
    from spacy.tokens import Doc

    from ..annotated_notes import AnnotatedNotes

INVALID_UNICODE_REMEDY = "Pass other ids, or rename files whose names are not UTF-8."

# Only predictions have a score. In a string, the quotation mark would follow a backslash.
SCORE_PATTERN = re.compile(r'(?<!\\)"score"\s*:')

# Notes outside of the window are not drawn. All colors are system colors, for light and dark color schemes.
PAGE_START = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>
:root {{color-scheme: light dark;}}
body {{background: Canvas; color: CanvasText; font: 16px/1.5 system-ui, sans-serif; max-width: 50rem; margin: 0 auto; padding: 1rem; overflow-wrap: break-word;}}
h1 {{font-size: 1.4rem;}} h2 {{font-size: 1rem; margin: 0 0 0.3rem;}}
article {{border-top: 1px solid #8886; padding: 0.8rem 0; content-visibility: auto; contain-intrinsic-size: auto 8rem;}}
</style></head>
<body><main><h1>{title}</h1>{sentences}
"""
PAGE_END = "</main></body></html>\n"

IDS_FILE = "ids.json"

# Part of an entity in one line. brat reads files with all line breaks of ``str.splitlines``.
LINE_PATTERN = re.compile(r"[^\n\r\v\f\x1c-\x1e\x85\u2028\u2029]+")

# Text-bound annotation of brat: id, label, fragments and text. Offsets of more than 12 digits are not valid.
ENTITY_PATTERN = re.compile(r"T\S*\t(\S+) (\d{1,12} \d{1,12}(?:;\d{1,12} \d{1,12})*)(?:\t(.*))?", re.ASCII)

TOKEN_PATTERN = re.compile(r"\w+|[^\w\s]")
KEY_PATTERN = re.compile(rf"# (id|{NOTE_COLUMN}) = (.*)")
TEXT_COMMENT = "# text = "
GAP_PATTERN = re.compile(r"\s*$|-DOCSTART-")

# Tags of IOB1, IOB2, BIOES and BILOU. The first group is the position in the entity, the second is the label.
TAG_PATTERN = re.compile(r"O|([BIESLU])-(.+)")

# Span group with the entities that overlap an entity in ``doc.ents``.
SPAN_GROUP = "openmed"


def import_library(name: str) -> Any:
    """Import an optional library, or raise an error with the command that installs it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise ConfigurationError(
            f"This format needs {package}.", f"Install it: python -m pip install {package}."
        ) from error


def save_jsonl(path: Path, found: AnnotatedNotes) -> None:
    """Write one JSON object per note with its key, text and entities, and its error or ``missing``."""
    with open_utf8(path) as file:
        for record in found.iter_records():
            file.write(f"{json.dumps(record, ensure_ascii=False)}\n")


def save_csv(path: Path, found: AnnotatedNotes) -> None:
    """Write one row per entity, without the texts of the notes."""
    # The csv module quotes the characters of the line terminator only, and words may contain both.
    found.to_frame_with_ids().to_csv(path, index=False, lineterminator="\r\n", encoding="utf-8")


def to_arrow(frame: pd.DataFrame) -> pa.Table:
    """Return a DataFrame as an Arrow table. Ids of various types, which are in the second column, become strings."""
    name = frame.columns[1]
    with contextlib.suppress(UnicodeEncodeError):
        if frame[name].dtype == object:
            frame = frame.assign(**{name: frame[name].map(str, na_action="ignore")})
        return import_library("pyarrow").Table.from_pandas(frame, preserve_index=False)
    raise ConfigurationError("An id or a label is not valid Unicode.", INVALID_UNICODE_REMEDY)


def save_parquet(path: Path, found: AnnotatedNotes) -> None:
    """Write one row per entity, without the texts of the notes."""
    import_library("pyarrow.parquet").write_table(to_arrow(found.to_frame_with_ids()), path)


def save_html(path: Path, found: AnnotatedNotes) -> None:
    """Write a page with all notes and their marked entities, without scripts and network access."""
    summary = found.summary().to_report()
    sentences = "".join(f"<p>{escape(sentence)}</p>" for sentence in summary.sentences)
    with open_utf8(path) as file:
        file.write(PAGE_START.format(title=escape(summary.title), sentences=sentences))
        for index, text in enumerate(found.iter_note_texts()):
            segments = found.note_segments(index, text, found.results[index], None)
            note = to_html(Report("", segments=tuple(segments)))
            file.write(f"<article><h2>Note {escape(note_name(index, found.ids))}</h2>{note}</article>\n")
        file.write(PAGE_END)


def read_json(path: Path) -> Iterator[RawNote]:
    """Read one JSON object per note with its key, text and entities, also of doccano or Label Studio."""
    text = read_utf8(path)
    is_predicted = SCORE_PATTERN.search(text) is not None
    return (_parse_record(record, is_predicted) for record in read_records(text))


def _parse_record(record: Mapping[str, Any], is_predicted: bool) -> RawNote:
    """Return a note of the tool whose keys the record has."""
    if "data" in record:
        return _parse_task(record)
    if "label" in record:
        version = Version(create_entities(record["label"]))
        return RawNote(record["text"], [version], **read_key(record), units=("UTF-16 code units",))
    if "error" in record or record.get("missing"):
        return RawNote(None, [], **read_key(record, "id"))
    if "entities" in record:
        version = Version(create_entities(record["entities"]), is_prediction=is_predicted)
        return RawNote(record.get("text"), [version], **read_key(record, "id"))
    raise InvalidNoteError(
        "has none of the keys 'entities', 'label' and 'data'", "Pass a file that one of the supported tools exported."
    )


def _parse_task(task: Mapping[str, Any]) -> RawNote:
    """Return a note of Label Studio. Predictions are versions of a task that has no annotations."""
    data = task["data"]
    if "text" not in data:
        raise InvalidNoteError("does not have a text", "Rename the key of the text to 'text'.")
    annotations = task.get("annotations") or []
    versions = []
    for item in annotations or task.get("predictions") or []:
        if not item.get("was_cancelled"):
            entities = _parse_regions(region["value"] for region in item["result"] if "value" in region)
            annotator = item.get("completed_by", item.get("model_version"))
            names = [annotator.get("id"), annotator.get("email")] if isinstance(annotator, Mapping) else [annotator]
            versions.append(Version(entities, tuple(names), is_prediction=not annotations))
    # The text of a web page has no carriage returns.
    units: tuple[OffsetUnit, ...] = ("characters", "characters with joined line ends")
    return RawNote(data["text"], versions, **read_key(data), units=units)


def _parse_regions(values: Iterable[Mapping[str, Any]]) -> list[RawEntity]:
    """Return the entities of the values of regions. Other regions than those with labels are ignored."""
    entities = []
    surfaces = []
    for value in values:
        labels: Any = next((value[key] for key in value if key.endswith("labels")), [])
        if not isinstance(labels, list):
            raise InvalidNoteError("has an entity without a list of labels")
        entities += [(value.get("start"), value.get("end"), label) for label in labels]
        surfaces += [value.get("text")] * len(labels)
    return create_entities(entities, surfaces)


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
    # Hidden files, such as those of macOS, are not notes.
    names = sorted({path.stem for path in folder.glob("[!.]*") if path.suffix in {".txt", ".ann"}})
    has_ids = (folder / IDS_FILE).exists()
    if not (names or has_ids):
        raise ConfigurationError("The folder does not have .txt files of brat.", "Pass the folder with these files.")
    keys = json.loads(read_utf8(folder / IDS_FILE)) if has_ids else {}
    for name in names:
        text = read_utf8(folder / f"{name}.txt", "utf-8")  # A byte order mark is part of the text.
        # brat creates the .ann file when an annotator opens the note.
        file = folder / f"{name}.ann"
        versions = [Version(_parse_standoff(read_utf8(file), text))] if file.exists() else []
        yield RawNote(text, versions, **read_key(keys.get(name, {"note_id": name})))


def _parse_standoff(contents: str, text: str) -> list[RawEntity]:
    """Return the entities of a standoff file. Each part of a discontinuous entity is an entity."""
    entities: list[RawEntity] = []
    for line in contents.split("\n"):
        if not line.startswith("T"):
            continue
        match = ENTITY_PATTERN.fullmatch(line.rstrip("\r"))
        if match is None:
            raise InvalidNoteError("has an invalid line")
        parts: list[RawEntity] = []
        for fragment in match[2].split(";"):
            start, end = map(int, fragment.split())
            if parts and text[parts[-1].end : start].isspace():
                parts[-1] = parts[-1]._replace(end=end)
            else:
                parts.append(RawEntity(start, end, match[1]))
        if match[3] is not None and not is_surface(match[3], " ".join(text[part.start : part.end] for part in parts)):
            raise InvalidNoteError(f"has a different text at the offsets of entity {len(entities)}")
        entities += parts
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

    A comment with a key starts a note. Without such lines, each sentence is a note. The words of a note without a text are joined with
    spaces.
    """
    lines = re.split(r"\r\n?|\n", read_utf8(path))
    start_pattern = KEY_PATTERN if any(map(KEY_PATTERN.match, lines)) else GAP_PATTERN
    starts = [index for index, line in enumerate(lines) if start_pattern.match(line)]
    for start, end in pairwise(sorted({0, *starts, len(lines)})):
        note = _parse_sentence(lines[start:end])
        if note is not None:
            yield note


def _parse_sentence(lines: list[str]) -> RawNote | None:
    """Return the note in some lines, or ``None`` if they have neither a key nor a token."""
    stated: dict[str, Any] = {}
    text = None
    words = []
    tags = []
    for line in lines:
        columns = line.split()
        if match := KEY_PATTERN.match(line):
            stated[match[1]] = json.loads(match[2])
        elif line.startswith(TEXT_COMMENT):
            text = json.loads(line.removeprefix(TEXT_COMMENT)) if stated else None
        elif GAP_PATTERN.match(line):
            continue
        elif tag := TAG_PATTERN.fullmatch(columns[-1]):
            words.append(columns[0])
            tags.append(tag)
        elif not line.startswith("#"):
            raise InvalidNoteError("has a line without a tag", "Write a column of tags, such as B-DISEASE and O.")
    if not (stated or words):
        return None
    if text is None:
        text = " ".join(words)
    return RawNote(text, [Version(_find_entities(text, words, tags))], **read_key(stated, "id"))


def _find_entities(text: str, words: list[str], tags: list[re.Match[str]]) -> list[RawEntity]:
    """Return the entities of a text from the tags of its words."""
    entities: list[RawEntity] = []
    position = 0
    open_label = None
    for word, tag in zip(words, tags, strict=True):
        start = text.find(word, position)
        if start < 0 or text[position:start].strip():
            raise InvalidNoteError("has tokens that do not match its text")
        position = start + len(word)
        prefix, label = tag.groups()
        if label and label == open_label and prefix in {"I", "E", "L"}:
            entities[-1] = entities[-1]._replace(end=position)
        elif label:
            entities.append(RawEntity(start, position, label))
        open_label = label
    if text[position:].strip():
        raise InvalidNoteError("has text without tokens")
    return entities


def iter_docs(nlp: Language, notes: Iterable[ExportedNote | None]) -> Iterator[Doc]:
    """Yield a document for each note with a text, then warn about entities that they do not contain.

    ``doc.user_data`` has the ``id`` of the note, or its position as ``note_index``.
    """
    if not hasattr(nlp, "make_doc"):
        raise invalid_type("nlp", nlp, "Pass a spaCy pipeline, such as spacy.blank('en').")
    filter_spans = import_library("spacy.util").filter_spans
    num_omitted = 0
    for note in notes:
        if note is None:
            continue
        doc = nlp.make_doc(note.text)
        aligned = [doc.char_span(*span) for span in note.spans if span.label]
        spans = [span for span in aligned if span is not None]
        num_omitted += len(note.spans) - len(spans)
        entities = filter_spans(spans)
        doc.set_ents(entities)
        in_entities = {*entities}
        overlapping = [span for span in spans if span not in in_entities]
        if overlapping:
            doc.spans[SPAN_GROUP] = overlapping
        doc.user_data.update(note.key("id"))
        yield doc
    if num_omitted:
        warn(
            f"{num_omitted:,} entities without a label, or that do not start and end at the boundaries of spaCy's tokens, "
            "which were omitted."
        )
