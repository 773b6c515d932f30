"""What the tests of several folders share; pytest's importlib mode has no package to import it from."""

from __future__ import annotations

import gc
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import settings

from openmed_nb.devices.simulation import active

FOLDER = Path(__file__).parent
NOTE = "the patient has diabetes mellitus and hypertension . no asthma ."


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the switch for the second run of tests, and the one for the pictures of the panel."""
    parser.addoption(
        "--simulated-mps",
        action="store_true",
        help="run every test on a simulated Mac, but for those of the real computer",
    )
    parser.addoption("--screenshots", metavar="FOLDER", help="keep the pictures that the browser tests take")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the tests of the real computer out of the second run, and try fewer examples: the first run tries them all."""
    if config.getoption("simulated_mps"):
        real = [item for item in items if item.get_closest_marker("real_computer")]
        config.hook.pytest_deselected(items=real)
        items[:] = [item for item in items if item not in real]
        for item in items:
            try_fewer_examples(getattr(item, "function", None))


def try_fewer_examples(test: Any) -> None:
    """Let a property try at most twelve examples; hypothesis has no public way to lower what a test says itself."""
    wanted = getattr(test, "_hypothesis_internal_use_settings", None)
    if wanted is not None:
        test._hypothesis_internal_use_settings = settings(wanted, max_examples=min(12, wanted.max_examples))


@pytest.fixture(scope="module", autouse=True)
def simulated_mac(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run the tests of a file, and what they share, on a simulated Mac, where the second run was asked for."""
    if not request.config.getoption("simulated_mps"):
        yield
        return
    from openmed_nb.session import SESSION

    SESSION.simulate("8 GiB")
    yield
    SESSION.end_simulation()


@pytest.fixture(autouse=True)
def still_simulated_mac(request: pytest.FixtureRequest) -> None:
    """Begin the simulated Mac again, where the test before ended it."""
    if request.config.getoption("simulated_mps") and not active():
        from openmed_nb.session import SESSION

        SESSION.simulate("8 GiB")


@pytest.fixture(scope="module")
def quick_collection() -> Iterator[None]:
    """Collections that leave out what was there before the tests of a file: pytest, torch and transformers."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def load_module(file: Path) -> ModuleType:
    """Return a plain file as a module."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[file.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def helper() -> Callable[[Path], ModuleType]:
    """A function that loads a file beside a test as a module."""
    return load_module


@pytest.fixture(scope="session")
def computers() -> ModuleType:
    """The module of simulated computers."""
    return load_module(FOLDER / "simulated_computers.py")


@pytest.fixture(scope="session")
def home(request: pytest.FixtureRequest) -> str:
    """The device on which models are tested: the CPU, and in the second run the simulated MPS."""
    return "mps" if request.config.getoption("simulated_mps") else "cpu"


@pytest.fixture(scope="session")
def second_device(home: str) -> str:
    """A second device that really computes: torch's "lazy" one, which every build has and which starts only once.

    It cannot run below a mode that sees operators, so in the second run it is the simulated MPS.
    """
    if home == "mps":
        return "mps:0"
    import torch._lazy.ts_backend

    torch._lazy.ts_backend.init()
    return "lazy:0"


@pytest.fixture(scope="session")
def tiny() -> ModuleType:
    """The module that makes tiny models."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    return load_module(FOLDER / "tiny_models.py")


@pytest.fixture(scope="session")
def keyword_model(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model that finds a few known words; tests read it and copy it, and do not change it."""
    return tiny.save(tmp_path_factory.mktemp("keyword"), tiny.keyword_bert())


@pytest.fixture(scope="session")
def random_model(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model whose predictions are arbitrary but fixed."""
    return tiny.save(tmp_path_factory.mktemp("random"), tiny.random_bert())


@pytest.fixture(scope="session")
def words_of() -> Callable[..., list[str]]:
    """A function that returns the pieces of a text that a pipeline takes for entities."""

    def words_of(pipe: Any, text: str = NOTE) -> list[str]:
        return [text[entity["start"] : entity["end"]] for entity in pipe(text)]

    return words_of
