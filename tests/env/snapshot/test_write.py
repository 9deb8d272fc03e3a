"""A setup's files are restored from its snapshot, and the snapshot is the same in each run."""

from __future__ import annotations

import dataclasses
import os
import random
import shutil
import socket
import stat
import struct
import subprocess
import time
from pathlib import Path

import pytest
from blake3 import blake3
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from bootseer.env.changes import Action, Change
from bootseer.env.snapshot.bytecode import EARLIEST_S
from bootseer.env.snapshot.write import write_snapshot
from bootseer.errors import PermanentError
from bootseer.store.open import open_store
from env_snapshots import (
    BEGAN_S,
    changes_of,
    deleted,
    load_manifest,
    overlay,
    reader_of,
    secret_check,
    shown,
    snapshot,
    written,
)
from erofs_images import facts_of_folder, facts_of_image, needs_root
from store_doubles import Fault, FaultyStore, MemoryStore

CAPABILITY = struct.pack("<IIIII", 0x02000001, 1 << 10, 0, 0, 0)  # cap_net_bind_service=ep
ACL = struct.pack("<IHHIHHIHHIHHIHHI", 2, 1, 6, ~0 & 0xFFFFFFFF, 2, 4, 1000, 4, 4, ~0 & 0xFFFFFFFF, 16, 4, ~0 & 0xFFFFFFFF, 32, 4, ~0 & 0xFFFFFFFF)  # fmt: skip  # noqa: E501


def _everything(root: Path) -> None:
    """Examples of everything that a setup can leave."""
    bin_, lib = root / "usr/bin", root / "usr/lib"
    bin_.mkdir(parents=True)
    lib.mkdir()
    (bin_ / "tool").write_bytes(b"#!/bin/sh\n" * 900)
    (bin_ / "tool").chmod(0o4755)
    (bin_ / "again").hardlink_to(bin_ / "tool")
    (bin_ / "server").write_bytes(b"\x7fELF")
    (lib / "big.so").write_bytes(random.Random(1).randbytes(3_000_001))
    (lib / "libx.so").symlink_to("big.so")
    (lib / "nowhere").symlink_to("../not there/at all")
    (lib / "link2").hardlink_to(
        lib / "nowhere",
    )
    with (lib / "sparse").open("wb") as file:
        file.truncate(40 << 20)
        file.seek(9 << 20)
        file.write(b"island")
    (root / "empty").mkdir()
    (root / "empty").chmod(0o3775)
    (root / "zero").touch()
    os.mkfifo(root / "pipe", 0o640)
    os.mkdir(os.fsencode(root) + b"/odd \xff\n name")  # noqa: PTH102
    Path(os.fsdecode(os.fsencode(root) + b"/odd \xff\n name/.wh.x")).write_text("no whiteout")
    if os.geteuid() == 0:
        os.chown(bin_ / "server", 1234, 99999)
        os.setxattr(bin_ / "server", "security.capability", CAPABILITY)
        os.setxattr(lib / "big.so", "user.note", b"text")
        os.setxattr(lib, "system.posix_acl_default", ACL)
    written(root)


def _timeless(facts: dict) -> dict:
    return {path: dataclasses.replace(fact, mtime_ns=0) for path, fact in facts.items()}


@needs_root
def test_what_a_setup_left_is_what_the_mount_shows(tmp_path: Path) -> None:
    _everything(tmp_path / "upper")
    with shown(tmp_path / "upper", tmp_path) as folder:
        found = facts_of_folder(folder)
    wanted = facts_of_folder(tmp_path / "upper")
    assert _timeless(found) == _timeless(wanted)
    assert {fact.mtime_ns for path, fact in found.items() if path} == {EARLIEST_S * 10**9}


def test_the_manifest_in_the_store_says_what_the_image_holds(tmp_path: Path) -> None:
    _everything(tmp_path / "upper")
    store = MemoryStore(str(tmp_path))
    done = snapshot(store, tmp_path / "upper")
    manifest = load_manifest(store, done.manifest)
    assert manifest.entries == done.entries
    assert manifest.digest == done.digest
    reader = reader_of(store, done)
    inodes = dict(reader.walk())
    assert {os.fsdecode(b"/" + path) for path in inodes if path} == {entry.path for entry in manifest.entries}
    for entry in manifest.entries:
        inode = inodes[os.fsencode(entry.path[1:])]
        assert stat.S_IMODE(inode.mode) == entry.mode
        assert reader.xattrs(inode) == {os.fsencode(name): value for name, value in entry.xattrs.items()}
        if entry.kind == "file":
            content = b"".join(reader.read(inode))
            assert (entry.size, entry.digest) == (len(content), f"blake3:{blake3(content).hexdigest()}")
        if entry.kind == "symlink":
            assert reader.readlink(inode) == os.fsencode(entry.target)
    by_path = {entry.path: entry for entry in manifest.entries}
    assert by_path["/usr/bin/tool"].link == "/usr/bin/again"
    assert by_path["/usr/bin/tool"].digest == by_path["/usr/bin/again"].digest
    assert done.num_files == 6
    assert done.size_bytes == 9000 + 4 + 3_000_001 + (40 << 20) + 0 + len("no whiteout")


