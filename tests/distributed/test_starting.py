"""Starting workers on this computer: one for each device, with its threads; and ending them without a trace."""

import contextlib
import copy
import logging
import os
import subprocess
import sys
import textwrap
import threading
import warnings
from pathlib import Path

import dask.config
import psutil
import pytest

import openmed_nb as nb
from openmed_nb.distributed.members import WorkerSpec, plan_hosts, plan_workers, visible_gpu_ids
from openmed_nb.distributed.ssh import START_LOCK
from openmed_nb.distributed.starting import (
    DASK_VARIABLES,
    BackgroundContext,
    local_cluster,
    start_cluster,
    validate_security,
)
from openmed_nb.errors import ClusterUnavailableError, ConfigurationError, OpenMedWarning

TWO = {"gpu1": ("0", "1")}
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
    "hosts without GPUs": ((["mac1", "mac2"], {}, None, None), [WorkerSpec(None)] * 2),
    "a GPU each": ((["gpu1", "mac1", "gpu1"], TWO, None, 2), [WorkerSpec(None, gpu, 2) for gpu in ("0", None, "1")]),
    "fewer than GPUs": ((["gpu1"], TWO, "cuda", None), [WorkerSpec("cuda", "0")]),
    "counted in vain": ((["mac1", "mac1"], {"mac1": ()}, None, None), [WorkerSpec(None)] * 2),
}
NOT_PLANNED = {
    "two on MPS": (("mps", 2, (), 8), "n cannot be 2 with one MPS device, which several processes"),
    "too many GPUs": (("cuda", 3, ("0", "1"), 8), "n cannot be 3 with 2 GPUs for 'cuda'. Use n=2, or device='cpu'."),
    "two on one GPU": (("cuda:1", 2, ("0", "1"), 8), "n cannot be 2 with 1 GPU for 'cuda:1'."),
    "more than cores": (("cpu", 500, (), 4), "n cannot be 500 with 4 cores of the CPU. Use n=4."),
    "three on a core": (("cpu", 3, (), 1), "n cannot be 3 with 1 core of the CPU. Use n=2."),
    "none": (("cpu", 0, (), 8), "n cannot be 0."),
    "no number": (("cpu", "2", (), 8), "n cannot be '2'."),
    "true": (("cpu", True, (), 8), "n cannot be True."),
    "no thread": (("cpu", 1, (), 8, 0), "threads cannot be 0."),
    "hosts": ((["gpu1"] * 3, TWO, None, None), "gpu1 is named 3 times, and has 2 GPUs. Name it 2 times at most"),
}


def planned(asked):
    """Return the workers that are planned for a device of this computer, or for hosts."""
    return (plan_workers if isinstance(asked[0], str) else plan_hosts)(*asked)


@pytest.mark.parametrize(("asked", "plans"), PLANS.values(), ids=PLANS)
def test_one_worker_for_each_device(asked, plans):
    """Each GPU of CUDA has its worker, MPS one, the CPU as many as asked for, which share its cores, and a host one a name."""
    assert list(planned(asked)) == plans


@pytest.mark.parametrize(("asked", "message"), NOT_PLANNED.values(), ids=NOT_PLANNED)
def test_more_workers_than_devices(asked, message):
    """More workers than devices or cores are refused, with the number that there is."""
    with pytest.raises(ConfigurationError) as caught:
        planned(asked)
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
def test_gpus_that_this_process_sees(count, variable, names):
    """The GPUs are called as in the variable that this process has, as many as torch sees."""
    assert visible_gpu_ids(count, variable) == names


def test_options_of_a_worker():
    """A worker sees its own GPU alone, computes on its device and threads, and has two tasks where there is a thread for both."""
    assert [WorkerSpec("cuda", "GPU-5a").options, WorkerSpec(None, threads=3).options] == [
        {"nthreads": 2, "env": {"OPENMED_TORCH_DEVICE": "cuda", "CUDA_VISIBLE_DEVICES": "GPU-5a"}},
        {"nthreads": 2, "env": {"OMP_NUM_THREADS": "3"}},
    ]
    assert WorkerSpec("cpu", threads=1).options["nthreads"] == 1


