"""Open the store of a URI.

Adapters are imported on demand: most programs use one of them, and some need an extra that may be missing.
"""

from __future__ import annotations

import ipaddress
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from bootseer.errors import UsageError, needs_extra
from bootseer.store.addresses import shown

if TYPE_CHECKING:
    from bootseer.store.registry import Registry
    from bootseer.store.store import Store

PLAIN_HTTP = "BOOTSEER_PLAIN_HTTP"
"""Environment variable: comma-separated registries to be accessed without encryption."""
_SCHEMES = "a folder, file://, oci://, s3://, gs://, az://, hdfs:// or viewfs://"


def open_store(uri: str, *, plain_http: bool = False, mirrored: bool = False) -> Store:
    """The store at `uri`: `/dir`, `file:///dir`, `oci://host/repository`, `s3://bucket/prefix`,
    `gs://…`, `az://…`, `hdfs://host:port/dir` or `viewfs:///dir`.

    `plain_http` permits unencrypted access; registries named in `BOOTSEER_PLAIN_HTTP`, and those at loopback addresses
    without certificates here, are always accessed so. `mirrored`: it is only read, if possible from a registry's
    mirrors (`mirrors`). Does not connect yet. Raises `UsageError` for an invalid address.
    """
    scheme, separator, rest = uri.partition("://")
    if not separator:
        if not uri:
            raise UsageError("the address of a store is empty", hint=f"use {_SCHEMES}")
        scheme, rest = "file", uri
    if scheme == "file":
        return _open_file(uri, rest)
    if "@" in rest.partition("/")[0]:
        # It would appear in logs and process lists.
        raise UsageError(
            f"{scheme}://…: a password does not belong in an address", hint="log in, or use the environment"
        )
    if "?" in rest or "#" in rest:
        raise UsageError(
            f"{shown(uri)!r} has a query or fragment, which no store supports", hint="leave out what follows ? or #"
        )
    if scheme == "oci":
        from bootseer.store.oci import OciStore

        host, _, repository = rest.partition("/")
        return OciStore(open_registry(host, repository.rstrip("/"), plain_http=plain_http, mirrored=mirrored))
    if scheme in ("s3", "gs", "az"):
        with needs_extra("s3", uri):
            from bootseer.store.object_store import ObjectStore
        return ObjectStore(uri, allow_http=plain_http)
    if scheme in ("hdfs", "viewfs"):
        from bootseer.places import open_place
        from bootseer.store.file import PlaceStore

        return PlaceStore(open_place(uri))
    raise UsageError(f"{shown(uri)!r} is not a store", hint=f"use {_SCHEMES}")


def open_registry(host: str, repository: str, *, plain_http: bool = False, mirrored: bool = False) -> Registry:
    """A client of one repository, with the options of `open_store`. `host` is `name[:port]`."""
    from bootseer.store.mirrors import MirroredRegistry, find_servers
    from bootseer.store.registry import Registry
    from bootseer.store.transport import certificates

    named = [item.strip() for item in os.environ.get(PLAIN_HTTP, "").split(",")]
    name, _, port = host.rpartition(":") if re.search(r":\d+$", host) else (host, "", "443")
    is_plain = is_loopback(host) and certificates(name, int(port)) is None
    plain_http = plain_http or host in named or is_plain
    registry = Registry(host, repository, plain_http=plain_http)
    servers = find_servers(registry) if mirrored else []
    return MirroredRegistry(host, repository, servers, plain_http=plain_http) if servers else registry


def _open_file(uri: str, path: str) -> Store:
    from bootseer.places import check_slashes
    from bootseer.store.file import FileStore

    check_slashes(uri)
    if uri.startswith("file://") and not path.startswith("/"):
        raise UsageError(f"{shown(uri)!r} names a host", hint="use file:///FOLDER or a plain path")
    return FileStore(Path(path))


def is_loopback(host: str) -> bool:
    """Whether `name[:port]` is a loopback address of this machine."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:  # abbreviations like 127.1 are not addresses here, nor for the registry's client
        return False
