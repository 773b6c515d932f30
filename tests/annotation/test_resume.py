"""Results files: a run takes the results of equal texts from any file of the same settings, and loses none."""

import contextlib
import dataclasses
import json
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some

import openmed_nb as nb
from openmed_nb.annotation.resume import FORMAT, ResultsFile
from openmed_nb.devices.registry import get_device
from openmed_nb.errors import ConfigurationError, InvalidTextError, RunInterrupted

TEXTS = [
    "the patient has asthma .",
    "secret no history",
    None,
    "",
    "type 2 diabetes mellitus and hypertension",
    "\ud800",
    "asthma",
]


@pytest.fixture(scope="module")
def pipe(pipe_of, keyword_model):
    """A pipeline that runs one text at a time, so that scores do not depend on how texts come together."""
    return pipe_of(keyword_model, batch_tokens=1)


@pytest.fixture(scope="module")
def run(annotated, pipe):
    """A function that annotates the texts, or others, into a file."""

    def run(file, texts=TEXTS, pipe=pipe, on_error="record"):
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
def computed(new_pipe, on_forward):
    """A pipeline, and the token ids of the texts that its model gets."""
    pipe = new_pipe()
    rows = []
    on_forward(pipe.model, lambda ids: rows.extend(map(tuple, ids.tolist())))
    return pipe, rows


class TestCache:
    """A run takes what the file knows about its texts, and annotates the rest."""

    @given(data=some.data())
    def test_any_beginning_of_a_file_gives_the_same_results(self, run, finished, tmp_path_factory, data):
        whole, results = finished
        file = tmp_path_factory.mktemp("cut") / "run.jsonl"
        file.write_bytes(whole[: data.draw(some.integers(0, len(whole)))])
        assert list(run(file).results.items()) == results
        assert file.read_bytes().count(b"\n") == whole.count(b"\n")

    @given(texts=some.lists(some.sampled_from([*TEXTS, "the asthma", "hypertension"]), max_size=12))
    def test_any_texts_in_any_order_have_the_results_of_a_run_without_a_file(  # noqa: PLR0913, PLR0917 - fixtures
        self, annotated, pipe, run, finished, tmp_path_factory, texts
    ):
        file = tmp_path_factory.mktemp("any") / "run.jsonl"
        file.write_bytes(finished[0])
        expected = annotated(pipe, texts, on_error="record")
        for _ in range(2):
            found = run(file, texts)
            assert list(found) == list(expected)
            assert found.missing == expected.missing
            assert found.errors.keys() == expected.errors.keys()
            assert found.to_dict()["texts"] == expected.to_dict()["texts"] or found.errors

    def test_complete_file_runs_no_model_and_is_not_changed(self, run, computed, tmp_path):
        pipe, rows = computed
        first = run(tmp_path / "run.jsonl", TEXTS[:4], pipe)
        before = (tmp_path / "run.jsonl").read_bytes()
        rows.clear()
        assert list(run(tmp_path / "run.jsonl", TEXTS[3::-1], pipe)) == list(first)[::-1]
        assert rows == []
        assert (tmp_path / "run.jsonl").read_bytes() == before

    def test_text_that_occurs_twice_is_annotated_once(self, run, computed, tmp_path):
        pipe, rows = computed
        found = run(tmp_path / "run.jsonl", ["asthma", "the asthma", "asthma", "no", "asthma"], pipe)
        assert found[0] == found[2] == found[4] != found[1]
        assert len(rows) == len({*rows}) == 3
        assert (tmp_path / "run.jsonl").read_bytes().count(b"\n") == 4

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

    @pytest.mark.parametrize("kind", [str, Path, os.fspath], ids=["str", "Path", "fspath"])
    def test_file_can_be_named_by_string_or_path(self, run, finished, tmp_path, kind):
        file = tmp_path / "own folder" / "run é.jsonl"
        file.parent.mkdir()
        run(kind(file))
        assert file.read_bytes() == finished[0]
        assert [path.name for path in file.parent.iterdir()] == [file.name]

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


