"""The loaded models of a session: their copies, devices and sizes."""

import gc
import weakref

import pytest
import torch

from helpers import simulated_computers as computers
from helpers.annotations import words_of
from helpers.session_state import make_store
from openmed_nb.annotation.pipeline import get_pipeline
from openmed_nb.errors import DeviceUnavailableError
from openmed_nb.models.config import OpenMedConfig
from openmed_nb.models.loading import LoadSpec, move_model
from openmed_nb.models.store import LoadedModelInfo, LoadedModels

WORDS = ["diabetes mellitus", "hypertension", "asthma"]
MIB = 1 << 20


@pytest.fixture
def store():
    """A store without models."""
    return make_store()


@pytest.fixture
def spec(keyword_model):
    """The keyword model with default settings."""
    return LoadSpec.from_name(str(keyword_model), OpenMedConfig())


@pytest.fixture
def another_spec(random_model):
    """Another model."""
    return LoadSpec.from_name(str(random_model), OpenMedConfig())


def device_of(loaded):
    """Return the device of all tensors of a model."""
    (device,) = {str(tensor.device) for tensor in (*loaded.model.parameters(), *loaded.model.buffers())}
    return device


def test_pipelines_with_equal_options_are_one(store, spec):
    loaded = store.get(spec, "cpu", True)
    first = get_pipeline(loaded, "first", {"batch_size": 8, "ignore_labels": ["O"]})
    assert get_pipeline(loaded, "first", {"ignore_labels": ["O"], "batch_size": 8}) is first
    others = [get_pipeline(loaded, "first", {}), get_pipeline(loaded, "simple", {"batch_size": 8})]
    assert len({id(pipe) for pipe in (first, *others)}) == 3
    assert {id(pipe.model) for pipe in (first, *others)} == {id(loaded.model)}


def test_settings_of_the_loaded_model_make_another_copy(store, spec, keyword_model, monkeypatch):
    """Settings of the download and the device do not, and neither does another name of the folder."""
    loaded = store.get(spec, "cpu", True)
    for settings in ({"dtype": "bfloat16"}, {"revision": "v2"}, {"allow_pickle": True}, {"cache_dir": "elsewhere"}):
        assert store.get(LoadSpec.from_name(str(keyword_model), OpenMedConfig(**settings)), "cpu", True) is not loaded
    for settings in ({"hf_token": "hf_x"}, {"local_only": True}, {"backend": None}, {"device": "cpu"}):
        assert store.get(LoadSpec.from_name(str(keyword_model), OpenMedConfig(**settings)), "cpu", True) is loaded
    monkeypatch.chdir(keyword_model.parent)
    assert store.get(LoadSpec.from_name(f"./{keyword_model.name}", OpenMedConfig()), "cpu", True) is loaded
    assert loaded.model.dtype == torch.float32


def test_folder_of_a_loaded_model_is_known_in_any_dtype(store, spec, another_spec, keyword_model):
    store.get(spec.in_dtype("bfloat16"), "cpu", False)

    assert store.model_folder(spec) == store.model_folder(spec.in_dtype("auto")) == keyword_model
    assert store.model_folder(another_spec) is None


def test_followers_move_and_other_models_stay(store, spec, another_spec, second_device):
    """Also when the model is requested on another device."""
    follower = store.get(spec, "cpu", True)
    pinned = store.get(another_spec, "cpu", False)
    pipe = get_pipeline(follower, "first", {})
    assert store.move_followers(second_device) == (spec.reference.name,)
    assert (device_of(follower), device_of(pinned)) == (second_device, "cpu")
    assert store.move_followers(second_device) == ()
    assert words_of(pipe) == WORDS
    assert get_pipeline(store.get(spec, "cpu", True), "first", {}) is pipe
    assert (device_of(follower), str(pipe.device)) == ("cpu", "cpu")


def test_failed_move_restores_all_devices(store, spec, another_spec, second_device):
    movable = store.get(spec, "cpu", True)
    stuck = store.get(another_spec, "cpu", True)
    store.move_followers(second_device)
    stuck.model.to("meta")  # Its tensors have no data, so it cannot be moved.
    with pytest.raises(DeviceUnavailableError) as caught:
        store.move_followers("cpu")
    assert another_spec.reference.name in str(caught.value)
    assert (device_of(movable), device_of(stuck)) == (second_device, "meta")
    assert words_of(get_pipeline(movable, "first", {})) == WORDS


