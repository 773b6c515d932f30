"""Tests of nb.runbook.profile with planted bottlenecks, of its findings, and of the comparison of two profiles."""

import gzip
import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import openmed_nb as nb
from helpers.annotations import NOTE
from helpers.sample_reports import PROFILE
from openmed_nb._render.display import NOT_APPLICABLE, OK, WARNING
from openmed_nb.devices.profilers import suppress_kineto_output
from openmed_nb.errors import ConfigurationError, DeviceUnavailableError
from openmed_nb.runbook.bench.fallbacks import FELL_BACK, Fallback
from openmed_nb.runbook.bench.profile import WAIT_REMEDIES, Profile
from openmed_nb.runbook.bench.profile_watch import NUM_LAUNCHES, _aggregate_operator_times
from openmed_nb.runbook.bench.timing import Disturbance, OperatorTime, PhaseTimes, Synchronization

ROWS = torch.ones(4, 8)
LAYER = nn.Linear(8, 8)


class ModeModel(nn.Module):
    """Model with an operator that MPS does not support."""

    def forward(self, rows):
        """Return the most frequent value of each row."""
        return torch.mode(rows * 2).values


def run_profile(*args, **options):
    """Run a quick profile."""
    return nb.runbook.profile(*args, **{"steps": 3, **options})


def get_finding(profile, name):
    """Return a finding of a profile."""
    return next(finding for finding in profile.findings if finding.name == name)


class PlantedSteps:
    """Training steps on a device, one of which waits for the loss at the line of the comment."""

    def __init__(self, device):
        self.device = device
        self.model = nn.Linear(8, 8).to(device)

    def run_healthy(self, batch):
        """Run a step that keeps all values on the device."""
        loss = self.model(batch.to(self.device)).square().mean()
        loss.backward()
        self.model.zero_grad()
        return loss

    def read_loss(self, batch):
        """Run a step that reads the loss."""
        self.run_healthy(batch).item()  # waits


def find_wait():
    """Return the call that waits, with its location."""
    lines = Path(__file__).read_text("utf-8").splitlines()
    number = next(number for number, line in enumerate(lines, 1) if line.endswith("# waits"))
    return f".item() at test_profile.py:{number} in read_loss"


