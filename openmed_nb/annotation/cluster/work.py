"""What a worker is told: which model, and how to use it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, repr=False)
class Work:
    """A run over many texts on workers; it is not shown, because its arguments can hold a token of the hub.

    Attributes:
        run: What tells it from other runs; the rest follows from it.
        model: The name of the model.
        arguments: Those of ``create_pipeline``.
        batch_tokens: How many tokens run at once; ``None`` takes what suits the device of each worker.
        terms: What workers must have, where that is known; one that comes later is held to it.
    """

    run: str
    model: str = field(compare=False)
    arguments: Mapping[str, Any] = field(compare=False)
    batch_tokens: int | None = field(default=None, compare=False)
    terms: Mapping[str, Any] | None = field(default=None, compare=False)
