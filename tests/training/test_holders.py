"""Referrers of tensors have names of the program; the search neither triggers nor changes objects."""

import functools
import json
import threading
import weakref
from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from helpers.processes import run_python
from helpers.threads import run_in_thread
from openmed_nb.errors import ConfigurationError
from openmed_nb.training import holders
from openmed_nb.training.holders import find_tensor_referrers, live_tensors, storage_sizes

pytestmark = pytest.mark.usefixtures("by_itself")

# torch 2.6 does not give the tensors that a graph has saved.
reads_graphs = pytest.mark.skipif(not hasattr(torch._C._autograd.SavedTensor, "data"), reason="needs torch 2.7")


def make_tensor():
    """Return a tensor of 4,000 bytes."""
    return torch.zeros(1000)


def make_leaf():
    """Return a tensor of a thousand numbers that requires a gradient."""
    return torch.ones(1000, requires_grad=True)


def find_referrers(**variables):
    """Return name, kind and number of tensors of each referrer, largest first."""
    return [(referrer.name, referrer.kind, referrer.tensors) for referrer in find_tensor_referrers(variables).referrers]


def measure_size(*tensors):
    """Return the size in bytes of tensors and their graphs."""
    referrers = find_tensor_referrers({"held": tensors}).referrers
    return sum(referrer.size for referrer in referrers if referrer.name == "held")


class Slots:
    """Class with slots and no ``__dict__``."""

    __slots__ = ("empty", "loss")

    def __init__(self, loss):
        self.loss = loss


