"""The scripts of a bundle: the shell script from anywhere, and the smoke script where the bundle or the toolkit is broken."""

import configparser
import os
import plistlib
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from openmed_nb.models.files import ModelHashes
from openmed_nb.runbook.records.handoff.bundle import render_scripts
from openmed_nb.runbook.records.handoff.smoke import GoldenRun

GOLDEN = GoldenRun(
    "model", True, ModelHashes("a", "b", "c"), "float32", "cpu", 4, 6, 1, {"OMP_NUM_THREADS": "2"}, None, False
)


@pytest.fixture
def bundle(tmp_path):
    """A folder with the scripts of a bundle, and a program that tells where it runs in the place of Python."""
    folder = tmp_path / "a bundle"
    (tmp_path / "bin").mkdir()
    folder.mkdir()
    for name, text in render_scripts(GOLDEN).items():
        (folder / name).write_text(text, "utf-8")
    for name in ("python3", "other"):
        (tmp_path / "bin" / name).write_text('#!/bin/sh\necho "$(pwd) $OMP_NUM_THREADS $@"\n', "utf-8")
        (tmp_path / "bin" / name).chmod(0o755)
    return folder


def shell(script, cwd, **variables):
    """Return what a shell script prints, in a folder and with little else than the tools of a system."""
    done = subprocess.run(
        ["/bin/sh", script, "--device", "cpu"], cwd=cwd, env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def tools(bundle):
    """A PATH that has python3 and no python."""
    for name in ("dirname", "readlink"):
        found = next(one for folder in ("/usr/bin", "/bin") if (one := Path(folder, name)).exists())
        (bundle.parent / "bin" / name).symlink_to(found)
    return str(bundle.parent / "bin")


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such shell")
def test_the_shell_script_runs_from_anywhere(bundle, tools):
    """It runs in its own folder: called from outside, through links, with a CDPATH, and where only python3 is there."""
    outside = bundle.parent
    decoy = outside / "decoy"
    (decoy / "a bundle").mkdir(parents=True)
    (outside / "link").symlink_to("a bundle/run.sh")
    (outside / "second").symlink_to(outside / "link")
    expected = f"{bundle.resolve()} 2 smoke.py --device cpu"

    assert shell("a bundle/run.sh", outside, PATH=tools, CDPATH=str(decoy)) == expected
    assert shell("run.sh", bundle, PATH=tools) == expected
    assert shell("link", outside, PATH=tools) == expected
    assert shell(str(outside / "second"), Path("/"), PATH=tools) == expected
    assert shell("link", outside, PATH=tools, PYTHON=str(outside / "bin" / "other")) == expected


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such shell")
def test_systemd_and_launchd_run_the_golden_command(bundle, tools):
    """The unit and the plist run run.sh in a folder of the home, with the Python of its virtual environment."""
    home = bundle.parent / "home"
    home.mkdir()
    folder = bundle.rename(home / "openmed_bundle")
    (folder / ".venv" / "bin").mkdir(parents=True)
    (folder / ".venv" / "bin" / "python").symlink_to(bundle.parent / "bin" / "other")
    expected = f"{folder.resolve()} 2 smoke.py"
    unit = configparser.RawConfigParser()
    unit.optionxform = str
    unit.read_string((folder / "openmed_nb.service").read_text("utf-8"))
    service, plist = unit["Service"], plistlib.loads((folder / "openmed_nb.plist").read_bytes())
    environment = {"PATH": tools, "HOME": str(home)}

    by_systemd = subprocess.run(
        shlex.split(service["ExecStart"]),
        cwd=service["WorkingDirectory"].replace("%h", str(home)),
        env={**environment, **dict([service["Environment"].split("=")])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert by_systemd.stdout.strip() == expected
    link = bundle.parent / "bin" / "sh"
    link.symlink_to("/bin/sh")
    subprocess.run(plist["ProgramArguments"], cwd="/", env=environment, check=True)
    assert (folder / "smoke.log").read_text("utf-8").strip() == expected


BROKEN = {
    "no golden run": (None, "golden.json of the bundle cannot be read"),
    "a cut one": ('{"variables": {', "golden.json of the bundle cannot be read"),
    "no variables": ("{}", "golden.json of the bundle cannot be read"),
    "a number": ('{"variables": 5}', "golden.json of the bundle cannot be read"),
    "no toolkit": ('{"variables": {}}', "openmed_nb cannot be imported here"),
}


@pytest.mark.parametrize(("golden", "says"), BROKEN.values(), ids=BROKEN)
def test_what_is_broken_is_one_line(bundle, golden, says):
    """Without a golden run, or without the toolkit, the script says so in one line, fails, and keeps no earlier result."""
    if golden is not None:
        (bundle / "golden.json").write_text(golden, "utf-8")
    (bundle / "smoke.json").write_text('{"passed": true}', "utf-8")
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(bundle / "smoke.py")], capture_output=True, text=True, check=False
    )

    assert done.returncode == 1
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert not (bundle / "smoke.json").exists()
