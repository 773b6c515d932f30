"""What was found in one text: as a sequence, as plain values, as text and as HTML."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from openmed_nb.annotation.results import AnnotatedText
from openmed_nb.annotation.stream import check_text
from openmed_nb.errors import UnreadableText

TEXT = "He has asthma and type 2 diabetes."


def entity(start, end, name="DISEASE", score=0.9, key="entity_group"):
    """Return an entity as transformers gives it."""
    return {key: name, "score": np.float32(score), "word": TEXT[start:end], "start": start, "end": end}


def annotated(*entities, text=TEXT, show_text=True):
    """Return what a model found in a text."""
    return AnnotatedText(text, entities, "bundled", "cpu", show_text)


class Marks(HTMLParser):
    """Reads the text of a page without the labels in it, and the marks of entities."""

    def __init__(self, page):
        super().__init__()
        self.text, self.marks, self.tags = "", [], []
        self.feed(re.sub(r" <small>.*?</small>", "", page.partition("</style>")[2], flags=re.DOTALL))

    def handle_starttag(self, tag, attributes):
        """Note the tag, and the attributes of a mark in the text; those of the legend have no title."""
        self.tags.append(tag)
        if tag == "mark" and "title" in dict(attributes):
            self.marks.append(dict(attributes))

    def handle_data(self, data):
        """Collect the text."""
        self.text += data


ASTHMA, DIABETES = entity(7, 13), entity(18, 33, score=0.5)


class TestSequence:
    """It is the sequence of entities that the pipeline gave."""

    def test_length_items_and_iteration(self):
        """It counts, indexes, slices and iterates like the list of entities."""
        found = annotated(ASTHMA, DIABETES)
        assert len(found) == 2
        assert found[0] is ASTHMA
        assert found[-1:] == (DIABETES,)
        assert list(found) == [ASTHMA, DIABETES]
        assert DIABETES in found

    def test_nothing_found(self):
        """Where nothing was found it is empty, and says so, with the text."""
        found = annotated()
        assert not found
        assert str(found) == f"0 entities found by bundled on cpu\n{TEXT}"
        assert TEXT in found._repr_html_()

    def test_labels(self):
        """The labels are sorted, each once, with and without joined tokens."""
        found = annotated(entity(0, 2, "B"), entity(3, 6, "A"), entity(7, 13, "B"), entity(18, 22, "I-A", key="entity"))
        assert {piece.label for piece in found.report().pieces if piece.label} == {"A", "B", "I-A"}

    @pytest.mark.parametrize("name", ["", " "])
    def test_label_without_a_name(self, name):
        """An entity whose label has no name, as that of ``B-``, is marked too."""
        found = annotated(entity(7, 13, name))
        assert "He has [asthma](no label) and" in str(found)
        assert "Labels: no label 1" in str(found)
        assert [mark["title"] for mark in Marks(found._repr_html_()).marks] == ["no label 0.900, characters 7 to 13"]


class TestPlainValues:
    """Values for JSON."""

    def test_survives_json(self):
        """The mapping has only plain values, whatever transformers gave, and keeps all of it."""
        value = json.loads(json.dumps(annotated(ASTHMA).to_dict()))
        expected = {"entity_group": "DISEASE", "score": pytest.approx(0.9), "word": "asthma", "start": 7, "end": 13}
        assert value == {"text": TEXT, "entities": [expected], "model": "bundled", "device": "cpu"}

    def test_does_not_change_the_entities(self):
        """Asking for plain values leaves the entities as they were."""
        found = annotated(ASTHMA)
        found.to_dict()
        assert isinstance(found[0]["score"], np.float32)


class TestText:
    """The plain text form."""

    def test_marks_entities_in_the_text(self):
        """Entities stand in brackets with their label, and in a table with score and place."""
        assert str(annotated(ASTHMA, DIABETES)) == (
            "2 entities found by bundled on cpu\n"
            "He has [asthma](DISEASE) and [type 2 diabetes](DISEASE).\n"
            "Labels: DISEASE 2\n"
            "Entities\n"
            "  label    score  characters  text\n"
            "  DISEASE  0.90   7-13        asthma\n"
            "  DISEASE  0.50   18-33       type 2 diabetes"
        )

    def test_line_ends_stay_in_the_text_and_not_in_the_table(self):
        """The text keeps its lines; an entity over two lines is one row of the table."""
        found = annotated(entity(4, 21), text="A\n\n\ttype 2\n  diabetes\n")
        assert "[type 2\n  diabetes](DISEASE)" in str(found)
        assert str(found).splitlines()[-1].endswith("  type 2 diabetes")


class TestHtml:
    """The HTML form."""

    def test_marks_entities_in_the_text(self):
        """Every entity is marked, with label, score and place on hover, and the text is whole."""
        page = Marks(annotated(ASTHMA, DIABETES)._repr_html_())
        assert TEXT in page.text
        assert [mark["title"] for mark in page.marks] == [
            "DISEASE 0.900, characters 7 to 13",
            "DISEASE 0.500, characters 18 to 33",
        ]

    def test_labels_have_colours_of_their_own(self):
        """Two labels have two colours, and a label has one."""
        found = annotated(entity(0, 2, "A"), entity(3, 6, "B"), entity(7, 13, "A"))
        first, second, third = (mark["class"] for mark in Marks(found._repr_html_()).marks)
        assert first == third != second

    def test_more_labels_than_colours(self):
        """Where there are more labels than colours, all are still marked."""
        found = annotated(*(entity(place, place + 1, f"L{place:02}") for place in range(20)))
        assert len(Marks(found._repr_html_()).marks) == 20

    def test_mathjax_leaves_the_text_alone(self):
        """Dollar signs of a text are no formulas: the element says so to MathJax."""
        page = annotated(text="costs $5 and $6")._repr_html_()
        assert 'class="openmed-nb tex2jax_ignore"' in page
        assert "costs $5 and $6" in page

    def test_line_ends_are_kept(self):
        """White space of the text is shown as it is."""
        page = annotated(text="one\n\n  two\tthree")._repr_html_()
        assert "white-space: pre-wrap" in page
        assert "one\n\n  two\tthree" in page

    @pytest.mark.parametrize(
        "payload", ['<script>alert("x")</script>', '"><img src=x onerror=alert(1)>', "&lt;b&gt;", "'"]
    )
    def test_everything_is_escaped(self, payload):
        """A payload in the text, a label, the model or the device is shown as text."""
        found = AnnotatedText(payload, (entity(0, len(payload), payload),), payload, payload)
        page = Marks(found._repr_html_())
        assert not {"script", "img", "b"} & set(page.tags)
        assert page.text.count(payload) == 6
        assert page.marks[0]["title"].startswith(payload)


class TestOverlaps:
    """Entities that overlap, touch, are empty, or come in any order."""

    def test_later_one_is_in_the_table_only(self):
        """Of two that overlap, the first is marked; both are in the table."""
        found = annotated(entity(18, 33), entity(25, 33, "DIABETES"))
        assert "[type 2 diabetes](DISEASE)." in str(found)
        assert "(DIABETES)" not in str(found)
        assert str(found).splitlines()[-1] == "  DIABETES  0.90   25-33       diabetes"

    def test_neighbours_are_both_marked(self):
        """Two entities without a character between them are two marks."""
        assert "[asthma](DISEASE)[ and](OTHER)" in str(annotated(entity(13, 17, "OTHER"), ASTHMA))

    @given(some.text(), some.lists(some.tuples(some.integers(0, 30), some.integers(0, 30)), max_size=6))
    def test_text_is_shown_whole_whatever_is_marked(self, text, places):
        """Whatever entities there are, the marked text is the text."""
        entities = (entity(min(pair), min(max(pair), len(text)), "D") for pair in places if min(pair) < len(text))
        pieces = annotated(*entities, text=text).report().pieces
        assert "".join(piece.text for piece in pieces) == text


class TestHiddenText:
    """A result that may not show the text."""

    def test_shows_neither_text_nor_words(self):
        """Labels, scores and places are shown, and no word of the text, in no form."""
        found = annotated(ASTHMA, DIABETES, show_text=False)
        for shown in (str(found), repr(found), found._repr_html_()):
            assert "DISEASE" in shown
            assert not any(word in shown for word in ("asthma", "diabetes", "He has"))
        assert "7-13" in str(found)
        assert "(the text is hidden)" in str(found)

    def test_still_holds_them_for_code(self):
        """The values are there for code that asks."""
        assert annotated(ASTHMA, show_text=False).to_dict()["entities"][0]["word"] == "asthma"


@pytest.mark.parametrize("text", ["\ud800", "before \udfff after"])
def test_half_of_a_surrogate_pair_is_an_error_without_the_text(text: str) -> None:
    """A text that cannot be encoded is refused by position, and none of its words is repeated."""
    with pytest.raises(UnreadableText, match="half of a surrogate pair at character") as caught:
        check_text(text)

    assert "after" not in str(caught.value)


@pytest.mark.parametrize("text", [None, 5, b"bytes", ["a list"]])
def test_what_is_no_text_is_refused_by_its_type(text: object) -> None:
    """Anything but a string is refused, and only its type is named."""
    with pytest.raises(UnreadableText, match=f"not {type(text).__name__}"):
        check_text(text)
