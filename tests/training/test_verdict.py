"""What a series of sizes means is decided by its trend, not by one odd epoch."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openmed_nb.training.curve import (
    GROWTH_GATE,
    SMALLEST_BASELINE,
    judge,
    rank_correlation,
    slope,
    without_largest_rise,
)

MIB = 1 << 20

SERIES = {
    "flat": ([100] * 9, "flat"),
    "noise of 2 %": ([100, 102, 98, 101, 99, 102, 100, 98, 101], "flat"),
    "noise of 2 % that rises by chance": ([98, 100, 102], "flat"),
    "a slow rise below the gate": ([100 + 2 * epoch for epoch in range(9)], "flat"),
    "a rise just below the gate": ([100 + 2.55 * epoch for epoch in range(9)], "flat"),
    "a rise just above the gate": ([100 + 2.65 * epoch for epoch in range(9)], "growing"),
    "a steady leak": ([100 + 10 * epoch for epoch in range(9)], "growing"),
    "a steady leak of three epochs": ([100, 105, 110], "growing"),
    "a leak with noise": ([100, 108, 112, 124, 127, 139, 141, 152, 160], "growing"),
    "a leak every third epoch": ([100, 100, 100, 140, 140, 140, 180, 180, 180], "growing"),
    "a leak under a sawtooth": ([100, 150, 120, 170, 140, 190], "growing"),
    "a leak that doubles": ([100, 200, 400, 800], "growing"),
    "a leak after a slow start": ([100, 100, 100, 130, 160, 190, 220], "growing"),
    "one jump at the end, of three": ([100, 100, 180], "too short to tell"),
    "one jump at the end, of nine": ([100] * 8 + [180], "too short to tell"),
    "a leak that begins late": ([100] * 6 + [130, 160, 190], "growing"),
    "a late rise that has ended": ([100] * 9 + [120, 140, 140, 140], "flat"),
    "a leak under an evaluation every second epoch": ([1000 + 50 * n + 900 * (n % 2) for n in range(12)], "growing"),
    "a cache that fills and stays": ([1000, 1200, 1400, 1600, *[1800] * 6], "flat"),
    "a slow rise for long": ([1000 + 20 * n for n in range(100)], "flat"),
    "a small late rise": ([100] * 6 + [103, 106, 109], "flat"),
    "one jump at once, of three": ([100, 180, 180], "flat"),
    "one jump kept, of four": ([100, 100, 180, 180], "flat"),
    "one jump kept, of nine": ([100] * 4 + [180] * 5, "flat"),
    "one jump with noise that rises": ([100, 101, 180, 181], "flat"),
    "one jump with noise": ([100, 101, 99, 180, 181, 178], "flat"),
    "one fall kept": ([180] * 4 + [100] * 5, "flat"),
    "a spike": ([100, 100, 180, 100, 100], "sawtooth"),
    "a sawtooth": ([100, 180] * 4, "sawtooth"),
    "a slow sawtooth": ([100, 140, 180, 100, 140, 180, 100, 140, 180], "sawtooth"),
    "a sawtooth that begins high": ([180, 100] * 4, "sawtooth"),
    "falling": ([200 - 10 * epoch for epoch in range(9)], "flat"),
    "falling with noise": ([200, 188, 192, 170, 173, 150, 141], "flat"),
    "a rise that falls back as often as a growth may": ([100, 120, 150, 180, 140], "growing"),
    "a rise that falls back more often": ([100, 160, 160, 150, 160, 210, 200], "flat"),
    "a rise of six epochs that ends falling": ([100, 100, 104, 111, 115, 107], "flat"),
    "a rise of six epochs that ends below half the pace": ([100, 106, 114, 122, 112, 124], "flat"),
    "a rise of six epochs that ends above half the pace": ([100, 100, 102, 107, 111, 111], "growing"),
    "a rise that is nearly one jump": ([100, 104, 106], "flat"),
    "two rises alike": ([100, 103, 106], "growing"),
    "a last rise below half the gate": ([100, 102, 109], "flat"),
    "a last rise above half the gate": ([100, 102, 114], "too short to tell"),
    "three last rises": ([100, 102, 114, 116], "growing"),
    "a fall by a quarter of the spread": ([100, 140, 130], "flat"),
    "a fall by more than a quarter of the spread": ([100, 130, 122], "sawtooth"),
    "zeros": ([0] * 5, "flat"),
    "a rise from zero": ([0, 10, 20, 30], "growing"),
    "less than nothing to speak of": ([0.001 * 2**epoch for epoch in range(6)], "flat"),
    "one epoch": ([100], "too short to tell"),
    "two epochs that leak": ([100, 200], "too short to tell"),
    "no epoch": ([], "too short to tell"),
}


def mebibytes(sizes: list[float]) -> list[int]:
    """Return a series in bytes."""
    return [round(size * MIB) for size in sizes]


def test_kinds_of_series():
    """Each kind of series has its verdict; whatever it is, fifty epochs without a change after it are no growth."""
    for name, (sizes, kind) in SERIES.items():
        assert judge(mebibytes(sizes)).kind == kind, name
        assert judge(mebibytes([*sizes, *sizes[-1:] * 50])).kind != "growing", name


def test_the_growth_is_told_over_ten_epochs():
    """Five MiB for each epoch on a baseline of 100 MiB are 50 % over ten epochs, however many there were."""
    for epochs in (3, 9, 90, 900):
        trend = judge([(100 + 5 * epoch) * MIB for epoch in range(epochs)])

        assert trend.growth == pytest.approx(0.5)
        assert (trend.kind, trend.baseline) == ("growing", 100 * MIB)
        assert trend.last == (100 + 5 * (epochs - 1)) * MIB


def test_a_trend_can_be_written_as_json():
    """A trend is plain numbers and strings."""
    assert json.loads(json.dumps(judge([100 * MIB, 90 * MIB]).to_dict())) == {
        "kind": "too short to tell",
        "baseline": 100 * MIB,
        "last": 90 * MIB,
        "growth": pytest.approx(-1.0),
        "spread": pytest.approx(0.1),
        "total": pytest.approx(-0.1),
    }


def test_the_gate_can_be_moved():
    """A higher gate lets more growth pass, a lower one less."""
    sizes = [(100 + 3 * epoch) * MIB for epoch in range(9)]

    assert [judge(sizes, gate).kind for gate in (0, 0.26, 0.5)] == ["growing", "growing", "flat"]


def test_growth_of_little_memory_alarms_nobody():
    """Growth is told as a share of at least one MiB."""
    assert judge([1024 * 3**epoch for epoch in range(4)]).kind == "flat"
    assert judge([1024 * 3**epoch for epoch in range(9)]).kind == "growing"


SIZES = st.lists(st.integers(0, 1 << 45), max_size=40)


@given(SIZES, st.floats(0, 10))
def test_any_series_has_a_verdict(sizes, gate):
    """Every series of sizes has one of four verdicts; fewer than three say nothing, and more only where the last rose."""
    trend = judge(sizes, gate)

    assert trend.kind in {"flat", "growing", "sawtooth", "too short to tell"}
    if len(sizes) < 3:
        assert trend.kind == "too short to tell"
    elif trend.kind == "too short to tell":
        assert sizes[-1] > sizes[-2]


@given(st.lists(st.integers(SMALLEST_BASELINE, 1 << 40), min_size=1, max_size=20), st.sampled_from([2, 4, 1024]))
def test_the_unit_does_not_matter(sizes, factor):
    """A series has the same verdict in other units, above the smallest baseline."""
    assert judge([size * factor for size in sizes]).kind == judge(sizes).kind
    assert judge([size * factor for size in sizes]).growth == pytest.approx(judge(sizes).growth)


@given(st.integers(SMALLEST_BASELINE, 1 << 40), st.lists(st.floats(-0.02, 0.02), min_size=3, max_size=40))
def test_bounded_noise_is_flat(size, noise):
    """A level with noise of up to 2 % is flat, in whatever order the noise comes."""
    assert judge([round(size * (1 + one)) for one in noise]).kind == "flat"


@given(st.integers(4 * SMALLEST_BASELINE, 1 << 40), st.lists(st.floats(0.03, 0.5), min_size=2, max_size=40))
def test_any_rise_above_the_gate_is_growing(baseline, rises):
    """A series in which every epoch takes more than a tenth of the gate is growing."""
    sizes = [round(baseline * (1 + sum(rises[:epochs]))) for epochs in range(len(rises) + 1)]

    assert judge(sizes).kind == "growing"
    assert judge(sizes).growth > GROWTH_GATE


@given(st.lists(st.integers(0, 1 << 40), min_size=3, max_size=20))
def test_what_falls_is_never_growing(sizes):
    """A series that never rises is not growing, and no sawtooth."""
    assert judge(sorted(sizes, reverse=True)).kind == "flat"


@given(st.lists(st.integers(0, 1 << 40), min_size=3, max_size=20), st.integers(0, 19), st.integers(0, 1 << 40))
def test_one_jump_is_not_growing(level, start, jump):
    """A level of zero, or any other, with one jump that is kept is flat, but where the jump came last."""
    sizes = [level[0] + jump * (epoch >= start) for epoch in range(len(level))]

    assert judge(sizes).kind in ({"flat", "too short to tell"} if start == len(level) - 1 else {"flat"})


@given(SIZES)
def test_the_largest_rise_is_taken_out(sizes):
    """Without its largest rise a series is as long as before, begins as it did, and ends lower by that rise."""
    rest = without_largest_rise(sizes)
    largest = max([0, *(later - sooner for sooner, later in itertools.pairwise(sizes))])

    assert len(rest) == len(sizes)
    assert rest[:1] == sizes[:1]
    assert rest[-1:] == [size - largest for size in sizes[-1:]]


@given(st.lists(st.integers(-1000, 1000), min_size=2, max_size=30), st.integers(-1000, 1000))
def test_slope_and_rank_correlation_of_a_reflected_series(sizes, level):
    """Turning a series upside down turns its slope and its correlation around; a level adds nothing."""
    reflected = [level - size for size in sizes]

    assert slope(reflected) == pytest.approx(-slope(sizes))
    assert rank_correlation(reflected) == pytest.approx(-rank_correlation(sizes))
    assert -1 <= rank_correlation(sizes) <= 1
