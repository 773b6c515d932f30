"""A bundle in a new virtual environment and another directory, without a network."""

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
def fail(*_arguments, **_named):
    raise OSError("the network is disabled")
socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = fail
"""


@pytest.fixture(scope="module")
def environment_folder(tmp_path_factory, keyword_handoff):
    """Directory with a copy of the bundle and a virtual environment whose packages come from this environment."""
    folder = tmp_path_factory.mktemp("environment")
    shutil.copytree(keyword_handoff.folder, folder / "copied bundle")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder / "venv"), "platbase": str(folder / "venv")}))
    (site / "outside.pth").write_text(sysconfig.get_path("purelib"), "utf-8")
    (site / "no_network.py").write_text(NO_NETWORK, "utf-8")
    (site / "no_network.pth").write_text("import no_network", "utf-8")
    return folder


def run_in_environment(folder, *command):
    """Run a command of that environment in another directory, without the environment variables of this process."""
    removed_prefixes = ("PYTHON", "OPENMED", "HF_", "TRANSFORMERS")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(removed_prefixes)}
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


def test_smoke_script_passes_in_a_new_environment(environment_folder):
    """The script imports the package of the bundle, which is not installed."""
    folder = environment_folder / "copied bundle"
    process = run_in_environment(environment_folder, str(folder / "smoke.py"))

    assert process.returncode == 0, process.stdout + process.stderr
    assert process.stdout.startswith("Smoke test passed")
    assert (folder / "openmed_nb" / "__pycache__").is_dir()
