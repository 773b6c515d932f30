"""What a person passed -> what is measured."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...errors import ConfigurationError, check_flag, shorten
from ..operators.examples import Example
from .annotating import LENGTH, full_rows, pipeline_of_files, subject_of_files, subject_of_pipeline
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
        device: The device that a person asks for; ``None`` for the one in force.
    """

    model: Any = None
    data: Any = None
    training: bool = False
    length: int | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    device: str | None = None

    def subject(self, files: Callable[[], LoadSpec]) -> Subject:
        """Return what is measured.

        Args:
            files: Returns the files of the named model.

        Raises:
            ConfigurationError: For what is no model, for data that are none, and for a length of what has its own.
        """
        import torch

        from ...annotation.pipeline import AnnotationPipeline

        self.check()
        if self.is_named:
            return self._of_files(files)
        if isinstance(self.model, AnnotationPipeline):
            return self._of_training(self.model) if self.training else self._of_pipeline(self.model)
        if self.length is not None:
            what = f"length={self.length} is of no use here: the batches have their own."
            raise ConfigurationError(what, "Leave length out, and pass batches of that length.")
        if isinstance(self.model, torch.nn.Module):
            return subject_of_module(self.model, self.data, self.training)
        return subject_of_step(self.model, self.data)

    def in_one_shape(self) -> Asked:
        """Return it for rows of one shape, which read no texts.

        Raises:
            ConfigurationError: Where texts are passed.
        """
        from ...annotation.pipeline import AnnotationPipeline

        annotates = self.is_named or isinstance(self.model, AnnotationPipeline)
        if annotates and not self.training and self.data is not None:
            what = "A sweep reads no texts: all its rows have one length."
            raise ConfigurationError(
                what, "Leave them out, and pass length=... where they are not about 128 tokens long."
            )
        return self

    def _of_files(self, files: Callable[[], LoadSpec]) -> Subject:
        if not self.training:
            return subject_of_files(files(), checked_texts(self.data), self.length)
        checked_batches(self.data)
        spec = files()
        return self._of_training(pipeline_of_files(spec), spec.reference.name)

    def _of_pipeline(self, pipe: AnnotationPipeline) -> Subject:
        return subject_of_pipeline(pipe, checked_texts(self.data), self.length)

    def _of_training(self, pipe: AnnotationPipeline, name: str | None = None) -> Subject:
        rows = functools.partial(labelled_rows, pipe, self.length or LENGTH)
        return subject_of_module(pipe.model, checked_batches(self.data), True, rows, name)

    @property
    def is_named(self) -> bool:
        """Whether the model is one that has a name."""
        return self.model is None or isinstance(self.model, (str, os.PathLike))

    @property
    def is_step(self) -> bool:
        """Whether the model is a function that does a step."""
        import torch

        from ...annotation.pipeline import AnnotationPipeline

        return not self.is_named and not isinstance(self.model, (AnnotationPipeline, torch.nn.Module))

    def check(self) -> None:
        """Refuse what cannot be measured, before anything is loaded.

        Raises:
            ConfigurationError: For what is no model, and for arguments that would load another.
        """
        check_flag("training", self.training)
        if isinstance(self.model, type):
            raise ConfigurationError(
                f"{self.model.__name__} is a class.", f"Pass one that was made: {self.model.__name__}(...)."
            )
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
        ConfigurationError: For what is no series of texts, for an empty one, and where there is no word in any.
    """
    from ...annotation.corpus import stream_of

    if data is None:
        return None
    texts = list(stream_of(data))
    if not texts:
        raise ConfigurationError("There is no text to measure with.", "Pass at least one text.")
    if all(isinstance(text, str) and not text.strip() for text in texts):
        raise ConfigurationError("There is no word to measure with in these texts.", "Pass some with words.")
    return texts


def checked_batches(data: Any) -> Any:
    """Return batches of a training as they are.

    Raises:
        ConfigurationError: For texts, which have no labels.
    """
    if isinstance(data, (list, tuple)) and any(isinstance(one, str) for one in data):
        what = "Texts train nothing: they have no labels."
        raise ConfigurationError(what, "Pass a DataLoader or a batch with labels, or leave data out.")
    return data


def labelled_rows(pipe: AnnotationPipeline, length: int) -> Example:
    """Return a batch of full rows with labels, as a model for token classification takes them in training."""
    import torch

    annotator = pipe.own_annotator()
    longest = annotator.settings.limit + annotator.network.frame.size
    arrays = full_rows(annotator, EXAMPLE_ROWS, min(length, longest))
    inputs = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return Example(kwargs={**inputs, "labels": torch.zeros_like(inputs["input_ids"])})
