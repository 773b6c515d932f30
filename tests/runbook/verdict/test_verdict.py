import json
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openmed_nb import errors
from openmed_nb._render.display import OK, SIMULATION_NOTICE
from openmed_nb.runbook.verdict.gates import Gates, gates
from openmed_nb.runbook.verdict.metrics import GATES, METRICS, TASKS, Evidence, format_with_unit
from openmed_nb.runbook.verdict.rules import KEEP_DEVICE, EvidenceCase, decision_matrix, requirements
from openmed_nb.runbook.verdict.verdict import evaluate

NOTHING = EvidenceCase(Evidence(), vars(Gates()))
MATRIX = decision_matrix(NOTHING, "nb.doctor()")

RECOMMENDED = {rule.recommendation for rule in MATRIX}
FILES = sorted((Path(__file__).parent / "scenarios").glob("*.json"))
SCENARIOS = {file.stem: json.loads(file.read_text("utf-8")) for file in FILES}


def evidence_from(values):
    """Return evidence that was written as JSON."""
    return Evidence(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def evidence_of(name, **changes):
    """Return the evidence of a scenario, with changes."""
    return replace(evidence_from(SCENARIOS[name]["evidence"]), **changes)


def good(**changes):
    """Return the verdict on a device that is worth it for annotation, with changes."""
    return evaluate(evidence_of("annotation_worth_it", **changes))


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(name):
    scenario = SCENARIOS[name]
    evidence = evidence_from(scenario["evidence"])
    verdict = evaluate(evidence, gates(**scenario.get("gates", {})))
    figures = verdict.reason.figures

    assert verdict.recommendation == scenario["recommendation"]
    assert set(scenario["metrics"]) <= {figure.gate for figure in figures} | {figure.name for figure in figures}
    assert [one.recommendation for one in verdict.alternatives] == scenario["alternatives"]
    assert verdict.is_conclusive == scenario["is_conclusive"]
    assert [one.name for one in verdict.missing_requirements] == scenario["missing_requirements"]
    assert evidence_from(json.loads(json.dumps(evidence.to_dict()))) == evidence
    assert (verdict.to_report().status == OK) == (verdict.is_conclusive and verdict.recommendation == KEEP_DEVICE)


def test_every_recommendation_has_a_scenario():
    assert {one["recommendation"] for one in SCENARIOS.values()} == RECOMMENDED


FAST = {"speedup_low": 2.9, "speedup": 3.0, "speedup_high": 3.2}
GROWING = {"memory_growth": 0.26, "memory_verdict": "growing"}
A_DAY = {"texts_per_second": 1.0, "num_texts": 24 * 3600}
GOOD, TRAINING, IDLE = "annotation_worth_it", "training_worth_it", "idle_device"

# A gate, a scenario with metrics at the gate, what is recommended there, and a gate that is moved past the metric.
BORDERS = [
    ("speedup", IDLE, {"speedup": 1.3}, "measure first", 0.31),
    ("utilization", IDLE, {"utilization": 0.2}, "compute on the CPU", 0.21),
    ("entity_agreement", GOOD, {"entity_agreement": 0.99}, KEEP_DEVICE, 0.991),
    ("recall_loss", GOOD, {"recall_loss": 0.01}, KEEP_DEVICE, 0.009),
    ("logits", "language_model_slow", {"logits": 0.6, **FAST}, KEEP_DEVICE, 0.59),
    ("gradients", TRAINING, {"gradients": 1e-3}, KEEP_DEVICE, 9e-4),
    ("memory_growth", TRAINING, GROWING, KEEP_DEVICE, 0.25),
    ("headroom", TRAINING, {"headroom": 0.1}, KEEP_DEVICE, 0.11),
    ("data_fraction", GOOD, {"phase_fractions": {"data": 0.25}}, KEEP_DEVICE, 0.24),
    ("transfer_fraction", GOOD, {"phase_fractions": {"data": 0.1, "transfer": 0.25}}, KEEP_DEVICE, 0.24),
    ("knee_gain", GOOD, {"knee_gain": 0.1}, KEEP_DEVICE, 0.09),
    ("fallback_time", "operators_on_fallback", {"fallback_time": 0.05}, KEEP_DEVICE, 0.04),
    ("fallback_calls", GOOD, {"fallback_calls": 0.01}, KEEP_DEVICE, 0.009),
    ("hours", GOOD, A_DAY, KEEP_DEVICE, 23.9),
]
AT_THE_GATE = {"logits": 0.6, "speedup": 0.3, "utilization": 0.2}
"""The gates that are moved to the metric."""


@pytest.mark.parametrize(("gate", "name", "changes", "recommendation", "limit"), BORDERS)
def test_metric_at_its_gate_is_not_beyond_it(gate, name, changes, recommendation, limit):
    evidence = evidence_of(name, **changes)
    there = evaluate(evidence, gates(**{gate: AT_THE_GATE[gate]} if gate in AT_THE_GATE else {}))
    past = evaluate(evidence, gates(**{gate: limit}))

    assert there.recommendation == recommendation
    assert past.recommendation != recommendation
    assert gate in {figure.gate for figure in past.reason.figures}
    assert any(gate in sentence for sentence in past.to_report().sentences)


def test_every_gate_has_a_border():
    assert {gate for gate, *_ in BORDERS} == {one.name for one in fields(Gates)}


finite = st.floats(allow_nan=False, allow_infinity=False) | st.floats(-1, 2)
share = st.floats(0, 1)
names = st.lists(st.sampled_from(["aten::mode", "aten::_linalg_eigh", "computation"]), max_size=2).map(tuple)
VALUES = {
    **dict.fromkeys(("share", "difference", "times", "rate"), finite),
    "words": st.text(max_size=5)
    | st.sampled_from(["mps", "cuda:0", "cpu", "growing", "flat", "too short to tell", ""]),
    "yes or no": st.booleans(),
    "count": st.integers(0, 3) | st.integers(0, 10**12),
    "names": names,
    "phases": st.dictionaries(st.sampled_from(["data", "transfer", "forward"]), share),
}
figures = {one.name: VALUES[METRICS[one.name].unit] for one in fields(Evidence)} | {"task": st.sampled_from(TASKS)}
evidences = st.builds(
    Evidence, **{name: values if name == "simulated" else st.none() | values for name, values in figures.items()}
)
known = {**figures, "task": st.sampled_from(TASKS), "device": st.sampled_from(["mps", "cuda:0", "cpu"])}
likely = st.sampled_from(list(SCENARIOS)).map(evidence_of)
speeds = st.lists(st.floats(0.5, 2), min_size=3, max_size=3).map(sorted)
near = st.builds(
    lambda ends, busy: evidence_of(GOOD, speedup_low=ends[0], speedup=ends[1], speedup_high=ends[2], utilization=busy),
    speeds,
    st.none() | share,
)
thresholds = st.fixed_dictionaries({}, optional={one.name: share for one in fields(Gates)}).map(
    lambda some: gates(**some)
)


@given(evidences, thresholds)
def test_any_evidence_has_one_recommendation(evidence, limits):
    """Any figures lead to exactly one recommendation of the list, which can be shown in every form, and nothing raises."""
    verdict = evaluate(evidence, limits)

    assert verdict.recommendation in RECOMMENDED
    assert verdict.recommendation not in {one.recommendation for one in verdict.alternatives}
    assert verdict == evaluate(evidence, limits)
    assert json.loads(json.dumps(verdict.to_dict()))["recommendation"] == verdict.recommendation
    assert str(verdict).startswith("Verdict on ")
    assert verdict.recommendation in verdict._repr_html_()


@given(evidences | likely, thresholds, st.data())
def test_knowing_less_makes_nothing_surer(evidence, limits, data):
    """Taking figures away never makes a verdict sure that was not, and makes no unknown known."""
    names = data.draw(st.sets(st.sampled_from([one.name for one in fields(Evidence) if one.name != "simulated"])))
    before, after = evaluate(evidence, limits), evaluate(replace(evidence, **dict.fromkeys(names)), limits)

    assert after.is_conclusive <= before.is_conclusive
    assert {one.name for one in before.missing_requirements if one.needed} <= {
        one.name for one in after.missing_requirements if one.needed
    }


@given(evidences | likely | near, st.just(Gates()) | thresholds)
def test_device_that_is_surely_stayed_on_is_within_its_gates(evidence, limits):
    verdict = evaluate(evidence, limits)
    if (verdict.recommendation, verdict.is_conclusive) != (KEEP_DEVICE, True):
        return
    case = EvidenceCase(evidence, vars(limits))
    decide = {"headroom", "data_fraction", "transfer_fraction", "knee_gain", "hours"}
    if evidence.kind != "cpu":
        decide |= {"entity_agreement", "recall_loss", "gradients"}
        assert evidence.speedup >= 1 + limits.speedup
    for figure in (*verdict.reason.figures, *map(case.gated, decide)):
        if figure.value is not None:
            apart = figure.value - figure.threshold
            assert (-apart if GATES[figure.gate].at_least else apart) <= 1e-9, figure.name


@given(likely, st.sampled_from(["task", "device"]))
def test_without_device_or_task_nothing_is_sure(evidence, name):
    assert not evaluate(replace(evidence, **{name: None})).is_conclusive


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("entity_agreement", "nb.runbook.parity("),
        ("headroom", "nb.sweep("),
        ("phase_fractions", "nb.compare("),
        ("knee_gain", "nb.sweep("),
        ("speedup", "nb.compare("),
    ],
)
def test_staying_needs_every_metric_that_matters(name, command):
    verdict = good(**{name: None})

    assert verdict.recommendation == "measure first"
    assert any(command in sentence for sentence in verdict.not_known)
    assert verdict.reason.actions[0].startswith(f"Run {command}")


