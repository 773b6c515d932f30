"""Bundles: what is written, what is refused, and the smoke test in this process."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import openmed_nb as nb
from openmed_nb._render.display import FAILED
from openmed_nb.errors import ConfigurationError, ModelRefused
from openmed_nb.runbook.records.handoff.bundle import free_folder, new_folder, write_checksums
from openmed_nb.runbook.records.handoff.smoke import changed_files, from_command_line, keep, smoke

pytestmark = [pytest.mark.real_computer, pytest.mark.usefixtures("quick_collection")]

NOTE = "the patient has diabetes mellitus , says John Smith ."


def failed(bundle):
    """Return the names of what fails in the smoke test of a bundle."""
    return [one.name for one in smoke(bundle).findings if one.status == FAILED]


def test_what_is_in_a_bundle(handed_over):
    """A bundle has the files that its README names, each with a checksum, and nothing is left beside it."""
    names = {name.partition("/")[0] for name, _ in handed_over.files}

    assert names == {
        *("README.md", "run.sh", "smoke.py", "golden.json", "logbook.json", "evidence.json", "logbook.schema.json"),
        *("texts.json", "model", "requirements.txt", "wheels", "SHA256SUMS", "trace.json.gz"),
        *("openmed_nb.service", "openmed_nb.plist"),
    }
    assert all(f"`{name}" in (handed_over.folder / "README.md").read_text("utf-8") for name in names)
    assert [one.name for one in handed_over.folder.parent.iterdir()] == ["bundle"]
    assert changed_files(handed_over.folder) == {}
    assert nb.runbook.Logbook.read(handed_over.folder / "evidence.json").figures == ()
    assert handed_over.to_dict()["golden"]["copied"] is True
    assert "this text" not in str(handed_over)


def test_the_owner_of_the_golden_command_is_named(handed_over):
    """Who answers for it stands in the README, escaped, and in the golden run."""
    assert handed_over.golden.owner == "The <b>team"
    assert "golden command: The &lt;b&gt;team." in (handed_over.folder / "README.md").read_text("utf-8")
    assert (handed_over.folder / "trace.json.gz").read_bytes() == b"a trace"


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


def test_copied_texts_and_a_model_elsewhere(tmp_path, tiny):
    """Texts are copied where that is asked for; of a model that is not, no path is handed over, and it is checked where it is.

    Its sizes may be numbers of numpy.
    """
    model = tiny.save(tmp_path / "John `Smith` <b>", tiny.keyword_bert())
    measured = {
        "device": "cpu",
        **{name: np.int64(size) for name, size in {"batch_size": 1, "rounds": 4, "steps": 1}.items()},
    }
    (tmp_path / "bundle").mkdir()
    written = nb.handoff(tmp_path / "bundle", model, [NOTE], copy_dataset=True, copy_model=False, **measured)
    readme = (written.folder / "README.md").read_text("utf-8")

    assert json.loads((written.folder / "texts.json").read_text("utf-8")) == [NOTE]
    assert [len(entities) for entities in written.golden.entities] == [1]
    assert "Handle this folder as you must handle them" in readme
    assert "Smith" not in str(written) + written._repr_html_() + json.dumps(written.to_dict()["golden"]) + readme
    assert (written.golden.model, (written.folder / "model").exists()) == ("model", False)
    with pytest.raises(ConfigurationError, match="--model FOLDER"):
        smoke(written.folder)
    tiny.change_json(model / "config.json", initializer_range=0.5)
    elsewhere = model.rename(tmp_path / "renamed")
    assert [one.name for one in smoke(written.folder, model=elsewhere).findings if one.status == FAILED] == ["model"]


@pytest.mark.parametrize("part", ["../elsewhere.safetensors", "{folder}/elsewhere.safetensors"])
def test_a_model_with_weights_outside_its_folder_is_not_handed_over(tmp_path, tiny, part):
    """An index that leads out of the model's folder is refused, and nothing is written; a bundle could not follow it."""
    model = with_index(tiny, tmp_path / "model", part.format(folder=tmp_path / "model"))

    with pytest.raises(ModelRefused, match=r"index of the weights of .* names a file outside its folder"):
        nb.handoff(tmp_path / "bundle", model, device="cpu", batch_size=1, rounds=4, steps=1)
    assert not (tmp_path / "bundle").exists()


