"""Checkpoints in a secured HDFS, and in a folder with erasure coding, which is accessed only through hdfs-native.

One cluster encrypts data transfer, without Kerberos; the other one requires Kerberos and offers all protections.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from msgspec.structs import replace

from bootseer.checkpoint.download import get_checkpoint
from bootseer.checkpoint.files import Files
from bootseer.checkpoint.layout import Policy
from bootseer.checkpoint.publish import PutSettings, put_checkpoint
from bootseer.checkpoint.reading.reading import Reading
from bootseer.checkpoint.verify import verify
from bootseer.errors import AccessError, TransientError
from bootseer.hdfs.addresses import ClientSettings
from bootseer.hdfs.client import HdfsClient
from bootseer.hdfs.protection import Protection
from bootseer.hdfs.protobuf import field
from bootseer.hdfs.reads import HdfsFile
from bootseer.hdfs.sasl import PRIVACY, PROTECTIONS, Digest, Token
from bootseer.launch import doctor
from bootseer.places import open_place
from bootseer.places.place import Place
from hdfs.whole_files import read_ranges
from hdfs_cluster import HdfsCluster, needs_hdfs
from kdc import Kdc, java_options, kdc_missing, secured, write_client_conf
from registry import free_port

pytestmark = needs_hdfs
_MIB = 1 << 20
_DATA = os.urandom(2 * _MIB + 7)
_PUT = PutSettings(policy=Policy(stripes=2, part_bytes=4 * _MIB, min_bytes_per_stripe=_MIB, parity=True))
_needs_kdc = pytest.mark.skipif(bool(kdc_missing()), reason=kdc_missing())


@pytest.fixture(scope="module")
def encrypted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HdfsCluster]:
    settings = {
        "dfs.block.access.token.enable": "true",
        "dfs.encrypt.data.transfer": "true",
        "dfs.encrypt.data.transfer.algorithm": "rc4",
    }
    with HdfsCluster(tmp_path_factory.mktemp("encrypted"), num_datanodes=3, settings=settings) as running:
        yield running


@pytest.fixture(scope="module")
def kdc(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kdc]:
    names = ("nn/localhost", "dn/localhost", "HTTP/localhost", "alice")
    with Kdc(tmp_path_factory.mktemp("kerberos"), names) as running:
        yield running


@pytest.fixture(scope="module")
def kerberized(kdc: Kdc, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HdfsCluster]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("JAVA_TOOL_OPTIONS", java_options(kdc))
        folder = tmp_path_factory.mktemp("kerberized")
        with HdfsCluster(folder, settings=secured(kdc)) as running:
            yield running


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "step"
    folder.mkdir()
    (folder / "model").write_bytes(_DATA)
    (folder / "config").write_bytes(b"{}")
    return folder


def _assert_goes_there_and_back(place: Place, folder: str, source: Path, target: Path, fallback: str = "") -> None:
    put_checkpoint(place, source, "step-1", folder=folder, settings=_PUT)
    files = Files(place)
    assert verify(files, f"{folder}/step-1").problems == []
    with closing(Reading(place)) as reading:
        get_checkpoint(files, reading, f"{folder}/step-1", target)
    assert (target / "model").read_bytes() == _DATA
    assert (target / "config").read_bytes() == b"{}"
    assert fallback in str(place.facts()["fallback"])
    assert bool(fallback) == bool(place.facts()["fallback"])


@pytest.mark.parametrize("cipher", ["rc4", "3des"])
def test_a_checkpoint_is_put_and_got_with_encryption(
    encrypted: HdfsCluster, source: Path, tmp_path: Path, cipher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cipher != "rc4":  # rc4 is the cluster's default; its servers accept any that the client chooses
        login = Protection._login

        def other(self: Protection, token: bytes) -> Digest:
            mechanism = login(self, token)
            monkeypatch.setattr(mechanism, "_ciphers", (cipher,))
            return mechanism

        monkeypatch.setattr(Protection, "_login", other)
    with closing(open_place(encrypted.uri)) as place:
        _assert_goes_there_and_back(place, f"job-{cipher}", source, tmp_path / "out")


def test_a_checkpoint_is_put_and_got_with_erasure_coding(encrypted: HdfsCluster, source: Path, tmp_path: Path) -> None:
    encrypted.ask("enableErasureCodingPolicy", "XOR-2-1-1024k")
    with closing(open_place(encrypted.uri)) as place:
        place.make_folder("coded")
        encrypted.ask("setErasureCodingPolicy", "/coded", "XOR-2-1-1024k")
        _assert_goes_there_and_back(place, "coded", source, tmp_path / "out", "erasure-coded")


def _conf(cluster: HdfsCluster, folder: Path, protection: str) -> str:
    """Write the cluster's configuration for clients that require this protection."""
    write_client_conf(folder, cluster.uri, protection)
    return str(folder)


def _authority(cluster: HdfsCluster) -> str:
    return cluster.uri.removeprefix("hdfs://")


