"""Compose the report of one startup from its events.

The order of work: tell startups apart and pair spans (`spans`), bring the nodes' clocks together (`clock`), build lanes
and barriers (`lanes`, `barriers`), cut each node's time into pieces (`timeline`), add up (`stages`), find who held the
others back (`stragglers`), and say it in words (`words`). Called by the report verbs and later by the service.
Decides and touches nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from bootseer.analysis import barriers as barrier_model
from bootseer.analysis import model, scale, words
from bootseer.analysis.chain import Told, critical_chain, straggler_groups, straggler_rows
from bootseer.analysis.clock import Offset, offsets
from bootseer.analysis.foreign.parser import UNKNOWN_JOB
from bootseer.analysis.lanes import ENDINGS, SCHEDULER, UNOBSERVED, Lane, align, lanes_of
from bootseer.analysis.spans import COMMAND, TRUNCATED, StartupSpans, startups, unique
from bootseer.analysis.stages import STAGES, WAIT_FOR_OTHERS, stages
from bootseer.analysis.timeline import Piece, cut
from bootseer.analysis.untimed import untimed
from bootseer.errors import UsageError
from bootseer.trace.event import FAILED, NO_RANK, OK, Event
from bootseer.units import NS_PER_S, seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the reader of a report may say."""

    job: str | None = None
    attempt: int | None = None
    restart: int | None = None
    num_nodes: int | None = None
    """Nodes that the job has, when the logs do not tell."""
    gpus_per_node: int | None = None
    price_per_gpu_hour: float | None = None


def analyse(
    events: Iterable[Event],
    options: Options,
    *,
    facts: Sequence[model.Fact] = (),
    read: model.Input | None = None,
) -> model.Report:
    """The report of the chosen startup, by default the last one of the only job.

    Without any event it tells the facts, and that the rest was not observed.

    Raises `UsageError` when there is nothing to report or more than one job and no choice.
    """
    kept, duplicates = unique(events)
    if not kept:
        if facts and read is not None:
            return untimed(options.job, options.price_per_gpu_hour, facts, read)
        raise UsageError("no events in the input", hint="start the job with `bootseer run`", exit_code=1)
    found = _of_one_job(startups(kept), options)
    chosen = _chosen(found, options)
    prepared = {startup.key: _prepare(startup) for startup in found}
    overviews = [_overview(startup, prepared[startup.key], options) for startup in found]
    if read is None:
        read = model.Input(files=0, bytes=0, lines=0, events=len(kept) + duplicates, duplicates=duplicates, skipped={})
    return _Builder(chosen, prepared[chosen.key], options).report(overviews, _share(kept, overviews), list(facts), read)


def jobs(events: Iterable[Event]) -> list[str]:
    """The jobs that events belong to, sorted."""
    return sorted({event.job for event in events})


def _of_one_job(found: list[StartupSpans], options: Options) -> list[StartupSpans]:
    # A job that no line names comes last: nobody would ask for it.
    names = sorted({startup.key.job for startup in found}, key=lambda name: (name == UNKNOWN_JOB, name))
    shown = ", ".join(_printable(name) for name in names[:10]) + (", ..." if len(names) > 10 else "")
    if options.job is not None and options.job not in names:
        raise UsageError(f"no job {options.job!r} in the input", hint=f"it holds: {shown}")
    if options.job is None and len(names) > 1:
        raise UsageError(f"{len(names)} jobs in the input: {shown}", hint=f"choose one: --job {_printable(names[0])}")
    return [startup for startup in found if startup.key.job == (options.job or names[0])]


def _printable(name: str) -> str:
    """A job's name in a message: as a shell takes it, and without what would drive a terminal."""
    plain = name.isprintable() and not set(name) & set(" '\"$`\\&|;<>()*?[]#~!{}")
    return name if plain else repr(name)


