"""Event dispatcher: dispatcher, nested operations and interrupts."""

import signal

import pytest
import torch

import openmed_nb as nb
from helpers.threads import run_in_thread
from openmed_nb._events.activity import EventDispatcher, ProgressEvent, defer_interrupts
from openmed_nb.errors import OpenMedWarning


@pytest.fixture
def dispatcher():
    """Dispatcher without listeners."""
    return EventDispatcher()


@pytest.fixture
def events(dispatcher):
    """Events that a listener received."""
    events = []
    dispatcher.subscribe(events.append)
    return events


def test_notify_calls_listeners_in_order(dispatcher, events):
    sent = [ProgressEvent("Loading", "a"), ProgressEvent("Loading", "b"), None]
    for event in sent:
        dispatcher.notify(event)

    assert events == sent


def test_nested_operations_notify_once(dispatcher, events):
    with dispatcher.operation():
        with dispatcher.operation(), dispatcher.operation():
            assert events == []
        assert events == []
    assert events == [None]

    run_operation(dispatcher)
    assert events == [None, None]


@pytest.mark.parametrize("failure", [ValueError, KeyboardInterrupt, GeneratorExit])
def test_failed_operation_notifies(dispatcher, events, failure):
    with pytest.raises(failure), dispatcher.operation(), dispatcher.operation():
        raise failure

    assert events == [None]
    run_operation(dispatcher)
    assert events == [None, None]


SCRIPT = """
def step(batch):
    total = batch.sum()
    raise KeyboardInterrupt
"""


@pytest.mark.parametrize(
    ("module", "shown"), [("__main__", "interrupted in line 4 of step."), ("somewhere", "interrupted.")]
)
def test_interrupt_is_rendered_in_one_line(module, shown):
    own = {"__name__": module}
    exec(SCRIPT, own)  # noqa: S102 - a function of a notebook
    with pytest.raises(KeyboardInterrupt) as caught:
        nb.sweep(own["step"], torch.ones, device="cpu")

    assert caught.value._render_traceback_() == [f"KeyboardInterrupt: {shown}"]


def test_operations_are_counted_per_thread(dispatcher, events):
    with dispatcher.operation():
        for _ in range(2):
            run_in_thread(run_operation, dispatcher)
        assert events == [None, None]
        run_operation(dispatcher)
        assert events == [None, None]
    assert events == [None, None, None]


def run_operation(dispatcher):
    """Run an empty operation."""
    with dispatcher.operation():
        pass


def test_listener_error_becomes_warning(dispatcher, events):
    later = []

    def fail(_activity):
        raise LookupError("the patient has leprosy")

    dispatcher.subscribe(fail)
    dispatcher.subscribe(later.append)
    with pytest.warns(OpenMedWarning) as warned, dispatcher.operation():
        done = True

    assert done
    assert events == later == [None]
    assert [str(warning.message) for warning in warned] == [
        "A session listener raised LookupError. Run %openmed_panel to open a new panel."
    ]


def test_interrupt_in_listener_propagates(dispatcher):
    events = []

    def interrupted(activity):
        events.append(activity)
        if len(events) == 1:
            raise KeyboardInterrupt

    dispatcher.subscribe(interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_operation(dispatcher)
    run_operation(dispatcher)

    assert events == [None, None]


def test_function_can_subscribe_twice(dispatcher):
    events = []
    unsubscribe, _ = (dispatcher.subscribe(events.append) for _ in range(2))
    for _ in range(2):
        unsubscribe()
    dispatcher.notify(None)

    assert (events, len(dispatcher)) == ([None], 1)


def test_unsubscribe_during_notify(dispatcher):
    events, removers = [], []

    def first(_activity):
        events.append("first")
        for remove in removers:
            remove()

    removers.append(dispatcher.subscribe(first))
    removers.append(dispatcher.subscribe(lambda _activity: events.append("second")))
    dispatcher.subscribe(lambda _activity: events.append("third"))
    dispatcher.notify(None)
    dispatcher.notify(None)

    assert events == ["first", "third", "third"]


def test_subscribe_during_notify(dispatcher):
    events = []
    dispatcher.subscribe(lambda _activity: dispatcher.subscribe(events.append))
    dispatcher.notify(None)
    assert events == []

    dispatcher.notify(None)
    assert events == [None]


def test_operation_in_listener_does_not_notify(dispatcher, events):
    dispatcher.subscribe(lambda _activity: run_operation(dispatcher))
    run_operation(dispatcher)

    assert events == [None]


def test_defer_interrupts_until_end_of_block():
    before, done = signal.getsignal(signal.SIGINT), []

    def work(error):
        signal.raise_signal(signal.SIGINT)
        done.append(error)
        if error:
            raise error

    for error in (None, ValueError("failed")):
        with pytest.raises(KeyboardInterrupt), defer_interrupts():
            work(error)
        assert done[-1] is error
        assert signal.getsignal(signal.SIGINT) is before
