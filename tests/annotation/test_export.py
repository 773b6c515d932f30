"""Export and import of annotations: offsets survive, other libraries read the files, and errors quote no contents."""

import csv
import dataclasses
import json
import os
import stat
import tempfile
from functools import partial
from pathlib import Path
from xml.etree import ElementTree as ET

import pandas as pd
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

import openmed_nb as nb
from helpers.annotations import make_annotations, make_entity
from helpers.leaks import MARKER, catch_rejection
from openmed_nb.annotation.export.formats import SPAN_GROUP
from openmed_nb.annotation.export.notes import CHANGED_LABELS, OVERLAPPING, TRIMMED, WITHOUT_TEXT
from openmed_nb.annotation.export.registry import FORMATS
from openmed_nb.errors import ConfigurationError, OpenMedWarning

EXPORTS = [name for name, form in FORMATS.items() if form.write]
# Saved tables, and what reads them.
TABLES = {"a.csv": lambda path: pd.read_csv(path, keep_default_na=False), "a.parquet": pd.read_parquet}

EXTENSIONS = {"brat": "", "conll": ".conll", "doccano": ".jsonl", "label-studio": ".json"}

# Emoji (also of several code points), CRLF, other line breaks, combining marks, tabs, quotes, markup.
PIECES = ["asthma", "a", "7", " ", "  ", "\r\n", "\n", "\u2028", "\x85", "\t", "😀", "👩🏽‍⚕️", "e\u0301", "李明", "#", "-", '"', "\\n", "<b>", "&", "\u00a0", "\ufeff", ",", "\r"]  # fmt: skip
LABELS = ["NAME", "DISEASE", 'A"&<', "TWO WORDS"]


@st.composite
def notes(draw):
    """Return a text and its entities, which may overlap."""
    text = draw(st.lists(st.sampled_from(PIECES), max_size=12).map("".join).filter(str.strip))
    spans = draw(st.lists(st.tuples(*[st.integers(0, len(text))] * 2), max_size=6, unique=True))
    spans = [(start, end, draw(st.sampled_from(LABELS))) for start, end in spans if start < end]
    return text, sorted(spans)


def annotate(texts_and_spans, **options):
    """Return annotations with the given texts and entities."""
    results = [
        [
            {"entity_group": label, "score": 0.5, "word": text[start:end].lower(), "start": start, "end": end}
            for start, end, label in spans
        ]
        for text, spans in texts_and_spans
    ]
    return make_annotations(results, [text for text, _ in texts_and_spans], preview_texts=(), **options)


def export(found, name, folder):
    """Export to a new file, and return the report."""
    return found.export(name, folder / f"{name}-{len([*folder.iterdir()])}{EXTENSIONS[name]}")


@pytest.fixture
def found():
    """Notes with CRLF, emoji, overlapping entities and entities that cross lines."""
    return annotate(
        [
            ("😀 She has asthma.\r\nMild\r\ncough", [(10, 16, "DISEASE"), (19, 30, "DISEASE"), (10, 14, "NAME")]),
            ("Well.", []),
            ("Ann", [(0, 3, "NAME")]),
        ]
    )


# Random entities are inside words, and random notes may have none.
IGNORED = pytest.mark.filterwarnings("ignore:.*inside a word", "ignore:No annotated note")


@IGNORED
@pytest.mark.parametrize("name", EXPORTS)
@given(texts_and_spans=st.lists(notes(), max_size=3))
def test_round_trip_changes_only_the_counted_losses(name, texts_and_spans):
    found = annotate(texts_and_spans)
    with tempfile.TemporaryDirectory() as folder:
        report = export(found, name, Path(folder))
        gold = nb.read_annotations(report.path, name, predictions=True)
    assert [(note.id, note.position, note.text) for note in gold] == [
        (None, index, text) for index, (text, _) in enumerate(texts_and_spans)
    ]
    assert (report.notes, report.entities) == (len(gold), sum(len(spans) for _, spans in texts_and_spans))
    expected = {(index, *span) for index, (_, spans) in enumerate(texts_and_spans) for span in spans}
    actual = {(index, *span) for index, note in enumerate(gold) for span in note.spans}
    assert len(expected - actual) <= sum(report.losses.values())
    assert bool(report.losses) == (expected != actual)
    assert not (report.losses and name in {"doccano", "label-studio"})
    assert report.losses or not found.score(gold).missed


