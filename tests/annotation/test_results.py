"""What was found, in one text and in many: as a sequence, as a table, as JSON, as text, as HTML and as counts."""

import json
import re
import sys
import time
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

import openmed_nb as nb
from openmed_nb._render.display import to_text
from openmed_nb.annotation.masking import MAX_DISPLAYED_TEXTS
from openmed_nb.annotation.references import text_fingerprint
from openmed_nb.annotation.results import (
    MAX_TABLE_ROWS,
    MAX_TEXT_CHARACTERS,
    AnnotatedText,
    Annotations,
    FingerprintedResult,
    ResultStore,
    Summary,
)
from openmed_nb.errors import ConfigurationError, InvalidTextError, OpenMedWarning

TEXT = "He has asthma and type 2 diabetes."


def placed(start, end, name="DISEASE", score=0.9, key="entity_group"):
    """Return an entity as transformers gives it."""
    return {key: name, "score": np.float32(score), "word": TEXT[start:end], "start": start, "end": end}


def one_text(*entities, text=TEXT, show_text=True):
    """Return the annotated text of a model."""
    return AnnotatedText(text, entities, "bundled", "cpu", show_text)


class Marks(HTMLParser):
    """Reads the text of a page without the labels in it, and the marks of entities."""

    def __init__(self, page):
        super().__init__()
        self.text, self.marks, self.tags = "", [], []
        self.feed(re.sub(r"<small[^>]*>.*?</small>", "", page, flags=re.DOTALL))

    def handle_starttag(self, tag, attributes):
        """Note the tag, and the attributes of a mark in the text; those of the legend have no title."""
        self.tags.append(tag)
        if tag == "mark" and "title" in dict(attributes):
            self.marks.append(dict(attributes))

    def handle_data(self, data):
        """Collect the text."""
        self.text += data


ASTHMA, DIABETES = placed(7, 13), placed(18, 33, score=0.5)


@pytest.mark.parametrize("place", [2**16 - 1, 2**16, 2**32 - 1, 2**32, 2**40])
def test_places_of_any_size(place):
    """Places of entities are kept, however long a text is, and those before them too."""
    answers = ResultStore()
    entities = [
        [{"entity_group": "DISEASE", "score": 0.5, "word": "flu", "start": start, "end": start + 3}]
        for start in (0, place)
    ]
    for entity in entities:
        answers.add(1, entity)
    assert list(answers) == entities


class TestOneText:
    """It is the sequence of entities that the pipeline gave."""

    def test_length_items_and_iteration(self):
        """It counts, indexes, slices and iterates like the list of entities."""
        found = one_text(ASTHMA, DIABETES)
        assert len(found) == 2
        assert found[0] is ASTHMA
        assert found[-1:] == (DIABETES,)
        assert list(found) == [ASTHMA, DIABETES]
        assert DIABETES in found

    def test_report_without_entities(self):
        found = one_text()
        assert not found
        assert str(found) == f"No entities found\n  Model: bundled, device: cpu\n{TEXT}"
        assert str(replace(found, known_labels=("DISEASE",))).startswith("No diseases found\n")
        assert TEXT in found._repr_html_()

    def test_labels(self):
        """The labels are sorted, each once, with and without joined tokens."""
        found = one_text(placed(0, 2, "B"), placed(3, 6, "A"), placed(7, 13, "B"), placed(18, 22, "I-A", key="entity"))
        assert {piece.label for piece in found.to_report().segments if piece.label} == {"A", "B", "I-A"}

    @pytest.mark.parametrize("name", ["", " "])
    def test_label_without_a_name(self, name):
        """An entity whose label has no name, as that of ``B-``, is marked too."""
        found = one_text(placed(7, 13, name))
        assert "He has [asthma](no label) and" in str(found)
        assert "Labels: no label (1 entity)" in str(found)
        assert [mark["title"] for mark in Marks(found._repr_html_()).marks] == ["no label 0.900, characters 7 to 13"]


