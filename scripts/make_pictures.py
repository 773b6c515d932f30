"""Take the pictures of the README and the docs in a real browser: JupyterLab, in light and dark.

python scripts/make_pictures.py [NAME ...] [--folder FOLDER]

It needs the test extra, and Chromium or Google Chrome. The first cells are those of the README; those that need a GPU to be of
interest run on a simulated Mac, which the picture states.
"""

from __future__ import annotations

import argparse
import io
import re
import runpy
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
from nbformat.v4 import new_code_cell, new_notebook
from PIL import Image
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))  # As pytest does, so that the package helpers is found.
from helpers import front_ends, jupyter_server  # noqa: E402 - only now

BROWSER_TESTS = runpy.run_path(str(ROOT / "tests" / "browser" / "conftest.py"))
THEMES = ("light", "dark")
SIZE, MOVING_SIZE = {"width": 960, "height": 7000}, {"width": 900, "height": 620}
SHARPNESS, COLORS, MARGIN = 2, 128, 8
STILL = 500
"""Milliseconds from which a frame of the moving picture stands; its colors are those of all of them."""

RESULT_TIME = 2500
"""Milliseconds of the first frame, which shows the result."""

BORDER = 2
"""How far above an output the frame of its cell ends."""

README = (ROOT / "README.md").read_text("utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)\n```$", README, flags=re.DOTALL | re.MULTILINE)
LOAD, NER = (code for language, code in BLOCKS if not language)
DEVICE = f"{LOAD}\n%openmed_device"
PANEL = "%openmed_panel"
SUMMARY = """import openmed_nb as nb

notes = ["Seen for asthma.", "No complaints.", "Migraine since 2019; asthma as a child."]
found = nb.annotate(notes)
found.summary()"""
BROWSER = """import pandas as pd

table = pd.read_csv("data/notes.csv")
found = nb.annotate(table, text_column="text", id_column="note_id", progress=False).with_context()
found"""
REVIEW = """import tempfile

found.review(f"{tempfile.mkdtemp()}/review.jsonl", sample=20)"""
DEFECT = """with nb.simulated_mps(defects=["pytorch#177116"]):
    found = nb.doctor("bundled_small")
found"""
LEAK = """import torch

kept = []
for epoch in (loop := nb.epochs(8)):
    kept.append(torch.ones(1_000_000, requires_grad=True).square())
loop.curve"""
CELLS = {
    "device": DEVICE,
    "ner": NER,
    "summary": SUMMARY,
    "browser": BROWSER,
    "review": REVIEW,
    "doctor": DEFECT,
    "sweep": 'nb.sweep("bundled")',
    "curve": LEAK,
    "simulated": "%openmed_device --simulate mps",
    "panel": PANEL,
}
"""The cells of one notebook; each but that which begins the simulation gives a picture."""

ALWAYS = ("device", "summary", "browser", "simulated")
"""The cells that others need: they load the extension, import the package, annotate notes, and begin the simulation."""

NARROW = ("device", "ner", "summary")
"""The pictures of text, which are as narrow as a phone: there, a wider one would be scaled until nobody can read it."""

NARROW_WIDTH = 360

TYPED = (
    "%load_ext openmed_nb\n%openmed_device --simulate mps",
    "%%openmed_ner\nPatient with type 2 diabetes mellitus and hypertension. No history of asthma.",
    "%openmed_panel",
)
"""The cells of the moving picture."""


def main() -> None:
    """Take every picture, or those that are named."""
    command = argparse.ArgumentParser(description="Take the pictures of the README and the docs.")
    names = [name for name in (*CELLS, "demo", "layers") if name != "simulated"]
    command.add_argument("names", nargs="*", choices=names, help="the pictures; all if left out")
    command.add_argument("--folder", type=Path, default=ROOT / "docs" / "pictures")
    asked = command.parse_args()
    asked.folder.mkdir(exist_ok=True)
    wanted = asked.names or names
    if "layers" in wanted:
        for theme in THEMES:
            (asked.folder / f"layers_{theme}.svg").write_text(layers(theme), "utf-8")
    if set(wanted) - {"layers"}:
        photograph(wanted, asked.folder)


def photograph(wanted: list[str], folder: Path) -> None:
    """Start a server and a browser, and take the pictures."""
    found = next(filter(None, map(shutil.which, (BROWSER_TESTS["MAC_BROWSER"], *BROWSER_TESTS["BROWSERS"]))))
    with (
        tempfile.TemporaryDirectory() as home,
        jupyter_server.serving(Path(home)) as server,
        sync_playwright() as play,
    ):
        shutil.copytree(ROOT / "notebooks" / "data", server.notebooks / "data")
        browser = play.chromium.launch(executable_path=found, args=BROWSER_TESTS["ARGUMENTS"])
        expect.set_options(timeout=BROWSER_TESTS["PATIENCE"])
        if set(wanted) & set(CELLS):
            still(server, browser, wanted, folder)
        for theme in THEMES if "demo" in wanted else ():
            moving(server, browser, theme, folder)
        browser.close()


