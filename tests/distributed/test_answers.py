"""Texts on a cluster: the answers of one computer, in order, read as they are needed; errors and interrupts lose nothing."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
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
from openmed_nb.annotation.stream import CHARACTERS_PER_TOKEN, CHUNK_TOKENS, Chunk
from openmed_nb.devices.environment import FALLBACK, HIGH, LOW
from openmed_nb.distributed import worker
from openmed_nb.distributed.client import ask_all, asked, computed
from openmed_nb.distributed.stream import AHEAD, ClusterAnnotator, while_workers_last
from openmed_nb.distributed.worker import Work
from openmed_nb.errors import (
    ClusterError,
    ClusterUnusable,
    ConfigurationError,
    Interrupted,
    OpenMedError,
    UnknownModel,
    UnreadableText,
    WorkerKilled,
    WorkersDiffer,
)

pytestmark = [
    pytest.mark.real_computer,  # Workers are processes.
    pytest.mark.usefixtures("quick_workers"),
]
posix_signals = pytest.mark.skipif(sys.platform == "win32", reason="signals are those of POSIX")


@pytest.fixture
def on_pool(pool, keyword_model):
    """A function that annotates texts on the cluster of the tests."""

    def on_pool(texts, model=keyword_model, **options):
        return nb.annotate(texts, model, client=pool.client, **{"progress": False, **options})

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


class TestAnswers:
    """What comes back."""

    @pytest.mark.parametrize("count", [500, pytest.param(5000, marks=pytest.mark.slow)])
    def test_many_texts(self, on_pool, here, random_model, sentences, count):
        """Two workers give the answers of one process, text by text, also where nearly every token is an entity."""
        texts = sentences(count, longest=60)
        found, expected = on_pool(texts, random_model), here(texts, random_model)
        columns, wanted = found.answers.columns(), expected.answers.columns()
        np.testing.assert_allclose(columns.pop("score"), wanted.pop("score"), atol=1e-5)
        assert {name: column.tolist() for name, column in columns.items()} == {
            name: column.tolist() for name, column in wanted.items()
        }
        assert len(columns["text"]) > count
        assert (len(found), found.errors, found.device) == (count, {}, "2 workers (cpu)")

    @pytest.mark.parametrize(
        "strategy",
        ["none", *(pytest.param(name, marks=pytest.mark.slow) for name in ("simple", "first", "average", "max"))],
    )
    def test_every_strategy(self, same, random_model, sentences, strategy):
        """The arguments of a pipeline are those of the workers' pipelines."""
        assert same(sentences(50), random_model, aggregation_strategy=strategy, batch_tokens=64)

    def test_words(self, same):
        """Texts that are split into words go to workers as well."""
        assert same([["no", "asthma"], ["diabetes", "mellitus"]], is_split_into_words=True, delimiter=" ")

    def test_texts_of_a_class(self, same):
        """A text of a class that workers do not have is read as the string that it is, and words as well."""
        assert same([Text("asthma"), np.str_("no diabetes")])
        assert same([[Text("no"), Text("asthma")]], is_split_into_words=True, delimiter=" ")

    def test_no_text(self, on_pool):
        """No text has no answer."""
        assert list(on_pool([])) == []

    def test_shown(self, on_pool, numbered):
        """The first texts are shown with their entities, and the workers in the place of the device."""
        found = on_pool(numbered(2, spaces=1), "bundled_small")
        assert str(found).splitlines()[0] == "2 entities found in 2 texts by bundled_small on 2 workers (cpu)"
        assert found.first_texts == tuple(numbered(2, spaces=1))

    def test_model_is_loaded_once(self, on_pool, pool, numbered):
        """A worker loads a model once, also for another run."""
        for _run in range(2):
            on_pool(numbered(100), "bundled_small")
        names = pool.client.run(lambda: [one.name for one in worker.SESSION.inventory().models])
        assert [one.count("bundled_small") for one in names.values()] == [1, 1]

    def test_bar(self, on_pool, numbered, capsys, bar_clock):
        """The progress bar is that of one computer, and names the workers."""

        def texts():
            for text in numbered(30):
                bar_clock.now += 1
                yield text

        on_pool(texts(), progress=True)
        assert "annotating on 2 workers (cpu): 30 texts" in capsys.readouterr().err


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


