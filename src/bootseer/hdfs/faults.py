"""What can go wrong with one DataNode, as its readers tell it apart. Raised by `datanode`, judged by `schedule`."""

from __future__ import annotations


class DataNodeError(Exception):
    """The DataNode did not give what was asked. The connection is of no more use."""


class RefusedError(DataNodeError):
    """It answers that it cannot: it has no such block, or what we showed is no right to read it (`token`)."""

    def __init__(self, message: str, *, token: bool) -> None:
        super().__init__(message)
        self.token = token


class UncheckedError(RefusedError):
    """It has the block, but nothing to check it with."""

    def __init__(self) -> None:
        super().__init__("it has no checksums of the block", token=False)


class SilentError(DataNodeError):
    """It says nothing for longer than its reader wants to wait."""


class WrongBytesError(DataNodeError):
    """Bytes do not match the checksums that it keeps beside them."""


class UnevenError(DataNodeError):
    """Its packets are not as they were foretold. Nothing is wrong with it: it must be read packet by packet."""
