"""Gathering the facts: on this computer, on computers that are not here, and on the simulated Mac."""

import os
import shutil
from dataclasses import replace

import pytest
import torch

import openmed_nb as nb
from openmed_nb._render.display import FAILED, OK, WARNING
from openmed_nb.devices.environment import FALLBACK_VARIABLE, HIGH_WATERMARK_VARIABLE, LOW_WATERMARK_VARIABLE
from openmed_nb.errors import ConfigurationError, DeviceUnavailableError, TorchImportError, UnknownModelError
from openmed_nb.runbook.checks.doctor.checks import ComputationCheck, package_findings, read_packages
from openmed_nb.runbook.checks.doctor.report import check_computation, collect_facts, diagnose
from openmed_nb.runbook.checks.doctor.silent_errors import KNOWN_BUGS
from openmed_nb.session import SESSION
from openmed_nb.simulation.operators import DEFECTS_BY_ISSUE

pytestmark = [pytest.mark.real_computer, pytest.mark.usefixtures("quick_collection")]

LONG_PRODUCT, LONG_BATCHED_PRODUCT = "pytorch#177116", "pytorch#195163"

DIRTY = {LONG_PRODUCT, LONG_BATCHED_PRODUCT}
"""The errors that show only where memory was used before."""

ALSO = {
    LONG_PRODUCT: {"pytorch#183535"},
    "pytorch#192934": {"pytorch#170837"},
    "pytorch#188438": {"pytorch#189495"},
}
"""Other probes that the same error fails: a product is inside a gradient too, and a linear layer inside a BERT."""

RULE_OUT = {"pytorch#192934", "pytorch#188438"}
"""The errors with which no model is right, so that MPS is not used."""


def stand_in(device):
    """Return what a device that is not here would compute."""
    return ComputationCheck(device, device, dtypes={"float32": ""})


def examined(computer, compute=stand_in):
    """Return what the doctor finds on a computer that is not here, without the packages of this one."""
    return diagnose(replace(collect_facts(computer.session, compute=compute), packages=()))


def bad(report):
    """Return what is wrong by its name."""
    return {one.name: one.status for one in report.problems}


class TestComputersThatAreNotHere:
    """A session with its own environment and a torch that tells what a real one would."""

    def test_healthy(self, computers):
        """Computers on which all is well give no warning, and a GPU is confirmed by computing on it."""
        mac, box, plain = computers.mac(), computers.box(), computers.plain()
        mac.session.start()

        assert [bad(examined(one)) for one in (mac, box, plain)] == [{}, {}, {}]
        assert mac.torch.probed == ["mps"]
        assert plain.torch.is_torch_imported()

    def test_available_but_unusable(self, computers):
        """An MPS device that is available and cannot compute is found, with what it says."""
        report = examined(computers.mac(failing="Metal compiler failed"))

        assert bad(report) == {"MPS": FAILED}
        assert "Metal compiler failed" in str(report)

    def test_fallback_too_late(self, computers):
        """A fallback that was set after torch was imported is found, with what to do."""
        mac = computers.mac()
        mac.torch.inspect_imported_torch()
        mac.session.start()
        report = examined(mac)

        assert bad(report)[FALLBACK_VARIABLE] == WARNING
        assert "too late" in str(report)
        assert "Restart the kernel" in str(report)

    def test_watermark_conflict(self, computers):
        """Watermark ratios that torch will refuse are found, whether or not MPS has failed by them yet."""
        for ratios in (
            {HIGH_WATERMARK_VARIABLE: "2.5"},
            {HIGH_WATERMARK_VARIABLE: "0.7", LOW_WATERMARK_VARIABLE: "0.9"},
            {LOW_WATERMARK_VARIABLE: "-1"},
        ):
            for failing in ("", "invalid high watermark ratio 2.5"):
                report = examined(computers.mac(failing=failing, **ratios))
                assert FAILED in {bad(report).get(name) for name in ratios}, ratios
                assert "Unset" in str(report), ratios

    def test_bad_wish(self, computers):
        """A wish that names no device, or one that is not there, is found with its remedy."""
        for wish in ("mpss", "cuda", "cuda:7"):
            assert bad(examined(computers.mac(OPENMED_DEVICE=wish))) == {"active device": FAILED}, wish

    def test_wish_for_the_cpu(self, computers):
        """A computer that is asked for its CPU is examined on it, and MPS is not touched."""
        mac = computers.mac(OPENMED_DEVICE="cpu")

        assert bad(examined(mac)) == {}
        assert mac.torch.probed == []

    def test_torch_that_does_not_import(self, computers):
        """A torch that does not import is a finding, and nothing is computed."""

        def fail():
            raise TorchImportError("torch cannot be imported: libc10.so is missing.", "Reinstall it.")

        for computer in (computers.mac(), computers.plain(), computers.box()):
            computer.torch.loading = fail
            assert bad(examined(computer, compute=pytest.fail)) == {"torch": FAILED}

    def test_packages(self, computers):
        """The packages are those of this Python."""
        found = collect_facts(computers.plain().session, compute=stand_in)

        assert found.packages == package_findings(*read_packages())

    def test_session_is_as_it_was(self, computers):
        """An examination leaves the environment, the override and the device as a question for the device does."""
        for make in (computers.mac, computers.plain, computers.rosetta):
            asked, examined_too = make(), make()
            for computer in (asked, examined_too):
                computer.session.start()
                computer.session.device()
            examined(examined_too)
            assert examined_too.state == asked.state


