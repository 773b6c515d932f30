"""Faces that import nothing until a name of theirs is asked for (PEP 562).

The one table of a face is its stub: ``__init__.pyi`` beside ``__init__.py`` imports each name from its home. Type checkers
and editors read it, and so does :func:`face`.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def attach_stub(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` of a package from the stub beside its file."""
    imports = [
        node
        for node in ast.parse(Path(file).with_suffix(".pyi").read_text("utf-8")).body
        if isinstance(node, ast.ImportFrom)
    ]
    homes = {one.name: node.module for node in imports if node.level for one in node.names}

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = homes[name]
        found = import_module(f".{home or name}", package)
        value = found if home is None else getattr(found, name)
        setattr(sys.modules[package], name, value)  # From now on it is found without asking here.
        return value

    return get, lambda: sorted(homes), sorted(homes)
