"""The thresholds: one source for each, changed by name, and shown with what was changed."""

import json
import operator
import re
from dataclasses import fields

import pytest

import openmed_nb as nb
from openmed_nb.errors import ConfigurationError
from openmed_nb.models.certificates import RECALL_LOSS, SPAN_AGREEMENT
from openmed_nb.runbook.bench.sweep_measurement import HEADROOM_SHARE
from openmed_nb.runbook.bench.workloads import DATA_SHARE
from openmed_nb.runbook.checks.precision.report import TOLERANCES
from openmed_nb.runbook.verdict.gates import SYMPTOMS, Gates
from openmed_nb.training.curve import GROWTH_GATE

# What each threshold counts, its largest value, who says so, and how it is shown.
ABOUT_GATES = {
    "speed_up": ("share", 10.0, "the runbook", "22 %"),
    "utilisation": ("share", 1.0, "the runbook", "18 %"),
    "entity_agreement": ("share", 1.0, "as nb.runbook.parity judges it", "99 %"),
    "recall_loss": ("share", 1.0, "as nb.runbook.parity judges it", "1 %"),
    "logits": ("difference", 1e6, "as nb.runbook.parity judges it", "0.0001"),
    "gradients": ("difference", 1e6, "as nb.runbook.parity judges it", "0.001"),
    "memory_growth": ("share", 10.0, "the runbook", "26 %"),
    "headroom": ("share", 1.0, "a choice of this toolkit", "10 %"),
    "data_share": ("share", 1.0, "a choice of this toolkit", "25 %"),
    "transfer_share": ("share", 1.0, "a choice of this toolkit", "25 %"),
    "knee_gain": ("share", 10.0, "a choice of this toolkit", "10 %"),
    "fallback_time": ("share", 1.0, "a choice of this toolkit", "5 %"),
    "fallback_calls": ("share", 1.0, "pytorch#82707, and a choice of this toolkit", "1 %"),
    "hours": ("hours", 1e5, "a choice of this toolkit", "24 hours"),
}


def test_one_source():
    """The thresholds of the runbook are 22 percent of speed-up and 18 of utilisation; what another room judges by is its own."""
    gates = nb.runbook.gates()
    theirs = (GROWTH_GATE, SPAN_AGREEMENT, RECALL_LOSS, TOLERANCES["float32"].logits, DATA_SHARE, HEADROOM_SHARE)
    ours = ("memory_growth", "entity_agreement", "recall_loss", "logits", "data_share", "headroom")

    assert (gates.speed_up, gates.utilisation, gates.memory_growth) == (0.22, 0.18, 0.26)
    assert tuple(getattr(gates, name) for name in ours) == theirs


def test_what_is_said_of_each_threshold():
    """Each threshold says what it means, why, and who says so; it may be 0 and its largest value, and not more."""
    gates = nb.runbook.gates()
    about, (thresholds, reasons, *_) = gates.to_dict()["about"], gates.report().tables
    told = {name: (one["unit"], one["largest"], one["source"], gates.shown()[name]) for name, one in about.items()}

    assert told == ABOUT_GATES
    assert list(about) == [one.name for one in fields(Gates)]
    assert [row[0] for row in thresholds.rows] == list(about)
    assert [row[3:] for row in thresholds.rows] == [(one["says"],) for one in about.values()]
    assert reasons.rows == tuple((name, one["reason"], one["source"]) for name, one in about.items())
    assert all(all(row[:2]) and all(row[3:]) for row in thresholds.rows)
    for name, (_, largest, *_) in ABOUT_GATES.items():
        assert [getattr(nb.runbook.gates(**{name: value}), name) for value in (0, largest)] == [0, largest]
        with pytest.raises(ConfigurationError, match=re.escape(f"Pass a number from 0 up to {largest:g}")):
            nb.runbook.gates(**{name: largest + 1})


