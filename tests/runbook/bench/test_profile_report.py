"""Findings and reports of profiles for given measurements, and the comparison of two profiles at different times."""

import json
from dataclasses import replace

import pytest

from openmed_nb._render.display import NOT_APPLICABLE, OK, SIMULATION_NOTICE, WARNING
from openmed_nb.errors import ConfigurationError
from openmed_nb.runbook.bench.fallbacks import FELL_BACK, Fallback
from openmed_nb.runbook.bench.profile import WAIT_REMEDIES, Profile
from openmed_nb.runbook.bench.timing import CodeLocation, OperatorTime, PhaseTimes, Synchronization


def make_operators(**seconds):
    """Return operators with the given seconds per step."""
    return tuple(OperatorTime(f"aten::{name}", "forward", 4.0, value) for name, value in seconds.items())


HEALTHY = Profile(
    name="bundled",
    task="training step",
    device="mps",
    rows=32,
    steps=50,
    seconds=0.125,
    phase_times=PhaseTimes({"data": 0.005, "forward": 0.12}),
    data_only=0.004,
    compute_only=0.1,
    operators=make_operators(addmm=0.04, softmax=0.03, gelu=0.01, add=0.001),
    operators_per_step=100.0,
    launch_seconds=0.01,
    created_at="2026-11-01T12:00:00Z",
)
USER_LINE = CodeLocation("train.py", 12, "step")
LIBRARY_LINE = CodeLocation("train.py", 9, "step", "transformers.masking_utils", in_model=True)
TO_MPS = ".to('mps')"
FALLBACK = Fallback("aten::mode", FELL_BACK, 3)


def make_wait(place, call=".item()", reason="read"):
    """Return a call that waits once per step."""
    return Synchronization(call, place, 1.0, reason)


WAITING = replace(
    HEALTHY,
    synchronizations=(make_wait(USER_LINE), make_wait(LIBRARY_LINE)),
    fallbacks=(FALLBACK,),
    fallbacks_per_step=1.0,
)


def get_finding(profile, name):
    """Return a finding of a profile."""
    return next(finding for finding in profile.findings if finding.name == name)


def test_findings_of_healthy_profile_are_ok():
    assert [finding.name for finding in HEALTHY.findings] == ["data", "synchronization", "tiny batch", "fallback"]
    assert {finding.status for finding in HEALTHY.findings} == {OK}
    assert HEALTHY.bottlenecks == ()


@pytest.mark.parametrize(("fraction", "status"), [(0.0, OK), (0.25, OK), (0.26, WARNING), (0.9, WARNING)])
def test_data_finding_warns_above_a_quarter(fraction, status):
    """The remedy depends on whether the loader already has workers."""
    profile = replace(HEALTHY, phase_times=PhaseTimes({"data": fraction, "forward": 1 - fraction}))

    assert get_finding(profile, "data").status == status
    assert ("data" in profile.bottlenecks) is (status == WARNING)
    if status == WARNING:
        assert "persistent_workers" not in profile.findings[0].remedy
        assert "persistent_workers=True" in replace(profile, workers=2).findings[0].remedy


@pytest.mark.parametrize(
    ("device", "waits", "status", "evidence"),
    [
        ("mps", [make_wait(USER_LINE)], WARNING, ".item() at train.py:12 in step"),
        ("cuda:0", [make_wait(LIBRARY_LINE), make_wait(USER_LINE)], WARNING, ".item() at train.py:12 in step"),
        ("mps", [make_wait(LIBRARY_LINE)], OK, "no line"),
        ("mps", [], OK, "no line"),
        ("mps", [make_wait(USER_LINE, TO_MPS, "batch")], OK, "waits only for its batch"),
        (
            "mps",
            [make_wait(USER_LINE, TO_MPS, "copy"), make_wait(USER_LINE, TO_MPS, "batch")],
            WARNING,
            "device: .to('mps') at train.py:12 in step",
        ),
        ("cpu", [make_wait(USER_LINE)], NOT_APPLICABLE, "would: .item() at train.py:12 in step"),
        (
            "mps",
            [make_wait(CodeLocation("train.py", line, "step")) for line in range(1, 6)],
            WARNING,
            "train.py:3 in step, and 2 others",
        ),
    ],
)
def test_synchronization_finding_names_lines(device, waits, status, evidence):
    """Lines of user code warn on a GPU, up to three by name. Models of a library and the CPU do not warn."""
    finding = get_finding(replace(HEALTHY, device=device, synchronizations=tuple(waits)), "synchronization")

    assert finding.status == status
    assert evidence in finding.evidence


