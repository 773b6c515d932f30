"""Models whose predictions depend on a thousandth of a logit, so that rounding changes them."""

from __future__ import annotations

from typing import Any

import torch

from helpers import tiny_models as tiny

NOTE = "the patient has asthma ."

MARGIN = 1e-3
"""Margin of a disease label over the label O, about a hundredth of the resolution of bfloat16 there."""


def close_border() -> Any:
    """Return a model that includes mellitus in diabetes mellitus by a thousandth of a logit, and not in bfloat16."""
    model = tiny.keyword_bert()
    with torch.no_grad():
        model.classifier.weight[1] *= 2
    return set_margin(model, "the patient has diabetes mellitus .", "mellitus", 2)


def set_margin(model: Any, note: str, word: str, label: int) -> Any:
    """Change the bias so that a label of a word exceeds the label O by ``MARGIN``, and return the model."""
    ids = torch.tensor([[tiny.VOCABULARY[token] for token in ("[CLS]", *note.split(), "[SEP]")]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, note.split().index(word) + 1]
        model.classifier.bias[0] += logits[label] - logits[0] - MARGIN
    return model
