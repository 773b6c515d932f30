"""Acceptance criteria of a reduced dtype, and expiry of its validation record."""

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

import openmed_nb as nb
from helpers.sample_reports import PARITY, VALIDATION_RECORD
from openmed_nb.annotation.loading import create_pipeline
from openmed_nb.devices import backend
from openmed_nb.errors import ConfigurationError, OpenMedWarning
from openmed_nb.models.config import OpenMedConfig
from openmed_nb.models.loading import LoadSpec
from openmed_nb.models.records import ValidationMetrics, identify_model, record_store
from openmed_nb.runbook.checks import validation
from openmed_nb.runbook.checks.parity_report import EntityAgreement, GoldScore
from openmed_nb.runbook.checks.validation import judge, median_speedup
from openmed_nb.session import SESSION

pytestmark = [pytest.mark.usefixtures("one_thread", "data"), pytest.mark.real_computer]

BEFORE = ["", "the", "the patient", "the patient has", "no", "no history", "no history of"]
AFTER = ["and", "was seen", "of a", "a patient", "the", "type", "no", "has", "seen ,"]


def make_texts(*diseases):
    """Return 60 texts with different words that contain the diseases in turn."""
    frames = [f"{before} {{}} {after} ." for before in BEFORE for after in AFTER][:60]
    return [frame.format(diseases[number % len(diseases)]) for number, frame in enumerate(frames)]


KINDS = [first + " mellitus" * ends for first in ("asthma", "diabetes", "hypertension") for ends in range(4)]
"""Twelve entities with different words, for the keyword model."""
SURE = make_texts(*KINDS)
REPORT = replace(PARITY, model="mine", device="cpu", dtype="bfloat16", spans=EntityAgreement(exact=100))
IDENTITY = replace(VALIDATION_RECORD.identity, device="cpu", device_name="AMD EPYC")


def validate(model, texts=SURE, dtype="bfloat16", **options):
    """Validate a model in a reduced dtype on the CPU."""
    return nb.runbook.validate_precision(str(model), texts, dtype, device="cpu", **options)


@pytest.mark.parametrize(
    ("spans", "changes", "conclusive"),
    [
        ({"exact": 50}, {}, ()),
        ({"exact": 49}, {}, (False,)),
        ({"exact": 99, "missing": 1}, {}, ()),
        ({"exact": 290, "moved": 3}, {}, (False,)),
        ({"exact": 96, "label_changed": 4}, {}, (True,)),
        ({"exact": 100, "extra": 2}, {}, (False,)),
        ({"exact": 10, "missing": 5}, {}, (True, False)),
        ({"exact": 50}, {"texts": 49}, (False,)),
        ({"exact": 1}, {"texts": 1}, (False,)),
        ({"exact": 50}, {"non_finite_tokens": 3}, (True,)),
        ({"exact": 50}, {"gold": GoldScore(100, 90, 89)}, ()),
        ({"exact": 50}, {"gold": GoldScore(100, 80, 95)}, ()),
        ({"exact": 50}, {"gold": GoldScore(100, 90, 88)}, (True,)),
    ],
)
def test_judge_lists_rejection_reasons(spans, changes, conclusive):
    """Too few entities or texts are no evidence against the dtype."""
    verdict = judge(replace(REPORT, spans=EntityAgreement(**spans), **changes), IDENTITY, 1.4)

    assert tuple(reason.conclusive for reason in verdict.reasons) == conclusive
    assert all(reason.reason and reason.remedy for reason in verdict.reasons)
    assert verdict.accepted == (not conclusive) == (verdict.record is not None)
    assert verdict.is_refuted == any(conclusive)


def test_record_contains_identity_metrics_and_criteria():
    report = replace(REPORT, spans=EntityAgreement(99, 0, 0, 1), gold=GoldScore(100, 90, 90))
    record = judge(report, IDENTITY, 1.4321).record

    assert record.identity == IDENTITY
    assert record.evidence == ValidationMetrics(60, "09b4", 1000, 0, 99, 0, 0, 1, 0, 0.9, 0.9, 1.432)
    minimum = {"minimum_entities": 50, "minimum_texts": 50}
    assert record.criteria == {"span_agreement": 0.99, "recall_loss": 0.01, **minimum}


def test_verdict_text_starts_with_reasons():
    """The text of a record does not depend on the speed. It has the upper bound, which decides nothing."""
    refused = judge(replace(REPORT, spans=EntityAgreement(exact=50, missing=50)), IDENTITY)
    accepted = judge(REPORT, IDENTITY, 1.4)
    changed = judge(replace(REPORT, spans=EntityAgreement(exact=1248, missing=9, extra=2)), IDENTITY, 1.0)

    summary = "of {} entities in 60 texts are the same as in float32.\n  {} float32 here."
    assert summary.format("1,259", "Not faster than") in str(changed)
    assert "without a difference" not in str(changed)
    assert str(refused).splitlines()[1] == "  Only 50 of 100 entities are identical. Use float32."
    title = "Accepted: mine in bfloat16 on cpu: 0 differences in 100 entities, up to 3% possible"
    assert str(accepted).startswith(f"{title}\n  100 {summary.format(100, '1.4 times as fast as')}")
    assert "  About 180 such texts" in str(accepted)
    assert json.loads(json.dumps(accepted.to_dict()))["record"]["identity"]["device_name"] == "AMD EPYC"


