"""Startup of workers on this machine, and shutdown without remaining processes."""

import contextlib
import copy
import logging
import os
import subprocess
import sys
import textwrap
import threading
import warnings

import dask.config
import psutil
import pytest

import openmed_nb as nb
from openmed_nb.distributed.members import WorkerSpec, plan_workers, visible_gpu_ids
from openmed_nb.distributed.starting import (
    DASK_VARIABLES,
    MAIN_GUARD,
    START_LOCK,
    BackgroundContext,
    create_certificates,
    local_cluster,
    start_cluster,
)
from openmed_nb.errors import ClusterUnavailableError, ConfigurationError, OpenMedWarning

PLANS = {
    "CPU": (("cpu", None, (), 8), [WorkerSpec("cpu")]),
    "two on a CPU": (("cpu", 2, (), 8), [WorkerSpec("cpu", threads=4)] * 2),
    "as many as cores": (("cpu", 3, (), 3), [WorkerSpec("cpu", threads=1)] * 3),
    "two on a core": (("cpu", 2, (), 1), [WorkerSpec("cpu", threads=1)] * 2),
    "threads of a CPU": (("cpu", 1, (), 8, 1), [WorkerSpec("cpu", threads=1)]),
    "MPS": (("mps", None, (), 8), [WorkerSpec("mps")]),
    "one on MPS": (("mps", 1, (), 8), [WorkerSpec("mps")]),
    "GPUs": (("cuda", None, ("0", "1"), 8), [WorkerSpec("cuda", "0"), WorkerSpec("cuda", "1")]),
    "some GPUs": (("cuda", 1, ("2", "3"), 8), [WorkerSpec("cuda", "2")]),
    "one GPU by its number": (("cuda:1", None, ("2", "3"), 8), [WorkerSpec("cuda", "3")]),
}
IMPOSSIBLE_PLANS = {
    "two on MPS": (("mps", 2, (), 8), "n=2 is not possible with one MPS device, which several processes"),
    "too many GPUs": (
        ("cuda", 3, ("0", "1"), 8),
        "n=3 is not possible with 2 GPUs for 'cuda'. Use n=2, or device='cpu'.",
    ),
    "two on one GPU": (("cuda:1", 2, ("0", "1"), 8), "n=2 is not possible with 1 GPU for 'cuda:1'."),
    "more than cores": (("cpu", 500, (), 4), "n=500 is not possible with 4 cores of the CPU. Use n=4."),
    "three on a core": (("cpu", 3, (), 1), "n=3 is not possible with 1 core of the CPU. Use n=2."),
    "none": (("cpu", 0, (), 8), "Invalid value for n: 0."),
    "no number": (("cpu", "2", (), 8), "Invalid value for n: '2'."),
    "true": (("cpu", True, (), 8), "Invalid value for n: True."),
    "no thread": (("cpu", 1, (), 8, 0), "Invalid value for threads: 0."),
}


@pytest.mark.parametrize(("arguments", "plans"), PLANS.values(), ids=PLANS)
def test_plans_have_one_worker_per_device(arguments, plans):
    assert list(plan_workers(*arguments)) == plans


@pytest.mark.parametrize(("arguments", "message"), IMPOSSIBLE_PLANS.values(), ids=IMPOSSIBLE_PLANS)
def test_plans_reject_more_workers_than_devices(arguments, message):
    with pytest.raises(ConfigurationError) as caught:
        plan_workers(*arguments)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("count", "variable", "names"),
    [
        (0, None, ()),
        (2, None, ("0", "1")),
        (2, "", ("0", "1")),
        (1, "3", ("3",)),
        (2, "2,GPU-5a, 7", ("2", "GPU-5a")),
        (1, "0,-1,2", ("0",)),
    ],
)
def test_visible_gpu_ids_follow_the_variable(count, variable, names):
    assert visible_gpu_ids(count, variable) == names