@pytest.mark.parametrize("name", list(ABOUT_GATES))
def test_changed_threshold(name):
    """A threshold that is changed by name says from what to what, in the table, in a sentence, and as JSON."""
    was = getattr(Gates(), name)
    gates = nb.runbook.gates(**{name: was / 2})
    (row,) = (row for row in gates.report().tables[0].rows if row[0] == name)

    assert gates.changed == ((name, was, was / 2),)
    assert row[2] == f"was {ABOUT_GATES[name][-1]}"
    assert gates.report().sentences[0].startswith(f"Gate changed: {name} from {ABOUT_GATES[name][-1]} to ")
    assert gates.to_dict()["changed"] == {name: {"from": was, "to": was / 2}}


def test_nothing_changed():
    """Unchanged thresholds say so, and a value that is the same is no change."""
    assert nb.runbook.gates(speed_up=0.22).changed == ()
    assert nb.runbook.gates() == Gates()
    assert "No threshold was changed" in str(nb.runbook.gates())


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"speedup": 0.3}, "There is no gate 'speedup'. Did you mean 'speed_up'"),
        ({"zzz": 0.3}, "There is no gate 'zzz'. Known are speed_up"),
        ({"utilisation": 18}, "utilisation cannot be 18. Pass a number from 0 up to 1, such as 0."),
        ({"speed_up": -0.1}, "speed_up cannot be -0.1. Pass a number from 0"),
        ({"speed_up": float("nan")}, "speed_up cannot be nan"),
        ({"speed_up": "0.3"}, "speed_up cannot be '0.3'"),
        ({"speed_up": True}, "speed_up cannot be True"),
        ({"hours": float("inf")}, "hours cannot be inf"),
    ],
)
def test_bad_thresholds(changed, words):
    """A name that is no threshold, and a value that makes no sense, get an error that says what would."""
    with pytest.raises(ConfigurationError, match=words):
        nb.runbook.gates(**changed)


def test_other_things_are_no_gates():
    """What is no set of thresholds is refused."""
    with pytest.raises(ConfigurationError, match=r"gates cannot be dict. Pass nb.runbook.gates"):
        nb.verdict(gates={"speed_up": 0.3})


def test_tables():
    """Thresholds, rules and symptoms are tables; the rules have the values in force, wrong numbers before all that is measured."""
    thresholds, reasons, matrix, symptoms = nb.runbook.gates(speed_up=0.3, memory_growth=0.5).report().tables
    rules = "\n".join(map(" ".join, matrix.rows))

    assert (thresholds.caption, symptoms.caption) == ("Thresholds", "Symptoms")
    assert thresholds.columns == ("gate", "value", "changed", "what it says")
    assert [row[0] for row in thresholds.rows[:3]] == ["speed_up", "memory_growth", "utilisation"]
    assert reasons.columns == ("gate", "why", "who says so")
    assert reasons.folded
    assert matrix.columns == ("", "when", "recommendation", "what to do", "what would change it")
    assert symptoms.columns == ("symptom", "likely cause", "what to look at, and with what", "reported in")
    assert [row[0] for row in matrix.rows] == [str(number) for number in range(1, len(matrix.rows) + 1)]
    assert "less than 30 % faster" in rules
    assert "more than 50 % over ten epochs" in rules
    assert "{" not in rules
    assert rules.index("NaN appears") < rules.index("memory grows") < rules.index("waiting for data")


def test_forms():
    """No line of the text is too long for a notebook, and no word is left out; the HTML and the JSON have all of it."""
    gates = nb.runbook.gates(speed_up=0.3)
    told = " ".join(cell for table in gates.report().tables for row in table.rows for cell in row)

    assert max(map(len, str(gates).splitlines())) <= 120
    assert set(told.split()) <= set(str(gates).split())
    assert repr(gates) == str(gates)
    assert "Decision matrix" in gates._repr_html_()
    json.dumps(gates.to_dict())


def test_symptoms():
    """Each symptom has a cause, what to look at, a tool that exists, and where it was reported; none stands there twice."""
    tools = {word.split("(")[0] for row in SYMPTOMS for word in row[3].split(", ") if word.startswith("nb.")}

    assert all(all(row) for row in SYMPTOMS)
    assert len({row[0] for row in SYMPTOMS}) == len(SYMPTOMS)
    assert all("#" in row[-1] for row in SYMPTOMS)
    assert all(operator.attrgetter(name.removeprefix("nb."))(nb) for name in tools)
