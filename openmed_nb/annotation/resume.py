"""A file of results that an interrupted run goes on from: a header, then one line of JSON for each text in order.

A process can be killed in the middle of a line; that line is cut off when the run goes on, and its text is read again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from ..errors import ConfigurationError, cause
from .columns import Answered

FORMAT = "openmed_nb annotations, 1"


class ResultsFile:
    """A file of results, locked while it is open.

    Args:
        path: Where it is; made where it is not there.
        run: What tells this run from another: the model and everything that changes its answers.

    Raises:
        ConfigurationError: Where it cannot be written, is of another run, is damaged, or another process writes it.
    """

    def __init__(self, path: str | os.PathLike[str], run: Mapping[str, Any]) -> None:
        self.path = Path(path)
        self.name = str(path)
        self.header = json.loads(json.dumps({"format": FORMAT, **run}))

    def __enter__(self) -> ResultsFile:  # noqa: PYI034 - Self came with Python 3.11
        from filelock import FileLock, Timeout

        self._lock = FileLock(f"{self.path}.lock")
        try:
            self._lock.acquire(timeout=0)
        except Timeout as error:
            raise self._unusable("is being written by another run", "Wait for it, or name another file.") from error
        except OSError as error:
            raise self._unusable(f"cannot be written: {cause(error)}", "Name a file in a folder of yours.") from error
        try:
            self._file: BinaryIO = self.path.open("r+b" if self.path.exists() else "w+b")
            self._check_header()
        except BaseException as error:
            self._release()
            if isinstance(error, OSError):
                raise self._unusable(f"cannot be written: {cause(error)}", "Name another file.") from error
            raise
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._release()

    def earlier(self) -> Iterator[Answered]:
        """Yield the fingerprint and the answer of each text that is done; then the file is ready for the next."""
        while True:
            position = self._file.tell()
            line = self._file.readline()
            if not line.endswith(b"\n"):
                self._file.seek(position)
                self._file.truncate()
                return
            yield self._read(line)

    def append(self, answers: Iterable[Answered]) -> None:
        """Write answers so that they survive whatever happens to the process next."""
        for fingerprint, answer in answers:
            kind = "error" if isinstance(answer, str) else "entities"
            self._write({"fingerprint": f"{fingerprint:016x}", kind: answer})
        self._file.flush()
        os.fsync(self._file.fileno())

    def _check_header(self) -> None:
        line = self._file.readline()
        if not line.endswith(b"\n"):  # New, or killed while the header was written.
            self._file.seek(0)
            self._file.truncate()
            self._write(self.header)
            return
        try:
            header = json.loads(line)
        except ValueError:
            header = None
        if not isinstance(header, dict) or header.get("format") != FORMAT:
            raise self._unusable("holds something else than results", "Name another file.")
        other = sorted(name for name in self.header if header.get(name) != self.header[name])
        if other:
            raise self._unusable(f"is of a run with another {', '.join(other)}", "Name another file, or delete it.")

    def _write(self, value: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(value, ensure_ascii=False).encode() + b"\n")

    def _read(self, line: bytes) -> Answered:
        try:
            value = json.loads(line)
            return int(value["fingerprint"], 16), value["error"] if "error" in value else list(value["entities"])
        except (ValueError, TypeError, KeyError) as error:
            raise self._unusable("has a damaged line", "Delete the file from that line on.") from error

    def _release(self) -> None:
        self._lock.release()
        Path(self._lock.lock_file).unlink(missing_ok=True)

    def _unusable(self, what: str, remedy: str) -> ConfigurationError:
        return ConfigurationError(f"The file {str(self.path)!r} {what}.", remedy)
