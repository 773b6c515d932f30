"""Validation of path arguments."""

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
}


@pytest.mark.parametrize("path", UNUSABLE, ids=repr)
def test_check_path_rejects_invalid_values(path):
    with pytest.raises(ConfigurationError, match="Invalid path for folder"):
        check_path(path, "folder")


@pytest.mark.parametrize("taker", TAKERS.values(), ids=TAKERS)
def test_functions_reject_invalid_paths(taker):
    for path in UNUSABLE[3:]:
        with pytest.raises(OpenMedError):
            taker(path)


def test_functions_report_unreadable_directory(tmp_path):
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


def test_check_path_expands_home():
    assert check_path("~/no/such/file", "folder") == Path.home() / "no/such/file"
