"""Findings and report of a profile for given measurements."""

import json
import re
from dataclasses import replace

import pytest

from openmed_nb._render.display import NOT_APPLICABLE, OK, SIMULATION_NOTICE, WARNING
from openmed_nb.errors import ConfigurationError
from openmed_nb.runbook.bench.profile import WAIT_REMEDIES, Profile
from openmed_nb.runbook.bench.timing import CodeLocation, OperatorTime, PhaseTimes, Synchronization
from openmed_nb.runbook.checks.operators.fallbacks import FELL_BACK, Fallback
from openmed_nb.runbook.checks.operators.table import ModuleLocation

HEALTHY = Profile(
    name="bundled",
    task="training step",
    device="mps",
    rows=32,
    steps=50,
    warm_up=5,
    seconds=0.125,
    phase_times=PhaseTimes({"data": 0.005, "forward": 0.12}),
    data_only=0.004,
    compute_only=0.1,
    operators=(OperatorTime("aten::addmm", "forward", 20.0, 0.0625),),
    operators_per_step=100.0,
    launch_seconds=0.01,
    traced_steps=3,
)
USER_LINE = CodeLocation("train.py", 12, "step")
LIBRARY_LINE = CodeLocation("train.py", 9, "step", "transformers.masking_utils", in_model=True)
TO_MPS = ".to('mps')"
FALLBACK = Fallback("aten::mode", FELL_BACK, "forward", ModuleLocation("", "M"), 3, None)


def make_wait(place, call=".item()", reason="read"):
    """Return a call that waits once per step."""
    return Synchronization(call, place, 1.0, reason)


def get_status(profile, name):
    """Return the status of a finding."""
    return next(finding.status for finding in profile.findings if finding.name == name)


def test_findings_of_healthy_profile_are_ok():
    assert [finding.name for finding in HEALTHY.findings] == ["data", "synchronization", "tiny batch", "fallback"]
    assert {finding.status for finding in HEALTHY.findings} == {OK}
    assert HEALTHY.bottlenecks == ()


def test_data_finding_warns_above_a_quarter():
    """The remedy depends on whether the loader already has workers."""
    for fraction, expected in [(0.0, OK), (0.25, OK), (0.26, WARNING), (0.9, WARNING)]:
        profile = replace(HEALTHY, phase_times=PhaseTimes({"data": fraction, "forward": 1 - fraction}))

        assert get_status(profile, "data") == expected, fraction
        assert ("data" in profile.bottlenecks) is (expected == WARNING)
    assert "persistent_workers" not in profile.findings[0].remedy
    assert "persistent_workers=True" in replace(profile, workers=2).findings[0].remedy


@pytest.mark.parametrize(
    ("device", "waits", "status", "evidence"),
    [
        ("mps", (make_wait(USER_LINE),), WARNING, ".item() at train.py:12 in step"),
        ("cuda:0", (make_wait(LIBRARY_LINE), make_wait(USER_LINE)), WARNING, ".item() at train.py:12 in step"),
        ("mps", (make_wait(LIBRARY_LINE),), OK, "no line"),
        ("mps", (), OK, "no line"),
        ("mps", (make_wait(USER_LINE, TO_MPS, "batch"),), OK, "waits only for its batch"),
        ("mps", (make_wait(LIBRARY_LINE, TO_MPS, "batch"),), OK, "no line"),
        (
            "mps",
            (make_wait(USER_LINE, TO_MPS, "copy"), make_wait(USER_LINE, TO_MPS, "batch")),
            WARNING,
            "device: .to('mps') at train.py:12 in step",
        ),
        ("cpu", (make_wait(USER_LINE),), NOT_APPLICABLE, "would: .item() at train.py:12 in step"),
    ],
)
def test_synchronization_finding_names_lines(device, waits, status, evidence):
    """Lines of user code warn on a GPU, up to three by name. Models of a library and the CPU do not warn."""
    profile = replace(HEALTHY, device=device, synchronizations=waits)
    finding = next(finding for finding in profile.findings if finding.name == "synchronization")

    assert finding.status == status
    assert evidence in finding.evidence
    if status == WARNING:
        five = tuple(make_wait(CodeLocation("train.py", line, "step")) for line in range(1, 6))
        assert replace(profile, synchronizations=five).findings[1].evidence.endswith("train.py:3 in step, and 2 others")


@pytest.mark.parametrize("reason", WAIT_REMEDIES)
def test_synchronization_remedy_is_that_of_first_wait(reason):
    later_waits = [make_wait(USER_LINE, reason=later) for later in WAIT_REMEDIES]
    waits = (make_wait(USER_LINE, reason=reason), *later_waits)

    assert replace(HEALTHY, synchronizations=waits).findings[1].remedy == WAIT_REMEDIES[reason]


