"""What can go wrong with one DataNode, and what a NameNode's errors mean to the caller.

A NameNode's errors have no numbers: the name of the Java class, and sometimes the text, tell them apart, and
hdfs-native passes them on as text.
"""

from __future__ import annotations

from typing import Final

from bootseer.errors import AccessError, BootseerError, PermanentError, TransientError


class DataNodeError(Exception):
    """The DataNode did not give what was asked. The connection is of no more use."""


class RefusedError(DataNodeError):
    """It answers that it cannot: it has no such block, or what we showed gives no right to read it (`token`)."""

    def __init__(self, message: str, *, token: bool) -> None:
        super().__init__(message)
        self.token = token


class UncheckedError(RefusedError):
    """It has the block, but nothing to check it with."""

    def __init__(self) -> None:
        super().__init__("it has no checksums of the block", token=False)


class SilentError(DataNodeError):
    """It sends nothing for longer than its reader waits."""


class WrongBytesError(DataNodeError):
    """Bytes do not match the checksums that it keeps beside them."""


class UnevenError(DataNodeError):
    """Its packets are not as they were predicted. Nothing is wrong with it: it must be read packet by packet."""


class TakenError(PermanentError):
    """There is something of this name already."""


class NoRoomError(PermanentError):
    """No DataNode has room for a block."""


class QuotaError(NoRoomError):
    """A folder may not have so much: a quota of it, or of one above it, is exceeded."""


class NotYetError(TransientError):
    """The NameNode changes no name yet: it has just started, or an operator has set safe mode."""


_KINDS: Final[dict[type[BootseerError], tuple[str, ...]]] = {
    TakenError: ("AlreadyExistsException", "AlreadyBeingCreatedException", "already exists", "Path is not a directory"),
    AccessError: ("AccessControlException", "AuthorizationException", "GSSAPIError"),
    NotYetError: ("SafeModeException", "RetriableException"),
    QuotaError: ("QuotaExceededException", "QuotaByStorageTypeExceededException"),
    PermanentError: (
        "PathIsNotEmptyDirectoryException",
        "InvalidPathException",
        "ParentNotDirectoryException",
        "PathComponentTooLongException",
        "MaxDirectoryItemsExceededException",
        "is not empty",
        "must both be directories",
        "is a directory or file under",
        "block size is less than",
        "equested replication",
        # Routers': no mount covers the path, or a name would move to another cluster.
        "Cannot find locations for",
        "no eligible destination",
    ),
}
"""Parts of answers that mean something to the caller. Only the text says what an error is."""


def kind_of_error(text: str) -> type[BootseerError] | None:
    """What a NameNode's answer means for the caller, None for nothing special; `text` has the Java class too."""
    for kind, parts in _KINDS.items():
        if any(part in text for part in parts):
            return kind
    return None
