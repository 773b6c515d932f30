"""What a person can have measured: annotation, a module of torch, or a step of their own, each ready on a device."""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..._utils.clock import now
from ..._utils.text import cause, model_label, short_type_name
from ..._utils.validation import check_flag, whole_or_none
from ...devices.backend import random_numbers_kept
from ...devices.moving import copy_of, named_tensors, to_array, to_device, with_tensors
from ...devices.registry import device_of
from ...errors import ConfigurationError
from ...models.config import dtype_name
from ...models.loading import LoadSpec, dtype_of, is_quantized, load
from ...models.registry import is_named
from ...session import SESSION
from ...training.curve import GATE_EPOCHS, MemoryCurve
from ...training.epochs import epochs, named
from ...training.steps import adamw
from ..checks.operators.forecast import Example, loss_or_mean, read_example
from ..checks.precision.parity import whole_texts, with_model
from .workloads import (
    ANNOTATION,
    DECODE,
    FORWARD,
    FORWARD_PASS,
    OWN_STEP,
    TRAINING_STEP,
    TRANSFER,
    Bench,
    Phase,
    Subject,
    Workload,
    generators_kept,
    put_on_devices,
)

if TYPE_CHECKING:
    import torch

    from ...annotation.forward import Batch
    from ...annotation.pipeline import AnnotationPipeline
    from ...annotation.results import Answers
    from ...annotation.stream import Annotator, Prepared

    # Texts, tokenised and filled into batches, with the arrays, or the outputs, of each batch.
    Filled = tuple[Prepared, list[Batch], list[Any]]

ROWS = 32  # How many texts a batch has by default.
EXAMPLE_ROWS = 8  # How many rows a synthetic training batch has.
LENGTH = 128  # How many tokens a row of one shape has by default.
RATE = 1e-5  # The learning rate of measured steps; it makes no difference to their speed.

# Synthetic texts, used if a person passes none.
TEXTS = (
    "Patient with type 2 diabetes mellitus and hypertension, admitted with chest pain and shortness of breath.",
    "No evidence of pneumonia. History of asthma and atrial fibrillation.",
    "The biopsy showed a moderately differentiated adenocarcinoma of the colon without lymph node metastasis.",
    "She denies fever, chills and night sweats; her rheumatoid arthritis is stable.",
)


@dataclass(frozen=True)
class AnnotationBench:
    """A model for token classification on a device, with texts that are read again and again."""

    name: str  # What a person calls the model.
    annotator: Annotator  # The model with its tokenizer.
    texts: Sequence[Any] = TEXTS  # The texts.
    # How many tokens a row of :meth:`bucket` has, and a row that the budget of :meth:`stream` is counted in.
    length: int | None = None

    @property
    def device(self) -> str:
        return str(self.annotator.network.device)

    def bucket(self, rows: int) -> Workload:
        """Return steps over full rows of one length; nothing is decoded, because the rows are not texts."""
        length = self.row_length
        inputs = self.annotator.network.full_rows(rows, length)
        phases: tuple[Phase, ...] = (
            (TRANSFER, lambda inputs: self.annotator.network.moved([inputs])[0]),
            (FORWARD, self.annotator.network.started),
            (DECODE, lambda outputs: [to_array(tensor) for tensor in outputs]),
        )
        return self._workload(rows, length, lambda: itertools.repeat(inputs), phases, rows * length)

    def stream(self, rows: int | None = None) -> Workload:
        """Return steps that each read ``rows`` texts and find their entities.

        With a number of rows, a batch on the device may have as many tokens as a bucket of that many has: texts of about one
        length are then one batch. Without one, it may have what the annotator's own budget says.
        """
        budget = self.annotator.budget
        if rows is not None:
            budget = replace(budget, tokens=rows * self.row_length, rows=None)
        annotator, size = replace(self.annotator, budget=budget), rows or ROWS

        def batches() -> Iterator[Filled]:
            texts = itertools.cycle(self.texts)
            while True:
                yield filled(annotator, list(itertools.islice(texts, size)))

        def decode(done: Filled) -> Answers:
            from ...annotation.forward import ForwardRun, settled

            prepared, batches, outputs = done
            arrays = [[to_array(tensor) for tensor in tensors] for tensors in outputs]
            run = ForwardRun(prepared.tokens, prepared.windows)
            collected = settled(run, annotator.network, list(zip(batches, arrays, strict=True)))
            return annotator.decode(prepared, collected)

        move = annotator.network.moved
        phases = (
            (TRANSFER, lambda done: (*done[:2], move(done[2]))),
            (FORWARD, on_each(annotator.network.started)),
            (DECODE, decode),
        )
        return self._workload(size, None, batches, phases, budget.tokens)

    @property
    def row_length(self) -> int:
        """How many tokens a full row has: at most as many as the model reads."""
        longest = longest_row(self.annotator)
        if self.length is not None and self.length > longest:
            what = f"length={self.length} is more than the {longest} tokens that {self.name} reads at once."
            raise ConfigurationError(what, f"Pass length={longest}, or less.")
        return self.length or min(LENGTH, longest)

    def _workload(
        self, rows: int, length: int | None, batches: Any, phases: tuple[Phase, ...], tokens: int
    ) -> Workload:
        work, dtype = (rows, length, batches, phases), dtype_of(self.annotator.network.model)
        return Workload(self.name, ANNOTATION, self.device, *work, dtype=dtype, batch_tokens=tokens)


