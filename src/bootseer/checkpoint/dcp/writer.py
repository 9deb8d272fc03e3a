"""`StripedWriter`: saves DCP checkpoints in striped files on HDFS or in a folder, without a mount.

What it writes is what PyTorch's `FileSystemWriter` writes, file for file, so that PyTorch loads it through a mount.
Different are: an error in a thread fails the save instead of leaving a checkpoint with holes; `.metadata` appears whole
and last; and the metadata of a checkpoint that is overwritten goes first, so that at no time old metadata lies beside
new data.

What `torch.save` writes is kept as it lies in memory (`Recorded`): the elements of tensors are not copied, and a part
of a striped file that fails is sent a second time from there.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import threading
from bisect import bisect_right
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import IO, TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint._extension import StreamTransformExtension
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemBase
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from bootseer.checkpoint.dcp.saved import metadata_name
from bootseer.checkpoint.latest import LATEST, move_latest
from bootseer.checkpoint.layout import CHUNK_BYTES
from bootseer.checkpoint.opened import FOLDERS, is_uri, opened
from bootseer.checkpoint.tensors import memory_of
from bootseer.checkpoint.writing.writing import FileWriter
from bootseer.errors import NotFoundError, PermanentError, UsageError
from bootseer.io.tasks import Tasks

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class Streamed(io.RawIOBase):
    """Appends to a `FileWriter`. Closing it ends nothing: the caller commits or drops the writer."""

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
        """A new file, which appears when the block ends without an error."""
        if mode != "wb":
            raise PermanentError(f"{path}: this opens files to be written only, not {mode!r}")
        target = opened(path)
        writer = target.system.writing.open(target.path)
        try:
            yield Streamed(writer)
        except BaseException:
            writer.abort()
            raise
        writer.commit()

    def concat_path(self, path: Path, suffix: str) -> str:
        return f"{os.fspath(path).rstrip('/')}/{suffix}"

    def rename(self, path: Path, new_path: Path) -> None:
        source, target = opened(path), opened(new_path)
        source.system.files.rename(source.path, target.path)

    def init_path(self, path: Path) -> str:
        """The address of a checkpoint, as it is used from now on."""
        return os.fspath(path)

    def mkdir(self, path: Path) -> None:
        target = opened(path)
        target.system.files.make_folder(target.path, parents=True)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Path) -> bool:
        """Whether checkpoints can be written there."""
        return is_uri(os.fspath(checkpoint_id))

    def exists(self, path: Path) -> bool:
        target = opened(path)
        try:
            target.system.files.stat(target.path)
        except NotFoundError:
            return False
        return True

    def rm_file(self, path: Path) -> None:
        target = opened(path)
        target.system.files.remove(target.path)


_MIN_BYTES = 1 << 16
"""No record but one of elements is so long."""
_COMPARED_BYTES = 4096


class Recorded(io.RawIOBase):
    """A file that is written once and then read, by many threads."""

    def __init__(self) -> None:
        super().__init__()
        self.size_bytes = 0
        self._starts: list[int] = []
        self._pieces: list[memoryview] = []
        self._saved: memoryview | None = None

    def save(self, tensor: torch.Tensor, to: IO[bytes]) -> None:
        """`torch.save` to `to`, which writes here. The tensor must not change before the last read."""
        if tensor.nbytes < _MIN_BYTES:  # it makes forty writes of a few bytes
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
        """These bytes, which must be there. Safe from many threads, once all is written."""
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
        """The same bytes, which stay: those of the tensor that is being saved, or a copy."""
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
"""Of one file, what may be held in memory because it does not lie there as it is saved."""


class _NewFile(NamedTuple):
    name: str
    items: Sequence[WriteItem]


class _Objects:
    """What a planner saves. Planners are not made for threads: they are asked by one at a time."""

    def __init__(self, planner: SavePlanner) -> None:
        self.planner = planner
        self._lock = threading.Lock()

    def __getitem__(self, item: WriteItem) -> Any:
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
                f"{self.path}: this is the pointer `latest`, not a checkpoint",
                hint="save under a name of its own, with move_latest=True",
            )
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Runs once, before any rank writes: from here on, what may be there is no checkpoint any more."""
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
        files = [_NewFile(f"{prefix}{number}{filesystem.DEFAULT_SUFFIX}", group) for number, group in enumerate(groups)]
        objects = _Objects(planner)
        with Tasks("bootseer-dcp", self.thread_count) as threads:
            results = [
                one for written in threads.map(lambda file: self._write(file, objects), files) for one in written
            ]
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Publish the checkpoint: all its files are there."""
        metadata.version = filesystem.CURRENT_DCP_VERSION
        metadata.storage_data = {one.index: one.storage_data for of_rank in results for one in of_rank}
        metadata.storage_meta = self.storage_meta()
        target = opened(self._metadata_uri())
        policy = target.system.files.policy(target.path.rpartition("/")[0])
        if target.root != FOLDERS:
            # All ranks of all nodes read it. Only striped files have digests, by which they can share it.
            policy = replace(policy, min_bytes_per_stripe=CHUNK_BYTES)
        data = pickle.dumps(metadata)
        target.system.writing.write_file(
            target.path, len(data), lambda offset, length: data[offset : offset + length], policy=policy
        )
        if self._move_latest:
            folder, _, name = opened(self.path).path.rpartition("/")
            move_latest(target.system.files, folder, name)

    def _write(self, file: _NewFile, objects: _Objects) -> list[WriteResult]:
        target = opened(self._striped.concat_path(self.path, file.name))
        if not self._can_replay(file.items, objects):
            with self._striped.create_stream(target.uri, "wb") as stream:
                return [self._write_item(cast(Streamed, stream), item, file.name, objects) for item in file.items]
        recorded = Recorded()
        results = [self._write_item(recorded, item, file.name, objects) for item in file.items]
        target.system.writing.write_file(target.path, recorded.size_bytes, recorded.replay)
        return results

    def _can_replay(self, items: Sequence[WriteItem], objects: _Objects) -> bool:
        """Whether the file lies in memory, all but little: then nothing is kept on the local disk until it is written.

        Planners of others may make each tensor anew when it is asked for: those are written one after the other.
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

    def _write_item(self, stream: Recorded | Streamed, item: WriteItem, file: str, objects: _Objects) -> WriteResult:
        data = objects[item]
        begin = stream.tell()
        to, descriptors = self.transforms.transform_save_stream(item, stream)
        if isinstance(data, torch.Tensor):
            tensor = data.cpu()
            if not _is_as_saved(tensor):
                tensor = tensor.clone(memory_format=torch.contiguous_format)
            if isinstance(stream, Recorded):
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
        folder = opened(self.path)
        try:
            return not folder.system.files.stat(folder.path).is_folder
        except NotFoundError:
            return False

    def _metadata_uri(self) -> str:
        return self._striped.concat_path(self.path, metadata_name(None if self.use_collectives else self.rank))


def _is_as_saved(tensor: torch.Tensor) -> bool:
    """Whether `torch.save` writes just what lies in memory: a view would drag along all that it is a view of."""
    return tensor.device.type == "cpu" and tensor.untyped_storage().size() == tensor.nbytes and tensor.is_contiguous()


def _by_size(items: Sequence[WriteItem], num_groups: int) -> list[list[WriteItem]]:
    """Groups of about the same size."""
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
