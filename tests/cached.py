"""Files to cache, and the functions that child processes of the cache's tests import and run."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from bootseer.blocks.index import Index
from bootseer.blocks.writer import BlockWriter
from bootseer.cache.cache import Cache
from bootseer.cache.cached_file import CachedFile
from bootseer.cache.disk import CacheFull, MissingBlocks
from store_doubles import MemoryStore

BLOCK = 4096
BOOT = "boot"
# In memory if possible: the killed processes sync thousands of times.
SCRATCH = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
processes = multiprocessing.get_context("forkserver")
# pytest as well: each child imports the main module again.
processes.set_forkserver_preload(["cached", "pytest"])


def content(num_blocks: int, seed: int = 1, *, zeros: bool = True) -> bytes:
    """Random bytes: `num_blocks` blocks and 100 bytes; every fifth block is zeros."""
    rng = random.Random(seed)
    blocks = [bytes(BLOCK) if zeros and number % 5 == 3 else rng.randbytes(BLOCK) for number in range(num_blocks)]
    return b"".join(blocks) + rng.randbytes(100)


def index_of(data: bytes) -> Index:
    store = MemoryStore("cached")
    with BlockWriter(store, block_size=BLOCK, threads=1) as writer:
        writer.write(data)
        block_file = writer.finish()
    return Index.parse(b"".join(store.read(block_file.index_name)))


def block_of(data: bytes, block: int) -> bytes:
    return data[block * BLOCK : (block + 1) * BLOCK]


def put(cached: CachedFile, data: bytes, blocks=None) -> None:
    for block in range(cached.index.num_blocks) if blocks is None else blocks:
        cached.put(block, block_of(data, block))


def fetch(cached: CachedFile, data: bytes, offset: int, length: int) -> bytes:
    """Read like a daemon: fetch what is missing, and read again."""
    for _ in range(3):
        try:
            return cached.read(offset, length)
        except MissingBlocks as missing:
            put(cached, data, missing.blocks)
    raise AssertionError("blocks that were put are still missing")


@contextlib.contextmanager
def before(call: str, action) -> Iterator[None]:
    """Run an action just before this thread's first call of the built-in function `call`."""

    def look(_frame, event, function):
        if event == "c_call" and function.__name__ == call:
            sys.setprofile(None)
            action()

    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(None)


# The functions of children. Each takes the end of a pipe as its first argument and sends its results to it.


def share(pipe, root: Path, seed: int, num_blocks: int) -> None:
    """Fill a file together with others, each block once. Sends the blocks that it put itself."""
    data = content(num_blocks, seed)
    index = index_of(data)
    pipe.send("ready")
    pipe.recv()
    cached = Cache(root, boot=BOOT).open(index)
    own, left = [], set(range(index.num_blocks))
    deadline = time.monotonic() + 120
    while left and time.monotonic() < deadline:
        for block in sorted(left):
            if cached.ready(block):
                left.discard(block)
            elif cached.claim(block):
                cached.put(block, block_of(data, block))
                cached.release(block)
                own.append(block)
    assert fetch(cached, data, 0, len(data)) == data
    cached.sync()
    cached.close()
    pipe.send(own)


def hold(pipe, root: Path, seed: int, num_blocks: int, block: int | None) -> None:
    """Hold a lease, and a claim on one block, until a message arrives."""
    cached = Cache(root, boot=BOOT).open(index_of(content(num_blocks, seed)))
    pipe.send(block is None or cached.claim(block))
    pipe.recv()


def churn(pipe, root: Path, seeds: list[int], num_blocks: int, rounds: int) -> None:
    """Open, fill, read and prune at random."""
    files = {seed: content(num_blocks, seed) for seed in seeds}
    indexes = {seed: index_of(data) for seed, data in files.items()}
    rng = random.Random(os.getpid())
    cache = Cache(root, boot=BOOT)
    for _ in range(rounds):
        seed = rng.choice(seeds)
        cached = cache.open(indexes[seed])
        for _ in range(3):
            offset = rng.randrange(len(files[seed]))
            length = rng.randrange(1, 4 * BLOCK)
            assert fetch(cached, files[seed], offset, length) == files[seed][offset : offset + length]
        if rng.random() < 0.5:
            cached.sync()
        cached.close()
        if rng.random() < 0.3:
            cache.prune(rng.choice([0, 20_000]))
    pipe.send("done")


