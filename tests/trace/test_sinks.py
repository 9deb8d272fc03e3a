"""Spool files under real conditions: threads, forks, SIGKILL, full disks, unwritable folders."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from bootseer.trace.event import MAX_LINE_BYTES, Event, decode, encode
from bootseer.trace.sinks import SUFFIX, FanOut, SpoolSink, StderrSink, safe_name

EVENT = Event(1, 0, "j", "n", "s", "instant", "a")


def lines(folder: Path) -> dict[str, list[bytes]]:
    return {path.name: path.read_bytes().splitlines(keepends=True) for path in folder.glob(f"*{SUFFIX}")}


def numbers(texts: list[bytes]) -> list[int]:
    return [decode(text).mono_ns for text in texts]


def test_no_file_before_the_first_event(tmp_path: Path) -> None:
    sink = SpoolSink(str(tmp_path / "a" / "b"), "n0/uid")
    assert list(tmp_path.iterdir()) == []
    sink.write(encode(EVENT))
    (name,) = lines(tmp_path / "a" / "b")
    assert name.startswith(f"n0_uid.{os.getpid()}.")


def test_a_program_that_closes_all_descriptors_gets_no_event_in_its_own_file(tmp_path: Path) -> None:
    sink = SpoolSink(str(tmp_path), "n")
    os.close(probe := os.open("/dev/null", os.O_RDONLY))
    sink.write(encode(EVENT))
    os.close(probe)  # the descriptor of the spool file, like `os.closerange`
    own = os.open(tmp_path / "own", os.O_WRONLY | os.O_CREAT)
    assert own == probe
    sink.write(encode(EVENT._replace(mono_ns=1)))
    os.write(own, b"x")
    os.close(own)
    assert (tmp_path / "own").read_bytes() == b"x"
    assert sorted(number for texts in lines(tmp_path).values() for number in numbers(texts)) == [0, 1]


def test_threads_share_one_file_and_no_line_is_torn(tmp_path: Path) -> None:
    sink = SpoolSink(str(tmp_path), "n")
    start = threading.Barrier(8)

    def write(first: int) -> None:
        start.wait()
        for number in range(first, first + 200):
            sink.write(encode(EVENT._replace(mono_ns=number, attrs={"x": "y" * (number % 900)})))

    threads = [threading.Thread(target=write, args=(1000 * index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (texts,) = lines(tmp_path).values()
    assert sorted(numbers(texts)) == sorted(1000 * index + number for index in range(8) for number in range(200))
    assert sink.lost == 0


FORKS = """
import os, sys, threading
from bootseer.trace.event import Event, encode
from bootseer.trace.sinks import SpoolSink
sink = SpoolSink(sys.argv[1], "n")
event = Event(1, 0, "j", "n", "s", "instant", "a")
sink.write(encode(event))
held, done = threading.Event(), threading.Event()
def hold():
    with sink._lock:
        held.set()
        done.wait()
thread = threading.Thread(target=hold)
thread.start()
held.wait()
child = os.fork()  # now, while another thread writes
if child == 0:
    sink.write(encode(event._replace(mono_ns=1)))
    os._exit(0)
_, status = os.waitpid(child, 0)
done.set()
thread.join()
sink.write(encode(event._replace(mono_ns=2)))
sys.exit(os.waitstatus_to_exitcode(status))
"""


def test_a_fork_has_its_own_file_and_no_foreign_lock(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-W", "ignore", "-c", FORKS, str(tmp_path)], timeout=180, check=False)
    assert ended.returncode == 0
    assert sorted(numbers(texts) for texts in lines(tmp_path).values()) == [[0, 2], [1]]


WRITER = """
import sys
from bootseer.trace.event import Event, encode
from bootseer.trace.sinks import SpoolSink
sink = SpoolSink(sys.argv[1], "n")
number = 0
while True:
    sink.write(encode(Event(1, number, "j", "n", "s", "instant", "a", attrs={"x": "y" * (number % 3000)})))
    sys.stdout.write(f"{number}\\n")  # after the write: printed numbers are in the file
    sys.stdout.flush()
    number += 1
"""


@pytest.mark.parametrize("wanted", [1, 500, 3000])
def test_sigkill_in_mid_stream(tmp_path: Path, wanted: int) -> None:
    """All lines for which `write` returned are there, in order; at most the current line is missing."""
    with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        for _ in range(wanted):
            writer.stdout.readline()
        writer.send_signal(signal.SIGKILL)
        told = wanted + len([line for line in writer.stdout.read().split("\n")[:-1] if line])
        writer.wait()
    (texts,) = lines(tmp_path).values()
    if not texts[-1].endswith(b"\n"):
        texts.pop()
    found = numbers(texts)
    assert found == list(range(len(found)))
    assert len(found) >= told


FULL_DISK = """
import ctypes, os, sys
from bootseer.trace.event import Event, decode, encode
from bootseer.trace.sinks import SpoolSink
folder = sys.argv[1]
libc = ctypes.CDLL(None, use_errno=True)
if libc.unshare(0x20000) or libc.mount(None, b"/", None, 0x4000 | 1 << 18, None):
    sys.exit(3)
if libc.mount(b"tmpfs", folder.encode(), b"tmpfs", 0, b"size=64k"):
    sys.exit(3)
sink = SpoolSink(folder, "n")
ballast = os.path.join(folder, "ballast")
open(ballast, "wb").write(b"x" * 30_000)
def write(number):
    sink.write(encode(Event(1, number, "j", "n", "s", "instant", "a", attrs={"x": "y" * 1021})))
