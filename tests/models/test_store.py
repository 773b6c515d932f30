"""The loaded models of a session: one copy for each device asked for; some follow the session's device, some stay."""

import gc
import weakref

import pytest
import torch

from openmed_nb.annotation.pipeline import pipeline_over
from openmed_nb.errors import DeviceUnavailable, ModelUnusable
from openmed_nb.models.config import OpenMedConfig
from openmed_nb.models.loading import LoadSpec, move
from openmed_nb.models.store import ModelStore

WORDS = ["diabetes mellitus", "hypertension", "asthma"]


@pytest.fixture
def store():
    """A store without models."""
    return ModelStore()


@pytest.fixture
def spec(keyword_model):
    """The keyword model with default settings."""
    return LoadSpec.of(str(keyword_model), OpenMedConfig())


@pytest.fixture
def another_spec(random_model):
    """Another model."""
    return LoadSpec.of(str(random_model), OpenMedConfig())


def place(loaded):
    """Return the device of a model, after checking that it is whole."""
    devices = {str(tensor.device) for tensor in (*loaded.model.parameters(), *loaded.model.buffers())}
    assert len(devices) == 1
    return devices.pop()


class TestCache:
    """What is the same copy of a model, and what is another."""

    def test_asked_again_gives_the_same_objects(self, store, spec):
        """The same model and pipeline come back when asked for again; other options make another one over one model."""
        loaded = store.model(spec, "cpu", True)
        assert store.model(spec, "cpu", True) is loaded
        first = pipeline_over(loaded, "first", {"stride": 8, "ignore_labels": ["O"]})
        assert pipeline_over(loaded, "first", {"ignore_labels": ["O"], "stride": 8}) is first
        others = [pipeline_over(loaded, "first", {}), pipeline_over(loaded, "simple", {"stride": 8})]
        assert len({id(pipe) for pipe in (first, *others)}) == 3
        assert {id(pipe.model) for pipe in (first, *others)} == {id(loaded.model)}

    def test_settings_that_make_another_copy(self, store, spec, keyword_model):
        """A model loaded with other settings is another copy, and does not change the first.

        How the files are fetched makes no other model of them, nor does the device that the settings wish for.
        """
        former = store.model(spec, "cpu", True)
        others = ({"dtype": "bfloat16"}, {"revision": "v2"}, {"allow_pickle": True}, {"cache_dir": "elsewhere"})
        same = ({"hf_token": "hf_x"}, {"local_only": True}, {"backend": None}, {"device": "cpu"})
        for settings in (*others, *same):
            other = store.model(LoadSpec.of(str(keyword_model), OpenMedConfig(**settings)), "cpu", True)
            assert (other.model is former.model) is (settings in same), settings
        assert former.model.dtype == torch.float32

    def test_two_names_of_one_folder_are_one_copy(self, store, spec, keyword_model, monkeypatch):
        """A folder under its relative and its absolute path is one model."""
        monkeypatch.chdir(keyword_model.parent)
        relative = LoadSpec.of(f"./{keyword_model.name}", OpenMedConfig())
        assert store.model(relative, "cpu", True) is store.model(spec, "cpu", True)

    def test_another_device_is_another_copy_there(self, store, spec, words_of, second_device):
        """Asking for another device gives a model there, and the first stays where it is."""
        here, there = store.model(spec, "cpu", False), store.model(spec, second_device, False)
        assert (place(here), place(there)) == ("cpu", second_device)
        assert words_of(pipeline_over(store.model(spec, second_device, False), "first", {})) == WORDS

    def test_failed_load_leaves_nothing(self, store, tmp_path, spec):
        """A model that does not load is not kept, and the others stay."""
        kept = store.model(spec, "cpu", True)
        with pytest.raises(ModelUnusable):
            store.model(LoadSpec.of(str(tmp_path), OpenMedConfig()), "cpu", True)
        assert store.model(spec, "cpu", True) is kept
        assert store.unload() == (spec.reference.name,)