def longest_row(annotator: Annotator) -> int:
    """Return how many tokens the model reads at once."""
    return annotator.settings.limit + annotator.network.frame.size


def on_each(phase: Callable[[Any], Any]) -> Callable[[Filled], Filled]:
    """Return what does a phase with each batch of filled texts."""
    return lambda done: (*done[:2], [phase(one) for one in done[2]])


def filled(annotator: Annotator, texts: list[Any]) -> Filled:
    """Return texts tokenised and filled into batches; the first text that cannot be read raises its error."""
    from ...annotation.forward import fill
    from ...annotation.stream import Chunk

    prepared = annotator.prepare(Chunk(0, texts))
    if prepared is None:
        raise ConfigurationError("There is no text to measure with.", "Pass at least one text.")
    for failure in prepared.failures.values():
        raise failure
    batches = annotator.batches(prepared, annotator.budget)
    arrays = [fill(prepared.tokens, prepared.windows, batch, annotator.network) for batch in batches]
    return prepared, batches, arrays


def in_same_batches(benches: Mapping[str, Bench]) -> Mapping[str, Bench]:
    """Return benches that read texts in the batches of one device: of the first but the CPU, if there is one."""
    leading = next((bench for name, bench in benches.items() if device_of(name).is_accelerator), None)
    if not isinstance(leading, AnnotationBench):
        return benches
    alike = {name: bench for name, bench in benches.items() if isinstance(bench, AnnotationBench)}
    budget = leading.annotator.budget
    return {name: replace(one, annotator=replace(one.annotator, budget=budget)) for name, one in alike.items()}


def subject_of_files(spec: LoadSpec, texts: Sequence[Any] | None, length: int | None = None) -> Subject:
    """Return a model from its files, to be loaded beside those of the session."""
    name = spec.reference.name

    def on(device: str) -> AnnotationBench:
        annotator = whole_texts(pipeline_of_files(spec, device).own_annotator())
        return AnnotationBench(name, annotator, texts or TEXTS, length)

    return Subject(name, ANNOTATION, on)


def pipeline_of_files(spec: LoadSpec, device: str = "cpu") -> AnnotationPipeline:
    """Return a pipeline over a model from its files, of which the session knows nothing."""
    from ...annotation.pipeline import build_pipeline
    from ...models.config import DEFAULT_STRATEGY

    return build_pipeline(load(spec, device), DEFAULT_STRATEGY, {})


def subject_of_pipeline(pipe: AnnotationPipeline, texts: Sequence[Any] | None, length: int | None) -> Subject:
    """Return a pipeline, itself on its own device and with a copy of its model on others; int8 cannot leave the CPU."""
    from ...annotation.pipeline import device_budget

    name, annotator = type(pipe.model).__name__, whole_texts(pipe.own_annotator())

    def on(device: str) -> AnnotationBench:
        import torch

        place = torch.device(device)
        if place.type == pipe.device.type and place.index in {None, pipe.device.index}:
            return AnnotationBench(name, annotator, texts or TEXTS, length)
        if is_quantized(pipe.model):
            raise ConfigurationError(f"{name} in int8 runs on the CPU only.", "Pass the model's name.")
        moved = with_model(annotator, copy_of(pipe.model, device).eval())
        budget = replace(device_budget(place, annotator.network.model), padding=annotator.budget.padding)
        return AnnotationBench(name, replace(moved, budget=budget), texts or TEXTS, length)

    return Subject(name, ANNOTATION, on)


