"""What each report looks like: the names in its JSON, its text where no two runs differ, and what its HTML is made of."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

import openmed_nb as nb
from openmed_nb._annotate import annotate_text
from openmed_nb._render.drawing import Bar, Chart
from openmed_nb.distributed.members import PACKAGES, WorkerInfo, WorkerList
from openmed_nb.runbook.records.logbook.sections import ReportMetrics, Software
from openmed_nb.runbook.records.report.record import SCHEMA, StepOutcome, Subject
from openmed_nb.runbook.records.report.report import DeviceReport
from openmed_nb.session import SESSION
from openmed_nb.training.release import MemoryLimit

torch = pytest.importorskip("torch")

SOFTWARE = Software("0.1.0", "3.12.1", "2.14.1", "5.23.0", {}, "macOS 15.1", "arm64")
"""What a report is of that was made by hand."""


def report_of_a_computer():
    """Return a report with one step that has an answer, and one that died."""
    written = "2026-11-01T12:00:00Z"
    subject = Subject(False, (), None, True, False, "Apple M2", 16 << 30, SOFTWARE)
    begun = DeviceReport(SCHEMA, written, subject, None, ("rows", "device"))
    choice = nb.device("cpu")
    picture, figures = Chart("Rows", (Bar("8", 1.0, "1 ms"),)), ReportMetrics("rows", MODEL, "cpu", None, False, {})
    found = {"report": replace(choice.to_report(), charts=(picture,)), "report_json": choice.to_dict(), "figures": (figures,)}
    first = StepOutcome("device", "done", "ok", "Device: cpu.", "", (), written, 3.0, **found)
    died = StepOutcome("rows", "crashed", None, "SIGABRT ended it.", "Use 'cpu'.", ("assertion",), written, 3.0)
    return begun.with_outcome(first).with_outcome(died)


SNAPSHOT = Path(__file__).parent / "recorded" / "reports.json"
TEXTS = ["She has asthma.", "No fever, but type 2 diabetes mellitus.", "History of asthma."]
MODEL = "bundled_small"

VARYING = {
    *("devices", "doctor", "explanation", "signals", "logbook", "sweep", "environment", "loader_settings"),
    *("comparison", "profile", "curve", "sample", "loader_check", "release", "simulated_device"),
}
"""Reports whose text names this computer, or figures of this run: only the names in their JSON are kept."""


NAMED_BY_DATA = {"environment", "packages"}
"""Mappings whose names are those of variables that are set, and of packages that are installed."""


def names_in(value):
    """Return the names in a JSON value, nested as they are; of a list, those of all that it holds."""
    if isinstance(value, dict):
        return {name: None if name in NAMED_BY_DATA else names_in(one) for name, one in value.items()}
    if isinstance(value, list):
        found = [one for one in map(names_in, value) if isinstance(one, dict)]
        return [{name: one[name] for one in found for name in one}] if found else None
    return None


def reports(folder):
    """Yield each report with what makes it, on the CPU."""
    SESSION.unload()
    linear = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 2))
    batch = torch.ones(2, 8)
    loader = torch.utils.data.DataLoader(torch.ones(12, 8), batch_size=2)
    sweep = nb.sweep(linear, batch, device="cpu", max_batch_size=1)
    comparison = nb.compare(linear, batch, devices="cpu", rounds=6, utilization_seconds=0)
    profile = nb.runbook.profile(linear, batch, device="cpu", steps=3, warm_up=1)
    parity = nb.runbook.parity(MODEL, TEXTS, device="cpu", dtype="bfloat16", gold=[[], [], []], gradients=True)
    precision = nb.runbook.validate_precision(MODEL, TEXTS, device="cpu")
    forecast = nb.runbook.forecast(linear, batch, training=True)
    loop = nb.epochs(2, "cpu")
    for _ in loop:
        pass
    book = nb.logbook(sweep, model=MODEL, dataset=TEXTS, batch_size=2, hypotheses=[("cache", "emptied")], folder=folder)
    yield "choice", lambda: nb.use("cpu")
    yield "devices", SESSION.list_devices
    yield "explanation", SESSION.explain
    yield "environment", lambda: SESSION.device_manager.mps_environment("mps")
    yield "inventory", lambda: (nb.load_pipeline(MODEL, device="cpu"), SESSION.inventory())[1]
    yield "annotations", lambda: nb.annotate(TEXTS, MODEL, device="cpu", progress=False)
    yield (
        "annotations_only",
        lambda: nb.annotate(TEXTS, MODEL, device="cpu", progress=False).filter("disease", min_score=0.5),
    )
    yield "annotated_text", lambda: annotate_text(SESSION, TEXTS[1], MODEL, "cpu")
    yield "doctor", nb.doctor
    yield "signals", nb.system_status
    yield "sweep", lambda: sweep
    yield "comparison", lambda: comparison
    yield from {"profile": lambda: profile, "profile_diff": lambda: profile.diff(profile)}.items()
    yield "parity", lambda: parity
    yield "losses", lambda: nb.runbook.loss_parity(linear, [batch], device="cpu", steps=3)
    yield "precision_verdict", lambda: precision
    yield "forecast", lambda: forecast
    yield "gates", lambda: nb.runbook.gates(speedup=0.3)
    yield from {"verdict": lambda: nb.verdict(parity, task="annotation"), "lanes": lambda: nb.verdict().lanes}.items()
    yield "logbook", lambda: book
    yield "logbook_diff", lambda: book.diff(book)
    yield "curve", lambda: loop.curve
    yield "sample", lambda: loop.curve.samples[0]
    yield "report", report_of_a_computer
    yield "release", lambda: nb.release(models=False, history=False, traceback=False)
    yield "holders", lambda: nb.training.find_tensor_referrers({"weights": torch.ones(1)})
    yield "loader_settings", lambda: nb.training.loader.settings([1, 2], "cpu")
    yield "loader_check", lambda: nb.training.loader.check(loader, torch.nn.Linear(8, 1), "cpu", batches=3)
    yield "guards", lambda: nb.Guards(disable="labels")
    yield "memory_limit", lambda: MemoryLimit("mps", 0.8, 12 << 30, 0.7)
    yield "no_memory_limit", lambda: MemoryLimit("mps", 0.0, 12 << 30, 0.7)
    yield (
        "members",
        lambda: WorkerList(
            (WorkerInfo("mini", "Darwin arm64", "mps", "It is the best.", dict.fromkeys(PACKAGES, "1")),)
        ),
    )
    yield "simulated_device", simulated_device
    yield "precision", lambda: nb.training.precision(device="cpu")
    yield "adamw", lambda: nb.training.adamw.explain(linear.parameters())
    yield "dtype_choice", lambda: nb.load_pipeline(MODEL, device="cpu", dtype="auto").precision


def simulated_device():
    """Return a simulated MPS device after its end."""
    with nb.simulated_mps("8 GiB") as mps:
        return mps


def snapshot(folder):
    """Return what each report looks like."""
    return {name: looks_of(name, make()) for name, make in reports(folder)}


def looks_of(name, report):
    """Return the names in the JSON of a report, and its text, which is the same with each torch but for its version."""
    names = names_in(json.loads(json.dumps(report.to_dict() if hasattr(report, "to_dict") else None)))
    text = re.sub(r"torch \d[\w.]*\w", "torch VERSION", str(report))
    return {"names": names, "text": None if name in VARYING else text.splitlines()}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Every report by its name."""
    folder = tmp_path_factory.mktemp("reports")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("OPENMED_NB_DATA", str(folder / "data"))
        yield {name: make() for name, make in reports(folder)}


