"""Print what starting costs, as ratios of two things measured in turn in one run.

python benchmarks/startup.py [ROUNDS]

- ``%load_ext openmed_nb`` against ``%load_ext autoreload``, each in a fresh IPython.
- Fresh process to first entities: the bundled model here against transformers' own ``pipeline`` on the same files.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time

LOAD = """
import time
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
start = time.perf_counter()
shell.run_line_magic("load_ext", {extension!r})
print(time.perf_counter() - start)
"""

OURS = """
import openmed_nb as nb
assert nb.load_pipeline(device="cpu")("She has asthma.")
"""

THEIRS = """
from transformers import pipeline
from openmed_nb.models.registry import BUNDLED
pipe = pipeline("token-classification", str(BUNDLED["bundled"]), aggregation_strategy="first", stride=64, device="cpu")
assert pipe("She has asthma.")
"""


def run(code: str) -> str:
    """Run code in a fresh, offline interpreter and return what it prints."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    return done.stdout


def load_seconds(extension: str) -> float:
    """Return how long a fresh IPython takes to load an extension, in seconds."""
    return float(run(LOAD.format(extension=extension)))


def wall_seconds(code: str) -> float:
    """Return how long a fresh process takes for the code, in seconds."""
    start = time.perf_counter()
    run(code)
    return time.perf_counter() - start


def main(rounds: int) -> None:
    """Measure in turn, and print medians and ratios."""
    loads = [(load_seconds("openmed_nb"), load_seconds("autoreload")) for _ in range(rounds)]
    starts = [(wall_seconds(OURS), wall_seconds(THEIRS)) for _ in range(rounds)]
    ours, autoreload = (statistics.median(column) for column in zip(*loads, strict=True))
    print(
        f"%load_ext openmed_nb {ours * 1000:.1f} ms, autoreload {autoreload * 1000:.1f} ms: {ours / autoreload:.2f} x"
    )
    print(f"  bar: twice autoreload plus 20 ms = {autoreload * 2000 + 20:.1f} ms: {ours <= 2 * autoreload + 0.02}")
    ours, theirs = (statistics.median(column) for column in zip(*starts, strict=True))
    print(f"first entities {ours:.2f} s, transformers' pipeline {theirs:.2f} s: {ours / theirs:.2f} x")
    print(f"  bar: no longer: {ours <= theirs}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
