"""A walk through the panel: in the first suite in JupyterLab, in the slow suite in every front end."""

import re

import nbformat
import pytest
from playwright.sync_api import expect

from helpers import page_measures

DEVICE = "(session.device().device, session.device().requested_by)"
MAIN_THREAD = """
import threading
threads = []
session.subscribe(lambda activity: threads.append(threading.current_thread() is threading.main_thread()))
"""
PAYLOAD = "<img src=x onerror=window.__ran=1>"
"""An image that is not there; where it is taken for HTML, its handler runs."""

REGION = """
- heading "Device" [level=2]
- status:
  - paragraph:
    - strong: mps (SIMULATED)
- button "mps ✓"
- button "cpu"
- button "Reset"
- group: All devices
"""
"""Accessibility tree of the device region on a simulated Mac."""


@pytest.fixture(
    scope="module", params=["lab", *(pytest.param(label, marks=pytest.mark.slow) for label in ("notebook7", "voila"))]
)
def opened(request, open_panel):
    """A notebook with two panels."""
    return open_panel(request.param, "light", "bundled_small", "second = nb.panel('bundled_small')\nsecond")


@pytest.fixture
def front(opened):
    """The same page; afterwards the session is as it began."""
    yield opened
    opened.begin_again()


def test_click_changes_the_kernel_and_every_panel(front):
    """After a click on a device the kernel uses it, and both panels show who asked; what a magic changes they show too."""
    front.device_button("cpu").click()

    front.expect_kernel(DEVICE, ("cpu", "the panel"))
    for panel in (0, 1):
        front.expect_pressed("cpu", panel)
        expect(front.region("Device", panel)).to_contain_text("the panel")
    front.run("%openmed_device --reset")
    for panel in (0, 1):
        front.expect_pressed("auto", panel)


@pytest.mark.parametrize("key", ["Enter", pytest.param("Space", marks=pytest.mark.slow)])
def test_key_presses_a_button_and_keeps_the_focus(front, key):
    """A key that JupyterLab takes for itself chooses a device; the focus stays on its button, and the cells are as before."""
    before = front.cell_types()
    front.region("Device").get_by_role("heading").click()
    front.tab_to("cpu")
    front.page.keyboard.press(key)

    front.expect_kernel(DEVICE, ("cpu", "the panel"))
    front.expect_pressed("cpu")
    assert front.focus.startswith("cpu")
    assert front.cell_types() == before


def test_click_waits_for_the_running_cell(front):
    """A click while a cell runs is done after the cell, in the thread that runs the cells."""
    front.run(MAIN_THREAD)
    with front.running_cell("at_its_end = session.device().requested"):
        front.device_button("cpu").click()

    front.expect_kernel(DEVICE, ("cpu", "the panel"))
    assert front.evaluate("(at_its_end, bool(threads) and all(threads))") == ("auto", True)
    front.expect_pressed("cpu")


def test_annotated_text_remains_text(front):
    """Annotate marks what the model finds in the text of the page, with the time and the device; nothing in it runs or is saved."""
    front.run("%openmed_device cpu")
    front.region("Try it").get_by_role("textbox").fill(f"{PAYLOAD} has asthma")
    front.button("Annotate").click()

    expect(front.region("Try it").locator("mark").first).to_contain_text("asthma")
    expect(front.region("Try it")).to_contain_text(f"{PAYLOAD} has asthma")
    expect(front.region("Try it")).to_contain_text(re.compile(r"Model: bundled_small, device: cpu, [\d.]+ m?s"))
    expect(front.region("Models")).to_contain_text("1 model loaded: bundled_small")
    assert front.page.evaluate("window.__ran") is None
    if front.label == "voila":  # It saves no notebook.
        return
    front.save()
    saved = nbformat.read(front.server.notebooks / front.name, as_version=4)
    forms = [set(output.data) for cell in saved.cells for output in cell.outputs if "data" in output]
    assert forms == [{"application/vnd.jupyter.widget-view+json", "text/html", "text/plain"}] * 2
    assert "widgets" not in saved.metadata
    assert "onerror" not in nbformat.writes(saved)


def test_panel_is_accessible(front):
    """On a simulated Mac every text has a contrast of 4.5 to 1, nothing overflows, and every control has a name."""
    front.run("%openmed_device --simulate mps\npanel.model.use_device('cuda:99')")
    expect(front.panel.get_by_role("alert")).to_be_visible()
    contrasts = page_measures.contrasts(front.panel)

    assert {"auto", "mps", "cpu", "Error:", "Refresh", "(SIMULATED)"} <= {
        word for text in contrasts for word in text.split()
    }
    assert {text: ratio for text, ratio in contrasts.items() if ratio < 4.5} == {}
    assert page_measures.sticking_out(front.panel) == []
    assert page_measures.findings(front.page, ".openmed-panel") == []
    expect(front.region("Device")).to_match_aria_snapshot(REGION)
