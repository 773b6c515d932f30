"""How the tests run: offline, on one core of the CPU, from a clean session, and with nbval noticing what IPython only prints."""

from __future__ import annotations

import functools
import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nbval.kernel
import pytest

if TYPE_CHECKING:
    from xdist.scheduler import LoadFileScheduling

# Importing and collecting tests creates many objects and no garbage: collecting it then takes a tenth of the time.
gc.disable()

# The kernels that nbval starts inherit these; they are set before anything imports torch or huggingface_hub.
os.environ.update(HF_HUB_OFFLINE="1", OPENMED_TORCH_DEVICE="cpu", HF_HUB_DISABLE_TELEMETRY="1")

# Tests share the processor. Those of the check itself turn it on again.
os.environ["OPENMED_NB_CHECK_LOAD"] = "0"
os.environ.pop("OPENMED_DEVICE", None)

# Tests run in several processes at the same time, on models so small that a second thread only waits.
os.environ["OMP_NUM_THREADS"] = "1"

# A shell's background job ignores Ctrl-C, and so would this process and what it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

DATA = tempfile.mkdtemp(prefix="openmed_nb_tests_")
"""Folder for stored data during tests; other processes inherit it."""

# torch sets the second itself where it is first needed, which a test would take for a change of the environment.
os.environ.update(OPENMED_NB_DATA=DATA, TORCHINDUCTOR_CACHE_DIR=DATA)

# Kernels and browsers want to write to the home.
if not os.access(Path.home(), os.W_OK):
    os.environ["HOME"] = DATA


def pytest_configure() -> None:
    """Let nbval start a kernel again: it dies if another process takes one of its ports between their choice and their use."""
    start = nbval.kernel.start_new_kernel

    def start_again(*arguments: Any, **options: Any) -> Any:
        try:
            return start(*arguments, **options)
        except RuntimeError:
            return start(*arguments, **options)

    nbval.kernel.start_new_kernel = start_again


def pytest_unconfigure() -> None:
    """Remove what was kept."""
    shutil.rmtree(DATA, ignore_errors=True)


@pytest.fixture(scope="module", autouse=True)
def clean_session() -> Iterator[None]:
    """Leave the next module neither models nor a chosen device in the session of this process, nor what was found here.

    Its garbage collections, which many tests measure or start, do not visit what remains.
    """
    yield
    shutil.rmtree(Path(DATA, "certificates"), ignore_errors=True)
    session = sys.modules.get("openmed_nb.session")
    if session is not None:
        if session.SESSION.inventory():
            session.SESSION.unload()
        session.SESSION.stop()
    gc.collect()
    gc.freeze()


def pytest_collection_finish() -> None:
    """Exclude pytest, torch and transformers from garbage collections, which take half a second with them."""
    gc.enable()
    gc.collect()
    gc.freeze()
    # Loading a model asks whether objects are frozen, and counting a million objects takes up to a tenth of a second.
    gc.get_freeze_count = functools.update_wrapper(lambda: 1, gc.get_freeze_count)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the cells of each notebook together and from the top, before the shorter files, whatever shuffled them."""
    items.sort(key=lambda item: (0, str(item.path), item.cell_num) if hasattr(item, "cell_num") else (1, "", 0))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    """Keep the tests of clusters in one process, which starts their workers only once."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class OneProcessForClusters(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            folder = "tests/distributed/"
            return folder if nodeid.startswith(folder) else super()._split_scope(nodeid)

    return OneProcessForClusters(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, Any, Any]:
    """Let each notebook keep what it finds for itself, when its kernel starts."""
    with pytest.MonkeyPatch.context() as patch:
        if hasattr(item, "cell_num"):
            patch.setenv("OPENMED_NB_DATA", str(Path(DATA, item.path.stem)))
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Fail a notebook's cell that misused a magic: IPython prints a UsageError and nbval would let it pass."""
    result = yield
    for output in getattr(item, "test_outputs", None) or ():
        if output.get("output_type") == "stream" and "UsageError" in str(output.get("text", "")):
            pytest.fail(f"The cell misuses a magic: {output['text']}")
    return result
