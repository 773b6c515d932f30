"""What surrounds a run: loader, seeds, storage, git, other programs, round trip."""

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import openmed_nb as nb
from openmed_nb.runbook.records.logbook.gathering import (
    Program,
    background_load,
    describe_loader,
    git_program,
    measure_round_trip,
    read_code,
    read_randomness,
    storage_places,
)
from openmed_nb.runbook.records.logbook.sections import BackgroundLoad, Code

MOUNTS = Path(__file__).parents[3] / "recorded" / "mounts"
NOTE = "The patient John Smith has diabetes mellitus."


def test_loader_is_described_without_being_read():
    loader = torch.utils.data.DataLoader([1, 2], num_workers=2, worker_init_fn=print, generator=torch.Generator())
    facts = describe_loader(loader)

    assert (facts.workers, facts.worker_seeding, facts.seeded, facts.prefetch_factor) == (2, "worker_init_fn", True, 2)
    assert describe_loader(torch.utils.data.DataLoader([1], num_workers=1)).worker_seeding == "torch"
    assert describe_loader(torch.utils.data.DataLoader([1])).worker_seeding == "no workers"
    assert describe_loader(None) is None


def test_determinism_is_that_of_torch_now():
    before = torch.get_deterministic_debug_mode()
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    try:
        asked = read_randomness()
    finally:
        torch.set_deterministic_debug_mode(before)

    assert (asked.deterministic_algorithms, asked.warn_only) == (True, True)
    assert read_randomness().deterministic_algorithms is (before != 0)


class Mount(NamedTuple):
    """A mounted file system, by the names of psutil."""

    mountpoint: str
    fstype: str
    opts: str = ""


def recorded_mounts(name):
    """Return what ``mount`` printed on a Mac, as psutil names it."""
    printed = (MOUNTS / f"{name}.txt").read_text("utf-8")
    listed = re.findall(r"^.+? on (/.*) \((\w+)(?:, )?([^()]*)\)$", printed, re.MULTILINE)
    return [Mount(point, filesystem, options.replace(", ", ",")) for point, filesystem, options in listed]


BIG_SUR = recorded_mounts("mac_big_sur_macfuse")
CATALINA = recorded_mounts("mac_catalina")
VOLUMES = recorded_mounts("mac_volumes")
ROOT = Mount("/", "ext4")
PLACES = [
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
    ([], "/x", None, "not known"),
    ([ROOT], "~nobody.is.here/x", "ext4", "local"),
]


@pytest.mark.parametrize(("mounts", "path", "filesystem", "kind"), PLACES)
def test_storage_is_that_of_the_deepest_mount(mounts, path, filesystem, kind):
    (place,) = storage_places({"model": Path(path)}, mounts, Path("/Users/me"), lambda _command: "")

    assert (place.filesystem, place.kind) == (filesystem, kind)
    assert "erik" not in repr(place)


def test_circle_of_links_lies_somewhere(tmp_path):
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    (place,) = storage_places({"model": tmp_path / "circle" / "hub"}, [ROOT])

    assert place.kind == "local"


KEPT_ELSEWHERE = [
    ("Library/Mobile Documents/com~apple~CloudDocs/models/a", "cloud"),
    ("Library/CloudStorage/GoogleDrive-me/models", "cloud"),
    ("Library/Caches/models", "local"),
    ("Desktop/models/a", "cloud"),
    ("Documents/models", "cloud"),
    ("Documents2/models", "local"),
    (".cache/huggingface", "local"),
]


@pytest.mark.parametrize(("path", "kind"), KEPT_ELSEWHERE)
def test_folder_that_macos_keeps_in_a_cloud(tmp_path, path, kind):
    """ICloud Drive, a folder that macOS has marked as kept there, and those of other providers are a cloud."""
    home = tmp_path / "me"
    marks = {"Desktop": "com.apple.icloud.desktop", "Documents": "com.apple.file-provider-domain-id"}
    for folder in (*marks, "Documents2"):
        (home / folder).mkdir(parents=True)

    def xattr(command):
        """Print the attributes of each file behind its name, as the program does for several."""
        assert command[0] == "/usr/bin/xattr"
        assert all(Path(name).exists() and home in Path(name).parents for name in command[1:])
        return "".join(f"{name}: {marks.get(Path(name).name, 'com.apple.FinderInfo')}\n" for name in command[1:])

    (place,) = storage_places({"model": home / path}, [Mount("/", "apfs")], home, xattr)

    assert (place.kind, place.filesystem) == (kind, "apfs")


def test_folder_elsewhere_is_in_no_cloud(tmp_path):
    """Outside of the person's home, on another system and on what is mounted from elsewhere, nothing is asked for."""
    mounts = [Mount("/", "apfs"), Mount("/net", "smbfs"), Mount(str(tmp_path / "disk"), "ext4")]
    wanted = {"a": Path("/opt/a"), "b": Path("/net/Library/CloudStorage"), "c": tmp_path / "disk" / "Desktop"}
    places = storage_places(wanted, mounts, tmp_path, pytest.fail)

    assert [place.kind for place in places] == ["local", "network", "local"]


