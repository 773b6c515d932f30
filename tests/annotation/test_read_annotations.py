"""Annotation files as their tools write them: what is read as gold, what is left out, and what is refused without quoting it."""

import json
import re
from typing import NamedTuple

import pytest

import openmed_nb as nb
from helpers.leaks import MARKER, catch_rejection
from openmed_nb.annotation.export.registry import FORMATS
from openmed_nb.errors import ConfigurationError, OpenMedWarning

TEXT = "😀 asthma\r\nMild cough"
ASTHMA = (2, 8, "DISEASE")
COUGH = (10, 20, "DISEASE")
WHO = [{"completed_by": 1}, {"completed_by": {"id": 2, "email": "b@c.de"}}]


def region(start=2, end=8, text="asthma", labels=("DISEASE",), **region_values):
    """Return a region of Label Studio."""
    value = {"start": start, "end": end, "text": text, "labels": labels}
    return {"value": value, "type": "labels", "from_name": "l", "to_name": "t", **region_values}


def task(*annotations, data=None, **values):
    """Return a file of Label Studio with a task."""
    return json.dumps([{"id": 9, "data": data or {"text": TEXT, "note_id": "k"}, "annotations": annotations, **values}])


def lines(*records):
    """Return a file with a record per line."""
    return "\n".join(json.dumps(record) for record in records)


def line(**changes):
    """Return a line with changed values."""
    return json.dumps({"id": MARKER, "text": MARKER, "entities": [], **changes})


HTML_REGION = {
    "value": {"start": "/text()[1]", "end": "/text()[1]", "startOffset": 2, "endOffset": 8, "hypertextlabels": ["A"]}
}
DOCCANO = {"id": 4, "text": TEXT, "Comments": []}


class Case(NamedTuple):
    """A file, and the notes that are read from it.

    Attributes:
        name: Name of the file, or of a folder of brat.
        content: Text of the file, or the text of each file of the folder.
        notes: Id and spans of each note.
        options: Options of ``read_annotations``.
        left_out: Numbers of notes that were skipped, and that have predictions only.
    """

    name: str
    content: object
    notes: list
    options: dict = {}  # noqa: RUF012 - not changed
    left_out: tuple = (0, 0)


