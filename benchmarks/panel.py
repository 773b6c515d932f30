"""Print how long a user waits for the panel: from running its cell in JupyterLab to its first control on the page.

python benchmarks/panel.py [ROUNDS]

The kernel is warm: the extension is loaded, and a panel was opened before, and closed. A cell with a single button of ipywidgets is
measured alternately, which is the time of the front end, the kernel and this computer without the panel. It needs the test extra, and
Chromium or Google Chrome.
"""

from __future__ import annotations

import runpy
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbformat.v4 import new_code_cell, new_notebook
from playwright.sync_api import sync_playwright

TESTS = Path(__file__).parent.parent / "tests"
sys.path.insert(0, str(TESTS))  # As pytest does, so that the package helpers is found.
from helpers import front_ends, jupyter_server  # noqa: E402 - only now

CONFTEST = runpy.run_path(str(TESTS / "browser" / "conftest.py"))
CELLS = ("%load_ext openmed_nb\nimport ipywidgets", "%openmed_panel", "ipywidgets.Button(description='one')")
CLOSE = "%openmed_panel --close"
NAMES = ("panel", "one button")

# From the keys that run a cell to the first visible control that was not on the page before.
BEGIN = """() => { document.querySelectorAll('.jupyter-button').forEach(button => { button.dataset.seen = 'yes'; });
  window.controls = new Promise(done => document.addEventListener('keydown', function run(event) {
    if (event.key !== 'Enter') return;
    document.removeEventListener('keydown', run, true);
    const begin = performance.now();
    const look = () => { const button = document.querySelector('.jupyter-button:not([data-seen])');
      if (button?.checkVisibility() && button.getClientRects().length) done(performance.now() - begin);
      else requestAnimationFrame(look); };
    look(); }, true)); }"""

PANEL_MILLISECONDS = 300


def opening(front: Any, cell: int) -> float:
    """Run a cell by keyboard; return the milliseconds until a control of its output can be seen."""
    front.run(CLOSE)
    front.page.locator(".jp-Notebook .jp-CodeCell").nth(cell).locator(".jp-InputPrompt").click()
    front.page.evaluate(BEGIN)
    front.page.keyboard.press("Control+Enter")
    milliseconds: float = front.page.evaluate("window.controls")
    front.page.wait_for_timeout(1000)  # Work after the first control must not count in the next round.
    return milliseconds


def main(rounds: int) -> None:
    """Measure alternately, and print medians and the fastest."""
    found = next(filter(None, map(CONFTEST["shutil"].which, (CONFTEST["MAC_BROWSER"], *CONFTEST["BROWSERS"]))))
    with (
        tempfile.TemporaryDirectory() as home,
        jupyter_server.serving(Path(home)) as server,
        sync_playwright() as play,
    ):
        browser = play.chromium.launch(executable_path=found, args=CONFTEST["ARGUMENTS"])
        notebook = new_notebook(cells=[new_code_cell(cell) for cell in CELLS], metadata=CONFTEST["KERNEL"])
        nbformat.write(notebook, server.notebooks / "panel.ipynb")
        page = browser.new_context(viewport=CONFTEST["WIDE"]).new_page()
        page.set_default_timeout(CONFTEST["PATIENCE"])
        front = front_ends.FRONTS["lab"](server, page, "panel.ipynb")
        front.run_all()
        taken = [[opening(front, cell) for cell in (1, 2)] for _ in range(rounds)]
        browser.close()
    columns = dict(zip(NAMES, zip(*taken, strict=True), strict=True))
    for name, times in columns.items():
        print(f"{name:<12}{statistics.median(times):>8.0f} ms, the fastest of {rounds} {min(times):.0f} ms")
    print(f"  bar: under {PANEL_MILLISECONDS} ms: {statistics.median(columns['panel']) < PANEL_MILLISECONDS}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10)
