"""Gold entities in every form that a caller passes, and the texts that they belong to."""

import pickle

import numpy as np
import pandas as pd
import pytest

from openmed_nb.annotation.gold import (
    GoldSpan,
    GoldText,
    GoldTexts,
    align_gold,
    parse_span,
    read_gold,
)
from openmed_nb.errors import ConfigurationError, OpenMedWarning, UnmatchedIdsError

SPAN = GoldSpan(8, 14, "DISEASE")


@pytest.mark.parametrize(
    ("entity", "span"),
    [
        ((8, 14, "DISEASE"), SPAN),
        ((np.int64(8), np.int32(14), "DISEASE"), SPAN),
        ({"start": 8, "end": 14, "label": "DISEASE"}, SPAN),
        ({"start": 8, "end": 14, "entity": "DISEASE"}, SPAN),
        ({"start": 8, "end": 14, "entity": "A", "label": "B", "entity_group": "DISEASE"}, SPAN),
        ((0, 1, ""), GoldSpan(0, 1, "")),
        ((14, 14, "DISEASE"), None),
        ((-1, 14, "DISEASE"), None),
        ((8.5, 14, "DISEASE"), None),
        ((8, "14", "DISEASE"), None),
        ({"start": 8, "end": 14}, None),
    ],
    ids=str,
)
def test_parse_span(entity, span):
    assert parse_span(entity) == span


@pytest.mark.parametrize(
    ("gold", "message"),
    [
        ("text", "str is not a valid type for gold."),
        (pd.Series([[]]), "Series is not a valid type for gold."),
        ({0: None}, "NoneType is not a valid type for the gold of text 0."),
        ([[], "text"], "str is not a valid type for the gold of text 1."),
        ([[], [], [SPAN, (3, 2, "A"), None]], "The gold of text 2 has an invalid entity at index 1."),
    ],
    ids=str,
)
def test_read_gold_names_the_place_of_an_error(gold, message):
    with pytest.raises(ConfigurationError) as caught:
        read_gold(gold)
    assert caught.value.message == message


COLUMNS = {"start": [8, 0], "end": [14, 1], "label": ["DISEASE", "NAME"]}


@pytest.mark.parametrize(
    ("columns", "names"),
    [
        ({"note_index": [3, 3]}, [(None, 3)]),
        ({"note_id": [7, 8]}, [(7, None), (8, None)]),
        ({"id": ["b", "b"], "note_index": [0, 1]}, [("b", 0), ("b", 1)]),
        ({"visit": ["v", "w"], "id": ["b", "a"]}, [("v", None), ("w", None)]),
    ],
    ids=str,
)
def test_table_has_the_entities_of_each_text(columns, names):
    gold = read_gold(pd.DataFrame({**columns, **COLUMNS}), id_name="visit")
    assert gold.is_table
    assert [(text.id, text.position) for text in gold] == names
    assert [span for text in gold for span in text.spans] == [SPAN, GoldSpan(0, 1, "NAME")]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (COLUMNS, "does not have the required columns"),
        ({"id": ["a"], "start": [0], "label": ["A"]}, "does not have the required columns"),
        ({"id": ["a", "b"], **COLUMNS, "end": [14, 0]}, "Row 1 of the table"),
        ({"note_index": ["0", 0], **COLUMNS}, "Row 0 of the table"),
        ({"id": ["a", ["b"]], **COLUMNS}, "Row 1 of the table"),
    ],
    ids=str,
)
def test_table_without_entities_is_an_error(columns, message):
    with pytest.raises(ConfigurationError, match=message):
        read_gold(pd.DataFrame(columns))


def test_read_gold_accepts_each_form():
    frame = pd.DataFrame({"note_index": [1.0], "start": [8.0], "end": [14.0], "entity_group": ["DISEASE"]})
    text = GoldText("a", None, (SPAN,))

    assert read_gold(GoldTexts((text,))) == GoldTexts((text,))
    assert read_gold([text, iter([SPAN]), []]) == GoldTexts((text, text._replace(id=None), GoldText(None, None, ())))
    assert read_gold(frame) == GoldTexts((GoldText(None, None, (SPAN,), 1),), is_table=True)


