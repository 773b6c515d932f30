"""Public functions, called with values that users pass by mistake or that contain part of a note.

A call returns a result, or raises an ``OpenMedError`` or a ``TypeError`` for its signature. After an error, the session is
unchanged. No error, warning, log record, progress event or report quotes the note.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import itertools
import json
import logging
import math
import os
import re
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest
import torch

import openmed_nb as nb
from helpers.leaks import LONG_WORD, SENTENCE, find_leaks
from helpers.public_api import CALLABLES
from openmed_nb.__main__ import main
from openmed_nb._render.display import Displayable
from openmed_nb.annotation.annotated_notes import Summary
from openmed_nb.annotation.masking import MaskedText, MaskedTexts
from openmed_nb.annotation.results import AnnotatedText, Annotations
from openmed_nb.errors import OpenMedError
from openmed_nb.session import SESSION

pytestmark = pytest.mark.real_computer

TEXTS = ["She has asthma."]
USER_ERROR = "error in a user object"


class NoteObject:
    """User object whose representation is part of a note."""

    def __repr__(self) -> str:
        return SENTENCE


class RaisingObject:
    """User object that raises on any access."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(USER_ERROR)

    def __len__(self) -> int:
        raise RuntimeError(USER_ERROR)

    def __iter__(self) -> Iterator[Any]:
        raise RuntimeError(USER_ERROR)


def raise_note(*_arguments: Any, **_options: Any) -> Any:
    """Fail as a function of the user may, with part of a note in the message."""
    raise ValueError(SENTENCE)


def yield_then_raise() -> Iterator[str]:
    """Yield a text, and then fail with part of a note in the message."""
    yield SENTENCE
    raise_note()


def make_file() -> Path:
    """Return a file whose name and content are part of a note."""
    file = Path(f"{SENTENCE}.json")
    file.write_text(json.dumps({SENTENCE: SENTENCE}), "utf-8")
    return file


def make_folder() -> Path:
    """Return an empty folder whose name is part of a note."""
    folder = Path(f"{SENTENCE} folder")
    folder.mkdir(exist_ok=True)
    return folder


# Values that contain part of a note. A function creates the value for each call.
NOTES: dict[str, Any] = {
    "sentence": SENTENCE,
    "long word": LONG_WORD,
    "list": [SENTENCE],
    "list of lists": [[SENTENCE]],
    "set": {SENTENCE},
    "dict key": {SENTENCE: 1},
    "dict value": {"text": SENTENCE},
    "list of dicts": [{"text": SENTENCE, "start": SENTENCE, SENTENCE: 1}],
    "path": Path(SENTENCE),
    "file": make_file,
    "file name": lambda: str(make_file()),
    "folder": make_folder,
    "file below a file": lambda: make_file() / SENTENCE,
    "bytes": SENTENCE.encode,
    "object": NoteObject,
    "list of objects": [NoteObject()],
    "exception": ValueError(SENTENCE),
    "class": lambda: type(SENTENCE, (), {}),
    "object array": np.array([SENTENCE, None], object),
    "text array": np.array([SENTENCE]),
    "series": pd.Series([SENTENCE]),
    "frame": pd.DataFrame({SENTENCE: [SENTENCE]}),
    "generator": lambda: (text for text in [SENTENCE]),
    "failing generator": yield_then_raise,
    "failing function": lambda: raise_note,
    "function": lambda: lambda *_arguments, **_options: SENTENCE,
    "text with a null": f"{SENTENCE}\0",
    "text with a lone surrogate": f"{SENTENCE} \ud800",
    "very long text": f"{SENTENCE} " * 500,
}
MISTAKES: dict[str, Any] = {
    repr(value): value
    for value in (
        None, True, 0, -1, 10**30, 0.5, math.nan, math.inf, 1j, "", "cpu", "nope", "~nobody/x", [], [None], ["x", 1], (), {1: None},
        range(3), ..., torch.float16, torch.device("cpu"), torch.zeros(0), pytest, SESSION,
    )
} | {
    "raising object": RaisingObject, "tensor": torch.ones(2, 3), "model": lambda: torch.nn.Linear(2, 2), "iterator": lambda: iter([1]),
}  # fmt: skip
VALUES = {**NOTES, **MISTAKES}


def create(value: Any) -> Any:
    """Return a value, or the result of the function that creates it."""
    return value() if callable(value) else value


# Names of keyword arguments that a signature takes with ``**``.
OPTIONS_OF_LOADING = (
    "aggregation_strategy", "ignore_labels", "stride", "batch_tokens", "revision", "dtype", "local_only",
    "cache_dir", "token", "hf_token", "quantize", "device", "batch_size", "remote_code_allowed", "allow_pickle",
    "default_org", "trust_remote_code",
)  # fmt: skip

