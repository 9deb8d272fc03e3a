"""A real HDFS for tests: NameNode and DataNodes of Hadoop 3.3.6 on free loopback ports, stopped by their pids.

    with HdfsCluster(tmp_path, num_datanodes=2, replication=2) as cluster:
        store = open_store(f"{cluster.uri}/some/folder")
        cluster.datanodes[0].send_signal(signal.SIGSTOP)

`scripts/hadoop.sh` fetches it. Starting takes about 7 s, and each process needs 180 MB.
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
from pathlib import Path
from types import TracebackType

import pytest

from registry import free_port

HADOOP = Path(__file__).parents[1] / ".hadoop" / "3.3.6"
_START_S = 90.0
_SERVER = "org.apache.hadoop.hdfs.server"


def _reason() -> str:
    if shutil.which("java") is None:
        return "java is not installed"
    return "" if (HADOOP / "stamp").exists() else "Hadoop is not there; scripts/hadoop.sh fetches it"


needs_hdfs = [pytest.mark.hdfs, pytest.mark.skipif(bool(_reason()), reason=_reason())]
"""Marks for tests that start a cluster."""


class HdfsCluster:
    """A cluster that lives as long as the `with` block; everything that it stores and logs lies in `folder`."""

    def __init__(self, folder: Path, *, num_datanodes: int = 1, replication: int = 1) -> None:
        self.folder = folder / "hdfs"
        self.datanodes: list[subprocess.Popen[bytes]] = []
        self.uri = ""
        self._num_datanodes = num_datanodes
        self._replication = replication
        self.namenode: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> HdfsCluster:
        port, self._http_port = free_port(), free_port()
        self.uri = f"hdfs://127.0.0.1:{port}"
        self._write_settings()
        try:
            format_log = self.folder / "format.log"
            with format_log.open("wb") as log:
                subprocess.run(
                    self._java("namenode.NameNode", "-format", "-force", "-nonInteractive"),
                    stdout=log,
                    stderr=log,
                    check=True,
                    timeout=_START_S,
                )
            self.namenode = self._start("namenode", "namenode.NameNode")
            for number in range(self._num_datanodes):
                data, rpc, http = free_port(), free_port(), free_port()
                settings = {
                    "dfs.datanode.data.dir": f"file://{self.folder}/datanode{number}",
                    "dfs.datanode.address": f"127.0.0.1:{data}",
                    "dfs.datanode.ipc.address": f"127.0.0.1:{rpc}",
                    "dfs.datanode.http.address": f"127.0.0.1:{http}",
                    "dfs.datanode.hostname": "127.0.0.1",
                }
                arguments = [word for key, value in settings.items() for word in ("-D", f"{key}={value}")]
                self.datanodes.append(self._start(f"datanode{number}", "datanode.DataNode", *arguments))
            self._wait_until_ready()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop()

    def blocks(self) -> list[Path]:
        """The files in which the DataNodes keep finished blocks."""
        found = self.folder.glob("datanode*/current/BP-*/current/finalized/**/blk_*")
        return [path for path in found if path.suffix != ".meta"]

    def _stop(self) -> None:
        for process in [*self.datanodes, self.namenode]:
            if process is not None:
                # SIGKILL ends a stopped process too.
                process.kill()
                process.wait()

    def _write_settings(self) -> None:
        settings = {
            "core-site.xml": {
                "fs.defaultFS": self.uri,
                "hadoop.tmp.dir": f"{self.folder}/scratch",
                "hadoop.security.group.mapping": "org.apache.hadoop.security.ShellBasedUnixGroupsMapping",
            },
            "hdfs-site.xml": {
                "dfs.replication": str(self._replication),
                "dfs.namenode.fs-limits.min-block-size": "1048576",
                "dfs.namenode.name.dir": f"file://{self.folder}/namenode",
                "dfs.namenode.http-address": f"127.0.0.1:{self._http_port}",
                "dfs.permissions.enabled": "false",
                "dfs.webhdfs.enabled": "false",
                "dfs.namenode.safemode.threshold-pct": "0.99",
                "dfs.namenode.safemode.extension": "0",
                "dfs.namenode.datanode.registration.ip-hostname-check": "false",
                "dfs.client.use.datanode.hostname": "false",
            },
        }
        conf = self.folder / "conf"
        conf.mkdir(parents=True)
        for file, values in settings.items():
            rows = "".join(
                f"<property><name>{key}</name><value>{value}</value></property>" for key, value in values.items()
            )
            (conf / file).write_text(f"<configuration>{rows}</configuration>")
        appender = "log4j.appender.console"
        (conf / "log4j.properties").write_text(
            f"log4j.rootLogger=INFO,console\n{appender}=org.apache.log4j.ConsoleAppender\n{appender}.target=System.err\n"
            f"{appender}.layout=org.apache.log4j.PatternLayout\n"
            f"{appender}.layout.ConversionPattern=%d{{HH:mm:ss,SSS}} %p %c{{2}}: %m%n\n"
        )

    def _java(self, server: str, *arguments: str) -> list[str]:
        # The virtual machine expands the star itself.
        class_path = f"{self.folder}/conf:{HADOOP}:{HADOOP}/lib/*"
        options = ["-Xmx512m", "-Djava.net.preferIPv4Stack=true"]
        return ["java", *options, "-cp", class_path, f"{_SERVER}.{server}", *arguments]

    def _start(self, name: str, server: str, *arguments: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("wb") as log:
            return subprocess.Popen(
                self._java(server, *arguments), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def _wait_until_ready(self) -> None:
        query = "Hadoop:service=NameNode,name=FSNamesystemState"
        url = f"http://127.0.0.1:{self._http_port}/jmx?qry={query}"
        until = time.monotonic() + _START_S
        while time.monotonic() < until:
            for process in [*self.datanodes, self.namenode]:
                if process is not None and process.poll() is not None:
                    raise RuntimeError(f"HDFS does not start: {self._log_ends()}")
            with contextlib.suppress(OSError, ValueError, LookupError):
                with urllib.request.urlopen(url, timeout=5) as answer:
                    state = json.load(answer)["beans"][0]
                if state["NumLiveDataNodes"] == self._num_datanodes and state["FSState"] == "Operational":
                    return
            time.sleep(0.1)
        raise RuntimeError(f"HDFS is not ready after {_START_S} s: {self._log_ends()}")

    def _log_ends(self) -> str:
        return "\n".join(path.read_text(errors="replace")[-1500:] for path in self.folder.glob("*.log"))


def resume(process: subprocess.Popen[bytes]) -> None:
    """Let a process go on that SIGSTOP has stopped."""
    os.kill(process.pid, signal.SIGCONT)