class TestPlainValuesOfOneText:
    """Values for JSON."""

    def test_survives_json(self):
        """The mapping is JSON-compatible, and the entities are not modified."""
        found = one_text(ASTHMA)
        value = json.loads(json.dumps(found.to_dict()))
        expected = {"entity_group": "DISEASE", "score": pytest.approx(0.9), "word": "asthma", "start": 7, "end": 13}
        assert value == {"text": TEXT, "entities": [expected], "model": "bundled", "device": "cpu"}
        assert isinstance(found[0]["score"], np.float32)


class TestTextOfOneText:
    """The plain text form."""

    def test_line_ends_stay_in_the_text_and_not_in_the_table(self):
        """The text keeps its lines; an entity over two lines is one row of the table."""
        found = one_text(placed(4, 21), text="A\n\n\ttype 2\n  diabetes\n")
        assert "[type 2\n  diabetes](DISEASE)" in str(found)
        assert str(found).splitlines()[-1].endswith("  type 2 diabetes")


class TestHtmlOfOneText:
    """The HTML form."""

    def test_marks_entities_in_the_text(self):
        """Every entity is marked, with label, score and place on hover, and the text is whole."""
        page = Marks(one_text(ASTHMA, DIABETES)._repr_html_())
        assert TEXT in page.text
        assert [mark["title"] for mark in page.marks] == [
            "DISEASE 0.900, characters 7 to 13",
            "DISEASE 0.500, characters 18 to 33",
        ]

    def test_html_has_scores_without_table(self):
        """Each mark has its score as text for screen readers, of no size; the text form alone has the table."""
        page = one_text(ASTHMA)._repr_html_()
        assert 'DISEASE<span style="font-size:0"> 0.900</span></small></mark>' in page
        assert "<table" not in page
        assert "<table" in one_text(ASTHMA, show_text=False)._repr_html_()

    def test_text_is_shown_as_it_is(self):
        """White space is kept, and MathJax ignores dollar signs."""
        page = one_text(text="one\n\n  two\tthree for $5 and $6")._repr_html_()
        assert "white-space:pre-wrap" in page
        assert 'class="openmed-nb tex2jax_ignore"' in page
        assert "one\n\n  two\tthree for $5 and $6" in page


class TestOverlaps:
    """Entities that overlap, touch, are empty, or come in any order."""

    def test_nested_and_crossing_entities_are_all_marked(self):
        """A reader of the text sees each entity; earlier, all but the first were in the table only."""
        found = one_text(placed(18, 33), placed(25, 33, "DIABETES"), placed(14, 24, "OTHER"))
        assert "[and [type 2](OTHER) [diabetes](DIABETES)](DISEASE)." in str(found)
        assert "Labels: DIABETES (1 entity), DISEASE (1 entity), OTHER (1 entity)" in str(found)

    def test_layers_of_the_page_keep_the_text_and_name_each_label(self):
        found = one_text(placed(18, 33), placed(25, 33, "DIABETES"), placed(14, 24, "OTHER"))
        page = found._repr_html_()
        assert TEXT in Marks(page).text
        for label in ("DISEASE", "DIABETES", "OTHER"):
            assert page.count(f">{label}<span") == 1
        # The line of the entity in the second layer is below that of the first.
        assert "padding-bottom:0px" in page
        assert "padding-bottom:5px" in page

    def test_many_overlapping_entities_are_shown_in_linear_time(self):
        chain = [placed(4 * number, 4 * number + 6, "DRUG") for number in range(9000)]
        nested = [placed(number, 40_000 - number, "DOSE") for number in range(300)]
        found = one_text(*chain, *nested, text="abcd" * 10_000)
        start = time.perf_counter()
        page = found._repr_html_()
        text = to_text(found.to_report())
        assert time.perf_counter() - start < 8
        assert len(page) < 40_000_000
        assert page.count(">DRUG<span") == text.count("](DRUG)") == 9000
        assert page.count(">DOSE<span") == text.count("](DOSE)") == 300

    def test_layers_are_escaped(self):
        found = one_text(placed(0, 9, "<b>"), placed(4, 9, "&"), text="<i>x</i> & y")
        page = found._repr_html_()
        assert "<i>" not in page
        assert "<b>" not in page

    def test_neighbours_are_both_marked(self):
        """Two entities without a character between them are two marks."""
        assert "[asthma](DISEASE)[ and](OTHER)" in str(one_text(placed(13, 17, "OTHER"), ASTHMA))


