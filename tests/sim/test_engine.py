"""Virtual time and links: bytes are conserved, no link exceeds its rate, time is monotonic, runs are reproducible."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.sim.engine import Engine

pytestmark = pytest.mark.hypothesis

RATES = st.lists(st.floats(1.0, 1e9), min_size=1, max_size=5)
FLOWS = st.lists(
    st.tuples(st.floats(0.0, 10.0), st.floats(1.0, 1e9), st.sets(st.integers(0, 4), min_size=1, max_size=3)),
    min_size=1,
    max_size=12,
)


def played(rates: list[float], flows: list[tuple[float, float, set[int]]], quantum_s: float) -> list[Any]:
    engine = Engine(quantum_s)
    links = [engine.link(rate) for rate in rates]
    ends: list[Any] = []
    expected = [0.0] * len(links)

    def look() -> None:
        assert not ends or engine.now >= ends[-1][1]
        for link in links:
            assert sum(flow.rate for flow in link.flows) <= link.bytes_per_s * (1 + 1e-9)
            assert link.carried <= link.bytes_per_s * engine.now * (1 + 1e-9) + 1e-6

    for number, (begin_s, num_bytes, ways) in enumerate(flows):
        way = sorted({at % len(links) for at in ways})
        for at in way:
            expected[at] += num_bytes

        def ended(number: int = number) -> None:
            look()
            ends.append((number, engine.now))

        def begin(way: list[int] = way, num_bytes: float = num_bytes, ended: Any = ended) -> None:
            engine.start([links[at] for at in way], num_bytes, ended)

        engine.at(begin_s, begin)
    engine.run()
    assert len(ends) == len(flows)
    for link, num_bytes in zip(links, expected, strict=True):
        assert link.carried == pytest.approx(num_bytes, rel=1e-6, abs=1e-2)
    return ends


@given(RATES, FLOWS, st.sampled_from([0.0, 0.01]))
def test_bytes_are_conserved_and_no_link_is_above_its_rate(
    rates: list[float], flows: list[tuple[float, float, set[int]]], quantum_s: float
) -> None:
    assert played(rates, flows, quantum_s) == played(rates, flows, quantum_s)


def test_what_a_narrow_link_leaves_is_for_the_others() -> None:
    engine = Engine()
    wide, narrow = engine.link(100.0), engine.link(10.0)
    ends: dict[str, float] = {}
    engine.start([wide, narrow], 10.0, lambda: ends.setdefault("a", engine.now))
    engine.start([wide], 90.0, lambda: ends.setdefault("b", engine.now))
    engine.run()
    assert ends == {"a": pytest.approx(1.0), "b": pytest.approx(1.0)}


def test_a_flow_that_is_stopped_leaves_its_room() -> None:
    engine = Engine()
    link = engine.link(10.0)
    ends: list[float] = []
    stopped = engine.start([link], 1000.0, lambda: ends.append(-1.0))
    engine.start([link], 10.0, lambda: ends.append(engine.now))
    engine.at(1.0, lambda: engine.stop(stopped))
    engine.run()
    assert ends == [pytest.approx(1.5)]
    assert link.carried == pytest.approx(15.0)
