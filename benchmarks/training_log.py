"""A training log of any length: a short startup, then only lines without events.

The lines are of the kinds that training programs print for days: iterations, metrics as dicts, warnings of libraries,
messages of data loaders and NCCL, paths, numbers. Like real ones, some contain a word that a parser looks for. The same
count and seed give the same bytes. Used by `scan_foreign`.
"""

from __future__ import annotations

import random
from pathlib import Path

_POOL_LINES = 200_000
"""Distinct lines (about 19 MB). A longer log repeats them, at a distance beyond the window of any compressor."""
_NEAR_MISS_EVERY = 20_000
_STARTUP = (
    "2026-03-01 08:00:00,000 Collecting numpy\n"
    "2026-03-01 08:00:07,250 Installing collected packages: numpy\n"
    "2026-03-01 08:00:09,500 Successfully installed numpy-2.1.0\n"
)
_KINDS = {
    " iteration {step:8d}/ 500000 | elapsed (ms): {ms:.1f} | lm loss: {loss:.6E} | grad norm: {norm:.3f}\n": 30,
    "{clock} [rank{rank}] INFO trainer: step={step} loss={loss:.4f} lr={rate:.3e} tok/s={ms:.3f}k\n": 20,
    "{{'loss': {loss:.4f}, 'grad_norm': {norm:.6f}, 'learning_rate': {rate:.4e}, 'epoch': {norm:.2f}}}\n": 12,
    "{clock} DEBUG data.loader: opened shard /data/corpus/part-{rank:05d}.tar ({ms:.1f} MB, {step} samples)\n": 10,
    "node-{rank:04d}:1{rank:03d}:2{rank:03d} [{gpu}] NCCL INFO Channel 0{gpu}/0 : {gpu}[{rank:x}] -> {rank}[{step:x}]"
    " via P2P/IPC\n": 10,
    "/usr/lib/python3.11/site-packages/model/layers/attention.py:{rank}: UserWarning: mask is on cpu\n": 8,
    "memory | allocated {ms:.1f} MiB | reserved {ms:.3f} MiB | peak tokens {step}000 | user@cluster rank {rank}\n": 6,
    "[{clock}][I] {words} {step}\n": 4,
}
"""Kinds of lines, and the percentage of each."""
_WORDS = ("gradient", "expert", "router", "overflow", "token", "checkpoint", "stage", "replica", "batch", "queue")
_NEAR_MISSES = (
    "WARNING the optional flash attention package is missing on rank {0}, falling back to the slow kernel\n",
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


def write_words(path: Path, words: str, num_bytes: int) -> int:
    """Write a log of about this size with these words in every line; returns its size in bytes."""
    lines = (f"2026-03-01 08:00:00,123 rank {n} step {n * 7} loss 2.4{n} {words} of shard {n}\n" for n in range(512))
    many = "".join(lines).encode()
    with path.open("wb") as file:
        for _ in range(num_bytes // len(many) + 1):
            file.write(many)
    return path.stat().st_size


def _pool(count: int, rng: random.Random) -> list[str]:
    lines = [_line(number, rng) for number in range(count)]
    for number in range(_NEAR_MISS_EVERY // 2, count, _NEAR_MISS_EVERY):
        lines[number] = rng.choice(_NEAR_MISSES).format(rng.randrange(512), rng.uniform(1, 90))
    return lines


def _line(step: int, rng: random.Random) -> str:
    second, rank, ms, loss = step % 86_400, rng.randrange(512), rng.uniform(400, 900), rng.uniform(1.5, 9.0)
    clock = f"{second // 3600:02d}:{second // 60 % 60:02d}:{second % 60:02d},{rng.randrange(1000):03d}"
    (kind,) = rng.choices(list(_KINDS), list(_KINDS.values()))
    return kind.format(
        clock=f"2026-03-01 {clock}",
        step=step,
        rank=rank,
        gpu=rank % 8,
        ms=ms,
        loss=loss,
        norm=rng.uniform(0.1, 2.0),
        rate=rng.uniform(1e-5, 3e-4),
        words=" ".join(rng.choices(_WORDS, k=9)),
    )
