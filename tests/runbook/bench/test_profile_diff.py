"""Two profiles of one work at two times: what became faster, and when to stop."""

import json
from dataclasses import replace

import pytest

from openmed_nb._render.display import NOT_APPLICABLE, OK, WARNING
from openmed_nb.errors import ConfigurationError
from openmed_nb.runbook.bench.profile import Profile
from openmed_nb.runbook.bench.timing import CodeLocation, OperatorTime, PhaseTimes, Synchronization
from openmed_nb.runbook.checks.operators.fallbacks import FELL_BACK, Fallback
from openmed_nb.runbook.checks.operators.table import ModuleLocation


def operators(**seconds):
    """Return operators that take so many seconds in a step."""
    return tuple(OperatorTime(f"aten::{name}", "forward", 4.0, time) for name, time in seconds.items())


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
    operators=operators(addmm=0.04, softmax=0.03, gelu=0.01, add=0.001),
    operators_per_step=16.0,
    synchronizations=(Synchronization(".item()", CodeLocation("train.py", 12, "step"), 1.0),),
    fallbacks=(Fallback("aten::mode", FELL_BACK, "forward", ModuleLocation("encoder", "M"), 3, None),),
    created_at="2026-11-01T12:00:00Z",
)


def later(days, **changes):
    """Return the profile of so many days later, with changes."""
    return replace(FIRST, created_at=f"2026-11-{1 + days:02}T12:00:00Z", **changes)


DAMAGED = json.dumps({**FIRST.to_dict(), "synchronizations": [3]})
OTHERS = operators(addmm=0.04, mul=0.03, sub=0.02, softmax=0.01)
REORDERED = operators(gelu=0.04, addmm=0.035, softmax=0.03, add=0.001)


@pytest.mark.parametrize(
    ("second", "status", "evidence"),
    [
        (later(0), NOT_APPLICABLE, "the same operators are on top, less than a week apart"),
        (later(6), NOT_APPLICABLE, "the same operators are on top, less than a week apart"),
        (later(7), WARNING, "after 7 days, and a step is no faster: aten::addmm, aten::softmax, aten::gelu"),
        (later(7, operators=REORDERED), WARNING, "a step is no faster: aten::gelu, aten::addmm, aten::softmax"),
        (later(7, seconds=0.095), WARNING, "a step is no faster"),
        (later(7, seconds=0.2), WARNING, "a step is no faster"),
        (later(14), WARNING, "after 14 days, and a step is no faster"),
        (later(7, seconds=0.08), OK, "the same operators are on top, and a step is faster"),
        (later(7, operators=OTHERS), OK, "others are on top now: aten::addmm, aten::mul, aten::sub"),
        (later(7, operators=()), NOT_APPLICABLE, "no operator was seen"),
        (replace(FIRST, created_at=""), NOT_APPLICABLE, "the same operators are on top, and one has no date"),
    ],
)
def test_stopping_rule(second, status, evidence):
    """Where the same three operators are on top a week or more later and a step is no faster, it is time to stop."""
    found = FIRST.diff(second)

    assert found.findings[-1].status == status
    assert evidence in found.findings[-1].evidence
    assert found.should_stop == (status == WARNING)
    assert found.findings == second.diff(FIRST).findings  # Their dates say which came first.
    if found.should_stop:
        remedy = found.findings[-1].remedy
        assert remedy.startswith(
            f"Stop here: {'move this work' if found.days < 14 else 'split off what they do'}, or accept"
        )
        assert [lane for lane in ("CPU", "MPS", "MLX", "remote pool") if lane not in remedy] == []


@pytest.mark.parametrize(
    ("changes", "step", "changed"),
    [
        ({}, "a step takes as long as before", "those on top take as long as before"),
        ({"seconds": 0.05}, "a step is faster", "those on top take as long as before"),
        ({"seconds": 0.12}, "a step is slower", "those on top take as long as before"),
        (
            {"operators": operators(addmm=0.01, softmax=0.04, gelu=0.0101)},
            "a step takes as long as before",
            "faster: aten::addmm; slower: aten::softmax",
        ),
        (
            {"operators": OTHERS},
            "a step takes as long as before",
            "faster: aten::softmax, aten::gelu; slower: aten::mul",
        ),
    ],
)
def test_what_became_faster_and_slower(changes, step, changed):
    """The step and the operators on top are compared; a change of a tenth or less is none."""
    found = FIRST.diff(later(3, **changes))

    assert found.findings[1].evidence == step
    assert found.findings[2].evidence.startswith(changed)


def test_operators_of_all_phases_count_together():
    """An operator that is called in two phases takes the time of both; on a GPU that both saw, the time there counts."""
    forward = OperatorTime("aten::mm", "forward", 1.0, 0.01, 0.03)
    phases = (forward, replace(forward, phase="backward", device_seconds=0.05))
    seen = replace(FIRST, operators=phases, device_seconds=0.08)

    times = {one.operator: one.after for one in FIRST.diff(replace(seen, device_seconds=None)).operators}
    assert times["aten::mm"] == pytest.approx(0.02)
    (both,) = seen.diff(seen).operators
    assert (both.before, both.after, both.change) == (pytest.approx(0.08), pytest.approx(0.08), "+0 %")


@pytest.mark.parametrize(
    ("changes", "differences"),
    [
        ({"rows": 64}, ("rows",)),
        ({"device": "cpu", "name": "other"}, ("name", "device")),
        ({"simulated": True}, ("simulated",)),
        ({"dtype": "bfloat16"}, ("dtype",)),
    ],
)
def test_other_work_is_not_compared(changes, differences):
    """Times of another batch, model, type or device say nothing; the rule does not hold then."""
    found = FIRST.diff(later(14, **changes))

    assert (found.differences, found.progress, found.should_stop) == (differences, None, False)
    assert f"other {', '.join(differences)}" in str(found)
    assert "ms before" not in found._repr_html_()


def test_profile_is_read_as_it_was_written(tmp_path):
    """A profile in a file is the same value again, with its lines, fallbacks and date."""
    FIRST.save(tmp_path / "first.json")
    read = Profile.read(tmp_path / "first.json")

    assert read == FIRST
    assert read.diff(later(7)).should_stop


def test_difference_has_its_forms():
    """Text without times, HTML with them, and JSON with both hotspots and dates."""
    found = FIRST.diff(later(8))
    stored = json.loads(json.dumps(found.to_dict()))

    assert str(found).startswith("Two profiles of bundled (training step) on mps, 8 days apart: stop here")
    assert "40.000" in found._repr_html_()
    assert "40.000" not in str(found)
    assert (stored["schema"], stored["days"], stored["should_stop"]) == ("openmed_nb/profile_diff/1", 8, True)
    assert stored["hotspots"][0] == ["aten::addmm", "aten::softmax", "aten::gelu"]


@pytest.mark.parametrize("text", ["[]", "{", '{"schema": "openmed_nb/profile/1"}', DAMAGED])
def test_file_of_another_kind_is_refused(tmp_path, text):
    """A file that holds something else, a part of a profile or other fields is refused with one thing to do."""
    file = tmp_path / "other.json"
    file.write_text(text, "utf-8")

    with pytest.raises(ConfigurationError) as caught:
        Profile.read(file)
    assert caught.value.remedy == "Pass a file that Profile.save() has written."


def test_what_is_compared_is_a_profile():
    """Anything else is refused."""
    with pytest.raises(ConfigurationError, match="A profile cannot be compared with str"):
        FIRST.diff("profile.json")
