import re
import sys
from pathlib import Path

import pytest
import torch

from openmed_nb.errors import TorchUnusable
from openmed_nb.runbook.checks.operators import table as operators
from openmed_nb.runbook.checks.operators.table import (
    ALWAYS_ON_CPU,
    COMPOSITE,
    DEVICE_SWITCHES,
    FALLS_BACK,
    NATIVE,
    NOT_KNOWN,
    forced_in,
    functions_file,
    has_kernel,
    native_by_rule,
    operator_table,
    read_functions,
)

VERSION = torch.__version__
RECORDED = Path(__file__).parents[3] / "recorded" / f"mps_operators_torch_{'_'.join(VERSION.split('.')[:2])}.txt"
TEXT = RECORDED.read_text("utf-8") if RECORDED.exists() else ""
LINES = [line for line in TEXT.splitlines() if line.startswith("aten::")]

recorded = pytest.mark.skipif(not LINES, reason="nobody read the registrations out of the macOS binary of this torch")


@pytest.fixture(scope="module")
def table():
    """What MPS has in the installed torch."""
    return operator_table()


@recorded
def test_table_is_what_the_real_binary_registers():
    """Every operator that torchgen registers for MPS in the macOS binary is native in torch's list, and no other."""
    generated = {line for line in LINES if "by hand" not in line}

    assert native_by_rule(read_functions(functions_file(VERSION)), "MPS") == generated
    assert len(generated) in (890, 912)


@recorded
def test_forced_fallbacks_are_registered_by_hand():
    """What MPS always sends to the CPU is registered by hand in the macOS binary; the rest there is an error's stub."""
    by_hand = {line.partition(" ")[0] for line in LINES if "by hand" in line}

    assert by_hand == {*forced_in(VERSION), "aten::_slow_conv2d_forward"}


@recorded
def test_device_switches_lead_to_registered_operators():
    """Where the CPU calls an operator of its own, the one that MPS has in its place is registered."""
    targets = set(filter(None, DEVICE_SWITCHES.values()))

    assert targets <= set(LINES)


def test_rule_holds_for_the_cpu_of_this_torch():
    """The rule that reads torch's list gives what this torch registers for the CPU, but for what it writes by hand."""
    functions = read_functions(functions_file(torch.__version__))
    predicted, registered = native_by_rule(functions, "CPU"), {name for name in functions if has_kernel(name, "CPU")}

    assert predicted <= registered
    assert len(registered - predicted) < 10


def test_verdict_on_an_operator(table):
    """An operator is native, made of others, falls back, is always on the CPU, or is not known."""
    verdicts = {
        "aten::addmm": NATIVE,
        "aten::linear": NATIVE,
        "aten::acos": NATIVE,
        "aten::convolution": NATIVE,
        "aten::_scaled_dot_product_flash_attention_for_cpu": NATIVE,
        "aten::t": COMPOSITE,
        "aten::matmul": COMPOSITE,
        "aten::all.dims": COMPOSITE,
        "aten::_foreach_add.Scalar_out": COMPOSITE,
        "aten::mode": FALLS_BACK,
        "aten::put_": FALLS_BACK,
        "aten::special_ndtri": FALLS_BACK,
        "aten::special_ndtri.out": FALLS_BACK,
        "aten::embedding_renorm_": ALWAYS_ON_CPU,
        "aten::linalg_svd": ALWAYS_ON_CPU if "aten::linalg_svd" in forced_in(VERSION) else COMPOSITE,
        "somebody::operator": NOT_KNOWN,
    }

    assert {operator: table.verdict(operator) for operator in verdicts} == verdicts


def test_operator_that_python_registers_is_native(table):
    """An operator that torch gives to MPS in Python is native, although its list does not say so."""
    assert table.verdict("aten::linalg_lu_solve.out") == NATIVE


def test_name_in_the_messages_of_mps(table):
    """MPS names the operator that one delegates to."""
    named = {
        "aten::_linalg_eigh": "aten::_linalg_eigh.eigenvalues",
        "aten::heaviside_": "aten::heaviside.out",
        "aten::mode": "aten::mode",
        "aten::linalg_svd": "aten::linalg_svd",
    }

    assert {operator: table.named_by_mps(operator) for operator in named} == named


def test_operators_of_the_simulated_device_fall_back(table):
    """What the simulated device does not have falls back by torch's list too, or is made of what does, under that name."""
    if not torch.__version__.startswith("2.13."):
        pytest.skip("the simulated device has the operators of torch 2.13")
    from openmed_nb.simulation.operators import ALWAYS_ON_CPU as FORCED_IN_SIMULATION
    from openmed_nb.simulation.operators import UNSUPPORTED

    alone = {operator: name for operator, name in UNSUPPORTED.items() if table.verdict(operator) == FALLS_BACK}
    parts = {operator: name for operator, name in UNSUPPORTED.items() if operator not in alone}
    assert {table.verdict(operator) for operator in parts} == {COMPOSITE}
    assert {table.verdict(name) for name in UNSUPPORTED.values()} == {FALLS_BACK}
    assert {operator: table.named_by_mps(operator) for operator in alone} == alone
    assert table.forced == FORCED_IN_SIMULATION


def test_table_is_read_once(table):
    """The list is read once for the process."""
    assert operator_table() is table
    assert table.torch == torch.__version__


def test_torch_without_its_list_is_an_error(monkeypatch):
    """Where torch came without its list of operators, the error says so, and what to do."""
    monkeypatch.setitem(sys.modules, "torchgen", None)

    with pytest.raises(TorchUnusable, match=re.escape("torch 2.13.0 came without torchgen/packaged")) as error:
        operators.functions_file("2.13.0")
    assert error.value.remedy.startswith("Reinstall it:")


def test_forced_fallbacks_of_a_version():
    """Until torch 2.7, MPS always sends two more operators to the CPU, and until 2.13 singular values."""
    versions = {"2.6.0": True, "2.7.1": True, "2.8.0": False, "2.13.0+cpu": False, "3.0": False}

    assert {version: "aten::col2im" in forced_in(version) for version in versions} == versions
    assert all("aten::embedding_renorm_" in forced_in(version) for version in versions)
    assert {version: "aten::linalg_svd" in forced_in(version) for version in ("2.13.0+cpu", "2.14.1")} == {
        "2.13.0+cpu": True,
        "2.14.1": False,
    }
