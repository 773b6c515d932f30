"""The confidence interval of a median, against known ranks."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openmed_nb.runbook.bench.timing import Interval, median_interval

RANKS = {6: 1, 8: 1, 9: 2, 11: 2, 12: 3, 15: 4, 20: 6, 25: 8, 30: 10, 40: 14, 50: 18, 100: 40, 4001: 1939}


def test_ranks_of_published_tables():
    """The ranks at 95 percent are those that tables of the sign test give."""
    intervals = {count: median_interval(random.sample(range(1, count + 1), count)) for count in RANKS}

    assert {count: interval.low for count, interval in intervals.items()} == RANKS
    assert all(interval.high == count + 1 - interval.low for count, interval in intervals.items())


LEVELS = {6: 0.96875, 8: 0.9921875, 10: 0.978515625, 20: 0.9586105346679688}


def test_level_is_that_of_the_binomial_distribution():
    """The level is exact, not the one that was asked for; one value less than an interval needs is an error."""
    assert {count: median_interval(range(count)).confidence for count in LEVELS} == pytest.approx(LEVELS, abs=1e-12)
    with pytest.raises(ValueError, match="at least 6 are needed"):
        median_interval(range(5))


def test_interval_covers_as_often_as_it_says():
    """Of many series of a skewed distribution with a known median, the share of intervals that hold it is the level."""
    numbers = random.Random(2)
    median = 0.6931471805599453  # of the exponential distribution with mean 1: ln 2
    held = [median_interval([numbers.expovariate(1) for _ in range(20)]).contains(median) for _ in range(4000)]

    assert sum(held) / len(held) == pytest.approx(0.9586, abs=0.012)


@given(st.lists(st.floats(0.01, 100), min_size=6, max_size=60))
def test_interval_holds_its_median(values):
    """The ends are values, the median is between them, and the level is the one asked for at least."""
    interval = median_interval(values)

    assert interval.low <= interval.median <= interval.high
    assert {interval.low, interval.high} <= set(values)
    assert interval.confidence >= 0.95


def test_ends_belong_to_the_interval():
    """An interval holds its ends."""
    for value, held in [(0.9, False), (1.0, True), (1.2, True), (1.5, True), (1.6, False)]:
        assert Interval(1.0, 1.2, 1.5, 0.95).contains(value) is held, value
