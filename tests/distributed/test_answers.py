"""Annotation on a cluster: same results as on one machine, in order and on demand; errors and interrupts lose nothing."""

import asyncio
import contextlib
import itertools
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import dask
import numpy as np
import pytest

import openmed_nb as nb
from helpers.annotations import rounded
from helpers.numbered_texts import get_numbers, numbered
from helpers.processes import run_python
from helpers.tiny_models import sentences
from openmed_nb.annotation.stream import CHARACTERS_PER_TOKEN, MIN_CHUNK_TOKENS, Chunk
from openmed_nb.distributed import client as client_module
from openmed_nb.distributed import worker
from openmed_nb.distributed.client import call_on_workers, call_scheduler, fetch_result
from openmed_nb.distributed.stream import CHUNKS_PER_THREAD, ClusterAnnotator
from openmed_nb.distributed.worker import RunSpec
from openmed_nb.errors import (
    ClusterError,
    ClusterUnavailableError,
    ConfigurationError,
    OpenMedError,
    RunInterrupted,
    UnknownModelError,
    WorkerMismatchError,
)

pytestmark = [
    pytest.mark.real_computer,  # Workers are processes.
    pytest.mark.usefixtures("quick_workers"),
]
posix_signals = pytest.mark.skipif(sys.platform == "win32", reason="the signals need POSIX")
THREADS_OPTIONS = {"threads_per_worker": 1, "processes": False, "dashboard_address": "127.0.0.1:0"}


@pytest.fixture
def locally(keyword_model):
    """Function that annotates texts in this process."""

    def locally(texts, model=keyword_model, **options):
        return nb.annotate(texts, model, device="cpu", **{"progress": False, **options})

    return locally


def test_workers_return_dropped_spans(on_pool, locally):
    texts = ["the patient has atension", "no asthma", "atension and hypertension"]
    found = on_pool(texts)

    assert list(found.results.dropped) == [0, 2]
    assert found.results.dropped == locally(texts).results.dropped


class Text(str):
    """String of a custom class that cannot be pickled."""

    __slots__ = ()

    def __reduce__(self):
        raise RuntimeError(f"{self} cannot be pickled")


def wait_until(condition):
    """Wait until a condition is true."""
    while not condition():
        time.sleep(0.01)


def slowly(texts, seconds=0.01):
    """Yield texts with a pause before each."""
    for text in texts:
        time.sleep(seconds)
        yield text


def count_lines(file):
    """Return the number of lines of a results file, or 0 without a file."""
    return file.read_bytes().count(b"\n") if file.exists() else 0


def yield_until_first_result(file):
    """Yield different texts until the results file has a result."""
    for number in itertools.count():
        if count_lines(file) >= 2:
            return
        time.sleep(0.01)
        yield f"asthma {number}{' ' * 2000}"


@contextlib.contextmanager
def open_client(pool):
    """Context manager that opens another client of a cluster."""
    from distributed import Client

    with Client(pool.client.scheduler.address, security=pool.client.security, set_as_default=False) as client:
        yield client


