"""Release of memory in plain Python: sources are released in order, and each is measured."""

import gc
import json
import subprocess
import sys
import weakref

import pytest
import torch

import openmed_nb as nb
from openmed_nb.errors import ConfigurationError

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
    inner, gone = make_error(2 * KIB)
    last_error(inner)
    variables["losses"].append(variables["losses"])
    del inner
    report = nb.release("losses", "losses", keep="models")

    assert [(freed.source, freed.tensors) for freed in report.freed] == [
        *(("unused blocks of the device", 0), ("variables", 4 * KIB)),
        *(("frames of the last error", 8 * KIB), ("interrupted run", 0)),
    ]
    assert ("losses" in variables, gone()) == (False, None)
    assert report.tensors == 12 * KIB
    assert str(report).startswith("Released 12.0 KiB of tensors")
    assert "frames of the last error" in str(report)
    assert report.notes == ("%debug and %tb can no longer show the last error.",)
    assert json.loads(json.dumps(report.to_dict()))["freed"][1]["tensors"] == 4 * KIB


def count_collections(*keep):
    """Return the number of full garbage collections of a release."""
    started = []

    def count(phase, about):
        started.extend([phase] if (phase, about["generation"]) == ("start", 2) else [])

    gc.callbacks.append(count)
    try:
        nb.release(keep=keep)
    finally:
        gc.callbacks.remove(count)
    return len(started)


def test_release_collects_only_after_effective_sources(last_error):
    assert count_collections("models", "traceback") == 1
    last_error(make_error()[0])
    assert count_collections("models") == 2
    nb.load_pipeline("bundled_small", device="cpu")
    assert [count_collections("traceback") for _ in range(2)] == [2, 1]


@pytest.mark.parametrize("chain", ["alone", "caused", "during", "grouped", "in a ring"])
def test_release_clears_frames_of_error_chain(last_error, chain):
    inner, gone = make_error()
    error = inner
    if chain == "grouped":
        if sys.version_info < (3, 11):
            pytest.skip("groups of errors came with Python 3.11")
        error = ExceptionGroup("steps", [inner])  # noqa: F821 - from Python 3.11
    elif chain != "alone":
        error = ValueError("outer")
        setattr(error, "__context__" if chain == "during" else "__cause__", inner)
        inner.__context__ = error if chain == "in a ring" else None
    last_error(error)

    assert gone() is not None
    nb.release(keep=["models"])
    assert gone() is None
    assert sys.last_value is error


@pytest.mark.usefixtures("last_error")
def test_release_without_last_error_has_no_notes():
    assert nb.release(keep=["models"]).notes == ()


@pytest.mark.parametrize(
    ("names", "message"),
    [
        *(((name,), "Undefined variable: ") for name in ("lossse", 7, ["losses"], "", "losses.x")),
        (("losses", "lossse"), "Undefined variable: "),
        (("losses", "__name__"), "requires __name__"),
    ],
)
def test_invalid_names_release_nothing(names, message, last_error, variables):
    inner, gone = make_error()
    last_error(inner)
    with pytest.raises(ConfigurationError, match=message):
        nb.release(*names)

    assert {"losses", "__name__"} <= variables.keys()
    assert gone() is not None


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

    assert (report.device, report.simulated, report.tensors) == ("mps", True, 4 << 22)
    assert (report.freed[0].source, report.freed[0].reserved > 0) == ("unused blocks of the device", True)
    assert report.freed[1].reserved >= 4 << 22
    assert "SIMULATED" in str(report)
    assert "SIMULATED" in report._repr_html_()


def test_error_with_unrelated_exceptions_attribute(last_error):
    """The attribute ``exceptions`` of this error is not that of an exception group."""

    class Odd(RuntimeError):
        exceptions = None

    last_error(Odd())

    assert nb.release(keep=["models"]).freed[1].source == "frames of the last error"
