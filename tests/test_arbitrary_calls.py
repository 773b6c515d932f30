"""Public functions and classes called with arbitrary values return a result, or raise an ``OpenMedError`` or a ``TypeError``."""

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
from helpers.public_api import CALLABLES
from openmed_nb.errors import OpenMedError
from openmed_nb.session import SESSION

pytestmark = [pytest.mark.real_computer, pytest.mark.usefixtures("quick_collection")]

# Functions that measure the bundled model for several seconds if no model is passed.
MEASURING = {f"{prefix}{name}" for prefix in ("", "runbook.") for name in (
    "compare", "doctor", "fallbacks", "forecast", "handoff", "logbook", "loss_parity", "parity", "profile", "sweep",
    "validate_precision",
)}  # fmt: skip

# Prefixes of the environment variables that this package reads or sets; other libraries set other variables on import.
VARIABLE_PREFIXES = ("OPENMED_", "PYTORCH_ENABLE_MPS", "PYTORCH_MPS", "ACCELERATE_", "HF_")

USER_ERROR = "error in a user object"


def raise_user_error(*_):
    """Raise for any arguments, as a user function may."""
    raise RuntimeError(USER_ERROR)


class RaisingObject:
    """User object that raises on any access, and can be constructed from any arguments."""

    def __init__(self, *_):
        """Accept any arguments, so that the class is a valid callable."""

    def __getattr__(self, name):
        raise RuntimeError(USER_ERROR)

    def __len__(self):
        raise RuntimeError(USER_ERROR)

    def __iter__(self):
        raise RuntimeError(USER_ERROR)


# Values that users pass by mistake.
VALUES = (
    None, True, 0, -1, 10**30, 0.5, math.nan, math.inf, 1j, "", "cpu", "nope", "x" * 300, "a\0b", "~nobody/x", b"x",
    Path("nope"), [], [None], ["x", 1], (), ("x",), set(), {}, {"x": 1}, {1: None}, range(3), iter([1]), object(), RaisingObject(),
    raise_user_error, RaisingObject, ValueError("x"), torch.zeros(0), torch.ones(2, 3), torch.float16, torch.device("cpu"),
    torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).parameters, SESSION, pytest, ...,
)  # fmt: skip


def choose_arguments(name, choose):
    """Return positional and keyword arguments for the signature of a callable.

    Args:
        name: Name of the callable.
        choose: Function that takes a number of options and returns the index of one.
    """
    positional = []
    keywords = {}
    for index, parameter in enumerate(inspect.signature(CALLABLES[name]).parameters.values()):
        value = VALUES[choose(len(VALUES))]
        is_required = parameter.default is parameter.empty or parameter.name == "model"
        if name in MEASURING and parameter.name == "model" and value is None:
            value = "nope"
        if parameter.kind is parameter.VAR_POSITIONAL:
            positional += [value] * choose(3)
        elif parameter.kind is parameter.VAR_KEYWORD:
            keywords.update({"nonsense": value} if choose(2) else {})
        elif is_required or choose(2):
            if parameter.kind is parameter.KEYWORD_ONLY or len(positional) < index:
                keywords[parameter.name] = value
            else:
                positional.append(value)
    return positional, keywords


class ProcessState(NamedTuple):
    """State of the process that a failed call must not change."""

    requested: str
    loaded: list[tuple[str, str]]
    environment: dict[str, str]
    threads: int
    gradients: bool


def read_state():
    """Return the current state of the process."""
    return ProcessState(
        SESSION.device().requested,
        [(model.name, model.device) for model in SESSION.inventory()],
        {name: value for name, value in os.environ.items() if name.startswith(VARIABLE_PREFIXES)},
        torch.get_num_threads(),
        torch.is_grad_enabled(),
    )


def assert_unchanged(before):
    """Check that a failed call left the state unchanged, except for additional loaded models, which are kept on purpose."""
    after = read_state()
    assert after._replace(loaded=before.loaded) == before
    assert after.loaded[: len(before.loaded)] == before.loaded


def call_and_check(name, positional, keywords):
    """Call a public callable, and fail if it raises an unexpected error."""
    before = read_state()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            result = CALLABLES[name](*positional, **keywords)
            with result if hasattr(type(result), "__enter__") else contextlib.nullcontext():
                pass
        except OpenMedError:
            assert_unchanged(before)
        except TypeError as error:
            is_internal = error.__traceback__.tb_next is not None and "unexpected keyword argument" not in str(error)
            if is_internal and "torch/nn/modules" not in traceback.extract_tb(error.__traceback__)[-1].filename:
                raise  # Raised neither for the signature nor by a user model.
        except RuntimeError as error:
            if str(error) != USER_ERROR:
                raise


@pytest.fixture(scope="module", autouse=True)
def empty_working_directory(tmp_path_factory):
    """Empty working directory, because some functions write to paths in their arguments."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("here"))
        yield


@given(st.data())
def test_random_call_raises_no_unexpected_error(data):
    name = data.draw(st.sampled_from(sorted(CALLABLES)))
    call_and_check(name, *choose_arguments(name, lambda count: data.draw(st.integers(0, count - 1))))


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
    ],
)
def test_invalid_arguments_raise_an_openmed_error(name, arguments):
    """Regression: these calls raised built-in errors."""
    with pytest.raises(OpenMedError):
        CALLABLES[name](*arguments)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CALLABLES))
@given(data=st.data())
def test_random_arguments_raise_no_unexpected_error(name, data):
    call_and_check(name, *choose_arguments(name, lambda count: data.draw(st.integers(0, count - 1))))


@pytest.mark.parametrize("value", ["nope", -1, float("nan"), torch.ones(2, 3), None])
def test_flags_are_checked_before_models_are_loaded(value, tmp_path):
    calls = (
        lambda: nb.runbook.parity("bundled_small", ["She has asthma."], gradients=value),
        lambda: nb.handoff(tmp_path / "bundle", copy_dataset=value),
        lambda: nb.handoff(tmp_path / "bundle", copy_model=value),
        lambda: nb.annotate(["She has asthma."], "bundled_small", progress=value),
        lambda: nb.annotate(["She has asthma."], "bundled_small", show_text=value),
        lambda: nb.runbook.profile("bundled_small", signposts=value),
        lambda: nb.logbook(applications=value),
        lambda: nb.panel(show_text=value),
        lambda: nb.training.EpochHooks(live=value),
    )
    before = read_state()
    for call in calls:
        with pytest.raises(OpenMedError, match="Pass True or False"):
            call()
    assert read_state() == before
