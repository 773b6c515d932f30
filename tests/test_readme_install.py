"""The README's own lines, typed in an empty environment: after them every notebook runs, also a second time."""

import json
import os
import re
import shlex
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from helpers import ROOT
from helpers.readme import readme_command

COPIED = ("openmed_nb", "notebooks", "binder", "pyproject.toml", "README.md", "LICENSE", "NOTICE")
WITHOUT = (
    "PYTHONPATH",
    "PYTHONHOME",
    "VIRTUAL_ENV",
    "OPENMED_NB_DATA",
    "OPENMED_DEVICE",
    "XDG_DATA_HOME",
    "IPYTHONDIR",
)

# Folders in the home in which IPython, Jupyter and pip keep settings and caches.
WRITTEN_BY_LIBRARIES = {".ipython", ".jupyter", ".config", ".cache", ".local"}

# Runs notebooks like Run All, each in a separate kernel, then the answers of their exercises, and prints failures.
RUN_ALL = """
import json, re, sys
from pathlib import Path
import nbformat
from nbclient import NotebookClient

failed = {}
for name in sys.argv[1:]:
    notebook = nbformat.read(name, as_version=4)
    text = "\\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    for answer in re.findall(r"<details>(.*?)</details>", text, flags=re.DOTALL):
        codes = re.findall(r"```(?:python)?\\n(.*?)\\n```", answer, flags=re.DOTALL)
        notebook.cells += [nbformat.v4.new_code_cell(code) for code in codes]
    resources = {"metadata": {"path": str(Path(name).parent)}}
    try:
        NotebookClient(notebook, timeout=900, kernel_name="python3", resources=resources).execute()
    except Exception as error:
        failed[Path(name).name] = str(error)[-600:]
print(json.dumps(failed))
"""


def test_readme_serves_the_folders_that_the_notebooks_link_to():
    """JupyterLab opens no link to a file outside the root folder of its server."""
    command = shlex.split(readme_command("notebooks").split(" && ")[-1])
    served = {word.partition("=")[0]: word.partition("=")[2] for word in command}.get("--notebook-dir")
    root = (ROOT / (served or Path(command[-1]).parent)).resolve()
    links = [
        (path, link)
        for path in (ROOT / "notebooks").glob("*.ipynb")
        for link in re.findall(r"\]\((\.\./[^)#]+)", path.read_text("utf-8"))
    ]

    assert links
    for path, link in links:
        target = (path.parent / link).resolve()
        assert target.is_file(), link
        assert target.is_relative_to(root), link


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A copy of the project with an empty virtual environment in which the README's lines were run, and the environment of it."""
    folder = tmp_path_factory.mktemp("newcomer")
    clone, home = folder / "clone", folder / "home"
    home.mkdir()
    clone.mkdir()
    subprocess.run(["cp", "-r", *(str(ROOT / name) for name in COPIED), str(clone)], check=True)
    venv.create(clone / ".venv", with_pip=True)
    kept = {name: value for name, value in os.environ.items() if name not in WITHOUT}
    path = f"{clone / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment = {**kept, "HOME": str(home), "PATH": path, "HF_HUB_OFFLINE": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    for command in (readme_command("notebooks").rpartition(" && ")[0], readme_command("main job")):
        done = subprocess.run(
            ["sh", "-c", command], cwd=clone, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return clone, home, environment


def list_files(folder):
    """Return the files below a folder, relative to it, without the environment and compiled modules."""
    files = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {path for path in files if not {".venv", "__pycache__"} & {*path.parts}}


@pytest.mark.slow
@pytest.mark.timeout(5400)
@pytest.mark.skipif(sys.platform == "win32", reason="the README's lines are for a shell of Unix")
def test_notebooks_run_twice_after_the_lines_of_the_readme(installed):
    """Every notebook runs twice in the same home, and writes nothing but caches and temporary files."""
    clone, home, environment = installed
    names = sorted(map(str, (clone / "notebooks").glob("[0-9]*.ipynb")))
    program = [str(clone / ".venv" / "bin" / "python"), "-c"]
    asked = "import platformdirs; print(platformdirs.user_data_path('openmed_nb', appauthor=False))"
    data = subprocess.check_output([*program, asked], env=environment, text=True).strip()
    before = list_files(clone)
    # pip runs `rustc --version`, for which rustup creates a folder.
    written_by_pip = {path.name for path in home.iterdir()}

    for turn in ("first", "second"):
        done = subprocess.run([*program, RUN_ALL, *names], env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        assert json.loads(done.stdout.splitlines()[-1]) == {}, turn
    assert data.startswith(str(home))
    assert not Path(data).exists()
    assert list_files(clone) == before
    assert {path.parts[0] for path in list_files(home)} <= WRITTEN_BY_LIBRARIES | written_by_pip
