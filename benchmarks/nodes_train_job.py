"""One optimizer step from a checkpoint, on all nodes of a job: `nodes_train_job.py MODEL MEGABYTES FOLDER [--save]`.

torchrun starts it. MODEL is `moe` (the example job as it is, in the image), `dense` (a decoder-only transformer over
bytes) or `diffusion` (a small convolutional network that predicts the noise in an image). Each node prints `ready`, the
monotonic time, and the loss. With `--save` a new model does one step and is saved in FOLDER; MEGABYTES is the size of
the MoE's checkpoint.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.functional import cross_entropy, mse_loss, silu
from torch.nn.parallel import DistributedDataParallel

KINDS = ("moe", "dense", "diffusion")
STEP = "step-00000001"


class Dense(nn.Module):
    """Returns the mean loss of the next byte."""

    def __init__(self, width: int = 256, layers: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)

    def forward(self, seed: int) -> Tensor:
        tokens = torch.randint(256, (4, 65), generator=torch.Generator().manual_seed(seed))
        mask = nn.Transformer.generate_square_subsequent_mask(64)
        logits = self.head(self.layers(self.embed(tokens[:, :-1]), mask=mask, is_causal=True))
        return cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class Diffusion(nn.Module):
    """Returns the mean squared error of the predicted noise for images at random times."""

    def __init__(self, width: int = 160, blocks: int = 10) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(1, width), nn.SiLU(), nn.Linear(width, width))
        self.first, self.last = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.GroupNorm(8, width), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1))
            for _ in range(2 * blocks)
        )

    def forward(self, seed: int) -> Tensor:
        source = torch.Generator().manual_seed(seed)
        images, noise = (torch.randn(2, 3, 16, 16, generator=source) for _ in range(2))
        times = torch.rand(2, 1, generator=source)
        level = times[:, :, None, None]
        x = self.first(images * (1 - level) + noise * level) + self.time(times)[:, :, None, None]
        for block in self.blocks:
            x = x + block(x)
        return mse_loss(self.last(silu(x)), noise)


def ready(loss: float) -> None:
    print("ready", time.monotonic(), f"{loss:.4f}", flush=True)
    sys.stdin.readline()
    print("began", flush=True)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    loss = model(dist.get_rank())
    loss.backward()
    optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return float(mean) / dist.get_world_size()


def train(kind: str, folder: Path, *, save: bool) -> None:
    torch.manual_seed(1)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(Dense() if kind == "dense" else Diffusion())
    optimizer = torch.optim.AdamW(model.parameters())
    if save:
        step(model, optimizer)
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    if save:
        dcp.save(state, checkpoint_id=folder / STEP)
        (folder / "latest").write_text(f"{STEP}\n")
    else:
        dcp.load(state, checkpoint_id=folder / (folder / "latest").read_text().strip())
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        ready(step(model, optimizer))
    dist.destroy_process_group()
    # The model refers to the group. When the interpreter deletes both, torch 2.13 sometimes deadlocks: a thread
    # of gloo needs the lock of the interpreter, whose thread waits for it.
    sys.stdout.flush()
    os._exit(0)


def train_moe(folder: Path, megabytes: str) -> int:
    """The example's own program, with its first step marked."""
    sys.path.insert(0, "/app")
    import train as example

    first = example.train_step

    def marked(*arguments: object) -> tuple[float, float]:
        losses: tuple[float, float] = first(*arguments)
        ready(losses[0])
        return losses

    example.train_step = marked
    sys.argv = ["train.py", "--steps", "1", "--checkpoint-mb", megabytes, "--resume", str(folder)]
    sys.argv += ["--checkpoint-dir", "/tmp/checkpoints"]
    return int(example.main())


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "eth0")
    if sys.argv[1] == "moe":
        sys.exit(train_moe(Path(sys.argv[3]), sys.argv[2]))
    train(sys.argv[1], Path(sys.argv[3]), save="--save" in sys.argv)
