"""IPython extension: register the magics and their completion for ``%load_ext``, and remove them for ``%unload_ext``.

Tab completion suggests the options of a magic, which come from its parser, and the variables that ``%openmed_release`` can delete,
including after an assignment such as ``choice = %openmed_device ``.
"""

from __future__ import annotations

import contextlib
import re
from types import MethodType, TracebackType

from IPython import get_ipython
from IPython.core.completer import CompletionContext, SimpleCompletion, context_matcher
from IPython.core.interactiveshell import InteractiveShell
from traitlets import TraitError

from .._utils.text import describe_error
from ..devices.machine import distribution_of
from ..errors import ConfigurationError
from ..session import SESSION
from .magics import OpenMedMagics


def load(shell: InteractiveShell) -> None:
    """Set the MPS variables before torch reads them, and register the magics and their completion."""
    configurables = list(shell.configurables)
    try:
        magics = OpenMedMagics(shell)  # Reads the settings of %config and of the profile.
    except TraitError as error:
        shell.configurables[:] = configurables  # IPython adds the magics to the list before it reads their settings.
        raise ConfigurationError(
            f"Invalid value for a setting of OpenMedMagics: {describe_error(error)}.",
            "Correct it with %config, then run %load_ext openmed_nb.",
        ) from error
    _unregister(shell, keep=magics)
    SESSION.start()
    shell.register_magics(magics)
    shell.Completer.custom_matchers.append(_openmed_matcher)
    shell.input_transformers_cleanup.append(prepare_cell)
    if not shell.custom_exceptions:  # IPython keeps one handler, which may belong to another extension.
        shell.set_custom_exc(_HANDLED_ERRORS, _show_missing_package)


def unload(shell: InteractiveShell) -> None:
    """Remove the magics and their completion, close all panels, and restore the environment variables."""
    from .panel import close_panels

    _unregister(shell)
    close_panels()
    SESSION.stop()


def _unregister(shell: InteractiveShell, keep: OpenMedMagics | None = None) -> None:
    """Remove the magics, the configurable and the matcher of this package, for which IPython has no function.

    ``register_magics`` appends to ``configurables`` on each call and never removes an entry (IPython's
    ``core/magic.py``).
    """
    for magics in shell.magics_manager.magics.values():
        for name, method in list(magics.items()):
            # IPython's own magics are proxies that import their module on attribute access.
            if isinstance(method, MethodType) and isinstance(method.__self__, OpenMedMagics):
                del magics[name]
    for configurable in list(shell.configurables):
        if isinstance(configurable, OpenMedMagics) and configurable is not keep:
            shell.configurables.remove(configurable)
            if "preloader" in vars(configurable):  # Otherwise no magic has used it.
                configurable.preloader.stop()
    with contextlib.suppress(ValueError):  # Neither is registered before the first load.
        shell.input_transformers_cleanup.remove(prepare_cell)
        shell.Completer.custom_matchers.remove(_openmed_matcher)
    if shell.custom_exceptions is _HANDLED_ERRORS:
        shell.set_custom_exc((), None)


def prepare_cell(lines: list[str]) -> list[str]:
    """Return the lines of a cell, changed where IPython would print a message that does not help.

    IPython rejects a cell magic without a body before it calls the magic, although ``--from`` needs no body. It also
    prints two lines when a cell that loads this extension runs again.
    """
    if len(lines) == 1 and lines[0].startswith("%%openmed_ner"):
        return [f"{lines[0].rstrip()}\n", "\n"]
    if lines and lines[0].strip() == "%load_ext openmed_nb":
        return ["\n", *lines[1:]]
    return lines


_HANDLED_ERRORS = (ModuleNotFoundError,)


def _show_missing_package(
    shell: InteractiveShell,
    error_class: type[ModuleNotFoundError],
    error: ModuleNotFoundError,
    traceback: TracebackType,
    tb_offset: int | None = None,
) -> None:
    """Show the command that installs a missing package of the extra ``notebooks``, and any other error as IPython does."""
    from packaging.requirements import Requirement

    distribution = distribution_of("openmed_nb")
    requirements = map(Requirement, (distribution and distribution.requires) or ())
    if error.name in {requirement.name for requirement in requirements if "notebooks" in str(requirement.marker)}:
        missing = ConfigurationError(
            f"{error.name} is not installed.",
            "In the folder that contains README.md, run: python -m pip install '.[notebooks]'",
        )
        shell.showtraceback((ConfigurationError, missing, traceback))
    else:
        shell.showtraceback((error_class, error, traceback), tb_offset=tb_offset)


PARSERS = {name: magic.parser for name, magic in vars(OpenMedMagics).items() if hasattr(magic, "parser")}

MAGIC_LINE_PATTERN = re.compile(
    rf"^\s*(?:[^=%]+=\s*)?%{{1,2}}(?P<magic>{'|'.join(PARSERS)})\s(?P<before>.*?)(?P<word>\S*)$"
)


def _complete_line(line: str) -> list[str] | None:
    """Return the completions at the end of a line, or ``None`` to leave it to IPython, which completes files.

    Example:
        >>> _complete_line("choice = %openmed_device --li"), _complete_line("%macro m")
        (['--list'], None)
    """
    match = MAGIC_LINE_PATTERN.match(line)
    if match is None:
        return None
    words = match["before"].split()
    options = PARSERS[match["magic"]]._option_string_actions  # noqa: SLF001 - argparse has no public list of its options
    if words and words[-1] in options and options[words[-1]].nargs != 0:
        return None  # The value of an option.
    suggestions = [option for option in options if option.startswith("--")]
    if match["magic"] == "openmed_release":
        shell = get_ipython()
        names = shell.user_ns.keys() - shell.user_ns_hidden.keys()
        suggestions += sorted(name for name in names if not name.startswith("_"))
    return [word for word in suggestions if word.startswith(match["word"]) and word not in words] or None


@context_matcher(identifier="openmed_nb.magics")
def _openmed_matcher(context: CompletionContext) -> dict[str, object]:
    """Return the completions of a magic of this package to IPython, and suppress those of other matchers."""
    words = _complete_line(context.line_with_cursor[: context.cursor_position])
    completions = [SimpleCompletion(text=word, type="param") for word in words or ()]
    return {"completions": completions, "suppress": words is not None, "do_not_suppress": set()}
