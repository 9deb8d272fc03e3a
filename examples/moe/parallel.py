"""The communication of the ranks during training: tokens to experts, and gradients.

Dense parameters are the same on all ranks, so their gradients are averaged. Expert parameters exist on one rank only:
the backward pass of the exchange has already summed the gradients of all ranks' tokens, so the sum is only divided by
the number of ranks.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn


class _Exchange(torch.autograd.Function):
    """all_to_all of rows; its gradient is the same exchange in the other direction."""

    @staticmethod
    def forward(ctx, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        ctx.sent, ctx.received = sent, received
        return _all_to_all(rows, sent, received)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _all_to_all(gradient, ctx.received, ctx.sent), None, None


def _all_to_all(rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
    result = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(result, rows.contiguous(), received, sent)
    return result


def exchange(rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
    """Send the first `sent[0]` rows to rank 0, the next `sent[1]` to rank 1, ...; rows come back in rank order."""
    return _Exchange.apply(rows, sent, received)


def exchange_counts(counts: Tensor) -> Tensor:
    """Row r of the result is rank r's row for this rank."""
    result = torch.empty_like(counts)
    dist.all_to_all_single(result, counts.contiguous())
    return result


def average_gradients(dense: Iterable[nn.Parameter], experts: Iterable[nn.Parameter]) -> None:
    """Convert each rank's gradients to those of the mean loss over all ranks, with one collective."""
    world = dist.get_world_size()
    gradients = [parameter.grad for parameter in dense if parameter.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    flat /= world
    for gradient, mean in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(mean.view_as(gradient))
    for parameter in experts:
        if parameter.grad is not None:
            parameter.grad /= world
