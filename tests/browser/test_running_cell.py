"""A click while a cell runs is done after the cell, in the thread that runs the cells, and the panel says that it waits."""

import re

import pytest
from playwright.sync_api import expect

from openmed_nb.notebook.panel.rendering import CELL_RUNNING_NOTICE, CLICK_PENDING_NOTICE

LISTEN = (
    "import threading\nthreads = []\n"
    "session.subscribe(lambda activity: threads.append(threading.current_thread() is threading.main_thread()))"
)
WAITS = re.compile(f"{CELL_RUNNING_NOTICE}|{CLICK_PENDING_NOTICE}")
"""What the panel says; the second where the kernel hears of the click while the cell runs."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["lab", "notebook7", "voila"])
def opened(request, open_panel):
    """A notebook with a panel in each front end, and a listener that notes in which thread the session changes."""
    front = open_panel(request.param)
    front.run(LISTEN)
    return front


@pytest.fixture
def front(opened):
    """The same page; afterwards the session is as it began."""
    opened.run("threads.clear()")
    yield opened
    opened.begin_again()


def click_during_a_cell(front):
    """Click a device and a button while a cell runs, which notes at its end what the session asks for."""
    with front.running_cell("at_its_end = session.device().requested"):
        expect(front.panel).to_contain_text(CELL_RUNNING_NOTICE)
        front.device_button("cpu").click()
        front.button("Refresh").click()
        front.page.wait_for_timeout(500)
        expect(front.panel).to_contain_text(WAITS)
        expect(front.region("Device").get_by_role("status").first).to_contain_text("selected automatically")


def expect_done_after_the_cell(front):
    """Expect that nothing was done while the cell ran, and all of it afterwards, in the main thread."""
    front.expect_kernel("session.device().requested_by", "the panel")
    assert front.evaluate("at_its_end") == "auto"
    assert front.evaluate("threads and all(threads)") is True
    front.expect_pressed("cpu")
    expect(front.panel).not_to_contain_text(WAITS)


def test_later_clicks_wait_for_the_cell(front):
    """So is a click on buttons that were clicked before, whose messages the kernel handles in another thread."""
    front.device_button("cpu").click()
    front.button("Refresh").click()
    front.expect_kernel("session.device().requested_by", "the panel")
    front.button("Reset").click()
    front.expect_kernel("session.device().requested", "auto")
    front.run("threads.clear()")
    click_during_a_cell(front)

    expect_done_after_the_cell(front)


def test_last_of_several_waiting_clicks_decides(front):
    """Clicks on another device and then on the previous device during a cell keep the previous device."""
    front.run("%openmed_device --simulate mps")
    with front.running_cell():
        front.device_button("cpu").click()
        front.device_button("mps").click()
        front.page.wait_for_timeout(500)

    front.expect_kernel("(session.device().device, session.device().requested_by)", ("mps", "the panel"))
    front.expect_pressed("mps")
    expect(front.panel.locator(".mod-active")).to_have_count(1)


def test_displayed_text_is_annotated(front):
    """Annotate uses the text that is displayed at the click, even if both messages arrive together."""
    front.run("nb.load_pipeline('bundled_small')")
    expect(front.button("Unload bundled_small")).to_be_visible()
    box, annotate = front.region("Try it").get_by_role("textbox"), front.button("Annotate")
    for word in ("asthma", "hypertension", "influenza"):
        box.fill(f"No {word}.")
        annotate.click()
        expect(front.region("Try it").locator("mark").first).to_contain_text(word)
    with front.running_cell():
        box.fill("No diabetes.")
        annotate.click()
        front.page.wait_for_timeout(300)

    expect(front.region("Try it").locator("mark").first).to_contain_text("diabetes")
    front.expect_kernel("panel.model.state.annotation.text", "No diabetes.")
