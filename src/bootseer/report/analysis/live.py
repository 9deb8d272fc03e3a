"""A running start: which barrier the nodes wait at, which nodes are missing there, and in which stage they are.

Each event is processed once, when it arrives. The age of a stage is the difference between the reader's clock and the
node's wall clock.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from bootseer.report.analysis.lanes import ENDINGS, FIRST_STEP, SCHEDULER, TRAINING_BEGAN
from bootseer.report.analysis.spans import RUN, count_of
from bootseer.report.model import plain
from bootseer.trace.event import BEGIN, END, INSTANT, NO_RANK, OK, STACK, Event
from bootseer.units import format_seconds, seconds

SCHEMA = "bootseer.follow/1"
_SHOWN = 4
_MAX_AGE_S = 7 * 86400
"""If a stage seems to have lasted longer, a clock is wrong."""


@dataclass(frozen=True, slots=True)
class Missing:
    """A node, or one of its ranks, that others wait for."""

    node: str
    rank: int
    stage: str
    """Its current stage; `ended with exit code N` once its command has ended, empty if unknown."""
    seconds: float | None
    pid: int = 0
    """The process that reported the stage; 0 if none did."""
    stack: str = ""
    """Its stack in this stage, innermost frame first, if the service asked for it."""
    restart: int = 0
    """As its launcher counts, which begins at 0 on a node that joined later."""

    def __str__(self) -> str:
        since = "" if self.seconds is None else f", {format_seconds(self.seconds)}"
        return f"{self.node}{f' rank {self.rank}' * (self.rank != NO_RANK)} ({self.stage or 'no stage yet'}{since})"


@dataclass(frozen=True, slots=True)
class Moment:
    """The state of a start at one moment."""

    job: str
    attempt: int
    restart: int
    nodes_heard: int
    nodes_expected: int | None
    barrier: str
    """The barrier where most nodes wait, `training_began` once some are done; empty if no node waits."""
    unit: str
    """What is counted: `nodes`, or the `ranks` of a single node."""
    arrived: int
    expected: int
    missing: list[Missing]
    """The missing ones that have sent events, longest in their stage first."""
    over: bool
    """Training began, or the command ended, on all nodes."""

    def to_json(self) -> dict[str, Any]:
        """Plain dicts and lists, ready for `json.dump`."""
        return {"schema": SCHEMA, **plain(self)}

    def timeless(self) -> Moment:
        """The same without durations: equal as long as nothing happens."""
        return replace(self, missing=[replace(one, seconds=None) for one in self.missing])

    def text(self) -> str:
        """The same as a line of text."""
        if not self.job:
            return "no node seen yet"
        where = f"at {self.barrier}" if self.barrier else "seen"
        where = "began training" if self.barrier == TRAINING_BEGAN else where
        parts = [f"{self.arrived:,} of {self.expected:,} {self.unit} {where}"]
        parts += [str(one) for one in self.missing[:_SHOWN]]
        if len(self.missing) > _SHOWN:
            stages = Counter(one.stage or "no stage yet" for one in self.missing[_SHOWN:])
            counts = ", ".join(
                f"{count:,} {stage if ' ' in stage else f'in {stage}'}" for stage, count in stages.most_common(3)
            )
            parts.append(f"{len(self.missing) - _SHOWN:,} more: {counts}")
        unheard = self.expected - self.arrived - len(self.missing) if self.barrier else self.expected - self.arrived
        parts += [f"{unheard:,} not seen"] * (unheard > 0)
        word = "missing: " if self.barrier else "slowest: "
        return parts[0] + (f"; {word}{', '.join(parts[1:])}" if len(parts) > 1 else "")


@dataclass(slots=True)
class _Lane:
    """One rank, or what a node does for all its ranks."""

    open: dict[str, Event] = field(default_factory=dict)
    last: Event | None = None
    visits: Counter[str] = field(default_factory=Counter)
    """Number of visits to each barrier."""
    reached: set[str] = field(default_factory=set)
    waits: dict[str, str] = field(default_factory=dict)
    """The barriers at which it is waiting, by span."""
    began: bool = False


class Live:
    """Follows the newest startup of one job: `feed` it with events, then get the `moment`."""

    def __init__(self, job: str | None, attempt: int | None, num_nodes: int | None) -> None:
        self.job = job
        self._wanted = attempt
        self._num_nodes = num_nodes
        self._attempt = self._restart = -1
        self._reset()

    def _reset(self) -> None:
        self._lanes: dict[tuple[str, int], _Lane] = defaultdict(_Lane)
        self._opened: dict[str, int] = {}
        """When the first lane left each barrier, ns."""
        self._exits: dict[tuple[str, int], Event] = {}
        self._nodes: dict[str, None] = {}
        self._stated = self._world = 0
        self._stacks: dict[tuple[int, str, str, str], str] = {}
        self._restarted_ns = 0
        self._before: dict[str, int] = {}
        """By node that joined or ran again later: the restarts before, which its launcher does not count."""

    def feed(self, events: Iterable[Event]) -> None:
        """Process the events written since the last call, in any order."""
        for event in sorted(events, key=lambda event: event.wall_ns):
            self.job = self.job or event.job
            if event.job != self.job or self._wanted not in (None, event.attempt) or event.attempt < self._attempt:
                continue
            if event.attempt > self._attempt:
                self._attempt, self._restart = event.attempt, event.restart
                self._reset()
            if event.stage == STACK:
                of = event.attrs
                stack = str(of.get("stack") or f"no stack: {of.get('why_not')}")
                restart = event.restart + self._before.get(event.node, 0)
                self._stacks[restart, event.node, str(of.get("of_rank")), str(of.get("in_stage"))] = stack
            else:
                self._take(event)

    def _take(self, event: Event) -> None:
        is_new = event.node not in self._nodes
        self._nodes[event.node] = None
        is_again = event.stage == RUN and event.phase == BEGIN and not is_new
        if is_again or (is_new and event.wall_ns > self._restarted_ns):
            self._before[event.node] = max(self._restart - event.restart, 0)
        event = event._replace(restart=event.restart + self._before.get(event.node, 0))
        self._stated = max(self._stated, count_of(event.attrs.get("num_nodes")))
        self._world = max(self._world, count_of(event.attrs.get("world_size")))
        key = (event.node, event.rank)
        if event.stage == RUN:
            if event.phase != BEGIN:
                self._exits[key] = event
            elif is_again:  # another run with the same attempt number
                for known in [k for k in self._lanes if k[0] == event.node and event.rank in (NO_RANK, k[1])]:
                    del self._lanes[known]
                self._exits.pop(key, None)
            return
        if event.restart > self._restart:  # the launcher has restarted its processes
            self._restart, self._restarted_ns = event.restart, event.wall_ns
            self._lanes.clear()
            self._opened.clear()
        is_other = event.stage in (*SCHEDULER, *ENDINGS) or event.attrs.get("background")
        if event.restart < self._restart or is_other:
            return
        lane = self._lanes[key]
        if event.phase != INSTANT:
            lane.last = event
        if event.phase == BEGIN:
            lane.open[event.span] = event
            if isinstance(barrier := event.attrs.get("barrier"), str):
                count = lane.visits[barrier]
                lane.visits[barrier] += 1
                lane.waits[event.span] = f"{barrier}#{count}" if count else barrier
                lane.reached.add(lane.waits[event.span])
        elif event.phase == END:
            lane.open.pop(event.span, None)
            barrier = lane.waits.pop(event.span, "")
            if barrier and event.outcome == OK:
                self._opened.setdefault(barrier, event.wall_ns)
        lane.began |= event.stage == TRAINING_BEGAN or (
            event.stage == FIRST_STEP and event.phase == END and event.outcome == OK
        )

    def moment(self, now_ns: int) -> Moment:
        """The state at this Unix time, ns."""
        by_node: dict[str, dict[int, _Lane]] = {node: {} for node in self._nodes}
        for (node, rank), lane in self._lanes.items():
            by_node[node][rank] = lane
        expected = max(self._num_nodes or self._stated, 0) or None
        started = {node: lanes for node, lanes in by_node.items() if lanes}
        trained = all(any(lane.began for lane in lanes.values()) for lanes in started.values())
        if self._restart and started and (len(started) >= expected if expected else trained):
            by_node = started  # the others have been replaced, or have left an elastic job
        of_ranks = max(expected or 0, len(by_node)) == 1 and any(rank != NO_RANK for _, rank in self._lanes)
        barrier, missing, count, over = self._barrier(), [], 0, True
        for node, lanes in by_node.items():
            own = lanes.pop(NO_RANK, _Lane())  # a launcher waits at its barrier for all ranks of the node
            for unit in [{rank: lanes[rank]} for rank in sorted(lanes)] if of_ranks else [lanes]:
                count += 1
                here = {r: one for r, one in unit.items() if not _arrived(one, barrier)}
                if not _arrived(own, barrier) and (here or not unit):
                    missing.append(self._missing(node, here, own, now_ns))
                began = own.began or (bool(unit) and all(one.began for one in unit.values()))
                over &= began or all(self._exit(node, rank) for rank in unit or (NO_RANK,))
        whole = max(count, (self._world if of_ranks else expected) or 0)
        missing.sort(key=lambda one: -(one.seconds or 0.0))
        return Moment(
            job=self.job or "" if count else "",
            attempt=max(self._attempt, 0),
            restart=max(self._restart, 0),
            nodes_heard=len(by_node),
            nodes_expected=expected,
            barrier=barrier,
            unit="ranks" if of_ranks else "nodes",
            arrived=count - len(missing) if barrier else count,
            expected=whole,
            missing=missing,
            over=over and count >= whole > 0,
        )

    def _exit(self, node: str, rank: int) -> Event | None:
        return self._exits.get((node, rank)) or self._exits.get((node, NO_RANK))

    def _barrier(self) -> str:
        if any(lane.began for lane in self._lanes.values()):
            return TRAINING_BEGAN
        waiting = Counter(name for lane in self._lanes.values() for name in lane.waits.values())
        shut = [(count, name) for name, count in waiting.items() if name not in self._opened]
        return max(shut)[1] if shut else ""

    def _missing(self, node: str, late: dict[int, _Lane], own: _Lane, now_ns: int) -> Missing:
        ended = self._exit(node, min(late, default=NO_RANK))
        if ended is not None:
            return Missing(
                node, NO_RANK, f"ended with exit code {ended.attrs.get('exit_code', '?')}", _since(ended, now_ns)
            )
        # The stages of its ranks are more informative than those of the node around them.
        lanes = [(rank, one) for rank, one in late.items() if one.last] or [(NO_RANK, own)]
        inside = [(self._current(one), rank) for rank, one in lanes if one.open]
        if inside:
            event, rank = min(inside, key=lambda found: _begin(found[0]))
            stack = self._stacks.get((self._restart, node, str(rank), event.stage), "")
            own_restart = self._restart - self._before.get(node, 0)
            return Missing(node, rank, event.stage, _since(event, now_ns), event.pid, stack, own_restart)
        rank, lane = lanes[0]
        if lane.last is None:
            return Missing(node, rank, "", None)
        return Missing(node, rank, f"after {lane.last.stage}", _since(lane.last, now_ns))

    def _current(self, lane: _Lane) -> Event:
        """The innermost running stage. At a barrier that has opened it counts from then on: before, the lane waited."""
        event = max(lane.open.values(), key=_begin)
        opened_ns = self._opened.get(lane.waits.get(event.span, ""), 0)
        return event._replace(wall_ns=max(event.wall_ns, opened_ns))


def _begin(event: Event) -> tuple[int, str]:
    return event.wall_ns, event.stage


def _arrived(lane: _Lane, barrier: str) -> bool:
    return lane.began if barrier == TRAINING_BEGAN else barrier in lane.reached


def _since(event: Event, now_ns: int) -> float | None:
    elapsed = seconds(max(now_ns - event.wall_ns, 0))
    return elapsed if elapsed < _MAX_AGE_S else None
