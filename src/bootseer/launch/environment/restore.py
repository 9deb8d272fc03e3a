"""Show the command a snapshot instead of running the setup, and judge the snapshot by how the command ends.

    environment_quarantine      the snapshot is suspected: the next start makes it anew

Evidence is an import that failed in one of the command's processes (the hook tells), or a fault of the processor before
training began: code that was built for another one.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence

from bootseer.artifact.child import breaks_forks, run_in_child
from bootseer.artifact.places import environments_folder
from bootseer.artifact.workload import is_publisher, workload_key
from bootseer.env.capturing import exports
from bootseer.env.document import EnvironmentDocument
from bootseer.env.life.decide import Decision
from bootseer.env.life.local import Local
from bootseer.env.life.quarantine import Quarantine
from bootseer.env.restoring import loose, place
from bootseer.env.restoring.host import show_on_host
from bootseer.env.restoring.layer import LayerOptions, mount_layer
from bootseer.env.restoring.roots import is_system
from bootseer.env.snapshot.manifest import Entry, Manifest
from bootseer.errors import BootseerError, CorruptError, NotFoundError, TransientError
from bootseer.launch.environment.task import Task
from bootseer.launch.environment.view import NotShown, Shown, writes_out
from bootseer.launch.observers import harmless
from bootseer.launch.supervise import say
from bootseer.mounts.user_namespace import may_mount
from bootseer.store.open import open_store
from bootseer.trace.event import INSTANT, Event
from bootseer.trace.spool_tail import SpoolTail
from bootseer.trace.tracer import TRAINING_BEGAN
from bootseer.units import format_seconds

EVENT = "environment_quarantine"
IMPORT_FAILED = "import_failed"
_SOON_S = 60.0
_FAULTS = {128 + number: number.name for number in (signal.SIGILL, signal.SIGSEGV, signal.SIGBUS)}
_MAX_NAMED = 3
_FALLBACKS = (
    ((loose.Conflict,), "conflict"),
    ((CorruptError, NotFoundError), "damaged"),
    ((TransientError,), "store-down"),
    ((BootseerError, OSError), "cannot-mount"),
)
"""What follows from which error: codes of `decide.FALLBACKS`."""


def restore(task: Task, decision: Decision, command: Sequence[str], *, on_host: bool = True) -> Shown:
    """Mount the decision's snapshot and write what cannot be mounted. Raises `NotShown`, with nothing left behind.

    Not `on_host`: only the snapshot's own tree is mounted, for an image to have it on top.
    """
    document = decision.document
    if document is None:
        raise NotShown("failed", "there is a decision for a snapshot, and no snapshot")
    began_s = time.monotonic()
    shown = Shown("restored", decision, exports.apply(document.exports, task.env))
    try:
        with task.stage("restore") as facts:
            _restore(task, document, command, shown, on_host=on_host)
            if document.daemons:
                _relaunch(task, document, shown, on_host=on_host)
            facts.update(key=document.key, way=shown.facts.get("way"))
    except BaseException as error:
        shown.undo.close()
        code = next((code for kinds, code in _FALLBACKS if isinstance(error, kinds)), None)
        if code is None:
            raise
        raise NotShown(code, str(error)) from error
    seconds = time.monotonic() - began_s
    if document.daemons:
        shown.facts["daemons"] = len(document.daemons)
    age_s = max(time.time() - document.built_s, 0.0)
    shown.facts.update(
        key=document.key,
        digest=document.digest,
        builder=document.builder,
        trust=document.trust,
        age_s=round(age_s, 3),
        saved_s=round(max(document.setup_s - seconds, 0.0), 3),
        num_files=document.num_files,
        size_bytes=document.size_bytes,
        roots=len(document.roots),
        loose=document.num_loose,
    )
    say(
        f"environment {document.key[:12]} restored in {format_seconds(seconds)}: made {format_seconds(age_s)} ago by "
        f"{document.builder} in {format_seconds(document.setup_s)} ({decision.words})"
    )
    _say_missing(document, on_host=on_host)
    return shown


def _relaunch(task: Task, document: EnvironmentDocument, shown: Shown, *, on_host: bool) -> None:
    names = ", ".join(one.name for one in document.daemons)
    if task.wanted.daemons == "refuse" or not on_host:
        reason = "this start does not want them (--env-daemons)" if on_host else "an image has none"
        raise NotShown("daemons", f"the setup left processes running ({names}), and {reason}")
    from bootseer.launch.environment.daemons import Relaunched

    daemons = Relaunched(task, document.daemons, shown.enter)
    shown.undo.callback(daemons.close)
    daemons.wait()


def _say_missing(document: EnvironmentDocument, *, on_host: bool) -> None:
    """Name the credentials that the command may miss. The setup is not run for their sake: it may do anything besides,
    and a login that is part of it belongs to the command or to the machine."""
    secret = [one.path for one in document.left_out if one.secret and not is_system(one.path)]
    missing = [path for path in secret if not (on_host and os.path.lexists(path))]
    if missing:
        more = f" and {len(missing) - _MAX_NAMED} more" if len(missing) > _MAX_NAMED else ""
        where = "are not on this machine" if on_host else "are in no snapshot"
        say(
            f"credentials that the setup wrote where it ran {where}: {', '.join(missing[:_MAX_NAMED])}{more}; if the "
            "command needs them, log in in the command itself, or give it a variable or a mount"
        )


def _restore(task: Task, document: EnvironmentDocument, command: Sequence[str], shown: Shown, *, on_host: bool) -> None:
    wanted = task.wanted
    identity = task.session.tracer.identity if task.session is not None else None
    warm = task.session.warm if task.session is not None else None
    store = open_store(task.store_uri, plain_http=wanted.plain_http)
    shown.undo.callback(store.close)
    entries: Sequence[Entry] = ()
    written_out = on_host and writes_out()
    listed = document.manifest if written_out else document.loose
    if on_host and listed is not None:
        data = Local(wanted.cache, say).object(listed, store)
        entries = Manifest.parse(data).entries
    bring = LayerOptions(
        cache=wanted.cache,
        runtime=wanted.runtime,
        workload=workload_key(command, role=task.env.get("ROLE_NAME", "")),
        publish=identity is None or is_publisher(identity.node, identity.num_nodes),
        plain_http=wanted.plain_http,
        signatures=task.signatures,
        loading=wanted.loading,
        unpack=written_out,
        imports=warm.shared_path if warm is not None else None,
    )
    layer = mount_layer(
        document, store, bring, stage=lambda name: task.stage(f"restore.{name}"), say=say, show=task.show
    )
    shown.undo.enter_context(harmless("the environment was not unmounted"))
    shown.undo.callback(layer.close)
    shown.layer = layer
    shown.facts.update({name: layer.facts[name] for name in ("way", "stored_bytes", "local_bytes")})
    if not on_host:
        return
    with task.stage("restore.show"):
        if entries:
            facts = environments_folder(wanted.cache) / "known"
            roots = () if written_out else document.roots
            place.apply(loose.plan(entries, layer.at, roots=roots, facts=facts), layer.at)
        if written_out:
            say("nothing can be mounted here: all files of the environment are written to this machine's own")
        elif document.roots:
            user = not may_mount()
            view = show_on_host(layer.at, document.roots, changes=task.changes, user=user, say=say)
            shown.undo.callback(view.close)
            shown.enter = view.enter


def suspect(task: Task, document: EnvironmentDocument, code: int, seconds: float) -> None:
    """Mark the snapshot, if there is evidence. The command had this exit code after so many seconds."""
    session = task.session
    if seconds > _SOON_S or session is None:
        return
    events = [event for event in SpoolTail(session.folder).poll(last=True) if session.owns(event)]
    if any(event.stage == TRAINING_BEGAN for event in events):
        return
    reason = _why(events, code)
    if not reason:
        return
    try:
        _mark(task, document, reason)
    except BootseerError as error:
        say(f"the environment's snapshot was not marked as suspected: {error}")
        return
    session.tracer.emit(EVENT, INSTANT, parent=session.span, attrs={"key": document.key, "why": reason})


def _why(events: list[Event], code: int) -> str:
    for event in events:
        if event.stage == IMPORT_FAILED:
            module, message = (str(event.attrs.get(name) or "") for name in ("module", "message"))
            return f"an import failed ({module or 'unknown'}: {message})" if message else f"import {module} failed"
    return f"the command died by {_FAULTS[code]}" if code in _FAULTS else ""


def _mark(task: Task, document: EnvironmentDocument, reason: str) -> None:
    def mark() -> None:
        with contextlib.closing(open_store(task.store_uri, plain_http=task.wanted.plain_http)) as store:
            quarantine = Quarantine(store, Local(task.wanted.cache, say).store, say)
            if quarantine.mark(document, task.node, reason, time.time()):
                message = "is suspected, the next start makes it anew"
            else:
                message = "is not at fault: made anew it was the same"
            say(f"{reason}: the environment's snapshot {document.key[:12]} {message}")

    if breaks_forks(task.store_uri):
        run_in_child(mark)
    else:
        mark()
