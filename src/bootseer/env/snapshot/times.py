"""Which time a file of a snapshot has, so that two runs of one setup give one snapshot, and nothing looks out of date.

Times from before the setup come out of archives (dpkg, tar) and are the same in each run: they are kept. What the setup
itself wrote gets one time, which is not older than any of those: `make` and `ninja` rebuild what is older than that
from which it was made. Below a folder with ninja's log all times stay, because the log repeats them. ADR 16 has the
reasons. Decides and touches nothing. Called by `write`.
"""

from __future__ import annotations

from collections.abc import Iterable

NS = 1_000_000_000
EARLIEST_S = 1_735_689_600
"""1 January 2025: what the setup wrote is not shown as older, so that it is newer than the headers of a base system."""
_BUILD_LOG = b"/.ninja_log"


class Times:
    """The times of one snapshot. `began_s` is when the setup began; `files` are paths and times of all that is kept."""

    def __init__(self, began_s: float, files: Iterable[tuple[bytes, int]]) -> None:
        # File systems stamp with a clock that runs a few milliseconds behind.
        self._began_ns = int((began_s - 1.0) * NS)
        newest = EARLIEST_S * NS
        build_folders = set()
        for path, mtime_ns in files:
            if newest < mtime_ns < self._began_ns:
                newest = mtime_ns
            if path.endswith(_BUILD_LOG):
                build_folders.add(path.removesuffix(_BUILD_LOG))
        self.written_ns = -(-newest // NS) * NS
        """What everything has that the setup wrote; a whole second."""
        self._build_folders = frozenset(build_folders)

    def of(self, path: bytes, mtime_ns: int) -> int:
        """The time that a file with this time gets."""
        if mtime_ns < self._began_ns or (self._build_folders and self._below_build(path)):
            return mtime_ns
        return self.written_ns

    def _below_build(self, path: bytes) -> bool:
        while path := path.rpartition(b"/")[0]:
            if path in self._build_folders:
                return True
        return False
