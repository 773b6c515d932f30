"""What can be measured: annotation, a module of torch, or a step of a person's own, each as steps of work on a device.

A step takes a batch from an iterator, which is the phase "data", and hands it from phase to phase. At full speed a step is
waited for at its end alone; phase by phase, the device is waited for after each, so that times say where they belong.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import itertools
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ..._render.display import SIMULATED_SUFFIX, SIMULATION_NOTICE, Displayable
from ..._utils.clock import current_time
from ..._utils.text import describe_error, model_label, short_type_name
from ..._utils.validation import check_bool, check_optional_integer
from ...devices.backend import TENSOR_LOCK, get_rng_states, preserve_rng_states, use_rng_states
from ...devices.machine import is_mps_simulated
from ...devices.memory import SMALLER_BATCH_REMEDY, SMALLER_MODEL_REMEDY, empty_cache, explain_out_of_memory
from ...devices.moving import check_materialized, copy_model, map_tensors, named_tensors, to_device, to_numpy
from ...devices.registry import parse_device_argument
from ...errors import ConfigurationError
from ...models.config import DEFAULT_STRATEGY, normalize_dtype
from ...models.loading import LoadSpec, dtype_of, is_quantized, load_from_spec
from ...models.registry import is_model_name
from ...session import SESSION
from ...training.curve import GROWTH_EPOCHS, MemoryCurve
from ...training.epochs import epochs, function_name
from ...training.nonfinite import loss_of
from ...training.steps import adamw
from .timing import DATA, DECODE, FEWEST, FORWARD, REMEDIES, TRANSFER, PhaseTimes, repeat_measurement

if TYPE_CHECKING:
    import torch

    from ...annotation.forward import Batch
    from ...annotation.pipeline import AnnotationPipeline
    from ...annotation.results import ResultStore
    from ...annotation.stream import Annotator, TokenizedChunk

# The tasks.
ANNOTATION = "annotation"
FORWARD_PASS = "forward pass"  # noqa: S105 - no password
TRAINING_STEP = "training step"
CUSTOM_STEP = "own step"

# A name, and what takes the value of the phase before it; the first phase takes a batch.
Phase = tuple[str, Callable[[Any], Any]]

DEFAULT_BATCH_SIZE = 32  # How many texts a batch has by default.
SYNTHETIC_BATCH_SIZE = 8  # How many rows a synthetic training batch has.
LENGTH = 128  # How many tokens a row of one shape has by default.
RATE = 1e-5  # The learning rate of measured steps; it makes no difference to their speed.

# Synthetic texts, used if a person passes none.
TEXTS = (
    "Patient with type 2 diabetes mellitus and hypertension, admitted with chest pain and shortness of breath.",
    "No evidence of pneumonia. History of asthma and atrial fibrillation.",
    "The biopsy showed a moderately differentiated adenocarcinoma of the colon without lymph node metastasis.",
    "She denies fever, chills and night sweats; her rheumatoid arthritis is stable.",
)

# What to do where steps wait for their data.
MORE_WORKERS = (
    "Read ahead with more workers, kept with persistent_workers=True, prepare the data once and keep it, "
    "or see nb.training.loader.check()."
)
TOKENIZE_MORE = "Tokenize on more cores: nb.cluster(...) spreads texts over several computers. A larger model or longer texts keep the device busy."


@dataclass(frozen=True, repr=False)
class StepReport(Displayable):
    """What every report of measured steps has.

    Attributes:
        name: What the person calls the model, or the function.
        task: ``"annotation"``, ``"forward pass"``, ``"training step"`` or ``"own step"``.
        dtype: The type of the model's numbers; ``None`` if it has none, or for a function.
        workers: How many processes of the loader read ahead.
        row_shape: The shape of a row, such as ``"3x224x224"``; ``None`` for texts, and if rows have no shape.
        simulated: Whether a simulated MPS device was on; then no figure of ``"mps"`` is one of MPS.
    """

    name: str
    task: str
    dtype: str | None = field(default=None, kw_only=True)
    workers: int = field(default=0, kw_only=True)
    row_shape: str | None = field(default=None, kw_only=True)
    simulated: bool = field(default=False, kw_only=True)

    SIMULATION_MARKERS = (SIMULATION_NOTICE, "")  # The title marks only a device that is simulated, and the CPU is not.

    def shown(self, device: str) -> str:
        """Return the name of a device as it is shown, marked if it is simulated."""
        return (
            f"{device}{SIMULATED_SUFFIX}"
            if self.simulated and parse_device_argument(device).can_be_simulated
            else device
        )

    @property
    def data_remedy(self) -> str:
        """What to do where steps wait for their data."""
        if self.task == ANNOTATION:
            return TOKENIZE_MORE
        return MORE_WORKERS if self.workers else REMEDIES[DATA]


@dataclass(frozen=True)
class Workload:
    """Steps that can be measured."""

    name: str  # What the person calls the model, or the function.
    task: str  # One of the tasks.
    device: str  # As torch spells it.
    rows: int  # How many texts, or rows, a batch has.
    length: int | None  # How many tokens a row has; ``None`` if that differs, or if rows are not tokens.
    batches: Callable[[], Iterator[Any]]  # Begins the batches, again and again; they need not end.
    phases: tuple[Phase, ...]  # What is done with a batch, in order.
    workers: int = 0  # How many processes read ahead.
    dtype: str | None = None  # The type of the model's numbers, if it is known.
    prefetched_batches: int = 0  # How many batches the processes that read ahead hold ready together.
    # How many tokens a batch of texts may have on the device; ``None`` for other tasks.
    batch_tokens: int | None = None
    # How many batches of each number of rows a loader gave so far; empty if all have ``rows``.
    batch_size_counts: Counter[int] = field(default_factory=Counter)
    row_shape: str | None = None  # As in :class:`StepReport`.

    @property
    def facts(self) -> dict[str, Any]:
        """The fields of :class:`StepReport`."""
        named = {name: getattr(self, name) for name in ("name", "task", "dtype", "workers", "row_shape")}
        return {**named, "simulated": is_mps_simulated()}

    @contextlib.contextmanager
    def open_batches(self) -> Iterator[Iterator[Any]]:
        """Begin the batches, and end them after a block, with the processes that read them ahead."""
        batches = self.batches()
        try:
            with explain_out_of_memory(f"A batch of {self.rows} rows", self.device, SMALLER_BATCH_REMEDY):
                yield batches
        finally:
            if hasattr(batches, "close"):
                batches.close()

    def drain_prefetched(self, batches: Iterator[Any]) -> None:
        """Take what a loader that reads ahead holds ready."""
        for _ in range(self.prefetched_batches):
            next(batches)

    def reach_steady_state(self, batches: Iterator[Any]) -> None:
        """Bring a loader that reads ahead to where it is in a long run, after a pause in which it has filled up.

        What it holds ready is taken and not computed: after as many steps, a loader that is a little slower than the device
        would still hold some, and the steps that follow would not wait as they do in a long run. Then each worker gives a
        batch.
        """
        self.drain_prefetched(batches)
        for _ in range(self.workers):
            self.run(next(batches))

    def run(self, batch: Any, around: Callable[[str], Any] = contextlib.nullcontext) -> Any:
        """Do a step with a batch, to its end on the device, and return what the last phase gave; a block goes around each."""
        with TENSOR_LOCK:
            for name, phase in self.phases:
                with around(name):
                    batch = phase(batch)
            parse_device_argument(self.device).finish()
        return batch

    def seconds(self, batch: Any) -> float:
        """Return how long a step at full speed takes, in seconds, on a device with nothing else to do."""
        with TENSOR_LOCK:
            parse_device_argument(self.device).finish()
            begin = current_time()
            self.run(batch)
            return current_time() - begin

    def seconds_of_steps(self, batches: Iterator[Any], steps: int = 1) -> float:
        """Return how long a step takes at full speed, its data included, in seconds: the mean of several in a row."""
        total = 0.0
        for _ in range(steps):
            batch, waited = next_batch(batches)
            total += waited + self.seconds(batch)
        return total / steps

    def seconds_of_phases(self, batches: Iterator[Any]) -> dict[str, float]:
        """Take the next batch and return how long each phase of its step takes, in seconds, each waited for."""
        value, seconds = next_batch(batches)
        times = {DATA: seconds}
        with TENSOR_LOCK:
            parse_device_argument(self.device).finish()
            for name, phase in self.phases:
                begin = current_time()
                value = phase(value)
                parse_device_argument(self.device).finish()
                times[name] = current_time() - begin
        return times

    def split(self, batches: Iterator[Any], steps: int, fewest: int = 0) -> PhaseTimes:
        """Return where the time of so many steps goes, or of fewer if they are slow."""
        measured = repeat_measurement(lambda: self.seconds_of_phases(batches), steps, max(FEWEST, fewest))
        seconds = {name: self.typical([step[name] for step in measured]) for name in measured[0]}
        return PhaseTimes(
            seconds, overlapped=self.task == ANNOTATION and parse_device_argument(self.device).is_accelerator
        )

    @property
    def typical(self) -> Callable[[list[float]], float]:
        """What is taken of the seconds of several steps.

        Texts lie in memory, and what one batch of them takes longer than another was another program: the median. A loader
        keeps only some steps waiting: the mean.
        """
        return statistics.median if self.task == ANNOTATION else statistics.fmean

    @property
    def usual_rows(self) -> int:
        """The median number of rows of a batch."""
        return statistics.median_low(self.batch_size_counts.elements()) if self.batch_size_counts else self.rows

    @property
    def mean_rows(self) -> float:
        return statistics.fmean(self.batch_size_counts.elements()) if self.batch_size_counts else self.rows


def next_batch(batches: Iterator[Any]) -> tuple[Any, float]:
    """Return the next batch, and how long it takes to get it, in seconds.

    What goes into starting a loader's processes belongs to no step.
    """
    begin = current_time()
    batch = next(batches)
    return batch, current_time() - begin - float(getattr(batches, "starting", 0.0))


@dataclass(frozen=True)
class BenchmarkTarget:
    """What a person wants measured, before a device is chosen."""

    name: str  # What the person calls it.
    task: str  # One of the tasks.
    # Puts it on a device, beside what the session holds, and leaves what the person passed as it is.
    build: Callable[[str], Benchmark]
    data: Any = None  # What the person passed as data, unless these are texts.


@contextlib.contextmanager
def preserve_generators(data: Any) -> Iterator[None]:
    """Let the random generators of a loader and of its samplers go on after a block from where they were."""
    import torch

    batches = getattr(data, "batch_sampler", None)
    holders = (data, getattr(data, "sampler", None), batches, getattr(batches, "sampler", None))
    generators = (getattr(holder, "generator", None) for holder in holders)
    states = [(one, one.get_state()) for one in generators if isinstance(one, torch.Generator)]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)


@contextlib.contextmanager
def build_benchmarks(
    subject: BenchmarkTarget, devices: Sequence[str], tell: Callable[[str], None] = lambda _device: None
) -> Iterator[dict[str, Benchmark]]:
    """Put a subject on devices for a block, telling which is made ready.

    Afterwards the memory is handed back, and random numbers go on as if nothing had been computed.
    """
    benches: dict[str, Benchmark] = {}
    try:
        with contextlib.ExitStack() as kept:
            kept.enter_context(preserve_generators(subject.data))
            kept.enter_context(preserve_rng_states())
            for device in devices:
                tell(device)
                kept.enter_context(use_rng_states(get_rng_states(device)))
                with explain_out_of_memory(subject.name, device, SMALLER_MODEL_REMEDY):
                    benches[device] = subject.build(device)
            yield benches
    finally:
        benches.clear()
        gc.collect()
        for device in devices:
            empty_cache(device)


@contextlib.contextmanager
def open_benchmark(
    model: Any, data: Any = None, *, training: bool, device: str, arguments: Mapping[str, Any]
) -> Iterator[Any]:
    """Put what a person wants measured on its device for a block."""
    subject, place = make_target(model, data, training=training, device=device, arguments=arguments)
    with build_benchmarks(subject, [place]) as benches:
        yield benches[place]


def measure_epoch_memory(workload: Workload, steps: int, device: str) -> MemoryCurve:
    """Return the memory of ten epochs of so many steps each."""
    loop = epochs(GROWTH_EPOCHS, device)
    with workload.open_batches() as batches:
        for _epoch in loop:
            for _step in range(steps):
                workload.run(next(batches))
    return loop.curve


def make_target(  # noqa: PLR0913 - what sweep(), compare() and profile() were asked for
    model: Any,
    data: Any = None,
    *,
    training: bool = False,
    length: int | None = None,
    device: str | None = None,
    arguments: Mapping[str, Any],
    moved: bool = False,
) -> tuple[BenchmarkTarget, str]:
    """Return what a person wants measured, and the device for it; what can be checked is checked before a model is loaded.

    ``moved`` tells whether the batches of a function are moved to the device that is measured.
    """
    check_bool("training", training)
    length = check_optional_integer("length", length)
    kind = short_type_name(model)
    if isinstance(model, type):
        name = model_label(model.__name__)
        raise ConfigurationError(f"{name} is a class.", f"Pass an instance: {name}(...).")
    if not (is_model_name(model) or callable(model)):
        remedy = "Pass a model's name, a pipeline, a torch module, or a function that does a step."
        raise ConfigurationError(f"{kind} cannot be measured.", remedy)
    if not is_model_name(model):
        check_no_arguments(kind, arguments)
    given = dict(arguments) if device is None else {**arguments, "device": device}
    if is_token_classifier(model):
        subject = target_from_model(model, data, training, length, given)
    elif length is not None:
        what = f"length={length} has no effect here: the batches have their own."
        raise ConfigurationError(what, "Leave length out, and pass batches of that length.")
    else:
        subject = subject_of_callable(model, data, training, moved)
    return subject, SESSION.device(given.get("device")).device


def is_token_classifier(model: Any) -> bool:
    """Return whether a model is one for token classification, by name or as a pipeline."""
    from ...annotation.pipeline import AnnotationPipeline

    return is_model_name(model) or isinstance(model, AnnotationPipeline)


def check_no_arguments(name: str, arguments: Mapping[str, Any]) -> None:
    """Refuse arguments of a load for a model that is loaded already."""
    if arguments:
        what = f"{name} takes no {', '.join(sorted(arguments))}: it is loaded already."
        raise ConfigurationError(what, "Pass a model's name, or leave them out.")


def target_from_model(
    model: Any, data: Any, training: bool, length: int | None, given: Mapping[str, Any]
) -> BenchmarkTarget:
    """Return a model for token classification, by name or as a pipeline, that annotates texts or is trained."""
    if not training:
        texts = validate_texts(data)
        if is_model_name(model):
            return target_from_files(SESSION.load_spec(model, given)[0], texts, length)
        return target_from_pipeline(model, texts, length)
    if isinstance(data, (list, tuple)) and any(isinstance(one, str) for one in data):
        remedy = "Pass a DataLoader or a batch with labels, or leave data out."
        raise ConfigurationError("Texts cannot train a model: they have no labels.", remedy)
    name = None
    if is_model_name(model):
        spec = SESSION.load_spec(model, given)[0]
        model = pipeline_from_files(spec)
        name = spec.reference.name
    return target_from_module(model.model, data, True, lambda: synthetic_labeled_batch(model, length or LENGTH), name)


def target_from_files(spec: LoadSpec, texts: Sequence[Any] | None, length: int | None = None) -> BenchmarkTarget:
    """Return a model from its files, to be loaded beside those of the session."""
    name = spec.reference.name

    def on(device: str) -> AnnotationBenchmark:
        annotator = pipeline_from_files(spec, device).default_annotator().whole_texts()
        return AnnotationBenchmark(name, annotator, texts or TEXTS, length)

    return BenchmarkTarget(name, ANNOTATION, on)


def pipeline_from_files(spec: LoadSpec, device: str = "cpu") -> AnnotationPipeline:
    """Return a pipeline over a model from its files, of which the session knows nothing."""
    from ...annotation.pipeline import build_pipeline

    return build_pipeline(load_from_spec(spec, device), DEFAULT_STRATEGY, {})


def target_from_pipeline(pipe: AnnotationPipeline, texts: Sequence[Any] | None, length: int | None) -> BenchmarkTarget:
    """Return a pipeline, itself on its own device and with a copy of its model on others; int8 cannot leave the CPU."""
    from ...annotation.pipeline import budget_for_device

    name = type(pipe.model).__name__
    annotator = pipe.default_annotator().whole_texts()

    def on(device: str) -> AnnotationBenchmark:
        import torch

        place = torch.device(device)
        if place.type == pipe.device.type and place.index in {None, pipe.device.index}:
            return AnnotationBenchmark(name, annotator, texts or TEXTS, length)
        if is_quantized(pipe.model):
            raise ConfigurationError(f"{name} in int8 runs on the CPU only.", "Pass the model's name.")
        moved = annotator.with_model(copy_model(pipe.model, device).eval())
        budget = replace(
            budget_for_device(place, annotator.network.model), allow_padding=annotator.budget.allow_padding
        )
        return AnnotationBenchmark(name, replace(moved, budget=budget), texts or TEXTS, length)

    return BenchmarkTarget(name, ANNOTATION, on)


def validate_texts(data: Any) -> Sequence[Any] | None:
    """Return texts as a list, ``None`` for none; a series without a text, or without a word in any, is an error."""
    from ...annotation.references import iter_texts

    if data is None:
        return None
    texts = list(iter_texts(data))
    if not texts:
        raise ConfigurationError("There is no text to measure with.", "Pass at least one text.")
    if all(isinstance(text, str) and not text.strip() for text in texts):
        raise ConfigurationError("There is no word to measure with in these texts.", "Pass some with words.")
    return texts


def share_batch_plan(benches: Mapping[str, Benchmark]) -> Mapping[str, Benchmark]:
    """Return benches that read texts in the batches of one device: of the first but the CPU, if there is one."""
    leading = next((bench for name, bench in benches.items() if parse_device_argument(name).is_accelerator), None)
    if not isinstance(leading, AnnotationBenchmark):
        return benches
    alike = {name: bench for name, bench in benches.items() if isinstance(bench, AnnotationBenchmark)}
    budget = leading.annotator.budget
    return {name: replace(one, annotator=replace(one.annotator, budget=budget)) for name, one in alike.items()}


@dataclass(frozen=True)
class PaddedTexts:
    """Texts in batches."""

    prepared: TokenizedChunk  # The texts, tokenized.
    batches: list[Batch]  # Which of their windows each batch has.
    arrays: list[Any]  # What each batch gives to the model, and later what the model returns.


@dataclass(frozen=True)
class AnnotationBenchmark:
    """A model for token classification on a device, with texts that are read again and again."""

    name: str  # What a person calls the model.
    annotator: Annotator  # The model with its tokenizer.
    texts: Sequence[Any] = TEXTS  # The texts.
    # How many tokens a row of :meth:`bucket` has, and a row that the budget of :meth:`stream` is counted in.
    length: int | None = None

    @property
    def device(self) -> str:
        return str(self.annotator.network.device)

    def fixed_shape_workload(self, rows: int) -> Workload:
        """Return steps over full rows of one length; nothing is decoded, because the rows are not texts."""
        length = self.row_length
        network = self.annotator.network
        inputs = network.dummy_inputs(rows, length)

        def transfer(inputs: Any) -> Any:
            return network.copy_to_device([inputs])[0]

        def decode(outputs: Any) -> Any:
            return [to_numpy(tensor) for tensor in outputs]

        phases = ((TRANSFER, transfer), (FORWARD, network.forward_on_device), (DECODE, decode))
        return self._workload(rows, length, lambda: itertools.repeat(inputs), phases, rows * length)

    def data_workload(self, rows: int | None = None) -> Workload:
        """Return steps that each read ``rows`` texts and find their entities.

        With a number of rows, a batch on the device may have as many tokens as a bucket of that many has: texts of about one
        length are then one batch. Without one, it may have what the annotator's own budget says.
        """
        budget = self.annotator.budget
        if rows is not None:
            budget = replace(budget, max_tokens=rows * self.row_length, max_rows=None)
        annotator = replace(self.annotator, budget=budget)
        network = annotator.network
        size = rows or DEFAULT_BATCH_SIZE

        def batches() -> Iterator[PaddedTexts]:
            from ...annotation.forward import pad_batch
            from ...annotation.stream import Chunk

            texts = itertools.cycle(self.texts)
            while True:
                prepared = annotator.start_tokenizing(Chunk(0, list(itertools.islice(texts, size))))()
                for failure in prepared.errors.values():
                    raise failure
                batches = annotator.plan_batches(prepared, budget)
                arrays = [pad_batch(prepared.tokens, prepared.windows, batch, network) for batch in batches]
                yield PaddedTexts(prepared, batches, arrays)

        def transfer(filled: PaddedTexts) -> PaddedTexts:
            return replace(filled, arrays=network.copy_to_device(filled.arrays))

        def forward(filled: PaddedTexts) -> PaddedTexts:
            return replace(filled, arrays=[network.forward_on_device(inputs) for inputs in filled.arrays])

        def decode(filled: PaddedTexts) -> ResultStore:
            from ...annotation.forward import ForwardRun, assemble_predictions

            arrays = [[to_numpy(tensor) for tensor in outputs] for outputs in filled.arrays]
            run = ForwardRun(filled.prepared.tokens, filled.prepared.windows)
            collected = assemble_predictions(run, network, list(zip(filled.batches, arrays, strict=True)))
            return annotator.decode(filled.prepared, collected)

        phases = ((TRANSFER, transfer), (FORWARD, forward), (DECODE, decode))
        return self._workload(size, None, batches, phases, budget.max_tokens)

    @property
    def row_length(self) -> int:
        """How many tokens a full row has: at most as many as the model reads."""
        longest = max_row_length(self.annotator)
        if self.length is not None and self.length > longest:
            what = f"length={self.length} is more than the {longest} tokens that {self.name} reads at once."
            raise ConfigurationError(what, f"Pass length={longest}, or less.")
        return self.length or min(LENGTH, longest)

    def _workload(
        self, rows: int, length: int | None, batches: Any, phases: tuple[Phase, ...], tokens: int
    ) -> Workload:
        dtype = dtype_of(self.annotator.network.model)
        return Workload(
            self.name, ANNOTATION, self.device, rows, length, batches, phases, dtype=dtype, batch_tokens=tokens
        )


def max_row_length(annotator: Annotator) -> int:
    """Return how many tokens the model reads at once."""
    return annotator.settings.max_tokens + annotator.network.special_tokens.num_special_tokens


def synthetic_labeled_batch(pipe: AnnotationPipeline, length: int) -> ModelInputs:
    """Return a batch of full rows with labels, as a model for token classification takes them in training."""
    import torch

    annotator = pipe.default_annotator()
    arrays = annotator.network.dummy_inputs(SYNTHETIC_BATCH_SIZE, min(length, max_row_length(annotator)))
    inputs = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return ModelInputs(kwargs={**inputs, "labels": torch.zeros_like(inputs["input_ids"])})


@dataclass(frozen=True)
class ModelInputs:
    """What a model is called with, on the CPU: its arguments, and its arguments by name."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __call__(self, model: torch.nn.Module) -> Any:
        """Return what the model returns."""
        return model(*self.args, **self.kwargs)

    def copied(self) -> ModelInputs:
        """Return copies of the tensors, which a model may change."""
        return ModelInputs(map_tensors(self.args, _copied), map_tensors(self.kwargs, _copied))

    @property
    def tensors(self) -> dict[str, Any]:
        """The arguments by name, those without one by their number."""
        return {**{f"argument {number}": value for number, value in enumerate(self.args)}, **self.kwargs}


