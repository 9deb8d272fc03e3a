"""`bootseer ship`: send spools, and logs of jobs without BootSeer, to the service."""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from bootseer.cli.output import Output
from bootseer.cli.verb_parts import Amount, json_option, stop_event
from bootseer.errors import PermanentError, TransientError, UsageError
from bootseer.units import plural

if TYPE_CHECKING:
    from bootseer.report.inputs import Source
    from bootseer.trace.ship import Link, Spools, Target

_WITHIN_S = 60.0


@click.command("ship")
@click.argument("places", nargs=-1, metavar="[DIR|FILE]...")
@click.option("--to", "url", default="", metavar="URL", help="URL of the service (default: $BOOTSEER_SERVICE).")
@click.option("--follow", is_flag=True, help="Keep sending what is written, until a signal ends it.")
@click.option("--within", type=Amount(), default=_WITHIN_S, show_default=True, metavar="S",
              help="How many seconds to retry if the service is unreachable.")  # fmt: skip
@click.option("--job", default="", metavar="NAME",
              help="Send the files as logs of this job, for programs without BootSeer.")  # fmt: skip
@click.option("--quiet", "-q", is_flag=True, help="Print nothing.")
@json_option("bootseer.ship/1")
def ship_command(
    places: tuple[str, ...], url: str, follow: bool, within: float, job: str, quiet: bool, output: Output
) -> None:
    """Send spool folders (default: this user's) or files with event lines to the service. What it has is skipped.

    \b
    bootseer ship --to http://service:8765
    bootseer ship --follow /shared/spool                 # one sender for a rack
    bootseer ship --job llama-7 /var/log/jobs/llama-7/   # logs of a job without BootSeer
    bootseer ship --job llama-7 --follow /var/log/jobs/llama-7/    # while they grow, across rotation and restarts
    kubectl logs -f trainer-0 | bootseer ship --job trainer --follow -
    The token comes from $BOOTSEER_SERVICE_TOKEN, or from the file (0600) that $BOOTSEER_SERVICE_TOKEN_FILE names.
    """
    from bootseer.report import inputs
    from bootseer.trace import spools
    from bootseer.trace.ship import Link, Spools, attempt_folders, target

    where = target(url, os.environ)
    link = Link(where)
    named = list(places) or [spools.default_root(os.environ)]
    # A spool that is followed may be created later.
    folders = [one for one in named if not job and (Path(one).is_dir() or (follow and not Path(one).exists()))]
    folders = [one for one in folders if one != "-"]
    files = [place for place in named if place not in folders]
    if not follow and not any(found for place in folders for found in attempt_folders(place)) and not files:
        raise UsageError(f"no spool files in {', '.join(folders)}", hint="give --job NAME to send logs", exit_code=1)
    sender = Spools(folders, link)
    if follow:
        lines = _follow(sender, files, job, link, where, stop_event())
        waiting = 0
    else:
        until = time.monotonic() + within
        lines = sum(_send_file(source, job, link, until, quiet) for source in inputs.sources(files)) if files else 0
        try:
            waiting = _send_spools(sender, link, until, quiet) if folders else 0
        finally:
            sender.close()
    if waiting and not quiet:
        cause = f": {link.problem}" if link.problem else "; another process is sending them"
        raise TransientError(f"{plural(waiting, 'folder')} could not be sent completely{cause}. The spools keep them")
    if not quiet:
        sent = f"{link.batches:,} batch{'' if link.batches == 1 else 'es'}"
        message = "the next call sends the rest" if follow else "the service has everything"
        output({"batches": link.batches, "lines": lines, "waiting": waiting}, f"sent {sent}; {message}")


def _follow(sender: Spools, files: list[str], job: str, link: Link, where: Target, ended: threading.Event) -> int:
    """Send what is written until a signal, or until standard input ends if nothing else is followed. Returns the number
    of lines sent from standard input."""
    from bootseer.trace.ship import pause_s
    from bootseer.trace.ship_logs import Logs, state_folder

    named = [place for place in files if place != "-"]
    logs = Logs(named, job, link, where, state_folder(os.environ)) if named else None
    piped = _Piped(job, link) if "-" in files else None
    for place in named:
        if not Path(place).exists():
            sys.stderr.write(f"bootseer: {place} does not exist yet\n")
    reported = ""
    try:
        while True:
            is_last = ended.is_set()
            sender.step()
            if logs is not None:
                logs.step()
            is_over = piped is not None and piped.step()
            if link.problem != reported:
                reported = _report(link.problem)
            if is_last or (is_over and len(files) == 1):
                return piped.lines if piped is not None else 0
            ended.wait(pause_s(link))
    finally:
        sender.close()
        if logs is not None:
            logs.close()


