"""The browser of notes and a review in each front end: by mouse and keyboard, with HTML, emoji and line endings in the notes."""

import json
import os
import signal

import pytest
from playwright.sync_api import expect

import openmed_nb as nb
from helpers import front_ends, page_measures
from openmed_nb.annotation.browsing import FOLDER, NoteListing, ReviewListing

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
SHOW = """state => {
  const listeners = {};
  window.sent = [];
  const send = async (event) => {
    sent.push(event);
    state = await handle(event);
    for (const name of ["change:state", "msg:custom"]) listeners[name]();
  };
  const model = { get: () => state, send, on: (name, listener) => { listeners[name] = listener; } };
  browser.render({ model, el: document.querySelector(".openmed-notes") });
}"""
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
    front.page.keyboard.press("End")  # Scores above 0.995 are displayed as 1.00.
    expect(status(notes)).to_contain_text("297 of 300")
    front.page.keyboard.press("Home")
    expect(status(notes)).to_contain_text("300 of 300")
    notes.get_by_role("checkbox").focus()
    front.page.keyboard.press("Space")
    expect(status(notes)).to_have_text("0 of 300 notes. A filter is on.")
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


@pytest.fixture(scope="module")
def show(new_page):
    """A function that shows the widget of a listing on one page, without a kernel, and returns the page."""
    page = new_page()
    listings = []

    def handle(event):
        listings[-1].handle(event)
        return listings[-1].state()

    page.expose_function("handle", handle)
    script = (FOLDER / "browser.js").read_text("utf-8").replace("export default", "window.browser =")

    def show(listing):
        listings.append(listing)
        page.set_content('<div class="openmed-notes"></div>')
        page.add_style_tag(path=FOLDER / "browser.css")
        page.add_script_tag(content=f"{{ {script} }}")
        page.evaluate(SHOW, listing.state())
        return page

    return show


def test_enter_searches_once_and_hits_are_marked(show):
    """Enter causes two events, and a search reads all notes. A hit may start before an entity."""
    page = show(NoteListing(nb.annotate(["Mary\u2019s asthma."], "bundled_small", device="cpu", progress=False)))
    page.get_by_role("searchbox").focus()
    page.keyboard.type("'s ASTHMA")
    page.keyboard.press("Enter")
    assert page.evaluate("sent") == [{"action": "search", "note": 0, "query": "'s ASTHMA"}]
    assert page.locator(".openmed-hit").all_inner_texts() == ["\u2019s ", "asthma"]


def test_twenty_notes_are_reviewed_with_few_keys(show):
    """One key accepts a note, two more mark a wrong entity, one corrects a context; typed letters are no keys."""
    notes = [f"{number}. She has asthma and gout, no flu." for number in range(20)]
    found = nb.annotate(notes, "bundled_small", device="cpu", progress=False).with_context()
    review = found.review()
    page = show(ReviewListing(review))
    pressed = []

    def press(*keys):
        for key in keys:
            page.keyboard.press(key)
            pressed.append(key)
            page.wait_for_function("!document.querySelector('[aria-busy]')")

    page.locator(".openmed-note").click()
    press("n")
    for number in range(19):
        press(*(["ArrowDown", "x"] if number % 4 == 0 else []), "a")
    press("m")
    page.keyboard.type("and a Xuan", delay=1)
    press("Escape", "x", "u", "a")
    assert len(pressed) <= 60
    assert review.num_reviewed == 20
    assert page.get_by_role("listbox").locator("option", has_text="✓").count() == 20
    first, last = review.notes[0], review.notes[-1]
    assert [*review.marked_spans(first).values()] == [True, False, True]
    negated = review.to_frame().query("note_index == @first")["negated"]
    assert negated.tolist() == [True, None, True]
    assert [*review.marked_spans(last).values()] == [True, True, True]
    assert page_measures.findings(page, ".openmed-notes", page_measures.GRAVE) == []
    dispatch = "document.activeElement.dispatchEvent(new KeyboardEvent('keydown', { key, bubbles: true }))"
    page.evaluate(f"for (const key of 'xn') {dispatch}")  # Faster than the kernel.
    press("ArrowUp")
    assert [*review.marked_spans(first).values()] == [False, False, True]