def test_a_loose_deletion_is_one_in_the_manifest(tmp_path: Path) -> None:
    (tmp_path / "upper").mkdir()
    gone = structs.replace(deleted("/home/old"), before="directory")
    (tmp_path / "upper/home").mkdir()
    store = MemoryStore(str(tmp_path))
    done = snapshot(store, tmp_path / "upper", changes=[gone], is_loose=lambda _: True)
    assert done.loose is not None
    assert [(entry.kind, entry.before) for entry in load_manifest(store, done.loose).entries] == [
        ("deleted", "directory")
    ]


def test_the_loose_paths_have_a_manifest_of_their_own_that_stands_alone(tmp_path: Path) -> None:
    upper = tmp_path / "upper"
    (upper / "usr").mkdir(parents=True)
    (upper / "home").mkdir()
    (upper / "home/notes").write_bytes(b"notes")
    (upper / "usr/tool").write_bytes(b"tool")
    (upper / "zone").hardlink_to(upper / "usr/tool")
    store = MemoryStore(str(tmp_path))
    done = snapshot(store, upper, is_loose=lambda path: not path.startswith("/usr"))
    assert done.loose is not None
    found = {entry.path: entry for entry in load_manifest(store, done.loose).entries}
    assert set(found) == {"/home", "/home/notes", "/zone"}
    assert {entry.path: entry.link for entry in done.entries if entry.link} == {"/zone": "/usr/tool"}
    assert (found["/zone"].link, found["/zone"].size) == ("", 4)
    assert snapshot(store, upper).loose is None


def test_two_runs_of_one_setup_give_the_same_objects(tmp_path: Path) -> None:
    _everything(tmp_path / "one")
    # Other inodes in another order, other times, another store, other numbers of threads.
    for path in sorted((tmp_path / "one").rglob("*"), reverse=True):
        twin = tmp_path / "two" / path.relative_to(tmp_path / "one")
        if path.is_symlink() or not path.is_dir():
            twin.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(tmp_path / "one", tmp_path / "two", symlinks=True, dirs_exist_ok=True, ignore=_not_regular)
    for first, second in (("usr/bin/again", "usr/bin/tool"), ("usr/lib/nowhere", "usr/lib/link2")):
        (tmp_path / "two" / second).unlink()
        (tmp_path / "two" / second).hardlink_to(
            tmp_path / "two" / first,
        )
    os.mkfifo(tmp_path / "two/pipe", 0o640)
    if os.geteuid() == 0:
        os.chown(tmp_path / "two/usr/bin/server", 1234, 99999)
        os.setxattr(tmp_path / "two/usr/bin/server", "security.capability", CAPABILITY)
    written(tmp_path / "two", seconds=BEGAN_S + 100_000)
    stores = [open_store(f"file://{tmp_path}/store"), MemoryStore(str(tmp_path))]
    changes = changes_of(tmp_path / "two")
    random.Random(3).shuffle(changes)
    one = snapshot(stores[0], tmp_path / "one", threads=1)
    two = snapshot(stores[1], tmp_path / "two", changes=changes, threads=5, began_s=BEGAN_S + 99_000)
    assert one == two


def _not_regular(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if stat.S_ISFIFO(Path(folder, name).lstat().st_mode)]


