"""Tests of the comparison of two profiles at different times."""

import json
from dataclasses import replace

import pytest

from openmed_nb._render.display import NOT_APPLICABLE, OK, WARNING
from openmed_nb.errors import ConfigurationError
from openmed_nb.runbook.bench.profile import Profile
from openmed_nb.runbook.bench.timing import CodeLocation, OperatorTime, PhaseTimes, Synchronization
from openmed_nb.runbook.checks.operators.fallbacks import FELL_BACK, Fallback
from openmed_nb.runbook.checks.operators.table import ModuleLocation


def make_operators(**seconds):
    """Return operators with the given seconds per step."""
    return tuple(OperatorTime(f"aten::{name}", "forward", 4.0, value) for name, value in seconds.items())


FIRST = Profile(
    name="bundled",
    task="training step",
    device="mps",
    rows=32,
    steps=50,
    warm_up=5,
    seconds=0.1,
    phase_times=PhaseTimes({"data": 0.01, "forward": 0.09}),
    data_only=0.01,
    compute_only=0.09,
    operators=make_operators(addmm=0.04, softmax=0.03, gelu=0.01, add=0.001),
    operators_per_step=16.0,
    synchronizations=(Synchronization(".item()", CodeLocation("train.py", 12, "step"), 1.0),),
    fallbacks=(Fallback("aten::mode", FELL_BACK, "forward", ModuleLocation("encoder", "M"), 3, None),),
    created_at="2026-11-01T12:00:00Z",
)


def later_profile(days, **changes):
    """Return a profile some days after FIRST, with changes."""
    return replace(FIRST, created_at=f"2026-11-{1 + days:02}T12:00:00Z", **changes)


DAMAGED = json.dumps({**FIRST.to_dict(), "synchronizations": [3]})
CHANGED_OPERATORS = make_operators(addmm=0.04, mul=0.03, sub=0.02, softmax=0.01)
REORDERED = make_operators(gelu=0.04, addmm=0.035, softmax=0.03, add=0.001)


@pytest.mark.parametrize(
    ("second", "status", "evidence"),
    [
        (later_profile(0), NOT_APPLICABLE, "the slowest operators are the same, less than a week apart"),
        (later_profile(6), NOT_APPLICABLE, "the slowest operators are the same, less than a week apart"),
        (later_profile(7), WARNING, "after 7 days, and a step is no faster: aten::addmm, aten::softmax, aten::gelu"),
        (later_profile(7, operators=REORDERED), WARNING, "a step is no faster: aten::gelu, aten::addmm, aten::softmax"),
        (later_profile(7, seconds=0.095), WARNING, "a step is no faster"),
        (later_profile(7, seconds=0.2), WARNING, "a step is no faster"),
        (later_profile(14), WARNING, "after 14 days, and a step is no faster"),
        (later_profile(7, seconds=0.08), OK, "the slowest operators are the same, and a step is faster"),
        (
            later_profile(7, operators=CHANGED_OPERATORS),
            OK,
            "the slowest operators changed to aten::addmm, aten::mul, aten::sub",
        ),
        (later_profile(7, operators=()), NOT_APPLICABLE, "no operator was recorded"),
        (
            replace(FIRST, created_at=""),
            NOT_APPLICABLE,
            "the slowest operators are the same, and one profile has no date",
        ),
    ],
)
def test_stopping_rule(second, status, evidence):
    """The rule applies if the slowest operators and the step time are unchanged after a week or more."""
    diff = FIRST.diff(second)

    assert diff.findings[-1].status == status
    assert evidence in diff.findings[-1].evidence
    assert diff.should_stop == (status == WARNING)
    assert diff.findings == second.diff(FIRST).findings  # The dates determine the order.
    if diff.should_stop:
        remedy = diff.findings[-1].remedy
        action = "Move this workload" if diff.days < 14 else "Split off these operators"
        assert remedy.startswith(f"Stop optimizing. {action}, or accept")
        assert [lane for lane in ("CPU", "MPS", "MLX", "remote pool") if lane not in remedy] == []


