"""The parts of a logbook: variables, datasets, hypotheses, loader, mounts, git, background, round trip."""

import hashlib
import itertools
import re
import socket
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from openmed_nb.errors import ConfigurationError
from openmed_nb.runbook.records.logbook import gathering as repository
from openmed_nb.runbook.records.logbook.gathering import (
    Mounted,
    ProcessorTimes,
    background,
    cache_folders,
    loader_of,
    measure_round_trip,
    mounted_at,
    places,
    read_mounts,
    read_randomness,
    seeds_of,
)
from openmed_nb.runbook.records.logbook.privacy import (
    CLEANERS,
    LONGEST,
    MOST,
    OWN_VARIABLES,
    SHARED_VARIABLES,
    dataset_of,
    golden_variables,
    hypotheses_of,
    kept_variables,
    short_path,
)
from openmed_nb.runbook.records.logbook.sections import Code

MOUNTS = Path(__file__).parents[3] / "recorded" / "mounts"
NOTE = "The patient John Smith has diabetes mellitus."

KEY = "wJalrXUtnFEMI+K7MDENG+bPxRfiCYEXAMPLEKEY"

VALUES = [
    ("OMP_NUM_THREADS", "8", "8"),
    ("OMP_NUM_THREADS", " 4,2 ", "4,2"),
    ("OMP_NUM_THREADS", "hunter2secretpw", "***"),
    ("OMP_NUM_THREADS", NOTE, "***"),
    ("TOKENIZERS_PARALLELISM", "False", "False"),
    ("KMP_BLOCKTIME", "infinite", "infinite"),
    ("KMP_BLOCKTIME", KEY, "***"),
    ("KMP_AFFINITY", "granularity=fine,compact,1,0", "granularity=fine,compact,1,0"),
    ("KMP_AFFINITY", "John.Smith.has.asthma", "***"),
    ("PYTHONHASHSEED", "random", "random"),
    ("CUBLAS_WORKSPACE_CONFIG", ":4096:8", ":4096:8"),
    ("PYTORCH_ENABLE_MPS_FALLBACK", "1", "1"),
    ("PYTORCH_MPS_HIGH_WATERMARK_RATIO", "0.0", "0.0"),
    *(
        ("PYTORCH_ALLOC_CONF", value, value)
        for value in (
            "max_split_size_mb:128,expandable_segments:True",
            "backend:cudaMallocAsync",
            "roundup_power2_divisions:[256:1,512:2,>:4]",
        )
    ),
    ("PYTORCH_ALLOC_CONF", "max_split_size_mb:John", "***"),
    ("ATEN_CPU_CAPABILITY", "avx512", "avx512"),
    ("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_VNNI", "AVX512_CORE_VNNI"),
    ("CUDA_VISIBLE_DEVICES", "0,1", "0,1"),
    ("CUDA_VISIBLE_DEVICES", "", ""),
    ("CUDA_VISIBLE_DEVICES", "GPU-8a3c1e2f-1234-5678-9abc-def012345678", "GPU-8a3c1e2f-1234-5678-9abc-def012345678"),
    ("CUDA_VISIBLE_DEVICES", "hf_abcdefgh12345678", "***"),
    ("OPENMED_DEVICE", "cuda:1", "cuda:1"),
    ("LD_LIBRARY_PATH", "/opt/lib:/usr/lib", "/opt/lib:/usr/lib"),
    ("LD_LIBRARY_PATH", f"/opt/lib:{NOTE}", "/opt/lib:***"),
    ("LD_LIBRARY_PATH", "", ""),
    ("PYTHONPATH", "/opt/ghp_0123456789abcdef/lib", "/opt/***/lib"),
    ("PYTHONPATH", "/opt:https://me:word@host/simple:/usr", "/opt:***"),
    ("PYTHONPATH", "/opt/0a1b2c3d4e5f60718293a4b5c6d7e8f9/lib", "/opt/***/lib"),
    ("PYTHONPATH", "/opt/AKIAIOSFODNN7EXAMPLE", "/opt/***"),
    ("PYTHONPATH", "/opt?token=abc", "/***"),
    ("PYTHONPATH", "/data/notes of John Smith, asthma, MRN 1234567", "/data/***"),
    ("PYTHONHOME", "//user:pw@server/share", "***"),
    ("TORCH_HOME", "/opt/caf\udce9", "/opt/***"),
    ("TMPDIR", "/opt/café", "/opt/café"),
    ("HF_ENDPOINT", "https://me:word@hub.example/models?key=a#b", "https://hub.example"),
    ("HF_ENDPOINT", "https://hub.example/npm_AbCdEfGhIjKlMnOp", "https://hub.example"),
    ("HF_ENDPOINT", "https://hub.example:x/", "***"),
    ("HF_ENDPOINT", NOTE, "***"),
    ("TRANSFORMERS_VERBOSITY", "debug", "debug"),
    ("TORCH_LOGS", "+dynamo,aot", "+dynamo,aot"),
    ("TORCH_LOGS", "asthma", "***"),
    ("PYTORCH_DEBUG_MPS_ALLOCATOR", "3", "3"),
]


