"""The startups in the input: choosing one, preparing each for the analysis (clocks aligned, lanes and barriers built),
a one-line overview of each, and their share of the job's time.
"""

from __future__ import annotations

import math
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from bootseer.errors import UsageError
from bootseer.report import model
from bootseer.report.analysis.barriers import Barrier, barriers_of, last_arrivals
from bootseer.report.analysis.lanes import SCHEDULER, UNOBSERVED, Lane, align, began_of, lanes_of
from bootseer.report.analysis.spans import TRUNCATED, NodeSpans, Offset, Span, StartupSpans, apart, begin_of, offsets
from bootseer.report.analysis.stages import Piece, cut, time_by_stage
from bootseer.report.foreign.parser import FOREIGN, NODES, UNKNOWN_JOB
from bootseer.report.model import WAIT
from bootseer.trace.event import FAILED, NO_RANK, OK, Event
from bootseer.trace.identity import expand_hosts
from bootseer.units import S_PER_H, seconds

_SHORT_S = 0.01
_MAX_REPEATED = 1 << 19
"""Of a scheduler's events: 32 of a job of 16,384 nodes. A short line can name that many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of a report."""

    job: str | None = None
    attempt: int | None = None
    restart: int | None = None
    num_nodes: int | None = None
    """Number of nodes of the job, if the logs do not say."""
    gpus_per_node: int | None = None
    price_per_gpu_hour: float | None = None
    currency: str = "$"


