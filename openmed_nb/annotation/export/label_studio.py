"""Label Studio: a JSON list of tasks (https://labelstud.io/guide/task_format).

Offsets are in code points (https://github.com/HumanSignal/label-studio-frontend/pull/308). The key of a note is in ``note_id``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from xml.sax.saxutils import quoteattr

from ..gold import GoldText
from .notes import Export, InvalidNoteError, create_gold_text, open_utf8, read_utf8


def write_label_studio(path: Path, export: Export) -> str:
    """Write notes to a file, with their entities as predictions. Return the labeling configuration of the project."""
    tasks = []
    for note in export:
        result: list[dict[str, object]] = []
        for span, score in zip(note.spans, note.scores, strict=True):
            surface = note.text[span.start : span.end]
            value = {"start": span.start, "end": span.end, "text": surface, "labels": [span.label]}
            names = {"id": str(len(result)), "from_name": "label", "to_name": "text", "type": "labels"}
            result.append({**names, "value": value, "score": score})
        prediction = {"model_version": export.model, "score": min(note.scores, default=0.0), "result": result}
        tasks.append({"data": {"text": note.text, "note_id": note.id}, "predictions": [prediction]})
    with open_utf8(path) as file:
        json.dump(tasks, file, ensure_ascii=False)
    labels = "".join(f"<Label value={quoteattr(label)}/>" for label in sorted(export.labels))
    return f'<View><Labels name="label" toName="text">{labels}</Labels><Text name="text" value="$text"/></View>'


def read_label_studio(path: Path) -> Iterator[GoldText]:
    """Yield the notes of a file in the format JSON or JSON_MIN.

    Of several annotations of a task, the ground truth is read, or the last one if there is none. Predictions are read if a task
    has no annotations.
    """
    for task in json.loads(read_utf8(path)):
        data = task.get("data", task)
        values = task.get("label", [])  # JSON_MIN
        if "data" in task:
            annotations = [item for item in task.get("annotations", ()) if not item.get("was_cancelled")]
            versions = annotations or task.get("predictions", ())[:1]
            ground_truth = [item for item in versions if item.get("ground_truth")]
            chosen = [*versions, *ground_truth][-1:]
            results = chosen[0]["result"] if chosen else []
            values = [item["value"] for item in results if item["type"] == "labels"]
        entities = []
        surfaces = []
        for value in values:
            if not isinstance(value["labels"], list):
                raise InvalidNoteError("has an entity without a list of labels")
            entities += [(value["start"], value["end"], label) for label in value["labels"]]
            surfaces += [value.get("text")] * len(value["labels"])
        yield create_gold_text(data.get("note_id"), data["text"], entities, surfaces)
