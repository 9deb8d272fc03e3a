"""The NameNodes of a cluster, and their settings: from an address and Hadoop's configuration files.

`hdfs://host:port` needs no files. `hdfs://service` is looked up in `core-site.xml` and `hdfs-site.xml` in
`$HADOOP_CONF_DIR` or `$HADOOP_HOME/etc/hadoop`, with the files that they include; `hdfs:///` is their default file
system. A `viewfs://` address is resolved by their mount table.
"""

from __future__ import annotations

import contextlib
import os
import pwd
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TypedDict

from bootseer.errors import UsageError

DEFAULT_PORT = 8020
_FILES = ("core-site.xml", "hdfs-site.xml")
_MAX_FILE_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """Time limits of a client, and where Hadoop's configuration is."""

    call_s: float = 60.0
    """One request to the NameNodes including retries and failover. A NameNode restarts in half a minute or more."""
    write_s: float = 20.0
    """One buffer that hdfs-native writes, until DataNodes have acknowledged it."""
    close_s: float = 60.0
    """The end of a file: the last bytes, all acknowledgements, and the reports to the NameNode."""
    socket_timeout_s: float = 5.0
    """After this hdfs-native takes a silent DataNode for hung. Busy disks answer within 1 or 2 s."""
    conf_dir: str | None = None
    """Folder of Hadoop's configuration. None: `$HADOOP_CONF_DIR`, or else `$HADOOP_HOME/etc/hadoop`."""


class FileOptions(TypedDict, total=False):
    """Options of a new file."""

    mode: int
    """Default: 0o644."""
    block_size: int | None
    """Bytes. None: the cluster's."""
    replication: int | None
    """None: the cluster's."""
    parents: bool
    """Create a missing folder (the default)."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """The NameNodes of one authority."""

    authority: str
    namenodes: tuple[tuple[str, int], ...]
    settings: Mapping[str, str]
    kerberos: bool
    """Whether servers require a login, by a Kerberos ticket or a token."""
    user: str

    @classmethod
    def of(cls, authority: str, conf_dir: str | None = None) -> Cluster:
        """The cluster of `hdfs://<authority>`. Raises `UsageError`."""
        settings = _settings(conf_dir or configuration())
        found = tuple(_host_port(address) for address in _addresses(authority, settings))
        if not found:
            raise UsageError("an HDFS URI without a host", hint="write hdfs://host:port/path")
        kerberos = settings.get("hadoop.security.authentication", "simple").lower() == "kerberos"
        return cls(authority, found, MappingProxyType(settings), kerberos, _user())

    @property
    def by_hostname(self) -> bool:
        """Whether DataNodes are addressed by hostname instead of IP address."""
        return self.settings.get("dfs.client.use.datanode.hostname", "").lower() == "true"


def default_authority(uri: str) -> str:
    """The authority of `fs.defaultFS`, for an address without one. Raises `UsageError` if that is not HDFS."""
    named = _settings(configuration()).get("fs.defaultFS", "")
    scheme, _, rest = named.partition("://")
    authority = rest.partition("/")[0]
    if "@" in authority:  # not shown: it may be a password
        raise UsageError("fs.defaultFS has a user or password, which does not belong in an address",
                         hint="set HADOOP_USER_NAME")  # fmt: skip
    if scheme != "hdfs" or not authority:
        reason = f"fs.defaultFS is {named}" if named else "there is no fs.defaultFS"
        raise UsageError(
            f"{uri} names no file system: {reason}", hint="write hdfs://host:port/dir, or set HADOOP_CONF_DIR"
        )
    return authority


def behind_mount_table(uri: str) -> str:
    """Resolve a `viewfs://` address by the mount table of Hadoop's configuration; others are returned unchanged.

    The longest link that covers the path applies, as in Hadoop. Raises `UsageError` if there is none, or if the table
    has kinds of links that only Hadoop's own client follows.
    """
    scheme, _, rest = uri.partition("://")
    if scheme != "viewfs":
        return uri
    table, _, path = rest.partition("/")
    settings = _settings(configuration())
    kind, _, named = settings.get("fs.defaultFS", "").partition("://")
    table = table or (named.partition("/")[0] if kind == "viewfs" else "")
    prefix = f"fs.viewfs.mounttable.{table or 'default'}."
    links = {key.removeprefix(prefix): value for key, value in settings.items() if key.startswith(prefix)}
    if foreign := sorted(key for key in links if key.startswith(("linkMergeSlash", "linkNfly", "linkRegex"))):
        raise UsageError(f"{prefix}{foreign[0]} is a link of a kind that BootSeer does not follow",
                         hint="give the hdfs:// address behind it")  # fmt: skip
    names = [name for name in path.split("/") if name]
    for number in range(len(names), -1, -1):
        link = f"link./{'/'.join(names[:number])}" if number else "linkFallback"
        if (target := links.get(link, "viewfs:")).startswith("viewfs:"):  # no link, or one that leads back here
            continue
        return "/".join([target.rstrip("/"), *names[number:]])
    raise UsageError(f"no link of the mount table {table or 'default'} covers {uri}",
                     hint=f"see {prefix}link.* in core-site.xml (HADOOP_CONF_DIR)")  # fmt: skip


def configuration(environ: Mapping[str, str] = os.environ) -> str | None:
    """The folder of Hadoop's configuration that the variables name."""
    if conf_dir := environ.get("HADOOP_CONF_DIR"):
        return conf_dir
    home = environ.get("HADOOP_HOME")
    return str(Path(home, "etc", "hadoop")) if home else None


