"""What is wrong around the toolkit, not in it, is named: a file that hides a package, Python's options, a full disk."""

import sys
import types
from pathlib import Path

import pytest

from helpers.processes import run_python
from openmed_nb.devices.backend import import_torch
from openmed_nb.errors import TorchImportError


def test_file_that_hides_psutil(tmp_path):
    """A psutil.py next to the notebook is reported as hiding the package."""
    (tmp_path / "psutil.py").write_text("")
    code = "import sys; sys.path.insert(0, '.'); import openmed_nb as nb; nb.system_status()"
    ended = run_python("-c", code, cwd=tmp_path)

    assert "ConfigurationError" in ended.stderr
    assert "psutil.py shadows the package psutil. Rename it" in ended.stderr


@pytest.mark.slow
def test_python_without_docstrings():
    """Under -OO the message names Python's option, and not the model."""
    ended = run_python("-OO", "-m", "openmed_nb")

    assert ended.returncode == 2
    assert ended.stderr.strip().endswith("Run Python without that option, or with -O.")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a file that is always full")
def test_answer_that_cannot_be_written():
    """An answer that does not fit on the disk is one line and an exit status, without a traceback."""
    with Path("/dev/full").open("w") as full:
        ended = run_python("-m", "openmed_nb", stdout=full)

    assert ended.returncode == 2
    assert ended.stderr.startswith("ConfigurationError: The result cannot be written: ")
    assert len(ended.stderr.splitlines()) == 1


def test_module_that_stands_in_for_torch(monkeypatch):
    """A module in the place of torch that has no file, as other packages' tests use one, is named without one."""
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    with pytest.raises(TorchImportError, match="A module named 'torch' without a file shadows the package torch"):
        import_torch()
