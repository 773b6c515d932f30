"""Benches: annotation, a module, a step of one's own, each on its device."""

from __future__ import annotations

import functools
import inspect
import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ...annotation.stream import Chunk
from ...devices.backend import to_array
from ...devices.moving import NARROWER, named_tensors, to_device, with_tensors
from ...devices.request import kind_of
from ...errors import ConfigurationError, cause, check_flag, whole_or_none
from ...models.loading import LoadSpec, load
from ...models.quantization import dtype_of, is_quantized
from ...training.epochs import named
from ...training.steps import adamw
from ..operators.copies import cpu_copy, random_numbers_kept
from ..operators.forecast import Example, loss_or_mean, read_example
from ..precision.measurement import whole_texts, with_model
from .workloads import (
    ANNOTATION,
    BACKWARD,
    DECODE,
    FORWARD,
    FORWARD_PASS,
    OPTIMIZER,
    OWN_STEP,
    STEP,
    TRAINING_STEP,
    TRANSFER,
    Phase,
    Repeated,
    Subject,
    Workload,
    check_rows,
    first_of,
    fresh,
    generators_kept,
    read_ahead,
    rows_in,
)

if TYPE_CHECKING:
    import torch

    from ...annotation.forward import Batch, Inputs
    from ...annotation.pipeline import AnnotationPipeline
    from ...annotation.stream import Annotator, Answer, Prepared


def copy_on(model: torch.nn.Module, name: str, device: str) -> torch.nn.Module:
    """Return a copy of a model on a device; the hooks of the model run in the copy too.

    Raises:
        ConfigurationError: Where the model cannot be copied, and on MPS for one with numbers of 64 bits.
    """
    import torch

    tensors = [*model.parameters(), *model.buffers()] if kind_of(device) == "mps" else []
    types = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors}
    for wide in sorted(types.intersection(NARROWER)):
        raise ConfigurationError(f"{name} has numbers in {wide}, which MPS does not have.", "Pass model.float().")
    return cpu_copy(model).to(torch.device(device))


def check_call(model: torch.nn.Module, name: str, example: Example) -> None:
    """Check that a model takes what it will be called with.

    Raises:
        ConfigurationError: For an example without rows, and for arguments that ``forward`` does not take; a model with hooks
            that see them first may change them.
    """
    if not (rows_in(example.tensors) and any(tensor.numel() for tensor in tensors_of(example))):
        raise ConfigurationError(f"The batch for {name} has no rows.", "Pass one with at least one row.")
    try:
        taken = inspect.signature(model.forward)
    except ValueError:  # A forward that is compiled tells nothing.
        return
    if not model._forward_pre_hooks:  # noqa: SLF001 - torch has no public name for them
        try:
            taken.bind(*example.args, **example.kwargs)
        except TypeError as error:
            what = f"{name} does not take what the data give: {cause(error)}."
            raise ConfigurationError(what, "Pass batches as it is called with them, without anything else.") from error


def tensors_of(example: Example) -> list[Any]:
    """Return the tensors of an example."""
    return [tensor for _, tensor in named_tensors(example.tensors)]


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
    from ...annotation.pipeline import build_pipeline
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


RATE = 1e-5
"""The learning rate of measured steps; it makes no difference to their speed."""


