"""What the release of cached memory between steps costs, in a training with batches of many lengths.

    python benchmarks/release.py [--device cuda] [--model small|base] [--batch-size 16] [--steps 200] [--rounds 3]

Each configuration trains the same batches, in turn, and starts with an empty cache:

- bare: a loop without hooks;
- no release: hooks with ``release_when=None``;
- default: hooks as they are;
- eager: releases as soon as the cache grows by a tenth and 0.1 GiB, within 2 % of the time;
- always: the same without a time limit, as a loop that empties the cache after every step.

"eager" and "always" change the limits of the package. They show the cost if the cache grows more than that of CUDA.
The time per step is the time of the whole run, which includes the new blocks that the next step allocates. The bar for "default" is 2 % over "no release".
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from dataclasses import dataclass
from statistics import median

import torch
from transformers import BertConfig, BertForTokenClassification

import openmed_nb as nb
from openmed_nb.devices.registry import get_device
from openmed_nb.training import epochs
from openmed_nb.training.curve import CacheReleases

BAR = 0.02
MIB = 1 << 20
NUM_READS = 1000
WARM_UP_STEPS = 10
SIZES = {"small": (128, 2), "base": (768, 12)}
# Factor, minimum excess in bytes, and maximum fraction of the time of the releases of each configuration.
LIMITS: dict[str, tuple[float | None, int, float]] = {
    "bare": (None, 1 << 30, 0.02),
    "no release": (None, 1 << 30, 0.02),
    "default": (epochs.DEFAULT_RELEASE_FACTOR, epochs.MIN_EXCESS_BYTES, epochs.MAX_TIME_FRACTION),
    "eager": (1.1, 100 << 20, 0.02),
    "always": (1.1, 100 << 20, 1.0),
}


@dataclass(frozen=True)
class Measurement:
    """Result of one run: seconds per step, peak and reserved memory at the end in bytes, and the releases."""

    seconds: float
    peak: int
    reserved: int
    releases: CacheReleases


def make_model(device: str, size: str) -> torch.nn.Module:
    """Return a BERT with random weights."""
    hidden_size, layers = SIZES[size]
    config = BertConfig(
        hidden_size=hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=hidden_size // 64,
        intermediate_size=4 * hidden_size,
        num_labels=3,
    )
    torch.manual_seed(0)
    return BertForTokenClassification(config).to(device).train()


def make_batches(steps: int, rows: int, device: str) -> list[dict[str, torch.Tensor]]:
    """Return batches on the device; each has another length from 16 to 512, as in an epoch without padding to buckets."""
    lengths = random.Random(0)  # noqa: S311 - lengths of batches
    batches = []
    for _ in range(steps):
        ids = torch.randint(1000, 30000, (rows, lengths.randint(16, 512)), device=device)
        batches.append({"input_ids": ids, "labels": ids % 3})
    return batches


def train(name: str, device: str, model: torch.nn.Module, batches: list[dict[str, torch.Tensor]]) -> Measurement:
    """Train the batches in one configuration, after a warm-up with the longest batch."""
    backend = get_device(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    longest = max(batches, key=lambda batch: batch["input_ids"].shape[1])
    warm_up = [longest] * WARM_UP_STEPS
    hooks = None
    start = 0.0
    for index, batch in enumerate([*warm_up, *batches]):
        if index == WARM_UP_STEPS:
            gc.collect()
            backend.empty_cache()
            backend.reset_peak_memory_stats()
            backend.synchronize()
            factor, epochs.MIN_EXCESS_BYTES, epochs.MAX_TIME_FRACTION = LIMITS[name]
            hooks = None if name == "bare" else nb.training.EpochHooks(device, release_when=factor)
            start = time.perf_counter()
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if hooks is not None:
            hooks.step()
    backend.synchronize()
    seconds = (time.perf_counter() - start) / len(batches)
    stats = backend.memory_stats()
    releases = CacheReleases() if hooks is None else hooks.releases
    return Measurement(seconds, stats.peak or 0, stats.reserved or 0, releases)


def time_memory_read(device: str) -> float:
    """Return the seconds of one query of the memory statistics."""
    backend = get_device(device)
    start = time.perf_counter()
    for _ in range(NUM_READS):
        backend.memory_stats()
    return (time.perf_counter() - start) / NUM_READS


def main() -> None:
    """Print time per step, peaks and releases of each configuration, and whether the bar is reached."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default=None)
    parser.add_argument("--model", default="small", choices=SIZES)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    device = nb.use(arguments.device or "auto").device
    print(f"{device}, torch {torch.__version__}, {arguments.model} BERT, {arguments.steps} steps per run")
    batches = make_batches(arguments.steps, arguments.batch_size, device)
    runs: dict[str, list[Measurement]] = {name: [] for name in LIMITS}
    for _ in range(arguments.rounds):
        for name in LIMITS:
            model = make_model(device, arguments.model)
            runs[name].append(train(name, device, model, batches))
            del model
    print(f"One read of the memory statistics: {1e6 * time_memory_read(device):.1f} us")
    header = ("ms/step", "to bare", "peak MiB", "reserved MiB", "releases", "in them")
    print(f"{'':12}" + "".join(f"{title:>14}" for title in header))
    seconds = {name: median(run.seconds for run in measured) for name, measured in runs.items()}
    for name, measured in runs.items():
        last = measured[-1]
        cells = (
            f"{1000 * seconds[name]:.2f}",
            f"{seconds[name] / seconds['bare'] - 1:+.1%}",
            f"{last.peak / MIB:.0f}",
            f"{last.reserved / MIB:.0f}",
            f"{last.releases.count}",
            f"{last.releases.seconds / (last.releases.training_seconds or 1):.2%}",
        )
        print(f"{name:12}" + "".join(f"{cell:>14}" for cell in cells))
    overhead = seconds["default"] / seconds["no release"] - 1
    verdict = "reached" if overhead < BAR else "MISSED"
    print(f"default over no release: {overhead:+.2%}: {verdict} (bar {BAR:.0%})")


if __name__ == "__main__":
    main()
