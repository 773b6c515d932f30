"""Collection of facts on this machine, on simulated sessions and on the simulated Mac."""

import shutil
from dataclasses import replace

import pytest
import torch

import openmed_nb as nb
from helpers import simulated_computers as computers
from helpers.session_state import read_state
from openmed_nb._render.display import FAILED, OK, WARNING
from openmed_nb.devices.environment import FALLBACK_VARIABLE, HIGH_WATERMARK_VARIABLE, LOW_WATERMARK_VARIABLE
from openmed_nb.errors import (
    ConfigurationError,
    OpenMedWarning,
    TorchImportError,
    UnknownModelError,
)
from openmed_nb.runbook.checks.doctor import check_computation, collect_facts, diagnose
from openmed_nb.runbook.checks.doctor_checks import ComputationCheck
from openmed_nb.runbook.checks.silent_errors import KNOWN_BUGS
from openmed_nb.session import SESSION
from openmed_nb.simulation.operators import DEFECTS_BY_ISSUE

pytestmark = pytest.mark.real_computer

LONG_PRODUCT = "pytorch#177116"

ALSO = {
    LONG_PRODUCT: {"pytorch#183535"},
    "pytorch#192934": {"pytorch#170837"},
    "pytorch#188438": {"pytorch#189495"},
}
"""Other probes that fail because of the same error, because a gradient contains a product and a BERT a linear layer."""

RULE_OUT = {"pytorch#192934", "pytorch#188438"}
"""Errors that affect every model, so that MPS is rejected."""


def compute_on_missing_device(device):
    """Return the result of computations on a device that this machine does not have."""
    return ComputationCheck(device, device, dtypes={"float32": ""})


def run_doctor(computer, check_device=compute_on_missing_device):
    """Return the report for a simulated machine, without the packages of this one."""
    return diagnose(replace(collect_facts(computer.session, check_device=check_device), packages=()))


def get_problems(report):
    """Return the status of each problem by name."""
    return {finding.name: finding.status for finding in report.problems}


class TestOtherMachines:
    """Sessions with a separate environment and stub torch facts."""

    def test_doctor_finds_no_problem_and_confirms_gpu(self):
        mac, box, plain = computers.mac(), computers.box(), computers.plain()
        mac.session.start()

        assert [get_problems(run_doctor(computer)) for computer in (mac, box, plain)] == [{}, {}, {}]
        assert mac.torch.probed == ["mps"]
        assert plain.torch.is_torch_imported()

    def test_fallback_set_after_torch_import_is_found(self):
        mac = computers.mac()
        mac.torch.inspect_imported_torch()
        mac.session.start()
        report = run_doctor(mac)

        assert get_problems(report)[FALLBACK_VARIABLE] == WARNING
        assert "too late" in str(report)
        assert "Restart the kernel" in str(report)

    def test_conflicting_watermarks_are_found(self):
        for ratios in (
            {HIGH_WATERMARK_VARIABLE: "2.5"},
            {HIGH_WATERMARK_VARIABLE: "0.7", LOW_WATERMARK_VARIABLE: "0.9"},
        ):
            report = run_doctor(computers.mac(failing="invalid high watermark ratio 2.5", **ratios))
            assert FAILED in {get_problems(report).get(name) for name in ratios}, ratios
            assert "Unset" in str(report), ratios

    def test_invalid_device_request_fails_with_remedy(self):
        for request in ("mpss", "cuda"):
            assert get_problems(run_doctor(computers.mac(OPENMED_DEVICE=request))) == {"active device": FAILED}, request

    def test_failed_torch_import_is_a_finding(self):
        def fail():
            raise TorchImportError("torch cannot be imported: libc10.so is missing.", "Reinstall it.")

        for computer in (computers.mac(), computers.plain(), computers.box()):
            computer.torch.loading = fail
            assert get_problems(run_doctor(computer, check_device=pytest.fail)) == {"torch": FAILED}

    def test_session_is_unchanged(self):
        for make in (computers.mac, computers.plain, computers.rosetta):
            asked, examined_too = make(), make()
            for computer in (asked, examined_too):
                computer.session.start()
                computer.session.device()
            run_doctor(examined_too)
            assert examined_too.state == asked.state


