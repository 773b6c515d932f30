"""Findings of a parity report for given measurements, and the comparison of entities."""

import json
import re
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.sample_reports import PARITY
from openmed_nb.models.config import DTYPES
from openmed_nb.runbook.checks.parity_report import (
    MAX_CHANGES,
    TOLERANCES,
    EntityAgreement,
    EntityChange,
    GoldScore,
    GradientDifference,
    compare_spans,
    rejection_reasons,
)

CHANGE = EntityChange(3, "moved", (9, 20, "DISEASE"), (9, 15, "DISEASE"))
CASES = [
    ("logits", "ok", {"logit_difference": 1e-4}),
    ("logits", "warning", {"logit_difference": 1.1e-4}),
    ("logits", "warning", {"logit_difference": 5e-2}),
    ("logits", "failed", {"logit_difference": 6e-2}),
    ("logits", "failed", {"logit_difference": 1.1e-4, "spans": EntityAgreement(exact=199, moved=1)}),
    ("logits", "ok", {"dtype": "bfloat16", "logit_difference": 0.5}),
    ("logits", "warning", {"dtype": "bfloat16", "logit_difference": 0.6}),
    ("logits", "not applicable", {"dtype": "int8", "logit_difference": 1e6}),
    ("finite values", "ok", {}),
    ("finite values", "failed", {"non_finite_tokens": 1}),
    ("labels", "ok", {}),
    ("labels", "warning", {"label_mismatches": 1}),
    ("entities", "ok", {}),
    ("entities", "warning", {"spans": EntityAgreement()}),
    ("entities", "warning", {"spans": EntityAgreement(exact=99, moved=1)}),
    ("entities", "failed", {"spans": EntityAgreement(exact=98, moved=1, extra=1)}),
    ("entities", "warning", {"dtype": "bfloat16", "spans": EntityAgreement(exact=290, moved=3)}),
    ("entities", "failed", {"dtype": "bfloat16", "spans": EntityAgreement(exact=96, moved=4)}),
    *(
        ("gold entities", status, {"gold": GoldScore(100, 90, candidate)})
        for candidate, status in ((90, "ok"), (91, "ok"), (89, "warning"), (88, "failed"))
    ),
    *(
        ("gradients", status, {"gradients": GradientDifference(largest, "classifier.bias", 38)})
        for largest, status in ((1e-3, "ok"), (1.1e-3, "failed"), (float("inf"), "failed"))
    ),
]


@pytest.mark.parametrize(("name", "status", "changes"), CASES)
def test_finding_status_follows_tolerance(name, status, changes):
    report = replace(PARITY, **changes)
    statuses = {finding.name: finding.status for finding in report.findings}

    assert statuses[name] == status
    assert report.status == max(statuses.values(), key=("not applicable", "ok", "warning", "failed").index)
    for finding in report.findings:
        assert finding.evidence
        assert bool(finding.remedy) == (finding.status in {"warning", "failed"})


def test_every_dtype_has_a_tolerance():
    assert set(TOLERANCES) == {*DTYPES} - {"auto"}
    assert min(filter(None, (tolerance.logits for tolerance in TOLERANCES.values()))) == TOLERANCES["float32"].logits


BAD = replace(
    PARITY,
    logit_difference=100.0,
    non_finite_tokens=2,
    spans=EntityAgreement(exact=1, missing=1),
    gold=GoldScore(2, 2, 1),
    gradients=GradientDifference(1.0, "classifier.bias", 38),
)
FLOAT32 = "Use float32."
OVERFLOW = "Use float32, or bfloat16 if the device supports it, which has the same range."
CHECK_ENTITIES = "Check the entities: they decide."


@pytest.mark.parametrize(
    ("device", "dtype", "first", "logits", "others"),
    [
        ("mps", "float32", *("Use the CPU for this model.",) * 3),
        ("cpu", "float32", *("Reload the model.",) * 3),
        ("cpu", "bfloat16", FLOAT32, CHECK_ENTITIES, FLOAT32),
        ("mps", "float16", OVERFLOW, CHECK_ENTITIES, FLOAT32),
        ("cpu", "int8", FLOAT32, "", FLOAT32),
    ],
)
def test_remedy_suggests_another_dtype_or_device(device, dtype, first, logits, others):
    bad = replace(BAD, device=device, dtype=dtype)

    assert {finding.name: finding.remedy for finding in bad.findings} == {
        "finite values": first,
        "logits": logits,
        "labels": "",
        **dict.fromkeys(("entities", "gold entities", "gradients"), others),
    }
    if dtype != "float32":
        assert next(rejection_reasons(bad)).remedy == first