def _chosen(found: list[StartupSpans], options: Options) -> StartupSpans:
    fitting = [
        startup
        for startup in found
        if options.attempt in (None, startup.key.attempt) and options.restart in (None, startup.key.restart)
    ]
    if not fitting:
        there = ", ".join(sorted({f"{startup.key.attempt}" for startup in found}))
        raise UsageError(f"no such attempt of job {found[0].key.job!r}", hint=f"the input holds attempts {there}")
    return fitting[-1]


@dataclass(slots=True)
class _Prepared:
    """A startup on one clock, with its lanes and barriers. `clocks` holds the offsets that were taken out."""

    lanes: list[Lane]
    barriers: list[barrier_model.Barrier]
    clocks: Mapping[str, Offset]
    begin_ns: int
    submitted_ns: int | None
    end_ns: int


def _prepare(startup: StartupSpans) -> _Prepared:
    clocks = offsets(startup.nodes)
    align(startup.nodes, clocks)
    lanes = [lane for name in sorted(startup.nodes) for lane in lanes_of(startup.nodes[name])]
    scheduler = [s for node in startup.nodes.values() for s in node.spans if s.stage in SCHEDULER]
    submitted = [span.begin_ns for span in scheduler if span.stage == "queue"]
    began = [lane.end_ns for lane in lanes if lane.outcome == OK]
    for lane in lanes if began else []:  # what a lost lane left open may last as long as the job
        lane.end_ns = max(min(lane.end_ns, max(began)), lane.begin_ns)
    begin = min([lane.begin_ns for lane in lanes] + [span.begin_ns for span in scheduler])
    end = max(began or [lane.end_ns for lane in lanes])
    return _Prepared(
        lanes, barrier_model.barriers_of(lanes), clocks, begin, min(submitted) if submitted else None, max(end, begin)
    )


def _gpus(startup: StartupSpans, node: str, options: Options) -> int | None:
    value = startup.run_attrs.get(node, {}).get("gpus")
    if options.gpus_per_node is not None:
        return options.gpus_per_node
    return value if isinstance(value, int) and 0 <= value < 1 << 16 else None


def _sum(values: Iterable[int | None]) -> int | None:
    total = 0
    for value in values:
        if value is None:
            return None
        total += value
    return total


def _outcome(lanes: Sequence[Lane]) -> str:
    if any(lane.outcome == OK for lane in lanes):
        return "training_began"
    return FAILED if any(lane.outcome == FAILED for lane in lanes) else "truncated"


def _overview(startup: StartupSpans, ready: _Prepared, options: Options) -> model.Overview:
    return model.Overview(
        job=startup.key.job,
        attempt=startup.key.attempt,
        restart=startup.key.restart,
        kind=startup.kind,
        begin_ns=ready.begin_ns,
        startup_s=seconds(ready.end_ns - ready.begin_ns),
        num_nodes=len(startup.nodes),
        num_gpus=_sum(_gpus(startup, node, options) for node in startup.nodes),
        outcome=_outcome(ready.lanes),
    )


def _share(events: Sequence[Event], overviews: Sequence[model.Overview]) -> model.Share | None:
    """Startups of the job over its wall time: only when the events reach beyond one startup."""
    times = [event.wall_ns for event in events if event.job == overviews[0].job]
    wall_s = seconds(max(times) - min(times))
    startup_s = sum(overview.startup_s for overview in overviews)
    if len(overviews) < 2 or wall_s <= 0:
        return None
    gpus = [overview.num_gpus for overview in overviews]
    hours = None
    if all(count is not None for count in gpus):
        hours = sum(o.startup_s * (o.num_gpus or 0) for o in overviews) / 3600
    return model.Share(len(overviews), startup_s, wall_s, min(startup_s / wall_s, 1.0), hours)


_ENDING_FACTS = ("exit_code", "signal", "local_rank")
_TELLING = {UNOBSERVED: 0, OK: 1}
"""How much a lane with this outcome tells of its node; any other outcome tells the most."""


