"""Known silent errors of devices (incorrect results without an exception), each with a probe that detects it.

A probe takes a device name and returns a tensor, which must equal that of the CPU. Inputs are created on the CPU and moved,
because a seed produces different numbers on MPS. Most inputs are small integers, whose sums are exact in every precision and
order. Each probe has the smallest shape of its issue that shows the error. None is known to crash the process. The table
``silent_errors.json`` quotes the issues and is only a hint: running the probe shows whether a device has the error.

This module imports torch. It is imported only after a computation on a device.
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
from ....devices.registry import DEVICE_TYPES
from ....devices.request import device_type
from ....session import SESSION
from ....training.batch_checks import REDUCTION_LIMIT
from ....training.guards import LSTM_REMEDY

Probe = Callable[[str], torch.Tensor]

ACCELERATOR_TYPES = tuple(name for name, device in DEVICE_TYPES.items() if device.is_accelerator)

# Default absolute and relative tolerance of a comparison with the CPU. The errors are a thousand times as large. The table
# has larger tolerances for attention, recurrent networks and 16-bit dtypes, which round more.
DEFAULT_TOLERANCE = 1e-3

# Number of terms in one sum. The error starts at 32,767.
NUM_TERMS = 40_000
# Number of rows on both sides of a matrix product. The error starts at 16.
NUM_PRODUCT_ROWS = 25
# Number of rows of a linear layer. The error starts at 65,536.
NUM_LINEAR_ROWS = 65_600

# Remedies that several errors share, by their names in the table.
REMEDIES = {
    "UPGRADE": f"Install a torch version without this error: python -m pip install {MAC_TORCH}.",
    "FEWER_TOKENS": f"Train with fewer than {REDUCTION_LIMIT:,} tokens in one step and accumulate gradients, or use torch 2.14.",
    "CHECK_BATCHES": "Train with nb.Guards, which check every batch on the CPU.",
    "CONTIGUOUS": "Call .contiguous() on the tensor first.",
    "CPU": "Compute on the CPU: %openmed_device cpu.",
    "EAGER": "Load the model with attn_implementation='eager', or use torch 2.14.",
    "LSTM_REMEDY": LSTM_REMEDY,
    "FEWER_PRODUCTS": f"Keep sums in batched products and einsum below {REDUCTION_LIMIT:,} products.",
}

# Rows of the table by the name of the probe. Errors that are fixed in every supported torch are still probed, because errors
# with transposed tensors and tensor slices have reappeared before.
_BUG_ROWS = {row.pop("probe"): row for row in json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))}


@dataclass(frozen=True)
class KnownBug:
    """A known silent error.

    Attributes:
        issue: Issue that reports the error, such as ``"pytorch#177116"``.
        name: Operation that is affected.
        description: Incorrect behavior.
        affected: Chips and torch versions on which the error was seen.
        remedy: Suggested action.
        probe: Computation that shows the error.
        tolerance: Absolute and relative tolerance of the comparison with the CPU.
        device_types: Device types that the probe runs on, by default all accelerators. On CUDA an id out of range makes
            the GPU unusable until the process exits, so such probes run on MPS only.
        status: ``"failed"`` if a transformer or its training uses the operation. ``"warning"`` if only some programs do,
            or if invalid input is accepted.
    """

    issue: str
    name: str
    description: str
    affected: str
    remedy: str
    probe: Probe
    tolerance: float = DEFAULT_TOLERANCE
    device_types: Sequence[str] = ACCELERATOR_TYPES
    status: str = FAILED


# Errors in the order of the report, added by ``register_probe``. Errors are excluded if a probe would need more than a few
# megabytes or could crash the process. Unsynchronized copies (pytorch#189690) are excluded because this package makes none.
KNOWN_BUGS: list[KnownBug] = []


def register_probe(probe: Probe) -> Probe:
    """Add the error of a probe to ``KNOWN_BUGS``."""
    row = _BUG_ROWS[probe.__name__]
    KNOWN_BUGS.append(KnownBug(**{**row, "remedy": REMEDIES.get(row["remedy"], row["remedy"])}, probe=probe))
    return probe


def _integer_tensor(*shape: int) -> torch.Tensor:
    """Return integers from -2 to 2 without a simple pattern, as float32 on the CPU."""
    indices = torch.arange(math.prod(shape), device="cpu")
    return ((indices * 7919 + indices // 3) % 5 - 2).to(torch.float32).reshape(shape)


def _device_tensor(device: str, *shape: int) -> torch.Tensor:
    """Return :func:`_integer_tensor` on a device."""
    return _integer_tensor(*shape).to(device)


@register_probe
def long_product(device: str) -> torch.Tensor:
    rows = _device_tensor(device, NUM_TERMS, NUM_PRODUCT_ROWS)  # The product of a weight gradient with many tokens.
    return rows.T @ rows


@register_probe
def long_weight_gradient(device: str) -> torch.Tensor:
    tokens = _device_tensor(device, NUM_TERMS, NUM_PRODUCT_ROWS)
    weight = _device_tensor(device, NUM_PRODUCT_ROWS, NUM_PRODUCT_ROWS).requires_grad_()
    output = functional.linear(tokens, weight)
    return torch.autograd.grad(output, weight, _integer_tensor(NUM_PRODUCT_ROWS, NUM_TERMS).T.contiguous().to(device))[
        0
    ]


@register_probe
def long_batched_product(device: str) -> torch.Tensor:
    rows = _device_tensor(device, 1, NUM_TERMS, NUM_PRODUCT_ROWS)
    return rows.transpose(1, 2) @ rows


@register_probe
def token_without_embedding(device: str) -> torch.Tensor:
    return functional.embedding(torch.tensor([[1, 5]], device="cpu").to(device), _device_tensor(device, 3, 4))


@register_probe
def label_without_logit(device: str) -> torch.Tensor:
    return functional.cross_entropy(_device_tensor(device, 2, 3), torch.tensor([7, 7], device="cpu").to(device))


@register_probe
def transposed_weight(device: str) -> torch.Tensor:
    return functional.linear(_device_tensor(device, 4, 8), _device_tensor(device, 8, 6).T)


@register_probe
def biased_rows(device: str) -> torch.Tensor:
    return functional.linear(
        _device_tensor(device, 2, 64, 128), _device_tensor(device, 384, 128), _device_tensor(device, 384)
    )


@register_probe
def biased_row(device: str) -> torch.Tensor:
    return functional.linear(
        _device_tensor(device, 80, 1, 2), _device_tensor(device, 192, 2), _device_tensor(device, 192)
    )


@register_probe
def gradient_beyond_a_page(device: str) -> torch.Tensor:
    rows = _device_tensor(device, 3840, 33).requires_grad_()
    return torch.autograd.grad(functional.linear(rows, _device_tensor(device, 1, 33)).sum(), rows)[0]


@register_probe
def many_rows(device: str) -> torch.Tensor:
    return functional.linear(
        _device_tensor(device, NUM_LINEAR_ROWS, 1, 4), _device_tensor(device, 3, 4), _device_tensor(device, 3)
    )


def _run_attention(device: str, query: tuple[int, ...], key: tuple[int, ...], mask: torch.Tensor) -> torch.Tensor:
    """Run attention without gradients, for which MPS has a separate kernel."""
    queries = _device_tensor(device, *query) / 2
    keys = _device_tensor(device, *key) / 2
    values = _device_tensor(device, *key) / 2 + 1
    with torch.no_grad():
        return functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask.to(device))


@register_probe
def masked_row(device: str) -> torch.Tensor:
    mask = torch.tensor([[False, False], [True, True]], device="cpu")  # The mask of a padded row.
    return _run_attention(device, (1, 1, 2, 4), (1, 1, 2, 4), mask.reshape(1, 1, 2, 2))


@register_probe
def mask_for_all_heads(device: str) -> torch.Tensor:
    mask = _integer_tensor(2, 1, 8, 8).zero_()
    mask[0, 0, 4:, :4] = -math.inf
    return _run_attention(device, (2, 4, 8, 64), (2, 4, 8, 64), mask)


@register_probe
def mask_for_short_query(device: str) -> torch.Tensor:
    return _run_attention(device, (2, 4, 1, 64), (2, 4, 16, 64), _integer_tensor(2, 1, 1, 16) > 0)


@register_probe
def finite_mask(device: str) -> torch.Tensor:
    # Infinite and very large mask values hide the error.
    return _run_attention(device, (1, 2, 64, 64), (1, 2, 64, 64), _integer_tensor(1, 2, 64, 64))


@register_probe
def bert_rows(device: str) -> torch.Tensor:
    # A batch of two rows with the text of the issue, and the sizes of BERT base.
    rows = 2
    tokens = 7
    width = 768
    heads = 12
    weight = _integer_tensor(width, width) / 32
    query, key, value, out = (weight.roll(shift, 0).to(device) for shift in range(4))
    inputs = (_integer_tensor(rows, tokens, width) / 2).to(device)
    bias = _device_tensor(device, width)

    def run_layer(hidden: torch.Tensor) -> torch.Tensor:
        """Return the output of the first layer without its feed-forward layers."""
        projections = (
            functional.linear(hidden, projection, bias).unflatten(-1, (heads, -1)) for projection in (query, key, value)
        )
        attended = functional.scaled_dot_product_attention(*(tensor.transpose(1, 2) for tensor in projections))
        output = functional.linear(attended.transpose(1, 2).flatten(2), out, bias)
        return functional.layer_norm(hidden + functional.gelu(output), (width,), bias, bias)

    with torch.no_grad():
        return torch.cat([run_layer(inputs), *(run_layer(row) for row in inputs.split(1))])


@register_probe
def later_tokens(device: str) -> torch.Tensor:
    query = (_integer_tensor(1, 2, 64, 64) / 4).to(device, torch.float16)
    with torch.no_grad():
        return functional.scaled_dot_product_attention(query, query, query, is_causal=True).float()


@register_probe
def into_transposed(device: str) -> torch.Tensor:
    values = _device_tensor(device, 3, 2)
    product = _device_tensor(device, 2, 3).T.addcmul_(values + 3, values + 3)
    quotient = _device_tensor(device, 2, 3).T.addcdiv_(values + 3, values + 4)
    return torch.stack((product, quotient))


@register_probe
def random_transposed(device: str) -> torch.Tensor:
    zeros = [_integer_tensor(16, 16).zero_().to(device).T for _ in range(3)]
    samples = (zeros[0].uniform_(1, 2), zeros[1].normal_(9, 0.01), zeros[2].bernoulli_(1.0))
    return torch.stack([(values > 0).all() for values in samples])


@register_probe
def recurrent_dropout(device: str) -> torch.Tensor:
    # A dropout of 1 drops every value, so that the result does not depend on random numbers.
    network = torch.nn.LSTM(4, 4, num_layers=2, dropout=1.0, device="cpu", dtype=torch.float32)
    with torch.no_grad():
        for weight in network.parameters():
            weight.copy_(_integer_tensor(*weight.shape) / 8)
    inputs = _device_tensor(device, 3, 2, 4).requires_grad_()
    output = network.to(device).train()(inputs)[0]
    return torch.cat([output.detach().flatten(), torch.autograd.grad(output.sum(), inputs)[0].flatten()])


@register_probe
def normalized_channels(device: str) -> torch.Tensor:
    images = _device_tensor(device, 4, 3, 8, 8).contiguous(memory_format=torch.channels_last).requires_grad_()
    weight = _device_tensor(device, 3).requires_grad_()
    bias = _device_tensor(device, 3).requires_grad_()
    output = functional.batch_norm(images, None, None, weight, bias, training=True)
    gradients = torch.autograd.grad(output, (images, weight, bias), _device_tensor(device, 4, 3, 8, 8))
    return torch.cat([gradient.flatten() for gradient in gradients])


@register_probe
def sliced_kernel(device: str) -> torch.Tensor:
    return functional.conv2d(_device_tensor(device, 2, 8, 16, 16), _device_tensor(device, 3, 8, 3, 3, 3)[:, :, 1])


@register_probe
def cpu_scalar(device: str) -> torch.Tensor:
    factors = torch.tensor([9.0, 2.0, 7.0], device="cpu", dtype=torch.float32)
    return _device_tensor(device, 6) * factors[1] + factors[2]


@register_probe
def filled_slice(device: str) -> torch.Tensor:
    flags = torch.zeros(16, device="cpu", dtype=torch.bool).to(device)
    flags[1:].fill_(True)
    return flags


@register_probe
def masked_slice(device: str) -> torch.Tensor:
    values = _device_tensor(device, 4, 6)
    values[:, 2:5].masked_fill_((_integer_tensor(4, 3) > 0).to(device), 7.0)
    return values


@register_probe
def added_to_slice(device: str) -> torch.Tensor:
    values = _device_tensor(device, 2, 4)
    values[1].scatter_add_(0, torch.tensor([3, 2], device="cpu").to(device), _device_tensor(device, 2))
    return values


@register_probe
def argmax_index(device: str) -> torch.Tensor:
    rows = _device_tensor(device, 5, 7)
    return torch.cat([rows.argmax(1), rows.to(torch.int64).argmax(1)])


def bugs_for_device(device: str) -> tuple[KnownBug, ...]:
    """Return the errors to probe on a device. There are none for the CPU, which is the reference."""
    return tuple(bug for bug in KNOWN_BUGS if device_type(device) in bug.device_types)


@dataclass(frozen=True)
class ProbeOutcome:
    """Outcome of one probe.

    Attributes:
        issue: Issue of the error.
        with_empty_cache: Mismatch with an empty cache, or an empty string.
        with_dirty_memory: Mismatch with large numbers in freed memory, or an empty string.
    """

    issue: str
    with_empty_cache: str = ""
    with_dirty_memory: str = ""

    @property
    def mismatch(self) -> str:
        """Mismatch, with the run if only one of the two had it, or an empty string."""
        if self.with_empty_cache:
            suffix = "" if self.with_dirty_memory else ", only with an empty cache"
            return f"{self.with_empty_cache}{suffix}"
        if self.with_dirty_memory:
            return f"{self.with_dirty_memory}, only after other work on the device"
        return ""


def run_probes(device: str) -> tuple[ProbeOutcome, ...]:
    """Run each probe of a device twice and compare it with the CPU.

    Settings and random number generators of the caller stay unchanged.
    """
    outcomes = []
    bugs = bugs_for_device(device)
    if not bugs:  # The CPU, or a device type whose random number generator may be inaccessible.
        return ()
    with TENSOR_LOCK, warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # Warnings about the probes, such as that of cuBLAS in a thread without a context.
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
    """Return the result of a probe on the host, or the error that torch raises."""
    try:
        return probe(device).detach().cpu()
    except (RuntimeError, TypeError, IndexError) as error:  # NotImplementedError is a RuntimeError.
        return error


def describe_mismatch(
    expected: torch.Tensor | BaseException, actual: torch.Tensor | BaseException, tolerance: float
) -> str:
    """Return the difference between the results of the CPU and of a device, or an empty string if they match."""
    if isinstance(expected, BaseException):
        name = type(expected).__name__
        return "" if isinstance(actual, BaseException) else f"returns a result where the CPU raises {name}"
    if isinstance(actual, BaseException):
        return f"raises {short_type_name(actual)} ({describe_error(actual)})"
    if expected.shape != actual.shape:
        return "returns a different shape than the CPU"
    is_close = torch.allclose(actual.double(), expected.double(), rtol=tolerance, atol=tolerance, equal_nan=True)
    return "" if is_close else "returns different values than the CPU"


def _fill_freed_memory(device: str) -> None:
    """Fill 16 MiB with large numbers and free them, as the work of a notebook does.

    An operator that reads beyond its operands returns correct results by chance if that memory is new and zero (pytorch#177116).
    """
    lengths = (1 << 10, 1 << 16, 1 << 20, 1 << 20, 1 << 21)  # The middle blocks are as long as the long inputs.
    blocks = [torch.full((length,), 1e4, device=device, dtype=torch.float32) for length in lengths]
    del blocks


def bug_findings(name: str, outcomes: Sequence[ProbeOutcome], device: str) -> tuple[Finding, ...]:
    """Return one finding for each probe with a mismatch, and one for all others."""
    if not outcomes:
        return (Finding(name, NOT_APPLICABLE, "the CPU is the reference of the comparison"),)
    by_issue = {bug.issue: bug for bug in KNOWN_BUGS}
    findings = []
    for outcome in outcomes:
        if outcome.mismatch:
            bug = by_issue[outcome.issue]
            evidence = f"{format_device(device)} {outcome.with_empty_cache or outcome.with_dirty_memory}"
            details = f"it {outcome.mismatch} ({bug.issue}: {bug.description}; seen with {bug.affected})"
            findings.append(Finding(bug.name, bug.status, evidence, bug.remedy, details))
    matches = len(outcomes) - len(findings)
    if matches:
        agree = "1 probe agrees" if matches == 1 else f"{matches} probes agree"
        evidence = f"{agree} with the CPU in both runs, with an empty cache and with dirty memory"
        findings.append(Finding(name, OK, evidence))
    return tuple(findings)
