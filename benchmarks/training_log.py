"""A training log of any length which says nothing of startups, and a short startup at its top.

The lines are of the kinds that training programs print for days: iterations, metrics as dicts, library warnings,
data-loader and NCCL chatter, paths, numbers. They hold no event and, as real ones do, now and then a word that a parser
looks for, so that the scan is neither spared nor flattered. The same count and seed give the same bytes.
Used by `scan_foreign`.
"""

from __future__ import annotations

import random
from pathlib import Path

_POOL_LINES = 200_000
"""Distinct lines (about 19 MB); a longer log repeats them, at a distance that no compressor's window spans."""
_NEAR_MISS_EVERY = 20_000
_STARTUP = (
    "2026-03-01 08:00:00,000 Collecting numpy\n"
    "2026-03-01 08:00:07,250 Installing collected packages: numpy\n"
    "2026-03-01 08:00:09,500 Successfully installed numpy-2.1.0\n"
)
_NEAR_MISSES = (
    "WARNING the ' package' argument of the dataset card is deprecated and ignored since release 4.41, rank {0}\n",
    "Successfully saved checkpoint shard {0} of 512 to the object store after {1:.1f} s, 3 retries\n",
)


def write(path: Path, num_lines: int, seed: int = 1) -> int:
    """Write the log; returns its size in bytes."""
    pool = _pool(min(_POOL_LINES, num_lines), random.Random(seed))
    chunks, rest = divmod(num_lines, len(pool))
    whole = "".join(pool).encode()
    with path.open("wb") as file:
        file.write(_STARTUP.encode())
        for _ in range(chunks):
            file.write(whole)
        file.write("".join(pool[:rest]).encode())
    return path.stat().st_size


def _pool(count: int, rng: random.Random) -> list[str]:
    lines = [_line(number, rng) for number in range(count)]
    for number in range(_NEAR_MISS_EVERY // 2, count, _NEAR_MISS_EVERY):
        lines[number] = rng.choice(_NEAR_MISSES).format(rng.randrange(512), rng.uniform(1, 90))
    return lines


def _line(step: int, rng: random.Random) -> str:
    second, rank = step % 86_400, rng.randrange(512)
    clock = f"2026-03-01 {second // 3600:02d}:{second // 60 % 60:02d}:{second % 60:02d},{rng.randrange(1000):03d}"
    loss, norm, ms = rng.uniform(1.5, 9.0), rng.uniform(0.1, 2.0), rng.uniform(400, 900)
    match rng.choices(range(8), (30, 20, 12, 10, 10, 8, 6, 4))[0]:
        case 0:
            return f" iteration {step:8d}/ 500000 | elapsed (ms): {ms:.1f} | lm loss: {loss:.6E} | grad norm: {norm:.3f}\n"
        case 1:
            return f"{clock} [rank{rank}] INFO trainer: step={step} loss={loss:.4f} lr={norm / 1e4:.3e} tok/s={ms * 91:.0f}\n"
        case 2:
            return f"{{'loss': {loss:.4f}, 'grad_norm': {norm:.6f}, 'learning_rate': {norm / 1e4:.4e}, 'epoch': {step / 9e4:.2f}}}\n"
        case 3:
            return f"{clock} DEBUG data.loader: opened shard /data/corpus/part-{rank:05d}.tar ({ms:.1f} MB, {step} samples)\n"
        case 4:
            return f"node-{rank:04d}:{1000 + rank}:{2000 + rank} [{rank % 8}] NCCL INFO Channel {rank % 16:02d}/0 : {rank % 8}[{rank:x}] -> {rank // 8}[{step:x}] via P2P/IPC\n"
        case 5:
            return f"/usr/lib/python3.11/site-packages/model/layers/attention.py:{rank}: UserWarning: mask is on cpu\n"
        case 6:
            return f"memory | allocated {ms:.1f} MiB | reserved {ms * 1.3:.1f} MiB | tokens {step * 4096} | user@cluster\n"
        case _:
            words = ("gradient", "expert", "router", "overflow", "token", "checkpoint", "stage", "replica", "batch", "queue")
            return f"[{clock}][I] {' '.join(rng.choice(words) for _ in range(9))} {step}\n"