_NAMES = st.sampled_from(["a", "b", "a-b", "a.b", "Ä", "\udcfe", "x" * 255])
_TREES = st.dictionaries(
    st.lists(_NAMES, min_size=1, max_size=4).map(tuple),
    st.one_of(st.binary(max_size=40), st.sampled_from([b"\0" * 9000, b"y" * 5000, None, "link", "again"])),
    max_size=12,
)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(_TREES)
def test_any_tree_comes_back(tmp_path: Path, tree: dict[tuple[str, ...], bytes | str | None]) -> None:
    top = tmp_path / "tree"
    shutil.rmtree(top, ignore_errors=True)
    top.mkdir()
    first: Path | None = None
    leaves = set()
    for names, what in sorted(tree.items()):
        path = top.joinpath(*names)
        if os.path.lexists(path) or any(parent in leaves for parent in path.parents):
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        if what is None:
            path.mkdir()
            continue
        leaves.add(path)
        if what == "link":
            path.symlink_to("where ever")
        elif what == "again" and first is not None:
            path.hardlink_to(first)
        else:
            path.write_bytes(what if isinstance(what, bytes) else b"")
            first = path
    written(top)
    store = MemoryStore(str(tmp_path))
    done = snapshot(store, top)
    assert _timeless(facts_of_image(reader_of(store, done))) == _timeless(facts_of_folder(top))
    assert load_manifest(store, done.manifest).entries == done.entries


