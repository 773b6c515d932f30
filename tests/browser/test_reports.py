"""Reports in JupyterLab, trusted and not, in light and dark, and as nbconvert exports them: they keep their looks and can be read."""

import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbconvert import HTMLExporter
from nbformat.v4 import new_code_cell, new_notebook, new_output

from helpers import front_ends, page_measures
from helpers.annotations import make_annotations, make_text
from openmed_nb._render.display import FAILED, NOT_APPLICABLE, OK, WARNING, Finding, Report, to_html
from openmed_nb.devices.choice import DeviceChoice, Rejection
from openmed_nb.runbook.bench.comparison import Comparison, DeviceMetrics
from openmed_nb.runbook.bench.sweep import Point, SweepReport
from openmed_nb.runbook.bench.timing import MedianInterval, PhaseTimes
from openmed_nb.runbook.checks.doctor import DoctorReport
from openmed_nb.runbook.verdict.metrics import Evidence
from openmed_nb.runbook.verdict.rules import Gates
from openmed_nb.runbook.verdict.verdict import evaluate

pytestmark = pytest.mark.slow

SPLIT = PhaseTimes({"data": 0.01, "transfer": 0.005, "forward": 0.07, "decode": 0.015})
TEXT = "The patient takes metformin for type 2 diabetes; no asthma."
ENTITIES = (("DRUG", 18, 27), ("DISEASE", 32, 47), ("DISEASE", 52, 58))
FOUND = tuple({"entity_group": label, "score": 0.9, "word": "", "start": a, "end": b} for label, a, b in ENTITIES)


REPORTS = {
    "annotations": make_annotations([FOUND] * 300, [TEXT] * 300),
    "device": DeviceChoice(
        *("cpu", "auto", "nobody", "No device was asked for, and mps and cuda cannot be used here.", True),
        (Rejection("mps", "this computer runs Linux", ""), Rejection("cuda", "no driver is loaded", "Install it.")),
        dtype_reason="16-bit types are slower",
    ),
    "doctor": DoctorReport(
        (
            Finding("torch", OK, "2.13.0"),
            Finding("packages", WARNING, "two versions", "Restart the kernel."),
            Finding("computation", FAILED, "wrong on mps", "Use the CPU: nb.use('cpu')."),
            Finding("CUDA", NOT_APPLICABLE, "no NVIDIA driver is loaded"),
        )
    ),
    "entities": make_text(TEXT, *FOUND, known_labels=("DISEASE", "DRUG")),
    "gates": Gates(speedup=0.3),
    "sweep": SweepReport(
        *("m", "annotation", "cpu", tuple(Point(rows, 9.0 * rows, rows << 20) for rows in (1, 2))),
        knee=2,
        stop_code="time",
        length=128,
    ),
    "verdict": evaluate(
        Evidence(
            device="mps",
            task="annotation",
            speedup_low=2.9,
            speedup=3.1,
            speedup_high=3.3,
            utilization=0.7,
            phase_fractions={"data": 0.4, "transfer": 0.1, "forward": 0.5},
            entity_agreement=1.0,
            headroom=0.4,
            fallback_time=0.01,
        )
    ),
    "comparison": Comparison(
        *("m", "annotation"),
        (
            DeviceMetrics("cpu", 0.4, 32, SPLIT),
            DeviceMetrics("mps", 0.13, 32, SPLIT, MedianInterval(2.9, 3.1, 3.3, 0.959)),
        ),
        20,
    ),
}
"""Reports with prose, results, highlighted text, tables, status indicators, lines, bars and commands."""

MIN_CONTRAST = 4.5
DROPPED = "font-variant-numeric"
"""What JupyterLab takes out of a page that it does not trust, and the digits stay readable."""

STYLES = "root => [...root.querySelectorAll('[style]')].map(one => one.getAttribute('style'))"


def written(folder, name):
    """Write a notebook with every report as its output; return its name."""
    outputs = [
        new_output("execute_result", {"text/html": value._repr_html_(), "text/plain": str(value)}, execution_count=1)
        for value in REPORTS.values()
    ]
    cells = [new_code_cell("", outputs=[output], execution_count=1) for output in outputs]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}}
    nbformat.write(new_notebook(cells=cells, metadata={**kernel, "title": name}), folder / f"{name}.ipynb")
    return f"{name}.ipynb"


@pytest.fixture(scope="module")
def pages(server, new_page):
    """The notebook of a trust in JupyterLab, opened when first asked for, in a theme."""
    opened = {}

    def page(trust, theme):
        if trust not in opened:
            name = written(server.notebooks, trust)
            if trust == "trusted":
                sign = [str(Path(sys.executable).parent / "jupyter-trust"), str(server.notebooks / name)]
                subprocess.run(sign, env=server._environment(), check=True, capture_output=True)
            opened[trust] = front_ends.Lab(server, new_page(), name, theme)
        if opened[trust].theme != theme:
            opened[trust].choose_theme(theme)
        return opened[trust].page

    return page


