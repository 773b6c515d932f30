"""The probes of known silent errors: each finds its own, none disturbs the caller, and what comes of them in words."""

import re
import warnings

import pytest
import torch

from openmed_nb._render.display import FAILED, NOT_APPLICABLE, OK, WARNING
from openmed_nb.runbook.checks.doctor.silent_errors import (
    KNOWN_BUGS,
    ProbeOutcome,
    bug_findings,
    bugs_for_device,
    describe_mismatch,
    run_probe,
    run_probes,
)
from openmed_nb.simulation.device import simulated_device
from openmed_nb.simulation.operators import DEFECTS_BY_ISSUE


@pytest.fixture
def simulated():
    """A simulated MPS device without defects."""
    with simulated_device(environ={}) as device:
        yield device


def wrong(outcomes):
    """Return the issues whose probes went wrong."""
    return {one.issue for one in outcomes if one.mismatch}


@pytest.mark.real_computer
def test_healthy_device(simulated):
    """A device without silent errors passes every probe, twice, with less than 64 MiB."""
    outcomes = run_probes("mps")

    assert len(outcomes) == len(KNOWN_BUGS) == len(bugs_for_device("mps"))
    assert wrong(outcomes) == set()
    assert simulated.allocator.peak < 64 * 2**20


def test_cpu_is_not_probed():
    """On the CPU there is nothing to compare with, and the finding says so."""
    assert run_probes("cpu") == ()
    assert bug_findings("known silent errors", (), "cpu")[0].status == NOT_APPLICABLE


def test_wrong_ids_are_not_tried_on_cuda():
    """Probes whose input is wrong run on MPS only: on CUDA they would end all work on the GPU."""
    left_out = {bug.issue for bug in bugs_for_device("mps")} - {bug.issue for bug in bugs_for_device("cuda:1")}

    assert left_out == {"pytorch#154235", "pytorch#108148"}


@pytest.mark.real_computer
def test_caller_is_not_disturbed(simulated):
    """Random numbers go on as before, and autocast, inference mode, default type and default device do not count."""
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    torch.set_default_dtype(torch.float16)
    try:
        with (
            torch.inference_mode(),
            torch.autocast("cpu", torch.bfloat16),
            torch.device("mps"),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("error")
            assert wrong(run_probes("mps")) == set()
            assert torch.is_inference_mode_enabled()
    finally:
        torch.set_default_dtype(torch.float32)

    assert torch.equal(torch.rand(3), expected)
    assert simulated.allocator.allocated == 0


def numbers(*values):
    """Return a tensor of numbers."""
    return torch.tensor(values)


FAULTS = [
    (numbers(1.0), numbers(1.0), ""),
    (numbers(1.0), numbers(1.0005), ""),
    (numbers(1e6), numbers(1e6 + 500), ""),
    (numbers(1.0), numbers(1.1), "returns different values than the CPU"),
    (numbers(1.0), numbers(float("nan")), "returns different values than the CPU"),
    (numbers(float("nan")), numbers(float("nan")), ""),
    (numbers(True), numbers(False), "returns different values than the CPU"),
    (numbers(1.0), numbers(1.0, 1.0), "returns a different shape than the CPU"),
    (IndexError("out of range"), IndexError("elsewhere"), ""),
    (IndexError("out of range"), numbers(0.0), "returns a result where the CPU raises IndexError"),
    (numbers(1.0), RuntimeError("no kernel."), "raises RuntimeError (no kernel)"),
    (numbers(1.0), NotImplementedError("not on MPS"), "raises NotImplementedError (not on MPS)"),
]


def test_fault():
    """A result is compared with that of the CPU: its numbers, its shape, or the error that is right."""
    for right, found, expected in FAULTS:
        assert describe_mismatch(right, found, 1e-3) == expected, (right, found)


def test_error_that_is_not_understood():
    """An error that no device raises is not caught."""

    def broken(_device):
        raise KeyError

    with pytest.raises(KeyError):
        run_probe(broken, "cpu")


def test_words_for_two_runs():
    """Two runs that differ say which of them was wrong."""
    words = {
        ("", ""): "",
        ("x", "x"): "x",
        ("x", "y"): "x",
        ("", "x"): "x, only after other work on the device",
        ("x", ""): "x, only with an empty cache",
    }

    assert {runs: ProbeOutcome("pytorch#92311", *runs).mismatch for runs in words} == words


def test_findings():
    """Each probe that went wrong is a line with the issue and a remedy, and the others are one line together."""
    outcomes = [ProbeOutcome(bug.issue, "x", "x") for bug in KNOWN_BUGS[:4]] + [ProbeOutcome("pytorch#92311")]
    *bad, good = bug_findings("known silent errors", outcomes, "mps")

    assert [one.status for one in bad] == [FAILED, FAILED, FAILED, WARNING]
    assert all(bug.issue in one.details and one.remedy for bug, one in zip(KNOWN_BUGS, bad, strict=False))
    assert good.status == OK
    assert good.evidence.startswith("1 probe agrees with the CPU")
    assert len(bug_findings("known silent errors", outcomes[:2], "mps")) == 2


def test_every_row_is_complete():
    """Every known error says what goes wrong, where it was seen, and one thing to do."""
    for bug in KNOWN_BUGS:
        assert bug.issue.startswith("pytorch#"), bug
        assert bug.name, bug
        assert bug.description, bug
        assert bug.affected, bug
        assert bug.remedy.endswith("."), bug
    assert len({bug.issue for bug in KNOWN_BUGS}) == len(KNOWN_BUGS)


def test_error_of_old_releases_only():
    """An error that only releases had which this package does not take is said to be one of those."""
    fixed = ", fixed in every supported torch version"
    for bug in KNOWN_BUGS:
        releases = [(int(major), int(minor)) for major, minor in re.findall(r"\b([12])\.(\d+)", bug.affected)]
        assert bug.affected.endswith(fixed) == (max(releases) < (2, 6)), bug


def test_every_defect_has_a_probe():
    """Every silent error that a simulated device can have is looked for, under the same name."""
    assert set(DEFECTS_BY_ISSUE) <= {bug.issue for bug in KNOWN_BUGS}
