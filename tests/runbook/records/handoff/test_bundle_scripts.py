"""Scripts of a bundle: the shell script, the service files, and errors of the smoke script."""

import configparser
import os
import plistlib
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from helpers.processes import run_python
from openmed_nb.runbook.records.handoff import TEMPLATES, render_run_script


@pytest.fixture
def bundle(tmp_path):
    """Directory with the scripts of a bundle, and a program that prints its directory instead of Python."""
    folder = tmp_path / "a bundle"
    (tmp_path / "bin").mkdir()
    folder.mkdir()
    for name in ("smoke.py", "openmed_nb.service", "openmed_nb.plist"):
        shutil.copyfile(TEMPLATES / f"{name}.txt", folder / name)
    (folder / "run.sh").write_text(render_run_script({"OMP_NUM_THREADS": "2"}), "utf-8")
    for name in ("python3", "other"):
        (tmp_path / "bin" / name).write_text('#!/bin/sh\necho "$(pwd) $OMP_NUM_THREADS $@"\n', "utf-8")
        (tmp_path / "bin" / name).chmod(0o755)
    return folder


def run_script(script, cwd, **variables):
    """Return the output of a shell script in a directory, with a minimal environment."""
    process = subprocess.run(["/bin/sh", script], cwd=cwd, env=variables, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    return process.stdout.strip()


@pytest.fixture
def tools(bundle):
    """Value of PATH that has python3 but not python."""
    for name in ("dirname", "readlink"):
        tool = next(path for folder in ("/usr/bin", "/bin") if (path := Path(folder, name)).exists())
        (bundle.parent / "bin" / name).symlink_to(tool)
    return str(bundle.parent / "bin")


@pytest.mark.skipif(os.name == "nt", reason="Windows does not have this shell")
def test_shell_script_changes_to_its_directory(bundle, tools):
    """This also holds for links, with CDPATH, and without an executable named python."""
    outside = bundle.parent
    decoy = outside / "decoy"
    (decoy / "a bundle").mkdir(parents=True)
    (outside / "link").symlink_to("a bundle/run.sh")
    (outside / "second").symlink_to(outside / "link")
    expected = f"{bundle.resolve()} 2 smoke.py"

    assert run_script("a bundle/run.sh", outside, PATH=tools, CDPATH=str(decoy)) == expected
    assert run_script("run.sh", bundle, PATH=tools) == expected
    assert run_script("link", outside, PATH=tools) == expected
    assert run_script(str(outside / "second"), Path("/"), PATH=tools) == expected
    assert run_script("link", outside, PATH=tools, PYTHON=str(outside / "bin" / "other")) == expected


@pytest.mark.skipif(os.name == "nt", reason="Windows does not have this shell")
def test_systemd_and_launchd_run_the_golden_command(bundle, tools):
    home = bundle.parent / "home"
    home.mkdir()
    folder = bundle.rename(home / "openmed_bundle")
    (folder / ".venv" / "bin").mkdir(parents=True)
    (folder / ".venv" / "bin" / "python").symlink_to(bundle.parent / "bin" / "other")
    expected = f"{folder.resolve()} 2 smoke.py"
    unit = configparser.RawConfigParser()
    unit.optionxform = str
    unit.read_string((folder / "openmed_nb.service").read_text("utf-8"))
    service = unit["Service"]
    plist = plistlib.loads((folder / "openmed_nb.plist").read_bytes())
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
    "truncated": ('{"environment": {', "golden.json of the bundle cannot be read"),
    "no environment": ("{}", "golden.json of the bundle cannot be read"),
    "no package": ('{"environment": {}}', "openmed_nb cannot be imported"),
}


@pytest.mark.parametrize(("golden", "message"), BROKEN.values(), ids=BROKEN)
def test_smoke_script_reports_broken_bundle_without_traceback(bundle, golden, message):
    (bundle / "golden.json").write_text(golden, "utf-8")
    process = run_python("-I", "-S", bundle / "smoke.py")

    assert process.returncode == 1
    assert message in process.stderr
    assert "Traceback" not in process.stderr
