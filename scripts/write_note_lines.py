"""Write lines in the forms of clinical notes, with their diseases labeled, to train the included models on.

    python scripts/write_note_lines.py DATA

DATA holds `ncbi-disease/train.tsv`, `bc5cdr/disease/train.tsv`, and `clinical-notes/aci_train.csv` and `mts_train.csv`
(ACI-Bench and MTS-Dialog). The command writes `DATA/note-lines/train.tsv` in the format of the corpora, and
`DATA/note-lines/unlabelled.txt`. A training line is one of:

- a pattern of `scripts/note_lines` with its slots filled: `{abbr}` by an abbreviation, `{drug}` by a drug, and so on;
- a sentence of a corpus in which diseases are replaced by synonyms.

The unlabeled lines are those of the two sets of notes. Nothing that `TestSentences` knows is written.
"""

import argparse
import csv
import math
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from evaluate_bundled_model import CORPORA, NOTES, Sentence, entity_spans, read_notes, read_sentences, split_words

TABLES = Path(__file__).parent / "note_lines"
LINES = {"with": 100_000, "without": 150_000}
NOTE_COLUMNS = {"aci_train.csv": "note", "mts_train.csv": "section_text"}
RUN = 8
"""Words in a row that a training line may not share with a test sentence."""

SHORT = 5
"""Letters of a term that may have several senses."""

KIND_FRACTIONS = {"abbr": 0.45, "name": 0.35, "lay": 0.2}
"""How often a disease is of each kind. Half of the diseases of clinical notes are abbreviations."""

CAPITALS = re.compile(r"\b[A-Z]{2,6}\b")
CHOICE = re.compile(r"<([^<>]*\|[^<>]*)>")
PIECE = re.compile(r"\[(?P<literal>[^]]*)\]|\{(?P<slot>\w+)\}|(?P<plain>[^[{]+)")


class Weighted(NamedTuple):
    """Terms and how often each is to be chosen."""

    terms: list[str]
    weights: list[float]


class TestSentences:
    """The sentences that the models are measured on, and that no training line may contain."""

    def __init__(self, notes: Path) -> None:
        """Remember the words of the test sentences."""
        self._runs: set[tuple[str, ...]] = set()
        for note in read_notes(notes):
            words = _fold(split_words(note.text))
            self._runs.update(_runs(words, min(RUN, len(words))))
        self._lengths = {len(run) for run in self._runs}

    def contain(self, words: list[str]) -> bool:
        """Say whether a line contains a test sentence, or `RUN` words in a row of one."""
        folded = _fold(words)
        return any(run in self._runs for length in self._lengths for run in _runs(folded, length))


def _fold(words: list[str]) -> list[str]:
    """Leave out punctuation and case."""
    return [word.casefold() for word in words if word.isalnum()]


def _runs(words: list[str], length: int) -> Iterator[tuple[str, ...]]:
    """Yield the words in a row of a length."""
    for start in range(len(words) - length + 1):
        yield tuple(words[start : start + length])


def read_rows(name: str) -> list[list[str]]:
    """Read a table of `scripts/note_lines` without its comments."""
    lines = (TABLES / name).read_text("utf-8").splitlines()
    return [line.split("\t") for line in lines if line.strip() and not line.startswith("# ")]


def read_terms() -> dict[str, Weighted]:
    """Read the terms of each slot."""
    slots: dict[str, Weighted] = {}

    def add(slot: str, term: str, weight: float = 1.0) -> None:
        terms, weights = slots.setdefault(slot, Weighted([], []))
        terms.append(term)
        weights.append(math.sqrt(weight))  # Rare terms need enough lines too.

    for row in read_rows("abbreviations.tsv"):
        add("abbr" if row[2] == "disease" else "symptom", row[0], float(row[3]))
    for term, kind, weight in read_rows("names.tsv"):
        add(kind, term, float(weight))
    for term, category in read_rows("words.tsv"):
        add(category, term)
    for word, kind in read_rows("modifiers.tsv"):
        add(kind if kind in ("outside", "after") else "inside", word)
    return slots


