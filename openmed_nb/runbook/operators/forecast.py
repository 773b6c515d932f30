"""Which operators of a model would leave MPS for the CPU, foretold on any computer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...annotation.forward import input_names, taken
from ...devices.backend import TENSOR_LOCK, release_of
from ...devices.moving import module_in, named_tensors, with_tensors
from ...devices.simulated import active
from ...display import Report, Shown, Table, counted
from ...errors import ConfigurationError, cause
from ...training.nonfinite import loss_of
from .calls import BACKWARD, FORWARD, INFERENCE, OPTIMIZER, PHASES, Call, Place, Trace
from .copies import check_memory, cpu_copy, random_numbers_kept
from .table import (
    ALWAYS_ON_CPU,
    COMPOSITE,
    FALLS_BACK,
    FLOAT64,
    MAY_BE_WRONG,
    NATIVE,
    NOT_KNOWN,
    REFUSED,
    OperatorTable,
    operator_table,
)

if TYPE_CHECKING:
    import torch

    from .recorders import CallRecord


SENTENCES = ("Patient with type 2 diabetes mellitus.", "No asthma.")
"""Synthetic texts of two lengths, so that the batch has padding."""

REMEDY = "Pass a tensor, a tuple of tensors, or a mapping such as what a tokenizer returns with return_tensors='pt'."


@dataclass(frozen=True)
class Example:
    """What a model is called with, on the CPU.

    Attributes:
        args: The arguments.
        kwargs: The arguments by name.
    """

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __call__(self, model: torch.nn.Module) -> Any:
        """Return what the model returns."""
        return model(*self.args, **self.kwargs)

    def copied(self) -> Example:
        """Return copies of the tensors, which a model may change."""
        return Example(with_tensors(self.args, _copied), with_tensors(self.kwargs, _copied))

    @property
    def tensors(self) -> dict[str, Any]:
        """The arguments by name, those without one by their number."""
        return {**{f"argument {number}": value for number, value in enumerate(self.args)}, **self.kwargs}


def read_example(inputs: Any) -> Example:
    """Return example inputs as a model is called with them.

    Args:
        inputs: A tensor, a tuple or list of tensors, or a mapping of names to tensors, lists of numbers, and what else
            the model takes. Lists of numbers become tensors, with a batch of one where they are those of one text.

    Raises:
        ConfigurationError: For anything else.

    Example:
        >>> read_example({"input_ids": [101, 102]}).kwargs["input_ids"].shape
        torch.Size([1, 2])
    """
    import torch

    check_memory(f"The {type(inputs).__name__} of example inputs", (tensor for _, tensor in named_tensors(inputs)))
    if isinstance(inputs, Mapping):
        flat = _are_flat(inputs.values())
        example = Example(kwargs={str(name): _tensor(value, flat) for name, value in inputs.items()})
    else:
        listed = isinstance(inputs, list) and any(isinstance(value, torch.Tensor) for value in inputs)
        values = tuple(inputs) if listed or isinstance(inputs, tuple) else (inputs,)
        example = Example(tuple(_tensor(value, _are_flat(values)) for value in values))
    if not any(True for _ in named_tensors(example.tensors)):
        raise ConfigurationError(f"{type(inputs).__name__} without a tensor is no example input of a model.", REMEDY)
    return example


def synthetic_example(model: Any, tokenizer: Any) -> Example:
    """Return a batch of two synthetic sentences as a model for token classification takes them, with labels.

    Args:
        model: The model of transformers.
        tokenizer: Its tokenizer.

    Example:
        >>> from openmed_nb import load_pipeline
        >>> pipe = load_pipeline(device="cpu")
        >>> sorted(synthetic_example(pipe.model, pipe.tokenizer).kwargs)
        ['attention_mask', 'input_ids', 'labels', 'token_type_ids']
    """
    import torch

    batch = dict(tokenizer(list(SENTENCES), padding=True, return_tensors="pt"))
    names = input_names(model, tuple(batch))
    kwargs = {name: tensor for name, tensor in batch.items() if name in names}
    if "labels" in (taken(type(model).forward) or ()):
        kwargs["labels"] = torch.zeros_like(batch["input_ids"])
    return Example(kwargs=kwargs)


def _tensor(value: Any, flat: bool) -> Any:
    """Return lists of numbers and arrays as tensors, tensors as copies on the CPU, and anything else, such as words, as it is."""
    import torch

    if isinstance(value, list) and not any(isinstance(one, (torch.Tensor, str)) for one in value):
        tensor = _made(value)
        return tensor.unsqueeze(0) if flat else tensor
    if type(value).__module__ == "numpy" and hasattr(value, "__array__"):
        return _made(value)
    return with_tensors(value, _copied)


def _made(value: Any) -> torch.Tensor:
    import torch

    try:
        return torch.tensor(value)
    except (ValueError, TypeError, RuntimeError) as error:
        what = f"The example inputs hold a {type(value).__name__} that is no tensor: {cause(error)}."
        raise ConfigurationError(what, "Pad the rows to one length, or pass tensors.") from error


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def _are_flat(values: Iterable[Any]) -> bool:
    """Tell whether all lists are plain rows of numbers, as a tokenizer returns them for one text."""
    listed = [one for value in values if isinstance(value, list) for one in value]
    return all(isinstance(one, (int, float)) for one in listed if not isinstance(one, str))


def trace(model: torch.nn.Module, example: Example, table: OperatorTable, training: bool = True) -> Trace:
    """Return what a copy of a model calls on the CPU; the model stays as it is, and so do random numbers.

    Args:
        model: The model, on any device.
        example: What it is called with.
        table: What MPS has, which decides what is taken apart.
        training: Whether to trace one training step too: the loss, its backward pass, clipped gradients, AdamW.

    Raises:
        ConfigurationError: Where the model cannot be copied, or fails by itself with this example.
    """
    import torch

    from .recorders import CallRecord

    with TENSOR_LOCK, random_numbers_kept(), torch.inference_mode(mode=False):
        record = CallRecord(table)
        Runs(cpu_copy(model), example.copied(), record).inference()
        notes = Runs(cpu_copy(model), example.copied(), record).training_step() if training else ()
        return Trace(dict(record.calls), dict(record.refusals), notes)


@dataclass(frozen=True)
class Runs:
    """The runs of a copied model that are traced, each on a copy of its own: a step changes its numbers."""

    model: torch.nn.Module
    example: Example
    record: CallRecord

    def inference(self) -> None:
        """Trace a pass without gradients, below autograd where the model can run so: there, MPS's own choice is seen."""
        import torch

        self._check()
        for name, place, _tensor in self._wide_tensors():
            self.record.refuse(Call(name, INFERENCE, place), [FLOAT64])
        seen = Counter(self.record.calls), Counter(self.record.refusals)
        try:
            with torch.inference_mode():
                self._traced(self._forward)
        except RuntimeError:  # The model computes gradients of its own, which inference mode forbids.
            self.record.calls, self.record.refusals = seen
            with torch.no_grad():
                self._traced(self._forward)

    def _check(self) -> None:
        """Run a pass that nobody watches, so that what fails then is the model's own error."""
        import torch

        self.model.eval()
        with torch.no_grad():
            error = _own_error(lambda: self.example.copied()(self.model))
        if error is not None:
            what = f"The forward pass of {self._name} failed on the CPU: {type(error).__name__}: {cause(error)}."
            raise ConfigurationError(what, "Check example_inputs: the model must run with them.") from error

    def training_step(self) -> tuple[str, ...]:
        """Trace a training step; return what could not be traced.

        Attention is taken apart, as on MPS where gradients are needed; optimizer and clipping go one by one, as MPS is
        none of the devices of ``torch.utils._foreach_utils``.
        """
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        self._check()  # After which lazy weights have their shapes.
        self._wide_tensors()
        self.model.train()
        if not any(parameter.requires_grad for parameter in self.model.parameters()):
            return ("No training step: no parameter of the model needs gradients.",)
        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
            try:
                return self._traced(self._step)
            except Exception:
                error = _own_error(self._step)
                if error is None:
                    raise
                what = f"A training step of {self._name} failed on the CPU: {type(error).__name__}: {cause(error)}."
                raise ConfigurationError(what, "Check example_inputs, or pass training=False.") from error

    def _wide_tensors(self) -> list[tuple[str, Place, torch.Tensor]]:
        """Return the tensors of the model, and of its inputs, that have a type that MPS does not have, and know them."""
        from .recorders import WIDE

        places = {id(module): Place(name, type(module).__name__) for name, module in self.model.named_modules()}
        named = [
            (f"{kind} {name}", places[id(module)], tensor)
            for module in self.model.modules()
            for kind, tensors in (("parameter", module._parameters), ("buffer", module._buffers))  # noqa: SLF001
            for name, tensor in tensors.items()
            if tensor is not None
        ]
        named += [(f"example input {name}", Place(), tensor) for name, tensor in named_tensors(self.example.tensors)]
        wide = [one for one in named if one[2].dtype in WIDE]
        self.record.wide.update((tensor, True) for _, _, tensor in wide)
        return wide

    @property
    def _name(self) -> str:
        return type(self.model).__name__

    def _forward(self) -> tuple[str, ...]:
        self.record.phase = INFERENCE
        self.example(self.model)
        return ()

    def _step(self) -> tuple[str, ...]:
        import torch

        self.record.phase = FORWARD
        output = self.example(self.model)
        loss = loss_or_mean(output)
        if loss is None:
            nothing = "no tensor was found that depends on the parameters in what the model returns"
            return (f"No training step: {nothing}, a {type(output).__name__}.",)
        self.record.phase = BACKWARD
        loss.backward()
        self.record.phase = OPTIMIZER
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=False)
        torch.optim.AdamW(parameters, foreach=False, fused=False).step()
        return ()

    def _traced(self, run: Callable[[], tuple[str, ...]]) -> tuple[str, ...]:
        from .recorders import watching

        with watching(self.record, self.model):
            return run()


def _own_error(run: Callable[[], Any]) -> Exception | None:
    """Return what a run raises while nobody watches."""
    try:
        run()
    except Exception as error:  # noqa: BLE001 - the code of any model, which can raise anything; told to the person
        return error
    return None


def loss_or_mean(output: Any) -> torch.Tensor | None:
    """Return the loss that a model returned, or the sum of the means of its outputs; ``None`` where none has a gradient.

    Example:
        >>> import torch
        >>> loss_or_mean((torch.tensor([1.0, 3.0], requires_grad=True), torch.tensor([1]))).item()
        2.0
    """
    import torch

    loss = loss_of(output)
    if loss is not None and loss.requires_grad:
        return loss
    learnt = [tensor for _, tensor in named_tensors(output) if tensor.requires_grad]
    means = [(tensor.real if tensor.is_complex() else tensor).mean() for tensor in learnt]
    return torch.stack(means).sum() if means else None


VERDICTS = (REFUSED, FALLS_BACK, ALWAYS_ON_CPU, MAY_BE_WRONG, NOT_KNOWN, COMPOSITE, NATIVE)
"""What can become of an operator, the worst first."""

REMEDIES: Mapping[str, str] = {
    FALLS_BACK: "Compute it another way; without PYTORCH_ENABLE_MPS_FALLBACK=1 it is an error.",
    ALWAYS_ON_CPU: "Compute it another way; each call waits for the GPU.",
    NOT_KNOWN: "It is not one of torch's own: try it on a Mac.",
}
"""What to do about a verdict."""

