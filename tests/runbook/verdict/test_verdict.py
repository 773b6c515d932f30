"""The verdict: one recommendation for any figures, decided as a table, never surer for knowing less."""

import json
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openmed_nb import errors
from openmed_nb._render.display import NOTE
from openmed_nb.runbook.verdict.gates import Gates, gates
from openmed_nb.runbook.verdict.metrics import GATES, METRICS, TASKS, Evidence
from openmed_nb.runbook.verdict.rules import Case, decision_matrix, requirements
from openmed_nb.runbook.verdict.verdict import judge

NOTHING = Case(Evidence(), vars(Gates()))
MATRIX = decision_matrix(NOTHING, "nb.doctor()")
REQUIREMENTS = requirements(NOTHING)

RECOMMENDED = {rule.recommendation for rule in MATRIX}
FILES = sorted((Path(__file__).parent / "scenarios").glob("*.json"))
SCENARIOS = {file.stem: json.loads(file.read_text("utf-8")) for file in FILES}


def scenario_of(name, **changes):
    """Return the evidence of a scenario, with changes."""
    return replace(evidence_from(SCENARIOS[name]["evidence"]), **changes)


def evidence_from(values):
    """Return evidence that was written as JSON."""
    return Evidence(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def of(evidence, **changed):
    """Return what is recommended, with some thresholds changed."""
    return judge(evidence, gates(**changed)).recommendation


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(name):
    """A scenario leads to its recommendation, for its figures, and names what else has reasons and is not known."""
    scenario = SCENARIOS[name]
    verdict = judge(evidence_from(scenario["evidence"]), gates(**scenario.get("gates", {})))
    named = {figure.gate or figure.name for figure in verdict.reason.figures}

    assert verdict.recommendation == scenario["recommendation"]
    assert set(scenario["figures"]) <= named | {figure.name for figure in verdict.reason.figures}
    assert [one.recommendation for one in verdict.others] == scenario["others"]
    assert verdict.sure == scenario["sure"]
    assert [one.name for one in verdict.unknown] == scenario["unknown"]


def test_every_recommendation_has_a_scenario():
    """Each recommendation of the matrix is reached by a scenario."""
    assert {one["recommendation"] for one in SCENARIOS.values()} == RECOMMENDED


FAST = {"speed_up_low": 2.9, "speed_up": 3.0, "speed_up_high": 3.2}


# A gate, a scenario and figures at the gate, what is recommended there, and a gate that is moved past the figure.
BORDERS = [
    ("speed_up", "idle_device", {"speed_up": 1.3}, "measure first", {"speed_up": 0.31}),
    ("utilisation", "idle_device", {"utilisation": 0.2}, "compute", {"utilisation": 0.21}),
    ("entity_agreement", "annotation_worth_it", {"entity_agreement": 0.99}, "stay", {"entity_agreement": 0.991}),
    ("recall_loss", "annotation_worth_it", {"recall_loss": 0.01}, "stay", {"recall_loss": 0.009}),
    ("logits", "language_model_slow", {"logits": 0.6, **FAST}, "stay", {"logits": 0.59}),
    ("gradients", "training_worth_it", {"gradients": 1e-3}, "stay", {"gradients": 9e-4}),
    (
        "memory_growth",
        "training_worth_it",
        {"memory_growth": 0.26, "memory_verdict": "growing"},
        "stay",
        {"memory_growth": 0.25},
    ),
    ("headroom", "training_worth_it", {"headroom": 0.1}, "stay", {"headroom": 0.11}),
    ("data_share", "annotation_worth_it", {"shares": {"data": 0.25}}, "stay", {"data_share": 0.24}),
    (
        "transfer_share",
        "annotation_worth_it",
        {"shares": {"data": 0.1, "transfer": 0.25}},
        "stay",
        {"transfer_share": 0.24},
    ),
    ("knee_gain", "annotation_worth_it", {"knee_gain": 0.1}, "stay", {"knee_gain": 0.09}),
    ("fallback_time", "operators_on_fallback", {"fallback_time": 0.05}, "stay", {"fallback_time": 0.04}),
    ("fallback_calls", "annotation_worth_it", {"fallback_calls": 0.01}, "stay", {"fallback_calls": 0.009}),
    ("hours", "annotation_worth_it", {"texts_per_second": 1.0, "texts_to_do": 24 * 3600}, "stay", {"hours": 23.9}),
]


@pytest.mark.parametrize(("gate", "name", "changes", "at", "beyond"), BORDERS)
def test_threshold_at_its_border(gate, name, changes, at, beyond):
    """A figure at its threshold is not beyond it, and a threshold that is moved by name past the figure turns the verdict."""
    evidence = scenario_of(name, **changes)
    same = {"logits": {"logits": 0.6}, "speed_up": {"speed_up": 0.3}, "utilisation": {"utilisation": 0.2}}
    there, past = judge(evidence, gates(**same.get(gate, {}))), judge(evidence, gates(**beyond))

    assert there.recommendation.startswith(at)
    assert past.recommendation != there.recommendation
    assert gate in {figure.gate for figure in past.reason.figures}
    assert any(f"Gate changed: {gate} from" in sentence for sentence in past.report().sentences)


def test_every_threshold_has_a_border():
    """No threshold is left out of the table of borders."""
    assert {row[0] for row in BORDERS} == {one.name for one in fields(Gates)}


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
likely = st.sampled_from(list(SCENARIOS)).map(scenario_of)
speeds = st.lists(st.floats(0.5, 2), min_size=3, max_size=3).map(sorted)
near = st.builds(
    lambda ends, busy: scenario_of(
        "annotation_worth_it", speed_up_low=ends[0], speed_up=ends[1], speed_up_high=ends[2], utilisation=busy
    ),
    speeds,
    st.none() | share,
)
thresholds = st.fixed_dictionaries({}, optional={one.name: share for one in fields(Gates)}).map(
    lambda some: gates(**some)
)


@given(evidences, thresholds)
def test_any_evidence_has_one_recommendation(evidence, limits):
    """Any figures lead to exactly one recommendation of the list, which can be shown in every form, and nothing raises."""
    verdict = judge(evidence, limits)

    assert verdict.recommendation in RECOMMENDED
    assert verdict.recommendation not in {one.recommendation for one in verdict.others}
    assert verdict == judge(evidence, limits)
    assert json.loads(json.dumps(verdict.to_dict()))["recommendation"] == verdict.recommendation
    assert str(verdict).startswith("Verdict on ")
    assert verdict.recommendation in verdict._repr_html_()


@given(evidences | likely, thresholds, st.data())
def test_knowing_less_makes_nothing_surer(evidence, limits, data):
    """Taking figures away never makes a verdict sure that was not, and makes no unknown known."""
    names = data.draw(st.sets(st.sampled_from([one.name for one in fields(Evidence) if one.name != "simulated"])))
    before, after = judge(evidence, limits), judge(replace(evidence, **dict.fromkeys(names)), limits)

    assert after.sure <= before.sure
    assert {one.name for one in before.unknown if one.needed} <= {one.name for one in after.unknown if one.needed}


@given(evidences | likely | near, st.just(Gates()) | thresholds)
def test_what_is_stayed_on_is_within_its_gates(evidence, limits):
    """Where a device is surely stayed on, no figure that led to it, and none that decides, is beyond its gate."""
    verdict = judge(evidence, limits)
    if (verdict.recommendation, verdict.sure) != ("stay on this device", True):
        return
    led = [(one.value, one.threshold, one.gate) for one in verdict.reason.figures]
    decide = (() if evidence.kind == "cpu" else ("entity_agreement", "recall_loss", "gradients")) + ALWAYS
    all_of_them = [*led, *((getattr(evidence, name), getattr(limits, name), name) for name in decide)]
    wrong = [
        name
        for value, limit, name in all_of_them
        if value is not None and (limit - value if GATES[name].at_least else value - limit) > 1e-9
    ]

    assert wrong == []
    assert evidence.kind == "cpu" or evidence.speed_up >= 1 + limits.speed_up


ALWAYS = ("headroom", "data_share", "transfer_share", "knee_gain", "hours")


@given(likely, st.sampled_from(["task", "device"]))
def test_without_device_or_task_nothing_is_sure(evidence, name):
    """Without its device or its task, no verdict is sure."""
    assert not judge(replace(evidence, **{name: None})).sure


def test_staying_needs_everything():
    """Whichever figure that matters is missing, staying is not recommended but measuring, and the command is named."""
    for name, command in (
        ("entity_agreement", "nb.runbook.parity("),
        ("headroom", "nb.sweep("),
        ("shares", "nb.compare("),
        ("knee_gain", "nb.sweep("),
        ("speed_up", "nb.compare("),
    ):
        verdict = judge(scenario_of("annotation_worth_it", **{name: None}))

        assert verdict.recommendation == "measure first"
        assert any(command in sentence for sentence in verdict.not_known)
        assert verdict.reason.do[0].startswith(f"Run {command}")


@pytest.mark.parametrize("area", REQUIREMENTS, ids=lambda area: area.name)
def test_one_command_to_type_next(area):
    """Of what measures something that is not known, the first command is one call that can be typed."""
    assert re.fullmatch(r"nb(\.\w+)+\([^()]*\)", area.first_command)
    assert area.command.startswith(area.first_command)


def test_what_cannot_be_said_yet_names_one_command():
    """Where nothing was measured, the verdict says in text and HTML which one command to type next, and nothing vaguer."""
    verdict = judge(Evidence(device="cpu", task="annotation"))

    assert "  What to do: Run nb.sweep(model)." in str(verdict).splitlines()
    assert "<code>nb.sweep(model)</code>" in verdict._repr_html_()
    assert "Not known" not in verdict._repr_html_()


@pytest.mark.parametrize(
    ("changes", "recommendation"),
    [
        ({"fallback_operators": ("aten::mode",), "fallback_calls": None}, "measure first"),
        ({"fallback_operators": ("aten::mode",), "fallback_calls": 0.2}, "fall back to the CPU for these operators"),
        ({"fallback_operators": ("aten::mode",), "fallback_calls": 0.2, "fallback_time": 0.01}, "stay on this device"),
        ({"device": "cuda:0", "fallback_calls": 0.2}, "stay on this device"),
        ({"silent_errors": ("long matrix product",)}, "stay on this device"),
        ({"device_faults": ("computation",)}, "compute on the CPU"),
        ({"not_numbers": 3}, "compute on the CPU"),
        ({"refused_dtype": "float16"}, "stay on this device"),
        ({"logits": 0.02}, "stay on this device"),
        ({"logits": 0.02, "entity_agreement": 0.995}, "compute on the CPU"),
        ({"speed_up_low": 0.9, "speed_up": 0.95, "speed_up_high": 1.1}, "compute on the CPU"),
        ({"speed_up_low": 1.04, "speed_up": 1.05, "speed_up_high": 1.06, "utilisation": 0.9}, "compute on the CPU"),
        ({"speed_up_low": 0.9, "speed_up": 0.95, "speed_up_high": 1.3}, "stay on this device"),
        ({"speed_up_low": 0.9, "speed_up": 0.95, "speed_up_high": 0.99, "utilisation": 0.1}, "compute on the CPU"),
        ({"speed_up_low": 1.1, "speed_up": 1.15, "speed_up_high": 1.2, "utilisation": None}, "compute on the CPU"),
        ({"device": "cpu", "entity_agreement": 0.5}, "stay on this device"),
        ({"memory_verdict": "sawtooth", "memory_growth": 0.9}, "stay on this device"),
        ({"task": "training", "memory_verdict": "too short to tell", "memory_growth": 0.9}, "measure first"),
        ({"task": "training", "out_of_memory_at": 1}, "checkpoint / accumulate"),
        ({"synchronisations": (".item() at train.py:30 in step",)}, "stay on this device"),
        ({"synchronisations": (".item() at train.py:30 in step",), "utilisation": 0.1}, "feed the device faster"),
        ({"synchronisations": (".item() at train.py:30 in step",), "utilisation": None}, "stay on this device"),
        ({"tiny_batch": True}, "stay on this device"),
        ({"tiny_batch": True, "knee_gain": None}, "fix the batch"),
        ({"device": "cpu", "shares": {"data": 0.1, "transfer": 0.6, "forward": 0.3}}, "stay on this device"),
        ({"shares": {"data": 0.1, "transfer": 0.6, "forward": 0.3}}, "feed the device faster"),
    ],
)
def test_cases_beside_the_gates(changes, recommendation):
    """A caution is no reason, an interval that holds its gate shows no slow device, and times beat counts of fallbacks."""
    assert of(scenario_of("annotation_worth_it", **changes)) == recommendation


@pytest.mark.parametrize(
    ("changes", "sure"),
    [
        ({"speed_up_low": 1.22, "speed_up": 1.3, "speed_up_high": 1.4}, True),
        ({"speed_up_low": 1.21, "speed_up": 1.3, "speed_up_high": 1.4}, False),
        ({"speed_up_low": 1.1, "speed_up": 1.15, "speed_up_high": 1.22}, False),
        ({"speed_up_low": None, "speed_up": 1.3, "speed_up_high": None}, False),
    ],
)
def test_speed_up_on_either_side(changes, sure):
    """Where the interval of the speed-up holds its gate, or there is none, staying is not sure, and more pairs are asked for."""
    verdict = judge(scenario_of("annotation_worth_it", **changes))

    assert (verdict.recommendation, verdict.sure) == ("stay on this device", sure)
    assert sure or any("nb.compare(" in line and "pairs=" in line for line in verdict.not_known)


@pytest.mark.parametrize(
    ("changes", "recommendation", "sure"),
    [
        ({"logits": 3e-6}, "stay on this device", True),
        ({}, "stay on this device", False),
        ({"logits": 0.8}, "compute on the CPU", True),
    ],
)
def test_forward_pass_of_a_module(changes, recommendation, sure):
    """Of a module of one's own, logits stand for entities; without them nothing is sure, and what to do by hand is said."""
    nothing = {"task": "inference", "entity_agreement": None, "logits": None, "silent_errors": None}
    verdict = judge(scenario_of("annotation_worth_it", **{**nothing, **changes}))

    assert (verdict.recommendation, verdict.sure) == (recommendation, sure)
    assert any("torch.testing.assert_close" in one for one in verdict.cautions) == ("logits" not in changes)


def test_what_is_not_needed():
    """Without a look at power, doctor and profile a device may be stayed on; that they were not looked at is said."""
    verdict = judge(scenario_of("annotation_worth_it", states=None, doctor_failures=None, synchronisations=None))

    assert (verdict.recommendation, verdict.sure) == ("stay on this device", True)
    assert len(verdict.not_known) == 3


def test_reasons_of_memory():
    """A batch that is too large is not told to grow; if not one row of a training fits, a remote pool has reasons too."""
    verdict = judge(scenario_of("annotation_worth_it", headroom=0.02, knee_gain=0.5, batch=8))
    training = judge(scenario_of("training_worth_it", out_of_memory_at=1))

    assert (verdict.recommendation, verdict.others) == ("fix the batch", ())
    assert {figure.gate for figure in verdict.reason.figures} == {"headroom"}
    assert [one.recommendation for one in training.others] == ["move to a remote pool"]


def test_what_is_said_beside_a_verdict():
    """What does not decide is said: states of the computer, a refused type, known errors, lines that wait, a doubtful speed-up."""
    battery = judge(scenario_of("on_battery"))
    doubtful = scenario_of(
        "annotation_worth_it",
        refused_dtype="float16",
        silent_errors=("long matrix product",),
        synchronisations=(".item() at train.py:30 in step",),
        speed_up_low=0.9,
        speed_up=1.1,
        speed_up_high=1.3,
    )
    told = " ".join(judge(doubtful).cautions)

    assert [one for one in battery.report().sentences if one.startswith("Beside it: ")] == [
        f"Beside it: {state}" for state in battery.states
    ]
    assert len(battery.states) == 2
    for words in ("float16", "long matrix product", "nb.runbook.profile(...) names", "No difference", "either side"):
        assert words in told


def test_simulated_evidence():
    """A verdict on simulated evidence says so, in its title and beside it, and is not sure."""
    verdict = judge(scenario_of("simulated"))

    assert verdict.title == "Verdict on mps (SIMULATED): stay on this device"
    assert NOTE in str(verdict)
    assert "says nothing of MPS" in str(verdict)
    assert verdict.to_dict()["simulated"]


def test_text_and_html():
    """The text is the same for other figures on the same side of their gates; the HTML has each figure once, in words."""
    one = scenario_of("slow_loader", logits=None)
    other = replace(one, speed_up=1.13, utilisation=0.11, shares={"data": 0.56, "forward": 0.44}, texts_per_second=9.0)
    led, _unknown, others = judge(one).report().figures
    rows = dict(others.rows)

    assert str(judge(one)) == str(judge(other))
    assert "55 %" in judge(one)._repr_html_()
    assert "55 %" not in str(judge(one))
    assert rows["step spent on forward"].endswith(" %")
    assert (rows["texts, or rows"], rows["operators that fell back"]) == ("410 a second", "none")
    assert not any("{" in value or "None" in value or "_" in name for name, value in others.rows)
    assert "step spent on waiting for data" in {row[0] for row in led.rows} - set(rows)
    assert "largest difference of a logit" not in rows


def test_what_is_named():
    """The title names operators that shall fall back, escaped in the HTML; who annotates is told what to pass."""
    falling = scenario_of("operators_on_fallback")
    page = judge(replace(falling, fallback_operators=("<script>alert(1)</script>",)))._repr_html_()

    assert judge(falling).title.endswith(": aten::_linalg_eigh.eigenvalues, aten::mode")
    assert "<script>alert" not in page
    assert any("batch_tokens=" in one for one in judge(scenario_of("tiny_batch")).reason.do)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"speed_up": float("nan")}, "a finite number"),
        ({"speed_up": True}, "a finite number"),
        ({"batch": -1}, "a whole number"),
        ({"texts_to_do": 10**400}, "a whole number"),
        ({"shares": {"data": "much"}}, "a mapping"),
        ({"states": "battery"}, "a tuple of strings"),
        ({"task": "dancing"}, "annotation, inference, training, generation"),
        ({"device": 3}, "a string"),
    ],
)
def test_bad_figures(values, words):
    """A figure that is none gets an error that says what it may be."""
    with pytest.raises(errors.ConfigurationError, match=words):
        Evidence(**values)


