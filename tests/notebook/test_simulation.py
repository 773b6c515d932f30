"""Simulation of MPS with the function and the magic, and the state of the session afterwards."""

import json
import os

import pytest
import torch

import openmed_nb as nb
from helpers.session_state import read_state
from helpers.threads import run_in_thread
from openmed_nb.devices.environment import (
    ACTIVE,
    FALLBACK_VARIABLE,
    HIGH_WATERMARK_VARIABLE,
    VARIABLES,
)
from openmed_nb.devices.machine import is_mps_simulated
from openmed_nb.errors import DeviceUnavailableError, OpenMedError
from openmed_nb.session import SESSION, Session

pytestmark = [pytest.mark.real_computer, pytest.mark.usefixtures("clean")]  # Each test starts its own simulation.

NOTE = "He has asthma."


@pytest.fixture
def pipe():
    """A pipeline whose model moves with the device of the session."""
    return nb.load_pipeline("bundled_small")


def test_simulated_device_is_selected_and_labeled():
    """In the ``with`` block the device is mps, and its text, its HTML and its JSON form contain SIMULATED or ``true``."""
    with nb.simulated_mps(memory="8 GiB"):
        choice = nb.device()
        assert choice.device == "mps"
        assert choice.confirmed
        assert choice.simulated is choice.to_dict()["simulated"] is True
        for shown in (str(choice), choice._repr_html_(), str(SESSION.explain()), str(SESSION.list_devices())):
            assert "SIMULATED" in shown
        assert json.loads(json.dumps(choice.to_dict()))["device"] == "mps"
    assert nb.device().simulated is False
    assert "SIMULATED" not in str(nb.device())


def test_simulation_restores_the_session(pipe):
    """Device, environment, machine and models are restored afterwards, even after an error."""
    before = read_state()
    for error in (None, ValueError, KeyboardInterrupt):
        try:
            with nb.simulated_mps(fallback=True):
                assert os.environ[FALLBACK_VARIABLE] == "1"
                if error:
                    raise error
        except (ValueError, KeyboardInterrupt):
            pass
        assert read_state() == before
        assert pipe.device.type == "cpu"
    assert not is_mps_simulated()


def test_models_move_to_simulated_device(pipe):
    """A model that follows the session moves to the simulated device and back, and its pipeline continues to work."""
    cpu_entities = pipe(NOTE)
    with nb.simulated_mps() as mps:
        assert str(pipe.device) == "mps:0"
        assert [entity["word"] for entity in pipe(NOTE)] == [entity["word"] for entity in cpu_entities]
        assert mps.allocator.allocated >= sum(weight.nbytes for weight in pipe.model.parameters())
        assert nb.use("cpu").moved_models == ("bundled_small",)
        assert nb.use("mps").moved_models == ("bundled_small",)
    assert {weight.device.type for weight in pipe.model.parameters()} == {"cpu"}
    assert pipe(NOTE) == cpu_entities


def test_models_move_to_cpu_after_simulation():
    """A model that was loaded for mps by name moves to the CPU afterwards, continues to work, and is not reused."""
    with nb.simulated_mps():
        simulated_pipe = nb.load_pipeline("bundled_small", device="mps")
        assert simulated_pipe.device.type == "mps"
    assert simulated_pipe.device.type == "cpu"
    assert simulated_pipe(NOTE)[0]["word"] == "asthma"
    with nb.simulated_mps():
        new_pipe = nb.load_pipeline("bundled_small", device="mps")
        assert new_pipe.model is not simulated_pipe.model
        assert new_pipe.device.type == "mps"


def test_simulation_restores_the_override():
    """The device that was selected for the session is restored, and also in the environment variable for openmed."""
    nb.use("cpu")
    with nb.simulated_mps():
        assert nb.device().device == "mps"
        assert os.environ["OPENMED_TORCH_DEVICE"] == "mps"
        assert nb.reset().requested_by != "simulated_mps()"
    assert nb.device().requested_by == "use()"
    assert os.environ["OPENMED_TORCH_DEVICE"] == "cpu"


