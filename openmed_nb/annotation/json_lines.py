"""A file of JSON lines that a run appends to, so that a process that is killed loses at most the line that it was writing.

The first line is a header. Each further line ends with a checksum of its preceding bytes, so that a corrupt file causes an error
instead of different results. An incomplete last line is removed when the file is read.
"""

from __future__ import annotations

import itertools
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from .._utils.text import describe_error, describe_value
from .._utils.validation import check_folder_of, check_path
from ..errors import ConfigurationError


def to_json_line(value: Mapping[str, Any]) -> bytes:
    """Encode a value as a line of JSON."""
    return json.dumps(value, ensure_ascii=False).encode() + b"\n"


def append_checksum(line: bytes) -> bytes:
    """Return a line of JSON with the checksum of its contents added as the last value."""
    body = line.removesuffix(b"}\n")
    return body + b', "checksum": "%08x"}\n' % zlib.crc32(body)


class LineFile:
    """A file with a header and lines with checksums.

    Attributes:
        path: Path of the file. Links are resolved, so that a file has one lock.
        kind: What the file contains, for errors.
        header: First line.
    """

    def __init__(self, path: str | os.PathLike[str], option: str, kind: str, header: Mapping[str, Any]) -> None:
        checked = check_path(path, option)
        if checked.suffix.lower() not in {"", ".jsonl"}:
            message = f"{describe_value(checked.suffix)} is not the suffix of a {kind}."
            raise ConfigurationError(message, "Use a file with the suffix .jsonl.")
        self.path = Path(os.path.realpath(checked))
        check_folder_of(self.path)
        self.kind = kind
        self.header = header

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield the values of the lines. Then the file is complete: it has a header, and no incomplete line."""
        # Raised outside of the handler, so that the original error, which contains the path, is not the context.
        problem = None
        try:
            self.path.touch(mode=0o600)  # Readable by its owner only.
            with self.path.open("r+b") as file:
                yield from self._read_lines(file)
        except OSError as error:
            problem = self.error(f"cannot be written: {describe_error(error)}")
        if problem:
            raise problem

    def _read_lines(self, file: BinaryIO) -> Iterator[dict[str, Any]]:
        """Yield the values of the lines after the header, or raise an error if the file has another header."""
        header = to_json_line(self.header)
        line = file.readline()
        if line != header and header.startswith(line):  # The file is new, or the process was killed.
            file.seek(0)
            file.write(header)
            return
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):
            values = None
        if not isinstance(values, dict) or values.get("format") != self.header["format"]:
            raise self.error(f"is not a {self.kind}")
        names = sorted({*self.header, *values})
        if changed := [name for name in names if values.get(name) != self.header.get(name)]:
            problem = f"was written with different settings ({', '.join(changed)})"
            raise self.error(problem, "Use a different file, or the settings of this file.")
        for number in itertools.count(2):
            position = file.tell()
            line = file.readline()
            if not line.endswith(b"\n"):
                file.truncate(position)
                return
            body, _, checksum = line.rpartition(b', "checksum": "')
            if checksum != b'%08x"}\n' % zlib.crc32(body):
                raise self.error(f"is corrupt at line {number}", "Delete that line and everything after it.")
            yield json.loads(line)

    def append(self, values: Iterable[Mapping[str, Any]]) -> None:
        """Write lines to disk, so that they are not lost if the process is killed."""
        lines = b"".join(append_checksum(to_json_line(value)) for value in values)
        problem = None
        try:
            with self.path.open("ab") as file:
                file.write(lines)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            remedy = "Free disk space, then repeat the call."
            problem = self.error(f"cannot be written: {describe_error(error)}", remedy)
        if problem:
            raise problem

    def error(self, problem: str, remedy: str = "Use a different file.") -> ConfigurationError:
        """Return an error about the file."""
        return ConfigurationError(f"The file {describe_value(self.path)} {problem}.", remedy)
