"""Measure a disease recognizer on the test sentences of the NCBI Disease and BC5CDR corpora.

    python scripts/evaluate_bundled_model.py MODEL DATA --minimum-ncbi 84 --minimum-bc5cdr 79

DATA holds `ncbi-disease/*.tsv` and `bc5cdr/disease/*.tsv`, one "word<TAB>label" per line and an empty line after
each sentence. The metric is strict IOB2 entity F1, each word labeled as its first sub-token.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoModelForTokenClassification, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

CORPORA = {"ncbi": "ncbi-disease", "bc5cdr": "bc5cdr/disease"}


class Sentence(NamedTuple):
    """The words of one sentence and their IOB2 labels."""

    words: list[str]
    labels: list[str]


class Score(NamedTuple):
    """Entity-level precision, recall and F1 in percent."""

    precision: float
    recall: float
    f1: float


def read_sentences(path: Path) -> list[Sentence]:
    """Read an IOB2 file of one word and label per line."""
    sentences = []
    for block in path.read_text(encoding="utf-8").strip().split("\n\n"):
        words, labels = zip(*(line.split("\t") for line in block.splitlines()), strict=True)
        sentences.append(Sentence(list(words), [label.upper() for label in labels]))
    return sentences


def entity_spans(labels: Sequence[str]) -> set[tuple[int, int, str]]:
    """Return the (start, end, type) spans of IOB2 labels; an I- label that follows no entity of its type is ignored.

    >>> sorted(entity_spans(["B-DISEASE", "I-DISEASE", "O", "I-DISEASE", "B-DISEASE"]))
    [(0, 2, 'DISEASE'), (4, 5, 'DISEASE')]
    """
    spans = set()
    start, entity_type = 0, ""
    for position, label in enumerate([*labels, "O"]):
        if entity_type and label != f"I-{entity_type}":
            spans.add((start, position, entity_type))
            entity_type = ""
        if label.startswith("B-"):
            start, entity_type = position, label[2:]
    return spans


def score_entities(gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> Score:
    """Compare entities that must agree in start, end and type.

    >>> score_entities([["B-DISEASE", "I-DISEASE", "O", "B-DISEASE"]], [["B-DISEASE", "O", "O", "B-DISEASE"]])
    Score(precision=50.0, recall=50.0, f1=50.0)
    """
    pairs = [(entity_spans(expected), entity_spans(actual)) for expected, actual in zip(gold, predicted, strict=True)]
    correct = sum(len(expected & actual) for expected, actual in pairs)
    expected_count = sum(len(expected) for expected, _ in pairs)
    found_count = sum(len(actual) for _, actual in pairs)
    return Score(
        precision=100 * correct / max(found_count, 1),
        recall=100 * correct / max(expected_count, 1),
        f1=200 * correct / max(expected_count + found_count, 1),
    )


@torch.inference_mode()
def predict_labels(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sentences: Sequence[Sequence[str]], batch_size: int = 64
) -> list[list[str]]:
    """Label every word as its first sub-token; words beyond the maximum length get "O"."""
    model.eval()
    predicted = [["O"] * len(words) for words in sentences]
    by_length = sorted(range(len(sentences)), key=lambda index: len(sentences[index]))
    for start in range(0, len(by_length), batch_size):
        indices = by_length[start : start + batch_size]
        batch = tokenizer(
            [sentences[index] for index in indices],
            is_split_into_words=True,
            truncation=True,
            padding=True,
            return_tensors="pt",
        )
        label_ids = model(**batch.to(model.device)).logits.argmax(-1).tolist()
        for row, index in enumerate(indices):
            # Walking backwards lets the first sub-token of a word have the last say.
            for word, label_id in reversed(list(zip(batch.word_ids(row), label_ids[row], strict=True))):
                if word is not None:
                    predicted[index][word] = model.config.id2label[label_id]
    return predicted


def evaluate(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, data: Path, split: str) -> dict[str, Score]:
    """Score the model on one split ("devel" or "test") of both corpora."""
    scores = {}
    for name, folder in CORPORA.items():
        sentences = read_sentences(data / folder / f"{split}.tsv")
        predicted = predict_labels(model, tokenizer, [sentence.words for sentence in sentences])
        scores[name] = score_entities([sentence.labels for sentence in sentences], predicted)
    return scores


def record_metrics(folder: Path, scores: dict[str, dict[str, Score]]) -> None:
    """Add the scores of each split to the model's `metrics.json`."""
    path = folder / "metrics.json"
    metrics = json.loads(path.read_text()) if path.exists() else {}
    for split, by_corpus in scores.items():
        metrics[split] = {
            corpus: {name: round(value, 2) for name, value in score._asdict().items()}
            for corpus, score in by_corpus.items()
        }
    path.write_text(json.dumps(metrics, indent=2) + "\n")


def main() -> None:
    """Print a table of scores and fail when one misses its minimum."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of the model and its tokenizer")
    parser.add_argument("data", type=Path, help="folder of the corpora")
    parser.add_argument("--dev", action="store_true", help="also score the development sentences")
    parser.add_argument("--record", action="store_true", help="write the scores to MODEL/metrics.json")
    for name in CORPORA:
        parser.add_argument(f"--minimum-{name}", type=float, default=0.0, metavar="F1", help="test F1 to reach")
    arguments = parser.parse_args()

    model = AutoModelForTokenClassification.from_pretrained(arguments.model)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    splits = ["devel", "test"] if arguments.dev else ["test"]
    scores = {split: evaluate(model, tokenizer, arguments.data, split) for split in splits}

    print(f"{'corpus':8} {'split':6} {'precision':>9} {'recall':>7} {'F1':>6}")
    for split, by_corpus in scores.items():
        for name, score in by_corpus.items():
            print(f"{name:8} {split:6} {score.precision:9.2f} {score.recall:7.2f} {score.f1:6.2f}")
    if arguments.record:
        record_metrics(arguments.model, scores)
    missed = [name for name in CORPORA if scores["test"][name].f1 < getattr(arguments, f"minimum_{name}")]
    if missed:
        sys.exit(f"F1 below its minimum: {', '.join(missed)}")


if __name__ == "__main__":
    main()
