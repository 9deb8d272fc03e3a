"""Following a spool folder while its files appear, grow, get damaged and disappear."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bootseer.trace import spool_tail
from bootseer.trace.event import Event, encode
from bootseer.trace.sinks import SpoolSink
from bootseer.trace.spool_tail import SpoolTail


def line(number: int, size: int = 0) -> bytes:
    return encode(Event(1, number, "j", "n", "s", "instant", "a", attrs={"x": "y" * size} if size else {}))


def numbers(tail: SpoolTail, *, last: bool = False) -> list[int]:
    return [event.mono_ns for event in tail.poll(last=last)]


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def test_a_real_writer_is_followed(tmp_path: Path) -> None:
    tail = SpoolTail(str(tmp_path / "spool"))
    assert tail.poll() == []
    first, second = SpoolSink(str(tmp_path / "spool"), "n0"), SpoolSink(str(tmp_path / "spool"), "n1")
    first.write(line(0))
    assert numbers(tail) == [0]
    second.write(line(1))
    first.write(line(2))
    assert sorted(numbers(tail)) == [1, 2]
    assert numbers(tail) == []


def test_of_a_shared_folder_only_one_node_s_files_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "spool"
    for number, node in enumerate(("pod/7", "pod/70", "pod")):
        SpoolSink(str(folder), node).write(line(number))
    append(folder / "of-another-program.events", line(3))
    assert sorted(numbers(SpoolTail(str(folder), "pod/7"))) == [0, 3]
    assert sorted(numbers(SpoolTail(str(folder), keeps=lambda event: event.mono_ns > 0), last=True)) == [1, 2, 3]


def test_half_a_line_waits_for_the_rest(tmp_path: Path) -> None:
    tail, path = SpoolTail(str(tmp_path)), tmp_path / "a.events"
    text = line(1)
    for at in range(0, len(text), 10):
        append(path, text[at : at + 10])
        assert numbers(tail) == ([1] if at + 10 >= len(text) else [])


def test_torn_and_foreign_lines_are_counted(tmp_path: Path) -> None:
    tail, path = SpoolTail(str(tmp_path)), tmp_path / "a.events"
    append(path, line(1)[:30] + b"\n" + line(2) + b"noise\n\n" + line(3))
    assert numbers(tail) == [2, 3]


@pytest.mark.parametrize("last", [False, True])
def test_much_at_once_comes_in_bounded_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: bool) -> None:
    monkeypatch.setattr(spool_tail, "MAX_BYTES_PER_LOOK", 10_000)
    tail = SpoolTail(str(tmp_path))
    append(tmp_path / "a.events", b"".join(line(number, 500) for number in range(200)))
    first = numbers(tail, last=last)
    if last:
        assert first == list(range(200))
        return
    assert 0 < len(first) < 20
    found = first
    while more := numbers(tail):
        found += more
    assert found == list(range(200))


@pytest.mark.parametrize("last", [False, True])
def test_an_endless_line_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: bool) -> None:
    monkeypatch.setattr(spool_tail, "MAX_BYTES_PER_LOOK", 100_000)
    tail = SpoolTail(str(tmp_path))
    append(tmp_path / "a.events", line(1) + b"x" * 1_000_000 + b"\n" + line(2))
    found = []
    for _ in range(20):
        found += numbers(tail, last=last)
    assert found == [1, 2]


def test_files_that_go_shrink_or_are_replaced(tmp_path: Path) -> None:
    tail, path = SpoolTail(str(tmp_path)), tmp_path / "a.events"
    append(path, line(1) + line(2))
    assert numbers(tail) == [1, 2]
    path.write_bytes(line(3))
    assert numbers(tail) == [3]
    path.unlink()
    assert numbers(tail) == []
    append(path, line(4))
    assert numbers(tail) == [4]


def test_only_regular_spool_files_are_opened(tmp_path: Path) -> None:
    """A pipe with such a name would block the reader, and a link could point anywhere."""
    os.mkfifo(tmp_path / "pipe.events")
    (tmp_path / "folder.events").mkdir()
    append(tmp_path / "elsewhere", line(1))
    (tmp_path / "link.events").symlink_to(tmp_path / "elsewhere")
    append(tmp_path / "other.log", line(2))
    tail = SpoolTail(str(tmp_path))
    assert tail.poll(last=True) == []


def test_no_descriptor_stays_open(tmp_path: Path) -> None:
    tail = SpoolTail(str(tmp_path))
    before = len(list(Path("/proc/self/fd").iterdir()))
    for number in range(20):
        append(tmp_path / f"{number}.events", line(number))
    assert len(tail.poll()) == 20
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_huge_file_does_not_hold_up_the_end_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's user can make one that takes no space, and the run may be root's."""
    monkeypatch.setattr(spool_tail, "_LAST_S", 0.0)
    append(tmp_path / "z.events", line(1))
    (tmp_path / "a.events").touch()
    os.truncate(tmp_path / "a.events", 2 << 30)
    tail = SpoolTail(str(tmp_path))
    assert numbers(tail, last=True) == [1]
    assert tail._files["a.events"][1] == spool_tail.MAX_BYTES_PER_LOOK