@dataclass
class ModuleBench:
    """A copy of a module on a device, and batches for it."""

    name: str  # What the person calls it, or the name of the class.
    model: torch.nn.Module  # The copy.
    device: str  # As torch spells it.
    training: bool  # Whether a step trains.
    example: Example  # A batch, on the CPU, for rows of one shape.
    loader: Iterable[Any] | None = None  # Gives batches, again and again; ``None`` to take the example.
    optimizer: Any = None  # Made with the first step.
    writes: bool | None = None  # Whether the model wrote into its first batch; ``None`` before it had one.

    def bucket(self, rows: int) -> Workload:
        """Return steps over batches like the example, with so many rows."""
        batch = with_rows(self.example, rows)
        return self._workload(rows, lambda: itertools.repeat(batch))

    def stream(self, rows: int | None = None) -> Workload:
        """Return steps over the batches of the loader, or over the example if there is none."""
        first = rows_in(self.example.tensors)
        if self.loader is None:
            return self.bucket(rows or first)
        if rows is not None:
            raise ConfigurationError("A loader has a batch size of its own.", "Leave batch_size out.")
        loader, sizes = self.loader, Counter[int]()
        return self._workload(first, lambda: Repeated(loader, sizes, example_of), sizes)

    def transfer(self, example: Example) -> Example:
        """Return a batch on the device; on the CPU that is the person's own, and a copy for a model that writes into it."""
        if not device_of(self.device).is_accelerator and self.writes is not False:
            return example.copied()
        return Example(to_device(example.args, self.device), to_device(example.kwargs, self.device))

    def called(self, example: Example) -> Any:
        """Return what the model returns, and note at its first batch whether it writes into that."""
        before = versions(example) if self.writes is None else []
        answer = example(self.model)
        if self.writes is None:
            self.writes = None in before or versions(example) != before
        return answer

    def forward(self, example: Example) -> Any:
        import torch

        with torch.no_grad():
            return self.called(example)

    def loss(self, example: Example) -> Any:
        """Run a forward pass and return the loss; it is an error if nothing that the model returns has a gradient."""
        import torch

        with torch.enable_grad():
            loss = loss_or_mean(self.called(example))
        if loss is None:
            what = f"Nothing that {self.name} returns depends on a parameter that learns."
            raise ConfigurationError(what, "Leave training=True out.")
        return loss

    def step(self, _done: None) -> None:
        """Do the optimizer's step, and drop the gradients."""
        if self.optimizer is None:
            self.optimizer = adamw([one for one in self.model.parameters() if one.requires_grad], lr=RATE)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _workload(self, rows: int, batches: Any, sizes: Counter[int] | None = None) -> Workload:
        training = ((FORWARD, self.loss), ("backward", lambda loss: loss.backward()), ("optimizer", self.step))
        ids = self.example.kwargs.get("input_ids")
        return Workload(
            self.name,
            TRAINING_STEP if self.training else FORWARD_PASS,
            self.device,
            rows,
            int(ids.shape[-1]) if self.loader is None and ids is not None and ids.dim() > 1 else None,
            batches,
            ((TRANSFER, self.transfer), *(training if self.training else ((FORWARD, self.forward),))),
            dtype=next((dtype_name(one.dtype) for one in self.model.parameters()), None),
            sizes=Counter() if sizes is None else sizes,
            row_shape=row_shape_of(self.example),
            **read_ahead(self.loader),
        )


def example_of(batch: Any) -> Example:
    """Return a batch of a loader as a model is called with it, without copies."""
    if isinstance(batch, Mapping):
        return Example(kwargs=dict(batch))
    return Example(tuple(batch) if isinstance(batch, (list, tuple)) else (batch,))


