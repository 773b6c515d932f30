"""Print what annotating costs, as ratios of two things measured alternately in one run.

python benchmarks/annotate.py [CORPORA] [--device cpu|cuda] [--rounds N] [--sweep] [--memory TEXTS] [--json FILE]
python benchmarks/annotate.py CORPORA --device cuda --passes MODEL DTYPE

CORPORA is the folder that ``scripts/train_bundled_model.py`` describes, with ACI-Bench and MTS-Dialog in
``clinical-notes``. Compared are, on the same texts and with the same overlap of windows for long ones:

- the pipeline here against transformers' own, with the best of several batch sizes;
- the pipeline here against the bare forward pass over the very batches that it makes;
- one short text, and 100 one by one, warm;
- on CUDA, the first pass of a process over 20,000 notes against its second, each model and type in a process of its own,
  which ``--passes`` is;
- on the CPU, the peak memory for many short texts from a generator (100,000, or as many as ``--memory`` says) against that
  for 10,000, each in a process of its own with the small bundled model; without CORPORA, only that.

The models are the bundled one and a DistilBERT of 66 million random weights, whose last layer is set so that it
finds as many entities as the bundled model: what is decoded is then as much as it really would be.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
# Otherwise transformers' pipeline switches the threads of the tokenizer off, for both pipelines.
os.environ["TOKENIZERS_PARALLELISM"] = "true"

import numpy as np
import torch
import transformers
from transformers import DistilBertConfig, DistilBertForTokenClassification, TokenClassificationPipeline

from openmed_nb.annotation.forward import pad_batch
from openmed_nb.annotation.pipeline import AnnotationPipeline
from openmed_nb.annotation.stream import chunk_characters, iter_chunks
from openmed_nb.annotation.tokens import WINDOW_CONTEXT as CONTEXT
from openmed_nb.devices.linear import cudnn_attention_disabled, fast_linear, measure_onednn_speedup
from openmed_nb.models.config import OpenMedConfig
from openmed_nb.models.loading import LoadSpec, load_from_spec

STRIDE = 2 * CONTEXT
"""The overlap of transformers' windows that reads as much text twice as the windows here."""

BATCH_SIZES = {"cpu": (1, 8, 32), "cuda": (64, 256)}
AMOUNTS = {"cpu": {"notes": 200}, "cuda": {"sentences": 4000, "notes": 1500}}
# How many times faster than transformers, and at most how many times the bare pass with the bundled model and with the other.
BARS = {"cpu": (1.6, 1.08, 1.08), "cuda": (10.0, 1.35, 1.08)}
NOTES_AN_HOUR = 45  # millions, with the bundled model on one GPU
NUM_TEXTS_SMALL, NUM_TEXTS_LARGE = 10_000, 100_000
NUM_NOTES, PASSES, BARE_PASSES = 20_000, 4, 2
BUDGETS = tuple(256 * 2**power for power in range(9))  # tokens per batch
# How often the pipeline and the bare pass take turns in a round, before transformers' turn.
IN_TURN = {"cpu": 1, "cuda": 7}
SHORT = "Patient with type 2 diabetes mellitus and hypertension."

SHORTS = [
    f"Visit {number}: type 2 diabetes mellitus, no {'further ' * (number % 7)}complaints." for number in range(100)
]

