"""What a NameNode's errors mean to who asked. It is not in numbers: the name of the Java class, and sometimes the text,
say it, and hdfs-native passes them on as text. Called by `namenode` and `native`.
"""

from __future__ import annotations

from typing import Final

from bootseer.errors import AccessError, BootseerError, PermanentError, TransientError


class TakenError(PermanentError):
    """There is something of this name already."""


class NoRoomError(PermanentError):
    """No DataNode has room for a block."""


class QuotaError(NoRoomError):
    """A folder may not have so much: a quota of it, or of one above it, is exceeded."""


class NotYetError(TransientError):
    """The NameNode changes no name yet: it has just started, or its operator wants it so (safe mode)."""


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
    ),
}
"""Parts of answers that mean something to who asked. Only the text says what an error is."""


def kind_of_error(text: str) -> type[BootseerError] | None:
    """What a NameNode's answer means for who asked, None for nothing special; `text` has the Java class too."""
    for kind, parts in _KINDS.items():
        if any(part in text for part in parts):
            return kind
    return None
