"""Every error that openmed_nb raises on purpose, and the checks of arguments that raise them.

OpenMedError
├── ConfigurationError      a setting that openmed_nb does not have or cannot use
├── DeviceError
│   ├── UnknownDevice       a spelling that names no device
│   ├── DeviceUnavailable   a device that this computer cannot use now
│   ├── NumberTooLarge      a number that no type of the device can hold
│   └── TorchUnusable       torch is missing or cannot be imported
├── ModelError
│   ├── UnknownModel        no alias, hub id or folder of that name
│   ├── ModelUnreachable    the model hub cannot be reached or refuses access
│   ├── ModelRefused        loading it would run code that was not allowed by name
│   └── ModelUnusable       a folder or a file that holds no usable model
├── TrainingError
│   ├── BatchRefused        a batch of which a device would make wrong numbers without an error
│   └── NonFinite           NaN or infinity in the loss or in the gradients
├── UnreadableText          a text that no tokenizer can read
├── ClusterError
│   ├── ClusterUnusable     a cluster that does not start, or has no worker left
│   ├── WorkersDiffer       workers that would give other answers to one text
│   └── WorkerKilled        a text that ends every worker that reads it
└── MagicError              a magic line that cannot be understood

KeyboardInterrupt
└── Interrupted             a run over many texts was stopped; what was done is in it

UserWarning
└── OpenMedWarning          something may go wrong without an error

Each says what happened, with the value, and then one thing to do. In a notebook it is one clean line, and still a
real error: it stops "Run All", and nbval and nbclient see it.

The checks stand below the errors: ``whole``, ``whole_or_none``, ``number`` and ``given_path`` return what a person passed as
an argument, ``check_flag`` and ``choice`` only look at it, and all refuse it with ``cannot_be``; ``wrong_type`` refuses without
the value. Any argument may be a note that was passed in the wrong place, so an error describes a value with ``describe_value``
alone, and the message of another library with ``cause``; ``nearest`` and ``offered`` suggest words that are known.
``warn`` says what may go wrong at the person's own line.
"""

from __future__ import annotations

import math
import operator
import os
import re
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path, PurePath
from typing import Any


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
        {'error': 'OpenMedError', 'what': "'mpss' names no device.", 'remedy': "Use 'mps'."}
    """

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(what, remedy)
        self.what = one_line(what)
        self.remedy = one_line(remedy)

    def __str__(self) -> str:
        return f"{self.what} {self.remedy}"

    def to_dict(self) -> dict[str, str]:
        """Return the error as a mapping of strings, ready for JSON."""
        return {"error": type(self).__name__, "what": self.what, "remedy": self.remedy}

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


class UnknownDevice(DeviceError, ValueError):
    """A spelling that names no device."""


class DeviceUnavailable(DeviceError, RuntimeError):
    """A device that this computer cannot use now."""


class NumberTooLarge(DeviceError, OverflowError):
    """A number that no type of the device can hold; it would become infinite on the way."""


class TorchUnusable(DeviceError, ImportError):
    """Torch is missing or cannot be imported."""


class ModelError(OpenMedError):
    """Something about a model."""


class UnknownModel(ModelError, LookupError):
    """No alias, hub id or folder has that name."""


class ModelUnreachable(ModelError, OSError):
    """The model hub cannot be reached, or refuses access."""


class ModelRefused(ModelError, PermissionError):
    """Loading the model would run code that was not allowed by name."""


class ModelUnusable(ModelError, RuntimeError):
    """A folder or a file that holds no usable model."""


class TrainingError(OpenMedError):
    """Something about training."""


class BatchRefused(TrainingError, ValueError):
    """A batch of which a device would make wrong numbers without an error; the message counts, and shows no text."""


class NonFinite(TrainingError, FloatingPointError):
    """NaN or infinity in the loss or in the gradients."""


class UnreadableText(OpenMedError, ValueError):
    """A text that no tokenizer can read; its words are never part of the message."""


class ClusterError(OpenMedError, RuntimeError):
    """Something about workers on this computer or on others."""


class ClusterUnusable(ClusterError):
    """A cluster that does not start, or that has no worker left."""


class WorkersDiffer(ClusterError):
    """Workers that would give other answers to one text: other versions, or another model by one name."""


class WorkerKilled(ClusterError):
    """A text that ends every worker that reads it; its words are never part of the message."""


class MagicError(OpenMedError, ValueError):
    """A magic line that cannot be understood."""


class OpenMedWarning(UserWarning):
    """What may go wrong without an error: what it is, and one thing to do about it."""


def warn(message: str) -> None:
    """Warn at the line of a person's code that led here: Python shows a warning once for each line."""
    warnings.warn(message, OpenMedWarning, stacklevel=level_outside(PASSED_THROUGH))


