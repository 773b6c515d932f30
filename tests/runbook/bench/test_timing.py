"""Tests of interleaved timing in the steady state of a loader, and of the confidence interval of a median."""

import random
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.clock import use_clock
from openmed_nb.runbook.bench.comparison import _steps_per_trial, _time_interleaved
from openmed_nb.runbook.bench.timing import FORWARD, median_interval
from openmed_nb.runbook.bench.workloads import FORWARD_PASS, Workload


def make_logging_workload(log, name="run", workers=0, prefetch_factor=None):
    """Return a workload that logs which batches are loaded and run."""

    def batches():
        while True:
            log.append("load")
            yield None

    phases = ((FORWARD, lambda _batch: log.append(name)),)
    loader = SimpleNamespace(num_workers=workers, prefetch_factor=prefetch_factor)
    return Workload("x", FORWARD_PASS, "cpu", 1, None, batches, phases, loader)


def test_time_interleaved_discards_prefetched_batches_before_each_trial():
    log: list[str] = []
    workloads = {"cpu": make_logging_workload(log, workers=2, prefetch_factor=10), "mps": make_logging_workload([])}
    trials = _time_interleaved(workloads, 6)

    assert [len(seconds) for seconds in trials.values()] == [6, 6]
    assert log.count("load") - log.count("run") == 6 * 2 * 10


def test_time_interleaved_rotates_first_device():
    """Each device has one trial per round."""
    log: list[str] = []
    with use_clock(lambda: float(len(log))):  # A step takes two seconds, so that a trial has one step.
        _time_interleaved({name: make_logging_workload(log, name) for name in ("cpu", "mps", "cuda")}, 6)

    steps = [name for name in log if name != "load"]
    rounds = [steps[start : start + 3] for start in range(9, len(steps), 3)]
    assert rounds == [["cpu", "mps", "cuda"], ["mps", "cuda", "cpu"], ["cuda", "cpu", "mps"]] * 2


@pytest.mark.parametrize(
    ("seconds", "workers", "steps"),
    [
        ([0.001, 0.001], 0, 20),
        ([0.1, 0.001], 0, 5),
        ([2.0, 0.001], 0, 1),
        ([0.0], 0, 20000),
        ([1.0, 0.5], 2, 8),
    ],
)
def test_steps_per_trial(seconds, workers, steps):
    """Quick steps are repeated. A trial has at least four batches per worker."""
    assert _steps_per_trial(seconds, workers) == steps


# Ranks at 95% in tables of the sign test.
RANKS = {6: 1, 8: 1, 9: 2, 11: 2, 12: 3, 15: 4, 20: 6, 25: 8, 30: 10, 40: 14, 50: 18, 100: 40, 4001: 1939}
LEVELS = {6: 0.96875, 8: 0.9921875, 10: 0.978515625, 20: 0.9586105346679688}


def test_median_interval_uses_published_ranks_and_exact_confidence():
    intervals = {count: median_interval(random.sample(range(1, count + 1), count)) for count in {*RANKS, *LEVELS}}

    assert {count: intervals[count].low for count in RANKS} == RANKS
    assert all(interval.high == count + 1 - interval.low for count, interval in intervals.items())
    assert {count: intervals[count].confidence for count in LEVELS} == pytest.approx(LEVELS, abs=1e-12)
    with pytest.raises(ValueError, match="at least 6 values"):
        median_interval(range(5))


@given(st.lists(st.floats(0.01, 100), min_size=6, max_size=60))
def test_median_interval_contains_its_median(values):
    interval = median_interval(values)

    assert interval.low <= interval.median <= interval.high
    assert {interval.low, interval.high} <= set(values)
    assert interval.confidence >= 0.95
