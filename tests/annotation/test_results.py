"""Results of one text and of many: as a sequence, a table, JSON, text, HTML and counts."""

import json
import pickle
import re
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.annotations import annotate, make_annotations, make_entity, make_text
from helpers.html import read
from openmed_nb._render.display import to_text
from openmed_nb.annotation.annotated_notes import MAX_TABLE_ROWS, MAX_TEXT_CHARACTERS
from openmed_nb.annotation.masking import MAX_DISPLAYED_TEXTS
from openmed_nb.annotation.references import FileReference, text_fingerprint
from openmed_nb.annotation.storage import FingerprintedResult, ResultStore
from openmed_nb.errors import ConfigurationError, InvalidTextError, OpenMedWarning, PositionError

TEXT = "He has asthma and type 2 diabetes."
ASTHMA = make_entity(TEXT, "asthma")
DIABETES = make_entity(TEXT, "type 2 diabetes", score=0.5)


def read_page(result):
    """Return the page of a result without the labels of its entities."""
    return read(re.sub(r"<small[^>]*>.*?</small>", "", result._repr_html_(), flags=re.DOTALL))


def read_titles(page):
    return [element.attributes["title"] for element in page.elements if "title" in element.attributes]


@pytest.mark.parametrize(
    ("text", "entities", "marked"),
    [
        (TEXT, [], TEXT),
        (TEXT, [ASTHMA, DIABETES], "He has [asthma](DISEASE) and [type 2 diabetes](DISEASE)."),
        (TEXT, [DIABETES, ASTHMA], "He has [asthma](DISEASE) and [type 2 diabetes](DISEASE)."),
        (TEXT, [{"entity": "I-A", "score": 0.5, "word": "as", "start": 7, "end": 9}], "He has [as](I-A)thma"),
        (TEXT, [ASTHMA, make_entity(TEXT, " and", "OTHER")], "[asthma](DISEASE)[ and](OTHER)"),
        (
            TEXT,
            [DIABETES, make_entity(TEXT, "diabetes", "B"), make_entity(TEXT, "and type 2", "A")],
            "[[and [type 2](DISEASE)](A) [diabetes](B)](DISEASE).",
        ),
        ("A\n\n\ttype 2\n  diabetes $5", [{**ASTHMA, "start": 4, "end": 21}], "[type 2\n  diabetes](DISEASE) $5"),
        ("<i>x</i> & y", [{**ASTHMA, "entity_group": "<b>", "start": 0, "end": 9}], "[<i>x</i> ](<b>)& y"),
    ],
)
def test_text_and_page_mark_each_entity(text, entities, marked):
    result = make_text(text, *entities)
    page = read_page(result)

    assert list(result) == entities
    assert str(result).startswith(("1 ", "2 ", "3 ") if entities else "No entities found\n")
    assert "white-space:pre-wrap" in result._repr_html_()
    assert "tex2jax_ignore" in result._repr_html_()
    assert text in page.text
    if len(entities) < 3:
        assert len(read_titles(page)) >= len(entities)
        assert marked in str(result)
    else:  # Overlapping entities are in brackets with their labels.
        assert {"A", "B", "DISEASE"} == {*re.findall(r"\]\((\w+)\)", str(result))}


def test_mark_has_score_and_characters():
    result = make_text(TEXT, ASTHMA)
    assert read_titles(read_page(result)) == ["DISEASE 0.875, characters 7 to 13"]
    assert '<span style="font-size:0"> 0.875</span>' in result._repr_html_()
    assert str(result).splitlines()[-1].split() == ["DISEASE", "0.88", "7-13", "asthma"]
    assert json.loads(json.dumps(result.to_dict())) == {
        "text": TEXT,
        "entities": [ASTHMA],
        "model": "bundled",
        "device": "cpu",
    }


def test_many_overlapping_entities_are_shown_in_linear_time():
    chain = [{**ASTHMA, "entity_group": "DRUG", "start": 4 * n, "end": 4 * n + 6} for n in range(3000)]
    nested = [{**ASTHMA, "entity_group": "DOSE", "start": n, "end": 13_000 - n} for n in range(100)]
    result = make_text("abcd" * 3500, *chain, *nested)
    start = time.perf_counter()
    page = result._repr_html_()
    text = to_text(result.to_report())
    assert time.perf_counter() - start < 8
    assert page.count(">DRUG<span") == text.count("](DRUG)") == 3000
    assert page.count(">DOSE<span") == text.count("](DOSE)") == 100


