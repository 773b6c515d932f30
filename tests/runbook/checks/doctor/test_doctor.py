"""Findings of the doctor for tables of facts, without any computation."""

from dataclasses import replace

import pytest

from helpers import simulated_computers
from helpers.simulated_computers import BOX, MAC, PLAIN, PLAIN_TORCH
from openmed_nb._render.display import FAILED, NOT_APPLICABLE, OK, WARNING, Finding
from openmed_nb.devices.backend import TorchInfo
from openmed_nb.devices.choice import DeviceChoice, select_device
from openmed_nb.devices.device import DeviceFacts
from openmed_nb.devices.environment import (
    ACTIVE,
    FALLBACK_VARIABLE,
    HIGH_WATERMARK_VARIABLE,
    LOW_WATERMARK_VARIABLE,
    TorchState,
    plan_mps_variables,
)
from openmed_nb.devices.machine import MachineInfo
from openmed_nb.devices.request import DeviceRequest
from openmed_nb.devices.system_status import SystemStatus
from openmed_nb.errors import DeviceUnavailableError
from openmed_nb.runbook.checks.doctor import DoctorReport, diagnose
from openmed_nb.runbook.checks.doctor_checks import ComputationCheck, SystemFacts
from openmed_nb.runbook.checks.silent_errors import KNOWN_BUGS, ProbeOutcome, bugs_for_device

MAC_TORCH = replace(simulated_computers.MAC_TORCH, probes=(("mps", ""),))
BOX_TORCH = replace(simulated_computers.BOX_TORCH, cuda_names=("NVIDIA A100",), probes=(("cuda", ""),))

TYPES = ("float32", "float16", "bfloat16", "int64", "float64")
NO_FLOAT64 = "Cannot convert a MPS Tensor to float64 dtype"
SEEN = {
    FALLBACK_VARIABLE: frozenset({"1"}),
    HIGH_WATERMARK_VARIABLE: frozenset({"1.0"}),
    LOW_WATERMARK_VARIABLE: frozenset({"0.9"}),
}


PACKAGES = (Finding("packages", OK, "9 packages fit together"),)

ON_MPS = ComputationCheck(
    "mps",
    "mps:0",
    dtypes={**dict.fromkeys(TYPES, ""), "float64": NO_FLOAT64},
    probes=tuple(ProbeOutcome(bug.issue) for bug in bugs_for_device("mps")),
)


def make_mac_facts(**changes):
    """Return the facts of a healthy Mac, with changes."""
    environ = changes.pop("environment", {})
    state = TorchState(torch_loaded=True, allocator_started=True, observed_values=changes.pop("seen", SEEN))
    facts = SystemFacts(
        python="3.12",
        machine=MAC,
        torch=MAC_TORCH,
        choice=select_device(DeviceRequest("auto", "nobody"), DeviceFacts(MAC, MAC_TORCH, {})),
        environment=plan_mps_variables(environ, "mps", state),
        computation=ON_MPS,
        packages=PACKAGES,
        system_status=SystemStatus(
            memory_pressure="normal", power_source="adapter", power_mode="automatic", thermal_state="nominal"
        ),
        models=(Finding("bundled", OK, "float32 on mps"),),
    )
    return replace(facts, **changes)


def seeing(name, value):
    """Return the facts of an environment variable that torch has read."""
    return {"environment": {name: value}, "seen": {**SEEN, name: frozenset({value})}}


def computing(**changes):
    """Return the facts of computations on MPS with changes."""
    return {"computation": replace(ON_MPS, **changes)}


def make_cpu_facts(machine, torch, **changes):
    """Return the facts of a machine with a working CPU, with changes."""
    facts = SystemFacts(
        python="3.12",
        machine=machine,
        torch=torch,
        choice=DeviceChoice("cpu", "auto", "nobody", "mps and cuda cannot be used here.", confirmed=True),
        environment=plan_mps_variables({}, "cpu"),
        computation=ComputationCheck("cpu", "cpu", dtypes=dict.fromkeys(TYPES, "")),
        packages=PACKAGES,
    )
    return replace(facts, **changes)