@pytest.mark.usefixtures("clean")
class TestDoctor:
    """``nb.doctor`` with and without the simulated Mac."""

    def test_doctor_finds_no_problem_on_this_machine(self):
        report = nb.doctor()

        assert report.status in (OK, WARNING)
        assert str(nb.doctor()) == str(report)
        assert report.headline in str(report)

    def test_all_known_defects_are_found(self):
        planted = {bug.name: bug.status for bug in KNOWN_BUGS if bug.issue in DEFECTS_BY_ISSUE}
        with nb.simulated_mps(defects=DEFECTS_BY_ISSUE):
            assert nb.device().device == "cpu"
            report = nb.doctor()

        assert planted.items() <= get_problems(report).items()
        assert get_problems(report)["MPS"] == FAILED
        assert [issue for issue in DEFECTS_BY_ISSUE if issue not in str(report)] == []

    @pytest.mark.parametrize(
        "issue",
        [
            LONG_PRODUCT,
            *(pytest.param(issue, marks=pytest.mark.slow) for issue in DEFECTS_BY_ISSUE if issue != LONG_PRODUCT),
        ],
    )
    def test_single_defect_fails_only_its_probe(self, issue):
        with nb.simulated_mps(defects=issue):
            device, report = nb.device(), nb.doctor()

        expected = {bug.name: bug.status for bug in KNOWN_BUGS if bug.issue in {issue} | ALSO.get(issue, set())}
        assert get_problems(report) == expected | ({"MPS": FAILED} if issue in RULE_OUT else {})
        assert device.device == ("cpu" if issue in RULE_OUT else "mps")
        assert any(issue in rejection.reason for rejection in device.rejected) == (issue in RULE_OUT)

    @pytest.mark.parametrize("macos", [(26, 6, 2), (27, 0)])
    def test_bfloat16_is_not_used_on_macos_27(self, macos, monkeypatch, keyword_model):
        """The simulated device has torch 2.13, whose linear layers can end the process there. It has no other problem."""
        monkeypatch.setattr("openmed_nb.simulation.device.MACOS", macos)
        is_affected = macos >= (27,)
        with nb.simulated_mps():
            with pytest.warns(OpenMedWarning) as caught:
                pipe = nb.load_pipeline(str(keyword_model), dtype="bfloat16")
            report = nb.doctor(pipe)
            SESSION.unload()

        assert get_problems(report) == ({"bfloat16": WARNING} if is_affected else {})
        assert report.simulated
        assert "SIMULATED" in str(report)
        assert "torch finds the Metal device: Apple" in str(report)
        assert ("bfloat16" in str(report).partition("data types")[2].partition("\n")[0]) is not is_affected
        assert ("pytorch#197796" in str(caught[0].message)) is is_affected

    def test_named_model_is_loaded_and_checked(self):
        assert nb.doctor("bundled_small").findings[-1].status == OK
        assert SESSION.inventory().names == ("bundled_small",)
        pipe = nb.load_pipeline("bundled_small")
        with torch.no_grad():
            pipe.model.classifier.bias[0] = torch.nan

        for report in (nb.doctor(), nb.doctor("bundled_small")):
            assert get_problems(report) == {"bundled_small: NaN": FAILED}
        assert get_problems(nb.doctor(pipe)) == {f"{type(pipe.model).__name__}: NaN": FAILED}

    def test_model_with_damaged_files_is_a_finding(self, keyword_model, tmp_path):
        folder = shutil.copytree(keyword_model, tmp_path / "damaged")
        (folder / "model.safetensors").write_bytes(b"nothing")

        assert get_problems(nb.doctor(folder)) == {str(folder): FAILED}
        with pytest.raises(UnknownModelError):
            nb.doctor("disease_detection_tinny")
        with pytest.raises(ConfigurationError):
            nb.doctor(3)

    def test_session_is_unchanged(self):
        nb.use("cpu")
        nb.load_pipeline("bundled_small")
        before = (read_state(), SESSION.inventory(), torch.get_rng_state().tolist())
        nb.doctor()

        assert (read_state(), SESSION.inventory(), torch.get_rng_state().tolist()) == before


class TestComputation:
    """Test computations on a device."""

    def test_computation_reports_device_or_failure(self, second_device):
        assert (check_computation("cpu").result_device, check_computation("cpu").failure) == ("cpu", "")
        assert check_computation(second_device).result_device == second_device
        assert check_computation("xla").failure

    def test_computation_reports_supported_dtypes(self):
        assert set(check_computation("cpu").dtypes.values()) == {""}
        with nb.simulated_mps():
            failures = {name: failure for name, failure in check_computation("mps").dtypes.items() if failure}
        assert list(failures) == ["float64"]
        assert "doesn't support float64" in failures["float64"]