@needs_root
def test_deletions_and_replaced_directories_hide_the_files_below(tmp_path: Path) -> None:
    below, upper = tmp_path / "below", tmp_path / "upper"
    for path in ("kept/stays", "kept/goes", "replaced/old"):
        (below / path).parent.mkdir(parents=True, exist_ok=True)
        (below / path).write_text("below")
    (upper / "replaced").mkdir(parents=True)
    (upper / "replaced/new").write_text("upper")
    changes = [*changes_of(upper, opaque=("/replaced",)), deleted("/kept/goes"), deleted("/replaced/old")]
    (tmp_path / "merged/kept").mkdir(parents=True)
    with shown(upper, tmp_path, changes=changes, root=str(tmp_path / "merged")) as layer:
        with overlay([layer, below], tmp_path / "view") as view:
            assert _names(view) == {"kept", "kept/stays", "replaced", "replaced/new"}
        listing = "cd view && find . -mindepth 1 -printf '%P\\n'"
        mount = f"mount -t overlay o -o userxattr,lowerdir={layer}:{below} view"
        user = subprocess.run(
            ["unshare", "-Urm", "sh", "-c", f"{mount} && {listing}"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
    assert user.returncode == 0, user.stderr
    assert set(user.stdout.split()) == {"kept", "kept/stays", "replaced", "replaced/new"}


def _names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@needs_root
def test_directories_on_the_way_show_what_the_real_ones_are(tmp_path: Path) -> None:
    upper, merged = tmp_path / "upper", tmp_path / "merged"
    (upper / "opt/tool").mkdir(parents=True)
    (upper / "opt/tool/new").write_text("new")
    (merged / "opt/tool").mkdir(parents=True)
    (merged / "opt").chmod(0o2750)
    os.chown(merged / "opt", 5, 6)
    os.setxattr(merged / "opt", "system.posix_acl_default", ACL)
    os.utime(merged / "opt", (1_600_000_000, 1_600_000_000))
    merged.chmod(0o711)
    changes = [change for change in changes_of(upper) if change.path == "/opt/tool/new"]
    with shown(upper, tmp_path, changes=changes, root=str(merged)) as layer:
        found = facts_of_folder(layer)
    wanted = facts_of_folder(merged)
    assert found[b"opt"] == wanted[b"opt"]
    assert stat.S_IMODE(found[b""].mode) == 0o711


@needs_root
def test_marks_of_overlayfs_do_not_get_into_a_snapshot(tmp_path: Path) -> None:
    upper = tmp_path / "upper"
    upper.mkdir()
    (upper / "file").write_text("x")
    for name in ("trusted.overlay.origin", "user.overlay.impure", "trusted.overlay.opaque", "user.mine"):
        os.setxattr(upper / "file", name, b"y")
    (entry,) = snapshot(MemoryStore(str(tmp_path)), upper).entries
    assert entry.xattrs == {"user.mine": b"y"}
    os.setxattr(upper / "file", "trusted.overlay.metacopy", b"")
    with pytest.raises(PermanentError, match="an incomplete file"):
        snapshot(MemoryStore(str(tmp_path)), upper)


@needs_root
def test_devices_and_sockets_are_left_out_by_name(tmp_path: Path) -> None:
    upper = tmp_path / "upper"
    upper.mkdir()
    os.mknod(upper / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(upper / "socket"))
        done = snapshot(MemoryStore(str(tmp_path)), upper)
    assert done.entries == ()
    assert sorted(done.left_out) == ["/null: a device", "/socket: a socket"]


def test_times_from_archives_stay_and_the_setups_own_become_one_that_is_not_older(tmp_path: Path) -> None:
    upper = tmp_path / "upper"
    (upper / "build").mkdir(parents=True)
    times = {"archive": 1_000_000_000, "later": EARLIEST_S + 5.5, "made": BEGAN_S + 1, "build/.ninja_log": BEGAN_S + 2}
    times["build/made"] = BEGAN_S + 3.25
    for name, seconds in times.items():
        (upper / name).write_text(name)
        os.utime(upper / name, (seconds, seconds))
    store = MemoryStore(str(tmp_path))
    facts = facts_of_image(reader_of(store, snapshot(store, upper)))
    assert {path.decode(): fact.mtime_ns / 10**9 for path, fact in facts.items() if path} == times | {
        "made": EARLIEST_S + 6,
        "build": EARLIEST_S + 6,
    }


def test_what_is_changed_after_the_setup_gives_no_snapshot(tmp_path: Path) -> None:
    upper = tmp_path / "upper"
    upper.mkdir()
    (upper / "file").write_text("as the setup left it")
    ended_s = time.time() + 0.0
    while (upper / "file").stat().st_ctime <= ended_s:
        (upper / "file").write_text("as the job left it")
    with pytest.raises(PermanentError, match="/file was changed after the setup had ended"):
        snapshot(MemoryStore(str(tmp_path)), upper, ended_s=ended_s)
    snapshot(MemoryStore(str(tmp_path)), upper, ended_s=time.time() + 1)


@pytest.mark.parametrize("size", [10, 3 << 20])
def test_a_file_that_changes_while_others_are_read_gives_no_snapshot(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upper = tmp_path / "upper"
    upper.mkdir()
    names = [f"file{number:03}" for number in range(500)]
    for name in names:
        (upper / name).write_bytes(b"x" * 10)
    (upper / "last").write_bytes(b"x" * size)

    check = secret_check()
    check_content = check.check_content

    def change(path: str, data: bytes) -> str:
        with (upper / "last").open("ab") as file:
            file.write(b"more")
        return check_content(path, data)

    monkeypatch.setattr(check, "check_content", change)
    with pytest.raises(PermanentError, match="/last was changed after the setup had ended"):
        snapshot(MemoryStore(str(tmp_path)), upper, check=check, threads=1)


def test_paths_that_cannot_be_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    source = str(tmp_path / "file")
    store = MemoryStore(str(tmp_path))

    def refused(*changes: Change) -> str:
        with pytest.raises(PermanentError) as caught:
            write_snapshot(store, changes, began_s=0, check=secret_check(), root=str(tmp_path))
        return str(caught.value)

    assert "listed twice" in refused(Change("/a", Action.ADDED, source), Change("/a", Action.ADDED, source))
    assert "is not a directory" in refused(Change("/a", Action.ADDED, source), Change("/a/b", Action.ADDED, source))
    assert "is not a directory" in refused(Change("/file/b", Action.ADDED, source))
    assert "/gone: No such file" in refused(Change("/gone", Action.ADDED, str(tmp_path / "gone")))


def test_a_store_that_fails_once_gets_everything_again(tmp_path: Path) -> None:
    upper = tmp_path / "upper"
    upper.mkdir()
    (upper / "file").write_bytes(random.Random(2).randbytes(600_000))
    good = MemoryStore(str(tmp_path))
    faulty = FaultyStore(
        MemoryStore(f"{tmp_path}/faulty"), lambda asked: Fault(status=503) if not asked.number else None
    )
    assert snapshot(faulty, upper) == snapshot(good, upper)


def test_too_much_is_refused_before_any_of_it_is_read(tmp_path: Path) -> None:
    upper = tmp_path / "upper"
    upper.mkdir()
    with (upper / "holes").open("wb") as file:
        file.truncate(1 << 40)
    store = MemoryStore(str(tmp_path))
    with pytest.raises(PermanentError, match=r"the setup left 1\.0 TiB in 1 paths; a snapshot holds at most 256"):
        snapshot(store, upper)


def test_giving_up_in_the_middle_leaves_nothing_to_be_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    upper = tmp_path / "upper"
    upper.mkdir()
    for number in range(3):
        (upper / str(number)).write_bytes(random.Random(number).randbytes(500_000))

    check = secret_check()
    check_content = check.check_content

    def give_up(path: str, data: bytes) -> str:
        if path == "/1":
            raise KeyboardInterrupt
        return check_content(path, data)

    monkeypatch.setattr(check, "check_content", give_up)
    store = open_store(f"file://{tmp_path}/store")
    with pytest.raises(KeyboardInterrupt):
        snapshot(store, upper, check=check)
    assert not [path for path in (tmp_path / "store").rglob("*") if path.is_file() and path.stat().st_size]
