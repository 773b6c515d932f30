"""Snapshot of all reports: the JSON keys, and the text and the names of the metrics if they are the same for all runs.

Run pytest with ``--record`` to update ``recorded/reports.json``.
"""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch

import openmed_nb as nb
from helpers.html import read
from helpers.sample_reports import VALIDATION_RECORD
from openmed_nb._render.display import UNKNOWN, drop_empty_tables
from openmed_nb._render.drawing import Bar, Chart
from openmed_nb.distributed.client import PACKAGES, WorkerInfo, WorkerList
from openmed_nb.runbook.records.logbook import Software
from openmed_nb.runbook.records.report import SCHEMA, DeviceReport
from openmed_nb.runbook.records.running import ReportSubject, StepOutcome
from openmed_nb.runbook.verdict.metrics import Evidence, ReportMetrics
from openmed_nb.session import SESSION
from openmed_nb.training.release import MemoryLimit

pytestmark = [
    pytest.mark.real_computer,
    pytest.mark.filterwarnings("ignore::openmed_nb.errors.OpenMedWarning"),
]

TEXTS = ["She has asthma.", "No fever, but type 2 diabetes mellitus.", "History of asthma."]
MODEL = "bundled_small"
SOFTWARE = Software("0.1.0", "3.12.1", "2.14.1", "5.23.0", {}, "macOS 15.1", "arm64")

# Reports whose text contains properties of this computer or measurements; the snapshot has only their JSON keys.
VARYING = {
    "devices",
    "doctor",
    "explanation",
    "signals",
    "logbook",
    "sweep",
    "environment",
    "loader_settings",
    "comparison",
    "profile",
    "curve",
    "release",
    "simulated_device",
}

# Reports whose text is the same for all runs, but not the operators and measurements that they compare.
VARYING_METRICS = {"profile_diff", "logbook_diff"}

# Mappings whose keys are environment variables or installed packages.
VARYING_KEYS = {"environment", "packages"}


def make_device_report():
    """Return a report with a completed step and a crashed step."""
    created_at = "2026-11-01T12:00:00Z"
    subject = ReportSubject(False, (), None, "bundled", 0, True, False, False, "Apple M2", 16 << 30, SOFTWARE)
    initial = DeviceReport(SCHEMA, created_at, subject, None, ("rows", "device"))
    choice = nb.device("cpu")
    completed = StepOutcome(
        "device",
        "done",
        "ok",
        "Device: cpu.",
        "",
        (),
        created_at,
        3.0,
        report=replace(choice.to_report(), charts=(Chart("Rows", (Bar("8", 1.0, "1 ms"),)),)),
        report_json=choice.to_dict(),
        metrics=(ReportMetrics("rows", MODEL, "cpu", False, {}),),
    )
    crashed = StepOutcome(
        "rows", "crashed", None, "The process was ended by SIGABRT.", "Use 'cpu'.", ("assertion",), created_at, 3.0
    )
    return initial.with_outcome(completed).with_outcome(crashed)


def extract_keys(value):
    """Return the nested keys of a JSON value; the keys of list items are merged."""
    if isinstance(value, dict):
        return {name: None if name in VARYING_KEYS else extract_keys(item) for name, item in value.items()}
    if isinstance(value, list):
        keys = [item_keys for item_keys in map(extract_keys, value) if isinstance(item_keys, dict)]
        return [{name: item_keys[name] for item_keys in keys for name in item_keys}] if keys else None
    return None


