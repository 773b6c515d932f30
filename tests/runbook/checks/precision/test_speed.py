"""Speedup of a reduced dtype on machines with background load."""

from hypothesis import given
from hypothesis import strategies as st

from openmed_nb.models.records import MIN_SPEEDUP
from openmed_nb.runbook.checks.precision.validation import TIMING_ROUNDS, median_speedup

SECONDS = st.floats(1e-3, 1e3)
READINGS = st.lists(st.tuples(SECONDS, SECONDS), min_size=TIMING_ROUNDS, max_size=TIMING_ROUNDS)


def test_median_speedup_requires_two_rounds():
    cases = [
        ([(1.0, 1.0)] * 9, 1.0),
        ([(1.0, 2.0)] * 9, 1.0),
        ([(2.0, 1.0)] * 9, 2.0),
        ([(2.0, 1.0)] * 8 + [(1.0, 9.0)], 2.0),
        ([(2.0, 1.0)] * 7 + [(1.0, 1.0)] * 2, 1.0),
        ([(1.05, 1.0)] * 9, 1.0),
        ([(1.06, 1.0)] * 9, 1.06),
        ([(1.5, 1.0)] * 4 + [(1.6, 1.0)] + [(9.0, 1.0)] * 4, 1.6),
        ([(0.66, 1.0), (2.16, 1.0), (1.0, 1.0)] * 3, 1.0),
        ([(2.16, 1.0)] * 6 + [(0.66, 1.0)] * 3, 1.0),
    ]
    for seconds, gain in cases:
        assert median_speedup(seconds) == gain, seconds


@given(READINGS)
def test_median_speedup_is_antisymmetric(seconds):
    there, back = median_speedup(seconds), median_speedup([(fast, slow) for slow, fast in seconds])

    assert min(there, back) == 1.0
    assert there == 1.0 or there > MIN_SPEEDUP
