"""No message, log record or report quotes an argument that may hold text of a note."""

from __future__ import annotations

import contextlib
import inspect
import io
import itertools
import json
import logging
import pickle
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
from openmed_nb.annotation.masking import MaskedText, MaskedTexts
from openmed_nb.annotation.results import AnnotatedText, Annotations, Summary
from openmed_nb.errors import OpenMedError
from openmed_nb.session import SESSION

pytestmark = [pytest.mark.real_computer, pytest.mark.usefixtures("quick_collection")]

TEXTS = ["She has asthma."]


class ShowsNote:
    """An object whose text and representation are part of a note."""

    def __repr__(self) -> str:
        return SENTENCE


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


VALUES: dict[str, Callable[[], Any]] = {
    "sentence": lambda: SENTENCE,
    "long word": lambda: LONG_WORD,
    "list": lambda: [SENTENCE],
    "list of lists": lambda: [[SENTENCE]],
    "tuple": lambda: (SENTENCE,),
    "set": lambda: {SENTENCE},
    "dict key": lambda: {SENTENCE: 1},
    "dict value": lambda: {"text": SENTENCE},
    "list of dicts": lambda: [{"text": SENTENCE, "start": SENTENCE, SENTENCE: 1}],
    "path": lambda: Path(SENTENCE),
    "file": make_file,
    "file name": lambda: str(make_file()),
    "folder": make_folder,
    "file below a file": lambda: make_file() / SENTENCE,
    "bytes": SENTENCE.encode,
    "object": ShowsNote,
    "list of objects": lambda: [ShowsNote()],
    "exception": lambda: ValueError(SENTENCE),
    "class": lambda: type(SENTENCE, (), {}),
    "instance": type(SENTENCE, (), {}),  # The class creates it.
    "object array": lambda: np.array([SENTENCE, None], object),
    "text array": lambda: np.array([SENTENCE]),
    "text scalar": lambda: np.str_(SENTENCE),
    "series": lambda: pd.Series([SENTENCE]),
    "frame": lambda: pd.DataFrame({SENTENCE: [SENTENCE]}),
    "generator": lambda: (text for text in [SENTENCE]),
    "failing generator": yield_then_raise,
    "failing function": lambda: raise_note,
    "function": lambda: lambda *_arguments, **_options: SENTENCE,
    "text with a null": lambda: f"{SENTENCE}\0",
    "text with a lone surrogate": lambda: f"{SENTENCE} \ud800",
    "very long text": lambda: f"{SENTENCE} " * 500,
}  # fmt: skip
"""Values that contain part of a note, created for each call."""

FAILING = {"failing generator", "failing function", "exception"}
"""Values that raise an error of the user, which quotes the note itself: only our own messages are checked."""

OPTIONS_OF_LOADING = (
    "aggregation_strategy", "ignore_labels", "stride", "batch_tokens", "revision", "dtype", "local_only",
    "cache_dir", "token", "hf_token", "quantize", "device", "batch_size", "remote_code_allowed", "allow_pickle",
    "default_org", "trust_remote_code",
)  # fmt: skip

OPTIONS: dict[str, tuple[str, ...]] = {
    "annotate": OPTIONS_OF_LOADING,
    "load_model": OPTIONS_OF_LOADING,
    "load_pipeline": OPTIONS_OF_LOADING,
    "pipeline.__call__": ("aggregation_strategy", "ignore_labels", "stride", "batch_tokens", "batch_size", "num_workers",
                          "offset_mapping", "is_split_into_words", "delimiter"),
    "training.adamw": ("lr", "betas", "eps", "weight_decay", "fused", "foreach"),
    "epochs": ("every_n_steps", "live", "release_when"),
    "training.callback": ("every_n_steps", "live", "release_when"),
    "runbook.gates": ("speedup", "utilization", "entity_agreement", "hours"),
    "runbook.parity": ("revision", "dtype", "aggregation_strategy", "cache_dir"),
    "runbook.profile": ("revision", "length"),
    "sweep": ("revision", "length"),
    "compare": ("revision", "batch_tokens"),
    "handoff": ("revision", "length"),
    "compat.loader.load_model": OPTIONS_OF_LOADING,
    "compat.loader.create_pipeline": OPTIONS_OF_LOADING,
}  # fmt: skip
"""Names of keyword arguments that a signature takes with ``**``."""

