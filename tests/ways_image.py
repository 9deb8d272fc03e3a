"""The fixture `image`: an image with files of many kinds, converted into a store that every user may read."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import replace

from bootseer.image.conversion.convert import convert
from bootseer.image.mounting.request import Request
from bootseer.image.reference import parse_reference
from bootseer.image.sources.source import open_source, this_platform
from bootseer.mounts.state import Runtime
from bootseer.store.open import open_store
from busybox import CONFIG
from image_node import busybox_layer, unmount_below
from oci_images import (
    digest_of,
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
from once import once, spread

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


def _make(folder: Path, layers: Sequence[bytes]) -> None:
    write_layout(folder / "layout", layers, tag="1", architecture=this_platform().architecture, **CONFIG)
    reference = parse_reference(f"oci:{folder}/layout:1")
    with closing(open_source(reference)) as source, closing(open_store(str(folder / "store"))) as store:
        convert(source, store)
    subprocess.run(["chmod", "-R", "a+rX", folder], check=True)


class Image:
    """An image, converted into a store that everyone may read: converted once for all tests, which copy it."""

    def __init__(self, folder: Path, layers: Sequence[bytes]) -> None:
        self.folder = folder
        name = "image-" + digest_of(b"".join(layers)).removeprefix("sha256:")
        shutil.copytree(once(name, partial(_make, layers=layers)), folder, dirs_exist_ok=True)
        self.reference = f"oci:{folder}/layout:1"
        self.store = str(folder / "store")
        self.digest = json.loads((folder / "layout" / "index.json").read_text())["manifests"][0]["digest"]

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
def image() -> Iterator[Image]:
    with made_image([busybox_layer(), *UPPER]) as image:
        yield image


@contextmanager
def made_image(layers: Sequence[bytes]) -> Iterator[Image]:
    if os.geteuid() != 0:
        pytest.skip("only root may mount")
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("/dev/fuse cannot be opened")
    # Not in pytest's folder, which each session of pytest closes for other users.
    folder = Path(tempfile.mkdtemp(prefix="bootseer-test-", dir="/var/tmp"))
    folder.chmod(0o755)
    spread(folder)
    try:
        yield Image(folder, layers)
    finally:
        unmount_below(folder)
        deadline = time.monotonic() + 120
        # If other mount namespaces have copies of the mounts, daemons run and fill their cache for a while.
        while folder.exists():
            assert time.monotonic() < deadline, f"{folder} cannot be deleted"
            shutil.rmtree(folder, ignore_errors=True)
