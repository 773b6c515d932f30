"""What the tests of annotation share: pipelines over tiny models, and texts for them."""

from __future__ import annotations

import multiprocessing
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

FOLDER = Path(__file__).parent

IMPORTED_BY_WORKERS = [
    "distributed",
    "torch",
    "transformers.models.bert.modeling_bert",
    "openmed_nb.annotation.pipeline",
]


@pytest.fixture(scope="session")
def new_pipe(tiny: ModuleType, home: str) -> Callable[..., Any]:
    """A function that returns a pipeline over a new random model, the same numbers every time."""
    from openmed_nb.annotation.pipeline import AnnotationPipeline

    def new_pipe(strategy: str = "simple", pipeline: Any = AnnotationPipeline, **options: Any) -> Any:
        tokenizer = tiny.tokenizer(model_max_length=tiny.POSITIONS)
        model = tiny.random_bert(tiny.PII_LABELS)
        return pipeline(model=model, tokenizer=tokenizer, device=home, aggregation_strategy=strategy, **options)

    return new_pipe


@pytest.fixture(scope="session")
def sentences(tiny: ModuleType) -> Callable[..., list[str]]:
    """A function that returns so many texts of up to so many words, the same every time."""

    def sentences(count: int, longest: int = 50, seed: int = 0) -> list[str]:
        generator = random.Random(seed)  # noqa: S311 - texts for tests
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
def answers_to(new_pipe: Callable[..., Any], rounded: Callable[..., Any]) -> Callable[..., Any]:
    """A function that returns what an undisturbed pipeline answers, to be compared."""

    def answers_to(texts: list[str], strategy: str = "simple") -> Any:
        return rounded(new_pipe(strategy)(texts))

    return answers_to


@pytest.fixture
def on_forward() -> Callable[..., None]:
    """A function that lets a function see what a model is given, before each forward pass; it may raise."""

    def on_forward(model: Any, watch: Callable[[Any], None]) -> None:
        model.register_forward_pre_hook(lambda _model, _args, kwargs: watch(kwargs["input_ids"]), with_kwargs=True)

    return on_forward


@pytest.fixture(scope="session")
def pipe_of(home: str) -> Callable[..., Any]:
    """A function that returns a pipeline over the model of a folder, the same one when asked again in a module."""
    import openmed_nb

    def pipe_of(folder: Path, strategy: str = "first", **options: Any) -> Any:
        return openmed_nb.load_pipeline(str(folder), home, aggregation_strategy=strategy, **options)

    return pipe_of


@pytest.fixture
def own_pipe_of(pipe_of: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """A function that returns a pipeline over the model of a folder, both of which a test may change."""
    import openmed_nb

    openmed_nb.ModelLoader().unload()
    yield pipe_of
    openmed_nb.ModelLoader().unload()


@pytest.fixture(scope="session")
def annotated() -> Callable[..., Any]:
    """A function that annotates texts with a pipeline, without a progress bar."""
    import openmed_nb

    def annotated(pipe: Any, texts: Any, **options: Any) -> Any:
        return openmed_nb.annotate(texts, pipe, progress=False, **options)

    return annotated


@pytest.fixture(scope="session")
def architectures(helper: Callable[[Path], ModuleType]) -> ModuleType:
    """The module that makes small models of many architectures, with tokenizers."""
    return helper(FOLDER / "architectures.py")


@pytest.fixture(scope="session")
def forking() -> dict[str, str]:
    """The setting of Dask that lets it fork workers from a process that has imported what they need, as its own tests do.

    A worker that imports torch itself takes ten times as long to start. On a Mac such a process cannot be forked.
    """
    if sys.platform != "linux":
        return {}
    multiprocessing.set_forkserver_preload(IMPORTED_BY_WORKERS)
    forkserver.ensure_running()
    return {"distributed.worker.multiprocessing-method": "forkserver"}


@pytest.fixture(scope="module")
def quick_workers(forking: dict[str, str]) -> Iterator[None]:
    """Workers that are quick to start, for the clusters of a module."""
    import dask
    import distributed  # noqa: F401 - its settings have to be there before one of them is changed

    with dask.config.set(forking):
        yield


@pytest.fixture(scope="module")
def pool(quick_workers: None) -> Iterator[Any]:  # noqa: ARG001 - it only has to be there
    """A cluster of two workers on this computer, with one thread each; tests leave it as it was.

    Each module has its own, so that no process of it is there in tests that look for processes.
    """
    import openmed_nb

    with openmed_nb.cluster(n=2, device="cpu", threads=1) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def interruptible() -> Iterator[None]:
    """SIGINT as in a terminal, here and in programs that start here: a job in the background of a shell ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def bar_clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The clock of progress bars, which stands still until a test changes its ``now``."""
    clock = SimpleNamespace(now=time.time())
    monkeypatch.setattr("tqdm.std.time", lambda: clock.now)
    return clock


@pytest.fixture(scope="session")
def numbered() -> Callable[..., list[str]]:
    """A function that returns texts in each of which the entity that the keyword model finds tells which it is.

    They have few tokens, and so many spaces that a chunk has few of them.
    """

    def numbered(count: int, spaces: int = 2000) -> list[str]:
        return [f"{' ' * number}asthma{' ' * spaces}" for number in range(count)]

    return numbered


@pytest.fixture(scope="session")
def numbers_of() -> Callable[..., list[list[int]]]:
    """A function that returns which of the numbered texts each answer is one to."""

    def numbers_of(found: Any) -> list[list[int]]:
        return [[entity["start"] for entity in entities] for entities in found]

    return numbers_of