OPTIONS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("annotate", "load_model", "load_pipeline"), OPTIONS_OF_LOADING),
    **dict.fromkeys(("compat.loader.load_model", "compat.loader.create_pipeline"), OPTIONS_OF_LOADING),
    "pipeline.__call__": ("aggregation_strategy", "ignore_labels", "batch_tokens", "batch_size", "offset_mapping"),
    "training.adamw": ("lr", "betas", "weight_decay", "fused"),
    "runbook.gates": ("speedup", "utilization", "entity_agreement", "hours"),
    "runbook.parity": ("revision", "dtype", "aggregation_strategy", "cache_dir"),
    **dict.fromkeys(("runbook.profile", "sweep", "compare", "handoff"), ("revision", "batch_tokens")),
}  # fmt: skip

# Arguments that the user writes to be shown in a report.
SHOWN = {
    ("logbook", "hypotheses"),
    ("handoff", "owner"),
    ("handoff", "folder"),
    ("runbook.bring_up", "model"),
    ("device", "source"),
    ("use", "source"),
}


def some_parameters() -> list[torch.nn.Parameter]:
    """Return one parameter to optimize."""
    return [torch.nn.Parameter(torch.zeros(1))]


NUMBERS = itertools.count()

# Valid values by parameter, and those of single targets. A function creates the value for each call.
VALID: dict[str, Any] = {
    "data": TEXTS * 4,
    "dataset": TEXTS * 4,
    "device": "cpu",
    "end": 3,
    "entities": [],
    "env": {},
    "epoch": 1,
    "epochs": 1,
    "example_inputs": torch.zeros(1, 2),
    "folder": lambda: f"folder_{next(NUMBERS)}",
    "format": "doccano",
    "fraction": 0.5,
    "gold": [[], []],
    # The number of workers on this machine is rejected together with hosts, before a process starts.
    "hosts": ["127.0.0.1"],
    "inputs": TEXTS[0],
    "label": "DISEASE",
    "library": "trainer",
    "max_batch_size": 1,
    "model": "bundled_small",
    "n": 1,
    "note": 0,
    "number": 0,
    "optimizer": lambda: torch.optim.SGD(some_parameters(), 0.1),
    "parameters": some_parameters,
    "path": lambda: f"saved_{next(NUMBERS)}.csv",
    "progress": False,
    "seconds": 0.01,
    "start": 0,
    "step": 1,
    "steps": 1,
    "text": TEXTS[0],
    "texts": TEXTS,
    "thing": torch.zeros(1),
}
VALID_IN: dict[tuple[str, str], Any] = {
    ("annotations.export", "path"): lambda: f"export_{next(NUMBERS)}",
    ("annotations.review", "path"): None,
    ("report", "quick"): None,
    ("runbook.forecast", "model"): lambda: torch.nn.Linear(2, 2),
    ("runbook.parity", "gold"): None,
    ("runbook.validate_precision", "gold"): None,
    ("training.checkpoint_activations", "model"): lambda: torch.nn.Sequential(
        torch.nn.Sequential(torch.nn.Linear(2, 2)), torch.nn.Linear(2, 2)
    ),
}

# Functions that take a second or more when they accept a value.
MEASURING = {
    "compare", "handoff", "sweep", "runbook.loss_parity", "runbook.parity", "runbook.profile",
    "runbook.validate_precision", "runbook.forecast", "doctor", "runbook.fallbacks", "logbook", "runbook.bring_up",
}  # fmt: skip


class Target(NamedTuple):
    """Something to call, and its parameters."""

    name: str
    function: Callable[..., Any]
    parameters: tuple[inspect.Parameter, ...]


def parameters_of(name: str, function: Callable[..., Any]) -> tuple[inspect.Parameter, ...]:
    """Return the parameters of a callable, with those of ``OPTIONS``."""
    declared = list(inspect.signature(function).parameters.values())
    names = {parameter.name for parameter in declared}
    options = [
        inspect.Parameter(option, inspect.Parameter.KEYWORD_ONLY, default=None)
        for option in OPTIONS.get(name, ())
        if option not in names
    ]
    return (*declared, *options)


def public_methods(name: str, instance: Any) -> Iterator[Target]:
    """Yield the public methods of an object that are written in this package."""
    for method in sorted(set(dir(type(instance))) | {"__getitem__", "__call__"}):
        if method.startswith("_") and method not in {"__getitem__", "__call__", "__contains__"}:
            continue
        function = getattr(instance, method, None)
        if callable(function) and "openmed_nb" in (getattr(function, "__module__", None) or ""):
            yield Target(f"{name}.{method}", function, parameters_of(f"{name}.{method}", function))


