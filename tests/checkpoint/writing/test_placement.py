from __future__ import annotations

import random
import threading
from collections import Counter, defaultdict

from hypothesis import given
from hypothesis import strategies as st

from bootseer.checkpoint.layout import Policy
from bootseer.checkpoint.writing.lane import NodeLoad
from checkpoint.striped_files import in_memory

from .conftest import MIB, Desk


@given(st.integers(1, 6), st.integers(0, 1), st.integers(1, 12), st.integers(0, 2**32))
def test_with_at_most_one_node_more_than_parts_all_are_filled_evenly(
    parts: int, more: int, segments: int, seed: int
) -> None:
    nodes = [f"node{number}:1" for number in range(parts + more)]
    source = random.Random(seed)
    use, lie = NodeLoad(), Counter(dict.fromkeys(nodes, 0))
    for _ in range(segments):
        spare = use.most_loaded(parts)
        chosen = [node for node in nodes if node not in spare]
        source.shuffle(chosen)
        chosen = [*chosen, *spare][:parts]
        use.add(chosen)
        lie.update(chosen)
    assert max(lie.values()) - min(lie.values()) <= 1


def test_a_node_on_which_a_part_failed_does_not_count() -> None:
    use = NodeLoad()
    use.add(["a", "b", "b", "c"])
    use.remove(["b"])
    use.add(["c"])
    assert use.most_loaded(2) == ["c"]
    assert use.most_loaded(1) == ["a", "c"]
    assert use.most_loaded(3) == []


def test_a_segment_begins_when_the_nodes_of_the_previous_one_are_known(desk: Desk) -> None:
    begin = desk.place.begin_parts
    spared: list[set[str]] = []
    lock = threading.Lock()

    def begin_parts(paths, **options):  # type: ignore[no-untyped-def]
        with lock:
            spared.append(set(options["last_resort"]))
        return begin(paths, **options)

    desk.place.begin_parts = begin_parts  # type: ignore[method-assign]
    both_begun: defaultdict[str, threading.Barrier] = defaultdict(lambda: threading.Barrier(2, timeout=60.0))
    seen: Counter[str] = Counter()

    def before(step: str, path: str) -> None:
        with lock:
            seen[path] += step == "write"
            barrier = both_begun[path.rpartition("/")[2].split(".")[0]] if step == "write" and seen[path] == 2 else None
        if barrier is not None:
            barrier.wait()

    desk.place.before = before
    # Part number n of each segment is on node n.
    desk.place.nodes_of = lambda path: (f"node{path.rpartition('/')[2].split('.')[1]}:1",)
    policy = Policy(stripes=2, part_bytes=2 * MIB, min_bytes_per_stripe=MIB)
    desk.writing.write_file("job/file", *in_memory(bytes(12 * MIB)), policy=policy)
    assert [len(nodes) for nodes in spared] == [0, 1, 1]