class TestOneHiddenText:
    """A result that may not show the text."""

    def test_shows_neither_text_nor_words(self):
        """Labels, scores and places are shown, and no word of the text, in no form."""
        found = one_text(ASTHMA, DIABETES, show_text=False)
        for shown in (str(found), repr(found), found._repr_html_()):
            assert "DISEASE" in shown
            assert not any(word in shown for word in ("asthma", "diabetes", "He has"))
        assert "7-13" in str(found)
        assert "(text hidden)" in str(found)


TEXTS = ("He has asthma.", "No complaints.", "", "Type 2 diabetes and asthma.")
FAILURE = "Text 2 must be a string, not NoneType. Pass a string."


def entity(text, word, name="DISEASE", score=0.875):
    """Return the entity of a word in a text."""
    start = text.index(word)
    return {"entity_group": name, "score": score, "word": word.lower(), "start": start, "end": start + len(word)}


def annotations(answers, texts, show_text=True, model="bundled"):
    """Return answers as annotations."""
    return Annotations(held(answers), tuple(texts)[:MAX_DISPLAYED_TEXTS], model, "cpu", show_text)


def held(answers):
    """Return answers as columns; the fingerprint of each is its number."""
    columns = ResultStore()
    for number, answer in enumerate(answers):
        columns.add(number, answer)
    return columns


ANSWERS = (
    [entity(TEXTS[0], "asthma")],
    [],
    FAILURE,
    [entity(TEXTS[3], "Type 2 diabetes", score=0.5), entity(TEXTS[3], "asthma")],
)
TOKENS = [
    {"entity": "B-D", "score": 0.5, "index": 3, "word": "as", "start": 7, "end": 9},
    {"entity": "I-D", "score": 0.5, "index": 4, "word": "##thma", "start": 9, "end": 13},
]


def found(show_text=True):
    """Return annotations of the four texts, the third without an answer."""
    return annotations(ANSWERS, TEXTS, show_text)


class TestManyTexts:
    """It is a sequence with a list for each text."""

    def test_items_are_lists_of_entities(self):
        """It counts, indexes from both ends, slices and iterates like the list of lists that a pipeline returns."""
        expected = [[] if isinstance(answer, str) else answer for answer in ANSWERS]
        assert len(found()) == 4
        assert list(found()) == found()[:] == expected
        assert found()[-1] == expected[3]
        assert found()[1:3] == [[], []]
        assert found().index(expected[3]) == 3
        assert not annotations((), ())


class TestTable:
    """The table with a row for each entity."""

    def test_columns_and_types(self):
        """There is a row for each entity, with numbers as numbers."""
        frame = found().to_frame()
        assert list(frame.columns) == ["note_index", "entity_group", "score", "word", "span_text", "start", "end"]
        assert frame["note_index"].tolist() == [0, 3, 3]
        assert frame["word"].tolist() == ["asthma", "type 2 diabetes", "asthma"]
        assert frame["score"].mean() == pytest.approx(0.75)
        kinds = {name: frame[name].dtype.kind for name in ("note_index", "score", "start", "end")}
        assert kinds == {"note_index": "i", "score": "f", "start": "i", "end": "i"}

    @pytest.mark.parametrize("answers", [(), ([], []), ("an error",)], ids=["no text", "no entity", "error"])
    def test_frame_without_entities_keeps_columns(self, answers):
        """The columns have the same dtypes as those of a frame with rows."""
        frame = annotations(answers, ("",) * len(answers)).to_frame()
        assert len(frame) == 0
        assert list(frame.columns) == list(found().to_frame().columns)
        numeric = ["note_index", "score", "start", "end"]
        assert frame[numeric].dtypes.tolist() == found().to_frame()[numeric].dtypes.tolist()


class TestPlainValuesOfManyTexts:
    """Values for JSON."""

    def test_survives_json(self):
        """JSON has model and device, and for each text in order its entities or its error."""
        value = json.loads(found().to_json())
        texts = [{"error": answer} if isinstance(answer, str) else {"entities": answer} for answer in ANSWERS]
        assert value == found().to_dict() == {"model": "bundled", "device": "cpu", "texts": texts}

    def test_letters_stay_readable(self):
        """Non-ASCII characters are not escaped."""
        text = "Ménière"
        assert "ménière" in annotations([[entity(text, text)]], [text]).to_json()