OWN_REMEDIES: Mapping[str, str] = {
    "aten::embedding_renorm_": "Leave max_norm out of the Embedding: each call waits for the GPU.",
}
"""What to do about one operator, where that is known better."""

LIMITS = (
    "Not seen: branches of the model's own code on the type of the device, the inside of operators that others wrote "
    "in C++, and what torch.compile makes."
)
"""What no run on the CPU can show."""

SIMULATED = "SIMULATED MPS is on; the forecast does not depend on it."
"""What is said under the simulation: nothing of it is measured there."""

SHOWN_ROWS = 20
SHOWN_NAMES = 6


@dataclass(frozen=True)
class OperatorForecast:
    """What becomes of an operator, in one module and one phase.

    Attributes:
        operator: As it is called, such as ``"aten::_linalg_eigh"``; of what is refused also a function of torch, such as
            ``"linear"``, or a tensor, such as ``"buffer scale"``.
        verdict: One of ``VERDICTS``.
        phase: ``"inference"``, ``"forward"``, ``"backward"`` or ``"optimizer"``.
        place: The module that calls it; empty in the backward pass and in the optimizer.
        count: How often it is called.
        refusal: What MPS refuses, such as ``"float64"``; empty where it is the operator that counts.
        reason: In the words of MPS, or how MPS names the operator in its messages where that is another name.
        remedy: One thing to do; empty where nothing needs to be done.
    """

    operator: str
    verdict: str
    phase: str
    place: Place
    count: int
    refusal: str = ""
    reason: str = ""
    remedy: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the row as a mapping, ready for JSON."""
        place = {"module": self.place.module, "class": self.place.kind}
        return {**{name: value for name, value in vars(self).items() if name != "place"}, **place}

    @property
    def order(self) -> tuple[Any, ...]:
        """What rows are sorted by: the worst first."""
        return VERDICTS.index(self.verdict), self.refusal, self.operator, PHASES.index(self.phase), self.place


@dataclass(frozen=True, repr=False)
class Forecast(Shown):
    """What becomes of every operator of a model on MPS, in the installed torch.

    It stands on a run on the CPU. Not seen are branches of the model's own code on ``device.type``, the inside of
    operators that others wrote in C++, and what ``torch.compile`` makes.

    Attributes:
        model: The name of the model's class.
        torch: The version of torch.
        source: Where it was read what MPS has.
        rows: The operators, and what is refused, the worst first.
        notes: What could not be traced, as sentences.
        simulated: Whether a simulated MPS device was on.
    """

    model: str
    torch: str
    source: str
    rows: tuple[OperatorForecast, ...]
    notes: tuple[str, ...] = ()
    simulated: bool = False

    @property
    def operators(self) -> tuple[str, ...]:
        """The different operators that are called, in alphabetical order."""
        return unique(row.operator for row in self.rows if not row.refusal)

    @property
    def leaving(self) -> tuple[str, ...]:
        """The different operators that fall back to the CPU, or are always computed there."""
        return self.named(FALLS_BACK, ALWAYS_ON_CPU)

    @property
    def refused(self) -> tuple[str, ...]:
        """What MPS refuses, such as ``"float64"``."""
        return unique(row.refusal for row in self.rows if row.verdict == REFUSED)

    @property
    def troubles(self) -> tuple[OperatorForecast, ...]:
        """The rows of all that does not simply run on MPS."""
        return tuple(row for row in self.rows if row.verdict not in {NATIVE, COMPOSITE})

    @property
    def exit_code(self) -> int:
        """The status that a command ends with: 1 where an operator leaves MPS, or MPS refuses something."""
        return int(bool(self.leaving or self.refused))

    @property
    def verdict(self) -> str:
        """The forecast in a sentence or a few."""
        risks = unique(row.refusal for row in self.rows if row.verdict == MAY_BE_WRONG)
        said = [
            *([f"MPS refuses {listed(self.refused)}."] if self.refused else []),
            *([f"MPS may be wrong with {listed(risks)}."] if risks else []),
            *([f"It is not known whether MPS has {listed(self.named(NOT_KNOWN))}."] if self.named(NOT_KNOWN) else []),
        ]
        return " ".join([self._verdict_on_operators(bool(said)), *said])

    def _verdict_on_operators(self, but: bool) -> str:
        count, leaving = len(self.operators), self.leaving
        if leaving:
            leave = "leaves" if len(leaving) == 1 else "leave"
            return f"{len(leaving)} of {counted(count, 'operator')} {leave} MPS: {listed(leaving)}."
        if count <= 1:
            return "No operator leaves MPS."
        return f"None of {count} operators leaves MPS." if but else f"Every one of {count} operators runs on MPS."

    def named(self, *verdicts: str) -> tuple[str, ...]:
        """Return the different operators of some verdicts, in alphabetical order."""
        return unique(row.operator for row in self.rows if row.verdict in verdicts)

    def to_dict(self) -> dict[str, Any]:
        """Return the forecast as a mapping, ready for JSON."""
        about = {name: getattr(self, name) for name in ("model", "torch", "source", "verdict", "simulated")}
        lists = {name: list(getattr(self, name)) for name in ("operators", "leaving", "refused", "notes")}
        return {**about, **lists, "limits": LIMITS, "rows": [row.to_dict() for row in self.rows]}

    def report(self) -> Report:
        """Return what there is to show: the verdict, what leaves MPS and where, and the counts of each phase."""
        troubles = grouped(self.troubles)
        hidden = len(troubles) - SHOWN_ROWS
        more = (f"{hidden} more rows are in to_dict().",) if hidden > 0 else ()
        simulated = (SIMULATED,) if self.simulated else ()
        release = ".".join(map(str, release_of(self.torch)))  # Not the build, so that texts of two builds are the same.
        about = f"Read in {self.source}, for torch {release}."
        sentences = (*simulated, self.verdict, *self.notes, *more, about, LIMITS)
        columns = ("operator", "on MPS", "module", "phase", "times", "why", "what to do")
        rows = tuple(troubles[:SHOWN_ROWS])
        tables = (Table("What does not simply run on MPS", columns, rows), self._phases())
        return Report(f"Forecast of {self.model} on MPS", sentences, tables)

    def _phases(self) -> Table:
        columns = ("phase", "calls", "operators", "leave MPS")
        rows = [phase_row(phase, [row for row in self.rows if row.phase == phase]) for phase in PHASES]
        return Table("What the model calls", columns, tuple(row for row in rows if row[1] != "0"))


def grouped(rows: Iterable[OperatorForecast]) -> list[tuple[str, ...]]:
    """Return rows as they are shown, those of one operator in one module together, whatever the phase."""
    groups: dict[tuple[str, ...], list[OperatorForecast]] = {}
    for row in rows:
        groups.setdefault((row.operator, row.verdict, str(row.place), row.reason, row.remedy), []).append(row)
    return [
        (*key[:3], ", ".join(row.phase for row in group), ", ".join(str(row.count) for row in group), *key[3:])
        for key, group in groups.items()
    ]


def phase_row(phase: str, rows: Iterable[OperatorForecast]) -> tuple[str, ...]:
    """Return the counts of a phase as they are shown."""
    calls = [row for row in rows if not row.refusal]
    leaving = unique(row.operator for row in calls if row.verdict in {FALLS_BACK, ALWAYS_ON_CPU})
    different = unique(row.operator for row in calls)
    return phase, str(sum(row.count for row in calls)), str(len(different)), str(len(leaving))


def listed(names: tuple[str, ...]) -> str:
    """Return names with commas between them, only the first few of many.

    Example:
        >>> listed(("aten::mode", "aten::put_")), listed(tuple("abcdefgh"))
        ('aten::mode, aten::put_', 'a, b, c, d, e, f and 2 more')
    """
    more = len(names) - SHOWN_NAMES
    return ", ".join(names[:SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")


def unique(names: Iterable[str]) -> tuple[str, ...]:
    """Return the different names in alphabetical order.

    Example:
        >>> unique(["b", "a", "b"])
        ('a', 'b')
    """
    return tuple(sorted(set(names)))


def judged(model: str, trace: Trace, table: OperatorTable, simulated: bool = False) -> Forecast:
    """Return what becomes of everything that a model called.

    Args:
        model: The name of the model's class.
        trace: What was called.
        table: What MPS has.
        simulated: Whether a simulated MPS device was on.
    """
    calls = [
        OperatorForecast(call.operator, table.verdict(call.operator), call.phase, call.place, count)
        for call, count in trace.calls.items()
    ]
    named = [advised(row, table.named_by_mps(row.operator)) for row in calls]
    refused = [
        OperatorForecast(
            *(call.operator, refusal.verdict, call.phase, call.place, count),
            *(refusal.name, refusal.says, refusal.remedy),
        )
        for (refusal, call), count in trace.refusals.items()
    ]
    rows = tuple(sorted([*named, *refused], key=lambda row: row.order))
    return Forecast(model, table.torch, table.source, rows, trace.notes, simulated)


def advised(row: OperatorForecast, named_by_mps: str) -> OperatorForecast:
    """Return a row with what to do, and with how MPS names the operator where that is another name."""
    remedy = OWN_REMEDIES.get(row.operator, REMEDIES.get(row.verdict, ""))
    other = row.verdict == FALLS_BACK and named_by_mps != row.operator
    reason = f"MPS names it {named_by_mps}." if other else ""
    return OperatorForecast(row.operator, row.verdict, row.phase, row.place, row.count, "", reason, remedy)


def forecast(model: Any, example_inputs: Any = None, training: bool = True) -> Forecast:
    """Return which operators of a model would leave MPS; see :func:`openmed_nb.forecast`.

    Args:
        model: A module of torch, or a pipeline.
        example_inputs: What the model is called with; ``None`` for a pipeline: two synthetic sentences.
        training: Whether to look at one training step too.
    """
    module, example = read_model(model, example_inputs)
    table = operator_table()
    inner = getattr(module, "_orig_mod", module)  # What torch.compile was given.
    return judged(type(inner).__name__, trace(module, example, table, training), table, active())


def read_model(model: Any, example_inputs: Any) -> tuple[torch.nn.Module, Example]:
    """Return a module and what it is called with.

    Raises:
        ConfigurationError: For what is neither a module nor a pipeline, and for a module without example inputs.
    """
    module = module_in(model, "Pass a torch module, a pipeline, or the name of a model.")
    if example_inputs is not None:
        return module, read_example(example_inputs)
    tokenizer = getattr(model, "tokenizer", None)
    if tokenizer is None or module is model:
        what = f"{type(model).__name__} needs example inputs: only a pipeline has a tokenizer to make them with."
        raise ConfigurationError(what, "Pass example_inputs: a tensor, a tuple of tensors, or a mapping of them.")
    return module, synthetic_example(module, tokenizer)