@pytest.mark.real_computer
@pytest.mark.filterwarnings("ignore::openmed_nb.errors.OpenMedWarning")
def test_reports_stay(made):
    """The names in the JSON of each report, and its text, are those of the snapshot; who changes one changes it there."""
    shown = {name: looks_of(name, report) for name, report in made.items()}

    assert shown == json.loads(SNAPSHOT.read_text("utf-8"))


SIGNS = {"losses": "✓", "parity": "✓", "precision_verdict": "!", "forecast": "✓", "guards": None, "members": None}
"""The sign before the headline of some reports; three texts are too few for a precision, and what is no judgement has none."""

HEADLINES = {
    "losses": "Sequential learns on cpu in float32 as on cpu in float32",
    "parity": "bundled_small on cpu in bfloat16 answers as on cpu in float32",
    "precision_verdict": "It is not known yet whether bundled_small may be used in bfloat16 on cpu",
    "guards": "5 of 6 guards are on",
    "no_memory_limit": "No memory limit on mps: macOS may swap and then stop the process",
    "members": "1 worker (mps) on 1 computer",
}
"""What stands first in the HTML, as a person would say it."""


@pytest.mark.real_computer
@pytest.mark.filterwarnings("ignore::openmed_nb.errors.OpenMedWarning")
def test_what_judges_has_a_sign_and_a_headline(made):
    """A report that judges begins with the sign of its worst finding, and a headline says what came of it."""
    first = {
        name: re.search(r"<p [^>]*>(?:<span[^>]*>(.)</span> )?<strong>(.*?)</strong>", made[name]._repr_html_())
        for name in {*SIGNS, *HEADLINES}
    }

    assert {name: first[name][1] for name in SIGNS} == SIGNS
    assert {name: first[name][2] for name in HEADLINES} == HEADLINES


