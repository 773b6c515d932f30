"""Several threads use one pipeline, or one model, at once."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import openmed_nb as nb
from helpers.annotations import rounded
from helpers.tiny_models import sentences

THREADS = 6


class Passes:
    """Counts the concurrent forward passes of a model."""

    def __init__(self, model):
        self.now = self.most = self.all = 0
        model.register_forward_pre_hook(self.begin)
        model.register_forward_hook(self.end)

    def begin(self, *_ignored):
        """Note that a pass begins."""
        self.now += 1
        self.all += 1
        self.most = max(self.most, self.now)

    def end(self, *_ignored):
        """Note that a pass is over."""
        self.now -= 1


@pytest.fixture
def at_once():
    """A function that runs functions in concurrent threads and returns their results."""

    def at_once(functions):
        barrier = threading.Barrier(len(functions))

        def call(function):
            barrier.wait(timeout=30)
            return function()

        with ThreadPoolExecutor(len(functions)) as threads:
            return list(threads.map(call, functions))

    return at_once


@pytest.mark.parametrize("how", ["simple", "average", "annotate"])
def test_threads_call_one_pipeline(new_pipe, at_once, how):
    """Threads that call one pipeline, or annotate with it, get the answers to their own texts, and never run the model together."""
    strategy = "simple" if how == "annotate" else how
    pipe = new_pipe(strategy)
    call = (lambda texts: list(nb.annotate(texts, pipe, progress=False))) if how == "annotate" else pipe
    passes = Passes(pipe.model)
    texts = [sentences(30, longest=90, seed=number) for number in range(THREADS)]
    expected = [new_pipe(strategy)(inputs) for inputs in texts]
    answers = at_once([lambda inputs=inputs: call(inputs) for inputs in texts])
    assert answers == [rounded(result) for result in expected]
    assert passes.most == 1
    assert passes.all >= THREADS


def test_threads_call_two_pipelines_of_one_model(new_pipe, at_once):
    """Pipelines with other settings over one model and one tokenizer do not disturb each other."""
    first = new_pipe("first")
    second = type(first)(model=first.model, tokenizer=first.tokenizer, device=-1, aggregation_strategy="none")
    passes, texts = Passes(first.model), sentences(30, longest=90)
    expected = {pipe: new_pipe(strategy)(texts) for pipe, strategy in ((first, "first"), (second, "none"))}
    pipes = [first, second] * 3
    answers = at_once([lambda pipe=pipe: pipe(texts) for pipe in pipes])
    assert answers == [rounded(expected[pipe]) for pipe in pipes]
    assert passes.most == 1


@pytest.mark.real_computer  # Another thread moves the model, and a simulation counts in one thread.
def test_model_moved_during_run(new_pipe, at_once, second_device):
    """A thread that moves the model to another device and back does not break the answers of the others."""
    pipe, texts = new_pipe(), sentences(40, longest=90)
    expected = new_pipe()(texts)
    places = []

    def move():
        for device in (second_device, "cpu") * 3:
            pipe.device = device
            places.append(str(pipe.device))

    answers = at_once([move, *[lambda: pipe(texts)] * 3])
    assert answers[1:] == [rounded(expected)] * 3
    assert places == [second_device, "cpu"] * 3
    assert pipe(texts) == rounded(expected)


def test_model_moved_during_stream(new_pipe, second_device):
    """A stream continues on the new device if the model is moved between two results."""
    pipe, texts = new_pipe(), sentences(250)
    expected = new_pipe()(texts)
    answers = pipe(text for text in texts)
    found = [next(answers) for _ in range(10)]
    pipe.device = second_device
    found += [next(answers) for _ in range(100)]
    pipe.device = "cpu"
    found += answers
    assert found == rounded(expected)
