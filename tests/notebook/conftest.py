"""Fixtures: a real kernel, a shell without a kernel, new processes and a strict HTML parser."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from helpers.kernels import TIMEOUT_SECONDS, Kernel, environment, run_kernel

PACKAGE_PREFIXES = ("OPENMED_", "PYTORCH_", "ACCELERATE_", "HF_")


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
    return lambda **changes: run_kernel(str(tmp_path_factory.mktemp("kernel")), **changes)


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
def shell(tmp_path) -> Iterator[InteractiveShell]:
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
