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
from .magics import SIMULATIONS, OpenMedMagics

LINE = re.compile(
    r"^\s*(?:[^=%]+=\s*)?%{1,2}(?P<magic>openmed_(?:device|doctor|log|ner|panel|release|sweep))\s(?P<before>.*?)(?P<word>\S*)$"
)

DEVICES = tuple(spelling for spelling in SPELLINGS if spelling not in ("cuda:N", "default", "mps:0"))


def model_names() -> tuple[str, ...]:
    from ..models.registry import ALIASES, BUNDLED

    return (*BUNDLED, *ALIASES)


def variable_names() -> tuple[str, ...]:
    shell = get_ipython()
    names = () if shell is None else (name for name in shell.user_ns if name not in shell.user_ns_hidden)
    return tuple(sorted(name for name in names if not name.startswith("_")))


def json_files() -> tuple[str, ...]:
    return tuple(sorted(path.name for path in Path().glob("*.json")))


def models_and_variables() -> tuple[str, ...]:
    return (*model_names(), *variable_names())


VALUES: dict[str, Callable[[], tuple[str, ...]]] = {
    "--diff": json_files,
    "--model": model_names,
    "--ops": models_and_variables,
    "--strategy": lambda: STRATEGIES,
    "--device": lambda: DEVICES,
    "--simulate": lambda: SIMULATIONS,
}
"""What may follow a flag; behind other flags that take a value there is nothing to offer."""

FIRST_WORDS: dict[str, Callable[[], tuple[str, ...]]] = {
    "openmed_device": lambda: DEVICES,
    "openmed_doctor": models_and_variables,
    "openmed_log": json_files,
    "openmed_sweep": models_and_variables,
}
"""What may be the first word behind a magic."""


def offers(magic: str, words: list[str]) -> tuple[str, ...]:
    """Return what may follow the words behind a magic, which its parser knows."""
    actions = getattr(OpenMedMagics, magic).parser._actions  # noqa: SLF001 - argparse has no other list of its flags
    if words and any(words[-1] in action.option_strings and action.nargs != 0 for action in actions):
        return VALUES.get(words[-1], tuple)()
    flags = tuple(flag for action in actions for flag in action.option_strings if flag.startswith("--"))
    if magic == "openmed_release":
        return (*flags, *variable_names())
    return flags if words else (*flags, *FIRST_WORDS.get(magic, tuple)())


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
    offered = offers(match["magic"], words)
    wanted = offered if match["word"] else tuple(one for one in offered if not one.startswith("--")) or offered
    return tuple(one for one in wanted if one.startswith(match["word"]) and one not in words)


@context_matcher(identifier="openmed_nb.magics")
def openmed_matcher(context: CompletionContext) -> dict[str, Any]:
    """Offer the values and flags of our magics to IPython's completer, and nothing beside them."""
    found = candidates(context.line_with_cursor[: context.cursor_position])
    completions = [SimpleCompletion(text=text, type="param") for text in found or ()]
    return {"completions": completions, "suppress": found is not None, "do_not_suppress": set()}