def test_keys_change_the_entity_that_was_added(show):
    review = nb.annotate(["No gout. Slow."], "bundled_small", device="cpu").with_context().review()
    page = show(ReviewListing(review))
    page.get_by_label("Missed entity").fill("Fast")
    page.keyboard.press("Enter")
    expect(page.locator(".openmed-review").get_by_role("alert")).to_contain_text("does not contain this text")
    page.keyboard.type("Slow")
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Remove Slow")).to_be_visible()
    page.keyboard.press("n")
    page.wait_for_function("!document.querySelector('[aria-busy]')")
    page.locator(".openmed-note").get_by_text("gout").click()  # This selects it.
    page.keyboard.press("n")
    page.wait_for_function("!document.querySelector('[aria-busy]')")
    contexts = {span.start: context["negated"] for span, context in review.contexts(0).items()}
    assert contexts == {3: False, 9: True}
    for span in ((3, 14), (0, 7)):  # These overlap, and are displayed in brackets.
        review.mark(0, *span, "DISEASE")
    page.keyboard.press("a")
    page.wait_for_function("!document.querySelector('[aria-busy]')")
    page.locator(".openmed-note [dir]").evaluate("note => getSelection().selectAllChildren(note)")
    expect(page.get_by_label("Missed entity")).to_have_value("No gout. Slow.")


def test_review_fits_a_phone(show):
    """Controls can be touched, nothing is cut off, and a new note is displayed from its start."""
    notes = ["No asthma, gout or type 2 diabetes mellitus. " * 20] * 2
    found = nb.annotate(notes, "bundled_small", device="cpu", progress=False)
    page = show(ReviewListing(found.with_context("temporality", "negated").review()))
    page.set_viewport_size({"width": 390, "height": 800})
    view = page.locator(".openmed-notes")
    assert page_measures.sticking_out(view) == []
    height = "all => Math.min(...all.map(control => control.getBoundingClientRect().height || Infinity))"
    assert view.locator("input, select, button, option").evaluate_all(height) >= 24
    view.locator(".openmed-accept").click()
    expect(view.get_by_text("Previous")).to_be_in_viewport(ratio=0.9)


def test_review_becomes_gold(front):
    """Clicks, a selection behind an emoji and a typed word become gold with the offsets of Python, and are saved."""
    review = front.page.locator(".openmed-notes").last
    cells = front.cell_types()
    hint = review.get_by_text("Click here to use the keys")
    hint.click()
    expect(hint).to_be_hidden()
    review.locator(".openmed-note").click()
    front.page.keyboard.press("x")
    expect(review.get_by_role("button", name="Wrong")).to_have_attribute("aria-pressed", "true")
    review.locator(".openmed-note").evaluate(SELECT, "slowly")
    expect(review.get_by_label("Missed entity")).to_have_value("slowly")
    review.get_by_role("button", name="Add").click()
    expect(review.get_by_role("button", name="Remove slowly")).to_be_visible()
    review.get_by_label("Missed entity").fill("Note 8")
    review.get_by_label("Missed entity").press("Enter")
    expect(review.get_by_role("alert")).to_contain_text("does not contain this text")
    expect(review.get_by_label("Missed entity")).to_have_value("Note 8")
    expect(review.get_by_label("Missed entity")).to_be_focused()
    review.get_by_label("Missed entity").fill("Note 7")
    review.get_by_role("button", name="Add").click()
    expect(review.get_by_role("button", name="Remove Note 7")).to_be_visible()
    review.get_by_role("button", name="Remove Note 7").click()
    review.get_by_role("button", name="Reviewed, next").click()
    expect(status(review)).to_contain_text("Note 5: 0 entities. 1 of 3 notes reviewed.")
    for key, shown in (("a", "Note 9: 1 entity. 2"), ("u", "Note 5: 0 entities. 1"), ("Space", "Note 9: 1 entity. 1")):
        front.page.keyboard.press(key)
        expect(status(review)).to_contain_text(shown)
    assert front.cell_types() == cells
    start = f"Note 7 🩺\r\nhas {PAYLOAD} asthma, walks slowly.".index("slowly")
    saved = front.server.notebooks / f"{front.label}.jsonl"
    lines = map(json.loads, saved.read_text("utf-8").splitlines()[1:])
    marks = {line["note"]: line for line in lines}[7]
    assert (marks["right"], marks["finished"]) == ([[start, start + 6, "DISEASE"]], True)
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


def test_dead_kernel_is_announced(front, notes):
    """The last test, because it ends the kernel."""
    os.kill(front.evaluate("__import__('os').getpid()"), signal.SIGKILL)
    expect(notes.get_by_role("alert")).to_have_text(
        "The kernel was restarted. Run the cells above and this cell again."
    )
