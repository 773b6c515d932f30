import sys
from pathlib import Path

import pytest
import torch

from openmed_nb.errors import TorchImportError
from openmed_nb.runbook.checks.operators.table import (
    ALWAYS_ON_CPU,
    COMPOSITE,
    DEVICE_SWITCHES,
    FALLS_BACK,
    NATIVE,
    UNKNOWN,
    always_cpu_operators,
    functions_file,
    has_kernel,
    native_operators,
    operator_table,
    read_functions,
)
from openmed_nb.simulation.operators import ALWAYS_ON_CPU as FORCED_IN_SIMULATION
from openmed_nb.simulation.operators import UNSUPPORTED

SVD = "aten::linalg_svd"
VERSION = torch.__version__
RECORDED = Path(__file__).parents[3] / "recorded" / f"mps_operators_torch_{'_'.join(VERSION.split('.')[:2])}.txt"
TEXT = RECORDED.read_text("utf-8") if RECORDED.exists() else ""
LINES = [line for line in TEXT.splitlines() if line.startswith("aten::")]

recorded = pytest.mark.skipif(not LINES, reason="no recorded registrations of the macOS binary of this torch")


@recorded
def test_table_equals_registrations_in_binary():
    generated = {line for line in LINES if "by hand" not in line}

    assert native_operators(read_functions(functions_file(VERSION)), "MPS") == generated
    assert len(generated) in (890, 912)


@recorded
def test_always_cpu_operators_are_in_the_binary():
    """The other manual registrations in the macOS binary raise an error."""
    by_hand = {line.partition(" ")[0] for line in LINES if "by hand" in line}

    assert by_hand == {*always_cpu_operators(VERSION), "aten::_slow_conv2d_forward"}


@recorded
def test_device_switches_lead_to_registered_operators():
    assert set(filter(None, DEVICE_SWITCHES.values())) <= set(LINES)


def test_native_operators_equal_cpu_registrations():
    functions = read_functions(functions_file(VERSION))
    predicted = native_operators(functions, "CPU")
    registered = {name for name in functions if has_kernel(name, "CPU")}

    assert predicted <= registered
    assert len(registered - predicted) < 10  # What torch writes by hand.


@pytest.mark.parametrize(
    ("operator", "verdict", "name_of_mps"),
    [
        ("aten::addmm", NATIVE, "aten::addmm.out"),
        ("aten::linear", NATIVE, "aten::linear"),
        ("aten::acos", NATIVE, "aten::acos.out"),
        ("aten::convolution", NATIVE, "aten::convolution"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", NATIVE, None),
        ("aten::linalg_lu_solve.out", NATIVE, None),  # torch gives it to MPS in Python, and its list does not say so.
        ("aten::t", COMPOSITE, None),
        ("aten::matmul", COMPOSITE, None),
        ("aten::all.dims", COMPOSITE, None),
        ("aten::_foreach_add.Scalar_out", COMPOSITE, None),
        ("aten::mode", FALLS_BACK, "aten::mode"),
        ("aten::_linalg_eigh", FALLS_BACK, "aten::_linalg_eigh.eigenvalues"),
        ("aten::heaviside_", FALLS_BACK, "aten::heaviside.out"),
        ("aten::special_ndtri", FALLS_BACK, "aten::special_ndtri.out"),
        ("aten::special_ndtri.out", FALLS_BACK, "aten::special_ndtri.out"),
        ("aten::embedding_renorm_", ALWAYS_ON_CPU, "aten::embedding_renorm_"),
        (SVD, ALWAYS_ON_CPU if SVD in always_cpu_operators(VERSION) else COMPOSITE, SVD),
        ("somebody::operator", UNKNOWN, None),
    ],
)
def test_classify_operator(operator, verdict, name_of_mps):
    assert operator_table().classify(operator) == verdict
    assert name_of_mps in {None, operator_table().named_by_mps(operator)}


@pytest.mark.skipif(not VERSION.startswith("2.13."), reason="the simulated device has the operators of torch 2.13")
def test_missing_operators_of_simulated_device_fall_back():
    table = operator_table()
    alone = {operator: name for operator, name in UNSUPPORTED.items() if table.classify(operator) == FALLS_BACK}

    assert {table.classify(operator) for operator in UNSUPPORTED.keys() - alone.keys()} == {COMPOSITE}
    assert {table.classify(name) for name in UNSUPPORTED.values()} == {FALLS_BACK}
    assert {operator: table.named_by_mps(operator) for operator in alone} == alone
    assert table.always_cpu == FORCED_IN_SIMULATION


def test_table_is_read_once():
    assert operator_table() is operator_table()
    assert operator_table().torch == VERSION


def test_missing_operator_list_raises(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchgen", None)

    with pytest.raises(TorchImportError, match=r"2\.13\.0") as error:
        functions_file("2.13.0")
    assert error.value.remedy.startswith("Reinstall it:")


@pytest.mark.parametrize(
    ("version", "col2im", "svd"),
    [
        ("2.6.0", True, True),
        ("2.7.1", True, True),
        ("2.8.0", False, True),
        ("2.13.0+cpu", False, True),
        ("2.14.1", False, False),
        ("3.0", False, False),
    ],
)
def test_always_cpu_operators_of_a_version(version, col2im, svd):
    forced = always_cpu_operators(version)

    assert ("aten::col2im" in forced, SVD in forced, "aten::embedding_renorm_" in forced) == (col2im, svd, True)
