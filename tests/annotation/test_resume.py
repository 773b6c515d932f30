"""Results files: runs resume from truncated files, other files are not modified, and no results are lost."""

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
from hypothesis import assume, given
from hypothesis import strategies as some

import openmed_nb as nb
from openmed_nb.annotation.results import FingerprintedResult
from openmed_nb.annotation.resume import (
    FORMAT,
    FORMAT_WITHOUT_CHECKSUMS,
    ResultsFile,
    append_checksum,
    count_results,
    to_json_line,
)
from openmed_nb.devices.registry import get_device
from openmed_nb.errors import ConfigurationError, RunInterrupted

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
    return pipe_of(keyword_model, batch_size=1)


@pytest.fixture(scope="module")
def run(annotated, pipe):
    """A function that annotates the texts, or others, into a file."""

    def run(file, texts=TEXTS, pipe=pipe):
        return annotated(pipe, texts, resume=file, on_error="record")

    return run


@pytest.fixture(scope="module")
def finished(annotated, pipe, tmp_path_factory):
    """The bytes of a finished file, and the answers in it."""
    file = tmp_path_factory.mktemp("finished") / "run.jsonl"
    found = annotated(pipe, TEXTS, resume=file, on_error="record")
    return file.read_bytes(), list(found.results.items())


class TestCutOff:
    """A results file that is truncated at any position."""

    @given(data=some.data())
    def test_at_any_byte(self, run, finished, tmp_path_factory, data):
        """A run resumes from any prefix of a file to the same results and the same bytes."""
        whole, answers = finished
        file = tmp_path_factory.mktemp("cut") / "run.jsonl"
        file.write_bytes(whole[: data.draw(some.integers(0, len(whole)))])
        assert list(run(file).results.items()) == answers
        assert file.read_bytes() == whole

    def test_at_every_byte(self, tmp_path):
        """Complete lines of a truncated file are restored, and new results are appended to them."""
        entity = {"entity_group": "D", "score": 0.5, "word": "ü", "start": 0, "end": 1}
        file, settings, answers = (
            tmp_path / "run.jsonl",
            {"model": "a"},
            [FingerprintedResult(1, []), FingerprintedResult(2, [entity]), FingerprintedResult(3, "why")],
        )
        with ResultsFile(file, settings) as results:
            results.append(answers)
        whole = file.read_bytes()
        for length in range(len(whole)):
            file.write_bytes(whole[:length])
            done = max(0, whole[:length].count(b"\n") - 1)
            with ResultsFile(file, settings) as results:
                assert list(results.completed_results()) == answers[:done]
                results.append(answers[done:])
            assert file.read_bytes() == whole

    def test_complete_file_runs_no_model(self, run, new_pipe, on_forward, tmp_path):
        """A complete file is not modified, and nothing is computed."""
        file, own, batches = tmp_path / "run.jsonl", new_pipe(), []
        first = run(file, pipe=own)
        before = file.read_bytes()
        on_forward(own.model, batches.append)
        assert list(run(file, pipe=own).results.items()) == list(first.results.items())
        assert batches == []
        assert file.read_bytes() == before

    def test_each_text_runs_once(self, run, new_pipe, on_forward, tmp_path):
        """A resumed run processes only texts without a result."""
        file, own, batches = tmp_path / "run.jsonl", new_pipe(), []
        texts = ["asthma"] * 3 + ["the asthma"] * 2
        run(file, texts[:3], own)
        on_forward(own.model, lambda ids: batches.append(tuple(ids.shape)))
        assert len(run(file, texts, own)) == 5
        assert sum(rows for rows, _length in batches) == 2

    @pytest.mark.parametrize("kind", [str, Path, os.fspath], ids=["str", "Path", "fspath"])
    def test_name(self, run, finished, tmp_path, kind):
        """A file can be named by a string or a path."""
        file = tmp_path / "own folder" / "run é.jsonl"
        file.parent.mkdir()
        run(kind(file))
        assert file.read_bytes() == finished[0]
        assert [path.name for path in file.parent.iterdir()] == [file.name]

    def test_folder_that_is_not_there(self, run, tmp_path):
        """A missing directory is not created, because the run would silently start from scratch."""
        with pytest.raises(ConfigurationError, match="in a folder that does not exist"):
            run(tmp_path / "no" / "run.jsonl")
        assert list(tmp_path.iterdir()) == []

    def test_only_its_owner_reads_it(self, run, tmp_path):
        """A new file can be read by nobody else, because it holds words of notes."""
        run(tmp_path / "run.jsonl")
        assert (tmp_path / "run.jsonl").stat().st_mode & 0o077 == 0

    def test_path_is_not_logged(self, run, tmp_path, caplog):
        """Not at any level, and also not for files that are written from the results."""
        with caplog.at_level(logging.DEBUG):
            found = run(tmp_path / "run.jsonl")
            found.save(tmp_path / "saved.jsonl")
            found.export("brat", tmp_path / "exported")
            nb.read_annotations(tmp_path / "saved.jsonl", predictions=True)
        assert tmp_path.name not in caplog.text

    @pytest.mark.parametrize("start", [0, 1], ids=["header", "first line"])
    def test_sparse_file_is_refused(self, run, finished, tmp_path, start):
        """A line without end is not read into memory."""
        file = tmp_path / "run.jsonl"
        file.write_bytes(b"".join(finished[0].splitlines(keepends=True)[:start]))
        os.truncate(file, 1 << 40)
        with pytest.raises(ConfigurationError, match="is not a results file" if start == 0 else "is corrupt at line 2"):
            run(file)
        assert (count_results(file), file.stat().st_size) == (0, 1 << 40)

    def test_lock_that_is_a_file_of_the_person(self, run, tmp_path):
        """A file that is not empty is not used as a lock, and is not modified."""
        precious = tmp_path / "run.jsonl.lock"
        precious.write_text("precious", "utf-8")
        with pytest.raises(ConfigurationError, match="already exists"):
            run(tmp_path / "run.jsonl")
        assert precious.read_text("utf-8") == "precious"


