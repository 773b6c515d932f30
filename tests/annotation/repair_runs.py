"""A program that annotates some of the notes in children of its own, in any order, and kills these at any moment.

Some notes are missing or unreadable and are repaired later. The model is loaded once, and every run is a fork of that. Arguments:
the model, a folder, and how many children to kill. It prints a line of JSON with what went wrong, and with the answers of a last
child, which is let to its end.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

from openmed_nb.annotation.references import text_fingerprint

NOTES = 150
DIGITS = ("the", "patient", "has", "and", "no", "history", "of", "a", "was", "seen")
GAPS = (None, "", 5, "\ud800")


def note(number: int) -> str:
    """Return a text with few unique tokens and many spaces, so that a chunk contains few texts."""
    digits = " ".join(DIGITS[int(digit)] for digit in f"{number:03}")
    return f"{digits} asthma{' ' * 2500}{'diabetes mellitus' if number % 3 else ''}"


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
    gaps: dict[int, Any] = {number: chance.choice(GAPS) for number in range(NOTES) if chance.random() < 0.4}
    killed, children, doubled, refused, last = 0, 0, 0, [], False
    while not last:
        last = killed == int(kills)
        before = in_file(file)
        gaps = {number: gap for number, gap in gaps.items() if not last and chance.random() > 0.04}
        size = min(NOTES, 5 + NOTES * killed // max(1, int(kills) - 5))
        shown = range(NOTES) if last else chance.sample(range(NOTES), size)
        texts: Any = [gaps.get(number, note(number)) for number in shown]
        if children % 2:
            texts = iter(texts)
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
