"""A real containerd with `bootseer snapshotter` as its plugin, and kubelet's calls to it, for tests.

Messages use the field numbers of containerd's snapshots.proto and Kubernetes' api.proto (v1).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest

from bootseer.hdfs.protobuf import Message
from bootseer.hdfs.protobuf import field as f
from bootseer.mounts import kernel
from waiting import processes

_WAIT_S = 120.0
_CALL_S = 300.0
_CONFIG = """
version = 2
root = "{root}/root"
state = "{root}/state"
disabled_plugins = ["io.containerd.internal.v1.opt", "io.containerd.snapshotter.v1.btrfs",
                    "io.containerd.snapshotter.v1.zfs", "io.containerd.snapshotter.v1.devmapper"]
[grpc]
  address = "{root}/containerd.sock"
[ttrpc]
  address = "{root}/containerd.sock.ttrpc"
[proxy_plugins.bootseer]
  type = "snapshot"
  address = "{socket}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause}"
  restrict_oom_score_adj = true
  stream_server_port = "0"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "{snapshotter}"
    disable_snapshot_annotations = false
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
"""


@dataclass
class Containerd:
    """containerd and the snapshotter of one node, with all their data below `folder`."""

    folder: Path
    env: Mapping[str, str]
    pause: str
    snapshotter: str = "bootseer"
    options: Sequence[str] = ()
    program: Sequence[str] = ("-m", "bootseer")
    """Python's arguments for the snapshotter's program."""
    passed: socket.socket | None = None
    """A listening socket, passed to the program like systemd does."""
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def socket(self) -> Path:
        """The snapshotter's socket."""
        return self.folder / "s.sock"

    @property
    def snapshots(self) -> Path:
        return self.folder / "snapshots"

    def start_snapshotter(self) -> None:
        command = [sys.executable, "-P", *self.program, "-v", "snapshotter", "--socket", str(self.socket)]
        command += ["--root", str(self.snapshots), "--plain-http", *self.options]
        self._start("snapshotter", command)
        self.wait(
            self.socket, lambda: self.call(self.socket, "containerd.services.snapshots.v1.Snapshots/Cleanup", b"")
        )

    def start_containerd(self) -> None:
        self.folder.joinpath("config.toml").write_text(
            _CONFIG.format(root=self.folder, socket=self.socket, pause=self.pause, snapshotter=self.snapshotter)
        )
        self._start("containerd", ["containerd", "-c", str(self.folder / "config.toml")])
        self.wait(self.folder / "containerd.sock", lambda: self.cri("Version"))

    def _start(self, name: str, command: list[str]) -> None:
        passed = [] if self.passed is None or name != "snapshotter" else [self.passed.fileno()]
        for number in passed:
            script = f'exec 3<&{number} && LISTEN_FDS=1 LISTEN_PID=$$ exec "$@"'
            command = ["bash", "-c", script, "bash", *command]
        with self.folder.joinpath(f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, **self.env}, pass_fds=passed
            )

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        process = self.running.pop(name)
        process.send_signal(number)
        process.wait(60)

    def wait(self, place: Path, works: Any) -> None:
        """Wait until `works` succeeds. Connects to the socket first: without a listener, gRPC takes far longer."""
        until = time.monotonic() + _WAIT_S
        while True:
            try:
                with socket.socket(socket.AF_UNIX) as probe:
                    probe.connect(str(place))
                works()
                return
            except (OSError, grpc.RpcError) as error:
                dead = [name for name, process in self.running.items() if process.poll() is not None]
                if dead or time.monotonic() > until:
                    raise AssertionError(f"{dead or error}: {self.logs()}") from error
            time.sleep(0.05)

    def logs(self) -> str:
        return "\n".join(path.read_text(errors="replace")[-6000:] for path in self.folder.glob("*.log"))

    def call(self, socket: Path, method: str, request: bytes, *, stream: bool = False) -> Any:
        """One gRPC call: its response, or a list of responses."""
        with grpc.insecure_channel(f"unix:{socket}") as channel:
            make = channel.unary_stream if stream else channel.unary_unary
            caller = make(f"/{method}")
            answer = caller(request, timeout=_CALL_S, metadata=(("containerd-namespace", "k8s.io"),))
            return [Message(data) for data in answer] if stream else Message(answer)

    def ask(self, name: str, *fields: bytes, snapshotter: str = "bootseer", stream: bool = False) -> Any:
        """A call to containerd's own snapshot service, which adds the namespace to names and calls the plugin."""
        return self.call(
            self.folder / "containerd.sock",
            f"containerd.services.snapshots.v1.Snapshots/{name}",
            f(1, snapshotter) + b"".join(fields),
            stream=stream,
        )

    def collect(self) -> None:
        """Run containerd's garbage collection: only then it removes snapshots from their snapshotter.

        Also deletes the leases of calls that a kill interrupted, which would otherwise keep their snapshots for a day.
        """
        leases, socket = "containerd.services.leases.v1.Leases", self.folder / "containerd.sock"
        with contextlib.suppress(grpc.RpcError):  # it exists if a kill interrupted the last collection
            self.call(socket, f"{leases}/Create", f(1, "collect"))
        held = self.call(socket, f"{leases}/List", b"").every(1)
        for name in [Message(lease).text(1) for lease in held]:
            self.call(socket, f"{leases}/Delete", f(1, name) + f(2, 1))

    def cri(self, name: str, request: bytes = b"") -> Message:
        """A CRI call, like kubelet's."""
        service = "Image" if "Image" in name else "Runtime"
        answer: Message = self.call(self.folder / "containerd.sock", f"runtime.v1.{service}Service/{name}", request)
        return answer

    def pull(self, image: str) -> None:
        self.cri("PullImage", f(1, f(1, image)))

    def start_pod(
        self,
        image: str,
        command: Sequence[str],
        name: str = "pod",
        *,
        mounts: Mapping[Path, str] | None = None,
        pod: str = "",
    ) -> tuple[str, str]:
        """Start a pod with one container that runs the command; returns the ids of both. The container's output is in
        `logs/NAME.log`. `mounts`: the node's files to their places in the container; `pod`: a sandbox of this name that
        was started before."""
        sandbox = self._sandbox(name)
        pod = pod or self.start_sandbox(name)
        words = b"".join(f(3, word) for word in command)
        bound = b"".join(f(7, f(1, place) + f(2, str(file)) + f(3, 1)) for file, place in (mounts or {}).items())
        container = f(1, f(1, name)) + f(2, f(1, image)) + words + bound + f(11, f"{name}.log")
        created = self.cri("CreateContainer", f(1, pod) + f(2, container) + f(3, sandbox)).text(1)
        self.cri("StartContainer", f(1, created))
        return pod, created

    def start_sandbox(self, name: str) -> str:
        """Start a pod without a container, as kubelet does before it pulls the image; returns its id."""
        return self.cri("RunPodSandbox", f(1, self._sandbox(name))).text(1)

    def _sandbox(self, name: str) -> bytes:
        logs = self.folder / "logs"
        logs.mkdir(exist_ok=True)
        metadata = f(1, name) + f(2, f"uid-{name}") + f(3, "default")
        host = f(1, f(1, 2) + f(2, 1) + f(3, 2))  # the node's network and shared memory, own processes
        return f(1, metadata) + f(3, str(logs)) + f(8, f(2, host))

    def ended(self, container: str) -> int:
        """Wait for a container's end; returns its exit code."""
        until = time.monotonic() + _WAIT_S
        while time.monotonic() < until:
            status = self.cri("ContainerStatus", f(1, container)).message(1)
            if status.number(3, 0) == 2:  # CONTAINER_EXITED
                return status.number(7, 0)
            time.sleep(0.05)
        raise AssertionError(self.logs())

    def said(self, name: str) -> list[str]:
        """The output of a container, without the timestamps."""
        lines = (self.folder / "logs" / f"{name}.log").read_text().splitlines()
        return [line.split(" ", 3)[3] for line in lines]

    def remove_pod(self, pod: str) -> None:
        self.cri("StopPodSandbox", f(1, pod))
        self.cri("RemovePodSandbox", f(1, pod))

    def remove_image(self, image: str) -> None:
        self.cri("RemoveImage", f(1, f(1, image)))

    def pods(self) -> list[str]:
        return [Message(data).text(1) for data in self.cri("ListPodSandbox").every(1)]