READ = [
    # https://labelstud.io/guide/task_format
    Case("a.json", task({"result": [region()]}, {"result": [], "was_cancelled": True}), [("k", [ASTHMA])]),
    Case("a.json", task({"result": [region(2, 14, "asthma\\n\\nMild", [*"AB"]), {"value": {"choices": ["x"]}, "type": "choices"}], "ground_truth": True}, {"result": []}), [("k", [(2, 14, "A"), (2, 14, "B")])]),
    Case("a.json", task({"result": [], **WHO[0]}, {"result": [region()], **WHO[1]}), [("k", [ASTHMA])], {"annotator": "b@c.de"}),
    Case("a.json", task({"result": [], **WHO[1]}, {"result": [region()], **WHO[0]}), [("k", [ASTHMA])], {"annotator": 1}),
    Case("a.json", task(predictions=[{"result": [region()], "model_version": "m"}]), [("k", [ASTHMA])], {"predictions": True}),
    Case("a.json", task({"result": [region()]}, data={"note": TEXT, "note_index": 3}), [([3], [ASTHMA])]),
    Case("a.json", json.dumps([*json.loads(task({"result": [region()]})), *json.loads(task({"result": []}, data={"text": "x"}))]), [("k", [ASTHMA]), (None, [])]),
    Case("a.json", task({"result": [region(), region(9, 19, "Mild cough")]}), [("k", [ASTHMA, COUGH])]),
    # https://github.com/doccano/doccano, backend/data_export/pipeline/examples and labels.py
    Case("a.jsonl", lines({**DOCCANO, "label": [[3, 9, "DISEASE"]]}), [(None, [ASTHMA])]),
    Case("a.jsonl", lines({**DOCCANO, "entities": [{"id": 1, "label": "DISEASE", "start_offset": 3, "end_offset": 9}], "relations": []}), [(None, [ASTHMA])]),
    # https://brat.nlplab.org/standoff.html
    Case("b", {"b.txt": TEXT, "b.ann": "T1\tDISEASE 2 8\tasthma\r\nR1\tOf Arg1:T1 Arg2:T2\t\n#1\tNote T1\tx\nT2\tA 2 8;10 14\tasthma Mild\n", "._b.txt": "x", "._b.ann": "T1"}, [("b", [ASTHMA, (2, 14, "A")])]),
    Case("b", {"b.txt": f"\ufeff{TEXT}", "b.ann": "T1\tDISEASE 3 9\tasthma\n", "c.txt": "x"}, [("b", [(3, 9, "DISEASE")])], {}, (1, 0)),
    Case("b", {"0.txt": "ill", "0.ann": "T1\tA 0 3\till\n", "ids.json": '{"0": {"note_id": 7.5}}'}, [(7.5, [(0, 3, "A")])]),
    # CoNLL 2003, BIOES and BILOU
    Case("a.conll", "-DOCSTART- -X- O O\n\nMild JJ O B-A\ncough NN O I-A\n\n# NN O O\n\n-DOCSTART- O\r\n\nill O\r\n", [(None, [(0, 10, "A")]), (None, [])]),
    Case("a.tsv", "a\tS-A\nb\tI-B\nc\tE-B\nd\tB-B\n\n\ne\tO\n", [(None, [(0, 1, "A"), (2, 5, "B"), (6, 7, "B")]), (None, [])]),
    Case("a.iob", "Mild I-A\rcough I-A\r2 U-B\r\rill O\r", [(None, [(0, 10, "A"), (11, 12, "B")]), (None, [])]),
    Case("a.conll", '# note_index = 2\n# text = "ill"\nill\tB-A\n', [([2], [(0, 3, "A")])]),
    Case("a.jsonl", lines({"id": 5, "text": TEXT, "entities": [{"start": 2, "end": 8, "label": "DISEASE"}]}), [(5, [ASTHMA])]),
    Case("a.jsonl", lines({"note_index": 5, "text": TEXT, "entities": [ASTHMA]}, {"id": 1.5, "text": None, "error": "x"}), [([5], [ASTHMA])], {}, (1, 0)),
]  # fmt: skip


def write(folder, name, content):
    """Return the path of a new file, or of a folder with files."""
    path = folder / name
    if isinstance(content, dict):
        path.mkdir()
        for file_name, text in content.items():
            write(path, file_name, text)
        return path
    path.write_bytes(content.encode())
    return path


@pytest.mark.parametrize("case", READ, ids=[f"{number}-{case.name}" for number, case in enumerate(READ)])
def test_read_annotations_reads_files_of_other_tools(case, tmp_path):
    path = write(tmp_path, case.name, case.content)
    gold = nb.read_annotations(path, **case.options)
    found = [(note.id if note.position is None else [note.position], list(note.spans)) for note in gold]
    assert (found, (gold.num_skipped, gold.num_predicted)) == (case.notes, case.left_out)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", task(predictions=[{"result": [region()]}]), "1 note has only predictions, which predictions=True"),
        ("a.json", task(), "1 note without an annotation"),
        ("a.jsonl", line(), "No annotated note"),
        (
            "a.jsonl",
            lines({"text": "asthma\r\nMild cough", "label": [[7, 11, "A"], [12, 17, "B"]]}),
            "^2 starts or ends",
        ),
        ("a.json", task({"result": [region(3, 8, None)]}), "^1 starts or ends"),
        (
            "b",
            {"b.txt": TEXT, "b.ann": "T1\tA 2 8;10 14\tasthma Mild\nT3\tB 2 8;15 20\tasthma cough"},
            "^1 discontinuous",
        ),
    ],
)
def test_read_annotations_warns_about_doubtful_entities(name, content, message, tmp_path):
    with pytest.warns(OpenMedWarning, match=message):
        nb.read_annotations(write(tmp_path, name, content))


