"""Workers that are killed, run out of memory or crash: all other texts are annotated exactly once."""

import contextlib
import os
import shutil
import signal
import sys
from pathlib import Path
from unittest import mock

import cloudpickle
import pytest

import openmed_nb as nb
from helpers import tiny_models as tiny
from helpers.numbered_texts import get_numbers, numbered
from openmed_nb.errors import DeviceUnavailableError

pytestmark = [
    pytest.mark.real_computer,  # Workers are processes.
    pytest.mark.usefixtures("quick_workers"),
    pytest.mark.skipif(sys.platform == "win32", reason="the signals need POSIX"),
]

NUM_TEXTS = 600
CRASHING_INDEX = 101
ALL_NUMBERS = [[number] for number in range(NUM_TEXTS)]


@pytest.fixture(scope="module")
def faults(helper):
    """Module with the faults, which is pickled by value."""
    module = helper(Path(__file__).parent / "faults.py")
    cloudpickle.register_pickle_by_value(module)
    yield module
    cloudpickle.unregister_pickle_by_value(module)


@pytest.fixture
def fault(faults, tmp_path):
    """Function that injects a fault into the workers of a cluster during a block."""

    @contextlib.contextmanager
    def fault(client, action, word="seen", **options):
        plugin = faults.Fault(tiny.VOCABULARY[word], len(tiny.VOCABULARY), action, tmp_path, **options)
        client.register_plugin(plugin)
        try:
            yield lambda: len(list(tmp_path.iterdir()))
        finally:
            client.unregister_worker_plugin(plugin.name)

    return fault


@pytest.fixture
def crashing_texts():
    """Numbered texts. One text contains the word that triggers the fault."""
    texts = numbered(NUM_TEXTS)
    texts[CRASHING_INDEX] = texts[CRASHING_INDEX].replace("asthma", "asthma seen")
    return texts


@pytest.fixture
def new_model(keyword_model, tmp_path_factory):
    """Copy of the keyword model that no worker has loaded."""
    return shutil.copytree(keyword_model, tmp_path_factory.mktemp("models") / "model")


@pytest.fixture
def annotate_on(keyword_model):
    """Function that annotates texts on a cluster with the keyword model."""
    return lambda client, texts, **options: nb.annotate(texts, keyword_model, client=client, progress=False, **options)


def test_crashing_text_is_recorded_and_repeated_on_resume(pool, fault, crashing_texts, annotate_on, tmp_path_factory):
    file = tmp_path_factory.mktemp("run") / "run.jsonl"
    with fault(pool.client, "die") as count_crashes:
        annotations = annotate_on(pool.client, crashing_texts, on_error="record", resume=file)
        num_crashes = count_crashes()
    resumed = annotate_on(pool.client, crashing_texts, resume=file)

    others = ALL_NUMBERS[:CRASHING_INDEX], ALL_NUMBERS[CRASHING_INDEX + 1 :]
    assert get_numbers(annotations) == [*others[0], [], *others[1]]
    assert annotations.errors == {
        CRASHING_INDEX: f"Text {CRASHING_INDEX} crashed its worker 3 times, most recently on 127.0.0.1. "
        "Annotate the text separately. It may need more memory than a worker has."
    }
    assert num_crashes == 6
    numbers = get_numbers(resumed)
    assert (len(numbers.pop(CRASHING_INDEX)), numbers, resumed.errors) == (1, [*others[0], *others[1]], {})


def test_killed_worker_loses_no_text(pool, annotate_on, tmp_path):
    file = tmp_path / "run.jsonl"
    killed = []
    victim = next(iter(pool.client.run(os.getpid).values()))

    def texts():
        for text in numbered(NUM_TEXTS):
            if not killed and file.read_bytes().count(b"\n") > 1:
                os.kill(victim, signal.SIGKILL)
                killed.append(victim)
            yield text

    annotations = annotate_on(pool.client, texts(), resume=file)

    assert victim not in pool.client.run(os.getpid).values()
    assert (get_numbers(annotations), annotations.errors) == (ALL_NUMBERS, {})


@pytest.mark.parametrize("killed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_worker_killed_during_model_load_loses_no_text(pool, fault, new_model, killed):
    with fault(pool.client, "die", word="[CLS]", times=killed) as count_crashes:
        annotations = nb.annotate(numbered(NUM_TEXTS), new_model, client=pool.client, progress=False)

    assert count_crashes() == killed
    assert (get_numbers(annotations), annotations.errors) == (ALL_NUMBERS, {})


@pytest.mark.slow
def test_worker_that_exceeds_its_memory_limit_is_restarted(fault, crashing_texts, annotate_on):
    from distributed import Client, LocalCluster

    options = {"threads_per_worker": 1, "memory_limit": "1.5 GB", "dashboard_address": "127.0.0.1:0"}
    with (
        mock.patch.dict(os.environ),  # LocalCluster sets variables for its processes.
        LocalCluster(n_workers=1, **options) as cluster,
        Client(cluster) as client,
        fault(client, "fill_memory", times=1) as count_crashes,
    ):
        before = client.run(os.getpid)
        annotations = annotate_on(client, crashing_texts)
        after = client.run(os.getpid)

    assert count_crashes() == 1
    assert set(before.values()).isdisjoint(after.values())
    assert (get_numbers(annotations), annotations.errors) == (ALL_NUMBERS, {})


def test_workers_remember_the_reduced_batch_size(pool, fault, annotate_on):
    """A device runs out of memory only at the start of a run."""
    texts = [text.replace("asthma", "asthma seen") for text in numbered(NUM_TEXTS)]
    with fault(pool.client, "run_out_of_memory", min_tokens=65) as count_failures:
        annotations = annotate_on(pool.client, texts, device="cpu")

    assert 0 < count_failures() <= 2 * len(pool.client.run(os.getpid))
    assert (get_numbers(annotations), annotations.errors) == (ALL_NUMBERS, {})


def test_failing_chunk_does_not_log_texts(pool, fault, crashing_texts, annotate_on):
    """The error is raised after all previous results."""
    with (
        fault(pool.client, "fail") as count_failures,
        pytest.raises(DeviceUnavailableError, match="it fails") as caught,
    ):
        annotate_on(pool.client, crashing_texts)
    logs = str(pool.client.get_worker_logs())

    assert count_failures() == 3
    assert 0 < len(caught.value.annotations) <= CRASHING_INDEX
    assert "Compute Failed" in logs
    assert "asthma" not in logs
