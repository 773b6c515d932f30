"""Texts on a cluster: the answers of one computer, in order, read as they are needed; errors and interrupts lose nothing."""

import asyncio
import contextlib
import itertools
import os
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import dask
import numpy as np
import pytest

import openmed_nb as nb
from openmed_nb.annotation.results import ResultStore
from openmed_nb.annotation.stream import CHARACTERS_PER_TOKEN, MIN_CHUNK_TOKENS, Chunk
from openmed_nb.devices.environment import FALLBACK_VARIABLE, HIGH_WATERMARK_VARIABLE, LOW_WATERMARK_VARIABLE
from openmed_nb.distributed import worker
from openmed_nb.distributed.client import call_on_workers, call_scheduler, fetch_result
from openmed_nb.distributed.stream import CHUNKS_PER_THREAD, ClusterAnnotator, stop_after_repeated_kills
from openmed_nb.distributed.worker import RunSpec
from openmed_nb.errors import (
    ClusterError,
    ClusterUnavailableError,
    ConfigurationError,
    InvalidTextError,
    OpenMedError,
    RunInterrupted,
    UnknownModelError,
    WorkerKilledError,
    WorkerMismatchError,
)

pytestmark = [
    pytest.mark.real_computer,  # Workers are processes.
    pytest.mark.usefixtures("quick_workers"),
]
posix_signals = pytest.mark.skipif(sys.platform == "win32", reason="signals are those of POSIX")
SPLIT = {"is_split_into_words": True, "delimiter": " "}
OF_THREADS = {"threads_per_worker": 1, "processes": False, "dashboard_address": "127.0.0.1:0"}


@pytest.fixture
def on_pool(pool, keyword_model):
    """A function that annotates texts on the cluster of the tests."""

    def on_pool(texts, model=keyword_model, **options):
        return nb.annotate(texts, model, **{"client": pool.client, "progress": False, **options})

    return on_pool


@pytest.fixture
def here(keyword_model):
    """A function that annotates texts in this process."""

    def here(texts, model=keyword_model, **options):
        return nb.annotate(texts, model, device="cpu", **{"progress": False, **options})

    return here


@pytest.fixture
def same(on_pool, here, rounded):
    """A function that tells whether the workers and this process give the same answers to texts."""

    def same(texts, *model, **options):
        return list(on_pool(texts, *model, **options)) == rounded(here(texts, *model, **options))

    return same


def test_dropped_spans_come_from_workers(on_pool, here):
    texts = ["the patient has atension", "no asthma", "atension and hypertension"]
    found = on_pool(texts)

    assert [(number, span.start, span.end) for number, (span,) in found.dropped.items()] == [(0, 17, 24), (2, 1, 8)]
    assert found.dropped == here(texts).dropped
    assert [text.text for text in found.mask()] == [
        "the patient has [DISEASE]",
        "no [DISEASE]",
        "[DISEASE] and [DISEASE]",
    ]


class Text(str):
    """A string of a class of its own."""

    __slots__ = ()

    def __reduce__(self):
        """Fail."""
        raise RuntimeError(f"{self} stays here")


class Stubborn:
    """Something that cannot be sent."""

    def __reduce__(self):
        """Fail."""
        raise RuntimeError("it stays here")


def wait_until(condition):
    """Wait until something is so."""
    while not condition():
        time.sleep(0.01)


def slowly(texts, seconds=0.01):
    """Yield texts with a pause before each."""
    for text in texts:
        time.sleep(seconds)
        yield text


def lines_of(file):
    """Return how many lines a file of results has, none where there is no file."""
    return file.read_bytes().count(b"\n") if file.exists() else 0


def until_answered(file):
    """Yield texts until the answer to one of them is in a file of results."""
    while lines_of(file) < 2:
        time.sleep(0.01)
        yield f"asthma{' ' * 2000}"


@contextlib.contextmanager
def another_client(pool):
    """Have another client of a cluster."""
    from distributed import Client

    with Client(pool.client.scheduler.address, security=pool.client.security, set_as_default=False) as client:
        yield client


