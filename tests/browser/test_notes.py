"""The browser of notes and a review in each front end: by mouse and keyboard, with HTML, emoji and line endings in the notes."""

import json

import pytest
from playwright.sync_api import expect

import openmed_nb as nb
from helpers import front_ends, page_measures
from openmed_nb.annotation.browsing import FOLDER, NoteListing

pytestmark = pytest.mark.slow

PAYLOAD = "<img src=x onerror=window.__ran=1>"
SETUP = f"""
import openmed_nb as nb
notes = [f"Note {{number}} 🩺\\r\\nhas {PAYLOAD} asthma, walks slowly." for number in range(300)]
notes[3] = None
notes[4] = "A long note.\\n" * 4000
notes[5] = "Unwell."
found = nb.annotate(notes, "bundled_small", device="cpu", progress=False)
review = found.review("review.jsonl", sample=None)
review.notes = (7, 5, 9)
"""
SELECT = """(note, word) => {
  const walker = document.createTreeWalker(note.querySelector('[dir]'), NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const start = walker.currentNode.data.indexOf(word);
    if (start >= 0) getSelection().setBaseAndExtent(walker.currentNode, start, walker.currentNode, start + word.length);
  } }"""


@pytest.fixture(scope="module", params=["lab", "notebook7", "voila"])
def front(request, server, new_page, write):
    """A notebook with a browser and a review, in each front end."""
    label = request.param
    # The file of the review is new in each front end.
    name = write(f"notes_{label}", SETUP.replace("review.jsonl", f"{label}.jsonl"), "found", "review")
    opened = front_ends.FRONTS[label](server, new_page(), name, waits_for=".openmed-notes")
    opened.run_all()
    expect(opened.page.locator(".openmed-notes")).to_have_count(2)
    return opened


@pytest.fixture
def notes(front):
    """The browser of all notes."""
    return front.page.locator(".openmed-notes").first


def status(notes):
    return notes.get_by_role("status")


def test_notes_are_found_by_keyboard(front, notes):
    """Keys move, search and filter, are announced, and are no commands of the front end."""
    cells = front.cell_types()
    notes.get_by_role("listbox").focus()
    front.page.keyboard.press("ArrowDown")
    expect(status(notes)).to_contain_text("Note 1: 1 entity. 300 of 300 notes.")
    notes.get_by_role("searchbox", name="Search").focus()
    front.page.keyboard.type("UNWELL")
    front.page.keyboard.press("Enter")
    expect(status(notes)).to_contain_text("Note 5: 0 entities. 1 of 300 notes.")
    expect(notes.get_by_role("button", name="Next")).to_be_disabled()
    notes.get_by_role("searchbox").fill("")
    front.page.keyboard.press("Enter")
    expect(status(notes)).to_contain_text("300 of 300")
    notes.get_by_role("slider", name="Minimum score").focus()
    front.page.keyboard.press("End")
    expect(status(notes)).to_have_text("0 of 300 notes.")
    front.page.keyboard.press("Home")
    expect(status(notes)).to_contain_text("300 of 300")
    notes.get_by_role("checkbox").focus()
    front.page.keyboard.press("Space")
    expect(status(notes)).to_have_text("0 of 300 notes.")
    expect(notes.get_by_role("checkbox")).to_be_focused()
    front.page.keyboard.press("Space")
    expect(status(notes)).to_contain_text("300 of 300")
    notes.get_by_label("Note", exact=True).fill("3")
    front.page.keyboard.press("Enter")
    expect(status(notes)).to_contain_text("Note 3: missing.")
    notes.get_by_role("button", name="Next").focus()
    front.page.keyboard.press("x")
    front.page.keyboard.press("Space")
    expect(status(notes)).to_contain_text("Note 4: 0 entities.")
    expect(notes.get_by_role("region", name="Text")).to_have_attribute("tabindex", "0")
    assert front.cell_types() == cells


def test_enter_searches_once(new_page):
    """Enter causes two events, and a search reads all notes."""
    page = new_page()
    script = (FOLDER / "browser.js").read_text("utf-8").replace("export default", "window.browser =")
    page.add_script_tag(content=f"{{ {script} }}")
    page.evaluate(
        """state => {
          window.sent = [];
          browser.render({ model: { get: () => state, send: (event) => sent.push(event), on() {} }, el: document.body });
        }""",
        NoteListing(nb.annotate(["She has asthma."], "bundled_small", device="cpu", progress=False)).state(),
    )
    page.get_by_role("searchbox").focus()
    page.keyboard.type("asthma")
    page.keyboard.press("Enter")
    assert page.evaluate("sent") == [{"action": "search", "note": 0, "query": "asthma"}]


def test_review_becomes_gold(front):
    """Clicks, a selection behind an emoji and a typed word become gold with the offsets of Python, and are saved."""
    review = front.page.locator(".openmed-notes").last
    finish = review.get_by_role("button", name="This note is reviewed")
    expect(finish).to_be_disabled()
    review.get_by_role("group", name="asthma").get_by_role("radio", name="Wrong").check()
    expect(finish).to_be_enabled()
    review.locator(".openmed-note").evaluate(SELECT, "slowly")
    expect(review.get_by_label("Missed entity")).to_have_value("slowly")
    review.get_by_role("button", name="Add").click()
    expect(review.get_by_role("button", name="Remove slowly")).to_be_visible()
    review.get_by_label("Missed entity").fill("Note 7")
    review.get_by_role("button", name="Add").click()
    expect(review.get_by_role("button", name="Remove Note 7")).to_be_visible()
    review.get_by_role("button", name="Remove Note 7").click()
    finish.click()
    expect(status(review)).to_contain_text("1 entity, reviewed. 1 of 3 notes reviewed.")
    start = f"Note 7 🩺\r\nhas {PAYLOAD} asthma, walks slowly.".index("slowly")
    saved = front.server.notebooks / f"{front.label}.jsonl"
    last = json.loads(saved.read_text("utf-8").splitlines()[-1])
    assert (last["note"], last["right"], last["finished"]) == (7, [[start, start + 6, "DISEASE"]], True)
    assert "slowly" not in saved.read_text("utf-8")
    front.expect_kernel("review.gold.texts[0].spans[0][:2]", (start, start + 6))
    front.expect_kernel("review.score().total.strict.recall", 0.0)


def test_notes_remain_text_and_scan_finds_nothing(front, picture):
    """Nothing in a note runs, all text has contrast, nothing is cut off at 320 pixels, and axe-core finds nothing."""
    themes = [front.theme] if front.label == "voila" else ["light", "dark"]
    for theme in themes:
        if theme != front.theme:
            front.choose_theme(theme)
        for width in ("", "320px"):
            for shown in front.page.locator(".openmed-notes").all():
                shown.evaluate("(view, width) => { view.style.width = width; }", width)
                picture(shown, f"notes_{front.label}_{theme}_{width}")
                low = {text: ratio for text, ratio in page_measures.contrasts(shown).items() if ratio < 4.5}
                assert low == {}
                assert page_measures.sticking_out(shown) == []
        assert page_measures.findings(front.page, ".openmed-notes") == []
    assert front.page.evaluate("window.__ran") is None
