from __future__ import annotations

import contextlib
import os
import random
import tempfile
import threading
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bootseer.checkpoint.layout import Policy
from bootseer.checkpoint.writing.lane import WritingSettings
from bootseer.checkpoint.writing.spool import TooLargeError
from bootseer.errors import NotFoundError, PermanentError, TransientError

from .conftest import MIB, SMALL, Desk, Restarts

PIECE = 128 << 10
SIZES = st.integers(0, 7 * MIB)
# The borders of chunks matter most.
OFFSETS = st.one_of(
    SIZES, st.builds(lambda chunk, off: max(0, chunk * MIB + off), st.integers(0, 7), st.integers(-2, 2))
)
LENGTHS = st.one_of(st.integers(0, 3 * MIB), st.sampled_from([1, PIECE, MIB, 2 * MIB]))
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), OFFSETS, LENGTHS),
        st.tuples(st.just("append"), st.just(0), LENGTHS),
        st.tuples(st.just("read"), OFFSETS, LENGTHS),
        st.tuples(st.just("truncate"), OFFSETS, st.just(0)),
        st.tuples(st.just("sync"), st.just(0), st.just(0)),
        st.tuples(st.just("cut"), st.just(0), st.just(0)),
    ),
    max_size=14,
)


@given(STEPS, st.booleans(), st.sampled_from([2 * MIB, 64 * MIB]), st.sampled_from([0.0, 0.1]), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_writer_behaves_like_bytes_in_memory(
    steps: list[tuple[str, int, int]], parity: bool, spool_bytes: int, faults: float, seed: int
) -> None:
    policy = Policy(stripes=2, parity=parity, part_bytes=2 * MIB, min_bytes_per_stripe=MIB)
    source = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        room = WritingSettings(spool_bytes=spool_bytes, retry_s=0.001, part_tries=12)
        desk = Desk(Path(folder) / "root", Path(folder) / "spool", room)

        def fail_sometimes(step: str, path: str) -> None:
            if step in ("begin", "write", "close") and source.random() < faults:
                raise TransientError("a node died")

        desk.place.before = fail_sometimes
        model, shown = bytearray(), None
        writer = desk.writing.open("job/file", policy=policy)
        for step, offset, length in steps:
            if step in ("write", "append"):
                at = offset if step == "write" else len(model)
                data = source.randbytes(length)
                if data:
                    model.extend(bytes(max(at + length - len(model), 0)))
                    model[at : at + length] = data
                writer.write_at(at, data)
            elif step == "read":
                assert writer.read_at(offset, length) == model[offset : offset + length]
            elif step == "truncate":
                del model[offset:]
                model.extend(bytes(offset - len(model)))
                writer.truncate(offset)
            elif step == "sync":
                writer.sync()
                shown = bytes(model)
            else:
                writer.sending.flush_some()
            assert writer.size_bytes == len(model)
            if shown is not None:
                assert desk.read("job/file") == shown
        assert writer.read_at(0, len(model) + 1) == model
        writer.commit()
        assert desk.read("job/file") == model
        assert desk.leftovers() == []
        assert desk.writing.facts()["spool_bytes"] == 0


@pytest.mark.parametrize("piece", [PIECE, 64 * MIB])
def test_a_stream_is_sent_while_it_is_written_and_needs_little_space(tmp_path: Path, piece: int) -> None:
    room = WritingSettings(spool_bytes=8 * MIB, random_bytes=0)
    desk = Desk(tmp_path / "root", tmp_path / "spool", room)
    data = os.urandom(40 * MIB + 5)
    with contextlib.closing(desk.writing):
        writer = desk.writing.open("job/file", policy=SMALL)
        for offset in range(0, len(data), piece):
            writer.write_at(offset, data[offset : offset + piece])
        with pytest.raises(NotFoundError):
            desk.files.stat("job/file")
        written = writer.commit()
    assert written.is_striped
    assert desk.read("job/file") == data
    assert desk.leftovers() == []


def test_a_rewritten_file_is_sent_while_it_is_written_like_the_first_time(tmp_path: Path) -> None:
    room = WritingSettings(spool_bytes=8 * MIB, random_bytes=0)
    desk = Desk(tmp_path / "root", tmp_path / "spool", room)
    with contextlib.closing(desk.writing):
        writer = desk.writing.open("job/file", policy=SMALL)
        for content in (b"1" * PIECE, b"2" * PIECE):
            writer.truncate(0)
            for offset in range(0, 20 * MIB, PIECE):
                writer.write_at(offset, content)
        writer.commit()
    assert desk.read("job/file") == b"2" * 20 * MIB
    assert desk.leftovers() == []


@pytest.mark.slow
def test_the_spool_stays_within_its_limit_with_several_concurrent_streams(tmp_path: Path) -> None:
    spool_bytes = 6 * MIB
    desk = Desk(tmp_path / "root", tmp_path / "spool", WritingSettings(spool_bytes=spool_bytes, random_bytes=0))
    data = os.urandom(24 * MIB)
    most = [0]

    def write(name: str) -> None:
        writer = desk.writing.open(f"job/{name}", policy=SMALL)
        for offset in range(0, len(data), PIECE):
            writer.write_at(offset, data[offset : offset + PIECE])
            most[0] = max(most[0], int(str(desk.writing.facts()["spool_bytes"])))
        writer.commit()

    with contextlib.closing(desk.writing):
        threads = [threading.Thread(target=write, args=(f"file{number}",)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert most[0] <= spool_bytes
        assert all(desk.read(f"job/file{number}") == data for number in range(4))


def test_one_thread_writes_to_many_files_in_turn_with_a_small_spool(tmp_path: Path) -> None:
    # No other thread could free the space that this one waits for.
    desk = Desk(
        tmp_path / "root", tmp_path / "spool", WritingSettings(spool_bytes=12 * MIB, random_bytes=0, max_threads=3)
    )
    data = os.urandom(5 * MIB)
    with contextlib.closing(desk.writing):
        writers = [desk.writing.open(f"job/file{number}", policy=SMALL) for number in range(8)]
        for offset in range(0, len(data), PIECE):
            for writer in writers:
                writer.write_at(offset, data[offset : offset + PIECE])
        for number, writer in enumerate(writers):
            writer.commit()
            assert desk.read(f"job/file{number}") == data


def test_data_written_out_of_order_may_use_more_space_up_to_a_limit(tmp_path: Path) -> None:
    room = WritingSettings(spool_bytes=2 * MIB, random_bytes=10 * MIB)
    desk = Desk(tmp_path / "root", tmp_path / "spool", room)
    with contextlib.closing(desk.writing):
        writer = desk.writing.open("job/file", policy=SMALL)
        writer.write_at(9 * MIB, b"x" * 12 * MIB)
        with pytest.raises(TooLargeError, match="out of order"):
            writer.write_at(0, b"x")
        with pytest.raises(TooLargeError, match="gap"):
            writer.truncate(1 << 50)
        # The refused calls have changed nothing.
        assert writer.size_bytes == 21 * MIB
        writer.commit()
        assert desk.read("job/file") == bytes(9 * MIB) + b"x" * 12 * MIB


def test_for_a_header_that_is_written_last_one_segment_is_sent_again_and_not_the_file(desk: Desk) -> None:
    data = bytearray(os.urandom(21 * MIB))
    writer = desk.writing.open("job/file", policy=SMALL)
    writer.write_at(0, data)
    writer.sync()
    begun: list[str] = []
    desk.place.before = lambda step, path: begun.append(path) if step == "begin" else None
    data[:8] = b"new head"
    writer.write_at(0, b"new head")
    writer.commit()
    assert desk.read("job/file") == data
    assert len(begun) == 2  # the parts of the first segment


def test_nothing_is_visible_before_a_sync_and_all_of_it_after(desk: Desk) -> None:
    writer = desk.writing.open("job/file", policy=SMALL)
    writer.write_at(0, b"1" * 9 * MIB)
    with pytest.raises(NotFoundError):
        desk.files.stat("job/file")
    writer.sync()
    assert desk.read("job/file") == b"1" * 9 * MIB
    writer.write_at(3, b"2" * 9 * MIB)
    assert desk.read("job/file") == b"1" * 9 * MIB
    writer.abort()
    assert desk.read("job/file") == b"1" * 9 * MIB
    assert desk.leftovers() == []


def test_a_truncate_that_fails_changes_nothing(desk: Desk) -> None:
    writer = desk.writing.open("job/file", policy=SMALL)
    content = os.urandom(9 * MIB)
    writer.write_at(0, content)
    writer.sync()
    desk.place.before = _away
    with pytest.raises(TransientError):
        writer.truncate(3 * MIB)
    desk.place.before = lambda step, path: None
    assert writer.read_at(0, 9 * MIB) == content
    writer.truncate(3 * MIB)
    assert writer.read_at(0, 9 * MIB) == content[: 3 * MIB]
    writer.commit()
    assert desk.read("job/file") == content[: 3 * MIB]


def _away(step: str, path: str) -> None:
    raise TransientError("the place is away")


def test_a_log_that_is_synced_after_each_line_resends_no_more_than_its_last_chunk(desk: Desk) -> None:
    writer = desk.writing.open("job/log", policy=SMALL)
    content = os.urandom(7 * MIB)
    writer.write_at(0, content)
    writer.sync()
    writer.write_at(len(content), b"first\n")
    writer.sync()
    content += b"first\n"
    sent: list[str] = []
    desk.place.before = lambda step, path: sent.append(path) if step == "write" else None
    for number in range(5):
        line = b"line %d\n" % number
        writer.write_at(len(content), line)
        content += line
        writer.sync()
        assert desk.read("job/log") == content
    assert len(sent) == 5
    writer.commit()
    assert desk.read("job/log") == content
    assert desk.leftovers() == []


def test_an_empty_file_is_created(desk: Desk) -> None:
    desk.writing.open("job/empty").commit()
    assert desk.read("job/empty") == b""


def test_a_file_replaces_another_and_its_parts(desk: Desk) -> None:
    for size in (9 * MIB, 100, 8 * MIB, 0):
        data = os.urandom(size)
        writer = desk.writing.open("job/file", policy=SMALL)
        writer.write_at(0, data)
        writer.commit()
        assert desk.read("job/file") == data
        assert desk.leftovers() == []


def test_aborting_leaves_nothing(desk: Desk) -> None:
    writer = desk.writing.open("job/file", policy=SMALL)
    writer.write_at(0, b"x" * 30 * MIB)
    writer.abort()
    writer.abort()
    assert desk.leftovers() == []
    assert desk.writing.facts() == {"files": 0, "spool_bytes": 0}
    with pytest.raises(PermanentError, match="after its end"):
        writer.write_at(0, b"x")


def test_an_error_of_the_place_is_raised_by_the_writer_and_keeps_the_visible_content(desk: Desk) -> None:
    writer = desk.writing.open("job/file", policy=SMALL)
    writer.write_at(0, b"old")
    writer.commit()

    def refuse(step: str, path: str) -> None:
        if step == "write":
            raise PermanentError("quota")

    desk.place.before = refuse
    writer = desk.writing.open("job/file", policy=SMALL)
    with pytest.raises(PermanentError, match="quota"):
        writer.write_at(0, b"x" * 9 * MIB)  # on a busy machine, this may raise it
        writer.commit()
    writer.abort()
    assert desk.read("job/file") == b"old"
    assert desk.leftovers() == []
    assert desk.writing.facts()["spool_bytes"] == 0


def test_a_head_that_cannot_be_written_now_can_be_written_by_the_next_sync(desk: Desk) -> None:
    def refuse(step: str, path: str) -> None:
        if step == "write_bytes":
            raise TransientError("not now")

    writer = desk.writing.open("job/file", policy=SMALL)
    writer.write_at(0, b"x" * 9 * MIB)
    desk.place.before = refuse
    with pytest.raises(TransientError, match="not now"):
        writer.sync()
    desk.place.before = lambda step, path: None
    writer.sync()
    assert desk.read("job/file") == b"x" * 9 * MIB
    writer.abort()
    assert desk.leftovers() == []


def test_a_part_that_fails_is_sent_again_from_the_spool(desk: Desk, restarts: Restarts) -> None:
    left = [5]

    def fail_sometimes(step: str, path: str) -> None:
        if step in ("write", "close") and left[0]:
            left[0] -= 1
            raise TransientError("a node died")

    desk.place.before = fail_sometimes
    data = os.urandom(17 * MIB + 3)
    writer = desk.writing.open("job/file", policy=SMALL)
    for offset in range(0, len(data), PIECE):
        writer.write_at(offset, data[offset : offset + PIECE])
    writer.commit()
    assert restarts() == 5
    assert desk.read("job/file") == data
    assert desk.leftovers() == []


def test_a_segment_that_does_not_grow_is_ended(tmp_path: Path) -> None:
    desk = Desk(tmp_path / "root", tmp_path / "spool", WritingSettings(idle_s=0.05))
    ended = threading.Event()
    desk.place.before = lambda step, path: ended.set() if step == "close" else None
    with contextlib.closing(desk.writing):
        writer = desk.writing.open("job/file", policy=SMALL)
        writer.write_at(0, b"x" * 3 * MIB)
        assert ended.wait(120)
        writer.write_at(3 * MIB, b"y" * 3 * MIB)
        writer.commit()
        assert desk.read("job/file") == b"x" * 3 * MIB + b"y" * 3 * MIB


def test_a_segment_is_ended_if_one_part_waits_for_data_even_if_others_get_some(tmp_path: Path) -> None:
    """Its DataNode would close the connection: in a slow stream with many stripes, each part rarely gets a chunk."""
    desk = Desk(tmp_path / "root", tmp_path / "spool", WritingSettings(idle_s=600.0))
    closed, until_s = threading.Event(), time.monotonic() + 120
    desk.place.before = lambda step, path: closed.set() if step == "close" else None
    with contextlib.closing(desk.writing):
        writer = desk.writing.open("job/file", policy=SMALL)
        writer.write_at(0, b"x" * 2 * MIB)
        while writer.sending.sent_bytes < 2 * MIB:
            assert time.monotonic() < until_s
            time.sleep(0.01)
        time.sleep(1.0)
        writer.write_at(2 * MIB, b"y" * MIB)
        writer.sending.seal_idle(0.5)
        assert closed.wait(120)
        writer.commit()
    assert desk.read("job/file") == b"x" * 2 * MIB + b"y" * MIB


def test_a_reader_and_a_writer_of_one_writer_do_not_disturb_each_other(desk: Desk) -> None:
    data = os.urandom(16 * MIB)
    writer = desk.writing.open("job/file", policy=SMALL)
    writer.write_at(0, data)
    writer.sync()
    wrong: list[int] = []
    over = threading.Event()

    def read() -> None:
        at = 0
        while not over.is_set():
            if writer.read_at(at, PIECE) != data[at : at + PIECE]:
                wrong.append(at)
            at = (at + 3 * PIECE) % len(data)

    reader = threading.Thread(target=read)
    reader.start()
    for offset in range(0, 12 * MIB, 3 * MIB):  # the same bytes again: each write reads a segment back
        writer.write_at(offset, data[offset : offset + PIECE])
        writer.sync()
    over.set()
    reader.join(60)
    assert not wrong
    writer.commit()
    assert desk.read("job/file") == data


def test_the_policy_of_the_folder_applies(desk: Desk) -> None:
    desk.files.set_policy("job", SMALL)
    writer = desk.writing.open("job/file")
    writer.write_at(0, b"x" * 4 * MIB)
    writer.commit()
    head = desk.files.head("job/file")
    assert head is not None and len(head.segments[0].parts) == 2
    desk.files.set_policy("job", Policy(stripes=1))
    writer = desk.writing.open("job/file")
    writer.write_at(0, b"x" * 20 * MIB)
    assert not writer.commit().is_striped
    assert desk.read("job/file") == b"x" * 20 * MIB
    assert desk.leftovers() == ["job/.stripes/policy.json"]


def _full_desk(tmp_path: Path, spool_bytes: int) -> Desk:
    return Desk(tmp_path / "root", tmp_path / "spool", WritingSettings(spool_bytes=spool_bytes))


def test_chunks_that_are_being_overwritten_are_not_sent_when_the_spool_is_full(tmp_path: Path) -> None:
    policy = Policy(stripes=4, part_bytes=4 * MIB, min_bytes_per_stripe=4 * MIB)
    desk = _full_desk(tmp_path, 9 * MIB)
    with contextlib.closing(desk.writing):
        writer = desk.writing.open("job/file", policy=policy)
        writer.write_at(0, b"o" * 8 * MIB)  # too little to be sent by itself
        writer.write_at(5 * MIB, b"n" * 5 * MIB)  # two chunks more than the spool has space for
        assert writer.read_at(0, 10 * MIB) == b"o" * 5 * MIB + b"n" * 5 * MIB
        writer.commit()
    assert desk.read("job/file") == b"o" * 5 * MIB + b"n" * 5 * MIB
    assert desk.writing.facts()["spool_bytes"] == 0


def test_a_file_that_is_published_whole_is_not_sent_meanwhile_to_free_space(tmp_path: Path) -> None:
    policy = Policy(stripes=4, part_bytes=8 * MIB, min_bytes_per_stripe=4 * MIB)
    desk = _full_desk(tmp_path, 9 * MIB)
    with contextlib.closing(desk.writing):
        writer = desk.writing.open("job/file", policy=policy)
        writer.write_at(0, b"x" * 7 * MIB)  # not striped at this length
        wait_idle = writer.sending.lane.wait_idle

        def send_and_wait(timeout_s: float) -> bool:
            writer.sending.flush_some()  # like another writer that waits for space
            return wait_idle(timeout_s)

        writer.sending.lane.wait_idle = send_and_wait  # type: ignore[method-assign]
        assert not writer.sync().is_striped
        assert desk.read("job/file") == b"x" * 7 * MIB
        writer.commit()
    assert desk.leftovers() == []
