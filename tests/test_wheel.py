import json
import os
import subprocess
import zipfile

import pytest

import openmed_nb
from helpers import ROOT
from helpers.processes import run_python

MAX_WHEEL_BYTES = 25_000_000


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Return the wheel, built from the source tree."""
    folder = tmp_path_factory.mktemp("dist")
    done = run_python("-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT)
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl")
    return built


def test_wheel_is_small(wheel):
    """The wheel stays under 25 MB with both models inside."""
    assert wheel.stat().st_size < MAX_WHEEL_BYTES


def test_wheel_carries_models_types_and_licences(wheel):
    """The wheel has the models with their cards, the note, the files that the code reads, the marker for type checkers and the licences."""
    names = set(zipfile.ZipFile(wheel).namelist())
    folder = "openmed_nb/models/bundled"
    model_files = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "README.md")

    read = {
        "runbook/records/logbook.schema.json",
        "runbook/records/report.schema.json",
        "notebook/panel/panel.css",
        "annotation/browser.css",
        "annotation/browser.js",
    }
    read |= {f"runbook/records/templates/{name}" for name in ("README.md", "run.sh", "openmed_nb.plist.txt")}
    assert {"openmed_nb/py.typed", f"{folder}/synthetic_note.txt", *(f"openmed_nb/{name}" for name in read)} <= names
    assert {f"{folder}/{model}/{file}" for model in ("disease", "disease_small") for file in model_files} <= names
    assert {name.rpartition("/")[2] for name in names if "/licenses/" in name} == {"LICENSE", "NOTICE"}


def test_wheel_has_one_console_script(wheel):
    archive = zipfile.ZipFile(wheel)
    (file,) = [name for name in archive.namelist() if name.endswith(".dist-info/entry_points.txt")]

    assert archive.read(file).decode().split("\n")[:2] == ["[console_scripts]", "openmed-nb = openmed_nb.__main__:main"]


def test_wheel_passes_twine(wheel):
    """The wheel's description is one that a package index renders."""
    done = run_python("-m", "twine", "check", "--strict", wheel)

    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_wheel_does_the_main_job(wheel, tmp_path):
    """The package in the wheel, alone in a folder, finds diseases in its note."""
    target = tmp_path / "site"
    installed = run_python("-m", "pip", "install", "--no-deps", "--no-index", "--quiet", "--target", target, wheel)
    assert installed.returncode == 0, installed.stderr

    environ = {"PYTHONPATH": str(target)}
    done = run_python("-m", "openmed_nb", "--json", cwd=tmp_path, environ=environ)
    where = run_python("-c", "import openmed_nb; print(openmed_nb.__file__)", cwd=tmp_path, environ=environ)
    script = next(target.glob("[bS]*/openmed-nb*"))  # "bin", or "Scripts" on Windows.
    version = subprocess.run(
        [script, "--version"], env={**os.environ, **environ}, capture_output=True, text=True, check=True
    )
    answer = json.loads(done.stdout)

    assert where.stdout.startswith(str(target))
    assert version.stdout == f"openmed_nb {openmed_nb.__version__}\n"
    assert answer["choice"]["device"] == "cpu"
    assert "type 2 diabetes mellitus" in [entity["word"] for entity in answer["entities"]]
