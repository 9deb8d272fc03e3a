"""Images from a store to a mounted file tree: through the kernel's EROFS, and as a tree of files through FUSE."""

from __future__ import annotations

import json
import os
import random
import shutil
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from bootseer.artifact.objects import read_index
from bootseer.blocks.index import Index
from bootseer.blocks.writer import BlockWriter
from bootseer.erofs.format import BLOCK, EXTENDED, FLAT_PLAIN, INODE, Superblock
from bootseer.errors import BootseerError, NotFoundError, PermanentError
from bootseer.fetch.fetch_settings import FetchSettings
from bootseer.fetch.fetcher import Fetcher
from bootseer.fetch.hotset import Record
from bootseer.fuse.session import Session
from bootseer.mounts.block_files import BlockFileService
from bootseer.mounts.layers import mount_erofs
from bootseer.mounts.serve import Served
from bootseer.mounts.trees import ErofsTree
from bootseer.store.file import FileStore
from mounts.images import Content, write_image
from waiting import until

pytestmark = [pytest.mark.root, pytest.mark.fuse]

BIG = random.Random(3).randbytes(3_000_001)
CONTENT: Content = {
    b"big": BIG,
    b"small": b"a few bytes",
    b"empty": b"",
    b"link": "folder/inner",
    b"gone": None,
    b"folder": {b"inner": b"inside", b"deep": {b"x" * 200: b"y" * 4097}},
    b"many": {f"{number:04d}".encode(): str(number).encode() for number in range(1500)},
}


class Stored(NamedTuple):
    index: Index
    store: str


@pytest.fixture
def stored(place: Path) -> Stored:
    """An image in a new store."""
    (place / "store").mkdir()
    store = FileStore(place / "store")
    with BlockWriter(store, block_size=65_536) as writer:
        path = write_image(place / "image", CONTENT, opaque=frozenset({b"folder"}))
        writer.write(path.read_bytes())
        file = writer.finish()
    return Stored(read_index(store, file), str(place / "store"))


