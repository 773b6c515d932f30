"""What git says of the person's code: the commit, and how many files differ from it. Nothing else of it is read."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from .surroundings import Code

APPLE_STUB = "/usr/bin/git"
"""On a Mac without developer tools, this one opens a window that offers to install them."""

MAC_PATHS = (
    *("/opt/homebrew/bin/git", "/usr/local/bin/git", "/Library/Developer/CommandLineTools/usr/bin/git"),
    "/Applications/Xcode.app/Contents/Developer/usr/bin/git",
)

OPTIONS = ("--no-optional-locks", "-c", "core.fsmonitor=false")
"""Nothing is written into the repository, and the program that it names for watching files is not run."""

STATUS = ("status", "--porcelain", "--untracked-files=normal", "--no-renames", "--ignore-submodules=dirty")

FILTERS = ("config", "--null", "--name-only", "--get-regexp", r"^filter\..*\.(clean|smudge|process|required)$")
"""The programs that it names for reading files; ``git status`` would run them (git's ``convert.c``), so each gets no value."""

QUIET = {"GIT_NO_LAZY_FETCH": "1", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
TIMEOUT = 2

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


def run_git(command: list[str]) -> str | None:
    """Return what git prints within two seconds, ``None`` where it cannot be run or fails.

    Its own variables, such as ``GIT_DIR``, are taken away: they would let it answer for another repository.
    """
    ours = {name: value for name, value in os.environ.items() if not name.upper().startswith("GIT_")}
    try:
        done = subprocess.run(  # noqa: S603 - the commands are ours
            command,
            capture_output=True,
            timeout=TIMEOUT,
            env=ours | QUIET,
            check=False,
            encoding="utf-8",
            errors="replace",
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout


def read_code(folder: Path, run: Run = run_git, program: str | None = None) -> Code:
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
    off = without_filters(run([*asked, *FILTERS])) if commit else None
    status = None if off is None else run([*asked, *off, *STATUS])
    return Code(commit) if status is None else Code(commit, *parse_status(status))


def parse_commit(output: str | None) -> str | None:
    r"""Return a commit, ``None`` where git named none.

    Example:
        >>> parse_commit("5c2d9f9a1e64d7d1f2f3c2e1d4a5b6c7d8e9f0a1\n"), parse_commit("HEAD\n")
        ('5c2d9f9a1e64d7d1f2f3c2e1d4a5b6c7d8e9f0a1', None)
    """
    text = (output or "").strip()
    return text if re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", text) else None


def without_filters(names: str | None) -> list[str] | None:
    r"""Return options of git that take the programs away that a repository names for reading files.

    Args:
        names: The names of those settings, as ``git config --null`` prints them; ``None`` where git did not answer.

    Returns:
        The options; ``None`` where a name cannot be written as one, so that git must not be asked.

    Example:
        >>> without_filters("filter.lfs.clean\0filter.lfs.required\0")
        ['-c', 'filter.lfs.clean=', '-c', 'filter.lfs.required=']
    """
    if names is None or "=" in names:
        return None
    return [option for name in names.split("\0") if name for option in ("-c", f"{name}=")]


def parse_status(output: str) -> tuple[int, int]:
    r"""Return how many files are changed, and how many are unknown to git, from what ``git status --porcelain`` said.

    Example:
        >>> parse_status(" M training.py\nA  new.py\n?? notes.txt\n")
        (2, 1)
    """
    lines = [line for line in output.splitlines() if line]
    untracked = sum(line.startswith(UNTRACKED) for line in lines)
    return len(lines) - untracked, untracked