ROSETTA = MachineInfo(
    "Darwin", "x86_64", apple_silicon=True, under_rosetta=True, chip="Apple M2", macos_version=(15, 5)
)
NO_MPS = replace(MAC_TORCH, mps_built=False, mps_available=False, probes=())
NO_METAL = replace(MAC_TORCH, mps_available=False, probes=())
BAD_RATIO = replace(MAC_TORCH, probes=(("mps", "invalid low watermark ratio 1.4"),))
NO_CHOICE = DeviceUnavailableError("mps cannot be used here: no Mac.", "Use 'auto'.")
MISMATCH = Finding("torchvision and torch", FAILED, "torchvision needs torch==2.12.0", "Install versions that fit.")

PLANTED = [
    ("Rosetta Python", make_cpu_facts(ROSETTA, PLAIN_TORCH), "Python: failed"),
    ("old macOS", make_cpu_facts(replace(MAC, macos_version=(13, 6)), MAC_TORCH), "macOS: failed"),
    ("torch is missing", make_cpu_facts(PLAIN, TorchInfo(None), computation=None), "torch: failed"),
    ("torch is too old", make_cpu_facts(PLAIN, replace(PLAIN_TORCH, version="2.5.1")), "torch: failed"),
    ("torch without MPS", make_cpu_facts(MAC, NO_MPS), "MPS in torch: failed"),
    ("watermarks that torch refused", make_cpu_facts(MAC, BAD_RATIO), "MPS: failed"),
    ("CPU build with a GPU", make_cpu_facts(BOX, PLAIN_TORCH), "CUDA: warning"),
    (
        "hidden GPUs",
        make_cpu_facts(BOX, replace(BOX_TORCH, cuda_names=()), environ={"CUDA_VISIBLE_DEVICES": ""}),
        "CUDA: warning",
    ),
    ("driver too old", make_cpu_facts(BOX, replace(BOX_TORCH, cuda_names=())), "CUDA: failed"),
    (
        "computation fails",
        make_mac_facts(**computing(failure="the results differ")),
        "computation: failed",
    ),
    ("result elsewhere", make_mac_facts(**computing(result_device="cpu")), "computation: failed"),
    (
        "no float32",
        make_mac_facts(**computing(dtypes={"float32": "no kernel", "float64": NO_FLOAT64})),
        "float32: failed",
    ),
    (
        "no bfloat16",
        make_mac_facts(**computing(dtypes={"float32": "", "bfloat16": "needs macOS 14"})),
        "bfloat16: warning",
    ),
    (
        "silent error",
        make_mac_facts(**computing(probes=(ProbeOutcome(KNOWN_BUGS[0].issue, "returns different values"),))),
        f"{KNOWN_BUGS[0].name}: failed",
    ),
    ("mismatched packages", make_mac_facts(packages=(MISMATCH,)), f"{MISMATCH.name}: failed"),
    (
        "memory pressure",
        make_mac_facts(system_status=SystemStatus(memory_pressure="critical")),
        "memory pressure: warning",
    ),
    (
        "bad model",
        make_mac_facts(models=(Finding("m: NaN", FAILED, "1 weight", "Load it again."),)),
        "m: NaN: failed",
    ),
]

HEALTHY = [
    ("Mac", make_mac_facts()),
    ("computer without a GPU", make_cpu_facts(PLAIN, PLAIN_TORCH)),
    ("Mac on request on the CPU", make_cpu_facts(MAC, MAC_TORCH)),
    (
        "Mac with an Intel processor",
        make_cpu_facts(MachineInfo("Darwin", "x86_64", macos_version=(12, 6)), PLAIN_TORCH),
    ),
    (
        "computer with a GPU",
        make_cpu_facts(
            BOX,
            BOX_TORCH,
            choice=DeviceChoice("cuda:0", "auto", "nobody", "", confirmed=True),
            computation=ComputationCheck(
                "cuda", "cuda:0", probes=tuple(ProbeOutcome(bug.issue) for bug in bugs_for_device("cuda"))
            ),
        ),
    ),
]


def test_doctor_finds_only_the_planted_problem():
    for name, facts, expected in PLANTED:
        report = diagnose(facts)
        problems = sorted(f"{finding.name}: {finding.status}" for finding in report.problems)
        assert ", ".join(problems) == expected, name
        assert all(finding.evidence and finding.remedy.endswith(".") for finding in report.problems), name
        assert report.exit_code == ("failed" in expected), name
        assert [finding.name for finding in report.findings if finding.details] in ([], [KNOWN_BUGS[0].name]), name


