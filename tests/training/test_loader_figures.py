"""What follows from measured times: tables of figures, no clock."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openmed_nb.training.loader_checks import LoaderCheck, Rung, WorkerLadder

CHECKS = [
    # (data, step, workers) -> bottleneck, waiting, a word of the advice
    ((0.030, 0.010, 0), "loader", 0.75, "let workers read ahead"),
    ((0.030, 0.010, 2), "loader", 2 / 3, "more workers"),
    ((0.010, 0.030, 0), "model", 0.25, "Loading and computing take turns: let workers read ahead"),
    ((0.010, 0.030, 2), "model", 0.0, "Nothing to gain"),
    ((0.001, 0.030, 0), "model", 1 / 31, "Nothing to gain"),
    ((0.010, 0.0105, 0), "neither", 10 / 20.5, "take turns"),
    ((0.0105, 0.010, 1), "neither", 0.5 / 10.5, "Nothing to gain"),
    ((0.0, 0.0, 0), "neither", 0.0, "Nothing to gain"),
]


@pytest.mark.parametrize(("figures", "bottleneck", "waiting", "advice"), CHECKS)
def test_check(figures, bottleneck, waiting, advice):
    """The longer of the two limits; without workers loading and computing take turns, with them they go side by side."""
    check = LoaderCheck("cpu", *figures, 20)

    assert check.bottleneck == bottleneck
    assert check.waiting == pytest.approx(waiting)
    assert advice in check.advice


@given(st.floats(0, 1e3), st.floats(0, 1e3), st.integers(0, 8))
def test_waiting_is_a_share(data, step, workers):
    """The share of waiting is between 0 and 1, and workers never make it larger."""
    waiting = LoaderCheck("cpu", data, step, workers, 1).waiting

    assert 0 <= waiting <= 1
    assert waiting <= LoaderCheck("cpu", data, step, 0, 1).waiting + 1e-9


def test_check_shown():
    """It shows what limits, both times and the share, and is ready for JSON."""
    check = LoaderCheck("mps", 0.0305, 0.01, 0, 20, simulated=True)

    assert str(check).splitlines()[0] == "SIMULATED mps: the loader takes longer than the model"
    assert "waits 75% of its time" in str(check)
    assert "30.50 ms" in check._repr_html_()
    assert json.loads(json.dumps(check.to_dict()))["bottleneck"] == "loader"


def test_the_advice_follows_from_the_verdict():
    """Where the model takes longer, no work on the loader is asked for, only that both go side by side."""
    shown = str(LoaderCheck("cpu", 0.02, 0.03, 0, 20))

    assert "cpu: the model takes longer than the loader" in shown
    assert "waits 40% of its time" in shown
    assert "Do the work on the texts" not in shown


LADDERS = [
    # seconds for 0, 1, 2 ... workers -> choice
    ((0.040,), 0),
    ((0.040, 0.041, 0.050), 0),
    ((0.040, 0.038, 0.037), 0),
    ((0.040, 0.020, 0.019), 1),
    ((0.040, 0.020, 0.010), 2),
    ((0.040, 0.050, 0.010), 2),
]


@pytest.mark.parametrize(("seconds", "workers"), LADDERS)
def test_ladder(seconds, workers):
    """The smallest number is taken that no larger one beats by more than a tenth."""
    assert WorkerLadder(tuple(Rung(count, one, one) for count, one in enumerate(seconds)), 8).workers == workers


def test_ladder_shown():
    """It shows the time and the mean memory of a worker in each row."""
    ladder = WorkerLadder((Rung(0, 0.04, 0.05), Rung(2, 0.01, 3.0, (2**28, 2**28))), 8)

    assert str(ladder).splitlines()[0] == "2 workers"
    assert "256.0 MiB" in str(ladder)
    assert "could not be read" not in str(ladder)
    assert "The memory of some workers could not be read." in str(WorkerLadder((Rung(1, 0.04, 0.05),), 8))
    assert "could not be read" not in str(WorkerLadder((Rung(0, 0.04, 0.05),), 8))
    assert json.loads(json.dumps(ladder.to_dict()))["rungs"][1]["worker_bytes"] == [2**28, 2**28]
