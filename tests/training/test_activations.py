"""Activation checkpointing keeps gradients unchanged and saves memory."""

import copy

import pytest
import torch
from torch import nn

import openmed_nb as nb
from openmed_nb.errors import ConfigurationError
from openmed_nb.training import checkpoint_activations


class Tagger(nn.Module):
    """Plain model with a list of layers and dropout."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.GELU()) for _ in range(3))
        self.head = nn.Linear(8, 2)

    def forward(self, inputs):
        for layer in self.layers:
            inputs = layer(inputs)
        return self.head(inputs)


def make_model():
    """Return the plain model with fixed weights, in train mode."""
    torch.manual_seed(0)
    return Tagger()


def compute_gradients(model, inputs):
    """Return loss and gradients of a step with fixed dropout."""
    model.zero_grad()
    torch.manual_seed(7)
    output = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    loss = (output.logits if hasattr(output, "logits") else output).square().mean()
    loss.backward()
    return loss.item(), [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def assert_same(actual, expected):
    """Compare two steps."""
    assert actual[0] == pytest.approx(expected[0])
    for gradient, expected_gradient in zip(actual[1], expected[1], strict=True):
        torch.testing.assert_close(gradient, expected_gradient)


def measure_saved_bytes(model, inputs):
    """Return the size of the activations that a forward pass stores for the backward pass."""
    sizes = {}

    def pack(tensor):
        sizes[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(**inputs) if isinstance(inputs, dict) else model(inputs)
    return sum(sizes.values())


@pytest.fixture
def bert(tiny):
    """Small BERT with two layers and dropout, in train mode."""
    return tiny.random_bert(size={"num_hidden_layers": 2}).train()


BERT_INPUTS = {"input_ids": torch.arange(5, 17).reshape(2, 6)}
INPUTS = torch.linspace(-1, 1, 32).reshape(4, 8)


@pytest.fixture(params=["plain", "transformers"])
def kind(request, bert):
    """Plain model or model of transformers, with the names of the checkpointed modules, and inputs."""
    return (make_model(), ["layers"], INPUTS) if request.param == "plain" else (bert, [], BERT_INPUTS)


def test_checkpointing_keeps_gradients_and_saves_memory(kind):
    model, names, inputs = kind
    expected = compute_gradients(model, inputs)
    kept = measure_saved_bytes(model, inputs)
    checkpointing = checkpoint_activations(model, *names)

    assert checkpointing.modules == ("layers.0", "layers.1", "layers.2") or not names
    assert_same(compute_gradients(model, inputs), expected)
    assert measure_saved_bytes(model, inputs) < kept / 2


def test_checkpointing_of_the_user_is_replaced_once(bert):
    """On MPS, the function of transformers would not repeat dropout."""
    getattr(bert, "activation_checkpointing_enable", bert.gradient_checkpointing_enable)()
    function = bert.bert.encoder.layer[0]._gradient_checkpointing_func
    hooks = list(bert.bert.embeddings.word_embeddings._forward_hooks)  # transformers registers one there.
    for _ in range(2):
        checkpoint_activations(bert)

    assert bert.bert.encoder.layer[0]._gradient_checkpointing_func is not function
    assert list(bert.bert.embeddings.word_embeddings._forward_hooks) == hooks


def test_repeated_call_recomputes_once(kind):
    model, names, inputs = kind
    calls = []
    inner = model.layers[0][0] if names else model.bert.encoder.layer[0].output.dense
    checkpointings = [checkpoint_activations(model, *names) for _ in range(3)]
    inner.register_forward_hook(lambda *_: calls.append(1))
    compute_gradients(model, inputs)

    assert len(calls) == 2
    assert len(set(checkpointings)) == 1


def make_nested():
    """Return modules inside another one, the second with batch normalization."""
    return nn.Sequential(nn.Sequential(nn.Linear(8, 8)), nn.BatchNorm1d(8))


REJECTED = [
    (["0", "0.0"], r"'0\.0' is inside '0'"),
    (["0.0", "0"], r"'0\.0' is inside '0'"),
    (["0", "1"], "updated twice"),
    (["layer"], r"no module 'layer'\. Use some of '0', '0\.0'"),
    ([], "No module was named"),
    ([""], "no module ''"),
]


@pytest.mark.parametrize(("names", "message"), REJECTED)
def test_invalid_names_change_nothing(names, message):
    model = make_nested()
    with pytest.raises(ConfigurationError, match=message):
        checkpoint_activations(model, *names)
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("names", [("0", "0.0"), ("0.0", "0")])
def test_module_inside_enabled_module_is_rejected(names):
    model = make_nested()
    checkpoint_activations(model, names[0])
    with pytest.raises(ConfigurationError, match=r"'0\.0' is inside '0'"):
        checkpoint_activations(model, names[1])


def test_batch_normalization_without_statistics_is_accepted():
    checkpoint_activations(nn.Sequential(nn.BatchNorm1d(8, track_running_stats=False)), "0")


@pytest.mark.parametrize("kind", ["plain", pytest.param("transformers", marks=pytest.mark.slow)], indirect=True)
def test_compiled_model_has_same_gradients(kind):
    model, names, inputs = kind
    expected = compute_gradients(model, inputs)
    checkpoint_activations(model, *names)
    compiled = torch.compile(
        model, backend="aot_eager"
    )  # The backend "eager" does not repeat dropout, in torch itself.
    found = compute_gradients(compiled, inputs)
    torch._dynamo.reset()
    assert_same(found, expected)


def test_evaluation_mode_does_not_recompute():
    model = make_model().eval()
    calls = []
    expected = model(INPUTS)
    checkpoint_activations(model, "layers")
    model.layers[0][0].register_forward_hook(lambda *_: calls.append(1))
    outputs = model(INPUTS)
    outputs.sum().backward()
    torch.testing.assert_close(outputs, expected)
    assert len(calls) == 1


def test_copy_computes_with_its_weights():
    model = make_model()
    checkpoint_activations(model, "head")
    other = copy.deepcopy(model)
    other.head.weight.data.zero_()
    other.head.bias.data.zero_()

    assert other(INPUTS).abs().sum() == 0
    assert model(INPUTS).abs().sum() > 0


def test_unsupported_transformers_model_is_rejected(bert, monkeypatch):
    monkeypatch.setattr(type(bert), "supports_gradient_checkpointing", False)
    with pytest.raises(ConfigurationError, match="Name its modules"):
        checkpoint_activations(bert)


def test_report_names_modules():
    checkpointing = checkpoint_activations(make_model(), "layers", "head")

    assert "layers.0, layers.1, layers.2 and 1 more" in str(checkpointing)
    assert checkpointing.to_dict() == {"modules": ["layers.0", "layers.1", "layers.2", "head"]}


@pytest.mark.parametrize("names", [["layers"], ["layers.1.1"], []], ids=["plain", "without weights", "transformers"])
@pytest.mark.real_computer  # It starts its own simulation.
def test_dropout_is_repeated_on_mps(names, bert):
    """On MPS, torch does not restore the random number state (pytorch#127676)."""
    with nb.simulated_mps():
        model = (make_model() if names else bert).to("mps")
        inputs = INPUTS.to("mps") if names else {name: values.to("mps") for name, values in BERT_INPUTS.items()}
        expected = compute_gradients(model, inputs)
        following = torch.mps.get_rng_state()
        checkpoint_activations(model, *names)
        found = compute_gradients(model, inputs)
        assert torch.equal(torch.mps.get_rng_state(), following)
        model.zero_grad()
        loss = (model(inputs) if names else model(**inputs).logits).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
    assert_same(found, expected)
