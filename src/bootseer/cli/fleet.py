"""`bootseer fleet`, `history` and `watch`: the starts of many jobs, from a service or from folders of events."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bootseer.cli.output import Output, Progress, print_json, table, terminal
from bootseer.cli.verb_parts import json_option
from bootseer.errors import AccessError, NotFoundError, PermanentError, TransientError, UsageError
from bootseer.units import S_PER_H, format_bytes, format_hours, format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable

    from bootseer.report.analysis.live import Moment
    from bootseer.service.database import Database

_ANSWER_S = 30
_LOOK_EVERY_S = 1.0
_MAX_ANSWER = 64 << 20
_service_option = click.option("--service", metavar="URL", envvar="BOOTSEER_SERVICE", show_envvar=True,
                               help="Service to query, with the token $BOOTSEER_SERVICE_TOKEN.")  # fmt: skip


def _since_option(default: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return click.option("--since", default=default, show_default=True, metavar="TIME",
                        help="Include starts since then: 7d, 4w or 2026-11-01.")  # fmt: skip


@click.command("fleet")
@click.argument("logs", nargs=-1, metavar="[FOLDER]...")
@_service_option
@_since_option("7d")
@click.option("--team", metavar="NAME", help="Only this team's starts.")
@click.option("--export", type=click.Choice(["slurm", "drain", "kubernetes"]),
              help="Print the nodes that are last too often, as an sbatch option or as commands.")  # fmt: skip
@json_option("bootseer.fleet/1")
def fleet_command(
    logs: tuple[str, ...], service: str | None, since: str, team: str | None, export: str | None, output: Output
) -> None:
    """Show what startups cost, by team, scale and stage, how much caches help, and which nodes delay the others.

    The default, without FOLDER and --service, are the jobs that ran on this machine.

    \b
    bootseer fleet --since 7d --service https://starts.example:8765
    bootseer fleet --since 4w /shared/spools
    sbatch $(bootseer fleet --since 4w --export slurm) train.sbatch
    """
    found = _ask("fleet", {"since": since, "team": team}, service, logs)
    if export is not None:
        from bootseer.service.over_time import exported

        text = exported(found["lemons"], export)
        output({"nodes": [row["node"] for row in found["lemons"]], "text": text}, *([text] if text else []))
        return
    cost = table("team", "starts", "GPU-hours", "share")
    for row in found["teams"]:
        cost.add_row(row["team"] or "-", f"{row['starts']:,}", _hours(row["gpu_s"]), _share(row["share"]))
    scales = table("GPUs", "starts", "p50", "p95", "p50 before", "paper")
    for row in found["buckets"]:
        then, paper = _seconds(row["p50_before_s"]), _seconds(row["paper_s"])
        scales.add_row(row["bucket"], f"{row['starts']:,}", _seconds(row["p50_s"]), _seconds(row["p95_s"]), then, paper)
    stages = table("stage", "starts", "p50", "p95", "GPU-hours")
    for row in found["stages"][:10]:
        hours = _hours(row["gpu_s"])
        stages.add_row(row["stage"], f"{row['n']:,}", _seconds(row["p50_s"]), _seconds(row["p95_s"]), hours)
    caches = table("cache", "hits", "origin", "a miss costs")
    for row in found["caches"]:
        origin = format_bytes(row["origin_bytes"])
        caches.add_row(row["technique"], _share(row["hit_share"]), origin, _seconds(row["miss_costs_s"]))
    nodes = table("node too often last", "last", "starts", "cost others", "in", right=("last", "starts", "cost others"))
    for row in found["lemons"][:20]:
        lost = format_seconds(row["delay_s"])
        nodes.add_row(row["node"], str(row["last"]), str(row["starts"]), lost, row["stage"])
    seen = found["coverage"]
    summary = f"{seen['starts']:,} starts since {since}; {_share(seen['heard_share'])} of their nodes sent events"
    lost = f", {seen['lines_lost']:,} lines lost" if seen["lines_lost"] else ""
    if unknown := sum(row.get("gpus_unknown", 0) for row in found["teams"]):
        lost += f"; {unknown:,} of the starts without a GPU count, which are not in GPU-hours"
    output(found, summary + lost, *_apart(cost, scales, stages, caches, nodes))


@click.command("history")
@click.argument("job")
@click.argument("logs", nargs=-1, metavar="[FOLDER]...")
@_service_option
@_since_option("90d")
@json_option("bootseer.history/1")
def history_command(job: str, logs: tuple[str, ...], service: str | None, since: str, output: Output) -> None:
    """Show a job's starts, newest first, each with the usual time of the starts before it, and what changed when they
    became slower. Times exclude the wait for the scheduler.

    \b
    bootseer history moe --service https://starts.example:8765
    bootseer history moe --since 4w /shared/spools
    """
    found = _ask("history", {"job": job, "since": since}, service, logs)
    if not found["starts"]:
        raise NotFoundError(f"no start of {job!r} since {since}")
    rows = table(
        "attempt", "began (UTC)", "kind", "nodes", "took", "usual", "last", "", right=("nodes", "took", "usual")
    )
    for row in found["starts"]:
        number = f"{row['attempt']}.{row['restart']}" if row["restart"] else str(row["attempt"])
        began = datetime.fromtimestamp(row["began_ns"] / 1e9, UTC).strftime("%Y-%m-%d %H:%M")
        ended = "open" if row["state"] == "open" else row["outcome"]
        state = "slower" if row["slower"] else "" if row["outcome"] == "training_began" else ended
        took, usual = format_seconds(row["own_s"]), _seconds(row["baseline_s"])
        rows.add_row(number, began, row["kind"], str(row["nodes_heard"]), took, usual, row["last_node"] or "", state)
    output(found, rows, *_changes(found["changed"], found["starts"]))


def _changes(changed: Mapping[str, Any] | None, starts: list[Mapping[str, Any]]) -> Iterator[str]:
    if changed is None:
        return
    number = {row["id"]: row["attempt"] for row in starts}
    yield f"attempt {number[changed['start']]} was slower than usual; compared with {number[changed['before']]}:"
    for one in changed["stages"]:
        yield f"  {one['stage']}: {format_seconds(one['max_s'])}, before {format_seconds(one['before_s'])}"
    for name, one in {**changed["inputs"], "cache": changed["cache_state"]}.items():
        if one["before"] != one["now"]:
            yield f"  {name}: {one['before'] or '-'} became {one['now'] or '-'}"


@click.command("watch")
@click.argument("job")
@click.argument("logs", nargs=-1, metavar="[FOLDER]...")
@_service_option
@click.option("--wait", is_flag=True, help="Wait for a start that has not begun yet.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON document for each change.")
def watch_command(job: str, logs: tuple[str, ...], service: str | None, wait: bool, as_json: bool) -> None:
    """Show which nodes a starting job is waiting for, until training has begun on all of them. Ctrl-C ends it.

    A service also knows which nodes are late: those where a stage takes longer than on 99 % of the nodes of earlier
    starts.

    \b
    bootseer watch moe --service https://starts.example:8765
    bootseer watch moe                  # from this machine's spool, like `bootseer report --follow`
    """
    _check_folders(logs)
    if service is None or logs:
        from bootseer.cli.report import watched
        from bootseer.report.analysis.prepare import Options
        from bootseer.report.read_logs import read_report

        with watched(True, as_json, "auto") as show:
            read_report(logs or (job,), Options(job=job if logs else None), os.environ, watch=show, wait=wait)
        return
    with ExitStack() as stack:
        redraw: Callable[[str, object], None] | None = None
        if not as_json:
            from bootseer.report.render.terminal import following

            redraw = stack.enter_context(following(stack.enter_context(terminal(least=0))))
        _shown_until_over(job, service, wait, redraw)
    for row in () if as_json else _from_service("history", {"job": job}, service)["starts"][:1]:
        ended = (row["outcome"] or "over").replace("_", " ")
        Output("", as_json=False)({}, f"{ended} after {format_seconds(row['own_s'])}")


def _shown_until_over(job: str, service: str, wait: bool, show: Callable[[str, object], None] | None) -> None:
    was_seen, text, shown = False, "", ""
    while True:
        try:
            rows = _from_service("now", {"job": job}, service)["starts"]
        except TransientError as error:  # the service may be restarting
            if not was_seen:
                raise
            if show is not None:
                show(f"{text} ({error})", str(error))
            time.sleep(_LOOK_EVERY_S)
            continue
        if not rows and not was_seen and not wait:
            raise NotFoundError(f"no start of {job!r} is open now; --wait waits for one")
        for row in (row for row in rows[:1] if row["moment"]):
            was_seen = True
            moment = _moment(row["moment"])
            text = f"{job}: {row['line'] if row['late'] else moment.text()}"
            if show is not None:
                show(text, (moment.timeless(), [late["node"] for late in row["late"]]))
            elif row["line"] != shown:
                shown = row["line"]
                print_json({"schema": "bootseer.watch/1", **row})
            if moment.over and row["outcome"] == "training_began":  # otherwise the analysis may still be pending
                return
        if was_seen and not rows:
            return
        time.sleep(_LOOK_EVERY_S)


def _moment(row: dict[str, Any]) -> Moment:
    """The state of the nodes, from a service that may be of another version."""
    import msgspec

    from bootseer.report.analysis.live import Moment

    try:
        return msgspec.convert(row, Moment)
    except msgspec.ValidationError as error:
        raise PermanentError(f"the service has an incompatible version: {error}") from None


def _check_folders(places: tuple[str, ...]) -> None:
    """Raise `UsageError` if the address of a service was given as a folder, or beside one."""
    source = click.get_current_context().get_parameter_source("service")
    if places and source is click.core.ParameterSource.COMMANDLINE:
        raise UsageError("--service and FOLDER exclude each other", hint="give one of them")
    for place in places:
        if place.startswith(("http://", "https://")):
            raise UsageError(f"{place} is not a folder", hint=f"the address of a service: --service {place}")


def _ask(question: str, asked: Mapping[str, str | None], service: str | None, logs: tuple[str, ...]) -> dict[str, Any]:
    _check_folders(logs)
    if service is not None and not logs:
        return _from_service(question, asked, service)
    from bootseer.cli.serve import settings_of

    settings_of(Path(), None)  # raises an error with a hint if the libraries are missing
    from bootseer.service.over_time import OverTime, since_day

    given = {name: value for name, value in asked.items() if value}
    since_day(asked["since"] or "", time.time_ns())  # before the logs are read
    with _filled(logs) as database, database.read() as connection:
        return OverTime(database).answer(connection, question, given)


@contextmanager
def _filled(logs: tuple[str, ...]) -> Iterator[Database]:
    """A temporary database with the starts of these logs."""
    import tempfile

    from bootseer.report.read_logs import read_all
    from bootseer.service.database import Database, default_url
    from bootseer.service.derive import derive_found
    from bootseer.service.upkeep import roll_up

    with Progress("reading") as progress:
        found = read_all(logs, os.environ, progress.show_bytes)
    with (
        tempfile.TemporaryDirectory(prefix="bootseer-") as folder,
        closing(Database.open(default_url(Path(folder)))) as database,
    ):
        for day in derive_found(database, found, time.time_ns()):
            roll_up(database, day)
        yield database


def _from_service(question: str, asked: Mapping[str, str | None], service: str) -> dict[str, Any]:
    """Query a service. Raises `BootseerError` if it cannot be reached or refuses."""
    import json
    from http.client import HTTPException
    from urllib.parse import urlencode

    from bootseer.trace.ship import target

    where = target(service, os.environ)
    query = urlencode({name: value for name, value in asked.items() if value is not None})
    headers = {"Accept": "application/json"} | ({"Authorization": f"Bearer {where.token}"} if where.token else {})
    shown = f"the service at {where.host}:{where.port}"
    try:
        with closing(where.connection(_ANSWER_S)) as connection:
            connection.request("GET", f"{where.path}/api/v1/over-time/{question}?{query}", headers=headers)
            answer = connection.getresponse()
            status, body = answer.status, answer.read(_MAX_ANSWER + 1)
    except (OSError, HTTPException, ValueError) as error:  # the last: a host or path that cannot be encoded
        raise TransientError(f"{shown} does not answer: {getattr(error, 'strerror', None) or error}") from error
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        found = None
    document = found if isinstance(found, dict) else {}
    reason = str(document.get("error", f"status {status}"))[:500]
    if status in (401, 403):
        raise AccessError(f"{shown} denied access: {reason}; set BOOTSEER_SERVICE_TOKEN to a token with the scope read")
    if status in (429, 503):
        raise TransientError(f"{shown}: {reason}")
    if status == 400:
        raise UsageError(f"{shown}: {reason}")
    if status != 200 or document.get("schema") != f"bootseer.{question}/1":
        raise PermanentError(f"{shown} is not a BootSeer service, or has an incompatible version ({reason})")
    return document


def _apart(*tables: Any) -> Iterator[Any]:
    for one in tables:
        if one.row_count:
            yield ""
            yield one


def _seconds(value: float | None) -> str:
    return "-" if value is None else format_seconds(value)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _hours(gpu_s: float | None) -> str:
    return "-" if gpu_s is None else format_hours(gpu_s / S_PER_H)