def versions(example: Example) -> list[int | None]:
    """Return how often each tensor of a batch was written into, ``None`` if torch does not count that."""
    tensors = [tensor for _, tensor in named_tensors(example.tensors)]
    return [None if one.is_inference() else one._version for one in tensors]  # noqa: SLF001 - torch's only name for it


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
    """Return a batch with another number of rows, which repeats those of the example; tensors without rows stay.

    A tensor has rows if its first size is that of the first tensor: a mask of 4 times 4 too, if the batch has 4 rows.

    Example:
        >>> import torch
        >>> with_rows(Example((torch.tensor([[1], [2]]), torch.tensor(0.5))), 3).args
        (tensor([[1],
                [2],
                [1]]), tensor(0.5000))
    """
    import torch

    there = rows_in(example.tensors)
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
    """Return a torch module, of which a copy is measured on each device; ``synthetic`` makes an example if there are no data."""
    import torch

    name = name or type(model).__name__
    loader = data if isinstance(data, torch.utils.data.DataLoader) else None
    if data is not None:
        with random_numbers_kept(), generators_kept(data):  # A loader draws a seed whenever it is read.
            example = read_example(data if loader is None else first_of(loader))
    elif synthetic is not None:
        example = synthetic()
    else:
        raise ConfigurationError(f"There is nothing to call {name} with.", "Pass a batch, or a DataLoader.")
    check_call(model, name, example)

    def on(device: str) -> ModuleBench:
        copied = copy_of(model, device)
        return ModuleBench(name, copied.train() if training else copied.eval(), device, training, example, loader)

    return Subject(name, TRAINING_STEP if training else FORWARD_PASS, on, data)


def check_call(model: torch.nn.Module, name: str, example: Example) -> None:
    """Refuse an example without rows, and arguments that ``forward`` does not take; a model's own hooks may change them."""
    tensors = [tensor for _, tensor in named_tensors(example.tensors)]
    if not (rows_in(example.tensors) and any(tensor.numel() for tensor in tensors)):
        raise ConfigurationError(f"The batch for {name} has no rows.", "Pass one with at least one row.")
    if model._forward_pre_hooks:  # noqa: SLF001 - torch has no public name for them
        return
    try:
        inspect.signature(model.forward).bind(*example.args, **example.kwargs)
    except ValueError:  # A forward that is compiled has no signature.
        return
    except TypeError as error:
        what = f"{name} does not take what the data give: {cause(error)}."
        raise ConfigurationError(what, "Pass batches as it is called with them, without anything else.") from error


@dataclass(frozen=True)
class OwnBench:
    """A function and its batches."""

    name: str  # The name of the function.
    step: Callable[[Any], Any]  # Does a step with a batch as the loader gives it.
    data: Iterable[Any] | Callable[[int], Any]  # A loader, or a function that makes a batch of a size.
    device: str  # The device that is measured; where the function computes is up to its own code.
    moved: bool = False  # Whether its batches are moved there first, so that it computes there.

    def bucket(self, rows: int) -> Workload:
        """Return steps over one batch that lies ready; it must have the rows that were asked for."""
        if not callable(self.data):
            what = f"No batch of {rows} rows can be made for {self.name}."
            raise ConfigurationError(what, "Pass a function that takes a number of rows and returns a batch.")
        batch = self.data(rows)
        sizes, there = [tensor.shape[:2] for _, tensor in named_tensors(batch) if tensor.dim()], rows_in(batch)
        # With fewer rows the throughput would be wrong. They may be the second size, as in models that take the sequence first.
        if sizes and there < rows and not any(rows in size for size in sizes):
            what = f"{named(self.data)} made a batch of {there} rows where {rows} were asked for."
            raise ConfigurationError(what, f"Make them of any size, or ask for no more: largest={there}.")
        return self._workload(rows, [batch], batch)

    def stream(self, rows: int | None = None) -> Workload:
        """Return steps over the batches of the loader."""
        if callable(self.data):
            return self.bucket(rows or 1)
        with generators_kept(self.data):
            first = first_of(self.data)
        return self._workload(rows_in(first), self.data, first)

    def _workload(self, rows: int, batches: Iterable[Any], first: Any) -> Workload:
        sizes = Counter[int]()
        moving = ((TRANSFER, lambda batch: to_device(batch, self.device)),) if self.moved else ()
        return Workload(
            self.name,
            OWN_STEP,
            self.device,
            rows,
            None,
            lambda: Repeated(batches, sizes),
            (*moving, ("step", lambda batch: self.step(fresh(batch)))),
            sizes=Counter() if callable(self.data) else sizes,
            row_shape=row_shape_of(example_of(first)),
            **read_ahead(self.data),
        )


