"""A misused magic fails under nbval, and the notebooks that are shipped keep their rules."""

import ast
import functools
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys

import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook
from nbval.plugin import get_sanitize_patterns
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from helpers import ROOT
from helpers.project import PYPROJECT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PROJECT = PYPROJECT["project"]
MAX_CELLS = 12
MAX_LINES = 15
ONCE_OR_STATE = re.compile(r"print\(warning\.message\)|%openmed_(device|doctor)( --reset)?$", re.MULTILINE)
"""Cells that show warnings of the first use, or the state of the session."""

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
    """The outcomes of nbval for a notebook that was run and saved with its mistakes, as a user would save it, and its output."""
    folder = tmp_path_factory.mktemp("misused")
    cells = ["%load_ext openmed_nb", *MISUSES.values(), "1 + 1"]
    notebook = new_notebook(cells=[new_code_cell(source) for source in cells])
    NotebookClient(notebook, allow_errors=True, kernel_name="python3", timeout=None).execute()
    nbformat.write(notebook, folder / "misused.ipynb")
    shutil.copy(ROOT / "conftest.py", folder)
    environ = {
        **os.environ,
        "IPYTHONDIR": str(folder / "ipython"),
        "PYTEST_ADDOPTS": "-p no:cacheprovider",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    command = [sys.executable, "-m", "pytest", "-p", "nbval.plugin", "--nbval", "--nbval-current-env", "-v", "."]
    process = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)
    return re.findall(r"misused::ipynb::Cell \d+ ([A-Z]+)", process.stdout), process.stdout + process.stderr


def test_misused_magic_fails(judged):
    """Under nbval with our conftest.py a cell that misuses a magic fails, even where its output is as it was saved."""
    outcomes, output = judged

    assert outcomes == ["PASSED", *["FAILED"] * len(MISUSES), "PASSED"], output


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


def test_notebook_has_a_title_and_at_most_a_dozen_short_code_cells(notebook):
    assert len(code_cells(notebook)) <= MAX_CELLS
    assert [cell.source for cell in code_cells(notebook) if len(cell.source.splitlines()) > MAX_LINES] == []
    assert notebook.cells[0].cell_type == "markdown"
    assert notebook.cells[0].source.startswith("# ")


@pytest.mark.parametrize("name", ["Goal", "Time", "Needs"])
def test_first_cell_states_goal_time_and_needs(notebook, name):
    """Each is a paragraph; the goal is one sentence."""
    paragraphs = notebook.cells[0].source.split("\n\n")
    (text,) = (paragraph for paragraph in paragraphs if paragraph.startswith(f"**{name}:** "))

    assert text.endswith(".")
    if name == "Goal":
        assert len(re.findall(r"[.!?](?=\s|$)", text)) == 1


def test_notebook_has_an_exercise_with_a_folded_answer(notebook):
    (cell,) = (cell for cell in notebook.cells if re.search(r"^## Exercise$", cell.source, re.MULTILINE))
    exercise = cell.source.partition("## Exercise\n")[2]

    assert cell.cell_type == "markdown"
    assert re.search(r"<details>\n<summary>Answer</summary>\n\n.+\n\n</details>", exercise, re.DOTALL)
    assert exercise.index("<details>") > 20  # The question comes first.


def test_notebook_ends_with_what_the_reader_can_do(notebook):
    heading, _, text = notebook.cells[-1].source.partition("\n\n")

    assert notebook.cells[-1].cell_type == "markdown"
    assert heading == "## What you can do now"
    assert len(re.findall(r"^- .+", text, re.MULTILINE)) == 3


def test_cells_are_run_and_compared(notebook):
    """No tag and no comment keeps nbval from running a cell or comparing its output."""
    for cell in code_cells(notebook):
        said = " ".join([*cell.metadata.get("tags", []), *re.findall(r"#.*", cell.source)])
        assert not SKIPPING.search(said), cell.source


def test_widget_state_and_timings_are_not_saved(notebook):
    """The file holds neither widget state nor the times of a run, which differ each time it is made."""
    assert "widgets" not in notebook.metadata
    assert not [cell.source for cell in notebook.cells if "execution" in cell.metadata]


def test_metadata_are_those_that_jupyter_writes(notebook):
    """JupyterLab adds no metadata, so that a notebook is not marked as changed when it is opened in the same Python."""
    assert {*notebook.metadata} == {"kernelspec", "language_info"}
    assert notebook.metadata.language_info.name == "python"
    assert notebook.nbformat_minor == 5


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_second_run_in_one_kernel_repeats_the_outputs(notebook, helper):
    """Run All works a second time without a restart. Its outputs are the same, where they do not report the session's past."""
    sources = [cell.source for cell in code_cells(notebook)]
    twice = new_notebook(cells=[new_code_cell(source) for source in (*sources, *sources)])
    resources = {"metadata": {"path": ROOT / "notebooks"}}
    NotebookClient(twice, kernel_name="python3", timeout=None, resources=resources).execute()
    compared = helper(ROOT / "scripts" / "regenerate_notebooks.py").compared
    texts = [[output.get("text") or output.data["text/plain"] for output in cell.outputs] for cell in twice.cells]
    outputs = [compared("".join(cell_texts)) for cell_texts in texts]

    for source, first, second in zip(sources, outputs, outputs[len(sources) :], strict=False):
        assert second == first or ONCE_OR_STATE.search(source), source


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
        texts = [cell.source, *map(str, cell.get("outputs", ()))]
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


