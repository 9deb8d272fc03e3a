"""Killed writers: they end at once, whatever they wait for, and the data that they have written is not lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.checkpoint.writing.lane import WritingSettings
from bootseer.places.folder import FolderPlace
from checkpoint.mounted_place import DEADLINE_S, MIB, MountedPlace
from stepwise_place import StepwisePlace
from waiting import until

pytestmark = pytest.mark.fuse


class Stuck:
    """A mount whose place blocks writes until `gate` is set; `reached` is set by the first one."""

    def __init__(self, folder: Path) -> None:
        (folder / "place").mkdir()
        place = StepwisePlace(FolderPlace(folder / "place"))
        self.gate, self.reached = threading.Event(), threading.Event()

        def before(step: str, path: str) -> None:
            if step == "write":
                self.reached.set()
                assert self.gate.wait(DEADLINE_S)

        place.before = before
        self.mounted = MountedPlace(
            folder / "place", folder / "m", place=place, settings=WritingSettings(spool_bytes=8 * MIB)
        )


@pytest.fixture
def stuck(tmp_path: Path) -> Iterator[Stuck]:
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("/dev/fuse cannot be opened by this user")
    made = Stuck(tmp_path)
    yield made
    made.gate.set()
    made.mounted.close()


_WRITE_AND_WAIT = """
import os, sys
os.write(os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT), b'x' * 10)
print(flush=True)
input()
"""
_WRITE = "[os.write(handle, bytes([number]) * 2**20) for number in range({})]"


@pytest.mark.parametrize(
    "wait",
    [_WRITE.format(32), _WRITE.format(6) + "; os.fsync(handle)", _WRITE.format(6) + "; os.close(handle)"],
    ids=["write", "fsync", "close"],
)
def test_a_killed_writer_ends_while_the_place_hangs_and_its_data_is_published(stuck: Stuck, wait: str) -> None:
    path = stuck.mounted.target / "f"
    code = f"import os, sys; handle = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT); {wait}"
    writer = subprocess.Popen([sys.executable, "-c", code, path])
    assert stuck.reached.wait(DEADLINE_S)
    written = 8 if "range(32)" in wait else 6
    until(lambda: stuck.mounted.writing.facts()["spool_bytes"] == written * MIB, "as much as the spool takes")
    writer.send_signal(signal.SIGKILL)
    assert writer.wait(DEADLINE_S) == -signal.SIGKILL
    assert not (stuck.mounted.root / "f").exists()
    stuck.gate.set()
    until((stuck.mounted.root / "f").exists, "published")
    data = path.read_bytes()
    assert len(data) >= 6 * MIB
    assert data == b"".join(bytes([number]) * MIB for number in range(len(data) // MIB))


def test_the_data_of_a_killed_writer_is_published_while_the_file_is_read(
    one: MountedPlace, other: MountedPlace
) -> None:
    argv = [sys.executable, "-c", _WRITE_AND_WAIT, one.target / "f"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        with (one.target / "f").open("rb") as reader:
            writer.kill()
            writer.wait(DEADLINE_S)
            until((other.target / "f").exists, "published")
            assert reader.read() == b"x" * 10


def test_a_killed_writers_file_that_could_not_be_published_is_listed_as_lost(tmp_path: Path, one: MountedPlace) -> None:
    (one.target / "folder").mkdir()
    argv = [sys.executable, "-c", _WRITE_AND_WAIT, one.target / "folder/f"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        (one.root / "folder").rename(one.root / "elsewhere")
        writer.kill()
    until(lambda: one.shown.lost() == ["folder/f"], "told")
    assert any("folder/f was not published" in line for line in one.said)


def test_a_file_that_a_program_leaves_open_is_published_when_it_has_ended(
    one: MountedPlace, other: MountedPlace
) -> None:
    code = "import os, sys; os.write(os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT), b'x'); os._exit(0)"
    subprocess.run([sys.executable, "-c", code, one.target / "f"], check=True)
    assert (other.target / "f").read_bytes() == b"x"


def test_a_file_opened_twice_by_one_process_is_published_by_the_last_close(
    one: MountedPlace, other: MountedPlace
) -> None:
    """Also if the kernel still holds the first opening, for example for a mapping."""
    code = """
        import ctypes, os, sys
        libc = ctypes.CDLL(None)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        first = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
        second = os.open(sys.argv[1], os.O_RDWR)
        assert libc.mmap(None, 4096, 1, 1, first, 0) not in (None, ctypes.c_void_p(-1).value)
        os.write(second, b"content")
        os.close(first)
        assert not os.path.exists(sys.argv[2])
        os.close(second)
        assert open(sys.argv[2], "rb").read() == b"content"
    """
    argv = [sys.executable, "-c", textwrap.dedent(code), one.target / "f", other.target / "f"]
    subprocess.run(argv, check=True, timeout=DEADLINE_S)


def test_a_signal_that_does_not_kill_does_not_interrupt_a_writer(stuck: Stuck) -> None:
    code = """
        import os, signal, sys
        signal.signal(signal.SIGUSR1, lambda *_: print("hit", flush=True))
        handle = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)
        for number in range(16):
            assert os.write(handle, bytes([number]) * 2**20) == 2**20
        os.close(handle)
    """
    path = stuck.mounted.target / "f"
    argv = [sys.executable, "-c", textwrap.dedent(code), path]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as writer:
        until(lambda: stuck.mounted.writing.facts()["spool_bytes"] == 8 * MIB, "the spool is full")
        requests = stuck.mounted.session.requests
        writer.send_signal(signal.SIGUSR1)
        until(lambda: stuck.mounted.session.requests > requests, "the kernel tells of the signal")
        stuck.gate.set()
        assert writer.wait(DEADLINE_S) == 0
    assert path.read_bytes() == b"".join(bytes([number]) * MIB for number in range(16))
