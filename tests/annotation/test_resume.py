"""Results files: a run takes the results of equal texts from any file of the same settings, and loses none."""

import contextlib
import dataclasses
import json
import logging
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import openmed_nb as nb
from helpers.annotations import annotated, on_forward
from openmed_nb.annotation.resume import FORMAT, ResultsFile
from openmed_nb.errors import ConfigurationError, InvalidTextError, RunInterrupted

TEXTS = [
    "the patient has asthma .",
    "secret no history",
    None,
    "no",
    "type 2 diabetes mellitus and hypertension",
    "\ud800",
    "asthma",
]


@pytest.fixture(scope="module")
def run(keyword_pipe):
    """A function that annotates the texts, or others, into a file."""

    def run(file, texts=TEXTS, pipe=keyword_pipe, on_error="record"):
        return annotated(pipe, texts, resume=file, on_error=on_error)

    return run


@pytest.fixture(scope="module")
def finished(run, tmp_path_factory):
    """The bytes of a finished file, and the results in it."""
    file = tmp_path_factory.mktemp("finished") / "run.jsonl"
    found = run(file)
    return file.read_bytes(), list(found.results.items())


@pytest.fixture
def file(finished, tmp_path):
    """A finished file."""
    file = tmp_path / "run.jsonl"
    file.write_bytes(finished[0])
    return file


@pytest.fixture
def computed(new_pipe):
    """A pipeline, and the token ids of the texts that its model gets."""
    pipe = new_pipe()
    rows = []
    on_forward(pipe.model, lambda ids: rows.extend(map(tuple, ids.tolist())))
    return pipe, rows


class TestCache:
    """A run takes what the file knows about its texts, and annotates the rest."""

    @given(texts=st.lists(st.sampled_from([*TEXTS, "the asthma", "hypertension"]), max_size=12), data=st.data())
    def test_any_texts_in_any_order_have_the_results_of_a_run_without_a_file(  # noqa: PLR0913, PLR0917 - fixtures
        self, keyword_pipe, run, finished, tmp_path_factory, texts, data
    ):
        file = tmp_path_factory.mktemp("any") / "run.jsonl"
        whole = finished[0]
        file.write_bytes(whole[: data.draw(st.integers(0, len(whole)))])
        expected = annotated(keyword_pipe, texts, on_error="record")
        for _ in range(2):
            found = run(file, texts)
            assert (list(found), found.missing) == (list(expected), expected.missing)
            assert found.errors.keys() == expected.errors.keys()
        assert list(run(file).results.items()) == finished[1]

    def test_text_is_annotated_once(self, run, computed, tmp_path):
        """A text that occurs twice is annotated once, and a complete file runs no model and is not changed."""
        pipe, rows = computed
        texts = ["asthma", "the asthma", "asthma", "no", "asthma"]
        found = run(tmp_path / "run.jsonl", texts, pipe)
        assert found[0] == found[2] == found[4] != found[1]
        assert len(rows) == len({*rows}) == 3
        before = (tmp_path / "run.jsonl").read_bytes()
        assert list(run(tmp_path / "run.jsonl", texts[::-1], pipe)) == list(found)[::-1]
        assert len(rows) == 3
        assert (tmp_path / "run.jsonl").read_bytes() == before
        continued = run(tmp_path / "run.jsonl", ["no", "new", "no"], pipe)
        for shown in (str(continued), str(continued._create_view().state)):
            assert "2 notes from an earlier run" in shown

    def test_error_of_new_text_names_its_position(self, run, file):
        found = run(file, ["asthma", "a new text", "asthma", 5, 5])
        assert found.errors[3].startswith("Text 3 must be a string")
        assert [*found.errors] == [3, 4]
        with pytest.raises(InvalidTextError, match="Text 2 must be a string") as caught:
            run(file, ["asthma", "another text", {}], on_error="raise")
        assert len(caught.value.annotations) == 2

    def test_failed_texts_are_tried_again_after_all_others(self, run, file, finished):
        size = len(finished[0])
        found = run(file, ["asthma", "\ud800", "new", "\ud800"])
        assert found.errors.keys() == {1, 3}
        assert found.errors[3].startswith("Text 3 contains an unpaired surrogate")
        assert json.loads(file.read_bytes()[size:])["entities"] == []  # The error is in the file already.
        with pytest.raises(InvalidTextError, match="Text 0 contains") as caught:
            run(file, ["\ud800", "asthma", "another"], on_error="raise")
        assert len(caught.value.annotations) == 3

    def test_path_is_not_logged(self, run, tmp_path, caplog):
        """Not at any level, and also not for files that are written from the results."""
        with caplog.at_level(logging.DEBUG):
            found = run(tmp_path / "run.jsonl")
            found.save(tmp_path / "saved.jsonl")
            found.export("brat", tmp_path / "exported")
            nb.read_annotations(tmp_path / "saved.jsonl", predictions=True)
        assert tmp_path.name not in caplog.text


def test_file_contains_fingerprints_and_results_but_no_text(finished):
    header, *lines = map(json.loads, finished[0].splitlines())
    assert header["format"] == FORMAT
    assert [sorted(line) for line in lines] == [
        ["checksum", "error" if number == 5 else "entities", "fingerprint"] for number in range(len(TEXTS))
    ]
    assert lines[0]["entities"][0]["word"] == "asthma"
    assert lines[5]["error"].startswith("Text 5 contains an unpaired surrogate")
    content = finished[0].decode()
    assert "mellitus" in content
    assert not any(word in content for word in ("secret", "patient", "history", "type"))


