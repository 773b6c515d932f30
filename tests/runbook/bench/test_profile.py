"""End-to-end tests of nb.runbook.profile with planted bottlenecks and with healthy steps."""

import gzip
import io
import json
import logging
import os
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import openmed_nb as nb
from openmed_nb._render.display import NOT_APPLICABLE
from openmed_nb.devices.profilers import suppress_kineto_output
from openmed_nb.errors import ConfigurationError, DeviceUnavailableError
from openmed_nb.runbook.bench.profile_watch import NUM_LAUNCHES

pytestmark = [pytest.mark.real_computer, pytest.mark.usefixtures("quick_collection")]

LOGGER = logging.getLogger("planted_steps")
LOGGER.propagate = False
LOGGER.addHandler(logging.StreamHandler(io.StringIO()))
NOTE = "the patient has diabetes mellitus and hypertension . no asthma ."


@pytest.fixture(autouse=True)
def one_second_modules(clock):
    """Make each module take one second of the clock."""
    hook = nn.modules.module.register_module_forward_pre_hook(lambda _module, _inputs: clock.advance(1.0))
    yield
    hook.remove()


class ModeModel(nn.Module):
    """Model with an operator that MPS does not support."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, rows):
        """Return the most frequent value of each row."""
        return torch.mode(self.inner(rows)).values


def run_profile(*args, **options):
    """Run a quick profile."""
    return nb.runbook.profile(*args, **{"steps": 4, **options})


def get_finding(profile, name):
    """Return a finding of a profile."""
    return next(finding for finding in profile.findings if finding.name == name)


# Many operators with little computation, and few operators with much computation.
NARROW = nn.Sequential(*[nn.Linear(4, 4) for _ in range(60)])
WIDE = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512)).requires_grad_(False)


def test_profile_of_healthy_steps_has_no_bottlenecks():
    profile = run_profile(WIDE, torch.ones(4, 512), device="cpu")

    # Operator times are those of the real machine, not of the fake clock.
    assert set(profile.bottlenecks) <= {"tiny batch"}
    assert profile.operators_per_step == 3
    assert profile.synchronizations == ()
    assert profile.operators[0].phase == "forward"


def test_profile_reports_slow_loader(clock):
    """Loading a batch takes longer than a step with the same batch. Its operators do not count as those of the step."""

    def collate_slowly(rows):
        clock.advance(9.0)
        return torch.stack(rows)

    profile = run_profile(
        WIDE, DataLoader([torch.ones(512)] * 8, batch_size=2, collate_fn=collate_slowly), device="cpu"
    )

    assert "data" in profile.bottlenecks
    computing = [time for time in profile.operators if time.phase != "data"]
    assert len(computing) < len(profile.operators) < 30
    assert profile.operator_seconds == pytest.approx(sum(time.seconds for time in computing))
    assert profile.data_only == pytest.approx(9, abs=0.1)
    assert profile.compute_only == pytest.approx(4, abs=0.1)


def test_profile_measures_launch_overhead_on_cpu():
    profile = run_profile(NARROW, torch.ones(1, 4), device="cpu", training=True)

    assert profile.launch_seconds > 0
    assert 0 < profile.launch_fraction <= 1
    assert ("tiny batch" in profile.bottlenecks) == (profile.launch_fraction > 0.5)


def test_profile_measures_launch_overhead_on_mps(clock):
    """Torch's profiler records no kernels there, so small operators are timed instead."""
    clock.tick = 0.25
    with nb.simulated_mps():
        profile = run_profile(NARROW, torch.ones(1, 4))

    assert profile.operators_per_step > 60
    assert profile.launch_seconds == pytest.approx(profile.operators_per_step * 0.25 / NUM_LAUNCHES)
    assert profile.operator_seconds is None
    assert get_finding(profile, "tiny batch").status == NOT_APPLICABLE
    assert get_finding(profile, "tiny batch").evidence == "a simulated device launches no kernels"


def test_profile_reports_fallback():
    with nb.simulated_mps(fallback=True), pytest.warns(UserWarning, match="aten::mode"):
        profile = run_profile(ModeModel(), torch.ones(4, 8))

    assert profile.bottlenecks == ("fallback",)
    assert [fallback.operator for fallback in profile.fallbacks] == ["aten::mode"]
    assert profile.fallbacks_per_step == 1
    assert 0 < profile.fallback_fraction < 1


class PlantedSteps:
    """Training steps on a device that wait for the loss in different ways, at the line of the comment."""

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
        self.run_healthy(batch).item()  # waits in read_loss

    def log_loss(self, batch):
        """Run a step that logs the loss."""
        LOGGER.warning("loss %s", self.run_healthy(batch))  # waits in log_loss

    def compare_loss(self, batch):
        """Run a step that branches on the loss."""
        if self.run_healthy(batch) > 1e9:  # waits in compare_loss
            raise ArithmeticError


def find_wait(step):
    """Return the location of the line that waits in a step."""
    lines = Path(__file__).read_text("utf-8").splitlines()
    return (
        f"test_profile.py:{next(n for n, line in enumerate(lines, 1) if line.endswith(f'# waits in {step}'))} in {step}"
    )


