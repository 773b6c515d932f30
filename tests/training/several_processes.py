"""Training with several processes: each process writes a JSON file per training loop into the directory argument.

If a launcher starts this script, it is one of the processes. Otherwise it forks two processes, which need no imports.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import IPython.display
import torch
from accelerate import Accelerator, debug_launcher
from transformers import BertConfig, BertForTokenClassification, Trainer, TrainingArguments

import openmed_nb as nb

DISPLAYED: list[object] = []


def write_result(loop_name: str, curve: Any) -> None:
    """Write the state of a process and its displayed outputs into a file, because printed lines would mix."""
    result = {
        "processes": curve.process.world_size,
        "device": curve.device,
        "epochs": len(curve.epoch_samples),
        "displayed": len(DISPLAYED),
    }
    Path(sys.argv[1], f"{loop_name} {curve.process.rank}.json").write_text(json.dumps(result), "utf-8")
    DISPLAYED.clear()


def make_model() -> BertForTokenClassification:
    """Return a small model, the same in every process."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return BertForTokenClassification(BertConfig(vocab_size=50, num_labels=3, **sizes))


def make_samples() -> list[dict[str, torch.Tensor]]:
    """Return samples of random tokens."""
    return [{"input_ids": torch.randint(5, 50, (8,)), "labels": torch.randint(0, 3, (8,))} for _ in range(16)]


def train_with_accelerate() -> None:
    """Train in a loop with Accelerate."""
    accelerator = Accelerator(cpu=True)
    trained = make_model()
    loader = torch.utils.data.DataLoader(make_samples(), batch_size=4)
    trained, optimizer, loader = accelerator.prepare(trained, torch.optim.SGD(trained.parameters(), 0.1), loader)
    epochs = nb.epochs(2, accelerator, live=True)
    for _epoch in epochs:
        for batch in loader:
            accelerator.backward(trained(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
            epochs.step()
    write_result("loop", epochs.curve)


def train_with_trainer(folder: Path) -> None:
    """Train with Trainer of transformers."""
    quiet = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no"}
    size = {"num_train_epochs": 1, "per_device_train_batch_size": 4}
    arguments = TrainingArguments(output_dir=str(folder), use_cpu=True, **size, **quiet)
    callback = nb.training.callback("trainer", "cpu", live=True)
    Trainer(make_model(), arguments, train_dataset=make_samples(), callbacks=[callback]).train()
    write_result("trainer", callback.curve)


def train(folder: str) -> None:
    """Train with both loops."""
    IPython.display.display = DISPLAYED.append  # In place of the front end of a notebook.
    train_with_accelerate()
    train_with_trainer(Path(folder))


def train_forked(folder: str) -> None:
    """Train in a forked process, which has the variables of a launcher."""
    rank = str(torch.distributed.get_rank())
    os.environ.update(RANK=rank, LOCAL_RANK=rank)
    train(folder)


if __name__ == "__main__":
    if "RANK" in os.environ:
        train(sys.argv[1])
    else:
        gc.freeze()  # Imported objects need not be collected repeatedly.
        debug_launcher(train_forked, (sys.argv[1],))
