"""Tests of measurements on a busy, hot or changing computer, which recommend nothing."""

import itertools
import os
from dataclasses import replace

import pytest
import torch

import openmed_nb as nb
from helpers.processes import busy_processes
from helpers.sample_reports import COMPARISON, PROFILE, SWEEP
from openmed_nb._render.display import OK, WARNING
from openmed_nb.devices.system_status import LOAD, SystemStatus
from openmed_nb.runbook.bench import timing
from openmed_nb.runbook.bench.timing import BUSY, Disturbance
from openmed_nb.runbook.verdict.metrics import Evidence

LAYER = torch.nn.Linear(4, 4)
ROWS = torch.ones(2, 4)
DISTURBANCE = Disturbance(BUSY, details="other programs use 1.2 of 2 processor cores")
REPORTS = (COMPARISON, SWEEP, replace(PROFILE, task="annotation"))


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize(
    ("conditions", "reason"),
    [
        ({}, ""),
        ({"load": None}, ""),
        ({"load": 0.6}, "busy"),
        ({"thermal_state": "moderate"}, ""),
        ({"thermal_state": "limited"}, "hot"),
    ],
)
def test_busy_or_hot_computer_is_not_measured(set_conditions, conditions, reason):
    """An unknown load is not a reason."""
    set_conditions(**conditions)
    sweep = nb.sweep(LAYER, ROWS, device="cpu", seconds=600, max_batch_size=2)
    comparison = nb.compare(LAYER, ROWS, devices="cpu", seconds=1e-6)
    profile = nb.runbook.profile(LAYER, ROWS, device="cpu", steps=1)

    assert not reason or OK not in {finding.status for finding in profile.findings}
    assert bool(sweep.points) == bool(comparison.rounds) == (not reason)
    for report in (sweep, comparison, profile):
        assert reason in str(report.disturbance or "") in str(report)
        assert bool(report.disturbance) == bool(reason) == ("ot measured" in str(report))
    assert (sweep.knee is None) == ("rows like these" not in str(comparison)) == bool(reason)


@pytest.mark.parametrize(
    ("report", "times"),
    [
        (COMPARISON, ("40.00", "1,600", "2.50 ms", "Throughput")),
        (SWEEP, ("rows/s", "1,500", "Throughput")),
        (PROFILE, ("125.00 ms", "40.000", "phase forward", "Time per phase")),
    ],
)
def test_disturbed_report_shows_no_times(report, times):
    disturbed = replace(report, disturbance=DISTURBANCE)
    for time in times:
        assert time in str(report) + report._repr_html_()
        assert time not in str(disturbed) + disturbed._repr_html_()
    assert ("160.0 MiB" in str(disturbed)) == (report is SWEEP)


def test_compare_ends_if_the_computer_becomes_busy(clock, set_conditions):
    """After three steps of warm-up and one round, only one step is timed phase by phase."""
    loads = [0.1, 0.1, 0.1, *[0.6] * 9]

    def step(_batch):
        clock.advance(1)
        set_conditions(load=loads.pop(0))

    comparison = nb.compare(step, [ROWS], devices="cpu", seconds=1)

    assert (comparison.rounds, len(loads)) == (0, 7)
    assert comparison.disturbance.reason == BUSY


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("load", [0.6, 0.1])
def test_busy_sweep_stores_nothing(set_conditions, load):
    set_conditions(load)
    before = nb.device("cpu").tuned_batch_tokens
    report = nb.sweep("bundled_small", device="cpu", length=16, max_batch_size=2, seconds=600)

    assert report.is_saved or nb.device("cpu").tuned_batch_tokens == before
    assert (report.batch_tokens is None) == (load > 0.5)


def test_busy_computer_is_in_the_system_status_the_doctor_and_the_handoff(set_conditions, keyword_model, tmp_path):
    set_conditions(load=0.6)
    status = nb.system_status()
    handoff = nb.handoff(tmp_path / "bundle", str(keyword_model))

    assert (status.findings[-1].name, status.findings[-1].status) == (LOAD, WARNING)
    assert status.findings[-1] in nb.doctor().findings
    assert status.background_load in str(status)
    assert f"not measured: {handoff.benchmark.disturbance}" in str(handoff)
    set_conditions(load=0.1)
    assert nb.system_status().findings[-1].status == OK


