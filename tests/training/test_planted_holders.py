"""A planted tensor is found by name and counted once, in every kind of object."""

import asyncio
import contextvars
import functools
import itertools
import sys
import threading
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import pandas as pd
import pytest
import torch

from openmed_nb.training.holders import find_tensor_referrers

pytestmark = pytest.mark.usefixtures("by_itself")

# Size in bytes of a planted tensor, which is unique.
SIZE = 123_456


def make_tensor():
    """Return the planted tensor."""
    return torch.zeros(SIZE // 4)


class Slots:
    """Class with slots and no ``__dict__``."""

    __slots__ = ("empty", "loss")

    def __init__(self, loss):
        self.loss = loss


class MoreSlots(Slots):
    """Subclass of a class with slots, with a ``__dict__``."""


class Pair(NamedTuple):
    """Record of an epoch."""

    epoch: int
    loss: torch.Tensor


class Model:
    """Class with cached computations."""

    @functools.cached_property
    def states(self):
        return make_tensor()

    @functools.lru_cache(maxsize=4)  # noqa: B019 - the planted leak
    def computed(self, number):
        return torch.zeros(SIZE // 4) + number

    def method(self):
        """Do nothing."""


def make_cached_function(maxsize):
    """Return a function that caches its results."""
    function = functools.lru_cache(maxsize=maxsize)(lambda number: make_tensor() + number)
    function(1)
    return function


def make_function_with_cached_arguments():
    """Return a function that caches its arguments."""
    function = functools.lru_cache(maxsize=4)(len)
    function(make_tensor())
    return function


def make_object_array():
    """Return an array of objects."""
    found = np.empty((2, 3), dtype=object)
    found.flat[0] = make_tensor()
    return found


def make_error(cause=False):
    """Return an error whose traceback has a tensor in a local variable, or one that this error has caused."""

    def fail():
        hidden = make_tensor()
        raise ValueError(hidden.ndim)

    try:
        fail()
    except ValueError as error:
        found = KeyError()
        found.__cause__ = error
        return found if cause else error


def make_generator():
    """Return a suspended generator with a tensor in a local variable."""

    def values():
        hidden = make_tensor()
        yield 0
        yield hidden

    found = values()
    next(found)
    return found


def make_nested_generator():
    """Return a generator that waits for another generator."""

    def outer():
        yield from inner

    inner = make_generator()
    found = outer()
    next(found)
    return found


async def suspended(loss):
    """Wait with a tensor in an argument."""
    await asyncio.sleep(0)
    return loss


def make_coroutine():
    """Return a suspended coroutine."""
    found = suspended(make_tensor())
    found.send(None)
    return found


def make_nested_coroutine():
    """Return a coroutine that waits for another coroutine."""

    async def outer():
        return await suspended(make_tensor())

    found = outer()
    found.send(None)
    return found


def make_done_task():
    """Return a task with a tensor as its result."""

    async def run():
        task = asyncio.ensure_future(suspended(make_tensor()))
        await task
        return task

    return asyncio.run(run())


def make_thread_local():
    """Return variables of this thread."""
    found = threading.local()
    found.loss = make_tensor()
    return found


def make_context_variable():
    """Return a context variable with a value."""
    found = contextvars.ContextVar("found")
    found.set(make_tensor())
    return found


def make_context():
    """Return a context with a variable."""
    found = contextvars.copy_context()
    found.run(contextvars.ContextVar("inside").set, make_tensor())
    return found


def make_closure():
    """Return a function with a tensor in its closure."""
    loss = make_tensor()
    return lambda: loss


def make_function_with_default(loss=None):
    """Return a function with a tensor as a default argument."""

    def function(loss=loss):
        return loss

    return function


def make_weak_reference():
    """Return a weak reference whose callback has a tensor, and its target."""
    model = Model()
    loss = make_tensor()
    return [model, weakref.ref(model, lambda _reference: loss)]


def make_cycle():
    """Return a cycle iterator after one iteration."""
    found = itertools.cycle([make_tensor()])
    next(found)
    return found


def make_frame():
    """Return the frame of a finished function."""

    def function():
        hidden = make_tensor()
        return sys._getframe(), hidden.ndim

    return function()[0]


def make_method():
    """Return a method of a local class with a tensor in its closure."""
    loss = make_tensor()

    class Made:
        """Local class."""

        def method(self):
            return loss

    return Made().method


def make_hooked_layer(loss):
    """Return a layer with a hook that references a tensor."""
    layer = torch.nn.Linear(1, 1)
    layer.register_forward_hook(lambda *_given: loss and None)
    return layer


def make_parameter():
    """Return a parameter with a gradient in separate memory."""
    found = torch.zeros(SIZE // 4, requires_grad=True)
    found.sum().backward()
    found.grad = torch.zeros(SIZE // 4)
    return found


# For each location: a function that creates it, and the start of its name as the variable ``held``.
PLACES = {
    "a variable": (make_tensor, "held"),
    "a list": (lambda: [make_tensor()], "held"),
    "a tuple": (lambda: (1, make_tensor()), "held"),
    "a set": (lambda: {make_tensor()}, "held"),
    "a dict": (lambda: {"a": make_tensor()}, "held"),
    "a default dict": (lambda: defaultdict(list, a=[make_tensor()]), "held[...]"),
    "an ordered dict": (lambda: OrderedDict(a=make_tensor()), "held"),
    "a mapping that cannot be changed": (lambda: types.MappingProxyType({"a": make_tensor()}), "held[...]"),
    "a deque": (lambda: deque([make_tensor()], 3), "held"),
    "a named tuple": (lambda: Pair(1, make_tensor()), "held"),
    "an attribute": (lambda: types.SimpleNamespace(loss=make_tensor()), "held.loss"),
    "a slot": (lambda: Slots(make_tensor()), "held.loss"),
    "a slot of the class before": (lambda: MoreSlots(make_tensor()), "held.loss"),
    "a cached property": (lambda: (found := Model(), found.states)[0], "held.states"),
    "a cache": (lambda: make_cached_function(8), "held"),
    "a cache without a bound": (lambda: make_cached_function(None), "held[...]"),
    "the arguments of a cache": (make_function_with_cached_arguments, "held"),
    "an array of objects": (make_object_array, "held"),
    "the memory of an array": (lambda: make_tensor().numpy(), "held"),
    "the memory of a view": (lambda: make_tensor().numpy()[5:], "held"),
    "a column of objects": (lambda: pd.Series([make_tensor(), None], dtype=object), "held."),
    "a partial": (lambda: functools.partial(print, make_tensor()), "held.args"),
    "a partial method": (lambda: functools.partialmethod(print, make_tensor()), "held.args"),
    "variables of a thread": (make_thread_local, "held[...]"),
    "an error": (make_error, "held: hidden"),
    "the cause of an error": (lambda: make_error(cause=True), "held"),
    "a traceback": (lambda: make_error().__traceback__, "held: hidden"),
    "the arguments of an error": (lambda: ValueError(make_tensor()), "held"),
    "a frame": (make_frame, "held: hidden"),
    "a generator": (make_generator, "held: hidden"),
    "a generator inside another": (make_nested_generator, "held: inner: hidden"),
    "a generator expression": (lambda: (tensor for tensor in [make_tensor()]), "held"),
    "a coroutine": (make_coroutine, "held: loss"),
    "a coroutine inside another": (make_nested_coroutine, "held: (awaited): loss"),
    "a task": (make_done_task, "held"),
    "a context variable": (make_context_variable, "held"),
    "a context": (make_context, "held[...]"),
    "a closure": (make_closure, "held.loss"),
    "a default": (lambda: make_function_with_default(make_tensor()), "held.__defaults__"),
    "a method of a class in a function": (make_method, "held"),
    "what a weak reference calls": (make_weak_reference, "held[...]"),
    "a method of a container": (lambda: [make_tensor()].append, "held.__self__"),
    "a cycle": (make_cycle, "held"),
    "an iterator": (lambda: iter([make_tensor()]), "held[...]"),
    "a hook of a layer": (lambda: make_hooked_layer(make_tensor()), "held._forward_hooks[...].loss"),
    "a gradient": (make_parameter, "held.grad"),
}


@pytest.mark.real_computer  # The simulation stores modes in its contexts.
@pytest.mark.parametrize(("make", "name"), PLACES.values(), ids=PLACES)
def test_planted_tensor_is_found_once_by_name(make, name):
    held = make()
    referrers = [referrer for referrer in find_tensor_referrers({"held": held}) if referrer.size == SIZE]
    if asyncio.iscoroutine(held):
        held.close()

    assert [referrer.tensors for referrer in referrers if referrer.name.startswith(name)] == [1]


def test_variable_of_another_thread_is_named():
    started = threading.Event()
    finished = threading.Event()

    def train():
        hidden_in_a_thread = make_tensor()
        started.set()
        finished.wait(60)
        return hidden_in_a_thread

    with ThreadPoolExecutor(1) as thread:
        thread.submit(train)
        started.wait(60)
        found = [referrer.name for referrer in find_tensor_referrers() if referrer.size == SIZE]
        finished.set()

    assert found == ["(another thread) hidden_in_a_thread"]


def test_search_does_not_change_generator_or_error():
    running = make_generator()
    error = make_error()
    find_tensor_referrers({"running": running, "error": error})
    gone = weakref.ref(next(running))

    assert gone() is not None
    assert error.__traceback__.tb_next.tb_frame.f_locals["hidden"].ndim == 1
    del running
    assert gone() is None


def test_search_fills_no_cache_or_thread_local():
    made = []

    class Local(threading.local):
        """Variables that each thread creates."""

        def __init__(self):
            made.append(1)

    model = Model()
    local = Local()
    with ThreadPoolExecutor(1) as thread:
        thread.submit(find_tensor_referrers, {"model": model, "local": local}).result()

    assert made == [1]
    assert "states" not in vars(model)
    assert Model.computed.cache_info().currsize == 0


@pytest.fixture(params=[True, False], ids=["with data", "as torch 2.6"])
def saved_tensor_api(request, monkeypatch):
    """Saved tensors with the attribute ``data`` of torch 2.7, or without it as in 2.6."""
    if not request.param:
        monkeypatch.delattr(torch._C._autograd.SavedTensor, "data", raising=False)


def measure_loss(loss):
    """Return the size in bytes of a loss with its graph."""
    return sum(referrer.size for referrer in find_tensor_referrers({"loss": loss}))


class Double(torch.autograd.Function):
    """Custom Function that saves a tensor."""

    @staticmethod
    def forward(context, numbers):
        """Save twice the numbers."""
        context.save_for_backward(numbers * 2)
        return numbers * numbers

    @staticmethod
    def backward(context, gradient):
        """Use the saved tensor."""
        return gradient * context.saved_tensors[0]


# Functions of a thousand numbers, with the minimum size of their graphs in bytes.
GRAPHS = {
    "an output": (torch.exp, 4000),
    "inputs": (lambda numbers: (numbers * 2) * (numbers * 3), 8000),
    "a list": (lambda numbers: torch.stack([numbers * 2, numbers * 3]).prod(0), 8000 + 4000),
    "a Function in Python": (Double.apply, 4000),
}


@pytest.mark.real_computer  # The graphs of the simulated device have nodes of their own.
@pytest.mark.usefixtures("saved_tensor_api")
@pytest.mark.parametrize(("function", "minimum_bytes"), GRAPHS.values(), ids=GRAPHS)
def test_size_includes_graph_until_backward_pass(function, minimum_bytes):
    loss = function(torch.ones(1000, requires_grad=True)).sum()

    assert measure_loss(loss) >= minimum_bytes
    loss.backward()
    assert measure_loss(loss) == 4


@pytest.mark.usefixtures("saved_tensor_api")
def test_search_does_not_call_unpack_hooks():
    called = []

    def unpack(packed):
        called.append(1)
        return packed[0]

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: (tensor,), unpack):
        loss = torch.ones(1000, requires_grad=True).exp().sum()
    sys.setprofile(None)
    measure_loss(loss)

    assert not called
    assert sys.getprofile() is None
    loss.backward()
    assert called


@pytest.mark.usefixtures("saved_tensor_api")
def test_graph_and_profiler_work_after_search():
    numbers = torch.ones(1000, requires_grad=True)
    loss = (numbers.exp() * numbers).sum()
    profiled = []
    sys.setprofile(lambda *_event: profiled.append(1))
    measure_loss(loss)
    sys.setprofile(None)
    (first,) = torch.autograd.grad(loss, numbers, create_graph=True)
    measure_loss(first)
    (second,) = torch.autograd.grad(first.sum(), numbers)

    torch.testing.assert_close(first.detach(), torch.full((1000,), 2 * torch.e))
    torch.testing.assert_close(second, torch.full((1000,), 3 * torch.e))
    assert profiled