class Shown:
    """Services opened and trees mounted in this process."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.said: list[str] = []
        self.served: list[Served] = []
        self.sessions: list[Session] = []

    def show(self, what: BlockFileService) -> Session:
        self.served.append(what(self.said.append))
        target = self.place / f"shown{len(self.sessions)}"
        target.mkdir()
        self.sessions.append(self.served[-1].mount(target, "bootseer", self.said.append, None))
        return self.sessions[-1]

    def close(self) -> None:
        for session in self.sessions:
            session.close(force=True)
        for served in self.served:
            served.close()
            if served.recorder is not None:
                served.recorder.close()


@pytest.fixture
def shown(place: Path) -> Iterator[Shown]:
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("/dev/fuse cannot be opened")
    shown = Shown(place)
    yield shown
    shown.close()


def test_an_image_in_a_store_is_mounted_and_recorded(place: Path, stored: Stored, shown: Shown) -> None:
    handed: list[Record] = []
    session = shown.show(
        BlockFileService((stored.index,), stored.store, place / "cache", on_record=handed.append, rest=False)
    )
    (place / "at").mkdir()
    mount_erofs(session.target / stored.index.identity, place / "at")
    assert (place / "at" / "big").read_bytes() == BIG
    assert (place / "at" / "link").read_bytes() == b"inside"
    served = shown.served[0]
    status = json.loads(json.dumps(served.status()))
    assert status["files"][0]["ready_blocks"] > 3_000_000 // 65_536
    assert status["fetch"]["failed_reads"] == 0
    assert served.recorder is not None
    served.recorder.close()
    ((needs,),) = ([each.needs] for each in handed)
    assert {file for file, _ in needs} == {stored.index.identity}
    assert len(needs) == status["fetch"]["needs"]
    assert shown.said == []


def test_what_is_in_the_cache_needs_no_origin(place: Path, stored: Stored, shown: Shown) -> None:
    first = shown.show(BlockFileService((stored.index,), stored.store, place / "cache", rest=False))
    image = (place / "image").read_bytes()
    assert (first.target / stored.index.identity).read_bytes() == image
    first.close()
    shown.served[0].close()
    (place / "store").rename(place / "away")
    (place / "store").mkdir()
    second = shown.show(BlockFileService((stored.index,), stored.store, place / "cache", rest=False))
    assert (second.target / stored.index.identity).read_bytes() == image


def test_a_cache_deleted_under_a_mount_is_reported_once(place: Path, stored: Stored, shown: Shown) -> None:
    """The log is in memory, and would grow by a line every 30 s."""
    session = shown.show(BlockFileService((stored.index,), stored.store, place / "cache", rest=False))
    shutil.rmtree(place / "cache")
    assert (session.target / stored.index.identity).read_bytes() == (place / "image").read_bytes()
    for _ in range(3):
        shown.served[0]._sync()
    (line,) = shown.said
    assert "No such file" in line


def test_a_hot_set_is_prefetched_and_strange_entries_in_it_are_ignored(
    place: Path, stored: Stored, shown: Shown
) -> None:
    identity = stored.index.identity
    hot = [("ff" * 32, 0), (identity, 3), (identity, 5), (identity, 1 << 25)]
    shown.show(BlockFileService((stored.index,), stored.store, place / "cache", hot_blocks=hot, rest=False))
    served = shown.served[0]
    threading.Thread(target=served.run_background, daemon=True).start()
    until(lambda: served.status()["files"][0]["ready_blocks"] == 2, "the hot blocks are here")  # type: ignore[index]


def test_the_rest_waits_until_training_began(
    place: Path, stored: Stored, shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise, while the nodes of a job read their checkpoints, the rest of the image would use their links."""
    hot = [(stored.index.identity, 3)]
    monkeypatch.setattr("bootseer.mounts.block_files.Fetcher", partial(Fetcher, FetchSettings(silence_s=0.1)))
    shown.show(BlockFileService((stored.index,), stored.store, place / "cache", hot_blocks=hot, on_record=print))
    served = shown.served[0]

    def ready() -> int:
        return int(served.status()["files"][0]["ready_blocks"])  # type: ignore[index]

    threading.Thread(target=served.run_background, daemon=True).start()
    until(lambda: ready() == 1, "the hot block is ready")
    time.sleep(0.5)
    assert ready() == 1
    served.end_startup()
    until(lambda: ready() == stored.index.num_blocks, "the rest is ready")


def test_an_origin_without_the_blocks_means_an_error_and_a_line_in_the_log(
    place: Path, stored: Stored, shown: Shown
) -> None:
    (place / "store").rename(place / "away")
    (place / "store").mkdir()
    session = shown.show(BlockFileService((stored.index,), stored.store, place / "cache", rest=False))
    with pytest.raises(OSError, match="Input/output error"):
        (session.target / stored.index.identity).read_bytes()
    assert any("sha256:" in line for line in shown.said)


def test_a_store_that_cannot_be_opened_is_an_error_of_the_start(place: Path, stored: Stored) -> None:
    spec = BlockFileService((stored.index,), "nonsense://x", place / "cache")
    with pytest.raises(BootseerError, match="nonsense"):
        spec(lambda _: None)


def test_the_tree_of_an_image_is_served_without_the_kernels_erofs(place: Path, stored: Stored, shown: Shown) -> None:
    what = BlockFileService(
        (stored.index,),
        stored.store,
        place / "cache",
        rest=False,
        make_tree=ErofsTree,
    )
    session = shown.show(what)
    (place / "at").mkdir()
    mount_erofs(place / "image", place / "at")
    seen, expected = _snapshot(session.target), _snapshot(place / "at")
    assert shown.said == []
    assert seen == expected
    assert len(seen) > 1500
    assert stat.S_ISCHR((session.target / "gone").stat().st_mode)
    assert os.getxattr(session.target / "folder", "user.overlay.opaque") == b"y"
    assert os.getxattr(session.target / "big", "user.k") == b"v"
    with (session.target / "big").open("rb") as file:
        file.seek(2_999_990)
        assert file.read(100) == BIG[2_999_990:]


