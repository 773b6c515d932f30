"""What a model called: values that a trace makes, and a forecast judges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .places import Place
from .refusals import Refusal

INFERENCE, FORWARD, BACKWARD, OPTIMIZER = "inference", "forward", "backward", "optimizer"

PHASES = (INFERENCE, FORWARD, BACKWARD, OPTIMIZER)
"""What a model does, in the order of the report: a pass without gradients, and the three parts of a training step."""


@dataclass(frozen=True)
class Call:
    """An operator that is called.

    Attributes:
        operator: Its name with its overload, such as ``"aten::addmm"``.
        phase: ``"inference"``, ``"forward"``, ``"backward"`` or ``"optimizer"``.
        place: The module that was running.
    """

    operator: str
    phase: str
    place: Place


@dataclass(frozen=True)
class Trace:
    """What a model called.

    Attributes:
        calls: How often each operator was called.
        refusals: How often each call was one that MPS refuses, and why.
        notes: What could not be traced, as sentences.
    """

    calls: Mapping[Call, int]
    refusals: Mapping[tuple[Refusal, Call], int]
    notes: tuple[str, ...] = ()
