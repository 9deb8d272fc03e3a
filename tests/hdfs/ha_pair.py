"""Two NameNodes of Hadoop 3.3.6 that stand for one service, with their edits in a folder that both see. No ZooKeeper:
the test says which one is active.

    with HaPair(tmp_path, num_datanodes=2) as pair:
        client = HdfsClient(pair.service, NativeSettings(conf_dir=pair.conf_dir))
        pair.kill(pair.active)
        pair.activate(1 - pair.active)

Servers are stopped by their process ids, and die with the process that started them.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import hadoop
from bootseer.errors import BootseerError
from bootseer.hdfs.protobuf import Message, field
from bootseer.hdfs.rpc import RemoteError, RpcConnection
from registry import free_port

_START_S = 90.0
_CALL_S = 30.0
_PROTOCOL = "org.apache.hadoop.ha.HAServiceProtocol"
_NAMES = ("one", "two")
_ACTIVE = 1


class HaPair:
    """The pair and its DataNodes. Number 0 is active at first."""

    service = "checkpoints"

    def __init__(self, folder: Path, *, num_datanodes: int = 2, replication: int = 1) -> None:
        self.folder = folder / "pair"
        self.conf_dir = str(folder / "client")
        self.active = 0
        self.addresses = [f"127.0.0.1:{free_port()}" for _ in _NAMES]
        self.namenodes: list[subprocess.Popen[bytes]] = []
        self.datanodes: list[subprocess.Popen[bytes]] = []
        self._http = [f"127.0.0.1:{free_port()}" for _ in _NAMES]
        self._num_datanodes = num_datanodes
        self._replication = replication
        # Servers are told to die with the thread that has started them, so all are started by one that stays.
        self._starter = ThreadPoolExecutor(1)

    def __enter__(self) -> HaPair:
        try:
            self._start_all()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for process in (*self.datanodes, *self.namenodes):
            process.kill()
            process.wait()
        self._starter.shutdown()

    def activate(self, number: int) -> None:
        """Let this NameNode be the active one. The other one must not be active any more."""
        host, _, port = self.addresses[number].rpartition(":")
        connection = RpcConnection(host, int(port), _PROTOCOL, "root", timeout_s=_CALL_S)
        try:
            connection.call("transitionToActive", field(1, field(1, 0)), _CALL_S)
        finally:
            connection.close()
        self.active = number
        self._wait("the active NameNode", lambda: self._has_all(number))

    def stand_by(self, number: int) -> None:
        """Let this NameNode be active no more."""
        host, _, port = self.addresses[number].rpartition(":")
        connection = RpcConnection(host, int(port), _PROTOCOL, "root", timeout_s=_CALL_S)
        try:
            connection.call("transitionToStandby", field(1, field(1, 0)), _CALL_S)
        finally:
            connection.close()

    def kill(self, number: int) -> None:
        """End a NameNode with SIGKILL."""
        self.namenodes[number].kill()
        self.namenodes[number].wait()

    def restart(self, number: int) -> None:
        """Start a NameNode that was killed; it comes up as the one that waits."""
        self.namenodes[number] = self._start(f"namenode{number}", self._namenode(number))
        self._wait("a NameNode", lambda: self._state(number) is not None)

    def hang(self, number: int) -> None:
        """Stop a NameNode with SIGSTOP: its connections stay, and nothing answers."""
        self.namenodes[number].send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.namenodes[number].pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self, number: int) -> None:
        """Let a NameNode that hangs go on."""
        self.namenodes[number].send_signal(signal.SIGCONT)

    # How it is made.

    def _start_all(self) -> None:
        # As docs/hdfs.md writes it for clients.
        service = {
            "dfs.nameservices": self.service,
            f"dfs.ha.namenodes.{self.service}": ",".join(_NAMES),
            **{
                f"dfs.namenode.rpc-address.{self.service}.{name}": address
                for name, address in zip(_NAMES, self.addresses, strict=True)
            },
        }
        hadoop.write_conf(Path(self.conf_dir), {"hdfs-site.xml": service})
        core = {
            "fs.defaultFS": f"hdfs://{self.service}",
            "hadoop.tmp.dir": f"{self.folder}/scratch",
            "hadoop.security.group.mapping": "org.apache.hadoop.security.ShellBasedUnixGroupsMapping",
        }
        hdfs = {
            **service,
            "dfs.namenode.shared.edits.dir": f"file://{self.folder}/edits",
            "dfs.ha.tail-edits.period": "1",
            "dfs.ha.standby.checkpoints": "false",
            "dfs.replication": str(self._replication),
            "dfs.blocksize": "1048576",
            "dfs.namenode.fs-limits.min-block-size": "1048576",
            "dfs.permissions.enabled": "false",
            "dfs.webhdfs.enabled": "false",
            "dfs.namenode.safemode.extension": "0",
            "dfs.heartbeat.interval": "1",
            "dfs.namenode.datanode.registration.ip-hostname-check": "false",
        }
        for number, name in enumerate(_NAMES):
            hdfs[f"dfs.namenode.name.dir.{self.service}.{name}"] = f"file://{self.folder}/namenode{number}"
            hdfs[f"dfs.namenode.http-address.{self.service}.{name}"] = self._http[number]
        hadoop.write_conf(self.folder / "conf", {"core-site.xml": core, "hdfs-site.xml": hdfs})
        with (self.folder / "format.log").open("wb") as log:
            format_it = [*self._namenode(0), "-format", "-force", "-nonInteractive"]
            subprocess.run(format_it, stdout=log, stderr=log, check=True, timeout=_START_S)
        shutil.copytree(self.folder / "namenode0", self.folder / "namenode1")
        self.namenodes = [self._start(f"namenode{number}", self._namenode(number)) for number in range(2)]
        self.datanodes = [
            self._start(f"datanode{number}", self._datanode(number)) for number in range(self._num_datanodes)
        ]
        self._wait("the pair", lambda: all(self._state(number) is not None for number in range(2)))
        self.activate(0)

    def _namenode(self, number: int) -> list[str]:
        conf = self.folder / "conf"
        return hadoop.java(conf, "namenode.NameNode", "-D", f"dfs.ha.namenode.id={_NAMES[number]}")

    def _datanode(self, number: int) -> list[str]:
        settings = {
            "dfs.datanode.data.dir": f"file://{self.folder}/datanode{number}",
            "dfs.datanode.hostname": "127.0.0.1",
            **{f"dfs.datanode.{what}address": f"127.0.0.1:{free_port()}" for what in ("", "ipc.", "http.")},
        }
        words = (word for key, value in settings.items() for word in ("-D", f"{key}={value}"))
        return hadoop.java(self.folder / "conf", "datanode.DataNode", *words)

    def _start(self, name: str, command: list[str]) -> subprocess.Popen[bytes]:
        def start() -> subprocess.Popen[bytes]:
            with (self.folder / f"{name}.log").open("ab") as log:
                return subprocess.Popen(
                    ["setpriv", "--pdeathsig", "KILL", *command],
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                )  # fmt: skip

        return self._starter.submit(start).result()

    # Whether it runs.

    def _wait(self, what: str, ready: Callable[[], bool]) -> None:
        until = time.monotonic() + _START_S
        while time.monotonic() < until:
            with contextlib.suppress(OSError, ValueError, LookupError, BootseerError):
                if ready():
                    return
            time.sleep(0.1)
        logs = "\n".join(path.read_text(errors="replace")[-1500:] for path in self.folder.glob("*.log"))
        raise RuntimeError(f"{what} is not ready after {_START_S} s: {logs}")

    def _state(self, number: int) -> int | None:
        host, _, port = self.addresses[number].rpartition(":")
        connection = RpcConnection(host, int(port), _PROTOCOL, "root", timeout_s=5.0)
        try:
            return Message(connection.call("getServiceStatus", b"", 5.0)).number(1)
        except RemoteError:
            return None
        finally:
            connection.close()

    def _has_all(self, number: int) -> bool:
        """Whether it is active, has left its safe mode and knows all DataNodes."""
        with urllib.request.urlopen(
            f"http://{self._http[number]}/jmx?qry=Hadoop:service=NameNode,name=FSNamesystemState", timeout=5
        ) as answer:
            state: Any = json.load(answer)["beans"][0]
        return bool(
            self._state(number) == _ACTIVE
            and state["FSState"] == "Operational"
            and state["NumLiveDataNodes"] == self._num_datanodes
        )
