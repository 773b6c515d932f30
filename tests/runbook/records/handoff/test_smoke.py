"""The smoke test of a bundle: what is changed in it or planted in the process is what it names."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import openmed_nb as nb
from openmed_nb._render.display import FAILED, NOT_APPLICABLE, OK, WARNING, Finding
from openmed_nb.errors import ConfigurationError
from openmed_nb.models.files import hash_model_files
from openmed_nb.runbook.records.handoff.bundle import write_checksums
from openmed_nb.runbook.records.handoff.smoke import (
    EntitySpan,
    SmokeBenchmark,
    SmokeReport,
    judge_entities,
    judge_memory,
    judge_speed,
    main,
    run_smoke_test,
)
from openmed_nb.runbook.records.logbook.sections import BackgroundLoad
from openmed_nb.training.curve import MemoryCurve, MemorySample

pytestmark = [pytest.mark.real_computer, pytest.mark.usefixtures("quick_collection")]

LOGBOOKS = Path(__file__).parents[1] / "logbook" / "logbooks.py"
FOUND = EntitySpan(0, 6, "DISEASE")


def failed(bundle, **options):
    """Return the names of what fails in the smoke test of a bundle."""
    return [finding.name for finding in run_smoke_test(bundle, **options).findings if finding.status == FAILED]


def curve(*mebibytes):
    """Return the memory after some rounds."""
    samples = (MemorySample(n, n, 1.0, allocated=size << 20) for n, size in enumerate(mebibytes, 1))
    return MemoryCurve("cpu", tuple(samples))


TRIAL = SmokeBenchmark("mine", "cpu", 4, (90.0, 100.0), curve(*[100] * 7))


def test_copied_bundle_passes(bundle):
    """In another folder it finds the entities of the golden run; times stand in the HTML and in the dictionary."""
    report = run_smoke_test(bundle)

    assert report.passed, str(report)
    assert {finding.name: finding.status for finding in report.findings}["entities"] == OK
    assert f"{report.trial.fastest:.1f}" not in str(report)
    assert f"{report.trial.fastest:.1f}" in report._repr_html_()
    stored = json.loads(json.dumps(report.to_dict()))
    assert stored.keys() == {"passed", "simulated", "findings", "trial", "logbook", "comparison"}
    assert (stored["passed"], stored["trial"]["fastest"]) == (True, report.trial.fastest)


def test_changed_weight_is_named_and_nothing_is_run(bundle):
    file = bundle / "model" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    report = run_smoke_test(bundle)

    assert (failed(bundle), report.trial) == (["files"], None)
    assert "model/model.safetensors changed" in str(report)


def test_other_weights_with_a_new_checksum_are_named(bundle, tiny):
    """The golden run knows its model."""
    tiny.save(bundle / "model", tiny.random_bert())
    write_checksums(bundle)

    assert failed(bundle) == ["model"]


def test_model_that_cannot_be_loaded_fails(bundle, change):
    (bundle / "model" / "model.safetensors").write_bytes(b"no weights")
    content = hash_model_files(bundle / "model")
    change(bundle, "golden.json", lambda golden: golden["content"].update(vars(content)))

    assert failed(bundle) == ["run"]


def test_other_entities_fail(bundle, change):
    change(bundle, "golden.json", lambda golden: golden["entities"][0].append({"start": 0, "end": 1, "label": "X"}))

    assert failed(bundle) == ["entities"]


def test_leak_is_named(bundle):
    """Outputs that are kept, as by a forgotten list, fail the memory plateau."""
    kept = []
    layer = torch.nn.modules.module.register_module_forward_hook(
        lambda _module, _inputs, _output: kept.append(torch.zeros(1 << 14))
    )
    try:
        assert failed(bundle) == ["memory"]
    finally:
        layer.remove()
    assert kept


def test_other_packages_and_another_python_are_named(bundle, change):
    requirements = bundle / "requirements.txt"
    pins = requirements.read_text("utf-8").replace(f"openmed-nb=={nb.__version__}", "openmed-nb==9.9\nnowhere==1")
    requirements.write_text(pins, "utf-8")
    change(bundle, "logbook.json", lambda book: book["software"].update(python="2.7.1"))
    (bundle / "model" / "config.json").unlink()
    report = run_smoke_test(bundle)

    assert failed(bundle) == ["files", "packages"]
    assert {finding.name: finding.status for finding in report.findings}["Python"] == WARNING
    assert f"openmed-nb {nb.__version__} instead of 9.9" in str(report)
    assert "nowhere" not in str(report)


def test_missing_checksum_and_missing_logbook(bundle):
    (bundle / "logbook.json").unlink()
    sums = bundle / "SHA256SUMS"
    lines = [line for line in sums.read_text("utf-8").splitlines() if "requirements.txt" not in line]
    sums.write_text("\n".join(lines), "utf-8")
    report = run_smoke_test(bundle)

    assert failed(bundle) == ["files"]
    assert {"logbook.json missing", "requirements.txt without a checksum"} <= set(
        report.findings[0].evidence.split(", ")
    )
    statuses = {finding.name: finding.status for finding in report.findings}
    assert (statuses["Python"], statuses["throughput"], statuses["entities"]) == (NOT_APPLICABLE, NOT_APPLICABLE, OK)


DAMAGED = {
    "no golden run": ("golden.json", lambda _golden: {"schema": "openmed_nb/golden/1"}),
    "no rows": ("golden.json", lambda golden: golden | {"batch_size": 0}),
    "negative steps": ("golden.json", lambda golden: golden | {"steps": -5}),
    "endless rounds": ("golden.json", lambda golden: golden | {"rounds": 10**9}),
    "few rounds": ("golden.json", lambda golden: golden | {"rounds": 3}),
    "fewer texts": ("texts.json", lambda texts: texts[1:]),
    "no texts": ("texts.json", lambda _texts: [3]),
}


@pytest.mark.parametrize(("name", "edit"), DAMAGED.values(), ids=DAMAGED)
def test_damage_with_new_checksums_is_one_error(bundle, change, capsys, name, edit):
    """The exit status is 1, and the result says so instead of an earlier one."""
    (bundle / "smoke.json").write_text('{"passed": true}', "utf-8")
    change(bundle, name, edit)

    assert main(bundle, []) == 1
    assert name in capsys.readouterr().err
    assert json.loads((bundle / "smoke.json").read_text("utf-8"))["passed"] is False


def test_unknown_device_and_folder_are_errors(bundle, tmp_path, capsys):
    assert main(bundle, ["--device", "tpu"]) == 1
    assert capsys.readouterr().err.startswith("UnknownDeviceError: ")
    with pytest.raises(ConfigurationError):
        run_smoke_test(tmp_path / "nowhere")


def test_device_that_is_not_here_is_a_warning(bundle, change):
    change(bundle, "golden.json", lambda golden: golden.update(device="cuda:99"))
    device = next(finding for finding in run_smoke_test(bundle).findings if finding.name == "device")

    assert (device.status, "cuda:99" in device.evidence) == (WARNING, True)


ENTITIES = {
    "the same": (((FOUND,), ()), OK),
    "a missing one": (((), ()), FAILED),
    "another label": (((EntitySpan(0, 6, "DRUG"),), ()), FAILED),
    "another border": (((EntitySpan(0, 5, "DISEASE"),), ()), FAILED),
    "one too many": (((FOUND,), (EntitySpan(0, 1, "DISEASE"),)), FAILED),
    "one twice": (((FOUND, FOUND), ()), FAILED),
}


@pytest.mark.parametrize(("here", "status"), ENTITIES.values(), ids=ENTITIES)
def test_entities_are_compared(here, status):
    assert judge_entities(((FOUND,), ()), here).status == status


def test_entities_in_another_order_are_the_same():
    other = EntitySpan(8, 9, "DISEASE")

    assert judge_entities(((FOUND, other),), ((other, FOUND),)).status == OK
    assert "1 missing, 0 that were not there" in judge_entities(((FOUND, other),), ((FOUND,),)).evidence


CURVES = {
    "level": (curve(*[100] * 7), OK),
    "a leak": (curve(*range(100, 170, 10)), FAILED),
    "up and down": (curve(100, 100, 180, 100, 180, 100, 100), WARNING),
}


@pytest.mark.parametrize(("memory", "status"), CURVES.values(), ids=CURVES)
def test_memory_is_judged(memory, status):
    assert judge_memory(memory, 6).status == status


@pytest.fixture
def book(helper):
    """The logbook of a quiet computer, with the figures of the trial."""
    whole = helper(LOGBOOKS).WHOLE
    cpu = replace(whole.hardware, device="cpu")
    return replace(whole, hardware=cpu, figures=(), background=BackgroundLoad(0, 0.0)).with_reports(TRIAL)


SPEEDS = [  # The share of the processors that other programs took in the golden run and here, texts a second, and the status.
    (0.0, 0.0, 500.0, OK),
    (0.0, 0.0, 80.0, OK),
    (0.0, 0.0, 70.0, FAILED),
    (0.0, None, 70.0, FAILED),
    (0.0, 0.2, 70.0, FAILED),
    (0.0, 0.21, 70.0, WARNING),
    (0.0, 0.9, 8.0, WARNING),
    (0.9, 0.0, 80.0, WARNING),
    (0.9, 0.9, 500.0, WARNING),
]


@pytest.mark.parametrize(("former", "here", "rate", "status"), SPEEDS)
def test_speed_is_judged_on_quiet_computers(book, former, here, rate, status):
    golden, repeated = (replace(book, background=BackgroundLoad(1, share)) for share in (former, here))
    finding = judge_speed(golden, repeated, replace(TRIAL, texts_per_second=(rate,)))

    assert (finding.status, "not judged" in finding.evidence) == (status, status == WARNING)


def test_speed_is_not_judged_where_it_cannot_be_compared(book):
    """On battery, or without the logbook of the golden run, however slow it was."""
    slow = replace(TRIAL, texts_per_second=(1.0,))
    battery = replace(book, conditions=replace(book.conditions, power_source="battery"))
    finding = judge_speed(book, battery, slow)

    assert (finding.status, "power source" in finding.evidence) == (NOT_APPLICABLE, True)
    assert judge_speed(None, book, slow).status == NOT_APPLICABLE


def test_worst_finding_decides():
    findings = (Finding("a", OK, ""), Finding("b", WARNING, ""))
    report = SmokeReport(findings)
    broken = SmokeReport((*findings, Finding("c", FAILED, "")))

    assert (report.passed, report.to_report().status, report.to_report().title) == (True, WARNING, "Smoke test passed")
    assert (broken.passed, broken.to_report().status, broken.to_report().title) == (
        False,
        FAILED,
        "Smoke test failed: c",
    )
