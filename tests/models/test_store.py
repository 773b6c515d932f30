"""The loaded models of a session: which copies there are, where each is, and what they occupy."""

import gc
import json
import weakref

import pytest
import torch

from openmed_nb.annotation.pipeline import get_pipeline
from openmed_nb.errors import DeviceUnavailableError
from openmed_nb.models.config import OpenMedConfig
from openmed_nb.models.loading import LoadSpec, move_model
from openmed_nb.models.store import LoadedModelInfo, LoadedModels, ModelStore

pytestmark = pytest.mark.usefixtures("quick_collection")

WORDS = ["diabetes mellitus", "hypertension", "asthma"]
MIB = 1 << 20


@pytest.fixture
def store():
    """A store without models."""
    return ModelStore()


@pytest.fixture
def spec(keyword_model):
    """The keyword model with default settings."""
    return LoadSpec.from_name(str(keyword_model), OpenMedConfig())


@pytest.fixture
def another_spec(random_model):
    """Another model."""
    return LoadSpec.from_name(str(random_model), OpenMedConfig())


def place(loaded):
    """Return the device of a model, after checking that it is whole."""
    (device,) = {str(tensor.device) for tensor in (*loaded.model.parameters(), *loaded.model.buffers())}
    return device


class TestCache:
    """What is the same copy of a model, and what is another."""

    def test_pipelines_with_equal_options_are_one(self, store, spec):
        loaded = store.get(spec, "cpu", True)
        assert store.get(spec, "cpu", True) is loaded
        first = get_pipeline(loaded, "first", {"stride": 8, "ignore_labels": ["O"]})
        assert get_pipeline(loaded, "first", {"ignore_labels": ["O"], "stride": 8}) is first
        others = [get_pipeline(loaded, "first", {}), get_pipeline(loaded, "simple", {"stride": 8})]
        assert len({id(pipe) for pipe in (first, *others)}) == 3
        assert {id(pipe.model) for pipe in (first, *others)} == {id(loaded.model)}

    @pytest.mark.parametrize(
        ("settings", "is_same"),
        [
            ({"dtype": "bfloat16"}, False),
            ({"revision": "v2"}, False),
            ({"allow_pickle": True}, False),
            ({"cache_dir": "elsewhere"}, False),
            ({"hf_token": "hf_x"}, True),
            ({"local_only": True}, True),
            ({"backend": None}, True),
            ({"device": "cpu"}, True),
        ],
    )
    def test_settings_of_what_is_loaded_make_another_copy(self, store, spec, keyword_model, settings, is_same):
        """How the files are fetched makes no other model of them, nor does the device of the settings."""
        former = store.get(spec, "cpu", True)
        other = store.get(LoadSpec.from_name(str(keyword_model), OpenMedConfig(**settings)), "cpu", True)
        assert (other.model is former.model) is is_same
        assert former.model.dtype == torch.float32

    def test_two_names_of_one_folder_are_one_copy(self, store, spec, keyword_model, monkeypatch):
        monkeypatch.chdir(keyword_model.parent)
        relative = LoadSpec.from_name(f"./{keyword_model.name}", OpenMedConfig())
        assert store.get(relative, "cpu", True) is store.get(spec, "cpu", True)

    def test_another_device_is_another_copy(self, store, spec, words_of, second_device):
        here = store.get(spec, "cpu", False)
        there = store.get(spec, second_device, False)
        assert (place(here), place(there)) == ("cpu", second_device)
        assert words_of(get_pipeline(there, "first", {})) == WORDS

    def test_folder_of_a_loaded_model_is_known_in_any_type(self, store, spec, another_spec, keyword_model):
        store.get(spec.in_dtype("bfloat16"), "cpu", False)

        assert store.model_folder(spec) == store.model_folder(spec.in_dtype("auto")) == keyword_model
        assert store.model_folder(another_spec) is None
        assert spec.in_dtype("bfloat16") != spec == spec.in_dtype("bfloat16").in_dtype("float32")


class TestFollowing:
    """Models that were loaded without naming a device move with the session's; the others stay."""

    def test_followers_move_and_pinned_models_stay(self, store, spec, another_spec, words_of, second_device):
        """Also when the model is asked for on another device."""
        follower = store.get(spec, "cpu", True)
        pinned = store.get(another_spec, "cpu", False)
        pipe = get_pipeline(follower, "first", {})
        assert store.move_followers(second_device) == (spec.reference.name,)
        assert (place(follower), place(pinned)) == (second_device, "cpu")
        assert store.move_followers(second_device) == ()
        assert words_of(pipe) == WORDS
        assert get_pipeline(store.get(spec, "cpu", True), "first", {}) is pipe
        assert (place(follower), str(pipe.device)) == ("cpu", "cpu")

    def test_failed_move_leaves_all_where_they_were(self, store, spec, another_spec, words_of, second_device):
        """Those that moved before the one that cannot are moved back; the error names that one."""
        movable = store.get(spec, "cpu", True)
        stuck = store.get(another_spec, "cpu", True)
        store.move_followers(second_device)
        stuck.model.to("meta")  # without contents, so that it cannot be moved anywhere
        with pytest.raises(DeviceUnavailableError) as caught:
            store.move_followers("cpu")
        assert another_spec.reference.name in str(caught.value)
        assert (place(movable), place(stuck)) == (second_device, "meta")
        assert words_of(get_pipeline(movable, "first", {})) == WORDS

    @pytest.mark.parametrize("device", ["no such device", "xpu", "vulkan"])
    def test_move_to_a_device_that_torch_lacks_leaves_the_model(self, store, spec, device, words_of):
        loaded = store.get(spec, "cpu", True)
        with pytest.raises(DeviceUnavailableError, match=device):
            move_model(loaded.model, device, loaded.name)
        assert place(loaded) == "cpu"
        assert words_of(get_pipeline(loaded, "first", {})) == WORDS


