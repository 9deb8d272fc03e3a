"""Files that hdfs-native writes and reads by itself: what others leave in HDFS, and a second opinion."""

from __future__ import annotations

import contextlib
import time

_WRITE_S = 180.0
_SETTINGS = {"dfs.client.socket-timeout": "30000"}


def write(uri: str, path: str, data: bytes, *, block_size: int = 1024 * 1024) -> None:
    """Write a file of as many blocks as it takes.

    The library asks for the next block right when the DataNodes have confirmed the last one, and gives up when they
    have not told the NameNode yet, as on a busy machine: then the file is written again.
    """
    from hdfs_native import Client, WriteOptions

    client = Client(uri, _SETTINGS)
    until = time.monotonic() + _WRITE_S
    while True:
        file = client.create(path, WriteOptions(block_size=block_size, overwrite=True))
        try:
            file.write(data)
        except RuntimeError as error:
            # What has failed cannot be closed any more. That it is gone, closing it tells at once.
            client.delete(path)
            with contextlib.suppress(RuntimeError, OSError):
                file.close()
            if "NotReplicatedYetException" not in str(error) or time.monotonic() > until:
                raise
        else:
            file.close()
            return


def read(uri: str, path: str) -> bytes:
    """All bytes of a file."""
    from hdfs_native import Client

    return bytes(Client(uri, _SETTINGS).read(path).read())
