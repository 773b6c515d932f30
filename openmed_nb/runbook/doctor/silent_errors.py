"""The silent errors of devices that are known, and the probes that find them.

Small computations that come out wrong, without an error, where a device has one of the known silent errors.

Each takes the name of a device and returns a tensor. Inputs are made on the CPU and moved, because a seed gives other
numbers on MPS, and most are small whole numbers, whose sums are exact in every precision and order. They are taken from
the issues that the table names, in the smallest shape that shows the error; none is known to end the process.

Known errors of devices that give wrong numbers without saying so: what each is, and the probe that shows it.

The table says what is known from the issues, as a hint; whether a device has an error is told by running its probe.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...devices.backend import TENSOR_LOCK, import_torch, random_numbers_from, random_states
from ...devices.memory import empty_cache
from ...devices.request import kind_of
from ...devices.simulated import shown_device
from ...display import FAILED, NOT_APPLICABLE, OK, WARNING, Finding
from ...errors import cause
from ...training.batch_checks import REDUCTION
from ...training.guards import LSTM_REMEDY

if TYPE_CHECKING:
    import torch


LONG = 40_000
"""Numbers in one sum; 32,767 is where the error begins."""

WIDE = 25
"""Rows on both sides of a product; 16 is where the error begins."""

MANY_ROWS = 65_600
"""Rows of a linear layer; 65,536 is where the error begins."""


def numbers(*shape: int) -> torch.Tensor:
    """Return whole numbers from -2 to 2 without a simple pattern, on the CPU.

    Example:
        >>> numbers(2, 4)
        tensor([[-2.,  2.,  1.,  1.],
                [ 0., -1., -1., -2.]])
    """
    import torch

    place = torch.arange(math.prod(shape), device="cpu")
    return ((place * 7919 + place // 3) % 5 - 2).to(torch.float32).reshape(shape)


def long_product(device: str) -> torch.Tensor:
    """Multiply two matrices along many rows, as the gradient of a weight does with many tokens."""
    rows = numbers(LONG, WIDE).to(device)
    return rows.T @ rows


def long_batched_product(device: str) -> torch.Tensor:
    """Do the same for a batch of matrices."""
    rows = numbers(1, LONG, WIDE).to(device)
    return rows.transpose(1, 2) @ rows


def long_weight_gradient(device: str) -> torch.Tensor:
    """Return the gradient of a linear layer's weight for many tokens."""
    import torch

    tokens, weight = numbers(LONG, WIDE).to(device), numbers(WIDE, WIDE).to(device).requires_grad_()
    made = torch.nn.functional.linear(tokens, weight)
    return torch.autograd.grad(made, weight, numbers(WIDE, LONG).T.contiguous().to(device))[0]


def token_without_embedding(device: str) -> torch.Tensor:
    """Look a token up that has no row; an error is right."""
    import torch

    return torch.nn.functional.embedding(torch.tensor([[1, 5]], device="cpu").to(device), numbers(3, 4).to(device))


def label_without_logit(device: str) -> torch.Tensor:
    """Compute the loss of labels that the logits do not have; an error is right."""
    import torch

    labels = torch.tensor([7, 7], device="cpu").to(device)
    return torch.nn.functional.cross_entropy(numbers(2, 3).to(device), labels)


def transposed_weight(device: str) -> torch.Tensor:
    """Use a transposed matrix as the weight of a linear layer."""
    import torch

    return torch.nn.functional.linear(numbers(4, 8).to(device), numbers(8, 6).to(device).T)


def many_rows(device: str) -> torch.Tensor:
    """Run a linear layer with a bias over many rows of one token each."""
    import torch

    weight, bias = numbers(3, 4).to(device), numbers(3).to(device)
    return torch.nn.functional.linear(numbers(MANY_ROWS, 1, 4).to(device), weight, bias)


def masked_row(device: str) -> torch.Tensor:
    """Attend from a token that may look at nothing, such as padding."""
    mask = numbers(2, 2).new_tensor([[False, False], [True, True]], dtype=bool_type())
    return attention(device, (1, 1, 2, 4), (1, 1, 2, 4), mask.reshape(1, 1, 2, 2))


def mask_for_all_heads(device: str) -> torch.Tensor:
    """Attend with one mask for all heads of a row, and another one for the next row."""
    mask = numbers(2, 1, 8, 8).zero_()
    mask[0, 0, 4:, :4] = -math.inf
    return attention(device, (2, 4, 8, 64), (2, 4, 8, 64), mask)


