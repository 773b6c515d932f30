"""Nothing that was answered is lost or changed, whatever ends a run and whatever happens to its file."""

from __future__ import annotations

import dataclasses
import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as some

import openmed_nb as nb
from openmed_nb.annotation.resume import FORMAT, FORMAT_WITHOUT_CHECKSUMS, ResultsFile, line_of, with_checksum
from openmed_nb.errors import ConfigurationError, Interrupted

TEXTS = ["the patient has asthma .", "no history", "type 2 diabetes mellitus", "hypertension"]
ENTITY = {"entity_group": "D", "score": 0.5, "word": "asthma", "start": 0, "end": 6}


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    """An error that takes no new attributes."""

    reason: str


class Slots(Exception):
    """An error with an empty slot of the same name."""

    __slots__ = ("annotations",)


class ReadOnly(Exception):
    """An error that has something else of that name."""

    @property
    def annotations(self) -> str:
        """Give something else."""
        return "mine"


@pytest.fixture(scope="module")
def pipe(pipe_of, keyword_model):
    """A pipeline that runs one text at a time."""
    return pipe_of(keyword_model, batch_size=1)


def ending_with(error, count=2):
    """Yield some texts, then raise an error."""
    yield from TEXTS[:count]
    raise error


@pytest.mark.parametrize("error", [Frozen("end"), Slots("end"), ReadOnly("end")], ids=lambda one: type(one).__name__)
def test_error_that_takes_no_attribute(annotated, pipe, error):
    """The person's own error arrives as it is, with the answers in its dictionary, and the run goes on from them."""
    with pytest.raises(type(error)) as raised:
        annotated(pipe, ending_with(error))

    assert raised.value is error
    done = vars(error)["annotations"]
    assert len(done) == 2
    assert list(annotated(pipe, TEXTS, resume=done)) == list(annotated(pipe, TEXTS))


@pytest.mark.parametrize(
    "length", [-1, 2**70, "four", ZeroDivisionError("no length"), RuntimeError("not now")], ids=repr
)
def test_length_that_is_none(annotated, pipe, length):
    """A series that cannot say how long it is, or says nonsense, is read all the same."""

    class Series:
        def __len__(self):
            if isinstance(length, Exception):
                raise length
            return length

        def __iter__(self):
            return iter(TEXTS)

    assert list(annotated(pipe, Series())) == list(annotated(pipe, TEXTS))


class Interrupting(os.PathLike):
    """The name of a model, during whose loading the person interrupts."""

    def __fspath__(self):
        """Interrupt."""
        raise KeyboardInterrupt

    def __str__(self):
        raise KeyboardInterrupt


class TestInterruptedBeforeTheEarlierAnswers:
    """An interrupt while a run gets ready, or while it takes over what an earlier run has left."""

    def test_file(self, annotated, pipe, tmp_path):
        """The message counts the answers that are in the file."""
        file = tmp_path / "run.jsonl"
        annotated(pipe, TEXTS, resume=file)
        with pytest.raises(Interrupted, match="after 4 texts") as before:
            nb.annotate(TEXTS, Interrupting(), resume=file)
        with pytest.raises(Interrupted, match="after 4 texts") as during:
            annotated(pipe, ending_with(KeyboardInterrupt(), 1), resume=file)

        assert before.value.file == during.value.file == str(file)
        assert len(annotated(pipe, TEXTS, resume=file)) == 4

    @pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
    def test_memory(self, annotated, pipe, error):
        """All earlier answers are carried on, not only those that were taken over already."""
        earlier = annotated(pipe, TEXTS)
        with pytest.raises((Interrupted, ZeroDivisionError)) as raised:
            annotated(pipe, ending_with(error(), 1), resume=earlier)

        assert len(raised.value.annotations) == 4


@pytest.fixture(scope="module")
def finished(annotated, pipe, tmp_path_factory):
    """The bytes of a finished file, and the answers in it."""
    file = tmp_path_factory.mktemp("finished") / "run.jsonl"
    found = annotated(pipe, TEXTS, resume=file)
    return file.read_bytes(), list(found.answers.items())


@given(data=some.data())
def test_any_damage_is_noticed(annotated, pipe, finished, tmp_path_factory, data):
    """A changed byte is refused, or costs the last line, which is read again; it never changes an answer."""
    whole, answers = finished
    place = data.draw(some.integers(whole.index(b"\n") + 1, len(whole) - 1))
    byte = data.draw(some.integers(0, 255))
    file = tmp_path_factory.mktemp("damaged") / "run.jsonl"
    file.write_bytes(whole[:place] + bytes([byte]) + whole[place + 1 :])
    try:
        found = annotated(pipe, TEXTS, resume=file)
    except ConfigurationError as error:
        assert "is damaged in line" in str(error)  # noqa: PT017 - either is right
    else:
        assert list(found.answers.items()) == answers


WRONG = [
    *({"entities": [{**ENTITY, name: value}]} for name in ENTITY for value in (None, True, [1], float("nan"))),
    *({"entities": [{**ENTITY, name: "x"}]} for name in ("score", "start", "end")),
    *({"entities": value} for value in (None, 5, {}, [5], [None])),
    *({"error": value} for value in (None, 5, ["why"])),
]


def test_wrong_types(tmp_path):
    """A line whose values have other types than this toolkit writes is damaged, even with a right checksum."""
    file = tmp_path / "run.jsonl"
    for answer in WRONG:
        line = with_checksum(line_of({"fingerprint": "0" * 16, **answer}))
        file.write_bytes(line_of({"format": FORMAT}) + line)
        with ResultsFile(file, {}) as results, pytest.raises(ConfigurationError, match="is damaged in line 2"):
            list(results.earlier())


def test_file_without_checksums(annotated, pipe, finished, tmp_path):
    """A file of version 0.1.0, whose lines have no checksums, goes on; the new lines have them."""
    whole, answers = finished
    header, *lines = (json.loads(line) for line in whole.splitlines())
    old = [{"fingerprint": one["fingerprint"], "entities": one["entities"]} for one in lines[:2]]
    file = tmp_path / "run.jsonl"
    file.write_bytes(b"".join(map(line_of, [{**header, "format": FORMAT_WITHOUT_CHECKSUMS}, *old])))

    assert list(annotated(pipe, TEXTS, resume=file).answers.items()) == answers
    assert [b"checksum" in line for line in file.read_bytes().splitlines()] == [False, False, False, True, True]
