"""The wording of every report of the verdict: ``python tests/runbook/verdict/test_snapshot.py`` writes the snapshot again."""

import json
from dataclasses import asdict, fields
from pathlib import Path

from openmed_nb.runbook.verdict.gates import gates
from openmed_nb.runbook.verdict.metrics import METRICS, Evidence
from openmed_nb.runbook.verdict.verdict import evaluate

SNAPSHOT = Path(__file__).with_name("snapshot.json")

VALUES = {
    "names": ("a", "b"),
    "words": "growing",
    "times": 2.25,
    "share": 0.7149,
    "difference": 3e-6,
    "rate": 1234.5,
    "count": 2_952_000,
    "yes or no": True,
    "phases": {"data": 0.1, "transfer": 0.2, "forward": 0.7},
}
EVERYTHING = {one.name: VALUES[METRICS[one.name].unit] for one in fields(Evidence)}


def reports():
    """Return what the values of a verdict show and keep, by their names."""
    limits = gates(speedup=0.3)
    evidence = Evidence(**{**EVERYTHING, "task": "inference", "device": "mps", "simulated": False})
    everything = evaluate(evidence, limits)
    return {
        "gates": [str(limits).splitlines(), limits.to_dict()],
        "evidence": [asdict(evidence.to_report()), evidence.to_dict()],
        "nothing": asdict(evaluate(Evidence()).to_report()),
        "everything": [asdict(everything.to_report()), everything.to_dict(), asdict(everything.logbook_figures())],
        "lanes": [str(everything.lanes).splitlines(), everything.lanes.to_dict()],
    }


def written():
    return json.dumps(reports(), indent=1, sort_keys=True) + "\n"


def test_reports_are_those_of_the_snapshot():
    assert written() == SNAPSHOT.read_text("utf-8")


if __name__ == "__main__":
    SNAPSHOT.write_text(written(), "utf-8")
