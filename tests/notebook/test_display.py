"""The style of the HTML: readable on any theme, and nothing from elsewhere."""

import re

import pytest

from openmed_nb.display import COLOURS, STYLE, Report, Table, to_html, to_text

BACKGROUNDS = dict(re.findall(r"\.openmed-colour-(\d) \{background: #(\w{6});\}", STYLE))
INK = re.search(r"mark \{[^}]*color: #(\w{6})", STYLE)[1]
REPORT = Report("cpu", ("Asked for.",), (Table("Others", ("device", "why"), (("mps", "no Mac"),)),))


@pytest.mark.parametrize("background", BACKGROUNDS.values())
def test_marked_text_has_contrast(contrast, background):
    """The letters of a mark stand out from each of its backgrounds by 7 to 1 or more, on any theme."""
    assert contrast(f"#{background}", f"#{INK}") >= 7


def test_each_colour_of_an_annotation_has_a_style():
    """There is a style for each colour that an annotation uses."""
    assert sorted(BACKGROUNDS) == [str(number) for number in range(COLOURS)]


def test_the_style_needs_nothing_from_elsewhere():
    """The style loads nothing, touches only our own elements, and each theme colour has a fallback."""
    selectors = [
        part.strip() for rule in re.findall(r"([^{}]+)\{", STYLE[len("<style>") :]) for part in rule.split(",")
    ]

    assert not re.search(r"url\(|@import|http", STYLE)
    assert all(selector.startswith(".openmed-nb") for selector in selectors)
    assert all("," in inner for inner in re.findall(r"var\(([^)]*)\)", STYLE))


def test_the_same_is_said_without_the_style_sheet():
    """What a notebook that is not trusted shows still has headings, captions and row names."""
    bare = to_html(REPORT).removeprefix(STYLE)

    assert "<strong>cpu</strong>" in bare
    assert "<caption>Others</caption>" in bare
    assert '<th scope="row">mps</th>' in bare


def test_text_and_html_say_the_same():
    """Every word of the text form stands in the HTML form, in the same order."""
    words = re.sub(r"<[^>]+>", " ", to_html(REPORT).removeprefix(STYLE)).split()

    assert to_text(REPORT).split() == words


def test_empty_tables_and_columns_are_left_out():
    """A table without rows, and a column that is empty throughout, are shown neither as text nor as HTML."""
    empty, half = Table("Nothing", ("name",), ()), Table("Half", ("name", "note"), (("a", ""), ("b", "")))
    report = Report("title", tables=(empty, half))

    for shown in (to_text(report), to_html(report)):
        assert "Nothing" not in shown
        assert "note" not in shown
        assert "Half" in shown