def parse_example_inputs(inputs: Any) -> ModelInputs:
    """Return example inputs as a model is called with them.

    Args:
        inputs: A tensor, a tuple or list of tensors, or a mapping of names to tensors, lists of numbers, and what else
            the model takes. Lists of numbers become tensors, with a batch of one if they are those of one text.
    """
    import torch

    check_materialized(
        f"The {short_type_name(inputs)} of example inputs", (tensor for _, tensor in named_tensors(inputs))
    )
    if isinstance(inputs, Mapping):
        flat = _are_flat(inputs.values())
        example = ModelInputs(kwargs={str(name): _tensor(value, flat) for name, value in inputs.items()})
    else:
        listed = isinstance(inputs, list) and any(isinstance(value, torch.Tensor) for value in inputs)
        values = tuple(inputs) if listed or isinstance(inputs, tuple) else (inputs,)
        example = ModelInputs(tuple(_tensor(value, _are_flat(values)) for value in values))
    if next(named_tensors(example.tensors), None) is None:
        remedy = "a tensor, a tuple of tensors, or a mapping such as what a tokenizer returns with return_tensors='pt'"
        what = f"{short_type_name(inputs)} without a tensor is no example input of a model."
        raise ConfigurationError(what, f"Pass {remedy}.")
    return example