@pytest.mark.parametrize(
    ("step", "call"),
    [
        ("read_loss", ".item()"),
        ("log_loss", "printing a tensor"),
        ("compare_loss", "bool()"),
    ],
)
def test_profile_reports_line_that_waits(step, call):
    with nb.simulated_mps():
        profile = run_profile(getattr(PlantedSteps("mps"), step), [torch.ones(4, 8)], steps=2)

    (wait,) = (wait for wait in profile.synchronizations if wait.reason == "read")
    assert profile.bottlenecks == ("synchronization",)
    assert (wait.call, str(wait.place)) == (call, find_wait(step))
    # The record is formatted once per handler, and pytest adds handlers.
    assert wait.count == 1 or step == "log_loss"
    assert f"{call} at {find_wait(step)}" in str(profile)


def test_profile_of_step_that_waits_only_for_its_batch():
    """On the CPU nothing waits, but the lines that would wait on a GPU are reported."""
    with nb.simulated_mps():
        healthy = run_profile(PlantedSteps("mps").run_healthy, [torch.ones(4, 8)])
    reading = run_profile(PlantedSteps("cpu").read_loss, [torch.ones(4, 8)], device="cpu")

    assert (healthy.bottlenecks, healthy.task) == ((), "own step")
    assert [(wait.call, wait.reason) for wait in healthy.synchronizations] == [(".to('mps')", "batch")]
    assert "waits only for its batch" in str(healthy)
    assert "synchronization" not in reading.bottlenecks
    assert f".item() at {find_wait('read_loss')}" in str(reading)


def test_profile_training_has_operators_in_each_phase():
    profile = run_profile(nn.Linear(8, 8), torch.ones(4, 8), training=True, device="cpu")

    assert {time.phase for time in profile.operators} >= {"forward", "backward", "optimizer"}
    assert list(profile.phase_fractions) == ["data", "transfer", "forward", "backward", "optimizer"]
    assert profile.device_seconds is None


def test_profile_annotation_has_no_text_content():
    """Waits of this package are not reported."""
    with nb.simulated_mps():
        profile = run_profile("bundled_small", [NOTE], batch_size=3, steps=1)

    assert list(profile.phase_fractions) == ["data", "transfer", "forward", "decode"]
    assert "synchronization" not in profile.bottlenecks
    assert not any(wait.place.library.startswith("openmed_nb") for wait in profile.synchronizations)
    assert "diabetes" not in str(profile) + json.dumps(profile.to_dict())
    assert profile.to_dict()["batch_tokens"] == 3 * 128


def test_profile_writes_chrome_trace(tmp_path):
    """The trace has the phases and operators, but no shapes and no paths."""
    file = tmp_path / "trace.json.gz"
    file.write_text("before")

    run_profile(WIDE, torch.ones(7, 512), device="cpu", trace=file, steps=2)

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
        ({"trace": 3}, "A trace cannot be written to"),
        ({"trace": "trace.txt"}, "A trace cannot be written to"),
        # Some directories are not writable even if their permissions allow it.
        *(({"trace": f"{folder}/trace.json"}, "'trace.json'") for folder in ("no_such_folder", "/proc", "/dev/null")),
        ({"signposts": True, "device": "cpu"}, "(?i)signposts.*cpu"),
        ({"metal_capture": "step", "device": "cpu"}, "Metal captures.*cpu"),
        *(({"metal_capture": name}, "Metal capture") for name in (3, "", "folder/step", ".")),
    ],
)
def test_profile_rejects_invalid_arguments(options, message):
    with pytest.raises(ConfigurationError, match=message):
        nb.runbook.profile(**options)


@pytest.mark.parametrize("options", [{"signposts": True}, {"metal_capture": "step"}])
def test_profile_rejects_signposts_on_simulated_mac(options):
    """The error is raised before the step runs."""
    batches = []

    with nb.simulated_mps(), pytest.raises(ConfigurationError, match="simulated"):
        nb.runbook.profile(batches.append, [torch.ones(1)], **options)

    assert batches == []


def test_profile_rejects_active_profiler():
    """The active profiler keeps recording."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as active_profiler:
        with pytest.raises(ConfigurationError, match="profiler"):
            run_profile(WIDE, torch.ones(2, 512), device="cpu")
        torch.ones(3).sum()

    assert "aten::sum" in {event.name for event in active_profiler.events()}


def test_profile_raises_errors_of_step():
    """No profiler stays active, and an out-of-memory error contains no text content."""

    def make_failing_step(error):
        def step(_batch):
            raise error

        return step

    with pytest.raises(ZeroDivisionError):
        run_profile(make_failing_step(ZeroDivisionError()), [torch.ones(3)], device="cpu")
    assert not torch.autograd._profiler_enabled()
    with pytest.raises(DeviceUnavailableError, match="MemoryError") as raised:
        run_profile(make_failing_step(MemoryError(NOTE)), [torch.ones(4)], device="cpu")
    assert "diabetes" not in str(raised.value)


def test_profile_suppresses_only_profiler_output(capfd):
    with suppress_kineto_output():
        os.write(2, b"first\nUSDT:2026-11-21 profiler_start\nsecond\n")
        os.write(2, b"ERROR: External init callback must run in same thread as registerClient (1 != 2)\n")
    run_profile(nn.Linear(8, 8), torch.ones(4, 8), device="cpu", steps=1)
    os.write(2, b"third\n")

    assert capfd.readouterr().err == "first\nsecond\nthird\n"


def test_profile_hides_names_of_user_ranges():
    """Names of user ranges may contain text content."""

    def step(batch):
        with torch.profiler.record_function(f"note::{NOTE}"):
            return batch + 1

    profile = run_profile(step, [torch.ones(4)], device="cpu")

    assert "diabetes" not in json.dumps(profile.to_dict())
    assert {time.operator for time in profile.operators} >= {"aten::add"}
