"""Router-based federation: two routers for two clusters, of which one has two NameNodes. Needs an installed Hadoop."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

import hadoop
from hdfs_cluster import HdfsCluster, needs_hdfs
from registry import free_port

pytest.importorskip("hdfs_native", reason="extra hdfs")

from bootseer.errors import BootseerError, PermanentError
from bootseer.hdfs.addresses import ClientSettings
from bootseer.hdfs.client import HdfsClient
from hdfs.ha_pair import DATA, Busy, HaPair
from hdfs.test_names import LosesAnswer
from hdfs.whole_files import read_all

pytestmark = [*needs_hdfs, pytest.mark.skipif(bool(hadoop.router_missing()), reason=hadoop.router_missing())]
_START_S = 120.0
_SERVICE = "federation"
_STORE = "org.apache.hadoop.hdfs.server.federation.store.driver.impl.StateStoreFileImpl"
_ADMIN = "hdfs.tools.federation.RouterAdmin"


class Routers:
    """Two routers with /pair and /other mounted; their state store is in a shared folder."""

    def __init__(self, folder: Path, pair: HaPair, other: HdfsCluster) -> None:
        self.addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
        self.processes: list[subprocess.Popen[bytes]] = []
        self.conf_dir = folder / "client"
        self._folder = folder
        store = folder / "store"
        store.mkdir(parents=True)
        settings = {
            "dfs.nameservices": f"{pair.service},other",
            f"dfs.ha.namenodes.{pair.service}": "one,two",
            f"dfs.namenode.rpc-address.{pair.service}.one": pair.addresses[0],
            f"dfs.namenode.rpc-address.{pair.service}.two": pair.addresses[1],
            "dfs.namenode.rpc-address.other": other.uri.removeprefix("hdfs://"),
            "dfs.federation.router.store.driver.class": _STORE,
            "dfs.federation.router.store.driver.file.directory": str(store),
            "dfs.federation.router.monitor.localnamenode.enable": "false",
            "dfs.federation.router.monitor.namenode": f"{pair.service}.one,{pair.service}.two,other",
            "dfs.federation.router.default.nameservice.enable": "false",
            "dfs.federation.router.safemode.extension": "1s",
            "dfs.federation.router.safemode.expiration": "30s",
            "dfs.federation.router.cache.ttl": "1s",
            "dfs.federation.router.heartbeat.interval": "1000",
            "hadoop.security.group.mapping": "org.apache.hadoop.security.ShellBasedUnixGroupsMapping",
        }
        for number, address in enumerate(self.addresses):
            own = {f"dfs.federation.router.{what}-address": f"127.0.0.1:{free_port()}" for what in ("admin", "http")}
            own |= {f"dfs.federation.router.{what}-bind-host": "127.0.0.1" for what in ("rpc", "admin", "http")}
            own |= {"dfs.federation.router.rpc-address": address, "dfs.federation.router.https-address": "127.0.0.1:0"}
            site = {**settings, **own}
            hadoop.write_conf(
                self._conf(number), {"hdfs-site.xml": site, "hdfs-rbf-site.xml": site, "core-site.xml": site}
            )
        service = {"dfs.nameservices": _SERVICE, f"dfs.ha.namenodes.{_SERVICE}": "0,1"}
        for number, address in enumerate(self.addresses):
            service[f"dfs.namenode.rpc-address.{_SERVICE}.{number}"] = address
        hadoop.write_conf(self.conf_dir, {"hdfs-site.xml": service})

    def __enter__(self) -> Routers:
        for number in range(2):
            with (self._folder / f"router{number}.log").open("ab") as log:
                command = hadoop.java(self._conf(number), "federation.router.DFSRouter")
                command = ["setpriv", "--pdeathsig", "KILL", *command]
                self.processes.append(subprocess.Popen(command, stdout=log, stderr=log))
        try:
            for path, cluster in (("/pair", HaPair.service), ("/other", "other")):
                command = hadoop.tool(self._conf(0), _ADMIN, "-add", path, cluster, path)
                _wait(lambda command=command: subprocess.run(command, check=False, capture_output=True).returncode == 0)
            for address in self.addresses:
                with closing(HdfsClient(address)) as client:
                    _wait(lambda client=client: len(list(client.list("/"))) == 2)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for number in range(2):
            self.kill(number)

    def kill(self, number: int) -> None:
        """Kill a router with SIGKILL."""
        self.processes[number].kill()
        self.processes[number].wait()

    def _conf(self, number: int) -> Path:
        return self._folder / f"router{number}"


def _wait(is_ready: Callable[[], bool]) -> None:
    until = time.monotonic() + _START_S
    while time.monotonic() < until:
        with contextlib.suppress(BootseerError):
            if is_ready():
                return
        time.sleep(0.5)
    raise RuntimeError("the routers do not start")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HaPair]:
    with HaPair(tmp_path_factory.mktemp("ha")) as running:
        yield running


@pytest.fixture(scope="module")
def routers(pair: HaPair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Routers]:
    folder = tmp_path_factory.mktemp("federation")
    with HdfsCluster(folder, num_datanodes=1) as other, Routers(folder / "routers", pair, other) as running:
        yield running


@pytest.fixture
def client(routers: Routers) -> Iterator[HdfsClient]:
    with closing(HdfsClient(_SERVICE, ClientSettings(conf_dir=str(routers.conf_dir)))) as opened:
        yield opened


def test_requests_that_no_cluster_can_serve_fail_at_once(client: HdfsClient) -> None:
    client.put("/pair/file", DATA)
    assert [entry.path for entry in client.list("/")] == ["/other", "/pair"]
    with pytest.raises(PermanentError, match="no eligible destination"):
        client.rename("/pair/file", "/other/file")
    with pytest.raises(PermanentError, match="Cannot find locations"):
        client.put("/elsewhere/file", DATA)
    assert read_all(client, "/pair/file") == DATA


def test_a_rename_whose_answer_is_lost_succeeds(routers: Routers) -> None:
    with (
        LosesAnswer(routers.addresses[0], b"rename2") as way,
        closing(HdfsClient(way.authority)) as client,
    ):
        client.put("/other/a", b"x")
        client.rename("/other/a", "/other/b")
        assert way.has_lost
        assert client.stat("/other/b").size_bytes == 1


def test_everything_continues_after_a_failover_and_when_a_router_is_killed(
    pair: HaPair, routers: Routers, client: HdfsClient
) -> None:
    with contextlib.ExitStack() as all_busy:
        several = [all_busy.enter_context(Busy(client, f"/{name}/busy", by_router=True)) for name in ("pair", "other")]
        for kill in (False, True):
            if kill:
                routers.kill(client._active)
            else:
                pair.stand_by(pair.active)
                pair.activate(1 - pair.active)
            for busy in several:
                busy.wait(2)
    assert client.fallback == client.reads().facts()["fallback"] == ""
