import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import openmed_nb as nb
from openmed_nb._render.display import OK
from openmed_nb.runbook.verdict.metrics import GATES, METRICS, TASKS, Evidence, format_value
from openmed_nb.runbook.verdict.rules import (
    DecisionCase,
    Gates,
    build_decision_matrix,
    gates,
    list_requirements,
)
from openmed_nb.runbook.verdict.verdict import evaluate

NOTHING = DecisionCase()
PROBLEMS, CONCLUSIONS = build_decision_matrix(NOTHING, "Run nb.doctor().")
MATRIX = PROBLEMS + CONCLUSIONS

RECOMMENDED = {rule.recommendation for rule in MATRIX}
FOLDER = Path(__file__).parent
FILES = sorted((FOLDER / "scenarios").glob("*.json"))
SCENARIOS = {file.stem: json.loads(file.read_text("utf-8")) for file in FILES}
# Scenarios with changed metrics, and for each gate a scenario with the metric at its gate and a gate that it violates.
VARIATIONS = json.loads((FOLDER / "variations.json").read_text("utf-8"))
BOUNDARIES = json.loads((FOLDER / "boundaries.json").read_text("utf-8"))


def read_evidence(values):
    """Return evidence from JSON values."""
    return Evidence(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def load_evidence(name, **changes):
    """Return the evidence of a scenario, with changes."""
    return read_evidence({**SCENARIOS[name]["evidence"], **changes})


def list_recommendations(verdict):
    """Return the different recommendations of a verdict in order of precedence."""
    return list(dict.fromkeys(reason.recommendation for reason in verdict.reasons))


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario_has_the_expected_verdict(name):
    scenario = SCENARIOS[name]
    evidence = load_evidence(name)
    verdict = evaluate(evidence, gates(**scenario.get("gates", {})))
    metrics = verdict.reason.metrics
    sentences = [sentence for sentence in verdict.to_report().sentences if "could change the verdict" in sentence]

    assert list_recommendations(verdict) == [scenario["recommendation"], *scenario["alternatives"]]
    assert set(scenario["metrics"]) <= {*metrics, *(METRICS[name].label for name in metrics)}
    assert verdict.is_conclusive == scenario["is_conclusive"]
    assert [requirement.name for requirement in verdict.missing_requirements] == scenario["missing_requirements"]
    assert len(sentences) == bool(verdict.blocking_requirements)
    assert all(requirement.name in sentences[0] for requirement in verdict.blocking_requirements)
    assert read_evidence(json.loads(json.dumps(evidence))) == evidence
    assert (verdict.to_report().status == OK) == (
        verdict.is_conclusive and verdict.recommendation == "keep this device"
    )


def test_every_recommendation_has_a_scenario():
    assert {scenario["recommendation"] for scenario in SCENARIOS.values()} == RECOMMENDED


@pytest.mark.parametrize("variation", VARIATIONS, ids=lambda variation: variation["about"])
def test_changed_metrics_have_the_expected_verdict(variation):
    verdict = evaluate(load_evidence(variation["scenario"], **variation["changes"]))

    assert list_recommendations(verdict) == variation["recommendations"]
    assert [requirement.name for requirement in verdict.blocking_requirements] == variation["blocking"]
    assert verdict.is_conclusive is not bool(variation["blocking"])
    assert verdict.is_conclusive or verdict.not_known[0].endswith(f". Run {variation['command']}.")
    assert verdict.is_conclusive or f"Run {variation['command']}." in str(verdict)
    for name in ("answer", "warnings"):
        sentences = getattr(verdict, name)
        assert {*sentences} <= {*verdict.to_report().sentences}
        expected = zip(variation.get(name, ()), sentences, strict=True)
        assert all(fragment in sentence for fragment, sentence in expected)
    assert variation.get("shown", "") in str(verdict)


@pytest.mark.parametrize("gate", BOUNDARIES)
def test_metric_at_its_gate_does_not_violate_it(gate):
    boundary = BOUNDARIES[gate]
    evidence = load_evidence(boundary["scenario"], **boundary["changes"])
    default = getattr(Gates, gate)
    at_gate = evaluate(evidence, gates(**{gate: boundary["gate"] or default}))
    beyond_gate = evaluate(evidence, gates(**{gate: boundary["violated_gate"]}))

    assert at_gate.recommendation == boundary["recommendation"]
    assert beyond_gate.recommendation != boundary["recommendation"]
    assert gate in beyond_gate.reason.metrics
    assert any(gate in sentence for sentence in beyond_gate.to_report().sentences)


def test_every_gate_has_a_boundary_test():
    assert list(BOUNDARIES) == list(GATES)


GOOD = "annotation_worth_it"
finite = st.floats(allow_nan=False, allow_infinity=False) | st.floats(-1, 2)
fraction = st.floats(0, 1)
VALUES = {
    **dict.fromkeys(("fraction", "difference", "ratio", "rate", "hours"), finite),
    "text": st.text(max_size=5) | st.sampled_from(["mps", "cuda:0", "cpu", "growing", "flat", "insufficient data", ""]),
    "boolean": st.booleans(),
    "count": st.integers(0, 3) | st.integers(0, 10**12),
    "names": st.lists(st.sampled_from(["aten::mode", "computation"]), max_size=2).map(tuple),
    "phases": st.dictionaries(st.sampled_from(["data", "transfer", "forward"]), fraction),
}
metric_values = {name: VALUES[metric.unit] for name, metric in METRICS.items()} | {"task": st.sampled_from(TASKS)}
evidences = st.fixed_dictionaries({}, optional=metric_values).map(lambda values: Evidence(**values))
likely = st.sampled_from(list(SCENARIOS)).map(load_evidence)
speeds = st.lists(st.floats(0.5, 2), min_size=3, max_size=3).map(sorted)
near = st.builds(
    lambda interval, utilization: load_evidence(
        GOOD, **dict(zip(("speedup_low", "speedup", "speedup_high"), interval, strict=True)), utilization=utilization
    ),
    speeds,
    st.none() | fraction,
)
thresholds = st.fixed_dictionaries({}, optional=dict.fromkeys(GATES, fraction)).map(lambda changed: gates(**changed))


@given(evidences, thresholds)
def test_any_evidence_has_one_recommendation_in_every_form(evidence, limits):
    verdict = evaluate(evidence, limits)

    assert verdict.recommendation in RECOMMENDED
    assert verdict == evaluate(evidence, limits)
    assert json.loads(json.dumps(verdict.to_dict()))["recommendation"] == verdict.recommendation
    assert str(verdict).startswith("Verdict on ")
    assert verdict.recommendation in verdict._repr_html_()


def find_needed(verdict):
    """Return the names of the missing requirements that a verdict needs."""
    return {requirement.name for requirement in verdict.missing_requirements if requirement.is_needed}


@given(evidences | likely, thresholds, st.sets(st.sampled_from(sorted(set(METRICS) - {"simulated"}))))
def test_removing_metrics_never_makes_a_verdict_conclusive(evidence, limits, names):
    before = evaluate(evidence, limits)
    after = evaluate(Evidence(**{**evidence, **dict.fromkeys(names)}), limits)

    assert after.is_conclusive <= before.is_conclusive
    assert find_needed(before) <= find_needed(after)


@given(evidences | likely | near, st.just(Gates()) | thresholds)
def test_conclusively_kept_device_is_within_its_gates(evidence, limits):
    verdict = evaluate(evidence, limits)
    if (verdict.recommendation, verdict.is_conclusive) != ("keep this device", True):
        return
    deciding = {"headroom", "data_fraction", "knee_gain", "hours", *verdict.reason.metrics} & {*GATES}
    if evidence.device_type != "cpu":
        deciding |= {"entity_agreement", "recall_loss", "gradients", "transfer_fraction"}
        assert evidence["speedup"] >= 1 + limits.speedup
    for name in deciding - {"speedup"}:
        if evidence[name] is not None:
            excess = evidence[name] - getattr(limits, name)
            assert (-excess if GATES[name].is_minimum else excess) <= 1e-9, name


def test_commands_are_calls():
    assert all(re.fullmatch(r"nb(\.\w+)+\([^()]*\)", requirement.command) for requirement in list_requirements(NOTHING))


@pytest.mark.parametrize("metrics", [{"device": "mps"}, {"device": "cpu", "no_gpu": False}])
def test_known_device_is_not_looked_for(metrics):
    assert nb.verdict(Evidence(**metrics)) == evaluate(Evidence(**metrics))


def test_simulated_evidence_is_inconclusive():
    verdict = evaluate(load_evidence("simulated"))

    assert str(verdict).startswith("Verdict on mps (SIMULATED): ")
    assert verdict.to_dict()["simulated"]
    assert not verdict.is_conclusive


def test_title_names_operators_and_escapes_them():
    evidence = load_evidence("operators_on_fallback")
    page = evaluate(Evidence(**{**evidence, "fallback_operators": ("<script>alert(1)</script>",)}))._repr_html_()

    assert evaluate(evidence).to_report().title.endswith(": aten::_linalg_eigh.eigenvalues, aten::mode")
    assert "<script>alert" not in page


def test_unknown_metric_is_an_error():
    with pytest.raises(KeyError, match="speed"):
        Evidence()["speed"]


@pytest.mark.parametrize(
    ("unit", "value", "text"),
    [
        ("count", 0, "none"),
        ("hours", 0.001, "3.6 seconds"),
        ("hours", 0.5, "30 minutes"),
        ("hours", 1, "1 hour"),
        ("hours", 2, "2 hours"),
        ("phases", {"data": 0.1, "forward": 0.9}, "data 10%, forward 90%"),
    ],
)
def test_value_is_formatted_with_its_unit(unit, value, text):
    assert format_value(unit, value) == text


@pytest.mark.parametrize("rows", [list_requirements(NOTHING), PROBLEMS], ids=["requirements", "rules"])
def test_requirements_and_rules_are_in_order_of_precedence(rows):
    ranks = [row.precedence for row in rows]

    assert ranks == sorted(ranks)
    assert set(ranks) == set(range(6))


# A value of each unit, and the snapshot of all reports, which is updated with ``--record``.
SAMPLES = {
    "names": ("a", "b"),
    "text": "growing",
    "ratio": 2.25,
    "fraction": 0.7149,
    "difference": 3e-6,
    "rate": 1234.5,
    "hours": 2.5,
    "count": 2_952_000,
    "boolean": True,
    "phases": {"data": 0.1, "transfer": 0.2, "forward": 0.7},
}


def test_reports_match_the_snapshot(as_recorded):
    evidence = {name: SAMPLES[metric.unit] for name, metric in METRICS.items()}
    verdict = evaluate(Evidence(**evidence | {"task": "inference", "device": "mps"}), gates(speedup=0.3))
    reports = {
        "nothing": asdict(evaluate(Evidence()).to_report()),
        "everything": [asdict(verdict.final_report()), verdict.to_dict(), asdict(verdict.logbook_metrics())],
    }

    as_recorded(FOLDER / "snapshot.json", reports, sort_keys=True)
