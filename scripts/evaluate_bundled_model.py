"""Measure a disease recognizer on clinical sentences, and on the test sentences of two corpora of abstracts.

    python scripts/evaluate_bundled_model.py MODEL DATA --minimum-ncbi 85.5 --minimum-bc5cdr 79.5

DATA holds `ncbi-disease/*.tsv` and `bc5cdr/disease/*.tsv`, one "word<TAB>label" per line and an empty line after
each sentence. The metric is strict IOB2 entity F1, each word labeled as its first sub-token.

The clinical sentences are those of the file `NOTES`, which are annotated like any text. Their part "development" was read
while the model was trained, and the part "kept" was not.
"""

import argparse
import json
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoModelForTokenClassification, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import openmed_nb as nb

CORPORA = {"ncbi": "ncbi-disease", "bc5cdr": "bc5cdr/disease"}
NOTES = Path(__file__).parents[1] / "tests" / "models" / "clinical_sentences.jsonl"
DISEASES = {"disease", "abbreviation", "lay"}


class Sentence(NamedTuple):
    """The words of one sentence and their IOB2 labels."""

    words: list[str]
    labels: list[str]


class Score(NamedTuple):
    """Entity-level precision, recall and F1 in percent."""

    precision: float
    recall: float
    f1: float


class Mark(NamedTuple):
    """A marked piece of a text: "disease", "abbreviation" or "lay" (diseases), "symptom", or "open" (either is right)."""

    start: int
    end: int
    kind: str

    def overlaps(self, other: "Mark") -> bool:
        """Say whether two marks have a character in common."""
        return self.start < other.end and other.start < self.end


class Note(NamedTuple):
    """A clinical sentence and what readers marked in it."""

    text: str
    form: str
    part: str
    marks: list[Mark]


class Fraction(NamedTuple):
    """How many of some items have a property."""

    count: int
    total: int

    @property
    def interval(self) -> tuple[float, float]:
        """The Wilson 95 % interval of the fraction.

        >>> low, high = Fraction(9, 10).interval
        >>> round(low, 2), round(high, 2)
        (0.6, 0.98)
        """
        z = 1.96
        fraction = self.count / self.total
        center = fraction + z**2 / (2 * self.total)
        margin = z * math.sqrt(fraction * (1 - fraction) / self.total + (z / (2 * self.total)) ** 2)
        return (center - margin) / (1 + z**2 / self.total), (center + margin) / (1 + z**2 / self.total)

    def __str__(self) -> str:
        """The fraction, its interval and its counts."""
        if not self.total:
            return "-"
        low, high = self.interval
        return f"{self.count / self.total:.2f} ({low:.2f} to {high:.2f}; {self.count} of {self.total})"


def split_words(text: str) -> list[str]:
    """Split a text as the tokenizer of the models does, which separates punctuation.

    >>> split_words("Hx: HTN/DM2.")
    ['Hx', ':', 'HTN', '/', 'DM2', '.']
    """
    return re.findall(r"[^\W_]+|[^\w\s]|_", text)


def read_notes(path: Path) -> list[Note]:
    """Read the clinical sentences."""
    rows = map(json.loads, path.read_text("utf-8").splitlines())
    return [Note(row["text"], row["form"], row["part"], [Mark(*mark) for mark in row["marks"]]) for row in rows]


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


