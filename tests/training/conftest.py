"""Shared fixtures of the tests of training."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import tiny_models as tiny
from helpers.trainings import make_batch


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run tests with ``by_itself`` in a separate thread, except on a simulated Mac, which belongs to one thread."""
    if "by_itself" not in pyfuncitem.fixturenames or pyfuncitem.config.getoption("simulated_mps"):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    with ThreadPoolExecutor(1) as thread:
        thread.submit(pyfuncitem.obj, **arguments).result()
    return True


@pytest.fixture
def by_itself() -> None:
    """Isolation for memory tests: frames of pytest and older objects are excluded."""
    gc.freeze()


@pytest.fixture
def tagger() -> Any:
    """Small model with three labels and dropout, in train mode."""
    return tiny.random_bert().train()


@pytest.fixture
def guards() -> Iterator[Any]:
    """Guards that are removed after the test."""
    from openmed_nb import Guards

    with Guards() as guards:
        yield guards


@pytest.fixture
def fit(tmp_path: Path) -> Callable[..., None]:
    """Function that trains a model inside a LightningModule on the CPU, without output."""
    lightning = pytest.importorskip("pytorch_lightning")

    class Module(lightning.LightningModule):
        """Typical LightningModule, whose forward method is never called."""

        def __init__(self, model: Any, loss: Callable[..., torch.Tensor]) -> None:
            super().__init__()
            self.model = model
            self.loss = loss

        def training_step(self, batch: Any, _index: int) -> torch.Tensor:
            return self.loss(self.model, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters())

    def fit(model: Any, loss: Callable[..., torch.Tensor], loader: Any, callback: Any, **settings: Any) -> None:
        quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
        options = {"accelerator": "cpu", "default_root_dir": str(tmp_path), **quiet, **settings}
        module = Module(model, loss)
        try:
            lightning.Trainer(callbacks=[callback], **options).fit(module, loader)
        finally:
            assert not any(trained._forward_hooks or trained._forward_pre_hooks for trained in (module, model))

    return fit


@pytest.fixture
def make_trainer(tagger: Any, tmp_path: Path) -> Callable[..., Any]:
    """Function that returns a Trainer of the tagger over 16 samples, one of which may be changed, without output."""
    from transformers import Trainer, TrainingArguments

    def make_trainer(*callbacks: Any, kind: Any = Trainer, change: Any = None, length: int = 8, **settings: Any) -> Any:
        batch = make_batch(rows=16, length=length)
        samples = [{name: values[row] for name, values in batch.items()} for row in range(16)]
        if change:
            change(samples[6])
        quiet = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no"}
        arguments = TrainingArguments(output_dir=str(tmp_path / "out"), **{**quiet, **settings})
        return kind(model=tagger, args=arguments, train_dataset=samples, callbacks=[*callbacks])

    return make_trainer
