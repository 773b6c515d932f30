"""Files of lines: an incomplete line is removed, damage is noticed, and other files are not modified."""

import json
import resource
import zlib
from contextlib import contextmanager

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from openmed_nb.annotation.json_lines import LineFile, to_json_line
from openmed_nb.errors import ConfigurationError

HEADER = {"format": "lines, 1", "seed": 7}
VALUES = [{"entities": []}, {"word": "ménière\u2028"}, {"error": "why"}]


def open_lines(path):
    return LineFile(path, "path", "file of lines", HEADER)


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


@pytest.fixture
def path(tmp_path, complete):
    """A file with all values."""
    path = tmp_path / "lines"
    path.write_bytes(complete)
    return path


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
    read(tmp_path / "new")
    assert (tmp_path / "new").stat().st_mode & 0o077 == 0


def test_file_cut_off_at_any_byte_keeps_its_complete_lines(path, complete):
    for length in range(len(complete)):
        path.write_bytes(complete[:length])
        num_complete = max(0, complete[:length].count(b"\n") - 1)
        assert read(path) == VALUES[:num_complete]
        open_lines(path).append(VALUES[num_complete:])
        assert path.read_bytes() == complete


@given(data=st.data())
def test_changed_byte_is_refused_or_costs_the_last_line(tmp_path_factory, complete, data):
    position = data.draw(st.integers(complete.index(b"\n") + 1, len(complete) - 1))
    path = tmp_path_factory.mktemp("damaged") / "lines"
    path.write_bytes(complete[:position] + bytes([data.draw(st.integers(0, 255))]) + complete[position + 1 :])
    before = path.read_bytes()
    try:
        values = read(path)
    except ConfigurationError as error:
        assert "is corrupt at line" in str(error)  # noqa: PT017 - either is right
        assert path.read_bytes() == before
    else:
        assert values in (VALUES, VALUES[:-1])


@pytest.mark.parametrize("line", [b"garbage\n", b"\n", b"{}\n", b'{"entities": []}\n', b"\xff\xfe\n"], ids=repr)
def test_line_without_checksum_is_named_and_kept(path, complete, line):
    lines = complete.splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:3], line, *lines[3:]]))
    with pytest.raises(ConfigurationError, match=r"is corrupt at line 4\. Delete that line and everything after it"):
        read(path)
    assert path.read_bytes() == b"".join([*lines[:3], line, *lines[3:]])


OTHER_CONTENTS = st.one_of(
    st.binary(min_size=1, max_size=40),
    st.sampled_from(
        [b"the patient\nhas asthma\n", b'{"format": "something else"}\n', b"[1, 2]\n", b"[" * 100_000 + b"\n"]
    ),
)


@given(content=OTHER_CONTENTS)
def test_other_file_is_refused_and_kept(tmp_path_factory, content):
    assume(not to_json_line(HEADER).startswith(content))
    path = tmp_path_factory.mktemp("other") / "file"
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match="is not a file of lines"):
        read(path)
    assert path.read_bytes() == content


@pytest.mark.parametrize("header", [{**HEADER, "seed": 8}, {**HEADER, "more": 1}, {"format": "lines, 1"}])
def test_other_header_is_refused_with_the_names_that_differ(path, header):
    path.write_bytes(to_json_line(header))
    with pytest.raises(ConfigurationError, match=r"different settings \((seed|more)\)"):
        read(path)


@pytest.mark.parametrize("name", ["folder", "file/lines"])
def test_path_without_a_file_is_refused_without_the_path_in_the_context(tmp_path, name):
    """A pickled error contains its context."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match=r"cannot be written|no folder 'file'") as caught:
        read(tmp_path / name)
    assert caught.value.__context__ is None


def test_line_cut_off_by_a_full_disk_is_removed(path, complete):
    with limited_file_size(len(complete) + 10), pytest.raises(ConfigurationError, match="Free disk space") as caught:
        open_lines(path).append(VALUES)
    assert caught.value.__context__ is None
    assert path.read_bytes() != complete
    assert read(path) == VALUES
    assert path.read_bytes() == complete
