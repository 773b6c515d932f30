"""A misused magic fails under nbval, and the notebooks that are shipped keep their rules."""

import ast
import functools
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook
from nbval.plugin import get_sanitize_patterns
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
COURSE = [path for path in NOTEBOOKS if path.name < "07"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
INSTALLED = [
    *PROJECT["dependencies"],
    *PROJECT["optional-dependencies"]["notebooks"],
    "distributed",  # Part of dask[distributed].
]
MAX_CELLS = 12
SKIPPING = re.compile(r"nbval[-_](skip|ignore[-_]output|raises[-_]exception)|raises-exception", re.IGNORECASE)
ABSOLUTE = re.compile(r"(?<![\w./:<])(/(home|root|Users|tmp|work|opt|usr|var|private|content)/|[A-Z]:\\)")

MISUSES = {
    "an option that does not exist": "%openmed_device --bogus",
    "a device that does not exist": "%openmed_device banana",
    "a magic that does not exist": "%nosuchmagic",
    "a line magic as a cell magic": "%%openmed_device\ncpu",
    "a cell magic without a cell": "%%openmed_ner",
}


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    """The result of nbval alone for a notebook that was run and saved with its mistakes, as a user would save it.

    The outcomes of its cells are under "with_conftest" with this conftest.py, and under "alone" without; the rest is the output.
    """
    folder = tmp_path_factory.mktemp("misused")
    cells = ["%load_ext openmed_nb", *MISUSES.values(), "1 + 1"]
    notebook = new_notebook(cells=[new_code_cell(source) for source in cells])
    NotebookClient(notebook, allow_errors=True, kernel_name="python3", timeout=None).execute()
    for name in ("with_conftest", "alone"):
        (folder / name).mkdir()
        nbformat.write(notebook, folder / name / "misused.ipynb")
    shutil.copy(ROOT / "conftest.py", folder / "with_conftest")
    process = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "nbval.plugin", "--nbval", "--nbval-current-env", "-v", "."],
        cwd=folder,
        env={
            **os.environ,
            "IPYTHONDIR": str(folder / "ipython"),
            "PYTEST_ADDOPTS": "-p no:cacheprovider",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    outcomes = re.findall(r"(\w+)/misused::ipynb::Cell \d+ ([A-Z]+)", process.stdout)
    named = {name: [outcome for where, outcome in outcomes if where == name] for name in ("with_conftest", "alone")}
    return {**named, "output": process.stdout + process.stderr}


def test_misused_magic_fails(judged):
    """Under nbval with our conftest.py a cell that misuses a magic fails, even where its output is as it was saved."""
    assert judged["with_conftest"] == ["PASSED", *["FAILED"] * len(MISUSES), "PASSED"], judged["output"]


def test_nbval_alone_would_let_it_pass(judged):
    """Without our conftest.py nbval passes a magic that does not exist, which is why the conftest.py is there."""
    assert judged["alone"][list(MISUSES).index("a magic that does not exist") + 1] == "PASSED", judged["output"]


def test_notebooks_are_numbered():
    """There are notebooks, and they are named in their order: 01_a_note.ipynb."""
    assert NOTEBOOKS
    assert [path.name for path in NOTEBOOKS if not re.fullmatch(r"\d\d_[a-z0-9_]+\.ipynb", path.name)] == []


@pytest.fixture(scope="module", params=NOTEBOOKS, ids=lambda path: path.name)
def notebook(request):
    """Give each shipped notebook, checked against the notebook format."""
    notebook = nbformat.read(request.param, as_version=4)
    nbformat.validate(notebook)
    return notebook


def code_cells(notebook):
    """Return the cells that run."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_cells_were_run_from_the_top(notebook):
    """Every code cell was run, in order in one kernel; nbval compares nothing for a cell that was not."""
    counts = [cell.execution_count for cell in code_cells(notebook)]

    assert counts == list(range(1, len(counts) + 1))
    assert all(cell.source.strip() for cell in notebook.cells)


def test_notebook_has_a_title_and_at_most_a_dozen_code_cells(notebook):
    assert len(code_cells(notebook)) <= MAX_CELLS
    assert notebook.cells[0].cell_type == "markdown"
    assert notebook.cells[0].source.startswith("# ")


@pytest.mark.parametrize("path", COURSE, ids=lambda path: path.name)
def test_course_notebook_has_goal_exercise_and_end(path):
    """A notebook of the course states its goal first, has one exercise with a hidden answer, and ends with its results."""
    cells = nbformat.read(path, as_version=4).cells
    text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")

    for name in ("Goal", "Time", "Needs"):
        assert len(re.findall(rf"^\*\*{name}:\*\* [A-Z\w`]", cells[0].source, flags=re.MULTILINE)) == 1, name
    assert len(re.findall(r"^## Exercise$", text, flags=re.MULTILINE)) == 1
    assert len(re.findall(r"<details><summary>Answer</summary>\n\n(.*?)\n\n</details>", text, flags=re.DOTALL)) == 1
    assert cells[-1].cell_type == "markdown"
    assert cells[-1].source.startswith("## What you can do now\n")


def test_cells_are_run_and_compared(notebook):
    """No tag and no comment keeps nbval from running a cell or comparing its output."""
    for cell in code_cells(notebook):
        said = " ".join([*cell.metadata.get("tags", []), *re.findall(r"#.*", cell.source)])
        assert not SKIPPING.search(said), cell.source


def test_widget_state_and_timings_are_not_saved(notebook):
    """The file holds neither widget state nor the times of a run, which differ each time it is made."""
    assert "widgets" not in notebook.metadata
    assert not [cell.source for cell in notebook.cells if "execution" in cell.metadata]


def test_outputs_are_no_errors(notebook):
    """No saved output is an error, a message of a misused magic, or anything on standard error."""
    for cell in code_cells(notebook):
        for output in cell.outputs:
            assert output.output_type != "error", cell.source
            assert output.get("name") != "stderr", cell.source
            assert not re.search(r"UsageError|Traceback", str(output)), cell.source


def test_notebook_has_no_absolute_path(notebook):
    """No source and no output holds an absolute path."""
    for cell in notebook.cells:
        texts = [cell.source, *(str(output) for output in cell.get("outputs", ()))]
        assert not [path[0] for text in texts for path in ABSOLUTE.finditer(text)]


def test_notebook_stores_measurements_in_a_temporary_folder(notebook):
    """Measurements of synthetic texts must not be stored as validation records or batch sizes of the user."""
    code = "\n".join(cell.source for cell in code_cells(notebook))
    kept = re.search(r"\b(validate_precision|nb\.sweep|%openmed_sweep|nb\.report|%openmed_report)\b", code)

    assert not kept or 0 <= code.find('os.environ["OPENMED_NB_DATA"] = tempfile.mkdtemp()') < kept.start()


def test_links_of_notebooks_lead_to_files(notebook):
    """Every link of a notebook's text is an address, or names a file that is there."""
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    assert [link for link in links if not (ROOT / "notebooks" / link).exists()] == []


def imported(notebook):
    """Return the top-level packages that a notebook imports, by import or by %load_ext."""
    source = "\n".join(cell.source for cell in code_cells(notebook) if not cell.source.startswith("%%"))
    names = re.findall(r"^\s*%(?:re)?load_ext +([\w.]+)", source, flags=re.MULTILINE)
    for node in ast.walk(ast.parse(TransformerManager().transform_cell(source))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
    return {name.partition(".")[0] for name in names}


def test_extra_installs_what_a_notebook_imports(notebook):
    """Every import of a notebook is of the standard library, or installed by the package or its extra ``notebooks``."""
    names = {canonicalize_name(Requirement(line).name) for line in INSTALLED}
    packages = importlib.metadata.packages_distributions()

    for package in imported(notebook) - sys.stdlib_module_names - {"openmed_nb"}:
        assert names & {canonicalize_name(provider) for provider in packages.get(package, [package])}, package


def test_binder_installs_what_a_notebook_imports(notebook):
    """Every import of a notebook is of the standard library, of the package, or installed by Binder."""
    lines = (ROOT / "binder" / "requirements.txt").read_text("utf-8").splitlines()
    names = {canonicalize_name(Requirement(line).name) for line in lines if line and not line.startswith(("#", "-"))}
    packages = importlib.metadata.packages_distributions()

    for package in imported(notebook) - sys.stdlib_module_names - {"openmed_nb"}:
        assert names & {canonicalize_name(provider) for provider in packages.get(package, [package])}, package


WRONG = [
    ("worth_it", "keep this device", "move to MLX"),
    ("worth_it", "No action is needed.", "Buy a new computer."),
    ("worth_it", "all required metrics were measured", "data dominates"),
    ("worth_it", "forward dominates", "data dominates"),
    ("worth_it", "on cpu", "on mps"),
    ("worth_it", "Only the CPU is available", "There is a GPU"),
    ("worth_it", "speedup from 22 % to 30 %", "speedup from 22 % to 3 %"),
    ("right_numbers", "0 failed", "3 failed"),
    ("right_numbers", "correct; the result is on cpu", "wrong; the result is on cpu"),
    ("right_numbers", "9 packages are compatible", "9 packages are not compatible"),
    ("right_numbers", "cpu computes with float32", "cpu does not compute with float32"),
    ("right_numbers", "Accepted: bundled|bundled in bfloat16 on cpu", "Rejected: bundled"),
    ("right_numbers", "System status", "Sounds"),
    ("right_numbers", "memory pressure", "blood pressure"),
    ("names_out", "2 entities masked", "3 entities masked"),
    ("names_out", "Masking is not guaranteed", "Masking is guaranteed"),
]


@pytest.mark.parametrize(("name", "right", "wrong"), WRONG, ids=[wrong for _, _, wrong in WRONG])
def test_wrong_output_is_noticed(name, right, wrong):
    """What nbval leaves out of its comparison hides no other headline, verdict, or row of the doctor."""
    patterns = get_sanitize_patterns((ROOT / "tests" / "nbval_sanitize.cfg").read_text("utf-8"))

    def compared(text):
        return functools.reduce(lambda text, pattern: re.sub(*pattern, text), patterns, text)

    (notebook,) = (nbformat.read(path, as_version=4) for path in NOTEBOOKS if name in path.name)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    texts = [text for output in outputs for text in (output.get("text", ""), *output.get("data", {}).values())]
    said = [text for text in texts if isinstance(text, str) and re.search(right, text)]
    assert len(said) >= 2  # As text and as HTML.
    for text in said:
        assert compared(text) != compared(re.sub(right, wrong, text)), text


def test_sanitizing_patterns_are_read():
    """Every section of the patterns is read by nbval, which passes over one that it cannot read."""
    file = (ROOT / "tests" / "nbval_sanitize.cfg").read_text("utf-8")
    assert len(get_sanitize_patterns(file)) == len(re.findall(r"^\[\w+\]$", file, re.MULTILINE))
