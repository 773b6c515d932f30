"""What ``%load_ext openmed_nb`` adds to the shell and ``%unload_ext openmed_nb`` takes away: the magics and their completion.

Completion offers the values and flags of a magic, also behind an assignment such as ``choice = %openmed_device ``. The flags
are those of its parser; the tables here say what may stand for a value.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from types import MethodType
from typing import Any

from IPython import get_ipython
from IPython.core.completer import CompletionContext, SimpleCompletion, context_matcher
from IPython.core.interactiveshell import InteractiveShell
from traitlets import TraitError

from .._utils.text import describe_error
from ..devices.request import ACCEPTED_SPELLINGS
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
        what = f"A setting of OpenMedMagics is not valid: {describe_error(error)}."
        raise ConfigurationError(what, "Set it again with %config, then run %load_ext openmed_nb.") from error
    _unregister(shell, keep=magics)
    SESSION.start()
    shell.register_magics(magics)
    shell.Completer.custom_matchers.append(openmed_matcher)
    shell.input_transformers_cleanup.append(ensure_cell_body)


def unload(shell: InteractiveShell) -> None:
    """Take the magics, their completion and open panels away, and undo what was done to the environment."""
    from .panel import close_panels

    _unregister(shell)
    close_panels()
    SESSION.stop()


def _unregister(shell: InteractiveShell, keep: OpenMedMagics | None = None) -> None:
    """Remove the magics, the configurable and the matcher of this package; IPython has no call for it.

    ``register_magics`` adds to ``configurables`` each time and takes nothing back (IPython's ``core/magic.py``).
    """
    for magics in shell.magics_manager.magics.values():
        for name, method in list(magics.items()):
            # IPython's own magics stand there as proxies that load their module when an attribute is asked for.
            if isinstance(method, MethodType) and isinstance(method.__self__, OpenMedMagics):
                del magics[name]
    others = [one for one in shell.configurables if one is keep or not isinstance(one, OpenMedMagics)]
    shell.configurables[:] = others
    with contextlib.suppress(ValueError):  # They are not there before the first load.
        shell.input_transformers_cleanup.remove(ensure_cell_body)
        shell.Completer.custom_matchers.remove(openmed_matcher)


def ensure_cell_body(lines: list[str]) -> list[str]:
    """Return the lines of a cell, with an empty one below a ``%%openmed_ner`` that stands alone.

    IPython refuses a cell magic without a body before it is asked, though ``--from`` needs none.
    """
    return [f"{lines[0].rstrip()}\n", "\n"] if len(lines) == 1 and lines[0].startswith("%%openmed_ner") else lines


PARSERS = {name: magic.parser for name, magic in vars(OpenMedMagics).items() if hasattr(magic, "parser")}

MAGIC_LINE_PATTERN = re.compile(
    rf"^\s*(?:[^=%]+=\s*)?%{{1,2}}(?P<magic>{'|'.join(PARSERS)})\s(?P<before>.*?)(?P<word>\S*)$"
)


_DEVICES = tuple(spelling for spelling in ACCEPTED_SPELLINGS if spelling not in ("cuda:N", "default", "mps:0"))
_CHOICES = {"device": _DEVICES, "--device": _DEVICES, "--simulate": SIMULATIONS, "--strategy": STRATEGIES}


def _values(place: str) -> list[str]:
    """Return what may stand behind a flag, or for an argument without one; nothing where a name is free."""
    values = list(_CHOICES.get(place, ()))
    if place in ("model", "--model", "--ops"):
        from ..models.registry import ALIASES, BUNDLED

        values += [*BUNDLED, *ALIASES]
    if place in ("model", "--ops", "names", "--from"):
        shell = get_ipython()
        hidden = shell.user_ns_hidden
        values += sorted(name for name in shell.user_ns if name not in hidden and not name.startswith("_"))
    if place in ("file", "--diff"):
        values += sorted(path.name for path in Path().glob("*.json"))
    return values


def complete_line(line: str) -> list[str] | None:
    """Return what could stand at the end of a line, ``None`` for a line without a magic of this package.

    Example:
        >>> candidates("choice = %openmed_device m"), candidates("%macro m")
        (['mps'], None)
    """
    match = MAGIC_LINE_PATTERN.match(line)
    if match is None:
        return None
    words = match["before"].split()
    options = PARSERS[match["magic"]]._option_string_actions  # noqa: SLF001 - argparse has no other list of its flags
    if words and words[-1] in options and options[words[-1]].nargs != 0:
        offered = _values(words[-1])
    else:
        offered = []
        for action in PARSERS[match["magic"]]._actions:  # noqa: SLF001 - nor of its arguments
            if not action.option_strings and (action.nargs == "*" or not words):
                offered += _values(action.dest)
        if match["word"] or not offered:
            offered += [flag for flag in options if flag.startswith("--")]
    return [word for word in offered if word.startswith(match["word"]) and word not in words]


@context_matcher(identifier="openmed_nb.magics")
def openmed_matcher(context: CompletionContext) -> dict[str, Any]:
    """Offer the values and flags of the magics to IPython's completer, and nothing else."""
    words = complete_line(context.line_with_cursor[: context.cursor_position])
    completions = [SimpleCompletion(text=word, type="param") for word in words or ()]
    return {"completions": completions, "suppress": words is not None, "do_not_suppress": set()}
