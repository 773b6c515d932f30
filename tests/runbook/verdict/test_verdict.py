import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openmed_nb import errors
from openmed_nb._render.display import OK, SIMULATION_NOTICE
from openmed_nb.runbook.verdict.metrics import GATES, METRICS, TASKS, Evidence, Gates, format_value, gates
from openmed_nb.runbook.verdict.rules import (
    CHECKPOINT,
    CPU,
    FALL_BACK,
    FIX_BATCH,
    FIX_INPUT_PIPELINE,
    KEEP_DEVICE,
    MEASURE,
    REMOTE,
    EvidenceCase,
    build_decision_matrix,
    list_requirements,
)
from openmed_nb.runbook.verdict.verdict import SIMULATED_EVIDENCE_NOTICE, UNKNOWN_MODULE_PARITY, evaluate
from openmed_nb.training.curve import INSUFFICIENT_DATA

NOTHING = EvidenceCase()
PROBLEMS, CONCLUSIONS = build_decision_matrix(NOTHING, "nb.doctor()")
MATRIX = PROBLEMS + CONCLUSIONS

RECOMMENDED = {rule.recommendation for rule in MATRIX}
FILES = sorted((Path(__file__).parent / "scenarios").glob("*.json"))
SCENARIOS = {file.stem: json.loads(file.read_text("utf-8")) for file in FILES}


def read_evidence(values, **changes):
    """Return evidence from JSON values, with changes."""
    return Evidence(
        **{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()} | changes
    )


def load_evidence(name, **changes):
    """Return the evidence of a scenario, with changes."""
    return read_evidence(SCENARIOS[name]["evidence"], **changes)


def judge_good_device(**changes):
    """Return the verdict on a device that is good for annotation, with changes."""
    return evaluate(load_evidence("annotation_worth_it", **changes))


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
    assert (verdict.to_report().status == OK) == (verdict.is_conclusive and verdict.recommendation == KEEP_DEVICE)


def test_every_recommendation_has_a_scenario():
    assert {scenario["recommendation"] for scenario in SCENARIOS.values()} == RECOMMENDED


FAST = {"speedup_low": 2.9, "speedup": 3.0, "speedup_high": 3.2}
GROWING = {"memory_growth": 0.26, "memory_verdict": "growing"}
A_DAY = {"texts_per_second": 1.0, "num_texts": 24 * 3600}
GOOD = "annotation_worth_it"
TRAINING = "training_worth_it"
IDLE = "idle_device"

