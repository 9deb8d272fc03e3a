"""Convert an image: each layer becomes an EROFS image in a block file, and a document lists them.

Layers are converted in parallel, bottom first. The document is stored last, so that every image in the catalog is
complete; after an interruption, the next conversion reuses the finished layers. If the store is the registry
repository of the source image, the document is attached to that image as a referrer.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from concurrent.futures import CancelledError as FutureCancelledError
from contextlib import closing
from functools import lru_cache, partial

from bootseer.artifact.objects import read_index
from bootseer.artifact.progress import ProgressCallback
from bootseer.blocks.block_file import BlockFile
from bootseer.blocks.codec import decode
from bootseer.blocks.index import Index
from bootseer.erofs.merged import Layer, MergedLayers
from bootseer.erofs.reader import ErofsReader, Read
from bootseer.erofs.writer import ROOT
from bootseer.errors import CorruptError
from bootseer.image.catalog import images_in
from bootseer.image.conversion.layer import CancelledError, ConvertOptions, LayerJob, write_erofs
from bootseer.image.conversion.layer_document import ConvertedLayer, stack_digest
from bootseer.image.document import ImageDocument, LayerFile
from bootseer.image.sources.folder import write_folder
from bootseer.image.sources.manifest import folder_digest
from bootseer.image.sources.source import ImageSource
from bootseer.io.memory import keep_freed_memory
from bootseer.io.retry import retrying
from bootseer.io.tasks import Tasks
from bootseer.store.store import Store

_MAX_JOBS = 8
_THREADS_PER_JOB = 4
"""Limits the layers that wait for lower ones: they are no jobs meanwhile, but each keeps an upload open."""
_LEAVE_S = 5.0
"""How long to wait for cancelled layers: each ends at its next piece of data, or at its source's deadline."""
_KEPT_BYTES = 16 << 20
_BLOCK_TIMEOUT_S = 60.0


def convert(
    source: ImageSource,
    store: Store,
    *,
    progress: ProgressCallback = lambda done, total: None,
    jobs: int | None = None,
    options: ConvertOptions | None = None,
) -> ImageDocument:
    """Convert the image of `source` into `store`, and publish its document there.

    `progress` gets bytes of the source. `jobs` is the number of layers converted at once (default: two per processor,
    at most eight). Layers already in the store are reused; with signing keys in `options`, only signed ones. Raises
    `CorruptError`, `PermanentError` and the store's errors; then nothing was published under the image's name.
    """
    keep_freed_memory()
    options = options or ConvertOptions()
    if (folder := source.folder) is not None:
        file, _ = write_erofs(store, options, lambda out: write_folder(out, folder, lambda done: progress(done, 0)))
        progress(file.size_bytes, file.size_bytes)
        digest = folder_digest(source.config, file.identity)  # of the result
        document = ImageDocument(digest, b"", source.config_data, (LayerFile("", "", file),))
    else:
        # A layer's thread often waits, for its source or the store's disk. With one layer per processor a third of
        # two processors was idle.
        jobs = jobs or min(_MAX_JOBS, 2 * len(os.sched_getaffinity(0)))
        layers = _Conversion(source, store, options, progress, jobs).run()
        assembled = _assemble(source, store, options, layers)
        document = ImageDocument(source.digest, source.manifest, source.config_data, assembled)
    subject = source.digest if source.location and source.location == store.uri else None
    images_in(store, signatures=options.signatures).publish(document, replace=True, subject=subject)
    return document


