"""Workers of a cluster: display, and differences that are rejected."""

from dataclasses import replace

import pytest

import openmed_nb as nb
from openmed_nb.distributed.client import (
    ReadyWorker,
    WorkerInfo,
    WorkerList,
    check_workers_match,
    is_running,
    parse_host,
    require_extra,
)
from openmed_nb.errors import ConfigurationError, WorkerMismatchError

VERSIONS = {"openmed_nb": nb.__version__, "torch": "2.13.0", "transformers": "5.23.0", "tokenizers": "0.23.3"}
MAC = WorkerInfo("mac1", "mps", "No device was requested, and mps has the highest priority.", VERSIONS)
LINUX = WorkerInfo("box", "cuda", "'cuda' was requested by the device argument.", VERSIONS)
SETTINGS = {"model": "1f", "aggregation_strategy": "first"}


def make_ready(info, settings=SETTINGS, **versions):
    """Return a worker that has loaded a model, with the given package versions."""
    return ReadyWorker(replace(info, versions={**VERSIONS, **versions}), settings, 65536)


def test_worker_list_displays_hosts_and_reasons():
    workers = WorkerList((MAC, MAC, LINUX))

    assert str(workers).startswith("3 workers (cuda, mps) on 2 hosts\nWorkers (this run)\n")
    assert all(value in str(workers) for value in ("mac1", "'cuda' was requested"))
    assert workers.to_dict()["workers"][2]["device"] == "cuda"


@pytest.mark.parametrize(
    "workers",
    [
        [make_ready(MAC), make_ready(LINUX)],
        [make_ready(MAC), replace(make_ready(LINUX), chunk_characters=1)],
        [make_ready(MAC, torch="2.6.0")],
    ],
    ids=["devices", "chunks", "alone"],
)
def test_check_workers_match_accepts_different_devices(workers):
    check_workers_match(workers)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (make_ready(LINUX, torch="2.12.0"), "torch 2.12.0, but 2.13.0 is required"),
        (make_ready(LINUX, tokenizers="0.22.0"), "tokenizers 0.22.0, but"),
        (make_ready(LINUX, openmed_nb="0.0.1"), f"openmed_nb 0.0.1, but {nb.__version__} is required"),
        (make_ready(LINUX, {**SETTINGS, "model": "2e"}), "a different model or"),
        (make_ready(LINUX, {**SETTINGS, "aggregation_strategy": "max"}), "a different model or"),
    ],
)
def test_check_workers_match_names_the_different_host(other, message):
    with pytest.raises(WorkerMismatchError, match=f"^The worker on box has {message}"):
        check_workers_match([make_ready(MAC), other])


@pytest.mark.parametrize(
    ("worker", "expected"),
    [
        ({"status": "running"}, True),
        ({"status": "paused"}, False),
        ({"status": "paused", "metrics": {"task_counts": {}}}, False),
        ({"status": "paused", "metrics": {"task_counts": {"executing": 1}}}, True),
    ],
)
def test_is_running_includes_paused_workers_with_a_task(worker, expected):
    assert is_running(worker) is expected


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("tcp://10.0.0.2:1", "10.0.0.2"),
        ("tls://[::1]:80", "::1"),
        ("inproc://10.0.0.2/1/1", "10.0.0.2"),
        ("odd", "odd"),
    ],
)
def test_parse_host_removes_protocol_and_port(address, host):
    assert parse_host(address) == host


def test_require_extra_names_the_install_command():
    message = (
        r"^A cluster needs it: No module named 'no_such_package'\. Install it: .* 'dask\[distributed\]' asyncssh\.$"
    )
    with pytest.raises(ConfigurationError, match=message):
        require_extra("no_such_package", "A cluster needs it")
