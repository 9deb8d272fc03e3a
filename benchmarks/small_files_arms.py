"""The arms of `small_files`: one process that writes or reads many small files, through a mount and without BootSeer.

Run by `checkpoint_child`. `paths` are the files, of `length` bytes each, which are divided among `threads`.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from checkpoint_child import Job, main
from node import cpu_s

Run = Iterator[Callable[[], Any]]
T = TypeVar("T")


@contextmanager
def fuse_write(job: Job) -> Run:
    """Through a new mount: open, write, close."""
    data = os.urandom(job.length)

    def write(path: str) -> None:
        with Path(path).open("wb") as file:
            file.write(data)

    with _mounted(job) as folder:
        yield lambda: _each(job, job.paths, lambda path: write(f"{folder}{path}"))


@contextmanager
def fuse_read(job: Job) -> Run:
    """Through a new mount with an empty cache: open by name, read, close."""

    def read(path: str) -> int:
        return len(Path(path).read_bytes())

    with _mounted(job) as folder:
        yield lambda: _each(job, job.paths, lambda path: read(f"{folder}{path}"))


@contextmanager
def fuse_list_read(job: Job) -> Run:
    """Like `fuse_read`, after listing the folder."""

    def read(entry: os.DirEntry[str]) -> int:
        return len(Path(entry.path).read_bytes())

    def run(folder: Path) -> None:
        entries = list(os.scandir(f"{folder}{job.path}"))
        if len(entries) < len(job.paths):
            raise RuntimeError(f"{len(entries)} files and not {len(job.paths)}")
        _each(job, entries, read)

    with _mounted(job) as folder:
        yield lambda: run(folder)


@contextmanager
def native_write(job: Job) -> Run:
    """hdfs-native: create under the final name, write, close. Readers see incomplete files."""
    from hdfs_native import Client, WriteOptions

    client, data = Client(job.uri), os.urandom(job.length)
    client.get_file_info("/")
    options = WriteOptions(replication=job.replication, overwrite=True)

    def write(path: str) -> None:
        with client.create(path, options) as file:
            file.write(data)

    yield lambda: _each(job, job.paths, write)


@contextmanager
def native_read(job: Job) -> Run:
    """hdfs-native: open, read."""
    from hdfs_native import Client

    client = Client(job.uri)
    client.get_file_info("/")
    yield lambda: _each(job, job.paths, lambda path: len(client.read(path).read()))


@contextmanager
def pyarrow_write(job: Job) -> Run:
    """pyarrow over libhdfs, which uses the Java client: create under the final name, write, close."""
    there, data = _arrow(job), os.urandom(job.length)

    def write(path: str) -> None:
        with there.open_output_stream(path) as file:
            file.write(data)

    yield lambda: _each(job, job.paths, write)


@contextmanager
def pyarrow_read(job: Job) -> Run:
    """pyarrow over libhdfs: open, read."""
    there = _arrow(job)

    def read(path: str) -> int:
        with there.open_input_file(path) as file:
            return len(file.read())

    yield lambda: _each(job, job.paths, read)


def _arrow(job: Job) -> Any:
    from pyarrow import fs

    host, port = job.uri.removeprefix("hdfs://").split(":")
    there = fs.HadoopFileSystem(host, int(port), replication=job.replication)
    there.get_file_info("/")
    return there


def _each(job: Job, files: Sequence[T], do: Callable[[T], object]) -> None:
    """Each file, in `threads` threads."""
    with ThreadPoolExecutor(job.threads) as pool:
        done = list(pool.map(do, files))
    wrong = {count for count in done if count is not None} - {job.length}
    if wrong:
        raise RuntimeError(f"files of {sorted(map(str, wrong))} bytes and not of {job.length}")


@contextmanager
def _mounted(job: Job) -> Iterator[Path]:
    from bootseer.checkpoint.mount.mounted import mount_checkpoint
    from bootseer.checkpoint.mount.serving import MountRequest

    with tempfile.TemporaryDirectory() as runtime:
        mounted = mount_checkpoint(MountRequest(f"{job.uri}/"), None, runtime=Path(runtime), lifeline=True)
        daemon = mounted.state.daemon
        assert daemon is not None
        try:
            (mounted.target / job.path.lstrip("/")).stat()
            began_s = cpu_s(daemon.pid)
            yield mounted.target
            job.facts["cpu_s"] = cpu_s(daemon.pid) - began_s
        finally:
            mounted.unmount(force=True)


_ARMS = (fuse_write, fuse_read, fuse_list_read, native_write, native_read, pyarrow_write, pyarrow_read)
ARMS = {arm.__name__: arm for arm in _ARMS}

if __name__ == "__main__":
    main(ARMS)
