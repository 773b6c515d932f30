"""What the figures of a profile mean: tables of values, and how a profile is shown."""

import json
import re
from dataclasses import replace

import pytest

from openmed_nb._render.display import NOT_APPLICABLE, OK, WARNING
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
OWN = CodeLocation("train.py", 12, "step")
INSIDE = CodeLocation("train.py", 9, "step", "transformers.masking_utils", in_model=True)
TO_MPS = ".to('mps')"
FELL = Fallback("aten::mode", FELL_BACK, "forward", ModuleLocation("", "M"), 3, None)


def item(place, call=".item()", reason="read"):
    """Return a call that waits once in a step."""
    return Synchronization(call, place, 1.0, reason)


def status(profile, name):
    """Return how a finding is."""
    return next(one.status for one in profile.findings if one.name == name)


def test_healthy_profile_names_none():
    """A profile in which nothing is wrong has all four findings, and none warns."""
    assert [one.name for one in HEALTHY.findings] == ["data", "synchronization", "tiny batch", "fallback"]
    assert {one.status for one in HEALTHY.findings} == {OK}
    assert HEALTHY.bottlenecks == ()


def test_share_of_data():
    """Steps wait for their data with more than a quarter of a step; a loader that has workers is told to keep them."""
    for data, found in [(0.0, OK), (0.25, OK), (0.26, WARNING), (0.9, WARNING)]:
        profile = replace(HEALTHY, phase_times=PhaseTimes({"data": data, "forward": 1 - data}))

        assert status(profile, "data") == found, data
        assert ("data" in profile.bottlenecks) is (found == WARNING)
    assert "persistent_workers" not in profile.findings[0].remedy
    assert "persistent_workers=True" in replace(profile, workers=2).findings[0].remedy


@pytest.mark.parametrize(
    ("device", "waits", "found", "says"),
    [
        ("mps", (item(OWN),), WARNING, ".item() at train.py:12 in step"),
        ("cuda:0", (item(INSIDE), item(OWN)), WARNING, ".item() at train.py:12 in step"),
        ("mps", (item(INSIDE),), OK, "no line"),
        ("mps", (), OK, "no line"),
        ("mps", (item(OWN, TO_MPS, "batch"),), OK, "only the batch is waited for, on its way to the device"),
        ("mps", (item(INSIDE, TO_MPS, "batch"),), OK, "no line"),
        (
            "mps",
            (item(OWN, TO_MPS, "copy"), item(OWN, TO_MPS, "batch")),
            WARNING,
            "for: .to('mps') at train.py:12 in step",
        ),
        ("cpu", (item(OWN),), NOT_APPLICABLE, "a GPU would be waited for: .item() at train.py:12 in step"),
    ],
)
def test_synchronization_is_named_with_its_line(device, waits, found, says):
    """The person's own lines warn on a GPU, three by name; a model of a library, and the CPU, do not."""
    profile = replace(HEALTHY, device=device, synchronizations=waits)
    finding = next(one for one in profile.findings if one.name == "synchronization")

    assert finding.status == found
    assert says in finding.evidence
    if found == WARNING:
        five = tuple(item(CodeLocation("train.py", line, "step")) for line in range(1, 6))
        assert replace(profile, synchronizations=five).findings[1].evidence.endswith("train.py:3 in step, and 2 others")


@pytest.mark.parametrize("reason", WAIT_REMEDIES)
def test_remedy_of_the_first_wait(reason):
    waits = (item(OWN, reason=reason), *(item(OWN, reason=other) for other in WAIT_REMEDIES))

    assert replace(HEALTHY, synchronizations=waits).findings[1].remedy == WAIT_REMEDIES[reason]


def test_the_headline_names_what_takes_most():
    """It says which phase takes most of a step, but not that the step does."""
    headline = "A step takes 125.00 ms on mps"

    assert HEALTHY.headline == f"{headline}: 96 % of it is forward"
    assert replace(HEALTHY, phase_times=PhaseTimes({"data": 0.01, "step": 0.99})).headline == headline


