"""``nb.runbook.bring_up``: the criterion of each stage, and steps that run again after a fix."""

import os

import pytest

import openmed_nb as nb
from openmed_nb.__main__ import main
from openmed_nb._utils.plain import utc_timestamp
from openmed_nb.devices.environment import FALLBACK_VARIABLE
from openmed_nb.errors import OpenMedError
from openmed_nb.runbook.bench.timing import PhaseTimes
from openmed_nb.runbook.records import report as reports
from openmed_nb.runbook.records.report import BRING_UP_FOLDER, DeviceReport, run_report, unmet_criterion
from openmed_nb.runbook.records.running import StepOutcome
from openmed_nb.runbook.records.steps import STAGES, STEPS, StepOptions
from openmed_nb.runbook.verdict.metrics import Evidence
from openmed_nb.runbook.verdict.verdict import evaluate
from openmed_nb.session import SESSION
from openmed_nb.simulation.operators import DEFECTS

TEXTS = ["Patient has asthma.", "No fever, but diabetes mellitus.", "Longstanding hypertension."]
STAGED_STEPS = [step for step in STEPS if step.stage]

# Evidence of an MPS device without problems, by the step that measures it.
GOOD_EVIDENCE = {
    "device": {},
    "doctor": {"doctor_failures": (), "device_faults": (), "silent_errors": ()},
    "parity": {"entity_agreement": 1.0, "logits": 1e-6},
    "sweep": {"knee": 32, "knee_gain": 0.0, "headroom": 0.5},
    "compare": {
        "phase_fractions": {"data": 0.05, "forward": 0.95},
        "speedup_low": 2.0,
        "speedup": 2.1,
        "speedup_high": 2.2,
        "utilization": 0.9,
        "synchronizations": (),
        "slow_conditions": (),
    },
    "memory": {"memory_growth": 0.01, "memory_verdict": "flat"},
    "fallbacks": {"fallback_operators": ()},
    "logbook": {},
}

# Problems by the stage at which they stop the bring-up.
PROBLEMS = {
    "gates": [
        {"doctor_failures": ("MPS",)},
        {"entity_agreement": 0.9},
        {"logits": 1.0},
    ],
    "throughput": [
        {"phase_fractions": {"data": 0.6, "forward": 0.4}},
        {"knee_gain": 0.8},
        {"knee": None, "knee_gain": None},
    ],
    "memory": [
        {"out_of_memory_at": 1},
        {"memory_growth": 0.9, "memory_verdict": "growing"},
    ],
    "split": [
        {"fallback_time": 0.5},
        {"speedup_low": 1.0, "speedup": 1.01, "speedup_high": 1.02},
    ],
}


def find_obstacle(**metrics):
    """Return the first stage whose criterion is not met, and the remedy, for good evidence with changes."""
    values = {name: value for evidence in GOOD_EVIDENCE.values() for name, value in evidence.items()}
    verdict = evaluate(Evidence(**{"device": "mps", "task": "annotation", **values, **metrics}))
    obstacles = ((stage.name, unmet_criterion(verdict, stage, 30)) for stage in STAGES)
    return next(((name, obstacle.remedy) for name, obstacle in obstacles if obstacle), (None, ""))


def test_good_evidence_meets_all_criteria():
    assert find_obstacle() == (None, "")


@pytest.mark.parametrize("stage", PROBLEMS)
def test_metric_beyond_its_gate_stops_at_its_stage(stage):
    for metrics in PROBLEMS[stage]:
        name, remedy = find_obstacle(**metrics)

        assert name == stage, metrics
        assert remedy


# Time per phase of annotation with the bundled model on an H100, as fractions of the sum.
H100_PHASES = {"data": 0.441, "transfer": 0.015, "forward": 0.404, "decode": 0.140}


@pytest.mark.parametrize(("overlapped", "stage"), [(True, None), (False, "throughput")])
def test_overlapped_tokenization_meets_the_criterion(overlapped, stage):
    fractions = PhaseTimes(H100_PHASES, overlapped).fractions

    assert find_obstacle(device="cuda:0", phase_fractions=fractions)[0] == stage


@pytest.mark.parametrize(
    ("metrics", "remedy"),
    [
        # Annotation has no data loader, so texts are tokenized on several computers.
        ({"task": "annotation", "phase_fractions": {"data": 0.6, "forward": 0.4}}, "nb.cluster"),
        ({"task": "training", "phase_fractions": {"data": 0.6, "forward": 0.4}}, "nb.runbook.profile(step, loader)"),
        ({"knee": None, "knee_gain": None}, "seconds=60"),
    ],
)
def test_remedy_matches_the_problem(metrics, remedy):
    assert remedy in find_obstacle(**metrics)[1]


