"""Annotating texts, as something that is measured: read and tokenise, copy, run, decode."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ...annotation.chunks import Chunk
from ...devices.transfer import to_array
from ...errors import ConfigurationError
from ...models.loading import LoadSpec, load
from ...models.quantization import dtype_of, is_quantized
from ..precision.pairs import whole_texts, with_model
from .copying import copy_on
from .workload import ANNOTATION, DECODE, FORWARD, TRANSFER, Phase, Subject, Workload

if TYPE_CHECKING:
    from ...annotation.batches import Batch
    from ...annotation.forward import Inputs
    from ...annotation.pipeline import AnnotationPipeline
    from ...annotation.stream import Annotator, Answer, Prepared

ROWS = 32
"""How many texts a batch has where nobody says."""

LENGTH = 128
"""How many tokens a row of one shape has where nobody says."""

TEXTS = (
    "Patient with type 2 diabetes mellitus and hypertension, admitted with chest pain and shortness of breath.",
    "No evidence of pneumonia. History of asthma and atrial fibrillation.",
    "The biopsy showed a moderately differentiated adenocarcinoma of the colon without lymph node metastasis.",
    "She denies fever, chills and night sweats; her rheumatoid arthritis is stable.",
)
"""Synthetic texts, for where a person passes none."""


@dataclass(frozen=True)
class AnnotationBench:
    """A model for token classification on a device, with texts.

    Attributes:
        name: What a person calls the model.
        annotator: The model with its tokenizer.
        texts: The texts that are read, again and again.
        length: How many tokens a row has that is counted: each of :meth:`bucket`, and those of a budget for :meth:`stream`.
    """

    name: str
    annotator: Annotator
    texts: Sequence[Any] = TEXTS
    length: int | None = None

    @property
    def device(self) -> str:
        """Where the model is, as torch spells it."""
        return str(self.annotator.network.model.device)

    def bucket(self, rows: int) -> Workload:
        """Return steps over full rows of one length; nothing is decoded, because the rows are no texts."""
        inputs = full_rows(self.annotator, rows, self.row_length)
        phases = (
            Phase(TRANSFER, self.annotator.network.moved),
            Phase(FORWARD, self.forward),
            Phase(DECODE, lambda outputs: [to_array(tensor) for tensor in outputs]),
        )
        return self._workload(rows, self.row_length, itertools.repeat(inputs), phases, rows * self.row_length)

    def stream(self, rows: int | None = None) -> Workload:
        """Return steps that each read so many texts and find their entities.

        With a number of rows, a batch on the device may have as many tokens as a bucket of so many has: texts of about one
        length are then one batch. Without one, it may have what the annotator's own budget says.
        """
        size, budget = rows or ROWS, self.annotator.budget
        if rows is not None:
            budget = replace(budget, tokens=rows * self.row_length, rows=None)
        bench = replace(self, annotator=replace(self.annotator, budget=budget))
        phases = (Phase(TRANSFER, self.transfer), Phase(FORWARD, self.forward_all), Phase(DECODE, self.decode))
        return self._workload(size, None, PreparedTexts(bench, size), phases, budget.tokens)

    @property
    def row_length(self) -> int:
        """How many tokens a full row has: at most as many as the model reads."""
        longest = self.annotator.settings.limit + self.annotator.network.frame.size
        if self.length is not None and self.length > longest:
            what = f"length={self.length} is more than the {longest} tokens that {self.name} reads at once."
            raise ConfigurationError(what, f"Pass length={longest}, or less.")
        return self.length or min(LENGTH, longest)

    def forward(self, moved: dict[str, Any]) -> tuple[Any, ...]:
        """Run a batch on the device."""
        import torch

        network = self.annotator.network
        with torch.no_grad():
            return network.answers(network.logits_of(moved))

    def transfer(self, chunk: Filled) -> tuple[Filled, list[dict[str, Any]]]:
        """Copy the batches of some texts to the device."""
        return chunk, [self.annotator.network.moved(inputs) for inputs in chunk.inputs]

    def forward_all(self, moved: tuple[Filled, list[dict[str, Any]]]) -> tuple[Filled, list[tuple[Any, ...]]]:
        """Run the batches of some texts on the device."""
        return moved[0], [self.forward(batch) for batch in moved[1]]

    def decode(self, done: tuple[Filled, list[tuple[Any, ...]]]) -> list[Answer]:
        """Return the entities of some texts."""
        from ...annotation.forward import ForwardRun, settled

        chunk, outputs = done
        run = ForwardRun(chunk.prepared.tokens, chunk.prepared.windows)
        arrays = [[to_array(tensor) for tensor in tensors] for tensors in outputs]
        collected = settled(run, self.annotator.network, list(zip(chunk.batches, arrays, strict=True)))
        return self.annotator.decode(chunk.prepared, collected)

    def _workload(
        self, rows: int, length: int | None, batches: Any, phases: tuple[Phase, ...], batch_tokens: int
    ) -> Workload:
        return Workload(
            self.name,
            ANNOTATION,
            self.device,
            rows,
            length,
            lambda: iter(batches),
            phases,
            dtype=dtype_of(self.annotator.network.model),
            batch_tokens=batch_tokens,
        )


@dataclass(frozen=True)
class Filled:
    """Some texts, tokenised and filled into batches.

    Attributes:
        prepared: The texts, their tokens and windows.
        batches: The batches.
        inputs: The arrays of each batch.
    """

    prepared: Prepared
    batches: list[Batch]
    inputs: list[Inputs]


@dataclass(frozen=True)
class PreparedTexts:
    """The texts of a bench, so many at a time, without an end."""

    bench: AnnotationBench
    rows: int

    def __iter__(self) -> Iterator[Filled]:
        texts = itertools.cycle(self.bench.texts)
        while True:
            yield filled(self.bench.annotator, list(itertools.islice(texts, self.rows)))


def filled(annotator: Annotator, texts: list[Any]) -> Filled:
    """Return texts tokenised and filled into batches.

    Raises:
        UnreadableText: For the first text that cannot be read.
    """
    from ...annotation.forward import fill

    prepared = annotator.prepare(Chunk(0, texts))
    if prepared is None:
        raise ConfigurationError("There is no text to measure with.", "Pass at least one text.")
    for failure in prepared.failures.values():
        raise failure
    batches = annotator.batches(prepared, annotator.budget)
    arrays = [fill(prepared.tokens, prepared.windows, batch, annotator.network) for batch in batches]
    return Filled(prepared, batches, arrays)


def full_rows(annotator: Annotator, rows: int, length: int) -> Inputs:
    """Return a batch of rows without filling, as arrays for the model; which token stands there makes no difference."""
    import numpy as np

    network = annotator.network
    ids = np.full((rows, length), network.frame.padding, np.int64)
    arrays = {"input_ids": ids, "token_type_ids": np.zeros_like(ids), "attention_mask": np.ones_like(ids)}
    return {name: array for name, array in arrays.items() if name in network.inputs}


def subject_of_files(spec: LoadSpec, texts: Sequence[Any] | None, length: int | None) -> Subject:
    """Return a model from its files, to be loaded beside those of the session."""
    name = spec.reference.name

    def on(device: str) -> AnnotationBench:
        pipe = pipeline_of_files(spec, device)
        return AnnotationBench(name, whole_texts(pipe.own_annotator()), texts or TEXTS, length)

    return Subject(name, ANNOTATION, on)


def pipeline_of_files(spec: LoadSpec, device: str = "cpu") -> AnnotationPipeline:
    """Return a pipeline over a model from its files, of which the session knows nothing."""
    from ...annotation.building import build_pipeline
    from ...models.config import DEFAULT_STRATEGY

    return build_pipeline(load(spec, device), DEFAULT_STRATEGY, {})


def subject_of_pipeline(pipe: AnnotationPipeline, texts: Sequence[Any] | None, length: int | None) -> Subject:
    """Return a pipeline as it is where it is, and with a copy of its model elsewhere.

    Raises:
        ConfigurationError: For a pipeline in int8, which runs only where it is.
    """
    from ...annotation.pipeline import device_budget

    name, annotator = type(pipe.model).__name__, whole_texts(pipe.own_annotator())

    def on(device: str) -> AnnotationBench:
        import torch

        place = torch.device(device)
        if place.type == pipe.device.type and place.index in {None, pipe.device.index}:
            return AnnotationBench(name, annotator, texts or TEXTS, length)
        if is_quantized(pipe.model):
            raise ConfigurationError(f"{name} in int8 runs on the CPU only.", "Pass the model's name.")
        moved = with_model(annotator, copy_on(pipe.model, name, device).eval())
        budget = replace(device_budget(place), padding=annotator.budget.padding)
        return AnnotationBench(name, replace(moved, budget=budget), texts or TEXTS, length)

    return Subject(name, ANNOTATION, on)
