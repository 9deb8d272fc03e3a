"""Where hot lists of a mounted place are kept: in the place, for all nodes, and in this node's cache.

    <place>/.stripes-hot/<nodes>-<hash of the slot>.json      a file per slot of the job, replaced as a whole; of slots
                                                              with new names in each start the newest stay
    <cache>/checkpoints/<hash of address and slot>.json       the same on this node, for places that cannot be written

A list is a hint. Without one, or with a damaged one, a start is slower but correct, so that errors are logged and never
raised. Only places with a `latest` get lists: those are folders of jobs, which jobs write to. A folder that is mounted
to be read, such as that of a model, stays as it is.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from bootseer.checkpoint.head import STRIPES
from bootseer.checkpoint.hot_list import MAX_BYTES, Range, common, decode, encode
from bootseer.errors import BootseerError, NotFoundError
from bootseer.io.files import replace_file
from bootseer.mounts.serve import OnError
from bootseer.places.place import Entry, Place, join, make_folder_like_parent, name_of

HOT = f"{STRIPES}-hot"
"""A folder of its own: collectors of leftovers remove unknown folders in `.stripes`."""
_FOLDER = "checkpoints"
_MAX_LISTED = 20_000
_ONE_NODE = "1"
_STARTS_KEPT = 3
"""The place keeps at most so many lists for each node of a job."""


class HotLists:
    """The hot lists of one slot of a job. For one thread at a time."""

    has_latest = True
    """Whether `latest` names the checkpoint. Otherwise the place gets and has no lists."""

    def __init__(self, place: Place, slot: str, cache: Path | None, on_error: OnError) -> None:
        """`slot`: `<position> of <nodes>`, "" for the only node; `cache`: the cache's root."""
        self._place = place
        self._on_error = on_error
        self._num_nodes = slot.rpartition(" of ")[2] or _ONE_NODE
        self._name = f"{self._num_nodes}-{_hash(slot)}.json"
        key = _hash(f"{place.uri}\n{slot}")
        self._path = None if cache is None else cache / _FOLDER / f"{key}.json"
        self._published: list[Range] = []
        """What the place has for this slot."""
        self._own: list[Range] = []
        """What the place, or this node, has for this slot."""

    def load(self, checkpoint: str) -> list[Range]:
        """What this slot read in its last start, or what two other slots both read; empty if neither is known.

        `checkpoint`: the folder that will be read; "" without one.
        """
        if checkpoint and self.has_latest:
            self._published = self._in_place(self._name, checkpoint)
        self._own = self._published or self._on_node(checkpoint)
        return self._own or self._of_other_slots(checkpoint)

    def save(self, ranges: Sequence[Range], checkpoint: str, *, began: bool) -> None:
        """Keep what this start read. `began`: training began; a start that failed may have read only a part."""
        if not began and sum(one.length for one in common(ranges, self._own)) == sum(one.length for one in ranges):
            return
        data = encode(ranges, checkpoint)
        if self._path is not None:
            try:
                self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                replace_file(self._path, data)
            except OSError as error:  # often a full disk
                self._on_error(f"{self._path}: {error.strerror}; the hot list is not kept on this node")
        # Most starts of a job read the same, so that a thousand nodes write nothing.
        if not (checkpoint and self.has_latest) or sorted(ranges) == sorted(self._published):
            return
        try:
            make_folder_like_parent(self._place, HOT)
            self._place.write_bytes(join(HOT, self._name), data)
            if not self._published:
                self._delete_surplus()
        except BootseerError as error:
            self._on_error(f"the hot list stays on this node: {error}")

    def _on_node(self, checkpoint: str) -> list[Range]:
        path = self._path
        if path is None:
            return []
        with self._as_hint(f"{path}"), path.open("rb") as file:
            return decode(file.read(MAX_BYTES + 1), checkpoint)
        return []

    def _in_place(self, name: str, checkpoint: str) -> list[Range]:
        with self._as_hint(f"{self._place.uri}/{HOT}/{name}"):
            return decode(self._place.read_bytes(join(HOT, name), MAX_BYTES), checkpoint)
        return []

    @contextlib.contextmanager
    def _as_hint(self, where: str) -> Iterator[None]:
        """Only log errors of reading lists."""
        try:
            yield
        except (FileNotFoundError, NotFoundError):
            return
        except (OSError, BootseerError) as error:
            self._on_error(f"{where}: {error}; it is not used")

    def _delete_surplus(self) -> None:
        """Delete the oldest lists: where slots are named by pods, each start adds as many as it has nodes."""
        mine = [
            entry
            for entry in islice(self._place.list(HOT), _MAX_LISTED)
            if name_of(entry.path).startswith(f"{self._num_nodes}-")
        ]
        for entry in sorted(mine, key=lambda entry: entry.mtime_ns)[: -_STARTS_KEPT * int(self._num_nodes)]:
            with contextlib.suppress(NotFoundError):  # another node does the same
                self._place.delete(entry.path)

    def _of_other_slots(self, checkpoint: str) -> list[Range]:
        """What the two slots that were written last, of equally many nodes, both read.

        That is everything for replicas of a model, and `.metadata` and the tensors that all nodes hold for a sharded
        one. The list of a single slot would bring another node's shard to this node.
        """
        if not (checkpoint and self.has_latest) or self._num_nodes == _ONE_NODE:
            return []
        entries: list[Entry] = []
        with self._as_hint(f"{self._place.uri}/{HOT}"):
            entries += islice(self._place.list(HOT), _MAX_LISTED)
        newest: dict[str, str] = {}
        for entry in sorted(entries, key=lambda entry: entry.mtime_ns, reverse=True):
            name = name_of(entry.path)
            num_nodes = name.partition("-")[0]
            # Temporary files of writers have other names.
            if not num_nodes.isdecimal() or num_nodes == _ONE_NODE or entry.is_folder:
                continue
            if num_nodes in newest:
                return common(self._in_place(newest[num_nodes], checkpoint), self._in_place(name, checkpoint))
            newest[num_nodes] = name
        return []


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
