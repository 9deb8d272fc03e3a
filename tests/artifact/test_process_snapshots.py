"""Process snapshots on the node and in stores: complete and verified, or none, without making starts fail."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import zstandard
from blake3 import blake3

from bootseer.artifact import process_snapshots
from bootseer.artifact.document import encode
from bootseer.artifact.process_snapshots import (
    FETCHED,
    SCHEMA,
    ProcessSnapshot,
    _Document,
    machine_key,
    process_name,
)
from bootseer.artifact.signatures import UNSIGNED, Signatures
from bootseer.mounts.process import ProcessId, readable
from bootseer.store.oci import OciStore, tag_of
from bootseer.store.open import open_store
from fault_proxy import Fault, FaultProxy
from process_snapshot_node import DIGEST, NAME, WORKLOAD, Node, folder_of
from registry import Registry, needs_registry
from signing_keys import make_key, trust
from small_disks import small_disk
from waiting import DEADLINE_S, until

FILES = {"core-1.img": b"\x01core" * 3, "pages-1.img": os.urandom(3 << 20) + bytes(2 << 20), "empty.img": b""}

MACHINE = "from bootseer.artifact.process_snapshots import machine_key; print(machine_key())"


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path / "n0")


@pytest.fixture
def other(tmp_path: Path) -> Node:
    return Node(tmp_path / "n1")


@pytest.fixture
def images(tmp_path: Path) -> Path:
    return folder_of(tmp_path / "images", FILES)


@pytest.fixture(params=["folder", pytest.param("registry", marks=needs_registry)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "folder":
        yield str(tmp_path / "store")
        return
    with Registry(tmp_path) as registry:
        yield f"oci://{registry.host}/team/train"


def snapshot_of(*files: tuple[str, int], name: str = "", window_log: int = 0, **wrong: object) -> bytes:
    """A snapshot of three bytes whose document says this. A `window_log` above 0: its reader needs so much memory."""
    parameters = zstandard.ZstdCompressionParameters.from_level(3, window_log=window_log, write_checksum=True)
    packer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()  # it does not know the size
    frame = packer.compress(b"abc") + packer.flush()
    values = {"stored_bytes": len(frame), "parts": [blake3(frame).hexdigest()], "files": files, **wrong}
    return encode(_Document(name, 1, ("0" * 64,), (("a", 1),)), SCHEMA, **values) + b"\n" + frame


def put(uri: str, data: bytes, name: str = NAME) -> None:
    with closing(open_store(uri)) as store:
        upload = store.upload()
        upload.write(data)
        upload.commit(name)


def stored(uri: str, name: str = NAME) -> bytes:
    with closing(open_store(uri)) as store:
        return b"".join(store.read(name))


def test_a_machine_is_known_by_what_its_processes_see() -> None:
    key, processors = machine_key(), os.sched_getaffinity(0)
    assert re.fullmatch("[0-9a-f]{16}", key)
    assert subprocess.check_output([sys.executable, "-c", MACHINE], text=True).strip() == key
    if len(processors) > 1:
        os.sched_setaffinity(0, {min(processors)})
        try:
            assert machine_key() != key
        finally:
            os.sched_setaffinity(0, processors)


def test_a_kept_snapshot_is_unpacked_on_this_node(node: Node, images: Path) -> None:
    assert node.unpacked() is None
    node.snapshot.keep(images)
    assert node.snapshot.unpack()
    (node.into / "restore.log").touch()
    assert node.snapshot.unpack()  # once is enough
    (node.into / "restore.log").unlink()
    assert node.unpacked() == FILES
    assert node.path.stat().st_mode & 0o777 == 0o600
    assert list(node.path.parent.iterdir()) == [node.path]
    node.snapshot.keep(folder_of(images.with_name("newer"), {"a.img": b"newer"}))
    assert node.unpacked() == {"a.img": b"newer"}
    assert node.said == []


def test_another_node_gets_the_snapshot_of_the_store(node: Node, other: Node, store: str, images: Path) -> None:
    node.fetch(store).keep(images)
    other.fetch(store)
    assert other.unpacked() == FILES
    # The newest replaces the one before, which leaves nothing.
    node.snapshot.keep(folder_of(images.with_name("newer"), {"a.img": b"newer"}))
    third = Node(other.root.with_name("n2"))
    third.fetch(store)
    assert third.unpacked() == {"a.img": b"newer"}
    with closing(open_store(store)) as opened:
        assert [found.name for found in opened.list("processes/")] == [NAME]
    assert node.said == other.said == third.said == []


def test_without_the_option_nothing_is_published(node: Node, tmp_path: Path, images: Path) -> None:
    node.fetch(str(tmp_path / "store"), publish=False)
    node.fetch(str(tmp_path / "store"))  # the first call counts
    node.snapshot.keep(images)
    assert node.path.exists()
    assert not (tmp_path / "store").exists()


@needs_registry
def test_a_registry_lists_a_snapshot_with_its_image(node: Node, tmp_path: Path, images: Path) -> None:
    with Registry(tmp_path) as registry, closing(open_store(f"oci://{registry.host}/team/train")) as opened:
        assert isinstance(opened, OciStore)
        put(opened.uri, b"image", "image")
        digest = opened.registry.manifest_digest(tag_of("image"))
        node.fetch(opened.uri, digest=digest).keep(images)
        name = process_name(digest, f"{WORKLOAD}-{machine_key()}")
        assert json.loads(opened.registry.manifest(tag_of(name)).data)["subject"]["digest"] == digest


@pytest.mark.parametrize("at", [10, 200, 1000, -1])
@pytest.mark.parametrize("change", ["flip", "cut"])
def test_a_damaged_file_is_deleted(node: Node, images: Path, change: str, at: int) -> None:
    node.snapshot.keep(images)
    data = bytearray(node.path.read_bytes())
    data[at:] = data[at:][1:] if change == "cut" else bytes([data[at] ^ 1]) + data[at:][1:]
    node.path.write_bytes(data)
    assert node.unpacked() is None
    assert len(node.said) == 1
    assert not node.path.exists()


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "does not begin with a document"),
        (b"nonsense", "does not begin with a document"),
        (b"nonsense\n" + bytes(100), "not valid JSON"),
        (b"x" * (3 << 20), "does not begin with a document"),
        (snapshot_of(("a", 3), name=NAME)[:-1], "do not have the digests"),
        (snapshot_of(("a", 3), name=NAME) + b"more", "do not have the digests"),
        (snapshot_of(("a", 3), name=NAME) + bytes(9 << 20), "do not have the digests"),
        (snapshot_of(("a", 3), name=NAME, parts=["0" * 64]), "do not have the digests"),
        (snapshot_of(("a", 3), name=NAME, parts=["0" * 64] * 2), "do not have 2 parts"),
        (snapshot_of(("a", 3), name=NAME, parts=["a"]), "matching regex"),
        (snapshot_of(("a", 3), name=NAME, stored_bytes=1000), "do not have the digests"),
        (snapshot_of(("a", 3), name=NAME, stored_bytes=3 << 30), "`int` <="),
        (
            snapshot_of(("a", 3), name=process_name(DIGEST, "other")),
            "is of another image, environment",
        ),
        (snapshot_of(("a", 3), name=NAME).replace(b"process/1", b"process/2"), "another version"),
    ],
)
def test_what_is_damaged_or_foreign_in_a_store_never_comes_to_the_node(
    node: Node, tmp_path: Path, data: bytes, why: str
) -> None:
    put(str(tmp_path / "store"), data)
    node.fetch(str(tmp_path / "store"))
    assert node.unpacked() is None
    assert [line.startswith("no process snapshot: ") and why in line for line in node.said] == [True], node.said
    assert list(node.path.parent.glob("*")) == []


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (snapshot_of(("../a", 3)), "matching regex"),
        (snapshot_of(("/etc/a", 3)), "matching regex"),
        (snapshot_of((".a", 3)), "matching regex"),
        (snapshot_of(("a\n", 3)), "matching regex"),
        (snapshot_of(("", 3)), "matching regex"),
        (snapshot_of(("a", 1), ("a", 2)), "the same name"),
        (snapshot_of(("a", 17 << 30)), "`int` <="),
        (snapshot_of(("a", 9 << 30), ("b", 9 << 30)), "are allowed"),
        (snapshot_of(("a", -1), ("b", 4)), "`int` >="),
        (snapshot_of(*((f"f{number}", 0) for number in range(5000))), "length <= 4096"),
        (snapshot_of(), "length >= 1"),
        (snapshot_of(("a", 2)), "larger than its document says"),
        (snapshot_of(("a", 4)), "end too early"),
        (snapshot_of(("a", 3), window_log=27), "cannot be decompressed"),
    ],
)
def test_hostile_names_and_sizes_are_refused(node: Node, data: bytes, why: str) -> None:
    node.path.parent.mkdir(parents=True, mode=0o700)
    node.path.write_bytes(data)
    before = {path for path in node.root.parent.rglob("*") if path.is_file()}
    assert node.unpacked() is None
    assert [why in line for line in node.said] == [True], node.said
    assert not node.path.exists()
    assert {path for path in node.root.parent.rglob("*") if path.is_file()} < before


@pytest.mark.root
def test_a_snapshot_larger_than_the_disk_is_not_unpacked_and_stays(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", "size=2m") as small:
        node = Node(small)
        node.path.parent.mkdir(mode=0o700)
        node.path.write_bytes(snapshot_of(("a", 3 << 20)))
        assert node.unpacked() is None
        assert ["has no space" in line for line in node.said] == [True]
        assert list(small.iterdir()) == [node.path.parent]
        assert node.path.exists()


def test_a_link_in_place_of_the_folder_is_not_followed(node: Node, images: Path, tmp_path: Path) -> None:
    """A container's user may put it there while the snapshot is unpacked."""
    node.snapshot.keep(images)
    (tmp_path / "etc").mkdir()
    (tmp_path / "link").symlink_to("etc")
    with node.path.open("rb") as file, pytest.raises(NotADirectoryError):
        process_snapshots._unpack(file, tmp_path / "link", None)
    assert list((tmp_path / "etc").iterdir()) == []


