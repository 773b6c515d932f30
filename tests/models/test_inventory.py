"""What is in memory of the models: where each is, of which type, how large; asked of the store and of the session."""

import json

import pytest
import torch

from openmed_nb.devices.machine import shown_device
from openmed_nb.models.config import OpenMedConfig
from openmed_nb.models.loading import LoadSpec
from openmed_nb.models.store import Inventory, ModelInMemory, ModelStore
from openmed_nb.session import Session

pytestmark = pytest.mark.usefixtures("quick_collection")

MIB = 1 << 20
TWO = Inventory(
    (
        ModelInMemory("bundled", "cpu", "float32", 3 * MIB, follows=True),
        ModelInMemory("bundled", "cuda:1", "bfloat16", 5 * MIB // 2, follows=False),
        ModelInMemory("another", "mps", "float16", 512, follows=True),
    )
)


@pytest.fixture
def store():
    """A store without models."""
    return ModelStore()


@pytest.fixture
def specs(keyword_model, random_model):
    """Two models with default settings."""
    return [LoadSpec.of(str(folder), OpenMedConfig()) for folder in (keyword_model, random_model)]


def weights(model):
    """Return the bytes of all tensors of a model, each counted once."""
    return sum({one.data_ptr(): one.nbytes for one in (*model.parameters(), *model.buffers())}.values())


def test_nothing_is_loaded(store):
    """An empty store has an empty inventory, which says so."""
    assert list(store.inventory()) == []
    assert str(store.inventory()) == "No models in memory"
    assert store.inventory().names == ()
    assert store.inventory().to_dict() == {"models": []}
    assert "<table" not in store.inventory()._repr_html_()


def test_what_it_says():
    """Each copy has a row with name, device, type and size in bytes, and whether it moves along; each name is there once."""
    second = {"name": "bundled", "device": "cuda:1", "dtype": "bfloat16", "size": 5 * MIB // 2, "follows": False}

    assert str(TWO).splitlines() == [
        "3 models in memory",
        "  model    device  type      size       follows the device",
        "  bundled  cpu     float32   3.0 MiB    yes",
        "  bundled  cuda:1  bfloat16  2.5 MiB    no: asked for there",
        "  another  mps     float16   512 bytes  yes",
    ]
    assert repr(TWO) == str(TWO)
    assert json.loads(json.dumps(TWO.to_dict()))["models"][1] == second
    assert (len(TWO), TWO[:2], TWO[0] in TWO) == (3, TWO.models[:2], True)
    assert TWO.names == ("bundled", "another")


def test_models_in_the_order_of_loading(store, specs):
    """What was loaded is listed with its true place, type and size, the oldest first."""
    loaded = [store.model(spec, "cpu", follows=True) for spec in specs]
    loaded.append(store.model(specs[0].in_dtype("bfloat16"), "cpu", follows=False))
    listed = store.inventory()

    assert [one.name for one in listed] == [spec.reference.name for spec in (*specs, specs[0])]
    assert [(one.follows, one.dtype) for one in listed] == [*[(True, "float32")] * 2, (False, "bfloat16")]
    assert [one.size for one in listed] == [weights(one.model) for one in loaded]
    assert {one.device for one in listed} == {"cpu"}


def test_shared_weights_count_once(store, specs):
    """A tensor that two parts of a model share is counted once."""
    loaded = store.model(specs[0], "cpu", follows=True)
    before = store.inventory()[0].size
    loaded.model.another_name = loaded.model.classifier
    loaded.model.register_buffer("the_same", loaded.model.classifier.weight)

    assert store.inventory()[0].size == before


def test_where_a_model_is_now(store, specs, second_device):
    """A model that moved is listed where it is now, one that a person moved by hand too."""
    store.model(specs[0], "cpu", follows=True)
    stays = store.model(specs[1], "cpu", follows=False)
    store.follow(second_device)
    there, here = store.inventory()
    assert (there.device, here.device) == (shown_device(second_device), "cpu")

    stays.model.to("meta")
    assert store.inventory()[1].device == "meta"
    assert store.inventory()[1].size == here.size


def test_what_was_unloaded_is_gone(store, specs):
    """An unloaded model is not listed any more; an inventory that was taken before stays as it was, and holds no tensor."""
    for spec in specs:
        store.model(spec, "cpu", follows=True)
    before = store.inventory()
    store.unload(specs[0].reference.name)

    assert store.inventory().names == (specs[1].reference.name,)
    assert len(before) == 2
    assert {type(value) for value in vars(before[0]).values()} == {str, int, bool}


def test_asking_computes_nothing(store, specs):
    """Asking runs no operator of torch."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Refuse(TorchDispatchMode):
        def __torch_dispatch__(self, operator, *_):
            raise AssertionError(operator)

    store.model(specs[0], "cpu", follows=True)
    with Refuse():
        assert len(store.inventory()) == 1
    with pytest.raises(AssertionError), Refuse():
        torch.ones(1)


def test_models_of_a_session(computers):
    """A session lists the models that follow it and those that were asked for on a device; without models it has no store."""
    session: Session = computers.plain().session
    assert session.inventory() == Inventory(())
    assert session._models is None
    session.load_model("bundled_small", OpenMedConfig())
    session.load_model("bundled_small", OpenMedConfig(device="cpu"))

    listed = [(one.name, one.follows) for one in session.inventory()]
    assert listed == [("bundled_small", True), ("bundled_small", False)]
    assert session.unload("bundled_small") == ("bundled_small",)
    assert len(session.inventory()) == 0