def test_a_cluster_that_does_not_start():
    """What keeps a cluster from starting is told in one line."""

    @contextlib.asynccontextmanager
    async def cluster():
        raise RuntimeError("no more processes")
        yield

    with pytest.raises(ClusterUnavailableError, match=r"^The cluster does not start: no more processes\. Try again\.$"):
        start_cluster(cluster(), validate_security(None), 1, None, "Try again.")


def test_a_cluster_that_fails_at_its_end():
    """What goes wrong at the end is warned of once, because another error may be under way."""

    @contextlib.asynccontextmanager
    async def room():
        yield
        raise OSError("nobody there")

    life = BackgroundContext(room())
    life.start()
    with pytest.warn_if(OpenMedWarning, match=r"^The cluster did not end as it should: nobody there\. Look whether"):
        life.stop()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        life.stop()


def test_end_before_the_beginning():
    """The life of a cluster that never began has ended."""
    before = {*threading.enumerate()}
    BackgroundContext(contextlib.nullcontext()).stop()

    assert {*threading.enumerate()} <= before


NO_HOSTS = ["mac1", 5, [], [""], [1], ["-oProxyCommand=x"], ["a" * 300], ["a..b"], ["\ud800"], ["a\0b"], ["a b"]]
REFUSED = [
    ({"n": 2, "hosts": ["mac1"]}, "n is for this computer alone"),
    ({"user": "me", "port": 22}, r"user, port are for hosts\. Name them in hosts="),
    ({"n": ["mac1"]}, r"n cannot be a list of 1 item\. Pass a whole number from 1, or name computers in hosts="),
    ({"security": "tls"}, "security cannot be str"),
    ({"threads": 0, "hosts": ["mac1"]}, "threads cannot be 0"),
    *[({"hosts": hosts}, r"hosts cannot be .*\. Pass names of hosts in a list") for hosts in NO_HOSTS],
    ({"hosts": ["me@localhost"]}, r"hosts cannot be .*\. Name the user in user=, "),
    ({"hosts": ["localhost:2222"]}, r"hosts cannot be .*\. Name the port in port=, "),
    *[
        ({"hosts": ["mac1"], name: value}, f"{name} cannot be ")
        for name in ("user", "key", "known_hosts", "remote_python")
        for value in (5, "", " ", "a\0b", "\ud800")
    ],
    *[({"hosts": ["mac1"], "port": value}, "port cannot be ") for value in (0, -1, 65536, 70000, "22", True, 22.0)],
    ({"hosts": ["mac1"], "key": "~/nowhere"}, r"key='.+nowhere' is not a file on this computer\. Name the file of a"),
    ({"hosts": ["mac1"], "key": "~no such user/k"}, r"key=a string of 15 characters is not a file on this computer\."),
    ({"hosts": ["mac1"], "key": Path("user.pub")}, r"key='user.pub' is a public key\. Name the file of a private key"),
    ({"hosts": ["mac1"], "known_hosts": "nowhere"}, r"known_hosts='nowhere' is not a file on this computer\."),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED, ids=lambda value: ascii(value)[:80])
def test_refused_arguments(arguments, message, request, tmp_path, monkeypatch):
    """What means nothing where the workers are, or SSH cannot use, is refused before anything is started or connected."""
    monkeypatch.chdir(tmp_path)
    Path("user.pub").touch()
    if request.config.getoption("simulated_mps") and "security" in arguments:
        message = "A SIMULATED Mac has no cluster"
    with pytest.raises(ConfigurationError, match=f"^{message}"):
        nb.cluster(**arguments)


def test_a_simulated_mac_has_no_cluster(request):
    """Workers are processes of the real computer, so that a simulated one has none."""
    on = contextlib.nullcontext() if request.config.getoption("simulated_mps") else nb.simulated_mps()
    with on, pytest.raises(ConfigurationError, match="A SIMULATED Mac has no cluster"):
        nb.cluster()


