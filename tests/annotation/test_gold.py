"""Gold entities in every form that a caller passes, and the texts that they belong to."""

import numpy as np
import pandas as pd
import pytest

from openmed_nb.annotation.gold import (
    GoldSpan,
    GoldText,
    GoldTexts,
    align_gold,
    gold_from_columns,
    parse_gold,
    parse_span,
    read_gold,
)
from openmed_nb.errors import ConfigurationError

SPAN = GoldSpan(8, 14, "DISEASE")


@pytest.mark.parametrize(
    ("entity", "span"),
    [
        ((8, 14, "DISEASE"), SPAN),
        ([8, 14, "DISEASE"], SPAN),
        ((np.int64(8), np.int32(14), "DISEASE"), SPAN),
        ({"start": 8, "end": 14, "label": "DISEASE"}, SPAN),
        ({"start": 8, "end": 14, "entity": "DISEASE", "word": "asthma"}, SPAN),
        ({"start": 8, "end": 14, "entity": "A", "label": "B", "entity_group": "DISEASE"}, SPAN),
        ({"start": 8, "end": 14, "entity": "A", "label": "DISEASE"}, SPAN),
        ((0, 1, ""), GoldSpan(0, 1, "")),
        ((8, 14), None),
        ((8, 14, "DISEASE", 1), None),
        ((8, 14, None), None),
        ((14, 14, "DISEASE"), None),
        ((-1, 14, "DISEASE"), None),
        ((8.5, 14, "DISEASE"), None),
        ((8, "14", "DISEASE"), None),
        ({"start": 8, "label": "DISEASE"}, None),
        ({"start": 8, "end": 14}, None),
        ("abc", None),
        (None, None),
    ],
    ids=str,
)
def test_parse_span(entity, span):
    assert parse_span(entity) == span


def test_parse_gold_has_the_entities_of_each_text():
    entities = ((8, 14, "DISEASE"), {"start": 0, "end": 1, "label": "NAME"})
    gold = [GoldText("a", None, (SPAN,)), entities, iter([entities[0]]), []]
    assert parse_gold(gold) == ((SPAN,), (SPAN, GoldSpan(0, 1, "NAME")), (SPAN,), ())


@pytest.mark.parametrize(
    ("gold", "message"),
    [
        ("text", "str is not a valid type for gold."),
        (b"text", "bytes is not a valid type for gold."),
        ({0: []}, "dict is not a valid type for gold."),
        (5, "int is not a valid type for gold."),
        ([[], "text"], "str is not a valid type for the gold of text 1."),
        ([[], [], [SPAN, (3, 2, "A"), None]], "The gold of text 2 has an invalid entity at index 1."),
    ],
    ids=str,
)
def test_parse_gold_names_the_place_of_an_error(gold, message):
    with pytest.raises(ConfigurationError) as caught:
        parse_gold(gold)
    assert caught.value.message == message
    assert caught.value.remedy.startswith("For each text pass a list of (start, end, label)")


COLUMNS = {"start": [8, 0], "end": [14, 1], "label": ["DISEASE", "NAME"]}


@pytest.mark.parametrize(
    ("columns", "names", "numbered"),
    [
        ({"note": [3, 3], **COLUMNS}, ["3"], True),
        ({"id": ["b", "a"], **COLUMNS}, ["b", "a"], False),
        ({"id": ["b", "a"], "note": [0, 1], **COLUMNS}, ["b", "a"], False),
        ({"id": ["b", "b"], "note": [0, 1], **COLUMNS}, ["0", "1"], True),
        ({"id": ["b", "b"], "note": [1, 1], **COLUMNS}, ["b"], False),
    ],
    ids=str,
)
def test_table_has_the_entities_of_each_text(columns, names, numbered):
    gold = gold_from_columns(columns)
    assert (gold.is_table, gold.is_numbered) == (True, numbered)
    assert [text.id for text in gold] == names
    assert [span for text in gold for span in text.spans] == [SPAN, GoldSpan(0, 1, "NAME")]
    assert {text.text for text in gold} == {None}


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (COLUMNS, "does not have the required columns"),
        ({"id": ["a"], "start": [0], "end": [1]}, "does not have the required columns"),
        ({"id": ["a"], "start": [0], "label": ["A"]}, "does not have the required columns"),
        ({"id": ["a", "b"], **COLUMNS, "end": [14, 0]}, "Row 1 of the table"),
        ({"note": ["0", 0], **COLUMNS}, "Row 0 of the table"),
    ],
    ids=str,
)
def test_table_without_entities_is_an_error(columns, message):
    with pytest.raises(ConfigurationError, match=message) as caught:
        gold_from_columns(columns)
    assert caught.value.remedy.startswith("A table of entities has the columns")