@dataclass(frozen=True)
class ModuleBench:
    """A copy of a module on a device, and batches for it.

    Attributes:
        name: What the person calls it, or the name of the class.
        model: The copy.
        place: The device, as torch spells it.
        training: Whether a step trains.
        example: A batch, on the CPU, for rows of one shape.
        loader: Gives batches, again and again; ``None`` to take the example.
        written: Whether the model was seen to write into its first batch.
    """

    name: str
    model: torch.nn.Module
    place: str
    training: bool
    example: Example
    loader: Iterable[Any] | None = None
    optimizers: list[Any] = field(default_factory=list)
    written: list[bool] = field(default_factory=list)

    @property
    def device(self) -> str:
        """Where the copy is."""
        return self.place

    def bucket(self, rows: int) -> Workload:
        """Return steps over batches like the example, with so many rows."""
        return self._workload(rows, itertools.repeat(with_rows(self.example, rows)))

    def stream(self, rows: int | None = None) -> Workload:
        """Return steps over the batches of the loader, or over the example where there is none.

        Raises:
            ConfigurationError: Where a number of rows is asked of a loader, which has its own.
        """
        if self.loader is None:
            return self.bucket(rows or rows_of(self.example))
        if rows is not None:
            raise ConfigurationError("A loader has a batch size of its own.", "Leave batch_size out.")
        return self._workload(rows_of(self.example), Repeated(self.loader, example_of))

    def transfer(self, example: Example) -> Example:
        """Return a batch on the device.

        On the CPU that is the person's own, so that a model which writes into its first batch gets copies.
        """
        return moved(example, self.place) if self.place != "cpu" or self.written == [False] else example.copied()

    def called(self, example: Example) -> Any:
        """Return what the model returns, and note at its first batch whether it writes into that."""
        if self.written:
            return example(self.model)
        before = versions(example)
        answer = example(self.model)
        self.written.append(None in before or versions(example) != before)
        return answer

    def forward(self, example: Example) -> Any:
        """Run a forward pass without gradients."""
        import torch

        with torch.no_grad():
            return self.called(example)

    def loss(self, example: Example) -> Any:
        """Run a forward pass and return the loss.

        Raises:
            ConfigurationError: Where nothing that the model returns has a gradient.
        """
        import torch

        with torch.enable_grad():
            loss = loss_or_mean(self.called(example))
        if loss is None:
            what = f"Nothing that {self.name} returns depends on a parameter that learns."
            raise ConfigurationError(what, "Leave training=True out.")
        return loss

    def backward(self, loss: Any) -> None:
        """Run the backward pass."""
        loss.backward()

    def optimizer_step(self, _done: None) -> None:
        """Do the optimizer's step, and drop the gradients."""
        if not self.optimizers:
            self.optimizers.append(adamw([one for one in self.model.parameters() if one.requires_grad], lr=RATE))
        self.optimizers[0].step()
        self.optimizers[0].zero_grad()

    def _workload(self, rows: int, batches: Iterable[Example]) -> Workload:
        transfer = Phase(TRANSFER, self.transfer)
        training = (
            Phase(FORWARD, self.loss),
            Phase(BACKWARD, self.backward),
            Phase(OPTIMIZER, self.optimizer_step),
        )
        phases = (transfer, *(training if self.training else (Phase(FORWARD, self.forward),)))
        dtype = next((str(one.dtype).removeprefix("torch.") for one in self.model.parameters()), None)
        task = TRAINING_STEP if self.training else FORWARD_PASS
        length = length_of(self.example) if self.loader is None else None
        workers, ahead = read_ahead(self.loader)
        return Workload(
            self.name,
            task,
            self.place,
            rows,
            length,
            lambda: iter(batches),
            phases,
            workers,
            dtype,
            ahead,
            sizes=batches.sizes if isinstance(batches, Repeated) else Counter(),
            row_shape=row_shape_of(self.example),
        )


def example_of(batch: Any) -> Example:
    """Return a batch of a loader as a model is called with it, without copies.

    Example:
        >>> import torch
        >>> example_of({"input_ids": torch.ones(2, 3)}).kwargs["input_ids"].shape
        torch.Size([2, 3])
    """
    from collections.abc import Mapping

    if isinstance(batch, Mapping):
        return Example(kwargs=dict(batch))
    return Example(tuple(batch) if isinstance(batch, (list, tuple)) else (batch,))


def moved(example: Example, device: str) -> Example:
    """Return a batch on a device."""
    return Example(to_device(example.args, device), to_device(example.kwargs, device))


def rows_of(example: Example) -> int:
    """Return how many rows a batch has: the first size of its first tensor that has one.

    Example:
        >>> import torch
        >>> rows_of(Example((torch.ones(4, 2),)))
        4
    """
    return rows_in(example.tensors)


def versions(example: Example) -> list[int | None]:
    """Return how often each tensor of a batch was written into, ``None`` where torch does not count that."""
    tensors = [tensor for _, tensor in named_tensors(example.tensors)]
    return [None if one.is_inference() else one._version for one in tensors]  # noqa: SLF001 - torch's only name for it


def length_of(example: Example) -> int | None:
    """Return how many tokens the rows of a batch have, ``None`` where they have no ``input_ids``."""
    ids = example.kwargs.get("input_ids")
    return int(ids.shape[-1]) if ids is not None and ids.dim() > 1 else None


def row_shape_of(example: Example) -> str | None:
    """Return the shape of a row of a batch: of its first tensor with rows that have a shape.

    Example:
        >>> import torch
        >>> row_shape_of(Example((torch.ones(4, 3, 16, 16),))), row_shape_of(Example((torch.ones(4),)))
        ('3x16x16', None)
    """
    shapes = (tensor.shape[1:] for _, tensor in named_tensors(example.tensors) if tensor.dim() > 1)
    return next(("x".join(map(str, shape)) for shape in shapes), None)