def test_model_with_changed_entities_is_rejected(load, close_model, border_model):
    verdict = validate(close_model, make_texts("asthma"))
    border = validate(border_model, make_texts("diabetes mellitus"))

    assert (verdict.parity.spans.missing, verdict.accepted, verdict.record) == (60, False, None)
    assert (border.parity.spans.moved, border.accepted, border.record) == (60, False, None)
    validate(close_model, ["fever"])
    for _ in range(2):
        with pytest.warns(OpenMedWarning, match="did not accept it: Only 0 of 60 entities are identical.*Use float32"):
            load(close_model, dtype="bfloat16")


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", pytest.param("float16", marks=pytest.mark.slow)])
def test_model_with_identical_entities_is_accepted(load, keyword_model, dtype):
    verdict = validate(keyword_model, SURE, dtype)

    assert verdict.accepted, verdict
    assert verdict.parity.spans.reference == 60
    assert verdict.record.evidence.speedup >= 1.0
    pipe = load(keyword_model, dtype=dtype)
    assert [entity["word"] for entity in pipe(SURE[1])] == ["asthma mellitus"]


@pytest.mark.parametrize("calls", [0, 2])
def test_busy_computer_keeps_the_speedup_of_an_earlier_record(keyword_model, clock, monkeypatch, set_conditions, calls):
    """The entities are validated. Without an earlier record, the speedup is unknown. A round that takes too long is the last."""
    timed = []

    def become_busy(work):
        timed.append(work)
        clock.advance(60)
        set_conditions(load=0.6)
        return 1.0

    monkeypatch.setattr(validation, "time_call", become_busy)
    set_conditions(load=0.1 if calls else 0.6)
    verdict = validate(keyword_model, SURE, "bfloat16")

    assert (verdict.accepted, verdict.record.evidence.speedup, len(timed)) == (True, None, calls)
    assert str(verdict.disturbance) in str(verdict)

    store = record_store(SESSION.environ)
    store.store(replace(verdict.record, evidence=replace(verdict.record.evidence, speedup=1.4)))
    repeated = validate(keyword_model, SURE, "bfloat16")

    assert repeated.record.evidence.speedup == store.get(repeated.record.identity).evidence.speedup == 1.4


@pytest.mark.usefixtures("set_conditions")
def test_timing_ends_after_two_rounds_without_a_speedup(keyword_model, monkeypatch):
    timed = []
    monkeypatch.setattr(validation, "time_call", lambda work: timed.append(work) or 1.0)
    verdict = validate(keyword_model)

    assert (verdict.record.evidence.speedup, verdict.disturbance, len(timed)) == (1.0, None, 6)


@pytest.mark.parametrize("texts", [[f"{number}. no history of asthma ." for number in range(60)], ["asthma . " * 60]])
def test_repeated_words_are_inconclusive(load, keyword_model, texts):
    """Texts that differ in numbers count once. Each load warns."""
    (reason,) = validate(keyword_model, texts).reasons

    assert "1 of 50 different texts that are required." in reason.reason
    for _ in range(2):
        with pytest.warns(OpenMedWarning, match="did not accept it: Inconclusive.*Repeat the validation"):
            load(keyword_model, dtype="bfloat16")


def test_record_contains_recall_of_gold(load, keyword_model):
    results = load(keyword_model)(SURE)
    right = [[entity for entity in result if entity["word"] != "asthma"] for result in results]
    for gold, recall in ((right, 1.0), ([[] for _ in SURE], None)):
        evidence = validate(keyword_model, gold=gold).record.evidence
        assert (evidence.reference_recall, evidence.recall) == (recall, recall)


