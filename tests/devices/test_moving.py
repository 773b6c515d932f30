"""Tensors inside of other values are found, changed and moved; only float64 is narrowed for MPS, and never silently."""

import dataclasses
import warnings
from collections import OrderedDict, UserList, defaultdict, deque, namedtuple
from types import MappingProxyType

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import BatchEncoding
from transformers.modeling_outputs import TokenClassifierOutput

from openmed_nb.devices.moving import REPORTED, copy_of, named_tensors, to_device, with_tensors
from openmed_nb.errors import ConfigurationError, NumberTooLarge, OpenMedWarning
from openmed_nb.simulation.device import simulated_device

Pair = namedtuple("Pair", ["inputs", "labels"])  # noqa: PYI024 - what old loaders return


@dataclasses.dataclass(frozen=True)
class Frozen:
    """A batch that cannot be changed."""

    inputs: torch.Tensor
    count: int


class Rows(list):
    """A list that is made of something else than its items."""

    def __init__(self, first, second):
        super().__init__([first, second])
        self.source = "loader"


class Both(tuple):  # noqa: SLOT001 - it has an attribute
    """A tuple that is made of something else than its items."""

    def __new__(cls, first, second):
        made = super().__new__(cls, [first, second])
        made.source = "loader"
        return made


@pytest.fixture
def mps():
    """The simulated device, with the memory of what was reported put aside."""
    before = set(REPORTED)
    REPORTED.clear()
    with simulated_device() as device:
        yield device
    REPORTED.clear()
    REPORTED.update(before)


@pytest.fixture
def quiet():
    """Let warnings of conversions pass."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OpenMedWarning)
        yield


def wide(*values):
    """Return a float64 tensor."""
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.usefixtures("quiet")
def test_types_on_mps(mps):
    """float64 and complex128 are narrowed for MPS; whole numbers and all other types are as before."""
    narrowed = {torch.float64: torch.float32, torch.complex128: torch.complex64}
    for dtype in (*narrowed, torch.float32, torch.bfloat16, torch.int64, torch.bool):
        moved = to_device(torch.ones(3).to(dtype), "mps")
        assert (moved.dtype, moved.device.type) == (narrowed.get(dtype, dtype), "mps")
        assert moved.cpu().tolist() == [1, 1, 1]
    assert not any(copy.non_blocking for copy in mps.copies)


def test_types_on_the_cpu():
    """Towards the CPU nothing is narrowed and nothing is reported."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for dtype in (torch.float64, torch.complex128, torch.float16):
            assert to_device({"values": torch.ones(2, dtype=dtype)}, "cpu")["values"].dtype == dtype


@pytest.mark.usefixtures("mps", "quiet")
def test_every_kind_of_batch():
    """Mappings, lists, tuples, named tuples and dataclasses come back as what they were, with all tensors moved, or changed."""
    ones = torch.ones(2)
    counted = defaultdict(list, {"scores": [ones]})
    mappings = [
        {"ids": ones, "text": "a", "none": None, "deep": [{"x": (ones, 3)}]},
        *(counted, OrderedDict(ids=ones), MappingProxyType({"ids": ones})),
        *(BatchEncoding({"input_ids": ones}), TokenClassifierOutput(loss=ones, logits=ones)),
    ]
    series = [[ones, 1, "a"], deque([ones, ones], maxlen=2), UserList([ones]), {ones}, Rows(ones, 3)]
    tuples = [
        *((ones, ones.to(torch.int64)), Pair(ones, None), Both(ones, 3), torch.max(torch.ones(2, 2), dim=0)),
        torch.nn.utils.rnn.pack_sequence([ones, ones[:1]]),
    ]
    batches = [*mappings, *series, *tuples, Frozen(ones, 3), [BatchEncoding({"deep": ({"logits": ones},)})]]
    for batch in batches:
        moved = to_device(batch, "mps")
        assert type(moved) is type(batch)
        leaves = [leaf for leaf in flat(moved) if isinstance(leaf, torch.Tensor)]
        assert leaves, type(batch)
        assert {leaf.device.type for leaf in leaves} == {"mps"}
        assert all(leaf.device.type == "cpu" for leaf in flat(batch) if isinstance(leaf, torch.Tensor))
        doubled = with_tensors(batch, lambda tensor: tensor * 2)
        assert type(doubled) is type(batch)
        expected = {name: (2 * one).tolist() for name, one in named_tensors(batch)}
        assert {name: one.tolist() for name, one in named_tensors(doubled)} == expected
    assert to_device(counted, "mps").default_factory is list
    assert to_device(Frozen(ones, 3), "mps").count == 3
    assert to_device(deque([ones], maxlen=2), "mps").maxlen == 2
    assert to_device(Rows(ones, 3), "mps").source == to_device(Both(ones, 3), "mps").source == "loader"


