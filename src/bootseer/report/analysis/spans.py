"""From events to spans, grouped by startup and on one clock.

Events arrive in any order, twice, or not at all. This module drops duplicates, separates the startups (job, attempt,
restart), puts each event on its node's own time line and pairs begins with ends. A span without an end is closed at the
last event of its node and marked as truncated.

Why clocks can be aligned at all: NTP is often off by more than the differences that matter here, and no messages
between nodes are recorded. But a barrier is an event that all participants observe at the same true time: they leave it
together. So the differences of the times at which nodes say they left it are the differences of their clocks, plus the
time that a release takes to reach them. The median over several barriers reduces that second part, and the shortest
stay at a barrier bounds it: the last participant did not wait, so all of its stay was release. Durations need none of
this, because they come from each node's monotonic clock.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, NamedTuple

from bootseer.report.foreign.times import plausible
from bootseer.trace.event import ALIVE, BEGIN, END, FAILED, INSTANT, NO_RANK, OK, Event

TRUNCATED = "truncated"
RUN = "run"
COMMAND = "command"
STRUCTURE = (RUN, COMMAND)
LAUNCHER = "model_initialization.launcher"
LAUNCHER_RENDEZVOUS = "model_initialization.launcher_rendezvous"
PROCESS_STAGES = (
    "model_initialization.interpreter",
    "model_initialization.import_torch",
    "model_initialization.import_jax",
)

_NEW_BOOT_NS = 3600 * 10**9
"""Wall minus monotonic time that differs by more than this within one node means another boot, not a stepped clock."""
_STEP_NS = 100_000_000
"""A wall clock that moved this much against the monotonic clock was stepped, not slewed."""
_APART_NS = 3600 * 10**9
"""Nodes of one startup whose events lie further apart than this were not there together: a clock is wrong."""
_FLOOR_NS = 1_000_000
"""No estimate from user-space barriers is better than a millisecond."""


class Key(NamedTuple):
    """Identity of one startup."""

    job: str
    attempt: int
    restart: int


@dataclass(slots=True)
class Span:
    """A stage on one node or rank. Times are ns on the node's own time line (wall clock without its steps)."""

    stage: str
    node: str
    rank: int
    pid: int
    begin_ns: int
    end_ns: int
    outcome: str
    attrs: dict[str, Any]

    @property
    def barrier(self) -> str:
        """Name of the synchronisation point that this span waits at, or empty."""
        value = self.attrs.get("barrier", "")
        return value if isinstance(value, str) else ""

    @property
    def background(self) -> bool:
        """Runs in the background of the startup and is not summed."""
        return bool(self.attrs.get("background"))


@dataclass(slots=True)
class NodeSpans:
    """All spans and instants of one node in one startup."""

    node: str
    spans: list[Span] = field(default_factory=list)
    instants: list[Span] = field(default_factory=list)
    last_ns: int = 0
    clock_stepped: bool = False
    num_runs: int = 0
    """More than one: the attempt number was reused, and only the last run is reported."""
    restarted: bool = False
    """Its processes were replaced by those of a later restart."""
    structure: list[Span] = field(default_factory=list)
    """`run` and `command` to their real end, which may be after a later restart."""

    @property
    def is_queued(self) -> bool:
        """Whether all that is known of it is that it waits for the scheduler, as a pod that has no machine yet."""
        return not self.instants and {(span.stage, span.outcome) for span in self.spans} == {("queue", TRUNCATED)}


@dataclass(slots=True)
class StartupSpans:
    """One startup, node by node."""

    key: Key
    kind: str
    nodes: dict[str, NodeSpans]
    run_attrs: dict[str, dict[str, Any]]
    """Attributes of the `run` span, by node; a restart inherits those of its attempt."""

    def marks(self, stage: str) -> list[Span]:
        """The instants of a stage, in the order of the nodes' names."""
        return [mark for _, node in sorted(self.nodes.items()) for mark in node.instants if mark.stage == stage]