@pytest.mark.parametrize(("name", "value", "kept"), VALUES)
def test_values_of_variables(name, value, kept):
    """A value is kept where it looks as that of its variable must; what is secret or a text becomes three stars, and stays so."""
    assert kept_variables({name: value}) == {name: kept}
    assert kept_variables({name: kept}) == {name: kept}


def test_home_is_shortened(monkeypatch):
    """Paths below the person's home begin with a tilde."""
    monkeypatch.setenv("HOME", "/home/john.smith")

    assert short_path("/home/john.smith/models") == "~/models"
    assert kept_variables({"PYTHONPATH": "/home/john.smith/code:/opt"}) == {"PYTHONPATH": "~/code:/opt"}
    assert kept_variables({"HF_HOME": "/scratch/john.smith_hf/hub:/Users/mary/x"}) == {
        "HF_HOME": "/scratch/***/hub:/Users/***/x"
    }
    assert kept_variables({"OPENMED_NB_DATA": "/data/anyone"}) == {}


def test_every_variable_stands_once():
    """A variable is either one that another computer should have too or one of this computer; no token is allowed."""
    assert not SHARED_VARIABLES.keys() & OWN_VARIABLES.keys()
    assert [name for name in CLEANERS if "TOKEN" in name] == ["TOKENIZERS_PARALLELISM"]


@given(st.dictionaries(st.sampled_from([*CLEANERS]) | st.text(), st.text()))
def test_nothing_but_allowed_variables_is_kept(environ):
    """Whatever the environment holds, only allowed names come out, and golden ones are free of stars."""
    kept = kept_variables(environ)

    assert kept.keys() <= CLEANERS.keys()
    assert "***" not in "".join(golden_variables(environ).values())


def test_datasets_are_fingerprinted(tmp_path):
    """Texts, a file and a folder each have a checksum that changes with their content, and with the order of texts."""
    for name, content in (("a.txt", b"asthma"), ("b.txt", b"fever"), (".hidden", b"x")):
        (tmp_path / name).write_bytes(content)
    texts, folder, file = dataset_of(["asthma", "fever"]), dataset_of(tmp_path), dataset_of(tmp_path / "a.txt")

    assert (texts.kind, texts.items, texts.bytes) == ("texts", 2, 11)
    assert texts.checksum != dataset_of(["fever", "asthma"]).checksum != dataset_of(["feverasthma"]).checksum
    assert (folder.kind, folder.items, len(folder.shards)) == ("folder", 2, 2)
    assert file.checksum == folder.shards[0] == hashlib.sha256(b"asthma").hexdigest()
    (tmp_path / "b.txt").write_bytes(b"fevers")
    assert dataset_of(tmp_path).shards[0] == folder.shards[0]
    assert dataset_of(tmp_path).checksum != folder.checksum


def test_links_to_folders_are_followed(tmp_path):
    """Shards behind a link to a folder are read; a folder that links lead to twice, or in a circle, is refused."""
    (tmp_path / "shards").mkdir()
    (tmp_path / "data").mkdir()
    (tmp_path / "shards" / "a.txt").write_text("asthma", "utf-8")
    (tmp_path / "data" / "link").symlink_to(tmp_path / "shards", target_is_directory=True)
    before = dataset_of(tmp_path / "data")
    (tmp_path / "shards" / "a.txt").write_text("fevers", "utf-8")

    assert (before.items, dataset_of(tmp_path / "data").checksum == before.checksum) == (1, False)
    (tmp_path / "data" / "circle").symlink_to(tmp_path / "data", target_is_directory=True)
    with pytest.raises(ConfigurationError, match="a folder twice in it"):
        dataset_of(tmp_path / "data")


class Endless:
    """A series without an end."""

    def __getitem__(self, _place):
        return "asthma"


@pytest.mark.parametrize(
    "data",
    [
        *(NOTE, NOTE * 100, "a\0b", "a\ud800", "~nobody.is.here/x", [], [3], iter(["asthma"]), 3, {"text": NOTE}),
        *(Path("no/such/folder"), Endless(), {"asthma", "fever"}, b"notes.txt", Path("/dev/zero"), None),
    ],
    ids=type,
)
def test_what_is_no_dataset_is_refused(data):
    """A note in the place of a path, nothing, and what would be used up are refused, and no word of it is shown."""
    with pytest.raises(ConfigurationError) as caught:
        dataset_of(data)
    assert "Smith" not in str(caught.value)