@pytest.mark.parametrize("length", [100_000, 100_001])
def test_long_text_is_shown_up_to_a_hundred_thousand_characters(length):
    text = ("asthma " + "x " * length)[:length]
    found = make_text(text, ASTHMA, {**ASTHMA, "start": length - 4, "end": length})
    for shown in (found, found.mask()):
        assert len(shown._repr_html_()) < 110_000
        assert ("Displayed: the first 100,000" in str(shown)) == (len(shown.text) > 100_000)


TEXTS = ("He has asthma.", "No complaints.", "", "Type 2 diabetes and asthma.")
FAILURE = "Text 2 must be a string, not NoneType. Pass a string."
RESULTS = (
    [make_entity(TEXTS[0], "asthma")],
    [],
    FAILURE,
    [make_entity(TEXTS[3], "Type 2 diabetes", score=0.5), make_entity(TEXTS[3], "asthma")],
)


@pytest.fixture
def found():
    """Annotations of four texts, of which the third failed."""
    return make_annotations(RESULTS, TEXTS)


def test_table_has_numbers_and_keeps_its_columns_without_entities(found):
    frame = found.to_frame()
    assert list(frame.columns) == ["note_index", "entity_group", "score", "word", "span_text", "start", "end"]
    assert frame["note_index"].tolist() == [0, 3, 3]
    assert frame["span_text"].tolist() == ["asthma", "Type 2 diabetes", "asthma"]
    numeric = ["note_index", "score", "start", "end"]
    assert [dtype.kind for dtype in frame[numeric].dtypes] == ["i", "f", "i", "i"]
    for results in ((), ([], []), ("an error",)):
        empty = make_annotations(results, ("",) * len(results)).to_frame()
        assert len(empty) == 0
        assert list(empty.columns) == list(frame.columns)
        assert empty[numeric].dtypes.tolist() == frame[numeric].dtypes.tolist()


def test_json_has_the_entities_or_the_error_of_each_text(found):
    texts = [{"error": result} if isinstance(result, str) else {"entities": result} for result in RESULTS]
    expected = {"model": "bundled", "device": "cpu", "texts": texts}
    assert json.loads(found.to_json()) == found.to_dict() == expected
    assert "ménière" in make_text("Ménière", make_entity("Ménière", "Ménière")).found.to_json()


def test_text_of_many_has_counts_marked_texts_and_errors(found):
    assert str(found) == (
        "3 mentions of diseases found in 4 notes\n"
        "  Model: bundled, device: cpu\n"
        "  1 note has text but no entities.\n"
        "  1 note could not be read.\n"
        "0: He has [asthma](DISEASE).\n"
        "1: No complaints.\n"
        "2: (error)\n"
        "3: [Type 2 diabetes](DISEASE) and [asthma](DISEASE).\n"
        "Labels: DISEASE (3 entities)\n"
        "Notes with errors\n"
        "  note  error\n"
        f"  2     {FAILURE}"
    )
    page = found._repr_html_()
    assert re.findall(r'<div dir="auto" style="[^"]*border-top[^"]*">(\d): ', page) == ["0", "1", "2", "3"]
    assert str(make_annotations(())) == "No entities found in 0 notes\n  Model: bundled, device: cpu"
    assert "\x1b" not in str(make_annotations([[]], ["\x1b[2Jnote"]))


def test_only_the_first_texts_and_their_starts_are_shown():
    long = "He has asthma. " + "word " * MAX_TEXT_CHARACTERS + "And pain."
    texts = [long, *(f"note {number}" for number in range(1, 10_000))]
    results = [[make_entity(long, "asthma"), make_entity(long, "pain")]] + [[]] * 9_000 + ["an error"] * 999
    many = make_annotations(results, texts)
    for shown in (str(many), many._repr_html_()):
        assert f"Showing {MAX_DISPLAYED_TEXTS} of 10,000 notes." in shown
        assert f"note {MAX_DISPLAYED_TEXTS - 1}" in shown
        assert f"note {MAX_DISPLAYED_TEXTS}" not in shown
        assert "…" in shown
        assert "And pain" not in shown
        assert len(shown) < MAX_TEXT_CHARACTERS + 6000
    assert "[asthma](DISEASE)" in str(many)


def test_only_notes_that_a_filter_leaves_are_shown():
    texts = [f"note {number}" for number in range(10)]
    results = [[make_entity(text, "note", score=number / 9)] for number, text in enumerate(texts)]
    many = make_annotations(results, texts).filter(min_score=0.3)
    assert re.findall(r"\n(\d): ", str(many)) == [*"34567"]
    assert re.findall(r"\n(\d): ", str(replace(many, texts=None))) == [*"34"]
    assert "Showing 5 of 7 notes with entities. Use found.at(8)" in str(many)