number = 0
while not sink.lost:
    write(number)
    number += 1
first_lost = number - 1
for number in range(number, number + 5):
    write(number)
os.unlink(ballast)
after = number + 1
for number in range(after, after + 10):
    write(number)
(name,) = os.listdir(folder)
texts = [text for text in open(os.path.join(folder, name), "rb").read().split(b"\\n") if text]
found = []
torn = 0
for text in texts:
    try:
        found.append(decode(text).mono_ns)
    except ValueError:
        torn += 1
assert found == [*range(first_lost), *range(after, after + 10)], (found, first_lost, after)
assert sink.lost == 6, sink.lost
assert torn <= 1, torn
"""


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a small disk")
def test_full_disk_costs_the_events_of_that_time_only(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", FULL_DISK, str(tmp_path)], timeout=180, check=False)
    if ended.returncode == 3:
        pytest.skip("mounts are not permitted here")
    assert ended.returncode == 0


def test_folder_that_takes_no_files() -> None:
    sink = SpoolSink("/proc/bootseer", "n")
    sink.write(encode(EVENT))
    sink.write(encode(EVENT))
    assert sink.lost == 2


READ_ONLY = """
import ctypes, sys
from bootseer.trace.sinks import SpoolSink
libc = ctypes.CDLL(None)
if libc.unshare(0x20000) or libc.mount(None, b"/", None, 0x4000 | 1 << 18, None):
    sys.exit(3)
if libc.mount(b"tmpfs", sys.argv[1].encode(), b"tmpfs", 1, None):
    sys.exit(3)
sink = SpoolSink(sys.argv[1], "n")
sink.write(b"x\\n")
assert sink.lost == 1
"""


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a read-only file system")
def test_read_only_file_system(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", READ_ONLY, str(tmp_path)], timeout=180, check=False)
    if ended.returncode == 3:
        pytest.skip("mounts are not permitted here")
    assert ended.returncode == 0


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write to a read-only folder")
def test_read_only_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    sink = SpoolSink(str(tmp_path), "n")
    sink.write(encode(EVENT))
    assert sink.lost == 1


def test_the_folder_comes_back(tmp_path: Path) -> None:
    (tmp_path / "spool").write_text("a file in the way")
    sink = SpoolSink(str(tmp_path / "spool"), "n")
    sink.write(encode(EVENT))
    (tmp_path / "spool").unlink()
    sink.write(encode(EVENT._replace(mono_ns=1)))
    assert sink.lost == 1
    (texts,) = lines(tmp_path / "spool").values()
    assert numbers([text for text in texts if text != b"\n"]) == [1]


def test_a_spool_file_is_never_a_link(tmp_path: Path) -> None:
    """The name contains the time in ns, so no link can be put in its place beforehand; it is opened with O_EXCL."""
    sink = SpoolSink(str(tmp_path), "n")
    before = time.monotonic_ns()
    sink.write(encode(EVENT))
    (name,) = lines(tmp_path)
    assert before <= int(name.split(".")[2]) <= time.monotonic_ns()


def test_stderr_and_several_sinks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    spool = SpoolSink(str(tmp_path), "n")
    both = FanOut([spool, StderrSink(), SpoolSink("/proc/bootseer", "n")])
    both.write(encode(EVENT))
    assert capfd.readouterr().err == encode(EVENT).decode()
    assert len(lines(tmp_path)) == 1
    assert both.lost == 1


def test_closed_stderr_is_counted() -> None:
    script = (
        "import os\nfrom bootseer.trace.sinks import StderrSink\nsink = StderrSink()\nos.close(2)\n"
        "sink.write(b'x\\n')\nprint(sink.lost)"
    )
    ended = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, timeout=180, check=True)
    assert ended.stdout == "1\n"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("n0", "n0"),
        ("a/b", "a_b"),
        ("../../x", "_.._x"),
        ("..", "unnamed"),
        ("", "unnamed"),
        ("ü\n", "_"),
        ("x" * 99, "x" * 80),
    ],
)
def test_safe_name(text: str, name: str) -> None:
    assert safe_name(text) == name


def test_a_line_is_one_atomic_pipe_write() -> None:
    assert MAX_LINE_BYTES < 4096


INTERRUPTED = """
import os, signal, sys
from bootseer.trace.sinks import SpoolSink

class Folder:  # asked for its path in the middle of a write
    def __fspath__(self):
        if first:
            first.clear()
            signal.raise_signal(signal.SIGALRM)
        return sys.argv[1]

first = [1]
sink = SpoolSink(Folder(), "n")
signal.signal(signal.SIGALRM, lambda *_: sink.write(b"from the handler\\n"))
sink.write(b"from the program\\n")
"""


def test_a_signal_handler_may_write_in_the_middle_of_a_write(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", INTERRUPTED, str(tmp_path)], timeout=180, check=True)
    assert sorted(text for texts in lines(tmp_path).values() for text in texts) == [
        b"from the handler\n",
        b"from the program\n",
    ]


def test_rights_that_a_file_system_does_not_have_cost_neither_events_nor_descriptors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o2700)

    def refused(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "fchmod", refused)
    sink = SpoolSink(str(tmp_path), "n")
    for number in range(3):
        sink.write(encode(EVENT._replace(mono_ns=number)))
    assert [numbers(texts) for texts in lines(tmp_path).values()] == [[0, 1, 2]]
    assert sink.lost == 0
