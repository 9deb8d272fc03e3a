"""The verdict and the headlines: a report's numbers as sentences, compared with the paper's median for the job's size.

The medians were digitised (about ±3 s) from the box plot on the first author's public project page of BootSeer
(arXiv 2507.12619).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from bootseer.report.analysis.lanes import RESTART
from bootseer.report.analysis.stragglers import LATE_START, NAME
from bootseer.report.foreign.times import plausible
from bootseer.report.model import Report, Stage, StragglerGroup
from bootseer.units import format_hours, format_money, format_seconds, listed, plural

_STAGE_WORDS = {
    "queue": "waiting in the queue",
    "allocation": "allocation",
    "image_loading": "image loading",
    "environment_setup": "environment setup",
    "model_initialization": "model initialization",
    "first_step": "the first step",
    "wait_for_others": "waiting for other nodes",
    "untracked": "time that no stage covers",
}
_FRAMEWORKS = ("model_initialization.import_torch", "model_initialization.import_jax", "first_step")
"""Stages of processes in which the hook can observe the beginning of training."""


ENDS = {
    "failed": "a failed startup",
    "truncated": "an abandoned or still running startup",
    "unobserved": "a startup without an observed beginning of training",
}
"""Description of a startup in which training did not begin, by outcome."""
_SKIPPED = (
    ("unreadable", "file", "of the folder could not be read; their content is missing here."),
    ("unit", "event", "with times in s, ms or µs instead of ns: ignored."),
    ("version", "event", "of a newer BootSeer: ignored, upgrade to read them."),
    (
        "other_run",
        "stage",
        "of other programs ignored: more than 15 minutes before or after the job's other events, so of another job on "
        "the machine, or with times of another zone.",
    ),
    (
        "other_zone",
        "event",
        "of other programs ignored, because some lie outside of the run: the log has an earlier run, too, or times of "
        "another time zone (then set TZ to it: TZ=UTC bootseer report ...).",
    ),
)
# (upper bound in GPUs, inclusive; name; the paper's median startup overhead in seconds)
BUCKETS: tuple[tuple[float, str, float], ...] = (
    (10, "1-10", 44),
    (100, "10-100", 127),
    (500, "100-500", 334),
    (1000, "500-1000", 314),
    (2000, "1000-2000", 409),
    (3000, "2000-3000", 431),
    (float("inf"), ">3000", 501),
)


def verdict(report: Report, *, ended: bool) -> str:
    """What happened, in one sentence. `ended`: the command or its workers ended without observed training."""
    startup, overhead = report.startup, report.overhead
    size = plural(startup.num_nodes, "node")
    if startup.num_gpus:
        size += f", {plural(startup.num_gpus, 'GPU')}"
    took = format_seconds(overhead.startup_s or 0.0)
    if startup.outcome == "training_began":
        paper = next((median_s for _, name, median_s in BUCKETS if name == startup.scale), None)
        against = f" (the paper's median at {startup.scale} GPUs: {paper:.0f} s)" if paper else ""
        parts = [f"Startup took {took} on {size}{against}"]
    elif startup.outcome == "failed":
        parts = [f"Failed startup: {took} on {size}, and training did not begin"]
    elif startup.outcome == "truncated" and overhead.startup_s:
        until = (
            "its processes were restarted" if startup.ended_by == RESTART else "the last sign of life, or it still runs"
        )
        parts = [f"Abandoned startup: {took} on {size} until {until}"]
    elif ended:
        seen = f"the stages before it took {took}" if overhead.startup_s else "nor was any stage of a startup"
        parts = [f"The beginning of training was not observed on {size}, {seen}"]
    elif overhead.startup_s:
        parts = [f"The logs cover {took} on {size}, but not the beginning of training"]
    else:
        parts = [f"The logs contain only instants on {size}, nothing with a duration"]
    top = _largest(report)
    if top is not None:
        stage, share = top
        parts.append(f"{share:.0%} of the nodes' time went to {_STAGE_WORDS.get(stage, stage)}")
    parts.append(_blame(report))
    return "; ".join(part for part in parts if part) + "."


def _largest(report: Report) -> tuple[str, float] | None:
    rows = [row for row in report.stages if row.depth == 0 and row.num_nodes and row.stage != "wait_for_others"]
    total = sum(node.end_s - node.start_s for node in report.nodes)
    if not rows or total <= 0:
        return None
    top: Stage = max(rows, key=lambda row: row.work_s)
    return top.stage, top.work_s / total


def _blame(report: Report) -> str:
    groups = report.straggler_groups
    if not groups or groups[-1].joint_s < 0.05:
        return ""
    largest, total = max(groups, key=lambda group: (group.next_s, len(group.nodes))), groups[-1]
    which = f"node {largest.nodes[0]}" if len(largest.nodes) == 1 else f"{len(largest.nodes)} nodes"
    where = "by starting late" if largest.stage == LATE_START else f"in {largest.stage}"
    if largest.places:
        where += f" ({located(largest)})"
    took = format_seconds(total.joint_s)
    if len(groups) == 1:
        text = f"{which} delayed the others by {took} {where}"
    else:
        all_nodes = sum(len(group.nodes) for group in groups)
        text = f"{all_nodes} nodes delayed the others by {took} in total, mainly {which} {where}"
    if total.joint_gpu_hours:
        text += f" = {format_hours(total.joint_gpu_hours)} GPU-hours"
    return text + (f" = {format_money(total.joint_cost, report.overhead.currency)}" if total.joint_cost else "")


def located(group: StragglerGroup) -> str:
    """The places that explain a group, if any: `rack r3: 7 of 8 nodes`."""
    return ", ".join(
        f"{'' if place.kind == NAME else place.kind + ' '}{place.value}{'*' * (place.kind == NAME)}: "
        f"{place.num_slow} of {plural(place.num_nodes, 'node')}"
        for place in group.places
    )


def is_about_clocks(headline: str) -> bool:
    """Whether a headline is about the accuracy of times, not about what happened: these are shown last."""
    return " clock" in headline


def headlines(
    report: Report,
    *,
    waiting: Mapping[str, str],
    reused_runs: int,
    endings: Sequence[str],
    same_rank: Mapping[int, Sequence[str]],
) -> list[str]:
    """Warnings, most important first.

    `waiting`: the barrier of each node that waits at one that never opened. `endings`: how the command ended if no
    training was observed. `same_rank`: the nodes of each rank that several nodes claim.
    """
    lines = []
    coverage, clock = report.coverage, report.clock
    if coverage.nodes_expected and coverage.nodes_heard < coverage.nodes_expected:
        missing = coverage.nodes_expected - coverage.nodes_heard
        share = coverage.nodes_heard / coverage.nodes_expected
        lines.append(
            f"Only {coverage.nodes_heard} of {coverage.nodes_expected} nodes were seen ({share:.1%}): "
            f"{plural(missing, 'missing node')} may be the straggler{'' if missing == 1 else 's'}."
        )
    if coverage.ranks_expected and 0 < coverage.ranks_heard < coverage.ranks_expected:
        lines.append(f"Only {coverage.ranks_heard} of {coverage.ranks_expected} ranks were seen.")
    lines += _stuck(report, waiting)
    if clock.steps:
        lines.append(f"The wall clock was stepped on {', '.join(clock.steps[:3])}; durations are not affected.")
    if clock.left_out:
        named = listed([f"{node} by {_far(off_s)}" for node, off_s in clock.left_out.items()])
        lines.append(f"Wrong clocks, or events of another start: {named}; excluded from all sums.")
    if report.nodes and not plausible(report.startup.zero_ns):
        lines.append("The nodes' clocks were never set: dates are wrong, durations are not.")
    if clock.max_offset_s >= 1:
        bound = f"; after correction within {clock.max_error_s:.3f} s" if clock.max_error_s is not None else ""
        lines.append(f"The nodes' clocks differ by up to {_far(clock.max_offset_s)} from their median{bound}.")
    if coverage.events_lost:
        lines.append(f"{coverage.events_lost} events could not be written (full disk?).")
    if reused_runs > 1:
        lines.append(f"This attempt was started {reused_runs} times on one node; only the last start is shown.")
    counts = report.input.skipped
    lines += [f"{plural(counts[why], what)} {text}" for why, what, text in _SKIPPED if counts.get(why)]
    if same_rank:
        rank, nodes = min(same_rank.items())
        more = f", and {len(same_rank) - 1} more ranks are" if len(same_rank) > 1 else ""
        lines.append(
            f"Rank {rank} is claimed by {len(nodes)} nodes ({', '.join(nodes[:3])}{', ...' * (len(nodes) > 3)}){more}: "
            "wrong RANK variables, two jobs under one name, or a node that was replaced."
        )
    if endings:
        more = f" and {len(endings) - 3} more" if len(endings) > 3 else ""
        lines.append(f"{'; '.join(endings[:3])}{more}.")
    return lines + _unmarked(report)


def _stuck(report: Report, waiting: Mapping[str, str]) -> list[str]:
    """The nodes that did not reach training: first those that others wait for, then those that wait."""
    stuck = [node for node in report.nodes if node.outcome in ("truncated", "failed")]
    missing = sorted((node for node in stuck if node.node not in waiting), key=lambda node: node.own_end_s)
    lines = []
    if missing:
        named = listed([f"{node.node} in {node.last_stage or 'no stage'}" for node in missing])
        lines.append(
            f"{plural(len(missing), 'node')} stopped before training: {named}; "
            "unfinished stages are excluded from medians."
        )
    silent = [node for node in report.nodes if node.outcome == "unobserved"]
    if silent and report.startup.outcome == "training_began":
        named = listed([f"{node.node} after {node.last_stage or 'no stage'}" for node in silent])
        lines.append(
            f"{plural(len(silent), 'node')} showed no first step: {named}; "
            "their time from there until training began is untracked."
        )
    stand = [waiting[node.node] for node in stuck if node.node in waiting]
    if stand:
        what = Counter(stand).most_common(1)[0][0]
        why = "" if missing else ": the cause is a node that sent no events, or the network"
        lines.append(f"{plural(len(stand), 'node')} still waiting at {what} when the logs end{why}.")
    return lines


def _unmarked(report: Report) -> list[str]:
    """What counts as startup, if no training was observed and no hook could have observed it."""
    watched = any(stage.stage.startswith(_FRAMEWORKS) for stage in report.stages)
    ours = any(fact.startswith("run.") for node in report.nodes for fact in node.attrs)
    if report.startup.outcome == "training_began" or watched or not ours:
        return []
    if report.startup.outcome == "unobserved":
        counted = "only the observed stages count as startup"
    elif report.overhead.startup_s:
        counted = "all of this time counts as startup"
    else:
        return []
    return [
        f"Nothing marks the beginning of training, so {counted}: mark it with "
        "`bootseer run --began-pattern`, bootseer.training_began() or `bootseer stage`."
    ]


def _far(off_s: float) -> str:
    """The error of a clock in suitable units: seconds and hours, days or years."""
    days = abs(off_s) / 86_400
    if days < 2:
        return format_seconds(abs(off_s))
    return f"{days:.0f} days" if days < 730 else f"{days / 365.25:.1f} years"


def bucket(num_gpus: int | None) -> str:
    """Name of the bucket, empty when the number of GPUs is unknown or 0."""
    if not num_gpus:
        return ""
    return next(name for limit, name, _ in BUCKETS if num_gpus <= limit)