# Gate, scenario with the metric at its gate, recommendation there, and a threshold that the metric violates.
BOUNDARIES = [
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
# Gates that are moved to the value of the metric.
AT_THE_GATE = {"logits": 0.6, "speedup": 0.3, "utilization": 0.2}


@pytest.mark.parametrize(("gate", "name", "changes", "recommendation", "limit"), BOUNDARIES)
def test_metric_at_its_gate_does_not_violate_it(gate, name, changes, recommendation, limit):
    evidence = load_evidence(name, **changes)
    at_gate = evaluate(evidence, gates(**{gate: AT_THE_GATE[gate]} if gate in AT_THE_GATE else {}))
    beyond_gate = evaluate(evidence, gates(**{gate: limit}))

    assert at_gate.recommendation == recommendation
    assert beyond_gate.recommendation != recommendation
    assert gate in beyond_gate.reason.metrics
    assert any(gate in sentence for sentence in beyond_gate.to_report().sentences)


def test_every_gate_has_a_boundary_test():
    assert [gate for gate, *_ in BOUNDARIES] == list(GATES)


finite = st.floats(allow_nan=False, allow_infinity=False) | st.floats(-1, 2)
fraction = st.floats(0, 1)
VALUES = {
    **dict.fromkeys(("fraction", "difference", "ratio", "rate", "hours"), finite),
    "text": st.text(max_size=5) | st.sampled_from(["mps", "cuda:0", "cpu", "growing", "flat", INSUFFICIENT_DATA, ""]),
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
    lambda interval, utilization: load_evidence(GOOD, **make_speedup(*interval, utilization=utilization)),
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
    if (verdict.recommendation, verdict.is_conclusive) != (KEEP_DEVICE, True):
        return
    case = EvidenceCase(evidence, limits)
    deciding = {"headroom", "data_fraction", "knee_gain", "hours", *verdict.reason.metrics} & {*GATES}
    if evidence.device_type != "cpu":
        deciding |= {"entity_agreement", "recall_loss", "gradients", "transfer_fraction"}
        assert evidence["speedup"] >= 1 + limits.speedup
    for name in deciding - {"speedup"}:
        if evidence[name] is not None:
            excess = evidence[name] - getattr(limits, name)
            assert (-excess if GATES[name].is_minimum else excess) <= 1e-9, name
    assert not case.exceeding("hours")


@given(likely, st.sampled_from(["task", "device"]))
def test_verdict_without_device_or_task_is_inconclusive(evidence, name):
    assert not evaluate(Evidence(**{**evidence, name: None})).is_conclusive


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
def test_keeping_the_device_needs_every_relevant_metric(name, command):
    verdict = judge_good_device(**{name: None})

    assert verdict.recommendation == MEASURE
    assert any(command in sentence for sentence in verdict.not_known)
    assert verdict.reason.actions[0].startswith(f"Run {command}")


def test_batch_size_of_a_sweep_needs_a_comparison():
    verdict = judge_good_device(knee_gain=None, batch=None)

    assert verdict.reason.actions == ("Run nb.compare(model, texts).",)


def test_commands_are_calls_that_are_formatted_as_code():
    verdict = evaluate(Evidence(device="cpu", task="annotation"))

    assert all(re.fullmatch(r"nb(\.\w+)+\([^()]*\)", requirement.command) for requirement in list_requirements(NOTHING))
    assert "Run nb.sweep(model)." in str(verdict)
    assert "<code>nb.sweep(model)</code>" in verdict._repr_html_()


@pytest.mark.parametrize(
    ("changes", "recommendation", "command"),
    [
        ({}, KEEP_DEVICE, "nb.sweep(model)"),
        ({"texts_per_second": None, "task": None}, KEEP_DEVICE, "nb.compare(model, texts)"),
        ({"no_gpu": None}, MEASURE, "nb.sweep(model)"),
        ({"no_gpu": False}, MEASURE, "nb.sweep(model)"),
        # The CPU has a problem that a change solves, whether or not there is another device.
        ({"phase_fractions": {"data": 0.6, "forward": 0.4}}, FIX_INPUT_PIPELINE, ""),
        # No device was measured that is not there.
        ({"device": "mps"}, MEASURE, "nb.runbook.parity(model, texts)"),
    ],
)
def test_computer_without_gpu_ends_in_an_answer(changes, recommendation, command):
    verdict = evaluate(load_evidence("only_cpu", **changes))

    assert verdict.recommendation == recommendation
    assert f"Run {command}." in " ".join(verdict.reason.actions) or not command


@pytest.mark.parametrize(
    ("changes", "fragments"),
    [
        ({}, ("180,000 notes", "220,000", "1.22 times")),
        ({"task": "training"}, ("180,000 rows",)),
        ({"knee": 4}, ("at least 4 rows",)),
        ({"knee": 4, "knee_gain": 0.0}, ("is 4 rows",)),
        ({"num_texts": 360_000}, ("2 hours",)),
    ],
)
def test_answer_has_the_speed_of_the_cpu(changes, fragments):
    verdict = evaluate(load_evidence("only_cpu", **changes))

    assert all(fragment in " ".join(verdict.answer) for fragment in fragments)
    assert set(verdict.answer) <= set(verdict.to_report().sentences)
    assert verdict.to_dict()["break_even"]["rows_per_hour"] == 180_000


def test_break_even_follows_the_gate_and_needs_a_cpu():
    cpu = evaluate(load_evidence("only_cpu"), gates(speedup=1.0))

    assert cpu.break_even.gpu_rows_per_hour == 360_000
    assert evaluate(load_evidence("only_cpu", device="mps")).break_even is None
    for rate in (None, 0.0, -1.0):
        assert evaluate(load_evidence("only_cpu", texts_per_second=rate)).break_even is None


FALLBACK = {"fallback_operators": ("aten::mode",)}
SYNCHRONIZATION = {"synchronizations": (".item() at train.py:30 in step",)}
SLOW_TRANSFER = {"phase_fractions": {"data": 0.1, "transfer": 0.6, "forward": 0.3}}
KNOWN_BUG = {"silent_errors": ("long matrix product",)}


def make_speedup(low, median, high, **metrics):
    """Return the metrics of a speedup with its interval."""
    return {"speedup_low": low, "speedup": median, "speedup_high": high, **metrics}


@pytest.mark.parametrize(
    ("changes", "recommendation"),
    [
        # The time of fallbacks has precedence over their count, and only MPS has fallbacks.
        ({**FALLBACK, "fallback_calls": None}, MEASURE),
        ({**FALLBACK, "fallback_calls": 0.2}, FALL_BACK),
        ({**FALLBACK, "fallback_calls": 0.2, "fallback_time": 0.01}, KEEP_DEVICE),
        ({"device": "cuda:0", "fallback_calls": 0.2}, KEEP_DEVICE),
        # Known errors and an unsupported dtype are warnings.
        (KNOWN_BUG, KEEP_DEVICE),
        ({"refused_dtype": "float16"}, KEEP_DEVICE),
        ({"device_faults": ("computation",)}, CPU),
        ({"non_finite_tokens": 3}, CPU),
        # Rounding explains logits if all entities are the same.
        ({"logits": 0.02}, KEEP_DEVICE),
        ({"logits": 0.02, "entity_agreement": 0.995}, CPU),
        # An interval that contains the gate does not show a slow device.
        (make_speedup(0.9, 0.95, 1.1), CPU),
        (make_speedup(1.04, 1.05, 1.06, utilization=0.9), CPU),
        (make_speedup(0.9, 0.95, 1.3), KEEP_DEVICE),
        (make_speedup(0.9, 0.95, 0.99, utilization=0.1), CPU),
        (make_speedup(1.1, 1.15, 1.2, utilization=None), CPU),
        # The CPU is not compared with itself.
        ({"device": "cpu", "entity_agreement": 0.5}, KEEP_DEVICE),
        ({"device": "cpu", **SLOW_TRANSFER}, KEEP_DEVICE),
        (SLOW_TRANSFER, FIX_INPUT_PIPELINE),
        # Only a growing curve shows retained memory.
        ({"memory_verdict": "sawtooth", "memory_growth": 0.9}, KEEP_DEVICE),
        ({"task": "training", "memory_verdict": INSUFFICIENT_DATA, "memory_growth": 0.9}, MEASURE),
        ({"task": "training", "out_of_memory_at": 1}, CHECKPOINT),
        # Waiting for the device costs little while it is busy.
        (SYNCHRONIZATION, KEEP_DEVICE),
        ({**SYNCHRONIZATION, "utilization": 0.1}, FIX_INPUT_PIPELINE),
        ({**SYNCHRONIZATION, "utilization": None}, KEEP_DEVICE),
        # The sweep has precedence over the profile for the batch size.
        ({"tiny_batch": True}, KEEP_DEVICE),
        ({"tiny_batch": True, "knee_gain": None}, FIX_BATCH),
    ],
)
def test_recommendation_without_a_gate(changes, recommendation):
    assert judge_good_device(**changes).recommendation == recommendation


@pytest.mark.parametrize(
    ("changes", "is_conclusive"),
    [
        (make_speedup(1.22, 1.3, 1.4), True),
        (make_speedup(1.21, 1.3, 1.4), False),
        (make_speedup(1.1, 1.15, 1.22), False),
        (make_speedup(None, 1.3, None), False),
    ],
)
def test_speedup_is_conclusive_if_its_interval_excludes_the_gate(changes, is_conclusive):
    verdict = judge_good_device(**changes)

    assert (verdict.recommendation, verdict.is_conclusive) == (KEEP_DEVICE, is_conclusive)
    assert any("nb.compare(" in line for line in verdict.not_known) is not is_conclusive


@pytest.mark.parametrize(
    ("logits", "recommendation", "is_conclusive"),
    [
        (3e-6, KEEP_DEVICE, True),
        (1e-5, KEEP_DEVICE, True),
        (None, KEEP_DEVICE, False),
        (0.02, KEEP_DEVICE, False),
        (0.8, CPU, True),
    ],
)
def test_logits_replace_entities_for_inference(logits, recommendation, is_conclusive):
    """Logit differences that rounding may explain are evidence neither against a device nor for it."""
    verdict = judge_good_device(task="inference", entity_agreement=None, silent_errors=None, logits=logits)

    assert (verdict.recommendation, verdict.is_conclusive) == (recommendation, is_conclusive)
    assert ("parity" in {requirement.name for requirement in verdict.missing_requirements}) is not is_conclusive
    assert (UNKNOWN_MODULE_PARITY in verdict.warnings) is not is_conclusive


def test_doctor_profile_and_system_status_are_optional():
    verdict = judge_good_device(slow_conditions=None, doctor_failures=None, synchronizations=None)

    assert (verdict.recommendation, verdict.is_conclusive) == (KEEP_DEVICE, True)
    assert len(verdict.not_known) == 3


def test_memory_shortage_precedes_a_better_batch():
    verdict = judge_good_device(headroom=0.02, knee_gain=0.5, batch=8)

    assert list_recommendations(verdict) == [FIX_BATCH]
    assert verdict.reason.metrics == ("headroom",)


def test_training_with_single_row_out_of_memory_may_need_another_computer():
    training = evaluate(load_evidence(TRAINING, out_of_memory_at=1))

    assert list_recommendations(training) == [CHECKPOINT, REMOTE]


@pytest.mark.parametrize(
    ("changes", "fragment"),
    [
        ({"refused_dtype": "float16"}, "float16"),
        (KNOWN_BUG, "long matrix product"),
        (SYNCHRONIZATION, "nb.runbook.profile(...)"),
        (make_speedup(0.9, 1.1, 1.2), "No significant difference"),
        (make_speedup(1.1, 1.2, 1.3), "includes its threshold"),
    ],
)
def test_warning_is_reported(changes, fragment):
    verdict = judge_good_device(**changes)
    (warning,) = verdict.warnings

    assert fragment in warning
    assert warning in verdict.to_report().sentences


def test_slow_conditions_are_reported():
    verdict = evaluate(load_evidence("on_battery"))

    assert len(verdict.evidence["slow_conditions"]) == 2
    assert all(condition in str(verdict) for condition in verdict.evidence["slow_conditions"])


def test_simulated_evidence_is_inconclusive():
    verdict = evaluate(load_evidence("simulated"))

    assert str(verdict).startswith("Verdict on mps (SIMULATED): ")
    assert SIMULATION_NOTICE in str(verdict)
    assert SIMULATED_EVIDENCE_NOTICE in str(verdict)
    assert verdict.to_dict()["simulated"]
    assert not verdict.is_conclusive


def test_text_has_no_measured_values():
    slow = load_evidence("slow_loader", logits=None)
    slower = Evidence(
        **{**slow, "speedup": 1.13, "utilization": 0.11, "phase_fractions": {"data": 0.56, "forward": 0.44}}
    )
    (measurements,) = evaluate(slow).to_report().metrics

    assert str(evaluate(slow)) == str(evaluate(slower))
    assert (METRICS["data_fraction"].label, "55%", "at most 25%") in measurements.rows
    assert "55%" in evaluate(slow)._repr_html_()
    assert "55%" not in str(evaluate(slow))


def test_title_names_operators_and_escapes_them():
    evidence = load_evidence("operators_on_fallback")
    page = evaluate(Evidence(**{**evidence, "fallback_operators": ("<script>alert(1)</script>",)}))._repr_html_()

    assert evaluate(evidence).to_report().title.endswith(": aten::_linalg_eigh.eigenvalues, aten::mode")
    assert "<script>alert" not in page


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"speedup": float("nan")}, "a finite number"),
        ({"speedup": True}, "a finite number"),
        ({"batch": -1}, "an integer"),
        ({"batch": True}, "an integer"),
        ({"batch": 1.5}, "an integer"),
        ({"num_texts": 10**400}, "an integer"),
        ({"phase_fractions": {"data": "much"}}, "a mapping"),
        ({"phase_fractions": {1: 0.5}}, "a mapping"),
        ({"slow_conditions": "battery"}, "a tuple of strings"),
        ({"slow_conditions": (1,)}, "a tuple of strings"),
        ({"tiny_batch": 1}, "True or False"),
        ({"task": "dancing"}, "annotation, inference, training, generation"),
        ({"device": 3}, "a string"),
        ({"speed": 3}, "Did you mean 'speedup'"),
    ],
)
def test_invalid_metric_raises(values, expected):
    with pytest.raises(errors.ConfigurationError, match=expected):
        Evidence(**values)