@pytest.mark.real_computer
class TestProfile:
    """Profiles of models and steps."""

    @pytest.fixture(autouse=True)
    def one_second_modules(self, clock):
        """Make each module take one second of the clock."""
        hook = nn.modules.module.register_module_forward_pre_hook(lambda _module, _inputs: clock.advance(1.0))
        yield
        hook.remove()

    def test_healthy_training_has_no_bottlenecks(self):
        profile = run_profile(LAYER, ROWS, training=True, device="cpu")

        assert (profile.bottlenecks, profile.synchronizations) == ((), ())
        assert list(profile.phase_fractions) == ["data", "transfer", "forward", "backward", "optimizer"]
        assert {time.phase for time in profile.operators} >= {"forward", "backward", "optimizer"}
        assert profile.operators[0].device_seconds is None

    def test_slow_loader_is_reported(self, clock):
        """Loading a batch takes longer than a step with the same batch."""

        def collate_slowly(rows):
            clock.advance(9.0)
            return torch.stack(rows)

        loader = DataLoader([torch.ones(8)] * 8, batch_size=2, collate_fn=collate_slowly)
        profile = run_profile(LAYER, loader, device="cpu")

        assert "data" in profile.bottlenecks
        assert "data" in {time.phase for time in profile.operators}
        assert profile.data_only == pytest.approx(9, abs=0.1)
        assert profile.compute_only == pytest.approx(1, abs=0.1)

    def test_launch_overhead_of_many_operators(self, clock):
        """Torch's profiler records no kernels on MPS and on the CPU, so small operators are timed instead."""
        clock.tick = 0.25
        narrow = nn.Sequential(*[nn.Linear(4, 4) for _ in range(60)])
        with nb.simulated_mps():
            profile = run_profile(narrow, torch.ones(1, 4))
        on_cpu = run_profile(narrow, torch.ones(1, 4), device="cpu")

        assert profile.operators_per_step == 60
        assert profile.launch_seconds == on_cpu.launch_seconds == pytest.approx(60 * 0.25 / NUM_LAUNCHES)
        assert get_finding(profile, "tiny batch").status == NOT_APPLICABLE

    def test_fallback_is_reported(self):
        with nb.simulated_mps(fallback=True), pytest.warns(UserWarning, match="aten::mode"):
            profile = run_profile(ModeModel(), ROWS)

        assert profile.bottlenecks == ("fallback",)
        assert [fallback.operator for fallback in profile.fallbacks] == ["aten::mode"]
        assert profile.fallbacks_per_step == 1
        assert 0 < profile.fallback_fraction < 1

    def test_line_that_waits_is_reported(self):
        with nb.simulated_mps():
            profile = run_profile(PlantedSteps("mps").read_loss, [ROWS], steps=2)

        (wait,) = profile.synchronizations
        assert profile.bottlenecks == ("synchronization",)
        assert (wait.reason, wait.count, str(wait)) == ("read", 1, find_wait())

    def test_copy_of_the_batch_is_not_reported(self):
        """On the CPU nothing waits, but the lines that would wait on a GPU are reported."""
        with nb.simulated_mps():
            healthy = run_profile(PlantedSteps("mps").run_healthy, [ROWS])
        reading = run_profile(PlantedSteps("cpu").read_loss, [ROWS], device="cpu")

        assert (healthy.bottlenecks, healthy.task, healthy.synchronizations) == ((), "own step", ())
        assert "synchronization" not in reading.bottlenecks
        assert find_wait() in str(reading)

    def test_annotation_has_no_text_content(self, keyword_model):
        """Waits of this package are not reported."""
        with nb.simulated_mps():
            profile = run_profile(str(keyword_model), [NOTE], batch_size=3, steps=1)

        assert list(profile.phase_fractions) == ["data", "transfer", "forward", "decode"]
        assert profile.synchronizations == ()
        assert "diabetes" not in str(profile) + json.dumps(profile.to_dict())
        assert profile.batch_tokens == 3 * 64

    def test_chrome_trace_is_written(self, tmp_path):
        """The trace has the phases and operators, but no shapes and no paths."""
        file = tmp_path / "trace.json.gz"
        file.write_text("before")

        run_profile(LAYER, ROWS, device="cpu", trace=file, steps=2)

        text = gzip.decompress(file.read_bytes()).decode("utf-8")
        names = [event.get("name") for event in json.loads(text)["traceEvents"]]
        assert names.count("openmed_nb: forward") == 2
        assert "aten::addmm" in names
        assert "Input Dims" not in text
        assert ".py" not in text

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"steps": 0}, "steps.*0"),
            ({"batch_size": True}, "batch_size.*True"),
            ({"trace": 3}, "Invalid path for the trace"),
            ({"trace": "trace.txt"}, "A trace cannot be written to"),
            ({"trace": "no_such_folder/trace.json"}, "'trace.json'"),
            ({"signposts": True, "device": "cpu"}, "(?i)signposts.*cpu"),
            ({"metal_capture": "step", "device": "cpu"}, "Metal captures.*cpu"),
            *(({"metal_capture": name}, "Metal capture") for name in (3, "folder/step", ".")),
        ],
    )
    def test_invalid_arguments_are_rejected(self, options, message):
        with pytest.raises(ConfigurationError, match=message):
            nb.runbook.profile(**options)

    @pytest.mark.parametrize("options", [{"signposts": True}, {"metal_capture": "step"}])
    def test_signposts_on_simulated_mac_are_rejected(self, options):
        """The error is raised before the step runs."""
        batches = []

        with nb.simulated_mps(), pytest.raises(ConfigurationError, match="simulated"):
            nb.runbook.profile(batches.append, [torch.ones(1)], **options)
        assert batches == []

    def test_active_profiler_is_rejected(self):
        """The active profiler keeps recording."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as active_profiler:
            with pytest.raises(ConfigurationError, match="profiler"):
                run_profile(LAYER, ROWS, device="cpu")
            torch.ones(3).sum()

        assert "aten::sum" in {event.name for event in active_profiler.events()}

    @pytest.mark.parametrize("error", [ZeroDivisionError(), MemoryError(NOTE)])
    def test_error_of_step_is_raised(self, error):
        """No profiler stays active, and an out-of-memory error contains no text content."""

        def step(_batch):
            raise error

        expected = DeviceUnavailableError if isinstance(error, MemoryError) else ZeroDivisionError
        with pytest.raises(expected) as raised:
            run_profile(step, [ROWS], device="cpu")
        assert not torch.autograd._profiler_enabled()
        assert "diabetes" not in str(raised.value)

    def test_only_profiler_output_is_suppressed(self, capfd):
        with suppress_kineto_output():
            os.write(2, b"first\nUSDT:2026-11-21 profiler_start\nsecond\n")
            os.write(2, b"ERROR: External init callback must run in same thread as registerClient (1 != 2)\n")
        run_profile(LAYER, ROWS, device="cpu", steps=1)
        os.write(2, b"third\n")

        assert capfd.readouterr().err == "first\nsecond\nthird\n"

    def test_names_of_user_ranges_are_hidden(self):
        """They may contain text content."""

        def step(batch):
            with torch.profiler.record_function(f"note::{NOTE}"):
                return batch + 1

        profile = run_profile(step, [ROWS], device="cpu")

        assert "diabetes" not in json.dumps(profile.to_dict())
        assert {time.operator for time in profile.operators} >= {"aten::add"}


def make_event(name, time_range, self_cpu_time=0, self_device_time=0, device_type="CPU"):
    """Return an event with the fields of torch's profiler, in microseconds."""
    times = SimpleNamespace(start=time_range[0], end=time_range[1])
    return SimpleNamespace(
        name=name,
        time_range=times,
        self_cpu_time_total=self_cpu_time,
        self_device_time_total=self_device_time,
        device_type=f"DeviceType.{device_type}",
    )


