"""Tensors in nested values: moved to devices, converted for MPS, and reported."""

import dataclasses
import threading
import warnings
from collections import OrderedDict, defaultdict, namedtuple
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import BatchEncoding
from transformers.modeling_outputs import TokenClassifierOutput

from helpers.devices import needs_cuda
from openmed_nb.devices.moving import (
    REPORTED_CONVERSIONS,
    arrays_to_device,
    copy_model,
    copy_to_host_async,
    get_module,
    iter_operator_tensors,
    map_tensors,
    named_tensors,
    to_device,
    to_numpy,
    unwrap_model,
)
from openmed_nb.devices.registry import get_device
from openmed_nb.errors import ConfigurationError, DtypeOverflowError, OpenMedWarning
from openmed_nb.simulation.device import simulated_device
from openmed_nb.simulation.modes import DeviceCopy

on_mps = pytest.mark.usefixtures("mps")
quietly_on_mps = pytest.mark.usefixtures("mps", "quiet")

ONES = torch.ones(2)
Pair = namedtuple("Pair", ["inputs", "labels"])  # noqa: PYI024 - what old loaders return


@dataclasses.dataclass(frozen=True)
class Frozen:
    """A frozen batch."""

    inputs: torch.Tensor
    count: int


@pytest.fixture
def mps():
    """The simulated device, without previously reported conversions."""
    before = set(REPORTED_CONVERSIONS)
    REPORTED_CONVERSIONS.clear()
    with simulated_device() as device:
        yield device
    REPORTED_CONVERSIONS.clear()
    REPORTED_CONVERSIONS.update(before)


@pytest.fixture
def quiet():
    """Ignore warnings about conversions."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OpenMedWarning)
        yield


def wide(*values):
    """Return a float64 tensor."""
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.usefixtures("quiet")
def test_dtypes_on_mps(mps):
    narrowed = {torch.float64: torch.float32, torch.complex128: torch.complex64}
    for dtype in (*narrowed, torch.float32, torch.bfloat16, torch.int64, torch.bool):
        moved = to_device(torch.ones(3).to(dtype), "mps")
        assert (moved.dtype, moved.device.type) == (narrowed.get(dtype, dtype), "mps")
        assert moved.cpu().tolist() == [1, 1, 1]
    assert not any(copy.non_blocking for copy in mps.copies)


BATCHES = [
    {"ids": ONES, "text": "a", "none": None, "deep": [{"x": (ONES, 3)}]},
    defaultdict(list, {"scores": [ONES]}),
    OrderedDict(ids=ONES),
    BatchEncoding({"input_ids": ONES}),
    TokenClassifierOutput(loss=ONES, logits=ONES),
    [ONES, 1, "a", BatchEncoding({"deep": ({"logits": ONES},)})],
    (ONES, ONES.to(torch.int64)),
    Pair(ONES, None),
    torch.max(torch.ones(2, 2), dim=0),
    Frozen(ONES, 3),
]


@quietly_on_mps
@pytest.mark.parametrize("batch", BATCHES, ids=lambda batch: type(batch).__name__)
def test_to_device_preserves_batch_type(batch):
    moved = to_device(batch, "mps")
    doubled = map_tensors(batch, lambda tensor: tensor * 2)
    before = dict(named_tensors(batch))
    assert type(moved) is type(doubled) is type(batch)
    assert before.keys() == dict(named_tensors(moved)).keys()
    for name, tensor in named_tensors(moved):
        assert tensor.device.type == "mps"
        assert before[name].device.type == "cpu"
    assert {name: tensor.tolist() for name, tensor in named_tensors(doubled)} == {
        name: (2 * tensor).tolist() for name, tensor in before.items()
    }
    assert getattr(moved, "default_factory", None) == getattr(batch, "default_factory", None)
    assert str(to_device(batch, "cpu")) == str(batch)  # Other values, at all depths.


@quietly_on_mps
@pytest.mark.parametrize(
    ("array", "dtype"),
    [
        (np.array([1.5, 2.5]), torch.float32),
        (np.array([1.5, 2.5])[::-1], torch.float32),
        (np.array([1.5, 2.5], ">f8"), torch.float32),
        (np.array(1 + 2j), torch.complex64),
        (np.array([1.5], np.float16), torch.float16),
        (np.array([[1], [2]]), torch.int64),
        (np.asfortranarray([[1, 2], [3, 4]]), torch.int64),
        (np.array([True]), torch.bool),
    ],
)
def test_to_device_converts_arrays(array, dtype):
    moved = to_device({"values": array}, "mps")["values"]
    assert (moved.dtype, moved.device.type) == (dtype, "mps")
    assert moved.cpu().tolist() == array.tolist()
    assert moved.is_contiguous()
    assert not np.shares_memory(to_device([array], "cpu")[0].numpy(), array)


@pytest.mark.parametrize(
    "array",
    [
        np.array(["text"]),
        np.array([b"x"]),
        np.array([None]),
        np.array(["2026-01-01"], "datetime64[D]"),
        np.float64(1.5),
        np.ma.array([1.5, 2.5], mask=[True, False]),
        ONES,
    ],
    ids=str,
)
def test_to_device_leaves_other_leaves(array):
    assert to_device([array], "cpu")[0] is array


LAYER = torch.nn.Linear(2, 2)
OPTIMIZER = torch.optim.SGD(LAYER.parameters())


@pytest.mark.parametrize(
    "refused",
    [[LAYER], Frozen(LAYER, 3), OPTIMIZER, {"optimizer": OPTIMIZER}],
    ids=["module", "record", "optimizer", "inside"],
)
def test_to_device_rejects_unmovable_values(refused):
    with pytest.raises(ConfigurationError):
        to_device(refused, "cpu")


def move_warnings(batch):
    """Return the warnings of a move to MPS."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        to_device(batch, "mps")
    assert {warning.filename for warning in caught} <= {__file__}
    return [str(warning.message) for warning in caught]


