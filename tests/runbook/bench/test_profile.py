"""nb.runbook.profile at work: planted bottlenecks are named, and healthy steps name none."""

import gzip
import json
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
from openmed_nb.runbook.bench.profile_watch import CALLS

pytestmark = [pytest.mark.real_computer, pytest.mark.usefixtures("quick_collection")]

NOTE = "the patient has diabetes mellitus and hypertension . no asthma ."


@pytest.fixture(scope="module")
def planted(helper):
    """The module of planted steps."""
    return helper(Path(__file__).parent / "planted_steps.py")


@pytest.fixture(autouse=True)
def modules_take_a_second(clock):
    """Every module takes a second by the clock of the test, and everything else next to nothing."""
    hook = nn.modules.module.register_module_forward_pre_hook(lambda _module, _inputs: clock.advance(1.0))
    yield
    hook.remove()


class Modes(nn.Module):
    """A model with an operator that MPS does not have."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, rows):
        """Return the most frequent value of each row."""
        return torch.mode(self.inner(rows)).values


def profiled(*args, **named):
    """Return a quick profile."""
    return nb.runbook.profile(*args, **{"steps": 4, "warm_up": 1, **named})


def finding(profile, name):
    """Return one finding of a profile."""
    return next(one for one in profile.findings if one.name == name)


def narrow():
    """Return a model of many operators with little to do."""
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(60)])


def wide():
    """Return a model of few operators with much to do."""
    return nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512)).requires_grad_(False)


def test_healthy_steps_name_none():
    """A batch that is large enough, ready in time and never read names no bottleneck."""
    profile = profiled(wide(), torch.ones(4, 512), device="cpu")

    assert set(profile.bottlenecks) <= {
        "tiny batch"
    }  # How long the operators of this computer take is not the clock's.
    assert profile.operators_per_step == 3
    assert profile.synchronizations == ()
    assert profile.operators[0].phase == "forward"


def test_slow_loader_is_named(clock):
    """A loader that is slower than the model is named, and its data alone take longer than the same batch again and again."""

    def late(rows):
        clock.advance(9.0)
        return torch.stack(rows)

    profile = profiled(wide(), DataLoader([torch.ones(512)] * 8, batch_size=2, collate_fn=late), device="cpu")

    assert "data" in profile.bottlenecks
    assert profile.data_only == pytest.approx(9, abs=0.1)
    assert profile.compute_only == pytest.approx(4, abs=0.1)


def test_starting_operators_is_measured_on_the_cpu():
    """Beside the steps run operators with nothing to compute, which stand among no figures of the step and tell a tiny batch."""
    profile = profiled(narrow(), torch.ones(1, 4), device="cpu", training=True)

    assert 0 < profile.launch_seconds <= profile.operator_seconds
    assert 0 < profile.launch_fraction <= 1
    assert all(0 <= one.launch_seconds <= one.seconds for one in profile.operators)
    assert {one.phase for one in profile.operators} <= {*profile.shares, ""}
    assert ("tiny batch" in profile.bottlenecks) == (profile.launch_fraction > 0.5)


def test_starting_operators_is_measured_on_mps(clock):
    """On a device of which torch's profiler sees no kernels, as many operators with nothing to compute are timed."""
    clock.tick = 0.25
    with nb.simulated_mps():
        profile = profiled(narrow(), torch.ones(1, 4))

    assert profile.operators_per_step > 60
    assert profile.launch_seconds == pytest.approx(profile.operators_per_step * 0.25 / CALLS)
    assert profile.operator_seconds is None
    assert (finding(profile, "tiny batch").status, finding(profile, "tiny batch").evidence) == (
        NOT_APPLICABLE,
        "a simulated device starts no operators",
    )


def test_fallback_is_named():
    """An operator that falls back to the CPU at each step is named, with how often."""
    with nb.simulated_mps(fallback=True), pytest.warns(UserWarning, match="aten::mode"):
        profile = profiled(Modes(), torch.ones(4, 8))

    assert profile.bottlenecks == ("fallback",)
    assert [one.operator for one in profile.fallbacks] == ["aten::mode"]
    assert profile.fallbacks_per_step == 1
    assert 0 < profile.fallback_fraction < 1


@pytest.mark.parametrize(
    ("step", "words", "call"),
    [
        ("reading", "# read here", ".item()"),
        ("logging", "# logged here", "printing a tensor"),
        ("in_words", "# written here", "formatting a tensor"),
        ("copying", "# copied here", ".cpu()"),
        ("deciding", "# decided here", "bool()"),
    ],
)
def test_line_that_waits_is_named(planted, step, words, call):
    """A step that reads its loss is named with file, line and function."""
    with nb.simulated_mps():
        profile = profiled(getattr(planted.Planted("mps"), step), [torch.ones(4, 8)], steps=2)

    (found,) = (one for one in profile.synchronizations if one.reason == "read")
    line = planted.line_of(words)
    assert profile.bottlenecks == ("synchronization",)
    assert (found.call, found.place.file, found.place.line) == (call, "planted_steps.py", line)
    assert found.count == 1 or step == "logging"  # Once for each handler; pytest adds some.
    assert f"{call} at planted_steps.py:{line} in {step}" in str(profile)


