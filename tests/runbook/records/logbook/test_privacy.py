"""What may enter a logbook of what is private: variables, paths, datasets and hypotheses."""

import hashlib
import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openmed_nb.errors import ConfigurationError
from openmed_nb.runbook.records.logbook.privacy import (
    LONGEST,
    MOST,
    SHARED_VARIABLES,
    VARIABLES,
    fingerprint_dataset,
    portable_variables,
    sanitize_environ,
    sanitize_path,
    validate_hypotheses,
)

NOTE = "The patient John Smith has diabetes mellitus."
KEY = "wJalrXUtnFEMI+K7MDENG+bPxRfiCYEXAMPLEKEY"
KEPT = None
MASK = "***"
VALUES = [
    ("OMP_NUM_THREADS", "8", KEPT),
    ("OMP_NUM_THREADS", " 4,2 ", "4,2"),
    ("OMP_NUM_THREADS", "hunter2secretpw", MASK),
    ("OMP_NUM_THREADS", NOTE, MASK),
    ("TOKENIZERS_PARALLELISM", "False", KEPT),
    ("KMP_BLOCKTIME", "infinite", KEPT),
    ("KMP_BLOCKTIME", KEY, MASK),
    ("KMP_AFFINITY", "granularity=fine,compact,1,0", KEPT),
    ("KMP_AFFINITY", "John.Smith.has.asthma", MASK),
    ("PYTHONHASHSEED", "random", KEPT),
    ("CUBLAS_WORKSPACE_CONFIG", ":4096:8", KEPT),
    ("PYTORCH_ENABLE_MPS_FALLBACK", "1", KEPT),
    ("PYTORCH_MPS_HIGH_WATERMARK_RATIO", "0.0", KEPT),
    ("PYTORCH_ALLOC_CONF", "max_split_size_mb:128,expandable_segments:True", KEPT),
    ("PYTORCH_ALLOC_CONF", "backend:cudaMallocAsync", KEPT),
    ("PYTORCH_ALLOC_CONF", "roundup_power2_divisions:[256:1,512:2,>:4]", KEPT),
    ("PYTORCH_ALLOC_CONF", "max_split_size_mb:John", MASK),
    ("ATEN_CPU_CAPABILITY", "avx512", KEPT),
    ("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_VNNI", KEPT),
    ("CUDA_VISIBLE_DEVICES", "0,1", KEPT),
    ("CUDA_VISIBLE_DEVICES", "", KEPT),
    ("CUDA_VISIBLE_DEVICES", "GPU-8a3c1e2f-1234-5678-9abc-def012345678", KEPT),
    ("CUDA_VISIBLE_DEVICES", "hf_abcdefgh12345678", MASK),
    ("OPENMED_DEVICE", "cuda:1", KEPT),
    ("LD_LIBRARY_PATH", "/opt/lib:/usr/lib", KEPT),
    ("LD_LIBRARY_PATH", f"/opt/lib:{NOTE}", "/opt/lib:***"),
    ("LD_LIBRARY_PATH", "", KEPT),
    ("PYTHONPATH", "/opt/ghp_0123456789abcdef/lib", "/opt/***/lib"),
    ("PYTHONPATH", "/opt:https://me:word@host/simple:/usr", "/opt:***"),
    ("PYTHONPATH", "/opt/0a1b2c3d4e5f60718293a4b5c6d7e8f9/lib", "/opt/***/lib"),
    ("PYTHONPATH", "/opt/AKIAIOSFODNN7EXAMPLE", "/opt/***"),
    ("PYTHONPATH", "/opt?token=abc", "/***"),
    ("PYTHONPATH", "/data/notes of John Smith, asthma, MRN 1234567", "/data/***"),
    ("PYTHONHOME", "//user:pw@server/share", MASK),
    ("TORCH_HOME", "/opt/caf\udce9", "/opt/***"),
    ("TMPDIR", "/opt/café", KEPT),
    ("HF_ENDPOINT", "https://me:word@hub.example/models?key=a#b", "https://hub.example"),
    ("HF_ENDPOINT", "https://hub.example/npm_AbCdEfGhIjKlMnOp", "https://hub.example"),
    ("HF_ENDPOINT", "https://hub.example:x/", MASK),
    ("HF_ENDPOINT", NOTE, MASK),
    ("TRANSFORMERS_VERBOSITY", "debug", KEPT),
    ("TORCH_LOGS", "+dynamo,aot", KEPT),
    ("TORCH_LOGS", "asthma", MASK),
    ("PYTORCH_DEBUG_MPS_ALLOCATOR", "3", KEPT),
]


@pytest.mark.parametrize(("name", "value", "kept"), VALUES)
def test_variable_is_kept_or_masked(name, value, kept):
    """A value is kept where it looks as that of its variable must; what is secret or a text becomes three stars, and stays so."""
    kept = value if kept is KEPT else kept

    assert sanitize_environ({name: value}) == {name: kept}
    assert sanitize_environ({name: kept}) == {name: kept}


