"""The thresholds: one source for each, changed by name, and shown with what was changed."""

from __future__ import annotations

import json
import re
from dataclasses import fields

import pytest

import openmed_nb as nb
from openmed_nb.errors import ConfigurationError
from openmed_nb.models.certificates import RECALL_LOSS, SPAN_AGREEMENT
from openmed_nb.runbook.measure.workloads import DATA_SHARE
from openmed_nb.runbook.precision.parity import TOLERANCES
from openmed_nb.runbook.sweep_search import HEADROOM_SHARE
from openmed_nb.runbook.verdict.gates import ABOUT
from openmed_nb.runbook.verdict.reference import SYMPTOMS, Gates
from openmed_nb.training.curve import GROWTH_GATE


def test_values_that_are_quoted():
    """The thresholds of the runbook are 22 percent of speed-up, 18 of utilisation, and 26 of growth."""
    gates = nb.gates()

    assert (gates.speed_up, gates.utilisation, gates.memory_growth) == (0.22, 0.18, 0.26)


def test_one_source():
    """What another room judges by is its own value."""
    gates = nb.gates()
    theirs = (GROWTH_GATE, SPAN_AGREEMENT, RECALL_LOSS, TOLERANCES["float32"].logits, DATA_SHARE)

    assert gates.headroom == HEADROOM_SHARE
    assert (gates.memory_growth, gates.entity_agreement, gates.recall_loss, gates.logits, gates.data_share) == theirs


def test_every_threshold_says_why():
    """Each threshold says what it means, why it stands there, and who says so, in the report and as JSON."""
    gates = Gates()
    about = gates.to_dict()["about"]
    rows = gates.report().tables[0].rows

    assert [row[0] for row in rows] == [one.name for one in fields(Gates)]
    assert all(all((row[0], row[1], row[3], row[4], row[5])) for row in rows)
    assert all(one.metadata[ABOUT].reason == about[one.name]["reason"] for one in fields(Gates))
    json.dumps(gates.to_dict())


@pytest.mark.parametrize("name", [one.name for one in fields(Gates)])
def test_changed_threshold(name: str):
    """A threshold that is changed by name says from what to what, in the table, in a sentence, and as JSON."""
    was = getattr(Gates(), name)
    now = was / 2
    gates = nb.gates(**{name: now})

    assert gates.changed == ((name, was, now),)
    assert str(gates).count("was ") >= 1
    assert gates.report().sentences[0].startswith(f"Gate changed: {name} from ")
    assert gates.to_dict()["changed"] == {name: {"from": was, "to": now}}


def test_nothing_changed():
    """Unchanged thresholds say so, and a value that is the same is no change."""
    assert nb.gates(speed_up=0.22).changed == ()
    assert nb.gates() == Gates()
    assert "No threshold was changed" in str(nb.gates())
    assert repr(nb.gates()) == str(nb.gates())


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
def test_bad_thresholds(changed: dict, words: str):
    """A name that is no threshold, and a value that makes no sense, get an error that says what would."""
    with pytest.raises(ConfigurationError, match=words):
        nb.gates(**changed)


def test_other_things_are_no_gates():
    """What is no set of thresholds is refused."""
    with pytest.raises(ConfigurationError, match="dict is no set of gates"):
        nb.verdict(gates={"speed_up": 0.3})


def test_decision_matrix():
    """The matrix is shown with the values in force, in order, with wrong numbers before everything that is measured."""
    matrix = "\n".join(map(" ".join, nb.gates(speed_up=0.3, memory_growth=0.5).report().tables[1].rows))

    assert "less than 30 % faster" in matrix
    assert "more than 50 % over ten epochs" in matrix
    assert "{" not in matrix
    assert matrix.index("NaN appears") < matrix.index("memory grows") < matrix.index("waiting for data")


