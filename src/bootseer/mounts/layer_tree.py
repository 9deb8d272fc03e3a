"""One layer's own file tree through FUSE, with its deletions and opaque folders as they are.

Nothing is merged here: an overlay in a user namespace lays it over folders of the machine, and reads the marks. Owners
that the reader's user namespace does not have would make files inaccessible, so that they are replaced.
Who calls: `fetched` as `make_tree`, through whoever mounts environments without root.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace

from bootseer.erofs.reader import Inode
from bootseer.errors import UsageError
from bootseer.fuse.filesystem import Attributes
from bootseer.mounts.files_tree import FilesTree
from bootseer.mounts.lazy import LazyFile, Source
from bootseer.mounts.user_namespace import num_owners


class LayerTree(FilesTree):
    """The tree of the only file of `files`."""

    def __init__(self, source: Source, files: Sequence[LazyFile], on_error: Callable[[str], None]) -> None:
        """Read the metadata, and wait for it. Raises `CorruptError` for what is no layer."""
        if len(files) != 1:
            raise UsageError(f"{len(files)} layers", hint="one is shown as it is; several are merged")
        super().__init__(source, files[0], on_error)
        self._num_owners = num_owners()
        self._owner, self._group = os.geteuid(), os.getegid()

    def _attributes_of(self, inode: Inode) -> Attributes:
        found = super()._attributes_of(inode)
        uid = found.uid if found.uid < self._num_owners else self._owner
        gid = found.gid if found.gid < self._num_owners else self._group
        return replace(found, uid=uid, gid=gid)