def with_rows(example: Example, rows: int) -> Example:
    """Return a batch with another number of rows, which repeats those that there are; tensors without rows stay.

    A tensor has rows whose first size is that of the first tensor: a mask of 4 times 4 too, where the batch has 4 rows.

    Example:
        >>> import torch
        >>> with_rows(Example((torch.tensor([[1], [2]]), torch.tensor(0.5))), 3).args
        (tensor([[1],
                [2],
                [1]]), tensor(0.5000))
    """
    import torch

    there = rows_of(example)
    index = torch.arange(rows) % there

    def repeated(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[index] if tensor.dim() and tensor.shape[0] == there else tensor

    return Example(with_tensors(example.args, repeated), with_tensors(example.kwargs, repeated))


def subject_of_module(
    model: torch.nn.Module,
    data: Any,
    training: bool,
    synthetic: Callable[[], Example] | None = None,
    name: str | None = None,
) -> Subject:
    """Return a torch module, of which a copy is measured on each device.

    Args:
        model: The module.
        data: Example inputs, or a ``DataLoader``.
        training: Whether a step trains.
        synthetic: Makes an example where nobody passes data.
        name: What the person calls it; the name of its class where nobody says.

    Raises:
        ConfigurationError: For a module without data, and for data that are none.
    """
    import torch

    name = name or type(model).__name__
    loader = data if isinstance(data, torch.utils.data.DataLoader) else None
    if data is None and synthetic is None:
        raise ConfigurationError(f"There is nothing to call {name} with.", "Pass a batch, or a DataLoader.")
    if data is None and synthetic is not None:
        example = synthetic()
    else:
        with random_numbers_kept(), generators_kept(data):  # A loader draws a seed whenever it is read.
            example = read_example(data if loader is None else first_of(loader))
    check_call(model, name, example)

    def on(device: str) -> ModuleBench:
        copied = copy_on(model, name, device)
        return ModuleBench(name, copied.train() if training else copied.eval(), device, training, example, loader)

    return Subject(name, TRAINING_STEP if training else FORWARD_PASS, on, data)


BatchesOfSize = Callable[[int], Any]
"""Makes a batch of so many rows."""


@dataclass(frozen=True)
class OwnBench:
    """A function and its batches.

    Attributes:
        name: The name of the function.
        step: Does a step with a batch as the loader gives it.
        data: A loader, or a function that makes a batch of a size.
        device: Where the function computes; it alone decides that, so this is what is said of it.
    """

    name: str
    step: Callable[[Any], Any]
    data: Iterable[Any] | BatchesOfSize
    device: str

    def bucket(self, rows: int) -> Workload:
        """Return steps over one batch that lies ready.

        Raises:
            ConfigurationError: Where nothing makes a batch of a size, or one with fewer rows.
        """
        if not callable(self.data):
            what = f"No batch of {rows} rows can be made for {self.name}."
            raise ConfigurationError(what, "Pass a function that takes a number of rows and returns a batch.")
        batch = self.data(rows)
        check_rows(batch, rows, named(self.data))
        return self._workload(rows, Repeated([batch]), batch)

    def stream(self, rows: int | None = None) -> Workload:
        """Return steps over the batches of the loader."""
        if callable(self.data):
            return self.bucket(rows or 1)
        with generators_kept(self.data):
            first = first_of(self.data)
        return self._workload(rows_in(first), Repeated(self.data), first)

    def _workload(self, rows: int, batches: Repeated, first: Any) -> Workload:
        workers, ahead = read_ahead(self.data)
        return Workload(
            self.name,
            OWN_STEP,
            self.device,
            rows,
            None,
            lambda: iter(batches),
            (Phase(STEP, lambda batch: self.step(fresh(batch))),),
            workers,
            ahead=ahead,
            sizes=Counter() if callable(self.data) else batches.sizes,
            row_shape=row_shape_of(example_of(first)),
        )


def subject_of_step(step: Callable[[Any], Any], data: Any) -> Subject:
    """Return a function that does a step, with its batches; it is measured as it is, and changes what it changes.

    Raises:
        ConfigurationError: Without batches, and for such as would be used up.
    """
    import torch

    name = named(step)
    if isinstance(data, (torch.Tensor, Mapping, str)):
        raise ConfigurationError(
            f"{type(data).__name__} is one batch for {name}, and no series of them.", "Pass [batch]."
        )
    if isinstance(data, Iterator) or not (callable(data) or isinstance(data, Iterable)):
        what = f"{type(data).__name__} gives {name} no batches again and again."
        raise ConfigurationError(
            what, "Pass a DataLoader, a list of batches, or a function that makes a batch of a size."
        )
    return Subject(name, OWN_STEP, lambda device: OwnBench(name, step, data, device), data)


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
        whole_or_none("length", self.length)


def checked_texts(data: Any) -> Sequence[Any] | None:
    """Return texts as a list, ``None`` where there are none to be read.

    Raises:
        ConfigurationError: For what is not a series of texts, for an empty one, and where there is no word in any.
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
