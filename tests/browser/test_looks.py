"""The panel can be read: in light and dark, narrow and wide, by eye and by screen reader; pictures are taken of it."""

import pytest
from playwright.sync_api import expect

from helpers import page_measures
from openmed_nb.notebook.panel.view import EXAMPLE_TEXT

pytestmark = pytest.mark.slow

VIEWS = ("lab light", "lab dark", "notebook7 dark", "notebook7 light", "voila dark")
ANNOTATE = """
%openmed_device mps
panel.text.value = 'The patient has asthma.'
panel.model.annotate(panel.text.value)
"""
UNFOLD = "(panel, open) => panel.querySelectorAll('details').forEach(details => { details.open = open; })"
MISTAKE = "panel.model.use_device('cuda:99')"
MIN_CONTRAST = 4.5
"""WCAG 2.2, 1.4.3."""

MAX_SCREENSHOT_BYTES = 200_000
"""The README contains one of the screenshots, whose size depends on the fonts."""


@pytest.fixture(scope="module")
def pages(open_panel):
    """The page of each front end, opened when first asked for, with a panel on a simulated Mac, and an answer in it.

    Each test gets it wide, with all unfolded, one mark, and no error.
    """
    opened = {}

    def page(view):
        label, theme = view.split()
        if label not in opened:
            opened[label] = open_panel(label, theme)
            opened[label].run("%openmed_device --simulate mps")
        front = opened[label]
        if front.theme != theme:
            front.choose_theme(theme)
        front.page.set_viewport_size({"width": 1200, "height": 1400})
        front.run(ANNOTATE)
        expect(front.region("Try it")).to_contain_text("1 mention of a disease found")
        expect(front.panel.get_by_role("alert")).to_have_count(0)
        front.panel.evaluate(UNFOLD, True)
        return front

    yield page
    for front in opened.values():
        front.begin_again()


@pytest.fixture(params=VIEWS)
def front(request, pages):
    """The page in each front end and theme."""
    return pages(request.param)


def test_texts_have_contrast(front):
    """Each text stands out by 4.5 to 1: tables, marks, errors, buttons that are pressed, not pressed and disabled."""
    front.run(MISTAKE)
    expect(front.panel.get_by_role("alert")).to_be_visible()
    contrasts = page_measures.contrasts(front.panel)
    words = {word for text in contrasts for word in text.split()}

    assert {
        "auto",
        "cuda",
        "cpu",
        "asthma",
        "DISEASE",
        "Error:",
        "Refresh",
        "PYTORCH_ENABLE_MPS_FALLBACK",
        "(SIMULATED)",
    } <= words
    assert {text: ratio for text, ratio in contrasts.items() if ratio < MIN_CONTRAST} == {}


@pytest.mark.parametrize("width", [300, 400, 760, 1500])
def test_panel_has_no_overflow(pages, width):
    """In narrow and wide cells nothing goes beyond the panel, is cut off, or has to be scrolled sideways."""
    front = pages("lab light")
    front.page.set_viewport_size({"width": max(1200, width + 500), "height": 1400})
    front.panel.evaluate("(panel, width) => panel.parentElement.style.cssText = `flex: 0 0 ${width}px`", width)
    measured, found = front.panel.bounding_box()["width"], page_measures.sticking_out(front.panel)
    front.panel.evaluate("panel => panel.parentElement.style.cssText = ''")

    assert width - 300 < measured <= width
    assert found == []


def test_number_and_unit_stay_together(pages):
    """However wide a cell is, no line ends between a number and its unit."""
    front, broken = pages("lab light"), {}
    for width in range(240, 1000, 20):
        front.panel.evaluate("(panel, width) => panel.parentElement.style.cssText = `flex: 0 0 ${width}px`", width)
        for text in front.panel.evaluate(page_measures.BROKEN_APART):
            broken.setdefault(text, []).append(width)
    front.panel.evaluate("panel => panel.parentElement.style.cssText = ''")

    assert broken == {}


def test_accessibility_scan_finds_nothing(front):
    """axe-core finds nothing in the panel, light and dark, with all unfolded."""
    assert page_measures.findings(front.page, ".openmed-panel") == []


