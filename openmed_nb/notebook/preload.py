"""Import of torch and transformers in the background, so that the first entities of a fresh kernel take less time.

A magic requests it, and a thread starts once the cell has returned. The thread imports, and has transformers prepare what it
keeps for all loads: it neither computes nor changes the session. A later cell that imports waits for the thread, or stops it if it has not started to import.

The thread starts only in a kernel whose cells a user runs. Programs that execute notebooks, such as nbval and nbconvert, do not
answer ``input()``.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import os
import re
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import NoReturn

from IPython.core.interactiveshell import ExecutionInfo, InteractiveShell

from .._events.progress import is_disabled, is_interactive
from .._utils.text import describe_names
from .._utils.warning import warn
from ..devices.backend import torch_import_error
from ..errors import TorchImportError
from ..session import SESSION

# ``0`` disables the import of torch and transformers in the background after the first magic.
PRELOAD_VARIABLE = "OPENMED_NB_PRELOAD"

# torch holds the interpreter lock for a second while its libraries are loaded. The kernel first sends the result of the cell.
START_DELAY_SECONDS = 0.3

# Maximum time that the exit of Python, a fork or the first use of torch waits for an import.
MAX_WAIT_SECONDS = 20

# Variables that torch, transformers or their libraries read while they are imported. Tokens are read when they are used.
_READ_AT_IMPORT_PATTERN = re.compile(r"CUDA_VISIBLE_DEVICES|(?:HF|MKL|OMP|PYTORCH|TRANSFORMERS)_(?!TOKEN$)\w+")

# A line that imports.
_IMPORT_PATTERN = re.compile(r"^\s*(?:import|from)\s", re.MULTILINE)

# Modules that the first annotation with a bundled model needs.
_MODEL_MODULES = (
    "transformers.pipelines.token_classification",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.bert.modeling_bert",
    "transformers.models.bert.tokenization_bert_legacy",
    "openmed_nb.annotation.pipeline",
    "openmed_nb.distributed.columns",
    "openmed_nb.models.records",
    "openmed_nb._annotate",
)

# Held while the thread imports. A forked child has neither the thread nor the modules that the thread has started to import.
_IMPORT_LOCK = threading.RLock()

# Names of the modules that other threads are still importing when a fork stops waiting.
_UNFINISHED_MODULES: list[str] = []


def _before_fork() -> None:
    """Wait until the thread does not import."""
    caller = sys._getframe(1).f_globals.get("__name__")  # noqa: SLF001 - traceback would read source files
    # The child of ``pty`` is replaced by a command after "!".
    is_acquired = _IMPORT_LOCK.acquire(timeout=0 if caller == "pty" else MAX_WAIT_SECONDS)
    _UNFINISHED_MODULES[:] = () if is_acquired else _modules_of_other_threads()


def _modules_of_other_threads() -> list[str]:
    """Return the names of the modules whose import locks other threads hold."""
    stacks = [stack for thread, stack in sys._current_frames().items() if thread != threading.get_ident()]  # noqa: SLF001
    frames = [frame for stack in stacks for frame, _line in traceback.walk_stack(stack)]
    code = "<frozen importlib._bootstrap>", "_find_and_load"
    return [frame.f_locals["name"] for frame in frames if (frame.f_code.co_filename, frame.f_code.co_name) == code]


def _after_fork_in_parent() -> None:
    with contextlib.suppress(RuntimeError):  # The wait ended without the lock.
        _IMPORT_LOCK.release()


def _after_fork_in_child() -> None:
    """Forget the preload. An import of a module that cannot be finished fails, because it would wait forever."""
    _IMPORT_LOCK._at_fork_reinit()  # type: ignore[attr-defined]  # noqa: SLF001
    sys.modules.update(dict.fromkeys(_UNFINISHED_MODULES))  # type: ignore[arg-type]
    SESSION.device_manager.on_torch_use = _raise_unfinished if _UNFINISHED_MODULES else None


def _raise_unfinished() -> NoReturn:
    SESSION.device_manager.on_torch_use = _raise_unfinished  # Otherwise it is called once.
    raise TorchImportError(
        "torch cannot be imported: another thread was importing it when this process was forked.",
        "Import torch before you start processes.",
    )


@functools.cache
def _register_fork_hooks() -> None:
    """Register the hooks once, after the modules whose own hooks hold a lock during a fork, so that the wait runs first."""
    importlib.import_module("concurrent.futures.thread")
    importlib.import_module("filelock")
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(
            before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child
        )


class Preloader:
    """Starts the imports after a cell, and reports at the first use of torch what went wrong in the meantime.

    Args:
        shell: Shell of the kernel.
        is_enabled: Function that returns the setting of the user.
    """

    def __init__(self, shell: InteractiveShell, is_enabled: Callable[[], bool]) -> None:
        self._shell = shell
        self._is_enabled = is_enabled
        self._thread: threading.Thread | None = None
        self._variables: Mapping[str, str] = {}
        self._torch_error: Exception | None = None
        self._finished = threading.Event()
        self._stopped = threading.Event()

    def schedule(self) -> None:
        """Start the imports when the current cell has returned."""
        if self._thread is None:
            self._shell.events.register("post_run_cell", self._start)

    def stop(self) -> None:
        """Do not start the imports, or end them after the current one."""
        self._stopped.set()
        for event, callback in (("post_run_cell", self._start), ("pre_run_cell", self._before_cell)):
            with contextlib.suppress(ValueError):  # Not registered.
                self._shell.events.unregister(event, callback)
        SESSION.device_manager.on_torch_use = None

    def _start(self, _result: object) -> None:
        self._shell.events.unregister("post_run_cell", self._start)
        if (
            is_disabled(PRELOAD_VARIABLE, os.environ)
            or not self._is_enabled()
            or not hasattr(self._shell, "kernel")
            or not is_interactive(self._shell.get_parent())
        ):
            return
        self._variables = _variables_read_at_import()
        SESSION.device_manager.on_torch_use = self._check
        self._thread = threading.Thread(target=self._run, name="openmed_nb preload", daemon=True)
        # A daemon thread does not survive the end of Python, which could crash in the middle of an import.
        atexit.register(self._finish, self._thread)
        _register_fork_hooks()
        self._shell.events.register("pre_run_cell", self._before_cell)
        self._thread.start()

    def _before_cell(self, info: ExecutionInfo) -> None:
        """Keep the imports of a cell and of the thread apart.

        An import of ``torch.nn`` does not wait for that of ``torch``, and parts of transformers import each other.
        """
        if _IMPORT_PATTERN.search(info.raw_cell) and _IMPORT_LOCK.acquire(timeout=MAX_WAIT_SECONDS):
            self._shell.events.unregister("pre_run_cell", self._before_cell)
            if not self._finished.is_set():  # The thread has not started to import.
                self.stop()
            _IMPORT_LOCK.release()

    def _finish(self, thread: threading.Thread) -> None:
        self._stopped.set()
        thread.join(MAX_WAIT_SECONDS)

    def _run(self) -> None:
        """Import torch, transformers and the pipeline."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._finished.set)
            if self._stopped.wait(START_DELAY_SECONDS):
                return
            stack.enter_context(_IMPORT_LOCK)
            if self._stopped.is_set():
                return
            try:
                importlib.import_module("torch")
            except Exception as error:  # noqa: BLE001 - a damaged installation can raise any error
                self._torch_error = error
                return
            # The first use repeats any other import that fails, and reports why.
            with contextlib.suppress(Exception):
                from ..models.loading import import_model_code

                import_model_code()
                for name in _MODEL_MODULES:
                    if not self._stopped.is_set():
                        importlib.import_module(name)
                # Otherwise, the first load of the process compiles the patterns of the names of all architectures' weights.
                importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("bert")

    def _check(self) -> None:
        """Wait for the imports, raise the error of torch, and warn of variables that were set too late.

        It is called once, so that the next use tries the import again.

        Raises:
            TorchImportError: If torch could not be imported.
        """
        self._finished.wait(MAX_WAIT_SECONDS)
        if self._torch_error is not None:
            raise torch_import_error(self._torch_error) from self._torch_error
        variables = _variables_read_at_import()
        changed = sorted(
            name for name in {*self._variables, *variables} if self._variables.get(name) != variables.get(name)
        )
        if changed:
            message = f"{describe_names(changed)} changed after torch and transformers were imported in the background"
            warn(
                f"{message}, and may have no effect. Restart the kernel, and set environment variables before the first openmed_nb command."
            )


def _variables_read_at_import() -> dict[str, str]:
    """Return the variables of the user that torch or transformers read while they are imported."""
    environ = SESSION.device_manager.user_environ
    return {name: value for name, value in environ.items() if _READ_AT_IMPORT_PATTERN.fullmatch(name)}