def read_capitals() -> list[str]:
    """Return the words in capitals, which the models tell from the same letters in lower case."""
    abbreviations = {row[0] for row in read_rows("abbreviations.tsv")}
    patterns = "\n".join(row[0] for path in TABLES.glob("*.txt") for row in read_rows(path.name))
    counts = Counter(CAPITALS.findall(patterns))
    frequent = {word for word, count in counts.items() if count > 3}  # Most of them are not diseases, such as "GCS".
    return sorted(word for word in abbreviations | frequent if CAPITALS.fullmatch(word))


class LineWriter:
    """Fill the slots of patterns at random."""

    def __init__(self, seed: int, mentions: Iterable[str] = ()) -> None:
        """Read the terms of the slots.

        Args:
            seed: Seed of all choices.
            mentions: Diseases of the corpora, which are names too.

        """
        self._random = random.Random(seed)
        self._slots = read_terms()
        names = self._slots["name"]
        for mention in mentions:
            names.terms.append(mention)
            names.weights.append(0.3)

    def write(self, pattern: str) -> Sentence:
        """Return the words of a filled pattern and their labels."""
        while choice := CHOICE.search(pattern):
            chosen = self._random.choice(choice[1].split("|"))
            pattern = pattern[: choice.start()] + chosen + pattern[choice.end() :]
        if self._random.random() < 0.3:
            pattern = pattern.removesuffix(".")
        if pattern.count(",") > 1 and self._random.random() < 0.2:
            pattern = pattern.replace(",", self._random.choice([";", "/", "+", "-", ""]))
        change_case = self._random.choices([str, str.lower, str.upper], [0.65, 0.25, 0.1])[0]
        pattern = re.sub(r"\\[nrt]", " ", pattern)  # The tokenizer ignores which white space it is.
        sentence = Sentence([], [])
        for piece in PIECE.finditer(pattern):
            if piece["literal"]:
                self._mark(sentence, piece["literal"])
            elif piece["slot"] in ("disease", "name", "abbr", "lay", "symptom"):
                self._fill_disease(sentence, piece["slot"])
            elif piece["slot"]:
                self._add(sentence, self._fill(piece["slot"]))
            else:
                self._add(sentence, piece["plain"])
        return Sentence([change_case(word) for word in sentence.words], sentence.labels)

    def _fill_disease(self, sentence: Sentence, slot: str) -> None:
        kind = slot
        if slot == "disease":
            kind = self._random.choices(list(KIND_FRACTIONS), list(KIND_FRACTIONS.values()))[0]
        term = self._misspell(self._choose(kind))
        change = self._random.random() if kind in ("name", "abbr") else 1.0
        if change < 0.1:
            self._add(sentence, self._choose("outside"))
        elif change < 0.35:
            term = f"{self._choose('inside')} {term}"
        elif change < 0.4:
            term = f"{self._choose('inside')} {self._choose('inside')} {term}"
        elif change < 0.45:
            term = f"{term} of the {self._choose('anatomy')}"
        elif change < 0.5:
            term = f"{term} {self._choose('after')}"
        self._mark(sentence, term)

    def _fill(self, slot: str) -> str:
        if slot == "number":
            return str(self._random.randint(0, 300))
        if slot == "age":
            return str(self._random.randint(1, 99))
        if slot == "decimal":
            return f"{self._random.uniform(0.1, 20):.1f}"
        return self._choose(slot)

    def _choose(self, slot: str) -> str:
        return self._random.choices(*self._slots[slot])[0]

    def _misspell(self, term: str) -> str:
        """Leave out or swap letters of few long terms."""
        if len(term) < 7 or self._random.random() > 0.03:
            return term
        position = self._random.randrange(1, len(term) - 2)
        swapped = term[position + 1] + term[position] if self._random.random() < 0.5 else term[position]
        return term[:position] + swapped + term[position + 2 :]

    def _add(self, sentence: Sentence, text: str, first: str = "O", others: str = "O") -> None:
        words = split_words(text)
        sentence.words.extend(words)
        sentence.labels.extend(first if position == 0 else others for position in range(len(words)))

    def _mark(self, sentence: Sentence, text: str) -> None:
        self._add(sentence, text, "B-DISEASE", "I-DISEASE")


