"""Dropout that does something else than it seems is told in words, from the layers and the device."""

from __future__ import annotations

import pytest
import torch

from openmed_nb.training.guards import active_dropout, attention_dropout, lstm_advice, without_gradients, wrong_lstm


def lstm(layers: int = 2, dropout: float = 0.2, **settings):
    """Return a tagger with an LSTM inside."""
    return torch.nn.ModuleDict({"encoder": torch.nn.LSTM(4, 4, num_layers=layers, dropout=dropout, **settings)})


@pytest.mark.parametrize(
    ("model", "device", "release", "found"),
    [
        (lstm(), "mps", (2, 13, 0), "encoder"),
        (lstm(), "mps:0", (2, 6, 0), "encoder"),
        (lstm(3, bidirectional=True), "mps", (2, 13, 0), "encoder"),
        (torch.nn.LSTM(4, 4, num_layers=2, dropout=0.2), "mps", (2, 13, 0), "the model"),
        (lstm(), "mps", (2, 14, 0), None),
        (lstm(), "cpu", (2, 13, 0), None),
        (lstm(), "cuda", (2, 13, 0), None),
        (lstm(1, 0.0), "mps", (2, 13, 0), None),
        (lstm(2, 0.0), "mps", (2, 13, 0), None),
        (torch.nn.GRU(4, 4, num_layers=2, dropout=0.2), "mps", (2, 13, 0), None),
    ],
)
def test_wrong_lstm(model, device, release, found):
    """An LSTM of several layers with dropout is found on MPS before torch 2.14, and only there."""
    assert wrong_lstm(model, device, release) == found


def test_lstm_advice():
    """The words name the layer, the issue and a way out."""
    assert "encoder" in lstm_advice("encoder")
    assert "pytorch#190056" in lstm_advice("encoder")
    assert "torch 2.14" in lstm_advice("encoder")


@pytest.mark.parametrize(
    ("device", "attention", "share", "raises"),
    [
        ("mps", "sdpa", 0.1, True),
        ("mps:0", "sdpa", 0.1, True),
        ("mps", "sdpa", 0.0, False),
        ("mps", "eager", 0.1, False),
        ("mps", None, 0.0, False),
        ("cpu", "sdpa", 0.1, False),
        ("cuda:1", "sdpa", 0.1, False),
    ],
)
def test_advice_without_gradients(device, attention, share, raises):
    """On MPS with torch's attention the words say that it raises, elsewhere that results are random."""
    said = without_gradients(device, attention, share)
    assert ("scaled_dot_product_attention for MPS does not support dropout" in said) is raises
    assert "results are random" in said
    assert "model.eval()" in said


def test_active_dropout(tagger):
    """A model in train mode leaves numbers out, in evaluation mode it does not, nor where all shares are 0."""
    assert active_dropout(tagger)
    assert not active_dropout(tagger.eval())
    assert not active_dropout(torch.nn.Sequential(torch.nn.Dropout(0.0), torch.nn.Linear(2, 2)))
    assert active_dropout(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout2d(0.1)))


def test_dropout_in_attention_only(tagger):
    """Dropout that is in no layer, as in torch's attention, counts by the configuration."""
    for layer in tagger.modules():
        if isinstance(layer, torch.nn.Dropout):
            layer.p = 0.0
    assert active_dropout(tagger)
    tagger.config.attention_probs_dropout_prob = 0.0
    assert attention_dropout(tagger) == 0
    assert not active_dropout(tagger)
