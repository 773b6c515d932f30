"""Tests of the detection of calls that wait for the device, with real torch functions, and of their code locations."""

# ruff: noqa: PLW0108 - each call is in a lambda on a separate line, because the line is checked

import io
import logging
import math
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn

import openmed_nb as nb
from openmed_nb.runbook.bench.profile_watch import (
    StepRecorder,
    _code_owner,
    _display_filename,
    _find_code_location,
    _trace_calls,
)
from openmed_nb.runbook.bench.timing import CodeLocation, Synchronization

pytestmark = [pytest.mark.real_computer, pytest.mark.usefixtures("clock", "quick_collection")]

ROW = torch.tensor([1.5, 0.0, 3.0])
SCALAR = ROW.sum()
LOGGER = logging.getLogger("test_synchronization")
LOGGER.propagate = False
LOGGER.addHandler(logging.StreamHandler(io.StringIO()))


def profile_calls(*calls, device="cpu"):
    """Return the profile of a step that makes some calls."""

    def step(_batch):
        for call in calls:
            call()

    return nb.runbook.profile(step, [ROW], device=device, steps=1)


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
    (lambda: ROW[ROW > 1], "indexing with a boolean mask"),
    (lambda: torch.nonzero(ROW), ".nonzero()"),
    (lambda: torch.masked_select(ROW, ROW > 1), "masked_select()"),
    (lambda: torch.unique(ROW), "unique()"),
]
LOGGING_LINE = next(call.__code__.co_firstlineno for call, _text in WAITING_CALLS if "LOGGER" in call.__code__.co_names)


def test_profile_reports_waiting_calls_with_lines():
    waits = profile_calls(*(call for call, _text in WAITING_CALLS)).synchronizations

    assert {(wait.call, wait.place.line) for wait in waits} == {
        (text, call.__code__.co_firstlineno) for call, text in WAITING_CALLS
    }
    assert {(wait.place.file, wait.place.is_user_code) for wait in waits} == {(Path(__file__).name, True)}
    # A log record is formatted once per handler.
    assert {wait.count for wait in waits if wait.place.line != LOGGING_LINE} == {1.0}


NON_WAITING_CALLS = [
    lambda: ROW + 1,
    lambda: ROW.to(torch.float64),
    lambda: ROW.to("cpu", non_blocking=True),
    lambda: ROW[torch.tensor([0, 1])],
    lambda: ROW[0:2],
    lambda: list(ROW),
    lambda: nn.functional.cross_entropy(torch.zeros(2, 3), torch.tensor([0, 1])),
]


def test_profile_ignores_calls_that_do_not_wait():
    assert profile_calls(*NON_WAITING_CALLS).synchronizations == ()


def test_profile_reports_blocking_copies_to_mps():
    """Non-blocking copies and values of the host do not wait."""
    with nb.simulated_mps():
        device_tensor = torch.ones(3, device="mps")
        copies = [
            lambda: ROW.to("mps"),
            lambda: ROW.to(device=torch.device("mps")),
            lambda: ROW.to(device_tensor),
        ]
        waits = profile_calls(*copies, device="mps").synchronizations
        other_waits = profile_calls(
            lambda: SCALAR.item(),
            lambda: ROW.to("mps", non_blocking=True),
            lambda: device_tensor.to("mps"),
            lambda: torch.zeros(3, device="mps"),
            device="mps",
        ).synchronizations

    assert {(wait.call, wait.place.line) for wait in waits} == {
        (".to('mps')", call.__code__.co_firstlineno) for call in copies
    }
    assert other_waits == ()


def test_wait_reason_distinguishes_batch_from_later_copies():
    """A copy is that of the batch until the step has launched work on the device. Each step starts again."""
    with nb.simulated_mps():
        device_tensor = torch.ones(3, device="mps")
        steps = {
            "batch": (lambda: ROW.to(device_tensor.device), lambda: ROW.to("mps"), lambda: device_tensor + 1),
            "copy": (lambda: device_tensor + 1, lambda: ROW.to("mps")),
            "read": (lambda: (device_tensor + 1).tolist(),),
        }
        waits_by_step = {
            reason: profile_calls(*calls, device="mps").synchronizations for reason, calls in steps.items()
        }

    for reason, waits in waits_by_step.items():
        assert {wait.reason for wait in waits} == {reason}


