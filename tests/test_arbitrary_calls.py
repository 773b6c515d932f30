"""Every public function and class takes arbitrary values: a result, an error of ours, or Python's own for the signature."""

from __future__ import annotations

import contextlib
import inspect
import math
import os
import traceback
import warnings
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import openmed_nb as nb
from openmed_nb.errors import OpenMedError
from openmed_nb.session import SESSION

pytestmark = [pytest.mark.real_computer, pytest.mark.usefixtures("quick_collection")]

ROOMS = {
    "": nb,
    "compat.": nb.compat,
    "runbook.": nb.runbook,
    "training.": nb.training,
    "training.loader.": nb.training.loader,
}

OTHERS = {"OpenMedError", "OpenMedWarning", "cluster", "report"}
"""Errors are made here alone, and a cluster and a report start processes."""

CALLABLES = {
    prefix + name: getattr(room, name)
    for prefix, room in ROOMS.items()
    for name in getattr(room, "__all__", ("check", "benchmark_workers", "settings"))
    if prefix + name not in OTHERS and callable(getattr(room, name))
} | {"training.adamw.explain": nb.training.adamw.explain}
"""All else that is public and can be called."""

MEASURING = {f"{room}{name}" for room in ("", "runbook.") for name in (
    "compare", "doctor", "fallbacks", "forecast", "handoff", "logbook", "loss_parity", "parity", "profile", "sweep",
    "validate_precision",
)}  # fmt: skip
"""They measure the bundled model where none is named, for seconds."""


OURS = ("OPENMED_", "PYTORCH_ENABLE_MPS", "PYTORCH_MPS", "ACCELERATE_", "HF_")
"""How the variables begin that are read or set here; libraries set others when they are imported."""

REFUSED = "refused by a thing of the person"


def refuse(*_):
    """Refuse whatever it is called with, as a function of the person may."""
    raise RuntimeError(REFUSED)


class Refusing:
    """Something that refuses whatever it is asked, with an error that is its own; it can be made of anything."""

    def __init__(self, *_):
        """Take whatever it is called with, as it is where a function belongs."""

    def __getattr__(self, name):
        raise RuntimeError(REFUSED)

    def __len__(self):
        raise RuntimeError(REFUSED)

    def __iter__(self):
        raise RuntimeError(REFUSED)


THINGS = (
    None, True, 0, -1, 10**30, 0.5, math.nan, math.inf, 1j, "", "cpu", "nope", "x" * 300, "a\0b", "~nobody/x", b"x",
    Path("nope"), [], [None], ["x", 1], (), ("x",), set(), {}, {"x": 1}, {1: None}, range(3), iter([1]), object(), Refusing(),
    refuse, Refusing, ValueError("x"), torch.zeros(0), torch.ones(2, 3), torch.float16, torch.device("cpu"),
    torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).parameters, SESSION, pytest, ...,
)  # fmt: skip
"""What people pass by mistake."""


def arguments_for(name, choose):
    """Return arguments that the signature of something public takes.

    Args:
        name: Its name.
        choose: Takes how many things there are, and returns the number of one.
    """
    positional, named, parameters = [], {}, inspect.signature(CALLABLES[name]).parameters.values()
    for place, parameter in enumerate(parameters):
        thing = THINGS[choose(len(THINGS))]
        needed = parameter.default is parameter.empty or parameter.name == "model"
        if name in MEASURING and parameter.name == "model" and thing is None:
            thing = "nope"
        if parameter.kind is parameter.VAR_POSITIONAL:
            positional += [thing] * choose(3)
        elif parameter.kind is parameter.VAR_KEYWORD:
            named.update({"nonsense": thing} if choose(2) else {})
        elif needed or choose(2):
            if parameter.kind is parameter.KEYWORD_ONLY or len(positional) < place:
                named[parameter.name] = thing
            else:
                positional.append(thing)
    return positional, named


class State(NamedTuple):
    """What a call that fails must leave as it was."""

    requested: str
    loaded: list[tuple[str, str]]
    environment: dict[str, str]
    threads: int
    gradients: bool