def test_weights_in_a_folder_of_the_model(tmp_path, tiny):
    """Weights that are in a folder inside the model's are handed over where the index finds them."""
    model = with_index(tiny, tmp_path / "model", "parts/one.safetensors")
    written = nb.handoff(tmp_path / "bundle", model, device="cpu", batch_size=1, rounds=4, steps=1)

    assert "model/parts/one.safetensors" in dict(written.files)
    assert failed(written.folder) == []


def with_index(tiny, folder, part):
    """Save the keyword model with an index that names one file for all weights, and put the weights there."""
    weights = tiny.save(folder, tiny.keyword_bert()) / "model.safetensors"
    index = {"metadata": {}, "weight_map": dict.fromkeys(load_file(weights), part)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), "utf-8")
    (folder / part).parent.mkdir(exist_ok=True)
    weights.rename(folder / part)
    return folder


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


def test_a_leak_is_named(bundle):
    """Outputs that are kept, as by a forgotten list, fail the memory plateau."""
    kept = []
    layer = torch.nn.modules.module.register_module_forward_hook(
        lambda _module, _inputs, _output: kept.append(torch.zeros(1 << 14))
    )
    try:
        assert failed(bundle) == ["memory"]
    finally:
        layer.remove()
    assert kept


def test_a_missing_file_and_a_missing_bundle(bundle, tmp_path):
    """A file that is gone is named; a folder that is no bundle is one clear error."""
    (bundle / "model" / "config.json").unlink()

    assert failed(bundle) == ["files"]
    with pytest.raises(ConfigurationError, match="is not a bundle"):
        smoke(tmp_path / "nowhere")


def test_numbers_that_no_trial_has(bundle, bundles):
    """A golden run whose trial would fail, prove nothing or never end is refused, whatever checksum it has."""
    for name, number in (("batch_size", -1), ("batch_size", 0), ("steps", -5), ("rounds", 10**9), ("rounds", 3)):
        former = json.loads((bundle / "golden.json").read_text("utf-8"))[name]
        bundles.change(bundle, "golden.json", lambda golden, name=name, number=number: golden.update({name: number}))
        with pytest.raises(ConfigurationError, match=rf"golden.json of .+ is damaged: {name} cannot be {number}\."):
            smoke(bundle)
        bundles.change(bundle, "golden.json", lambda golden, name=name, number=former: golden.update({name: number}))


def test_another_version_of_the_toolkit_is_named(bundle, bundles):
    """A toolkit of another version than the bundle's is a package that is not the one of the bundle."""
    bundles.change(bundle, "logbook.json", lambda book: book["software"].update(openmed_nb="9.9"))
    (bundle / "model" / "config.json").unlink()

    assert failed(bundle) == ["files", "packages"]
    assert f"openmed-nb {nb.__version__} instead of 9.9" in str(smoke(bundle))


DAMAGED = {
    "no golden run": (
        "golden.json",
        lambda _golden: {"schema": "openmed_nb/golden/1"},
        "golden.json of 'copied' is damaged",
    ),
    "fewer texts": ("texts.json", lambda texts: texts[1:], "has other texts than its golden.json"),
    "no texts": ("texts.json", lambda _texts: [3], "texts.json of the bundle is damaged"),
}


@pytest.mark.parametrize(("name", "edit", "says"), DAMAGED.values(), ids=DAMAGED)
def test_damage_with_new_checksums_is_one_clear_error(bundle, capsys, name, edit, says):
    """What cannot be run is one line, the exit status is 1, and the result says so instead of an earlier one."""
    (bundle / "smoke.json").write_text('{"passed": true}', "utf-8")
    file = bundle / name
    file.write_text(json.dumps(edit(json.loads(file.read_text("utf-8")))), "utf-8")
    write_checksums(bundle)

    assert from_command_line(bundle, []) == 1
    assert says in capsys.readouterr().err
    assert json.loads((bundle / "smoke.json").read_text("utf-8"))["passed"] is False


