"""Mounted writable file systems: what programs see and do, also when calls wait."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bootseer.errors import BootseerError, TransientError
from bootseer.fuse import attach, filesystem
from bootseer.fuse import session as session_module
from bootseer.fuse.filesystem import Cancel, Reply
from bootseer.fuse.session import Session, mount_writable
from fuse.memory_files import MemoryFiles
from waiting import until

pytestmark = pytest.mark.fuse

DEADLINE_S = 120.0
MIB = 1 << 20
Mount = Callable[[MemoryFiles], Session]


@pytest.fixture
def shown(tmp_path: Path, faults: list[str]) -> Iterator[Mount]:
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("/dev/fuse cannot be opened by this user")
    sessions: list[Session] = []

    def show(files: MemoryFiles) -> Session:
        target = tmp_path / f"mount {len(sessions)}"
        target.mkdir()
        sessions.append(mount_writable(files, target, on_error=faults.append))
        return sessions[-1]

    yield show
    for session in sessions:
        with contextlib.suppress(BootseerError):
            session.close(force=True)


def test_files_are_made_written_read_renamed_and_removed(shown: Mount, faults: list[str]) -> None:
    files = MemoryFiles()
    root = shown(files).target
    data = os.urandom(3 * MIB + 17)
    (root / "folder").mkdir(mode=0o750)
    (root / "folder/a").write_bytes(data)
    assert (root / "folder/a").read_bytes() == data
    assert (root / "folder/a").stat().st_size == len(data)
    assert (root / "folder").stat().st_mode == 0o40750
    (root / "folder/a").rename(root / "b")
    assert sorted(path.name for path in root.rglob("*")) == ["b", "folder"]
    with (root / "b").open("r+b") as file:
        file.seek(5)
        file.write(b"changed")
    with (root / "b").open("ab") as file:
        file.write(b"end")
    assert (root / "b").read_bytes() == data[:5] + b"changed" + data[12:] + b"end"
    os.truncate(root / "b", 9)
    assert (root / "b").read_bytes() == data[:5] + b"chan"
    (root / "b").write_bytes(b"new")
    assert (root / "b").read_bytes() == b"new"
    (root / "b").unlink()
    (root / "folder").rmdir()
    assert list(root.iterdir()) == []
    assert faults == []


def test_attributes_are_set_and_times_before_1970_too(shown: Mount) -> None:
    root = shown(MemoryFiles()).target
    path = root / "f"
    path.write_bytes(b"x")
    path.chmod(0o604)
    os.chown(path, 7, 8)
    os.utime(path, ns=(0, -1_500_000_000))
    status = path.stat()
    assert (status.st_mode, status.st_uid, status.st_gid) == (0o100604, 7, 8)
    assert status.st_mtime_ns == -1_500_000_000
    before = time.time_ns()
    os.utime(path)
    assert abs(path.stat().st_mtime_ns - before) < 60 * 10**9


def test_large_reads_and_writes_travel_as_one_mib(shown: Mount) -> None:
    files = MemoryFiles()
    session = shown(files)
    with (session.target / "f").open("wb", buffering=0) as file:
        # Not zeros: the kernel would have to allocate their pages first, with one request for each.
        file.write(os.urandom(8 * MIB))
    assert set(files.sizes) == {MIB}
    assert (session.target / "f").stat().st_blksize == MIB
    before = session.reads
    handle = os.open(session.target / "f", os.O_RDONLY | os.O_DIRECT)
    try:
        import mmap

        with mmap.mmap(-1, 8 * MIB) as room:
            assert os.preadv(handle, [room], 0) == 8 * MIB
    finally:
        os.close(handle)
    assert session.reads - before == 8


def test_an_error_at_close_reaches_the_program(shown: Mount) -> None:
    files = MemoryFiles()
    root = shown(files).target
    handle = os.open(root / "f", os.O_WRONLY | os.O_CREAT)
    os.write(handle, b"x")
    files.flush_error = errno.EDQUOT
    with pytest.raises(OSError, match="quota") as raised:
        os.close(handle)
    assert raised.value.errno == errno.EDQUOT


def test_fsync_and_close_are_distinguished(shown: Mount) -> None:
    files = MemoryFiles()
    root = shown(files).target
    handle = os.open(root / "f", os.O_WRONLY | os.O_CREAT)
    os.fsync(handle)
    assert (len(files.synced), len(files.flushed)) == (1, 0)
    os.close(handle)
    assert len(files.flushed) == 1
    until(lambda: set(files.opened.values()) == {0}, "released")


def test_pages_of_an_open_that_does_not_keep_them_are_read_again(shown: Mount) -> None:
    files = MemoryFiles()
    root = shown(files).target
    (root / "f").write_bytes(b"old content")
    assert (root / "f").read_bytes() == b"old content"
    number = files.nodes[1].children[b"f"]
    files.nodes[number].data[:] = b"new content"
    assert (root / "f").read_bytes() == b"old content"
    files.keep_pages = False
    assert (root / "f").read_bytes() == b"new content"


def test_a_folder_of_many_files_is_listed_once_and_completely(shown: Mount) -> None:
    files = MemoryFiles()
    root = shown(files).target
    names = [f"{number:05d}-{'x' * (number % 200)}" for number in range(3000)]
    for name in names:
        files._make(1, name.encode(), 0o100644, _caller())
    assert sorted(os.listdir(root)) == names  # noqa: PTH208
    with os.scandir(root) as entries:
        assert all(entry.stat().st_size == 0 for entry in entries)


def _caller() -> filesystem.Caller:
    return filesystem.Caller(0, 0, 0)


def test_nodes_that_the_kernel_forgets_are_not_held(shown: Mount) -> None:
    files = MemoryFiles()
    session = shown(files)
    (session.target / "folder").mkdir()
    for number in range(300):
        (session.target / f"folder/{number}").touch()
    assert len(list((session.target / "folder").iterdir())) == 300
    for path in (session.target / "folder").iterdir():
        path.stat()
        path.unlink()
    (session.target / "folder").rmdir()
    until(lambda: sum(files.held.values()) == 0, "all nodes forgotten")


@pytest.mark.parametrize("num_writers", [12, 100])
def test_calls_that_wait_hold_up_no_others(shown: Mount, num_writers: int) -> None:
    files = MemoryFiles()
    root = shown(files).target
    (root / "read").write_bytes(b"content")
    gate = threading.Event()

    def wait() -> None:
        assert gate.wait(DEADLINE_S)

    files.before_write = wait
    with ThreadPoolExecutor(num_writers) as pool:
        writers = [pool.submit((root / f"w{number}").write_bytes, b"x") for number in range(num_writers)]
        until(lambda: len(files.nodes) == 2 + num_writers, "all files created")
        assert (root / "read").read_bytes() == b"content"
        assert not any(writer.done() for writer in writers)
        gate.set()
        assert [writer.result(DEADLINE_S) for writer in writers] == [1] * num_writers


def test_a_killed_reader_ends_and_its_read_is_called_off(shown: Mount) -> None:
    called_off = threading.Event()

    def hold(data: bytes, reply: Reply) -> Cancel:
        return called_off.set

    files = MemoryFiles(hold)
    session = shown(files)
    (session.target / "f").write_bytes(b"x" * 10)
    files.nodes[files.nodes[1].children[b"f"]].mtime_ns = 1
    child = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, os; os.pread(os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECT), 4096, 0)",
            session.target / "f",
        ]
    )
    until(lambda: session.num_pending > 0, "the read has arrived")
    child.send_signal(signal.SIGKILL)
    assert child.wait(DEADLINE_S) == -signal.SIGKILL
    assert called_off.wait(DEADLINE_S)
    assert session.num_pending == 0


def test_a_signal_that_does_not_kill_leaves_a_read_alone(shown: Mount) -> None:
    """Programs may treat EINTR from a file as an error, though Python would retry."""
    replies: list[Reply] = []
    files = MemoryFiles(lambda data, reply: replies.append(reply))
    session = shown(files)
    (session.target / "f").write_bytes(b"x" * 10)
    code = """if True:
        import os, signal, sys
        signal.signal(signal.SIGUSR1, lambda *_: print("hit"))
        print(os.pread(os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECT), 4096, 0).decode())
    """
    argv = [sys.executable, "-c", code, session.target / "f"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as child:
        until(lambda: len(replies) == 1, "the read has arrived")
        before = session.requests
        child.send_signal(signal.SIGUSR1)
        until(lambda: session.requests > before, "the kernel reports the signal")
        until(lambda: session._idle == session._threads, "the signal was handled")
        replies[0](b"0123456789")
        until(lambda: child.poll() is not None or len(replies) > 1, "answered or repeated")
        for reply in replies[1:]:
            reply(b"asked anew")
        assert child.communicate(timeout=DEADLINE_S)[0] == "hit\n0123456789\n"


def test_a_read_that_is_never_answered_fails_after_a_while(shown: Mount, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "READ_DEADLINE_S", 0.5)
    cancelled = threading.Event()
    files = MemoryFiles(lambda data, reply: cancelled.set)
    root = shown(files).target
    (root / "f").write_bytes(b"x" * 10)
    handle = os.open(root / "f", os.O_RDONLY | os.O_DIRECT)
    try:
        with pytest.raises(OSError, match="Input/output error"):
            os.pread(handle, 4096, 0)
    finally:
        os.close(handle)
    assert cancelled.is_set()


@pytest.mark.parametrize("answer", [b"x" * 5000, errno.EIO])
def test_an_answer_that_is_too_long_is_an_error(shown: Mount, answer: bytes | int) -> None:
    def wrong(data: bytes, reply: Reply) -> None:
        reply(answer)

    root = shown(MemoryFiles(wrong)).target
    (root / "f").write_bytes(b"x" * 10)
    handle = os.open(root / "f", os.O_RDONLY | os.O_DIRECT)
    try:
        with pytest.raises(OSError, match="Input/output error"):
            os.pread(handle, 4096, 0)
    finally:
        os.close(handle)


def test_an_exception_in_a_call_is_an_error_of_that_call_alone(shown: Mount, faults: list[str]) -> None:
    files = MemoryFiles()
    root = shown(files).target

    def fail() -> None:
        raise ZeroDivisionError("by zero")

    files.before_write = fail
    with pytest.raises(OSError, match="Input/output error"):
        (root / "f").write_bytes(b"x")
    files.before_write = lambda: None
    (root / "g").write_bytes(b"x")
    assert any("ZeroDivisionError" in fault for fault in faults)


@pytest.mark.parametrize(
    ("call", "number"),
    [
        (lambda root: (root / "s").symlink_to("f"), errno.EPERM),
        (lambda root: os.link(root / "f", root / "l"), errno.EPERM),
        (lambda root: os.mkfifo(root / "p"), errno.EPERM),
        (lambda root: os.setxattr(root / "f", "user.a", b"b"), errno.EOPNOTSUPP),
        (lambda root: os.getxattr(root / "f", "user.a"), errno.EOPNOTSUPP),
        (lambda root: _exchange(root / "f", root / "g"), errno.EINVAL),
        (lambda root: os.open(root / "f", os.O_CREAT | os.O_EXCL | os.O_WRONLY), errno.EEXIST),
    ],
)
def test_what_is_not_offered_is_refused_with_its_number(
    shown: Mount, call: Callable[[Path], object], number: int
) -> None:
    root = shown(MemoryFiles()).target
    (root / "f").write_bytes(b"x")
    (root / "g").write_bytes(b"y")
    with pytest.raises(OSError) as raised:
        call(root)
    assert raised.value.errno == number


def _exchange(one: Path, other: Path) -> None:
    _rename2(one, other, 2)


def _rename2(one: Path, other: Path, flags: int) -> None:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(-100, os.fsencode(one), -100, os.fsencode(other), flags) < 0:
        raise OSError(ctypes.get_errno(), "renameat2")


def test_a_rename_that_must_not_replace_does_not(shown: Mount) -> None:
    root = shown(MemoryFiles()).target
    (root / "f").write_bytes(b"x")
    (root / "g").write_bytes(b"y")
    with pytest.raises(FileExistsError):
        _rename2(root / "f", root / "g", 1)
    _rename2(root / "f", root / "h", 1)
    assert (root / "h").read_bytes() == b"x"


def test_a_node_is_made_by_mknod(shown: Mount) -> None:
    files = MemoryFiles()
    root = shown(files).target
    os.mknod(root / "f", 0o100640)
    assert (root / "f").stat().st_mode == 0o100640
    assert len(files.flushed) == 1


def test_a_mount_in_use_is_not_taken_away_unless_forced(shown: Mount) -> None:
    session = shown(MemoryFiles())
    file = (session.target / "f").open("wb", buffering=0)
    with pytest.raises(TransientError):
        session.close()
    assert not session.wait(0)
    session.close(force=True)
    assert session.wait(DEADLINE_S)
    with pytest.raises(OSError, match=r"not connected|Input/output|abort"):
        file.write(b"x")
    with contextlib.suppress(OSError):
        file.close()


def test_a_read_only_mount_is_refused_changes_by_the_kernel(tmp_path: Path) -> None:
    files = MemoryFiles()
    session = mount_writable(files, tmp_path, read_only=True)
    try:
        with pytest.raises(OSError, match="Read-only") as raised:
            (tmp_path / "f").write_bytes(b"x")
        assert raised.value.errno == errno.EROFS
    finally:
        session.close()


def test_a_writable_mount_through_the_helper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    if shutil.which(attach.HELPER) is None:
        pytest.skip("fusermount3 is not installed")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)  # like an ordinary user
    session = mount_writable(MemoryFiles(), tmp_path)
    try:
        (tmp_path / "f").write_bytes(b"content")
        assert (tmp_path / "f").read_bytes() == b"content"
    finally:
        session.close()


def test_a_session_leaves_neither_threads_nor_descriptors(tmp_path: Path) -> None:
    def threads() -> int:
        return sum(thread.name.startswith("fuse") for thread in threading.enumerate())

    gc.collect()  # leftovers of earlier tests
    before = os.listdir("/proc/self/fd")  # noqa: PTH208 - numbers, not paths
    session = mount_writable(MemoryFiles(), tmp_path)
    (tmp_path / "f").write_bytes(b"x")
    session.close(force=True)  # a new namespace of another test may keep a copy of the mount for a while
    until(lambda: threads() == 0, "no threads left")
    del session
    until(lambda: len(os.listdir("/proc/self/fd")) <= len(before), "no descriptors left")  # noqa: PTH208
