"""The README's own lines, typed in an empty environment: after them every notebook runs, also a second time."""

import json
import os
import shlex
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from helpers.readme import readme_command

ROOT = Path(__file__).parents[1]
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

# Runs notebooks like Run All, each in a separate kernel, and prints failures.
RUN_ALL = """
import json, sys
from pathlib import Path
import nbformat
from nbclient import NotebookClient

failed = {}
for name in sys.argv[1:]:
    notebook = nbformat.read(name, as_version=4)
    resources = {"metadata": {"path": str(Path(name).parent)}}
    try:
        NotebookClient(notebook, timeout=900, kernel_name="python3", resources=resources).execute()
    except Exception as error:
        failed[Path(name).name] = str(error)[-600:]
print(json.dumps(failed))
"""


def test_readme_installs_what_the_notebooks_need():
    """The line that opens a notebook installs the extra of the notebooks with the pinned versions."""
    install, opened = readme_command("notebooks").split(" && ")

    assert shlex.split(install)[-2:] == [".[notebooks]", "jupyterlab"]
    assert "-c binder/constraints.txt" in install
    assert (ROOT / shlex.split(opened)[-1]).is_file()


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
    for command in (readme_command("main job"), readme_command("notebooks").partition(" && ")[0]):
        done = subprocess.run(
            ["sh", "-c", command], cwd=clone, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return clone, home, environment


@pytest.mark.slow
@pytest.mark.timeout(5400)
@pytest.mark.skipif(sys.platform == "win32", reason="the README's lines are for a shell of Unix")
def test_notebooks_run_twice_after_the_lines_of_the_readme(installed):
    """Every notebook runs twice in the same home and leaves nothing in the user's data folder."""
    clone, home, environment = installed
    names = sorted(map(str, (clone / "notebooks").glob("[0-9]*.ipynb")))
    program = [str(clone / ".venv" / "bin" / "python"), "-c"]
    asked = "import platformdirs; print(platformdirs.user_data_path('openmed_nb', appauthor=False))"
    data = subprocess.check_output([*program, asked], env=environment, text=True).strip()

    for turn in ("first", "second"):
        done = subprocess.run([*program, RUN_ALL, *names], env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        assert json.loads(done.stdout.splitlines()[-1]) == {}, turn
    assert data.startswith(str(home))
    assert not Path(data).exists()
