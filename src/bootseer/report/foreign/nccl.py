"""NCCL and RCCL at `NCCL_DEBUG=INFO`: how long each communicator took to come up.

    node-0:1800:1822 [0] NCCL INFO ncclCommInitRankConfig comm 0x55 rank 0 nranks 8 ... commId 0x5c - Init START
    node-0:1800:1822 [0] NCCL INFO ncclCommInitRankConfig comm 0x55 rank 0 nranks 8 ... commId 0x5c - Init COMPLETE
    node-0:1800:1822 [0] NCCL INFO Init timings - ncclCommInitRankConfig: rank 0 nranks 8 total 1.16 (kernels 0.18, ...)

Older versions print no timings, or print them without the function's name (`Init timings: rank 0`); before 2.17 there
is no `Init START` either. INFO lines have no times by default. With the times of a log collector the communicator
becomes a span, otherwise a fact with its duration, or with the number of its ranks.

Ranks in these lines are those of the communicator. They count as ranks of the job if the communicator is as large as
the largest one in the file; the process then has this rank in smaller communicators, too. Processes write to one pipe
without locks, so lines may be interleaved: each piece after a `host:pid:tid` is read separately.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from bootseer.report.foreign.parser import MAX_RANK, Findings, Line, Parser, Place, plain
from bootseer.report.foreign.times import parse_duration
from bootseer.report.search import Clue
from bootseer.trace.event import NO_RANK
from bootseer.units import format_seconds, plural, seconds

STAGE = "model_initialization.nccl_init"

_INFO = " NCCL INFO "
_ORIGIN = re.compile(r"([A-Za-z0-9][\w.-]{0,252}):(\d{1,9}):\d{1,9}(?: \[-?\d{1,4}\])?$", re.ASCII)
_MAX_ORIGIN = 300
_MARK = re.compile(
    r"comm (0x[0-9a-fA-F]{1,16}) rank (\d{1,8}) nranks (\d{1,8}) [^\n]{0,400}?- ?Init (START|COMPLETE)", re.ASCII
)
_TIMINGS = re.compile(
    r"Init timings(?: - \w{1,64})?: rank (\d{1,8}) nranks (\d{1,8}) total (\d{1,9}\.\d{1,9})(?: \(([^()\n]{0,400})\))?",
    re.ASCII,
)
_PART = re.compile(r"([a-z]{1,24}) (\d{1,9}\.\d{1,9})", re.ASCII)


@dataclass(slots=True)
class _Communicator:
    """One rank's part in the making of one communicator."""

    line: Line
    host: str
    pid: int
    comm_rank: int
    size: int
    begin_ns: int | None = None
    end_ns: int | None = None
    total_ns: int | None = None
    parts: str = ""
    """What is in the parentheses behind the total."""
    complete: bool = False


class NcclParser(Parser):
    """The communicators in one log."""

    name = "nccl"
    # Contained in all three kinds of line in every version, and in no line of the steady state.
    clues = (
        Clue(
            b"Init ",
            rb"(?:START|COMPLETE)(?:(?<=-Init START)|(?<=- Init START)|(?<=-Init COMPLETE)|(?<=- Init COMPLETE))",
        ),
        Clue(b"Init timings", rb"(?: - \w{1,64})?: rank \d{1,8} nranks \d{1,8} total \d"),
    )

    def __init__(self) -> None:
        self._communicators: list[_Communicator] = []
        self._open: dict[tuple[str, int, str], _Communicator] = {}
        self._untimed: dict[tuple[str, int, int, int], _Communicator] = {}

    def feed(self, line: Line) -> None:
        before, *pieces = plain(line.text).split(_INFO)
        for piece in pieces:
            if origin := _ORIGIN.search(before[-_MAX_ORIGIN:]):
                self._piece(line, origin[1].partition(".")[0], int(origin[2]), piece)
            before = piece

    def _piece(self, line: Line, host: str, pid: int, piece: str) -> None:
        if mark := _MARK.match(piece, piece.find("comm 0x")):
            if not int(mark[2]) < int(mark[3]) <= MAX_RANK:
                return
            key = (host, pid, mark[1])
            if mark[4] == "START":
                self._open[key] = begun = self._new(line, host, pid, int(mark[2]), int(mark[3]))
                begun.begin_ns = line.wall_ns
                return
            done = self._open.pop(key, None) or self._new(line, host, pid, int(mark[2]), int(mark[3]))
            done.end_ns, done.complete = line.wall_ns, True
            self._untimed[(host, pid, done.comm_rank, done.size)] = done
        elif timings := _TIMINGS.match(piece):
            self._timings(line, host, pid, timings)

    def _timings(self, line: Line, host: str, pid: int, timings: re.Match[str]) -> None:
        total_ns = parse_duration(timings[3] + "s")
        comm_rank, size = int(timings[1]), int(timings[2])
        if total_ns is None or not comm_rank < size <= MAX_RANK:
            return
        done = self._untimed.pop((host, pid, comm_rank, size), None)
        if done is None:
            done = self._new(line, host, pid, comm_rank, size)
            done.end_ns, done.complete = line.wall_ns, True
        done.total_ns = total_ns
        done.parts = timings[4] or ""

    def _new(self, line: Line, host: str, pid: int, comm_rank: int, size: int) -> _Communicator:
        self._communicators.append(_Communicator(line, host, pid, comm_rank, size))
        return self._communicators[-1]

    def finish(self) -> Findings:
        found = Findings(self.name)
        world = max((comm.size for comm in self._communicators), default=0)
        ranks = {(comm.host, comm.pid): comm.comm_rank for comm in self._communicators if comm.size == world}
        without_timings: dict[int, list[_Communicator]] = {}
        for comm in self._communicators:
            attrs = {"comm_rank": comm.comm_rank, "comm_size": comm.size}
            begin_ns = comm.begin_ns
            if comm.total_ns is not None and comm.end_ns is not None:
                begin_ns = comm.end_ns - comm.total_ns
            place = Place(comm.host, rank=ranks.get((comm.host, comm.pid), NO_RANK), pid=comm.pid)
            spanned = (comm.end_ns is not None or not comm.complete) and found.span(
                comm.line, STAGE, begin_ns, comm.end_ns, place=place, attrs=attrs
            )
            if not spanned and comm.total_ns is not None:
                found.fact(comm.line, STAGE, _described(comm), comm.total_ns, node=comm.host)
            elif not spanned and comm.complete:
                without_timings.setdefault(comm.size, []).append(comm)
        for size, comms in without_timings.items():
            text = f"NCCL communicator of {size}: {plural(len(comms), 'rank')} complete, without timings"
            found.fact(comms[0].line, STAGE, text, None, node=comms[0].host)
        return found


def _described(comm: _Communicator) -> str:
    text = f"NCCL communicator of {comm.size}, rank {comm.comm_rank}"
    parts = ((part[1], parse_duration(part[2] + "s")) for part in _PART.finditer(comm.parts))
    durations = ", ".join(f"{word} {format_seconds(seconds(ns))}" for word, ns in parts if ns)
    return f"{text}: {durations}" if durations else text