def test_operators_per_step_excludes_views():
    """Operators of a backward pass count."""
    weights = torch.ones(3, requires_grad=True)

    assert profile_calls(lambda: ROW.view(3, 1).t().add(1).mul_(2)).operators_per_step == 2
    assert profile_calls(lambda: (weights * ROW).sum().backward()).operators_per_step >= 4


def test_wait_in_library_model_names_its_module():
    """The location has no line and is not user code."""
    from transformers import BertConfig, BertModel

    tiny = BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    model = BertModel(tiny).eval()
    ids = torch.ones(1, 4, dtype=torch.long)

    places = {
        wait.place for wait in profile_calls(lambda: model(ids, attention_mask=torch.ones_like(ids))).synchronizations
    }

    assert {place.library.partition(".")[0] for place in places} == {"transformers"}
    assert not any(place.is_user_code for place in places)
    assert all(str(place).startswith("inside transformers.") for place in places)


def test_wait_in_called_library_names_user_line():
    """The user can change the line that calls the library."""
    import tqdm

    progress = tqdm.tqdm(disable=True)

    def step():
        progress.set_postfix(loss=SCALAR)

    progress.disable = False
    progress.refresh = lambda *_, **__: None
    waits = profile_calls(step).synchronizations
    progress.disable = True

    assert {(wait.place.library, wait.place.function, wait.place.is_user_code) for wait in waits} == {
        ("", "step", True)
    }


def test_code_owner_of_files():
    import contextlib

    import transformers

    owners = {
        contextlib.__file__: "python",
        "<frozen importlib._bootstrap>": "python",
        torch.nn.functional.__file__: "torch",
        transformers.__file__: "library",
        Synchronization.__init__.__globals__.get("__file__", _find_code_location.__code__.co_filename): "library",
        __file__: "user",
        "<stdin>": "user",
        "/home/a/site/train.py": "user",
    }

    assert {file: _code_owner(file) for file in owners} == owners


def test_code_location_has_no_directory():
    """Directories may contain user names."""
    location = CodeLocation(_display_filename("/home/maria/study/train.py"), 12, "step")
    data = Synchronization(".item()", location, 1.0).to_dict()

    assert str(Synchronization(".item()", location, 1.0)) == ".item() at train.py:12 in step"
    assert str(CodeLocation("train.py", 3, "<module>")) == "train.py:3"
    assert "maria" not in str(data)
    assert (data["file"], data["line"], data["function"], data["reason"]) == ("train.py", 12, "step", "read")


def test_display_filename_of_notebook_cell():
    """The number of the cell is the one in IPython's tracebacks."""
    program = """
        from IPython.core.interactiveshell import InteractiveShell
        from openmed_nb.runbook.bench.profile_watch import _code_owner, _display_filename
        shell = InteractiveShell.instance()
        shell.run_cell("first = 1", store_history=True)
        shell.run_cell("def step(batch):\\n    return batch", store_history=True)
        file = shell.user_ns["step"].__code__.co_filename
        print(_display_filename(file), _code_owner(file))
    """
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True
    )

    assert process.stdout.strip() == "Cell In[2] user"


def test_trace_calls_removes_modes_after_error():
    from torch.overrides import _get_current_function_mode_stack
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    with pytest.raises(ZeroDivisionError), _trace_calls(StepRecorder("cpu")):
        raise ZeroDivisionError

    assert _get_current_function_mode_stack() == []
    assert _get_current_dispatch_mode_stack() == []


def test_profile_ignores_counters_of_optimizer():
    """Torch's optimizers read counters that are stored on the CPU."""
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), fused=False)

    def step():
        model(torch.ones(4, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    assert profile_calls(step).synchronizations == ()
