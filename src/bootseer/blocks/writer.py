"""Turn a stream of bytes into a block file in a store.

Blocks are compressed and digested in a few threads and stored in their order by the thread that writes, which owns all
state here. The objects are the same, bit for bit, whatever the number of threads and however the bytes were cut into
`write` calls. The blocks become visible before the index that points to them, so a writer that dies at any point leaves
no index that can be read. They are in one object, a single stripe; the segments of striped checkpoints have several.
"""

from __future__ import annotations

import contextlib
import os
import threading
from array import array
from collections import deque
from concurrent.futures import Future
from typing import Self

from bootseer.blocks.block_file import BlockFile
from bootseer.blocks.codec import DEFAULT_LEVEL, Buffer, Encoded, compressor_of, encode
from bootseer.blocks.index import MAX_BLOCKS, Index, encode_index, is_block_size
from bootseer.errors import BootseerError, PermanentError, UsageError
from bootseer.io.tasks import Tasks
from bootseer.store.store import Store, Stored, Upload, is_content_name

DEFAULT_BLOCK_SIZE = 256 * 1024
_EMPTY = Stored("sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855", 0)
_BATCH_BYTES = 1 << 20
"""Size of a thread's job. Each job wakes a thread that waits for the interpreter's lock, and the waking thread often
loses its processor while it holds that lock: with a job per block, conversions took a twentieth more processor time."""
_BATCHES_PER_THREAD = 2