class _Builder:
    """Puts the parts of one report together; everything it shares is relative to `zero`."""

    def __init__(self, startup: StartupSpans, ready: _Prepared, options: Options) -> None:
        self.startup = startup
        self.options = options
        self.ready = ready
        self.zero = ready.begin_ns
        self.price = options.price_per_gpu_hour
        self.pieces: dict[int, list[Piece]] = {}
        self.arrivals = barrier_model.last_arrivals(self.ready.barriers)
        self.gpus = {node: _gpus(startup, node, options) for node in startup.nodes}
        self.began = any(lane.outcome == OK for lane in ready.lanes)
        self.ranks = Counter(lane.node for lane in ready.lanes if lane.rank != NO_RANK)

    def at(self, ns: int) -> float:
        return (ns - self.zero) / NS_PER_S

    def pieces_of(self, lane: Lane) -> list[Piece]:
        """The lane's time, cut once."""
        known = self.pieces.get(id(lane))
        if known is None:
            known = self.pieces[id(lane)] = cut(lane.spans, lane.begin_ns, lane.end_ns, self.arrivals)
        return known

    def report(
        self,
        overviews: list[model.Overview],
        share: model.Share | None,
        facts: list[model.Fact],
        read: model.Input,
    ) -> model.Report:
        ready, key = self.ready, self.startup.key
        lanes = self._lane_of_each_node()
        nodes = [self._node(lane) for lane in lanes.values()]
        told = Told(
            barriers=ready.barriers,
            clocks=ready.clocks,
            lanes=lanes,
            pieces_of=self.pieces_of,
            gpus=self.gpus,
            price=self.price,
            zero_ns=self.zero,
        )
        rows = stages(nodes, self.price)
        stragglers = straggler_rows(told)
        num_gpus = _sum(self.gpus.values())
        coverage = self._coverage(nodes)
        startup = model.Startup(
            job=key.job,
            attempt=key.attempt,
            restart=key.restart,
            kind=self.startup.kind,
            zero_ns=self.zero,
            outcome=_outcome(ready.lanes),
            ended_by=min((lane.ended_by for lane in ready.lanes if lane.outcome == OK), default="last_event"),
            num_nodes=len(nodes),
            num_ranks=len({(lane.node, lane.rank) for lane in ready.lanes if lane.rank != NO_RANK}),
            num_gpus=num_gpus,
            scale=scale.bucket(num_gpus),
        )
        seen = {span.stage.partition(".")[0] for node in self.startup.nodes.values() for span in node.spans}
        expected = STAGES if self.startup.kind == "full" else STAGES[3:]
        unobserved = [stage for stage in expected if stage not in seen and not _in_facts(stage, facts)]
        report = model.Report(
            startup=startup,
            verdict="",
            headlines=[],
            overhead=self._overhead(nodes),
            stages=self._scheduler_rows() + rows,
            nodes=nodes,
            critical_chain=critical_chain(told),
            stragglers=stragglers,
            straggler_groups=straggler_groups(told, stragglers),
            coverage=coverage,
            clock=self._clock(),
            unobserved=unobserved,
            facts=facts,
            share=share,
            startups=overviews,
            input=read,
        )
        reused = max((node.num_runs for node in self.startup.nodes.values()), default=0)
        return words.with_words(report, waiting=self._waiting(lanes), reused_runs=reused, endings=self._endings())

    def _endings(self) -> list[str]:
        """How the command, or its workers, ended without any training that was seen."""
        told = []
        for name, node in sorted(self.startup.nodes.items()) if not self.began else ():
            marks = [mark for mark in node.instants if mark.stage in ENDINGS]
            marks += [span for span in node.spans if span.stage == COMMAND and span.outcome == FAILED]
            for mark in marks:
                facts = [f"{key.replace('_', ' ')} {mark.attrs[key]}" for key in _ENDING_FACTS if key in mark.attrs]
                what = mark.stage.replace("_", " ") + (" failed" if mark.stage == COMMAND else "")
                told.append(
                    f"{what} on {name} at {self.at(mark.end_ns):.1f} s" + f" ({', '.join(facts)})" * bool(facts)
                )
        return told

    def _waiting(self, lanes: Mapping[str, Lane]) -> dict[str, str]:
        """Nodes that stand at a barrier which never opened, with its name."""
        return {
            node: lane.arrivals[-1].barrier
            for node, lane in lanes.items()
            if lane.outcome == TRUNCATED and lane.arrivals and lane.arrivals[-1].span.outcome == TRUNCATED
        }

    def _lane_of_each_node(self) -> dict[str, Lane]:
        """The lane that tells a node's story: of those that got furthest, the one that worked longest."""
        best: dict[str, tuple[tuple[int, int], Lane]] = {}
        for lane in self.ready.lanes:
            waited = sum(
                max(min(self.arrivals.get(id(a.span), a.at_ns), a.left_ns) - a.at_ns, 0) for a in lane.arrivals
            )
            # A rank that died is its node's story; otherwise the one with the most work of its own that got through.
            rank = (_TELLING.get(lane.outcome, 2), lane.end_ns - lane.begin_ns - waited)
            if lane.node not in best or rank > best[lane.node][0]:
                best[lane.node] = (rank, lane)
        return {node: lane for node, (_, lane) in best.items()}

    def _node(self, lane: Lane) -> model.Node:
        outcome = lane.outcome
        end_ns = max(self.ready.end_ns, lane.end_ns) if outcome in (OK, UNOBSERVED) else lane.end_ns
        segments = [
            model.Segment(p.stage, self.at(p.begin_ns), self.at(p.end_ns), p.kind, p.outcome)
            for p in self.pieces_of(lane)
        ]
        # A stage that was cut short with the node's last sign of life took no time that anybody saw, and still counts.
        segments += [
            model.Segment(span.stage, self.at(span.begin_ns), self.at(span.begin_ns), model.WORK, TRUNCATED)
            for span in lane.spans
            if span.outcome == TRUNCATED and span.begin_ns >= lane.end_ns
        ]
        if end_ns > lane.end_ns:
            # Where training began without a word of this node, nobody knows what it did until then.
            silent = outcome == UNOBSERVED and self.began
            stage, kind = (model.UNTRACKED_STAGE, model.UNTRACKED) if silent else (WAIT_FOR_OTHERS, model.WAIT)
            segments.append(model.Segment(stage, self.at(lane.end_ns), self.at(end_ns), kind, ""))
        totals = dict.fromkeys((model.WORK, model.WAIT, model.UNTRACKED), 0.0)
        for segment in segments:
            totals[segment.kind] += segment.end_s - segment.start_s
        clock = self.ready.clocks[lane.node]
        ranks = self.ranks[lane.node]
        return model.Node(
            node=lane.node,
            rank=lane.rank,
            num_ranks=ranks if ranks > 1 else int(lane.rank >= 0),
            gpus=self.gpus[lane.node],
            start_s=self.at(lane.begin_ns),
            end_s=self.at(end_ns),
            own_end_s=self.at(lane.end_ns),
            work_s=totals[model.WORK],
            wait_s=totals[model.WAIT],
            untracked_s=totals[model.UNTRACKED],
            outcome=outcome,
            last_stage=lane.last_stage,
            clock_offset_s=seconds(clock.offset_ns),
            clock_error_s=None if clock.error_ns is None else seconds(clock.error_ns),
            segments=segments,
            background=[
                model.Segment(s.stage, self.at(s.begin_ns), self.at(min(s.end_ns, end_ns)), model.WORK, s.outcome)
                for s in lane.background
            ],
            attrs=_attrs(lane, self.startup.run_attrs.get(lane.node, {})),
        )

    def _scheduler_rows(self) -> list[model.Stage]:
        """Queue and allocation: the job's, not a node's, so they have one value and cost no GPU time."""
        rows = []
        for stage in SCHEDULER:
            spans = [s for node in self.startup.nodes.values() for s in node.spans if s.stage == stage]
            if spans:
                length = seconds(max(span.end_ns - span.begin_ns for span in spans))
                cut = sum(span.outcome == TRUNCATED for span in spans)
                rows.append(
                    model.Stage(
                        stage, 0, 0, cut, 0, length, length, length, None, "", length, 0.0, 0.0, None, [(length, 1.0)]
                    )
                )
        return rows

    def _overhead(self, nodes: Sequence[model.Node]) -> model.Overhead:
        ready = self.ready
        whole = [node.end_s - node.start_s for node in nodes if node.outcome in (OK, UNOBSERVED)]
        whole = whole if any(whole) else []  # single moments have no length: that is not 0
        work = sum(node.work_s + node.untracked_s for node in nodes)
        wait = sum(node.wait_s for node in nodes)
        hours = wait_hours = None
        if all(node.gpus is not None for node in nodes):
            hours = sum((node.end_s - node.start_s) * (node.gpus or 0) for node in nodes) / 3600
            wait_hours = sum(node.wait_s * (node.gpus or 0) for node in nodes) / 3600
        job_level = seconds(ready.end_ns - ready.submitted_ns) if ready.submitted_ns is not None else None
        return model.Overhead(
            job_level_s=job_level if self.began else None,
            node_level_median_s=median(whole) if whole else None,
            node_level_max_s=max(whole) if whole else None,
            startup_s=seconds(ready.end_ns - self.zero),
            work_share=work / (work + wait) if work + wait > 0 else None,
            wait_share=wait / (work + wait) if work + wait > 0 else None,
            gpu_hours=hours,
            wait_gpu_hours=wait_hours,
            cost=_times(hours, self.price),
            wait_cost=_times(wait_hours, self.price),
            price_per_gpu_hour=self.price,
        )

    def _coverage(self, nodes: Sequence[model.Node]) -> model.Coverage:
        spans = [s for node in self.startup.nodes.values() for s in (*node.spans, *node.instants)]
        stated = [*self.startup.run_attrs.values(), *(span.attrs for span in spans)]
        return model.Coverage(
            nodes_heard=len(nodes),
            nodes_expected=self.options.num_nodes or _largest(stated, "num_nodes"),
            ranks_heard=len({(lane.node, lane.rank) for lane in self.ready.lanes if lane.rank != NO_RANK}),
            ranks_expected=_largest(stated, "world_size"),
            nodes_truncated=sum(node.outcome in ("truncated", FAILED) for node in nodes),
            events_lost=sum(lost for attrs in stated if isinstance(lost := attrs.get("events_lost"), int) and lost > 0),
        )

    def _clock(self) -> model.Clock:
        clocks = self.ready.clocks
        errors = [clock.error_ns for clock in clocks.values() if clock.error_ns is not None]
        return model.Clock(
            reference_node=min(clocks, key=lambda node: (abs(clocks[node].offset_ns), node)),
            max_offset_s=seconds(max(abs(clock.offset_ns) for clock in clocks.values())),
            max_error_s=seconds(max(errors)) if errors else None,
            nodes_untied=sum(clock.error_ns is None for clock in clocks.values()) if len(clocks) > 1 else 0,
            steps=sorted(name for name, node in self.startup.nodes.items() if node.clock_stepped),
        )


def _largest(attrs: Iterable[Mapping[str, Any]], key: str) -> int | None:
    values = [value for item in attrs if isinstance(value := item.get(key), int) and 0 < value < 1 << 31]
    return max(values, default=None)


def _times(value: float | None, price: float | None) -> float | None:
    return None if value is None or price is None else value * price


def _in_facts(stage: str, facts: Sequence[model.Fact]) -> bool:
    return any(fact.stage.partition(".")[0] == stage for fact in facts)


_NOT_FACTS = frozenset({"barrier", "background", "num_nodes", "world_size", "gpus", "events_lost", "source"})


def _attrs(lane: Lane, run: Mapping[str, Any]) -> dict[str, Any]:
    facts = {f"run.{key}": value for key, value in run.items() if key not in _NOT_FACTS}
    for span in lane.spans:
        for key, value in span.attrs.items():
            if key in _NOT_FACTS:
                continue
            name = f"{span.stage}.{key}"
            if key == "bytes" and isinstance(facts.get(name), int) and isinstance(value, int):
                facts[name] += value
            else:
                facts[name] = value
    return facts
