"""What a report looks like as HTML: readable on any theme, with marks, folds and aligned numbers, and nothing from elsewhere."""

import re

import pytest

from openmed_nb._render.display import (
    COLOURS,
    Finding,
    Piece,
    Report,
    Shown,
    Table,
    findings_table,
    is_numeric,
    label_style,
    to_html,
    to_text,
)
from openmed_nb._render.drawing import SIGNS

REPORT = Report("cpu", ("Asked for.",), (Table("Others", ("device", "why"), (("mps", "no Mac"),)),))
FINDINGS = (
    Finding("a", "ok", "right"),
    Finding("b", "failed", "wrong", "Mend it."),
    Finding("c", "not applicable", "another system"),
)


def words_of(html):
    """Return the words that a page shows, in their order."""
    return re.sub(r"<[^>]+>", " ", html).split()


@pytest.mark.parametrize("background", COLOURS)
def test_marked_text_has_contrast(contrast, background):
    """The letters of a mark stand out from each of its backgrounds by 7 to 1 or more, on any theme."""
    assert contrast(background, "#000000") >= 7
    assert "color:#000000" in label_style("DISEASE")


@pytest.mark.parametrize("status", SIGNS)
def test_the_sign_of_a_status_has_contrast(contrast, status):
    """The white sign of each status stands out from its background by 4.5 to 1 or more, and no two signs are the same."""
    assert contrast(SIGNS[status][1], "#ffffff") >= 4.5
    assert len({sign for sign, _ in SIGNS.values()}) == len(SIGNS)


def test_a_label_has_one_colour_everywhere():
    """The colour of a label does not depend on the other labels of the text, and labels that often meet differ."""
    alone = to_html(Report("", pieces=(Piece("x", "DRUG"),)))
    among = to_html(Report("", pieces=(Piece("x", "ANATOMY"), Piece("y", "DRUG"))))
    often = ("DISEASE", "DRUG", "GENE", "ANATOMY", "CELL", "PROTEIN"), ("PROBLEM", "TREATMENT", "TEST")

    assert label_style("DRUG") in alone
    assert label_style("DRUG") in among
    assert all(len(set(map(label_style, together))) == len(together) for together in often)


def test_a_label_that_nothing_can_write_has_a_colour():
    """Half a character in a label, which has no bytes, gets a colour all the same."""
    assert "background-color:#" in label_style("\ud800")


def test_the_page_needs_nothing_from_elsewhere():
    """The HTML has no style sheet and no script, loads nothing, and names no colour of a theme."""
    assert not re.search(r"<style|<script|url\(|@import|http|var\(", to_html(REPORT))


def test_the_structure_says_what_the_styles_show():
    """A page without any style still has a headline, captions and row names."""
    bare = re.sub(r' style="[^"]*"', "", to_html(REPORT))

    assert "<strong>cpu</strong>" in bare
    assert "<caption>Others</caption>" in bare
    assert '<th scope="row">mps</th>' in bare


def test_text_and_html_say_the_same():
    """Every word of the text form stands in the HTML form, in the same order."""
    assert to_text(REPORT).split() == words_of(to_html(REPORT))


def test_what_a_person_would_say_stands_in_the_page_alone():
    """A headline and sentences as a person would say them take the place of title and sentences in the HTML only."""
    spoken = Report("Device: cpu (confirmed)", ("x.",), spoken=("Device: cpu, chosen automatically", "It computes."))

    assert words_of(to_html(spoken)) == ["Device:", "cpu,", "chosen", "automatically", "It", "computes."]
    assert to_text(spoken) == "Device: cpu (confirmed)\n  x."


def test_what_is_simulated_says_so_however_it_is_spoken():
    """The mark and the first sentence of the simulation stand in the text, and in a page that is spoken."""

    class Figure(Shown):
        simulated = True

        def report(self):
            return Report("mps", spoken=("It is fast",))

    for shown in (str(Figure()), Figure()._repr_html_()):
        assert "(SIMULATED)" in shown
        assert "SIMULATED MPS: no figure here is one of MPS." in shown


