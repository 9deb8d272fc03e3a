"""Containers report the end of their start to the snapshotter, which then ends the record of what the start read."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("grpc", reason="needs grpcio")

from bootseer.snapshotter import starts
from bootseer.snapshotter.lazy import LazyImages, Settings
from bootseer.snapshotter.service import _STARTS
from containerd import containerd
from image_node import Node, node
from snapshotter_images import convert, pause

assert node
_WAIT_S = 60.0


@pytest.mark.root
@pytest.mark.fuse
@pytest.mark.slow
def test_the_record_ends_when_a_container_reports_that_training_has_begun(node: Node) -> None:
    def hot_sets() -> list[str]:
        words = ["image", "hotset", "show", "--json", node.reference]
        done = subprocess.run(
            [sys.executable, "-P", "-m", "bootseer", *words], env=node.env, capture_output=True, text=True, check=True
        )
        return [row["workload"] for row in json.loads(done.stdout)["hotsets"]]

    convert(node)
    program = {Path(place).resolve(): place for place in ("/usr", "/lib", "/lib64", sys.base_prefix, sys.prefix)}
    source = Path(__file__).parents[2] / "src"
    place = Path(node.env["BOOTSEER_RUNTIME"]) / _STARTS
    options = ["--record", "3600", "--loading", "lazy"]
    with containerd(node.folder / "c", node.env, pause(node), options=options) as running:
        with socket.socket(socket.AF_UNIX) as outsider:  # which runs no image
            outsider.settimeout(_WAIT_S)
            outsider.connect(str(place))
            assert outsider.recv(1) == b""
        running.pull(node.reference)
        job = ["sh", "-c", "sha256sum /hot; echo it begins; sleep 600"]
        run = ["-m", "bootseer", "run", "--spool", "/tmp/spool", "--began-pattern", "it begins", "--", *job]
        pod, _ = running.start_pod(
            node.reference,
            ["/bin/env", f"PYTHONPATH={source}", sys.executable, "-P", *run],
            mounts={**program, source: str(source), place.parent: "/run/bootseer/starts"},
        )
        until = time.monotonic() + _WAIT_S
        while "pod" not in hot_sets():
            assert time.monotonic() < until, running.logs() + str(running.said("pod"))
            time.sleep(0.2)
        running.remove_pod(pod)


def test_connections_that_cannot_be_accepted_cost_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """For example while the service has no descriptor left."""
    stop = threading.Event()
    monkeypatch.setattr(socket.socket, "accept", lambda self: os.open("/nowhere", 0))
    starts.start(tmp_path / "s", LazyImages.__new__(LazyImages), lambda folder: "", stop)
    with socket.socket(socket.AF_UNIX) as container:
        container.connect(str(tmp_path / "s"))
        time.sleep(0.5)
    stop.set()
    assert 0 < len(caplog.records) < 100


def test_a_report_moves_the_end_of_a_record_that_has_not_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []
    monkeypatch.setattr(LazyImages, "_end_startup", lambda self, digest: ended.append(digest))
    images = LazyImages(tmp_path, Settings(str(tmp_path), str(tmp_path), workload="pod", record_s=1.0))

    def is_ended(digest: str) -> bool:
        until = time.monotonic() + _WAIT_S
        while digest not in ended and time.monotonic() < until:
            time.sleep(0.01)
        return digest in ended

    images.begin("a-1")
    images.begin("b-1")
    images.reschedule("a-1", 3600.0)
    assert is_ended("b")
    assert ended == ["b"]
    images.reschedule("b-1", 0.0)
    images.reschedule("c-1", 0.0)
    images.reschedule("a-1")
    assert is_ended("a")
    assert ended == ["b", "a"]
