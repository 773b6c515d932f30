"""What a file of ``accelerate config`` asks for and this computer does not do: tables, and accelerate's own word for it."""

import json
from dataclasses import replace

import pytest
import yaml
from accelerate import Accelerator
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.state import AcceleratorState
from accelerate.utils.launch import prepare_simple_launcher_cmd_env

from openmed_nb._render.display import FAILED, NOT_APPLICABLE, OK
from openmed_nb.runbook.checks.doctor.launching import accelerate_findings, launch_findings, settings_file
from openmed_nb.runbook.checks.doctor.report import collect_facts, diagnose

PLAIN = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "NO",
    "num_processes": 1,
    "num_machines": 1,
    "mixed_precision": "no",
    "use_cpu": False,
}
"""What accelerate config writes for one process without a GPU, where it matters here."""

FITTING = [
    ("mac", ""),
    ("box", ""),
    ("plain", ""),
    ("plain", "use_cpu: true"),
    ("plain", "mixed_precision: null"),
    ("box", "distributed_type: MULTI_GPU, num_processes: 2, mixed_precision: bf16"),
    ("box", "distributed_type: MULTI_GPU, num_processes: 4, num_machines: 2, main_process_ip: 10.0.0.1"),
    ("plain", "distributed_type: MULTI_CPU, use_cpu: true, num_processes: 2, mpirun_config: {hosts: 2}"),
    ("plain", "distributed_type: NO"),
    ("plain", "num_processes: many, num_machines: null"),
]
"""Computers, and changes to the settings, with which there is nothing to say."""

UNFIT = [
    ("mac", "distributed_type: MULTI_GPU, num_processes: 4", "num_processes: failed"),
    ("plain", "distributed_type: MULTI_GPU, num_processes: 2", "num_processes: failed"),
    (
        "box",
        "distributed_type: MULTI_GPU, num_processes: 2, use_cpu: true",
        "num_processes: failed, use_cpu: warning",
    ),
    ("box", "distributed_type: MULTI_GPU, num_processes: 3", "num_processes: failed"),
    (
        "box",
        "distributed_type: MULTI_GPU, num_processes: 8, num_machines: 2, main_process_ip: a",
        "num_processes: failed",
    ),
    ("box", "num_processes: 2", "num_processes: warning"),
    ("mac", "num_processes: 2", "num_processes: warning"),
    ("plain", "distributed_type: MULTI_CPU, num_processes: 2", "num_processes: warning"),
    ("mac", "distributed_type: MPS", "distributed_type: failed"),
    ("mac", "distributed_type: FSDP", "distributed_type: failed"),
    ("mac", "distributed_type: DEEPSPEED, num_processes: 2", "distributed_type: failed, num_processes: failed"),
    ("plain", "distributed_type: null", "distributed_type: failed"),
    ("mac", "use_cpu: true", "use_cpu: warning"),
    ("box", "use_cpu: true", "use_cpu: warning"),
    ("mac", "num_machines: 2, main_process_ip: 10.0.0.1", "num_machines: failed"),
    ("plain", "num_machines: 2", "num_machines: failed"),
    ("plain", "mixed_precision: fp16", "mixed_precision: warning"),
    ("plain", "mixed_precision: BF16", "mixed_precision: warning"),
    ("mac", "mixed_precision: fp16", "mixed_precision: warning"),
    ("mac", "mixed_precision: bf16", "mixed_precision: warning"),
    ("mac", "mixed_precision: fp16, use_cpu: true", "mixed_precision: warning, use_cpu: warning"),
    ("mac", "mixed_precision: fp8", "mixed_precision: failed"),
    ("plain", "mixed_precision: fp8", "mixed_precision: failed"),
    ("box", "mixed_precision: no", "mixed_precision: failed"),
    ("box", "mixed_precision: true", "mixed_precision: failed"),
    ("box", "mixed_precision: bf17", "mixed_precision: failed"),
    ("box", "mixed_precision: 16", "mixed_precision: failed"),
    ("box", "mixed_precision: [bf16]", "mixed_precision: failed"),
]
"""Computers, changes to the settings, and the status of each setting that does not fit."""


def settings(changes):
    """Return the settings with changes in YAML."""
    return {**PLAIN, **yaml.safe_load(f"{{{changes}}}")}


def found(computer, changes):
    """Return what is found of settings on a computer."""
    return launch_findings(settings(changes), computer.session.device_manager.machine, computer.torch.facts)


@pytest.mark.parametrize(("kind", "changes"), FITTING)
def test_settings_that_fit(computers, kind, changes):
    """Settings that a computer can do are one finding, and it is good."""
    (finding,) = found(getattr(computers, kind)(), changes)

    assert (finding.name, finding.status, finding.remedy) == ("accelerate config", OK, "")


@pytest.mark.parametrize(("kind", "changes", "expected"), UNFIT)
def test_settings_that_do_not_fit(computers, kind, changes, expected):
    """Each setting that a computer cannot do, or that has no effect, is one finding, with what to do; no other is."""
    findings = found(getattr(computers, kind)(), changes)

    named = {finding.name.removeprefix("accelerate config: "): finding.status for finding in findings}
    assert named == yaml.safe_load(f"{{{expected}}}")
    assert all(finding.evidence and finding.remedy.endswith(".") for finding in findings)


OLD = [
    ((13, 6), "2.7.0", "bf16", "accelerate does not support bf16 on MPS before macOS 14"),
    ((15, 5), "2.7.0", "fp16", "float16 needs a GradScaler, which does not work on MPS with torch 2.7.0"),
    ((15, 5), "2.13.0", "fp16", "fp16 on mps: Its losses may differ from those of float32."),
    ((15, 5), "2.13.0", "bf16", "bf16 on mps: M2 computes bfloat16 in software"),
]