def _report(problem: str) -> str:
    """Print the state of the service after it has changed. Returns `problem`."""
    state = f"the service: {problem}; retrying" if problem else "the service is reachable again"
    sys.stderr.write(f"bootseer: {state}\n")
    return problem


class _Piped:
    """Sends standard input as it arrives. A batch that is not accepted is sent again before more is read."""

    def __init__(self, job: str, link: Link) -> None:
        from bootseer.trace.ship import log_headers

        self.lines = 0
        """Number of lines that the service has accepted."""
        self._job, self._link = job, link
        self._more = log_headers(job) if job else {}
        self._sender = _sender(f"stdin-{time.time_ns()}")
        self._sequence = 0
        self._held = b""
        self._is_over = False

    def step(self) -> bool:
        """Send what has arrived. Returns whether the input has ended and was sent completely."""
        from bootseer.report import inputs
        from bootseer.trace.ship import BATCH_BYTES, event_lines

        while True:
            while len(self._held) < BATCH_BYTES and not self._is_over:
                blocks = list(itertools.islice(inputs.new_blocks(inputs.Source("-", None), 0), 1))
                if not blocks:
                    break
                self._held += blocks[0]
                self._is_over = not blocks[0]
            piece = self._held[:BATCH_BYTES]
            if (not self._is_over and b"\n" in piece) or len(self._held) > BATCH_BYTES:
                piece = piece[: piece.rfind(b"\n") + 1] or piece
            elif not self._is_over:
                return False  # the line is not complete yet
            lines = piece if self._job else b"".join(event_lines(piece))
            if lines:
                if time.monotonic() < self._link.not_before:
                    return False
                if not self._link.send(lines, self._sender, self._sequence, self._more):
                    return False
                self._sequence += 1
                self.lines += lines.count(b"\n")
            self._held = self._held[len(piece) :]
            if self._is_over and not self._held:
                return True


def _send_spools(sender: Spools, link: Link, until: float, quiet: bool) -> int:
    """Send until everything is sent or the time is over; the number of folders left."""
    reported = ""
    while True:
        sender.step()
        waiting = sender.waiting()
        if not waiting:
            return 0
        if link.is_refused:
            raise PermanentError(f"the service rejects the events: {link.problem}")
        now = time.monotonic()
        if now >= until:
            return waiting
        if link.problem and not reported and not quiet:
            reported = _report(link.problem)
        time.sleep(min(max(0.1, min(link.not_before - now, 1.0)), until - now))


def _sender(name: str) -> str:
    from bootseer.trace.sinks import safe_name
    from bootseer.trace.spools import fingerprint

    return f"{safe_name(Path(name).name)[:40]}-{fingerprint(f'{os.uname().nodename}:{name}')[:12]}"


def _send_file(source: Source, job: str, link: Link, until: float, quiet: bool) -> int:
    """Send a file's event lines, or with `job` all its lines; returns their number.

    Batches of the same file always have the same sender and sequence numbers, so that the service can recognise
    duplicates.
    """
    from bootseer.trace.ship import log_headers

    name = str(source.path.absolute()) if source.path is not None else f"stdin-{time.time_ns()}"
    sender, more, count, reported = _sender(name), log_headers(job) if job else {}, 0, ""
    for sequence, lines in enumerate(_batches(source, events_only=not job)):
        while not link.send(lines, sender, sequence, more):
            if link.is_refused:
                raise PermanentError(f"{source.name}: the service rejects it: {link.problem}")
            if max(time.monotonic(), link.not_before) >= until:
                raise TransientError(f"{source.name}: not sent completely: {link.problem}")
            if not reported and not quiet:
                reported = _report(link.problem)
            time.sleep(max(link.not_before - time.monotonic(), 0.1))
        count += lines.count(b"\n")
    if not count:
        raise UsageError(f"{source.name}: has no event lines", hint="give --job NAME to send a log", exit_code=1)
    return count


def _batches(source: Source, *, events_only: bool) -> Iterator[bytes]:
    """A file's lines, uncompressed, in batches that are always cut at the same places."""
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
