"""The tensors that are alive are counted without waking anything, and without changing what they do."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import openmed_nb as nb
from openmed_nb.training.holders import living_bytes, storage_sizes

pytestmark = pytest.mark.usefixtures("by_itself")

THOUSAND = 4 * 1000
"""Bytes of a thousand numbers."""


def size_of(*tensors):
    """Return the bytes that tensors and their graphs use."""
    return sum(one.size for one in nb.training.who_holds({"held": list(tensors)}) if one.name == "held")


def leaf():
    """Return a thousand numbers that want a gradient."""
    return torch.ones(1000, requires_grad=True)


class Square(torch.autograd.Function):
    """A function written in Python, which keeps a tensor of its own."""

    @staticmethod
    def forward(context, numbers):
        """Keep twice the numbers."""
        context.save_for_backward(numbers * 2)
        return numbers * numbers

    @staticmethod
    def backward(context, gradient):
        """Use what was kept."""
        return gradient * context.saved_tensors[0]


class Watched(torch.Tensor):
    """A tensor class of a person's own that counts what is asked of it."""

    asked = 0

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        """Count the question."""
        Watched.asked += 1
        return super().__torch_function__(function, types, args, kwargs or {})


def test_each_storage_counts_once():
    """A view, its base and a view of the view are one storage; storages of their own are added."""
    whole = torch.zeros(1000)

    assert size_of(whole, whole[10:], whole.view(10, 100).t(), whole.detach()) == THOUSAND
    assert size_of(whole[:1]) == THOUSAND
    assert size_of(whole, whole.clone()) == 2 * THOUSAND


@pytest.mark.parametrize("function", [torch.exp, Square.apply], ids=["of torch", "of Python"])
def test_what_a_graph_keeps_is_counted_until_the_backward_pass(function):
    """A loss counts with what its graph keeps; after the backward pass only the loss itself is left."""
    loss = function(leaf()).sum()

    assert size_of(loss) == THOUSAND + 4
    loss.backward()
    assert size_of(loss) == 4


def test_parameters_are_no_part_of_a_graph():
    """Leaves that a graph refers to are not counted for it."""
    layer = torch.nn.Linear(1000, 2)
    loss = layer(torch.ones(3, 1000)).sum()

    assert size_of(loss) < THOUSAND * 4


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_is_not_computed_again(reentrant):
    """Looking at a graph with a checkpoint in it computes nothing, before and after the backward pass."""
    runs = []

    def part(numbers):
        runs.append(1)
        return (numbers * 2).exp().sin()

    loss = checkpoint(part, leaf(), use_reentrant=reentrant).sum()
    size_of(loss)
    assert len(runs) == 1
    loss.backward()
    assert size_of(loss) == 4
    assert len(runs) == 2


def test_looking_leaves_the_backward_pass_as_it_was():
    """Gradients are the same after a look at the graph."""
    numbers = leaf()
    loss = (numbers.exp() * numbers).sum()
    size_of(loss)
    living_bytes()
    loss.backward()

    torch.testing.assert_close(numbers.grad, torch.full((1000,), 2 * torch.e))


def test_views_whose_graph_became_invalid_are_counted():
    """One of several views whose base was changed in place has no graph that torch tells; it is counted all the same."""
    base = torch.ones(4, 250, requires_grad=True) * 1
    views = base.unbind()
    base.mul_(2)

    with pytest.raises(RuntimeError, match="modified inplace"):
        _ = views[0].grad_fn
    assert size_of(views[0]) >= THOUSAND


def test_lazy_parameters_are_not_woken():
    """A parameter without a shape stays so, and counts nothing."""
    layer = torch.nn.LazyLinear(3)

    assert size_of(*layer.parameters()) == 0
    assert living_bytes() >= 0
    assert layer.has_uninitialized_params()


def test_tensor_classes_of_others_are_not_asked():
    """The methods of a tensor class of a person's own do not run."""
    tensor = torch.zeros(1000).as_subclass(Watched)
    Watched.asked = 0

    assert sum(storage_sizes([tensor]).values()) == THOUSAND
    assert living_bytes() >= THOUSAND
    assert Watched.asked == 0


def test_what_has_no_memory_counts_nothing():
    """Meta, fake, sparse and functorch tensors have no storage of their own that uses memory."""
    with FakeTensorMode():
        fake = torch.empty(1 << 30)
    inside = []
    torch.func.vmap(lambda numbers: (inside.append(size_of(numbers)), numbers)[1])(torch.ones(3, 2))

    assert size_of(fake, torch.empty(1 << 30, device="meta"), torch.eye(3).to_sparse()) == 0
    assert inside == [0]


def test_a_look_inside_of_a_transformation_works():
    """Living tensors can be counted while functorch transforms a function, and in inference mode."""
    kept, sizes = torch.ones(3), []
    torch.func.grad(lambda numbers: (sizes.append(living_bytes()), numbers.sum())[1])(kept)
    with torch.inference_mode():
        sizes.append(living_bytes())

    assert all(size >= kept.nbytes for size in sizes)


def test_living_tensors_come_and_go():
    """A tensor is among the living until its last reference goes."""
    gc.collect()
    before = living_bytes()
    tensor = torch.zeros(1 << 20)
    gone = weakref.ref(tensor)

    assert living_bytes() - before == 4 << 20
    del tensor
    gc.collect()
    assert gone() is None
    assert living_bytes() == before


def test_gradients_are_those_of_leaves():
    """A leaf has its gradient, what was computed has none, and torch does not warn."""
    numbers = leaf()
    result = numbers * 2
    result.sum().backward()
    held = {
        one.name: (one.tensors, one.graphs) for one in nb.training.who_holds({"numbers": numbers, "result": result})
    }

    assert held == {"numbers": (1, 0), "numbers.grad": (1, 0), "result": (1, 1)}