def test_read_gold_accepts_each_form():
    frame = pd.DataFrame({"note": [1.0], "start": [8.0], "end": [14.0], "entity_group": ["DISEASE"]})
    texts = GoldTexts((GoldText("a", None, (SPAN,)),))

    assert read_gold(texts) is texts
    assert read_gold([[SPAN], []]) == GoldTexts((GoldText(None, None, (SPAN,)), GoldText(None, None, ())))
    assert read_gold(frame) == GoldTexts((GoldText("1", None, (SPAN,)),), is_table=True, is_numbered=True)
    with pytest.raises(ConfigurationError, match="several columns of the same name"):
        read_gold(pd.DataFrame([[0, 1, 1]], columns=["note", "start", "start"]))


def texts_of(*names, **options):
    """Return texts with ids and without entities."""
    return GoldTexts(tuple(GoldText(name, None, ()) for name in names), **options)


def test_gold_texts_are_a_sequence():
    gold = GoldTexts((GoldText("a", "secret", (SPAN, SPAN)), GoldText("b", None, (SPAN,))))
    assert (len(gold), gold[1].id, [text.id for text in gold]) == (2, "b", ["a", "b"])
    assert "secret" not in f"{gold!r} {gold._repr_html_()} {gold.to_dict()}"
    assert (gold.is_table, gold.is_numbered) == (False, False)


@pytest.mark.parametrize(
    ("gold", "keys", "positions"),
    [
        (texts_of("b", "a"), ["a", "b", "c"], {1: "b", 0: "a"}),
        (texts_of("2", "1"), [1, 2], {1: "2", 0: "1"}),
        (texts_of("1", "0"), ["a", "b"], {1: "1", 0: "0"}),
        (texts_of(None, None), ["a", "b"], {0: None, 1: None}),
        (texts_of("x", "y"), range(2), {0: "x", 1: "y"}),
        (texts_of("x", "x"), ["x", "x"], {0: "x", 1: "x"}),
        (texts_of("b", is_table=True), ["a", "b"], {0: None, 1: "b"}),
        (texts_of("1", is_table=True, is_numbered=True), ["1", "b"], {0: None, 1: "1"}),
        (texts_of(), ["a"], {}),
    ],
    ids=str,
)
def test_align_gold(gold, keys, positions):
    assert {position: text.id for position, text in align_gold(gold, keys).items()} == positions


@pytest.mark.parametrize(
    ("gold", "keys"),
    [
        (texts_of("x"), ["a"]),
        (texts_of("a", "a"), ["a", "b"]),
        (texts_of("x", "y"), range(3)),
        (texts_of(None), ["a", "b"]),
        (texts_of("x", is_table=True), range(1)),
        (texts_of("2", is_table=True, is_numbered=True), ["2", "b"]),
    ],
    ids=str,
)
def test_align_gold_rejects_other_texts(gold, keys):
    message = f"The gold has {len(gold)} texts that are not the {len(keys)} texts of the results, or not unique."
    with pytest.raises(ConfigurationError) as caught:
        align_gold(gold, keys)
    assert caught.value.message == message
    assert caught.value.remedy.startswith("Pass the gold of the same texts")