class TestExpiry:
    """A validation record is valid for the same files, torch, transformers and device."""

    @pytest.fixture
    def accepted(self, keyword_model, session, data, tmp_path):
        """The folder of a model with a validation record."""
        folder = shutil.copytree(keyword_model, tmp_path / "model")
        spec = LoadSpec.from_name(str(folder), OpenMedConfig())
        identity = identify_model(spec, "bfloat16", "cpu", session.device_manager)
        record_store({"OPENMED_NB_DATA": str(data)}).store(judge(REPORT, identity).record)
        return folder

    def test_record_is_valid_for_the_same_torch(self, new_session, accepted):
        pipe = create_pipeline(new_session(), str(accepted), OpenMedConfig(), dtype="bfloat16")
        assert pipe.model.dtype == torch.bfloat16
        newer = SimpleNamespace(**vars(backend))
        newer.inspect_imported_torch = lambda: replace(backend.inspect_imported_torch(), version="9.0.0")
        newer.inspect_installed_torch = newer.inspect_imported_torch
        with pytest.warns(OpenMedWarning, match="it has not been validated"):
            create_pipeline(new_session(torch_backend=newer), str(accepted), OpenMedConfig(), dtype="bfloat16")

    def test_changed_weight_expires_record(self, load, accepted):
        weights = load_file(accepted / "model.safetensors")
        weights["classifier.bias"][0] = torch.nextafter(weights["classifier.bias"][0], torch.tensor(1e9))
        save_file(weights, accepted / "model.safetensors", {"format": "pt"})

        with pytest.warns(OpenMedWarning, match="it has not been validated"):
            load(accepted, dtype="bfloat16")

    @pytest.mark.parametrize(("spans", "num_records"), [({"exact": 2}, 1), ({"exact": 50, "missing": 50}, 0)])
    def test_only_evidence_removes_record(self, accepted, data, monkeypatch, spans, num_records):
        """Too few entities are no evidence against the dtype."""
        report = replace(REPORT, spans=EntityAgreement(**spans))
        monkeypatch.setattr(validation, "run_parity", lambda *_: report)
        assert not validate(accepted).accepted
        assert len(list((data / "validation_records").glob("*.json"))) == num_records


class TestArguments:
    """What can be validated."""

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            *(({"dtype": dtype}, "is not a reduced dtype") for dtype in ("float32", "auto", None)),
            *(({"texts": texts}, "no texts") for texts in (None, [])),
            ({"texts": "asthma"}, "str is not an iterable"),
        ],
    )
    def test_invalid_arguments_are_rejected(self, keyword_model, changes, message):
        with pytest.raises(ConfigurationError, match=message):
            validate(keyword_model, **changes)

    def test_pipeline_is_rejected(self, load, keyword_model):
        with pytest.raises(ConfigurationError, match="AnnotationPipeline is not a model name"):
            nb.runbook.validate_precision(load(keyword_model), SURE)

    def test_bfloat16_is_not_validated_where_it_can_end_the_process(self, keyword_model, monkeypatch):
        monkeypatch.setattr("openmed_nb.simulation.device.MACOS", (27, 0))
        batches = [torch.ones(2, 4)]
        with nb.simulated_mps():
            for compute in (
                lambda: nb.runbook.validate_precision(str(keyword_model), SURE),
                lambda: nb.runbook.loss_parity(torch.nn.Linear(4, 1), batches, steps=1, dtype="bfloat16"),
            ):
                with pytest.raises(
                    ConfigurationError, match=r"bfloat16 cannot be used on mps.*pytorch#197796.*2\.14\.1"
                ):
                    compute()
            assert nb.runbook.loss_parity(torch.nn.Linear(4, 1), batches, steps=1).steps == 1
            assert nb.runbook.validate_precision(str(keyword_model), SURE, dtype="float16").accepted

    def test_read_only_data_folder_raises(self, keyword_model, tmp_path, monkeypatch):
        (tmp_path / "file").write_text("no folder")
        monkeypatch.setenv("OPENMED_NB_DATA", str(tmp_path / "file"))
        with pytest.raises(ConfigurationError, match="Set OPENMED_NB_DATA to a writable directory"):
            validate(keyword_model)


def test_simulated_record_is_valid_on_simulated_device_only(load, keyword_model):
    with nb.simulated_mps("8 GiB"):
        verdict = nb.runbook.validate_precision(str(keyword_model), SURE, "bfloat16")
        nb.load_pipeline(str(keyword_model), dtype="bfloat16", device="mps")
    SESSION.unload()

    assert verdict.record.identity.simulated
    assert verdict.record.evidence.speedup is None
    assert "where no speed is measured" in str(verdict)
    with pytest.warns(OpenMedWarning, match="on cpu, but it has not been validated"):
        load(keyword_model, dtype="bfloat16")


@pytest.mark.parametrize(
    ("seconds", "speedup"),
    [
        ([(1.0, 2.0)] * 9, 1.0),
        ([(2.0, 1.0)] * 9, 2.0),
        ([(2.0, 1.0)] * 8 + [(1.0, 9.0)], 2.0),
        ([(2.0, 1.0)] * 7 + [(1.0, 1.0)] * 2, 1.0),
        ([(1.05, 1.0)] * 9, 1.0),
        ([(1.06, 1.0)] * 9, 1.06),
        ([(1.5, 1.0)] * 4 + [(1.6, 1.0)] + [(9.0, 1.0)] * 4, 1.6),
        ([(0.66, 1.0), (2.16, 1.0), (1.0, 1.0)] * 3, 1.0),
        ([(2.16, 1.0)] * 6 + [(0.66, 1.0)] * 3, 1.0),
    ],
)
def test_median_speedup_requires_two_rounds(seconds, speedup):
    """On a machine with background load, a single round shows nothing."""
    assert median_speedup(seconds) == speedup
