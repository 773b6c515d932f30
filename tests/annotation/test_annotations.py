"""What was found in many texts: as a sequence, as a table, as JSON, as text and as HTML."""

from __future__ import annotations

import json
import sys

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as some

from openmed_nb.annotation.results import SHOWN_CHARACTERS, SHOWN_TEXTS, Annotations, Answers

TEXTS = ("He has asthma.", "No complaints.", "", "Type 2 diabetes and asthma.")
FAILURE = "Text 2 must be a string, not NoneType. Pass a string."


def entity(text, word, name="DISEASE", score=0.875):
    """Return the entity of a word in a text."""
    start = text.index(word)
    return {"entity_group": name, "score": score, "word": word.lower(), "start": start, "end": start + len(word)}


def annotations(answers, texts, show_text=True, model="bundled"):
    """Return answers as annotations."""
    columns = Answers()
    for number, answer in enumerate(answers):
        columns.add(number, answer)
    return Annotations(columns, tuple(texts)[:SHOWN_TEXTS], model, "cpu", show_text)


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


class TestSequence:
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

    @pytest.mark.parametrize("number", [4, -5])
    def test_beyond_the_last(self, number):
        """A number that no text has is an IndexError."""
        with pytest.raises(IndexError):
            found()[number]

    def test_text_without_an_answer(self):
        """A text without an answer has an empty list, and its reason in the errors under its number."""
        assert found()[2] == []
        assert found().errors == {2: FAILURE}


class TestTable:
    """The table with a row for each entity."""

    def test_columns_and_types(self):
        """There is a row for each entity, with numbers as numbers."""
        frame = found().to_frame()
        assert list(frame.columns) == ["text", "entity_group", "score", "word", "start", "end"]
        assert frame["text"].tolist() == [0, 3, 3]
        assert frame["word"].tolist() == ["asthma", "type 2 diabetes", "asthma"]
        assert frame["score"].mean() == pytest.approx(0.75)
        kinds = {name: frame[name].dtype.kind for name in ("text", "score", "start", "end")}
        assert kinds == {"text": "i", "score": "f", "start": "i", "end": "i"}

    @pytest.mark.parametrize("answers", [(), ([], []), ("an error",)], ids=["no text", "no entity", "error"])
    def test_nothing_found(self, answers):
        """Where nothing was found, the table has the same columns, of the same types, and no row."""
        frame = annotations(answers, ("",) * len(answers)).to_frame()
        assert len(frame) == 0
        assert list(frame.columns) == list(found().to_frame().columns)
        numeric = ["text", "score", "start", "end"]
        assert frame[numeric].dtypes.tolist() == found().to_frame()[numeric].dtypes.tolist()

    def test_single_tokens(self):
        """Tokens that were not joined have their label under ``entity`` and their index."""
        frame = annotations([TOKENS], ["He has asthma"]).to_frame()
        assert list(frame.columns) == ["text", "entity", "score", "index", "word", "start", "end"]
        assert frame["index"].tolist() == [3, 4]
        assert frame.to_dict("records") == [{"text": 0, **token} for token in TOKENS]

    def test_joins_with_the_notes(self):
        """The number of a text is its row in the table that the texts came from."""
        notes = pd.DataFrame({"patient": ["a", "b", "c", "d"], "note": TEXTS})
        joined = found().to_frame().join(notes, on="text")
        assert joined["patient"].tolist() == ["a", "d", "d"]


class TestPlainValues:
    """Values for JSON."""

    def test_survives_json(self):
        """JSON has model and device, and for each text in order its entities or its error."""
        value = json.loads(found().to_json())
        texts = [{"error": one} if isinstance(one, str) else {"entities": one} for one in ANSWERS]
        assert value == found().to_dict() == {"model": "bundled", "device": "cpu", "texts": texts}

    def test_letters_stay_readable(self):
        """Letters beyond ASCII stand in the JSON as they are."""
        text = "Ménière"
        assert "ménière" in annotations([[entity(text, text)]], [text]).to_json()


