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
        raise RuntimeError("MPS backend out of memory (MPS allocated: 5.21 GiB, other allocations: 384.00 KiB).")

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


@pytest.mark.real_computer  # It counts tensors of the CPU.
def test_release_measures_sources_in_order(last_error):
    inner, gone = make_error(2 * KIB)
    last_error(inner)
    cycle = [torch.zeros(KIB)]
    cycle.append(cycle)
    variables = {"losses": cycle, "other": 1}
    del cycle, inner
    report = nb.release("losses", "losses", namespace=variables, models=False)

    assert [(freed.source, freed.tensors) for freed in report.freed] == [
        *(("unused blocks of the device", 0), ("variables", 4 * KIB)),
        *(("frames of the last error", 8 * KIB), ("interrupted run", 0)),
    ]
    assert (variables, gone()) == ({"other": 1}, None)
    assert report.tensors == 12 * KIB
    assert str(report).startswith("Released 12.0 KiB of tensors")
    assert ("frames of the last error" in str(report), "interrupted run" in str(report)) == (True, False)
    assert "interrupted run" in report._repr_html_()
    assert report.notes == (
        "%debug and %tb can no longer show the last error.",
        "The last error was an out-of-memory error on mps: 5.2 GiB allocated, 384.0 KiB in use by other allocations.",
    )
    assert json.loads(json.dumps(report.to_dict()))["freed"][1]["tensors"] == 4 * KIB


def count_collections(**arguments):
    """Return the number of full garbage collections of a release."""
    started = []

    def count(phase, about):
        started.extend([phase] if (phase, about["generation"]) == ("start", 2) else [])

    gc.callbacks.append(count)
    try:
        nb.release(**{"namespace": {}, "models": False, **arguments})
    finally:
        gc.callbacks.remove(count)
    return len(started)


def test_release_collects_only_after_effective_sources(last_error):
    assert count_collections(traceback=False) == 1
    last_error(make_error()[0])
    assert count_collections() == 2
    nb.load_pipeline("bundled_small", device="cpu")
    assert [count_collections(traceback=False, models=True) for _ in range(2)] == [2, 1]


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
    nb.release(namespace={}, models=False)
    assert gone() is None
    assert sys.last_value is error


@pytest.mark.usefixtures("last_error")
def test_release_without_last_error_has_no_notes():
    assert nb.release(namespace={}, models=False).notes == ()


@pytest.mark.parametrize("names", [("lossse",), ("losses", "lossse"), (7,), (["losses"],), ("",), ("losses.x",)])
def test_undefined_variable_releases_nothing(names, last_error):
    inner, gone = make_error()
    last_error(inner)
    variables = {"losses": [torch.zeros(KIB)]}
    with pytest.raises(ConfigurationError, match="Undefined variable: "):
        nb.release(*names, namespace=variables)

    assert set(variables) == {"losses"}
    assert gone() is not None


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
def test_release_on_simulated_mps():
    with nb.simulated_mps("8 GiB"):
        variables = {"losses": [torch.zeros(1 << 22, device="mps")]}
        torch.zeros(1 << 24, device="mps")  # Its block is cached.
        report = nb.release("losses", namespace=variables, models=False)

    assert (report.device, report.simulated, report.tensors) == ("mps", True, 4 << 22)
    assert (report.freed[0].source, report.freed[0].reserved > 0) == ("unused blocks of the device", True)
    assert report.freed[1].reserved >= 4 << 22
    assert "SIMULATED" in str(report)
    assert "SIMULATED" in report._repr_html_()


def test_release_rejects_variables_of_the_notebook():
    variables = {"losses": [1], "__name__": "__main__"}
    with pytest.raises(ConfigurationError, match="requires __name__"):
        nb.release("losses", "__name__", namespace=variables, models=False)

    assert variables == {"losses": [1], "__name__": "__main__"}


def test_error_with_unrelated_exceptions_attribute(last_error):
    """The attribute ``exceptions`` of this error is not that of an exception group."""

    class Odd(RuntimeError):
        exceptions = None

    last_error(Odd())

    assert nb.release(namespace={}, models=False).freed[1].source == "frames of the last error"