def _snapshot(root: Path) -> dict[str, tuple[object, ...]]:
    found = {}
    for folder, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = Path(folder, name)
            status = path.lstat()
            content = (
                path.read_bytes()
                if stat.S_ISREG(status.st_mode)
                else os.fsencode(path.readlink())
                if path.is_symlink()
                else b""
            )
            key = str(path.relative_to(root))
            found[key] = (status.st_mode, status.st_uid, status.st_gid, status.st_mtime_ns, status.st_rdev, content)
    return found


OVERLAY = """
set -e
mount -t overlay x -o userxattr,lowerdir="$1:$2" "$3"
ls "$3/folder" "$3/gone"
"""


def test_trees_of_images_are_overlaid_in_a_user_namespace(place: Path, stored: Stored, shown: Shown) -> None:
    session = shown.show(
        BlockFileService(
            (stored.index,),
            stored.store,
            place / "cache",
            rest=False,
            make_tree=ErofsTree,
        )
    )
    below = place / "below"
    (below / "folder").mkdir(parents=True)
    (below / "folder" / "hidden").touch()
    (below / "gone").touch()
    (place / "at").mkdir()
    listed = subprocess.run(
        ["unshare", "-Urm", "sh", "-c", OVERLAY, "sh", session.target, below, place / "at"],
        capture_output=True,
        text=True,
        check=False,
    )
    if "Operation not permitted" in listed.stderr:
        pytest.skip("this user may not create user namespaces with overlays")
    assert "hidden" not in listed.stdout
    assert "inner" in listed.stdout
    assert "No such file or directory" in listed.stderr, "what the image deletes is gone"


def test_other_files_than_images_are_refused(place: Path, shown: Shown) -> None:
    store = FileStore(place)
    with BlockWriter(store, block_size=65_536) as writer:
        writer.write(b"no image" * 100_000)
        index = read_index(store, writer.finish())
    with pytest.raises(BootseerError, match="EROFS"):
        shown.show(
            BlockFileService(
                (index,),
                str(place),
                place / "cache",
                rest=False,
                make_tree=ErofsTree,
            )
        )


def test_a_folder_of_impossible_size_is_refused_before_it_is_read() -> None:
    num_blocks = 1 << 20
    head = Superblock(root_nid=0, inodes=1, blocks=num_blocks, meta_block=num_blocks - 1).encode()
    size = (num_blocks - 2) * BLOCK
    root = INODE.pack(EXTENDED | FLAT_PLAIN << 1, 0, stat.S_IFDIR | 0o755, 0, size, 1, 1, 0, 0, 0, 0, 2)
    known = {0: head, (num_blocks - 1) * BLOCK: root.ljust(BLOCK, b"\0")}
    source = SimpleNamespace(read_blocking=lambda number, offset, length: known[offset])
    with pytest.raises(PermanentError, match="MiB of folders"):
        ErofsTree(source, (SimpleNamespace(identity="ab" * 32, size_bytes=num_blocks * BLOCK),))  # type: ignore[arg-type]


REAL = """
import json, sys
from pathlib import Path
from bootseer.blocks.index import Index
from bootseer.mounts.daemon import start_daemon
from bootseer.mounts.serve import DaemonSpec
from bootseer.mounts.block_files import BlockFileService
place = Path(sys.argv[1])
index = Index.parse((place / "index").read_bytes())
keep = lambda record: (place / "record").write_text(str(len(record.needs)))
what = BlockFileService((index,), str(place / "store"), place / "cache", on_record=keep)
daemon = start_daemon(DaemonSpec(place / "daemon", what))
assert (daemon.folder / "files" / index.identity).read_bytes() == (place / "image").read_bytes()
status = daemon.status()
daemon.stop()
try:
    daemon.status()
except Exception as error:
    print(json.dumps([status["fetch"]["failed_reads"], type(error).__name__]))
"""


def test_a_real_daemon_from_store_to_record(place: Path, stored: Stored) -> None:
    (place / "index").write_bytes(stored.index.encode())
    ended = subprocess.run([sys.executable, "-c", REAL, str(place)], capture_output=True, text=True, check=False)
    assert ended.stderr == ""
    assert json.loads(ended.stdout) == [0, NotFoundError.__name__]
    assert (place / "record").read_text() == str(stored.index.num_blocks)
