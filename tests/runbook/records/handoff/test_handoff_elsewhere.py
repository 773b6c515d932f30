"""A bundle in a fresh virtual environment, in another folder, without a network."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

pytestmark = [pytest.mark.real_computer, pytest.mark.slow]

NO_NETWORK = """
import socket
def refuse(*_arguments, **_named):
    raise OSError("there is no network here")
socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = refuse
"""


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory, handed_over):
    """A folder with a copy of the bundle and a fresh environment that has its wheel; the large packages come from outside."""
    folder = tmp_path_factory.mktemp("elsewhere")
    shutil.copytree(handed_over.folder, folder / "taken along")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder / "venv"), "platbase": str(folder / "venv")}))
    (wheel,) = (folder / "taken along" / "wheels").iterdir()
    install = ["pip", "install", "--quiet", "--no-index", "--no-deps", "--target", str(site), str(wheel)]
    subprocess.run([sys.executable, "-m", *install], check=True)
    (site / "outside.pth").write_text(sysconfig.get_path("purelib"), "utf-8")
    (site / "no_network.py").write_text(NO_NETWORK, "utf-8")
    (site / "no_network.pth").write_text("import no_network", "utf-8")
    return folder


def run(folder, *command):
    """Run a command of that environment in another folder, without what this process has in its environment."""
    ours = ("PYTHON", "OPENMED", "HF_", "TRANSFORMERS")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    (folder / "work").mkdir(exist_ok=True)
    python = folder / "venv" / ("Scripts" if os.name == "nt" else "bin") / "python"
    return subprocess.run(
        [str(python), *command],
        cwd=folder / "work",
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )


def test_it_runs_in_a_fresh_environment(elsewhere):
    """The smoke script passes with the toolkit of the wheel, in another folder, without a network, and writes its result."""
    where = run(elsewhere, "-c", "import openmed_nb; print(openmed_nb.__file__)")
    done = run(elsewhere, str(elsewhere / "taken along" / "smoke.py"))
    result = json.loads((elsewhere / "taken along" / "smoke.json").read_text("utf-8"))

    assert Path(where.stdout.strip()).is_relative_to(elsewhere / "venv"), where.stderr
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("Smoke test passed")
    assert result["passed"] is True
    assert {one["name"]: one["status"] for one in result["findings"]}["entities"] == "ok"
