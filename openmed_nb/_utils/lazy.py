"""Packages whose public names are imported on first access (PEP 562).

The names are defined in the stub: ``__init__.pyi`` next to ``__init__.py`` imports each name from its module. Type checkers,
editors and :func:`attach_stub` read it.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from .validation import suggest_one


def _read_stub(file: Path) -> dict[str, str]:
    """Return the module of each name that a stub imports from its package."""
    imports = [node for node in ast.parse(file.read_text("utf-8")).body if isinstance(node, ast.ImportFrom)]
    return {
        alias.name: "." * node.level + (node.module or "") for node in imports if node.level for alias in node.names
    }


def attach_stub(package: str, file: str) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` of a package from the stub next to its file."""
    modules = _read_stub(Path(file).with_suffix(".pyi"))

    def import_name(name: str) -> object:
        if name not in modules:
            inner = {
                inner_name: f"{stub.parent.name}.{inner_name}"
                for stub in Path(file).parent.glob("*/__init__.pyi")
                for inner_name in _read_stub(stub)
            }
            parent = package.rpartition(".")[0]
            if parent and name in sys.modules[parent].__all__:
                inner[name] = f"{parent}.{name}"
            suggestion = suggest_one(inner.get(name, name), [*modules, *inner.values()])
            raise AttributeError(f"module {package!r} has no attribute {name!r}. {suggestion}".rstrip())
        path = modules[name]
        value = import_module(f".{name}", package) if path == "." else getattr(import_module(path, package), name)
        setattr(sys.modules[package], name, value)  # Further accesses do not call this function.
        return value

    names = sorted(modules)
    return import_name, names.copy, names