@IGNORED
@given(st.lists(notes(), max_size=3))
def test_saved_entities_do_not_change(texts_and_spans):
    found = annotate(texts_and_spans)
    expected = {(index, *span) for index, (_, spans) in enumerate(texts_and_spans) for span in spans}
    with tempfile.TemporaryDirectory() as folder:
        found.save(f"{folder}/a.jsonl")
        gold = nb.read_annotations(f"{folder}/a.jsonl", predictions=True)
        assert {(note.position, *span) for note in gold for span in note.spans} == expected
        for name, read in TABLES.items():
            found.save(f"{folder}/{name}")
            saved = read(f"{folder}/{name}")
            columns = ["note_index", "start", "end", "entity_group"]
            assert {*saved[columns].itertuples(index=False, name=None)} == expected
            assert found.score(saved).num_texts == len(found)


@IGNORED
@given(notes())
def test_files_follow_the_rules_of_their_tools(note):
    """Independent readers: brat's and Label Studio's rules, UTF-16 offsets of doccano, and the IOB2 tags of seqeval."""
    from seqeval.metrics.sequence_labeling import get_entities  # It imports scikit-learn.

    text, spans = note
    found = annotate([note])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found.export("brat", folder / "brat")
        labels = sorted({label.replace(" ", "_") for _, _, label in spans})
        config = (folder / "brat" / "annotation.conf").read_bytes().decode().split()
        assert config == ["[entities]", *labels, "[relations]", "[events]", "[attributes]"]
        for line in (folder / "brat" / "000000.ann").read_bytes().decode().split("\n")[:-1]:
            _, entity, surface = line.split("\t", 2)
            label, offsets = entity.split(" ", 1)
            parts = [text[slice(*map(int, fragment.split()))] for fragment in offsets.split(";")]
            assert " ".join(parts) == surface
            assert all(len(part.splitlines()) == 1 for part in parts)
            assert label in labels

        report = found.export("label-studio", folder / "tasks.json")
        (task,) = json.loads((folder / "tasks.json").read_bytes())
        (prediction,) = task["predictions"]
        values = [region["value"] for region in prediction["result"]]
        assert [(value["start"], value["end"], *value["labels"]) for value in values] == spans
        assert all(text[value["start"] : value["end"]] == value["text"] for value in values)
        view = ET.fromstring(report.labeling_config)  # noqa: S314 - our own output
        assert {label.get("value") for label in view.iter("Label")} == {label for _, _, label in spans}
        found.export("doccano", folder / "lines.jsonl")
        (record,) = [json.loads(line) for line in (folder / "lines.jsonl").read_bytes().splitlines()]
        units = text.encode("utf-16-le")
        assert [units[2 * start : 2 * end].decode("utf-16-le") for start, end, _ in record["label"]] == [
            text[start:end] for start, end, _ in spans
        ]

        report = found.export("conll", folder / "notes.conll")
        rows = [line.split("\t") for line in (folder / "notes.conll").read_bytes().decode().split("\n") if "\t" in line]
        assert "".join(token for token, _ in rows) == "".join(text.split())
        entities = get_entities([tag for _, tag in rows])
        kept = nb.read_annotations(folder / "notes.conll")[0].spans
        assert [("".join(token for token, _ in rows[first : last + 1]), label) for label, first, last in entities] == [
            ("".join(text[start:end].split()), label) for start, end, label in kept
        ]


