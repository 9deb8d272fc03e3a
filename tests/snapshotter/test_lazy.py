"""Converted images are mounted once for all containers, and are there as long as these need them."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from bootseer.errors import TransientError
from bootseer.fuse import syscalls
from bootseer.image.conversion.convert import convert as convert_image
from bootseer.image.document import ImageDocument
from bootseer.image.mounting.mounted import unmount
from bootseer.image.reference import parse_reference
from bootseer.image.sources.source import open_source
from bootseer.mounts.state import Runtime
from bootseer.snapshotter import lazy
from bootseer.snapshotter.lazy import LazyImages, Settings
from bootseer.snapshotter.records import ExistsError
from bootseer.snapshotter.snapshots import Snapshots
from bootseer.store.open import open_store
from image_node import LARGE_BYTES, unmount_below
from oci_images import directory, file, layer, write_layout

pytestmark = [pytest.mark.root, pytest.mark.fuse, pytest.mark.slow]


def test_calls_that_waited_for_a_mount_that_failed_do_not_try_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a store that hangs, each would wait a minute longer than the previous one."""
    images = LazyImages(tmp_path, Settings(str(tmp_path / "cache"), str(tmp_path / "runtime")))
    (tmp_path / "images" / f"{'a' * 64}.json").write_text(
        json.dumps({"digest": "sha256:" + "a" * 64, "store": "", "identities": [], "chains": {}})
    )
    all_wait, tries, lock = threading.Barrier(5), [], images._mount_lock

    def mount(known: object) -> None:
        tries.append(known)
        all_wait.wait(60)
        raise TransientError("the store does not answer")

    def waited_for(digest: str) -> Any:
        threading.Thread(target=all_wait.wait, args=(60,)).start()
        return lock(digest)

    monkeypatch.setattr(images, "_mount", mount)
    monkeypatch.setattr(images, "_mount_lock", waited_for)
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(images.lowers, f"{'a' * 64}-1") for _ in range(4)]
    assert [str(call.exception()) for call in calls] == ["the store does not answer"] * 4
    assert len(tries) == 1


