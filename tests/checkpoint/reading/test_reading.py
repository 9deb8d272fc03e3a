from __future__ import annotations

import random
import threading
from itertools import accumulate

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bootseer.cache.cache import Cache
from bootseer.checkpoint.layout import CHUNK_BYTES
from bootseer.checkpoint.read_ahead import ReadAheadSettings
from bootseer.checkpoint.reading.reading import Reading
from bootseer.checkpoint.reading.settings import ReadingSettings
from bootseer.errors import BootseerError, CorruptError, PermanentError, TransientError
from bootseer.places.folder import FolderPlace
from checkpoint.faulty_place import ERROR, GOOD, NEVER, WRONG, FaultyPlace
from checkpoint.striped_files import content_of, part_paths, put_striped

MIB = 1 << 20
SIZE = 21 * MIB + 4321
QUICK = ReadingSettings(memory_bytes=8 * MIB, direct_bytes=4 * MIB, direct_min_bytes=2 * MIB, late_s=0.05, claim_s=0.2)


class Made:
    """The same content in three kinds of files, and the heads of the striped ones."""

    def __init__(self, folder):
        self.place = FolderPlace(folder)
        self.content = content_of(SIZE)
        self.place.write_bytes("plain", self.content)
        self.heads = {
            "striped": put_striped(self.place, "striped", self.content, stripes=3, segment_rows=2),
            "parity": put_striped(self.place, "parity", self.content, stripes=4, parity=True, segment_rows=3),
        }


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return Made(tmp_path_factory.mktemp("place"))


@pytest.fixture
def content(made):
    return made.content


@pytest.fixture
def place(made):
    return FaultyPlace(made.place)


@pytest.fixture
def reading(place):
    reading = Reading(place, settings=QUICK)
    yield reading
    reading.close()


def read_async(file, offset, length):
    answers, over = [], threading.Event()

    def done(answer):
        # Like the mount: the bytes are copied now, and the buffer is not kept.
        answers.append(answer if isinstance(answer, BootseerError) else bytes(answer))
        over.set()

    file.read_async(offset, length, done)
    assert over.wait(120)
    return answers[0]


def in_time(call):
    """A list with the error of a call, or None; an empty list if the call does not end."""
    ended = []

    def run():
        try:
            call()
        except BootseerError as error:
            ended.append(error)
        else:
            ended.append(None)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(120)
    return ended


def asked(place, path=""):
    return [read for read in place.log if path in read.path]


# --- correct content ---


@pytest.mark.parametrize("name", ["plain", "striped", "parity"])
def test_a_whole_file_is_read_into_the_callers_memory(reading, content, name):
    file = reading.open(name)
    memory = bytearray(SIZE + 10)
    assert file.readinto(0, memory) == SIZE
    assert memory[:SIZE] == content
    assert file.size_bytes == SIZE


RANGE = st.tuples(
    st.integers(0, SIZE + MIB), st.sampled_from([0, 1, 511, 4096, 131072, MIB, MIB + 1, 3 * MIB, 9 * MIB])
)
FAULTS = st.dictionaries(st.integers(0, 60), st.sampled_from([WRONG, ERROR, 0.01, 0.15]), max_size=12)


@pytest.mark.parametrize("name", ["plain", "striped", "parity"])
@given(
    ranges=st.lists(RANGE, min_size=1, max_size=12),
    faults=FAULTS,
    how=st.sampled_from(["read", "readinto", "ranges", "async"]),
    cached=st.booleans(),
)
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_every_byte_is_right_or_there_is_an_error(tmp_path_factory, made, name, ranges, faults, how, cached):
    if name == "plain":  # wrong bytes of an ordinary file are detected by the place
        faults = {number: ERROR if what == WRONG else what for number, what in faults.items()}
    number = iter(range(1 << 30))
    content = made.content
    faulty = FaultyPlace(made.place)
    cache = Cache(tmp_path_factory.mktemp("cache")) if cached else None
    reading = Reading(faulty, cache=cache, settings=QUICK)
    file = reading.open(name)
    faulty.decide = lambda _: faults.get(next(number), GOOD)
    wanted = [(offset, min(length, max(SIZE - offset, 0))) for offset, length in ranges]
    try:
        if how == "ranges":
            ends = [0, *accumulate((offset + length for offset, length in sorted(wanted)), max)]
            apart = [one for one, end in zip(sorted(wanted), ends, strict=False) if one[0] >= end]
            memory = [(offset, bytearray(length)) for offset, length in reversed(apart) if length]
            file.read_ranges(memory)
            assert [bytes(got) for _, got in memory] == [content[at : at + len(got)] for at, got in memory]
        for offset, length in wanted if how != "ranges" else ():
            if how == "readinto":
                got = bytearray(length)
                assert file.readinto(offset, got) == length
            elif how == "read":
                got = file.read(offset, length)
            else:
                got = read_async(file, offset, length)
                if isinstance(got, BootseerError):
                    raise got
            assert got == content[offset : offset + length]
    except BootseerError:
        assert faults, "nothing was wrong"
    finally:
        reading.close()
    beyond = 4 * MIB if name == "parity" else 0  # for rebuilding one row
    assert reading.facts()["most_memory_bytes"] <= QUICK.memory_bytes + beyond
    assert reading.facts()["memory_bytes"] == 0


