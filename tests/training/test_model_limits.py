"""What a model takes is learnt from its layers and its configuration, and only where they say it."""

import pytest
import torch
from transformers import (
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

from openmed_nb.training.batch_checks import ModelLimits, inner_model, limits_of

SMALL = {"vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}


def bert(kind, **settings):
    """Return a tiny BERT with a head."""
    return kind(BertConfig(**SMALL, **{"max_position_embeddings": 20, **settings}))


def test_families(tagger, tiny):
    """A BERT tells its labels, tokens, types and positions, and other families what they have of these.

    A RoBERTa counts positions from behind its padding token, and one token of a row less fits for each.
    """
    tokens, filter_ = len(tiny.VOCABULARY), tiny.random_privacy_filter()
    size = {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 8, "max_position_embeddings": 12}
    distilled = DistilBertForTokenClassification(DistilBertConfig(vocab_size=30, **size))
    picture = ViTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, num_labels=10)
    roberta = limits_of(tiny.random_roberta())

    assert limits_of(tagger) == ModelLimits(3, tokens, 2, tiny.POSITIONS)
    assert (roberta.labels, roberta.first_position, roberta.padding) == (3, 1, 0)
    assert roberta.positions == tiny.POSITIONS
    assert limits_of(filter_) == ModelLimits(filter_.config.num_labels, tokens)
    assert limits_of(distilled) == ModelLimits(2, 30, None, 12)
    assert limits_of(ViTForImageClassification(picture)) == ModelLimits(10)
    tagger.resize_token_embeddings(40, mean_resizing=False)
    assert limits_of(tagger).tokens == 40


@pytest.mark.parametrize(
    ("kind", "settings", "labels"),
    [
        (BertForSequenceClassification, {"num_labels": 4}, 4),
        (BertForSequenceClassification, {"num_labels": 1}, None),
        (BertForMaskedLM, {}, 30),
        (BertForMultipleChoice, {}, None),
        (BertForQuestionAnswering, {}, None),
    ],
    ids=["classes", "a number", "tokens", "choices", "places"],
)
def test_labels_of_a_head(kind, settings, labels):
    """Labels are classes or tokens; a model whose labels are numbers, choices or places has no limit for them."""
    assert limits_of(bert(kind, **settings)).labels == labels


def test_head_that_was_replaced(tagger):
    """Where the last layer and the configuration tell different numbers of labels, neither is believed."""
    tagger.classifier = torch.nn.Linear(tagger.config.hidden_size, 5)
    assert limits_of(tagger).labels is None
    assert limits_of(tagger, labels=5).labels == 5


class Around(torch.nn.Module):
    """A module around others."""

    def __init__(self, **inner):
        super().__init__()
        for name, module in inner.items():
            setattr(self, name, module)


def test_model_inside_of_another(tagger, tiny):
    """Of a module around one model of transformers, compiled or not, the model is asked; around two, none is."""
    for inside in (tagger, torch.compile(tagger), torch.nn.DataParallel(tagger)):
        around = Around(loss=torch.nn.CrossEntropyLoss(), model=inside)
        assert limits_of(around) == limits_of(inside) == limits_of(tagger)
    assert inner_model(Around(deep=Around(model=tagger))) == ("deep.model",)
    assert inner_model(tagger) == inner_model(torch.compile(tagger)) == inner_model(torch.nn.DataParallel(tagger)) == ()
    two = Around(teacher=tagger, student=tiny.random_bert())
    assert inner_model(two) == ()
    assert limits_of(two).labels is None


def test_plain_module():
    """A plain module tells nothing; what it takes is told."""
    assert limits_of(torch.nn.Linear(2, 3)) == ModelLimits()
    assert limits_of(torch.nn.Linear(2, 3), labels=3, ignore_index=-1) == ModelLimits(labels=3, ignore_index=-1)


def test_told_limits_come_first(tagger):
    """What the caller tells replaces what is learnt, and what is not told is learnt."""
    assert limits_of(tagger, labels=9, tokens=None).labels == 9
    assert limits_of(tagger, labels=9, tokens=None).tokens == limits_of(tagger).tokens