BY_DESIGN = {
    ("logbook", "hypotheses"), ("handoff", "owner"), ("device", "source"), ("use", "source"),
}  # fmt: skip
"""Arguments that are written by the user to be shown in a report."""


def a_batch(_batch: Any = None) -> torch.Tensor:
    """Do a step of training that does nothing."""
    return torch.zeros(1)


def some_parameters() -> list[torch.nn.Parameter]:
    """Return one parameter to optimize."""
    return [torch.nn.Parameter(torch.zeros(1))]


NUMBERS = itertools.count()

VALID: dict[str, dict[str, Callable[[], Any]]] = {
    "": {"model": lambda: "bundled_small", "device": lambda: "cpu", "texts": TEXTS.copy, "progress": lambda: False},
    "annotate": {"texts": TEXTS.copy},
    # The number of workers on this machine is refused together with hosts, before a process starts.
    "cluster": {"n": lambda: 1, "hosts": lambda: ["127.0.0.1"]},
    "compare": {"data": lambda: TEXTS * 4, "seconds": lambda: 0.01},
    "compat.MpsTuning": {"env": dict},
    "compat.refine_spans": {"text": lambda: TEXTS[0], "entities": list},
    "epochs": {"epochs": lambda: 1},
    "handoff": {"folder": lambda: f"bundle_{next(NUMBERS)}", "dataset": lambda: TEXTS * 4},
    "report": {"folder": lambda: "report", "quick": lambda: None},
    "runbook.forecast": {"model": lambda: torch.nn.Linear(2, 2), "example_inputs": lambda: torch.zeros(1, 2)},
    "runbook.bring_up": {"seconds": lambda: 0.01, "folder": lambda: f"bring_up_{next(NUMBERS)}"},
    "runbook.loss_parity": {"steps": lambda: 1},
    "runbook.profile": {"data": lambda: TEXTS * 4, "steps": lambda: 1},
    "sweep": {"data": lambda: TEXTS * 4, "seconds": lambda: 0.01, "max_batch_size": lambda: 1},
    "training.GradientAccumulation": {"optimizer": lambda: torch.optim.SGD(some_parameters(), 0.1), "steps": lambda: 1},
    "training.MemoryCurve": {"device": lambda: "cpu"},
    "training.MemorySample": {"epoch": lambda: 1, "step": lambda: 1, "seconds": lambda: 1.0},
    "training.adamw": {"parameters": some_parameters},
    "training.arguments": {"library": lambda: "trainer"},
    "training.callback": {"library": lambda: "trainer"},
    "training.checkpoint_activations": {
        "model": lambda: nb.load_model("bundled_small", device="cpu")["model"],
    },
    "training.limit_memory": {"fraction": lambda: 0.5},
    "training.loader.settings": {"dataset": lambda: [1, 2]},
    "training.to_device": {"thing": lambda: torch.zeros(1)},
    "use": {"device": lambda: "cpu"},
    "pipeline.__call__": {"inputs": lambda: TEXTS[0]},
    "annotations.show": {"number": lambda: 0},
    "annotations.export": {"format": lambda: "doccano", "path": lambda: f"export_{next(NUMBERS)}"},
    "annotations.save": {"path": lambda: f"saved_{next(NUMBERS)}.csv"},
    "annotations.review": {"path": lambda: None, "sample": lambda: 1},
    "review.mark": {"note": lambda: 0, "start": lambda: 0, "end": lambda: 3, "label": lambda: "DISEASE"},
    "review.finish": {"note": lambda: 0},
    "annotations.score": {"gold": lambda: [[], []]},
}  # fmt: skip
"""Valid values by callable and parameter; those of the empty name are for every callable with such a parameter."""

MEASURING = {
    "compare", "handoff", "sweep", "runbook.loss_parity", "runbook.parity", "runbook.profile",
    "runbook.validate_precision", "runbook.forecast", "doctor", "runbook.fallbacks", "logbook", "runbook.bring_up",
}  # fmt: skip
"""Functions that take a second or more when they accept a value."""


class Target(NamedTuple):
    """Something to call, and its parameters."""

    name: str
    function: Callable[..., Any]
    parameters: tuple[inspect.Parameter, ...]


