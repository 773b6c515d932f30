"""What the tests of several folders share; pytest's importlib mode has no package to import it from."""

from __future__ import annotations

import gc
import importlib.util
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import settings

from openmed_nb.devices.machine import is_mps_simulated

FOLDER = Path(__file__).parent
NOTE = "the patient has diabetes mellitus and hypertension . no asthma ."


EXAMPLES = {"dev": 25, "ci": 50, "slow": 300, "simulated": 12}
"""How many examples a property tries: the first lane's are the same each time, at a desk and in CI."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the switches of the slow lane, and the one for the pictures of the panel."""
    parser.addoption("--slow", action="store_true", help="run the tests marked slow too, and many more examples")
    parser.addoption(
        "--simulated-mps",
        action="store_true",
        help="run every test on a simulated Mac, but for those of the real computer",
    )
    parser.addoption("--screenshots", metavar="FOLDER", help="keep the pictures that the browser tests take")
    parser.addoption("--record", action="store_true", help="write snapshots into tests/recorded anew")


def pytest_configure(config: pytest.Config) -> None:
    """Choose how many examples the properties try."""
    for name, examples in EXAMPLES.items():
        fixed = name in ("dev", "ci")
        settings.register_profile(
            name, max_examples=examples, derandomize=fixed, deadline=None, database=None, print_blob=True
        )
    lane = "simulated" if config.getoption("simulated_mps") else "slow" if config.getoption("slow") else None
    settings.load_profile(lane or ("ci" if os.environ.get("CI") else "dev"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the slow tests out of the first lane, and the tests of the real computer out of the simulated run."""
    out = set()
    if not config.getoption("slow"):
        out.add("slow")
    if config.getoption("simulated_mps"):
        out.add("real_computer")
    left = [item for item in items if any(map(item.get_closest_marker, out))]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if item not in set(left)]


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
    if request.config.getoption("simulated_mps") and not is_mps_simulated():
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


@pytest.fixture(scope="session")
def sentences(tiny: ModuleType) -> Callable[..., list[str]]:
    """A function that returns so many texts of up to so many words, the same every time."""

    def sentences(count: int, longest: int = 50, seed: int = 0) -> list[str]:
        generator = random.Random(seed)
        words = [word for word in tiny.VOCABULARY if word not in tiny.SPECIAL and not word.startswith("##")]
        lengths = (generator.randint(1, longest) for _ in range(count))
        return [" ".join(generator.choices([*words, "hypertension"], k=length)) for length in lengths]

    return sentences


@pytest.fixture(scope="session")
def rounded() -> Callable[..., Any]:
    """A function that returns answers with scores that can be compared: batches of other shapes differ in the last digits."""

    def rounded(answers: Any) -> list[Any]:
        return [
            [{**entity, "score": pytest.approx(float(entity["score"]), abs=1e-5)} for entity in answer]
            for answer in answers
        ]

    return rounded


@pytest.fixture(scope="session")
def pipe_of(home: str) -> Callable[..., Any]:
    """A function that returns a pipeline over the model of a folder, the same one when asked again in a module."""
    import openmed_nb

    def pipe_of(folder: Path, strategy: str = "first", **options: Any) -> Any:
        return openmed_nb.load_pipeline(str(folder), home, aggregation_strategy=strategy, **options)

    return pipe_of


@pytest.fixture
def found_in(keyword_model: Path, home: str) -> Callable[..., Any]:
    """A function that returns what the keyword model finds here in texts."""
    import openmed_nb as nb

    return lambda texts, **options: nb.annotate(texts, keyword_model, device=home, progress=False, **options)


@pytest.fixture
def clean() -> Iterator[None]:
    """Leave the session as it was found: without a simulation, models and wishes."""
    from openmed_nb.session import SESSION

    yield
    SESSION.end_simulation()
    SESSION.unload()
    SESSION.reset()
    SESSION.stop()


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Let torch compute on one core: for tiny models, waiting for a second one takes longer than the work."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def interruptible() -> Iterator[None]:
    """SIGINT as in a terminal, here and in programs that start here: a job in the background of a shell ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
