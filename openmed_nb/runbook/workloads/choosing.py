"""What a person passed -> what is measured."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...errors import ConfigurationError, shorten
from ..operators.examples import Example
from .annotating import LENGTH, full_rows, subject_of_files, subject_of_pipeline
from .modules import subject_of_module
from .own_steps import subject_of_step
from .workload import Subject

if TYPE_CHECKING:
    from ...annotation.pipeline import AnnotationPipeline
    from ...models.loading import LoadSpec

EXAMPLE_ROWS = 8
"""How many rows a training batch has where nobody says."""


@dataclass(frozen=True)
class Asked:
    """What a person wants measured.

    Attributes:
        model: The name of a model, ``None`` for the bundled one, a pipeline of ours, a torch module, or a function that
            does a step with a batch.
        data: Texts for a name or a pipeline; example inputs or a ``DataLoader`` for a module or training; batches for a
            function, or a function that makes a batch of a size.
        training: Whether a step of a model trains it.
        length: How many tokens a row of one shape has; ``None`` where nobody says.
        arguments: Those of ``load_model``, for a name.
    """

    model: Any = None
    data: Any = None
    training: bool = False
    length: int | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def subject(self, files: Callable[[], LoadSpec], pipeline: Callable[[], AnnotationPipeline]) -> Subject:
        """Return what is measured.

        Args:
            files: Returns the files of the named model.
            pipeline: Returns the session's pipeline over it, for training.

        Raises:
            ConfigurationError: For what is no model, and for data that are none.
        """
        import torch

        from ...annotation.pipeline import AnnotationPipeline

        self.check()
        if self.is_named and not self.training:
            return subject_of_files(files(), checked_texts(self.data), self.length)
        if self.is_named or isinstance(self.model, AnnotationPipeline):
            pipe = pipeline() if self.is_named else self.model
            if self.training:
                return subject_of_module(
                    pipe.model, self.data, True, lambda: labelled_rows(pipe, self.length or LENGTH)
                )
            return subject_of_pipeline(pipe, checked_texts(self.data), self.length)
        if isinstance(self.model, torch.nn.Module):
            return subject_of_module(self.model, self.data, self.training)
        return subject_of_step(self.model, self.data)

    @property
    def is_named(self) -> bool:
        """Whether the model is one that has a name."""
        return self.model is None or isinstance(self.model, (str, os.PathLike))

    def check(self) -> None:
        """Refuse what cannot be measured, before anything is loaded.

        Raises:
            ConfigurationError: For what is no model, and for arguments that would load another.
        """
        if not (self.is_named or callable(self.model)):
            what = f"{type(self.model).__name__} is nothing that can be measured."
            raise ConfigurationError(
                what, "Pass a model's name, a pipeline, a torch module, or a function that does a step."
            )
        if self.arguments and not self.is_named:
            what = f"{type(self.model).__name__} takes no {', '.join(sorted(self.arguments))}: it is loaded already."
            raise ConfigurationError(what, "Pass a model's name, or leave them out.")
        if self.length is not None and (
            isinstance(self.length, bool) or not isinstance(self.length, int) or self.length < 1
        ):
            what = f"length={shorten(repr(self.length))} is no number of tokens."
            raise ConfigurationError(what, "Pass a whole number from 1.")


def checked_texts(data: Any) -> Sequence[Any] | None:
    """Return texts as a list, ``None`` where there are none to be read.

    Raises:
        ConfigurationError: For what is no series of texts, and for an empty one.
    """
    from ...annotation.corpus import stream_of

    if data is None:
        return None
    texts = list(stream_of(data))
    if not texts:
        raise ConfigurationError("There is no text to measure with.", "Pass at least one text.")
    return texts


def labelled_rows(pipe: AnnotationPipeline, length: int) -> Example:
    """Return a batch of full rows with labels, as a model for token classification takes them in training."""
    import torch

    annotator = pipe.own_annotator()
    longest = annotator.settings.limit + annotator.network.frame.size
    arrays = full_rows(annotator, EXAMPLE_ROWS, min(length, longest))
    inputs = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return Example(kwargs={**inputs, "labels": torch.zeros_like(inputs["input_ids"])})