def test_texts_that_are_not_stored_name_what_shows_one(found):
    files = replace(found, preview_texts=(), texts=[Path("a.txt")] * 4)
    assert "Showing 0 of 4 notes. Use found.at(0) to see another one." in str(files)
    assert "found.at" not in str(replace(files, show_text=False)) + str(replace(files, texts=None)) + str(found)


@given(st.integers(0, 30), st.integers(1, 40))
def test_entity_at_the_end_of_what_is_shown_is_marked_whole_or_not(before, length):
    start = MAX_TEXT_CHARACTERS - before
    text = "x" * (start + length + 1)
    entity = {"entity_group": "D", "score": 0.5, "start": start, "end": start + length}
    assert ("](D)" in str(make_annotations([[entity]], [text]))) == (length <= before)


def test_hidden_texts_are_in_no_form(found):
    hidden = replace(found, show_text=False)
    summary = hidden.summary()
    one = hidden.show(0)
    forms = [str(hidden), hidden._repr_html_(), str(summary), summary._repr_html_(), json.dumps(summary.to_dict())]
    for shown in [*forms, str(one), one._repr_html_(), repr(one)]:
        assert not any(word in shown for word in ("asthma", "diabetes", "He has", "complaints"))
    assert "(text hidden)" in str(hidden)
    assert FAILURE in str(hidden)
    assert "7-13" in str(one)
    assert "<table" in one._repr_html_()


def test_one_of_many_is_read_again_or_refused():
    texts = list(TEXTS)
    many = replace(make_annotations([[], [], FAILURE, RESULTS[3]], texts), preview_texts=(TEXTS[0],))
    assert many.texts is texts
    assert (many.show(3).text, list(many.show(3))) == (TEXTS[3], RESULTS[3])
    assert many.show(0).text == TEXTS[0]
    with pytest.raises(PositionError, match=r"^0\.5 is not"):
        many[0.5]
    for position in (4, -1, 1.0, True):
        with pytest.raises(ConfigurationError, match=r"Invalid value for position: .*\. Pass .* from 0 to 3\."):
            many.show(position)
    with pytest.raises(InvalidTextError, match="Text 2 must be a string"):
        many.show(2)
    texts[3] = "She has no asthma."
    with pytest.raises(ConfigurationError, match="Text 3 has changed"):
        many.show(3)
    del texts[3]
    with pytest.raises(ConfigurationError, match="Text 3 has changed"):
        many.show(3)
    with pytest.raises(ConfigurationError, match="only the first 1 were stored"):
        replace(many, texts=None).show(3)
    with pytest.raises(ConfigurationError, match="Invalid value for position"):
        make_annotations(()).at(0)


MIXED_TEXT = "asthma drug"
MIXED = (
    [make_entity(MIXED_TEXT, "asthma", "DISEASE", 0.9), make_entity(MIXED_TEXT, "drug", "DRUG", 0.4)],
    FAILURE,
    [make_entity(MIXED_TEXT, "drug", "DRUG", 0.8)],
)
TOKENS = [
    {"entity": "B-D", "score": 0.5, "index": 3, "word": "as", "start": 7, "end": 9},
    {"entity": "I-D", "score": 0.5, "index": 4, "word": "##thma", "start": 9, "end": 13},
]


@pytest.mark.parametrize(
    ("labels", "score", "words"),
    [
        ((), 0.0, [["asthma", "drug"], [], ["drug"]]),
        (("disease",), 0.0, [["asthma"], [], []]),
        (("B-Disease",), 0.0, [["asthma"], [], []]),
        (("Drug",), 0.5, [[], [], ["drug"]]),
        (("DRUG", "DISEASE"), 0.8, [["asthma"], [], ["drug"]]),
        ((), 0.95, [[], [], []]),
    ],
)
def test_filter_selects_labels_and_scores(labels, score, words):
    many = make_annotations(MIXED, (MIXED_TEXT, "", MIXED_TEXT))
    filtered = many.filter(*labels, min_score=score)
    assert [[entity["word"] for entity in entities] for entities in filtered] == words
    assert filtered.errors == {1: FAILURE}
    assert filtered.to_frame()["word"].tolist() == [word for text_words in words for word in text_words]
    assert [len(entities) for entities in many] == [2, 0, 1]
    tokens = make_text(TEXT, *TOKENS)
    assert list(tokens.filter("b-d")) == TOKENS[:1]
    assert list(tokens.filter("d")) == TOKENS