@pytest.fixture
def bring_up(tmp_path, monkeypatch):
    """Function that brings a model up on MPS with given evidence, and returns the report and the steps that ran."""

    def bring_up(findings=(), **changes):
        ran = []

        def run_step(step, _options, _subject, known):
            ran.append(step.name)
            assert not known.keys() & GOOD_EVIDENCE[step.name].keys()  # Evidence of a problem is measured again.
            evidence = {name: changes.get(name, value) for name, value in GOOD_EVIDENCE[step.name].items()}
            data = {"device": "mps", "findings": findings}
            return StepOutcome(
                step.name, "done", "ok", "Well.", "", (), utc_timestamp(), 1.0, report_json=data, evidence=evidence
            )

        monkeypatch.setattr(reports, "run_step", run_step)
        return run_report(tmp_path, StepOptions("mine", TEXTS), STAGED_STEPS, bring_up=True), ran

    return bring_up


def test_unmet_criterion_stops_and_all_steps_of_its_stage_run_again(bring_up):
    events = []
    with nb.simulated_mps():  # Its environment is in time, whatever this process imported before.
        unsubscribe = SESSION.subscribe(events.append)
        slow, slow_steps = bring_up(knee_gain=0.8)
        unsubscribe()
        fixed, fixed_steps = bring_up()

    assert slow_steps == ["device", "doctor", "parity", "sweep", "compare"]
    assert (slow.steps[-1].outcome, slow.steps[-1].status, slow.exit_code) == ("not met", "failed", 1)
    assert slow.verdict.startswith("No, stopped at compare: The criterion of the stage throughput is not met: ")
    assert "Rollback: Keep the previous batch size" in slow.steps[-1].remedy
    assert str(list(filter(None, events))[-1]) == "Bringing up: model (4 of 8 steps)"
    assert fixed_steps == ["sweep", "compare", "memory", "fallbacks", "logbook"]
    assert fixed.notes == ("Kept from a previous run: 3 steps.",)
    assert (fixed.missing_steps, fixed.exit_code) == ((), 0)
    assert fixed.verdict.startswith("Yes. On mps: keep this device")


def test_failed_check_of_the_doctor_stops_at_freeze_but_not_for_the_device(bring_up):
    finding = {"name": "packages", "evidence": "torch is too old", "remedy": "Update torch."}
    report, ran = bring_up(findings=[finding], doctor_failures=("packages",))

    assert ran == ["device", "doctor"]
    assert "packages: torch is too old." in report.verdict
    assert report.steps[-1].remedy.startswith("Update torch. Rollback: ")
    with nb.simulated_mps():
        assert bring_up(findings=[{**finding, "name": "MPS"}], doctor_failures=("MPS",))[1][-1] == "parity"


def test_late_variable_stops_at_freeze(bring_up):
    with nb.simulated_mps(fallback=False):
        os.environ[FALLBACK_VARIABLE] = "1"
        report, ran = bring_up()

    assert ran == ["device", "doctor"]
    assert "too late" in report.verdict
    assert "%load_ext openmed_nb" in report.steps[-1].remedy


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        ({"seconds": 0}, "seconds"),
        ({"training": 1}, "training"),
        ({"texts": [3]}, "not int"),
        ({"folder": "/proc/none"}, "cannot be written"),
        ({"model": TEXTS, "texts": "bundled"}, r"of 3 items, 'bundled'\. Pass nb\.runbook\.bring_up\(model, texts"),
        ({"dtype": object()}, "cannot be sent"),
    ],
)
def test_invalid_argument_raises_before_any_measurement(tmp_path, arguments, fragment):
    with pytest.raises(OpenMedError, match=fragment):
        nb.runbook.bring_up(**{"model": "bundled_small", "folder": tmp_path, **arguments})


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_wrong_logits_stop_at_gates(tmp_path):
    with nb.simulated_mps(defects=[DEFECTS[0].issue]):
        report = nb.runbook.bring_up("bundled_small", TEXTS, folder=tmp_path, device="mps", seconds=4)
    saved = "".join(file.read_text("utf-8") for file in tmp_path.iterdir())

    assert report.steps[-1].outcome == "not met", report
    assert TEXTS[0] not in saved + str(report)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_cpu_passes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENMED_TORCH_DEVICE", "cpu")
    status = main(["bring-up", "bundled_small"])
    report = DeviceReport.read(tmp_path / BRING_UP_FOLDER / "report.json")

    assert {"device", "doctor", "parity", "sweep", "compare", "memory"} <= set(report.finished_steps), report
    assert status == report.exit_code
    assert "Bring-up on cpu" in capsys.readouterr().out