class TestArriving:
    """The listener to models that come to a device may object."""

    def test_loads_and_moves_are_announced_once(self, spec, another_spec, second_device):
        """A model is announced when it is loaded and when it moved, not when it is asked for again or stays."""
        arrivals = []
        store = ModelStore(
            on_placement=lambda key, device: arrivals.append((key.spec.reference.name, key.device, device))
        )
        name = spec.reference.name
        for _ in range(2):
            store.get(spec, "cpu", True)
            store.get(another_spec, "cpu", False)
        store.move_followers(second_device)
        store.move_followers("cpu", skip_checks=True)

        pinned = (another_spec.reference.name, "cpu", "cpu")
        assert arrivals == [(name, None, "cpu"), pinned, (name, None, second_device)]
        store.recheck_followers()
        assert arrivals[3:] == [(name, None, "cpu")]

    def test_objection_leaves_all_as_it_was(self, spec, another_spec, second_device):
        arrivals = []

        def object_to(key, device):
            arrivals.append(key)
            if len(arrivals) > 2:
                raise PermissionError(device)

        store = ModelStore(on_placement=object_to)
        loaded = [store.get(model_spec, "cpu", True) for model_spec in (spec, another_spec)]
        with pytest.raises(PermissionError):
            store.move_followers(second_device)
        with pytest.raises(PermissionError):
            store.get(spec, "cpu", False)
        assert [place(model) for model in loaded] == ["cpu", "cpu"]
        assert len(store.inventory()) == 2


class TestUnloading:
    """Forgetting a model frees its memory."""

    def test_memory_is_freed(self, store, spec):
        gone = [weakref.ref(get_pipeline(store.get(spec, "cpu", True), "first", {}))]
        gone.append(weakref.ref(store.get(spec, "cpu", True).model))
        gc.disable()
        try:
            assert store.unload() == (spec.reference.name,)
            assert [reference() for reference in gone] == [None, None]
        finally:
            gc.enable()

    def test_name_is_unloaded_on_every_device(self, store, spec, another_spec, second_device):
        kept = store.get(another_spec, "cpu", True)
        former = [store.get(spec, "cpu", True), store.get(spec, second_device, False)]
        before = store.inventory()
        assert store.unload(spec.reference.name) == (spec.reference.name,)
        assert store.inventory().names == (another_spec.reference.name,)
        assert store.get(another_spec, "cpu", True) is kept
        assert store.get(spec, "cpu", True) not in former
        assert store.unload("never loaded") == ()
        # An earlier inventory does not change and does not reference tensors.
        assert len(before) == 3
        assert {type(value) for value in vars(before[0]).values()} == {str, int, bool}


class TestInventory:
    """What is in memory: where each copy is, of which type, how large."""

    def test_text_has_a_row_for_each_copy(self):
        inventory = LoadedModels(
            (
                LoadedModelInfo("bundled", "cpu", "float32", 3 * MIB, follows_session=True),
                LoadedModelInfo("bundled", "cuda:1", "bfloat16", 5 * MIB // 2, follows_session=False),
                LoadedModelInfo("another", "mps", "float16", 512, follows_session=True),
            )
        )
        second = {
            "name": "bundled",
            "device": "cuda:1",
            "dtype": "bfloat16",
            "size": 5 * MIB // 2,
            "follows_session": False,
        }

        assert str(inventory).splitlines() == [
            "3 models loaded",
            "  model    device  dtype     size       moves when you change the device",
            "  bundled  cpu     float32   3.0 MiB    yes",
            "  bundled  cuda:1  bfloat16  2.5 MiB    no",
            "  another  mps     float16   512 bytes  yes",
        ]
        assert str(LoadedModels(())) == "No models loaded"
        assert json.loads(json.dumps(inventory.to_dict()))["models"][1] == second
        assert (len(inventory), inventory[:2], inventory.names) == (3, inventory.models[:2], ("bundled", "another"))

    def test_order_is_that_of_loading(self, store, spec, another_spec):
        """With place, type and size; a tensor that two parts of a model share is counted once."""
        loaded = [store.get(model_spec, "cpu", follows_session=True) for model_spec in (spec, another_spec)]
        loaded.append(store.get(spec.in_dtype("bfloat16"), "cpu", follows_session=False))
        loaded[0].model.another_name = loaded[0].model.classifier
        loaded[0].model.register_buffer("the_same", loaded[0].model.classifier.weight)
        sizes = []
        for model in (model.model for model in loaded):
            tensors = {tensor.data_ptr(): tensor.nbytes for tensor in (*model.parameters(), *model.buffers())}
            sizes.append(sum(tensors.values()))
        listed = store.inventory()

        assert [model.name for model in listed] == [model.name for model in loaded]
        assert [(model.follows_session, model.dtype) for model in listed] == [
            *[(True, "float32")] * 2,
            (False, "bfloat16"),
        ]
        assert [model.size for model in listed] == sizes

    def test_inventory_computes_nothing(self, store, spec):
        from torch.utils._python_dispatch import TorchDispatchMode

        class Refuse(TorchDispatchMode):
            def __torch_dispatch__(self, operator, *_):
                raise AssertionError(operator)

        store.get(spec, "cpu", follows_session=True)
        with Refuse():
            assert len(store.inventory()) == 1
        with pytest.raises(AssertionError), Refuse():
            torch.ones(1)

    def test_session_without_models_has_no_store(self, computers):
        session = computers.plain().session
        assert session.inventory() == LoadedModels(())
        assert session._models is None
