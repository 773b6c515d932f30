"""Failing batches are saved in separate files, and no file is overwritten."""

import stat
import sys
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

import openmed_nb as nb
from openmed_nb.errors import NonFiniteError


def save(batch, folder, step=7):
    """Trigger the guards with a loss of NaN, and return their message."""
    with pytest.raises(NonFiniteError) as stopped:
        nb.Guards(folder=folder).check_loss(float("nan"), step, batch)
    return stopped.value.message


def save_and_load(batch, folder):
    """Return the tensors in the file that the guards save for a batch."""
    save(batch, folder)
    (file,) = folder.iterdir()
    return load_file(file)


def test_saved_batch_can_be_loaded(tmp_path, make_batch):
    batch = make_batch()
    saved = save_and_load(batch, tmp_path / "new" / "folder")
    assert saved.keys() == batch.keys()
    assert all(torch.equal(saved[name], batch[name]) for name in batch)


def test_existing_file_is_not_overwritten(tmp_path):
    names = ["step_7.safetensors", "step_7_2.safetensors", "step_7_3.safetensors"]
    for number, name in enumerate(names):
        assert repr(str(tmp_path / name)) in save({"labels": torch.tensor([number])}, tmp_path)
    assert [load_file(tmp_path / name)["labels"].item() for name in names] == [0, 1, 2]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such permissions")
def test_file_is_private(tmp_path):
    save({"labels": torch.ones(1)}, tmp_path / "kept")
    file = tmp_path / "kept" / "step_7.safetensors"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) & 0o077 == 0


def test_tensors_are_named_by_path(tmp_path):
    batch = {"labels": torch.ones(1), "pair": (torch.ones(1), {"deep": torch.ones(1)}), "text": "secret", "number": 5}
    assert set(save_and_load(batch, tmp_path / "named")) == {"labels", "pair.0", "pair.1.deep"}
    assert set(save_and_load(torch.ones(1), tmp_path / "alone")) == {"batch"}


def test_shared_and_transposed_tensors_are_saved(tmp_path):
    whole = torch.arange(6.0, requires_grad=True).reshape(2, 3)
    saved = save_and_load([whole, whole.T, whole[0]], tmp_path)
    assert torch.equal(saved["1"], whole.T)
    assert saved["2"].tolist() == [0, 1, 2]


ONES = torch.ones(2)
UNUSUAL = {
    "sparse": ONES.to_sparse,
    "compressed": torch.eye(2).to_sparse_csr,
    "complex128": partial(ONES.to, torch.complex128),
    "nested": partial(torch.nested.nested_tensor, [ONES, ONES[:1]]),
    "jagged": partial(torch.nested.nested_tensor, [ONES, ONES[:1]], layout=torch.jagged),
    "meta": partial(ONES.to, "meta"),
    "quantized": partial(torch.quantize_per_tensor, ONES, 0.1, 0, torch.qint8),
}


@pytest.mark.filterwarnings("ignore")  # torch warns that several kinds of tensors are prototypes or deprecated.
@pytest.mark.parametrize("make", UNUSUAL.values(), ids=UNUSUAL)
def test_unsupported_tensors_are_named(make, tmp_path):
    tensor = make()
    message = save({"labels": torch.ones(1), "weights": tensor}, tmp_path)
    assert message.endswith("'. 1 of its 2 tensors could not be saved: weights.")
    assert set(load_file(tmp_path / "step_7.safetensors")) == {"labels"}
    assert save([tensor], tmp_path, 8).endswith("could not be saved: 1 of its 1 tensors could not be saved: 0.")
    assert not (tmp_path / "step_8.safetensors").exists()


def test_batch_without_tensors_writes_no_file(tmp_path):
    assert save({"text": "secret"}, tmp_path).endswith(" The batch could not be saved: it has no tensors.")
    assert not list(tmp_path.iterdir())


def test_duplicate_names_are_numbered(tmp_path):
    batch = {"pair": {"a": torch.zeros(1)}, "pair.a": torch.ones(1), 1: torch.zeros(1), "1": torch.ones(1)}
    saved = save_and_load(batch, tmp_path)
    assert {name: value.item() for name, value in saved.items()} == {"pair.a": 0, "pair.a (2)": 1, "1": 0, "1 (2)": 1}


@pytest.mark.parametrize("name", ["input_ids", "argument 0", "labels"])
def test_token_ids_are_reported_as_clinical(name, tmp_path):
    batch = {"pixel_values": torch.ones(2, 3, 4, 4), name: torch.ones(2, 3, dtype=torch.long)}
    assert ("its token ids are clinical content" in save(batch, tmp_path)) == (name != "labels")


def test_invalid_directory_is_reported(tmp_path):
    (tmp_path / "kept").write_text("mine", encoding="utf-8")
    assert " The batch could not be saved: " in save({"labels": torch.ones(1)}, tmp_path / "kept")
