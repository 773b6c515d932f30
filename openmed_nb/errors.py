"""Every error that openmed_nb raises on purpose.

OpenMedError
├── ConfigurationError      a setting that openmed_nb does not have or cannot use
├── DeviceError
│   ├── UnknownDeviceError       a spelling that names no device
│   ├── DeviceUnavailableError   a device that this computer cannot use now
│   ├── DtypeOverflowError      a number that no type of the device can hold
│   └── TorchImportError       torch is missing or cannot be imported
├── ModelError
│   ├── UnknownModelError        no alias, hub id or folder of that name
│   ├── ModelDownloadError    the model hub cannot be reached or refuses access
│   ├── UntrustedModelError        loading it would run code that was not allowed by name
│   └── InvalidModelError       a folder or a file that holds no usable model
├── TrainingError
│   ├── InvalidBatchError        a batch of which a device would make wrong numbers without an error
│   └── NonFiniteError           NaN or infinity in the loss or in the gradients
├── InvalidTextError          a text that no tokenizer can read
├── ClusterError
│   ├── ClusterUnavailableError     a cluster that does not start, or has no worker left
│   ├── WorkerMismatchError       workers that would give other answers to one text
│   └── WorkerKilledError        a text that ends every worker that reads it
└── MagicError              a magic line that cannot be understood

KeyboardInterrupt
└── Interrupted             a run over many texts was stopped; what was done is in it

UserWarning
└── OpenMedWarning          something may go wrong without an error

Each says what happened, with the value, and then one thing to do. In a notebook it is one clean line, and still a
real error: it stops "Run All", and nbval and nbclient see it.
"""

from __future__ import annotations

from ._utils.text import collapse_whitespace


class OpenMedError(Exception):
    """Base of all errors here: what happened, and one thing to do about it.

    Args:
        what: What happened, as a sentence that shows the value at fault; never text of a note.
        remedy: One thing to do, as a sentence.

    Example:
        >>> error = OpenMedError("'mpss' names no device.", "Use 'mps'.")
        >>> str(error)
        "'mpss' names no device. Use 'mps'."
        >>> error.to_dict()
        {'error': 'OpenMedError', 'message': "'mpss' names no device.", 'remedy': "Use 'mps'."}
    """

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(what, remedy)
        self.message = collapse_whitespace(what)
        self.remedy = collapse_whitespace(remedy)

    def __str__(self) -> str:
        return f"{self.message} {self.remedy}"

    def to_dict(self) -> dict[str, str]:
        """Return the error as a mapping of strings, ready for JSON."""
        return {"error": type(self).__name__, "message": self.message, "remedy": self.remedy}

    def _render_traceback_(self) -> list[str]:
        """Return the one line that IPython prints instead of a traceback.

        IPython asks for this method in ``InteractiveShell.showtraceback``; a ``UsageError`` would be as short, but
        nbval lets it pass unseen (https://github.com/ipython/ipython/issues/14024).
        """
        return [f"{type(self).__name__}: {self}"]


class ConfigurationError(OpenMedError, ValueError):
    """A setting that openmed_nb does not have, or cannot use."""


class DeviceError(OpenMedError):
    """Something about the device."""


class UnknownDeviceError(DeviceError, ValueError):
    """A spelling that names no device."""


class DeviceUnavailableError(DeviceError, RuntimeError):
    """A device that this computer cannot use now."""


class DtypeOverflowError(DeviceError, OverflowError):
    """A number that no type of the device can hold; it would become infinite on the way."""


class TorchImportError(DeviceError, ImportError):
    """Torch is missing or cannot be imported."""


class ModelError(OpenMedError):
    """Something about a model."""


class UnknownModelError(ModelError, LookupError):
    """No alias, hub id or folder has that name."""


class ModelDownloadError(ModelError, OSError):
    """The model hub cannot be reached, or refuses access."""


class UntrustedModelError(ModelError, PermissionError):
    """Loading the model would run code that was not allowed by name."""


class InvalidModelError(ModelError, RuntimeError):
    """A folder or a file that holds no usable model."""


class TrainingError(OpenMedError):
    """Something about training."""


class InvalidBatchError(TrainingError, ValueError):
    """A batch of which a device would make wrong numbers without an error; the message counts, and shows no text."""


class NonFiniteError(TrainingError, FloatingPointError):
    """NaN or infinity in the loss or in the gradients."""


class InvalidTextError(OpenMedError, ValueError):
    """A text that no tokenizer can read; its words are never part of the message."""


class ClusterError(OpenMedError, RuntimeError):
    """Something about workers on this computer or on others."""


class ClusterUnavailableError(ClusterError):
    """A cluster that does not start, or that has no worker left."""


class WorkerMismatchError(ClusterError):
    """Workers that would give other answers to one text: other versions, or another model by one name."""


class WorkerKilledError(ClusterError):
    """A text that ends every worker that reads it; its words are never part of the message."""


class MagicError(OpenMedError, ValueError):
    """A magic line that cannot be understood."""


class OpenMedWarning(UserWarning):
    """What may go wrong without an error: what it is, and one thing to do about it."""


# How a run goes on that has no file; Python and IPython keep the last error under that name.
RESUME_IN_MEMORY = "import sys and repeat the call with resume=sys.last_value.annotations"


class RunInterrupted(KeyboardInterrupt):
    """A long run was stopped; this is not an ``Exception``, so that no ``except Exception`` catches it.

    It was over many texts, or over other things, of which ``noun`` and ``again`` say what they are and how to go on.
    """

    def __init__(self, done: int, annotations: object, file: str, noun: str = "text", again: str = "") -> None:
        self.done, self.annotations, self.file = done, annotations, file
        again = again or (f"repeat the call with resume={file!r}" if file else RESUME_IN_MEMORY)
        self.what = f"Interrupted after {done:,} {noun if done == 1 else f'{noun}s'}."
        self.remedy = f"To go on, {again}."
        super().__init__(done, annotations, file)

    def __str__(self) -> str:
        return f"{self.what} {self.remedy}"

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]