class TestResults:
    """Results of the workers."""

    @pytest.mark.parametrize("count", [500, pytest.param(5000, marks=pytest.mark.slow)])
    def test_results_equal_those_of_one_process(self, on_pool, locally, random_model, count):
        texts = sentences(count, longest=60)
        found = on_pool(texts, random_model)
        columns = found.results.columns()
        expected = locally(texts, random_model).results.columns()
        np.testing.assert_allclose(columns.pop("score"), expected.pop("score"), atol=1e-5)
        assert {name: columns[name].tolist() for name in expected if name != "score"} == {
            name: column.tolist() for name, column in expected.items()
        }
        assert len(columns["note_index"]) > count
        assert (len(found), found.errors, found.device) == (count, {}, "2 workers (cpu)")

    @pytest.mark.parametrize(
        ("texts", "options"),
        [
            ([], {}),
            (["the patient has asthma"], {"aggregation_strategy": "none", "batch_tokens": 64}),
            ([Text("asthma"), np.str_("no diabetes")], {}),
        ],
        ids=["none", "arguments", "custom texts"],
    )
    def test_options_and_custom_strings_are_supported(self, on_pool, locally, texts, options):
        """A text of a custom class is sent as a built-in string."""
        assert list(on_pool(texts, **options)) == rounded(locally(texts, **options))

    def test_display_and_progress_name_the_workers(self, on_pool):
        events = []
        stop = worker.SESSION.subscribe(events.append)
        found = on_pool(iter(numbered(30, spaces=1)), "bundled_small")
        stop()
        assert "Model: bundled_small, device: 2 workers (cpu)" in str(found)
        assert found.preview_texts == tuple(numbered(30, spaces=1))[: len(found.preview_texts)] != ()
        messages = [str(event) for event in events]
        assert "workers" in messages[0]
        assert messages[-2:] == ["Annotating: bundled_small on 2 workers (cpu) (30 notes)", "None"]

    def test_model_is_loaded_once(self, on_pool, pool):
        for _run in range(2):
            on_pool(numbered(100), "bundled_small")
        names = pool.client.run(lambda: [model.name for model in worker.SESSION.inventory().models])
        assert [models.count("bundled_small") for models in names.values()] == [1, 1]

    def test_relative_folder_is_resolved_in_this_process(self, on_pool, keyword_model, tmp_path, monkeypatch):
        """A folder with the name of a bundled model is ignored."""
        (tmp_path / "notes").symlink_to(keyword_model)
        (tmp_path / "bundled_small").mkdir()
        monkeypatch.chdir(tmp_path)
        for name in ("notes", "./notes", "bundled_small"):
            assert len(on_pool(["asthma"], name)[0]) == 1


class TestStreaming:
    """Texts are read on demand, and results are returned as soon as possible."""

    def test_prefetch_of_endless_stream_is_bounded(self, on_pool, tmp_path):
        """After an error of the stream, the results of all previous texts are returned."""
        text = f"asthma{' ' * 3000}"
        file = tmp_path / "run.jsonl"
        ahead = []

        def endless():
            for number in itertools.count():
                done = max(0, count_lines(file) - 1)
                ahead.append(number - done)
                if done > 200:
                    raise RuntimeError("enough")
                yield f"{text}{number}"

        with pytest.raises(RuntimeError, match="enough") as caught:
            on_pool(endless(), resume=file)
        max_chunk_texts = MIN_CHUNK_TOKENS * CHARACTERS_PER_TOKEN // len(text) + 1
        assert max(ahead) <= max_chunk_texts * (2 * CHUNKS_PER_THREAD + 1)
        assert len(caught.value.annotations) == len(ahead) - 1 > 200

    @pytest.mark.parametrize("order", [("locally", "on_pool"), ("on_pool", "locally")], ids=" then ".join)
    def test_resume(self, request, random_model, tmp_path, order):
        """A run can change between one machine and a cluster, but not to another model."""
        file = tmp_path / "run.jsonl"
        texts = numbered(90)
        start, resume = map(request.getfixturevalue, order)
        start(texts[:40], resume=file)
        first_lines = file.read_bytes()
        with pytest.raises(ConfigurationError, match=r"settings \(.*model"):
            resume(texts, random_model, resume=file)
        assert get_numbers(resume(texts, resume=file)) == [[number] for number in range(90)]
        assert file.read_bytes().startswith(first_lines)
        assert count_lines(file) == 91

    @posix_signals
    def test_interrupt_keeps_results_and_cancels_pending_chunks(self, on_pool, pool, tmp_path, interrupt_when):
        file = tmp_path / "run.jsonl"
        texts = numbered(3000)
        other_futures = set(pool.client.futures)
        message = r"Stopped after \d+ notes\. Repeat the call"
        with pytest.raises(RunInterrupted, match=message) as caught, interrupt_when(lambda: count_lines(file) > 20):
            on_pool(slowly(texts, 0.02), resume=file)
        done = len(caught.value.annotations)
        assert 0 < done < len(texts)
        assert set(pool.client.futures) <= other_futures
        count = done + 50
        assert get_numbers(on_pool(texts[:count], resume=file)) == [[number] for number in range(count)]

    @posix_signals
    def test_interrupt_does_not_cancel_a_call_of_dask(self, pool, interrupt_when):
        started = threading.Event()
        proceed = threading.Event()
        finished = threading.Event()

        async def call():
            started.set()
            while not proceed.is_set():  # noqa: ASYNC110 - an event of threads
                await asyncio.sleep(0.01)
            finished.set()

        with pytest.raises(KeyboardInterrupt), interrupt_when(started.is_set):
            call_scheduler(pool.client, call)
        proceed.set()
        assert finished.wait(timeout=60)