def all_targets(functions: dict[str, Callable[..., Any]]) -> list[Target]:
    """Return all public functions and classes, and the public methods of what they return."""
    targets = [Target(name, function, parameters_of(name, function)) for name, function in sorted(functions.items())]
    found = nb.annotate(TEXTS * 2, "bundled_small", device="cpu", progress=False)
    pipeline = nb.load_pipeline("bundled_small", device="cpu")
    book = nb.logbook()
    instances = {
        "annotations": found,
        "annotated": found.show(0),
        "summary": found.summary(),
        "pages": found.show(),
        "scores": found.score([[], []]),
        "review": found.review("review.jsonl"),
        "masked": found.show(0).mask(),
        "masked_texts": found.mask(),
        "logbook_result": book,
        "verdict_result": nb.verdict(),
        "guards": nb.Guards(),
        "hooks": nb.training.EpochHooks("cpu"),
        "epochs_result": nb.epochs(1, "cpu"),
        "accumulation": nb.training.GradientAccumulation(torch.optim.SGD(some_parameters(), 0.1), 1),
        "curve": nb.training.MemoryCurve("cpu"),
        "compat.loader": nb.compat.ModelLoader(),
    }
    for name, instance in instances.items():
        targets.extend(public_methods(name, instance))
    call = inspect.Parameter("inputs", inspect.Parameter.POSITIONAL_ONLY)
    options = inspect.signature(pipeline.__call__).parameters.values()
    rest = [option for option in options if option.kind is option.VAR_KEYWORD]
    names = OPTIONS["pipeline.__call__"]
    keywords = [inspect.Parameter(option, inspect.Parameter.KEYWORD_ONLY, default=None) for option in names]
    targets.append(Target("pipeline.__call__", pipeline, (call, *keywords, *rest)))
    batch_tokens = inspect.Parameter("tokens", inspect.Parameter.POSITIONAL_ONLY)
    targets.append(
        Target("pipeline.batch_tokens", lambda tokens: setattr(pipeline, "batch_tokens", tokens), (batch_tokens,))
    )
    targets.append(Target("pipeline.device", lambda tokens: setattr(pipeline, "device", tokens), (batch_tokens,)))
    return targets


