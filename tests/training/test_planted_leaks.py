"""Small trainings are flat; with retained losses they grow, and the list is named."""

import contextlib

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import Trainer

import openmed_nb as nb
from helpers.trainings import make_batch
from openmed_nb.errors import OpenMedWarning

pytestmark = [
    pytest.mark.usefixtures("by_itself", "one_thread"),
    pytest.mark.real_computer,  # Each test selects its device, and starts its simulation for MPS.
]

EPOCHS = 5
FLAT_AND_LEAKING = pytest.mark.parametrize("leaking", [False, True], ids=["flat", "leaking"])
FIRST_ON_THE_CPU = pytest.mark.parametrize("device", ["cpu", pytest.param("mps", marks=pytest.mark.slow)])


def use_device(device):
    """Make a device available: the CPU, or a simulated MPS."""
    return nb.simulated_mps("8 GiB") if device == "mps" else contextlib.nullcontext()


def assert_verdict(curve, leaking, simulated=False):
    """Assert the verdict on tensors and, for a leak, that the advice names the list."""
    assert [sample.epoch for sample in curve.epoch_samples] == list(range(1, EPOCHS + 1))
    assert curve.simulated is simulated
    assert curve.trends["allocated"].kind == ("growing" if leaking else "flat"), str(curve)
    if leaking:
        cause = curve.referrers[0]
        assert curve.advice.startswith(f"Tensors are retained: {cause.name} (")
        assert cause.name.endswith("losses")
        assert cause.num_graphs == cause.tensors > EPOCHS


class Network(nn.Module):
    """Small convolutional network for images of 3 x 16 x 16."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 8, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 5))
        self.classifier = nn.Linear(64, 10)

    def forward(self, images):
        return self.classifier(self.features(images).flatten(1))


@pytest.fixture
def pictures():
    """Synthetic images with their classes."""
    numbers = torch.Generator().manual_seed(0)
    data = torch.randn(128, 3, 16, 16, generator=numbers), torch.randint(0, 10, (128,), generator=numbers)
    return DataLoader(TensorDataset(*data), batch_size=64)


@FLAT_AND_LEAKING
@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_verdict_of_plain_loop(device, leaking, tagger):
    losses = []
    with use_device(device):
        model = tagger.to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        loop = nb.epochs(EPOCHS, device)
        for epoch in loop:
            for step in range(2):
                batch = nb.training.to_device(make_batch(rows=8, length=16, seed=step), device)
                loss = model(**batch).loss + 0 * epoch
                loss.backward(retain_graph=leaking)
                optimizer.step()
                optimizer.zero_grad()
                loop.step()
                losses.append(loss if leaking else loss.item())

    assert_verdict(loop.curve, leaking, simulated=device == "mps")
    assert loop.curve.epoch_samples[-1].step == len(losses) == 2 * EPOCHS


@FLAT_AND_LEAKING
def test_verdict_of_convolutional_network_with_accelerate(leaking, pictures):
    losses = []
    accelerator = Accelerator(**nb.training.arguments("accelerate", "cpu"))
    network = Network()
    model, optimizer, loader = accelerator.prepare(network, torch.optim.Adam(network.parameters()), pictures)
    loop = nb.epochs(EPOCHS, accelerator)
    for _ in loop:
        for batch in loader:
            optimizer.zero_grad()
            loss = compute_loss(model, batch)
            accelerator.backward(loss, retain_graph=leaking)
            optimizer.step()
            losses.append(loss if leaking else loss.item())

    assert_verdict(loop.curve, leaking)


@FIRST_ON_THE_CPU
@pytest.mark.parametrize(("size", "verdict"), [(1 << 20, "growing"), (1 << 12, "growing below the limit")])
def test_retained_outputs_without_graphs_are_named(device, size, verdict):
    outputs = []
    with use_device(device):
        loop = nb.epochs(8, device)
        outputs.extend(torch.zeros(size, device=device) for _ in loop)

    assert (loop.verdict, loop.curve.deciding_metric) == (verdict, "allocated")
    assert (loop.curve.referrers[0].name, loop.curve.referrers[0].num_graphs) == ("outputs", 0)


@pytest.fixture
def train(make_trainer):
    """Function that trains the tagger with Trainer and returns the curve."""

    def train(device="cpu", *, epochs=EPOCHS, callback=None, resume=None, **options):
        callback = callback or nb.training.callback("trainer", device)
        options |= {"num_train_epochs": epochs, "per_device_train_batch_size": 8, "length": 16}
        started = make_trainer(callback, **options, **nb.training.arguments("trainer", device))
        started.train(resume_from_checkpoint=resume)
        return callback.curve

    return train


class LeakingTrainer(Trainer):
    """Trainer that retains its losses with their graphs."""

    losses = None

    def compute_loss(self, model, inputs, *args, **kwargs):
        """Retain a second loss, whose graph is not freed by the backward pass."""
        self.losses = [*(self.losses or ()), super().compute_loss(model, inputs, *args, **kwargs)]
        return super().compute_loss(model, inputs, *args, **kwargs)


@FLAT_AND_LEAKING
@FIRST_ON_THE_CPU
def test_verdict_of_trainer(device, leaking, train):
    with use_device(device):
        curve = train(device, kind=LeakingTrainer if leaking else Trainer)

    assert_verdict(curve, leaking, simulated=device == "mps")
    assert curve.epoch_samples[-1].step == 2 * EPOCHS


def test_reused_callback_starts_new_curve(train):
    callback = nb.training.callback("trainer", "cpu")
    curves = [train(epochs=epochs, callback=callback) for epochs in (1, 2)]

    assert [len(curve.epoch_samples) for curve in curves] == [1, 2]


def test_trainer_resumes_counts_from_checkpoint(train, tmp_path):
    train(epochs=1, save_strategy="epoch")
    curve = train(epochs=2, resume=str(tmp_path / "out" / "checkpoint-2"))

    assert [(sample.epoch, sample.step) for sample in curve.epoch_samples] == [(2, 4)]


def test_trainer_on_another_device_warns(train):
    with nb.simulated_mps("8 GiB"):
        callback = nb.training.callback("trainer", "mps")
    with pytest.warns(OpenMedWarning, match="Trainer uses cpu, but mps was selected"):
        curve = train(epochs=1, callback=callback)

    assert curve.device == "cpu"


def compute_loss(network, batch):
    """Return the loss of a batch of images."""
    return nn.functional.cross_entropy(network(batch[0]), batch[1])


@FLAT_AND_LEAKING
def test_verdict_of_lightning(leaking, pictures, fit):
    losses = []

    def retain_loss(network, batch):
        """Return the loss, and keep a second one with its graph."""
        losses.append(compute_loss(network, batch))
        return compute_loss(network, batch)

    callback = nb.training.callback("lightning", "cpu")
    fit(Network(), retain_loss if leaking else compute_loss, pictures, callback, max_epochs=EPOCHS)

    assert_verdict(callback.curve, leaking)
    assert callback.curve.epoch_samples[-1].step == 2 * EPOCHS