@on_mps
def test_conversion_is_reported_once():
    batch = {"weights": wide(1), "values": [torch.ones(1), wide(1)], "ids": torch.ones(1)}
    module = torch.nn.Sequential(*(torch.nn.Linear(1, 1, dtype=torch.float64) for _ in range(4)))
    later = torch.nn.Linear(1, 1, device="mps")
    later.register_buffer("late", wide(1, 2))
    assert move_warnings(batch) == [
        "Converted float64 to float32, because MPS does not support float64: weights, values[1]."
    ]
    assert move_warnings({"weights": wide(2)}) == []
    assert to_device(wide(2), "cpu").dtype == torch.float64
    assert move_warnings({"weights": wide(2).to(torch.complex128)}) == [
        "Converted complex128 to complex64, because MPS does not support complex128: weights."
    ]
    assert move_warnings(wide(2)) == ["Converted float64 to float32, because MPS does not support float64."]
    (many,) = move_warnings(module)
    assert many.endswith(": 0.weight, 0.bias, 1.weight and 5 more.")
    assert len(move_warnings(later)) == 1
    assert (later.late.dtype, later.late.device.type) == (torch.float32, "mps")


@on_mps
@pytest.mark.parametrize(
    ("key", "shown"),
    [
        *((key, "[0]") for key in ("the patient has asthma", "mrn_00123", "Doe", "note.12345", "a" * 61, "jane\n", 7)),
        *((key, key) for key in ("input_ids", "conv2d.bias", "layer.11.weight")),
    ],
)
def test_conversion_hides_possible_note_in_key(key, shown):
    (message,) = move_warnings({key: wide(1)})
    assert message.endswith(f": {shown}.")


@on_mps
@pytest.mark.parametrize(
    ("batch", "shown"),
    [
        (Pair(ONES, wide(1)), "labels"),
        ((ONES, wide(2)), "[1]"),
        (Frozen(wide(3), 3), "inputs"),
        ({"pair": Pair(wide(4), 1)}, "pair.inputs"),
        ([{"ids": [wide(5)]}], "[0].ids[0]"),
    ],
    ids=str,
)
def test_conversion_names_places(batch, shown):
    (message,) = move_warnings(batch)
    assert message.endswith(f": {shown}.")


@on_mps
def test_conversion_shows_layer_names():
    module = torch.nn.ModuleDict({"LayerNorm": torch.nn.LayerNorm(1, dtype=torch.float64)})
    assert ": LayerNorm.weight, LayerNorm.bias." in move_warnings(module.state_dict())[0]


@on_mps
@pytest.mark.parametrize(
    "tensor", [wide(1, 1e39, 2), wide(-1e300), torch.tensor([complex(0, 1e39)], dtype=torch.complex128)]
)
def test_overflow_is_an_error(tensor):
    with pytest.raises(DtypeOverflowError, match=r"weights has 1 value in .* that overflows .* on mps") as caught:
        to_device({"weights": tensor}, "mps")
    assert "e+3" not in str(caught.value)


