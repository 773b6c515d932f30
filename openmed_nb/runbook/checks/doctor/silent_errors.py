"""Known errors of devices that give wrong numbers without an error, each with a small computation that shows it.

A probe takes the name of a device and returns a tensor, which must equal that of the CPU. Inputs are made on the CPU and
moved, because a seed gives other numbers on MPS; most are small whole numbers, whose sums are exact in every precision and
order. Each probe is the smallest shape of its issue that shows the error; none is known to end the process. What the table
says comes from the issues and is a hint: only running the probe shows whether a device has the error.

This file imports torch; it is itself imported once something was computed on a device.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional

from ...._render.display import FAILED, NOT_APPLICABLE, OK, Finding
from ...._utils.text import describe_error, short_type_name
from ....devices.backend import TENSOR_LOCK, get_rng_states, use_rng_states, without_autocast
from ....devices.causes import MAC_TORCH
from ....devices.machine import format_device
from ....devices.memory import empty_cache
from ....devices.request import device_type
from ....session import SESSION
from ....training.batch_checks import REDUCTION_LIMIT
from ....training.guards import LSTM_REMEDY

Probe = Callable[[str], torch.Tensor]

# How far a result may be from that of the CPU, absolutely and relatively; the errors are a thousand times as large.
TOLERANCE = 1e-3  # The table has more for attention, recurrent networks and 16 bits, which round more.

LONG_SUM = 40_000  # Numbers in one sum; the error begins at 32,767.
WIDE_ROWS = 25  # Rows on both sides of a product; the error begins at 16.
MANY_ROWS = 65_600  # Rows of a linear layer; the error begins at 65,536.

# What to do about several of them, by the names in the table.
REMEDIES = {
    "UPGRADE": f"Install a torch without it: python -m pip install {MAC_TORCH}.",
    "FEWER_TOKENS": f"Train with fewer than {REDUCTION_LIMIT:,} tokens in one step and accumulate gradients, or use torch 2.14.",
    "CHECK_BATCHES": "Train with nb.Guards on, which look at every batch on the CPU.",
    "CONTIGUOUS": "Call .contiguous() on the tensor first.",
    "CPU": "Compute on the CPU: %openmed_device cpu.",
    "EAGER": "Load the model with attn_implementation='eager', or use torch 2.14.",
    "LSTM_REMEDY": LSTM_REMEDY,
    "FEWER_PRODUCTS": f"Keep sums in batched products and einsum below {REDUCTION_LIMIT:,} products.",
}

# What is known of each error, by the name of its probe. Those that are mended in every torch that this package takes are still
# looked for, because errors with transposed tensors and with parts of tensors have come back before.
KNOWN = {one.pop("probe"): one for one in json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))}


@dataclass(frozen=True)
class KnownBug:
    """A known error."""

    issue: str  # Where it was reported.
    name: str  # What is computed.
    description: str  # What goes wrong.
    affected: str  # With which chips and which releases of torch it was seen.
    remedy: str  # One thing to do.
    probe: Probe  # Computes it on a device.
    tolerance: float = TOLERANCE  # How far a result may be from that of the CPU, absolutely and relatively.
    # The kinds of devices on which the probe runs; on CUDA a wrong id ends all work on the GPU until the process ends.
    device_types: Sequence[str] = ("mps", "cuda")
    # "failed" if a transformer or its training computes this, "warning" if only some programs do, or if wrong input
    # passes.
    status: str = FAILED


# The errors that are looked for, in the order of the report; ``silent`` adds to them. Left out are those that need more
# than some megabytes or could end the process, and copies that do not wait (pytorch#189690), which this package never makes.
KNOWN_BUGS: list[KnownBug] = []


def register_probe(probe: Probe) -> Probe:
    """Add a probe to ``BUGS``."""
    known = KNOWN[probe.__name__]
    KNOWN_BUGS.append(KnownBug(**{**known, "remedy": REMEDIES.get(known["remedy"], known["remedy"])}, probe=probe))
    return probe


def integer_tensor(*shape: int) -> torch.Tensor:
    """Return whole numbers from -2 to 2 without a simple pattern, float32 on the CPU."""
    place = torch.arange(math.prod(shape), device="cpu")
    return ((place * 7919 + place // 3) % 5 - 2).to(torch.float32).reshape(shape)


def moved(device: str, *shape: int) -> torch.Tensor:
    """Return such numbers on a device."""
    return integer_tensor(*shape).to(device)


@register_probe
def long_product(device: str) -> torch.Tensor:
    rows = moved(device, LONG_SUM, WIDE_ROWS)  # As the gradient of a weight does with many tokens.
    return rows.T @ rows


@register_probe
def long_weight_gradient(device: str) -> torch.Tensor:
    tokens = moved(device, LONG_SUM, WIDE_ROWS)
    weight = moved(device, WIDE_ROWS, WIDE_ROWS).requires_grad_()
    made = functional.linear(tokens, weight)
    return torch.autograd.grad(made, weight, integer_tensor(WIDE_ROWS, LONG_SUM).T.contiguous().to(device))[0]


@register_probe
def long_batched_product(device: str) -> torch.Tensor:
    rows = moved(device, 1, LONG_SUM, WIDE_ROWS)
    return rows.transpose(1, 2) @ rows


@register_probe
def token_without_embedding(device: str) -> torch.Tensor:
    return functional.embedding(torch.tensor([[1, 5]], device="cpu").to(device), moved(device, 3, 4))


@register_probe
def label_without_logit(device: str) -> torch.Tensor:
    return functional.cross_entropy(moved(device, 2, 3), torch.tensor([7, 7], device="cpu").to(device))


@register_probe
def transposed_weight(device: str) -> torch.Tensor:
    return functional.linear(moved(device, 4, 8), moved(device, 8, 6).T)


@register_probe
def biased_rows(device: str) -> torch.Tensor:
    return functional.linear(moved(device, 2, 64, 128), moved(device, 384, 128), moved(device, 384))


@register_probe
def biased_row(device: str) -> torch.Tensor:
    return functional.linear(moved(device, 80, 1, 2), moved(device, 192, 2), moved(device, 192))


@register_probe
def gradient_beyond_a_page(device: str) -> torch.Tensor:
    rows = moved(device, 3840, 33).requires_grad_()
    return torch.autograd.grad(functional.linear(rows, moved(device, 1, 33)).sum(), rows)[0]


@register_probe
def many_rows(device: str) -> torch.Tensor:
    return functional.linear(moved(device, MANY_ROWS, 1, 4), moved(device, 3, 4), moved(device, 3))


def attention(device: str, query: tuple[int, ...], key: tuple[int, ...], mask: torch.Tensor) -> torch.Tensor:
    """Attend without gradients, for which MPS has a kernel of its own."""
    asked, found, given = (moved(device, *shape) / 2 for shape in (query, key, key))
    with torch.no_grad():
        return functional.scaled_dot_product_attention(asked, found, given + 1, attn_mask=mask.to(device))


@register_probe
def masked_row(device: str) -> torch.Tensor:
    mask = torch.tensor([[False, False], [True, True]], device="cpu")  # As padding attends.
    return attention(device, (1, 1, 2, 4), (1, 1, 2, 4), mask.reshape(1, 1, 2, 2))


@register_probe
def mask_for_all_heads(device: str) -> torch.Tensor:
    mask = integer_tensor(2, 1, 8, 8).zero_()
    mask[0, 0, 4:, :4] = -math.inf
    return attention(device, (2, 4, 8, 64), (2, 4, 8, 64), mask)


@register_probe
def mask_for_short_query(device: str) -> torch.Tensor:
    return attention(device, (2, 4, 1, 64), (2, 4, 16, 64), integer_tensor(2, 1, 1, 16) > 0)


@register_probe
def finite_mask(device: str) -> torch.Tensor:
    # Infinite and very large numbers in a mask hide the error.
    return attention(device, (1, 2, 64, 64), (1, 2, 64, 64), integer_tensor(1, 2, 64, 64))


@register_probe
def rows_of_a_bert(device: str) -> torch.Tensor:
    # The issue's text in a batch of two, and BERT base.
    rows = 2
    tokens = 7
    width = 768
    heads = 12
    weight = integer_tensor(width, width) / 32
    query, key, value, out = (weight.roll(place, 0).to(device) for place in range(4))
    read = (integer_tensor(rows, tokens, width) / 2).to(device)
    bias = moved(device, width)

    def attended(read: torch.Tensor) -> torch.Tensor:
        """Return what the first layer makes of rows of tokens, without the wide layers in its middle."""
        parts = (functional.linear(read, one, bias).unflatten(-1, (heads, -1)) for one in (query, key, value))
        seen = functional.scaled_dot_product_attention(*(part.transpose(1, 2) for part in parts))
        made = functional.linear(seen.transpose(1, 2).flatten(2), out, bias)
        return functional.layer_norm(read + functional.gelu(made), (width,), bias, bias)

    with torch.no_grad():
        return torch.cat([attended(read), *(attended(row) for row in read.split(1))])


@register_probe
def later_tokens(device: str) -> torch.Tensor:
    query = (integer_tensor(1, 2, 64, 64) / 4).to(device, torch.float16)
    with torch.no_grad():
        return functional.scaled_dot_product_attention(query, query, query, is_causal=True).float()


@register_probe
def into_transposed(device: str) -> torch.Tensor:
    values = moved(device, 3, 2)
    product = moved(device, 2, 3).T.addcmul_(values + 3, values + 3)
    quotient = moved(device, 2, 3).T.addcdiv_(values + 3, values + 4)
    return torch.stack((product, quotient))


@register_probe
def random_transposed(device: str) -> torch.Tensor:
    blank = [integer_tensor(16, 16).zero_().to(device).T for _ in range(3)]
    filled = (blank[0].uniform_(1, 2), blank[1].normal_(9, 0.01), blank[2].bernoulli_(1.0))
    return torch.stack([(values > 0).all() for values in filled])


@register_probe
def recurrent_dropout(device: str) -> torch.Tensor:
    # A dropout of 1 leaves everything out, so that no random number counts.
    network = torch.nn.LSTM(4, 4, num_layers=2, dropout=1.0, device="cpu", dtype=torch.float32)
    with torch.no_grad():
        for weight in network.parameters():
            weight.copy_(integer_tensor(*weight.shape) / 8)
    read = moved(device, 3, 2, 4).requires_grad_()
    made = network.to(device).train()(read)[0]
    return torch.cat([made.detach().flatten(), torch.autograd.grad(made.sum(), read)[0].flatten()])


@register_probe
def normalized_channels(device: str) -> torch.Tensor:
    read = moved(device, 4, 3, 8, 8).contiguous(memory_format=torch.channels_last).requires_grad_()
    weight = moved(device, 3).requires_grad_()
    bias = moved(device, 3).requires_grad_()
    made = functional.batch_norm(read, None, None, weight, bias, training=True)
    gradients = torch.autograd.grad(made, (read, weight, bias), moved(device, 4, 3, 8, 8))
    return torch.cat([gradient.flatten() for gradient in gradients])


@register_probe
def sliced_kernel(device: str) -> torch.Tensor:
    return functional.conv2d(moved(device, 2, 8, 16, 16), moved(device, 3, 8, 3, 3, 3)[:, :, 1])


@register_probe
def number_of_the_cpu(device: str) -> torch.Tensor:
    factors = torch.tensor([9.0, 2.0, 7.0], device="cpu", dtype=torch.float32)
    return moved(device, 6) * factors[1] + factors[2]


@register_probe
def filled_slice(device: str) -> torch.Tensor:
    answers = torch.zeros(16, device="cpu", dtype=torch.bool).to(device)
    answers[1:].fill_(True)
    return answers


@register_probe
def masked_slice(device: str) -> torch.Tensor:
    values = moved(device, 4, 6)
    values[:, 2:5].masked_fill_((integer_tensor(4, 3) > 0).to(device), 7.0)
    return values


@register_probe
def added_to_slice(device: str) -> torch.Tensor:
    values = moved(device, 2, 4)
    values[1].scatter_add_(0, torch.tensor([3, 2], device="cpu").to(device), moved(device, 2))
    return values


@register_probe
def largest_places(device: str) -> torch.Tensor:
    rows = moved(device, 5, 7)
    return torch.cat([rows.argmax(1), rows.to(torch.int64).argmax(1)])


def bugs_for_device(device: str) -> tuple[KnownBug, ...]:
    """Return the errors that are looked for on a device; none on the CPU, with which the others are compared."""
    return tuple(bug for bug in KNOWN_BUGS if device_type(device) in bug.device_types)


@dataclass(frozen=True)
class ProbeOutcome:
    """What came of one probe."""

    issue: str  # The issue of the error.
    with_empty_cache: str = ""  # What was wrong with an empty cache; empty if nothing was.
    with_dirty_memory: str = ""  # What was wrong after large numbers were left in freed memory; empty if nothing was.

    @property
    def mismatch(self) -> str:
        """What was wrong, and in which of the two runs if not in both; empty if nothing was."""
        if self.with_empty_cache:
            return (
                self.with_empty_cache
                if self.with_dirty_memory
                else f"{self.with_empty_cache}, only with an empty cache"
            )
        return self.with_dirty_memory and f"{self.with_dirty_memory}, only after other work on the device"


def run_probes(device: str) -> tuple[ProbeOutcome, ...]:
    """Run the probes of a device, each twice, and compare them with the CPU; the caller's settings and random numbers stay."""
    outcomes = []
    bugs = bugs_for_device(device)
    if not bugs:  # The CPU, or a device whose random numbers may be out of reach.
        return ()
    with TENSOR_LOCK, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # They are about the probes, such as cuBLAS's of a thread without a context.
        with (
            use_rng_states(get_rng_states(device)),
            torch.inference_mode(mode=False),
            torch.enable_grad(),
            without_autocast(device),
        ):
            for bug in SESSION.track("Probing", format_device(device), bugs, "probe"):
                expected = run_probe(bug.probe, "cpu")
                empty_cache(device)
                clean = describe_mismatch(expected, run_probe(bug.probe, device), bug.tolerance)
                _fill_freed_memory(device)
                dirty = describe_mismatch(expected, run_probe(bug.probe, device), bug.tolerance)
                outcomes.append(ProbeOutcome(bug.issue, clean, dirty))
    return tuple(outcomes)