def test_fallbacks_precede_speed():
    """A missing speedup does not affect a verdict on fallbacks, but missing fallback costs affect a verdict on speed."""
    fallback_verdict = judge_good_device(
        **FALLBACK, fallback_time=0.2, **make_speedup(None, None, None, utilization=0.9)
    )
    speed_verdict = judge_good_device(**FALLBACK, fallback_calls=None, **make_speedup(1.0, 1.05, 1.1, utilization=0.9))

    assert (fallback_verdict.recommendation, fallback_verdict.is_conclusive) == (FALL_BACK, True)
    assert (speed_verdict.recommendation, speed_verdict.is_conclusive) == (CPU, False)
    assert fallback_verdict.blocking_requirements == ()
    assert [requirement.name for requirement in speed_verdict.blocking_requirements] == ["fallback cost"]
    assert (
        "Missing, and could change the verdict: fallback cost. Run nb.runbook.fallbacks()." in speed_verdict.not_known
    )


@pytest.mark.parametrize(
    ("unit", "value", "text"),
    [
        ("names", (), "none"),
        ("count", 0, "none"),
        ("boolean", False, "no"),
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


def test_lanes_have_strengths_and_risks_in_every_form():
    lanes = evaluate(Evidence()).lanes

    assert [row[0] for row in lanes.to_report().tables[0].rows] == ["CPU", "MPS", "MLX", "remote pool"]
    assert "MLX; built for Apple GPUs" in str(lanes)
    assert "<table" in lanes._repr_html_()
    assert lanes.to_dict()["recommendation"] == MEASURE