def test_reads_at_the_end_are_cut_and_reads_beyond_it_are_empty(reading, content):
    file = reading.open("striped")
    assert file.read(SIZE - 10, 100) == content[-10:]
    assert file.read(SIZE, 100) == b""
    assert read_async(file, SIZE + MIB, 5) == b""
    with pytest.raises(PermanentError, match="no 5 bytes at -1"):
        file.read(-1, 5)
    with pytest.raises(PermanentError, match="of a file of"):
        file.read_ranges([(SIZE - 1, bytearray(2))])


@pytest.mark.parametrize("name", ["plain", "striped"])
def test_nothing_is_read_for_empty_ranges(place, reading, content, name):
    file, got = reading.open(name), bytearray(10)
    file.read_ranges([(5, got), (5, bytearray()), (9, bytearray()), (SIZE, bytearray())])
    assert got == content[5:15]
    place.log.clear()
    file.read_ranges([(0, bytearray()), (3 * MIB + 1, bytearray()), (SIZE, bytearray())])
    assert not place.log


def test_ranges_that_overlap_are_refused(reading):
    with pytest.raises(PermanentError, match=f"bytes {MIB} to {3 * MIB} after {2 * MIB}"):
        reading.open("plain").read_ranges([(MIB, bytearray(2 * MIB)), (0, bytearray(2 * MIB))])


def test_a_large_read_has_a_bounded_number_of_bytes_under_way(place, reading):
    reading.open("striped").readinto(0, bytearray(SIZE))
    assert place.most_under_way <= QUICK.direct_bytes
    assert sum(read.length for read in asked(place, ".stripes")) == SIZE


def test_chunks_with_a_digest_are_read_without_the_places_checksums(place, reading):
    reading.open("striped").readinto(0, bytearray(SIZE))
    reading.open("plain").readinto(0, bytearray(SIZE))
    assert {read.check for read in asked(place, ".stripes")} == {False}
    assert {read.check for read in asked(place, "plain")} == {True}


def test_sequential_readers_find_the_next_bytes_in_memory(place, reading, content):
    file = reading.open("striped")
    for at in range(0, 6 * MIB, 128 << 10):
        assert file.read(at, 128 << 10) == content[at : at + (128 << 10)]
    parts = asked(place, ".stripes")
    assert not all(read.urgent for read in parts)
    assert len({(read.path, read.offset) for read in parts}) == len(parts), "a chunk was read twice"


