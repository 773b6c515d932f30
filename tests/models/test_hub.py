"""The way to the hub: the real huggingface_hub client, in a process of its own, against a hub on 127.0.0.1.

Every test has a cache of its own; the client process and the address of the hub are shared, to import them only once.
"""

import shutil
import socket

import pytest
import torch
from safetensors.torch import load_file

import openmed_nb as nb
from helpers import hub_server
from helpers import tiny_models as tiny
from helpers.annotations import words_of
from openmed_nb._utils.text import describe_value
from openmed_nb.errors import ModelDownloadError
from openmed_nb.models.registry import is_reachable

pytestmark = pytest.mark.real_computer  # The client is a process of its own.

ID = "OpenMed/OpenMed-NER-DiseaseDetect-TinyMed-135M"
FOUND = {"words": ["diabetes mellitus", "hypertension"]}


@pytest.fixture(scope="module")
def running_hub():
    """A hub that runs until the end of the module, without models."""
    hub = hub_server.Hub()
    hub.open()
    yield hub
    hub.close()


@pytest.fixture(autouse=True)
def hub(running_hub, keyword_model):
    """The hub with one model and no faults."""
    running_hub.reset()
    running_hub.models[ID] = keyword_model
    return running_hub


@pytest.fixture(scope="module")
def online_client(start_client, running_hub, tmp_path_factory):
    """A client process of the hub."""
    return start_client(HF_ENDPOINT=running_hub.endpoint, HF_HOME=str(tmp_path_factory.mktemp("home")))


@pytest.fixture
def load(online_client, tmp_path):
    """Load a model of the hub in the client, with a cache of this test alone."""
    return lambda name=ID, **request: online_client.load(name, **{"cache_dir": str(tmp_path), **request})


def check_unreachable(answer, why="the Hugging Face Hub is not reachable"):
    """Check for the one error of a model that cannot be had now."""
    assert answer["error"] == "ModelDownloadError"
    assert ID in answer["text"]
    assert why in answer["text"]
    assert "'bundled', which works offline" in answer["text"]


def test_download(hub, load):
    """A model that is on the hub alone is downloaded once; a second load only asks the hub whether there is a newer one."""
    assert load("disease_detection_tiny") == FOUND
    assert hub.downloads("model.safetensors") == 1
    hub.requests.clear()
    assert load() == FOUND
    assert [request for request in hub.requests if f"/{ID}" in request] == [f"GET /api/models/{ID}/revision/main"]


@pytest.mark.parametrize("dtype", ["auto", "int8"])
def test_dtype_needs_no_more_requests(hub, load, dtype, tmp_path):
    """Looking up a validation record requires the files of the model, which are downloaded once."""
    load(cache_dir=str(tmp_path / "plain"))
    plain = {*hub.requests}
    hub.requests.clear()

    assert load(dtype=dtype) == FOUND
    assert len([request for request in hub.requests if "/revision/" in request]) == 1
    assert hub.downloads("model.safetensors") == 1
    assert {*hub.requests} <= plain


def test_only_the_files_of_a_model_are_downloaded(hub, load, keyword_model, tmp_path, tmp_path_factory):
    """Neither Python code nor pickles nor pictures are downloaded."""
    folder = shutil.copytree(keyword_model, tmp_path_factory.mktemp("hub") / "model")
    for name in ("modeling_own.py", "pytorch_model.bin", "picture.png"):
        (folder / name).write_bytes(b"not wanted")
    hub.models[ID] = folder
    assert load() == FOUND
    assert {file.name for file in tmp_path.rglob("snapshots/*/*")} == {file.name for file in keyword_model.iterdir()}


def test_model_in_the_cache_loads_without_network(hub, load, tmp_path):
    """A model that was downloaded loads again; another cache is one error, before huggingface_hub tries and tries."""
    load()
    hub.requests.clear()
    assert load(local_only=True) == FOUND
    with hub_server.closed(hub):
        assert load() == FOUND
        check_unreachable(load(cache_dir=str(tmp_path / "another cache")))
    check_unreachable(load(local_only=True, cache_dir=str(tmp_path / "other")), "local_only=True disables network")
    assert hub.requests == []


