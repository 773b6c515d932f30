"""Batches for the tagger, planted errors, and the errors of calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from openmed_nb.errors import OpenMedError


def make_batch(rows: int = 4, length: int = 8, seed: int = 0, **other: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return a valid batch for the tagger, with other values for some fields."""
    numbers = torch.Generator().manual_seed(seed)
    tokens = torch.randint(5, 24, (rows, length), generator=numbers)
    labels = torch.randint(0, 3, (rows, length), generator=numbers)
    labels[:, 0] = -100
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels, **other}


def poison(model: Any, factor: float = float("inf")) -> Any:
    """Multiply the output of a layer of the tagger by a factor, and return the handle of the hook."""
    layer = model.bert.encoder.layer[0].output.dense
    return layer.register_forward_hook(lambda _layer, _args, output: output * factor, prepend=True)


def catch_error(call: Callable[[], Any]) -> Exception | None:
    """Call a function and return its ``OpenMedError`` without frames, which would keep workers alive."""
    try:
        call()
    except OpenMedError as error:
        return error.with_traceback(None)
    return None