@pytest.mark.real_computer
class TestProcesses:
    """What is there while a cluster runs, and afterwards."""

    @pytest.fixture(autouse=True)
    def nothing_is_left(self):
        """A test leaves no worker, no socket, no thread and no variable, but for Python's own watcher of shared memory."""
        variables, before, sockets = environment(), children(), len(psutil.Process().net_connections())
        threads = {thread.name for thread in threading.enumerate()}
        yield
        assert children() == before
        assert environment() == variables
        assert len(psutil.Process().net_connections()) <= sockets
        for thread in threading.enumerate():
            if thread.name not in threads:  # A start that was interrupted in its wait ends on its own.
                thread._started.wait(timeout=120)  # It may also be interrupted before its thread runs.
                thread.join(timeout=120)
        assert {thread.name for thread in threading.enumerate()} <= threads

    def test_nothing_is_left(self):
        """Workers import torch when a model is needed and not before, listen on this computer alone, and end with the block."""
        with nb.cluster(n=1, device="cpu") as cluster:
            pids = [*cluster.client.run(os.getpid).values(), os.getpid()]
            loaded = cluster.client.run(lambda: "torch" in sys.modules)
            connections = [one for pid in pids for one in psutil.Process(pid).net_connections()]
            living, threads = str(cluster), {thread.name for thread in threading.enumerate()}
        cluster.close()

        assert "openmed_nb cluster" in threads
        assert set(loaded.values()) == {False}
        assert {one.laddr.ip for one in connections if one.status == psutil.CONN_LISTEN} == {"127.0.0.1"}
        assert living == "1 worker (cpu) on 1 computer\n  cpu: 'cpu' was asked for by argument."
        assert str(cluster) == f"Closed: {living}"

    def test_interrupted_start(self, interrupt_when):
        """An interrupt while workers start is told as one, and they end."""
        before = children()
        with pytest.raises(KeyboardInterrupt), interrupt_when(lambda: children() != before):
            nb.cluster(n=1, device="cpu")

    def test_interrupted_end(self, interrupt_when):
        """Where the wait for the end is interrupted, the second one lasts until everything has ended."""
        cluster = nb.cluster(n=1, device="cpu")
        pids = [*cluster.client.run(os.getpid).values()]
        with pytest.raises(KeyboardInterrupt), interrupt_when(lambda: cluster.client.status != "running"):
            cluster.close()
        cluster.close()

        assert [pid for pid in pids if psutil.pid_exists(pid)] == []

    def test_a_start_that_takes_too_long(self):
        """A start that takes longer than it may is given up with its processes, and the error says so."""
        security = validate_security(None)
        cluster = local_cluster([WorkerSpec("cpu", threads=1)] * 2, security, timeout=0.2)
        message = r"^The cluster does not start: it takes longer than 0\.2 s\. Wait\.$"
        with pytest.raises(ClusterUnavailableError, match=message):
            start_cluster(cluster, security, 2, None, "Wait.")

    def test_interrupted_wait_for_another_start(self, interrupt_when):
        """An interrupt while another cluster starts is told as one, and nothing is started."""
        others = set(threading.enumerate())

        def waits():
            return any(one.name == "openmed_nb cluster" for one in set(threading.enumerate()) - others)

        with START_LOCK, pytest.raises(KeyboardInterrupt), interrupt_when(waits):
            nb.cluster(n=1, device="cpu")

    @pytest.mark.parametrize("order", [(0, 1), pytest.param((1, 0), marks=pytest.mark.slow)], ids=str)
    def test_two_at_once(self, order, monkeypatch):
        """What a cluster changes of the whole process stays until the last has ended, and is then as it was before."""
        monkeypatch.setenv(DASK_VARIABLES[0], "7")
        before, levels = copy.deepcopy(dask.config.config), levels_of_dask()
        clusters = [nb.cluster(n=1, device="cpu", threads=1) for _ in order]
        clusters[order[0]].close()
        during = dask.config.get("distributed.admin.low-level-log-length"), levels_of_dask()
        variables = [os.environ.get(name) for name in DASK_VARIABLES]
        ready = clusters[order[1]].client.run(os.getpid)
        clusters[order[1]].close()

        assert len(ready) == 1
        assert during == (0, [logging.CRITICAL] * len(levels))
        assert not {"7", None} & {*variables}
        assert os.environ[DASK_VARIABLES[0]] == "7"
        assert dask.config.config == before
        assert levels_of_dask() == levels

    def test_a_killed_client_leaves_no_worker(self, program):
        """Where the process that began a cluster is killed, its workers end."""
        done = program("""
            import os, signal
            import openmed_nb as nb
            if __name__ == "__main__":
                cluster = nb.cluster(n=1, device="cpu")
                print(*cluster.client.run(os.getpid).values(), flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
        """)

        assert done.returncode == -9
        assert has_ended(int(done.stdout))

    def test_script_without_a_guard(self, program):
        """A worker that imports a script which starts a cluster says so in one line, and the script gets the remedy."""
        done = program("""
            import openmed_nb as nb
            nb.cluster(n=1, device="cpu")
        """)
        lines = done.stderr.splitlines()
        remedy = "In a script, call it under if __name__ == '__main__': workers import the script."

        assert done.returncode == 1
        assert lines[:2] == [
            f"A worker came to start a cluster of its own. {remedy}",
            "Traceback (most recent call last):",
        ]
        assert lines[-1].endswith(remedy)
        assert len([line for line in lines if line.startswith("Traceback")]) == 1