EVENTS = [
    make_event("openmed_nb: data", (0, 10)),
    make_event("openmed_nb: forward", (10, 100)),
    make_event("aten::addmm", (20, 40), 15, 300),
    make_event("cudaLaunchKernel", (25, 27), 2),
    make_event("aten::addmm", (50, 70), 15, 100),
    make_event("aten::t", (45, 46), 1),
    make_event("openmed_nb: backward", (100, 200)),
    make_event("autograd::engine::evaluate_function: AddmmBackward0", (110, 160), 9),
    make_event("aten::addmm", (120, 150), 20, 600),
    make_event("openmed_nb: forward", (12, 90), device_type="CUDA"),
    make_event("ampere_sgemm", (30, 400), 0, 300, "CUDA"),
    make_event("aten::zeros", (205, 206), 4),
]


@pytest.mark.parametrize("records_device", [True, False])
def test_operator_times_sum_by_phase(records_device):
    """Phase ranges, kernels and driver calls are not operators."""
    times = _aggregate_operator_times(EVENTS, 2, records_device)
    by_phase = {(time.operator, time.phase): (time.count, time.seconds, time.device_seconds) for time in times}

    assert by_phase == {
        ("aten::addmm", "forward"): (1.0, pytest.approx(15e-6), pytest.approx(200e-6) if records_device else None),
        ("aten::addmm", "backward"): (0.5, pytest.approx(10e-6), pytest.approx(300e-6) if records_device else None),
        ("aten::t", "forward"): (0.5, pytest.approx(5e-7), 0 if records_device else None),
        ("aten::zeros", ""): (0.5, pytest.approx(2e-6), 0 if records_device else None),
    }
    assert times[0].phase == ("backward" if records_device else "forward")