MEMORY = """
import resource, sys
import openmed_nb as nb
texts = (f"Visit {number}: no history of asthma, type 2 diabetes." for number in range(int(sys.argv[1])))
found = nb.annotate(texts, "bundled_small", device="cpu", progress=False)
assert len(found) == int(sys.argv[1])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def sentences(corpora: Path) -> list[str]:
    """Return the sentences of the two corpora, their tokens joined by spaces."""
    files = [*sorted(corpora.glob("ncbi-disease/*.tsv")), *sorted(corpora.glob("bc5cdr/disease/*.tsv"))]
    blocks = [block for file in files for block in file.read_text("utf-8").split("\n\n") if block.strip()]
    return [" ".join(line.split("\t")[0] for line in block.strip().splitlines()) for block in blocks]


def notes(corpora: Path) -> list[str]:
    """Return 1,500 texts of mixed length: visit notes, sections of notes, and abstracts of ten sentences."""
    found = []
    for file in sorted(corpora.glob("clinical-notes/*.csv")):
        with file.open(encoding="utf-8", newline="") as rows:
            found += [row.get("note") or row["section_text"] for row in csv.DictReader(rows)]
    each = sentences(corpora)
    found += [" ".join(each[place : place + 10]) for place in range(0, len(each), 10)][: 1500 - len(found)]
    return found


def sample(texts: list[str], amount: int) -> list[str]:
    """Return a fixed sample of the texts."""
    return random.Random(0).sample(texts, min(amount, len(texts)))  # noqa: S311


def bundled(device: str) -> tuple[Any, Any]:
    """Return the bundled model and its tokenizer."""
    loaded = load_from_spec(LoadSpec.from_name("bundled", OpenMedConfig()), device)
    return loaded.model, loaded.tokenizer


def distilbert(device: str, texts: list[str]) -> tuple[Any, Any]:
    """Return a DistilBERT of 66 million weights that finds about as many entities in texts as the bundled model."""
    model, tokenizer = bundled(device)
    labels = {"id2label": model.config.id2label, "label2id": model.config.label2id}
    torch.manual_seed(0)
    other = DistilBertForTokenClassification(DistilBertConfig(**labels)).eval().to(device)
    inputs = tokenizer(texts, truncation=True, padding=True, return_tensors="pt").to(device)
    mask = inputs["attention_mask"].bool()
    with torch.no_grad():
        other.classifier.weight.mul_(60)
        wanted = beginnings(model(**inputs).logits, mask)
        inputs.pop("token_type_ids", None)
        logits = other(**inputs).logits
        margins = (logits[..., 1:].max(-1).values - logits[..., 0])[mask]
        biases = margins.quantile(torch.linspace(0, 1, 801, device=device))
        outside = torch.tensor([1.0, 0.0, 0.0], device=device)
        found = torch.tensor([beginnings(logits + bias * outside, mask) for bias in biases])
        sparse = torch.arange(len(biases)) > found.argmax()  # beyond the bias with the most entities, fewer are found
        closest = torch.where(sparse, (found - wanted).abs(), wanted + found.max()).argmin()
        other.classifier.bias[0] += biases[closest]
    tokenizer.model_max_length = other.config.max_position_embeddings
    return other, tokenizer


def beginnings(logits: torch.Tensor, mask: torch.Tensor) -> int:
    """Return the number of entities that start in rows of tokens."""
    inside = (logits.argmax(-1) != 0) & mask
    before = torch.nn.functional.pad(inside[:, :-1], (1, 0))
    return int((inside & (~before | (logits.argmax(-1) == 1))).sum())


def seconds(function: Callable[[], Any], device: str) -> float:
    """Return the duration of a function in seconds, including the work of the device."""
    begin = time.perf_counter()
    function()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def batches(pipe: AnnotationPipeline, texts: list[str]) -> list[dict[str, torch.Tensor]]:
    """Return the batches that a pipeline makes of texts, ready on its device."""
    annotator = pipe.default_annotator()
    ready = []
    for chunk in iter_chunks(texts, chunk_characters(annotator.budget)):
        made = annotator.tokenize(chunk)
        plan = annotator.plan_batches(made, annotator.budget)
        inputs = (pad_batch(made.tokens, made.windows, batch, annotator.network) for batch in plan)
        ready += [
            {name: torch.from_numpy(array).to(pipe.device) for name, array in arrays.items()} for arrays in inputs
        ]
    return ready


def bare(model: Any, ready: list[dict[str, torch.Tensor]]) -> None:
    """Run the model over batches and do nothing with what it says; products and attention are those of the pipeline."""
    with torch.no_grad():
        for inputs in ready:
            with (
                fast_linear(model.device, inputs["input_ids"].numel()),
                cudnn_attention_disabled(model.device, model.dtype),
            ):
                model(**inputs)


def compare(model: Any, tokenizer: Any, texts: list[str], device: str, rounds: int) -> dict[str, Any]:
    """Return the times of all ways through the same texts, the median of some rounds, alternately.

    Short passes come several times in a round: those right after a long one of transformers find cold caches.
    """
    parts = {"model": model, "tokenizer": tokenizer, "device": model.device, "aggregation_strategy": "first"}
    ours, theirs = AnnotationPipeline(**parts), TokenClassificationPipeline(**parts, stride=STRIDE)
    ready = batches(ours, texts)
    ways: dict[str, Callable[[], Any]] = {"ours": lambda: ours(texts), "bare": lambda: bare(model, ready)}
    for size in BATCH_SIZES[device]:
        ways[f"transformers {size}"] = lambda size=size: theirs(texts, batch_size=size)
    for way in (*list(ways.values())[:2], lambda: theirs(texts[:8])):
        way()
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _round in range(rounds):
        for name in ["ours", "bare"] * IN_TURN[device] + [*ways][2:]:
            times[name].append(seconds(ways[name], device))
    middle = {name: float(np.median(taken)) for name, taken in times.items()}
    entities = sum(map(len, ours(texts)))
    few = texts[:200]
    pairs = zip(ours(few, transformers_boundaries=True), theirs(few), strict=True)
    same = sum(spans(first) == spans(other) for first, other in pairs)
    fastest = min(taken for name, taken in middle.items() if name.startswith("transformers"))
    return {
        "texts": len(texts),
        "entities": entities,
        f"same spans in {len(few)}": same,
        **{name: round(taken, 3) for name, taken in middle.items()},
        "times faster than transformers": round(fastest / middle["ours"], 2),
        "times the bare forward pass": round(middle["ours"] / middle["bare"], 3),
    }


def spans(entities: list[dict[str, Any]]) -> list[tuple[int, int, str]]:
    """Return the offsets and labels of the entities of a text."""
    return [(entity["start"], entity["end"], entity["entity_group"]) for entity in entities]


def latency(model: Any, tokenizer: Any, device: str, times: int = 60) -> dict[str, Any]:
    """Return the median time of one short text, warm, here and with transformers, alternately."""
    parts = {"model": model, "tokenizer": tokenizer, "device": model.device, "aggregation_strategy": "first"}
    ours, theirs = AnnotationPipeline(**parts), TokenClassificationPipeline(**parts, stride=STRIDE)
    ratios, middle = {}, {}
    for work, texts, turns in (("one", [SHORT], times), ("100 one by one", SHORTS, max(3, times // 12))):
        taken = {"ours": [], "theirs": []}
        for turn in range(turns + turns // 10 + 1):
            for name, pipe in (("ours", ours), ("theirs", theirs)):
                once = seconds(lambda pipe=pipe, texts=texts: [pipe(text) for text in texts], device)
                taken[name] += [once] if turn > turns // 10 else []  # the first are not warm
        middle[work] = {name: float(np.median(each)) for name, each in taken.items()}
        ratios[work] = round(middle[work]["ours"] / middle[work]["theirs"], 3)
    return {
        "openmed_nb ms": round(1000 * middle["one"]["ours"], 2),
        "transformers ms": round(1000 * middle["one"]["theirs"], 2),
        "openmed_nb / transformers": ratios["one"],
        "openmed_nb / transformers, 100 one by one": ratios["100 one by one"],
    }


def memory(most: int) -> dict[str, Any]:
    """Return the peak memory of a process that annotates few and many short texts of a generator, in MiB."""
    peaks = {}
    for amount in (NUM_TEXTS_SMALL, most):
        # The peak of a process counts the one that started it, at that moment: a shell, which is small.
        command = ["sh", "-c", '"$@"; exit $?', "sh", sys.executable, "-c", MEMORY, str(amount)]
        peaks[amount] = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout) / 1024
    return {f"{amount:,} texts MiB": round(peak) for amount, peak in peaks.items()} | {
        "ratio": round(peaks[most] / peaks[NUM_TEXTS_SMALL], 2)
    }


def sweep(model: Any, tokenizer: Any, texts: list[str], device: str) -> dict[str, Any]:
    """Return the time for texts with each budget of tokens."""
    pipe = AnnotationPipeline(model=model, tokenizer=tokenizer, device=model.device, aggregation_strategy="first")
    pipe(texts)
    return {
        str(tokens): round(seconds(lambda tokens=tokens: pipe(texts, batch_tokens=tokens), device), 3)
        for tokens in BUDGETS
    }


def passes(corpora: Path, name: str, dtype: str) -> dict[str, Any]:
    """Return the times of this process's first passes over many notes, and of the bare forward pass over their batches."""
    texts = random.Random(0).choices(notes(corpora), k=NUM_NOTES)  # noqa: S311
    model, tokenizer = bundled("cuda") if name == "bundled" else distilbert("cuda", texts[:50])
    pipe = AnnotationPipeline(
        model=model.to(getattr(torch, dtype)), tokenizer=tokenizer, device=model.device, aggregation_strategy="first"
    )
    taken = [seconds(lambda: pipe(texts), "cuda") for _ in range(PASSES)]
    ready = batches(pipe, texts)
    least = min(seconds(lambda: bare(model, ready), "cuda") for _ in range(BARE_PASSES))
    return {
        "passes, seconds": [round(seconds, 2) for seconds in taken],
        "bare, seconds": round(least, 2),
        "characters": sum(map(len, texts)),
        "million notes an hour": round(3600 * len(texts) / np.median(taken[1:]) / 1e6, 1),
        "first pass / second": round(taken[0] / taken[1], 2),
        "times the bare forward pass, many notes": round(float(np.median(taken[1:])) / least, 2),
    }


