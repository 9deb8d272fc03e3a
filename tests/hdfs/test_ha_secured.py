"""A service of two NameNodes with Kerberos: failover under load, observers, no active NameNode, and no KDC."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from hdfs_cluster import needs_hdfs
from kdc import REALM, Kdc, java_options, kdc_missing, secured

pytest.importorskip("hdfs_native", reason="extra hdfs")

from bootseer.errors import AccessError, TransientError
from bootseer.hdfs.addresses import ClientSettings
from bootseer.hdfs.client import HdfsClient
from bootseer.hdfs.protobuf import delimited, field
from hdfs.ha_pair import DATA, Busy, HaPair
from hdfs.whole_files import read_all, read_ranges

pytestmark = [*needs_hdfs, pytest.mark.skipif(bool(kdc_missing()), reason=kdc_missing())]
_USER = "nn/localhost"
"""The NameNodes' own principal, which may also change their states."""
_CLIENT = {
    "hadoop.security.authentication": "kerberos",
    "dfs.data.transfer.protection": "authentication",
    "dfs.namenode.kerberos.principal": f"other/_HOST@{REALM}",
    "dfs.namenode.kerberos.principal.pattern": f"nn/*@{REALM}",
}
_OBSERVED = {"dfs.namenode.state.context.enabled": "true", "dfs.ha.tail-edits.in-progress": "true"}
_END_S = 60.0


@pytest.fixture(scope="module")
def kdc(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kdc]:
    with Kdc(tmp_path_factory.mktemp("kerberos"), (_USER, "dn/localhost", "HTTP/localhost")) as running:
        yield running


@pytest.fixture(scope="module")
def running(kdc: Kdc, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HaPair]:
    with pytest.MonkeyPatch.context() as patched:
        for name, value in {**kdc.environment, "JAVA_TOOL_OPTIONS": java_options(kdc)}.items():
            patched.setenv(name, value)
        kdc.log_in(_USER)
        folder = tmp_path_factory.mktemp("ha")
        settings = {**secured(kdc), **_OBSERVED}
        with HaPair(folder, settings=settings, client_settings=_CLIENT) as started:
            yield started


@pytest.fixture
def pair(running: HaPair) -> HaPair:
    running.restart_killed()
    return running


def _client(pair: HaPair, call_s: float = 60.0) -> HdfsClient:
    return HdfsClient(pair.service, ClientSettings(conf_dir=pair.conf_dir, call_s=call_s, close_s=call_s))


def test_reads_and_writes_continue_after_a_failover_and_when_the_active_one_is_killed(pair: HaPair) -> None:
    with closing(_client(pair)) as client, contextlib.ExitStack() as all_busy:
        client.put("/kept", DATA)
        kept = client.reads().open("/kept")
        several = [all_busy.enter_context(Busy(client, f"/busy/{number}")) for number in range(2)]
        for kill in (False, True):
            before = pair.active
            if kill:
                pair.kill(before)
            else:
                pair.stand_by(before)
            assert read_ranges(kept, [(0, len(DATA))])[0][0] == DATA
            pair.activate(1 - before)
            for busy in several:
                busy.wait(1)
        assert client.fallback == client.reads().facts()["fallback"] == ""


def test_a_delegation_token_survives_a_failover_and_is_refused_at_once_when_cancelled(
    pair: HaPair, tmp_path: Path
) -> None:
    service, kind = field(4, f"ha-hdfs:{pair.service}"), field(3, "HDFS_DELEGATION_TOKEN")
    with closing(_client(pair)) as client, pytest.MonkeyPatch.context() as as_job:
        given = client.ask("getDelegationToken", field(1, "nn")).message(1)
        token = field(1, given.data(1)) + field(2, given.data(2)) + kind + service
        file = tmp_path / "tokens"
        file.write_bytes(b"HDTS\1" + delimited(field(1, field(1, "any") + field(2, token))))
        pair.stand_by(pair.active)
        pair.activate(1 - pair.active)
        as_job.setenv("HADOOP_TOKEN_FILE_LOCATION", str(file))
        as_job.setenv("KRB5CCNAME", f"FILE:{tmp_path}/none")
        for first in range(2):
            with closing(_client(pair)) as job:
                job._active = first
                job.put(f"/of-job-{first}", DATA)
                assert read_all(job, f"/of-job-{first}") == DATA
        client.ask("cancelDelegationToken", field(1, token))
        for first in range(2):
            with closing(_client(pair)) as job, pytest.raises(AccessError, match="token is not valid"):
                job._active = first
                job.stat("/")


def test_without_an_active_namenode_errors_name_all_and_open_files_can_be_read(pair: HaPair) -> None:
    observer = 1 - pair.active
    pair.observe(observer)
    with closing(_client(pair)) as client, closing(_client(pair, 6.0)) as hasty:
        client.put("/written", DATA)
        assert read_all(client, "/written") == DATA
        writer = client.create("/long")
        writer.write(DATA)
        kept = hasty.reads().open("/written")
        pair.kill(pair.active)
        for ask in (
            lambda: hasty.stat("/written"),
            lambda: hasty.put("/other", b"x"),
            lambda: hasty.reads().open("/written", deadline_s=6.0),
        ):
            with pytest.raises(TransientError, match="no NameNode is active") as error:
                ask()
            for address in pair.addresses:
                assert address in str(error.value)
        assert read_ranges(kept, [(0, len(DATA))])[0][0] == DATA
        pair.stand_by(observer)
        pair.activate(observer)
        writer.close()
        assert read_all(client, "/long") == DATA


def test_without_a_kdc_everything_works_until_the_ticket_expires(kdc: Kdc, running: HaPair) -> None:
    def ask_anew() -> int:
        with closing(_client(running)) as fresh:
            return fresh.stat("/early").size_bytes

    with closing(_client(running)) as client:
        client.put("/early", DATA)
        kept = client.reads().open("/early")
        writer = client.create("/late")
        writer.write(DATA[:1000])
        kdc.log_in(_USER, lifetime="10s")
        ask_anew()  # gets the service's ticket
        kdc.kill()
        try:
            assert ask_anew() == len(DATA)
            until = time.monotonic() + _END_S
            with pytest.raises(AccessError, match=r"Ticket expired; renew the ticket"):
                while time.monotonic() < until:
                    assert read_ranges(kept, [(0, len(DATA))])[0][0] == DATA
                    client.stat("/early")  # its connection is not closed as idle
                    ask_anew()
                    time.sleep(0.2)
            assert read_ranges(kept, [(0, len(DATA))])[0][0] == DATA
            writer.write(DATA[1000:])
        finally:
            kdc.start()
            kdc.log_in(_USER)
        writer.close()
        assert read_all(client, "/late") == DATA