@pytest.mark.real_computer
@pytest.mark.skipif(sys.platform == "win32", reason="groups of processes are of POSIX")
class TestInterruptOfTheGroup:
    """What a terminal and Jupyter do: an interrupt goes to all processes of the group."""

    def test_between_runs(self, program):
        """The interrupt reaches the script alone, its workers stay; where it does not close them, they end with it silently."""
        done = program("""
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
        pid, stayed = done.stdout.split()

        assert (done.returncode, done.stderr, stayed) == (0, "", "True")
        assert has_ended(int(pid))

    @pytest.mark.slow
    def test_in_mid_run(self, program, keyword_model):
        """The run stops, and the same workers answer the next one at once."""
        done = program(f"""
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

        assert (done.returncode, done.stderr, done.stdout) == (0, "", "Interrupted\n1 True\n")

    @pytest.mark.slow
    def test_while_workers_start(self, program):
        """The start is interrupted, no worker says anything, and none is left."""
        done = program("""
            import os, signal, threading, time
            import openmed_nb as nb
            import psutil
            def workers():
                return [one for one in psutil.Process().children() if "spawn_main" in " ".join(one.cmdline())]
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

        assert (done.returncode, done.stderr, done.stdout) == (0, "", "KeyboardInterrupt []\n")


@pytest.fixture(scope="module")
def program(tmp_path_factory, interruptible):  # noqa: ARG001 - scripts inherit it
    """A function that runs a script in a process and a group of its own."""

    def run(text):
        file = tmp_path_factory.mktemp("program") / "program.py"
        file.write_text(textwrap.dedent(text))
        options = {"start_new_session": True, "capture_output": True, "text": True, "timeout": 240}
        return subprocess.run([sys.executable, file], check=False, **options)

    return run


def environment():
    """Return the variables of this process, without the one in which pytest says what it does."""
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


def levels_of_dask():
    """Return from which level on each handler of Dask logs."""
    return [handler.level for handler in logging.getLogger("distributed").handlers]


def children():
    """Return the processes that this one started, and those that they did."""
    found = []
    for one in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            line = " ".join(one.cmdline())
            if one.status() != psutil.STATUS_ZOMBIE and "resource_tracker" not in line:
                found.append(one.pid)
    return found


def has_ended(pid):
    """Tell whether a process ends within two minutes."""
    try:
        process = psutil.Process(pid)
        psutil.wait_procs([process], timeout=120)
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
