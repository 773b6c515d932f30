"""Which calls wait for the device, seen in real torch, and which line they are named by."""

# ruff: noqa: PLW0108 - each call stands in a lambda of its own line, which is the line that must be named

import io
import logging
import math
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import openmed_nb as nb
from openmed_nb.runbook.bench.profile_watch import (
    StepRecorder,
    code_owner,
    display_filename,
    find_code_location,
    watching,
)
from openmed_nb.runbook.bench.timing import CodeLocation, Synchronization

pytestmark = [pytest.mark.real_computer, pytest.mark.usefixtures("clock", "quick_collection")]

ROW = torch.tensor([1.5, 0.0, 3.0])
ONE = ROW.sum()
LOGGER = logging.getLogger("test_synchronization")
LOGGER.propagate = False
LOGGER.addHandler(logging.StreamHandler(io.StringIO()))


def seen(*calls, device="cpu"):
    """Return the profile of a step of some calls."""

    def step(_batch):
        for call in calls:
            call()

    return nb.runbook.profile(step, [ROW], device=device, steps=1, warm_up=0)


WAITING = [
    (lambda: ONE.item(), ".item()"),
    (lambda: ROW.tolist(), ".tolist()"),
    (lambda: ROW.numpy(), ".numpy()"),
    (lambda: np.asarray(ROW), "an array of numpy"),
    (lambda: ROW.cpu(), ".cpu()"),
    (lambda: ROW.to("cpu"), ".to('cpu')"),
    (lambda: ROW.to(device=torch.device("cpu")), ".to('cpu')"),
    (lambda: ROW.to(torch.zeros(1)), ".to('cpu')"),
    (lambda: bool(ONE), "bool()"),
    (lambda: 1 if ONE else 0, "bool()"),
    (lambda: max([ONE, ONE]), "bool()"),
    (lambda: float(ONE), "float()"),
    (lambda: math.sqrt(ONE), "float()"),
    (lambda: int(ONE), "int()"),
    (lambda: "abc"[torch.tensor(1)], "a Python index"),
    (lambda: str(ROW), "printing a tensor"),
    (lambda: f"{ONE:.2f}", "formatting a tensor"),
    (lambda: f"{ROW}", "formatting a tensor"),
    (lambda: LOGGER.error("loss %s", ONE), "printing a tensor"),
    (lambda: ROW[ROW > 1], "a boolean mask"),
    (lambda: ROW.nonzero(), "nonzero()"),
    (lambda: torch.nonzero(ROW), "nonzero()"),
    (lambda: torch.where(ROW > 1), "torch.where() with a condition alone"),
    (lambda: torch.masked_select(ROW, ROW > 1), "masked_select()"),
    (lambda: torch.unique(ROW), "unique()"),
    (lambda: torch.equal(ROW, ROW), "torch.equal()"),
    (lambda: 1.5 in ROW, "in"),
]
LOGGED = next(call.__code__.co_firstlineno for call, said in WAITING if "LOGGER" in call.__code__.co_names)


def test_calls_that_wait_are_seen_with_their_lines():
    """Each way to need numbers on the host is seen, as the one call of this file's own line."""
    found = seen(*(call for call, _said in WAITING)).synchronizations

    assert {(one.call, one.place.line) for one in found} == {
        (said, call.__code__.co_firstlineno) for call, said in WAITING
    }
    assert {(one.place.file, one.place.is_user_code) for one in found} == {(Path(__file__).name, True)}
    assert {one.count for one in found if one.place.line != LOGGED} == {1.0}  # A record is formatted for each handler.


NOT_WAITING = [
    lambda: ROW + 1,
    lambda: ROW.to(torch.float64),
    lambda: ROW.to("cpu", non_blocking=True),
    lambda: ROW[torch.tensor([0, 1])],
    lambda: ROW[0:2],
    lambda: torch.where(ROW > 1, ROW, ROW),
    lambda: ROW.shape[0],
    lambda: len(ROW),
    lambda: list(ROW),
    lambda: ROW.masked_fill(ROW > 1, 0),
    lambda: ROW.clone().copy_(ROW),
    lambda: nn.functional.cross_entropy(torch.zeros(2, 3), torch.tensor([0, 1])),
]


