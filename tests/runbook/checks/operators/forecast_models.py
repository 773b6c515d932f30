"""Tiny models with random weights of the architectures that are forecast, each with what it is called with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForImageClassification, AutoModelForTokenClassification

VOCABULARY, LENGTH, LABELS = 60, 16, 5

SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
    "num_labels": LABELS,
}

TOKEN_CLASSIFIERS: Mapping[str, Mapping[str, Any]] = {
    "bert": SMALL,
    "distilbert": {
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 40,
        "num_labels": LABELS,
        "dim": 32,
        "n_layers": 2,
        "n_heads": 2,
        "hidden_dim": 48,
    },
    "electra": {**SMALL, "embedding_size": 16},
    "roberta": SMALL,
    "xlm-roberta": SMALL,
    "deberta-v2": {
        **SMALL,
        "relative_attention": True,
        "pos_att_type": ["p2c", "c2p"],
        "position_buckets": 8,
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
        "position_biased_input": False,
    },
    "modernbert": {
        **SMALL,
        "local_attention": 8,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "cls_token_id": 1,
        "sep_token_id": 2,
    },
    "longformer": {**SMALL, "attention_window": [4, 4]},
}
"""The settings of each model for token classification, by the name that transformers gives its type."""


def tokens() -> dict[str, torch.Tensor]:
    """Return a batch of two texts, of which one is shorter, with labels."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, LENGTH // 2 :] = 0
    ids = torch.randint(3, VOCABULARY, (2, LENGTH), generator=generator)
    labels = torch.randint(0, LABELS, (2, LENGTH), generator=generator)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


class Pictures(nn.Module):
    """A small convolutional network that ends in global average pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(8, LABELS)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return the scores of the labels."""
        return self.head(self.pool(self.features(pixels)).flatten(1))


class Tagger(nn.Module):
    """A tagger of two LSTMs, one in each direction."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 16)
        self.both_ways = nn.LSTM(16, 16, num_layers=2, bidirectional=True, batch_first=True, dropout=0.1)
        self.head = nn.Linear(32, LABELS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the scores of the labels of each token."""
        return self.head(self.both_ways(self.words(ids))[0])


def token_classifier(name: str) -> tuple[nn.Module, Any]:
    """Return a model of transformers for token classification, and a batch."""
    config = CONFIG_MAPPING[name](**TOKEN_CLASSIFIERS[name])
    return AutoModelForTokenClassification.from_config(config), tokens()


def vision_transformer() -> tuple[nn.Module, Any]:
    """Return a ViT, and a batch of two pictures with labels."""
    sizes = {name: SMALL[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_labels")}
    config = CONFIG_MAPPING["vit"](**sizes, intermediate_size=48, image_size=16, patch_size=8)
    inputs = {"pixel_values": torch.zeros(2, 3, 16, 16), "labels": torch.tensor([0, 1])}
    return AutoModelForImageClassification.from_config(config), inputs


MODELS: Mapping[str, Callable[[], tuple[nn.Module, Any]]] = {
    **{name: lambda name=name: token_classifier(name) for name in TOKEN_CLASSIFIERS},
    "vit": vision_transformer,
    "cnn": lambda: (Pictures(), torch.zeros(2, 3, 16, 16)),
    "bi-lstm": lambda: (Tagger(), tokens()["input_ids"]),
}
"""Each model by its name, with example inputs."""