class _Conversion:
    """The conversion of all layers of one image."""

    def __init__(
        self, source: ImageSource, store: Store, options: ConvertOptions, progress: ProgressCallback, jobs: int
    ) -> None:
        self._source = source
        self._store = store
        self._options = options
        self._progress = progress
        self._done = [0] * len(source.layers)
        self._progress_lock = threading.Lock()
        self._results: list[Future[ConvertedLayer]] = []
        self._num_threads = _THREADS_PER_JOB * jobs
        self._working = threading.Semaphore(jobs)
        """Held by the threads that do not wait for lower layers."""
        self._stop = threading.Event()
        self._open = lru_cache(maxsize=None)(partial(open_layer, store))

    def run(self) -> list[ConvertedLayer]:
        # Layers start bottom first. A thread that waits for lower layers therefore waits for running threads only;
        # waiting for queued ones could deadlock.
        with Tasks("bootseer-convert", self._num_threads, leave_s=_LEAVE_S) as pool:
            try:
                for number in range(len(self._source.layers)):
                    self._results.append(pool.submit(self._run_layer, number))
                # No deadline here: requests to registries and stores have deadlines, the rest is computation.
                wait(self._results, return_when=FIRST_EXCEPTION)
                for result in self._results:  # the lowest layer that failed by itself, not by cancellation
                    error = result.exception() if result.done() and not result.cancelled() else None
                    if error is not None and not isinstance(error, CancelledError):
                        raise error
                return [result.result() for result in self._results]
            except BaseException:
                self._stop.set()
                raise

    def _run_layer(self, number: int) -> ConvertedLayer:
        layer = self._source.layers[number]

        def progress(done: int) -> None:
            if self._stop.is_set():
                raise CancelledError(f"{self._source.name}: cancelled")
            with self._progress_lock:
                self._done[number] = done
                self._progress(sum(self._done), sum(each.size_bytes for each in self._source.layers))

        where = f"{self._source.name}, layer {number + 1} of {len(self._source.layers)}"
        lower = (lambda: self._lower(number)) if number else None
        below = stack_digest([each.diff_id for each in self._source.layers[:number]])
        with self._working:
            progress(0)
            return LayerJob(layer, self._store, self._options, where, below, lower, progress).run()

    def _lower(self, number: int) -> MergedLayers:
        """Wait for the layers below layer `number`; those below the uppermost opaque one are left out."""
        self._working.release()
        try:
            converted = [result.result() for result in self._results[:number]]
        except (Exception, FutureCancelledError) as error:
            raise CancelledError(f"{self._source.name}: a lower layer failed") from error
        finally:
            self._working.acquire()
        first = max((place for place, layer in enumerate(converted) if layer.opaque), default=0)
        return MergedLayers([Layer(self._open(layer.file), layer.file.identity) for layer in converted[first:]])


def _assemble(
    source: ImageSource, store: Store, options: ConvertOptions, layers: Sequence[ConvertedLayer]
) -> tuple[LayerFile, ...]:
    """The layers to mount: from the uppermost opaque one upwards, plus one for the root directory if needed."""
    first = max((place for place, layer in enumerate(layers) if layer.opaque), default=0)
    files = [
        LayerFile(origin.digest, origin.diff_id, layer.file)
        for origin, layer in zip(source.layers[first:], layers[first:], strict=True)
    ]
    root = next((layer.root for layer in reversed(layers) if layer.root is not None), None)
    if root is not None and layers[-1].root is None:
        # Overlayfs shows the root attributes of the uppermost layer, and few layers have an entry for the root.
        # Copying them from lower layers, as for other directories, would make almost every layer depend on those below
        # and be converted again in each image. Instead, a layer of 8 KiB with only the root directory is put on top.
        files.append(LayerFile("", "", write_erofs(store, options, lambda writer: writer.tree.update(ROOT, root))[0]))
    return tuple(files)


def block_reader(store: Store, index: Index) -> Read:
    """A function that reads ranges of the file that `index` describes: exactly as many bytes as asked for. It verifies
    every block, and raises `CorruptError` (damaged, or outside the file) and the store's errors. For metadata, or one
    pass over a file: mounted images use `fetch` and `cache`. Safe for many threads."""
    # Two threads that miss one block both fetch it.
    block = lru_cache(max(2, _KEPT_BYTES // index.block_size))(partial(_read_block, store, index))

    def read(offset: int, length: int) -> bytes:
        if offset < 0 or length < 0 or offset + length > index.size_bytes:
            raise CorruptError(f"{store.uri}: bytes {offset} to {offset + length} lie outside their file")
        numbers = index.blocks_of(offset, length)
        begin = offset - numbers.start * index.block_size
        return b"".join(map(block, numbers))[begin : begin + length]

    return read


def _read_block(store: Store, index: Index, number: int) -> bytes:
    place = index.place(number)
    name = index.stripes[place.stripe].name

    def fetch(left_s: float) -> bytes:
        with closing(store.read(name, place.offset, place.length, timeout_s=min(left_s, _BLOCK_TIMEOUT_S))) as pieces:
            return b"".join(pieces)

    stored = retrying(fetch, deadline_s=2 * _BLOCK_TIMEOUT_S) if place.length else b""
    try:
        return bytes(decode(place.codec, stored, index.length(number), index.digest(number)))
    except CorruptError as error:
        raise CorruptError(f"{store.uri}: block {number} of {name}: {error}") from error


def open_layer(store: Store, file: BlockFile) -> ErofsReader:
    """The EROFS image in a block file; blocks are read from the store on demand. Raises the store's errors."""
    return ErofsReader(block_reader(store, read_index(store, file)))
