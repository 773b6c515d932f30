"""Completion of the magics' values and flags, also behind an assignment such as ``choice = %openmed_device ``."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from IPython import get_ipython
from IPython.core.completer import CompletionContext, SimpleCompletion, context_matcher

from ..devices.request import SPELLINGS
from ..models.config import STRATEGIES
from .magics import (
    DEVICE_FLAGS,
    DOCTOR_FLAGS,
    LOG_FLAGS,
    NER_FLAGS,
    PANEL_FLAGS,
    RELEASE_FLAGS,
    SIMULATIONS,
    SWEEP_FLAGS,
)

LINE = re.compile(
    r"^\s*(?:[^=%]+=\s*)?%{1,2}(?P<magic>openmed_(?:device|doctor|log|ner|panel|release|sweep))\s(?P<before>.*?)(?P<word>\S*)$"
)

DEVICES = tuple(spelling for spelling in SPELLINGS if spelling not in ("cuda:N", "default", "mps:0"))


def model_names() -> tuple[str, ...]:
    """Return the names that need no long search: the bundled models and the table of aliases."""
    from ..models.registry import ALIASES, BUNDLED

    return (*BUNDLED, *ALIASES)


def variable_names() -> tuple[str, ...]:
    """Return the variables of the notebook that a person made, in alphabetical order."""
    shell = get_ipython()
    names = () if shell is None else (name for name in shell.user_ns if name not in shell.user_ns_hidden)
    return tuple(sorted(name for name in names if not name.startswith("_")))


def json_files() -> tuple[str, ...]:
    """Return the ``.json`` files of the folder in which Python runs, in alphabetical order."""
    return tuple(sorted(path.name for path in Path().glob("*.json")))


VALUES: dict[str, Callable[[], tuple[str, ...]]] = {
    "--diff": json_files,
    "--model": model_names,
    "--ops": lambda: (*model_names(), *variable_names()),
    "--strategy": lambda: STRATEGIES,
    "--device": lambda: DEVICES,
    "--out": tuple,
    "--simulate": lambda: SIMULATIONS,
    "--largest": tuple,
    "--length": tuple,
    "--memory": tuple,
}


OFFERS: dict[str, Callable[[list[str]], tuple[str, ...]]] = {
    "openmed_device": lambda words: (*DEVICE_FLAGS, *(() if words else DEVICES)),
    "openmed_doctor": lambda words: (*DOCTOR_FLAGS, *(() if words else (*model_names(), *variable_names()))),
    "openmed_log": lambda words: (*LOG_FLAGS, *(() if words else json_files())),
    "openmed_ner": lambda _words: NER_FLAGS,
    "openmed_panel": lambda _words: PANEL_FLAGS,
    "openmed_release": lambda _words: (*RELEASE_FLAGS, *variable_names()),
    "openmed_sweep": lambda words: (*SWEEP_FLAGS, *(() if words else (*model_names(), *variable_names()))),
}
"""What each magic offers behind the words that stand there, where the last of them wants no value."""


def candidates(line: str) -> tuple[str, ...] | None:
    """Return what could stand at the end of a line, ``None`` where the line is no magic of ours.

    Example:
        >>> candidates("choice = %openmed_device m"), candidates("%macro m")
        (('mps',), None)
    """
    match = LINE.match(line)
    if match is None:
        return None
    words = match["before"].split()
    previous = words[-1] if words else ""
    offered = VALUES[previous]() if previous in VALUES else OFFERS[match["magic"]](words)
    wanted = offered if match["word"] else tuple(one for one in offered if not one.startswith("--")) or offered
    return tuple(one for one in wanted if one.startswith(match["word"]) and one not in words)


@context_matcher(identifier="openmed_nb.magics")
def openmed_matcher(context: CompletionContext) -> dict[str, Any]:
    """Offer the values and flags of our magics to IPython's completer, and nothing beside them."""
    found = candidates(context.line_with_cursor[: context.cursor_position])
    completions = [SimpleCompletion(text=text, type="param") for text in found or ()]
    return {"completions": completions, "suppress": found is not None, "do_not_suppress": set()}
