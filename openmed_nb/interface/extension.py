"""What ``%load_ext openmed_nb`` adds to the shell and ``%unload_ext openmed_nb`` takes away, without a trace."""

from __future__ import annotations

from types import MethodType

from IPython.core.interactiveshell import InteractiveShell

from ..session import SESSION
from .completion import openmed_matcher
from .magics import OpenMedMagics


def load(shell: InteractiveShell) -> None:
    """Apply the MPS variables in time, then register the magics and their completion."""
    unregister(shell)
    SESSION.start()
    shell.register_magics(OpenMedMagics)
    shell.Completer.custom_matchers.append(openmed_matcher)


def unload(shell: InteractiveShell) -> None:
    """Take the magics and their completion away, and undo what was done to the environment."""
    unregister(shell)
    SESSION.stop()


def unregister(shell: InteractiveShell) -> None:
    """Remove every magic, configurable and matcher of ours; IPython has no call for it.

    ``register_magics`` adds to ``configurables`` each time and takes nothing back (IPython's ``core/magic.py``).
    """
    for kind in ("line", "cell"):
        magics = shell.magics_manager.magics[kind]
        for name in [name for name, method in magics.items() if _is_ours(method)]:
            del magics[name]
    shell.configurables[:] = [one for one in shell.configurables if type(one).__name__ != OpenMedMagics.__name__]
    matchers = shell.Completer.custom_matchers
    matchers[:] = [one for one in matchers if getattr(one, "matcher_identifier", "") != "openmed_nb.magics"]


def _is_ours(method: object) -> bool:
    # IPython's own magics stand there as proxies that load their module when an attribute is asked for.
    return isinstance(method, MethodType) and type(method.__self__).__name__ == OpenMedMagics.__name__
