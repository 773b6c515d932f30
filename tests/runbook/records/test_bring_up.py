import json
import os

import pytest

import openmed_nb as nb
from openmed_nb.devices.environment import FALLBACK_VARIABLE
from openmed_nb.errors import ConfigurationError
from openmed_nb.runbook.bench.timing import PhaseTimes
from openmed_nb.runbook.records.bring_up import STAGES, BringUpReport, unmet_criterion
from openmed_nb.runbook.verdict.metrics import Evidence
from openmed_nb.runbook.verdict.verdict import evaluate
from openmed_nb.session import SESSION

TEXTS = ["Patient has asthma.", "No fever, but diabetes mellitus.", "Longstanding hypertension."]
PRIVATE = "Zephyrine Quackenbush has asthma."
NAMES = [stage.name for stage in STAGES]

# Evidence of an MPS device without problems.
GOOD_EVIDENCE = {
    "device": "mps",
    "task": "annotation",
    "doctor_failures": (),
    "device_faults": (),
    "silent_errors": (),
    "entity_agreement": 1.0,
    "logits": 1e-6,
    "phase_fractions": {"data": 0.05, "forward": 0.95},
    "knee": 32,
    "knee_gain": 0.0,
    "headroom": 0.5,
    "memory_growth": 0.01,
    "memory_verdict": "flat",
    "fallback_operators": (),
    "speedup_low": 2.0,
    "speedup": 2.1,
    "speedup_high": 2.2,
    "utilization": 0.9,
    "synchronizations": (),
    "slow_conditions": (),
}

# Problems by the stage at which they stop the bring-up.
PROBLEMS = {
    "gates": [
        {"device_faults": ("MPS",)},
        {"doctor_failures": ("MPS",)},
        {"entity_agreement": 0.9},
        {"logits": 1.0},
        {"non_finite_tokens": 3},
    ],
    "throughput": [
        {"phase_fractions": {"data": 0.6, "forward": 0.4}},
        {"phase_fractions": {"data": 0.0, "transfer": 0.9, "forward": 0.1}},
        {"knee_gain": 0.8},
        {"knee": None, "knee_gain": None},
    ],
    "memory": [
        {"out_of_memory_at": 1},
        {"headroom": 0.01},
        {"memory_growth": 0.9, "memory_verdict": "growing"},
    ],
    "split": [
        {"refused_operators": ("aten::mode",)},
        {"fallback_time": 0.5},
        {"speedup_low": 1.0, "speedup": 1.01, "speedup_high": 1.02},
    ],
}


def find_obstacle(**metrics):
    """Return the first stage whose criterion is not met, and the remedy, for good evidence with changes."""
    verdict = evaluate(Evidence(**{**GOOD_EVIDENCE, **metrics}))
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
        ({"speedup_low": 1.0, "speedup": 1.01, "speedup_high": 1.02}, "nb.use('cpu')"),
        ({"knee": None, "knee_gain": None}, "seconds=60"),
    ],
)
def test_remedy_matches_the_problem(metrics, remedy):
    assert remedy in find_obstacle(**metrics)[1]


