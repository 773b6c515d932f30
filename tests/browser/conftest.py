"""A real browser, and one Jupyter server whose notebooks are opened in JupyterLab, Notebook 7 and Voila."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook
from playwright.sync_api import Browser, BrowserContext, Locator, Page, expect, sync_playwright

from helpers import front_ends, jupyter_server

FOLDER = Path(__file__).parent
SHIPPED = FOLDER.parents[1] / "notebooks" / "05_faster.ipynb"

BROWSERS = ("chromium", "google-chrome", "google-chrome-stable", "chromium-browser")
MAC_BROWSER = "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"
ARGUMENTS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
)
MISSING = (
    "No Chromium and no Google Chrome were found, so nothing is tested in a browser. Install one: "
    "apt-get install chromium on Debian, or Google Chrome from https://www.google.com/chrome."
)
TEMPLATES_OWN = (
    "https://cdn.jsdelivr.net/npm/@fortawesome/fontawesome-free",
    "https://cdnjs.cloudflare.com/ajax/libs/mathjax/",
    "https://cdnjs.cloudflare.com/ajax/libs/require.js/",
)
"""What every page of Voila or of nbconvert asks for, with or without a panel; without an answer it is shown all the same."""
WIDE = {"width": 1200, "height": 1400}
LOADED = "%load_ext openmed_nb\nimport openmed_nb as nb\nfrom openmed_nb.session import SESSION as session"
"""The first cell of a notebook of these tests."""

PATIENCE = 120_000
"""Milliseconds for what is expected of a page, on however busy a computer; the first model takes seconds."""

KERNEL = {"kernelspec": {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}}


@pytest.fixture(scope="session")
def chromium() -> str:
    """The path of a browser; without one the tests are skipped."""
    found = shutil.which(MAC_BROWSER) or next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(MISSING)
    return found


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Browser]:
    """A running browser; of each file its own, because Playwright's event loop would be in the way of other tests."""
    with sync_playwright() as playwright:
        expect.set_options(timeout=PATIENCE)
        running = playwright.chromium.launch(executable_path=chromium, headless=True, args=ARGUMENTS)
        yield running
        running.close()


@pytest.fixture(scope="session")
def server(
    chromium: str,  # noqa: ARG001 - without a browser no server is started
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Any]:
    """The Jupyter server, with a folder for notebooks and their data."""
    with jupyter_server.serving(tmp_path_factory.mktemp("jupyter")) as running:
        shutil.copytree(SHIPPED.parent / "data", running.notebooks / "data")
        yield running


@pytest.fixture(scope="module")
def new_page(browser: Browser) -> Iterator[Callable[..., Page]]:
    """A function that gives an empty page; at the end no page may have asked for anything outside of this computer."""
    contexts: list[BrowserContext] = []
    outside: list[str] = []

    def new_page(**viewport: int) -> Page:
        context = browser.new_context(viewport={**WIDE, **viewport})
        context.on("request", lambda request: outside.append(request.url))
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(PATIENCE)
        return page

    yield new_page
    for context in contexts:
        context.close()
    # On another host, and not requested by the template of the page.
    own = ("http://127.0.0.1:", "data:", "blob:", "file:", "about:", *TEMPLATES_OWN)
    assert [url for url in outside if not url.startswith(own)] == []


@pytest.fixture(scope="session")
def write(server: Any) -> Callable[..., str]:
    """A function that writes a notebook into the server's folder, of some cells behind those of another, and returns its name."""

    def write(stem: str, *cells: str, behind: Path | None = None) -> str:
        notebook = new_notebook(metadata=KERNEL) if behind is None else nbformat.read(behind, as_version=4)
        notebook.cells += [new_code_cell(cell) for cell in cells]
        nbformat.write(notebook, server.notebooks / f"{stem}.ipynb")
        return f"{stem}.ipynb"

    return write


@pytest.fixture(scope="session")
def shipped(write: Callable[..., str]) -> Callable[..., str]:
    """A function that copies the shipped notebook into the server's folder, with some cells at its end."""
    return partial(write, behind=SHIPPED)


@pytest.fixture(scope="module")
def open_panel(server: Any, new_page: Callable[..., Page], write: Callable[..., str]) -> Callable[..., Any]:
    """A function that opens a notebook in a front end, runs it, and returns the page with a panel on it."""

    def open_panel(label: str, theme: str = "light", model: str = "bundled_small", *cells: str) -> Any:
        name = write(label, LOADED, f"panel = nb.panel({model!r})\npanel", *cells)
        front = front_ends.FRONTS[label](server, new_page(), name, theme)
        front.run_all()
        return front

    return open_panel


@pytest.fixture
def picture(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Locator, str], Path]:
    """A function that takes a picture of an element, and keeps it where ``--screenshots`` says."""
    wanted = request.config.getoption("screenshots")
    folder = Path(wanted) if wanted else tmp_path

    def take(element: Locator, name: str) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        element.screenshot(path=folder / f"{name}.png")
        return folder / f"{name}.png"

    return take
