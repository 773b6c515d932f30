"""Pages of notes: the first page as text and HTML, all of them in a notebook."""

import pytest

import openmed_nb as nb
from openmed_nb.errors import ConfigurationError

NOTES = [f"Note {number}: she has asthma." for number in range(12)]


@pytest.fixture(scope="module")
def found():
    ids = [f"id{number}" for number in range(12)]
    return nb.annotate(NOTES, "bundled_small", device="cpu", progress=False, ids=ids)


def test_show_without_a_number_is_the_first_page(found):
    pages = found.show()
    assert len(pages) == 3
    assert "id0: Note 0: she has [asthma](DISEASE)." in str(pages)
    assert "Note 4" in pages._repr_html_()
    assert "Note 5" not in pages._repr_html_()


def test_pages_read_notes_that_are_not_stored_for_display(found):
    report = found.show().page(2)
    assert "".join(segment.text for segment in report.segments).count("asthma") == 2


@pytest.mark.parametrize("number", [-1, 3, 0.5, None])
def test_page_out_of_range_is_rejected(found, number):
    with pytest.raises(ConfigurationError, match="from 0 to 2"):
        found.show().page(number)


def test_bundle_without_a_kernel_has_text_and_html_only(found):
    assert set(found.show()._repr_mimebundle_()) == {"text/plain", "text/html"}


def test_pages_of_a_generator_name_notes_that_are_not_stored():
    found = nb.annotate(iter(NOTES), "bundled_small", device="cpu", progress=False)
    report = found.show().page(1)
    assert "".join(segment.text for segment in report.segments).count("(changed or not stored)") == 5


def test_hidden_texts_are_on_no_page():
    found = nb.annotate(NOTES, "bundled_small", device="cpu", progress=False, show_text=False)
    assert "asthma" not in str(found.show())
    assert "asthma" not in str(found.show().create_view().state)


def test_pages_without_notes_and_with_context():
    assert "No notes." in str(nb.annotate([], "bundled_small", device="cpu", progress=False).show())
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
