"""What the tests of annotation share: pipelines over tiny models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture(scope="session")
def new_pipe(tiny: ModuleType, home: str) -> Callable[..., Any]:
    """A function that returns a pipeline over a new random model with fixed weights."""
    from openmed_nb.annotation.pipeline import AnnotationPipeline

    def new_pipe(strategy: str = "simple", pipeline: Any = AnnotationPipeline, **options: Any) -> Any:
        tokenizer = tiny.tokenizer(model_max_length=tiny.POSITIONS)
        model = tiny.random_bert(tiny.PII_LABELS)
        return pipeline(model=model, tokenizer=tokenizer, device=home, aggregation_strategy=strategy, **options)

    return new_pipe


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


@pytest.fixture
def own_pipe_of(pipe_of: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """A function that returns a new pipeline and model of a directory, which a test may modify."""
    import openmed_nb

    openmed_nb.compat.ModelLoader().unload()
    yield pipe_of
    openmed_nb.compat.ModelLoader().unload()


@pytest.fixture(scope="session")
def annotated() -> Callable[..., Any]:
    """A function that annotates texts with a pipeline, without a progress bar."""
    import openmed_nb

    def annotated(pipe: Any, texts: Any, **options: Any) -> Any:
        return openmed_nb.annotate(texts, pipe, progress=False, **options)

    return annotated


@pytest.fixture(scope="module")  # Fixtures of the session exist before the simulated Mac.
def keyword_pipe(pipe_of: Callable[..., Any], keyword_model: Path) -> Any:
    """A pipeline that finds keywords, one text at a time, so that scores do not depend on other texts in the batch."""
    return pipe_of(keyword_model, batch_tokens=1)
