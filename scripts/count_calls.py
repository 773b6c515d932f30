"""Count how many functions of openmed_nb run: for a warm ``nb.use("cpu")``, and from a public name down to the work.

    python scripts/count_calls.py

The second table names the own functions that are on the stack when the work begins: when ``annotate`` prepares the first
chunk of texts, when ``sweep`` begins its search, and when ``doctor`` makes its first finding.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

import openmed_nb as nb

NOTES = ["Patient with type 2 diabetes and hypertension.", "No evidence of pneumonia."]


def is_ours(code: CodeType) -> bool:
    """Return whether a function belongs to the package and has a name."""
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


# Where the work of each function begins.
WORK = {
    "nb.annotate": (lambda: nb.annotate(NOTES, model="bundled_small"), r"annotation/stream\.py: .*\.tokenize"),
    "nb.sweep": (
        lambda: nb.sweep("bundled_small", seconds=1),
        r"runbook/bench/sweep.*: .*[Ss]earch",
    ),
    "nb.doctor": (nb.doctor, r"runbook/checks/doctor/.*findings"),
}


def main() -> None:
    """Print both tables."""
    nb.use("cpu")
    nb.use("cpu")
    warm = sorted(functions_of(lambda: nb.use("cpu")), key=shown)
    files = {code.co_filename for code in warm}
    print(f'nb.use("cpu"), warm: {len(warm)} functions in {len(files)} files')
    print(*(f"    {shown(code)}" for code in warm), sep="\n")
    for name, (run, work) in WORK.items():
        run()  # Imports, and loads the model.
        stack = stack_at(run, lambda code, work=work: is_ours(code) and re.search(work, shown(code)) is not None)
        print(f"{name}, down to the work: {len(stack)} functions in {len({code.co_filename for code in stack})} files")
        print(*(f"    {shown(code)}" for code in stack), sep="\n")


if __name__ == "__main__":
    main()
