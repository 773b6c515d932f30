"""What the labels of a model mean, as tables."""

from __future__ import annotations

import pytest

from openmed_nb.annotation.decoding import LabelTables


@pytest.mark.parametrize(
    ("labels", "groups", "begins"),
    [
        (["O", "B-DRUG", "I-DRUG"], ["O", "DRUG", "DRUG"], [False, True, False]),
        (["DRUG", "DISEASE"], ["DRUG", "DISEASE"], [False, False]),
        (["B-CELL-LINE", "I-CELL-LINE"], ["CELL-LINE", "CELL-LINE"], [True, False]),
        (["E-DRUG", "S-DRUG"], ["DRUG", "DRUG"], [False, False]),
        (["b-drug", "B-"], ["drug", ""], [False, True]),
        (["LABEL_0", "-"], ["LABEL_0", ""], [False, False]),
    ],
)
def test_names_of_entities(labels, groups, begins):
    """The name of an entity is what follows the first hyphen; only ``B-`` begins one after one of its own kind."""
    tables = LabelTables.of(dict(enumerate(labels)), ["O"])
    assert tables.names == tuple(labels)
    assert tables.groups == tuple(groups)
    assert tables.begins.tolist() == begins


@pytest.mark.parametrize(
    ("labels", "equal"),
    [
        (["B-DRUG", "I-DRUG"], True),
        (["DRUG", "I-DRUG"], True),
        (["B-DRUG", "I-DISEASE"], False),
        (["E-DRUG", "I-DRUG"], False),
        (["O", "B-O"], True),
        (["drug", "DRUG"], False),
    ],
)
def test_kinds(labels, equal):
    """Labels that differ in no more than ``B-`` and ``I-`` can be in one entity."""
    first, second = LabelTables.of(dict(enumerate(labels)), []).kinds
    assert bool(first == second) is equal


@pytest.mark.parametrize(
    ("ignored", "label_kept", "group_kept"),
    [
        ([], [True, True, True], [True, True, True]),
        (["O"], [False, True, True], [False, True, True]),
        (["I-DRUG"], [True, True, False], [True, True, True]),
        (["DRUG"], [True, True, True], [True, False, False]),
        (["o", "drug", "banana"], [True, True, True], [True, True, True]),
    ],
)
def test_ignored(ignored, label_kept, group_kept):
    """Labels are left out among tokens and names of entities among entities, in their exact spelling."""
    tables = LabelTables.of({0: "O", 1: "B-DRUG", 2: "I-DRUG"}, ignored)
    assert tables.label_kept.tolist() == label_kept
    assert tables.group_kept.tolist() == group_kept


def test_order_of_numbers():
    """Labels go by their numbers, in whatever order the configuration has them."""
    assert LabelTables.of({1: "B-DRUG", 0: "O"}, []).names == ("O", "B-DRUG")
