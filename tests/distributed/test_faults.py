"""Workers that are killed, run out of memory, or are ended by a text: every other text is annotated exactly once."""

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
from openmed_nb.errors import DeviceUnavailableError

pytestmark = [
    pytest.mark.real_computer,  # Workers are processes.
    pytest.mark.usefixtures("quick_workers"),
    pytest.mark.skipif(sys.platform == "win32", reason="signals are those of POSIX"),
]

COUNT = 240
POISON = 101
EVERY = [[number] for number in range(COUNT)]


@pytest.fixture(scope="module")
def faults(helper):
    """The module of faults, whose code goes to the workers as it is."""
    module = helper(Path(__file__).parent / "faults.py")
    cloudpickle.register_pickle_by_value(module)
    yield module
    cloudpickle.unregister_pickle_by_value(module)


@pytest.fixture
def fault(faults, tiny, tmp_path):
    """A function that puts a fault into the workers of a cluster for a block: what a token does to them."""

    @contextlib.contextmanager
    def fault(client, action, word="seen", **how):
        plugin = faults.Fault(tiny.VOCABULARY[word], len(tiny.VOCABULARY), action, tmp_path, **how)
        client.register_plugin(plugin)
        try:
            yield lambda: len(list(tmp_path.iterdir()))
        finally:
            client.unregister_worker_plugin(plugin.name)

    return fault


@pytest.fixture
def poisoned(numbered):
    """Numbered texts, in one of which stands the word that the fault waits for."""
    texts = numbered(COUNT)
    texts[POISON] = texts[POISON].replace("asthma", "asthma seen")
    return texts


@pytest.fixture
def new_model(keyword_model, tmp_path_factory):
    """The keyword model in a folder of its own, which no worker has loaded yet."""
    return shutil.copytree(keyword_model, tmp_path_factory.mktemp("models") / "model")


@pytest.fixture
def annotated_by(keyword_model):
    """A function that annotates texts on a cluster with the keyword model."""
    return lambda client, texts, **options: nb.annotate(texts, keyword_model, client=client, progress=False, **options)


def test_poisoned_text(pool, fault, poisoned, annotated_by, numbers_of):
    """A text that ends every worker that reads it is recorded with its number and the reason; all others are answered."""
    with fault(pool.client, "die") as ends:
        found = annotated_by(pool.client, poisoned, on_error="record")
        ended = ends()

    assert numbers_of(found) == [*EVERY[:POISON], [], *EVERY[POISON + 1 :]]
    assert found.errors == {
        POISON: f"Text {POISON} ended the worker that read it 3 times, the last one on 127.0.0.1. "
        "Read it alone; it may need more memory than a worker has."
    }
    assert ended == 6


def test_poisoned_text_is_read_again(pool, fault, poisoned, annotated_by, numbers_of, tmp_path):  # noqa: PLR0913, PLR0917 - fixtures
    """A text that ended its workers has its result once it ends none, and no other text is read again."""
    with fault(pool.client, "die"):
        annotated_by(pool.client, poisoned, on_error="record", resume=tmp_path / "run.jsonl")
    found = annotated_by(pool.client, poisoned, resume=tmp_path / "run.jsonl")

    assert [len(entities) for entities in found] == [1] * len(poisoned)
    assert [numbers for place, numbers in enumerate(numbers_of(found)) if place != POISON] == [
        *EVERY[:POISON],
        *EVERY[POISON + 1 :],
    ]
    assert found.errors == {}


def test_killed_worker(pool, numbered, annotated_by, numbers_of, tmp_path):
    """A worker that is killed with kill -9 in the middle of a run costs no text, and none is answered twice."""
    file, killed = tmp_path / "run.jsonl", []
    victim = next(iter(pool.client.run(os.getpid).values()))

    def texts():
        for text in numbered(COUNT):
            if not killed and file.read_bytes().count(b"\n") > 1:
                os.kill(victim, signal.SIGKILL)
                killed.append(victim)
            yield text

    found = annotated_by(pool.client, texts(), resume=file)

    assert killed
    assert victim not in pool.client.run(os.getpid).values()
    assert (numbers_of(found), found.errors) == (EVERY, {})


@pytest.mark.parametrize("killed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_worker_killed_while_it_loads_the_model(  # noqa: PLR0913, PLR0917 - fixtures
    pool, fault, numbered, numbers_of, new_model, killed
):
    """A worker that is killed while the workers get ready costs no text, nor do both: Dask starts others in their place."""
    with fault(pool.client, "die", word="[CLS]", times=killed) as ends:
        found = nb.annotate(numbered(COUNT), new_model, client=pool.client, progress=False)

    assert ends() == killed
    assert (numbers_of(found), found.errors) == (EVERY, {})


@pytest.mark.slow
def test_worker_out_of_memory(fault, poisoned, annotated_by, numbers_of):
    """A worker that uses more memory than it may is ended by Dask and started again, and its texts are read again."""
    from distributed import Client, LocalCluster

    options = {"threads_per_worker": 1, "memory_limit": "1.5 GB", "dashboard_address": "127.0.0.1:0"}
    with (
        mock.patch.dict(os.environ),  # Dask's LocalCluster sets some variables for the processes that it starts.
        LocalCluster(n_workers=1, **options) as cluster,
        Client(cluster) as client,
        fault(client, "fill_memory", times=1) as ends,
    ):
        before = client.run(os.getpid)
        found = annotated_by(client, poisoned)
        after = client.run(os.getpid)

    assert ends() == 1
    assert set(before.values()).isdisjoint(after.values())
    assert (numbers_of(found), found.errors) == (EVERY, {})


def test_device_out_of_memory(pool, fault, numbered, annotated_by, numbers_of):
    """A device that is short of memory is so a few times at the beginning of a run, and no more: a worker remembers it."""
    texts = [text.replace("asthma", "asthma seen") for text in numbered(COUNT)]
    with fault(pool.client, "run_out", least=65) as refused:
        found = annotated_by(pool.client, texts, device="cpu")

    assert 0 < refused() <= 2 * len(pool.client.run(os.getpid))
    assert (numbers_of(found), found.errors) == (EVERY, {})


def test_failing_chunk_leaves_no_text_in_logs(pool, fault, poisoned, annotated_by):
    """Where a device fails, the error names the host and comes after all answers before; no log shows a text."""
    with (
        fault(pool.client, "fail") as fails,
        pytest.raises(DeviceUnavailableError, match=r"^On .+: The model could not run on cpu: it fails\. ") as caught,
    ):
        annotated_by(pool.client, poisoned)
    logs = str(pool.client.get_worker_logs())

    assert fails() == 3
    assert 0 < len(caught.value.annotations) <= POISON
    assert "Compute Failed" in logs
    assert "asthma" not in logs
