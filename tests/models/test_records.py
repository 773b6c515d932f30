"""Tests of the records of a model: validation records and tuned batch sizes."""

import json
from dataclasses import replace

import pytest
import transformers

from helpers import simulated_computers as computers
from helpers.sample_reports import VALIDATION_RECORD as RECORD
from openmed_nb._render.display import SIMULATION_NOTICE
from openmed_nb.errors import ConfigurationError
from openmed_nb.models.config import OpenMedConfig
from openmed_nb.models.files import hash_model_files
from openmed_nb.models.loading import LoadSpec
from openmed_nb.models.records import (
    ModelIdentity,
    RecordStore,
    TunedBatchSize,
    identify_model,
    record_store,
)

HERE = RECORD.identity


@pytest.fixture
def store(tmp_path):
    """A store in a directory that does not exist."""
    return RecordStore(tmp_path / "data" / "validation_records")


def test_store_finds_record_regardless_of_model_name(store):
    file = store.store(RECORD)

    assert store.get(HERE) == store.get(replace(HERE, model="other name")) == RECORD
    assert [path.name for path in store.folder.iterdir()] == [file.name] == ["ba1a376e6a051f7998af8665.json"]


def test_store_keeps_batch_size_and_validation_record_separately(store):
    batch_size = TunedBatchSize(HERE, 96)
    store.store(RECORD)
    store.store(batch_size)
    assert list(store.iter_batch_sizes()) == [batch_size]

    store.remove(HERE)
    assert (store.get(HERE), list(store.iter_batch_sizes())) == (None, [batch_size])
    store.remove(HERE, TunedBatchSize)
    assert list(store.folder.iterdir()) == []
    store.remove(HERE)


def test_identity_key_depends_on_every_field_except_model():
    keys = {replace(HERE, **{name: "x"}).key for name in vars(HERE)}
    assert len({*keys, HERE.key}) == len(vars(HERE))


def render_damaged(**changes):
    """Return the JSON of a record with changed fields, or changed fields of its evidence."""
    content = RECORD.to_dict()
    evidence = {**content["evidence"], **changes.pop("evidence", {})}
    return json.dumps({**content, "evidence": evidence, **changes})


DAMAGED = {
    "nothing": "",
    "no mapping": "[]",
    "another format": render_damaged(format="openmed_nb validation record, 1"),
    "a field less": render_damaged().replace('"missing": 0, ', ""),
    "fewer than none": render_damaged(evidence={"extra": -5}),
    "deep": "[" * 100_000,
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_damaged_record_is_ignored_and_replaced(store, content):
    store.store(RECORD).write_text(content, "utf-8")
    store.file(HERE, TunedBatchSize).write_text(content, "utf-8")
    assert (store.get(HERE), list(store.iter_batch_sizes())) == (None, [])
    store.store(RECORD)
    assert store.get(HERE) == RECORD


def test_renamed_or_edited_record_is_not_valid(store):
    other = replace(HERE, weights="w2")
    store.store(RECORD).rename(store.file(other))
    assert store.get(other) is None

    edited = replace(RECORD, identity=replace(HERE, dtype="float16"))
    store.store(RECORD).write_text(json.dumps(edited.to_dict()), "utf-8")
    assert (store.get(HERE), store.get(edited.identity)) == (None, None)


def test_store_rejects_unwritable_directory(tmp_path):
    (tmp_path / "file").write_text("no folder")
    store = record_store({"OPENMED_NB_DATA": str(tmp_path / "file")})

    assert store.get(HERE) is None
    with pytest.raises(ConfigurationError, match="OPENMED_NB_DATA"):
        store.store(RECORD)


def test_record_store_defaults_to_user_data_directory(tmp_path, monkeypatch):
    for name in ("XDG_DATA_HOME", "HOME", "LOCALAPPDATA"):
        monkeypatch.setenv(name, str(tmp_path))
    for environ in ({}, {"OPENMED_NB_DATA": ""}):
        folder = record_store(environ).folder
        assert folder.name == "validation_records"
        assert "openmed_nb" in folder.parts
        assert tmp_path in folder.parents
    assert list(tmp_path.iterdir()) == []


def test_record_report_has_all_fields():
    (table,) = RECORD.to_report().metrics
    fields = {**vars(HERE), **vars(RECORD.evidence), "date": "2026-03-01", **RECORD.criteria}
    assert [value for _name, value in table.rows] == [str(value) for value in fields.values() if value is not None]


def test_record_of_simulated_device_is_labeled():
    simulated = replace(RECORD, identity=replace(HERE, simulated=True))

    assert str(simulated).splitlines()[0] == "Validation record: mine in bfloat16 on mps (SIMULATED)"
    assert ("device", "mps (SIMULATED)") in simulated.to_report().metrics[0].rows
    assert SIMULATION_NOTICE in str(simulated)


def test_identity_ignores_index_of_gpu(keyword_model):
    spec = LoadSpec.from_name(str(keyword_model), OpenMedConfig())
    for computer, device, expected in (
        (computers.box(), "cuda", ("cuda", "NVIDIA A100")),
        (computers.box(), "cuda:0", ("cuda", "NVIDIA A100")),
        (computers.box(), "cuda:1", ("cuda", "NVIDIA T4")),
        (computers.mac(), "mps:0", ("mps", "Apple M2")),
    ):
        manager = computer.session.device_manager
        manager.load_torch()
        identity = identify_model(spec, "bfloat16", device, manager)
        assert (identity.device, identity.device_name, identity.simulated) == (*expected, False), device


def test_identity_has_hashes_versions_and_simulation(keyword_model):
    spec = LoadSpec.from_name(str(keyword_model), OpenMedConfig())
    mac = computers.mac().session.device_manager
    simulated = computers.Computer(
        replace(computers.MAC, simulated=True), computers.MAC_TORCH, {}
    ).session.device_manager
    hashes = hash_model_files(keyword_model)

    files = (hashes.weights, hashes.config, hashes.tokenizer)
    device = ("float16", "mps", "Apple M2", "2.13.0", transformers.__version__)
    assert identify_model(spec, "float16", "mps", mac) == ModelIdentity(
        str(keyword_model), *files, *device, simulated=False
    )
    assert [identify_model(spec, "float16", device, simulated).simulated for device in ("mps", "cpu")] == [True, False]