def _tensor(value: Any, flat: bool) -> Any:
    """Return lists of numbers and arrays as tensors, tensors as copies on the CPU, and anything else, such as words, as it is."""
    import torch

    listed = isinstance(value, list) and not any(isinstance(one, (torch.Tensor, str)) for one in value)
    if not listed and not (type(value).__module__ == "numpy" and hasattr(value, "__array__")):
        return map_tensors(value, _copied)
    try:
        made = torch.tensor(value)
    except (ValueError, TypeError, RuntimeError) as error:
        what = f"The example inputs hold a {short_type_name(value)} that is no tensor: {describe_error(error)}."
        raise ConfigurationError(what, "Pad the rows to one length, or pass tensors.") from error
    return made.unsqueeze(0) if listed and flat else made


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def _are_flat(values: Iterable[Any]) -> bool:
    """Tell whether all lists are plain rows of numbers, as a tokenizer returns them for one text."""
    listed = [one for value in values if isinstance(value, list) for one in value]
    return all(isinstance(one, (int, float)) for one in listed if not isinstance(one, str))


def loss_or_mean(output: Any) -> torch.Tensor | None:
    """Return the loss that a model returned, or the sum of the means of its outputs; ``None`` if none has a gradient."""
    import torch

    loss = loss_of(output)
    if loss is not None and loss.requires_grad:
        return loss
    learnt = [tensor for _, tensor in named_tensors(output) if tensor.requires_grad]
    means = [(tensor.real if tensor.is_complex() else tensor).mean() for tensor in learnt]
    return torch.stack(means).sum() if means else None


