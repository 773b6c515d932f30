"""A notebook opened in a browser: the page of one front end, and the kernel behind it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

IDLE = "Python 3 (ipykernel) | Idle"
START = 240_000
"""Milliseconds for what starts a kernel, or imports torch, on however busy a computer."""

PRESSED = re.compile(r"\bmod-active\b")
"""What a button that looks pressed has in its class."""

FOCUS = """() => { const e = document.activeElement, panel = document.querySelector('.openmed-panel');
  return panel.contains(e) ? (e.labels?.[0]?.innerText || e.innerText || e.tagName).trim() : ''; }"""


class Front:
    """A notebook in a front end; each front end says how it is opened and run.

    Args:
        server: The server of the notebook.
        page: An empty page.
        name: The file of the notebook.
        theme: ``"light"`` or ``"dark"``.
        waits_for: What Voila shows when it has run the notebook.
    """

    label = ""

    def __init__(
        self, server: Any, page: Page, name: str, theme: str = "light", waits_for: str = ".openmed-panel"
    ) -> None:
        self.server, self.page, self.name, self.theme = server, page, name, theme
        self.waits_for = waits_for
        server.set_theme(theme)
        self.kernel = self._open()

    @property
    def panels(self) -> Locator:
        """The panels on the page."""
        return self.page.locator(".openmed-panel")

    @property
    def panel(self) -> Locator:
        """The first panel."""
        return self.panels.first

    def region(self, name: str, panel: int = 0) -> Locator:
        """Return a region of a panel by its heading."""
        heading = self.page.get_by_role("heading", name=name, exact=True)
        return self.panels.nth(panel).locator(".openmed-region").filter(has=heading)

    def button(self, name: str, panel: int = 0) -> Locator:
        """Return a button of a panel by its name."""
        return self.panels.nth(panel).get_by_role("button", name=name, exact=True)

    def device_button(self, device: str, panel: int = 0) -> Locator:
        """Return the button of a device, whatever it says besides."""
        return self.panels.nth(panel).get_by_role("button", name=re.compile(rf"^{device}\b"))

    @property
    def focus(self) -> str:
        """What has the keyboard's focus, empty where that is outside of the first panel."""
        return str(self.page.evaluate(FOCUS))

    def tab_to(self, name: str) -> None:
        """Press Tab until a control of the first panel has the focus."""
        for _ in range(30):
            self.page.keyboard.press("Tab")
            if self.focus.startswith(name):
                return
        pytest.fail(f"Tab does not lead to {name}")

    def expect_pressed(self, device: str, panel: int = 0) -> None:
        """Expect that the button of a device looks pressed."""
        expect(self.device_button(device, panel)).to_have_class(PRESSED)

    def run(self, code: str) -> str:
        """Run a cell from outside of the page."""
        return self.kernel.run(code)

    def begin_again(self) -> None:
        """Bring the session back to how it began."""
        self.run("session.end_simulation(); session.reset()\nif session.inventory():\n    session.unload()")

    @contextlib.contextmanager
    def running_cell(self, at_its_end: str = "") -> Iterator[None]:
        """Let a cell run for as long as the with block, and do something at its end."""
        signal = self.server.folder / "go_on"
        signal.unlink(missing_ok=True)
        waiting = f"while not pathlib.Path({str(signal)!r}).exists(): time.sleep(0.05)"
        self.kernel.begin(f"import pathlib, time\n{waiting}\n{at_its_end}")
        try:
            yield
        finally:
            signal.touch()

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression in the kernel, which may not have processed a click yet."""
        return self.kernel.evaluate(expression)

    def expect_kernel(self, expression: str, expected: Any) -> None:
        """Expect that the kernel comes to say something of an expression."""
        self.wait_until(lambda: self.evaluate(expression) == expected, f"{expression} == {expected!r}")

    def wait_until(self, true: Callable[[], Any], what: str = "It") -> None:
        """Wait until something is true on the page."""
        for _ in range(START // 200):
            if true():
                return
            self.page.wait_for_timeout(200)
        pytest.fail(f"{what} did not become true.")

    def cell_types(self) -> list[str]:
        """Return the types of the cells that can be edited, which a stolen key would change."""
        cells = self.page.locator(".jp-Notebook .jp-Cell")
        return cells.evaluate_all("cells => cells.map(cell => cell.className.match(/jp-(Code|Markdown|Raw)Cell/)[1])")

    def run_all(self) -> None:
        """Run the notebook, and wait until its last cell is done."""
        raise NotImplementedError

    def _open(self) -> Any:
        raise NotImplementedError

    def _address(self, path: str, **parameters: str) -> str:
        rest = "".join(f"&{name}={value}" for name, value in parameters.items())
        return f"{self.server.url}/{path}/{self.name}?token={self.server.token}{rest}"


class Editor(Front):
    """What JupyterLab and Notebook 7 have in common: cells that can be edited and run."""

    def run_all(self) -> None:
        """Run the notebook by the menu."""
        self.page.get_by_role("menuitem", name="Run", exact=True).click()
        self.page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
        last = self.page.locator(".jp-Notebook .jp-CodeCell .jp-InputPrompt").last
        failed = self.page.locator("[data-mime-type='application/vnd.jupyter.error']")
        self.wait_until(lambda: re.search(r"\[\d+\]", last.inner_text()) or failed.count(), "The run of the last cell")
        assert failed.all_inner_texts() == []

    def run_cells(self, count: int) -> None:
        """Run the first cells one by one, by keyboard."""
        self.page.locator(".jp-Notebook .jp-Cell").first.click()
        for _ in range(count):
            self.page.keyboard.press("Shift+Enter")

    def type_cell(self, code: str) -> None:
        """Type a cell at the end of the notebook and run it."""
        self.page.locator(".jp-Notebook .jp-Cell").last.locator(".jp-InputPrompt, .jp-InputArea-prompt").first.click()
        self.page.keyboard.press("b")
        self.page.keyboard.press("Enter")
        self.page.keyboard.type(code)
        self.page.keyboard.press("Shift+Enter")

    def save(self) -> None:
        """Save the notebook, and wait until the file is written."""
        with self.page.expect_response(lambda reply: reply.request.method == "PUT" and self.name in reply.url):
            self.page.keyboard.press("ControlOrMeta+s")

    def choose_theme(self, theme: str) -> None:
        """Change the theme of the page by the menu."""
        self.page.get_by_role("menuitem", name="Settings", exact=True).click()
        self.page.locator(".lm-Menu-item").get_by_text("Theme", exact=True).click()
        self.page.locator(".lm-Menu-item").get_by_text(f"JupyterLab {theme.title()}", exact=True).click()
        expect(self.page.locator("body")).to_have_attribute("data-jp-theme-light", str(theme == "light").lower())
        expect(self.page.locator("#jupyterlab-splash")).to_have_count(0)
        self.theme = theme


class Lab(Editor):
    """JupyterLab 4."""

    label = "lab"

    def _open(self) -> Any:
        kernel = self.server.start_session(self.name)
        self.page.goto(self._address("lab/tree", reset=""))
        self.page.get_by_text(IDLE).wait_for(timeout=START)
        return kernel


class Notebook7(Editor):
    """Notebook 7."""

    label = "notebook7"

    def _open(self) -> Any:
        kernel = self.server.start_session(self.name)
        self.page.goto(self._address("notebooks"))
        self.page.locator(".jp-Notebook-ExecutionIndicator[data-status=idle]").wait_for(timeout=START)
        return kernel


class Voila(Front):
    """Voila, which runs the notebook before it shows it."""

    label = "voila"

    def _open(self) -> Any:
        before = self.server.kernels_running()
        self.page.goto(self._address("voila/render", theme=self.theme))
        self.page.locator(self.waits_for).first.wait_for(timeout=START)
        (kernel,) = self.server.kernels_running() - before
        return self.server.kernel(kernel)

    def run_all(self) -> None:
        """Do nothing: it was run to be shown."""


FRONTS = {front.label: front for front in (Lab, Notebook7, Voila)}