class TestWorker:
    """Models on a worker."""

    @pytest.fixture
    def run_spec(self, keyword_model):
        """Run whose model is unloaded afterwards."""
        yield RunSpec("run", str(keyword_model), {"device": "cpu"}, batch_tokens=256)
        worker.load.cache_clear()
        worker.SESSION.unload(str(keyword_model))

    def test_concurrent_calls_load_the_model_once(self, run_spec):
        """The display of warnings is restored."""
        barrier = threading.Barrier(2)
        showwarning = warnings.showwarning

        def load(_number):
            barrier.wait()
            return worker.get_or_load(run_spec)

        with ThreadPoolExecutor(2) as threads:
            first, second = threads.map(load, range(2))
        assert first is second
        assert warnings.showwarning is showwarning

    def test_warnings_of_workers_are_issued_once_at_the_caller(self, on_pool):
        with pytest.warns(nb.OpenMedWarning, match="'bundled_small' is loaded in bfloat16 on cpu") as caught:
            on_pool(["She has asthma."], "bundled_small", dtype="bfloat16")
        assert [Path(warning.filename).name for warning in caught] == ["conftest.py"]

    def test_late_worker_with_other_versions_raises(self, run_spec):
        expected = worker.get_or_load(run_spec).ready.compatibility_key
        chunk = Chunk(0, ["asthma"])
        assert worker.annotate_chunk(replace(run_spec, expected=expected), chunk)[0][0]["word"] == "asthma"
        with pytest.raises(WorkerMismatchError, match=r"^The worker on .+ has torch .+, but 1\.0 is required\. "):
            worker.annotate_chunk(replace(run_spec, expected={**expected, "torch": "1.0"}), chunk)

    def test_import_of_worker_does_not_import_torch(self):
        """The session sets the MPS variables first."""
        code = "import sys, openmed_nb.distributed.worker; print('torch' in sys.modules)"
        assert run_python("-c", code).stdout == "False\n"


class TestErrors:
    """Errors that name the text or the host."""

    def test_values_that_cannot_be_sent_are_recorded(self, on_pool, locally):
        """The errors are the same as on one machine."""
        lock = threading.Lock()
        invalid = [lock, (text for text in ()), [lock], ["no", lock], 5, None]
        texts = ["asthma", *invalid, "diabetes"]
        found = on_pool(texts, on_error="record")
        expected = locally(texts, on_error="record")
        assert found.errors == expected.errors
        assert list(found.errors) == list(range(1, 6))
        assert found.missing == expected.missing == (6,)
        assert [len(entities) for entities in found] == [1, *[0] * 6, 1]

    @pytest.mark.parametrize(
        ("model", "arguments", "error", "message"),
        [
            ("no_such_model_at_all_x", {}, OpenMedError, r"^On .+: "),
            ("./nowhere/model", {}, UnknownModelError, r"^On .+: .*'./nowhere/model'"),
            (None, {"device": "mps"}, OpenMedError, r"^On .+: 'mps' "),
        ],
    )
    def test_load_errors_name_the_host_before_texts_are_sent(self, on_pool, model, arguments, error, message):
        texts = iter(["asthma"])
        with pytest.raises(error, match=message) as caught:
            on_pool(texts, model, **arguments)
        assert next(texts) == "asthma"
        assert len(caught.value.annotations) == 0

    def test_other_types_are_rejected(self, on_pool, locally, pool, pipe_of, keyword_model):
        for arguments in (
            {"client": "tcp://127.0.0.1:8786"},
            {"client": pool},
            {"client": None, "model": pool.client},
            {"model": pipe_of(keyword_model)},
        ):
            with pytest.raises(ConfigurationError, match=r"client|model must be the name"):
                on_pool(["asthma"], **arguments)
        for annotate in on_pool, locally:
            with pytest.raises(ConfigurationError, match=r"^Delayed"):
                annotate(dask.delayed(["asthma"]))
        with pytest.raises(ConfigurationError, match="bytes"):  # The error is raised before workers load the model.
            on_pool(b"asthma", model="no_such_model")

    @pytest.mark.parametrize(
        ("error", "message"),
        [
            (ConnectionError("gone"), "failed: gone. Check the log of the worker."),
            (
                ModuleNotFoundError("No module", name="openmed_nb"),
                "does not have openmed_nb. Install openmed-nb in the Python of",
            ),
        ],
    )
    def test_other_errors_name_the_host(self, pool, error, message):
        with pytest.raises(ClusterError) as caught:
            call_on_workers(pool.client, fail, error)
        assert str(caught.value).startswith(f"The worker at 127.0.0.1 {message}")


