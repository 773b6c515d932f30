"""Print what starting costs, as ratios of two things measured alternately in one run.

python benchmarks/startup.py [ROUNDS]

- ``%load_ext openmed_nb`` against ``%load_ext autoreload``, each in a fresh IPython.
- Opening the panel in a fresh kernel, against ``import ipywidgets`` just before.
- Fresh kernel to first entities: the bundled model here against transformers' own ``pipeline`` on the same files.
- ``nb.annotate`` in a fresh process, against that ``pipeline`` in another, and the stages that it goes through, in seconds
  of the clock and of the processor: the wall-clock time also includes other programs.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import time

from jupyter_client.manager import start_new_kernel

from openmed_nb.models.registry import BUNDLED

LOAD = """
import time
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
start = time.perf_counter()
shell.run_line_magic("load_ext", {extension!r})
print(time.perf_counter() - start)
"""

# An installed package has its bytecode, and so has this one from the first round on.
ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": ""}

OURS = """
%load_ext openmed_nb
import openmed_nb as nb
assert nb.load_pipeline(device="cpu")("She has asthma.")
"""

THEIRS = f"""
from transformers import pipeline
folder = {str(BUNDLED["bundled"])!r}
pipe = pipeline("token-classification", folder, aggregation_strategy="first", stride=64, device="cpu")
assert pipe("She has asthma.")
"""

ANNOTATE = """
import openmed_nb as nb
assert nb.annotate(["She has asthma."], device="cpu")[0]
"""

# What nb.annotate does, one after another.
STAGES = {
    "import openmed_nb": """
import openmed_nb as nb
from openmed_nb.devices.backend import gc_disabled, import_torch
from openmed_nb.models.loading import import_transformers
nb.annotate, nb.load_pipeline
""",
    "import torch": "import_torch()",
    "import transformers": "import_transformers()",
    "import the model's code": f"""
with gc_disabled():
    from transformers import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING, AutoConfig
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING[type(AutoConfig.from_pretrained({str(BUNDLED["bundled"])!r}))]
""",
    "load": 'pipe = nb.load_pipeline(device="cpu")',
    "first batch": 'assert nb.annotate(["She has asthma."], pipe)[0]',
}

CLOCKS = """
import json, time
clocks = lambda: (time.perf_counter(), time.process_time())
marks = [clocks()]
"""

PANEL = """
%load_ext openmed_nb
import time
start = time.perf_counter()
import ipywidgets
imported = time.perf_counter()
panel = get_ipython().run_line_magic("openmed_panel", "")
bundle = panel._repr_mimebundle_()
opened = time.perf_counter()
import sys
print(opened - imported, imported - start, "torch" in sys.modules)
"""

PANEL_SECONDS = 0.3


def load_seconds(extension: str) -> float:
    """Return the seconds that a fresh IPython takes to load an extension."""
    command = [sys.executable, "-c", LOAD.format(extension=extension)]
    return float(subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=True).stdout)


def kernel_seconds(cell: str) -> tuple[float, str]:
    """Return the seconds from the start of a kernel to the end of its first cell, and the output of the cell."""
    printed: list[str] = []
    start = time.perf_counter()
    manager, client = start_new_kernel(kernel_name="python3", env=ENVIRONMENT, stderr=subprocess.DEVNULL)
    try:
        reply = client.execute_interactive(
            cell, output_hook=lambda message: printed.append(message["content"].get("text", "")), timeout=120
        )
        seconds = time.perf_counter() - start
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    if reply["content"]["status"] != "ok":
        raise RuntimeError(reply["content"])
    return seconds, "".join(printed)


def seconds_of(*stages: str) -> list[tuple[float, float]]:
    """Return the wall-clock and processor seconds of each stage of a fresh process."""
    code = CLOCKS + "".join(f"\n{stage}\nmarks.append(clocks())" for stage in stages) + "\nprint(json.dumps(marks))"
    done = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, check=True)
    marks = json.loads(done.stdout.splitlines()[-1])
    return [(after[0] - before[0], after[1] - before[1]) for before, after in itertools.pairwise(marks)]


def print_annotate(rounds: int) -> None:
    """Print what the first nb.annotate of a process costs, and what of it each stage."""
    works = {"nb.annotate": (ANNOTATE,), "transformers' pipeline": (THEIRS,), "stages": tuple(STAGES.values())}
    taken = [{name: seconds_of(*stages) for name, stages in works.items()} for _ in range(rounds)]

    def middle(name: str, stage: int = 0) -> tuple[float, float]:
        clock, processor = (statistics.median(run[name][stage][kind] for run in taken) for kind in (0, 1))
        return clock, processor

    rows = {stage: middle("stages", number) for number, stage in enumerate(STAGES)}
    rows |= {name: middle(name) for name in ("nb.annotate", "transformers' pipeline")}
    print(f"{'in a fresh process':<28}{'seconds':>10}{'of the processor':>20}")
    for name, (clock, processor) in rows.items():
        print(f"{name:<28}{clock:>10.2f}{processor:>20.2f}")
    ours, theirs = rows["nb.annotate"], rows["transformers' pipeline"]
    print(
        f"first answer: {ours[0] / theirs[0]:.2f} x transformers' pipeline, {ours[1] / theirs[1]:.2f} x its processor's time"
    )
    print(f"  bar: no longer: {ours[1] <= theirs[1]}")


def print_panel(rounds: int) -> None:
    """Print what opening the panel costs."""
    answers = [kernel_seconds(PANEL)[1].split() for _ in range(rounds)]
    opened, imported = (statistics.median(float(answer[column]) for answer in answers) for column in (0, 1))
    print(f"panel {opened * 1000:.0f} ms, import ipywidgets {imported * 1000:.0f} ms: {opened / imported:.2f} x")
    torch = any(answer[2] == "True" for answer in answers)
    print(f"  bar: under {PANEL_SECONDS * 1000:.0f} ms, without torch: {opened < PANEL_SECONDS and not torch}")


def main(rounds: int) -> None:
    """Measure alternately, and print medians and ratios."""
    loads = [(load_seconds("openmed_nb"), load_seconds("autoreload")) for _ in range(rounds)]
    starts = [(kernel_seconds(OURS)[0], kernel_seconds(THEIRS)[0]) for _ in range(rounds)]
    ours, autoreload = (statistics.median(column) for column in zip(*loads, strict=True))
    print(
        f"%load_ext openmed_nb {ours * 1000:.1f} ms, autoreload {autoreload * 1000:.1f} ms: {ours / autoreload:.2f} x"
    )
    print(f"  bar: twice autoreload plus 20 ms = {autoreload * 2000 + 20:.1f} ms: {ours <= 2 * autoreload + 0.02}")
    ours, theirs = (statistics.median(column) for column in zip(*starts, strict=True))
    print(f"first entities {ours:.2f} s, transformers' pipeline {theirs:.2f} s: {ours / theirs:.2f} x")
    print(f"  bar: no longer: {ours <= theirs}")
    print_annotate(rounds)
    print_panel(rounds)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