def test_move_to_a_device_that_torch_lacks_leaves_the_model(store, spec):
    loaded = store.get(spec, "cpu", True)
    for device in ("no such device", "vulkan"):
        with pytest.raises(DeviceUnavailableError, match=device):
            move_model(loaded.model, device, loaded.name)
    assert device_of(loaded) == "cpu"
    assert words_of(get_pipeline(loaded, "first", {})) == WORDS


def test_placements_are_announced_once(spec, another_spec, second_device):
    placements = []
    store = make_store(
        on_placement=lambda key, *placement: placements.append((key.spec.reference.name, key.device, *placement))
    )
    name = spec.reference.name
    for _ in range(2):
        store.get(spec, "cpu", True)
        store.get(another_spec, "cpu", False)
    store.move_followers(second_device)
    store.move_followers("cpu", skip_checks=True)

    pinned = (another_spec.reference.name, "cpu", "cpu")
    loads = [(name, None, "cpu", False), (*pinned, False)]
    assert placements == [*loads, (name, None, "cpu", True), (*pinned, True), (name, None, second_device, False)]
    store.recheck_followers()
    assert placements[5:] == [(name, None, "cpu", False)]


def test_rejected_placement_changes_nothing(spec, another_spec, second_device):
    placements = []

    def reject(key, device, _is_reused):
        placements.append(key)
        if len(placements) > 2:
            raise PermissionError(device)

    store = make_store(on_placement=reject)
    loaded = [store.get(model_spec, "cpu", True) for model_spec in (spec, another_spec)]
    with pytest.raises(PermissionError):
        store.move_followers(second_device)
    with pytest.raises(PermissionError):
        store.get(spec, "cpu", False)
    assert [device_of(model) for model in loaded] == ["cpu", "cpu"]
    assert len(store.inventory()) == 2


def test_unload_releases_memory(store, spec):
    references = [weakref.ref(get_pipeline(store.get(spec, "cpu", True), "first", {}))]
    references.append(weakref.ref(store.get(spec, "cpu", True).model))
    gc.disable()
    try:
        assert store.unload() == (spec.reference.name,)
        assert [reference() for reference in references] == [None, None]
    finally:
        gc.enable()


def test_name_is_unloaded_on_every_device(store, spec, another_spec, second_device):
    other = store.get(another_spec, "cpu", True)
    for device, follows_session in (("cpu", True), (second_device, False)):
        assert device_of(store.get(spec, device, follows_session)) == device
    assert store.unload(spec.reference.name) == (spec.reference.name,)
    assert store.find() == (other,)
    assert store.unload("never loaded") == ()


def test_inventory_names_a_model_with_two_copies_once():
    inventory = LoadedModels(
        (
            LoadedModelInfo("bundled", "cpu", "float32", 3 * MIB, follows_session=True),
            LoadedModelInfo("bundled", "cuda:1", "bfloat16", 5 * MIB // 2, follows_session=False),
        )
    )

    assert inventory.names == ("bundled",)
    assert str(LoadedModels(())) == "No models loaded"


def test_inventory_counts_shared_tensors_once_and_computes_nothing(store, spec, another_spec):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Reject(TorchDispatchMode):
        def __torch_dispatch__(self, operator, *_):
            raise AssertionError(operator)

    loaded = [store.get(model_spec, "cpu", follows_session=True) for model_spec in (spec, another_spec)]
    loaded.append(store.get(spec.in_dtype("bfloat16"), "cpu", follows_session=False))
    loaded[0].model.another_name = loaded[0].model.classifier
    loaded[0].model.register_buffer("the_same", loaded[0].model.classifier.weight)
    sizes = []
    for model in (model.model for model in loaded):
        tensors = {tensor.data_ptr(): tensor.nbytes for tensor in (*model.parameters(), *model.buffers())}
        sizes.append(sum(tensors.values()))
    with Reject():
        listed = store.inventory()

    assert [(model.name, model.size) for model in listed] == list(zip([m.name for m in loaded], sizes, strict=True))
    assert [(model.follows_session, model.dtype) for model in listed] == [*[(True, "float32")] * 2, (False, "bfloat16")]


def test_session_without_models_has_no_store():
    session = computers.plain().session
    assert session.inventory() == LoadedModels(())
    assert session._models is None
