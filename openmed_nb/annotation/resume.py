"""A file of results that an interrupted run goes on from: a header, then one line of JSON for each text in order.

A process can be killed in the middle of a line; that line is cut off when the run goes on, and its text is read again. Each
line ends with a checksum of what stands before it, so that a damaged file is an error and not another answer.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from ..errors import ConfigurationError, cause, given_path
from .answers import Answered, Answers, is_entity

FORMAT = "openmed_nb annotations, 2"
FORMAT_WITHOUT_CHECKSUMS = "openmed_nb annotations, 1"

CHECKSUM = re.compile(rb', "checksum": "([0-9a-f]{8})"\}\n')
CHECKSUM_LENGTH = len(b', "checksum": "01234567"}\n')

LONGEST_HEADER = 2**20
"""A file without a line end within so many bytes is no file of results."""


class ResultsFile:
    """A file of results, locked while it is open.

    Args:
        path: Where it is; made where it is not there.
        settings: What tells this run from another: the model and everything that changes its answers.

    Raises:
        ConfigurationError: Where it cannot be written, is of another run, is damaged, or another process writes it.
    """

    def __init__(self, path: str | os.PathLike[str], settings: Mapping[str, Any]) -> None:
        # One file has one lock, however its name is spelled.
        self.path = Path(os.path.realpath(given_path(path, "resume")))
        self.name = str(path)
        self.settings = settings
        self.header = line_of({"format": FORMAT, **settings})
        self._file: BinaryIO = io.BytesIO()  # Until the real one is open.
        self._checksums = True

    @property
    def answered(self) -> int:
        """How many texts have their answer in the file."""
        return answers_in(self.path)

    def __enter__(self) -> ResultsFile:  # noqa: PYI034 - Self came with Python 3.11
        from filelock import FileLock, Timeout

        lock = Path(f"{self.path}.lock")
        if not self.path.parent.exists():
            raise self._unusable("is in a folder that does not exist", "Make the folder, or name another file.")
        if holds_data(lock):
            raise self._unusable(f"needs the name {lock.name!r}, which is a file of yours", "Name another file.")
        self._lock = FileLock(lock)
        try:
            self._lock.acquire(timeout=0)
        except Timeout as error:
            raise self._unusable("is being written by another run", "Wait for it, or name another file.") from error
        except OSError as error:
            raise self._unusable(f"cannot be written: {cause(error)}", "Name a file in a folder of yours.") from error
        try:
            self.path.touch(mode=0o600)  # It will hold words of notes.
            self._file = self.path.open("r+b")
            self._check_header()
        except BaseException as error:
            self._close()
            if isinstance(error, OSError):
                raise self._unusable(f"cannot be written: {cause(error)}", "Name another file.") from error
            raise
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._close()

    def earlier(self) -> Iterator[Answered]:
        """Yield the fingerprint and the answer of each text that is done; then the file is ready for the next."""
        for number in itertools.count(2):
            position = self._file.tell()
            line = self._file.readline()
            if not line.endswith(b"\n"):
                self._file.seek(position)
                self._file.truncate()
                return
            yield self._read(line, number)

    def append(self, answers: Iterable[Answered]) -> None:
        """Write answers so that they survive whatever happens to the process next.

        Raises:
            ConfigurationError: Where they cannot be written, as on a full disk.
        """
        try:
            self._file.writelines(with_checksum(line_of(answer)) for answer in map(as_mapping, answers))
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            remedy = "Make room for it, and run the same again: it goes on from there."
            raise self._unusable(f"cannot be written any further: {cause(error)}", remedy) from error

    def _check_header(self) -> None:
        line = self._file.readline(LONGEST_HEADER)
        if line != self.header and self.header.startswith(line):  # New, or killed while the header was written.
            self._file.seek(0)
            self._file.truncate()
            self._file.write(self.header)
            self._file.flush()
            return
        header = value_of(line)
        if not isinstance(header, dict) or header.get("format") not in {FORMAT, FORMAT_WITHOUT_CHECKSUMS}:
            raise self._unusable("holds something else than results", "Name another file.")
        self._checksums = header["format"] == FORMAT
        other = differences(self.settings, header)
        if other:
            raise self._unusable(f"is of a run with other settings ({other})", "Name another file, or delete this one.")

    def _read(self, line: bytes, number: int) -> Answered:
        try:
            answered = answer_in(value_of(line))
            if not checksum_is_right(line, required=self._checksums):
                raise ValueError("checksum")  # noqa: TRY301 - one error for every damage
        except (ValueError, TypeError, LookupError, ArithmeticError) as error:
            raise self._unusable(f"is damaged in line {number}", "Delete the file from that line on.") from error
        return answered

    def _close(self) -> None:
        with contextlib.suppress(OSError):  # What a full disk did not take was reported when it was written.
            self._file.close()
        with contextlib.suppress(OSError):  # Windows removes no file that is open; there the lock does it itself.
            Path(self._lock.lock_file).unlink()  # Before it is free: afterwards, it could be another process's.
        self._lock.release()

    def _unusable(self, what: str, remedy: str) -> ConfigurationError:
        return ConfigurationError(f"The file {str(self.path)!r} {what}.", remedy)


def answers_in(path: str | os.PathLike[str]) -> int:
    """Return how many texts have their answer in a file of results; 0 where it cannot be read."""
    try:
        with given_path(path, "resume").open("rb") as file:
            return max(0, sum(line.endswith(b"\n") for line in file) - 1)
    except (OSError, ConfigurationError):
        return 0


def line_of(value: Mapping[str, Any]) -> bytes:
    """Return a value as a line of JSON."""
    return json.dumps(value, ensure_ascii=False).encode() + b"\n"


def value_of(line: bytes) -> Any:
    """Return the value of a line of JSON, ``None`` for anything else."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def as_mapping(answered: Answered) -> dict[str, Any]:
    """Return the answer to a text as a line of the file has it."""
    fingerprint, answer = answered
    return {"fingerprint": f"{fingerprint:016x}", "error" if isinstance(answer, str) else "entities": answer}


