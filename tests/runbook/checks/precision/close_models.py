"""Models whose answers hang on a thousandth of a logit, so that rounding changes them: real weights, no patching."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

NOTE = "the patient has asthma ."
BORDER = "the patient has diabetes mellitus ."

MARGIN = 1e-3
"""By how much a disease wins against no disease; about a hundredth of what bfloat16 can tell apart there."""


def close_bert(tiny: ModuleType) -> Any:
    """Return a model that finds asthma in float32, by a thousandth of a logit, and not in bfloat16."""
    return with_margin(tiny, tiny.keyword_bert(), NOTE, "asthma", 1)


def close_border(tiny: ModuleType) -> Any:
    """Return a model that is sure of diabetes, and by a thousandth of a logit reads mellitus as its end; in bfloat16 not."""
    model = tiny.keyword_bert()
    with torch.no_grad():
        model.classifier.weight[1] *= 2
    return with_margin(tiny, model, BORDER, "mellitus", 2)


def close_tail(tiny: ModuleType) -> Any:
    """Return a model that is sure of the first piece of hypertension, and of the second by a thousandth of a logit."""
    model = tiny.keyword_bert()
    with torch.no_grad():
        model.classifier.weight[1] *= 2
    return with_margin(tiny, model, "the patient has hyper ##tension .", "##tension", 2)


def with_margin(tiny: ModuleType, model: Any, note: str, word: str, label: int) -> Any:
    """Return a model after its bias was changed so that a label of a word wins against no disease by the margin."""
    ids = torch.tensor([[tiny.VOCABULARY[token] for token in ("[CLS]", *note.split(), "[SEP]")]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, note.split().index(word) + 1]
        model.classifier.bias[0] += logits[label] - logits[0] - MARGIN
    return model