REGIONS = {
    "Device": """
        - heading "Device" [level=2]
        - status:
          - paragraph:
            - strong: mps (SIMULATED)
            - text: /%openmed_device.* the chip is .* .SIMULATED/
        - button "auto"
        - button "mps ✓"
        - button "cpu"
        - button "Reset"
        - group:
          - text: All devices
          - table "Devices":
            - caption: Devices
            - rowgroup:
              - row "device status reason":
                - columnheader "device"
                - columnheader "status"
                - columnheader "reason"
            - rowgroup:
              - row /^mps active/:
                - rowheader "mps"
              - row /^cuda unavailable /:
                - rowheader "cuda"
              - row /^cpu usable/:
                - rowheader "cpu"
        """,
    "Memory": """
        - heading "Memory" [level=2]
        - table "Memory in use":
          - rowgroup:
            - row "memory of used limit"
          - rowgroup:
            - row /^mps \\(SIMULATED\\) allocated [\\d.]+ MiB cached [\\d.]+ [KM]iB [\\d.]+ GiB \\(/:
              - rowheader "mps (SIMULATED)"
            - row /^Python session [\\d.]+ [MG]iB [\\d.]+ GiB \\(memory of this computer\\)/:
              - rowheader "Python session"
        - button "Refresh"
        - button "Release memory"
        """,
    "Try it": """
        - heading "Try it" [level=2]
        - textbox "Text to annotate (Ctrl+Enter)"
        - button "Annotate"
        - status:
          - region "Annotated text":
            - paragraph:
              - strong: 1 mention of a disease found
            - paragraph: /bundled_small, device. mps .SIMULATED., [\\d.]+ m?s/
            - paragraph: /SIMULATED/
            - text: The patient has
            - mark: /asthma DISEASE [\\d.]+/
        """,
    "Models": """
        - heading "Models" [level=2]
        - group:
          - text: "1 model loaded: bundled_small"
          - region "Loaded models":
            - table "Loaded models":
              - caption: Loaded models
              - rowgroup:
                - row "model device dtype size moves when you change the device"
              - rowgroup:
                - row /^bundled_small mps .SIMULATED. float32 [\\d.]+ MiB yes/:
                  - rowheader "bundled_small"
        """,
    "Environment": """
        - heading "Environment" [level=2]
        - group:
          - text: /MPS variables. 3 active/
          - region "Environment":
            - table "Environment"
        """,
}
"""Accessibility tree of each region: names, states, tables with captions and row headers."""


@pytest.mark.parametrize("view", ["lab light", "notebook7 light", "voila dark"])
@pytest.mark.parametrize("region", REGIONS)
def test_regions_have_expected_accessibility_tree(pages, view, region):
    """Each region has a heading, named controls with their states, and tables with captions and row headers."""
    expect(pages(view).region(region)).to_match_aria_snapshot(REGIONS[region])


@pytest.mark.parametrize(("name", "view"), [("panel", "lab light"), ("panel_dark", "lab dark")])
def test_picture_of_the_panel_is_small(pages, picture, name, view):
    """A picture in light and one in dark are taken, each small enough for the README."""
    front = pages(view)
    front.page.set_viewport_size({"width": 1600, "height": 1400})
    front.region("Try it").get_by_role("textbox").fill(EXAMPLE_TEXT)
    front.button("Annotate").click()
    expect(front.region("Try it").locator("mark")).to_have_count(3)
    front.panel.evaluate(UNFOLD, False)
    front.page.mouse.move(1, 1)
    taken = picture(front.panel, name)

    assert 10_000 < taken.stat().st_size < MAX_SCREENSHOT_BYTES


def test_narrow_panel_has_one_column(pages, picture):
    """In a cell of 400 pixels the regions are in one column."""
    front = pages("lab light")
    front.page.set_viewport_size({"width": 1200, "height": 2200})
    front.panel.evaluate("panel => panel.parentElement.style.cssText = 'flex: 0 0 400px'")
    left = {front.region(name).bounding_box()["x"] for name in REGIONS}
    picture(front.panel, "panel_narrow")
    front.panel.evaluate("panel => panel.parentElement.style.cssText = ''")

    assert len(left) == 1
