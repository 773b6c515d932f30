"""Print what refusing hostile files of a model costs, as ratios to loading the bundled model in the same way.

python benchmarks/hostile.py

Each case is a copy of a tiny model with one damage of tests/helpers/hostile_models.py, in a process of its own that has loaded the
small bundled model before. Time is from the call to the error. Memory is how much the peak of the process and of the one
that a tokenizer is tried in grows, together. A case that does not end after two minutes is stopped.
"""

from __future__ import annotations

import json
import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from openmed_nb.models.registry import BUNDLED

HELPERS = Path(__file__).parents[1] / "tests" / "helpers"
SECONDS = 120

MEASURE = """
import json, sys, threading, time
import psutil
import openmed_nb as nb
from openmed_nb.errors import ModelError

nb.load_model("bundled_small", device="cpu")
own = psutil.Process()
peak = 0
done = threading.Event()

def watch():
    global peak
    while True:
        total = 0
        for process in (own, *own.children()):
            try:
                total += process.memory_info().rss
            except psutil.Error:
                pass
        peak = max(peak, total)
        if done.wait(0.005):
            return

before = own.memory_info().rss
watcher = threading.Thread(target=watch)
watcher.start()
start = time.perf_counter()
try:
    nb.load_model(sys.argv[1], device="cpu")
    answer = "loaded"
except ModelError as error:
    answer = f"{type(error).__name__}: {error.what}"
except BaseException as error:
    answer = f"NOT OURS: {type(error).__name__}"
seconds = time.perf_counter() - start
done.set()
watcher.join()
print(json.dumps([seconds, max(peak - before, 1), answer]))
"""


def measured(folder: Path) -> tuple[float, float, str]:
    """Return seconds, bytes and the answer of a load."""
    command = [sys.executable, "-c", MEASURE, str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
        seconds, size, answer = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return float("inf"), float("nan"), "does not end"
    except IndexError:
        return float("nan"), float("nan"), f"ends the process with {done.returncode}"
    return seconds, size, answer


def main() -> None:
    """Print a line for each case."""
    tiny = runpy.run_path(str(HELPERS / "tiny_models.py"))
    hostile = runpy.run_path(str(HELPERS / "hostile_models.py"))
    cases = dict(hostile["DAMAGES"])
    for kind in hostile["KINDS"]:
        cases[f"a {kind} as special_tokens_map.json"] = hostile["in_place_of"]("special_tokens_map.json", kind)
    with tempfile.TemporaryDirectory() as home:
        whole = tiny["save"](Path(home) / "whole", tiny["keyword_bert"]())
        seconds, size, _ = measured(BUNDLED["bundled"])
        print(f"bundled: {seconds:.3f} s, {size / 2**20:.1f} MiB")
        print(f"{'case':42} {'time':>7} {'memory':>7}")
        for case, damage in cases.items():
            folder = Path(shutil.copytree(whole, Path(home) / "case"))
            damage(folder)
            took, grew, answer = measured(folder)
            print(
                f"{case:42} {took / seconds:7.2f} {grew / size:7.2f}  {answer.replace(str(folder), 'case')[:90]}",
                flush=True,
            )
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
