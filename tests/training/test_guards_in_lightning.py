"""The guards in a real Lightning training whose module calls a model of transformers past its own forward."""

from __future__ import annotations

import pytest
import torch

import openmed_nb as nb
from openmed_nb.errors import BatchRefused, NonFinite


@pytest.fixture
def trained(tagger, tmp_path):
    """A function that trains the tagger inside of a LightningModule on some batches."""
    lightning = pytest.importorskip("pytorch_lightning")

    class Module(lightning.LightningModule):
        """What most people write: forward is never called."""

        def __init__(self):
            super().__init__()
            self.tagger = tagger

        def training_step(self, batch, _index):
            """Return the loss of the model of transformers."""
            return self.tagger(**batch).loss

        def configure_optimizers(self):
            """Adam, as in the tutorials."""
            return torch.optim.Adam(self.parameters())

    def trained(*batches):
        guards = nb.Guards(folder=tmp_path / "kept")
        trainer = lightning.Trainer(
            accelerator="cpu",
            max_epochs=1,
            callbacks=[nb.lightning_callback("cpu", guards=guards)],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=str(tmp_path),
        )
        module = Module()
        try:
            trainer.fit(module, torch.utils.data.DataLoader(list(batches), batch_size=None))
        finally:
            assert not any(one._forward_hooks or one._forward_pre_hooks for one in (module, tagger))

    return trained


def test_right_batches(trained, batch_of):
    """Right batches are trained on."""
    trained(batch_of(), batch_of(seed=1))


@pytest.mark.parametrize(("field", "said"), [("labels", "labels is not"), ("input_ids", "token ids is not")])
def test_wrong_batch(trained, batch_of, field, said):
    """What the model does not have is refused, learnt from the model inside."""
    batch = batch_of()
    batch[field][0, 2] = 1000
    with pytest.raises(BatchRefused, match=f"Step 2: .*{said}"):
        trained(batch_of(), batch)


def test_layer_is_named_and_batch_kept(trained, tagger, batch_of, tmp_path):
    """NaN is found in its layer, by its name in the module, and the batch of the model is kept."""
    tagger.bert.encoder.layer[0].output.dense.register_forward_hook(lambda _layer, _args, output: output * float("nan"))
    with pytest.raises(NonFinite, match=r"what tagger\.bert\.encoder\.layer\.0\.output\.dense computes"):
        trained(batch_of())
    assert (tmp_path / "kept" / "step_1.safetensors").is_file()
