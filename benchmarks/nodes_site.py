"""A site on one machine: an origin behind one link, and nodes with separate links, caches, mounts and processes.

The origin (registry, package index, HDFS) runs directly on this machine: everything that it sends crosses the bridge of
the nodes' links, which limits and counts the bytes. A node is a bash script in separate namespaces (network, mounts,
processes), with a folder for its disk. It ends with its first process, and so do its mounts and daemons. Needs root and
iproute2.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import node
from harness import ROOT
from link import run

from hdfs_links import Links

BOOTSEER = str(ROOT / ".venv/bin/bootseer")
PYTHON = str(ROOT / ".venv/bin/python")
_PREPARE_S = 120.0
_END_S = 30.0


class Traffic(NamedTuple):
    """Bytes on the links, with all headers."""

    origin: int
    """Sent by the origin, as its limited link counts them. An interface would count one header for up to 64 KiB, and
    so fewer bytes for few fast connections than for many slow ones."""
    sent: tuple[int, ...]
    """By each node."""
    received: tuple[int, ...]

    def since(self, before: Traffic) -> Traffic:
        return Traffic(
            self.origin - before.origin,
            tuple(a - b for a, b in zip(self.sent, before.sent, strict=True)),
            tuple(a - b for a, b in zip(self.received, before.received, strict=True)),
        )


class Site(Links):
    """The links. A context manager; the nodes must have ended before it does."""

    @property
    def name(self) -> str:
        """The prefix of the names of all its namespaces and interfaces."""
        return self._name()

    def shape(self, origin_mbit: int | None, node_mbit: int | None) -> None:
        """Limit the origin's rate, and each node's link in both directions; None removes a limit."""
        words = ["noqueue"]
        if origin_mbit is not None:
            words = ["tbf", "rate", f"{origin_mbit}mbit", "burst", "128kb", "latency", "100ms"]
        run("tc", "qdisc", "replace", "dev", self._name(), "root", *words)
        for i in range(self._number):
            self.set_rate(i, node_mbit)

    def limit_upload(self, i: int, mbit: float) -> None:
        """Limit only what a node sends."""
        limit = ["rate", f"{int(mbit * 1000)}kbit", "burst", "64kb", "latency", "100ms"]
        run("tc", "-n", self._name(i), "qdisc", "replace", "dev", "eth0", "root", "tbf", *limit)

    def traffic(self) -> Traffic:
        """Bytes so far. A node's interface is the other end of ours, so what we received is what it sent."""
        numbers = range(self._number)
        return Traffic(
            _sent(self._name()),
            tuple(_counter(self._near(i), "rx") for i in numbers),
            tuple(_counter(self._near(i), "tx") for i in numbers),
        )

    def enter(self, i: int) -> list[str]:
        """Prefix of a command: run it in the node's network, as its first process, with separate mounts."""
        network = [f"--net=/run/netns/{self._name(i)}"]
        apart = ["--mount", "--propagation", "private", "--pid", "--fork", "--kill-child", "--mount-proc"]
        # Nodes also end if the benchmark is killed.
        return ["setpriv", "--pdeathsig", "KILL", "nsenter", *network, "unshare", *apart]


@dataclass(frozen=True, slots=True)
class Script:
    """The commands of one node: `prepare` is not timed; the last step is the job."""

    prepare: Sequence[str] = ()
    """Shell lines."""
    steps: Sequence[Sequence[str]] = ()
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Node:
    """A node that runs its script."""

    number: int
    folder: Path
    process: subprocess.Popen[bytes]
    ready_at: float | None = None
    """On the monotonic clock."""
    checksum: bytes = b""
    """The checksum that the job printed."""
    text: bytes = b""

    @property
    def log(self) -> str:
        lines = (self.folder / "log").read_text(errors="replace").strip().splitlines()
        return " | ".join([*lines[-6:], *self.text.decode(errors="replace").splitlines()[-2:]])

    def descendants(self) -> list[int]:
        return list(node.descendants(self.process.pid))

    def events(self) -> Iterator[dict[str, Any]]:
        """The attributes of all events that BootSeer wrote on this node."""
        for path in (self.folder / "spool").rglob("*"):
            for line in path.read_text(errors="replace").splitlines() if path.is_file() else ():
                if line.startswith("@bootseer1 {"):
                    yield json.loads(line.partition(" ")[2]).get("attrs") or {}

    def cpu_s(self) -> float:
        return sum(node.cpu_s(pid) for pid in [self.process.pid, *self.descendants()])

    def kill(self) -> None:
        """Kill all processes, as if the machine lost power."""
        self.process.kill()

    def hang(self) -> None:
        """Stop all processes; their connections remain."""
        for pid in self.descendants():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)


