"""Identity of models and runs, and the results file, from which a run takes the results that it does not have to compute.

The file contains a header with the settings, followed by one line of JSON per text: the fingerprint of the text, and its result.
Its order does not matter: a run takes what it finds for its own texts, and adds the rest. If a text had an error and is processed
again, its last line counts.

A process can be killed in the middle of a line. When the file is read again, this line is removed and its text is processed again.
Each line ends with a checksum of the preceding bytes, so that a corrupt file causes an error instead of different results.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._utils.plain import file_lock
from .._utils.text import describe_error, describe_file
from ..devices.backend import TENSOR_LOCK, TOKENIZER_LOCK
from ..models.loading import packed_layers
from .json_lines import LineFile
from .storage import DroppedSpan, FingerprintedResult

if TYPE_CHECKING:
    from .pipeline import AnnotationPipeline
    from .stream import Annotator

FORMAT = "openmed_nb annotations, 3"

# Number of evenly spaced values of each weight in a model fingerprint.
WEIGHT_SAMPLES = 64


def run_settings(pipe: AnnotationPipeline, annotator: Annotator) -> dict[str, Any]:
    """Return the model fingerprint and all settings that affect results, as JSON-compatible data."""
    return dict(json.loads(json.dumps({"model": model_fingerprint(pipe), **asdict(annotator.settings)})))


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


class ResultsFile(LineFile):
    """A file of results, locked in a with block."""

    def __init__(self, path: str | os.PathLike[str], settings: Mapping[str, Any]) -> None:
        super().__init__(path, "resume", "results file", {"format": FORMAT, **settings})

    def __enter__(self) -> ResultsFile:  # noqa: PYI034 - Self requires Python 3.11
        lock = Path(f"{self.path}.lock")
        with contextlib.suppress(OSError):
            if lock.stat().st_size > 0:  # A lock is an empty file, so this is one of the user.
                raise self.error(f"cannot be locked because {describe_file(lock)} already exists")
        self._lock = contextlib.ExitStack()
        # Raised outside of the handlers, so that the original errors, which contain the path, are not the context.
        problem = None
        try:
            self._lock.enter_context(file_lock(lock))
        except TimeoutError:
            problem = self.error("is being written by another run", "Wait for that run, or use a different file.")
        except OSError as error:
            remedy = "Use a file in a folder that you can write to."
            problem = self.error(f"cannot be written: {describe_error(error)}", remedy)
        if problem:
            raise problem
        return self

    def __exit__(self, *_error: object) -> None:
        # Windows does not remove an open file; the lock removes it there. The lock file must be removed before the lock is
        # released, because another process could own it afterwards.
        with contextlib.suppress(OSError):
            Path(f"{self.path}.lock").unlink()
        self._lock.close()

    def results(self) -> Iterator[FingerprintedResult]:
        """Yield the results. Afterwards, the file is ready to append results."""
        for line in self.read():
            answer = line["error"] if "error" in line else line["entities"]
            dropped = tuple(DroppedSpan(**span) for span in line.get("dropped", ()))
            yield FingerprintedResult(int(line["fingerprint"], 16), answer, dropped)

    def add(self, results: Iterable[FingerprintedResult]) -> None:
        """Write results to disk."""
        lines = []
        for fingerprint, answer, dropped in results:
            line: dict[str, Any] = {"fingerprint": f"{fingerprint:016x}"}
            line["error" if isinstance(answer, str) else "entities"] = answer
            if dropped:
                line["dropped"] = [span._asdict() for span in dropped]
            lines.append(line)
        self.append(lines)
