"""What is measured to run faster: whether rows may be padded, how many tokens run at once, and whether compiling pays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from .._render.display import Displayable, Report, Table
from .._render.drawing import bar_chart
from .._utils.clock import time_call
from .._utils.text import describe_error
from ..devices.backend import TENSOR_LOCK
from ..devices.linear import min_runtime
from ..devices.machine import format_device
from ..devices.memory import empty_cache, is_out_of_memory
from ..devices.moving import to_numpy
from .forward import TokenClassifier
from .results import Entity, entity_span

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


# How long the row is that shows whether a model reads the filling: a length that rows on MPS are filled up to anyway.
PROBE_LENGTH = 32

# The numbers of tokens that are tried, from the smallest up, and how long the rows are.
CALIBRATION_TOKENS = tuple(256 * 2**power for power in range(9))
CALIBRATION_LENGTH = 128

# A larger batch must be this many times faster to be worth its memory.
MIN_CALIBRATION_SPEEDUP = 1.03

# Compiling is kept if it makes a pass at least this many times faster. The fastest of PASSES passes each way counts.
MIN_COMPILE_SPEEDUP = 1.05
COMPILE_PASSES = 3

# What both ways read: of several lengths, so that the compiled model meets several shapes.
COMPILE_TEXTS = (
    "No known drug allergies.",
    "Patient with type 2 diabetes mellitus and hypertension, admitted for chest pain.",
    "History of asthma and atrial fibrillation. She denies fever, cough or weight loss. Family history of breast cancer.",
    "The patient was diagnosed with rheumatoid arthritis, chronic kidney disease and iron deficiency anaemia. " * 8,
)


@dataclass(frozen=True, repr=False)
class Calibration(Displayable):
    """How fast a model is with batches of several sizes.

    Attributes:
        device: The device that was measured.
        speeds: Pairs of tokens at once and tokens per second.
    """

    device: str
    throughput: tuple[tuple[int, float], ...]

    @property
    def batch_tokens(self) -> int:
        """The smallest batch that no larger one beats by much."""
        fastest = max(speed for _tokens, speed in self.throughput)
        return next(tokens for tokens, speed in self.throughput if MIN_CALIBRATION_SPEEDUP * speed >= fastest)

    def to_dict(self) -> dict[str, Any]:
        """Return device, choice and speeds as plain mappings and numbers."""
        return {"device": self.device, "batch_tokens": self.batch_tokens, "tokens_per_second": dict(self.throughput)}

    def to_report(self) -> Report:
        """Return the choice, and a table of the speeds."""
        rows = tuple((f"{tokens:,}", f"{speed:,.0f}") for tokens, speed in self.throughput)
        table = Table("Measured", ("tokens at once", "tokens per second"), rows, collapsed=True)
        caption, named = (
            "Tokens a second, by tokens at once",
            [(f"{tokens:,}", speed) for tokens, speed in self.throughput],
        )
        picture = bar_chart(caption, named, "{:,.0f}".format, f"{self.batch_tokens:,}")
        return Report(f"{self.batch_tokens:,} tokens at once on {self.device}", tables=(table,), charts=(picture,))


@dataclass(frozen=True, repr=False)
class Compilation(Displayable):
    """What came of compiling a model.

    Attributes:
        kept: Whether the compiled model is used.
        gain: How many times faster it was; ``None`` if it did not run.
        reason: Why it is kept or not.
        device: The device that it was tried on.
    """

    kept: bool
    speedup: float | None
    reason: str
    device: str

    def to_report(self) -> Report:
        """Return what came of it in two lines."""
        kept = "is used" if self.kept else "is not used"
        return Report(f"torch.compile {kept} on {self.device}", (self.reason,))


def is_padding_masked(network: TokenClassifier, longest: int) -> bool:
    """Return whether padding a row leaves the answers to its own tokens unchanged, but for rounding.

    A model may take a mask and still read the filling: the convolutions of ConvBERT, the pooling of Funnel and the hashes
    of YOSO do. So a row of tokens, none of them a text's, runs alone and filled up. The person's hooks do not see it.
    """
    import torch

    if "attention_mask" not in network.input_names:
        return False
    padded = min(PROBE_LENGTH, longest)
    length = padded * 2 // 3
    ids = np.full((1, padded), network.special_tokens.pad_token_id, np.int64)
    ids[0, :length] = np.resize([*network.special_tokens.prefix_ids, *network.special_tokens.suffix_ids] or [0], length)
    inputs = network.build_inputs(ids, (np.arange(padded) < length)[None])
    bare = replace(network, model=ModelWithoutHooks(network.model))
    try:
        with TENSOR_LOCK, torch.no_grad():
            filled = bare.logits(inputs)[0, :length].float()
            alone = bare.logits({name: array[:, :length] for name, array in inputs.items()})[0].float()
            difference = float((filled - alone).abs().max())
            size = float(alone.abs().max())
    except Exception:  # noqa: BLE001 - a model that cannot run is reported when it runs over texts
        return True
    rounding = torch.finfo(network.model.dtype).eps ** 0.5
    return not difference > rounding * max(1.0, size)  # NaN is reported with the answers.


@dataclass(frozen=True)
class ModelWithoutHooks:
    model: PreTrainedModel
    training: ClassVar[bool] = False

    @property
    def _modules(self) -> dict[str, Any]:
        return {"model": self.model}

    def modules(self) -> Any:
        return self.model.modules()

    def __call__(self, **inputs: torch.Tensor) -> Any:
        return self.model.forward(**inputs)


def measure_batches(network: TokenClassifier, longest: int) -> Calibration:
    """Measure batches of more and more tokens, until one does not fit in memory or two are hardly faster."""
    length = min(CALIBRATION_LENGTH, longest)
    speeds: list[tuple[int, float]] = []
    with TENSOR_LOCK:
        for tokens in CALIBRATION_TOKENS:
            speed = measure_throughput(network, max(1, tokens // length), length)
            if speed == 0 and speeds:
                break
            speeds.append((tokens, speed))
            if len(speeds) > 2 and all(later[1] <= MIN_CALIBRATION_SPEEDUP * speeds[-3][1] for later in speeds[-2:]):  # noqa: PLR2004
                break
    return Calibration(format_device(str(network.device)), tuple(speeds))


def measure_throughput(network: TokenClassifier, rows: int, length: int) -> float:
    """Return how many tokens per second run in batches of a shape, 0 if these do not fit in memory."""
    inputs, device = network.dummy_inputs(rows, length), network.device

    def run() -> None:
        for tensor in network(inputs):
            to_numpy(tensor)

    try:
        return rows * length / min_runtime(run, times=3)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        empty_cache(str(device))
        return 0.0


AnnotateFn = Callable[[Sequence[str]], Sequence[Sequence[Entity]]]


def compare_compiled(plain: AnnotateFn, compiled: AnnotateFn, device: str) -> Compilation:
    """Read texts both ways, in turn, and return what came of it.

    Compiling can fail in any way, for want of a C++ compiler above all; then the model runs as it did before.
    """
    device = format_device(device)

    def spans(way: AnnotateFn) -> list[tuple[int, int, int, str]]:
        return [
            (number, *entity_span(entity)) for number, entities in enumerate(way(COMPILE_TEXTS)) for entity in entities
        ]

    plain_seconds: list[float] = []
    compiled_seconds: list[float] = []
    try:
        computed = spans(compiled)  # The first call compiles.
        expected = spans(plain)
        for _ in range(COMPILE_PASSES):
            plain_seconds.append(time_call(lambda: plain(COMPILE_TEXTS)))
            compiled_seconds.append(time_call(lambda: compiled(COMPILE_TEXTS)))
    except Exception as error:  # noqa: BLE001 - whatever a compiler fails with becomes the reason
        return Compilation(False, None, f"It does not compile: {describe_error(error)}.", device)
    gain = min(plain_seconds) / min(compiled_seconds)
    if expected != computed:
        what = f"It finds other entities: {len(computed)} instead of {len(expected)}, or at other places."
        return Compilation(False, gain, what, device)
    if gain < MIN_COMPILE_SPEEDUP:
        return Compilation(False, gain, f"It finds the same entities, but only {gain:.2f} times as fast.", device)
    return Compilation(True, gain, f"It finds the same {len(expected)} entities {gain:.2f} times faster.", device)