class BlockWriter:
    """Writes one block file. Use it as a context manager, or call `abort` when `finish` is not reached.

    With `head_bytes` the first bytes of the file are given to `finish`, because they are known only at its end: what is
    written begins after them. An error of the store, or a call after the end, leaves the writer aborted.
    """

    def __init__(
        self,
        store: Store,
        *,
        block_size: int = DEFAULT_BLOCK_SIZE,
        level: int = DEFAULT_LEVEL,
        head_bytes: int = 0,
        threads: int | None = None,
    ) -> None:
        if not is_block_size(block_size):
            raise UsageError(f"blocks of {block_size} bytes", hint="use a power of two from 4 KiB to 16 MiB")
        if not 0 <= head_bytes <= block_size:
            raise UsageError(f"a head of {head_bytes} bytes", hint=f"it must fit into a block of {block_size}")
        threads = threads or min(len(os.sched_getaffinity(0)), 8)
        self._store = store
        self._block_size = block_size
        self._level = level
        self._head_bytes = head_bytes
        self._upload: Upload | None = None
        self._stored_bytes = 0
        self._size_bytes = head_bytes
        self._parts: list[Buffer] = [bytes(head_bytes)]  # of the block that is being filled
        self._filled = head_bytes
        self._kept_back: bytes | None = None  # block 0 while its head is unknown
        self._offsets = array("Q")
        self._lengths = array("Q")
        self._codecs = bytearray()
        self._digests = bytearray()
        self._num_blocks = 0
        self._batch: list[bytes] = []  # blocks that no thread has yet
        self._max_batch = max(1, _BATCH_BYTES // block_size)
        self._max_in_flight = threads * _BATCHES_PER_THREAD
        self._in_flight: deque[Future[list[Encoded]]] = deque()
        self._per_thread = threading.local()
        self._pool = Tasks("bootseer-encode", threads)
        self._open = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()

    @property
    def size_bytes(self) -> int:
        """Bytes of the file so far, its head included: the offset of what is written next."""
        return self._size_bytes

    def write(self, data: Buffer) -> None:
        """Append to the file. Blocks while the store is slower than the caller. Raises what the store raises."""
        self._check_open()
        try:
            rest = memoryview(data).cast("B")
            self._size_bytes += rest.nbytes
            while rest.nbytes:
                taken = rest[: self._block_size - self._filled]
                rest = rest[len(taken) :]
                # Immutable data is kept without a copy, unless it would keep much more memory alive.
                is_kept = isinstance(taken.obj, bytes) and 4 * len(taken) >= len(taken.obj)
                self._parts.append(taken if is_kept else bytes(taken))
                self._filled += len(taken)
                if self._filled == self._block_size:
                    self._end_block()
        except BaseException:
            self.abort()
            raise

    def finish(self, head: bytes = b"") -> BlockFile:
        """Store what is left, then the index. The file can be read when this returns. Raises what the store raises."""
        self._check_open()
        try:
            if len(head) != self._head_bytes:
                raise UsageError(f"a head of {len(head)} bytes", hint=f"{self._head_bytes} were announced")
            if self._filled:
                self._end_block()
            if self._batch:
                self._submit()
            while self._in_flight:
                self._store_oldest()
            if self._kept_back is not None:
                self._store_first(head + self._kept_back[self._head_bytes :])
            return self._store_index()
        finally:
            self.abort()

    def abort(self) -> None:
        """Stop, and drop what is not visible yet. Safe to call at any time, also after `finish`.

        Blocks that became visible before a failure stay: their content name may be another file's too.
        """
        self._open = False
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._in_flight.clear()
        upload, self._upload = self._upload, None
        if upload is not None:
            with contextlib.suppress(BootseerError):  # the first error matters more
                upload.abort()

    def _check_open(self) -> None:
        if not self._open:
            raise PermanentError("this block file was finished or given up before")

    def _end_block(self) -> None:
        data = b"".join(self._parts)
        self._parts, self._filled = [], 0
        if self._num_blocks >= MAX_BLOCKS:
            raise PermanentError(f"a file of more than {MAX_BLOCKS} blocks of {self._block_size} bytes")
        self._num_blocks += 1
        if self._head_bytes and self._kept_back is None:
            self._kept_back = data
            self._record((0, b"", bytes(32)))  # holds its place in the columns
            return
        self._batch.append(data)
        if len(self._batch) == self._max_batch:
            self._submit()

    def _submit(self) -> None:
        """Have the batch encoded, and store what is ready."""
        self._in_flight.append(self._pool.submit(self._encode, self._batch))
        self._batch = []
        # The store takes blocks in their order, as they are ready; the caller waits only when the pool is full.
        while self._in_flight and (self._in_flight[0].done() or len(self._in_flight) >= self._max_in_flight):
            self._store_oldest()

    def _encode(self, batch: list[bytes]) -> list[Encoded]:
        # A compressor per thread: one per block would cost a tenth more.
        if not hasattr(self._per_thread, "compressor"):
            self._per_thread.compressor = compressor_of(self._level)
        return encode(batch, self._per_thread.compressor)

    def _store_oldest(self) -> None:
        for encoded in self._in_flight.popleft().result():
            self._record(encoded, self._append(encoded[1]))

    def _store_first(self, data: bytes) -> None:
        ((codec, stored, digest),) = self._encode([data])
        self._offsets[0] = self._append(stored)
        self._lengths[0] = len(stored)
        self._codecs[0] = codec
        self._digests[:32] = digest

    def _record(self, encoded: Encoded, offset: int = 0) -> None:
        codec, stored, digest = encoded
        self._offsets.append(offset)
        self._lengths.append(len(stored))
        self._codecs.append(codec)
        self._digests += digest

    def _append(self, stored: bytes | memoryview) -> int:
        """Add stored bytes; returns their offset."""
        if not stored:
            return 0
        if self._upload is None:
            self._upload = self._store.upload()
        self._upload.write(stored)
        offset = self._stored_bytes
        self._stored_bytes += len(stored)
        return offset

    def _store_index(self) -> BlockFile:
        stripes = (_EMPTY if self._upload is None else self._commit(self._upload, self._stored_bytes),)
        data = encode_index(
            block_size=self._block_size,
            size_bytes=self._size_bytes,
            stripes=stripes,
            offsets=self._offsets,
            lengths=self._lengths,
            codecs=self._codecs,
            digests=self._digests,
        )
        index = Index.parse(data)  # what readers would refuse must not be stored
        upload = self._store.upload()
        try:
            upload.write(data)
            stored = self._commit(upload, len(data))
        finally:
            upload.abort()
        return BlockFile(stored.name, len(data), index.identity, index.size_bytes, self._stored_bytes, stripes)

    def _commit(self, upload: Upload, size_bytes: int) -> Stored:
        stored = upload.commit()
        if not is_content_name(stored.name) or stored.size_bytes != size_bytes:
            raise PermanentError(
                f"{self._store.uri}: {stored.size_bytes} bytes stored as {stored.name!r}, {size_bytes} written"
            )
        return stored