WAIT = Synchronization(".item()", "train.py", 12, "step", "read", 1.0)
COPY = replace(WAIT, call=".to('mps')", reason="copy")
FALLBACK = Fallback("aten::mode", FELL_BACK, 3)
CASES = [
    ("data", OK, "", {}),
    ("data", OK, "", {"phase_times": PhaseTimes({"data": 0.25, "forward": 0.75})}),
    ("data", WARNING, "", {"phase_times": PhaseTimes({"data": 0.26, "forward": 0.74})}),
    ("synchronization", OK, "no line", {}),
    ("synchronization", WARNING, ".item() at train.py:12 in step", {"synchronizations": (WAIT,)}),
    ("synchronization", WARNING, ", and 2 others", {"synchronizations": (COPY,) * 5}),
    ("synchronization", NOT_APPLICABLE, "on a GPU, these calls", {"device": "cpu", "synchronizations": (WAIT,)}),
    ("tiny batch", OK, "", {"launch_seconds": 0.05}),
    ("tiny batch", WARNING, "", {"launch_seconds": 0.051}),
    ("tiny batch", WARNING, "", {"launch_seconds": 9.0, "task": "own step"}),
    ("tiny batch", NOT_APPLICABLE, "Python code", {"task": "own step"}),
    ("tiny batch", OK, "", {"task": "own step", "device": "cuda:0"}),
    ("tiny batch", NOT_APPLICABLE, "simulated", {"launch_seconds": 9.0, "simulated": True}),
    ("fallback", OK, "", {}),
    ("fallback", WARNING, "aten::mode fell back", {"fallbacks": (FALLBACK,) * 2}),
    ("fallback", NOT_APPLICABLE, "", {"device": "cuda:0"}),
]


@pytest.mark.parametrize(("name", "status", "evidence", "changes"), CASES)
def test_finding_of_given_measurements(name, status, evidence, changes):
    profile = replace(PROFILE, **changes)
    finding = get_finding(profile, name)

    assert (finding.status, bool(finding.remedy)) == (status, status == WARNING)
    assert evidence in finding.evidence
    assert profile.bottlenecks == ((name,) if status == WARNING else ())
    if profile.synchronizations and status == WARNING:
        assert finding.remedy == WAIT_REMEDIES[profile.synchronizations[0].reason]


def test_fractions_of_operators_and_launches():
    profile = replace(PROFILE, fallbacks_per_step=25.0)

    assert (profile.launch_fraction, profile.fallback_fraction) == (pytest.approx(0.1), 0.25)
    assert replace(profile, launch_seconds=9.0, fallbacks_per_step=900.0).fallback_fraction == 1.0
    assert replace(profile, operators_per_step=0.0).fallback_fraction == 0.0


def test_profile_file_is_read_as_it_was_saved(tmp_path):
    """An existing file is replaced."""
    file = tmp_path / "profile.json"
    profile = replace(PROFILE, synchronizations=(WAIT,), fallbacks=(FALLBACK,))
    for _ in range(2):
        profile.save(file)
    data = json.loads(file.read_text("utf-8"))

    assert list(tmp_path.iterdir()) == [file]
    assert (data["schema"], data["synchronizations"][0]["line"]) == ("openmed_nb/profile/1", 12)
    assert Profile.read(file) == profile
    with pytest.raises(ConfigurationError):
        profile.save(tmp_path / "no_such_folder" / "profile.json")


@pytest.mark.parametrize(
    "text",
    ["{", '{"schema": "openmed_nb/profile/1"}', json.dumps({**PROFILE.to_dict(), "synchronizations": [3]})],
)
def test_profile_read_rejects_other_files(tmp_path, text):
    file = tmp_path / "other.json"
    file.write_text(text, "utf-8")

    with pytest.raises(ConfigurationError) as error_info:
        Profile.read(file)
    assert error_info.value.remedy == "Pass a file written by Profile.save()."