@pytest.mark.parametrize("options", [{"strategy": "max"}, {"ignore_labels": []}, {}], ids=str)
def test_other_settings_are_refused_by_name(  # noqa: PLR0913, PLR0917 - fixtures
    run, file, finished, pipe_of, keyword_model, random_model, options
):
    (name,) = options or ["model"]
    other = pipe_of(keyword_model if options else random_model, **options)
    with pytest.raises(ConfigurationError, match=rf"different settings \((aggregation_)?{name}\)") as caught:
        run(file, pipe=other)
    assert str(file) in str(caught.value)
    assert file.read_bytes() == finished[0]
    assert [path.name for path in file.parent.iterdir()] == ["run.jsonl"]
    assert list(run(file, pipe=pipe_of(keyword_model, batch_tokens=64)).results.items()) == finished[1]


@pytest.mark.parametrize("name", ["", "folder", "file/run.jsonl", "no/run.jsonl"])
def test_path_without_a_file_is_refused(run, tmp_path, monkeypatch, name):
    """A missing folder is not created, because the run would silently start from scratch."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match=r"cannot be written: [A-Z][a-z ]+\. |There is no folder '(no|file)'"):
        run(name)
    assert {path.name for path in tmp_path.iterdir()} == {"file", "folder"}


def test_lock_that_is_a_file_of_the_user_is_kept(run, file):
    lock = file.with_name(f"{file.name}.lock")
    lock.write_text("precious", "utf-8")
    with pytest.raises(ConfigurationError, match="already exists"):
        run(file)
    assert lock.read_text("utf-8") == "precious"


@pytest.mark.skipif(sys.platform == "win32", reason="limits of a process are those of POSIX")
def test_full_disk(keyword_pipe, tmp_path):
    """The error has the completed results, and the run resumes when there is disk space."""
    import resource

    file = tmp_path / "run.jsonl"
    texts = [f"{'no ' * number}asthma{' ' * 3000}" for number in range(30)]
    expected = list(annotated(keyword_pipe, texts))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for size in (20, 1500):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        try:
            with pytest.raises(ConfigurationError, match="cannot be written: ") as caught:
                annotated(keyword_pipe, texts, resume=file)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == ["run.jsonl"]
    done = list(caught.value.annotations)
    assert 0 < len(done) < 30
    assert done == expected[: len(done)]
    assert list(annotated(keyword_pipe, texts, resume=file)) == expected
    assert file.read_bytes().count(b"\n") == 31


def test_second_run_of_a_file_is_refused(run, tmp_path):
    """That of another process, too. When that process is killed, the file is free although its lock exists."""
    file = tmp_path / "run.jsonl"
    code = (
        "import sys, time; from openmed_nb.annotation.resume import ResultsFile; "
        "held = ResultsFile(sys.argv[1], {}).__enter__(); print(flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, file], stdout=subprocess.PIPE) as process:
        try:
            process.stdout.readline()
            with pytest.raises(ConfigurationError, match="is being written by another run"):
                run(file)
        finally:
            process.kill()
    assert Path(f"{file}.lock").exists()
    link = tmp_path / "link.jsonl"
    link.symlink_to(file)
    for name, other in ((file, link), (link, file)):
        with ResultsFile(name, {}), pytest.raises(ConfigurationError, match="is being written by another run"):
            ResultsFile(other, {}).__enter__()
    assert [path.name for path in tmp_path.iterdir()] == ["link.jsonl"]


def test_lock_is_held_by_one_of_many_threads(tmp_path):
    inside = []
    most = []

    def visit(_number):
        for _ in range(100):
            with contextlib.suppress(ConfigurationError), ResultsFile(tmp_path / "run.jsonl", {}):
                inside.append(1)
                most.append(len(inside))
                time.sleep(0)
                inside.pop()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(visit, range(4)))
    assert {*most} == {1}


NOTES = ["the patient has asthma .", "no history", "type 2 diabetes mellitus", "hypertension"]


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    """An error that takes no new attributes."""

    reason: str


def end_with(error, count=2):
    """Yield some texts, then raise an error."""
    yield from NOTES[:count]
    raise error


def test_error_of_the_texts_is_raised_with_the_results(keyword_pipe):
    error = Frozen("end")
    with pytest.raises(Frozen) as caught:
        annotated(keyword_pipe, end_with(error))

    assert caught.value is error
    assert list(vars(error)["annotations"]) == list(annotated(keyword_pipe, NOTES[:2]))


@pytest.mark.parametrize("length", [-1, RuntimeError("not now")], ids=repr)
def test_texts_without_a_valid_length_are_read(keyword_pipe, length):
    class Series:
        def __len__(self):
            if isinstance(length, Exception):
                raise length
            return length

        def __iter__(self):
            return iter(NOTES)

    assert list(annotated(keyword_pipe, Series())) == list(annotated(keyword_pipe, NOTES))


class Interrupting(os.PathLike):
    """The name of a model whose loading is interrupted."""

    def __fspath__(self):
        raise KeyboardInterrupt

    __str__ = __fspath__


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_interrupt_before_the_new_texts_keeps_the_known_results(keyword_pipe, tmp_path, error):
    """An interrupt while a model is loaded, or while the known texts are read."""
    file = tmp_path / "run.jsonl"
    expected = annotated(keyword_pipe, NOTES, resume=file)
    with pytest.raises(RunInterrupted, match="Repeat the call to continue from"):
        nb.annotate(NOTES, Interrupting(), resume=file)
    with pytest.raises((RunInterrupted, ZeroDivisionError)) as caught:
        annotated(keyword_pipe, end_with(error(), 1), resume=file)

    if error is KeyboardInterrupt:
        assert (caught.value.message, caught.value.file) == ("Stopped after 1 note.", str(file))
    assert list(annotated(keyword_pipe, NOTES, resume=file)) == list(expected)