class TestContent:
    """Contents of the file."""

    def test_one_line_for_each_text(self, finished):
        """After the header there is a line of JSON for each text, in order, with entities or the reason for none."""
        header, *lines = map(json.loads, finished[0].splitlines())
        assert header["format"] == FORMAT
        assert [sorted(line) for line in lines] == [
            ["checksum", "entities", "fingerprint", "missing"]
            if number == 2
            else ["checksum", "error" if number == 5 else "entities", "fingerprint"]
            for number in range(len(TEXTS))
        ]
        assert lines[0]["entities"][0]["word"] == "asthma"
        assert (lines[2]["entities"], lines[2]["missing"]) == ([], True)
        assert lines[5]["error"].startswith("Text 5 contains an unpaired surrogate")

    def test_no_text_but_the_words_of_entities(self, finished):
        """No word of a text is in the file but those of entities."""
        content = finished[0].decode()
        assert "mellitus" in content
        assert not any(word in content for word in ("secret", "patient", "history", "type"))

    def test_letters_stay_readable(self, tmp_path):
        """Non-ASCII characters are stored without escapes."""
        answer = FingerprintedResult(
            7, [{"entity_group": "D", "score": 0.5, "word": "ménière\u2028", "start": 0, "end": 8}]
        )
        with ResultsFile(tmp_path / "run.jsonl", {}) as results:
            list(results.completed_results())
            results.append([answer])
        assert "ménière".encode() in (tmp_path / "run.jsonl").read_bytes()
        with ResultsFile(tmp_path / "run.jsonl", {}) as results:
            assert list(results.completed_results()) == [answer]


