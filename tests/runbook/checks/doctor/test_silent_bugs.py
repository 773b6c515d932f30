"""Probes of known silent errors."""

import re
import warnings
from pathlib import Path

import pytest
import torch

from openmed_nb._render.display import FAILED, NOT_APPLICABLE, OK, WARNING
from openmed_nb._utils.child import CallOutcome
from openmed_nb.runbook.checks.silent_errors import (
    KNOWN_BUGS,
    ProbeOutcome,
    bug_findings,
    bugs_for_device,
    can_abort,
    copy_as_float64,
    describe_exit,
    describe_mismatch,
    linear_transposed_bfloat16,
    probe_in_process,
    run_probes,
)
from openmed_nb.simulation.device import simulated_device

ABORTING = {"pytorch#197796", "pytorch#187201"}
"""Errors that end the process."""


def test_cpu_is_not_probed():
    assert run_probes("cpu") == ()
    assert bug_findings("known silent errors", (), "cpu")[0].status == NOT_APPLICABLE


def test_probes_of_mps_only():
    """On CUDA an id out of range makes the GPU unusable for the process. The other probes are about MPS alone."""
    left_out = {bug.issue for bug in bugs_for_device("mps")} - {bug.issue for bug in bugs_for_device("cuda:1")}

    assert left_out == {"pytorch#154235", "pytorch#108148", "pytorch#197715"} | ABORTING
    assert {bug.issue for bug in KNOWN_BUGS if bug.may_abort} == ABORTING


@pytest.mark.real_computer
def test_probes_do_not_change_global_state():
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    torch.set_default_dtype(torch.float16)
    try:
        with (
            simulated_device(environ={}) as simulated,
            torch.inference_mode(),
            torch.autocast("cpu", torch.bfloat16),
            torch.device("mps"),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("error")
            outcomes = run_probes("mps")
            assert torch.is_inference_mode_enabled()
            assert simulated.allocator.allocated == 0
    finally:
        torch.set_default_dtype(torch.float32)

    assert outcomes == tuple(ProbeOutcome(bug.issue) for bug in KNOWN_BUGS)
    assert torch.equal(torch.rand(3), expected)
    assert simulated.allocator.peak < 64 * 2**20


def make_tensor(*values):
    return torch.tensor(values)


MISMATCHES = [
    (make_tensor(1.0), make_tensor(1.0), ""),
    (make_tensor(1.0), make_tensor(1.0005), ""),
    (make_tensor(1.0), make_tensor(1.1), "returns different values than the CPU"),
    (make_tensor(1.0), make_tensor(float("nan")), "returns different values than the CPU"),
    (make_tensor(float("nan")), make_tensor(float("nan")), ""),
    (make_tensor(1.0), make_tensor(1.0, 1.0), "returns a different shape than the CPU"),
    (IndexError("out of range"), IndexError("elsewhere"), ""),
    (IndexError("out of range"), make_tensor(0.0), "returns a result where the CPU raises IndexError"),
    (make_tensor(1.0), RuntimeError("no kernel."), "raises RuntimeError (no kernel)"),
]


def test_describe_mismatch_compares_with_cpu():
    for cpu_result, device_result, expected in MISMATCHES:
        assert describe_mismatch(cpu_result, device_result, 1e-3) == expected, (cpu_result, device_result)


# Exit code and output of the process of a probe, with the mismatch and the reason why it did not run.
ENDINGS = [
    (-6, "failed assertion", "aborts the process (SIGABRT)", ""),
    (-11, "", "aborts the process (SIGSEGV)", ""),
    (-9, "", "", "its process failed (SIGKILL)"),
    (1, "Traceback\nModuleNotFoundError: no torch\n", "", "its process failed (ModuleNotFoundError: no torch)"),
    (3, "", "", "its process failed (exit code 3)"),
    (None, "", "", "its process did not finish within 120 s"),
]


@pytest.mark.parametrize(("code", "output", "mismatch", "not_run"), ENDINGS)
def test_end_of_a_process_is_an_outcome(code, output, mismatch, not_run):
    assert describe_exit("pytorch#197796", CallOutcome(code, None, output)) == ProbeOutcome(
        "pytorch#197796", mismatch, not_run
    )


@pytest.mark.real_computer
def test_real_device_is_probed_in_a_process():
    assert can_abort("pytorch#197796")
    assert probe_in_process("pytorch#197796", "cpu") == ProbeOutcome("pytorch#197796")
    with simulated_device(environ={}, defects="pytorch#187201"):
        assert [can_abort(issue) for issue in ("pytorch#187201", "pytorch#197796")] == [True, False]


class OnRejectingDevice(torch.Tensor):
    """Tensor on a device that rejects copies in float64 as torch 2.13 and 2.15 do, and bfloat16 as macOS 13 does."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.Tensor.copy_ or any(argument is torch.bfloat16 for argument in args):
            raise TypeError("Cannot convert a MPS Tensor")
        return super().__torch_function__(function, types, args, kwargs)


def test_rejected_dtype_is_no_silent_error():
    ones = torch.ones(2, 3, 3).as_subclass(OnRejectingDevice)

    assert copy_as_float64(ones).tolist() == ones.tolist()
    assert linear_transposed_bfloat16(ones, ones[0]).tolist() == (3 * ones).tolist()


def test_bug_findings_list_mismatches_first():
    """A probe without a result is a warning."""
    outcomes = [ProbeOutcome(bug.issue, "x") for bug in KNOWN_BUGS[:4]]
    outcomes += [ProbeOutcome("pytorch#197796", not_run="its process failed"), ProbeOutcome("pytorch#92311")]
    *bad, unknown, good = bug_findings("known silent errors", outcomes, "mps")

    assert [finding.status for finding in bad] == [FAILED, FAILED, FAILED, WARNING]
    assert all(finding.details and finding.remedy for finding in bad)
    assert (unknown.status, unknown.evidence) == (WARNING, "not probed: its process failed")
    assert unknown.remedy
    assert not unknown.details  # The verdict reads findings with details as errors that were found.
    assert good.status == OK
    assert good.evidence.startswith("1 probe agrees with the CPU")
    assert len(bug_findings("known silent errors", outcomes[:2], "mps")) == 2


def test_known_bugs_have_all_texts():
    for bug in KNOWN_BUGS:
        assert bug.issue.startswith("pytorch#"), bug
        assert all((bug.name, bug.description, bug.affected)), bug
        assert bug.remedy.endswith("."), bug


def test_page_lists_every_probe():
    page = (Path(__file__).parents[4] / "docs" / "checks.md").read_text("utf-8")
    probed = page.partition("## Silent errors that the doctor probes")[2].partition("These errors are not probed")[0]

    assert {bug.issue.removeprefix("pytorch") for bug in KNOWN_BUGS} <= set(re.findall(r"#\d+", probed))
