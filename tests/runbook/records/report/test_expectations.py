import re
from dataclasses import replace

import pytest
from packaging.specifiers import SpecifierSet

from openmed_nb._render.display import FAILED, OK, Finding
from openmed_nb.runbook.checks.doctor.checks import SILENT_ERRORS
from openmed_nb.runbook.checks.doctor.report import DoctorReport
from openmed_nb.runbook.checks.doctor.silent_errors import KNOWN_BUGS
from openmed_nb.runbook.records.report.expectations import (
    DEVICE_CHECK,
    EXPECTATIONS,
    VIRTUAL_METAL_DEVICE,
    VIRTUAL_SUFFIX,
    compare_with_expectations,
)
from openmed_nb.runbook.records.report.record import StepOutcome
from openmed_nb.runbook.records.report.report import DeviceReport, compare_speeds
from openmed_nb.runbook.records.runner import current_subject

VIRTUAL_M1 = "Apple M1 (Virtual)"
AGREEMENT = Finding(SILENT_ERRORS, OK, "26 probes agree")
REJECTED = Finding("MPS", FAILED, "results differ from the CPU in a linear layer (pytorch#192934)", "Use 'cpu'.")
LONG_PRODUCT = Finding("long matrix product", FAILED, "mps differs", "x", "it differs (pytorch#177116: freed memory)")


def make_report(chip, system, torch, device="mps", findings=(AGREEMENT,)):
    """Return a report of a computer with the device step and, if there are findings, the doctor."""
    subject = current_subject(training=False)
    subject = replace(subject, chip=chip, software=replace(subject.software, system=system, torch=torch))
    steps = [StepOutcome("device", "done", OK, "", "", (), subject.software.python, 1.0)]
    if findings:
        report_json = DoctorReport(tuple(findings)).to_dict()
        steps.append(replace(steps[0], step="doctor", report_json=report_json))
    names = tuple(step.step for step in steps)
    return DeviceReport("openmed_nb/report/1", "2026-11-26T12:00:00Z", subject, device, names, tuple(steps))


def compare(*arguments, **options):
    """Return the checks, observed values and results of the comparison of a report."""
    rows = compare_with_expectations(make_report(*arguments, **options)).rows
    return [(row[0], row[2], row[3]) for row in rows]


NONE = [("none", "", "no result is published for this processor, system and torch")]


@pytest.mark.parametrize(
    ("computer", "observed", "results"),
    [
        ((VIRTUAL_M1, "macOS 15.7", "2.13.0"), {}, [("device", "mps", "as expected")]),
        ((VIRTUAL_M1, "macOS 15.7", "2.13.0"), {"device": "cpu"}, [("device", "cpu", "different")]),
        (
            (VIRTUAL_M1, "macOS 26.5.2", "2.13.0"),
            {"device": "cpu", "findings": (REJECTED, AGREEMENT)},
            [
                ("device", "cpu", "as expected"),
                ("pytorch#192934", "fails", "as expected"),
                ("pytorch#188438", "passes", "different"),
            ],
        ),
        (
            ("Apple M2 Pro", "macOS 15.5", "2.13.0"),
            {"findings": (LONG_PRODUCT, AGREEMENT)},
            [("pytorch#177116", "fails", "as expected")],
        ),
        (
            ("Apple M4 Max", "macOS 26.1", "2.13.0"),
            {},
            [("pytorch#192934", "passes", "as expected"), ("pytorch#188438", "passes", "as expected")],
        ),
        (("Apple M2", "macOS 15.5", "2.8.0"), {"findings": ()}, [("pytorch#177116", "", "no result")]),
        (("Apple M3", "macOS 14.6", "2.15.0"), {"device": "cpu"}, [("device", "cpu", "as expected")]),
        ((VIRTUAL_M1, "macOS 26.5.2", "2.14.1"), {}, NONE),
        (("Apple M5", "macOS 27.1", "2.13.0"), {}, [("pytorch#197796", "passes", "different")]),
        (("Apple M5", "macOS 27.1", "2.14.1"), {}, [("pytorch#197796", "passes", "as expected")]),
        (("Apple M3", "macOS 26.1", "2.14.1"), {}, NONE),
        (("AMD EPYC", "Linux 6.18", "2.13.0+cpu"), {}, NONE),
        (("Apple M2", "macOS 15.5", None), {}, NONE),
    ],
)
def test_report_is_compared_with_published_results(computer, observed, results):
    assert compare(*computer, **observed) == results


def test_every_expectation_names_source_and_date():
    issues = {bug.issue for bug in KNOWN_BUGS}
    for expectation in EXPECTATIONS:
        assert re.search(r"#\d+$|^binary of torch \d", expectation.source)
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", expectation.date)
        assert {SpecifierSet(expectation.macos), SpecifierSet(expectation.torch)} != {SpecifierSet("")}
        assert expectation.check in {DEVICE_CHECK, *issues}
        assert expectation.expected in ({"mps", "cpu"} if expectation.check == DEVICE_CHECK else {"passes", "fails"})


METAL = Finding("MPS", OK, f"torch finds the Metal device: {VIRTUAL_METAL_DEVICE}, 0 GPU cores")


@pytest.mark.parametrize(
    ("chip", "findings", "name"),
    [
        (VIRTUAL_M1, (), VIRTUAL_M1),
        (VIRTUAL_M1, (METAL,), VIRTUAL_METAL_DEVICE),
        ("unknown", (METAL,), VIRTUAL_METAL_DEVICE),
        ("Apple M1", (AGREEMENT,), ""),
    ],
)
def test_virtual_gpu_is_named_and_its_speed_is_not_compared(chip, findings, name):
    report = make_report(chip, "macOS 15.7", "2.14.1", findings=findings)
    displayed = report.to_report()
    page = report.files()["report.html"]

    assert displayed.title.endswith(VIRTUAL_SUFFIX) == bool(name)
    assert ("virtual GPU", name) in displayed.metrics[0].rows or not name
    assert (f"The GPU is virtual: {name}." in page) == bool(name)
    assert "Compared with published results" in page
    assert bool(compare_speeds(report, None)[0]) != bool(name)
