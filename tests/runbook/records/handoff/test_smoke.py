"""The smoke test of a bundle, with changes to the bundle and errors in the process."""

import re
from dataclasses import replace

import pytest
import torch

from helpers.logbooks import COMPLETE
from openmed_nb._render.display import FAILED, NOT_APPLICABLE, OK, WARNING
from openmed_nb.errors import ConfigurationError, ModelError
from openmed_nb.models.files import hash_model_files
from openmed_nb.runbook.records.handoff.smoke import (
    EntitySpan,
    SmokeBenchmark,
    check_entities,
    check_memory,
    check_throughput,
    main,
    run_smoke_test,
)
from openmed_nb.runbook.records.logbook.logbook import BackgroundLoad
from openmed_nb.training.curve import MemoryCurve, MemorySample

pytestmark = [pytest.mark.real_computer, pytest.mark.usefixtures("quick_collection")]

ENTITY = EntitySpan(0, 6, "DISEASE")


def run_failed_checks(bundle):
    """Run the smoke test of a bundle and return the names of the failed checks."""
    return [finding.name for finding in run_smoke_test(bundle) if finding.status == FAILED]


def make_curve(*mebibytes):
    samples = (MemorySample(n, n, 1.0, allocated=size << 20) for n, size in enumerate(mebibytes, 1))
    return MemoryCurve("cpu", tuple(samples))


BENCHMARK = SmokeBenchmark("cpu", (90.0, 100.0), make_curve(*[100] * 7))


def test_smoke_test_of_copied_bundle_passes(bundle, capsys):
    status = main(bundle)
    printed = capsys.readouterr().out

    assert (status, printed.splitlines()[0]) == (0, "Smoke test passed"), printed
    assert re.findall(r"^  (device|entities|memory|throughput) ", printed, flags=re.MULTILINE) == [
        *("device", "entities", "memory", "throughput")
    ]


def test_smoke_test_rejects_other_weights(bundle, tiny):
    tiny.save(bundle / "model", tiny.random_bert())

    with pytest.raises(ConfigurationError, match="differ from the golden run"):
        run_smoke_test(bundle)


def test_smoke_test_rejects_unloadable_model(bundle, change):
    (bundle / "model" / "model.safetensors").write_bytes(b"no weights")
    hashes = hash_model_files(bundle / "model")
    change(bundle, "golden.json", lambda golden: golden["model_hashes"].update(vars(hashes)))

    with pytest.raises(ModelError):
        run_smoke_test(bundle)


def test_smoke_test_fails_for_other_entities(bundle, change, capsys):
    change(bundle, "golden.json", lambda golden: golden["entities"][0].append({"start": 0, "end": 1, "label": "X"}))

    assert main(bundle) == 1
    assert capsys.readouterr().out.startswith("Smoke test failed: entities\n")


def test_smoke_test_detects_memory_leak(bundle):
    leaked = []
    hook = torch.nn.modules.module.register_module_forward_hook(
        lambda _module, _inputs, _output: leaked.append(torch.zeros(1 << 14))
    )
    try:
        assert run_failed_checks(bundle) == ["memory"]
    finally:
        hook.remove()
    assert leaked


CORRUPTIONS = {
    "no golden run": ("golden.json", lambda _golden: {"schema": "openmed_nb/golden/1"}),
    "fewer texts": ("texts.json", lambda texts: texts[1:]),
    "no texts": ("texts.json", lambda _texts: [3]),
    "no logbook": ("logbook.json", lambda _book: {}),
}


@pytest.mark.parametrize(("name", "edit"), CORRUPTIONS.values(), ids=CORRUPTIONS)
def test_main_reports_corrupt_files(bundle, change, capsys, name, edit):
    change(bundle, name, edit)

    assert main(bundle) == 1
    assert name in capsys.readouterr().err


def test_unavailable_golden_device_is_a_warning(bundle, change):
    change(bundle, "golden.json", lambda golden: golden.update(device="cuda:99"))
    device = next(finding for finding in run_smoke_test(bundle) if finding.name == "device")

    assert (device.status, "cuda:99" in device.evidence) == (WARNING, True)


OTHER = EntitySpan(8, 9, "DISEASE")
# Entities of two texts in a golden run with two entities in the first text.
ENTITIES = {
    "same in another order": (((OTHER, ENTITY), ()), "the same 2 entities in 2 texts"),
    "missing": (((ENTITY,), ()), "1 text (0): 1 missing, 0 additional"),
    "other label": (((EntitySpan(0, 6, "DRUG"), OTHER), ()), "1 text (0): 1 missing, 1 additional"),
    "other boundary": (((EntitySpan(0, 5, "DISEASE"), OTHER), ()), "1 text (0): 1 missing, 1 additional"),
    "additional": (((ENTITY, OTHER), (ENTITY,)), "1 text (1): 0 missing, 1 additional"),
    "duplicate": (((ENTITY, ENTITY, OTHER), ()), "1 text (0): 0 missing, 1 additional"),
}


@pytest.mark.parametrize(("entities", "evidence"), ENTITIES.values(), ids=ENTITIES)
def test_check_entities_requires_equal_entities(entities, evidence):
    finding = check_entities(((ENTITY, OTHER), ()), entities)

    assert evidence in finding.evidence
    assert finding.status == (OK if "same" in evidence else FAILED)


CURVES = {
    "stable": (make_curve(*[100] * 7), OK),
    "leak": (make_curve(*range(100, 170, 10)), FAILED),
    "sawtooth": (make_curve(100, 100, 180, 100, 180, 100, 100), WARNING),
}


@pytest.mark.parametrize(("memory", "status"), CURVES.values(), ids=CURVES)
def test_check_memory_requires_stable_memory(memory, status):
    assert check_memory(memory).status == status


# Logbook of an idle machine without metrics.
BOOK = replace(
    COMPLETE, hardware=replace(COMPLETE.hardware, device="cpu"), metrics=(), background=BackgroundLoad(0, 0.0)
)

# Load of other processes during the golden run and the current run, texts per second, and status.
SPEEDS = [
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


@pytest.mark.parametrize(("golden_load", "load", "rate", "status"), SPEEDS)
def test_check_throughput_requires_idle_machines(golden_load, load, rate, status):
    golden = replace(BOOK, background=BackgroundLoad(1, golden_load)).with_reports(BENCHMARK)
    repeated = replace(BOOK, background=BackgroundLoad(1, load))
    finding = check_throughput(golden, repeated.with_reports(replace(BENCHMARK, texts_per_second=(rate,))))

    assert (finding.status, "not checked" in finding.evidence) == (status, status == WARNING)


def test_check_throughput_requires_comparable_logbooks():
    battery = replace(BOOK, conditions=replace(BOOK.conditions, power_source="battery"))
    finding = check_throughput(BOOK.with_reports(BENCHMARK), battery.with_reports(BENCHMARK))

    assert (finding.status, "power_source" in finding.evidence) == (NOT_APPLICABLE, True)
