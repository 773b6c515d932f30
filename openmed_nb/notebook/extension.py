"""What ``%load_ext openmed_nb`` adds to the shell and ``%unload_ext openmed_nb`` takes away: the magics and their completion.

Completion offers the values and flags of a magic, also behind an assignment such as ``choice = %openmed_device ``. The flags
are those of its parser; the tables here say what may stand for a value.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import MethodType
from typing import Any

from IPython import get_ipython
from IPython.core.completer import CompletionContext, SimpleCompletion, context_matcher
from IPython.core.interactiveshell import InteractiveShell
from traitlets import TraitError

from .._utils.text import cause
from ..devices.request import SPELLINGS
from ..errors import ConfigurationError
from ..models.config import STRATEGIES
from ..session import SESSION
from .magics import SIMULATIONS, OpenMedMagics


def load(shell: InteractiveShell) -> None:
    """Apply the MPS variables in time, then register the magics and their completion."""
    before = list(shell.configurables)
    try:
        magics = OpenMedMagics(shell)  # It reads the settings of %config and of the profile.
    except TraitError as error:
        shell.configurables[:] = before  # IPython adds the magics there before it reads their settings.
        what = f"A setting of OpenMedMagics is not valid: {cause(error)}."
        raise ConfigurationError(what, "Set it again with %config, then run %load_ext openmed_nb.") from error
    unregister(shell, keep=magics)
    SESSION.start()
    shell.register_magics(magics)
    shell.Completer.custom_matchers.append(openmed_matcher)
    shell.input_transformers_cleanup.append(with_body)


def unload(shell: InteractiveShell) -> None:
    """Take the magics, their completion and open panels away, and undo what was done to the environment."""
    from .panel import close_panels

    unregister(shell)
    close_panels()
    SESSION.stop()


def unregister(shell: InteractiveShell, keep: OpenMedMagics | None = None) -> None:
    """Remove the magics, the configurable and the matcher of this package; IPython has no call for it.

    ``register_magics`` adds to ``configurables`` each time and takes nothing back (IPython's ``core/magic.py``).
    """
    ours = OpenMedMagics.__name__
    for magics in shell.magics_manager.magics.values():
        for name, method in list(magics.items()):
            # IPython's own magics stand there as proxies that load their module when an attribute is asked for.
            if isinstance(method, MethodType) and type(method.__self__).__name__ == ours:
                del magics[name]
    shell.configurables[:] = [one for one in shell.configurables if one is keep or type(one).__name__ != ours]
    cleanup, own = shell.input_transformers_cleanup, (with_body.__module__, with_body.__qualname__)
    cleanup[:] = [one for one in cleanup if (getattr(one, "__module__", ""), getattr(one, "__qualname__", "")) != own]
    matchers = shell.Completer.custom_matchers
    matchers[:] = [one for one in matchers if getattr(one, "matcher_identifier", "") != "openmed_nb.magics"]


def with_body(lines: list[str]) -> list[str]:
    """Return the lines of a cell, with an empty one below a ``%%openmed_ner`` that stands alone.

    IPython refuses a cell magic without a body before it is asked, though ``--from`` needs none.
    """
    return [f"{lines[0].rstrip()}\n", "\n"] if len(lines) == 1 and lines[0].startswith("%%openmed_ner") else lines


PARSERS = {name: magic.parser for name, magic in vars(OpenMedMagics).items() if hasattr(magic, "parser")}

LINE = re.compile(rf"^\s*(?:[^=%]+=\s*)?%{{1,2}}(?P<magic>{'|'.join(PARSERS)})\s(?P<before>.*?)(?P<word>\S*)$")


def devices() -> Iterator[str]:
    return (spelling for spelling in SPELLINGS if spelling not in ("cuda:N", "default", "mps:0"))


def models() -> tuple[str, ...]:
    from ..models.registry import ALIASES, BUNDLED

    return (*BUNDLED, *ALIASES)


def variables() -> list[str]:
    shell = get_ipython()
    return sorted(name for name in shell.user_ns if name not in shell.user_ns_hidden and not name.startswith("_"))


def json_files() -> list[str]:
    return sorted(path.name for path in Path().glob("*.json"))


# What may stand behind a flag, or for an argument without one; where a name is missing, there is nothing to offer.
VALUES: dict[str, Callable[[], Iterable[str]]] = {
    "device": devices,
    "file": json_files,
    "model": lambda: (*models(), *variables()),
    "names": variables,
    "--device": devices,
    "--diff": json_files,
    "--from": variables,
    "--model": models,
    "--ops": lambda: (*models(), *variables()),
    "--simulate": lambda: SIMULATIONS,
    "--strategy": lambda: STRATEGIES,
}


def offers(magic: str, words: list[str]) -> list[str]:
    """Return what may follow the words behind a magic, which its parser knows."""
    actions = PARSERS[magic]._actions  # noqa: SLF001 - argparse has no other list of its flags
    if words and any(words[-1] in action.option_strings and action.nargs != 0 for action in actions):
        return list(VALUES.get(words[-1], tuple)())
    offered = [flag for action in actions for flag in action.option_strings if flag.startswith("--")]
    for action in actions:
        if not action.option_strings and (action.nargs == "*" or not words):
            offered += VALUES.get(action.dest, tuple)()
    return offered


def candidates(line: str) -> list[str] | None:
    """Return what could stand at the end of a line, ``None`` for a line without a magic of this package.

    Example:
        >>> candidates("choice = %openmed_device m"), candidates("%macro m")
        (['mps'], None)
    """
    match = LINE.match(line)
    if match is None:
        return None
    words = match["before"].split()
    offered = offers(match["magic"], words)
    wanted = offered if match["word"] else [one for one in offered if not one.startswith("--")] or offered
    return [one for one in wanted if one.startswith(match["word"]) and one not in words]


@context_matcher(identifier="openmed_nb.magics")
def openmed_matcher(context: CompletionContext) -> dict[str, Any]:
    """Offer the values and flags of the magics to IPython's completer, and nothing else."""
    found = candidates(context.line_with_cursor[: context.cursor_position])
    completions = [SimpleCompletion(text=text, type="param") for text in found or ()]
    return {"completions": completions, "suppress": found is not None, "do_not_suppress": set()}
