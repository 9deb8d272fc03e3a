"""What a setup has just written, as the entries of a snapshot that is not written yet.

Called by `environment_capture`, which has loose files put into their places before the command starts.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable

from bootseer.env.changes import Change
from bootseer.env.snapshot.contents import look
from bootseer.env.snapshot.manifest import Entry


def loose_entries(changes: Iterable[Change]) -> list[Entry]:
    """The changes as entries, for files that are still where the setup left them: without digests."""
    items, _ = look(changes, None)
    first: dict[tuple[int, int], str] = {}
    found = []
    for item in items:
        link = first.setdefault(item.inode, item.change.path) if item.inode != (0, 0) else ""
        found.append(
            Entry(
                path=item.change.path,
                kind=item.kind,
                mode=stat.S_IMODE(item.mode),
                uid=item.uid,
                gid=item.gid,
                size=item.size,
                target=os.fsdecode(item.target),
                xattrs={os.fsdecode(name): value for name, value in item.xattrs.items()},
                link=link if link != item.change.path else "",
                opaque=item.change.opaque,
                action=item.change.action,
                before=item.change.before,
                loose=True,
            )
        )
    return found
