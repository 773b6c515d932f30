"""Each control does in the kernel what it says, in each front end, and the panel shows what the kernel knows."""

import pytest
from playwright.sync_api import expect

from helpers import front_ends

pytestmark = pytest.mark.slow

SECOND = "from openmed_nb.session import SESSION as session\nsecond = nb.panel('bundled_small')\nsecond"
"""A second panel, at the end of the shipped notebook."""

DEVICE = "(session.device().device, session.device().requested_by)"
MODELS = "[(one.name, one.device.partition(' ')[0]) for one in session.inventory()]"


@pytest.fixture(scope="module", params=["lab", "notebook7", "voila"])
def opened(request, server, new_page, shipped):
    """The shipped notebook after Run All, in each front end, with a second panel at its end."""
    label = request.param
    front = front_ends.FRONTS[label](server, new_page(), shipped(label, SECOND))
    front.run_all()
    expect(front.panels).to_have_count(2)
    front.begin_again()
    return front


@pytest.fixture
def front(opened):
    """The same page; afterwards the session is as it began."""
    yield opened
    opened.begin_again()


def test_click_moves_the_models(front):
    """A click on another device moves the loaded models, and a simulated device is always labeled."""
    front.run("%openmed_device --simulate mps\nnb.load_pipeline('bundled_small')")
    front.device_button("cpu").click()

    front.expect_kernel(MODELS, [("bundled_small", "cpu")])
    front.device_button("mps").click()
    front.expect_kernel(MODELS, [("bundled_small", "mps")])
    front.expect_pressed("mps")
    expect(front.region("Device")).to_contain_text("SIMULATED")
    front.region("Models").get_by_text("1 model loaded").click()
    expect(front.region("Models").get_by_role("row").last).to_contain_text("SIMULATED")
    expect(front.region("Device")).to_contain_text("Moved to the new device: bundled_small.")


def test_panel_shows_changes_of_a_typed_cell(front):
    """A cell that is typed and run below the panel changes what the panel shows."""
    if front.label == "voila":
        pytest.skip("Voila has no cells to type into")
    front.type_cell("%openmed_device cpu")

    front.expect_pressed("cpu")
    front.expect_kernel(DEVICE, ("cpu", "%openmed_device"))


def test_last_of_several_waiting_clicks_decides(front):
    """Clicks on another device and then on the previous device during a cell keep the previous device."""
    front.run("%openmed_device --simulate mps")
    notice = front.region("Device").locator(".openmed-controls").get_by_text("Waiting for the running cell")
    with front.running_cell():
        front.device_button("cpu").click()
        front.device_button("mps").click()
        expect(notice).to_be_visible()

    expect(notice).to_have_count(0)
    front.expect_kernel(DEVICE, ("mps", "the panel"))
    front.expect_pressed("mps")
    expect(front.panel.locator(".mod-active")).to_have_count(1)


def test_displayed_text_is_annotated(front):
    """Annotate uses the text that is displayed at the click, even if both messages arrive together."""
    box, annotate = front.region("Try it").get_by_role("textbox"), front.button("Annotate")
    for word in ("asthma", "hypertension", "migraine"):
        box.fill(f"No {word}.")
        annotate.click()
        expect(front.region("Try it").locator("mark").first).to_contain_text(word)
    with front.running_cell():
        box.fill("No diabetes.")
        annotate.click()
        front.page.wait_for_timeout(300)

    expect(front.region("Try it").locator("mark").first).to_contain_text("diabetes")
