"""A model whose answers hang on a thousandth of a logit, so that rounding it moves them: real weights, no patching."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

NOTE = "the patient has asthma ."

MARGIN = 1e-3
"""By how much a disease wins against no disease; about a hundredth of what bfloat16 can tell apart there."""


def close_bert(tiny: ModuleType) -> Any:
    """Return a model that finds asthma in float32, by a thousandth of a logit, and not in bfloat16."""
    model = tiny.keyword_bert()
    ids = torch.tensor([[tiny.VOCABULARY[token] for token in ("[CLS]", *NOTE.split(), "[SEP]")]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, NOTE.split().index("asthma") + 1]
        model.classifier.bias[0] += logits[1] - logits[0] - MARGIN
    return model