@pytest.mark.parametrize("requirement", requirements(NOTHING), ids=lambda requirement: requirement.name)
def test_first_command_can_be_typed(requirement):
    assert re.fullmatch(r"nb(\.\w+)+\([^()]*\)", requirement.first_command)
    assert requirement.command.startswith(requirement.first_command)


def test_first_command_is_shown_as_code():
    verdict = evaluate(Evidence(device="cpu", task="annotation"))

    assert "Run nb.sweep(model)." in str(verdict)
    assert "<code>nb.sweep(model)</code>" in verdict._repr_html_()
    assert "Not known" not in verdict._repr_html_()


MODE = {"fallback_operators": ("aten::mode",)}
WAIT = {"synchronizations": (".item() at train.py:30 in step",)}
COPIES = {"phase_fractions": {"data": 0.1, "transfer": 0.6, "forward": 0.3}}
BUG = {"silent_errors": ("long matrix product",)}


def speed(low, middle, high, **others):
    """Return metrics of a speed-up with its interval."""
    return {"speedup_low": low, "speedup": middle, "speedup_high": high, **others}


CPU, FALL_BACK, FEED, MEASURE = (
    "compute on the CPU",
    "fall back to the CPU for these operators",
    "speed up the input pipeline",
    "measure first",
)


@pytest.mark.parametrize(
    ("changes", "recommendation"),
    [
        # Times beat counts of fallbacks, and only MPS has them.
        ({**MODE, "fallback_calls": None}, MEASURE),
        ({**MODE, "fallback_calls": 0.2}, FALL_BACK),
        ({**MODE, "fallback_calls": 0.2, "fallback_time": 0.01}, KEEP_DEVICE),
        ({"device": "cuda:0", "fallback_calls": 0.2}, KEEP_DEVICE),
        # Known errors and a refused type are cautions.
        (BUG, KEEP_DEVICE),
        ({"refused_dtype": "float16"}, KEEP_DEVICE),
        ({"device_faults": ("computation",)}, CPU),
        ({"non_finite_tokens": 3}, CPU),
        # Rounding explains logits if all entities are the same.
        ({"logits": 0.02}, KEEP_DEVICE),
        ({"logits": 0.02, "entity_agreement": 0.995}, CPU),
        # An interval that holds the gate shows no slow device.
        (speed(0.9, 0.95, 1.1), CPU),
        (speed(1.04, 1.05, 1.06, utilization=0.9), CPU),
        (speed(0.9, 0.95, 1.3), KEEP_DEVICE),
        (speed(0.9, 0.95, 0.99, utilization=0.1), CPU),
        (speed(1.1, 1.15, 1.2, utilization=None), CPU),
        # The CPU is not compared with itself.
        ({"device": "cpu", "entity_agreement": 0.5}, KEEP_DEVICE),
        ({"device": "cpu", **COPIES}, KEEP_DEVICE),
        (COPIES, FEED),
        # Only a curve that grows shows retained memory.
        ({"memory_verdict": "sawtooth", "memory_growth": 0.9}, KEEP_DEVICE),
        ({"task": "training", "memory_verdict": "too short to tell", "memory_growth": 0.9}, MEASURE),
        ({"task": "training", "out_of_memory_at": 1}, "checkpoint / accumulate"),
        # Waiting for the device costs little while it is busy.
        (WAIT, KEEP_DEVICE),
        ({**WAIT, "utilization": 0.1}, FEED),
        ({**WAIT, "utilization": None}, KEEP_DEVICE),
        # The sweep knows better than the profile which batch is good.
        ({"tiny_batch": True}, KEEP_DEVICE),
        ({"tiny_batch": True, "knee_gain": None}, "fix the batch"),
    ],
)
def test_recommendation_beside_the_gates(changes, recommendation):
    assert good(**changes).recommendation == recommendation