@pytest.mark.usefixtures("clean")
class TestThisComputer:
    """nb.doctor, without and with the simulated Mac."""

    def test_this_computer(self):
        """The doctor finds nothing wrong here, says so in words, and says the same again."""
        report = nb.doctor()

        assert report.status in (OK, WARNING)
        assert str(nb.doctor()) == str(report)
        assert report.headline in str(report)

    def test_healthy_simulated_mac(self):
        """On a simulated Mac without defects nothing is wrong, and everything says SIMULATED."""
        with nb.simulated_mps():
            report = nb.doctor()
            assert bad(report) == {}
            assert str(nb.doctor()) == str(report)
        assert report.simulated
        assert "SIMULATED" in str(report)
        assert "torch finds the Metal device: Apple" in str(report)

    def test_all_that_can_be_wrong_on_mps(self):
        """On a device with every known defect each is found, under its issue, and so is a model with 64 bits."""
        planted = {bug.name: bug.status for bug in KNOWN_BUGS if bug.issue in DEFECTS_BY_ISSUE}
        with nb.simulated_mps(defects=DEFECTS_BY_ISSUE):
            assert nb.device().device == "cpu"
            report = nb.doctor()
        with nb.simulated_mps(defects="pytorch#92311"):
            model = nb.doctor(torch.nn.Linear(2, 2).double())

        assert planted.items() <= bad(report).items()
        assert bad(report)["MPS"] == bad(model)["Linear: float64"] == FAILED
        assert [issue for issue in DEFECTS_BY_ISSUE if issue not in str(report)] == []

    @pytest.mark.parametrize(
        "issue",
        [LONG_PRODUCT, *(pytest.param(one, marks=pytest.mark.slow) for one in DEFECTS_BY_ISSUE if one != LONG_PRODUCT)],
    )
    def test_one_silent_error(self, issue):
        """A device with one silent error fails the probe of that error, and no other; only where it can be used it is."""
        with nb.simulated_mps(defects=issue):
            device, report = nb.device(), nb.doctor()

        found = {bug.name: bug.status for bug in KNOWN_BUGS if bug.issue in {issue} | ALSO.get(issue, set())}
        assert bad(report) == found | ({"MPS": FAILED} if issue in RULE_OUT else {})
        assert device.device == ("cpu" if issue in RULE_OUT else "mps")
        assert (issue in str(device)) == (issue in RULE_OUT)
        assert ("only after other work on the device" in str(report)) == (issue in DIRTY)

    def test_model_by_its_name(self):
        """A model is loaded by its name; once it is loaded it is examined as it is, with whatever is wrong with it."""
        assert nb.doctor("bundled_small").findings[-1].status == OK
        assert SESSION.inventory().names == ("bundled_small",)
        pipe = nb.load_pipeline("bundled_small")
        pipe.model.config.id2label = dict(enumerate("OBIXY"))

        for report in (nb.doctor(), nb.doctor("bundled_small")):
            assert bad(report) == {"bundled_small: labels": FAILED}
        assert bad(nb.doctor(pipe)) == {f"{type(pipe.model).__name__}: labels": FAILED}

    def test_model_that_cannot_be_loaded(self, keyword_model, tmp_path):
        """A model whose files are damaged is a finding, and a name that is none is an error."""
        folder = shutil.copytree(keyword_model, tmp_path / "damaged")
        (folder / "model.safetensors").write_bytes(b"nothing")

        assert bad(nb.doctor(folder)) == {str(folder): FAILED}
        with pytest.raises(UnknownModelError):
            nb.doctor("disease_detection_tinny")
        with pytest.raises(ConfigurationError):
            nb.doctor(3)

    def test_session_is_as_it_was(self):
        """The doctor changes neither the device nor the override nor the models nor the random numbers."""
        nb.use("cpu")
        nb.load_pipeline("bundled_small")
        before = (SESSION.device().to_dict(), SESSION.inventory(), dict(os.environ), torch.get_rng_state().tolist())
        nb.doctor()

        after = (SESSION.device().to_dict(), SESSION.inventory(), dict(os.environ), torch.get_rng_state().tolist())
        assert after == before

    def test_bad_wish_in_the_environment(self, monkeypatch):
        """A wish that cannot be had is a finding, and no error."""
        monkeypatch.setenv("OPENMED_TORCH_DEVICE", "mps")

        assert bad(nb.doctor()) == {"active device": FAILED}
        with pytest.raises(DeviceUnavailableError):
            nb.device()


class TestComputation:
    """What is computed on a device."""

    def test_place(self, second_device):
        """A computation tells where its result lives, or why it failed."""
        assert (check_computation("cpu").result_device, check_computation("cpu").failure) == ("cpu", "")
        assert check_computation(second_device).result_device == second_device
        assert check_computation("xla").failure

    def test_types_of_numbers(self):
        """Every type computes on the CPU; the simulated MPS refuses float64 with MPS's own words."""
        assert set(check_computation("cpu").dtypes.values()) == {""}
        with nb.simulated_mps():
            failures = {name: failure for name, failure in check_computation("mps").dtypes.items() if failure}
        assert list(failures) == ["float64"]
        assert "doesn't support float64" in failures["float64"]
