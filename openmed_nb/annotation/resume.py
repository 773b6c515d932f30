"""Identity of models and runs, and the results file from which an interrupted run resumes.

The file contains a header, followed by one line of JSON per text, in order. If a text that had no result is processed again, an
additional line with its number replaces the original line.

A process can be killed in the middle of a line. When the run resumes, this line is truncated and its text is processed again. Each
line ends with a checksum of the preceding bytes, so that a corrupt file causes an error instead of different results.
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

from .._utils.temporary import file_lock
from .._utils.text import describe_error, describe_file, describe_value
from .._utils.validation import check_path
from ..devices.backend import TENSOR_LOCK, TOKENIZER_LOCK
from ..errors import ConfigurationError
from ..models.loading import packed_layers
from .json_lines import MAX_LINE_BYTES, append_checksum, parse_json_line, to_json_line
from .references import MISSING_FINGERPRINT
from .results import DroppedSpan, FingerprintedResult, ResultStore, is_entity

if TYPE_CHECKING:
    from .pipeline import AnnotationPipeline
    from .stream import Annotator

FORMAT = "openmed_nb annotations, 2"
FORMAT_WITHOUT_CHECKSUMS = "openmed_nb annotations, 1"

CHECKSUM_PATTERN = re.compile(rb', "checksum": "([0-9a-f]{8})"\}\n')
CHECKSUM_LENGTH = len(b', "checksum": "01234567"}\n')

# Start of a header. The header may be long, because it contains all settings. Other files are not read further.
HEADER_PREFIX = f'{{"format": "{FORMAT[:-1]}'.encode()

# Start of the line of a text that was processed again.
REPLACEMENT_PREFIX = b'{"text": '

# Number of evenly spaced values of each weight in a model fingerprint.
WEIGHT_SAMPLES = 64

OTHER_FILE_REMEDY = "Use a different file."


def run_settings(pipe: AnnotationPipeline, annotator: Annotator) -> dict[str, Any]:
    """Return the model fingerprint and all settings that affect results, as JSON-compatible data."""
    settings = {"model": model_fingerprint(pipe), **asdict(annotator.settings)}
    return dict(json.loads(json.dumps(settings)))


def changed_settings(settings: Mapping[str, Any], earlier: Mapping[str, Any]) -> str:
    """Return the names of the settings that differ from those of an earlier run, or an empty string."""
    return ", ".join(sorted(name for name in settings if earlier.get(name) != settings[name]))


def model_fingerprint(pipe: AnnotationPipeline) -> str:
    """Return a fingerprint of a model: a hash of its labels, its tokenizer and a sample of each weight."""
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
    """A results file, locked while it is open."""

    def __init__(self, path: str | os.PathLike[str], settings: Mapping[str, Any]) -> None:
        # A file has one lock, even if it is accessed through different paths.
        self.path = Path(os.path.realpath(check_path(path, "resume")))
        self.settings = settings
        self._file: BinaryIO = io.BytesIO()  # Placeholder until the file is open.
        self._has_checksums = True

    def __enter__(self) -> ResultsFile:  # noqa: PYI034 - Self requires Python 3.11
        lock = Path(f"{self.path}.lock")
        if not self.path.parent.exists():
            raise self._file_error("is in a folder that does not exist", "Create the folder, or use a different file.")
        if self.path.exists() and not (self.path.is_file() or self.path.is_dir()):
            raise self._file_error("is not a regular file", OTHER_FILE_REMEDY)
        # The lock file does not exist normally. If it is a directory, acquiring the lock reports it.
        with contextlib.suppress(OSError):
            if lock.stat().st_size > 0:  # Lock files are empty.
                raise self._file_error(
                    f"cannot be locked because {describe_file(lock)} already exists", OTHER_FILE_REMEDY
                )
        self._acquire(lock)
        problem = None
        try:
            self.path.touch(mode=0o600)  # Private, because it contains words of notes.
            self._file = self.path.open("r+b")
            self._check_header()
        except OSError as error:
            self.__exit__()
            problem = self._file_error(f"cannot be written: {describe_error(error)}", OTHER_FILE_REMEDY)
        except BaseException:
            self.__exit__()
            raise
        if problem:
            raise problem
        return self

    def _acquire(self, lock: Path) -> None:
        """Lock the file, or raise an error."""
        self._lock = contextlib.ExitStack()
        # Raised outside of the handlers, so that the original errors, which contain the path, are not the context.
        problem = None
        try:
            self._lock.enter_context(file_lock(lock))
        except TimeoutError:
            problem = self._file_error("is being written by another run", "Wait for that run, or use a different file.")
            if not os.access(lock, os.F_OK) and not _can_hold_files(self.path.parent):
                problem = self._file_error("is in a folder in which no files can be created", OTHER_FILE_REMEDY)
        except OSError as error:
            problem = self._file_error(
                f"cannot be written: {describe_error(error)}", "Use a file in a folder that you can write to."
            )
        if problem:
            raise problem

    def __exit__(self, *_error: object) -> None:
        with contextlib.suppress(OSError):  # An error of a full disk was reported by the write.
            self._file.close()
        # Windows does not remove an open file; the lock removes it there. The lock file must be removed before the lock is
        # released, because another process could own it afterwards.
        with contextlib.suppress(OSError):
            Path(f"{self.path}.lock").unlink()
        self._lock.close()

    def completed_results(self) -> Iterator[FingerprintedResult]:
        """Yield the result of each completed text. Afterwards, the file is ready to append results."""
        start = self._file.tell()
        replacements = self._read_replacements()
        self._file.seek(start)
        text_index = 0
        for line_number in itertools.count(2):
            position = self._file.tell()
            line = self._read_line(line_number)
            if not line.endswith(b"\n"):
                self._file.seek(position)
                self._file.truncate()
                return
            if not line.startswith(REPLACEMENT_PREFIX):
                result = self._parse_line(line, line_number)
                yield replacements.get(text_index, result)
                text_index += 1

    def _read_replacements(self) -> dict[int, FingerprintedResult]:
        """Return the results of texts that were processed again, by text index."""
        replacements: dict[int, FingerprintedResult] = {}
        num_texts = 0
        for line_number in itertools.count(2):
            line = self._read_line(line_number)
            if not line.endswith(b"\n"):
                break
            if line.startswith(REPLACEMENT_PREFIX):
                result = self._parse_line(line, line_number)
                text_index = parse_json_line(line)["text"]
                if type(text_index) is not int or not 0 <= text_index < num_texts:
                    raise self._corrupt_line_error(line_number)
                replacements[text_index] = result
            else:
                num_texts += 1
        return replacements

    def append(self, results: Iterable[FingerprintedResult], text_indices: Iterable[int] | None = None) -> None:
        """Write results to disk, so that they are not lost if the process is killed.

        Args:
            results: The results.
            text_indices: Indices of the texts, if they were processed again. If ``None``, the results are those of the next texts.
        """
        indices: Iterable[int | None] = itertools.repeat(None) if text_indices is None else text_indices
        try:
            for index, (fingerprint, answer, dropped) in zip(
                indices, itertools.starmap(FingerprintedResult, results), strict=False
            ):
                line: dict[str, Any] = {} if index is None else {"text": index}
                line["fingerprint"] = f"{fingerprint:016x}"
                line["error" if isinstance(answer, str) else "entities"] = answer
                if dropped:
                    line["dropped"] = [span._asdict() for span in dropped]
                if fingerprint == MISSING_FINGERPRINT:
                    line["missing"] = True
                self._file.write(append_checksum(to_json_line(line)))
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            remedy = "Free disk space, then run the same call again to resume."
            raise self._file_error(f"cannot be written: {describe_error(error)}", remedy) from error

    def _check_header(self) -> None:
        expected = to_json_line({"format": FORMAT, **self.settings})
        line = self._file.read(len(HEADER_PREFIX))
        if line == HEADER_PREFIX:
            line += self._read_line(1)
        # The file is new, or the process was killed while it wrote the header.
        if line != expected and expected.startswith(line):
            self._file.seek(0)
            self._file.truncate()
            self._file.write(expected)
            self._file.flush()
            return
        header = parse_json_line(line)
        if not isinstance(header, dict) or header.get("format") not in {FORMAT, FORMAT_WITHOUT_CHECKSUMS}:
            raise self._file_error("is not a results file", OTHER_FILE_REMEDY)
        self._has_checksums = header["format"] == FORMAT
        changed = changed_settings(self.settings, header)
        if changed:
            raise self._file_error(
                f"was written with different settings ({changed})", "Use a different file, or delete this file."
            )

    def _read_line(self, line_number: int) -> bytes:
        line = self._file.readline(MAX_LINE_BYTES)
        if len(line) == MAX_LINE_BYTES:
            raise self._corrupt_line_error(line_number)
        return line

    def _parse_line(self, line: bytes, line_number: int) -> FingerprintedResult:
        """Return the result in a line, or raise an error if :meth:`append` cannot have written the line."""
        try:
            value = parse_json_line(line)
            answer = value["error"] if "error" in value else value["entities"]
            is_complete = isinstance(answer, str) or (isinstance(answer, list) and all(map(is_entity, answer)))
            body = line[:-CHECKSUM_LENGTH]
            checksum = CHECKSUM_PATTERN.fullmatch(line[-CHECKSUM_LENGTH:])
            is_valid = not self._has_checksums if checksum is None else int(checksum[1], 16) == zlib.crc32(body)
            if not (is_complete and is_valid):
                raise ValueError(line_number)  # noqa: TRY301 - one error for every kind of corruption
            fingerprint = int(value["fingerprint"], 16)
            dropped = tuple(_parse_dropped_span(span) for span in value.get("dropped", ()))
            ResultStore().add(fingerprint, answer)  # Checks the range of the integers.
        except (ValueError, TypeError, LookupError, ArithmeticError) as error:
            raise self._corrupt_line_error(line_number) from error
        return FingerprintedResult(fingerprint, answer, dropped)

    def _corrupt_line_error(self, line_number: int) -> ConfigurationError:
        return self._file_error(f"is corrupt at line {line_number}", "Delete that line and everything after it.")

    def _file_error(self, problem: str, remedy: str) -> ConfigurationError:
        return ConfigurationError(f"The file {describe_value(self.path)} {problem}.", remedy)


def _parse_dropped_span(value: Mapping[str, Any]) -> DroppedSpan:
    """Return a dropped span from a line of the file, or raise a built-in exception if it is not valid."""
    span = DroppedSpan(**value)
    if [type(element) for element in span] != [str, float, int, int] or not math.isfinite(span.score):
        raise ValueError(len(value))
    return span


def _can_hold_files(folder: Path) -> bool:
    """Return whether a file can be created in a directory. In /proc this is impossible, regardless of permissions."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def count_results(path: str | os.PathLike[str]) -> int:
    """Return the number of texts with a result in a results file, or 0 if it cannot be read."""
    count = -1  # The header is no result.
    with contextlib.suppress(OSError, ConfigurationError), check_path(path, "resume").open("rb") as file:
        while (line := file.readline(MAX_LINE_BYTES)).endswith(b"\n"):
            if not line.startswith(REPLACEMENT_PREFIX):
                count += 1
    return max(0, count)
