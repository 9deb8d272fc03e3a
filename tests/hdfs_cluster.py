"""A real HDFS for tests: NameNode and DataNodes of Hadoop 3.3.6.

    with HdfsCluster(tmp_path, num_datanodes=2, replication=2) as cluster:
        store = open_store(f"{cluster.uri}/some/folder")
        cluster.hang(0)

By default all servers listen on free loopback ports. `links=True` (root) puts each DataNode into a separate network
namespace, with a rate limit if `rate_mbit` is given. Starting takes about 3 s (10 s more the first time in a clone, see
`_prepared`), and each process needs 180 MB. The servers end with the `with` block, and also if this process is killed.

DataNodes are numbered from 0; `cluster.nodes[i]` is the address for data transfer of number `i`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pwd
import re
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

import hadoop
from hdfs_links import Links, links_missing
from registry import free_port

_START_S = 300.0
"""Long, only to end a hanging test run: on a busy machine a start takes a minute."""
_PROTOCOL = "org.apache.hadoop.hdfs.protocol.ClientProtocol"
_FAST = {
    "dfs.heartbeat.interval": "1",
    "dfs.namenode.heartbeat.recheck-interval": "1000",
    "dfs.namenode.stale.datanode.interval": "3000",
    "dfs.namenode.redundancy.interval.seconds": "1",
}
_BLOCK = re.compile(r"^\d+\. BP-\S+:(blk_\d+)_\d+ len=(\d+).*?(?:\[(.*)\])?$", re.MULTILINE)
_NODE = re.compile(r"DatanodeInfoWithStorage\[([\d.]+:\d+),")

_reason = hadoop.missing()
needs_hdfs = [pytest.mark.hdfs, pytest.mark.skipif(bool(_reason), reason=_reason)]
"""Marks for tests that start a cluster."""
needs_links = [
    *needs_hdfs,
    pytest.mark.root,
    pytest.mark.skipif(bool(links_missing()), reason=links_missing()),
]
"""Marks for tests that start a cluster with `links` or with `disk_mib`."""


@dataclass(frozen=True)
class Located:
    """One block of a file, as reported by the NameNode's fsck."""

    block: str
    """The name of its file on a DataNode, e.g. blk_1073741825."""
    size_bytes: int
    nodes: tuple[str, ...]