def test_text_can_be_read():
    """No line of the text form is too long for a notebook, and no word is left out."""
    gates = nb.gates(speed_up=0.3)
    told = " ".join(cell for table in gates.report().tables for row in table.rows for cell in row)

    assert max(map(len, str(gates).splitlines())) <= 120
    assert set(told.split()) <= set(str(gates).split())


def test_symptoms():
    """Each symptom has a cause, what to look at, a tool, and where it was reported; none stands there twice."""
    assert all(all(row) for row in SYMPTOMS)
    assert len({row[0] for row in SYMPTOMS}) == len(SYMPTOMS)
    assert all("#" in row[-1] for row in SYMPTOMS)


def test_tools_of_symptoms_exist():
    """Every tool that the table of symptoms names is there."""
    named = {
        word.split("(")[0].removeprefix("nb.")
        for row in SYMPTOMS
        for word in row[3].split(", ")
        if word.startswith("nb.")
    }

    assert sorted(name for name in named if not hasattr(nb, name)) == []


def test_html():
    """The thresholds stand in the HTML too."""
    assert "Decision matrix" in nb.gates()._repr_html_()


ABOUT_GATES = {
    "speed_up": ("share", 10.0, "the runbook", "22 %"),
    "utilisation": ("share", 1.0, "the runbook", "18 %"),
    "entity_agreement": ("share", 1.0, "as nb.parity judges it", "99 %"),
    "recall_loss": ("share", 1.0, "as nb.parity judges it", "1 %"),
    "logits": ("difference", 1e6, "as nb.parity judges it", "0.0001"),
    "gradients": ("difference", 1e6, "as nb.parity judges it", "0.001"),
    "memory_growth": ("share", 10.0, "the runbook", "26 %"),
    "headroom": ("share", 1.0, "a choice of this toolkit", "10 %"),
    "data_share": ("share", 1.0, "a choice of this toolkit", "25 %"),
    "transfer_share": ("share", 1.0, "a choice of this toolkit", "25 %"),
    "knee_gain": ("share", 10.0, "a choice of this toolkit", "10 %"),
    "fallback_time": ("share", 1.0, "a choice of this toolkit", "5 %"),
    "fallback_calls": ("share", 1.0, "pytorch#82707, and a choice of this toolkit", "1 %"),
    "hours": ("hours", 1e5, "a choice of this toolkit", "24 hours"),
}
"""What each threshold counts, its largest value, who says so, and how it is shown."""


def test_what_is_said_of_each_threshold():
    """Each threshold has its unit, its source and its value as people read it; it may be 0 and its largest value, not more."""
    about = nb.gates().to_dict()["about"]
    told = {name: (one["unit"], one["largest"], one["source"], nb.gates().shown()[name]) for name, one in about.items()}

    assert told == ABOUT_GATES
    for name, (_, largest, *_) in ABOUT_GATES.items():
        assert [getattr(nb.gates(**{name: value}), name) for value in (0, largest)] == [0, largest]
        with pytest.raises(ConfigurationError, match=re.escape(f"Pass a number from 0 up to {largest:g}")):
            nb.gates(**{name: largest + 1})


def test_columns_of_the_thresholds():
    """The tables of the thresholds, of the rules and of the symptoms name their columns; a changed threshold says what it was."""
    thresholds, matrix, symptoms = nb.gates(hours=12).report().tables
    row = dict(zip(thresholds.columns, thresholds.rows[-1], strict=True))

    assert (thresholds.caption, symptoms.caption) == ("Thresholds", "Symptoms")
    assert (row["gate"], row["value"], row["changed"]) == ("hours", "12 hours", "was 24 hours")
    assert row["what it says"] == "work that takes longer goes to several computers"
    assert (row["why"], row["who says so"]) == ("one computer can be spared for a day", "a choice of this toolkit")
    assert matrix.columns == ("", "when", "recommendation", "what to do", "what would change it")
    assert [row[0] for row in matrix.rows] == [str(number) for number in range(1, len(matrix.rows) + 1)]
    assert symptoms.columns == ("symptom", "likely cause", "what to look at, and with what", "reported in")
