"""Two NameNodes of Hadoop 3.3.6 for one name service, with their edits in a shared folder. Without ZooKeeper: the test
decides which one is active, or an observer.

    with HaPair(tmp_path, num_datanodes=2) as pair:
        client = HdfsClient(pair.service, ClientSettings(conf_dir=pair.conf_dir))
        pair.kill(pair.active)
        pair.activate(1 - pair.active)

The servers are killed when the process that started them ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import hadoop
from bootseer.errors import BootseerError, NotFoundError
from bootseer.hdfs.client import HdfsClient
from bootseer.hdfs.protobuf import Message, field
from bootseer.hdfs.rpc import Login, RemoteError, RpcConnection
from hdfs.whole_files import read_all
from hdfs_cluster import copy_formatted
from registry import free_port
from waiting import DEADLINE_S

_CALL_S = 90.0
_PROTOCOL = "org.apache.hadoop.ha.HAServiceProtocol"
_NAMES = ("one", "two")
_PRINCIPAL = "dfs.namenode.kerberos.principal"
_ACTIVE, _OBSERVER = 1, 3
DATA = random.Random(11).randbytes(2_500_003)


class HaPair:
    """The pair and its DataNodes. Number 0 is active at first.

    `settings`: more for the servers' hdfs-site.xml, `client_settings` for the clients'. If these name a principal, the
    methods need a ticket of the NameNodes' own user.
    """

    service = "checkpoints"

    def __init__(
        self,
        folder: Path,
        *,
        num_datanodes: int = 1,
        replication: int = 1,
        settings: Mapping[str, str] | None = None,
        client_settings: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = folder / "pair"
        self.conf_dir = str(folder / "client")
        self.active = 0
        self.addresses = [f"127.0.0.1:{free_port()}" for _ in _NAMES]
        self.namenodes: list[subprocess.Popen[bytes]] = []
        self.datanodes: list[subprocess.Popen[bytes]] = []
        self._http = [f"127.0.0.1:{free_port()}" for _ in _NAMES]
        self._num_datanodes = num_datanodes
        self._replication = replication
        self._settings = settings or {}
        self._client_settings = client_settings or {}
        # Servers are killed when the thread that started them ends, so one thread starts all and exists until the end.
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
        """Make this NameNode active. The other one must not be active any more."""
        self._ask(number, "transitionToActive", field(1, field(1, 0)))
        self.active = number
        self._wait("the active NameNode", lambda: self._state(number) == _ACTIVE and self._has_all(number))

    def stand_by(self, number: int) -> None:
        """Make this NameNode a standby."""
        self._ask(number, "transitionToStandby", field(1, field(1, 0)))

    def observe(self, number: int) -> None:
        """Make this NameNode, which is a standby, an observer."""
        self._ask(number, "transitionToObserver", field(1, field(1, 0)))
        self._wait("the observer", lambda: self._state(number) == _OBSERVER)

    def kill(self, number: int) -> None:
        """Kill a NameNode with SIGKILL."""
        self.namenodes[number].kill()
        self.namenodes[number].wait()

    def restart_killed(self) -> None:
        """Restart the NameNodes that were killed."""
        for number, process in enumerate(self.namenodes):
            if process.poll() is not None:
                self.restart(number)

    def restart(self, number: int) -> None:
        """Restart a NameNode that was killed; it starts as a standby."""
        self.namenodes[number] = self._start(f"namenode{number}", self._namenode(number))
        self._wait("a NameNode", lambda: self._has_all(number))

    def hang(self, number: int) -> None:
        """Stop a NameNode with SIGSTOP: its connections stay open, but it does not answer."""
        self.namenodes[number].send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.namenodes[number].pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self, number: int) -> None:
        """Continue a hanging NameNode."""
        self.namenodes[number].send_signal(signal.SIGCONT)

    # Setup.

    def _start_all(self) -> None:
        # The settings of clients in docs/hdfs.md.
        service = {
            "dfs.nameservices": self.service,
            f"dfs.ha.namenodes.{self.service}": ",".join(_NAMES),
            **{
                f"dfs.namenode.rpc-address.{self.service}.{name}": address
                for name, address in zip(_NAMES, self.addresses, strict=True)
            },
        }
        hadoop.write_conf(Path(self.conf_dir), {"hdfs-site.xml": {**service, **self._client_settings}})
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
            **self._settings,
        }
        for number, name in enumerate(_NAMES):
            hdfs[f"dfs.namenode.name.dir.{self.service}.{name}"] = f"file://{self.folder}/namenode{number}"
            hdfs[f"dfs.namenode.http-address.{self.service}.{name}"] = self._http[number]
        hadoop.write_conf(self.folder / "conf", {"core-site.xml": core, "hdfs-site.xml": hdfs})
        if "dfs.namenode.shared.edits.dir" not in self._settings and copy_formatted(self.folder / "namenode0"):
            (self.folder / "edits/current").mkdir(parents=True)
            shutil.copy(self.folder / "namenode0/current/VERSION", self.folder / "edits/current")
        else:
            with (self.folder / "format.log").open("wb") as log:
                format_it = [*self._namenode(0), "-format", "-force", "-nonInteractive"]
                subprocess.run(format_it, stdout=log, stderr=log, check=True, timeout=DEADLINE_S)
        shutil.copytree(self.folder / "namenode0", self.folder / "namenode1")
        self.namenodes = [self._start(f"namenode{number}", self._namenode(number)) for number in range(2)]
        self.datanodes = [
            self._start(f"datanode{number}", self._datanode(number)) for number in range(self._num_datanodes)
        ]
        # A NameNode that becomes active before its DataNodes have registered would refuse to write.
        self._wait("the pair", lambda: all(self._has_all(number) for number in range(2)))
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

    # State.

    def _wait(self, what: str, ready: Callable[[], bool]) -> None:
        until = time.monotonic() + DEADLINE_S
        while time.monotonic() < until:
            with contextlib.suppress(OSError, ValueError, LookupError, BootseerError):
                if ready():
                    return
            time.sleep(0.1)
        logs = "\n".join(path.read_text(errors="replace")[-1500:] for path in self.folder.glob("*.log"))
        raise RuntimeError(f"{what} is not ready after {DEADLINE_S} s: {logs}")

    def _state(self, number: int) -> int | None:
        try:
            return Message(self._ask(number, "getServiceStatus", b"", 5.0)).number(1)
        except RemoteError:
            return None

    def _ask(self, number: int, method: str, request: bytes, timeout_s: float = _CALL_S) -> bytes:
        host, _, port = self.addresses[number].rpartition(":")
        secured = _PRINCIPAL in self._client_settings
        login = Login(self._client_settings, None) if secured else None
        user = "" if secured else "root"
        connection = RpcConnection(host, int(port), _PROTOCOL, user, timeout_s=timeout_s, login=login)
        try:
            return connection.call(method, request, timeout_s)
        finally:
            connection.close()

    def _has_all(self, number: int) -> bool:
        """Whether it answers and is not in safe mode, and all DataNodes have registered."""
        with urllib.request.urlopen(
            f"http://{self._http[number]}/jmx?qry=Hadoop:service=NameNode,name=FSNamesystemState", timeout=5
        ) as answer:
            state: Any = json.load(answer)["beans"][0]
        has_datanodes = state["FSState"] == "Operational" and state["NumLiveDataNodes"] == self._num_datanodes
        return bool(has_datanodes and self._state(number) is not None)


class Busy:
    """Repeatedly writes, reads, renames and removes files in a folder, in a thread, until the `with` block or an error.

    `by_router`: removing a file may fail because it is missing: the router repeats requests whose answer was lost.
    """

    def __init__(self, client: HdfsClient, folder: str, *, by_router: bool = False) -> None:
        self._client = client
        self._missing = (NotFoundError,) if by_router else ()
        self._folder = folder
        self._is_over = threading.Event()
        self._goes_on = threading.Event()
        self._goes_on.set()
        self.rounds = 0
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Busy:
        self._thread.start()
        self.wait(2)
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()
        if self.error is not None:
            raise self.error

    def wait(self, rounds: int) -> None:
        """Wait for this number of further complete rounds."""
        wanted = self.rounds + rounds
        until = time.monotonic() + DEADLINE_S
        while self.rounds < wanted and self.error is None:
            assert time.monotonic() < until, "no answer"
            time.sleep(0.02)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Begin no round in this block, so that a server that is started meanwhile gets the processor time."""
        self._goes_on.clear()
        try:
            yield
        finally:
            self._goes_on.set()

    def _run(self) -> None:
        try:
            while self._goes_on.wait() and not self._is_over.wait(0.1):
                self._round(f"{self._folder}/{self.rounds}")
                self.rounds += 1
        except BaseException as error:
            self.error = error

    def _round(self, path: str) -> None:
        client = self._client
        client.put(f"{path}.small", DATA[:1000])
        writer = client.create(f"{path}.long")
        writer.write(DATA)
        writer.close()
        (part,) = client.create_placed([f"{path}.part"], block_size=8 << 20)
        part.write(DATA)
        part.close()
        found = {entry.path: entry.size_bytes for entry in client.list(self._folder)}
        assert (found[f"{path}.small"], found[f"{path}.long"], found[f"{path}.part"]) == (1000, len(DATA), len(DATA))
        assert read_all(client, f"{path}.long") == read_all(client, f"{path}.part") == DATA
        client.rename(f"{path}.part", f"{path}.renamed")
        assert client.stat(f"{path}.renamed").size_bytes == len(DATA)
        with contextlib.suppress(*self._missing):
            client.delete(f"{path}.long")