class HdfsCluster:
    """A cluster for a `with` block, with all its data and logs in `folder`.

    `fast_detection`: an unreachable DataNode is stale after 3 s and dead after 12 s, instead of 10 minutes.
    `disk_mib`: DataNode to the size of its disk, which `fill` can fill (root). `settings`: more for hdfs-site.xml.
    `port`: of the NameNode, by default a free one. `address`: of all servers, without links. `is_brief`,
    `java_options`: see `hadoop.java`. In the folder of an earlier cluster, the new one has its files.
    """

    def __init__(
        self,
        folder: Path,
        *,
        num_datanodes: int = 1,
        replication: int = 1,
        links: bool = False,
        rate_mbit: int | None = None,
        fast_detection: bool = False,
        disk_mib: Mapping[int, int] | None = None,
        settings: Mapping[str, str] | None = None,
        port: int | None = None,
        is_brief: bool = True,
        java_options: Sequence[str] = (),
        address: str = "127.0.0.1",
    ) -> None:
        self.folder = folder / "hdfs"
        self.uri = ""
        self.nodes: list[str] = []
        self.namenode_http = ""
        self.datanode_http: list[str] = []
        self.datanode_rpc: list[str] = []
        self.datanodes: list[subprocess.Popen[bytes]] = []
        self.namenode: subprocess.Popen[bytes] | None = None
        self._num_datanodes = num_datanodes
        self._replication = replication
        self._links = Links(num_datanodes, rate_mbit) if links or rate_mbit is not None else None
        self._disk_mib = disk_mib or {}
        self._settings = {**(_FAST if fast_detection else {}), **(settings or {})}
        self._port = port
        self._is_brief = is_brief
        self._java_options = java_options
        self._address = address
        self._commands: list[list[str]] = []
        self._ends = contextlib.ExitStack()
        # Servers are killed when the thread that started them ends, so one thread starts all and exists until the end.
        self._starter = ThreadPoolExecutor(1)

    def __enter__(self) -> HdfsCluster:
        try:
            self._ends.callback(self._starter.shutdown)
            if self._links is not None:
                self._ends.enter_context(self._links)
            self._ends.callback(self._end_servers)
            self._start_all()
        except BaseException:
            self._ends.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ends.close()

    # Locations.

    def where(self, path: str, *, replicas: int = 0) -> list[Located]:
        """The blocks of a file in HDFS, from the NameNode's fsck and not from our own client.

        A file is complete as soon as one replica of each block is reported to the NameNode; this waits for `replicas`.
        """
        found = self._check(path)
        if any(len(block.nodes) < replicas for block in found):
            self._wait("a replica", lambda: all(len(block.nodes) >= replicas for block in self._check(path)))
            return self._check(path)
        return found

    def _check(self, path: str) -> list[Located]:
        names = ("files", "blocks", "locations", "openforwrite")
        query = urllib.parse.urlencode({"ugi": "root", "path": path, **dict.fromkeys(names, "1")})
        with urllib.request.urlopen(f"http://{self.namenode_http}/fsck?{query}", timeout=180) as answer:
            text = answer.read().decode()
        if "does not exist" in text:
            raise FileNotFoundError(path)
        return [
            Located(match[1], int(match[2]), tuple(_NODE.findall(match[3] or ""))) for match in _BLOCK.finditer(text)
        ]

    def blocks(self, datanode: int | None = None) -> list[Path]:
        """The files of finalized blocks on all DataNodes, or on one of them."""
        which = "*" if datanode is None else str(datanode)
        found = self.folder.glob(f"datanode{which}/current/BP-*/current/finalized/**/blk_*")
        return [path for path in found if path.suffix != ".meta"]

    def tool(self, name: str, *arguments: str) -> str:
        """Run one of Hadoop's tools, e.g. `fs.FsShell`, as HDFS's superuser; returns its output."""
        command = hadoop.tool(self.folder / "conf", name, *arguments)
        env = {name: value for name, value in os.environ.items() if name != "HADOOP_USER_NAME"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=_START_S, check=False, env=env)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def ask(self, method: str, *values: int | str) -> None:
        """Send a request of Hadoop's ClientProtocol as HDFS's superuser, with the values of its first fields: like a
        tool, without the 0.7 s of processor time for the tool's start."""
        from bootseer.hdfs.protobuf import field
        from bootseer.hdfs.rpc import RpcConnection

        host, _, port = self.uri.removeprefix("hdfs://").rpartition(":")
        user = pwd.getpwuid(os.geteuid()).pw_name
        with contextlib.closing(RpcConnection(host, int(port), _PROTOCOL, user, timeout_s=_START_S)) as connection:
            connection.call(method, b"".join(field(*each) for each in enumerate(values, 1)), _START_S)

    # Faults.

    def corrupt(self, what: str | Path, *, datanode: int | None = None, block: int = 0, offset: int = 0) -> int:
        """Flip a bit of the byte at `offset` of a block, on one DataNode or on all, and return the number of replicas.

        `what` is a file in HDFS or a path from `blocks`.
        """
        files = [what] if isinstance(what, Path) else []
        if isinstance(what, str):
            name = self.where(what)[block].block
            files = [path for path in self.blocks(datanode) if path.name == name]
        for path in files:
            with path.open("r+b") as file:
                file.seek(offset)
                flipped = bytes([file.read(1)[0] ^ 1])
                file.seek(offset)
                file.write(flipped)
        return len(files)

    def set_rate(self, i: int, mbit: int | None) -> None:
        """Limit the link of a DataNode in both directions; None lifts the limit."""
        assert self._links is not None, "this cluster has no links"
        self._links.set_rate(i, mbit)

    def cut(self, i: int) -> None:
        """Set the link of a DataNode down: packets in both directions are lost."""
        assert self._links is not None, "this cluster has no links"
        self._links.set_up(i, is_up=False)

    def join(self, i: int) -> None:
        """Set the link of a DataNode up, and wait until the NameNode lists it as live."""
        assert self._links is not None, "this cluster has no links"
        self._links.set_up(i, is_up=True)
        self._wait(f"DataNode {i}", lambda: any(node["xferaddr"] == self.nodes[i] for node in self._live()))

    def inside(self, i: int, command: Sequence[str]) -> list[str]:
        """The command to run another command on the host of DataNode `i`: files that it writes are on that node."""
        assert self._links is not None, "this cluster has no links"
        return self._links.inside(i, command)

    def hang(self, i: int) -> None:
        """Stop a DataNode with SIGSTOP: its connections stay open, but it does not answer."""
        _hang(self.datanodes[i])

    def resume(self, i: int) -> None:
        """Continue a hanging DataNode."""
        self.datanodes[i].send_signal(signal.SIGCONT)

    def kill(self, i: int) -> None:
        """Kill a DataNode with SIGKILL; its connections break, and its data is kept for `restart`."""
        _end(self.datanodes[i])

    def wait_until_dead(self, i: int) -> None:
        """Wait until a DataNode that ended or hangs counts as dead: 12 s with `fast_detection`."""
        self._wait("the NameNode", lambda: all(node["xferaddr"] != self.nodes[i] for node in self._live()))

    def restart(self, i: int) -> None:
        """Restart a DataNode at the same address with the same data, and wait until it has reported its blocks."""
        self.kill(i)
        self.datanodes[i] = self._start(f"datanode{i}", self._commands[i])
        self._wait(f"DataNode {i}", lambda: self._serves(i))

    def hang_namenode(self) -> None:
        """Stop the NameNode with SIGSTOP."""
        assert self.namenode is not None
        _hang(self.namenode)

    def resume_namenode(self) -> None:
        """Continue a hanging NameNode."""
        assert self.namenode is not None
        self.namenode.send_signal(signal.SIGCONT)

    def kill_namenode(self) -> None:
        """Kill the NameNode with SIGKILL."""
        assert self.namenode is not None
        _end(self.namenode)

    def restart_namenode(self) -> None:
        """Restart the NameNode at the same address, and wait until all running DataNodes have registered."""
        self.kill_namenode()
        self.namenode = self._start("namenode", self._java("namenode.NameNode"))
        self._wait("the NameNode", self._operational)

    def fill(self, i: int, *, wait: bool = True) -> None:
        """Fill the disk of a DataNode (`disk_mib`). `wait`: return only when this is reported to the NameNode."""
        assert i in self._disk_mib
        disk = self.folder / f"datanode{i}"

        def fill() -> bool:
            free = os.statvfs(disk)
            with (disk / "filler").open("ab") as file:
                if free.f_bavail:
                    os.posix_fallocate(file.fileno(), file.tell(), free.f_bavail * free.f_frsize)
            return not free.f_bavail

        fill()
        if wait:  # again if the DataNode has deleted a block since
            self._wait("the NameNode", lambda: fill() and self._room(i) == 0)

    def make_room(self, i: int) -> None:
        """Undo `fill`, and wait until this is reported to the NameNode."""
        (self.folder / f"datanode{i}" / "filler").unlink()
        self._wait("the NameNode", lambda: self._room(i) > 0)

    def stop(self) -> None:
        """Shut the servers down cleanly, which takes up to 15 s, before the `with` block ends."""
        processes = self._processes()
        for process in processes:
            process.send_signal(signal.SIGCONT)
            process.terminate()
        until = time.monotonic() + 120
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))

    # Setup.

    def _start_all(self) -> None:
        host = self._address if self._links is None else self._links.here
        self.uri = f"hdfs://{host}:{self._port or free_port()}"
        self.namenode_http = f"{host}:{free_port()}"
        self._write_conf()
        if not (self.folder / "namenode").exists():
            self._format()
        self.namenode = self._start("namenode", self._java("namenode.NameNode"))
        for i in range(self._num_datanodes):
            (self.folder / f"datanode{i}").mkdir(exist_ok=True)
            if i in self._disk_mib:
                self._mount_disk(i)
            self._commands.append(self._datanode(i))
            self.datanodes.append(self._start(f"datanode{i}", self._commands[i]))
        self._wait("HDFS", self._operational)

    def _format(self) -> None:
        if not self._java_options and copy_formatted(self.folder / "namenode"):
            return
        with (self.folder / "format.log").open("wb") as log:
            format_it = self._java("namenode.NameNode", "-format", "-force", "-nonInteractive")
            subprocess.run(format_it, stdout=log, stderr=log, check=True, timeout=_START_S)

    def _write_conf(self) -> None:
        core = {
            "fs.defaultFS": self.uri,
            "hadoop.tmp.dir": f"{self.folder}/scratch",
            "hadoop.security.group.mapping": "org.apache.hadoop.security.ShellBasedUnixGroupsMapping",
        }
        hdfs = {
            "dfs.replication": str(self._replication),
            "dfs.namenode.fs-limits.min-block-size": "1048576",
            "dfs.namenode.name.dir": f"file://{self.folder}/namenode",
            "dfs.namenode.http-address": self.namenode_http,
            "dfs.permissions.enabled": "false",
            "dfs.webhdfs.enabled": "false",
            "dfs.namenode.safemode.threshold-pct": "0.99",
            "dfs.namenode.safemode.extension": "0",
            "dfs.namenode.datanode.registration.ip-hostname-check": "false",
            "dfs.client.use.datanode.hostname": "false",
            **self._settings,
        }
        hadoop.write_conf(self.folder / "conf", {"core-site.xml": core, "hdfs-site.xml": hdfs})

    def _java(self, server: str, *arguments: str) -> list[str]:
        return hadoop.java(
            self.folder / "conf", server, *arguments, is_brief=self._is_brief, options=self._java_options
        )

    def _datanode(self, i: int) -> list[str]:
        if self._links is None:
            host, (data, rpc, http) = self._address, (free_port(), free_port(), free_port())
        else:
            host, (data, rpc, http) = self._links.there(i), (9866, 9867, 9864)
        self.nodes.append(f"{host}:{data}")
        self.datanode_http.append(f"{host}:{http}")
        self.datanode_rpc.append(f"{host}:{rpc}")
        settings = {
            "dfs.datanode.data.dir": f"file://{self.folder}/datanode{i}",
            "dfs.datanode.address": f"{host}:{data}",
            "dfs.datanode.ipc.address": f"{host}:{rpc}",
            "dfs.datanode.http.address": f"{host}:{http}",
            "dfs.datanode.hostname": host,
        }
        if i in self._disk_mib:
            # A DataNode accepts a block only if it has room for one of this size.
            settings["dfs.blocksize"] = "1048576"
        command = self._java(
            "datanode.DataNode", *(word for key, value in settings.items() for word in ("-D", f"{key}={value}"))
        )
        return command if self._links is None else self._links.inside(i, command)

    def _mount_disk(self, i: int) -> None:
        disk = self.folder / f"datanode{i}"
        options = f"size={self._disk_mib[i]}m,mode=0700"
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "datanode", disk], check=True)
        # The servers must end first: otherwise the disk would be busy.
        self._ends.callback(lambda: subprocess.run(["umount", disk], check=False))
        self._ends.callback(self._end_servers)

    def _start(self, name: str, command: list[str]) -> subprocess.Popen[bytes]:
        def start() -> subprocess.Popen[bytes]:
            with (self.folder / f"{name}.log").open("ab") as log:
                words = ["setpriv", "--pdeathsig", "KILL", *command]
                return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)

        return self._starter.submit(start).result()

    def _processes(self) -> list[subprocess.Popen[bytes]]:
        return [*self.datanodes, *([] if self.namenode is None else [self.namenode])]

    def _end_servers(self) -> None:
        processes = self._processes()
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()

    # State.

    def _wait(self, what: str, ready: Callable[[], bool]) -> None:
        until = time.monotonic() + _START_S
        before = {process.pid for process in self._processes() if process.poll() is not None}
        while time.monotonic() < until:
            if any(process.poll() is not None and process.pid not in before for process in self._processes()):
                raise RuntimeError(f"{what} does not start: {self._log_ends()}")
            with contextlib.suppress(OSError, ValueError, LookupError):
                if ready():
                    return
            time.sleep(0.1)
        raise RuntimeError(f"{what} is not ready after {_START_S} s: {self._log_ends()}")

    def _operational(self) -> bool:
        state = hadoop.bean(self.namenode_http, "Hadoop:service=NameNode,name=FSNamesystemState")
        running = sum(_runs(process) for process in self.datanodes)
        if state["NumLiveDataNodes"] != running or state["FSState"] != "Operational":
            return False
        # A DataNode is live from its registration on. Its first heartbeat reports its capacity, without which it gets
        # no blocks; then it reports its blocks.
        activity = hadoop.bean(self.namenode_http, "Hadoop:service=NameNode,name=NameNodeActivity")
        reports = activity["StorageBlockReportNumOps"]
        return bool(reports >= running and all(node["capacity"] > 0 for node in self._live()))

    def _room(self, i: int) -> int:
        """The free space of a DataNode in bytes, as reported to the NameNode."""
        (room,) = (node["remaining"] for node in self._live() if node["xferaddr"] == self.nodes[i])
        return int(room)

    def _live(self) -> list[dict[str, Any]]:
        found = json.loads(hadoop.bean(self.namenode_http, "Hadoop:service=NameNode,name=NameNodeInfo")["LiveNodes"])
        return list(found.values())

    def _serves(self, i: int) -> bool:
        state = hadoop.bean(self.datanode_http[i], "Hadoop:service=DataNode,name=DataNodeInfo")
        actors = json.loads(state["BPServiceActorInfo"])
        # It reports its blocks right after it has registered.
        return all(actor["ActorState"] == "RUNNING" and int(actor["LastBlockReport"]) < 60 for actor in actors)

    def _log_ends(self) -> str:
        return "\n".join(path.read_text(errors="replace")[-1500:] for path in self.folder.glob("*.log"))


