"""Who follows a session: told once when a verb is done, whoever called it, and of what takes a while meanwhile."""

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest

import openmed_nb as nb
from openmed_nb._annotate import annotate_text
from openmed_nb.annotation.loading import create_pipeline
from openmed_nb.devices.backend import inspect_imported_torch
from openmed_nb.errors import DeviceUnavailableError, OpenMedError
from openmed_nb.models.config import OpenMedConfig
from openmed_nb.models.loading import LoadSpec
from openmed_nb.models.store import ModelStore
from openmed_nb.session import SESSION, Session
from openmed_nb.training.curve import MemoryCurve

pytestmark = pytest.mark.usefixtures("quick_collection")

NOTE = "He has asthma."
SMALL = "bundled_small"

VERBS: dict[str, Callable[[Session], object]] = {
    "device": lambda session: session.device(),
    "device for a call": lambda session: session.device("cpu"),
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
    "unload what is not there": lambda session: session.unload("nothing of this name"),
    "keep a curve": lambda session: session.set_last_curve(MemoryCurve("cpu")),
    "load": lambda session: session.load_model(SMALL, OpenMedConfig(device="cpu")),
    "pipeline": lambda session: create_pipeline(session, SMALL, OpenMedConfig(device="cpu")),
    "annotate a text": lambda session: annotate_text(session, NOTE, SMALL, "cpu"),
}

FAILURES: dict[str, Callable[[Session], object]] = {
    "unknown device": lambda session: session.use("mpss"),
    "unknown device for a call": lambda session: session.device("mpss"),
    "unusable device": lambda session: session.use("cuda"),
    "unusable reset": lambda session: (session.environ.update(OPENMED_DEVICE="mpss"), session.reset()),
    "unknown model": lambda session: session.load_model("./nowhere", OpenMedConfig(device="cpu")),
    "unknown option": lambda session: session.load_model(SMALL, OpenMedConfig(device="cpu"), color="red"),
    "unknown task": lambda session: create_pipeline(session, SMALL, OpenMedConfig(), task="translation"),
    "unknown strategy": lambda session: create_pipeline(session, SMALL, OpenMedConfig(), aggregation_strategy="best"),
    "no text": lambda session: annotate_text(session, 7, SMALL),
}

LOOKS: dict[str, Callable[[Session], object]] = {
    "list": lambda session: session.list_devices(confirm=False),
    "explain": lambda session: session.explain(confirm=False),
    "inventory": lambda session: session.inventory(),
    "environment": lambda session: session.device_manager.mps_environment("mps"),
    "resolve what is asked for": lambda session: session.resolve("cuda:1"),
}


def is_free(session):
    """Tell whether another thread could call a verb now."""
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(session.is_idle()))
    thread.start()
    thread.join()
    return found[0]


class Listening:
    """A listener that notes what it is told, in which thread, and whether the session is free then."""

    def __init__(self, session):
        self.session = session
        self.told: list[str | None] = []
        self.threads: set[int] = set()
        self.free: list[bool] = []
        self.remove = session.subscribe(self)

    def __call__(self, activity):
        """Note what is told."""
        self.told.append(None if activity is None else str(activity))
        self.threads.add(threading.get_ident())
        if activity is None:
            self.free.append(is_free(self.session))


@pytest.fixture
def session(computers):
    """A session on a computer without a GPU."""
    return computers.plain().session


@pytest.mark.parametrize("verb", VERBS.values(), ids=VERBS)
def test_every_verb_tells_once(session, verb):
    """Every verb tells its listeners at its end, once, when the session is free for others again."""
    listening = Listening(session)
    verb(session)

    assert listening.told[-1:] == [None]
    assert listening.told.count(None) == 1
    assert listening.free == [True]


@pytest.mark.parametrize("verb", FAILURES.values(), ids=FAILURES)
def test_a_failing_verb_tells_once(session, verb):
    """A verb that fails tells its listeners once too, when the session is free for others again."""
    listening = Listening(session)
    with pytest.raises(OpenMedError):
        verb(session)

    assert listening.told[-1:] == [None]
    assert listening.told.count(None) == 1
    assert listening.free == [True]


@pytest.mark.parametrize("kind", ["mac", "box"])
@pytest.mark.parametrize("verb", ["device", "list", "explain", "use again", "reset", "resolve"])
def test_a_verb_that_confirms_a_gpu_tells_once(computers, kind, verb):
    """A verb that lets a GPU prove itself on the way tells that torch is imported for it, and once after it."""
    session = getattr(computers, kind)().session
    listening = Listening(session)
    VERBS[verb](session)

    assert listening.told == ["Importing: torch", None]
    assert listening.free == [True]


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_a_look_tells_nobody(computers, look):
    """A look that confirms nothing changes nothing, and tells nobody: those who are told look."""
    session = computers.box().session
    listening = Listening(session)
    look(session)

    assert listening.told == []


