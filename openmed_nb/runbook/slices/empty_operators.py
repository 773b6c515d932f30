"""Operators with nothing to compute, run beside the steps: what one of them takes is what it costs to start an operator."""

from __future__ import annotations

import itertools
from typing import Any

from ..workloads.workload import OWN_STEP, Phase, Workload

EMPTY = "empty operators"
"""The phase in which they run."""

CALLS = 20
"""How many of them follow a step, so that waiting for the device once, at their end, is a small part of their time."""


def empty_operators(device: str) -> Workload:
    """Return steps of some linear layers of one number: what models mostly consist of, and among what costs most to start."""
    import torch

    row, weight, bias = (torch.ones(size, dtype=torch.float32).to(device) for size in ((1, 1), (1, 1), (1,)))

    def start(_batch: Any) -> None:
        for _ in range(CALLS):
            torch.nn.functional.linear(row, weight, bias)

    return Workload(EMPTY, OWN_STEP, device, 1, None, lambda: itertools.repeat(None), (Phase(EMPTY, start),))