def have_images(
    folder: Path, layers: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> tuple[ImageDocument, LazyImages, dict[str, str]]:
    """Convert an image of these layers; returns the images of a node, and the labels that containerd has for this."""
    write_layout(folder / "layout", layers, tag="1")
    opened = open_source(parse_reference(f"oci:{folder}/layout"))
    with closing(opened) as source, closing(open_store(str(folder / "store"))) as store:
        document = convert_image(source, store)
    monkeypatch.setattr(lazy, "_DECIDE_S", 60.0)
    places = (str(folder / name) for name in ("cache", "runtime", "store"))
    labels = {f"containerd.io/snapshot/cri.{name}": value for name, value in
              (("manifest-digest", document.digest), ("image-ref", "registry.example/team/many:1"))}  # fmt: skip
    return document, LazyImages(folder / "root", Settings(*places, loading="lazy")), labels


def pull(snapshots: Snapshots, document: ImageDocument, labels: dict[str, str]) -> str:
    """Ask for the layers that are not there, like containerd; returns the chain id of the last one."""
    chain = ""
    for each in document.layers:
        above = hashlib.sha256(f"{chain} {each.diff_id}".encode()).hexdigest()
        parent, chain = chain, f"sha256:{above}" if chain else each.diff_id
        if snapshots.records.find(chain) is None:
            with pytest.raises(ExistsError, match="provided by"):
                snapshots.prepare(f"extract {chain}", parent, {**labels, "containerd.io/snapshot.ref": chain})
    return chain


def test_a_container_reads_on_when_its_image_was_unmounted_and_is_mounted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`bootseer image umount` leaves the daemon to containers. The next mount ended it."""
    content = random.Random(1).randbytes(LARGE_BYTES)
    document, images, labels = have_images(tmp_path, [layer(directory("."), file("cold", content))], monkeypatch)
    try:
        name = images.layer(document.layers[0].diff_id, "", labels, lambda layer: None)
        assert name is not None
        for folder in ("at", "empty"):
            (tmp_path / folder).mkdir()
        lowers = [*images.lowers(name), tmp_path / "empty"]
        syscalls.mount("overlay", "overlay", tmp_path / "at", options=f"lowerdir={':'.join(map(str, lowers))}")
        runtime = Runtime(tmp_path / "runtime")
        (state,) = runtime.all()
        unmount(runtime, state)
        assert images.lowers(name)
        assert (tmp_path / "at" / "cold").read_bytes() == content
    finally:
        unmount_below(tmp_path)


def test_the_program_that_mounts_was_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by the kernel when memory is short: it says nothing, and the warning had no reason."""
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nkill -9 $$\n")
    program.chmod(0o755)
    document, images, labels = have_images(tmp_path, [layer(directory("."))], monkeypatch)
    monkeypatch.setattr(sys, "executable", str(program))
    assert images.layer(document.layers[0].diff_id, "", labels, lambda layer: None) is None
    with pytest.raises(TransientError, match=f"{document.digest} cannot be mounted: .*SIGKILL"):
        images.lowers(f"{document.digest.removeprefix('sha256:')}-1")


def test_an_image_is_unmounted_though_another_one_has_its_first_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one did not ask for that layer, since containerd had it from the first one, which stayed mounted: what
    kubelet's garbage collection removed freed no space."""
    shared, *own = (layer(directory("."), file(name, name.encode())) for name in ("shared", "one", "two"))
    found = [have_images(tmp_path / name, [shared, each], monkeypatch) for name, each in zip("ab", own, strict=True)]
    store = tmp_path / "a/store"
    shutil.copytree(tmp_path / "b/store", store, dirs_exist_ok=True)
    snapshots = Snapshots(tmp_path / "root", found[0][1])
    mounts = tmp_path / "a/root/images"
    try:
        tops = [pull(snapshots, document, labels) for document, _, labels in found]
        snapshots.prepare("container", tops[1], {})
        snapshots.remove(tops[0])
        assert [path.stem for path in mounts.glob("*.json")] == [found[1][0].digest.removeprefix("sha256:")]
        (mount,) = snapshots.prepare("of the shared layer", found[0][0].layers[0].diff_id, {})
        lowers = mount.options[-1].removeprefix("lowerdir=").split(":")
        assert [path.name for lower in lowers for path in Path(lower).iterdir()] == ["shared"]
        for key in ("of the shared layer", "container", tops[1], found[0][0].layers[0].diff_id):
            snapshots.remove(key)
        assert not list(mounts.iterdir())
    finally:
        unmount_below(tmp_path)


def test_containerd_can_mount_an_image_of_many_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It passes all paths in one page, relative to their common folder as working directory."""
    layers = [layer(directory("."), file(f"file-{number:03}", b"%d" % number)) for number in range(70)]
    document, images, labels = have_images(tmp_path, layers, monkeypatch)
    snapshots = Snapshots(tmp_path / "root", images)
    try:
        chain = pull(snapshots, document, labels)
        (mount,) = snapshots.prepare("container", chain, {})
        *others, lower = mount.options
        names = lower.removeprefix("lowerdir=").split(":")
        monkeypatch.chdir(os.path.commonpath(names))
        short = ",".join([*others, "lowerdir=" + ":".join(os.path.relpath(name) for name in names)])
        (tmp_path / "at").mkdir()
        syscalls.mount("overlay", "overlay", tmp_path / "at", options=short)
        assert len(names) == len(list((tmp_path / "at").iterdir())) == 70
        assert (tmp_path / "at" / "file-066").read_bytes() == b"66"
    finally:
        unmount_below(tmp_path)
    snapshots.remove("container")
    for record in reversed(snapshots.records.all()):
        snapshots.remove(record.key)
    assert not list((tmp_path / "root" / "l").iterdir())