def test_calls_that_do_not_wait_are_not_named():
    """What stays on the device is not a synchronization."""
    assert seen(*NOT_WAITING).synchronizations == ()


def test_only_the_device_is_waited_for():
    """On MPS a tensor that is copied into one of the host waits, unless the person says otherwise; numbers of the host do not."""
    with nb.simulated_mps():
        here, host = torch.ones(3, device="mps"), torch.zeros(3)
        waiting = seen(lambda: host.copy_(here), device="mps").synchronizations
        others = seen(
            lambda: ONE.item(), lambda: host.copy_(here, non_blocking=True), lambda: host.to("cpu"), device="mps"
        ).synchronizations

    assert [(one.call, one.place.file) for one in waiting] == [(".copy_() to the host", Path(__file__).name)]
    assert others == ()


def test_copies_to_the_device_wait():
    """Each way to copy from the host to MPS is seen: torch waits there for all that was started before."""
    with nb.simulated_mps():
        here, first = torch.ones(3, device="mps"), torch.tensor([0])
        copies = [
            (lambda: ROW.to("mps"), ".to('mps')"),
            (lambda: ROW.to(device=torch.device("mps")), ".to('mps')"),
            (lambda: ROW.to(here), ".to('mps')"),
            (lambda: here.copy_(ROW), ".copy_() to the device"),
            (lambda: torch.tensor([1.0], device="mps"), "torch.tensor() on the device"),
            (lambda: torch.as_tensor(np.ones(3), dtype=torch.float32, device="mps"), "torch.as_tensor() on the device"),
            (lambda: here.new_tensor([1.0]), ".new_tensor() on the device"),
            (lambda: here[first], "an index of the host"),
            (lambda: here.__setitem__(slice(0, 3), ROW), "a value of the host"),
        ]
        found = seen(*(call for call, _said in copies), device="mps").synchronizations
        others = seen(
            lambda: ROW.to("mps", non_blocking=True),
            lambda: here.copy_(ROW, non_blocking=True),
            lambda: here.to("mps"),
            lambda: torch.zeros(3, device="mps"),
            lambda: torch.tensor([1.0]),
            lambda: here.__setitem__(0, 1.0),
            lambda: here.__setitem__(0, ONE),
            lambda: here[0],
            device="mps",
        ).synchronizations

    assert {(one.call, one.place.line) for one in found} == {
        (said, call.__code__.co_firstlineno) for call, said in copies
    }
    assert others == ()


def test_the_batch_is_told_from_other_copies():
    """A copy to the device is one of the batch as long as the step has started nothing there; each step begins anew."""
    with nb.simulated_mps():
        here = torch.ones(3, device="mps")
        steps = {
            "batch": (lambda: ROW.to(here.device), lambda: ROW.to("mps"), lambda: here + 1),
            "copy": (lambda: here + 1, lambda: ROW.to("mps")),
            "read": (lambda: (here + 1).tolist(),),
        }
        found = {reason: seen(*calls, device="mps").synchronizations for reason, calls in steps.items()}

    assert {reason: {one.reason for one in waits} for reason, waits in found.items()} == {one: {one} for one in steps}


def test_synchronize_waits():
    """A call that does nothing but wait is named, and torch's own function is there again afterwards."""
    before = torch.mps.synchronize, torch.accelerator.synchronize
    with nb.simulated_mps():
        found = seen(
            lambda: torch.mps.synchronize(), lambda: torch.accelerator.synchronize(), device="mps"
        ).synchronizations

    assert {one.call for one in found} == {"torch.mps.synchronize()", "torch.accelerator.synchronize()"}
    assert {(one.place.file, one.place.is_user_code) for one in found} == {(Path(__file__).name, True)}
    assert (torch.mps.synchronize, torch.accelerator.synchronize) == before