def test_simulation_rejects_models_that_do_not_fit(pipe):
    """A simulated Mac with too little memory for the models of the session is rejected, and all state is unchanged."""
    before = read_state()
    for memory in ("1 MiB", 1 << 20):
        with pytest.raises(DeviceUnavailableError), nb.simulated_mps(memory):
            pass
        assert read_state() == before
        assert pipe.device.type == "cpu"
        assert not is_mps_simulated()


def test_nested_simulation_is_rejected():
    """A nested simulation is rejected, and the outer one continues."""
    with nb.simulated_mps():
        with pytest.raises(DeviceUnavailableError), nb.simulated_mps():
            pass
        assert nb.device().simulated
        assert torch.ones(2, device="mps").is_mps
    assert not nb.device().simulated


def test_other_thread_cannot_end_a_simulation():
    """Only the thread that started a simulation can end it."""
    caught = []

    def end():
        try:
            SESSION.end_simulation()
        except OpenMedError as error:
            caught.append(error)

    with nb.simulated_mps():
        run_in_thread(end)
        assert nb.device().simulated
    assert "thread" in str(caught[0])


@pytest.mark.parametrize(("fallback", "expected_value"), [(True, "1"), (False, "0"), (None, "1")])
@pytest.mark.filterwarnings("ignore:The operator")
def test_simulation_respects_fallback_setting(fallback, expected_value):
    """The argument determines the value of the variable and the behavior. By default, fallback is enabled."""
    with nb.simulated_mps(fallback=fallback) as mps:
        setting = {setting.name: setting for setting in SESSION.device_manager.mps_environment("mps").settings}[
            FALLBACK_VARIABLE
        ]
        assert (setting.value, setting.effect) == (expected_value, ACTIVE)
        if expected_value == "1":
            torch.mode(torch.ones(2, device="mps"))
            assert mps.fallbacks == {"aten::mode": 1}
        else:
            with pytest.raises(NotImplementedError, match="aten::mode"):
                torch.mode(torch.ones(2, device="mps"))


@pytest.mark.parametrize(("high", "expected_fraction"), [(None, 1.0), ("0.7", 0.7), ("0", None), ("2.0", 2.0)])
def test_simulation_respects_user_watermarks(high, expected_fraction):
    """The watermarks of the user, or those of the package, limit a simulated device like a real device."""
    environ = {HIGH_WATERMARK_VARIABLE: high} if high else {}
    before = dict(environ)
    session = Session(environ)
    device = session.simulate("8 GiB")
    try:
        torch.ones(2, device="mps")
        assert {setting.effect for setting in session.device_manager.mps_environment("mps").settings} == {ACTIVE}
        assert device.allocator.limit == (
            expected_fraction and int(expected_fraction * device.allocator.memory.recommended)
        )
    finally:
        session.end_simulation()
    assert environ == before


def test_simulation_persists_until_disabled(shell):
    """The session uses the simulated Mac in all cells until the simulation is disabled."""
    magic = shell.find_line_magic("openmed_device")
    assert "SIMULATED" in str(magic('--simulate mps --memory "16 GiB"'))
    assert shell.run_cell("import torch\ntensor = torch.ones(2, device='mps')").success
    assert shell.user_ns["tensor"].is_mps
    assert torch.mps.recommended_max_memory() == 2**34 * 2 // 3
    assert magic("").requested_by == "%openmed_device"
    assert magic("cpu").simulated
    assert not magic("--simulate off").simulated
    assert shell.user_ns["tensor"].device.type == "cpu"
    assert not set(VARIABLES) & set(os.environ)


def test_simulation_persists_across_kernel_cells(kernel):
    """In a real kernel, a simulation persists across cells and ends with the extension."""
    assert "SIMULATED" in kernel.run("%openmed_device --simulate mps --memory '8 GiB'").text
    assert kernel.run("import torch; x = torch.ones(3, device='mps'); x").text == "tensor([1., 1., 1.], device='mps:0')"
    assert "device='mps" not in kernel.run("%unload_ext openmed_nb\nx").text
    assert kernel.run("%load_ext openmed_nb").status == "ok"
