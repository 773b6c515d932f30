"""Conditions of a run in the logbook: loader, seeds, storage, git, other processes, connection times."""

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import psutil
import pytest
import torch

import openmed_nb as nb
from openmed_nb.runbook.records.logbook.gathering import (
    describe_loader,
    git_program,
    locate_storage,
    measure_latency,
    read_code,
    read_randomness,
    sample_background_load,
)
from openmed_nb.runbook.records.logbook.sections import BackgroundLoad, Code

MOUNTS = Path(__file__).parents[3] / "recorded" / "mounts"
NOTE = "The patient John Smith has diabetes mellitus."


def test_describe_loader_reads_no_items():
    loader = torch.utils.data.DataLoader([1, 2], num_workers=2, worker_init_fn=print, generator=torch.Generator())
    description = describe_loader(loader)

    assert (description.workers, description.worker_seeding) == (2, "worker_init_fn")
    assert (description.seeded, description.prefetch_factor) == (True, 2)
    assert describe_loader(torch.utils.data.DataLoader([1], num_workers=1)).worker_seeding == "torch"
    assert describe_loader(torch.utils.data.DataLoader([1])).worker_seeding == "no workers"
    assert describe_loader(None) is None


def test_read_randomness_returns_settings_of_torch():
    before = torch.get_deterministic_debug_mode()
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    try:
        randomness = read_randomness()
    finally:
        torch.set_deterministic_debug_mode(before)

    assert (randomness.deterministic_algorithms, randomness.warn_only) == (True, True)
    assert read_randomness().deterministic_algorithms is (before != 0)


class Mount(NamedTuple):
    """Mounted file system with the field names of psutil."""

    mountpoint: str
    fstype: str
    opts: str = ""


def load_mounts(name):
    """Return the mounts in a recorded output of ``mount`` on a Mac."""
    output = (MOUNTS / f"{name}.txt").read_text("utf-8")
    mounts = re.findall(r"^.+? on (/.*) \((\w+)(?:, )?([^()]*)\)$", output, re.MULTILINE)
    return [Mount(point, filesystem, options.replace(", ", ",")) for point, filesystem, options in mounts]


BIG_SUR = load_mounts("mac_big_sur_macfuse")
CATALINA = load_mounts("mac_catalina")
VOLUMES = load_mounts("mac_volumes")
ROOT = Mount("/", "ext4")
LOCATIONS = [
    (BIG_SUR, "/Users/me/.cache/huggingface", "apfs", "local"),
    (BIG_SUR, "/Volumes/Test/models", "macfuse", "network"),
    (CATALINA, "/private/var/vm/sleepimage", "apfs", "local"),
    (CATALINA, "/System/Volumes/Data/Users/me", "apfs", "local"),
    (VOLUMES, "/Volumes/share/models", "smbfs", "network"),
    (VOLUMES, "/Volumes/backups", "nfs", "network"),
    (VOLUMES, "/Volumes/USB STICK/models", "exfat", "external"),
    (VOLUMES, "/Volumes/My (Old) Card/a", "msdos", "external"),
    (VOLUMES, "/Volumes/shared", "apfs", "local"),
    ([Mount("/", "overlay")], "/x", "overlay", "local"),
    ([ROOT, Mount("/run", "tmpfs")], "/run/x", "tmpfs", "memory"),
    ([ROOT, Mount("/nfs", "nfs4")], "/nfs/me", "nfs4", "network"),
    ([ROOT, Mount("/mnt/c", "9p")], "/mnt/c", "9p", "network"),
    ([ROOT, Mount("/data", "ext4"), Mount("/data", "fuse.sshfs")], "/data", "fuse.sshfs", "network"),
    ([ROOT, Mount("/run/media/me/STICK", "vfat")], "/run/media/me/STICK", "vfat", "external"),
    ([Mount("/", "NTFS", "rw,removable")], "/x", "NTFS", "external"),
    ([Mount("/", "NTFS", "rw,remote")], "/x", "NTFS", "network"),
    ([], "/x", None, "unknown"),
    ([ROOT], "~nobody.is.here/x", "ext4", "local"),
]


