"""Files that were brought to this node and are mounted: what a start needed of them, and what went wrong with them.

`image.mounting.mounted` and `env.restoring.layer` know how they are shown, and how they are taken away again.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bootseer.artifact.hotsets import KEPT
from bootseer.errors import BootseerError
from bootseer.mounts.daemon import LOG, Daemon

_KEEP_S = 5.0
_POLL_S = 0.01


class MountHandle:
    """What one start reads. Seen by the process that mounted it."""

    def __init__(
        self, what: str, facts: Mapping[str, object], daemon: Daemon | None, say: Callable[[str], None]
    ) -> None:
        """`what` it is for people: `the image`. No `daemon`: all was here, and nothing is fetched or recorded."""
        self.facts = facts
        """What is known since it was mounted: mode, reason, sizes."""
        self._what = what
        self._daemon = daemon
        self._say = say

    def began(self) -> dict[str, object]:
        """The start is over: its record ends, and what it cost is told. Nothing is fetched where no daemon is."""
        numbers: dict[str, object] = {"demand_bytes": 0, "hot_bytes": 0, "cold_bytes": 0, "requests": 0}
        if self._daemon is None:
            return numbers
        try:
            self._daemon.began()
            status = self._daemon.status()
        except BootseerError as error:
            if self._daemon.process.alive:  # that it died is for `tell_problems`
                self._say(f"{error}; what this start cost is not known")
            return numbers
        return numbers_of(status)

    def tell_problems(self) -> None:
        """Say what reads failed for while the command ran, which itself saw I/O errors alone."""
        daemon = self._daemon
        if daemon is None:
            return
        if not daemon.process.alive:
            said = _last_line(daemon.folder / LOG)
            self._say(
                f"the mount daemon died while the command ran: its reads of {self._what} failed from then on"
                f" (log: {said or 'empty, so that it was killed'})"
            )
            return
        fetch = failures(daemon)
        if fetch.get("first_corrupt"):
            self._say(f"reads of {self._what} failed, its store has damaged blocks: {fetch['first_corrupt']}")
        elif fetch.get("first_failure"):
            self._say(f"{fetch['failed_reads']} reads of {self._what} failed: {fetch['first_failure']}")

    def keep_record(self) -> None:
        """Wait a moment until the record has become part of the hot set, and say what did not work."""
        if self._daemon is None:
            return
        path = self._daemon.folder / KEPT
        until = time.monotonic() + _KEEP_S
        while not path.exists() and self._daemon.process.alive:
            if time.monotonic() > until:
                return  # it goes on beside, and tells its log
            time.sleep(_POLL_S)
        with contextlib.suppress(OSError, ValueError):
            for note in json.loads(path.read_text()):
                self._say(str(note))


def failures(daemon: Daemon) -> Mapping[str, Any]:
    """What a daemon says of its reads: `failed_reads`, `first_failure`, `first_corrupt`. Nothing if it does not
    answer."""
    with contextlib.suppress(BootseerError):
        fetch = daemon.status().get("fetch")
        if isinstance(fetch, dict):
            return fetch
    return {}


def numbers_of(status: Mapping[str, Any]) -> dict[str, object]:
    """What a start cost so far, by what a daemon says of itself; in the words of reports (`analysis.images`)."""
    fetch = status.get("fetch") or {}
    by_purpose = fetch.get("bytes_by_purpose") or {}
    foreseen = bool(fetch.get("hot_blocks"))
    return {
        "demand_bytes": by_purpose.get("demand", 0),
        "hot_bytes": by_purpose.get("hot", 0),
        "cold_bytes": by_purpose.get("cold", 0),
        "requests": sum((fetch.get("requests_by_purpose") or {}).values()),
        "coverage": round(fetch["covered"] / fetch["needs"], 4) if foreseen and fetch.get("needs") else None,
        "wasted_blocks": fetch.get("wasted_blocks", 0),
        "late_blocks": fetch.get("late", 0) if foreseen else 0,
        "waited_s": round(fetch.get("waited_s", 0.0), 3),
    }


def _last_line(log: Path) -> str:
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return lines[-1] if lines else ""