@pytest.mark.parametrize(
    ("said", "data"),
    [
        (itertools.repeat(("slow", "no")), None),
        ([("john smith  has\nDIABETES", "no")], [NOTE]),
        ([("slow", "John Smith has diabetes")], ["The patient\nJohn Smith\n has diabetes mellitus."]),
        ("slow", None),
        ([("slow",)], None),
        ([("slow", 3)], None),
        (3, None),
        ([("slow", "x" * (LONGEST + 1))], None),
        ([("slow", "no")] * (MOST + 1), None),
        ([("John Smith has diabetes", "no")], [NOTE]),
        ([("slow", f"seen in: {NOTE}")], [NOTE]),
    ],
)
def test_hypotheses_that_are_refused(said, data):
    """What is no pair of short texts is refused, and so are words of the dataset; none of them are shown."""
    with pytest.raises(ConfigurationError) as caught:
        hypotheses_of(said, data)
    assert "Smith" not in str(caught.value)


def test_secrets_in_hypotheses_are_masked():
    """A token in a hypothesis becomes three stars, and line ends become spaces."""
    (one,) = hypotheses_of([("the token hf_abcdef123456\nis slow", "no")])

    assert one.hypothesis == "the token *** is slow"


def test_loaders_and_seeds():
    """A loader is described without being read; seeds are whole numbers under short names."""
    loader = torch.utils.data.DataLoader([1, 2], num_workers=2, worker_init_fn=print, generator=torch.Generator())
    facts, plain = loader_of(loader), torch.utils.data.DataLoader([1])

    assert (facts.workers, facts.worker_seeding, facts.seeded, facts.prefetch_factor) == (2, "worker_init_fn", True, 2)
    assert loader_of(torch.utils.data.DataLoader([1], num_workers=1)).worker_seeding == "torch"
    assert (loader_of(plain).worker_seeding, loader_of(None)) == ("no workers", None)
    assert seeds_of({"torch": 1, "numpy": 2}) == {"torch": 1, "numpy": 2}
    for bad in ({NOTE: 1}, {"torch": "1"}, 1.5, True, 10**5000, -(2**64)):
        with pytest.raises(ConfigurationError) as caught:
            seeds_of(bad)
        assert "Smith" not in str(caught.value)


FIELDS = {
    **dict.fromkeys(("worker_init_fn", "generator", "multiprocessing_context", "prefetch_factor")),
    **dict.fromkeys(("pin_memory", "persistent_workers"), False),
    "num_workers": 0,
    "batch_size": 4,
    "dataset": [],
}


@pytest.mark.parametrize(
    "loader",
    [
        [1, 2],
        SimpleNamespace(num_workers=0, dataset=[]),
        SimpleNamespace(**{**FIELDS, "num_workers": "x"}),
        SimpleNamespace(**{**FIELDS, "batch_size": "John"}),
        SimpleNamespace(**{**FIELDS, "batch_size": -1}),
    ],
    ids=repr,
)
def test_what_is_no_loader_is_refused(loader):
    """What lacks a part of a loader, or has another type there, is one clear error that shows none of it."""
    with pytest.raises(ConfigurationError, match="is not a DataLoader") as caught:
        loader_of(loader)
    assert "John" not in str(caught.value)
    assert loader_of(SimpleNamespace(**FIELDS)).batch_size == 4


def test_what_torch_was_asked_for():
    """The determinism flags are those of torch at this moment."""
    before = torch.get_deterministic_debug_mode()
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    try:
        asked = read_randomness()
    finally:
        torch.set_deterministic_debug_mode(before)

    assert (asked.deterministic_algorithms, asked.warn_only) == (True, True)
    assert read_randomness().deterministic_algorithms is (before != 0)


PLACES = [
    ("mac_big_sur_macfuse", "/Users/me/.cache/huggingface", "/", "apfs", "local"),
    ("mac_big_sur_macfuse", "/Volumes/Test/models", "/Volumes/Test", "macfuse", "network"),
    ("mac_catalina", "/private/var/vm/sleepimage", "/private/var/vm", "apfs", "local"),
    ("mac_catalina", "/System/Volumes/Data/Users/me", "/System/Volumes/Data", "apfs", "local"),
    ("mac_volumes", "/Volumes/share/models", "/Volumes/share", "smbfs", "network"),
    ("mac_volumes", "/Volumes/backups", "/Volumes/backups", "nfs", "network"),
    ("mac_volumes", "/Volumes/USB STICK/models", "/Volumes/USB STICK", "exfat", "external"),
    ("mac_volumes", "/Volumes/My (Old) Card/a", "/Volumes/My (Old) Card", "msdos", "external"),
    ("mac_volumes", "/Volumes/shared", "/", "apfs", "local"),
]


