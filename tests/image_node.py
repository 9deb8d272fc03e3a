"""A node that runs images, for tests: a registry with a small real image, a cache, and mounts, removed at the end.

`node.reference` is the image in the registry: a layer with busybox, then one with two files of random bytes. Nothing
is converted yet.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import shutil
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from bootseer.image.conversion.convert import convert
from bootseer.image.mounting.mounted import MountedImage
from bootseer.image.reference import parse_reference
from bootseer.image.sources.source import open_source, this_platform
from bootseer.mounts import kernel
from bootseer.mounts.state import MountState, Runtime
from bootseer.store.open import open_registry, open_store
from bootseer.store.registry import BlobUpload
from busybox import CONFIG, make_tree
from oci_images import write_layout
from once import once
from registry import Registry

LARGE_BYTES = 6 << 20


@dataclass(frozen=True)
class Node:
    """A node with its registry and image."""

    folder: Path
    registry: Registry
    reference: str
    digest: str
    env: dict[str, str]

    @property
    def cache(self) -> Path:
        return Path(self.env["BOOTSEER_CACHE"])

    @property
    def runtime(self) -> Path:
        return Path(self.env["BOOTSEER_RUNTIME"])

    def requests(self, word: str = "") -> list[str]:
        """Paths of the requests to the registry so far that contain `word`."""
        return [logged.path for logged in self.registry.requests() if word in logged.path]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with make_node(tmp_path) as made:
        yield made


@contextlib.contextmanager
def make_node(tmp_path: Path) -> Iterator[Node]:
    """A node in an empty folder."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount")
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("/dev/fuse cannot be opened")
    _copy(once("box", _make_box), tmp_path)
    layout = tmp_path / "layout"
    digest = json.loads((layout / "index.json").read_text())["manifests"][0]["digest"]
    env = {"BOOTSEER_CACHE": str(tmp_path / "cache"), "BOOTSEER_RUNTIME": str(tmp_path / "runtime")}
    with Registry(tmp_path) as registry:
        try:
            yield Node(tmp_path, registry, f"{registry.host}/team/box:1", digest, env)
        finally:
            unmount_below(tmp_path)


def _make_box(folder: Path) -> None:
    """Create the image as a layout and as the data of a registry, and the tree that it is made from."""
    layers = base_layers(folder / "tree")
    write_layout(folder / "layout", layers, tag="1", architecture=this_platform().architecture, **CONFIG)
    with Registry(folder / "at") as registry:
        push(folder / "layout", registry.host, "team/box", "1")
    _keep_data(registry, folder)


def _keep_data(registry: Registry, folder: Path) -> None:
    (folder / "registry").mkdir(parents=True)
    (registry.folder / "data").rename(folder / "registry" / "data")
    shutil.rmtree(folder / "at")


def convert_box(reference: str) -> str:
    """Convert an image of a registry into its own repository; returns its digest."""
    with (
        contextlib.closing(open_source(parse_reference(reference))) as source,
        contextlib.closing(open_store(f"oci://{reference.rpartition(':')[0]}")) as store,
    ):
        return convert(source, store).digest


def have_converted(node: Node) -> None:
    """Like `convert_box` of the node's image."""
    have_in_registry(node, "converted-box", lambda registry: convert_box(f"{registry.host}/team/box:1"))


def have_in_registry(node: Node, name: str, work: Callable[[Registry], object]) -> None:
    """Like `work(node.registry)`, but run once for all tests: its result must depend only on the node's image."""

    def make(folder: Path) -> None:
        _copy(once("box", _make_box) / "registry", folder / "at" / "registry")
        with Registry(folder / "at") as registry:
            work(registry)
        _keep_data(registry, folder)

    _copy(once(name, make), node.folder)


def _copy(tree: Path, folder: Path) -> None:
    """Copy a tree; large files, which no test changes, become hard links."""

    def copy(source: str, target: str) -> None:
        if Path(source).stat().st_size < 1 << 20:
            shutil.copy2(source, target)
        elif not Path(target).exists():
            Path(target).hardlink_to(source)

    shutil.copytree(tree, folder, symlinks=True, dirs_exist_ok=True, copy_function=copy)


def push(layout: Path, host: str, repository: str, tag: str) -> None:
    """Copy the only image of a layout into a registry."""
    registry = open_registry(host, repository)
    index = json.loads((layout / "index.json").read_text())
    with contextlib.closing(registry):
        entry = index["manifests"][0]
        manifest = _blob(layout, entry["digest"])
        document = json.loads(manifest)
        for blob in (document["config"], *document["layers"]):
            upload = BlobUpload(registry)
            upload.write(_blob(layout, blob["digest"]))
            upload.commit()
        registry.put_manifest(tag, manifest, entry["mediaType"])


def _blob(layout: Path, digest: str) -> bytes:
    return (layout / "blobs" / "sha256" / digest.removeprefix("sha256:")).read_bytes()


def base_layers(tree: Path) -> list[bytes]:
    """Two layers, also written below `tree`: busybox with its users, and two files of random bytes."""
    make_tree(tree)
    rng = random.Random(7)
    for name in ("hot", "cold"):
        (tree / name).write_bytes(rng.randbytes(LARGE_BYTES))
    return [tar(tree, ["bin", "etc", "home", "tmp"]), tar(tree, ["work", "hot", "cold"])]


def busybox_layer() -> bytes:
    """The first of `base_layers`."""
    return tar(once("box", _make_box) / "tree", ["bin", "etc", "home", "tmp"])


def tar(tree: Path, names: list[str]) -> bytes:
    """A layer of some files of a tree."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name in names:
            archive.add(tree / name, name)
    return buffer.getvalue()


def unmount_below(folder: Path) -> None:
    """Unmount everything below a folder; daemons end with their mounts."""
    prefix = f"{os.path.realpath(folder)}/"
    for point in reversed([point for point in kernel.mount_points() if point.startswith(prefix)]):
        kernel.unmount(Path(point), lazy=True)


def mounted_image(runtime: Runtime, state: MountState, cache: Path) -> MountedImage:
    """The handle of a mount that was not made from a converted image, or that does not exist."""
    made = SimpleNamespace(
        runtime=runtime,
        daemon=None,
        pulled=Counter(),
        say=lambda line: None,
        options=SimpleNamespace(cache=cache),
        lifeline=False,
    )
    return MountedImage(made, state, {}, {})  # type: ignore[arg-type] # the attributes that a handle uses
