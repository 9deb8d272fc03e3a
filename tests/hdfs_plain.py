"""Files written and read by hdfs-native without BootSeer, as other programs' files and to verify BootSeer's."""

from __future__ import annotations

import contextlib
import time

_WRITE_S = 180.0
_SETTINGS = {"dfs.client.socket-timeout": "30000"}


def write(uri: str, path: str, data: bytes, *, block_size: int = 1024 * 1024) -> None:
    """Write a file, in several blocks if needed.

    The library requests the next block as soon as the DataNodes have acknowledged the last one, and fails if they have
    not reported it to the NameNode yet, for example on a busy machine: then this writes the file again.
    """
    from hdfs_native import Client, WriteOptions

    client = Client(uri, _SETTINGS)
    until = time.monotonic() + _WRITE_S
    while True:
        file = client.create(path, WriteOptions(block_size=block_size, overwrite=True))
        try:
            file.write(data)
        except RuntimeError as error:
            # After an error, closing would not succeed. Once the file is deleted, it fails immediately.
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
