"""What git says of the person's code: the commit, and how many files differ from it. Nothing else of it is read."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from ...devices.machine import run_command
from .surroundings import Code

APPLE_STUB = "/usr/bin/git"
"""On a Mac without developer tools, this one opens a window that offers to install them."""

MAC_PATHS = (
    *("/opt/homebrew/bin/git", "/usr/local/bin/git", "/Library/Developer/CommandLineTools/usr/bin/git"),
    "/Applications/Xcode.app/Contents/Developer/usr/bin/git",
)

OPTIONS = ("--no-optional-locks", "-c", "core.fsmonitor=false")
"""Nothing is written into the repository, and no program that it names is run."""

UNTRACKED = "??"

Run = Callable[[list[str]], str | None]


def git_program(system: str = sys.platform, found: str | None = None) -> str | None:
    """Return the full path of git, ``None`` where there is none that can be run without a question.

    Args:
        system: What ``sys.platform`` says.
        found: What stands in the ``PATH``; it is looked for where nobody says.

    Example:
        >>> git_program("linux", "/usr/bin/git")
        '/usr/bin/git'
    """
    found = found or shutil.which("git")
    if system != "darwin" or (found and found != APPLE_STUB):
        return found
    return next((path for path in MAC_PATHS if os.access(path, os.X_OK)), None)


def read_code(folder: Path, run: Run = run_command, program: str | None = None) -> Code:
    """Return the commit and the state of the repository around a folder.

    Args:
        folder: A folder in it.
        run: Runs a command for at most two seconds; ``None`` where it took longer or cannot be run.
        program: The path of git.

    Returns:
        The state; what git does not say is ``None``.
    """
    git = program or git_program()
    if git is None:
        return Code()
    asked = [git, "-C", str(folder), *OPTIONS]
    commit = parse_commit(run([*asked, "rev-parse", "--verify", "HEAD"]))
    status = run([*asked, "status", "--porcelain", "--untracked-files=normal"]) if commit else None
    return Code(commit) if status is None else Code(commit, *parse_status(status))


def parse_commit(output: str | None) -> str | None:
    r"""Return a commit, ``None`` where git named none.

    Example:
        >>> parse_commit("5c2d9f9a1e64d7d1f2f3c2e1d4a5b6c7d8e9f0a1\n"), parse_commit("HEAD\n")
        ('5c2d9f9a1e64d7d1f2f3c2e1d4a5b6c7d8e9f0a1', None)
    """
    text = (output or "").strip()
    return text if re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", text) else None


def parse_status(output: str) -> tuple[int, int]:
    r"""Return how many files are changed, and how many are unknown to git, from what ``git status --porcelain`` said.

    Example:
        >>> parse_status(" M training.py\nA  new.py\n?? notes.txt\n")
        (2, 1)
    """
    lines = [line for line in output.splitlines() if line]
    untracked = sum(line.startswith(UNTRACKED) for line in lines)
    return len(lines) - untracked, untracked