class TestAnswers:
    """What comes back."""

    @pytest.mark.parametrize("count", [500, pytest.param(5000, marks=pytest.mark.slow)])
    def test_many_texts(self, on_pool, here, random_model, sentences, count):
        """Two workers give the answers of one process, text by text, also where nearly every token is an entity."""
        texts = sentences(count, longest=60)
        found, expected = on_pool(texts, random_model), here(texts, random_model)
        columns, wanted = found.answers.columns(), expected.answers.columns()
        np.testing.assert_allclose(columns.pop("score"), wanted.pop("score"), atol=1e-5)
        for name, column in wanted.items():
            assert columns[name].tolist() == column.tolist()
        assert len(columns["note"]) > count
        assert (len(found), found.errors, found.device) == (count, {}, "2 workers (cpu)")

    @pytest.mark.parametrize(
        "strategy",
        ["none", *(pytest.param(name, marks=pytest.mark.slow) for name in ("simple", "first", "average", "max"))],
    )
    def test_every_strategy(self, same, random_model, sentences, strategy):
        """The arguments of a pipeline are those of the workers' pipelines."""
        assert same(sentences(50), random_model, aggregation_strategy=strategy, batch_tokens=64)

    @pytest.mark.parametrize(
        ("texts", "options"),
        [
            ([], {}),
            ([["no", "asthma"], ["diabetes", "mellitus"]], SPLIT),
            ([Text("asthma"), np.str_("no diabetes")], {}),
            ([[Text("no"), Text("asthma")]], SPLIT),
        ],
        ids=["none", "words", "texts of a class", "words of a class"],
    )
    def test_kinds_of_texts(self, same, texts, options):
        """Words go to workers as texts do, and a text of a class that they do not have as the string that it is."""
        assert same(texts, **options)

    def test_shown(self, on_pool, numbered):
        """What is shown, and told, is that of one computer, with the workers in the place of the device."""
        heard = []
        stop = worker.SESSION.subscribe(heard.append)
        try:
            found = on_pool(iter(numbered(30, spaces=1)), "bundled_small")
        finally:
            stop()
        assert str(found).splitlines()[0] == "30 entities found in 30 texts by bundled_small on 2 workers (cpu)"
        assert found.first_texts == tuple(numbered(30, spaces=1))[: len(found.first_texts)] != ()
        said = [str(one) for one in heard]
        assert said[0] == "Asking: the workers"
        assert said[-2:] == ["Annotating: bundled_small on 2 workers (cpu) (30 texts)", "None"]

    def test_model_is_loaded_once(self, on_pool, pool, numbered):
        """A worker loads a model once, also for another run."""
        for _run in range(2):
            on_pool(numbered(100), "bundled_small")
        names = pool.client.run(lambda: [one.name for one in worker.SESSION.inventory().models])
        assert [one.count("bundled_small") for one in names.values()] == [1, 1]

    def test_folder_from_here(self, on_pool, keyword_model, tmp_path, monkeypatch):
        """A folder is that of this process, whatever folder the workers are in; one that is called like a bundled model is not read."""
        (tmp_path / "notes").symlink_to(keyword_model)
        (tmp_path / "bundled_small").mkdir()
        monkeypatch.chdir(tmp_path)
        for name in ("notes", "./notes", "bundled_small"):
            assert len(on_pool(["asthma"], name)[0]) == 1