def answer_in(value: Any) -> Answered:
    """Return what a line of the file says, the reverse of :func:`as_mapping`.

    Raises:
        ValueError, TypeError, LookupError, ArithmeticError: Where it is not what :func:`as_mapping` returns.
    """
    answer = value["error"] if "error" in value else value["entities"]
    if not isinstance(answer, str) and not (isinstance(answer, list) and all(map(is_entity, answer))):
        raise TypeError(type(answer).__name__)
    fingerprint = int(value["fingerprint"], 16)
    Answers().add(fingerprint, answer)  # Its numbers have a size.
    return fingerprint, answer


def with_checksum(line: bytes) -> bytes:
    """Return a line of JSON with a checksum of what it holds as its last value."""
    body = line.removesuffix(b"}\n")
    return body + b', "checksum": "%08x"}\n' % zlib.crc32(body)


def checksum_is_right(line: bytes, *, required: bool) -> bool:
    r"""Tell whether a line has its checksum; files of the first format have none.

    Example:
        >>> line = with_checksum(b'{"entities": []}\n')
        >>> checksum_is_right(line, required=True), checksum_is_right(line.replace(b"[]", b"[1]"), required=False)
        (True, False)
    """
    body, end = line[:-CHECKSUM_LENGTH], CHECKSUM.fullmatch(line[-CHECKSUM_LENGTH:])
    return not required if end is None else int(end[1], 16) == zlib.crc32(body)


def differences(settings: Mapping[str, Any], earlier: Mapping[str, Any]) -> str:
    """Return the names of what an earlier run had otherwise; empty where its answers are as good as this one's.

    Example:
        >>> differences({"model": "a", "strategy": "first"}, {"model": "b", "strategy": "first"})
        'model'
    """
    return ", ".join(sorted(name for name in settings if earlier.get(name) != settings[name]))


def holds_data(path: Path) -> bool:
    """Tell whether there is a file with something in it; a lock is empty."""
    try:
        return path.stat().st_size > 0
    except OSError:
        return False
