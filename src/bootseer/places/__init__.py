"""File systems for checkpoints and stores: `place` is the protocol, `folder`, `hdfs` and `objects` implement it, and
`open_place` opens the one that an address names.

The adapters of HDFS and of buckets are imported only when they are used, because they need extras.
"""

from __future__ import annotations

import re
from pathlib import Path

from bootseer.errors import UsageError, needs_extra
from bootseer.places.folder import FolderPlace
from bootseer.places.place import RESERVED_PREFIXES, Place

_FORMS = "use hdfs://host:port/dir, hdfs:///dir, viewfs:///dir, s3://…, gs://…, az://…, file:///dir or a folder"
BUCKETS = ("s3", "gs", "az")
"""Schemes of object storage."""
HDFS = ("hdfs", "viewfs")
"""Schemes of HDFS; addresses of the second are resolved by the mount table in Hadoop's configuration."""
_ONE_SLASH = re.compile(r"(hdfs|viewfs|s3|gs|az|oci|file):(?!//)", re.IGNORECASE)


def check_slashes(uri: str) -> None:
    """Raise `UsageError` for an address with one slash, such as `pathlib.Path` makes: as a path it names a local
    folder, where a checkpoint would be lost with the node."""
    if match := _ONE_SLASH.match(uri):
        raise UsageError(  # without what follows, which may contain a password
            f"{match[0]}… is not a place: // is missing",
            hint="write // after the colon; pathlib.Path turns it into /, so pass a str",
        )


def open_place(uri: str) -> Place:
    """The place at `uri`: `hdfs://host:port/dir`, `hdfs:///dir`, `viewfs:///dir`, `s3://bucket/dir`, `file:///dir` or
    `/dir`. Nothing is connected yet.

    Raises `UsageError` for an invalid address.
    """
    scheme, separator, rest = uri.partition("://")
    check_slashes(uri)
    if not uri or "\0" in uri:
        raise UsageError(f"{uri!r} is not a place for checkpoints", hint=_FORMS)
    names = (rest if separator else uri).split("/")
    if any(name.startswith(RESERVED_PREFIXES) for name in names):
        raise UsageError(f"{uri} is inside a folder reserved by BootSeer", hint="name the folder above it")
    if not separator:
        return FolderPlace(Path(uri))
    if scheme == "file":
        if rest and not rest.startswith("/"):
            raise UsageError(f"{uri} names no folder", hint="file:/// and the absolute path")
        return FolderPlace(Path(rest or "/"))
    if scheme in (*BUCKETS, *HDFS) and "@" in rest.partition("/")[0]:
        # It would end up in logs, events and process lists.
        hint = "set HADOOP_USER_NAME" if scheme in HDFS else "set the variables of the object store's own tools"
        raise UsageError(f"{scheme}://…: a user or password does not belong in an address", hint=hint)
    if scheme in BUCKETS:
        with needs_extra("s3", uri):
            from bootseer.places.objects import ObjectPlace
        return ObjectPlace(uri)
    if scheme == "viewfs":
        from bootseer.hdfs.addresses import behind_mount_table

        return open_place(behind_mount_table(uri))
    if scheme != "hdfs":
        raise UsageError(f"{scheme}:// is not a place for checkpoints", hint=_FORMS)
    return _open_hdfs(uri, rest)


def _open_hdfs(uri: str, rest: str) -> Place:
    authority, _, path = rest.partition("/")
    if {".", ".."} & set(path.split("/")):
        raise UsageError(f"{uri} contains . or ..", hint="write the folder's own path")
    with needs_extra("hdfs", uri):
        from bootseer.hdfs.addresses import default_authority
        from bootseer.hdfs.client import HdfsClient
        from bootseer.places.hdfs import HdfsPlace
    return HdfsPlace(
        HdfsClient(authority or default_authority(uri)), "/".join(name for name in path.split("/") if name)
    )