def unique(events: Iterable[Event]) -> tuple[list[Event], int]:
    """The events without repetitions (a log collected twice), and how many were dropped."""
    kept: dict[tuple[object, ...], Event] = {}
    count = 0
    for event in events:
        count += 1
        identity = (event.span, event.phase, event.node, event.stage, event.job, event.attempt, event.mono_ns)
        kept.setdefault(identity, event)
    return list(kept.values()), count - len(kept)


def startups(events: Iterable[Event]) -> list[StartupSpans]:
    """The startups in the events, in any order."""
    grouped: dict[Key, dict[str, list[Event]]] = defaultdict(lambda: defaultdict(list))
    for event in events:
        grouped[Key(event.job, event.attempt, event.restart)][event.node].append(event)
    for key in [key for key in grouped if key.restart]:  # those of earlier runs of the attempt are no later restarts
        runs = grouped.get(key._replace(restart=0), {})
        kept = {name: _last_run(node_events, runs.get(name, ()))[0] for name, node_events in grouped.pop(key).items()}
        if any(kept.values()):
            grouped[key] = {name: node_events for name, node_events in kept.items() if node_events}
    later = _first_of_later_restarts(grouped)
    found = []
    for key, by_node in grouped.items():
        kinds = Counter(event.kind for node_events in by_node.values() for event in node_events)
        nodes = {node: _node(node, node_events, later[key].get(node)) for node, node_events in by_node.items()}
        runs_of = {name: [span for span in node.spans if span.stage == RUN] for name, node in nodes.items()}
        attrs = {name: _run_attrs(own) for name, own in runs_of.items() if own}
        found.append(StartupSpans(key, kinds.most_common(1)[0][0], nodes, attrs))
    by_key = {startup.key: startup for startup in found}
    for startup in found:
        first = by_key.get(startup.key._replace(restart=0))
        if startup.key.restart and first is not None:
            startup.run_attrs = {**first.run_attrs, **startup.run_attrs}
            for name, node in startup.nodes.items():
                if name in first.nodes and name not in later[startup.key]:  # the last restart ends with the command
                    began_ns = begin_of(node)
                    around = [span for span in first.nodes[name].structure if span.end_ns >= began_ns]
                    node.spans += [replace(span, begin_ns=began_ns) for span in around]
    return found


def _run_attrs(runs: Sequence[Span]) -> dict[str, Any]:
    """The attributes of a node's run. If each rank has its own run (`mpirun bootseer run`), which may use other GPUs
    than the other ranks, the node's number of GPUs is that of all of them."""
    devices = [run.attrs.get("devices") for run in runs]
    named = {device for some in devices if isinstance(some, str) for device in some.split(",")}
    last = runs[-1].attrs
    return {**last, "gpus": len(named)} if len(runs) > 1 and None not in devices else last


def _first_of_later_restarts(grouped: Mapping[Key, Mapping[str, list[Event]]]) -> dict[Key, dict[str, Event]]:
    """For each restart, each node's first event of a later one: its processes had ended by then."""
    later: dict[Key, dict[str, Event]] = {}
    first: dict[tuple[str, int, str], Event] = {}
    for key in sorted(grouped, key=lambda key: -key.restart):
        known = {node: first.get((key.job, key.attempt, node)) for node in grouped[key]}
        later[key] = {node: event for node, event in known.items() if event is not None}
        for node, events in grouped[key].items():
            earliest = min([*events, *filter(None, [known[node]])], key=lambda event: event.wall_ns)
            first[key.job, key.attempt, node] = earliest
    return later


def count_of(value: object) -> int:
    """A number of nodes or ranks that an attribute states, 0 if it does not state a plausible one."""
    return value if isinstance(value, int) and 0 < value < 1 << 31 else 0


def begin_of(node: NodeSpans) -> int:
    """When the node's events begin, ns."""
    # A rotated log may contain only ends.
    return min((span.begin_ns for span in (*node.spans, *node.instants)), default=node.last_ns)