def mask_for_short_query(device: str) -> torch.Tensor:
    """Attend from one token to sixteen with a mask of yes and no."""
    mask = numbers(2, 1, 1, 16) > 0
    return attention(device, (2, 4, 1, 64), (2, 4, 16, 64), mask)


def attention(device: str, query: tuple[int, ...], key: tuple[int, ...], mask: torch.Tensor) -> torch.Tensor:
    """Attend without gradients, which is where MPS has a kernel of its own."""
    import torch

    asked, found, given = (numbers(*shape).to(device) / 2 for shape in (query, key, key))
    with torch.no_grad():
        return torch.nn.functional.scaled_dot_product_attention(asked, found, given + 1, attn_mask=mask.to(device))


def later_tokens(device: str) -> torch.Tensor:
    """Attend in 16 bits to what came before, and not to what comes later."""
    import torch

    query = (numbers(1, 2, 64, 64) / 4).to(device, torch.float16)
    with torch.no_grad():
        return torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True).float()


def into_transposed(device: str) -> torch.Tensor:
    """Add products and quotients into transposed tensors, as optimizers do."""
    import torch

    one, other = (numbers(3, 2).to(device) for _ in range(2))
    product, quotient = (numbers(2, 3).to(device).T for _ in range(2))
    return torch.stack((product.addcmul_(one + 3, other + 3), quotient.addcdiv_(one + 3, other + 4)))


def random_transposed(device: str) -> torch.Tensor:
    """Tell whether a transposed tensor is filled with the random numbers that were asked for."""
    import torch

    def empty() -> torch.Tensor:
        return numbers(16, 16).zero_().to(device).T

    filled = (empty().uniform_(1, 2), empty().normal_(9, 0.01), empty().bernoulli_(1.0))
    return torch.stack([(values > 0).all() for values in filled])


def recurrent_dropout(device: str) -> torch.Tensor:
    """Run an LSTM that leaves everything out between its layers, and return its output and the gradient of its input."""
    import torch

    network = torch.nn.LSTM(4, 4, num_layers=2, dropout=1.0, device="cpu", dtype=torch.float32)
    with torch.no_grad():
        for weight in network.parameters():
            weight.copy_(numbers(*weight.shape) / 8)
    read = numbers(3, 2, 4).to(device).requires_grad_()
    made = network.to(device).train()(read)[0]
    return torch.cat([made.detach().flatten(), torch.autograd.grad(made.sum(), read)[0].flatten()])


def normalized_channels(device: str) -> torch.Tensor:
    """Return the gradients of a batch norm for input whose channels come last."""
    import torch

    read = numbers(4, 3, 8, 8).to(device).contiguous(memory_format=torch.channels_last).requires_grad_()
    weight, bias = (numbers(3).to(device).requires_grad_() for _ in range(2))
    made = torch.nn.functional.batch_norm(read, None, None, weight, bias, training=True)
    gradients = torch.autograd.grad(made, (read, weight, bias), numbers(4, 3, 8, 8).to(device))
    return torch.cat([gradient.flatten() for gradient in gradients])


def sliced_kernel(device: str) -> torch.Tensor:
    """Use a slice of a larger weight for a convolution."""
    import torch

    return torch.nn.functional.conv2d(numbers(2, 8, 16, 16).to(device), numbers(3, 8, 3, 3, 3).to(device)[:, :, 1])


def number_of_the_cpu(device: str) -> torch.Tensor:
    """Multiply with one number of a tensor on the CPU."""
    factors = numbers(6).new_tensor([9.0, 2.0, 7.0])
    return numbers(6).to(device) * factors[1] + factors[2]


def filled_slice(device: str) -> torch.Tensor:
    """Fill a part of a tensor of yes and no."""
    answers = (numbers(16) > 2).to(device)  # noqa: PLR2004 - none of the numbers is
    answers[1:].fill_(True)
    return answers


def masked_slice(device: str) -> torch.Tensor:
    """Fill a part of a tensor where a mask says so."""
    values = numbers(4, 6).to(device)
    values[:, 2:5].masked_fill_((numbers(4, 3) > 0).to(device), 7.0)
    return values


def added_to_slice(device: str) -> torch.Tensor:
    """Add numbers at some places of a part of a tensor."""
    import torch

    values = numbers(2, 4).to(device)
    values[1].scatter_add_(0, torch.tensor([3, 2], device="cpu").to(device), numbers(2).to(device))
    return values


def largest_places(device: str) -> torch.Tensor:
    """Find the place of the largest number in each row."""
    import torch

    rows = numbers(5, 7).to(device)
    return torch.cat([rows.argmax(1), rows.to(torch.int64).argmax(1)])