def read_code(notebook):
    """Return the code of a notebook without cell magics."""
    return "\n".join(cell.source for cell in code_cells(notebook) if not cell.source.startswith("%%"))


def imported(notebook):
    """Return the top-level packages that a notebook imports, by import or by %load_ext."""
    names = re.findall(r"^\s*%(?:re)?load_ext +([\w.]+)", read_code(notebook), flags=re.MULTILINE)
    for node in ast.walk(ast.parse(TransformerManager().transform_cell(read_code(notebook)))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
    return {name.partition(".")[0] for name in names}


@pytest.fixture(scope="module")
def providers():
    """Distributions by the packages that they install."""
    return importlib.metadata.packages_distributions()


def test_imports_of_a_notebook_are_installed(notebook, providers):
    """The package with its extra ``notebooks``, and Binder, install every import of a notebook."""
    extra = [
        *PROJECT["dependencies"],
        *PROJECT["optional-dependencies"]["notebooks"],
        "distributed",
    ]  # Of dask[distributed].
    binder = (ROOT / "binder" / "requirements.txt").read_text("utf-8").splitlines()
    for lines in (extra, binder):
        names = {
            canonicalize_name(Requirement(line).name) for line in lines if line and not line.startswith(("#", "-"))
        }
        for package in imported(notebook) - sys.stdlib_module_names - {"openmed_nb"}:
            assert names & {canonicalize_name(provider) for provider in providers.get(package, [package])}, package


def find_optional_imports():
    """Return the packages of the extra ``notebooks``, each with the last notebook that imports it."""
    optional = {canonicalize_name(Requirement(line).name) for line in PROJECT["optional-dependencies"]["notebooks"]}
    return {
        name: path
        for path in NOTEBOOKS
        for name in sorted(imported(nbformat.read(path, as_version=4)))
        if canonicalize_name(name) in optional
    }


OPTIONAL_IMPORTS = find_optional_imports()


@pytest.mark.parametrize(("name", "path"), OPTIONAL_IMPORTS.items(), ids=OPTIONAL_IMPORTS)
def test_notebook_stops_politely_without_an_optional_package(name, path):
    """The first cell names the package, and the cell that imports it stops with the command that installs it."""
    notebook = nbformat.read(path, as_version=4)
    cells = [cell.source for cell in code_cells(notebook)]
    last = next(number for number, source in enumerate(cells) if re.search(rf"\b(import|from) {name}\b", source))
    missing = f"import sys\nsys.modules[{name!r}] = None  # Its import fails."
    stopped = new_notebook(cells=[new_code_cell(source) for source in (missing, *cells[: last + 1])])
    NotebookClient(stopped, allow_errors=True, kernel_name="python3", timeout=None).execute()
    errors = [output for cell in stopped.cells for output in cell.outputs if output.output_type == "error"]

    assert name in notebook.cells[0].source.partition("**Needs:** ")[2].partition("\n\n")[0]
    assert [error.evalue for error in errors if "[notebooks]" in error.evalue and name in error.evalue]
    assert len(errors) == 1
    assert len(errors[0].traceback) == 1


WRONG = [
    ("worth_it", "keep this device", "move to MLX"),
    ("worth_it", "No action is needed.", "Buy a new computer."),
    ("worth_it", "none is clearly beyond its gate", "data dominates"),
    ("worth_it", "forward dominates", "data dominates"),
    ("worth_it", "on cpu", "on mps"),
    ("worth_it", "this computer has no GPU", "this computer has a GPU"),
    ("worth_it", "notes like these per hour", "notes like these per day"),
    ("worth_it", "Comparable", "Not comparable"),
    ("worth_it", "speedup from 22% to 30%", "speedup from 22% to 3%"),
    ("right_numbers", "0 failed", "3 failed"),
    ("right_numbers", "correct; the result is on cpu", "wrong; the result is on cpu"),
    ("right_numbers", "9 packages are compatible", "9 packages are not compatible"),
    ("right_numbers", "cpu computes with float32", "cpu does not compute with float32"),
    ("right_numbers", "Not validated: bundled", "Accepted: bundled"),
    ("worth_it", "System status", "Sounds"),
    ("worth_it", "memory pressure", "blood pressure"),
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