def _node(name: str, events: list[Event], later: Event | None) -> NodeSpans:
    node = NodeSpans(name, restarted=later is not None)
    events, node.num_runs = _last_run(events, events)
    times = _times([*events, later] if later else events, node)
    gone_ns = times.pop() if later else None
    ranks = {event.pid: event.rank for event in events if event.pid and event.rank != NO_RANK}
    launchers = {event.pid for event in events if event.pid and event.stage == LAUNCHER_RENDEZVOUS}
    open_spans: dict[str, Span] = {}
    ends: dict[str, tuple[Event, int]] = {}
    for event, at in sorted(zip(events, times, strict=True), key=lambda pair: (pair[1], pair[0].phase != BEGIN)):
        node.last_ns = max(node.last_ns, at)
        if event.phase == END:
            ends.setdefault(event.span, (event, at))
            continue
        stage = event.stage
        if event.pid in launchers and stage in PROCESS_STAGES:
            stage = LAUNCHER
        rank = event.rank if event.rank != NO_RANK else ranks.get(event.pid, NO_RANK)
        span = Span(stage, name, rank, event.pid, at, at, TRUNCATED, dict(event.attrs))
        if event.phase == INSTANT:
            span.outcome = OK
            node.instants.append(span)
        elif event.span not in open_spans:
            open_spans[event.span] = span
    for identity, span in open_spans.items():
        ended = ends.pop(identity, None)
        if ended is None:
            seen_ns = node.last_ns if gone_ns is None else min(node.last_ns, gone_ns)
            span.end_ns = max(seen_ns, span.begin_ns)
        else:
            span.end_ns = max(ended[1], span.begin_ns)
            span.outcome = FAILED if ended[0].outcome == FAILED else OK
            span.attrs.update(ended[0].attrs)
        if span.stage in STRUCTURE:
            last_ns = node.last_ns if ended is None else span.end_ns
            node.structure.append(replace(span, end_ns=max(last_ns, span.begin_ns)))
            if gone_ns is not None and span.end_ns > gone_ns:
                span.end_ns, span.outcome = max(gone_ns, span.begin_ns), TRUNCATED  # it goes on in a later restart
        node.spans.append(span)
    return node


def _last_run(events: list[Event], first: Iterable[Event]) -> tuple[list[Event], int]:
    """The events without those of earlier runs of the same attempt, and the number of its runs, which begin in `first`.
    With srun each rank has its own run."""
    runs: dict[int, list[Event]] = defaultdict(list)
    for event in first:
        if event.stage == RUN and event.phase == BEGIN:
            runs[event.rank].append(event)
    num_runs = max((len(of_rank) for of_rank in runs.values()), default=0)
    if num_runs < 2:
        return events, num_runs
    last = {rank: max(of_rank, key=lambda event: event.wall_ns) for rank, of_rank in runs.items()}
    # Events outside the runs of ranks belong to the last round of runs if they came after the first of these.
    earliest = min(last.values(), key=lambda event: event.wall_ns)
    # The scheduler's stages are earlier than the run that reports them: they belong to it by their parent. Those from
    # before an earlier run were that one's, as of the first `srun` in an allocation.
    first_ns = min(event.wall_ns for of_rank in runs.values() for event in of_rank)
    kept = [
        event
        for event in events
        if event.wall_ns >= (run := last.get(event.rank, earliest)).wall_ns
        or (event.parent == run.span and event.wall_ns > first_ns)
    ]
    return kept, num_runs


def _times(events: list[Event], node: NodeSpans) -> list[int]:
    """Each event's time: the monotonic clock plus the median difference to the wall clock, for each boot."""
    shifts = sorted(
        (event.wall_ns - event.mono_ns, event.mono_ns) for event in events if event.wall_ns != event.mono_ns
    )
    if not shifts:
        return [event.wall_ns for event in events]
    boots: list[list[int]] = [[]]
    up_ns = 0  # how long the boot had lasted at its last event
    for shift, mono_ns in shifts:
        # The next boot begins after the uptime of this one; a smaller change means that the wall clock was set.
        low = boots[-1][-1] if boots[-1] else shift
        if shift - low > max(_NEW_BOOT_NS, up_ns) and not _is_one_boot(events, low, shift):
            boots.append([])
            up_ns = 0
        boots[-1].append(shift)
        up_ns = max(up_ns, mono_ns)
    bases = [int(median(boot)) for boot in boots]
    node.clock_stepped = any(boot[-1] - boot[0] > _STEP_NS for boot in boots)
    right = [base for base in bases if plausible(base + up_ns)]
    if right and len(right) < len(bases):  # the clock was set after the boot, which is not another boot
        bases, node.clock_stepped = right, True

    def time_of(event: Event) -> int:
        if event.wall_ns == event.mono_ns:  # from a foreign log, which has no monotonic clock
            return event.wall_ns
        shift = event.wall_ns - event.mono_ns
        return event.mono_ns + (bases[0] if len(bases) == 1 else min(bases, key=lambda base: abs(base - shift)))

    return [time_of(event) for event in events]