def test_to_spacy_yields_documents_and_warns_about_omitted_entities(found):
    import spacy

    nlp = spacy.blank("en")
    with pytest.warns(OpenMedWarning, match="^1 entities without a label, or that do not start and end"):
        docs = [*found.to_spacy(nlp)]
    assert [[(span.text, span.label_) for span in doc.ents] for doc in docs] == [
        [("asthma", "DISEASE"), ("Mild\r\ncough", "DISEASE")],
        [],
        [("Ann", "NAME")],
    ]
    assert [doc.user_data["note_index"] for doc in docs] == [0, 1, 2]
    overlapping = annotate([("a b c", [(0, 3, "A"), (2, 5, "B"), (0, 3, "C")])])
    (doc,) = overlapping.to_spacy(nlp)
    assert len(doc.ents) + len(doc.spans[SPAN_GROUP]) == 3
    with pytest.warns(OpenMedWarning, match="^1 entities without a label"):
        assert [doc.ents for doc in annotate([("ab", [(0, 2, "")])]).to_spacy(nlp)] == [()]
    with pytest.raises(ConfigurationError):
        next(found.to_spacy(MARKER))


@pytest.mark.timeout(20)
def test_to_spacy_takes_linear_time():
    """Comparing each of the 20,000 entities with each other takes longer than the limit."""
    import spacy

    spans = [(2 * index, 2 * index + 1, "NAME") for index in range(20_000)]
    (doc,) = annotate([("a " * 20_000, spans)]).to_spacy(spacy.blank("en"))
    assert len(doc.ents) == 20_000


@pytest.mark.parametrize("keys", [None, ["007", "b", 3]])
def test_saved_tables_have_the_rows_of_the_frame(found, keys, tmp_path):
    found = dataclasses.replace(found, ids=keys)
    frame = found.to_frame()
    for name in ("notes.parquet", "notes.csv", "notes.jsonl"):
        found.save(tmp_path / name)
    table = pyarrow.parquet.read_table(tmp_path / "notes.parquet")
    assert table.equals(found.to_arrow())
    expected = frame.assign(note_id=frame["note_id"].map(str)) if keys else frame
    assert table.to_pandas().astype(object).equals(expected.astype(object))
    with (tmp_path / "notes.csv").open(newline="") as file:
        assert [int(row["start"]) for row in csv.DictReader(file)] == frame["start"].tolist()
    gold = nb.read_annotations(tmp_path / "notes.jsonl", predictions=True)
    assert [note.id if keys else note.position for note in gold] == (keys or [0, 1, 2])
    for form in (gold, frame):
        assert found.score(form).total.strict.f1 == 1.0
    assert "None" not in dataclasses.replace(found, ids=[None, "b", None]).to_arrow()["note_id"].to_pylist()


def test_files_that_are_not_regular_are_rejected(tmp_path):
    """Reading from a pipe would block."""
    (tmp_path / "brat").mkdir()
    for pipe, path in (("notes.jsonl", "notes.jsonl"), ("brat/0.txt", "brat")):
        os.mkfifo(tmp_path / pipe)
        with pytest.raises(ConfigurationError, match="not a regular file"):
            nb.read_annotations(tmp_path / path)


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("index", [["k1", "k2"], [5, 3]])
def test_saved_tables_have_the_index_of_a_series_as_ids(name, index, tmp_path):
    found = nb.annotate(
        pd.Series(["Known gout.", "Has asthma."], index=index), "bundled_small", device="cpu", progress=False
    )
    found.save(tmp_path / name)
    saved = TABLES[name](tmp_path / name)
    assert saved["note_id"].tolist() == index
    assert found.score(saved).total.strict.correct == 2


def test_empty_results_can_be_saved(tmp_path):
    empty = annotate([("Well.", [])])
    for name in ("a.parquet", "a.csv", "a.jsonl"):
        empty.save(tmp_path / name)
    with pytest.warns(OpenMedWarning, match="No annotated note"):
        assert empty.score(nb.read_annotations(tmp_path / "a.jsonl")).num_texts == 1
    assert empty.score(pd.read_csv(tmp_path / "a.csv")).num_texts == 1