def parameters_of(name: str, function: Callable[..., Any]) -> tuple[inspect.Parameter, ...]:
    """Return the parameters of a callable, those of ``OPTIONS`` included."""
    declared = list(inspect.signature(function).parameters.values())
    known = {parameter.name for parameter in declared}
    options = [
        inspect.Parameter(option, inspect.Parameter.KEYWORD_ONLY, default=None)
        for option in OPTIONS.get(name, ())
        if option not in known
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
    valid = {**VALID[""], **VALID.get(target.name, {})}
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
        elif parameter.name in valid:
            chosen = valid[parameter.name]()
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


def printed_chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the errors that a traceback prints before an error."""
    seen = {id(error)}
    current: BaseException | None = error
    while current is not None:
        shown = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
        if shown is None or id(shown) in seen:
            return
        seen.add(id(shown))
        yield shown
        current = shown


SIGNATURE = re.compile(r"unexpected keyword argument|multiple values for|takes no arguments|positional arguments? but")


def is_own_signature_error(error: BaseException) -> bool:
    """Return whether Python refused the signature of a call, which quotes only names in code of the user."""
    return type(error) is TypeError and SIGNATURE.search(str(error)) is not None


NAMED = ("class", "instance")
"""Kinds of values whose class has the planted text as its name."""


def places_in_error(error: BaseException, kind: str) -> Iterator[tuple[str, str]]:
    """Yield all displayed and stored texts of an error, each with its location."""
    if is_own_signature_error(error):
        return
    ours = isinstance(error, OpenMedError)
    if kind in FAILING and not ours:
        return  # The error is the user's own.
    if kind in NAMED and not ours:
        return  # Python's own errors have the name of a class, which is the user's code and not a note.
    yield "str", f"{type(error).__name__}: {error}"
    yield "repr", repr(error)
    yield "args", repr(error.args)
    yield "attributes", repr(vars(error))
    if ours:
        yield "traceback of IPython", "\n".join(error._render_traceback_())
        yield "to_dict", json.dumps(error.to_dict(), ensure_ascii=False)
    if kind in NAMED:
        return
    with contextlib.suppress(pickle.PicklingError, TypeError, AttributeError, RuntimeError):
        yield "pickle", re.sub(rb"[^ -~]+", b" ", pickle.dumps(error)).decode("ascii")
    if kind in FAILING or kind in NAMED:
        return
    for shown in printed_chain(error):
        if is_own_signature_error(shown):
            continue
        yield f"chain ({type(shown).__name__})", "".join(traceback.format_exception_only(shown))
        yield f"args of chain ({type(shown).__name__})", repr(shown.args)


def places_in_result(target: Target, argument: str, result: Any) -> Iterator[tuple[str, str]]:
    """Yield what a report shows; results that show an annotated text, and what the user built, are left out."""
    texts = (AnnotatedText, Annotations, MaskedText, MaskedTexts, Summary)
    if isinstance(result, Annotations):
        yield "errors of texts", repr(dict(result.errors))
    if inspect.isclass(target.function) or isinstance(result, texts) or (target.name, argument) in BY_DESIGN:
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


def call_with(target: Target, parameter: inspect.Parameter, kind: str, value: Any, log: Any) -> list[str]:
    """Call a target with one planted value, and return every place that quotes it."""
    positional, named = planned_call(target, parameter, value)
    places: list[tuple[str, str]] = []
    events: list[Any] = []
    output = io.StringIO()
    stop_listening = SESSION.subscribe(events.append)
    log.clear()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            try:
                result = target.function(*positional, **named)
                use_result(result)
                places.extend(places_in_result(target, parameter.name, result))
            except (Exception, SystemExit) as error:  # noqa: BLE001 - which class it may be, another test states
                places.extend(places_in_error(error, kind))
                places.append(("output", output.getvalue()))
    stop_listening()
    if kind not in FAILING:
        places.extend(("warning", str(warning.message)) for warning in warned)
    places.extend(places_in_log(log))
    places.extend(("progress", str(event)) for event in events if event is not None)
    return find_leaks(f"{target.name}({parameter}) with {kind}", places)


def check_planted_calls(targets: list[Target], kinds: Callable[[Target, int], list[str]], log: Any) -> None:
    """Plant values in every argument, and fail with all leaks at once.

    Args:
        targets: What is called.
        kinds: Returns the kinds of values for the argument with that number.
        log: The captured log.
    """
    leaks: list[str] = []
    for target in targets:
        for number, parameter in enumerate(target.parameters):
            for kind in kinds(target, number):
                value = VALUES[kind]()
                if parameter.kind is parameter.VAR_KEYWORD:
                    value = value if isinstance(value, dict) else {SENTENCE: value}
                leaks.extend(call_with(target, parameter, kind, value, log))
                SESSION.end_simulation()
                nb.reset()
    assert not leaks, "\n".join(leaks)


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


SOME_KINDS = ("long word", "list", "dict key", "object", "file", "instance", "path")
UNREADABLE = ["list of dicts", "text with a lone surrogate", "failing generator"]


def few_kinds(target: Target, number: int) -> list[str]:
    """Return the kinds of the fast suite: the sentence, and one other kind by argument number."""
    if target.name in {"cluster", "report", "runbook.bring_up"}:
        return []
    if target.name in MEASURING:
        return ["sentence"] if target.parameters[number].name != "progress" else []
    texts = UNREADABLE if target.parameters[number].name in {"texts", "inputs"} else []
    return ["sentence", SOME_KINDS[number % len(SOME_KINDS)], *texts]


REFUSED_AT_ONCE = ["file", "file name", "file below a file", "text with a null", "object", "bytes", "list", "class"]


def all_kinds(target: Target, number: int) -> list[str]:
    """Return all kinds that a target answers in a reasonable time."""
    if (target.name, target.parameters[number].name) in {("report", "folder"), ("runbook.bring_up", "texts")}:
        return REFUSED_AT_ONCE
    return list(VALUES)


def test_errors_do_not_quote_arguments(targets, log):
    """No error, warning, log record or report quotes a planted value: some kinds of values."""
    check_planted_calls(targets, few_kinds, log)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_errors_do_not_quote_any_argument(targets, log):
    """No error, warning, log record or report quotes a planted value: all kinds of values."""
    process_starting = [
        Target(name, getattr(nb, name), parameters_of(name, getattr(nb, name))) for name in ("cluster", "report")
    ]
    check_planted_calls([*targets, *process_starting], all_kinds, log)


COMMANDS = [
    [SENTENCE], [LONG_WORD], ["--device", SENTENCE], ["--device", LONG_WORD], ["--model", SENTENCE],
    ["--model", LONG_WORD], [f"--{SENTENCE}"], [f"--{LONG_WORD}"], ["--json", SENTENCE], [SENTENCE, SENTENCE],
    [f"--json={SENTENCE}"], ["FILE"], ["FILE", "--device", "nope"], ["FOLDER"], ["--model", "FOLDER"], ["--model", "FILE"],
    ["doctor", SENTENCE], ["doctor", "FOLDER"], ["doctor", "--ops", SENTENCE], ["doctor", "--ops", "FOLDER"],
    ["doctor", f"--{SENTENCE}"], ["doctor", "x", SENTENCE], ["doctor", "x", "--ops", SENTENCE],
    ["report", "FILE"], ["report", f"--{LONG_WORD}"], ["report", "x", SENTENCE], ["report", f"FILE/{SENTENCE}"],
    ["bring-up", SENTENCE], ["bring-up", "FOLDER"], ["bring-up", "--device", SENTENCE], ["bring-up", "--folder", "FILE"],
    ["bring-up", "--seconds", SENTENCE], ["bring-up", f"--{SENTENCE}"], ["bring-up", "x", SENTENCE],
    ["bring-up", f"--seconds={LONG_WORD}"], ["data", SENTENCE], ["data", f"--{SENTENCE}"],
]  # fmt: skip
"""Command lines that fail, with a note as each of their arguments."""


def test_command_line_does_not_quote_arguments(capsys, in_a_folder, log):  # noqa: ARG001
    """No command quotes a planted value that it refuses."""
    leaks = []
    for command in COMMANDS:
        names = {"FILE": str(make_file()), "FOLDER": str(make_folder())}
        arguments = [re.sub("FILE|FOLDER", lambda match: names[match[0]], word) for word in command]  # noqa: B023
        log.clear()
        status: Any = None
        try:
            status = main(arguments)
        except SystemExit as left:
            status = left.code
        printed = capsys.readouterr()
        shown = printed.err if status == 0 else printed.out + printed.err
        leaks += find_leaks(" ".join(command), [("output", shown), *places_in_log(log)])
    assert not leaks, "\n".join(leaks)