@pytest.mark.parametrize(
    ("changes", "sure"),
    [
        (speed(1.22, 1.3, 1.4), True),
        (speed(1.21, 1.3, 1.4), False),
        (speed(1.1, 1.15, 1.22), False),
        (speed(None, 1.3, None), False),
    ],
)
def test_speedup_is_sure_if_its_interval_is_on_one_side_of_the_gate(changes, sure):
    verdict = good(**changes)

    assert (verdict.recommendation, verdict.is_conclusive) == (KEEP_DEVICE, sure)
    assert any("nb.compare(" in line and "rounds=" in line for line in verdict.not_known) is not sure


@pytest.mark.parametrize(
    ("logits", "recommendation", "sure"),
    [
        (3e-6, KEEP_DEVICE, True),
        (1e-5, KEEP_DEVICE, True),
        (None, KEEP_DEVICE, False),
        (0.02, KEEP_DEVICE, False),
        (0.8, CPU, True),
    ],
)
def test_logits_stand_for_the_entities_of_a_module(logits, recommendation, sure):
    """Logits that rounding may explain speak neither against a device nor for it."""
    verdict = good(task="inference", entity_agreement=None, silent_errors=None, logits=logits)

    assert (verdict.recommendation, verdict.is_conclusive) == (recommendation, sure)
    assert ("parity" in {one.name for one in verdict.missing_requirements}) is not sure
    assert any("torch.testing.assert_close" in one for one in verdict.warnings) is not sure


