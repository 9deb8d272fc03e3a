"""A decoder-only transformer whose feed-forward layers are mixtures of experts, over bytes.

The experts of each layer are divided among the ranks (expert parallelism); everything else is on each rank.
"""

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from einops import rearrange
from errors import JobError
from parallel import exchange, exchange_counts
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

VOCABULARY = 256
BYTES_PER_PARAMETER = 12
"""In a checkpoint: the weight and Adam's two moments, float32 each."""


@dataclass(frozen=True)
class Shape:
    """Sizes of the model; a checkpoint can be resumed only by a model of the same shape."""

    layers: int
    hidden: int
    heads: int
    experts: int
    top_k: int
    sequence: int
    expert_hidden: int = 0

    def sized_for(self, checkpoint_mb: int) -> "Shape":
        """The same shape with wider experts, so that a checkpoint has about `checkpoint_mb` MB (10^6 bytes)."""
        ends = (2 * VOCABULARY + self.sequence + 2) * self.hidden
        layer = (4 * self.hidden + self.experts + 4) * self.hidden
        dense = ends + self.layers * layer
        per_unit = self.layers * self.experts * 2 * self.hidden
        width = round((checkpoint_mb * 1e6 / BYTES_PER_PARAMETER - dense) / per_unit)
        if width < 1:
            least = (dense + per_unit) * BYTES_PER_PARAMETER / 1e6
            raise JobError(f"--checkpoint-mb {checkpoint_mb} is too small: with these sizes at least {least:.0f} MB")
        return replace(self, expert_hidden=width)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.hidden, 3 * shape.hidden, bias=False)
        self.out = nn.Linear(shape.hidden, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = rearrange(self.qkv(x), "b s (three h d) -> three b h s d", three=3, h=self.heads)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(rearrange(mixed, "b h s d -> b s (h d)"))


class Experts(nn.Module):
    """Top-k routed experts; `balance` holds the load-balancing loss of the last forward pass.

    The loss is that of the Switch Transformer: num_experts x sum over experts of (share of tokens x mean
    probability). It is 1 when all experts get the same load.
    """

    def __init__(self, shape: Shape, rank: int, world: int) -> None:
        super().__init__()
        self.num_experts, self.top_k = shape.experts, shape.top_k
        self.local = range(rank * shape.experts // world, (rank + 1) * shape.experts // world)
        self.world = world
        self.router = nn.Linear(shape.hidden, shape.experts, bias=False)
        self.w_in = nn.Parameter(torch.empty(len(self.local), shape.hidden, shape.expert_hidden))
        self.w_out = nn.Parameter(torch.empty(len(self.local), shape.expert_hidden, shape.hidden))
        self.balance = torch.zeros(())

    def reset_experts(self, seed: int) -> None:
        """Each expert's weights depend on the seed and its number, not on which rank holds it."""
        for place, expert in enumerate(self.local):
            generator = torch.Generator().manual_seed(seed * 1_000_003 + expert)
            for weights in (self.w_in[place], self.w_out[place]):
                weights.normal_(std=weights.shape[0] ** -0.5, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        tokens = rearrange(x, "b s h -> (b s) h")
        probability = self.router(tokens).softmax(-1)
        weight, expert = probability.topk(self.top_k)
        weight = (weight / weight.sum(-1, keepdim=True)).flatten()
        order = expert.flatten().argsort(stable=True)
        source = order // self.top_k
        counts = expert.flatten().bincount(minlength=self.num_experts)
        self.balance = self.num_experts * (counts / counts.sum() * probability.mean(0)).sum()

        answers = self._ask(tokens.index_select(0, source), counts.view(self.world, -1))
        result = torch.zeros_like(tokens).index_add(0, source, answers * weight[order, None])
        return result.view_as(x)

    def _ask(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Outputs of the experts for `rows`, which are sorted by expert; `counts[rank, expert of that rank]`."""
        theirs = exchange_counts(counts)
        sent, received = counts.sum(1).tolist(), theirs.sum(1).tolist()
        rows = exchange(rows, sent, received)
        # Rows arrive by rank, then by expert; each expert needs its rows of all ranks in one tensor.
        asked = torch.arange(len(self.local)).repeat(self.world).repeat_interleave(theirs.flatten())
        order = asked.argsort(stable=True)
        pieces = rows.index_select(0, order).split(theirs.sum(0).tolist())
        answers = torch.cat(
            [gelu(piece @ w_in) @ w_out for piece, w_in, w_out in zip(pieces, self.w_in, self.w_out, strict=True)]
        )
        return exchange(answers.index_select(0, order.argsort()), received, sent)


class Block(nn.Module):
    def __init__(self, shape: Shape, rank: int, world: int) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(shape.hidden)
        self.attention = Attention(shape)
        self.norm_experts = nn.LayerNorm(shape.hidden)
        self.experts = Experts(shape, rank, world)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_attention(x))
        return x + self.experts(self.norm_experts(x))


class Model(nn.Module):
    """Returns the logits of the next byte."""

    def __init__(self, shape: Shape, rank: int, world: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, shape.hidden)
        self.position = nn.Embedding(shape.sequence, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape, rank, world) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def balance(self) -> Tensor:
        """Mean load-balancing loss of the layers in the last forward pass."""
        return torch.stack([block.experts.balance for block in self.blocks]).mean()

    def is_expert(self, name: str) -> bool:
        """Whether this parameter is divided among the ranks."""
        return name.endswith((".w_in", ".w_out"))


def build(shape: Shape, seed: int) -> Model:
    """A fresh model: its dense part is equal on all ranks, its experts are this rank's share."""
    torch.manual_seed(seed)
    model = Model(shape, dist.get_rank(), dist.get_world_size())
    with torch.no_grad():
        for number, block in enumerate(model.blocks):
            block.experts.reset_experts(seed + 7919 * (number + 1))
    return model
