"""Precision, fused AdamW, accumulation and checkpointing in one training loop with a real model."""

import pytest
import torch

import openmed_nb as nb
from openmed_nb.devices.machine import MachineInfo
from openmed_nb.training.steps import select_precision

pytestmark = pytest.mark.real_computer  # The CPU is compared with a simulation that the tests begin.

MAC = MachineInfo("Darwin", "arm64", apple_silicon=True, chip="Apple M3")


def make_batches():
    """Yield batches of increasing length with some ignored labels."""
    generator = torch.Generator().manual_seed(0)
    for length in range(5, 12):
        labels = torch.randint(-1, 3, (2, length), generator=generator)
        ids = torch.randint(5, 20, (2, length), generator=generator)
        yield {"input_ids": ids, "labels": torch.where(labels < 0, -100, labels)}


def train(model, device, requested=None):
    """Train for one epoch, and return the losses and the number of steps."""
    model = nb.training.to_device(model.train(), device)
    precision = select_precision(device, (2, 13), MAC, requested, (9, 0))
    optimizer = nb.training.adamw(model.parameters(), lr=1e-3)
    accumulation = nb.training.GradientAccumulation(optimizer, steps=3, max_norm=1.0, scaler=precision.scaler())
    nb.training.checkpoint_activations(model)
    torch.manual_seed(0)
    losses = []
    steps = 0
    for batch in accumulation.batches(make_batches()):
        with precision.autocast():
            loss = model(**nb.training.to_device(batch, device)).loss
        steps += accumulation.backward(loss)
        losses.append(loss.item())
    return losses, steps


@pytest.fixture
def model(tiny):
    """Function that returns the same small BERT each time."""
    return lambda: tiny.random_bert(size={"num_hidden_layers": 2})


@pytest.mark.parametrize("requested", [None, "bf16", "fp16"])
def test_training_on_simulated_mps_matches_cpu(model, requested):
    expected, _steps = train(model(), "cpu")
    with nb.simulated_mps() as mps:
        found, steps = train(model(), "mps", requested)

    assert steps == 3
    assert found == pytest.approx(expected, rel=1e-3)
    assert not any(copy.non_blocking for copy in mps.copies if copy.target == "mps")
