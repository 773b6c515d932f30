"""Small computations that come out wrong, without an error, where a device has one of the known silent errors.

Each takes the name of a device and returns a tensor. Inputs are made on the CPU and moved, because a seed gives other
numbers on MPS, and most are small whole numbers, whose sums are exact in every precision and order. They are taken from
the issues that ``silent_bugs`` names, in the smallest shape that shows the error; none is known to end the process.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

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