@pytest.fixture
def incomplete():
    """A failed note, a missing note, a changed note, a note with an entity, and one from the end of a generator."""
    texts = ["failed", None, "original", "asthma"]
    entities = [make_entity("asthma", "asthma")]
    found = make_annotations(["Text 0 failed.", [], entities, entities], texts, preview_texts=())
    texts[2] = "changed"
    return found


@pytest.mark.parametrize("name", EXPORTS)
def test_notes_without_text_are_omitted_and_counted(incomplete, name, tmp_path):
    report = export(incomplete, name, tmp_path)
    assert (report.notes, report.entities, report.losses) == (1, 1, {WITHOUT_TEXT: 3})
    assert [note.position for note in nb.read_annotations(report.path, predictions=True)] == [3]


def test_jsonl_contains_all_notes(incomplete, tmp_path):
    incomplete.save(tmp_path / "a.jsonl")
    records = [json.loads(line) for line in (tmp_path / "a.jsonl").read_bytes().splitlines()]
    assert [record["text"] for record in records] == [None, None, None, "asthma"]
    assert (records[0]["error"], records[1]["missing"]) == ("Text 0 failed.", True)


def test_losses_are_counted(tmp_path):
    found = annotate([("a b\n", [(0, 3, "X"), (2, 4, "Y Z")]), ("a b c", [(0, 5, "Y Z")]), ("a", [(0, 1, "")])])
    conll = found.export("conll", tmp_path / "a.conll")
    assert conll.losses == {OVERLAPPING: 1, CHANGED_LABELS: 2}
    assert found.export("brat", tmp_path / "brat").losses == {CHANGED_LABELS: 3, TRIMMED: 1}
    assert OVERLAPPING in str(conll)
    assert conll.to_dict() == {"format": "conll", "notes": 3, "entities": 4, "losses": conll.losses}


def test_paths_and_formats_are_validated(found, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "note.txt").write_text("x")
    (tmp_path / "a").write_text("x")
    for call, *arguments in (
        (found.save, ""),
        (found.save, "notes.json"),
        (nb.read_annotations, "a"),
        (nb.read_annotations, "a", "brat"),
        (nb.read_annotations, "full", "conll"),
        (nb.read_annotations, "a", f"{MARKER} has HIV"),
    ):
        catch_rejection(partial(call, tmp_path / arguments[0], *arguments[1:]))
    for arguments in (
        ("jsonl", "a"),
        (f"{MARKER} has HIV", "a"),
        ("brat", "full"),
        ("brat", "a"),
        ("conll", "full"),
    ):
        catch_rejection(partial(found.export, arguments[0], tmp_path / arguments[1]))
    assert {file.name for file in tmp_path.iterdir()} == {"a", "full"}


def test_files_are_private_and_replaced_atomically(found, tmp_path):
    path = tmp_path / "notes.jsonl"
    path.write_text("earlier")
    tokens = make_annotations([[{"entity": "B-A", "score": 1.0, "index": 1, "start": 0, "end": 1}]], ["a"])
    with pytest.raises(ConfigurationError, match="tokens"):
        tokens.export("doccano", path)
    assert (path.read_text(), [*tmp_path.iterdir()]) == ("earlier", [path])

    found.save(path)
    (tmp_path / "empty").mkdir()
    paths = [path, *found.export("brat", tmp_path / "empty").path.iterdir()]
    assert {stat.S_IMODE(file.stat().st_mode) for file in paths} == {0o600}


@pytest.mark.parametrize("name", EXPORTS)
def test_ids_are_kept_and_not_shown(name, tmp_path):
    found = annotate([(MARKER, [(0, 5, "NAME")]), ("a", [])], ids=[f"{MARKER}/1", 17])
    report = export(found, name, tmp_path)
    gold = nb.read_annotations(report.path, predictions=True)
    assert [note.id for note in gold] == [f"{MARKER}/1", 17]
    assert MARKER not in f"{report} {report.to_dict()} {report._repr_html_()}"
    assert MARKER not in "".join(file.name for file in tmp_path.rglob("*"))