def make_reports(folder):
    """Return the reports by name, on the CPU."""
    SESSION.unload()
    found = nb.annotate(TEXTS, MODEL, device="cpu", progress=False)
    gold = nb.read_annotations(found.export("doccano", folder / "gold.jsonl").path)
    linear = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 2))
    batch = torch.ones(2, 8)
    sweep = nb.sweep(linear, batch, device="cpu", max_batch_size=1)
    comparison = nb.compare(linear, batch, devices="cpu", seconds=1)
    profile = nb.runbook.profile(linear, batch, device="cpu", steps=3)
    parity = nb.runbook.parity(MODEL, TEXTS, device="cpu", dtype="bfloat16", gold=[[], [], []], gradients=True)
    precision = nb.runbook.validate_precision(MODEL, TEXTS, device="cpu")
    forecast = nb.runbook.forecast(linear, batch)
    loop = nb.epochs(2, "cpu")
    for _ in loop:
        pass
    with nb.simulated_mps("8 GiB") as mps:
        pass
    book = nb.logbook(sweep, model=MODEL, dataset=TEXTS, batch_size=2, hypotheses=[("cache", "emptied")])
    return {
        "choice": nb.use("cpu"),
        "devices": SESSION.list_devices(),
        "explanation": SESSION.explain(),
        "environment": SESSION.device_manager.mps_environment("mps"),
        "inventory": (nb.load_pipeline(MODEL, device="cpu"), SESSION.inventory())[1],
        "annotations": found,
        "annotations_only": found.filter("disease", min_score=0.5),
        "scores": found.score(gold),
        "gold": gold,
        "annotated_text": nb.annotate(TEXTS[1], MODEL, device="cpu"),
        "doctor": nb.doctor(),
        "signals": nb.system_status(),
        "sweep": sweep,
        "comparison": comparison,
        "profile": profile,
        "profile_diff": profile.diff(profile),
        "parity": parity,
        "losses": nb.runbook.loss_parity(linear, [batch], device="cpu", steps=3),
        "precision_verdict": precision,
        "validation_record": make_validation_record(),
        "forecast": forecast,
        "gates": nb.runbook.gates(speedup=0.3),
        "verdict": nb.verdict(parity, Evidence(no_gpu=True), task="annotation"),
        "lanes": nb.verdict(Evidence()).lanes,
        "logbook": book,
        "logbook_diff": book.diff(book),
        "curve": loop.curve,
        "report": make_device_report(),
        "release": nb.release(keep=["models", "history", "traceback"]),
        "holders": nb.training.find_tensor_referrers({"weights": torch.ones(1)}),
        "loader_settings": nb.training.loader.settings([1, 2], "cpu"),
        "memory_limit": MemoryLimit("mps", 0.8, 12 << 30),
        "no_memory_limit": MemoryLimit("mps", 0.0, 12 << 30),
        "members": WorkerList((WorkerInfo("mini", "mps", "It is the best.", dict.fromkeys(PACKAGES, "1")),)),
        "simulated_device": mps,
        "precision": nb.training.precision(device="cpu"),
        "dtype_choice": nb.load_pipeline(MODEL, device="cpu", dtype="auto").precision,
    }


def make_validation_record():
    """Return a validation record with a recall of gold entities and a speedup."""
    identity = replace(VALIDATION_RECORD.identity, device_name="Apple M2")
    evidence = replace(VALIDATION_RECORD.evidence, exact=59, moved=1, reference_recall=0.9)
    return replace(VALIDATION_RECORD, identity=identity, evidence=evidence)


def describe_metrics(table):
    """Return a table of metrics without the values."""
    names = [row[0] for row in table.rows]
    return {"caption": table.caption, "columns": list(table.columns), "names": names, "collapsed": table.collapsed}


def describe_report(name, report):
    """Return the JSON keys, the text and the names of the metrics of a report, without the version of torch."""
    keys = extract_keys(json.loads(json.dumps(report.to_dict() if hasattr(report, "to_dict") else None)))
    text = re.sub(r"\n[^\n]*\(this run\)(?:\n  [^\n]*)*", "", str(report))
    text = re.sub(r"(device: cpu), [\d.]+ m?s", r"\1", re.sub(r"torch \d[\w.]*\w", "torch VERSION", text))
    described = {"names": keys, "text": None if name in VARYING else text.splitlines()}
    if name not in VARYING | VARYING_METRICS and hasattr(report, "to_report"):
        described["metrics"] = [describe_metrics(table) for table in report.to_report().metrics]
    return described


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """All reports by name."""
    folder = tmp_path_factory.mktemp("reports")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENMED_NB_DATA", str(folder / "data"))
        yield make_reports(folder)


def test_reports_match_the_snapshot(reports, as_recorded):
    described = {name: describe_report(name, report) for name, report in reports.items()}

    as_recorded("reports.json", described, sort_keys=True)


# Status sign before the headline. Three texts are too few for a reduced dtype; reports without a status have no sign.
SIGNS = {"losses": "✓", "parity": "✓", "precision_verdict": "!", "forecast": "✓", "members": None}


def test_reports_have_a_status_sign(reports):
    signs = {
        name: re.search(r"<p [^>]*>(?:<span[^>]*>(.)</span> )?<strong>", reports[name]._repr_html_())[1]
        for name in SIGNS
    }

    assert signs == SIGNS


