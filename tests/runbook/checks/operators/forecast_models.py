"""Small models with random weights of several architectures, with example inputs."""

from __future__ import annotations

import runpy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForImageClassification, ViTConfig

VOCABULARY = 60
LENGTH = 16
LABELS = ("O", "B-A", "I-A", "B-B", "I-B")

model_of = runpy.run_path(str(Path(__file__).parents[3] / "helpers" / "model_families.py"))["model_of"]

TOKEN_CLASSIFIERS: Mapping[str, Mapping[str, Any]] = {
    "bert": {},
    "distilbert": {"n_layers": 2},
    "electra": {},
    "roberta": {},
    "xlm-roberta": {},
    "deberta-v2": {"norm_rel_ebd": "layer_norm", "share_att_key": True, "position_biased_input": False},
    "modernbert": {"local_attention": 8},
    "longformer": {"attention_window": [4, 4]},
}
"""Additional settings of the small models by family."""


def make_tokens() -> dict[str, torch.Tensor]:
    """Return a batch of two texts of different lengths, with labels."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, LENGTH // 2 :] = 0
    ids = torch.randint(3, VOCABULARY, (2, LENGTH), generator=generator)
    labels = torch.randint(0, len(LABELS), (2, LENGTH), generator=generator)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


class ImageClassifier(nn.Module):
    """A small convolutional network that ends in global average pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(8, len(LABELS))

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return the scores of the labels."""
        return self.head(self.pool(self.features(pixels)).flatten(1))


class Tagger(nn.Module):
    """A tagger with a bidirectional LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 16)
        self.lstm = nn.LSTM(16, 16, num_layers=2, bidirectional=True, batch_first=True, dropout=0.1)
        self.head = nn.Linear(32, len(LABELS))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the scores of the labels of each token."""
        return self.head(self.lstm(self.words(ids))[0])


def make_token_classifier(family: str) -> tuple[nn.Module, Any]:
    """Return a token classification model with two layers, and a batch."""
    settings = {"num_hidden_layers": 2, **TOKEN_CLASSIFIERS[family]}
    return model_of(family, VOCABULARY, LABELS, **settings), make_tokens()


def make_vision_transformer() -> tuple[nn.Module, Any]:
    """Return a ViT, and a batch of two images with labels."""
    config = ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, image_size=16, patch_size=8
    )
    inputs = {"pixel_values": torch.zeros(2, 3, 16, 16), "labels": torch.tensor([0, 1])}
    return AutoModelForImageClassification.from_config(config), inputs


MODELS: Mapping[str, Callable[[], tuple[nn.Module, Any]]] = {
    **{name: lambda name=name: make_token_classifier(name) for name in TOKEN_CLASSIFIERS},
    "vit": make_vision_transformer,
    "cnn": lambda: (ImageClassifier(), torch.zeros(2, 3, 16, 16)),
    "bi-lstm": lambda: (Tagger(), make_tokens()["input_ids"]),
}
"""Models by name, with example inputs."""
