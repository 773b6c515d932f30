"""Print what each method costs for one note with 20,000 entities, as a ratio to a note with 2,000, and in seconds.

python benchmarks/many_entities.py

A method that is linear has a ratio of about 10. The entities are synthetic, so that no model runs.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from openmed_nb import read_annotations
from openmed_nb.annotation.browsing import ReviewListing
from openmed_nb.annotation.references import text_fingerprint
from openmed_nb.annotation.results import Annotations
from openmed_nb.annotation.storage import ResultStore

SIZES = (2_000, 20_000)
WORDS = "Known gout.\n"
MAX_SECONDS = 3.0


def make_annotations(count: int) -> Annotations:
    """Return the annotations of a note with a number of entities."""
    text = WORDS * count
    store = ResultStore()
    entities = [
        {"entity_group": "DISEASE", "score": 0.9, "word": "gout", "start": start + 6, "end": start + 10}
        for start in range(0, len(text), len(WORDS))
    ]
    store.add(text_fingerprint(text), entities)
    return Annotations(store, (text,), "synthetic", "cpu", texts=[text])


def make_calls(count: int, folder: Path) -> dict[str, Callable[[], object]]:
    """Return the calls that are measured, by name."""
    found = make_annotations(count)
    one = found.at(0)
    review = found.review()
    gold = [[*found.note_spans(0), (0, count * len(WORDS) - 1, "DISEASE")]]
    calls: dict[str, Callable[[], object]] = {
        "to_frame": found.to_frame,
        "score": lambda: found.score(gold),
        "show": one._repr_html_,
        "text": lambda: str(one),
        "mask": lambda: found.mask("[{label}]"),
        "mask with a rule": lambda: found.mask(rules={"WORD": "Known"}),
        "with_context": lambda: found.with_context("all"),
        "filter": lambda: found.filter("disease", min_score=0.5),
        "summary": lambda: str(found.summary()),
        "review": lambda: ReviewListing(review).state(),
        "review frame": review.to_frame,
    }
    for suffix in ("jsonl", "csv", "parquet", "html"):
        calls[f"save {suffix}"] = lambda suffix=suffix: found.save(folder / f"{count}.{suffix}")
    for name in ("brat", "conll", "doccano", "label-studio"):
        path = folder / f"{count}-{name}"
        calls[f"export {name}"] = lambda name=name, path=path: found.export(name, path)
        calls[f"read {name}"] = lambda name=name, path=path: read_annotations(path, name, predictions=True)
    return calls


def main() -> None:
    """Measure each call with both sizes in turn."""
    slow = []
    print(f"{'call':24}{'seconds':>10}{'ratio':>8}")
    with tempfile.TemporaryDirectory() as folder:
        small, large = (make_calls(count, Path(folder)) for count in SIZES)
        for name, call in small.items():
            seconds = []
            for measured in (call, large[name]):
                start = time.perf_counter()
                measured()
                seconds.append(time.perf_counter() - start)
            print(f"{name:24}{seconds[1]:10.2f}{seconds[1] / seconds[0]:8.1f}")
            if seconds[1] > MAX_SECONDS:
                slow.append(name)
    if slow:
        sys.exit(f"More than {MAX_SECONDS:g} s: {', '.join(slow)}.")


if __name__ == "__main__":
    main()
