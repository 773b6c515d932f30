import ast
import inspect
import io
import os
import re
import shutil
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import openmed_nb
from helpers import ROOT
from helpers.project import PYPROJECT
from helpers.readme import readme_command
from openmed_nb.devices.device import MAC_TORCH

UV = shutil.which("uv") or shutil.which("uv", path=str(Path(sys.executable).parent))
PYTHONS, SYSTEMS = ("3.10", "3.11", "3.12", "3.13", "3.14"), ("darwin", "linux", "win32")
PROJECT, PYTEST = PYPROJECT["project"], PYPROJECT["tool"]["pytest"]["ini_options"]


def requirements(name):
    """Return the requirements in a file of the binder folder."""
    lines = (ROOT / "binder" / name).read_text("utf-8").splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith(("#", "--"))]


def seen_by(python, system, name="constraints.txt"):
    """Return the requirements in a file of the binder folder that count for a Python on a system."""
    environment = {"python_version": python, "sys_platform": system}
    return [
        requirement
        for requirement in requirements(name)
        if requirement.marker is None or requirement.marker.evaluate(environment)
    ]


def test_constraints_are_exact_versions():
    """Each line of the constraints pins one version."""
    for requirement in requirements("constraints.txt"):
        assert re.fullmatch(r"==[\w.]+", str(requirement.specifier)), requirement


def test_package_is_pinned_once_for_each_python():
    """No Python version on any system sees two pins of one package."""
    for python in PYTHONS:
        for system in SYSTEMS:
            seen = [requirement.name for requirement in seen_by(python, system)]
            assert len(set(seen)) == len(seen), (python, system)


def test_dependencies_are_pinned():
    """The constraints cover every dependency of the project and of its test and docs extras."""
    extras = PROJECT["optional-dependencies"]
    declared = [*PROJECT["dependencies"], *extras["test"], *extras["docs"]]
    pinned = {canonicalize_name(requirement.name) for requirement in requirements("constraints.txt")}

    assert {canonicalize_name(Requirement(name).name) for name in declared} <= pinned


def test_binder_installs_the_pinned_versions():
    """Binder's versions are those of the constraints, torch's in its CPU build."""
    python = (ROOT / "binder" / "runtime.txt").read_text().strip().removeprefix("python-")
    pins = {pin.name: str(pin.specifier) for pin in seen_by(python, "linux")}

    for requirement in requirements("requirements.txt"):
        assert str(requirement.specifier).removesuffix("+cpu") == pins[requirement.name]
    assert "torch==2.13.0+cpu" in (ROOT / "binder" / "requirements.txt").read_text()


def test_ci_runs_the_test_command_of_the_readme():
    """CI takes its test command from the README instead of repeating it."""
    assert "readme_command 'test command'" in (ROOT / ".ci" / "run").read_text()
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def commands(script):
    """Return the lines of a script that run a check."""
    lines = (ROOT / "scripts" / script).read_text().splitlines()
    return [line for line in lines if line.startswith(("ruff", "mypy", "python"))]


def test_test_command_runs_every_check():
    """The test command runs ruff, mypy and pytest, and pytest runs the doctests and nbval on the notebooks."""
    assert readme_command("test command").endswith("sh scripts/check.sh")
    assert commands("check.sh") == [
        "ruff check .",
        "ruff format --check .",
        "mypy",
        "python -m pytest -p tests.helpers.no_iri_checks -p no:faker -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder",
    ]
    assert {"--nbval", "--doctest-modules"} <= set(PYTEST["addopts"])
    assert PYTEST["testpaths"] == ["notebooks", "tests", "openmed_nb"]


def test_ci_runs_the_slow_lane_part_by_part():
    """CI runs each part of the slow suite that the script names, and the documentation describes every one."""
    parts = subprocess.check_output(["sh", ROOT / "scripts" / "check_slow.sh", "--list"], text=True).split()
    documented = (ROOT / "docs" / "checks.md").read_text("utf-8")

    assert "sh scripts/check_slow.sh --list" in (ROOT / ".ci" / "run").read_text()
    assert len(parts) == 4
    for part in parts:
        assert f"`{part}`" in documented


