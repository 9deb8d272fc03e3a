"""Train a small mixture-of-experts language model on CPU ranks; resumes from the latest checkpoint.

torchrun --standalone --nproc-per-node 2 examples/moe/train.py --steps 8
"""

import argparse
import logging
import os
import sys
import time
from pathlib import Path

import humanize
import psutil
import torch
import torch.distributed as dist
from checkpoint import latest, load, save
from data import Batches, read_text
from errors import JobError
from model import Model, Shape, build
from parallel import average_gradients
from torch.nn.functional import cross_entropy
from tqdm import tqdm

BALANCE_WEIGHT = 0.01
"""Weight of the load-balancing loss relative to the language loss, as in the Switch Transformer."""


def say(line: str) -> None:
    """One line of the log, from the first rank."""
    if dist.get_rank() == 0:
        tqdm.write(line, file=sys.stdout)
        sys.stdout.flush()


def train(arguments: argparse.Namespace) -> None:
    shape = Shape(
        layers=arguments.layers,
        hidden=arguments.hidden,
        heads=arguments.heads,
        experts=arguments.experts,
        top_k=arguments.top_k,
        sequence=arguments.sequence,
    ).sized_for(arguments.checkpoint_mb)
    world = dist.get_world_size()
    if shape.experts % world:
        dist.barrier()  # after it all ranks are connected, so the end of one cannot make the connect of another fail
        raise JobError(f"--experts {shape.experts} cannot be divided among {world} ranks")
    batches = Batches(
        read_text(arguments.text, arguments.text_mb * 1_000_000),
        sequence=shape.sequence,
        batch=arguments.batch,
        seed=arguments.seed,
        rank=dist.get_rank(),
        world=world,
    )
    check_memory(arguments.checkpoint_mb)
    model = build(shape, arguments.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr, betas=(0.9, 0.95))
    start = 0
    path = latest(arguments.resume or arguments.checkpoint_dir)
    if path is not None:
        began = time.monotonic()
        start = load(path, model, optimizer, shape)
        say(f"resumed {path} in {time.monotonic() - began:.1f} s")
    for step in tqdm(range(start, start + arguments.steps), disable=None if dist.get_rank() == 0 else True):
        began = time.monotonic()
        loss, balance = train_step(model, optimizer, *batches.at(step))
        tokens_per_s = world * arguments.batch * shape.sequence / (time.monotonic() - began)
        say(f"step {step + 1} loss {loss:.4f} balance {balance:.3f} tokens/s {tokens_per_s:.0f}")
    path = save(arguments.checkpoint_dir, start + arguments.steps, model, optimizer, shape)
    size = humanize.naturalsize(sum(file.stat().st_size for file in path.iterdir()))
    memory = humanize.naturalsize(psutil.Process().memory_info().rss)
    say(f"saved {path} ({size}); memory of rank 0: {memory}")


def train_step(
    model: Model, optimizer: torch.optim.Optimizer, tokens: torch.Tensor, following: torch.Tensor
) -> tuple[float, float]:
    """One optimizer step; returns the mean loss and load-balancing loss over the ranks."""
    optimizer.zero_grad()
    loss = cross_entropy(model(tokens).flatten(0, 1), following.flatten())
    balance = model.balance()
    (loss + BALANCE_WEIGHT * balance).backward()
    dense = [parameter for name, parameter in model.named_parameters() if not model.is_expert(name)]
    experts = [parameter for name, parameter in model.named_parameters() if model.is_expert(name)]
    average_gradients(dense, experts)
    optimizer.step()
    seen = torch.stack([loss.detach(), balance.detach()])
    dist.all_reduce(seen)
    mean_loss, mean_balance = (seen / dist.get_world_size()).tolist()
    return mean_loss, mean_balance


def check_memory(checkpoint_mb: int) -> None:
    """Fail if checkpoint and gradients of this machine's ranks do not fit into its memory."""
    share = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) / dist.get_world_size()
    needed = checkpoint_mb * 1e6 * share * 4 / 3
    available = psutil.virtual_memory().available
    if needed > available:
        raise JobError(
            f"--checkpoint-mb {checkpoint_mb} needs {humanize.naturalsize(needed)} of memory here and "
            f"{humanize.naturalsize(available)} are free; use a smaller one or more machines"
        )


def positive(text: str) -> int:
    """An argparse type: a positive integer."""
    if not text.isdecimal() or not 0 < int(text) < 2**31:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 1 to 2147483647")
    return int(text)


def seed(text: str) -> int:
    """An argparse type: a seed that all random generators used here accept."""
    if not text.isdecimal() or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 0 to 4294967295")
    return int(text)


def rate(text: str) -> float:
    """An argparse type: a learning rate."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0 and up to 1")
    return number


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=positive, default=8, help="optimizer steps of this run (default: %(default)s)")
    parser.add_argument("--checkpoint-dir", type=Path, default=Path("checkpoints"), metavar="DIR")
    parser.add_argument("--resume", type=Path, metavar="DIR", help="resume from here (default: --checkpoint-dir)")
    parser.add_argument(
        "--checkpoint-mb",
        type=positive,
        default=300,
        metavar="N",
        help="size of a whole checkpoint, weights and Adam state; makes the experts wider (default: %(default)s)",
    )
    parser.add_argument("--text", type=Path, metavar="PATH", help="train on this file (default: Python's own library)")
    parser.add_argument("--text-mb", type=positive, default=8, metavar="N", help="use that much of it")
    parser.add_argument("--layers", type=positive, default=8)
    parser.add_argument("--hidden", type=positive, default=256)
    parser.add_argument("--heads", type=positive, default=4)
    parser.add_argument("--experts", type=positive, default=16, help="of each layer, divided among the ranks")
    parser.add_argument("--top-k", type=positive, default=2, help="experts that each byte is sent to")
    parser.add_argument("--sequence", type=positive, default=128, help="bytes of one window")
    parser.add_argument("--batch", type=positive, default=8, help="windows of one step and rank")
    parser.add_argument("--lr", type=rate, default=1e-3)
    parser.add_argument("--seed", type=seed, default=1)
    result = parser.parse_args(arguments)
    if result.hidden % result.heads:
        parser.error(f"--hidden {result.hidden} cannot be divided among {result.heads} heads")
    if result.top_k > result.experts:
        parser.error(f"--top-k {result.top_k} is more than --experts {result.experts}")
    return result


def join() -> None:
    """Connect to the other ranks of torchrun; without torchrun this is the only rank."""
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def main() -> int:
    arguments = parse(sys.argv[1:])
    # torch.distributed.checkpoint also logs the exceptions that it raises, with tracebacks.
    logging.basicConfig(level=logging.ERROR)
    try:
        join()
    except (ValueError, RuntimeError) as error:  # DistError is a RuntimeError
        print(f"train.py: error: cannot join the other ranks: {error}", file=sys.stderr)
        return 1
    try:
        train(arguments)
    except JobError as error:
        if dist.get_rank() == 0:
            print(f"train.py: error: {error}", file=sys.stderr)
        return 1
    finally:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