# No person's line is in these: ours, and those that call ours.
PASSED_THROUGH = (
    "openmed_nb",
    "IPython",
    "contextlib",
    *("torch", "transformers", "accelerate", "lightning", "pytorch_lightning"),
)


def level_outside(packages: Iterable[str]) -> int:
    """Return the ``stacklevel``, for the caller, of the first frame from there up that is of none of these packages."""
    inside = tuple(f"{package}." for package in packages)
    level, frame = 1, sys._getframe(1)  # noqa: SLF001 - the only way to walk the stack without reading files
    while frame.f_back is not None and f"{frame.f_globals.get('__name__')}.".startswith(inside):
        level, frame = level + 1, frame.f_back
    return level


# How a run goes on that has no file; Python and IPython keep the last error under that name.
IN_MEMORY = "import sys and repeat the call with resume=sys.last_value.annotations"


class Interrupted(KeyboardInterrupt):
    """A long run was stopped; this is not an ``Exception``, so that no ``except Exception`` catches it.

    It was over many texts, or over other things, of which ``noun`` and ``again`` say what they are and how to go on.
    """

    def __init__(self, done: int, annotations: object, file: str, noun: str = "text", again: str = "") -> None:
        self.done, self.annotations, self.file = done, annotations, file
        again = again or (f"repeat the call with resume={file!r}" if file else IN_MEMORY)
        self.what = f"Interrupted after {done:,} {noun if done == 1 else f'{noun}s'}."
        self.remedy = f"To go on, {again}."
        super().__init__(done, annotations, file)

    def __str__(self) -> str:
        return f"{self.what} {self.remedy}"

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


def one_line(text: str) -> str:
    r"""Return the text with every run of white space, line ends included, as one space.

    Example:
        >>> one_line("two\n  lines")
        'two lines'
    """
    return visible(" ".join(text.split()))


CONTROL_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"} | {
    0x7F: 0x2421,
    **dict.fromkeys(range(0x80, 0xA0), 0xFFFD),
}


def visible(text: str) -> str:
    r"""Return the text with control characters as pictures, so that a note or a model cannot steer the terminal.

    Example:
        >>> visible("\x1b[2J cleared\r\n")
        '␛[2J cleared\n'
    """
    return text.replace("\r\n", "\n").translate(CONTROL_PICTURES)


def shorten(text: str, length: int = 60) -> str:
    """Return a text in one line, cut off after ``length`` characters.

    Example:
        >>> shorten("a" * 70) == "a" * 60 + "…"
        True
    """
    line = one_line(text)
    return line if len(line) <= length else line[:length] + "…"


# The longest string that an error shows, and the longest that consists of shorter names: a path, a model on the hub, a class.
MAX_SHOWN_CHARACTERS = 40
MAX_COMPOUND_CHARACTERS = 160

# What an error shows of a string: visible ASCII characters without a space.
IDENTIFIER_PATTERN = re.compile(r"[!-~]*")
COMPOUND_PATTERN = re.compile(r"(<class ')?[/~.]*\w{1,40}([./\\:_-]+\w{1,40})+('>)?", re.ASCII)

# A part of a message in quotation marks, an apostrophe inside a word not being one.
QUOTED_PATTERN = re.compile(r"""(?<!\w)(?:[bru]{1,2}(?=['"]))?(['"`])(.*?)\1(?!\w)""", re.DOTALL)


def is_identifier(text: str) -> bool:
    """Return whether a text is short and without spaces, so that an error may show it."""
    if len(text) <= MAX_SHOWN_CHARACTERS:
        return IDENTIFIER_PATTERN.fullmatch(text) is not None
    return len(text) <= MAX_COMPOUND_CHARACTERS and COMPOUND_PATTERN.fullmatch(text) is not None


