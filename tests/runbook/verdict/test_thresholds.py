import ast
import inspect
import operator
import re

import pytest

import openmed_nb as nb
from openmed_nb.errors import ConfigurationError
from openmed_nb.runbook.verdict.metrics import GATES
from openmed_nb.runbook.verdict.rules import SYMPTOMS

CODE_PATTERN = re.compile("`([^`]+)`")
# Maximum of each threshold that may exceed 1.
MAXIMUM = {"speedup": 10, "logits": 1e6, "gradients": 1e6, "memory_growth": 10, "knee_gain": 10, "hours": 1e5}


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


@pytest.mark.parametrize(
    ("changed", "message_pattern"),
    [
        ({"speed": 0.3}, "'speed'.*'speedup'"),
        ({"utilization": 18}, "utilization.*18.*from 0 up to 1"),
        ({"speedup": -0.1}, "speedup.*-0.1"),
        ({"speedup": float("nan")}, "speedup.*nan"),
        ({"hours": float("inf")}, "hours.*inf"),
    ],
)
def test_invalid_threshold_raises(changed, message_pattern):
    with pytest.raises(ConfigurationError, match=message_pattern):
        nb.runbook.gates(**changed)


@pytest.mark.parametrize(
    "arguments", [{"gates": {"speedup": 0.3}}, {"task": "dancing"}, {"num_texts": ["No fever."]}, {"num_texts": 2**65}]
)
def test_verdict_rejects_invalid_arguments(arguments):
    with pytest.raises(ConfigurationError, match=next(iter(arguments))):
        nb.verdict(**arguments)


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