@pytest.mark.parametrize(
    ("device", "changes", "found"),
    [
        ("mps", {"launch_seconds": 0.05}, OK),
        ("mps", {"launch_seconds": 0.051}, WARNING),
        ("mps", {"launch_seconds": 0.2}, WARNING),  # Started while the device computes, it takes longer than a step.
        ("xpu", {"launch_seconds": None}, NOT_APPLICABLE),
        ("mps", {"operators_per_step": 0.0}, NOT_APPLICABLE),
        ("mps", {"launch_seconds": 0.09, "simulated": True}, NOT_APPLICABLE),
        ("cpu", {"operator_seconds": 0.02}, OK),
        ("cpu", {"operator_seconds": 0.0199}, WARNING),
        ("cpu", {"operator_seconds": 0.0199, "simulated": True}, WARNING),
        # On a computer that is slower in everything a batch is as tiny as before.
        ("cpu", {"operator_seconds": 0.06, "launch_seconds": 0.03}, OK),
        ("cpu", {"operator_seconds": 0.0597, "launch_seconds": 0.03}, WARNING),
        # Kernels that are seen tell more.
        *(("cuda", {"device_seconds": 0.049, "launch_seconds": starting}, WARNING) for starting in (None, 0.09)),
        *(("cuda", {"device_seconds": 0.051, "launch_seconds": starting}, OK) for starting in (None, 0.09)),
        ("cuda", {"device_seconds": 0.0}, WARNING),
        ("cuda", {"device_seconds": 0.2}, OK),
        # A slow step of one's own may be slow Python, which only the operators of the CPU tell apart.
        ("cpu", {"task": "own step", "compute_only": 1.0, "operator_seconds": 0.011}, WARNING),
        ("mps", {"task": "own step", "compute_only": 1.0}, NOT_APPLICABLE),
        ("mps", {"task": "own step", "compute_only": 0.015}, WARNING),
    ],
)
def test_tiny_batch(device, changes, found):
    """A batch is tiny if more than half of a step goes into starting operators, or kernels run for less than half of it."""
    assert status(replace(HEALTHY, device=device, **changes), "tiny batch") == found


def test_only_mps_falls_back():
    assert status(replace(HEALTHY, device="cuda"), "fallback") == NOT_APPLICABLE


def test_figures_for_others(tmp_path):
    """What is derived is derived from what was measured, and all of it is saved as JSON with the name of its schema."""
    profile = replace(HEALTHY, synchronizations=(item(OWN),), fallbacks=(FELL,))
    for _ in range(2):  # It is written over as a whole.
        profile.save(tmp_path / "profile.json")
    assert [file.name for file in tmp_path.iterdir()] == ["profile.json"]
    read = json.loads((tmp_path / "profile.json").read_text("utf-8"))

    assert profile.microseconds_per_operator == pytest.approx(1000)
    assert profile.launch_fraction == pytest.approx(0.1)
    assert (profile.fallbacks_per_step, profile.fallback_fraction) == (1.0, 0.01)
    assert profile.shares == {"data": pytest.approx(0.04), "forward": pytest.approx(0.96)}
    assert read == json.loads(json.dumps(profile.to_dict()))
    assert (read["schema"], read["synchronizations"][0]["line"]) == ("openmed_nb/profile/1", 12)
    with pytest.raises(ConfigurationError):
        profile.save(tmp_path / "no_such_folder" / "profile.json")


def test_how_a_profile_is_shown():
    """The text says it in words, the times stand in the HTML; a simulated device is marked, and the CPU beside it is not."""
    profile = replace(HEALTHY, synchronizations=(item(OWN), item(INSIDE)))
    page, simulated = profile._repr_html_(), replace(HEALTHY, simulated=True)

    assert re.findall(r"\d+\.\d+|\d+ ?%|\d ms", str(profile)) == []
    assert "inside of transformers.masking_utils" in str(profile)
    assert all(figure in page for figure in ("125.00 ms", "aten::addmm", "1000.0 µs", "10.00 ms (10 %)"))
    for shown in (str(simulated), simulated._repr_html_()):
        assert "mps (SIMULATED)" in shown
        assert "no figure here is one of MPS" in shown
    assert "SIMULATED" not in str(replace(simulated, device="cpu")).splitlines()[0]