class KnownTerms:
    """The terms that are a disease or symptom, or that are none, whatever the text around them."""

    def __init__(self) -> None:
        """Read the long terms of the tables; short ones have several senses."""
        slots = read_terms()
        self._terms: dict[tuple[str, ...], bool] = {}
        for slot in ("drug", "procedure", "device", "test", "imaging", "name", "lay", "symptom"):
            for term in slots[slot].terms:
                if len(term) > SHORT:
                    self._terms[tuple(split_words(term.lower()))] = slot in ("name", "lay", "symptom")
        self._longest = max(map(len, self._terms))

    def find(self, words: list[str]) -> Iterator[tuple[int, int, bool]]:
        """Yield the first and the last word (excluded) of each term, the longest at a place, and whether it is a disease."""
        folded = [word.lower() for word in words]
        start = 0
        while start < len(folded):
            end = min(len(folded), start + self._longest)
            while end > start and tuple(folded[start:end]) not in self._terms:
                end -= 1
            if end > start:
                yield start, end, self._terms[tuple(folded[start:end])]
            start = max(end, start + 1)


def replace_mentions(sentences: Iterable[Sentence], rng: random.Random) -> Iterator[Sentence]:
    """Yield the sentences that mention a known disease, with synonyms in place of such diseases."""
    synonyms = {" ".join(split_words(term.lower())): other.split("|") for term, other in read_rows("synonyms.tsv")}
    for words, labels in sentences:
        changed = False
        new = Sentence([], [])
        position = 0
        for start, end, _ in sorted(entity_spans(labels)):
            replacements = synonyms.get(" ".join(words[start:end]).lower())
            term = words[start:end]
            if replacements:
                term = split_words(rng.choice(replacements))
                changed = True
            new.words.extend(words[position:start] + term)
            new.labels.extend(labels[position:start] + ["B-DISEASE"] + ["I-DISEASE"] * (len(term) - 1))
            position = end
        if changed:
            new.words.extend(words[position:])
            new.labels.extend(labels[position:])
            yield new


def read_clinical_notes(folder: Path) -> Iterator[list[str]]:
    """Yield the words of the lines of ACI-Bench and MTS-Dialog."""
    csv.field_size_limit(10**9)
    for name, column in NOTE_COLUMNS.items():
        with (folder / name).open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                for line in re.split(r"\n|(?<=[.!?])\s+(?=[A-Z])", row[column]):
                    if words := split_words(line):
                        yield words


def write_note_lines(data: Path, seed: int, counts: dict[str, int] = LINES) -> None:
    """Write the training lines and the unlabeled lines of notes."""
    rng = random.Random(seed)
    test = TestSentences(NOTES)
    gold = [sentence for folder in CORPORA.values() for sentence in read_sentences(data / folder / "train.tsv")]
    mentions = {" ".join(words[start:end]).lower() for words, labels in gold for start, end, _ in entity_spans(labels)}
    writer = LineWriter(seed, sorted(mentions))
    sentences = list(replace_mentions(gold, rng))
    print(f"{len(sentences)} sentences of the corpora with synonyms")
    for kind, count in counts.items():
        patterns = [row[0] for path in sorted(TABLES.glob(f"{kind}_*.txt")) for row in read_rows(path.name)]
        print(f"{len(patterns)} patterns {kind} diseases")
        sentences += [writer.write(patterns[index % len(patterns)]) for index in range(count)]

    kept = [sentence for sentence in sentences if sentence.words and not test.contain(sentence.words)]
    rng.shuffle(kept)
    unlabeled = [words for words in read_clinical_notes(data / "clinical-notes") if not test.contain(words)]
    print(f"{len(kept)} training lines, {len(sentences) - len(kept)} left out; {len(unlabeled)} unlabeled lines")

    target = data / "note-lines"
    target.mkdir(exist_ok=True)
    blocks = ["\n".join(map("\t".join, zip(*sentence, strict=True))) for sentence in kept]
    (target / "train.tsv").write_text("\n\n".join(blocks) + "\n", "utf-8")
    (target / "unlabelled.txt").write_text("".join(" ".join(words) + "\n" for words in unlabeled), "utf-8")


def main() -> None:
    """Write the lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder of the corpora")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    write_note_lines(arguments.data, arguments.seed)


if __name__ == "__main__":
    main()
