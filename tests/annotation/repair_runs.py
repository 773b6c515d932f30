"""A program that annotates a growing, changing table of notes in children of its own, and kills these at any moment.

In each round more notes are there, some that were missing or unreadable are repaired, and the table comes from another file format,
with other missing values. The model is loaded once, and every run is a fork of that. Arguments: the model, a folder, and how many
children to kill. It prints a line of JSON with what went wrong, and with the answers of a last child, which is let to its end.
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd

from openmed_nb.annotation.references import text_fingerprint

NOTES = 150
DIGITS = ("the", "patient", "has", "and", "no", "history", "of", "a", "was", "seen")
GAPS = ("missing", "empty", "number", "surrogate")


def note(number: int) -> str:
    """Return a text with few unique tokens and many spaces, so that a chunk contains few texts."""
    digits = " ".join(DIGITS[int(digit)] for digit in f"{number:03}")
    return f"{digits} asthma{' ' * 2500}{'diabetes mellitus' if number % 3 else ''}"


def through_csv(texts: list[Any], folder: Path) -> Any:
    """Write notes as CSV, in which an empty note becomes NaN."""
    pd.DataFrame({"note": texts}).to_csv(folder / "notes.csv")
    return pd.read_csv(folder / "notes.csv", index_col=0, dtype={"note": object})["note"]


def through_parquet(texts: list[Any], folder: Path) -> Any:
    """Write notes as Parquet, in which what is missing is null."""
    pd.DataFrame({"note": texts}).to_parquet(folder / "notes.parquet")
    return pd.read_parquet(folder / "notes.parquet")["note"]


def through_json(texts: list[Any], folder: Path) -> Any:
    """Write notes as lines of JSON."""
    lines = "\n".join(json.dumps({"note": text}) for text in texts)
    (folder / "notes.jsonl").write_text(lines, "utf-8")
    return [json.loads(line)["note"] for line in (folder / "notes.jsonl").read_text("utf-8").splitlines()]


def as_strings(texts: list[Any], _folder: Path) -> Any:
    """Return a column with ``pd.NA``."""
    return pd.Series(texts, dtype="string", index=range(500, 500 + len(texts)))


def as_objects(texts: list[Any], _folder: Path) -> Any:
    """Return a list with several kinds of missing values, and a stream of it in every other call."""
    kinds = [None, math.nan, pd.NA, pd.NaT]
    mixed = [kinds[number % 4] if text is None else text for number, text in enumerate(texts)]
    return mixed if len(texts) % 2 else iter(mixed)


FORMATS: list[Callable[[list[Any], Path], Any]] = [through_csv, through_parquet, through_json, as_strings, as_objects]


def shown(number: int, gap: str | None, read: Callable[..., Any]) -> Any:
    """Return the table value of a note. A column of a file cannot contain a number or an unpaired surrogate."""
    if gap is None:
        return note(number)
    if read is as_objects and gap in {"number", "surrogate"}:
        return 5 if gap == "number" else "\ud800"
    return "" if gap == "empty" else None


def in_file(file: Path) -> set[int]:
    """Return the numbers of the notes whose result is in a file."""
    lines = file.read_bytes().splitlines(keepends=True)[1:] if file.exists() else []
    known = {json.loads(line)["fingerprint"] for line in lines if line.endswith(b"\n")}
    return {number for number in range(NOTES) if f"{text_fingerprint(note(number)):016x}" in known}


def run(pipe: Any, texts: Any, file: Path, said: Path) -> None:
    """Annotate in a child; keep the error, or the answers."""
    from openmed_nb import annotate

    try:
        found = annotate(texts, pipe, resume=file, on_error="record", progress=False)
    except BaseException as error:  # noqa: BLE001 - each is a fault of the run
        said.write_text(f"{type(error).__name__}: {error}", "utf-8")
        os._exit(1)
    answers = [[(entity["word"], entity["start"], entity["score"]) for entity in entities] for entities in found]
    said.write_text(json.dumps([answers, found.missing, sorted(found.errors)]), "utf-8")
    os._exit(0)


def main(model: str, folder: str, kills: str) -> None:
    """Kill a number of children, and then let one finish."""
    import torch

    from openmed_nb import load_pipeline

    torch.set_num_threads(1)
    pipe = load_pipeline(model, device="cpu", batch_size=1)
    known = {tuple(pipe.tokenizer(note(number))["input_ids"]): number for number in range(NOTES)}
    there, log, said = Path(folder), Path(folder) / "log", Path(folder) / "said"
    file = there / "run.jsonl"

    def watch(_model: Any, _arguments: Any, kwargs: Any) -> None:
        time.sleep(0.004)
        with log.open("a") as lines:
            lines.write(f"{kwargs['input_ids'][0].tolist()}\n")

    pipe.model.register_forward_pre_hook(watch, with_kwargs=True)
    chance = random.Random(0)
    gaps: dict[int, str] = {number: chance.choice(GAPS) for number in range(NOTES) if chance.random() < 0.4}
    killed, children, doubled, refused, last = 0, 0, 0, [], False
    while not last:
        last = killed == int(kills)
        size = NOTES if last else min(NOTES, 5 + NOTES * killed // max(1, int(kills) - 5))
        before = in_file(file)
        for number in list(gaps):
            if last or (number < size - 20 and number not in before and chance.random() < 0.04):
                del gaps[number]
        read = chance.choice(FORMATS)
        texts = read([shown(number, gaps.get(number), read) for number in range(size)], there)
        child = os.fork()
        if child == 0:
            run(pipe, texts, file, said)
        if not last:
            time.sleep(chance.random() * 0.15)
            os.kill(child, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        computed = [tuple(json.loads(line)) for line in log.read_text().splitlines()] if log.exists() else []
        doubled += sum(known[ids] in before for ids in computed if ids in known) + len(computed) - len({*computed})
        killed += status == -signal.SIGKILL
        children += 1
        if status == 1:
            refused.append(said.read_text("utf-8"))
        result = json.loads(said.read_text("utf-8")) if status == 0 else None
        for path in (said, log):
            path.unlink(missing_ok=True)
    summary = {"killed": killed, "children": children, "doubled": doubled, "refused": refused, "result": result}
    print(json.dumps(summary))  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