def shown(page):
    """Return each report on a page, unfolded, by its name."""
    areas = page.locator(".openmed-nb:not(.openmed-nb .openmed-nb)")
    for number in range(len(REPORTS)):
        areas.nth(number).scroll_into_view_if_needed()
        areas.nth(number).evaluate("root => root.querySelectorAll('details').forEach(one => { one.open = true; })")
    return {name: areas.nth(number) for number, name in enumerate(REPORTS)}


VIEWS = [(trust, theme) for trust in ("trusted", "untrusted") for theme in ("light", "dark")]


@pytest.mark.parametrize(("trust", "theme"), VIEWS)
def test_texts_have_contrast(pages, picture, trust, theme):
    """Each text of each report stands out by 4.5 to 1, in light and dark, in a notebook that is trusted and in one that is not."""
    for name, report in shown(pages(trust, theme)).items():
        picture(report, f"report_{name}_{trust}_{theme}")
        contrasts = page_measures.contrasts(report)

        assert len(contrasts) > 3
        assert {text: ratio for text, ratio in contrasts.items() if ratio < MIN_CONTRAST} == {}


@pytest.mark.parametrize(("trust", "theme"), VIEWS)
def test_accessibility_scan_finds_nothing_serious(pages, trust, theme):
    """axe-core has no serious and no critical finding in the reports."""
    page = pages(trust, theme)
    shown(page)

    assert page_measures.findings(page, ".openmed-nb", page_measures.GRAVE) == []


def test_untrusted_notebook_keeps_every_style(pages):
    """JupyterLab takes nothing from a report that it does not trust but the width of digits: it looks the same."""
    for name, report in shown(pages("untrusted", "light")).items():
        kept = [style.replace(" ", "").rstrip(";") for style in report.evaluate(STYLES)]
        given = [style.replace(" ", "") for style in styles_in(REPORTS[name]._repr_html_())]

        assert kept == given, name


def test_score_is_available_to_screen_readers_only(pages):
    """Also in an untrusted notebook, screen readers get the score of an entity, which is not visible."""
    mark = shown(pages("untrusted", "light"))["entities"].locator("mark").first

    assert mark.aria_snapshot() == "- mark: metformin DRUG 0.900"
    assert mark.locator("span").evaluate("one => one.getBoundingClientRect().width") == 0


def test_untrusted_notebook_shows_charts(pages):
    """Lines are an image of the page itself, which JupyterLab also shows in a notebook that it does not trust; words stay around it."""
    shown(pages("untrusted", "light"))
    sweep = pages("untrusted", "light").locator(".openmed-picture").filter(has_text="Throughput on cpu")
    drawing, tick = sweep.locator("img"), sweep.get_by_text("rows/s", exact=False).first

    assert drawing.evaluate("one => one.complete && one.getBoundingClientRect().width > 300")
    assert "Throughput on cpu" in drawing.get_attribute("alt")
    assert tick.bounding_box()["x"] < drawing.bounding_box()["x"]


def styles_in(html):
    """Return the styles inside of a report as they are written, without what JupyterLab drops."""
    inside = html.split(">", 1)[1]
    return [re.sub(rf";?{DROPPED}:[^;]*", "", style) for style in re.findall(r'style="([^"]*)"', inside)]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_html_export_looks_the_same_offline(new_page, picture, tmp_path, theme):
    """The page that nbconvert makes shows every report with its styles, and needs no network."""
    name = written(tmp_path, "exported")
    body = HTMLExporter(theme=theme).from_filename(str(tmp_path / name))[0]
    (tmp_path / "page.html").write_text(body, "utf-8")
    page = new_page()
    page.context.set_offline(True)
    page.goto((tmp_path / "page.html").as_uri(), wait_until="commit")

    for report_name, report in shown(page).items():
        picture(report, f"report_{report_name}_nbconvert_{theme}")
        low = {text: ratio for text, ratio in page_measures.contrasts(report).items() if ratio < MIN_CONTRAST}
        assert low == {}


@pytest.mark.parametrize("width", [390, 1280])
def test_reports_are_not_wider_than_the_page(new_page, tmp_path, width):
    """Wide tables scroll in a box, and long words break, on a phone and on a laptop."""
    checksum = Report("Dataset", (f"SHA-256: {'0123456789abcdef' * 4}.",))
    reports = {**{name: report._repr_html_() for name, report in REPORTS.items()}, "checksum": to_html(checksum)}
    page = new_page()
    page.set_viewport_size({"width": width, "height": 800})
    widths = {}
    for name, html in reports.items():
        (tmp_path / f"{name}.html").write_text(
            f'<meta charset="utf-8">{html.replace("<details", "<details open")}', "utf-8"
        )
        page.goto((tmp_path / f"{name}.html").as_uri())
        widths[name] = page.evaluate("document.documentElement.scrollWidth")

    assert {name: measured for name, measured in widths.items() if measured > width} == {}
