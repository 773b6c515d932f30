"""The macOS jobs of the workflow: their steps run here with the variables of a runner, as far as they need no Mac."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from helpers import ROOT
from helpers.readme import readme_command
from openmed_nb._render.display import FAILED, NOT_APPLICABLE, OK, WARNING, Finding
from openmed_nb.runbook.checks.doctor import DoctorReport
from openmed_nb.runbook.records.report import DeviceReport

JOBS = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text("utf-8"))["jobs"]
MAC_JOBS = ("macos-15", "macos-26")

pytestmark = pytest.mark.real_computer


def steps_by_name(job):
    """Return the shell steps of a job by their names."""
    return {step["name"]: step for step in JOBS[job]["steps"] if "run" in step}


def run_step(job, name, temp):
    """Run a step as the runner does, with its folders in ``temp``, and return the process and the summary."""
    step = steps_by_name(job)[name]
    variables = {
        **JOBS[job]["env"],
        **step.get("env", {}),
        "CI": "true",
        "RUNNER_TEMP": str(temp / "temp"),
        "GITHUB_OUTPUT": str(temp / "output"),
        "GITHUB_STEP_SUMMARY": str(temp / "summary"),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    script = temp / "step.sh"
    script.write_text(step["run"], "utf-8")
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", str(script)]  # `shell: bash` of GitHub Actions
    environment = {**os.environ, **variables}
    process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    summary = temp / "summary"
    return process, summary.read_text("utf-8") if summary.exists() else ""


@pytest.mark.parametrize(("job", "command"), [("macos-15", "test command"), ("macos-26", "main job")])
def test_install_step_is_the_line_of_the_readme(job, command):
    """``test_readme_install`` runs these lines in an empty environment."""
    assert steps_by_name(job)["Install"]["run"].splitlines() == readme_command(command).split(" && ")[:2]


@pytest.mark.parametrize(("job", "name"), [(job, name) for job in MAC_JOBS for name in steps_by_name(job)])
def test_shell_of_every_step_is_valid(job, name):

    assert subprocess.run(["bash", "-n"], input=steps_by_name(job)[name]["run"], text=True, check=False).returncode == 0


def test_doctor_step_reports_its_answer(tmp_path):
    (tmp_path / "temp").mkdir()
    process, summary = run_step("macos-26", "Doctor", tmp_path)
    folder = tmp_path / "temp" / JOBS["macos-26"]["env"]["REPORT"]

    assert process.returncode == 0, process.stderr
    assert "::notice::## MPS: " in process.stdout
    assert summary == (folder / "summary.md").read_text("utf-8")
    assert "Paravirtual: correctness, no speed." in summary
    assert (folder / "doctor.json").stat().st_size > 0


@pytest.mark.parametrize(("job", "name"), [("macos-15", "Report"), ("macos-26", "Doctor")])
def test_step_fails_if_no_report_comes_out(job, name, tmp_path):
    (tmp_path / "temp").write_text("not a folder", "utf-8")
    process, summary = run_step(job, name, tmp_path)

    assert process.returncode != 0
    assert not summary


ACTIVE_MPS = Finding("active device", OK, "mps: it has the highest priority.")
ACTIVE_CPU = Finding("active device", OK, "cpu: mps is unavailable.")
NO_TORCH = Finding("active device", NOT_APPLICABLE, "torch is unavailable")
LABEL = Finding("label outside the model's label range", WARNING, "mps differs", "x", "(pytorch#108148)")
BIAS = Finding("linear layer with a bias", FAILED, "mps differs", "Use 'cpu'.", "(pytorch#192934)")


@pytest.mark.parametrize(
    ("findings", "answer", "status"),
    [
        ((ACTIVE_MPS,), "MPS: correct.", 0),
        ((ACTIVE_MPS, LABEL), "MPS: correct.", 0),
        ((ACTIVE_MPS, BIAS), "MPS: incorrect.", 0),
        ((ACTIVE_CPU,), "MPS: refused.", 0),
        ((NO_TORCH,), "MPS: no answer.", 1),
        ((), "MPS: no answer.", 1),
    ],
)
def test_summary_of_the_doctor_distinguishes_correct_incorrect_and_refused(findings, answer, status, helper):
    script = helper(ROOT / "scripts" / "summarize_doctor.py")
    markdown, exit_status = script.summarize(DoctorReport(findings).to_dict()["findings"])

    assert markdown.startswith(f"## {answer}")
    assert exit_status == status
    assert ("- failed: linear layer with a bias" in markdown) == (BIAS in findings)
    assert ("- warning: label outside" in markdown) == (LABEL in findings)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_report_step_writes_the_report_and_the_summary(tmp_path):
    (tmp_path / "temp").mkdir()
    process, summary = run_step("macos-15", "Report", tmp_path)
    folder = tmp_path / "temp" / JOBS["macos-15"]["env"]["REPORT"]

    assert process.returncode == 0, process.stderr
    assert DeviceReport.read(folder / "report.json").missing_steps == ()
    assert (folder / "report.html").is_file()
    assert summary.startswith("\nParavirtual: correctness, no speed.\n\n    Report on ")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_step_of_the_tests_on_mps_states_why_they_were_skipped(tmp_path):
    (tmp_path / "temp").mkdir()
    process, summary = run_step("macos-15", "Tests on MPS", tmp_path)

    assert process.returncode == 0, process.stdout
    assert "MPS requires macOS" in summary
