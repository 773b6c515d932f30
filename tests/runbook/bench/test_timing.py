"""Steps are timed as they are in a long run: what a loader has read ahead in a pause is not among them."""

import pytest

from openmed_nb._utils.clock import use_clock
from openmed_nb.runbook.bench.comparison import steps_per_trial, time_interleaved
from openmed_nb.runbook.bench.timing import FORWARD, round_up_to_workers
from openmed_nb.runbook.bench.workloads import FORWARD_PASS, Workload


def logged(log, workers, ahead):
    """Return steps that write down what is read and what is run."""

    def batches():
        number = 0
        while True:
            log.append("read")
            yield number
            number += 1

    phases = ((FORWARD, lambda _batch: log.append("run")),)
    return Workload("x", FORWARD_PASS, "cpu", 1, None, batches, phases, workers, prefetched_batches=ahead)


def test_what_was_read_ahead_is_left_out():
    """What a loader holds ready is read and not run, and then each worker gives a batch that is run; without workers nothing."""
    log: list[str] = []
    workload = logged(log, 2, 6)
    batches = workload.batches()
    workload.drain_prefetched(batches)

    assert log == ["read"] * 6
    workload.reach_steady_state(batches)
    assert log[6:] == ["read"] * 6 + ["read", "run"] * 2
    logged(log, 0, 0).reach_steady_state(iter([]))
    assert len(log) == 16


def test_every_turn_begins_like_a_long_run():
    """Before each turn of each device, its loader is emptied of what it has read during the other one's turn."""
    log: list[str] = []
    turns = time_interleaved({"cpu": logged(log, 1, 20), "mps": logged([], 0, 0)}, 6)

    assert [len(seconds) for seconds in turns.values()] == [6, 6]
    assert log.count("read") - log.count("run") == 6 * 20


def test_devices_take_turns():
    """Over the rounds each device begins once, and each has its turn in every round."""
    log: list[str] = []

    def named(name):
        phases = ((FORWARD, lambda _batch: log.append(name)),)
        return Workload("x", FORWARD_PASS, "cpu", 1, None, lambda: iter(range(10**6)), phases)

    with use_clock(lambda: float(len(log))):  # A step takes a second, so that a turn has one.
        time_interleaved({name: named(name) for name in ("cpu", "mps", "cuda")}, 6)

    rounds = [log[at : at + 3] for at in range(9, len(log), 3)]
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
def test_length_of_a_turn(seconds, workers, steps):
    """A quick step is repeated, a slow one is not; a turn has at least four batches of each worker, of each as many."""
    assert steps_per_trial(seconds, workers) == round_up_to_workers(steps, workers) == steps
