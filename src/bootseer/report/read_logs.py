"""From the names on a command line to a report: find the logs, scan and analyse them."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches

from bootseer.errors import UsageError
from bootseer.logs import logger
from bootseer.report import inputs
from bootseer.report.analysis.compose import analyse
from bootseer.report.analysis.live import Live, Moment
from bootseer.report.analysis.prepare import Options
from bootseer.report.foreign.parser import UNKNOWN_JOB
from bootseer.report.log_scan import Growing, Progress, scan
from bootseer.report.model import Report
from bootseer.report.scanned import Scanned
from bootseer.store import addresses
from bootseer.trace import spools
from bootseer.units import plural

_LOG = logger(__name__)
_LOOK_EVERY_S = 1.0
_NEAR = 3
"""Number of similar job names in an error message."""
_ATTEMPTS = re.compile(r"(?P<name>.+)@(?P<first>[0-9]{1,18})(?:\.\.(?P<last>[0-9]{1,18}))?", re.DOTALL)
"""A number with more digits is not an attempt, but part of the name."""


def read_report(
    places: Sequence[str],
    options: Options,
    env: Mapping[str, str],
    *,
    patterns: Sequence[tuple[str, re.Pattern[bytes]]] = (),
    watch: Callable[[Moment], None] | None = None,
    wait: bool = False,
    progress: Progress | None = None,
) -> Report:
    """The report on `places`: paths, `-`, or jobs of this machine; by default the last job of this machine.

    `progress` is called with the number of bytes read so far; `watch` about once a second during the start, and the
    report follows at its end. With `wait`, wait for a job that has not started yet; otherwise that is an error. Raises
    `UsageError` if there is nothing to report.
    """
    paths = [] if wait else _paths(places, env)
    if watch is None:
        found = _checked(scan(inputs.sources(paths), patterns=patterns, job=options.job, progress=progress))
    else:
        found = _checked(_follow(places, options, env, Growing(patterns, options.job), watch))
    report = analyse(found.events, options, facts=found.facts, read=found.input())
    one = report.startup
    _LOG.info(
        "job %r, attempt %d, restart %d, of %d startups in the input: %s, %d nodes, %d ranks",
        *(one.job, one.attempt, one.restart, len(report.startups), one.outcome, one.num_nodes, one.num_ranks),
    )
    return report


def read_runs(place: str, env: Mapping[str, str], progress: Progress | None = None) -> list[Report]:
    """The reports of one side of a comparison: a place as for `read_report`, `JOB@ATTEMPT`, or `JOB@FIRST..LAST`."""
    match = None if inputs.exists(place) else _ATTEMPTS.fullmatch(place)
    found = _checked(scan(inputs.sources(_paths([match["name"] if match else place], env)), progress=progress))
    runs = [found.events]
    if match and found.events:
        first, last = int(match["first"]), int(match["last"] or match["first"])
        attempts = sorted({event.attempt for event in found.events})
        runs = [[e for e in found.events if e.attempt == one] for one in attempts if first <= one <= last]
        if not runs:
            there = ", ".join(map(str, attempts[:10])) + (", ..." if len(attempts) > 10 else "")
            raise UsageError(f"{place}: no such attempt", hint=f"its attempts: {there}")
    reports = [analyse(events, Options(), facts=found.facts, read=found.input()) for events in runs]
    if not reports[0].nodes:
        raise UsageError(
            f"{place!r}: contains no times, so there is no startup to compare",
            hint="collect logs with time stamps, or start the job with `bootseer run`",
            exit_code=1,
        )
    return reports


def read_all(places: Sequence[str], env: Mapping[str, str], progress: Progress | None = None) -> Scanned:
    """The events of all jobs in these places; by default of all jobs that have run on this machine."""
    root = spools.default_root(env)
    paths = _paths(places or ([root] if spools.job_names(root) else []), env)
    return _checked(scan(inputs.sources(paths), progress=progress))


def _checked(found: Scanned) -> Scanned:
    """What was read. Raises `UsageError` if there is nothing to report."""
    _LOG.info(
        "read %d files, %d bytes, %d lines: %d events, %d facts; skipped: %s",
        *(found.files, found.bytes, found.lines, len(found.events), len(found.facts), dict(found.skipped) or "nothing"),
    )
    if not found.events and (not found.facts or found.skipped["version"]):
        raise _nothing(found)
    if {event.job for event in found.events} == {UNKNOWN_JOB}:
        found.events = [event._replace(job="unnamed") for event in found.events]
    return found


def _follow(
    places: Sequence[str],
    options: Options,
    env: Mapping[str, str],
    growing: Growing,
    watch: Callable[[Moment], None],
) -> Scanned:
    """Read what is written until the start is over, waiting for jobs and folders that do not exist yet."""
    live = Live(options.job, options.attempt, options.num_nodes)
    root = spools.default_root(env)
    while True:
        places = places or [place for place in (spools.latest(root),) if place]
        live.feed(growing.look(source for place in places for source in _sources_now(place, options.attempt, env)))
        moment = live.moment(time.time_ns())
        watch(moment)
        if moment.over or growing.over:
            return growing.finish()
        time.sleep(_LOOK_EVERY_S)


def _sources_now(place: str, attempt: int | None, env: Mapping[str, str]) -> list[inputs.Source]:
    """The current files of a place; none for a job that has not started, and while a log is rotated."""
    if place == inputs.STDIN or os.path.isfile(place):  # noqa: PTH113 - pathlib raises for a name that is too long
        return inputs.sources([place])
    folder = place if _is_path(place, env) else spools.find_job(spools.default_root(env), place)
    if folder is None:
        return []
    return inputs.inside(spools.newest_attempt(folder) if attempt is None else folder)


def _is_path(place: str, env: Mapping[str, str]) -> bool:
    """Whether a place is a path. The bare name of a folder is rather that of a job: a project's folder and its jobs
    often have the same name."""
    if os.sep not in place and os.path.isdir(place):  # noqa: PTH112 - pathlib raises for a name that is too long
        with suppress(UsageError):  # a user without a home has no jobs
            return spools.find_job(spools.default_root(env), place) is None
    return place == inputs.STDIN or inputs.exists(place)


def _paths(places: Sequence[str], env: Mapping[str, str]) -> list[str]:
    """The paths of these places, by default that of the latest job. Raises `UsageError` for those that do not exist."""
    return [_resolve(place, env) for place in places] or [_latest(env)]


def _resolve(place: str, env: Mapping[str, str]) -> str:
    if _is_path(place, env):
        return place
    root = spools.default_root(env)
    job = spools.find_job(root, place)
    if job is None:
        shown = addresses.shown(place) if "://" in place else place
        names = spools.job_names(root)
        near = get_close_matches(place, names, _NEAR) or names[:_NEAR]
        hint = "give log files, a folder, - for standard input, or the name given to `bootseer run --job`"
        if near:
            hint = f"jobs here: {', '.join(near)}{', ...' * (len(names) > len(near))}"
        raise UsageError(
            f"{shown}: no such file, and no job of this name has run on this machine",
            hint=f"{hint}; `bootseer report --follow --wait` waits for one",
        )
    _LOG.info("job %r of this machine: %s", place, job)
    return job


def _latest(env: Mapping[str, str]) -> str:
    root = spools.default_root(env)
    folder = spools.latest(root)
    if folder is None:
        raise UsageError(
            "no job has run under `bootseer run` on this machine yet",
            hint="name a log to read, or start a job: bootseer run -- python train.py",
        )
    return folder


def _nothing(found: Scanned) -> UsageError:
    newer = found.skipped.get("version", 0)
    if newer:
        return UsageError(
            f"all {plural(newer, 'event')} were written by a newer BootSeer, which this version cannot read",
            hint="upgrade: pip install -U bootseer",
            exit_code=1,
        )
    read = f"{plural(found.files, 'file')}, {plural(found.lines, 'line')}"
    damaged = ", ".join(f"{count} {reason.replace('_', ' ')}" for reason, count in sorted(found.skipped.items()))
    return UsageError(
        f"read {read}: no events, and no lines that BootSeer recognises{f' ({damaged})' if damaged else ''}",
        hint="start the job with `bootseer run -- COMMAND`, then report on its spool or its log",
        exit_code=1,
    )