def describe_value(value: Any) -> str:
    """Return a value as an error may show it: what may be a note is described, not quoted.

    Shown are ``None``, truth values, numbers, and short strings and paths of ASCII without spaces.

    Example:
        >>> describe_value("cuad"), describe_value(0.5), describe_value("Has asthma."), describe_value(["asthma"])
        ("'cuad'", '0.5', 'a string of 11 characters', 'a list of 1 item')
    """
    kind = type(value)
    if value is None or kind in {bool, int, float, complex, type(...), range}:
        described = repr(value)
        if len(described) > MAX_SHOWN_CHARACTERS:
            described = "a number of many digits"
    elif isinstance(value, (str, PurePath)):
        text = str.__str__(value) if isinstance(value, str) else str(value)
        noun = "string" if isinstance(value, str) else "path"
        described = (
            repr(text) if is_identifier(text) else f"a {noun} of {len(text):,} character{'' if len(text) == 1 else 's'}"
        )
    elif kind in {list, tuple, set, frozenset, dict}:
        described = f"a {kind.__name__} of {len(value):,} item{'' if len(value) == 1 else 's'}"
    elif kind in {bytes, bytearray}:
        described = f"{len(value):,} bytes"
    elif kind.__module__ == "torch" and kind.__name__ in {"dtype", "device"}:
        described = str(value)
    else:
        described = f"an object of type {short_type_name(value)}"
    return described


def describe_names(names: Iterable[str]) -> str:
    """Return names that a caller made up, such as unknown options, as an error may show them.

    Example:
        >>> describe_names(["speed", "Has asthma."])
        'speed, …'
    """
    return ", ".join(sorted({name if is_identifier(name) else "…" for name in names}))


def model_label(name: str) -> str:
    """Return the name of a model as progress may show it: a long one, or one with spaces, may be a note."""
    return name if is_identifier(name) else "a model"


def describe_file(path: PurePath) -> str:
    """Return the name of a file as an error may show it: a long one, or one with spaces, may be a note.

    Example:
        >>> describe_file(Path("results.json")), describe_file(Path("Has asthma."))
        ("'results.json'", "'…'")
    """
    return repr(path.name) if is_identifier(path.name) else "'…'"


def short_type_name(value: Any) -> str:
    """Return the name of a value's type, unless a program has made it of a text."""
    name = type(value).__name__
    return name if is_identifier(name) else "a class with a long name"


def without_quotes(message: str) -> str:
    """Return a message of another library without what it quotes, if that may be a note.

    Example:
        >>> without_quotes("invalid int value: 'Has asthma.'"), without_quotes("can't find 'cuda'")
        ("invalid int value: '…'", "can't find 'cuda'")
    """

    def shown(match: re.Match[str]) -> str:
        return match[0] if is_identifier(match[2]) else f"{match[1]}…{match[1]}"

    return QUOTED_PATTERN.sub(shown, message)


def parser_problem(message: str) -> str:
    """Return what argparse says of a line, without the words of the line: they may be part of a note.

    Example:
        >>> parser_problem("unrecognized arguments: Has asthma"), parser_problem("argument --length: expected one argument")
        ('2 unexpected arguments', 'argument --length: expected one argument')
    """
    kind, _, words = message.partition(": ")
    if kind == "unrecognized arguments":
        return f"{len(words.split())} unexpected arguments"
    return "an ambiguous option" if kind == "ambiguous option" else without_quotes(message)


def check_is_real(module: Any, needs: str, error: type[OpenMedError] = ConfigurationError) -> None:
    """Check that an imported module is the package of that name, and not a file of the person's own beside the notebook."""
    if not hasattr(module, needs):
        where = getattr(module, "__file__", None) or f"A module named {module.__name__!r} without a file"
        raise error(f"{where} hides the real {module.__name__}.", "Rename it, then restart the kernel.")


def cannot_be(name: str, value: Any, remedy: str) -> ConfigurationError:
    """Return the error for an argument that has a wrong value."""
    return ConfigurationError(f"{name} cannot be {describe_value(value)}.", remedy)


def wrong_type(name: str, value: Any, remedy: str) -> ConfigurationError:
    """Return the error for an argument of a wrong type, which does not show the value."""
    return ConfigurationError(f"{name} cannot be of type {short_type_name(value)}.", remedy)


def check_flag(name: str, value: Any) -> None:
    """Refuse what is not a bool: many values, such as tensors, are neither clearly true nor clearly false."""
    if not isinstance(value, bool):
        raise cannot_be(name, value, "Pass True or False.")