class TestOtherRun:
    """A file of a run with another model, other settings or other texts."""

    @pytest.mark.parametrize(
        "options", [{"strategy": "max"}, {"ignore_labels": []}, {"stride": 8}, {"truncation": True}, {}], ids=str
    )
    def test_other_settings(self, refused, pipe_of, keyword_model, random_model, options):
        """The error names the different settings, and the file is not modified."""
        (name,) = options or ["model"]
        model = keyword_model if options else random_model
        refused(pipe_of(model, **options), rf"was written with different settings \((aggregation_)?{name}\)")

    @pytest.fixture
    def refused(self, run, finished, tmp_path):
        """A function that asserts that a pipeline cannot resume from a finished file, and does not modify it."""

        def refused(other, match):
            file = tmp_path / "run.jsonl"
            file.write_bytes(finished[0])
            with pytest.raises(ConfigurationError, match=match) as caught:
                run(file, pipe=other)
            assert str(file) in str(caught.value)
            assert file.read_bytes() == finished[0]
            assert [path.name for path in tmp_path.iterdir()] == ["run.jsonl"]

        return refused

    def test_same_model_in_another_pipeline(self, run, finished, pipe_of, keyword_model, tmp_path):
        """The batch size does not affect whether a run can resume."""
        file = tmp_path / "run.jsonl"
        file.write_bytes(finished[0])
        assert list(run(file, pipe=pipe_of(keyword_model, batch_tokens=64)).results.items()) == finished[1]

    @pytest.mark.parametrize(
        ("texts", "number"),
        [(TEXTS[:3], 3), ([], 0), (TEXTS[::-1], 0), ([*TEXTS[:4], "other", *TEXTS[5:]], 4)],
        ids=["fewer", "none", "reversed", "another"],
    )
    def test_other_texts(self, run, finished, tmp_path, texts, number):
        """The error names the first different text, and the file is not modified."""
        file = tmp_path / "run.jsonl"
        file.write_bytes(finished[0])
        said = rf"Text {number} differs|more texts than the {number} texts"
        with pytest.raises(ConfigurationError, match=said) as caught:
            run(file, texts)
        assert len(caught.value.annotations) == number
        assert "other" not in caught.value.message
        assert file.read_bytes() == finished[0]

    def test_more_texts(self, run, finished, tmp_path):
        """More texts after those in the file are added to it."""
        file = tmp_path / "run.jsonl"
        file.write_bytes(finished[0])
        assert len(run(file, [*TEXTS, "asthma", ""])) == len(TEXTS) + 2
        assert file.read_bytes().startswith(finished[0])
        assert file.read_bytes().count(b"\n") == len(TEXTS) + 3


NO_RESULTS = {
    "a note": b"the patient has asthma",
    "a note with lines": b"the patient\nhas asthma\n",
    "JSON in one line": b'{"patients": [1, 2, 3]}',
    "JSON": b'{"format": "something else"}\n',
    "a list": b"[1, 2]\n",
    "a line end": b"\n",
    "deep JSON": b"[" * 100_000 + b"\n",
    "binary": bytes(range(256)) * 9,
    "zeros": bytes(5000),
    "no line end": b"x" * 3_000_000,
}


