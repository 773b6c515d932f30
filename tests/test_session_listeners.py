"""Events of session operations."""

from collections.abc import Callable
from typing import Any

import pytest

import openmed_nb as nb
from helpers import simulated_computers as computers
from helpers.listeners import RecordingListener, is_idle_for_others
from helpers.session_state import make_store
from openmed_nb._annotate import annotate_in_session
from openmed_nb.annotation.loading import create_pipeline
from openmed_nb.errors import DeviceUnavailableError, OpenMedError
from openmed_nb.models.config import OpenMedConfig
from openmed_nb.models.loading import LoadSpec
from openmed_nb.session import SESSION, Session

NOTE = "He has asthma."
SMALL = "bundled_small"

OPERATIONS: dict[str, Callable[[Session], object]] = {
    "device": lambda session: session.device(),
    "use": lambda session: session.use("cpu"),
    "use again": lambda session: session.use("auto"),
    "reset": lambda session: session.reset(),
    "resolve": lambda session: session.resolve(),
    "tune": lambda session: session.apply_mps_variables(),
    "list": lambda session: session.list_devices(),
    "explain": lambda session: session.explain(),
    "start": lambda session: session.start(),
    "stop": lambda session: session.stop(),
    "end no simulation": lambda session: session.end_simulation(),
    "unload": lambda session: session.unload(),
    "load": lambda session: session.load_model(SMALL, OpenMedConfig(device="cpu")),
    "pipeline": lambda session: create_pipeline(session, SMALL, OpenMedConfig(device="cpu")),
    "annotate a text": lambda session: annotate_in_session(session, NOTE, {"model": SMALL}, {"device": "cpu"}),
}

QUERIES: dict[str, Callable[[Session], object]] = {
    "list": lambda session: session.list_devices(confirm=False),
    "explain": lambda session: session.explain(confirm=False),
    "inventory": lambda session: session.inventory(),
    "environment": lambda session: session.device_manager.mps_environment("mps"),
    "resolve what is asked for": lambda session: session.resolve("cuda:1"),
}


@pytest.fixture
def session():
    """Session on a machine without a GPU."""
    return computers.plain().session


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_operation_notifies_once(session, operation):
    listener = RecordingListener(session)
    operation(session)

    assert listener.events[-1:] == [None]
    assert listener.events.count(None) == 1


@pytest.mark.parametrize("kind", ["mac", "box"])
@pytest.mark.parametrize("operation", ["device", "list", "explain", "use again", "resolve"])
def test_operation_with_device_check_notifies_once(kind, operation):
    session = getattr(computers, kind)().session
    listener = RecordingListener(session)
    OPERATIONS[operation](session)

    assert listener.events == ["Importing: torch", None]


@pytest.mark.parametrize("query", QUERIES.values(), ids=QUERIES)
def test_query_does_not_notify(query):
    session = computers.box().session
    listener = RecordingListener(session)
    query(session)

    assert listener.events == []


def test_listener_can_query_session():
    session = computers.box().session
    seen: list[str] = []
    session.subscribe(lambda _activity: seen.append(str(session.explain(confirm=False))))
    session.use("cuda:1")

    assert len(seen) == 2  # torch is imported, and the operation is done.
    assert "cuda:1" in seen[-1]


def test_loading_sends_events(session):
    listener = RecordingListener(session)
    for _ in range(2):
        session.load_model(SMALL, OpenMedConfig(device="cpu"))

    assert listener.events == ["Importing: torch", f"Loading: {SMALL}", None, None]


def test_annotating_text_sends_events(session):
    listener = RecordingListener(session)
    annotate_in_session(session, NOTE, {"model": SMALL}, {})

    annotating = f"Annotating: {SMALL} on cpu"
    assert listener.events == ["Importing: torch", f"Loading: {SMALL}", annotating, annotating, None]


def test_failed_loading_notifies_end(session, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    listener = RecordingListener(session)
    with pytest.raises(OpenMedError):
        session.load_model(str(tmp_path), OpenMedConfig(device="cpu"))

    assert listener.events == ["Importing: torch", f"Loading: {tmp_path}", None]


def test_interrupt_in_listener_restores_models(keyword_model, random_model, second_device):
    events: list[Any] = []

    def interrupt(activity):
        events.append(activity)
        if activity.completed == 1:
            raise KeyboardInterrupt

    models = make_store(interrupt)
    for folder in (keyword_model, random_model):
        models.get(LoadSpec.from_name(str(folder), OpenMedConfig()), "cpu", follows_session=True)
    events.clear()
    with pytest.raises(KeyboardInterrupt):
        models.move_followers(second_device)

    assert len(events) == 2
    assert {model.device for model in models.inventory()} == {"cpu"}


@pytest.fixture
def listener():
    """Listener of the session of this process, which is reset afterwards."""
    listener = RecordingListener(SESSION)
    yield listener
    listener.remove()
    SESSION.unload()
    SESSION.reset()
    SESSION.stop()


@pytest.mark.real_computer  # It begins its own simulation.
def test_simulation_sends_events(listener):
    names = ("bundled", SMALL)
    for name in names:
        nb.load_pipeline(name)
    listener.events.clear()
    with nb.simulated_mps("8 GiB"):
        there = ["Moving to mps: bundled (1 of 2)", f"Moving to mps: {SMALL} (2 of 2)", None]
        assert listener.events == there
        nb.use("cpu")
    back = ["Moving to cpu: bundled (1 of 2)", f"Moving to cpu: {SMALL} (2 of 2)", None]

    assert listener.events == [*there, *back, None]


@pytest.mark.real_computer  # It begins its own simulation.
def test_failed_move_of_second_model_restores_first(listener):
    import torch

    with nb.simulated_mps("64 MiB"):
        nb.use("cpu")
        first, second = (
            sum(weight.nbytes for weight in nb.load_pipeline(name).model.parameters()) for name in ("bundled", SMALL)
        )
        other = torch.empty(torch.mps.recommended_max_memory() - first - second // 2, dtype=torch.uint8, device="mps")
        listener.events.clear()
        with pytest.raises(DeviceUnavailableError, match="could not be moved to mps"):
            nb.use("mps")

        assert listener.events == ["Moving to mps: bundled (1 of 2)", f"Moving to mps: {SMALL} (2 of 2)", None]
        assert [(model.name, model.device) for model in SESSION.inventory()] == [("bundled", "cpu"), (SMALL, "cpu")]
        assert nb.device().device == "cpu"
        del other


def test_release_sends_events(listener):
    nb.load_pipeline(SMALL)
    listener.events.clear()
    loaded = []
    remove = SESSION.subscribe(lambda activity: None if activity else loaded.append(len(SESSION.inventory())))
    nb.release()
    remove()

    sources = [f"{number} of 4 sources" for number in range(4)] + ["4 sources"]
    assert listener.events == ["Releasing: memory", *(f"Releasing: memory ({source})" for source in sources), None]
    assert loaded == [0]


def test_epochs_notify(listener):
    loop = nb.epochs(2, "cpu")
    listener.events.clear()
    list(loop)

    assert listener.events == [None, None]


def test_is_idle_between_operations(session):
    free: list[bool] = []
    session.device_manager.load_torch()
    session.subscribe(
        lambda activity: free.extend([is_idle_for_others(session), session.is_idle()] if activity else [])
    )
    assert is_idle_for_others(session)
    session.load_model(SMALL, OpenMedConfig(device="cpu"))

    assert free == [False, True]
    assert is_idle_for_others(session)