def test_the_newest_and_used_ones_stay(node: Node, images: Path) -> None:
    node.snapshot.keep(images)
    folder = node.path.parent
    for number in range(10):
        (folder / f"other{number}").touch()
        os.utime(folder / f"other{number}", (1000 + number, 1000 + number))
    os.utime(node.path, (10, 10))
    for name, age_s in ((".killed", 4000), (".running", 1000)):
        (folder / name).touch()
        os.utime(folder / name, (time.time() - age_s,) * 2)
    assert node.unpacked() == FILES
    ProcessSnapshot(folder / "new", node.into, print).keep(images)
    others = {f"other{number}" for number in range(4, 10)}
    assert {path.name for path in folder.iterdir()} == {node.path.name, "new", ".running", *others}


def test_links_and_folders_are_not_kept(node: Node, images: Path) -> None:
    (images / "link").symlink_to("core-1.img")
    (images / "core-1.img").write_text("0123456789")  # as long as the link
    node.snapshot.keep(images)
    (images / "link").unlink()
    (images / "folder").mkdir()
    node.snapshot.keep(images)
    (images / "folder").rmdir()
    (images / "a name").touch()
    node.snapshot.keep(images)
    assert [line.startswith("the process snapshot was not kept: ") for line in node.said] == [True] * 3
    assert list(node.path.parent.iterdir()) == []


