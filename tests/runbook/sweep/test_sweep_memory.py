"""How much memory a step takes, how much there is, and how much the next size will take."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from openmed_nb.devices.machine import mps_is_simulated
from openmed_nb.runbook.sweep_knee import Point
from openmed_nb.runbook.sweep_measurement import (
    ALLOCATOR,
    HEADROOM,
    HEADROOM_SHARE,
    NOT_KNOWN,
    PROFILER,
    expected_memory,
    given_by_system,
    in_container,
    limit_of,
    memory_of,
    peak_seen,
)

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
    assert HEADROOM["mps"] == HEADROOM["cuda"] == 1 - HEADROOM_SHARE == 0.9


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