class TestSettings:
    """A file of a run with another model or other settings."""

    @pytest.mark.parametrize(
        "options", [{"strategy": "max"}, {"ignore_labels": []}, {"transformers_boundaries": True}, {}], ids=str
    )
    def test_other_settings_are_refused_by_name(  # noqa: PLR0913, PLR0917 - fixtures
        self, run, file, finished, pipe_of, keyword_model, random_model, options
    ):
        (name,) = options or ["model"]
        other = pipe_of(keyword_model if options else random_model, **options)
        with pytest.raises(ConfigurationError, match=rf"different settings \((aggregation_)?{name}\)") as caught:
            run(file, pipe=other)
        assert str(file) in str(caught.value)
        assert file.read_bytes() == finished[0]
        assert [path.name for path in file.parent.iterdir()] == ["run.jsonl"]

    def test_batch_size_is_no_setting(self, run, file, finished, pipe_of, keyword_model):
        assert list(run(file, pipe=pipe_of(keyword_model, batch_tokens=64)).results.items()) == finished[1]


class TestPaths:
    """Paths that cannot be a results file."""

    @pytest.mark.parametrize("name", ["", ".", "folder", "file/run.jsonl", "no/run.jsonl"])
    def test_path_without_a_file_is_refused(self, run, tmp_path, monkeypatch, name):
        """A missing folder is not created, because the run would silently start from scratch."""
        (tmp_path / "folder").mkdir()
        (tmp_path / "file").touch()
        monkeypatch.chdir(tmp_path)
        with pytest.raises(ConfigurationError, match="cannot be written: "):
            run(name)
        assert {path.name for path in tmp_path.iterdir()} == {"file", "folder"}

    @pytest.mark.parametrize("name", ["a" * 300, "a\0b"], ids=["long", "null"])
    def test_impossible_name_is_refused(self, run, tmp_path, name):
        with pytest.raises(ConfigurationError, match="Invalid path for resume"):
            run(f"{tmp_path}/{name}")

    @pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="an administrator may write anywhere")
    def test_folder_without_permission_is_refused(self, run, tmp_path):
        (tmp_path / "read only").mkdir(0o500)
        with pytest.raises(ConfigurationError, match="cannot be written"):
            run(tmp_path / "read only" / "run.jsonl")

    def test_lock_that_is_a_file_of_the_user_is_kept(self, run, tmp_path):
        precious = tmp_path / "run.jsonl.lock"
        precious.write_text("precious", "utf-8")
        with pytest.raises(ConfigurationError, match="already exists"):
            run(tmp_path / "run.jsonl")
        assert precious.read_text("utf-8") == "precious"


@pytest.mark.skipif(sys.platform == "win32", reason="limits of a process are those of POSIX")
def test_full_disk(annotated, pipe_of, keyword_model, tmp_path):
    """The error has the completed results, and the run resumes when there is disk space."""
    import resource

    pipe = pipe_of(keyword_model, batch_tokens=get_device("cpu").batch_tokens)

    def run(file, texts):
        return annotated(pipe, texts, resume=file, on_error="record")

    file, other, texts = (
        tmp_path / "run.jsonl",
        tmp_path / "other.jsonl",
        [f"{'no ' * number}asthma{' ' * 3000}" for number in range(30)],
    )
    texts = [text for text in texts for _ in range(2)]
    expected = list(annotated(pipe, texts))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20, hard))
        with pytest.raises(ConfigurationError, match="cannot be written: "):
            run(file, texts)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1500, hard))
        with pytest.raises(ConfigurationError, match=r"cannot be written: .*Free disk space") as caught:
            run(file, texts)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == ["run.jsonl"]
    done = list(caught.value.annotations)
    assert 0 < len(done) < 2 * file.read_bytes().count(b"\n") < 60
    assert done == expected[: len(done)]
    assert list(run(file, texts)) == list(run(other, texts)) == expected
    assert file.read_bytes() == other.read_bytes()


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs the list of open files")
def test_no_file_stays_open(run, finished, tmp_path):
    """After a run, and after a file was refused, no file is open, even while the error is held."""
    file, notes = tmp_path / "run.jsonl", tmp_path / "notes.txt"
    file.write_bytes(finished[0])
    notes.write_text("the patient has asthma", "utf-8")
    run(file)
    with pytest.raises(ConfigurationError) as caught:
        run(notes)
    opened = [str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.exists()]

    assert caught.tb
    assert not [target for target in opened if str(tmp_path) in target]


