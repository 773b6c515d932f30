"""Print what a cluster of workers on this computer gives, as ratios of two things measured alternately in one run.

python benchmarks/cluster.py [--device cpu|cuda] [--texts N] [--rounds N] [--many N] [--json FILE]

Compared are, over invented notes with the bundled model:

- two workers against one, and four where there are as many GPUs: on the CPU with one thread each, on CUDA with a GPU each and
  also in bfloat16; in addition one process without Dask;
- what comes back with what one process finds;
- on the CPU, the memory of the client for many short texts of a generator against that for 10,000, sampled while they run.
  Nothing is found in these texts by the small model made for that; of what is found, 16 bytes for each entity of a short text are kept.

The faults of workers are tests, with their metrics: ``tests/distributed/test_faults.py``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from distributed import Client, LocalCluster

import openmed_nb as nb

PROBLEMS = ("type 2 diabetes mellitus", "asthma", "hypertension", "chronic kidney disease", "migraine", "pneumonia")
FILLER = (
    "The patient was seen in clinic today and reports feeling well.",
    "Vital signs were stable and the examination was unremarkable.",
    "We discussed diet, exercise and the importance of taking medication every day.",
    "Follow-up in three months, or sooner if symptoms return.",
)
SENTENCES = (4, 24)
"""How many sentences a note has."""

NUM_TEXTS_SMALL, NUM_TEXTS_LARGE = 10_000, 1_000_000
BARS = {"cpu": {2: 1.7}, "cuda": {2: 1.9, 4: 3.6}}
MEMORY_BAR = 1.3
TEXTS = {"cpu": 1500, "cuda": 80_000}

MEMORY = """
import sys, threading, time
import psutil
import openmed_nb as nb

def main(count, model):
    peak, process = [0], psutil.Process()

    def watch():
        while True:
            peak[0] = max(peak[0], process.memory_info().rss)
            time.sleep(0.02)

    with nb.cluster(n=2, device="cpu") as cluster:
        threading.Thread(target=watch, daemon=True).start()
        texts = (f"Visit {number}." for number in range(count))
        found = nb.annotate(texts, model, client=cluster.client, progress=False)
        assert len(found) == count
    print(peak[0])

if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
"""


def note(number: int) -> str:
    """Return an invented note, the same every time."""
    chosen = random.Random(number)  # noqa: S311
    sentences = chosen.choices(FILLER, k=chosen.randint(*SENTENCES))
    sentences.insert(chosen.randrange(len(sentences)), f"History of {chosen.choice(PROBLEMS)}.")
    return f"Note {number}. {' '.join(sentences)}"


@contextmanager
def single_threaded(n: int) -> Iterator[SimpleNamespace]:
    """Run workers with one CPU thread each. ``nb.cluster`` gives one worker all cores."""
    options = {"threads_per_worker": 1, "memory_limit": 0, "dashboard_address": None}
    with LocalCluster(n_workers=n, **options) as cluster, Client(cluster) as client:
        yield SimpleNamespace(client=client)


def throughput(device: str, texts: list[str], rounds: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield for each type the median times of one process, of one worker and of several, alternately, and what they find."""
    counts = [n for n in (1, 2, 4) if n <= (2 if device == "cpu" else torch.cuda.device_count())]
    ways: dict[str, Any] = {f"{n} workers": lambda n=n: nb.cluster(n=n, device=device) for n in counts}
    if device == "cuda":
        ways["one process"] = nullcontext
    else:
        ways = {f"{n} workers": lambda n=n: single_threaded(n) for n in counts}
    dtypes = ("float32", "bfloat16") if device == "cuda" else ("float32",)
    found, times = {}, {(dtype, name): [] for dtype in dtypes for name in ways}
    for _round in range(rounds):
        for name, way in ways.items():
            with way() as cluster:  # Each alone: the processes of an idle cluster take some of the CPU.
                where = {"device": device, "client": None if cluster is None else cluster.client}
                for dtype in dtypes:
                    nb.annotate(texts[:100], dtype=dtype, progress=False, **where)
                    begin = time.perf_counter()
                    found[dtype, name] = nb.annotate(texts, dtype=dtype, progress=False, **where)
                    times[dtype, name].append(time.perf_counter() - begin)
    if device == "cpu":
        found["float32", "one process"] = nb.annotate(texts, device="cpu", progress=False)
    for dtype in dtypes:
        middle = {name: statistics.median(taken) for (kind, name), taken in times.items() if kind == dtype}
        answers = [each for (kind, _name), each in found.items() if kind == dtype]
        spans = [[[(entity["start"], entity["end"]) for entity in entities] for entities in each] for each in answers]
        yield (
            f"throughput on {device} in {dtype}",
            {
                "texts": len(texts),
                "entities": sum(map(len, spans[0])),
                **{f"{name}, seconds": round(taken, 2) for name, taken in middle.items()},
                "texts per second": round(len(texts) / min(middle.values())),
                "texts with the same spans everywhere": sum(
                    all(answer == first for answer in others) for first, *others in zip(*spans, strict=True)
                ),
                **{f"{n} workers / one": round(middle["1 workers"] / middle[f"{n} workers"], 2) for n in counts[1:]},
            },
        )


