"""A cluster over real SSH: a server on 127.0.0.1 with keys of its own stands for two hosts."""

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
    hosts_that_share_gpus,
    listen_addresses,
    parse_probe_output,
    validate_hosts,
)
from openmed_nb.distributed.starting import validate_security
from openmed_nb.errors import ClusterUnavailableError, ConfigurationError, WorkerMismatchError

pytestmark = [
    pytest.mark.real_computer,  # Hosts are processes.
    pytest.mark.skipif(sys.platform == "win32", reason="the server of SSH is one of POSIX"),
]

FOLDER = Path(__file__).parent
HOSTS = ["127.0.0.1", "localhost"]
COUNT = 240
ANSWER = '{"version": "%s", "gpus": 2, "visible": %s, "connection": %s}'


@pytest.fixture(scope="module")
def server(helper, tmp_path_factory):
    """A server of SSH that lets one key in, and whose key is known."""
    module = helper(FOLDER / "ssh_server.py")
    with module.ssh_server(tmp_path_factory.mktemp("ssh"), str(FOLDER.parents[1])) as server:
        yield server


@pytest.fixture(scope="module")
def login(server):
    """What lets us in."""
    return server.login


@pytest.fixture(scope="module")
def one_host(login):
    """A cluster of one host."""
    with nb.cluster(hosts=HOSTS[:1], device="cpu", threads=1, **login) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def two_hosts(login):
    """A cluster of two hosts."""
    with nb.cluster(hosts=HOSTS, device="cpu", threads=1, **login) as cluster:
        yield cluster


def processes_of(client):
    """Return the processes of a cluster: workers, the nannies that watch them, and the scheduler."""
    workers = [*client.run(os.getpid).values(), *client.run(os.getppid).values()]
    return [*workers, client.run_on_scheduler(os.getpid)]