@pytest.mark.parametrize("look", ["list", "explain"])
def test_a_listener_may_look(computers, look):
    """A listener may look at the session, and sees what the verb has done."""
    session = computers.box().session
    seen: list[str] = []
    session.subscribe(lambda _activity: seen.append(str(LOOKS[look](session))))
    session.use("cuda:1")

    assert len(seen) == 2  # torch is imported, and the verb is done.
    assert "cuda:1" in seen[-1]


def test_loading_is_told(session):
    """A model that is loaded is told of by name, once, and torch before it; what is there already is not."""
    listening = Listening(session)
    for _ in range(2):
        session.load_model(SMALL, OpenMedConfig(device="cpu"))

    assert listening.told == ["Importing: torch", f"Loading: {SMALL}", None, None]


def test_annotating_is_told(session):
    """Annotating is told of after loading, and its end when the entities are there."""
    listening = Listening(session)
    annotate_text(session, NOTE, SMALL)

    assert listening.told == ["Importing: torch", f"Loading: {SMALL}", f"Annotating: {SMALL}", None]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (([NOTE, NOTE], SMALL), [f"Annotating: {SMALL} on cpu ({count})" for count in ("text 1 of 2", "2 texts")]),
        ((5, SMALL), []),
        (([NOTE], len), []),
    ],
    ids=["texts", "no texts", "no pipeline"],
)
def test_annotating_many_texts_is_told(arguments, told):
    """A run over many texts is told of, and its end once, also when it fails; the session is free for others then."""
    nb.load_pipeline(SMALL, "cpu")
    listening = Listening(SESSION)
    try:
        with contextlib.suppress(OpenMedError):
            nb.annotate(*arguments, device="cpu", progress=False)
    finally:
        listening.remove()

    assert listening.told == [*told, None]
    assert listening.free == [True]


def test_loading_that_fails_ends(session, tmp_path):
    """A model that cannot be loaded is told of, and that this is over."""
    (tmp_path / "config.json").write_text("{}")
    listening = Listening(session)
    with pytest.raises(OpenMedError):
        session.load_model(str(tmp_path), OpenMedConfig(device="cpu"))

    assert listening.told == ["Importing: torch", f"Loading: {tmp_path}", None]


@pytest.fixture
def store(keyword_model, random_model):
    """A store with two models that follow the session, what it tells, and the names of the models."""
    told: list[Any] = []
    store = ModelStore(told.append)
    names = load_both(store, keyword_model, random_model)
    assert [str(one) for one in told] == [f"Loading: {name}" for name in names]
    told.clear()
    return store, told, names


def load_both(store, *folders):
    """Load models that follow the session into a store, and return their names."""
    specs = [LoadSpec.from_name(str(folder), OpenMedConfig()) for folder in folders]
    for spec in specs:
        store.get(spec, "cpu", follows=True)
    return [spec.reference.name for spec in specs]


def test_moving_is_told(store, second_device):
    """Each model that moves is told of before it does, with which of how many it is; those that stay are not."""
    models, told, (first, second) = store
    models.move_followers(second_device)
    there = [f"Moving to {second_device}: {first} (1 of 2)", f"Moving to {second_device}: {second} (2 of 2)"]
    assert [str(one) for one in told] == there

    models.move_followers(second_device)
    assert len(told) == 2
    models.move_followers("cpu")
    assert str(told[3]) == f"Moving to cpu: {second} (2 of 2)"


def test_a_listener_that_is_interrupted_stops_the_move(keyword_model, random_model, second_device):
    """An interrupt while a listener is told of a move brings all models back."""
    told: list[Any] = []

    def interrupt(activity):
        told.append(activity)
        if activity.completed == 1:
            raise KeyboardInterrupt

    models = ModelStore(interrupt)
    load_both(models, keyword_model, random_model)
    told.clear()
    with pytest.raises(KeyboardInterrupt):
        models.move_followers(second_device)

    assert len(told) == 2
    assert {one.device for one in models.inventory()} == {"cpu"}


