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
from bootseer.blocks.index import Index, encode_index
from bootseer.blocks.writer import BlockWriter
from bootseer.cache.cache import Cache
from bootseer.fetch.fetcher import Fetcher
from bootseer.store.open import open_store
from bootseer.store.store import Store, Stored
from store_doubles import Fault, FaultyStore

BLOCK = 4096


def content(num_blocks: int, seed: int = 1) -> bytes:
    """Noise, zeros, text and noise in turn, and 100 additional bytes."""
    rng = random.Random(seed)
    kinds = (rng.randbytes, bytes, lambda size: b"%07d " % rng.randrange(10**7) * (size // 8), rng.randbytes)
    return b"".join(kinds[number % 4](BLOCK) for number in range(num_blocks)) + rng.randbytes(100)


def written(store: Store, data: bytes, num_stripes: int = 1) -> BlockFile:
    with BlockWriter(store, block_size=BLOCK, threads=1) as writer:
        writer.write(data)
        block_file = writer.finish()
    return block_file if num_stripes == 1 else _in_stripes(store, block_file, num_stripes)


def _in_stripes(store: Store, block_file: BlockFile, num_stripes: int) -> BlockFile:
    """The same blocks in several stripes, which the format allows but `BlockWriter` does not write."""
    index = read_index(store, block_file)
    stored = b"".join(store.read(block_file.stripes[0].name))
    places = [index.place(block) for block in range(index.num_blocks)]
    contents = [b""] * num_stripes
    offsets = []
    for block, place in enumerate(places):
        stripe = block % num_stripes
        offsets.append(len(contents[stripe]))
        contents[stripe] += stored[place.offset : place.offset + place.length]
    stripes = tuple(Stored(_put(store, one), len(one)) for one in contents)
    data = encode_index(
        block_size=BLOCK,
        size_bytes=index.size_bytes,
        stripes=stripes,
        offsets=offsets,
        lengths=[place.length for place in places],
        codecs=index.codecs(),
        digests=b"".join(map(index.digest, range(index.num_blocks))),
    )
    identity = Index.parse(data).identity
    return BlockFile(_put(store, data), len(data), identity, index.size_bytes, block_file.stored_bytes, stripes)


def _put(store: Store, data: bytes) -> str:
    upload = store.upload()
    upload.write(data)
    return upload.commit().name


def stored(store: Store, data: bytes, num_stripes: int = 1) -> Index:
    return read_index(store, written(store, data, num_stripes))


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