class TestManyTextsShown:
    """The text and HTML forms."""

    def test_text_form(self):
        """Counts come first, then the first texts with their entities marked, then what failed."""
        assert repr(found()) == str(found())
        assert found()._repr_html_() == found()._repr_html_()
        assert str(found()) == (
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

    def test_report_of_no_texts_has_two_lines(self):
        assert str(annotations((), ())) == "No entities found in 0 notes\n  Model: bundled, device: cpu"
        assert "0 notes" in annotations((), ())._repr_html_()

    def test_only_the_first_texts_are_shown(self):
        texts = [f"note {number} asthma" for number in range(20)]
        many = annotations([[entity(text, "asthma")] for text in texts], texts)
        for shown in (str(many), many._repr_html_()):
            assert f"Showing {MAX_DISPLAYED_TEXTS} of 20 notes." in shown
            assert f"note {MAX_DISPLAYED_TEXTS - 1} " in shown
            assert f"note {MAX_DISPLAYED_TEXTS} " not in shown

    def test_files_name_what_shows_one(self):
        """Texts of files are not stored. The HTML explains how to display one, unless texts are hidden."""
        files = replace(found(), preview_texts=(), texts=[Path("a.txt")] * 4)
        assert "found.show(0)" in files._repr_html_()
        assert "Showing 0" not in files._repr_html_()
        assert "found.show" not in replace(files, show_text=False)._repr_html_() + found()._repr_html_()

    def test_texts_stand_apart(self):
        """Each text is a separate HTML element with its own text direction."""
        page = found()._repr_html_()
        assert re.findall(r'<div dir="auto" style="[^"]*border-top[^"]*">(\d): ', page) == ["0", "1", "2", "3"]

    def test_ten_thousand_texts_are_shown_in_a_few_lines(self):
        """The report of 10,000 texts, including 1,000 failed texts, has a few lines."""
        answers = ["an error" if number % 10 == 9 else [entity("asthma", "asthma")] for number in range(10_000)]
        many = annotations(answers, ["asthma"] * MAX_DISPLAYED_TEXTS)
        assert str(many).startswith("9,000 mentions of diseases found in 10,000 notes")
        assert len(str(many)) < 1500
        assert len(many._repr_html_()) < 6000

    def test_long_text_is_shortened(self):
        """Only the start of a very long text is displayed, followed by an ellipsis."""
        text = "He has asthma. " + "word " * MAX_TEXT_CHARACTERS + "And pain."
        long = annotations([[entity(text, "asthma"), entity(text, "pain")]], [text])
        for shown in (str(long), long._repr_html_()):
            assert "asthma" in shown
            assert "…" in shown
            assert "And pain" not in shown
        assert len(str(long)) < MAX_TEXT_CHARACTERS + 300
        assert "[asthma](DISEASE)" in str(long)

    @given(some.integers(0, 30), some.integers(1, 40))
    def test_entity_at_the_edge_of_what_is_shown(self, before, length):
        """An entity is marked where all of it is shown, and shortening never fails."""
        start = MAX_TEXT_CHARACTERS - before
        text = "x" * (start + length + 1)
        one = {"entity_group": "D", "score": 0.5, "word": "x", "start": start, "end": start + length}
        assert ("](D)" in str(annotations([[one]], [text]))) == (length <= before)

    def test_control_characters_cannot_steer_a_terminal(self):
        """A control character of a text is shown as a picture."""
        assert "\x1b" not in str(annotations([[]], ["\x1b[2Jnote"]))


def rereadable(texts, kept=1, settings=None):
    """Return annotations of texts that can be read again. Only the first texts are stored."""
    columns = ResultStore()
    for text in texts:
        columns.add(text_fingerprint(text), [entity(text, "asthma")] if "asthma" in text else [])
    return Annotations(columns, tuple(texts[:kept]), "bundled", "cpu", settings=settings or {}, texts=texts)


class TestOneOfMany:
    """One of the texts, shown alone."""

    @pytest.mark.parametrize("number", [0, 1, 3])
    def test_a_text_with_its_entities(self, number):
        """It is the text as it was passed, kept or read again, with its own entities."""
        shown = rereadable(TEXTS).show(number)
        assert (shown.text, list(shown)) == (TEXTS[number], rereadable(TEXTS)[number])
        assert (shown.model, shown.device) == ("bundled", "cpu")

    def test_annotations_do_not_copy_texts(self):
        texts = list(TEXTS)
        assert rereadable(texts).texts is texts

    def test_a_hidden_text(self):
        """Hidden results display the offsets of entities, but no text."""
        assert "asthma" not in str(found(show_text=False).show(0))

    @pytest.mark.parametrize("number", [4, -1, 1.0, True])
    def test_a_number_that_no_text_has(self, number):
        """Any other number is refused, with those that there are."""
        with pytest.raises(ConfigurationError, match=r"Invalid value for position: .*\. Pass .* from 0 to 3\."):
            rereadable(TEXTS).show(number)

    def test_a_text_without_an_answer(self):
        """Its reason is the error."""
        with pytest.raises(InvalidTextError, match="Text 2 must be a string"):
            found().show(2)

    def test_a_text_that_has_changed(self):
        """Where the text is another one by now, nothing is marked in it."""
        texts = list(TEXTS)
        many = rereadable(texts)
        texts[3] = "She has no asthma."
        with pytest.raises(
            ConfigurationError, match=r"Text 3 has changed since it was annotated\. Annotate the text again"
        ):
            many.show(3)
        del texts[3]
        with pytest.raises(ConfigurationError, match="Text 3 has changed"):
            many.show(3)

    def test_a_stream_is_gone(self):
        """Of a generator only the first texts are there."""
        with pytest.raises(ConfigurationError, match=r"came from a generator; only the first 1 were stored"):
            annotations(ANSWERS, TEXTS[:1]).show(3)

    def test_no_text_at_all(self):
        """Of no text none is shown."""
        with pytest.raises(ConfigurationError, match="There are no texts"):
            annotations((), ()).show(0)


MIXED = (
    [entity("asthma drug", "asthma", "DISEASE", 0.9), entity("asthma drug", "drug", "DRUG", 0.4)],
    FAILURE,
    [entity("asthma drug", "drug", "DRUG", 0.8)],
)


class TestSomeOfTheEntities:
    """Entities of some labels or scores alone."""

    @pytest.mark.parametrize(
        ("labels", "score", "words"),
        [
            ((), 0.0, [["asthma", "drug"], [], ["drug"]]),
            (("disease",), 0.0, [["asthma"], [], []]),
            (("Drug",), 0.5, [[], [], ["drug"]]),
            (("DRUG", "DISEASE"), 0.8, [["asthma"], [], ["drug"]]),
            ((), 0.95, [[], [], []]),
        ],
    )
    def test_labels_and_scores(self, labels, score, words):
        """Kept are the entities with one of the labels, in any case, from a score on; texts and errors stay."""
        some_of_them = annotations(MIXED, ("asthma drug", "", "asthma drug")).filter(*labels, min_score=score)
        assert [[entity["word"] for entity in entities] for entities in some_of_them] == words
        assert some_of_them.errors == {1: FAILURE}
        assert some_of_them.to_frame()["word"].tolist() == [word for text_words in words for word in text_words]
        assert some_of_them.summary().texts == 3

    def test_tokens_keep_their_index(self):
        """Tokens that are not joined keep what they have."""
        assert list(annotations([TOKENS], ["x" * 20]).filter("b-d")) == [TOKENS[:1]]

    def test_filter_is_reported(self):
        """Each filter is reported in the text, in the summary and in the HTML."""
        some_of_them = annotations(MIXED, ("asthma drug",)).filter("drug", "disease").filter(min_score=0.5)
        for shown in (some_of_them, some_of_them.summary()):
            assert "  Filter: label drug or disease.\n  Filter: score of at least 0.5.\n  By label" in str(shown)
            assert "Filter: label drug or disease." in shown._repr_html_()

    def test_the_first_stays_as_it_was(self):
        """A filter makes another value."""
        many = annotations(MIXED, ())
        many.filter("drug")
        assert [len(entities) for entities in many] == [2, 0, 1]

    def test_a_label_that_no_entity_has(self):
        """A label that nothing has is a warning that names the nearest, and leaves nothing; where there is no entity it is none."""
        with pytest.warns(OpenMedWarning, match=r"No entity has the label 'diseas'\. Did you mean 'disease'\?"):
            assert list(annotations(MIXED, ()).filter("diseas")) == [[], [], []]
        assert list(annotations([[]], ["x"]).filter("disease")) == [[]]

    @pytest.mark.parametrize(
        ("labels", "score", "message"),
        [
            ((5,), 0.0, "a label: 5"),
            ((None,), 0.0, "a label: None"),
            *(((), score, f"min_score: {score!r}") for score in (2, -0.1, "high")),
            *(((), score, "min_score: a number with many digits") for score in (10**400, -(10**400))),
        ],
    )
    def test_filter_rejects_invalid_arguments(self, labels, score, message):
        with pytest.raises(ConfigurationError, match=f"^Invalid value for {message}"):
            annotations(MIXED, ()).filter(*labels, min_score=score)


class TestManyHiddenTexts:
    """Annotations that may not show the texts."""

    def test_neither_texts_nor_words_are_shown(self):
        """Counts and labels are shown, and no word of a text, in no form and not in the summary."""
        hidden = found(show_text=False)
        summary = hidden.summary()
        forms = [str(hidden), repr(hidden), hidden._repr_html_(), str(summary), summary._repr_html_()]
        for shown in [*forms, json.dumps(summary.to_dict())]:
            assert "DISEASE" in shown or "3 mentions of diseases" in shown
            assert not any(word in shown for word in ("asthma", "diabetes", "He has", "complaints"))
        assert "(text hidden)" in str(hidden)
        assert FAILURE in str(hidden)


def test_a_hundred_thousand_entities_are_held_small():
    """An entity of a short text takes 16 bytes, a text 16; words are held once, and columns keep some room free."""
    columns, one = ResultStore(), entity(TEXTS[0], "asthma")
    for number in range(50_000):
        columns.add(number, [one, one])
    parts = (*columns._columns.values(), columns._text_offsets)

    assert sum(map(sys.getsizeof, (*parts, columns.fingerprints))) < 1.1 * (16 * 100_000 + 16 * 50_000)


NUMBERS = some.integers(0, 2**40)
JOINED = some.fixed_dictionaries(
    {"entity_group": some.text(max_size=4), "score": some.floats(0, 1), "word": some.text(max_size=6)}
    | {"start": NUMBERS, "end": NUMBERS}
)
SINGLE = some.fixed_dictionaries(
    {"entity": some.text(max_size=4), "score": some.floats(0, 1), "index": NUMBERS, "word": some.text(max_size=6)}
    | {"start": NUMBERS, "end": NUMBERS}
)
ANY_ANSWERS = some.one_of(
    some.lists(some.one_of(some.text(max_size=8), some.lists(kind, max_size=4)), max_size=8)
    for kind in (JOINED, SINGLE)
)
KEYS = {("entity_group", "score", "word", "start", "end"), ("entity", "score", "index", "word", "start", "end")}
FOUND_ASTHMA = {"entity_group": "DISEASE", "score": 0.5, "word": "asthma", "start": 7, "end": 13}


@given(ANY_ANSWERS)
def test_store_returns_added_results(answers):
    """Keys have the order of transformers."""
    columns = held(answers)

    assert list(columns.items()) == [FingerprintedResult(number, answer) for number, answer in enumerate(answers)]
    assert {tuple(entity) for entities in columns for entity in entities} <= KEYS
    assert columns.errors == {number: answer for number, answer in enumerate(answers) if isinstance(answer, str)}


@given(ANY_ANSWERS, some.slices(8))
def test_store_behaves_like_list(answers, part):
    columns, plain = held(answers), [[] if isinstance(answer, str) else answer for answer in answers]

    assert len(columns) == len(plain)
    assert columns[part] == plain[part]
    assert [columns[number] for number in range(-len(plain), len(plain))] == plain + plain
    assert list(reversed(columns)) == plain[::-1]
    assert all(answer in columns for answer in plain)


@pytest.mark.parametrize("number", [1, -2, 100])
def test_number_beyond_the_last_is_an_index_error(number):
    """A number that no text has is an IndexError, as for a list."""
    with pytest.raises(IndexError):
        held([[FOUND_ASTHMA]])[number]


@given(ANY_ANSWERS)
def test_table_has_a_row_for_each_entity(answers):
    """The columns contain each entity once, in order, with the index of its text."""
    columns = held(answers)
    table = {name: list(column) for name, column in columns.columns().items()}
    rows = [dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True)]

    assert rows == [{"note_index": number, **entity} for number, entities in enumerate(columns) for entity in entities]