def state():
    """Return the state of the process now."""
    return State(
        SESSION.device().requested,
        [(one.name, one.device) for one in SESSION.inventory()],
        {name: value for name, value in os.environ.items() if name.startswith(OURS)},
        torch.get_num_threads(),
        torch.is_grad_enabled(),
    )


def check_unchanged(before):
    """Check that a call which failed left all as it was, but for models that it loaded: loading them again takes long."""
    after = state()
    assert after._replace(loaded=before.loaded) == before
    assert after.loaded[: len(before.loaded)] == before.loaded


def refused(name, positional, named):
    """Call something public; return whether it was refused in one of the ways that are allowed, and fail for another."""
    before = state()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            result = CALLABLES[name](*positional, **named)
            with result if hasattr(type(result), "__enter__") else contextlib.nullcontext():
                pass
        except OpenMedError:
            check_unchanged(before)
        except TypeError as error:
            inside = error.__traceback__.tb_next is not None and "unexpected keyword argument" not in str(error)
            if inside and "torch/nn/modules" not in traceback.extract_tb(error.__traceback__)[-1].filename:
                raise  # From inside, neither of the signature nor of a model of the person that is called.
        except RuntimeError as error:
            if str(error) != REFUSED:
                raise
        else:
            return False
    return True


@pytest.fixture(scope="module", autouse=True)
def in_a_folder(tmp_path_factory):
    """Run in an empty folder: some functions write where they are told."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("here"))
        yield


@given(st.data())
def test_any_call(data):
    """Whatever is passed, what comes is a result or an error of ours, and after an error the session is as before."""
    name = data.draw(st.sampled_from(sorted(CALLABLES)))
    refused(name, *arguments_for(name, lambda count: data.draw(st.integers(0, count - 1))))


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("compat.refine_spans", (None, [])),
        ("compat.refine_spans", ("asthma", None)),
        ("compat.refine_spans", ("asthma", {"start": 0})),
        ("compat.refine_spans", ("asthma", [{"entity_group": "DISEASE", "start": 0, "end": 6}])),
        ("compat.refine_spans", ("asthma", [{"entity": "DISEASE", "start": 0, "end": 7, "score": 0.9}])),
        ("epochs", (10**30,)),
        ("explain_device", (torch.zeros(0),)),
        ("list_devices", (torch.zeros(0),)),
        ("training.loader.check", (Refusing, refuse)),
        ("training.loader.benchmark_workers", ({"x": 1}, None)),
    ],
)
def test_chosen_arguments(name, arguments):
    """What once failed with an error of Python's own is refused with one of ours."""
    with pytest.raises(OpenMedError):
        CALLABLES[name](*arguments)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CALLABLES))
@given(data=st.data())
def test_any_arguments(name, data):
    """So it is for each of what is public."""
    refused(name, *arguments_for(name, lambda count: data.draw(st.integers(0, count - 1))))


@pytest.mark.parametrize("value", ["nope", -1, float("nan"), torch.ones(2, 3), None])
def test_flags_of_long_calls_are_checked_first(value, tmp_path):
    """What is neither True nor False is refused as a flag, before a model is loaded."""
    calls = (
        lambda: nb.load_pipeline("bundled_small", device="cpu", compile=value),
        lambda: nb.runbook.parity("bundled_small", ["She has asthma."], gradients=value),
        lambda: nb.handoff(tmp_path / "bundle", copy_dataset=value),
        lambda: nb.handoff(tmp_path / "bundle", copy_model=value),
        lambda: nb.annotate(["She has asthma."], "bundled_small", progress=value),
        lambda: nb.annotate(["She has asthma."], "bundled_small", show_text=value),
        lambda: nb.runbook.profile("bundled_small", signposts=value),
        lambda: nb.logbook(applications=value),
        lambda: nb.panel(show_text=value),
        lambda: nb.training.EpochHooks(live=value),
        lambda: nb.training.adamw([torch.zeros(1)], scaled=value),
    )
    before = state()
    for call in calls:
        with pytest.raises(OpenMedError, match=r"cannot be .*Pass True or False"):
            call()
    assert state() == before


def test_everything_shown_has_its_json():
    """What can be shown has a to_dict that works, the guards too."""
    assert nb.Guards("labels").to_dict()["on"] == [name for name in nb.Guards().on if name != "labels"]