class Kept(nn.Module):
    """Model that stores its hidden states."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.states = [make_tensor()]

    @functools.cached_property
    def cached(self):
        """Tensor that is computed once."""
        return make_tensor()


class Untouchable:
    """Proxy that raises on any access."""

    __slots__ = ()

    def __getattr__(self, name):
        raise AssertionError(f"{name} was accessed")


class Impostor:
    """Proxy of another class, with a custom ``__dict__``."""

    __class__ = torch.Tensor

    @property
    def __dict__(self):
        raise AssertionError("__dict__ was accessed")


class LoadedOnDemand(OrderedDict):
    """Lazy mapping, such as the model tables of transformers."""

    def values(self):
        raise AssertionError("the values were accessed")


class Endless(list):
    """List with an endless iterator."""

    def __iter__(self):
        while True:
            yield 0


def make_cycle():
    """Return a list that a dict with a tensor in it refers to."""
    first = []
    first.append({"tensor": make_tensor(), "back": first})
    return first


def make_trained(kind, *layers):
    """Return a model with gradients, and an optimizer after a step."""
    model = nn.Sequential(*layers)
    optimizer = kind(model.parameters())
    model(torch.ones(4, 10)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def make_cached_function():
    """Return a function that caches its results."""
    function = functools.lru_cache(maxsize=8)(lambda number: make_tensor() + number)
    function(1)
    return function


def make_closure():
    """Return a function with a tensor in its closure."""
    loss = make_tensor()
    return lambda: loss


def make_function_with_default(loss):
    """Return a function with a tensor as a default argument."""

    def function(loss=loss):
        return loss

    return function


def make_hooked_layer(loss):
    """Return a layer with a hook that references a tensor."""
    layer = nn.Linear(1, 1)
    layer.register_forward_hook(lambda *_given: loss and None)
    return layer


def make_parameter():
    """Return a parameter with a gradient in separate memory."""
    weight = make_leaf()
    weight.sum().backward()
    weight.grad = make_tensor()
    return weight


TENSOR = make_tensor()
# Variables, and the name, kind and number of tensors of each referrer.
NAMED = {
    "a variable": ({"held": TENSOR}, [("held", "variable", 1)]),
    "a list of records": ({"logs": [{"loss": TENSOR}]}, [("logs[...]", "dict", 1)]),
    "sets": ({"held": {TENSOR}, "kept": frozenset([make_tensor()])}, [("held", "set", 1), ("kept", "frozenset", 1)]),
    "a list in an attribute": ({"run": SimpleNamespace(losses=[TENSOR])}, [("run.losses", "list", 1)]),
    "a slot": ({"held": Slots(TENSOR)}, [("held", "Slots", 1)]),
    "a cache": ({"held": make_cached_function()}, [("held", "_lru_cache_wrapper", 1)]),
    "a closure": ({"held": make_closure()}, [("held[...][...]", "cell", 1)]),
    "a default": ({"held": make_function_with_default(TENSOR)}, [("held[...]", "tuple", 1)]),
    "a class": ({"Kept": Kept, "torch": torch}, []),
    "a lazy mapping": ({"table": LoadedOnDemand(a=TENSOR)}, [("table", "LoadedOnDemand", 1)]),
    "largest first": ({"few": [TENSOR], "many": [torch.zeros(9000)]}, [("many", "list", 1), ("few", "list", 1)]),
    "nothing": ({"numbers": [1, 2.5, "text", None, b"", True]}, []),
    "one tensor": ({"first": [TENSOR], "second": [TENSOR], "third": TENSOR}, [("third", "variable", 1)]),
    "a cycle": ({"first": make_cycle()}, [("first[...]", "dict", 1)]),
    "a gradient": ({"held": make_parameter()}, [("held", "variable", 1), ("held.grad", "gradients", 1)]),
    "a model": (
        make_trained(torch.optim.SGD, nn.Linear(10, 10), nn.BatchNorm1d(10)),
        [("model", "Sequential", 7), ("model.grad", "gradients", 4)],
    ),
    "an optimizer": (
        make_trained(torch.optim.Adam, nn.Linear(10, 10)),
        [("optimizer.state[...]", "dict", 6), ("model", "Sequential", 2), ("model.grad", "gradients", 2)],
    ),
    "a list inside a model": (
        {"model": nn.Sequential(Kept())},
        [("model.0.states", "list", 1), ("model", "Sequential", 2)],
    ),
    "a hook of a layer": (
        {"held": make_hooked_layer(TENSOR)},
        [("held._forward_hooks[...][...][...]", "cell", 1), ("held", "Linear", 2)],
    ),
}


@pytest.mark.parametrize(("variables", "names"), NAMED.values(), ids=NAMED)
def test_referrer_is_named_by_path(variables, names):
    assert find_referrers(**variables) == names


@reads_graphs
def test_size_includes_autograd_graphs():
    numbers = make_leaf()
    (losses,) = find_tensor_referrers({"losses": [numbers.exp().sum() for _ in range(3)]}).referrers

    assert (losses.tensors, losses.num_graphs, losses.size) == (3, 3, 3 * (4000 + 4))
    assert str(losses) == "losses (list) holds 3 tensors with their autograd graphs, 11.7 KiB"


def test_keys_of_mappings_are_not_displayed():
    """Keys may identify patients."""
    held = find_tensor_referrers({"by_patient": {"Jane Doe": [make_tensor()], "John Roe": {"MRN 1234": make_tensor()}}})
    shown = str(held) + repr(held) + held._repr_html_() + json.dumps(held.to_dict())

    assert len(held.referrers) == 2
    assert all(key not in shown for key in ("Jane", "John", "MRN"))


@pytest.mark.parametrize(
    "thing",
    [Untouchable(), Impostor(), LoadedOnDemand(a=1), Endless(), nn.LazyLinear(3)],
    ids=lambda thing: type(thing).__name__,
)
def test_search_does_not_trigger_proxies(thing):
    assert find_referrers(thing=thing, losses=[make_tensor()])[0] == ("losses", "list", 1)


def test_search_is_limited():
    """A large list does not hide later values, and the search ends after a number of objects or at a depth."""
    rows = [[number] for number in range(holders.MAX_OBJECTS + 1)]
    texts = ["text"] * holders.MAX_OBJECTS
    many = {f"rows{number}": [[part] for part in range(holders.MAX_CHILDREN)] for number in range(6)}
    deep = make_tensor()
    for _ in range(holders.MAX_DEPTH):
        deep = [deep]

    assert find_referrers(rows=rows, texts=texts, losses=[make_tensor()]) == [("losses", "list", 1)]
    assert find_referrers(**many, losses=[make_tensor()]) == []
    assert len(find_referrers(deep=deep)) == 1
    assert find_referrers(deep=[deep]) == []


class Batch:
    """Object that supports weak references."""


def test_search_keeps_no_variable_alive_and_clears_no_locals():
    def train(rate):
        batch = Batch()
        reference = weakref.ref(batch)
        find_tensor_referrers()
        del batch
        is_released = reference() is None
        settings = locals()
        find_tensor_referrers()
        return is_released, settings["rate"], rate

    assert train(0.1) == (True, 0.1, 0.1)


SCRIPT = """
import sys
import openmed_nb as nb
print(nb.training.find_tensor_referrers(), "torch" in sys.modules)
import torch
torch.kept = torch.zeros(500)
losses = [torch.zeros(1000)]
_hidden = losses
def train():
    local = [torch.zeros(2000), torch.zeros(2000)]
    print(*nb.training.find_tensor_referrers().referrers, sep="\\n")
