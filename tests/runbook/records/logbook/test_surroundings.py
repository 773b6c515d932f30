"""Conditions of a run in the logbook: determinism, storage, git, other processes, connection times."""

import itertools
import os
import re
import shutil
import socket
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import psutil
import pytest
import torch

import openmed_nb as nb
from helpers.processes import busy_processes
from openmed_nb.devices.system_status import BackgroundLoadReader
from openmed_nb.runbook.records.gathering import (
    LATENCY_SAMPLES,
    locate_storage,
    measure_latency,
    read_background,
    read_code,
    read_randomness,
)
from openmed_nb.runbook.records.logbook import BackgroundLoad, Code

MOUNTS = Path(__file__).parents[3] / "recorded" / "mounts"
NOTE = "The patient John Smith has diabetes mellitus."


def test_read_randomness_returns_settings_of_torch():
    before = torch.get_deterministic_debug_mode()
    torch.use_deterministic_algorithms(mode=True)
    try:
        assert read_randomness(uses_cudnn=False).deterministic_algorithms is True
    finally:
        torch.set_deterministic_debug_mode(before)
    assert (read_randomness(True).cudnn_benchmark, read_randomness(False).cudnn_benchmark) == (False, None)


class Mount(NamedTuple):
    """Mounted file system with the field names of psutil."""

    mountpoint: str
    fstype: str


def load_mounts(name):
    """Return the mounts in a recorded output of ``mount`` on a Mac."""
    output = (MOUNTS / f"{name}.txt").read_text("utf-8")
    return list(itertools.starmap(Mount, re.findall(r"^.+? on (/.*) \((\w+)[^()]*\)$", output, re.MULTILINE)))


BIG_SUR = load_mounts("mac_big_sur_macfuse")
CATALINA = load_mounts("mac_catalina")
VOLUMES = load_mounts("mac_volumes")
ROOT = Mount("/", "ext4")
LOCATIONS = [
    (BIG_SUR, "/Users/me/.cache/huggingface", "apfs", "local"),
    (BIG_SUR, "/Volumes/Test/models", "macfuse", "network"),
    (CATALINA, "/System/Volumes/Data/Users/me", "apfs", "local"),
    (VOLUMES, "/Volumes/share/models", "smbfs", "network"),
    (VOLUMES, "/Volumes/backups", "nfs", "network"),
    (VOLUMES, "/Volumes/shared", "apfs", "local"),
    ([ROOT, Mount("/data", "ext4"), Mount("/data", "fuse.sshfs")], "/data", "fuse.sshfs", "network"),
    ([], "/x", None, "unknown"),
]


@pytest.mark.parametrize(("mounts", "path", "filesystem", "kind"), LOCATIONS)
def test_locate_storage_uses_the_deepest_mount(mounts, path, filesystem, kind):
    location = locate_storage({"model": Path(path)}, mounts, Path("/Users/me"))["model"]

    assert (location.filesystem, location.kind) == (filesystem, kind)


CLOUD_PATHS = [
    ("Library/Mobile Documents/com~apple~CloudDocs/models/a", "cloud"),
    ("Library/CloudStorage/GoogleDrive-me/models", "cloud"),
    (".cache/huggingface", "local"),
]


@pytest.mark.parametrize(("path", "kind"), CLOUD_PATHS)
def test_locate_storage_detects_cloud_folders(tmp_path, path, kind):
    """ICloud Drive and other providers, unless another file system is mounted there."""
    home = tmp_path / "me"

    assert locate_storage({"model": home / path}, [Mount("/", "apfs")], home)["model"].kind == kind
    assert locate_storage({"model": home / path}, [Mount("/", "smbfs")], home)["model"].kind == "network"


@pytest.fixture
def git(tmp_path, monkeypatch):
    """Function that runs git in a new working directory with one commit and a remote with a password."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    identity = ("-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")

    def git(*arguments):
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    git("init", "--quiet")
    (tmp_path / "training.py").write_text("x = 1\n", "utf-8")
    git("add", ".")
    git("commit", "--quiet", "--message", NOTE)
    git("remote", "add", "origin", "https://me:hf_secret123456@host.example/x.git")
    monkeypatch.chdir(tmp_path)
    return git


def test_read_code_returns_commit_and_number_of_changes(git, tmp_path):
    clean = read_code()
    (tmp_path / "training.py").write_text("x = 2\n", "utf-8")
    (tmp_path / "John Smith.txt").write_text(NOTE, "utf-8")
    dirty = read_code()
    git("add", ".")

    assert (len(clean.commit), clean.changed) == (40, 0)
    assert (dirty, read_code()) == (Code(clean.commit, 2), dirty)


@pytest.mark.usefixtures("git")
def test_read_code_returns_unknown_without_git_or_repository(tmp_path, tmp_path_factory, monkeypatch):
    (tmp_path / ".git" / "index").write_bytes(b"corrupt")
    assert read_code() == read_code(lambda _command: None) == Code()
    monkeypatch.chdir(tmp_path_factory.mktemp("other"))
    assert read_code() == Code()


@pytest.mark.real_computer
def test_logbook_counts_busy_processes():
    with busy_processes():
        book = nb.logbook(applications=True)

    assert book.background.busy_processes >= 1
    assert 0 < book.background.cpu_fraction <= 1
    assert book.background.names


def make_process(pid, name, percent):
    return SimpleNamespace(pid=pid, info={"name": name, "cpu_percent": percent})


@pytest.mark.parametrize(("fraction", "load"), [(0.4, BackgroundLoad(2, 0.4)), (None, BackgroundLoad())])
def test_background_load_names_the_busiest_other_processes_on_request(monkeypatch, fraction, load):
    """This process is not one of them."""
    processes = [
        make_process(os.getpid(), "python", 40.0),
        make_process(-1, "idle", 1.0),
        make_process(-2, "mail", 20.0),
        make_process(-3, "hf_token123456", 100.0),
        make_process(-4, None, None),
    ]
    monkeypatch.setattr(psutil, "process_iter", lambda _attributes: processes)
    monkeypatch.setattr(BackgroundLoadReader, "__call__", lambda _reader: fraction)

    assert read_background(names=False) == load
    assert read_background(names=True).names == (("***", "mail") if fraction else None)


def test_measure_latency_counts_failures():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        success = measure_latency(f"127.0.0.1:{port}")
    failure = measure_latency(f"127.0.0.1:{port}")

    assert (success.host, success.port, success.failures) == ("127.0.0.1", port, 0)
    assert success.median_seconds > 0
    assert (failure.failures, failure.median_seconds) == (LATENCY_SAMPLES, None)
