"""``resume=True`` continues the last run of this kernel that did not finish, until it finishes or is released."""

import gc
import signal
import weakref

import pytest

import openmed_nb as nb
from openmed_nb.errors import ConfigurationError, InvalidTextError, RunInterrupted
from openmed_nb.session import SESSION

pytestmark = pytest.mark.usefixtures("interruptible", "without_run")

# Many spaces, so that a chunk contains few notes.
NOTES = [f"She has asthma.{' ' * 2500}{number}" for number in range(60)]
OPTIONS = {"model": "bundled_small", "device": "cpu", "progress": False, "batch_tokens": 64}


class StreamError(Exception):
    """Error of a stream of notes."""


@pytest.fixture
def without_run():
    """The session has no interrupted run before and after a test."""
    SESSION.interrupted_run = None
    yield
    SESSION.interrupted_run = None


@pytest.fixture(scope="module")
def expected():
    return list(nb.annotate(NOTES, **OPTIONS))


def end_with(error, at=50):
    """Yield notes until an error; an interrupt is a real signal."""
    yield from NOTES[:at]
    if error is KeyboardInterrupt:
        signal.raise_signal(signal.SIGINT)
    raise error


def interrupt(error=KeyboardInterrupt, **options):
    """Run until an error, and return it."""
    with pytest.raises(RunInterrupted if error is KeyboardInterrupt else error) as caught:
        nb.annotate(end_with(error), **{**OPTIONS, **options})
    return caught.value


@pytest.mark.parametrize("error", [KeyboardInterrupt, StreamError])
def test_resume_continues_run_after_interrupt_or_error(error, expected):
    caught = interrupt(error)
    done = len(caught.annotations)
    if error is KeyboardInterrupt:
        assert str(caught) == f"Stopped after {done} notes. Run nb.annotate(notes, resume=True) to continue."
    events = []
    stop = SESSION.subscribe(events.append)
    try:
        found = nb.annotate(NOTES, resume=True)
    finally:
        stop()

    assert 0 < done < len(NOTES)
    assert next(event.completed for event in events if event and event.operation == "Annotating") == done
    assert (list(found), found.model) == (expected, "bundled_small")


def test_run_without_results_is_not_stored():
    with pytest.raises(RunInterrupted, match=r"Stopped after 0 notes\. Repeat the call"):
        nb.annotate(end_with(KeyboardInterrupt, at=0), **OPTIONS)
    with pytest.raises(ConfigurationError, match=r'resume="file\.jsonl"'):
        nb.annotate(NOTES, resume=True)


def test_resume_keeps_options_of_run_and_prefers_those_of_the_call():
    interrupt(show_text=False, on_error="record", aggregation_strategy="none", ids=[f"a{n}" for n in range(60)])
    with pytest.raises(ConfigurationError, match="aggregation_strategy"):
        nb.annotate(NOTES, resume=True, aggregation_strategy="max")
    found = nb.annotate([*NOTES[:59], 5], resume=True, model="bundled_small", device="cpu", aggregation_strategy="none")

    assert found.show_text is False
    assert set(found.errors) == {59}
    assert found.results.key == "entity"
    assert found.ids[-1] == "a59"


@pytest.mark.parametrize("rest", [NOTES[:3], [*NOTES[2::-1], "other"], ()], ids=["fewer", "other", "none"])
@pytest.mark.filterwarnings("ignore:The iterator has no texts")
def test_run_of_fewer_notes_uses_and_keeps_the_interrupted_run(rest, expected):
    done = len(interrupt().annotations)
    assert list(nb.annotate(iter(rest), resume=True)) == list(nb.annotate(rest, **OPTIONS))
    assert SESSION.interrupted_run.num_texts >= done
    assert list(nb.annotate(iter(NOTES), resume=True)) == expected
    assert SESSION.interrupted_run is None


@pytest.mark.parametrize("at", [1, 59], ids=["known notes", "new notes"])
def test_second_interrupt_keeps_all_results(at, expected):
    first = len(interrupt().annotations)
    with pytest.raises(RunInterrupted, match="resume=True"):
        nb.annotate(end_with(KeyboardInterrupt, at), resume=True)

    assert len(SESSION.interrupted_run.results) >= first
    assert list(nb.annotate(NOTES, resume=True)) == expected


@pytest.mark.parametrize("release", [nb.release, SESSION.stop], ids=["release", "unload"])
def test_run_is_stored_until_it_is_released(release):
    with pytest.raises(InvalidTextError):
        nb.annotate([*NOTES, 5], **OPTIONS)
    watched = weakref.ref(SESSION.interrupted_run.results)
    nb.annotate(["Another note."], **OPTIONS)
    assert len(nb.annotate([*NOTES[:2], "Repaired."], resume=True)) == 3
    assert SESSION.interrupted_run is not None
    notes = getattr(release(), "notes", ["resume=True"])
    gc.collect()

    assert any("resume=True" in note for note in notes)
    assert SESSION.interrupted_run is None
    assert watched() is None


def test_resume_continues_run_with_file(tmp_path, monkeypatch, expected):
    monkeypatch.chdir(tmp_path)
    assert str(interrupt(resume="run.jsonl")).endswith("Repeat the call to continue from 'run.jsonl'.")
    monkeypatch.chdir("/")

    assert list(nb.annotate(NOTES, resume=True)) == expected
    assert len((tmp_path / "run.jsonl").read_text().splitlines()) == len(NOTES) + 1
    assert SESSION.interrupted_run is None
