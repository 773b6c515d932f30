"""What the tests of training share."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Call a test that is ``by_itself`` in a thread of its own; a simulated Mac belongs to one thread, so not there."""
    if "by_itself" not in pyfuncitem.fixturenames or pyfuncitem.config.getoption("simulated_mps"):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    with ThreadPoolExecutor(1) as thread:
        thread.submit(pyfuncitem.obj, **arguments).result()
    return True


@pytest.fixture
def by_itself(
    quick_collection: None,  # noqa: ARG001 - it ends the freeze
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """A test whose memory is looked at: pytest's functions above it, older objects and other tests are no part of it."""
    for name in [name for name in sys.modules if name.startswith("tests.") and name != request.module.__name__]:
        monkeypatch.delitem(sys.modules, name)
    gc.freeze()


@pytest.fixture
def tagger(tiny: ModuleType) -> Any:
    """A small model in train mode, with dropout, that tells three labels apart."""
    return tiny.random_bert().train()


@pytest.fixture
def guards(tmp_path: Path) -> Iterator[Any]:
    """Guards that keep batches in a folder of the test."""
    from openmed_nb import Guards

    with Guards(folder=tmp_path / "kept") as guards:
        yield guards


@pytest.fixture
def fit(tmp_path: Path) -> Callable[..., None]:
    """A function that trains a model inside of a module of Lightning on the CPU, and shows and writes nothing."""
    lightning = pytest.importorskip("pytorch_lightning")

    class Module(lightning.LightningModule):
        """What most people write: forward is never called."""

        def __init__(self, model: Any, loss: Callable[..., torch.Tensor]) -> None:
            super().__init__()
            self.model, self.loss = model, loss

        def training_step(self, batch: Any, _index: int) -> torch.Tensor:
            """Return the loss of a batch."""
            return self.loss(self.model, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            """Adam, as in the tutorials."""
            return torch.optim.Adam(self.parameters())

    def fit(model: Any, loss: Callable[..., torch.Tensor], loader: Any, callback: Any, **settings: Any) -> None:
        quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
        options = {"accelerator": "cpu", "default_root_dir": str(tmp_path), **quiet, **settings}
        module = Module(model, loss)
        try:
            lightning.Trainer(callbacks=[callback], **options).fit(module, loader)
        finally:
            assert not any(part._forward_hooks or part._forward_pre_hooks for part in (module, model))

    return fit


@pytest.fixture
def trainer_of(tagger: Any, batch_of: Callable[..., dict[str, torch.Tensor]], tmp_path: Path) -> Callable[..., Any]:
    """A function that returns a Trainer of the tagger over 16 samples, one of which may be changed; it shows nothing."""
    from transformers import Trainer, TrainingArguments

    def trainer_of(*callbacks: Any, kind: Any = Trainer, change: Any = None, length: int = 8, **settings: Any) -> Any:
        batch = batch_of(rows=16, length=length)
        samples = [{name: values[row] for name, values in batch.items()} for row in range(16)]
        if change:
            change(samples[6])
        quiet = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no"}
        arguments = TrainingArguments(output_dir=str(tmp_path / "out"), **{**quiet, **settings})
        return kind(model=tagger, args=arguments, train_dataset=samples, callbacks=[*callbacks])

    return trainer_of


@pytest.fixture(scope="session")
def batch_of() -> Callable[..., dict[str, torch.Tensor]]:
    """A function that returns a batch that is right for the tagger, with other values for some fields."""

    def batch_of(rows: int = 4, length: int = 8, seed: int = 0, **other: torch.Tensor) -> dict[str, torch.Tensor]:
        numbers = torch.Generator().manual_seed(seed)
        tokens = torch.randint(5, 24, (rows, length), generator=numbers)
        labels = torch.randint(0, 3, (rows, length), generator=numbers)
        labels[:, 0] = -100
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels, **other}

    return batch_of


@pytest.fixture(scope="session")
def refusal() -> Callable[..., Exception | None]:
    """A function that calls another and returns our error, without the frames that would keep worker processes alive."""
    from openmed_nb.errors import OpenMedError

    def refusal(call: Callable[[], Any]) -> Exception | None:
        try:
            call()
        except OpenMedError as error:
            return error.with_traceback(None)
        return None

    return refusal