def test_doctor_finds_no_problem_on_healthy_machine():
    for name, facts in HEALTHY:
        report = diagnose(facts)
        assert (report.problems, report.status, report.exit_code) == ((), OK, 0), name
        assert all(finding.evidence for finding in report.findings), name


MAC_TEXT = """\
Doctor: no problems found
  18 ok, 0 warnings, 0 failed, 1 not applicable.
  check                             result  evidence
  Python                            ok      3.12, built for arm64
  macOS                             ok      15.5
  torch                             ok      2.13.0
  MPS in torch                      ok      torch was built with MPS
  MPS                               ok      torch finds the Metal device
  active device                     ok      mps: {reason}
  computation                       ok      correct; the result is on mps
  PYTORCH_ENABLE_MPS_FALLBACK       ok      1, set by openmed_nb: {active}
  PYTORCH_MPS_HIGH_WATERMARK_RATIO  ok      1.0, set by openmed_nb: {active}
  PYTORCH_MPS_LOW_WATERMARK_RATIO   ok      0.9, set by openmed_nb: {active}
  data types                        ok      mps computes with float32, float16, bfloat16, int64; MPS does not support float64
  known silent errors               ok      {probes} probes agree with the CPU in both runs, with an empty cache and with reused memory
  packages                          ok      9 packages fit together
  memory pressure                   ok      normal
  power                             ok      adapter
  power mode                        ok      automatic
  thermal state                     ok      nominal
  bundled                           ok      float32 on mps"""
PLAIN_TEXT = """\
Doctor: no problems found
  6 ok, 0 warnings, 0 failed, 13 not applicable.
  check          result  evidence
  Python         ok      3.12, built for x86_64
  torch          ok      2.13.0+cpu, for the CPU only
  active device  ok      cpu: mps and cuda cannot be used here.
  computation    ok      correct; the result is on cpu
  data types     ok      cpu computes with float32, float16, bfloat16, int64, float64
  packages       ok      9 packages fit together"""


@pytest.mark.real_computer
def test_report_text_of_healthy_machine_is_stable():
    facts = make_mac_facts()

    assert str(diagnose(facts)) == MAC_TEXT.format(
        probes=len(bugs_for_device("mps")), reason=facts.choice.reason, active=ACTIVE
    )
    assert str(diagnose(make_cpu_facts(PLAIN, PLAIN_TORCH))) == PLAIN_TEXT


EVIDENCE = [
    (
        make_cpu_facts(PLAIN, replace(PLAIN_TORCH, version="2.16.0.dev20261101+cpu")),
        "torch",
        "2.16.0.dev20261101+cpu, a nightly build, for the CPU only",
    ),
    (
        make_mac_facts(torch=replace(MAC_TORCH, version="2.15.0a0+git1234567")),
        "torch",
        "2.15.0a0+git1234567, built from source, not released",
    ),
    (make_cpu_facts(BOX, BOX_TORCH), "CUDA", "NVIDIA A100"),
    (
        make_mac_facts(torch=replace(MAC_TORCH, metal_device="Apple M2, 10 GPU cores")),
        "MPS",
        "torch finds the Metal device: Apple M2, 10 GPU cores",
    ),
    (
        make_mac_facts(**seeing(HIGH_WATERMARK_VARIABLE, "0.0")),
        HIGH_WATERMARK_VARIABLE,
        f"0.0, set by you: {ACTIVE}; no limit",
    ),
    (make_cpu_facts(PLAIN, PLAIN_TORCH, choice=NO_CHOICE, computation=None), "data types", "there is no active device"),
]


@pytest.mark.real_computer
def test_finding_has_expected_evidence():
    for facts, name, evidence in EVIDENCE:
        assert [finding.evidence for finding in diagnose(facts).findings if finding.name == name] == [evidence], name


REPORT = DoctorReport(
    (
        Finding("one", OK, "fine"),
        Finding("two", WARNING, "odd.", "Look."),
        Finding("three", FAILED, "broken", "Mend it."),
        Finding("four", NOT_APPLICABLE, "no Mac"),
        Finding("five", OK, "fine"),
    )
)


def test_report_text_lists_worst_problems_first():
    assert str(REPORT) == (
        "Doctor: problems found\n"
        "  2 ok, 1 warning, 1 failed, 1 not applicable.\n"
        "  check  result   evidence  suggested action\n"
        "  three  failed   broken    Mend it.\n"
        "  two    warning  odd.      Look.\n"
        "  one    ok       fine\n"
        "  five   ok       fine"
    )