@pytest.mark.usefixtures("mps", "quiet")
def test_arrays_become_tensors():
    """An array of numbers becomes a tensor of its own on the device, float64 narrowed; the array is left as it is."""
    for array, dtype in (
        (np.array([1.5, 2.5]), torch.float32),
        (np.array([1.5, 2.5])[::-1], torch.float32),
        (np.array([1.5, 2.5], ">f8"), torch.float32),
        (np.array(1 + 2j), torch.complex64),
        (np.array([1.5], np.float16), torch.float16),
        (np.array([[1], [2]]), torch.int64),
        (np.array([True]), torch.bool),
    ):
        moved = to_device({"values": array}, "mps")["values"]
        assert (moved.dtype, moved.device.type) == (dtype, "mps")
        assert moved.cpu().tolist() == array.tolist()
        assert not np.shares_memory(to_device([array], "cpu")[0].numpy(), array)


def test_arrays_of_something_else():
    """Arrays of texts, objects or dates, and single numbers, are no tensors and stay as they are."""
    dates = np.array(["2026-01-01"], "datetime64[D]")
    for array in (np.array(["text"]), np.array([b"x"]), np.array([None]), dates, np.float64(1.5)):
        assert to_device([array], "cpu")[0] is array


def test_what_cannot_be_moved_is_refused():
    """A module inside of something else and an optimizer are refused, instead of coming back unmoved."""
    layer = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters())
    refused = r"The optimizer SGD cannot be moved\. Move the model first"
    for thing, match in (
        ([layer], r"The module Linear is inside .* Pass the module by itself"),
        (Frozen(layer, 3), "The module Linear"),
        (optimizer, refused),
        ({"optimizer": optimizer}, refused),
    ):
        with pytest.raises(ConfigurationError, match=match):
            to_device(thing, "cpu")


def test_what_holds_itself():
    """A value inside of itself is refused; one that is there twice is moved twice."""
    batch = {"ids": [torch.ones(1)]}
    batch["self"] = [batch]
    with pytest.raises(ConfigurationError, match="A dict that holds itself"):
        to_device(batch, "cpu")
    rows = [torch.ones(1)]
    assert to_device([rows, rows], "cpu") == [rows, rows]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.usefixtures("mps", "quiet")
def test_sparse_and_nested_float64():
    """Sparse and nested float64 is narrowed as well, and a number that does not fit is refused there too."""
    for value, fits in ((3.0, True), (1e200, False)):
        for tensor in (
            wide(0, value).to_sparse(),
            wide(0, value).reshape(1, 2).to_sparse_csr(),
            torch.nested.nested_tensor([wide(0, value), wide(1)], layout=torch.jagged),
        ):
            if fits:
                moved = to_device(tensor, "mps")
                assert (moved.dtype, moved.layout) == (torch.float32, tensor.layout)
            else:
                with pytest.raises(NumberTooLarge, match="1 number in float64"):
                    to_device(tensor, "mps")


@pytest.mark.usefixtures("mps", "quiet")
def test_several_sparse_tensors():
    """Sparse tensors, which share no memory that can be told, stay different tensors."""
    moved = to_device([wide(0, 1.0).to_sparse(), wide(0, 2.0).to_sparse()], "mps")

    assert [float(one.to_dense().sum()) for one in moved] == [1.0, 2.0]


def flat(thing):
    """Return the leaves of a nested value; of a packed sequence only its data."""
    if isinstance(thing, torch.nn.utils.rnn.PackedSequence):
        assert thing.batch_sizes.device.type == "cpu"
        return [thing.data]
    if hasattr(thing, "items"):
        return [leaf for value in thing.values() for leaf in flat(value)]
    if isinstance(thing, (list, tuple, deque, UserList, set)):
        return [leaf for value in thing for leaf in flat(value)]
    if dataclasses.is_dataclass(thing):
        return [leaf for field in dataclasses.fields(thing) for leaf in flat(getattr(thing, field.name))]
    return [thing]


