"""Training with several processes: each process writes a JSON file into the directory argument.

If a launcher starts this script, it is one of the processes. Otherwise it forks two processes, which need no imports.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path

import IPython.display
import torch
from accelerate import Accelerator, debug_launcher

import openmed_nb as nb


def train(folder: str) -> None:
    """Train in a loop with Accelerate, and write the state of the process, because printed lines would mix."""
    displayed: list[object] = []
    IPython.display.display = displayed.append  # In place of the front end of a notebook.
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(8, 2)
    loader = torch.utils.data.DataLoader(torch.ones(16, 8), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), loader)
    epochs = nb.epochs(2, accelerator, live=True)
    for _epoch in epochs:
        for batch in loader:
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            epochs.step()
    curve = epochs.curve
    result = {
        "processes": curve.process.world_size,
        "device": curve.device,
        "epochs": len(curve.epoch_samples),
        "displayed": len(displayed),
    }
    Path(folder, f"{curve.process.rank}.json").write_text(json.dumps(result), "utf-8")


def train_forked(folder: str) -> None:
    """Train in a forked process, which has the variables of a launcher."""
    os.environ["RANK"] = str(torch.distributed.get_rank())
    train(folder)


if __name__ == "__main__":
    if "RANK" in os.environ:
        train(sys.argv[1])
    else:
        gc.freeze()  # Imported objects need not be collected repeatedly.
        debug_launcher(train_forked, (sys.argv[1],))