class TestLock:
    """Two runs never write one file at once."""

    def test_second_run_is_refused(self, run, tmp_path):
        """While a run writes a file another is refused at once, and can have it when the first is over."""
        file = tmp_path / "run.jsonl"
        with ResultsFile(file, {}), pytest.raises(ConfigurationError, match="is being written by another run"):
            run(file)
        assert len(run(file)) == len(TEXTS)

    def test_other_process(self, run, tmp_path):
        """A run of another process counts too; when that process is killed, the file is free although its lock is there."""
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
        with ResultsFile(file, {}):
            pass
        assert [*tmp_path.iterdir()] == []

    def test_never_two_at_once(self, tmp_path):
        """Of many that open and close a file without pause, two never have it at the same time."""
        inside, most, turns = [], [], []

        def visit():
            for _ in range(300):
                with contextlib.suppress(ConfigurationError), ResultsFile(tmp_path / "run.jsonl", {}):
                    inside.append(1)
                    most.append(len(inside))
                    turns.append(1)
                    time.sleep(0)
                    inside.pop()

        threads = [threading.Thread(target=visit) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert turns
        assert set(most) == {1}

    def test_one_lock_for_every_name(self, tmp_path):
        """A file has one lock: a link to it, a link to its folder and a path with dots are refused like its own name."""
        file = tmp_path / "runs" / "run.jsonl"
        file.parent.mkdir()
        link, folder = tmp_path / "link.jsonl", tmp_path / "folder"
        link.symlink_to(file)
        folder.symlink_to(file.parent, target_is_directory=True)
        with ResultsFile(file, {}):
            for name in (link, folder / file.name, file.parent / ".." / "runs" / file.name):
                with pytest.raises(ConfigurationError, match="is being written by another run"):
                    ResultsFile(name, {}).__enter__()
        with ResultsFile(link, {}), pytest.raises(ConfigurationError, match="is being written by another run"):
            ResultsFile(file, {}).__enter__()
        assert sorted(path.name for path in tmp_path.rglob("*")) == ["folder", "link.jsonl", "runs"]


NOTES = ["the patient has asthma .", "no history", "type 2 diabetes mellitus", "hypertension"]


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
    def annotations(self):
        """Give something else."""
        return "mine"


def ending_with(error, count=2):
    """Yield some texts, then raise an error."""
    yield from NOTES[:count]
    raise error


@pytest.mark.parametrize("error", [Frozen("end"), Slots("end"), ReadOnly("end")], ids=lambda one: type(one).__name__)
def test_error_that_takes_no_attribute(annotated, pipe, error):
    """The error of the user's code is not translated and has the results."""
    with pytest.raises(type(error)) as raised:
        annotated(pipe, ending_with(error))

    assert raised.value is error
    done = vars(error)["annotations"]
    assert list(done) == list(annotated(pipe, NOTES[:2]))


@pytest.mark.parametrize(
    "length",
    [-1, 2**70, "four", ZeroDivisionError("no length"), RuntimeError("not now"), TypeError("has no len()")],
    ids=repr,
)
def test_length_that_is_none(annotated, pipe, length):
    """A series that cannot say how long it is, or says nonsense, is read all the same."""

    class Series:
        def __len__(self):
            if isinstance(length, Exception):
                raise length
            return length

        def __iter__(self):
            return iter(NOTES)

    assert list(annotated(pipe, Series())) == list(annotated(pipe, NOTES))


class Interrupting(os.PathLike):
    """The name of a model whose loading is interrupted."""

    def __fspath__(self):
        """Interrupt."""
        raise KeyboardInterrupt

    def __str__(self):
        raise KeyboardInterrupt


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_interrupt_before_the_new_texts_keeps_the_known_results(annotated, pipe, tmp_path, error):
    """An interrupt while a model is loaded, or while the known texts are read."""
    file = tmp_path / "run.jsonl"
    annotated(pipe, NOTES, resume=file)
    with pytest.raises(RunInterrupted, match="Repeat the call to continue from"):
        nb.annotate(NOTES, Interrupting(), resume=file)
    with pytest.raises((RunInterrupted, ZeroDivisionError)) as caught:
        annotated(pipe, ending_with(error(), 1), resume=file)

    if error is KeyboardInterrupt:
        assert caught.value.message == "Stopped after 1 note."
        assert caught.value.file == str(file)
    assert list(annotated(pipe, NOTES, resume=file)) == list(annotated(pipe, NOTES))