def small_model(folder: Path) -> Path:
    """Save a model of a few thousand weights that finds nothing, with the tokenizer of the bundled one."""
    from transformers import BertConfig, BertForTokenClassification

    from openmed_nb.models.registry import BUNDLED

    bundled = BUNDLED["bundled_small"]
    settings = json.loads((bundled / "config.json").read_text("utf-8"))
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 16}
    labels = {
        "id2label": {0: "O", 1: "B-DISEASE", 2: "I-DISEASE"},
        "label2id": {"O": 0, "B-DISEASE": 1, "I-DISEASE": 2},
    }
    model = BertForTokenClassification(BertConfig(vocab_size=settings["vocab_size"], **sizes, **labels))
    model.classifier.bias.data[0] = 10
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(bundled / name, folder)
    return folder


def memory(many: int) -> dict[str, Any]:
    """Return the peak memory of a client that annotates few and many short texts of a generator."""
    peaks = {}
    with tempfile.TemporaryDirectory() as name:
        model, program = small_model(Path(name)), Path(name) / "program.py"
        program.write_text(MEMORY, "utf-8")
        for count in (NUM_TEXTS_SMALL, many):
            command = [sys.executable, program, str(count), model]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            peaks[count] = int(done.stdout) / 2**20
    memory = {f"{count:,} texts, MiB": round(peak, 1) for count, peak in peaks.items()}
    return {**memory, "memory of many / few": round(peaks[many] / peaks[NUM_TEXTS_SMALL], 2)}


def measurements(asked: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each measurement with its name."""
    texts = [note(number) for number in range(asked.texts or TEXTS[asked.device])]
    yield from throughput(asked.device, texts, asked.rounds)
    if asked.device == "cpu" and asked.many:
        yield "memory of the client", memory(asked.many)


def verdicts(metrics: dict[str, dict[str, Any]], device: str) -> Iterator[str]:
    """Yield a line for each metric with a bar."""
    bars = {f"{n} workers / one": (">=", bar) for n, bar in BARS[device].items()}
    bars["memory of many / few"] = "<=", MEMORY_BAR
    for measured in metrics.values():
        for name, (side, bar) in bars.items():
            if name in measured:
                reached = measured[name] >= bar if side == ">=" else measured[name] <= bar
                yield f"{name:<28}{measured[name]:>6}  {side} {bar:<5}{'reached' if reached else 'MISSED'}"


def main() -> None:
    """Measure, and print as a table and as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=sorted(BARS), default="cpu")
    parser.add_argument("--texts", type=int, help="how many notes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--many", type=int, default=NUM_TEXTS_LARGE, help="how many short texts; 0 leaves the memory out"
    )
    parser.add_argument("--json", type=Path, help="a file for the metrics")
    asked = parser.parse_args()
    metrics = {}
    for name, measured in measurements(asked):
        metrics[name] = measured
        print(name, *(f"  {key:<40}{value}" for key, value in measured.items()), sep="\n", flush=True)
    print(*verdicts(metrics, asked.device), sep="\n")
    print(json.dumps(metrics))
    if asked.json:
        asked.json.write_text(json.dumps(metrics, indent=2), "utf-8")


if __name__ == "__main__":
    main()
