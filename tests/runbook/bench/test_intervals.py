"""Tests of the confidence interval of a median against known ranks."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openmed_nb.runbook.bench.timing import Interval, median_interval

RANKS = {6: 1, 8: 1, 9: 2, 11: 2, 12: 3, 15: 4, 20: 6, 25: 8, 30: 10, 40: 14, 50: 18, 100: 40, 4001: 1939}


def test_median_interval_uses_published_ranks():
    """The ranks at 95 % are those in tables of the sign test."""
    intervals = {count: median_interval(random.sample(range(1, count + 1), count)) for count in RANKS}

    assert {count: interval.low for count, interval in intervals.items()} == RANKS
    assert all(interval.high == count + 1 - interval.low for count, interval in intervals.items())


LEVELS = {6: 0.96875, 8: 0.9921875, 10: 0.978515625, 20: 0.9586105346679688}


def test_median_interval_reports_exact_confidence():
    """The confidence is that of the binomial distribution. One value fewer than the minimum is an error."""
    assert {count: median_interval(range(count)).confidence for count in LEVELS} == pytest.approx(LEVELS, abs=1e-12)
    with pytest.raises(ValueError, match="at least 6 values"):
        median_interval(range(5))


def test_median_interval_covers_the_true_median():
    """For a skewed distribution with known median, the fraction of intervals that contain it equals the confidence."""
    numbers = random.Random(2)
    median = 0.6931471805599453  # ln 2, the median of the exponential distribution with mean 1.
    covered = [median_interval([numbers.expovariate(1) for _ in range(20)]).contains(median) for _ in range(4000)]

    assert sum(covered) / len(covered) == pytest.approx(0.9586, abs=0.012)


@given(st.lists(st.floats(0.01, 100), min_size=6, max_size=60))
def test_median_interval_contains_its_median(values):
    """The ends are values of the sample, and the confidence is at least the requested one."""
    interval = median_interval(values)

    assert interval.low <= interval.median <= interval.high
    assert {interval.low, interval.high} <= set(values)
    assert interval.confidence >= 0.95


def test_interval_contains_its_ends():
    for value, is_contained in [(0.9, False), (1.0, True), (1.2, True), (1.5, True), (1.6, False)]:
        assert Interval(1.0, 1.2, 1.5, 0.95).contains(value) is is_contained, value