@pytest.mark.parametrize(("name", "path", "point", "filesystem", "kind"), PLACES)
def test_recorded_mounts(name, path, point, filesystem, kind):
    """What ``mount`` printed on Macs tells on what sort of storage a path lies; users and servers are not kept."""
    listed = re.findall(r"^.+? on (/.*) \(([^()]+)\)$", (MOUNTS / f"{name}.txt").read_text("utf-8"), re.MULTILINE)
    mounts = [Mounted(point, *(told.split(", ")[0], tuple(told.split(", ")[1:]))) for point, told in listed]
    found = mounted_at(Path(path), mounts)

    assert (found.point, found.filesystem, found.kind) == (point, filesystem, kind)
    assert "erik" not in "".join(one.point + one.filesystem for one in mounts)


@pytest.mark.parametrize(
    ("mounted", "kind"),
    [
        (Mounted("/", "overlay"), "local"),
        (Mounted("/run", "tmpfs"), "memory"),
        (Mounted("/home", "nfs4"), "network"),
        (Mounted("/mnt/c", "9p"), "network"),
        (Mounted("/data", "fuse.sshfs"), "network"),
        (Mounted("/run/media/me/STICK", "vfat"), "external"),
        (Mounted("D:\\", "NTFS", ("rw", "removable")), "external"),
        (Mounted("Z:\\", "NTFS", ("rw", "remote")), "network"),
    ],
)
def test_kinds_of_storage(mounted, kind):
    """The type of a file system and what it is mounted with tell what sort of storage it is."""
    assert mounted.kind == kind


def test_caches_are_found_by_their_variables(tmp_path):
    """The variables of huggingface_hub and torch name the caches; any path lies somewhere, as far as the mounts are known."""
    folders = cache_folders({"HF_HOME": str(tmp_path), "XDG_CACHE_HOME": "/x"}, Path("/home/me"))
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    nowhere = {"circle": tmp_path / "circle" / "hub", "nobody": Path("~nobody.is.here/x")}

    assert folders == {"Hugging Face cache": tmp_path / "hub", "torch cache": Path("/x/torch")}
    assert {one.kind for one in places(folders, ())} == {"not known"}
    assert {one.kind for one in places(folders | nowhere, [Mounted("/", "ext4")])} == {"local"}
    assert len(read_mounts()) > 0


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
def test_folders_that_macos_keeps_in_a_cloud(tmp_path, path, kind):
    """ICloud Drive, a folder that macOS has marked as kept there, and those of other providers are a cloud, and not local."""
    home = tmp_path / "me"
    marks = {"Desktop": "com.apple.icloud.desktop", "Documents": "com.apple.file-provider-domain-id"}
    for folder in (*marks, "Documents2"):
        (home / folder).mkdir(parents=True)

    def xattr(command):
        """Print the attributes of each file behind its name, as the program does for several."""
        assert command[0] == "/usr/bin/xattr"
        assert all(Path(name).exists() and home in Path(name).parents for name in command[1:])
        return "".join(f"{name}: {marks.get(Path(name).name, 'com.apple.FinderInfo')}\n" for name in command[1:])

    (found,) = places({"model": home / path}, [Mounted("/", "apfs")], home, xattr)

    assert (found.kind, found.filesystem) == (kind, "apfs")


def test_what_is_no_cloud(tmp_path):
    """Outside of the person's home, on another system and on what is mounted from elsewhere, nothing is asked for."""
    mounts = [Mounted("/", "apfs"), Mounted("/net", "smbfs"), Mounted(str(tmp_path / "disk"), "ext4")]
    wanted = {"a": Path("/opt/a"), "b": Path("/net/Library/CloudStorage"), "c": tmp_path / "disk" / "Desktop"}
    found = places(wanted, mounts, tmp_path, pytest.fail)

    assert [one.kind for one in found] == ["local", "network", "local"]


@pytest.fixture
def git(tmp_path):
    """A function that runs git in a new repository with one commit and a remote that has a password."""
    program = repository.git_program()
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
    clean = repository.read_code(tmp_path)
    (tmp_path / "training.py").write_text("x = 2\n", "utf-8")
    (tmp_path / "John Smith.txt").write_text(NOTE, "utf-8")
    dirty = repository.read_code(tmp_path)
    git("add", ".")

    assert (len(clean.commit), clean.changed, clean.untracked, clean.dirty) == (40, 0, 0, False)
    assert (dirty.commit, dirty.changed, dirty.untracked, dirty.dirty) == (clean.commit, 1, 1, True)
    assert repository.read_code(tmp_path).changed == 2


