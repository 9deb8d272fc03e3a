"""Compose the report of one startup from its events.

The steps: separate the startups, pair spans and align the nodes' clocks (`spans`), build lanes and barriers (`lanes`,
`barriers`), cut each node's time into pieces and sum them up (`stages`), find the nodes that delayed the others
(`stragglers`), and describe it in words (`verdict`). Logs with facts but without times, such as the output of an
installer, get a report without nodes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from bootseer.errors import UsageError
from bootseer.report import model
from bootseer.report.analysis import verdict
from bootseer.report.analysis.barriers import Replay
from bootseer.report.analysis.lanes import ENDINGS, SCHEDULER, UNOBSERVED, Lane
from bootseer.report.analysis.prepare import (
    Options,
    Prepared,
    chosen,
    of_one_job,
    outcome_of,
    overview,
    prepare,
    share,
    total,
    with_replaced_nodes,
)
from bootseer.report.analysis.rank_connections import connection_lines
from bootseer.report.analysis.spans import COMMAND, TRUNCATED, StartupSpans, count_of, startups, unique
from bootseer.report.analysis.stages import STAGES, WAIT_FOR_OTHERS, stages
from bootseer.report.analysis.starts import (
    checkpoint_starts,
    environment_starts,
    image_starts,
    peers_starts,
    restarts,
    stack_lines,
    unused_import_lines,
    warm_lines,
)
from bootseer.report.analysis.stragglers import critical_chain, straggler_groups, straggler_rows
from bootseer.report.foreign.parser import FOREIGN
from bootseer.trace.event import FAILED, NO_RANK, OK, Event
from bootseer.units import S_PER_H, plural, seconds

_MAX_RANKS = 64
_ENDING_FACTS = ("exit_code", "signal", "local_rank")
_INFORMATIVE = {UNOBSERVED: 0, OK: 1}
"""How well a lane with this outcome represents its node; any other outcome is the most informative."""
_NOT_FACTS = frozenset(
    {"barrier", "background", "num_nodes", "world_size", "gpus", "devices", "events_lost", "pod_uid", FOREIGN}
)
_NO_JOB = "unnamed"


def analyse(
    events: Iterable[Event],
    options: Options,
    *,
    facts: Sequence[model.Fact] = (),
    read: model.Input | None = None,
) -> model.Report:
    """The report of the chosen startup, by default the last one of the only job.

    Without any event it has only the facts, and everything else is unobserved.

    Raises `UsageError` if there is nothing to report, or more than one job and none was chosen.
    """
    kept, duplicates = unique(events)
    if kept:
        analysis = Analysis(kept, options, facts=facts, read=read, duplicates=duplicates)
        if analysis.startups:
            return analysis.report(chosen(analysis.startups, options))
    if facts and read is not None:
        return untimed(options, facts, read)
    hint = "start the job with `bootseer run`"
    if kept:
        hint = "the scheduler's lists of nodes are malformed or too long"
    elif read is not None and read.skipped.get("unit"):
        hint = "the events have times in s, ms or µs: `wall_ns` and `mono_ns` must be in ns"
    raise UsageError("no events in the input", hint=hint, exit_code=1)


class Analysis:
    """All startups of one job, prepared for reports on each of them."""

    def __init__(
        self,
        events: Sequence[Event],
        options: Options,
        *,
        facts: Sequence[model.Fact] = (),
        read: model.Input | None = None,
        duplicates: int = 0,
    ) -> None:
        """`events`: at least one, without duplicates; `duplicates`: the number dropped. Raises like `analyse`."""
        of_job, num_cut = of_one_job(events, options)
        self.startups = with_replaced_nodes(startups(of_job))
        self._facts = facts
        self._ready = [prepare(startup, options) for startup in self.startups]
        self._overviews = [overview(ready) for ready in self._ready]
        if read is None:
            read = model.Input(files=0, bytes=0, lines=0, events=len(events) + duplicates, duplicates=0, skipped={})
        skipped = dict(read.skipped)
        if num_cut:
            skipped["many_nodes"] = num_cut
        self._read = replace(read, duplicates=duplicates, skipped=skipped)

    def report(self, picked: StartupSpans) -> model.Report:
        """The report of one of `startups`."""
        # A restart is another try of the same attempt, so its report also says how the tries before it ended.
        of_attempt = [ready for ready in self._ready if ready.startup.key[:2] == picked.key[:2]]
        tries = [ready for ready in of_attempt if ready.startup.key.restart <= picked.key.restart]
        tries.sort(key=lambda ready: ready.startup.key.restart)
        ready, key = tries[-1], picked.key
        lanes = _lane_of_each_node(ready)
        nodes = [_node(ready, lane) for lane in lanes.values()]
        rows = stages(nodes, ready.options.price_per_gpu_hour)
        replay = Replay(ready.barriers)
        stragglers = straggler_rows(ready, replay)
        num_gpus = total(ready.gpus.values())
        startup = model.Startup(
            *key,
            kind=picked.kind,
            zero_ns=ready.begin_ns,
            outcome=outcome_of(ready.lanes),
            ended_by=_ended_by(ready),
            num_nodes=len(nodes),
            num_ranks=len({(lane.node, lane.rank) for lane in ready.lanes if lane.rank != NO_RANK}),
            num_gpus=num_gpus,
            scale=verdict.bucket(num_gpus),
        )
        seen = {span.stage.partition(".")[0] for node in picked.nodes.values() for span in node.spans}
        seen |= {row.stage for row in rows}  # what is derived from the command
        expected = STAGES[4:] if key.restart else STAGES if picked.kind == "full" else STAGES[3:]
        seen |= {fact.stage.partition(".")[0] for fact in self._facts}
        unobserved = [stage for stage in expected if stage not in seen]
        report = model.Report(
            startup=startup,
            verdict="",
            headlines=[],
            overhead=_overhead(ready, nodes),
            stages=_scheduler_rows(ready) + rows,
            nodes=nodes,
            # One by one, if they are few enough to look at.
            ranks=[_node(ready, lane) for lane in ready.lanes] if len(nodes) < len(ready.lanes) <= _MAX_RANKS else [],
            critical_chain=critical_chain(ready),
            stragglers=stragglers,
            straggler_groups=straggler_groups(ready, replay, stragglers, nodes),
            coverage=_coverage(ready, nodes),
            clock=_clock(ready),
            unobserved=unobserved,
            images=image_starts(picked),
            checkpoints=checkpoint_starts(picked),
            environments=environment_starts(picked),
            peers=peers_starts(picked),
            connections=connection_lines(picked),
            warm=warm_lines(picked),
            unused_imports=unused_import_lines(picked),
            stacks=stack_lines(picked),
            restarts=restarts([one.startup for one in tries], self._overviews),
            facts=list(self._facts),
            share=share(self._ready, self._overviews),
            startups=self._overviews,
            input=self._read,
            scheduler=[
                model.Segment(s.stage, ready.at(s.begin_ns), ready.at(s.end_ns), model.WORK, s.outcome)
                for s in ready.scheduler
            ],
        )
        endings = [ending for one in tries for ending in _endings(one)]
        lines = verdict.headlines(
            report,
            waiting=_waiting(lanes),
            reused_runs=max(node.num_runs for node in picked.nodes.values()),
            endings=endings,
            same_rank=_same_rank(ready),
        )
        return replace(report, verdict=verdict.verdict(report, ended=bool(endings)), headlines=lines)


def _same_rank(ready: Prepared) -> dict[int, list[str]]:
    """Ranks that several nodes claim, with these nodes."""
    nodes: dict[int, list[str]] = defaultdict(list)
    for lane in ready.lanes:
        nodes[lane.rank].append(lane.node)
    return {rank: names for rank, names in nodes.items() if rank != NO_RANK and len(names) > 1}


def _ended_by(ready: Prepared) -> str:
    lanes = ready.lanes
    if ready.began:
        return min(lane.ended_by for lane in lanes if lane.outcome == OK)
    return max(lanes, key=lambda lane: (lane.end_ns, lane.ended_by)).ended_by


def _endings(ready: Prepared) -> list[str]:
    """How the command or its workers ended, if no training was observed."""
    lines = []
    restart = f"restart {ready.startup.key.restart}: " if ready.startup.key.restart else ""
    for name, node in sorted(ready.startup.nodes.items()) if not ready.began else ():
        marks = [mark for mark in node.instants if mark.stage in ENDINGS]
        marks += [span for span in node.spans if span.stage == COMMAND and span.outcome != TRUNCATED]
        for mark in marks:
            facts = [f"{key.replace('_', ' ')} {mark.attrs[key]}" for key in _ENDING_FACTS if key in mark.attrs]
            what = mark.stage.replace("_", " ")
            if mark.stage == COMMAND:
                what += " failed" if mark.outcome == FAILED else " succeeded"
            lines.append(
                f"{restart}{what} on {name} at {ready.at(mark.end_ns):.1f} s" + f" ({', '.join(facts)})" * bool(facts)
            )
    return lines


def _waiting(lanes: Mapping[str, Lane]) -> dict[str, str]:
    """Nodes that wait at a barrier that never opened, with its name."""
    return {
        node: lane.arrivals[-1].barrier
        for node, lane in lanes.items()
        if lane.outcome in (TRUNCATED, FAILED) and lane.arrivals and lane.arrivals[-1].span.outcome == TRUNCATED
    }


def _lane_of_each_node(ready: Prepared) -> dict[str, Lane]:
    """The lane that represents a node: one that did not end well, else the one that worked longest."""
    best: dict[str, tuple[tuple[int, int], Lane]] = {}
    for lane in ready.lanes:
        waited = sum(max(min(ready.arrivals.get(id(a.span), a.at_ns), a.left_ns) - a.at_ns, 0) for a in lane.arrivals)
        rank = (_INFORMATIVE.get(lane.outcome, 2), lane.end_ns - lane.begin_ns - waited)
        if lane.node not in best or rank > best[lane.node][0]:
            best[lane.node] = (rank, lane)
    return {node: lane for node, (_, lane) in best.items()}


def _node(ready: Prepared, lane: Lane) -> model.Node:
    outcome = lane.outcome
    end_ns = max(ready.end_ns, lane.end_ns) if outcome in (OK, UNOBSERVED) else lane.end_ns
    segments = [
        model.Segment(p.stage, ready.at(p.begin_ns), ready.at(p.end_ns), p.kind, p.outcome)
        for p in ready.pieces_of(lane)
    ]
    # A stage that was cut off right at the node's last event has no duration, but must still be counted.
    segments += [
        model.Segment(span.stage, ready.at(span.begin_ns), ready.at(span.begin_ns), model.WORK, TRUNCATED)
        for span in lane.spans
        if span.outcome == TRUNCATED and span.begin_ns >= lane.end_ns
    ]
    if end_ns > lane.end_ns:
        # Training began, but this node sent no event about it: what it did until then is unknown.
        silent = outcome == UNOBSERVED and ready.began
        stage, kind = (model.UNTRACKED_STAGE, model.UNTRACKED) if silent else (WAIT_FOR_OTHERS, model.WAIT)
        segments.append(model.Segment(stage, ready.at(lane.end_ns), ready.at(end_ns), kind, ""))
    totals = dict.fromkeys((model.WORK, model.WAIT, model.UNTRACKED), 0.0)
    for segment in segments:
        totals[segment.kind] += segment.end_s - segment.start_s
    clock = ready.clocks[lane.node]
    ranks = ready.ranks[lane.node]
    return model.Node(
        node=lane.node,
        rank=lane.rank,
        num_ranks=ranks if ranks > 1 else int(lane.rank >= 0),
        gpus=ready.gpus[lane.node],
        start_s=ready.at(lane.begin_ns),
        end_s=ready.at(end_ns),
        own_end_s=ready.at(lane.end_ns),
        work_s=totals[model.WORK],
        wait_s=totals[model.WAIT],
        untracked_s=totals[model.UNTRACKED],
        outcome=outcome,
        last_stage=lane.last_stage,
        clock_offset_s=seconds(clock.offset_ns),
        clock_error_s=None if clock.error_ns is None else seconds(clock.error_ns),
        segments=segments,
        background=[
            model.Segment(s.stage, ready.at(s.begin_ns), ready.at(min(s.end_ns, end_ns)), model.WORK, s.outcome)
            for s in lane.background
        ],
        attrs=_attrs(lane, ready.startup.run_attrs.get(lane.node, {})),
    )


def _scheduler_rows(ready: Prepared) -> list[model.Stage]:
    """Queue and allocation belong to the job, not to a node: they have one value and cost no GPU time."""
    rows = []
    for stage in SCHEDULER:
        spans = [s for node in ready.startup.nodes.values() for s in node.spans if s.stage == stage]
        if spans:
            length = seconds(max(span.end_ns - span.begin_ns for span in spans))
            cut = sum(span.outcome == TRUNCATED for span in spans)
            rows.append(
                model.Stage(
                    stage, 0, 0, cut, 0, length, length, length, None, "", length, 0.0, 0.0, None, [(length, 1.0)]
                )
            )
    return rows


def _overhead(ready: Prepared, nodes: Sequence[model.Node]) -> model.Overhead:
    whole = [node.end_s - node.start_s for node in nodes if node.outcome in (OK, UNOBSERVED) or not ready.began]
    whole = whole if any(whole) else []  # with only instants the duration is unknown, not 0
    work = sum(node.work_s + node.untracked_s for node in nodes)
    wait = sum(node.wait_s for node in nodes)
    hours = wait_hours = None
    moved = any(node.end_s > node.start_s for node in nodes)
    if moved and all(node.gpus is not None for node in nodes):
        hours = sum((node.end_s - node.start_s) * (node.gpus or 0) for node in nodes) / S_PER_H
        wait_hours = sum(node.wait_s * (node.gpus or 0) for node in nodes) / S_PER_H
    job_level = seconds(ready.end_ns - ready.submitted_ns) if ready.submitted_ns is not None else None
    return model.Overhead(
        job_level_s=job_level if ready.began else None,
        node_level_median_s=median(whole) if whole else None,
        node_level_max_s=max(whole) if whole else None,
        startup_s=seconds(ready.end_ns - ready.begin_ns),
        work_share=work / (work + wait) if work + wait > 0 else None,
        wait_share=wait / (work + wait) if work + wait > 0 else None,
        gpu_hours=hours,
        wait_gpu_hours=wait_hours,
        cost=ready.cost(hours),
        wait_cost=ready.cost(wait_hours),
        price_per_gpu_hour=ready.options.price_per_gpu_hour,
        currency=ready.options.currency,
    )


def _coverage(ready: Prepared, nodes: Sequence[model.Node]) -> model.Coverage:
    spans = [s for node in ready.startup.nodes.values() for s in (*node.spans, *node.instants)]
    stated = [*ready.startup.run_attrs.values(), *(span.attrs for span in spans)]
    told = _largest(stated, "num_nodes") or _largest(stated, "group_world_size")  # one launcher per node
    heard, expected = len(nodes) + len(ready.left_out), ready.options.num_nodes or told
    return model.Coverage(
        nodes_heard=heard,
        nodes_expected=expected and max(expected, heard),  # steps of one allocation each state their own
        ranks_heard=len({(lane.node, lane.rank) for lane in ready.lanes if lane.rank != NO_RANK}),
        ranks_expected=_largest(stated, "world_size"),
        nodes_truncated=sum(node.outcome in ("truncated", FAILED) for node in nodes),
        events_lost=sum(lost for span in spans if isinstance(lost := span.attrs.get("events_lost"), int) and lost > 0),
    )


def _clock(ready: Prepared) -> model.Clock:
    clocks = ready.clocks
    errors = [clock.error_ns for clock in clocks.values() if clock.error_ns is not None]
    return model.Clock(
        reference_node=min(clocks, key=lambda node: (abs(clocks[node].offset_ns), node)),
        max_offset_s=seconds(max(abs(clock.offset_ns) for clock in clocks.values())),
        max_error_s=seconds(max(errors)) if errors else None,
        nodes_untied=sum(clock.error_ns is None for clock in clocks.values()) if len(clocks) > 1 else 0,
        steps=sorted(name for name, node in ready.startup.nodes.items() if node.clock_stepped),
        left_out={name: seconds(off_ns) for name, off_ns in sorted(ready.left_out.items())},
    )


def _largest(attrs: Iterable[Mapping[str, Any]], key: str) -> int | None:
    return max((count_of(item.get(key)) for item in attrs), default=0) or None


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


def untimed(options: Options, facts: Sequence[model.Fact], read: model.Input) -> model.Report:
    """A report without nodes."""
    seen = sorted({fact.stage.partition(".")[0] for fact in facts if fact.stage})
    stages = f" about {', '.join(seen)}" if seen else ""
    return model.Report(
        startup=model.Startup(options.job or _NO_JOB),
        verdict="These logs contain no times, so no startup can be measured; they contain "
        f"{plural(len(facts), 'fact')}{stages}.",
        headlines=[
            "Nodes, order, waiting and cost are unobserved: collect logs with time stamps, or start the job with "
            "`bootseer run`."
        ],
        overhead=model.Overhead(price_per_gpu_hour=options.price_per_gpu_hour, currency=options.currency),
        coverage=model.Coverage(),
        clock=model.Clock(),
        unobserved=[stage for stage in STAGES if stage not in seen],
        facts=list(facts),
        share=None,
        input=read,
    )
