"""What tells one text, model and run from another, and the file of results that an interrupted run goes on from.

The file has a header, then one line of JSON for each text in order. A text that had no result, and has one since, has another
line with its number, which counts in the place of the first.

A process can be killed in the middle of a line; that line is cut off when the run goes on, and its text is read again. Each
line ends with a checksum of what stands before it, so that a damaged file is an error and not another answer.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import json
import math
import os
import re
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from .._utils.text import describe_error, describe_file, describe_value
from .._utils.validation import check_path
from ..devices.backend import TENSOR_LOCK, TOKENIZER_LOCK
from ..errors import ConfigurationError
from ..models.loading import packed_layers
from .references import MISSING
from .results import DroppedSpan, FingerprintedResult, ResultStore, is_entity

if TYPE_CHECKING:
    from .pipeline import AnnotationPipeline
    from .stream import Annotator

FORMAT = "openmed_nb annotations, 2"
FORMAT_WITHOUT_CHECKSUMS = "openmed_nb annotations, 1"

CHECKSUM = re.compile(rb', "checksum": "([0-9a-f]{8})"\}\n')
CHECKSUM_LENGTH = len(b', "checksum": "01234567"}\n')

# With these bytes begins a header, which may be long: it has all settings. A file that begins with others is not read further.
HEADER = f'{{"format": "{FORMAT[:-1]}'.encode()

# With these bytes begins the line of a text that was read again.
AGAIN = b'{"text": '

# How many numbers of each weight are looked at, evenly over the whole.
WEIGHT_SAMPLES = 64


def run_settings(pipe: AnnotationPipeline, annotator: Annotator) -> dict[str, Any]:
    """Return what tells a run from another, the model and everything that changes its answers, as JSON has it."""
    settings = {"model": model_fingerprint(pipe), **asdict(annotator.settings)}
    return dict(json.loads(json.dumps(settings)))


def changed_settings(settings: Mapping[str, Any], earlier: Mapping[str, Any]) -> str:
    """Return the names of the settings that an earlier run had otherwise; empty if its answers are as good as this one's."""
    return ", ".join(sorted(name for name in settings if earlier.get(name) != settings[name]))


def model_fingerprint(pipe: AnnotationPipeline) -> str:
    """Return a short text that tells a model from others: its labels, its tokenizer, and a sample of each weight."""
    digest = hashlib.blake2b(repr(sorted(pipe.model.config.id2label.items())).encode(), digest_size=8)
    backend = pipe.tokenizer.backend_tokenizer
    with TENSOR_LOCK, TOKENIZER_LOCK:
        backend.no_truncation()
        backend.no_padding()
        digest.update(backend.to_str().encode())
        for name, weight in pipe.model.named_parameters():
            digest.update(f"{name} {tuple(weight.shape)}".encode())
            sample = weight.detach().flatten()[:: max(1, weight.numel() // WEIGHT_SAMPLES)]
            digest.update(sample.float().cpu().numpy().tobytes())
        for name, layer in packed_layers(pipe.model):
            weight = layer.weight().flatten()
            sample = weight[:: max(1, weight.numel() // WEIGHT_SAMPLES)].dequantize()
            digest.update(name.encode() + sample.numpy().tobytes())
    return digest.hexdigest()


class ResultsFile:
    """A file of results, locked while it is open."""

    def __init__(self, path: str | os.PathLike[str], settings: Mapping[str, Any]) -> None:
        # One file has one lock, however its name is spelled.
        self.path = Path(os.path.realpath(check_path(path, "resume")))
        self.settings = settings
        self._file: BinaryIO = io.BytesIO()  # Until the real one is open.
        self._checksums = True

    def __enter__(self) -> ResultsFile:  # noqa: PYI034 - Self came with Python 3.11
        lock = Path(f"{self.path}.lock")
        if not self.path.parent.exists():
            raise self._file_error("is in a folder that does not exist", "Make the folder, or name another file.")
        if self.path.exists() and not (self.path.is_file() or self.path.is_dir()):
            raise self._file_error("is not a regular file", "Name another file.")
        with contextlib.suppress(OSError):  # No such file, as it should be, or a folder that the lock reports.
            if lock.stat().st_size > 0:  # A lock is empty.
                raise self._file_error(
                    f"needs the name {describe_file(lock)}, which is a file of yours", "Name another file."
                )
        self._acquire(lock)
        problem = None
        try:
            self.path.touch(mode=0o600)  # It will hold words of notes.
            self._file = self.path.open("r+b")
            self._check_header()
        except OSError as error:
            self.__exit__()
            problem = self._file_error(f"cannot be written: {describe_error(error)}", "Name another file.")
        except BaseException:
            self.__exit__()
            raise
        if problem:
            raise problem
        return self

    def _acquire(self, lock: Path) -> None:
        """Lock the file, or raise why it cannot be."""
        from filelock import FileLock, Timeout

        self._lock = FileLock(lock)
        problem = None  # Raised outside of the handlers: the other errors have the path, and would be the context.
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            problem = self._file_error("is being written by another run", "Wait for it, or name another file.")
            if not os.access(lock, os.F_OK) and not can_hold_files(self.path.parent):
                problem = self._file_error("is in a folder that takes no new files", "Name another file.")
        except OSError as error:
            problem = self._file_error(
                f"cannot be written: {describe_error(error)}", "Name a file in a folder of yours."
            )
        if problem:
            raise problem

    def __exit__(self, *_error: object) -> None:
        with contextlib.suppress(OSError):  # What a full disk did not take was reported when it was written.
            self._file.close()
        with contextlib.suppress(OSError):  # Windows removes no file that is open; there the lock does it itself.
            Path(self._lock.lock_file).unlink()  # Before it is free: afterwards, it could be another process's.
        self._lock.release()

    def completed_results(self) -> Iterator[FingerprintedResult]:
        """Yield the fingerprint and the answer of each text that was read; then the file is ready for the next."""
        begin, again, text = self._file.tell(), self._read_again(), 0
        self._file.seek(begin)
        for number in itertools.count(2):
            position = self._file.tell()
            line = self._file.readline()
            if not line.endswith(b"\n"):
                self._file.seek(position)
                self._file.truncate()
                return
            if not line.startswith(AGAIN):
                answered = self._parse_line(line, number)
                yield again.get(text, answered)
                text += 1

    def _read_again(self) -> dict[int, FingerprintedResult]:
        """Return what was found for texts that were read again, by their numbers."""
        found: dict[int, FingerprintedResult] = {}
        texts = 0
        for number, line in enumerate(self._file, 2):
            if not line.endswith(b"\n"):
                break
            if line.startswith(AGAIN):
                answered = self._parse_line(line, number)
                text = from_json_line(line)["text"]
                if type(text) is not int or not 0 <= text < texts:
                    raise self._damaged(number)
                found[text] = answered
            else:
                texts += 1
        return found

    def append(self, answers: Iterable[FingerprintedResult], numbers: Iterable[int] | None = None) -> None:
        """Write answers so that they survive whatever happens to the process next; numbers are those of texts read again."""
        places: Iterable[int | None] = itertools.repeat(None) if numbers is None else numbers
        try:
            for number, (fingerprint, answer, dropped) in zip(
                places, itertools.starmap(FingerprintedResult, answers), strict=False
            ):
                again = {} if number is None else {"text": number}
                kind = "error" if isinstance(answer, str) else "entities"
                missing = {"missing": True} if fingerprint == MISSING else {}
                left = {"dropped": [span._asdict() for span in dropped]} if dropped else {}
                line = {**again, "fingerprint": f"{fingerprint:016x}", kind: answer, **left, **missing}
                self._file.write(append_checksum(to_json_line(line)))
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            remedy = "Make room for it, and run the same again: it goes on from there."
            raise self._file_error(f"cannot be written any further: {describe_error(error)}", remedy) from error

    def _check_header(self) -> None:
        own = to_json_line({"format": FORMAT, **self.settings})
        line = self._file.read(len(HEADER))
        if line == HEADER:
            line += self._file.readline()
        if line != own and own.startswith(line):  # New, or killed while the header was written.
            self._file.seek(0)
            self._file.truncate()
            self._file.write(own)
            self._file.flush()
            return
        header = from_json_line(line)
        if not isinstance(header, dict) or header.get("format") not in {FORMAT, FORMAT_WITHOUT_CHECKSUMS}:
            raise self._file_error("is not a file of results", "Name another file.")
        self._checksums = header["format"] == FORMAT
        other = changed_settings(self.settings, header)
        if other:
            raise self._file_error(
                f"is of a run with other settings ({other})", "Name another file, or delete this one."
            )

    def _parse_line(self, line: bytes, number: int) -> FingerprintedResult:
        """Return what a line says; whatever it says that :meth:`append` does not write is damage."""
        try:
            value = from_json_line(line)
            answer = value["error"] if "error" in value else value["entities"]
            whole = isinstance(answer, str) or (isinstance(answer, list) and all(map(is_entity, answer)))
            body, end = line[:-CHECKSUM_LENGTH], CHECKSUM.fullmatch(line[-CHECKSUM_LENGTH:])
            checked = not self._checksums if end is None else int(end[1], 16) == zlib.crc32(body)
            if not (whole and checked):
                raise ValueError(number)  # noqa: TRY301 - one error for every damage
            fingerprint = int(value["fingerprint"], 16)
            dropped = tuple(dropped_span_of(span) for span in value.get("dropped", ()))
            ResultStore().add(fingerprint, answer)  # Its numbers have a size.
        except (ValueError, TypeError, LookupError, ArithmeticError) as error:
            raise self._damaged(number) from error
        return FingerprintedResult(fingerprint, answer, dropped)

    def _damaged(self, number: int) -> ConfigurationError:
        return self._file_error(f"is damaged in line {number}", "Delete the file from that line on.")

    def _file_error(self, what: str, remedy: str) -> ConfigurationError:
        return ConfigurationError(f"The file {describe_value(self.path)} {what}.", remedy)


def dropped_span_of(value: Mapping[str, Any]) -> DroppedSpan:
    """Return a span that a line of the file has; an error of Python's own for anything else."""
    span = DroppedSpan(**value)
    if [type(part) for part in span] != [str, float, int, int] or not math.isfinite(span.score):
        raise ValueError(len(value))
    return span


def can_hold_files(folder: Path) -> bool:
    """Return whether a file can be made in a folder; in those of /proc none can, whatever their permissions say."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def count_results(path: str | os.PathLike[str]) -> int:
    """Return how many texts have a line in a file of results; 0 if it cannot be read."""
    try:
        with check_path(path, "resume").open("rb") as file:
            return max(0, sum(line.endswith(b"\n") and not line.startswith(AGAIN) for line in file) - 1)
    except (OSError, ConfigurationError):
        return 0


def to_json_line(value: Mapping[str, Any]) -> bytes:
    """Return a value as a line of JSON."""
    return json.dumps(value, ensure_ascii=False).encode() + b"\n"


def from_json_line(line: bytes) -> Any:
    """Return the value of a line of JSON, ``None`` for anything else."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def append_checksum(line: bytes) -> bytes:
    """Return a line of JSON with a checksum of what it holds as its last value."""
    body = line.removesuffix(b"}\n")
    return body + b', "checksum": "%08x"}\n' % zlib.crc32(body)