def test_worker_options_set_device_gpu_and_threads():
    assert [WorkerSpec("cuda", "GPU-5a").options, WorkerSpec(None, threads=3).options] == [
        {"nthreads": 2, "env": {"OPENMED_TORCH_DEVICE": "cuda", "CUDA_VISIBLE_DEVICES": "GPU-5a"}},
        {"nthreads": 2, "env": {"OMP_NUM_THREADS": "3"}},
    ]
    assert WorkerSpec("cpu", threads=1).options["nthreads"] == 1


def test_start_cluster_reports_the_start_error():

    @contextlib.asynccontextmanager
    async def cluster():
        raise RuntimeError("no more processes")
        yield

    with pytest.raises(
        ClusterUnavailableError, match=r"^The cluster failed to start: no more processes\. Try again\.$"
    ):
        start_cluster(cluster(), create_certificates(), 1, None, "Try again.")


def test_background_context_warns_once_about_a_failed_exit():
    @contextlib.asynccontextmanager
    async def fail_on_exit():
        yield
        raise OSError("connection lost")

    background = BackgroundContext(fail_on_exit())
    background.start()
    with pytest.warns(OpenMedWarning, match=r"^The cluster did not shut down cleanly: connection lost\. Check for"):
        background.stop()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        background.stop()


def test_background_context_stops_before_its_start():
    before = {*threading.enumerate()}
    BackgroundContext(contextlib.nullcontext()).stop()

    assert {*threading.enumerate()} <= before


INVALID_HOSTS = ["mac1", 5, [], [""], [1], ["-oProxyCommand=x"], ["me@localhost"], ["\ud800"], ["a\0b"], ["a b"]]
INVALID_ARGUMENTS = [
    ({"n": 2, "hosts": ["mac1"]}, "n can only be used without hosts"),
    ({"n": ["mac1"]}, r".*a list of 1 item\..*, or pass host names as hosts="),
    ({"threads": 0, "hosts": ["mac1"]}, ".*threads.* 0"),
    *[({"hosts": hosts}, r".*\. Pass a list of host names") for hosts in INVALID_HOSTS],
]


@pytest.mark.parametrize(("arguments", "message"), INVALID_ARGUMENTS, ids=lambda value: ascii(value)[:80])
def test_cluster_rejects_invalid_arguments(arguments, message):
    with pytest.raises(ConfigurationError, match=f"^{message}"):
        nb.cluster(**arguments)


def test_cluster_is_not_supported_under_simulation(request):
    """Workers are processes of the real machine."""
    simulation = contextlib.nullcontext() if request.config.getoption("simulated_mps") else nb.simulated_mps()
    with simulation, pytest.raises(ConfigurationError, match="A SIMULATED Mac does not support clusters"):
        nb.cluster()


