"""``nb.handoff``: files and pins of a bundle, and invalid arguments."""

import hashlib
import importlib.metadata
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from safetensors.torch import load_file

import openmed_nb as nb
from openmed_nb.errors import ConfigurationError, UntrustedModelError
from openmed_nb.runbook.records.handoff import bundle as bundles
from openmed_nb.runbook.records.handoff.smoke import main, run_smoke_test

pytestmark = [pytest.mark.real_computer, pytest.mark.usefixtures("quick_collection")]

NOTE = "the patient has diabetes mellitus , says John Smith ."


def test_readme_names_all_files_of_the_bundle(keyword_handoff):
    names = {name.partition("/")[0] for name in keyword_handoff.files}
    readme = (keyword_handoff.folder / "README.md").read_text("utf-8")

    assert names == {
        "README.md",
        "run.sh",
        "smoke.py",
        "golden.json",
        "logbook.json",
        "texts.json",
        "model",
        "openmed_nb",
        f"openmed_nb-{nb.__version__}.dist-info",
        "requirements.txt",
        "SHA256SUMS",
        "trace.json.gz",
        "openmed_nb.service",
        "openmed_nb.plist",
    }
    assert all(f"`{name}" in readme for name in names if not name.endswith("-info"))
    assert [item.name for item in keyword_handoff.folder.parent.iterdir()] == ["bundle"]
    assert (keyword_handoff.folder / "trace.json.gz").read_bytes() == b"a trace"
    assert keyword_handoff.golden.owner == "The <b>team"
    assert "golden command: The &lt;b&gt;team." in readme
    assert json.loads(json.dumps(keyword_handoff.to_dict()))["golden"]["copied"] is True


def test_bundle_contains_checksum_but_no_text_of_the_dataset(keyword_handoff):
    contents = [file.read_bytes() for file in keyword_handoff.folder.rglob("*") if file.is_file()]

    assert not any(b"the patient has diabetes" in content for content in contents)
    assert keyword_handoff.golden.dataset.items == 1
    assert keyword_handoff.golden.dataset.checksum in (keyword_handoff.folder / "README.md").read_text("utf-8")
    assert "synthetic" in str(keyword_handoff)


def test_requirements_pin_all_dependencies(keyword_handoff):
    lines = (keyword_handoff.folder / "requirements.txt").read_text("utf-8").splitlines()[1:]
    pins = dict(line.split("==") for line in lines)
    direct = [Requirement(text) for text in importlib.metadata.requires("openmed-nb")]
    names = [requirement.name for requirement in direct if requirement.marker is None]
    required = set(map(str.lower, names))
    readme = (keyword_handoff.folder / "README.md").read_text("utf-8")

    assert f"pip install -c requirements.txt {' '.join(names)}\n" in readme
    assert required | {"openmed-nb", "numpy"} <= pins.keys()
    assert pins["torch"] == importlib.metadata.version("torch").partition("+")[0]
    assert not [version for version in pins.values() if "+" in version]


def test_bundle_contains_the_running_package_and_its_license(keyword_handoff):
    package = Path(nb.__file__).parent
    files = {path.relative_to(package.parent).as_posix() for path in package.rglob("*") if path.is_file()}
    metadata_folder = f"openmed_nb-{nb.__version__}.dist-info"

    assert {name for name in keyword_handoff.files if name.startswith("openmed_nb/")} == {
        name for name in files if not name.endswith(".pyc")
    }
    assert {f"{metadata_folder}/METADATA", f"{metadata_folder}/licenses/LICENSE"} <= keyword_handoff.files.keys()


def test_handoff_copies_texts_and_omits_path_of_uncopied_model(tmp_path, tiny):
    model = tiny.save(tmp_path / "John `Smith` <b>", tiny.keyword_bert())
    (tmp_path / "bundle").mkdir()
    handoff = nb.handoff(tmp_path / "bundle", model, [NOTE], copy_dataset=True, copy_model=False, device="cpu")
    readme = (handoff.folder / "README.md").read_text("utf-8")

    assert json.loads((handoff.folder / "texts.json").read_text("utf-8")) == [NOTE]
    assert [len(entities) for entities in handoff.golden.entities] == [1]
    assert "contains the texts of the dataset" in readme
    assert "Smith" not in str(handoff) + handoff._repr_html_() + json.dumps(handoff.to_dict()["golden"]) + readme
    assert (handoff.golden.model, (handoff.folder / "model").exists()) == ("model", False)
    with pytest.raises(ConfigurationError, match="Copy its folder"):
        run_smoke_test(handoff.folder)
    copied_model = Path(shutil.copytree(model, handoff.folder / "model"))
    assert main(handoff.folder) == 0
    tiny.change_json(copied_model / "config.json", initializer_range=0.5)
    with pytest.raises(ConfigurationError, match="differ from the golden run"):
        run_smoke_test(handoff.folder)


