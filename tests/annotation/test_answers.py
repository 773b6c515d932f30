"""The answers to many texts, held as columns: what goes in comes out, and it is a sequence of lists."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from openmed_nb.annotation.fingerprints import fingerprint_of
from openmed_nb.annotation.results import Answers

NUMBERS = some.integers(0, 2**40)
JOINED = some.fixed_dictionaries(
    {"entity_group": some.text(max_size=4), "score": some.floats(0, 1), "word": some.text(max_size=6)}
    | {"start": NUMBERS, "end": NUMBERS}
)
SINGLE = some.fixed_dictionaries(
    {"entity": some.text(max_size=4), "score": some.floats(0, 1), "index": NUMBERS, "word": some.text(max_size=6)}
    | {"start": NUMBERS, "end": NUMBERS}
)
ANSWERS = some.one_of(
    some.lists(some.one_of(some.text(max_size=8), some.lists(kind, max_size=4)), max_size=8)
    for kind in (JOINED, SINGLE)
)
KEYS = {
    ("entity_group", "score", "word", "start", "end"),
    ("entity", "score", "index", "word", "start", "end"),
}
ASTHMA = {"entity_group": "DISEASE", "score": 0.5, "word": "asthma", "start": 7, "end": 13}


def held(answers):
    """Return answers as columns; the fingerprint of each is its number."""
    columns = Answers()
    for number, answer in enumerate(answers):
        columns.add(number, answer)
    return columns


@given(ANSWERS)
def test_what_goes_in_comes_out(answers):
    """Every entity comes back with the same values and its keys in transformers' order, and every error with its number."""
    columns = held(answers)

    assert list(columns.items()) == list(enumerate(answers))
    assert {tuple(entity) for entities in columns for entity in entities} <= KEYS
    assert columns.errors == {number: answer for number, answer in enumerate(answers) if isinstance(answer, str)}


@given(ANSWERS, some.slices(8))
def test_it_is_a_sequence_like_the_list_of_its_items(answers, part):
    """Length, indices from both ends, slices, iteration and membership are those of a list of lists."""
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
        held([[ASTHMA]])[number]


@given(ANSWERS)
def test_table_has_a_row_for_each_entity(answers):
    """The columns have every entity once, in order, beside the number of its text."""
    columns = held(answers)
    table = {name: list(column) for name, column in columns.columns().items()}
    rows = [dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True)]

    assert rows == [{"text": number, **entity} for number, entities in enumerate(columns) for entity in entities]


def test_answer_that_was_only_begun_does_not_count():
    """Where adding an answer is broken off after some of its entities, all views still show the answers before it."""
    columns = held([[ASTHMA], "an error"])
    with pytest.raises(KeyError):
        columns.add(2, [ASTHMA, {"entity_group": "DISEASE", "word": "pain"}])

    assert len(columns) == 2
    assert list(columns.items()) == [(0, [ASTHMA]), (1, "an error")]
    assert (list(columns.labels), list(columns.words), list(columns.counts())) == (["DISEASE"], ["asthma"], [1, 0])
    assert {len(column) for column in columns.columns().values()} == {1}


def test_equal_words_are_held_once():
    """A word that is found again and again takes memory once."""
    first, second = (ASTHMA["word"].upper().lower() for _ in range(2))
    columns = held([[{**ASTHMA, "word": word}] for word in (first, second)])

    assert first is not second
    assert columns[0][0]["word"] is columns[1][0]["word"]


def test_answer_is_a_list_of_its_own():
    """A list that was handed out can be changed without changing the answers."""
    columns = held([[ASTHMA]])
    columns[0][0]["word"] = "changed"
    columns[0].clear()

    assert columns[0] == [ASTHMA]


SAME = [
    ("asthma", "asthma"),
    ("asthma", np.str_("asthma")),
    (None, None),
    (float("nan"), 1.5),
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
    """Equal texts, equal lists of words, and things of one kind that are no text, have one fingerprint."""
    assert fingerprint_of(one) == fingerprint_of(other)


@pytest.mark.parametrize(("one", "other"), OTHER, ids=ascii)
def test_other_text_has_another_fingerprint(one, other):
    """Texts that differ in a character, in how they are split, or in their kind, have two fingerprints."""
    assert fingerprint_of(one) != fingerprint_of(other)
