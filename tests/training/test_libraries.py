"""Trainer, Accelerate and Lightning use the selected device and are guarded."""

import pytest
import torch
from accelerate import Accelerator
from transformers import TrainingArguments

import openmed_nb as nb
from helpers.trainings import make_batch, poison
from openmed_nb.devices.request import parse_device_argument
from openmed_nb.errors import InvalidBatchError, NonFiniteError

LAYER = r"bert\.encoder\.layer\.0\.output\.dense"
with_workers = pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])


@pytest.mark.real_computer  # It starts its own simulation.
@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_arguments_set_the_device(device, tmp_path):
    with nb.simulated_mps("8 GiB"):
        given = [device] if device == "cpu" else []  # The session's device is MPS.
        arguments = TrainingArguments(str(tmp_path), report_to=[], **nb.training.arguments("trainer", *given))

        assert parse_device_argument(arguments) == device
        assert arguments.dataloader_pin_memory is False
        assert parse_device_argument(Accelerator(**nb.training.arguments("accelerate", *given))) == device


@pytest.fixture
def train_with_trainer(make_trainer):
    """Function that trains the tagger with Trainer for one epoch of four steps; one sample may be changed."""

    def train_with_trainer(workers=0, change=None, **settings):
        small = {"per_device_train_batch_size": 4, "num_train_epochs": 1, "use_cpu": True}
        options = {"train_sampling_strategy": "sequential", "dataloader_num_workers": workers, **settings}
        trainer = make_trainer(nb.training.callback("trainer", "cpu"), change=change, **small, **options)
        trainer.train()
        return trainer

    return train_with_trainer


@with_workers
def test_valid_training_leaves_no_hooks(train_with_trainer, tagger, workers):
    assert train_with_trainer(workers).state.global_step == 4
    assert not tagger._forward_hooks
    assert not tagger._forward_pre_hooks


@with_workers
@pytest.mark.parametrize(("field", "noun"), [("labels", "labels"), ("input_ids", "token ids")])
def test_invalid_batch_stops_trainer(train_with_trainer, workers, field, noun):
    def change(sample):
        sample[field][2] = 1000

    with pytest.raises(InvalidBatchError, match=rf"^Step 2: 1 of 32 {noun} is .*\(1,000"):
        train_with_trainer(workers, change)


@pytest.mark.parametrize(
    ("settings", "step"),
    [({}, 3), ({"gradient_accumulation_steps": 2}, 2), pytest.param({"max_grad_norm": 0.0}, 3, marks=pytest.mark.slow)],
)
def test_nan_loss_stops_trainer_before_weights_change(train_with_trainer, tagger, settings, step):
    passes = []

    def spoil_the_third(_layer, _args, output):
        spoilt = len(passes) > 2 and torch.equal(passes[-1], passes[2])
        return output * float("nan") if spoilt else None

    tagger.register_forward_pre_hook(lambda _model, _args, given: passes.append(given["input_ids"]), with_kwargs=True)
    tagger.bert.encoder.layer[0].output.dense.register_forward_hook(spoil_the_third)
    with pytest.raises(
        NonFiniteError, match=f"^Step {step}: the loss is nan; it first appears in the output of {LAYER}"
    ):
        train_with_trainer(**settings)
    assert all(weight.isfinite().all() for weight in tagger.parameters())


@pytest.fixture
def train_with_lightning(tagger, fit):
    """Function that trains the tagger inside a LightningModule on some batches."""

    def train_with_lightning(*batches, divisor=1):
        loader = torch.utils.data.DataLoader(list(batches), batch_size=None)
        callback = nb.training.callback("lightning", "cpu")
        fit(tagger, lambda model, batch: model(**batch).loss / divisor, loader, callback, max_epochs=1)

    return train_with_lightning


@pytest.mark.parametrize("field", ["labels", "input_ids"])
def test_invalid_batch_stops_lightning(train_with_lightning, field):
    batch = make_batch()
    train_with_lightning(make_batch())
    batch[field][0, 2] = 1000
    with pytest.raises(InvalidBatchError, match=r"^Step 2: .* is not between"):
        train_with_lightning(make_batch(), batch)


def test_nan_in_lightning_names_layer(train_with_lightning, tagger):
    poison(tagger, float("nan"))
    with pytest.raises(NonFiniteError, match=rf"the output of model\.{LAYER}"):
        train_with_lightning(make_batch())


def test_nan_loss_outside_model_stops_lightning(train_with_lightning, tagger):
    with pytest.raises(NonFiniteError, match="Step 1: the loss is inf; the outputs of all modules are finite"):
        train_with_lightning(make_batch(), divisor=0)
    assert all(weight.isfinite().all() for weight in tagger.parameters())
