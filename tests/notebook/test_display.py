"""What a report looks like as HTML: readable on any theme, with marks, folds and aligned numbers, and nothing from elsewhere."""

import re
from dataclasses import dataclass

import pytest

from helpers.html import contrast
from openmed_nb._render.display import (
    LABEL_COLORS,
    SIMULATION_NOTICE,
    Displayable,
    Finding,
    Report,
    Table,
    TextSegment,
    findings_table,
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


def make_table_report(*rows, **more):
    """Return a report with one table of the given rows."""
    columns = tuple("abcdefg"[: len(rows[0])])
    return Report("Found", tables=(Table("", columns, rows, **more),))


WORST = findings_table("", (Finding("d", "warning", "odd", "Look."), *FINDINGS))
LONG_NAME = "aten::fractional_max_pool2d_backward.grad_input"
NUMBERS = ("1", "12,800", "22%", "-5.0 GiB", "7,670 to 8,980", "0.05 ms (45%)", "3-8", "1e-05", "")
NO_NUMBERS = ("3.11, built for x86_64", "4 of 4 exact", "recall 1.0000", "no limit", "", "", "", "", "")
SENTENCES = (
    "Run nb.compare(model, texts). See nb.runbook.fallbacks(), and more.",
    "Type %openmed_device cpu or nb.use('cpu'). found = nb.annotate(notes)",
    "%debug has no frames now. The nb of a cell; a.nb.c and 3% openmed",
    "masked[5] is another; openmed_nb.service and openmed_nb.plist are files",
)
PIECES = (
    TextSegment("[NAME]", "NAME"),
    TextSegment(" "),
    TextSegment("***", "NAME"),
    TextSegment(" "),
    TextSegment("DNA polymerase", "DNA", "0.912"),
)

REPORTS = {
    "title, sentence and table": REPORT,
    "details and metrics": Report(
        "Speed",
        ("x.",),
        metrics=(Table("Times", ("step", "ms"), (("data", "2.0"),)),),
        details="Model: m, device: cpu, 2.0 s",
    ),
    "a status is a sign and a word": Report("Doctor", status="failed"),
    "the worst is first, what is well or does not apply is counted and folded": Report("", tables=(WORST,)),
    "where nothing applies nothing is folded": Report("", tables=(findings_table("", FINDINGS[2:]),)),
    "a row with a sentence is a line of text": Report(
        "Doctor",
        tables=(
            findings_table(
                "",
                (
                    Finding(
                        "b", "failed", "wrong", "Use the CPU.", "seen with torch 2.7, 2.8, 2.9, 2.10, 2.11 and 2.12"
                    ),
                ),
            ),
        ),
    ),
    "a replacement says its label once": Report("", segments=PIECES),
    "a folded table": make_table_report(("1", "two"), collapsed=True),
    "a column that is empty is left out": make_table_report(("a", "", "c"), ("b", "", "")),
    "a table without rows is left out": Report("title", tables=(Table("Nothing", ("name",), ()),)),
    "unknown values are listed": make_table_report(("memory", "3 GiB"), ("power", "not known")),
    "nothing is known": make_table_report(("battery", "not known"), ("power", "not known")),
    "a cell that only reads like a status": make_table_report(("cpu", "1.0"), ("mps", "not applicable")),
    "numbers stand to the right": make_table_report(
        *(("row", *cells) for cells in zip(NUMBERS, NO_NUMBERS, strict=True))
    ),
    "a table wider than a page scrolls": make_table_report(
        (LONG_NAME, "falls back to the CPU", "1 (FractionalMaxPool2d)") * 2
    ),
    "a table of words does not": make_table_report(
        (LONG_NAME, "falls back to the CPU", "a sentence with many words " * 9)
    ),
    "what can be typed is code": Report("", SENTENCES),
}


def test_reports_are_as_recorded(as_recorded):
    """The text and the page of each report are what the record has, which is read by people."""
    as_recorded("display.json", {name: [to_text(report), to_html(report)] for name, report in REPORTS.items()})


@pytest.mark.parametrize("background", LABEL_COLORS)
def test_marked_text_has_contrast(background):
    """The letters of a mark stand out from each of its backgrounds by 7 to 1 or more, on any theme."""
    assert contrast(background, "#000000") >= 7
    assert "color:#000000" in label_style("DISEASE")


@pytest.mark.parametrize("page", [0xFF, 0x11])
def test_mark_of_context_has_contrast(page):
    opacity = float(re.search(r"opacity:([\d.]+)", label_style("DISEASE", "negated"))[1])
    behind = (1 - opacity) * page
    for color in LABEL_COLORS:
        background = bytes(round(opacity * part + behind) for part in bytes.fromhex(color[1:]))
        assert contrast(f"#{background.hex()}", f"#{bytes([round(behind)] * 3).hex()}") >= 4.5


@pytest.mark.parametrize("status", SIGNS)
def test_status_signs_have_contrast(status):
    """The white sign of each status stands out from its background by 4.5 to 1 or more, and no two signs are the same."""
    assert contrast(SIGNS[status][1], "#ffffff") >= 4.5
    assert len({sign for sign, _ in SIGNS.values()}) == len(SIGNS)


def test_label_has_one_color_everywhere():
    """The color of a label does not depend on the other labels of the text, and labels that often meet differ."""
    alone = to_html(Report("", segments=(TextSegment("x", "DRUG"),)))
    among = to_html(Report("", segments=(TextSegment("x", "ANATOMY"), TextSegment("y", "DRUG"))))
    often = ("DISEASE", "DRUG", "GENE", "ANATOMY", "CELL", "PROTEIN"), ("PROBLEM", "TREATMENT", "TEST")

    assert label_style("DRUG") in alone
    assert label_style("DRUG") in among
    assert all(len(set(map(label_style, together))) == len(together) for together in often)


def test_html_loads_nothing():
    """The HTML has no style sheet and no script, loads nothing, and names no color of a theme."""
    assert not re.search(r"<style|<script|url\(|@import|http|var\(", to_html(REPORT))


@pytest.mark.parametrize("simulated", [False, True])
def test_simulation_is_labeled_in_text_and_html(simulated):
    """Title, headline and first sentence have the suffix and the notice of the simulation."""

    @dataclass(frozen=True, repr=False)
    class Figure(Displayable):
        simulated: bool

        def to_report(self):
            return Report("Seen on mps", ("One row.",))

    figure = Figure(simulated)
    assert str(figure).splitlines()[0] == ("Seen on mps (SIMULATED)" if simulated else "Seen on mps")
    assert ("Seen on mps (SIMULATED)" in figure._repr_html_()) is simulated
    assert [SIMULATION_NOTICE in shown for shown in (str(figure), figure._repr_html_())] == [simulated] * 2
    assert figure.to_dict() == {"simulated": simulated}


def test_report_of_a_long_text_scrolls_and_keeps_all_of_it():
    """A long note has a box of a bounded height; a short one has none, and nothing of either is lost."""
    long = tuple(TextSegment(f"Sentence {number}. ") for number in range(1000))
    shown, short = to_html(Report("Found", segments=long)), to_html(Report("Found", segments=long[:9]))

    assert "max-height" in shown
    assert "max-height" not in short
    assert all(f"Sentence {number}. " in shown for number in range(999))
    assert "Sentence 998. " in to_text(Report("Found", segments=long))
