"""The clinical sentences that measure the bundled models, and the lines that train them."""

import importlib
import json

import pytest

from helpers import ROOT

KINDS = {"disease", "abbreviation", "lay", "symptom", "open"}


@pytest.fixture
def lines(monkeypatch):
    """The script that writes the training lines."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module("write_note_lines")


@pytest.fixture
def notes(lines):
    """The clinical sentences."""
    return lines.read_notes(lines.NOTES)


def test_clinical_sentences_have_whole_marks_and_a_kept_part(notes):
    for note in notes:
        ends = [0]
        for mark in note.marks:
            assert mark.kind in KINDS
            assert ends[-1] <= mark.start < mark.end <= len(note.text)
            assert note.text[mark.start : mark.end] == note.text[mark.start : mark.end].strip()
            ends.append(mark.end)

    assert len({note.text for note in notes}) == len(notes)
    assert sum(note.part == "kept" for note in notes) >= len(notes) / 3


@pytest.mark.parametrize(
    ("pattern", "words", "labels"),
    [
        ("c/o [chest pain]", "c / o chest pain", "O O O B-DISEASE I-DISEASE"),
        (r"PMH:\n[HTN]\t<x|x>", "PMH : HTN x", "O O B-DISEASE O"),
        ("<[DM2]|[DM2]> a < b", "DM2 a < b", "B-DISEASE O O O"),
    ],
)
def test_line_writer_labels_the_marked_words(lines, pattern, words, labels):
    sentence = lines.LineWriter(seed=0).write(pattern)
    assert " ".join(sentence.words).lower() == words.lower()
    assert " ".join(sentence.labels) == labels


@pytest.mark.parametrize("kind", ["with", "without"])
def test_every_pattern_is_written_with_or_without_a_disease(lines, kind):
    writer = lines.LineWriter(seed=1)
    patterns = [row[0] for path in lines.TABLES.glob(f"{kind}_*.txt") for row in lines.read_rows(path.name)]
    assert len(patterns) >= 300
    for pattern in patterns:
        assert ("B-DISEASE" in writer.write(pattern).labels) == (kind == "with"), pattern


def test_written_lines_have_no_run_of_words_of_a_test_sentence(lines, notes, tmp_path):
    longest = max((note.text for note in notes), key=len)
    rows = [f"{word}\tO" for word in lines.split_words(longest)]
    sentence = ["asthma\tB-DISEASE", "was\tO", "seen\tO"]
    for folder in lines.CORPORA.values():
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "train.tsv").write_text("\n".join([*sentence, "", *sentence, *rows]) + "\n", "utf-8")
    (tmp_path / "clinical-notes").mkdir()
    for name, column in lines.NOTE_COLUMNS.items():
        texts = f'{column}\n"Doing well today."\n{json.dumps("So " + longest.replace(chr(34), ""))}\n'
        (tmp_path / "clinical-notes" / name).write_text(texts, "utf-8")

    lines.write_note_lines(tmp_path, seed=0, counts={"with": 20, "without": 20})

    test = lines.TestSentences(lines.NOTES)
    shortest = min((note.text for note in notes), key=len)
    assert test.contain(lines.split_words(f"Today: {shortest} Then home."))
    written = lines.read_sentences(tmp_path / "note-lines" / "train.tsv")
    assert len(written) > 30
    assert not any(test.contain(sentence.words) for sentence in written)
    unlabeled = (tmp_path / "note-lines" / "unlabelled.txt").read_text("utf-8").splitlines()
    assert "Doing well today ." in unlabeled
    assert not any(test.contain(line.split()) for line in unlabeled)


def test_known_terms_are_the_longest_at_a_place(lines):
    words = ["started", "Lisinopril", "for", "high", "blood", "pressure"]
    terms = {" ".join(words[start:end]): is_disease for start, end, is_disease in lines.KnownTerms().find(words)}
    assert terms == {"Lisinopril": False, "high blood pressure": True}
