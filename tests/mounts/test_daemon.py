"""The lifecycle of mount daemons: start, serving, status, kill; and what readers see meanwhile."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

import pytest

from bootseer.errors import AccessError, NotFoundError, PermanentError
from bootseer.io.locks import try_flock
from bootseer.mounts import control, kernel
from bootseer.mounts.daemon import Daemon, start_daemon
from bootseer.mounts.layers import mount_erofs
from bootseer.mounts.process import ProcessId
from bootseer.mounts.serve import DaemonSpec, OnError
from mounts.daemon_job import HELD_BYTES
from mounts.images import write_image
from mounts.starting import DEADLINE_S, JOB, CannotStart, Start
from waiting import until

pytestmark = [pytest.mark.root, pytest.mark.fuse]

BIG = bytes(range(1, 256)) * 20_000


@pytest.fixture
def image(place: Path) -> Path:
    """An image with trailing bytes whose reads the daemon never answers; all files are before them."""
    folder = place / "store"
    folder.mkdir()
    written = write_image(folder / "image", {b"a": b"alpha", b"big": BIG})
    with written.open("ab") as file:
        file.write(b"\1" * (2 * HELD_BYTES))
    return written


@contextlib.contextmanager
def opened(path: Path) -> Iterator[int]:
    """An open file whose server may be dead when it is closed: close(2) also calls the server."""
    file = os.open(path, os.O_RDONLY)
    try:
        yield file
    finally:
        with contextlib.suppress(OSError):
            os.close(file)


def test_an_image_is_read_through_a_daemon(place: Path, image: Path, start: Start) -> None:
    daemon, program = start(image)
    (place / "at").mkdir()
    mount_erofs(daemon.folder / "files" / "image", place / "at")
    assert (place / "at" / "big").read_bytes() == BIG
    said = daemon.status()
    assert (said["pid"], said["figure"], said["recording"]) == (daemon.process.pid, 42, True)
    assert program.communicate("\n", timeout=DEADLINE_S)[0] == "", "no stream of the program stays open"
    assert daemon.process.alive, "it outlives its parent"
    with opened(daemon.folder) as folder:  # below /tmp, systemd-tmpfiles deletes old files that are not locked
        assert not try_flock(folder)
    assert Path(f"/proc/{daemon.process.pid}/stat").read_text().rpartition(")")[2].split()[1] == "1"
    with pytest.raises(PermanentError, match="busy"):
        daemon.stop()
    assert (place / "at" / "a").read_bytes() == b"alpha"
    kernel.unmount(place / "at")

    def stopped() -> bool:
        with contextlib.suppress(PermanentError):  # a namespace created by another test had a copy of the mount
            daemon.stop()
        return not daemon.process.alive

    until(stopped, "it stopped")
    assert not kernel.is_mount(daemon.folder / "files")
    assert (image.parent / "handed over").exists()
    with pytest.raises(NotFoundError):
        daemon.status()


def test_it_inherits_nothing(image: Path, start: Start) -> None:
    daemon, program = start(image)
    lease = str(image.parent / "lease")
    assert lease in _open_in(program.pid)
    found = _open_in(daemon.process.pid)
    assert found[:3] == [os.devnull, str(daemon.folder / "log"), str(daemon.folder / "log")]
    assert lease not in found
    assert Path(f"/proc/{daemon.process.pid}/cwd").readlink() == Path("/")
    assert os.getsid(daemon.process.pid) != os.getsid(0)


def _open_in(pid: int) -> list[str]:
    numbers = sorted(Path(f"/proc/{pid}/fd").iterdir(), key=lambda path: int(path.name))
    return [str(path.readlink()) for path in numbers]


def test_the_end_of_the_startup_hands_the_record_over_once(image: Path, start: Start) -> None:
    daemon, _ = start(image)
    daemon.end_startup()
    until((image.parent / "handed over").exists, "the record was handed over")
    (image.parent / "handed over").unlink()
    daemon.end_startup()
    assert daemon.status()["recording"] is False
    daemon.stop()
    assert not (image.parent / "handed over").exists()


def test_a_read_that_hangs_holds_up_no_other(image: Path, start: Start) -> None:
    daemon, _ = start(image)
    size = image.stat().st_size
    with ThreadPoolExecutor(1) as pool, opened(daemon.folder / "files" / "image") as file:
        hangs = pool.submit(os.pread, file, 4096, size - 4096)
        until(lambda: daemon.status()["waiting"] != 0, "the read hangs")
        with image.open("rb") as original:
            assert os.pread(file, 500_000, 0) == original.read(500_000)
        assert not hangs.done()
        daemon.process.signal(signal.SIGTERM)
        with pytest.raises(OSError):
            hangs.result(DEADLINE_S)
    until(lambda: not daemon.process.alive, "the daemon ended")
    assert not kernel.is_mount(daemon.folder / "files")


def test_a_kill_during_reads_means_errors_at_once_and_never_zeros(place: Path, image: Path, start: Start) -> None:
    daemon, _ = start(image)
    (place / "at").mkdir()
    mount_erofs(daemon.folder / "files" / "image", place / "at")
    assert (place / "at" / "a").read_bytes() == b"alpha"
    size = image.stat().st_size
    with ThreadPoolExecutor(1) as pool, opened(daemon.folder / "files" / "image") as file:
        waits = pool.submit(os.pread, file, 4096, size - 4096)
        until(lambda: daemon.status()["waiting"] != 0, "the read waits")
        daemon.process.signal(signal.SIGKILL)
        with pytest.raises(OSError):
            waits.result(DEADLINE_S)
    with pytest.raises(OSError, match="Input/output error"):
        (place / "at" / "big").read_bytes()
    with pytest.raises(NotFoundError):
        daemon.status()


@pytest.fixture
def recovered(image: Path, start: Start) -> Daemon:
    if tuple(int(part) for part in os.uname().release.split(".")[:2]) < (6, 9):
        pytest.skip("the kernel does not send requests again (Linux 6.9)")
    (image.parent / "recover").touch()
    return start(image)[0]


def _kill(daemon: Daemon) -> None:
    os.kill(int(str(daemon.status()["pid"])), signal.SIGKILL)


def _restarts(daemon: Daemon) -> object:
    return daemon.status()["restarts"]


def _stops(daemon: Daemon) -> bool:
    try:
        daemon.stop()
    except PermanentError:  # files are in use
        return False
    return True


def test_readers_of_a_killed_daemon_wait_for_the_next_one(place: Path, image: Path, recovered: Daemon) -> None:
    (place / "at").mkdir()
    mount_erofs(recovered.folder / "files" / "image", place / "at")
    size = image.stat().st_size
    with ThreadPoolExecutor(2) as pool, opened(recovered.folder / "files" / "image") as file:
        waits = pool.submit(os.pread, file, 4096, size - 4096)
        until(lambda: recovered.status()["waiting"] != 0, "the read waits")
        _kill(recovered)
        assert waits.result(DEADLINE_S) == b"\1" * 4096, "requests read by the dead daemon are answered by the next one"
        until(lambda: _restarts(recovered) == 1, "it was restarted")
        assert (place / "at" / "big").read_bytes() == BIG
        _kill(recovered)
        assert sorted(path.name for path in (place / "at").iterdir()) == ["a", "big"]
    until(lambda: _restarts(recovered) == 2, "it was restarted")
    kernel.unmount(place / "at")
    until(lambda: _stops(recovered), "the kernel has released the files")
    assert not recovered.process.alive
    assert not kernel.is_mount(recovered.folder / "files")


def test_a_daemon_that_dies_again_and_again_ends_its_mount(image: Path, recovered: Daemon) -> None:
    for restarts in range(3):
        until(lambda wanted=restarts: _restarts(recovered) == wanted, "it serves")
        _kill(recovered)
    until(lambda: not recovered.process.alive, "it is not restarted")
    with pytest.raises(OSError), opened(recovered.folder / "files" / "image") as file:
        os.pread(file, 4096, image.stat().st_size - 4096)


def test_a_killed_supervisor_takes_its_daemon_along(recovered: Daemon) -> None:
    serving = ProcessId.of(int(str(recovered.status()["pid"])))
    assert serving is not None
    assert serving != recovered.process
    recovered.process.signal(signal.SIGKILL)
    until(lambda: not serving.alive, "the daemon ended")


def test_it_ends_when_its_mount_is_taken_away(image: Path, start: Start) -> None:
    daemon, _ = start(image)
    subprocess.run(["umount", str(daemon.folder / "files")], check=True)
    until(lambda: not daemon.process.alive, "the daemon ended")


def test_a_daemon_that_does_not_end_is_killed_and_reported(image: Path, start: Start) -> None:
    """Otherwise an unmount would end as if all data had been sent."""
    (image.parent / "endless").touch()
    daemon, _ = start(image)
    assert daemon.stop(timeout_s=0.3) == {"lost": ["what was not sent within 0.3 s"]}
    assert not daemon.process.alive


def test_an_error_at_its_end_is_in_its_log(image: Path, start: Start) -> None:
    image.with_name("bug").touch()
    daemon, _ = start(image)
    daemon.stop()
    assert "RuntimeError: unforeseen" in (daemon.folder / "log").read_text()


@pytest.mark.parametrize("restarted", [False, True])
def test_a_stopped_daemon_is_continued_for_its_end(image: Path, start: Start, restarted: bool) -> None:
    if restarted:  # the process that serves is a child of the daemon
        (image.parent / "recover").touch()
    daemon, _ = start(image)
    os.kill(int(str(daemon.status()["pid"])), signal.SIGSTOP)
    assert daemon.stop() == {"stopped": True}
    assert not daemon.process.alive


def test_with_a_lifeline_it_ends_with_its_parent(image: Path, start: Start) -> None:
    daemon, program = start(image, lifeline=True)
    assert (daemon.folder / "files" / "image").exists()
    program.kill()
    until(lambda: not daemon.process.alive, "the daemon ended")
    assert not kernel.is_mount(daemon.folder / "files")


def test_what_keeps_it_from_serving_is_raised_where_it_was_started(image: Path, start: Start) -> None:
    (image.parent / "broken").touch()
    with pytest.raises(CannotStart, match="AccessError: the registry refuses"):
        start(image)


def test_a_start_that_fails_leaves_no_open_file(place: Path) -> None:
    def refuse(on_error: OnError) -> NoReturn:
        raise AccessError("the registry refuses")

    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(AccessError, match="the registry refuses"):
        start_daemon(DaemonSpec(place / "daemon", refuse, lifeline=True))
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_start_that_hangs_is_ended(place: Path, image: Path, start: Start) -> None:
    (image.parent / "hang").touch()
    with pytest.raises(CannotStart, match="TransientError: the mount daemon did not serve within 1 s"):
        start(image)
    folder = str(place / "daemon0")
    until(lambda: not _running_in(folder), "nothing of it is left")


def test_a_start_that_hangs_is_ended_even_without_a_waiter(place: Path, image: Path) -> None:
    (image.parent / "hang").touch()
    folder = place / "daemon"
    program = subprocess.Popen([sys.executable, str(JOB), str(folder), str(image)])
    until(lambda: _running_in(str(folder)), "the daemon was forked")
    program.kill()
    program.wait(DEADLINE_S)
    until(lambda: not _running_in(str(folder)), "nothing of it is left")


def _running_in(folder: str) -> bool:
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "fd/2").readlink() == Path(folder, "log"):
                return True
        except OSError:
            continue
    return False


def test_many_daemons_at_once(place: Path, image: Path, start: Start) -> None:
    daemons = [start(image)[0] for _ in range(12)]
    for number, daemon in enumerate(daemons):
        (place / f"at{number}").mkdir()
        mount_erofs(daemon.folder / "files" / "image", place / f"at{number}")
    with ThreadPoolExecutor(12) as pool:
        read = list(pool.map(lambda number: (place / f"at{number}" / "big").read_bytes(), range(12)))
    assert read == [BIG] * 12


@pytest.mark.parametrize("question", [b"", b"nonsense\n", b"[]\n", b'{"do": "dance"}\n', b'{"do"', b"x" * 100_000])
def test_nonsense_on_the_control_socket_does_no_harm(image: Path, start: Start, question: bytes) -> None:
    import socket

    daemon, _ = start(image)
    with socket.socket(socket.AF_UNIX) as link:
        handle = os.open(daemon.folder, os.O_PATH)
        link.connect(f"/proc/self/fd/{handle}/{control.NAME}")
        os.close(handle)
        link.sendall(question)
        link.shutdown(socket.SHUT_WR)
        link.settimeout(DEADLINE_S)
        try:
            said = link.recv(65_536)
        except ConnectionResetError:  # the daemon did not read all of it
            said = b"{}"
        assert "pid" not in json.loads(said or b"{}")
    assert daemon.status()["figure"] == 42


def test_a_process_is_not_taken_for_a_later_one_of_the_same_number() -> None:
    me = ProcessId.of(os.getpid())
    assert me is not None
    assert me.alive
    later = ProcessId(me.pid, me.started + 1)
    assert not later.alive
    later.signal(signal.SIGKILL)  # must not kill this process
    child = subprocess.Popen(["true"])
    until(lambda: ProcessId.of(child.pid) is None, "an ended child does not count, even before it is reaped")
    child.wait(DEADLINE_S)


MODULE_IS_GONE = """
import sys
from pathlib import Path
from bootseer.mounts.daemon import start_daemon
from bootseer.mounts.serve import DaemonSpec
sys.modules["bootseer.mounts.recovery"] = None
try:
    start_daemon(DaemonSpec(Path(sys.argv[1]), lambda on_error: None))
except Exception as error:
    print(type(error).__name__, error, flush=True)
"""


def test_a_daemon_that_cannot_begin_does_not_run_the_code_of_its_parent(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", MODULE_IS_GONE, tmp_path / "daemon"], capture_output=True, text=True, check=True
    )
    (line,) = ended.stdout.splitlines()
    assert line.startswith("PermanentError ModuleNotFoundError: import of bootseer.mounts.recovery halted")