# Reason not to measure by the factor of the time of a step, after some seconds.
REASONS = {1: "", 1.3: "", 4.6: "slower", 0.4: "faster"}
# Rows per second by rows.
SPEEDS = {1: 89, 2: 151, 3: 200, 4: 251, 5: 310, 6: 364, 7: 385, 8: 410}


@pytest.mark.usefixtures("set_conditions")
@pytest.mark.parametrize(
    ("factor", "reason", "seconds"),
    [
        *((factor, reason, seconds) for factor, reason in REASONS.items() for seconds in (1.2, 2.0, 2.4, 2.8)),
        # Only 1 row was measured before. It is less than half as fast as the best, so that it cannot be the knee.
        (1.3, "", 0.5),
        (0.4, "", 0.5),
    ],
)
def test_sweep_detects_a_change_of_the_speed(clock, factor, reason, seconds):
    """Regression: the knee was 8 rows although 6 rows had 364 rows per second, and 7 and 8 later had 80 and 91."""
    clock.tick = 1e-6
    change = clock() + seconds

    def step(batch):
        rows = len(batch)
        clock.advance(rows / SPEEDS[rows] * (factor if clock() > change else 1))

    report = nb.sweep(step, torch.ones, device="cpu", seconds=600, max_batch_size=8)

    assert reason in str(report.disturbance or "")
    assert bool(reason) == ("without starting" in str(report))
    assert report.knee == (None if reason else 8)
    assert reason or report.best == report.knee_point


@pytest.mark.usefixtures("set_conditions")
def test_sweep_of_unstable_steps_has_no_knee(clock):
    seconds = itertools.cycle([1.0, 2.0, 4.0])
    report = nb.sweep(
        lambda batch: clock.advance(next(seconds) * len(batch)), torch.ones, device="cpu", seconds=600, max_batch_size=2
    )

    assert (report.knee, "vary too much" in report.disturbance.reason) == (None, True)


def test_verdict_of_unreliable_reports_is_to_measure():
    """The reason is a condition of the verdict, stated once, and the memory of a sweep stays known."""
    busy = (replace(report, disturbance=Disturbance(BUSY, details=f"load {n}")) for n, report in enumerate(REPORTS, 2))
    status = SystemStatus(background_load="Mail", power_source="battery")
    verdict = nb.verdict(*busy, status, num_texts=0)
    given = nb.verdict(Evidence(slow_conditions=()), status)

    assert verdict.recommendation == "measure first"
    assert f"Condition during the measurement: {BUSY}" in str(verdict)
    assert str(verdict).count("busy") == 1
    assert "Repeat nb.compare(model, texts) on a quiet computer." in verdict.not_known[1]
    for name in ("speedup", "texts_per_second", "phase_fractions", "knee", "knee_gain", "tiny_batch"):
        assert verdict.evidence[name] is None, name
    assert verdict.evidence["out_of_memory_at"] == 64
    assert verdict.evidence["headroom"]
    assert verdict.evidence["slow_conditions"][0] == BUSY
    assert "battery" in verdict.evidence["slow_conditions"][1]
    assert given.evidence["slow_conditions"] == ()


@pytest.mark.parametrize("repeated", REPORTS, ids=lambda report: report.COMMAND)
def test_verdict_discards_only_the_times_of_disturbed_reports(repeated):
    verdict = nb.verdict(
        *(replace(report, disturbance=DISTURBANCE if report is repeated else None) for report in REPORTS)
    )

    assert f"because their times do not count: {repeated.COMMAND}." in str(verdict)
    assert verdict.evidence["disturbed_measurements"] == (repeated.COMMAND,)
    assert (verdict.evidence["speedup"] is None) == (repeated is COMPARISON)
    assert (verdict.evidence["knee"] is None) == (repeated is SWEEP)


@pytest.mark.slow
@pytest.mark.real_computer
def test_real_load_is_detected(monkeypatch):
    """Every processor core computes for another process."""
    monkeypatch.setenv(timing.CHECK_VARIABLE, "1")
    with busy_processes(os.cpu_count() or 1):
        sweep = nb.sweep(LAYER, ROWS, device="cpu", seconds=2, max_batch_size=4)
        comparison = nb.compare(LAYER, ROWS, devices="cpu", seconds=1)

    assert sweep.disturbance.reason == BUSY
    assert comparison.disturbance.reason == BUSY
    assert sweep.knee is None
