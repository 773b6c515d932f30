"""Limits of a model are inferred from its layers and configuration, only if they define them."""

import pytest
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    BertConfig,
    BertForMaskedLM,
    BertForMultipleChoice,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    ViTConfig,
    ViTForImageClassification,
)

import openmed_nb as nb
from helpers import model_families
from helpers import tiny_models as tiny
from openmed_nb.errors import InvalidBatchError
from openmed_nb.training.guards import ModelLimits, find_inner_model, infer_limits

# These models have no table of positions; they use relative distances only.
WITHOUT_A_TABLE = {"modernbert", "mpt"}
SMALL = {"vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}


def test_infer_limits_of_model_families(tagger):
    """RoBERTa counts positions after its padding token."""
    tokens = len(tiny.VOCABULARY)
    filter_ = tiny.random_privacy_filter()
    picture = ViTConfig(**SMALL, num_labels=10)

    assert infer_limits(tagger) == ModelLimits(3, tokens, 2, tiny.POSITIONS)
    assert infer_limits(tiny.random_roberta()) == ModelLimits(3, tokens, 2, tiny.POSITIONS - 1, 0)
    assert infer_limits(filter_) == ModelLimits(filter_.config.num_labels, tokens)
    assert infer_limits(ViTForImageClassification(picture)) == ModelLimits(10)
    assert infer_limits(nn.Linear(2, 3)) == ModelLimits()
    tagger.resize_token_embeddings(40, mean_resizing=False)
    tagger.classifier = nn.Linear(tagger.config.hidden_size, 5)
    assert (infer_limits(tagger).vocab_size, infer_limits(tagger).num_labels) == (40, None)


@pytest.mark.parametrize(
    ("kind", "settings", "labels"),
    [
        (BertForSequenceClassification, {"num_labels": 4}, 4),
        (BertForSequenceClassification, {"num_labels": 1}, None),
        (BertForMaskedLM, {}, 30),
        (BertForMultipleChoice, {}, None),
        (BertForQuestionAnswering, {}, None),
    ],
    ids=["classes", "regression", "tokens", "choices", "positions"],
)
def test_infer_limits_of_heads(kind, settings, labels):
    assert infer_limits(kind(BertConfig(**SMALL, **settings))).num_labels == labels


class Around(nn.Module):
    """Module that wraps others."""

    def __init__(self, **inner):
        super().__init__()
        for name, module in inner.items():
            setattr(self, name, module)


def test_infer_limits_of_inner_model(tagger):
    for inside in (tagger, nn.DataParallel(tagger)):
        around = Around(loss=nn.CrossEntropyLoss(), model=inside)
        assert infer_limits(around) == infer_limits(inside) == infer_limits(tagger)
        assert find_inner_model(inside) == ()
    assert find_inner_model(Around(deep=Around(model=tagger))) == ("deep.model",)
    two = Around(teacher=tagger, student=tiny.random_bert())
    assert find_inner_model(two) == ()
    assert infer_limits(two).num_labels is None


SIZES = ("layers", 1), ("attention_heads", 2), ("ffn_dim", 8)
PAIR = {f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in SIZES}
PAIR |= {"vocab_size": 30, "d_model": 16, "pad_token_id": 1}
TOWERS = {"text_config": {**SMALL, "max_position_embeddings": 24}, "vision_config": {**SMALL, "image_size": 8}}
# Maximum number of tokens per row and settings, by family.
OTHER_FAMILIES = {
    "bart": (32, {**PAIR, "max_position_embeddings": 32}),
    "clip": (None, TOWERS),  # It also has a table for images, and does not expose its token embeddings.
    "opt": (32, {**SMALL, "ffn_dim": 8, "word_embed_proj_dim": 16, "max_position_embeddings": 32}),
}


# One family for each method of counting positions.
QUICK = ("bert", "roberta", "nystromformer", "roformer", "biogpt", "gpt2", "gpt_neo", "layoutlm", "luke")
SLOW = [pytest.param(family, marks=pytest.mark.slow) for family in model_families.ALL if family not in QUICK]


@pytest.mark.parametrize("family", [*QUICK, *SLOW])
def test_infer_limits_matches_pipeline_positions(family):
    expected = None if family in WITHOUT_A_TABLE else model_families.ALL[family][0]

    assert infer_limits(model_families.model_of(family, len(tiny.VOCABULARY), tiny.LABELS)).max_tokens == expected


@pytest.mark.parametrize("family", OTHER_FAMILIES)
def test_infer_limits_uses_position_table_of_tokens(family):
    expected, settings = OTHER_FAMILIES[family]

    assert infer_limits(AutoModel.from_config(AutoConfig.for_model(family, **settings))).max_tokens == expected


def test_check_does_not_count_padding_as_positions():
    """RoBERTa counts positions after its padding token."""
    with nb.Guards().watch(tiny.random_roberta()) as guards:
        guards.check({"input_ids": torch.tensor([[3] * 63 + [0] * 9])})
        with pytest.raises(InvalidBatchError, match=r"64 tokens, and the model has 63 positions\."):
            guards.check({"input_ids": torch.tensor([[3] * 64 + [0]])})
