"""``resume=True`` continues the last run of this kernel that did not finish, until it finishes or is released."""

import gc
import signal
import weakref

import pytest

import openmed_nb as nb
from openmed_nb.errors import ConfigurationError, InvalidTextError, RunInterrupted
from openmed_nb.session import SESSION

pytestmark = pytest.mark.usefixtures("interruptible", "forgotten")

NOTES = [f"{'She has asthma. ' * 40}{number}" for number in range(120)]
OPTIONS = {"model": "bundled_small", "device": "cpu", "progress": False, "batch_tokens": 64}


class StreamError(Exception):
    """Error of a stream of notes."""


@pytest.fixture
def forgotten():
    """The session has no interrupted run before and after a test."""
    SESSION.interrupted_run = None
    yield
    SESSION.interrupted_run = None


def ending_with(error, notes=NOTES, at=110):
    """Yield notes until an error; an interrupt is a real signal."""
    yield from notes[:at]
    if error is KeyboardInterrupt:
        signal.raise_signal(signal.SIGINT)
    raise error


def interrupt(error=KeyboardInterrupt, **options):
    """Run until an error, and return it."""
    with pytest.raises(RunInterrupted if error is KeyboardInterrupt else error) as caught:
        nb.annotate(ending_with(error), **{**OPTIONS, **options})
    return caught.value


@pytest.mark.parametrize("error", [KeyboardInterrupt, StreamError])
def test_resume_continues_run_after_interrupt_or_error(error):
    done = len(interrupt(error).annotations)
    events = []
    stop = SESSION.subscribe(events.append)
    try:
        found = nb.annotate(NOTES, resume=True)
    finally:
        stop()

    assert 0 < done < len(NOTES)
    assert next(event.completed for event in events if event and event.operation == "Annotating") == done
    assert list(found) == list(nb.annotate(NOTES, **OPTIONS))
    assert found.model == "bundled_small"


def test_interrupt_names_line_to_type():
    assert str(interrupt()).endswith(" notes. Run nb.annotate(notes, resume=True) to continue.")
    assert str(interrupt()).startswith("Stopped after ")


def test_interrupt_before_first_result_is_not_remembered():
    with pytest.raises(RunInterrupted, match=r"Stopped after 0 notes\. Repeat the call"):
        nb.annotate(ending_with(KeyboardInterrupt, at=0), **OPTIONS)

    assert SESSION.interrupted_run is None


def test_resume_without_run_names_file():
    with pytest.raises(ConfigurationError, match=r'resume="file\.jsonl"'):
        nb.annotate(NOTES, resume=True)


def test_resume_keeps_options_of_run():
    interrupt(show_text=False, on_error="record", aggregation_strategy="none", ids=[f"a{n}" for n in range(120)])
    found = nb.annotate([*NOTES[:119], 5], resume=True)

    assert found.show_text is False
    assert set(found.errors) == {119}
    assert found.results.key == "entity"
    assert found.ids[-1] == "a119"


def test_resume_prefers_options_of_call():
    interrupt()
    with pytest.raises(ConfigurationError, match="aggregation_strategy"):
        nb.annotate(NOTES, resume=True, aggregation_strategy="none")

    assert len(nb.annotate(NOTES, resume=True, show_text=False)) == len(NOTES)


@pytest.mark.parametrize(
    "rest", [lambda: NOTES[:3], lambda: [*NOTES[2::-1], "other"], lambda: iter([])], ids=["fewer", "other", "none"]
)
def test_run_of_fewer_notes_uses_and_keeps_the_interrupted_run(rest):
    done = len(interrupt().annotations)
    expected = nb.annotate(rest(), **OPTIONS)
    assert list(nb.annotate(rest(), resume=True)) == list(expected)

    assert SESSION.interrupted_run.num_texts >= done
    assert len(nb.annotate(iter(NOTES), resume=True)) == len(NOTES)
    assert SESSION.interrupted_run is None


def test_second_interrupt_continues_where_it_stopped():
    first = len(interrupt().annotations)
    with pytest.raises(RunInterrupted):
        nb.annotate(ending_with(KeyboardInterrupt, at=119), resume=True)

    assert len(SESSION.interrupted_run.results) >= first
    assert len(nb.annotate(NOTES, resume=True)) == len(NOTES)


@pytest.mark.parametrize(
    "finish",
    [
        lambda: nb.annotate(NOTES, resume=True),
        lambda: nb.annotate(NOTES, **OPTIONS),
        nb.release,
        SESSION.stop,
    ],
    ids=["resumed", "repeated", "release", "unload"],
)
def test_run_is_released(finish):
    interrupt()
    watched = weakref.ref(SESSION.interrupted_run.results)
    nb.annotate(["Another note."], **OPTIONS)
    assert SESSION.interrupted_run is not None
    finish()
    gc.collect()

    assert SESSION.interrupted_run is None
    assert watched() is None


@pytest.mark.parametrize(
    ("notes", "options"),
    [(NOTES[:119], {}), (NOTES, {"model": "bundled"}), (NOTES, {"aggregation_strategy": "max"})],
    ids=["fewer notes", "other model", "other option"],
)
def test_run_is_not_released_by_another_run(notes, options):
    with pytest.raises(InvalidTextError):
        nb.annotate([*NOTES[:119], 5], **OPTIONS)
    done = len(SESSION.interrupted_run.results)
    nb.annotate(notes, **{**OPTIONS, **options})

    assert len(SESSION.interrupted_run.results) == done


def test_release_reports_run():
    interrupt()

    assert any("resume=True" in note for note in nb.release(keep="models").notes)
    assert not any("resume=True" in note for note in nb.release(keep="models").notes)


def test_interrupt_of_resumed_run_keeps_earlier_results():
    """The interrupt arrives while the known notes are read."""
    done = len(interrupt().annotations)
    with pytest.raises(RunInterrupted, match="resume=True"):
        nb.annotate(ending_with(KeyboardInterrupt, at=1), resume=True)

    assert len(SESSION.interrupted_run.results) == done
    assert len(nb.annotate(NOTES, resume=True)) == len(NOTES)


@pytest.mark.parametrize("error", [KeyboardInterrupt, StreamError])
def test_resume_continues_run_with_file(error, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    caught = interrupt(error, resume="run.jsonl")
    if error is KeyboardInterrupt:
        assert str(caught).endswith("Repeat the call to continue from 'run.jsonl'.")
    monkeypatch.chdir("/")
    found = nb.annotate(NOTES, resume=True)

    assert list(found) == list(nb.annotate(NOTES, **OPTIONS))
    assert len((tmp_path / "run.jsonl").read_text().splitlines()) == len(NOTES) + 1
    assert SESSION.interrupted_run is None


def test_resume_after_text_was_repaired():
    with pytest.raises(InvalidTextError):
        nb.annotate([*NOTES, 5], **OPTIONS)

    assert len(nb.annotate([*NOTES, "No asthma."], resume=True)) == len(NOTES) + 1
