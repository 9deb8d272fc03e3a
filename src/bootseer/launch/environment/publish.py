"""Publish a setup's changes as a snapshot, beside the command: validate, write, add to the catalog.

    environment_publish     the outcome: published, or why not

A background process with low priority does it, so that the command does not wait. It validates in a view like that of a
restored start, not in the job's. The end of the run waits for it for a bounded time, with a message: the files that it
reads are deleted with the run.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bootseer import __version__
from bootseer.env.capturing.walk import LeftOut
from bootseer.env.changes import Change
from bootseer.env.document import MAX_LEFT_OUT, Daemon, EnvironmentDocument, Trust
from bootseer.env.keys.key import RequestKey
from bootseer.env.life import unsafe
from bootseer.env.life.catalog import Catalog, NodeCatalog
from bootseer.env.life.decide import Decision
from bootseer.env.life.unsafe import UnsafeError
from bootseer.env.restoring.roots import Division
from bootseer.env.snapshot.secret_check import SecretCheck, raise_if_secret
from bootseer.env.snapshot.write import Written, write_snapshot
from bootseer.errors import BootseerError
from bootseer.launch.background import Background, Send, start_background
from bootseer.launch.environment.setup import SetupResult
from bootseer.launch.environment.task import UNPINNED_AGE_S, Task
from bootseer.launch.supervise import say
from bootseer.logs import logger
from bootseer.trace.event import INSTANT
from bootseer.units import format_bytes, plural

EVENT = "environment_publish"
_NICENESS = 10
_log = logger(__name__)


@dataclass(frozen=True, slots=True)
class Publication:
    """A successful setup that is to be published."""

    key: RequestKey
    decision: Decision
    """Why it was built, and which snapshot it replaces."""
    changes: Sequence[Change]
    root: Path
    """Where the whole tree can be read as the setup left it."""
    division: Division | None
    """Of the changes on a host; None in an image, where all of them are one layer."""
    done: SetupResult
    trust: Trust
    left_out: LeftOut
    """What the rules left out of the changes."""
    daemons: tuple[Daemon, ...]
    """Processes to start again at a restore."""
    validate: Callable[[], None]
    """`setup.check_environment`; called in the background process."""


class Publishing:
    """A publication in progress."""

    def __init__(self, task: Task, background: Background) -> None:
        self._task = task
        self._background = background

    def finish(self) -> None:
        """Wait for it, at most `publish_s`, and report the outcome."""
        background = self._background
        began_s = time.monotonic()
        if not background.wait(0.2):
            limit_s = self._task.options.publish_s
            say("the environment's snapshot is still being published; waiting for it (Ctrl-C cancels it)")
            if not background.wait(limit_s):
                background.stop()
                reason = f"it took longer than {limit_s:g} s after the command (BOOTSEER_ENV_PUBLISH)"
                report_outcome(self._task, False, reason)
                return
            say(f"waited {time.monotonic() - began_s:.1f} s for the environment's snapshot")
        self._report()

    def stop(self) -> None:
        self._background.stop()
        self._report("it was cancelled")

    def _report(self, otherwise: str = "the publishing process died") -> None:
        messages = self._background.messages()
        for line in (str(one["say"]) for one in messages if "say" in one):
            say(line)
        result = next((one for one in messages if "published" in one), None)
        error = next((one["error"] for one in messages if "error" in one), otherwise)
        if result is None:
            report_outcome(self._task, False, str(error))
        else:
            report_outcome(self._task, bool(result.pop("published")), str(result.pop("why_not", "")), result)


def report_outcome(task: Task, published: bool, why_not: str = "", facts: Mapping[str, Any] | None = None) -> None:
    """Report the outcome of the snapshot to the user and as an event."""
    task.outcome.update(outcome := {"published": published, "why_not": why_not, **(facts or {})})
    if published:
        size = f"{plural(outcome['num_files'], 'file')}, {format_bytes(outcome['size_bytes'])}"
        say(f"environment {outcome['key'][:12]} is published as a snapshot: {size}")
    elif why_not:
        say(f"no snapshot of the environment was published: {why_not}")
    task.session.tracer.emit(EVENT, INSTANT, parent=task.session.span, attrs=task.outcome)


def report_unsafe(task: Task, reasons: Sequence[str], this_time: Sequence[str]) -> None:
    """Report that the setup is not snapshot-safe. `reasons` are what it does, which is marked in the store
    (`env.life.unsafe`); `this_time` is what happened while it ran."""
    report_outcome(task, False, f"this setup is not snapshot-safe: {'; '.join((*reasons, *this_time))}")
    task.unsafe = "; ".join(reasons)


def start_publishing(task: Task, publication: Publication) -> Publishing:
    """Start the background process. Raises `PermanentError` if it cannot be started."""
    background = start_background(
        lambda send: _publish(task, publication, send),
        name="bootseer-env",
        log=task.folder.path / "publish.log",
        niceness=_NICENESS,
    )
    return Publishing(task, background)


def _publish(task: Task, publication: Publication, send: Send) -> None:
    began_s = time.monotonic()
    key, num_changes = publication.key.digest[:12], len(publication.changes)
    _log.info("environment %s: %d changes are checked and written", key, num_changes)
    check = task.secret_check(publication.left_out)
    try:
        publication.validate()
        _write(task, publication, check, began_s, send)
    except UnsafeError as error:
        mark = unsafe.Mark(publication.key.digest, str(error), task.node, time.time(), error.conflicts)
        with contextlib.suppress(BootseerError), contextlib.closing(task.open_store()) as store:
            unsafe.write_mark(store, mark, check)
        raise


def _write(task: Task, publication: Publication, check: SecretCheck, began_s: float, send: Send) -> None:
    with contextlib.closing(task.open_store()) as store:
        done = publication.done
        written = write_snapshot(
            store,
            publication.changes,
            began_s=done.began_s,
            check=check,
            ended_s=done.ended_s,
            root=str(publication.root),
            is_loose=publication.division.is_loose if publication.division is not None else lambda path: False,
        )
        for line in written.left_out:
            send({"say": f"left out of the environment's snapshot: {line}"})
        document = _document(task, publication, written)
        if found := check.check_text("its document", document.encode()):
            raise_if_secret([found])
        catalog = Catalog(store, lambda line: send({"say": line}), task.signatures)
        published = catalog.publish(document, replace=publication.decision.replace)
        node_catalog = NodeCatalog(task.options.cache, lambda line: send({"say": line}))
        if published:
            node_catalog.keep(document, catalog.encode_signed(document))
            with contextlib.suppress(BootseerError):  # out of date, as with `--env refresh`
                store.delete(unsafe.mark_name(document.key))
        send(
            {
                "published": published,
                "why_not": "" if published else "another start published one first",
                "key": document.key,
                "digest": document.digest,
                "seconds": round(time.monotonic() - began_s, 3),
                "num_files": document.num_files,
                "size_bytes": document.size_bytes,
                "stored_bytes": sum(stored.size_bytes for stored in document.objects),
                "trust": document.trust,
            }
        )


def _document(task: Task, publication: Publication, written: Written) -> EnvironmentDocument:
    key, done, max_age_s = publication.key, publication.done, task.options.max_age_s
    if max_age_s is None and key.unpinned:
        max_age_s = UNPINNED_AGE_S
    return EnvironmentDocument(
        key=key.digest,
        components=key.components,
        file=written.file,
        manifest=written.manifest,
        loose=written.loose,
        digest=written.digest,
        roots=publication.division.roots if publication.division is not None else (),
        num_loose=len(publication.division.loose) if publication.division is not None else 0,
        num_files=written.num_files,
        size_bytes=written.size_bytes,
        packages=done.packages,
        exports=done.exports,
        platform=key.platform,
        trust=publication.trust,
        unaccounted=(),
        builder=task.node,
        version=__version__,
        built_s=time.time(),
        setup_s=done.seconds,
        max_age_s=None if max_age_s == math.inf else max_age_s,
        job=task.job,
        what=task.what,
        left_out=tuple(publication.left_out.reasons.values())[:MAX_LEFT_OUT],
        daemons=publication.daemons,
    )
