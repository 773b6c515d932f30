"""Print what starting costs, as ratios of two things measured alternately in one run.

python benchmarks/startup.py [ROUNDS]

- ``%load_ext openmed_nb`` against ``%load_ext autoreload``, each in a fresh IPython.
- Opening the panel in a fresh kernel, against ``import ipywidgets`` just before.
- The first entities in a fresh kernel: a cell with the bundled model here, against a cell with transformers' own ``pipeline``
  on the same files, each with import, load and first text. Without preloading, and eight seconds after ``%openmed_device``.
- ``nb.annotate`` in a fresh process, against that ``pipeline`` in another, and the stages that it goes through.

Times are in seconds of the clock and of the processor, because the time of the clock also includes other programs.
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
processor = time.process_time()
shell.run_line_magic("load_ext", {extension!r})
print(time.perf_counter() - start, time.process_time() - processor)
"""

# An installed package has its bytecode, and so has this one from the first round on.
ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": ""}

OURS = """%%openmed_ner
She has asthma.
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

# The first entities take at most this fraction of the time of transformers' pipeline.
FIRST_FRACTION = 0.75

# Seconds between %openmed_device and the first text of a user who reads what it shows, and those until the entities.
PAUSE_SECONDS = 8
PRELOADED_SECONDS = 1.0


def load_seconds(extension: str) -> tuple[float, float]:
    """Return the seconds and the processor seconds that a fresh IPython takes to load an extension."""
    command = [sys.executable, "-c", LOAD.format(extension=extension)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    clock, processor = map(float, done.stdout.split())
    return clock, processor


def print_loads(rounds: int) -> None:
    """Print what loading the extension costs."""
    loads = [(load_seconds("openmed_nb"), load_seconds("autoreload")) for _ in range(rounds)]
    for kind, name in enumerate(("clock", "processor")):
        ours, autoreload = (statistics.median(run[extension][kind] for run in loads) for extension in (0, 1))
        limit = 2 * autoreload + 0.02
        print(
            f"%load_ext openmed_nb {ours * 1000:.1f} ms, autoreload {autoreload * 1000:.1f} ms of the {name}:"
            f" {ours / autoreload:.2f} x"
        )
        print(f"  bar: twice autoreload plus 20 ms = {limit * 1000:.1f} ms: {ours <= limit}")


def run_cells(*cells: str, pause: float = 0.0) -> tuple[float, float, str]:
    """Run cells in a fresh kernel as a user does, and return the times and the output of the last one.

    Args:
        cells: The cells.
        pause: Seconds between the last two cells.

    Returns:
        Seconds from the request to the reply, seconds of the processor, and the output.
    """
    printed: list[str] = []
    manager, client = start_new_kernel(kernel_name="python3", env=ENVIRONMENT, stderr=subprocess.DEVNULL)

    def run(cell: str) -> None:
        printed.clear()
        reply = client.execute_interactive(
            cell,
            allow_stdin=True,
            output_hook=lambda message: printed.append(message["content"].get("text", "")),
            timeout=120,
        )
        if reply["content"]["status"] != "ok":
            raise RuntimeError(reply["content"])

    try:
        for cell in cells[:-1]:
            run(cell)
        time.sleep(pause)
        run("import time; processor = time.process_time()")
        start = time.perf_counter()
        run(cells[-1])
        seconds = time.perf_counter() - start
        output = "".join(printed)
        run("print(time.process_time() - processor)")
        return seconds, float("".join(printed)), output
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


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
    print(f"  bar: at most {FIRST_FRACTION} of its processor's time: {ours[1] <= FIRST_FRACTION * theirs[1]}")


def print_first_answer(rounds: int) -> None:
    """Print how long a user waits for the first entities in a kernel."""
    load, device = "%load_ext openmed_nb", "%openmed_device"
    works = {
        "transformers' pipeline": lambda: run_cells(THEIRS),
        "%%openmed_ner": lambda: run_cells(load, OURS),
        f"%%openmed_ner, {PAUSE_SECONDS} s after {device}": lambda: run_cells(load, device, OURS, pause=PAUSE_SECONDS),
    }
    taken: dict[str, list[tuple[float, float, str]]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            taken[name].append(work())
    print(f"{'first entities in a kernel':<44}{'seconds':>10}{'of the processor':>20}")
    rows = []
    for name, runs in taken.items():
        clock, processor = (statistics.median(run[column] for run in runs) for column in (0, 1))
        rows.append((clock, processor))
        print(f"{name:<44}{clock:>10.2f}{processor:>20.2f}")
    theirs, ours, preloaded = rows
    ratios = [mine / its for mine, its in zip(ours, theirs, strict=True)]
    print(f"first answer: {ratios[0]:.2f} x transformers' pipeline, {ratios[1]:.2f} x its processor's time")
    print(f"  bar: at most {FIRST_FRACTION}: {ratios[0] <= FIRST_FRACTION}, {ratios[1] <= FIRST_FRACTION}")
    print(f"  bar: preloaded at most {PRELOADED_SECONDS} s: {preloaded[0] <= PRELOADED_SECONDS}")


def print_panel(rounds: int) -> None:
    """Print what opening the panel costs."""
    answers = [run_cells(PANEL)[2].split() for _ in range(rounds)]
    opened, imported = (statistics.median(float(answer[column]) for answer in answers) for column in (0, 1))
    print(f"panel {opened * 1000:.0f} ms, import ipywidgets {imported * 1000:.0f} ms: {opened / imported:.2f} x")
    torch = any(answer[2] == "True" for answer in answers)
    print(f"  bar: under {PANEL_SECONDS * 1000:.0f} ms, without torch: {opened < PANEL_SECONDS and not torch}")


def main(rounds: int) -> None:
    """Measure alternately, and print medians and ratios."""
    print_loads(rounds)
    print_first_answer(rounds)
    print_annotate(rounds)
    print_panel(rounds)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