class TestNoResults:
    """Other files and paths that are not files."""

    @pytest.mark.parametrize("content", NO_RESULTS.values(), ids=NO_RESULTS)
    def test_is_left_alone(self, run, tmp_path, content):
        """It is refused, and not a byte of it changes."""
        file = tmp_path / "notes.txt"
        file.write_bytes(content)
        with pytest.raises(ConfigurationError, match="is not a results file"):
            run(file)
        assert file.read_bytes() == content
        assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]

    @given(content=some.binary(min_size=1, max_size=40))
    def test_any_bytes_are_left_alone(self, tmp_path_factory, content):
        """A file that does not start with a header is not modified."""
        assume(not to_json_line({"format": FORMAT, "model": "a"}).startswith(content))
        file = tmp_path_factory.mktemp("any") / "file"
        file.write_bytes(content)
        with pytest.raises(ConfigurationError, match="is not a results file"), ResultsFile(file, {"model": "a"}):
            pass
        assert file.read_bytes() == content

    DAMAGE = (
        b"garbage\n",
        b"\n",
        b"{}\n",
        b"[]\n",
        b'{"fingerprint": "00", "entities": [{"word": "asthma"}]}\n',
        b'{"fingerprint": "xx", "entities": []}\n',
        b'{"fingerprint": "-1", "entities": []}\n',
        b'{"fingerprint": "00"}\n',
        b"\xff\xfe\n",
    )

    @pytest.mark.parametrize("line", DAMAGE, ids=repr)
    def test_damaged_line(self, run, finished, tmp_path, line):
        """The error names the line, and the file is not modified."""
        lines = finished[0].splitlines(keepends=True)
        file = tmp_path / "run.jsonl"
        file.write_bytes(b"".join([*lines[:3], line, *lines[3:]]))
        before = file.read_bytes()
        with pytest.raises(
            ConfigurationError, match=r"is corrupt at line 4\. Delete that line and everything after it"
        ):
            run(file)
        assert file.read_bytes() == before

    @pytest.mark.parametrize("name", ["", ".", "folder"])
    def test_folder(self, run, tmp_path, monkeypatch, name):
        (tmp_path / "folder").mkdir()
        monkeypatch.chdir(tmp_path)
        with pytest.raises(ConfigurationError, match=r"cannot be written: .*[Dd]irectory"):
            run(name)
        assert [path.name for path in tmp_path.iterdir()] == ["folder"]

    def test_file_in_the_place_of_a_folder(self, run, tmp_path):
        (tmp_path / "file").touch()
        with pytest.raises(ConfigurationError, match="cannot be written"):
            run(tmp_path / "file" / "run.jsonl")

    @pytest.mark.skipif(not os.path.exists("/proc/self/mem"), reason="a file of Linux")  # noqa: PTH110
    @pytest.mark.parametrize(
        ("path", "said"), [("/proc/self/mem", "no files can be created"), ("/dev/null", "regular"), ("pipe", "regular")]
    )
    def test_special_file_is_not_another_run(self, run, path, said, tmp_path):
        """Regression: files of /proc were "being written by another run"."""
        os.mkfifo(tmp_path / "pipe")

        with pytest.raises(ConfigurationError, match=said) as caught:
            run(tmp_path / path)

        assert "another run" not in str(caught.value)
        assert os.listdir(tmp_path) == ["pipe"]  # noqa: PTH208

    @pytest.mark.parametrize("name", ["a" * 300, "a\0b"], ids=["long", "null"])
    def test_impossible_name(self, run, tmp_path, name):
        """A name that no file can have is refused."""
        with pytest.raises(ConfigurationError, match="Invalid path for resume"):
            run(f"{tmp_path}/{name}")

    @pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="an administrator may write anywhere")
    def test_place_without_permission(self, run, tmp_path):
        """A folder or file that may not be written is refused."""
        (tmp_path / "read only").mkdir(0o500)
        with pytest.raises(ConfigurationError, match="cannot be written"):
            run(tmp_path / "read only" / "run.jsonl")

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device without an end")
    def test_device_without_an_end(self, tmp_path):
        """A device that gives zeros for ever is refused before it is read."""
        (tmp_path / "link").symlink_to("/dev/full")
        with (
            pytest.raises(ConfigurationError, match="is not a regular file"),
            ResultsFile(tmp_path / "link", {}),
        ):
            pass


@pytest.mark.skipif(sys.platform == "win32", reason="limits of a process are those of POSIX")
def test_full_disk(annotated, pipe_of, keyword_model, tmp_path):
    """The error has the completed results, and the run resumes when there is disk space."""
    import resource

    pipe = pipe_of(keyword_model, batch_size=1, batch_tokens=get_device("cpu").batch_tokens)

    def run(file, texts):
        return annotated(pipe, texts, resume=file, on_error="record")

    file, other, texts = tmp_path / "run.jsonl", tmp_path / "other.jsonl", [f"asthma{' ' * 3000}"] * 30
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
    assert 0 < len(caught.value.annotations) < file.read_bytes().count(b"\n") < 30
    assert list(run(file, texts)) == list(run(other, texts)) == list(annotated(pipe, texts))
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
        file.unlink()
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
        assert [path.name for path in tmp_path.iterdir()] == ["run.jsonl"]

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
        assert sorted(path.name for path in tmp_path.rglob("*")) == ["folder", "link.jsonl", "run.jsonl", "runs"]