def planned_call(target: Target, planted: inspect.Parameter, value: Any) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of a call with one planted value; the others are valid, or left out."""
    positional: list[Any] = []
    named: dict[str, Any] = {}
    options = OPTIONS.get(target.name, ())
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    for parameter in target.parameters:
        if parameter.name == planted.name:
            chosen = value
        elif parameter.name in options or parameter.kind in variable:
            continue
        elif (target.name, parameter.name) in VALID_IN:
            chosen = create(VALID_IN[target.name, parameter.name])
        elif parameter.name in VALID:
            chosen = create(VALID[parameter.name])
        elif parameter.default is parameter.empty:
            chosen = None
        else:
            continue
        if parameter.kind in by_position:
            positional.append(chosen)
        elif parameter.kind is parameter.VAR_KEYWORD:
            named.update(chosen)
        else:
            named[parameter.name] = chosen
    if planted.kind is planted.VAR_POSITIONAL:
        # The parameters before it are passed by position too.
        before = itertools.takewhile(lambda parameter: parameter is not planted, target.parameters)
        leading = [named.pop(parameter.name) for parameter in before if parameter.name in named]
        positional = leading + positional
    return positional, named


def read_state() -> tuple[Any, ...]:
    """Return the state of the process that a failed call must not change. Other libraries set other variables on import."""
    prefixes = ("OPENMED_", "PYTORCH_ENABLE_MPS", "PYTORCH_MPS", "ACCELERATE_", "HF_")
    environment = {name: value for name, value in os.environ.items() if name.startswith(prefixes)}
    return SESSION.device().requested, environment, torch.get_num_threads(), torch.is_grad_enabled()


def is_expected(error: BaseException, target: Target) -> bool:
    """Return whether a call may raise an error. Methods of results raise built-in errors, such as an IndexError."""
    if isinstance(error, OpenMedError) or str(error) in {SENTENCE, USER_ERROR} or target.name not in CALLABLES:
        return True
    frames = traceback.extract_tb(error.__traceback__)
    is_own_signature = len(frames) == 1 or "keyword argument" in str(error)
    return isinstance(error, TypeError) and (is_own_signature or "torch/nn/modules" in frames[-1].filename)


def places_in_error(error: BaseException, kind: str) -> Iterator[tuple[str, str]]:
    """Yield all displayed and stored texts of an error, each with its location."""
    if isinstance(error, OpenMedError):
        yield "traceback of IPython", "\n".join(error._render_traceback_())
        yield "to_dict", json.dumps(error.to_dict(), ensure_ascii=False)
    elif str(error) == SENTENCE or "keyword argument" in str(error) or kind == "class":
        return  # An error of the user, or one of Python that quotes a name in code of the user.
    yield "repr", f"{error!r} {error.args!r}"
    yield "attributes", repr(vars(error))
    if kind not in {"failing generator", "failing function", "exception", "class"}:
        lines = traceback.format_exception(error, limit=0)
        yield "chain", "".join(line for line in lines if "keyword argument" not in line)


def places_in_result(target: Target, argument: str, result: Any) -> Iterator[tuple[str, str]]:
    """Yield the report of a result. Results that show an annotated text, and what the user built, are omitted."""
    texts = (AnnotatedText, Annotations, MaskedText, MaskedTexts, Summary)
    if isinstance(result, Annotations):
        yield "errors of texts", repr(dict(result.errors))
    if inspect.isclass(target.function) or isinstance(result, texts) or (target.name, argument) in SHOWN:
        return
    if isinstance(result, Displayable):
        yield "report", f"{result}\n{json.dumps(result.to_dict(), default=repr, ensure_ascii=False)}"


def use_result(result: Any) -> None:
    """Use a result as a cell would: iterate over epochs, enter a context."""
    if hasattr(type(result), "__enter__"):
        with result:
            pass
    elif type(result).__name__ == "Epochs":
        for _ in result:
            pass


def call_with(target: Target, parameter: inspect.Parameter, kind: str, log: Any) -> list[str]:
    """Call a target with one value, and return the unexpected errors and the places that quote the note."""
    value = create(VALUES[kind])
    if parameter.kind is parameter.VAR_KEYWORD and not isinstance(value, dict):
        value = {SENTENCE: value}
    positional, named = planned_call(target, parameter, value)
    call = f"{target.name}({parameter}) with {kind}"
    problems: list[str] = []
    places: list[tuple[str, str]] = []
    events: list[Any] = []
    output = io.StringIO()
    before = read_state()
    stop_listening = SESSION.subscribe(events.append)
    log.clear()
    with (
        warnings.catch_warnings(record=True) as caught,
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(output),
    ):
        warnings.simplefilter("always")
        try:
            result = target.function(*positional, **named)
            use_result(result)
            places.extend(places_in_result(target, parameter.name, result))
        except Exception as error:  # noqa: BLE001 - is_expected() checks its class
            if not is_expected(error, target):
                problems.append(f"{call}: {error!r}")
            if isinstance(error, OpenMedError) and read_state() != before:
                problems.append(f"{call}: the state changed")
            places.extend(places_in_error(error, kind))
            places.append(("output", output.getvalue()))
    stop_listening()
    if kind != "failing function":
        places.extend(("warning", str(warning.message)) for warning in caught)
    places.extend(places_in_log(log))
    places.extend(("progress", str(event)) for event in events if event is not None)
    SESSION.end_simulation()
    nb.reset()
    return problems + find_leaks(call, places)


@pytest.fixture
def log(caplog, monkeypatch):
    """The records of every logger, at every level."""
    for name in ("", "openmed_nb", "transformers"):
        caplog.set_level(logging.DEBUG, logger=name)
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    return caplog


def places_in_log(log: Any) -> Iterator[tuple[str, str]]:
    """Yield the messages of the log, with the errors that are logged."""
    for record in log.records:
        error = record.exc_info[1] if record.exc_info else None
        text = "" if error is None else "".join(traceback.format_exception_only(error))
        yield f"log of {record.name}", f"{record.getMessage()}{text}"


@pytest.fixture
def in_a_folder(tmp_path, monkeypatch):
    """Run in an empty folder, because some functions write files."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def targets(in_a_folder) -> list[Target]:  # noqa: ARG001 - the folder is for the files that are written
    """All public callables."""
    return all_targets(CALLABLES)


UNREADABLE = ["list of dicts", "text with a lone surrogate", "failing generator"]