@contextlib.contextmanager
def another_client(pool):
    """Have another client of a cluster."""
    from distributed import Client

    with Client(pool.client.scheduler.address, security=pool.client.security, set_as_default=False) as client:
        yield client


def slowly(texts, seconds):
    """Yield texts with a pause before each."""
    for text in texts:
        time.sleep(seconds)
        yield text


class TestStreaming:
    """Texts are read as they are needed, and answers come as they are there."""

    def test_endless_stream(self, on_pool, tmp_path):
        """An endless stream is read a bounded way ahead; the answers to what was read before it fails are kept."""
        text = f"asthma{' ' * 3000}"
        file, ahead = tmp_path / "run.jsonl", []

        def endless():
            for number in itertools.count():
                done = max(0, file.read_bytes().count(b"\n") - 1)
                ahead.append(number - done)
                if done > 200:
                    raise RuntimeError("enough")
                yield text

        with pytest.raises(RuntimeError, match="enough") as caught:
            on_pool(endless(), resume=file)
        in_a_chunk = CHUNK_TOKENS * CHARACTERS_PER_TOKEN // len(text) + 1
        assert max(ahead) <= in_a_chunk * (2 * AHEAD + 1)
        assert len(caught.value.annotations) == len(ahead) - 1 > 200

    def test_answers_come_while_texts_are_read(self, on_pool, tmp_path):
        """A stream that lasts until an answer to its texts is there comes to its end."""
        file = tmp_path / "run.jsonl"

        def texts():
            while file.read_bytes().count(b"\n") < 2:
                time.sleep(0.03)
                yield f"asthma{' ' * 3000}"

        assert len(on_pool(texts(), resume=file)) > 1

    @pytest.mark.parametrize("order", [("here", "on_pool"), ("on_pool", "here")], ids=" then ".join)
    def test_resume(self, request, numbered, numbers_of, tmp_path, order):
        """A run that began on one computer goes on on a cluster, and the other way around."""
        file, texts = tmp_path / "run.jsonl", numbered(90)
        begin, go_on = map(request.getfixturevalue, order)
        begin(texts[:40], resume=file)
        begun = file.read_bytes()
        found = go_on(texts, resume=file)
        assert numbers_of(found) == [[number] for number in range(90)]
        assert file.read_bytes().startswith(begun)
        assert len(file.read_bytes().splitlines()) == 91

    def test_other_model(self, on_pool, random_model, tmp_path):
        """The results of another model are no beginning of a run."""
        on_pool(["asthma"], resume=tmp_path / "run.jsonl")
        with pytest.raises(ConfigurationError, match=r"is of a run with other settings \(.*model"):
            on_pool(["asthma"], random_model, resume=tmp_path / "run.jsonl")

    @posix_signals
    @pytest.mark.usefixtures("interruptible")
    def test_interrupt(self, on_pool, pool, numbered, numbers_of, tmp_path):
        """An interrupt keeps what is done and says how to go on; what was under way is called off, and the workers go on."""
        file, texts, others = tmp_path / "run.jsonl", numbered(3000), set(pool.client.futures)

        def interrupt():
            wait_until(lambda: file.exists() and file.read_bytes().count(b"\n") > 20)
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=interrupt, daemon=True)
        thread.start()
        with pytest.raises(Interrupted, match=r"Interrupted after \d+ texts\. To go on, repeat the call") as caught:
            on_pool(slowly(texts, 0.02), resume=file)
        thread.join()
        done = len(caught.value.annotations)
        assert 0 < done < len(texts)
        assert set(pool.client.futures) <= others
        count = done + 50
        assert numbers_of(on_pool(texts[:count], resume=file)) == [[number] for number in range(count)]

    @posix_signals
    @pytest.mark.usefixtures("interruptible")
    def test_interrupted_call(self, pool):
        """A call of Dask that is under way runs to its end when this process is interrupted: nothing of it is cut off."""
        begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()

        async def call():
            begun.set()
            while not go_on.is_set():  # noqa: ASYNC110 - of a thread
                await asyncio.sleep(0.01)
            ended.set()

        thread = threading.Thread(target=lambda: begun.wait() and os.kill(os.getpid(), signal.SIGINT))
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            asked(pool.client, call)
        thread.join()
        go_on.set()
        assert ended.wait(timeout=60)

    @posix_signals
    @pytest.mark.usefixtures("interruptible")
    @pytest.mark.parametrize("begun", [False, True], ids=["file", "memory"])
    def test_interrupt_before_the_first_text(self, on_pool, pool, tmp_path, begun):
        """An interrupt while workers get ready loses nothing of an earlier run, and says how to go on."""
        resume = on_pool(["asthma"]) if begun else tmp_path / "run.jsonl"
        go_on = tmp_path / "go on"

        def hold(number):
            (tmp_path / f"{number}").touch()
            while not go_on.exists():
                time.sleep(0.01)

        def waiting(dask_worker):
            return dask_worker.executors["default"]._work_queue.qsize()

        def interrupt():
            wait_until(lambda: sum(pool.client.run(waiting).values()))
            os.kill(os.getpid(), signal.SIGINT)

        held = pool.client.map(hold, range(2), pure=False)
        wait_until(lambda: (tmp_path / "0").exists() and (tmp_path / "1").exists())
        thread = threading.Thread(target=interrupt, daemon=True)
        thread.start()
        with pytest.raises(Interrupted, match=r"To go on, .*repeat the call") as caught:
            on_pool(["asthma", "diabetes"], "bundled_small", resume=resume)
        thread.join()
        go_on.touch()
        pool.client.gather(held)
        assert len(caught.value.annotations) == begun
        assert caught.value.file == ("" if begun else str(resume))
        again = caught.value.annotations if begun else resume
        assert len(on_pool(["asthma", "diabetes"], resume=again)) == 2

    def test_late_worker(self, keyword_model):
        """A worker that comes later and is not like the others refuses to answer."""
        work = Work("late", str(keyword_model), {"device": "cpu"})
        terms = worker.prepared(work).ready.terms
        assert worker.answers_of(replace(work, terms=terms), Chunk(0, ["asthma"]))[0][0]["word"] == "asthma"
        with pytest.raises(WorkersDiffer, match=r"^On .+: The worker on .+ has torch .+, and others have 1\.0\. "):
            worker.answers_of(replace(work, terms={**terms, "torch": "1.0"}), Chunk(0, ["asthma"]))
        worker.load.cache_clear()


