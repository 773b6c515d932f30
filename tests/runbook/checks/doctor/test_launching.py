"""Checks of the file of ``accelerate config``."""

import json
from dataclasses import replace

import pytest
import yaml

from helpers import simulated_computers as computers
from openmed_nb._render.display import FAILED, OK
from openmed_nb.runbook.checks.doctor import collect_facts, diagnose
from openmed_nb.runbook.checks.doctor_checks import accelerate_findings, launch_findings, settings_file

PLAIN = {
    "distributed_type": "NO",
    "num_processes": 1,
    "num_machines": 1,
    "mixed_precision": "no",
    "use_cpu": False,
}
"""Relevant settings that accelerate config writes for one process without a GPU."""

FITTING = [
    ("mac", ""),
    ("plain", "use_cpu: true, mixed_precision: null"),
    ("box", "distributed_type: MULTI_GPU, num_processes: 2, mixed_precision: bf16"),
    ("plain", "distributed_type: MULTI_CPU, use_cpu: true, num_processes: 2, mpirun_config: {hosts: 2}"),
    ("plain", "num_processes: many, num_machines: null"),
]
"""Machines and changes of the settings without a problem."""

UNFIT = [
    ("mac", "distributed_type: MULTI_GPU, num_processes: 4", "num_processes: failed"),
    ("mac", "distributed_type: MPS", "distributed_type: failed"),
    ("mac", "distributed_type: DEEPSPEED, num_processes: 2", "distributed_type: failed, num_processes: failed"),
    ("mac", "use_cpu: true", "use_cpu: warning"),
    ("mac", "num_machines: 2, main_process_ip: 10.0.0.1", "num_machines: failed"),
    ("mac", "mixed_precision: bf16", "mixed_precision: warning"),
]
"""Machines, changes of the settings, and the status of each incompatible setting."""


def make_settings(changes):
    """Return the settings with changes given in YAML."""
    return {**PLAIN, **yaml.safe_load(f"{{{changes}}}")}


def find_launch_problems(kind, changes):
    """Return the findings about the settings of a machine."""
    computer = getattr(computers, kind)()
    return launch_findings(make_settings(changes), computer.torch.facts)


@pytest.mark.parametrize(("kind", "changes"), FITTING)
def test_compatible_settings_are_ok(kind, changes):
    (finding,) = find_launch_problems(kind, changes)

    assert (finding.name, finding.status, finding.remedy) == ("accelerate config", OK, "")


@pytest.mark.parametrize(("kind", "changes", "expected"), UNFIT)
def test_incompatible_setting_is_one_finding(kind, changes, expected):
    findings = find_launch_problems(kind, changes)

    named = {finding.name.removeprefix("accelerate config: "): finding.status for finding in findings}
    assert named == yaml.safe_load(f"{{{expected}}}")
    assert all(finding.evidence and finding.remedy.endswith(".") for finding in findings)


def write_settings(folder, text):
    """Write the settings of accelerate below a folder of caches."""
    file = settings_file({"HF_HOME": str(folder)})
    file.parent.mkdir()
    file.write_text(text, "utf-8")


@pytest.mark.parametrize("text", ["[]", "a: [", "\0"])
def test_unreadable_file_fails_without_quoting_it(text, tmp_path):
    write_settings(tmp_path, text)
    (finding,) = accelerate_findings({"HF_HOME": str(tmp_path)}, computers.MAC_TORCH)

    assert (finding.status, finding.evidence) == (FAILED, "default_config.yaml does not contain settings in YAML")


def test_missing_file_has_no_finding(tmp_path):
    assert accelerate_findings({"HF_HOME": str(tmp_path)}, computers.MAC_TORCH) == ()


def test_doctor_reports_settings_of_file(tmp_path):
    computer = computers.mac(HF_HOME=str(tmp_path))
    assert collect_facts(computer.session, check_device=lambda _device: None).launch_settings == ()
    write_settings(tmp_path, json.dumps(make_settings("distributed_type: MULTI_GPU, num_processes: 4")))
    report = diagnose(replace(collect_facts(computer.session, check_device=lambda _device: None), packages=()))
    assert (
        "accelerate config: num_processes: failed; requests 4; without CUDA GPUs, MULTI_GPU trains an independent model in "
        "each process on mps; Set distributed_type: 'NO' and num_processes: 1." in str(report)
    )