@contextlib.contextmanager
def containerd(
    folder: Path,
    env: Mapping[str, str],
    pause: str,
    *,
    plugin_alone: bool = False,
    activated: bool = False,
    **more: Any,
) -> Iterator[Containerd]:
    """Start both; at the end all their processes and mounts are removed."""
    for program in ("containerd", "containerd-shim-runc-v2", "runc"):
        if shutil.which(program) is None:
            pytest.skip(f"needs {program}")
    folder.mkdir()
    node = Containerd(folder, {"BOOTSEER_RUNTIME": str(folder / "runtime"), **env}, pause, **more)
    if activated:
        node.passed = socket.socket(socket.AF_UNIX)
        node.passed.bind(str(node.socket))
        node.passed.listen()
    try:
        node.start_snapshotter()
        if not plugin_alone:
            node.start_containerd()
        yield node
    finally:
        if "containerd" in node.running:
            with contextlib.suppress(grpc.RpcError):
                for pod in node.pods():
                    node.remove_pod(pod)
        for name in [*node.running]:
            node.kill(name, signal.SIGTERM)
        if node.passed is not None:
            node.passed.close()
        for pid, words in processes():  # shims outlive containerd
            if b"containerd-shim" in words and os.fsencode(folder) in words:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        for point in reversed([p for p in kernel.mount_points() if p.startswith(f"{os.path.realpath(folder)}/")]):
            kernel.unmount(Path(point), lazy=True)
