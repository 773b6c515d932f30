"""What is required of a device and of a type, compared with the CPU in float32: tolerances, and the gate of a certificate.

A type that passes the gate gets a certificate. Loading does not ask this gate again: where it requires more from one release
on, the number in the format of :class:`~openmed_nb.models.records.Certificate` grows, and older certificates count no more.
"""

from __future__ import annotations

from dataclasses import dataclass

MIN_SPAN_AGREEMENT = 0.99  # The share of entities that must be the same.
MAX_RECALL_LOSS = 0.01  # How much of the reference's recall of gold entities may be lost.
ROUNDING = 1e-9


@dataclass(frozen=True)
class Tolerance:
    """How far a type may be from float32 on the CPU before the report says so.

    Attributes:
        logits: The largest absolute difference of a logit; ``None`` if logits tell nothing.
        gradients: The largest relative difference of the gradient of a parameter; ``None`` if there are none.
    """

    logits: float | None
    gradients: float | None


# For each type, some times the largest difference seen with the two bundled models in 5,524 texts of 203,905 tokens
# whose logits go up to 11. On an NVIDIA H200 (torch 2.11): logits 2.0e-05 in float32, 0.012 in float16 and 0.16 in
# bfloat16, gradients 9.2e-06, 0.0067 and 0.031; at least 0.9998 of the entities were the same in float16 and 0.9974 in
# bfloat16. On a CPU: logits 0.017 in float16 and 0.13 in bfloat16, which is about three times the rounding of one such
# number (2**-11 and 2**-8 of it), gradients 0.024 and 0.17. int8 rounds the inputs of a layer by their largest, and a
# few tokens were off by up to 3.0: its logits tell nothing, and the entities decide. ``benchmarks/parity.py`` prints
# the figures.
TOLERANCES = {
    "float32": Tolerance(1e-4, 1e-3),
    "float16": Tolerance(5e-2, 1e-1),
    "bfloat16": Tolerance(5e-1, 5e-1),
    "int8": Tolerance(None, None),
}

USE_FLOAT32_REMEDY = "Use float32."
LOAD_AGAIN = "Load the model again."
ENTITIES_DECIDE = "Look at the entities: they decide."
# What to do about NaN and infinity in a type whose range is short.
OVERFLOW_REMEDIES = {"float16": "Use bfloat16, which has the range of float32."}


@dataclass(frozen=True)
class AcceptanceCriteria:
    """What is required of a reduced type."""

    span_agreement: float = MIN_SPAN_AGREEMENT  # The share of the entities found either way that must be the same.
    recall_loss: float = (
        MAX_RECALL_LOSS  # How much of the reference's recall may be lost, where gold entities are given.
    )
    minimum_entities: int = 50  # With fewer in the reference there is no verdict.
    minimum_distinct: int = 10  # With fewer entities that differ in their words or labels there is no verdict.
    # With fewer texts that differ in their words there is no verdict: a list of made-up sentences is no sample of notes.
    minimum_texts: int = 50


@dataclass(frozen=True)
class RejectionReason:
    """Why a type is refused, and one thing to do."""

    reason: str  # What was seen.
    remedy: str  # What to do.
    conclusive: bool = True  # Whether that speaks against the type; too few texts do not.
