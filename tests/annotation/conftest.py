"""What the tests of annotation share: pipelines over tiny models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers import tiny_models as tiny
from helpers.annotations import rounded


@pytest.fixture(scope="session")
def new_pipe(home: str) -> Callable[..., Any]:
    """A function that returns a pipeline over a new random model with fixed weights."""
    from openmed_nb.annotation.pipeline import AnnotationPipeline

    def new_pipe(strategy: str = "simple", pipeline: Any = AnnotationPipeline, **options: Any) -> Any:
        tokenizer = tiny.tokenizer(model_max_length=tiny.POSITIONS)
        model = tiny.random_bert(tiny.PII_LABELS)
        return pipeline(model=model, tokenizer=tokenizer, device=home, aggregation_strategy=strategy, **options)

    return new_pipe


@pytest.fixture(scope="session")
def answers_to(new_pipe: Callable[..., Any]) -> Callable[..., Any]:
    """A function that returns what an undisturbed pipeline answers, to be compared."""

    def answers_to(texts: list[str], strategy: str = "simple") -> Any:
        return rounded(new_pipe(strategy)(texts))

    return answers_to


@pytest.fixture
def own_pipe_of(pipe_of: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """A function that returns a new pipeline and model of a directory, which a test may modify."""
    import openmed_nb

    openmed_nb.compat.ModelLoader().unload()
    yield pipe_of
    openmed_nb.compat.ModelLoader().unload()


@pytest.fixture(scope="module")  # Fixtures of the session exist before the simulated Mac.
def keyword_pipe(pipe_of: Callable[..., Any], keyword_model: Path) -> Any:
    """A pipeline that finds keywords, one text at a time, so that scores do not depend on other texts in the batch."""
    return pipe_of(keyword_model, batch_tokens=1)