NESTED = st.recursive(
    st.sampled_from([None, 3, "text", 2.5]) | st.integers(0, 4).map(torch.arange),
    lambda inner: (
        st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(NESTED)
def test_nothing_is_lost(thing):
    """Whatever is nested in whatever, every leaf is there afterwards, in its place."""
    before, after = flat(thing), flat(to_device(thing, "cpu"))

    assert len(before) == len(after)
    assert all(a is b or torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.usefixtures("mps")
def test_each_conversion_is_reported_once():
    """A conversion is reported at the line that asked for it, by name, and not again for the next batch."""
    said = r"float64 to float32, because MPS has no float64: weights, values\[1\]\."
    with pytest.warns(OpenMedWarning, match=said) as caught:
        to_device({"weights": wide(1), "values": [torch.ones(1), wide(1)], "ids": torch.ones(1)}, "mps")
    assert len(caught) == 1
    assert caught[0].filename == __file__

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        to_device({"weights": wide(2)}, "mps")
    with pytest.warns(OpenMedWarning, match=r"complex128 to complex64, because MPS has no complex128: weights\."):
        to_device({"weights": wide(2).to(torch.complex128)}, "mps")
    with pytest.warns(OpenMedWarning, match=r"because MPS has no float64\.$"):
        to_device(wide(2), "mps")


@pytest.mark.usefixtures("mps")
def test_many_conversions_are_one_report():
    """A module with many float64 parameters is reported in one sentence."""
    module = torch.nn.Sequential(*(torch.nn.Linear(1, 1, dtype=torch.float64) for _ in range(4)))
    with pytest.warns(OpenMedWarning, match=r": 0\.weight, 0\.bias, 1\.weight and 5 more\."):
        to_device(module, "mps")


@pytest.mark.usefixtures("mps")
def test_keys_that_could_be_texts_are_not_shown():
    """A key that is no plain name of a field is shown by its place."""
    for key in ("the patient has asthma", "MRN-00123_Jane-Doe", "mrn_00123", "Doe", "note.12345", "a" * 61, "jane\n"):
        REPORTED.clear()
        with pytest.warns(OpenMedWarning) as caught:
            to_device({key: wide(1), 7: wide(1)}, "mps")
        assert str(caught[0].message).endswith(": [0], [1].")


@pytest.mark.usefixtures("mps")
def test_names_of_fields_and_of_layers_are_shown():
    """Names of fields are shown, and all names of a state dict, which are those of layers."""
    for key in ("input_ids", "conv2d.bias", "layer.11.weight"):
        with pytest.warns(OpenMedWarning, match=f": {key}\\."):
            to_device({key: wide(1)}, "mps")
    module = torch.nn.ModuleDict({"LayerNorm": torch.nn.LayerNorm(1, dtype=torch.float64)})
    with pytest.warns(OpenMedWarning, match=r": LayerNorm\.weight, LayerNorm\.bias\."):
        to_device(module.state_dict(), "mps")


@pytest.mark.usefixtures("mps")
def test_numbers_that_do_not_fit():
    """A number that would become infinite is refused, with its name and no number."""
    for tensor in (wide(1, 1e39, 2), wide(-1e300), torch.tensor([complex(0, 1e39)], dtype=torch.complex128)):
        with pytest.raises(NumberTooLarge, match=r"weights has 1 number in \w+ that would be infinite") as caught:
            to_device({"weights": tensor}, "mps")
        assert "e+3" not in str(caught.value)


@pytest.mark.usefixtures("mps", "quiet")
def test_numbers_that_are_infinite_already():
    """Infinity and NaN stay what they are, and so does the largest float32."""
    largest = torch.finfo(torch.float32).max
    moved = to_device(wide(float("inf"), -float("inf"), largest, float("nan"), 1e-320), "mps").cpu()

    assert moved[:3].tolist() == [float("inf"), -float("inf"), largest]
    assert moved[3].isnan()
    assert moved[4] == 0


@pytest.mark.usefixtures("mps")
def test_refused_module_is_not_changed():
    """A module with one number that does not fit stays on its device, in its types."""
    module = torch.nn.Sequential(torch.nn.Linear(2, 2, dtype=torch.float64), torch.nn.Linear(2, 2, dtype=torch.float64))
    module[1].bias.data.fill_(1e200)
    with pytest.raises(NumberTooLarge, match=r"1\.bias"):
        to_device(module, "mps")
    assert {(one.dtype, one.device.type) for one in module.parameters()} == {(torch.float64, "cpu")}


class Tied(torch.nn.Module):
    """A module with tied weights, a shared buffer, a buffer that is not saved, and 16-bit weights."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(5, 3, dtype=torch.float64)
        self.head = torch.nn.Linear(3, 5, bias=False, dtype=torch.float64)
        self.head.weight = self.embedding.weight
        self.register_buffer("positions", wide(0, 1, 2), persistent=False)
        self.inner = torch.nn.Module()
        self.inner.register_buffer("positions", self.positions)
        self.inner.register_buffer("steps", torch.tensor(3))
        self.small = torch.nn.Linear(2, 2, dtype=torch.bfloat16)


@pytest.mark.usefixtures("mps", "quiet")
@pytest.mark.parametrize("device", ["mps", "cpu"])
def test_module_in_place(device):
    """A module is moved in place; tied weights, shared buffers and the optimizer's parameters stay the same."""
    module = Tied()
    weight, values = module.embedding.weight, module.embedding.weight.detach().clone()
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)

    assert to_device(module, device) is module
    kind = torch.float32 if device == "mps" else torch.float64
    assert module.head.weight is module.embedding.weight is weight
    assert module.positions is module.inner.positions
    assert {weight.dtype, weight.grad.dtype, module.positions.dtype} == {kind}
    assert {one.device.type for one in [*module.parameters(), *module.buffers(), weight.grad]} == {device}
    assert (module.inner.steps.dtype, module.small.weight.dtype) == (torch.int64, torch.bfloat16)
    assert weight.is_leaf
    assert weight.requires_grad
    optimizer.step()
    torch.testing.assert_close(weight.detach().cpu().double(), values - 1, rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("mps")
def test_later_buffers_are_found():
    """A float64 buffer that a module got since is converted by the next call, and reported."""
    module = to_device(torch.nn.Linear(2, 2), "mps")
    module.register_buffer("late", wide(1, 2))
    with pytest.warns(OpenMedWarning, match=r": late\."):
        to_device(module, "mps")
    assert module.late.dtype == torch.float32
    assert module.late.device.type == "mps"


@pytest.mark.usefixtures("mps", "quiet")
def test_state_dict_keeps_its_ties():
    """Tied weights of a state dict are one tensor afterwards, it keeps its versions, and it can be loaded."""
    state = Tied().state_dict()
    moved = to_device(state, "mps")

    assert isinstance(moved, OrderedDict)
    assert moved._metadata == state._metadata
    assert moved["embedding.weight"] is moved["head.weight"]
    assert state["embedding.weight"].dtype == torch.float64
    fresh = to_device(Tied(), "mps")
    fresh.load_state_dict(moved)
    torch.testing.assert_close(fresh.head.weight.detach(), moved["head.weight"])


@pytest.mark.usefixtures("mps", "quiet")
def test_gradients_pass():
    """A tensor that needs a gradient gets it through the move."""
    weight = torch.ones(2, dtype=torch.float64, requires_grad=True)
    to_device(weight * 3, "mps").sum().backward()
    assert weight.grad.tolist() == [3, 3]


def test_tensors_that_are_there_already():
    """What is on the device already is not copied."""
    tensor = torch.ones(2)
    assert to_device([tensor], "cpu")[0] is tensor


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda():
    """On CUDA float64 stays, pinned memory is copied without waiting, and modules keep their ties."""
    batch = {"wide": wide(1, 2), "pinned": torch.arange(1_000_000).pin_memory()}
    moved = to_device(batch, "cuda")
    assert moved["wide"].dtype == torch.float64
    assert torch.equal(moved["pinned"].cpu(), batch["pinned"])
    module = to_device(Tied(), "cuda")
    assert module.head.weight is module.embedding.weight
    assert module.positions is module.inner.positions


def test_value_without_tensors():
    """What holds no tensor stays itself, also what holds itself."""
    circle = [1]
    circle.append(circle)
    for value in (None, "text", 5, [1, (2,)], torch.Size([2]), {}, MappingProxyType({"a": 1}), circle):
        assert list(named_tensors(value)) == []
        assert with_tensors(value, torch.neg) is value
        moved = value if value is circle else to_device(value, "cpu")
        assert (moved, type(moved)) == (value, type(value))


def test_names():
    """Names tell the place, and a tensor alone has none."""
    batch = {"labels": torch.ones(1), "pair": (torch.ones(1), {"deep": torch.ones(1)}), "text": "secret"}
    assert [name for name, _ in named_tensors(batch)] == ["labels", "pair.0", "pair.1.deep"]
    assert [name for name, _ in named_tensors(torch.ones(1))] == [""]


def test_copy_of_a_model():
    """A copy is one of the model inside of a compiled one; a type that MPS lacks is refused before anything is copied."""
    model = torch.nn.Linear(2, 1)
    copied = copy_of(torch.compile(model))

    assert type(copied) is torch.nn.Linear
    assert torch.equal(copied.weight, model.weight)
    assert copied.weight is not model.weight
    with pytest.raises(ConfigurationError, match="Linear has numbers in float64, which MPS does not have"):
        copy_of(model.double(), "mps")
