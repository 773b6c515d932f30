"""Tests of interleaved timing in the steady state of a loader, and of the confidence interval of a median."""

import random
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openmed_nb._utils.clock import use_clock
from openmed_nb.runbook.bench.comparison import _steps_per_trial, _time_interleaved
from openmed_nb.runbook.bench.timing import FORWARD, median_interval, round_up_to_workers
from openmed_nb.runbook.bench.workloads import FORWARD_PASS, Workload


def make_logging_workload(log, workers, prefetched_batches):
    """Return a workload that logs which batches are loaded and run."""

    def batches():
        number = 0
        while True:
            log.append("load")
            yield number
            number += 1

    phases = ((FORWARD, lambda _batch: log.append("run")),)
    loader = SimpleNamespace(num_workers=workers, prefetch_factor=prefetched_batches // max(1, workers))
    return Workload("x", FORWARD_PASS, "cpu", 1, None, batches, phases, loader)


def test_reach_steady_state_discards_prefetched_batches():
    """Then each worker yields one batch for a step. Without workers, nothing happens."""
    log: list[str] = []
    workload = make_logging_workload(log, 2, 6)
    batches = workload.batches()
    workload.drain_prefetched(batches)

    assert log == ["load"] * 6
    workload.reach_steady_state(batches)
    assert log[6:] == ["load"] * 6 + ["load", "run"] * 2
    make_logging_workload(log, 0, 0).reach_steady_state(iter([]))
    assert len(log) == 16


def test_time_interleaved_restores_steady_state_before_each_trial():
    """Prefetched batches are discarded before each trial."""
    log: list[str] = []
    trials = _time_interleaved({"cpu": make_logging_workload(log, 1, 20), "mps": make_logging_workload([], 0, 0)}, 6)

    assert [len(seconds) for seconds in trials.values()] == [6, 6]
    assert log.count("load") - log.count("run") == 6 * 20


def test_time_interleaved_rotates_first_device():
    """Each device has one trial per round."""
    log: list[str] = []

    def make_workload(name):
        phases = ((FORWARD, lambda _batch: log.append(name)),)
        return Workload("x", FORWARD_PASS, "cpu", 1, None, lambda: iter(range(10**6)), phases)

    with use_clock(lambda: float(len(log))):  # A step takes a second, so that a trial has one step.
        _time_interleaved({name: make_workload(name) for name in ("cpu", "mps", "cuda")}, 6)

    rounds = [log[start : start + 3] for start in range(9, len(log), 3)]
    assert rounds == [["cpu", "mps", "cuda"], ["mps", "cuda", "cpu"], ["cuda", "cpu", "mps"]] * 2


@pytest.mark.parametrize(
    ("seconds", "workers", "steps"),
    [
        ([0.001, 0.001], 0, 20),
        ([0.1, 0.001], 0, 5),
        ([2.0, 0.001], 0, 1),
        ([0.0], 0, 20000),
        ([1.0, 0.5], 2, 8),
        ([0.004, 0.001], 3, 21),
    ],
)
def test_steps_per_trial(seconds, workers, steps):
    """Quick steps are repeated. A trial has at least four batches per worker, and the same number for each."""
    assert _steps_per_trial(seconds, workers) == round_up_to_workers(steps, workers) == steps


RANKS = {6: 1, 8: 1, 9: 2, 11: 2, 12: 3, 15: 4, 20: 6, 25: 8, 30: 10, 40: 14, 50: 18, 100: 40, 4001: 1939}


def test_median_interval_uses_published_ranks():
    """The ranks at 95% are those in tables of the sign test."""
    intervals = {count: median_interval(random.sample(range(1, count + 1), count)) for count in RANKS}

    assert {count: interval.low for count, interval in intervals.items()} == RANKS
    assert all(interval.high == count + 1 - interval.low for count, interval in intervals.items())


LEVELS = {6: 0.96875, 8: 0.9921875, 10: 0.978515625, 20: 0.9586105346679688}


def test_median_interval_reports_exact_confidence():
    """The confidence is that of the binomial distribution. One value fewer than the minimum is an error."""
    assert {count: median_interval(range(count)).confidence for count in LEVELS} == pytest.approx(LEVELS, abs=1e-12)
    with pytest.raises(ValueError, match="at least 6 values"):
        median_interval(range(5))


@given(st.lists(st.floats(0.01, 100), min_size=6, max_size=60))
def test_median_interval_contains_its_median(values):
    """The ends are values of the sample, and the confidence is at least the requested one."""
    interval = median_interval(values)

    assert interval.low <= interval.median <= interval.high
    assert {interval.low, interval.high} <= set(values)
    assert interval.confidence >= 0.95