async def fail(error):
    """Raise an error."""
    raise error


@pytest.fixture(scope="module")
def threads_cluster():
    """Cluster in this process, whose worker can be removed immediately."""
    from distributed import Client, LocalCluster

    with LocalCluster(n_workers=1, **THREADS_OPTIONS) as cluster, Client(cluster, set_as_default=False) as client:
        yield SimpleNamespace(cluster=cluster, client=client)


class TestMissingWorkers:
    """A run does not wait endlessly."""

    def test_cluster_of_threads_is_supported(self, threads_cluster, locally):
        assert get_numbers(locally(numbered(50), client=threads_cluster.client)) == [[number] for number in range(50)]

    def test_adaptive_cluster_starts_a_worker(self, locally):
        """The cluster keeps the worker while it loads the model."""
        from distributed import Client, LocalCluster

        with LocalCluster(n_workers=0, **THREADS_OPTIONS) as cluster, Client(cluster) as client:
            cluster.adapt(minimum=0, maximum=1, interval="20 ms", wait_count=1)
            found = locally(numbered(50), client=client)
            assert not client.futures
        assert get_numbers(found) == [[number] for number in range(50)]

    def test_run_ends_without_workers_after_available_results(self, threads_cluster, keyword_model, monkeypatch):
        monkeypatch.setattr(client_module, "WORKER_TIMEOUT", 1)
        client = threads_cluster.client
        cluster = threads_cluster.cluster
        results = []
        annotator = ClusterAnnotator(client, RunSpec("gone", str(keyword_model), {"device": "cpu"}), 20000)

        def texts():
            while not results:
                yield from slowly([f"asthma{' ' * 2000}"])
            cluster.scale(0)
            wait_until(lambda: not client.nthreads())
            yield "asthma"

        with pytest.raises(ClusterUnavailableError, match=r"no running worker for 1 s\."):
            results.extend(itertools.chain.from_iterable(annotator.annotate(texts())))
        assert {len(entities) for entities in results} == {1}
        with pytest.raises(ClusterUnavailableError, match="The cluster does not have a worker"):
            call_on_workers(client, worker.describe_worker)
        cluster.scale(1)
        client.wait_for_workers(1)

    def test_fetch_result_raises_for_a_cancelled_task(self, pool):
        future = pool.client.submit(time.sleep, 1, pure=False)
        future.cancel()
        message = r"cancelled because the cluster was closed or restarted\. Restart the cluster"
        with pytest.raises(ClusterUnavailableError, match=message):
            fetch_result(pool.client, future)

    @pytest.mark.parametrize("closed", ["by the stream", "with its cluster"])
    def test_close_during_run_keeps_results(self, request, on_pool, tmp_path, closed):
        file = tmp_path / "run.jsonl"
        read = []
        if closed == "with its cluster":
            context = nb.cluster(n=1, device="cpu")
        else:
            context = open_client(request.getfixturevalue("pool"))
        with context as closeable:
            client = closeable.client if closed == "with its cluster" else closeable

            def texts():
                yield from yield_until_first_result(file)
                if closed == "by the stream":
                    closeable.close()
                else:
                    threading.Thread(target=closeable.close).start()
                for text in slowly(numbered(5000)):
                    read.append(text)
                    yield text

            with pytest.raises(ClusterUnavailableError, match="Restart the cluster") as caught:
                on_pool(texts(), client=client, resume=file)
        assert len(caught.value.annotations) > 0
        assert len(read) == 1 or closed != "by the stream"
        with pytest.raises(ClusterUnavailableError, match="The client is closed"):
            on_pool(["asthma"], client=client)

    def test_call_scheduler_reports_unreachable_scheduler(self, pool):
        with pytest.raises(ClusterUnavailableError, match="The scheduler of the cluster cannot be reached"):
            call_scheduler(pool.client, lambda: fail(OSError("Timed out trying to connect")))
