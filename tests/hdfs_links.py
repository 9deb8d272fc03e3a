"""One network link for each DataNode, on one machine: a network namespace with a veth pair, shaped by `tbf`.

The local ends are attached to a bridge, whose address the NameNode and the clients use. Needs root and iproute2; the
kernel may lack `netem`, so a link limits the rate and adds no latency. Names and addresses contain the number of a
subnet, protected by a lock: concurrent runs use different numbers, and a run that gets the number of a killed run
removes its namespaces and devices.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

_LOCKS = Path("/run/bootseer-hdfs-links")
SUBNETS = range(1, 255)
"""Of 198.18.0.0/16, which is reserved for benchmarks (RFC 2544); benchmarks/link.py uses subnet 0."""


def links_missing() -> str:
    """The reason why no links can be created here; "" if they can."""
    if os.geteuid():
        return "network namespaces need root"
    return "" if shutil.which("ip") and shutil.which("tc") else "iproute2 is not installed"


def is_claimed(subnet: int) -> bool:
    """Whether a process has links with this number."""
    with contextlib.suppress(FileNotFoundError), (_LOCKS / str(subnet)).open("rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


class Links:
    """Links for a `with` block; the servers in their namespaces must end before the block."""

    def __init__(self, number: int, rate_mbit: int | None = None) -> None:
        self._number = number
        self._rate_mbit = rate_mbit
        self._subnet = 0
        self._lock = -1

    @property
    def here(self) -> str:
        """The address of the local ends, for the NameNode and clients."""
        return f"198.18.{self._subnet}.1"

    def there(self, i: int) -> str:
        """The address of the remote end of link `i`."""
        return f"198.18.{self._subnet}.{10 + i}"

    def inside(self, i: int, command: Sequence[str]) -> list[str]:
        """The command to run another command at the remote end of link `i`, in the same process."""
        # Not `ip netns exec`, which creates a mount namespace: its copies of all mounts, e.g. of an image that another
        # test has just mounted and whose daemon ends with the last copy, would exist as long as the command runs.
        return ["nsenter", f"--net=/run/netns/{self._name(i)}", *command]

    def set_rate(self, i: int, mbit: int | None) -> None:
        """Limit both directions of link `i`, in Mbit/s; None lifts the limit."""
        words = ["noqueue"]
        if mbit is not None:
            # The amount for 5 ms: with less, the timer's resolution affects the rate.
            burst = max(64 * 1024, mbit * 1_000_000 // 8 * 5 // 1000)
            words = ["tbf", "rate", f"{mbit}mbit", "burst", str(burst), "latency", "50ms"]
        _run("tc", "qdisc", "replace", "dev", self._near(i), "root", *words)
        _run("tc", "-n", self._name(i), "qdisc", "replace", "dev", "eth0", "root", *words)

    def set_up(self, i: int, *, is_up: bool) -> None:
        """Set link `i` up or down; connections stay open."""
        _run("ip", "link", "set", self._near(i), "up" if is_up else "down")

    def __enter__(self) -> Links:
        self._claim()
        try:
            self._remove()
            bridge = self._name()
            _run("ip", "link", "add", bridge, "type", "bridge")
            _run("ip", "address", "add", f"{self.here}/24", "dev", bridge)
            _run("ip", "link", "set", bridge, "up")
            for i in range(self._number):
                name, near = self._name(i), self._near(i)
                _run("ip", "netns", "add", name)
                _run("ip", "link", "add", near, "type", "veth", "peer", "name", "eth0", "netns", name)
                _run("ip", "link", "set", near, "master", bridge, "up")
                _run("ip", "-n", name, "address", "add", f"{self.there(i)}/24", "dev", "eth0")
                _run("ip", "-n", name, "link", "set", "eth0", "up")
                _run("ip", "-n", name, "link", "set", "lo", "up")
                self.set_rate(i, self._rate_mbit)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self._remove()
        finally:
            os.close(self._lock)

    def _name(self, i: int | None = None) -> str:
        return f"hdfs{self._subnet}" if i is None else f"hdfs{self._subnet}-{i}"

    def _near(self, i: int) -> str:
        return f"hdfs{self._subnet}n{i}"

    def _claim(self) -> None:
        _LOCKS.mkdir(mode=0o700, exist_ok=True)
        for self._subnet in SUBNETS:
            self._lock = os.open(_LOCKS / str(self._subnet), os.O_RDWR | os.O_CREAT, 0o600)
            with contextlib.suppress(BlockingIOError):
                # The kernel releases it when the process ends, even if that is killed.
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            os.close(self._lock)
        raise RuntimeError(f"{len(SUBNETS)} runs with links are going on")

    def _remove(self) -> None:
        """Remove everything with the names of this subnet: our own, or of a killed run."""
        spaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
        for line in spaces.splitlines():
            name = line.split()[0]
            if name.startswith(f"{self._name()}-"):
                _run("ip", "netns", "delete", name)
        for device in os.listdir("/sys/class/net"):  # noqa: PTH208
            if device == self._name() or device.startswith(f"{self._name()}n"):
                # The kernel deletes a veth with its namespace, asynchronously.
                subprocess.run(["ip", "link", "delete", device], capture_output=True, check=False)


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")
