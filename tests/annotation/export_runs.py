"""Program that exports or saves notes again and again, in child processes that a real signal kills while they write.

Arguments: the folder, and the number of kills. It prints a line of JSON: how many children were killed, how many of them left
temporary files, and the names of the hidden files in the folder after another export.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

WAYS = ("brat", "conll", "doccano", "label-studio", ".jsonl", ".csv", ".html")


def main(place: str, kills: str) -> None:
    """Kill children, then export once more."""
    from openmed_nb import annotate

    notes = [f"{number}: Known asthma and type 2 diabetes mellitus." for number in range(500)]
    found = annotate(notes, "bundled_small", device="cpu", progress=False)
    folder = Path(place)
    killed = left = 0
    for kill in range(int(kills)):
        child = os.fork()
        if child == 0:
            for number in itertools.count():
                way = WAYS[kill % len(WAYS)]
                target = folder / f"{kill}-{number}{way}"
                if way.startswith("."):
                    found.save(target)
                else:
                    found.export(way, target)
        while not any(folder.glob(".openmed-*/export*")):
            time.sleep(0.001)
        time.sleep(random.Random(kill).random() / 50)
        os.kill(child, signal.SIGKILL)
        killed += os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        left += any(folder.glob(".openmed-*/*"))
    found.export("conll", folder / "last")
    print(json.dumps([killed, left, [path.name for path in folder.glob(".*")]]))  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
