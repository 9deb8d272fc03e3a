"""What of the running kernel a setup can change: modules, settings, shared memory.

Settings are files of /proc/sys. Those that may be written are compared, without the few that move by themselves, so
that nothing is blamed on a setup that it did not do. Who calls: `effects`, before and after a setup.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_SETTINGS = "/proc/sys"
_MOVING = frozenset((
    "kernel.ns_last_pid", "kernel.perf_event_max_sample_rate", "kernel.sched_domain", "kernel.tainted",
    "kernel.pty.nr", "vm.stat_refresh",
))  # fmt: skip
# The first may be a mount that appears when it is touched; random numbers differ each time they are read.
_NOT_ENTERED = ("fs/binfmt_misc", "kernel/random")
_MAX_BYTES = 4096


@dataclass(frozen=True, slots=True)
class KernelState:
    """A look at it. Takes some 25 ms."""

    modules: frozenset[str]
    settings: dict[str, bytes]
    """By names as sysctl(8) has them: `vm.max_map_count`."""
    shared_memory: frozenset[str]
    """Ids of System V segments of this user."""

    @classmethod
    def now(cls) -> KernelState:
        """What can be read at this moment; the rest is left out."""
        return cls(
            frozenset(line.split()[0] for line in _lines("/proc/modules")),
            dict(_settings()),
            frozenset(_shared_memory()),
        )

    def changes(self, before: KernelState) -> list[str]:
        """What is different from `before`, for people."""
        found = [f"it loaded the kernel module {name}" for name in sorted(self.modules - before.modules)]
        found += [
            f"it changed the kernel setting {name}"
            for name, value in sorted(self.settings.items())
            if before.settings.get(name, value) != value
        ]
        if new := self.shared_memory - before.shared_memory:
            found.append(f"it left shared memory behind (System V, id {', '.join(sorted(new))})")
        return found


def _settings() -> Iterator[tuple[str, bytes]]:
    for folder, below, names in os.walk(_SETTINGS):
        inside = os.path.relpath(folder, _SETTINGS)
        below[:] = [name for name in below if os.path.normpath(f"{inside}/{name}") not in _NOT_ENTERED]
        for name in names:
            path = f"{folder}/{name}"
            setting = os.path.normpath(f"{inside}/{name}").replace("/", ".")
            if setting in _MOVING:
                continue
            try:
                if os.lstat(path).st_mode & 0o600 == 0o600:
                    with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - a thousand files
                        yield setting, file.read(_MAX_BYTES)
            except OSError:
                continue


def _shared_memory() -> Iterator[str]:
    """Segments whose maker is gone: others of the same user may have made theirs meanwhile, and still use them."""
    for fields in map(str.split, _lines("/proc/sysvipc/shm")[1:]):
        _, number, _, _, maker, *_, creator = fields[:10]
        if int(creator) == os.geteuid() and not Path("/proc", maker).exists():
            yield number


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
