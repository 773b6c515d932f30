"""Startup of workers on this machine, and shutdown without remaining processes."""

import contextlib
import copy
import logging
import os
import sys
import textwrap

import dask.config
import psutil
import pytest

import openmed_nb as nb
from helpers.processes import run_python
from openmed_nb.distributed.client import plan_workers, worker_options
from openmed_nb.distributed.starting import MAIN_GUARD
from openmed_nb.errors import ClusterUnavailableError, ConfigurationError


@pytest.mark.parametrize(
    ("arguments", "plans"),
    [
        (("cpu", None, 8), [worker_options("cpu")]),
        (("cpu", 2, 8), [worker_options("cpu", threads=4)] * 2),
        (("cpu", 3, 3), [worker_options("cpu", threads=1)] * 3),
        (("cpu", 2, 1), [worker_options("cpu", threads=1)] * 2),
        (("mps", None, 8), [worker_options("mps")]),
        (("cuda:1", 1, 8), [worker_options("cuda:1")]),
    ],
)
def test_plans_divide_the_cores(arguments, plans):
    assert plan_workers(*arguments) == plans


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("mps", 2, 8), "n=2 is not possible with one mps device. Use n=1, or device='cpu'."),
        (("cuda:1", 2, 8), "n=2 is not possible with one cuda:1 device. Use n=1, or device='cpu'."),
        (("cpu", 500, 4), "n=500 is not possible with 4 cores. Use n=4."),
        (("cpu", 3, 1), "n=3 is not possible with 1 core. Use n=2."),
    ],
)
def test_plans_reject_too_many_workers(arguments, message):
    with pytest.raises(ConfigurationError) as caught:
        plan_workers(*arguments)
    assert str(caught.value) == message


def test_worker_options_set_device_and_threads():
    assert worker_options("cuda") == {"nthreads": 2, "env": {"OPENMED_TORCH_DEVICE": "cuda"}}
    assert worker_options(None, threads=1) == {"nthreads": 1, "env": {"OMP_NUM_THREADS": "1"}}


INVALID_HOSTS = ["mac1", 5, [], [""], [1], ["-oProxyCommand=x"], ["me@localhost"], ["a\0b"]]
INVALID_ARGUMENTS = [
    ({"n": 2, "hosts": ["mac1"]}, "n can only be used without hosts"),
    *[({"n": n}, "Invalid value for n") for n in (0, "2", True)],
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
    """Processes and settings during and after a cluster."""

    @pytest.fixture(autouse=True)
    def check_cleanup(self):
        """Check that a test leaves no worker, except the resource tracker of Python."""
        processes = list_children()
        yield
        assert list_children() == processes

    def test_workers_listen_on_loopback_and_need_the_certificate_of_the_cluster(self):
        from distributed import Client

        settings = copy.deepcopy(dask.config.config)
        levels = dask_log_levels()
        with nb.cluster(n=1, device="cpu") as cluster:
            assert dask_log_levels() == [logging.CRITICAL] * len(levels)
            pids = [*cluster.client.run(os.getpid).values(), os.getpid()]
            connections = [connection for pid in pids for connection in psutil.Process(pid).net_connections()]
            with pytest.raises(OSError, match=r"Timed out|reset|closed"):
                Client(cluster.client.scheduler.address.replace("tls", "tcp"), timeout=1)

        listening = [connection for connection in connections if connection.status == psutil.CONN_LISTEN]
        assert {connection.laddr.ip for connection in listening} == {"127.0.0.1"}
        assert str(cluster).startswith("Closed: 1 worker (cpu) on 1 host\n")
        assert dask.config.config == settings
        assert dask_log_levels() == levels

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

    def test_failed_start_reports_the_error_of_dask(self, monkeypatch):
        import distributed

        def fail(*_arguments, **_options):
            raise OSError("no more processes")

        monkeypatch.setattr(distributed, "Scheduler", fail)
        message = r"^The cluster failed to start: .*no more processes\. "
        with pytest.raises(ClusterUnavailableError, match=message):
            nb.cluster(n=1, device="cpu")

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

        assert process.returncode == 1
        assert lines[:2] == [
            f"A worker tried to start another cluster. {MAIN_GUARD}",
            "Traceback (most recent call last):",
        ]
        assert MAIN_GUARD in lines[-1]
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
                with nb.cluster(n=2, device="cpu") as cluster:
                    before = cluster.client.run(os.getpid)
                    try:
                        nb.annotate(texts(), {str(keyword_model)!r}, client=cluster.client, progress=False)
                    except KeyboardInterrupt as error:
                        print(type(error).__name__)
                    found = nb.annotate(["asthma"], {str(keyword_model)!r}, client=cluster.client, progress=False)
                    print(len(found), before == cluster.client.run(os.getpid))
        """)

        assert (process.returncode, process.stderr, process.stdout) == (0, "", "RunInterrupted\n1 True\n")


@pytest.fixture(scope="module")
def program(tmp_path_factory, interruptible):  # noqa: ARG001 - scripts inherit it
    """Function that runs a script in a separate process group."""

    def run(text):
        file = tmp_path_factory.mktemp("program") / "program.py"
        file.write_text(textwrap.dedent(text))
        return run_python(file, start_new_session=True)

    return run


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