train()
"""


def test_script_variables_are_found():
    """Other modules are not searched, and torch is not imported."""
    done = run_python("-c", SCRIPT)

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "0 names hold tensors False",
        "local (list) holds 2 tensors, 15.6 KiB",
        "losses (list) holds 1 tensor, 3.9 KiB",
        "(reached by no name) holds 1 tensor, 2.0 KiB",
    ]


def test_namespace_must_be_a_mapping():
    with pytest.raises(ConfigurationError, match="must be a mapping, got int"):
        find_tensor_referrers(5)


class Watched(torch.Tensor):
    """Custom tensor subclass that counts calls."""

    num_calls = 0

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        """Count the call."""
        Watched.num_calls += 1
        return super().__torch_function__(function, types, args, kwargs or {})


def test_views_count_storage_once():
    whole = torch.zeros(1000)

    assert measure_size(whole, whole[10:], whole.view(10, 100).t(), whole.detach()) == 4000
    assert measure_size(whole[:1]) == 4000
    assert measure_size(whole, whole.clone()) == 8000


def test_parameters_do_not_count_for_graph():

    assert measure_size(nn.Linear(1000, 2)(torch.ones(3, 1000)).sum()) < 16_000


# Functions of a thousand numbers, with the minimum size of their graphs in bytes.
GRAPHS = {
    "an output": (torch.exp, 4000),
    "inputs": (lambda numbers: (numbers * 2) * (numbers * 3), 8000),
    "a list": (lambda numbers: torch.stack([numbers * 2, numbers * 3]).prod(0), 8000 + 4000),
}


@reads_graphs
@pytest.mark.real_computer  # The graphs of the simulated device have nodes of their own.
@pytest.mark.parametrize(("function", "minimum_bytes"), GRAPHS.values(), ids=GRAPHS)
def test_size_includes_graph_until_backward_pass(function, minimum_bytes):
    loss = function(make_leaf()).sum()

    assert measure_size(loss) >= minimum_bytes
    loss.backward()
    assert measure_size(loss) == 4


def test_search_does_not_call_unpack_hooks():
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: (tensor,), pytest.fail):
        loss = make_leaf().exp().sum()

    assert measure_size(loss) == 4


def test_search_fills_no_cache_or_thread_local():
    made = []

    class Local(threading.local):
        """Variables that each thread creates."""

        def __init__(self):
            made.append(1)

    model = Kept()
    local = Local()
    run_in_thread(lambda: find_tensor_referrers({"model": model, "local": local}))

    assert made == [1]
    assert "cached" not in vars(model)


@pytest.mark.parametrize("reentrant", [True, False])
def test_search_does_not_recompute_checkpoint(reentrant):
    runs = []

    def part(numbers):
        runs.append(1)
        return (numbers * 2).exp().sin()

    measure_size(checkpoint(part, make_leaf(), use_reentrant=reentrant).sum())
    assert len(runs) == 1


def test_view_with_invalid_graph_is_counted():
    base = torch.ones(4, 250, requires_grad=True) * 1
    views = base.unbind()
    base.mul_(2)

    assert measure_size(views[0]) >= 4000


def test_methods_of_tensor_subclass_do_not_run():
    tensor = torch.zeros(1000).as_subclass(Watched)
    Watched.num_calls = 0

    assert sum(storage_sizes(live_tensors()).values()) >= 4000
    assert (measure_size(tensor), Watched.num_calls) == (4000, 0)


def test_tensors_without_storage_have_size_zero():
    with FakeTensorMode():
        fake = torch.empty(1 << 30)
    inside = []

    def measure(numbers):
        inside.append((measure_size(numbers), storage_sizes(live_tensors()) != {}))
        return numbers

    torch.func.vmap(measure)(torch.ones(3, 2))

    assert measure_size(fake, torch.empty(1 << 30, device="meta"), torch.eye(3).to_sparse()) == 0
    assert inside == [(0, True)]


def test_only_leaves_have_gradients():
    numbers = make_leaf()
    result = numbers * 2
    result.sum().backward()

    assert {name for name, _, _ in find_referrers(numbers=numbers, result=result)} == {
        "numbers",
        "numbers.grad",
        "result",
    }
