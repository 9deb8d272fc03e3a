from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from bootseer.errors import UsageError
from bootseer.hdfs.addresses import Cluster, behind_mount_table, default_authority


@pytest.fixture(autouse=True)
def no_settings_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HADOOP_CONF_DIR", "HADOOP_HOME", "HADOOP_USER_NAME"):
        monkeypatch.delenv(name, raising=False)


def write(folder: Path, name: str, **settings: str) -> None:
    rows = "".join(
        f"<property><name>{key.replace('_', '.')}</name><value> {value} </value></property>"
        for key, value in settings.items()
    )
    (folder / name).write_text(f"<?xml version='1.0'?><configuration>{rows}</configuration>")


@pytest.mark.parametrize(
    ("authority", "expected"),
    [("nn:9000", ("nn", 9000)), ("nn", ("nn", 8020)), ("10.0.0.1:1", ("10.0.0.1", 1)), ("[::1]:9000", ("::1", 9000))],
)
def test_an_authority_with_a_host_needs_no_files(authority: str, expected: tuple[str, int]) -> None:
    assert Cluster.of(authority).namenodes == (expected,)


@pytest.mark.parametrize("authority", ["", "nn:", "nn:x", "nn:0", "nn:99999", "nn..cluster", f"{'n' * 64}:8020"])
def test_invalid_addresses_are_refused(authority: str) -> None:
    with pytest.raises(UsageError):
        Cluster.of(authority)


def ha(folder: Path) -> None:
    write(folder, "hdfs-site.xml", dfs_nameservices="other, job")
    text = (folder / "hdfs-site.xml").read_text()
    more = {
        "dfs.ha.namenodes.job": "a, b",
        "dfs.namenode.rpc-address.job.a": "one:8020",
        "dfs.namenode.rpc-address.job.b": "two:9000",
    }
    rows = "".join(f"<property><name>{key}</name><value>{value}</value></property>" for key, value in more.items())
    (folder / "hdfs-site.xml").write_text(text.replace("</configuration>", rows + "</configuration>"))


def test_a_service_has_all_its_namenodes(tmp_path: Path) -> None:
    ha(tmp_path)
    cluster = Cluster.of("job", str(tmp_path))
    assert cluster.namenodes == (("one", 8020), ("two", 9000))
    assert cluster.settings["dfs.nameservices"] == "other, job"


def test_the_folder_of_settings_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ha(tmp_path)
    monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path))
    assert len(Cluster.of("job").namenodes) == 2
    home = tmp_path / "home"
    (home / "etc").mkdir(parents=True)
    (home / "etc" / "hadoop").symlink_to(tmp_path)
    monkeypatch.delenv("HADOOP_CONF_DIR")
    monkeypatch.setenv("HADOOP_HOME", str(home))
    assert len(Cluster.of("job").namenodes) == 2


def test_a_service_without_namenodes_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "hdfs-site.xml", dfs_nameservices="job")
    with pytest.raises(UsageError, match="none of its NameNodes"):
        Cluster.of("job", str(tmp_path))


@pytest.mark.parametrize(
    "text", ["<configuration>", *(f"<?xml version='1.0' encoding='{code}'?><configuration/>" for code in ("GBK", "x"))]
)
def test_settings_that_are_not_xml_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "core-site.xml").write_text(text)
    with pytest.raises(UsageError, match="core-site"):
        Cluster.of("nn:1", str(tmp_path))


def test_settings_define_whether_servers_require_a_login(tmp_path: Path) -> None:
    assert not Cluster.of("nn:1", str(tmp_path)).kerberos
    write(tmp_path, "core-site.xml", hadoop_security_authentication="Kerberos")
    assert Cluster.of("nn:1", str(tmp_path)).kerberos


def test_the_user_is_that_of_the_process_unless_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOGNAME", "USER"):
        monkeypatch.setenv(name, "who-called-su")
    assert Cluster.of("nn:1").user == pwd.getpwuid(os.getuid()).pw_name
    monkeypatch.setattr(os, "getuid", lambda: 987_654)
    assert Cluster.of("nn:1").user == "who-called-su"
    monkeypatch.setenv("HADOOP_USER_NAME", "trainer")
    assert Cluster.of("nn:1").user == "trainer"


def test_nodes_are_addressed_by_hostname_if_configured(tmp_path: Path) -> None:
    assert not Cluster.of("nn:1").by_hostname
    (tmp_path / "hdfs-site.xml").write_text(
        "<configuration><property><name>dfs.client.use.datanode.hostname</name><value>true</value></property>"
        "</configuration>"
    )
    assert Cluster.of("nn:1", str(tmp_path)).by_hostname


def test_the_default_file_system_is_read_from_the_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^hdfs:// names no file system: there is no fs\.defaultFS"):
        default_authority("hdfs://")
    monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path))
    for named, authority in (("hdfs://nn:9000/", "nn:9000"), ("hdfs://service", "service")):
        write(tmp_path, "core-site.xml", fs_defaultFS=named)
        assert default_authority("hdfs:///a") == authority
    write(tmp_path, "core-site.xml", fs_defaultFS="s3a://bucket")
    with pytest.raises(UsageError, match="s3a"):
        default_authority("hdfs:///a")


def test_files_that_the_settings_include_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hadoop's documentation of viewfs recommends them for mount tables."""
    monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path))
    write(tmp_path, "mountTable.xml", **{"fs.viewfs.mounttable.all.link./jobs": "hdfs://one/jobs"})
    (tmp_path / "core-site.xml").write_text(
        "<configuration xmlns:xi='http://www.w3.org/2001/XInclude'><xi:include href='mountTable.xml'/>"
        "<xi:include href='missing.xml'><xi:fallback/></xi:include></configuration>"
    )
    assert behind_mount_table("viewfs://all/jobs/moe") == "hdfs://one/jobs/moe"


TABLE = {
    "fs.defaultFS": "viewfs://all",
    "fs.viewfs.mounttable.all.link./jobs": "hdfs://one:9000/teams/jobs/",
    "fs.viewfs.mounttable.all.link./jobs/moe": "hdfs://two/moe",
    "fs.viewfs.mounttable.all.link./loop": "viewfs://all/jobs",
    "fs.viewfs.mounttable.other.linkFallback": "hdfs://rest/all",
    "fs.viewfs.mounttable.odd.linkRegex./x": "hdfs://x/",
}


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        ("viewfs:///jobs/llm/step-1", "hdfs://one:9000/teams/jobs/llm/step-1"),
        ("viewfs://all//jobs//moe/step-1", "hdfs://two/moe/step-1"),
        ("viewfs:///jobs/moe-2", "hdfs://one:9000/teams/jobs/moe-2"),
        ("viewfs://other/a/b", "hdfs://rest/all/a/b"),
        ("hdfs://nn/jobs", "hdfs://nn/jobs"),
    ],
)
def test_the_longest_link_of_a_mount_table_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uri: str, expected: str
) -> None:
    monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path))
    write(tmp_path, "core-site.xml", **TABLE)
    assert behind_mount_table(uri) == expected


@pytest.mark.parametrize(
    "uri", ["viewfs:///", "viewfs:///models", "viewfs:///loop", "viewfs://none/a", "viewfs://odd/x"]
)
def test_an_address_that_no_link_covers_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uri: str) -> None:
    monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path))
    write(tmp_path, "core-site.xml", **TABLE)
    with pytest.raises(UsageError, match="mount"):
        behind_mount_table(uri)