@pytest.mark.usefixtures("git")
def test_variables_of_git_are_not_heard(tmp_path, tmp_path_factory, monkeypatch):
    """What stands in the environment for git does not let it answer for another repository."""
    commit = repository.read_code(tmp_path).commit
    other = tmp_path_factory.mktemp("other")
    monkeypatch.setenv("GIT_DIR", str(other / "nowhere"))
    monkeypatch.setenv("GIT_WORK_TREE", str(other))
    monkeypatch.setenv("GIT_INDEX_FILE", str(other / "index"))

    assert repository.read_code(tmp_path) == Code(commit, 0, 0)


@pytest.mark.parametrize("name", ["x", "a=b"])
def test_programs_of_a_repository_are_not_run(git, tmp_path, tmp_path_factory, name):
    """A filter that a repository names is not run; where git could not be told so, changes are not counted."""
    trace = tmp_path_factory.mktemp("trace") / "ran"
    git("config", f"filter.{name}.clean", f"touch '{trace}'; cat")
    git("config", f"filter.{name}.required", "true")
    (tmp_path / ".gitattributes").write_text(f"* filter={name}\n", "utf-8")
    (tmp_path / "training.py").write_text("x = 3\n", "utf-8")
    code = repository.read_code(tmp_path)

    assert (code.changed, code.untracked) == ((1, 1) if name == "x" else (None, None))
    assert not trace.exists()


def test_no_repository_is_no_error(tmp_path):
    """Without a repository, without a commit, without git, and where git takes too long, the code is not known."""
    assert repository.read_code(tmp_path, run=lambda _command: None) == Code()
    assert repository.read_code(tmp_path, run=lambda _command: "HEAD\n") == Code()
    slow = repository.read_code(tmp_path, lambda command: "5c" * 20 if "rev-parse" in command else None, "git")
    assert slow == Code("5c" * 20)
    assert slow.dirty is None


@pytest.mark.usefixtures("git")
def test_a_damaged_index_is_not_clean(tmp_path):
    """Where git cannot say what has changed, the commit alone is known."""
    commit = repository.read_code(tmp_path).commit
    (tmp_path / ".git" / "index").write_bytes(b"damaged")

    assert repository.read_code(tmp_path) == Code(commit)


def test_git_of_a_mac_asks_no_question():
    """Apple's stub, which may open a window, is never run; any other git is."""
    assert repository.git_program("darwin", "/usr/bin/git") != "/usr/bin/git"
    assert repository.git_program("darwin", "/opt/local/bin/git") == "/opt/local/bin/git"
    assert repository.git_program("linux", "/usr/bin/git") == "/usr/bin/git"


def test_other_programs_are_counted_and_named_on_request():
    """Only programs that were there both times count; names come only where someone asks, and without secrets."""
    before = ProcessorTimes({1: ("x", 0.0), 2: ("y", 0.0)}, 0.0, 0.0, 0.0)
    after = ProcessorTimes({1: ("hf_token123456", 100.0), 2: ("y", 0.0), 3: ("new", 50.0)}, 10.0, 210.0, 400.0)

    assert background(before, after) == background(before, after, names=False)
    assert background(before, after).names is None
    assert background(before, after).share == 0.5
    assert background(before, after, names=True).names == ("***",)
    assert background(before, before).busy is None


def test_round_trips_to_a_store():
    """Connections are made and closed; one that nobody answers is a failure and no error."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        reached = measure_round_trip(f"http://me:word@127.0.0.1:{port}/models", samples=2)
    lost = measure_round_trip(f"127.0.0.1:{port}", samples=2, timeout=0.5)

    assert (reached.host, reached.port, reached.samples, reached.failures) == ("127.0.0.1", port, 2, 0)
    assert 0 < reached.median_seconds <= reached.largest_seconds
    assert (lost.failures, lost.median_seconds) == (2, None)


@pytest.mark.parametrize(
    "store", ["", "store", NOTE, "s3://bucket/key", "host:99999", "https://me:hf_word1234567@", "a b:80"]
)
def test_what_is_no_store_is_refused(store):
    """What has no host and port is refused, and is not shown."""
    with pytest.raises(ConfigurationError) as caught:
        measure_round_trip(store)
    assert "Smith" not in str(caught.value)
    assert "hf_word" not in str(caught.value)
