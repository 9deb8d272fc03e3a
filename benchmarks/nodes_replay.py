"""Repeats the reads of a recorded start in their order and with their pauses: `nodes_replay.py PLAN [CHECKPOINTS]`.

Runs in the container of a node, with only the image's Python. PLAN has a line for each read (kind, pause in
milliseconds, offset, length, path). Then all of the newest checkpoint is read, as by a replica of the model. Prints
`ready`, the monotonic time, which all processes share, and a checksum of the data of image and checkpoint. Then it
waits for a line, like a job that continues.
"""

import os
import sys
import time
import zlib

PIECE = 4 << 20


def replay(plan: str) -> int:
    """Do the reads; returns a checksum of those from the image."""
    checksum = 0
    with open(plan) as lines:  # noqa: PTH123 - a program of its own, which starts fast
        for line in lines:
            kind, pause_ms, offset, length, path = line.rstrip("\n").split(" ", 4)
            time.sleep(int(pause_ms) / 1000)
            data = read(path, int(offset), int(length))
            # Bytecode compiled by pip contains other times than that of a snapshot.
            if kind == "image":
                checksum = zlib.crc32(data, checksum)
    return checksum


def read(path: str, offset: int, length: int) -> bytes:
    file = os.open(path, os.O_RDONLY)
    try:
        return os.pread(file, length, offset)
    finally:
        os.close(file)


def read_all(folder: str, checksum: int) -> int:
    """Read all files of a folder; returns the updated checksum."""
    for place, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            path, offset = f"{place}/{name}", 0
            while data := read(path, offset, PIECE):
                checksum = zlib.crc32(data, checksum)
                offset += len(data)
    return checksum


if __name__ == "__main__":
    found = replay(sys.argv[1])
    for root in sys.argv[2:]:
        # `latest` names the newest checkpoint.
        newest = read(os.path.join(root, "latest"), 0, 4096).decode().strip()  # noqa: PTH118
        found = read_all(os.path.join(root, newest), found)  # noqa: PTH118
    print("ready", time.monotonic(), found, flush=True)
    # Training begins when all nodes are ready.
    sys.stdin.readline()
    print("began", flush=True)
