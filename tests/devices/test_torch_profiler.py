"""torch's profiler as it is used here: what an allocator gave and took back, in order, and one profiler at a time."""

from __future__ import annotations

import pytest
import torch

from openmed_nb.devices.profilers import check_no_profiler, memory_changes, profiler_is_on, profiling
from openmed_nb.errors import ConfigurationError


def test_memory_is_seen_in_order():
    """Every tensor is seen when it comes and when it goes, in bytes."""
    with profiling("cpu", profile_memory=True) as profiler:
        first = torch.ones(10, device="cpu")
        second = torch.ones(20, device="cpu")
        del first
        del second

    assert memory_changes(profiler) == [40, 80, -40, -80]


def test_a_second_profiler_is_refused():
    """While a profiler is on, another one is refused, and after it not any more."""
    with profiling("cpu"):
        assert profiler_is_on()
        with pytest.raises(ConfigurationError, match="Another profiler of torch is on"):
            check_no_profiler()

    assert not profiler_is_on()
