"""Cluster over real SSH. A server on 127.0.0.1 with separate keys represents two hosts."""

import asyncio
import contextlib
import copy
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import dask.config
import psutil
import pytest

import openmed_nb as nb
from openmed_nb.distributed.members import WorkerSpec
from openmed_nb.distributed.ssh import (
    HostInfo,
    SshLogin,
    build_cluster,
    certificate_files,
    hosts_with_several_gpu_workers,
    listen_addresses,
    parse_probe_output,
    validate_hosts,
)
from openmed_nb.distributed.starting import validate_security
from openmed_nb.errors import ClusterUnavailableError, ConfigurationError, WorkerMismatchError

pytestmark = [
    pytest.mark.real_computer,  # Hosts are processes.
    pytest.mark.skipif(sys.platform == "win32", reason="the SSH server needs POSIX"),
]

FOLDER = Path(__file__).parent
HOSTS = ["127.0.0.1", "localhost"]
COUNT = 240
PROBE_OUTPUT = '{"version": "%s", "gpus": 2, "visible": %s, "connection": %s}'


@pytest.fixture(scope="module")
def server(helper, tmp_path_factory):
    """SSH server with a known host key that accepts one key."""
    module = helper(FOLDER / "ssh_server.py")
    with module.ssh_server(tmp_path_factory.mktemp("ssh"), str(FOLDER.parents[1])) as server:
        yield server


@pytest.fixture(scope="module")
def login(server):
    """Arguments for the login."""
    return server.login


@pytest.fixture(scope="module")
def one_host(login):
    """Cluster of one host."""
    with nb.cluster(hosts=HOSTS[:1], device="cpu", threads=1, **login) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def two_hosts(login):
    """Cluster of two hosts."""
    with nb.cluster(hosts=HOSTS, device="cpu", threads=1, **login) as cluster:
        yield cluster


def list_processes(client):
    """Return the ids of the workers, their nannies and the scheduler."""
    workers = [*client.run(os.getpid).values(), *client.run(os.getppid).values()]
    return [*workers, client.run_on_scheduler(os.getpid)]