@pytest.fixture
def git(tmp_path):
    """A function that runs git in a new repository with one commit and a remote that has a password."""
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


def test_commit_and_dirtiness(git, tmp_path):
    """The commit is read, and how many files differ from it; names, messages and remotes are not."""
    clean = read_code(tmp_path)
    (tmp_path / "training.py").write_text("x = 2\n", "utf-8")
    (tmp_path / "John Smith.txt").write_text(NOTE, "utf-8")
    dirty = read_code(tmp_path)
    git("add", ".")

    assert (len(clean.commit), clean.changed, clean.untracked, clean.dirty) == (40, 0, 0, False)
    assert (dirty.commit, dirty.changed, dirty.untracked, dirty.dirty) == (clean.commit, 1, 1, True)
    assert read_code(tmp_path).changed == 2


@pytest.mark.usefixtures("git")
def test_variables_of_git_name_no_other_repository(tmp_path, tmp_path_factory, monkeypatch):
    commit = read_code(tmp_path).commit
    other = tmp_path_factory.mktemp("other")
    monkeypatch.setenv("GIT_DIR", str(other / "nowhere"))
    monkeypatch.setenv("GIT_WORK_TREE", str(other))
    monkeypatch.setenv("GIT_INDEX_FILE", str(other / "index"))

    assert read_code(tmp_path) == Code(commit, 0, 0)


@pytest.mark.parametrize("name", ["x", "a=b"])
def test_programs_of_a_repository_are_not_run(git, tmp_path, tmp_path_factory, name):
    """A filter that a repository names is not run; where git could not be told so, changes are not counted."""
    trace = tmp_path_factory.mktemp("trace") / "ran"
    git("config", f"filter.{name}.clean", f"touch '{trace}'; cat")
    git("config", f"filter.{name}.required", "true")
    (tmp_path / ".gitattributes").write_text(f"* filter={name}\n", "utf-8")
    (tmp_path / "training.py").write_text("x = 3\n", "utf-8")
    code = read_code(tmp_path)

    assert (code.changed, code.untracked) == ((1, 1) if name == "x" else (None, None))
    assert not trace.exists()


def test_code_without_a_repository_is_not_known(tmp_path):
    """Without a repository, without a commit, without git, and where git takes too long, the code is not known."""
    assert read_code(tmp_path, lambda _command: None) == Code()
    assert read_code(tmp_path, lambda _command: "HEAD\n") == Code()
    slow = read_code(tmp_path, lambda command: "5c" * 20 if "rev-parse" in command else None, "git")
    assert (slow, slow.dirty) == (Code("5c" * 20), None)


@pytest.mark.usefixtures("git")
def test_a_damaged_index_is_not_clean(tmp_path):
    """Where git cannot say what has changed, the commit alone is known."""
    commit = read_code(tmp_path).commit
    (tmp_path / ".git" / "index").write_bytes(b"damaged")

    assert read_code(tmp_path) == Code(commit)


def test_git_of_a_mac_asks_no_question():
    """Apple's stub, which may open a window, is never run; any other git is."""
    assert git_program("darwin", "/usr/bin/git") != "/usr/bin/git"
    assert git_program("darwin", "/opt/local/bin/git") == "/opt/local/bin/git"
    assert git_program("linux", "/usr/bin/git") == "/usr/bin/git"


@pytest.mark.real_computer
def test_other_programs_are_watched(tmp_path):
    """A program that is no child of this one and computes all the time is busy."""
    start = f"{sys.executable} -c 'while True: pass' >/dev/null 2>&1 & echo $!"
    number = int(subprocess.check_output(["/bin/sh", "-c", start]))
    try:
        book = nb.logbook(folder=tmp_path, applications=True)
    finally:
        os.kill(number, signal.SIGKILL)

    assert book.background.busy >= 1
    assert 0 < book.background.cpu_fraction <= 1
    assert book.background.names


def test_other_programs_are_named_on_request():
    """The busiest come first, those that take less than a tenth of a processor are left out, and secrets are masked."""
    programs = [Program("idle", 1.0), Program("mail", 20.0), Program("hf_token123456", 100.0)]

    assert background_load(programs, 0.5, names=False) == BackgroundLoad(2, 0.5, None)
    assert background_load(programs, 1.7, names=True).names == ("***", "mail")
    assert background_load([], -0.1, names=True).cpu_fraction == 0


def test_round_trip_to_a_store():
    """Connections are made and closed; one that nobody answers is a failure and no error."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        reached = measure_round_trip(f"http://me:word@127.0.0.1:{port}/models", samples=2)
    lost = measure_round_trip(f"127.0.0.1:{port}", samples=2, timeout=0.5)

    assert (reached.host, reached.port, reached.samples, reached.failures) == ("127.0.0.1", port, 2, 0)
    assert 0 < reached.median_seconds <= reached.largest_seconds
    assert (lost.failures, lost.median_seconds) == (2, None)