def test_evidence_comes_back():
    """Evidence written as JSON is the same when it is read."""
    for name in SCENARIOS:
        evidence = scenario_of(name)

        assert evidence_from(json.loads(json.dumps(evidence.to_dict()))) == evidence


def test_logits_in_doubt_stand_for_nothing():
    """Logits beyond their gate that rounding may explain speak neither against a device nor for it: parity is not known."""
    nothing = {"task": "inference", "entity_agreement": None, "silent_errors": None}
    for logits, sure in ((1e-5, True), (0.02, False)):
        verdict = judge(scenario_of("annotation_worth_it", **nothing, logits=logits))
        assert (verdict.recommendation, verdict.sure) == ("stay on this device", sure)
        assert ("parity" in {one.name for one in verdict.unknown}) is not sure


def test_fallbacks_go_before_speed():
    """A speed that is not known leaves operators on the fallback sure; a cost of fallbacks that is not known may undo a slow device."""
    unknown_speed = {"speed_up_low": None, "speed_up": None, "speed_up_high": None, "utilisation": 0.9}
    slow = {"speed_up_low": 1.0, "speed_up": 1.05, "speed_up_high": 1.1, "utilisation": 0.9}
    falling = judge(
        scenario_of("annotation_worth_it", fallback_operators=("aten::mode",), fallback_time=0.2, **unknown_speed)
    )
    lagging = judge(scenario_of("annotation_worth_it", fallback_operators=("aten::mode",), fallback_calls=None, **slow))

    assert (falling.recommendation, falling.sure) == ("fall back to the CPU for these operators", True)
    assert (lagging.recommendation, lagging.sure) == ("compute on the CPU", False)
    assert [one.to_dict()["reasons"][0]["area"] for one in (falling, lagging)] == ["fallbacks", "speed"]
    assert [[one.name for one in verdict.before] for verdict in (falling, lagging)] == [[], ["cost of fallbacks"]]


