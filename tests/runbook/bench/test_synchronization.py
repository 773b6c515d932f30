"""Tests of the detection of calls that wait for the device, with real torch functions, and of their code locations."""

# ruff: noqa: PLW0108 - each call is in a lambda on a separate line, because the line is checked

import contextlib
import io
import logging
import math
import sys
from itertools import repeat
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import openmed_nb as nb
from openmed_nb.runbook.bench import timing
from openmed_nb.runbook.bench.profile_watch import _code_owner, _display_filename, trace_steps
from openmed_nb.runbook.bench.workloads import CUSTOM_STEP, Workload

pytestmark = pytest.mark.real_computer

ROW = torch.tensor([1.5, 0.0, 3.0])
SCALAR = ROW.sum()
LOGGER = logging.getLogger("test_synchronization")
LOGGER.propagate = False
LOGGER.addHandler(logging.StreamHandler(io.StringIO()))


def trace_calls(*calls, device="cpu"):
    """Return the trace of a step that makes some calls."""

    def step(_batch):
        for call in calls:
            call()

    return trace_steps(Workload("m", CUSTOM_STEP, device, 1, None, lambda: repeat(ROW), (("step", step),)), repeat(ROW))


WAITING_CALLS = [
    (lambda: SCALAR.item(), ".item()"),
    (lambda: ROW.tolist(), ".tolist()"),
    (lambda: ROW.numpy(), ".numpy()"),
    (lambda: ROW.cpu(), ".cpu()"),
    (lambda: ROW.to("cpu"), ".to('cpu')"),
    (lambda: ROW.to(device=torch.device("cpu")), ".to('cpu')"),
    (lambda: ROW.to(torch.zeros(1)), ".to('cpu')"),
    (lambda: 1 if SCALAR else 0, "bool()"),
    (lambda: math.sqrt(SCALAR), "float()"),
    (lambda: int(SCALAR), "int()"),
    (lambda: str(ROW), "printing a tensor"),
    (lambda: f"{SCALAR:.2f}", "printing a tensor"),
    (lambda: LOGGER.error("loss %s", SCALAR), "printing a tensor"),
    (lambda: torch.nonzero(ROW), ".nonzero()"),
    (lambda: ROW[ROW > 0], "indexing with a mask"),
    (lambda: ROW.unique(), ".unique()"),
]


def test_waiting_calls_are_reported_with_lines():
    waits = trace_calls(*(call for call, _text in WAITING_CALLS)).synchronizations

    assert {(wait.call, wait.line) for wait in waits} == {
        (text, call.__code__.co_firstlineno) for call, text in WAITING_CALLS
    }
    assert {(wait.file, wait.reason) for wait in waits} == {(Path(__file__).name, "read")}
    # A log record is formatted once per handler, and pytest adds handlers.
    assert {wait.count for wait in waits if wait.call != "printing a tensor"} == {1.0}


def test_calls_that_do_not_wait_are_ignored():
    calls = [
        lambda: ROW + 1,
        lambda: ROW.to(torch.float64),
        lambda: ROW.to("cpu", non_blocking=True),
        lambda: ROW[torch.tensor([0, 1])],
        lambda: list(ROW),
        lambda: nn.functional.cross_entropy(torch.zeros(2, 3), torch.tensor([0, 1])),
    ]

    assert trace_calls(*calls).synchronizations == ()


def test_copies_to_mps_wait_after_the_step_has_launched_work():
    """Before, they copy the batch. Non-blocking copies and values of the host do not wait."""
    with nb.simulated_mps():
        ones = torch.ones(3, device="mps")
        copies = [
            lambda: ROW.to("mps"),
            lambda: ROW.to(device=torch.device("mps")),
            lambda: ROW.to(ones),
        ]
        others = [
            lambda: SCALAR.item(),
            lambda: ROW.to("mps", non_blocking=True),
            lambda: ones.to("mps"),
            lambda: torch.zeros(3, device="mps"),
        ]
        waits = trace_calls(*copies, lambda: ones + 1, *copies, device="mps").synchronizations
        no_waits = trace_calls(*copies, lambda: ones + 1, *others, device="mps").synchronizations
        (read,) = trace_calls(lambda: (ones + 1).tolist(), device="mps").synchronizations

    assert {(wait.call, wait.line, wait.reason, wait.count) for wait in waits} == {
        (".to('mps')", copy.__code__.co_firstlineno, "copy", 1.0) for copy in copies
    }
    assert (no_waits, read.reason) == ((), "read")


def test_operators_per_step_excludes_views():
    """Operators of a backward pass count."""
    weights = torch.ones(3, requires_grad=True)

    assert trace_calls(lambda: ROW.view(3, 1).t().add(1).mul_(2)).operators_per_step == 2
    assert trace_calls(lambda: (weights * ROW).sum().backward()).operators_per_step >= 4


def test_wait_in_library_model_or_optimizer_is_ignored():
    """The user cannot change the model. Torch's optimizers read counters that are stored on the CPU."""
    tiny = transformers.BertConfig(
        vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8
    )
    model = transformers.BertModel(tiny)
    optimizer = torch.optim.AdamW(model.parameters(), fused=False)
    ids = torch.ones(1, 4, dtype=torch.long)

    def step():
        model(ids, attention_mask=torch.ones_like(ids)).last_hidden_state.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    assert trace_calls(step).synchronizations == ()


def test_wait_in_called_library_names_user_line():
    """The user can change the line that calls the library."""
    import tqdm

    progress = tqdm.tqdm(disable=True)

    def step():
        progress.set_postfix(loss=SCALAR)

    progress.disable = False
    progress.refresh = lambda *_, **__: None
    waits = trace_calls(step).synchronizations
    progress.disable = True

    assert {wait.function for wait in waits} == {"step"}


def test_code_owner_of_files():
    owners = {
        contextlib.__file__: "python",
        "<frozen importlib._bootstrap>": "python",
        torch.nn.functional.__file__: "torch",
        transformers.__file__: "library",
        timing.__file__: "library",
        __file__: "user",
        "<stdin>": "user",
        "/home/a/site/train.py": "user",
    }

    assert {file: _code_owner(file) for file in owners} == owners


def test_display_filename_has_no_directory(monkeypatch):
    """Directories may contain user names. The number of a notebook cell is the one in IPython's tracebacks."""
    compiler = SimpleNamespace(format_code_name={"/tmp/1.py": ("Cell", "In[2]")}.get)  # noqa: S108 - no file
    shell = SimpleNamespace(compile=compiler)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))

    assert _display_filename("/home/maria/study/train.py") == "train.py"
    assert _display_filename("/tmp/1.py") == "Cell In[2]"  # noqa: S108 - no file


def test_trace_steps_removes_modes_after_error():
    with pytest.raises(ZeroDivisionError):
        trace_calls(lambda: 1 / 0)

    assert _get_current_function_mode_stack() == []
    assert _get_current_dispatch_mode_stack() == []
