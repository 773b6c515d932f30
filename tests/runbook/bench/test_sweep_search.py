"""The search over made curves: where it looks, where it ends, how near its knee is to the best, and the memory it expects."""

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from openmed_nb.devices.machine import mps_is_simulated
from openmed_nb.devices.registry import device_of
from openmed_nb.runbook.bench.sweep import (
    ALLOCATOR,
    HEADROOM_SHARE,
    KNEE_GAIN,
    LARGEST,
    MEMORY,
    NOT_KNOWN,
    OUT_OF_MEMORY,
    PROFILER,
    THROUGHPUT,
    TIME,
    Point,
    expected_memory,
    fitting,
    given_by_system,
    in_container,
    knee_of,
    limit_of,
    memory_of,
    peak_seen,
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
    search = there.search()

    assert [(point.rows, point.fits) for point in search.found] == [(1, False)]
    assert (search.stopped, knee_of(search.found)) == (OUT_OF_MEMORY, None)


def test_doubling_ends_after_two_that_do_not_pay(made):
    """One unlucky size does not end the search, two in a row do."""
    unlucky = made(lambda rows: {1: 1.0, 2: 2.0, 4: 1.9, 8: 8.0}.get(rows, 8.0))
    search = unlucky.search()

    assert unlucky.asked[:6] == [1, 2, 4, 8, 16, 32]
    assert max(unlucky.asked) == 32
    assert search.stopped == THROUGHPUT


def test_a_slow_moment_does_not_end_the_search(made):
    """Before sizes that do not pay end the search, they are measured once more beside the best."""
    there = made(lambda rows: float(min(rows, 64)), slow={8, 16})

    assert there.knee() == 64
    assert len(there.asked) == len(set(there.asked))


@pytest.mark.parametrize(("smallest", "largest"), [(1, 1), (1, 2), (1, 3), (1, 7), (1, 100), (3, 12)])
def test_nothing_outside_of_the_limits_is_measured(made, smallest, largest):
    """The fewest and the most rows that were asked for are measured, and nothing beyond."""
    there = made(float)
    search = there.search(largest=largest, smallest=smallest)

    assert (min(there.asked), max(there.asked)) == (smallest, largest)
    assert search.stopped == LARGEST


def test_memory_is_approached_and_not_passed(made):
    """Sizes that are expected to take too much are not measured, but those near them are."""
    there = made(float)
    search = there.search(lambda rows, _points: MEMORY if rows > 1000 else "")

    assert 990 <= max(there.asked) <= 1000
    assert search.stopped == MEMORY


def test_time_ends_everything(made):
    """When the time is used up, nothing more is measured."""
    there = made(float)
    search = there.search(lambda _rows, points: TIME if len(points) >= 3 else "")

    assert (there.asked, search.stopped) == ([1, 2, 4], TIME)


def test_a_size_that_fails_once_is_not_tried_again(made):
    """Where a size in the middle fails although larger ones fit, the search goes around it and ends."""
    there = made(lambda rows: float(min(rows, 64)), full={48, 56})
    search = there.search()

    assert there.asked.count(48) == 1
    assert search.points[48].fits is False
    assert knee_of(search.found).rows in range(60, 65)


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
def test_any_curve_at_all(made, speeds, full, largest):
    """Whatever is measured, the search ends, measures nothing twice, and no larger point gains more than the knee's share."""
    there = made(lambda rows: speeds[rows % len(speeds)], 4096, full=full)
    points = there.search(largest=largest).found
    knee = knee_of(points)

    assert len(there.asked) == len(set(there.asked)) == len(points)
    assert all(1 <= rows <= (largest or rows) for rows in there.asked)
    assert (knee is None) == (not fitting(points))
    if knee:
        assert knee.fits
        assert all(one.speed <= knee.speed * (1 + KNEE_GAIN) for one in fitting(points))


MEGABYTE = 1 << 20


@pytest.mark.parametrize(
    ("sizes", "rows", "expected"),
    [
        ({}, 8, None),
        ({4: 40}, 8, 80),
        ({4: 40}, 2, 40),
        ({1: 110, 2: 120, 4: 140}, 8, 180),
        ({1: 100, 2: 100, 4: 100}, 8, 100),
        ({2: 40, 4: 160, 8: 640}, 16, 2560),
        ({1: 10, 2: 11, 4: 100}, 8, 456),
        ({4: 100, 8: 90}, 16, 90),
    ],
)
def test_memory_is_expected(sizes, rows, expected):
    """One size grows with the rows, more lie on a line, and a line that bends upwards bends on as a square at most."""
    points = [Point(size, 1.0, memory=memory) for size, memory in sizes.items()]

    assert expected_memory([*points, Point(64, fits=False), Point(3, 1.0)], rows) == expected


@given(st.integers(0, 1 << 30), st.integers(1, 1 << 20), st.integers(1, 10))
def test_a_straight_line_is_expected_as_it_is(base, each, doublings):
    """Memory that is a sum of the model and the rows is expected to the byte, or one more."""
    points = [Point(1 << n, 1.0, memory=base + (each << n)) for n in range(doublings + 1)]
    following = 1 << doublings + 1

    assert 0 <= expected_memory(points, following) - (base + each * following) <= 1


def test_the_peak_on_the_cpu_is_that_of_the_tensors(capfd):
    """On the CPU the tensors of a step are counted while they live, also those of a backward pass, without a word printed."""
    weight = torch.ones(MEGABYTE // 4, device="cpu", requires_grad=True)

    def step():
        for _ in range(3):
            (weight * 2).square().sum().backward()
            weight.grad = None

    memory, method = memory_of("cpu", step)

    assert 2 * MEGABYTE <= memory < 5 * MEGABYTE
    assert method == PROFILER
    assert capfd.readouterr() == ("", "")


def test_the_older_profiler_is_not_needed(monkeypatch):
    """The memory of a step on the CPU is seen by a torch without its older profiler, which it is to lose."""
    for name in ("_enable_profiler_legacy", "_disable_profiler_legacy"):
        monkeypatch.delattr(torch.autograd, name, raising=False)

    assert peak_seen(lambda: torch.ones(1000, device="cpu") + torch.ones(1000, device="cpu"))[0] == 12000


def test_as_much_stays_free_on_every_gpu():
    """A batch on a GPU is expected to leave the one named share of the memory free."""
    assert device_of("mps").headroom == device_of("cuda").headroom == 1 - HEADROOM_SHARE == 0.9


def test_profiler_ends():
    """An error of a step passes through, and the next step is measured again; beside another profiler nothing is known."""
    with pytest.raises(ZeroDivisionError):
        peak_seen(lambda: 1 // 0)
    assert not torch.autograd._profiler_enabled()
    assert peak_seen(lambda: torch.ones(100, device="cpu"))[0] == 400

    ran = []
    with torch.autograd.profiler.profile():
        assert peak_seen(lambda: ran.append(1)) == (None, NOT_KNOWN)
    assert ran == [1]


@pytest.mark.skipif("not config.getoption('simulated_mps')", reason="torch's MPS allocator, on the simulated Mac")
def test_the_peak_on_mps_is_that_of_the_allocator():
    """On MPS torch's allocator counts the peak, with what was there before."""
    assert mps_is_simulated()
    memory, method = memory_of("mps", lambda: torch.ones(MEGABYTE, device="mps"))

    assert memory >= 4 * MEGABYTE
    assert method == ALLOCATOR


def test_the_limit_of_the_cpu_is_what_the_system_gives():
    """On the CPU the limit is what the system can still give, whatever share of a device is said."""
    assert 0 < limit_of("cpu", 0.5) == pytest.approx(given_by_system(), rel=0.3)


@pytest.mark.parametrize(
    ("most", "held", "rest"), [("1000\n", "300\n", 700), ("max\n", "300\n", None), (None, None, None), ("9", "", None)]
)
def test_the_limit_of_a_container(tmp_path, most, held, rest):
    """A container's limit counts where it has one, less what its processes hold."""
    files = tmp_path / "memory.max", tmp_path / "memory.current"
    for file, text in zip(files, (most, held), strict=True):
        if text is not None:
            file.write_text(text)

    assert in_container(*files) == rest
