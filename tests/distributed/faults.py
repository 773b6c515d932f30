"""Fault injection for the workers of a cluster: a token in a text triggers an action, such as a crash.

The plugin is set up in every worker process, including restarted workers. It uses a global forward hook of torch. The words
are those of ``tiny_models``.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from distributed import WorkerPlugin


class Fault(WorkerPlugin):
    """Plugin that runs an action in a worker when the input of the model contains a token.

    Args:
        token: Id of the token.
        vocabulary: Size of the vocabulary, which identifies the word embedding.
        action: Name of a function in ``ACTIONS``.
        log: Directory in which each action creates a file.
        times: Maximum number of actions. If 0, there is no limit.
        min_tokens: Minimum number of tokens in the input.
    """

    name = "fault"

    def __init__(  # noqa: PLR0913 - each parameter is independent
        self, token: int, vocabulary: int, action: str, log: Path, *, times: int = 0, min_tokens: int = 1
    ) -> None:
        self.token = token
        self.vocabulary = vocabulary
        self.action = action
        self.log = log
        self.times = times
        self.min_tokens = min_tokens

    def setup(self, worker: Any) -> None:  # noqa: ARG002 - signature of Dask
        """Register the hook in this process."""
        from torch.nn.modules.module import register_module_forward_pre_hook

        self.hook = register_module_forward_pre_hook(self.before)

    def before(self, module: Any, inputs: Any) -> None:
        """Run the action if the input of the word embedding contains the token."""
        if getattr(module, "num_embeddings", None) != self.vocabulary or not (inputs[0] == self.token).any():
            return
        if inputs[0].numel() < self.min_tokens:
            return
        if not self.times or len(list(self.log.iterdir())) < self.times:
            (self.log / f"{os.getpid()} {time.time_ns()}").touch()
            ACTIONS[self.action]()

    def teardown(self, worker: Any) -> None:  # noqa: ARG002 - signature of Dask
        """Remove the hook."""
        self.hook.remove()


def die() -> None:
    """Kill this process with a signal that cannot be caught."""
    os.kill(os.getpid(), signal.SIGKILL)


def fill_memory() -> None:
    """Use more memory than the limit of a worker for some time."""
    data = b"x" * (3 * 10**9)
    time.sleep(30)
    del data


def fail() -> None:
    """Raise the error of a broken device."""
    raise RuntimeError("it fails")


def run_out_of_memory() -> None:
    """Raise the error of a device without free memory."""
    import torch

    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")


ACTIONS = {"die": die, "fill_memory": fill_memory, "fail": fail, "run_out_of_memory": run_out_of_memory}