LENGTH = r"-?\d+(\.\d+)?(em|px|%)?"
LENGTHS = rf"{LENGTH}( {LENGTH}){{0,3}}"
COLOR = r"#[0-9a-f]{6}|rgba\(\d+,\d+,\d+,[0-9.]+\)"
KEPT = {
    **dict.fromkeys(("background", "border"), "none"),
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
    "overflow": "auto",
    "overflow-wrap": "break-word",
    "position": "absolute|relative",
    "table-layout": "auto",
    "text-align": "left|center|right",
    "vertical-align": "top|middle",
    "white-space": "pre-wrap|nowrap",
}
"""The CSS that JupyterLab 4 leaves to a notebook that it does not trust, as far as reports use it: no variable, no inherit.
tests/browser/test_reports.py sees to it in JupyterLab itself."""

DROPPED = {"font-variant-numeric"}
"""What it drops, and reports can do without."""

TAGS = {
    **{tag: set() for tag in ("br", "caption", "code", "details", "figcaption", "figure", "mark", "p", "small")},
    **{tag: set() for tag in ("span", "strong", "summary", "table", "tbody", "td", "thead", "tr")},
    "div": {"hidden"},
    "img": {"alt", "src"},
    "th": {"scope"},
}
"""The elements that it leaves, with the attributes beside class, dir, style and title."""


class Sanitised(HTMLParser):
    """Notes what JupyterLab would drop from a page that it does not trust."""

    def __init__(self, page):
        super().__init__()
        self.lost = []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        """Check an element, its attributes, and its style."""
        if tag not in TAGS:
            self.lost.append(tag)
        for name, value in attributes:
            if name not in {"class", "dir", "style", "title", *TAGS.get(tag, ())}:
                self.lost.append(f"{tag} {name}")
            for declaration in value.split(";") if name == "style" else ():
                kind, _, what = declaration.partition(":")
                if kind not in DROPPED and not re.fullmatch(KEPT.get(kind, ""), what.strip()):
                    self.lost.append(declaration)


@pytest.mark.real_computer
@pytest.mark.filterwarnings("ignore::openmed_nb.errors.OpenMedWarning")
def test_every_report_survives_a_notebook_that_is_not_trusted(made):
    """The HTML of each report has only the elements, attributes and styles that JupyterLab leaves to a file from elsewhere."""
    pages = {name: report._repr_html_() for name, report in made.items() if hasattr(report, "_repr_html_")}

    assert len(pages) > 25
    assert {name: lost for name, page in pages.items() if (lost := Sanitised(page).lost)} == {}
    assert Sanitised('<svg/><p onclick="x" style="color:var(--jp-x)"/>').lost == [
        "svg",
        "p onclick",
        "color:var(--jp-x)",
    ]
