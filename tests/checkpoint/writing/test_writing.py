from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter
from pathlib import Path

import pytest

from bootseer.checkpoint.attempts import collect
from bootseer.checkpoint.files import Files
from bootseer.checkpoint.head import STRIPES, part_path
from bootseer.checkpoint.layout import CHUNK_BYTES, Policy, parity_chunk
from bootseer.checkpoint.writing import lane
from bootseer.checkpoint.writing.lane import WritingSettings
from bootseer.checkpoint.writing.spool import FileSource
from bootseer.checkpoint.writing.writing import Writing
from bootseer.errors import IsFolderError, NotFoundError, PermanentError, TransientError
from bootseer.places.folder import FolderPlace
from checkpoint.striped_files import in_memory
from waiting import until

from .conftest import MIB, SMALL, Desk, Restarts


@pytest.mark.parametrize("size", [0, 1, MIB, 2 * MIB - 1, 2 * MIB, 4 * MIB, 4 * MIB + 1, 9 * MIB, 12 * MIB + 17])
@pytest.mark.parametrize("parity", [False, True])
def test_written_files_are_read_back(desk: Desk, size: int, parity: bool) -> None:
    data = os.urandom(size)
    policy = Policy(stripes=3, parity=parity, part_bytes=MIB, min_bytes_per_stripe=MIB)
    written = desk.writing.write_file("job/file", *in_memory(data), policy=policy, mode=0o640)
    assert written.is_striped == (size >= 2 * MIB - 1 and policy.is_striped(size))
    assert desk.read("job/file") == data
    assert desk.files.stat("job/file").entry.mode == 0o640
    assert desk.leftovers() == []


def test_the_memory_of_a_written_file_is_free_before_the_garbage_collection(desk: Desk) -> None:
    class Memory(bytearray):
        """Memory with support for weak references."""

    memory = Memory(5 * MIB)
    is_held = weakref.ref(memory)
    gc.disable()
    try:
        desk.writing.write_file("job/file", *in_memory(memory), policy=Policy(stripes=3, min_bytes_per_stripe=MIB))
        del memory
        until(lambda: is_held() is None, "it is free")
    finally:
        gc.enable()


