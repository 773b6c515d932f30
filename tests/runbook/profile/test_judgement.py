"""What the figures of a profile mean: tables of values, and how a profile is shown."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from openmed_nb.display import NOT_APPLICABLE, OK, WARNING
from openmed_nb.runbook.measure.workloads import Split
from openmed_nb.runbook.operators.calls import ModulePlace
from openmed_nb.runbook.operators.fallbacks import FELL_BACK, Fallback
from openmed_nb.runbook.profile import OperatorTime, Profile
from openmed_nb.runbook.profile_watch import CodePlace, Synchronisation

HEALTHY = Profile(
    name="bundled",
    task="training step",
    device="mps",
    rows=32,
    steps=50,
    warm_up=5,
    seconds=0.125,
    split=Split({"data": 0.005, "forward": 0.12}),
    data_only=0.004,
    compute_only=0.1,
    operators=(OperatorTime("aten::addmm", "forward", 20.0, 0.0625),),
    operators_per_step=100.0,
    starting_seconds=0.01,
    watched=3,
)
OWN = CodePlace("train.py", 12, "step")
INSIDE = CodePlace("train.py", 9, "step", "transformers.masking_utils", in_model=True)
FELL = Fallback("aten::mode", FELL_BACK, "forward", ModulePlace("", "M"), 3, None)


def item(place: CodePlace, call: str = ".item()") -> Synchronisation:
    """Return a call that waits once in a step."""
    return Synchronisation(call, place, 1.0)


def status(profile: Profile, name: str) -> str:
    """Return how a finding is."""
    return next(one.status for one in profile.findings if one.name == name)


def test_healthy_profile_names_none():
    """A profile in which nothing is wrong has all four findings, and none warns."""
    assert [one.name for one in HEALTHY.findings] == ["data", "synchronisation", "tiny batch", "fallback"]
    assert {one.status for one in HEALTHY.findings} == {OK}
    assert HEALTHY.bottlenecks == ()


def test_share_of_data():
    """Steps wait for their data with more than a quarter of a step."""
    for data, found in [(0.0, OK), (0.25, OK), (0.26, WARNING), (0.9, WARNING)]:
        profile = replace(HEALTHY, split=Split({"data": data, "forward": 1 - data}))

        assert status(profile, "data") == found, data
        assert ("data" in profile.bottlenecks) is (found == WARNING)


@pytest.mark.parametrize(
    ("device", "waits", "found", "says"),
    [
        ("mps", (item(OWN),), WARNING, ".item() at train.py:12 in step"),
        ("cuda:0", (item(INSIDE), item(OWN)), WARNING, ".item() at train.py:12 in step"),
        ("mps", (item(INSIDE),), OK, "no line"),
        ("mps", (), OK, "no line"),
        ("cpu", (item(OWN),), NOT_APPLICABLE, "a GPU would be waited for: .item() at train.py:12 in step"),
    ],
)
def test_synchronisation_is_named_with_its_line(device: str, waits: tuple[Synchronisation, ...], found: str, says: str):
    """The person's own lines warn on a GPU; a model of a library, and the CPU, do not."""
    profile = replace(HEALTHY, device=device, synchronisations=waits)
    finding = next(one for one in profile.findings if one.name == "synchronisation")

    assert finding.status == found
    assert says in finding.evidence


def test_many_synchronisations_are_counted():
    """A finding names three lines and counts the others."""
    waits = tuple(item(CodePlace("train.py", line, "step")) for line in range(1, 6))
    finding = replace(HEALTHY, synchronisations=waits).findings[1]

    assert finding.evidence.endswith("train.py:3 in step, and 2 others")


STARTING = [
    ("mps", {"starting_seconds": 0.05}, OK),
    ("mps", {"starting_seconds": 0.051}, WARNING),
    (
        "mps",
        {"starting_seconds": 0.2},
        WARNING,
    ),  # Started while the device still computes, it takes longer than a step.
    ("xpu", {"starting_seconds": None}, NOT_APPLICABLE),
    ("mps", {"operators_per_step": 0.0}, NOT_APPLICABLE),
    ("mps", {"starting_seconds": 0.09, "simulated": True}, NOT_APPLICABLE),
    ("cpu", {"operator_seconds": 0.02}, OK),
    ("cpu", {"operator_seconds": 0.0199}, WARNING),
    ("cpu", {"operator_seconds": 0.0199, "simulated": True}, WARNING),
]


def test_share_of_starting_operators():
    """A batch is tiny if more than half of a step goes into starting operators, on the CPU more than half of their own time."""
    for device, changes, found in STARTING:
        assert status(replace(HEALTHY, device=device, **changes), "tiny batch") == found, (device, changes)


def test_speed_of_the_computer_changes_nothing():
    """On a computer that is slower in everything a batch is as tiny as before."""
    for operators in (0.0199, 0.02):
        quick = replace(HEALTHY, device="cpu", operator_seconds=operators)
        slow = replace(quick, operator_seconds=3 * operators, starting_seconds=0.03)

        assert status(slow, "tiny batch") == status(quick, "tiny batch")


