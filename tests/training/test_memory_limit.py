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


def test_limit_reports_bytes():
    lines = ["Memory limit on mps: 9.0 GiB", "  It is 0.9 of 10.0 GiB."]
    no_limit = ["Memory limit on mps: none: macOS may swap and then stop the process", "  mps recommends 10.0 GiB."]
    assert str(MemoryLimit("mps", 0.9, 10 * GIB)).splitlines() == lines
    assert str(MemoryLimit("mps", 0.0, 10 * GIB)).splitlines() == no_limit


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
