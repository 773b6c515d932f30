"""The import of transformers without work that no load needs, and with the same modules."""

import sys
from pathlib import Path

import pytest

from helpers.processes import run_python
from openmed_nb.models.loading import _defer_scipy, _reuse_import_structure

LOSSES = """
import sys
from openmed_nb.models.loading import import_transformers
import_transformers()
print("scipy.optimize" in sys.modules)
from transformers.loss import loss_for_object_detection
costs = [[4, 1, 3], [2, 0, 5], [3, 2, 2]]
found = loss_for_object_detection.linear_sum_assignment(costs)
import scipy.optimize
expected = scipy.optimize.linear_sum_assignment(costs)
print([rows.tolist() for rows in found] == [rows.tolist() for rows in expected], scipy.optimize.minimize.__name__)
"""


def test_import_defers_scipy_until_a_loss_needs_it():
    pytest.importorskip("scipy")
    process = run_python("-c", LOSSES)
    assert process.stdout == "False\nTrue minimize\n", process.stderr


def test_deferred_scipy_is_complete_for_other_threads():
    """In a process of its own, because other tests have imported scipy."""
    pytest.importorskip("scipy")
    code = """
import threading
from openmed_nb.models.loading import _defer_scipy
def import_scipy():
    from scipy.optimize import minimize
    import scipy.stats
    import scipy.optimize._optimize
    print(minimize.__module__, scipy.stats.norm.__class__.__name__)
with _defer_scipy():
    from scipy.optimize import linear_sum_assignment
    thread = threading.Thread(target=import_scipy)
    thread.start()
    thread.join()
import scipy.optimize
print(type(scipy.optimize).__name__, linear_sum_assignment([[1]])[0].tolist())
"""
    process = run_python("-c", code)
    assert process.stdout == "scipy.optimize._minimize norm_gen\nmodule [0]\n", process.stderr


def test_defer_scipy_keeps_what_is_imported():
    optimize = pytest.importorskip("scipy.optimize")
    with _defer_scipy():
        assert sys.modules["scipy.optimize"] is optimize
    assert sys.modules["scipy.optimize"] is optimize


def test_reused_import_structure_is_that_of_transformers():
    """transformers.models lists the same classes as if it had read its files."""
    import transformers
    from transformers.utils import import_utils

    file = str(Path(transformers.__file__).parent / "models" / "__init__.py")
    read = import_utils.define_import_structure.__wrapped__(file)
    with _reuse_import_structure(transformers):
        reused = import_utils.define_import_structure(file)
        other = import_utils.define_import_structure(str(Path(file).parent / "bert"), prefix="bert")
    assert reused == read
    assert other == import_utils.define_import_structure(str(Path(file).parent / "bert"), prefix="bert")
