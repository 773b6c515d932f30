"""Every path that a person passes is checked in one place: what cannot be one is a clear error, and nothing is lost."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import openmed_nb as nb
from openmed_nb._utils.validation import check_path
from openmed_nb.errors import ConfigurationError, OpenMedError

UNUSABLE = [None, 5, b"x", "a\0b", "a\ud800", "~nobody.is.here/x", "x" * 300]

TAKERS: dict[str, Callable[[Any], Any]] = {
    "resume": lambda path: nb.annotate(["no"], "bundled_small", resume=path, progress=False),
    "logbook": lambda path: nb.logbook().save(path),
    "read": nb.runbook.Logbook.read,
    "handoff": lambda path: nb.handoff(path, "bundled_small", ["no"], device="cpu"),
    "guards": lambda path: nb.Guards(folder=path),
}


@pytest.mark.parametrize("path", UNUSABLE, ids=repr)
def test_what_is_no_path(path):
    """Another type, a NUL, half a character, an unknown home and a name that is too long give one clear error."""
    with pytest.raises(ConfigurationError, match="Invalid path for folder"):
        check_path(path, "folder")


@pytest.mark.parametrize("taker", TAKERS.values(), ids=TAKERS)
def test_every_function_checks_its_path(taker):
    """Whatever a function does with a path, an unusable one ends it with an error of ours."""
    for path in UNUSABLE[3:]:
        with pytest.raises(OpenMedError):
            taker(path)


def test_folder_that_may_not_be_read(tmp_path):
    """A folder of somebody else gives the same clear error, whoever asks."""
    tmp_path.chmod(0o755)
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o000)
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        for path in (closed, closed / "file.json"):
            for name in ("resume", "logbook", "read", "handoff"):
                with pytest.raises(OpenMedError):
                    TAKERS[name](path)
    finally:
        if root:
            os.seteuid(0)
        closed.chmod(0o700)


def test_home_is_found():
    """A tilde stands for the person's home, and nothing need be there."""
    assert check_path("~/no/such/file", "folder") == Path.home() / "no/such/file"