class TestSigned:
    @pytest.fixture
    def signs(self, tmp_path: Path) -> Signatures:
        key = make_key(tmp_path / "key")
        return Signatures((str(key),), trust(tmp_path / "trusted", key))

    def test_where_signatures_are_required_only_signed_ones_are_used(
        self, node: Node, tmp_path: Path, images: Path, signs: Signatures
    ) -> None:
        uri, strict = str(tmp_path / "store"), Signatures(trusted=signs.trusted)
        node.fetch(uri).keep(images)
        reader = Node(tmp_path / "n1")
        reader.fetch(uri, strict)
        assert reader.unpacked() is None
        assert [line.endswith("is not signed") for line in reader.said] == [True]
        Node(tmp_path / "n2").fetch(uri, signs).keep(images)
        for number, signatures in enumerate((signs, strict, UNSIGNED)):
            reader = Node(tmp_path / f"reader{number}")
            reader.fetch(uri, signatures)
            assert (reader.unpacked(), reader.said) == (FILES, [])
        put(uri, stored(uri), process_name(DIGEST, f"other-{machine_key()}"))
        reader = Node(tmp_path / "n3")
        reader.fetch(uri, strict, workload="other")
        assert reader.unpacked() is None
        assert ["holds another signed object" in line for line in reader.said] == [True]
        reader = Node(tmp_path / "n4")
        reader.fetch(f"{uri}2", strict).keep(images)
        assert ["there is no key" in line for line in reader.said] == [True]
        assert not Path(f"{uri}2").exists()

    def test_what_was_fetched_is_verified_again_and_what_was_made_here_is_not(
        self, node: Node, tmp_path: Path, images: Path, signs: Signatures
    ) -> None:
        uri, strict = str(tmp_path / "store"), Signatures(trusted=signs.trusted)
        node.fetch(uri).keep(images)
        assert Node(node.root).unpacked() == FILES
        for number, (published, required, found) in enumerate(
            [(UNSIGNED, UNSIGNED, True), (UNSIGNED, strict, False), (signs, strict, True), (signs, UNSIGNED, True)]
        ):
            node.snapshot = ProcessSnapshot(node.path, node.into, node.said.append)
            node.fetch(uri, published).keep(images)
            reader = Node(tmp_path / f"reader{number}")
            reader.fetch(uri)
            assert reader.unpacked() == FILES
            again = Node(reader.root)
            again.fetch(str(tmp_path / "no-store"), required)
            assert (again.unpacked() == FILES) == found
            assert ["is not signed" in line for line in again.said] == [True] * (not found)
            assert again.path.exists() == found
        alone = Node(reader.root)
        assert alone.unpacked() is None
        assert ["this start has none" in line for line in alone.said] == [True]
        again = Node(node.root)
        again.fetch(uri, strict)
        assert again.unpacked() == FILES
        moved = Node(reader.root)
        moved.fetch(uri, digest="sha256:" + "cd" * 32)
        assert moved.unpacked() is None
        assert ["holds another signed object" in line for line in moved.said] == [True]

    @pytest.mark.parametrize("required", [True, False])
    def test_a_signed_one_is_not_replaced_without_a_key(
        self, node: Node, other: Node, store: str, images: Path, signs: Signatures, required: bool
    ) -> None:
        node.fetch(store, signs).keep(images)
        signed = stored(store)
        other.fetch(store, Signatures(trusted=signs.trusted) if required else UNSIGNED)
        assert other.unpacked() == FILES
        other.snapshot.keep(images)
        assert ["there is no key" in line for line in other.said] == [True]
        assert stored(store) == signed