@pytest.mark.real_computer
class TestProcesses:
    """Processes, threads and settings during and after a cluster."""

    @pytest.fixture(autouse=True)
    def check_cleanup(self):
        """Check that a test leaves no worker, socket, thread and variable, except the resource tracker of Python."""
        variables = get_environment()
        processes = list_children()
        sockets = len(psutil.Process().net_connections())
        threads = {thread.name for thread in threading.enumerate()}
        yield
        assert list_children() == processes
        assert get_environment() == variables
        assert len(psutil.Process().net_connections()) <= sockets
        for thread in threading.enumerate():
            if thread.name not in threads:  # A start that was interrupted while waiting finishes later.
                thread._started.wait(timeout=120)  # The interrupt can also arrive before the thread runs.
                thread.join(timeout=120)
        assert {thread.name for thread in threading.enumerate()} <= threads

    def test_workers_import_torch_on_demand_and_listen_on_loopback(self):
        with nb.cluster(n=1, device="cpu") as cluster:
            pids = [*cluster.client.run(os.getpid).values(), os.getpid()]
            loaded = cluster.client.run(lambda: "torch" in sys.modules)
            connections = [connection for pid in pids for connection in psutil.Process(pid).net_connections()]
            text, threads = str(cluster), {thread.name for thread in threading.enumerate()}
        cluster.close()

        assert "openmed_nb cluster" in threads
        assert set(loaded.values()) == {False}
        assert {connection.laddr.ip for connection in connections if connection.status == psutil.CONN_LISTEN} == {
            "127.0.0.1"
        }
        assert text.startswith("1 worker (cpu) on 1 host\n")
        assert str(cluster) == f"Closed: {text}"

    def test_interrupt_during_start_stops_the_workers(self, interrupt_when):
        before = list_children()
        with pytest.raises(KeyboardInterrupt), interrupt_when(lambda: list_children() != before):
            nb.cluster(n=1, device="cpu")

    def test_second_close_waits_after_an_interrupt(self, interrupt_when):
        cluster = nb.cluster(n=1, device="cpu")
        pids = [*cluster.client.run(os.getpid).values()]
        with pytest.raises(KeyboardInterrupt), interrupt_when(lambda: cluster.client.status != "running"):
            cluster.close()
        cluster.close()

        assert [pid for pid in pids if psutil.pid_exists(pid)] == []

    def test_start_timeout_stops_the_workers(self):
        security = create_certificates()
        cluster = local_cluster([WorkerSpec("cpu", threads=1)] * 2, security, timeout=0.2)
        message = r"^The cluster failed to start: not started within 0\.2 s\. Wait\.$"
        with pytest.raises(ClusterUnavailableError, match=message):
            start_cluster(cluster, security, 2, None, "Wait.")

    def test_interrupt_while_waiting_for_another_start(self, interrupt_when):
        before = set(threading.enumerate())

        def is_waiting():
            return any(thread.name == "openmed_nb cluster" for thread in set(threading.enumerate()) - before)

        with START_LOCK, pytest.raises(KeyboardInterrupt), interrupt_when(is_waiting):
            nb.cluster(n=1, device="cpu")

    @pytest.mark.parametrize("order", [(0, 1), pytest.param((1, 0), marks=pytest.mark.slow)], ids=str)
    def test_two_clusters_restore_process_settings_at_the_end(self, order, monkeypatch):
        monkeypatch.setenv(DASK_VARIABLES[0], "7")
        before = copy.deepcopy(dask.config.config)
        levels = dask_log_levels()
        clusters = [nb.cluster(n=1, device="cpu", threads=1) for _ in order]
        clusters[order[0]].close()
        during = dask_log_levels()
        variables = [os.environ.get(name) for name in DASK_VARIABLES]
        ready = clusters[order[1]].client.run(os.getpid)
        clusters[order[1]].close()

        assert len(ready) == 1
        assert during == [logging.CRITICAL] * len(levels)
        assert not {"7", None} & {*variables}
        assert os.environ[DASK_VARIABLES[0]] == "7"
        assert dask.config.config == before
        assert dask_log_levels() == levels

    def test_killed_client_leaves_no_worker(self, program):
        process = program("""
            import os, signal
            import openmed_nb as nb
            if __name__ == "__main__":
                cluster = nb.cluster(n=1, device="cpu")
                print(*cluster.client.run(os.getpid).values(), flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
        """)

        assert process.returncode == -9
        assert has_ended(int(process.stdout))

    def test_script_without_main_guard_reports_the_remedy(self, program):
        process = program("""
            import openmed_nb as nb
            nb.cluster(n=1, device="cpu")
        """)
        lines = process.stderr.splitlines()
        remedy = MAIN_GUARD

        assert process.returncode == 1
        assert lines[:2] == [
            f"A worker tried to start another cluster. {remedy}",
            "Traceback (most recent call last):",
        ]
        assert lines[-1].endswith(remedy)
        assert len([line for line in lines if line.startswith("Traceback")]) == 1