def test_changelog_has_a_section_for_this_version():
    """The changelog has a section for the version of the package."""
    assert f"## {openmed_nb.__version__}" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("name", ["constraints.txt", "torch.txt"])
def test_torch_has_one_pin_for_each_system(name):
    """A Mac takes the torch that remedies name, and every other system another one, in every file that names one."""
    assert MAC_TORCH == "torch==2.14.1"
    for system, pin in {"darwin": "==2.14.1", "linux": "==2.13.0", "win32": "==2.13.0"}.items():
        for python in PYTHONS:
            pins = [
                str(requirement.specifier)
                for requirement in seen_by(python, system, name)
                if requirement.name == "torch"
            ]
            assert pins == [pin], (python, system)


def test_other_files_name_the_torch_of_linux():
    """Binder and the README's line for NVIDIA GPUs name the torch that Linux takes."""
    for path in ("binder/requirements.txt", "README.md"):
        assert set(re.findall(r"torch==(\d+\.\d+\.\d+)", (ROOT / path).read_text())) == {"2.13.0"}, path


@pytest.mark.slow
@pytest.mark.skipif(UV is None, reason="needs uv, which the test extra installs")
@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize(
    ("platform", "system"), [("aarch64-apple-darwin", "darwin"), ("x86_64-unknown-linux-gnu", "linux")]
)
def test_pins_can_be_installed(python, platform, system):
    """Every pin and what it needs is there as a file for Macs with macOS 14 and for Linux, in each Python.

    pip reads the markers of the computer that it runs on, whatever platform it is asked about; uv does not. jieba, which
    openmed needs, and seqeval are only there as source, and are the same everywhere.
    """
    command = [UV, "pip", "compile", "pyproject.toml", "--all-extras", "-c", "binder/constraints.txt"]
    options = ["--python-platform", platform, "--python-version", python, "--only-binary=:all:"]
    options += ["--no-binary=jieba", "--no-binary=seqeval"]
    environment = {**os.environ, "MACOSX_DEPLOYMENT_TARGET": "14.0"}
    answer = subprocess.run(
        [*command, *options, "--quiet", "--no-annotate", "--no-header"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )

    assert answer.returncode == 0, answer.stderr
    found = {
        requirement.name: str(requirement.specifier) for requirement in map(Requirement, answer.stdout.splitlines())
    }
    pins = {canonicalize_name(requirement.name): str(requirement.specifier) for requirement in seen_by(python, system)}
    assert {name: found.get(name) for name in pins} == pins


def test_citation_has_the_facts_of_the_package():
    """CITATION.cff repeats what the package says of itself, and no other facts."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    holder = re.search(r"Copyright \d+ (.+)", (ROOT / "NOTICE").read_text("utf-8"))[1]

    assert citation["version"] == openmed_nb.__version__
    assert citation["authors"] == [{"name": holder}]


# The size of the code in tokens, and the number of parameters of public functions. What needs more raises a limit in a commit of
# its own, with the reason.
MAX_TOKENS = {"openmed_nb": 204_539, "tests": 296_500}
MAX_PARAMETERS = 135
UNCOUNTED_TOKENS = {
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.COMMENT,
}


def count_tokens(path):
    """Return the number of tokens of a module, without comments and docstrings."""
    text = path.read_text("utf-8")
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstring_lines = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, documented) and ast.get_docstring(node) is not None:
            docstring_lines.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(token.type not in UNCOUNTED_TOKENS and token.start[0] not in docstring_lines for token in tokens)


@pytest.mark.parametrize("folder", MAX_TOKENS)
def test_code_has_at_most_its_number_of_tokens(folder):
    assert sum(map(count_tokens, (ROOT / folder).rglob("*.py"))) <= MAX_TOKENS[folder]


def test_public_functions_have_at_most_their_number_of_parameters():
    modules = (openmed_nb, openmed_nb.runbook, openmed_nb.training, openmed_nb.training.loader)
    functions = [getattr(module, name) for module in modules for name in module.__all__]
    parameters = [inspect.signature(function).parameters for function in functions if inspect.isfunction(function)]

    assert sum(map(len, parameters)) <= MAX_PARAMETERS
