"""The synthetic notes of the course."""

import csv
import re
from collections import Counter

import pytest

import openmed_nb as nb
from helpers import ROOT

DATA = ROOT / "notebooks" / "data"


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
