"""How the ranks connected: lines for the report, from the hook's events about stores, process groups and settings."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

from bootseer.report.analysis.spans import Span, StartupSpans
from bootseer.units import format_seconds, plural

_SLOW_S: Final = 1.0
_SLOW_NAME_S: Final = 0.25
_MANY: Final = 64
"""With fewer ranks their number does not matter."""
_MORE_FILES: Final = 1000


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
    most, least = max(connected, key=_waited, default=None), min(connected, key=_waited, default=None)
    if most is None or least is None or _waited(most) < _SLOW_S:
        return
    number = int(_number(most.attrs.get("groups")))
    took = format_seconds(_waited(most))
    line = f"creating {plural(number, 'process group')} after the first took {took} on {_rank_name(most)}"
    if _waited(least) < _waited(most) / 4:
        line += f"; {_rank_name(least)} arrived last, and waited {format_seconds(_waited(least))}"
    yield line
    slowest = max(connected, key=lambda mark: _number(mark.attrs.get("slowest_s")))
    seconds = _number(slowest.attrs.get("slowest_s"))
    yield f"the slowest group: {slowest.attrs.get('slowest')}, {format_seconds(seconds)} on {_rank_name(slowest)}"


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


def _waited(mark: Span) -> float:
    return _number(mark.attrs.get("groups_s"))


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0 else 0.0
