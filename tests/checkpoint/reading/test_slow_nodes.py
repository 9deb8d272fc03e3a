"""The effect of one slow or hung DataNode, in virtual time: the same on every machine."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from bootseer.checkpoint.reading.buffer import ChunkBuffer
from bootseer.checkpoint.reading.context import SegmentPool
from bootseer.checkpoint.reading.reading import OrdinarySource, StripedSource
from bootseer.checkpoint.reading.settings import ReadingSettings
from bootseer.checkpoint.reading.transfer import Counters, Gather, Transfer
from bootseer.places.folder import FolderPlace
from checkpoint.striped_files import content_of, put_striped
from hdfs.virtual import MIB, Links, rate

pytestmark = pytest.mark.slow

LINK = 45.2
"""MiB/s of 400 Mbit/s."""
NODES = ["a:1", "b:1", "c:1", "d:1", "e:1"]


class AtOnce:
    """In place of `Executor`."""

    def submit(self, job):
        job()


class Clock:
    """In place of `Timer`."""

    def __init__(self, links):
        self.after = links.after
        self.now_s = lambda: links.now_s


class LinkedPlace:
    """In place of a `Place`: the parts of a file, each on the DataNode of its stripe, except those of the stripe
    `lost`, which are missing. `datas`: a cache of their content."""

    def __init__(self, folder, links, datas, lost):
        self._folder, self._links, self._datas, self._lost = folder, links, datas, lost
        self._files = {}

    def open(self, path):
        if path not in self._files:
            if path not in self._datas:
                self._datas[path] = self._folder.read_bytes(path, 1 << 30)
            data = self._datas[path]
            stripe = int(path.rpartition("-")[2])
            self._files[path] = self._links.store(path, [(data, [NODES[stripe]] if stripe != self._lost else [])])
        return self._files[path]

    def delay_s(self, nodes, length):
        return 0.0


class Striping:
    """A striped file of 4 + 1 parts on five DataNodes, in the order of `NODES`: the last has the parity."""

    def __init__(self, tmp_path, size_bytes, *, parity=True, segment_rows=64):
        self.content = content_of(size_bytes)
        self._folder = FolderPlace(tmp_path)
        self._datas = {}
        self._head = put_striped(self._folder, "file", self.content, parity=parity, segment_rows=segment_rows)

    def open(self, rates, *, lost=None):
        links, facts, settings = Links(dict(zip(NODES, rates, strict=True))), Counters(), ReadingSettings()
        clock = Clock(links)
        place = LinkedPlace(self._folder, links, self._datas, lost)
        engine = SimpleNamespace(
            place=place, workers=AtOnce(), cache=None, cache_writer=None, peers=None, segments=SegmentPool(64),
            settings=settings, facts=facts, timer=clock,
            buffer=ChunkBuffer(settings.memory_bytes, settings.idle_s, clock, facts),
        )  # fmt: skip
        source = StripedSource("file", self._head, "", engine)
        for part in source.acquire(0).parts:
            part.when_open(lambda file, error: None)
        return Reader(self.content, links, source, settings)


class Reader:
    """Reads a file in virtual time. A new one has no measurements of the nodes yet."""

    def __init__(self, content, links, source, settings):
        self._content = content
        self._memory = bytearray(len(content))
        self.links = links
        self._source = source
        self._settings = settings

    def read(self):
        """Read and check the whole file; returns the rate in MiB/s."""
        return rate(len(self._content), self.read_part(0, len(self._content)))

    def read_part(self, start, end, on_begin=lambda: None):
        """Read and check a range; returns the seconds. `on_begin` is called when the read has begun."""
        self._memory[:] = bytes(len(self._memory))
        memory, ends = memoryview(self._memory)[: end - start], []
        wants = [(at, memory[at - start : at - start + MIB]) for at in range(start, end, MIB)]
        settings = self._settings
        gather = Gather(ends.append)
        transfer = Transfer(
            self._source,
            wants,
            gather,
            max_bytes=settings.direct_bytes if self._source.whole_units else settings.direct_ordinary_bytes,
            max_lane_bytes=settings.direct_lane_bytes,
        )
        gather.begin(transfer)
        gather.ended()
        on_begin()
        seconds = self.links.run(lambda: bool(ends))
        assert ends == [None]
        assert self._memory.startswith(self._content[start:end])  # comparing a memoryview takes 60 times as long
        return seconds


@pytest.fixture(scope="module")
def striping(tmp_path_factory):
    return Striping(tmp_path_factory.mktemp("parity"), 128 * MIB)


@pytest.mark.parametrize("sick", [0, 2, 4])
@pytest.mark.parametrize("part", [0.0, 0.1, 0.5])
def test_one_slow_node_delays_a_file_with_parity_little_even_in_the_first_read(striping, sick, part):
    """The parts on the other four are sufficient for the whole file: 4 x 45.2 MiB/s."""
    reader = striping.open([LINK * part if number == sick else LINK for number in range(5)])
    first, second = reader.read(), reader.read()
    assert first > 0.93 * 4 * LINK
    assert second > 0.96 * 4 * LINK


def test_with_healthy_nodes_all_are_used_also_that_of_the_parity(striping):
    reader = striping.open([LINK] * 5)
    assert reader.read() > 1.05 * 4 * LINK
    served = reader.links.served
    assert sum(served.values()) < 1.05 * 128 * MIB, "little is read twice"
    assert served["e:1"] > 10 * MIB


def test_a_node_that_becomes_slow_is_noticed_and_one_that_recovers_is_used_again(striping):
    reader = striping.open([LINK] * 5)
    reader.read()
    reader.links.rates["b:1"] = LINK / 10
    assert reader.read() > 0.9 * 4 * LINK
    assert reader.read() > 0.96 * 4 * LINK
    reader.links.rates["b:1"] = LINK
    reader.links.now_s += 60.0
    assert reader.read() > 4 * LINK


def test_lost_parts_do_not_delay_reads_of_a_file_with_parity(tmp_path):
    """With links so fast that 50 ms for each segment would be most of the time."""
    striping = Striping(tmp_path, 64 * MIB, segment_rows=2)
    reader = striping.open([10 * LINK] * 5, lost=1)
    assert reader.read() > 0.8 * 4 * 10 * LINK


@pytest.mark.parametrize("begun_s", [0.0, 0.01])
def test_a_hung_node_that_is_read_for_a_rebuild_is_not_waited_for(striping, begun_s):
    """The first chunk of the row is not requested, but read to rebuild the second one with parity."""
    reader = striping.open([LINK, LINK / 50, LINK, LINK, LINK])
    reader.read()

    def hang():
        begun = reader.links.now_s
        reader.links.run(lambda: reader.links.now_s >= begun + begun_s)
        reader.links.rates["a:1"] = 0.0

    assert reader.read_part(MIB, 2 * MIB, hang) < 3.0


def test_reads_of_single_chunks_wait_for_a_hung_node_only_until_it_is_excluded(striping):
    reader = striping.open([0.0, LINK, LINK, LINK, LINK])
    seconds = [reader.read_part(row * 4 * MIB, (row * 4 + 1) * MIB) for row in range(8)]
    assert max(seconds[2:]) < 0.05


PAIRS = list(itertools.combinations(NODES[:4], 2))


def ordinary(rates, nodes_of_blocks):
    """A file of blocks of 4 MiB."""
    links = Links(dict(zip(NODES, rates, strict=False)))
    block = content_of(4 * MIB)
    file = links.store("/f", [(block, nodes) for nodes in nodes_of_blocks])
    settings = ReadingSettings()
    return Reader(
        block * len(nodes_of_blocks),
        links,
        OrdinarySource(file, SimpleNamespace(settings=settings, facts=Counters())),
        settings,
    )


@pytest.mark.parametrize(("part", "least"), [(1.0, 0.9), (0.1, 0.88), (0.0, 0.88)])
def test_the_healthy_nodes_of_an_ordinary_file_with_two_copies_are_all_busy(part, least):
    reader = ordinary([LINK * part, LINK, LINK, LINK], PAIRS * 3)
    allowed = (3 + part) * LINK
    assert reader.read() > least * allowed
    assert reader.read() > least * allowed


def test_an_ordinary_file_with_one_copy_is_read_at_the_rate_that_its_placement_allows():
    names = [NODES[int(digit)] for digit in "001023013021000312"]
    reader = ordinary([LINK] * 4, [[name] for name in names])
    most = max(names.count(name) for name in NODES)
    assert reader.read() > 0.97 * LINK * len(names) / most