def test_doctor_profile_and_signals_are_not_needed():
    verdict = good(slow_conditions=None, doctor_failures=None, synchronizations=None)

    assert (verdict.recommendation, verdict.is_conclusive) == (KEEP_DEVICE, True)
    assert len(verdict.not_known) == 3


def test_short_memory_beats_a_better_batch():
    verdict = good(headroom=0.02, knee_gain=0.5, batch=8)

    assert (verdict.recommendation, verdict.alternatives) == ("fix the batch", ())
    assert {figure.gate for figure in verdict.reason.figures} == {"headroom"}


def test_training_without_a_row_that_fits_also_moves():
    training = evaluate(evidence_of(TRAINING, out_of_memory_at=1))

    assert [one.recommendation for one in training.alternatives] == ["move to a remote pool"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"refused_dtype": "float16"}, "float16"),
        (BUG, "long matrix product"),
        (WAIT, "nb.runbook.profile(...) names"),
        ({"models": ("Bert", "bundled")}, "Bert, bundled"),
        (speed(0.9, 1.1, 1.2), "No difference"),
        (speed(1.1, 1.2, 1.3), "either side"),
    ],
)
def test_caution(changes, words):
    (caution,) = good(**changes).warnings

    assert words in caution
    assert caution in good(**changes).to_report().sentences


def test_states_of_the_computer_are_said():
    verdict = evaluate(evidence_of("on_battery"))

    assert len(verdict.states) == 2
    assert {f"Beside it: {state}" for state in verdict.states} <= set(verdict.to_report().sentences)


def test_simulated_evidence_is_never_sure():
    verdict = evaluate(evidence_of("simulated"))

    assert verdict.title.startswith("Verdict on mps (SIMULATED): ")
    assert SIMULATION_NOTICE in str(verdict)
    assert "says nothing of MPS" in str(verdict)
    assert verdict.to_dict()["simulated"]
    assert not verdict.is_conclusive


