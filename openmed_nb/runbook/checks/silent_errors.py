"""Known silent errors of devices (incorrect results without an exception), each with a probe that detects it.

A probe takes tensors on a device and returns a tensor, which must equal that of the CPU. Inputs are created on the CPU and
moved, because a seed produces different numbers on MPS. They are small integers, whose sums are exact in every precision and
order. The table ``silent_errors.json`` has their shapes: the smallest shapes that reproduce the error of the issue, such as 40,000
terms in one sum (the error occurs from 32,767 on), 25 features of both operands of a matrix product (from 16 on), and 65,600 rows
of a linear layer (from 65,536 on). The table quotes the issues and is only a hint: running the probe shows whether a device has
the error. A probe that can end the process (``may_abort``) runs in a process of its own: an error that ends the process costs a line of the report, and not the kernel.

The torch releases in the table are those of the issue threads, of the binaries for macOS, or both. For example, the copy in
float64 (pytorch#197715) is fixed by pytorch#197722: ``mps_copy_`` calls ``scalarToMetalTypeString`` in the binary of torch 2.15.0,
but not in those of 2.14.0 and 2.14.1. Nobody has run the probes on a Mac yet.

This module imports torch. It is imported only after a computation on a device.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from ..._render.display import FAILED, NOT_APPLICABLE, OK, WARNING, Finding, pluralize
from ..._utils import child
from ..._utils.text import describe_error, short_type_name
from ...devices.backend import TENSOR_LOCK, get_rng_states, use_rng_states, without_autocast
from ...devices.device import MAC_TORCH
from ...devices.machine import format_device, read_simulation
from ...devices.registry import DEVICE_TYPES, empty_cache
from ...devices.request import device_type
from ...session import SESSION

Probe = Callable[..., Tensor]

ACCELERATOR_TYPES = tuple(name for name, device in DEVICE_TYPES.items() if device.is_accelerator)

# Default absolute and relative tolerance of a comparison with the CPU. The errors are a thousand times as large. The table
# has larger tolerances for attention, recurrent networks and 16-bit dtypes, which round more.
DEFAULT_TOLERANCE = 1e-3


# From this number of terms, sums can be wrong on M1 and M2 (pytorch#177116, #193487).
REDUCTION_LIMIT = 32_767

# Remedies that several errors share, by their names in the table.
REMEDIES = {
    "UPGRADE": f"Install a torch version without this error: python -m pip install {MAC_TORCH}.",
    "FEWER_TOKENS": f"Train with fewer than {REDUCTION_LIMIT:,} tokens in one step and accumulate gradients, or use torch 2.14.",
    "CHECK_BATCHES": "Train with nb.Guards, which check every batch on the CPU.",
    "CONTIGUOUS": "Call .contiguous() on the tensor first.",
    "CPU_FIRST": "Convert the dtype after the copy: tensor.cpu().to(dtype).",
    "CPU": "Compute on the CPU: %openmed_device cpu.",
    "EAGER": "Load the model with attn_implementation='eager', or use torch 2.14.",
    "LSTM_REMEDY": "Set its dropout to 0, put nn.Dropout between LSTMs of one layer, or use torch 2.14.",
    "FEWER_PRODUCTS": f"Keep the reduced dimension in batched matrix products and einsum below {REDUCTION_LIMIT:,} elements.",
}


@dataclass(frozen=True)
class KnownBug:
    """A known silent error.

    Attributes:
        issue: Issue that reports the error, such as ``"pytorch#177116"``.
        name: Operation that is affected.
        description: Incorrect behavior.
        affected: Chips and torch versions on which the error was seen.
        remedy: Suggested action.
        probe: Computation that reproduces the error.
        inputs: Shapes of the inputs of the probe, see :func:`_integer_tensor`.
        tolerance: Absolute and relative tolerance of the comparison with the CPU.
        device_types: Device types that the probe runs on, by default all accelerators. On CUDA an id out of range makes
            the GPU unusable until the process exits, so such probes run on MPS only.
        status: ``"failed"`` if a transformer or its training uses the operation. ``"warning"`` if only some programs do,
            or if invalid input is accepted.
        may_abort: Whether the error ends the process, so that the probe runs in a process of its own.
    """

    issue: str
    name: str
    description: str
    affected: str
    remedy: str
    probe: Probe
    inputs: Sequence[Sequence[int]]
    tolerance: float = DEFAULT_TOLERANCE
    device_types: Sequence[str] = ACCELERATOR_TYPES
    status: str = FAILED
    may_abort: bool = False


def _integer_tensor(*shape: int) -> Tensor:
    """Return integers from -2 to 2 without a simple pattern, as float32 on the CPU."""
    indices = torch.arange(math.prod(shape), device="cpu")
    return ((indices * 7919 + indices // 3) % 5 - 2).to(torch.float32).reshape(shape)


def _concatenate(tensors: Sequence[Tensor]) -> Tensor:
    """Return the elements of all tensors in one dimension."""
    return torch.cat([tensor.flatten() for tensor in tensors])


def matmul_long_reduction(rows: Tensor) -> Tensor:
    return rows.mT @ rows  # The matrix product of a weight gradient over many tokens, or a batch of them.


def linear_weight_gradient(tokens: Tensor, weight: Tensor, gradient: Tensor) -> Tensor:
    output = functional.linear(tokens, weight.requires_grad_())
    return torch.autograd.grad(output, weight, gradient.T.contiguous())[0]


def embedding_index_out_of_range(table: Tensor) -> Tensor:
    return functional.embedding(torch.tensor([[1, 5]], device="cpu").to(table.device), table)


def cross_entropy_target_out_of_range(logits: Tensor) -> Tensor:
    return functional.cross_entropy(logits, torch.tensor([7, 7], device="cpu").to(logits.device))


def linear_transposed_weight(inputs: Tensor, weight: Tensor) -> Tensor:
    return functional.linear(inputs, weight.T)


linear_with_bias = functional.linear


def linear_input_gradient(rows: Tensor, weight: Tensor) -> Tensor:
    return torch.autograd.grad(functional.linear(rows.requires_grad_(), weight).sum(), rows)[0]


def sdpa_with_mask(query: Tensor, key: Tensor, mask: Tensor) -> Tensor:
    # MPS has a separate kernel without gradients. pytorch#184400 needs small mask values: infinite and very large ones hide it.
    with torch.no_grad():
        return functional.scaled_dot_product_attention(query / 2, key / 2, key / 2 + 1, attn_mask=mask)


def sdpa_fully_masked_row(query: Tensor, key: Tensor) -> Tensor:
    mask = torch.tensor([[False, False], [True, True]], device="cpu")  # The mask of a padded row.
    return sdpa_with_mask(query, key, mask.reshape(1, 1, 2, 2).to(query.device))


def sdpa_broadcast_mask(query: Tensor, key: Tensor) -> Tensor:
    mask = torch.zeros(2, 1, 8, 8, device="cpu", dtype=torch.float32)
    mask[0, 0, 4:, :4] = -math.inf
    return sdpa_with_mask(query, key, mask.to(query.device))


def sdpa_boolean_mask(query: Tensor, key: Tensor, mask: Tensor) -> Tensor:
    return sdpa_with_mask(query, key, mask > 0)


def bert_layer_batch_invariance(inputs: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    # A batch of two sequences, as long as the text of the issue, with the dimensions of BERT base.
    weights = [weight.cpu().roll(shift, 0).to(weight.device) / 32 for shift in range(4)]

    def run_layer(hidden: Tensor) -> Tensor:
        """Return the output of the first layer without its feed-forward layers."""
        projections = (functional.linear(hidden, weight, bias).unflatten(-1, (12, -1)) for weight in weights[:3])
        attended = functional.scaled_dot_product_attention(*(tensor.transpose(1, 2) for tensor in projections))
        output = functional.linear(attended.transpose(1, 2).flatten(2), weights[3], bias)
        return functional.layer_norm(hidden + functional.gelu(output), bias.shape, bias, bias)

    with torch.no_grad():
        return torch.cat([run_layer(inputs / 2), *(run_layer(row / 2) for row in inputs.split(1))])


def sdpa_causal_float16(query: Tensor) -> Tensor:
    query = (query / 4).to(torch.float16)
    with torch.no_grad():
        return functional.scaled_dot_product_attention(query, query, query, is_causal=True).float()


def inplace_addcmul_transposed(values: Tensor, product: Tensor, quotient: Tensor) -> Tensor:
    multiplied = product.T.addcmul_(values + 3, values + 3)
    return torch.stack((multiplied, quotient.T.addcdiv_(values + 3, values + 4)))


def inplace_random_transposed(*tensors: Tensor) -> Tensor:
    zeros = [tensor.zero_().T for tensor in tensors]
    samples = (zeros[0].uniform_(1, 2), zeros[1].normal_(9, 0.01), zeros[2].bernoulli_(1.0))
    return torch.stack([(values > 0).all() for values in samples])


def lstm_dropout(inputs: Tensor) -> Tensor:
    # A dropout of 1 drops every value, so that the result does not depend on random numbers.
    network = torch.nn.LSTM(4, 4, num_layers=2, dropout=1.0, device="cpu", dtype=torch.float32)
    with torch.no_grad():
        for weight in network.parameters():
            weight.copy_(_integer_tensor(*weight.shape) / 8)
    output = network.to(inputs.device).train()(inputs.requires_grad_())[0]
    return _concatenate([output.detach(), *torch.autograd.grad(output.sum(), inputs)])


def batch_norm_channels_last(images: Tensor, weight: Tensor, bias: Tensor, gradient: Tensor) -> Tensor:
    images = images.contiguous(memory_format=torch.channels_last)
    inputs = [tensor.requires_grad_() for tensor in (images, weight, bias)]
    output = functional.batch_norm(images, None, None, weight, bias, training=True)
    return _concatenate(torch.autograd.grad(output, inputs, gradient))


def conv2d_sliced_kernel(images: Tensor, kernel: Tensor) -> Tensor:
    return functional.conv2d(images, kernel[:, :, 1])


def cpu_scalar(values: Tensor) -> Tensor:
    factors = torch.tensor([9.0, 2.0, 7.0], device="cpu", dtype=torch.float32)
    return values * factors[1] + factors[2]


def fill_slice(values: Tensor) -> Tensor:
    flags = torch.zeros_like(values, device="cpu", dtype=torch.bool).to(values.device)
    flags[1:].fill_(True)
    return flags


def scatter_add_slice(values: Tensor, added: Tensor) -> Tensor:
    values[1].scatter_add_(0, torch.tensor([3, 2], device="cpu").to(values.device), added)
    return values


def index_add_transposed(values: Tensor, added: Tensor) -> Tensor:
    rows = torch.tensor([1, 3, 0, 0, 3, 0], device="cpu").to(values.device)
    return values.permute(1, 0, 2).index_add_(0, rows, added.permute(1, 0, 2))


def argmax_index(rows: Tensor) -> Tensor:
    return torch.cat([rows.argmax(1), rows.to(torch.int64).argmax(1)])


def linear_half_twice(inputs: Tensor, weight: Tensor) -> Tensor:
    weight = weight.to(torch.float16)
    results = []
    for _ in range(2):  # Each call can be incorrect, or none.
        rows = inputs.to(torch.float16).requires_grad_()
        output = functional.linear(rows, weight)
        results += [output.detach(), torch.autograd.grad(output.sum(), rows)[0]]
    return _concatenate(results).float()


def copy_converted_source(values: Tensor) -> Tensor:
    # The offset of 4 bytes makes the error deterministic; otherwise it depends on the address of the target.
    target = torch.zeros(values.numel() + 2, device="cpu", dtype=torch.float16)[2:]
    target.copy_(values)
    return torch.cat([target.float(), values.cpu()])


def copy_converted_slice(values: Tensor) -> Tensor:
    return values.to(torch.float16)[256:].to("cpu", torch.float32)


def copy_strided(values: Tensor) -> Tensor:
    target = torch.zeros(values.shape, device="cpu", dtype=torch.float32)
    target[::2].copy_(values[::2])
    return target


def copy_as_float64(values: Tensor) -> Tensor:
    target = torch.full(values.shape, 7.0, device="cpu", dtype=torch.float64)
    try:
        target.copy_(values)
    except (RuntimeError, TypeError):  # Other releases reject this copy on MPS, so that nothing is silently incorrect.
        return values.cpu().double()
    return target


def linear_transposed_bfloat16(inputs: Tensor, weight: Tensor) -> Tensor:
    try:
        inputs = inputs.to(torch.bfloat16)
    except (RuntimeError, TypeError):  # MPS has no bfloat16 before macOS 14, which the doctor reports by the dtype.
        return functional.linear(inputs, weight.T)
    return functional.linear(inputs, weight.to(torch.bfloat16).T).float()


def linear_gradient_five_dimensions(inputs: Tensor, weight: Tensor) -> Tensor:
    operands = [inputs.requires_grad_(), weight.requires_grad_()]
    return _concatenate(torch.autograd.grad(functional.linear(inputs, weight).sum(), operands))


# Errors in the order of the report. Errors are excluded if a probe would need more than a few megabytes. Unsynchronized copies (pytorch#189690) are excluded because this package makes none. Two
# errors that are fixed in every supported torch are still probed, because errors with transposed tensors have reappeared before.
# The column ``probe`` of the table names a function of this module.
KNOWN_BUGS = tuple(
    KnownBug(**{**row, "remedy": REMEDIES.get(row["remedy"], row["remedy"]), "probe": globals()[row["probe"]]})
    for row in json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
)


def bugs_for_device(device: str) -> tuple[KnownBug, ...]:
    """Return the errors to probe on a device. There are none for the CPU, which is the reference."""
    return tuple(bug for bug in KNOWN_BUGS if device_type(device) in bug.device_types)


@dataclass(frozen=True)
class ProbeOutcome:
    """Outcome of one probe.

    Attributes:
        issue: Issue of the error.
        mismatch: Difference from the CPU, or an empty string.
        not_run: Reason why the probe has no result, or an empty string.
    """

    issue: str
    mismatch: str = ""
    not_run: str = ""


# Time limit, which includes the import of torch on a busy computer.
PROBE_SECONDS = 120.0

# Signals of a failed assertion or an invalid memory access. Other signals come from the user or the operating system.
CRASH_SIGNALS = ("SIGABRT", "SIGSEGV", "SIGBUS", "SIGILL", "SIGTRAP")


def can_abort(issue: str) -> bool:
    """Return whether the probe of an issue can end the process: on a simulated device only if the error is simulated."""
    simulation = read_simulation()
    return simulation is None or issue in simulation["defects"]


def probe_in_process(issue: str, device: str) -> ProbeOutcome:
    """Run the probe of an error in a child process, and return its outcome, which can be the end of that process."""
    simulation = read_simulation()
    memory = None if simulation is None else simulation["installed"]
    return describe_exit(issue, child.run(probe_in_this_process, (issue, device, memory), PROBE_SECONDS, os.environ))


def describe_exit(issue: str, exited: child.CallOutcome) -> ProbeOutcome:
    """Return the outcome of a probe from the outcome of its process.

    Example:
        >>> describe_exit("pytorch#197796", child.CallOutcome(-6, None, "")).mismatch
        'aborts the process (SIGABRT)'
        >>> describe_exit("pytorch#197796", child.CallOutcome(1, None, "ModuleNotFoundError: torch")).not_run
        'its process failed (ModuleNotFoundError: torch)'
    """
    if exited.exit_code == 0:
        return ProbeOutcome(issue, exited.value)
    if exited.exit_code is None:
        return ProbeOutcome(issue, not_run=f"its process did not finish within {PROBE_SECONDS:g} s")
    if exited.signal in CRASH_SIGNALS:
        return ProbeOutcome(issue, f"aborts the process ({exited.signal})")
    reason = exited.signal or exited.output.strip().rpartition("\n")[2] or f"exit code {exited.exit_code}"
    return ProbeOutcome(issue, not_run=f"its process failed ({reason})")


def run_probes(device: str) -> tuple[ProbeOutcome, ...]:
    """Run each probe of a device twice and compare it with the CPU.

    Settings and random number generators of the caller stay unchanged. A probe that can abort runs once, in a child process.
    """
    outcomes = []
    bugs = bugs_for_device(device)
    if not bugs:  # The CPU, or a device type whose random number generator may be inaccessible.
        return ()
    with (
        TENSOR_LOCK,
        warnings.catch_warnings(),
        use_rng_states(get_rng_states(device)),
        torch.inference_mode(mode=False),
        torch.enable_grad(),
        without_autocast(device),
    ):
        warnings.simplefilter("ignore")  # For example, cuBLAS warns in a thread without a context.
        for bug in SESSION.track("Probing", format_device(device), bugs, "probe"):
            if bug.may_abort and can_abort(bug.issue):
                outcomes.append(probe_in_process(bug.issue, device))
                continue
            empty_cache(device)
            with_empty_cache = find_mismatch(bug, device)
            _fill_freed_memory(device)
            outcomes.append(ProbeOutcome(bug.issue, with_empty_cache or find_mismatch(bug, device)))
    return tuple(outcomes)


def probe_in_this_process(issue: str, device: str, simulated_memory: int | None) -> str:
    """Return the difference between one run of the probe of an error and the CPU, or an empty string if they match.

    Args:
        issue: Issue of the error.
        device: Device to probe.
        simulated_memory: Memory of the simulated device in bytes, or ``None`` if the device is real.
    """
    simulation: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    if simulated_memory is not None:
        from ...simulation.device import simulated_device

        simulation = simulated_device(simulated_memory, False, {}, issue)
    bug = next(bug for bug in KNOWN_BUGS if bug.issue == issue)
    with simulation:
        return find_mismatch(bug, device)


def run_probe(bug: KnownBug, device: str) -> Tensor | BaseException:
    """Return the result of the probe of an error on the host, or the exception that torch raises."""
    try:
        inputs = (_integer_tensor(*shape).to(device) for shape in bug.inputs)
        return bug.probe(*inputs).detach().cpu()
    except (RuntimeError, TypeError, IndexError) as error:  # NotImplementedError is a RuntimeError.
        return error


def find_mismatch(bug: KnownBug, device: str) -> str:
    """Run the probe of an error, and return the difference from the CPU, or an empty string if they match."""
    return describe_mismatch(run_probe(bug, "cpu"), run_probe(bug, device), bug.tolerance)


def describe_mismatch(expected: Tensor | BaseException, actual: Tensor | BaseException, tolerance: float) -> str:
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
    """Fill 16 MiB with large numbers and free them, like memory that earlier cells of a notebook have used.

    An operator that reads beyond its operands returns correct results by chance if that memory is new and zero (pytorch#177116).
    """
    # The middle blocks are about as large as the largest inputs of the probes.
    lengths = (1 << 10, 1 << 16, 1 << 20, 1 << 20, 1 << 21)
    blocks = [torch.full((length,), 1e4, device=device, dtype=torch.float32) for length in lengths]
    del blocks


def bug_findings(name: str, outcomes: Sequence[ProbeOutcome], device: str) -> tuple[Finding, ...]:
    """Return one finding for each probe with a mismatch or without a result, and one for all others."""
    if not outcomes:
        return (Finding(name, NOT_APPLICABLE, "the CPU is the reference of the comparison"),)
    by_issue = {bug.issue: bug for bug in KNOWN_BUGS}
    findings = []
    for outcome in outcomes:
        bug = by_issue[outcome.issue]
        if outcome.not_run:
            # It has no details, by which the verdict recognizes an error that was found.
            remedy = "Run nb.doctor() again while no other program is running."
            findings.append(Finding(f"{name}: {bug.name}", WARNING, f"not probed: {outcome.not_run}", remedy))
        elif outcome.mismatch:
            evidence = f"{format_device(device)} {outcome.mismatch}"
            details = f"{bug.issue}: {bug.description}; seen with {bug.affected}"
            findings.append(Finding(bug.name, bug.status, evidence, bug.remedy, details))
    matches = len(outcomes) - len(findings)
    if matches:
        agree = pluralize(matches, "probe agrees", "probes agree")
        evidence = f"{agree} with the CPU in both runs, with an empty cache and with reused memory"
        findings.append(Finding(name, OK, evidence))
    return tuple(findings)