def test_answer_that_was_only_begun_does_not_count():
    """Where adding an answer is broken off after some of its entities, all views still show the answers before it."""
    columns = held([[FOUND_ASTHMA], "an error"])
    with pytest.raises(KeyError):
        columns.add(2, [FOUND_ASTHMA, {"entity_group": "DISEASE", "word": "pain"}])

    assert len(columns) == 2
    assert list(columns.items()) == [FingerprintedResult(0, [FOUND_ASTHMA]), FingerprintedResult(1, "an error")]
    assert (list(columns.labels), list(columns.words), list(columns.counts())) == (["DISEASE"], ["asthma"], [1, 0])
    assert {len(column) for column in columns.columns().values()} == {1}


def test_equal_words_are_held_once():
    """A word that is found again and again takes memory once."""
    first, second = (FOUND_ASTHMA["word"].upper().lower() for _ in range(2))
    columns = held([[{**FOUND_ASTHMA, "word": word}] for word in (first, second)])

    assert first is not second
    assert columns[0][0]["word"] is columns[1][0]["word"]


def test_answer_is_a_list_of_its_own():
    """A list that was handed out can be changed without changing the answers."""
    columns = held([[FOUND_ASTHMA]])
    columns[0][0]["word"] = "changed"
    columns[0].clear()

    assert columns[0] == [FOUND_ASTHMA]