class TestStreaming:
    """Texts are read as they are needed, and answers come as they are there."""

    def test_endless_stream(self, on_pool, tmp_path):
        """An endless stream is read a bounded way ahead; the answers to what was read before it fails are kept."""
        text = f"asthma{' ' * 3000}"
        file, ahead = tmp_path / "run.jsonl", []

        def endless():
            for number in itertools.count():
                done = max(0, lines_of(file) - 1)
                ahead.append(number - done)
                if done > 200:
                    raise RuntimeError("enough")
                yield text

        with pytest.raises(RuntimeError, match="enough") as caught:
            on_pool(endless(), resume=file)
        in_a_chunk = MIN_CHUNK_TOKENS * CHARACTERS_PER_TOKEN // len(text) + 1
        assert max(ahead) <= in_a_chunk * (2 * CHUNKS_PER_THREAD + 1)
        assert len(caught.value.annotations) == len(ahead) - 1 > 200

    def test_answers_come_while_texts_are_read(self, on_pool, tmp_path):
        """A stream that lasts until an answer to its texts is there comes to its end."""
        file = tmp_path / "run.jsonl"
        assert len(on_pool(until_answered(file), resume=file)) > 1

    @pytest.mark.parametrize("order", [("here", "on_pool"), ("on_pool", "here")], ids=" then ".join)
    def test_resume(self, request, numbered, numbers_of, random_model, tmp_path, order):  # noqa: PLR0913, PLR0917 - fixtures
        """A run that began on one computer goes on on a cluster, and the other way around; not with another model."""
        file, texts = tmp_path / "run.jsonl", numbered(90)
        begin, go_on = map(request.getfixturevalue, order)
        begin(texts[:40], resume=file)
        begun = file.read_bytes()
        with pytest.raises(ConfigurationError, match=r"is of a run with other settings \(.*model"):
            go_on(texts, random_model, resume=file)
        assert numbers_of(go_on(texts, resume=file)) == [[number] for number in range(90)]
        assert file.read_bytes().startswith(begun)
        assert lines_of(file) == 91

    @posix_signals
    def test_interrupt(self, on_pool, pool, numbered, numbers_of, tmp_path, interrupt_when):  # noqa: PLR0913, PLR0917 - fixtures
        """An interrupt keeps what is done and says how to go on; what was under way is called off, and the workers go on."""
        file, texts, others = tmp_path / "run.jsonl", numbered(3000), set(pool.client.futures)
        message = r"Interrupted after \d+ texts\. To go on, repeat the call"
        with pytest.raises(RunInterrupted, match=message) as caught, interrupt_when(lambda: lines_of(file) > 20):
            on_pool(slowly(texts, 0.02), resume=file)
        done = len(caught.value.annotations)
        assert 0 < done < len(texts)
        assert set(pool.client.futures) <= others
        count = done + 50
        assert numbers_of(on_pool(texts[:count], resume=file)) == [[number] for number in range(count)]

    @posix_signals
    def test_interrupted_call(self, pool, interrupt_when):
        """A call of Dask that is under way runs to its end when this process is interrupted: nothing of it is cut off."""
        begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()

        async def call():
            begun.set()
            while not go_on.is_set():  # noqa: ASYNC110 - of a thread
                await asyncio.sleep(0.01)
            ended.set()

        with pytest.raises(KeyboardInterrupt), interrupt_when(begun.is_set):
            call_scheduler(pool.client, call)
        go_on.set()
        assert ended.wait(timeout=60)

    @posix_signals
    @pytest.mark.parametrize("begun", [False, True], ids=["file", "memory"])
    def test_interrupt_before_the_first_text(self, on_pool, pool, tmp_path, begun, interrupt_when):
        """An interrupt while workers get ready loses nothing of an earlier run, and says how to go on."""
        resume = on_pool(["asthma"]) if begun else tmp_path / "run.jsonl"
        go_on = tmp_path / "go on"

        def hold(number):
            (tmp_path / f"{number}").touch()
            while not go_on.exists():
                time.sleep(0.01)

        def waiting(dask_worker):
            return dask_worker.executors["default"]._work_queue.qsize()

        held = pool.client.map(hold, range(2), pure=False)
        wait_until(lambda: (tmp_path / "0").exists() and (tmp_path / "1").exists())
        with (
            pytest.raises(RunInterrupted, match=r"To go on, .*repeat the call") as caught,
            interrupt_when(lambda: sum(pool.client.run(waiting).values())),
        ):
            on_pool(["asthma", "diabetes"], "bundled_small", resume=resume)
        go_on.touch()
        pool.client.gather(held)
        assert len(caught.value.annotations) == begun
        assert caught.value.file == ("" if begun else str(resume))
        again = caught.value.annotations if begun else resume
        assert len(on_pool(["asthma", "diabetes"], resume=again)) == 2


