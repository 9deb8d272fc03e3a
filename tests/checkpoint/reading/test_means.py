from __future__ import annotations

import threading

from bootseer.checkpoint.reading.settings import ReadingSettings
from checkpoint.faulty_place import GOOD, NEVER
from checkpoint.striped_files import content_of, put_striped

MIB = 1 << 20


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


def test_a_chunk_that_another_reader_does_not_bring_is_read_after_a_while(empty, reading_of):
    content = content_of(4 * MIB)
    put_striped(empty, "file", content)
    first = reading_of().open("file")
    second = reading_of(settings=ReadingSettings(claim_s=0.1)).open("file")
    empty.decide = lambda _: NEVER
    first.read_async(0, 10, lambda _: None)
    empty.decide = lambda _: GOOD
    assert second.read(0, 10) == content[:10]
    empty.decide = lambda _: GOOD