class TestWorker:
    """What a worker does with its model."""

    @pytest.fixture
    def work(self, keyword_model):
        """A run, of which nothing is left."""
        yield Work("own", str(keyword_model), {"device": "cpu"}, batch_tokens=256)
        worker.load.cache_clear()
        worker.SESSION.unload(str(keyword_model))

    def test_two_threads(self, work):
        """Two threads that ask at once for the model of a run get the same, and how warnings are shown is as before."""
        together, shown = threading.Barrier(2), warnings.showwarning

        def asking():
            together.wait()
            return worker.prepared(work)

        with ThreadPoolExecutor(2) as threads:
            first, second = [one.result() for one in [threads.submit(asking), threads.submit(asking)]]
        assert first is second
        assert warnings.showwarning is shown

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
                        platform.seen = {name: value for name, value in os.environ.items() if "_MPS_" in name}

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

            return platform.seen, [name for name in os.environ if "_MPS_" in name]

        elsewhere = {name: value for name, value in os.environ.items() if "OPENMED" not in name and "_MPS_" not in name}
        with (
            mock.patch.dict(os.environ, elsewhere, clear=True),
            dask.config.set({"distributed.worker.multiprocessing-method": "spawn"}),
            LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address="127.0.0.1:0") as cluster,
            Client(cluster) as client,
        ):
            assert list(client.run(pretend).values()) == [False]
            (member,) = ask_all(client, worker.introduce)
            ((at_import, afterwards),) = client.run(seen).values()
        assert at_import == {FALLBACK: "1", HIGH: "1.0", LOW: "0.9"}
        assert member.device == "cpu"
        assert afterwards == []