class TestWorker:
    """What a worker does with its model."""

    @pytest.fixture
    def work(self, keyword_model):
        """A run, of which nothing is left."""
        yield RunSpec("own", str(keyword_model), {"device": "cpu"}, batch_tokens=256)
        worker.load.cache_clear()
        worker.SESSION.unload(str(keyword_model))

    def test_two_threads(self, work):
        """Two threads that ask at once for the model of a run get the same, and how warnings are shown is as before."""
        together, shown = threading.Barrier(2), warnings.showwarning

        def asking(_number):
            together.wait()
            return worker.get_or_load(work)

        with ThreadPoolExecutor(2) as threads:
            first, second = threads.map(asking, range(2))
        assert first is second
        assert warnings.showwarning is shown

    def test_warning(self, on_pool):
        """What workers warn of when they load a model is said once, at the line that asked for the answers."""
        with pytest.warn_if(nb.OpenMedWarning, match="'bundled_small' is used in bfloat16 on cpu") as caught:
            on_pool(["She has asthma."], "bundled_small", dtype="bfloat16")
        assert [one.filename for one in caught] == [__file__]

    def test_late_worker(self, work):
        """A worker that comes later and is not like the others refuses to answer."""
        terms, chunk = worker.get_or_load(work).ready.compatibility_key, Chunk(0, ["asthma"])
        assert worker.annotate_chunk(replace(work, terms=terms), chunk)[0][0]["word"] == "asthma"
        with pytest.raises(
            WorkerMismatchError, match=r"^On .+: The worker on .+ has torch .+, and others have 1\.0\. "
        ):
            worker.annotate_chunk(replace(work, terms={**terms, "torch": "1.0"}), chunk)

    @pytest.mark.slow
    def test_variables_before_torch(self):
        """A worker's session sets the variables of MPS before torch is loaded there, and takes them back where it has none.

        Its computer says that it is a Mac while the session is imported; its torch finds out that it is not.
        """
        from distributed import Client, LocalCluster

        def pretend():
            import importlib
            import importlib.abc
            import os
            import platform
            import sys

            class Watching(importlib.abc.MetaPathFinder):
                def find_spec(self, name, *_where):
                    if name == "torch":
                        platform.observed_values = {
                            name: value for name, value in os.environ.items() if "_MPS_" in name
                        }

            loaded = "torch" in sys.modules
            sys.meta_path.insert(0, Watching())
            for name in [name for name in sys.modules if name.partition(".")[0] == "openmed_nb"]:
                del sys.modules[name]  # Who starts a worker may have imported it there.
            real = platform.system, platform.machine
            platform.system, platform.machine = lambda: "Darwin", lambda: "arm64"
            importlib.import_module("openmed_nb.session")

            platform.system, platform.machine = real
            return loaded or "torch" in sys.modules

        def seen():
            import os
            import platform

            return platform.observed_values, [name for name in os.environ if "_MPS_" in name]

        elsewhere = {name: value for name, value in os.environ.items() if "OPENMED" not in name and "_MPS_" not in name}
        with (
            mock.patch.dict(os.environ, elsewhere, clear=True),
            dask.config.set({"distributed.worker.multiprocessing-method": "spawn"}),
            LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address="127.0.0.1:0") as cluster,
            Client(cluster) as client,
        ):
            assert list(client.run(pretend).values()) == [False]
            (member,) = call_on_workers(client, worker.describe_worker)
            ((at_import, afterwards),) = client.run(seen).values()
        assert at_import == {FALLBACK_VARIABLE: "1", HIGH_WATERMARK_VARIABLE: "1.0", LOW_WATERMARK_VARIABLE: "0.9"}
        assert member.device == "cpu"
        assert afterwards == []


NO_CLIENT = r"^client must be a client of Dask, not"
REFUSED = {
    "no client": ({"client": "tcp://127.0.0.1:8786"}, rf"{NO_CLIENT} str\. Pass a dask"),
    "argument": ({"stride": threading.Lock()}, r"^stride cannot go to workers as lock\. "),
    "argument in its own way": ({"stride": Stubborn()}, r"^stride cannot go to workers as Stubborn\. "),
}