def bool_type() -> torch.dtype:
    """Return torch's type of yes and no."""
    import torch

    return torch.bool


NEAR = 1e-3
"""How far a result may be from that of the CPU; the errors are a thousand times as large."""

ROUNDED = 1e-2
"""The same where a device rounds more: attention, recurrent networks and 16 bits."""


@dataclass(frozen=True)
class SilentBug:
    """A known error.

    Attributes:
        issue: Where it was reported.
        name: What is computed.
        what: What goes wrong.
        known: With which chips and which releases of torch it was seen.
        probe: Computes it on a device.
        remedy: One thing to do.
        tolerance: How far a result may be from that of the CPU, absolutely and relatively.
        kinds: The kinds of devices on which the probe runs.
        status: How bad it is: ``"failed"`` where a transformer or its training computes that, ``"warning"`` where only
            some programs do, and where wrong input passes.
    """

    issue: str
    name: str
    what: str
    known: str
    probe: Callable[[str], torch.Tensor]
    remedy: str
    tolerance: float = NEAR
    kinds: tuple[str, ...] = ("mps", "cuda")
    status: str = FAILED


UPGRADE = "Upgrade torch: python -m pip install --upgrade torch."
FEWER_TOKENS = f"Train with fewer than {REDUCTION:,} tokens in one step and accumulate gradients, or use torch 2.14."
CHECK_BATCHES = "Train with nb.Guards on, which look at every batch on the CPU."
CONTIGUOUS = "Call .contiguous() on the tensor first, or upgrade torch."

MENDED = ", and mended in every torch that this package takes"
"""What is said of an error that only releases before torch 2.6 had."""

BUGS = (
    SilentBug(
        "pytorch#177116",
        "long matrix product",
        "sums of 32,767 products or more take freed memory in",
        "M1 and M2, torch 2.7 to 2.13",
        long_product,
        FEWER_TOKENS,
    ),
    SilentBug(
        "pytorch#183535",
        "weight gradient of many tokens",
        "it can be 1,000 to 100,000 times too large",
        "M1 and M2, torch 2.7 to 2.13",
        long_weight_gradient,
        FEWER_TOKENS,
    ),
    SilentBug(
        "pytorch#195163",
        "long batched matrix product",
        "sums of 32,767 products or more take freed memory in",
        "M1 and M2, torch 2.7 to 2.14",
        long_batched_product,
        f"Keep sums in batched products and einsum below {REDUCTION:,} products.",
    ),
    SilentBug(
        "pytorch#154235",
        "token without an embedding",
        "it gets a row of zeros and no error",
        "every torch until 2.13 at least",
        token_without_embedding,
        CHECK_BATCHES,
        kinds=("mps",),
        status=WARNING,
    ),
    SilentBug(
        "pytorch#108148",
        "label that the model does not have",
        "the loss leaves it out without an error",
        "every torch until 2.13 at least",
        label_without_logit,
        CHECK_BATCHES,
        kinds=("mps",),
        status=WARNING,
    ),
    SilentBug(
        "pytorch#162730",
        "linear layer with a transposed weight",
        "the weight is read in another order",
        "torch 2.8",
        transposed_weight,
        CONTIGUOUS,
    ),
    SilentBug(
        "pytorch#189495",
        "linear layer over many rows",
        "rows from 65,536 on are wrong where there is a bias",
        "torch 2.12 and 2.13",
        many_rows,
        "Reshape the input to two dimensions first, or use torch 2.14.",
        status=WARNING,
    ),
    SilentBug(
        "pytorch#156707",
        "attention of a row that is masked as a whole",
        "it gives NaN in the place of zeros",
        "torch until 2.8",
        masked_row,
        "Load the model with attn_implementation='eager', or upgrade torch.",
        ROUNDED,
    ),
    SilentBug(
        "pytorch#184180",
        "attention with one mask for all heads",
        "a row of a batch gets the mask of another one",
        "torch until 2.12",
        mask_for_all_heads,
        "Load the model with attn_implementation='eager', or upgrade torch.",
        ROUNDED,
    ),
    SilentBug(
        "pytorch#182285",
        "attention with a mask of yes and no",
        "a short query gets another mask",
        "builds before torch 2.12",
        mask_for_short_query,
        "Load the model with attn_implementation='eager', or upgrade torch.",
        ROUNDED,
    ),
    SilentBug(
        "pytorch#195910",
        "causal attention in 16 bits",
        "it looks at later tokens",
        "torch 2.10",
        later_tokens,
        "Compute in float32, or upgrade torch.",
        ROUNDED,
    ),
    SilentBug(
        "pytorch#118115",
        "optimizer step of a transposed weight",
        "addcmul_ and addcdiv_ do not change it",
        f"torch until 2.3{MENDED}",
        into_transposed,
        CONTIGUOUS,
    ),
    SilentBug(
        "pytorch#165267",
        "random numbers in a transposed tensor",
        "it is not filled",
        "macOS before 15, torch until 2.9",
        random_transposed,
        CONTIGUOUS,
        status=WARNING,
    ),
    SilentBug(
        "pytorch#190056",
        "LSTM with dropout between its layers",
        "the dropout is computed wrongly, also in gradients",
        "every torch until 2.13",
        recurrent_dropout,
        LSTM_REMEDY,
        ROUNDED,
        status=WARNING,
    ),
    SilentBug(
        "pytorch#175189",
        "gradients of a batch norm, channels last",
        "the weight's gradient is wrong by orders of magnitude",
        "torch 2.10 and later",
        normalized_channels,
        CONTIGUOUS,
        ROUNDED,
        status=WARNING,
    ),
    SilentBug(
        "pytorch#192212",
        "convolution with a sliced weight",
        "the weight is read from the wrong places",
        "macOS 15 and later, torch until 2.13",
        sliced_kernel,
        CONTIGUOUS,
        status=WARNING,
    ),
    SilentBug(
        "pytorch#191929",
        "arithmetic with one number of a tensor on the CPU",
        "the first number of that tensor is taken",
        "torch before 2.14",
        number_of_the_cpu,
        "Call .item() on the number first.",
        status=WARNING,
    ),
    SilentBug(
        "pytorch#183631",
        "filling a part of a tensor of yes and no",
        "other places are filled",
        "torch 2.12",
        filled_slice,
        UPGRADE,
        status=WARNING,
    ),
    SilentBug(
        "pytorch#131285",
        "masked_fill_ of a part of a tensor",
        "other places are filled",
        f"torch 2.3 and 2.4{MENDED}",
        masked_slice,
        UPGRADE,
        status=WARNING,
    ),
    SilentBug(
        "pytorch#163327",
        "scatter_add_ to a part of a tensor",
        "nothing is added",
        "torch 2.8",
        added_to_slice,
        "Add to the whole tensor, or to a clone of the part.",
        status=WARNING,
    ),
    SilentBug(
        "pytorch#92311",
        "argmax",
        "it is a number far below zero",
        f"macOS 13 with torch 1.13 to 2.0{MENDED}",
        largest_places,
        UPGRADE,
    ),
)
"""The errors that are looked for, which are not all. Those that are ``MENDED`` are looked for in case they come back, as
errors with transposed tensors and with parts of tensors have done. Left out are those that need more than some megabytes or
could end the process, and copies that do not wait (pytorch#189690), which this package never makes."""