def test_server_that_does_not_respond_is_not_reachable():
    """The request stops at the timeout."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        assert not is_reachable(f"http://127.0.0.1:{server.getsockname()[1]}")


@pytest.mark.parametrize("revision", ["v9", "../../v9"])
def test_missing_revision(load, revision, keyword_model):
    """An unknown model; a commit by its hash is a revision."""
    assert load(revision=hub_server.commit(keyword_model)) == FOUND
    answer = load(revision=revision)
    assert answer["error"] == "UnknownModelError"
    assert f"has no revision {describe_value(revision)}" in answer["text"]


class TestRefusal:
    """The hub is there and says no."""

    def test_gated_model(self, hub, load):
        """A gated model is unreachable until access is granted, and the error says how to ask for it."""
        for status in (401, 403):
            hub.refused[ID] = status
            answer = load()
            assert answer["error"] == "ModelDownloadError"
            assert "is gated" in answer["text"]
            assert "hf auth login" in answer["text"]
        hub.refused.clear()
        assert load() == FOUND

    def test_unknown_model(self, load):
        """An id that the hub does not have is an unknown model, with the nearest ids; a bare name is shown as that id."""
        for name, shown in (("OpenMed/OpenMed-NER-DiseaseDetect-TinyMed-13M", ID), ("No-Such", "OpenMed/No-Such")):
            answer = load(name)
            assert answer["error"] == "UnknownModelError"
            assert repr(shown) in answer["text"]

    def test_unavailable_hub(self, hub, load):
        """A hub that answers 503 is unreachable, and the error says so."""
        hub.unavailable = True
        check_unreachable(load(), "503")


class TestWhatMustBeAllowed:
    """Pickles and Python code come from the hub only where they were allowed."""

    @pytest.fixture
    def folder(self, hub, keyword_model, tmp_path_factory):
        """The files of the hub's model, which a test may change."""
        hub.models[ID] = shutil.copytree(keyword_model, tmp_path_factory.mktemp("hub") / "model")
        return hub.models[ID]

    def test_pickle_is_downloaded_only_if_allowed(self, hub, load, folder):
        """A model of which only a pickle exists is not downloaded whole; it is, and is loaded, with the flag."""
        torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
        answer = load()
        assert answer["error"] == "InvalidModelError"
        assert "allow_pickle=True" in answer["text"]
        assert hub.downloads("pytorch_model.bin") == 0
        assert load(allow_pickle=True) == FOUND

    def test_code_is_downloaded_only_if_trusted(self, hub, load, folder):
        """A model that needs code of its own is refused without its code being downloaded; by name it is allowed."""
        (folder / "own.py").write_text("from transformers import BertConfig as A, BertForTokenClassification as B\n")
        own = {"AutoConfig": "own.A", "AutoModelForTokenClassification": "own.B"}
        tiny.change_json(folder / "config.json", model_type="own_bert", auto_map=own)
        answer = load("disease_detection_tiny")
        assert answer["error"] == "UntrustedModelError"
        assert "remote_code_allowed=('disease_detection_tiny',)" in answer["text"]
        assert hub.downloads("own.py") == 0
        assert load("disease_detection_tiny", remote_code_allowed=[ID]) == FOUND


def test_offline_mode(load, tmp_path):
    """HF_HUB_OFFLINE=1, as in this process, leaves the hub alone; a model in the cache loads."""
    assert load() == FOUND
    loader = nb.compat.ModelLoader(nb.OpenMedConfig(device="cpu", cache_dir=str(tmp_path)))
    try:
        assert words_of(loader.create_pipeline(ID), "no history of asthma .") == ["asthma"]
    finally:
        loader.unload()
    with pytest.raises(ModelDownloadError, match="HF_HUB_OFFLINE disables network access"):
        nb.load_model(ID, cache_dir=str(tmp_path / "another cache"))
    with pytest.raises(ModelDownloadError, match="Did you mean 'bundled_small'"):
        nb.load_model("bundled-small")


def test_cache_that_cannot_be_written(load, tmp_path):
    """A cache folder that is a file gives one error that says the download failed."""
    file = tmp_path / "file"
    file.touch()
    check_unreachable(load(cache_dir=str(file)), "could not be downloaded")
