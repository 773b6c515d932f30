"""Program that annotates texts in child processes, ends them with real signals, and reports their results.

The model is loaded once, and every run is a fork of that. Arguments: the model, the texts, the file of results, and the
signals, each as its name and the bytes that the file should have before a child gets it. The last child gets none. It
prints a line of JSON for each child.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def slowly(texts: list[str], done: int, ends: bool) -> Iterator[str]:
    """Yield texts, with a pause before each after those that were done before; where it does not end, wait for a signal."""
    yield from texts[:done]
    for text in texts[done:]:
        time.sleep(0.01)
        yield text
    while not ends:
        time.sleep(1)


def annotate_all(pipe: Any, texts: Iterator[str], file: Path, said: Path) -> None:
    """Annotate the texts into a file, and store the message of an interrupt."""
    from openmed_nb import annotate
    from openmed_nb.errors import RunInterrupted

    try:
        try:
            annotate(texts, pipe, resume=file, progress=False)
        except Exception:  # noqa: BLE001 - what careless code does
            said.write_text("swallowed", "utf-8")
    except RunInterrupted as error:
        said.write_text(json.dumps([str(error), error.done, len(error.annotations)]), "utf-8")


def size(file: Path) -> int:
    """Return the size of a file in bytes, or 0 if it does not exist."""
    return file.stat().st_size if file.exists() else 0


def end(child: int, file: Path, name: str, target: str) -> None:
    """Send a signal to a child soon after the file has grown to a number of bytes."""
    least = max(int(target), size(file) + 1)
    while size(file) < least:
        time.sleep(0.005)
    time.sleep(random.Random(target).random() / 50)
    os.kill(child, getattr(signal, name))


def main(model: str, texts_file: str, results: str, *signals: str) -> None:
    """Run children until one is let to its end."""
    import torch

    from openmed_nb import load_pipeline

    torch.set_num_threads(1)
    pipe = load_pipeline(model, device="cpu", batch_size=1)
    texts, file = json.loads(Path(texts_file).read_text("utf-8")), Path(results)
    said, log = Path(f"{results}.said"), Path(f"{results}.log")

    def watch(_model: Any, _arguments: Any, kwargs: Any) -> None:
        with log.open("a") as lines:
            lines.write(f"{kwargs['input_ids'][0].tolist()}\n")

    pipe.model.register_forward_pre_hook(watch, with_kwargs=True)
    for name in [*signals, ""]:
        before = file.read_bytes().count(b"\n") if file.exists() else 0
        child = os.fork()
        if child == 0:
            annotate_all(pipe, slowly(texts, max(0, before - 1), ends=not name), file, said)
            os._exit(0)
        if name:
            end(child, file, *name.split("="))
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        computed = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        message = said.read_text("utf-8") if said.exists() else ""
        print(json.dumps({"before": before, "status": status, "computed": computed, "said": message}))  # noqa: T201
        for path in (said, log):
            path.unlink(missing_ok=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