def test_filters_are_reported_and_unknown_labels_are_rejected_or_a_warning():
    many = make_annotations(MIXED, (MIXED_TEXT,))
    filtered = many.filter("drug", "disease").filter(min_score=0.5)
    for shown in (filtered, filtered.summary()):
        assert "  Filter: label drug or disease.\n  Filter: score of at least 0.5.\n" in str(shown)
    with pytest.warns(OpenMedWarning, match="Did you mean 'disease'"):
        assert list(many.filter("diseas")) == [[], [], []]
    with pytest.raises(ConfigurationError, match="Labels: disease, drug"):
        replace(many, known_labels=("DISEASE",)).filter("diseas")
    assert list(make_annotations([[]], ["x"]).filter("disease")) == [[]]


@pytest.mark.parametrize(
    ("labels", "options"),
    [
        ((5,), {}),
        *(((), {"min_score": score}) for score in (2, -0.1, "high", 10**400)),
        ((), {"score": 0.9}),
    ],
)
def test_filter_rejects_invalid_arguments(labels, options):
    with pytest.raises(ConfigurationError, match=r"label|min_score"):
        make_annotations(MIXED).filter(*labels, **options)


NUMBERS = st.integers(0, 2**32 - 1)
COMMON = {"score": st.floats(0, 1), "word": st.text(max_size=6), "start": NUMBERS, "end": NUMBERS}
ENTITIES = st.fixed_dictionaries({"entity_group": st.text(max_size=4), **COMMON})
INDEXED = st.fixed_dictionaries({"entity": st.text(max_size=4), "index": NUMBERS, **COMMON})
ANY_RESULTS = st.one_of(
    st.lists(st.one_of(st.text(max_size=8), st.lists(kind, max_size=4)), max_size=8) for kind in (ENTITIES, INDEXED)
)
KEYS = {("entity_group", "score", "word", "start", "end"), ("entity", "score", "index", "word", "start", "end")}


def make_store(results):
    """Return results as a store; the fingerprint of each is its number."""
    store = ResultStore()
    for number, result in enumerate(results):
        store.add(number, result)
    return store


@given(ANY_RESULTS, st.slices(8), st.data())
def test_store_is_a_list_of_results(results, part, data):
    store = make_store(results)
    expected = [[] if isinstance(result, str) else result for result in results]

    assert list(store.items()) == [FingerprintedResult(number, result) for number, result in enumerate(results)]
    assert store.errors == {number: result for number, result in enumerate(results) if isinstance(result, str)}
    assert {tuple(entity) for entities in store for entity in entities} <= KEYS
    assert (len(store), list(store), store[part]) == (len(expected), expected, expected[part])
    assert [store[number] for number in range(-len(expected), 0)] == expected
    table = {name: column.tolist() for name, column in store.columns().items()}
    rows = [dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True)]
    assert rows == [{"note_index": number, **entity} for number, entities in enumerate(store) for entity in entities]

    taken = data.draw(st.lists(st.integers(0, len(store) - 1), max_size=5)) if len(store) else []
    selected = store.take(taken)
    assert list(selected) == [expected[number] for number in taken]
    assert list(selected.fingerprints) == taken
    assert {*selected.errors.values()} == {results[number] for number in taken if isinstance(results[number], str)}
    chunk = ResultStore.from_results(expected, store.key)
    store.extend(range(len(expected)), chunk)
    assert list(store) == expected + expected


def test_store_is_small_and_survives_an_interrupted_addition():
    """An entity takes 32 bytes, and a text 16. Words are stored once."""
    store = make_store([[ASTHMA, ASTHMA]] * 50_000)
    columns = (*store._numbers.values(), store.labels, store.words, store._text_offsets, store.fingerprints)
    assert sum(map(sys.getsizeof, columns)) < 1.15 * (32 * 100_000 + 16 * 50_000)
    assert store[0][0]["word"] is store[1][0]["word"]
    store[0][0]["word"] = "changed"
    assert store[0][0] == ASTHMA
    with pytest.raises(IndexError):
        store[50_000]
    with pytest.raises(KeyError):
        store.add(2, [ASTHMA, {"entity_group": "DISEASE", "word": "pain"}])
    assert len(store) == 50_000
    assert {len(column) for column in store.columns().values()} == {100_000}


@pytest.mark.parametrize(
    ("text", "other", "is_same"),
    [
        ("asthma", np.str_("asthma"), True),
        (None, float("nan"), True),
        (2.5, 1.5, True),
        ("asthma", "asthma ", False),
        (None, 1, False),
        ("NoneType", None, False),
        ("\ud800", "\udfff", False),
        ("é", "e\u0301", False),
    ],
    ids=ascii,
)
def test_fingerprint_is_that_of_equal_texts(text, other, is_same):
    assert (text_fingerprint(text) == text_fingerprint(other)) == is_same


