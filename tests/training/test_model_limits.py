"""Limits of a model are inferred from its layers and configuration, only if they define them."""

import runpy
from pathlib import Path

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
    DistilBertConfig,
    DistilBertForTokenClassification,
    ViTConfig,
    ViTForImageClassification,
)

import openmed_nb as nb
from openmed_nb.errors import InvalidBatchError
from openmed_nb.training.guards import ModelLimits, find_inner_model, infer_limits

FAMILIES = runpy.run_path(str(Path(__file__).parents[1] / "helpers" / "model_families.py"))
# These models have no table of positions; they use relative distances only.
WITHOUT_A_TABLE = {"modernbert", "mpt"}
SMALL = {"vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}


def make_bert(kind, **settings):
    """Return a tiny BERT with a head."""
    return kind(BertConfig(**SMALL, **{"max_position_embeddings": 20, **settings}))


def test_infer_limits_of_model_families(tagger, tiny):
    """RoBERTa counts positions after its padding token."""
    tokens = len(tiny.VOCABULARY)
    filter_ = tiny.random_privacy_filter()
    size = {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 8, "max_position_embeddings": 12}
    distilled = DistilBertForTokenClassification(DistilBertConfig(vocab_size=30, **size))
    picture = ViTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, num_labels=10)
    roberta = infer_limits(tiny.random_roberta())

    assert infer_limits(tagger) == ModelLimits(3, tokens, 2, tiny.POSITIONS, tiny.POSITIONS)
    assert roberta == ModelLimits(3, tokens, 2, tiny.POSITIONS, tiny.POSITIONS - 1, 0)
    assert infer_limits(filter_) == ModelLimits(filter_.config.num_labels, tokens)
    assert infer_limits(distilled) == ModelLimits(2, 30, None, 12, 12)
    assert infer_limits(ViTForImageClassification(picture)) == ModelLimits(10)
    tagger.resize_token_embeddings(40, mean_resizing=False)
    assert infer_limits(tagger).vocab_size == 40


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
    assert infer_limits(make_bert(kind, **settings)).num_labels == labels


def test_replaced_head_has_unknown_labels(tagger):
    tagger.classifier = nn.Linear(tagger.config.hidden_size, 5)
    assert infer_limits(tagger).num_labels is None


class Around(nn.Module):
    """Module that wraps others."""

    def __init__(self, **inner):
        super().__init__()
        for name, module in inner.items():
            setattr(self, name, module)


def test_infer_limits_of_inner_model(tagger, tiny):
    for inside in (tagger, torch.compile(tagger), nn.DataParallel(tagger)):
        around = Around(loss=nn.CrossEntropyLoss(), model=inside)
        assert infer_limits(around) == infer_limits(inside) == infer_limits(tagger)
        assert find_inner_model(inside) == ()
    assert find_inner_model(Around(deep=Around(model=tagger))) == ("deep.model",)
    two = Around(teacher=tagger, student=tiny.random_bert())
    assert find_inner_model(two) == ()
    assert infer_limits(two).num_labels is None


def test_plain_module_has_no_limits():
    assert infer_limits(nn.Linear(2, 3)) == ModelLimits()


SMALL_PAIR = {
    "vocab_size": 30,
    "d_model": 16,
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 1),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 8),
    "pad_token_id": 1,
}
# Maximum number of tokens per row and settings, by family.
OTHER_FAMILIES = {
    "bart": (32, {**SMALL_PAIR, "max_position_embeddings": 32}),
    "clip": (  # It also has a table for images, and does not expose its token embeddings.
        None,
        {
            "text_config": {**SMALL, "max_position_embeddings": 24},
            "vision_config": {**SMALL, "image_size": 8, "patch_size": 4},
        },
    ),
    "led": (
        64,
        {
            **SMALL_PAIR,
            "attention_window": [8],
            "max_encoder_position_embeddings": 64,
            "max_decoder_position_embeddings": 16,
        },
    ),
    "opt": (32, {**SMALL, "ffn_dim": 8, "word_embed_proj_dim": 16, "max_position_embeddings": 32}),
    "t5": (
        None,
        {"vocab_size": 30, "d_model": 16, "d_kv": 8, "d_ff": 8, "num_layers": 1, "num_heads": 2, "n_positions": 32},
    ),
}


# One family for each method of counting positions.
QUICK = ("bert", "roberta", "nystromformer", "roformer", "biogpt", "gpt2", "gpt_neo", "layoutlm", "luke")
SLOW = [pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES["ALL"] if family not in QUICK]


@pytest.mark.parametrize("family", [*QUICK, *SLOW])
def test_infer_limits_matches_pipeline_positions(family, tiny):
    expected = None if family in WITHOUT_A_TABLE else FAMILIES["ALL"][family][0]

    assert infer_limits(FAMILIES["model_of"](family, len(tiny.VOCABULARY), tiny.LABELS)).max_tokens == expected


@pytest.mark.parametrize("family", OTHER_FAMILIES)
def test_infer_limits_uses_position_table_of_tokens(family):
    expected, settings = OTHER_FAMILIES[family]

    model = AutoModel.from_config(AutoConfig.for_model(family, **settings))
    assert infer_limits(model).max_tokens == expected


@pytest.mark.parametrize("family", ["gpt2", "gpt_neo", "biogpt", "opt"])
def test_guards_reject_rows_longer_than_positions(family, tiny):
    if family == "opt":
        model = AutoModel.from_config(AutoConfig.for_model(family, **OTHER_FAMILIES[family][1]))
    else:
        sizes = {"n_positions": 32} if family == "gpt2" else {}
        model = FAMILIES["model_of"](family, 30, tiny.LABELS, **{"max_position_embeddings": 32, **sizes})
    with nb.Guards().watch(model) as guards:
        guards.check({"input_ids": torch.full((2, 32), 5)})
        with pytest.raises(InvalidBatchError, match="40 tokens, and the model has 32 positions"):
            guards.check({"input_ids": torch.full((2, 40), 5)})
