"""The verbs of the session, on simulated computers: what they answer, and that a failing one changes nothing."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import openmed_nb as nb
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
    UnknownDeviceError,
    UnknownModelError,
)
from openmed_nb.models.config import OpenMedConfig
from openmed_nb.session import Session

TORCH_DEVICE = "OPENMED_TORCH_DEVICE"


def test_probe_runs_once(computers):
    """A GPU proves itself once, however often the device is asked for and by whichever spelling."""
    here = computers.box()
    for spelling in (None, "cuda", "cuda:0", "gpu", "auto"):
        assert here.session.device(spelling).confirmed

    assert here.torch.probed == ["cuda"]


def test_cpu_is_planned_until_torch_is_loaded(computers):
    """The CPU needs no torch to be chosen, and is confirmed once someone has loaded it."""
    here = computers.plain()
    assert not here.session.device().confirmed
    assert not here.torch.is_torch_imported()

    here.torch.inspect_imported_torch()
    assert here.session.device().confirmed


def test_argument_is_for_one_call(computers):
    """A device that is asked for by argument is answered and changes nothing for the session."""
    here = computers.box()
    before = here.session.device()
    assert here.session.device("cuda:1").device == "cuda:1"

    assert here.session.device() == before
    assert here.environ == {}


FAILURES: dict[str, tuple[type[OpenMedError], Callable[[Session], object]]] = {
    "unknown spelling": (UnknownDeviceError, lambda session: session.use("mpss")),
    "unknown argument": (UnknownDeviceError, lambda session: session.device("mpss")),
    "no CUDA": (DeviceUnavailableError, lambda session: session.use("cuda")),
    "no CUDA for a call": (DeviceUnavailableError, lambda session: session.device("cuda:1")),
    "unusable mps": (DeviceUnavailableError, lambda session: session.use("mps")),
    "unusable mps for a call": (DeviceUnavailableError, lambda session: session.device("mps")),
    "unusable gpu": (DeviceUnavailableError, lambda session: session.use(" GPU ")),
    "bad configuration": (
        UnknownDeviceError,
        lambda session: create_pipeline(session, None, OpenMedConfig(device="mpss")),
    ),
    "unusable configuration": (
        DeviceUnavailableError,
        lambda session: session.load_model(None, OpenMedConfig(device="mps")),
    ),
    "unknown model": (
        UnknownModelError,
        lambda session: create_pipeline(session, "./nowhere", OpenMedConfig(device="cpu")),
    ),
    "unknown option": (ConfigurationError, lambda session: session.load_model(None, OpenMedConfig(), color="red")),
}


@pytest.mark.parametrize(("kind", "fail"), FAILURES.values(), ids=FAILURES)
@pytest.mark.parametrize("override", [None, "cpu", "auto"])
def test_failing_verb_changes_nothing(computers, kind, fail, override):
    """A verb that fails leaves the override, the device, the environment and the models as they were."""
    here = computers.mac(failing="MPS backend out of memory", OPENMED_DEVICE="auto")
    if override:
        here.session.use(override)
    choice, before = here.session.device(), here.state
    with pytest.raises(kind):
        fail(here.session)

    assert here.state == before
    assert here.session.device() == replace(choice, confirmed=here.torch.is_torch_imported())


def test_failing_first_verb_changes_nothing(computers):
    """A model that is not found leaves a fresh session as it was, though the device was settled on the way."""
    here = computers.mac()
    before = here.state
    with pytest.raises(UnknownModelError):
        create_pipeline(here.session, "./nowhere", OpenMedConfig())

    assert here.state == before
    assert here.session.device().device == "mps"
    assert here.effects == (ACTIVE,) * 3


def test_failing_reset_keeps_the_override(computers):
    """A reset to a bad variable fails, and the override stays published and in force."""
    here = computers.plain(OPENMED_DEVICE="nonsense")
    here.session.use("cpu")
    before = here.state
    with pytest.raises(UnknownDeviceError, match="from OPENMED_DEVICE"):
        here.session.reset()

    assert here.state == before
    assert here.session.device().requested_by == "use()"


@pytest.mark.parametrize("failure", [KeyboardInterrupt, MemoryError])
def test_interrupted_import_of_torch(computers, failure):
    """An import of torch that is interrupted leaves the environment as it was, and the next try works."""
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
def test_a_device_is_named_or_has_a_name(ask):
    """A device is asked for by its name or by what has one; what has none is refused, whichever function is asked."""
    for thing in ("cpu", torch.device("cpu"), torch.zeros(1)):
        found = ask(thing)
        assert getattr(found, "device", found) == "cpu"
    for thing in (0.5, True, [None], object(), ("x",)):
        with pytest.raises(ConfigurationError, match=f"{type(thing).__name__} objects have no 'device' attribute"):
            ask(thing)


@pytest.mark.parametrize("ask", [nb.device, nb.use])
def test_who_asks_is_a_text(ask):
    """A source that is not a text is refused: it would stand in the reason of the choice."""
    for source in (None, 5):
        with pytest.raises(ConfigurationError, match=f"Invalid value for source: {source}. Pass a string"):
            ask("cpu", source)


def test_bad_spelling_names_its_source(computers):
    """The error of a bad spelling names who wrote it: an argument, a configuration, or a magic."""
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
        ("mac", {}, ["mps", "cuda", "cpu"], "mps"),
        ("mac", {"failing": "no"}, ["mps", "cuda", "cpu"], "cpu"),
        ("box", {}, ["mps", "cuda:0", "cuda:1", "cpu"], "cuda"),
        ("box", {"OPENMED_DEVICE": "cuda:1"}, ["mps", "cuda:0", "cuda:1", "cpu"], "cuda:1"),
        ("plain", {}, ["mps", "cuda", "cpu"], "cpu"),
        ("plain", {"OPENMED_DEVICE": "nonsense"}, ["mps", "cuda", "cpu"], None),
        ("plain", {"OPENMED_DEVICE": "mps"}, ["mps", "cuda", "cpu"], None),
    ],
    ids=["Mac", "unusable Mac", "CUDA", "second GPU", "no GPU", "bad variable", "variable that cannot be had"],
)
def test_list_of_devices(computers, kind, environ, names, in_force):
    """Every device is listed, also where the wish itself is in error, and the one in force is named."""
    listed = getattr(computers, kind)(**environ).session.list_devices()

    assert [one.device for one in listed.devices] == names
    assert listed.to_dict()["active_device"] == in_force


def test_failed_gpu_is_listed_as_failed(computers):
    """A GPU that failed its probe under one spelling is listed as failed under the other."""
    here = computers.Computer(computers.BOX, computers.BOX_TORCH, {}, cuda="CUDA error: out of memory")

    assert {one.device: one.usable for one in here.session.list_devices().devices} == {
        "mps": False,
        "cuda:0": False,
        "cuda:1": None,
        "cpu": True,
    }


def test_explanation_of_a_wish_that_cannot_be_fulfilled(computers):
    """Where the wish is in error, the explanation shows the error with its remedy, and who asked."""
    here = computers.plain(OPENMED_DEVICE="mps")
    explained = here.session.explain()

    assert explained.to_dict()["choice"]["error"] == "DeviceUnavailableError"
    assert "Use 'auto'" in str(explained)
    assert [row[0] for row in explained.to_report().tables[0].rows if row[2] == "decides"] == ["OPENMED_DEVICE"]


def test_explanation_shows_what_we_set_for_a_model_on_another_device(computers):
    """Variables that were set for a model on mps are shown with their values while the session is on the CPU."""
    here = computers.mac(OPENMED_DEVICE="cpu")
    here.session.device("mps")
    settings = here.session.explain().environment.settings

    assert [(one.value, one.source) for one in settings] == [("1", "set"), ("1.0", "set"), ("0.9", "set")]


def test_explanation_of_what_torch_does_not_read(computers):
    """A variable of MPS that torch does not have is explained as one, and a torch that is no release is named as what it is."""
    here = computers.mac(PYTORCH_MPS_LOG_LEVEL="debug")
    released = here.session.explain()
    here.torch.facts = replace(here.torch.facts, version="2.16.0.dev20261101")
    nightly = computers.Computer(computers.MAC, here.torch.facts, {}).session.explain()

    assert released.environment.table().rows[3] == (
        *("PYTORCH_MPS_LOG_LEVEL", "debug", "you", "ignored"),
        "not read by any torch release up to 2.15. Unset it.",
    )
    assert "not read by any torch release up to 2.15. Unset it." in str(released)
    assert "nightly" not in str(released)
    assert "torch is 2.16.0.dev20261101, a nightly build." in str(nightly)


def test_explanation_tells_the_shell_apart_from_us(computers):
    """An explanation shows what the person set, and not what was published for the openmed package."""
    here = computers.mac(OPENMED_TORCH_DEVICE="gpu")
    here.session.use("mps")
    explained = here.session.explain().to_dict()

    assert explained["variables"] == {TORCH_DEVICE: "gpu"}
    assert [link["display_value"] for link in explained["resolution_order"]] == ["(not set)", "mps", "gpu", "(not set)"]
    assert [one["source"] for one in explained["environment"]["settings"]] == ["set"] * 3


VERBS: dict[str, Callable[[Any], object]] = {
    "start": lambda here: here.session.start(),
    "stop": lambda here: here.session.stop(),
    "device": lambda here: here.session.device(),
    "list": lambda here: here.session.list_devices(),
    "explain": lambda here: here.session.explain(),
    "reset": lambda here: here.session.reset(),
    "tune": lambda here: here.session.apply_mps_variables(),
    "import torch": lambda here: here.torch.inspect_imported_torch(),
    "compute on mps": lambda here: (here.torch.inspect_imported_torch(), here.torch.touch()),
    **{
        f"use {device}": lambda here, device=device: here.session.use(device)
        for device in ("auto", "mps", "cuda:1", "cpu", "x")
    },
    **{
        f"ask {device}": lambda here, device=device: here.session.device(device)
        for device in ("mps", "cuda", "cpu", "x")
    },
}
SHELLS = st.fixed_dictionaries(
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


@given(kind=KINDS, shell=SHELLS, verbs=st.lists(st.sampled_from(sorted(VERBS)), max_size=10))
def test_any_sequence_of_verbs(computers, kind, shell, verbs):
    """In any order of verbs a failing one changes nothing, every claim is true, and stopping gives the shell back."""
    name, failing = kind
    here = getattr(computers, name)(**failing, **shell)
    for verb in verbs:
        before = here.state
        try:
            VERBS[verb](here)
        except OpenMedError:
            assert here.state == before
        for one in here.session.device_manager.mps_environment("mps").settings:
            assert one.effect != PENDING or one.name not in here.torch.read
            assert one.effect != ACTIVE or here.torch.read.get(one.name, one.value) == one.value
            assert one.effect != TOO_LATE or here.torch.read[one.name] != one.value
    here.session.stop()

    assert here.environ == shell


def test_model_that_cannot_move_leaves_everything(computers):
    """Where a loaded model cannot be moved to the new device, it, the override and the environment stay as they were."""
    if inspect_imported_torch().mps_available:
        pytest.skip("this computer has MPS, so the move would work")
    here = computers.mac(OPENMED_DEVICE="cpu")
    loaded = here.session.load_model("bundled_small", OpenMedConfig())
    here.session.use("cpu")
    before = here.state
    with pytest.raises(DeviceUnavailableError, match="could not be moved to mps"):
        here.session.use("mps")

    assert here.state == before
    assert loaded.model.device.type == "cpu"
    assert here.session.device().device == "cpu"