def test_gold_texts_report_the_notes_that_were_left_out(tmp_path):
    tasks = [*json.loads(task({"result": [region(labels=["DISEASE", f"{MARKER} has HIV"])]})), *json.loads(task(id=8))]
    gold = nb.read_annotations(write(tmp_path, "a.json", json.dumps(tasks)))
    shown = f"{gold!r} {gold._repr_html_()} {gold.to_dict()}"
    assert MARKER not in repr(gold) + gold._repr_html_()
    assert "1 annotated note with 2 entities" in shown
    assert "1 note without an annotation was left out." in shown
    assert gold.to_dict()["num_skipped"] == 1


def bad_task(**changes):
    """Return a file of Label Studio with one changed region."""
    value = {"start": 0, "end": 5, "text": MARKER, "labels": [MARKER], **changes}
    return task({"result": [{"value": value, "type": "labels"}]}, data={"text": MARKER, "note_id": MARKER})


BAD_FILES = [
    ("label-studio", bad_task(end=6)),
    ("label-studio", bad_task(start=1)),
    ("label-studio", bad_task(end="5")),
    ("label-studio", bad_task(labels=MARKER)),
    ("label-studio", bad_task(labels=None)),
    ("label-studio", bad_task(text=f"{MARKER}s")),
    ("label-studio", bad_task(text=[MARKER])),
    ("label-studio", json.dumps({MARKER: MARKER})),
    ("label-studio", bad_task()[:-9]),
    ("label-studio", "[" * 100_000),
    ("doccano", json.dumps({"text": f"😀{MARKER}", "label": [[1, 9, MARKER]]})),
    ("doccano", json.dumps({"text": MARKER, "label": [[0, 3]]})),
    ("doccano", json.dumps({"text": 5, "label": []})),
    ("doccano", MARKER),
    ("jsonl", line(entities=[{"start": 0, "end": 6, "label": MARKER}])),
    ("jsonl", line(entities=[{"start": 0, "end": True, "label": MARKER}])),
    ("jsonl", line(entities=MARKER)),
    ("jsonl", line(text=[MARKER])),
    ("jsonl", f"{line()}\n{line()[:-4]}"),
    ("conll", f"{MARKER}\tO\n{MARKER}\tX\n"),
    ("conll", f'# id = "{MARKER}"\n# text = "{MARKER}"\n{MARKER}{MARKER}\tO\n'),
    ("conll", f"# id = {MARKER}\n# text = 5\n{MARKER}\tO\n"),
    ("conll", f'# id = 5\n# text = "a {MARKER} b"\nb\tO\n'),
    ("conll", f'# id = 5\n# text = "a {MARKER}"\na\tO\n'),
    ("brat", f"T1\t{MARKER} 0 6\t{MARKER}"),
    ("brat", f"T1\t{MARKER} 0 5\tx{MARKER}"),
    ("brat", f"T1\t{MARKER} 5 0\t{MARKER}"),
    ("brat", f"T1\t{MARKER} a b\t{MARKER}"),
    ("brat", f"T1\t{MARKER} 0 {'9' * 5000}\t{MARKER}"),
]


