"""Label Studio: a JSON list of tasks (https://labelstud.io/guide/task_format).

Offsets are in code points (https://github.com/HumanSignal/label-studio-frontend/pull/308). Files of other versions count UTF-16
units, and a line end of Windows as one character. The key of a note is in ``note_id``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from xml.sax.saxutils import quoteattr

from .notes import (
    CHARACTERS,
    UTF16_UNITS,
    Export,
    InvalidNoteError,
    RawEntity,
    RawNote,
    Unit,
    Version,
    create_entities,
    open_utf8,
    read_key,
    read_records,
)

PREDICTIONS_NOTICE = "The entities are predictions until an annotator submits them in Label Studio. nb.read_annotations(path) reads submitted ones only."

UNITS = (
    CHARACTERS,
    UTF16_UNITS,
    Unit(joins_line_ends=True),
    Unit(is_utf16=True, joins_line_ends=True),
)
TASK_KEYS = {"data", "completions", "annotation_id", "lead_time"}
HTML_PATTERN = re.compile(r"<[a-zA-Z/!]|&#?\w+;")

# Strings of JSON_MIN that are not the text.
METADATA = {"id", "note_id", "annotator", "created_at", "updated_at"}


def write_label_studio(path: Path, export: Export) -> str:
    """Write notes to a file, with their entities as predictions. Return the labeling configuration of the project."""
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
    export.notices.append(PREDICTIONS_NOTICE)
    with open_utf8(path) as file:
        json.dump(tasks, file, ensure_ascii=False)
    labels = "".join(f"<Label value={quoteattr(label)}/>" for label in sorted(export.labels))
    return f'<View><Labels name="label" toName="text">{labels}</Labels><Text name="text" value="$text"/></View>'


def read_label_studio(path: Path) -> Iterator[RawNote]:
    """Yield the notes of a file in the format JSON or JSON_MIN."""
    return map(parse_task, read_records(path))


def is_task(record: Mapping[str, Any]) -> bool:
    """Return whether a record is a task of Label Studio."""
    return not TASK_KEYS.isdisjoint(record) or any(True for _ in _iter_values(record))


def _iter_values(record: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the values of the regions of a record of JSON_MIN, which are in lists under the names of the controls."""
    for values in record.values():
        for value in values if isinstance(values, list) else ():
            if isinstance(value, Mapping) and any(key.endswith("labels") for key in value):
                yield value


def parse_task(task: Mapping[str, Any]) -> RawNote:
    """Return a note. Predictions are versions of a task that has no annotations."""
    if not is_task(task):
        raise InvalidNoteError("does not have the key 'data'", "Pass a file in the format JSON or JSON_MIN.")
    if "data" not in task:
        annotation = {
            "result": [{"value": value} for value in _iter_values(task)],
            "completed_by": task.get("annotator"),
        }
        # A task without annotations has a record without a number.
        is_annotated = task.get("annotation_id", 0) is not None
        task = {"id": task.get("id"), "data": task, "annotations": [annotation] if is_annotated else []}
    annotations = task.get("annotations") or task.get("completions") or []
    predictions = [] if annotations else task.get("predictions") or []
    items = [item for item in (*annotations, *predictions) if not (item.get("was_cancelled") or item.get("skipped"))]
    regions: list[Mapping[str, Any]] = [region for item in items for region in item["result"] or ()]
    sources = [(region.get("source") or "").removeprefix("$") for region in regions]
    names = [*sources, *(region.get("to_name") for region in regions)]
    text = _find_text(task["data"], names)
    key = None if task.get("id") is None else (task["id"], text)
    versions = []
    for item in items:
        entities = _parse_values((region["value"] for region in item["result"] or () if "value" in region), text)
        annotators = _list_names(item.get("completed_by", item.get("model_version")))
        versions.append(Version(entities, annotators, bool(item.get("ground_truth")), is_prediction=not annotations))
    return RawNote(text, versions, **read_key(task["data"]), key=key, units=UNITS)


def _list_names(annotator: Any) -> tuple[Any, ...]:
    """Return the number, name and mail of an annotator."""
    names = [annotator.get("id"), annotator.get("email")] if isinstance(annotator, Mapping) else [annotator]
    return tuple(name for name in names if name is not None)


def _find_text(data: Mapping[str, Any], names: Iterable[str | None]) -> str:
    """Return the value that one of the names or ``text`` selects, or the only string."""
    strings = {key: value for key, value in data.items() if isinstance(value, str) and key not in METADATA}
    only = [*strings] if len(strings) == 1 else []
    for name in (*names, "text", *only):
        if name in strings:
            return strings[name]
    message = (
        "does not have a text: Label Studio states no key, there is no 'text', and not exactly one value is a string"
    )
    raise InvalidNoteError(message, "Rename the key of the text to 'text'.")


def _parse_values(values: Iterable[Mapping[str, Any]], text: str) -> list[RawEntity]:
    """Return the entities of the values of regions. Other regions than spans of text are ignored."""
    entities = []
    surfaces = []
    for value in values:
        key = next((key for key in value if key.endswith("labels")), None)
        labels = [] if key is None else value[key]
        if not isinstance(labels, list):
            raise InvalidNoteError("has an entity without a list of labels")
        offsets = value["globalOffsets"] if "startOffset" in value else value
        if key == "paragraphlabels" or (offsets is not value and HTML_PATTERN.search(text)):
            raise InvalidNoteError(
                "is a dialogue or HTML, whose offsets are not those of a text", "Label a plain text."
            )
        entities += [(offsets["start"], offsets["end"], label) for label in labels]
        surfaces += [value.get("text")] * len(labels)
    return create_entities(entities, surfaces)