def test_home_is_shortened(monkeypatch):
    monkeypatch.setenv("HOME", "/home/john.smith")

    assert sanitize_path("/home/john.smith/models") == "~/models"
    assert sanitize_environ({"PYTHONPATH": "/home/john.smith/code:/opt"}) == {"PYTHONPATH": "~/code:/opt"}
    assert sanitize_environ({"HF_HOME": "/scratch/john.smith_hf/hub:/Users/mary/x"}) == {
        "HF_HOME": "/scratch/***/hub:/Users/***/x"
    }


@given(st.dictionaries(st.sampled_from(sorted(VARIABLES)) | st.text(), st.text()))
def test_only_allowed_variables_are_kept(environ):
    """Whatever the environment holds, only allowed names come out, none of a token, and golden ones are free of stars."""
    kept = sanitize_environ(environ)

    assert kept.keys() <= VARIABLES
    assert [name for name in VARIABLES if "TOKEN" in name] == ["TOKENIZERS_PARALLELISM"]
    assert portable_variables(environ).keys() <= SHARED_VARIABLES.keys()
    assert MASK not in "".join(portable_variables(environ).values())


def test_dataset_has_a_checksum_of_its_content(tmp_path):
    """Texts, a file and a folder each have a checksum that changes with their content, and with the order of texts."""
    for name, content in (("a.txt", b"asthma"), ("b.txt", b"fever"), (".hidden", b"x")):
        (tmp_path / name).write_bytes(content)
    texts = fingerprint_dataset(["asthma", "fever"])
    folder = fingerprint_dataset(tmp_path)
    file = fingerprint_dataset(tmp_path / "a.txt")

    assert (texts.kind, texts.items, texts.bytes) == ("texts", 2, 11)
    assert (
        texts.checksum
        != fingerprint_dataset(["fever", "asthma"]).checksum
        != fingerprint_dataset(["feverasthma"]).checksum
    )
    assert (folder.kind, folder.items, len(folder.shards)) == ("folder", 2, 2)
    assert file.checksum == folder.shards[0] == hashlib.sha256(b"asthma").hexdigest()
    (tmp_path / "b.txt").write_bytes(b"fevers")
    assert fingerprint_dataset(tmp_path).shards[0] == folder.shards[0]
    assert fingerprint_dataset(tmp_path).checksum != folder.checksum


def test_links_to_folders_are_followed(tmp_path):
    """Shards behind a link to a folder are read; a folder that links lead to twice, or in a circle, is refused."""
    shards = tmp_path / "shards"
    data = tmp_path / "data"
    for folder in (shards, data):
        folder.mkdir()
    (shards / "a.txt").write_text("asthma", "utf-8")
    (data / "link").symlink_to(shards, target_is_directory=True)
    before = fingerprint_dataset(data)
    (shards / "a.txt").write_text("fevers", "utf-8")

    assert (before.items, fingerprint_dataset(data).checksum == before.checksum) == (1, False)
    (data / "circle").symlink_to(data, target_is_directory=True)
    with pytest.raises(ConfigurationError, match="a folder twice in it"):
        fingerprint_dataset(data)


class Endless:
    """A series without an end."""

    def __getitem__(self, _place):
        return "asthma"


NO_DATASETS = [
    NOTE,
    NOTE * 100,
    "a\0b",
    "a\ud800",
    "~nobody.is.here/x",
    [],
    [3],
    iter(["asthma"]),
    3,
    {"text": NOTE},
    Path("no/such/folder"),
    Endless(),
    {"asthma", "fever"},
    b"notes.txt",
    Path("/dev/zero"),
    None,
]


@pytest.mark.parametrize("data", NO_DATASETS, ids=type)
def test_other_value_is_no_dataset(data):
    """A note in the place of a path, nothing, and what would be used up are refused, and no word of it is shown."""
    with pytest.raises(ConfigurationError) as caught:
        fingerprint_dataset(data)
    assert "Smith" not in str(caught.value)


@pytest.mark.parametrize(
    ("said", "data"),
    [
        ("slow", None),
        (3, None),
        ([("slow",)], None),
        ([("slow", 3)], None),
        ([("slow", "x" * (LONGEST + 1))], None),
        ([("slow", "no")] * (MOST + 1), None),
        (itertools.repeat(("slow", "no")), None),
        ([("john smith  has\nDIABETES", "no")], [NOTE]),
        ([("slow", "John Smith has diabetes")], ["The patient\nJohn Smith\n has diabetes mellitus."]),
        ([("slow", f"seen in: {NOTE}")], [NOTE]),
    ],
)
def test_hypothesis_is_a_pair_of_short_texts_without_words_of_the_dataset(said, data):
    with pytest.raises(ConfigurationError) as caught:
        validate_hypotheses(said, data)
    assert "Smith" not in str(caught.value)


def test_secret_in_a_hypothesis_is_masked():
    (hypothesis,) = validate_hypotheses([("the token hf_abcdef123456\nis slow", "no")])

    assert hypothesis.hypothesis == "the token *** is slow"