@pytest.fixture
def stalled(tmp_path: Path, images: Path) -> Iterator[str]:
    """A registry that sends the first MiB of a snapshot, and then nothing."""
    with Registry(tmp_path) as registry, FaultProxy(registry.host) as proxy:
        Node(tmp_path / "publisher").fetch(f"oci://{registry.host}/team/train").keep(images)
        proxy.plan = lambda request: Fault(stall_after=1 << 20) if "/blobs/" in request.path else None
        yield f"oci://{proxy.host}/team/train"


def child_of(node: Node, uri: str) -> int:
    """The child process that fetches; it has written a part of the snapshot."""
    child = node.fetch(uri)._child
    assert child is not None
    until(lambda: any(path.stat().st_size for path in node.path.parent.glob(".*")), "it has written something")
    return child.pid


@pytest.fixture
def slow(tmp_path: Path, images: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, threading.Event]]:
    """A registry that sends a snapshot's compressed files, and a store, only after the event."""
    monkeypatch.setattr(process_snapshots, "_WAIT_S", 0.5)
    gate = threading.Event()
    with Registry(tmp_path) as registry, FaultProxy(registry.host) as proxy:
        Node(tmp_path / "publisher").fetch(f"oci://{registry.host}/team/train").keep(images)
        proxy.plan = lambda request: Fault(gate=gate) if "/blobs/" in request.path else None
        yield f"oci://{proxy.host}/team/train", gate
        gate.set()


