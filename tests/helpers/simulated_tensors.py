"""Tensors on the simulated MPS device."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence


def ones(*shape: int, **options: Any) -> torch.Tensor:
    """Return a tensor on the device."""
    return torch.ones(*shape, device="mps", **options)


def packed() -> PackedSequence:
    """Return two sequences of different lengths on the device; the lengths are on the CPU."""
    return pack_padded_sequence(ones(2, 3, 1), torch.tensor([3, 2]), batch_first=True)