def test_other_steps_of_the_person(planted):
    """A step that leaves everything on the device waits for its batch alone; on the CPU nothing waits, and what would is named."""
    with nb.simulated_mps():
        healthy = profiled(planted.Planted("mps").healthy, [torch.ones(4, 8)])
    reading = profiled(planted.Planted("cpu").reading, [torch.ones(4, 8)], device="cpu")

    assert (healthy.bottlenecks, healthy.task) == ((), "own step")
    assert [(one.call, one.reason) for one in healthy.synchronizations] == [(".to('mps')", "batch")]
    assert "only the batch is waited for" in str(healthy)
    assert "synchronization" not in reading.bottlenecks
    assert f".item() at planted_steps.py:{planted.line_of('# read here')}" in str(reading)


def test_training_steps_have_operators_in_each_phase():
    """The operators of a training step are told by its phases."""
    profile = profiled(nn.Linear(8, 8), torch.ones(4, 8), training=True, device="cpu")

    assert {one.phase for one in profile.operators} >= {"forward", "backward", "optimizer"}
    assert list(profile.shares) == ["data", "transfer", "forward", "backward", "optimizer"]
    assert profile.device_seconds is None


def test_annotation_of_texts():
    """Annotating texts is profiled, without a word of them, and what this package waits for is not named."""
    with nb.simulated_mps():
        profile = profiled("bundled_small", [NOTE], batch_size=3, steps=1)

    assert list(profile.shares) == ["data", "transfer", "forward", "decode"]
    assert "synchronization" not in profile.bottlenecks
    assert not any(one.place.library.startswith("openmed_nb") for one in profile.synchronizations)
    assert "diabetes" not in str(profile) + json.dumps(profile.to_dict())
    assert profile.to_dict()["batch_tokens"] == 3 * 128


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_trace_is_one_of_chrome(tmp_path, name):
    """The trace has the phases by name and the operators, no shape and no path of a file, and is written over."""
    file = tmp_path / name
    file.write_text("before")

    profiled(wide(), torch.ones(7, 512), device="cpu", trace=file, steps=2)

    written = file.read_bytes()
    text = (gzip.decompress(written) if name.endswith("gz") else written).decode("utf-8")
    names = [event.get("name") for event in json.loads(text)["traceEvents"]]
    assert names.count("openmed_nb: forward") == 2
    assert "aten::addmm" in names
    assert "Input Dims" not in text
    assert ".py" not in text


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        *(({"steps": steps}, f"steps cannot be {steps}") for steps in (0, 2.5)),
        ({"warm_up": -1}, "warm_up cannot be -1"),
        ({"batch_size": True}, "batch_size cannot be True"),
        *(({"trace": trace}, "A trace cannot be written to") for trace in (3, "trace.txt")),
        # Whatever the rights of a folder say.
        *(({"trace": f"{folder}/trace.json"}, "'trace.json'") for folder in ("no_such_folder", "/proc", "/dev/null")),
        ({"signposts": True, "device": "cpu"}, "no signposts of cpu"),
        ({"metal_capture": "step", "device": "cpu"}, "no Metal captures of cpu"),
        *(({"metal_capture": name}, "Metal capture") for name in (3, "", ".gputrace", "folder/step", "step/", ".")),
    ],
)
def test_bad_arguments_are_refused(asked, says):
    with pytest.raises(ConfigurationError, match=says):
        nb.runbook.profile(**asked)


@pytest.mark.parametrize("asked", [{"signposts": True}, {"metal_capture": "step"}])
def test_simulated_mac_has_no_signposts(asked):
    """What only a real Mac writes is refused on a simulated one, with the reason, before the step is run."""
    called = []

    with nb.simulated_mps(), pytest.raises(ConfigurationError, match="of a simulated MPS device"):
        nb.runbook.profile(called.append, [torch.ones(1)], **asked)

    assert called == []


def test_other_profiler_is_refused():
    """While a profiler of torch is on, nothing runs; it is left as it is."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as other:
        with pytest.raises(ConfigurationError, match="Another profiler of torch is on"):
            profiled(wide(), torch.ones(2, 512), device="cpu")
        torch.ones(3).sum()

    assert "aten::sum" in {event.name for event in other.events()}


def test_errors_of_a_step():
    """An error of a step passes through, and no profiler stays on; a lack of memory says what to do, without anyone's text."""

    def failing(error):
        def step(_batch):
            raise error

        return step

    with pytest.raises(ZeroDivisionError):
        profiled(failing(ZeroDivisionError()), [torch.ones(3)], device="cpu")
    assert not torch.autograd._profiler_enabled()
    with pytest.raises(DeviceUnavailableError, match="MemoryError") as raised:
        profiled(failing(MemoryError(NOTE)), [torch.ones(4)], device="cpu")
    assert "diabetes" not in str(raised.value)


def test_only_the_profiler_is_silent(capfd):
    """The notes of torch's profiler are left out of standard error; what others write there comes through."""
    with suppress_kineto_output():
        os.write(2, b"first\nUSDT:2026-11-21 profiler_start\nsecond\n")
    profiled(nn.Linear(8, 8), torch.ones(4, 8), device="cpu", steps=1)
    os.write(2, b"third\n")

    assert capfd.readouterr().err == "first\nsecond\nthird\n"


def test_ranges_of_the_person_are_not_shown():
    """What a person calls a range may be anything, and is not told; operators are."""

    def step(batch):
        with torch.profiler.record_function(f"note::{NOTE}"):
            return batch + 1

    profile = profiled(step, [torch.ones(4)], device="cpu")

    assert "diabetes" not in json.dumps(profile.to_dict())
    assert {"aten::add", "a range of yours"} <= {one.operator for one in profile.operators}
