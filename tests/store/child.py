"""Child processes of the contract suite: killed while writing, measuring memory, forking."""

from __future__ import annotations

import hashlib
import os
import sys
import warnings
from pathlib import Path

from bootseer.store.open import open_store
from bootseer.store.store import Store


def write_for_ever(store: Store) -> None:
    upload = store.upload()
    for _ in range(20):
        upload.write(bytes(1_000_000))
    print(20_000_000, flush=True)
    while True:
        upload.write(bytes(1_000))


def peak_kib() -> int:
    """Peak memory of this program. getrusage would include that of the parent process."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1])


def stream(store: Store) -> None:
    piece = os.urandom(1024 * 1024)
    warm = store.upload()
    warm.write(piece)
    assert sum(len(part) for part in store.read(warm.commit().name)) == len(piece)
    before_kib = peak_kib()
    upload = store.upload()
    for _ in range(128):
        upload.write(piece)
    stored = upload.commit()
    digest = hashlib.sha256()
    for part in store.read(stored.name, timeout_s=300):
        digest.update(part)
    equal = f"sha256:{digest.hexdigest()}" == stored.name and stored.size_bytes == 128 * len(piece)
    print(peak_kib() - before_kib, equal)


def fork(store: Store) -> None:
    upload = store.upload()
    upload.write(b"x" * 300_000)
    name = upload.commit().name
    assert b"".join(store.read(name)) == b"x" * 300_000
    # An adapter may have started threads by now; the child must work nevertheless.
    warnings.simplefilter("ignore", DeprecationWarning)
    pid = os.fork()
    if pid == 0:
        good = b"".join(store.read(name, 1, 299_999)) == b"x" * 299_999
        # Not `_exit`: closing what the parent created must not hang either.
        sys.exit(0 if good else 1)
    good = b"".join(store.read(name, 2)) == b"x" * 299_998
    print(good and os.waitpid(pid, 0)[1] == 0)


{"write-for-ever": write_for_ever, "stream": stream, "fork": fork}[sys.argv[1]](open_store(sys.argv[2]))
