"""Snapshot of the reports and JSON of a verdict. Run pytest with ``--record`` to update ``snapshot.json``."""

import json
from dataclasses import asdict
from pathlib import Path

from openmed_nb.runbook.verdict.metrics import METRICS, Evidence, gates
from openmed_nb.runbook.verdict.verdict import evaluate

SNAPSHOT = Path(__file__).with_name("snapshot.json")

VALUES = {
    "names": ("a", "b"),
    "text": "growing",
    "ratio": 2.25,
    "fraction": 0.7149,
    "difference": 3e-6,
    "rate": 1234.5,
    "hours": 2.5,
    "count": 2_952_000,
    "boolean": True,
    "phases": {"data": 0.1, "transfer": 0.2, "forward": 0.7},
}


def render_reports():
    """Return the snapshot as JSON text."""
    evidence = {name: VALUES[metric.unit] for name, metric in METRICS.items()}
    verdict = evaluate(Evidence(**evidence | {"task": "inference", "device": "mps"}), gates(speedup=0.3))
    reports = {
        "gates": str(verdict.gates).splitlines(),
        "nothing": asdict(evaluate(Evidence()).to_report()),
        "everything": [asdict(verdict.final_report()), verdict.to_dict(), asdict(verdict.logbook_metrics())],
        "lanes": str(verdict.lanes).splitlines(),
    }
    return json.dumps(reports, indent=1, sort_keys=True) + "\n"


def test_reports_match_the_snapshot(request):
    if request.config.getoption("record"):
        SNAPSHOT.write_text(render_reports(), "utf-8")
    assert render_reports() == SNAPSHOT.read_text("utf-8")