def test_a_parity_part_has_the_xor_of_the_rows(desk: Desk) -> None:
    data = os.urandom(7 * MIB + 11)
    policy = Policy(stripes=3, parity=True, part_bytes=4 * MIB, min_bytes_per_stripe=MIB)
    desk.writing.write_file("job/file", *in_memory(data), policy=policy)
    head = desk.files.head("job/file")
    assert head is not None
    (segment,) = head.segments
    assert segment.parity is not None
    parity = desk.place.inner.read_bytes(part_path("job/file", head.id, segment.parity.name), 1 << 30)
    for row in range(0, 8, 3):
        chunks = [data[chunk * MIB : (chunk + 1) * MIB] for chunk in range(row, min(row + 3, 8))]
        assert parity[row // 3 * MIB : (row // 3 + 1) * MIB] == parity_chunk(chunks, len(chunks[0]))


def test_a_local_file_is_written(desk: Desk, tmp_path: Path) -> None:
    data = os.urandom(5 * MIB + 5)
    (tmp_path / "local").write_bytes(data)
    told: list[tuple[int, int]] = []
    with FileSource(tmp_path / "local") as source:
        desk.writing.write_file(
            "job/file",
            source.size_bytes,
            source.read,
            policy=SMALL,
            progress=lambda done, size: told.append((done, size)),
        )
    assert desk.read("job/file") == data
    assert told[-1] == (len(data), len(data))
    assert told == sorted(told)


def test_a_source_that_becomes_shorter_is_noticed(desk: Desk, tmp_path: Path) -> None:
    (tmp_path / "local").write_bytes(bytes(5 * MIB))
    with FileSource(tmp_path / "local") as source:
        os.truncate(tmp_path / "local", 3 * MIB)
        with pytest.raises(PermanentError, match="shorter"):
            desk.writing.write_file("job/file", source.size_bytes, source.read, policy=SMALL)
    assert desk.leftovers() == []


def test_a_source_that_changes_between_two_tries_of_a_part_is_noticed(desk: Desk) -> None:
    data = bytearray(5 * MIB)
    failed = threading.Event()

    def fail_once(step: str, path: str) -> None:
        if step == "close" and not failed.is_set():
            failed.set()
            for chunk in range(5):
                data[chunk * MIB] ^= 1
            raise TransientError("a node died")

    desk.place.before = fail_once
    with pytest.raises(PermanentError, match="data changed"):
        desk.writing.write_file("job/file", *in_memory(data), policy=SMALL)
    assert desk.leftovers() == []


def test_a_failed_part_is_written_again_elsewhere_under_another_name_while_the_others_continue(
    desk: Desk, restarts: Restarts
) -> None:
    # Part number n is on node n.
    avoided: list[frozenset[str]] = []
    excluded: list[str] = []
    begin = desk.place.begin_parts

    def begin_parts(paths, **options):  # type: ignore[no-untyped-def]
        avoided.append(options["avoid"])
        return begin(paths, **options)

    desk.place.begin_parts = begin_parts  # type: ignore[method-assign]
    desk.place.exclude = excluded.extend  # type: ignore[attr-defined]
    desk.place.nodes_of = lambda path: (f"node{path.rpartition('/')[2].split('.')[1]}:1",)
    failed: list[str] = []

    def fail_once(step: str, path: str) -> None:
        if step == "write" and ".1." in path and not failed:
            failed.append(path)
            raise TransientError("a node died")

    desk.place.before = fail_once
    desk.writing.write_file("job/file", *in_memory(bytes(4 * MIB)), policy=SMALL)
    assert restarts() == 1
    assert avoided[0] == frozenset()
    assert "node1:1" not in avoided[1]
    assert excluded == ["node1:1"]
    head = desk.files.head("job/file")
    assert head is not None
    assert failed[0].rpartition("/")[2] not in [part.name for part in head.segments[0].parts]
    assert desk.leftovers() == []


def test_a_part_on_a_node_that_is_much_slower_than_the_others_is_written_elsewhere(
    desk: Desk, restarts: Restarts
) -> None:
    policy = Policy(stripes=3, part_bytes=16 * MIB, min_bytes_per_stripe=MIB)
    slow: list[str] = []
    others_sent = threading.Semaphore(0)

    def be_slow(step: str, path: str) -> None:
        if step == "close":
            others_sent.release()
        if step == "write" and ".1." in path and (not slow or path in slow):
            slow.append(path)
            if len(slow) == 3:
                assert all(others_sent.acquire(timeout=120) for _ in range(2))
            threading.Event().wait(0.2)

    desk.place.before = be_slow
    desk.place.nodes_of = lambda path: ("slow:1",) if path in slow or not slow else ("quick:1",)
    data = os.urandom(36 * MIB)
    desk.writing.write_file("job/file", *in_memory(data), policy=policy)
    assert restarts() == 1
    assert len(slow) < 12  # not all of its chunks
    assert desk.read("job/file") == data
    assert desk.leftovers() == []


def test_parts_that_share_a_node_are_recorded(desk: Desk) -> None:
    desk.place.nodes_of = lambda path: ("node:1",)
    desk.writing.write_file("job/file", *in_memory(bytes(4 * MIB)), policy=SMALL)
    head = desk.files.head("job/file")
    assert head is not None
    assert [part.nodes for part in head.segments[0].parts] == [("node:1",)] * 2


@pytest.mark.parametrize("step", ["begin", "write", "close", "list", "write_bytes"])
def test_a_step_that_always_fails_is_given_up_and_the_old_file_is_kept(desk: Desk, step: str) -> None:
    desk.writing.write_file("job/file", *in_memory(b"old" * MIB), policy=SMALL)

    def fail(found: str, path: str) -> None:
        if found == step:
            raise TransientError("not now")

    desk.place.before = fail
    with pytest.raises(TransientError, match="not now"):
        desk.writing.write_file("job/file", *in_memory(b"new" * MIB), policy=SMALL)
    desk.place.before = lambda step, path: None
    assert desk.read("job/file") == b"old" * MIB
    if step != "write_bytes":  # then only the answer may have been lost, and a collector decides
        assert desk.leftovers() == []


@pytest.mark.parametrize("step", ["begin", "write", "close"])
def test_a_panic_of_a_library_is_an_error_of_the_file(desk: Desk, step: str) -> None:
    """Panics of Rust code are no Exceptions."""

    class Panic(BaseException):
        pass

    def fail(found: str, path: str) -> None:
        if found == step:
            raise Panic("rust")

    desk.place.before = fail
    with pytest.raises(PermanentError, match="Panic: rust"):
        desk.writing.write_file("job/file", *in_memory(b"new" * MIB), policy=SMALL)
    assert desk.leftovers() == []


def test_a_part_for_which_no_file_can_be_begun_is_given_up_in_time_after_it_has_reached_a_node(tmp_path: Path) -> None:
    desk = Desk(tmp_path / "root", tmp_path / "spool", WritingSettings(retry_s=0.01, retry_for_s=0.3))
    begun: Counter[str] = Counter()
    is_read_only = threading.Event()

    def fail(step: str, path: str) -> None:
        if step == "begin" and is_read_only.is_set():
            begun[path.rpartition("/")[2].split(".")[1]] += 1
            time.sleep(0.2)
        elif step == "close":
            is_read_only.set()
        else:
            return
        raise TransientError("it is in safe mode")

    desk.place.before = fail
    with contextlib.closing(desk.writing), pytest.raises(TransientError, match="safe mode"):
        desk.writing.write_file("job/file", *in_memory(bytes(4 * MIB)), policy=SMALL)
    assert max(begun.values()) <= 2  # not `part_tries`


def test_an_old_file_that_cannot_be_read_is_replaced(desk: Desk) -> None:
    desk.writing.write_file("job/file", *in_memory(b"old" * MIB), policy=SMALL)
    reads: list[str] = []

    def fail(step: str, path: str) -> None:
        if step == "open" and path == "job/file":
            reads.append(path)
            raise TransientError("its node is gone")

    desk.place.before = fail
    desk.writing.write_file("job/file", *in_memory(b"new" * MIB), policy=SMALL)
    desk.place.before = lambda step, path: None
    assert desk.read("job/file") == b"new" * MIB


def test_folders_and_names_are_checked_first(desk: Desk) -> None:
    source = in_memory(bytes(9 * MIB))
    with pytest.raises(NotFoundError):
        desk.writing.write_file("nowhere/file", *source)
    with pytest.raises(IsFolderError):
        desk.writing.write_file("job", *source)
    with pytest.raises(PermanentError, match="choose another"):
        desk.writing.write_file("job/.stripes", *source)
    with pytest.raises(PermanentError, match="choose another"):
        desk.writing.open("job/.attempts-1")
    assert desk.leftovers() == []


def test_many_files_at_once_use_a_bounded_number_of_threads(tmp_path: Path) -> None:
    desk = Desk(tmp_path / "root", tmp_path / "spool", WritingSettings(max_threads=3))
    others, most = set(threading.enumerate()), [0]

    def count(step: str, path: str) -> None:
        names = [thread.name for thread in threading.enumerate() if thread not in others]
        most[0] = max(most[0], names.count("bootseer-write"))

    desk.place.before = count
    data = os.urandom(9 * MIB)
    with contextlib.closing(desk.writing):
        threads = [
            threading.Thread(
                target=desk.writing.write_file, args=(f"job/{number}", *in_memory(data)), kwargs={"policy": SMALL}
            )
            for number in range(6)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert most[0] == 3
        assert all(desk.read(f"job/{number}") == data for number in range(6))


def test_a_lease_is_kept_while_a_file_is_written_and_not_longer(tmp_path: Path) -> None:
    desk = Desk(tmp_path / "root", tmp_path / "spool", WritingSettings(lease_s=0.01))
    leased = threading.Event()
    desk.place.before = lambda step, path: leased.set() if path.endswith("/lease") else None
    with contextlib.closing(desk.writing):
        writer = desk.writing.open("job/file", policy=SMALL)
        writer.write_at(0, bytes(3 * MIB))
        assert leased.wait(120)
        writer.commit()
        assert desk.leftovers() == []


def test_files_below_an_attempt_are_written_like_others(desk: Desk) -> None:
    desk.place.make_folder("job/.attempts/1", parents=True)
    files = Files(desk.place, within="job/.attempts/1")  # type: ignore[arg-type]
    with contextlib.closing(Writing(files)) as writing:
        writing.write_file("job/.attempts/1/file", *in_memory(b"x" * 5 * MIB), policy=SMALL)
    desk.place.rename("job/.attempts/1", "job/step-1")
    assert desk.read("job/step-1/file") == b"x" * 5 * MIB


@pytest.mark.slow
def test_after_close_nothing_begins_and_no_thread_is_left(desk: Desk) -> None:
    others = set(threading.enumerate())
    writer = desk.writing.open("job/file", policy=SMALL)
    writer.write_at(0, bytes(5 * MIB))
    mine = set(threading.enumerate()) - others
    desk.writing.close()
    for thread in mine:
        thread.join(120)
        assert not thread.is_alive()
    with pytest.raises(PermanentError, match="closed"):
        desk.writing.open("job/file")
    assert desk.leftovers() == []


def test_the_child_of_a_fork_writes_too(tmp_path: Path) -> None:
    program = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from bootseer.checkpoint.files import Files\n"
        "from bootseer.places.folder import FolderPlace\n"
        "from bootseer.checkpoint.layout import Policy\n"
        "from bootseer.checkpoint.writing.writing import Writing\n"
        "writing = Writing(Files(FolderPlace(Path(sys.argv[1]))))\n"
        "policy = Policy(stripes=2, part_bytes=1 << 20, min_bytes_per_stripe=1 << 20)\n"
        "writing.write_file('parent', 5 << 20, lambda _, length: bytes(length), policy=policy)\n"
        "pid = os.fork()\n"
        "writing.write_file('after' if pid else 'child', 5 << 20, lambda _, length: bytes(length), policy=policy)\n"
        "pid and sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
        "os._exit(0)\n"
    )
    # Newer Python versions warn about forks of processes with threads.
    command = [sys.executable, "-W", "ignore", "-c", program, tmp_path]
    subprocess.run(command, check=True, timeout=180)
    files = Files(FolderPlace(tmp_path))
    assert {name: files.stat(name).size_bytes for name in ("parent", "child", "after")} == dict.fromkeys(
        ("parent", "child", "after"), 5 * CHUNK_BYTES
    )


@pytest.mark.parametrize("then", [TransientError("lost"), PermanentError("refused"), KeyboardInterrupt()])
def test_a_head_that_may_be_visible_keeps_its_parts_whatever_follows(desk: Desk, then: BaseException) -> None:
    writer = desk.writing.open("job/file", policy=SMALL)
    writer.write_at(0, b"a" * 5 * MIB)
    writer.sync()
    writer.write_at(5 * MIB, b"b" * 5 * MIB)
    write_bytes = desk.place.inner.write_bytes
    answers: list[BaseException] = []

    def lose_the_answer(path: str, data: bytes, **options: int) -> None:
        if not answers:
            write_bytes(path, data, **options)
        answers.append(then if answers or isinstance(then, KeyboardInterrupt) else TransientError("lost"))
        raise answers[-1]

    desk.place.write_bytes = lose_the_answer  # type: ignore[attr-defined]
    with pytest.raises(type(then)):
        writer.commit()
    assert desk.read("job/file") == b"a" * 5 * MIB + b"b" * 5 * MIB


def test_writing_a_file_that_is_not_striped_waits_for_a_place_that_is_briefly_unavailable(
    tmp_path: Path, restarts: Restarts
) -> None:
    desk = Desk(tmp_path / "root", tmp_path / "spool", WritingSettings())
    is_back = threading.Event()
    timer = threading.Timer(0.3, is_back.set)

    def fail_first(step: str, path: str) -> None:
        if step == "begin" and not is_back.is_set():
            raise TransientError("it restarts")

    desk.place.before = fail_first
    with contextlib.closing(desk.writing):
        timer.start()
        written = desk.writing.write_file("job/file", *in_memory(b"x" * 9 * MIB), policy=Policy(stripes=1))
    timer.join()
    assert not written.is_striped
    assert restarts() > 0
    assert desk.read("job/file") == b"x" * 9 * MIB
    assert desk.leftovers() == []


def test_a_file_that_was_lost_before_its_rename_is_not_reported_as_published(desk: Desk) -> None:
    plain = Policy(stripes=1)
    desk.writing.write_file("job/file", *in_memory(b"a" * 9 * MIB), policy=plain)

    def lose(step: str, path: str) -> None:
        if step == "rename":
            (desk.root / path).unlink()

    desk.place.before = lose
    with pytest.raises(NotFoundError):
        desk.writing.write_file("job/file", *in_memory(b"b" * 9 * MIB), policy=plain)
    assert desk.read("job/file") == b"a" * 9 * MIB


def test_a_large_file_that_is_not_striped_also_has_a_lease(tmp_path: Path) -> None:
    desk = Desk(tmp_path / "root", tmp_path / "spool", WritingSettings(retry_s=0.01, lease_s=0.03))
    collected: list[int] = []

    def collect_now(step: str, path: str) -> None:
        if step != "close":
            return
        until = time.monotonic() + 120
        while not list((desk.root / "job/.stripes").glob("*/lease")):
            assert time.monotonic() < until, "no lease is written"
            time.sleep(0.005)
        # In HDFS, the modification time of a file that is being written is that of its begin.
        os.utime(desk.root / path, (0, 0))
        os.utime((desk.root / path).parent, (0, 0))
        collected.append(collect(desk.files.place, "job"))

    desk.place.before = collect_now
    content = bytes(range(256)) * (9 * MIB // 256)
    with contextlib.closing(desk.writing) as writing:
        assert not writing.write_file("job/f", *in_memory(content), policy=Policy(stripes=1)).is_striped
    assert collected == [0]
    assert desk.read("job/f") == content
    assert desk.leftovers() == []


@pytest.mark.parametrize("way", ["at once", "piece by piece"])
def test_a_place_that_never_answers_is_an_error_and_does_not_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    desk = Desk(tmp_path / "root", tmp_path / "spool", WritingSettings(end_s=0.1))
    monkeypatch.setattr(lane, "_STUCK_S", 0.2)
    gate, data = threading.Event(), os.urandom(4 * MIB)

    def hang(step: str, path: str) -> None:
        if step == "write" and STRIPES in path:
            gate.wait(120)

    desk.place.before = hang
    try:
        with pytest.raises(TransientError, match="no request to the storage has ended for"):
            if way == "piece by piece":
                writer = desk.writing.open("job/file", policy=SMALL)
                writer.write_at(0, data)
                writer.commit()
            else:
                desk.writing.write_file("job/file", *in_memory(data), policy=SMALL)
    finally:
        gate.set()