def subject_of_callable(model: Any, data: Any, training: bool, moved: bool) -> BenchmarkTarget:
    """Return a torch module, or a function that does a step, which is measured as it is and changes what it changes."""
    import torch

    if isinstance(model, torch.nn.Module):
        return target_from_module(model, data, training)
    name = function_name(model)
    if not callable(data):
        check_batches(name, data, "a DataLoader, a list of batches, or a function that makes a batch of a size")
    return BenchmarkTarget(name, CUSTOM_STEP, lambda device: StepBenchmark(name, model, data, device, moved), data)


def target_from_module(
    model: torch.nn.Module,
    data: Any,
    training: bool,
    synthetic: Callable[[], ModelInputs] | None = None,
    name: str | None = None,
) -> BenchmarkTarget:
    """Return a torch module, of which a copy is measured on each device; ``synthetic`` makes an example if there are no data."""
    import torch

    name = name or type(model).__name__
    loader = data if isinstance(data, torch.utils.data.DataLoader) else None
    if data is not None:
        with preserve_rng_states(), preserve_generators(data):  # A loader draws a seed whenever it is read.
            example = parse_example_inputs(data if loader is None else first_batch(loader))
    elif synthetic is not None:
        example = synthetic()
    else:
        raise ConfigurationError(f"There is nothing to call {name} with.", "Pass a batch, or a DataLoader.")
    check_call(model, name, example)

    def on(device: str) -> ModuleBenchmark:
        copied = copy_model(model, device)
        return ModuleBenchmark(name, copied.train() if training else copied.eval(), device, training, example, loader)

    return BenchmarkTarget(name, TRAINING_STEP if training else FORWARD_PASS, on, data)