def test_a_move_that_fails_ends(computers):
    """A model that cannot be moved is told of, and that this is over; it is where it was then."""
    if inspect_imported_torch().mps_available:
        pytest.skip("this computer has MPS, so the move would work")
    here = computers.mac(OPENMED_DEVICE="cpu")
    loaded = here.session.load_model(SMALL, OpenMedConfig())
    listening = Listening(here.session)
    places = []
    here.session.subscribe(lambda activity: places.append((activity is None, loaded.model.device.type)))
    with pytest.raises(DeviceUnavailableError, match="could not be moved to mps"):
        here.session.use("mps")

    assert listening.told == [f"Moving to mps: {SMALL}", None]
    assert places == [(False, "cpu"), (True, "cpu")]


@pytest.fixture
def listening():
    """A listener of the session of this process, which is left as it was."""
    listening = Listening(SESSION)
    yield listening
    listening.remove()
    SESSION.unload()
    SESSION.reset()
    SESSION.stop()


@pytest.mark.real_computer  # It begins its own simulation.
def test_a_simulation_is_told(listening):
    """Beginning and ending a simulation tell once each, with the models that move there and back in between."""
    names = ("bundled", SMALL)
    for name in names:
        nb.load_pipeline(name)
    listening.told.clear()
    with nb.simulated_mps("8 GiB"):
        there = ["Moving to mps: bundled (1 of 2)", f"Moving to mps: {SMALL} (2 of 2)", None]
        assert listening.told == there
        nb.use("cpu")
    back = ["Moving to cpu: bundled (1 of 2)", f"Moving to cpu: {SMALL} (2 of 2)", None]

    assert listening.told == [*there, *back, None]
    assert all(listening.free)


@pytest.mark.real_computer  # It begins its own simulation.
def test_one_of_two_models_does_not_fit(listening):
    """Where the second of two models does not fit, the first is brought back, and the end is told once."""
    import torch

    with nb.simulated_mps("64 MiB"):
        nb.use("cpu")
        first, second = (
            sum(one.nbytes for one in nb.load_pipeline(name).model.parameters()) for name in ("bundled", SMALL)
        )
        other = torch.empty(torch.mps.recommended_max_memory() - first - second // 2, dtype=torch.uint8, device="mps")
        listening.told.clear()
        with pytest.raises(DeviceUnavailableError, match="could not be moved to mps"):
            nb.use("mps")

        assert listening.told == ["Moving to mps: bundled (1 of 2)", f"Moving to mps: {SMALL} (2 of 2)", None]
        assert [(one.name, one.device) for one in SESSION.inventory()] == [("bundled", "cpu"), (SMALL, "cpu")]
        assert nb.device().device == "cpu"
        del other


@pytest.mark.real_computer  # It begins its own simulation.
def test_a_simulation_that_does_not_begin_is_told(listening):
    """A simulation that is refused tells once."""
    with pytest.raises(OpenMedError), nb.simulated_mps("no memory"):
        pass

    assert listening.told == [None]


@pytest.mark.real_computer  # It begins its own simulation.
@pytest.mark.usefixtures("listening")
def test_a_limit_is_told_when_it_is_in_force():
    """A memory limit is told once, and stands then already."""
    with nb.simulated_mps("8 GiB"):
        limits = []
        remove = SESSION.subscribe(lambda _activity: limits.append(SESSION.device_manager.memory_fraction("mps")))
        nb.training.limit_memory(0.5)
        remove()

    assert limits == [0.5]


def test_a_release_is_told_once(listening):
    """Releasing memory tells of each cause, and to look again once, when everything was let go of."""
    nb.load_pipeline(SMALL)
    listening.told.clear()
    loaded = []
    remove = SESSION.subscribe(lambda activity: None if activity else loaded.append(len(SESSION.inventory())))
    nb.release(namespace={})
    remove()

    causes = [f"cause {number} of 4" for number in range(1, 5)] + ["4 causes"]
    assert listening.told == ["Releasing: memory", *(f"Releasing: memory ({cause})" for cause in causes), None]
    assert loaded == [0]


def test_epochs_are_told(listening):
    """Each end of an epoch is told, so that the memory after it can be looked at."""
    loop = nb.epochs(2, "cpu")
    listening.told.clear()
    list(loop)

    assert listening.told == [None, None]


def test_a_session_is_free_between_verbs(session):
    """A session is free, but for other threads while a verb is inside; asking waits for nobody."""
    free: list[bool] = []
    session.device_manager.load_torch()
    session.subscribe(lambda activity: free.extend([is_free(session), session.is_idle()] if activity else []))
    assert is_free(session)
    session.load_model(SMALL, OpenMedConfig(device="cpu"))

    assert free == [False, True]
    assert is_free(session)
