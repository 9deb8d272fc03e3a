"""`bootseer serve`: the service that stores and shows the starts of all jobs, and its tokens."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

from bootseer import logs
from bootseer.cli.output import Output, Progress, table
from bootseer.cli.pattern import of_stages
from bootseer.cli.verb_parts import Count, Group, json_option, listen_address, price_options
from bootseer.errors import NotFoundError, UsageError, needs_extra
from bootseer.launch.interrupt import interruptible
from bootseer.launch.supervise import say

if TYPE_CHECKING:
    from bootseer.service.access import Tokens
    from bootseer.service.app import Settings

_LEAST_TOKEN = 32
_VERBS = {
    "reindex": ("serve", "Rebuild starts and reports from the raw lines."),
    "token": ("serve", "Manage access tokens."),
}
_TOKEN_VERBS = {
    "add": ("serve", "Create a token and show it once."),
    "list": ("serve", "List tokens, without their secrets."),
    "revoke": ("serve", "Revoke a token."),
}


_raw_option = click.option("--raw", metavar="STORE", help="Store of raw lines (default: in the data folder).")


def database_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Options for the database of the service, the first arguments of `settings_of`."""
    database = click.option("--database", metavar="URL", envvar="BOOTSEER_SERVICE_DATABASE", show_envvar=True,
                            help="Database, as postgresql://... (default: SQLite in the data folder).")  # fmt: skip
    data = click.option("--data", type=click.Path(path_type=Path), metavar="DIR",
                        help="Data folder (default: $BOOTSEER_SERVICE_DATA, else of machine or user).")  # fmt: skip
    return data(database(function))


_pattern_option = click.option(
    "--pattern", "patterns", multiple=True, metavar="STAGE=REGEX|@FILE",
    help="Pattern of a stage in logs of jobs without BootSeer, as for `bootseer report`; may be repeated.",
)  # fmt: skip


def settings_of(data: Path | None, database: str | None, raw: str | None = None, **more: Any) -> Settings:
    """The settings of a service with this data. Raises `UsageError` if its libraries are not installed."""
    with needs_extra("service", "the service"):
        from bootseer.service.app import Settings, default_data
    return Settings((data or default_data(os.environ)).absolute(), database or "", raw or "", **more)


@contextmanager
def _tokens(**place: Any) -> Iterator[Tokens]:
    settings = settings_of(**place)
    from bootseer.service.access import Tokens
    from bootseer.service.database import Database

    with closing(Database.open(settings.made().database_url)) as opened:
        yield Tokens(opened)


@click.group("serve", cls=Group, verbs=_VERBS, invoke_without_command=True)
@database_options
@_raw_option
@click.option(
    "--listen",
    metavar="HOST:PORT",
    default="127.0.0.1:8765",
    show_default=True,
    help="Address to listen on; other than on loopback, clients need tokens. Port 0: any free one.",
)
@click.option("--tls-cert", "certificate", type=click.Path(path_type=Path), metavar="FILE",
              help="Serve https with this certificate.")  # fmt: skip
@click.option("--tls-key", "key", type=click.Path(path_type=Path), metavar="FILE",
              help="Its private key, if in a separate file.")  # fmt: skip
@click.option("--workers", type=Count(1, 64), default=1, show_default=True, help="Processes that analyse starts.")
@click.option("--alert-to", multiple=True, metavar="FORM=URL", envvar="BOOTSEER_ALERT_TO", show_envvar=True,
              help="Send alerts to slack=URL or alertmanager=URL; may be repeated.")  # fmt: skip
@_pattern_option
@click.option("--raw-days", type=Count(1, 1_000_000), default=14, show_default=True, help="Days to keep raw lines.")
@price_options
@click.option("--proxy-from", multiple=True, metavar="ADDRESS",
              help="Trust a proxy at this address or network to name the user; may be repeated.")  # fmt: skip
@click.option("--proxy-header", default="X-Forwarded-User", show_default=True, metavar="NAME",
              help="Header in which that proxy names the user.")  # fmt: skip