class TestErrors:
    """What cannot be done is said in one sentence that names the text or the host."""

    def test_unreadable_texts(self, on_pool, numbered):
        """A text that cannot be read has its number, wherever its chunk was read."""
        texts = numbered(100)
        texts[77] = None
        found = on_pool(texts, on_error="record")
        assert found.errors == {77: "Text 77 must be a string, not NoneType. Pass a string, '' where there is no text."}
        assert [len(one) for one in found] == [1] * 77 + [0] + [1] * 22
        with pytest.raises(UnreadableText, match="Text 77 must be a string") as caught:
            on_pool(texts)
        assert len(caught.value.annotations) == 77

    @pytest.mark.parametrize(
        ("model", "arguments", "error", "message"),
        [
            ("no_such_model_at_all_x", {}, OpenMedError, r"^On .+: "),
            ("./nowhere/model", {}, UnknownModel, r"^On .+: There is no model named './nowhere/model'"),
            ("", {}, UnknownModel, r"^On .+: There is no model named ''"),
            ("x" * 5000, {}, UnknownModel, r"^On .+: There is no model named 'xxx"),
            (None, {"bogus": 1}, ConfigurationError, r"^On .+: The pipeline does not take these options"),
            (None, {"device": "mps"}, OpenMedError, r"^On .+: 'mps' \(asked for by argument\) cannot be used"),
            (None, {"batch_tokens": 0}, ConfigurationError, r"^On .+: batch_tokens cannot be 0\."),
        ],
    )
    def test_workers_that_cannot(self, on_pool, model, arguments, error, message):
        """What a worker cannot load names its computer, before any text goes out."""
        texts = iter(["asthma"])
        with pytest.raises(error, match=message):
            on_pool(texts, model, **arguments)
        assert next(texts) == "asthma"

    def test_pipeline(self, on_pool, pipe_of, keyword_model):
        """A pipeline is in the memory of one process; its model has to be named."""
        with pytest.raises(
            ConfigurationError, match=r"AnnotationPipeline is no name of a model, and what is in the memory of"
        ):
            on_pool(["asthma"], pipe_of(keyword_model))

    def test_no_client(self):
        """What is no client is refused."""
        with pytest.raises(ConfigurationError, match=r"str is no client of a cluster\. Pass a dask"):
            nb.annotate(["asthma"], client="tcp://127.0.0.1:8786")

    def test_cluster_in_the_place_of_its_client(self, pool):
        """A cluster that is passed as client is refused with what to pass, one of Dask as well."""
        from distributed import LocalCluster

        with pytest.raises(
            ConfigurationError, match=r"^Cluster is no client .* Pass its client: client=cluster\.client"
        ):
            nb.annotate(["asthma"], client=pool)
        with (
            LocalCluster(n_workers=0, processes=False, dashboard_address="127.0.0.1:0") as cluster,
            pytest.raises(ConfigurationError, match=r"^LocalCluster is no client .*Client\(cluster\)"),
        ):
            nb.annotate(["asthma"], client=cluster)

    def test_client_in_the_place_of_a_model(self, pool):
        """A client that is passed without its name is refused with the argument that is meant for it."""
        with pytest.raises(ConfigurationError, match=r"^Client is no model .* a client of a cluster is client="):
            nb.annotate(["asthma"], pool.client)

    def test_closed_client(self, pool):
        """A client that was closed is refused."""
        with another_client(pool) as client:
            pass
        with pytest.raises(ClusterUnusable, match="The client is closed"):
            nb.annotate(["asthma"], client=client)

    @pytest.mark.parametrize("split", [{}, {"is_split_into_words": True, "delimiter": " "}], ids=["texts", "words"])
    def test_what_cannot_travel(self, on_pool, here, split):
        """What is no text and cannot be sent is recorded, with the words of one computer, like any other."""
        odd = [
            threading.Lock(),
            (one for one in ()),
            lambda: 1,
            Stubborn(),
            [threading.Lock()],
            ["no", Stubborn()],
            None,
        ]
        texts = [["asthma"] if split else "asthma", *odd, ["diabetes"] if split else "diabetes"]
        found, expected = on_pool(texts, on_error="record", **split), here(texts, on_error="record", **split)
        assert found.errors == expected.errors
        assert list(found.errors) == list(range(1, 8))
        assert [len(one) for one in found] == [1, *[0] * 7, 1]

    @pytest.mark.parametrize("value", [threading.Lock(), Stubborn()], ids=["lock", "its own way"])
    def test_argument_that_cannot_travel(self, on_pool, value):
        """An argument that cannot be sent is named, before anything is sent."""
        with pytest.raises(ConfigurationError, match=rf"^stride cannot go to workers as {type(value).__name__}\. "):
            on_pool(["asthma"], stride=value)

    @pytest.mark.parametrize("place", ["on_pool", "here"])
    def test_what_is_computed_later(self, request, place):
        """What Dask computes later is not a series of texts."""
        with pytest.raises(ConfigurationError, match=r"^Delayed.* is not a series of texts\. "):
            request.getfixturevalue(place)(dask.delayed(["asthma"]))

    def test_folder_from_here(self, on_pool, keyword_model, tmp_path, monkeypatch):
        """A folder is that of this process, whatever folder the workers are in; one that is called like a bundled model is not read."""
        (tmp_path / "notes").symlink_to(keyword_model)
        (tmp_path / "bundled_small").mkdir()
        monkeypatch.chdir(tmp_path)
        for name in ("notes", "./notes", "bundled_small"):
            assert len(on_pool(["asthma"], name)[0]) == 1

    def test_path_of_no_model(self, on_pool, tmp_path):
        """The path of a folder without a model is told as one."""
        with pytest.raises(OpenMedError, match=r"^On .+ holds no model") as caught:
            on_pool(["asthma"], tmp_path)
        assert len(caught.value.annotations) == 0

    def test_failing_worker(self, pool):
        """Any other error of a worker is told with its computer."""
        with pytest.raises(ClusterError, match=r"^The worker at 127\.0\.0\.1 failed: division by zero\."):
            ask_all(pool.client, divide)


