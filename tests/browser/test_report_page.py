"""The page of a report in a browser: readable on a phone and on a wide screen, in light and in dark."""

from dataclasses import replace

import pytest

from helpers import page_measures
from openmed_nb._render.display import Report, Table
from openmed_nb._render.drawing import Bar, Chart
from openmed_nb.runbook.records.logbook import Software
from openmed_nb.runbook.records.report import SCHEMA, DeviceReport, render_page
from openmed_nb.runbook.records.running import ReportSubject, StepOutcome

pytestmark = pytest.mark.slow

WRITTEN = "2026-11-01T12:00:00Z"


@pytest.fixture(scope="module")
def page_file(tmp_path_factory):
    """A page with a step of each outcome, long words, wide tables, and pictures of nothing, one bar and many."""
    wide = Table("Wide", tuple("abcdefgh"), (("aten::_scaled_dot_product_flash_attention_for_cpu",) * 8,))
    many = tuple(
        Bar(f"aten::_scaled_dot_product_flash_attention_for_cpu_{number}", number, f"{number:,} MiB")
        for number in range(12)
    )
    pictures = (Chart("Many", many), Chart("One", (Bar("cpu", 0.0, "0"),)), Chart("None"))
    whole = Report("Found", ("All is well.",), (wide,), metrics=(wide,), charts=pictures)
    well = StepOutcome("sweep", "done", "ok", "The knee is 8 rows.", "", (), WRITTEN, 3.0, whole)
    died = StepOutcome(
        "rows", "crashed", None, "SIGABRT ended it.", "Use 'cpu'.", ("assertion " * 40, "line"), WRITTEN, 3.0
    )
    steps = (well, replace(well, step="doctor", status="failed"), replace(well, step="memory", status="warning"), died)
    software = Software("0.1.0", "3.12.1", "2.14.1", "5.23.0", {}, "macOS 15.1", "arm64")
    subject = ReportSubject(False, (), None, "bundled", 0, True, False, False, "Apple M2", 16 << 30, software)
    report = DeviceReport(SCHEMA, WRITTEN, subject, "mps", (), steps, "One. Two.", ("Not known: power.",))
    file = tmp_path_factory.mktemp("page") / "report.html"
    file.write_text(render_page(report), "utf-8")
    return file


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 1280])
def test_report_page_is_accessible(page_file, new_page, scheme, width):
    """Nothing is wider than the window, every text has contrast, and a scan finds nothing grave, with all parts open."""
    page = new_page(width=width, height=800)
    page.emulate_media(color_scheme=scheme)
    page.goto(page_file.as_uri())
    page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")

    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page_measures.findings(page, "html", page_measures.GRAVE) == []
    assert page.get_by_role("heading", level=2).count() == 4
