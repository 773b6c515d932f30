"""The thresholds: one source for each, changed by name, and shown with what was changed."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest

import openmed_nb as nb
from openmed_nb.errors import ConfigurationError
from openmed_nb.runbook.gates.reference import SYMPTOMS
from openmed_nb.runbook.gates.thresholds import ABOUT, Gates
from openmed_nb.runbook.precision.judgement import RECALL_LOSS, SPAN_AGREEMENT, TOLERANCES
from openmed_nb.runbook.sweep.memory import HEADROOM_SHARE
from openmed_nb.runbook.workloads.split import DATA_SHARE
from openmed_nb.training.verdict import GROWTH_GATE


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


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"speedup": 0.3}, "'speedup' is no gate. Use 'speed_up'"),
        ({"zzz": 0.3}, "'zzz' is no gate. There are speed_up"),
        ({"utilisation": 18}, "utilisation=18 is no share from 0 to 1"),
        ({"speed_up": -0.1}, "speed_up=-0.1 is no share"),
        ({"speed_up": float("nan")}, "speed_up=nan is no share"),
        ({"speed_up": "0.3"}, "speed_up='0.3' is no share"),
        ({"speed_up": True}, "speed_up=True is no share"),
        ({"hours": float("inf")}, "hours=inf is no number of hours"),
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
