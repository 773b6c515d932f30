"""Fixtures of the tests of the simulation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from openmed_nb.simulation.device import simulated_device


@pytest.fixture
def mps() -> Iterator[Any]:
    """Simulated MPS device for this thread and test."""
    with simulated_device(fallback=False, environ={}) as device:
        yield device