def measurements(asked: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each measurement with its name."""
    device = asked.device
    if asked.corpora is None:
        yield "peak memory", memory(asked.memory)
        return
    sources = {"sentences": sentences, "notes": notes}
    works = {name: sample(sources[name](asked.corpora), amount) for name, amount in AMOUNTS[device].items()}
    some = next(iter(works.values()))[:50]
    for name, make in (("bundled", lambda: bundled(device)), ("DistilBERT 66M", lambda: distilbert(device, some))):
        model, tokenizer = make()
        for work, texts in works.items():
            yield f"{name}, {len(texts):,} {work}", compare(model, tokenizer, texts, device, asked.rounds)
            if asked.sweep:
                yield f"{name}, {work}, seconds by batch_tokens", sweep(model, tokenizer, texts, device)
        yield f"{name}, one short text", latency(model, tokenizer, device)
    if device == "cpu":
        yield "peak memory", memory(asked.memory)
        return
    for name, dtype in itertools.product(("bundled", "DistilBERT"), ("float32", "bfloat16")):
        command = [sys.executable, __file__, asked.corpora, "--device", "cuda", "--passes", name, dtype]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        yield f"{name}, {dtype}, {NUM_NOTES:,} notes", json.loads(done.stdout.splitlines()[-1])


def verdicts(metrics: dict[str, dict[str, Any]], device: str) -> Iterator[str]:
    """Yield a line for each metric with a bar: its name, its value, the bar, and whether it is reached."""
    faster, small, large = BARS[device]
    bars = {
        "times faster than transformers": (">=", faster),
        "openmed_nb / transformers": ("<=", 1.0),
        "openmed_nb / transformers, 100 one by one": ("<=", 1.0),
        "first pass / second": ("<=", 1.3),
        "ratio": ("<=", 1.2),
    }
    for work, measured in metrics.items():
        of_the_model = {"times the bare forward pass": ("<=", large)}
        if work.startswith("bundled"):
            of_the_model = {
                "times the bare forward pass": ("<=", small),
                "million notes an hour": (">=", NOTES_AN_HOUR),
            }
        for name, (side, bar) in {**bars, **of_the_model}.items():
            if name in measured:
                reached = measured[name] >= bar if side == ">=" else measured[name] <= bar
                verdict = "reached" if reached else "MISSED"
                yield f"{work:<34}{name:<34}{measured[name]:>6}  {side} {bar:<6}{verdict}"


def main() -> None:
    """Measure, and print as a table and as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpora", type=Path, nargs="?", help="without it, only the peak memory is measured")
    parser.add_argument("--device", choices=sorted(AMOUNTS), default="cpu")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sweep", action="store_true", help="also try several values of batch_tokens")
    parser.add_argument(
        "--memory", type=int, default=NUM_TEXTS_LARGE, metavar="TEXTS", help="how many short texts are many"
    )
    parser.add_argument("--passes", nargs=2, metavar=("MODEL", "DTYPE"), help="only the passes of this process")
    parser.add_argument("--json", type=Path, help="a file for the metrics")
    asked = parser.parse_args()
    transformers.logging.set_verbosity_error()
    if asked.passes:
        print(json.dumps(passes(asked.corpora, *asked.passes)))
        return
    gpu = (
        f", {torch.cuda.get_device_name()}"
        if asked.device == "cuda"
        else f", oneDNN gain {measure_onednn_speedup():.2f}"
    )
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {torch.get_num_threads()} threads{gpu}")
    metrics = {}
    for name, measured in measurements(asked):
        metrics[name] = measured
        print(name, *(f"  {key:<32}{value}" for key, value in measured.items()), sep="\n", flush=True)
    print(*verdicts(metrics, asked.device), sep="\n")
    print(json.dumps(metrics))
    if asked.json:
        asked.json.write_text(json.dumps(metrics, indent=2), "utf-8")


if __name__ == "__main__":
    main()