WORDS = st.lists(st.tuples(st.sampled_from("AB"), st.sampled_from(["Asthma", "asthma", "pain"])), max_size=4)


def summarize(results, **options):
    """Return the summary of results, each an error or pairs of label and word."""
    entities = [
        result
        if isinstance(result, str)
        else [{**ASTHMA, "entity_group": label, "word": word} for label, word in result]
        for result in results
    ]
    return make_annotations(entities, model="m", **options).summary()


@given(st.lists(st.one_of(st.just("an error"), WORDS), max_size=8), st.booleans())
def test_summary_counts_texts_labels_and_words(results, show_text):
    summary = summarize(results, show_text=show_text)
    pairs = [pair for result in results if not isinstance(result, str) for pair in result]

    assert (summary.texts, summary.texts_without_entities) == (len(results), results.count([]))
    assert [*summary.errors] == [number for number, result in enumerate(results) if result == "an error"]
    assert summary.labels == Counter(label for label, _word in pairs)
    words = Counter(word.lower() for _label, word in pairs) if show_text else {}
    assert [*summary.words.items()] == sorted(words.items(), key=lambda pair: (-pair[1], pair[0]))


def test_summary_counts_the_text_of_the_note_if_it_is_in_memory():
    texts = ["Crohn's\n disease", "CROHN\u2019S DISEASE"]
    found = make_annotations([[{**ASTHMA, "start": 0, "end": len(text)}] for text in texts], texts)
    assert found.summary().words == {"crohn's disease": 2}
    for unread in (None, [FileReference("", 1, 1)]):
        assert replace(found, texts=unread).summary().words == {"asthma": 2}


def test_summary_shows_counts_and_the_first_rows():
    summary = summarize([[("A", "Asthma"), ("B", "pain")], [], "why it failed", [("A", "asthma")]], seconds=0.42)
    assert str(summary) == (
        "3 entities found in 4 notes\n"
        "  Model: m, device: cpu, 0.4 s\n"
        "  1 note has text but no entities.\n"
        "  1 note could not be read.\n"
        "Notes with errors\n"
        "  note  error\n"
        "  2     why it failed\n"
        "Entities by label\n"
        "  label  count\n"
        "  A      2\n"
        "  B      1\n"
        "Most frequent entities\n"
        "  text    count\n"
        "  asthma  2\n"
        "  pain    1"
    )
    assert "device: cpu, 0.4 s" in read_page(summary).text
    data = json.loads(json.dumps(summary.to_dict()))
    assert (data["labels"], data["errors"], data["texts"]) == ({"A": 2, "B": 1}, {"2": "why it failed"}, 4)
    assert "seconds" not in data
    many = summarize(["failed"] * 50 + [[("A", f"word {number:02}") for number in range(50)]])
    assert (len(many.words), len(many.errors)) == (50, 50)
    assert str(many).count("\n  word ") == str(many).count("failed") == MAX_TABLE_ROWS
    assert "<table" not in summarize([[("DISEASE", "x")]], show_text=False)._repr_html_()


def test_completion_lists_documented_names_of_annotations(found):
    names = [name for name in dir(found) if not name.startswith("_")]
    pages = (Path(__file__).parents[2] / "docs").rglob("*.md")
    text = "\n".join(page.read_text("utf-8") for page in pages)
    assert len(names) <= 22
    assert [name for name in names if not hasattr(found, name) or not re.search(rf"\.{name}\b|`{name}`", text)] == []


def test_saved_page_has_all_notes_escaped_and_needs_no_network(tmp_path):
    notes = ["<script>x</script> no asthma", None, "today " * 3000 + "asthma"]
    found = annotate(notes, ids=["<a>", "b", "c"])
    found.with_context().save(tmp_path / "notes.html")
    page = (tmp_path / "notes.html").read_text("utf-8")
    assert not any(part in page for part in ("<script", "<a>", "http"))
    assert "DISEASE, negated" in page
    assert "(missing)" in page
    assert page.count("<article>") == 3
    assert page.count("today ") == 3000
    replace(found, show_text=False).save(tmp_path / "notes.html")
    assert "asthma" not in (tmp_path / "notes.html").read_text("utf-8")


def test_results_are_pickled_with_their_texts(found):
    copied = pickle.loads(pickle.dumps(found))  # noqa: S301 - of the test's own
    assert (list(copied), str(copied), copied.preview_texts) == (list(found), str(found), TEXTS)