def whole_number(value: Any) -> int | None:
    """Return a whole number as Python's own, such as one of numpy; ``None`` for anything else, also for what is true or false."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def whole(name: str, value: Any, least: int = 1, most: int | None = None, otherwise: str = "") -> int:
    """Return a whole number that a person passes, as Python's own.

    Args:
        name: Which argument it is.
        value: What was passed.
        least: The smallest that will do.
        most: The largest that will do; ``None`` where any will.
        otherwise: What else will do, as the end of the remedy.

    Raises:
        ConfigurationError: For anything else.

    Example:
        >>> whole("batch_size", 0, most=4096)
        Traceback (most recent call last):
        ...
        openmed_nb.errors.ConfigurationError: batch_size cannot be 0. Pass a whole number from 1 to 4,096.
    """
    found = whole_number(value)
    if found is None or found < least or (most is not None and found > most):
        upwards = f"from {least:,}" + ("" if most is None else f" to {most:,}")
        raise cannot_be(name, value, f"Pass a whole number {upwards}{otherwise}.")
    return found


def whole_or_none(name: str, value: Any, least: int = 1, most: int | None = None, otherwise: str = "") -> int | None:
    """Return a whole number as :func:`whole` does, or ``None`` where that was passed."""
    return None if value is None else whole(name, value, least, most, otherwise)


def number(name: str, value: Any, most: float = math.inf, *, above: float | None = None, such_as: str = "") -> float:
    """Return a finite number that a person passes, from 0, or above another.

    Args:
        name: Which argument it is.
        value: What was passed.
        most: The largest that will do.
        above: What it has to be above; ``None`` for any from 0.
        such_as: An example, for the remedy.

    Raises:
        ConfigurationError: For anything else.

    Example:
        >>> number("clip", 0, above=0, such_as="1.0, or None")
        Traceback (most recent call last):
        ...
        openmed_nb.errors.ConfigurationError: clip cannot be 0. Pass a number above 0, such as 1.0, or None.
    """
    is_one = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not is_one or value > most or (value < 0 if above is None else value <= above):
        upwards = ("from 0" if above is None else f"above {above:g}") + ("" if most == math.inf else f" up to {most:g}")
        example = f", such as {such_as}" if such_as else ""
        raise cannot_be(name, value, f"Pass a number {upwards}{example}.")
    return float(value)


def nearest(word: str, words: Iterable[str], cutoff: float = 0.4) -> str:
    """Return the word that another was probably meant to be, empty where none is near.

    Example:
        >>> nearest("cuad", ["cpu", "cuda"]), nearest("xyz", ["cpu", "cuda"])
        ('cuda', '')
    """
    import difflib

    return next(iter(difflib.get_close_matches(word, list(words), n=1, cutoff=cutoff)), "")


def offered(word: str, words: Iterable[str]) -> str:
    """Return what to do about an unknown word: pass the one that was probably meant, or else one of all that are known.

    Example:
        >>> offered("cuad", ["cpu", "cuda"]), offered("xyz", ["cpu", "cuda"])
        ("Did you mean 'cuda'?", 'Known are cpu, cuda.')
    """
    known = list(words)
    near = nearest(word, known)
    return f"Did you mean {near!r}?" if near else f"Known are {', '.join(known)}."


def choice(name: str, value: Any, known: Iterable[str]) -> None:
    """Refuse what is not one of the words that an argument may be.

    Example:
        >>> choice("library", "trainr", ["trainer", "lightning"])
        Traceback (most recent call last):
        ...
        openmed_nb.errors.ConfigurationError: library cannot be 'trainr'. Did you mean 'trainer'?
    """
    words = list(known)
    if not isinstance(value, str) or value not in words:
        raise cannot_be(name, value, offered(value if isinstance(value, str) else "", words))


def given_path(path: Any, what: str) -> Path:
    """Return a path that a person passes, with their home in the place of ``~``; nothing need be there."""
    reason = ""
    try:
        found = Path(path).expanduser()
        os.stat(found)  # noqa: PTH116 - it answers alike in every Python; Path.exists hides some errors in some
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (TypeError, ValueError, RuntimeError, OSError) as error:
        reason = getattr(error, "strerror", None) or "it is not a text that names a file"
    if reason:  # Outside of the handler: the other error has the path, and would be the context of this one.
        unusable = f"What was passed as {what} is not a usable path: {reason}."
        raise ConfigurationError(unusable, "Pass another path.")
    return found


def cause(error: BaseException) -> str:
    """Return what an error of another library says, in one short line without a full stop, and without what may be a note."""
    return shorten(without_quotes(str(error)), 200).rstrip(".") or short_type_name(error)
