"""BootSeer's arms of `checkpoint`: the same bytes through each of its interfaces. Run by `checkpoint_child`."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from checkpoint_child import PIECE, Job, buffer, main

from bootseer.checkpoint.layout import Policy
from bootseer.checkpoint.mount.mounted import mount_checkpoint
from bootseer.checkpoint.mount.serving import MountRequest
from bootseer.checkpoint.publish import PutSettings, put_checkpoint
from bootseer.checkpoint.reading.reading import Reading
from bootseer.places import open_place

_LARGE = 16 * PIECE
_PASSES = 8
Run = Iterator[Callable[[], Any]]


@contextmanager
def direct(job: Job) -> Run:
    """One call of `readinto` for the whole range."""
    with closing(open_place(f"{job.uri}/")) as place, closing(Reading(place)) as reading:
        place.stat("")
        into = buffer(job.length)

        def run() -> memoryview:
            with reading.open(job.path.lstrip("/")) as file:
                if file.readinto(job.offset, into) != job.length:
                    raise RuntimeError(f"{job.path} is shorter than {job.offset + job.length} bytes")
            return into

        yield run
        job.facts.update(reading.facts())


@contextmanager
def fuse(job: Job) -> Run:
    """Through the mount, like `dd bs=4M`, without the node cache."""
    with _mounted(job, None) as (folder, status):
        into = buffer(job.length)
        yield lambda: _read_file(folder / job.path.lstrip("/"), into, PIECE)
        job.facts.update(status())


@contextmanager
def fuse_warm(job: Job) -> Run:
    """Through a new mount, from the node cache, in large reads."""
    with tempfile.TemporaryDirectory(dir=job.local) as cache:
        into = buffer(job.length)
        for _ in range(_PASSES):
            # Chunks that left memory before they were cached are cached by the next pass.
            with _mounted(job, Path(cache)) as (folder, status):
                _read_file(folder / job.path.lstrip("/"), into, PIECE)
                if not status()["chunks"]:
                    break
        else:
            raise RuntimeError(f"after {_PASSES} passes the node's cache does not have all of {job.path}")
        with _mounted(job, Path(cache)) as (folder, status):
            yield lambda: _read_file(folder / job.path.lstrip("/"), into, _LARGE)
            job.facts.update(status())


@contextmanager
def dcp(job: Job) -> Run:
    """PyTorch's `dcp.load` with BootSeer's reader, without a mount."""
    import torch.distributed.checkpoint
    from checkpoint_content import empty

    from bootseer.checkpoint.dcp import StripedReader

    tensors = empty(job.length)

    def run() -> dict[str, Any]:
        torch.distributed.checkpoint.load(tensors, storage_reader=StripedReader(f"{job.uri}{job.path}"))
        return tensors

    yield run


@contextmanager
def safetensors(job: Job) -> Run:
    """All tensors of a safetensors file, without a mount."""
    from bootseer.checkpoint.safetensors import load_file

    yield lambda: load_file(f"{job.uri}{job.path}")


@contextmanager
def put(job: Job) -> Run:
    """Publish a local file or folder."""
    folder, _, name = job.path.lstrip("/").rpartition("/")
    policy = Policy(stripes=job.stripes, parity=job.parity)
    with closing(open_place(f"{job.uri}/")) as place:
        place.stat("")

        def run() -> None:
            settings = PutSettings(policy=policy, move_latest=False)
            done = put_checkpoint(place, Path(job.local), name, folder=folder, settings=settings)
            job.facts.update(size_bytes=done.size_bytes, num_striped=done.num_striped)

        yield run


@contextmanager
def _mounted(job: Job, cache: Path | None) -> Iterator[tuple[Path, Callable[[], dict[str, Any]]]]:
    with tempfile.TemporaryDirectory() as runtime:
        request = MountRequest(f"{job.uri}/", cache=cache, read_only=True)
        mounted = mount_checkpoint(request, None, runtime=Path(runtime), lifeline=True)
        try:
            yield mounted.target, mounted.status
        finally:
            mounted.unmount(force=True)


def _read_file(path: Path, into: memoryview, piece: int) -> memoryview:
    file = os.open(path, os.O_RDONLY)
    try:
        at = 0
        while at < len(into):
            if not (length := os.preadv(file, [into[at : at + piece]], at)):
                raise RuntimeError(f"{path.name} ends at {at} bytes")
            at += length
    finally:
        os.close(file)
    return into


ARMS = {arm.__name__: arm for arm in (direct, fuse, fuse_warm, dcp, safetensors, put)}

if __name__ == "__main__":
    main(ARMS)