@pytest.mark.parametrize(("macos", "version", "precision", "words"), OLD)
def test_types_of_16_bits_on_a_mac(computers, macos, version, precision, words):
    """What keeps a Mac from training in 16 bits, or speaks against it, is named: its macOS, its torch, its chip."""
    torch = replace(computers.MAC_TORCH, version=version)
    (finding,) = launch_findings({**PLAIN, "mixed_precision": precision}, replace(computers.MAC, macos=macos), torch)

    assert words in finding.evidence


def test_settings_for_another_place(computers):
    """Settings for a service elsewhere are not held against this computer."""
    (finding,) = found(computers.mac(), "distributed_type: MULTI_GPU, compute_environment: AMAZON_SAGEMAKER")

    assert (finding.status, "AMAZON_SAGEMAKER" in finding.evidence) == (NOT_APPLICABLE, True)


@pytest.mark.parametrize(
    ("environ", "file"),
    [
        ({"HOME": "/home/me"}, "/home/me/.cache/huggingface/accelerate/default_config.yaml"),
        ({"USERPROFILE": "/home/me"}, "/home/me/.cache/huggingface/accelerate/default_config.yaml"),
        ({"HOME": "/home/me", "XDG_CACHE_HOME": "/big"}, "/big/huggingface/accelerate/default_config.yaml"),
        ({"HOME": "/home/me", "XDG_CACHE_HOME": "~/big"}, "/home/me/big/huggingface/accelerate/default_config.yaml"),
        ({"HOME": "/home/me", "HF_HOME": "/hf", "XDG_CACHE_HOME": "/big"}, "/hf/accelerate/default_config.yaml"),
        ({"HOME": "/home/me", "HF_HOME": "~"}, "/home/me/accelerate/default_config.yaml"),
    ],
)
def test_place_of_the_file(environ, file):
    """The file is looked for where accelerate looks for it."""
    assert settings_file(environ).as_posix() == file


UNREADABLE = ["", "[]", "a: [", "text", "\0"]


@pytest.mark.parametrize("text", UNREADABLE)
def test_file_that_cannot_be_read(computers, text, tmp_path):
    """A file without settings is a finding, in which nothing of its text stands."""
    (tmp_path / "accelerate").mkdir()
    (tmp_path / "accelerate" / "default_config.yaml").write_text(f"{text}", "utf-8")
    (finding,) = accelerate_findings({"HF_HOME": str(tmp_path)}, computers.MAC, computers.MAC_TORCH)

    assert (finding.status, finding.evidence) == (FAILED, "default_config.yaml does not contain settings in YAML")


def test_file_that_is_not_there(computers, tmp_path):
    """Without a file nothing is said; a folder in its place cannot be opened."""
    asked = {"HF_HOME": str(tmp_path)}, computers.MAC, computers.MAC_TORCH
    assert accelerate_findings(*asked) == ()

    (tmp_path / "accelerate" / "default_config.yaml").mkdir(parents=True)
    (finding,) = accelerate_findings(*asked)
    assert (finding.status, "cannot be opened" in finding.evidence) == (FAILED, True)


@pytest.mark.parametrize("write", [yaml.safe_dump, json.dumps])
def test_doctor_reads_the_file(computers, write, tmp_path):
    """The doctor's report has a row for each setting of the file that does not fit, and none where there is no file."""
    computer = computers.mac(HF_HOME=str(tmp_path))
    assert collect_facts(computer.session, compute=lambda _device: None).launching == ()
    (tmp_path / "accelerate").mkdir()
    file = tmp_path / "accelerate" / "default_config.yaml"
    file.write_text(write(settings("distributed_type: MULTI_GPU, num_processes: 4")), "utf-8")
    report = diagnose(replace(collect_facts(computer.session, compute=lambda _device: None), packages=()))
    assert (
        "accelerate config: num_processes, failed: requests 4; without CUDA GPUs, MULTI_GPU trains an independent model in "
        "each process on mps. Set distributed_type: 'NO' and num_processes: 1." in str(report)
    )


REFUSED = [
    ("distributed_type: MPS", ValueError),
    ("distributed_type: null", ValueError),
    ("num_machines: 2", AssertionError),
    ("mixed_precision: no", AttributeError),
    ("mixed_precision: bf17", ValueError),
    ("mixed_precision: bf16", None),
    ("distributed_type: NO", None),
]


@pytest.mark.parametrize(("changes", "error"), REFUSED)
def test_accelerate_itself(changes, error, tmp_path, monkeypatch):
    """What fails here is what accelerate launch itself refuses, with that error; what passes, it takes."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    file = tmp_path / "config.yaml"
    file.write_text(
        yaml.safe_dump({name: value for name, value in settings(changes).items() if value is not None}), "utf-8"
    )
    given = launch_command_parser().parse_args(["--config_file", str(file), "script.py"])

    def launch():
        arguments, *_ = _validate_launch_command(given)
        prepare_simple_launcher_cmd_env(arguments)

    if error is None:
        launch()
    else:
        with pytest.raises(error):
            launch()


def test_half_precision_on_the_cpu():
    """On the CPU accelerate takes fp16 and computes in float32 all the same, as the finding says."""
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    told = accelerator.mixed_precision, accelerator.native_amp, accelerator.scaler
    AcceleratorState._reset_state(reset_partial_state=True)

    assert told == ("fp16", False, None)
