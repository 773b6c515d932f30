"""Tolerances and acceptance criteria of a device and a dtype, relative to the CPU in float32.

A dtype that meets the criteria gets a validation record. Loading a model does not check the criteria again. If a release
requires more, the version in the schema of :class:`~openmed_nb.models.records.ValidationRecord` increases and older records are
ignored.
"""

from __future__ import annotations

from dataclasses import dataclass

# Minimum fraction of identical entities.
MIN_SPAN_AGREEMENT = 0.99
# Maximum loss of recall of gold entities, relative to the reference.
MAX_RECALL_LOSS = 0.01
# Rounding error of a difference of two recalls.
ROUNDING = 1e-9


@dataclass(frozen=True)
class Tolerance:
    """Maximum difference of a dtype from float32 on the CPU that the report accepts.

    Attributes:
        logits: Maximum absolute difference of a logit, or ``None`` if logits are not comparable.
        gradients: Maximum relative difference of a parameter gradient, or ``None`` if there are no gradients.
    """

    logits: float | None
    gradients: float | None


# Tolerance of each dtype: a multiple of the largest difference measured with the two bundled models in 5,524 texts of 203,905
# tokens, whose logits reach 11.
#
# - NVIDIA H200 (torch 2.11): logits differ by 2.0e-05 in float32, 0.012 in float16 and 0.16 in bfloat16, gradients by 9.2e-06,
#   0.0067 and 0.031. At least 0.9998 of the entities were identical in float16 and 0.9974 in bfloat16.
# - CPU: logits differ by 0.017 in float16 and 0.13 in bfloat16, about three times the rounding error of one such value (2**-11
#   and 2**-8 of it), gradients by 0.024 and 0.17.
# - int8 scales the inputs of a layer by their maximum, and a few tokens differed by up to 3.0. Its logits are not comparable, so
#   the entities decide.
#
# ``benchmarks/parity.py`` prints these measurements.
TOLERANCES = {
    "float32": Tolerance(1e-4, 1e-3),
    "float16": Tolerance(5e-2, 1e-1),
    "bfloat16": Tolerance(5e-1, 5e-1),
    "int8": Tolerance(None, None),
}

USE_FLOAT32_REMEDY = "Use float32."
RELOAD_REMEDY = "Reload the model."
CHECK_ENTITIES_REMEDY = "Check the entities: they decide."
# Remedies for NaN and infinity in a dtype with a small range.
OVERFLOW_REMEDIES = {"float16": "Use float32, or bfloat16 if the device supports it, which has the same range."}


@dataclass(frozen=True)
class AcceptanceCriteria:
    """Acceptance criteria of a reduced dtype. The result is inconclusive if a minimum is not reached.

    Attributes:
        span_agreement: Minimum fraction of identical entities among those that either model predicts.
        recall_loss: Maximum loss of recall relative to the reference, if gold entities are given.
        minimum_entities: Minimum number of entities in the reference.
        minimum_texts: Minimum number of texts with different words. A few made-up sentences are not a sample of notes.
    """

    span_agreement: float = MIN_SPAN_AGREEMENT
    recall_loss: float = MAX_RECALL_LOSS
    minimum_entities: int = 50
    minimum_texts: int = 50


@dataclass(frozen=True)
class RejectionReason:
    """Reason why a reduced dtype is rejected.

    Attributes:
        reason: Problem as a sentence.
        remedy: Suggested action.
        conclusive: Whether the reason is evidence against the dtype. Too few texts are not.
    """

    reason: str
    remedy: str
    conclusive: bool = True