SAME = [
    ("asthma", "asthma"),
    ("asthma", np.str_("asthma")),
    (None, None),
    (None, float("nan")),
    (2.5, 1.5),
    (["a", "b"], ["a", "b"]),
]
OTHER = [
    ("asthma", "asthma "),
    ("", None),
    (None, 1),
    ("NoneType", None),
    ("ab", ["ab"]),
    (["a", "b"], ["ab"]),
    (["a"], ["a", ""]),
    ([], None),
    ("\ud800", "\udfff"),
    ("é", "e\u0301"),
]


@pytest.mark.parametrize(("one", "other"), SAME, ids=repr)
def test_same_text_has_the_same_fingerprint(one, other):
    """Equal texts, equal lists of words and other values of one type have the same fingerprint."""
    assert text_fingerprint(one) == text_fingerprint(other)


@pytest.mark.parametrize(("one", "other"), OTHER, ids=ascii)
def test_other_text_has_another_fingerprint(one, other):
    """Texts that differ in a character, in how they are split, or in their kind, have two fingerprints."""
    assert text_fingerprint(one) != text_fingerprint(other)


FOUND = some.lists(some.tuples(some.sampled_from("AB"), some.sampled_from(["Asthma", "asthma", "pain"])), max_size=4)


def summary_of(answers, show_text=True):
    """Return the summary of answers, each an error or pairs of label and word."""
    found = [
        answer
        if isinstance(answer, str)
        else [{**FOUND_ASTHMA, "entity_group": label, "word": word} for label, word in answer]
        for answer in answers
    ]
    return annotations(found, (), show_text, "m").summary()


