"""Mounted trees: what programs see, also when reads wait or fail, or the server dies."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import random
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bootseer.errors import TransientError
from bootseer.fuse import protocol
from bootseer.fuse import session as session_module
from bootseer.fuse.filesystem import Cancel, Reply
from bootseer.fuse.session import Session, TreeRequests
from fuse.conftest import Mount
from fuse.memory_tree import OLD, MemoryTree
from waiting import until

pytestmark = pytest.mark.fuse

DEADLINE_S = 120.0


def names_in(folder: Path) -> list[bytes]:
    with os.scandir(os.fsencode(folder)) as entries:
        return sorted(entry.name for entry in entries)


def test_a_tree_is_seen_as_it_is(mounted: Mount) -> None:
    tree = MemoryTree(
        {
            b"a": b"alpha",
            b"empty": b"",
            b"folder": {b"b": b"beta", b"deep": {b"c": b"gamma"}},
            b"link": "folder/b",
            b"odd \xff\n name": b"odd",
        }
    )
    tree.xattrs_of[b"a"] = {b"user.kind": b"first", b"user.empty": b""}
    root = mounted(tree).target
    assert names_in(root) == [b"a", b"empty", b"folder", b"link", b"odd \xff\n name"]
    assert [(len(folders), len(files)) for _, folders, files in os.walk(root)] == [(1, 4), (1, 1), (0, 1)]
    assert (root / "folder/deep/c").read_bytes() == b"gamma"
    assert (root / "link").read_bytes() == b"beta"
    assert (root / "link").readlink() == Path("folder/b")
    assert (root / "empty").read_bytes() == b""
    assert Path(os.fsdecode(os.fsencode(root) + b"/odd \xff\n name")).read_bytes() == b"odd"
    seen = (root / "a").stat()
    assert (seen.st_size, seen.st_mode, seen.st_uid, seen.st_gid) == (5, 0o100640, 7, 8)
    assert seen.st_mtime_ns == OLD
    assert os.getxattr(root / "a", "user.kind") == b"first"
    assert sorted(os.listxattr(root / "a")) == ["user.empty", "user.kind"]
    assert os.getxattr(root / "a", "user.empty") == b""
    with pytest.raises(OSError, match="No data available"):
        os.getxattr(root / "a", "user.none")
    assert not (root / "none").exists()
    assert os.statvfs(root).f_files == 5


def test_nothing_can_be_written(mounted: Mount) -> None:
    root = mounted(MemoryTree({b"a": b"alpha", b"d": {}})).target
    for change in (
        lambda: (root / "a").write_bytes(b"x"),
        (root / "new").touch,
        (root / "a").unlink,
        (root / "d").rmdir,
        lambda: (root / "a").chmod(0o777),
        lambda: os.setxattr(root / "a", "user.x", b"1"),
        lambda: (root / "a").rename(root / "b"),
    ):
        with pytest.raises(OSError, match="Read-only file system"):
            change()
    assert (root / "a").read_bytes() == b"alpha"


def test_a_folder_of_many_names_is_complete(mounted: Mount) -> None:
    names = [f"{number:05d}-{'x' * (number % 200)}".encode() for number in range(3000)]
    root = mounted(MemoryTree(dict.fromkeys(names, b""))).target
    assert names_in(root) == names


def test_requests_are_as_large_as_the_kernel_makes_them(mounted: Mount) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may widen the read-ahead")
    content = random.Random(1).randbytes(8 * 1024 * 1024 + 123)
    session = mounted(MemoryTree({b"big": content}))
    assert (session.target / "big").read_bytes() == content
    assert session.reads <= 16  # at least 64 with the kernel's defaults
    assert session.read_bytes == len(content)
    before = session.requests
    # Not with Python's `open`, which checks each file for a terminal.
    subprocess.run(["cmp", session.target / "big", session.target / "big"], check=True)
    assert session.requests == before, "the second read is served by the kernel's cache, including open and close"


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(st.integers(0, 700_000), st.integers(0, 700_000), st.booleans())
def test_any_range_reads_as_in_memory(mounted: Mount, offset: int, length: int, direct: bool) -> None:
    content = random.Random(2).randbytes(600_001)
    global _model  # noqa: PLW0603 - one mount for all examples
    if _model is None:
        _model = mounted(MemoryTree({b"f": content})).target / "f"
    file = os.open(_model, os.O_RDONLY | (os.O_DIRECT if direct else 0))
    try:
        if direct:  # bypasses the page cache: each range is a separate request
            offset, length = offset // 4096 * 4096, length // 4096 * 4096
            buffer = bytearray(length + 4096)
            import ctypes

            start = -ctypes.addressof(ctypes.c_char.from_buffer(buffer)) % 4096
            got = os.preadv(file, [memoryview(buffer)[start : start + length]], offset)
            assert bytes(buffer[start : start + got]) == content[offset : offset + length]
        else:
            assert os.pread(file, length, offset) == content[offset : offset + length]
    finally:
        os.close(file)


_model: Path | None = None


def test_many_readers_at_once(mounted: Mount) -> None:
    contents = {f"f{number}".encode(): random.Random(number).randbytes(300_000) for number in range(40)}

    def elsewhere(name: bytes, data: bytes, reply: Reply) -> Cancel | None:
        threading.Thread(target=reply, args=(data,)).start()
        return None

    tree = MemoryTree(dict(contents), elsewhere)
    session = mounted(tree)
    names = sorted(contents) * 5
    with ThreadPoolExecutor(16) as pool:
        got = list(pool.map(lambda name: (session.target / name.decode()).read_bytes(), names))
    assert got == [contents[name] for name in names]
    assert session.num_pending == 0
    assert len(tree.threads) == 1, "all calls of the tree are on one thread"


class Held:
    """Holds back the reads of some files; `replies` has their answers."""

    def __init__(self, *names: bytes) -> None:
        self.names = names
        self.replies: list[tuple[Reply, bytes]] = []
        self.cancelled = threading.Event()

    def __call__(self, name: bytes, data: bytes, reply: Reply) -> Cancel | None:
        if name not in self.names:
            reply(data)
            return None
        self.replies.append((reply, data))
        return self.cancelled.set


def test_a_read_that_waits_holds_up_no_other(mounted: Mount) -> None:
    slow = [f"slow{number}".encode() for number in range(64)]
    hold = Held(*slow)
    session = mounted(MemoryTree({b"fast": b"quick", **dict.fromkeys(slow, b"late")}, hold))
    with ThreadPoolExecutor(64) as pool:
        late = [pool.submit((session.target / name.decode()).read_bytes) for name in slow]
        until(lambda: session.num_pending == 64, "all slow reads have arrived")
        assert (session.target / "fast").read_bytes() == b"quick"
        assert not any(future.done() for future in late)
        for reply, data in hold.replies:
            reply(data)
            reply(errno.EIO)  # a second answer is ignored
        assert [future.result(DEADLINE_S) for future in late] == [b"late"] * 64


def test_a_killed_reader_ends_at_once_and_its_read_is_cancelled(mounted: Mount) -> None:
    hold = Held(b"f")
    session = mounted(MemoryTree({b"f": b"x" * 8192, b"g": b"other"}, hold))
    # Only out of a direct read a process cannot be killed without an answer to INTERRUPT.
    code = (
        "import mmap, os, sys; f = os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECT);"
        "os.preadv(f, [mmap.mmap(-1, 4096)], 0)"
    )
    reader = subprocess.Popen([sys.executable, "-S", "-c", code, str(session.target / "f")])
    until(lambda: session.num_pending == 1, "the read has arrived")
    reader.send_signal(signal.SIGKILL)
    assert reader.wait(DEADLINE_S) == -signal.SIGKILL
    until(hold.cancelled.is_set, "the tree got the cancellation")
    assert session.num_pending == 0
    hold.replies[0][0](hold.replies[0][1])  # too late, but harmless
    assert (session.target / "g").read_bytes() == b"other"


def test_a_signal_that_does_not_kill_leaves_a_read_alone(mounted: Mount) -> None:
    """Otherwise stat(2) and execve(2) on an EROFS image in the tree would fail with EINTR."""
    hold = Held(b"f")
    session = mounted(MemoryTree({b"f": b"x" * 8192}, hold))
    code = (
        "import mmap, os, signal, sys; signal.signal(signal.SIGUSR1, lambda *_: None);"
        "f = os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECT);"
        "print(os.preadv(f, [mmap.mmap(-1, 4096)], 0))"
    )
    argv = [sys.executable, "-S", "-c", code, str(session.target / "f")]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as reader:
        until(lambda: session.num_pending == 1, "the read has arrived")
        before = session.requests
        reader.send_signal(signal.SIGUSR1)
        until(lambda: session.requests > before, "the kernel reports the signal")
        os.statvfs(session.target)  # answered after the INTERRUPT
        assert not hold.cancelled.is_set()
        hold.replies[0][0](hold.replies[0][1])
        assert reader.communicate(timeout=DEADLINE_S)[0] == "4096\n"


def test_errors_of_a_tree_reach_only_the_reader(mounted: Mount, faults: list[str]) -> None:
    def broken(name: bytes, data: bytes, reply: Reply) -> Cancel | None:
        match name:
            case b"refused":
                reply(errno.EACCES)
            case b"raises-os":
                raise OSError(errno.ESTALE, "stale")
            case b"raises":
                raise ValueError("surprise")
            case b"strange":
                reply(100_000)
            case b"short":
                reply(data[:-1])
            case b"long":
                reply(data + b"x")
            case _:
                reply(data)
        return None

    names = [b"refused", b"raises-os", b"raises", b"strange", b"short", b"long", b"good"]
    session = mounted(MemoryTree(dict.fromkeys(names, b"content"), broken))
    expected = [errno.EACCES, errno.ESTALE, errno.EIO, errno.EIO, errno.EIO, errno.EIO]
    for name, number in zip(names, expected, strict=False):
        file = os.open(session.target / name.decode(), os.O_RDONLY | os.O_DIRECT)
        try:
            with pytest.raises(OSError) as caught:
                os.preadv(file, [bytearray(4096)], 0)
        finally:
            os.close(file)
        assert caught.value.errno == number, name
    assert (session.target / "good").read_bytes() == b"content"
    assert any("ValueError: surprise" in fault for fault in faults)
    assert any("answered with 6" in fault for fault in faults), "a short answer would be padded with zeros"


def test_unmounting_during_a_read(mounted: Mount) -> None:
    hold = Held(b"f")
    session = mounted(MemoryTree({b"f": b"late"}, hold))
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit((session.target / "f").read_bytes)
        until(lambda: session.num_pending == 1, "the read has arrived")
        with pytest.raises(TransientError):
            session.close()
        session.close(force=True)
        with pytest.raises(OSError):
            reading.result(DEADLINE_S)
    assert hold.cancelled.is_set()
    assert list(session.target.iterdir()) == []


def test_a_mount_that_was_taken_away_ends_its_session(mounted: Mount) -> None:
    session = mounted(MemoryTree({b"f": b"x"}))
    subprocess.run(["umount", str(session.target)], check=True)
    assert session.wait(DEADLINE_S)
    session.close()


@pytest.mark.root
def test_a_session_whose_mount_lives_on_elsewhere_unmounts_no_later_mount_of_its_folder(
    tmp_path: Path, mounted: Mount, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "JOIN_S", 0.1)
    first = mounted(MemoryTree({b"a": b"first"}))
    copy = subprocess.Popen(
        ["unshare", "-m", "sh", "-c", "echo; read x"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert copy.stdout is not None
    copy.stdout.readline()
    with pytest.raises(TransientError, match="still uses it"):
        first.close()
    second = session_module.mount(MemoryTree({b"a": b"second"}), first.target, on_error=lambda line: None)
    try:
        with pytest.raises(TransientError, match="still uses it"):
            first.close()  # a mount daemon retries, finally with force
        first.close(force=True)
        assert (first.target / "a").read_bytes() == b"second"
    finally:
        second.close(force=True)
        copy.communicate(b"\n")


def test_sessions_leave_no_descriptors(mounted: Mount) -> None:
    mounted(MemoryTree({b"f": b"x"})).close()
    gc.collect()
    before = len(names_in(Path("/proc/self/fd")))
    for _ in range(5):
        mounted(MemoryTree({b"f": b"x"})).close()
    del mounted
    gc.collect()
    assert len(names_in(Path("/proc/self/fd"))) <= before + 10  # two for each session still held by the fixture


SERVER = """
import sys, threading
from pathlib import Path
sys.path[:0] = sys.argv[2:]
from fuse.memory_tree import MemoryTree
from bootseer.fuse.session import mount
content = bytes(range(1, 256)) * 100_000
def all_but_g(name, data, reply):
    if name == b"g":
        print("held", flush=True)
    else:
        reply(data)