SHOWN = {
    "models": (("a", "b"), "names of the model", "a, b"),
    "device": ("mps", "device", "mps"),
    "task": ("training", "task", "training"),
    "speed_up_low": (1.5, "speed-up over the CPU, at least", "1.5 times"),
    "speed_up": (2.0, "speed-up over the CPU", "2 times"),
    "speed_up_high": (2.25, "speed-up over the CPU, at most", "2.25 times"),
    "utilisation": (0.71, "utilisation", "71 %"),
    "synchronisations": ((), "places where a step waits for the device", "none"),
    "tiny_batch": (True, "batch so small that starting operators takes most of the time", "yes"),
    "batch_tokens": (4096, "tokens that a batch may have", "4,096"),
    "batch": (32, "rows in use", "32"),
    "knee": (64, "rows at the knee", "64"),
    "best_batch": (128, "rows at the highest throughput", "128"),
    "knee_gain": (0.5, "more throughput at the knee", "50 %"),
    "out_of_memory_at": (0, "out of memory at rows", "none"),
    "headroom": (0.25, "memory limit that stays free", "25 %"),
    "memory_growth": (0.3, "growth over ten epochs", "30 %"),
    "memory_verdict": ("growing", "memory curve", "growing"),
    "entity_agreement": (0.99, "entities that are the same", "99 %"),
    "logits": (3e-6, "largest difference of a logit", "3e-06"),
    "not_numbers": (3, "tokens with NaN or infinity", "3"),
    "recall_loss": (0.01, "recall lost", "1 %"),
    "gradients": (1e-4, "largest relative difference of a gradient", "0.0001"),
    "refused_dtype": ("float16", "type in which the entities are not kept", "float16"),
    "refused_operators": (("aten::eig",), "operators that MPS refuses", "aten::eig"),
    "fallback_operators": (("aten::mode",), "operators that fell back", "aten::mode"),
    "fallback_time": (0.2, "time spent in what fell back", "20 %"),
    "fallback_calls": (0.02, "calls that fell back", "2 %"),
    "device_faults": (("computation",), "computed wrongly", "computation"),
    "silent_errors": (("long matrix product",), "known silent errors that were seen", "long matrix product"),
    "doctor_failures": (("packages",), "failed in nb.doctor()", "packages"),
    "states": (("power: battery",), "states that spoil times", "power: battery"),
    "texts_per_second": (410.0, "texts, or rows", "410 a second"),
    "texts_to_do": (2_952_000, "texts to do", "2,952,000"),
}
"""A value of each figure, what it is called, and how it is shown."""


