"""Subclasses of the pipeline may override transformers' steps; they run then, and nothing bypasses them."""

from __future__ import annotations

import types

import pytest
from transformers import TokenClassificationPipeline

from openmed_nb.annotation.pipeline import HOOKS, AnnotationPipeline
from openmed_nb.errors import ConfigurationError

TEXTS = ["the patient has asthma .", "no history", "type 2 diabetes mellitus and hypertension"]


def overriding(base: type, name: str) -> type:
    """Return a subclass whose step notes that it runs."""

    def step(self, *args, **kwargs):
        self.ran = name
        return HOOKS[name](self, *args, **kwargs)

    return type("Overriding", (base,), {name: step, "ran": None})


@pytest.mark.parametrize("name", [name for name in HOOKS if name != "aggregate_word"])
def test_overridden_step_runs(new_pipe, rounded, name):
    """A step that a subclass overrides runs, and the answers are those of transformers' class with the same step."""
    ours = new_pipe("first", overriding(AnnotationPipeline, name))
    theirs = new_pipe("first", overriding(TokenClassificationPipeline, name))

    assert ours(TEXTS) == rounded(theirs(TEXTS))
    assert ours.ran == theirs.ran


def test_step_of_one_pipeline(new_pipe):
    """A step that is replaced in one pipeline alone runs too."""
    pipe = new_pipe("first")
    pipe.postprocess = types.MethodType(lambda _self, *_outputs, **_options: ["mine"], pipe)

    assert pipe(TEXTS) == [["mine"]] * 3


def test_annotate_refuses_what_would_not_run(new_pipe, annotated):
    """Annotating many texts has its own way to answers, and says which overridden step would not run."""
    with pytest.raises(ConfigurationError, match="Overriding overrides postprocess, which would not run here"):
        annotated(new_pipe("first", overriding(AnnotationPipeline, "postprocess")), TEXTS)
