"""Process snapshots on the node and in stores: complete and verified, or none, without making starts fail."""

from __future__ import annotations

import os
import shutil
import signal
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import zstandard
from blake3 import blake3

from bootseer.artifact.document import encode
from bootseer.artifact.places import processes_folder
from bootseer.artifact.process_snapshots import SCHEMA, ProcessSnapshot, _Document, machine_key, process_name
from bootseer.artifact.signatures import UNSIGNED, Signatures
from bootseer.mounts.process import ProcessId
from bootseer.store.open import open_store
from registry import Registry, needs_registry
from signing_keys import make_key, trust
from waiting import until

DIGEST = "sha256:" + "ab" * 32
WORKLOAD = "train.py-0123456789ab"
NAME = process_name(DIGEST, f"{WORKLOAD}-{machine_key()}")
FILES = {"core-1.img": b"\x01core" * 3, "pages-1.img": os.urandom(3 << 20) + bytes(2 << 20), "empty.img": b""}


class Node:
    """A node with a cache of its own."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.said: list[str] = []
        self.path = processes_folder(root) / WORKLOAD
        self.into = root / "restored"
        self.snapshot = ProcessSnapshot(self.path, self.into, self.said.append)

    def fetch(
        self, uri: str, signatures: Signatures = UNSIGNED, *, publish: bool = True, workload: str = WORKLOAD
    ) -> ProcessSnapshot:
        self.snapshot.fetch(
            digest=DIGEST, workload=workload, store_uri=uri, plain_http=False, signatures=signatures, publish=publish
        )
        return self.snapshot

    def unpacked(self) -> dict[str, bytes] | None:
        self.root.mkdir(exist_ok=True, parents=True)
        if not self.snapshot.unpack():
            return None
        found = {path.name: path.read_bytes() for path in self.into.iterdir()}
        shutil.rmtree(self.into)
        return found


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


def folder_of(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def snapshot_of(*files: tuple[str, int], content: bytes = b"abc", name: str = "", **wrong: object) -> bytes:
    """A snapshot whose document says this, whatever the content."""
    frame = zstandard.ZstdCompressor(write_checksum=True).compress(content)
    values = {"stored_bytes": len(frame), "blake3": blake3(frame).hexdigest(), "files": files, **wrong}
    return encode(_Document(name, 1, "0" * 64, (("a", 1),)), SCHEMA, **values) + b"\n" + frame


def put(uri: str, data: bytes, name: str = NAME) -> None:
    with closing(open_store(uri)) as store:
        upload = store.upload()
        upload.write(data)
        upload.commit(name)


def stored(uri: str, name: str = NAME) -> bytes:
    with closing(open_store(uri)) as store:
        return b"".join(store.read(name))


def test_a_kept_snapshot_is_unpacked_on_this_node(node: Node, images: Path) -> None:
    assert node.unpacked() is None
    node.snapshot.keep(images)
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
    "data",
    [
        b"",
        b"nonsense",
        b"nonsense\n" + bytes(100),
        b"x" * (3 << 20),
        snapshot_of(("a", 3), name=NAME)[:-1],
        snapshot_of(("a", 3), name=NAME) + b"more",
        snapshot_of(("a", 3), name=NAME, blake3="0" * 64),
        snapshot_of(("a", 3), name=process_name(DIGEST, "other")),
        snapshot_of(("a", 3), name=NAME, stored_bytes=3 << 30),
    ],
)
def test_what_is_damaged_or_foreign_in_a_store_never_comes_to_the_node(node: Node, tmp_path: Path, data: bytes) -> None:
    put(str(tmp_path / "store"), data)
    node.fetch(str(tmp_path / "store"))
    assert node.unpacked() is None
    assert [line.startswith("no process snapshot: ") for line in node.said] == [True]
    assert list(node.path.parent.glob("*")) == []


@pytest.mark.parametrize(
    "data",
    [
        snapshot_of(("../a", 3)),
        snapshot_of(("/etc/a", 3)),
        snapshot_of((".a", 3)),
        snapshot_of(("a\n", 3)),
        snapshot_of(("", 3)),
        snapshot_of(("a", 1), ("a", 2)),
        snapshot_of(("a", 17 << 30)),
        snapshot_of(("a", 9 << 30), ("b", 9 << 30)),
        snapshot_of(("a", -1), ("b", 4)),
        snapshot_of(*((f"f{number}", 0) for number in range(5000))),
        snapshot_of(),
        snapshot_of(("a", 2)),
        snapshot_of(("a", 4)),
        snapshot_of(("a", 3)).replace(b"process/1", b"process/2"),
    ],
)
def test_hostile_names_and_sizes_are_refused(node: Node, data: bytes) -> None:
    node.path.parent.mkdir(parents=True, mode=0o700)
    node.path.write_bytes(data)
    before = {path for path in node.root.parent.rglob("*") if path.is_file()}
    assert node.unpacked() is None
    assert len(node.said) == 1
    after = {
        path for path in node.root.parent.rglob("*") if path.is_file() and not path.parent.name.startswith("into-")
    }
    assert after <= before


def test_a_snapshot_larger_than_the_disk_is_not_unpacked(node: Node, other: Node) -> None:
    """Nor deleted: the disk may be emptier next time."""
    free = os.statvfs(node.root.parent).f_bavail * os.statvfs(node.root.parent).f_frsize
    size = min(free + (1 << 30), 16 << 30)
    node.path.parent.mkdir(parents=True, mode=0o700)
    node.path.write_bytes(snapshot_of(("a", size)))
    assert node.unpacked() is None
    assert ("has no space" in node.said[0]) == node.path.exists() == (free < size)


def test_links_and_folders_are_not_kept(node: Node, tmp_path: Path, images: Path) -> None:
    (images / "link").symlink_to(tmp_path)
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
def silent() -> Iterator[str]:
    """A registry that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"oci://127.0.0.1:{server.getsockname()[1]}/team/train"


def child_of(snapshot: ProcessSnapshot) -> int:
    assert snapshot._child is not None
    return snapshot._child.pid


def test_a_store_that_hangs_is_given_up(node: Node, silent: str) -> None:
    pid = child_of(node.fetch(silent))
    assert node.unpacked() is None
    assert len(node.said) == 1
    assert "has no result" in node.said[0]
    assert not Path(f"/proc/{pid}").exists()
    assert node.unpacked() is None
    assert len(node.said) == 1


def test_a_child_that_was_killed_costs_only_the_snapshot(node: Node, silent: str) -> None:
    os.kill(child_of(node.fetch(silent)), signal.SIGKILL)
    assert node.unpacked() is None
    assert len(node.said) == 1
    assert "ended without a result" in node.said[0]


def test_the_child_has_no_descriptors_of_the_run_and_ends_with_it(node: Node, silent: str) -> None:
    """Also with SIGTERM, which the run blocks and handles."""
    reading, writing = os.pipe()
    run = os.fork()
    if run == 0:
        signal.signal(signal.SIGTERM, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        os.write(writing, b"%d\n" % child_of(node.fetch(silent)))
        signal.pause()
    os.close(writing)
    with os.fdopen(reading) as pipe:
        child = ProcessId.of(int(pipe.readline()))
        assert child is not None
        os.kill(run, signal.SIGKILL)
        os.waitpid(run, 0)
        assert pipe.read() == ""
    until(lambda: not child.alive, "the child ends")
    assert not node.path.exists()
