"""The guards on the simulated MPS device, where batches are checked before they are moved and repeated on the device."""

import pytest
import torch
from safetensors.torch import load_file

import openmed_nb as nb
from openmed_nb.devices.machine import Machine
from openmed_nb.errors import BatchRefused, NonFinite

pytestmark = pytest.mark.real_computer  # Each test begins its own simulation.

M2 = Machine("Darwin", "arm64", apple_silicon=True, chip="Apple M2")


@pytest.fixture
def on_mps(tagger, tmp_path):
    """The tagger on the simulated device, and guards that watch it."""
    with nb.simulated_mps("8 GiB"):
        model = tagger.to("mps")
        with nb.Guards(folder=tmp_path / "kept").watch(model, "mps", M2, (2, 13, 0)) as guards:
            yield model, guards


def moved(batch):
    """Return a batch on the device."""
    return {name: values.to("mps") for name, values in batch.items()}


def test_right_step(on_mps, batch_of):
    """A step without fault passes, and random numbers go on as they would."""
    model, guards = on_mps
    guards.check(batch_of(), 1)
    model(**moved(batch_of())).loss.backward()
    numbers = torch.get_rng_state()
    guards.after_backward(model, 1)
    assert torch.equal(torch.get_rng_state(), numbers)


def test_wrong_step(on_mps, batch_of, tmp_path):
    """NaN on the device is found in its layer, and the batch comes back from the device into a file."""
    model, guards = on_mps
    model.bert.encoder.layer[0].output.dense.register_forward_hook(lambda _l, _a, output: output * float("nan"))
    model(**moved(batch_of())).loss.backward()
    with pytest.raises(NonFinite, match=r"what bert\.encoder\.layer\.0\.output\.dense computes"):
        guards.after_backward(model, 2)
    saved = load_file(tmp_path / "kept" / "step_2.safetensors")
    assert torch.equal(saved["input_ids"], batch_of()["input_ids"])


@pytest.mark.parametrize("where", ["cpu", "mps"])
def test_wrong_batch(on_mps, batch_of, where):
    """Labels are checked before a batch is moved, and after it too; a step of 512 x 64 tokens is too large for an M2."""
    _, guards = on_mps
    with pytest.raises(BatchRefused, match="32 of 32 labels are not between 0 and 2"):
        guards.check({"labels": batch_of(labels=torch.full((4, 8), 5))["labels"].to(where)}, 1)
    with pytest.raises(BatchRefused, match="512 x 64 = 32,768 tokens"):
        guards.check({"input_ids": torch.zeros(512, 64, dtype=torch.long, device=where)}, 1)