def test_a_status_is_a_sign_and_a_word():
    """Each status of a table is shown with its sign before its word, and a report may have one before its headline."""
    html = to_html(
        Report("Doctor", tables=(findings_table("", FINDINGS[::2]), findings_table("", FINDINGS[1:])), status="failed")
    )

    assert words_of(html)[:2] == ["✕", "Doctor"]
    assert " ".join(words_of(html)).count("✓ ok") == 1
    assert "b ✕ failed wrong Mend it." in " ".join(words_of(html))


def test_what_is_not_well_stands_first_and_alone():
    """The worst stands on top; what is well beside it, and what does not apply, is counted and folded, in the HTML alone."""
    doubt = Finding("d", "warning", "odd", "Look.")
    report = Report("", tables=(findings_table("", (doubt, *FINDINGS)),))
    table, fine, idle = to_html(report).split("<details")

    assert table.index("wrong") < table.index("odd")
    assert "right" not in table.split("<tbody")[1]
    assert "another system" not in table
    assert "1 check is ok" in fine
    assert "right" in fine
    assert "1 check does not apply here" in idle
    assert "another system" in idle
    assert [line.split()[0] for line in to_text(report).splitlines()[-4:]] == ["d", "a", "b", "c"]


def test_what_is_wrong_is_a_sentence_and_a_row():
    """What a report names as wrong is a sentence in its text and a row in its HTML; the details are in neither."""
    report = Report("Doctor", wrong=(Finding("b", "failed", "wrong", "Mend it.", "since 2.7"),))

    assert to_text(report) == "Doctor\n  b, failed: wrong. Mend it."
    assert words_of(to_html(report))[-6:] == ["b", "✕", "failed", "wrong", "Mend", "it."]


def test_a_replacement_that_says_its_label_says_it_once():
    """A label stands behind a marked piece, unless that is a replacement with the label in it."""
    named, starred = Piece("[NAME]", "NAME"), Piece("***", "NAME")
    found = Piece("DNA polymerase", "DNA", "0.912")
    report = Report("", pieces=(named, Piece(" "), starred, Piece(" "), found))

    assert to_text(report).splitlines()[1] == "[NAME] [***](NAME) [DNA polymerase](DNA)"
    assert words_of(to_html(report)) == ["[NAME]", "***", "NAME", "DNA", "polymerase", "DNA", "0.912"]
    assert 'title="NAME"' in to_html(report)


def test_where_nothing_applies_nothing_is_folded():
    """A table of which no row applies is shown as it is."""
    assert "<details" not in to_html(Report("", tables=(findings_table("", FINDINGS[2:]),)))


def test_a_table_may_be_folded_up():
    """A folded table shows its caption; the text form shows all of it."""
    report = Report("", tables=(Table("Symptoms", ("a", "b"), (("1", "two"),), folded=True),))

    assert re.search(r"<summary[^>]*>Symptoms</summary><table", to_html(report))
    assert "Symptoms\n  a  b\n  1  two" in to_text(report)


@pytest.mark.parametrize(
    ("cells", "numeric"),
    [
        (("1", "12,800", ""), True),
        (("22 %", "0.0001", "24 hours"), True),
        (("3.0 MiB", "512 bytes", "-5.0 GiB"), True),
        (("7,670 to 8,980", "1.4 to 1.88"), True),
        (("0.05 ms (45 %)", "100.00%"), True),
        (("3-8", "14-38"), True),
        (("1e-05",), True),
        (("12 %", "no limit"), False),
        (("3.11, built for x86_64",), False),
        (("4 of 4 exact",), False),
        (("recall 1.0000",), False),
        (("", ""), False),
    ],
)
def test_numbers_stand_to_the_right(cells, numeric):
    """A column of numbers, with units or ranges, stands to the right with its header; prose stands to the left."""
    table = Table("", ("name", "value"), tuple((f"row {number}", cell) for number, cell in enumerate(cells)))
    page = to_html(Report("", tables=(table,)))

    assert is_numeric(cells) is numeric
    assert page.count("text-align:right") == (len(cells) + 1 if numeric else 0)


