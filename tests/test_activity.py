"""Who is told of what is under way: once for verbs inside one another, everybody, and nobody who has gone."""

import signal
import threading

import pytest
import torch

import openmed_nb as nb
from openmed_nb._events.activity import EventDispatcher, ProgressEvent, defer_interrupts
from openmed_nb.errors import OpenMedWarning


@pytest.fixture
def listeners():
    """Listeners, of whom there are none yet."""
    return EventDispatcher()


@pytest.fixture
def heard(listeners):
    """What one listener has heard."""
    heard = []
    listeners.subscribe(heard.append)
    return heard


def test_everybody_hears_everything_in_order(listeners, heard):
    """Each listener is told of each activity and of the end, in the order of telling."""
    others = []
    listeners.subscribe(others.append)
    told = [ProgressEvent("Loading", "a"), ProgressEvent("Loading", "b"), None]
    for one in told:
        listeners.notify(one)

    assert heard == others == told


def test_verbs_inside_one_another_tell_once(listeners, heard):
    """Of verbs inside one another only the outermost tells, when all of them are done."""
    with listeners.operation():
        with listeners.operation(), listeners.operation():
            assert heard == []
        assert heard == []
    assert heard == [None]

    with listeners.operation():
        pass
    assert heard == [None, None]


@pytest.mark.parametrize("failure", [ValueError, KeyboardInterrupt, GeneratorExit])
def test_a_verb_that_fails_tells_too(listeners, heard, failure):
    """A verb that fails or is interrupted inside of another tells once, and its error goes on."""
    with pytest.raises(failure), listeners.operation(), listeners.operation():
        raise failure

    assert heard == [None]
    with listeners.operation():
        pass
    assert heard == [None, None]


SCRIPT = """
def step(batch):
    total = batch.sum()
    raise KeyboardInterrupt
"""


@pytest.mark.parametrize(("module", "shown"), [("__main__", "interrupted in line 4 of step."), ("somewhere", "interrupted.")])
def test_an_interrupt_is_shown_in_one_line(module, shown):
    """A notebook shows an interrupt in one line with the person's own line; a traceback through torch takes seconds."""
    own = {"__name__": module}
    exec(SCRIPT, own)  # noqa: S102 - a function of a notebook
    with pytest.raises(KeyboardInterrupt) as caught:
        nb.sweep(own["step"], torch.ones, device="cpu")

    assert caught.value._render_traceback_() == [f"KeyboardInterrupt: {shown}"]


def test_an_interrupt_within_verbs_is_shown_with_the_innermost_line(listeners):
    """Of verbs inside one another, the innermost that was interrupted says where; what is shown holds no frames."""
    with pytest.raises(KeyboardInterrupt) as caught, listeners.operation(), listeners.operation():
        raise KeyboardInterrupt

    assert caught.value._render_traceback_() == ["KeyboardInterrupt: interrupted."]
    assert vars(caught.value).keys() == {"_render_traceback_"}


def test_each_thread_has_its_own_verbs(listeners, heard):
    """A verb of another thread tells when it is done, though one of this thread is still under way."""
    with listeners.operation():
        for _ in range(2):
            thread = threading.Thread(target=verb, args=[listeners])
            thread.start()
            thread.join()
        assert heard == [None, None]
        verb(listeners)
        assert heard == [None, None]
    assert heard == [None, None, None]


def verb(listeners):
    """Do nothing, as a verb does it."""
    with listeners.operation():
        pass


def test_a_listener_that_fails_is_a_warning(listeners, heard):
    """A listener that fails becomes a warning with the type of its error and never the text, and the others are told."""
    later = []

    def fail(_activity):
        raise LookupError("the patient has leprosy")

    listeners.subscribe(fail)
    listeners.subscribe(later.append)
    with pytest.warns(OpenMedWarning) as warned, listeners.operation():
        done = True

    assert done
    assert heard == later == [None]
    assert [str(one.message) for one in warned] == [
        "A session listener raised LookupError. Run %openmed_panel to open a new panel."
    ]


def test_a_listener_that_is_interrupted_interrupts(listeners):
    """An interrupt while a listener is told is no failure of the listener, and the next verb tells as before."""
    heard = []

    def interrupted(activity):
        heard.append(activity)
        if len(heard) == 1:
            raise KeyboardInterrupt

    listeners.subscribe(interrupted)
    with pytest.raises(KeyboardInterrupt), listeners.operation():
        pass
    verb(listeners)

    assert heard == [None, None]


def test_removing(listeners, heard):
    """A listener that was removed is told nothing any more; removing it again does no harm, to it or to others."""
    gone = []
    remove = listeners.subscribe(gone.append)
    listeners.notify(None)
    remove()
    listeners.notify(None)
    remove()

    assert (len(gone), len(heard), len(listeners)) == (1, 2, 1)


def test_one_function_that_listens_twice(listeners):
    """A function that was added twice is told twice, and each remover removes one of the two."""
    heard = []
    listener = heard.append
    removers = [listeners.subscribe(listener) for _ in range(2)]
    listeners.notify(None)
    assert len(heard) == 2

    removers[0]()
    removers[0]()
    listeners.notify(None)
    assert len(heard) == 3


def test_removed_while_being_told(listeners):
    """A listener that another one, or it itself, removes while all are told is told nothing after that."""
    heard, removers = [], []

    def first(_activity):
        heard.append("first")
        for remove in removers:
            remove()

    removers.append(listeners.subscribe(first))
    removers.append(listeners.subscribe(lambda _activity: heard.append("second")))
    listeners.subscribe(lambda _activity: heard.append("third"))
    listeners.notify(None)
    listeners.notify(None)

    assert heard == ["first", "third", "third"]


def test_added_while_being_told(listeners):
    """A listener that is added while the others are told is told from the next time on."""
    heard = []
    listeners.subscribe(lambda _activity: listeners.subscribe(heard.append))
    listeners.notify(None)
    assert heard == []

    listeners.notify(None)
    assert heard == [None]


def test_a_verb_of_a_listener_tells_nobody(listeners, heard):
    """What a listener does to the session while it is told to look again does not go round for ever."""
    listeners.subscribe(lambda _activity: verb(listeners))
    verb(listeners)

    assert heard == [None]


def test_threads_that_come_and_go(listeners):
    """Listeners that many threads add and remove at once are all gone at the end, and no telling fails."""

    def come_and_go():
        for _ in range(300):
            remove = listeners.subscribe(lambda _activity: None)
            listeners.notify(None)
            remove()

    threads = [threading.Thread(target=come_and_go) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(listeners) == 0


def test_an_interrupt_waits_until_a_block_is_over():
    """An interrupt in the middle of a short block comes when the block is over, also if it failed; then it is as before."""
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
