"""Snapshotter, containerd and node are killed during each call: running containers still read, the next pod starts."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

grpc = pytest.importorskip("grpc", reason="needs grpcio")

from bootseer.hdfs.protobuf import Message, field  # noqa: E402
from bootseer.mounts import kernel  # noqa: E402
from containerd import Containerd, containerd  # noqa: E402
from image_node import Node, make_node  # noqa: E402
from snapshotter_images import convert, pause, push_small  # noqa: E402
from waiting import processes  # noqa: E402

pytestmark = [pytest.mark.root, pytest.mark.fuse, pytest.mark.slow]
_WAIT_S = 300.0
_BLOCK = 256 << 10
_ROOT = field(4, field(1, "containerd.io/gc.root") + field(2, "now"))
BOTH = ("snapshotter", "containerd")
POINTS = ("Prepare of a layer", "Prepare", "Commit", "Mounts", "View", "Remove", "Update", "Cleanup")
CASES = [(point, BOTH) for point in POINTS]
CASES += [(point, (*BOTH, "node")) for point in POINTS if point not in ("View", "Update")]
CASES += [(point, (name,)) for point in POINTS[:3] for name in BOTH]
"""Other cases are equivalent: kills of one process lose no more than kills of both, and a node restarts after View and
Update in the same state as after Prepare."""


class Site:
    """A node with containerd, a running reader of the converted image, and a trap."""

    def __init__(self, node: Node, running: Containerd, small: str) -> None:
        self.node, self.running, self.small = node, running, small
        self.cold = (node.folder / "tree" / "cold").read_bytes()
        self.trap = node.folder / "trap"
        self.number = 0
        self.reader = ""
        self.pid = 0

    def start_reader(self) -> None:
        words = ["sleep", f"86{os.getpid()}"]
        self.running.pull(self.node.reference)
        self.reader, _ = self.running.start_pod(self.node.reference, words, f"reader-{self.number}")
        until = time.monotonic() + _WAIT_S
        while not (
            found := [pid for pid, command in processes() if command.split(b"\0")[:2] == list(map(str.encode, words))]
        ):
            assert time.monotonic() < until, self.running.logs()
            time.sleep(0.02)
        (self.pid,) = found

    def read_on(self) -> None:
        """Read like the running container, at an offset not read before."""
        offset = self.number * _BLOCK % len(self.cold)
        with Path(f"/proc/{self.pid}/root/cold").open("rb") as file:
            file.seek(offset)
            assert file.read(_BLOCK) == self.cold[offset : offset + _BLOCK]

    def run_pods(self) -> None:
        """Run pods of the reader's image and of the image that the last call may have concerned."""
        for image in (self.node.reference, self.small):
            self.number += 1
            self.running.pull(image)
            pod, container = self.running.start_pod(image, ["sha256sum", "/bin/busybox"], f"pod-{self.number}")
            assert self.running.ended(container) == 0, self.running.logs()
            self.running.remove_pod(pod)

    def as_kubelet(self, call: Callable[[], None]) -> None:
        """Retry until containerd has reconnected to the snapshotter."""
        until = time.monotonic() + _WAIT_S
        while True:
            try:
                call()
                return
            except grpc.RpcError as error:
                if error.code() != grpc.StatusCode.UNAVAILABLE or time.monotonic() > until:
                    raise
                time.sleep(0.1)

    def forget_small(self) -> None:
        for pod in set(self.running.pods()) - {self.reader}:  # of attempts cut short by the last kill
            self.running.remove_pod(pod)
        self.running.remove_image(self.small)
        self.running.collect()

    def call(self, point: str) -> None:
        """The operation of kubelet or containerd that makes this call."""
        running, name = self.running, f"own-{self.number}"
        if point == "Prepare of a layer":
            self.as_kubelet(self.forget_small)
            running.pull(self.small)
        elif point == "Commit":
            running.ask("Prepare", field(2, name), _ROOT)
            running.ask("Commit", field(2, f"{name}-layer"), field(3, name), _ROOT)
        elif point in ("Prepare", "View"):
            running.ask(point, field(2, name), _ROOT)
        elif point == "Update":
            running.ask("Prepare", field(2, name), _ROOT)
            label = field(6, field(1, "containerd.io/snapshot/x") + field(2, "y"))
            running.ask(
                "Update", field(2, field(1, name) + label), field(3, field(1, "labels.containerd.io/snapshot/x"))
            )
        elif point in ("Remove", "Cleanup"):
            running.ask("Prepare", field(2, name), _ROOT)
            running.ask("Remove", field(2, name))
            running.collect()
        else:
            self.run_pods()

    def die(self, dying: tuple[str, ...]) -> None:
        """Wait for the killed processes to end. For a node, also remove what a reboot removes."""
        for name in dying:
            if name != "node":
                self.running.running.pop(name).wait(_WAIT_S)
        if "node" not in dying:
            self.read_on()
            return
        until = time.monotonic() + _WAIT_S
        while left := ours(self.running.folder, self.node.folder):
            assert time.monotonic() < until
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        for point in reversed([p for p in kernel.mount_points() if p.startswith(f"{self.node.folder}/")]):
            kernel.unmount(Path(point), lazy=True)
        for gone in (self.running.folder / "state", self.node.runtime):
            shutil.rmtree(gone)