def test_every_figure_is_shown():
    """Each figure is shown by its name with its unit, phases and what is computed from others too; nothing else is."""
    evidence = Evidence(**{name: value for name, (value, *_) in SHOWN.items()}, shares=PHASES, simulated=True)
    told = evidence.marked()
    (table,) = told.figures
    computed = {
        "step spent on waiting for data": "10 %",
        "step spent on copies to the device": "20 %",
        "step spent on forward": "70 %",
        "time for all texts": "2 hours",
    }

    assert dict(table.rows) == {words: shown for _, words, shown in SHOWN.values()} | computed
    assert (table.caption, table.columns, told.title) == ("", ("figure", "value"), "Evidence (SIMULATED)")
    assert set(evidence.measured) == {*SHOWN, "shares"}
    assert Evidence(device="cpu").report().sentences == ("Measured: device.",)
    assert Evidence().report().sentences == ("Measured: nothing.",)
    assert dict(Evidence(tiny_batch=False).rows()) == {SHOWN["tiny_batch"][1]: "no"}


PHASES = {"data": 0.1, "transfer": 0.2, "forward": 0.7}


def test_what_a_verdict_rests_on():
    """Requirements and rules stand in the order of precedence; each requirement has a name and a command of its own toolkit."""
    for ranks in ([one.rank for one in REQUIREMENTS], [rule.rank for rule in MATRIX]):
        assert ranks == sorted(ranks)
        assert set(ranks) == set(range(6))
    assert len({one.name for one in REQUIREMENTS}) == len(REQUIREMENTS)
    assert all(one.command.startswith("nb.") for one in REQUIREMENTS)