@pytest.mark.parametrize(
    ("changes", "step_evidence", "operator_evidence"),
    [
        ({}, "a step takes as long as before", "the slowest operators take as long as before"),
        ({"seconds": 0.05}, "a step is faster", "the slowest operators take as long as before"),
        ({"seconds": 0.12}, "a step is slower", "the slowest operators take as long as before"),
        (
            {"operators": make_operators(addmm=0.01, softmax=0.04, gelu=0.0101)},
            "a step takes as long as before",
            "faster: aten::addmm; slower: aten::softmax",
        ),
        (
            {"operators": CHANGED_OPERATORS},
            "a step takes as long as before",
            "faster: aten::softmax, aten::gelu; slower: aten::mul",
        ),
    ],
)
def test_diff_reports_faster_and_slower_operators(changes, step_evidence, operator_evidence):
    """Changes of up to a tenth are ignored."""
    diff = FIRST.diff(later_profile(3, **changes))

    assert diff.findings[1].evidence == step_evidence
    assert diff.findings[2].evidence.startswith(operator_evidence)


def test_diff_sums_operators_over_phases():
    """GPU times are compared if both profiles have them."""
    forward = OperatorTime("aten::mm", "forward", 1.0, 0.01, 0.03)
    phases = (forward, replace(forward, phase="backward", device_seconds=0.05))
    profile = replace(FIRST, operators=phases, device_seconds=0.08)

    host_times = {times.operator: times.after for times in FIRST.diff(replace(profile, device_seconds=None)).operators}
    assert host_times["aten::mm"] == pytest.approx(0.02)
    (times,) = profile.diff(profile).operators
    assert (times.before, times.after, times.change) == (pytest.approx(0.08), pytest.approx(0.08), "+0 %")


@pytest.mark.parametrize(
    ("changes", "differences"),
    [
        ({"rows": 64}, ("rows",)),
        ({"device": "cpu", "name": "other"}, ("name", "device")),
        ({"simulated": True}, ("simulated",)),
        ({"dtype": "bfloat16"}, ("dtype",)),
    ],
)
def test_diff_does_not_compare_different_workloads(changes, differences):
    diff = FIRST.diff(later_profile(14, **changes))

    assert (diff.differences, diff.progress, diff.should_stop) == (differences, None, False)
    assert f"different {', '.join(differences)}" in str(diff)
    assert "ms before" not in diff._repr_html_()


def test_profile_read_restores_saved_profile(tmp_path):
    FIRST.save(tmp_path / "first.json")
    loaded = Profile.read(tmp_path / "first.json")

    assert loaded == FIRST
    assert loaded.diff(later_profile(7)).should_stop


def test_diff_has_text_html_and_json():
    """The text contains no times."""
    diff = FIRST.diff(later_profile(8))
    stored = json.loads(json.dumps(diff.to_dict()))

    assert str(diff).startswith("Two profiles of bundled (training step) on mps, 8 days apart: stop optimizing")
    assert "40.000" in diff._repr_html_()
    assert "40.000" not in str(diff)
    assert (stored["schema"], stored["days"], stored["should_stop"]) == ("openmed_nb/profile_diff/1", 8, True)
    assert stored["hotspots"][0] == ["aten::addmm", "aten::softmax", "aten::gelu"]


@pytest.mark.parametrize("text", ["[]", "{", '{"schema": "openmed_nb/profile/1"}', DAMAGED])
def test_profile_read_rejects_other_files(tmp_path, text):
    file = tmp_path / "other.json"
    file.write_text(text, "utf-8")

    with pytest.raises(ConfigurationError) as error_info:
        Profile.read(file)
    assert error_info.value.remedy == "Pass a file written by Profile.save()."


def test_diff_rejects_other_types():
    with pytest.raises(ConfigurationError, match="A profile cannot be compared with str"):
        FIRST.diff("profile.json")
