"""SHA256SUMS: the checksums of all files of a bundle, in the form that ``sha256sum -c`` and ``shasum -a 256 -c`` read."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from ...errors import ConfigurationError
from ..logbook.datasets import sha256_of

SUMS = "SHA256SUMS"

LINE = re.compile(r"([0-9a-f]{64})  (.+)")


def write_checksums(bundle: Path) -> None:
    """Write the checksums of all files that are in a bundle now.

    Raises:
        OSError: Where one cannot be read, or the file cannot be written.
    """
    files = sorted(file for file in bundle.rglob("*") if file.is_file() and file.name != SUMS)
    lines = (f"{sha256_of(file)}  {file.relative_to(bundle).as_posix()}\n" for file in files)
    (bundle / SUMS).write_text("".join(lines), "utf-8")


def changed_files(bundle: Path, needed: Iterable[str] = ()) -> dict[str, str]:
    """Return which files of a bundle are not as they were: ``"changed"``, ``"missing"`` or ``"without a checksum"``, by name.

    Args:
        bundle: The folder.
        needed: Files that must have a checksum.

    Raises:
        ConfigurationError: Where there are no checksums.
    """
    try:
        text = (bundle / SUMS).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        what = f"{bundle.name!r} is no bundle: its {SUMS} cannot be read."
        raise ConfigurationError(what, "Name the folder that nb.handoff() has written.") from error
    wanted = {name: checksum for checksum, name in LINE.findall(text)}
    found = {name: _state(bundle / name, checksum) for name, checksum in wanted.items()}
    bare = dict.fromkeys((name for name in needed if name not in wanted), "without a checksum")
    return {name: state for name, state in (found | bare).items() if state}


def _state(file: Path, checksum: str) -> str:
    try:
        return "" if sha256_of(file) == checksum else "changed"
    except OSError:
        return "missing"