def test_tables_of_a_verdict():
    """What led to a verdict, what else was measured and what else has reasons are tables, each figure with its gate."""
    told = judge(scenario_of("annotation_worth_it", headroom=0.02, shares={"data": 0.5})).report()
    (others,), (led, unknown, measured) = told.tables, told.figures

    assert (others.caption, others.columns) == (
        "Other recommendations that have reasons",
        ("recommendation", "because", "what to do"),
    )
    assert [row[0] for row in others.rows] == ["feed the device faster"]
    assert led.caption == "What led to it"
    assert dict(zip(led.columns, led.rows[0], strict=True)) == {
        "figure": "memory limit that stays free",
        "speaks for": "fix the batch",
        "value": "2 %",
        "gate": "headroom",
        "threshold": "10 %",
    }
    assert (unknown.caption, unknown.columns[1]) == ("What is not known", "may change the verdict")
    assert all(table.folded for table in (*told.figures, *judge(Evidence()).report().figures))
    assert (measured.caption, measured.columns) == ("What else was measured", ("figure", "value"))


def test_verdict_as_json():
    """As JSON a verdict has its reasons with their figures, what is not known and whether that goes before it, and all that was said."""
    evidence = scenario_of("annotation_worth_it", headroom=0.02, speed_up=None, entity_agreement=None, states=("hot",))
    told = judge(evidence).to_dict()
    (reason,) = told["reasons"]

    assert set(told) == {
        *("schema", "recommendation", "sure", "simulated", "reasons", "not_known"),
        *("states", "cautions", "gates", "evidence"),
    }
    assert (reason["recommendation"], reason["area"]) == ("fix the batch", "memory")
    assert reason["figures"] == [
        {"name": "memory limit that stays free", "value": 0.02, "unit": "share", "gate": "headroom", "limit": 0.1}
    ]
    assert [len(reason[name]) for name in ("when", "do", "change")] == [1, 1, 1]
    assert {one["name"]: one["goes_before"] for one in told["not_known"]} == {"parity": True, "speed-up": False}
    assert all(one["command"].startswith("nb.") for one in told["not_known"])
    assert (told["states"], told["cautions"], told["sure"], told["simulated"]) == (["hot"], [], False, False)
    assert (told["schema"], told["gates"]["schema"]) == ("openmed_nb/verdict/1", "openmed_nb/gates/1")
    assert told["evidence"] == evidence.to_dict()