def make_operators(*names):
    """Return operators, the slowest first."""
    return tuple(OperatorTime(f"aten::{name}", "forward", 4.0, 1 / number) for number, name in enumerate(names, 1))


def later_profile(days, **changes):
    """Return a profile some days after the first, with changes."""
    return replace(PROFILE, created_at=f"2026-11-{1 + days:02}T12:00:00Z", **changes)


REORDERED = make_operators("gelu", "addmm", "softmax", "add")
OTHER = make_operators("addmm", "mul", "sub", "softmax")


@pytest.mark.parametrize(
    ("second", "status", "evidence"),
    [
        (later_profile(6), NOT_APPLICABLE, "less than a week apart"),
        (later_profile(7), WARNING, "after 7 days, and a step is no faster: aten::addmm, aten::softmax, aten::gelu"),
        (later_profile(7, operators=REORDERED), WARNING, "a step is no faster: aten::gelu, aten::addmm, aten::softmax"),
        (later_profile(7, seconds=0.12), WARNING, "a step is no faster"),
        (later_profile(7, seconds=0.1), OK, "and a step is faster"),
        (later_profile(7, operators=OTHER), OK, "changed to aten::addmm, aten::mul, aten::sub"),
    ],
)
def test_stopping_rule(second, status, evidence):
    """The rule applies if the slowest operators and the step time are unchanged after a week or more."""
    diff = PROFILE.diff(second)
    finding = diff.findings[-1]

    assert (finding.status, bool(finding.remedy)) == (status, status == WARNING)
    assert evidence in finding.evidence
    assert diff.should_stop == (status == WARNING)
    assert diff.findings == second.diff(PROFILE).findings  # The dates determine the order.


@pytest.mark.parametrize(("seconds", "change"), [(0.125, "as long as before"), (0.05, "faster"), (0.15, "slower")])
def test_diff_reports_faster_and_slower_steps(seconds, change):
    """Changes of up to a tenth are ignored."""
    assert change in PROFILE.diff(later_profile(3, seconds=seconds)).findings[1].evidence


def test_operator_times_sum_over_phases():
    """The times are those of the GPU if they are recorded."""
    forward = OperatorTime("aten::mm", "forward", 1.0, 0.01, 0.03)
    phases = (forward, OperatorTime("aten::add", "forward", 1.0, 0.02, 0.04), replace(forward, phase="backward"))

    assert replace(PROFILE, operators=phases).operator_times == {"aten::mm": 0.06, "aten::add": 0.04}


BUSY = {"disturbance": Disturbance("the computer is busy", "Close other programs.")}


@pytest.mark.parametrize(
    ("first", "changes", "differences", "evidence"),
    [
        (PROFILE, {"rows": 64}, ("rows",), "different rows"),
        (PROFILE, {"name": "other", "device": "cpu"}, ("name", "device"), "different name, device"),
        (PROFILE, {"simulated": True}, ("simulated",), "different simulated"),
        (PROFILE, BUSY, (), "the computer is busy"),
        (replace(PROFILE, **BUSY), BUSY, (), "the computer is busy"),
    ],
)
def test_diff_does_not_compare_different_workloads_or_unreliable_times(first, changes, differences, evidence):
    diff = first.diff(later_profile(14, **changes))
    (finding,) = diff.findings

    assert (diff.differences, diff.progress, diff.should_stop) == (differences, None, False)
    assert evidence in finding.evidence
    assert ("Close" in finding.remedy) == (changes is BUSY)
    assert "ms before" not in diff._repr_html_()


def test_diff_rejects_other_values():
    with pytest.raises(ConfigurationError, match="A profile cannot be compared with str"):
        PROFILE.diff("profile.json")
