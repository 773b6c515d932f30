"""Steps are timed as they are in a long run: what a loader has read ahead in a pause is not among them."""

from __future__ import annotations

from collections.abc import Iterator

from openmed_nb.runbook.comparison import seconds_in_turn, steps_of_turn
from openmed_nb.runbook.measure.workloads import (
    FORWARD,
    FORWARD_PASS,
    Phase,
    Workload,
    drop_ready,
    settle,
    whole_rounds,
)


def logged(log: list[str], workers: int, ahead: int) -> Workload:
    """Return steps that write down what is read and what is run."""

    def batches() -> Iterator[int]:
        number = 0
        while True:
            log.append("read")
            yield number
            number += 1

    phases = (Phase(FORWARD, lambda _batch: log.append("run")),)
    return Workload("x", FORWARD_PASS, "cpu", 1, None, batches, phases, workers, ahead=ahead)


def test_what_was_read_ahead_is_left_out():
    """What a loader holds ready is read and not run, and then each worker gives a batch that is run."""
    log: list[str] = []
    workload = logged(log, 2, 6)
    batches = workload.batches()
    drop_ready(workload, batches)

    assert log == ["read"] * 6
    settle(workload, batches)
    assert log[6:] == ["read"] * 6 + ["read", "run"] * 2


def test_nothing_is_left_out_without_workers():
    """Where nothing is read ahead, no batch is left out."""
    log: list[str] = []
    settle(logged(log, 0, 0), iter([]))

    assert log == []


def test_every_turn_begins_like_a_long_run():
    """Before each turn of each device, its loader is emptied of what it has read during the other one's turn."""
    log: list[str] = []
    turns = seconds_in_turn({"cpu": logged(log, 1, 20), "mps": logged([], 0, 0)}, 6)

    assert [len(seconds) for seconds in turns.values()] == [6, 6]
    assert log.count("read") - log.count("run") == 6 * 20


def test_turns_have_whole_rounds_of_workers():
    """A turn has at least four batches of each worker, and of each as many as of the others."""
    cases = [([0.004, 0.001], 0, 20), ([1.0, 0.5], 0, 1), ([1.0, 0.5], 2, 8), ([0.004, 0.001], 3, 21)]
    for seconds, workers, steps in cases:
        assert steps_of_turn(seconds, workers) == steps, (seconds, workers)
        assert whole_rounds(steps, workers) == steps, (seconds, workers)
