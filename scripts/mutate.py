"""Mutate the pure modules, one change at a time, and report the changes that their tests do not detect.

    python -m pip install mutmut                            # for its operators; the tests do not need it
    python scripts/mutate.py                                # 100 mutants of each group, half an hour or more
    python scripts/mutate.py verdict --sample 60 --seed 2     # other mutants of one group

A mutant is a file with one change by an operator of mutmut 3: another number, comparison, argument, string, and so on.
The tests of a group of modules run until one fails, which kills the mutant. The doctests of the changed file and its test
file run first. Files are changed in a copy of this tree only. A process that has imported torch, transformers and pytest forks
for each mutant.

Annotations, type aliases, decorators, documentation, and sentences (strings with a space) are not changed. Changes in
EQUIVALENT and NEEDS_A_GPU are excluded.
A seed selects the same mutants until the files change. The exit status is 1 if less than 90% of a group are killed.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import libcst as cst
from mutmut.mutation.mutators import mutation_operators

ROOT = Path(__file__).parents[1]
MIN_KILLED_FRACTION = 0.9
EXCLUDED_FILES = shutil.ignore_patterns(".*", "__pycache__", "build", "dist")

WARM = {"torch", "transformers", "tokenizers", "numpy", "_pytest", "hypothesis"}
"""The packages that are imported once, with the submodules that the tests of a group use."""


@dataclass(frozen=True)
class ModuleGroup:
    """Modules whose results depend only on their arguments, and their tests.

    Attributes:
        sources: Patterns of the modules.
        tests: Patterns of their test files.
    """

    sources: tuple[str, ...]
    tests: tuple[str, ...]

    def files(self, tree: Path) -> list[Path]:
        """Return the files that are changed."""
        return [file for pattern in self.sources for file in sorted(tree.glob(pattern)) if file.name != "__init__.py"]

    def tests_of(self, tree: Path) -> list[Path]:
        """Return the files with tests: the sources with their doctests, and the test files."""
        return [*self.files(tree), *(test for pattern in self.tests for test in sorted(tree.glob(pattern)))]

    def tests_in_order(self, tree: Path, file: Path) -> tuple[list[Path], list[Path]]:
        """Return the tests of a changed file, which detect most changes, and the other test files."""
        own = [test for test in self.tests_of(tree) if test == file or test.stem == f"test_{file.stem}"]
        return own, [test for test in self.tests_of(tree) if test not in own and test.stem.startswith("test_")]


GROUPS = {
    "devices": ModuleGroup(
        ("openmed_nb/devices/*.py",),
        (
            *("tests/devices/test_*.py", "tests/test_session.py", "tests/test_session_environment.py"),
            "tests/training/test_steps.py",
        ),
    ),
    "annotation": ModuleGroup(
        tuple(f"openmed_nb/annotation/{name}.py" for name in ("decoding", "tokens")),
        tuple(f"tests/annotation/test_{name}.py" for name in ("boundaries", "decoding", "tokens")),
    ),
    "entities": ModuleGroup(
        tuple(f"openmed_nb/annotation/{name}.py" for name in ("gold", "inputs", "scores")),
        (
            *(
                f"tests/annotation/test_{name}.py"
                for name in ("gold", "ids", "matching", "mistakes", "read_annotations", "review", "scores")
            ),
            "tests/test_reports.py",
        ),
    ),
    "training": ModuleGroup(
        tuple(f"openmed_nb/training/{name}.py" for name in ("curve", "steps")),
        (*(f"tests/training/test_{name}.py" for name in ("curve", "steps")), "tests/test_reports.py"),
    ),
    "verdict": ModuleGroup(
        ("openmed_nb/runbook/verdict/*.py",),
        ("tests/runbook/verdict/test_*.py", "tests/test_reports.py"),
    ),
    "records": ModuleGroup(
        ("openmed_nb/models/records.py", "openmed_nb/runbook/checks/parity_report.py"),
        (
            "tests/models/test_records.py",
            "tests/runbook/checks/precision/test_parity_report.py",
            "tests/runbook/checks/precision/test_dtype_choice.py",
            "tests/runbook/checks/precision/test_validation.py",
            "tests/annotation/test_tuning.py",
            "tests/test_main.py",
            "tests/test_reports.py",
        ),
    ),
}

EQUIVALENT = {
    r"\(KEY\|TOKEN\|SECRET": "the pattern ignores capitals",
    r"\"default\"\), cutoff=0.4\)|order=\"c\"\)": "the closest of several matches is first, and numpy accepts the order in lower case too",
    r"field\(default=(False|None), init=(False|None), repr=(False|None)\)$": "set before it is read, so None is equivalent to False",
    r"slice\(positions\[0\]\)": "a slice starts at 0",
    r"re\.match\(.* or \"XX0?XX\"": "neither text is a version or a chip",
    r"accumulate\(rises, initial=1\.0\)": "a slope does not depend on the start of the series",
    r"max\(\(other\.end \+ other\.start for": "a longer search finds the same overlaps",
    r"libSystem\.B": "only macOS has this library; the tests pass another one",
}
"""Patterns of changed lines that are equivalent to the original, with reasons."""

STRICT = re.compile(r", (strict=\w+)?(?=\))")
"""The last argument of ``zip``. It checks lengths that are equal by construction, so no test can see it missing."""

EMPTY = ("False", "None", '""', "()", "0", "0.0")
"""Values of a field or constant that are all false. mypy rejects one in the place of another."""

NEEDS_A_GPU = {
    "devices/cuda.py": (
        *("empty_cache", "memory_stats", "reset_peak_memory_stats", "set_memory_fraction"),
        *("synchronize", "record_event", "capability", "uuid"),
    ),
    "devices/moving.py": ("pin_memory=True", "out=packed"),
    "training/steps.py": ("get_device(name).capability()",),
    "devices/profilers.py": ("signposts", "metal_capture", "activities.append("),
}
"""Functions, and parts of lines, that call the driver of an NVIDIA GPU or Metal. Their tests are skipped without one."""


@dataclass(frozen=True)
class Mutant:
    """A file with one change."""

    file: Path
    before: str
    after: str

    def diff(self, tree: Path) -> str:
        """Return the change as a diff without context."""
        lines = difflib.unified_diff(self.before.splitlines(), self.after.splitlines(), n=0, lineterm="")
        return "\n".join([str(self.file.relative_to(tree)), *list(lines)[2:]])

    @property
    def is_equivalent(self) -> bool:
        """Whether the change cannot be observed."""
        before = self.before.splitlines()
        after = self.after.splitlines()
        before_lines = set(before)
        after_lines = set(after)
        old = [line for line in before if line not in after_lines]
        new = [line for line in after if line not in before_lines]
        if STRICT.sub("", self.before) == STRICT.sub("", self.after):
            return True
        if any(part in line for part in excluded_code(self.file) if not part.isidentifier() for line in (*old, *new)):
            return True
        return any(re.search(pattern, line) for pattern in EQUIVALENT for line in new)


def excluded_code(file: Path) -> Sequence[str]:
    """Return the functions and parts of lines of a file that need a GPU."""
    return NEEDS_A_GPU.get(f"{file.parent.name}/{file.name}", ())


class ChangeCollector(cst.CSTVisitor):
    """Collects the changes of a module: pairs of a node and its replacement."""

    def __init__(self, excluded: Sequence[str] = ()) -> None:
        super().__init__()
        self.changes: list[tuple[cst.CSTNode, cst.CSTNode]] = []
        self._excluded = excluded
        self._depth = 0  # Number of functions around the node.

    def on_visit(self, node: cst.CSTNode) -> bool:
        """Collect the changes of a node; skip documentation, and nodes for type checkers."""
        if isinstance(node, (cst.Annotation, cst.Decorator, cst.Import, cst.ImportFrom)):
            return False
        if is_documentation(node) or names_a_type(node):
            return False
        if isinstance(node, cst.FunctionDef):
            if node.name.value in self._excluded:
                return False
            self._depth += 1
        for kind, operator in mutation_operators:
            if isinstance(node, kind) and not is_sentence(node):
                changes = [(node, other) for other in operator(node)]
                self.changes += [change for change in changes if self._depth or not is_empty_declaration(*change)]
        return True

    def on_leave(self, original_node: cst.CSTNode) -> None:
        """Leave a function."""
        if isinstance(original_node, cst.FunctionDef):
            self._depth -= 1


def is_documentation(node: cst.CSTNode) -> bool:
    """Return whether a node is a string expression statement."""
    return isinstance(node, cst.Expr) and isinstance(node.value, (cst.SimpleString, cst.ConcatenatedString))


def names_a_type(node: cst.CSTNode) -> bool:
    """Return whether a node assigns a type alias."""
    if isinstance(node, cst.AnnAssign):
        return isinstance(node.annotation.annotation, cst.Name) and node.annotation.annotation.value == "TypeAlias"
    name = node.targets[0].target if isinstance(node, cst.Assign) else None
    return isinstance(name, cst.Name) and name.value[0].isupper() and not name.value.isupper()


def is_empty_declaration(old: cst.CSTNode, new: cst.CSTNode) -> bool:
    """Return whether a field or constant gets another empty value, such as None instead of False."""
    if not isinstance(old, (cst.Assign, cst.AnnAssign)) or not isinstance(new, (cst.Assign, cst.AnnAssign)):
        return False
    code = cst.Module([]).code_for_node
    values = [code(node.value) for node in (old, new) if node.value is not None]
    return all(value in EMPTY for value in values)


def is_sentence(node: cst.CSTNode) -> bool:
    """Return whether a node is a string with a space."""
    return isinstance(node, cst.SimpleString) and " " in node.raw_value.strip()


def mutants(files: Sequence[Path], chance: random.Random) -> Iterator[Mutant]:
    """Yield the mutants of some files in random order, each once."""
    modules = {file: cst.parse_module(file.read_text("utf-8")) for file in files}
    changes = []
    for file, module in modules.items():
        collector = ChangeCollector(excluded_code(file))
        module.visit(collector)
        changes += [(file, *change) for change in collector.changes]
    chance.shuffle(changes)
    seen = set()
    for file, old, new in changes:
        mutant = Mutant(file, modules[file].code, modules[file].deep_replace(old, new).code)
        if (file, mutant.after) not in seen and compiles(mutant.after) and not mutant.is_equivalent:
            seen.add((file, mutant.after))
            yield mutant


def compiles(code: str) -> bool:
    """Return whether a text is valid Python."""
    try:
        compile(code, "mutant", "exec", dont_inherit=True)
    except SyntaxError:
        return False
    return True


def forked_tests(tree: Path, tests: Sequence[Path], seconds: float, folder: Path, keep: bool = False) -> int:
    """Run tests in a fork of this process; return 0 if they passed, and -1 after the time limit.

    Args:
        tree: Copy of this tree with the change.
        tests: The test files.
        seconds: Time limit.
        folder: Folder of their output.
        keep: Whether the fork writes bytecode for later forks, and the names of its imported modules into ``folder``.
    """
    child = os.fork()
    if not child:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 1,) * 2)
        with (folder / "output").open("wb") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        os._exit(run_tests(tree, tests, folder if keep else None))
    for _ in range(int(seconds / 0.02)):  # Without a clock, a computer that sleeps or is busy kills no mutant.
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -1


def run_tests(tree: Path, tests: Sequence[Path], folder: Path | None) -> int:
    """Run tests in this process until one fails."""
    import pytest

    os.chdir(tree)
    sys.path.insert(0, str(tree))
    sys.dont_write_bytecode = folder is None
    os.environ.update(PYTHONPATH=str(tree), PYTEST_DISABLE_PLUGIN_AUTOLOAD="1", PYTHONDONTWRITEBYTECODE="1")
    options = ["-x", "-q", "--tb=short", "-p", "no:cacheprovider", "--assert=plain", "--doctest-modules"]
    options += ["-o", "addopts=--import-mode=importlib"]
    try:
        status = int(pytest.main([*options, *map(str, tests)]))
        if status == pytest.ExitCode.NO_TESTS_COLLECTED:  # The file has no doctests and no tests of its own.
            status = 0
    except BaseException:  # noqa: BLE001 - any error of a mutant is detected
        status = 1
    if folder is not None:
        (folder / "modules").write_text("\n".join(sys.modules))
    sys.stdout.flush()
    return status


def warm_up(group: ModuleGroup, tree: Path, folder: Path) -> float:
    """Run the tests of a group without a change, import their packages, and return the time limit of a mutant in seconds."""
    started = time.monotonic()
    status = forked_tests(tree, group.tests_of(tree), 3600, folder, keep=True)
    if status:
        sys.exit(f"The tests fail without a change:\n{(folder / 'output').read_text()}")
    taken = time.monotonic() - started
    for name in (folder / "modules").read_text().splitlines():
        if name.split(".")[0] in WARM and name not in sys.modules:
            importlib.import_module(name)
    return 30 + 5 * taken


def survivors_of(name: str, tree: Path, sample: int, seed: int) -> tuple[int, list[str]]:
    """Return the number of tested mutants of a group, and the diffs of the undetected mutants."""
    group, folder = GROUPS[name], tree.parent
    seconds = warm_up(group, tree, folder)
    selected = mutants(group.files(tree), random.Random(f"{seed} {name}"))
    tried, survivors = 0, []
    for mutant, _ in zip(selected, range(sample), strict=False):
        changed = mutant.file.stat().st_mtime_ns
        mutant.file.write_text(mutant.after, "utf-8")
        own, others = group.tests_in_order(tree, mutant.file)
        status = forked_tests(tree, own, seconds, folder) or forked_tests(tree, others, seconds, folder)
        mutant.file.write_text(mutant.before, "utf-8")
        os.utime(mutant.file, ns=(changed, changed))  # So that its bytecode counts again.
        tried += 1
        if not status:
            survivors.append(mutant.diff(tree))
            print(f"survived: {survivors[-1]}\n", flush=True)
    return tried, survivors


def main() -> int:
    """Print the survivors, and the number of killed mutants of each group."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("groups", nargs="*", metavar="group", help=f"{', '.join(GROUPS)}; all by default")
    parser.add_argument("--sample", type=int, default=100, help="number of mutants of each group (100)")
    parser.add_argument("--seed", type=int, default=0, help="seed of their selection (0)")
    arguments = parser.parse_args()
    if unknown := set(arguments.groups) - set(GROUPS):
        parser.error(f"{', '.join(sorted(unknown))} is not a group. Use one of {', '.join(GROUPS)}.")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for package in sorted(WARM):
        importlib.import_module(package)
    good, lines = True, []
    with tempfile.TemporaryDirectory(prefix="mutants_") as temporary:
        tree = Path(os.path.realpath(temporary)) / "tree"
        shutil.copytree(ROOT, tree, ignore=EXCLUDED_FILES)
        for name in arguments.groups or GROUPS:
            tried, survivors = survivors_of(name, tree, arguments.sample, arguments.seed)
            killed = tried - len(survivors)
            good = good and killed >= MIN_KILLED_FRACTION * tried
            lines.append(f"{name}: {killed} of {tried} killed ({killed / tried:.0%}), seed {arguments.seed}")
            print(lines[-1], flush=True)
    print("\n".join(["", *lines]))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
