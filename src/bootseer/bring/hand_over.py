"""What the mount daemon does beside serving: record the start, and keep what it learned.

Called by `bringing`; `HandOver` runs in the daemon, where stores are opened anew.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bootseer.blocks.index import Index
from bootseer.bring.hotsets import HotSets
from bootseer.bring.signatures import Signatures
from bootseer.fetch.hotset import Block, judge
from bootseer.fetch.record import read_record
from bootseer.mounts.fetched import Fetched, FetchedFile, MakeTree
from bootseer.mounts.trees import LazyFiles
from bootseer.store.open import open_store

RECORD = "record"
"""The file in a mount's folder that tells what its start needed."""
KEPT = "kept"
"""The file that says that the record has become part of the hot set; it holds what did not work, as lines."""


@dataclass(frozen=True, slots=True)
class HandOver:
    """Makes the finished record part of the hot set."""

    store: str | None
    """URI of the store that it is published in; None: it stays on the node."""
    plain_http: bool
    cache_root: Path
    digest: str
    workload: str
    signatures: Signatures
    plan: Sequence[Block] | None

    def __call__(self, path: Path) -> None:
        """Read the record at `path` and keep it. Raises nothing that the daemon would not write into its log."""
        notes: list[str] = []
        try:
            record = read_record(path)
            if record.needs:
                if self.plan is not None:
                    record = replace(record, coverage=judge(self.plan, record).coverage)
                store = open_store(self.store, plain_http=self.plain_http) if self.store is not None else None
                sets = HotSets(self.cache_root, self.digest, store, notes.append, self.signatures)
                sets.keep(self.workload, record, publish=store is not None)
        finally:
            path.with_name(KEPT).write_text(json.dumps(notes))


def layers_to_serve(
    indexes: Sequence[Index],
    store: str,
    blocks: Path,
    folder: Path,
    hand_over: HandOver,
    *,
    plain_http: bool,
    make_tree: MakeTree = LazyFiles,
) -> Fetched:
    """What the daemon serves: these files, from this store, the hot set first. `make_tree`: as what."""
    plan = hand_over.plan
    return Fetched(
        files=tuple(FetchedFile(index.identity, index, store, plain_http) for index in indexes),
        cache_root=blocks,
        record=folder / RECORD if hand_over.workload else None,
        hand_over=hand_over,
        hot=None if plan is None else lambda: plan,
        make_tree=make_tree,
    )