class TestErrors:
    """What cannot be done is said in one sentence that names the text or the host."""

    def test_unreadable_texts(self, on_pool, numbered):
        """A text that cannot be read has its number, wherever its chunk was read."""
        texts = numbered(100)
        texts[77] = 5
        found = on_pool(texts, on_error="record")
        assert found.errors == {77: "Text 77 must be a string, not int. Pass a string, '' where there is no text."}
        assert [len(one) for one in found] == [1] * 77 + [0] + [1] * 22
        with pytest.raises(InvalidTextError, match="Text 77 must be a string") as caught:
            on_pool(texts)
        assert len(caught.value.annotations) == 77

    @pytest.mark.parametrize("split", [{}, SPLIT], ids=["texts", "words"])
    def test_what_cannot_travel(self, on_pool, here, split):
        """What is no text and cannot be sent is recorded, with the words of one computer, like any other."""
        lock, stubborn = threading.Lock(), Stubborn()
        odd = [lock, (one for one in ()), lambda: 1, stubborn, [lock], ["no", stubborn], 5, None]
        texts = [["asthma"] if split else "asthma", *odd, ["diabetes"] if split else "diabetes"]
        found, expected = on_pool(texts, on_error="record", **split), here(texts, on_error="record", **split)
        assert found.errors == expected.errors
        assert list(found.errors) == list(range(1, 8))
        assert found.missing == expected.missing == (8,)
        assert [len(one) for one in found] == [1, *[0] * 8, 1]

    @pytest.mark.parametrize(
        ("model", "arguments", "error", "message"),
        [
            ("no_such_model_at_all_x", {}, OpenMedError, r"^On .+: "),
            ("./nowhere/model", {}, UnknownModelError, r"^On .+: There is no model named './nowhere/model'"),
            ("", {}, UnknownModelError, r"^On .+: There is no model named ''"),
            ("~", {}, OpenMedError, r"^On .+: "),
            ("x" * 5000, {}, UnknownModelError, r"^On .+: There is no model named a string of 5,000 characters"),
            (None, {"bogus": 1}, ConfigurationError, r"^On .+: The pipeline does not take these options"),
            (None, {"device": "mps"}, OpenMedError, r"^On .+: 'mps' \(asked for by argument\) cannot be used"),
        ],
    )
    def test_workers_that_cannot(self, on_pool, model, arguments, error, message):
        """What a worker cannot load names its computer, before any text goes out."""
        texts = iter(["asthma"])
        with pytest.raises(error, match=message) as caught:
            on_pool(texts, model, **arguments)
        assert next(texts) == "asthma"
        assert len(caught.value.annotations) == 0

    @pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED)
    def test_refused_arguments(self, on_pool, arguments, message):
        """What is no client, and an argument that cannot be sent, are named before anything is sent."""
        with pytest.raises(ConfigurationError, match=message):
            on_pool(["asthma"], **arguments)

    def test_one_thing_in_the_place_of_another(self, on_pool, here, pool, threads_cluster, pipe_of, keyword_model):  # noqa: PLR0913, PLR0917
        """A cluster for its client, a client for a model and a pipeline for its name are refused, with what to pass."""
        swapped = {
            rf"{NO_CLIENT} Cluster\. Pass its client: client=cluster\.client": {"client": pool},
            rf"{NO_CLIENT} LocalCluster\. .*Client\(cluster\)": {"client": threads_cluster.cluster},
            r"^model cannot be of type Client\. .* cluster is client=": {"client": None, "model": pool.client},
            r"^model must be a name .*, not AnnotationPipeline\. Pass the name": {"model": pipe_of(keyword_model)},
        }
        for message, arguments in swapped.items():
            with pytest.raises(ConfigurationError, match=message):
                on_pool(["asthma"], **arguments)
        for annotated in on_pool, here:
            with pytest.raises(ConfigurationError, match=r"^Delayed.* is not a series of texts\. "):
                annotated(dask.delayed(["asthma"]))
        with pytest.raises(ConfigurationError, match="is not a series of texts"):  # Workers load no model before.
            on_pool(b"asthma", model="no_such_model")

    @pytest.mark.parametrize(
        ("error", "message"),
        [
            (ConnectionError("gone"), "failed: gone. Look at its log."),
            (ModuleNotFoundError("No module", name="torch"), "failed: No module. Look at its log."),
            (
                ModuleNotFoundError("No module", name="openmed_nb"),
                "has no openmed_nb. Install openmed-nb in the Python that",
            ),
        ],
    )
    def test_failing_worker(self, pool, error, message):
        """Any other error of a worker is told with its computer, and what a worker lacks."""
        with pytest.raises(ClusterError) as caught:
            call_on_workers(pool.client, fail, error)
        assert str(caught.value).startswith(f"The worker at 127.0.0.1 {message}")


async def fail(error):
    """Fail."""
    raise error


@pytest.fixture(scope="module")
def threads_cluster():
    """A cluster in this process, whose worker can be taken away at once."""
    from distributed import Client, LocalCluster

    with LocalCluster(n_workers=1, **OF_THREADS) as cluster, Client(cluster, set_as_default=False) as client:
        yield SimpleNamespace(cluster=cluster, client=client)


