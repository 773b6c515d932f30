"""Fixtures: a real kernel, a shell without a kernel, new processes and a strict HTML parser."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell
from jupyter_client.blocking import BlockingKernelClient
from jupyter_client.manager import KernelManager
from traitlets.config import Config

ANSI = re.compile(r"\x1b\[[0-9;]*m")

TIMEOUT_SECONDS = 240
"""Timeout for a kernel or a process on a busy machine."""

Message = dict[str, Any]

PACKAGE_PREFIXES = ("OPENMED_", "PYTORCH_", "ACCELERATE_", "HF_")

SESSION_STATE = (
    "(lambda s, os: (s.device().to_dict(), dict(os.environ), [str(key) for key in s.models._models]))"
    "(__import__('openmed_nb.session', fromlist=['']).SESSION, __import__('os'))"
)
"""An expression for the state that an error must not change."""


@dataclasses.dataclass
class Reply:
    """Output of a kernel for one cell.

    Attributes:
        status: ``"ok"`` or ``"error"``.
        error: The error's name, value and traceback lines, without colors.
        shown: Data of all displayed or returned values, the result last.
        streams: Printed text, under ``"stdout"`` and ``"stderr"``.
        page: Pager content, as for ``%magic?``.
        outputs: The messages of displayed and printed output and of errors, in order.
    """

    status: str
    error: tuple[str, str, list[str]]
    shown: list[dict[str, str]]
    streams: dict[str, str]
    page: str
    outputs: list[Message]

    @property
    def text(self) -> str:
        """The text form of the result, empty where there is none."""
        return self.shown[-1].get("text/plain", "") if self.shown else ""

    @property
    def html(self) -> str:
        """The HTML form of the result, empty where there is none."""
        return self.shown[-1].get("text/html", "") if self.shown else ""


class Kernel:
    """A running kernel with its client and the function that interrupts it, as the stop button does."""

    def __init__(self, client: BlockingKernelClient, interrupt: Callable[[], None]) -> None:
        self.client = client
        self.interrupt = interrupt

    def run(self, code: str, *, interactive: bool = False, on_message: Callable[[Message], object] = id) -> Reply:
        """Run a cell and return its output as a front end receives it.

        Args:
            code: The cell.
            interactive: Whether a user runs it, who answers ``input()``.
            on_message: Called with each message when it arrives.
        """
        messages: list[Message] = []

        def record(message: Message) -> None:
            messages.append(message)
            on_message(message)

        reply = self.client.execute_interactive(
            code, output_hook=record, allow_stdin=interactive, stop_on_error=False, timeout=TIMEOUT_SECONDS
        )
        return collect(reply["content"], messages)

    def run_cell(self, cell: str, code: str) -> str:
        """Run a cell that the front end names, as JupyterLab names its cells, and return its status."""
        request = {"code": code, "silent": False, "store_history": True, "user_expressions": {}, "allow_stdin": False}
        request["stop_on_error"] = (
            False  # Otherwise the kernel may cancel the next request, because it replies before it clears its queue.
        )
        message = self.client.session.msg("execute_request", request, metadata={"cellId": cell})
        self.client.shell_channel.send(message)
        answers = iter(partial(self.client.get_shell_msg, timeout=TIMEOUT_SECONDS), None)
        mine = (reply for reply in answers if reply["parent_header"].get("msg_id") == message["header"]["msg_id"])
        return str(next(mine)["content"]["status"])

    def value(self, expression: str) -> Any:
        """Return the value of a Python expression made of plain literals, as the kernel has it."""
        reply = self.run(f"print(repr({expression}))")
        assert reply.status == "ok", reply
        return ast.literal_eval(reply.streams["stdout"])

    def state(self) -> Any:
        """Return the state that an error must not change."""
        return self.value(SESSION_STATE)

    def complete(self, code: str) -> list[str]:
        """Return the completions at the end of the code, in the order of the menu."""
        reply = self.client.complete(code, len(code), reply=True, timeout=TIMEOUT_SECONDS)
        return list(reply["content"]["matches"])


def collect(content: Message, messages: list[Message]) -> Reply:
    """Sort the messages of one cell."""
    streams: dict[str, str] = {}
    for body in (message["content"] for message in messages if message["msg_type"] == "stream"):
        streams[body["name"]] = streams.get(body["name"], "") + body["text"]
    shown = [
        message["content"]["data"] for message in messages if message["msg_type"] in ("execute_result", "display_data")
    ]
    errors = [message["content"] for message in messages if message["msg_type"] == "error"]
    error = errors[-1] if errors else {"ename": "", "evalue": "", "traceback": []}
    traceback = [ANSI.sub("", line) for line in error["traceback"]]
    page = "".join(ANSI.sub("", child["data"]["text/plain"]) for child in content.get("payload", ()) if "data" in child)
    types = ("display_data", "update_display_data", "stream", "error")
    outputs = [message for message in messages if message["msg_type"] in types]
    return Reply(content["status"], (error["ename"], error["evalue"], traceback), shown, streams, page, outputs)


def environment(**changes: str) -> dict[str, str]:
    """Return the environment of a new process: offline, and without a device request except the given ones."""
    device_variables = ("OPENMED_TORCH_DEVICE", "OPENMED_DEVICE", "ACCELERATE_USE_CPU")
    inherited = {name: value for name, value in os.environ.items() if name not in device_variables}
    return {**inherited, "HF_HUB_OFFLINE": "1", **changes}


@pytest.fixture
def as_recorded(request: pytest.FixtureRequest) -> Callable[[str, Any], None]:
    """Return a function that compares a value with its snapshot; ``--record`` writes the snapshot first."""

    def as_recorded(name: str, shown: Any) -> None:
        file = Path(__file__).parents[1] / "recorded" / f"{name}.json"
        if request.config.getoption("record"):
            file.write_text(f"{json.dumps(shown, indent=1, ensure_ascii=False)}\n", "utf-8")
        assert shown == json.loads(file.read_text("utf-8"))

    return as_recorded


@pytest.fixture(scope="session")
def run_ipython(tmp_path_factory):
    """Return the function that runs code in a fresh terminal IPython and returns the finished process."""
    folder = tmp_path_factory.mktemp("terminal")

    def run(code: str, *arguments: str, profile: str = "", **changes: str) -> subprocess.CompletedProcess[str]:
        home = folder / str(len(list(folder.iterdir())))
        (home / "profile_default").mkdir(parents=True)
        (home / "profile_default" / "ipython_config.py").write_text(profile, "utf-8")
        return subprocess.run(
            [sys.executable, "-m", "IPython", "--no-banner", "--colors=NoColor", *arguments, "-c", code],
            env=environment(IPYTHONDIR=str(home), **changes),
            cwd=home,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )

    return run


@pytest.fixture(scope="session")
def running_kernel(tmp_path_factory) -> Callable[..., contextlib.AbstractContextManager[Kernel]]:
    """Return the function that runs a kernel for a with block, in a folder of its own; its shell asks for the CPU."""

    @contextlib.contextmanager
    def running(**changes: str) -> Iterator[Kernel]:
        folder = str(tmp_path_factory.mktemp("kernel"))
        manager = KernelManager(kernel_name="python3")
        manager.kernel_spec.argv[0] = sys.executable
        manager.start_kernel(env=environment(IPYTHONDIR=folder, OPENMED_DEVICE="cpu", **changes), cwd=folder)
        client = manager.blocking_client()
        client.start_channels()
        try:
            client.wait_for_ready(timeout=TIMEOUT_SECONDS)
            running = Kernel(client, manager.interrupt_kernel)
            running.run("import matplotlib.font_manager")  # It may print messages about its cache.
            yield running
        finally:
            client.stop_channels()
            manager.shutdown_kernel(now=True)
            manager.cleanup_resources()

    return running


@pytest.fixture(scope="session")
def _running_kernel(running_kernel: Callable[..., contextlib.AbstractContextManager[Kernel]]) -> Iterator[Kernel]:
    with running_kernel() as running:
        yield running


@pytest.fixture
def kernel(_running_kernel: Kernel) -> Kernel:
    """Return a real kernel with a newly loaded extension, whose environment requests the CPU.

    The existing objects are frozen, because collecting those of the libraries takes most of the time.
    """
    _running_kernel.run("get_ipython().config.pop('OpenMedMagics', None)\n%reload_ext openmed_nb")
    _running_kernel.run("__import__('gc').freeze()")
    return _running_kernel


@pytest.fixture
def watch() -> Iterator[Callable[..., Any]]:
    """Return the function that opens a panel without widgets, which keeps what it has shown; all are closed at the end."""
    from helpers.panels import Watched

    panels = []

    def watch(*arguments: Any, **named: Any) -> Any:
        panels.append(Watched(*arguments, **named))
        return panels[-1]

    yield watch
    for panel in panels:
        panel.close()


@pytest.fixture
def shell(tmp_path, quick_collection) -> Iterator[InteractiveShell]:  # noqa: ARG001 - each shell ends with one
    """Return a shell of this process with the extension loaded, and restore the process afterwards."""
    from helpers.session_state import read_environment
    from openmed_nb.session import SESSION

    before = read_environment()
    config = Config({"HistoryManager": {"enabled": False}, "OpenMedMagics": {"default_model": "bundled_small"}})
    made = InteractiveShell.instance(ipython_dir=str(tmp_path), config=config)
    made.run_line_magic("load_ext", "openmed_nb")
    yield made
    made.extension_manager.unload_extension("openmed_nb")
    SESSION.unload()
    made.restore_sys_module_state()
    InteractiveShell.clear_instance()
    after = read_environment()
    for name in after.keys() - before.keys():
        del os.environ[name]  # torch and transformers leave two of their own
    assert not [name for name in after if name.startswith(PACKAGE_PREFIXES) and after[name] != before.get(name)]
