"""Release of memory in plain Python, and limits of the memory of a device."""

import json
import subprocess
import sys
import weakref
from functools import partial

import pytest
import torch

import openmed_nb as nb
from helpers.trainings import catch_error
from openmed_nb.errors import ConfigurationError
from openmed_nb.training.release import validate_fraction

pytestmark = pytest.mark.usefixtures("by_itself")

KIB = 1 << 10


def make_error(size=KIB):
    """Return an error with a tensor in its frames, and a weak reference to the tensor."""
    watched = []

    def step():
        activations = torch.zeros(size)
        watched.append(weakref.ref(activations))
        raise RuntimeError("MPS backend out of memory")

    try:
        step()
    except RuntimeError as error:
        return error, watched[0]


@pytest.fixture
def last_error(monkeypatch):
    """Function that makes an error the last one; the previous last error is restored."""
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        monkeypatch.delattr(sys, name, raising=False)

    def last_error(error):
        monkeypatch.setattr(sys, "last_value", error, raising=False)
        monkeypatch.setattr(sys, "last_traceback", error.__traceback__, raising=False)

    return last_error


@pytest.fixture
def variables(monkeypatch):
    """Variables of the program."""
    variables = vars(sys.modules["__main__"])
    monkeypatch.setitem(variables, "losses", [torch.zeros(KIB)])
    return variables


@pytest.mark.real_computer  # It counts tensors of the CPU.
def test_release_measures_sources_in_order(last_error, variables):
    inner, activations = make_error(2 * KIB)
    last_error(inner)
    variables["losses"].append(variables["losses"])
    del inner
    report = nb.release("losses", "losses", keep="models")

    assert [(freed.source, freed.tensors) for freed in report.freed] == [
        ("unused blocks of the device", 0),
        ("variables", 4 * KIB),
        ("frames of the last error", 8 * KIB),
        ("interrupted run", 0),
    ]
    assert ("losses" in variables, activations()) == (False, None)
    assert str(report).startswith("Released 12.0 KiB of tensors")
    assert ("frames of the last error" in str(report), "interrupted run" in str(report)) == (True, False)
    assert report.notes == ("%debug and %tb can no longer show the last error.",)
    assert json.loads(json.dumps(report.to_dict()))["freed"][1]["tensors"] == 4 * KIB


@pytest.mark.parametrize("chain", ["alone", "caused", "during", "in a ring"])
def test_release_clears_frames_of_error_chain(last_error, chain):
    error, activations = make_error()
    inner = error
    if chain != "alone":
        error = ValueError("outer")
        setattr(error, "__context__" if chain == "during" else "__cause__", inner)
        inner.__context__ = error if chain == "in a ring" else None
    last_error(error)

    assert activations() is not None
    nb.release(keep=["models"])
    assert activations() is None
    assert sys.last_value is error


@pytest.mark.parametrize("names", [("lossse",), (7,), ("losses", ""), ("losses", "lossse"), ("losses", "__name__")])
def test_invalid_names_release_nothing(names, last_error, variables):
    inner, activations = make_error()
    last_error(inner)
    with pytest.raises(ConfigurationError, match=r"is not a variable that can be deleted\. Nothing was released"):
        nb.release(*names)

    assert {"losses", "__name__"} <= variables.keys()
    assert activations() is not None


@pytest.mark.parametrize("keep", ["model", ["models", "variables"], [1], True, None])
def test_release_rejects_other_sources(keep):
    with pytest.raises(ConfigurationError, match=r"^Invalid value for keep: "):
        nb.release(keep=keep)


SCRIPT = """
import sys
import openmed_nb as nb
losses = [1.5]
report = nb.release("losses")
print("losses" in globals(), report.tensors, report.freed[-1].source, "torch" in sys.modules)
"""


@pytest.mark.real_computer  # The script is a separate process.
def test_release_in_script_does_not_import_torch():
    assert (
        subprocess.check_output([sys.executable, "-c", SCRIPT], text=True, timeout=120)
        == "False 0 loaded models False\n"
    )


@pytest.mark.real_computer  # It starts its own simulation.
def test_release_on_simulated_mps(variables):
    with nb.simulated_mps("8 GiB"):
        variables["losses"] = [torch.zeros(1 << 22, device="mps")]
        torch.zeros(1 << 24, device="mps")  # Its block is cached.
        report = nb.release("losses", keep=["models"])

    assert (report.device, report.tensors) == ("mps (SIMULATED)", 4 << 22)
    assert (report.freed[0].source, report.freed[0].reserved > 0) == ("unused blocks of the device", True)
    assert report.freed[1].reserved >= 4 << 22
    assert "SIMULATED" in str(report)


ACCEPTED = [("mps", 0), ("mps", 0.9), ("mps", 2.0), ("cuda", 0.5), ("cuda:1", 1.0)]
REJECTED = [("mps", -0.1), ("mps", 2.1), ("mps", True), ("cuda", 0), ("cuda:1", 1.1), ("cpu", 0.9), ("xpu", 0.5)]


def test_validate_fraction():
    for device, fraction in ACCEPTED:
        assert validate_fraction(device, fraction) == fraction, device
    for device, fraction in REJECTED:
        error = catch_error(partial(validate_fraction, device, fraction))
        remedy = "Choose batches" if device in {"cpu", "xpu"} else "Pass a number"
        assert error.remedy.startswith(remedy), (device, fraction)


@pytest.mark.real_computer  # It starts its own simulation.
def test_limit_memory_on_simulated_mps():
    """An invalid limit keeps the previous one."""
    with nb.simulated_mps("8 GiB") as mps:
        limit = nb.training.limit_memory(0.5, "mps")
        allowed = mps.allocator.limit
        with pytest.raises(ConfigurationError):
            nb.training.limit_memory(3, "mps")
        assert mps.allocator.limit == allowed == limit.size
        with pytest.raises(RuntimeError, match="MPS backend out of memory"):
            torch.zeros(limit.size // 4 + 1024, device="mps")

    assert limit.device == "mps (SIMULATED)"
    assert "SIMULATED" in str(limit)
