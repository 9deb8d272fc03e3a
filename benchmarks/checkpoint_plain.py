"""The baselines of `checkpoint`: reading and writing HDFS without BootSeer. Run by `checkpoint_child`."""

from __future__ import annotations

import http.client
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from checkpoint_child import MIB, PIECE, Job, buffer, main

_THREADS = 16
_RANGE = 16 * MIB
"""The block size of the ordinary file: each thread reads from one DataNode at a time."""
_WRITE = 8 * MIB
Run = Iterator[Callable[[], Any]]


@contextmanager
def native_stream(job: Job) -> Run:
    """hdfs-native, from the beginning to the end."""
    client, into = _client(job), buffer(job.length)
    yield lambda: _stream(client, job.path, job.offset, into)


@contextmanager
def native_ranges(job: Job) -> Run:
    """hdfs-native, 16 threads, each of which reads one range at a time."""
    client, into = _client(job), buffer(job.length)

    def run() -> memoryview:
        file = client.read(job.path)

        def read(at: int) -> None:
            length = min(_RANGE, job.length - at)
            into[at : at + length] = file.read_range(job.offset + at, length)

        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(read, range(0, job.length, _RANGE)))
        return into

    yield run


@contextmanager
def native_streams(job: Job) -> Run:
    """hdfs-native, one thread and file for each link: the rate of the links."""
    client = _client(job)
    each = job.length // len(job.paths)
    into = buffer(job.length)

    def run() -> memoryview:
        with ThreadPoolExecutor(len(job.paths)) as pool:
            parts = [into[i * each : (i + 1) * each] for i in range(len(job.paths))]
            list(pool.map(lambda path, part: _stream(client, path, 0, part), job.paths, parts))
        return into

    yield run


@contextmanager
def pyarrow_stream(job: Job) -> Run:
    """pyarrow over libhdfs, which uses the Java client, from the beginning to the end."""
    from pyarrow import fs

    host, port = job.uri.removeprefix("hdfs://").split(":")
    there, into = fs.HadoopFileSystem(host, int(port)), buffer(job.length)
    there.get_file_info("/")

    def run() -> memoryview:
        with there.open_input_file(job.path) as file:
            file.seek(job.offset)
            at = 0
            while at < job.length:
                at += file.readinto(into[at : at + PIECE])
        return into

    yield run


@contextmanager
def webhdfs(job: Job) -> Run:
    """HTTP from the DataNode that has the file's first block, to which the NameNode would redirect."""
    connection, into = http.client.HTTPConnection(job.address, timeout=60), buffer(job.length)
    query = f"op=OPEN&user.name=root&namenoderpcaddress={job.uri.removeprefix('hdfs://')}"

    def run() -> memoryview:
        connection.request("GET", f"/webhdfs/v1{job.path}?{query}&offset={job.offset}&length={job.length}")
        answer = connection.getresponse()
        if answer.status != 200:
            raise RuntimeError(f"WebHDFS answers {answer.status}: {answer.read(300)!r}")
        at = 0
        while at < job.length:
            if not (length := answer.readinto(into[at:])):
                raise RuntimeError(f"WebHDFS ends at {at} of {job.length} bytes")
            at += length
        return into

    yield run
    connection.close()


@contextmanager
def native_dcp(job: Job) -> Run:
    """PyTorch's own FsspecReader over hdfs-native's fsspec file system."""
    from hdfs_native import FileReader

    def readinto(file: Any, into: Any) -> int:
        data = file.read(len(into))
        into[: len(data)] = data
        return len(data)

    # PyTorch needs this method, which hdfs-native 0.14 lacks.
    FileReader.readinto = readinto
    with _fsspec_dcp(job) as run:
        yield run


@contextmanager
def pyarrow_dcp(job: Job) -> Run:
    """PyTorch's own FsspecReader over fsspec's file system for pyarrow and libhdfs."""
    import fsspec
    from fsspec.implementations.arrow import HadoopFileSystem

    fsspec.register_implementation("hdfs", HadoopFileSystem, clobber=True)
    with _fsspec_dcp(job) as run:
        yield run


@contextmanager
def _fsspec_dcp(job: Job) -> Run:
    import torch.distributed.checkpoint as dcp
    from checkpoint_content import empty
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

    tensors = empty(job.length)
    reader = FsspecReader(f"{job.uri}{job.path}")
    reader.fs.exists("/")

    def run() -> dict[str, Any]:
        dcp.load(tensors, storage_reader=reader)
        return tensors

    yield run


@contextmanager
def native_write(job: Job) -> Run:
    """hdfs-native, one concurrent writer for each path. They write the content of `local`, or repeated bytes."""
    from hdfs_native import WriteOptions

    client, piece = _client(job), os.urandom(_WRITE)
    each = job.length // len(job.paths)
    options = WriteOptions(block_size=job.block_bytes, replication=job.replication, overwrite=True)

    def write(path: str) -> None:
        with ExitStack() as stack:
            source = stack.enter_context(Path(job.local).open("rb")) if job.local else None
            file = stack.enter_context(client.create(path, options))
            for at in range(0, each, _WRITE):
                length = min(_WRITE, each - at)
                file.write(source.read(length) if source else piece[:length])

    def run() -> None:
        with ThreadPoolExecutor(len(job.paths)) as pool:
            list(pool.map(write, job.paths))

    yield run


def _client(job: Job) -> Any:
    from hdfs_native import Client

    client = Client(job.uri)
    client.get_file_info("/")
    return client


def _stream(client: Any, path: str, offset: int, into: memoryview) -> memoryview:
    at = 0
    for piece in client.read(path).read_range_stream(offset, len(into)):
        into[at : at + len(piece)] = piece
        at += len(piece)
    return into


_ARMS = (
    native_stream, native_ranges, native_streams, native_dcp, native_write, pyarrow_stream, pyarrow_dcp, webhdfs,
)  # fmt: skip
ARMS = {arm.__name__: arm for arm in _ARMS}

if __name__ == "__main__":
    main(ARMS)
