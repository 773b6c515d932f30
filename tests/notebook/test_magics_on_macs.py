"""Every magic, page and panel on recorded Macs, in a shell of this process with a simulated MPS device."""

import os

import pytest
import torch

import openmed_nb as nb
from helpers import html
from helpers.panels import OpenPanel
from helpers.recorded_macs import PARAMETERS, on_recorded_mac
from openmed_nb._utils.plain import utc_timestamp
from openmed_nb.notebook.panel.model import PanelModel
from openmed_nb.runbook.records.report import SCHEMA, DeviceReport, current_subject
from openmed_nb.runbook.records.running import StepOutcome
from openmed_nb.runbook.records.steps import STEPS, StepOptions
from openmed_nb.session import SESSION

pytestmark = [pytest.mark.real_computer, pytest.mark.usefixtures("clean")]

NOTE = "He has asthma."
# Line magics with their arguments, in order. The report resumes one in which all steps have a result.
LINES = (
    ("openmed", ""),
    ("openmed_device", ""),
    ("openmed_device", "--list"),
    ("openmed_device", "--explain"),
    ("openmed_doctor", ""),
    ("openmed_doctor", "--ops bundled_small"),
    ("openmed_ner", NOTE),
    ("openmed_sweep", "bundled_small --max-batch-size 1 --length 16 --seconds 1"),
    ("openmed_log", "run.json"),
    ("openmed_log", "--diff run.json"),
    ("openmed_report", "report --quick"),
    ("openmed_panel", ""),
    ("openmed_panel", "--close"),
    ("openmed_device", "cpu"),
    ("openmed_device", "--reset"),
    ("openmed_release", ""),
)


def write_finished_report(folder):
    """Write a report of the session in which every step has a result."""
    outcomes = tuple(
        StepOutcome(step.name, "done", "ok", f"Finished {step.name}.", "", (), utc_timestamp(), 1.0) for step in STEPS
    )
    names = tuple(step.name for step in STEPS)
    report = DeviceReport(SCHEMA, utc_timestamp(), current_subject(StepOptions(quick=True)), None, names, outcomes)
    folder.mkdir()
    (folder / "report.json").write_text(report.files()["report.json"], "utf-8")


def make_pages(folder, model):
    """Return the pages of functions without a magic, by name."""
    comparison = nb.compare(torch.nn.Linear(4, 4), torch.ones(2, 4), devices=[nb.device().device], seconds=1)
    status = nb.system_status()
    return {
        "comparison": comparison,
        "status": status,
        "verdict": nb.verdict(comparison, status),
        "handoff": nb.handoff(folder / "bundle", model, [NOTE]),
    }


@pytest.mark.filterwarnings("ignore::openmed_nb.errors.OpenMedWarning")
@pytest.mark.parametrize("name", PARAMETERS)
def test_every_magic_and_page_renders_on_each_mac(shell, name, keyword_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENMED_NB_DATA", str(tmp_path / "data"))
    monkeypatch.delenv("OPENMED_TORCH_DEVICE", raising=False)
    with on_recorded_mac(name) as mac:
        device = "mps" if mac.machine.apple_silicon else "cpu"
        write_finished_report(tmp_path / "report")
        results = make_pages(tmp_path, keyword_model)
        for magic, line in LINES:
            result = shell.run_line_magic(magic, line)
            results[f"{magic} {line}".strip()] = result
        results["openmed_ner cell"] = shell.run_cell_magic("openmed_ner", "", NOTE)
        panel = OpenPanel(PanelModel(SESSION, "bundled_small"))
        displayed = panel.shown
        state = panel.model.state
        panel.close()
        pages = {line: (str(result), result._repr_html_()) for line, result in results.items() if result is not None}

    assert set(results) - set(pages) == {"openmed_panel --close"}
    for line, (text, page) in pages.items():
        assert text.strip(), line
        assert html.read(page).text.strip(), line
    assert results["openmed_device"].device == device
    assert results["openmed_device cpu"].device == "cpu"
    assert [NOTE[entity["start"] : entity["end"]] for entity in results["openmed_ner cell"].entities] == ["asthma"]
    assert results["openmed_report report --quick"].missing_steps == ()
    assert results["openmed_report report --quick"].subject.chip == mac.machine.chip
    for page in ("status", "openmed_log run.json"):
        assert mac.machine.chip in html.read(pages[page][1]).text, page
    version = ".".join(map(str, mac.machine.macos_version))
    assert (version in pages["openmed_doctor"][0]) == (device == "mps")
    for page in ("comparison", "handoff"):  # A measurement on a simulated device is marked.
        assert ("SIMULATED" in pages[page][1]) == (device == "mps"), page
    assert state.devices.devices[0].device == "mps"
    assert state.devices.devices[0].usable is (device == "mps")
    assert (mac.machine.chip in displayed) == (device == "mps")
    assert SESSION.device_manager.machine != mac.machine
    assert os.environ.get("OPENMED_TORCH_DEVICE") is None


def test_every_magic_is_covered(shell):
    magics = shell.magics_manager.magics

    assert {magic for magic, _line in LINES} == {name for name in magics["line"] if name.startswith("openmed")}
    assert [name for name in magics["cell"] if name.startswith("openmed")] == ["openmed_ner"]
