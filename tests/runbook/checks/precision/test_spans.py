"""Comparison of entities between reference, candidate and gold."""

import json
import re
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openmed_nb.runbook.checks.precision.report import (
    MAX_CHANGES,
    EntityAgreement,
    EntityScore,
    compare_spans,
    score,
)

DISEASE, GENE = "DISEASE", "GENE"

BOUNDARIES = st.tuples(st.integers(0, 30), st.integers(1, 8)).map(lambda pair: (pair[0], pair[0] + pair[1]))
ENTITIES = st.dictionaries(BOUNDARIES, st.sampled_from([DISEASE, GENE, "DOSE"]), max_size=8).map(
    lambda labels: [(start, end, label) for (start, end), label in labels.items()]
)
"""Strategy for the entities of one text, with one label for each pair of boundaries."""


def parse_entities(text):
    """Parse entities such as ``0-6 DISEASE, 8-20 GENE``."""
    named = re.findall(r"(\d+)-(\d+) (\w+)", text)
    return [(int(start), int(end), label) for start, end, label in named]


@pytest.mark.parametrize(
    ("reference", "candidate", "counts"),
    [
        ("", "", {}),
        ("0-6 D", "0-6 D", {"exact": 1}),
        ("0-6 D", "0-9 D", {"moved": 1}),
        ("0-6 D", "0-6 G", {"label_changed": 1}),
        ("0-6 D", "0-9 G", {"missing": 1, "extra": 1}),
        ("0-6 D", "6-9 D", {"missing": 1, "extra": 1}),
        ("0-6 D", "", {"missing": 1}),
        ("", "0-6 D", {"extra": 1}),
        ("0-20 D", "0-6 D, 8-20 D", {"moved": 1, "extra": 1}),
        ("0-6 D, 8-20 D", "0-20 D", {"moved": 1, "missing": 1}),
        ("0-6 D, 0-6 D", "0-6 D", {"exact": 1, "missing": 1}),
    ],
)
def test_compare_spans_counts_kinds(reference, candidate, counts):
    assert replace(compare_spans(parse_entities(reference), parse_entities(candidate)), changes=()) == EntityAgreement(
        **counts
    )


@given(ENTITIES, ENTITIES)
def test_compare_spans_counts_each_entity_once(reference, candidate):
    agreement = compare_spans(reference, candidate, text=7)

    assert agreement.exact + agreement.moved + agreement.label_changed + agreement.missing == len(reference)
    assert agreement.exact + agreement.moved + agreement.label_changed + agreement.extra == len(candidate)
    changed = Counter(change.kind for change in agreement.changes)
    assert changed == Counter({kind: count for kind, count in agreement.counts.items() if kind != "exact"})
    same = {*reference} & {*candidate}
    assert {change.reference for change in agreement.changes if change.reference} == {*reference} - same
    assert {change.candidate for change in agreement.changes if change.candidate} == {*candidate} - same
    assert {change.text for change in agreement.changes} <= {7}


@given(ENTITIES)
def test_same_entities_are_exact(reference):
    assert compare_spans(reference, reversed(reference)) == EntityAgreement(exact=len(reference))


def test_agreement_sum_limits_changes():
    agreements = [compare_spans([(0, 6, DISEASE)], [(0, 9, DISEASE)], index) for index in range(MAX_CHANGES + 5)]
    total = sum(agreements, EntityAgreement())

    assert total.moved == MAX_CHANGES + 5
    assert [change.text for change in total.changes] == list(range(MAX_CHANGES))
    fourth = {"text": 3, "kind": "moved", "reference": [0, 6, DISEASE], "candidate": [0, 9, DISEASE]}
    assert json.loads(json.dumps(total.to_dict()))["changes"][3] == fourth


def test_agreement_is_relative_to_all_entities():
    assert EntityAgreement().agreement == 1.0
    assert EntityAgreement(exact=99, missing=1).agreement == EntityAgreement(exact=99, extra=1).agreement == 0.99
    assert EntityAgreement(exact=98, moved=1, label_changed=1).agreement == 0.98
    assert EntityAgreement(missing=1).agreement == 0.0


def test_score_requires_exact_boundaries_and_labels():
    first = score([(0, 6, DISEASE), (9, 20, DISEASE)], [(0, 6, DISEASE), (9, 15, DISEASE), (30, 33, DISEASE)])

    assert (first, first.recall) == (EntityScore(gold=2, predicted=3, correct=1), 1 / 2)
    assert first + EntityScore(1, 1, 1) == EntityScore(3, 4, 2)
    assert EntityScore().recall == 1.0
