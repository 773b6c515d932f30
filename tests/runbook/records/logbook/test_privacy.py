"""Removal of private data from a logbook: variables, paths, datasets and hypotheses."""

import hashlib
import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openmed_nb.errors import ConfigurationError
from openmed_nb.runbook.records.gathering import (
    MAX_HYPOTHESIS_CHARACTERS,
    fingerprint_dataset,
    portable_variables,
    sanitize_environ,
    sanitize_path,
    validate_hypotheses,
)
from openmed_nb.runbook.records.logbook import SHARED_VARIABLES, VARIABLES

NOTE = "The patient John Smith has diabetes mellitus."
KEY = "wJalrXUtnFEMI+K7MDENG+bPxRfiCYEXAMPLEKEY"
MASK = "***"
VALID_VALUES = {
    "OMP_NUM_THREADS": ["8"],
    "CUBLAS_WORKSPACE_CONFIG": [":4096:8"],
    "PYTORCH_MPS_HIGH_WATERMARK_RATIO": ["0.0"],
    "PYTORCH_ALLOC_CONF": [
        "max_split_size_mb:128,expandable_segments:True",
        "backend:cudaMallocAsync",
    ],
    "CUDA_VISIBLE_DEVICES": ["0,1", ""],
    "OPENMED_DEVICE": ["cuda:1"],
    "TORCH_LOGS": ["+dynamo,aot"],
}
MASKED_VALUES = {
    "OMP_NUM_THREADS": ["hunter2secretpw", NOTE],
    "KMP_BLOCKTIME": [KEY],
    "PYTORCH_ALLOC_CONF": ["max_split_size_mb:John"],
    "CUDA_VISIBLE_DEVICES": ["hf_abcdefgh12345678", "GPU-8a3c1e2f-1234-5678-9abc-def012345678"],
    "TORCH_LOGS": ["asthma"],
}
VALUES = [
    *((name, value, value) for name, values in VALID_VALUES.items() for value in values),
    *((name, value, MASK) for name, values in MASKED_VALUES.items() for value in values),
    ("OMP_NUM_THREADS", " 4,2 ", "4,2"),
]


@pytest.mark.parametrize(("name", "value", "expected"), VALUES)
def test_sanitize_environ_masks_unexpected_values(name, value, expected):
    """Sanitizing twice gives the same result."""
    assert sanitize_environ({name: value}) == {name: expected}
    assert sanitize_environ({name: expected}) == {name: expected}


NAMES = {
    "/home/john.smith": MASK,
    "john.smith/mine": MASK,
    "/home/john.smith/models/mine": "mine",
    "C:\\Users\\john\\mine": "mine",
    "OpenMed/NER-Disease": "OpenMed/NER-Disease",
    "/data/notes of John Smith, asthma, MRN 1234567": MASK,
    "/opt/ghp_0123456789abcdef": MASK,
    NOTE: MASK,
}


@pytest.mark.parametrize("path", NAMES)
def test_sanitize_path_returns_only_a_name(monkeypatch, path):
    monkeypatch.setenv("HOME", "/home/john.smith")

    assert sanitize_path(path) == NAMES[path]


@given(st.dictionaries(st.sampled_from(sorted(VARIABLES)) | st.text(), st.text()))
def test_sanitize_environ_returns_only_allowed_variables(environ):
    """Variables of tokens are not allowed, and portable variables are not masked."""
    assert sanitize_environ(environ).keys() <= VARIABLES
    assert [name for name in VARIABLES if "TOKEN" in name] == ["TOKENIZERS_PARALLELISM"]
    assert portable_variables(environ).keys() <= SHARED_VARIABLES
    assert MASK not in "".join(portable_variables(environ).values())


def test_fingerprint_dataset_depends_on_content_and_order(tmp_path):
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


def test_fingerprint_dataset_follows_links(tmp_path):
    shards = tmp_path / "shards"
    data = tmp_path / "data"
    for folder in (shards, data):
        folder.mkdir()
    (shards / "a.txt").write_text("asthma", "utf-8")
    (data / "link").symlink_to(shards, target_is_directory=True)
    before = fingerprint_dataset(data)
    (shards / "a.txt").write_text("fevers", "utf-8")

    assert (before.items, fingerprint_dataset(data).checksum == before.checksum) == (1, False)


INVALID_DATASETS = [
    NOTE,
    "~nobody.is.here/x",
    [],
    [3],
    iter(["asthma"]),
    3,
    {"asthma", "fever"},
    Path("/dev/zero"),
    None,
]


@pytest.mark.parametrize("data", INVALID_DATASETS, ids=type)
def test_fingerprint_dataset_rejects_other_values_without_quoting_them(data):
    with pytest.raises(ConfigurationError) as caught:
        fingerprint_dataset(data)
    assert "Smith" not in str(caught.value)


INVALID_HYPOTHESES = [
    3,
    [("slow", 3)],
    [("slow", "x" * (MAX_HYPOTHESIS_CHARACTERS + 1))],
    [("john smith  has\nDIABETES", "no")],
    [("slow", f"seen in: {NOTE}")],
]


@pytest.mark.parametrize("hypotheses", INVALID_HYPOTHESES, ids=itertools.count())
def test_validate_hypotheses_rejects_other_values_and_dataset_text(hypotheses):
    with pytest.raises(ConfigurationError) as caught:
        validate_hypotheses(hypotheses, ["The patient\nJohn Smith\n has diabetes mellitus."])
    assert "Smith" not in str(caught.value)


def test_validate_hypotheses_masks_secrets():
    assert validate_hypotheses([("the token hf_abcdef123456\nis slow", "no")]) == {"the token *** is slow": "no"}
