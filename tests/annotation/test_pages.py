"""All notes as a page."""

import re
from pathlib import Path

import pytest

import openmed_nb as nb

NOTES = [f"Note {number}: she has asthma." for number in range(12)]


@pytest.fixture(scope="module")
def found():
    ids = [f"id{number}" for number in range(12)]
    return nb.annotate(NOTES, "bundled_small", device="cpu", progress=False, ids=ids)


def test_show_without_a_number_displays_all_notes(found):
    assert found.show() is found
    assert "id0: Note 0: she has [asthma](DISEASE)." in str(found)
    assert set(found._repr_mimebundle_()) == {"text/plain", "text/html"}  # Without a kernel.


def test_notes_are_displayed_with_context():
    found = nb.annotate(["No asthma."], "bundled_small", device="cpu", progress=False)
    assert "[asthma](DISEASE, negated)" in str(found.with_context().show())
    assert "[asthma](DISEASE, negated)" in str(found.show(0))


def test_saved_page_has_all_notes_escaped_and_needs_no_network(tmp_path):
    notes = ["<script>x</script> no asthma", None, "today " * 3000 + "asthma"]
    found = nb.annotate(notes, "bundled_small", device="cpu", progress=False, ids=["<a>", "b", "c"])
    found.with_context().save(tmp_path / "notes.html")
    page = (tmp_path / "notes.html").read_text("utf-8")
    assert "<script" not in page
    assert "<a>" not in page
    assert "http" not in page
    assert "DISEASE, negated" in page
    assert "(missing)" in page
    assert page.count("<article>") == 3
    assert page.count("today ") == 3000


def test_saved_page_of_hidden_texts_has_no_text(tmp_path):
    found = nb.annotate(NOTES, "bundled_small", device="cpu", progress=False, show_text=False)
    found.save(tmp_path / "notes.html")
    assert "asthma" not in (tmp_path / "notes.html").read_text("utf-8")


def test_completion_lists_documented_names_of_annotations(found):
    names = [name for name in dir(found) if not name.startswith("_")]
    pages = (Path(__file__).parents[2] / "docs").rglob("*.md")
    text = "\n".join(page.read_text("utf-8") for page in pages)
    assert len(names) == 22
    assert [name for name in names if not hasattr(found, name) or not re.search(rf"\.{name}\b|`{name}`", text)] == []