def subject_of_step(step: Callable[[Any], Any], data: Any, moved: bool) -> Subject:
    """Return a function that does a step, with its batches; it is measured as it is, and changes what it changes."""
    name = named(step)
    if not callable(data):
        check_series(name, data, "a DataLoader, a list of batches, or a function that makes a batch of a size")
    return Subject(name, OWN_STEP, lambda device: OwnBench(name, step, data, device, moved), data)


def check_series(name: str, data: Any, such_as: str = "a DataLoader, or a list of batches") -> None:
    """Refuse data for a model or a function of a name that are no batches, or none that can be read again."""
    import torch

    if isinstance(data, (torch.Tensor, Mapping, str)):
        what = f"{short_type_name(data)} is one batch for {name}, not a series of batches."
        raise ConfigurationError(what, "Pass [batch].")
    if isinstance(data, Iterator) or not isinstance(data, Iterable):
        what = f"{short_type_name(data)} does not give {name} batches again and again."
        raise ConfigurationError(what, f"Pass {such_as}.")


def read_ahead(loader: Any) -> dict[str, Any]:
    """Return how many processes of a loader read ahead, and how many batches they hold ready, as a workload has them.

    It is ``prefetch_factor`` for each of ``num_workers`` (``_MultiProcessingDataLoaderIter`` in ``torch/utils/data/dataloader.py``).
    """
    workers = int(getattr(loader, "num_workers", 0))
    return {"workers": workers, "ahead": workers * int(getattr(loader, "prefetch_factor", None) or 1)}


class Repeated(Iterator[Any]):
    """The batches of a loader, again and again without an end; ``sizes`` counts those of each number of rows."""

    def __init__(
        self, loader: Iterable[Any], sizes: Counter[int], form: Callable[[Any], Any] = lambda batch: batch
    ) -> None:
        # How many seconds of the last batch went into starting the processes of a loader that begins anew. A loader with
        # persistent_workers starts none; and if each pass over the data has one batch, it is a part of the data.
        self.starting = 0.0
        self._loader, self._sizes, self._form = loader, sizes, form
        self._batches: Iterator[Any] = iter(())
        self._given = 0
        self._starts = getattr(loader, "num_workers", 0) > 0 and not getattr(loader, "persistent_workers", False)

    def __next__(self) -> Any:
        begin, ended = now(), object()
        batch = next(self._batches, ended)
        self.starting = 0.0
        if batch is ended:
            several, self._given = self._given > 1, 0
            self._batches = iter(self._loader)
            batch = first_of(self._batches)
            self.starting = now() - begin if several and self._starts else 0.0
        self._given += 1
        self._sizes[rows_in(batch)] += 1
        return self._form(batch)

    def close(self) -> None:
        """Let the loader go, with its processes."""
        self._batches = iter(())


def first_of(loader: Iterable[Any]) -> Any:
    """Return the first batch of a loader; one that gives none, such as one that can be read only once, is an error."""
    for batch in loader:
        return batch
    raise ConfigurationError("The loader gives no batch.", "Pass one with items, which can be read again and again.")


def rows_in(batch: Any) -> int:
    """Return how many rows a batch has: the first size of its first tensor that has one.

    Example:
        >>> import torch
        >>> rows_in({"rate": torch.tensor(0.5), "x": torch.ones(4, 2)}), rows_in("no tensor")
        (4, 1)
    """
    return next((int(tensor.shape[0]) for _, tensor in named_tensors(batch) if tensor.dim()), 1)


def fresh(batch: Any) -> Any:
    """Return a batch out of which a step may take things: its mappings and lists are copies, its tensors are not."""
    copied = with_tensors(batch, lambda tensor: tensor)
    return copy.copy(copied) if copied is batch and isinstance(batch, (dict, list)) else copied


def check_no_arguments(name: str, arguments: Mapping[str, Any]) -> None:
    """Refuse arguments of a load for a model that is loaded already."""
    if arguments:
        what = f"{name} takes no {', '.join(sorted(arguments))}: it is loaded already."
        raise ConfigurationError(what, "Pass a model's name, or leave them out.")


def annotates(model: Any) -> bool:
    """Tell whether a model is one for token classification, by name or as a pipeline."""
    from ...annotation.pipeline import AnnotationPipeline

    return is_named(model) or isinstance(model, AnnotationPipeline)


