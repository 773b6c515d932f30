"""Faults of workers, put into the workers of a test's cluster: a word in a text that ends the process that reads it.

The plugin is set up in every worker process, also in one that is started again. It watches the forward passes of all torch
modules through torch's own hook; the words are those of ``tiny_models``.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from distributed import WorkerPlugin


class Fault(WorkerPlugin):
    """Does something in a worker when its model is given a certain token.

    Args:
        token: The number of the token.
        vocabulary: How many tokens the model knows; that tells its words from its positions.
        action: The name of a function here.
        log: A folder in which each time leaves a file.
        times: How often it happens in all; always where it is 0.
        least: Of how many tokens at once.
    """

    name = "fault"

    def __init__(  # noqa: PLR0913 - each is one thing of a fault
        self, token: int, vocabulary: int, action: str, log: Path, *, times: int = 0, least: int = 1
    ) -> None:
        self.token, self.vocabulary, self.action, self.log = token, vocabulary, action, log
        self.times, self.least = times, least

    def setup(self, worker: Any) -> None:  # noqa: ARG002 - Dask's signature
        """Watch the forward passes of this process."""
        from torch.nn.modules.module import register_module_forward_pre_hook

        self.hook = register_module_forward_pre_hook(self.before)

    def before(self, module: Any, inputs: Any) -> None:
        """Look at the tokens that the words' embedding is given."""
        if getattr(module, "num_embeddings", None) != self.vocabulary or not (inputs[0] == self.token).any():
            return
        if inputs[0].numel() < self.least:
            return
        if not self.times or len(list(self.log.iterdir())) < self.times:
            (self.log / f"{os.getpid()} {time.time_ns()}").touch()
            ACTIONS[self.action]()

    def teardown(self, worker: Any) -> None:  # noqa: ARG002 - Dask's signature
        """Stop watching."""
        self.hook.remove()


def die() -> None:
    """End this process as a signal that nothing can catch does."""
    os.kill(os.getpid(), signal.SIGKILL)


def fill_memory() -> None:
    """Use more memory than a worker may, and hold it for a while."""
    held = b"x" * (3 * 10**9)
    time.sleep(30)
    del held


def fail() -> None:
    """Fail as a broken device does."""
    raise RuntimeError("it fails")


def run_out() -> None:
    """Fail as a device does that is short of memory."""
    import torch

    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")


ACTIONS = {"die": die, "fill_memory": fill_memory, "fail": fail, "run_out": run_out}
