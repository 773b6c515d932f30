"""Count how many functions of openmed_nb run: for a warm ``nb.use("cpu")``, and from a public name down to the work.

    python scripts/count_calls.py

The second table names the own functions that are on the stack when the work begins: of ``annotate`` and ``sweep`` the
first forward pass of a model, of ``doctor`` its first finding.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

import openmed_nb as nb

NOTES = ["Patient with type 2 diabetes and hypertension.", "No evidence of pneumonia."]


def is_ours(code: CodeType) -> bool:
    """Tell whether a function is one of the package, and has a name."""
    return "/openmed_nb/" in code.co_filename and not code.co_name.startswith("<")


def shown(code: CodeType) -> str:
    """Return a function with its file."""
    return f"{code.co_filename.rpartition('/openmed_nb/')[2]}: {code.co_qualname}"


def functions_of(run: Callable[[], Any]) -> set[CodeType]:
    """Return the functions of the package that run."""
    seen: set[CodeType] = set()

    def watch(frame: FrameType, event: str, _argument: Any) -> None:
        if event == "call" and is_ours(frame.f_code):
            seen.add(frame.f_code)

    sys.setprofile(watch)
    try:
        run()
    finally:
        sys.setprofile(None)
    return seen


def stack_at(run: Callable[[], Any], begins: Callable[[CodeType], bool]) -> list[CodeType]:
    """Return the functions of the package that are on the stack when a function begins, the outermost first."""
    found: list[CodeType] = []

    def frames(frame: FrameType | None) -> Iterator[CodeType]:
        while frame is not None:
            if is_ours(frame.f_code):
                yield frame.f_code
            frame = frame.f_back

    def watch(frame: FrameType, event: str, _argument: Any) -> None:
        if event == "call" and not found and begins(frame.f_code):
            found.extend(reversed([*frames(frame)]))

    sys.setprofile(watch)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


def is_forward_pass(code: CodeType) -> bool:
    """Tell whether a function is a pass through a model of transformers."""
    return code.co_name == "forward" and "/transformers/models/" in code.co_filename


def is_finding(code: CodeType) -> bool:
    """Tell whether a function is one that finds something for the doctor."""
    return "/openmed_nb/runbook/doctor/" in code.co_filename and code.co_qualname.endswith("findings")


def main() -> None:
    """Print both tables."""
    nb.use("cpu")
    nb.use("cpu")
    warm = sorted(functions_of(lambda: nb.use("cpu")), key=shown)
    files = {code.co_filename for code in warm}
    print(f'nb.use("cpu"), warm: {len(warm)} functions in {len(files)} files')
    print(*(f"    {shown(code)}" for code in warm), sep="\n")
    nb.annotate(NOTES, model="bundled_small")  # Imports, and loads the model.
    work: dict[str, tuple[Callable[[], Any], Callable[[CodeType], bool]]] = {
        "nb.annotate": (lambda: nb.annotate(NOTES, model="bundled_small"), is_forward_pass),
        "nb.sweep": (lambda: nb.sweep("bundled_small", seconds=1), is_forward_pass),
        "nb.doctor": (nb.doctor, is_finding),
    }
    for name, (run, begins) in work.items():
        stack = stack_at(run, begins)
        print(f"{name}, down to the work: {len(stack)} functions in {len({code.co_filename for code in stack})} files")
        print(*(f"    {shown(code)}" for code in stack), sep="\n")


if __name__ == "__main__":
    main()
