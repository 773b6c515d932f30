"""Annotation files as their tools write them: what is read as gold, what is left out, and what is refused without quoting it."""

import json

import pytest

import openmed_nb as nb
from helpers.leaks import MARKER, catch_rejection
from openmed_nb.errors import OpenMedWarning

TEXT = "😀 asthma\r\nMild cough"
ASTHMA = (2, 8, "DISEASE")
COUGH = (10, 20, "DISEASE")
WHO = [{"completed_by": 1}, {"completed_by": {"id": 2, "email": "b@c.de"}}]


def region(start=2, end=8, text="asthma", labels=("DISEASE",)):
    """Return a region of Label Studio."""
    return {"value": {"start": start, "end": end, "text": text, "labels": labels}, "type": "labels"}


def task(*annotations, data=None, **values):
    """Return a file of Label Studio with a task."""
    return json.dumps([{"id": 9, "data": data or {"text": TEXT, "note_id": "k"}, "annotations": annotations, **values}])


def lines(*records):
    """Return a file with a record per line."""
    return "\n".join(json.dumps(record) for record in records)


def line(**changes):
    """Return a line with changed values."""
    return json.dumps({"id": MARKER, "text": MARKER, "entities": [], **changes})


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


CHOICES = {"value": {"choices": ["x"]}, "type": "choices"}

# Name and contents of a file (a mapping for a folder of brat), the id or position and the spans of each note, and options.
READ = [
    # https://labelstud.io/guide/task_format
    ("a.json", task({"result": [region()]}, {"result": [], "was_cancelled": True}), [("k", [ASTHMA])], {}),
    ("a.json", task({"result": [region(2, 14, "asthma\\n\\nMild", [*"AB"]), CHOICES]}), [("k", [(2, 14, "A"), (2, 14, "B")])], {}),
    ("a.json", task({"result": [], **WHO[0]}, {"result": [region()], **WHO[1]}), [("k", [ASTHMA])], {"annotator": "b@c.de"}),
    ("a.json", task({"result": [], **WHO[1]}, {"result": [region()], **WHO[0]}), [("k", [ASTHMA])], {"annotator": 1}),
    ("a.json", task(predictions=[{"result": [region()], "model_version": "m"}]), [("k", [ASTHMA])], {"predictions": True}),
    ("a.json", task({"result": [region(), region(9, 19, "Mild cough")]}), [("k", [ASTHMA, COUGH])], {}),
    # https://github.com/doccano/doccano, backend/data_export/pipeline/examples and labels.py
    ("a.jsonl", lines({"id": 4, "text": TEXT, "Comments": [], "label": [[3, 9, "DISEASE"]]}), [(None, [ASTHMA])], {}),
    # https://brat.nlplab.org/standoff.html
    ("b", {"b.txt": TEXT, "b.ann": "T1\tDISEASE 2 8\tasthma\r\nR1\tOf Arg1:T1 Arg2:T2\t\n#1\tNote T1\tx\nT2\tA 2 8;10 14;15 20\tasthma Mild cough\n", "._b.txt": "x", "._b.ann": "T1"}, [("b", [ASTHMA, (2, 20, "A")])], {}),
    ("b", {"b.txt": f"\ufeff{TEXT}", "b.ann": "T1\tA 3 9;16 21\tasthma cough\n"}, [("b", [(3, 9, "A"), (16, 21, "A")])], {}),
    ("b", {"0.txt": "ill", "0.ann": "T1\tA 0 3\till\n", "ids.json": '{"0": {"note_id": 7.5}}'}, [(7.5, [(0, 3, "A")])], {}),
    # CoNLL 2003, BIOES and BILOU
    ("a.conll", "-DOCSTART- -X- O O\n\nMild JJ O B-A\ncough NN O I-A\n\n# NN O O\n\nill O\r\n", [(None, [(0, 10, "A")]), (None, []), (None, [])], {}),
    ("a.tsv", "a\tS-A\nb\tI-B\nc\tE-B\nd\tB-B\n\n\ne\tO\n", [(None, [(0, 1, "A"), (2, 5, "B"), (6, 7, "B")]), (None, [])], {}),
    ("a.iob", "Mild I-A\rcough I-A\r2 U-B\r", [(None, [(0, 10, "A"), (11, 12, "B")])], {}),
    ("a.conll", '# note_index = 2\n# text = "ill"\nill\tB-A\n', [([2], [(0, 3, "A")])], {}),
    ("a.jsonl", lines({"id": 5, "text": TEXT, "entities": [{"start": 2, "end": 8, "label": "DISEASE"}]}), [(5, [ASTHMA])], {}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "notes", "options"), READ)
def test_read_annotations_reads_files_of_other_tools(name, content, notes, options, tmp_path):
    gold = nb.read_annotations(write(tmp_path, name, content), **options)
    assert [(note.id if note.position is None else [note.position], list(note.spans)) for note in gold] == notes