def is_own_step(model: Any) -> bool:
    """Tell whether what should be measured is a function that does a step."""
    import torch

    return callable(model) and not (annotates(model) or isinstance(model, (torch.nn.Module, type)))


def subject_of(  # noqa: PLR0913 - what sweep(), compare() and profile() were asked for
    model: Any,
    data: Any = None,
    *,
    training: bool = False,
    length: int | None = None,
    device: str | None = None,
    arguments: Mapping[str, Any],
    moved: bool = False,
) -> tuple[Subject, str]:
    """Return what a person wants measured, and the device for it; what can be checked is checked before a model is loaded.

    ``moved`` tells whether the batches of a function are moved to the device that is measured.
    """
    check_flag("training", training)
    length = whole_or_none("length", length)
    kind = short_type_name(model)
    if isinstance(model, type):
        name = model_label(model.__name__)
        raise ConfigurationError(f"{name} is a class.", f"Pass an instance: {name}(...).")
    if not (is_named(model) or callable(model)):
        remedy = "Pass a model's name, a pipeline, a torch module, or a function that does a step."
        raise ConfigurationError(f"{kind} cannot be measured.", remedy)
    if not is_named(model):
        check_no_arguments(kind, arguments)
    given = dict(arguments) if device is None else {**arguments, "device": device}
    if annotates(model):
        subject = subject_of_model(model, data, training, length, given)
    elif length is not None:
        what = f"length={length} has no effect here: the batches have their own."
        raise ConfigurationError(what, "Leave length out, and pass batches of that length.")
    else:
        own = is_own_step(model)
        subject = subject_of_step(model, data, moved) if own else subject_of_module(model, data, training)
    return subject, SESSION.device(given.get("device")).device


@contextlib.contextmanager
def benched(
    model: Any, data: Any = None, *, training: bool, device: str, arguments: Mapping[str, Any]
) -> Iterator[Any]:
    """Put what a person wants measured on its device for a block."""
    subject, place = subject_of(model, data, training=training, device=device, arguments=arguments)
    with put_on_devices(subject, [place]) as benches:
        yield benches[place]


def memory_of_epochs(workload: Workload, steps: int, device: str) -> MemoryCurve:
    """Return the memory of ten epochs of so many steps each."""
    loop = epochs(GATE_EPOCHS, device)
    with workload.begun() as batches:
        for _epoch in loop:
            for _step in range(steps):
                workload.run(next(batches))
    return loop.curve


def subject_of_model(model: Any, data: Any, training: bool, length: int | None, given: Mapping[str, Any]) -> Subject:
    """Return a model for token classification, by name or as a pipeline, that annotates texts or is trained."""
    if not training:
        texts = checked_texts(data)
        if is_named(model):
            return subject_of_files(SESSION.files(model, given)[0], texts, length)
        return subject_of_pipeline(model, texts, length)
    if isinstance(data, (list, tuple)) and any(isinstance(one, str) for one in data):
        remedy = "Pass a DataLoader or a batch with labels, or leave data out."
        raise ConfigurationError("Texts cannot train a model: they have no labels.", remedy)
    name = None
    if is_named(model):
        spec = SESSION.files(model, given)[0]
        model, name = pipeline_of_files(spec), spec.reference.name
    return subject_of_module(model.model, data, True, lambda: labelled_rows(model, length or LENGTH), name)


def checked_texts(data: Any) -> Sequence[Any] | None:
    """Return texts as a list, ``None`` for none; a series without a text, or without a word in any, is an error."""
    from ...annotation.references import stream_of

    if data is None:
        return None
    texts = list(stream_of(data))
    if not texts:
        raise ConfigurationError("There is no text to measure with.", "Pass at least one text.")
    if all(isinstance(text, str) and not text.strip() for text in texts):
        raise ConfigurationError("There is no word to measure with in these texts.", "Pass some with words.")
    return texts


def labelled_rows(pipe: AnnotationPipeline, length: int) -> Example:
    """Return a batch of full rows with labels, as a model for token classification takes them in training."""
    import torch

    annotator = pipe.own_annotator()
    arrays = annotator.network.full_rows(EXAMPLE_ROWS, min(length, longest_row(annotator)))
    inputs = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return Example(kwargs={**inputs, "labels": torch.zeros_like(inputs["input_ids"])})
