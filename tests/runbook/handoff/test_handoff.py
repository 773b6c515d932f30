"""Bundles: what is written, what is refused, and the smoke test in this process."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import openmed_nb as nb
from openmed_nb.errors import ConfigurationError
from openmed_nb.runbook.findings import FAILED
from openmed_nb.runbook.handoff.checksums import changed_files
from openmed_nb.runbook.handoff.smoke import smoke

pytestmark = [pytest.mark.real_computer, pytest.mark.usefixtures("quick_collection")]

NOTE = "the patient has diabetes mellitus , says John Smith ."


def failed(bundle: Path) -> list[str]:
    """Return the names of what fails in the smoke test of a bundle."""
    return [one.name for one in smoke(bundle).findings if one.status == FAILED]


def test_what_is_in_a_bundle(handed_over):
    """A bundle has the files that its README names, each with a checksum, and nothing is left beside it."""
    names = {name.partition("/")[0] for name, _ in handed_over.files}

    assert names == {
        *("README.md", "run.sh", "smoke.py", "golden.json", "logbook.json", "evidence.json", "logbook.schema.json"),
        *("texts.json", "model", "requirements.txt", "wheels", "SHA256SUMS"),
    }
    assert all(f"`{name}" in (handed_over.folder / "README.md").read_text("utf-8") for name in names)
    assert [one.name for one in handed_over.folder.parent.iterdir()] == ["bundle"]
    assert changed_files(handed_over.folder) == {}
    assert nb.Logbook.read(handed_over.folder / "evidence.json").figures == ()
    assert handed_over.to_dict()["golden"]["copied"] is True


def test_texts_are_not_handed_over(handed_over):
    """Only the checksum of a dataset is in a bundle; the texts that run are synthetic."""
    contents = [file.read_bytes() for file in handed_over.folder.rglob("*") if file.is_file()]

    assert not any(b"the patient has diabetes" in one for one in contents)
    assert handed_over.golden.dataset.items == 1
    assert handed_over.golden.dataset.checksum in (handed_over.folder / "README.md").read_text("utf-8")
    assert "synthetic" in str(handed_over)


def test_the_smoke_test_passes_in_another_folder(bundle):
    """A bundle that was copied elsewhere passes, and finds the entities of the golden run."""
    report = smoke(bundle)

    assert report.passed, str(report)
    assert sum(map(len, report.seen.entities)) > 0
    assert report.seen.entities == report.seen.golden.entities
    assert report.to_dict()["passed"] is True


def test_copied_texts_run(tmp_path, keyword_model):
    """Texts are copied where that is asked for, and are what the smoke test reads; the README warns of them."""
    written = nb.handoff(
        tmp_path / "bundle", keyword_model, [NOTE], copy_dataset=True, device="cpu", batch_size=1, rounds=4, steps=1
    )

    assert json.loads((written.folder / "texts.json").read_text("utf-8")) == [NOTE]
    assert [len(entities) for entities in written.golden.entities] == [1]
    assert "Handle this folder as you must handle them" in (written.folder / "README.md").read_text("utf-8")
    assert "Smith" not in str(written) + written._repr_html_() + json.dumps(written.to_dict())


def test_a_model_that_is_not_copied_is_checked(tmp_path, tiny):
    """Without a copy the name and the fingerprints are handed over, and another model under that name fails."""
    model = tiny.save(tmp_path / "model", tiny.keyword_bert())
    folder = nb.handoff(
        tmp_path / "bundle", model, copy_model=False, device="cpu", batch_size=4, rounds=4, steps=1
    ).folder

    assert not (folder / "model").exists()
    assert failed(folder) in ([], ["throughput"])
    tiny.change_json(model / "config.json", initializer_range=0.5)
    assert failed(folder) == ["model"]


def test_a_changed_weight_is_named(bundle):
    """One other byte in the weights fails, by the name of the file, and nothing is run."""
    file = bundle / "model" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)

    assert failed(bundle) == ["files"]
    assert "model/model.safetensors changed" in str(smoke(bundle))


def test_other_weights_with_a_new_checksum_are_named(bundle, bundles, tiny):
    """Other weights whose checksum was written anew are known by the golden run."""
    tiny.save(bundle / "model", tiny.random_bert())
    bundles.change(bundle, "texts.json", lambda _texts: None)

    assert failed(bundle) == ["model"]


def test_other_entities_are_named(bundle, bundles):
    """A golden entity that is not found fails, by the number of its text."""

    def edit(golden):
        number = next(place for place, found in enumerate(golden["entities"]) if found)
        golden["entities"][number][0]["start"] += 1

    bundles.change(bundle, "golden.json", edit)

    assert failed(bundle) == ["entities"]


def test_slower_steps_are_named(bundle, bundles):
    """Far less throughput than the logbook tells of fails; with a logbook that must not be compared it does not."""
    bundles.with_throughput(bundle, 1e9)
    assert failed(bundle) == ["throughput"]

    bundles.change(bundle, "logbook.json", lambda book: book["conditions"].update(power_source="UPS"))
    report = smoke(bundle)
    assert report.passed, str(report)
    assert "it cannot be compared with the logbook (power source)" in str(report)


def test_a_leak_is_named(bundle):
    """Outputs that are kept, as by a forgotten list, fail the memory plateau."""
    kept = []
    layer = torch.nn.modules.module.register_module_forward_hook(
        lambda _module, _inputs, _output: kept.append(torch.zeros(1 << 16))
    )
    try:
        assert failed(bundle) == ["memory"]
    finally:
        layer.remove()
    assert kept


def test_a_missing_file_and_a_missing_bundle(bundle, tmp_path):
    """A file that is gone is named; a folder that is no bundle is one clear error."""
    (bundle / "README.md").unlink()

    assert failed(bundle) == ["files"]
    with pytest.raises(ConfigurationError, match="is no bundle"):
        smoke(tmp_path / "nowhere")
    (bundle / "golden.json").write_text('{"schema": "openmed_nb/golden/1"}', "utf-8")
    with pytest.raises(ConfigurationError, match=r"golden\.json of 'copied' is damaged"):
        smoke(bundle)


def test_folders_that_are_not_empty_are_left_alone(tmp_path, keyword_model):
    """A folder with something in it, and a file, are refused before anything is loaded; an empty folder is taken."""
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text(NOTE, "utf-8")

    for place in ("full", "full/notes.txt"):
        with pytest.raises(ConfigurationError, match="is there already and not empty"):
            nb.handoff(tmp_path / place, keyword_model)
    assert (tmp_path / "full" / "notes.txt").read_text("utf-8") == NOTE


@pytest.mark.parametrize(
    "arguments",
    [
        {"model": torch.nn.Linear(1, 1)},
        {"batch_size": 0},
        {"rounds": 3},
        {"steps": True},
        {"logbook": "run.json"},
        {"dataset": NOTE},
        {"copy_dataset": True},
        {"dataset": "texts.json", "copy_dataset": True},
        {"dataset": [3]},
        {"no_such_option": 1},
    ],
)
def test_mistakes_write_nothing(tmp_path, arguments):
    """What cannot be handed over is one clear error, no word of a note is in it, and no folder is there afterwards."""
    with pytest.raises(ConfigurationError) as caught:
        nb.handoff(tmp_path / "bundle", **{"model": "bundled_small", "device": "cpu", **arguments})

    assert "Smith" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_pickles_are_not_handed_over(tmp_path, keyword_model):
    """Weights in a pickle file are refused, also where loading them was allowed."""
    model = Path(shutil.copytree(keyword_model, tmp_path / "model"))
    weights = nb.load_model(str(keyword_model))["model"].state_dict()
    (model / "model.safetensors").unlink()
    torch.save(weights, model / "pytorch_model.bin")

    with pytest.raises(ConfigurationError, match="in a pickle file"):
        nb.handoff(tmp_path / "bundle", model, device="cpu", allow_pickle=True)
    assert [one.name for one in tmp_path.iterdir()] == ["model"]