@pytest.fixture
def logged_in(kdc: Kdc, kerberized: HdfsCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log in as alice, who may write in /job."""
    conf = _conf(kerberized, tmp_path / "conf", PRIVACY)
    for name, value in {**kdc.environment, "HADOOP_CONF_DIR": conf}.items():
        monkeypatch.setenv(name, value)
    kdc.log_in("nn/localhost")
    with closing(HdfsClient(_authority(kerberized))) as client:
        client.make_folder("/job", parents=True)
        client.set_permission("/job", 0o777)
    kdc.log_in("alice")


@_needs_kdc
@pytest.mark.parametrize("protection", PROTECTIONS)
def test_a_checkpoint_is_put_and_got_with_kerberos(
    kerberized: HdfsCluster,
    logged_in: None,
    source: Path,
    tmp_path: Path,
    protection: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HADOOP_CONF_DIR", _conf(kerberized, tmp_path / "own", protection))
    with closing(open_place(f"{kerberized.uri}/job")) as place:
        _assert_goes_there_and_back(place, protection, source, tmp_path / "out")
        assert place.stat(f"{protection}/step-1").owner == "alice"


@_needs_kdc
def test_a_delegation_token_replaces_a_ticket_until_it_is_cancelled(
    kdc: Kdc, kerberized: HdfsCluster, logged_in: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "tokens"
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", java_options(kdc))
    kerberized.tool("hdfs.tools.DelegationTokenFetcher", "--renewer", "alice", str(file))
    monkeypatch.setenv("HADOOP_TOKEN_FILE_LOCATION", str(file))
    monkeypatch.setenv("KRB5CCNAME", f"FILE:{tmp_path}/none")
    with closing(HdfsClient(_authority(kerberized))) as client:
        client.put("/job/by-token", _DATA)
        assert [data for data, _ in read_ranges(client.reads().open("/job/by-token"), [(0, len(_DATA))])] == [_DATA]
        assert client.stat("/job/by-token").owner == "alice"
        assert client.fallback == ""
    monkeypatch.setenv("KRB5CCNAME", kdc.environment["KRB5CCNAME"])
    kerberized.tool("hdfs.tools.DelegationTokenFetcher", "--cancel", str(file))
    with (
        closing(HdfsClient(_authority(kerberized))) as client,
        pytest.raises(AccessError, match=r"not valid .*get a new"),
    ):
        client.stat("/job")


@_needs_kdc
def test_a_block_token_that_datanodes_refuse_is_replaced(
    kerberized: HdfsCluster, logged_in: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(HdfsClient(_authority(kerberized))) as client:
        client.put("/job/file", _DATA)
        file = client.reads().open("/job/file")
        assert isinstance(file, HdfsFile)
        source = file._source
        (block,) = source.located.blocks
        token = Token.parse(block.token)
        spoilt = field(1, token.identifier) + field(2, token.secret[::-1]) + field(3, token.kind) + field(4, "")
        source.located = replace(source.located, blocks=(replace(block, token=spoilt),))
        assert [data for data, _ in read_ranges(file, [(0, len(_DATA))])] == [_DATA]
        assert client.reads().facts()["refreshes"] == 1


@_needs_kdc
def test_failed_logins_report_their_reason(
    kdc: Kdc, kerberized: HdfsCluster, logged_in: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(call_s: float = 2.0) -> str:
        with (
            closing(HdfsClient(_authority(kerberized), ClientSettings(call_s=call_s))) as client,
            pytest.raises((AccessError, TransientError)) as error,
        ):
            client.stat("/")
        return str(error.value)

    tickets = kdc.folder / "tickets"
    good = tickets.read_bytes()
    # The file's header has the offset of the KDC's clock: version, length, tag, length, seconds.
    (length,) = struct.unpack(">H", good[2:4])

    def with_clock(seconds: int) -> bytes:
        return good[:2] + struct.pack(">HHHii", 12, 1, 8, seconds, 0) + good[4 + length :]

    tickets.write_bytes(with_clock(3600))
    assert "Clock skew too great; set this machine's clock" in said()
    tickets.write_bytes(good)
    with closing(HdfsClient(_authority(kerberized))) as client:
        client.stat("/")
    good = tickets.read_bytes()  # with the NameNode's ticket, so that the KDC is not needed
    tickets.write_bytes(with_clock(3600))
    assert "GSS initiate failed; the server refuses the ticket: are both clocks right" in said()
    tickets.write_bytes(with_clock(2 * 86400))
    assert "expired; renew the ticket (kinit)" in said()
    tickets.write_bytes(good)
    gone = tmp_path / "krb5.conf"
    gone.write_text(re.sub(r"kdc = \S+", f"kdc = 127.0.0.1:{free_port()}", kdc.conf.read_text()))
    monkeypatch.setenv("KRB5_CONFIG", str(gone))
    with closing(HdfsClient(_authority(kerberized))) as client:
        client.stat("/")  # existing tickets need no KDC
    assert doctor.check_hdfs_login().found == f"{kerberized.uri} answers, Kerberos"
    monkeypatch.setenv("KRB5_CONFIG", str(kdc.conf))
    tickets.unlink()
    assert "is there a ticket (klist, kinit" in said()
    assert "is there a ticket (klist, kinit" in doctor.check_hdfs_login().why
    kdc.rekey("bob", tmp_path / "old")
    kdc.rekey("bob", tmp_path / "new")
    monkeypatch.setenv("KRB5_CLIENT_KTNAME", str(tmp_path / "old"))
    assert "the keytab has no key, or an old one" in said()
    monkeypatch.setenv("KRB5_CLIENT_KTNAME", str(tmp_path / "new"))
    monkeypatch.setenv("KRB5_CONFIG", str(gone))
    assert "check that the KDC of krb5.conf runs" in said()
    monkeypatch.setenv("HADOOP_TOKEN_FILE_LOCATION", str(tmp_path / "new"))
    assert "is not a Hadoop token file" in said()
    monkeypatch.delenv("HADOOP_CONF_DIR")
    assert "if it requires Kerberos" in said(60.0)