@click.pass_context
def serve_command(
    ctx: click.Context,
    /,
    listen: str,
    alert_to: tuple[str, ...],
    patterns: tuple[str, ...],
    price_per_gpu_hour: float | None,
    proxy_from: tuple[str, ...],
    **more: Any,
) -> None:
    """Collect, analyse and show the starts of all jobs. Ctrl-C or SIGTERM ends it.

    \b
    bootseer serve
    bootseer serve --database postgresql://bootseer@db/bootseer --raw s3://bucket/lines
    bootseer serve token add --scope ingest --team llm
    bootseer serve --listen 0.0.0.0:8765 --tls-cert host.pem --tls-key host.key
    Jobs send with: bootseer run --trace-to service=http://HOST:8765 -- ...
    """
    logs.set_up({"BOOTSEER_LOG": "warning", **os.environ})  # why nothing is stored or analysed belongs in the journal
    if ctx.invoked_subcommand is not None:
        for option in ctx.command.params:  # the verb would not see it: another database, other days to keep
            if ctx.get_parameter_source(option.name or "") == click.core.ParameterSource.COMMANDLINE:
                name = option.opts[0]
                raise UsageError(f"{name} must come after the verb", hint=f"bootseer serve VERB {name} ...")
        return
    if more["key"] is not None and more["certificate"] is None:
        raise UsageError("--tls-key needs --tls-cert")
    address, price = listen_address(listen, 8765, least=0), price_per_gpu_hour or 0.0
    settings = settings_of(**more, listen=address, price=price, patterns=tuple(of_stages(patterns)))
    from bootseer.service.access import networks
    from bootseer.service.alerts import webhook
    from bootseer.service.app import serve

    settings = replace(settings, proxies=networks(proxy_from), alert_to=tuple(map(webhook, alert_to)))
    serve(settings, lambda address: say(f"the service is at {address} (data in {settings.data})"))


@click.command("reindex")
@database_options
@_raw_option
@_pattern_option
@json_option("bootseer.reindex/1")
def reindex_command(patterns: tuple[str, ...], output: Output, **place: Any) -> None:
    """Rebuild starts, reports and sums from the raw lines, also into an empty database. Stop the service first.

    Tokens, alerts, and starts whose raw lines have been deleted are kept unchanged.
    """
    settings = settings_of(**place).made()
    from bootseer.service.app import locked, opened
    from bootseer.service.upkeep import reindex

    with locked(settings), opened(settings) as (database, lines), interruptible(), Progress("deriving") as progress:
        found = reindex(database, lines, progress.show, of_stages(patterns))
    output(found, f"{found['starts']} starts of {found['attempts']} attempts, from {found['batches']} batches")


@click.group("token", cls=Group, verbs=_TOKEN_VERBS)
def token_command() -> None:
    """Access tokens, with the scope to send lines (ingest), to read everything (read), or for both (admin).

    \b
    bootseer serve token add --scope ingest --team llm --note "rack 7"
    bootseer serve token list
    bootseer serve token revoke 3
    """


@click.command("add")
@database_options
@click.option("--scope", type=click.Choice(["ingest", "read", "admin"]), required=True, help="What it allows.")
@click.option("--team", default="", metavar="NAME", help="Team of the jobs that send with it.")
@click.option("--note", default="", metavar="TEXT", help="Note on its purpose.")
@click.option("--from", "file", type=click.File(encoding="ascii", errors="replace"), metavar="FILE",
              help="Add the token in this file instead; no effect if it exists already.")  # fmt: skip
@json_option("bootseer.token/1")
def add_command(scope: str, team: str, note: str, file: IO[str] | None, output: Output, **place: Any) -> None:
    """Create a token and print it. It cannot be shown again: the database stores only its digest."""
    given = file.read(4096).strip() if file is not None else ""
    if file is not None and not (len(given) >= _LEAST_TOKEN and given.isprintable() and "\ufffd" not in given):
        raise UsageError(
            f"{file.name}: a token has at least {_LEAST_TOKEN} printable characters", hint="openssl rand -hex 32"
        )
    with _tokens(**place) as tokens:
        number, secret = tokens.add(scope, team, note, given)
    if given:
        output({"id": number, "scope": scope, "team": team}, f"token {number}, scope {scope}")
        return
    if not output.as_json:
        say(f"token {number}, scope {scope}; store it safely, it is not shown again:")
    output({"id": number, "scope": scope, "team": team, "token": secret}, secret)


@click.command("list")
@database_options
@json_option("bootseer.tokens/1")
def list_command(output: Output, **place: Any) -> None:
    """List the tokens, oldest first."""
    with _tokens(**place) as tokens:
        found = tokens.all()
    rows = table("id", "scope", "team", "made", "last used", "state", "note", right=("id",))
    for one in found:
        state = "revoked" if one.revoked_ns is not None else "valid"
        rows.add_row(str(one.id), one.scope, one.team, _day(one.created_ns), _day(one.last_used_ns), state, one.note)
    output({"tokens": [one._asdict() for one in found]}, rows, *([] if found else ["no tokens"]))


def _day(ns: int) -> str:
    return datetime.fromtimestamp(ns / 1e9, UTC).strftime("%Y-%m-%d %H:%M") if ns else "-"


@click.command("revoke")
@database_options
@click.argument("number", type=Count(1, 1 << 31), metavar="ID")
def revoke_command(number: int, **place: Any) -> None:
    """Revoke the token with this number (see `bootseer serve token list`). It takes effect within seconds."""
    with _tokens(**place) as tokens:
        if not tokens.revoke(number):
            raise NotFoundError(f"there is no token {number}")
