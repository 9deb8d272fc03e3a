"""`bootseer ship`: send spools, and logs of jobs without BootSeer, to the service."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from bootseer.cli.command import Amount, json_option
from bootseer.cli.output import Output
from bootseer.errors import PermanentError, TransientError, UsageError
from bootseer.units import plural

if TYPE_CHECKING:
    from bootseer.report.inputs import Source
    from bootseer.trace.ship import Link, Spools

_WITHIN_S = 60.0


@click.command("ship")
@click.argument("places", nargs=-1, metavar="[DIR|FILE]...")
@click.option("--to", "url", default="", metavar="URL", help="The service (default: $BOOTSEER_SERVICE).")
@click.option("--follow", is_flag=True, help="Go on with what is written, until a signal ends it.")
@click.option("--within", type=Amount(), default=_WITHIN_S, show_default=True, metavar="S",
              help="How long a service that is away is waited for.")  # fmt: skip
@click.option("--job", default="", metavar="NAME",
              help="Send files as the log of this job, for the parser of logs: programs without BootSeer.")  # fmt: skip
@click.option("--quiet", "-q", is_flag=True, help="Say nothing.")
@json_option("bootseer.ship/1")
def ship_command(
    places: tuple[str, ...], url: str, follow: bool, within: float, job: str, quiet: bool, output: Output
) -> None:
    """Send to the service what it has not got yet: folders of spools (default: this user's), or files with event lines.

    \b
    bootseer ship --to http://service:8765
    bootseer ship --follow /shared/spool                 # one sender for a rack
    bootseer ship --job llama-7 /var/log/jobs/llama-7/   # logs of a job without BootSeer
    kubectl logs trainer-0 | bootseer ship --job trainer -
    The token comes from $BOOTSEER_SERVICE_TOKEN, or from the file (0600) that $BOOTSEER_SERVICE_TOKEN_FILE names.
    """
    from bootseer.report import inputs
    from bootseer.trace import spools
    from bootseer.trace.ship import Link, Spools, attempt_folders, target

    link = Link(target(url, os.environ))
    named = list(places) or [spools.default_root(os.environ)]
    folders = [] if job else [place for place in named if Path(place).is_dir()]
    files = [place for place in named if place not in folders]
    if not follow and not any(found for place in folders for found in attempt_folders(place)) and not files:
        raise UsageError(f"no spool files in {', '.join(folders)}", hint="give --job NAME to send logs", exit_code=1)
    ended = threading.Event()
    if follow:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: ended.set())
    until = float("inf") if follow else time.monotonic() + within
    lines = sum(_send_file(source, job, link, ended, until) for source in inputs.sources(files)) if files else 0
    sender = Spools(folders, link)
    try:
        waiting = _send_spools(sender, link, ended, until, follow=follow) if folders else 0
    finally:
        sender.close()
    if waiting and not quiet and not follow:
        why = f": {link.problem}" if link.problem else "; another process sends them"
        raise TransientError(f"{plural(waiting, 'folder')} could not be sent to the end{why}. The spools keep it all")
    if not quiet:
        sent = f"{plural(link.batches, 'batch')[:-1]}es" if link.batches != 1 else "1 batch"
        output({"batches": link.batches, "lines": lines, "waiting": waiting}, f"sent {sent}; the service has it all")


def _send_spools(sender: Spools, link: Link, ended: threading.Event, until: float, *, follow: bool) -> int:
    """Send until all is sent, or it is late; the number of folders that are left."""
    from bootseer.trace.ship import pause_s

    said = ""
    while True:
        sender.step()
        waiting = 0 if follow else sender.waiting()
        if not follow and not waiting:
            return 0
        if link.is_refused and not follow:
            raise PermanentError(f"the service refuses the events: {link.problem}")
        if follow and link.problem != said:
            said = link.problem
            sys.stderr.write(f"bootseer: {f'the service: {said}; trying again' if said else 'the service is back'}\n")
        now = time.monotonic()
        if now >= until:
            return waiting
        wait_s = pause_s(link) if follow else max(0.1, min(link.not_before - now, 1.0))
        if ended.wait(min(wait_s, until - now)):
            return 0


def _send_file(source: Source, job: str, link: Link, ended: threading.Event, until: float) -> int:
    """Send a file's event lines, or with `job` all its lines for the parser; how many. The same file is sent under the
    same numbers, so that the service knows it again."""
    from urllib.parse import quote

    from bootseer.trace.sinks import safe_name
    from bootseer.trace.spools import fingerprint

    name = str(source.path.absolute()) if source.path is not None else f"stdin-{time.time_ns()}"
    sender = f"{safe_name(Path(name).name)[:40]}-{fingerprint(f'{os.uname().nodename}:{name}')[:12]}"
    more = {"X-Bootseer-Kind": "log", "X-Bootseer-Job": quote(job)} if job else {}
    count = 0
    for sequence, lines in enumerate(_batches(source, events_only=not job)):
        while not link.send(lines, sender, sequence, more):
            if link.is_refused:
                raise PermanentError(f"{source.name}: the service refuses it: {link.problem}")
            if time.monotonic() >= until or ended.wait(max(link.not_before - time.monotonic(), 0.1)):
                raise TransientError(f"{source.name}: not sent to its end: {link.problem}")
        count += lines.count(b"\n")
    if not count:
        raise UsageError(f"{source.name}: no event lines in it", hint="give --job NAME to send a log", exit_code=1)
    return count


def _batches(source: Source, *, events_only: bool) -> Iterator[bytes]:
    """A file's lines, unpacked, in the size of a batch; always cut in the same places."""
    from bootseer.report import inputs
    from bootseer.trace.ship import BATCH_BYTES, event_lines

    held = bytearray()
    for block in itertools.chain(inputs.blocks(source), [b""]):
        held += block
        while len(held) > BATCH_BYTES or (held and not block):
            is_last = not block and len(held) <= BATCH_BYTES
            cut = len(held) if is_last else held.rfind(b"\n", 0, BATCH_BYTES) + 1 or BATCH_BYTES
            piece = bytes(held[:cut])
            del held[:cut]
            if lines := b"".join(event_lines(piece)) if events_only else piece:
                yield lines
