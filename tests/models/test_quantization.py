"""Tests of int8: quantized linear layers on the CPU only."""

import copy
import warnings

import pytest
import torch

from helpers import tiny_models as tiny
from helpers.annotations import NOTE, words_of
from openmed_nb.annotation.pipeline import build_pipeline
from openmed_nb.annotation.resume import model_fingerprint
from openmed_nb.errors import ConfigurationError
from openmed_nb.models.config import OpenMedConfig
from openmed_nb.models.loading import (
    LoadSpec,
    dtype_of,
    is_quantized,
    load_from_spec,
    move_model,
    packed_layers,
    quantize,
)
from openmed_nb.models.store import describe_model

pytestmark = pytest.mark.real_computer

WORDS = ["diabetes mellitus", "hypertension", "asthma"]


@pytest.fixture
def spec(keyword_model):
    """The keyword model in int8."""
    return LoadSpec.from_name(str(keyword_model), OpenMedConfig(dtype="int8"))


@pytest.fixture
def loaded(spec):
    """The keyword model in int8 on the CPU."""
    return load_from_spec(spec, "cpu")


def test_int8_model_predicts_entities(loaded):

    assert torch.nn.Linear not in [type(module) for module in loaded.model.modules()]
    assert is_quantized(loaded.model)
    assert len(packed_layers(loaded.model)) == 7
    assert words_of(build_pipeline(loaded, "first", {}), NOTE) == WORDS


@pytest.mark.parametrize(
    ("category", "message"),
    [
        (DeprecationWarning, "torch.ao.quantization is something else"),
        (UserWarning, "int8 is slow"),
    ],
)
def test_quantization_passes_other_warnings(spec, category, message, monkeypatch):
    """Warnings are errors in the other tests, so torch's own warning of the removal is ignored."""

    def quantize_dynamic(model, *_arguments, **_options):
        warnings.warn(message, category, stacklevel=1)
        return model

    monkeypatch.setattr(torch.ao.quantization, "quantize_dynamic", quantize_dynamic)
    with pytest.warns(category, match=message):
        load_from_spec(spec, "cpu")


def test_inventory_lists_int8_model_with_size(loaded):
    plain = load_from_spec(LoadSpec.from_name(loaded.name, OpenMedConfig()), "cpu")
    listed, full = describe_model(loaded, follows_session=False), describe_model(plain, follows_session=True)
    linear = [module for module in plain.model.modules() if isinstance(module, torch.nn.Linear)]
    packed = sum(layer.weight.numel() + 4 * layer.bias.numel() for layer in linear)
    unpacked = sum(4 * (layer.weight.numel() + layer.bias.numel()) for layer in linear)

    assert (listed.dtype, dtype_of(plain.model)) == ("int8", "float32")
    assert listed.size == full.size - unpacked + packed


def test_fingerprint_includes_packed_weights(loaded):
    plain = build_pipeline(load_from_spec(LoadSpec.from_name(loaded.name, OpenMedConfig()), "cpu"), "first", {})
    pipe = build_pipeline(loaded, "first", {})
    other = tiny.keyword_bert()
    with torch.no_grad():
        other.classifier.weight *= 2
    changed = copy.copy(pipe)
    changed.model = quantize(other)

    prints = [model_fingerprint(model) for model in (plain, pipe, changed)]
    assert len({*prints}) == 3
    assert model_fingerprint(pipe) == prints[1]


@pytest.mark.parametrize("device", ["mps", "cuda:1"])
def test_int8_model_cannot_leave_cpu(spec, loaded, device):
    """It still works after a failed load, move or pipeline call for another device."""
    pipe = build_pipeline(loaded, "first", {})
    with pytest.raises(ConfigurationError, match=f"int8 is supported on the CPU only, not on {device}"):
        load_from_spec(spec, device)
    with pytest.raises(ConfigurationError, match="int8 is supported on the CPU only"):
        move_model(loaded.model, device, loaded.name)
    with pytest.raises(ConfigurationError, match="int8 is supported on the CPU only"):
        pipe.device = device
    assert words_of(pipe, NOTE) == WORDS


def test_quantize_requires_torch_support(spec, monkeypatch):
    monkeypatch.delattr(torch.ao.quantization, "quantize_dynamic")
    with pytest.raises(ConfigurationError, match=r"torch 2\..* cannot quantize.*dtype='bfloat16'"):
        load_from_spec(spec, "cpu")