@needs_registry
def test_a_start_does_not_wait_for_a_slow_store_and_later_ones_have_what_came(
    node: Node, slow: tuple[str, threading.Event]
) -> None:
    uri, gate = slow
    child = node.fetch(uri)._child
    assert node.unpacked() is None
    assert node.said == ["the process snapshot is still being fetched: a later start on this node uses it"]
    gate.set()
    assert child is not None
    until((node.root / FETCHED).exists, "the child has fetched it")
    until(lambda: ProcessId.of(child.pid) is None, "the child ends")
    # It does not take memory or disk from the job that runs.
    assert {path.name for path in node.root.iterdir()} == {FETCHED, node.path.parent.name}
    assert node.unpacked() is None
    again = Node(node.root)
    again.fetch("file:///no-store")
    assert (again.unpacked(), again.said) == (FILES, [])


@needs_registry
def test_a_store_that_hangs_is_given_up_and_the_child_ends_by_itself(
    node: Node, stalled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_snapshots, "_WAIT_S", 0.5)
    monkeypatch.setattr(process_snapshots, "_FETCH_S", 4.0)
    pid = child_of(node, stalled)
    assert node.unpacked() is None
    until(lambda: ProcessId.of(pid) is None, "the child ends")
    assert not (node.root / FETCHED).exists()
    assert list(node.path.parent.iterdir()) == []


@needs_registry
def test_a_child_that_hangs_while_it_unpacks_is_ended(node: Node, stalled: str) -> None:
    pid = child_of(node, stalled)
    (node.root / ".restored").mkdir()
    assert node.unpacked() is None
    assert ["has no result" in line for line in node.said] == [True]
    assert not Path(f"/proc/{pid}").exists()


@needs_registry
def test_a_child_that_was_killed_costs_only_the_snapshot(node: Node, stalled: str) -> None:
    os.kill(child_of(node, stalled), signal.SIGKILL)
    assert node.unpacked() is None
    assert len(node.said) == 1
    assert "ended without a result" in node.said[0]


@needs_registry
@pytest.mark.parametrize("signals_child", [True, False])
def test_the_child_has_no_descriptors_of_the_run_and_ends_with_it(
    node: Node, stalled: str, signals_child: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And by SIGTERM, which the run handles and blocks."""
    monkeypatch.setattr(process_snapshots, "_FETCH_S", 3600.0)
    reading, writing = os.pipe()
    run = os.fork()
    if run == 0:
        signal.signal(signal.SIGTERM, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        os.write(writing, b"%d\n" % child_of(node, stalled))
        os.close(writing)
        signal.pause()
    try:
        os.close(writing)
        assert readable([reading], DEADLINE_S)
        child = ProcessId.of(int(os.read(reading, 100)))
        assert child is not None
        assert readable([reading], DEADLINE_S)
        assert os.read(reading, 1) == b""
        if signals_child:
            child.signal(signal.SIGTERM)
            until(lambda: not child.alive, "the child ends")
    finally:
        os.close(reading)
        os.kill(run, signal.SIGKILL)
        os.waitpid(run, 0)
    until(lambda: not child.alive, "the child ends")
    assert not node.path.exists()
