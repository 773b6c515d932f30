"""Every control works by keyboard alone, although JupyterLab and Notebook 7 take keys for themselves (ipywidgets#3912)."""

import pytest
from playwright.sync_api import expect

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["lab", "notebook7"])
def opened(request, open_panel):
    """A notebook with a panel, in each front end that takes keys for itself."""
    return open_panel(request.param)


@pytest.fixture
def front(opened):
    """The same page, with the focus before the panel; afterwards the session is as it began."""
    opened.region("Device").get_by_role("heading").click()
    yield opened
    opened.begin_again()


def test_tab_goes_through_the_controls_in_the_order_of_the_page(front):
    """Tab stops at every control that can be used, once, from the top to the bottom, and leaves the panel."""
    front.run("nb.load_pipeline('bundled_small')")
    devices = front.evaluate("[button.label for button in panel.model.state.buttons if button.enabled]")
    front.tab_to("auto")
    seen = [front.focus]
    while seen[-1]:
        front.page.keyboard.press("Tab")
        seen.append(front.focus.partition(":")[0])

    assert seen == [
        *(*devices, "Reset", "Why not a GPU?", "Refresh", "Release memory"),
        *("Text to annotate (Ctrl+Enter)", "Annotate", "1 model loaded", ""),
    ]


@pytest.mark.parametrize(
    ("region", "summary"),
    [("Device", "Why not a GPU?"), ("Models", "1 model loaded"), ("Environment", "MPS variables")],
)
def test_details_expand_by_keyboard(front, region, summary):
    """Enter on the summary of devices, models and variables shows their table, and hides it again."""
    front.run("nb.load_pipeline('bundled_small')")
    if region == "Environment":  # A computer without MPS does not show its variables.
        front.run("%openmed_device --simulate mps")
    front.tab_to(summary)
    table = front.region(region).get_by_role("table").first
    expect(table).to_be_hidden()
    front.page.keyboard.press("Enter")

    expect(table).to_be_visible()
    front.page.keyboard.press("Enter")
    expect(table).to_be_hidden()


def test_text_is_typed_and_annotated_by_keyboard(front):
    """Letters that are commands of the notebook go into the text box, and Enter on Annotate finds the entities."""
    before = front.cell_types()
    front.tab_to("Text to annotate")
    front.page.keyboard.press("ControlOrMeta+a")
    front.page.keyboard.type("mdaby: asthma")
    front.tab_to("Annotate")
    front.page.keyboard.press("Enter")

    expect(front.region("Try it").locator("mark").first).to_contain_text("asthma")
    front.expect_kernel("panel.model.state.annotation.text", "mdaby: asthma")
    assert front.cell_types() == before
    assert front.focus == "Annotate"


@pytest.mark.parametrize("keys", ["Control+Enter", "Meta+Enter"])
def test_shortcut_annotates_without_running_a_cell(front, keys):
    """The shortcut of the front end would run the cell of the panel, or add a cell below it."""
    cells = front.page.locator(".jp-Notebook .jp-Cell")
    count = cells.count()
    box = front.region("Try it").locator("textarea")
    box.fill("She has asthma and migraine.")
    box.press(keys)

    expect(front.region("Try it").locator(".openmed-answer")).to_contain_text("2 mentions of diseases found")
    assert front.focus.startswith("Text to annotate")
    assert cells.count() == count
    expect(front.panels).to_have_count(1)


def test_answer_is_bounded_and_cleared_while_typing(front):
    """A long answer scrolls in its box, which Tab reaches; the first key in the text clears it."""
    box = front.region("Try it").locator("textarea")
    answer = front.region("Try it").get_by_role("region", name="Annotated text")
    box.fill("She has asthma and migraine. " * 150)
    box.press("Control+Enter")
    expect(answer).to_contain_text("300 mentions of diseases found")
    heights = answer.evaluate("element => [element.clientHeight, element.scrollHeight]")
    answer.focus()
    front.page.keyboard.press("End")
    front.wait_until(lambda: answer.evaluate("element => element.scrollTop") > 0)

    assert heights[0] < 500 < heights[1]
    box.press("End")
    box.press("x")
    expect(answer).to_have_count(0)
