"""What a mount daemon serves in real life: block files, from the node's cache and their origins.

`fetched` describes it as the `open` of a `DaemonSpec`; everything is made inside the daemon, because neither leases
nor connections survive a fork.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bootseer.blocks.index import Index
from bootseer.cache.cache import Cache, CacheSettings
from bootseer.cache.file import CachedFile
from bootseer.errors import BootseerError
from bootseer.fetch.fetcher import Fetcher
from bootseer.fetch.hotset import Found
from bootseer.fetch.record import RecordWriter
from bootseer.fetch.settings import FetchSettings
from bootseer.fuse.filesystem import Tree
from bootseer.fuse.session import showing
from bootseer.mounts.daemon import open_peers
from bootseer.mounts.serve import OnError, Served
from bootseer.mounts.trees import LazyFile, LazyFiles
from bootseer.store.open import open_store
from bootseer.store.store import Store

_SYNC_S = 30.0
"""A crash of the machine costs at most the blocks of so many seconds; they are fetched again."""
_START_S = 900.0
"""A start of which nothing is heard is over by then."""
Hot = Callable[[], Iterable[tuple[str, int]]]
"""Which blocks earlier startups needed: identity of the file and block, the earliest first."""
MakeTree = Callable[[Fetcher, Sequence[LazyFile], OnError], Tree]


@dataclass(frozen=True, slots=True)
class FetchedFile:
    """One block file to serve."""

    name: str
    """Under which it is shown."""
    index: Index
    origin: str
    """URI of the store that has its stripes."""
    plain_http: bool = False


@dataclass(frozen=True, slots=True)
class Fetched:
    """What to serve and how; calling it opens everything. The callables run in the daemon."""

    files: tuple[FetchedFile, ...]
    cache_root: Path
    cache: CacheSettings | None = None
    fetch: FetchSettings | None = None
    record: Path | None = None
    """Where to write the record of this startup; the file must not exist."""
    hand_over: Callable[[Path], None] | None = None
    """Gets the finished record."""
    hot: Hot | None = None
    """Asked once the mount answers; it may take its time."""
    rest: bool = True
    """Whether to fetch what was not asked for, when readers are silent."""
    make_tree: MakeTree = LazyFiles

    def __call__(self, on_error: OnError) -> Served:
        """Open cache, origins and fetcher. Raises what they raise."""
        source = _OpenFiles(self, on_error)
        try:
            shown = [LazyFile(file.name, file.index.size_bytes, number) for number, file in enumerate(self.files)]
            tree = self.make_tree(source.fetcher, shown, on_error)
        except BaseException:
            source.close()
            raise
        return Served(
            source,
            showing(tree),
            source.recorder,
            source.status,
            source.begin,
            began=source.began.set,
            stop_prefetch=source.stop_prefetch,
        )


class _OpenFiles:
    """A fetcher with its cached files and origins."""

    def __init__(self, fetched: Fetched, on_error: OnError) -> None:
        self._what = fetched
        self._on_error = on_error
        self._closed = threading.Event()
        self._stopped = threading.Event()
        self.began = threading.Event()
        self._identities = [file.index.identity for file in fetched.files]
        self._cached: list[CachedFile] = []
        self._stores: dict[tuple[str, bool], Store] = {}
        self.recorder: RecordWriter | None = None
        if fetched.record is not None:
            hand_over = fetched.hand_over or (lambda path: None)
            self.recorder = RecordWriter(fetched.record, started_s=time.time(), hand_over=hand_over)
        self._peers = open_peers(on_error)
        self.fetcher = Fetcher(fetched.fetch, on_need=self._need if self.recorder else None, on_problem=on_error)
        try:
            cache = Cache(fetched.cache_root, fetched.cache)
            for file in fetched.files:
                place = (file.origin, file.plain_http)
                if place not in self._stores:
                    self._stores[place] = open_store(file.origin, plain_http=file.plain_http)
                self._cached.append(cache.open(file.index))
                peers = None
                if self._peers is not None:
                    peers = self._peers.file(file.index, *place, fetched.cache_root)
                self.fetcher.add(file.index, self._stores[place], self._cached[-1], peers=peers)
        except BaseException:
            self.close()
            raise

    def begin(self) -> None:
        """Prefetch what earlier startups needed, then the rest; make durable what has come, until the end."""
        wanted: list[tuple[int, int]] = []
        if self._what.hot is not None:
            numbers = {identity: number for number, identity in enumerate(self._identities)}
            wanted = [(numbers[identity], block) for identity, block in self._what.hot() if identity in numbers]
            self.fetcher.prefetch(wanted)
        # Until training begins the rest would take its links from what the start waits for: its own checkpoint, other
        # nodes' images. Two nodes behind one slow link took 145 s instead of 63, eight without a record ten minutes.
        if self.recorder is None:
            self.began.set()
        over_s = time.monotonic() + _START_S
        while not self.began.wait(_SYNC_S) and time.monotonic() < over_s:
            self._sync()
        if self._what.rest and not self._stopped.is_set():
            self.fetcher.stream_rest()
        while not self._closed.wait(_SYNC_S):
            self._sync()

    def stop_prefetch(self) -> None:
        """Fetch nothing more that no reader asks for."""
        self._stopped.set()
        self.began.set()
        self.fetcher.stop_prefetch()

    def status(self) -> dict[str, object]:
        stats = asdict(self.fetcher.stats())
        for key in ("bytes_by_purpose", "requests_by_purpose"):
            stats[key] = {purpose.name.lower(): count for purpose, count in stats[key].items()}
        files = [
            {
                "name": file.name,
                "identity": file.index.identity,
                "ready_blocks": cached.num_ready,
                "blocks": file.index.num_blocks,
            }
            for file, cached in zip(self._what.files, self._cached, strict=True)
        ]
        return {"files": files, "fetch": stats}

    def close(self) -> None:
        """End all work, keep what has come. The recorder stays open: its record is handed over later."""
        self._closed.set()
        self._stopped.set()
        self.began.set()
        self.fetcher.close()
        if self._peers is not None:
            self._peers.close()
        self._sync()
        for cached in self._cached:
            cached.close()
        for store in self._stores.values():
            store.close()

    def _need(self, file: int, block: int, found: Found) -> None:
        if self.recorder is not None:
            self.recorder.need(self._identities[file], block, found)

    def _sync(self) -> None:
        for cached in self._cached:
            try:
                cached.sync()
            except BootseerError as error:
                self._on_error(str(error))