@pytest.mark.parametrize(("mounts", "path", "filesystem", "kind"), LOCATIONS)
def test_locate_storage_uses_the_deepest_mount(mounts, path, filesystem, kind):
    (location,) = locate_storage({"model": Path(path)}, mounts, Path("/Users/me"), lambda _command: "")

    assert (location.filesystem, location.kind) == (filesystem, kind)
    assert "erik" not in repr(location)


def test_locate_storage_accepts_a_symlink_loop(tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (location,) = locate_storage({"model": tmp_path / "loop" / "hub"}, [ROOT])

    assert location.kind == "local"


CLOUD_PATHS = [
    ("Library/Mobile Documents/com~apple~CloudDocs/models/a", "cloud"),
    ("Library/CloudStorage/GoogleDrive-me/models", "cloud"),
    ("Library/Caches/models", "local"),
    ("Desktop/models/a", "cloud"),
    ("Documents/models", "cloud"),
    ("Documents2/models", "local"),
    (".cache/huggingface", "local"),
]


@pytest.mark.parametrize(("path", "kind"), CLOUD_PATHS)
def test_locate_storage_detects_cloud_folders(tmp_path, path, kind):
    """Folders of iCloud Drive and other providers, and folders with a cloud attribute of macOS, are cloud storage."""
    home = tmp_path / "me"
    attributes = {"Desktop": "com.apple.icloud.desktop", "Documents": "com.apple.file-provider-domain-id"}
    for folder in (*attributes, "Documents2"):
        (home / folder).mkdir(parents=True)

    def xattr(command):
        """Return the output for several files: the name and the attributes of each file."""
        assert command[0] == "/usr/bin/xattr"
        assert all(Path(name).exists() and home in Path(name).parents for name in command[1:])
        return "".join(f"{name}: {attributes.get(Path(name).name, 'com.apple.FinderInfo')}\n" for name in command[1:])

    (location,) = locate_storage({"model": home / path}, [Mount("/", "apfs")], home, xattr)

    assert (location.kind, location.filesystem) == (kind, "apfs")


def test_locate_storage_reads_attributes_only_in_the_home_on_apfs(tmp_path):
    mounts = [Mount("/", "apfs"), Mount("/net", "smbfs"), Mount(str(tmp_path / "disk"), "ext4")]
    folders = {"a": Path("/opt/a"), "b": Path("/net/Library/CloudStorage"), "c": tmp_path / "disk" / "Desktop"}
    locations = locate_storage(folders, mounts, tmp_path, pytest.fail)

    assert [location.kind for location in locations] == ["local", "network", "local"]


@pytest.fixture
def git(tmp_path):
    """Function that runs git in a new repository with one commit and a remote with a password."""
    program = git_program()
    if program is None:
        pytest.skip("git is not installed")
    identity = ("-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")

    def git(*arguments):
        subprocess.run([program, "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    git("init", "--quiet")
    (tmp_path / "training.py").write_text("x = 1\n", "utf-8")
    git("add", ".")
    git("commit", "--quiet", "--message", NOTE)
    git("remote", "add", "origin", "https://me:hf_secret123456@host.example/x.git")
    return git


def test_read_code_returns_commit_and_number_of_changes(git, tmp_path):
    clean = read_code(tmp_path)
    (tmp_path / "training.py").write_text("x = 2\n", "utf-8")
    (tmp_path / "John Smith.txt").write_text(NOTE, "utf-8")
    dirty = read_code(tmp_path)
    git("add", ".")

    assert (len(clean.commit), clean.changed, clean.untracked, clean.dirty) == (40, 0, 0, False)
    assert (dirty.commit, dirty.changed, dirty.untracked, dirty.dirty) == (clean.commit, 1, 1, True)
    assert read_code(tmp_path).changed == 2


@pytest.mark.usefixtures("git")
def test_read_code_ignores_git_variables(tmp_path, tmp_path_factory, monkeypatch):
    commit = read_code(tmp_path).commit
    other = tmp_path_factory.mktemp("other")
    monkeypatch.setenv("GIT_DIR", str(other / "nowhere"))
    monkeypatch.setenv("GIT_WORK_TREE", str(other))
    monkeypatch.setenv("GIT_INDEX_FILE", str(other / "index"))

    assert read_code(tmp_path) == Code(commit, 0, 0)


@pytest.mark.parametrize("name", ["x", "a=b"])
def test_read_code_does_not_run_filters_of_the_repository(git, tmp_path, tmp_path_factory, name):
    """If a filter cannot be disabled, changes are not counted."""
    trace = tmp_path_factory.mktemp("trace") / "ran"
    git("config", f"filter.{name}.clean", f"touch '{trace}'; cat")
    git("config", f"filter.{name}.required", "true")
    (tmp_path / ".gitattributes").write_text(f"* filter={name}\n", "utf-8")
    (tmp_path / "training.py").write_text("x = 3\n", "utf-8")
    code = read_code(tmp_path)

    assert (code.changed, code.untracked) == ((1, 1) if name == "x" else (None, None))
    assert not trace.exists()


def test_read_code_returns_unknown_without_git_or_repository(tmp_path):
    assert read_code(tmp_path, lambda _command: None) == Code()
    assert read_code(tmp_path, lambda _command: "HEAD\n") == Code()
    slow = read_code(tmp_path, lambda command: "5c" * 20 if "rev-parse" in command else None, "git")
    assert (slow, slow.dirty) == (Code("5c" * 20), None)


@pytest.mark.usefixtures("git")
def test_read_code_returns_only_the_commit_for_a_corrupt_index(tmp_path):
    commit = read_code(tmp_path).commit
    (tmp_path / ".git" / "index").write_bytes(b"corrupt")

    assert read_code(tmp_path) == Code(commit)


def test_git_program_avoids_the_apple_stub():
    """The stub can open a dialog."""
    assert git_program("darwin", "/usr/bin/git") != "/usr/bin/git"
    assert git_program("darwin", "/opt/local/bin/git") == "/opt/local/bin/git"
    assert git_program("linux", "/usr/bin/git") == "/usr/bin/git"


@pytest.mark.real_computer
def test_logbook_counts_busy_processes(tmp_path):
    """The busy process is not a child of this process."""
    command = f"{sys.executable} -c 'while True: pass' >/dev/null 2>&1 & echo $!"
    process_id = int(subprocess.check_output(["/bin/sh", "-c", command]))
    try:
        book = nb.logbook(folder=tmp_path, applications=True)
    finally:
        os.kill(process_id, signal.SIGKILL)

    assert book.background.busy_processes >= 1
    assert 0 < book.background.cpu_fraction <= 1
    assert book.background.names


def make_process(pid, name, percent):
    return SimpleNamespace(pid=pid, info={"name": name, "cpu_percent": percent})


@pytest.mark.parametrize(
    ("total_percent", "own_percent", "fraction"), [(50.0, 40.0, 0.4), (170.0, None, 1.0), (5.0, 40.0, 0.0)]
)
def test_background_load_names_the_busiest_other_processes_on_request(
    monkeypatch, total_percent, own_percent, fraction
):
    """The load of this process is subtracted from the load of all four processors."""
    processes = [
        make_process(os.getpid(), "python", own_percent),
        make_process(-1, "idle", 1.0),
        make_process(-2, "mail", 20.0),
        make_process(-3, "hf_token123456", 100.0),
        make_process(-4, None, None),
    ]
    monkeypatch.setattr(psutil, "process_iter", lambda _attributes: processes)
    monkeypatch.setattr(psutil, "cpu_percent", lambda _seconds: total_percent)
    monkeypatch.setattr(psutil, "cpu_count", lambda: 4)

    assert sample_background_load(names=False) == BackgroundLoad(2, fraction, None)
    assert sample_background_load(names=True).names == ("***", "mail")


def test_measure_latency_counts_failures():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        success = measure_latency(f"http://me:word@127.0.0.1:{port}/models", samples=2)
    failure = measure_latency(f"127.0.0.1:{port}", samples=2, timeout=0.5)

    assert (success.host, success.port, success.samples, success.failures) == ("127.0.0.1", port, 2, 0)
    assert 0 < success.median_seconds <= success.max_seconds
    assert (failure.failures, failure.median_seconds) == (2, None)
