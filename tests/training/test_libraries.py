"""Trainer, Accelerate and Lightning use the selected device and are guarded."""

import warnings

import pytest
import torch
from accelerate import Accelerator
from transformers import TrainingArguments

import openmed_nb as nb
from openmed_nb.devices.request import parse_device_argument
from openmed_nb.errors import ConfigurationError, InvalidBatchError, NonFiniteError, OpenMedWarning
from openmed_nb.training.epochs import warn_device_mismatch


@pytest.mark.real_computer  # It starts its own simulation.
@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_arguments_set_the_device(device, tmp_path):
    with nb.simulated_mps("8 GiB"):
        given = [device] if device == "cpu" else []  # The session's device is MPS.
        arguments = TrainingArguments(str(tmp_path), report_to=[], **nb.training.arguments("trainer", *given))

        assert parse_device_argument(arguments) == device
        assert arguments.dataloader_pin_memory is False
        assert parse_device_argument(Accelerator(**nb.training.arguments("accelerate", *given))) == device


@pytest.mark.parametrize("guards", [False, True, "labels", ()])
def test_callback_rejects_other_guards(guards):
    with pytest.raises(ConfigurationError, match=r"Pass nb.Guards\(disable="):
        nb.training.callback("trainer", "cpu", guards=guards)


@pytest.mark.parametrize(
    ("used", "selected", "remedy"),
    [
        *(("cpu", "cpu", None), ("mps:0", "mps", None), ("cuda", "cuda:0", None), ("cuda:1", "cuda", None)),
        *(("cpu", "mps", "Do so."), ("cuda:0", "cpu", "Do so.")),
        ("cuda", "cuda:2", "Set CUDA_VISIBLE_DEVICES=2 before torch is imported"),
    ],
)
def test_device_mismatch_warns(used, selected, remedy):
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        warn_device_mismatch("Trainer", used, selected, "Do so.")

    texts = [str(warning.message) for warning in warned if warning.category is OpenMedWarning]
    assert len(texts) == (remedy is not None)
    assert all(text.startswith(f"Trainer uses {used}, but {selected} was selected. {remedy}") for text in texts)


@pytest.fixture
def train_with_trainer(make_trainer):
    """Function that trains the tagger with Trainer for one epoch of four steps; one sample may be changed."""

    def train_with_trainer(guards, workers=0, change=None, **settings):
        small = {"per_device_train_batch_size": 4, "num_train_epochs": 1, "use_cpu": True}
        logged = {"logging_strategy": "steps", "logging_steps": 1, "train_sampling_strategy": "sequential"}
        callback = nb.training.callback("trainer", "cpu", guards=guards)
        options = {**small, **logged, "dataloader_num_workers": workers, **settings}
        trainer = make_trainer(callback, change=change, **options)
        trainer.train()
        return trainer

    return train_with_trainer


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_valid_training_leaves_no_hooks(guards, train_with_trainer, tagger, workers):
    assert train_with_trainer(guards, workers).state.global_step == 4
    assert not tagger._forward_hooks
    assert not tagger._forward_pre_hooks


SLOW_CASES = ("labels", 2), ("input_ids", 0)


@pytest.mark.parametrize(
    ("field", "workers"),
    [("labels", 0), ("input_ids", 2), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_CASES)],
)
def test_invalid_batch_stops_trainer(guards, train_with_trainer, catch_error, workers, field):
    def change(sample):
        sample[field][2] = 1000

    error = catch_error(lambda: train_with_trainer(guards, workers, change))
    assert type(error) is InvalidBatchError
    assert error.message.startswith("Step 2: ")
    assert f"1 of 32 {'labels' if field == 'labels' else 'token ids'} is" in error.message
    assert "(1,000" in error.message
    assert error.remedy


@pytest.mark.parametrize(
    "settings",
    [{}, {"gradient_accumulation_steps": 2}, pytest.param({"max_grad_norm": 0.0}, marks=pytest.mark.slow)],
)
def test_nan_loss_stops_trainer_before_weights_change(guards, train_with_trainer, tagger, settings):
    passes = []

    def spoil_the_third(_layer, _args, output):
        spoilt = len(passes) > 2 and torch.equal(passes[-1], passes[2])
        return output * float("nan") if spoilt else None

    tagger.register_forward_pre_hook(lambda _model, _args, given: passes.append(given["input_ids"]), with_kwargs=True)
    tagger.bert.encoder.layer[0].output.dense.register_forward_hook(spoil_the_third)
    step = 2 if "gradient_accumulation_steps" in settings else 3
    origin = r"the output of bert\.encoder\.layer\.0\.output\.dense"
    with pytest.raises(NonFiniteError, match=f"^Step {step}: the loss is nan; it first appears in {origin}"):
        train_with_trainer(guards, **settings)
    assert all(weight.isfinite().all() for weight in tagger.parameters())


@pytest.fixture
def train_with_lightning(tagger, guards, fit):
    """Function that trains the tagger inside a LightningModule on some batches."""

    def train_with_trainer(*batches):
        loader = torch.utils.data.DataLoader(list(batches), batch_size=None)
        callback = nb.training.callback("lightning", "cpu", guards=guards)
        fit(tagger, lambda model, batch: model(**batch).loss, loader, callback, max_epochs=1)

    return train_with_trainer


@pytest.mark.parametrize(("field", "message"), [("labels", "labels is not"), ("input_ids", "token ids is not")])
def test_invalid_batch_stops_lightning(train_with_lightning, make_batch, field, message):
    train_with_lightning(make_batch(), make_batch(seed=1))
    batch = make_batch()
    batch[field][0, 2] = 1000
    with pytest.raises(InvalidBatchError, match=f"Step 2: .*{message}"):
        train_with_lightning(make_batch(), batch)


def test_nan_in_lightning_names_layer(train_with_lightning, tagger, poison, make_batch):
    poison(tagger, float("nan"))
    with pytest.raises(NonFiniteError, match=r"the output of model\.bert\.encoder\.layer\.0\.output\.dense"):
        train_with_lightning(make_batch())


def test_nan_loss_outside_model_stops_lightning(tagger, guards, fit, make_batch):
    callback = nb.training.callback("lightning", "cpu", guards=guards)
    loader = torch.utils.data.DataLoader([make_batch()], batch_size=None)
    with pytest.raises(NonFiniteError, match="Step 1: the loss is inf; the outputs of all modules are finite"):
        fit(tagger, lambda model, batch: model(**batch).loss / 0, loader, callback, max_epochs=1)
    assert all(weight.isfinite().all() for weight in tagger.parameters())
