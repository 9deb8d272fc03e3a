"""Errors of one DataNode, and the error class that a NameNode's answer maps to.

A NameNode's errors have no codes: only the name of the Java class, and sometimes the text, tell them apart. hdfs-native
passes them on as text.
"""

from __future__ import annotations

from typing import Final

from bootseer.errors import (
    AccessError,
    AlreadyExistsError,
    BootseerError,
    IsFolderError,
    NoSpaceError,
    NotEmptyError,
    NotFolderError,
    NotFoundError,
    PermanentError,
)


class DataNodeError(Exception):
    """The DataNode did not deliver what was requested. The connection cannot be used any more."""


class RefusedError(DataNodeError):
    """The DataNode rejects the request: it does not have the block, or does not accept the token (`token`)."""

    def __init__(self, message: str, *, token: bool) -> None:
        super().__init__(message)
        self.token = token


class LostConnectionError(DataNodeError):
    """The DataNode cannot be reached, or has closed the connection: it may be restarting, or have too many readers
    (`dfs.datanode.max.transfer.threads`)."""


class SilentError(DataNodeError):
    """No byte has arrived for longer than the reader waits."""


class WrongBytesError(DataNodeError):
    """The bytes do not match the checksums that the DataNode keeps for them."""


class UnevenError(DataNodeError):
    """The packets do not have the predicted size. The DataNode is healthy: read it packet by packet."""


class UnsupportedError(PermanentError):
    """BootSeer's own client cannot read or write this file; hdfs-native may."""


_KINDS: Final[dict[type[BootseerError], tuple[str, ...]]] = {
    # The last one: a router's, for a path that no mount covers, such as that of a policy above a job.
    AccessError: ("AccessControlException", "AuthorizationException", "GSSAPIError", "Cannot find locations for"),
    NotEmptyError: ("PathIsNotEmptyDirectoryException", "is not empty"),
    NotFolderError: ("ParentNotDirectoryException", "Current inode is not a directory"),  # the second one: Hadoop 2
    IsFolderError: ("Path is not a file", "already exists as a directory", "must both be directories"),
    AlreadyExistsError: (
        "AlreadyExistsException",
        "AlreadyBeingCreatedException",
        "already exists",
        "Path is not a directory",
    ),
    NoSpaceError: ("QuotaExceededException", "QuotaByStorageTypeExceededException"),
    PermanentError: (
        "InvalidPathException",
        "UnresolvedPathException",
        "RpcNoSuchMethodException",
        "PathComponentTooLongException",
        "MaxDirectoryItemsExceededException",
        "SnapshotException",
        "is a directory or file under",
        "block size is less than",
        "equested replication",
        "no eligible destination",  # a router's: the name would move to another cluster
    ),
}
"""Substrings of a NameNode's error, in order: the first match decides. HDFS has no error codes."""


def kind_of_error(text: str) -> type[BootseerError] | None:
    """The error class for a NameNode's answer, whose `text` includes the Java class; None if no rule matches."""
    # For a path below a file HDFS reports missing access rights.
    is_below_file = "(is not a directory)" in text and "AccessControlException" in text
    if is_below_file or ("FileNotFoundException" in text and "not a file" not in text):
        return NotFoundError
    for kind, parts in _KINDS.items():
        if any(part in text for part in parts):
            return kind
    return None