def test_text_has_no_measured_value():
    slow = evidence_of("slow_loader", logits=None)
    slower = replace(slow, speedup=1.13, utilization=0.11, phase_fractions={"data": 0.56, "forward": 0.44})
    led, _, others = evaluate(slow).to_report().metrics

    assert str(evaluate(slow)) == str(evaluate(slower))
    assert "55 %" in evaluate(slow)._repr_html_()
    assert "55 %" not in str(evaluate(slow))
    assert "step spent on waiting for data" in {row[0] for row in led.rows} - {row[0] for row in others.rows}


def test_title_names_operators_and_escapes_them():
    falling = evidence_of("operators_on_fallback")
    page = evaluate(replace(falling, fallback_operators=("<script>alert(1)</script>",)))._repr_html_()

    assert evaluate(falling).title.endswith(": aten::_linalg_eigh.eigenvalues, aten::mode")
    assert "<script>alert" not in page


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"speedup": float("nan")}, "a finite number"),
        ({"speedup": True}, "a finite number"),
        ({"batch": -1}, "a whole number"),
        ({"batch": True}, "a whole number"),
        ({"num_texts": 10**400}, "a whole number"),
        ({"phase_fractions": {"data": "much"}}, "a mapping"),
        ({"phase_fractions": {1: 0.5}}, "a mapping"),
        ({"slow_conditions": "battery"}, "a tuple of strings"),
        ({"tiny_batch": 1}, "True or False"),
        ({"task": "dancing"}, "annotation, inference, training, generation"),
        ({"device": 3}, "a string"),
    ],
)
def test_bad_value_of_a_metric_is_refused(values, words):
    with pytest.raises(errors.ConfigurationError, match=words):
        Evidence(**values)


def test_fallbacks_come_before_speed():
    """A speed that is not known leaves operators on the fallback sure; an unknown cost of them may undo a slow device."""
    falling = good(**MODE, fallback_time=0.2, **speed(None, None, None, utilization=0.9))
    lagging = good(**MODE, fallback_calls=None, **speed(1.0, 1.05, 1.1, utilization=0.9))

    assert (falling.recommendation, falling.is_conclusive, falling.reason.area) == (FALL_BACK, True, "fallbacks")
    assert (lagging.recommendation, lagging.is_conclusive, lagging.reason.area) == (CPU, False, "speed")
    assert falling.blocking_unknowns == ()
    assert [one.name for one in lagging.blocking_unknowns] == ["cost of fallbacks"]


@pytest.mark.parametrize(
    ("unit", "value", "shown"),
    [
        ("names", (), "none"),
        ("count", 0, "none"),
        ("yes or no", False, "no"),
        ("hours", 0.5, "30 minutes"),
        ("hours", 1, "1 hour"),
        ("hours", 2, "2 hours"),
        ("phases", {"data": 0.1, "forward": 0.9}, "data 10 %, forward 90 %"),
    ],
)
def test_value_in_its_unit(unit, value, shown):
    assert format_with_unit(unit, value) == shown


def test_evidence_without_a_measurement_says_so():
    assert Evidence().to_report().sentences == ("Measured: nothing.",)
    assert Evidence().measured == {}


@pytest.mark.parametrize("rows", [requirements(NOTHING), MATRIX], ids=["requirements", "rules"])
def test_requirements_and_rules_are_in_the_order_of_precedence(rows):
    ranks = [row.rank for row in rows]

    assert ranks == sorted(ranks)
    assert set(ranks) == set(range(6))


def test_other_reasons_are_shown():
    (others,) = good(headroom=0.02, phase_fractions={"data": 0.5}).to_report().tables

    assert [row[0] for row in others.rows] == [FEED]


def test_json_of_what_is_not_known():
    values = good(headroom=0.02, speedup=None, entity_agreement=None, slow_conditions=("hot",)).to_dict()

    assert {one["name"]: one["goes_before"] for one in values["not_known"]} == {"parity": True, "speed-up": False}
    assert (values["states"], values["warnings"], values["is_conclusive"]) == (["hot"], [], False)
