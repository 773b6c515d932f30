"""Activation checkpointing keeps gradients unchanged and saves memory."""

import pytest
import torch
from torch import nn

import openmed_nb as nb
from helpers import tiny_models as tiny
from openmed_nb.errors import ConfigurationError
from openmed_nb.training import checkpoint_activations
from openmed_nb.training.steps import ActivationCheckpointing

INPUTS = torch.arange(5, 17).reshape(2, 6)


@pytest.fixture
def bert():
    """Small BERT with two layers and dropout, in train mode."""
    return tiny.random_bert(size={"num_hidden_layers": 2}).train()


def compute_gradients(model, inputs=INPUTS):
    """Return loss and gradients of a step with fixed dropout."""
    model.zero_grad()
    torch.manual_seed(7)
    loss = model(input_ids=inputs).logits.square().mean()
    loss.backward()
    return loss.item(), [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def measure_saved_bytes(model):
    """Return the size of the activations that a forward pass stores for the backward pass."""
    sizes = {}

    def pack(tensor):
        sizes[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(input_ids=INPUTS)
    return sum(sizes.values())


@pytest.mark.filterwarnings("error::FutureWarning")
def test_checkpointing_keeps_gradients_and_saves_memory(bert):
    """A repeated call recomputes once, and the outdated name of transformers is not called."""
    expected = compute_gradients(bert)
    saved_bytes = measure_saved_bytes(bert)
    checkpointings = {checkpoint_activations(bert) for _ in range(2)}
    calls = []
    bert.bert.encoder.layer[0].output.dense.register_forward_hook(lambda *_: calls.append(1))

    torch.testing.assert_close(compute_gradients(bert), expected)
    assert len(calls) == 2
    assert measure_saved_bytes(bert) < saved_bytes / 2
    assert len(checkpointings) == 1
    assert "bert.encoder.layer.0" in str(checkpointings.pop())


def test_checkpointing_of_the_user_is_replaced_once(bert):
    """On MPS, the function of transformers would not repeat dropout."""
    getattr(bert, "activation_checkpointing_enable", bert.gradient_checkpointing_enable)()
    function = bert.bert.encoder.layer[0]._gradient_checkpointing_func
    hooks = list(bert.bert.embeddings.word_embeddings._forward_hooks)  # transformers registers one there.
    for _ in range(2):
        checkpoint_activations(bert)

    assert bert.bert.encoder.layer[0]._gradient_checkpointing_func is not function
    assert list(bert.bert.embeddings.word_embeddings._forward_hooks) == hooks


@pytest.mark.parametrize(("count", "names"), [(3, "a, b, c"), (4, "a, b, c and 1 more")])
def test_report_names_at_most_three_modules(count, names):
    report = ActivationCheckpointing(("a", "b", "c", "d")[:count]).to_report()

    assert report.title == f"Activation checkpointing: {names}"


def test_other_modules_are_rejected():
    for value in (nn.Linear(2, 2), "model", None):
        with pytest.raises(ConfigurationError, match=f"{type(value).__name__} does not support activation"):
            checkpoint_activations(value)


@pytest.mark.slow
def test_compiled_model_has_same_gradients(bert):
    expected = compute_gradients(bert)
    checkpoint_activations(bert)
    # The backend "eager" does not repeat dropout, in torch itself.
    found = compute_gradients(torch.compile(bert, backend="aot_eager"))
    torch._dynamo.reset()
    torch.testing.assert_close(found, expected)


@pytest.mark.real_computer  # It starts its own simulation.
def test_dropout_is_repeated_on_mps(bert):
    """On MPS, torch does not restore the random number state (pytorch#127676)."""
    with nb.simulated_mps():
        model = bert.to("mps")
        inputs = INPUTS.to("mps")
        expected = compute_gradients(model, inputs)
        following = torch.mps.get_rng_state()
        checkpoint_activations(model)
        found = compute_gradients(model, inputs)
        assert torch.equal(torch.mps.get_rng_state(), following)
        loss = model(inputs).logits.square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
    torch.testing.assert_close(found, expected)