def test_devices_that_are_none_are_one_clear_error(bundle, capsys):
    """A spelling that names no device ends with status 1 and one line; a result holds any name, also half a character."""
    assert from_command_line(bundle, ["--device", "tpu"]) == 1
    assert "names no device" in capsys.readouterr().err

    keep({"name": "caf\udce9"}, bundle / "smoke.json")
    assert json.loads((bundle / "smoke.json").read_text("utf-8")) == {"name": "caf\udce9"}


def test_places_that_are_refused(tmp_path, keyword_model):
    """A folder with something in it, a file, a folder below a file, and what is not a path are refused and left alone."""
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text(NOTE, "utf-8")

    full = {tmp_path / "full": "not empty", tmp_path / "full" / "notes.txt": "not empty"}
    others = (f"{tmp_path}/full/notes.txt/bundle", None, f"{tmp_path}/a\0b", "~nobody.is.here/x")
    for place, says in {**full, **dict.fromkeys(others)}.items():
        with pytest.raises(ConfigurationError, match=says):
            nb.handoff(place, keyword_model)
    assert [one.name for one in tmp_path.rglob("*")] == ["full", "notes.txt"]
    assert (tmp_path / "full" / "notes.txt").read_text("utf-8") == NOTE


PLACES = {
    "nothing yet": (lambda place: place, False),
    "an empty folder": (lambda place: place.mkdir() or place, True),
    "a link to an empty folder": (lambda place: link_to(place, there=True), True),
    "a link to nothing": (lambda place: link_to(place, there=False), False),
}


def link_to(place, there):
    """Return a link to a folder, or to nothing."""
    target = place.with_name("target")
    if there:
        target.mkdir()
    place.symlink_to(target, target_is_directory=True)
    return place


@pytest.mark.parametrize(("make", "there"), PLACES.values(), ids=PLACES)
def test_a_folder_that_is_there_stays_the_same(tmp_path, make, there):
    """What is written lies in the folder, also behind a link, and one in which a process may be is not made anew."""
    place = make(tmp_path / "bundle")
    target = free_folder(place)
    before = target.stat().st_ino if there else None
    with new_folder(target) as folder:
        (folder / "run.sh").write_text("", "utf-8")

    assert [one.name for one in place.iterdir()] == ["run.sh"]
    assert before in {None, place.stat().st_ino}


def test_what_fails_leaves_nothing(tmp_path):
    """Where filling a folder fails, an empty one is as empty as before, and a new one is not there."""
    (tmp_path / "empty").mkdir()
    for place in ("empty", "new"):
        with pytest.raises(FileNotFoundError), new_folder(tmp_path / place) as folder:
            shutil.copyfile(tmp_path / "no such file", folder / "run.sh")

    assert [str(one.relative_to(tmp_path)) for one in tmp_path.rglob("*")] == ["empty"]


MISTAKES = [
    {"model": torch.nn.Linear(1, 1)},
    {"batch_size": 0},
    {"rounds": 3},
    {"steps": True},
    {"logbook": "run.json"},
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


def test_mistakes_write_nothing(tmp_path):
    """What cannot be handed over is one clear error, no word of a note is in it, and no folder is there afterwards."""
    for arguments in MISTAKES:
        with pytest.raises(ConfigurationError) as caught:
            nb.handoff(tmp_path / "bundle", **{"model": "bundled_small", "device": "cpu", **arguments})

        assert "Smith" not in str(caught.value), arguments
        assert list(tmp_path.iterdir()) == [], arguments


def test_pickles_are_not_handed_over(tmp_path, keyword_model):
    """Weights in a pickle file are refused, also where loading them was allowed."""
    model = Path(shutil.copytree(keyword_model, tmp_path / "model"))
    weights = nb.load_model(str(keyword_model))["model"].state_dict()
    (model / "model.safetensors").unlink()
    torch.save(weights, model / "pytorch_model.bin")

    with pytest.raises(ConfigurationError, match="in a pickle file"):
        nb.handoff(tmp_path / "bundle", model, device="cpu", allow_pickle=True)
    assert [one.name for one in tmp_path.iterdir()] == ["model"]
