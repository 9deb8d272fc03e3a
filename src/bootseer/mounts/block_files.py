"""The content of a lazy mount's daemon: block files, read from the node's cache and their origins.

`BlockFileService` is the `open` of a `DaemonSpec`. It opens everything in the daemon, because cache leases and
connections do not survive a fork.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import asdict

from bootseer.blocks.index import Index
from bootseer.cache.cache import Cache
from bootseer.cache.cached_file import CachedFile
from bootseer.errors import BootseerError
from bootseer.fetch.fetcher import Fetcher
from bootseer.fetch.hotset import MAX_NEEDS, Block, Record
from bootseer.fuse.filesystem import Tree
from bootseer.fuse.session import Session, mount
from bootseer.mounts.daemon import open_peers
from bootseer.mounts.serve import OnError, Served
from bootseer.mounts.trees import LazyFiles
from bootseer.store.open import open_store
from bootseer.store.store import Store

_SYNC_S = 30.0
"""After a machine crash at most the blocks of this many seconds are fetched again."""
_START_S = 900.0
"""A startup whose end was not reported counts as ended after this time."""
MakeTree = Callable[[Fetcher, Sequence[Index]], Tree]


class Recorder:
    """Records the needs of one startup, from now until `end` or `close`. Safe for many threads.

    They are in memory until training has begun, and are then merged into a hot set. If the daemon is killed they are
    lost: half a startup would be taken for a whole one (ADR 36).
    """

    def __init__(self, on_finished: Callable[[Record], object], clock: Callable[[], float] = time.monotonic) -> None:
        """`on_finished` is called by `close`."""
        self._on_finished = on_finished
        self._clock = clock
        self._started_s = time.time()
        self._begin = clock()
        self._duration_ms: int | None = None
        self._needs: dict[Block, int] = {}
        self._lock = threading.Lock()

    def need(self, file: str, block: int) -> None:
        """A reader needed a block of the file with this identity."""
        with self._lock:
            if self._duration_ms is None and len(self._needs) < MAX_NEEDS:
                self._needs.setdefault((file, block), self._passed_ms())

    def end(self) -> None:
        """The startup is over (training has begun): ignore later needs."""
        with self._lock:
            if self._duration_ms is None:
                self._duration_ms = self._passed_ms()

    def close(self) -> None:
        """`end`, and hand the record over."""
        self.end()
        needs, self._needs = self._needs, {}  # the mount may last for weeks
        self._on_finished(Record(self._started_s, self._duration_ms or 0, needs))

    def _passed_ms(self) -> int:
        return int((self._clock() - self._begin) * 1000)


class BlockFileService(Struct, frozen=True):
    """The files to serve and how; a call opens everything. The callables run in the daemon."""

    files: tuple[Index, ...]
    """Each is shown under its identity."""
    store: str
    """URI of the store that holds their stripes."""
    cache_root: Path
    plain_http: bool = False
    on_record: Callable[[Record], object] | None = None
    """Called with the finished record of this startup; None: it is not recorded."""
    hot_blocks: Sequence[tuple[str, int]] = ()
    """The blocks that earlier startups needed, as file identity and block, the earliest first."""
    rest: bool = True
    """Whether to fetch the remaining blocks while readers are idle."""
    make_tree: MakeTree = LazyFiles

    def __call__(self, on_error: OnError) -> _OpenBlockFiles:
        """Open cache, origins and fetcher. Raises their errors."""
        return _OpenBlockFiles(self, on_error)


class _OpenBlockFiles(Served):
    """The fetcher, with its cached files and origins."""

    def __init__(self, spec: BlockFileService, on_error: OnError) -> None:
        self._spec = spec
        self._on_error = on_error
        self._closed = threading.Event()
        self._stopped = threading.Event()
        self._startup_over = threading.Event()
        self._cached: list[CachedFile] = []
        self._store: Store | None = None
        self._sync_errors: set[str] = set()
        self.recorder: Recorder | None = None
        if spec.on_record is not None:
            self.recorder = Recorder(spec.on_record)
        self._peers = open_peers(on_error)
        self.fetcher = Fetcher(on_need=self._record_need if self.recorder else None, on_problem=on_error)
        try:
            cache = Cache(spec.cache_root)
            self._store = open_store(spec.store, plain_http=spec.plain_http, mirrored=True)
            for index in spec.files:
                self._cached.append(cache.open(index))
                peers = None
                if self._peers is not None:
                    peers = self._peers.file(index, spec.store, spec.plain_http, spec.cache_root)
                self.fetcher.add(index, self._store, self._cached[-1], peers=peers)
            self._tree = spec.make_tree(self.fetcher, spec.files)
        except BaseException:
            self.close()
            raise

    def mount(self, target: Path, label: str, on_error: OnError, device: int | None) -> Session:
        return mount(self._tree, target, label, on_error, device)

    def run_background(self) -> None:
        """Prefetch the blocks of earlier startups, then the rest; sync the cache periodically until the end."""
        if self._spec.hot_blocks:
            numbers = {index.identity: number for number, index in enumerate(self._spec.files)}
            self.fetcher.prefetch(
                (numbers[identity], block) for identity, block in self._spec.hot_blocks if identity in numbers
            )
        # The rest waits until training begins, because it would take bandwidth from what startups wait for: this
        # node's checkpoint, other nodes' images. Two nodes behind one slow link took 145 s instead of 63, eight
        # without a record ten minutes.
        if self.recorder is None:
            self._startup_over.set()
        over_s = time.monotonic() + _START_S
        while not self._startup_over.wait(_SYNC_S) and time.monotonic() < over_s:
            self._sync()
        if self._spec.rest and not self._stopped.is_set():
            self.fetcher.stream_rest()
        while not self._closed.wait(_SYNC_S):
            self._sync()

    def end_startup(self) -> None:
        self._startup_over.set()

    def stop_prefetch(self) -> None:
        self._stopped.set()
        self._startup_over.set()
        self.fetcher.stop_prefetch()

    def status(self) -> dict[str, object]:
        stats = asdict(self.fetcher.stats())
        for key in ("bytes_by_purpose", "requests_by_purpose"):
            stats[key] = {purpose.name.lower(): count for purpose, count in stats[key].items()}
        stats["peers"] = self._peers.stats() if self._peers is not None else {}
        files = [
            {
                "identity": cached.index.identity,
                "ready_blocks": cached.num_ready,
                "blocks": cached.index.num_blocks,
            }
            for cached in self._cached
        ]
        return {"files": files, "fetch": stats}

    def close(self) -> None:
        """Stop all work and sync the cache. The recorder stays open: its record is handed over later."""
        self._closed.set()
        self._stopped.set()
        self._startup_over.set()
        self.fetcher.close()
        if self._peers is not None:
            self._peers.close()
        self._sync()
        for cached in self._cached:
            cached.close()
        if self._store is not None:
            self._store.close()

    def _record_need(self, file: int, block: int) -> None:
        if self.recorder is not None:
            self.recorder.need(self._spec.files[file].identity, block)

    def _sync(self) -> None:
        for cached in self._cached:
            try:
                cached.sync()
            except BootseerError as error:
                if str(error) not in self._sync_errors:  # the log of a mount that lasts weeks is in memory
                    self._sync_errors.add(str(error))
                    self._on_error(str(error))
