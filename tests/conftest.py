"""Shared fixtures. The package ``helpers`` has functions and classes that tests import."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import settings

from openmed_nb.devices.machine import is_mps_simulated

EXAMPLES = {"dev": 25, "ci": 50, "slow": 300, "simulated": 12}
"""Number of examples of property tests. The examples of the fast suite are fixed, locally and in CI."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options for the slow suite, the simulated run, screenshots and snapshots."""
    parser.addoption("--slow", action="store_true", help="run the tests marked slow too, and many more examples")
    parser.addoption(
        "--simulated-mps",
        action="store_true",
        help="run all tests on a simulated Mac, except tests of the real machine",
    )
    parser.addoption("--screenshots", metavar="FOLDER", help="save the screenshots of the browser tests")
    parser.addoption("--record", action="store_true", help="regenerate the snapshots in tests/recorded")


def pytest_configure(config: pytest.Config) -> None:
    """Select the number of examples of property tests."""
    for name, examples in EXAMPLES.items():
        fixed = name in ("dev", "ci")
        settings.register_profile(
            name, max_examples=examples, derandomize=fixed, deadline=None, database=None, print_blob=True
        )
    profile = "ci" if os.environ.get("CI") else "dev"
    if config.getoption("slow"):
        profile = "slow"
    if config.getoption("simulated_mps"):
        profile = "simulated"
    settings.load_profile(profile)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect slow tests in the fast suite, and tests of the real machine in the simulated run."""
    deselected_markers = set()
    if not config.getoption("slow"):
        deselected_markers.add("slow")
    if config.getoption("simulated_mps"):
        deselected_markers.add("real_computer")
    deselected = [item for item in items if any(map(item.get_closest_marker, deselected_markers))]
    config.hook.pytest_deselected(items=deselected)
    items[:] = [item for item in items if item not in set(deselected)]


@pytest.fixture(scope="session", autouse=True)
def torch_products() -> None:
    """Keep torch's own matrix products. A change of the library between two tests would change the last digits of scores."""
    from openmed_nb.devices.linear import LINEAR_TUNING

    LINEAR_TUNING.onednn_speedup = 0.0


@pytest.fixture(scope="module", autouse=True)
def simulated_mac(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run the tests and fixtures of a file on a simulated Mac in the simulated run."""
    if not request.config.getoption("simulated_mps"):
        yield
        return
    from openmed_nb.session import SESSION

    SESSION.simulate("8 GiB")
    yield
    SESSION.end_simulation()


@pytest.fixture(autouse=True)
def still_simulated_mac(request: pytest.FixtureRequest) -> None:
    """Restart the simulated Mac if the previous test stopped it."""
    if request.config.getoption("simulated_mps") and not is_mps_simulated():
        from openmed_nb.session import SESSION

        SESSION.simulate("8 GiB")


def load_module(file: Path) -> ModuleType:
    """Import a file as a module."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[file.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def helper() -> Callable[[Path], ModuleType]:
    """Function that imports a file next to a test as a module."""
    return load_module


@pytest.fixture(scope="session")
def home(request: pytest.FixtureRequest) -> str:
    """Device for tests of models: the CPU, and in the simulated run the simulated MPS device."""
    return "mps" if request.config.getoption("simulated_mps") else "cpu"


@pytest.fixture(scope="session")
def second_device(home: str) -> str:
    """A second device that can compute: the "lazy" device of torch, which every build has and which can be started once.

    It does not support modes that intercept operators, so in the simulated run it is the simulated MPS device.
    """
    if home == "mps":
        return "mps:0"
    import torch._lazy.ts_backend

    torch._lazy.ts_backend.init()
    return "lazy:0"


@pytest.fixture(scope="session")
def keyword_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with a model that finds a few known words. Tests must not change it."""
    from helpers import tiny_models as tiny

    return tiny.save(tmp_path_factory.mktemp("keyword"), tiny.keyword_bert())


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with a model whose predictions are arbitrary but fixed."""
    from helpers import tiny_models as tiny

    return tiny.save(tmp_path_factory.mktemp("random"), tiny.random_bert())


@pytest.fixture(scope="session")
def pipe_of(home: str) -> Callable[..., Any]:
    """Function that returns a pipeline for the model of a directory."""
    import openmed_nb

    def pipe_of(folder: Path, strategy: str = "first", **options: Any) -> Any:
        return openmed_nb.load_pipeline(str(folder), home, aggregation_strategy=strategy, **options)

    return pipe_of


@pytest.fixture
def as_recorded(pytestconfig: pytest.Config) -> Callable[..., None]:
    """Function that compares a value with its snapshot in tests/recorded; ``--record`` writes the snapshot first."""

    def as_recorded(file: str | Path, shown: Any, *, sort_keys: bool = False) -> None:
        path = Path(__file__).parent / "recorded" / file
        if pytestconfig.getoption("record"):
            path.write_text(json.dumps(shown, indent=1, sort_keys=sort_keys, ensure_ascii=False) + "\n", "utf-8")
        assert json.loads(json.dumps(shown)) == json.loads(path.read_text("utf-8"))

    return as_recorded


@pytest.fixture
def found_in(keyword_model: Path, home: str) -> Callable[..., Any]:
    """Function that annotates texts with the keyword model."""
    import openmed_nb as nb

    return lambda texts, **options: nb.annotate(texts, keyword_model, device=home, progress=False, **options)


@pytest.fixture
def clean() -> Iterator[None]:
    """Reset the session after a test: no simulation, models or overrides."""
    from openmed_nb.session import SESSION

    yield
    SESSION.end_simulation()
    SESSION.unload()
    SESSION.reset()
    SESSION.stop()


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Limit torch to one thread, because the synchronization of threads takes longer than the work of tiny models."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def interruptible() -> Iterator[None]:
    """Default handling of SIGINT in this process and its children, because background jobs of a shell ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
