"""Print what ids and context cost, as ratios of two things measured alternately in one run.

python benchmarks/after_entities.py [ROUNDS]

- ``nb.annotate`` of 1,000 notes without ids, against the same with ids from a column of a table.
- ``with_context("all")`` against annotating the same notes. Its first call, which reads the cues, is excluded.

The notes are synthetic, with 40 to 1,000 characters, and the model is the bundled one.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable

import pandas as pd

import openmed_nb as nb

SENTENCES = (
    "He denies chest pain and dyspnea.",
    "History of type 2 diabetes mellitus, on metformin.",
    "Mother had breast cancer at 45.",
    "No evidence of pneumonia on the chest film.",
    "Possible urinary tract infection; culture is pending.",
    "Blood pressure 140/90, hypertension since 2010.",
    "The patient feels well and wants to go home.",
)
NUM_NOTES = 1000
# Annotating with ids has at least this fraction of the speed without, and context takes at most this fraction of the time.
MIN_SPEED = 0.97
MAX_CONTEXT = 0.05


def seconds(call: Callable[[], object]) -> float:
    """Return the seconds of a call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> None:
    """Measure, and print as a table."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    draw = random.Random(0)  # noqa: S311 - not for cryptography
    notes = [" ".join(draw.choices(SENTENCES, k=draw.randint(1, 25))) for _ in range(NUM_NOTES)]
    table = pd.DataFrame({"note_id": [f"note-{number}" for number in range(NUM_NOTES)], "note": notes})
    pipe = nb.load_pipeline(device="cpu")
    found = nb.annotate(notes, pipe, progress=False)
    found.with_context("all")
    columns = {"text_column": "note", "id_column": "note_id"}
    plain = []
    with_ids = []
    context = []
    for _ in range(rounds):
        plain.append(seconds(lambda: nb.annotate(notes, pipe, progress=False)))
        with_ids.append(seconds(lambda: nb.annotate(table, pipe, progress=False, **columns)))
        context.append(seconds(lambda: found.with_context("all")))
    speed = min(plain) / min(with_ids)
    fraction = min(context) / min(plain)
    print(f"{NUM_NOTES} notes, {sum(map(len, found))} entities, {rounds} rounds, minima")
    print(
        f"speed with ids / without     {speed:.3f}  (at least {MIN_SPEED})  {'ok' if speed >= MIN_SPEED else 'MISSED'}"
    )
    print(
        f"context / annotation         {fraction:.3f}  (at most {MAX_CONTEXT})  {'ok' if fraction <= MAX_CONTEXT else 'MISSED'}"
    )


if __name__ == "__main__":
    main()