def test_synchronization_remedy_is_that_of_first_wait():
    waits = (make_wait(USER_LINE, reason="copy"), make_wait(USER_LINE))

    assert get_finding(replace(HEALTHY, synchronizations=waits), "synchronization").remedy == WAIT_REMEDIES["copy"]


def test_headline_names_longest_phase():
    """The phase of a custom step is not named."""
    headline = "A step takes 125.00 ms on mps"

    assert HEALTHY.headline == f"{headline}: 96% of it is forward"
    assert replace(HEALTHY, phase_times=PhaseTimes({"data": 0.01, "step": 0.99})).headline == headline


@pytest.mark.parametrize(
    ("device", "changes", "status"),
    [
        ("mps", {"launch_seconds": 0.05}, OK),
        ("mps", {"launch_seconds": 0.051}, WARNING),
        # Launches overlap with the device, so their sum may exceed the step.
        ("mps", {"launch_seconds": 0.2}, WARNING),
        ("xpu", {"launch_seconds": None}, NOT_APPLICABLE),
        ("mps", {"operators_per_step": 0.0}, NOT_APPLICABLE),
        ("mps", {"launch_seconds": 0.09, "simulated": True}, NOT_APPLICABLE),
        ("cpu", {"operator_seconds": 0.02}, OK),
        ("cpu", {"operator_seconds": 0.0199}, WARNING),
        ("cpu", {"operator_seconds": 0.0199, "simulated": True}, WARNING),
        # Recorded kernels take precedence over the launch overhead.
        ("cuda", {"device_seconds": 0.049, "launch_seconds": 0.01}, WARNING),
        ("cuda", {"device_seconds": 0.051, "launch_seconds": 0.09}, OK),
        # A slow custom step may spend its time in Python code, which only operator times on the CPU exclude.
        ("cpu", {"task": "own step", "compute_only": 1.0, "operator_seconds": 0.011}, WARNING),
        ("mps", {"task": "own step", "compute_only": 1.0}, NOT_APPLICABLE),
        ("mps", {"task": "own step", "compute_only": 0.015}, WARNING),
    ],
)
def test_tiny_batch_finding(device, changes, status):
    """A batch is tiny if more than half of a step is launch overhead, or if kernels run for less than half of it."""
    assert get_finding(replace(HEALTHY, device=device, **changes), "tiny batch").status == status


def test_fallback_finding_applies_to_mps_only():
    assert get_finding(replace(WAITING, device="cuda"), "fallback").status == NOT_APPLICABLE
    assert get_finding(WAITING, "fallback").status == WARNING


def test_profile_derived_metrics():
    assert HEALTHY.launch_fraction == pytest.approx(0.1)
    assert HEALTHY.phase_fractions == {"data": pytest.approx(0.04), "forward": pytest.approx(0.96)}
    assert WAITING.fallback_fraction == 0.01


def test_profile_is_saved_and_read(tmp_path):
    """An existing file is replaced."""
    file = tmp_path / "profile.json"
    for _ in range(2):
        WAITING.save(file)
    data = json.loads(file.read_text("utf-8"))

    assert list(tmp_path.iterdir()) == [file]
    assert data == json.loads(json.dumps(WAITING.to_dict()))
    assert (data["schema"], data["synchronizations"][0]["line"]) == ("openmed_nb/profile/1", 12)
    assert Profile.read(file) == WAITING
    with pytest.raises(ConfigurationError):
        WAITING.save(tmp_path / "no_such_folder" / "profile.json")


DAMAGED = json.dumps({**HEALTHY.to_dict(), "synchronizations": [3]})


@pytest.mark.parametrize("text", ["[]", "{", '{"schema": "openmed_nb/profile/1"}', DAMAGED])
def test_profile_read_rejects_other_files(tmp_path, text):
    file = tmp_path / "other.json"
    file.write_text(text, "utf-8")

    with pytest.raises(ConfigurationError) as error_info:
        Profile.read(file)
    assert error_info.value.remedy == "Pass a file written by Profile.save()."


def test_report_has_times_operators_and_waits():
    """A simulated device is labeled, and the CPU is not."""
    html = WAITING._repr_html_()
    simulated = replace(HEALTHY, simulated=True)

    assert f"{WAITING.headline}." in str(WAITING)
    assert "inside transformers.masking_utils" in str(WAITING)
    assert all(value in html for value in ("125.00 ms", "aten::addmm", "10.00 ms (10%)"))
    for form in (str(simulated), simulated._repr_html_()):
        assert "mps (SIMULATED)" in form
        assert SIMULATION_NOTICE in form
    assert "SIMULATED" not in str(replace(simulated, device="cpu")).splitlines()[0]


