"""A program that annotates notes in child processes, in any order, and kills or interrupts these at any moment.

Some notes are missing or unreadable and are repaired later. The model is loaded once, and every run is a fork of that. Arguments:
the model, a folder, and the number of signals. It prints what went wrong, and the results of a last child without a signal.
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

NUM_NOTES = 150
# A new file is started after this number of signals, because a child with known results ends before its signal.
SIGNALS_PER_FILE = 15
DIGITS = ("the", "patient", "has", "and", "no", "history", "of", "a", "was", "seen")
# Seconds to wait for the first pass of the model before an interrupt, which would else precede the run.
MAX_WAIT_SECONDS = 2
GAPS = (None, "", 5, "\ud800")


def note(number: int) -> str:
    """Return a text with few unique tokens and many spaces, so that a chunk contains few texts."""
    digits = " ".join(DIGITS[int(digit)] for digit in f"{number:03}")
    return f"{digits} asthma{' ' * 2500}{'diabetes mellitus' if number % 3 else ''}"


def stored_notes(file: Path) -> set[int]:
    """Return the numbers of the notes whose result is in a file."""
    lines = file.read_bytes().splitlines(keepends=True)[1:] if file.exists() else []
    known = {json.loads(line)["fingerprint"] for line in lines if line.endswith(b"\n")}
    return {number for number in range(NUM_NOTES) if f"{text_fingerprint(note(number)):016x}" in known}


def run(pipe: Any, texts: Any, file: Path, outcome: Path) -> None:
    """Annotate in a child, and write the results, the message of an interrupt, or the error."""
    from openmed_nb import annotate
    from openmed_nb.errors import RunInterrupted

    result: dict[str, Any] = {}
    try:
        found = annotate(texts, pipe, resume=file, on_error="record", progress=False)
        answers = [[(entity["word"], entity["start"], entity["score"]) for entity in entities] for entities in found]
        result = {"result": [answers, found.missing, sorted(found.errors)]}
    except RunInterrupted as error:
        result = {"interrupted": [str(error), error.done, len(error.annotations)]}
    except KeyboardInterrupt:  # Before or after the run.
        pass
    except BaseException as error:  # noqa: BLE001 - each is a fault of the run
        result = {"refused": f"{type(error).__name__}: {error}"}
    outcome.write_text(json.dumps(result), "utf-8")
    os._exit(0)


def main(model: str, folder: str, num_signals: int) -> None:  # noqa: C901 - one loop over the children
    """Kill or interrupt children, and then let one finish."""
    import torch

    from openmed_nb import load_pipeline

    torch.set_num_threads(1)
    pipe = load_pipeline(model, device="cpu", batch_tokens=1)
    known = {tuple(pipe.tokenizer(note(number))["input_ids"]): number for number in range(NUM_NOTES)}
    file, log, outcome = (Path(folder) / name for name in ("run.jsonl", "log", "outcome"))

    def watch(_model: Any, _arguments: Any, kwargs: Any) -> None:
        time.sleep(0.004)
        with log.open("a") as lines:
            lines.write(f"{kwargs['input_ids'][0].tolist()}\n")

    pipe.model.register_forward_pre_hook(watch, with_kwargs=True)
    chance = random.Random(0)
    gaps: dict[int, Any] = {}
    summary: dict[str, Any] = {"killed": 0, "doubled": 0, "refused": [], "interrupted": []}
    for index in range(num_signals + 1):
        is_last = index == num_signals
        if index % SIGNALS_PER_FILE == 0 and not is_last:
            file.unlink(missing_ok=True)
            gaps = {number: chance.choice(GAPS) for number in range(NUM_NOTES) if chance.random() < 0.4}
        before = stored_notes(file)
        gaps = {number: gap for number, gap in gaps.items() if not is_last and chance.random() > 0.04}
        size = NUM_NOTES if is_last else min(NUM_NOTES, 60 + NUM_NOTES * index // num_signals)
        numbers = range(NUM_NOTES) if is_last else chance.sample(range(NUM_NOTES), size)
        texts: Any = [gaps.get(number, note(number)) for number in numbers]
        if index % 2:
            texts = iter(texts)
        child = os.fork()
        if child == 0:
            run(pipe, texts, file, outcome)
        if not is_last:
            name = chance.choice([signal.SIGKILL, signal.SIGINT])
            deadline = time.monotonic() + MAX_WAIT_SECONDS
            while name == signal.SIGINT and not log.exists() and time.monotonic() < deadline:
                time.sleep(0.002)
            time.sleep(chance.random() * 0.15)
            os.kill(child, name)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        computed = [tuple(json.loads(line)) for line in log.read_text().splitlines()] if log.exists() else []
        repeated = [ids for ids in computed if known.get(ids) in before]
        summary["doubled"] += len(repeated) + len(computed) - len({*computed})
        summary["killed"] += status == -signal.SIGKILL
        result = json.loads(outcome.read_text("utf-8")) if status == 0 and outcome.exists() else {}
        for name in ("interrupted", "refused"):
            summary[name] += [result[name]] if name in result else []
        if is_last:
            summary["result"] = result["result"]
        for path in (outcome, log):
            path.unlink(missing_ok=True)
    print(json.dumps(summary))  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