held = mount(MemoryTree({b"f": content, b"g": content}, all_but_g), Path(sys.argv[1]))
print("ready", flush=True)
held.wait()
"""


def test_a_killed_server_means_errors_and_never_zeros(tmp_path: Path) -> None:
    target = tmp_path / "mount"
    target.mkdir()
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(target), *filter(None, sys.path)], stdout=subprocess.PIPE
    )
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n"
        file = os.open(target / "f", os.O_RDONLY)
        try:
            assert os.pread(file, 10, 0) == bytes(range(1, 11))
            with ThreadPoolExecutor(1) as pool:
                waits = pool.submit((target / "g").read_bytes)
                until(lambda: not waits.done(), "the read has been sent")
                server.kill()
                server.wait(DEADLINE_S)
                with pytest.raises(OSError):
                    waits.result(DEADLINE_S)
            with pytest.raises(OSError):
                os.pread(file, 4096, 20_000_000)
        finally:
            with contextlib.suppress(OSError):  # close(2) also calls the server
                os.close(file)
        with pytest.raises(OSError, match="Transport endpoint is not connected"):
            (target / "f").read_bytes()
    finally:
        server.kill()
        server.wait(DEADLINE_S)
        server.stdout.close()  # type: ignore[union-attr]
        subprocess.run(["umount", "-l", str(target)], check=False)


def test_a_read_that_is_never_answered_fails_after_a_while(mounted: Mount, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "READ_DEADLINE_S", 0.5)
    cancelled = threading.Event()
    root = mounted(MemoryTree({b"f": b"x" * 10}, lambda path, data, reply: cancelled.set)).target
    with pytest.raises(OSError, match="Input/output error"):
        (root / "f").read_bytes()
    assert cancelled.is_set()


@given(data=st.binary(max_size=200))
def test_no_bytes_break_the_reading_of_a_request(data: bytes) -> None:
    faults: list[str] = []
    device = os.open(os.devnull, os.O_RDWR)
    session = Session(TreeRequests(MemoryTree({})), Path("/nowhere"), device, faults.append)
    view = memoryview(bytearray(data.ljust(protocol.REQUEST_BYTES, b"\0")))
    session._handle(view, len(data))
    assert data[:4] == len(data).to_bytes(4, "little") or faults == ["/nowhere: malformed FUSE request"]


@pytest.mark.parametrize(("number", "told"), [(5, -5), (511, -511), (512, -5), (0, -5)])
def test_the_header_of_an_answer(number: int, told: int) -> None:
    answers, device = os.pipe()
    session = Session(TreeRequests(MemoryTree({})), Path("/nowhere"), device, lambda message: None)
    session._send(9, b"x" * 100, 100)
    assert protocol.OUT_HEADER.unpack(os.read(answers, 116)[:16]) == (116, 0, 9)
    session._send_error(9, number)
    assert protocol.OUT_HEADER.unpack(os.read(answers, 100)) == (16, told, 9)
    os.close(answers)
