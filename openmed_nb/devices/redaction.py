"""Removal of secrets, paths and names of users from texts that are stored or shared."""

from __future__ import annotations

import os
import re
from pathlib import Path

from .request import MASK, mask_secrets

SECRET_PATTERN = re.compile(
    r"\b(AKIA|ASIA)[A-Z0-9]{12,}"  # AWS access keys
    r"|\beyJ[\w-]{8,}(\.[\w-]+)*"  # JSON web tokens
    r"|\bxox[a-z]-[\w-]+"  # Slack tokens
    r"|\b(?=\w*[0-9])(?=\w*[A-Za-z])\w{32,}",  # any long sequence of letters and digits
    re.ASCII,
)
# Name of a function, a model or a model on the Hub. Spaces are not allowed, so that sentences are not stored.
NAME_PATTERN = re.compile(r"([\w.+<>-]{1,64}/)?[\w.+<>-]{1,64}")
MAX_VALUE_CHARACTERS = 10_000


def redact_secrets(text: str) -> str:
    """Mask everything in a text that looks like a secret, and replace unpaired surrogates, which UTF-8 cannot encode."""
    encodable = text[:MAX_VALUE_CHARACTERS].encode("utf-8", "replace").decode("utf-8")
    return SECRET_PATTERN.sub(MASK, mask_secrets("", encodable))


def home_folder() -> Path:
    """Return the home directory, or ``~`` if it is unknown."""
    return Path(os.path.expanduser("~"))  # noqa: PTH111 - Path.home raises for an unknown user


def sanitize_path(path: str | Path) -> str:
    """Return the last segment of a path, or the whole name of a model on the Hub. A name that may be private becomes ``***``.

    Example:
        >>> sanitize_path("/home/jane/models/mine"), sanitize_path("OpenMed/NER"), sanitize_path("a text, not a path")
        ('mine', 'OpenMed/NER', '***')
    """
    name = redact_secrets(str(path))
    if not NAME_PATTERN.fullmatch(name):
        name = re.split(r"[/\\]", name)[-1]
    is_user_name = home_folder().name in name.split("/")
    return name if NAME_PATTERN.fullmatch(name) and not is_user_name else MASK