@given(some.lists(some.one_of(some.just("an error"), FOUND), max_size=8), some.booleans())
def test_counts(answers, show_text):
    """Texts, texts without any entity, errors, labels and words are counted; words only where texts may be shown."""
    summary = summary_of(answers, show_text)
    pairs = [pair for answer in answers if not isinstance(answer, str) for pair in answer]

    assert (summary.texts, summary.texts_without_entities) == (len(answers), answers.count([]))
    assert [number for number, _why in summary.errors] == [
        n for n, answer in enumerate(answers) if answer == "an error"
    ]
    assert dict(summary.labels) == Counter(label for label, _word in pairs)
    assert dict(summary.words) == (Counter(word.lower() for _label, word in pairs) if show_text else {})


def test_text_form_of_a_summary():
    """The report has counts, errors and the most frequent words."""
    summary = summary_of([[("A", "Asthma"), ("B", "pain")], [], "why it failed", [("A", "asthma")]])

    assert str(summary) == (
        "3 entities found in 4 notes\n"
        "  Model: m, device: cpu\n"
        "  By label: A 2, B 1.\n"
        "  1 note has text but no entities.\n"
        "  1 note could not be read.\n"
        "Notes with errors\n"
        "  note  error\n"
        "  2     why it failed\n"
        "Most frequent entities\n"
        "  text    count\n"
        "  asthma  2\n"
        "  pain    1"
    )