class TestFollowing:
    """Models that were loaded without naming a device move with the session's; the others stay."""

    def test_followers_move_and_pinned_models_stay(self, store, spec, another_spec, second_device):
        """The models that follow move, by name; a model loaded for a device stays there."""
        follower, pinned = store.model(spec, "cpu", True), store.model(another_spec, "cpu", False)
        assert store.follow(second_device) == (spec.reference.name,)
        assert (place(follower), place(pinned)) == (second_device, "cpu")
        assert store.follow(second_device) == ()
        assert store.follow("cpu") == (spec.reference.name,)
        assert place(follower) == "cpu"

    def test_pipeline_goes_on_working_where_its_model_is(self, store, spec, words_of, second_device):
        """A pipeline that a person holds gives the same entities after every move."""
        pipe = pipeline_over(store.model(spec, "cpu", True), "first", {})
        for device in (second_device, "cpu", second_device):
            store.follow(device)
            assert str(pipe.device) == device
            assert words_of(pipe) == WORDS
            assert pipeline_over(store.model(spec, device, True), "first", {}) is pipe

    def test_asking_for_a_follower_brings_all_followers(self, store, spec, another_spec, second_device):
        """A follower that is asked for on the session's new device is there, and so are the others."""
        models = [store.model(one, "cpu", True) for one in (spec, another_spec)]
        store.model(spec, second_device, True)
        assert [place(loaded) for loaded in models] == [second_device, second_device]

    def test_failed_move_leaves_all_where_they_were(self, store, spec, another_spec, words_of, second_device):
        """Where one follower cannot be moved, those that moved before it are moved back, and one error says which."""
        movable, stuck = store.model(spec, "cpu", True), store.model(another_spec, "cpu", True)
        pipe = pipeline_over(store.model(spec, "cpu", True), "first", {})
        store.follow(second_device)
        stuck.model.to("meta")  # without contents, so that it cannot be moved anywhere
        with pytest.raises(DeviceUnavailable, match=r"could not be moved to cpu.*no data") as caught:
            store.follow("cpu")
        assert another_spec.reference.name in str(caught.value)
        assert (place(movable), place(stuck)) == (second_device, "meta")
        assert words_of(pipe) == WORDS

    @pytest.mark.parametrize("device", ["no such device", "xpu", "vulkan"])
    def test_device_that_torch_does_not_have(self, store, spec, device, words_of):
        """Moving to a device that this torch does not have is one error; the model stays usable where it is."""
        loaded = store.model(spec, "cpu", True)
        with pytest.raises(DeviceUnavailable, match=f"could not be moved to {device}"):
            move(loaded.model, device, loaded.name)
        assert place(loaded) == "cpu"
        assert words_of(pipeline_over(store.model(spec, "cpu", True), "first", {})) == WORDS


class TestArriving:
    """The listener to models that come to a device may object."""

    @pytest.fixture
    def arrivals(self):
        """What the listener heard."""
        return []

    @pytest.fixture
    def store(self, arrivals):
        """A store with a listener to every arrival."""
        return ModelStore(arriving=lambda key, device: arrivals.append((key.spec.reference.name, key.device, device)))

    def test_loads_and_moves_are_announced_once(self, store, arrivals, spec, another_spec, second_device):
        """A model is announced when it is loaded and when it moved, not when it is asked for again or stays."""
        name, other = spec.reference.name, another_spec.reference.name
        for _ in range(2):
            store.model(spec, "cpu", True)
            store.model(another_spec, "cpu", False)
        store.follow(second_device)
        store.follow("cpu", quietly=True)

        assert arrivals == [(name, None, "cpu"), (other, "cpu", "cpu"), (name, None, second_device)]
        store.announce()
        assert arrivals[3:] == [(name, None, "cpu")]

    def test_objection_leaves_all_as_it_was(self, arrivals, spec, another_spec, second_device):
        """Where the listener objects, a model is not loaded, and those that moved are moved back."""

        def object_to(key, device):
            arrivals.append(key)
            if len(arrivals) > 2:
                raise PermissionError(device)

        store = ModelStore(arriving=object_to)
        loaded = [store.model(one, "cpu", True) for one in (spec, another_spec)]
        with pytest.raises(PermissionError):
            store.follow(second_device)
        with pytest.raises(PermissionError):
            store.model(spec, "cpu", False)
        assert [place(one) for one in loaded] == ["cpu", "cpu"]
        assert len(store.inventory()) == 2


def test_folder_of_a_loaded_model(store, spec, another_spec, keyword_model):
    """The folder of a loaded model is known in whatever type it was loaded, and of no other model."""
    store.model(spec.in_dtype("bfloat16"), "cpu", False)

    assert store.folder(spec) == store.folder(spec.in_dtype("auto")) == keyword_model
    assert store.folder(another_spec) is None
    assert spec.in_dtype("bfloat16") != spec == spec.in_dtype("bfloat16").in_dtype("float32")


class TestUnloading:
    """Forgetting a model frees its memory."""

    def test_memory_is_freed(self, store, spec):
        """After unloading, nothing holds the model or its pipelines any more."""
        gone = [weakref.ref(pipeline_over(store.model(spec, "cpu", True), "first", {}))]
        gone.append(weakref.ref(store.model(spec, "cpu", True).model))
        gc.disable()
        try:
            assert store.unload() == (spec.reference.name,)
            assert [one() for one in gone] == [None, None]
        finally:
            gc.enable()

    def test_one_name_on_every_device(self, store, spec, another_spec, second_device):
        """Unloading a name forgets its copies on every device and leaves the other models."""
        kept = store.model(another_spec, "cpu", True)
        former = [store.model(spec, "cpu", True), store.model(spec, second_device, False)]
        assert store.unload(spec.reference.name) == (spec.reference.name,)
        assert store.model(another_spec, "cpu", True) is kept
        assert store.model(spec, "cpu", True) not in former

    def test_nothing_to_unload(self, store):
        """Unloading nothing, or a name that is not loaded, is no error."""
        assert store.unload() == ()
        assert store.unload("never loaded") == ()
