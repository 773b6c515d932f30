"""Print how often rules of context are correct: those of openmed_nb, OpenMed and medSpaCy, as far as they are installed.

python benchmarks/context_peers.py FILE...

For each value, it prints the precision and the recall with 95% Wilson intervals, and the number of findings with this value. A line
of a FILE is JSON: a text with findings in double brackets, and labels such as "negated family"
(tests/annotation/context_peers.jsonl), or a text and its entities with context (tests/annotation/context_notes.jsonl).

OpenMed reads the sentence of a finding, and medSpaCy the whole text, which PyRuSH splits. medSpaCy 1.3.1 needs spaCy 3.7, so it
has its own environment, of Python 3.11. ``LOGURU_LEVEL`` hides the log of PyRuSH, which names every token:

    python3.11 -m venv medspacy-venv
    medspacy-venv/bin/python -m pip install medspacy==1.3.1 spacy==3.7.5 numpy==1.26.4 PyRuSH==1.0.13
    LOGURU_LEVEL=INFO medspacy-venv/bin/python benchmarks/context_peers.py FILE...
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from itertools import compress
from pathlib import Path
from typing import Any

VALUES = ("negated", "uncertain", "historical", "hypothetical", "family")
MARK = re.compile(r"\[\[(.*?)\]\]", re.DOTALL)
Z_SQUARED = 1.96**2  # Z is the quantile of the normal distribution for an interval of 95%.

# Text and its findings: the offsets of each, and its labels or its columns of context.
Note = tuple[str, list[dict[str, Any]]]


def read_note(line: str) -> Note:
    """Return the note of a line of JSON."""
    row = json.loads(line)
    findings = row.get("entities", [])
    for mark, labels in zip(MARK.finditer(row["text"]), row.get("labels", []), strict=True):
        start = mark.start() - 4 * len(findings)  # Without the brackets of earlier findings.
        findings.append({"start": start, "end": start + len(mark[1]), "labels": labels})
    return MARK.sub(r"\1", row["text"]), findings


def join_values(context: Mapping[str, Any]) -> str:
    """Return the values in columns of context as words, such as "negated recent family"."""
    flags = f"{'negated' if context['negated'] else ''} {'uncertain' if context['uncertain'] else ''}"
    return f"{flags} {context['temporality']} {context['experiencer']}"


def apply_openmed_nb(notes: list[Note]) -> Iterator[str]:
    """Yield the values of each finding by the rules of openmed_nb."""
    from openmed_nb.annotation.context import create_context_finder

    find_context = create_context_finder(("all",), "en")
    for text, findings in notes:
        columns = find_context(text, findings)
        for index in range(len(findings)):
            yield join_values({name: columns[name][index] for name in columns})


def apply_openmed(notes: list[Note]) -> Iterator[str]:
    """Yield the values of each finding by the rules of OpenMed, applied to the sentence of the finding."""
    from openmed.clinical.context import assert_context
    from openmed.clinical.negation_scope import negated_spans

    from openmed_nb.annotation.boundaries import LINE_END

    for text, findings in notes:
        ends = [match.start() for match in re.finditer(rf"\A|(?<=[.!?;])\s+|{LINE_END.pattern}|\Z", text)]
        for finding in findings:
            start = max(end for end in ends if end <= finding["start"])
            sentence = text[start : min(end for end in ends if end >= finding["end"])]
            spans = [{"start": finding["start"] - start, "end": finding["end"] - start}]
            context = assert_context(sentence, spans, language="en")[0]
            negation = "negated" if negated_spans(sentence, spans) else ""
            yield f"{negation} {context['uncertainty']} {context['temporality']} {context['experiencer']}"


def apply_medspacy(notes: list[Note]) -> Iterator[str]:
    """Yield the values of each finding, extended to whole tokens, by the default rules of medSpaCy."""
    import medspacy

    nlp = medspacy.load()
    for text, findings in notes:
        doc = nlp.make_doc(text)
        doc.ents = [doc.char_span(item["start"], item["end"], "FINDING", alignment_mode="expand") for item in findings]
        for entity in nlp(doc).ents:
            yield " ".join(value for value in VALUES if getattr(entity._, f"is_{value}"))


def format_fraction(count: int, total: int) -> str:
    """Return a fraction with its 95% Wilson interval."""
    if not total:
        return "-"
    center = count + Z_SQUARED / 2
    margin = (Z_SQUARED * (count * (total - count) / total + Z_SQUARED / 4)) ** 0.5
    size = total + Z_SQUARED
    return f"{count / total:.2f} ({(center - margin) / size:.2f} to {(center + margin) / size:.2f})"


def main() -> None:
    """Measure the installed rules with each file, and print tables."""
    rules = {"openmed_nb": apply_openmed_nb, "openmed": apply_openmed, "medspacy": apply_medspacy}
    for path in sys.argv[1:]:
        notes = [read_note(line) for line in Path(path).read_text("utf-8").splitlines()]
        labeled = [
            item["labels"] if "labels" in item else join_values(item) for _, findings in notes for item in findings
        ]
        for name in filter(find_spec, rules):
            marked = list(rules[name](notes))
            print(f"\n{path}, {name}\n{'value':<14}{'precision':<22}{'recall':<22}findings")
            for value in VALUES:
                expected = [value in values for values in labeled]
                found = [value in values for values in marked]
                correct = sum(compress(found, expected))
                print(
                    f"{value:<14}{format_fraction(correct, sum(found)):<22}"
                    f"{format_fraction(correct, sum(expected)):<22}{sum(expected)}"
                )


if __name__ == "__main__":
    main()
