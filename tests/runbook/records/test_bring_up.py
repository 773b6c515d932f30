"""The ladder stops at the stage whose criterion is not met, says what to do, and goes on there after the mend."""

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

# What is known when all is well, on MPS.
WELL = {
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

# The figures that are bad, and the stage that they stop.
BAD = [
    ({"device_faults": ("MPS",)}, "gates"),
    ({"doctor_failures": ("MPS",)}, "gates"),
    ({"entity_agreement": 0.9}, "gates"),
    ({"logits": 1.0}, "gates"),
    ({"non_finite_tokens": 3}, "gates"),
    ({"phase_fractions": {"data": 0.6, "forward": 0.4}}, "throughput"),
    ({"phase_fractions": {"data": 0.0, "transfer": 0.9, "forward": 0.1}}, "throughput"),
    ({"knee_gain": 0.8}, "throughput"),
    ({"knee": None, "knee_gain": None}, "throughput"),
    ({"out_of_memory_at": 1}, "memory"),
    ({"headroom": 0.01}, "memory"),
    ({"memory_growth": 0.9, "memory_verdict": "growing"}, "memory"),
    ({"refused_operators": ("aten::mode",)}, "split"),
    ({"fallback_time": 0.5}, "split"),
    ({"speedup_low": 1.0, "speedup": 1.01, "speedup_high": 1.02}, "split"),
]


def stop(**figures):
    """Return the first stage whose criterion a verdict on figures does not meet, and what to do."""
    judged = evaluate(Evidence(**{**WELL, **figures}))
    obstacles = ((stage.name, unmet_criterion(judged, stage, 30)) for stage in STAGES)
    return next(((name, obstacle.remedy) for name, obstacle in obstacles if obstacle), (None, ""))


def test_nothing_stops_work_that_is_well():
    assert stop() == (None, "")


@pytest.mark.parametrize(("figures", "stage"), BAD)
def test_figure_beyond_its_gate_stops_its_stage(figures, stage):
    name, remedy = stop(**figures)

    assert name == stage
    assert remedy


# The phases of annotating with the bundled model on an H100, as shares of their sum.
ON_A_GPU = {"data": 0.441, "transfer": 0.015, "forward": 0.404, "decode": 0.140}


@pytest.mark.parametrize(("meanwhile", "stage"), [(True, None), (False, "throughput")])
def test_tokenizing_while_the_device_computes_stops_nothing(meanwhile, stage):
    shares = PhaseTimes(ON_A_GPU, meanwhile).fractions

    assert stop(device="cuda:0", phase_fractions=shares)[0] == stage


@pytest.mark.parametrize(
    ("figures", "remedy"),
    [
        # Who annotates has no loader: texts are tokenized on more computers.
        ({"task": "annotation", "phase_fractions": {"data": 0.6, "forward": 0.4}}, "nb.cluster"),
        ({"task": "training", "phase_fractions": {"data": 0.6, "forward": 0.4}}, "nb.training.loader.check"),
        ({"speedup_low": 1.0, "speedup": 1.01, "speedup_high": 1.02}, "nb.use('cpu')"),
        ({"knee": None, "knee_gain": None}, "seconds=60"),
    ],
)
def test_remedy_helps(figures, remedy):
    assert remedy in stop(**figures)[1]


def test_a_variable_that_is_too_late_stops_at_freeze(tmp_path):
    """A fallback that is set after torch has read it stops the first stage, and nothing of the texts is written.

    What is told last is where the ladder stopped.
    """
    told = []
    with nb.simulated_mps(fallback=False):
        os.environ[FALLBACK_VARIABLE] = "1"
        stop = SESSION.subscribe(told.append)
        found = nb.runbook.bring_up("bundled_small", [PRIVATE], folder=tmp_path)
        stop()
        book = nb.logbook(found, model="bundled_small")
    written = "".join(file.read_text("utf-8") for file in tmp_path.iterdir())

    assert str(list(filter(None, told))[-1]) == "Climbing: ladder (stage 1 of 5)"
    assert (found.passed, found.complete, found.exit_code) == ((), False, 1)
    assert [rung.stage for rung in found.results] == ["freeze"]
    assert "too late" in found.conclusion
    assert found.to_report().tables[0].collapsed  # The lamps say how far it is.
    assert [lamp.status for lamp in found.to_report().charts[0].indicators] == ["failed", *["not applicable"] * 4]
    assert "%load_ext openmed_nb" in found.results[0].remedy
    assert "Quackenbush" not in written + str(found) + found._repr_html_()
    assert json.loads((tmp_path / "bring_up.json").read_text("utf-8"))["results"][0]["status"] == "failed"
    assert book.metrics[-1].values == {"stages": 5.0, "stages_passed": 0.0}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        *((text, "is not a ladder") for text in ("", "{}", "[1]", '{"schema": "openmed_nb/ladder/0"}')),
        ('{"schema": "openmed_nb/ladder/2"}', "is a ladder .*of version 2, and this openmed_nb reads version 1"),
    ],
)
def test_a_file_that_is_something_else_is_refused(tmp_path, text, problem):
    """A bring_up.json that is no ladder is an error, and stays as it was."""
    (tmp_path / "bring_up.json").write_text(text)

    with pytest.raises(ConfigurationError, match=rf"'bring_up\.json' {problem}"):
        nb.runbook.bring_up("bundled_small", TEXTS, folder=tmp_path)
    assert (tmp_path / "bring_up.json").read_text() == text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seconds": 0}, "seconds"),
        ({"training": 1}, "training"),
        ({"texts": 3}, "text"),
        ({"folder": 7}, "folder"),
        ({"folder": "/proc/none"}, "cannot be written"),
    ],
)
def test_arguments_that_cannot_be_used_are_refused(tmp_path, arguments, message):
    """A wrong argument is an error before anything is measured."""
    with pytest.raises(ConfigurationError, match=message):
        nb.runbook.bring_up("bundled_small", **{"folder": tmp_path, **arguments})