def later_profile(days, **changes):
    """Return a profile some days after HEALTHY, with changes."""
    return replace(HEALTHY, created_at=f"2026-11-{1 + days:02}T12:00:00Z", **changes)


CHANGED_OPERATORS = make_operators(addmm=0.04, mul=0.03, sub=0.02, softmax=0.01)
REORDERED = make_operators(gelu=0.04, addmm=0.035, softmax=0.03, add=0.001)
SAME = "the slowest operators are the same, "


@pytest.mark.parametrize(
    ("second", "status", "evidence"),
    [
        (later_profile(6), NOT_APPLICABLE, f"{SAME}less than a week apart"),
        (later_profile(7), WARNING, "after 7 days, and a step is no faster: aten::addmm, aten::softmax, aten::gelu"),
        (later_profile(7, operators=REORDERED), WARNING, "a step is no faster: aten::gelu, aten::addmm, aten::softmax"),
        (later_profile(7, seconds=0.12), WARNING, "a step is no faster"),
        (later_profile(14), WARNING, "after 14 days, and a step is no faster"),
        (later_profile(7, seconds=0.1), OK, f"{SAME}and a step is faster"),
        (later_profile(7, operators=CHANGED_OPERATORS), OK, "changed to aten::addmm, aten::mul, aten::sub"),
        (later_profile(7, operators=()), NOT_APPLICABLE, "no operator was recorded"),
        (replace(HEALTHY, created_at=""), NOT_APPLICABLE, f"{SAME}and one profile has no date"),
    ],
)
def test_stopping_rule(second, status, evidence):
    """The rule applies if the slowest operators and the step time are unchanged after a week or more."""
    diff = HEALTHY.diff(second)
    finding = diff.findings[-1]

    assert finding.status == status
    assert evidence in finding.evidence
    assert diff.should_stop == (status == WARNING)
    assert diff.findings == second.diff(HEALTHY).findings  # The dates determine the order.
    if diff.should_stop:
        action = "Move this workload" if diff.days < 14 else "Split off these operators"
        assert finding.remedy.startswith(f"Stop optimizing. {action}, or accept")
        assert [lane for lane in ("CPU", "MPS", "MLX", "remote pool") if lane not in finding.remedy] == []


@pytest.mark.parametrize(
    ("seconds", "evidence"),
    [(0.125, "a step takes as long as before"), (0.05, "a step is faster"), (0.15, "a step is slower")],
)
def test_diff_reports_faster_and_slower_steps(seconds, evidence):
    """Changes of up to a tenth are ignored."""
    assert HEALTHY.diff(later_profile(3, seconds=seconds)).findings[1].evidence == evidence


def test_diff_sums_operators_over_phases():
    """GPU times are compared if both profiles have them."""
    forward = OperatorTime("aten::mm", "forward", 1.0, 0.01, 0.03)
    phases = (forward, replace(forward, phase="backward", device_seconds=0.05))
    profile = replace(HEALTHY, operators=phases, device_seconds=0.08)

    host_times = {
        times.operator: times.after for times in HEALTHY.diff(replace(profile, device_seconds=None)).operators
    }
    assert host_times["aten::mm"] == pytest.approx(0.02)
    (times,) = profile.diff(profile).operators
    assert (times.before, times.after) == (pytest.approx(0.08), pytest.approx(0.08))


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
    diff = HEALTHY.diff(later_profile(14, **changes))

    assert (diff.differences, diff.progress, diff.should_stop) == (differences, None, False)
    assert f"different {', '.join(differences)}" in str(diff)
    assert "ms before" not in diff._repr_html_()


def test_diff_has_text_html_and_json():
    diff = HEALTHY.diff(later_profile(8))
    stored = json.loads(json.dumps(diff.to_dict()))

    assert str(diff).startswith("Two profiles of bundled (training step) on mps, 8 days apart: stop optimizing")
    assert "40.000" in diff._repr_html_()
    assert "40.000" in str(diff)
    assert (stored["schema"], stored["days"], stored["should_stop"]) == ("openmed_nb/profile_diff/1", 8, True)
    assert stored["hotspots"][0] == ["aten::addmm", "aten::softmax", "aten::gelu"]


def test_diff_rejects_other_types():
    with pytest.raises(ConfigurationError, match="A profile cannot be compared with str"):
        HEALTHY.diff("profile.json")
