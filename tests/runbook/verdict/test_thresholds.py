import ast
import inspect
import json
import operator
import re

import pytest

import openmed_nb as nb
from openmed_nb.errors import ConfigurationError
from openmed_nb.runbook.verdict.metrics import GATES, METRICS
from openmed_nb.runbook.verdict.rules import SYMPTOMS, Gates

CODE_PATTERN = re.compile("`([^`]+)`")
# Maximum of each threshold that may exceed 1.
MAXIMUM = {"speedup": 10, "logits": 1e6, "gradients": 1e6, "memory_growth": 10, "knee_gain": 10, "hours": 1e5}


def test_every_gate_has_a_metric():
    assert set(GATES) < set(METRICS)


def test_default_thresholds_are_those_of_the_runbook():
    gates = nb.runbook.gates()

    assert (gates.speedup, gates.utilization, gates.memory_growth) == (0.22, 0.18, 0.26)


@pytest.mark.parametrize("name", GATES)
def test_threshold_is_between_0_and_its_maximum(name):
    maximum = MAXIMUM.get(name, 1)

    for value in (0, maximum):
        assert getattr(nb.runbook.gates(**{name: value}), name) == value
    with pytest.raises(ConfigurationError, match=name):
        nb.runbook.gates(**{name: maximum + 1})


@pytest.mark.parametrize("name", GATES)
def test_changed_threshold_is_a_sentence(name):
    gates = nb.runbook.gates(**{name: getattr(Gates, name) / 2})
    default = Gates().format_values()[name]

    assert gates.changes == (f"Gate changed: {name} from {default} to {gates.format_values()[name]}.",)
    assert gates.to_report().sentences == gates.changes


def test_default_value_is_not_a_change():
    assert nb.runbook.gates(speedup=0.22).changes == ()
    assert nb.runbook.gates() == Gates()


@pytest.mark.parametrize(
    ("changed", "message_pattern"),
    [
        ({"speed": 0.3}, "'speed'.*'speedup'"),
        ({"zzz": 0.3}, "'zzz'.*speedup"),
        ({"utilization": 18}, "utilization.*18.*from 0 up to 1"),
        ({"speedup": -0.1}, "speedup.*-0.1"),
        ({"speedup": float("nan")}, "speedup.*nan"),
        ({"speedup": "0.3"}, "speedup.*'0.3'"),
        ({"speedup": True}, "speedup.*True"),
        ({"hours": float("inf")}, "hours.*inf"),
    ],
)
def test_invalid_threshold_raises(changed, message_pattern):
    with pytest.raises(ConfigurationError, match=message_pattern):
        nb.runbook.gates(**changed)


def test_verdict_rejects_gates_as_dict():
    with pytest.raises(ConfigurationError, match="dict"):
        nb.verdict(gates={"speedup": 0.3})


def test_text_contains_all_rows():
    gates = nb.runbook.gates(speedup=0.3)
    rows = [row for table in gates.to_report().tables for row in table.rows]

    assert all(cell in str(gates) for row in rows for cell in row)
    assert rows[0][1::3] == ("30%", "the runbook")
    assert "Decision matrix" in gates._repr_html_()
    assert json.loads(json.dumps(gates.to_dict()))["speedup"] == 0.3


@pytest.mark.parametrize("row", SYMPTOMS, ids=lambda row: row.symptom)
def test_calls_in_the_actions_of_a_symptom_have_valid_arguments(row):
    assert all(re.fullmatch(r"[A-Z].*[a-z].*\.", action) for action in row.actions)
    for code in CODE_PATTERN.findall(" ".join(row.actions)):
        for call in calls_of_package(code):
            function = operator.attrgetter(ast.unparse(call.func).removeprefix("nb."))(nb)
            keywords = {keyword.arg: None for keyword in call.keywords}
            inspect.signature(function).bind(*call.args, **keywords)


def calls_of_package(code):
    """Return the calls of functions of the package in a line of code, which may be the first line of a block."""
    if "nb." not in code or code.startswith("%"):
        return []
    is_header = code.startswith(("with ", "for ")) and "guards.check" not in code
    tree = ast.parse(f"{code.rstrip(':')}: ..." if is_header else code)
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("nb.") and "(" not in ast.unparse(node.func)
    ]