@dataclass(slots=True)
class Prepared:
    """A startup on one clock, with its lanes and barriers.

    `clocks`: the offsets that were subtracted. `left_out`: nodes whose clocks are wrong by an unknown amount, and how
    far their events are from those of the others, ns.
    """

    startup: StartupSpans
    options: Options
    lanes: list[Lane]
    barriers: list[Barrier]
    clocks: Mapping[str, Offset]
    left_out: Mapping[str, int]
    begin_ns: int
    submitted_ns: int | None
    end_ns: int
    scheduler: Sequence[Span]
    """Queue and allocation, each as reported by the node that saw it longest."""
    gpus: Mapping[str, int | None]
    """By node; None if unknown."""
    arrivals: dict[int, int] = field(init=False)
    """By `id` of each span that waits at a barrier, when the last participant arrived."""
    began: bool = field(init=False)
    """Whether training began on any lane."""
    ranks: Counter[str] = field(init=False)
    """Number of ranks, by node."""
    _pieces: dict[int, list[Piece]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.arrivals = last_arrivals(self.barriers)
        self.began = any(lane.outcome == OK for lane in self.lanes)
        self.ranks = Counter(lane.node for lane in self.lanes if lane.rank != NO_RANK)

    def at(self, ns: float) -> float:
        """Seconds since the startup's zero."""
        return seconds(ns - self.begin_ns)

    def pieces_of(self, lane: Lane) -> list[Piece]:
        """The lane's time, cut once."""
        known = self._pieces.get(id(lane))
        if known is None:
            known = self._pieces[id(lane)] = cut(lane.spans, lane.begin_ns, lane.end_ns, self.arrivals)
        return known

    def cost(self, hours: float | None) -> float | None:
        """The price of GPU-hours; None if unknown."""
        price = self.options.price_per_gpu_hour
        return None if hours is None or price is None else hours * price

    def gpu_hours(self, length_ns: int, without: frozenset[str] = frozenset()) -> float | None:
        """GPU-hours of `length_ns` on all nodes but some; None if a node's GPUs are unknown."""
        count = total(count for node, count in self.gpus.items() if node not in without)
        return None if count is None else seconds(length_ns) * count / S_PER_H


def prepare(startup: StartupSpans, options: Options) -> Prepared:
    """Align the clocks of a startup's nodes, in place, and find which lanes waited for which."""
    clocks = offsets(startup.nodes)
    align(startup.nodes, clocks)
    left_out = apart(startup.nodes)
    for name in left_out:
        del startup.nodes[name], clocks[name]
    job_began = any(map(began_of, startup.nodes.values()))
    lanes = [lane for name in sorted(startup.nodes) for lane in lanes_of(startup.nodes[name], began=job_began)]
    scheduler = [s for node in startup.nodes.values() for s in node.spans if s.stage in SCHEDULER]
    first_ns = {lane.node: lane.begin_ns for lane in sorted(lanes, key=lambda lane: -lane.begin_ns)}
    for span in scheduler:
        if span.outcome == TRUNCATED:  # its end is not in the logs, but was before the node's first stage
            span.end_ns = max(min(span.end_ns, first_ns[span.node]), span.begin_ns)
    submitted = [span.begin_ns for span in scheduler if span.stage == "queue"]
    began = [lane.end_ns for lane in lanes if lane.outcome == OK]
    for lane in lanes if began else []:  # spans that a lost lane left open may last as long as the job
        lane.end_ns = max(min(lane.end_ns, max(began)), lane.begin_ns)
    begin = min([lane.begin_ns for lane in lanes] + [span.begin_ns for span in scheduler])
    end = max(began or [lane.end_ns for lane in lanes])
    longest = {span.stage: span for span in sorted(scheduler, key=lambda span: span.end_ns - span.begin_ns)}
    scheduler = [longest[stage] for stage in SCHEDULER if stage in longest]
    return Prepared(
        startup=startup,
        options=options,
        lanes=lanes,
        barriers=barriers_of(lanes),
        clocks=clocks,
        left_out=left_out,
        begin_ns=begin,
        submitted_ns=min(submitted, default=None),
        end_ns=max(end, begin),
        scheduler=scheduler,
        gpus={
            name: 0 if job_began and node.is_queued else _gpus_of(startup, name, options)
            for name, node in startup.nodes.items()
        },
    )


def with_replaced_nodes(found: Iterable[StartupSpans]) -> list[StartupSpans]:
    """Startups by the time of their first event. A node that joined later is moved to the restart that took place when
    it joined, or else to a new one, and its later restarts by the same number.

    A launcher's agent counts only the restarts that it has seen: on a node that joined later it begins at 0.
    """
    attempts: dict[tuple[str, int], dict[int, StartupSpans]] = defaultdict(dict)
    for startup in found:
        attempts[startup.key[:2]][startup.key.restart] = startup
    return sorted([startup for restarts in attempts.values() for startup in _moved(restarts)], key=_begin_of_most)


def _begin_of_most(startup: StartupSpans) -> float:
    """Not of the earliest: one clock may be wrong by years."""
    return median(map(begin_of, startup.nodes.values()))


def _moved(restarts: dict[int, StartupSpans]) -> list[StartupSpans]:
    """The starts of one attempt, by time, with each node in the one that it joined."""
    times = {id(node): _times_of(node) for startup in restarts.values() for node in startup.nodes.values()}

    def times_in(number: int, without: set[str]) -> list[tuple[int, int]]:
        return [times[id(node)] for name, node in restarts[number].nodes.items() if name not in without]

    numbers = sorted(restarts)
    for number in numbers:
        unmoved = set(late := _joined_later(restarts[number].nodes))  # they may not belong to later restarts, either
        for name in late:
            own, later = times[id(restarts[number].nodes[name])], [one for one in sorted(restarts) if one > number]
            met = next((one for one in later if _meet(times_in(one, unmoved), own)), None)
            _move(name, restarts, number, max(restarts) + 1 if met is None else met)
            unmoved.discard(name)
    found = sorted([startup for startup in restarts.values() if startup.nodes], key=_begin_of_most)
    if len(restarts) > len(numbers):  # the nodes of a new start count their own restarts from 0, too
        for startup, key in zip(found, sorted(startup.key for startup in found), strict=True):
            startup.key = key
    return found


def _move(name: str, restarts: dict[int, StartupSpans], begin: int, to: int) -> None:
    """Move a node from one restart to another, which may be new, and those after it by as many."""
    old = restarts[begin]
    restarts.setdefault(to, StartupSpans(old.key._replace(restart=to), old.kind, {}, old.run_attrs))
    for number in sorted(restarts, reverse=True):
        here, there = restarts[number].nodes, restarts.get(number + to - begin)
        if number >= begin and there is not None and name in here and name not in there.nodes:
            there.nodes[name] = here.pop(name)


def _joined_later(nodes: Mapping[str, NodeSpans]) -> list[str]:
    """Nodes that begin after all their ranks had begun to train on other nodes, or a second time while all others
    train."""
    began = {name: marks for name, node in nodes.items() if (marks := began_of(node))}
    first = dict(sorted((mark for marks in began.values() for mark in marks.items()), key=lambda mark: -mark[1]))
    first_ns = min(first.values(), default=math.inf)

    def is_late(name: str, node: NodeSpans) -> bool:
        if (begin_ns := begin_of(node)) <= first_ns:
            return False
        ranks = {span.rank for span in (*node.spans, *node.instants)} - {NO_RANK}
        others = [min(marks.values()) for other, marks in began.items() if other != name and node.num_runs > 1]
        both = [first.get(rank, begin_ns) for rank in ranks], others
        return any(known and max(known) < begin_ns for known in both)

    return [name for name, node in nodes.items() if is_late(name, node)]


def _times_of(node: NodeSpans) -> tuple[int, int]:
    """When a node's start began and ended."""
    return begin_of(node), min(began_of(node).values(), default=node.last_ns)


def _meet(others: Sequence[tuple[int, int]], own: tuple[int, int]) -> bool:
    """Whether a node started while the median of the other nodes did."""
    return bool(others) and median(one[0] for one in others) <= own[1] and own[0] <= median(one[1] for one in others)


def _gpus_of(startup: StartupSpans, node: str, options: Options) -> int | None:
    """GPUs of a node that the job uses."""
    value = startup.run_attrs.get(node, {}).get("gpus")
    if options.gpus_per_node is not None:
        return options.gpus_per_node
    return value if isinstance(value, int) and 0 <= value < 1 << 16 else None


def total(values: Iterable[int | None]) -> int | None:
    """The sum, or None if one of the values is unknown."""
    found = list(values)
    return None if None in found else sum(value or 0 for value in found)


def outcome_of(lanes: Sequence[Lane]) -> str:
    """How the startup ended, over all its lanes."""
    outcomes = {lane.outcome for lane in lanes}
    if OK in outcomes:
        return "training_began"
    return next((outcome for outcome in (FAILED, TRUNCATED) if outcome in outcomes), UNOBSERVED)


def of_one_job(events: Sequence[Event], options: Options) -> tuple[list[Event], int]:
    """The events of the chosen or only job; a scheduler's events are repeated for each of their nodes. Also the number
    of those that name more nodes than are repeated.

    Raises `UsageError` if the chosen job is not there, or if there are several jobs and none was chosen.
    """
    # The job of lines that name none is not a useful suggestion: it comes last.
    names = sorted({event.job for event in events}, key=lambda name: (name == UNKNOWN_JOB, name))
    shown = ", ".join(printable(name) for name in names[:10]) + (", ..." if len(names) > 10 else "")
    if options.job is not None and options.job not in names:
        raise UsageError(f"no job {options.job!r} in the input", hint=f"jobs in the input: {shown}")
    if options.job is None and len(names) > 1:
        hint = f"give the logs of one job; `bootseer report` can choose one: --job {printable(names[0])}"
        raise UsageError(f"{len(names)} jobs in the input: {shown}", hint=hint)
    job = options.job or names[0]
    found: list[Event] = []
    room, num_cut = _MAX_REPEATED, 0
    for event in events:
        if event.job != job:
            continue
        if FOREIGN not in event.attrs or not isinstance(event.attrs.get(NODES), str):
            found.append(event)
            continue
        nodes = expand_hosts(event.attrs[NODES]) if room else []
        num_cut += not nodes or len(nodes) > room
        found += [event._replace(node=node) for node in nodes[:room]]
        room -= min(len(nodes), room)
    return found, num_cut


def printable(name: str) -> str:
    """A job's name in a message: can be pasted into a shell, and has no control characters."""
    return shlex.quote(name) if name.isprintable() else repr(name)


def chosen(found: list[StartupSpans], options: Options) -> StartupSpans:
    """The chosen startup, by default the last. Raises `UsageError` if there is none."""
    fitting = [
        startup
        for startup in found
        if options.attempt in (None, startup.key.attempt) and options.restart in (None, startup.key.restart)
    ]
    if not fitting:
        there = sorted({(startup.key.attempt, startup.key.restart) for startup in found})
        names = ", ".join(f"{attempt}" + (f" restart {restart}" if restart else "") for attempt, restart in there[:10])
        more = ", ..." if len(there) > 10 else ""
        raise UsageError(f"no such attempt or restart of job {found[0].key.job!r}", hint=f"its attempts: {names}{more}")
    return fitting[-1]


def overview(ready: Prepared) -> model.Overview:
    """One startup in the list of startups."""
    return model.Overview(
        *ready.startup.key,
        kind=ready.startup.kind,
        begin_ns=ready.begin_ns,
        startup_s=seconds(ready.end_ns - ready.begin_ns),
        num_nodes=len(ready.startup.nodes),
        num_gpus=total(ready.gpus.values()),
        outcome=outcome_of(ready.lanes),
        stages=_stages(ready),
    )


def _stages(ready: Prepared) -> dict[str, float]:
    """Time of the critical chain by top-level stage: the work of each barrier's last lane since the barrier before."""
    took = {span.stage: seconds(span.end_ns - span.begin_ns) for span in ready.scheduler}
    cursor_ns = ready.begin_ns
    for barrier in ready.barriers:
        lane, at_ns = barrier.last.lane, barrier.last.at_ns
        for stage, length_ns in time_by_stage(ready.pieces_of(lane), cursor_ns, at_ns).items():
            name = stage.partition(".")[0]
            took[name] = took.get(name, 0.0) + seconds(length_ns)
        cursor_ns = max(cursor_ns, at_ns)
    rest = seconds(ready.end_ns - ready.begin_ns) - sum(took.values())
    return {**took, WAIT: rest} if rest > _SHORT_S else took


def share(found: Sequence[Prepared], overviews: Sequence[model.Overview]) -> model.Share | None:
    """Share of the job's wall time spent in startups; None if there is only one. Clocks must be aligned."""
    last_ns = max(node.last_ns for ready in found for node in ready.startup.nodes.values())
    wall_s = seconds(last_ns - min(overview.begin_ns for overview in overviews))
    startup_s = sum(overview.startup_s for overview in overviews)
    if len(overviews) < 2 or wall_s <= 0:
        return None
    gpus = [overview.num_gpus for overview in overviews]
    hours = None
    if all(count is not None for count in gpus):
        # In the queue a job has no GPUs.
        bound_s = (seconds(one.end_ns - min(lane.begin_ns for lane in one.lanes)) for one in found)
        hours = sum(length_s * (count or 0) for length_s, count in zip(bound_s, gpus, strict=True)) / S_PER_H
    return model.Share(len(overviews), startup_s, wall_s, min(startup_s / wall_s, 1.0), hours)
