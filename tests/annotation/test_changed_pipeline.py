"""What a pipeline does when it is changed, forked, or asked twice."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from openmed_nb.annotation.pipeline import BUDGETS
from openmed_nb.annotation.tuning import Compilation
from openmed_nb.devices.backend import TENSOR_LOCK

TEXTS = ["the patient has diabetes mellitus", "no asthma ."]


class Texts(torch.utils.data.Dataset):
    """Texts as a data set of torch."""

    def __len__(self):
        return len(TEXTS)

    def __getitem__(self, number):
        return TEXTS[number]


def test_data_set_can_be_read_twice(new_pipe):
    """The answers to a data set can be gone through again, and those to a generator go on where they were."""
    pipe = new_pipe()
    answers, stream = pipe(Texts()), pipe(text for text in TEXTS)

    assert list(answers) == list(answers) == pipe(TEXTS)
    assert [next(stream), *stream] == pipe(TEXTS)


def test_generator_of_lists_of_words(new_pipe):
    """Texts that are split into words and come from a generator are all answered."""
    pipe = new_pipe()

    found = list(pipe((text.split() for text in TEXTS), is_split_into_words=True))

    assert found == pipe([text.split() for text in TEXTS], is_split_into_words=True)
    assert all(found)


def test_another_model_is_not_the_compiled_one(new_pipe):
    """A pipeline that was compiled and then given another model runs that one."""
    pipe, other = new_pipe(), new_pipe()
    pipe._compiled = torch.compile(other.model, backend="eager")
    pipe.compilation = Compilation(True, 2.0, "", "cpu")

    assert not pipe.own_annotator().network.compiled
    pipe.model = other.model
    assert pipe.own_annotator().network.compiled


def test_another_tokenizer_has_its_own_frame(new_pipe, tiny):
    """A tokenizer that is put in the place of another is asked anew what it puts around a text."""
    pipe = new_pipe()
    assert len(pipe.frame.after) == 1
    pipe.tokenizer = tiny.tokenizer(model_max_length=64)
    pipe.tokenizer.backend_tokenizer.post_processor = None

    assert len(pipe.frame.after) == 0


def test_measured_budget_stays_on_its_kind_of_device(new_pipe, home):
    """What was measured on one kind of device is not used on another."""
    pipe = new_pipe()
    pipe._measured = {"cuda": 4096}

    assert pipe.batch_tokens == BUDGETS[home].tokens
    pipe._measured = {home: 4096}
    assert pipe.batch_tokens == 4096


def test_model_that_passes_all_arguments_on(new_pipe):
    """A model whose forward names no argument gets all arrays of its tokenizer."""
    pipe = new_pipe()
    expected = pipe(TEXTS)

    class Wrapped(type(pipe.model)):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    pipe.model.__class__ = Wrapped
    assert pipe(TEXTS) == expected


def test_many_labels(new_pipe):
    """The number of a label may be larger than sixteen bits hold."""
    pipe = new_pipe()
    weight = pipe.model.classifier.weight
    count = 40_000
    with torch.no_grad():
        pipe.model.classifier = torch.nn.Linear(weight.shape[1], count, device=pipe.device)
        pipe.model.classifier.weight.zero_()
        pipe.model.classifier.bias.copy_(torch.arange(count) == count - 1)
    pipe.model.config.id2label = {number: f"L{number}" for number in range(count)}

    assert pipe("asthma", aggregation_strategy="simple")[0]["entity_group"] == f"L{count - 1}"


def test_order_of_ignored_labels_is_no_setting(new_pipe):
    """Labels that are ignored in another order, or twice, are the same settings."""
    one, other = new_pipe(ignore_labels=["O", "A"]), new_pipe(ignore_labels=["A", "O", "A"])

    assert one.own_annotator().settings == other.own_annotator().settings
    assert one.own_annotator().settings != replace(one.own_annotator().settings, ignore_labels=("O",))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forked_child_does_not_wait_for_a_lost_thread():
    """A child that was forked while another thread held the lock can take it."""
    held, let_go = threading.Event(), threading.Event()

    def hold():
        with TENSOR_LOCK:
            held.set()
            let_go.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(30)
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        os._exit(0 if TENSOR_LOCK.acquire(timeout=5) else 1)
    let_go.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_table_without_entities(new_pipe):
    """A table without rows has columns of text where rows would have text."""
    import openmed_nb as nb

    frame = nb.annotate(["no"], new_pipe(), progress=False).to_frame()

    assert list(frame) == ["text", "entity_group", "score", "word", "start", "end"]
    assert frame["word"].dtype == np.dtype(object) or str(frame["word"].dtype).startswith("str")
    assert list(nb.annotate(["no"], new_pipe("none"), progress=False).to_frame())[1] == "entity"