@pytest.mark.parametrize(("name", "reaches"), [("plain", True), ("striped", False)])
def test_ordinary_files_are_read_ahead_up_to_half_of_the_memory(place, content, name, reaches):
    """Their long blocks are on one disk after the other, unlike those of striped files."""
    settings = ReadingSettings(memory_bytes=32 * MIB, ahead=ReadAheadSettings(first_bytes=MIB, max_bytes=2 * MIB))
    reading = Reading(place, settings=settings)
    place.log.clear()
    with reading.open(name) as file:
        for at in range(0, 8 * MIB, MIB // 2):
            file.read(at, MIB // 2)
    reading.close()
    ends = [read.offset + read.length for read in place.log if name in read.path or ".stripes" in read.path]
    farthest = max(ends) * (1 if name == "plain" else 4)
    assert (farthest >= 15 * MIB) == reaches


def test_random_reads_of_an_ordinary_file_cause_no_read_ahead(place, reading):
    file = reading.open("plain")
    place.log.clear()
    for at in (15 * MIB + 7, 3 * MIB, 20 * MIB):
        file.read(at, 1000)
    assert sum(read.length for read in place.log) == 3000


def test_handles_of_one_version_share_the_read_ahead(place, reading):
    one, two = reading.open("striped"), reading.open("striped")
    one.read(0, 100)
    two.read(0, 100)
    one.close()
    assert two.read(5, 100)
    parts = asked(place, ".stripes")
    assert len({(read.path, read.offset) for read in parts}) == len(parts)


def test_memory_is_empty_when_all_is_closed(reading):
    file = reading.open("striped")
    file.read(0, 100)
    file.close()
    file.close()
    reading.close()
    assert reading.facts()["memory_bytes"] == 0
    with pytest.raises(PermanentError, match="closed"):
        file.read(0, 1)
    with pytest.raises(PermanentError, match="closed"):
        reading.open("plain")


# --- faults ---


def test_wrong_bytes_on_one_node_are_read_from_another(place, reading, content):
    place.nodes_of = lambda path: ("bad:1", "good:1") if ".stripes" in path else ()
    place.decide = lambda read: WRONG if read.node == "bad:1" else GOOD
    memory = bytearray(SIZE)
    reading.open("striped").readinto(0, memory)
    assert memory == content
    facts = reading.facts()
    # The node is tried again, with the place's own checksums.
    assert facts["wrong_chunks"] == 2 * -(-SIZE // CHUNK_BYTES)
    assert {read.check for read in place.log if read.node == "bad:1"} == {False, True}


def test_wrong_bytes_everywhere_are_an_error_that_names_file_chunk_part_and_nodes(place, reading, made):
    part = part_paths("striped", made.heads["striped"])[1]
    place.nodes_of = lambda path: ("a:1", "b:1")
    place.decide = lambda read: WRONG if read.path == part else GOOD
    file = reading.open("striped")
    with pytest.raises(CorruptError, match=rf"striped: bytes {MIB} to {2 * MIB} \(chunk 1, part {part}\).* a:1, b:1"):
        file.read(MIB + 5, 10)
    with pytest.raises(CorruptError):
        file.readinto(0, bytearray(SIZE))
    assert file.read(0, 10)


def test_a_failed_chunk_is_tried_again_by_the_next_reader(place, reading, content):
    file = reading.open("striped")
    place.decide = lambda _: ERROR
    with pytest.raises(TransientError, match="cannot be read now"):
        file.read(0, 10)
    place.decide = lambda _: GOOD
    assert file.read(0, 10) == content[:10]


@pytest.mark.parametrize("what", [WRONG, ERROR, NEVER])
@pytest.mark.parametrize("number", range(5))
def test_parity_replaces_any_single_part(place, reading, content, made, what, number):
    bad = part_paths("parity", made.heads["parity"])[number]
    place.decide = lambda read: what if read.path == bad else GOOD
    file = reading.open("parity")
    memory = bytearray(12 * MIB)
    file.readinto(0, memory)
    assert memory == content[: 12 * MIB]
    # On a busy machine, chunks of healthy parts may be late as well, and parity be read for them too.
    data = part_paths("parity", made.heads["parity"])[:4]
    healthy = [(read.path, read.offset) for read in asked(place, ".stripes") if read.path in data and read.path != bad]
    assert len(set(healthy)) == len(healthy), "a healthy part was read twice"
    assert reading.facts()["rebuilt"] >= (0 if number == 4 else 3)
    assert file.read(12 * MIB - 1000, 1000) == content[12 * MIB - 1000 : 12 * MIB]


def test_two_bad_parts_of_a_row_are_an_error(place, reading, made):
    bad = part_paths("parity", made.heads["parity"])[:2]
    place.decide = lambda read: WRONG if read.path in bad else GOOD
    file = reading.open("parity")
    with pytest.raises(CorruptError, match="cannot be rebuilt from the others of its row"):
        file.readinto(0, bytearray(SIZE))
    with pytest.raises(CorruptError):
        file.read(0, 10)


def test_wrong_bytes_in_the_parity_part_too_are_an_error(place, reading, made):
    paths = part_paths("parity", made.heads["parity"])
    place.decide = lambda read: WRONG if read.path in (paths[0], paths[4]) else GOOD
    with pytest.raises(CorruptError, match="the parity part has wrong bytes"):
        reading.open("parity").read(0, 10)


def test_a_part_that_is_expected_late_is_not_read_at_all(place, content, made):
    reading = Reading(place)
    slow = part_paths("parity", made.heads["parity"])[2]
    place.delay_of = lambda path: 30.0 if path == slow else 0.0
    file = reading.open("parity")
    file.read(0, 1)  # only open parts have estimates
    file.read(2 * MIB, 1)
    place.log.clear()
    memory = bytearray(8 * MIB)
    file.readinto(4 * MIB, memory)
    assert memory == content[4 * MIB : 12 * MIB]
    assert not asked(place, slow)
    reading.close()


@pytest.mark.parametrize("what", [WRONG, ERROR, NEVER])
def test_a_slow_part_is_read_if_another_one_of_its_row_fails(place, reading, content, made, what):
    paths = part_paths("parity", made.heads["parity"])
    place.delay_of = lambda path: 30.0 if path == paths[0] else 0.0
    file = reading.open("parity")
    file.read(0, 1)
    place.decide = lambda read: what if read.path == paths[1] else GOOD
    memory = bytearray(8 * MIB)
    file.readinto(4 * MIB, memory)
    assert memory == content[4 * MIB : 12 * MIB]


def test_parity_that_is_late_is_not_waited_for(place, reading, content, made):
    paths = part_paths("parity", made.heads["parity"])
    # Its estimate is too low.
    place.delay_of = lambda path: 0.3 if path in paths[:4] else 0.0
    place.decide = lambda read: NEVER if read.path in paths[4::5] else GOOD
    file = reading.open("parity")
    assert file.read(0, 4 * MIB) == content[: 4 * MIB]
    memory = bytearray(SIZE)
    file.readinto(0, memory)
    assert memory == content
    assert reading.facts()["rebuilt"] == 0


def test_a_single_chunk_of_a_part_that_never_answers_is_rebuilt(place, reading, content, made):
    bad = part_paths("parity", made.heads["parity"])[1]
    place.decide = lambda read: NEVER if read.path == bad else GOOD
    assert reading.open("parity").read(5 * MIB + 7, 100) == content[5 * MIB + 7 : 5 * MIB + 107]


@pytest.mark.parametrize("large", [False, True])
def test_chunks_are_rebuilt_even_when_all_memory_is_held_by_such_chunks(place, reading, content, made, large):
    bad = part_paths("parity", made.heads["parity"])[::5]  # the first of each segment
    place.decide = lambda read: ERROR if read.path in bad else GOOD
    file = reading.open("parity")
    chunks = range(0, 6 * 4 * MIB, 4 * MIB)
    if large:
        memory = [bytearray(MIB) for _ in chunks]
        ended = in_time(lambda: file.read_ranges(list(zip(chunks, memory, strict=True))))
    else:
        memory = [b""] * len(chunks)
        over = threading.Semaphore(0)

        def answered(number, answer):
            memory[number] = bytes(answer)
            over.release()

        def read_all():
            for number, at in enumerate(chunks):
                file.read_async(at, MIB, lambda answer, number=number: answered(number, answer))
            for _ in chunks:
                assert over.acquire(timeout=180)

        ended = in_time(read_all)
    assert ended == [None]
    assert all(bytes(data) == content[at : at + MIB] for at, data in zip(chunks, memory, strict=True))


def test_a_read_that_fails_does_not_wait_for_chunks_that_it_never_began(place, made):
    paths = part_paths("parity", made.heads["parity"])
    settings = ReadingSettings(memory_bytes=8 * MIB, direct_bytes=4 * MIB, direct_min_bytes=2 * MIB, late_s=60.0)
    reading = Reading(place, settings=settings)
    waits = threading.Event()

    def decide(read):
        number, row = paths.index(read.path), read.offset // MIB
        if number == 4 and row == 1:
            waits.set()  # the chunk 0 of row 1 is to be rebuilt, and needs chunk 1, which comes after that of row 0
        if number == 3 and row == 0:
            assert waits.wait(120)
        if (number, row) in ((0, 1), (2, 0), (3, 0)):
            return ERROR
        return NEVER if number == 1 else GOOD

    file = reading.open("parity")
    place.decide = lambda read: decide(read) if read.path in paths else GOOD
    (error,) = in_time(lambda: file.readinto(0, bytearray(12 * MIB)))
    assert isinstance(error, TransientError)
    reading.close()


def test_a_part_of_the_wrong_length_is_an_error(place, reading, made):
    part = part_paths("striped", made.heads["striped"])[0]
    place.size_of = lambda path, size: size - 1 if path == part else size
    with pytest.raises(CorruptError, match="instead of"):
        reading.open("striped").read(0, 10)


def test_reads_wait_for_memory_and_all_are_answered(place, reading, content):
    place.decide = lambda _: 0.2
    file = reading.open("striped")
    answers = {}
    over = threading.Semaphore(0)

    def answered(at, answer):
        answers[at] = bytes(answer)
        over.release()

    for at in range(0, 20 * MIB, MIB):
        file.read_async(at, MIB, lambda answer, at=at: answered(at, answer))
    for _ in range(20):
        assert over.acquire(timeout=180)
    assert all(answers[at] == content[at : at + MIB] for at in range(0, 20 * MIB, MIB))
    assert reading.facts()["waited_for_room"] > 0
    assert reading.facts()["most_memory_bytes"] <= QUICK.memory_bytes


def test_many_threads_read_one_file_in_any_order(reading, content):
    file = reading.open("striped")
    wrong = []

    def work(seed):
        rng = random.Random(seed)
        for _ in range(20):
            at, length = rng.randrange(SIZE), rng.choice([100, 5000, MIB, 3 * MIB])
            if file.read(at, length) != content[at : at + length]:
                wrong.append((at, length))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong
