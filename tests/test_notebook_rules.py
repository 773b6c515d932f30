"""A misused magic fails under nbval, and the notebooks that are shipped keep their rules."""

import ast
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
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
LONGEST = 12
SKIPPING = re.compile(r"nbval[-_](skip|ignore[-_]output|raises[-_]exception)|raises-exception", re.IGNORECASE)
ABSOLUTE = re.compile(r"(?<![\w./:<])(/(home|root|Users|tmp|work|opt|usr|var|private|content)/|[A-Z]:\\)")

MISUSES = {
    "an option that does not exist": "%openmed_device --bogus",
    "a device that does not exist": "%openmed_device banana",
    "a magic that does not exist": "%nosuchmagic",
    "a line magic as a cell magic": "%%openmed_device\ncpu",
    "a cell magic without a cell": "%%openmed_ner",
}


def run_nbval(folder):
    """Run nbval on a folder, and return the outcome of each cell in order, and all output."""
    options = "--nbval --nbval-current-env -v -p no:cacheprovider -p no:randomly ."
    process = subprocess.run(
        [sys.executable, "-m", "pytest", *options.split()],
        cwd=folder,
        env={**os.environ, "IPYTHONDIR": str(folder / "ipython"), "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    return re.findall(
        r"ipynb::Cell \d+ (PASSED|FAILED|SKIPPED|XFAIL|XPASS)", process.stdout
    ), process.stdout + process.stderr


@pytest.fixture(scope="module")
def misused(tmp_path_factory):
    """Give a folder with a notebook that was run and saved with its mistakes, as a person would save it."""
    folder = tmp_path_factory.mktemp("misused")
    cells = ["%load_ext openmed_nb", *MISUSES.values(), "1 + 1"]
    notebook = new_notebook(cells=[new_code_cell(source) for source in cells])
    NotebookClient(notebook, allow_errors=True, kernel_name="python3", timeout=120).execute()
    nbformat.write(notebook, folder / "misused.ipynb")
    return folder


@pytest.fixture(scope="module")
def judged(misused):
    """Give the outcome of each cell of that notebook under nbval with our conftest.py."""
    shutil.copy(ROOT / "conftest.py", misused)
    return run_nbval(misused)


@pytest.mark.parametrize("index", range(1, 1 + len(MISUSES)), ids=MISUSES)
def test_a_misused_magic_fails(judged, index):
    """Under nbval with our conftest.py a cell that misuses a magic fails, even where its output is as it was saved."""
    outcomes, printed = judged

    assert outcomes[index] == "FAILED", printed


def test_cells_without_a_mistake_pass(judged):
    """The cells before and after the mistakes pass."""
    outcomes, printed = judged

    assert [outcomes[0], outcomes[-1]] == ["PASSED", "PASSED"], printed


def test_nbval_alone_would_let_it_pass(misused, tmp_path):
    """Without our conftest.py nbval passes a magic that does not exist, which is why the conftest.py is there."""
    shutil.copy(misused / "misused.ipynb", tmp_path)
    outcomes, printed = run_nbval(tmp_path)

    assert outcomes[list(MISUSES).index("a magic that does not exist") + 1] == "PASSED", printed


def test_there_is_a_notebook():
    """The folder holds at least one notebook, so that the rules below judge something."""
    assert NOTEBOOKS


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.name)
def path(request):
    """Give the path of each shipped notebook."""
    return request.param


@pytest.fixture
def notebook(path):
    """Give each shipped notebook, checked against the notebook format."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return notebook


def code_cells(notebook):
    """Return the cells that run."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_names_are_numbered(path):
    """Notebooks are named in their order: 01_quickstart.ipynb."""
    assert re.fullmatch(r"\d\d_[a-z0-9_]+\.ipynb", path.name)


def test_every_cell_was_run_from_the_top(notebook):
    """Every code cell was run, in order in one kernel; nbval compares nothing for a cell that was not."""
    counts = [cell.execution_count for cell in code_cells(notebook)]

    assert counts == list(range(1, len(counts) + 1))
    assert all(cell.source.strip() for cell in notebook.cells)


def test_a_page_is_short(notebook):
    """A notebook has at most a dozen code cells, and begins with a title."""
    assert len(code_cells(notebook)) <= LONGEST
    assert notebook.cells[0].cell_type == "markdown"
    assert notebook.cells[0].source.startswith("# ")


def test_no_cell_is_skipped_or_left_uncompared(notebook):
    """No tag and no comment keeps nbval from running a cell or comparing its output."""
    for cell in code_cells(notebook):
        said = " ".join([*cell.metadata.get("tags", []), *re.findall(r"#.*", cell.source)])
        assert not SKIPPING.search(said), cell.source


def test_no_widget_state_and_no_timings_are_saved(notebook):
    """The file holds neither widget state nor the times of a run, which differ each time it is made."""
    assert "widgets" not in notebook.metadata
    assert not [cell.source for cell in notebook.cells if "execution" in cell.metadata]


def test_no_output_is_an_error(notebook):
    """No saved output is an error, a message of a misused magic, or anything on standard error."""
    for cell in code_cells(notebook):
        for output in cell.outputs:
            assert output.output_type != "error", cell.source
            assert output.get("name") != "stderr", cell.source
            assert not re.search(r"UsageError|Traceback", str(output)), cell.source


def test_nothing_names_the_computer_it_was_made_on(notebook):
    """No source and no output holds an absolute path."""
    for cell in notebook.cells:
        texts = [cell.source, *(str(output) for output in cell.get("outputs", ()))]
        assert not [found[0] for text in texts for found in ABSOLUTE.finditer(text)]


def imported(notebook):
    """Return the top-level packages that a notebook imports, by import or by %load_ext."""
    source = "\n".join(cell.source for cell in code_cells(notebook) if not cell.source.startswith("%%"))
    extensions = re.findall(r"^\s*%(?:re)?load_ext +([\w.]+)", source, flags=re.MULTILINE)
    names = list(extensions)
    for node in ast.walk(ast.parse(TransformerManager().transform_cell(source))):
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
    return {name.partition(".")[0] for name in names}


def requirements(file):
    """Return the names of the packages that a requirements file installs, files that it includes counted in."""
    names = set()
    for line in file.read_text("utf-8").splitlines():
        entry = line.partition(" #")[0].strip()
        if entry.startswith("-r"):
            names |= requirements(file.parent / entry.removeprefix("-r").strip())
        elif entry and not entry.startswith(("#", "-")):
            names.add(normalised(Requirement(entry).name))
    return names


def normalised(name):
    """Return the one spelling of a package's name."""
    return re.sub(r"[-_.]+", "-", name).lower()


def test_binder_installs_what_a_notebook_imports(notebook):
    """Every import of a notebook is Python's own, ours, or installed by Binder."""
    installed = requirements(ROOT / "binder" / "requirements.txt")
    packages = importlib.metadata.packages_distributions()
    foreign = imported(notebook) - sys.stdlib_module_names - {"openmed_nb"}
    providers = {name: {normalised(one) for one in packages.get(name, [name])} for name in foreign}

    assert {name for name, distributions in providers.items() if not distributions & installed} == set()