def score_notes(notes: Sequence[Note], found: Sequence[Sequence[Mark]]) -> dict[str, Fraction]:
    """Compare what a model marked with what readers marked.

    A mark of the model is right if it overlaps a disease or a symptom, and is not counted if it overlaps open pieces only.

    >>> note = Note("HTN, flu shot", "", "", [Mark(0, 3, "abbreviation"), Mark(5, 8, "open")])
    >>> scores = score_notes([note], [[Mark(0, 3, "DISEASE"), Mark(5, 8, "DISEASE"), Mark(9, 13, "DISEASE")]])
    >>> scores["found"], scores["right marks"]
    (Fraction(count=1, total=1), Fraction(count=1, total=2))
    """
    reached: dict[str, list[bool]] = {kind: [] for kind in ("exact", *sorted(DISEASES))}
    right: list[bool] = []
    false_lines: list[bool] = []
    for note, marks in zip(notes, found, strict=True):
        for gold in note.marks:
            if gold.kind in DISEASES:
                reached[gold.kind].append(any(gold.overlaps(mark) for mark in marks))
                reached["exact"].append(any(gold[:2] == mark[:2] for mark in marks))
        judged = []
        for mark in marks:
            kinds = {gold.kind for gold in note.marks if gold.overlaps(mark)}
            if kinds != {"open"}:
                judged.append(bool(kinds))
        right += judged
        if not any(gold.kind in DISEASES for gold in note.marks):
            false_lines.append(not all(judged))
    outcomes = {
        "found": [each for kind in sorted(DISEASES) for each in reached[kind]],
        "exact": reached["exact"],
        "abbreviations": reached["abbreviation"],
        "lay words": reached["lay"],
        "right marks": right,
        "lines with a false mark": false_lines,
    }
    return {name: Fraction(sum(values), len(values)) for name, values in outcomes.items()}


def evaluate_notes(model: Path, notes: Sequence[Note]) -> dict[str, dict[str, Fraction]]:
    """Score a model on all notes and on those of each form."""
    annotations = nb.annotate([note.text for note in notes], str(model))
    found = [[Mark(entity["start"], entity["end"], entity["entity_group"]) for entity in note] for note in annotations]
    groups = {"all": list(zip(notes, found, strict=True))}
    for note, marks in groups["all"]:
        groups.setdefault(note.form, []).append((note, marks))
    return {form: score_notes(*zip(*pairs, strict=True)) for form, pairs in groups.items()}


def record_metrics(
    folder: Path, scores: dict[str, dict[str, Score]], notes: dict[str, dict[str, dict[str, Fraction]]]
) -> None:
    """Add the scores of each split and part to the model's `figures.json`."""
    path = folder / "figures.json"
    metrics = json.loads(path.read_text()) if path.exists() else {}
    for split, by_corpus in scores.items():
        metrics[split] = {
            corpus: {name: round(value, 2) for name, value in score._asdict().items()}
            for corpus, score in by_corpus.items()
        }
    metrics["notes"] = notes
    path.write_text(json.dumps(metrics, indent=2) + "\n")


def main() -> None:
    """Print tables of scores and fail when one misses its minimum."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of the model and its tokenizer")
    parser.add_argument("data", type=Path, help="folder of the corpora")
    parser.add_argument("--part", choices=["development", "kept"], action="append", help="clinical sentences to score")
    parser.add_argument("--dev", action="store_true", help="also score the development sentences of the corpora")
    parser.add_argument("--record", action="store_true", help="write the scores to MODEL/figures.json")
    for name in CORPORA:
        parser.add_argument(f"--minimum-{name}", type=float, default=0.0, metavar="F1", help="test F1 to reach")
    arguments = parser.parse_args()

    notes = {}
    for part in arguments.part or ["development", "kept"]:
        notes[part] = evaluate_notes(arguments.model, [note for note in read_notes(NOTES) if note.part == part])
        for form, fractions in notes[part].items():
            print(f"{part}, {form}")
            for name, fraction in fractions.items():
                print(f"  {name:24} {fraction}")

    model = AutoModelForTokenClassification.from_pretrained(arguments.model)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    splits = ["devel", "test"] if arguments.dev else ["test"]
    scores = {split: evaluate(model, tokenizer, arguments.data, split) for split in splits}

    print(f"{'corpus':8} {'split':6} {'precision':>9} {'recall':>7} {'F1':>6}")
    for split, by_corpus in scores.items():
        for name, score in by_corpus.items():
            print(f"{name:8} {split:6} {score.precision:9.2f} {score.recall:7.2f} {score.f1:6.2f}")
    if arguments.record:
        record_metrics(arguments.model, scores, notes)
    missed = [name for name in CORPORA if scores["test"][name].f1 < getattr(arguments, f"minimum_{name}")]
    if missed:
        sys.exit(f"F1 below its minimum: {', '.join(missed)}")


if __name__ == "__main__":
    main()