def run_probe(probe: Probe, device: str) -> torch.Tensor | BaseException:
    """Return what a probe computes, on the host, or the error that torch raises for it."""
    try:
        return probe(device).detach().cpu()
    except (RuntimeError, TypeError, IndexError) as error:  # NotImplementedError is a RuntimeError.
        return error


def describe_mismatch(
    expected: torch.Tensor | BaseException, found: torch.Tensor | BaseException, tolerance: float
) -> str:
    """Return what is wrong with the result of a device, given that of the CPU; empty if nothing is."""
    if isinstance(expected, BaseException):
        name = type(expected).__name__
        return "" if isinstance(found, BaseException) else f"gives numbers where the CPU raises {name}"
    if isinstance(found, BaseException):
        return f"raises {short_type_name(found)} ({describe_error(found)})"
    if expected.shape != found.shape:
        return "gives another shape than the CPU"
    near = torch.allclose(found.double(), expected.double(), rtol=tolerance, atol=tolerance, equal_nan=True)
    return "" if near else "gives other numbers than the CPU"


def _fill_freed_memory(device: str) -> None:
    """Leave 16 MiB of large numbers in freed memory, as the work of a notebook does.

    A result that takes in what stands behind its operands is right by chance if that memory is new and zero (pytorch#177116).
    """
    lengths = (1 << 10, 1 << 16, 1 << 20, 1 << 20, 1 << 21)  # The middle ones are as long as the long inputs.
    blocks = [torch.full((length,), 1e4, device=device, dtype=torch.float32) for length in lengths]
    del blocks


def bug_findings(name: str, outcomes: Sequence[ProbeOutcome], device: str) -> tuple[Finding, ...]:
    """Return one finding for each probe that went wrong, and one for all others."""
    if not outcomes:
        return (Finding(name, NOT_APPLICABLE, "the CPU is what devices are compared with"),)
    by_issue = {bug.issue: bug for bug in KNOWN_BUGS}
    found = []
    for outcome in outcomes:
        if outcome.mismatch:
            bug = by_issue[outcome.issue]
            evidence = f"{format_device(device)} {outcome.with_empty_cache or outcome.with_dirty_memory}"
            details = f"it {outcome.mismatch} ({bug.issue}: {bug.description}; seen with {bug.affected})"
            found.append(Finding(bug.name, bug.status, evidence, bug.remedy, details))
    right = len(outcomes) - len(found)
    if right:
        agree = "1 probe agrees" if right == 1 else f"{right} probes agree"
        evidence = f"{agree} with the CPU, run twice: with an empty cache and with dirty memory"
        found.append(Finding(name, OK, evidence))
    return tuple(found)
