"""Classification of operators on MPS."""

import json
from pathlib import Path

import pytest
import torch

from openmed_nb.runbook.checks.operators import table
from openmed_nb.runbook.checks.operators.table import (
    ALWAYS_ON_CPU,
    COMPOSITE,
    FALLS_BACK,
    NATIVE,
    TABLE_FILE,
    UNKNOWN,
    operator_table,
)
from openmed_nb.simulation.operators import ALWAYS_ON_CPU as FORCED_IN_SIMULATION
from openmed_nb.simulation.operators import UNSUPPORTED

VERSION = torch.__version__
RECORDED = Path(__file__).parents[3] / "recorded"


@pytest.mark.parametrize("release", ["2.13", "2.14"])
def test_table_equals_registrations_in_the_binary(release):
    """The other manual registration in the macOS binary raises an error."""
    text = (RECORDED / f"mps_operators_torch_{release.replace('.', '_')}.txt").read_text("utf-8")
    lines = [line for line in text.splitlines() if line.startswith("aten::")]
    stored = json.loads(TABLE_FILE.read_text("utf-8"))[release]

    assert stored["native"] == sorted(line for line in lines if "by hand" not in line)
    assert len(stored["native"]) in (890, 912)
    assert {*stored["always_cpu"], "aten::_slow_conv2d_forward"} == {
        line.partition(" ")[0] for line in lines if "by hand" in line
    }


@pytest.mark.skipif(not VERSION.startswith("2.13."), reason="other releases register other operators")
@pytest.mark.parametrize(
    ("operator", "verdict"),
    [
        ("aten::addmm", NATIVE),
        ("aten::linear", NATIVE),
        ("aten::acos", NATIVE),
        ("aten::convolution", NATIVE),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", NATIVE),
        ("aten::linalg_lu_solve.out", NATIVE),  # Registered in Python.
        ("aten::t", COMPOSITE),
        ("aten::matmul", COMPOSITE),
        ("aten::_foreach_add.Scalar_out", COMPOSITE),
        ("aten::special_ndtri", COMPOSITE),  # It calls the following operator.
        ("aten::special_ndtri.out", FALLS_BACK),
        ("aten::mode", FALLS_BACK),
        ("aten::embedding_renorm_", ALWAYS_ON_CPU),
        ("aten::linalg_svd", ALWAYS_ON_CPU),
        ("somebody::operator", UNKNOWN),
    ],
)
def test_classify_operator(operator, verdict):
    assert operator_table().classify(operator) == verdict


@pytest.mark.skipif(not VERSION.startswith("2.13."), reason="the simulated device has the operators of torch 2.13")
def test_missing_operators_of_simulated_device_fall_back():
    operators = operator_table()

    assert {operators.classify(name) for name in UNSUPPORTED.values()} == {FALLS_BACK}
    assert {operators.classify(operator) for operator in UNSUPPORTED} <= {COMPOSITE, FALLS_BACK}
    assert operators.always_cpu == FORCED_IN_SIMULATION


@pytest.mark.parametrize(
    ("version", "release"),
    [("2.6.0", "2.13"), ("2.13.0+cpu", "2.13"), ("2.14.1", "2.14"), ("2.15.0.dev20261101", "2.14"), ("3.0", "2.14")],
)
def test_nearest_release_is_used(version, release):
    operators = table._read_table(version, built=False)

    assert f"torch {release} for macOS" in operators.source
    assert len(operators.native) == {"2.13": 890, "2.14": 912}[release]
    assert operators is table._read_table(version, built=False)


def test_torch_with_mps_reports_its_own_registrations():
    assert table._read_table("2.13.0", built=True).native == frozenset()