def limited(pipe, root: Path, num_blocks: int, limit: int) -> None:
    """Put blocks while no file may grow beyond `limit` bytes. Sends which could be put."""
    data = content(num_blocks, zeros=False)
    cached = Cache(root, boot=BOOT).open(index_of(data))
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    done, full = [], []
    for block in range(cached.index.num_blocks):
        try:
            cached.put(block, block_of(data, block))
            done.append(block)
        except CacheFull:
            full.append(block)
    pipe.send((done, full, [block for block in range(cached.index.num_blocks) if cached.ready(block)]))


def kill_everywhere(pipe, name: str, before: list[str], scratch: Path) -> None:
    """Run one of `SCENARIOS` repeatedly, each time killed one system call later, until it completes.

    Sends the folders in which it was killed. Runs in forks of this process: a new process would take far longer.
    """
    index = index_of(FILE)
    roots = []
    while True:
        root = scratch / str(len(roots))
        for each in before:
            SCENARIOS[each](root, index)
        pid = os.fork()
        if pid == 0:
            _run_and_die(name, root, index, len(roots))
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if status != -signal.SIGKILL:
            pipe.send((status, roots))
            return
        roots.append(root)


# A process killed before one of these calls leaves the same state as one killed before its next call of another kind.
_CHANGE_NOTHING = frozenset(
    """
    close dup2 fspath fstat fstatvfs getcwd geteuid getpid listdir lstat major minor pread scandir stat urandom
    """.split()  # noqa: SIM905
)


def _run_and_die(name: str, root: Path, index: Index, fatal: int) -> None:
    """Die just before the system call of this number, counting only those that may change something, or exit with 0."""
    calls = 0

    def count(_frame, event, function) -> None:
        nonlocal calls
        if event == "c_call" and function.__module__ in ("posix", "fcntl") and function.__name__ not in _CHANGE_NOTHING:
            if calls == fatal:
                os.kill(os.getpid(), signal.SIGKILL)
            calls += 1

    status = 1
    try:
        sys.setprofile(count)
        SCENARIOS[name](root, index)
        sys.setprofile(None)
        status = 0
    finally:
        os._exit(status)


FILE = content(12)


def _create_and_put(root: Path, index: Index) -> None:
    cached = Cache(root, boot=BOOT).open(index)
    put(cached, FILE, [0, 1, 5])
    cached.sync()
    cached.close()


def _complete(root: Path, index: Index) -> None:
    cached = Cache(root, boot=BOOT).open(index)
    cached.claim(7)
    put(cached, FILE)
    cached.release(7)
    cached.sync()
    cached.close()


def _new_boot(root: Path, index: Index) -> None:
    cached = Cache(root, boot="another boot").open(index)
    cached.verify_all()
    cached.close()


def _prune(root: Path, index: Index) -> None:
    Cache(root, boot=BOOT).prune(0)


SCENARIOS = {
    "create and put": _create_and_put,
    "complete": _complete,
    "new boot": _new_boot,
    "prune": _prune,
}


class Child:
    """A process that runs one of these functions; it is killed at the end of the `with` block."""

    def __init__(self, target, *arguments) -> None:
        self.pipe, other = processes.Pipe()
        self.process = processes.Process(target=target, args=(other, *arguments))
        self.process.start()
        other.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join(60)
        self.pipe.close()
        self.process.close()

    def receive(self):
        """Its next message; raises `EOFError` when it is dead."""
        assert self.pipe.poll(180), "no message from the child"
        return self.pipe.recv()

    def send(self, word: str = "go") -> None:
        self.pipe.send(word)

    def kill(self) -> None:
        self.process.kill()
        self.process.join(60)