def test_text_and_html_have_the_same_values(reports):
    for name, value in reports.items():
        if hasattr(value, "final_report"):
            report = value.final_report()
            tables = drop_empty_tables((*report.tables, *report.metrics))
            cells = [cell for table in tables for row in table.rows for cell in row if cell != UNKNOWN]
            shown = read(value._repr_html_()).text
            missing = [
                text
                for text in (report.title, *report.sentences, *cells)
                if text not in shown or text not in str(value)
            ]
            assert (name, missing) == (name, [])


LENGTH = r"-?\d+(\.\d+)?(em|px|%)?"
LENGTHS = rf"{LENGTH}( {LENGTH}){{0,3}}"
COLOR = r"#[0-9a-f]{6}|rgba\(\d+,\d+,\d+,[0-9.]+\)"

# CSS that JupyterLab 4 keeps in an untrusted notebook, as far as reports use it: no variables, no inherit.
# tests/browser/test_reports.py verifies this in JupyterLab.
KEPT_CSS = {
    "background": "none",
    "border": rf"none|{LENGTH} dashed {COLOR}",
    **dict.fromkeys(("bottom", "height", "left", "right", "top", "width"), LENGTH),
    **dict.fromkeys(("border-left", "border-right"), rf"{LENGTH} solid"),
    **dict.fromkeys(("background-color", "color"), COLOR),
    **dict.fromkeys(("border-radius", "margin", "min-width", "padding"), LENGTHS),
    "border-collapse": "collapse",
    "border-top": rf"{LENGTH} (solid|dashed|dotted)( ({COLOR}))?",
    "caption-side": "top",
    "cursor": "pointer",
    "display": "block|inline-block",
    "font-size": LENGTH,
    "font-weight": r"\d00",
    "line-height": LENGTH,
    "max-height": LENGTH,
    "max-width": f"none|{LENGTH}",
    "opacity": r"0\.\d+",
    "overflow": "auto",
    "overflow-wrap": "break-word",
    "position": "absolute|relative",
    "table-layout": "auto",
    "text-align": "left|center|right",
    "vertical-align": "top|middle",
    "white-space": "pre-wrap|nowrap",
}

# CSS that JupyterLab drops, and reports can do without.
DROPPED_CSS = {"font-variant-numeric"}

# Attributes of a box with a scroll bar that JupyterLab drops too. The box looks the same without them.
DROPPED_ATTRIBUTES = {"div role", "div aria-label", "div tabindex"}

# Elements that JupyterLab keeps, with the attributes in addition to class, dir, style and title.
KEPT_TAGS = {
    **{tag: set() for tag in ("br", "caption", "code", "details", "figcaption", "figure", "mark", "p", "small")},
    **{tag: set() for tag in ("span", "strong", "summary", "table", "tbody", "td", "thead", "tr")},
    "div": {"hidden"},
    "img": {"alt", "src"},
    "th": {"scope"},
}


class SanitizerCheck(HTMLParser):
    """Collects the elements, attributes and styles that JupyterLab would drop from an untrusted page."""

    def __init__(self, page):
        super().__init__()
        self.dropped = []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        """Check an element, its attributes, and its style."""
        if tag not in KEPT_TAGS:
            self.dropped.append(tag)
        for name, value in attributes:
            kept = {"class", "dir", "style", "title", *KEPT_TAGS.get(tag, ())}
            if name not in kept and f"{tag} {name}" not in DROPPED_ATTRIBUTES:
                self.dropped.append(f"{tag} {name}")
            for declaration in value.split(";") if name == "style" else ():
                css_property, _, css_value = declaration.partition(":")
                pattern = KEPT_CSS.get(css_property, "")
                if css_property not in DROPPED_CSS and not re.fullmatch(pattern, css_value.strip()):
                    self.dropped.append(declaration)


def test_reports_are_unchanged_in_an_untrusted_notebook(reports):
    pages = {name: report._repr_html_() for name, report in reports.items() if hasattr(report, "_repr_html_")}

    assert len(pages) > 25
    assert {name: dropped for name, page in pages.items() if (dropped := SanitizerCheck(page).dropped)} == {}
    assert SanitizerCheck('<svg/><p onclick="x" style="color:var(--jp-x)"/>').dropped == [
        "svg",
        "p onclick",
        "color:var(--jp-x)",
    ]
