"""Workloads for benchmarks: annotation, torch modules and custom step functions, as steps on a device.

A step takes a batch from an iterator (the phase "data") and passes it through its phases. At full speed, the device is
synchronized only at the end of a step. Phase by phase, it is synchronized after each phase, so that each phase has its own time.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal

from ..._annotate import resolve_notes
from ..._events.activity import LOADING, ProgressEvent
from ..._render.display import SIMULATED_SUFFIX, SIMULATION_NOTICE, WARNING, Displayable, pluralize
from ..._utils.clock import current_time, time_call
from ..._utils.text import describe_value, model_label, short_type_name
from ..._utils.validation import check_bool, check_optional_integer
from ...annotation.references import effective_length, file_name_remedy, is_missing, iter_texts, read_text
from ...devices.backend import TENSOR_LOCK, get_rng_states, preserve_rng_states, use_rng_states
from ...devices.machine import format_device, is_mps_simulated
from ...devices.moving import copy_model, map_tensors, named_tensors, to_device, to_numpy
from ...devices.registry import (
    SMALLER_BATCH_REMEDY,
    SMALLER_MODEL_REMEDY,
    empty_cache,
    explain_out_of_memory,
    get_device,
)
from ...errors import ConfigurationError
from ...models.config import DEFAULT_STRATEGY, normalize_dtype
from ...models.loading import LoadSpec, dtype_of, load_from_spec
from ...models.records import load_batch_sizes
from ...models.registry import is_model_name
from ...session import SESSION
from ...training.epochs import function_name
from ...training.guards import get_loss
from ...training.steps import adamw
from .timing import (
    DATA,
    DECODE,
    FORWARD,
    MIN_REPEATS,
    REMEDIES,
    TRANSFER,
    Disturbance,
    Measured,
    PhaseTimes,
    repeat_measurement,
)

if TYPE_CHECKING:
    import torch

    from ...annotation.forward import Batch, ForwardRun
    from ...annotation.pipeline import AnnotationPipeline
    from ...annotation.storage import ResultStore
    from ...annotation.stream import Annotator, TokenizedChunk

# Tasks.
Task = Literal["annotation", "forward pass", "training step", "own step"]
ANNOTATION: Final = "annotation"
FORWARD_PASS: Final = "forward pass"  # noqa: S105 - not a password
TRAINING_STEP: Final = "training step"
CUSTOM_STEP: Final = "own step"

# Name of a phase, and the function that maps the result of the previous phase to its own. The first phase takes a batch.
Phase = tuple[str, Callable[[Any], object]]

DEFAULT_BATCH_SIZE = 32  # Minimum number of texts per step.
SYNTHETIC_BATCH_SIZE = 8  # Rows per synthetic training batch.
DEFAULT_LENGTH = 128  # Tokens per row of a fixed-shape workload.
BATCHES_PER_WORKER = 4  # Minimum number of measured batches per loader worker. Workers deliver batches in bursts.
LEARNING_RATE = 1e-5  # Its value does not affect the speed of a step.

# Synthetic texts for calls without data.
SYNTHETIC_TEXTS = (
    "Patient with type 2 diabetes mellitus and hypertension, admitted with chest pain and shortness of breath.",
    "No evidence of pneumonia. History of asthma and atrial fibrillation.",
    "The biopsy showed a moderately differentiated adenocarcinoma of the colon without lymph node metastasis.",
    "She denies fever, chills and night sweats; her rheumatoid arthritis is stable.",
)

BUILT_IN = "the built-in sentences"  # Name of these texts.

# Remedy for annotation that waits for its data.
TOKENIZATION_REMEDY = (
    "Tokenize on more cores: nb.cluster(...) distributes texts over several computers. "
    "A larger model or longer texts increase the work per token on the device."
)


@dataclass(frozen=True, repr=False)
class StepReport(Displayable):
    """Base class of the reports on measured steps.

    Attributes:
        name: Name of the model or the function.
        task: ``"annotation"``, ``"forward pass"``, ``"training step"`` or ``"own step"``.
        dtype: Data type of the model, or ``None`` for a function and for a model without parameters.
        workers: Number of loader workers.
        row_shape: Shape of a row, such as ``"3x224x224"``, or ``None`` for texts and for rows without a shape.
        texts: Number of your texts, which the steps repeat. ``None`` for built-in sentences and for other tasks.
        simulated: Whether MPS was simulated. Measurements on ``"mps"`` then do not represent real MPS hardware.
        disturbance: Why the times are not reliable, such as ``"the computer is busy"``, with the remedy. They are not shown, and
            nothing is concluded from them. ``None`` if they are reliable.
    """

    name: str
    task: str
    dtype: str | None = field(default=None, kw_only=True)
    workers: int = field(default=0, kw_only=True)
    row_shape: str | None = field(default=None, kw_only=True)
    texts: int | None = field(default=None, kw_only=True)
    simulated: bool = field(default=False, kw_only=True)
    disturbance: Disturbance | None = field(default=None, kw_only=True)

    COMMAND = ""  # Call that repeats the measurement.
    # The title labels the simulated device itself, because the same report may also cover the CPU.
    SIMULATION_MARKERS = (SIMULATION_NOTICE, "")

    def device_label(self, device: str) -> str:
        """Return the display name of a device, labeled if the device is simulated."""
        if self.simulated and get_device(device).can_be_simulated:
            return f"{device}{SIMULATED_SUFFIX}"
        return device

    @property
    def rows_source(self) -> str:
        """Source of the rows of an annotation as the end of a phrase, such as ``" from 20 texts"``, or an empty string."""
        if self.texts:
            return f" from {pluralize(self.texts, 'text')}"
        return f" from {BUILT_IN}" if self.task == ANNOTATION else ""

    @property
    def reliability_status(self) -> str:
        """Warning if the times are not reliable, or an empty string."""
        return WARNING if self.disturbance else ""

    @property
    def not_measured(self) -> str:
        """Reason why the times are not reliable, and the remedy, as sentences; empty if they are reliable."""
        return f"Not measured: {self.disturbance}. {self.disturbance.remedy}" if self.disturbance else ""

    def select_reliable(self, *shown: Measured) -> tuple[Measured, ...]:
        """Return values, tables or charts of times, or none of them if the times are not reliable."""
        return () if self.disturbance else shown

    @property
    def data_remedy(self) -> str:
        """Remedy for steps that wait for their data."""
        return TOKENIZATION_REMEDY if self.task == ANNOTATION else REMEDIES[DATA]


@dataclass(frozen=True)
class Workload:
    """Steps of work that can be measured.

    Attributes:
        name: Name of the model or the function.
        task: One of the tasks above.
        device: Name of the device in torch's notation.
        rows: Number of texts or rows per batch.
        length: Number of tokens per row, or ``None`` if it varies or rows are not tokens.
        batches: Function that starts a new iterator over the batches, which may be infinite.
        phases: Phases of a step, in order.
        loader: Loader that yields the batches, or ``None`` if there is none.
        dtype: Data type of the model, or ``None`` if it is unknown.
        batch_tokens: Maximum number of tokens per batch of texts on the device, or ``None`` for other tasks.
        row_shape: Shape of a row, as in :class:`StepReport`.
        texts: Number of texts, as in :class:`StepReport`.
    """

    name: str
    task: Task
    device: str
    rows: int
    length: int | None
    batches: Callable[[], Iterator[object]]
    phases: tuple[Phase, ...]
    loader: object = None
    dtype: str | None = None
    batch_tokens: int | None = None
    row_shape: str | None = None
    texts: int | None = None

    @property
    def workers(self) -> int:
        """Number of loader workers."""
        return int(getattr(self.loader, "num_workers", 0))

    @property
    def persistent_workers(self) -> set[int]:
        """Process ids of the workers that the loader keeps between iterations (``persistent_workers=True``)."""
        iterator = getattr(self.loader, "_iterator", None)
        return {worker.pid for worker in getattr(iterator, "_workers", ())}

    @property
    def prefetched_batches(self) -> int:
        """Number of batches that all loader workers hold ready together.

        Each worker prefetches ``prefetch_factor`` batches (``_MultiProcessingDataLoaderIter`` in
        ``torch/utils/data/dataloader.py``).
        """
        return self.workers * int(getattr(self.loader, "prefetch_factor", None) or 1)

    @property
    def report_fields(self) -> dict[str, Any]:
        """Values of the fields of :class:`StepReport`."""
        names = ("name", "task", "dtype", "workers", "row_shape", "texts")
        return {**{name: getattr(self, name) for name in names}, "simulated": is_mps_simulated()}

    @contextlib.contextmanager
    def open_batches(self) -> Iterator[Iterator[object]]:
        """Context manager that starts the batches, and stops their loader workers at its end."""
        batches = self.batches()
        try:
            with explain_out_of_memory(f"A batch of {self.rows} rows", self.device, SMALLER_BATCH_REMEDY):
                yield batches
        finally:
            if hasattr(batches, "close"):
                batches.close()

    def discard_prefetched(self, batches: Iterator[object]) -> None:
        """Discard the batches that the loader workers prefetched during a pause, so that steps wait as they do in a long run."""
        for _ in range(self.prefetched_batches):
            next(batches)

    def run(
        self, batch: object, phase_context: Callable[[str], AbstractContextManager[object]] = contextlib.nullcontext
    ) -> Any:
        """Run a step, wait until the device has finished it, and return the result of the last phase.

        Args:
            batch: Batch of the step.
            phase_context: Function that returns a context manager for a phase, given its name.
        """
        with TENSOR_LOCK:
            for name, phase in self.phases:
                with phase_context(name):
                    batch = phase(batch)
            get_device(self.device).synchronize()
        return batch

    def time_step(self, batch: object) -> float:
        """Return the duration of a step at full speed in seconds, without its data, starting on an idle device."""
        with TENSOR_LOCK:
            get_device(self.device).synchronize()
            return time_call(partial(self.run, batch))

    def time_steps(self, batches: Iterator[object], steps: int = 1) -> float:
        """Return the mean duration of consecutive steps at full speed in seconds, including their data."""
        total = 0.0
        for _ in range(steps):
            start = current_time()
            batch = next(batches)
            total += current_time() - start + self.time_step(batch)
        return total / steps

    def time_phases(self, batches: Iterator[object]) -> dict[str, float]:
        """Run a step with the next batch and return the duration of each phase in seconds.

        The device is synchronized after each phase.
        """
        times: dict[str, float] = {}

        @contextlib.contextmanager
        def time_phase(name: str) -> Iterator[None]:
            start = current_time()
            yield
            get_device(self.device).synchronize()
            times[name] = current_time() - start

        with time_phase(DATA):
            batch = next(batches)
        self.run(batch, time_phase)
        return times

    def measure_phase_times(self, batches: Iterator[object], max_steps: int) -> PhaseTimes:
        """Measure the time per phase over at most ``max_steps`` steps; slow steps are repeated less often."""
        self.discard_prefetched(batches)
        min_steps = max(MIN_REPEATS, BATCHES_PER_WORKER * self.workers)
        measured = repeat_measurement(partial(self.time_phases, batches), max(max_steps, min_steps), min_steps)
        seconds = {name: self.average(step[name] for step in measured) for name in measured[0]}
        return PhaseTimes(seconds, overlapped=self.task == ANNOTATION and get_device(self.device).is_accelerator)

    @property
    def average(self) -> Callable[[Iterable[float]], float]:
        """Function that averages the seconds of several steps.

        Texts are in memory, so that outliers are caused by other programs: the median ignores them. A loader delays only some
        of the steps: the mean includes them.
        """
        return statistics.median if self.task == ANNOTATION else statistics.fmean


@dataclass(frozen=True)
class BenchmarkTarget:
    """Object to measure, before it is placed on a device.

    Attributes:
        name: Name of the model or the function.
        build: Function that builds the benchmark on a device. It adds to the memory of the session and does not change the
            object that the user passed.
        spec: Specification of a token-classification model that is annotated with, or ``None`` if it has no files.
    """

    name: str
    build: Callable[[str], Benchmark]
    spec: LoadSpec | None = None


@contextlib.contextmanager
def build_benchmarks(target: BenchmarkTarget, devices: Sequence[str]) -> Iterator[dict[str, Benchmark]]:
    """Context manager that builds the benchmarks of a target on devices.

    At its end, it releases the memory and restores the global random number generators.
    """
    benchmarks: dict[str, Benchmark] = {}
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(preserve_rng_states())
            for index, device in enumerate(devices):
                subject = f"{model_label(target.name)} on {format_device(device)}"
                SESSION.notify(ProgressEvent(LOADING, subject, index, len(devices)))
                stack.enter_context(use_rng_states(get_rng_states(device)))
                with explain_out_of_memory(target.name, device, SMALLER_MODEL_REMEDY):
                    benchmarks[device] = target.build(device)
            yield benchmarks
    finally:
        benchmarks.clear()
        gc.collect()
        for device in devices:
            empty_cache(device)


def make_target(  # noqa: PLR0913 - one branch for each kind of model, and the options that its callers share
    model: Any,
    data: object = None,
    *,
    training: bool = False,
    length: int | None = None,
    device: str | None = None,
    arguments: Mapping[str, object],
    moved: bool = False,
) -> tuple[BenchmarkTarget, str]:
    """Validate the arguments of a benchmark, and return its target and the name of its device.

    The arguments are validated before a model is loaded, as far as possible.

    Args:
        model: Name of a model, pipeline, torch module or step function.
        data: Texts, example inputs, loader or batches.
        training: Whether training steps are measured.
        length: Number of tokens per row, or ``None`` for the default.
        device: Device to measure, or ``None`` for the device in ``arguments`` or of the session.
        arguments: Arguments for loading the model.
        moved: Whether the batches of a function are moved to the measured device.
    """
    check_bool("training", training)
    length = check_optional_integer("length", length)
    kind = short_type_name(model)
    # Checked before torch is imported. Pipelines, modules and step functions are callable.
    if not (is_model_name(model) or callable(model)) or isinstance(model, type):
        raise ConfigurationError(
            f"{kind} cannot be measured.",
            "Pass the name of a model, a pipeline, a torch module, or a step function first, and then the data.",
        )
    if not is_model_name(model):
        check_no_arguments(kind, arguments)
    load_arguments = dict(arguments) if device is None else {**arguments, "device": device}
    if is_token_classifier(model):
        texts = None if training else validate_texts(data)
        if texts:  # A step then has a random sample of the texts, also if they are sorted. The seed is fixed.
            random.Random(0).shuffle(texts)  # noqa: S311 - not a secret
        spec = SESSION.load_spec(model, load_arguments)[0] if is_model_name(model) else spec_of_pipeline(model)
        if training:
            pipe = pipeline_from_files(spec)
            make_example = partial(synthetic_labeled_batch, pipe, length)
            target = _target_from_module(pipe.model, data, training, spec.reference.name, make_example)
        else:
            target = target_from_files(spec, texts or SYNTHETIC_TEXTS, length)
    elif length is not None:
        raise ConfigurationError(
            f"length={length} has no effect, because the length is that of the batches.",
            "Remove length, and pass batches of that length.",
        )
    else:
        import torch

        if isinstance(model, torch.nn.Module):
            target = _target_from_module(model, data, training, type(model).__name__)
        else:  # A step function, whose side effects are not undone.
            name = function_name(model)
            if data is None:
                raise ConfigurationError(
                    f"There are no batches for {name}.",
                    "Pass data=, a function that returns a batch with a given number of rows. Except for a sweep, it may be a list of batches.",
                )
            target = _target_from_step(model, name, data if callable(data) else check_batches(name, data), moved)
    return target, SESSION.device(load_arguments.get("device")).device


def spec_of_pipeline(pipe: AnnotationPipeline) -> LoadSpec:
    """Return the specification of the model of a pipeline, or raise an error if the session has not loaded it."""
    key = SESSION.models.key_of(pipe.model)
    spec = key.spec if key else None
    if spec is None:
        raise ConfigurationError(
            "The session has not loaded the model of this pipeline.", "Pass the name of the model."
        )
    return spec


def is_token_classifier(model: object) -> bool:
    """Return whether ``model`` is a token-classification model, given as a name or as a pipeline."""
    if is_model_name(model):  # Importing the pipeline imports torch, which takes longer than the check of the texts.
        return True
    from ...annotation.pipeline import AnnotationPipeline

    return isinstance(model, AnnotationPipeline)


def check_no_arguments(name: str, arguments: Mapping[str, object]) -> None:
    """Raise ``ConfigurationError`` if there are load arguments for a model that is already loaded."""
    if arguments:
        raise ConfigurationError(
            f"{name} does not accept {', '.join(sorted(arguments))}, because it is already loaded.",
            "Pass the name of a model, or remove these arguments.",
        )


def target_from_files(spec: LoadSpec, texts: Sequence[object], length: int | None) -> BenchmarkTarget:
    """Return the target for annotation with a model that is loaded from its files, separate from the session."""
    name = spec.reference.name

    def build(device: str) -> AnnotationBenchmark:
        pipe = pipeline_from_files(spec, device)
        pipe.tuned_batch_tokens = load_batch_sizes(spec, SESSION.device_manager)
        return AnnotationBenchmark(name, pipe.default_annotator(), texts, length)

    return BenchmarkTarget(name, build, spec)


def pipeline_from_files(spec: LoadSpec, device: str = "cpu") -> AnnotationPipeline:
    """Return a pipeline with a model that is loaded from its files, unknown to the session."""
    from ...annotation.pipeline import build_pipeline

    return build_pipeline(load_from_spec(spec, device), DEFAULT_STRATEGY, {})


def validate_texts(data: object) -> list[str] | None:
    """Read texts as :func:`annotate` does, and return them without missing values, or ``None`` if ``data`` is ``None``.

    Raises:
        ConfigurationError: If there are no texts.
        InvalidTextError: If a value is not a text. The error names its index.
    """
    from ...annotation.stream import text_error

    if data is None:
        return None
    only = data[0] if isinstance(data, (list, tuple)) and len(data) == 1 else data
    if isinstance(only, str) and (remedy := file_name_remedy(only.strip())):
        raise ConfigurationError(f"The text looks like a file name ({describe_value(only.strip())}).", remedy)
    texts = []
    for index, item in enumerate(iter_texts(resolve_notes(data).texts)):
        text = read_text(item, index)
        if is_missing(text):
            continue
        if error := text_error(text, index):
            raise error
        texts.append(text)
    if not texts:
        raise ConfigurationError(
            "There are no texts to measure with, or all of them are missing.", "Pass at least one text."
        )
    return texts


@dataclass(frozen=True)
class AnnotationBenchmark:
    """Token-classification model on a device, with texts that are annotated repeatedly.

    Attributes:
        name: Name of the model.
        annotator: Model with its tokenizer.
        texts: Texts to annotate.
        length: Number of tokens per row of a fixed-shape workload and in the batch budget of a data workload. If ``None``,
            use 128 tokens, or the maximum of the model.
        step_tokens: Approximate minimum number of tokens of the texts of a step, if its number of texts is not given.
    """

    name: str
    annotator: Annotator
    texts: Sequence[object] = SYNTHETIC_TEXTS
    length: int | None = None
    step_tokens: int = 0

    @property
    def device(self) -> str:
        """Name of the device."""
        return str(self.annotator.network.device)

    def fixed_shape_workload(self, rows: int) -> Workload:
        """Return a workload over full rows of one length, without decoding, because the rows are not texts."""
        length = self.row_length
        network = self.annotator.network
        phases: tuple[Phase, ...] = (
            (TRANSFER, lambda inputs: network.copy_to_device([inputs])[0]),
            (FORWARD, network.forward_on_device),
            (DECODE, lambda outputs: list(map(to_numpy, outputs))),
        )
        batches = partial(itertools.repeat, network.dummy_inputs(rows, length))
        return Workload(
            self.name,
            ANNOTATION,
            self.device,
            rows,
            length,
            batches,
            phases,
            dtype=dtype_of(network.model),
            batch_tokens=rows * length,
        )

    def data_workload(self, rows: int | None = None) -> Workload:
        """Return a workload whose steps each annotate ``rows`` texts.

        If ``rows`` is given, a batch on the device may have as many tokens as a fixed-shape batch with this number of rows.
        Texts of similar length then form one batch. If ``None``, the budget of the annotator applies, as in
        :func:`annotate`, and a step has enough texts for a batch of full rows.
        """
        from ...annotation.stream import CHARACTERS_PER_TOKEN, Chunk

        annotator = self.annotator
        budget = annotator.budget
        if rows is not None:
            budget = replace(budget, max_tokens=rows * self.row_length)
        min_texts = int(self.step_tokens * CHARACTERS_PER_TOKEN / statistics.fmean(map(effective_length, self.texts)))
        size = rows or max(DEFAULT_BATCH_SIZE, budget.max_tokens // self.row_length, min_texts)

        def batches() -> Iterator[tuple[TokenizedChunk, list[Batch]]]:
            texts = itertools.cycle(self.texts)
            while True:
                chunk = annotator.tokenize(Chunk(0, list(itertools.islice(texts, size))))
                for error in chunk.errors.values():
                    raise error
                yield chunk, annotator.plan_batches(chunk, budget)

        def transfer(planned: tuple[TokenizedChunk, list[Batch]]) -> tuple[TokenizedChunk, ForwardRun]:
            chunk, batches = planned
            return chunk, annotator.copy_to_device(chunk, batches)

        def forward(started: tuple[TokenizedChunk, ForwardRun]) -> tuple[TokenizedChunk, ForwardRun]:
            started[1].start_pending()
            return started

        def decode(started: tuple[TokenizedChunk, ForwardRun]) -> ResultStore:
            chunk, run = started
            for error in run.window_errors.values():
                raise error
            run.collect()
            return annotator.decode(chunk, run)

        phases = ((TRANSFER, transfer), (FORWARD, forward), (DECODE, decode))
        return Workload(
            self.name,
            ANNOTATION,
            self.device,
            size,
            None,
            batches,
            phases,
            dtype=dtype_of(annotator.network.model),
            batch_tokens=budget.max_tokens,
            texts=None if self.texts is SYNTHETIC_TEXTS else len(self.texts),
        )

    @property
    def row_length(self) -> int:
        """Number of tokens per full row, including special tokens; by default 128, or the maximum of the model.

        Raises:
            ConfigurationError: If the length is above the maximum of the model.
        """
        annotator = self.annotator
        maximum = annotator.settings.max_tokens + annotator.network.special_tokens.num_special_tokens
        if self.length is not None and self.length > maximum:
            raise ConfigurationError(
                f"length={self.length} is above the maximum of the model.", f"Use a length of at most {maximum} tokens."
            )
        return self.length or min(DEFAULT_LENGTH, maximum)


def synthetic_labeled_batch(pipe: AnnotationPipeline, length: int | None) -> ModelInputs:
    """Return a synthetic batch of full rows with labels for training a token-classification model."""
    import torch

    benchmark = AnnotationBenchmark("", pipe.default_annotator(), length=length)
    arrays = benchmark.annotator.network.dummy_inputs(SYNTHETIC_BATCH_SIZE, benchmark.row_length)
    inputs = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return ModelInputs(kwargs={**inputs, "labels": torch.zeros_like(inputs["input_ids"])})


@dataclass(frozen=True)
class ModelInputs:
    """Arguments of a call of a model, on the CPU.

    Attributes:
        args: Positional arguments.
        kwargs: Keyword arguments.
    """

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __call__(self, model: torch.nn.Module) -> Any:
        """Call a model with these arguments and return its output."""
        return model(*self.args, **self.kwargs)

    def copy(self) -> ModelInputs:
        """Return copies of the tensors on the CPU for a model that may modify them."""
        copied: ModelInputs = map_tensors(self, lambda tensor: tensor.detach().to("cpu", copy=True))
        return copied


def parse_example_inputs(inputs: object) -> ModelInputs:
    """Convert example inputs to the arguments of a call of a model, with copies of the tensors on the CPU.

    Args:
        inputs: A tensor, a tuple or list of arguments, or a mapping of names to arguments.

    Raises:
        ConfigurationError: If there is no tensor.
    """
    example = model_inputs(inputs)
    if next(named_tensors(example), None) is None:
        raise ConfigurationError(
            f"{short_type_name(inputs)} without a tensor is not a valid example input of a model.",
            "Pass a tensor, a tuple of tensors, or a mapping, such as the output of a tokenizer with return_tensors='pt', with labels for training.",
        )
    return example.copy()


def loss_or_mean(output: object) -> torch.Tensor | None:
    """Return the loss in the output of a model, or the sum of the means of its outputs.

    Returns:
        A scalar with a gradient, or ``None`` if no output has a gradient.
    """
    import torch

    loss = get_loss(output)
    if loss is not None and loss.requires_grad:
        return loss
    tensors = [tensor for _, tensor in named_tensors(output) if tensor.requires_grad]
    return torch.stack([tensor.mean() for tensor in tensors]).sum() if tensors else None


def _target_from_module(
    model: torch.nn.Module,
    data: object,
    training: bool,
    name: str,
    make_example: Callable[[], ModelInputs] | None = None,
) -> BenchmarkTarget:
    """Return the target for a torch module, which is copied to each device.

    Args:
        model: Module to measure.
        data: Example inputs or a ``DataLoader``, or ``None``.
        training: Whether training steps are measured.
        name: Name of the model.
        make_example: Function that builds an example if there are no data.
    """
    import torch

    loader = data if isinstance(data, torch.utils.data.DataLoader) else None
    if data is not None:
        with preserve_rng_states():  # A loader draws a seed for each iteration.
            example = parse_example_inputs(data if loader is None else next(repeat_batches(loader)))
    elif make_example is not None:
        example = make_example()
    else:
        raise ConfigurationError(f"There are no inputs for {name}.", "Pass data=, a batch or a DataLoader.")
    if not _batch_size_of(example):
        raise ConfigurationError(f"The batch for {name} has no rows.", "Pass a batch with at least one row.")

    def build(device: str) -> BatchBenchmark:
        copied = copy_model(model, device).train(training)
        dtype = next((normalize_dtype(parameter.dtype) for parameter in copied.parameters()), None)

        def transfer(batch: object) -> ModelInputs:
            inputs = model_inputs(batch)
            return ModelInputs(to_device(inputs.args, device), to_device(inputs.kwargs, device))

        def forward(inputs: ModelInputs) -> object:
            with torch.set_grad_enabled(training):
                output = inputs(copied)
                loss = loss_or_mean(output) if training else output
            if loss is None:
                raise ConfigurationError(
                    f"No output of {name} depends on a trainable parameter.", "Remove training=True."
                )
            return loss

        phases: tuple[Phase, ...] = ((TRANSFER, transfer), (FORWARD, forward))
        parameters = [parameter for parameter in copied.parameters() if parameter.requires_grad]
        if training and parameters:
            optimizer = adamw(parameters, lr=LEARNING_RATE)

            def step(_backward_result: None) -> None:
                optimizer.step()
                optimizer.zero_grad()

            phases = (*phases, ("backward", torch.Tensor.backward), ("optimizer", step))
        task: Task = TRAINING_STEP if training else FORWARD_PASS
        return BatchBenchmark(name, task, device, phases, example, loader, dtype=dtype)

    return BenchmarkTarget(name, build)


def _target_from_step(
    step: Callable[[Any], object], name: str, data: Iterable[object] | Callable[[int], object], moved: bool
) -> BenchmarkTarget:
    """Return the target for a step function.

    Args:
        step: Function that runs a step with a batch.
        name: Name of the function.
        data: Loader, or function that builds a batch with a given number of rows.
        moved: Whether the batches are moved to the device first.
    """

    def build(device: str) -> BatchBenchmark:
        phases: tuple[Phase, ...] = (("step", step),)
        if moved:
            phases = ((TRANSFER, partial(to_device, device=device)), *phases)
        if callable(data):
            return BatchBenchmark(name, CUSTOM_STEP, device, phases, make_batch=data)
        return BatchBenchmark(name, CUSTOM_STEP, device, phases, loader=data)

    return BenchmarkTarget(name, build)


@dataclass(frozen=True)
class BatchBenchmark:
    """Steps of a module or a function on a device, with their batches.

    Attributes:
        name: Name of the model or the function.
        task: Task of the steps.
        device: Measured device. The code of a function decides where it computes.
        phases: Phases of a step, in order.
        example: Example batch on the CPU, or ``None`` for a function.
        loader: Loader, or ``None`` if there is none.
        make_batch: Function that builds a batch with a given number of rows, or ``None``.
        dtype: Data type of the model, or ``None`` if it is unknown.
    """

    name: str
    task: Task
    device: str
    phases: tuple[Phase, ...]
    example: ModelInputs | None = None
    loader: Iterable[object] | None = None
    make_batch: Callable[[int], object] | None = None
    dtype: str | None = None

    def fixed_shape_workload(self, rows: int) -> Workload:
        """Return a workload over one batch in memory with the given number of rows.

        The rows of an example are repeated. A tensor has rows if its first dimension equals that of the first tensor. This
        includes a 4x4 mask in a batch of 4 rows. Other tensors are unchanged.

        Raises:
            ConfigurationError: If no batch with this number of rows can be built.
        """
        import torch

        batch: object
        if self.make_batch is not None:
            batch = self.make_batch(rows)
            actual_rows = _batch_size_of(batch)
            # Fewer rows would give a wrong throughput. Models that take the sequence first have the rows as second dimension.
            sizes = {size for _, tensor in named_tensors(batch) for size in tensor.shape[:2]}
            if sizes and actual_rows < rows and rows not in sizes:
                raise ConfigurationError(
                    f"{function_name(self.make_batch)} returned a batch of {actual_rows} rows instead of {rows}.",
                    f"Return the requested number of rows, or set max_batch_size={actual_rows}.",
                )
        elif self.example is not None:
            example_rows = _batch_size_of(self.example)
            index = torch.arange(rows) % example_rows

            def repeat_rows(tensor: torch.Tensor) -> torch.Tensor:
                return tensor[index] if tensor.dim() and tensor.shape[0] == example_rows else tensor

            batch = map_tensors(self.example, repeat_rows)
        else:
            raise ConfigurationError(
                f"{self.name} has no batch with {rows} rows.",
                "Pass a function that takes a number of rows and returns a batch.",
            )
        return self._workload(rows, batch, partial(itertools.repeat, batch))

    def data_workload(self, rows: int | None = None) -> Workload:
        """Return a workload over the batches of the loader, or over one batch in memory if there is no loader."""
        if self.loader is None:
            return self.fixed_shape_workload(rows or (1 if self.example is None else _batch_size_of(self.example)))
        if rows is not None:
            raise ConfigurationError("The loader sets the batch size.", "Remove batch_size.")
        example = self.example or next(repeat_batches(self.loader))
        return self._workload(_batch_size_of(example), example, partial(repeat_batches, self.loader), self.loader)

    def _workload(
        self,
        rows: int,
        example: object,
        batches: Callable[[], Iterator[object]],
        loader: Iterable[object] | None = None,
    ) -> Workload:
        length = None
        if self.loader is None and isinstance(example, ModelInputs) and "input_ids" in example.kwargs:
            length = int(example.kwargs["input_ids"].shape[-1])
        return Workload(
            self.name,
            self.task,
            self.device,
            rows,
            length,
            batches,
            self.phases,
            loader,
            dtype=self.dtype,
            row_shape=_row_shape(example),
        )


def model_inputs(batch: object) -> ModelInputs:
    """Convert a batch of a loader to the arguments of a call of a model, without copies."""
    if isinstance(batch, ModelInputs):
        return batch
    if isinstance(batch, Mapping):
        return ModelInputs(kwargs=dict(batch))
    return ModelInputs(tuple(batch) if isinstance(batch, (list, tuple)) else (batch,))


def _row_shape(batch: object) -> str | None:
    """Return the shape of a row of the first tensor with at least two dimensions, or ``None`` if there is none.

    Example:
        >>> import torch
        >>> _row_shape((torch.ones(4, 3, 16, 16),)), _row_shape(torch.ones(4))
        ('3x16x16', None)
    """
    shapes = (tensor.shape[1:] for _, tensor in named_tensors(batch) if tensor.dim() > 1)
    return next(("x".join(map(str, shape)) for shape in shapes), None)


def check_batches(name: str, data: object) -> Iterable[object]:
    """Return batches, or raise ``ConfigurationError`` if data are not batches or can be iterated only once.

    Args:
        name: Name of the model or the function.
        data: Data to check.
    """
    import torch

    if isinstance(data, (torch.Tensor, Mapping, str, Iterator)) or not isinstance(data, Iterable):
        raise ConfigurationError(
            f"{short_type_name(data)} cannot be iterated repeatedly for the batches of {name}.",
            "Pass a DataLoader, or a list of batches.",
        )
    return data


def repeat_batches(loader: Iterable[object]) -> Iterator[Any]:
    """Yield the batches of a loader again and again.

    Raises:
        ConfigurationError: If there are none, for example because the loader can be iterated only once.
    """
    while True:
        is_empty = True
        for batch in loader:
            is_empty = False
            yield batch
        if is_empty:
            raise ConfigurationError(
                "The loader yields no batches.", "Pass a loader with items that can be iterated repeatedly."
            )


def _batch_size_of(batch: object) -> int:
    """Return the number of rows of a batch: the first dimension of its first tensor that has dimensions, or 1.

    Example:
        >>> import torch
        >>> _batch_size_of({"rate": torch.tensor(0.5), "x": torch.ones(4, 2)}), _batch_size_of("no tensor")
        (4, 1)
    """
    return next((int(tensor.shape[0]) for _, tensor in named_tensors(batch) if tensor.dim()), 1)


# A model or a function on a device. Its ``fixed_shape_workload`` has batches of one shape that are ready in host memory. Its
# ``data_workload`` tokenizes texts or loads batches.
Benchmark = AnnotationBenchmark | BatchBenchmark
