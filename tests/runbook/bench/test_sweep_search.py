"""The search over made curves: where it looks, where it ends, how near its knee is to the best, and the memory it expects."""

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from openmed_nb.devices.machine import is_mps_simulated
from openmed_nb.devices.registry import parse_device_argument
from openmed_nb.runbook.bench.sweep import (
    ALLOCATOR,
    HEADROOM_FRACTION,
    LARGEST,
    MEMORY,
    MIN_KNEE_GAIN,
    NOT_KNOWN,
    PROFILER,
    THROUGHPUT,
    Point,
    available_memory,
    container_memory,
    expected_memory,
    fitting,
    knee_of,
    measure_step_memory,
    memory_limit,
    profile_peak_memory,
)

WITHIN = 0.95
MEGABYTE = 1 << 20


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


def level_from(most):
    """Return a throughput that rises up to a number of rows."""
    return lambda rows: 10.0 * min(rows, most)


CURVES = {
    "saturates at once": (saturating(0.01), 1),
    "saturates": (saturating(10), 300),
    "saturates late": (saturating(200), 6700),
    "level from 32 rows": (level_from(32), 32),
    "level from 40 rows": (level_from(40), 40),
    "falls from the first": (lambda rows: 1000 / rows, 1),
    "peak at a power of two": (peaked(64), 64),
    "peak between them": (peaked(48), 48),
    "peak below them": (peaked(23), 23),
    "tiles of 8": (lambda rows: 1000 * rows / (8 * math.ceil(rows / 8)), 8),
    "slower beyond 64": (lambda rows: 10.0 * rows if rows <= 64 else 5.0 * min(rows, 90), 64),
}


@pytest.mark.parametrize(("curve", "most"), CURVES.values(), ids=CURVES)
def test_knee_is_near_the_best_of_all(made, curve, most):
    """The knee has at least 95 percent of the best throughput, also if each look is off by some percent, and is no larger than need be."""
    assert made(curve).knee() <= most
    for there in (made(curve), *(made(curve, noise=0.02, seed=seed) for seed in range(5))):
        assert there.share(there.knee(), 4096) >= WITHIN


@pytest.mark.parametrize("capacity", [*range(1, 20), 31, 32, 33, 63, 64, 100, 127, 129, 1000])
def test_largest_batch_that_fits_is_found(made, capacity):
    there = made(float, capacity)

    assert capacity * WITHIN <= there.knee() <= capacity
    assert len(there.asked) <= 2 * math.log2(capacity) + 10


def test_doubling_ends_after_two_that_do_not_pay(made):
    """One unlucky size does not end the search, two in a row do."""
    unlucky = made(lambda rows: {1: 1.0, 2: 2.0, 4: 1.9}.get(rows, 8.0))

    assert unlucky.search().stopped == THROUGHPUT
    assert unlucky.asked[:6] == [1, 2, 4, 8, 16, 32] == sorted({*unlucky.asked} & {1 << power for power in range(9)})


def test_sizes_that_do_not_pay_are_measured_again(made):
    """A slow moment of another program does not end the search."""
    there = made(level_from(64), slow={8, 16})

    assert there.knee() == 64
    assert len(there.asked) == len(set(there.asked))


@pytest.mark.parametrize(("smallest", "largest"), [(1, 1), (1, 2), (1, 3), (1, 7), (1, 100), (3, 12)])
def test_search_keeps_to_the_rows_asked_for(made, smallest, largest):
    there = made(float)

    assert there.search(smallest=smallest, largest=largest).stopped == LARGEST
    assert (min(there.asked), max(there.asked)) == (smallest, largest)


def test_expected_memory_is_approached_and_not_passed(made):
    there = made(float)

    assert there.search(lambda rows, _points: MEMORY if rows > 1000 else "").stopped == MEMORY
    assert 990 <= max(there.asked) <= 1000


def test_size_that_fails_is_passed_over(made):
    """If a size in the middle fails although larger ones fit, the search goes around it."""
    there = made(level_from(64), full={48, 56})

    assert there.knee() in range(60, 65)
    assert there.asked.count(48) == 1


@given(half=st.floats(0.01, 500), top=st.integers(1, 3000), capacity=st.integers(1, 5000))
def test_any_smooth_curve_with_any_memory(made, half, top, capacity):
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
    points = there.search(largest=largest).measured_points
    knee = knee_of(points)

    assert len(there.asked) == len(set(there.asked)) == len(points)
    assert all(1 <= rows <= (largest or rows) for rows in there.asked)
    assert (knee is None) == (not fitting(points))
    assert all(point.speed <= knee.speed * (1 + MIN_KNEE_GAIN) for point in fitting(points))


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
def test_expected_memory(sizes, rows, expected):
    """One size grows with the rows, more lie on a line, and a line that bends upwards bends on as a square at most."""
    points = [Point(size, 1.0, memory=memory) for size, memory in sizes.items()]

    assert expected_memory([*points, Point(64, fits=False), Point(3, 1.0)], rows) == expected


def test_peak_on_the_cpu_is_that_of_the_tensors(monkeypatch, capfd):
    """Tensors are counted while they live, also those of a backward pass, silently, and without torch's older profiler."""
    for name in ("_enable_profiler_legacy", "_disable_profiler_legacy"):
        monkeypatch.delattr(torch.autograd, name, raising=False)
    weight = torch.ones(MEGABYTE // 4, device="cpu", requires_grad=True)

    def step():
        for _ in range(3):
            (weight * 2).square().sum().backward()
            weight.grad = None

    memory, method = measure_step_memory("cpu", step)

    assert 2 * MEGABYTE <= memory < 5 * MEGABYTE
    assert method == PROFILER
    assert capfd.readouterr() == ("", "")


def test_profiler_of_memory_ends():
    """An error of a step passes through, and the next step is measured again; beside another profiler nothing is known."""
    with pytest.raises(ZeroDivisionError):
        profile_peak_memory(lambda: 1 // 0)
    assert profile_peak_memory(lambda: torch.ones(1000, device="cpu") + torch.ones(1000, device="cpu"))[0] == 12000

    ran = []
    with torch.autograd.profiler.profile():
        assert profile_peak_memory(lambda: ran.append(1)) == (None, NOT_KNOWN)
    assert ran == [1]


@pytest.mark.skipif("not config.getoption('simulated_mps')", reason="torch's MPS allocator, on the simulated Mac")
def test_peak_on_mps_is_that_of_the_allocator():
    assert is_mps_simulated()
    memory, method = measure_step_memory("mps", lambda: torch.ones(MEGABYTE, device="mps"))

    assert memory >= 4 * MEGABYTE
    assert method == ALLOCATOR


def test_limits_of_devices():
    """On the CPU the limit is what the system can still give; on each GPU the same share stays free."""
    assert 0 < memory_limit("cpu", 0.5) == pytest.approx(available_memory(), rel=0.3)
    assert (
        parse_device_argument("mps").headroom == parse_device_argument("cuda").headroom == 1 - HEADROOM_FRACTION == 0.9
    )


@pytest.mark.parametrize(
    ("most", "held", "rest"), [("1000\n", "300\n", 700), ("max\n", "300\n", None), (None, None, None), ("9", "", None)]
)
def test_limit_of_a_container(tmp_path, most, held, rest):
    """A container's limit counts if it has one, less what its processes hold."""
    files = tmp_path / "memory.max", tmp_path / "memory.current"
    for file, text in zip(files, (most, held), strict=True):
        if text is not None:
            file.write_text(text)

    assert container_memory(*files) == rest