def test_read_gold_renames_labels_and_counts_an_entity_once():
    with pytest.warns(OpenMedWarning, match="^1 gold entity is marked twice"):
        gold = read_gold([[SPAN, (0, 1, "NAME"), (8, 14, "Disease")]], {"Disease": "DISEASE"})
    assert gold[0].spans == (SPAN, GoldSpan(0, 1, "NAME"))
    with pytest.raises(ConfigurationError, match="for labels"):
        read_gold([[SPAN]], {"Disease": None})


@pytest.mark.parametrize(
    ("counts", "sentences"), [((0, 0), []), ((1, 0), ["1 note"]), ((2, 0), ["2 notes"]), ((0, 2), ["2 notes"])]
)
def test_gold_states_the_notes_that_it_lacks(counts, sentences):
    gold = GoldTexts((GoldText("a", None, (SPAN,)),), False, *counts)
    assert [" ".join(sentence.split()[:2]) for sentence in gold.to_report().sentences] == sentences
    assert gold.to_report().title == "1 annotated note with 1 entity"
    assert "is_table" not in gold.to_dict()


def texts_of(*names, **options):
    """Return texts with ids and without entities. A tuple is an id, a text and a position."""
    return GoldTexts(
        tuple(
            GoldText(name[0], name[1], (), name[2]) if isinstance(name, tuple) else GoldText(name, None, ())
            for name in names
        ),
        **options,
    )


NOTES = ["One.", "Two."]


@pytest.mark.parametrize(
    ("gold", "ids", "positions"),
    [
        (texts_of("10", 10), [10, "10"], {1: "10", 0: 10}),
        (texts_of("n2.txt"), ["n1", "n2"], {1: "n2.txt"}),
        (texts_of("Mu\u0308ller"), ["M\u00fcller", "Lee"], {0: "Mu\u0308ller"}),
        (texts_of(None, None), None, {0: None, 1: None}),
        (texts_of(None, None), [0, 1], {0: None, 1: None}),
        (texts_of((None, None, 1), (None, None, 0)), None, {1: None, 0: None}),
        (texts_of((None, None, 1)), None, {1: None}),
        (texts_of(("x", "One.", None), ("y", "Two.", None)), None, {0: "x", 1: "y"}),
        (texts_of("b", is_table=True), ["a", "b"], {0: None, 1: "b"}),
    ],
    ids=str,
)
def test_align_gold(gold, ids, positions):
    aligned = align_gold(gold, ids, NOTES, 2 if ids is None else len(ids))
    assert {position: text.id for position, text in aligned.items()} == positions


@pytest.mark.parametrize(
    ("gold", "ids"),
    [
        pytest.param(texts_of("a", "a"), ["a", "b"], id="id twice in the gold"),
        pytest.param(texts_of("a", 1, "1"), [1, "a"], id="same partner"),
        pytest.param(texts_of(1.0), ["1", "1.0"], id="two ids of this value"),
        pytest.param(texts_of("x"), ["x", "x"], id="repeated id of the notes"),
        pytest.param(texts_of("0", "1"), None, id="ids that look like positions"),
        pytest.param(texts_of(("x", "Two.", None), ("y", "One.", None)), None, id="other order"),
        pytest.param(texts_of(None, None), ["a", "b"], id="ids on the other side"),
        pytest.param(texts_of((None, None, 0)), ["a", "b"], id="position of a note with an id"),
        pytest.param(texts_of((None, None, -1)), None, id="negative position"),
        pytest.param(texts_of(None), None, id="fewer texts"),
        pytest.param(texts_of("a", None), ["a", "b"], id="text without an id"),
        pytest.param(texts_of(float("nan")), [float("nan"), "b"], id="missing id"),
    ],
)
def test_align_gold_rejects_other_texts(gold, ids):
    with pytest.raises(UnmatchedIdsError, match=r"(ids|positions) of the gold|with 2 notes"):
        align_gold(gold, ids, NOTES, 2 if ids is None else len(ids))


def test_ids_without_a_partner_are_in_no_message_or_pickle():
    with pytest.raises(UnmatchedIdsError, match="3 of the 4 ids of the gold, at 0, 2, 3") as caught:
        align_gold(texts_of("Zyxwvut-1", "a", "Zyxwvut-2", "Zyxwvut-3"), ["a"], NOTES, 1)
    assert caught.value.unmatched == ("Zyxwvut-1", "Zyxwvut-2", "Zyxwvut-3")
    assert "Zyxwvut" not in str(caught.value)
    assert b"Zyxwvut" not in pickle.dumps(caught.value)