REFUSED = [
    ("a.json", task({"result": [region(text="cough")]}), "different text", "the texts that were annotated"),
    ("a.json", task({"result": [], **WHO[0]}, {"result": [], **WHO[1]}), "several annotations", "annotator="),
    ("a.json", task({"result": []}, {"result": []}), "several annotations", "annotator="),
    ("a.json", task({"result": [region()]}, data={"note": "a", "other": "b"}), "does not have a text", "Rename"),
    ("a.json", task({"no": []}), "does not have the key result", "Check"),
    ("a.json", task({"result": [{"value": {"paragraphlabels": ["A"]}}]}), "dialogue", "plain text"),
    ("a.json", task({"result": [HTML_REGION]}, data={"html": "<p>She has asthma.</p>"}), "HTML", "plain text"),
    ("a.json", lines({"id": 9, "text": "a", "annotator": 1}), "none of the keys", "Pass the format"),
    ("a.jsonl", lines({"text": MARKER, "annotation": []}), "none of the keys 'entities', 'label'", "Pass the format"),
    ("a.jsonl", lines({"id": [MARKER], "text": "a", "entities": []}), "value for 'id'", "Correct"),
    ("a.jsonl", lines({"note_index": "1", "text": "a", "entities": []}), "or 'note_index'", "Correct"),
    ("a.jsonl.gz", "\x1f", "suffix", "Pass format"),
    ("a.csv", "id,start,end,label\n", "suffix", "DataFrame"),
    ("a.abc", "x", "suffix", "brat, conll"),
    ("a.conll", "B-A\tMild\nO\tcough\n", "line without a tag", "column of tags"),
    ("b", {"c": {"b.txt": "x", "b.ann": ""}}, "in folders", "Pass one of these"),
    ("b", {"b.txt": "x", "a.ann": ""}, "1 .ann files without a .txt", "Add"),
    ("b", {"b.md": "x"}, "does not have .txt files", "Pass the folder"),
    ("b", {"b.txt": TEXT, "b.ann": "T1\tA 2 8;15 20\tasthma Mild"}, "different text", "the texts that were annotated"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "message", "remedy"), REFUSED)
def test_read_annotations_names_the_cause_and_its_remedy(name, content, message, remedy, tmp_path):
    error = catch_rejection(lambda: nb.read_annotations(write(tmp_path, name, content)))
    assert re.search(message, error.message)
    assert remedy in error.remedy


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"annotator": f"{MARKER} Lee"}, "no annotation by the annotator"),
        ({"annotator": 1.5}, "Invalid type for annotator"),
        ({"labels": {"Disease": 1}}, "Invalid type for labels"),
        ({"labels": "DISEASE"}, "Invalid type for labels"),
        ({"predictions": 1}, "Invalid value for predictions"),
    ],
)
def test_read_annotations_validates_options(options, message, tmp_path):
    path = write(tmp_path, "a.json", task({"result": [], **WHO[0]}, {"result": [], **WHO[1]}))
    assert message in catch_rejection(lambda: nb.read_annotations(path, **options)).message


@pytest.mark.parametrize(("name", "content"), BAD_FILES)
def test_bad_files_are_rejected_without_quoting(name, content, tmp_path):
    path = tmp_path / "file"
    if name == "brat":
        path.mkdir()
        (path / f"{MARKER}.txt").write_text(MARKER)
        (path / f"{MARKER}.ann").write_text(content)
    else:
        path.write_text(content)
    catch_rejection(lambda: nb.read_annotations(path, name))


def test_errors_contain_the_position_of_the_note(tmp_path):
    (tmp_path / "a.jsonl").write_text(f"{line()}\n{line()}\n{line()[:-4]}")
    with pytest.raises(ConfigurationError, match="Note 2 of the jsonl file cannot be read: JSONDecodeError"):
        nb.read_annotations(tmp_path / "a.jsonl")


@pytest.mark.parametrize("name", [name for name, form in FORMATS.items() if form.read])
def test_other_encodings_are_rejected(name, tmp_path):
    path = tmp_path / "file"
    if name == "brat":
        path.mkdir()
    (path / "a.txt" if name == "brat" else path).write_bytes(f"{MARKER} \u00e9".encode("utf-16"))
    catch_rejection(lambda: nb.read_annotations(path, name))
    assert "UTF-8" in catch_rejection(lambda: nb.read_annotations(path, name)).remedy