def save_with_index(tiny, folder, shard):
    """Save the keyword model with an index that names one file for all weights, and move the weights to that file."""
    weights = tiny.save(folder, tiny.keyword_bert()) / "model.safetensors"
    index = {"metadata": {}, "weight_map": dict.fromkeys(load_file(weights), shard)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), "utf-8")
    (folder / shard).parent.mkdir(exist_ok=True)
    weights.rename(folder / shard)
    return folder


@pytest.mark.parametrize("shard", ["../elsewhere.safetensors", "{folder}/elsewhere.safetensors"])
def test_handoff_rejects_weights_outside_the_model_directory(tmp_path, tiny, shard):
    model = save_with_index(tiny, tmp_path / "model", shard.format(folder=tmp_path / "model"))

    with pytest.raises(UntrustedModelError):
        nb.handoff(tmp_path / "bundle", model, device="cpu")
    assert not (tmp_path / "bundle").exists()


def test_checksums_are_those_of_all_files_even_in_subdirectories(tmp_path, tiny):
    model = save_with_index(tiny, tmp_path / "model", "parts/one.safetensors")
    handoff = nb.handoff(tmp_path / "bundle", model, device="cpu")
    lines = (handoff.folder / "SHA256SUMS").read_text("utf-8").splitlines()
    checksums = {name: checksum for checksum, name in (line.split("  ") for line in lines)}

    assert "model/parts/one.safetensors" in handoff.files
    assert checksums == {
        name: hashlib.sha256((handoff.folder / name).read_bytes()).hexdigest()
        for name in handoff.files
        if name != "SHA256SUMS"
    }
    assert main(handoff.folder) == 0


def test_handoff_rejects_unusable_folders_without_changes(tmp_path, keyword_model):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text(NOTE, "utf-8")
    file = tmp_path / "full" / "notes.txt"

    for folder in (tmp_path / "full", file, file / "bundle", None):
        with pytest.raises(ConfigurationError):
            nb.handoff(folder, keyword_model)
    assert [path.name for path in tmp_path.rglob("*")] == ["full", "notes.txt"]
    assert file.read_text("utf-8") == NOTE


def test_handoff_does_not_replace_an_existing_empty_folder(tmp_path):
    """The folder may be the working directory of a process."""
    (tmp_path / "target").mkdir()
    before = (tmp_path / "target").stat().st_ino
    (tmp_path / "bundle").symlink_to(tmp_path / "target", target_is_directory=True)
    (tmp_path / "dangling").symlink_to(tmp_path / "new", target_is_directory=True)
    for name in ("bundle", "dangling"):
        nb.handoff(tmp_path / name, "bundled_small", copy_model=False, device="cpu")
        assert (tmp_path / name / "run.sh").is_file()

    assert (tmp_path / "target").stat().st_ino == before
    assert (tmp_path / "dangling").is_symlink()


@pytest.mark.skipif(os.name == "nt", reason="Windows does not have these permissions")
@pytest.mark.parametrize("name", ["empty", "new"])
def test_failed_handoff_leaves_no_files(tmp_path, monkeypatch, name):
    (tmp_path / "empty").mkdir()

    def fail(*_arguments):
        raise OSError

    monkeypatch.setattr(bundles, "file_digest", fail)
    with pytest.raises(ConfigurationError):
        nb.handoff(tmp_path / name, "bundled_small", device="cpu")

    assert [path.name for path in tmp_path.rglob("*")] == ["empty"]


INVALID_ARGUMENTS = [
    {"model": torch.nn.Linear(1, 1)},
    {"dataset": NOTE},
    {"copy_dataset": True},
    {"dataset": "texts.json", "copy_dataset": True},
    {"dataset": [3]},
    {"owner": " "},
    {"owner": f"The team\n{NOTE}"},
    {"trace": "trace.json"},
    {"trace": 3},
    {"no_such_option": 1},
]


def test_invalid_arguments_raise_without_quoting_texts_or_writing_files(tmp_path):
    for arguments in INVALID_ARGUMENTS:
        with pytest.raises(ConfigurationError) as caught:
            nb.handoff(tmp_path / "bundle", **{"model": "bundled_small", "device": "cpu", **arguments})

        assert "Smith" not in str(caught.value), arguments
        assert list(tmp_path.iterdir()) == [], arguments


def test_handoff_rejects_pickles_even_if_loading_is_allowed(tmp_path, keyword_model):
    model = Path(shutil.copytree(keyword_model, tmp_path / "model"))
    weights = nb.load_model(str(keyword_model))["model"].state_dict()
    (model / "model.safetensors").unlink()
    torch.save(weights, model / "pytorch_model.bin")

    with pytest.raises(ConfigurationError):
        nb.handoff(tmp_path / "bundle", model, device="cpu", allow_pickle=True)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
