from __future__ import annotations

import threading
import time
from pathlib import Path

from bootseer.checkpoint.reading.settings import ReadingSettings
from bootseer.errors import TransientError
from checkpoint.faulty_place import GOOD, NEVER
from checkpoint.striped_files import content_of, put_striped

MIB = 1 << 20


def num_descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


def test_two_readers_of_a_node_read_each_chunk_once(empty, reading_of):
    content = content_of(24 * MIB)
    put_striped(empty, "file", content)
    files = [reading_of().open("file") for _ in range(2)]
    empty.log.clear()
    empty.decide = lambda _: 0.02
    memories = [bytearray(len(content)) for _ in files]
    threads = [
        threading.Thread(target=file.readinto, args=(0, memory)) for file, memory in zip(files, memories, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(memory == content for memory in memories)
    assert len({(read.path, read.offset) for read in empty.log}) == len(empty.log) == 24


def test_open_files_share_a_bounded_number_of_descriptors(empty, reading_of):
    content = content_of(12 * MIB)
    reading = reading_of(settings=ReadingSettings(max_descriptors=20))
    before, files = num_descriptors(), []
    for number in range(4):
        put_striped(empty, f"file{number}", content, stripes=2, segment_rows=1)  # segments of up to 3 + 2 descriptors
        files.append(reading.open(f"file{number}"))
        assert files[-1].read(0, len(content)) == content
    for _ in range(1000):  # the node cache is written in the background
        if num_descriptors() <= before + 30:
            break
        time.sleep(0.01)
    assert num_descriptors() <= before + 30
    assert files[0].read(MIB, 10) == content[MIB : MIB + 10]


def test_a_chunk_that_another_reader_does_not_deliver_is_read_after_a_while(empty, reading_of):
    content = content_of(4 * MIB)
    put_striped(empty, "file", content)
    first = reading_of().open("file")
    second = reading_of(settings=ReadingSettings(claim_s=0.1)).open("file")
    empty.decide = lambda _: NEVER
    first.read_async(0, 10, lambda _: None)
    empty.decide = lambda _: GOOD
    assert second.read(0, 10) == content[:10]
    empty.decide = lambda _: GOOD


def test_a_chunk_that_another_reader_fetches_is_read_here_too_if_no_thread_can_wait_for_it(
    empty, reading_of, monkeypatch
):
    content = content_of(4 * MIB)
    put_striped(empty, "file", content)
    first, reading = reading_of().open("file"), reading_of()
    second = reading.open("file")

    def refuse(delay_s, call):
        raise TransientError("no thread can be started")

    monkeypatch.setattr(reading._engine.timer, "after", refuse)
    empty.decide = lambda _: NEVER
    first.read_async(0, 10, lambda _: None)
    empty.decide = lambda _: GOOD
    assert second.read(0, 10) == content[:10]