def test_words_come_in_a_fixed_order():
    """The most frequent word comes first, and words that are as frequent come in alphabetical order."""
    words = ["b", "a", "c", "c"]
    assert [word for word, _count in summary_of([[("A", word) for word in words]]).words] == ["c", "a", "b"]


def test_shows_the_first_rows_and_holds_them_all():
    """Tables show the first rows; the value has them all."""
    summary = summary_of(["failed"] * 50 + [[("A", f"word {number:02}") for number in range(50)]])

    assert (len(summary.words), len(summary.errors)) == (50, 50)
    assert str(summary).count("\n  word ") == MAX_TABLE_ROWS
    assert str(summary).count("failed") == MAX_TABLE_ROWS


def test_plain_values_of_a_summary_survive_json():
    """The mapping has counts as numbers and pairs as mappings."""
    summary = summary_of([[("A", "asthma")], "why"])
    plain = json.loads(json.dumps(summary.to_dict()))

    assert plain["labels"] == {"A": 1}
    assert plain["words"] == {"asthma": 1}
    assert plain["errors"] == {"1": "why"}
    assert (plain["texts"], plain["texts_without_entities"]) == (2, 0)


def test_html_has_the_counts():
    """The HTML form has the same counts, as tables; the bars of the labels are one."""
    page = Summary("m", "cpu", 2, 0, ((1, "why"),), (("A", 1), ("B", 1)), (("asthma", 2),))._repr_html_()

    assert "2 entities found in 2 notes" in page
    assert ">2</td>" in page
    assert page.count("<table ") == 3
    assert ">A<" in page.partition("Entities by label")[2]


def test_summary_draws_no_chart_of_a_single_label():
    page = Summary("m", "cpu", 2, 0, (), (("DISEASE", 2),), ())._repr_html_()

    assert "2 mentions of diseases found in 2 notes" in page
    assert "<table" not in page


def test_summary_has_the_duration():
    summary = Summary("m", "cpu", 2, 0, (), (("DISEASE", 2),), (), seconds=0.42)

    assert "device: cpu, 0.4 s" in summary._repr_html_()
    assert "device: cpu, 0.4 s" in str(summary)
    assert "seconds" not in summary.to_dict()


@pytest.mark.parametrize("length", [100_000, 100_001, 3_000_000])
def test_long_text_is_shown_up_to_a_hundred_thousand_characters(length):
    text = ("asthma " + "x " * length)[:length]
    entity = {"entity_group": "DISEASE", "score": 0.5, "word": "asthma", "start": 0, "end": 6}
    found = AnnotatedText(text, (entity, {**entity, "start": length - 4, "end": length}), "m", "cpu")
    masked = found.mask()
    for shown in (found, masked):
        assert len(shown._repr_html_()) < 110_000
        assert ("Displayed: the first 100,000" in str(shown)) == (len(shown.text) > 100_000)
    assert masked.spans[1].end in {length, length - 1}  # The last character may be a space.


def test_missing_text_says_so_in_json():
    found = nb.annotate(["She has asthma.", None], "bundled_small", device="cpu")

    assert found.show(1).to_dict()["missing"] is True
    assert "missing" not in found.show(0).to_dict()