def test_late_variable_stops_at_freeze(tmp_path):
    """A fallback that is set after torch was imported stops the first stage, and no text is saved."""
    events = []
    with nb.simulated_mps(fallback=False):
        os.environ[FALLBACK_VARIABLE] = "1"
        unsubscribe = SESSION.subscribe(events.append)
        report = nb.runbook.bring_up("bundled_small", [PRIVATE], folder=tmp_path)
        unsubscribe()
        book = nb.logbook(report, model="bundled_small")
    saved = "".join(file.read_text("utf-8") for file in tmp_path.iterdir())

    assert str(list(filter(None, events))[-1]) == "Bringing up: model (stage 1 of 5)"
    assert (report.passed, report.complete, report.exit_code) == ((), False, 1)
    assert [result.stage for result in report.results] == ["freeze"]
    assert "too late" in report.conclusion
    assert report.to_report().tables[0].collapsed  # The indicators already show the progress.
    assert [indicator.status for indicator in report.to_report().charts[0].indicators] == [
        "failed",
        *["not applicable"] * 4,
    ]
    assert "%load_ext openmed_nb" in report.results[0].remedy
    assert "Quackenbush" not in saved + str(report) + report._repr_html_()
    assert json.loads((tmp_path / "bring_up.json").read_text("utf-8"))["results"][0]["status"] == "failed"
    assert book.metrics[-1].values == {"stages": 5.0, "stages_passed": 0.0}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        *((text, "is not a report") for text in ("", "{}", "[1]", '{"schema": "openmed_nb/ladder/0"}')),
        ('{"schema": "openmed_nb/ladder/2"}', "is a report .*of version 2.* reads version 1"),
    ],
)
def test_other_file_raises_and_is_unchanged(tmp_path, text, problem):
    (tmp_path / "bring_up.json").write_text(text)

    with pytest.raises(ConfigurationError, match=rf"'bring_up\.json' {problem}"):
        nb.runbook.bring_up("bundled_small", TEXTS, folder=tmp_path)
    assert (tmp_path / "bring_up.json").read_text() == text


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        ({"seconds": 0}, "seconds"),
        ({"training": 1}, "training"),
        ({"texts": 3}, "text"),
        ({"folder": 7}, "folder"),
        ({"folder": "/proc/none"}, "cannot be written"),
    ],
)
def test_invalid_argument_raises_before_any_measurement(tmp_path, arguments, fragment):
    with pytest.raises(ConfigurationError, match=fragment):
        nb.runbook.bring_up("bundled_small", **{"folder": tmp_path, **arguments})


@pytest.mark.slow
def test_planted_failures_stop_their_stages_and_fixes_resume(tmp_path):
    """Incorrect logits stop at "gates" and memory growth at "memory"; after each fix, the next call resumes there."""
    retained = []
    stages = []

    def record_stage(event):
        if event and event.operation == BringUpReport.OPERATION:
            stages.append(event.target)

    def shift_logits(module, _inputs, output):
        if next(module.parameters()).device.type == "mps":
            output.logits[..., 0] += 9

    def retain_memory(_module, _inputs, output):
        if stages[-1] == "memory":
            retained.append(output.logits.new_zeros(1 << 20))

    def bring_up():
        return nb.runbook.bring_up(pipe, TEXTS, folder=tmp_path, seconds=40)

    with nb.simulated_mps():
        pipe = nb.load_pipeline("bundled_small")
        unsubscribe = SESSION.subscribe(record_stage)
        hook = pipe.model.register_forward_hook(shift_logits)
        incorrect = bring_up()
        hook.remove()
        hook = pipe.model.register_forward_hook(retain_memory)
        growing = bring_up()
        hook.remove()
        retained.clear()
        fixed = bring_up()
        unsubscribe()

    assert (incorrect.results[-1].stage, incorrect.passed) == ("gates", ("freeze",))
    assert "entities" in incorrect.conclusion
    assert (growing.results[-1].stage, growing.passed) == ("memory", ("freeze", "gates", "throughput"))
    assert growing.note.endswith(": 1 stage.")
    assert "find_tensor_referrers" in growing.results[-1].remedy
    assert "memory" in fixed.passed
    assert fixed.note.endswith(": 3 stages.")
    assert {f"{name}.json" for name in ("doctor", "device", "parity", "sweep", "memory")} <= {
        file.name for file in tmp_path.iterdir()
    }


@pytest.mark.slow
def test_cpu_passes_and_second_call_keeps_passed_stages(tmp_path):
    first = nb.runbook.bring_up("bundled_small", TEXTS, folder=tmp_path, seconds=60, device="cpu")
    second = nb.runbook.bring_up("bundled_small", TEXTS, folder=tmp_path, seconds=60, device="cpu")

    assert set(NAMES[:4]) <= set(first.passed)
    assert second.passed[:4] == first.passed[:4]
    assert second.note.startswith("Kept from a previous run")
    assert isinstance(second, BringUpReport)