def _is_one_boot(events: list[Event], low_ns: int, high_ns: int) -> bool:
    """Whether a span has events on both sides of a gap between wall and monotonic clock: none survives a reboot."""
    known = {event.span for event in events if event.span}
    before, after = set[str](), set[str]()
    for event in events:
        shift, span = event.wall_ns - event.mono_ns, event.parent if event.stage == ALIVE else event.span
        if span in known and (shift <= low_ns or shift >= high_ns):
            (before if shift <= low_ns else after).add(span)
    return not before.isdisjoint(after)


@dataclass(frozen=True, slots=True)
class Offset:
    """Subtract `offset_ns` from a node's times to get reference time. `error_ns` None: no barrier ties this node."""

    offset_ns: int
    error_ns: int | None


def offsets(nodes: Mapping[str, NodeSpans]) -> dict[str, Offset]:
    """The offset of each node's clock from the median of all."""
    releases: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    shortest: dict[str, int] = {}
    for name, node in nodes.items():
        for barrier, end_ns, length_ns in _releases(node):
            releases[barrier][name].append(end_ns)
            shortest[barrier] = min(shortest.get(barrier, length_ns), length_ns)
    differences: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for barrier, by_node in releases.items():
        if len(by_node) < 2:
            continue
        left = {name: min(ends) for name, ends in by_node.items()}
        middle = int(median(left.values()))
        for name, end_ns in left.items():
            # The last participant did not wait, so the shortest stay bounds the time that the release took.
            differences[name].append((end_ns - middle, shortest[barrier]))
    return {name: _offset(differences.get(name, [])) for name in nodes}


def apart(nodes: Mapping[str, NodeSpans]) -> dict[str, int]:
    """Nodes whose events are far from those of most others, on aligned clocks, with the distance: ns, negative if
    earlier."""
    groups: list[list[str]] = []
    until_ns = 0
    for name in sorted(nodes, key=lambda name: begin_of(nodes[name])):
        if not groups or begin_of(nodes[name]) > until_ns + _APART_NS:
            groups.append([])
        groups[-1].append(name)
        until_ns = max(until_ns, nodes[name].last_ns) if len(groups[-1]) > 1 else nodes[name].last_ns
    begins = [int(median(begin_of(nodes[name]) for name in group)) for group in groups]
    most = max(range(len(groups)), key=lambda index: (len(groups[index]), plausible(begins[index]), index), default=0)
    return {
        name: begin_of(nodes[name]) - begins[most]
        for index, group in enumerate(groups)
        for name in group
        if index != most
    }


def _releases(node: NodeSpans) -> Iterable[tuple[str, int, int]]:
    counts: dict[tuple[str, int], int] = defaultdict(int)
    for span in sorted(node.spans, key=lambda span: span.begin_ns):
        if span.barrier and span.outcome == OK:  # a barrier that failed was not left together
            turn = counts[span.barrier, span.rank]
            counts[span.barrier, span.rank] += 1
            yield f"{span.barrier}#{turn}", span.end_ns, span.end_ns - span.begin_ns


def _offset(differences: list[tuple[int, int]]) -> Offset:
    if not differences:
        return Offset(0, None)
    values = sorted(difference for difference, _ in differences)
    estimate = int(median(values))
    spread = (values[-1] - values[0]) // 2
    error = max(_FLOOR_NS, spread, min(shortest for _, shortest in differences))
    # An offset within its own error is not evidence: well-kept clocks agree better than barriers can measure.
    return Offset(estimate if abs(estimate) > error else 0, error)