def bugs_of(device: str) -> tuple[SilentBug, ...]:
    """Return the errors that are looked for on a device; the CPU is what others are compared with.

    On CUDA a wrong id would end all work on the GPU until the process ends, so those probes are for MPS.

    Example:
        >>> len(bugs_of("cpu")), len(bugs_of("mps")) > len(bugs_of("cuda:1")) > 0
        (0, True)
    """
    return tuple(bug for bug in BUGS if kind_of(device) in bug.kinds)


UNDERSTOOD = (RuntimeError, TypeError, IndexError)
"""What torch raises for what a device cannot do, and for wrong input; ``NotImplementedError`` is a ``RuntimeError``."""

DIRT = 1e4
DIRTY_BLOCKS = (1 << 10, 1 << 16, 1 << 20, 1 << 20, 1 << 21)
"""The lengths of the tensors that leave large numbers behind: 16 MiB in all, the middle ones as long as the long inputs."""


@dataclass(frozen=True)
class ProbeOutcome:
    """What came of one probe.

    Attributes:
        issue: The issue of the error.
        clean: What was wrong with the cache emptied before, empty where nothing was.
        dirty: What was wrong after large numbers were left in freed memory.
    """

    issue: str
    clean: str = ""
    dirty: str = ""

    @property
    def wrong(self) -> str:
        """What was wrong, empty where nothing was."""
        if self.clean and self.dirty:
            return self.clean
        when = "after other work on the device" if self.dirty else "with an empty cache"
        return f"{self.clean or self.dirty}, only {when}" if self.clean or self.dirty else ""