def check_call(model: torch.nn.Module, name: str, example: ModelInputs) -> None:
    """Refuse an example without rows, and arguments that ``forward`` does not take; a model's own hooks may change them."""
    tensors = [tensor for _, tensor in named_tensors(example.tensors)]
    if not (batch_size_of(example.tensors) and any(tensor.numel() for tensor in tensors)):
        raise ConfigurationError(f"The batch for {name} has no rows.", "Pass one with at least one row.")
    if model._forward_pre_hooks:  # noqa: SLF001 - torch has no public name for them
        return
    try:
        inspect.signature(model.forward).bind(*example.args, **example.kwargs)
    except ValueError:  # A forward that is compiled has no signature.
        return
    except TypeError as error:
        what = f"{name} does not take what the data give: {describe_error(error)}."
        raise ConfigurationError(what, "Pass batches as it is called with them, without anything else.") from error


@dataclass
class ModuleBenchmark:
    """A copy of a module on a device, and batches for it."""

    name: str  # What the person calls it, or the name of the class.
    model: torch.nn.Module  # The copy.
    device: str  # As torch spells it.
    training: bool  # Whether a step trains.
    example: ModelInputs  # A batch, on the CPU, for rows of one shape.
    loader: Iterable[Any] | None = None  # Gives batches, again and again; ``None`` to take the example.
    optimizer: Any = None  # Made with the first step.
    mutates_inputs: bool | None = None  # Whether the model wrote into its first batch; ``None`` before it had one.

    def fixed_shape_workload(self, rows: int) -> Workload:
        """Return steps over batches like the example, with so many rows."""
        batch = resize_batch(self.example, rows)
        return self._workload(rows, lambda: itertools.repeat(batch), Counter())

    def data_workload(self, rows: int | None = None) -> Workload:
        """Return steps over the batches of the loader, or over the example if there is none."""
        first = batch_size_of(self.example.tensors)
        if self.loader is None:
            return self.fixed_shape_workload(rows or first)
        if rows is not None:
            raise ConfigurationError("A loader has a batch size of its own.", "Leave batch_size out.")
        loader = self.loader
        sizes = Counter[int]()
        return self._workload(first, lambda: RepeatingLoader(loader, sizes, model_inputs), sizes)

    def transfer(self, example: ModelInputs) -> ModelInputs:
        """Return a batch on the device; on the CPU that is the person's own, and a copy for a model that writes into it."""
        if not parse_device_argument(self.device).is_accelerator and self.mutates_inputs is not False:
            return example.copied()
        return ModelInputs(to_device(example.args, self.device), to_device(example.kwargs, self.device))

    def forward(self, example: ModelInputs) -> Any:
        """Return what the model returns, in training its loss; note at the first batch whether the model writes into that."""
        import torch

        with torch.set_grad_enabled(self.training):
            before = tensor_versions(example) if self.mutates_inputs is None else []
            answer = example(self.model)
            if self.mutates_inputs is None:
                self.mutates_inputs = None in before or tensor_versions(example) != before
            if not self.training:
                return answer
            loss = loss_or_mean(answer)
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

    def _workload(self, rows: int, batches: Any, sizes: Counter[int]) -> Workload:
        phases: list[Phase] = [(TRANSFER, self.transfer), (FORWARD, self.forward)]
        if self.training:
            phases += [("backward", lambda loss: loss.backward()), ("optimizer", self.step)]
        ids = self.example.kwargs.get("input_ids")
        return Workload(
            self.name,
            TRAINING_STEP if self.training else FORWARD_PASS,
            self.device,
            rows,
            int(ids.shape[-1]) if self.loader is None and ids is not None and ids.dim() > 1 else None,
            batches,
            tuple(phases),
            dtype=next((normalize_dtype(one.dtype) for one in self.model.parameters()), None),
            batch_size_counts=sizes,
            row_shape=row_shape_of(self.example),
            **prefetch_settings(self.loader),
        )