def node_env(folder: Path) -> dict[str, str]:
    """The environment of a node's processes."""
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("BOOTSEER_", "PIP_", "UV_", "PYTHON", "OMP_"))
    }
    return {
        **environ,
        "HOME": str(folder / "home"),
        "TMPDIR": str(folder / "tmp"),
        "PIP_CONFIG_FILE": os.devnull,
        "BOOTSEER_CACHE": str(folder / "cache"),
        "BOOTSEER_RUNTIME": "/run/bootseer",
        "BOOTSEER_SPOOL": str(folder / "spool"),
    }


@contextlib.contextmanager
def nodes(site: Site, folder: Path, scripts: Sequence[Script]) -> Iterator[list[Node]]:
    """Prepared nodes, which wait for `start`. A context manager that ends them and removes their folders."""
    running: list[Node] = []
    try:
        for number, script in enumerate(scripts):
            place = folder / f"node{number}"
            for name in ("home", "tmp", "cache"):
                (place / name).mkdir(parents=True)
            (place / "script").write_text(_bash(script))
            with (place / "log").open("wb") as log:
                process = subprocess.Popen(
                    [*site.enter(number), "bash", str(place / "script")],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env={**node_env(place), **script.env},
                    cwd=place,
                )
            running.append(Node(number, place, process))
        _wait_for(running, b"prepared", time.monotonic() + _PREPARE_S)
        yield running
    finally:
        finish(running)
        for one in running:
            one.process.kill()
            one.process.wait()
            assert one.process.stdout is not None
            one.process.stdout.close()
            shutil.rmtree(one.folder, ignore_errors=True)


def start(running: Sequence[Node]) -> float:
    """Start all nodes; returns the time."""
    began = time.monotonic()
    for one in running:
        assert one.process.stdin is not None
        one.process.stdin.write(b"go\n")
        one.process.stdin.flush()
    return began


def wait_until_ready(running: Sequence[Node], deadline_s: float) -> None:
    """Wait until the job of each node has printed `ready`. Raises `RuntimeError` if one ends before."""
    _wait_for(running, b"ready", time.monotonic() + deadline_s)


def finish(running: Sequence[Node]) -> None:
    """Let the ready jobs continue, and wait for their end; their folders are kept."""
    for one in running:
        assert one.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            one.process.stdin.close()
    until = time.monotonic() + _END_S
    for one in running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            one.process.wait(max(0.0, until - time.monotonic()))


def _wait_for(running: Sequence[Node], word: bytes, until: float) -> None:
    with selectors.DefaultSelector() as selector:
        for one in running:
            assert one.process.stdout is not None
            selector.register(one.process.stdout, selectors.EVENT_READ, one)
        while selector.get_map():
            events = selector.select(max(0.0, until - time.monotonic()))
            if not events:
                late = [key.data for key in selector.get_map().values()]
                raise RuntimeError(f"node {late[0].number} does not say {word.decode()} in time: {late[0].log}")
            for key, _ in events:
                one = key.data
                data = os.read(key.fd, 65536)
                if not data:
                    raise RuntimeError(f"node {one.number} ended before it said {word.decode()}: {one.log}")
                one.text += data
                lines = [line for line in one.text.splitlines(keepends=True) if line.startswith(word)]
                if lines and lines[0].endswith(b"\n"):
                    one.text = b""
                    if word == b"ready":
                        words = lines[0].split()
                        one.ready_at, one.checksum = float(words[1]), b" ".join(words[2:])
                    selector.unregister(key.fileobj)


def wait_until_gone(pid: int) -> None:
    """Wait until a killed process has ended."""
    until = time.monotonic() + _END_S
    while Path(f"/proc/{pid}").exists():
        if time.monotonic() > until:
            raise RuntimeError(f"process {pid} is still there")
        time.sleep(0.01)


def _bash(script: Script) -> str:
    lines = [
        "set -e -o pipefail",
        # The node needs a separate /run.
        "mount -t tmpfs tmpfs /run",
        *script.prepare,
        "echo prepared",
        "read -r _",
        *(shlex.join(step) + " </dev/null >&2" for step in script.steps[:-1]),
        # Not `exec`: the first process of a node remains as the parent of orphans.
        f"{shlex.join(script.steps[-1])} || exit $?",
    ]
    return "\n".join(lines) + "\n"


def _sent(device: str) -> int:
    """The bytes that the device's queue has sent; 0 without a limit."""
    words = ["tc", "-statistics", "-json", "qdisc", "show", "dev", device, "root"]
    found = json.loads(subprocess.run(words, check=True, capture_output=True).stdout)
    return int(found[0]["bytes"])


def _counter(device: str, direction: str) -> int:
    return int(Path(f"/sys/class/net/{device}/statistics/{direction}_bytes").read_text())
