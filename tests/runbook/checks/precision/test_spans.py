"""What becomes of entities between a reference and a candidate, and of both against gold."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from openmed_nb.errors import ConfigurationError
from openmed_nb.runbook.checks.precision.report import (
    MAX_CHANGES,
    EntityAgreement,
    EntityScore,
    compare_spans,
    parse_gold,
    score,
)

D, G = "DISEASE", "GENE"

BORDERS = st.tuples(st.integers(0, 30), st.integers(1, 8)).map(lambda one: (one[0], one[0] + one[1]))
TEXTS = st.dictionaries(BORDERS, st.sampled_from([D, G, "DOSE"]), max_size=8).map(
    lambda found: [(start, end, label) for (start, end), label in found.items()]
)
"""Entities of one text: one label for each pair of borders."""


def entities(text):
    """Return the entities that a text names, such as ``0-6 DISEASE, 8-20 GENE``."""
    named = re.findall(r"(\d+)-(\d+) (\w+)", text)
    return [(int(start), int(end), label) for start, end, label in named]


@pytest.mark.parametrize(
    ("reference", "candidate", "counts"),
    [
        ("", "", {}),
        ("0-6 D", "0-6 D", {"exact": 1}),
        ("0-6 D", "0-9 D", {"moved": 1}),
        ("0-6 D", "0-6 G", {"relabelled": 1}),
        ("0-6 D", "0-9 G", {"missing": 1, "extra": 1}),
        ("0-6 D", "6-9 D", {"missing": 1, "extra": 1}),
        ("0-6 D", "", {"missing": 1}),
        ("", "0-6 D", {"extra": 1}),
        ("0-20 D", "0-6 D, 8-20 D", {"moved": 1, "extra": 1}),
        ("0-6 D, 8-20 D", "0-20 D", {"moved": 1, "missing": 1}),
        ("0-10 D, 9-12 D", "2-9 D, 0-4 D", {"moved": 1, "missing": 1, "extra": 1}),
        ("0-4 D, 2-9 D", "3-12 D, 3-5 D", {"moved": 2}),
        ("0-6 D, 0-6 D", "0-6 D", {"exact": 1, "missing": 1}),
    ],
)
def test_kinds_of_entities(reference, candidate, counts):
    """Entities are exact, moved, relabelled, missing or extra, each counted once."""
    assert replace(compare_spans(entities(reference), entities(candidate)), changes=()) == EntityAgreement(**counts)


@given(TEXTS, TEXTS)
def test_every_entity_is_exactly_one_of_them(reference, candidate):
    """Every entity of either side is counted once, and every change names what is really there."""
    found = compare_spans(reference, candidate, text=7)

    assert found.exact + found.moved + found.relabelled + found.missing == len(reference)
    assert found.exact + found.moved + found.relabelled + found.extra == len(candidate)
    changed = {kind: [one for one in found.changes if one.kind == kind] for kind in ("moved", "missing", "extra")}
    assert len(changed["moved"]) == found.moved
    same = {*reference} & {*candidate}
    assert {one.reference for one in found.changes if one.reference} == {*reference} - same
    assert {one.candidate for one in found.changes if one.candidate} == {*candidate} - same
    assert {one.text for one in found.changes} <= {7}


@given(TEXTS, TEXTS)
def test_sides_may_change_places(reference, candidate):
    """With the sides changed, missing is extra and the other counts are the same."""
    there, back = compare_spans(reference, candidate), compare_spans(candidate, reference)

    assert (there.exact, there.moved, there.relabelled) == (back.exact, back.moved, back.relabelled)
    assert (there.missing, there.extra) == (back.extra, back.missing)
    assert there.agreement == back.agreement


@given(TEXTS)
def test_same_entities_are_exact(reference):
    """Entities compared with themselves in another order are all exact."""
    assert compare_spans(reference, reversed(reference)) == EntityAgreement(exact=len(reference))


def test_sum_counts_all_and_keeps_the_first_changes():
    """Counts of texts are added; of the changes the first are kept."""
    texts = [compare_spans([(0, 6, D)], [(0, 9, D)], number) for number in range(MAX_CHANGES + 5)]
    together = sum(texts, EntityAgreement())

    assert together.moved == MAX_CHANGES + 5
    assert [one.text for one in together.changes] == list(range(MAX_CHANGES))
    fourth = {"text": 3, "kind": "moved", "reference": [0, 6, D], "candidate": [0, 9, D]}
    assert json.loads(json.dumps(together.to_dict()))["changes"][3] == fourth


def test_agreement_counts_what_either_side_found():
    """The agreement is the share of the exact among all that either side found."""
    assert EntityAgreement().agreement == 1.0
    assert EntityAgreement(exact=99, missing=1).agreement == EntityAgreement(exact=99, extra=1).agreement == 0.99
    assert EntityAgreement(exact=98, moved=1, relabelled=1).agreement == 0.98
    assert EntityAgreement(missing=1).agreement == 0.0


def test_scores_are_of_exact_borders_and_labels():
    """Recall, precision and F1 count what is right in both borders and the label, and add up over texts."""
    one = score([(0, 6, D), (9, 20, D)], [(0, 6, D), (9, 15, D), (30, 33, D)])

    assert (one.recall, one.precision, one.f1) == (1 / 2, 1 / 3, 2 / 5)
    assert one + EntityScore(1, 1, 1) == EntityScore(3, 4, 2)
    assert (EntityScore().recall, EntityScore().precision, EntityScore().f1) == (1.0, 1.0, 1.0)


def test_many_moved_entities_of_one_text():
    """Two thousand entities of one text that all moved by half their length are paired, one with one, without a deep stack."""
    reference = [(10 * place, 10 * place + 10, D) for place in range(2000)]
    candidate = [(start + 5, end + 5, D) for start, end, _ in reference]

    assert compare_spans(reference, candidate).moved == compare_spans(candidate, reference).moved == 2000
    assert compare_spans(reference[1:], candidate).extra == 1


def test_forms_of_gold():
    """A gold entity is a tuple, or a mapping as the pipelines give it."""
    entities = [
        (4, 10, D),
        [4, 10, D],
        {"start": 4, "end": 10, "label": D},
        {"start": 4, "end": 10, "entity_group": D, "score": 0.9, "word": "asthma"},
        {"start": 4, "end": 10, "entity": D},
        {"start": 4, "end": 10, "entity": "asthma", "label": D},
        (np.int64(4), torch.tensor(10), D),
    ]
    for entity in entities:
        assert parse_gold([[], [entity]]) == ((), ((4, 10, D),)), entity
        assert parse_gold(iter([(entity,)])) == (((4, 10, D),),), entity


def test_what_is_no_gold():
    """Anything else is an error that names the text and the place by their numbers, and no word."""
    forms = {
        "str is not a valid type for gold": "gold",
        "NoneType is not a valid type for gold": None,
        "dict is not a valid type for gold": {0: []},
        "NoneType is not a valid type for the gold of text 1": [[], None],
        "dict is not a valid type for the gold of text 1": [[], {"start": 1}],
        "The gold of text 0 has an invalid entity at index 1": [[(0, 6, D), (0, 6)]],
    }
    none = [
        (0, 6, 5),
        (6, 6, D),
        (-1, 6, D),
        (0.0, 6.0, D),
        (False, True, D),
        (np.array([4, 5]), 10, D),
        (torch.tensor(4.0), 10, D),
        {"start": 4, "end": 10},
        "asthma",
    ]
    for said, gold in [*forms.items(), *(("text 0 has an invalid entity at index 0", [[entity]]) for entity in none)]:
        with pytest.raises(ConfigurationError, match=said) as caught:
            parse_gold(gold)
        assert "asthma" not in str(caught.value)
