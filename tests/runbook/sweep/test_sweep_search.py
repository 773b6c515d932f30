"""The search over made curves: where it looks, where it ends, and how near its knee is to the best of all sizes."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openmed_nb.runbook.sweep_knee import (
    KNEE_GAIN,
    LARGEST,
    MEMORY,
    OUT_OF_MEMORY,
    THROUGHPUT,
    TIME,
    Point,
    Search,
    fitting,
    knee_of,
)

WITHIN = 0.95


@pytest.fixture(scope="module")
def made(helper):
    """The class of made curves."""
    return helper(Path(__file__).with_name("made_curves.py")).Made


def saturating(half):
    """Return a throughput that is half of its most at a number of rows."""
    return lambda rows: 1000 * rows / (rows + half)


def peaked(top):
    """Return a throughput that is highest at a number of rows."""
    return lambda rows: 1000 * 2 / (rows / top + top / rows)


def in_tiles(size):
    """Return a throughput of a device that computes so many rows at a time, full or not."""
    return lambda rows: 1000 * rows / (size * math.ceil(rows / size))


CURVES = {
    "saturates at once": (saturating(0.01), 1),
    "saturates": (saturating(10), 300),
    "saturates late": (saturating(200), 6700),
    "level from 32 rows": (lambda rows: 10.0 * min(rows, 32), 32),
    "level from 40 rows": (lambda rows: 10.0 * min(rows, 40), 40),
    "falls from the first": (lambda rows: 1000 / rows, 1),
    "peak at a power of two": (peaked(64), 64),
    "peak between them": (peaked(48), 48),
    "peak below them": (peaked(23), 23),
    "tiles of 8": (in_tiles(8), 8),
    "slower beyond 64": (lambda rows: 10.0 * rows if rows <= 64 else 5.0 * min(rows, 90), 64),
}


@pytest.mark.parametrize(("curve", "most"), CURVES.values(), ids=CURVES)
def test_knee_is_near_the_best_of_all(made, curve, most):
    """The knee has at least 95 percent of the best throughput of any size, and is no larger than it need be."""
    there = made(curve)
    knee = there.knee()

    assert there.share(knee, 4096) >= WITHIN
    assert knee <= most


@pytest.mark.parametrize(("curve", "_most"), CURVES.values(), ids=CURVES)
@pytest.mark.parametrize("seed", range(5))
def test_noise_does_not_lead_astray(made, curve, _most, seed):
    """Where each look is off by some percent, the knee still has 95 percent of the best."""
    there = made(curve, noise=0.02, seed=seed)

    assert there.share(there.knee(), 4096) >= WITHIN


@pytest.mark.parametrize("capacity", [*range(1, 20), 31, 32, 33, 63, 64, 100, 127, 129, 1000])
def test_out_of_memory_is_found_wherever_it_is(made, capacity):
    """Where throughput rises until the memory is full, the largest batches that fit are found, and nothing is raised."""
    there = made(float, capacity)
    knee = there.knee()

    assert capacity * WITHIN <= knee <= capacity
    assert len(there.asked) <= 2 * math.log2(capacity) + 10


def test_out_of_memory_at_the_first_row(made):
    """Where not even one row fits, there is one point, which says so, and no knee."""
    there = made(float, capacity=0)
    search = Search(there.measure)

    assert [(point.rows, point.fits) for point in search.run()] == [(1, False)]
    assert (search.stopped, knee_of(search.found)) == (OUT_OF_MEMORY, None)


def test_doubling_ends_after_two_that_do_not_pay(made):
    """One unlucky size does not end the search, two in a row do."""
    unlucky = made(lambda rows: {1: 1.0, 2: 2.0, 4: 1.9, 8: 8.0}.get(rows, 8.0))
    search = Search(unlucky.measure)
    search.double()

    assert unlucky.asked == [1, 2, 4, 8, 16, 32]
    assert search.stopped == THROUGHPUT


def test_a_slow_moment_does_not_end_the_search(made):
    """Before sizes that do not pay end the search, they are measured once more beside the best."""
    there = made(lambda rows: float(min(rows, 64)))
    slow = {8, 16}
    measured = []

    def measure(rows):
        measured.append(rows)
        return made(lambda rows: there.speed(rows) / (9 if rows in slow else 1)).measure(rows)

    search = Search(measure, again=there.again)
    search.run()

    assert knee_of(search.found).rows == 64
    assert len(measured) == len(set(measured))


@pytest.mark.parametrize(("smallest", "largest"), [(1, 1), (1, 2), (1, 3), (1, 7), (1, 100), (3, 12)])
def test_nothing_outside_of_the_limits_is_measured(made, smallest, largest):
    """The fewest and the most rows that were asked for are measured, and nothing beyond."""
    there = made(float)
    search = Search(there.measure, largest=largest, smallest=smallest)
    search.run()

    assert (min(there.asked), max(there.asked)) == (smallest, largest)
    assert search.stopped == LARGEST


def test_memory_is_approached_and_not_passed(made):
    """Sizes that are expected to take too much are not measured, but those near them are."""
    there = made(float)
    search = Search(there.measure, lambda rows, _points: MEMORY if rows > 1000 else "")
    search.run()

    assert 990 <= max(there.asked) <= 1000
    assert search.stopped == MEMORY


def test_time_ends_everything(made):
    """When the time is used up, nothing more is measured."""
    there = made(float)
    search = Search(there.measure, lambda _rows, points: TIME if len(points) >= 3 else "")
    search.run()

    assert (there.asked, search.stopped) == ([1, 2, 4], TIME)


def test_a_size_that_fails_once_is_not_tried_again(made):
    """Where a size in the middle fails although larger ones fit, the search goes around it and ends."""
    there = made(lambda rows: float(min(rows, 64)))
    asked = []

    def measure(rows):
        asked.append(rows)
        return Point(rows, fits=False) if rows in {48, 56} else there.measure(rows)

    points = Search(measure).run()

    assert asked.count(48) == 1
    assert {point.rows: point.fits for point in points}[48] is False
    assert knee_of(points).rows in range(60, 65)


@given(half=st.floats(0.01, 500), top=st.integers(1, 3000), capacity=st.integers(1, 5000))
def test_any_smooth_curve_with_any_memory(made, half, top, capacity):
    """Whatever the curve that rises and falls once, and wherever the memory ends, the knee has 95 percent of the best."""
    rise = saturating(half)
    there = made(lambda rows: rise(rows) / (1 + (rows / top) ** 2), capacity)

    assert there.share(there.knee(), 8192) >= WITHIN


@given(
    speeds=st.lists(st.floats(0.1, 1000), min_size=1, max_size=300),
    full=st.sets(st.integers(1, 300)),
    largest=st.integers(1, 300) | st.none(),
)
def test_any_curve_at_all(speeds, full, largest):
    """Whatever is measured, the search ends, measures nothing twice, and no larger point gains more than the knee's share."""
    asked = []

    def measure(rows):
        asked.append(rows)
        fits = rows not in full and rows <= 4096
        return Point(rows, speeds[rows % len(speeds)]) if fits else Point(rows, fits=False)

    points = Search(measure, largest=largest).run()
    knee = knee_of(points)

    assert len(asked) == len(set(asked)) == len(points)
    assert all(1 <= rows <= (largest or rows) for rows in asked)
    assert (knee is None) == (not fitting(points))
    if knee:
        assert knee.fits
        assert all(one.speed <= knee.speed * (1 + KNEE_GAIN) for one in fitting(points))