@quietly_on_mps
def test_infinite_values_are_preserved():
    largest = torch.finfo(torch.float32).max
    moved = to_device(wide(float("inf"), -float("inf"), largest, float("nan"), 1e-320), "mps").cpu()

    torch.testing.assert_close(
        moved, torch.tensor([float("inf"), -float("inf"), largest, float("nan"), 0]), rtol=0, atol=0, equal_nan=True
    )


@on_mps
def test_rejected_module_is_unchanged():
    module = torch.nn.Sequential(torch.nn.Linear(2, 2, dtype=torch.float64), torch.nn.Linear(2, 2, dtype=torch.float64))
    module[1].bias.data.fill_(1e200)
    with pytest.raises(DtypeOverflowError, match=r"1\.bias"):
        to_device(module, "mps")
    assert {(parameter.dtype, parameter.device.type) for parameter in module.parameters()} == {(torch.float64, "cpu")}


class Tied(torch.nn.Module):
    """A module with tied weights, a shared buffer, a non-persistent buffer, and 16-bit weights."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(5, 3, dtype=torch.float64)
        self.head = torch.nn.Linear(3, 5, bias=False, dtype=torch.float64)
        self.head.weight = self.embedding.weight
        self.register_buffer("positions", wide(0, 1, 2), persistent=False)
        self.inner = torch.nn.Module()
        self.inner.register_buffer("positions", self.positions)
        self.inner.register_buffer("steps", torch.tensor(3))
        self.inner.register_buffer("again", self.inner.steps)
        self.small = torch.nn.Linear(2, 2, dtype=torch.bfloat16)


@quietly_on_mps
@pytest.mark.parametrize("device", ["mps", "cpu", pytest.param("cuda", marks=needs_cuda)])
def test_module_is_moved_in_place(device):
    module = Tied()
    weight, values = module.embedding.weight, module.embedding.weight.detach().clone()
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)

    assert to_device(module, device) is module
    kind = torch.float32 if device == "mps" else torch.float64
    assert module.head.weight is module.embedding.weight is weight
    assert module.positions is module.inner.positions
    assert module.inner.steps is module.inner.again
    assert {weight.dtype, weight.grad.dtype, module.positions.dtype} == {kind}
    assert {tensor.device.type for tensor in [*module.parameters(), *module.buffers(), weight.grad]} == {device}
    assert (module.inner.steps.dtype, module.small.weight.dtype) == (torch.int64, torch.bfloat16)
    assert (weight.is_leaf, weight.requires_grad) == (True, True)
    optimizer.step()
    torch.testing.assert_close(weight.detach().cpu().double(), values - 1, rtol=1e-6, atol=1e-6)


@quietly_on_mps
def test_state_dict_keeps_tied_weights():
    state = Tied().state_dict()
    moved = to_device(state, "mps")

    assert (type(moved), moved._metadata) == (OrderedDict, state._metadata)
    assert moved["embedding.weight"] is moved["head.weight"]
    assert state["embedding.weight"].dtype == torch.float64
    fresh = to_device(Tied(), "mps")
    fresh.load_state_dict(moved)
    torch.testing.assert_close(fresh.head.weight.detach(), moved["head.weight"])


@quietly_on_mps
def test_gradients_pass_through_move():
    weight = wide(1, 1).requires_grad_()
    product = weight * 3
    first, second = to_device([product, product.view(2)], "mps")
    first.sum().backward()
    assert weight.grad.tolist() == [3, 3]
    assert first is not second  # Each has its own place in the graph.


@needs_cuda
def test_move_to_cuda():
    batch = {"wide": wide(1, 2), "pinned": torch.arange(1_000_000).pin_memory()}
    moved = to_device(batch, "cuda")
    assert moved["wide"].dtype == torch.float64
    assert torch.equal(moved["pinned"].cpu(), batch["pinned"])


@pytest.mark.parametrize("value", [None, "text", 5, [1, (2,)], torch.Size([2]), {}], ids=str)
def test_value_without_tensors_is_equal(value):
    assert list(named_tensors(value)) == []
    for result in (map_tensors(value, torch.neg), to_device(value, "cpu")):
        assert (result, type(result)) == (value, type(value))


def test_named_tensors():
    batch = {"labels": ONES, "pair": (ONES, {"deep": ONES}), "text": "secret"}
    assert [name for name, _ in named_tensors(batch)] == ["labels", "pair.0", "pair.1.deep"]
    assert [name for name, _ in named_tensors(ONES)] == [""]


def test_copy_model():
    model = torch.nn.Linear(2, 1)
    copied = copy_model(torch.compile(model))

    assert type(copied) is torch.nn.Linear
    assert torch.equal(copied.weight, model.weight)
    assert copied.weight.data_ptr() != model.weight.data_ptr()
    with pytest.raises(ConfigurationError, match="float64, which MPS does not support"):
        copy_model(model.double(), "mps")


def test_copy_model_keeps_what_requires_gradients():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    model[0].weight.requires_grad_(False)
    copied = copy_model(model, dtype=torch.bfloat16)

    assert [weight.requires_grad for weight in copied.parameters()] == [False, True, True, True]
    assert {weight.dtype for weight in copied.parameters()} == {torch.bfloat16}
    assert {str(buffer.dtype) for buffer in copied.buffers()} == {"torch.bfloat16", "torch.int64"}
    assert {type(buffer) for buffer in copied.buffers()} == {torch.Tensor}
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}


def test_copy_model_reports_what_cannot_be_copied():
    locked = torch.nn.Linear(2, 1)
    locked.lock = threading.Lock()
    with pytest.raises(ConfigurationError, match=r"Linear cannot be copied: .*lock") as caught:
        copy_model(locked)
    assert caught.value.remedy == "Remove the attribute that cannot be copied."
    with pytest.raises(ConfigurationError, match="Linear has 2 tensors with a shape but no memory") as caught:
        copy_model(torch.nn.Linear(2, 1, device="meta"))
    assert caught.value.remedy.startswith("Load the weights")


@pytest.mark.parametrize(
    ("model", "inner"),
    [
        (LAYER, LAYER),
        (SimpleNamespace(_orig_mod=LAYER), LAYER),
        (SimpleNamespace(module=LAYER), LAYER),
        (SimpleNamespace(_orig_mod=SimpleNamespace(module=LAYER)), LAYER),
        (SimpleNamespace(get_base_model=lambda: LAYER), LAYER),
    ],
    ids=["plain", "compiled", "parallel", "both", "adapter"],
)
def test_unwrap_model(model, inner):
    assert unwrap_model(model) is inner


def test_get_module_accepts_modules_and_pipelines():
    assert get_module(LAYER) is get_module(SimpleNamespace(model=LAYER)) is LAYER
    for value in (5, SimpleNamespace(model=5), None):
        with pytest.raises(ConfigurationError, match="is not a model") as caught:
            get_module(value, "Pass a model.")
        assert caught.value.remedy == "Pass a model."


def test_iter_operator_tensors_looks_into_containers():
    value = [ONES, (ONES + 1, {"deep": [ONES + 2]}), "text", {"set": {3}}]
    assert [tensor.tolist() for tensor in iter_operator_tensors(value)] == [[1, 1], [2, 2], [3, 3]]
    assert iter_operator_tensors(ONES) == [ONES]
    assert iter_operator_tensors({ONES}) == iter_operator_tensors("text") == []


ARRAYS = [np.arange(6).reshape(2, 3), np.arange(4)[::2], np.zeros((0, 5), np.int64), np.array(7)]
LARGE = [np.arange(1_000_000) + shift for shift in range(8)]


@pytest.mark.real_computer  # It begins its own simulation.
@pytest.mark.parametrize(
    ("name", "arrays"), [("cpu", ARRAYS), ("mps", ARRAYS), pytest.param("cuda", LARGE, marks=needs_cuda)]
)
def test_arrays_to_device_and_back(name, arrays):
    with simulated_device() as mps:
        tensors = arrays_to_device(arrays, torch.device(name))
        assert mps.copies == [DeviceCopy("cpu", "mps", False)] * (name == "mps")
        hosts = [copy_to_host_async(tensor) for tensor in tensors]
        get_device(name).synchronize()
        for tensor, host, array in zip(tensors, hosts, arrays, strict=True):
            assert tensor.device.type == name
            np.testing.assert_array_equal(to_numpy(host), array)
        assert not any(copy.non_blocking for copy in mps.copies)
        assert arrays_to_device([], torch.device(name)) == []


@pytest.mark.real_computer  # It begins its own simulation.
def test_float64_array_does_not_reach_mps():
    with simulated_device(), pytest.raises(TypeError, match="doesn't support float64"):
        arrays_to_device([np.zeros(2)], torch.device("mps"))