@pytest.mark.parametrize(
    ("sentence", "code"),
    [
        ("Run nb.compare(model, texts).", ["nb.compare(model, texts)"]),
        ("See nb.runbook.fallbacks(), and more.", ["nb.runbook.fallbacks()"]),
        ("Type %openmed_device cpu or nb.use('cpu').", ["%openmed_device", "nb.use(&#x27;cpu&#x27;)"]),
        ("%openmed_device --json cpu", ["%openmed_device --json cpu"]),
        ("%openmed_log --diff run.json", ["%openmed_log --diff run.json"]),
        ("%debug has no frames now.", []),
        ("found = nb.annotate(notes)", ["found = nb.annotate(notes)"]),
        ("The nb of a cell; a.nb.c and 3 % openmed", []),
        ("masked[5] is another; openmed_nb.service and openmed_nb.plist are files", ["masked[5]"]),
    ],
)
def test_what_can_be_typed_is_code(sentence, code):
    """Calls and magics in a sentence are set as code."""
    assert re.findall("<code>(.*?)</code>", to_html(Report("", (sentence,)))) == code


def test_empty_tables_and_columns_are_left_out():
    """A table without rows, and a column that is empty throughout, are shown neither as text nor as HTML."""
    empty, half = Table("Nothing", ("name",), ()), Table("Half", ("name", "note"), (("a", ""), ("b", "")))
    report = Report("title", tables=(empty, half))

    for shown in (to_text(report), to_html(report)):
        assert "Nothing" not in shown
        assert "note" not in shown
        assert "Half" in shown


def test_figures_that_are_not_known_are_named_in_a_line():
    """Figures that could not be measured are one line below those that could; where none could, there is no table."""
    known, unknown = ("memory", "3 GiB"), (("battery", "not known"), ("power", "not known"))
    some, none = (to_html(Report("", tables=(Table("", ("a", "b"), rows),))) for rows in ((known, *unknown), unknown))
    sign, _ = SIGNS["not applicable"]

    assert " ".join(words_of(some)) == f"a b memory 3 GiB {sign} Not known here: battery, power"
    assert " ".join(words_of(none)) == f"{sign} Not known here: battery, power"


def test_a_cell_that_only_reads_like_a_status_is_left_alone():
    """A table whose column holds other words too has no results in it: nothing of it is folded or gets a sign."""
    page = to_html(Report("", tables=(Table("", ("device", "speed"), (("cpu", "1.0"), ("mps", "not applicable"))),)))

    assert "<details" not in page
    assert words_of(page)[-3:] == ["mps", "not", "applicable"]


def test_report_of_a_long_text_scrolls_and_keeps_all_of_it():
    """A long note has a box of a bounded height; a short one has none, and nothing of either is lost."""
    long = tuple(Piece(f"Sentence {number}. ") for number in range(1000))
    shown, short = to_html(Report("Found", pieces=long)), to_html(Report("Found", pieces=long[:9]))

    assert "max-height" in shown
    assert "max-height" not in short
    assert all(f"Sentence {number}. " in shown for number in range(999))
    assert "Sentence 998. " in to_text(Report("Found", pieces=long))


@pytest.mark.parametrize(
    ("cells", "scrolls"),
    [
        (
            ("aten::fractional_max_pool2d_backward.grad_input", "falls back to the CPU", "1 (FractionalMaxPool2d)") * 2,
            True,
        ),
        (("aten::fractional_max_pool2d", "falls back to the CPU", "a sentence with many words " * 9), False),
        (("x" * 24,) * 5, True),
        (("cpu", "yes"), False),
    ],
)
def test_table_wider_than_a_page_scrolls_in_itself(cells, scrolls):
    """What cannot be broken into lines decides on the width of a table."""
    shown = to_html(Report("Found", tables=(Table("", tuple("abcdef"[: len(cells)]), (cells,)),)))

    assert ("overflow:auto" in shown) is scrolls
