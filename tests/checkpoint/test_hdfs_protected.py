"""Checkpoints in an HDFS that our own connections do not speak to: all goes through hdfs-native.

One cluster encrypts what DataNodes send, and has a folder with erasure coding; the other one wants Kerberos.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from bootseer.checkpoint.download import get_checkpoint
from bootseer.checkpoint.files import Files
from bootseer.checkpoint.layout import Policy
from bootseer.checkpoint.places.open import open_place
from bootseer.checkpoint.places.place import Place
from bootseer.checkpoint.publish import PutSettings, put_checkpoint
from bootseer.checkpoint.reading.reading import Reading
from bootseer.checkpoint.verify import verify
from bootseer.errors import AccessError, TransientError
from hdfs_cluster import HdfsCluster, needs_hdfs
from kdc import REALM, Kdc, kdc_missing

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
    settings = {
        "hadoop.security.authentication": "kerberos",
        "hadoop.security.authorization": "true",
        "dfs.permissions.enabled": "true",
        "dfs.block.access.token.enable": "true",
        "dfs.data.transfer.protection": "authentication",
        # Hadoop asks for TLS on its web pages or for ports below 1024, neither of which matters here.
        "ignore.secure.ports.for.testing": "true",
        "dfs.cluster.administrators": "*",
    }
    for server, name in (("namenode", "nn"), ("datanode", "dn"), ("web.authentication", "HTTP")):
        keytab = "dfs.web.authentication.kerberos.keytab" if name == "HTTP" else f"dfs.{server}.keytab.file"
        settings |= {f"dfs.{server}.kerberos.principal": f"{name}/localhost@{REALM}", keytab: str(kdc.keytab)}
    with pytest.MonkeyPatch.context() as patched:
        options = f"-Djava.security.krb5.conf={kdc.conf} --add-exports=java.security.jgss/sun.security.krb5=ALL-UNNAMED"
        patched.setenv("JAVA_TOOL_OPTIONS", options)
        folder = tmp_path_factory.mktemp("kerberized")
        with HdfsCluster(folder, num_datanodes=2, settings=settings) as running:
            yield running


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "step"
    folder.mkdir()
    (folder / "model").write_bytes(_DATA)
    (folder / "config").write_bytes(b"{}")
    return folder


def _assert_goes_there_and_back(place: Place, folder: str, source: Path, target: Path) -> None:
    put_checkpoint(place, source, "step-1", folder=folder, settings=_PUT)
    files = Files(place)
    assert verify(files, f"{folder}/step-1").problems == []
    with closing(Reading(place)) as reading:
        get_checkpoint(files, reading, f"{folder}/step-1", target)
    assert (target / "model").read_bytes() == _DATA
    assert (target / "config").read_bytes() == b"{}"
    assert place.facts()["fallback"]


def test_a_checkpoint_goes_to_a_cluster_that_encrypts_and_back(
    encrypted: HdfsCluster, source: Path, tmp_path: Path
) -> None:
    with closing(open_place(encrypted.uri)) as place:
        _assert_goes_there_and_back(place, "job", source, tmp_path / "out")


def test_a_checkpoint_goes_to_a_folder_with_erasure_coding_and_back(
    encrypted: HdfsCluster, source: Path, tmp_path: Path
) -> None:
    encrypted.tool("hdfs.tools.ECAdmin", "-enablePolicy", "-policy", "XOR-2-1-1024k")
    with closing(open_place(encrypted.uri)) as place:
        place.make_folder("coded")
        encrypted.tool("hdfs.tools.ECAdmin", "-setPolicy", "-path", "/coded", "-policy", "XOR-2-1-1024k")
        _assert_goes_there_and_back(place, "coded", source, tmp_path / "out")


@_needs_kdc
def test_a_checkpoint_goes_to_a_cluster_with_kerberos_and_back(
    kdc: Kdc, kerberized: HdfsCluster, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**kdc.environment, "HADOOP_CONF_DIR": str(kerberized.folder / "conf")}.items():
        monkeypatch.setenv(name, value)
    with closing(open_place(kerberized.uri)) as place, pytest.raises(AccessError, match="is there a ticket"):
        place.stat("job")
    kdc.log_in("nn/localhost")
    with closing(open_place(kerberized.uri)) as place:
        place.make_folder("job", mode=0o777)
    kdc.log_in("alice")
    with closing(open_place(kerberized.uri)) as place:
        _assert_goes_there_and_back(place, "job", source, tmp_path / "out")
        assert place.stat("job/step-1").owner == "alice"
    monkeypatch.delenv("HADOOP_CONF_DIR")
    with closing(open_place(kerberized.uri)) as place, pytest.raises(TransientError, match="if it wants Kerberos"):
        place.stat("job")
