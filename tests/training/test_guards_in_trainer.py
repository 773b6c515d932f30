"""The guards under transformers' own Trainer, whose callbacks see no batches and whose log hides a loss of NaN."""

from __future__ import annotations

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from openmed_nb import Guards
from openmed_nb.errors import BatchRefused, NonFinite


class Guarded(TrainerCallback):
    """Calls the guards where a Trainer lets it."""

    def __init__(self, guards):
        self.guards = guards

    def on_train_begin(self, *_state, **kwargs):
        """Watch the model and its loader."""
        self.guards.watch(kwargs["model"], "cpu")
        assert self.guards.watch_loader(kwargs["train_dataloader"])

    def on_pre_optimizer_step(self, _args, state, _control, **kwargs):
        """Look at loss and gradients."""
        self.guards.after_backward(kwargs["model"], state.global_step + 1)

    def on_train_end(self, *_state, **_kwargs):
        """Let go."""
        self.guards.unwatch()


@pytest.fixture
def trained(tmp_path, tagger, batch_of):
    """A function that trains the tagger for an epoch of four steps over samples, one of which may be changed."""

    def trained(guards, workers=0, change=None, **settings):
        batch = batch_of(rows=16)
        samples = [{name: values[row] for name, values in batch.items()} for row in range(16)]
        if change:
            change(samples[6])
        arguments = TrainingArguments(
            output_dir=str(tmp_path / "out"),
            per_device_train_batch_size=4,
            num_train_epochs=1,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
            logging_steps=1,
            dataloader_num_workers=workers,
            **{"train_sampling_strategy": "sequential", **settings},
        )
        trainer = Trainer(tagger, arguments, train_dataset=samples, callbacks=[Guarded(guards)])
        trainer.train()
        return trainer

    return trained


@pytest.fixture
def guards(tmp_path):
    """Guards that keep batches in a folder of the test."""
    with Guards(folder=tmp_path / "kept") as guards:
        yield guards


@pytest.mark.parametrize("workers", [0, 2])
def test_right_batches(guards, trained, tagger, workers):
    """A training without fault runs to its end, and leaves no hook."""
    trainer = trained(guards, workers)
    assert trainer.state.global_step == 4
    assert not tagger._forward_hooks
    assert not tagger._forward_pre_hooks


@pytest.mark.parametrize(
    ("field", "workers"),
    [
        ("labels", 0),
        ("input_ids", 2),
        pytest.param("labels", 2, marks=pytest.mark.slow),
        pytest.param("input_ids", 0, marks=pytest.mark.slow),
    ],
)
def test_wrong_batch(guards, trained, refusal, workers, field):
    """A number in the data that the model does not have stops the training, with worker processes and without."""

    def change(sample):
        sample[field][2] = 1000

    refused = refusal(lambda: trained(guards, workers, change))
    assert type(refused) is BatchRefused
    assert {"labels": "1 of 32 labels is", "input_ids": "1 of 32 token ids is"}[field] in refused.what
    assert "(1,000" in refused.what
    assert refused.remedy


@pytest.mark.parametrize("settings", [{}, {"max_grad_norm": 0.0}, {"gradient_accumulation_steps": 2}])
def test_loss_of_nan(guards, trained, tagger, tmp_path, settings):
    """A loss of NaN, which a Trainer's log leaves out, stops the training before the weights are spoilt."""
    tagger.bert.encoder.layer[0].output.dense.register_forward_hook(
        lambda layer, _args, output: output * float("nan") if layer.spoilt else None
    )
    passes = []

    def spoil_the_third(model, _args, given):
        ids = given["input_ids"]
        passes.append(ids)
        model.bert.encoder.layer[0].output.dense.spoilt = (
            len(passes) > 2 and ids is not None and torch.equal(ids, passes[2])
        )

    tagger.register_forward_pre_hook(spoil_the_third, with_kwargs=True)
    with pytest.raises(NonFinite) as stopped:
        trained(guards, **settings)
    step = 2 if "gradient_accumulation_steps" in settings else 3
    assert f"Step {step}: the loss is NaN or infinite" in stopped.value.what
    assert "what bert.encoder.layer.0.output.dense computes" in stopped.value.what
    assert (tmp_path / "kept" / f"step_{step}.safetensors").is_file()
    assert all(weight.isfinite().all() for weight in tagger.parameters())


def test_switched_off(trained, tagger):
    """Without the guard the same training runs to its end with spoilt weights, and its log shows a loss of numbers."""
    tagger.bert.encoder.layer[0].output.dense.register_forward_hook(lambda _l, _a, output: output * float("nan"))
    trainer = trained(Guards(off=("nonfinite",)))
    assert trainer.state.global_step == 4
    assert all(entry["loss"] == 0 for entry in trainer.state.log_history if "loss" in entry)
    assert any(weight.isnan().any() for weight in tagger.parameters())
