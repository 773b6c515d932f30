"""The notes of the course, and a notebook in an environment without a package that it needs."""

import csv
import re
from collections import Counter
from pathlib import Path

import nbformat
import pytest

import openmed_nb as nb

ROOT = Path(__file__).parents[2]
DATA = ROOT / "notebooks" / "data"
NEEDED = {
    "00_demo": ("openmed", "pandas"),
    "02_a_table_of_notes": ("pandas",),
    "03_how_good_is_it": ("openmed", "pandas"),
    "04_names_out": ("pandas",),
    "06_many_notes_several_computers": ("asyncssh", "distributed", "pandas"),
}
"""The optional packages of each notebook of the course."""


@pytest.mark.parametrize(("name", "package"), [(name, package) for name, names in NEEDED.items() for package in names])
def test_first_cell_names_a_missing_package(kernel, name, package):
    notebook = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
    first = next(cell.source for cell in notebook.cells if cell.cell_type == "code")

    kernel.run(f"import sys; sys.modules[{package!r}] = None")
    error, message, lines = kernel.run(first).error
    kernel.run(f"del sys.modules[{package!r}]")

    assert error == "OpenMedError"
    assert f"%pip install {package}" in message
    assert len(lines) == 1


@pytest.mark.parametrize(
    ("script", "names"),
    [
        ("write_course_notes.py", ("notes.csv", "gold.jsonl")),
        ("write_name_notes.py", ("names_training.jsonl", "names_same_style.jsonl", "names_other_style.jsonl")),
    ],
)
def test_scripts_write_the_notes_again(script, names, helper, tmp_path):
    module = helper(ROOT / "scripts" / script)
    module.DATA = tmp_path
    module.main()

    assert {path.name for path in tmp_path.iterdir()} == {*names}
    for name in names:
        assert (tmp_path / name).read_bytes() == (DATA / name).read_bytes(), name


def test_notes_are_varied():
    """No sentence appears more than three times; some notes are empty, and one is longer than the model's limit."""
    with (DATA / "notes.csv").open(encoding="utf-8", newline="") as file:
        texts = [row["text"] for row in csv.DictReader(file)]
    sentences = Counter(
        sentence for text in texts for sentence in re.split(r"(?<=[.!?])(?<!Mr\.)(?<!Ms\.)(?<!Dr\.) ", text) if sentence
    )

    assert len(texts) == 120
    assert texts.count("") == 4
    assert [len(text) > 500 for text in texts].count(True) == 1
    assert max(sentences.values()) <= 3


def test_gold_marks_the_entities_of_thirty_notes():
    """Each gold entity is a disease or an abbreviation, without spaces or punctuation at its ends."""
    gold = nb.read_annotations(DATA / "gold.jsonl")
    entities = [note.text[span.start : span.end] for note in gold for span in note.spans]

    assert len(gold) == 30
    assert {"RA", "COPD"} <= {*entities}
    assert [entity for entity in entities if not re.fullmatch(r"\w[\w -]*\w", entity)] == []