def test_report_shows_offsets_of_entities():
    report = replace(PARITY, spans=EntityAgreement(exact=300, moved=2, changes=(CHANGE,)))

    assert "  text 3  moved   characters 9 to 20, DISEASE  characters 9 to 15, DISEASE" in str(report)
    assert "Differing entities (first 1 of 2)" in str(report)
    assert "3e-06" in report._repr_html_()


@pytest.mark.parametrize(
    ("device", "exact", "moved", "text"),
    [
        ("cpu", 165, 0, "the CPU with itself"),
        ("mps", 165, 0, "At most 1.8%"),
        ("mps", 99, 1, "At most 4.8%"),
        ("mps", 3, 0, ""),
    ],
)
def test_report_states_the_bound_of_the_evidence(device, exact, moved, text):
    report = replace(PARITY, device=device, spans=EntityAgreement(exact, moved))

    assert text in str(report)
    assert ("At most" in str(report)) == ("At most" in text)


def test_report_to_dict_is_json():
    report = replace(BAD, dtype="bfloat16", spans=EntityAgreement(exact=99, moved=1, changes=(CHANGE,)))
    values = json.loads(json.dumps(report.to_dict()))

    assert values["tolerance"] == {"logits": 0.5, "gradients": 0.5}
    assert (values["spans"]["agreement"], values["gold"]["reference_recall"], values["gold"]["recall"]) == (
        0.99,
        1,
        0.5,
    )
    assert values["spans"]["changes"][0] == {
        "text": 3,
        "kind": "moved",
        "reference": [9, 20, "DISEASE"],
        "candidate": [9, 15, "DISEASE"],
    }
    assert (values["status"], values["findings"][-1]["name"]) == ("failed", "gradients")


BOUNDARIES = st.tuples(st.integers(0, 30), st.integers(1, 8)).map(lambda pair: (pair[0], pair[0] + pair[1]))
# Entities of one text, with one label for each pair of boundaries.
ENTITIES = st.dictionaries(BOUNDARIES, st.sampled_from(["DISEASE", "GENE", "DOSE"]), max_size=8).map(
    lambda labels: [(start, end, label) for (start, end), label in labels.items()]
)


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
        ("0-20 D", "0-6 D, 8-20 D", {"moved": 1, "extra": 1}),
        ("0-6 D, 8-20 D", "0-20 D", {"moved": 1, "missing": 1}),
        ("0-6 D, 0-6 D", "0-6 D", {"exact": 1, "missing": 1}),
    ],
)
def test_compare_spans_counts_kinds(reference, candidate, counts):
    agreement = compare_spans(parse_entities(reference), parse_entities(candidate))

    assert replace(agreement, changes=()) == EntityAgreement(**counts)


@given(ENTITIES, ENTITIES)
def test_compare_spans_counts_each_entity_once(reference, candidate):
    agreement = compare_spans(reference, candidate, text=7)

    assert agreement.reference == len(reference)
    assert agreement.all - agreement.missing == len(candidate)
    changed = Counter(change.kind for change in agreement.changes)
    assert changed == Counter({kind: count for kind, count in agreement.counts.items() if kind != "exact"})
    same = {*reference} & {*candidate}
    assert {change.reference for change in agreement.changes if change.reference} == {*reference} - same
    assert {change.candidate for change in agreement.changes if change.candidate} == {*candidate} - same
    assert {change.text for change in agreement.changes} <= {7}


def test_agreement_sum_limits_changes():
    agreements = [compare_spans([(0, 6, "D")], [(0, 9, "D")], index) for index in range(MAX_CHANGES + 5)]
    total = sum(agreements, EntityAgreement())

    assert total.moved == MAX_CHANGES + 5
    assert [change.text for change in total.changes] == list(range(MAX_CHANGES))


def test_agreement_is_relative_to_all_entities():
    assert EntityAgreement().agreement == 1.0
    assert EntityAgreement(exact=99, missing=1).agreement == EntityAgreement(exact=99, extra=1).agreement == 0.99
    assert EntityAgreement(exact=98, moved=1, label_changed=1).agreement == 0.98


@pytest.mark.parametrize(
    ("score", "recalls"), [(GoldScore(4, 4, 3), (1.0, 0.75, 0.25)), (GoldScore(), (1.0, 1.0, 0.0))]
)
def test_recall_of_gold_entities(score, recalls):
    assert (score.reference_recall, score.recall, score.recall_loss) == recalls
