"""A real kernel, and the output that a front end receives from it."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import os
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from jupyter_client.blocking import BlockingKernelClient
from jupyter_client.manager import KernelManager

ANSI = re.compile(r"\x1b\[[0-9;]*m")

TIMEOUT_SECONDS = 240
"""Timeout for a kernel or a process on a busy machine."""

Message = dict[str, Any]

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
    def is_empty(self) -> bool:
        """Whether the cell ran without an error and without output."""
        return (self.status, self.shown, self.streams) == ("ok", [], {})

    @property
    def text(self) -> str:
        """The text form of the result, empty where there is none."""
        return self.shown[-1].get("text/plain", "") if self.shown else ""

    @property
    def html(self) -> str:
        """The HTML form of the result, empty where there is none."""
        return self.shown[-1].get("text/html", "") if self.shown else ""


class Kernel:
    """A running kernel with its client, its manager and the function that interrupts it, as the stop button does."""

    def __init__(self, client: BlockingKernelClient, manager: KernelManager) -> None:
        self.client = client
        self.manager = manager
        self.interrupt = manager.interrupt_kernel

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
        return list(self.client.complete(code, len(code), reply=True, timeout=TIMEOUT_SECONDS)["content"]["matches"])


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


@contextlib.contextmanager
def run_kernel(folder: str, **changes: str) -> Iterator[Kernel]:
    """Run a kernel in a folder for a with block. Its environment requests the CPU, with the given changes."""
    manager = KernelManager(kernel_name="python3")
    manager.kernel_spec.argv[0] = sys.executable
    manager.start_kernel(env=environment(IPYTHONDIR=folder, OPENMED_DEVICE="cpu", **changes), cwd=folder)
    client = manager.blocking_client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=TIMEOUT_SECONDS)
        yield Kernel(client, manager)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
        manager.cleanup_resources()
