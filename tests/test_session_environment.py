"""Environment variables of a session: set in time, reported correctly, exported and restored."""

import pytest

from helpers import simulated_computers as computers
from openmed_nb.devices.environment import (
    ACTIVE,
    FALLBACK_VARIABLE,
    HIGH_WATERMARK_VARIABLE,
    LOW_WATERMARK_VARIABLE,
    TOO_LATE,
    VARIABLES,
)
from openmed_nb.errors import ConfigurationError
from openmed_nb.session import Session

MPS_VARIABLES = {FALLBACK_VARIABLE: "1", HIGH_WATERMARK_VARIABLE: "1.0", LOW_WATERMARK_VARIABLE: "0.9"}
TORCH_DEVICE = "OPENMED_TORCH_DEVICE"


def test_start_sets_variables_before_torch_import():
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
        ("box", {}),
        ("mac", {"OPENMED_TORCH_DEVICE": "nonsense"}),
        ("mac", {"ACCELERATE_USE_CPU": "1"}),
        ("rosetta", {}),
    ],
)
def test_start_without_mps_changes_nothing(kind, environ):
    here = getattr(computers, kind)(**environ)
    here.session.start()

    assert here.environ == environ
    assert not here.torch.is_torch_imported()


def test_auto_skips_failing_mps():
    here = computers.mac(failing="MPS backend out of memory", HOME="/Users/me")
    here.session.start()
    choice = here.session.device()

    assert (choice.device, choice.confirmed) == ("cpu", True)
    assert "MPS backend out of memory" in choice.rejected[0].reason
    assert here.environ == {"HOME": "/Users/me"}


def test_variables_follow_active_device():
    here = computers.mac()
    here.session.device()
    here.session.use("cpu")
    assert here.environ == {TORCH_DEVICE: "cpu"}

    here.session.use("mps")
    assert here.environ == {TORCH_DEVICE: "mps", **MPS_VARIABLES}
    assert here.effects == (ACTIVE,) * 3


def test_watermarks_are_too_late_after_probe():
    here = computers.mac(OPENMED_DEVICE="cpu")
    here.session.device("mps")
    here.environ[HIGH_WATERMARK_VARIABLE] = "0.5"

    assert here.effects == (ACTIVE, TOO_LATE, TOO_LATE)


def test_override_is_exported_and_restored():
    here = computers.box(OPENMED_TORCH_DEVICE="cuda:1", OPENMED_DEVICE="cpu")
    assert here.session.use("gpu").device == "cuda"
    assert here.environ[TORCH_DEVICE] == "cuda"

    choice = here.session.reset()
    assert (choice.device, choice.requested_by) == ("cuda:1", TORCH_DEVICE)
    assert here.environ == {TORCH_DEVICE: "cuda:1", "OPENMED_DEVICE": "cpu"}


def test_user_variable_decides_after_reset():
    here = computers.box(OPENMED_TORCH_DEVICE="cuda:1")
    here.session.use("cuda:0")
    here.environ[TORCH_DEVICE] = "cpu"
    assert here.session.device().device == "cuda:0"

    assert here.session.reset().device == "cpu"
    assert here.environ == {TORCH_DEVICE: "cpu"}


@pytest.mark.parametrize(
    "environ",
    [{}, {TORCH_DEVICE: "cpu"}, {HIGH_WATERMARK_VARIABLE: "0.7"}, {FALLBACK_VARIABLE: "0", "OPENMED_DEVICE": "gpu"}],
)
def test_stop_restores_environment(environ):
    here = computers.mac(**environ)
    for _ in range(2):
        here.session.start()
        here.session.use("mps")
        here.session.use("auto")
        here.session.stop()
        here.session.stop()

        assert here.environ == environ
        assert here.session.override is None


def test_manual_variables_remain_until_stop():
    here = computers.plain()
    assert here.session.apply_mps_variables().items() >= MPS_VARIABLES.items()
    here.session.device()
    here.session.use("cpu")
    assert here.environ.items() >= MPS_VARIABLES.items()

    here.session.stop()
    assert here.environ == {}


@pytest.mark.real_computer
def test_manual_variables_survive_simulation():
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
def test_memory_fraction_prefers_limit_over_watermark():
    session = Session({"OPENMED_TORCH_DEVICE": "cpu"})
    session.simulate("8 GiB")
    watermark = session.device_manager.memory_fraction("mps")
    session.device_manager.limit_memory("mps", 0.5)
    limits = [session.device_manager.memory_fraction(name) for name in ("mps", "mps:0", "cpu")]
    session.end_simulation()

    assert watermark == 1.0
    assert limits == [0.5, 0.5, None]