def started_by(server):
    """Return the command lines of what runs on the hosts for a cluster, without those that wait to be reaped."""
    found = []
    for process in psutil.Process(server.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
    return [line for line in found if "dask_spec" in line or "multiprocessing" in line]


def wait_until(condition):
    """Wait until something is so, at most two minutes."""
    deadline = time.monotonic() + 120
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


@pytest.fixture
def python_that(tmp_path):
    """A function that makes a Python of a host which does something else where its arguments match a pattern of the shell."""

    def python_that(pattern, instead):
        python = tmp_path / "python of mine"
        python.write_text(f'#!/bin/sh\ncase "$*" in {pattern}) {instead}; exit 1;; esac\nexec {sys.executable} "$@"\n')
        python.chmod(0o755)
        return python

    return python_that


def folder_of(client):
    """Return the folder of the certificates of a cluster of one host."""
    (file,) = client.run(dask.config.get, "distributed.comm.tls.ca-file").values()
    return Path(file).parent


def folders():
    """Return the folders of certificates that are there now."""
    return set(Path("/tmp").glob("openmed_nb-*"))  # noqa: S108


def test_one_host(one_host):
    """A host says who it is, and where all hosts are this computer, nothing listens for another one."""
    connections = [one for pid in processes_of(one_host.client) for one in psutil.Process(pid).net_connections()]

    assert str(one_host) == "1 worker (cpu) on 1 computer\n  cpu: 'cpu' was asked for by argument."
    assert one_host.to_dict()["workers"][0]["versions"]["openmed_nb"] == nb.__version__
    assert {one.laddr.ip for one in connections if one.status == psutil.CONN_LISTEN} == {"127.0.0.1"}


def test_connections_are_encrypted(one_host):
    """Only a process with a certificate of the cluster can talk to it, and nobody else on a host can read that."""
    from distributed import Client

    address, folder = one_host.client.scheduler.address, folder_of(one_host.client)

    assert address.startswith("tls://")
    assert {oct(one.stat().st_mode & 0o777) for one in (folder, *folder.iterdir())} == {"0o700", "0o600"}
    with pytest.raises(OSError, match=r"Timed out|reset|closed"):
        Client(address.replace("tls", "tcp"), timeout=2)


@pytest.mark.slow
def test_answers(two_hosts, keyword_model, numbered):
    """Hosts answer as this computer does."""
    found = nb.annotate(numbered(COUNT), keyword_model, client=two_hosts.client, progress=False)

    assert list(found) == list(nb.annotate(numbered(COUNT), keyword_model, device="cpu", progress=False))


@pytest.mark.slow
def test_host_that_goes_away(two_hosts, keyword_model, numbered, numbers_of, tmp_path):
    """A host that goes away in the middle of a run, with all its processes, costs no text, and none is answered twice."""
    file, client = tmp_path / "run.jsonl", two_hosts.client
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
    assert numbers_of(found) == [[number] for number in range(COUNT)]
    assert found.errors == {}
    assert [*client.run(os.getpid).values()] == [pids[1][1]]


class TestEnd:
    """What is left on a host, and in this process."""

    @pytest.fixture(autouse=True)
    def nothing_is_left(self, server):
        """A test leaves no process on a host, no certificate there, and no thread or socket here."""
        there, before, here = sorted(started_by(server)), folders(), len(psutil.Process().net_connections())
        threads = {thread.name for thread in threading.enumerate()}
        yield
        assert wait_until(lambda: sorted(started_by(server)) == there)
        assert wait_until(lambda: folders() <= before)
        assert len(psutil.Process().net_connections()) <= here
        assert {thread.name for thread in threading.enumerate()} - threads <= {"tqdm_monitor"}

    def test_end_of_the_block(self, server, login):
        """When the block ends, no process of the cluster runs on a host any more, and no certificate is there."""
        there = started_by(server)
        with nb.cluster(hosts=HOSTS[:1], device="cpu", **login) as cluster:
            pids = processes_of(cluster.client)
            folder = folder_of(cluster.client)
            assert folder in folders()

        assert len(pids) == 3
        assert folder not in folders()
        assert sorted(started_by(server)) == sorted(there)

    @pytest.mark.slow
    def test_scheduler_that_is_gone(self, login):
        """Where the scheduler is gone, the rest ends all the same, and the error of the block is the one that is told."""

        def run():
            with nb.cluster(hosts=HOSTS[:1], device="cpu", **login) as cluster:
                os.kill(cluster.client.run_on_scheduler(os.getpid), signal.SIGKILL)
                raise LookupError("of the block")

        with pytest.raises(LookupError, match="of the block"):
            run()

    @pytest.mark.slow
    def test_interrupted_start(self, server, login, interrupt_when):
        """An interrupt while the processes start ends those that have."""
        before = len(started_by(server))
        with pytest.raises(KeyboardInterrupt), interrupt_when(lambda: len(started_by(server)) > before):
            nb.cluster(hosts=HOSTS[:1], **login)

    @pytest.mark.slow
    @pytest.mark.parametrize("what", ["Scheduler", "Nanny"])
    def test_start_that_fails(self, login, python_that, what):
        """Where one process does not start, its host is named, and those that did are ended."""
        python = python_that(f"*distributed.{what}*", "true")
        message = r"^The cluster does not start on 127\.0\.0\.1: .*failed to start\. Look"
        with pytest.raises(ClusterUnavailableError, match=message):
            nb.cluster(hosts=HOSTS[:1], **login, remote_python=python)

    @pytest.mark.slow
    def test_two_starts_at_once(self, login):
        """Clusters that start at once in two threads each have their own certificates, and Dask's settings are as before."""
        before = copy.deepcopy(dask.config.config)

        def run(_number):
            with nb.cluster(hosts=HOSTS[:1], device="cpu", **login) as cluster:
                return len(cluster.client.run(os.getpid))

        with ThreadPoolExecutor(2) as threads:
            assert [*threads.map(run, range(2))] == [1, 1]
        assert dask.config.config == before

    @pytest.mark.slow
    def test_killed_client(self, server, login, tmp_path):
        """Where the process that began a cluster is killed, its processes on hosts end, and the certificates go."""
        program, before = tmp_path / "program.py", len(started_by(server))
        access = {name: value if isinstance(value, int) else str(value) for name, value in login.items()}
        program.write_text(
            "import openmed_nb as nb\n"
            "if __name__ == '__main__':\n"
            f"    nb.cluster(hosts=['127.0.0.1'], device='cpu', **{access})\n"
            "    print('started', flush=True)\n"
            "    input()\n"
        )
        with subprocess.Popen([sys.executable, program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            said = process.stdout.readline()
            during = len(started_by(server))
            process.kill()

        assert (said, process.returncode) == (b"started\n", -signal.SIGKILL)
        assert during > before


@pytest.mark.slow
def test_a_gpu_for_each_worker(login, python_that):
    """Each worker of a host sees a GPU of its own, also after a restart; one that has none computes on the CPU."""
    answer = ANSWER % (nb.__version__, "null", '"- - 127.0.0.1 -"')
    python = python_that('*" gpus"', f"echo '{answer}'")
    with nb.cluster(hosts=HOSTS[:1] * 2, threads=1, **login, remote_python=python) as pool:
        first = sorted(pool.client.run(os.getenv, "CUDA_VISIBLE_DEVICES").values())
        pool.client.restart()
        again = sorted(pool.client.run(os.getenv, "CUDA_VISIBLE_DEVICES").values())

    assert first == again == ["0", "1"]
    assert {member.device for member in pool.workers.workers} == {"cpu"}


def test_what_each_process_is_given():
    """A worker has its device and its share of the host's memory; all run with the connection, and listen on one address."""
    from distributed.deploy import ssh

    login = SshLogin("me", python="/my folder/python")
    plans = [WorkerSpec(None), WorkerSpec("cuda", "1"), WorkerSpec("cpu", threads=1)]

    async def made():
        return build_cluster(
            ["a", "a", "b"], plans, {"a": HostInfo("10.0.0.2"), "b": HostInfo()}, login, validate_security(None)
        )

    cluster = asyncio.run(made())
    specs = [cluster.scheduler_spec, *cluster.worker_spec.values()]
    scheduler, *workers = [spec["options"]["kwargs"] for spec in specs]

    assert [spec["cls"] for spec in specs] == [ssh.Scheduler, ssh.Worker, ssh.Worker, ssh.Worker]
    assert [*cluster.worker_spec] == [0, 1, 2]
    assert [spec["options"]["address"] for spec in specs] == ["a", "a", "a", "b"]
    python = "'/my folder/python' -m openmed_nb.distributed.tethered"
    assert {spec["options"]["remote_python"] for spec in specs} == {python}
    assert [one.get("host") for one in (scheduler, *workers)] == ["10.0.0.2"] * 3 + [None]
    assert [one["memory_limit"] for one in workers] == [0.5, 0.5, 1.0]
    assert [one["nthreads"] for one in workers] == [2, 2, 1]
    assert [one["env"].get("OPENMED_TORCH_DEVICE") for one in workers] == [None, "cuda", "cpu"]
    assert workers[1]["env"]["CUDA_VISIBLE_DEVICES"] == "1"


UNUSABLE = {
    "unknown host": (
        {"known_hosts": "user.pub"},
        r"^The key of host localhost is not among .* Run ssh -i .*user -p \d+ -o UserKnownHostsFile=.*@localhost once",
    ),
    "changed host": ({"known_hosts": "changed_hosts"}, r"^The key of host localhost is not"),
    "unknown key": ({"key": "stranger"}, r"^localhost does not let you in: .*\. Name user and key\.$"),
    "no key": (
        {"key": "log"},
        r"^The key for localhost cannot be used: Invalid private key\. Where it has a passphrase",
    ),
    "no server": ({"port": 1}, r"^localhost cannot be used over SSH: .*\. Check its name and port\.$"),
    "no Python": ({"remote_python": "/nowhere/python"}, r"^'/nowhere/python' on localhost cannot be used: "),
    "other program": (
        {"remote_python": "/bin/echo"},
        r"^'/bin/echo' on localhost cannot be used: -c import distributed",
    ),
}


@pytest.mark.parametrize(("wrong", "message"), UNUSABLE.values(), ids=UNUSABLE)
def test_host_that_cannot_be_used(server, login, wrong, message):
    """A host that is not the one that is known, lets nobody in or has no openmed_nb is named, and nothing is started."""
    given = {name: server.folder / value if name in ("key", "known_hosts") else value for name, value in wrong.items()}
    with pytest.raises(ClusterUnavailableError, match=message):
        nb.cluster(hosts=["localhost"], **{**login, **given})


ANSWERS = {
    "greeting": ("Welcome!\n" + ANSWER % (1, "null", '"10.0.0.1 5 10.0.0.2 22"'), HostInfo("10.0.0.2", ("0", "1"))),
    "named GPUs": (ANSWER % (1, '"3,GPU-5a"', '""'), HostInfo("", ("3", "GPU-5a"))),
    "no connection": (ANSWER % (1, "null", "null"), HostInfo("", ("0", "1"))),
}
NO_ANSWERS = {
    "version": (ANSWER % (2, "null", "null"), "", "mac1 has openmed_nb 2, and this process has 1. Install the same"),
    "complaint": ("", "no such file", "'python' on mac1 cannot be used: no such file. Install openmed-nb[cluster]"),
    "other": ("5", "", "'python' on mac1 cannot be used: 5."),
    "nothing": ("", "", "'python' on mac1 cannot be used: it says nothing."),
}


@pytest.mark.parametrize(("output", "host"), ANSWERS.values(), ids=ANSWERS)
def test_answer_of_a_host(output, host):
    """A host says by which address it was reached, and what its GPUs are called; a shell may greet before."""
    assert parse_probe_output("mac1", "python", "1", output, "") == host


@pytest.mark.parametrize(("output", "errors", "message"), NO_ANSWERS.values(), ids=NO_ANSWERS)
def test_answer_that_cannot_be_used(output, errors, message):
    """What is no answer of openmed_nb, or one of another version, is an error that names the host."""
    with pytest.raises(WorkerMismatchError if "version" in output else ClusterUnavailableError) as caught:
        parse_probe_output("mac1", "python", "1", output, errors)
    assert str(caught.value).startswith(message)


LISTEN = {
    "this computer": ({"a": "127.0.0.1", "b": "::1"}, {"a": "127.0.0.1", "b": "[::1]"}),
    "others": ({"a": "10.0.0.2", "b": "2001:db8::1"}, {"a": "10.0.0.2", "b": "[2001:db8::1]"}),
    "this one and another": ({"a": "127.0.0.1", "b": "10.0.0.2"}, {"b": "10.0.0.2"}),
    "by a cable": ({"a": "fe80::1%en0", "b": "169.254.3.4"}, {}),
    "not known": ({"a": "", "b": "127.0.0.1"}, {}),
}


@pytest.mark.parametrize(("reached", "expected"), LISTEN.values(), ids=LISTEN)
def test_addresses_to_listen_on(reached, expected):
    """A process listens on the address by which its host was reached, where that means the same computer for all."""
    assert listen_addresses({name: HostInfo(address) for name, address in reached.items()}) == expected


@pytest.mark.parametrize(
    ("device", "hosts"), [(None, {"a"}), ("cuda", {"a"}), ("cuda:1", set()), ("cpu", set()), ("mps", set())]
)
def test_hosts_that_count_their_gpus(device, hosts):
    """GPUs are counted, which needs torch, where several workers of a host may run on them."""
    assert hosts_that_share_gpus(["a", "b", "a"], device) == hosts


def test_certificates_of_a_person():
    """Certificates that are files on every host are named, and nothing is written."""
    from distributed import Security

    own = Security(tls_ca_file="ca.pem", tls_worker_cert="w.pem", require_encryption=True)
    _folder, files, config = certificate_files(own)
    _folder, made_files, made_config = certificate_files(validate_security(None))

    assert (files, config["distributed.comm.tls.ca-file"]) == ({}, "ca.pem")
    assert len(made_files) == 5
    assert "PRIVATE" not in str(made_config)


NO_SECURITY = {
    "no certificates": ({}, r"security has no tls_ca_file, tls_client_cert, tls_scheduler_cert, tls_worker_cert\."),
    "one is missing": ({"tls_worker_cert": None}, r"security has no tls_worker_cert\."),
    "no file": (
        {"tls_client_cert": "nowhere.pem"},
        r"The certificate of security for the client cannot be used: .*No such",
    ),
    "no key": ({"tls_worker_key": "-----\n"}, r"The certificate of security for the worker cannot be used: "),
}


@pytest.mark.parametrize(("change", "message"), NO_SECURITY.values(), ids=NO_SECURITY)
def test_what_are_no_certificates(change, message):
    """What has no certificates, or some that cannot be read, is refused before anything starts."""
    from distributed import Security

    made = Security.temporary()
    fields = {name: getattr(made, name) for name in made.__slots__ if name.startswith("tls_") and "version" not in name}
    with pytest.raises(ConfigurationError, match=message):
        validate_security(Security(**({**fields, **change} if change else {})))
    with pytest.raises(ConfigurationError, match="security cannot be str"):
        validate_security("tls")


def test_login_leaves_the_rest_to_ssh(tmp_path):
    """What is not said is as in the settings of SSH; the check of the host's key cannot be switched off."""
    key, known = (str(tmp_path / name) for name in ("k", "f"))
    for path in (key, known):
        Path(path).touch()
    named = {"username": "me", "client_keys": [key], "port": 22, "known_hosts": known}
    given = SshLogin.from_arguments("me", key, 22, Path(known), None)

    assert given.command("mac1") == f"ssh -i {key} -p 22 -o UserKnownHostsFile={known} me@mac1"
    assert given.options == {**SshLogin().options, **named}
    assert SshLogin().options.keys() == {"connect_timeout", "keepalive_interval"}
    assert validate_hosts(iter(HOSTS)) == ("127.0.0.1", "localhost")