def layers(theme: str) -> str:
    """Return the layers of the table in docs/architecture.md, one upon the other under a roof, as SVG."""
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    rows = re.findall(r"^\| (`.*`) \| (.*?) \|", text, flags=re.MULTILINE)
    line, ink, fill = {"light": ("#8c959f", "#1f2328", "#f6f8fa"), "dark": ("#6e7681", "#f0f6fc", "#151b23")}[theme]
    high, roof = 40, 56
    bottom = roof + high * len(rows)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 {bottom + 8}" width="720" stroke-width="1.5">',
        f'<g font-size="15" font-family="system-ui, sans-serif" fill="{ink}">',
        f'<path d="M20 {roof} L360 6 L700 {roof} Z" fill="{fill}" stroke="{line}"/>',
        f'<text x="360" y="{roof - 14}" text-anchor="middle">a notebook, a shell, Python</text>',
    ]
    for number, (names, purpose) in enumerate(rows):
        top = roof + number * high
        ground = number == len(rows) - 1
        wide = (8, 704) if ground else (40, 640)
        parts.append(
            f'<rect x="{wide[0]}" y="{top}" width="{wide[1]}" height="{high}" fill="{fill}" stroke="{line}"/>'
            f'<text x="{wide[0] + 20}" y="{top + 25}" font-weight="bold">{names.replace("`", "")}</text>'
            f'<text x="{wide[0] + wide[1] - 20}" y="{top + 25}" text-anchor="end">{purpose}</text>'
        )
    return "\n".join([*parts, "</g>", "</svg>\n"])


def opened(server: Any, browser: Browser, theme: str, cells: list[str], **context: Any) -> Any:
    """Open a notebook of some cells in JupyterLab, without side panels."""
    name = f"{theme}{len(cells)}.ipynb"
    notebook = new_notebook(cells=[new_code_cell(cell) for cell in cells], metadata=BROWSER_TESTS["KERNEL"])
    nbformat.write(notebook, server.notebooks / name)
    page = browser.new_context(**context).new_page()
    page.set_default_timeout(BROWSER_TESTS["PATIENCE"])
    front = front_ends.FRONTS["lab"](server, page, name, theme)
    page.keyboard.press("ControlOrMeta+b")
    return front


def still(server: Any, browser: Browser, wanted: list[str], folder: Path) -> None:
    """Run all cells, and take a picture of the last output of each, in each theme."""
    cells = {name: cell for name, cell in CELLS.items() if name in {*wanted, *ALWAYS}}
    front = opened(server, browser, THEMES[0], list(cells.values()), viewport=SIZE, device_scale_factor=SHARPNESS)
    front.run_all()
    if "panel" in wanted:
        front.button("Annotate").click()
        expect(front.region("Try it").locator("mark").first).to_be_visible()
    for theme in THEMES:
        if front.theme != theme:
            front.choose_theme(theme)
        front.page.mouse.move(1, 1)
        for number, name in enumerate(cells):
            if name in wanted:
                shown = front.page.locator(".jp-CodeCell").nth(number).locator(".jp-OutputArea-output").last
                if name in NARROW:
                    shown.evaluate("(output, width) => { output.style.maxWidth = `${width}px`; }", NARROW_WIDTH)
                image = Image.open(io.BytesIO(taken(front.page, shown))).convert("RGB")
                image = image.quantize(COLORS, dither=Image.Dither.NONE)
                image.save(folder / f"{name}_{theme}.png", optimize=True)


def taken(page: Page, element: Locator) -> bytes:
    """Return a picture of an element and a margin around it."""
    box = element.bounding_box()
    assert box is not None  # noqa: S101 - it is on the page
    place = {"x": box["x"] - MARGIN, "y": box["y"] - BORDER}
    return page.screenshot(clip={**place, "width": box["width"] + 2 * MARGIN, "height": box["height"] + 2 * BORDER})


def moving(server: Any, browser: Browser, theme: str, folder: Path) -> None:
    """Type, run and click, and make a moving picture of it."""
    front = opened(server, browser, theme, [""], viewport=MOVING_SIZE)
    frames = list(played(front))
    images = [Image.open(io.BytesIO(picture)).convert("RGB") for picture, _ in frames]
    times = [time for _, time in frames]
    stills = [image for image, time in zip(images, times, strict=True) if time >= STILL]
    together = Image.new("RGB", (images[0].width, images[0].height * len(stills)))
    for number, image in enumerate(stills):
        together.paste(image, (0, number * image.height))
    palette = together.quantize(COLORS, Image.Quantize.MAXCOVERAGE, kmeans=3)  # Rare colors are marks and code.
    # The result comes first, because a page that is opened would otherwise show an empty notebook for seconds.
    result = stills[len(TYPED) - 1]
    first, *others = [image.quantize(palette=palette, dither=Image.Dither.NONE) for image in (result, *images)]
    times = [RESULT_TIME, *times]
    first.save(folder / f"demo_{theme}_still.png", optimize=True)
    first.save(folder / f"demo_{theme}.gif", save_all=True, append_images=others, duration=times, loop=0, optimize=True)


def played(front: Any) -> Iterator[tuple[bytes, int]]:
    """Yield the pictures, each with how many milliseconds it is shown."""
    page = front.page
    seen = page.locator(".jp-NotebookPanel-notebook")
    page.locator(".jp-CodeCell .cm-content").first.click()
    for number, cell in enumerate(TYPED):
        for character in cell:
            page.keyboard.type(character)
            yield seen.screenshot(), 45
        page.keyboard.press("Shift+Enter")
        prompt = page.locator(".jp-CodeCell .jp-InputPrompt").nth(number)
        while not re.search(r"\[\d+\]", prompt.inner_text()):
            yield seen.screenshot(), 150
            page.wait_for_timeout(250)
        page.wait_for_timeout(1000)
        yield seen.screenshot(), 2000
    front.panel.scroll_into_view_if_needed()
    yield seen.screenshot(), 1500
    front.device_button("cpu").hover()
    yield seen.screenshot(), 800
    front.device_button("cpu").click()
    front.expect_pressed("cpu")
    page.wait_for_timeout(1000)
    yield seen.screenshot(), 4000


if __name__ == "__main__":
    main()
