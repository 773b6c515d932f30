"""What ``%load_ext openmed_nb`` adds to the shell and ``%unload_ext openmed_nb`` takes away, without a trace."""

from __future__ import annotations

from types import MethodType

from IPython.core.interactiveshell import InteractiveShell
from traitlets import TraitError

from ..errors import ConfigurationError, cause
from ..session import SESSION
from .completion import openmed_matcher
from .magics import OpenMedMagics


def load(shell: InteractiveShell) -> None:
    """Apply the MPS variables in time, then register the magics and their completion."""
    magics = make_magics(shell)
    unregister(shell, keep=magics)
    SESSION.start()
    shell.register_magics(magics)
    shell.Completer.custom_matchers.append(openmed_matcher)


def make_magics(shell: InteractiveShell) -> OpenMedMagics:
    """Return the magics with the settings of ``%config`` and of the profile."""
    before = list(shell.configurables)
    try:
        return OpenMedMagics(shell)
    except TraitError as error:
        shell.configurables[:] = before  # IPython adds the magics there before it reads their settings.
        raise ConfigurationError(
            f"A setting of OpenMedMagics is not valid: {cause(error)}.",
            "Set it again with %config, then run %load_ext openmed_nb.",
        ) from error


def unload(shell: InteractiveShell) -> None:
    """Take the magics, their completion and open panels away, and undo what was done to the environment."""
    from .panel.opening import close_panels

    unregister(shell)
    close_panels()
    SESSION.stop()


def unregister(shell: InteractiveShell, keep: OpenMedMagics | None = None) -> None:
    """Remove every magic, configurable and matcher of ours; IPython has no call for it.

    ``register_magics`` adds to ``configurables`` each time and takes nothing back (IPython's ``core/magic.py``).
    """
    for kind in ("line", "cell"):
        magics = shell.magics_manager.magics[kind]
        for name in [name for name, method in magics.items() if _is_ours(method)]:
            del magics[name]
    others = [one for one in shell.configurables if one is keep or type(one).__name__ != OpenMedMagics.__name__]
    shell.configurables[:] = others
    matchers = shell.Completer.custom_matchers
    matchers[:] = [one for one in matchers if getattr(one, "matcher_identifier", "") != "openmed_nb.magics"]


def _is_ours(method: object) -> bool:
    # IPython's own magics stand there as proxies that load their module when an attribute is asked for.
    return isinstance(method, MethodType) and type(method.__self__).__name__ == OpenMedMagics.__name__
