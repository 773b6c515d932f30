"""Exceptions and warnings of openmed_nb.

OpenMedError
├── ConfigurationError            a setting that is unknown or cannot be used
│   ├── UnmatchedIdsError         ids of notes without exactly one partner
│   └── PositionError             a position without a note
├── DeviceError
│   ├── UnknownDeviceError        a name that is not a valid device
│   ├── DeviceUnavailableError    a device that is not available on this machine
│   ├── DtypeOverflowError        a value that overflows every dtype of the device
│   └── TorchImportError          torch is missing or cannot be imported
├── ModelError
│   ├── UnknownModelError         a name without a matching alias, Hub id or directory
│   ├── ModelDownloadError        the Hub is not reachable or denies access
│   ├── UntrustedModelError       a model that requires executing remote code without permission
│   └── InvalidModelError         a directory or file without a usable model
├── TrainingError
│   ├── InvalidBatchError         a batch that causes silent errors on a device
│   └── NonFiniteError            NaN or Inf in the loss
├── InvalidTextError              a text that cannot be tokenized
├── ClusterError
│   ├── ClusterUnavailableError   a cluster that does not start or has no remaining worker
│   ├── WorkerMismatchError       workers that would predict different entities
│   └── WorkerKilledError         a text that crashes every worker
└── MagicError                    an invalid magic line

KeyboardInterrupt
└── RunInterrupted                a long run was interrupted; the error contains its results

UserWarning
└── OpenMedWarning                a possible problem that does not raise an error

The message states the problem with the offending value, and the remedy is one suggested action. A notebook displays an error
in one line. It is still an exception: it stops "Run All", and nbval and nbclient detect it.
"""

from __future__ import annotations

from collections.abc import Sequence

from ._utils.text import collapse_whitespace


class OpenMedError(Exception):
    """Base class of all errors of openmed_nb.

    Args:
        message: The problem as a sentence with the offending value, and never with text of a note.
        remedy: One suggested action as a sentence.

    Example:
        >>> error = OpenMedError("'mpss' is not a valid device name.", "Use 'mps'.")
        >>> str(error)
        "'mpss' is not a valid device name. Use 'mps'."
        >>> error.to_dict()
        {'error': 'OpenMedError', 'message': "'mpss' is not a valid device name.", 'remedy': "Use 'mps'."}
    """

    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(message, remedy)
        self.message = collapse_whitespace(message)
        self.remedy = collapse_whitespace(remedy)

    def __str__(self) -> str:
        return f"{self.message} {self.remedy}"

    def to_dict(self) -> dict[str, str]:
        """Return the error as JSON-compatible values."""
        return {"error": type(self).__name__, "message": self.message, "remedy": self.remedy}

    def _render_traceback_(self) -> list[str]:
        """Return the line that IPython prints instead of a traceback.

        IPython calls this method in ``InteractiveShell.showtraceback``. A ``UsageError`` would be as short, but nbval does
        not detect it (https://github.com/ipython/ipython/issues/14024).
        """
        return [f"{type(self).__name__}: {self}"]


class ConfigurationError(OpenMedError, ValueError):
    """A setting is unknown or cannot be used."""


class UnmatchedIdsError(ConfigurationError):
    """Ids of notes do not have exactly one partner.

    Args:
        message: The problem, with positions instead of ids.
        remedy: One suggested action as a sentence.
        unmatched: Up to three of the ids.

    Attributes:
        unmatched: Up to three of the ids. They can identify patients, so they are in no message, and are not pickled.
    """

    __slots__ = ("unmatched",)  # Only the values in ``__dict__`` are pickled.

    def __init__(self, message: str, remedy: str, unmatched: Sequence[object] = ()) -> None:
        super().__init__(message, remedy)
        self.unmatched = tuple(unmatched)


class PositionError(ConfigurationError, IndexError):
    """No note has this position."""


class DeviceError(OpenMedError):
    """Base class of device errors."""


class UnknownDeviceError(DeviceError, ValueError):
    """A name is not a valid device."""


class DeviceUnavailableError(DeviceError, RuntimeError):
    """A device is not available on this machine."""


class DtypeOverflowError(DeviceError, OverflowError):
    """A value overflows every dtype that the device supports, and would become infinite."""


class TorchImportError(DeviceError, ImportError):
    """Torch is not installed or cannot be imported."""


class ModelError(OpenMedError):
    """Base class of model errors."""


class UnknownModelError(ModelError, LookupError):
    """No alias, Hub id or directory matches the name of the model."""


class ModelDownloadError(ModelError, OSError):
    """The Hub is not reachable or denies access."""


class UntrustedModelError(ModelError, PermissionError):
    """A model requires executing remote code that was not permitted explicitly."""


class InvalidModelError(ModelError, RuntimeError):
    """A directory or file does not contain a usable model."""


class TrainingError(OpenMedError):
    """Base class of training errors."""


class InvalidBatchError(TrainingError, ValueError):
    """A batch causes silent errors on a device. The message contains counts and no text."""


class NonFiniteError(TrainingError, FloatingPointError):
    """The loss is NaN or Inf."""


class InvalidTextError(OpenMedError, ValueError):
    """A text cannot be tokenized. The message never contains its words."""


class ClusterError(OpenMedError, RuntimeError):
    """Base class of errors of workers on this machine or on other machines."""


class ClusterUnavailableError(ClusterError):
    """A cluster does not start or has no remaining worker."""


class WorkerMismatchError(ClusterError):
    """Workers would predict different entities, because of different versions or different models with one name."""


class WorkerKilledError(ClusterError):
    """A text crashes every worker. The message never contains its words."""


class MagicError(OpenMedError, ValueError):
    """A magic line is invalid."""


class OpenMedWarning(UserWarning):
    """A possible problem that does not raise an error, with one suggested action."""


class RunInterrupted(KeyboardInterrupt):
    """A long run was interrupted. It is not an ``Exception``, so that ``except Exception`` does not catch it.

    Args:
        done: Number of completed items.
        annotations: Results of the completed items.
        file: Path of the results file, or an empty string.
        noun: Singular noun for an item.
        resume_hint: Sentence that describes how to resume.
    """

    def __init__(self, done: int, annotations: object, file: str, noun: str = "note", resume_hint: str = "") -> None:
        self.done = done
        self.annotations = annotations
        self.file = file
        self.message = f"Stopped after {done:,} {noun if done == 1 else f'{noun}s'}."
        self.remedy = resume_hint
        super().__init__(done, annotations, file)

    def __str__(self) -> str:
        return f"{self.message} {self.remedy}".rstrip()

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]