def ours(*folders: Path) -> list[int]:
    """Shims, daemons and containers of a node in these folders, except its registry and this process."""
    found = {
        pid
        for pid, command in processes()
        for folder in folders
        if os.fsencode(folder) in command and b"docker-registry" not in command
    } - {os.getpid()}
    for pid, _ in processes():
        with contextlib.suppress(OSError):
            if int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) in found:
                found.add(pid)
    return sorted(found)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with make_node(tmp_path_factory.mktemp("n")) as node:
        convert(node)
        small = push_small(node)
        convert(node, small)
        program = (str(Path(__file__).with_name("dying.py")), str(node.folder / "trap"))
        with containerd(
            node.folder / "c", node.env, pause(node), program=program, options=("--loading", "lazy")
        ) as running:
            made = Site(node, running, small)
            made.as_kubelet(made.start_reader)
            yield made


@pytest.mark.parametrize(
    ("point", "dying"), CASES, ids=lambda value: value if isinstance(value, str) else "+".join(value)
)
def test_the_next_pod_starts_and_running_ones_read_on(site: Site, point: str, dying: tuple[str, ...]) -> None:
    running = site.running
    site.number += 1
    kill = [running.running["containerd"].pid if name == "containerd" else 0 for name in dying if name != "node"]
    site.trap.write_text(json.dumps({"point": point, "kill": sorted(kill, reverse=True)}))
    with contextlib.suppress(grpc.RpcError):
        site.call(point)
    until = time.monotonic() + _WAIT_S
    while site.trap.exists() and time.monotonic() < until:  # some calls are made after an answer
        time.sleep(0.02)
    assert not site.trap.exists(), f"{point} was not called"
    site.die(dying)
    if "snapshotter" in dying:
        running.start_snapshotter()
    if "containerd" in dying:
        running.start_containerd()
    if "node" in dying:
        for pod in running.pods():
            running.remove_pod(pod)
        site.as_kubelet(site.start_reader)
    site.read_on()
    site.as_kubelet(site.run_pods)


def test_after_all_that_nothing_is_left(site: Site) -> None:
    running = site.running
    for pod in running.pods():
        running.remove_pod(pod)
    for listed in running.cri("ListImages").every(1):
        running.remove_image(Message(listed).text(1))
    while names := [Message(info).text(1) for answer in running.ask("List", stream=True) for info in answer.every(1)]:
        for name in names:
            with contextlib.suppress(grpc.RpcError):  # those with children are removed in a later iteration
                running.ask("Remove", field(2, name))
        running.collect()
    running.collect()
    assert not list((running.snapshots / "snapshots").iterdir())
    assert not list((running.snapshots / "images").iterdir())
