"""Read the messages and remedies of the package from its source, so that the site repeats none of them."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ELLIPSIS = "…"

# A name may be assigned from other names. Two names that are assigned from each other must not recurse for ever.
MAX_DEPTH = 4


@dataclass(frozen=True)
class Call:
    """A call with the texts of its arguments.

    Attributes:
        name: Name of the called class.
        module: Path of the module, relative to the package.
        arguments: Text of each positional argument, with ``…`` for parts that are known only at run time.
    """

    name: str
    module: str
    arguments: tuple[str, ...]


def find_calls(package: Path, names: frozenset[str]) -> list[Call]:
    """Return the calls of some classes in a package, in the order of its modules and lines."""
    modules = {path: ast.parse(path.read_text("utf-8")) for path in sorted(package.rglob("*.py"))}
    constants: dict[str, ast.expr] = {}
    for tree in modules.values():
        constants |= _assignments(tree.body)
    calls = []
    for path, tree in modules.items():
        module = path.relative_to(package).as_posix()
        for scope, call in _calls_with_scope(tree, {}):
            name = _called_name(call)
            if name in names:
                texts = tuple(text_of(argument, {**constants, **scope}) for argument in call.args)
                calls.append(Call(name, module, texts))
    return calls


def _assignments(statements: list[ast.stmt]) -> dict[str, ast.expr]:
    """Return the values that simple assignments give to names; a later assignment replaces an earlier one."""
    values: dict[str, ast.expr] = {}
    for statement in statements:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            values[statement.targets[0].id] = statement.value
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value:
            values[statement.target.id] = statement.value
    return values


def _calls_with_scope(
    node: ast.AST, scope: Mapping[str, ast.expr]
) -> Iterator[tuple[Mapping[str, ast.expr], ast.Call]]:
    """Yield each call with the values of the local names that are assigned before it."""
    local = dict(scope)
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Call):
            yield local, child
        yield from _calls_with_scope(child, local)
        if isinstance(child, ast.stmt) and not isinstance(child, (ast.FunctionDef, ast.ClassDef)):
            local |= _assignments([child])
            for inner in ast.walk(child):
                if isinstance(inner, ast.stmt) and inner is not child:
                    local |= {name: value for name, value in _assignments([inner]).items() if name not in local}


def _called_name(call: ast.Call) -> str:
    """Return the last part of the name of a called class."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


def text_of(node: ast.expr, names: Mapping[str, ast.expr], depth: int = 0) -> str:
    """Return the text of an expression, with ``…`` for parts that are known only at run time.

    Example:
        >>> text_of(ast.parse("f'{name!r} is not a valid device name.'", mode="eval").body, {})
        '… is not a valid device name.'
    """
    text = ELLIPSIS
    if isinstance(node, ast.Constant) and isinstance(node.value, (str, int)):
        text = str(node.value)
    elif isinstance(node, ast.JoinedStr):
        text = "".join(text_of(value, names, depth) for value in node.values)
    elif isinstance(node, ast.FormattedValue) and isinstance(node.value, ast.Name):
        text = text_of(node.value, names, depth)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        text = text_of(node.left, names, depth) + text_of(node.right, names, depth)
    elif isinstance(node, (ast.Name, ast.Attribute)) and depth < MAX_DEPTH:
        name = node.id if isinstance(node, ast.Name) else node.attr
        is_known = name in names and (isinstance(node, ast.Name) or name.isupper())
        text = text_of(names[name], names, depth + 1) if is_known else ELLIPSIS
    return text
