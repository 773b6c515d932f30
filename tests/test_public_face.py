"""What people have written down of this package: the public names with their arguments, and the fields of each report."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import json
import pkgutil
from collections.abc import Callable, Iterator
from pathlib import Path

import openmed_nb as nb
from openmed_nb.display import Shown

SNAPSHOT = Path(__file__).parent / "recorded" / "public_face.json"


def kinds_of(kind: type) -> Iterator[type]:
    """Yield the classes below one."""
    for below in kind.__subclasses__():
        yield below
        yield from kinds_of(below)


def arguments_of(public: Callable[..., object]) -> list[str]:
    """Return the arguments of a function or class as they are written, with plain defaults; none for errors."""
    if isinstance(public, type) and issubclass(public, Exception):
        return []
    parameters = inspect.signature(public).parameters.values()
    plain = (bool, int, float, str, type(None), tuple)
    return [
        f"{one.kind.name.lower()}: {one.name}" + (f" = {one.default!r}" if isinstance(one.default, plain) else "")
        for one in parameters
    ]


def face() -> dict[str, dict[str, object]]:
    """Return the public names with their arguments, and the fields of each report."""
    for module in pkgutil.walk_packages(nb.__path__, "openmed_nb."):
        if not module.name.endswith("__main__"):
            with contextlib.suppress(ModuleNotFoundError):  # Pictures and callbacks need an extra.
                importlib.import_module(module.name)
    public = {name: getattr(nb, name) for name in nb.__all__}
    reports = {
        kind for kind in kinds_of(Shown) if dataclasses.is_dataclass(kind) and kind.__module__.startswith("openmed_nb.")
    }
    return {
        "arguments": {name: arguments_of(one) for name, one in public.items() if callable(one)},
        "reports": {kind.__name__: [one.name for one in dataclasses.fields(kind)] for kind in reports},
    }


def test_what_is_public_stays():
    """Public names, their arguments and the fields of reports are those of the snapshot; who changes one changes it there."""
    assert face() == json.loads(SNAPSHOT.read_text("utf-8"))


def test_what_is_public_is_described():
    """Every public name, and every public method and property of a public class, has a docstring."""
    public = [(name, getattr(nb, name)) for name in nb.__all__ if callable(getattr(nb, name))]
    methods = [
        (f"{name}.{member}", value)
        for name, kind in public
        if isinstance(kind, type)
        for member, value in inspect.getmembers(kind)
        if not member.startswith("_") and (inspect.isroutine(value) or isinstance(value, property))
    ]
    assert [name for name, value in (*public, *methods) if not inspect.getdoc(value)] == []
