"""`bootseer ship`: send spools, and logs of jobs without BootSeer, to the service."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import click

from bootseer.cli.output import Output
from bootseer.cli.verb_parts import Number, json_option, stop_event
from bootseer.errors import PermanentError, TransientError, UsageError
from bootseer.launch.supervise import say
from bootseer.logs import set_up
from bootseer.report import inputs
from bootseer.report.inputs import Source
from bootseer.trace import spools
from bootseer.trace.event import fingerprint
from bootseer.trace.ship import (
    BATCH_BYTES,
    REQUEST_S,
    Link,
    Spools,
    attempt_folders,
    event_lines,
    log_headers,
    pause_s,
    target,
)
from bootseer.trace.ship_logs import Logs, state_folder
from bootseer.trace.sinks import safe_name
from bootseer.units import plural


@click.command("ship")
@click.argument("places", nargs=-1, metavar="[DIR|FILE]...")
@click.option("--to", "url", default="", metavar="URL", help="URL of the service (default: $BOOTSEER_SERVICE).")
@click.option("--follow", is_flag=True, help="Keep sending what is written, until a signal ends it.")
@click.option("--within", type=Number(0), default=60.0, show_default=True, metavar="S",
              help="How many seconds to retry if the service is unreachable (--follow: no limit).")  # fmt: skip
@click.option("--job", default="", metavar="NAME",
              help="Send the named files as logs of this job, for programs without BootSeer.")  # fmt: skip
@click.option("--quiet", "-q", is_flag=True, help="Print nothing.")
@json_option("bootseer.ship/1")
def ship_command(
    places: tuple[str, ...], url: str, follow: bool, within: float, job: str, quiet: bool, output: Output
) -> None:
    """Send spool folders (default: this user's) or files with event lines to the service, except what it already has.

    \b
    bootseer ship --to http://service:8765
    bootseer ship --follow /shared/spool                 # one sender for a rack
    bootseer ship --job llama-7 /var/log/jobs/llama-7/   # logs of a job without BootSeer
    bootseer ship --job llama-7 --follow /var/log/jobs/llama-7/    # while they grow, across rotation and restarts
    kubectl logs -f trainer-0 | bootseer ship --job trainer --follow -
    The token comes from $BOOTSEER_SERVICE_TOKEN, or from the file (0600) that $BOOTSEER_SERVICE_TOKEN_FILE names.
    """
    if job and not places:
        raise UsageError(
            "--job needs the files of that job's log", hint="a spool is named by its folder, without --job"
        )
    # A request that is not answered ends within the limit, too.
    link = Link(target(url, os.environ), min(max(within, 1.0), REQUEST_S))
    named = list(places) or [spools.default_root(os.environ)]
    # A spool that is followed may be created later.
    folders = [one for one in named if not job and (Path(one).is_dir() or (follow and not Path(one).exists()))]
    folders = [one for one in folders if one != "-"]
    files = [place for place in named if place not in folders]
    if not follow and not any(found for place in folders for found in attempt_folders(place)) and not files:
        raise UsageError(f"no spool files in {', '.join(folders)}", hint="give --job NAME to send logs", exit_code=1)
    sender, damaged = Spools(folders, link), list[str]()
    if follow:
        set_up({"BOOTSEER_LOG": "warning", **os.environ})  # which logs cannot be read, or were cut
        lines = _follow(sender, files, job, link, stop_event(), alone=named == ["-"])
        waiting = 0
    else:
        lines = sum(_send_file(source, job, link, within, quiet, damaged) for source in inputs.sources(files))
        try:
            waiting = _send_spools(sender, link, within, quiet) if folders else 0
        finally:
            sender.close()
    if waiting and quiet:
        raise SystemExit(1)
    if waiting:
        other = f" within {within:g} s; another process may be sending them"
        cause = f" to {link.service}: {link.problem}" if link.problem else other
        raise TransientError(f"{plural(waiting, 'folder')} could not be sent completely{cause}. The spools keep them")
    if not quiet:
        has = "what is before the damage" if damaged else "everything"
        rest = "the next call sends the rest" if follow else f"the service has {has}"
        sent = f"sent {plural(link.batches, 'batch')}; {rest}"
        output({"batches": link.batches, "lines": lines, "waiting": waiting}, sent)
    if damaged:
        raise SystemExit(1)


def _follow(sender: Spools, files: list[str], job: str, link: Link, ended: threading.Event, *, alone: bool) -> int:
    """Send what is written until a signal, or until standard input ends if it is followed `alone`. Returns the number
    of lines sent from standard input."""
    named = [place for place in files if place != "-"]
    logs = Logs(named, job, link, state_folder(os.environ)) if named else None
    stdin = inputs.Source("-", None)
    piped = _Lines(f"stdin-{time.time_ns()}", lambda: next(inputs.new_blocks(stdin, 0), None), job, link)
    for place in named:
        if not Path(place).exists():
            say(f"{place} does not exist yet")
    reported = ""
    try:
        while True:
            is_last = ended.is_set()
            sender.step()
            if logs is not None:
                logs.step()
            is_over = "-" in files and piped.step()
            if link.problem != reported:
                reported = _report(link)
            if is_last or (is_over and alone):
                return piped.lines
            ended.wait(pause_s(link))
    finally:
        sender.close()
        if logs is not None:
            logs.close()


def _report(link: Link) -> str:
    """Print the state of the service after it has changed. Returns the problem."""
    say(f"the service {link.service}: {link.problem}; retrying" if link.problem else "the service is reachable again")
    return link.problem


class _Lines:
    """Sends a file, or standard input as it arrives, in batches. One that is not accepted is sent again before more is
    read.

    A file is always cut at the same places and has the same sender and sequence numbers, so that the service can
    recognise duplicates.
    """

    def __init__(self, name: str, next_block: Callable[[], bytes | None], job: str, link: Link) -> None:
        """`next_block`: empty at the end, None if nothing is there yet. With `job`, all lines are sent as its log,
        otherwise only events."""
        self.lines = 0
        """Number of lines that the service has accepted."""
        self._next_block, self._job, self._link = next_block, job, link
        self._more = log_headers(job) if job else {}
        self._sender = f"{safe_name(Path(name).name)[:40]}-{fingerprint(f'{os.uname().nodename}:{name}')[:12]}"
        self._sequence = 0
        self._held = bytearray()
        self._is_over = False

    def step(self) -> bool:
        """Send what is there. Returns whether all of the input, to its end, was accepted."""
        while piece := self._piece():
            if lines := piece if self._job else b"".join(event_lines(piece)):
                if time.monotonic() < self._link.not_before:
                    return False
                if not self._link.send(lines, self._sender, self._sequence, self._more):
                    return False
                self._sequence += 1
                self.lines += lines.count(b"\n") + (not lines.endswith(b"\n"))
            del self._held[: len(piece)]
        return self._is_over

    def _piece(self) -> bytes:
        """The next batch, of whole lines; empty if there is none yet, and at the end."""
        while len(self._held) <= BATCH_BYTES and not self._is_over:
            block = self._next_block()
            if block is None:
                break
            self._held += block
            self._is_over = not block
        if len(self._held) > BATCH_BYTES:
            end = self._held.rfind(b"\n", 0, BATCH_BYTES) + 1 or BATCH_BYTES
        else:
            end = len(self._held) if self._is_over else self._held.rfind(b"\n") + 1
        return bytes(self._held[:end])


def _send_spools(sender: Spools, link: Link, within: float, quiet: bool) -> int:
    """Send what is in the spools; the number of folders left."""

    def step() -> bool:
        sender.step()
        return not sender.waiting()

    return 0 if _sent(step, "the events", link, within, quiet) else sender.waiting()


def _send_file(source: Source, job: str, link: Link, within: float, quiet: bool, damaged: list[str]) -> int:
    """Send a file's event lines, or with `job` all its lines; returns their number. A file that is truncated or damaged
    is sent up to there, and its name added to `damaged`."""
    name = str(source.path.absolute()) if source.path is not None else f"stdin-{time.time_ns()}"
    blocks = _blocks(source, damaged)
    sent = _Lines(name, lambda: next(blocks), job, link)
    if not _sent(sent.step, source.name, link, within, quiet):
        raise TransientError(f"{source.name}: not sent completely: {link.problem}")
    if not sent.lines:
        raise UsageError(f"{source.name}: has no event lines", hint="give --job NAME to send a log", exit_code=1)
    return sent.lines


def _sent(step: Callable[[], bool], what: str, link: Link, within: float, quiet: bool) -> bool:
    """Call `step` until it has sent everything; False if the service has accepted nothing for `within` seconds."""
    accepted, until, reported = link.batches, time.monotonic() + within, ""
    while not step():
        if link.is_refused:
            raise PermanentError(f"the service rejects {what}: {link.problem}")
        if accepted != link.batches:
            accepted, until = link.batches, time.monotonic() + within
        if max(time.monotonic(), link.not_before) >= until:
            return False
        if link.problem and not reported and not quiet:
            reported = _report(link)
        time.sleep(max(link.not_before - time.monotonic(), 0.1))
    return True


def _blocks(source: Source, damaged: list[str]) -> Iterator[bytes]:
    """The uncompressed content, and an empty block at its end."""
    try:
        yield from inputs.blocks(source)
    except inputs.Cut:
        damaged.append(source.name)
        say(f"{source.name}: truncated or damaged; what is before the damage is sent")
    yield b""
