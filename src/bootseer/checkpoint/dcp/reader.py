"""`StripedReader`: loads DCP checkpoints, striped or not, from HDFS, buckets or a folder, without a mount.

Reads what PyTorch's `FileSystemReader` reads, and passes it to the planner in the same way. Errors are raised inside
DCP's exchange of results, so that all ranks end with a `CheckpointException` instead of waiting for a collective's
time-out.
"""

from __future__ import annotations

import os
import uuid
from dataclasses import replace
from typing import IO, Any, NamedTuple

from blake3 import blake3
from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from bootseer.checkpoint.dcp.items import Stored, stored_items
from bootseer.checkpoint.dcp.load import LoadSettings, load_all
from bootseer.checkpoint.dcp.saved import METADATA, metadata_content, parse_metadata
from bootseer.checkpoint.locations import Location, is_uri, resolve
from bootseer.errors import NotFoundError, TransientError, UsageError


class _MetadataFile(NamedTuple):
    version: str
    digest: str


class StripedReader(StorageReader):
    """Reads the checkpoint in a folder: `hdfs://namenode/job/step-8`, `file:///…`, or a path.

    Without `uri`, `dcp.load(checkpoint_id=…)` says which. `…/latest` is the checkpoint that `latest` beside it names.
    """

    def __init__(
        self,
        uri: str | os.PathLike[str] | None = None,
        *,
        settings: LoadSettings | None = None,
        extension_registry: ExtensionRegistry | None = None,
    ) -> None:
        super().__init__()
        self._settings = settings or LoadSettings()
        self._extensions = extension_registry or ExtensionRegistry()
        self._uri: str | None = None
        self._folder: Location | None = None
        self._metadata: Metadata | None = None
        self._read: _MetadataFile | None = None
        self.load_id = ""
        self.reset(uri)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Reset, to read `checkpoint_id` from now on if it is given."""
        self._folder = None
        self._metadata = None
        self._read = None
        self.load_id = str(uuid.uuid4())
        if checkpoint_id is not None:
            self._uri = os.fspath(checkpoint_id)

    # With `kwargs`, DCP would look for metadata of each rank when the common one cannot be read. Ranks that could read
    # that would wait for this one in collectives.
    def read_metadata(self) -> Metadata:
        """The checkpoint's metadata."""
        if self._uri is None:
            hint = "StripedReader(URI), or dcp.load(checkpoint_id=URI)"
            raise UsageError("the reader has no checkpoint", hint=hint)
        try:
            folder = self._folder = resolve(self._uri).latest()
            with folder.open(METADATA) as file:
                data = metadata_content(file, folder.at(METADATA).uri)
                self._read = _MetadataFile(file.version, blake3(data).hexdigest())
        except NotFoundError as error:
            raise NotFoundError(f"{self._uri}: no checkpoint of PyTorch's DCP: {error}") from error
        return parse_metadata(data, folder.at(METADATA).uri, self.load_id)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Called by DCP between reading the metadata and the plan."""
        self._metadata = metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Tells the coordinator which checkpoint this rank loads."""
        if self._folder is None or self._read is None:
            return plan
        uri = self._folder.uri
        return replace(plan, storage_data=((self._read.digest, uri.rpartition("/")[2]), uri))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Runs once. Raises `TransientError` if ranks have read different metadata: `latest` was moved, or the
        checkpoint replaced meanwhile. The paths by which ranks reach it may differ."""
        seen = dict(plan.storage_data for plan in plans if plan.storage_data is not None)
        if len(seen) > 1:
            named = " and ".join(sorted(seen.values()))
            raise TransientError(f"{self._uri}: ranks would load different checkpoints, {named}; load again")
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what the plan needs. Raises the first error; ends in any case, since reads have deadlines."""
        folder = self._folder
        if self._metadata is None or folder is None:
            raise UsageError("the reader has no checkpoint yet", hint="load with torch.distributed.checkpoint.load")
        items = stored_items(plan, self._metadata, self._metadata.storage_data, folder.uri)
        load_all(items, planner, folder.open, self._undo, self._settings, folder.system.reading.position)
        self._check_unchanged(folder)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _check_unchanged(self, folder: Location) -> None:
        """Files of two checkpoints, one written over the other, would fit together: same names, same sizes. Our writer,
        and every tool that replaces the folder, removes the metadata before writing new data."""
        if self._read is None:
            return
        try:
            with folder.open(METADATA) as file:
                if file.version == self._read.version:
                    return
        except NotFoundError:
            pass
        raise TransientError(f"{folder.uri}: the checkpoint was replaced or removed while it was loaded; load again")

    def _undo(self, item: Stored, stream: IO[bytes]) -> IO[bytes]:
        for extension in self._extensions.from_descriptor_list(item.descriptors):
            if isinstance(extension, StreamTransformExtension):
                stream = extension.transform_from(stream)
        return stream

    @property
    def checkpoint_id(self) -> str | None:
        return self._uri

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this names a place that can be read from."""
        return is_uri(os.fspath(checkpoint_id))
