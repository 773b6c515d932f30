"""Operations of the session on simulated machines, and that failed operations change nothing."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import openmed_nb as nb
from helpers import simulated_computers as computers
from helpers.listeners import RecordingListener
from openmed_nb._annotate import annotate_in_session
from openmed_nb.annotation.loading import create_pipeline
from openmed_nb.devices.backend import inspect_imported_torch
from openmed_nb.devices.environment import (
    ACTIVE,
    FALLBACK_VARIABLE,
    HIGH_WATERMARK_VARIABLE,
    LOW_WATERMARK_VARIABLE,
    PENDING,
    TOO_LATE,
)
from openmed_nb.errors import (
    ConfigurationError,
    DeviceUnavailableError,
    OpenMedError,
    TorchImportError,
    UnknownDeviceError,
    UnknownModelError,
)
from openmed_nb.models.config import OpenMedConfig
from openmed_nb.session import Session

TORCH_DEVICE = "OPENMED_TORCH_DEVICE"


def test_device_check_runs_once():
    here = computers.box()
    for spelling in (None, "cuda", "cuda:0", "gpu", "auto"):
        assert here.session.device(spelling).confirmed

    assert here.torch.probed == ["cuda"]


@pytest.mark.parametrize("name", ["plain", "box", "mac", "rosetta"])
@pytest.mark.parametrize("environ", [{}, {"OPENMED_DEVICE": "cpu"}])
def test_torch_import_of_another_thread_keeps_device(name, environ):
    """The device that was planned or confirmed before is confirmed afterwards."""
    here = getattr(computers, name)(**environ)
    before = here.session.device()
    here.torch.inspect_imported_torch()
    after = here.session.device()

    assert (after.device, after.requested_by) == (before.device, before.requested_by)
    assert after.confirmed


def test_torch_import_error_of_another_thread_is_raised_once():
    """The next use tries again, because the user may have repaired the installation."""

    def fail():
        raise TorchImportError("torch cannot be imported.", "Reinstall it.")

    here = computers.plain()
    here.session.device_manager.on_torch_use = fail
    with pytest.raises(TorchImportError):
        here.session.device_manager.load_torch()
    assert not here.torch.is_torch_imported()
    here.session.device_manager.load_torch()
    assert here.torch.is_torch_imported()


def test_device_argument_applies_to_one_call():
    here = computers.box()
    before = here.session.device()
    assert here.session.device("cuda:1").device == "cuda:1"

    assert here.session.device() == before
    assert here.environ == {}


FAILURES: dict[str, tuple[type[OpenMedError], Callable[[Session], object]]] = {
    "unknown spelling": (UnknownDeviceError, lambda session: session.use("mpss")),
    "no CUDA": (DeviceUnavailableError, lambda session: session.use("cuda")),
    "unusable mps": (DeviceUnavailableError, lambda session: session.use("mps")),
    "unusable configuration": (
        DeviceUnavailableError,
        lambda session: session.load_model(None, OpenMedConfig(device="mps")),
    ),
    "unknown model": (
        UnknownModelError,
        lambda session: create_pipeline(session, "./nowhere", OpenMedConfig(device="cpu")),
    ),
    "unknown option": (ConfigurationError, lambda session: session.load_model(None, OpenMedConfig(), color="red")),
    "unknown strategy": (
        ConfigurationError,
        lambda session: create_pipeline(session, None, OpenMedConfig(device="cpu"), aggregation_strategy="best"),
    ),
    "no text": (ConfigurationError, lambda session: annotate_in_session(session, 7, {}, {"device": "cpu"})),
}


@pytest.mark.parametrize(("kind", "fail"), FAILURES.values(), ids=FAILURES)
@pytest.mark.parametrize("override", [None, "cpu", "auto"])
def test_failed_operation_changes_nothing_and_notifies_once(kind, fail, override):
    here = computers.mac(failing="MPS backend out of memory", OPENMED_DEVICE="auto")
    if override:
        here.session.use(override)
    choice, before = here.session.device(), here.state
    listener = RecordingListener(here.session)
    with pytest.raises(kind):
        fail(here.session)
    listener.remove()

    assert listener.events[-1:] == [None]
    assert listener.events.count(None) == 1
    assert here.state == before
    assert here.session.device() == replace(choice, confirmed=here.torch.is_torch_imported())


def test_failed_reset_preserves_override():
    here = computers.plain(OPENMED_DEVICE="nonsense")
    here.session.use("cpu")
    before = here.state
    listener = RecordingListener(here.session)
    with pytest.raises(UnknownDeviceError, match="from OPENMED_DEVICE"):
        here.session.reset()

    assert listener.events == [None]
    assert here.state == before
    assert here.session.device().requested_by == "use()"


@pytest.mark.parametrize("failure", [KeyboardInterrupt, MemoryError])
def test_interrupted_torch_import_changes_nothing(failure):
    here = computers.mac()

    def interrupt():
        raise failure

    here.torch.loading = interrupt
    with pytest.raises(failure):
        here.session.use("mps")
    assert here.environ == {}

    here.torch.loading = lambda: None
    assert here.session.use("mps").device == "mps"
    assert here.effects == (ACTIVE,) * 3


@pytest.mark.parametrize("ask", [nb.device, nb.use, nb.compat.resolve_torch_device])
def test_device_accepts_names_and_objects(ask):
    for value in ("cpu", torch.device("cpu"), torch.zeros(1)):
        found = ask(value)
        assert getattr(found, "device", found) == "cpu"


def test_unknown_device_names_source():
    session = computers.plain().session
    asked = {
        "argument": lambda: create_pipeline(session, None, OpenMedConfig(), device="mpss"),
        "OpenMedConfig": lambda: create_pipeline(session, None, OpenMedConfig(device="mpss")),
        "%openmed_device": lambda: session.use("mpss", "%openmed_device"),
    }

    for source, ask in asked.items():
        with pytest.raises(UnknownDeviceError, match=f"from {source}"):
            ask()


@pytest.mark.parametrize(
    ("kind", "environ", "names", "in_force"),
    [
        ("mac", {"failing": "no"}, ["mps", "cuda", "cpu"], "cpu"),
        ("box", {"OPENMED_DEVICE": "cuda:1"}, ["mps", "cuda:0", "cuda:1", "cpu"], "cuda:1"),
        ("plain", {"OPENMED_DEVICE": "nonsense"}, ["mps", "cuda", "cpu"], None),
    ],
    ids=["unusable Mac", "second GPU", "bad variable"],
)
def test_list_devices(kind, environ, names, in_force):
    listed = getattr(computers, kind)(**environ).session.list_devices()

    assert [status.device for status in listed.devices] == names
    assert listed.to_dict()["active_device"] == in_force


def test_list_devices_shows_failed_gpu():
    here = computers.Computer(computers.BOX, computers.BOX_TORCH, {}, cuda="CUDA error: out of memory")

    assert {status.device: status.usable for status in here.session.list_devices().devices} == {
        "mps": False,
        "cuda:0": False,
        "cuda:1": None,
        "cpu": True,
    }


def test_explanation_contains_error():
    here = computers.plain(OPENMED_DEVICE="mps")
    explained = here.session.explain()

    assert explained.to_dict()["choice"]["error"] == "DeviceUnavailableError"
    assert "Use 'auto'" in str(explained)
    assert [row[0] for row in explained.to_report().tables[0].rows if row[2] == "used"] == ["OPENMED_DEVICE"]


def test_explanation_names_a_nightly_build():
    facts = replace(computers.MAC_TORCH, version="2.16.0.dev20261101")
    nightly = computers.Computer(computers.MAC, facts, {}).session.explain()

    assert "torch is 2.16.0.dev20261101, a nightly build." in str(nightly)
    assert "nightly" not in str(computers.mac().session.explain())


def test_explanation_shows_user_variables():
    here = computers.mac(OPENMED_TORCH_DEVICE="gpu")
    here.session.use("mps")
    explained = here.session.explain().to_dict()

    assert explained["variables"] == {TORCH_DEVICE: "gpu"}
    assert [link["display_value"] for link in explained["resolution_order"]] == ["(not set)", "mps", "gpu", "(not set)"]
    assert [setting["source"] for setting in explained["environment"]["settings"]] == ["set"] * 3


ENVIRONMENTS = st.fixed_dictionaries(
    {},
    optional={
        TORCH_DEVICE: st.sampled_from(["", "cpu", "mps", "cuda:1", "nonsense"]),
        FALLBACK_VARIABLE: st.sampled_from(["0", "1"]),
        HIGH_WATERMARK_VARIABLE: st.sampled_from(["0.0", "0.7", "2.5"]),
        LOW_WATERMARK_VARIABLE: st.sampled_from(["0.5", "1.2"]),
        "ACCELERATE_USE_CPU": st.just("1"),
    },
)
KINDS = st.sampled_from([("mac", {}), ("mac", {"failing": "no"}), ("box", {}), ("plain", {})])


@given(
    kind=KINDS, environ=ENVIRONMENTS, operations=st.lists(st.sampled_from(sorted(computers.OPERATIONS)), max_size=10)
)
def test_any_sequence_of_operations(kind, environ, operations):
    name, failing = kind
    here = getattr(computers, name)(**failing, **environ)
    for operation in operations:
        before = here.state
        try:
            computers.OPERATIONS[operation](here)
        except OpenMedError:
            assert here.state == before
        for setting in here.session.device_manager.mps_environment("mps").settings:
            assert setting.effect != PENDING or setting.name not in here.torch.read
            assert setting.effect != ACTIVE or here.torch.read.get(setting.name, setting.value) == setting.value
            assert setting.effect != TOO_LATE or here.torch.read[setting.name] != setting.value
    here.session.stop()

    assert here.environ == environ


def test_model_that_cannot_move_changes_nothing():
    if inspect_imported_torch().mps_available:
        pytest.skip("this computer has MPS, so the move would work")
    here = computers.mac(OPENMED_DEVICE="cpu")
    loaded = here.session.load_model("bundled_small", OpenMedConfig())
    here.session.use("cpu")
    loaded.model.classifier.double()
    before = here.state
    listener = RecordingListener(here.session)
    here.session.subscribe(lambda _event: listener.events.append(loaded.model.device.type))
    with pytest.raises(DeviceUnavailableError, match="could not be moved to mps"):
        here.session.use("mps")

    assert listener.events == ["Moving to mps: bundled_small", "cpu", None, "cpu"]
    assert here.state == before
    assert loaded.model.classifier.weight.dtype == torch.float64  # MPS would have float32.
    assert here.session.device().device == "cpu"