class TestShown:
    """The text and HTML forms."""

    def test_text_form(self):
        """Counts come first, then the first texts with their entities marked, then what failed."""
        assert repr(found()) == str(found())
        assert str(found()) == (
            "3 entities found in 4 texts by bundled on cpu\n"
            "  By label: DISEASE 3.\n"
            "  Texts without any: 1.\n"
            "  Texts that could not be read or run: 1.\n"
            "0: He has [asthma](DISEASE).\n"
            "1: No complaints.\n"
            "2: (no answer)\n"
            "3: [Type 2 diabetes](DISEASE) and [asthma](DISEASE).\n"
            "Labels: DISEASE 3\n"
            "Texts without an answer\n"
            "  text  why\n"
            f"  2     {FAILURE}"
        )

    def test_nothing_at_all(self):
        """No text is a value too, and says so in one line."""
        assert str(annotations((), ())) == "0 entities found in 0 texts by bundled on cpu"
        assert "0 texts" in annotations((), ())._repr_html_()

    def test_only_the_first_texts_are_shown(self):
        """Of many texts only the first are shown, and it says so."""
        texts = [f"note {number} asthma" for number in range(20)]
        many = annotations([[entity(text, "asthma")] for text in texts], texts)
        for shown in (str(many), many._repr_html_()):
            assert f"Shown: the first {SHOWN_TEXTS} texts." in shown
            assert f"note {SHOWN_TEXTS - 1} " in shown
            assert f"note {SHOWN_TEXTS} " not in shown

    def test_ten_thousand_texts_are_shown_in_a_few_lines(self):
        """What is shown of 10,000 texts, a thousand of which failed, is some lines, not thousands."""
        answers = ["an error" if number % 10 == 9 else [entity("asthma", "asthma")] for number in range(10_000)]
        many = annotations(answers, ["asthma"] * SHOWN_TEXTS)
        assert str(many).startswith("9,000 entities found in 10,000 texts")
        assert len(str(many)) < 1500
        assert len(many._repr_html_()) < 6000

    def test_long_text_is_shortened(self):
        """Of a very long text the beginning is shown, with the entities in it, and a mark that it goes on."""
        text = "He has asthma. " + "word " * SHOWN_CHARACTERS + "And pain."
        long = annotations([[entity(text, "asthma"), entity(text, "pain")]], [text])
        for shown in (str(long), long._repr_html_()):
            assert "asthma" in shown
            assert "…" in shown
            assert "And pain" not in shown
        assert len(str(long)) < SHOWN_CHARACTERS + 300
        assert "[asthma](DISEASE)" in str(long)

    @given(some.integers(0, 30), some.integers(1, 40))
    def test_entity_at_the_edge_of_what_is_shown(self, before, length):
        """An entity is marked where all of it is shown, and shortening never fails."""
        start = SHOWN_CHARACTERS - before
        text = "x" * (start + length + 1)
        one = {"entity_group": "D", "score": 0.5, "word": "x", "start": start, "end": start + length}
        assert ("](D)" in str(annotations([[one]], [text]))) == (length <= before)

    def test_control_characters_cannot_steer_a_terminal(self):
        """A control character of a text is shown as a picture."""
        assert "\x1b" not in str(annotations([[]], ["\x1b[2Jnote"]))

    def test_same_value_same_form(self):
        """Two equal runs have the same text and HTML, to the letter."""
        assert (str(found()), found()._repr_html_()) == (str(found()), found()._repr_html_())


class TestHiddenText:
    """Annotations that may not show the texts."""

    def test_neither_texts_nor_words_are_shown(self):
        """Counts and labels are shown, and no word of a text, in no form and not in the summary."""
        hidden = found(show_text=False)
        summary = hidden.summary()
        forms = [str(hidden), repr(hidden), hidden._repr_html_(), str(summary), summary._repr_html_()]
        for shown in [*forms, json.dumps(summary.to_dict())]:
            assert "DISEASE" in shown
            assert not any(word in shown for word in ("asthma", "diabetes", "He has", "complaints"))
        assert "(the text is hidden)" in str(hidden)
        assert FAILURE in str(hidden)

    def test_still_holds_them_for_code(self):
        """The values are there for code that asks."""
        assert found(show_text=False)[0][0]["word"] == "asthma"
        assert found(show_text=False).to_frame()["word"][0] == "asthma"


def test_a_hundred_thousand_entities_are_held_small():
    """An entity takes at most 50 bytes, beside words that are held once."""
    columns, one = Answers(), entity(TEXTS[0], "asthma")
    for number in range(50_000):
        columns.add(number, [one, one])
    parts = (columns._scores, columns._starts, columns._ends, columns._labels, columns._words, columns._bounds)

    assert sum(map(sys.getsizeof, (*parts, columns.fingerprints))) < 50 * 100_000
