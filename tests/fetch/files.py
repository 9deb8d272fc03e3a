"""Block files for the fetcher's tests, and the program of their child processes."""

from __future__ import annotations

import hashlib
import json
import random
import sys
import threading
from pathlib import Path

import msgspec

from bootseer.artifact.objects import read_index
from bootseer.blocks.block_file import BlockFile
from bootseer.blocks.index import Index
from bootseer.blocks.writer import BlockWriter
from bootseer.cache.cache import Cache
from bootseer.fetch.fetcher import Fetcher
from bootseer.store.open import open_store
from bootseer.store.store import Store
from store_doubles import Fault, FaultyStore

BLOCK = 4096


def content(num_blocks: int, seed: int = 1) -> bytes:
    """Noise, zeros, text and noise in turn, and 100 additional bytes."""
    rng = random.Random(seed)
    kinds = (rng.randbytes, bytes, lambda size: b"%07d " % rng.randrange(10**7) * (size // 8), rng.randbytes)
    return b"".join(kinds[number % 4](BLOCK) for number in range(num_blocks)) + rng.randbytes(100)


def written(store: Store, data: bytes) -> BlockFile:
    with BlockWriter(store, block_size=BLOCK, threads=1) as writer:
        writer.write(data)
        return writer.finish()


def stored(store: Store, data: bytes) -> Index:
    return read_index(store, written(store, data))


def main(task: str, store: str, cache: str, description: str) -> None:
    """A process that fetches from the same cache as the test: `pull` all, or `hang` in the request for block 0."""
    origin = open_store(store)
    index = read_index(origin, msgspec.json.decode(description, type=BlockFile))
    never = threading.Event()

    def slowly(request: object) -> Fault:
        # Slow enough for two processes to meet in the middle of the file.
        sys.stdout.write("request\n")
        sys.stdout.flush()
        return Fault(gate=never) if task == "hang" else Fault(delay_s=0.02)

    faulty = FaultyStore(origin, slowly)
    cached = Cache(Path(cache)).open(index)
    fetcher = Fetcher()
    fetcher.add(index, faulty, cached)
    if task == "hang":
        fetcher.read_blocking(0, 0, 1, deadline_s=60)
    fetcher.pull_all()
    fetcher.close()
    whole = Path(cached.path).read_bytes()
    cached.close()

    sys.stdout.write(
        json.dumps({"sha256": hashlib.sha256(whole).hexdigest(), "bytes": sum(faulty.bytes_read.values())})
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
