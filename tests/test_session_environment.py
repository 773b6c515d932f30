"""What a session does to the environment: in time, told truly, published for the openmed package, and taken back."""

import pytest

from openmed_nb.devices.environment import (
    ACTIVE,
    FALLBACK_VARIABLE,
    HIGH_WATERMARK_VARIABLE,
    LOW_WATERMARK_VARIABLE,
    TOO_LATE,
    VARIABLES,
)
from openmed_nb.errors import ConfigurationError, DeviceUnavailableError
from openmed_nb.session import Session

MPS_VARIABLES = {FALLBACK_VARIABLE: "1", HIGH_WATERMARK_VARIABLE: "1.0", LOW_WATERMARK_VARIABLE: "0.9"}
TORCH_DEVICE = "OPENMED_TORCH_DEVICE"


def test_start_sets_the_variables_before_torch_is_loaded(computers):
    """Starting on a Mac sets the three variables without importing torch, and torch then reads them."""
    here = computers.mac()
    here.session.start()
    assert here.environ == MPS_VARIABLES
    assert not here.torch.is_torch_imported()

    assert here.session.device().device == "mps"
    assert here.torch.read == MPS_VARIABLES
    assert here.effects == (ACTIVE,) * 3


@pytest.mark.parametrize(
    ("kind", "environ"),
    [
        ("plain", {}),
        ("box", {}),
        ("mac", {"OPENMED_DEVICE": "cpu"}),
        ("mac", {"OPENMED_TORCH_DEVICE": "nonsense"}),
        ("mac", {"ACCELERATE_USE_CPU": "1"}),
        ("rosetta", {}),
    ],
)
def test_start_elsewhere_changes_nothing(computers, kind, environ):
    """Starting where mps is not planned says nothing, sets nothing and loads nothing."""
    here = getattr(computers, kind)(**environ)
    here.session.start()

    assert here.environ == environ
    assert not here.torch.is_torch_imported()


def test_unusable_mps_in_auto(computers):
    """An MPS that fails its probe is ruled out with the reason, the CPU is taken, and the environment is as before."""
    here = computers.mac(failing="MPS backend out of memory", HOME="/Users/me")
    here.session.start()
    choice = here.session.device()

    assert (choice.device, choice.confirmed) == ("cpu", True)
    assert "MPS backend out of memory" in choice.rejected[0].reason
    assert here.environ == {"HOME": "/Users/me"}


def test_refused_watermarks_name_the_variables(computers):
    """Watermarks that torch refuses are told as such, with the remedy for them and not for a broken driver."""
    here = computers.mac(
        failing="invalid low watermark ratio 1.4",
        PYTORCH_MPS_HIGH_WATERMARK_RATIO="0.7",
        PYTORCH_MPS_LOW_WATERMARK_RATIO="1.4",
    )
    with pytest.raises(DeviceUnavailableError) as caught:
        here.session.use("mps")

    assert caught.value.remedy.startswith(f"Unset {HIGH_WATERMARK_VARIABLE} and {LOW_WATERMARK_VARIABLE}")


def test_leaving_mps_and_coming_back(computers):
    """Leaving mps takes the variables back; coming back sets them again, and they are in force as torch read them."""
    here = computers.mac()
    here.session.device()
    here.session.use("cpu")
    assert here.environ == {TORCH_DEVICE: "cpu"}

    here.session.use("mps")
    assert here.environ == {TORCH_DEVICE: "mps", **MPS_VARIABLES}
    assert here.effects == (ACTIVE,) * 3


def test_watermarks_changed_after_a_call_on_mps(computers):
    """A probe for a single call reads the watermarks for good: what is typed after it is too late."""
    here = computers.mac(OPENMED_DEVICE="cpu")
    here.session.device("mps")
    here.environ[HIGH_WATERMARK_VARIABLE] = "0.5"

    assert here.effects == (ACTIVE, TOO_LATE, TOO_LATE)


def test_override_is_published_and_taken_back(computers):
    """An override stands where the openmed package looks, and a reset gives the shell's value back."""
    here = computers.box(OPENMED_TORCH_DEVICE="cuda:1", OPENMED_DEVICE="cpu")
    assert here.session.use("gpu").device == "cuda"
    assert here.environ[TORCH_DEVICE] == "cuda"

    choice = here.session.reset()
    assert (choice.device, choice.requested_by) == ("cuda:1", TORCH_DEVICE)
    assert here.environ == {TORCH_DEVICE: "cuda:1", "OPENMED_DEVICE": "cpu"}


def test_variable_that_the_person_changes_under_an_override(computers):
    """A variable changed under an override does not beat it, and decides after the reset."""
    here = computers.box(OPENMED_TORCH_DEVICE="cuda:1")
    here.session.use("cuda:0")
    here.environ[TORCH_DEVICE] = "cpu"
    assert here.session.device().device == "cuda:0"

    assert here.session.reset().device == "cpu"
    assert here.environ == {TORCH_DEVICE: "cpu"}


@pytest.mark.parametrize(
    "shell",
    [{}, {TORCH_DEVICE: "cpu"}, {HIGH_WATERMARK_VARIABLE: "0.7"}, {FALLBACK_VARIABLE: "0", "OPENMED_DEVICE": "gpu"}],
)
def test_stop_leaves_no_trace(computers, shell):
    """Stopping gives the environment back as the person had it, and can be repeated."""
    here = computers.mac(**shell)
    for _ in range(2):
        here.session.start()
        here.session.use("mps")
        here.session.use("auto")
        here.session.stop()
        here.session.stop()

        assert here.environ == shell
        assert here.session.override is None


def test_tuning_by_hand_stays(computers):
    """Variables that are set by hand for any device stay until the session stops."""
    here = computers.plain()
    assert here.session.apply_mps_variables().items() >= MPS_VARIABLES.items()
    here.session.device()
    here.session.use("cpu")
    assert here.environ.items() >= MPS_VARIABLES.items()

    here.session.stop()
    assert here.environ == {}


@pytest.mark.real_computer
def test_tuning_by_hand_outlives_a_simulation():
    """What was set by hand on another device is there again after a simulated Mac, and after one that was refused."""
    environ: dict[str, str] = {"OPENMED_TORCH_DEVICE": "cpu"}
    session = Session(environ)
    session.apply_mps_variables()
    tuned = dict(environ)
    assert set(VARIABLES) <= set(tuned)

    with pytest.raises(ConfigurationError):
        session.simulate("nothing")
    assert environ == tuned
    session.simulate("8 GiB")
    session.end_simulation()
    assert environ == tuned
    session.stop()
    assert environ == {"OPENMED_TORCH_DEVICE": "cpu"}


@pytest.mark.real_computer
def test_limits_of_memory_that_are_in_force():
    """A limit that was set counts before the watermark of the environment; only MPS has a lower one."""
    session = Session({"OPENMED_TORCH_DEVICE": "cpu"})
    session.simulate("8 GiB")
    watermarks = session.device_manager.memory_fraction("mps"), session.device_manager.low_watermark("mps")
    session.device_manager.limit_memory("mps", 0.5)
    limits = [session.device_manager.memory_fraction(name) for name in ("mps", "mps:0", "cpu")]
    low = session.device_manager.low_watermark("cpu")
    session.end_simulation()

    assert watermarks == (1.0, 0.9)
    assert (limits, low) == ([0.5, 0.5, None], None)
