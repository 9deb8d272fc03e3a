"""An image with files of many kinds, converted into a store that every user may read; the fixture `image`."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from bootseer.image.conversion.convert import convert
from bootseer.image.mounting.request import Request
from bootseer.image.reference import parse_reference
from bootseer.image.sources.open import open_source, this_platform
from bootseer.mounts.state import Runtime
from bootseer.store.open import open_store
from busybox import CONFIG
from image_node import base_layers, unmount_below
from oci_images import (
    directory,
    fifo,
    file,
    hard_link,
    layer,
    opaque,
    symlink,
    whiteout,
    write_layout,
)

UPPER = [
    layer(
        directory("d", mode=0o750, uid=3, gid=4),
        directory("d/sub"),
        file("d/below", b"of the lower layer"),
        file("d/changed", b"old"),
        file("d/gone", b"old"),
        directory("hidden"),
        file("hidden/old", b"old"),
        directory("becomes"),
        file("becomes/inner", b"old"),
        file("owned", b"content", uid=77, gid=78, mode=0o4755, mtime=1_600_000_000, xattrs={"user.a": b"1"}),
        file("secret", b"for the owner alone", uid=77, mode=0o600),
        hard_link("hard", "owned"),
        symlink("link", "/outside/the/root"),
        fifo("pipe"),
        file("large", bytes(range(256)) * 8192),
        *(file(f"d/sub/{number:04d}", str(number).encode()) for number in range(300)),
    ),
    layer(
        directory("d", mode=0o755),
        file("d/changed", b"new"),
        whiteout("d/gone"),
        opaque("hidden"),
        file("hidden/new", b"new"),
        whiteout("becomes"),
        file("becomes", b"a file now"),
        file("d/sub/0001", b"new"),
        whiteout("d/sub/0002"),
    ),
]


class Image:
    """One image, converted into a store that everybody may read."""

    def __init__(self, folder: Path, layers: Sequence[bytes]) -> None:
        self.folder = folder
        write_layout(folder / "layout", layers, tag="1", architecture=this_platform().architecture, **CONFIG)
        self.reference = f"oci:{folder}/layout:1"
        self.store = str(folder / "store")
        with closing(open_source(parse_reference(self.reference))) as source, closing(open_store(self.store)) as store:
            self.digest = convert(source, store).digest
        subprocess.run(["chmod", "-R", "a+rX", folder / "store", folder / "layout"], check=True)

    def request(self, **changes: object) -> Request:
        reference = parse_reference(self.reference)
        plain = Request(
            reference, self.store, cache=self.folder / "cache", runtime=self.folder / "runtime", loading="lazy"
        )
        return replace(plain, **changes)  # type: ignore[arg-type]

    @property
    def runtime(self) -> Runtime:
        return Runtime(self.folder / "runtime")


@pytest.fixture
def image(tmp_path: Path) -> Iterator[Image]:
    with made_image([base_layers(tmp_path / "tree")[0], *UPPER]) as image:
        yield image


@contextmanager
def made_image(layers: Sequence[bytes]) -> Iterator[Image]:
    if os.geteuid() != 0:
        pytest.skip("only root may mount")
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("/dev/fuse cannot be opened")
    # Not below pytest's own folder, which every session of pytest closes for other users.
    folder = Path(tempfile.mkdtemp(prefix="bootseer-test-", dir="/var/tmp"))
    folder.chmod(0o755)
    try:
        yield Image(folder, layers)
    finally:
        unmount_below(folder)
        shutil.rmtree(folder)
