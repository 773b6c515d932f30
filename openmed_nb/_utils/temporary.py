"""Locks of files, and temporary folders that the next run removes if their process was killed."""

from __future__ import annotations

import contextlib
import logging
import platform
import re
import shutil
import time
import uuid
import zlib
from collections.abc import Iterator
from pathlib import Path

# Folders of another computer are left alone for a day, because some network file systems do not share locks.
MAX_IDLE_SECONDS = 24 * 60 * 60

_LOCK_PATTERN = re.compile(r"\.openmed-([0-9a-f]{8})-[0-9a-f]{32}\.lock")


@contextlib.contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Lock a file for a with block, without waiting. The operating system releases the lock when the process ends.

    Raises:
        TimeoutError: If the file is already locked.
        OSError: If the file cannot be created or locked.
        NotImplementedError: If the file system has no locks.
    """
    from filelock import FileLock

    path.parent.stat()  # filelock would create a missing folder.
    # The debug messages of filelock contain the path. The filter passes messages of this module only.
    hidden = logging.Filter(__name__)
    logger = logging.getLogger("filelock")
    logger.addFilter(hidden)
    try:
        with FileLock(path, timeout=0):
            yield
    finally:
        logger.removeFilter(hidden)


@contextlib.contextmanager
def temporary_folder(parent: Path) -> Iterator[Path]:
    """Create a hidden folder in another folder for a with block, after removing those that killed processes left there."""
    remove_abandoned(parent)
    folder = parent / f".openmed-{_host()}-{uuid.uuid4().hex}"
    lock = Path(f"{folder}.lock")
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError, NotImplementedError):  # Nothing is removed that has no lock.
            stack.enter_context(file_lock(lock))
        folder.mkdir(mode=0o700)
        try:
            yield folder
        finally:
            _remove(folder, lock)


def remove_abandoned(parent: Path) -> list[Path]:
    """Remove the temporary folders in a folder whose process was killed, and return their paths."""
    abandoned = []
    for lock in parent.glob(".openmed-*.lock"):
        folder = lock.with_suffix("")
        match = _LOCK_PATTERN.fullmatch(lock.name)
        # Also if the folder belongs to another user, or if its process has just removed it.
        with contextlib.suppress(OSError, NotImplementedError):
            if match and (match[1] == _host() or _idle_seconds(folder) > MAX_IDLE_SECONDS):
                with file_lock(lock):
                    abandoned.append(folder)
                    _remove(folder, lock)
    return abandoned


def _remove(folder: Path, lock: Path) -> None:
    """Remove a folder and then its lock, whose file therefore exists if a process is killed in between."""
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(folder)
    with contextlib.suppress(OSError):  # Windows does not remove an open file; the lock removes it there.
        lock.unlink()


def _host() -> str:
    """Return a fingerprint of the name of this computer."""
    return f"{zlib.crc32(platform.node().encode()):08x}"


def _idle_seconds(folder: Path) -> float:
    """Return the time since a folder or a file in it was last changed."""
    return time.time() - max(path.stat().st_mtime for path in (folder, *folder.rglob("*")))