def _settings(conf_dir: str | None) -> dict[str, str]:
    if not conf_dir:
        return {}
    from xml.etree import ElementInclude, ElementTree  # not needed where the address has host and port

    found: dict[str, str] = {}
    for name in _FILES:
        path = Path(conf_dir, name)
        try:
            if path.stat().st_size > _MAX_FILE_BYTES:
                raise UsageError(f"{path} is not a Hadoop configuration: it is too long", hint="check HADOOP_CONF_DIR")
            # Written by the machine's administrator, and of bounded size.
            root = ElementTree.parse(path).getroot()  # noqa: S314
            with contextlib.suppress(FileNotFoundError):  # an optional file
                ElementInclude.include(root, base_url=str(path))
        except FileNotFoundError:
            continue
        except (OSError, SyntaxError, ValueError, LookupError) as error:  # the last two: of encodings
            raise UsageError(f"cannot read {path}: {error}", hint="check HADOOP_CONF_DIR") from error
        for entry in root.iter("property"):
            key, value = entry.findtext("name"), entry.findtext("value")
            if key and value is not None:
                found[key.strip()] = value.strip()
    return found


def _addresses(authority: str, settings: Mapping[str, str]) -> list[str]:
    services = [name.strip() for name in settings.get("dfs.nameservices", "").split(",")]
    if authority not in services:
        return [authority] if authority else []
    numbers = [name.strip() for name in settings.get(f"dfs.ha.namenodes.{authority}", "").split(",") if name.strip()]
    keys = [f"dfs.namenode.rpc-address.{authority}.{number}" for number in numbers]
    found = [settings[key] for key in keys or [f"dfs.namenode.rpc-address.{authority}"] if key in settings]
    if not found:
        raise UsageError(
            f"hdfs-site.xml defines the service {authority} but none of its NameNodes",
            hint=f"set dfs.ha.namenodes.{authority} and dfs.namenode.rpc-address.{authority}.*",
        )
    return found


def _host_port(address: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":")
    if not colon or "]" in port:
        host, port = address, str(DEFAULT_PORT)
    try:
        host.encode("idna")  # as `getaddrinfo` does: refuses labels that are empty or too long
        number = int(port) if port.isdecimal() else 0
    except ValueError:
        number = 0
    if not 0 < number < 1 << 16:
        raise UsageError(f"{address!r} is not the address of a NameNode", hint="write host:port")
    return host.strip("[]"), number


def _user() -> str:
    if user := os.environ.get("HADOOP_USER_NAME"):
        return user
    try:
        return pwd.getpwuid(os.getuid()).pw_name  # not $USER, which is another's after `su`
    except KeyError:  # a uid without a name, as in many containers
        return os.environ.get("LOGNAME") or os.environ.get("USER") or str(os.getuid())