def model_inputs(batch: Any) -> ModelInputs:
    """Return a batch of a loader as a model is called with it, without copies."""
    if isinstance(batch, Mapping):
        return ModelInputs(kwargs=dict(batch))
    return ModelInputs(tuple(batch) if isinstance(batch, (list, tuple)) else (batch,))


def tensor_versions(example: ModelInputs) -> list[int | None]:
    """Return how often each tensor of a batch was written into, ``None`` if torch does not count that."""
    tensors = [tensor for _, tensor in named_tensors(example.tensors)]
    return [None if one.is_inference() else one._version for one in tensors]  # noqa: SLF001 - torch's only name for it


def row_shape_of(example: ModelInputs) -> str | None:
    """Return the shape of a row of a batch: of its first tensor with rows that have a shape.

    Example:
        >>> import torch
        >>> row_shape_of(ModelInputs((torch.ones(4, 3, 16, 16),))), row_shape_of(ModelInputs((torch.ones(4),)))
        ('3x16x16', None)
    """
    shapes = (tensor.shape[1:] for _, tensor in named_tensors(example.tensors) if tensor.dim() > 1)
    return next(("x".join(map(str, shape)) for shape in shapes), None)


def resize_batch(example: ModelInputs, rows: int) -> ModelInputs:
    """Return a batch with another number of rows, which repeats those of the example; tensors without rows stay.

    A tensor has rows if its first size is that of the first tensor: a mask of 4 times 4 too, if the batch has 4 rows.

    Example:
        >>> import torch
        >>> resize_batch(ModelInputs((torch.tensor([[1], [2]]), torch.tensor(0.5))), 3).args
        (tensor([[1],
                [2],
                [1]]), tensor(0.5000))
    """
    import torch

    there = batch_size_of(example.tensors)
    index = torch.arange(rows) % there

    def repeated(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[index] if tensor.dim() and tensor.shape[0] == there else tensor

    return ModelInputs(map_tensors(example.args, repeated), map_tensors(example.kwargs, repeated))


@dataclass(frozen=True)
class StepBenchmark:
    """A function and its batches."""

    name: str  # The name of the function.
    step: Callable[[Any], Any]  # Does a step with a batch as the loader gives it.
    data: Iterable[Any] | Callable[[int], Any]  # A loader, or a function that makes a batch of a size.
    device: str  # The device that is measured; where the function computes is up to its own code.
    moved: bool = False  # Whether its batches are moved there first, so that it computes there.

    def fixed_shape_workload(self, rows: int) -> Workload:
        """Return steps over one batch that lies ready; it must have the rows that were asked for."""
        if not callable(self.data):
            what = f"No batch of {rows} rows can be made for {self.name}."
            raise ConfigurationError(what, "Pass a function that takes a number of rows and returns a batch.")
        batch = self.data(rows)
        sizes = [tensor.shape[:2] for _, tensor in named_tensors(batch) if tensor.dim()]
        there = batch_size_of(batch)
        # With fewer rows the throughput would be wrong. They may be the second size, as in models that take the sequence first.
        if sizes and there < rows and not any(rows in size for size in sizes):
            what = f"{function_name(self.data)} made a batch of {there} rows where {rows} were asked for."
            raise ConfigurationError(what, f"Make them of any size, or ask for no more: max_batch_size={there}.")
        return self._workload(rows, [batch], batch)

    def data_workload(self, rows: int | None = None) -> Workload:
        """Return steps over the batches of the loader."""
        if callable(self.data):
            return self.fixed_shape_workload(rows or 1)
        with preserve_generators(self.data):
            first = first_batch(self.data)
        return self._workload(batch_size_of(first), self.data, first)

    def _workload(self, rows: int, batches: Iterable[Any], first: Any) -> Workload:
        def transfer(batch: Any) -> Any:
            return to_device(batch, self.device)

        def step(batch: Any) -> Any:
            # The step may take things out of the mappings and lists of its batch; the tensors are not copied.
            own = map_tensors(batch, lambda tensor: tensor)
            return self.step(copy.copy(own) if own is batch and isinstance(batch, (dict, list)) else own)

        sizes = Counter[int]()
        return Workload(
            self.name,
            CUSTOM_STEP,
            self.device,
            rows,
            None,
            lambda: RepeatingLoader(batches, sizes),
            ((TRANSFER, transfer), ("step", step)) if self.moved else (("step", step),),
            batch_size_counts=Counter() if callable(self.data) else sizes,
            row_shape=row_shape_of(model_inputs(first)),
            **prefetch_settings(self.data),
        )


def check_batches(name: str, data: Any, such_as: str = "a DataLoader, or a list of batches") -> None:
    """Refuse data for a model or a function of a name that are no batches, or none that can be read again."""
    import torch

    if isinstance(data, (torch.Tensor, Mapping, str)):
        what = f"{short_type_name(data)} is one batch for {name}, not a series of batches."
        raise ConfigurationError(what, "Pass [batch].")
    if isinstance(data, Iterator) or not isinstance(data, Iterable):
        what = f"{short_type_name(data)} does not give {name} batches again and again."
        raise ConfigurationError(what, f"Pass {such_as}.")


def prefetch_settings(loader: Any) -> dict[str, Any]:
    """Return how many processes of a loader read ahead, and how many batches they hold ready, as a workload has them.

    It is ``prefetch_factor`` for each of ``num_workers`` (``_MultiProcessingDataLoaderIter`` in ``torch/utils/data/dataloader.py``).
    """
    workers = int(getattr(loader, "num_workers", 0))
    return {"workers": workers, "prefetched_batches": workers * int(getattr(loader, "prefetch_factor", None) or 1)}


class RepeatingLoader(Iterator[Any]):
    """The batches of a loader, again and again without an end; ``sizes`` counts those of each number of rows."""

    def __init__(
        self, loader: Iterable[Any], sizes: Counter[int], form: Callable[[Any], Any] = lambda batch: batch
    ) -> None:
        # How many seconds of the last batch went into starting the processes of a loader that begins anew. A loader with
        # persistent_workers starts none; and if each pass over the data has one batch, it is a part of the data.
        self.starting = 0.0
        self._loader = loader
        self._sizes = sizes
        self._form = form
        self._batches: Iterator[Any] = iter(())
        self._given = 0
        self._starts = getattr(loader, "num_workers", 0) > 0 and not getattr(loader, "persistent_workers", False)

    def __next__(self) -> Any:
        begin = current_time()
        ended = object()
        batch = next(self._batches, ended)
        self.starting = 0.0
        if batch is ended:
            self._batches = iter(self._loader)
            batch = first_batch(self._batches)
            if self._starts and self._given > 1:
                self.starting = current_time() - begin
            self._given = 0
        self._given += 1
        self._sizes[batch_size_of(batch)] += 1
        return self._form(batch)

    def close(self) -> None:
        """Let the loader go, with its processes."""
        self._batches = iter(())


def first_batch(loader: Iterable[Any]) -> Any:
    """Return the first batch of a loader; one that gives none, such as one that can be read only once, is an error."""
    for batch in loader:
        return batch
    raise ConfigurationError("The loader gives no batch.", "Pass one with items, which can be read again and again.")


def batch_size_of(batch: Any) -> int:
    """Return how many rows a batch has: the first size of its first tensor that has one.

    Example:
        >>> import torch
        >>> batch_size_of({"rate": torch.tensor(0.5), "x": torch.ones(4, 2)}), batch_size_of("no tensor")
        (4, 1)
    """
    return next((int(tensor.shape[0]) for _, tensor in named_tensors(batch) if tensor.dim()), 1)


# A model, or a function, on a device, ready to be measured: in batches of one shape that lie ready on the host (``bucket``), or
# in batches as they come (``stream``), which are texts that are read and tokenized, or what a loader gives.
Benchmark = AnnotationBenchmark | ModuleBenchmark | StepBenchmark
