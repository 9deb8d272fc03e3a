"""The nodes of a benchmark: links count their traffic, and nothing is left of an ended node."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest

with pytest.MonkeyPatch.context() as patched:
    patched.setattr(sys, "path", [*sys.path, str(Path(__file__).parents[2] / "benchmarks")])
    import nodes_site

from hdfs_links import links_missing

pytestmark = [pytest.mark.root, pytest.mark.skipif(bool(links_missing()), reason=links_missing())]
_BYTES = 300_000


def test_links_count_each_node_s_bytes_and_a_killed_node_leaves_nothing(tmp_path: Path) -> None:
    with nodes_site.Site(2) as site, socket.create_server((site.here, 0)) as server:
        site.shape(200, 100)
        port = server.getsockname()[1]
        receive = f"head -c {_BYTES} </dev/tcp/{site.here}/{port} | wc -c >got"
        scripts = [
            nodes_site.Script(
                ["mkdir mounted", "mount -t tmpfs tmpfs mounted", "sleep 1000 &"],
                [["bash", "-c", f"{receive}; echo ready 1.5 $(cat got); read -r _"]],
            )
            for _ in range(2)
        ]
        with nodes_site.nodes(site, tmp_path, scripts) as running:
            assert "node0/mounted" not in Path("/proc/mounts").read_text()
            before = site.traffic()
            nodes_site.start(running)
            for _ in running:
                connection, _ = server.accept()
                with connection:
                    connection.sendall(bytes(_BYTES))
            nodes_site.wait_until_ready(running, 60)
            moved = site.traffic().since(before)
            # With all headers; each link counts only its own node.
            assert all(_BYTES < each < 1.2 * _BYTES for each in moved.received)
            # Of each segment: an interface would count one header for many.
            assert 2.04 * _BYTES < moved.origin < 2.4 * _BYTES
            assert [(one.ready_at, one.checksum) for one in running] == [(1.5, str(_BYTES).encode())] * 2
            pids = [running[0].process.pid, *running[0].descendants()]
            assert len(pids) >= 4
            running[0].kill()
            running[0].process.wait()
            for pid in pids[1:]:
                nodes_site.wait_until_gone(pid)
        assert not list(tmp_path.iterdir())
    assert not any(name.startswith(f"{site.name}-") for name in os.listdir("/run/netns"))  # noqa: PTH208


def test_a_node_that_ends_early_has_its_reason_reported(tmp_path: Path) -> None:
    script = nodes_site.Script(steps=[["sh", "-c", "echo it broke >&2; exit 3"]])
    with nodes_site.Site(1) as site, nodes_site.nodes(site, tmp_path, [script]) as running:
        nodes_site.start(running)
        with pytest.raises(RuntimeError, match="node 0 ended before it said ready: it broke"):
            nodes_site.wait_until_ready(running, 60)
