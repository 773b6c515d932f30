"""Several panels over one session: they stay in step, whoever changes it; and the end of a panel leaves nothing behind."""

import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from operator import attrgetter

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers import simulated_computers as computers
from openmed_nb.errors import OpenMedError
from openmed_nb.notebook.panel.model import PanelModel
from openmed_nb.session import Session

asked = attrgetter("choice.requested", "choice.requested_by")
"""What a state says is asked for, and by whom."""


def test_panels_agree_after_clicks_of_many_threads(here, panel, watch):
    """Verbs of the session and of panels in several threads end, and a look then shows what is."""
    other = watch(here.session)
    verbs = [
        lambda: panel.use_device("cpu"),
        lambda: other.use_device("auto"),
        lambda: here.session.use("cpu"),
        lambda: (panel.refresh(), other.reset()),
    ]
    threads = [threading.Thread(target=lambda verb=verb: [verb() for _ in range(25)]) for verb in verbs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    panel.refresh()

    assert panel.agrees
    assert other.agrees


def test_closed_panels_leave_nothing(here):
    """Closed panels leave no listener, and what the session does is shown in them no more."""
    panels = [PanelModel(here.session) for _ in range(200)]
    assert len(here.session._listeners) == 200
    states = [panel.state for panel in panels]
    for panel in (*panels, *panels):
        panel.close()
    here.session.use("cpu")

    assert len(here.session._listeners) == 0
    assert [panel.state for panel in panels] == states
    gone = [weakref.ref(panel) for panel in panels]
    del panel, panels
    gc.collect()
    assert {widget() for widget in gone} == {None}


def test_closed_panel_does_nothing(here, panel):
    """A click that comes after the close changes nothing."""
    panel.close()
    before, state = here.state, panel.state
    panel.states.clear()
    panel.use_device("cpu")
    panel.reset()
    panel.annotate("She has asthma.")
    panel.release()

    assert here.state == before
    assert panel.state == state
    assert panel.states == []
    assert len(here.session.inventory()) == 0


Action = Callable[[Session, str], object]

VERBS: dict[str, Action] = {
    "use_device cpu": lambda session, source: session.use("cpu", source),
    "use_device auto": lambda session, source: session.use("auto", source),
    "use_device mps": lambda session, source: session.use("mps", source),
    "use_device nonsense": lambda session, source: session.use("nonsense", source),
    "reset": lambda session, _source: session.reset(),
    "refresh": lambda _session, _source: None,
}
"""What a click calls, and what the same is without a panel."""

OTHERS: dict[str, Action] = {
    **{f"use {device}": lambda session, source, device=device: session.use(device, source) for device in ("cpu", "x")},
    "device": lambda session, _source: session.device(),
    "stop": lambda session, _source: session.stop(),
    "list": lambda session, _source: session.list_devices(),
    "variable": lambda session, _source: (session.environ.update(OPENMED_DEVICE="cpu"), session.reset()),
}
"""Operations outside the panels."""


def done(action, session, source):
    """Do something to a session, and return the error of it."""
    try:
        action(session, source)
    except OpenMedError as error:
        return error.to_dict()
    return None


def click(panel, verb):
    """Click, and return the error that the panel shows."""
    name, _, argument = verb.partition(" ")
    getattr(panel, name)(*([argument] if argument else []))
    return panel.state.error.to_dict() if panel.state.error else None


STEPS = st.lists(st.tuples(st.integers(0, 1), st.sampled_from([*VERBS, *OTHERS, "close"])), max_size=10)


@given(
    kind=st.sampled_from(["plain", "rosetta"]), requested=st.sampled_from(["", "cpu", "mps", "nonsense"]), steps=STEPS
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_clicks_on_two_panels(watch, kind, requested, steps):
    """Whatever two panels and others do, the session is as without panels, and each panel shows it and its own error."""
    here, twin = (getattr(computers, kind)(OPENMED_DEVICE=requested) for _ in range(2))
    panels = [watch(here.session) for _ in range(2)]
    for number, verb in steps:
        other, before = panels[1 - number], panels[1 - number].state
        if verb == "close":
            panels[number].close()
            panels[number] = watch(here.session)
            continue
        if verb in VERBS:
            error = click(panels[number], verb)
            assert error == done(VERBS[verb], twin.session, "the panel")
        else:
            with ThreadPoolExecutor(1) as pool:  # In another thread.
                error = pool.submit(done, OTHERS[verb], here.session, "use()").result(60)
            assert error == done(OTHERS[verb], twin.session, "use()")
        assert here.state == twin.state
        assert len(here.session._listeners) == 2
        assert panels[0].agrees
        assert panels[1].agrees
        assert other.state.error is (before.error if other.state.choice == before.choice else None)
    for panel in panels:
        panel.close()
    assert len(here.session._listeners) == 0
