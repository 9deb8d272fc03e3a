"""How one read of a file in HDFS ended. Made by `reads`; its callers may know it under a name of their own."""

from __future__ import annotations

from typing import NamedTuple

from bootseer.errors import BootseerError


class ReadOutcome(NamedTuple):
    """How one read ended."""

    error: BootseerError | None
    node: str
    """Who served it, or the last of those who did: `host:port` of a DataNode; "" where nobody did."""
