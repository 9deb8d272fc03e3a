"""`StripedWriter`: saves DCP checkpoints in striped files on HDFS, in buckets or in a folder, without a mount.

It writes the files that PyTorch's `FileSystemWriter` writes, so that PyTorch loads them through a mount. Differences:
an error in a thread fails the save instead of leaving an incomplete checkpoint; `.metadata` is published last and
whole; and when a checkpoint is overwritten, its metadata is removed first, so that old metadata never lies beside new
data.

The output of `torch.save` is recorded by reference (`RecordedFile`): the elements of tensors are not copied, and a
failed part of a striped file is sent again from there.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import threading
import warnings
from bisect import bisect_right
from collections.abc import Generator, Sequence
from concurrent.futures import as_completed
from contextlib import contextmanager
from dataclasses import replace
from typing import IO, TYPE_CHECKING, Any, cast

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint._extension import StreamTransformExtension
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemBase
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from bootseer.checkpoint.dcp.saved import METADATA
from bootseer.checkpoint.latest import LATEST, move_latest
from bootseer.checkpoint.layout import CHUNK_BYTES
from bootseer.checkpoint.locations import FOLDERS, is_uri, resolve
from bootseer.checkpoint.tensors import is_plain, memory_of
from bootseer.checkpoint.writing.writing import FileWriter
from bootseer.errors import NotFoundError, PermanentError, UsageError
from bootseer.io.tasks import Tasks
from bootseer.places.place import exists

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class AppendStream(io.RawIOBase):
    """Appends to a `FileWriter`. Closing it has no effect: the caller commits or aborts the writer."""

    def __init__(self, writer: FileWriter) -> None:
        super().__init__()
        self._writer = writer

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._writer.size_bytes

    def write(self, data: ReadableBuffer, /) -> int:
        view = memoryview(data).cast("B")
        self._writer.write_at(self._writer.size_bytes, view)
        return len(view)


Path = str | os.PathLike[str]


class StripedFileSystem(FileSystemBase):
    """Paths are URIs."""

    @contextmanager
    def create_stream(self, path: Path, mode: str) -> Generator[io.IOBase, None, None]:
        """A new file, published when the block ends without an error."""
        if mode != "wb":
            raise PermanentError(f"{path}: this opens files to be written only, not {mode!r}")
        target = resolve(path)
        writer = target.system.writing.open(target.path, mode=target.system.mode(0o666))
        try:
            yield AppendStream(writer)
        except BaseException:
            writer.abort()
            raise
        writer.commit()

    def concat_path(self, path: Path, suffix: str) -> str:
        return f"{os.fspath(path).rstrip('/')}/{suffix}"

    def rename(self, path: Path, new_path: Path) -> None:
        source, target = resolve(path), resolve(new_path)
        source.system.files.rename(source.path, target.path)

    def init_path(self, path: Path) -> str:
        """The address of a checkpoint."""
        return os.fspath(path)

    def mkdir(self, path: Path) -> None:
        target = resolve(path)
        target.system.files.make_folder(target.path, mode=target.system.mode(0o777), parents=True)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Path) -> bool:
        """Whether checkpoints can be written there."""
        return is_uri(os.fspath(checkpoint_id))

    def exists(self, path: Path) -> bool:
        target = resolve(path)
        return exists(target.system.files.stat, target.path)

    def rm_file(self, path: Path) -> None:
        target = resolve(path)
        target.system.files.remove(target.path)


_MIN_BYTES = 1 << 16
"""Records other than elements are shorter."""
_COMPARED_BYTES = 4096


class RecordedFile(io.RawIOBase):
    """A file that is written once and then read by many threads."""

    def __init__(self) -> None:
        super().__init__()
        self.size_bytes = 0
        self._starts: list[int] = []
        self._pieces: list[memoryview] = []
        self._saved: memoryview | None = None

    def save(self, tensor: torch.Tensor, to: IO[bytes]) -> None:
        """`torch.save` to `to`, which writes to this file. The tensor must not change before the last read."""
        if tensor.nbytes < _MIN_BYTES or not is_plain(tensor):  # it makes forty writes of a few bytes
            whole = io.BytesIO()
            torch.save(tensor, whole)
            to.write(whole.getbuffer())
            return
        self._saved = memory_of(tensor)
        try:
            torch.save(tensor, to)
        finally:
            self._saved = None

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.size_bytes

    def write(self, data: ReadableBuffer, /) -> int:
        view = memoryview(data).cast("B")
        if view:
            self._starts.append(self.size_bytes)
            self._pieces.append(self._kept(view))
            self.size_bytes += len(view)
        return len(view)

    def replay(self, offset: int, length: int) -> bytes:
        """Read written bytes. Safe from many threads after the last write."""
        pieces = []
        number = bisect_right(self._starts, offset) - 1
        while length:
            begin = offset - self._starts[number]
            piece = self._pieces[number][begin : begin + length]
            pieces.append(piece)
            offset += len(piece)
            length -= len(piece)
            number += 1
        return b"".join(pieces)

    def _kept(self, view: memoryview) -> memoryview:
        """A stable view of the bytes: the tensor being saved, or a copy."""
        saved = self._saved
        if (
            saved is not None
            and len(view) == len(saved) >= _MIN_BYTES
            and view[:_COMPARED_BYTES] == saved[:_COMPARED_BYTES]
            and view[-_COMPARED_BYTES:] == saved[-_COMPARED_BYTES:]
        ):
            return saved
        return memoryview(bytes(view))


_MAX_COPIED_BYTES = 256 << 20
"""Memory per file for tensors that must be copied to be saved."""


class _PlannerData:
    """The data that a planner saves. Planners are not thread-safe: calls are serialized."""

    def __init__(self, planner: SavePlanner) -> None:
        self.planner = planner
        self.has_failed = False
        self._lock = threading.Lock()

    def check(self) -> None:
        """Raise if the save has failed: a file that is published later could replace that of the next try."""
        if self.has_failed:
            raise PermanentError("another file of the checkpoint could not be written")

    def __getitem__(self, item: WriteItem) -> Any:
        self.check()
        with self._lock:
            data = self.planner.resolve_data(item)
        return data.detach() if isinstance(data, torch.Tensor) else data


class StripedWriter(filesystem.FileSystemWriter):
    """Writes the checkpoint into a folder: `hdfs://namenode/job/step-8`, `file:///…`, or a path.

    Without `uri`, `dcp.save(checkpoint_id=…)` says which. `thread_count` files of each rank are written at once;
    `overwrite=False` refuses to replace a checkpoint. With `move_latest` the file `latest` beside the folder names the
    checkpoint once it is complete. The other arguments are those of PyTorch's `FileSystemWriter`.
    """

    def __init__(
        self,
        uri: Path | None = None,
        *,
        single_file_per_rank: bool = True,
        thread_count: int = 2,
        cache_staged_state_dict: bool = False,
        overwrite: bool = True,
        move_latest: bool = False,
        extensions: Sequence[StreamTransformExtension] = (),
    ) -> None:
        super().__init__(
            ".",
            single_file_per_rank=single_file_per_rank,
            thread_count=thread_count,
            cache_staged_state_dict=cache_staged_state_dict,
            overwrite=overwrite,
            _extensions=extensions,
        )
        self._striped = self.fs = StripedFileSystem()  # type: ignore[assignment] # as its other subclasses do
        self.path = ""
        self._move_latest = move_latest
        self.reset(uri)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Called by DCP before the plan."""
        if not self.path:
            raise UsageError("the writer has no checkpoint", hint="StripedWriter(URI), or dcp.save(checkpoint_id=URI)")
        if os.fspath(self.path).rstrip("/").rpartition("/")[2] == LATEST and (self._move_latest or self._is_file()):
            raise UsageError(
                f"{self.path}: this is the file `latest`, not a checkpoint",
                hint="save under a name of its own, with move_latest=True",
            )
        if not kwargs.get("use_collectives", True):
            raise UsageError(f"{self.path}: use_collectives=False is not supported", hint="leave it out")
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Runs once, before any rank writes: an older checkpoint in the folder ceases to be one."""
        metadata = self._metadata_uri()
        if self.fs.exists(metadata):
            self.fs.rm_file(metadata)
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's files. Raises the first error."""
        prefix = plan.storage_data.prefix
        if self.single_file_per_rank:
            groups = [group for group in _by_size(plan.items, self.thread_count) if group]
        else:
            groups = [[item] for item in plan.items]
        files = [f"{prefix}{number}{filesystem.DEFAULT_SUFFIX}" for number in range(len(groups))]
        objects = _PlannerData(planner)
        with Tasks("bootseer-dcp", self.thread_count) as threads:
            written = [threads.submit(self._write, objects, *one) for one in zip(files, groups, strict=True)]
            try:
                for one in as_completed(written):
                    one.result()
            except BaseException:
                objects.has_failed = True
                raise
        future: Future[list[WriteResult]] = Future()
        future.set_result([result for one in written for result in one.result()])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Publish the checkpoint: all its files are written."""
        metadata.version = filesystem.CURRENT_DCP_VERSION
        metadata.storage_data = {one.index: one.storage_data for of_rank in results for one in of_rank}
        metadata.storage_meta = self.storage_meta()
        target = resolve(self._metadata_uri())
        policy = target.system.files.policy(target.path.rpartition("/")[0])
        if target.root != FOLDERS:
            # Read by all ranks of all nodes. Only striped files have digests, and can be shared between nodes.
            policy = replace(policy, min_bytes_per_stripe=CHUNK_BYTES)
        data, mode = pickle.dumps(metadata), target.system.mode(0o666)
        target.system.writing.write_file(
            target.path, len(data), lambda offset, length: data[offset : offset + length], mode=mode, policy=policy
        )
        if self._move_latest:
            folder, _, name = resolve(self.path).path.rpartition("/")
            named = move_latest(target.system.files, folder, name)
            if named != name:
                problem = f"`latest` still names {named}, which is later than {name}; `bootseer ckpt latest` sets it"
                warnings.warn(problem, stacklevel=2)

    def _write(self, objects: _PlannerData, file: str, items: Sequence[WriteItem]) -> list[WriteResult]:
        target = resolve(self._striped.concat_path(self.path, file))
        if not self._can_replay(items, objects):
            with self._striped.create_stream(target.uri, "wb") as stream:
                return [self._write_item(cast(AppendStream, stream), item, file, objects) for item in items]
        recorded = RecordedFile()
        results = [self._write_item(recorded, item, file, objects) for item in items]

        def read(offset: int, length: int) -> bytes:
            objects.check()
            return recorded.replay(offset, length)

        mode = target.system.mode(0o666)
        target.system.writing.write_file(target.path, recorded.size_bytes, read, mode=mode)
        return results

    def _can_replay(self, items: Sequence[WriteItem], objects: _PlannerData) -> bool:
        """Whether the file can be replayed from memory with few copies: then nothing is spooled to the local disk.

        Custom planners may create each tensor when it is requested: those are written one after the other.
        """
        kind = type(objects.planner)
        if self.transforms.extensions or not (
            kind.resolve_data is DefaultSavePlanner.resolve_data
            and kind.lookup_object is DefaultSavePlanner.lookup_object  # type: ignore[attr-defined]
            and kind.transform_object is DefaultSavePlanner.transform_object  # type: ignore[attr-defined]
        ):
            return False
        copied = 0
        for item in items:
            if item.type != WriteItemType.BYTE_IO:
                tensor = cast(torch.Tensor, objects[item])
                copied += 0 if _is_as_saved(tensor) else tensor.nbytes
        return copied <= _MAX_COPIED_BYTES

    def _write_item(
        self, stream: RecordedFile | AppendStream, item: WriteItem, file: str, objects: _PlannerData
    ) -> WriteResult:
        data = objects[item]
        begin = stream.tell()
        to, descriptors = self.transforms.transform_save_stream(item, stream)
        if isinstance(data, torch.Tensor):
            tensor = data.cpu()
            if not _is_as_saved(tensor):
                tensor = tensor.clone(memory_format=torch.contiguous_format)
            if isinstance(stream, RecordedFile):
                stream.save(tensor, to)
            else:
                torch.save(tensor, to)
        else:
            to.write(data.getbuffer())
        to.close()
        length = stream.tell() - begin
        place = filesystem._StorageInfo(file, begin, length, transform_descriptors=descriptors or None)
        return WriteResult(index=item.index, size_in_bytes=length, storage_data=place)

    def _is_file(self) -> bool:
        folder = resolve(self.path)
        try:
            return not folder.system.files.stat(folder.path).is_folder
        except NotFoundError:
            return False

    def _metadata_uri(self) -> str:
        return self._striped.concat_path(self.path, METADATA)


def _is_as_saved(tensor: torch.Tensor) -> bool:
    """Whether `torch.save` writes exactly the tensor's memory: a view would be saved with all of its base."""
    return is_plain(tensor) and tensor.untyped_storage().size() == tensor.nbytes


def _by_size(items: Sequence[WriteItem], num_groups: int) -> list[list[WriteItem]]:
    groups: list[list[WriteItem]] = [[] for _ in range(num_groups)]
    sizes = [0] * num_groups
    for item in sorted(items, key=_size, reverse=True):
        smallest = sizes.index(min(sizes))
        groups[smallest].append(item)
        sizes[smallest] += _size(item)
    return groups


def _size(item: WriteItem) -> int:
    if item.tensor_data is None:
        return 1
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize
