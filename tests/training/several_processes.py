"""A training in several processes; each writes a file for each way to train into a folder, which is the argument.

Started by a launcher, this is one of the processes. Started alone, it forks two, which have nothing to import any more.
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

SHOWN: list[str] = []


def tell(way: str, curve: Any) -> None:
    """Write what a process knows of its training, and whether it showed something; printed lines of two would mix."""
    known = {"way": way, "rank": curve.process.rank, "processes": curve.process.world_size, "device": curve.device}
    sentence = next((line for line in curve.to_report().sentences if line.startswith("This is process")), "")
    told = {**known, "epochs": len(curve.epoch_samples), "shown": len(SHOWN), "sentence": sentence}
    Path(sys.argv[1], f"{way}-{curve.process.rank}.json").write_text(json.dumps(told), "utf-8")
    SHOWN.clear()


def model() -> BertForTokenClassification:
    """Return a small model, the same in every process."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return BertForTokenClassification(BertConfig(vocab_size=50, num_labels=3, **sizes))


def samples() -> list[dict[str, torch.Tensor]]:
    """Return samples of random tokens."""
    return [{"input_ids": torch.randint(5, 50, (8,)), "labels": torch.randint(0, 3, (8,))} for _ in range(16)]


def loop() -> None:
    """Train in a loop with Accelerate."""
    accelerator = Accelerator(cpu=True)
    trained, loader = model(), torch.utils.data.DataLoader(samples(), batch_size=4)
    trained, optimizer, loader = accelerator.prepare(trained, torch.optim.SGD(trained.parameters(), 0.1), loader)
    epochs = nb.epochs(3, accelerator, live=True)
    for _epoch in epochs:
        for batch in loader:
            accelerator.backward(trained(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
            epochs.step()
    tell("loop", epochs.curve)


def trainer(folder: Path) -> None:
    """Train with transformers' Trainer."""
    quiet = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no"}
    size = {"num_train_epochs": 2, "per_device_train_batch_size": 4}
    arguments = TrainingArguments(output_dir=str(folder), use_cpu=True, **size, **quiet)
    callback = nb.training.callback("trainer", "cpu", live=True)
    Trainer(model(), arguments, train_dataset=samples(), callbacks=[callback]).train()
    tell("trainer", callback.curve)


def show(value: Any) -> None:
    """Stand for the front end of a notebook."""
    SHOWN.append(type(value).__name__)


def train(folder: str) -> None:
    """Train in both ways."""
    IPython.display.display = show
    loop()
    trainer(Path(folder))


def forked(folder: str) -> None:
    """Train in a process that knows its rank from Accelerate, as one that a launcher has told."""
    rank = str(torch.distributed.get_rank())
    os.environ.update(RANK=rank, LOCAL_RANK=rank)
    train(folder)


if __name__ == "__main__":
    if "RANK" in os.environ:
        train(sys.argv[1])
    else:
        gc.freeze()  # What was imported need not be collected again and again.
        debug_launcher(forked, (sys.argv[1],))
