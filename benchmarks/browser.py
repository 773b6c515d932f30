"""Print how the browser of many notes compares with that of 100 notes, in JupyterLab: first paint and next note.

python benchmarks/browser.py [ROUNDS]

Both are measured alternately in a real browser: from the keys that run the cell, and from the click on "Next", to the note on the page.
It needs the test extra, and Chromium or Google Chrome.
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
COUNTS = (100, 100_000)
MAX_RATIO = 2.0

SETUP = """
from openmed_nb.annotation.references import text_fingerprint
from openmed_nb.annotation.results import Annotations
from openmed_nb.annotation.storage import ResultStore

def annotations(count):
    sentence = "Patient {} has asthma and takes aspirin. She has no further complaints, and lives at home. "
    texts = [sentence.format(number) * 10 for number in range(count)]
    store = ResultStore()
    for number, text in enumerate(texts):
        start = text.index("asthma")
        drug = text.index("aspirin")
        store.add(text_fingerprint(text), [
            {"entity_group": "DISEASE", "score": 0.9, "word": f"asthma {number % 1000}", "start": start, "end": start + 6},
            {"entity_group": "DRUG", "score": 0.6, "word": "aspirin", "start": drug, "end": drug + 7},
        ])
    return Annotations(store, tuple(texts[:5]), "m", "cpu", texts=texts)
"""

# From a key or a click to the first frame with a note that was not on the page before.
BEGIN = """type => {
  document.querySelectorAll('.openmed-note > *').forEach(note => { note.dataset.seen = 'yes'; });
  window.painted = new Promise(done => document.addEventListener(type, function begin(event) {
    if (type === 'keydown' && event.key !== 'Enter') return;
    document.removeEventListener(type, begin, true);
    const start = performance.now();
    const look = () => document.querySelector('.openmed-note > :not([data-seen])')
      ? done(performance.now() - start) : requestAnimationFrame(look);
    look(); }, true)); }"""


def first_paint(front: Any, cell: int) -> float:
    """Run a cell by keyboard, and return the milliseconds until its note is on the page."""
    front.page.locator(".jp-Notebook .jp-CodeCell").nth(cell).locator(".jp-InputPrompt").click()
    front.page.evaluate(BEGIN, "keydown")
    front.page.keyboard.press("Control+Enter")
    milliseconds: float = front.page.evaluate("window.painted")
    front.page.wait_for_timeout(500)  # Later work must not count in the next round.
    return milliseconds


def next_note(front: Any, cell: int) -> float:
    """Return the milliseconds from the click on "Next" to the next note, near the end of all notes."""
    view = front.page.locator(".jp-Notebook .jp-CodeCell").nth(cell).locator(".openmed-notes")
    view.get_by_label("Note", exact=True).fill(str(COUNTS[cell] - 20))
    view.get_by_label("Note", exact=True).press("Enter")
    front.page.wait_for_timeout(700)
    front.page.evaluate(BEGIN, "click")
    view.get_by_role("button", name="Next").click()
    milliseconds: float = front.page.evaluate("window.painted")
    return milliseconds


def main(rounds: int) -> None:
    """Measure both alternately, and print medians and their ratio."""
    found = next(filter(None, map(CONFTEST["shutil"].which, (CONFTEST["MAC_BROWSER"], *CONFTEST["BROWSERS"]))))
    cells = [f"found_{count}" for count in COUNTS]
    with (
        tempfile.TemporaryDirectory() as home,
        jupyter_server.serving(Path(home)) as server,
        sync_playwright() as play,
    ):
        browser = play.chromium.launch(executable_path=found, args=CONFTEST["ARGUMENTS"])
        notebook = new_notebook(cells=[new_code_cell(cell) for cell in cells], metadata=CONFTEST["KERNEL"])
        nbformat.write(notebook, server.notebooks / "browser.ipynb")
        page = browser.new_context(viewport=CONFTEST["WIDE"]).new_page()
        page.set_default_timeout(CONFTEST["PATIENCE"])
        front = front_ends.FRONTS["lab"](server, page, "browser.ipynb")
        front.run(SETUP + "".join(f"\nfound_{count} = annotations({count})" for count in COUNTS))
        front.run_all()
        for name, measure in (("first paint", first_paint), ("next note", next_note)):
            taken = [[measure(front, cell) for cell in (0, 1)] for _ in range(rounds)]
            medians = [statistics.median(times) for times in zip(*taken, strict=True)]
            for count, median in zip(COUNTS, medians, strict=True):
                print(f"{name:<12}{count:>9,} notes{median:>8.0f} ms")
            ratio = medians[1] / medians[0]
            print(f"  bar: at most {MAX_RATIO:g} times that of {COUNTS[0]} notes: {ratio:.2f}, {ratio <= MAX_RATIO}")
        browser.close()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 7)
