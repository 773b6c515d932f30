"""Findings and contents of a parity report."""

import json
from dataclasses import replace

import pytest

from openmed_nb.models.config import DTYPES
from openmed_nb.runbook.checks.precision.policy import TOLERANCES, AcceptanceCriteria
from openmed_nb.runbook.checks.precision.report import (
    EntityAgreement,
    EntityChange,
    EntityScore,
    GradientDifference,
    ParityReport,
    rejection_reasons,
)

GOOD = ParityReport(
    model="bundled",
    device="mps",
    dtype="float32",
    texts=20,
    texts_fingerprint="09b4",
    tokens=1000,
    windows=22,
    logit_difference=3e-6,
    label_mismatches=0,
    non_finite_tokens=0,
    spans=EntityAgreement(exact=200),
)
CHANGE = EntityChange(3, "moved", (9, 20, "DISEASE"), (9, 15, "DISEASE"))


ALL_OK = EntityScore(100, 100, 90)
JUDGED = [
    ("logits", "ok", {}),
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
    ("finite values", "failed", {"dtype": "bfloat16", "non_finite_tokens": 1}),
    ("labels", "ok", {}),
    ("labels", "warning", {"label_mismatches": 1}),
    ("entities", "ok", {}),
    ("entities", "warning", {"spans": EntityAgreement()}),
    ("entities", "warning", {"spans": EntityAgreement(exact=99, moved=1)}),
    ("entities", "failed", {"spans": EntityAgreement(exact=98, moved=1, extra=1)}),
    ("gold entities", "ok", {"gold": (ALL_OK, ALL_OK)}),
    ("gold entities", "ok", {"gold": (ALL_OK, EntityScore(100, 100, 91))}),
    ("gold entities", "warning", {"gold": (ALL_OK, EntityScore(100, 100, 89))}),
    ("gold entities", "failed", {"gold": (ALL_OK, EntityScore(100, 100, 88))}),
    ("gradients", "ok", {"gradients": GradientDifference(1e-5, "classifier.bias", 38)}),
    ("gradients", "failed", {"gradients": GradientDifference(1e5, "classifier.bias", 38)}),
    ("gradients", "failed", {"gradients": GradientDifference(float("inf"), "classifier.bias", 38)}),
]


@pytest.mark.parametrize(("name", "status", "changes"), JUDGED)
def test_finding_status_follows_tolerance(name, status, changes):
    report = replace(GOOD, **changes)
    statuses = {finding.name: finding.status for finding in report.findings}

    assert statuses[name] == status
    assert report.status == max(statuses.values(), key=("not applicable", "ok", "warning", "failed").index)
    for finding in report.findings:
        assert finding.evidence
        assert bool(finding.remedy) == (finding.status in {"warning", "failed"})


def test_every_dtype_has_a_tolerance():
    assert set(TOLERANCES) == {*DTYPES} - {"auto"}
    assert (
        min(tolerance.logits for tolerance in TOLERANCES.values() if tolerance.logits) == TOLERANCES["float32"].logits
    )


BAD = replace(
    GOOD,
    logit_difference=1.0,
    non_finite_tokens=2,
    label_mismatches=3,
    spans=EntityAgreement(exact=1, missing=1),
    gold=(EntityScore(2, 2, 2), EntityScore(2, 2, 1)),
    gradients=GradientDifference(1.0, "classifier.bias", 38),
)


REMEDIES = {
    ("mps", "float32"): ("Use the CPU for this model.",) * 4 + ("Train on the CPU.",),
    ("cpu", "float32"): ("Reload the model.",) * 5,
    ("cpu", "bfloat16"): (
        "Use float32.",
        "Check the entities: they decide.",
        *("Use float32.",) * 2,
        "Train in float32.",
    ),
    ("mps", "float16"): (
        "Use float32, or bfloat16 if the device supports it, which has the same range.",
        "Check the entities: they decide.",
        *("Use float32.",) * 2,
        "Train in float32.",
    ),
    ("cpu", "int8"): ("Use float32.", "", *("Use float32.",) * 2, "Train in float32."),
}


def test_remedy_suggests_another_dtype_or_device():
    names = ("finite values", "logits", "entities", "gold entities", "gradients")
    for (device, dtype), remedies in REMEDIES.items():
        bad = replace(BAD, device=device, dtype=dtype, logit_difference=100.0)
        actual = {finding.name: finding.remedy for finding in bad.findings if finding.name != "labels"}
        assert actual == dict(zip(names, remedies, strict=True)), (device, dtype)
        if dtype != "float32":
            assert next(rejection_reasons(bad, AcceptanceCriteria())).remedy == remedies[0], (device, dtype)


def test_report_lists_findings():
    assert str(GOOD).splitlines()[:7] == [
        "Parity: bundled on mps in float32, compared with cpu in float32: ok",
        "  20 texts with 1,000 tokens in 22 windows.",
        "  check          result  evidence",
        "  finite values  ok      all logits are finite",
        "  logits         ok      within tolerance (0.0001)",
        "  labels         ok      every token has the same label",
        "  entities       ok      200 of 200 exact",
    ]
    assert "3e-06" in str(GOOD)


def test_report_shows_offsets_of_entities():
    report = replace(GOOD, spans=EntityAgreement(exact=300, moved=2, changes=(CHANGE,)))

    assert "  text 3  moved   characters 9 to 20, DISEASE  characters 9 to 15, DISEASE" in str(report)
    assert "Differing entities (first 1 of 2)" in str(report)


def test_report_to_dict_is_json():
    report = replace(
        GOOD,
        dtype="bfloat16",
        spans=EntityAgreement(exact=99, moved=1, changes=(CHANGE,)),
        gold=(EntityScore(10, 10, 9), EntityScore(10, 10, 9)),
        gradients=GradientDifference(0.1, "classifier.bias", 38),
        notes=("A note.",),
    )
    values = json.loads(json.dumps(report.to_dict()))

    assert (values["logit_difference"], values["tolerance"]) == (3e-6, {"logits": 0.5, "gradients": 0.5})
    assert (values["spans"]["agreement"], values["gold"]["candidate"]["recall"]) == (0.99, 0.9)
    assert values["gradients"] == {"largest": 0.1, "parameter": "classifier.bias", "parameters": 38}
    assert (values["status"], values["findings"][-1]["name"]) == ("warning", "gradients")
