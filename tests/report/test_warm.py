"""Programs that started warm, from `warm_start` events to lines."""

from __future__ import annotations

from bootseer.report.analysis.spans import startups
from bootseer.report.analysis.starts import warm_lines
from bootseer.trace.event import Event


def _lines(*launchers: tuple[str, int, int]) -> list[str]:
    """The lines for launchers: node, pid, and number of programs; each warm parent imports for 1.5 s."""
    events = [
        Event(10**9, 10**9, "moe", node, "warm_start", "instant", f"{node}{pid}{rank}", pid=pid, attrs={"saved_s": 1.5})
        for node, pid, num in launchers
        for rank in range(num)
    ]
    (startup,) = startups(events)
    return warm_lines(startup)


def test_the_imports_of_the_warm_parents_are_not_saved() -> None:
    assert _lines(("n0", 7, 4), ("n1", 7, 4)) == ["8 Python programs started warm: 9.00 s of CPU time saved"]
    assert _lines(("n0", 7, 1)) == ["1 Python program started warm"]
    assert _lines(("n0", 7, 1), ("n0", 8, 1)) == ["2 Python programs started warm"]
