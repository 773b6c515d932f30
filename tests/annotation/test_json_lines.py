"""Files of lines: an incomplete line is removed, damage is noticed, and other files are not modified."""

import json
import os
import resource
import zlib
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as some

from openmed_nb.annotation.json_lines import LineFile, to_json_line
from openmed_nb.errors import ConfigurationError

HEADER = {"format": "lines, 1", "seed": 7}
VALUES = [{"entities": []}, {"word": "ménière\u2028"}, {"error": "why"}]


class Lines(LineFile):
    """A file of any values."""

    kind = "file of lines"

    def other_header_error(self, values):
        return self.error(f"has seed {values['seed']}")


def open_lines(path):
    return Lines(path, "path", HEADER)


def read(path):
    """Return the values of the lines, without the checksums."""
    return [{name: line[name] for name in line if name != "checksum"} for line in open_lines(path).read()]


@pytest.fixture(scope="module")
def complete(tmp_path_factory):
    """The bytes of a file with all values."""
    path = tmp_path_factory.mktemp("complete") / "lines"
    assert read(path) == []
    open_lines(path).append(VALUES)
    return path.read_bytes()


@contextmanager
def limited_file_size(size):
    """Limit the size of files in bytes, as a full disk does."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_file_is_readable_json_of_its_owner_only(tmp_path, complete):
    lines = [json.loads(line) for line in complete.splitlines()]
    assert lines[0] == HEADER
    assert int(lines[1]["checksum"], 16) == zlib.crc32(b'{"entities": []')
    assert "ménière".encode() in complete
    read(tmp_path / "lines")
    assert (tmp_path / "lines").stat().st_mode & 0o077 == 0


def test_file_cut_off_at_any_byte_keeps_its_complete_lines(tmp_path, complete):
    path = tmp_path / "lines"
    for length in range(len(complete)):
        path.write_bytes(complete[:length])
        num_complete = max(0, complete[:length].count(b"\n") - 1)
        assert read(path) == VALUES[:num_complete]
        open_lines(path).append(VALUES[num_complete:])
        assert path.read_bytes() == complete


@given(data=some.data())
def test_changed_byte_is_refused_or_costs_the_last_line(tmp_path_factory, complete, data):
    position = data.draw(some.integers(complete.index(b"\n") + 1, len(complete) - 1))
    path = tmp_path_factory.mktemp("damaged") / "lines"
    path.write_bytes(complete[:position] + bytes([data.draw(some.integers(0, 255))]) + complete[position + 1 :])
    before = path.read_bytes()
    try:
        values = read(path)
    except ConfigurationError as error:
        assert "is corrupt at line" in str(error)  # noqa: PT017 - either is right
        assert path.read_bytes() == before
    else:
        assert values in (VALUES, VALUES[:-1])


@pytest.mark.parametrize(
    "line", [b"garbage\n", b"\n", b"{}\n", b"[]\n", b'{"entities": []}\n', b"\xff\xfe\n"], ids=repr
)
def test_line_without_checksum_is_named_and_kept(tmp_path, complete, line):
    lines = complete.splitlines(keepends=True)
    path = tmp_path / "lines"
    path.write_bytes(b"".join([*lines[:3], line, *lines[3:]]))
    with pytest.raises(ConfigurationError, match=r"is corrupt at line 4\. Delete that line and everything after it"):
        read(path)
    assert path.read_bytes() == b"".join([*lines[:3], line, *lines[3:]])


OTHER_CONTENTS = {
    "a note": b"the patient has asthma",
    "a note with lines": b"the patient\nhas asthma\n",
    "JSON": b'{"format": "something else"}\n',
    "a list": b"[1, 2]\n",
    "a line end": b"\n",
    "deep JSON": b"[" * 100_000 + b"\n",
    "binary": bytes(range(256)) * 9,
    "no line end": b"x" * 3_000_000,
}


@pytest.mark.parametrize("content", OTHER_CONTENTS.values(), ids=OTHER_CONTENTS)
def test_other_file_is_refused_and_kept(tmp_path, content):
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match="is not a file of lines"):
        read(path)
    assert path.read_bytes() == content


@given(content=some.binary(min_size=1, max_size=40))
def test_any_bytes_are_refused_and_kept(tmp_path_factory, content):
    assume(not to_json_line(HEADER).startswith(content))
    path = tmp_path_factory.mktemp("any") / "file"
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match="is not a file of lines"):
        read(path)
    assert path.read_bytes() == content


def test_other_header_is_refused_by_the_kind_of_file(tmp_path, complete):
    path = tmp_path / "lines"
    path.write_bytes(complete.replace(b"7", b"8", 1))
    with pytest.raises(ConfigurationError, match="has seed 8"):
        read(path)


@pytest.mark.parametrize("start", [0, 1], ids=["header", "first line"])
def test_sparse_file_is_not_read_into_memory(tmp_path, complete, start):
    path = tmp_path / "lines"
    path.write_bytes(b"".join(complete.splitlines(keepends=True)[:start]))
    os.truncate(path, 1 << 40)
    with pytest.raises(ConfigurationError, match="is corrupt at line 2" if start else "is not a file of lines"):
        read(path)
    assert path.stat().st_size == 1 << 40


@pytest.mark.parametrize(
    ("name", "problem"), [("folder", "cannot be written"), ("pipe", "regular"), ("file/lines", "cannot be written")]
)
def test_path_without_a_file_is_refused_without_the_path_in_the_context(tmp_path, name, problem):
    """A pickled error contains its context."""
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match=problem) as caught:
        read(tmp_path / name)
    assert caught.value.__context__ is None


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device without an end")
def test_device_without_an_end_is_refused(tmp_path):
    (tmp_path / "link").symlink_to("/dev/full")
    with pytest.raises(ConfigurationError, match="is not a regular file"):
        read(tmp_path / "link")


def test_line_cut_off_by_a_full_disk_is_removed(tmp_path, complete):
    path = tmp_path / "lines"
    path.write_bytes(complete)
    with limited_file_size(len(complete) + 10), pytest.raises(ConfigurationError, match="Free disk space") as caught:
        open_lines(path).append(VALUES)
    assert caught.value.__context__ is None
    assert path.read_bytes() != complete
    assert read(path) == VALUES
    assert path.read_bytes() == complete
