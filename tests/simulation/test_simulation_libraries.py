"""transformers and Accelerate find the simulated MPS device and run on it."""

import os
import warnings

import pytest
import torch

from helpers import tiny_models as tiny
from helpers.annotations import words_of
from openmed_nb.simulation.device import simulated_device

pytestmark = pytest.mark.real_computer  # Each test starts its own simulation.

PINNED = "'pin_memory' argument is set as true but not supported on MPS now, device pinned memory won't be used."


@pytest.fixture
def examples():
    """Function that returns examples for a token classifier with three labels."""

    def examples(count):
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(5, len(tiny.VOCABULARY), (count, 12), generator=generator)
        return [{"input_ids": row, "labels": row % 3} for row in ids]

    return examples


def test_trainer_trains_and_resumes_on_device(examples, tmp_path):
    from transformers import Trainer, TrainingArguments

    def trainer(epochs):
        arguments = TrainingArguments(
            str(tmp_path),
            num_train_epochs=epochs,
            per_device_train_batch_size=4,
            eval_strategy="epoch",
            save_strategy="epoch",
            report_to=[],
            disable_tqdm=True,
            gradient_checkpointing=True,
        )
        return Trainer(tiny.random_bert(), arguments, train_dataset=examples(16), eval_dataset=examples(8))

    with simulated_device(fallback=False) as mps, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        training = trainer(2)
        assert training.args.device.type == "mps"
        result = training.train()
        weights = {parameter.device for parameter in training.model.parameters()}
        resumed = trainer(3).train(resume_from_checkpoint=True)
    assert weights == {torch.device("mps", 0)}
    assert {parameter.device for parameter in training.model.parameters()} == {torch.device("cpu")}
    assert PINNED in {str(warning.message) for warning in caught}
    assert 0 < resumed.training_loss < result.training_loss * 3
    assert [(tmp_path / f"checkpoint-{step}" / "model.safetensors").is_file() for step in (4, 8, 12)] == [True] * 3
    assert not any(copy.non_blocking for copy in mps.copies if copy.target == "cpu")
    assert mps.allocator.peak > sum(parameter.nbytes for parameter in training.model.parameters())


def test_pipeline_matches_cpu(keyword_model):
    from transformers import pipeline

    here = pipeline("token-classification", str(keyword_model), device="cpu", aggregation_strategy="simple")
    with simulated_device(fallback=False) as mps:
        there = pipeline("token-classification", str(keyword_model), device="mps", aggregation_strategy="simple")
        assert there.model.device.type == "mps"
        assert words_of(there) == words_of(here)
        assert mps.call_counts["linear"] > 0


def test_accelerator_uses_device_during_simulation():
    from accelerate import Accelerator

    before = Accelerator()
    with simulated_device(fallback=False):
        accelerator = Accelerator()
        assert accelerator.device.type == "mps"
        layer = torch.nn.Linear(2, 1)
        loader = torch.utils.data.DataLoader([torch.ones(2)] * 4, batch_size=2)
        layer, optimizer, loader = accelerator.prepare(layer, torch.optim.SGD(layer.parameters(), lr=0.1), loader)
        for batch in loader:
            assert batch.is_mps
            accelerator.backward(layer(batch).sum())
            accelerator.clip_grad_norm_(layer.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        assert accelerator.gather(layer(batch)).is_mps
    assert Accelerator().device.type == before.device.type == "cpu"


def test_accelerate_does_not_change_fallback_variable(monkeypatch):
    """Accelerate enables the fallback if it finds MPS."""
    from accelerate import Accelerator

    monkeypatch.setenv("PYTORCH_ENABLE_MPS_FALLBACK", "0")
    with simulated_device():
        Accelerator()
    assert os.environ["PYTORCH_ENABLE_MPS_FALLBACK"] == "0"