def test_headline_names_longest_phase():
    """The phase of a custom step is not named."""
    headline = "A step takes 125.00 ms on mps"

    assert HEALTHY.headline == f"{headline}: 96 % of it is forward"
    assert replace(HEALTHY, phase_times=PhaseTimes({"data": 0.01, "step": 0.99})).headline == headline


@pytest.mark.parametrize(
    ("device", "changes", "status"),
    [
        ("mps", {"launch_seconds": 0.05}, OK),
        ("mps", {"launch_seconds": 0.051}, WARNING),
        (
            "mps",
            {"launch_seconds": 0.2},
            WARNING,
        ),  # Launches overlap with the device, so their sum may exceed the step.
        ("xpu", {"launch_seconds": None}, NOT_APPLICABLE),
        ("mps", {"operators_per_step": 0.0}, NOT_APPLICABLE),
        ("mps", {"launch_seconds": 0.09, "simulated": True}, NOT_APPLICABLE),
        ("cpu", {"operator_seconds": 0.02}, OK),
        ("cpu", {"operator_seconds": 0.0199}, WARNING),
        ("cpu", {"operator_seconds": 0.0199, "simulated": True}, WARNING),
        # The result does not depend on the speed of the machine.
        ("cpu", {"operator_seconds": 0.06, "launch_seconds": 0.03}, OK),
        ("cpu", {"operator_seconds": 0.0597, "launch_seconds": 0.03}, WARNING),
        # Recorded kernels take precedence over the launch overhead.
        *(("cuda", {"device_seconds": 0.049, "launch_seconds": seconds}, WARNING) for seconds in (None, 0.09)),
        *(("cuda", {"device_seconds": 0.051, "launch_seconds": seconds}, OK) for seconds in (None, 0.09)),
        ("cuda", {"device_seconds": 0.0}, WARNING),
        ("cuda", {"device_seconds": 0.2}, OK),
        # A slow custom step may spend its time in Python code, which only operator times on the CPU exclude.
        ("cpu", {"task": "own step", "compute_only": 1.0, "operator_seconds": 0.011}, WARNING),
        ("mps", {"task": "own step", "compute_only": 1.0}, NOT_APPLICABLE),
        ("mps", {"task": "own step", "compute_only": 0.015}, WARNING),
    ],
)
def test_tiny_batch_finding(device, changes, status):
    """A batch is tiny if more than half of a step is launch overhead, or if kernels run for less than half of it."""
    assert get_status(replace(HEALTHY, device=device, **changes), "tiny batch") == status


def test_fallback_finding_applies_to_mps_only():
    assert get_status(replace(HEALTHY, device="cuda"), "fallback") == NOT_APPLICABLE


def test_profile_derived_metrics_are_saved(tmp_path):
    profile = replace(HEALTHY, synchronizations=(make_wait(USER_LINE),), fallbacks=(FALLBACK,))
    for _ in range(2):  # An existing file is replaced.
        profile.save(tmp_path / "profile.json")
    assert [file.name for file in tmp_path.iterdir()] == ["profile.json"]
    data = json.loads((tmp_path / "profile.json").read_text("utf-8"))

    assert profile.microseconds_per_operator == pytest.approx(1000)
    assert profile.launch_fraction == pytest.approx(0.1)
    assert (profile.fallbacks_per_step, profile.fallback_fraction) == (1.0, 0.01)
    assert profile.phase_fractions == {"data": pytest.approx(0.04), "forward": pytest.approx(0.96)}
    assert data == json.loads(json.dumps(profile.to_dict()))
    assert (data["schema"], data["synchronizations"][0]["line"]) == ("openmed_nb/profile/1", 12)
    with pytest.raises(ConfigurationError):
        profile.save(tmp_path / "no_such_folder" / "profile.json")


def test_report_text_has_no_measurements():
    """Times appear only in the HTML. A simulated device is labeled, and the CPU is not."""
    profile = replace(HEALTHY, synchronizations=(make_wait(USER_LINE), make_wait(LIBRARY_LINE)))
    html = profile._repr_html_()
    simulated = replace(HEALTHY, simulated=True)

    assert re.findall(r"\d+\.\d+|\d+ ?%|\d ms", str(profile)) == []
    assert "inside transformers.masking_utils" in str(profile)
    assert all(value in html for value in ("125.00 ms", "aten::addmm", "1000.0 µs", "10.00 ms (10 %)"))
    for form in (str(simulated), simulated._repr_html_()):
        assert "mps (SIMULATED)" in form
        assert SIMULATION_NOTICE in form
    assert "SIMULATED" not in str(replace(simulated, device="cpu")).splitlines()[0]
