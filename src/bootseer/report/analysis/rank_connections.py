"""How the ranks connected: lines for the report, from the hook's events about stores, process groups and settings."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any, Final

from bootseer.report.analysis.spans import Span, StartupSpans
from bootseer.units import format_seconds, plural

_SLOW_S: Final = 1.0
_SLOW_NAME_S: Final = 0.25
_MANY: Final = 64
"""With fewer ranks their number does not matter."""
_MORE_FILES: Final = 1000
_MOST_GROUPS: Final = 5


def connection_lines(startup: StartupSpans) -> list[str]:
    """Slow connections with their causes, and settings that are known to be slow for this number of ranks."""
    connected = startup.marks("ranks_connected")
    ranks = max((_number(mark.attrs.get("world_size")) for mark in startup.marks("rank_known")), default=0)
    first = next((mark.attrs for mark in connected if mark.rank == 0), {})
    lines = [*_stores(startup), *_groups(connected)]
    keys = _number(first.get("keys"))
    if lines and keys:
        lines.append(f"{plural(int(keys), 'key')} in the store after the first collective")
    return lines + list(_settings(startup, int(ranks), first))


def _stores(startup: StartupSpans) -> Iterator[str]:
    stores = startup.marks("store_connected")
    slowest = max(stores, key=_seconds, default=None)
    if slowest is None or _seconds(slowest) < _SLOW_S:
        return
    late = sum(_seconds(mark) >= _SLOW_S for mark in stores)
    took = format_seconds(_seconds(slowest))
    line = f"connecting to the store took {took} on {_rank_name(slowest)}, more than 1 s on {late} of {len(stores)}"
    name = max(startup.marks("reverse_dns"), key=_seconds, default=None)
    if name is not None and _seconds(name) >= _SLOW_NAME_S:
        line += (
            f": reverse DNS took {format_seconds(_seconds(name))} for {name.attrs.get('address')};"
            " `bootseer run --peers` gives the job the names of its nodes"
        )
    yield line


def _groups(connected: Sequence[Span]) -> Iterator[str]:
    """Creating a group is a barrier: all ranks wait for the last one, which itself waits least."""
    waits = [(_number(mark.attrs.get("groups_s")), mark) for mark in connected]
    if not waits or max(waits, key=_wait)[0] < _SLOW_S:
        return
    number = max(int(_number(mark.attrs.get("groups"))) for mark in connected)
    if number > 1:
        yield f"creating {plural(number, 'process group')} after the first took {_longest_and_last(waits)}"
    first = next((mark for mark in connected if mark.rank == 0), connected[0])
    names, keys = str(first.attrs.get("group_names") or "").split("\n"), _numbers(first, "group_keys")
    each: dict[int, list[tuple[float, Span]]] = {}
    for mark in connected:
        # All ranks create the same groups in the same order, as PyTorch demands.
        for place, wait_ms in enumerate(_numbers(mark, "group_ms")):
            each.setdefault(place, []).append((wait_ms / 1000, mark))
    slowest = sorted(each, key=lambda place: -max(each[place], key=_wait)[0])
    for place in slowest[:_MOST_GROUPS]:
        if max(each[place], key=_wait)[0] >= _SLOW_S:
            name = (names[place] if place < len(names) else "") or f"number {place + 1}"
            line = f"process group {name}: {_longest_and_last(each[place])}"
            known = keys[place] if place < len(keys) else 0
            yield f"{line}; {plural(known, 'key')} in the store then" if known else line


def _longest_and_last(waits: Sequence[tuple[float, Span]]) -> str:
    """The longest wait, and the rank for which the others waited."""
    (longest_s, waiting), (shortest_s, last) = max(waits, key=_wait), min(waits, key=_wait)
    line = f"{format_seconds(longest_s)} on {_rank_name(waiting)}"
    if shortest_s < longest_s / 4:
        line += f"; {_rank_name(last)} came last, and waited {format_seconds(shortest_s)}"
    return line


def _settings(startup: StartupSpans, ranks: int, first: dict[str, Any]) -> Iterator[str]:
    versions = (
        str(span.attrs.get("version") or "")
        for node in startup.nodes.values()
        for span in node.spans
        if span.stage == "model_initialization.import_torch"
    )
    torch = min(filter(None, map(_version, versions)), default=None)
    if ranks >= _MANY and torch is not None and torch < (2, 4):
        yield f"torch {torch[0]}.{torch[1]}: rendezvous and store are slow for {ranks} ranks before 2.4"
    elif ranks >= _MANY and first.get("libuv") is False:
        yield f"USE_LIBUV=0: the store's old server is slow for {ranks} ranks"
    nccl = _version(str(first.get("nccl") or ""))
    if ranks >= _MANY and nccl is not None and nccl < (2, 23):
        yield f"NCCL {nccl[0]}.{nccl[1]}: communicators of {ranks} ranks come up slowly before 2.23"
    backlog, files = int(_number(first.get("somaxconn"))), int(_number(first.get("open_files")))
    if 0 < backlog < ranks:
        yield f"net.core.somaxconn is {backlog} on rank 0's node, but {ranks} ranks connect at once"
    if ranks >= _MANY and 0 < files < ranks + _MORE_FILES:
        yield f"rank 0 may open {files} files (ulimit -n), but its store needs a connection for each of {ranks} ranks"


def _version(text: str) -> tuple[int, int] | None:
    found = re.match(r"(\d{1,4})\.(\d{1,4})", text)
    return (int(found[1]), int(found[2])) if found is not None else None


def _rank_name(mark: Span) -> str:
    return f"{mark.node} rank {mark.rank}" if mark.rank >= 0 else mark.node


def _seconds(mark: Span) -> float:
    return _number(mark.attrs.get("seconds"))


def _wait(one: tuple[float, Span]) -> float:
    return one[0]


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0 else 0.0


def _numbers(mark: Span, name: str) -> list[int]:
    """Numbers separated by spaces; those before the first wrong one."""
    words = str(mark.attrs.get(name) or "").split()
    return [int(word) for word in takewhile(lambda word: re.fullmatch(r"[0-9]{1,9}", word), words)]