@pytest.mark.real_computer
@pytest.mark.skipif(sys.platform == "win32", reason="process groups need POSIX")
class TestInterruptOfTheGroup:
    """Interrupts of the whole process group, as sent by terminals and Jupyter."""

    def test_interrupt_between_runs_does_not_stop_workers(self, program):
        """Without a call of ``close()``, the workers exit silently with the script."""
        process = program("""
            import os, signal, time
            import openmed_nb as nb
            if __name__ == "__main__":
                cluster = nb.cluster(n=1, device="cpu")
                (pid,) = cluster.client.run(os.getpid).values()
                try:
                    os.killpg(0, signal.SIGINT)
                    time.sleep(60)
                except KeyboardInterrupt:
                    print(pid, [*cluster.client.run(os.getpid).values()] == [pid])
        """)
        pid, is_unchanged = process.stdout.split()

        assert (process.returncode, process.stderr, is_unchanged) == (0, "", "True")
        assert has_ended(int(pid))

    @pytest.mark.slow
    def test_workers_are_usable_after_an_interrupted_run(self, program, keyword_model):
        process = program(f"""
            import os, signal, sys
            import openmed_nb as nb
            def texts():
                for number in range(10**6):
                    yield f"asthma {{number}}" + " " * 2000
                    if number == 200:
                        os.killpg(0, signal.SIGINT)
            if __name__ == "__main__":
                with nb.cluster(n=2, device="cpu", threads=1) as cluster:
                    before = cluster.client.run(os.getpid)
                    try:
                        nb.annotate(texts(), {str(keyword_model)!r}, client=cluster.client, progress=False)
                    except KeyboardInterrupt as error:
                        print(type(error).__name__)
                    found = nb.annotate(["asthma"], {str(keyword_model)!r}, client=cluster.client, progress=False)
                    print(len(found), before == cluster.client.run(os.getpid))
        """)

        assert (process.returncode, process.stderr, process.stdout) == (0, "", "RunInterrupted\n1 True\n")

    @pytest.mark.slow
    def test_interrupt_during_start_leaves_no_worker(self, program):
        process = program("""
            import os, signal, threading, time
            import openmed_nb as nb
            import psutil
            def workers():
                return [child for child in psutil.Process().children() if "spawn_main" in " ".join(child.cmdline())]
            def interrupt():
                while not workers():
                    time.sleep(0.01)
                os.killpg(0, signal.SIGINT)
            if __name__ == "__main__":
                threading.Thread(target=interrupt).start()
                try:
                    nb.cluster(n=1, device="cpu")
                except KeyboardInterrupt as error:
                    print(type(error).__name__, workers())
        """)

        assert (process.returncode, process.stderr, process.stdout) == (0, "", "KeyboardInterrupt []\n")


@pytest.fixture(scope="module")
def program(tmp_path_factory, interruptible):  # noqa: ARG001 - scripts inherit it
    """Function that runs a script in a separate process group."""

    def run(text):
        file = tmp_path_factory.mktemp("program") / "program.py"
        file.write_text(textwrap.dedent(text))
        options = {"start_new_session": True, "capture_output": True, "text": True, "timeout": 240}
        return subprocess.run([sys.executable, file], check=False, **options)

    return run


def get_environment():
    """Return the environment variables of this process, without that of pytest."""
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


def dask_log_levels():
    """Return the log level of each handler of Dask."""
    return [handler.level for handler in logging.getLogger("distributed").handlers]


def list_children():
    """Return the ids of all child processes, direct and indirect."""
    pids = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            command = " ".join(child.cmdline())
            if child.status() != psutil.STATUS_ZOMBIE and "resource_tracker" not in command:
                pids.append(child.pid)
    return pids


def has_ended(pid):
    """Return whether a process exits within two minutes."""
    try:
        process = psutil.Process(pid)
        psutil.wait_procs([process], timeout=120)
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
