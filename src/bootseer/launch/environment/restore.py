"""Restore a snapshot instead of running the setup, and remove it from its store if it turns out to be bad.

    environment_quarantine      the snapshot was removed: the next start makes it anew

It is removed if reads found a part of it damaged or missing in the store, and if the command's failure points at it: by
a failed import in one of its processes (an event of the hook), or a processor fault before training began, as of code
that was built for another processor.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence

from msgspec.structs import replace

from bootseer.artifact.child import breaks_forks, run_in_child
from bootseer.artifact.objects import put
from bootseer.artifact.places import environments_folder
from bootseer.artifact.workload import is_publisher, workload_key
from bootseer.env.document import EnvironmentDocument, apply_exports
from bootseer.env.life.catalog import Catalog, NodeCatalog
from bootseer.env.life.decide import Decision
from bootseer.env.life.election import build_id
from bootseer.env.restoring import loose, placement
from bootseer.env.restoring.host import show_on_host
from bootseer.env.restoring.layer import LayerOptions, mount_layer
from bootseer.env.restoring.roots import is_system
from bootseer.env.snapshot.manifest import Entry, Manifest
from bootseer.errors import BootseerError, CorruptError, NotFoundError, PermanentError, TooShortError, TransientError
from bootseer.launch.environment.task import Task
from bootseer.launch.environment.view import EnvironmentUnavailable, PreparedEnvironment, must_copy_files
from bootseer.launch.observers import reporting_errors
from bootseer.launch.supervise import say
from bootseer.mounts.user_namespace import may_mount
from bootseer.trace.event import INSTANT, Event
from bootseer.trace.tracer import TRAINING_BEGAN
from bootseer.units import format_seconds, listed

EVENT = "environment_quarantine"
IMPORT_FAILED = "import_failed"
_EARLY_S = 60.0
_DAY_S = 86_400.0
_FAULTS = {128 + number: number.name for number in (signal.SIGILL, signal.SIGSEGV, signal.SIGBUS)}
_FALLBACKS = (
    ((loose.Conflict,), "conflict"),
    ((CorruptError, NotFoundError, TooShortError), "damaged"),
    ((TransientError,), "store-down"),
    ((BootseerError, OSError), "cannot-mount"),
)
"""Codes of `decide.FALLBACKS`, by error."""


def restore(task: Task, decision: Decision, command: Sequence[str], *, on_host: bool = True) -> PreparedEnvironment:
    """Mount the decision's snapshot, and copy the files that cannot be mounted.

    Without `on_host` only the snapshot's tree is mounted, to become a layer of an image.
    Raises `EnvironmentUnavailable`, with nothing left behind.
    """
    document = decision.document
    if document is None:
        raise EnvironmentUnavailable("failed", "there is a decision for a snapshot, and no snapshot")
    began_s = time.monotonic()
    prepared = PreparedEnvironment("restored", decision, apply_exports(document.exports, task.env))
    try:
        with task.stage("restore") as facts:
            if document.daemons:
                _check_daemons(task, document, on_host=on_host)
            _restore(task, document, command, prepared, on_host=on_host)
            if document.daemons:
                from bootseer.launch.environment.relaunch import END_S, start_daemons

                helper = start_daemons(task, document.daemons, prepared.enter)
                prepared.undo.callback(helper.stop, END_S)
            facts.update(key=document.key, way=prepared.facts.get("way"))
    except BaseException as error:
        prepared.undo.close()
        code = next((code for kinds, code in _FALLBACKS if isinstance(error, kinds)), None)
        if code is None:
            raise
        raise EnvironmentUnavailable(code, str(error)) from error
    seconds = time.monotonic() - began_s
    if document.daemons:
        prepared.facts["daemons"] = len(document.daemons)
    age_s = max(time.time() - document.built_s, 0.0)
    prepared.facts.update(
        key=document.key,
        digest=document.digest,
        builder=document.builder,
        trust=document.trust,
        age_s=round(age_s, 3),
        num_files=document.num_files,
        size_bytes=document.size_bytes,
        roots=len(document.roots),
        loose=document.num_loose,
    )
    say(
        f"environment {document.key[:12]} restored in {format_seconds(seconds)}: made {format_seconds(age_s)} ago by "
        f"{document.builder} in {format_seconds(document.setup_s)} ({decision.reason})"
    )
    _say_missing(document, on_host=on_host)
    return prepared


def _check_daemons(task: Task, document: EnvironmentDocument, *, on_host: bool) -> None:
    """Before any file is written: it would be in the way of the setup, which runs instead."""
    if task.options.daemons == "refuse" or not on_host:
        names = ", ".join(one.name for one in document.daemons)
        reason = "this start refuses them (--env-daemons)" if on_host else "they cannot be started in an image"
        raise EnvironmentUnavailable("daemons", f"the setup left processes running ({names}), and {reason}")
    from bootseer.launch.environment.relaunch import check_addresses

    check_addresses(document.daemons)


def _say_missing(document: EnvironmentDocument, *, on_host: bool) -> None:
    """Warn about credentials that the command may miss. The setup is not run to get them: a login belongs to the
    command or to the machine."""
    secret = [one.path for one in document.left_out if one.secret and not is_system(one.path)]
    missing = [path for path in secret if not (on_host and os.path.lexists(path))]
    if missing:
        where = "do not exist on this machine" if on_host else "are in no snapshot"
        say(
            f"credentials that the setup wrote {where}: {listed(missing)}; if the command needs them, let it log in "
            "itself, or pass them by a variable or a mount"
        )


def _restore(
    task: Task, document: EnvironmentDocument, command: Sequence[str], prepared: PreparedEnvironment, *, on_host: bool
) -> None:
    options = task.options
    identity, warm = task.session.tracer.identity, task.session.warm
    store = task.open_store()
    prepared.undo.callback(store.close)
    entries: Sequence[Entry] = ()
    written_out = on_host and must_copy_files()
    listed = document.manifest if written_out else document.loose
    if on_host and listed is not None:
        data = NodeCatalog(options.cache, say).object(listed, store)
        entries = Manifest.parse(data).entries
    layer_options = LayerOptions(
        cache=options.cache,
        runtime=options.runtime,
        workload=workload_key(command, role=task.env.get("ROLE_NAME", "")),
        publish=is_publisher(identity.node, identity.num_nodes),
        plain_http=options.plain_http,
        signatures=task.signatures,
        loading=options.loading,
        unpack=written_out,
        imports=warm.shared_path if warm is not None else None,
        process=warm.process if warm is not None else None,
    )
    layer = mount_layer(
        document, store, layer_options, stage=lambda name: task.stage(f"restore.{name}"), say=say, show=task.show
    )
    prepared.undo.enter_context(reporting_errors("the environment was not unmounted"))
    prepared.undo.callback(layer.close)
    prepared.layer = layer
    prepared.facts.update({name: layer.facts[name] for name in ("way", "stored_bytes", "local_bytes")})
    if not on_host:
        return
    with task.stage("restore.show"):
        if written_out:
            say("nothing can be mounted here: all files of the environment are copied to this machine's own folders")
        elif document.roots:
            user = not may_mount()
            view = show_on_host(layer.at, document.roots, changes=task.changes, user=user, say=say)
            prepared.undo.callback(view.close)
            prepared.enter = view.enter
        # Last, as these files stay: in the way of the setup, if it had to run after all.
        if entries:
            facts = environments_folder(options.cache) / "known"
            roots = () if written_out else document.roots
            placement.apply_plan(loose.plan(entries, layer.at, roots=roots, facts=facts), layer.at)


def suspect_snapshot(task: Task, document: EnvironmentDocument, code: int, seconds: float) -> None:
    """Remove the snapshot if there is evidence against it. The command ended with `code` after `seconds`."""
    if seconds > _EARLY_S:
        return
    events = task.session.tail().poll(last=True)
    if any(event.stage == TRAINING_BEGAN for event in events):
        return
    if not (reason := _evidence(events, code)):
        return
    if task.options.mode == "require" or not task.signatures.may_publish:
        # Starts like this one would have no environment without it, and the job may be at fault.
        say(f"{reason}: if the environment's snapshot {document.key[:12]} is at fault, --env refresh makes it anew")
    else:
        remove_snapshot(task, document, reason, once_a_day=True)


def remove_snapshot(task: Task, document: EnvironmentDocument, why: str, *, once_a_day: bool = False) -> None:
    """Remove a snapshot from its store, so that the next start makes it anew. One that another start has made meanwhile
    stays. `once_a_day`: it stays if one of its key was removed within a day, as then either the job is at fault, or the
    setup is not reproducible."""
    label = f"{why}: the environment's snapshot {document.key[:12]}"

    def remove() -> bool:
        with contextlib.closing(task.open_store()) as store:
            catalog = Catalog(store, say)
            # Before the look: it takes long in a registry, and another start may make a new one meanwhile.
            again = once_a_day and catalog.has_removed(document.key, time.time() - _DAY_S)
            found = catalog.look(document.key)
            if found.kind == "none" or (found.document is not None and build_id(found.document) != build_id(document)):
                return False
            if again:
                say(f"{label} is used further, as one was removed within the last day; --env refresh makes it anew")
                return False
            try:
                catalog.remove(document.key, time.time())
            except PermanentError:  # many registries do not support deletion; an expired snapshot is made anew, too
                expired = replace(document, max_age_s=0.0).encode()
                put(store, document.name, task.signatures.seal(document.name, expired))
            say(f"{label} is removed from its store: the next start makes it anew")
            return True

    try:
        # In a child if the store's client may have threads.
        if run_in_child(remove) if breaks_forks(task.store_uri) else remove():
            attrs = {"key": document.key, "why": why}
            task.session.tracer.emit(EVENT, INSTANT, parent=task.session.span, attrs=attrs)
    except BootseerError as error:
        say(f"{label} was not removed from its store: {error}; --env refresh makes it anew")


def _evidence(events: list[Event], code: int) -> str:
    for event in events:
        if event.stage == IMPORT_FAILED:
            module, message = (str(event.attrs.get(name) or "") for name in ("module", "message"))
            return f"an import failed ({module or 'unknown'}: {message})" if message else f"import {module} failed"
    return f"the command died by {_FAULTS[code]}" if code in _FAULTS else ""