def test_some_values_of_every_argument(targets, log):
    """Each argument is a sentence and one other value, and texts cannot be read."""
    rotation = itertools.cycle(VALUES)
    problems = []
    for target in targets:
        for parameter in target.parameters:
            kinds = ["sentence"]
            takes_seconds = (target.name == "handoff" and parameter.name != "model") or (
                (target.name, parameter.name) in {("runbook.bring_up", "arguments"), ("compare", "revision")}
            )
            if takes_seconds:
                kinds = []  # They accept a sentence.
            elif target.name not in MEASURING:
                kinds.append(next(rotation))
            if parameter.name in {"texts", "inputs"}:
                kinds += UNREADABLE
            for kind in kinds:
                problems += call_with(target, parameter, kind, log)
    assert not problems, "\n".join(problems)


REJECTED_AT_ONCE = ["file", "file name", "file below a file", "text with a null", "object", "bytes", "list", "class"]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_all_values_of_every_argument(targets, log):
    """Functions that measure get the mistakes as a model only, and those that start processes only values that they reject."""
    starting = [
        Target(name, getattr(nb, name), parameters_of(name, getattr(nb, name))) for name in ("cluster", "report")
    ]
    problems = []
    for target in [*targets, *starting]:
        for parameter in target.parameters:
            kinds = list(VALUES)
            if target.name in MEASURING:
                kinds = [*NOTES, "'nope'", "raising object", "tensor"] if parameter.name == "model" else list(NOTES)
            if (target.name, parameter.name) in {("report", "folder"), ("runbook.bring_up", "texts")}:
                kinds = REJECTED_AT_ONCE
            elif target.name in {"cluster", "report"}:
                kinds = list(NOTES)
            for kind in kinds:
                problems += call_with(target, parameter, kind, log)
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("compat.refine_spans", (None, [])),
        ("compat.refine_spans", ("asthma", None)),
        ("compat.refine_spans", ("asthma", {"start": 0})),
        ("compat.refine_spans", ("asthma", [{"entity_group": "DISEASE", "start": 0, "end": 6}])),
        ("compat.refine_spans", ("asthma", [{"entity": "DISEASE", "start": 0, "end": 7, "score": 0.9}])),
        ("epochs", (10**30,)),
    ],
)
def test_invalid_arguments_raise_an_openmed_error(name, arguments):
    """Regression: these calls raised built-in errors."""
    with pytest.raises(OpenMedError):
        CALLABLES[name](*arguments)


@pytest.mark.parametrize(
    "call",
    [
        lambda: nb.runbook.parity("bundled_small", TEXTS, gradients="nope"),
        lambda: nb.handoff("bundle", copy_dataset="nope"),
        lambda: nb.handoff("bundle", copy_model="nope"),
        lambda: nb.annotate(TEXTS, "bundled_small", progress="nope"),
        lambda: nb.annotate(TEXTS, "bundled_small", show_text="nope"),
        lambda: nb.runbook.profile("bundled_small", signposts="nope"),
        lambda: nb.logbook(applications="nope"),
        lambda: nb.panel(show_text="nope"),
    ],
)
def test_flags_are_checked_before_models_are_loaded(call, in_a_folder):  # noqa: ARG001
    SESSION.unload()
    with pytest.raises(OpenMedError, match="Pass True or False"):
        call()
    assert len(SESSION.inventory()) == 0


# Command lines that fail, with a note as each of their arguments.
COMMANDS = [
    ["NOTE"], ["WORD"], ["--device", "NOTE"], ["--model", "NOTE"], ["--model", "WORD"], ["--WORD"], ["--json", "NOTE"],
    ["NOTE", "NOTE"], ["--json=NOTE"], ["FILE", "--device", "nope"], ["FOLDER"], ["--model", "FOLDER"], ["--model", "FILE"],
    ["doctor", "NOTE"], ["doctor", "FOLDER"], ["doctor", "--NOTE"], ["doctor", "x", "NOTE"],
    ["report", "FILE"], ["report", "--WORD"], ["report", "x", "NOTE"], ["report", "FILE/NOTE"],
    ["bring-up", "NOTE"], ["bring-up", "FOLDER"], ["bring-up", "--WORD"], ["bring-up", "x", "NOTE"],
]  # fmt: skip


def test_command_line_does_not_quote_arguments(capsys, in_a_folder, log):  # noqa: ARG001
    leaks = []
    names = {"FILE": str(make_file()), "FOLDER": str(make_folder()), "NOTE": SENTENCE, "WORD": LONG_WORD}
    for command in COMMANDS:
        arguments = [re.sub("FILE|FOLDER|NOTE|WORD", lambda match: names[match[0]], word) for word in command]
        log.clear()
        with contextlib.suppress(SystemExit):
            assert main(arguments) != 0, command
        printed = capsys.readouterr()
        leaks += find_leaks(" ".join(command), [("output", printed.out + printed.err), *places_in_log(log)])
    assert not leaks, "\n".join(leaks)