def run_probes(device: str, bugs: Iterable[SilentBug] | None = None) -> tuple[ProbeOutcome, ...]:
    """Run the probes of the known silent errors on a device, each twice, and compare them with the CPU.

    Random numbers go on afterwards as if nothing had been, and autocast and inference mode of the caller do not count.

    Args:
        device: ``"mps"``, ``"cuda"``, ``"cuda:N"`` or ``"cpu"``, on which there is nothing to compare.
        bugs: The errors to look for; those of the device where nobody says.

    Example:
        >>> run_probes("cpu")
        ()
    """
    looked_for = bugs_of(device) if bugs is None else tuple(bugs)
    if not looked_for:
        return ()
    with TENSOR_LOCK, undisturbed(device):
        return tuple(outcome_of(bug, device) for bug in looked_for)


def outcome_of(bug: SilentBug, device: str) -> ProbeOutcome:
    """Return what came of a probe with an empty cache and with dirty memory."""
    right = result_of(bug.probe, "cpu")
    empty_cache(device)
    clean = fault(right, result_of(bug.probe, device), bug.tolerance)
    leave_dirt(device)
    return ProbeOutcome(bug.issue, clean, fault(right, result_of(bug.probe, device), bug.tolerance))


def result_of(probe: Callable[[str], torch.Tensor], device: str) -> torch.Tensor | BaseException:
    """Return what a probe computes, in the memory of the host, or the error that it raises."""
    try:
        return probe(device).detach().cpu()
    except UNDERSTOOD as error:
        return error


def fault(right: torch.Tensor | BaseException, found: torch.Tensor | BaseException, tolerance: float) -> str:
    """Return what is wrong with the result of a device, empty where nothing is.

    Args:
        right: What the CPU computes or raises.
        found: What the device computes or raises.
        tolerance: How far two numbers may be apart, absolutely and relatively.

    Example:
        >>> import torch
        >>> fault(torch.tensor(1.0), torch.tensor(1e4), 1e-3), fault(IndexError(), torch.tensor(0.0), 1e-3)
        ('gives other numbers than the CPU', 'gives numbers where the CPU raises IndexError')
    """
    import torch

    if isinstance(right, BaseException):
        return "" if isinstance(found, BaseException) else f"gives numbers where the CPU raises {type(right).__name__}"
    if isinstance(found, BaseException):
        return f"raises {type(found).__name__} ({cause(found)})"
    if right.shape != found.shape:
        return "gives another shape than the CPU"
    near = torch.allclose(found.double(), right.double(), rtol=tolerance, atol=tolerance, equal_nan=True)
    return "" if near else "gives other numbers than the CPU"


def leave_dirt(device: str) -> None:
    """Leave large numbers in freed memory, as the work of a notebook does.

    A result that takes in what stands behind its operands is right by chance where that memory is new and zero
    (pytorch#177116).
    """
    import torch

    blocks = [torch.full((length,), DIRT, device=device, dtype=torch.float32) for length in DIRTY_BLOCKS]
    del blocks


@contextlib.contextmanager
def undisturbed(device: str) -> Iterator[None]:
    """Compute as if the caller had set nothing: without autocast and inference mode, and with random numbers given back.

    Warnings of torch are left out; they are about the probes, such as cuBLAS's of a thread without a context.
    """
    torch = import_torch()
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(random_numbers_from(random_states(device)))
        stack.enter_context(torch.inference_mode(mode=False))
        stack.enter_context(torch.enable_grad())
        for kind in dict.fromkeys(("cpu", kind_of(device))):
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def bug_findings(outcomes: Iterable[ProbeOutcome], device: str) -> tuple[Finding, ...]:
    """Return one finding for each probe that went wrong, and one for those that did not.

    Example:
        >>> for finding in bug_findings([ProbeOutcome("pytorch#92311")], "mps"):
        ...     print(finding.evidence)
        1 probe agrees with the CPU, run twice: with an empty cache and with dirty memory
    """
    outcomes = tuple(outcomes)
    if not outcomes:
        return (Finding("known silent errors", NOT_APPLICABLE, "the CPU is what devices are compared with"),)
    by_issue = {bug.issue: bug for bug in BUGS}
    wrong = tuple(_finding(by_issue[one.issue], one.wrong, device) for one in outcomes if one.wrong)
    right = len(outcomes) - len(wrong)
    if not right:
        return wrong
    agree = "1 probe agrees" if right == 1 else f"{right} probes agree"
    evidence = f"{agree} with the CPU, run twice: with an empty cache and with dirty memory"
    return (*wrong, Finding("known silent errors", OK, evidence))


def _finding(bug: SilentBug, wrong: str, device: str) -> Finding:
    evidence = f"{shown_device(device)} {wrong} ({bug.issue}: {bug.what}; seen with {bug.known})"
    return Finding(bug.name, bug.status, evidence, bug.remedy)
