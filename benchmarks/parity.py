"""How far reduced types are from float32 with the bundled models: the base of the tolerances, and the speed.

    python benchmarks/parity.py DATA [--device cpu]

DATA holds `ncbi-disease/devel.tsv` and `bc5cdr/disease/devel.tsv`, one "word<TAB>label" per line and an empty line after
each sentence, and `clinical-notes/aci_valid.csv` with notes in the column `note`.
"""

from __future__ import annotations

import argparse
import csv
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from openmed_nb.models.config import OpenMedConfig
from openmed_nb.models.loading import LoadSpec, load_from_spec
from openmed_nb.runbook.checks.parity import pair_from_files, run_parity
from openmed_nb.runbook.checks.validation import median_speedup, time_dtypes

SENTENCES = ("ncbi-disease/devel.tsv", "bc5cdr/disease/devel.tsv")
NOTES = "clinical-notes/aci_valid.csv"


class Texts(NamedTuple):
    """Texts of one kind, with their gold entities where there are some."""

    name: str
    texts: list[str]
    gold: list[list[tuple[int, int, str]]] | None


def read_sentences(path: Path) -> Texts:
    """Read an IOB2 file as texts, with words joined by spaces."""
    blocks = [block.splitlines() for block in path.read_text("utf-8").strip().split("\n\n")]
    pairs = [[line.split("\t") for line in block] for block in blocks]
    texts = [" ".join(word for word, _ in block) for block in pairs]
    return Texts(path.parent.name, texts, [gold_of(block) for block in pairs])


def gold_of(pairs: list[list[str]]) -> list[tuple[int, int, str]]:
    """Return the entities of a sentence in characters."""
    starts = [0, *accumulate(len(word) + 1 for word, _ in pairs)]
    spans: list[tuple[int, int, str]] = []
    for (word, label), start in zip(pairs, starts, strict=False):
        end = start + len(word)
        if label.startswith("B-"):
            spans.append((start, end, label[2:].upper()))
        elif label.startswith("I-") and spans:
            spans[-1] = (spans[-1][0], end, spans[-1][2])
    return spans


def read_notes(path: Path) -> Texts:
    """Read whole notes, which have no gold entities."""
    with path.open(encoding="utf-8") as file:
        return Texts(path.parent.name, [row["note"] for row in csv.DictReader(file)], None)


def main() -> None:
    """Print the measurements of each model, dtype and kind of text."""
    parser = argparse.ArgumentParser()
    parser.add_argument("data", type=Path)
    parser.add_argument("--device", default="cpu")
    asked = parser.parse_args()
    several = [*(read_sentences(asked.data / name) for name in SENTENCES), read_notes(asked.data / NOTES)]
    dtypes = ("float32", "bfloat16", "float16", *(("int8",) if asked.device == "cpu" else ()))
    for model in ("bundled", "bundled_small"):
        for dtype in dtypes:
            for texts in several:
                measure(model, dtype, asked.device, texts)


def measure(model: str, dtype: str, device: str, texts: Texts) -> None:
    """Print the measurements of one model in one dtype on one kind of text."""
    spec = LoadSpec.from_name(model, OpenMedConfig(dtype=dtype))
    pair = pair_from_files(spec, device)
    report = run_parity(pair, texts.texts, texts.gold, gradients=dtype != "int8")
    float32 = pair.candidate.with_model(load_from_spec(spec.in_dtype("float32"), device).model)
    seconds = time_dtypes(float32, pair.candidate, texts.texts, lambda _number: False)
    gain = median_speedup(seconds[1:])  # The first round is the warm-up.
    spans = report.spans
    print(
        f"{model:13} {dtype:8} {texts.name:14} {report.texts:4} texts {report.tokens:6,} tokens",
        f"logits max {report.logit_difference:.2g}",
        f"other labels {report.label_mismatches}",
        f"entities {spans.reference} exact {spans.exact} moved {spans.moved} missing {spans.missing} extra {spans.extra}",
        f"agreement {spans.agreement:.4f}",
        f"recall {report.gold.reference_recall:.4f} -> {report.gold.recall:.4f}" if report.gold else "no gold",
        f"gradients {report.gradients.largest:.2g}" if report.gradients else "no gradients",
        f"{gain:.2f} times as fast as float32",
        sep="; ",
        flush=True,
    )


if __name__ == "__main__":
    main()