def test_operators_that_compute_are_counted():
    """Views start nothing on a device, and each other operator counts once, in a backward pass too."""
    weights = torch.ones(3, requires_grad=True)

    assert seen(lambda: ROW.view(3, 1).t().add(1).mul_(2)).operators_per_step == 2
    assert seen(lambda: (weights * ROW).sum().backward()).operators_per_step >= 4


def test_library_is_named_by_its_module():
    """What a library's model does is named by its module, without a line, and is not the person's."""
    from transformers import BertConfig, BertModel

    tiny = BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    model = BertModel(tiny).eval()
    ids = torch.ones(1, 4, dtype=torch.long)

    places = {one.place for one in seen(lambda: model(ids, attention_mask=torch.ones_like(ids))).synchronizations}

    assert {place.library.partition(".")[0] for place in places} == {"transformers"}
    assert not any(place.is_user_code for place in places)
    assert all(str(place).startswith("inside of transformers.") for place in places)


def test_library_that_the_person_calls():
    """A library that is called from the person's own line is named by that line: it can be changed there."""
    import tqdm

    progress = tqdm.tqdm(disable=True)

    def step():
        progress.set_postfix(loss=ONE)

    progress.disable = False
    progress.refresh = lambda *_, **__: None
    found = seen(step).synchronizations
    progress.disable = True

    assert {(one.place.library, one.place.function, one.place.is_user_code) for one in found} == {("", "step", True)}


def test_owners_of_files():
    """A file of the person is told from those of Python, torch, libraries and this package."""
    import contextlib

    import transformers

    owners = {
        contextlib.__file__: "python",
        "<frozen importlib._bootstrap>": "python",
        torch.nn.functional.__file__: "torch",
        transformers.__file__: "library",
        Synchronization.__init__.__globals__.get("__file__", find_code_location.__code__.co_filename): "library",
        __file__: "own",
        "<stdin>": "own",
        "/home/a/site/train.py": "own",
    }

    assert {file: code_owner(file) for file in owners} == owners


def test_places_have_no_folder():
    """A place is shown by the name of its file; the folder, which names people, is nowhere."""
    place = CodeLocation(display_filename("/home/maria/study/train.py"), 12, "step")
    values = Synchronization(".item()", place, 1.0).to_dict()

    assert str(Synchronization(".item()", place, 1.0)) == ".item() at train.py:12 in step"
    assert str(CodeLocation("train.py", 3, "<module>")) == "train.py:3"
    assert "maria" not in str(values)
    assert (values["file"], values["line"], values["function"], values["reason"]) == ("train.py", 12, "step", "read")


def test_cell_of_a_notebook_is_named_as_ipython_names_it():
    """A line in a cell is named by the number of the cell, as in IPython's own tracebacks."""
    program = """
        from IPython.core.interactiveshell import InteractiveShell
        from openmed_nb.runbook.bench.profile_watch import code_owner, display_filename
        shell = InteractiveShell.instance()
        shell.run_cell("first = 1", store_history=True)
        shell.run_cell("def step(batch):\\n    return batch", store_history=True)
        file = shell.user_ns["step"].__code__.co_filename
        print(display_filename(file), code_owner(file))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "Cell In[2] own"


def test_nothing_stays_on_after_an_error():
    """A step that fails while it is watched leaves none of torch's modes on."""
    from torch.overrides import _get_current_function_mode_stack
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    with pytest.raises(ZeroDivisionError), watching(StepRecorder("cpu")):
        raise ZeroDivisionError

    assert _get_current_function_mode_stack() == []
    assert _get_current_dispatch_mode_stack() == []


def test_counters_of_an_optimizer_are_not_waited_for():
    """An optimizer of torch reads its own counters on the CPU, for which no line of the person's waits."""
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), fused=False)

    def step():
        model(torch.ones(4, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    assert seen(step).synchronizations == ()