def test_kernels_that_are_seen_tell_more():
    """Where torch's profiler sees the GPU, a batch is tiny if kernels run for less than half of a step."""
    for kernels, found in [(0.0, WARNING), (0.049, WARNING), (0.051, OK), (0.1, OK), (0.2, OK)]:
        for starting in (None, 0.09):
            profile = replace(HEALTHY, device="cuda", device_seconds=kernels, starting_seconds=starting)

            assert status(profile, "tiny batch") == found, (kernels, starting)


def test_tiny_batch_behind_python():
    """A slow step of one's own may be slow Python: on the CPU operators are judged by their own time, on MPS nobody knows."""
    python = {"task": "own step", "compute_only": 1.0}

    assert status(replace(HEALTHY, device="cpu", operator_seconds=0.011, **python), "tiny batch") == WARNING
    assert status(replace(HEALTHY, device="mps", **python), "tiny batch") == NOT_APPLICABLE
    assert status(replace(HEALTHY, device="mps", **{**python, "compute_only": 0.015}), "tiny batch") == WARNING


def test_workers_that_are_there_get_another_remedy():
    """A loader with processes that is slow is told to keep them."""
    slow = replace(HEALTHY, split=Split({"data": 0.1, "forward": 0.1}))

    assert "persistent_workers" not in slow.findings[0].remedy
    assert "persistent_workers=True" in replace(slow, workers=2).findings[0].remedy


def test_mark_belongs_to_the_simulated_device():
    """A profile of the CPU inside of a simulation is not marked as one of a simulated device."""
    assert "SIMULATED" in str(replace(HEALTHY, simulated=True)).splitlines()[0]
    assert "SIMULATED" not in str(replace(HEALTHY, device="cpu", simulated=True)).splitlines()[0]


@pytest.mark.parametrize(
    ("device", "fell", "found"), [("mps", (FELL,), WARNING), ("mps", (), OK), ("cuda", (), NOT_APPLICABLE)]
)
def test_fallbacks(device: str, fell: tuple[Fallback, ...], found: str):
    """An operator that left MPS is named."""
    profile = replace(HEALTHY, device=device, fallbacks=fell)

    assert status(profile, "fallback") == found
    assert ("aten::mode" in profile.findings[3].evidence) is bool(fell)


def test_figures_for_others():
    """What is derived is derived from what was measured."""
    profile = replace(HEALTHY, fallbacks=(FELL,))

    assert profile.microseconds_per_operator == pytest.approx(1000)
    assert profile.starting_share == pytest.approx(0.1)
    assert (profile.fallbacks_per_step, profile.fallback_share) == (1.0, 0.01)
    assert profile.shares == {"data": pytest.approx(0.04), "forward": pytest.approx(0.96)}


def test_schema_is_stable(tmp_path):
    """The values are JSON with the name of their schema and these keys, and are saved as they are."""
    profile = replace(HEALTHY, synchronisations=(item(OWN),), fallbacks=(FELL,))
    profile.save(tmp_path / "profile.json")
    read = json.loads((tmp_path / "profile.json").read_text("utf-8"))

    assert read == json.loads(json.dumps(profile.to_dict()))
    assert read["schema"] == "openmed_nb/profile/1"
    assert sorted(read) == [
        *(
            "batch_tokens",
            "bottlenecks",
            "compute_only",
            "data_only",
            "device",
            "device_seconds",
            "dtype",
            "fallback_share",
        ),
        *(
            "fallbacks",
            "findings",
            "kernel_share",
            "microseconds_per_operator",
            "name",
            "operator_seconds",
            "operators",
            "operators_per_step",
            "row_shape",
            "rows",
        ),
        *(
            "schema",
            "seconds",
            "simulated",
            "split",
            "starting_seconds",
            "starting_share",
            "steps",
            "synchronisations",
            "task",
            "warm_up",
            "watched",
            "workers",
        ),
    ]
    assert read["synchronisations"][0]["line"] == 12


def test_text_has_no_times():
    """The text says it in words; the times stand in the HTML."""
    profile = replace(HEALTHY, synchronisations=(item(OWN), item(INSIDE)))
    page = profile._repr_html_()

    assert re.findall(r"\d+\.\d+|\d+ ?%|\d ms", str(profile)) == []
    assert "inside of transformers.masking_utils" in str(profile)
    assert "125.00 ms" in page
    assert "aten::addmm" in page
    assert "1000.0 µs" in page
    assert "10.00 ms (10 %)" in page


def test_simulated_profile_is_marked():
    """A simulated device is marked in text and HTML."""
    profile = replace(HEALTHY, simulated=True)

    for shown in (str(profile), profile._repr_html_()):
        assert "mps (SIMULATED)" in shown
        assert "no figure here is one of MPS" in shown
