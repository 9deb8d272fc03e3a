"""Two NameNodes with their edits in three JournalNodes (QJM), as in most clusters: the active one is killed, or
replaced while it runs, with one JournalNode killed."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

import hadoop
from hdfs_cluster import needs_hdfs

pytest.importorskip("hdfs_native", reason="extra hdfs")

from bootseer.hdfs.addresses import ClientSettings
from bootseer.hdfs.client import HdfsClient
from hdfs.ha_pair import DATA, Busy, HaPair
from hdfs.whole_files import read_all
from registry import free_port
from waiting import until

pytestmark = [*needs_hdfs, pytest.mark.slow]


# A NameNode ends itself if a JournalNode's answer takes longer: 20 s by default.
PATIENT = {
    f"dfs.qjournal.{what}.timeout.ms": "120000" for what in ("write-txns", "start-segment", "select-input-streams")
}
# DataNodes follow the NameNode with the highest transaction id, and a replaced one counts those that the journal has
# rejected. Until it ends, it lets them delete blocks that it does not know, unless it never looks for such work.
IDLE = {"dfs.namenode.redundancy.interval.seconds": "3600"}


def is_open(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[tuple[str, list[subprocess.Popen[bytes]]]]:
    """The URI of the edits, and the processes of the three JournalNodes."""
    ports = [free_port() for _ in range(3)]
    uri = f"qjournal://{';'.join(f'127.0.0.1:{port}' for port in ports)}/{HaPair.service}"
    with ExitStack() as stack:
        started = []
        for number, port in enumerate(ports):
            conf = tmp_path / f"journal{number}"
            # Its web server requires this folder in the class path.
            (conf / "webapps" / "journal").mkdir(parents=True)
            settings = {
                "dfs.journalnode.edits.dir": str(conf / "edits"),
                "dfs.journalnode.rpc-address": f"127.0.0.1:{port}",
                "dfs.journalnode.http-address": f"127.0.0.1:{free_port()}",
                "dfs.namenode.shared.edits.dir": uri,
            }
            hadoop.write_conf(conf, {"hdfs-site.xml": settings})
            with (conf / "log").open("wb") as log:
                command = ["setpriv", "--pdeathsig", "KILL", *hadoop.tool(conf, "hdfs.qjournal.server.JournalNode")]
                process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            stack.callback(process.wait)
            stack.callback(process.kill)
            started.append(process)
        # A NameNode tries to connect for 10 s only.
        until(lambda: all(is_open(port) for port in ports), "the JournalNodes")
        yield uri, started


def test_nothing_is_lost_or_wrong_when_the_active_one_is_killed_or_replaced(
    journal: tuple[str, list[subprocess.Popen[bytes]]], tmp_path: Path
) -> None:
    uri, nodes = journal
    with (
        HaPair(tmp_path, settings={"dfs.namenode.shared.edits.dir": uri, **PATIENT, **IDLE}) as pair,
        closing(HdfsClient(pair.service, ClientSettings(conf_dir=pair.conf_dir))) as client,
    ):
        client.make_folder("/tests", parents=True)
        with Busy(client, "/tests") as busy:
            for journal_dies in (False, True):
                killed = pair.active
                if journal_dies:
                    nodes[0].kill()
                pair.kill(killed)
                pair.activate(1 - killed)
                busy.wait(2)
                with busy.paused():
                    pair.restart(killed)
            # The old one still considers itself active; the journal rejects its edits, and it ends.
            replaced = pair.active
            pair.activate(1 - replaced)
            busy.wait(2)
        for number in range(busy.rounds):
            assert read_all(client, f"/tests/{number}.small") == DATA[:1000]
            assert read_all(client, f"/tests/{number}.renamed") == DATA