NOTES = ["the patient has asthma .", "no history", "type 2 diabetes mellitus", "hypertension"]
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
    def annotations(self):
        """Give something else."""
        return "mine"


def ending_with(error, count=2):
    """Yield some texts, then raise an error."""
    yield from NOTES[:count]
    raise error


@pytest.mark.parametrize("error", [Frozen("end"), Slots("end"), ReadOnly("end")], ids=lambda one: type(one).__name__)
def test_error_that_takes_no_attribute(annotated, pipe, error):
    """The error of the user's code is not translated and has the results, from which the run resumes."""
    with pytest.raises(type(error)) as raised:
        annotated(pipe, ending_with(error))

    assert raised.value is error
    done = vars(error)["annotations"]
    assert len(done) == 2
    assert list(annotated(pipe, NOTES, resume=done)) == list(annotated(pipe, NOTES))


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


class TestInterruptedBeforeTheEarlierAnswers:
    """An interrupt while a run gets ready, or while it takes over what an earlier run has left."""

    def test_file(self, annotated, pipe, tmp_path):
        """The message counts the answers that are in the file."""
        file = tmp_path / "run.jsonl"
        annotated(pipe, NOTES, resume=file)
        with pytest.raises(RunInterrupted, match="after 4 notes") as before:
            nb.annotate(NOTES, Interrupting(), resume=file)
        with pytest.raises(RunInterrupted, match="after 4 notes") as during:
            annotated(pipe, ending_with(KeyboardInterrupt(), 1), resume=file)

        assert before.value.file == during.value.file == str(file)
        assert len(annotated(pipe, NOTES, resume=file)) == 4

    @pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
    def test_memory(self, annotated, pipe, error):
        """All earlier answers are carried on, not only those that were taken over already."""
        earlier = annotated(pipe, NOTES)
        with pytest.raises((RunInterrupted, ZeroDivisionError)) as raised:
            annotated(pipe, ending_with(error(), 1), resume=earlier)

        assert len(raised.value.annotations) == 4


@given(data=some.data())
def test_any_damage_is_noticed(run, finished, tmp_path_factory, data):
    """A changed byte is refused, or costs the last line, which is read again; it never changes an answer."""
    whole, answers = finished
    place = data.draw(some.integers(whole.index(b"\n") + 1, len(whole) - 1))
    byte = data.draw(some.integers(0, 255))
    file = tmp_path_factory.mktemp("damaged") / "run.jsonl"
    file.write_bytes(whole[:place] + bytes([byte]) + whole[place + 1 :])
    try:
        found = run(file)
    except ConfigurationError as error:
        assert "is corrupt at line" in str(error)  # noqa: PT017 - either is right
    else:
        assert list(found.results.items()) == answers


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
        line = append_checksum(to_json_line({"fingerprint": "0" * 16, **answer}))
        file.write_bytes(to_json_line({"format": FORMAT}) + line)
        with ResultsFile(file, {}) as results, pytest.raises(ConfigurationError, match="is corrupt at line 2"):
            list(results.completed_results())


def test_file_without_checksums(run, finished, tmp_path):
    """A run resumes from a file without checksums, and adds lines with checksums."""
    whole, answers = finished
    header, *lines = (json.loads(line) for line in whole.splitlines())
    old = [{"fingerprint": line["fingerprint"], "entities": line["entities"]} for line in lines[:2]]
    file = tmp_path / "run.jsonl"
    file.write_bytes(b"".join(map(to_json_line, [{**header, "format": FORMAT_WITHOUT_CHECKSUMS}, *old])))

    assert list(run(file).results.items()) == answers
    assert [b"checksum" in line for line in file.read_bytes().splitlines()] == [False] * 3 + [True] * 5
