"""A network link of a known rate on one machine: a network namespace behind a veth pair, shaped by the kernel's `tbf`.

The benchmarks run a server in the namespace, so that everything it sends crosses the link, which counts the bytes. The
link adds no latency, because the kernel may lack `netem`. Needs root and iproute2.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

HERE = "198.18.0.1"
"""The local end. These addresses are reserved for benchmarks (RFC 2544)."""
THERE = "198.18.0.2"
"""The remote end, where the server listens."""


class Link:
    """The link, without a limit at first. A context manager that removes it; the server must have ended before."""

    def __init__(self) -> None:
        self._namespace = f"bench-{os.getpid()}"
        self._near, self._far = f"bn{os.getpid()}", f"bf{os.getpid()}"

    def __enter__(self) -> Link:
        run("ip", "netns", "add", self._namespace)
        try:
            run("ip", "link", "add", self._near, "type", "veth", "peer", "name", self._far, "netns", self._namespace)
            run("ip", "address", "add", f"{HERE}/30", "dev", self._near)
            run("ip", "link", "set", self._near, "up")
            run(*self.inside(["ip", "address", "add", f"{THERE}/30", "dev", self._far]))
            for device in (self._far, "lo"):  # a server may connect to its own address
                run(*self.inside(["ip", "link", "set", device, "up"]))
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        run("ip", "netns", "delete", self._namespace)

    def inside(self, command: Sequence[str]) -> list[str]:
        """The command, to be run at the remote end."""
        return ["ip", "netns", "exec", self._namespace, *command]

    def shape(self, mbit_per_s: int | None) -> None:
        """Limit the rate of the remote end; None removes the limit."""
        if mbit_per_s is None:
            words = ["tc", "qdisc", "replace", "dev", self._far, "root", "pfifo_fast"]
        else:
            # What a 1 Gbit/s link carries in 4 ms: with less, the timer's resolution affects the rate.
            limit = ["rate", f"{mbit_per_s}mbit", "burst", "512kb", "latency", "50ms"]
            words = ["tc", "qdisc", "replace", "dev", self._far, "root", "tbf", *limit]
        run(*self.inside(words))

    def received_bytes(self) -> int:
        """Bytes received from the remote end so far, with all headers."""
        return int(Path(f"/sys/class/net/{self._near}/statistics/rx_bytes").read_text())


def run(*words: str) -> None:
    """Run a program. Raises `RuntimeError` with its error."""
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")
