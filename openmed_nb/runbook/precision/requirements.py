"""What is asked of a reduced type, when it is measured and again whenever its certificate is read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ...quantities import counted
from .certificates import Evidence
from .judgement import FLOAT32_INSTEAD, OTHER_NUMBERS, RECALL_LOSS, ROUNDING, SPAN_AGREEMENT


@dataclass(frozen=True)
class Gate:
    """What is asked of a reduced type.

    Attributes:
        span_agreement: The share of the entities that either way found which must be the same.
        recall_loss: How much of the reference's recall may be lost, where gold entities are given.
        minimum_entities: With fewer in the reference, nothing can be told.
        minimum_distinct: With fewer entities that differ in their words or labels, nothing can be told.
        minimum_texts: With fewer texts that differ in their words, nothing can be told.
    """

    span_agreement: float = SPAN_AGREEMENT
    recall_loss: float = RECALL_LOSS
    minimum_entities: int = 50
    minimum_distinct: int = 10
    minimum_texts: int = 20


@dataclass(frozen=True)
class Refusal:
    """Why a type is refused, and one thing to do.

    Attributes:
        reason: What was seen.
        remedy: What to do.
        against: Whether that speaks against the type; too few texts do not.
    """

    reason: str
    remedy: str
    against: bool = True


def refusals(evidence: Evidence, dtype: str, gate: Gate) -> Iterator[Refusal]:
    """Yield why a type is refused.

    Args:
        evidence: What was measured, now or when a certificate was made.
        dtype: The type.
        gate: What is asked for.

    Example:
        >>> evidence = Evidence(20, "f", 900, 0, 40, 8, 0, 0, 0, 12, None, None, 1.4)
        >>> [one.reason for one in refusals(evidence, "bfloat16", Gate())]
        ['Only 40 of 48 entities are the same.', 'Too little to tell: 48 of the 50 entities that are needed.']
    """
    spans = evidence.spans
    if evidence.not_numbers:
        what = f"{counted(evidence.not_numbers, 'token')} became NaN or infinity."
        yield Refusal(what, OTHER_NUMBERS.get(dtype, FLOAT32_INSTEAD))
    if spans.agreement < gate.span_agreement:
        what = f"Only {spans.exact:,} of {counted(spans.all, 'entity', 'entities')} are the same."
        yield Refusal(what, FLOAT32_INSTEAD)
    if evidence.recall_loss > gate.recall_loss + ROUNDING:
        recalls = f"{evidence.recall:.1%} of the gold entities, float32 {evidence.recall_reference:.1%}"
        yield Refusal(f"It finds {recalls}.", FLOAT32_INSTEAD)
    seen = {
        "entities": (spans.reference, gate.minimum_entities),
        "different entities": (evidence.distinct, gate.minimum_distinct),
        "different texts": (evidence.texts, gate.minimum_texts),
    }
    few = [f"{count:,} of the {least} {what}" for what, (count, least) in seen.items() if count < least]
    if few:
        what = f"Too little to tell: {', '.join(few)} that are needed."
        yield Refusal(what, "Repeat it with more texts, each different.", against=False)
