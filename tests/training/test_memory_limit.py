"""Memory limits of a device: valid fractions, bytes, and effect on the watermarks."""

from functools import partial

import pytest
import torch

import openmed_nb as nb
from openmed_nb.errors import ConfigurationError
from openmed_nb.training.release import MemoryLimit, validate_fraction

GIB = 1 << 30

ACCEPTED = [("mps", 0), ("mps", 0.9), ("mps", 1), ("mps", 2.0), ("cuda", 0.5), ("cuda:1", 1.0)]
REJECTED = [
    *(("mps", -0.1), ("mps", 2.1), ("mps", float("nan")), ("mps", float("inf")), ("mps", True), ("mps", "0.9")),
    *(("mps", None), ("cuda", 0), ("cuda:1", 1.1), ("cuda", -1)),
    *(("cpu", 0.9), ("cpu", 0), ("xpu", 0.5)),
]


def test_validate_fraction(catch_error):
    for device, fraction in ACCEPTED:
        assert validate_fraction(device, fraction) == fraction, device
    for device, fraction in REJECTED:
        error = catch_error(partial(validate_fraction, device, fraction))
        remedy = "Choose batches" if device in {"cpu", "xpu"} else "Pass a number"
        assert isinstance(error, ConfigurationError), (device, fraction)
        assert error.remedy.startswith(remedy), (device, fraction)


LIMITS = {
    "below the low watermark": (
        MemoryLimit("mps", 0.9, 10 * GIB, 1.4),
        "Memory limit on mps: 9.0 GiB",
        "The high watermark is now 0.9, below the low watermark (1.4), so unused blocks are collected only at the limit.",
    ),
    "no low watermark": (
        MemoryLimit("mps", 1.0, 10 * GIB, 0.0),
        "Memory limit on mps: 10.0 GiB",
        "The high watermark is now 1; the low watermark is 0, so unused blocks are collected only when memory is short.",
    ),
    "CUDA": (MemoryLimit("cuda:1", 0.5, 16 * GIB), "Memory limit on cuda:1: 8.0 GiB", "0.5 of 16.0 GiB."),
}


@pytest.mark.parametrize(("limit", "title", "sentence"), LIMITS.values(), ids=LIMITS)
def test_limit_reports_bytes_and_watermarks(limit, title, sentence):
    assert str(limit).splitlines()[0] == title
    assert sentence in str(limit)
    assert "watermark" not in str(LIMITS["CUDA"][0])
    assert "SIMULATED" not in str(limit)


@pytest.mark.real_computer  # It starts its own simulation.
def test_limit_memory_on_simulated_mps():
    """An invalid limit keeps the previous one."""
    with nb.simulated_mps("8 GiB") as mps:
        limit = nb.training.limit_memory(0.5, "mps")
        allowed = mps.allocator.limit
        with pytest.raises(ConfigurationError):
            nb.training.limit_memory(3, "mps")
        assert mps.allocator.limit == allowed == limit.size
        with pytest.raises(RuntimeError, match="MPS backend out of memory"):
            torch.zeros(limit.size // 4 + 1024, device="mps")

    assert (limit.device, limit.simulated) == ("mps", True)
    assert "SIMULATED" in str(limit)
    assert "SIMULATED" in limit._repr_html_()
