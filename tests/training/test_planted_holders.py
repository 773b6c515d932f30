"""Wherever a tensor is planted, the search says by which name it is held, and counts it once."""

import asyncio
import contextvars
import functools
import itertools
import sys
import threading
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from typing import NamedTuple

import numpy as np
import pandas as pd
import pytest
import torch

from openmed_nb.training.holders import find_tensor_referrers

pytestmark = pytest.mark.usefixtures("by_itself")

SIZE = 123_456
"""Bytes of a planted tensor, which nothing else has."""


def planted():
    """Return a tensor to be found."""
    return torch.zeros(SIZE // 4)


class Slots:
    """What has slots and no __dict__."""

    __slots__ = ("empty", "loss")

    def __init__(self, loss):
        self.loss = loss


class MoreSlots(Slots):
    """A class whose slots are those of another, with a __dict__ beside them."""


class Pair(NamedTuple):
    """What is kept of an epoch."""

    epoch: int
    loss: torch.Tensor


class Model:
    """What computes something once."""

    @functools.cached_property
    def states(self):
        """A tensor."""
        return planted()

    @functools.lru_cache(maxsize=4)  # noqa: B019 - the leak that is planted
    def computed(self, number):
        """Return a tensor for a number."""
        return torch.zeros(SIZE // 4) + number

    def method(self):
        """Do nothing."""


def computing(maxsize):
    """Return a function that keeps its results."""
    function = functools.lru_cache(maxsize=maxsize)(lambda number: planted() + number)
    function(1)
    return function


def keyed():
    """Return a function that keeps what it was called with."""
    function = functools.lru_cache(maxsize=4)(len)
    function(planted())
    return function


def object_array():
    """Return an array of objects."""
    found = np.empty((2, 3), dtype=object)
    found.flat[0] = planted()
    return found


def kept_error(cause=False):
    """Return an error that was raised with a tensor in a variable of a function."""

    def fail():
        hidden = planted()
        raise ValueError(hidden.ndim)

    def fail_again():
        try:
            fail()
        except ValueError as error:
            raise KeyError from error

    try:
        if cause:
            fail_again()
        else:
            fail()
    except (ValueError, KeyError) as error:
        return error


def waiting():
    """Return a generator that waits with a tensor in a variable."""

    def values():
        hidden = planted()
        yield 0
        yield hidden

    found = values()
    next(found)
    return found


def waiting_inside():
    """Return a generator that waits for another one with a tensor in a variable."""

    def outer():
        yield from inner

    inner = waiting()
    found = outer()
    next(found)
    return found


async def suspended(loss):
    """Wait with a tensor in an argument."""
    await asyncio.sleep(0)
    return loss


def waiting_coroutine():
    """Return a coroutine that waits."""
    found = suspended(planted())
    found.send(None)
    return found


def waiting_outside():
    """Return a coroutine that waits for another one."""

    async def outer():
        return await suspended(planted())

    found = outer()
    found.send(None)
    return found


def done_task():
    """Return a task that has a tensor as its result."""

    async def run():
        task = asyncio.ensure_future(suspended(planted()))
        await task
        return task

    return asyncio.run(run())


def thread_local():
    """Return variables of this thread."""
    found = threading.local()
    found.loss = planted()
    return found


def context_variable():
    """Return a context variable that has a value."""
    found = contextvars.ContextVar("found")
    found.set(planted())
    return found


def context():
    """Return a context in which a variable has a value."""
    found = contextvars.copy_context()
    found.run(contextvars.ContextVar("inside").set, planted())
    return found


def closure():
    """Return a function that knows a tensor from around it."""
    loss = planted()
    return lambda: loss


def default(loss=None):
    """Return a function with a tensor as the default of an argument."""

    def function(loss=loss):
        return loss

    return function


def watched():
    """Return a weak reference that has a tensor in what it calls at the end, and what it refers to."""
    model, loss = Model(), planted()
    return [model, weakref.ref(model, lambda _reference: loss)]


def cycled():
    """Return a cycle that has gone round once."""
    found = itertools.cycle([planted()])
    next(found)
    return found


def frame():
    """Return the frame of a function that is over."""

    def function():
        hidden = planted()
        return sys._getframe(), hidden.ndim

    return function()[0]


def made_class():
    """Return an object of a class that keeps a tensor, made in a function."""
    loss = planted()

    class Made:
        """Knows a tensor."""

        def method(self):
            """Return it."""
            return loss

    return Made().method


def hooked(loss):
    """Return a layer with a hook that knows a tensor."""
    layer = torch.nn.Linear(1, 1)
    layer.register_forward_hook(lambda *_given: loss and None)
    return layer


def graded():
    """Return a parameter with a gradient of another size in memory."""
    found = torch.zeros(SIZE // 4, requires_grad=True)
    found.sum().backward()
    found.grad = torch.zeros(SIZE // 4)
    return found


# Of each place: how it is made, and the beginning of the name that it has as the variable ``held``.
PLACES = {
    "a variable": (planted, "held"),
    "a list": (lambda: [planted()], "held"),
    "a tuple": (lambda: (1, planted()), "held"),
    "a set": (lambda: {planted()}, "held"),
    "a dict": (lambda: {"a": planted()}, "held"),
    "a default dict": (lambda: defaultdict(list, a=[planted()]), "held[...]"),
    "an ordered dict": (lambda: OrderedDict(a=planted()), "held"),
    "a mapping that cannot be changed": (lambda: types.MappingProxyType({"a": planted()}), "held[...]"),
    "a deque": (lambda: deque([planted()], 3), "held"),
    "a named tuple": (lambda: Pair(1, planted()), "held"),
    "an attribute": (lambda: types.SimpleNamespace(loss=planted()), "held.loss"),
    "a slot": (lambda: Slots(planted()), "held.loss"),
    "a slot of the class before": (lambda: MoreSlots(planted()), "held.loss"),
    "a cached property": (lambda: (found := Model(), found.states)[0], "held.states"),
    "a cache": (lambda: computing(8), "held"),
    "a cache without a bound": (lambda: computing(None), "held[...]"),
    "the arguments of a cache": (keyed, "held"),
    "an array of objects": (object_array, "held"),
    "the memory of an array": (lambda: planted().numpy(), "held"),
    "the memory of a view": (lambda: planted().numpy()[5:], "held"),
    "a column of objects": (lambda: pd.Series([planted(), None], dtype=object), "held."),
    "a partial": (lambda: functools.partial(print, planted()), "held.args"),
    "a partial method": (lambda: functools.partialmethod(print, planted()), "held.args"),
    "variables of a thread": (thread_local, "held[...]"),
    "an error": (kept_error, "held: hidden"),
    "the cause of an error": (lambda: kept_error(cause=True), "held"),
    "a traceback": (lambda: kept_error().__traceback__, "held: hidden"),
    "the arguments of an error": (lambda: ValueError(planted()), "held"),
    "a frame": (frame, "held: hidden"),
    "a generator": (waiting, "held: hidden"),
    "a generator inside of another": (waiting_inside, "held: inner: hidden"),
    "a generator expression": (lambda: (one for one in [planted()]), "held"),
    "a coroutine": (waiting_coroutine, "held: loss"),
    "a coroutine inside of another": (waiting_outside, "held: (awaited): loss"),
    "a task": (done_task, "held"),
    "a context variable": (context_variable, "held"),
    "a context": (context, "held[...]"),
    "a closure": (closure, "held.loss"),
    "a default": (lambda: default(planted()), "held.__defaults__"),
    "a method of a class in a function": (made_class, "held"),
    "what a weak reference calls": (watched, "held[...]"),
    "a method of a container": (lambda: [planted()].append, "held.__self__"),
    "a cycle": (cycled, "held"),
    "an iterator": (lambda: iter([planted()]), "held[...]"),
    "a hook of a layer": (lambda: hooked(planted()), "held._forward_hooks[...].loss"),
    "a gradient": (graded, "held.grad"),
}


@pytest.mark.real_computer  # It is about Python's containers; the simulation keeps modes in contexts of its own.
@pytest.mark.parametrize(("make", "name"), PLACES.values(), ids=PLACES)
def test_planted_tensor_is_found_once_by_name(make, name):
    held = make()
    found = [one for one in find_tensor_referrers({"held": held}) if one.size == SIZE and one.name.startswith(name)]
    if asyncio.iscoroutine(held):
        held.close()

    assert len(found) == 1
    assert found[0].tensors == 1


def sizes(name):
    """Return the bytes that names with a word in them hold, of all that can be seen from here."""
    return [one.size for one in find_tensor_referrers() if name in one.name and one.size == SIZE]


def test_variable_of_another_thread_is_named():
    begun, over = threading.Event(), threading.Event()

    def train():
        hidden_in_a_thread = planted()
        begun.set()
        over.wait(60)
        return hidden_in_a_thread

    thread = threading.Thread(target=train)
    thread.start()
    begun.wait(60)
    found = sizes("(another thread) hidden_in_a_thread")
    over.set()
    thread.join()

    assert found == [SIZE]


def test_variable_of_this_thread_is_named():
    hidden_here = planted()

    assert [one.name for one in find_tensor_referrers() if one.size == SIZE] == ["hidden_here"]
    assert hidden_here.ndim == 1


def test_search_does_not_change_generator_or_error():
    running, error = waiting(), kept_error()
    find_tensor_referrers({"running": running, "error": error})
    gone = weakref.ref(next(running))

    assert gone() is not None
    assert error.__traceback__.tb_next.tb_frame.f_locals["hidden"].ndim == 1
    del running
    assert gone() is None


def test_search_fills_no_cache_or_thread_local():
    made = []

    class Local(threading.local):
        """Variables that each thread makes."""

        def __init__(self):
            made.append(1)

    model, local = Model(), Local()
    thread = threading.Thread(target=find_tensor_referrers, args=({"model": model, "local": local},))
    thread.start()
    thread.join()

    assert made == [1]
    assert "states" not in vars(model)
    assert Model.computed.cache_info().currsize == 0


@pytest.fixture(params=[True, False], ids=["with data", "as torch 2.6"])
def saved_tensors_tell(request, monkeypatch):
    """Let what a graph keeps be read as since torch 2.7 or, as in 2.6, by unpacking it alone."""
    if not request.param:
        monkeypatch.delattr(torch._C._autograd.SavedTensor, "data", raising=False)


def held_by(loss):
    """Return the bytes that a loss holds with its graph."""
    return sum(one.size for one in find_tensor_referrers({"loss": loss}))


class Double(torch.autograd.Function):
    """A function written in Python that keeps a tensor of its own."""

    @staticmethod
    def forward(context, numbers):
        """Keep twice the numbers."""
        context.save_for_backward(numbers * 2)
        return numbers * numbers

    @staticmethod
    def backward(context, gradient):
        """Use what was kept."""
        return gradient * context.saved_tensors[0]


# Functions of a thousand numbers whose graph keeps so many bytes.
GRAPHS = {
    "an output": (torch.exp, 4000),
    "inputs": (lambda numbers: (numbers * 2) * (numbers * 3), 8000),
    "a list": (lambda numbers: torch.stack([numbers * 2, numbers * 3]).prod(0), 8000 + 4000),
    "a Function in Python": (Double.apply, 4000),
}


@pytest.mark.real_computer  # The graphs of the simulated device have nodes of their own.
@pytest.mark.usefixtures("saved_tensors_tell")
@pytest.mark.parametrize(("function", "least"), GRAPHS.values(), ids=GRAPHS)
def test_size_includes_graph_until_backward_pass(function, least):
    loss = function(torch.ones(1000, requires_grad=True)).sum()

    assert held_by(loss) >= least
    loss.backward()
    assert held_by(loss) == 4


@pytest.mark.usefixtures("saved_tensors_tell")
def test_search_does_not_call_unpack_hooks():
    called = []

    def unpack(packed):
        called.append(1)
        return packed[0]

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: (tensor,), unpack):
        loss = torch.ones(1000, requires_grad=True).exp().sum()
    sys.setprofile(None)
    held_by(loss)

    assert not called
    assert sys.getprofile() is None
    loss.backward()
    assert called


@pytest.mark.usefixtures("saved_tensors_tell")
def test_graph_and_profiler_work_after_search():
    numbers = torch.ones(1000, requires_grad=True)
    loss = (numbers.exp() * numbers).sum()
    profiled = []
    sys.setprofile(lambda *_event: profiled.append(1))
    held_by(loss)
    sys.setprofile(None)
    (first,) = torch.autograd.grad(loss, numbers, create_graph=True)
    held_by(first)
    (second,) = torch.autograd.grad(first.sum(), numbers)

    torch.testing.assert_close(first.detach(), torch.full((1000,), 2 * torch.e))
    torch.testing.assert_close(second, torch.full((1000,), 3 * torch.e))
    assert profiled