def copy_formatted(folder: Path) -> bool:
    """Copy the data of a formatted NameNode to this folder; returns False if Hadoop has to format it."""
    if (prepared := _prepared()) is None:
        return False
    shutil.copytree(prepared / "namenode", folder)
    # A new identity: a DataNode that finds another cluster at the port of its NameNode does not join it.
    version, own = folder / "current/VERSION", secrets.randbits(31)
    version.write_text(re.sub(r"(?m)^(clusterID=CID-|blockpoolID=BP-)[^-]+", rf"\g<1>{own}", version.read_text()))
    return True


def _prepared() -> Path | None:
    """The folder of `hadoop.prepared_folder`. If missing, it is created with a temporary cluster (10 s)."""
    folder = hadoop.prepared_folder()
    if folder is None or not os.access(folder.parent, os.W_OK):
        return folder if folder is not None and folder.exists() else None
    with (folder.parent / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=folder.parent) as name:
                work, new = Path(name), Path(name) / "new"
                with HdfsCluster(work, java_options=[f"-XX:DumpLoadedClassList={work}/%p.names"]) as cluster:
                    cluster.tool("fs.FsShell", "-put", __file__, "/file")
                    cluster.where("/file")
                    cluster.stop()
                # The state after formatting, without later edits.
                since = shutil.ignore_patterns("edits_*", "in_use.lock")
                shutil.copytree(cluster.folder / "namenode", new / "namenode", ignore=since)
                (new / "namenode/current/seen_txid").write_text("0\n")
                loaded = {row for path in work.glob("*.names") for row in path.read_text().splitlines()}
                hadoop.archive_classes(sorted(row for row in loaded if not row.startswith("#")), new / hadoop.ARCHIVE)
                new.rename(folder)
    return folder


def _hang(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGSTOP)
    # On a busy machine its threads continue for a while.
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)


def _end(process: subprocess.Popen[bytes]) -> None:
    # SIGKILL also ends a stopped process.
    process.kill()
    process.wait()


def _runs(process: subprocess.Popen[bytes]) -> bool:
    """Whether it has neither ended nor been stopped."""
    return process.poll() is None and "T" not in Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2]