async def divide():
    """Fail."""
    return 1 / 0


@pytest.fixture(scope="module")
def threads_cluster():
    """A cluster in this process, whose worker can be taken away at once."""
    from distributed import Client, LocalCluster

    with (
        LocalCluster(n_workers=1, threads_per_worker=1, processes=False, dashboard_address="127.0.0.1:0") as cluster,
        Client(cluster) as client,
    ):
        yield SimpleNamespace(cluster=cluster, client=client)


@pytest.fixture
def shrinking(threads_cluster):
    """The same cluster; afterwards its worker is there again."""
    yield threads_cluster
    threads_cluster.cluster.scale(1)
    threads_cluster.client.wait_for_workers(1)


class TestNoWorkers:
    """A run does not wait for ever."""

    def test_worker_in_this_process(self, threads_cluster, keyword_model, numbered, numbers_of):
        """A cluster of threads answers too."""
        found = nb.annotate(numbered(50), keyword_model, client=threads_cluster.client, device="cpu", progress=False)
        assert numbers_of(found) == [[number] for number in range(50)]

    def test_cluster_that_adapts(self, keyword_model, numbered, numbers_of):
        """A cluster that has no worker until there is work starts one, and keeps it while it loads the model."""
        from distributed import Client, LocalCluster

        with (
            LocalCluster(
                n_workers=0, threads_per_worker=1, processes=False, dashboard_address="127.0.0.1:0"
            ) as cluster,
            Client(cluster) as client,
        ):
            cluster.adapt(minimum=0, maximum=1, interval="20 ms", wait_count=1)
            found = nb.annotate(numbered(50), keyword_model, client=client, device="cpu", progress=False)
            assert not client.futures
        assert numbers_of(found) == [[number] for number in range(50)]

    def test_all_workers_gone(self, shrinking, keyword_model, numbered):
        """Where no worker is left and none comes, the run ends with what was done."""
        client = shrinking.client
        work = Work("gone", str(keyword_model), {"device": "cpu"})
        annotator = ClusterAnnotator(client, work, worker.answers_of, 20000, patience=1)

        def texts():
            yield from slowly(numbered(50), 0.01)
            shrinking.cluster.scale(0)
            wait_until(lambda: not client.nthreads())
            yield from numbered(5)

        answers = []
        with pytest.raises(ClusterUnusable, match=r"No worker of the cluster has worked for 1 s\."):
            answers.extend(itertools.chain.from_iterable(annotator.answers(texts())))
        assert 0 < len(answers) <= 50
        with pytest.raises(ClusterUnusable, match="The cluster has no worker"):
            ask_all(client, worker.introduce, patience=0.1)

    def test_called_off(self, pool):
        """A task that was called off is no task to wait for."""
        future = pool.client.submit(time.sleep, 1, pure=False)
        future.cancel()
        with pytest.raises(
            ClusterUnusable, match=r"called off: it was closed or started again\. Start the cluster again"
        ):
            computed(pool.client, future, patience=1)

    @pytest.mark.parametrize("closed", ["by the stream", "by another thread", "with its cluster"])
    def test_closed_in_mid_run(self, request, keyword_model, numbered, closed):
        """A client or a cluster that is closed in the middle of a run ends it with what was done, in words of ours."""
        own = closed == "with its cluster"
        with nb.cluster(n=1, device="cpu", threads=1) if own else another_client(request.getfixturevalue("pool")) as it:
            client, read = it.client if own else it, []

            def texts():
                yield from slowly(numbered(50), 0.01)
                if closed == "by the stream":
                    it.close()
                else:
                    threading.Thread(target=it.close).start()
                for text in slowly(numbered(5000), 0.01):
                    read.append(text)
                    yield text

            with pytest.raises(ClusterUnusable, match="Start the cluster again") as caught:
                nb.annotate(texts(), keyword_model, client=client, progress=False)
        assert 0 < len(caught.value.annotations) < 5000
        assert len(read) == 1 or closed != "by the stream"
        with pytest.raises(ClusterUnusable, match="The client is closed"):
            nb.annotate(["asthma"], keyword_model, client=client)

    def test_scheduler_that_is_gone(self, threads_cluster):
        """Where the scheduler cannot be reached, that is told."""

        async def fail():
            raise OSError("Timed out trying to connect")

        with pytest.raises(ClusterUnusable, match="The scheduler of the cluster cannot be reached"):
            asked(threads_cluster.client, fail)


KILLED = WorkerKilled("Text 1 ended the worker that read it 3 times.", "Read it alone.")
OTHER = UnreadableText("Text 2 must be a string.", "Pass a string.")


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
    expected = pytest.raises(ClusterUnusable, match="5 texts in a row ended") if hopeless else contextlib.nullcontext()
    with expected:
        for some in while_workers_last(one for one in [*answers, [[]]]):
            given.append(some)  # noqa: PERF402 - what came before the error counts
    assert given == (answers if hopeless else [*answers, [[]]])