@pytest.mark.slow
def test_each_planted_failure_stops_its_stage_and_the_mend_goes_on(tmp_path):
    """Wrong numbers stop at gates and growing memory at memory; after each mend the next call goes on from there."""
    kept, stages = [], []

    def listen(activity):
        if activity and activity.operation == "Climbing":
            stages.append(activity.target)

    def shifted(module, _inputs, output):
        """Give other logits on the device than on the CPU, as a wrong kernel would."""
        if next(module.parameters()).device.type == "mps":
            output.logits[..., 0] += 9

    def retained(_module, _inputs, output):
        if stages[-1] == "memory":
            kept.append(output.logits.new_zeros(1 << 20))

    def climb():
        return nb.runbook.bring_up(pipe, TEXTS, folder=tmp_path, seconds=40)

    with nb.simulated_mps():
        pipe = nb.load_pipeline("bundled_small")
        stop = SESSION.subscribe(listen)
        hook = pipe.model.register_forward_hook(shifted)
        wrong = climb()
        hook.remove()
        hook = pipe.model.register_forward_hook(retained)
        growing = climb()
        hook.remove()
        kept.clear()
        mended = climb()
        stop()

    assert (wrong.results[-1].stage, wrong.passed) == ("gates", ("freeze",))
    assert "entities" in wrong.conclusion
    assert (growing.results[-1].stage, growing.passed) == ("memory", ("freeze", "gates", "throughput"))
    assert growing.note == "Kept from an earlier run: 1 stage."
    assert "find_tensor_referrers" in growing.results[-1].remedy
    assert "memory" in mended.passed
    assert mended.note == "Kept from an earlier run: 3 stages."
    assert {f"{name}.json" for name in ("doctor", "device", "parity", "sweep", "memory")} <= {
        file.name for file in tmp_path.iterdir()
    }


@pytest.mark.slow
def test_the_ladder_on_the_real_cpu_is_climbed(tmp_path):
    """On the CPU of this computer no stage but the last stops it, and a second call keeps what is passed."""
    found = nb.runbook.bring_up("bundled_small", TEXTS, folder=tmp_path, seconds=60, device="cpu")
    again = nb.runbook.bring_up("bundled_small", TEXTS, folder=tmp_path, seconds=60, device="cpu")

    assert set(NAMES[:4]) <= set(found.passed)
    assert again.passed[:4] == found.passed[:4]
    assert again.note.startswith("Kept from an earlier run")
    assert isinstance(again, BringUpReport)