@pytest.mark.parametrize(
    ("name", "content", "counts"),
    [
        ("a.json", task({"result": [region()]})[:-1] + "," + task(id=8)[1:], (1, 1, 0)),
        ("a.json", task(predictions=[{"result": [region()]}]), (0, 0, 1)),
        ("b", {"b.txt": TEXT, "b.ann": "", "c.txt": "x"}, (1, 1, 0)),
        ("a.jsonl", lines({"id": 1.5, "text": None, "error": "x"}, {"id": 2, "text": "", "missing": True}), (0, 2, 0)),
        ("a.jsonl", line(entities=[{"start": 0, "end": 1, "label": "A", "score": 0.5}]), (0, 0, 1)),
    ],
)
@pytest.mark.filterwarnings("ignore:No annotated note")
def test_read_annotations_counts_the_notes_without_an_annotation(name, content, counts, tmp_path):
    gold = nb.read_annotations(write(tmp_path, name, content))
    assert (len(gold), gold.num_skipped, gold.num_predicted) == counts


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", task(predictions=[{"result": [region()]}]), "1 note has only predictions, which predictions=True"),
        ("a.jsonl", line(), "No annotated note"),
        ("a.jsonl", lines({"text": "asthma\r\nMild cough", "label": [[7, 11, "A"], [12, 17, "B"]]}), "^2 starts"),
        ("a.json", task({"result": [region(3, 8, None)]}), "^1 starts or ends"),
    ],
)
def test_read_annotations_warns_about_doubtful_entities(name, content, message, tmp_path):
    with pytest.warns(OpenMedWarning, match=message):
        nb.read_annotations(write(tmp_path, name, content))


def test_gold_texts_show_no_text(tmp_path):
    gold = nb.read_annotations(
        write(tmp_path, "a.json", task({"result": [region(labels=["DISEASE", f"{MARKER} has HIV"])]}))
    )
    assert gold.labels["DISEASE"] == 1
    assert MARKER not in f"{gold!r} {gold._repr_html_()} {gold.to_dict()}"


def bad_task(**changes):
    """Return a file of Label Studio with one changed region."""
    value = {"start": 0, "end": 5, "text": MARKER, "labels": [MARKER], **changes}
    return task({"result": [{"value": value, "type": "labels"}]}, data={"text": MARKER, "note_id": MARKER})


def bad_brat(annotation):
    """Return a folder of brat with a line."""
    return {f"{MARKER}.txt": MARKER, f"{MARKER}.ann": annotation}


REFUSED = [
    ("a.json", bad_task(end=6), "invalid entity"),
    ("a.json", bad_task(text=f"{MARKER}s"), "different text"),
    ("a.json", bad_task(start=1), "different text"),
    ("a.json", bad_task(labels=MARKER), "list of labels"),
    ("a.json", task({"result": [], **WHO[0]}, {"result": [], **WHO[1]}), "several annotations"),
    ("a.json", task({"result": [region()]}, data={"note": MARKER}), "does not have a text"),
    ("a.json", task({"no": []}), "does not have the key result"),
    ("a.json", lines({"id": 9, "text": MARKER, "annotator": 1}), "none of the keys"),
    ("a.jsonl", json.dumps({"text": f"😀{MARKER}", "label": [[1, 9, MARKER]]}), "invalid entity"),
    ("a.jsonl", json.dumps({"text": 5, "label": []}), "does not have a text"),
    ("a.jsonl", line(entities=[{"start": 0, "end": True, "label": MARKER}]), "invalid entity"),
    ("a.jsonl", f"{line()}\n{line()}\n{line()[:-4]}", "Note 2 of the jsonl file cannot be read"),
    ("a.csv", "id,start,end,label\n", "suffix"),
    ("a.conll", f"{MARKER}\tO\n{MARKER}\tX\n", "line without a tag"),
    ("a.conll", f'# id = "{MARKER}"\n# text = "{MARKER}"\n{MARKER}{MARKER}\tO\n', "tokens that do not match"),
    ("a.conll", f'# id = 5\n# text = "a {MARKER}"\na\tO\n', "text without tokens"),
    ("b", bad_brat(f"T1\t{MARKER} 0 6\t{MARKER}"), "invalid entity"),
    ("b", bad_brat(f"T1\t{MARKER} 0 5\tx{MARKER}"), "different text"),
    ("b", bad_brat(f"T1\t{MARKER} 0 {'9' * 5000}\t{MARKER}"), "invalid line"),
    ("b", {"b.txt": "x", "a.ann": ""}, "missing or not a regular file"),
    ("b", {"b.md": "x"}, "does not have .txt files"),
]


@pytest.mark.parametrize(("name", "content", "problem"), REFUSED)
def test_read_annotations_states_the_problem_of_a_file_without_quoting_it(name, content, problem, tmp_path):
    assert problem in catch_rejection(lambda: nb.read_annotations(write(tmp_path, name, content))).message


@pytest.mark.parametrize(
    "options",
    [{"annotator": f"{MARKER} Lee"}, {"annotator": 1.5}, {"predictions": 1}],
)
def test_read_annotations_validates_options(options, tmp_path):
    path = write(tmp_path, "a.json", task({"result": [], **WHO[0]}, {"result": [], **WHO[1]}))
    catch_rejection(lambda: nb.read_annotations(path, **options))


@pytest.mark.parametrize("name", ["a.jsonl", "a.conll", "brat"])
def test_other_encodings_are_rejected(name, tmp_path):
    path = tmp_path / name
    if name == "brat":
        path.mkdir()
    (path / "a.txt" if name == "brat" else path).write_bytes(f"{MARKER} \u00e9".encode("utf-16"))
    assert "UTF-8" in catch_rejection(lambda: nb.read_annotations(path)).remedy
