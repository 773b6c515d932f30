"""What the epoch boundary and the guards cost in a training of a small BERT, as shares of its step.

    python benchmarks/training.py [--device cpu] [--steps 100] [--rounds 3]

Three things are timed alternately, in one run: bare steps, steps with ``hooks.step()`` and the guards, and epoch boundaries.
The cost of one call is the time inside that call, because a fraction of one per cent is less than two runs of the same
steps differ by; what the guards do while the model runs is the difference of forward passes with and without them. The bar
is 1 % of a step for what is done at every step, and for a boundary shared out over an epoch of 500 steps.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from transformers import BertConfig, BertForTokenClassification

import openmed_nb as nb

BAR = 0.01
EPOCH_STEPS = 500
"""Over how many steps the cost of a boundary is shared out: 8,000 notes in batches of 16."""
FORWARD_PASSES = 100
"""How many forward passes are timed with guards, and how many without."""


def small_bert(device: str) -> Any:
    """Return a BERT with two layers of 128, random weights."""
    config = BertConfig(
        hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=512, num_labels=3
    )
    return BertForTokenClassification(config).to(device).train()


def random_batch() -> dict[str, torch.Tensor]:
    """Return 16 rows of 128 tokens with labels."""
    ids = torch.randint(1000, 30000, (16, 128))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.randint(0, 3, (16, 128))}


def timed(work: Callable[[], Any], device: str) -> float:
    """Return the seconds that a piece of work takes, the device's part of it included."""
    start = time.perf_counter()
    work()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter() - start


class Run:
    """A model, its optimizer, and the parts of a step that are timed."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.model = small_bert(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.batch = random_batch()

    def forward(self) -> torch.Tensor:
        """Return the loss of a batch."""
        batch = {name: tensor.to(self.device) for name, tensor in self.batch.items()}
        return self.model(**batch).loss

    def train(self) -> None:
        """Make one step, up to the gradients."""
        self.forward().backward()

    def update(self) -> None:
        """Change the weights."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def bare(self) -> float:
        """Return the seconds of a step without hooks and guards."""
        return timed(lambda: (self.train(), self.update()), self.device)

    def guarded(self, hooks: nb.training.EpochHooks, guards: nb.Guards) -> tuple[float, float, float]:
        """Return the seconds of a step with hooks and guards, and those inside the hooks and inside the guards."""
        start = time.perf_counter()
        checks = timed(lambda: guards.check(self.batch, 1), "cpu")
        timed(self.train, self.device)
        timed(self.update, self.device)
        step = timed(hooks.step, "cpu")
        return time.perf_counter() - start, step, checks


def loss_check(run: Run) -> float:
    """Return the seconds that the guards add to a forward pass."""
    bare, watched, guards = [], [], nb.Guards()
    for _ in range(FORWARD_PASSES):
        bare.append(timed(run.forward, run.device))
        with guards.watch(run.model):
            watched.append(timed(run.forward, run.device))
    return max(0.0, median(watched) - median(bare))


def measure(device: str, steps: int) -> dict[str, float]:
    """Return the median seconds of each thing, over steps that take turns."""
    run, guards, hooks = Run(device), nb.Guards(), nb.training.EpochHooks(device)
    bare, guarded, step, checks = [], [], [], []
    for _ in range(10):
        run.bare()
    for _ in range(steps):
        bare.append(run.bare())
        with guards.watch(run.model):
            for times, measured in zip((guarded, step, checks), run.guarded(hooks, guards), strict=True):
                times.append(measured)
        guards.unwatch()
    boundaries = [timed(hooks.end_epoch, device) for _ in range(5)]
    names = ("bare", "guarded", "hooks", "guards", "boundary")
    times = dict(zip(names, map(median, (bare, guarded, step, checks, boundaries)), strict=True))
    return {**times, "guards": times["guards"] + loss_check(run)}


def fractions(times: dict[str, float]) -> list[tuple[str, float, bool]]:
    """Return each fraction of a bare step, and whether the bar is for it."""
    return [
        ("hooks.step()", times["hooks"] / times["bare"], True),
        ("the guards: check(), and the loss in the forward pass", times["guards"] / times["bare"], True),
        (f"a boundary, shared out over {EPOCH_STEPS} steps", times["boundary"] / times["bare"] / EPOCH_STEPS, True),
        ("whole guarded step against whole bare step, less 1", times["guarded"] / times["bare"] - 1, False),
    ]


def main() -> None:
    """Print the shares, and whether each is below the bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    for round_number in range(1, arguments.rounds + 1):
        times = measure(nb.use(arguments.device).device, arguments.steps)
        bare, boundary = 1000 * times["bare"], 1000 * times["boundary"]
        print(f"Round {round_number}: a bare step {bare:.1f} ms, a boundary {boundary:.0f} ms")
        for what, fraction, barred in fractions(times):
            verdict = (" reached" if fraction < BAR else " MISSED") + f" (bar {BAR:.0%})" if barred else ""
            print(f"  {what}: {fraction:.3%}{verdict}")


if __name__ == "__main__":
    main()