class TestNoWorkers:
    """A run does not wait for ever."""

    def test_worker_in_this_process(self, threads_cluster, here, numbered, numbers_of):
        """A cluster of threads answers too."""
        found = here(numbered(50), client=threads_cluster.client)
        assert numbers_of(found) == [[number] for number in range(50)]

    def test_cluster_that_adapts(self, here, numbered, numbers_of):
        """A cluster that has no worker until there is work starts one, and keeps it while it loads the model."""
        from distributed import Client, LocalCluster

        with LocalCluster(n_workers=0, **OF_THREADS) as cluster, Client(cluster) as client:
            cluster.adapt(minimum=0, maximum=1, interval="20 ms", wait_count=1)
            found = here(numbered(50), client=client)
            assert not client.futures
        assert numbers_of(found) == [[number] for number in range(50)]

    def test_all_workers_gone(self, threads_cluster, keyword_model):
        """Where no worker is left and none comes, the run ends after the answers that were there."""
        client, cluster, answers = threads_cluster.client, threads_cluster.cluster, []
        annotator = ClusterAnnotator(client, RunSpec("gone", str(keyword_model), {"device": "cpu"}), 20000, timeout=1)

        def texts():
            while not answers:
                yield from slowly([f"asthma{' ' * 2000}"])
            cluster.scale(0)
            wait_until(lambda: not client.nthreads())
            yield "asthma"

        with pytest.raises(ClusterUnavailableError, match=r"No worker of the cluster has worked for 1 s\."):
            answers.extend(itertools.chain.from_iterable(annotator.annotate(texts())))
        assert {len(one) for one in answers} == {1}
        with pytest.raises(ClusterUnavailableError, match="The cluster has no worker"):
            call_on_workers(client, worker.describe_worker, patience=0.1)
        cluster.scale(1)
        client.wait_for_workers(1)

    def test_called_off(self, pool):
        """A task that was called off is no task to wait for."""
        future = pool.client.submit(time.sleep, 1, pure=False)
        future.cancel()
        message = r"called off: it was closed or started again\. Start the cluster again"
        with pytest.raises(ClusterUnavailableError, match=message):
            fetch_result(pool.client, future, patience=1)

    @pytest.mark.parametrize("closed", ["by the stream", "by another thread", "with its cluster"])
    def test_closed_in_mid_run(self, request, on_pool, numbered, tmp_path, closed):
        """A client or a cluster that is closed ends the run with what was done, in words of ours, and begins no other."""
        own = closed == "with its cluster"
        with nb.cluster(n=1, device="cpu", threads=1) if own else another_client(request.getfixturevalue("pool")) as it:
            client, file, read = it.client if own else it, tmp_path / "run.jsonl", []

            def texts():
                yield from until_answered(file)
                if closed == "by the stream":
                    it.close()
                else:
                    threading.Thread(target=it.close).start()
                for text in slowly(numbered(5000)):
                    read.append(text)
                    yield text

            with pytest.raises(ClusterUnavailableError, match="Start the cluster again") as caught:
                on_pool(texts(), client=client, resume=file)
        assert len(caught.value.annotations) > 0
        assert len(read) == 1 or closed != "by the stream"
        with pytest.raises(ClusterUnavailableError, match="The client is closed"):
            on_pool(["asthma"], client=client)

    def test_scheduler_that_is_gone(self, pool):
        """Where the scheduler cannot be reached, that is told."""
        with pytest.raises(ClusterUnavailableError, match="The scheduler of the cluster cannot be reached"):
            call_scheduler(pool.client, lambda: fail(OSError("Timed out trying to connect")))


KILLED = WorkerKilledError("Text 1 ended the worker that read it 3 times.", "Read it alone.")
OTHER = InvalidTextError("Text 2 must be a string.", "Pass a string.")


@pytest.mark.parametrize(
    ("answers", "hopeless"),
    [
        ([[KILLED]] * 4, False),
        ([[KILLED]] * 5, True),
        ([[KILLED] * 5], True),
        ([*[[KILLED]] * 4, [[]], [KILLED]], False),
        ([*[[KILLED]] * 3, [KILLED, []], *[[KILLED]] * 4], False),
        ([*[[KILLED]] * 4, [OTHER], [KILLED]], True),
        ([[OTHER]] * 5, False),
        ([], False),
    ],
)
def test_workers_that_end_whatever_they_read(answers, hopeless):
    """Five texts in a row that end their workers alone end the run, after their answers; any answer between counts."""
    given = []
    expected = (
        pytest.raises(ClusterUnavailableError, match="5 texts in a row ended") if hopeless else contextlib.nullcontext()
    )
    with expected:
        for some in stop_after_repeated_kills(ResultStore.of(one) for one in [*answers, [[]]]):
            given.append(list(some.outcomes()))  # noqa: PERF401 - what came before the error counts
    assert given == (answers if hopeless else [*answers, [[]]])
