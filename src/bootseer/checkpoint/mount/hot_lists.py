"""Where hot lists of a mounted place are kept: in the place, for all nodes.

    <place>/.stripes-hot/<nodes>-<hash of the slot>.json      a file per slot of the job, replaced as a whole; where
                                                              each start has new slots, the newest files stay

A list is a hint. Without one, or with a damaged one, a start is slower but correct, so that errors are logged and never
raised. Only places with checkpoints get lists: those are folders of jobs, which jobs write to. A folder that is mounted
to be read, such as that of a model, stays as it is.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from itertools import islice

from bootseer.checkpoint.head import STRIPES
from bootseer.checkpoint.hot_list import MAX_BYTES, Range, common, decode, encode
from bootseer.errors import BootseerError, CorruptError, NotFoundError
from bootseer.mounts.serve import OnError
from bootseer.places.place import Entry, Place, join, make_folder_like_parent, name_of

HOT = f"{STRIPES}-hot"
"""A folder of its own: collectors of leftovers remove unknown folders in `.stripes`."""
_MAX_LISTED = 20_000
_ONE_NODE = "1"
_STARTS_KEPT = 3
"""The place keeps at most so many lists for each node of a job."""


class HotLists:
    """The hot lists of one slot of a job. For one thread at a time."""

    def __init__(self, place: Place, slot: str, on_error: OnError) -> None:
        """`slot`: `<position> of <nodes>`, "" for the only node."""
        self._place = place
        self._on_error = on_error
        self._num_nodes = slot.rpartition(" of ")[2] or _ONE_NODE
        self._name = f"{self._num_nodes}-{hashlib.sha256(slot.encode()).hexdigest()[:32]}.json"
        self._published: list[Range] = []
        """What the place has for this slot."""

    def load(self, checkpoint: str) -> list[Range]:
        """What this slot read in its last start, or what two other slots both read; empty if neither is known.

        `checkpoint`: the folder that will be read; "" without one.
        """
        if not checkpoint:
            return []
        self._published = self._in_place(self._name, checkpoint)
        return self._published or self._of_other_slots(checkpoint)

    def save(self, ranges: Sequence[Range], checkpoint: str, *, began: bool) -> None:
        """Keep what this start read. `began`: training began; a start that failed may have read only a part."""
        # Most starts of a job read the same, so that a thousand nodes write nothing.
        if not checkpoint or sorted(ranges) == sorted(self._published):
            return
        try:
            self._published = []
            with contextlib.suppress(NotFoundError, CorruptError):  # another start may have replaced it
                self._published = self._read(self._name, checkpoint)
            known = common(ranges, self._published)
            if not began and sum(one.length for one in known) == sum(one.length for one in ranges):
                return
            make_folder_like_parent(self._place, HOT)
            self._place.write_bytes(join(HOT, self._name), encode(ranges, checkpoint))
            if not self._published:
                self._delete_surplus()
        except BootseerError as error:
            self._on_error(f"the hot list is not kept: {error}")

    def _in_place(self, name: str, checkpoint: str) -> list[Range]:
        with self._as_hint(f"{self._place.uri}/{HOT}/{name}"):
            return self._read(name, checkpoint)
        return []

    def _read(self, name: str, checkpoint: str) -> list[Range]:
        return decode(self._place.read_bytes(join(HOT, name), MAX_BYTES), checkpoint)

    @contextlib.contextmanager
    def _as_hint(self, where: str) -> Iterator[None]:
        """Only log errors of reading lists."""
        try:
            yield
        except NotFoundError:
            return
        except BootseerError as error:
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
        if self._num_nodes == _ONE_NODE:
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
