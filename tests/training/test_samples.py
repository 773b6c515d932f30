"""One look at the memory."""

from __future__ import annotations

import json

import psutil
import pytest
import torch

import openmed_nb as nb
from openmed_nb import MemorySample
from openmed_nb.display import counted, in_bytes
from openmed_nb.training.curve import parse_pressure, take_sample

MIB = 1 << 20


@pytest.mark.real_computer  # It is about the CPU.
def test_a_look_on_the_cpu():
    """On the CPU the sample has the tensors, the process and the computer; what torch does not count is left out."""
    before = take_sample("cpu", 1, 10, 2.5)
    kept = torch.zeros(MIB)
    after = take_sample("cpu", 1, 10, 2.5, boundary=False)

    assert after.allocated - before.allocated == kept.nbytes
    assert (after.reserved, after.peak, after.simulated) == (None, None, False)
    assert after.recommended == psutil.virtual_memory().total
    assert 0 < after.resident < after.recommended
    assert (after.epoch, after.step, after.seconds, after.boundary) == (1, 10, 2.5, False)
    assert json.loads(json.dumps(after.to_dict()))["allocated"] == after.allocated


@pytest.mark.real_computer  # It begins its own simulation.
def test_a_look_at_simulated_mps():
    """On the simulated MPS the figures are those of the device, marked as simulated, and the peak begins again."""
    with nb.simulated_mps("8 GiB") as mps:
        kept = torch.zeros(MIB, device="mps")
        gone = torch.zeros(4 * MIB, device="mps")
        del gone
        first, second = (take_sample("mps", 1, 10, 2.5) for _ in range(2))
        assert kept.is_mps

    assert first.simulated
    assert first.allocated == second.allocated >= kept.nbytes
    assert first.reserved >= first.allocated
    assert first.recommended == mps.allocator.memory.recommended
    assert (first.peak >= 20 * MIB, second.peak) == (True, second.allocated)


def test_a_sample_shows_what_it_has():
    """A sample is a table of the figures that there are."""
    sample = MemorySample(3, 30, 1.25, allocated=5 * MIB, resident=512, pressure="warning")

    assert str(sample).splitlines() == [
        "Memory after epoch 3",
        "  Step 30, 1.2 s.",
        "  Memory pressure: warning.",
        "  memory     size",
        "  allocated  5.0 MiB",
        "  resident   512 bytes",
    ]
    assert "in training, epochs done: 3" in str(MemorySample(3, 30, 1.25, boundary=False))


@pytest.mark.parametrize(
    ("output", "pressure"),
    [("1\n", "normal"), (" 2", "warning"), ("4\n", "critical"), ("3\n", None), ("", None), (None, None), ("1 2", None)],
)
def test_pressure(output, pressure):
    """The levels of macOS have names; anything else says nothing."""
    assert parse_pressure(output) == pressure


@pytest.mark.parametrize(
    ("size", "text"),
    [
        *((0, "0 bytes"), (1023, "1023 bytes"), (1024, "1.0 KiB"), (-1536, "-1.5 KiB"), (None, "")),
        *((1 << 40, "1.0 TiB"), (1 << 60, "1048576.0 TiB"), ((1 << 30) - 1, "1024.0 MiB")),
    ],
)
def test_sizes(size, text):
    """Sizes are told in the units that torch uses."""
    assert in_bytes(size) == text


def test_counts():
    """One thing is one, several have a plural and separators."""
    assert [counted(number, "tensor") for number in (0, 1, 1000)] == ["0 tensors", "1 tensor", "1,000 tensors"]