def list_commands(server):
    """Return the command lines of cluster processes on the hosts, without zombies."""
    commands = []
    for process in psutil.Process(server.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                commands.append(" ".join(process.cmdline()))
    return [command for command in commands if "dask_spec" in command or "multiprocessing" in command]


def wait_until(condition):
    """Wait up to two minutes until a condition is true, and return whether it is."""
    deadline = time.monotonic() + 120
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


@pytest.fixture
def make_python(tmp_path):
    """Function that creates a Python wrapper that runs another command if its arguments match a shell pattern."""

    def make_python(pattern, command):
        python = tmp_path / "my python"
        python.write_text(f'#!/bin/sh\ncase "$*" in {pattern}) {command}; exit 1;; esac\nexec {sys.executable} "$@"\n')
        python.chmod(0o755)
        return python

    return make_python


def get_certificate_folder(client):
    """Return the directory of the TLS certificates of a cluster of one host."""
    (file,) = client.run(dask.config.get, "distributed.comm.tls.ca-file").values()
    return Path(file).parent


def list_certificate_folders():
    """Return the directories of TLS certificates that exist now."""
    return set(Path("/tmp").glob("openmed_nb-*"))  # noqa: S108


def test_cluster_on_this_machine_listens_only_on_loopback(one_host):
    processes = map(psutil.Process, list_processes(one_host.client))
    connections = [connection for process in processes for connection in process.net_connections()]

    assert str(one_host) == "1 worker (cpu) on 1 host\n  cpu: 'cpu' was requested by the device argument."
    assert one_host.to_dict()["workers"][0]["versions"]["openmed_nb"] == nb.__version__
    assert {connection.laddr.ip for connection in connections if connection.status == psutil.CONN_LISTEN} == {
        "127.0.0.1"
    }


def test_connections_require_private_certificates(one_host):
    from distributed import Client

    address = one_host.client.scheduler.address
    folder = get_certificate_folder(one_host.client)

    assert address.startswith("tls://")
    assert {oct(path.stat().st_mode & 0o777) for path in (folder, *folder.iterdir())} == {"0o700", "0o600"}
    with pytest.raises(OSError, match=r"Timed out|reset|closed"):
        Client(address.replace("tls", "tcp"), timeout=2)


@pytest.mark.slow
def test_hosts_give_the_results_of_one_machine(two_hosts, keyword_model, numbered):
    found = nb.annotate(numbered(COUNT), keyword_model, client=two_hosts.client, progress=False)

    assert list(found) == list(nb.annotate(numbered(COUNT), keyword_model, device="cpu", progress=False))


@pytest.mark.slow
def test_lost_host_loses_no_text(two_hosts, keyword_model, numbered, get_numbers, tmp_path):
    file = tmp_path / "run.jsonl"
    client = two_hosts.client
    pids = [*zip(client.run(os.getppid).values(), client.run(os.getpid).values(), strict=True)]
    killed = []

    def texts():
        for text in numbered(COUNT):
            if not killed and file.read_bytes().count(b"\n") > 1:
                killed.extend(pids[0])
                for pid in killed:
                    os.kill(pid, signal.SIGKILL)
            yield text

    found = nb.annotate(texts(), keyword_model, client=client, resume=file, progress=False)

    assert killed
    assert get_numbers(found) == [[number] for number in range(COUNT)]
    assert found.errors == {}
    assert [*client.run(os.getpid).values()] == [pids[1][1]]


class TestShutdown:
    """Processes, certificates and threads after the shutdown."""

    @pytest.fixture(autouse=True)
    def check_cleanup(self, server):
        """Check that a test leaves no process and certificate on a host, and no thread and socket in this process."""
        commands = sorted(list_commands(server))
        certificate_folders = list_certificate_folders()
        sockets = len(psutil.Process().net_connections())
        threads = {thread.name for thread in threading.enumerate()}
        yield
        assert wait_until(lambda: sorted(list_commands(server)) == commands)
        assert wait_until(lambda: list_certificate_folders() <= certificate_folders)
        assert len(psutil.Process().net_connections()) <= sockets
        assert {thread.name for thread in threading.enumerate()} - threads <= {"tqdm_monitor"}

    def test_end_of_the_block_removes_processes_and_certificates(self, server, login):
        commands = list_commands(server)
        with nb.cluster(hosts=HOSTS[:1], device="cpu", **login) as cluster:
            pids = list_processes(cluster.client)
            folder = get_certificate_folder(cluster.client)
            assert folder in list_certificate_folders()

        assert len(pids) == 3
        assert folder not in list_certificate_folders()
        assert sorted(list_commands(server)) == sorted(commands)

    @pytest.mark.slow
    def test_lost_scheduler_does_not_hide_the_error_of_the_block(self, login):

        def run():
            with nb.cluster(hosts=HOSTS[:1], device="cpu", **login) as cluster:
                os.kill(cluster.client.run_on_scheduler(os.getpid), signal.SIGKILL)
                raise LookupError("of the block")

        with pytest.raises(LookupError, match="of the block"):
            run()

    @pytest.mark.slow
    def test_interrupt_during_start_stops_the_processes(self, server, login, interrupt_when):
        before = len(list_commands(server))
        with pytest.raises(KeyboardInterrupt), interrupt_when(lambda: len(list_commands(server)) > before):
            nb.cluster(hosts=HOSTS[:1], **login)

    @pytest.mark.slow
    @pytest.mark.parametrize("process", ["Scheduler", "Nanny"])
    def test_failed_start_names_the_host(self, login, make_python, process):
        python = make_python(f"*distributed.{process}*", "true")
        message = r"^The cluster failed to start on 127\.0\.0\.1: .*failed to start\. Check"
        with pytest.raises(ClusterUnavailableError, match=message):
            nb.cluster(hosts=HOSTS[:1], **login, remote_python=python)

    @pytest.mark.slow
    def test_concurrent_starts_restore_the_settings_of_dask(self, login):
        before = copy.deepcopy(dask.config.config)

        def run(_number):
            with nb.cluster(hosts=HOSTS[:1], device="cpu", **login) as cluster:
                return len(cluster.client.run(os.getpid))

        with ThreadPoolExecutor(2) as threads:
            assert [*threads.map(run, range(2))] == [1, 1]
        assert dask.config.config == before

    @pytest.mark.slow
    def test_killed_client_leaves_no_process_and_certificate(self, server, login, tmp_path):
        program = tmp_path / "program.py"
        before = len(list_commands(server))
        arguments = {name: value if isinstance(value, int) else str(value) for name, value in login.items()}
        program.write_text(
            "import openmed_nb as nb\n"
            "if __name__ == '__main__':\n"
            f"    nb.cluster(hosts=['127.0.0.1'], device='cpu', **{arguments})\n"
            "    print('started', flush=True)\n"
            "    input()\n"
        )
        with subprocess.Popen([sys.executable, program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            output = process.stdout.readline()
            during = len(list_commands(server))
            process.kill()

        assert (output, process.returncode) == (b"started\n", -signal.SIGKILL)
        assert during > before


@pytest.mark.slow
def test_each_worker_has_a_separate_gpu(login, make_python):
    """The workers keep their GPUs after a restart."""
    output = PROBE_OUTPUT % (nb.__version__, "null", '"- - 127.0.0.1 -"')
    python = make_python('*" gpus"', f"echo '{output}'")
    with nb.cluster(hosts=HOSTS[:1] * 2, threads=1, **login, remote_python=python) as pool:
        first = sorted(pool.client.run(os.getenv, "CUDA_VISIBLE_DEVICES").values())
        pool.client.restart()
        again = sorted(pool.client.run(os.getenv, "CUDA_VISIBLE_DEVICES").values())

    assert first == again == ["0", "1"]
    assert {worker.device for worker in pool.workers.workers} == {"cpu"}


def test_build_cluster_sets_the_options_of_each_process():
    from distributed.deploy import ssh

    login = SshLogin("me", python="/my folder/python")
    plans = [WorkerSpec(None), WorkerSpec("cuda", "1"), WorkerSpec("cpu", threads=1)]

    async def build():
        return build_cluster(
            ["a", "a", "b"], plans, {"a": HostInfo("10.0.0.2"), "b": HostInfo()}, login, validate_security(None)
        )

    cluster = asyncio.run(build())
    specs = [cluster.scheduler_spec, *cluster.worker_spec.values()]
    scheduler, *workers = [spec["options"]["kwargs"] for spec in specs]

    assert [spec["cls"] for spec in specs] == [ssh.Scheduler, ssh.Worker, ssh.Worker, ssh.Worker]
    assert [*cluster.worker_spec] == [0, 1, 2]
    assert [spec["options"]["address"] for spec in specs] == ["a", "a", "a", "b"]
    python = "'/my folder/python' -m openmed_nb.distributed.tethered"
    assert {spec["options"]["remote_python"] for spec in specs} == {python}
    assert [options.get("host") for options in (scheduler, *workers)] == ["10.0.0.2"] * 3 + [None]
    assert [options["memory_limit"] for options in workers] == [0.5, 0.5, 1.0]
    assert [options["nthreads"] for options in workers] == [2, 2, 1]
    assert [options["env"].get("OPENMED_TORCH_DEVICE") for options in workers] == [None, "cuda", "cpu"]
    assert workers[1]["env"]["CUDA_VISIBLE_DEVICES"] == "1"


UNUSABLE = {
    "unknown host": (
        {"known_hosts": "user.pub"},
        r"^The host key of localhost is unknown .* Run ssh -i .*user -p \d+ -o UserKnownHostsFile=.*@localhost once",
    ),
    "changed host": ({"known_hosts": "changed_hosts"}, r"^The host key of localhost is unknown"),
    "unknown key": ({"key": "stranger"}, r"^localhost rejected the login: .*\. Check user= and key=\.$"),
    "no key": (
        {"key": "log"},
        r"^The key for localhost is not usable: Invalid private key\. If it has a passphrase",
    ),
    "no server": ({"port": 1}, r"^localhost is not reachable over SSH: .*\. Check its name and port\.$"),
    "no Python": ({"remote_python": "/nowhere/python"}, r"^'/nowhere/python' on localhost is not usable: "),
    "other program": (
        {"remote_python": "/bin/echo"},
        r"^'/bin/echo' on localhost is not usable: -c import distributed",
    ),
}


@pytest.mark.parametrize(("changes", "message"), UNUSABLE.values(), ids=UNUSABLE)
def test_cluster_names_unusable_host(server, login, changes, message):
    arguments = {
        name: server.folder / value if name in ("key", "known_hosts") else value for name, value in changes.items()
    }
    with pytest.raises(ClusterUnavailableError, match=message):
        nb.cluster(hosts=["localhost"], **{**login, **arguments})


PROBE_OUTPUTS = {
    "greeting": (
        "Welcome!\n" + PROBE_OUTPUT % (1, "null", '"10.0.0.1 5 10.0.0.2 22"'),
        HostInfo("10.0.0.2", ("0", "1")),
    ),
    "named GPUs": (PROBE_OUTPUT % (1, '"3,GPU-5a"', '""'), HostInfo("", ("3", "GPU-5a"))),
    "no connection": (PROBE_OUTPUT % (1, "null", "null"), HostInfo("", ("0", "1"))),
}
INVALID_OUTPUTS = {
    "version": (
        PROBE_OUTPUT % (2, "null", "null"),
        "",
        "mac1 has openmed_nb 2, but this process has 1. Install the same",
    ),
    "complaint": ("", "no such file", "'python' on mac1 is not usable: no such file. Install openmed-nb[cluster]"),
    "other": ("5", "", "'python' on mac1 is not usable: 5."),
    "nothing": ("", "", "'python' on mac1 is not usable: no output."),
}


@pytest.mark.parametrize(("output", "host"), PROBE_OUTPUTS.values(), ids=PROBE_OUTPUTS)
def test_parse_probe_output_returns_address_and_gpus(output, host):
    assert parse_probe_output("mac1", "python", "1", output, "") == host


@pytest.mark.parametrize(("output", "errors", "message"), INVALID_OUTPUTS.values(), ids=INVALID_OUTPUTS)
def test_parse_probe_output_names_the_host_in_errors(output, errors, message):
    with pytest.raises(WorkerMismatchError if "version" in output else ClusterUnavailableError) as caught:
        parse_probe_output("mac1", "python", "1", output, errors)
    assert str(caught.value).startswith(message)


LISTEN = {
    "this machine": ({"a": "127.0.0.1", "b": "::1"}, {"a": "127.0.0.1", "b": "[::1]"}),
    "other machines": ({"a": "10.0.0.2", "b": "2001:db8::1"}, {"a": "10.0.0.2", "b": "[2001:db8::1]"}),
    "this machine and another": ({"a": "127.0.0.1", "b": "10.0.0.2"}, {"b": "10.0.0.2"}),
    "link-local": ({"a": "fe80::1%en0", "b": "169.254.3.4"}, {}),
    "unknown": ({"a": "", "b": "127.0.0.1"}, {}),
}


@pytest.mark.parametrize(("addresses", "expected"), LISTEN.values(), ids=LISTEN)
def test_listen_addresses_are_reachable_for_all_hosts(addresses, expected):
    assert listen_addresses({name: HostInfo(address) for name, address in addresses.items()}) == expected


@pytest.mark.parametrize(
    ("device", "hosts"), [(None, {"a"}), ("cuda", {"a"}), ("cuda:1", set()), ("cpu", set()), ("mps", set())]
)
def test_hosts_with_several_gpu_workers(device, hosts):
    assert hosts_with_several_gpu_workers(["a", "b", "a"], device) == hosts


def test_certificate_files_does_not_copy_custom_certificates():
    from distributed import Security

    custom = Security(tls_ca_file="ca.pem", tls_worker_cert="w.pem", require_encryption=True)
    _folder, files, config = certificate_files(custom)
    _folder, new_files, new_config = certificate_files(validate_security(None))

    assert (files, config["distributed.comm.tls.ca-file"]) == ({}, "ca.pem")
    assert len(new_files) == 5
    assert "PRIVATE" not in str(new_config)


INVALID_SECURITY = {
    "no certificates": (
        {},
        r"security does not have tls_ca_file, tls_client_cert, tls_scheduler_cert, tls_worker_cert\.",
    ),
    "one is missing": ({"tls_worker_cert": None}, r"security does not have tls_worker_cert\."),
    "no file": (
        {"tls_client_cert": "nowhere.pem"},
        r"The TLS certificate for the client is not usable: .*No such",
    ),
    "no key": ({"tls_worker_key": "-----\n"}, r"The TLS certificate for the worker is not usable: "),
}


@pytest.mark.parametrize(("change", "message"), INVALID_SECURITY.values(), ids=INVALID_SECURITY)
def test_validate_security_rejects_incomplete_certificates(change, message):
    from distributed import Security

    complete = Security.temporary()
    fields = {
        name: getattr(complete, name)
        for name in complete.__slots__
        if name.startswith("tls_") and "version" not in name
    }
    with pytest.raises(ConfigurationError, match=message):
        validate_security(Security(**({**fields, **change} if change else {})))
    with pytest.raises(ConfigurationError, match="Invalid type for security: str"):
        validate_security("tls")


def test_login_uses_ssh_configuration_by_default(tmp_path):
    key, known = (str(tmp_path / name) for name in ("k", "f"))
    for path in (key, known):
        Path(path).touch()
    expected = {"username": "me", "client_keys": [key], "port": 22, "known_hosts": known}
    login = SshLogin.from_arguments("me", key, 22, Path(known), None)

    assert login.command("mac1") == f"ssh -i {key} -p 22 -o UserKnownHostsFile={known} me@mac1"
    assert login.options == {**SshLogin().options, **expected}
    assert SshLogin().options.keys() == {"connect_timeout", "keepalive_interval"}
    assert validate_hosts(iter(HOSTS)) == ("127.0.0.1", "localhost")
